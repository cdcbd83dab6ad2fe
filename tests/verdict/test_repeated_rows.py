"""Tests with rows of a backward that are run again or scaled."""

from __future__ import annotations

import pytest
import torch

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
