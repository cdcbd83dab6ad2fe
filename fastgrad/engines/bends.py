"""Whether a kink next to x explains how func changes: the bends f(x + h) - 2 f(x) + f(x - h)."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings

KINK_SHARE = 1 / 2
"""Largest change of slope by kinks, relative to the slope at large steps, for which kinks do not explain why func is
constant at small steps. A kink within eps of x that explains it changes the slope by at least 1.3 times as much."""

SMOOTH_STEPS = 64, 16
"""Steps, in units of eps, at which the bends of an output show whether it has a kink within eps of x."""


def kink(outer: Tensor, inner: Tensor, ratio: float, step: Tensor | float) -> Tensor:
    """How much the slope changes at kinks near x, from the bends at `ratio * step` and at `step`; of any shape.

    At a kink, bends are proportional to the step; where func is smooth, to its square. The square cancels here.
    """
    return (ratio**2 * inner - outer).abs() / ((ratio**2 - ratio) * step)


def are_smooth(
    problem: Problem,
    settings: Settings,
    directions: Tensor,
    rows: Tensor,
    explained: Tensor,
    least: float,
    steps: tuple[float, float] = SMOOTH_STEPS,
    share: float = KINK_SHARE / 2,
) -> Tensor:
    """Whether neither small steps nor kinks explain the slopes of outputs at large steps: bool, shape (rows,).

    Parameters
    ----------
    directions
        Float64, shape (directions, n).
    rows
        The numbers of the outputs: int64, shape (rows,).
    explained
        Their derivatives along the directions at small steps: float64, shape (directions, rows).
    least
        The largest slope that does not count.
    steps
        The two large steps, in units of eps; the larger one comes first.
    share
        How far, relative to a slope, those of both steps may be apart. A kink near x may change it by twice as much.
    """
    if not rows.numel():
        return torch.zeros_like(rows, dtype=torch.bool)
    base, (wide, narrow) = problem.base()[rows], steps
    found = torch.zeros(3, len(directions), rows.numel(), dtype=torch.float64, device=base.device)
    found[0] -= explained
    for vector, (slope, apart, change) in zip(directions, found.unbind(1), strict=True):
        both = (problem.both_sides(vector, factor * settings.eps) for factor in steps)
        for (plus, minus, large), (above, below, small) in zip(*both, strict=True):
            own = (above - below)[rows] / (2 * small)
            slope += own
            apart += own - (plus - minus)[rows] / (2 * large)
            outer = (plus[rows] - base) + (minus[rows] - base)
            inner = (above[rows] - base) + (below[rows] - base)
            change += kink(outer, inner, wide / narrow, small)
    # The norms over all directions, because in one of them the bends of several kinks may cancel.
    slopes, apart, changes = torch.linalg.vector_norm(found, dim=1)
    smooth: Tensor = (slopes > least) & (apart <= share * slopes) & (changes <= 2 * share * slopes)
    return smooth
