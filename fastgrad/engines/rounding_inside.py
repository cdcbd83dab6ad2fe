"""Whether the derivative that small steps measure comes from rounding inside func, or func has a kink or a jump."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgrad.core.precision import ROUNDING, last_digit
from fastgrad.engines.extrapolation import AGREEMENT, extrapolate
from fastgrad.engines.measured_steps import RATIO, Measured
from fastgrad.report.settings import Tolerances

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

HIDDEN_SHARE = 1 / 8
"""If func is constant at small steps, rounding inside func may hide the derivative that large steps show. This is its
largest error, as a share of the derivative, for which it counts as hidden."""

MIN_MULTIPLES, MOST_MULTIPLES = 6, 1000.0
"""Changes that are multiples of one number show rounding if there are this many of them, up to this multiple. Larger
multiples are less exact, because the number is known only up to rounding."""

MULTIPLE_RESIDUAL = 0.03
"""Largest distance of these multiples from integers. By chance, one number is that close with probability 0.06."""

KINK_SHARE = 1 / 2
"""Largest change of slope by kinks, relative to the slope at large steps, for which kinks do not explain why func is
constant at small steps. A kink within eps of x that explains it changes the slope by at least 1.3 times as much."""


def is_rounded(one: Measured, values: Tensor, errors: Tensor, allowed: Tensor) -> Tensor:
    """Whether rounding inside func causes the derivative `values` of small steps: shape (entries,).

    func must have another slope at eps and larger steps, the same at all of them. It must be straight there or, if it
    is constant at the smallest steps, have no kink near x. For example, 1 - cos(x) is constant next to 1e-8.
    """
    wider = (one.steps >= RATIO * one.eps) & (one.steps <= WIDER * one.eps)
    # Next to a kink, the one-sided slopes differ. If func is curved, these or the slopes of wider steps differ.
    middle = (one.left + one.right) / 2
    distance = (middle - values).abs().nan_to_num(torch.inf)  # a NaN is no estimate and excuses no gradient
    most = STRAIGHT * torch.minimum(distance, middle.abs())
    constant = is_constant(one) & (values == 0) & (_kinks(one, wider) <= KINK_SHARE * distance)
    rounded = ((one.left - one.right).abs() <= most) | constant
    rounded &= (~wider | ((one.slopes - middle).abs() <= most)).all(0)
    # If rounding of the outputs explains the distance at all wider steps, the slopes may be equal by chance.
    rounded &= (wider & (distance * one.widths > one.rounding)).any(0)
    is_precise = errors <= SHARE_THAT_MATTERS * distance
    return rounded & (distance > torch.where(is_precise, SHARE_THAT_MATTERS * allowed, allowed))


def is_straight_within_eps(one: Measured, values: Tensor, errors: Tensor, allowed: Tensor) -> Tensor:
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


def is_next_to_jump(one: Measured, values: Tensor, allowed: Tensor) -> Tensor:
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


def uneven_bends(one: Measured) -> Tensor:
    """The bends without the parabola through x and the widest step of at most WIDER * eps: shape (steps, entries).

    Where func is smooth, little remains. Kinks and rounding remain.
    """
    wide = (one.widths != 0) & (one.steps <= WIDER * one.eps)
    widest = wide.to(torch.int8).argmax(0, keepdim=True)
    bend, step = (some.gather(0, widest) for some in (one.bends, one.steps))
    return one.bends - torch.where(wide & bend.isfinite(), bend * (one.steps / step) ** 2, 0.0)


def is_staircase(one: Measured, values: Tensor, allowed: Tensor, uneven: Tensor) -> Tensor:
    """Whether func is a staircase along a straight line, as in lower precision, and `values` are slopes of a stair.

    Returns a bool tensor of shape (entries,). Next to x, func has the slope `values`. The rest of its changes at larger
    steps must be proportional to the step, up to the height of a stair, on both sides of x: next to a kink, bends are
    larger. If func no longer changes at larger steps, it is not a staircase: it may sort its inputs or oscillate.

    uneven: `uneven_bends`.
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


def quantum_of(one: Measured) -> Tensor:
    """The number of which all changes of func are multiples, if func is constant at the smallest step; else infinity.

    This is infinity as well if rounding of the outputs explains the number: float64, shape (entries,). For example,
    (f(x) + 1e6) - 1e6 is constant for steps below 1e-10. All its changes are multiples of the spacing of floating-point
    numbers near 1e6.
    """
    taken = (one.widths != 0) & one.changes.isfinite()
    quantum = torch.where(taken & (one.changes != 0), last_digit(one.changes), torch.inf).amin(0)
    return torch.where(is_constant(one) & (quantum > ROUNDING * one.rounding), quantum, torch.inf)


def are_multiples(one: Measured) -> Tensor:
    """Whether func is constant at the smallest step, and its small changes are multiples of half the smallest one.

    The smallest one, which may be one or two units of rounding, must be too large for rounding of the outputs. An
    example is 0.7 ((f(x) + 1e6) - 1e6), whose changes have no common last digit. Shape (entries,).
    """
    changes = torch.cat([one.changes, one.bends]).abs()
    seen = (torch.cat([one.widths, one.widths]) != 0) & changes.isfinite() & (changes > ROUNDING * one.rounding)
    multiples = 2 * changes / torch.where(seen, changes, torch.inf).amin(0)
    small = seen & (multiples <= MOST_MULTIPLES)
    off = torch.where(small, (multiples - multiples.round()).abs(), 0.0).amax(0)
    return is_constant(one) & (small.sum(0) >= MIN_MULTIPLES) & (off <= MULTIPLE_RESIDUAL)


def is_constant(one: Measured) -> Tensor:
    """Whether func does not change at the smallest step at which it is finite: bool, shape (entries,)."""
    taken = (one.widths != 0) & one.changes.isfinite()
    last = (taken * torch.arange(1, len(taken) + 1, device=taken.device)[:, None]).argmax(0, keepdim=True)
    return (taken & (one.changes == 0)).gather(0, last)[0]


def is_absorbed(one: Measured, quantum: Tensor) -> Tensor:
    """Whether rounding inside func hides its changes at the smallest steps, but not at eps: bool, shape (entries,)."""
    slope = ((one.left + one.right) / 2).abs()
    constant = (one.widths != 0) & (one.changes == 0)
    explained = ~(constant & (slope * one.widths > 2 * quantum)).any(0)
    return explained & (quantum <= ROUNDED * 2 * one.step * slope)


def hidden_derivatives(one: Measured, quantum: Tensor, values: Tensor, own: Tolerances, other: Tensor) -> Tensor:
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


def is_curved(one: Measured) -> Tensor:
    """Whether one-sided derivatives approach each other at smaller steps: bool, shape (entries,).

    Their difference is (f(x + h) - 2 f(x) + f(x - h)) / h.
    """
    at_eps = (one.right - one.left).abs()
    small = (one.widths != 0) & (one.steps <= one.eps / 8)
    first = small.to(torch.int8).argmax(0, keepdim=True)
    smaller = (one.bends / one.steps).gather(0, first)[0].abs()
    return small.any(0) & (smaller <= at_eps / 2)


def is_bent(one: Measured) -> Tensor:
    """Whether one-sided derivatives differ from eps down to rounding, as at a kink at x: bool, shape (entries,).

    Next to a kink at a distance from x, they are equal at smaller steps.
    """
    least = (one.right - one.left).abs() / 2 * one.steps
    seen = (one.widths != 0) & (one.steps <= one.step) & (least > BEND_ROUNDING * one.rounding)
    return seen.any(0) & (~seen | (one.bends.abs() >= least)).all(0)


def jumps(one: Measured, own: Tolerances, other: Tensor) -> Tensor:
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
