"""What a certificate found to be missing from a sparsity pattern."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastgrad.structure.coloring import Indices

MAX_SUSPECTS = 8
"""Largest number of rows, and of columns, that are examined after a failed certificate."""

NO_INDICES: Indices = np.empty(0, dtype=np.int64)


class Incomplete(NamedTuple):
    """What a certificate found to be missing: entries that a pattern lacks, or a part that no entry explains.

    Attributes
    ----------
    rows, columns
        The row and column of each entry: shape (entries,).
    refuted
        Whether the pattern must be given up, for example because too many entries are missing to list them one by one.
    unexplained
        The part of a derivative or a product that no entry explains; None: everything is explained.
    """

    rows: Indices
    columns: Indices
    refuted: bool = False
    unexplained: float | None = None

    @property
    def ends(self) -> bool:
        """Whether the pattern cannot be corrected by adding the missing entries."""
        return self.refuted or self.unexplained is not None

    @property
    def is_nothing(self) -> bool:
        """Whether nothing is missing."""
        return not self.ends and not self.rows.size


def incomplete(
    learnt: list[tuple[Indices, Indices]], refuted: bool = False, unexplained: float | None = None
) -> Incomplete:
    """An `Incomplete` of all entries in `learnt`, which holds (rows, columns) of several groups of entries."""
    rows, columns = (np.concatenate(numbers) for numbers in zip((NO_INDICES, NO_INDICES), *learnt, strict=True))
    return Incomplete(rows, columns, refuted, unexplained)
