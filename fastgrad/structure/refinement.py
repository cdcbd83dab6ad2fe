"""Sparsity patterns found by refinement: blocks of sources are perturbed, and halved until each is resolved.

Sources are the columns and targets are the rows, or vice versa. The targets that change are recorded.

Source: Griewank & Mitev, Detecting Jacobian sparsity patterns by Bayesian probing (2002).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from fastgrad.problem.coordinates import Block
from fastgrad.structure import coloring
from fastgrad.structure.coloring import Indices
from fastgrad.structure.sparsity import MAX_HUBS, Mask, Pattern, starts_of, with_whole_elements

SEPARATES = 0.95
"""A halving is informative if one half reaches at most this share of the targets of the whole block."""

LIKELY_SHARE = 1 / 4
"""A sparse pattern is likely if at most this share of all entries is not ruled out. Then compression saves more than
the larger budget of probes costs."""

PATIENCE = 2
"""Number of successive uninformative halvings after which a block is treated as dense."""

HUB_SHARE = 0.5
"""If there are many blocks, a target (hub) that more than this share of them reach belongs to a dense row."""

BLOCKS_BEFORE_GIVING_UP = 32
"""Smallest number of blocks for which uninformative halvings and hubs are counted. If there are fewer, each of them may
reach most targets."""


def probes_to_arrange(blocks: Sequence[Block]) -> int:
    """Number of probes that a `Refinement` takes before its first level."""
    wide = (sum(size > 1 for size in block.tensor.shape) for block in blocks if block.size)
    return sum(1 + dims for dims in wide if dims > 1)


class Refinement:
    """Finds the columns or the rows of the pattern by probing blocks of sources, which are halved level by level.

    Columns: the sources are the coordinates of the inputs, the targets are those of the outputs, and a
    probe is an evaluation. Rows: vice versa, and a probe is a VJP. Blocks that share no target are
    probed together. Dimensions along which half of a tensor reaches fewer targets than the whole are
    halved first: for a convolution, the spatial dimensions before the channels.

    Attributes
    ----------
    probes
        Number of calls of `respond` so far.
    last_share
        The share of possible entries that the last level did not rule out.
    """

    def __init__(
        self, respond: Callable[[Mask], Mask], blocks: Sequence[Block], targets: int, splits_hubs: bool = False
    ) -> None:
        """respond: maps selected sources, shape (sources,), to the targets that react, shape (targets,).

        splits_hubs: whether hubs, that is, the few targets that most blocks reach, are treated as dense rows and
        ignored when blocks are colored. Without this, dense rows hide the pattern of the other rows.
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
        self._starts = starts_of(np.array([targets.size for targets in reached], dtype=np.int64))
        self._members = np.concatenate(reached)
        self._prepare()

    def _probe(self, selection: Mask) -> Indices:
        self.probes += 1
        return np.flatnonzero(self._respond(selection))

    def _arrange(self, block: Block) -> Indices:
        """Puts the separating dimensions of a tensor first, and returns the targets that the whole tensor reaches."""
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
        # Number of coordinates per index of each dimension, ascending, from one element to the whole tensor.
        units = {width}
        inside = width
        for dim in reversed(order):
            inside *= shape[dim]
            units.add(inside)
        self._units.append(np.array(sorted(units), dtype=np.int64))
        return reached

    def _prepare(self) -> None:
        """Selects the blocks to halve next, and colors them."""
        smallest = np.array([units[0] for units in self._units], dtype=np.int64)
        blocks = np.bincount(self._tensor, minlength=len(self._units))
        settled = (self._idle >= PATIENCE) & (blocks[self._tensor] >= BLOCKS_BEFORE_GIVING_UP)
        divisible = self._last - self._first > smallest[self._tensor]
        self._active = np.flatnonzero(divisible & ~settled & (np.diff(self._starts) > 0))
        self._lists = _lists(self._starts, self._members, self._active)
        self._to_hubs = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        if self._splits_hubs and self._active.size >= BLOCKS_BEFORE_GIVING_UP:
            self._split_hubs()
        self._colors = coloring.color(*self._lists, self._targets)

    def _split_hubs(self) -> None:
        """Removes hubs (targets of most blocks) from the lists of targets, because hubs prevent grouping."""
        starts, members = self._lists
        hubs = np.bincount(members, minlength=self._targets) > HUB_SHARE * self._active.size
        if hubs.sum() > MAX_HUBS * self._targets:
            return
        of_hubs = hubs[members]
        self._to_hubs = np.repeat(np.arange(self._active.size), np.diff(starts))[of_hubs], members[of_hubs]
        self._lists = starts_of(~of_hubs)[starts], members[~of_hubs]

    @property
    def is_done(self) -> bool:
        """Whether no block is left to halve."""
        return not self._active.size

    @property
    def next_cost(self) -> int:
        """Number of probes that the next level takes."""
        return 0 if self.is_done else 2 * (int(self._colors.max()) + 1)

    @property
    def entries(self) -> int:
        """Number of entries that are not ruled out so far."""
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
        # If a block reaches a hub, both of its halves are assumed to reach it.
        blocks, hubs = self._to_hubs
        found: list[Indices] = [hubs, hubs]
        children: list[Indices] = [2 * blocks, 2 * blocks + 1]
        for begin, end in pairwise(color_starts.tolist()):
            chosen = order[begin:end]
            part_starts, part = _lists(starts, members, chosen)
            owner = np.full(self._targets, -1)
            owner[part] = np.repeat(chosen, np.diff(part_starts))
            for side, (low, high) in enumerate(((first, middle), (middle, last))):
                reacted = self._probe(self._selection(low[chosen], high[chosen]))
                # Targets that none of these blocks reached on the previous level are ignored: certificates find them.
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
        """Replaces the active blocks and their targets by the halves and the targets of the halves."""
        active = self._active
        pairs, starts = coloring.bucket(children, 2 * active.size)
        before, after = np.diff(self._starts)[active], np.diff(starts).reshape(-1, 2)
        separated = (after <= SEPARATES * before[:, None]).any(1)
        idle = np.where(separated, 0, self._idle[active] + 1)
        rest = np.delete(np.arange(self._first.size), active)
        rest_starts, rest_members = _lists(self._starts, self._members, rest)

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


def _lists(starts: Indices, members: Indices, chosen: Indices) -> tuple[Indices, Indices]:
    """CSR of the lists with the chosen numbers."""
    counts = np.diff(starts)[chosen]
    selected = starts_of(counts)
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
    """The pattern from the side that finishes first; None if it takes too many probes or has too many entries.

    The two sides take turns, because the pattern may be impossible to find from one side and easy to find from the
    other side. A turn ends when the side has taken twice as many probes as the other side. Turns are this long because
    VJPs after evaluations need a new graph. If one side ends with most entries not ruled out, the other side continues.
    If only one side is given, it takes all turns.

    If at most LIKELY_SHARE of all entries are not ruled out, a sparse pattern is likely. Then most_if_likely probes are
    allowed, if this is more than most_probes. However, a level beyond most_probes must save more calls than it costs.
    If a pattern is likely, but the allowed probes do not resolve all blocks, the pattern has all entries that are not
    ruled out; without may_be_unfinished, it is None.
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
        # Calls of a compressed Jacobian with evenly spread entries: two evaluations per column group, one VJP per row
        # group.
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
    return replace(with_whole_elements(pattern, inputs, outputs), is_numerical=best is columns)
