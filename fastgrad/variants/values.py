"""Compares the values of a variant with those that it must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgrad.core.precision import relative_step
from fastgrad.core.random import RandomState
from fastgrad.core.tensors import largest_change, largest_finite
from fastgrad.variants.case import tensors_of


def difference(make: Callable[[], Any], expected: Callable[[], Any], allowed: float) -> str:
    """How the results of a call differ from the expected ones; empty if they agree, or if they are random.

    allowed: allowed difference of values, in addition to rounding.
    """
    right, is_random = _with_randomness(expected)
    again, found = tensors_of(expected()), tensors_of(make())
    if len(found) != len(right):
        return f"{len(found)} results instead of {len(right)}"
    for number, (value, wanted, repeated) in enumerate(zip(found, right, again, strict=True)):
        if value.shape != wanted.shape:
            return f"result {number} has shape {tuple(value.shape)} instead of {tuple(wanted.shape)}"
        value, wanted, repeated = _numbers(value), _numbers(wanted), _numbers(repeated)
        most = allowed + _rounding(wanted, right[number].dtype)
        change = largest_change(value, wanted)
        if change > most >= largest_change(repeated, wanted) and not is_random:
            return f"values of result {number} are wrong by up to {change:.2g}"
    return ""


def _with_randomness(call: Callable[[], Any]) -> tuple[tuple[Tensor, ...], bool]:
    """The results of a call, and whether it uses the random numbers of torch, also after a seed of its own."""
    before = RandomState()
    try:
        torch.rand(())  # the state is then none that an earlier call with a seed of its own has left
        advanced = RandomState()
        return tensors_of(call()), advanced.has_changed()
    finally:
        before.restore()


def _numbers(tensor: Tensor) -> Tensor:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).to(torch.float64)


def _rounding(values: Tensor, dtype: torch.dtype) -> float:
    """Half of the digits of the largest value, or of 1 if all are smaller, because a call may round in another order.

    Small values may be differences of larger ones. Integers are exact.
    """
    is_rounded = dtype.is_floating_point or dtype.is_complex
    return relative_step(dtype) * max(1.0, largest_finite(values)) if is_rounded else 0.0
