"""Verdicts on generated programs equal those of torch's slow mode; `python -m tests.properties.sweep` runs many."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings

from tests.properties.oracle import compare
from tests.properties.programs import KINDS, Program, programs

FEW = settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@given(programs([name for name, kind in KINDS.items() if not kind.sparse]))
@FEW
def test_verdicts_are_torchs_or_listed_and_true(program: Program) -> None:
    check(program)


@given(programs([name for name, kind in KINDS.items() if kind.sparse]))
@FEW
def test_verdicts_on_sparse_inputs_are_torchs_or_listed_and_true(program: Program) -> None:
    check(program)


def check(program: Program) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        comparison = compare(program)
    finally:
        torch.set_num_threads(threads)
    assert not comparison.alarm, str(comparison)
