"""Planted errors fail with the right message, and their correct twins pass; torch's verdicts are as recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastgrad
from tests.planted import TABLE, Row
from tests.planted.known import moves_every_third_call, square

ROWS = pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE])


def checkers(row: Row) -> tuple[Callable[..., bool], Callable[..., bool]]:
    if row.order == 2:
        return fastgrad.gradgradcheck, torch.autograd.gradgradcheck
    return fastgrad.gradcheck, torch.autograd.gradcheck


@ROWS
def test_wrong_fails_and_is_named(row: Row) -> None:
    own, torchs = checkers(row)
    with pytest.raises(fastgrad.GradcheckError) as raised:
        own(row.wrong, row.inputs(), **row.keywords)
    assert row.phrase in str(raised.value)
    assert not raised.value.report.passed
    assert torchs(row.wrong, row.inputs(), **row.keywords, raise_exception=False) != row.torch_sees


@ROWS
def test_right_passes(row: Row) -> None:
    own, torchs = checkers(row)
    assert own(row.right, row.inputs(), **row.keywords)
    assert torchs(row.right, row.inputs(), **row.keywords, raise_exception=False) == row.torch_passes


@ROWS
def test_the_compressed_engine_finds_the_same(row: Row) -> None:
    own, _ = checkers(row)
    compressed = {**row.keywords, "engine": "compressed"}
    assert own(row.right, row.inputs(), **compressed)
    with pytest.raises(fastgrad.GradcheckError) as raised:
        own(row.wrong, row.inputs(), **compressed)
    assert row.phrase in str(raised.value)


@ROWS
def test_fast_mode_finds_the_same(row: Row) -> None:
    own, _ = checkers(row)
    fast = {**row.keywords, "fast_mode": True, "engine": "sketch", "raise_exception": False}
    assert own(row.right, row.inputs(), **fast)
    assert not own(row.wrong, row.inputs(), **fast)


@pytest.mark.parametrize("engine", ["dense", "compressed", "sketch"])
@pytest.mark.parametrize("calls", range(3))
def test_what_moves_every_third_time_is_found_whenever_that_is(engine: str, calls: int) -> None:
    x = torch.linspace(1, 2, 12, dtype=torch.float64).requires_grad_()
    with pytest.raises(fastgrad.GradcheckError, match="Backward is not reentrant"):
        fastgrad.gradcheck(square(moves_every_third_call(calls)), (x,), engine=engine, fast_mode=engine == "sketch")


@pytest.mark.parametrize("seed", [1])  # the other tests have 0, and the sweeps many more
def test_no_seed_raises_a_false_alarm_or_misses(seed: int) -> None:
    for row in TABLE:
        if row.order == 1:
            assert fastgrad.gradcheck(row.right, row.inputs(), **row.keywords, seed=seed)
            verdict: Any = fastgrad.gradcheck(row.wrong, row.inputs(), **row.keywords, seed=seed, raise_exception=False)
            assert not verdict, row.name
