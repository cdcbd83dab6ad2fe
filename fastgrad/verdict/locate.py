"""Finds the coordinate behind a wrong dot product: by weights that increase with the position, or else by halving."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

WINDOW = 256
"""A position that a ramp gives is tested with a window around it. The window extends to each side by the range divided
by this number."""

SLACK = 0.01
"""Because of small contributions, the position of a dominant one may lie outside the range by this share of the range.
"""


def locate(residual: Callable[[Tensor], float], vector: Tensor, value: float) -> int:
    """The coordinate that contributes most to a linear functional, which is zero if nothing is wrong.

    The functional is evaluated for the vector times a ramp from 0 to 1. This value, divided by the functional of the
    vector itself, is the position of a dominant contribution. If one contribution dominates, this takes about
    2 log(size) / log(WINDOW / 2) calls of residual. If none does, each halving may take three calls.

    Parameters
    ----------
    residual
        The functional. It is called with copies of `vector` in which components are zeroed or scaled.
    vector
        float64, shape (size,).
    value
        residual(vector); NaN if a contribution is NaN.
    """
    low, high = 0, vector.numel()

    def window(begin: int, end: int) -> Tensor:
        part = torch.zeros_like(vector)
        part[begin:end] = vector[begin:end]
        return part

    while high - low > 1:
        if high - low > 4 and math.isfinite(value) and value != 0:
            ramp = window(low, high)
            ramp[low:high] *= torch.linspace(0, 1, high - low, dtype=torch.float64, device=vector.device)
            position = residual(ramp) / value
            if -SLACK <= position <= 1 + SLACK:
                center = low + min(max(position, 0.0), 1.0) * (high - low - 1)
                reach = (high - low) // WINDOW
                begin, end = max(low, int(center) - reach), min(high, int(center + 0.999999) + reach + 1)
                inside = residual(window(begin, end))
                if end - begin < high - low and abs(inside) >= abs(value) / 2:
                    low, high, value = begin, end, inside
                    continue
        middle = (low + high) // 2
        left = residual(window(low, middle))
        right = value - left
        if not math.isfinite(left) or (math.isfinite(right) and abs(left) >= abs(right)):
            high, value = middle, left
        else:
            low, value = middle, right
    return low
