"""Whether a kink next to x explains how func changes: the bends f(x + h) - 2 f(x) + f(x - h)."""

from __future__ import annotations

from torch import Tensor

KINK_SHARE = 1 / 2
"""Largest change of slope by kinks, relative to the slope at large steps, for which kinks do not explain why func is
constant at small steps. A kink within eps of x that explains it changes the slope by at least 1.3 times as much."""


def kink(outer: Tensor, inner: Tensor, ratio: float, step: Tensor | float) -> Tensor:
    """How much the slope changes at kinks near x, from the bends at `ratio * step` and at `step`; of any shape.

    At a kink, bends are proportional to the step; where func is smooth, to its square. The square cancels here.
    """
    return (ratio**2 * inner - outer).abs() / ((ratio**2 - ratio) * step)
