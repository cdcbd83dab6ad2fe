"""The dense engine: every column by differences and every row by VJPs, compared block by block.

It holds all numerical columns that fit in the memory limit, and computes the analytical rows one block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from fastgrad.core.native import GradientsMatch, Rows
from fastgrad.engines import executor
from fastgrad.engines.blocks import REPEAT_SCALE, REPEATED_ROWS, JacobianBlock
from fastgrad.engines.plan import MIN_COLUMNS_PER_PASS
from fastgrad.problem.coordinates import Block
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Plan
from fastgrad.report.failure import Part
from fastgrad.report.settings import Settings


def row_blocks(
    problem: Problem, plan: Plan, output: Block, part: Part, first: int, columns: Tensor, known: Rows | None
) -> Iterator[JacobianBlock]:
    """The rows of one output or part against the numerical columns from `first` on: by rows, then by input.

    Each block is computed on demand. This takes one VJP per row, and one more VJP per repeated row, but no calls if the
    rows are known.

    Raises
    ------
    RejectedError
        The plan requires replays, and they are not possible.
    """
    inputs = _inputs_within(problem, first, columns)
    width = output.width
    numerical = columns.t()
    last = first + columns.shape[0]
    if output.size < columns.shape[1] or width == 2:
        numerical = numerical[output.first + int(part == "imaginary") : output.end : width]
    elements = output.tensor.numel()
    computed = _rows(problem, plan, output, part, inputs)
    if known is not None:
        computed = iter([(known.rows, known.repeated, known.match)])
    # The range comes first, so that no block is computed after the last row.
    for row, (rows, repeated, match) in zip(range(0, elements, plan.rows_per_block), computed, strict=False):
        count = rows.shape[0]
        held = numerical if count == elements else numerical.narrow(0, row, count)
        start = 0
        for k, block in enumerate(inputs):
            low, high = max(block.first, first), min(block.end, last)
            size = max(0, high - low)  # an input without specified elements may lie before this pass
            # With one input, its block is the whole matrix. Making a view costs more than comparing a small block.
            whole = size == rows.shape[1]
            within = 1, start + low - block.first, size
            yield JacobianBlock(
                output=output,
                part=part,
                input=block,
                first_row=row,
                first_column=low - block.first,
                analytical=rows if whole else rows.narrow(*within),
                repeated=repeated if whole else repeated.narrow(*within),
                numerical=held if whole else held.narrow(1, min(low, last) - first, size),
                match=match,
                unspecified=match.unspecified.get(k),
            )
            start += block.size


def pieces_of_columns(problem: Problem, plan: Plan, first: int, columns: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields the numerical columns from `first` on, shape (count, m), in pieces as large as a block of rows.

    Forward mode computes the columns of one piece at a time. The two coordinates of a complex element are in the same
    piece.
    """
    most = max(MIN_COLUMNS_PER_PASS, plan.rows_per_block * problem.n // max(1, problem.m))
    for start, end in _passes(problem, first, first + columns.shape[0], most):
        yield start, columns[start - first : end - first]


def _passes(problem: Problem, first: int, last: int, most: int) -> Iterator[tuple[int, int]]:
    """Yields intervals of at most `most` columns, which make up [first, last)."""
    while first < last:
        end = min(first + most, last)
        block = next(block for block in problem.inputs if end <= block.end)
        if block.is_complex and end - first > 1:
            end -= (end - block.first) % 2  # the two coordinates of a complex element must be in the same pass
        yield first, end
        first = end


def tangent_blocks(
    problem: Problem, first: int, columns: Tensor, tangents: Tensor
) -> Iterator[tuple[Block, Block, Part, int, Tensor, Tensor]]:
    """One piece of forward mode: the columns of `Problem.tangent_columns` against the numerical ones.

    Yields
    ------
    tuple
        An output and an input; the part of the elements of a complex input; the element of the input to which row 0
        belongs; and the rows of both Jacobians, one per column: float64, shape (elements, coordinates of the output).
    """
    for block in _inputs_within(problem, first, columns):
        low, high = max(block.first, first), min(block.end, first + columns.shape[0])
        parts: tuple[Part, ...] = ("real", "imaginary") if block.is_complex else ("all",)
        width = len(parts)
        for offset, part in enumerate(parts):
            rows = slice(low - first + offset, high - first, width)
            for output in problem.outputs:
                analytical, numerical = tangents[rows, output.slice], columns[rows, output.slice]
                yield output, block, part, (low - block.first) // width, analytical, numerical


def _rows(
    problem: Problem, plan: Plan, output: Block, part: Part, inputs: list[Block]
) -> Iterator[tuple[Tensor, Tensor, GradientsMatch]]:
    """The rows of one output or part, block by block; each block is computed on demand."""
    imaginary, elements = part == "imaginary", output.tensor.numel()
    starts = range(0, elements, plan.rows_per_block)
    counts = [min(plan.rows_per_block, elements - row) for row in starts]
    repeats = [max(0, min(count, REPEATED_ROWS - row)) for row, count in zip(starts, counts, strict=True)]
    if not plan.rows_replayed:
        for row, count, twice in zip(starts, counts, repeats, strict=True):
            yield problem.analytical_rows(output, imaginary, row, count, inputs, twice, REPEAT_SCALE)
        return
    from fastgrad.engines import cuda_graph  # imported here to keep `import fastgrad` fast

    # Repeated rows are run one call at a time. Rows from replays are certified by sums of all rows.
    once = [count - twice for count, twice in zip(counts, repeats, strict=True)]
    replays = cuda_graph.analytical_rows(problem, output, imaginary, sum(repeats), once, inputs)
    for row, twice in zip(starts, repeats, strict=True):
        rows, repeated, match = problem.analytical_rows(output, imaginary, row, twice, inputs, twice, REPEAT_SCALE)
        yield torch.cat([rows, next(replays)]), repeated, match


def _inputs_within(problem: Problem, first: int, columns: Tensor) -> list[Block]:
    last = first + columns.shape[0]
    return [
        block
        for block in problem.inputs
        if (block.first < last and first < block.end)
        # A sparse input without specified elements: the gradients of its other elements must still be zero.
        or (block.size == first == 0 and block.elements is not None)
    ]


def numerical_columns(problem: Problem, plan: Plan, settings: Settings) -> Iterator[tuple[int, Tensor]]:
    """Yields the first coordinate of each pass and its numerical columns: float64, shape (count, m).

    Raises
    ------
    RejectedError
        The plan requires batches or replays, and they are not possible or do not agree with single evaluations.
    """
    if problem.n == 0:
        yield 0, torch.empty(0, problem.m, dtype=torch.float64, device=problem.device)
    for first, last in _passes(problem, 0, problem.n, plan.columns_per_pass):
        # The columns are not kept here while the next ones are computed.
        yield first, _columns(problem, plan, settings, first, last - first)


def _columns(problem: Problem, plan: Plan, settings: Settings, first: int, count: int) -> Tensor:
    eps, record_graph = settings.eps, plan.record_graph
    if plan.batch is None and not plan.replayed:
        return columns_one_by_one(problem, settings, first, count, record_graph)
    from fastgrad.engines import cuda_graph, vmapped  # imported here to keep `import fastgrad` fast

    if plan.batch is not None:
        single = partial(problem.difference_columns, eps=eps, record_graph=record_graph)
        columns = vmapped.difference_columns(problem, first, count, plan.batch, eps, single)
    else:
        columns = cuda_graph.difference_columns(problem, first, count, eps, record_graph)
    error = executor.disagreement(problem, settings, first, columns, record_graph)
    if error > 1:
        refused = executor.RejectedError if error > executor.BEYOND_ROUNDING else executor.UnsuitableError
        raise refused("the columns do not agree with columns computed one by one")
    return columns


def columns_one_by_one(problem: Problem, settings: Settings, first: int, count: int, record_graph: bool) -> Tensor:
    """As `Problem.difference_columns`; columns from a checkpoint that contradict evaluations are computed again."""
    while True:  # the loop ends, because a checkpoint returns each column only once
        problem.restores = False
        columns = problem.difference_columns(first, count, settings.eps, record_graph)
        if not problem.restores or executor.disagreement(problem, settings, first, columns, record_graph) <= 1:
            return columns
