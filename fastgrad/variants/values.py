"""Compares the values of a variant with those that it must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgrad.core.precision import relative_step
from fastgrad.core.tensors import largest_change, largest_finite
from fastgrad.variants.case import tensors_of


def difference(make: Callable[[], Any], expected: Callable[[], Any], allowed: float) -> str:
    """How the results of a call differ from the expected ones; empty if they agree.

    The expected call runs twice: random values, which differ between the two, are not compared. allowed: allowed
    difference of values, in addition to rounding.
    """
    right, again, found = (tensors_of(call()) for call in (expected, expected, make))
    if len(found) != len(right):
        return f"{len(found)} results instead of {len(right)}"
    for number, (value, wanted, repeated) in enumerate(zip(found, right, again, strict=True)):
        if value.shape != wanted.shape:
            return f"result {number} has shape {tuple(value.shape)} instead of {tuple(wanted.shape)}"
        value, wanted, repeated = _numbers(value), _numbers(wanted), _numbers(repeated)
        most = allowed + _rounding(wanted, right[number].dtype)
        change = largest_change(value, wanted)
        if change > most >= largest_change(repeated, wanted):
            return f"values of result {number} are wrong by up to {change:.2g}"
    return ""


def _numbers(tensor: Tensor) -> Tensor:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).to(torch.float64)


def _rounding(values: Tensor, dtype: torch.dtype) -> float:
    """Half of the digits of the largest value, because a call may round in another order; integers are exact."""
    return relative_step(dtype) * largest_finite(values) if dtype.is_floating_point or dtype.is_complex else 0.0
