"""Re-measuring entries that differ at eps: what a few steps decide, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings
from fastgrad.verdict.confirm import entries_failure
from tests.planted.row import function


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def wrong_entries(
    func: Callable[[Tensor], Tensor], x: Tensor, analytical: list[float], numerical: list[float]
) -> set[tuple[int, ...]]:
    """The input indices of the diagonal entries that are reported as wrong."""
    places = torch.arange(x.numel())
    values = (torch.tensor(entries, dtype=torch.float64) for entries in (analytical, numerical))
    with Problem(func, (x,)) as problem:
        failure, _ = entries_failure(problem, Settings(), places, places, *values)
    if failure is None:
        return set()
    assert failure.comparison is not None
    return {entry.input_index for entry in failure.comparison.worst_entries}


def coupled(x: Tensor) -> Tensor:
    """Two strongly curved outputs, each with five times the other input added; and the third element."""
    curved = x + 1e11 * (x - torch.tensor([0.3, 0.4, 0.5], dtype=x.dtype)) ** 3
    return torch.stack([curved[0] + 5 * x[1], curved[1] + 5 * x[0], x[2]])


def test_entries_that_look_wrong_together_only_are_right() -> None:
    assert not wrong_entries(coupled, leaf(0.3, 0.4, 0.5), [1.0, 1.0, 1.0], [1.1, 1.1, 1.0])


def test_an_entry_that_is_a_little_wrong_beside_such_ones_is_found() -> None:
    assert wrong_entries(coupled, leaf(0.3, 0.4, 0.5), [1.0, 1.0, 1.005], [1.1, 1.1, 1.0]) == {(2,)}


@pytest.mark.parametrize("distance", [1e-11, 1e-10, 1e-9, 1e-8, 1e-7])
@pytest.mark.parametrize("func", [torch.relu, torch.abs, lambda x: torch.clamp(x, max=0.0)])
def test_next_to_a_kink_right_gradients_pass(func: Callable[[Tensor], Tensor], distance: float) -> None:
    assert fastgrad.gradcheck(func, (leaf(distance, -distance, 0.5),))


@pytest.mark.parametrize("frequency", [1e5, 1e6])
def test_right_gradients_of_waves_shorter_than_eps_pass(frequency: float) -> None:
    assert fastgrad.gradcheck(lambda x: (frequency * x).sin() / frequency + x, (leaf(0.1, 0.2),))


@pytest.mark.parametrize(("keywords", "calls"), [({}, (16, 6)), ({"fast_mode": True}, (16, 6))])
def test_a_verdict_of_failure_takes_a_few_steps(keywords: dict[str, Any], calls: tuple[int, int]) -> None:
    made = [0, 0]

    def forward(x: Tensor) -> Tensor:
        made[0] += 1
        return x.sin()

    def backward(grad_output: Tensor, x: Tensor) -> Tensor:
        made[1] += 1
        return 1.5 * grad_output * x.cos()

    assert not fastgrad.gradcheck(function(forward, backward), (leaf(0.3),), raise_exception=False, **keywords)
    assert tuple(made) == calls


@pytest.mark.parametrize("call", [2, 3, 4, 6])
@pytest.mark.parametrize("keywords", [{}, {"engine": "dense"}, {"fast_mode": True}], ids=str)
@pytest.mark.parametrize("n", [3, 40])
def test_a_func_that_returns_other_values_in_one_call_fails(n: int, keywords: dict[str, Any], call: int) -> None:
    made = 0

    def func(x: Tensor) -> Tensor:
        nonlocal made
        made += 1
        return x.sin() * (1.01 if made == call else 1.0)

    x = torch.linspace(0.3, 0.6, n, dtype=torch.float64).requires_grad_()
    assert not fastgrad.gradcheck(func, (x,), raise_exception=False, **keywords)


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("n", [3, 40])
@pytest.mark.parametrize("offset", [1e6, 1e7, 1e8])
def test_a_func_that_rounds_otherwise_from_run_to_run_is_right(offset: float, n: int, fast_mode: bool) -> None:
    """Like sums by atomic operations on a GPU."""
    generator = torch.Generator().manual_seed(0)

    def forward(x: Tensor) -> Tensor:
        y = x + offset
        is_up = torch.rand(y.shape, generator=generator) < 0.5
        return torch.where(is_up, torch.nextafter(y, torch.full_like(y, torch.inf)), y)

    x = torch.linspace(0.1, 0.9, n, dtype=torch.float64).requires_grad_()
    func = function(forward, lambda grad_output, _: grad_output)
    assert fastgrad.gradcheck(func, (x,), fast_mode=fast_mode, nondet_tol=1e-3)


@pytest.mark.parametrize("error", [1e-4, 1.0])
def test_entries_that_differ_by_rounding_beside_a_wrong_one_are_unclear(error: float) -> None:
    """With an offset of 1e5, values are multiples of 1.5e-11, and differences at eps multiples of 7e-6."""
    factor = torch.ones(40, dtype=torch.float64)
    factor[7] += error
    func = function(lambda x: x + 1e5, lambda g, x: factor * g)
    x = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    report = fastgrad.check(func, x, engine="dense", atol=1e-6, rtol=0.0)
    found = report.failure.comparison
    assert found.worst.input_index == (7,)
    assert found.mismatches > 1
    assert found.mismatches - found.unclear == 1


@pytest.mark.parametrize("big", [-6e7, -6.6e7, 6e7])
def test_rounding_of_another_output_is_unclear(big: float) -> None:
    """The differences of output 1 are multiples of 7.5e-3. Output 0 has the wrong entry, and no rounding."""
    slopes = torch.tensor([2.5, 2.69], dtype=torch.float64)
    func = function(lambda x: torch.stack([x[0] * 2, big + 2.69 * x[1]]), lambda g, x: slopes * g)
    found = fastgrad.check(func, leaf(1.0, 0.3)).failure.comparison
    assert found.mismatches - found.unclear == 1


def test_a_check_that_ends_after_some_columns_says_at_least() -> None:
    def backward(grad: Tensor, x: Tensor) -> Tensor:
        gradient = 2 * x * grad
        gradient[3] += grad[5]
        gradient[60] += grad[63]
        return gradient

    func, x = function(torch.square, backward), leaf(*torch.linspace(1, 2, 64).tolist())
    for limit, counts in ((None, (2, 4096, True)), (8 * 64 * 8, (1, 4096, False))):
        report = fastgrad.check(func, x, engine="dense", memory_limit=limit)
        found = report.failure.comparison
        assert (found.mismatches, found.entries, found.exhaustive) == counts
        assert ("at least 1 of 4,096 entries" in str(report)) is (limit is not None)
        assert report.pairs[0].exhaustive is (limit is None)


def test_entries_that_are_clearly_wrong_are_counted() -> None:
    func = function(lambda x: x**3, lambda g, x: 3.01 * x**2 * g)
    found = fastgrad.check(func, leaf(*torch.linspace(0.1, 2, 40).tolist()), engine="dense").failure.comparison
    assert (found.mismatches, found.unclear) == (40, 0)


def test_the_largest_error_is_the_largest_finite_one() -> None:
    def backward(grad_output: Tensor, x: Tensor) -> Tensor:
        gradient = grad_output * x.cos()
        gradient[3] = torch.nan
        return gradient

    x = torch.linspace(0.1, 0.9, 60, dtype=torch.float64).requires_grad_()
    for fast_mode in (False, True):
        report = fastgrad.check(function(torch.sin, backward), (x,), fast_mode=fast_mode)
        assert report.failure is not None
        assert report.failure.comparison is not None
        assert math.isfinite(report.failure.comparison.largest_absolute)


@pytest.mark.parametrize("keywords", [{"engine": "dense"}, {"engine": "compressed"}, {"fast_mode": True}])
@pytest.mark.parametrize("size", [4, 20])
def test_rounding_hides_small_entries_but_not_a_large_wrong_one(size: int, keywords: dict[str, Any]) -> None:
    """A derivative of 1e15 is lost; the values are so large that rounding hides the other derivatives, which are 1."""
    x = torch.linspace(0.1, 0.9, size, dtype=torch.float64).requires_grad_()
    report = fastgrad.check(lambda x: x.sum() + 1e15 * x.detach()[1], (x,), **keywords)
    assert report.verdict == "failed", str(report)
    assert report.failure is not None
    assert report.failure.comparison is not None
    assert report.failure.comparison.worst.input_index == (1,)
    assert "wrong in at least 1 of" in str(report)
    right = fastgrad.check(lambda x: x.sum() + 1e15 * x[1], (x,), **keywords)
    assert right.verdict == "not converged", str(right)
    assert any("rounding hides the change of func" in cause.text for cause in right.causes)


class MaskedCube(torch.autograd.Function):
    """The sum of cubes of a CSR tensor; backward returns `beside` at unspecified elements, and is off at [1, 0]."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, beside: float, factor: float) -> Tensor:
        ctx.save_for_backward(s)
        ctx.beside, ctx.factor = beside, factor
        return s.to_dense().pow(3).sum()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        values = ctx.saved_tensors[0].to_dense()
        gradient = torch.where(values == 0, ctx.beside, 3 * values * values)
        gradient[1, 0] *= ctx.factor
        return gradient * grad_output, None, None


@pytest.mark.parametrize(
    ("beside", "factor", "worst", "says"),
    [
        (0.5, 1.0, (0, 0), True),  # only elements that are not specified
        (0.5, 1.25, (0, 0), True),
        (1e-3, 1.5, (1, 0), False),  # the specified element exceeds its tolerance more
    ],
)
def test_the_reason_is_that_of_the_entry_shown(
    beside: float, factor: float, worst: tuple[int, int], says: bool
) -> None:
    dense = torch.tensor([[0.0, 1.5], [3.0, 0.0]], dtype=torch.float64)
    inputs = (dense.to_sparse_csr().requires_grad_(), beside, factor)
    with pytest.raises(fastgrad.GradcheckError) as raised:
        fastgrad.gradcheck(MaskedCube.apply, inputs, masked=True)
    failure = raised.value.report.failure
    comparison = failure.comparison
    assert comparison.worst.input_index == worst
    assert comparison.largest_absolute == pytest.approx(max(beside, 27 * (factor - 1)), rel=1e-6)
    assert ("does not specify" in failure.detail) == says
    assert comparison.mismatches == 1 + (factor != 1)
    assert comparison.extent.input[0].count == (1 if factor == 1 else 2)


def test_a_gradient_within_its_tolerance_at_unspecified_elements_passes() -> None:
    dense = torch.tensor([[0.0, 1.5], [3.0, 0.0]], dtype=torch.float64)
    # VJPs also run for multiples of a grad_output, whose gradients are as many times larger.
    inputs = (dense.to_sparse_csr().requires_grad_(), 5e-6, 1.0)
    assert fastgrad.gradcheck(MaskedCube.apply, inputs, masked=True, atol=1e-5)


class MaskedSine(torch.autograd.Function):
    """The sine of a sparse vector; backward adds `value` times grad_output[row] at an unspecified element."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, row: int, element: int, value: float) -> Tensor:
        ctx.save_for_backward(s)
        ctx.wrong = row, element, value
        return s.to_dense().sin()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        values, (row, element, value) = ctx.saved_tensors[0].to_dense(), ctx.wrong
        gradient = torch.where(values == 0, 0.0, values.cos() * grad_output)
        gradient[element] += value * grad_output[row]
        return gradient, None, None, None


@pytest.mark.parametrize("row", [0, 4000, 6000])
def test_fast_mode_names_a_gradient_at_an_unspecified_element(row: int) -> None:
    """The Jacobian is too large to compare every entry."""
    dense = torch.linspace(0.5, 1.5, 6001, dtype=torch.float64)
    dense[1::2] = 0.0
    inputs = (dense.to_sparse().requires_grad_(), row, 4001, 1e-3)
    report = fastgrad.check(MaskedSine.apply, inputs, masked=True, fast_mode=True)
    worst = report.failure.comparison.worst
    assert (worst.output_index, worst.input_index) == ((row,), (4001,))
    assert worst.analytical == pytest.approx(1e-3)
    assert "a gradient must be zero at elements" in str(report)


@pytest.mark.parametrize("n", [4, 6, 12, 48])
def test_entries_next_to_near_ties_are_not_counted_as_wrong(n: int) -> None:
    """Their differences at eps are not their derivatives, and only one other entry is wrong."""

    class SquaredSort(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            values, order = x.sort()
            ctx.save_for_backward(values, order)
            return values * values

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            values, order = ctx.saved_tensors
            gradient = torch.zeros_like(values).index_copy_(0, order, 2 * values * grad)
            gradient[order[-1]] += 0.1 * grad[-1]
            return gradient

    x = torch.arange(1, n + 1, dtype=torch.float64) / n
    x[1], x[3] = x[0] + 1e-7, x[2] + 1e-7
    report = fastgrad.check(SquaredSort.apply, x.requires_grad_())
    assert report.failure is not None
    assert report.failure.comparison is not None
    assert report.failure.comparison.mismatches - report.failure.comparison.unclear == 1
    assert "wrong in at least 1 of" in str(report)
    assert not any("of the outputs that" in cause.text for cause in report.causes)
