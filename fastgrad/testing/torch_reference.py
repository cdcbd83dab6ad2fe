"""Calls torch's own checkers for comparison, in this module only; fastgrad's verdicts do not depend on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch.autograd.gradcheck import GradcheckError

from fastgrad.problem.arguments import as_tuple
from fastgrad.problem.caller_state import restores_caller_state
from fastgrad.problem.second_order import grad_outputs_for

Value = TypeVar("Value")

_asking: ContextVar[bool] = ContextVar("fastgrad_asks_torch", default=False)

_OWN_KEYWORDS = (
    *("engine", "seed", "confidence", "memory_limit", "progress"),
    *("reference", "reference_device", "precision"),
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check.

    Attributes
    ----------
    verdict
        "passed", "failed", or "raised" if an exception prevented a verdict.
    error
        The exception of a check that did not pass.
    seconds
        Wall time.
    """

    verdict: Literal["passed", "failed", "raised"]
    error: Exception | None
    seconds: float


def outcome_of(check: Callable[[], object]) -> Outcome:
    """Runs a check that raises if it fails; returns its outcome."""
    __tracebackhide__ = True
    start = time.perf_counter()
    try:
        check()
    except GradcheckError as error:
        return Outcome("failed", error, time.perf_counter() - start)
    except Exception as error:
        return Outcome("raised", error, time.perf_counter() - start)
    return Outcome("passed", None, time.perf_counter() - start)


def is_calling_torch() -> bool:
    """Whether this module is calling a checker of torch, which must then run even if it is patched."""
    return _asking.get()


@restores_caller_state  # torch's checker leaves inputs perturbed if func raises
def torch_gradcheck(func: Callable[..., Any], inputs: Any, **keywords: Any) -> Outcome:
    """The outcome of torch's gradcheck for the same call, without keywords that only fastgrad has."""
    keywords = _spelled_for_torch(keywords)
    with setting(_asking, True):
        return outcome_of(lambda: torch.autograd.gradcheck(func, inputs, **keywords))


@restores_caller_state
def torch_gradgradcheck(func: Callable[..., Any], inputs: Any, grad_outputs: Any = None, **keywords: Any) -> Outcome:
    """The outcome of torch's gradgradcheck for the same call, without keywords that only fastgrad has."""
    keywords = _spelled_for_torch(keywords)

    def check() -> None:
        with_ones = isinstance(grad_outputs, str) and grad_outputs == "ones"
        grads = grad_outputs_for(func, as_tuple(inputs), "ones", 0) if with_ones else grad_outputs
        torch.autograd.gradgradcheck(func, inputs, grads, **keywords)

    with setting(_asking, True):
        return outcome_of(check)


@contextmanager
def setting(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """A context in which a context variable has another value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _spelled_for_torch(keywords: dict[str, Any]) -> dict[str, Any]:
    spelled = {name: value for name, value in keywords.items() if name not in _OWN_KEYWORDS}
    masked, old_name = spelled.pop("masked", None), spelled.pop("check_sparse_nnz", None)
    if masked is not None or old_name is not None:
        spelled["masked"] = old_name if masked is None else masked
    return spelled | {"raise_exception": True}
