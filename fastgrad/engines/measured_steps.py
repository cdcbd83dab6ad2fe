"""Measures derivatives of func at many steps, from large to small ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fastgrad.core.errors import raise_if_transient, unless_rejected
from fastgrad.core.precision import last_digit, spacing
from fastgrad.core.tensors import near, ones_at, without_subclass
from fastgrad.problem.coordinates import block_with, per_coordinate
from fastgrad.problem.problem import Problem

LARGEST_STEP = 1e-2
"""The largest step, relative to max(|x|, 1)."""

SMALLEST_STEP = 1e-13
"""The smallest step, relative to |x|; steps are at least 4 ulp of x."""

FAR_BELOW = 2.0**-12
"""If the smallest step would be larger than this share of eps, because |x| is large, steps go down to this or, if it is
larger, to one ulp of x."""

FEWEST_ULPS = 16.0
"""If the points of the difference at eps are closer than this many ulps of x, they do not resolve rounding of x."""

RATIO = 4.0
"""The ratio of a step to the next smaller one."""

QUICK_RATIO = 64.0
"""The same if only a few steps around eps are taken."""

QUICK_STEPS = 4
"""The number of these steps. The first is QUICK_RATIO times eps. The last is where rounding of func in double precision
begins to matter: 2e-10 for the default eps."""

ISOLATED = 16.0
"""Distance of a slope from its neighbors beyond which its step is measured again, in units of rounding per step. A
smaller value takes more evaluations, but changes no verdict on a func that is deterministic."""

AT_ONCE = 1 << 16
"""Number of output values, for several steps, that are held at a time."""


class Measured(NamedTuple):
    """Measurements of func for which coordinates of inputs with the same step size were moved together.

    Attributes
    ----------
    rounding
        The effect of rounding on the outputs: float64, shape (entries,).
    step, left, right, at_eps
        The step eps or, if x is large, a larger one; one-sided and central differences with it: float64, shape
        (entries,).
    drift
        By how much repeated values of func differ, at x and at isolated steps: float64, shape (entries,). Zero after
        quick measurements.
    most_width
        The largest width of a difference that shows rounding: that of the difference at eps or, if x is so large that
        this does not resolve rounding of x, a larger one. Float64, shape (entries,).
    eps
        The step of the check.
    ratio
        The ratio of a step to the next smaller one.
    steps, widths, changes, bends
        From large to small steps h: h itself; the distance between the two points, zero if the coordinate takes no step
        this small; f(x + h) - f(x - h); f(x + h) - 2 f(x) + f(x - h). Float64, shape (steps, entries) each.
    """

    rounding: Tensor
    step: Tensor
    left: Tensor
    right: Tensor
    at_eps: Tensor
    drift: Tensor
    most_width: Tensor
    eps: float
    ratio: float
    steps: Tensor
    widths: Tensor
    changes: Tensor
    bends: Tensor

    @property
    def slopes(self) -> Tensor:
        """The plain differences, zero where no step was taken: float64, shape (steps, entries)."""
        return torch.where(self.widths != 0, self.changes / self.widths, 0.0)


def measured(
    problem: Problem, inputs: Tensor, outputs: Tensor, record_graph: bool, eps: float, quickly: bool = False
) -> Measured:
    """Evaluates func for derivatives of some outputs with respect to one coordinate each, from large to small steps.

    This takes two evaluations per step and four more, at most about 90 in total. Isolated steps are repeated.

    Parameters
    ----------
    inputs, outputs
        Coordinates of inputs with the same step size, in [0, n), and of outputs, in [0, m): int64, shape (entries,).
        The input coordinates are moved together. Therefore, none of these outputs may depend on two of them.
    quickly
        Eleven evaluations, with a few steps around eps. They can show that an entry is wrong, but not that it is right.
    """
    inputs, outputs = without_subclass(inputs), without_subclass(outputs)
    where, owner = torch.unique(inputs, return_inverse=True)
    block = block_with(problem.inputs, int(where[0]))
    x = without_subclass(problem.coordinates()[where].abs())
    ulp = spacing(block.tensor.dtype)
    smallest = torch.maximum(SMALLEST_STEP * x, 4 * ulp * x.clamp(min=2.0**-40))
    # ulp * x is up to twice the spacing of numbers near x.
    smallest = torch.minimum(smallest, torch.clamp(ulp / 2 * x, min=FAR_BELOW * eps * block.step))
    displacement = torch.zeros(problem.n, dtype=torch.float64, device=problem.device)
    # If an input is sparse, this evaluates a copy with all elements specified, like all evaluations below.
    base = problem.evaluate(record_graph, displacement)[outputs]
    ratio = QUICK_RATIO if quickly else RATIO
    largest = QUICK_RATIO * eps * block.step * torch.ones_like(x) if quickly else LARGEST_STEP * x.clamp(min=1.0)
    # An x that is infinite or NaN takes no step.
    largest = torch.where(x.isfinite(), largest, 0.0)
    steps, widths, changes, bends, points = [], [], [], [], []
    for taken, powers in _runs(largest, smallest, ratio, QUICK_STEPS if quickly else None):
        displacement[where] = torch.where(taken, largest, 0.0)
        scales = [ratio**-power for power in powers]
        for scale, pair in zip(scales, both_sides(problem, record_graph, displacement, scales, outputs), strict=True):
            if pair is None:
                continue  # the point may be outside func's domain; a smaller step may stay inside
            plus, minus = pair
            points.append((taken, scale))
            steps.append((scale * largest)[owner])
            widths.append(problem.realized_width(displacement, scale)[where][owner])
            changes.append(plus - minus)
            bends.append((plus - base) + (minus - base))
    sides = _at_eps(problem, where, owner, outputs, base, record_graph, eps)
    # If no step was taken, there is one of width zero, so that no tensor is empty.
    nothing = [torch.zeros_like(base)]
    found = [torch.stack(some or nothing) for some in (steps, widths, changes, bends)]
    rounding = _rounding(problem, outputs, base, x[owner], found[2])
    drift = torch.zeros_like(base)
    if not quickly:
        drift = (problem.evaluate(record_graph, torch.zeros_like(displacement))[outputs] - base).abs()
        for step in _isolated(found[1], found[2], rounding):
            displacement[where] = torch.where(points[step][0], largest, 0.0)
            (pair,) = both_sides(problem, record_graph, displacement, [points[step][1]], outputs)
            if pair is not None:
                again = pair[0] - pair[1]
                drift = torch.where(near(again, changes[step], drift), drift, (again - changes[step]).abs())
    most_width = torch.maximum(problem.coordinate_widths(eps)[where], FEWEST_ULPS * ulp * x)[owner]
    return Measured(rounding, *sides, drift, most_width, eps * block.step, ratio, *found)


def _isolated(widths: Tensor, changes: Tensor, rounding: Tensor) -> list[int]:
    """The steps at which the slope of an entry is far from those of the next larger and the next smaller step.

    A value that func returned only once causes such a slope, but a kink or a jump does not. widths and changes have
    shape (steps, entries), and rounding has shape (entries,).
    """
    if len(widths) < 3:
        return []
    slopes = changes / widths
    larger, slope, smaller = slopes[:-2], slopes[1:-1], slopes[2:]
    nearest = torch.minimum((slope - larger).abs(), (slope - smaller).abs())
    usual = 2 * (larger - smaller).abs() + ISOLATED * rounding / widths[2:]
    alone = ~(nearest <= usual) & larger.isfinite() & smaller.isfinite()
    return [1 + int(step) for step in alone.any(1).nonzero()]


def _runs(largest: Tensor, smallest: Tensor, ratio: float, most: int | None) -> list[tuple[Tensor, range]]:
    """Masks of the coordinates that take the step largest * ratio**-power, and the range of powers of each mask.

    A coordinate takes steps down to `smallest`, but no more than `most` steps. All tensors have shape (coordinates,).
    Consecutive masks differ.
    """
    found: list[tuple[Tensor, range]] = []
    power = 0
    while power != most and bool((taken := largest * ratio**-power >= smallest).any()):
        if found and torch.equal(found[-1][0], taken):
            found[-1] = taken, range(found[-1][1].start, power + 1)
        else:
            found.append((taken, range(power, power + 1)))
        power += 1
    return found


def both_sides(
    problem: Problem, record_graph: bool, displacement: Tensor, scales: Sequence[float], outputs: Tensor
) -> Iterator[tuple[Tensor, Tensor] | None]:
    """Some outputs at x + scale * displacement and x - scale * displacement, per scale; None if func raises."""
    at_once = max(1, AT_ONCE // (2 * max(1, problem.m)))
    for first in range(0, len(scales), at_once):
        own = scales[first : first + at_once]
        values = torch.empty(2 * len(own), problem.m, dtype=torch.float64, device=problem.device)
        signed = [sign * scale for scale in own for sign in (1.0, -1.0)]
        evaluate = partial(problem.values_along, displacement, signed, values.unbind(), record_graph)
        try:
            evaluate()
        except Exception as error:
            raise_if_transient(error, evaluate)
            if len(own) == 1:
                yield None
            else:
                for scale in own:
                    yield from both_sides(problem, record_graph, displacement, [scale], outputs)
            continue
        yield from zip(*(values[sign::2, outputs].unbind() for sign in (0, 1)), strict=True)


def _rounding(problem: Problem, rows: Tensor, base: Tensor, x: Tensor, changes: Tensor) -> Tensor:
    """Rounding of each output: float64, shape (entries,).

    This is one ulp of the output or, if larger, one ulp of max(|x|, 1), because func may compute with numbers of that
    size. The latter is at most twice the lowest set bit of any nonzero change: finer changes show that func rounds
    less.

    An output near zero may be the difference of two numbers of order 1. For example, at x = 0, exp(x) - 1 does not
    change for steps below 1e-16, but its derivative is not zero. Such an output changes by multiples of 1e-16 only.

    Parameters
    ----------
    base, x
        The outputs at x, and |x| of the coordinates: float64, shape (entries,).
    changes
        Changes of the outputs for steps of many sizes: float64, shape (steps, entries).
    """
    ulp = per_coordinate(problem.outputs, lambda block: spacing(block.tensor.dtype), base.device)
    inside = ulp[rows] * x.clamp(min=1.0)
    for one in last_digit(changes):
        inside = torch.where(one != 0, torch.minimum(inside, 2 * one), inside)
    return torch.maximum(ulp[rows] * base.abs(), inside)


def _at_eps(
    problem: Problem, where: Tensor, owner: Tensor, rows: Tensor, base: Tensor, record_graph: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The step, left and right one-sided derivatives and the plain difference: float64, shape (entries,).

    The derivatives are NaN if func raises.
    """
    displacement = without_subclass(problem.displacement(ones_at(problem.n, where, problem.device), eps))
    step, width = displacement[where][owner], problem.realized_width(displacement, 1.0)[where][owner]

    def sides() -> tuple[Tensor, ...]:
        return tuple(problem.evaluate(record_graph, displacement, sign)[rows] for sign in (1.0, -1.0))

    both = unless_rejected(sides)
    if both is None:  # one side is outside func's domain
        missing = torch.full_like(base, torch.nan)
        return step, missing, missing, missing
    plus, minus = both
    same = problem.coordinate_widths(eps)[where][owner] == width
    at_eps = ((plus - minus) / width).nan_to_num(torch.inf, torch.inf, -torch.inf)  # a NaN would mean "not known"
    return step, (base - minus) / step, (plus - base) / step, torch.where(same, at_eps, torch.nan)
