"""The compressed engine: the entries of both Jacobians in a pattern, one group of columns or rows at a time.

Columns that share no row are perturbed together; rows that share no column are computed by one VJP
(Curtis, Powell & Reid, On the estimation of sparse Jacobian matrices, 1974). Entries outside the
pattern are not detected here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastgrad.core.native import GradientsMatch, Groups, ops
from fastgrad.core.phases import phase
from fastgrad.core.tensors import PIECE, ones_at
from fastgrad.engines.blocks import REPEAT_SCALE
from fastgrad.problem.coordinates import Block
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Plan
from fastgrad.structure import coloring
from fastgrad.structure.coloring import Indices
from fastgrad.structure.sparsity import Mask, Pattern

REPEATED_GROUPS = 2
"""Number of row groups of each output that are run twice; certificates test the other groups."""


@dataclass(frozen=True, eq=False)
class Grouping:
    """The columns of a pattern, or the rows of one output, in groups."""

    groups: Groups

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.groups.starts.numel() - 1

    def entries(self) -> tuple[Tensor, ...]:
        """The numbers of the entries in each group: int64."""
        return torch.split(self.groups.entries, self.groups.entry_starts.diff().tolist())

    def members(self) -> tuple[Tensor, ...]:
        """The coordinates in each group: int64, on the CPU."""
        return torch.split(self.groups.coordinates, self.groups.starts.diff().tolist())


class Compression(NamedTuple):
    """A pattern with its groups.

    Attributes
    ----------
    rows, columns
        The row and column of each entry, on the device of the values: int64, shape (nnz,).
    row_groups
        One grouping per output; its coordinates are counted from the output's first coordinate.
    column_colors
        The group of each column: shape (n,); -1: the column is in no group.
    excluded_rows, excluded_columns
        Masks of dense rows and columns that are in neither the pattern nor a group: shapes (m,) and (n,); None: none.
    """

    pattern: Pattern
    rows: Tensor
    columns: Tensor
    column_groups: Grouping
    row_groups: tuple[Grouping, ...]
    column_colors: Indices
    excluded_rows: Tensor | None = None
    excluded_columns: Tensor | None = None

    @property
    def leaves_out(self) -> bool:
        """Whether dense rows or columns are left out."""
        return self.excluded_rows is not None or self.excluded_columns is not None

    def leaves_out_pair(self, output: Block, block: Block) -> bool:
        """Whether all rows of an output, or all columns of an input, are left out."""
        sides = (self.excluded_rows, output), (self.excluded_columns, block)
        return any(excluded is not None and bool(excluded[side.slice].all()) for excluded, side in sides)

    def column_groups_of(self, columns: Tensor) -> Tensor:
        """The group of each of some columns: int64, of the same shape."""
        return torch.from_numpy(self.column_colors[columns.cpu().numpy()]).to(columns.device)

    def entries_of_row(self, row: int) -> slice:
        return slice(int(self.pattern.starts[row]), int(self.pattern.starts[row + 1]))

    def entries_of(self, output: Block) -> slice:
        """The slice of the entries in the rows of an output."""
        return slice(*(int(self.pattern.starts[row]) for row in (output.first, output.end)))


@phase("coloring")
def compress(
    pattern: Pattern,
    inputs: Sequence[Block],
    outputs: Sequence[Block],
    device: torch.device,
    excluded_rows: Mask | None = None,
    excluded_columns: Mask | None = None,
    separate_inputs: bool = False,
) -> Compression:
    """Colors the columns and rows of a pattern.

    inputs, outputs: the tensors whose coordinates are the columns and the rows. device: of the values. excluded_rows,
    excluded_columns: masks, shapes (m,) and (n,). separate_inputs: whether columns of different inputs are in different
    groups. Otherwise, only columns of inputs with different steps are.
    """
    if excluded_rows is not None or excluded_columns is not None:
        pattern = pattern.without(excluded_rows, excluded_columns)
    # With one group, or one entry per row, many ranges are equal. They are shared, because none is written to.
    arange = lru_cache(np.arange) if pattern.n + pattern.m > PIECE else np.arange
    rows, columns = (torch.from_numpy(values).to(device) for values in (pattern.rows(), pattern.columns))
    if pattern.most_in_row <= 1:
        # No two columns share a row, so the pattern need not be transposed.
        colors = np.zeros(pattern.n, dtype=np.int64)
    else:
        starts, members = coloring.transpose(pattern.starts, pattern.columns, pattern.n)
        colors = coloring.color(starts, members, pattern.m)
    kinds = [block.index if separate_inputs else block.step for block in inputs]
    if len(set(kinds)) > 1:
        colors = _by_kind(inputs, kinds, colors, excluded_columns)
    column_groups = _grouping(colors, colors[pattern.columns], 0, rows, arange, excluded_columns)
    column_colors = colors if excluded_columns is None else np.where(excluded_columns, -1, colors)
    row_groups = []
    for output in outputs:
        starts = pattern.starts[output.first : output.end + 1]
        first, last = starts[0], starts[-1]
        colors = coloring.color(starts - first, pattern.columns[first:last], pattern.n)
        own = None if excluded_rows is None else excluded_rows[output.slice]
        row_groups.append(_grouping(colors, np.repeat(colors, np.diff(starts)), first, columns, arange, own))
    masks = (None if mask is None else torch.from_numpy(mask).to(device) for mask in (excluded_rows, excluded_columns))
    return Compression(pattern, rows, columns, column_groups, tuple(row_groups), column_colors, *masks)


def compress_for(
    problem: Problem, pattern: Pattern, excluded_rows: Mask | None = None, excluded_columns: Mask | None = None
) -> Compression:
    """Colors a pattern of a problem's Jacobian; excluded_rows, excluded_columns: as in `compress`."""
    sides, excluded = (problem.inputs, problem.outputs), (excluded_rows, excluded_columns)
    return compress(pattern, *sides, problem.device, *excluded, problem.differentiates_custom_code)


def _by_kind(inputs: Sequence[Block], kinds: Sequence[float], colors: Indices, excluded: Mask | None) -> Indices:
    """The colors, split so that columns of inputs of different kinds have different colors: shape (n,).

    Columns that are excluded have color 0, so that none has a color of its own.
    """
    _, numbers = np.unique(np.repeat(kinds, [block.size for block in inputs]), return_inverse=True)
    pairs = colors.astype(np.int64) * (1 + numbers.max(initial=0)) + numbers
    kept = np.ones(pairs.size, dtype=np.bool_) if excluded is None else ~excluded
    found = np.zeros(pairs.size, dtype=np.int64)
    found[kept] = np.unique(pairs[kept], return_inverse=True)[1]
    return found


def _grouping(
    colors: Indices,
    of_entries: Indices,
    first_entry: int,
    positions: Tensor,
    arange: Callable[[int], Indices],
    excluded: Mask | None,
) -> Grouping:
    order, starts = coloring.groups(colors, arange)
    if excluded is not None:
        kept = ~excluded[order]
        order, starts = order[kept], np.concatenate([[0], kept.cumsum()])[starts]
        if not order.size:
            starts = starts[:1]
    entries, entry_starts = coloring.bucket(of_entries, starts.size - 1, arange)
    sorted_entries = torch.from_numpy(entries + first_entry if first_entry else entries).to(positions.device)
    groups = Groups(
        torch.from_numpy(order), torch.from_numpy(starts), sorted_entries, torch.from_numpy(entry_starts), positions
    )
    return Grouping(groups)


def numerical_entries(problem: Problem, plan: Plan, compression: Compression, eps: float) -> Tensor:
    """Entries by central differences: float64, shape (nnz,). Two evaluations per column group.

    Raises
    ------
    RejectedError
        The plan requires replays, and func cannot be captured.
    """
    if plan.replayed:
        from fastgrad.engines import cuda_graph  # imported here to keep `import fastgrad` fast

        colors = torch.from_numpy(compression.column_colors).to(problem.device)
        entries = compression.rows, compression.columns
        return cuda_graph.difference_groups(
            problem, colors, compression.column_groups.count, *entries, eps, plan.record_graph
        )
    return problem.difference_groups(compression.column_groups.groups, compression.columns, eps, plan.record_graph)


@phase("analytical columns")
def linear_entries(problem: Problem, compression: Compression) -> Tensor:
    """Entries by differentiating the backward, which must be linear: float64, shape (nnz,).

    This takes one evaluation, one VJP per column group, and one more VJP. It raises if the backward cannot be
    differentiated. The caller must test whether the derivative of the backward is right.
    """
    return _decompressed(compression, problem.columns_of_backward(_column_groups(compression)))


@phase("analytical columns")
def tangent_entries(problem: Problem, compression: Compression, jvps_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Entries by forward mode: float64, shape (nnz,). One JVP per column group; jvps_of: `Problem.jvps_of`."""
    tangents = (ones_at(problem.n, members, problem.device) for members in _column_groups(compression))
    return _decompressed(compression, (jvps_of(tangent[None])[0] for tangent in tangents))


def _column_groups(compression: Compression) -> Iterator[Tensor]:
    """The coordinates of each column group: int64, shape (members,)."""
    groups = compression.column_groups.groups
    # Copied only once, because a copy to a device waits for the device.
    return iter(torch.split(groups.coordinates.to(compression.rows.device), groups.starts.diff().tolist()))


def _decompressed(compression: Compression, products: Iterator[Tensor]) -> Tensor:
    """The entries from one product per column group, shape (m,) each: float64, shape (nnz,)."""
    rows = compression.rows
    values = torch.zeros(rows.numel(), dtype=torch.float64, device=rows.device)
    for product, entries in zip(products, compression.column_groups.entries(), strict=True):
        ops.decompress_(values, product, None, rows, entries)
    return values


def analytical_entries(
    problem: Problem, compression: Compression, repeat: bool = True
) -> tuple[Tensor, list[tuple[Block, int, GradientsMatch]]]:
    """Entries by VJPs: float64, shape (nnz,); and, for each output, how many groups ran twice, and what this showed.

    This takes one evaluation, one VJP per row group, and one more VJP for each repeated group, with REPEAT_SCALE times
    its cotangent.
    """
    values = torch.zeros(compression.pattern.nnz, dtype=torch.float64, device=problem.device)
    matches = []
    for output, grouping in zip(problem.outputs, compression.row_groups, strict=True):
        repeated = min(grouping.count, REPEATED_GROUPS) if repeat else 0
        match = problem.vjp_groups(output, grouping.groups, values, repeated, REPEAT_SCALE)
        matches.append((output, repeated, match))
    return values, matches


def predicted(compression: Compression, direction: Tensor, entries: Tensor) -> Tensor:
    """The derivatives of all outputs along a direction, as the entries in the pattern predict: float64, shape (m,)."""
    total = torch.zeros(compression.pattern.m, dtype=torch.float64, device=entries.device)
    ops.project_entries_(total, None, direction, compression.columns, compression.rows, entries)
    return total


def dense_row(compression: Compression, entries: Tensor, row: int) -> Tensor:
    """A row with these entries in the pattern, and zeros elsewhere: float64, shape (n,)."""
    own = compression.entries_of_row(row)
    values = entries.new_zeros(compression.pattern.n)
    values[compression.columns[own]] = entries[own]
    return values
