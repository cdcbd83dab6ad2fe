"""Re-measuring entries that fail at eps: their derivatives from measurements at many steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastgrad.core.precision import ROUNDING
from fastgrad.engines.extrapolation import FINEST_STEPS, extrapolate
from fastgrad.engines.measured_steps import Measured
from fastgrad.engines.rounding_inside import (
    ROUNDED,
    are_multiples,
    hidden_derivatives,
    is_absorbed,
    is_bent,
    is_constant,
    is_curved,
    is_next_to_jump,
    is_rounded,
    is_staircase,
    is_straight_within_eps,
    jumps,
    quantum_of,
    uneven_bends,
)
from fastgrad.report.settings import Tolerances

GROWTH = 8.0
"""Largest noise, in units of how far the values at the two smallest steps disagree. It is rare that rounding makes them
disagree by less than an eighth of its usual effect."""


class Refinement(NamedTuple):
    """Entries of the numerical Jacobian, refined.

    Attributes
    ----------
    values, errors
        The derivatives and their estimated errors: float64, shape (entries,).
    rounding
        The effect of rounding on the outputs: float64, shape (entries,).
    left, right
        One-sided derivatives with the step eps: float64, shape (entries,).
    at_eps
        The plain difference of `Problem.difference_columns`, evaluated again: float64, shape (entries,). Infinite if
        func is not finite. NaN if func raises, or if x is so large that this method takes another step.
    moves
        The largest difference of at_eps from run to run that rounding inside func explains: float64, shape (entries,).
    drift
        By how much repeated values of func differ, divided by the width of the difference at eps: float64, shape
        (entries,).
    doubtful
        Whether func is straight at steps of eps and larger, with a slope other than `values`, or is a staircase within
        eps. Then `values` come from rounding inside func: bool, shape (entries,).
    quantum
        Where rounding inside func may hide a derivative at steps of eps: the number of which all changes of func are
        multiples. Zero elsewhere: float64, shape (entries,).
    curved
        Whether the one-sided derivatives come closer to each other at smaller steps: bool, shape (entries,).
    bent
        Whether the one-sided derivatives differ at all smaller steps at which rounding does not hide this: bool, shape
        (entries,).
    jumps
        By how much func changes from one side of x to the other, no matter how small the step is: float64, shape
        (entries,). Zero if this changes the difference at eps by no more than the tolerance.
    steps, changes, widths
        The measurements, large steps first: how far the coordinate was moved to either side; the change of func between
        the two points; and the divisor of this change, zero if no step was taken. Float64, shape (entries, steps).
    """

    values: Tensor
    errors: Tensor
    rounding: Tensor
    left: Tensor
    right: Tensor
    at_eps: Tensor
    moves: Tensor
    drift: Tensor
    doubtful: Tensor
    quantum: Tensor
    curved: Tensor
    bent: Tensor
    jumps: Tensor
    steps: Tensor
    changes: Tensor
    widths: Tensor

    def of(self, entries: slice) -> Refinement:
        """The refinement of some of the entries."""
        return Refinement(*(values[entries] for values in self))

    def is_kink(self, entry: int, own: Tolerances) -> bool:
        """Whether the one-sided derivatives differ by more than twice the tolerance, and no less at smaller steps."""
        left, right = self.left[entry].item(), self.right[entry].item()
        if bool(self.curved[entry]):
            return False
        return abs(left - right) > 2 * (own.atol + own.rtol * max(abs(left), abs(right)))


def settled(parts: Sequence[Sequence[Measured]], own: Tolerances, width: int = 1) -> list[Refinement]:
    """The derivatives from measurements: one `Refinement` per coordinate of an input element.

    An estimate from some steps counts only if all smaller steps agree with it up to func's own noise. Otherwise, large
    steps would make a function that rounds look like the identity.

    Parameters
    ----------
    parts
        For each coordinate of the input elements, the measurements of several groups, which are concatenated. All
        inputs must have the same step size.
    width
        Number of consecutive output coordinates that make one entry. Either this or the number of parts is 1.
    """
    joined = [_joined(found) for found in parts]
    estimates = [extrapolate(one.slopes, one.widths, one.rounding, one.ratio, _most_noise(one)) for one in joined]
    values = torch.stack([value.nan_to_num() for value, _ in estimates]).reshape(len(parts), -1, width)
    # The tolerance of a complex entry depends on its modulus. Therefore, each part needs the size of the other part.
    others = values.flip(0, 2) if len(parts) * width == 2 else torch.zeros_like(values)
    return [
        _settled(one, *estimate, own, other.reshape(-1))
        for one, estimate, other in zip(joined, estimates, others, strict=True)
    ]


def _settled(one: Measured, values: Tensor, errors: Tensor, own: Tolerances, other: Tensor) -> Refinement:
    """The derivatives of one part of the entries; other: those of the other part, or zeros: shape (entries,)."""
    eps, slopes = one.eps, one.slopes
    allowed = own.allowed(torch.hypot(values.nan_to_num(), other))
    quantum = quantum_of(one)
    uneven = uneven_bends(one)
    doubtful = is_rounded(one, values, errors, allowed) | is_staircase(one, values, allowed, uneven)
    doubtful |= is_absorbed(one, quantum) | is_straight_within_eps(one, values, errors, allowed)
    doubtful |= is_next_to_jump(one, values, allowed)
    # The slope at eps counts only if all changes are multiples of one number: kinks or waves do not change func so.
    some = (doubtful & (quantum.isfinite() | are_multiples(one))).nonzero().reshape(-1)
    if some.numel():
        # Rounding of func: how far changes at smaller steps deviate from its slope at eps, and bends from a parabola.
        # Both deviations must be small, because next to a kink, only bends may deviate.
        slope = (one.left + one.right)[some] / 2
        finer = torch.where(one.steps[:, some] <= eps, one.widths[:, some], 0.0)
        change = ((slopes[:, some] - slope) * finer).abs()
        noise = torch.maximum(change, torch.where(finer != 0, uneven[:, some].abs(), 0.0)).amax(0)
        little = noise <= ROUNDED * 2 * eps * slope.abs()
        some, noise, slope = some[little], noise[little], slope[little]
        noise = torch.maximum(noise, one.rounding[some])
        better = extrapolate(slopes[:, some], one.widths[:, some], noise, one.ratio, _most_noise(one)[some])
        sure = better[1] <= own.allowed(torch.hypot(better[0], other[some]))
        sure &= (better[0] - slope).abs() * eps <= noise  # otherwise, rounding does not explain the slope at eps
        some = some[sure]
        values[some], errors[some] = (result[sure] for result in better)
        doubtful[some] = False
    hidden = hidden_derivatives(one, quantum, values, own, other)
    doubtful |= hidden != 0
    quantum = torch.where(hidden != 0, quantum, 0.0)
    at_eps, moves = (one.left, one.right, one.at_eps), (ROUNDING * one.rounding / eps, one.drift / (2 * eps))
    shape = is_curved(one), is_bent(one), jumps(one, own, other)
    steps = one.steps.t(), one.changes.t(), one.widths.t()
    return Refinement(values, errors + hidden, one.rounding, *at_eps, *moves, doubtful, quantum, *shape, *steps)


def _joined(found: Sequence[Measured]) -> Measured:
    """Several measurements, concatenated; entries that took fewer steps than others have widths of zero at the end."""
    most = max(len(one.steps) for one in found)
    joined = {
        name: torch.cat([getattr(one, name) for one in found])
        for name in ("rounding", "step", "left", "right", "at_eps", "drift", "most_width")
    }
    for name in ("steps", "widths", "changes", "bends"):
        joined[name] = torch.cat([pad(getattr(one, name), (0, 0, 0, most - len(one.steps))) for one in found], 1)
    return found[0]._replace(**joined)  # type: ignore[arg-type]


def _most_noise(one: Measured) -> Tensor:
    """The largest noise that rounding inside func explains: float64, shape (entries,).

    Rounding affects all steps alike, so neighboring steps disagree by as much at the smallest steps as at others. What
    grows faster than the square of the step is curvature, and so may be what only wide differences show. Noise has no
    limit if func does not change at the smallest step: it may round there.
    """
    if len(one.changes) < 2:
        return torch.full_like(one.rounding, torch.inf)
    taken, scale = one.widths != 0, one.steps[1:] / one.steps[:-1]
    rank = (taken.sum(0) - taken.cumsum(0))[1:]  # 0 at the smallest step
    odd = (one.slopes[1:] - one.slopes[:-1]) * one.widths[1:]
    even = one.bends[1:] - one.bends[:-1] * scale**2
    apart = torch.maximum(odd.abs(), even.abs()) / one.ratio ** (2.0 * rank)
    used = taken[1:] & (rank < FINEST_STEPS) & (one.widths[:-1] <= one.most_width) & apart.isfinite()
    return torch.where(is_constant(one), torch.inf, GROWTH * torch.where(used, apart, 0.0).amax(0))
