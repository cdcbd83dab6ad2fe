"""Gradients that are recorded, and gradients that are not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings
from fastgrad.verdict.recording import _difference
from tests.planted.row import function


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
        found = _difference(problem, Settings(), "recorded gradient", "with create_graph=True", left, "without", right)
    assert (found is None) == agree


RANDOM: list[Callable[[Tensor], Tensor]] = [
    lambda x: (x * torch.rand_like(x)).sin(),
    lambda x: torch.nn.functional.dropout(x * x),
    function(torch.sin, lambda g, x: g * x.cos() * (1 + 0.1 * torch.rand_like(x))),
]


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("size", [5, 60])
@pytest.mark.parametrize("func", RANDOM)
def test_random_gradients_are_not_said_to_depend_on_recording(
    func: Callable[[Tensor], Tensor], size: int, fast: bool
) -> None:
    x = torch.linspace(0.5, 2, size, dtype=torch.float64).requires_grad_()
    for seed in range(3):
        with pytest.raises(fastgrad.GradcheckError) as raised:
            fastgrad.gradgradcheck(func, (x,), fast_mode=fast, seed=seed)
        text = str(raised.value)
        assert "create_graph" not in text
        assert "func or its backward gives different values for the same inputs" in text or "not reentrant" in text


def test_a_gradient_that_depends_on_recording_is_said_to_do_so() -> None:
    func = function(torch.sin, lambda g, x: g * x.cos() * (1.5 if torch.is_grad_enabled() else 1))
    with pytest.raises(fastgrad.GradcheckError, match="differ between create_graph=True and create_graph=False"):
        fastgrad.gradgradcheck(func, (torch.linspace(0.5, 2, 5, dtype=torch.float64).requires_grad_(),))
