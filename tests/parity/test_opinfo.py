"""A part of the operator sweep: compares the verdict with that of torch's slow mode, for one sample per operator."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases import operators
from tests.parity.sweep import CHECKS, DTYPES, compare_operator

EVERY = {"auto": 47, "compressed": 61, "sketch": 53}  # of the operators; `make parity` runs them all


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("engine", EVERY)
def test_verdicts_are_torchs(engine: str, check: str, dtype: str) -> None:
    threads = torch.get_num_threads()
    rows = []
    try:
        for number in range(EVERY[engine] // 2, len(operators(DTYPES[dtype], CHECKS[check].supports)), EVERY[engine]):
            rows += compare_operator((check, dtype, number, 1, engine))
    finally:
        torch.set_num_threads(threads)
    compared = [row for row in rows if "fastgrad" in row]
    assert len(compared) >= 5
    assert sum(row["torch"] == "pass" for row in compared) > 0.8 * len(compared)
    assert [row for row in compared if row["torch"] != row["fastgrad"] and not row["evidence"]] == []
