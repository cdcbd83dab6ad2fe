"""Functions over two and three ranks: right ones pass; mistakes between ranks fail, and are named."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import run_ranks
from tests.planted.distributed import rows

FAST, SECOND = {"fast_mode": True}, {"order": 2}
Runs = list[tuple[list[str], dict[str, Any]]]
Said = dict[tuple[str, str], list[dict[str, Any]]]


def named(*parts: str) -> list[str]:
    return [row.name for row in rows() if any(part in row.name for part in parts)]


ROWS = {row.name: row for row in rows()}
FIRST = [
    name
    for name, row in ROWS.items()
    if row.fewest <= 2
    and (row.is_first or not row.is_wrong or name.startswith(("declared", "gathered rows: slices to another rank")))
]
"""Right functions, and of each the first mistake; `python -m tests.distributed.sweep` runs all."""

ON_THREE = named("to another rank")
"""Mistakes that are run on three ranks: there a neighbor is not the only other one."""

IN_FAST_MODE = ["row-parallel linear", *named("row-parallel linear: all", "row-parallel linear: summed")]
OF_SECOND_ORDER = ["row-parallel linear: all_reduce in backward", "scatter: own part only"]
RUNS: dict[int, Runs] = {
    2: [(FIRST, {}), (IN_FAST_MODE, FAST), (OF_SECOND_ORDER, SECOND)],
    3: [(ON_THREE, {})],
}
"""Runs by the number of ranks: rows, and keywords."""


@functools.cache
def results(count: int) -> Said:
    return run(count, RUNS[count])


def run(count: int, runs: Runs) -> Said:
    """The result of each row on each rank, by the name of the row and its keywords."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows"
        run_ranks(count, "tests.distributed.run_rows", str(out), json.dumps(runs), err=f"{out}.err")
        found: Said = {}
        for rank in range(count):
            for line in out.with_suffix(f".{rank}").read_text().splitlines():
                row = json.loads(line)
                found.setdefault((row["name"], json.dumps(row["keywords"])), []).append(row)
    return found


def judge(said: Said, name: str, count: int, keywords: dict[str, Any]) -> None:
    """Fails if a verdict or the first cause is not as expected, or ranks differ."""
    row, of_ranks = ROWS[name], said[name, json.dumps(keywords)]
    first = of_ranks[0]
    assert len(of_ranks) == count
    assert first["verdict"] == ("failed" if row.is_wrong else "passed"), first["text"]
    assert all(one["as before"] for one in of_ranks)
    assert {one["text"] for one in of_ranks} == {first["text"]}, "the report is the same on all ranks"
    if row.causes and keywords != SECOND:
        assert first["cause"] in row.causes, first["text"]


@pytest.mark.parametrize("name", FIRST)
def test_two_ranks(name: str) -> None:
    judge(results(2), name, 2, {})


@pytest.mark.parametrize("name", ON_THREE)
def test_three_ranks(name: str) -> None:
    judge(results(3), name, 3, {})


@pytest.mark.parametrize("name", IN_FAST_MODE)
def test_fast_mode(name: str) -> None:
    judge(results(2), name, 2, FAST)


@pytest.mark.parametrize("name", OF_SECOND_ORDER)
def test_second_derivatives(name: str) -> None:
    judge(results(2), name, 2, SECOND)


def test_the_rank_of_a_wrong_entry_is_named() -> None:
    found = results(2)["gathered rows: slices to another rank", "{}"][0]
    assert any("is wrong on rank" in note for note in found["notes"])


def test_at_least_forty_mistakes() -> None:
    assert sum(row.is_wrong for row in rows()) >= 40
