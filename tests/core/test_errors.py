"""Exceptions of fastgrad's own code are raised, and never reported as errors of func or of backward."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.core.errors import _is_of_compiled_module, raise_unless_of_func
from fastgrad.core.native import IS_NATIVE, ops
from fastgrad.problem.problem import Problem
from tests.planted.row import function

CUBE = function(lambda x: x**3, lambda g, x: 3 * x * x * g)


def leaf(*shape: int) -> Tensor:
    return torch.linspace(0.2, 0.9, torch.Size(shape).numel(), dtype=torch.float64).view(shape).requires_grad_()


def bug_in(file: str) -> Any:
    """A function that fails like a bug in a file of fastgrad."""
    path = Path(fastgrad.__file__).parent / file
    names: dict[str, Any] = {}
    exec(compile("def bug(*arguments, **keywords):\n    return {}[0]", str(path), "exec"), names)
    return names["bug"]


@pytest.mark.parametrize(
    ("name", "file", "keywords"),
    [
        pytest.param(
            "fastgrad.checks.small_sums.screening_grad_outputs",
            "engines/small_sketch.py",
            {"fast_mode": True},
            marks=pytest.mark.skipif(not IS_NATIVE, reason="plain Python has no small check"),
        ),
        ("fastgrad.checks.sketch.residual_row", "engines/sketch.py", {"fast_mode": True, "engine": "sketch"}),
        ("fastgrad.checks.sketch.directional_differences", "engines/sketch.py", {"fast_mode": True}),
        ("fastgrad.engines.compressed.analytical_entries", "engines/compressed.py", {"engine": "compressed"}),
        ("fastgrad.engines.compressed.numerical_entries", "engines/compressed.py", {"engine": "compressed"}),
        ("fastgrad.verdict.repeated_calls._cached_cotangents", "verdict/repeated_calls.py", {"engine": "compressed"}),
        ("fastgrad.verdict.repeated_calls._cached_cotangents", "verdict/repeated_calls.py", {"engine": "dense"}),
    ],
)
def test_a_bug_of_fastgrad_is_raised(
    name: str, file: str, keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if ".small_sums." not in name:
        monkeypatch.setattr("fastgrad.checks.order.small_check", lambda *_: None)
    assert fastgrad.check(CUBE, leaf(40), **keywords).passed
    monkeypatch.setattr(name, bug_in(file))
    with pytest.raises(KeyError):
        fastgrad.check(CUBE, leaf(40), **keywords)


def test_what_a_builtin_func_raises_is_an_error_of_func() -> None:
    dropout = partial(torch.native_dropout, p=0.0, train=True)
    keywords = {"check_forward_ad": True, "check_batched_forward_grad": True}
    with pytest.raises(fastgrad.GradcheckError, match="raises under vmap"):
        fastgrad.gradcheck(dropout, (leaf(3),), **keywords)


@pytest.mark.parametrize("keywords", [{}, {"fast_mode": True}, {"fast_mode": True, "check_forward_ad": True}])
def test_a_builtin_func_that_raises_next_to_the_inputs_fails_as_any_other(keywords: dict[str, Any]) -> None:
    at_the_edge = (2e-6 * torch.eye(30, dtype=torch.float64)).requires_grad_()
    for func in (torch.linalg.cholesky, lambda x: torch.linalg.cholesky(x)):
        assert not fastgrad.gradcheck(func, (at_the_edge,), raise_exception=False, **keywords)


def raised_by(run: Any) -> Exception:
    try:
        run()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_errors_of_func_and_backward_are_not_fastgrads() -> None:
    def func(x: Tensor) -> Tensor:
        raise KeyError(x)

    for checked in (func, lambda x: torch.mm(x, x), lambda x: x.view(7)):
        raise_unless_of_func(raised_by(lambda checked=checked: fastgrad.check(checked, leaf(3))))
    with pytest.raises(KeyError):
        raise_unless_of_func(raised_by(bug_in("verdict/confirm.py")))
    with pytest.raises(MemoryError):
        raise_unless_of_func(MemoryError())


@pytest.mark.skipif(not IS_NATIVE, reason="plain Python has no compiled module")
def test_wrong_arguments_of_the_compiled_module_are_a_bug() -> None:
    with Problem(CUBE, (leaf(3),)) as problem:
        problem._specs = None  # type: ignore[assignment]
        error = raised_by(lambda: problem.evaluate(True, torch.zeros(3, dtype=torch.float64)))
    with pytest.raises(TypeError, match="incompatible function arguments"):
        raise_unless_of_func(error)
    assert _is_of_compiled_module(raised_by(lambda: ops.compare(None)))
    assert not _is_of_compiled_module(raised_by(lambda: torch._C._nn.gelu(None)))
