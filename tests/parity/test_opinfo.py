"""A part of `make parity`: compares verdicts with those of torch's slow mode, for one sample per operator or module."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.sweep import CHECKS, DTYPES, compare, subjects

EVERY = {"auto": 47, "compressed": 61, "sketch": 53}  # of the operators; `make parity` runs them all
EVERY_MODULE = 9

pytestmark = pytest.mark.filterwarnings("ignore")


def compared(source: str, check: str, dtype: str, engine: str, every: int) -> list[dict[str, Any]]:
    """The verdicts of both checkers on some operators or modules; no verdicts may differ without evidence."""
    threads = torch.get_num_threads()
    rows = []
    try:
        for number in range(every // 2, len(subjects(source, check, dtype)), every):
            rows += compare((source, check, dtype, number, 1, engine))
    finally:
        torch.set_num_threads(threads)
    found = [row for row in rows if "fastgrad" in row]
    assert [row for row in found if row["torch"] != row["fastgrad"] and not row["evidence"]] == []
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("engine", EVERY)
def test_verdicts_are_torchs(engine: str, check: str, dtype: str) -> None:
    rows = compared("operators", check, dtype, engine, EVERY[engine])
    assert len(rows) >= 5
    assert sum(row["torch"] == "pass" for row in rows) > 0.8 * len(rows)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("engine", EVERY)
def test_verdicts_on_custom_operators_are_torchs(engine: str, check: str) -> None:
    rows = compared("custom", check, "float64", engine, 1)
    assert len(rows) >= 5
    assert sum(row["torch"] == "pass" for row in rows) > 0.6 * len(rows)


@pytest.mark.parametrize("check", ["grad", "gradgrad"])
@pytest.mark.parametrize("engine", ["auto", "sketch"])
def test_verdicts_on_modules_are_torchs(engine: str, check: str) -> None:
    rows = compared("modules", check, "float64", engine, EVERY_MODULE)
    assert len(rows) >= 10
    assert sum(row["torch"] == "pass" for row in rows) > 0.8 * len(rows)
