"""Which entries of a Jacobian may differ from zero: guessed from shapes, or found by refinement.

Pipeline: a guess, if it agrees with a first look. Otherwise refinement: blocks of sources (columns or rows) are
perturbed, the targets (rows or columns) that change are recorded, and blocks are halved until each is resolved. The
caller must certify the pattern.

Source: Griewank & Mitev, Detecting Jacobian sparsity patterns by Bayesian probing (2002).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fastgrad.problem.coordinates import Block
from fastgrad.structure import coloring
from fastgrad.structure.coloring import Indices

Mask = NDArray[np.bool_]

SEPARATES = 0.95
"""A halving is informative if both halves reach at most this share of the targets of the whole."""

LIKELY_SHARE = 1 / 4
"""Share of entries not ruled out up to which a structure is likely: compressing by it saves more than the larger budget
of probes costs."""

PATIENCE = 2
"""Uninformative halvings in succession after which a block is treated as dense."""

HUB_SHARE = 0.5
"""A target that more than this share of many blocks reach belongs to a dense row."""

DENSE_SHARE = 1 / 16
"""A row with more than this share of the entries of the fullest row is dense, too."""

FEW = 16
"""Number of results that are first looked up among the inputs' values."""

MOST_HUBS = 1 / 32
"""Largest share of targets that may be dense rows; if more seem dense, blocks are too large, or all rows are dense."""

BEYOND_CHANCE = 6
"""Standard deviations from which a share is significant."""

HANDFUL = 8
"""This many rows, or columns, always count as few."""

BAND = 61
"""Rows between those whose product shows a band, which must be at most half as wide; prime, so that they fall on
all places of blocks."""

BLOCKS_BEFORE_GIVING_UP = 32
"""Fewer blocks of columns than this are not informative if rows have many entries."""


@dataclass(frozen=True)
class Pattern:
    """Entries that may differ from zero, row by row: CSR over the real coordinates of outputs and inputs.

    Attributes
    ----------
    starts
        Shape (m + 1,).
    columns
        Shape (nnz,): those of row i, ascending, are columns[starts[i]:starts[i + 1]].
    n
        Number of columns.
    origin
        A description of how it was found.
    is_numerical
        Whether outputs were watched, bit by bit, all inputs being moved: no entry of the function is missing.
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

    @property
    def most_in_row(self) -> int:
        """Number of entries of the fullest row."""
        return int(np.diff(self.starts).max(initial=0))

    @property
    def most_in_column(self) -> int:
        """Number of entries of the fullest column."""
        return int(np.bincount(self.columns).max(initial=0))

    def dense_rows(self) -> Mask:
        """The few rows with far more entries than all others, for example of a loss: shape (m,)."""
        return _few_large(np.diff(self.starts))

    def dense_columns(self) -> Mask:
        """The few columns with far more entries than all others, for example of a shared parameter: shape (n,)."""
        return _few_large(np.bincount(self.columns, minlength=self.n))

    def touched(self, columns: Mask) -> Mask:
        """The rows with an entry in one of these columns: shapes (n,) and (m,)."""
        before = np.zeros(self.nnz + 1, dtype=np.int64)
        np.cumsum(columns[self.columns], out=before[1:])
        return before[self.starts[1:]] > before[self.starts[:-1]]

    def without(self, rows: Mask | None, columns: Mask | None) -> Pattern:
        """The pattern with some rows and columns emptied: shapes (m,) and (n,); None: none."""
        kept = np.ones(self.nnz, dtype=np.bool_)
        if rows is not None:
            kept &= ~np.repeat(rows, np.diff(self.starts))
        if columns is not None:
            kept &= ~columns[self.columns]
        return replace(self, starts=_starts(kept)[self.starts], columns=self.columns[kept])

    def transposed(self) -> Pattern:
        """The transposed pattern."""
        starts, rows = coloring.transpose(self.starts, self.columns, self.n)
        return replace(self, starts=starts, columns=rows, n=self.m)

    def with_entries(self, rows: Indices, columns: Indices) -> Pattern:
        """The pattern with additional entries: rows and columns of equal shape."""
        rows, columns = np.concatenate([self.rows(), rows]), np.concatenate([self.columns, columns])
        return replace(_from_entries(rows, columns, self.m, self.n, self.origin), is_numerical=self.is_numerical)


def _from_entries(rows: Indices, columns: Indices, m: int, n: int, origin: str) -> Pattern:
    """The pattern of some entries, in any order, possibly with duplicates."""
    in_order = (rows[1:] > rows[:-1]) | ((rows[1:] == rows[:-1]) & (columns[1:] >= columns[:-1]))
    if in_order.all():
        starts = _starts(np.bincount(rows, minlength=m))
    else:
        for _ in range(2):  # a stable sort by columns, then by rows
            order, starts = coloring.bucket(columns, n)
            rows, columns, m, n = columns[order], rows[order], n, m
    again = np.zeros(rows.size, dtype=np.bool_)
    again[1:] = (rows[1:] == rows[:-1]) & (columns[1:] == columns[:-1])
    if again.any():
        rows, columns = rows[~again], columns[~again]
        starts = _starts(np.bincount(rows, minlength=m))
    return Pattern(starts, columns, n, origin)


def few(size: int) -> int:
    """The largest number of rows (or columns) that may be treated as dense, by their total number."""
    return max(HANDFUL, int(MOST_HUBS * size))


def _few_large(counts: Indices) -> Mask:
    large: Mask = counts > DENSE_SHARE * counts.max(initial=0)
    return large if large.sum() <= few(counts.size) else np.zeros_like(large)


def _starts(counts: Indices | Mask) -> Indices:
    starts = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def guess_pointwise(inputs: Sequence[Block], outputs: Sequence[Block]) -> Pattern | None:
    """The pattern of a pointwise function of inputs that broadcast to each output, if they all do.

    A complex element depends on both coordinates of a complex one.
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
        columns = starts[:-1]  # of large vectors, every copy counts
    return Pattern(starts * per_row if per_row > 1 else starts, columns, n, "guessed pointwise from shapes")


def guess_dense(inputs: Sequence[Block], outputs: Sequence[Block]) -> Pattern | None:
    """The dense pattern, if there are only a few rows or columns."""
    n, m = (sum(block.size for block in blocks) for blocks in (inputs, outputs))
    if min(n, m) > HANDFUL:
        return None
    return Pattern(np.arange(m + 1) * n, np.tile(np.arange(n), m), n, "a handful of dense rows or columns")


def guess_in_order(inputs: Sequence[Block], outputs: Sequence[Block]) -> Pattern | None:
    """The pattern of a function that only reshapes, splits or joins: element by element in C order."""
    n, m = (sum(block.size for block in blocks) for blocks in (inputs, outputs))
    if n != m:
        return None
    starts = np.arange(m + 1)
    return Pattern(starts, starts[:-1], n, "guessed element by element in C order")


def guess_moved(values: NDArray[np.float64], results: NDArray[np.float64], reacted: Mask) -> Pattern | None:
    """The pattern of a function that only moves elements: each result depends on the input element of equal value.

    values: of the inputs at x, shape (n,), no two of them equal; results: of the outputs, shape (m,); reacted: which of
    these did to the look.
    """
    some = np.flatnonzero(reacted)
    if not np.isin(values, results[some[:: max(1, some.size // FEW)]]).any():
        return None  # seen without sorting
    order = np.argsort(values)
    ascending = values[order]
    if not values.size or (ascending[1:] == ascending[:-1]).any():
        return None
    places = np.minimum(np.searchsorted(ascending, results), values.size - 1)
    known = ascending[places] == results
    return Pattern(_starts(known), order[places[known]], values.size, "guessed from values that are only moved")


def guess_band(respond: Callable[[Mask], Mask], m: int, n: int, is_symmetric: bool) -> Pattern | None:
    """The offsets from the diagonal that one product with rows far apart shows, for all rows: a chain, a stencil.

    respond: maps a selection of rows, shape (m,), to the columns that react.
    """
    chosen = np.zeros(m, dtype=np.bool_)
    chosen[BAND // 2 :: BAND] = True
    rows, reacted = np.flatnonzero(chosen), np.flatnonzero(respond(chosen))
    offsets = np.unique(reacted - rows[np.minimum(reacted // BAND, rows.size - 1)])
    if is_symmetric:
        offsets = np.union1d(offsets, -offsets)
    if not 0 < offsets.size <= BAND // 2:
        return None
    columns = np.arange(m)[:, None] + offsets
    within = (columns >= 0) & (columns < n)
    return Pattern(_starts(within.sum(1)), columns[within], n, "guessed from one product: a band")


def decode(
    respond: Callable[[Mask], Mask], blocks: Sequence[Block], targets: int, most_probes: int
) -> tuple[Indices, Indices, int] | None:
    """The source of each target, if it has at most one per tensor, by the bits of the source's index.

    All sources with a one in some bit of their index are probed at once, and the targets that react have it in the
    index of theirs. Before that, two random halves must share no target: this finds most targets with more sources;
    certificates find the rest. The probes are two halves, and one per bit, of each tensor.

    Parameters
    ----------
    respond
        Maps a selection of sources (shape (sources,)) to that of the targets that react (shape (targets,)).
    blocks, targets
        The sources' tensors, and how many targets there are.
    most_probes
        How many there may be.

    Returns
    -------
    tuple or None
        (targets, sources, probes): an entry for each target and each coordinate of its source. None: not one source.
    """
    selection = np.zeros(sum(block.size for block in blocks), dtype=np.bool_)
    found: list[tuple[Indices, Indices]] = []
    halves = np.random.default_rng(0)  # not numpy's own state
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
    """The pattern with one entry per row and input, or one per column and output; None otherwise.

    share: of the outputs that react where a random half of all inputs moves. With one source in each of t tensors that
    would be 1 - 2^-t of them at most, except by chance.
    """
    n, m = (sum(block.size for block in blocks) for blocks in (inputs, outputs))
    expected = 1 - 0.5 ** len(inputs)
    likely = share <= expected + BEYOND_CHANCE * (expected * (1 - expected) / max(1, min(n, m))) ** 0.5
    found = decode(reacting_outputs, inputs, m, most_probes) if likely else None
    if found is not None:
        rows, columns, probes = found
        origin = f"read from {probes} evaluations, one per bit of the inputs' indices"
    else:
        fits = max(block.size for block in outputs) <= n
        found = decode(reacting_inputs, outputs, n, most_probes) if fits else None
        if found is None:
            return None
        columns, rows, probes = found
        origin = f"read from {probes} VJPs, one per bit of the outputs' indices"
    return _with_whole_elements(_from_entries(rows, columns, m, n, origin), inputs, outputs)


def _concatenated(arrays: Sequence[Indices], axis: int) -> Indices:
    """Concatenates arrays; a single array is not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)


def explains_look(pattern: Pattern, moved: Mask, reacted: Mask) -> bool:
    """Whether each row that reacted, shape (m,), has an entry in one of the columns that moved, shape (n,)."""
    return bool((pattern.touched(moved) | ~reacted).all())


def separating_columns(pattern: Pattern) -> Mask:
    """Columns, shape (n,), whose perturbation leaves every second row unchanged."""
    chosen = np.zeros(pattern.m, dtype=np.bool_)
    chosen[::2] = True
    separating = np.ones(pattern.n, dtype=np.bool_)
    separating[pattern.columns[np.repeat(chosen, np.diff(pattern.starts))]] = False
    return separating


def probes_to_arrange(blocks: Sequence[Block]) -> int:
    """The probes that a `Refinement` needs before its first level."""
    wide = (sum(size > 1 for size in block.tensor.shape) for block in blocks if block.size)
    return sum(1 + dims for dims in wide if dims > 1)


class Refinement:
    """The columns or the rows of the pattern, found by probing blocks of sources that are halved level by level.

    Columns: the sources are the coordinates of the inputs, the targets those of the outputs, and a
    probe is an evaluation. Rows: the other way round, and a probe is a VJP. Blocks that share no
    target are probed at once. Dimensions along which half of a tensor reaches fewer targets than the
    whole are halved first: for a convolution, the spatial dimensions before the channels.

    Attributes
    ----------
    probes
        Calls of respond so far.
    last_share
        The share of possible entries that the last level did not rule out.
    """

    def __init__(
        self, respond: Callable[[Mask], Mask], blocks: Sequence[Block], targets: int, splits_hubs: bool = False
    ) -> None:
        """respond: maps a selection of sources (shape (sources,)) to that of the targets that react.

        splits_hubs: whether the few targets that most blocks reach are ignored when blocks are kept apart, and
        taken for dense rows. This separates a structure from the dense rows next to it, on both sides.
        """
        self._splits_hubs = splits_hubs
        self._respond = respond
        self._targets = targets
        self._sources = sum(block.size for block in blocks)
        self.probes = 0
        self.last_share = 0.5
        self._order = np.arange(self._sources)
        self._is_in_order = True
        blocks = [block for block in blocks if block.size]
        self._units: list[Indices] = []
        reached = [self._arrange(block) for block in blocks]
        # Blocks are intervals of positions in the order.
        self._first = np.array([block.first for block in blocks], dtype=np.int64)
        self._last = self._first + np.array([block.size for block in blocks], dtype=np.int64)
        self._tensor = np.arange(len(blocks))
        self._idle = np.zeros(len(blocks), dtype=np.int64)
        self._starts = _starts(np.array([targets.size for targets in reached], dtype=np.int64))
        self._members = np.concatenate(reached)
        self._prepare()

    def _probe(self, selection: Mask) -> Indices:
        self.probes += 1
        return np.flatnonzero(self._respond(selection))

    def _arrange(self, block: Block) -> Indices:
        """Moves the separating dimensions of a tensor to the front, and returns the targets of the whole tensor."""
        shape, width = list(block.tensor.shape), block.width
        wide = [dim for dim, size in enumerate(shape) if size > 1]
        reached = np.arange(self._targets)
        order = list(range(len(shape)))
        if len(wide) > 1:
            selection = np.zeros(self._sources, dtype=np.bool_)
            own = selection[block.slice].reshape(*shape, width)
            own[...] = True
            reached = self._probe(selection)
            separating = []
            for dim in wide:
                own[...] = False
                np.moveaxis(own, dim, 0)[: shape[dim] // 2] = True
                if self._probe(selection).size <= SEPARATES * reached.size:
                    separating.append(dim)
            order = separating + [dim for dim in order if dim not in separating]
            coordinates = np.arange(block.first, block.end).reshape(*shape, width)
            permuted = coordinates.transpose(*order, len(shape))
            self._order[block.slice] = permuted.reshape(-1)
            self._is_in_order &= order == sorted(order)
        # Number of elements per index of each dimension, ascending, from one element to the whole.
        units = {width}
        inside = width
        for dim in reversed(order):
            inside *= shape[dim]
            units.add(inside)
        self._units.append(np.array(sorted(units), dtype=np.int64))
        return reached

    def _prepare(self) -> None:
        """Finds the blocks to halve next, and colors them."""
        smallest = np.array([units[0] for units in self._units], dtype=np.int64)
        blocks = np.bincount(self._tensor, minlength=len(self._units))
        settled = (self._idle >= PATIENCE) & (blocks[self._tensor] >= BLOCKS_BEFORE_GIVING_UP)
        divisible = self._last - self._first > smallest[self._tensor]
        self._active = np.flatnonzero(divisible & ~settled & (np.diff(self._starts) > 0))
        self._lists = _select(self._starts, self._members, self._active)
        self._to_hubs = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        if self._splits_hubs and self._active.size >= BLOCKS_BEFORE_GIVING_UP:
            self._split_hubs()
        self._colors = coloring.color(*self._lists, self._targets)

    def _split_hubs(self) -> None:
        """Removes hubs (targets of most blocks) from the lists of targets, because they prevent grouping."""
        starts, members = self._lists
        hubs = np.bincount(members, minlength=self._targets) > HUB_SHARE * self._active.size
        if hubs.sum() > MOST_HUBS * self._targets:
            return
        of_hubs = hubs[members]
        self._to_hubs = np.repeat(np.arange(self._active.size), np.diff(starts))[of_hubs], members[of_hubs]
        self._lists = _starts(~of_hubs)[starts], members[~of_hubs]

    @property
    def is_done(self) -> bool:
        """Whether no block is left to halve."""
        return not self._active.size

    @property
    def next_cost(self) -> int:
        """Probes of the next level."""
        return 0 if self.is_done else 2 * (int(self._colors.max()) + 1)

    @property
    def entries(self) -> int:
        """Entries of the pattern as known so far."""
        return int(((self._last - self._first) * np.diff(self._starts)).sum())

    def _middles(self) -> Indices:
        """Where to halve the active blocks: between two indices of the outermost dimension that they span."""
        first, size = self._first[self._active], (self._last - self._first)[self._active]
        tensor = self._tensor[self._active]
        middle = np.empty_like(first)
        for k, units in enumerate(self._units):
            own = tensor == k
            unit = units[np.searchsorted(units, size[own]) - 1]
            middle[own] = first[own] + np.maximum(1, size[own] // unit // 2) * unit
        return middle

    def refine(self) -> None:
        """One level: halves all active blocks and probes both halves."""
        entries = self.entries
        active, middle = self._active, self._middles()
        first, last = self._first[active], self._last[active]
        starts, members = self._lists
        order, color_starts = coloring.groups(self._colors)
        # Both halves of a block that reaches a hub are taken to reach it.
        blocks, hubs = self._to_hubs
        found: list[Indices] = [hubs, hubs]
        children: list[Indices] = [2 * blocks, 2 * blocks + 1]
        for begin, end in pairwise(color_starts.tolist()):
            chosen = order[begin:end]
            part_starts, part = _select(starts, members, chosen)
            owner = np.full(self._targets, -1)
            owner[part] = np.repeat(chosen, np.diff(part_starts))
            for side, (low, high) in enumerate(((first, middle), (middle, last))):
                reacted = self._probe(self._selection(low[chosen], high[chosen]))
                # A target that no block reached on the previous level belongs to none: certificates will find out.
                reacted = reacted[owner[reacted] >= 0]
                found.append(reacted)
                children.append(2 * owner[reacted] + side)
        self._replace(middle, np.concatenate(children), np.concatenate(found))
        self._prepare()
        self.last_share = self.entries / max(1, entries)

    def _selection(self, first: Indices, last: Indices) -> Mask:
        marks = np.zeros(self._sources + 1, dtype=np.int8)
        marks[first] += 1
        marks[last] -= 1
        selected = np.cumsum(marks[:-1], dtype=np.int8).view(np.bool_)
        if self._is_in_order:
            return selected
        selection = np.empty_like(selected)
        selection[self._order] = selected
        return selection

    def _replace(self, middle: Indices, children: Indices, found: Indices) -> None:
        """Replaces the active blocks by their halves and the targets of these."""
        active = self._active
        pairs, starts = coloring.bucket(children, 2 * active.size)
        before, after = np.diff(self._starts)[active], np.diff(starts).reshape(-1, 2)
        separated = (after <= SEPARATES * before[:, None]).any(1)
        idle = np.where(separated, 0, self._idle[active] + 1)
        rest = np.delete(np.arange(self._first.size), active)
        rest_starts, rest_members = _select(self._starts, self._members, rest)

        def halves(values: Indices, left: Indices, right: Indices) -> Indices:
            return np.concatenate([values[rest], np.stack([left, right], 1).reshape(-1)])

        first, last, tensor = self._first[active], self._last[active], self._tensor[active]
        self._first, self._last = halves(self._first, first, middle), halves(self._last, middle, last)
        self._tensor, self._idle = halves(self._tensor, tensor, tensor), halves(self._idle, idle, idle)
        self._members = np.concatenate([rest_members, found[pairs]])
        self._starts = np.concatenate([rest_starts, starts[1:] + rest_members.size])

    def targets(self) -> tuple[Indices, Indices]:
        """The targets of each source, which are those of its block: CSR over the sources, each list ascending."""
        in_order = np.argsort(self._first)
        block = np.empty(self._sources, dtype=np.int64)
        block[self._order] = np.repeat(in_order, (self._last - self._first)[in_order])
        return _lists(self._starts, self._members, block)


def _select(starts: Indices, members: Indices, chosen: Indices) -> tuple[Indices, Indices]:
    """CSR of the chosen lists; all of them means in their order."""
    return (starts, members) if chosen.size == starts.size - 1 else _lists(starts, members, chosen)


def _lists(starts: Indices, members: Indices, chosen: Indices) -> tuple[Indices, Indices]:
    """CSR of the lists with these numbers."""
    counts = np.diff(starts)[chosen]
    selected = _starts(counts)
    return selected, members[np.repeat(starts[chosen] - selected[:-1], counts) + np.arange(selected[-1])]


def refined(
    columns: Refinement | None,
    rows: Refinement | None,
    inputs: Sequence[Block],
    outputs: Sequence[Block],
    has_room: Callable[[int], bool],
    most_probes: int,
    most_if_likely: int = 0,
    may_be_unfinished: bool = True,
) -> Pattern | None:
    """The pattern from the side that finishes first; None if it exceeds the numbers of probes or entries.

    The two sides take turns, each until it has taken twice as many probes as the other: a Jacobian may
    be hopeless from one side and trivial from the other, and VJPs after evaluations need a new graph. A
    side that gives up, with most entries possible, ends nothing. A side alone takes all turns. Once at most
    LIKELY_SHARE of all entries are possible, most_if_likely probes are allowed, if that is more; a level beyond
    most_probes must save more calls than it costs. If probing ends early then, the pattern has all entries that are
    not ruled out, unless it must be finished.
    """

    def spent(side: Refinement) -> int:
        return side.probes + side.next_cost

    sides = [side for side in (columns, rows) if side is not None]
    side = min(sides, key=spent)
    n, m = sum(block.size for block in inputs), sum(block.size for block in outputs)
    while True:
        settled = [side for side in sides if side.is_done]
        best = min(settled, key=lambda side: side.entries, default=None)
        if best is not None and (len(settled) == len(sides) or best.entries <= n * m / 2):
            break
        other = sides[sides.index(side) - 1]
        if side.is_done or (not other.is_done and spent(side) > 2 * spent(other)):
            side = other
        is_likely = any(each.entries <= LIKELY_SHARE * n * m for each in sides)
        most = max(most_probes, most_if_likely) if is_likely else most_probes
        needed = sum(each.probes for each in sides) + side.next_cost
        # If entries are spread evenly, so many calls compress them: two evaluations a column group, a VJP a row group.
        calls = side.entries * (2 / max(1, m) + 1 / max(1, n))
        if needed > most or (needed > most_probes and side.next_cost > (1 - side.last_share) * calls):
            if not (is_likely and may_be_unfinished):
                return None
            best = min(sides, key=lambda side: side.entries)
            break
        side.refine()
    if not has_room(best.entries):
        return None
    starts, members = best.targets()
    if best is columns:
        starts, members = coloring.transpose(starts, members, m)
    probes = (side.probes if side else 0 for side in (columns, rows))
    pattern = Pattern(starts, members, n, "probed by {} evaluations and {} VJPs".format(*probes))
    return replace(_with_whole_elements(pattern, inputs, outputs), is_numerical=best is columns)


def _with_whole_elements(pattern: Pattern, inputs: Sequence[Block], outputs: Sequence[Block]) -> Pattern:
    """The pattern extended to all coordinates of each element of an entry."""
    if not any(block.is_complex for block in (*inputs, *outputs)):
        return pattern
    first_row, row_widths = _elements(outputs)
    first_column, column_widths = _elements(inputs)
    # Each element's entry once, before it becomes up to four: patterns may just fit in memory.
    keys = np.unique(first_row[pattern.rows()] * pattern.n + first_column[pattern.columns])
    i, j = np.divmod(keys, pattern.n)
    entries = []
    for di in range(2):
        for dj in range(2):
            within = (di < row_widths[i]) & (dj < column_widths[j])
            entries.append((i[within] + di, j[within] + dj))
    i, j = (np.concatenate(side) for side in zip(*entries, strict=True))
    return _from_entries(i, j, pattern.m, pattern.n, pattern.origin)


def _elements(blocks: Sequence[Block]) -> tuple[Indices, Indices]:
    """Per coordinate, the first coordinate of its element, and the number of coordinates of the element."""
    widths = np.repeat([block.width for block in blocks], [block.size for block in blocks])
    coordinates = np.arange(widths.size)
    firsts = np.repeat([block.first for block in blocks], [block.size for block in blocks])
    return coordinates - (coordinates - firsts) % widths, widths
