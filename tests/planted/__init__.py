"""The one table of planted errors, tried on every engine and mode."""

from __future__ import annotations

from tests.planted.blind import ROWS as BLIND
from tests.planted.known import ROWS as KNOWN
from tests.planted.row import Row

TABLE: list[Row] = [*KNOWN, *BLIND]

__all__ = ["TABLE", "Row"]
