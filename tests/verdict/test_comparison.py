"""The comparison with other tools: its page agrees with its result; its cells and verdicts are right."""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import bench_comparison as comparison
from benchmarks import wrong_gradients
from benchmarks.checkers import CHECKERS, counted
from benchmarks.measure import RESULTS
from benchmarks.wrong_gradients import RIGHT, WRONG
from fastgrad.checks.order import check
from fastgrad.report.settings import Settings

OF_TORCH = [checker for checker in CHECKERS if checker.module == "torch"]
OPTIONS = argparse.Namespace(cap=60.0, quick=30.0, rounds=1, budget=0.0)


def test_the_page_is_up_to_date() -> None:
    result = json.loads((RESULTS / f"{comparison.NAME}.json").read_text())
    assert comparison.page(result) == comparison.PAGE.read_text(), "make comparison, or bench_comparison --page"
    assert set(comparison._unique(result["rows"], "tool")) == {checker.name for checker in CHECKERS}
    kept = {row["case"] for row in result["rows"]}
    assert kept == {*comparison.CASES, *RIGHT, *(planted.name for planted in WRONG)}


@pytest.fixture
def little_garbage() -> Iterator[None]:
    """Measuring memory collects garbage; this excludes the garbage of the whole session."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("little_garbage")
def test_cells() -> None:
    case, n = "convolution", 12
    rows: dict[str, dict[str, Any]] = {}
    for checker in OF_TORCH:
        rows[checker.name] = comparison.cell(case, n, checker, comparison.rival(checker), OPTIONS)
    assert all(row["verdict"] is True for row in rows.values())
    assert all(row["ratio"] == row["seconds"] / row["own_seconds"] for row in rows.values())
    m = comparison.make(case, n).func(comparison.make(case, n).x).numel()
    # torch: two evaluations per column, every row twice; one more evaluation for the outputs, and one for attributes.
    assert (rows["torch slow"]["evaluations"], rows["torch slow"]["backwards"]) == (2 * n + 2, 2 * m + 2)
    assert (rows["by hand, loop"]["evaluations"], rows["by hand, loop"]["backwards"]) == (3, m)
    assert (rows["by hand, vectorize"]["evaluations"], rows["by hand, vectorize"]["backwards"]) == (3, 1)
    assert {row["own"] for row in rows.values()} == {"fastgrad exact", "fastgrad fast"}


@pytest.mark.parametrize("fast", [False, True])
def test_calls_are_counted_as_reports_count_them(fast: bool) -> None:
    problem, counts = counted(comparison.make("banded", 60))
    report = check(problem.func, (problem.x,), Settings(fast_mode=fast))
    assert (counts.evaluations, counts.backwards) == (report.evaluations, report.vjps)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("one entry by 1e-2", {"fastgrad exact": "entry", "torch fast": "missed", "by hand, loop": "entry"}),
        ("complex: a conjugate missing", {"fastgrad fast": "entry", "torch slow": "found", "by hand, loop": "entry"}),
        ("grad_output clamped to [-1, 1]", {"fastgrad exact": "kind", "torch slow": "missed"}),
        ("zero for a grad_output that is not contiguous", {"fastgrad fast": "kind", "by hand, vectorize": "missed"}),
    ],
)
def test_errors(error: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrong_gradients, "N", 64)
    monkeypatch.setattr(wrong_gradients, "SIDE", 8)
    (planted,) = (planted for planted in WRONG if planted.name == error)
    rows = comparison.found(planted, [checker for checker in OF_TORCH if checker.name in expected])
    assert {row["tool"]: row["verdict"] for row in rows} == expected
    assert all(bool(row["message"]) == (row["verdict"] != "missed") for row in rows)


def test_alarms() -> None:
    rows = comparison.alarms("3 x at 1e9", OF_TORCH[:2])
    assert [row["verdict"] for row in rows] == ["passes", "false alarm"]


@pytest.mark.parametrize(
    ("message", "width", "expected"),
    [
        ("worst d out0[3] / d in0[5]", 1, "entry"),
        ("worst d out0[5] / d in0[3]", 1, "found"),
        ("Greatest absolute difference: 1.0 at index (3, 5) (up to 1e-05 allowed)", 1, "entry"),
        ("Mismatch at index:\n [3, 5]: 1.0 (ACTUAL), 2.0 (DESIRED)", 1, "entry"),
        ("Greatest absolute difference: 1.0 at index (7, 10) (up to 1e-05 allowed)", 2, "entry"),
        ("backward is not linear in grad_output", 1, "kind"),
        ("numerical:tensor([[3, 5]])", 1, "found"),
    ],
)
def test_what_a_message_names(message: str, width: int, expected: str) -> None:
    assert comparison.judged(message, {(3, 5)}, width) == expected


def _row(tool: str, n: int, verdict: Any, **fields: Any) -> dict[str, Any]:
    return {"question": "cost", "case": "dense", "tool": tool, "n": n, "verdict": verdict, **fields}


def test_tables() -> None:
    slow, hand, fast = "torch slow", "by hand, loop", "fastgrad fast"
    rows = [
        _row(slow, 10, True, seconds=2e-3),
        _row(hand, 10, True, seconds=1.25, ratio=625.0, own="fastgrad exact"),
        _row(fast, 10, True, seconds=1e-3),
        _row(slow, 100, True, seconds=0.5),
        _row(hand, 100, "over cap", predicted_seconds=12.5),
        _row(slow, 1000, "raises RuntimeError: no"),
        _row(hand, 1000, "not for this"),
    ]
    assert comparison.cost_table(rows, comparison._seconds, lambda row: row["seconds"]).splitlines() == [
        "| n | 10 | 100 | 1,000 |",
        "| --- | --- | --- | --- |",
        "| torch slow | **2 ms** | **500 ms** | fails |",
        "| by hand, loop | 1.25 s | > cap | - |",
        "| fastgrad fast | **1 ms** |",
    ]
    assert comparison.ratio_table(rows).splitlines() == [
        "| torch slow | 2 of 2 |  |  |  |  |  |",
        "| by hand, loop | 0 of 2 | fastgrad exact | 0 of 1 | 625 | 625 | 625 |",
        "| fastgrad fast | 1 of 1 |  |  |  |  |  |",
    ]
    verdicts = [
        {"case": "zero", "tool": "a", "verdict": "entry"},
        {"case": "zero", "tool": "b", "verdict": "missed"},
        {"case": "rolled", "tool": "a", "verdict": "found"},
        {"case": "rolled", "tool": "b", "verdict": "not for this"},
    ]
    assert comparison.verdict_table(verdicts, ("entry", "kind"), "error", "found").splitlines() == [
        "| error | a | b |",
        "| --- | --- | --- |",
        "| zero | **entry** | missed |",
        "| rolled | found | - |",
        "| found | 2 of 2 | 0 of 1 |",
    ]


def test_when_a_tool_is_not_tried() -> None:
    assert comparison.predicted([], 10) == 0
    assert comparison.predicted([0.2], 10) == pytest.approx(2)
    assert comparison.predicted([0.1, 0.2], 10) == pytest.approx(2)
    assert comparison.predicted([0.01, 0.9], 10) == pytest.approx(81)


def test_a_process_that_ends_or_hangs_leaves_a_row() -> None:
    assert comparison.apart(lambda: {"verdict": True}, 20) == {"verdict": True}
    assert comparison.apart(lambda: os._exit(3), 20) == {"verdict": "ended without a word"}
    assert comparison.apart(lambda: os.read(os.pipe()[0], 1), 0.1) == {"verdict": "killed"}
    assert comparison.apart(lambda: 1 / 0, 20) == {"verdict": "raises ZeroDivisionError: division by zero"}
