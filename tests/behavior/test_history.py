"""Wrong gradients that libraries shipped fail at inputs at which they are wrong, and their right twins pass."""

from __future__ import annotations

from typing import Any

import pytest

import fastgrad
from tests.planted.history import HISTORY, Shipped

ROWS = pytest.mark.parametrize("row", [pytest.param(row, id=row.title) for row in HISTORY])
MODES = pytest.mark.parametrize("mode", [{}, {"fast_mode": True}], ids=["exact", "fast"])


def passes(row: Shipped, func: Any, inputs: tuple[Any, ...], **mode: Any) -> bool:
    check = fastgrad.gradgradcheck if row.order == 2 else fastgrad.gradcheck
    return check(func, inputs, **row.keywords, **mode, raise_exception=False)


@ROWS
@MODES
def test_wrong_fails_where_it_is_wrong(row: Shipped, mode: dict[str, Any]) -> None:
    assert not passes(row, row.func, row.inputs(), **mode)


@ROWS
@MODES
def test_right_passes_there_and_at_a_random_point(row: Shipped, mode: dict[str, Any]) -> None:
    assert passes(row, row.twin, row.inputs(), **mode)
    assert passes(row, row.twin, row.generic(), **mode)


def test_titles_and_issues_are_different() -> None:
    assert len({row.title for row in HISTORY}) == len({row.issue for row in HISTORY}) == len(HISTORY)
