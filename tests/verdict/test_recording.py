"""Gradients that are recorded, and gradients that are not."""

from __future__ import annotations

import math

import pytest
import torch

from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings
from fastgrad.verdict.recording import _difference


@pytest.mark.parametrize(
    ("recorded", "plain", "agree"),
    [
        (1.0, 1.0005, True),
        (1.0, 1.01, False),
        (1.0, math.inf, False),  # the relative tolerance of an infinite gradient allows everything
        (math.inf, 1.0, False),
        (math.inf, math.inf, True),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
    ],
)
def test_gradients_that_are_not_finite_agree_only_with_the_same(recorded: float, plain: float, agree: bool) -> None:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    left, right = (torch.tensor([0.5, value], dtype=torch.float64) for value in (recorded, plain))
    with Problem(torch.sin, (x,)) as problem:
        found = _difference(problem, Settings(), "recorded gradient", "with it", left, "without", right)
    assert (found is None) == agree
