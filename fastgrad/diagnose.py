"""Evidence -> probable cause. Silent where there is none."""

from __future__ import annotations

from math import sqrt

from fastgrad.report import Comparison

RESIDUAL = 1e-3
"""A constant factor is named when this much of the analytical entries, or less, is left unexplained."""


def constant_factor(comparison: Comparison) -> tuple[float, float] | None:
    """(k, residual) if analytical = k * numerical over the mismatched entries, by least squares.

    residual is |analytical - k numerical| / |analytical|; at least two entries are needed.
    """
    if comparison.mismatches < 2 or not comparison.sum_analytical * comparison.sum_numerical > 0:
        return None
    if abs(comparison.sum_product.imag) > RESIDUAL * abs(comparison.sum_product):
        return None
    factor = comparison.sum_product.real / comparison.sum_numerical
    unexplained = 1 - abs(comparison.sum_product) ** 2 / (comparison.sum_analytical * comparison.sum_numerical)
    residual = sqrt(max(0.0, unexplained))
    return (factor, residual) if residual <= RESIDUAL else None


def is_zero(comparison: Comparison) -> bool:
    """Whether every mismatched analytical entry is zero."""
    return comparison.mismatches > 0 and comparison.sum_analytical == 0 and comparison.sum_numerical > 0
