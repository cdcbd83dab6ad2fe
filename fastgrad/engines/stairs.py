"""Whether func is a staircase next to x, because an intermediate result is rounded. Small steps see only one stair."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from fastgrad.core.precision import spacing
from fastgrad.core.tensors import ones_at
from fastgrad.engines.measured_steps import LARGEST_STEP, both_sides
from fastgrad.engines.ridders import Refinement
from fastgrad.problem.coordinates import block_with
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Tolerances

ENDS = 0.25113707, 0.45369218, 0.70432651, 0.98713943
"""The ends of three intervals on each side of x, in units of the largest distance. Their spacing is irregular, so that
a periodic func does not have the same value at all of them."""

POINTS = tuple(sorted([*ENDS, *((first + last) / 2 for first, last in itertools.pairwise(ENDS))]))
"""Distances at which slopes are measured: the ends and the middles of the intervals."""

INTERVALS = len(POINTS) - 1
"""The number of intervals on both sides."""

FARTHEST = 1.0, 32.0
"""The largest distances from x, in units of the step of the check. In float32, stairs may be as wide as this step."""

STEP_BASE = 4.0
"""The steps of slopes are powers of this number times the largest distance, so that many entries share a step."""

COARSEST = STEP_BASE**-3
"""The largest step of a slope, in units of the largest distance. A stair must be wider, and the intervals must contain
several stairs."""

RESOLUTION = 8.0
"""The least step of a slope changes outputs by their rounding times this number if the slope is the tolerance."""

FEWEST_ULPS = 16.0
"""The least step of a slope, in units of the rounding of x."""

SMOOTH = 1 / 64
"""The largest error of Simpson's rule, relative to the differences of the slopes, if func is smooth in an interval."""

FEWEST = 5
"""The least number of intervals, of six, that must show stairs. A jump, or a few kinks side by side, affect one."""


def mark_stairs(
    problem: Problem,
    record_graph: bool,
    eps: float,
    inputs: Tensor,
    outputs: Tensor,
    refinement: Refinement,
    own: Tolerances,
) -> None:
    """Sets `doubtful` where func is a staircase and the derivative is the slope of a stair.

    Entries are tested if the derivative differs from the one-sided differences at eps. A test takes 32 evaluations for
    each distance of FARTHEST and for each step of slopes that some entries need.

    inputs, outputs: the coordinates of the entries, as for `ridders.measured`.
    """
    allowed = own.allowed(refinement.values)
    sides = torch.stack([refinement.right, refinement.left])
    distance = (sides - refinement.values).abs().nan_to_num(0.0).amax(0)
    # The numbers of the entries that are still to be tested.
    open_ = ((distance > allowed) & (refinement.errors <= allowed) & ~refinement.doubtful).nonzero().reshape(-1)
    if not open_.numel():
        return
    displacement = problem.displacement(ones_at(problem.n, inputs, problem.device), eps)
    x = problem.coordinates()[inputs]
    dtype = block_with(problem.inputs, int(inputs[0])).tensor.dtype
    unit = spacing(block_with(problem.outputs, int(outputs[0])).tensor.dtype)
    is_open = torch.ones_like(refinement.doubtful)
    for farthest in FARTHEST:
        steps = farthest * displacement[inputs]
        open_ = open_[(steps <= LARGEST_STEP * x.abs().clamp(min=1.0))[open_]]
        # An output near zero has larger values at the points.
        rounding = refinement.rounding + unit * steps * sides.abs().nan_to_num(0.0).amax(0)
        least = RESOLUTION * rounding / allowed
        fine = torch.maximum(least, FEWEST_ULPS * spacing(dtype) * (x.abs() + steps)) / steps
        powers = torch.floor(fine.log() / math.log(STEP_BASE))[open_]
        for power in torch.unique(powers[fine[open_] <= COARSEST]):
            some = open_[powers == power]
            scales = _scales(STEP_BASE ** float(power))
            found = list(both_sides(problem, record_graph, farthest * displacement, scales, outputs[some]))
            if None in found:
                continue
            values = torch.stack([torch.stack(pair) for pair in found if pair is not None])
            moved = steps.new_tensor([[scale, -scale] for scale in scales])[:, :, None] * steps[some]
            positions = (x[some] + moved).to(dtype.to_real()).double()
            known = (of[some] for of in (refinement.values, allowed, rounding))
            refinement.doubtful[some], is_open[some] = _show_stairs(values, positions, sides[:, some], *known)
        open_ = open_[(is_open & ~refinement.doubtful)[open_]]


def _scales(ratio: float) -> list[float]:
    """Distances from x: for each of `POINTS`, the ends of the step of its slope; and two steps for slopes at x."""
    return [point + side * ratio for point in POINTS for side in (1, -1)] + [ratio, ratio / RESOLUTION]


def _show_stairs(
    values: Tensor, positions: Tensor, sides: Tensor, derivatives: Tensor, allowed: Tensor, rounding: Tensor
) -> tuple[Tensor, Tensor]:
    """Whether outputs show stairs, and whether larger distances may show wider ones: bool, shape (entries,) each.

    In an interval in which func is smooth, its change is the integral of its slope, by Simpson's rule. If func is a
    staircase, slopes are those of stairs, and the change also contains the heights of the stairs, which all go up or
    all go down on one side of x. A kink in the interval makes slopes differ; such an interval decides nothing. No
    interval may be smooth. The slope at x must be the derivative, at one of two steps: a kink may be closer than the
    larger one.

    There may be wider stairs unless all intervals are smooth, and the slopes and a kink next to x explain the
    one-sided differences.

    Parameters
    ----------
    values, positions
        The outputs at the distances of `_scales`, on both sides of x, and the input there: shape (scales, 2, entries).
    sides
        The right and the left difference at the step of the check: shape (2, entries).
    derivatives, allowed, rounding
        The derivatives and their tolerances, and the rounding of the outputs: shape (entries,).
    """
    widths = positions[:-2:2] - positions[1:-2:2]
    slopes = (values[:-2:2] - values[1:-2:2]) / widths
    centers, places = (values[:-2:2] + values[1:-2:2]) / 2, (positions[:-2:2] + positions[1:-2:2]) / 2
    at_x = (values[-2:, 0] - values[-2:, 1]) / (positions[-2:, 0] - positions[-2:, 1])
    error = allowed / 2 + 8 * rounding / widths.abs().amin((0, 1))
    shown, smooth = torch.zeros_like(rounding), torch.zeros_like(rounding)
    for side in range(2):
        up, down = torch.zeros_like(rounding), torch.zeros_like(rounding)
        for first in range(0, len(POINTS) - 2, 2):
            begin, middle, end = slopes[first : first + 3, side]
            mean = (centers[first + 2] - centers[first])[side] / (places[first + 2] - places[first])[side]
            rest = mean - (begin + 4 * middle + end) / 6
            spread = torch.maximum((begin - middle).abs(), (end - middle).abs())
            up += rest > spread + error
            down += rest < -spread - error
            smooth += rest.abs() <= SMOOTH * spread + error
        shown += torch.maximum(up, down)
    is_slope = ((at_x - derivatives).abs() <= allowed + RESOLUTION * error).any(0)
    # A kink is closer to x than the first point. Up to the kink, the slope is the derivative.
    bent, range_ = slopes[0] - derivatives, slopes.amax(0) - slopes.amin(0) + error
    is_explained = ((sides - slopes[0]).abs() <= POINTS[0] * bent.abs() + range_).all(0) & (smooth == INTERVALS)
    return (shown >= FEWEST) & (smooth == 0) & is_slope, ~is_explained & sides.isfinite().all(0)
