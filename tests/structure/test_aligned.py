"""Patterns of aligned dimensions: compared with Jacobians of operators; their cost and their findings in a check."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fastgrad
from fastgrad.structure.aligned import Alignment, align, probes_to_align
from fastgrad.structure.sparsity import Pattern
from tests.structure.test_sparsity import blocks, dense, oracle

Func = Callable[..., Any]
Shapes = tuple[tuple[int, ...], ...]


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def matrix_of(func: Func, shapes: Shapes) -> tuple[np.ndarray, Shapes]:
    """The nonzero entries of the Jacobian of func, and the shapes of its outputs."""
    inputs = tuple(normal(*shape, seed=k) for k, shape in enumerate(shapes))

    def outputs(*inputs: Tensor) -> tuple[Tensor, ...]:
        found = func(*inputs)
        return found if isinstance(found, tuple) else (found,)

    found = outputs(*inputs)
    rows = torch.autograd.functional.jacobian(outputs, inputs)
    flat = [torch.cat([one.reshape(y.numel(), -1) for one in row], 1) for y, row in zip(found, rows, strict=True)]
    return (torch.cat(flat) != 0).numpy(), tuple(tuple(y.shape) for y in found)


def guessed(func: Func, shapes: Shapes) -> tuple[np.ndarray, Pattern | None]:
    matrix, results = matrix_of(func, shapes)
    return matrix, pattern_of(align(oracle(matrix)[0], blocks(*shapes), blocks(*results), lambda _: True))


def pattern_of(alignment: Alignment | None) -> Pattern | None:
    """The pattern, if there is one; its rows are no longer than the alignment says without it."""
    if alignment is None:
        return None
    assert alignment.pattern.most_in_row == alignment.most_in_row
    return alignment.pattern


@pytest.mark.parametrize(
    ("func", "shapes"),
    [
        pytest.param(lambda x: x.softmax(-1), ((5, 6),), id="softmax"),
        pytest.param(lambda x: x.softmax(0), ((6, 5),), id="softmax of columns"),
        pytest.param(torch.mm, ((4, 5), (5, 3)), id="matrix product"),
        pytest.param(torch.mm, ((4, 4), (4, 4)), id="square matrix product"),
        pytest.param(lambda x, y: torch.einsum("bij,bjk->bki", x, y), ((3, 4, 5), (3, 5, 2)), id="batch, transposed"),
        pytest.param(lambda x: x.sum(0), ((5, 6),), id="sum"),
        pytest.param(lambda x: (x.sum(0), x.sum(1)), ((5, 6),), id="two sums"),
        pytest.param(lambda x, y: (2 * x, y.exp()), ((4,), (4,)), id="apart"),
        pytest.param(lambda x, w: x * w.sum(), ((4,), (2,)), id="a dense column"),
        pytest.param(lambda x, w: F.layer_norm(x, (6,), w), ((5, 6), (6,)), id="layer norm"),
        pytest.param(torch.inverse, ((3, 4, 4),), id="batch of inverses"),
        pytest.param(torch.diag_embed, ((5,),), id="onto a diagonal"),
        pytest.param(torch.diagonal, ((5, 5),), id="a diagonal"),
        pytest.param(torch.cdist, ((5, 3), (4, 3)), id="distances"),
        pytest.param(lambda x: x.transpose(1, 2).cumsum(0), ((3, 4, 5),), id="transposed"),
    ],
)
def test_the_pattern_is_that_of_the_jacobian(func: Func, shapes: Shapes) -> None:
    matrix, pattern = guessed(func, shapes)
    assert pattern is not None
    found = dense(pattern)
    assert (found | ~matrix).all()
    assert found.sum() <= 1.7 * matrix.sum()
    lists = [pattern.columns[first:last] for first, last in zip(pattern.starts, pattern.starts[1:], strict=False)]
    assert all((np.diff(row) > 0).all() for row in lists)


@pytest.mark.parametrize(
    "func",
    [
        pytest.param(lambda x: x.cumsum(0), id="sums of those before"),
        pytest.param(lambda x: x.flip(0).cumsum(0).flip(0), id="sums of those after"),
        pytest.param(lambda x: x.flip(0), id="reversed"),
        pytest.param(lambda x: x + x.roll(1), id="neighbors"),
        pytest.param(lambda x: x + x.roll(4), id="halves"),
        pytest.param(lambda x: x.view(2, 4).softmax(1).view(8), id="groups"),
        pytest.param(torch.sum, id="no dimension"),
        pytest.param(lambda x: (x.exp(), x.sum()), id="a dense row"),
    ],
)
def test_no_alignment(func: Func) -> None:
    assert guessed(func, ((8,),))[1] is None


@pytest.mark.parametrize("empty", [(0,), (4, 0), (0, 4)])
def test_blocks_without_elements(empty: tuple[int, ...]) -> None:
    matrix, shapes = np.eye(16, dtype=np.bool_), ((4, 4), empty)
    pattern = pattern_of(align(oracle(matrix)[0], blocks(*shapes), blocks(*shapes), lambda _: True))
    assert pattern is not None
    assert np.array_equal(dense(pattern), matrix)


def test_complex_elements_have_two_coordinates() -> None:
    complex_blocks = partial(blocks, dtype=torch.complex128)
    respond = lambda moved: moved.reshape(3, 8).any(1).repeat(2)  # noqa: E731
    pattern = pattern_of(align(respond, complex_blocks((3, 4)), complex_blocks((3,)), lambda _: True))
    assert pattern is not None
    assert np.array_equal(dense(pattern), np.kron(np.eye(3, dtype=bool), np.ones((2, 8), dtype=bool)))


def test_one_evaluation_per_dimension_whose_size_an_output_has() -> None:
    assert probes_to_align(blocks((4, 5), (5, 3), (7,)), blocks((4, 3))) == 2
    assert probes_to_align(blocks((4, 5), (1,)), blocks((1, 20))) == 0
    assert probes_to_align(blocks((4,)), blocks((4,), (4,))) == 0  # pointwise, if at all
    assert probes_to_align(blocks((4,), (4,)), blocks((4,))) == 2


def test_a_pattern_without_room_is_not_built() -> None:
    entries: list[int] = []

    def has_room(count: int) -> bool:
        entries.append(count)
        return False

    found = align(lambda moved: moved.reshape(5, 6).any(1), blocks((5, 6)), blocks((5,)), has_room)
    assert found is None
    assert entries == [30]


class Apart(torch.autograd.Function):
    """A softmax of each row; output (3, 5) also depends on input (11, 2), in backward by this factor."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(1)
        ctx.save_for_backward(y)
        y = y.clone()
        y[3, 5] += x[11, 2]
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        found = y * (grad - (y * grad).sum(1, keepdim=True))
        found[11, 2] += Apart.factor * grad[3, 5]
        return found


def test_slices_of_a_small_operator_are_compressed() -> None:
    report = fastgrad.check(lambda x: x.softmax(1), (normal(20, 20),))
    assert report.passed
    assert report.plan is not None
    assert report.plan.reason == "guessed from aligned dimensions"
    assert report.evaluations <= 2 * 20 + 15
    assert report.vjps <= 20 + 11


@pytest.mark.parametrize("engine", ["auto", "compressed"])
def test_an_entry_outside_of_the_slices(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(20, 20)
    assert fastgrad.check(Apart.apply, (x,), engine=engine).passed
    for factor in (0.0, 0.9):
        monkeypatch.setattr(Apart, "factor", factor)
        report = fastgrad.check(Apart.apply, (x,), engine=engine)
        assert report.failure is not None
        assert report.failure.comparison is not None
        worst = report.failure.comparison.worst
        assert worst is not None
        assert (worst.output_index, worst.input_index) == ((3, 5), (11, 2))
        assert report.failure.comparison.mismatches == 1


def test_after_a_failure_every_entry_of_a_small_problem_is_compared() -> None:
    class Transposed(torch.autograd.Function):
        """A product of each row whose backward exchanges rows and columns."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x.sum(1, keepdim=True)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return (grad * x.sum(1, keepdim=True) + (grad * x).sum(1, keepdim=True)).t()

    report = fastgrad.check(Transposed.apply, (normal(17, 17),))
    assert report.plan is not None
    assert (report.plan.engine, report.plan.reason) == (
        "dense",
        "guessed from aligned dimensions; after a failure, every entry was compared",
    )
    assert report.failure is not None
    assert report.failure.comparison is not None
    assert report.failure.comparison.exhaustive
    assert report.failure.comparison.mismatches > 100
    with pytest.raises(fastgrad.GradcheckError, match=r"in [\d,]{3,} of 83,521 entries"):
        fastgrad.gradcheck(Transposed.apply, (normal(17, 17),))
    assert not fastgrad.gradcheck(Transposed.apply, (normal(17, 17),), raise_exception=False)


class Beside(torch.autograd.Function):
    """A log-sum-exp of each row; output 25 also depends on input (39, 1), in backward only if `right` is set."""

    right = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = x.logsumexp(1)
        y[25] += x[39, 1]
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found = x.softmax(1) * grad[:, None]
        found[33, 3] += 0.5 * grad[33]
        if Beside.right:
            found[39, 1] += grad[25]
        return found


@pytest.mark.parametrize("right", [False, True])
def test_entries_that_others_were_added_to_are_not_reported(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Beside, "right", right)
    report = fastgrad.check(Beside.apply, (normal(130, 4),))
    assert report.plan is not None
    assert report.plan.engine == "compressed"
    assert report.failure is not None
    found = report.failure.comparison
    assert found is not None
    assert not found.exhaustive
    wrong = {((33,), (33, 3))} if right else {((33,), (33, 3)), ((25,), (39, 1))}
    assert {(entry.output_index, entry.input_index) for entry in found.worst_entries} <= wrong
    assert found.mismatches == len(found.worst_entries) == report.pairs[0].mismatches
    assert "at least 1 of 67,600 entries" in str(report)
