"""Ramps and bisection find the dominant contribution of a linear functional in few calls."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastgrad.verdict.locate import locate


def search(contributions: Tensor, vector: Tensor) -> tuple[int, int]:
    """The position that is found for the sum of contributions * vector, and the number of calls."""
    calls = 0

    def residual(part: Tensor) -> float:
        nonlocal calls
        calls += 1
        # A zero removes the contribution of its place, even if this is NaN.
        return float(torch.where(part == 0, 0.0, contributions * part).sum())

    return locate(residual, vector, residual(vector)), calls - 1


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 3000), data=st.data())
def test_a_lone_contribution_is_found(size: int, data: st.DataObject) -> None:
    where = data.draw(st.integers(0, size - 1))
    contributions = torch.zeros(size, dtype=torch.float64)
    contributions[where] = data.draw(st.sampled_from([1e-4, -3.0, 1e9, math.nan, math.inf]))
    vector = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(size)) + 0.5
    assert search(contributions, vector)[0] == where


@pytest.mark.parametrize("error", [1e-4, 1e-2, 1.0])
def test_a_million_coordinates_cost_a_few_calls(error: float) -> None:
    size = 10**6
    generator = torch.Generator().manual_seed(0)
    noise = 1e-10 * torch.randn(size, dtype=torch.float64, generator=generator)
    vector = torch.rand(size, dtype=torch.float64, generator=generator) + 0.5
    for where in (0, 1, 333333, size - 1):
        contributions = noise.clone()
        contributions[where] += error
        found, calls = search(contributions, vector)
        assert found == where
        assert calls <= 9


def test_the_larger_of_two_that_nearly_cancel_or_one_of_many() -> None:
    vector = torch.ones(1000, dtype=torch.float64)
    two = torch.zeros(1000, dtype=torch.float64)
    two[10], two[900] = 1.0, -0.9
    assert search(two, vector)[0] in (10, 900)
    many = torch.ones(1000, dtype=torch.float64)
    assert search(many, vector)[1] <= 2 * 3 + math.ceil(math.log2(1000)) + 20
