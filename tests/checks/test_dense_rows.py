"""Dense rows and columns next to a sparse Jacobian are certified where one call each would take too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastgrad.checks.order import check
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings
from fastgrad.structure.sparsity import Pattern
from fastgrad.verdict.repeated_calls import MAX_CALLS
from tests.checks.test_compressed import normal
from tests.costs import set_costs

N = 300
Gradient = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every problem count as slow."""
    set_costs(monkeypatch, single_calls_seconds=0.0)


def scale(gradient: Gradient | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """X times one number; its backward cannot be differentiated. gradient: a wrong gradient, from x, w and grad."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        @once_differentiable  # type: ignore[misc, untyped-decorator]
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return gradient(x, w, grad) if gradient is not None else (grad * w, (grad * x).sum())

    return Scale.apply  # type: ignore[no-any-return]


def loss(gradient: Callable[[Tensor, Tensor], Tensor] | None = None) -> Callable[[Tensor], Tensor]:
    """The sum of squares; gradient: a wrong gradient, from y and grad."""

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            ctx.save_for_backward(y)
            return y.square().sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors
            return gradient(y, grad) if gradient is not None else 2 * grad * y

    return Loss.apply  # type: ignore[no-any-return]


def at(x: Tensor, place: int, factor: float) -> Tensor:
    """X with one element multiplied by a factor."""
    factors = torch.ones_like(x)
    factors[place] = factor
    return x * factors


def both(scaled: Callable[[Tensor, Tensor], Tensor], lost: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Outputs y and their loss, which has a dense row; the factor has a dense column."""

    def func(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = scaled(x, w)
        return y, lost(y)

    return func


def run(func: Callable[..., Any], *inputs: Tensor, n: int = N) -> Report:
    return check(func, inputs or (normal(n), normal(1).reshape(())), Settings(engine="compressed"))


def groups(report: Report) -> tuple[int | None, int | None]:
    assert report.plan is not None
    assert report.plan.engine == "compressed"
    return report.plan.column_groups, report.plan.row_groups


def test_a_loss_beside_its_outputs() -> None:
    report = run(lambda x: (x.tanh(), x.tanh().square().sum()), normal(N))
    assert report.passed
    assert groups(report) == (1, 1)
    assert report.notes == ("1 dense row certified by random vectors, not compared entry by entry",)
    claims = [certificate.claim for certificate in report.certificates]
    assert sum(claim.startswith("in 1 dense row, ") for claim in claims) == 2
    assert [(pair.output, pair.entries) for pair in report.pairs] == [(0, N)]


def test_a_shared_factor_whose_backward_cannot_be_differentiated() -> None:
    report = run(scale())
    assert report.passed
    assert groups(report) == (1, 1)
    assert "1 dense column certified" in report.notes[0]


def test_both_at_once_and_what_they_cost() -> None:
    report = run(both(scale(), loss()), n=20_000)
    assert report.passed
    assert groups(report) == (1, 1)
    assert report.evaluations + report.vjps <= 800


ALONE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str, int]] = {
    # function, inputs, the note, and the largest number of evaluations and VJPs
    "a loss": (lambda x: x.tanh().square().sum(), (normal(N),), "1 dense row", 60),
    "a few outputs": (lambda x: torch.stack([x.mean(), x.std(), x.norm()]), (normal(N),), "3 dense rows", 160),
    "a factor": (
        lambda w: scale()(torch.arange(1.0, N, dtype=w.dtype), w),
        (normal(1).reshape(()),),
        "1 dense column",
        80 + MAX_CALLS,
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_dense_rows_or_columns_alone(name: str) -> None:
    func, inputs, note, most = ALONE[name]
    report = run(func, *inputs)
    assert report.passed
    assert groups(report)[0] is not None
    assert report.notes == (f"{note} certified by random vectors, not compared entry by entry",)
    assert report.evaluations + report.vjps <= most


def test_a_wrong_loss_alone_is_named() -> None:
    report = run(loss(lambda y, grad: 2 * grad * at(y, 117, 0.0)), normal(N))
    assert report.failure is not None
    assert report.failure.comparison is not None
    worst = report.failure.comparison.worst
    assert worst is not None
    assert worst.input_index == (117,)


def test_many_dense_rows_are_compared_entry_by_entry() -> None:
    report = run(lambda x: x.softmax(0), normal(100))
    assert report.passed
    assert not report.notes


def test_a_short_check_is_exact_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    set_costs(monkeypatch, single_calls_seconds=1e9)
    report = run(lambda x: (x.tanh(), x.tanh().square().sum()), normal(N))
    assert groups(report) == (N, 2)
    assert not report.notes


def test_a_complex_loss_and_a_matrix() -> None:
    w = normal(1, dtype=torch.complex128).reshape(())
    report = run(both(torch.mul, lambda y: (y * y).sum()), normal(20, 15, dtype=torch.complex128), w)
    assert report.passed
    assert groups(report)[0] == 4  # of x and of w, their real and imaginary parts
    assert "2 dense rows certified" in report.notes[0]


WRONG: dict[str, tuple[Callable[..., Any], set[tuple[int, int | None]]]] = {
    # the function, and the pairs of output and input that the failure may name
    "an entry of the loss": (both(scale(), loss(lambda y, grad: 2 * grad * at(y, 117, 1.01))), {(1, 0), (1, 1)}),
    "an entry of the factor": (both(scale(lambda x, w, g: (g * w, (g * at(x, 117, 1.01)).sum())), loss()), {(0, 1)}),
    "the factor": (both(scale(lambda x, w, g: (g * w, 1.01 * (g * x).sum())), loss()), {(0, 1), (1, 1)}),
    "no gradient of the factor": (both(scale(lambda x, w, g: (g * w, torch.zeros_like(w))), loss()), {(0, 1), (1, 1)}),
    "an entry beside them": (both(scale(lambda x, w, g: (at(g * w, 117, 1.01), (g * x).sum())), loss()), {(0, 0)}),
    "shifted": (both(scale(lambda x, w, g: (g.roll(1) * w, (g * x).sum())), loss()), {(0, 0)}),
    "the loss squares its grad_output": (both(scale(), loss(lambda y, grad: 2 * grad.square() * y)), {(1, None)}),
    "the loss detached": (both(scale(), loss(lambda y, grad: torch.zeros_like(y))), {(1, 0), (1, 1)}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradients_fail(name: str) -> None:
    func, places = WRONG[name]
    report = run(func)
    assert report.failure is not None
    assert (report.failure.output, report.failure.input) in places
    if "entry" in name:
        assert report.failure.comparison is not None
        worst = report.failure.comparison.worst
        assert worst is not None
        assert 117 in (*worst.output_index, *worst.input_index)


def test_what_random_vectors_leave_undecided_is_compared_entry_by_entry() -> None:
    func = both(scale(), loss(lambda y, grad: 2.001 * grad * y))  # within the tolerance in all entries
    report = run(func)
    assert report.passed
    assert report.undecided is None
    assert not report.notes
    assert groups(report)[0] == N + 1


def test_few_rows_that_are_far_fuller_are_dense() -> None:
    full = set(range(3, 93, 10))  # nine
    lists = [np.arange(1000) if row in full else np.array([row, row + 1]) for row in range(300)]
    starts = np.concatenate([[0], np.cumsum([row.size for row in lists])])
    pattern = Pattern(starts, np.concatenate(lists), 1000, "")
    assert set(np.flatnonzero(pattern.dense_rows())) == full
    thin = pattern.without(pattern.dense_rows(), None)
    assert (thin.nnz, thin.m, thin.n) == (582, 300, 1000)
    assert not thin.dense_rows().any()
    assert not pattern.dense_columns().any()
    assert thin.without(None, np.arange(1000) < 295).nnz == 11
    assert Pattern(starts[:91], pattern.columns[: starts[90]], 1000, "").dense_rows().sum() == 0  # nine of ninety


def weighed(weight: float, offset: float, factor: float) -> Callable[[Tensor], Tensor]:
    """A loss with an entry of this weight, and another entry whose gradient is off by a factor."""

    class Weighed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            ctx.save_for_backward(y)
            return offset + (at(y, 0, weight) * y).sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors
            return 2 * grad * at(at(y, 0, weight), 117, factor)

    return Weighed.apply  # type: ignore[no-any-return]


@pytest.mark.parametrize(("weight", "offset"), [(1.0, 0.0), (1e6, 0.0), (1.0, 1e7), (1e3, 1e5)])
@pytest.mark.parametrize("beside", [False, True])
def test_a_small_entry_beside_a_large_one(weight: float, offset: float, beside: bool) -> None:
    def run_with(factor: float) -> Report:
        lost = weighed(weight, offset, factor)
        return run((lambda x: (x.tanh(), lost(x))) if beside else lost, normal(N))

    assert run_with(1.0).passed
    report = run_with(1.01)
    assert report.failure is not None
    assert report.failure.comparison is not None
    worst = report.failure.comparison.worst
    assert worst is not None
    assert worst.input_index == (117,)


def test_what_noise_lets_through_is_said() -> None:
    report = run(weighed(1e9, 0.0, 1.0), normal(N))
    assert report.passed
    assert groups(report)[0] == 1
    assert report.verdict == "undecided"
    assert report.undecided == report.certificates[0].bound
    assert report.undecided > 1e-3


def test_no_dense_column_is_none() -> None:
    clamped = loss(lambda y, grad: 2 * grad.clamp(-10, 10) * y)
    report = run(lambda x, w: (x.tanh(), clamped(scale()(x, w))))
    assert report.passed
    assert not any(note.startswith("0 ") for note in report.notes)
