"""Re-measuring entries that fail at eps: Ridders extrapolation over many steps, with an error estimate.

Sources: Ridders, "Accurate computation of F'(x) and F'(x) F''(x)", Advances in Engineering Software
(1982); Richardson extrapolation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from fastgrad.core.errors import raise_if_transient, unless_rejected
from fastgrad.core.precision import ROUNDING, last_digit, spacing
from fastgrad.core.tensors import near, ones_at
from fastgrad.problem.coordinates import block_with, per_coordinate
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Tolerances

Array = NDArray[np.float64]

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

ORDER = 4
"""The largest order of an estimate: besides its own step, it uses this many larger ones."""

STRAIGHT = 0.2
"""func counts as straight around eps if its slopes differ by at most this share of their size, and by at most this
share of their distance to the refined slope."""

STRAIGHT_STEPS = 4
"""Least number of consecutive steps at which func counts as straight within eps. They differ by factors up to 64."""

WIDER = 64.0
"""func must be a straight line for steps up to this many times eps, otherwise its slope at eps does not count."""

ROUNDED = 2.0**-6
"""The largest rounding inside func, relative to its change at eps. With larger rounding, the rounded function is
treated as func itself."""

SHARE_THAT_MATTERS = 1 / 8
"""Share of the tolerance from which the difference between the slope at eps and that of smaller steps matters."""

MIN_STAIRS = 8
"""The least number of stairs of a staircase between the two points of the widest step, which is at most WIDER * eps."""

JUMP_RESIDUAL = 1 / 16
"""A line is fitted to func's changes. The constant of the line is a jump of func at x if the changes deviate from the
line by at most this share of the constant. If the constant comes from rounding inside func, the changes deviate by at
least half of it."""

MIN_JUMP_STEPS = 6
"""The least number of steps of at most eps that show a jump."""

BEND_ROUNDING = 4.0
"""Rounding of f(x + h) - 2 f(x) + f(x - h), in ulps of func's values: three sums, and the values themselves."""

FINEST_STEPS = 4
"""The scatter of the differences at this many smallest steps measures the noise of func."""

GROWTH = 8.0
"""Largest noise, in units of how far the values at the two smallest steps disagree. It is rare that rounding makes them
disagree by less than an eighth of its usual effect."""

HIDDEN_SHARE = 1 / 8
"""If func is constant at small steps, rounding inside func may hide the derivative that large steps show. This is its
largest error, as a share of the derivative, for which it counts as hidden."""

MIN_MULTIPLES, MOST_MULTIPLES = 6, 1000.0
"""Changes that are multiples of one number show rounding if there are this many of them, up to this multiple. Larger
multiples are less exact, because the number is known only up to rounding."""

MULTIPLE_RESIDUAL = 0.03
"""Largest distance of these multiples from integers. By chance, one number is that close with probability 0.06."""

AGREEMENT = 4.0
"""Largest distance of a measured change from an estimate that agrees with it, in units of noise, besides the error of
the estimate. Rounding of the two values alone makes a distance of at most 1."""

ISOLATED = 16.0
"""Distance of a slope from its neighbors beyond which its step is measured again, in units of rounding per step. A
smaller value takes more evaluations, but changes no verdict on a func that is deterministic."""

AT_ONCE = 1 << 16
"""Number of output values, for several steps, that are held at a time."""

TOGETHER = 1 << 11
"""Number of entries whose estimates, about 200 each, are compared at a time."""


KINK_SHARE = 1 / 2
"""Largest change of slope by kinks, relative to the slope at large steps, for which kinks do not explain why func is
constant at small steps. A kink within eps of x that explains it changes the slope by at least 1.3 times as much."""


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
    inputs, outputs = _plain(inputs), _plain(outputs)
    where, owner = torch.unique(inputs, return_inverse=True)
    block = block_with(problem.inputs, int(where[0]))
    x = _plain(problem.coordinates()[where].abs())
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
    quantum = _quantum(one)
    uneven = _uneven_bends(one)
    doubtful = _is_rounded(one, values, errors, allowed) | _is_staircase(one, values, allowed, uneven)
    doubtful |= _is_absorbed(one, quantum) | _is_straight_within_eps(one, values, errors, allowed)
    doubtful |= _is_next_to_jump(one, values, allowed)
    # The slope at eps counts only if all changes are multiples of one number: kinks or waves do not change func so.
    some = (doubtful & (quantum.isfinite() | _are_multiples(one))).nonzero().reshape(-1)
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
    hidden = _hidden_derivatives(one, quantum, values, own, other)
    doubtful |= hidden != 0
    quantum = torch.where(hidden != 0, quantum, 0.0)
    at_eps, moves = (one.left, one.right, one.at_eps), (ROUNDING * one.rounding / eps, one.drift / (2 * eps))
    shape = _is_curved(one), _is_bent(one), _jumps(one, own, other)
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
    return torch.where(_is_constant(one), torch.inf, GROWTH * torch.where(used, apart, 0.0).amax(0))


def _is_rounded(one: Measured, values: Tensor, errors: Tensor, allowed: Tensor) -> Tensor:
    """Whether rounding inside func causes the derivative `values` of small steps: shape (entries,).

    func must have another slope at eps and larger steps, the same at all of them. It must be straight there or, if it
    is constant at the smallest steps, have no kink near x. For example, 1 - cos(x) is constant next to 1e-8.
    """
    wider = (one.steps >= RATIO * one.eps) & (one.steps <= WIDER * one.eps)
    # Next to a kink, the one-sided slopes differ. If func is curved, these or the slopes of wider steps differ.
    middle = (one.left + one.right) / 2
    distance = (middle - values).abs().nan_to_num(torch.inf)  # a NaN is no estimate and excuses no gradient
    most = STRAIGHT * torch.minimum(distance, middle.abs())
    constant = _is_constant(one) & (values == 0) & (_kinks(one, wider) <= KINK_SHARE * distance)
    rounded = ((one.left - one.right).abs() <= most) | constant
    rounded &= (~wider | ((one.slopes - middle).abs() <= most)).all(0)
    # If rounding of the outputs explains the distance at all wider steps, the slopes may be equal by chance.
    rounded &= (wider & (distance * one.widths > one.rounding)).any(0)
    is_precise = errors <= SHARE_THAT_MATTERS * distance
    return rounded & (distance > torch.where(is_precise, SHARE_THAT_MATTERS * allowed, allowed))


def _is_straight_within_eps(one: Measured, values: Tensor, errors: Tensor, allowed: Tensor) -> Tensor:
    """Whether func is straight, with another slope than `values`, at STRAIGHT_STEPS consecutive steps of at most eps.

    No kink explains then why smaller steps have the slope `values`: rounding inside func does, for example in
    x + relu(x + 1e-7) at 0, where x + 1e-7 does not change for steps below 1e-23. Shape (entries,).
    """
    slope, used = one.slopes, (one.widths != 0) & (one.steps <= one.eps)
    distance = (slope - values).abs().nan_to_num(torch.inf)
    most = STRAIGHT * torch.minimum(distance, slope.abs())
    matters = (distance > allowed + errors) & (distance * one.widths > AGREEMENT * one.rounding)
    straight = used & matters & ((one.bends / one.steps).abs() <= most)
    is_next = straight[:-1] & straight[1:] & ((slope[1:] - slope[:-1]).abs() <= most[:-1])
    if len(is_next) < STRAIGHT_STEPS - 1:
        return torch.zeros_like(allowed, dtype=torch.bool)
    return is_next.unfold(0, STRAIGHT_STEPS - 1, 1).all(2).any(0)


def _is_next_to_jump(one: Measured, values: Tensor, allowed: Tensor) -> Tensor:
    """Whether func jumps around x, besides the slope `values`, or has a steep ramp there: bool, shape (entries,).

    Then its changes without this slope are the same at MIN_JUMP_STEPS consecutive steps, and not zero at smaller ones.
    Rounding inside func would change them at random.
    """
    rest, used = one.changes - values * one.widths, (one.widths != 0) & (one.steps <= WIDER * one.eps)
    same = used[1:] & used[:-1] & ((rest[1:] - rest[:-1]).abs() <= JUMP_RESIDUAL * rest[:-1].abs())
    same &= rest[:-1].abs() > 2 * one.eps * allowed
    within = used & (one.steps <= one.eps)
    if len(same) < MIN_JUMP_STEPS - 1:
        return torch.zeros_like(allowed, dtype=torch.bool)
    jumps = same.unfold(0, MIN_JUMP_STEPS - 1, 1).all(2).any(0)
    return jumps & (~within | (rest.abs() > AGREEMENT * one.rounding)).all(0)


def kink(outer: Tensor, inner: Tensor, ratio: float, step: Tensor | float) -> Tensor:
    """How much the slope changes at kinks near x, from the bends at `ratio * step` and at `step`; of any shape.

    At a kink, bends are proportional to the step; where func is smooth, to its square. The square cancels here.
    """
    return (ratio**2 * inner - outer).abs() / ((ratio**2 - ratio) * step)


def _kinks(one: Measured, used: Tensor) -> Tensor:
    """The sum of the changes of slope by kinks near x that pairs of steps show: float64, shape (entries,).

    It is infinite if fewer than two consecutive steps are used. used: a mask of shape (steps, entries).
    """
    change = kink(one.bends[:-1], one.bends[1:], one.ratio, one.steps[1:])
    both = used[1:] & used[:-1]
    return torch.where(both.any(0), torch.where(both, change, 0.0).sum(0), torch.inf)


def _uneven_bends(one: Measured) -> Tensor:
    """The bends without the parabola through x and the widest step of at most WIDER * eps: shape (steps, entries).

    Where func is smooth, little remains. Kinks and rounding remain.
    """
    wide = (one.widths != 0) & (one.steps <= WIDER * one.eps)
    widest = wide.to(torch.int8).argmax(0, keepdim=True)
    bend, step = (some.gather(0, widest) for some in (one.bends, one.steps))
    return one.bends - torch.where(wide & bend.isfinite(), bend * (one.steps / step) ** 2, 0.0)


def _is_staircase(one: Measured, values: Tensor, allowed: Tensor, uneven: Tensor) -> Tensor:
    """Whether func is a staircase along a straight line, as in lower precision, and `values` are slopes of a stair.

    Returns a bool tensor of shape (entries,). Next to x, func has the slope `values`. The rest of its changes at larger
    steps must be proportional to the step, up to the height of a stair, on both sides of x: next to a kink, bends are
    larger. If func no longer changes at larger steps, it is not a staircase: it may sort its inputs or oscillate.

    uneven: `_uneven_bends`.
    """
    steps, widths, eps = one.steps, one.widths, one.eps
    taken = widths != 0
    rest = torch.where(taken, one.changes - values * widths, 0.0)
    is_stair = rest.abs() > ROUNDING * one.rounding
    used = taken & (steps >= eps / 2) & (steps <= WIDER * eps)
    if not bool((is_stair & used).any()):
        return torch.zeros_like(values, dtype=torch.bool)
    height = torch.where(is_stair & used, rest.abs(), torch.inf).amin(0)
    widest = used.to(torch.int8).argmax(0, keepdim=True)
    rise, width, change = (some.gather(0, widest)[0] for some in (rest, widths, one.changes))
    bend = torch.where(used, uneven.abs(), 0.0).amax(0)
    off = torch.maximum(torch.where(used, (rest - rise / width * widths).abs(), 0.0).amax(0), bend)
    matters = (rise / width).abs() > SHARE_THAT_MATTERS * allowed
    flat = ~(is_stair & (steps <= ROUNDED / 4 * eps)).any(0)
    straight = (off <= 2 * height) & (rise.abs() >= MIN_STAIRS * height) & (bend <= rise.abs() / 4)
    return matters & flat & straight & (change.abs() >= rise.abs() / 2)


def _quantum(one: Measured) -> Tensor:
    """The number of which all changes of func are multiples, if func is constant at the smallest step; else infinity.

    This is infinity as well if rounding of the outputs explains the number: float64, shape (entries,). For example,
    (f(x) + 1e6) - 1e6 is constant for steps below 1e-10. All its changes are multiples of the spacing of floating-point
    numbers near 1e6.
    """
    taken = (one.widths != 0) & one.changes.isfinite()
    quantum = torch.where(taken & (one.changes != 0), last_digit(one.changes), torch.inf).amin(0)
    return torch.where(_is_constant(one) & (quantum > ROUNDING * one.rounding), quantum, torch.inf)


def _are_multiples(one: Measured) -> Tensor:
    """Whether func is constant at the smallest step, and its small changes are multiples of half the smallest one.

    The smallest one, which may be one or two units of rounding, must be too large for rounding of the outputs. An
    example is 0.7 ((f(x) + 1e6) - 1e6), whose changes have no common last digit. Shape (entries,).
    """
    changes = torch.cat([one.changes, one.bends]).abs()
    seen = (torch.cat([one.widths, one.widths]) != 0) & changes.isfinite() & (changes > ROUNDING * one.rounding)
    multiples = 2 * changes / torch.where(seen, changes, torch.inf).amin(0)
    small = seen & (multiples <= MOST_MULTIPLES)
    off = torch.where(small, (multiples - multiples.round()).abs(), 0.0).amax(0)
    return _is_constant(one) & (small.sum(0) >= MIN_MULTIPLES) & (off <= MULTIPLE_RESIDUAL)


def _is_constant(one: Measured) -> Tensor:
    """Whether func does not change at the smallest step at which it is finite: bool, shape (entries,)."""
    taken = (one.widths != 0) & one.changes.isfinite()
    last = (taken * torch.arange(1, len(taken) + 1, device=taken.device)[:, None]).argmax(0, keepdim=True)
    return (taken & (one.changes == 0)).gather(0, last)[0]


def _is_absorbed(one: Measured, quantum: Tensor) -> Tensor:
    """Whether rounding inside func hides its changes at the smallest steps, but not at eps: bool, shape (entries,)."""
    slope = ((one.left + one.right) / 2).abs()
    constant = (one.widths != 0) & (one.changes == 0)
    explained = ~(constant & (slope * one.widths > 2 * quantum)).any(0)
    return explained & (quantum <= ROUNDED * 2 * one.step * slope)


def _hidden_derivatives(one: Measured, quantum: Tensor, values: Tensor, own: Tolerances, other: Tensor) -> Tensor:
    """How far the derivatives that rounding inside func may hide are from `values`: float64, shape (entries,).

    Zero where nothing is hidden. A func that returns multiples of `quantum` by intention changes like one that rounds.
    So neither the derivative of the small steps, which is zero, nor that of the large ones is certain.
    """
    hidden = torch.zeros_like(quantum)
    some = quantum.isfinite().nonzero().reshape(-1)
    if some.numel():
        value, error = extrapolate(one.slopes[:, some], one.widths[:, some], quantum[some], one.ratio)
        distance = (value - values[some]).abs()
        matters = (error <= HIDDEN_SHARE * value.abs()) & (distance > own.allowed(torch.hypot(value, other[some])))
        hidden[some] = torch.where(matters, distance + error, 0.0)
    return hidden


def _is_curved(one: Measured) -> Tensor:
    """Whether one-sided derivatives approach each other at smaller steps: bool, shape (entries,).

    Their difference is (f(x + h) - 2 f(x) + f(x - h)) / h.
    """
    at_eps = (one.right - one.left).abs()
    small = (one.widths != 0) & (one.steps <= one.eps / 8)
    first = small.to(torch.int8).argmax(0, keepdim=True)
    smaller = (one.bends / one.steps).gather(0, first)[0].abs()
    return small.any(0) & (smaller <= at_eps / 2)


def _is_bent(one: Measured) -> Tensor:
    """Whether one-sided derivatives differ from eps down to rounding, as at a kink at x: bool, shape (entries,).

    Next to a kink at a distance from x, they are equal at smaller steps.
    """
    least = (one.right - one.left).abs() / 2 * one.steps
    seen = (one.widths != 0) & (one.steps <= one.step) & (least > BEND_ROUNDING * one.rounding)
    return seen.any(0) & (~seen | (one.bends.abs() >= least)).all(0)


def _jumps(one: Measured, own: Tolerances, other: Tensor) -> Tensor:
    """The jump of func at x, or zero: float64, shape (entries,); other: as in `_settled`.

    It is the constant of a line fitted to func's changes as a function of the width, for steps of up to WIDER * eps.
    """
    used = (one.widths != 0) & (one.steps <= WIDER * one.eps)
    count = used.sum(0).clamp(min=1)
    width, change = (torch.where(used, values, 0.0) for values in (one.widths, one.changes))
    centered = torch.where(used, width - width.sum(0) / count, 0.0)
    slope = (centered * change).sum(0) / (centered**2).sum(0)
    rest = torch.where(used, change - slope * width, 0.0)
    jump = rest.sum(0) / count
    off = torch.where(used, rest - jump, 0.0).abs().amax(0)
    seen = (used & (one.steps <= one.eps)).sum(0) >= MIN_JUMP_STEPS
    seen &= (off <= JUMP_RESIDUAL * jump.abs()) & (jump.abs() > 2 * one.eps * own.allowed(torch.hypot(slope, other)))
    return torch.where(seen, jump, 0.0)


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
    displacement = _plain(problem.displacement(ones_at(problem.n, where, problem.device), eps))
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


def extrapolate(
    slopes: Tensor,
    widths: Tensor,
    rounding: Tensor,
    ratio: float = RATIO,
    most_noise: Tensor | float = math.inf,
) -> tuple[Tensor, Tensor]:
    """The best estimate of each entry and its error: shape (entries,) each; NaN and infinity if there is none.

    Parameters
    ----------
    slopes, widths
        Plain differences and their divisors: shape (steps, entries), large steps first. Steps that an entry did not
        take come last and have width zero.
    ratio
        The ratio of a step to the next smaller one.
    most_noise
        The largest noise of func: shape (entries,), or one number. If func scatters more at the finest steps, these
        steps are not fine enough for func, and estimates that disagree with them do not count.
    """
    if not widths.numel():
        return torch.full_like(rounding, torch.nan), torch.full_like(rounding, torch.inf)
    # These are few numbers: NumPy takes a quarter of the time that torch's operators take.
    most = torch.as_tensor(most_noise, dtype=rounding.dtype, device=rounding.device).expand_as(rounding)
    slope, width, least, limit = (_plain(one).detach().cpu().numpy() for one in (slopes, widths, rounding, most))
    found = []
    for first in range(0, rounding.numel(), TOGETHER):
        some = slice(first, first + TOGETHER)
        with np.errstate(all="ignore"):
            own = slope[:, some], width[:, some]
            found.append(_extrapolated(*own, _noise(*own, least[some], limit[some]), ratio))
    values, errors = (torch.from_numpy(np.concatenate(part)).to(rounding.device) for part in zip(*found, strict=True))
    return values, errors


def _plain(tensor: Tensor) -> Tensor:
    """The tensor or, for a subclass, which may have no memory of its own, a copy of its values."""
    if type(tensor) is Tensor:
        return tensor
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    values.copy_(tensor)
    return values


def _noise(slopes: Array, widths: Array, rounding: Array, most_noise: Array) -> Array:
    """Rounding or, if larger, the scatter of func at the smallest steps, at most `most_noise`: shape (entries,).

    The scatter is how far changes are from a fitted line through zero, in units of func's values.
    """
    taken = widths != 0
    finest = taken & (taken.sum(0) - taken.cumsum(0) < FINEST_STEPS)
    width = np.where(finest, widths, 0.0)
    line = (slopes * width**2).sum(0) / (width**2).sum(0)
    scatter = np.nan_to_num(np.abs((slopes - line) * width)).max(0)
    noise: Array = np.maximum(rounding, np.minimum(scatter, most_noise))
    return noise


def _extrapolated(slopes: Array, widths: Array, noise: Array, ratio: float) -> tuple[Array, Array]:
    values = np.full_like(noise, np.nan)
    errors_of_values = np.full_like(noise, np.inf)
    taken = widths != 0
    # By step and order: shape (steps, ORDER + 1, entries). An estimate of order k also uses the k next larger steps.
    estimates = np.full((len(widths), ORDER + 1, noise.size), np.nan)
    differences = np.full_like(estimates, np.nan)
    estimates[:, 0] = slopes
    # Slopes that are zero from one step on do not scatter: any kink lies beyond these steps.
    still = np.logical_and.accumulate((slopes == 0)[::-1], 0)[::-1]
    differences[1:, 0] = np.where(still[1:], 0.0, np.abs(np.diff(slopes, axis=0)))
    for k in range(1, min(len(widths) - 1, ORDER) + 1):
        coarse, fine = estimates[k - 1 : -1, k - 1], estimates[k:, k - 1]
        estimates[k:, k] = fine + (fine - coarse) / (ratio ** (2 * k) - 1)
        differences[k:, k] = np.maximum(np.abs(estimates[k:, k] - fine), np.abs(estimates[k:, k] - coarse))
    errors = differences + (noise / widths)[:, None]
    score = np.where(taken[:, None] & np.isfinite(errors), errors, np.inf).reshape(-1, noise.size)
    # The best estimate with which all smaller steps agree; usually, this is the best estimate of all.
    open_, place = np.arange(noise.size), np.arange(len(widths))[:, None]
    while open_.size:
        best = score[:, open_].argmin(0)
        possible = np.isfinite(score[best, open_])
        open_, best = open_[possible], best[possible]
        step, order = np.divmod(best, ORDER + 1)
        estimate, error, width = estimates[step, order, open_], errors[step, order, open_], widths[:, open_]
        off = np.abs((slopes[:, open_] - estimate) * width)
        # The error of a slope does not grow at smaller steps. Therefore, its effect on values shrinks with the step.
        near = off <= AGREEMENT * noise[open_] + error * width
        agrees = (near | (place < step) | (width == 0)).all(0)
        values[open_[agrees]], errors_of_values[open_[agrees]] = estimate[agrees], error[agrees]
        score[best[~agrees], open_[~agrees]] = np.inf
        open_ = open_[~agrees]
    return values, errors_of_values
