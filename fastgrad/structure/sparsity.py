"""Which entries of a Jacobian may differ from zero: patterns, and guesses of them.

A guess is used if it agrees with a first look; otherwise `refinement` finds a pattern. The caller must certify it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from fastgrad.problem.coordinates import Block
from fastgrad.structure import coloring
from fastgrad.structure.coloring import Indices

Mask = np.ndarray[Any, np.dtype[np.bool_]]
Values = np.ndarray[Any, np.dtype[np.float64]]

DENSE_SHARE = 1 / 16
"""A row with more than this share of the entries of the largest row is dense, too."""

FEW = 16
"""Approximate number of results that are first searched for among the values of the inputs."""

MAX_HUBS = 1 / 32
"""Largest share of rows (or columns) that may be dense. If more seem dense, blocks are too large, or all are dense."""

BEYOND_CHANCE = 6
"""Number of standard deviations from which a deviation of a share is significant."""

ALWAYS_FEW = 8
"""Up to this number, dense rows (or columns) always count as few."""

BAND = 61
"""Distance of the rows whose product shows a band. The band may be at most half as wide. The distance is prime, so that
the rows are at all positions within blocks."""

LEAST_OF_BAND = 1 / 4
"""Least share of a band's entries that the product must show. In a permutation, each row has one entry, at an offset of
its own, so the band of all these offsets has many more entries."""


CURVED = 2.0**-7
"""Largest difference between the sum of func's changes in probes and its prediction by a VJP, relative to the size of
the prediction. If it is larger, probes are repeated. Curvature within steps of eps explains much less, but kinks may
explain more."""


@dataclass(frozen=True, eq=False, repr=False)
class Pattern:
    """Entries that may differ from zero, row by row: CSR over the real coordinates of outputs and inputs.

    Attributes
    ----------
    starts
        Shape (m + 1,).
    columns
        Shape (nnz,): the columns of row i, ascending, are columns[starts[i]:starts[i + 1]].
    n
        Number of columns.
    origin
        A description of how the pattern was found.
    is_numerical
        Whether all inputs were perturbed and all outputs compared bit by bit. Then no entry of func is missing.
    """

    starts: Indices
    columns: Indices
    n: int
    origin: str
    is_numerical: bool = False

    @property
    def m(self) -> int:
        """Number of rows."""
        return self.starts.size - 1

    @property
    def nnz(self) -> int:
        """Number of entries."""
        return self.columns.size

    def rows(self) -> Indices:
        """The row of each entry, shape (nnz,)."""
        sizes = np.diff(self.starts)
        # With one entry per row, the starts are the numbers of the rows: no more memory is needed.
        return self.starts[:-1] if bool((sizes == 1).all()) else np.repeat(np.arange(self.m), sizes)

    @cached_property
    def most_in_row(self) -> int:
        """The largest number of entries in a row."""
        return int(np.diff(self.starts).max(initial=0))

    @cached_property
    def most_in_column(self) -> int:
        """The largest number of entries in a column."""
        return int(np.bincount(self.columns).max(initial=0))

    def dense_rows(self) -> Mask:
        """Mask of the few rows with far more entries than all others, for example of a loss: shape (m,)."""
        return _few_large(np.diff(self.starts))

    def dense_columns(self) -> Mask:
        """Mask of the few columns with far more entries than all others, as of a shared parameter: shape (n,)."""
        return _few_large(np.bincount(self.columns, minlength=self.n))

    def touched(self, columns: Mask) -> Mask:
        """Mask, shape (m,), of the rows with an entry in one of the given columns, shape (n,)."""
        before = np.zeros(self.nnz + 1, dtype=np.int64)
        np.cumsum(columns[self.columns], out=before[1:])
        return before[self.starts[1:]] > before[self.starts[:-1]]

    def without(self, rows: Mask | None, columns: Mask | None) -> Pattern:
        """The pattern without the entries of some rows and columns: masks, shapes (m,) and (n,); None: none."""
        kept = np.ones(self.nnz, dtype=np.bool_)
        if rows is not None:
            kept &= ~np.repeat(rows, np.diff(self.starts))
        if columns is not None:
            kept &= ~columns[self.columns]
        return replace(self, starts=starts_of(kept)[self.starts], columns=self.columns[kept])

    def transposed(self) -> Pattern:
        starts, rows = coloring.transpose(self.starts, self.columns, self.n)
        return replace(self, starts=starts, columns=rows, n=self.m)

    def with_entries(self, rows: Indices, columns: Indices) -> Pattern:
        """The pattern with additional entries: rows and columns of equal shape."""
        rows, columns = np.concatenate([self.rows(), rows]), np.concatenate([self.columns, columns])
        return replace(from_entries(rows, columns, self.m, self.n, self.origin), is_numerical=self.is_numerical)


def from_entries(rows: Indices, columns: Indices, m: int, n: int, origin: str) -> Pattern:
    """The pattern of some entries, in any order, possibly with duplicates."""
    in_order = (rows[1:] > rows[:-1]) | ((rows[1:] == rows[:-1]) & (columns[1:] >= columns[:-1]))
    if not in_order.all():
        for _ in range(2):  # a stable sort by columns, then by rows
            order, _ = coloring.bucket(columns, n)
            rows, columns, m, n = columns[order], rows[order], n, m
    again = np.zeros(rows.size, dtype=np.bool_)
    again[1:] = (rows[1:] == rows[:-1]) & (columns[1:] == columns[:-1])
    if again.any():
        rows, columns = rows[~again], columns[~again]
    return Pattern(starts_of(np.bincount(rows, minlength=m)), columns, n, origin)


def few(size: int) -> int:
    """The largest number of rows (or columns) that may be treated as dense, by their total number."""
    return max(ALWAYS_FEW, int(MAX_HUBS * size))


def _few_large(counts: Indices) -> Mask:
    large: Mask = counts > DENSE_SHARE * counts.max(initial=0)
    return large if large.sum() <= few(counts.size) else np.zeros_like(large)


def starts_of(counts: Indices | Mask) -> Indices:
    starts = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def guess_pointwise(inputs: Sequence[Block], outputs: Sequence[Block]) -> Pattern | None:
    """The pattern of a pointwise function; None unless all inputs broadcast to each output.

    Each coordinate of an output element depends on both coordinates of a complex input element.
    """
    lists = []
    for output in outputs:
        shape = tuple(output.tensor.shape)
        reached = []
        for block in inputs:
            own = tuple(block.tensor.shape)
            try:
                elements = np.broadcast_to(np.arange(block.tensor.numel()).reshape(own), shape)
            except ValueError:
                return None
            first = block.first + elements.reshape(-1, 1) * block.width
            reached.append(first + np.arange(block.width))
        columns = _concatenated(reached, 1)
        lists.append(columns if output.width == 1 else np.repeat(columns, output.width, axis=0))
    per_row = lists[0].shape[1]
    rows = sum(columns.shape[0] for columns in lists)
    n = sum(block.size for block in inputs)
    starts, columns = np.arange(rows + 1), _concatenated(lists, 0).reshape(-1)
    if np.array_equal(columns, starts[:-1]):
        columns = starts[:-1]  # a view, which saves the memory of a copy
    return Pattern(starts * per_row if per_row > 1 else starts, columns, n, "guessed pointwise from shapes")


def guess_dense(inputs: Sequence[Block], outputs: Sequence[Block]) -> Pattern | None:
    """The dense pattern; None if there are more than a few rows and columns."""
    n, m = (sum(block.size for block in blocks) for blocks in (inputs, outputs))
    if min(n, m) > ALWAYS_FEW:
        return None
    return Pattern(
        np.arange(m + 1) * n, np.tile(np.arange(n), m), n, "all entries, because there are few rows or columns"
    )


def guess_in_order(inputs: Sequence[Block], outputs: Sequence[Block]) -> Pattern | None:
    """The pattern of a function that only reshapes, splits or joins: element by element in C order; None if n != m."""
    n, m = (sum(block.size for block in blocks) for blocks in (inputs, outputs))
    if n != m:
        return None
    starts = np.arange(m + 1)
    return Pattern(starts, starts[:-1], n, "guessed element by element in C order")


def guess_moved(values: Values, results: Values, reacted: Mask) -> Pattern | None:
    """The pattern of a function that only moves elements: each result depends on the input element of equal value.

    values: the inputs at x, shape (n,). results: the outputs at x, shape (m,). reacted: which outputs reacted in the
    first look, shape (m,). Returns None if two inputs are equal, or if none of some reacting outputs equals an input.
    """
    some = np.flatnonzero(reacted)
    if not np.isin(values, results[some[:: max(1, some.size // FEW)]]).any():
        return None  # the values need not be sorted
    order = np.argsort(values)
    ascending = values[order]
    if not values.size or (ascending[1:] == ascending[:-1]).any():
        return None
    places = np.minimum(np.searchsorted(ascending, results), values.size - 1)
    known = ascending[places] == results
    return Pattern(
        starts_of(known), order[places[known]], values.size, "guessed from equal values: func only moves elements"
    )


def guess_band(respond: Callable[[Mask], Mask], m: int, n: int, is_symmetric: bool) -> Pattern | None:
    """The pattern of a band matrix, for example of a stencil; None if there is none.

    One product with rows that are far apart shows the offsets. An offset is the distance of a column from the diagonal;
    all rows are assumed to have the same offsets. respond: maps selected rows, shape (m,), to the columns that react,
    shape (n,).
    """
    chosen = np.zeros(m, dtype=np.bool_)
    chosen[BAND // 2 :: BAND] = True
    rows, reacted = np.flatnonzero(chosen), np.flatnonzero(respond(chosen))
    offsets = np.unique(reacted - rows[np.minimum(reacted // BAND, rows.size - 1)])
    if reacted.size < LEAST_OF_BAND * rows.size * offsets.size:
        return None
    if is_symmetric:
        offsets = np.union1d(offsets, -offsets)
    if not 0 < offsets.size <= BAND // 2:
        return None
    columns = np.arange(m)[:, None] + offsets
    within = (columns >= 0) & (columns < n)
    return Pattern(starts_of(within.sum(1)), columns[within], n, "guessed from one product: a band")


def decode(
    respond: Callable[[Mask], Mask], blocks: Sequence[Block], most_probes: int
) -> tuple[Indices, Indices, int] | None:
    """The source of each target, if each target has at most one source per tensor, from the bits of the source's index.

    For each bit, all sources whose index has a one in this bit are probed together. If a target reacts, the index of
    its source has a one in this bit. Before that, two random halves of the sources are probed, which must share no
    target. This detects most targets with several sources; certificates detect the others. Each tensor takes two probes
    for the halves, and one probe per bit.

    Parameters
    ----------
    respond
        Maps a selection of sources (shape (sources,)) to that of the targets that react (shape (targets,)).
    blocks
        The tensors of the sources.
    most_probes
        Largest number of probes.

    Returns
    -------
    tuple or None
        (targets, sources, probes): the entries, one for each target and each coordinate of its source; and the number
        of probes. None if a target has several sources in a tensor, or if too many probes are needed.
    """
    selection = np.zeros(sum(block.size for block in blocks), dtype=np.bool_)
    found: list[tuple[Indices, Indices]] = []
    halves = np.random.default_rng(0)  # leaves NumPy's global state unchanged
    probes = 0
    for block in blocks:
        elements = block.size // block.width
        bits = max(0, elements - 1).bit_length()
        probes += 2 + bits
        if probes > most_probes:
            return None
        own = selection[block.slice].reshape(elements, block.width)
        own[...] = halves.integers(0, 2, (elements, 1), dtype=np.bool_)
        one_half = respond(selection)
        own[...] = ~own
        other_half = respond(selection)
        if (one_half & other_half).any():
            return None
        reacted = np.flatnonzero(one_half | other_half)
        source = np.zeros(reacted.size, dtype=np.int64)
        for bit in range(bits):
            own[...] = (np.arange(elements) >> bit & 1)[:, None]
            np.add(source, 1 << bit, out=source, where=respond(selection)[reacted])
        own[...] = False
        if (source >= elements).any():
            return None
        for within in range(block.width):
            found.append((reacted, block.first + source * block.width + within))
    return *(_concatenated(side, 0) for side in zip(*found, strict=True)), probes  # type: ignore[return-value]


def decoded(
    reacting_outputs: Callable[[Mask], Mask],
    reacting_inputs: Callable[[Mask], Mask],
    inputs: Sequence[Block],
    outputs: Sequence[Block],
    share: float,
    most_probes: int,
) -> Pattern | None:
    """The pattern, if each output element depends on at most one element per input, or vice versa; otherwise None.

    share: the share of outputs that react if a random half of all inputs moves. With one source in each of t tensors,
    it is at most 1 - 2^-t, except by chance.
    """
    n, m = (sum(block.size for block in blocks) for blocks in (inputs, outputs))
    expected = 1 - 0.5 ** len(inputs)
    likely = share <= expected + BEYOND_CHANCE * (expected * (1 - expected) / max(1, min(n, m))) ** 0.5
    found = decode(reacting_outputs, inputs, most_probes) if likely else None
    if found is not None:
        rows, columns, probes = found
        origin = f"found by {probes} evaluations, one per bit of the inputs' indices"
    else:
        fits = max(block.size for block in outputs) <= n
        found = decode(reacting_inputs, outputs, most_probes) if fits else None
        if found is None:
            return None
        columns, rows, probes = found
        origin = f"found by {probes} VJPs, one per bit of the outputs' indices"
    return with_whole_elements(from_entries(rows, columns, m, n, origin), inputs, outputs)


def _concatenated(arrays: Sequence[Indices], axis: int) -> Indices:
    """Concatenates arrays; a single array is not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)


def explains_look(pattern: Pattern, moved: Mask, reacted: Mask) -> bool:
    """Whether each row that reacted, shape (m,), has an entry in one of the columns that moved, shape (n,)."""
    return bool((pattern.touched(moved) | ~reacted).all())


def separating_columns(pattern: Pattern) -> Mask:
    """Mask, shape (n,), of the columns that have no entries in rows 0, 2, 4, ..."""
    chosen = np.zeros(pattern.m, dtype=np.bool_)
    chosen[::2] = True
    separating = np.ones(pattern.n, dtype=np.bool_)
    separating[pattern.columns[np.repeat(chosen, np.diff(pattern.starts))]] = False
    return separating


def with_whole_elements(pattern: Pattern, inputs: Sequence[Block], outputs: Sequence[Block]) -> Pattern:
    """The pattern, extended to all pairs of coordinates of the output and input elements of each entry."""
    if not any(block.is_complex for block in (*inputs, *outputs)):
        return pattern
    first_row, row_widths = _elements(outputs)
    first_column, column_widths = _elements(inputs)
    # To save memory, duplicate pairs of elements are removed before each pair becomes up to four entries.
    keys = np.unique(first_row[pattern.rows()] * pattern.n + first_column[pattern.columns])
    i, j = np.divmod(keys, pattern.n)
    entries = []
    for di, dj in itertools.product(range(2), repeat=2):
        within = (di < row_widths[i]) & (dj < column_widths[j])
        entries.append((i[within] + di, j[within] + dj))
    i, j = (np.concatenate(side) for side in zip(*entries, strict=True))
    return from_entries(i, j, pattern.m, pattern.n, pattern.origin)


def _elements(blocks: Sequence[Block]) -> tuple[Indices, Indices]:
    """Per coordinate, the first coordinate of its element, and the number of coordinates of the element."""
    widths = np.repeat([block.width for block in blocks], [block.size for block in blocks])
    coordinates = np.arange(widths.size)
    firsts = np.repeat([block.first for block in blocks], [block.size for block in blocks])
    return coordinates - (coordinates - firsts) % widths, widths
