"""Matrices of linear maps from few products: a pattern is guessed or probed, colored, and its entries are certified.

Every pattern is tested: products of the map with random seeds must equal weighted sums of the entries. If they differ,
or if too few rows can share a product, there is no result, and the caller computes row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fastgrad.core.errors import raise_unless_of_func
from fastgrad.core.phases import phase
from fastgrad.core.precision import ROUNDING
from fastgrad.core.random import COTANGENT_STREAM, PROBE_COTANGENT, PROBE_DIRECTION, direction
from fastgrad.core.tensors import ones_at
from fastgrad.engines.plan import admitted_entries
from fastgrad.functional.linear_map import LinearMap
from fastgrad.report.settings import Settings
from fastgrad.structure import aligned, coloring, sparsity
from fastgrad.structure.coloring import Indices
from fastgrad.structure.detection import Budget, Detection
from fastgrad.structure.sparsity import Mask, Pattern

WORTH_A_GUESS = 32
"""Least number of rows for which the four products that test a guess, including their overhead, pay off."""

GROUPS_WORTH_THE_TRANSPOSE = 8
"""Least number of row groups for which a graph of the backward, which gives products of columns, may pay off."""

WORTH_PROBING = 256
"""Least number of rows for which probing pays off. It takes milliseconds in addition to its products."""

PROBING_SHARE = 4
"""Probing takes at most one product per this many rows."""

ALIGNING_SHARE = 10
"""Testing for aligned dimensions takes at most one product per this many rows."""

MIN_SAVING = 2
"""The least ratio of rows to products for which compression is worth it."""

CERTIFICATES = 2
"""Number of random seeds that certify a matrix; a random half of the second seed is zero."""

SCALES = (3.0, 5.0, 7.0)
"""Factors of a seed that show the rounding of products; powers of two would not show it."""


@dataclass(frozen=True)
class Entries:
    """A sparse matrix of shape (m, n), sorted by row, then by column: entries that are not listed are zero.

    Attributes
    ----------
    rows, columns
        int64, shape (nnz,), on the device of the values.
    values
        Shape (nnz,).
    """

    rows: Tensor
    columns: Tensor
    values: Tensor
    m: int
    n: int

    def transposed(self) -> Entries:
        """The transpose, of shape (n, m)."""
        order, _ = coloring.bucket(self.columns.cpu().numpy(), self.n)
        chosen = torch.from_numpy(order).to(self.values.device)
        return Entries(self.columns[chosen], self.rows[chosen], self.values[chosen], self.n, self.m)


@dataclass(frozen=True)
class _Scheme:
    """Groups of rows or columns (or both) that share a product, and the position of each entry in the products.

    Attributes
    ----------
    group_of, positions
        The group of each entry, and the position of the entry in the group's product: shape (nnz,).
    """

    map: LinearMap
    colors: Indices
    group_of: Indices
    positions: Indices

    @property
    def count(self) -> int:
        """Number of groups."""
        return int(self.colors.max()) + 1 if self.colors.size else 0

    def values(self) -> Tensor:
        """The entries, one product per group: shape (nnz,)."""
        order, starts = coloring.groups(self.colors)
        entries, entry_starts = coloring.bucket(self.group_of, self.count)
        found = torch.zeros(self.positions.size, dtype=self.map.dtype, device=self.map.device)
        positions = torch.from_numpy(self.positions[entries]).to(self.map.device)
        places = torch.from_numpy(entries).to(self.map.device)
        for g in range(self.count):
            seed = ones_at(self.map.m, torch.from_numpy(order[starts[g] : starts[g + 1]]), torch.device("cpu"))
            own = slice(entry_starts[g], entry_starts[g + 1])
            found[places[own]] = self.map.product(seed)[positions[own]]
        return found


@phase("matrix by structure")
def entries_by_structure(
    rows: LinearMap, columns: Callable[[], LinearMap | None] = lambda: None, symmetric: bool = False
) -> Entries | None:
    """The matrix of a linear map, if its sparsity needs fewer products than rows; otherwise None.

    Parameters
    ----------
    rows
        The map; its products certify the result.
    columns
        Makes the transpose of the map, or returns None; called if columns may need fewer products.
    symmetric
        Whether the matrix should be symmetric; the certificate detects if it is not.
    """
    if rows.m < WORTH_A_GUESS or not rows.n:
        return None
    patterns = _LinearMapPatterns(rows, columns, symmetric)
    try:
        for pattern in patterns.candidates():
            for scheme in patterns.schemes(pattern):
                i, j = (torch.from_numpy(side).to(rows.device) for side in (pattern.rows(), pattern.columns))
                found = Entries(i, j, scheme.values(), rows.m, rows.n)
                if _is_certified(rows, found):
                    return found
    except Exception as error:  # func or backward may raise only for groups: the caller then runs single rows
        raise_unless_of_func(error)
    return None


def _star_scheme(rows: LinearMap, pattern: Pattern, groups: int) -> _Scheme | None:
    """Reads each entry, or its mirror image, from one color's product; None if this takes `groups` products or more."""
    colors = coloring.star_color(pattern.starts, pattern.columns, groups - 1)
    if colors is None:
        return None
    count = int(colors.max()) + 1
    i, j = pattern.rows(), pattern.columns
    keys = i * count + colors[j]
    _, which, times = np.unique(keys, return_inverse=True, return_counts=True)
    alone = times[which] == 1  # row i has no other entry in columns of the color of j
    return _Scheme(rows, colors, np.where(alone, colors[j], colors[i]), np.where(alone, i, j))


class _LinearMapPatterns(Detection):
    """Patterns of a map's matrix, and their groupings.

    They come from products with its rows and, if the transpose was made, with its columns.
    """

    def __init__(self, rows: LinearMap, columns: Callable[[], LinearMap | None], symmetric: bool) -> None:
        self._rows, self._make_columns, self._symmetric = rows, columns, symmetric
        entries = admitted_entries(Settings(), rows.m * rows.n)
        probes = rows.m // PROBING_SHARE if rows.m >= WORTH_PROBING else 0
        super().__init__(rows.targets, rows.sources, Budget(probes, probes, entries, entries, looks=0))

    @cached_property
    def _columns(self) -> LinearMap | None:
        return self._make_columns()

    def schemes(self, pattern: Pattern) -> list[_Scheme]:
        """The groupings of a pattern that save products, the one with the fewest first."""
        colors = coloring.color(pattern.starts, pattern.columns, pattern.n)
        found = [_Scheme(self._rows, colors, np.repeat(colors, np.diff(pattern.starts)), pattern.columns)]
        if self._symmetric:
            by_stars = _star_scheme(self._rows, pattern, found[0].count)
            found += [by_stars] if by_stars else []
        elif found[0].count > GROUPS_WORTH_THE_TRANSPOSE and self._columns is not None:
            starts, members = coloring.transpose(pattern.starts, pattern.columns, pattern.n)
            colors = coloring.color(starts, members, pattern.m)
            found.append(_Scheme(self._columns, colors, colors[pattern.columns], pattern.rows()))
        found = [scheme for scheme in found if MIN_SAVING * (scheme.count + CERTIFICATES) <= self._rows.m]
        return sorted(found, key=lambda scheme: scheme.count)

    def candidates(self) -> Iterator[Pattern]:
        """Yields guesses, then the pattern that probing finds."""
        yield from self.guesses()
        if self._budget.probes:
            has_columns = not self._symmetric and self._columns is not None
            pattern = self.probe(watch_outputs=has_columns, splits_hubs=self._symmetric)
            if pattern is not None:
                yield pattern.with_entries(pattern.columns, pattern.rows()) if self._symmetric else pattern

    def _guesses(self) -> Iterator[Pattern | None]:
        rows = self._rows
        yield sparsity.guess_pointwise(*self._blocks)
        if self._budget.probes and len(rows.sources) == len(rows.targets) == 1:
            yield sparsity.guess_band(self._reacting_inputs, rows.m, rows.n, self._symmetric)
        yield self._aligned()

    def _aligned(self) -> Pattern | None:
        """The pattern by aligned dimensions, unless probing for a better one may take fewer products."""
        rows = self._rows
        if not 0 < aligned.probes_to_align(rows.sources, rows.targets) <= rows.m // ALIGNING_SHARE:
            return None
        found = aligned.align(self._reacting_inputs, rows.sources, rows.targets, self._has_room)
        return found.pattern.transposed() if found and found.most_in_row <= rows.m // PROBING_SHARE else None

    def _explains(self, pattern: Pattern) -> bool:
        """Whether the pattern explains which columns react to a random half of the rows."""
        seed = direction(pattern.m, 0, PROBE_COTANGENT, halved=True)
        reacted = (self._rows.product(seed) != 0).cpu().numpy()
        return sparsity.explains_look(pattern.transposed(), seed.numpy() != 0, reacted)

    def _reacting_outputs(self, moved: Mask) -> Mask:
        assert self._columns is not None
        return self._columns.reaction(moved, PROBE_DIRECTION)

    def _reacting_inputs(self, chosen: Mask) -> Mask:
        return self._rows.reaction(chosen, PROBE_COTANGENT)


def _is_certified(rows: LinearMap, found: Entries) -> bool:
    """Whether products with random seeds equal the weighted sums of the entries, up to rounding."""
    i, j = found.rows, found.columns
    precise = found.values.to(torch.promote_types(found.values.dtype, torch.float64))
    seeds = [
        direction(rows.m, 0, COTANGENT_STREAM + 16 * halved, halved=bool(halved)) for halved in range(CERTIFICATES)
    ]
    if rows.is_custom:  # custom code may be wrong only for one-hot seeds, or for all other seeds
        seeds += [ones_at(rows.m, row, torch.device("cpu")) for row in (0, -1)]
    for seed in map(rows.rounded, seeds):
        terms = precise * seed.to(rows.device)[i]
        total = torch.zeros(rows.n, dtype=precise.dtype, device=rows.device).index_add_(0, j, terms)
        size = torch.zeros(rows.n, dtype=torch.float64, device=rows.device).index_add_(0, j, terms.abs())
        product = rows.product(seed)
        error, ulp = (product - total).abs(), ROUNDING * rows.spacing
        # Not "error > allowed": a NaN is no certificate.
        wrong = ~(error <= ulp * size)
        if bool(wrong.any()):
            # If terms cancel inside the map, the rounding error is more than one ulp of the remaining terms. This is
            # accepted if the measured rounding is as large, and is at most the rounding of the largest sum.
            noise = _rounding_noise(rows, seed, product)
            excused = (error <= ROUNDING * noise) & (noise <= ulp * size.max())
            if not bool((~wrong | excused).all()):
                return False
    return True


def _rounding_noise(rows: LinearMap, seed: Tensor, product: Tensor) -> Tensor:
    """The largest deviation of (k seed) M / k from seed M, for several numbers k: shape (n,)."""
    multiples = [rows.product(rows.rounded(factor * seed)) / factor for factor in SCALES]
    return (torch.stack(multiples) - product).abs().amax(0).to(torch.float64)
