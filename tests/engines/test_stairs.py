"""Gradients that agree only with the slope of a stair, because an intermediate result is rounded, do not pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from tests.planted.row import function


def versinc(x: Tensor) -> Tensor:
    return (1 - x.cos()) / x**2


NEAR_ZERO = torch.tensor([1e-4, 2e-4, 3e-5], dtype=torch.float64)
POINT = torch.tensor([0.7, 1.3, -0.4], dtype=torch.float64)

WRONG = {
    # The backward omits sin(x) / x^2. In double precision, 1 - cos(x) has stairs as wide as 1e-12 there.
    "cancellation": (function(versinc, lambda g, x: g * -2 * (1 - x.cos()) / x**3), NEAR_ZERO),
    "float32 and a kink": (lambda x: x.float().double().detach() * x + (x - POINT - 1e-8).abs(), POINT),
    "float32 and a close kink": (lambda x: x.float().square().double().detach() + (x - POINT - 1e-10).relu(), POINT),
    "offset and a kink": (lambda x: ((x + 1e6) - 1e6).detach() * x + (x - POINT - 1e-8).abs(), POINT),
    "offset and oscillations": (lambda x: ((x + 1e6) - 1e6).detach() * x + (1e5 * x).sin() / 1e5, POINT),
    "wide stairs and a kink": (lambda x: x.float().double().detach() * x + 1e3 * (x - 10 - 1e-8).abs(), 10 + 0 * POINT),
}


@pytest.mark.parametrize("keywords", [{}, {"engine": "dense"}, {"engine": "compressed"}, {"fast_mode": True}], ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradients_that_are_slopes_of_a_stair(name: str, keywords: dict[str, Any]) -> None:
    func, x = WRONG[name]
    assert not fastgrad.gradcheck(func, x.clone().requires_grad_(), raise_exception=False, **keywords)


@pytest.mark.parametrize("n", [40, 2000])
@pytest.mark.parametrize("fast_mode", [False, True])
def test_many_stairs(n: int, fast_mode: bool) -> None:
    func = WRONG["cancellation"][0]
    x = torch.linspace(3e-5, 3e-4, n, dtype=torch.float64).requires_grad_()
    assert not fastgrad.gradcheck(func, x, fast_mode=fast_mode, raise_exception=False)


@pytest.mark.parametrize("name", ["offset and a kink", "right"])
def test_the_report_names_rounding(name: str) -> None:
    """The numerical value is the one at eps, not the slope of a stair."""
    right = function(versinc, lambda g, x: g * (x.sin() / x**2 - 2 * (1 - x.cos()) / x**3)), NEAR_ZERO
    func, x = WRONG.get(name, right)
    failure = fastgrad.check(func, x.clone().requires_grad_()).failure
    assert failure is not None
    assert failure.numerical_issue == "low precision"
    assert failure.comparison is not None
    assert failure.comparison.worst is not None
    assert failure.comparison.worst.error is None


def test_second_derivatives_with_a_detached_cancellation() -> None:
    class Op(torch.autograd.Function):
        """(1 - cos(x)) / x, whose backward treats 1 - cos(x) as a constant when it is differentiated."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x, 1 - x.cos())
            return (1 - x.cos()) / x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            x, n = ctx.saved_tensors
            return g * (x.sin() / x - n / x**2)

    x = torch.tensor([1e-4, 3e-4, 2e-4], dtype=torch.float64, requires_grad=True)
    assert fastgrad.gradcheck(Op.apply, x)
    assert not fastgrad.gradgradcheck(Op.apply, x, raise_exception=False)


SMOOTH: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "kinks on both sides": (lambda x: (x - 1 - 3e-8).abs() + 2 * (x - 1 + 2e-7).relu(), torch.ones(3).double()),
    "ties": (lambda x: x.sort().values, torch.tensor([0.25, 0.25 + 1e-7, 0.75, 0.75 + 3e-7], dtype=torch.float64)),
    "a jump": (lambda x: torch.where(x > 1 + 3e-7, x + 1e-3, x), torch.ones(3).double()),
    "a root": (torch.sqrt, torch.tensor([2e-6, 5e-6, 1e-5], dtype=torch.float64)),
    "a pole": (torch.reciprocal, torch.tensor([1e-5, 3e-5, -2e-5], dtype=torch.float64)),
    "oscillations": (lambda x: (1e5 * x).sin(), POINT),
    "a period of 0.2 eps": (lambda x: (2 * torch.pi * 5e6 * x).sin(), POINT),
    "a zero at zero": (lambda x: x + 40187.5**2 * x**3, torch.zeros(3).double()),
}


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("name", SMOOTH)
def test_right_gradients_next_to_kinks_and_jumps_pass(name: str, fast_mode: bool) -> None:
    func, x = SMOOTH[name]
    assert fastgrad.gradcheck(func, x.clone().requires_grad_(), fast_mode=fast_mode)
