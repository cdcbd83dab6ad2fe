"""A sample of the sweep: verdicts on the simulated device are those on the CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases import operators
from tests.pretended_cuda.sweep import UNLIKE, compare_operator

EVERY = 24
"""One in this many operators is tested here; `make sweep-pretended-cuda` goes through all of them."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_verdicts_are_the_cpus(dtype: torch.dtype, fast_mode: bool) -> None:
    found = [
        row
        for op in operators(dtype)[::EVERY]
        if op.name not in UNLIKE
        for row in compare_operator(op, dtype, 1, fast_mode)
    ]
    assert len(found) >= 8
    assert sum(cpu == "pass" for _, cpu, _ in found) > 0.8 * len(found)
    assert [row for row in found if row[1] != row[2]] == []
