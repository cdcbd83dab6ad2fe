"""Patterns of functions that work slice by slice along some dimensions: batches, reductions, matrix products.

Along a pair of aligned dimensions, output elements with index i depend only on input elements with index i: in A @ B,
the rows of A are aligned with the rows of the result, and the columns of B with the columns of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fastgrad.problem.coordinates import Block
from fastgrad.structure.coloring import Indices
from fastgrad.structure.sparsity import Mask, Pattern

LARGEST_ROW_SHARE = 1 / 2
"""Largest share of columns in which a row may have entries: with more, a pattern saves less than half of the
evaluations."""


class _Pair(NamedTuple):
    """An output and an input with their aligned dimensions: (dimension of the output, dimension of the input) each.

    dims: None if the output does not react to the input.
    """

    output: Block
    block: Block
    dims: tuple[tuple[int, int], ...] | None

    @property
    def columns_of_each(self) -> int:
        """Number of columns of the input in which each row of the output may have entries."""
        if self.dims is None:
            return 0
        aligned = {dim for _, dim in self.dims}
        free = (size for dim, size in enumerate(self.block.tensor.shape) if dim not in aligned)
        return self.block.width * math.prod(free)

    def columns(self) -> Indices:
        """The columns of each element of the output, ascending; -1 if an element has none.

        Shape (elements, columns of each).
        """
        output, block, count = self.output.tensor, self.block, self.output.tensor.numel()
        if self.dims is None:
            return np.zeros((count, 0), dtype=np.int64)
        index = np.indices(output.shape).reshape(output.dim(), count)
        has_entries = np.ones(count, dtype=np.bool_)
        known: dict[int, Indices] = {}
        for own, dim in self.dims:
            has_entries &= known.setdefault(dim, index[own]) == index[own]
        elements = np.zeros((count, 1), dtype=np.int64)
        for dim, size in enumerate(block.tensor.shape):
            values = known[dim][:, None, None] if dim in known else np.arange(size)
            elements = elements[..., None] * size + values
            elements = elements.reshape(count, math.prod(elements.shape[1:]))  # -1 fails if there are no elements
        columns = block.first + elements[..., None] * block.width + np.arange(block.width)
        columns[~has_entries] = -1
        return columns.reshape(count, self.columns_of_each)


@dataclass(frozen=True)
class Alignment:
    """The aligned dimensions of all outputs and inputs.

    pairs: of each output, with all inputs. n: number of columns.
    """

    pairs: Sequence[Sequence[_Pair]]
    n: int

    @cached_property
    def most_in_row(self) -> int:
        """The largest number of entries in a row. The row of an output's first element has all that are possible."""
        return max((sum(pair.columns_of_each for pair in of_output) for of_output in self.pairs), default=0)

    @cached_property
    def pattern(self) -> Pattern:
        """The entries. This takes far longer than the rest, so it is left out if `most_in_row` is too large."""
        counts, columns = zip(*map(_rows, self.pairs), strict=True)
        starts = np.concatenate([[0], np.concatenate(counts).cumsum()])
        return Pattern(starts, np.concatenate(columns), self.n, "guessed from aligned dimensions")


def probes_to_align(inputs: Sequence[Block], outputs: Sequence[Block]) -> int:
    """Number of evaluations that `align` takes; 0: no sizes are equal, or slices would be single elements."""
    if len(inputs) == 1 and all(block.tensor.dim() <= 1 for block in (*inputs, *outputs)):
        return 0
    return sum(len(_candidates(block, outputs)) for block in inputs)


def align(
    respond: Callable[[Mask], Mask], inputs: Sequence[Block], outputs: Sequence[Block], has_room: Callable[[int], bool]
) -> Alignment | None:
    """The dimensions that are aligned; None if their pattern is not useful.

    The indices of the first half of an input dimension, except 0, are moved together. This shows dependencies on
    neighbors, sums over all indices before or after, and a reversed order. An output dimension of the same size is
    aligned with the input dimension if only outputs with these indices react.

    Parameters
    ----------
    respond
        Maps a selection of columns (shape (n,)) to the rows that react (shape (m,)).
    inputs, outputs
        The tensors whose coordinates are the columns, and those whose coordinates are the rows.
    has_room
        Whether a pattern with this many entries is useful.
    """
    selection = np.zeros(sum(block.size for block in inputs), dtype=np.bool_)
    pairs: list[list[_Pair]] = [[]] * len(inputs)
    most_in_row = np.zeros(len(outputs), dtype=np.int64)
    for i in sorted(range(len(inputs)), key=lambda i: -inputs[i].size):
        pairs[i] = _pairs(respond, selection, inputs[i], outputs)
        most_in_row += [pair.columns_of_each for pair in pairs[i]]
        if most_in_row.max(initial=0) > LARGEST_ROW_SHARE * selection.size:
            return None
    by_output = list(zip(*pairs, strict=True))
    if not has_room(sum(pair.output.size * pair.columns_of_each for of_output in by_output for pair in of_output)):
        return None
    return Alignment(by_output, selection.size)


def _pairs(respond: Callable[[Mask], Mask], selection: Mask, block: Block, outputs: Sequence[Block]) -> list[_Pair]:
    """The aligned dimensions of an input and each output; selection: a mask, shape (n,), that selects no columns."""
    shape, candidates = tuple(block.tensor.shape), _candidates(block, outputs)
    own = selection[block.slice].reshape(*shape, block.width)
    aligned: list[list[tuple[int, int]]] = [[] for _ in outputs]
    reacts = [not candidates] * len(outputs)
    for dim in candidates:
        chosen = slice(1, max(2, (shape[dim] + 1) // 2))
        np.moveaxis(own, dim, 0)[chosen] = True
        reacted = respond(selection)
        own[...] = False
        for o, output in enumerate(outputs):
            found = reacted[output.slice].reshape(*output.tensor.shape, output.width)
            reacts[o] |= bool(found.any())
            for own_dim, size in enumerate(output.tensor.shape):
                if size == shape[dim] and not np.delete(found, chosen, own_dim).any():
                    aligned[o].append((own_dim, dim))
    return [
        _Pair(output, block, tuple(dims) if reaches else None)
        for output, dims, reaches in zip(outputs, aligned, reacts, strict=True)
    ]


def _candidates(block: Block, outputs: Sequence[Block]) -> list[int]:
    """The dimensions of an input that have the size of some output dimension."""
    sizes = {size for output in outputs for size in output.tensor.shape if size > 1}
    return [dim for dim, size in enumerate(block.tensor.shape) if size in sizes]


def _rows(pairs: Sequence[_Pair]) -> tuple[Indices, Indices]:
    """The number of entries of each row of an output, and their columns, row by row."""
    columns = np.repeat(np.concatenate([pair.columns() for pair in pairs], 1), pairs[0].output.width, 0)
    is_entry = columns >= 0
    return is_entry.sum(1), columns[is_entry]
