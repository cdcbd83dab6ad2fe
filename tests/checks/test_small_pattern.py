"""Small checks of sparse Jacobians: what they cost, and that wrong entries anywhere are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.checks import order
from fastgrad.checks.small_result import SmallCheck
from fastgrad.core.native import IS_NATIVE
from fastgrad.report.report import Report

Func = Callable[..., Tensor]

pytestmark = pytest.mark.skipif(not IS_NATIVE, reason="plain Python has no small checks")


def leaf(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, dtype=torch.float64, generator=generator) + 0.2).requires_grad_()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[SmallCheck | None]:
    """The small checks that have run."""
    found: list[SmallCheck | None] = []

    def noted(*arguments: Any) -> SmallCheck | None:
        found.append(small_check(*arguments))
        return found[-1]

    small_check = order.small_check
    monkeypatch.setattr(order, "small_check", noted)
    return found


def passing(small: list[SmallCheck | None], func: Func, *inputs: Tensor, **keywords: Any) -> Report:
    """The report of a check that passes in a small check of a pattern."""
    report = fastgrad.check(func, inputs, **keywords)
    assert report.verdict == "passed"
    assert small[-1] is not None
    assert small[-1].passes
    assert small[-1].pattern is not None
    return report


@pytest.mark.parametrize(
    ("func", "shapes", "column_groups", "row_groups"),
    [
        (torch.sin, ((100,),), 1, 1),
        (lambda x, y: x * y, ((20, 5), (20, 5)), 2, 1),
        (lambda x, y: x * y, ((50, 5), (50, 1)), 2, 5),
        (lambda x, y: torch.cat([x.exp(), y]), ((60,), (60,)), 1, 1),
        (lambda x: x.t().flip(0), ((8, 11),), 1, 1),
        (lambda x: x[:, [0, 0, 1]], ((40, 3),), 1, 2),
        (lambda x: (x.sin(), x.cos()), ((90,),), 1, 2),
    ],
)
def test_a_check_that_passes_compares_all_entries_of_the_pattern(
    small: list[SmallCheck | None], func: Func, shapes: tuple[Any, ...], column_groups: int, row_groups: int
) -> None:
    inputs = [leaf(*shape, seed=k) for k, shape in enumerate(shapes)]
    report = passing(small, func, *inputs)
    assert report.plan is not None
    assert report.plan.engine == "compressed"
    assert (report.plan.column_groups, report.plan.row_groups) == (column_groups, row_groups)
    # One evaluation each at the inputs, next to them and for a new graph, and five to seven along three directions.
    assert report.evaluations <= 3 + 7 + 2 * column_groups
    outputs = func(*inputs)
    count = len(outputs) if isinstance(outputs, tuple) else 1
    assert sum(pair.entries for pair in report.pairs) == _nonzero(func, inputs)
    assert all(pair.on_pattern and pair.agrees for pair in report.pairs)
    # Two one-hot rows per output; the kinds of grad_output, zeros and undefined ones, and each output alone.
    assert report.vjps <= row_groups + 2 * count + 10 + 2 * (count > 1) * count
    assert [certificate.claim.split(" outside")[0] for certificate in report.certificates] == [
        "the numerical entries",
        "the analytical entries",
    ]


def _nonzero(func: Func, inputs: list[Tensor]) -> int:
    """The number of entries of a pattern with one entry per output and input on which it depends."""
    jacobians = torch.autograd.functional.jacobian(func, tuple(inputs))
    if isinstance(jacobians[0], tuple):
        jacobians = [jacobian for row in jacobians for jacobian in row]
    return sum(int((jacobian != 0).sum()) for jacobian in jacobians)


def test_second_order(small: list[SmallCheck | None]) -> None:
    report = passing(small, torch.sin, leaf(100), order=2)
    assert report.plan is not None
    assert report.plan.column_groups == 2
    # Without a graph, and with negated grad_outputs, the gradients are computed once more each.
    assert report.evaluations <= 3 + 7 + 4 + 2


SIZE = 80
"""Number of elements; from 20 or so on, the pattern is tried."""

WRONG: dict[str, Func] = {
    "an entry on the pattern": lambda x: x.sin() * _one(x, 3, 1 + 1e-2, x.detach() * 0 + 1),
    "every entry": lambda x: x * x.detach(),
    "func depends on another input": lambda x: x.sin() + _at(3, 3e-5 * x.detach()[7]),
    "func depends on another input, close to the tolerance": lambda x: x.sin() + _at(3, 1.2e-5 * x.detach()[7]),
    "two that cancel": lambda x: x.sin() + _at(3, 1e-2 * (x.detach()[7] - x.detach()[8])),
    "backward depends on another input": lambda x: x.sin() + _at(3, 3e-5 * _only_backward(x)[7]),
    "two that cancel in backward": lambda x: x.sin() + 1e-2 * (_at(3, 1.0) - _at(5, 1.0)) * _only_backward(x)[7],
    "many small ones": lambda x: x.sin() + _at(3, 1e-4 * (x.detach() * (-1.0) ** torch.arange(SIZE)).sum()),
}


def _at(place: int, value: Any) -> Tensor:
    one = torch.zeros(SIZE, dtype=torch.float64)
    one[place] = 1.0
    return one * value


def _one(x: Tensor, place: int, factor: float, ones: Tensor) -> Tensor:
    """A factor that backward does not know: the value of func is multiplied, but not the gradient."""
    scale = ones.clone()
    scale[place] = 1 + (factor - 1) * x.detach()[place]
    return scale


def _only_backward(x: Tensor) -> Tensor:
    """Zeros whose gradient with respect to x is one."""
    return x - x.detach()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", WRONG)
def test_wrong_entries_anywhere_fail(small: list[SmallCheck | None], name: str, seed: int) -> None:
    func, x = WRONG[name], leaf(SIZE, seed=seed)
    assert not torch.autograd.gradcheck(func, (x,), raise_exception=False)
    report = fastgrad.check(func, (x,), seed=seed)
    assert report.verdict == "failed"
    assert small[-1] is not None
    assert small[-1].look is not None  # the pattern was tried


@pytest.mark.parametrize("wrong", range(2, 13))
@pytest.mark.parametrize("n", [60, 300])
def test_each_call_of_func_counts(n: int, wrong: int) -> None:
    calls = 0

    def func(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x.sin() * (1.01 if calls == wrong else 1.0)

    assert not fastgrad.gradcheck(func, (leaf(n),), raise_exception=False) or calls < wrong


@pytest.mark.parametrize("n", [40, 150])
def test_a_refuted_guess_costs_little(n: int) -> None:
    weight = (leaf(n, n, seed=1).detach() - 0.7) / n**0.5
    report = fastgrad.check(lambda x: (weight @ x).tanh(), (leaf(n),))
    assert report.passed
    assert report.plan is not None
    assert report.plan.engine == "dense"
    assert report.evaluations <= 2 * n + 4 + (2 * n + n) // 10


def test_a_func_that_accepts_only_single_steps() -> None:
    def func(x: Tensor) -> Tensor:
        if int((x.detach() != base).sum()) > 1:
            raise ValueError("planted")
        return x.sin()

    x = leaf(60)
    base = x.detach().clone()
    report = fastgrad.check(func, (x,))
    assert report.passed
    assert report.plan is not None
    assert report.plan.engine == "dense"


def test_memory_limit() -> None:
    report = fastgrad.check(torch.sin, (leaf(400),), memory_limit=8 * 400 * 5)
    assert report.passed
    assert report.plan is not None
    assert report.plan.engine == "dense"


@pytest.mark.parametrize("wrong", range(2, 25))
def test_a_value_that_is_compared_with_nothing_counts(wrong: int) -> None:
    """One noisy output ends the attempt after its first differences, before they are compared."""
    calls = 0
    offset = torch.zeros(60, dtype=torch.float64)
    offset[0] = 1e6

    def func(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        y = x.sin() * (1 + offset) + offset
        return y + _at_end(1e-2) if calls == wrong else y

    assert not fastgrad.gradcheck(func, (leaf(60),), raise_exception=False) or calls < wrong


def _at_end(value: float) -> Tensor:
    one = torch.zeros(60, dtype=torch.float64)
    one[-1] = value
    return one
