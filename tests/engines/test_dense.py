"""The dense engine: its number of calls is part of the contract, and its blocks cover every entry once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fastgrad.checks.order import check
from fastgrad.core.native import IS_NATIVE
from fastgrad.engines import dense
from fastgrad.engines.blocks import row_parts
from fastgrad.engines.plan import MAX_PASSES, make_plan
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Plan
from fastgrad.report.settings import Settings


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


@pytest.mark.parametrize(
    ("func", "inputs", "evaluations", "vjps"),
    [
        # Evaluations: 2 n for differences, one for the outputs and the first graph, one for a graph after differences.
        # VJPs: m rows, two of them twice, 4 for linearity, a zero and an undefined grad_output, one on the new graph.
        (torch.sin, (leaf(4),), 2 * 4 + 2, 4 + 2 + 5 + 2 + 1),
        # Four more evaluations show that differences need no graph.
        (torch.sin, (leaf(40),), 2 * 40 + 6, 40 + 2 + 5 + 2),
        # One output coordinate: repeating its row at another scale shows linearity.
        (torch.sum, (leaf(5),), 2 * 5 + 2, 2 * 1 + 2 + 1),
        # Nothing to perturb: the first evaluation is the graph.
        (torch.sin, (leaf(0),), 1, 2),
        # A complex element has two coordinates, in the input and in the output.
        (torch.exp, (leaf(3, dtype=torch.complex128),), 2 * 6 + 2, 6 + 2 * 2 + 5 + 2 + 1),
        # With two outputs, each grad_output is undefined in turn.
        (lambda v: (v.sin(), v.cos()), (leaf(3),), 2 * 3 + 2, 6 + 2 * 2 + 5 + 1 + 3 + 1),
        # The same tensor twice is perturbed once. No small check: one more VJP, on the first graph.
        (torch.mul, (w := leaf(4), w), 2 * 4 + 2, 4 + 2 + 5 + 2 + 2),
    ],
)
def test_cost(func: object, inputs: tuple[torch.Tensor, ...], evaluations: int, vjps: int) -> None:
    report = check(func, inputs, Settings(engine="dense"))  # type: ignore[arg-type]
    assert report.passed
    assert report.evaluations <= evaluations
    # Without small checks, as in plain Python, one more VJP runs on the first graph.
    assert report.vjps <= vjps + (not IS_NATIVE)


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_blocks_cover_every_entry_once(columns: int, rows: int) -> None:
    a, b, c = leaf(3), leaf(2, dtype=torch.complex128), leaf(2, 2)

    def func(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a.sum() * b, (c * c).sum(1) * a[:2]

    with Problem(func, (a, b, c)) as problem:
        assert (problem.n, problem.m) == (3 + 4 + 4, 4 + 2)
        seen = torch.zeros(problem.m, problem.n)
        plan = Plan("dense", columns, rows, True, "")
        passes = dense.numerical_columns(problem, plan, Settings())
        each = itertools.product(passes, row_parts(problem.outputs))
        groups = (dense.row_blocks(problem, plan, *rows, *held, None) for held, rows in each)
        for block in itertools.chain.from_iterable(groups):
            width = 2 if block.output.is_complex else 1
            first = block.output.first + block.first_row * width + (block.part == "imaginary")
            column = block.input.first + block.first_column
            count, size = block.analytical.shape
            if block.input.is_complex and columns > 1:
                assert size % 2 == 0
                assert block.first_column % 2 == 0
            seen[first : first + (count - 1) * width + 1 : width, column : column + size] += 1
            torch.testing.assert_close(block.analytical, block.numerical, rtol=1e-6, atol=1e-7)
            count = block.repeated.shape[0]
            assert torch.equal(block.analytical[:count], block.repeated)
        assert bool((seen == 1).all())


@pytest.mark.parametrize("limit", [1, 800, 10_000])
def test_a_memory_limit_changes_no_verdict(limit: int) -> None:
    x, z = leaf(7), leaf(3, dtype=torch.complex128)

    def func(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return torch.outer(x.sin(), z * z)

    def wrong(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return func(x, torch.cat([z[:2], z[2:].detach()]))

    settings = Settings(memory_limit=limit)
    assert check(func, (x, z), settings).passed
    failure = check(wrong, (x, z), settings).failure
    assert failure is not None
    assert (failure.kind, failure.output, failure.input, failure.part) == ("mismatch", 0, 1, "imaginary")
    assert failure.comparison is not None
    assert failure.comparison.worst is not None
    assert failure.comparison.worst.input_index == (2,)


def test_memory_stays_within_the_limit() -> None:
    # 3,000 columns of 40 rows are 960 kB; a limit of 100 kB holds 312 of them.
    with Problem(lambda v: v.cumsum(0)[:40] * v.sum(), (leaf(3000),)) as problem:
        plan = make_plan(problem, Settings(memory_limit=100_000), None)
        assert plan.columns_per_pass == 312
        assert 8 * problem.n * plan.rows_per_block <= 1 << 20


@pytest.mark.parametrize("limit", [1, 30_000])
@pytest.mark.parametrize("shape", [(400, 400), (1, 4000)])
def test_a_small_memory_limit_repeats_few_rows(limit: int, shape: tuple[int, int]) -> None:
    m, n = shape
    matrix = leaf(m, n).detach()
    report = check(lambda x: (matrix * x).sum(1), (leaf(n),), Settings(engine="dense", memory_limit=limit))
    assert report.passed
    assert report.vjps <= MAX_PASSES * (m + 2) + 128


def test_too_small_a_memory_limit_is_told() -> None:
    text = r"memory_limit \(16000 bytes\) holds 1 of 2000 columns .* at least 1600000 bytes"
    with pytest.raises(MemoryError, match=text):
        check(lambda x: x.cumsum(0), (leaf(2000),), Settings(memory_limit=16_000))
    with Problem(lambda x: x.cumsum(0), (leaf(2000),)) as problem:
        assert make_plan(problem, Settings(memory_limit=1_600_000), None).columns_per_pass == 100


def test_imaginary_parts_are_judged_first() -> None:
    z = leaf(2, dtype=torch.complex128)

    def func(z: torch.Tensor) -> torch.Tensor:
        # The real and the imaginary part are wrong in different entries.
        return torch.complex(z.real * torch.tensor([1.0, 2.0]) - z.real.detach(), z.imag.detach() * z.imag)

    failure = check(func, (z,), Settings()).failure
    assert failure is not None
    assert failure.part == "imaginary"


class _NotQuiteHomogeneous(torch.autograd.Function):
    """A sum whose backward is linear except for rounding."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack(inputs).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return (grad + 1e-12 * grad * grad,) * 6


def test_rows_that_are_multiples_but_for_rounding_are_run_again_once_for_all_inputs() -> None:
    report = check(_NotQuiteHomogeneous.apply, tuple(leaf(3) for _ in range(6)), Settings(engine="dense"))
    assert report.passed
    # As in `test_cost`, and four more runs of both rows, each twice, and three of all four cotangents. For a custom
    # backward, also five VJPs early, eight late, two on an older graph, two for a small positive grad_output, and all
    # three rows again.
    assert report.vjps <= 3 + 2 + 5 + 2 + 4 * 4 + 3 * 4 + 5 + 8 + 2 + 2 + 3
