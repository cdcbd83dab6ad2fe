"""Replaces the cost model while a test runs."""

from __future__ import annotations

import pytest

from fastgrad.engines import cost_model


def set_costs(monkeypatch: pytest.MonkeyPatch, **costs: float) -> None:
    """Replaces the named costs, so that the choices do not depend on the machine."""
    monkeypatch.setattr(cost_model, "COSTS", cost_model.COSTS._replace(**costs))
