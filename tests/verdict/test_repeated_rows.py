"""Tests with rows of a backward that are run again or scaled."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from tests.planted.row import function


def test_a_nonlinear_gradient_is_quoted_with_the_value_that_a_linear_backward_would_give() -> None:
    func = function(lambda x: 2 * x, lambda g, x: 2 * g.clamp(min=0))
    with pytest.raises(fastgrad.GradcheckError) as raised:
        fastgrad.gradcheck(func, torch.tensor(0.5, dtype=torch.float64, requires_grad=True))
    says = "for output 0 gives the gradient 2 of input 0, and a grad_output of -4 gives 0 instead of -8."
    assert says in str(raised.value)


def test_a_complex_gradient_is_quoted_with_both_parts() -> None:
    func = function(lambda z: (3 * z).real, lambda g, z: torch.complex(3 * g, (g < 0).to(g)))
    z = torch.tensor([1 + 2j], dtype=torch.complex128, requires_grad=True)
    with pytest.raises(fastgrad.GradcheckError) as raised:
        fastgrad.gradcheck(func, (z,), engine="dense")
    assert "gives the gradient 3+0j of input 0 at [0], and a grad_output of -4 gives -12+1j instead of -12" in str(
        raised.value
    )


@pytest.mark.parametrize("size", [1e-6, 9e-4])
@pytest.mark.parametrize("call", [20, 24])
def test_a_row_of_custom_code_that_is_wrong_once_within_its_tolerance(size: float, call: int) -> None:
    """A sum of rows shows it, and changes when all rows are run again."""
    calls = 0

    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            (x,) = ctx.saved_tensors
            return grad * x.exp() * (1 + size * (calls == call))

    x = torch.linspace(0.1, 1, 15, dtype=torch.float64, requires_grad=True)
    report = fastgrad.check(Exp.apply, x)
    assert report.failure is not None
    assert report.failure.kind == "nondeterministic"


@pytest.mark.parametrize("seed", range(4))
def test_nondet_tol_counts_for_scaled_rows(seed: int) -> None:
    numbers = random.Random(seed)

    class Cumsum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.cumsum(0)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.flip(0).cumsum(0).flip(0) + 1e-5 * numbers.uniform(-1, 1) * grad.sum()

    x = torch.ones(5, dtype=torch.float64, requires_grad=True)
    assert fastgrad.gradcheck(Cumsum.apply, x, nondet_tol=2.1e-5)
