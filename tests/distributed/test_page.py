"""The examples of docs/distributed.md, on two ranks."""

from __future__ import annotations

from typing import get_args

from fastgrad.report.evidence import RankCauseName
from tests.distributed.ranks import ROOT, torchrun


def test_examples() -> None:
    torchrun(2, "tests.distributed.run_page")


def test_each_cause_has_a_row() -> None:
    page = (ROOT / "docs" / "distributed.md").read_text()
    assert all(f"| {name} |" in page for name in get_args(RankCauseName))
