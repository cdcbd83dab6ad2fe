"""The sketch engine: V^T (J_num - J_ana) U for a few random directions U and cotangents V.

Differences come first and cotangents second, because the measured noise determines the weights of the
cotangents: outputs that differences do not resolve must not hide the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgrad.core.native import Derivatives, Layout, RandomDirections, ops
from fastgrad.core.phases import phase
from fastgrad.core.precision import ROUNDING, excess, last_digit
from fastgrad.core.random import SKETCH_COTANGENTS, SKETCH_DIRECTIONS
from fastgrad.core.tensors import largest, near
from fastgrad.engines.grad_output_kinds import CONSTANT, DENSE, EXPANDED, HALVED, NON_CONTIGUOUS, SPARSE, GradOutputKind
from fastgrad.engines.rounding_inside import KINK_SHARE, kink
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings

NOISE_SHARE = 16
"""The noise of the sum for a cotangent is at most atol divided by this number; the threshold is atol / 4."""

EXTRAPOLATED, CENTRAL = 4, 2
"""Number of evaluations per directional derivative, with Richardson extrapolation and without."""

MAX_PARTS = 4
"""Largest number of parts of a direction that are perturbed one after the other: each costs two evaluations."""

KINK = 1e-2
"""If one-sided derivatives differ from the central one by more than this share, func is not smooth within a step."""


NOISE_DROP = 64
"""If a repeated measurement of noise gives a value that is smaller by this factor, the first value did not come from
rounding that differs from run to run."""

FINER_STEP = 2.0**-5
"""Factor from a step to one that shows whether noise comes from rounding. There, a term that varies within the step is
about linear, such as sin(k x) for k up to 3e7 with the default eps."""

EXPLAINED_RATIO = 16.0
"""Largest ratio of the noise at a step to that at the finer one, in units of func's values, that rounding explains.
Rounding inside func makes values about as noisy at both. It is random, so it may be a few times smaller by chance."""

STRAIGHT_STEPS = 256, 64
"""Steps, in units of eps, at which an output is a straight line if it is one but for rounding inside func that changes
it at steps of eps: far above eps, and small enough for the curvature of most functions."""

SMOOTH_STEPS = 64, 16
"""Steps, in units of eps, at which the bends of an output show whether it has a kink within eps of x."""

STAIR_STEPS = 0.215, 0.553, 1.28, 1.534, 4.34, 10.03
"""Steps, in units of eps, at which the height of stairs is measured: stairs of about eps in width show there. Next to a
kink, where the changes are a (step - b), no a and b make them multiples of one number."""

STAIR_SHARE = 0.03
"""How far a jump may be from a multiple of the height, as a share of the height: below 0.117, which a kink reaches."""

FEWEST_JUMPS = 4
"""Number of jumps from which stairs are recognized; fewer numbers are often multiples of one by chance."""


@dataclass(eq=False, slots=True)
class Differences:
    """Directional derivatives by differences, all inputs perturbed together.

    Attributes
    ----------
    eps
        The nominal step.
    directions
        The directions after rounding of the points, times the weights of the inputs: float64, shape (count, n).
    derivatives
        J u, Richardson-extrapolated where there are four evaluations: float64, shape (count, m).
    noise
        Bound of the errors of the derivatives: float64, shape (m,), the largest over the directions for which it was
        estimated.
    rounding
        The error of a derivative if rounding changes an output by two unit roundoffs, relative to the output.
    sizes
        The norm of noise, and the largest derivative, if they are already known.
    """

    eps: float
    directions: Tensor
    derivatives: Tensor
    noise: Tensor
    rounding: float
    sizes: tuple[float, float] | None = None

    @property
    def noise_norm(self) -> float:
        return self.sizes[0] if self.sizes else float(torch.linalg.vector_norm(self.noise))

    @property
    def largest(self) -> float:
        """The largest |J u| of all outputs and directions; NaN if one of them is NaN."""
        return self.sizes[1] if self.sizes else largest(self.derivatives)

    def size(self) -> Tensor:
        """The largest |J u| of each output: float64, shape (m,)."""
        return self.derivatives.abs().amax(0)


def derivatives_vary(settings: Settings, again: Tensor, derivative: Tensor, rounding: Tensor | float) -> bool:
    """Whether repeated differences, shape (..., m), show that func returned other values than at first.

    rounding: the error of a difference if func's values are off by one ulp, as may happen from run to run.
    """
    own = settings.loosest()
    allowed = own.allowed(torch.maximum(again.abs(), derivative.abs())) + ROUNDING * rounding
    return not bool(near(again, derivative, allowed).all())


def func_varies(
    settings: Settings,
    rounding: Tensor | float,
    differences: Differences | Derivatives,
    measure: Callable[[int | None], Differences | Derivatives | None],
    is_quiet: Callable[[Any], bool],
    values_move: Callable[[], bool],
) -> bool:
    """Whether noisy differences come from values that func returned only once.

    The first difference is repeated and, if the result is quiet or less than half as noisy, all differences. If a
    difference is not finite, all are repeated immediately. Otherwise, the noise is that of func, unless func's first
    values at the inputs, on which all estimates of noise depend, were wrong.

    Parameters
    ----------
    rounding
        As in `derivatives_vary`.
    measure
        Repeats the given number of differences, or all for None; returns None if func does not return its outputs.
    is_quiet
        Whether the noise of differences is small enough for a verdict.
    values_move
        Whether func now returns other values at the inputs than at first.
    """
    noise = float(differences.noise.norm().nan_to_num(math.inf))
    for count in (1, None) if bool(differences.derivatives.isfinite().all()) else (None,):
        again = measure(count)
        if again is None:
            return False
        if derivatives_vary(settings, again.derivatives, differences.derivatives[:count], rounding):
            return True
        if not is_quiet(again) and not float(again.noise.norm()) < noise / 2:
            return values_move()
    assert again is not None
    return is_quiet(again) or float(again.noise.norm()) < noise / NOISE_DROP


def contradicts(
    settings: Settings, base: Tensor, before: Differences, better: Differences, repeat: Callable[[], Differences]
) -> bool:
    """Whether better differences along the same directions show that an earlier call of func returned other values.

    base: the outputs, shape (m,). repeat: measures the first differences again; it is called only if they are not near
    the better ones.
    """
    rounding = before.rounding * base.abs()
    if not derivatives_vary(settings, better.derivatives, before.derivatives, rounding):
        return False
    return derivatives_vary(settings, repeat().derivatives, before.derivatives, rounding)


def parts_of_directions(count: int, inputs: int, is_custom: bool) -> list[int]:
    """The parts of `count` directions (see `RandomDirections`): one for each, but several for the last one.

    Custom code may keep results for inputs that do not change, and ignore the change of the others. In each part of the
    last direction, only some inputs change: only one if there are at most MAX_PARTS. A single direction has one part.
    """
    parts = min(inputs, MAX_PARTS) if is_custom and count > 1 else 1
    return [-1] * (count - 1) + (list(range(parts)) if parts > 1 else [-1])


@phase("directional differences")
def directional_differences(
    problem: Problem,
    settings: Settings,
    base: Tensor,
    eps: float,
    count: int,
    attempt: int,
    *,
    extrapolated: int,
    fixed: Tensor | None = None,
    first: int = 0,
    in_parts: bool = False,
) -> Differences:
    """Differences along `count` random directions, from direction number `first` of set number `attempt` on.

    The first `extrapolated` directions take four evaluations each, which also measure the noise. The other directions
    take two evaluations each; their errors are about as large, unless there is a kink. Two evaluations are enough to
    show that nothing is wrong, because the error of a difference does not make a wrong entry look right. They are not
    enough to show that something is wrong.

    Inputs with different steps or weights are perturbed one after the other, and their derivatives are added. The
    weights express each input in units of its own tolerance. Coordinates that are `fixed`, shape (n,), are not
    perturbed. in_parts: whether the results have a row for each part of the last direction (`parts_of_directions`), if
    all inputs have one step and weight.
    """
    points = [EXTRAPOLATED if k < extrapolated else CENTRAL for k in range(count)]
    streams = [SKETCH_DIRECTIONS + 16 * (attempt * count + first + k) for k in range(count)]
    relative = min(1.0, eps / settings.eps)
    rounding = 2 * problem.unit_roundoff / eps * sum(weight / step for step, weight in problem.scales)
    if not problem.mixes_inputs:
        parts = parts_of_directions(count, len(problem.inputs), in_parts and problem.differentiates_custom_code)
        more = len(parts) - count
        arguments = streams + streams[-1:] * more, points + points[-1:] * more, eps, relative
        along = RandomDirections(settings.seed, *arguments, parts)
        found = problem.differences_along(along, base, KINK, fixed)
        return Differences(eps, found.directions, found.derivatives, found.noise, rounding, found.sizes)
    directions, derivatives = (base.new_zeros(count, size) for size in (problem.n, problem.m))
    total = Differences(eps, directions, derivatives, torch.zeros_like(base), rounding)
    for k in range(count):
        noise = torch.zeros_like(total.noise)
        for part, step, weight in problem.parts_of(torch.ones_like(total.directions[k])):
            others = part == 0 if fixed is None else (part == 0) | fixed
            along = RandomDirections(settings.seed, streams[k : k + 1], points[k : k + 1], eps * step, relative)
            found = problem.differences_along(along, base, KINK, others)
            total.directions[k] += weight * found.directions[0]
            total.derivatives[k] += weight * found.derivatives[0]
            noise += weight * found.noise
        torch.maximum(total.noise, noise, out=total.noise)
    return total


def rounded_rows(
    problem: Problem, settings: Settings, first: Differences, smaller: Differences, pending: Tensor
) -> list[int]:
    """The pending outputs whose changes at a smaller step than the first one rounding inside func may hide."""
    if not smaller.eps < first.eps:
        return []
    stairs = _staircase_rows(problem, settings, smaller, pending)
    return sorted({*_absorbed_rows(problem, settings, first, smaller, pending), *stairs.tolist()})


def _staircase_rows(problem: Problem, settings: Settings, smaller: Differences, pending: Tensor) -> Tensor:
    """The pending outputs that are straight lines at large steps, with other derivatives than at this small one.

    A staircase along a line is an example, as in (x + 1e10) - 1e10 + x / 2. A kink within the first step size bends an
    output: its one-sided derivatives at large steps differ by more than either differs from the one at a small step. An
    output that no longer changes at large steps is clamped, not rounded.
    """
    base, vector = problem.base(), smaller.directions[0]
    slopes, bends = [], []
    for wide in STRAIGHT_STEPS:
        slope, bend = torch.zeros_like(base), torch.zeros_like(base)
        for plus, minus, h in problem.both_sides(vector, wide * settings.eps):
            slope += (plus - minus) / (2 * h)
            bend += ((plus - base) + (minus - base)).abs() / h
        slopes.append(slope)
        bends.append(bend)
    distance = (slopes[0] - smaller.derivatives[0]).abs()
    bent = torch.stack([*bends, slopes[1] - slopes[0]]).abs().amax(0)
    matters = distance > settings.atol / 4 + smaller.noise
    straight = bent <= torch.minimum(distance, slopes[0].abs()) / 4
    rows = (pending & matters & straight).nonzero().reshape(-1)
    return rows[_are_stairs(problem, settings, smaller, rows)] if rows.numel() else rows


def _are_stairs(problem: Problem, settings: Settings, smaller: Differences, rows: Tensor) -> Tensor:
    """Whether the outputs jump by multiples of one height beside the slope at a small step: bool, shape (rows,).

    Several kinks near x, such as near ties in a sort, also make an output straight at large steps, but its changes are
    no such multiples.
    """
    base, jumps = problem.base()[rows], [torch.zeros_like(rows, dtype=torch.float64)]
    vector = smaller.directions[0]
    slopes = [(plus - minus)[rows] / (2 * smaller.eps) for plus, minus, _ in problem.both_sides(vector, smaller.eps)]
    for eps in (factor * settings.eps for factor in STAIR_STEPS):
        for slope, (above, below, _) in zip(slopes, problem.both_sides(vector, eps), strict=True):
            jumps += [above[rows] - base - slope * eps, below[rows] - base + slope * eps]
    values = torch.stack(jumps).sort(0).values
    rounding = 4 * problem.unit_roundoff * base.abs() * (STAIR_STEPS[-1] * settings.eps / smaller.eps)
    gaps = values.diff(dim=0)
    height = torch.where(gaps > rounding, gaps, torch.inf).amin(0)
    stairs = values / height
    enough = (values.abs() > rounding).sum(0) >= FEWEST_JUMPS
    return height.isfinite() & enough & ((stairs - stairs.round()).abs() <= STAIR_SHARE).all(0)


def _absorbed_rows(
    problem: Problem, settings: Settings, first: Differences, smaller: Differences, pending: Tensor
) -> list[int]:
    """The pending outputs that change at the first step size but not at a smaller one, which rounding may absorb.

    Their changes are multiples of a number that is too large for rounding of the outputs. For example, the changes of
    (f(x) + 1e6) - 1e6 are multiples of 1e-10, and smaller changes of f(x) have no effect. This does not show that the
    derivative is zero. If an output is constant next to a kink, for example the kink of relu, its changes at the first
    step size are not rounded. If no kink explains them, the outputs are also returned: near zero, 1 - cos(x) is
    constant, but not because of a kink.
    """
    rows = (pending & first.derivatives.any(0) & ~smaller.derivatives.any(0)).nonzero().reshape(-1)
    if not rows.numel():
        return []
    quantum, size = torch.full_like(rows, torch.inf, dtype=torch.float64), torch.zeros_like(rows, dtype=torch.float64)
    for vector in first.directions:
        for plus, minus in ((above[rows], below[rows]) for above, below, _ in problem.both_sides(vector, first.eps)):
            quantum = torch.where(plus != minus, torch.minimum(quantum, last_digit(plus - minus)), quantum)
            size = torch.stack([size, plus.abs(), minus.abs()]).amax(0)
    absorbed = ~(quantum <= 2 * ROUNDING * problem.unit_roundoff * size)
    # At small steps, these outputs are constant: their derivatives are zero.
    explained = first.derivatives.new_zeros(len(first.directions), rows.numel())
    smooth = are_smooth(problem, settings, first.directions, rows, explained, settings.atol / 4)
    return [int(row) for row in rows[absorbed | smooth]]


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


def weights(noise: Tensor, norm: float, atol: float, pending: Tensor) -> Tensor:
    """A weight per output, at most 1, such that the 2-norm of the weighted noise is at most atol / 16: shape (m,).

    It is zero for outputs that are not pending or whose noise is not finite. norm: the 2-norm of noise.
    """
    budget = atol / NOISE_SHARE
    if norm <= budget:
        return pending.to(torch.float64)
    usable = pending & noise.isfinite()
    own = torch.where(usable, noise, 0.0)
    # The noisiest outputs are scaled down to a common cap, which uses the rest of the budget.
    cap = budget / math.sqrt(max(1, int(usable.sum())))
    capped, count = torch.empty_like(own), -1
    for _ in range(4):
        before, count = count, int((own > cap).sum())
        if count in (0, before):
            break
        torch.clamp(own, max=cap, out=capped)
        others = float(torch.dot(capped, capped)) - count * cap**2
        cap = max(cap, math.sqrt(max(0.0, budget**2 - others) / count))
    torch.div(cap, own, out=capped).masked_fill_(own <= cap, 1.0)
    return capped.masked_fill_(~usable, 0.0)


def all_count_fully(weight: Tensor) -> bool:
    return not weight.numel() or float(weight.amin()) == 1.0


@dataclass(eq=False, slots=True)
class Cotangent:
    """A row of V: a function that writes its values, its kind, the factor of its threshold, and its layout.

    The vector is made again for each use, with the same values. This costs less than keeping it in memory.
    """

    like: Tensor
    fill_: Callable[[Tensor], Tensor]
    kind: str
    scale: float = 1.0
    layout: Layout = Layout.CONTIGUOUS

    def vector(self) -> Tensor:
        """The vector: float64, shape (m,)."""
        return self.fill_(torch.empty_like(self.like))


def imaginary_parts(like: Tensor, outputs: Sequence[slice]) -> Tensor | None:
    """A mask of the imaginary parts, shape (m,), from the coordinates of complex outputs; None without such outputs."""
    if not outputs:
        return None
    mask = torch.zeros_like(like, dtype=torch.bool)
    for own in outputs:
        mask[own][1::2] = True
    return mask


def cotangents(
    seed: int, weight: Tensor, count: int, attempt: int, imaginary: Tensor | None = None
) -> Iterator[Cotangent]:
    """Yields weighted random cotangents, the first non-contiguous; attempt 0 adds HALVED, SPARSE and EXPANDED.

    imaginary: mask of the imaginary parts of outputs, shape (m,): attempt 0 then also adds a real cotangent.
    """
    plain = all_count_fully(weight)

    def fill_(kind: GradOutputKind, number: int, vector: Tensor) -> Tensor:
        kind.fill_(vector, seed, SKETCH_COTANGENTS + 16 * number)
        return vector if plain or kind is EXPANDED else vector.mul_(weight)

    for number in range(count):
        kind, text = (DENSE, "a random grad_output") if number else (NON_CONTIGUOUS, NON_CONTIGUOUS.text)
        yield Cotangent(weight, partial(fill_, kind, attempt * (count + 1) + number), text, layout=kind.layout)
    if imaginary is not None and not attempt:
        real = "a random real grad_output"
        yield Cotangent(weight, lambda vector: fill_(DENSE, count, vector).masked_fill_(imaginary, 0.0), real)
    for kind in () if attempt else (HALVED, SPARSE, EXPANDED):
        yield Cotangent(weight, partial(fill_, kind, count), kind.text, abs(kind.scale), kind.layout)


@dataclass(eq=False, slots=True)
class Sketch:
    """S = V^T (J_num - J_ana) U and its allowed errors: lists with a row per cotangent and a column per direction.

    gradients: known VJPs, by the number of their cotangent. allowance: the error that is allowed for rounding in
    addition to the threshold, relative to the cotangent's scale.
    """

    cotangents: list[Cotangent] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)
    allowed: list[list[float]] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    allowance: float = 0.0

    def worst(self) -> tuple[int, int] | None:
        """The entry (cotangent, direction) that exceeds its allowed error most, if any does: NaN exceeds it most."""
        found = {
            (row, column): excess(value, allowed)
            for row, pairs in enumerate(map(zip, self.values, self.allowed))
            for column, (value, allowed) in enumerate(pairs)
        }
        worst = max(found, key=found.__getitem__, default=None)
        return worst if worst and found[worst] > 1 else None

    def subtract(self, output: int, error: Tensor) -> None:
        """Subtracts the contribution of one output; error: its row of (J_num - J_ana) U, shape (directions,)."""
        for cotangent, row in zip(self.cotangents, self.values, strict=True):
            share = cotangent.vector()[output].item()
            row[:] = (value - share * own for value, own in zip(row, error.tolist(), strict=True))


def residual_row(
    problem: Problem,
    settings: Settings,
    differences: Differences,
    cotangent: Cotangent,
    vector: Tensor,
    first_graph: bool,
) -> tuple[list[float], list[float], Tensor]:
    """One row of the sketch, for a cotangent and its vector; its allowed errors; and the VJP, shape (n,).

    first_graph: whether the VJP is run on the first graph, whose saved tensors later calls may have overwritten.
    """
    vjp = problem.vjp_of_first_graph if first_graph else problem.vjp
    gradient = vjp(vector.unsqueeze(0), [cotangent.layout])[0]
    sums = ops.dots(differences.derivatives, vector), ops.dots(differences.directions, gradient)
    # For a few numbers, Python is faster than torch's operators, and one copy is enough to fetch them from a device.
    pairs = list(zip(*torch.stack(sums).tolist(), strict=True))
    values = [numerical[0] - analytical[0] for numerical, analytical in pairs]
    threshold = cotangent.scale * settings.atol / 4
    if cotangent.layout == Layout.EXPANDED:  # this cotangent has no weights
        noise = differences.noise_norm
        threshold += 8 * CONSTANT * (math.inf if math.isnan(noise) else noise)
    allowed = [threshold] * len(values)
    for k, value in enumerate(values):
        if abs(value) > threshold:  # only then does rounding matter
            # Rounding of sums of terms whose errors have random signs.
            terms = differences.derivatives[k] * vector, differences.directions[k] * gradient
            norms = (float(torch.linalg.vector_norm(some)) for some in terms)
            allowed[k] += ROUNDING * problem.unit_roundoff * math.hypot(*norms)
    return values, allowed, gradient
