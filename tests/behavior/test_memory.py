"""A check keeps neither func and inputs nor memory after its end; benchmarks/soak.py is a long test of this."""

from __future__ import annotations

import gc
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from benchmarks.soak import MIX
from fastgrad.checks.order import check
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Disables garbage collection: objects that are released nevertheless are in no reference cycle."""
    gc.disable()
    yield
    gc.enable()


def leaf() -> Tensor:
    return torch.linspace(0.2, 0.9, 4, dtype=torch.float64).requires_grad_()


def raising(x: Tensor) -> Tensor:
    raise ArithmeticError("planted")


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    ("checker", "keywords"),
    [
        (fastgrad.gradcheck, {}),
        (fastgrad.gradcheck, {"check_forward_ad": True}),
        (fastgrad.gradcheck, {"check_batched_grad": True}),
        (fastgrad.gradgradcheck, {}),
        (fastgrad.gradgradcheck, {"check_fwd_over_rev": True}),
    ],
)
@pytest.mark.parametrize(
    ("body", "error"),
    [(torch.sin, None), (lambda x: x.detach() * x, fastgrad.GradcheckError), (raising, ArithmeticError)],
    ids=["passes", "fails", "raises"],
)
def test_func_and_inputs_are_released(
    checker: Callable[..., bool], keywords: dict[str, Any], body: Any, error: type[Exception] | None
) -> None:
    def attempt() -> list[weakref.ref[Any]]:
        x = leaf()
        func = lambda v: body(v)  # noqa: E731  (a new object in each attempt)
        raised: type[Exception] | None = None
        try:
            checker(func, x, **keywords)
        except Exception as caught:
            raised = type(caught)
        assert raised is error
        return [weakref.ref(x), weakref.ref(func)]

    attempt()  # torch sets up forward-mode formulas when they are first used
    assert [reference() for reference in attempt()] == [None, None]


FUNCTIONS: dict[str, Callable[[Any, Tensor], object]] = {
    "exact": lambda func, x: fastgrad.gradcheck(func, (x,)),
    "dense": lambda func, x: fastgrad.gradcheck(func, (x,), engine="dense"),
    "compressed": lambda func, x: fastgrad.gradcheck(func, (x,), engine="compressed"),
    "sketch": lambda func, x: fastgrad.gradcheck(func, (x,), fast_mode=True, engine="sketch"),
    "forward": lambda func, x: fastgrad.gradcheck(func, (x,), check_forward_ad=True),
    "second order": lambda func, x: fastgrad.gradgradcheck(func, (x,)),
    "numerical Jacobian": lambda func, x: fastgrad.numerical_jacobian(func, (x,)),
    "analytical Jacobian": lambda func, x: fastgrad.analytical_jacobian(func, (x,)),
    "functional": lambda func, x: fastgrad.functional.jacobian(func, (x,)),
    "adjoint test": lambda func, x: fastgrad.adjoint_test(func, (x,)),
    "Taylor test": lambda func, x: fastgrad.taylor_test(func, (x,)),
}


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("run", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_of_400_elements_and_their_inputs_are_released(run: Callable[[Any, Tensor], object]) -> None:
    def attempt() -> list[weakref.ref[Any]]:
        x = torch.linspace(-1, 1, 400, dtype=torch.float64).reshape(20, 20).requires_grad_()

        def func(x: Tensor) -> Tensor:
            return x.softmax(-1)

        run(func, x)
        return [weakref.ref(x), weakref.ref(func)]

    assert [released() for released in attempt()] == [None, None]


@pytest.mark.usefixtures("no_collection")
def test_a_report_holds_neither() -> None:
    def attempt() -> tuple[Report, list[weakref.ref[Any]]]:
        x = leaf()
        func = lambda v: v.detach() * v  # noqa: E731
        return check(func, (x,), Settings()), [weakref.ref(x), weakref.ref(func)]

    attempt()  # as above
    report, references = attempt()
    assert not report.passed
    assert [reference() for reference in references] == [None, None]


def test_memory_does_not_grow() -> None:
    def run(checks: int) -> tuple[int, int]:
        for each in islice(cycle(MIX.values()), checks):
            each()
        gc.collect()
        return tracemalloc.get_traced_memory()[0], len(gc.get_objects())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tracemalloc.start()
        try:
            run(100)
            size, objects = run(100)
            later_size, later_objects = run(300)
        finally:
            tracemalloc.stop()
    assert later_objects - objects < 30  # one object per ten checks would be 30
    assert later_size - size < 64 * 1024  # about 200 bytes per check: Python's free lists fill up slowly
