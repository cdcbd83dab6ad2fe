"""Comparison of the values of a variant with those that it must have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.variants.values import difference


def _one(value: Any) -> Any:
    return lambda: value


ONES = torch.ones(2, 3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("found", "expected", "text"),
    [
        (ONES, ONES, ""),
        (ONES + 1e-9, ONES, ""),
        (ONES + 1e-6, ONES, "values of result 0 are wrong by up to 1e-06"),
        ((ONES, ONES * 2j + 1), (ONES, ONES * 2j), "values of result 1 are wrong by up to 1"),
        (ONES, (ONES, ONES), "1 results instead of 2"),
        (ONES[0], ONES, "result 0 has shape (3,) instead of (2, 3)"),
        (ONES.long(), ONES.long() + 1, "values of result 0 are wrong by up to 1"),
        (ONES.to_sparse() * 3, ONES.to_sparse(), "values of result 0 are wrong by up to 2"),
        (ONES.bfloat16() * 1.01, ONES.bfloat16(), ""),
        (ONES * torch.nan, ONES * torch.nan, ""),
        (ONES * torch.nan, ONES, "values of result 0 are wrong by up to inf"),
        (ONES[:0], ONES[:0], ""),
        (ONES * 1e-14, -ONES * 1e-14, ""),
    ],
)
def test_differences(found: Any, expected: Any, text: str) -> None:
    assert difference(_one(found), _one(expected), 0.0) == text


def test_allowed_and_random_differences() -> None:
    assert difference(_one(ONES + 0.1), _one(ONES), 0.2) == ""
    assert difference(lambda: torch.rand(3), lambda: torch.rand(3), 0.0) == ""
    assert difference(lambda: torch.rand(3) + 1, lambda: torch.rand(3), 0.0) == ""


def test_random_results_accuse_nobody() -> None:
    def func(x: Tensor) -> Any:
        return x.sin(), torch.rand(3)

    report = fastgrad.check_variants(func, ONES.clone().requires_grad_(), only=["state", "layouts"])
    assert report.passed, str(report)


def test_values_under_torch_compile() -> None:
    def func(x: Tensor) -> Tensor:
        return x.sin() + (1 if torch.compiler.is_compiling() else 0)

    (row,) = fastgrad.check_variants(func, ONES.clone().requires_grad_(), only=["compiled: aot_eager"]).rows
    assert (row.verdict, row.detail) == ("failed", "values of result 0 are wrong by up to 1")


def test_random_numbers_after_a_seed_accuse_nobody() -> None:
    def func(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return torch.nn.functional.dropout(x, 0.5)

    before = torch.get_rng_state()
    x = torch.linspace(0.1, 1.0, 12, dtype=torch.float64).view(4, 3).requires_grad_()
    report = fastgrad.check_variants(func, x, only=["layouts: transposed in memory"])
    assert report.passed, str(report)
    assert difference(lambda: func(x), lambda: func(x), 0.0) == ""
    torch.set_rng_state(before)


def test_values_that_cancel_accuse_nobody() -> None:
    def func(x: Tensor) -> Tensor:
        return 1e3 * (x - x.mean(0))

    report = fastgrad.check_variants(func, ONES.clone().requires_grad_(), only=["layouts"])
    assert report.passed, str(report)
    norm = torch.nn.BatchNorm1d(3).double()
    x = torch.linspace(0.1, 1.0, 12, dtype=torch.float64).view(4, 3).requires_grad_()
    report = fastgrad.check_variants(norm, x, only=["layouts: rows expanded"])
    assert report.rows[0].verdict != "failed", str(report)
