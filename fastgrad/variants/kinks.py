"""Points at which a function has no derivative: compares the one-sided differences of each entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgrad.api.jacobians import analytical_matrix
from fastgrad.core.random import TANGENT_STREAM, direction
from fastgrad.core.tensors import ones_at
from fastgrad.problem.problem import Problem

MAX_ENTRIES = 1 << 16
"""Largest number of entries of the Jacobian that are examined."""

DIRECTIONS = 3
"""Number of random directions along which derivatives must add up."""

STEP, FINER = 1e-5, 2.0**-4
"""The first step, relative to max(|x|, 1), and the second step, relative to the first."""

RELATIVE, ABSOLUTE = 1e-2, 1e-3
"""Largest distance between one-sided differences, or differences of two steps, if a function is smooth; and the largest
error of a gradient: one-sided differences are no more accurate."""

ROUNDING = 16.0
"""Allowed rounding of an output, in unit roundoffs: of its two values and of the operations of a usual function."""


def examined(func: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[int, int] | None:
    """Examines every entry from both sides; None if there are too many. A complex number counts as two real ones.

    Returns the numbers of entries without a derivative, and of entries whose gradient is not the derivative.
    An entry whose effect on the output is smaller than its rounding counts as one without a derivative.
    An output has a derivative if it has one along each coordinate, and if these add up along other directions. For
    example, the median of equal numbers does not change if one of them changes, but it changes if all do.
    """
    with Problem(func, inputs, warn_of_precision=False) as problem:
        n, m = problem.n, problem.m
        if n * m > MAX_ENTRIES:
            return None
        gradient, scale = analytical_matrix(problem).cpu(), problem.coordinates().cpu().abs().clamp(min=1.0)
        slopes, smooth = torch.zeros(m, n, dtype=torch.float64), torch.zeros(m, n, dtype=torch.bool)
        for coordinate in range(n):
            slope, smooth[:, coordinate] = _slope(problem, ones_at(n, coordinate, scale.device) * scale)
            slopes[:, coordinate] = slope / scale[coordinate]
        adds_up = torch.ones(m, dtype=torch.bool)
        for number in range(DIRECTIONS):
            u = direction(n, number, TANGENT_STREAM) * scale
            slope, agree = _slope(problem, u)
            adds_up &= agree & ((slope - slopes @ u).abs() <= _allowed(slopes.abs() @ u.abs()))
        rounding = ROUNDING * problem.unit_roundoff * problem.base().cpu().abs() / (STEP * FINER)
    # The effect of an entry that is much smaller than its output may be less than one bit of the output.
    shown = rounding.unsqueeze(1) / scale <= _allowed(torch.maximum(slopes.abs(), gradient.abs().nan_to_num(0.0, 0.0)))
    exists = smooth & adds_up.unsqueeze(1) & shown
    # Zeros of a grad_output times an infinite derivative are NaN, and affect the whole column.
    not_finite_once = ~exists.all(0) & ~gradient.isfinite()
    wrong = exists & ~not_finite_once & ~((gradient - slopes).abs() <= _allowed(slopes.abs()))
    return int((~exists).sum()), int(wrong.sum())


def _allowed(size: Tensor) -> Tensor:
    return RELATIVE * size + ABSOLUTE


def _slope(problem: Problem, u: Tensor) -> tuple[Tensor, Tensor]:
    """The slopes of all outputs along a direction, and where both sides and both steps agree: shape (m,) each."""
    base, u = problem.base().cpu(), u.to(problem.device)
    moves = [(step, sign) for step in (STEP, STEP * FINER) for sign in (1.0, -1.0)]
    sides = [sign * (problem.evaluate(True, u, sign * step).cpu() - base) / step for step, sign in moves]
    central = (sides[2] + sides[3]) / 2
    pairs = (sides[2], sides[3]), (sides[0], sides[1]), (sides[2], sides[0])
    agree = torch.stack([(left - right).abs() <= _allowed(central.abs()) for left, right in pairs]).all(0)
    return central.nan_to_num(0.0, 0.0, 0.0), agree
