"""Backwards and jvps that are wrong for vectors of one sign; larger entries of the row hide the error in sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from tests.planted.row import function

WRONG = 13


def beside(weight: float, sign: float, error: float) -> Any:
    """The functions x and weight * x, whose backward is wrong if an element of the first grad_output has that sign."""

    def backward(first: Tensor, second: Tensor, x: Tensor) -> Tensor:
        first = first.clone()
        if sign * first[WRONG] > 0:
            first[WRONG] *= 1 + error
        return first + weight * second

    return function(lambda x: (x.clone(), weight * x), backward)


@pytest.mark.parametrize("engine", ["dense", "auto", "compressed"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("weight", "error"), [(20, 0.01), (1000, 0.01), (1000, -1.0)])
def test_a_backward_that_is_wrong_for_one_sign_fails(weight: float, error: float, sign: float, engine: str) -> None:
    x = torch.full((40,), 0.3, dtype=torch.float64, requires_grad=True)
    for seed in range(4):
        found = fastgrad.check(beside(weight, sign, error), x, engine=engine, seed=seed)
        assert not found.passed, found


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("n", [40, 20_000])
def test_fast_mode_finds_it_too(n: int, sign: float) -> None:
    x = torch.full((n,), 0.3, dtype=torch.float64, requires_grad=True)
    for seed in range(4):
        assert not fastgrad.check(beside(1000, sign, -1.0), x, fast_mode=True, seed=seed).passed


def test_one_sign_within_the_tolerance_is_no_other_gradient_for_the_same_input() -> None:
    """Fast mode once reported that two runs with the same inputs gave different values."""
    beyond = function(lambda x: x * x, lambda g, x: g * 2 * x + 0.1 * g.clamp(min=0))
    x = torch.tensor([1500.0, 300.0], dtype=torch.float64, requires_grad=True)
    assert fastgrad.check(beyond, x, fast_mode=True).passed


def test_the_entry_and_both_values_are_named() -> None:
    x = torch.full((40,), 0.3, dtype=torch.float64, requires_grad=True)
    found = fastgrad.check(beside(1000, -1.0, 0.01), x, engine="dense")
    assert found.failure is not None
    assert (found.failure.kind, found.failure.output, found.failure.input) == ("nonlinear", 0, 0)
    assert "for the one-hot grad_output of output 0 at [13], the gradient of input 0 at [13] is 1" in str(found)
    assert "but for the negated one it is -1.01" in str(found)


def test_a_right_backward_passes() -> None:
    x = torch.full((40,), 0.3, dtype=torch.float64, requires_grad=True)
    assert fastgrad.check(beside(1000, 1.0, 0.0), x, engine="dense").passed
