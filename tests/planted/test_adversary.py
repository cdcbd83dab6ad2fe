"""A part of the adversary's table, in small sizes; tests.planted.adversary_sweep runs all of it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator

import pytest

from tests.planted.adversary import ATTACKS, FAMILIES, Attack
from tests.planted.adversary_sweep import classify, own, torchs

MOST = 100
"""Input elements: torch, which decides where fastgrad and the table differ, takes a fraction of a second there."""

A_FAMILY = 4
"""Rows of each family, half of them wrong."""


def sample() -> Iterator[Attack]:
    for family in FAMILIES:
        rows = [row for row in family() if min(row.sizes) <= MOST]
        for wrong in (True, False):
            kind = [row for row in rows if row.wrong == wrong]
            for row in kind[:: max(1, len(kind) // (A_FAMILY // 2))][: A_FAMILY // 2]:
                yield dataclasses.replace(row, sizes=(max(n for n in row.sizes if n <= MOST),))


def test_the_table_is_large_and_names_are_unique() -> None:
    assert sum(row.wrong for row in ATTACKS) >= 300
    assert sum(not row.wrong for row in ATTACKS) >= 300
    assert len({row.name for row in ATTACKS}) == len(ATTACKS)


SLOW = [pytest.param(row, "slow", id=row.name) for row in sample()]
FAST = [pytest.param(row, "fast", id=f"{row.name}, fast mode") for row in list(sample())[::3]]


@pytest.mark.parametrize(("row", "mode"), [*SLOW, *FAST])
def test_wrong_is_found_and_right_passes(row: Attack, mode: str) -> None:
    """The table states the true verdict. If it does not, torch's slow mode decides, which also misses some errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about float32 inputs
        mine = own(row, 0, mode, "auto")
        verdict = classify(row, mine, None) or classify(row, mine, torchs(row, 0))
    assert verdict in ("found", "right", "shared", "declared"), mine
