"""Directional differences of a small check in fast mode, at steps at which their noise is small enough."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from fastgrad.checks.small_result import MeasuredStep, SmallCheck
from fastgrad.core.errors import raise_if_transient
from fastgrad.core.native import Derivatives, RandomDirections
from fastgrad.core.phases import phase
from fastgrad.core.precision import ROUNDING
from fastgrad.core.random import SKETCH_DIRECTIONS
from fastgrad.core.tensors import largest
from fastgrad.engines.plan import sketch_size
from fastgrad.engines.sketch import (
    EXPLAINED_RATIO,
    FINER_STEP,
    KINK,
    NOISE_SHARE,
    derivatives_vary,
    func_varies,
    parts_of_directions,
    weights,
)
from fastgrad.problem.first_look import values_vary
from fastgrad.report.settings import Settings
from fastgrad.verdict.repeated_rows import ALONG_DIRECTION

SMALLER_STEP = 1 / 8
"""If curvature dominates the noise, sums are compared again with the step multiplied by this factor. Errors from
curvature are proportional to the square of the step, so they become 64 times smaller."""

LARGEST_FACTOR = 64
"""Largest factor of the second step if rounding dominates the noise. Errors from rounding are proportional to the
inverse of the step."""

CURVATURE_RATIO = 64.0
"""Largest ratio that is attributed to curvature: the error of a central difference, times the derivative, divided by
the square of the error of a one-sided difference. It is 2/3 for exp and 1 for 1/x, for any step. Noise with a larger
ratio is attributed to rounding."""

MAX_COMPARED_STEPS = 2
"""Largest number of steps at which sums are compared. There is one more if the noise is proportional to the step."""

PROPORTIONAL = 4.0, 16.0
"""Limits of the ratio of the noise at a step to that at the next one, SMALLER_STEP times as large, if the noise is
proportional to the step: the ratio is 8. The second derivative may jump, for example where a square is clamped at 0."""

NOISE_MARGIN = 4.0
"""Factor of the noise, which is measured only along the first direction: along others, it may be this much larger."""


OUTPUT_ROUNDING = 4.0
"""Noise from rounding of an output, in unit roundoffs of its value: the sum of a few values rounds."""


def differences_by_step(check: SmallCheck) -> Iterator[tuple[Derivatives, Tensor, float]]:
    """Yields directional derivatives at eps, then at one or two other steps, with the result of `_weight` for them.

    At eps, they are yielded first without measuring rounding inside func, if two evaluations show no noise, then with
    it. A step at which the noise is too large is not yielded, but kept in `check.steps` like the others; if the first
    direction shows that curvature is the reason, the other directions are left out.
    """
    settings = check.settings
    step, budget, count, known = 1.0, settings.atol / (2 * NOISE_SHARE), 0, None
    while count < MAX_COMPARED_STEPS or (count == MAX_COMPARED_STEPS and _noise_is_proportional(check)):
        differences = _differences(check, step, budget, measure_noise=count > 0, known=known)
        if differences is None:
            return
        if known is not None and torch.equal(known.derivatives, differences.derivatives):
            check.steps.pop()
        check.steps.append(MeasuredStep(step, budget, count > 0 or known is not None, differences))
        known = None if differences.measures_noise else differences
        count += differences.measures_noise
        weighed = _weight(check, differences, 1.0) if differences.is_complete else None
        if weighed is not None:
            yield differences, *weighed
            if known is not None:
                continue
        factor = _step_factor(check, differences)
        if factor is None or (factor > 1 and _varies_within_step(check, differences, step)):
            return
        step, budget = factor * differences.step / settings.eps, 0.0


def _step_factor(check: SmallCheck, differences: Derivatives) -> float | None:
    """The factor from a step to one at which the noise, from curvature or rounding, is probably small enough.

    None if neither is the reason for the noise: this may be a kink, or a func that returns other values for the same
    inputs.
    """
    if differences.is_complete and _weight(check, differences, 1.0) is not None:
        # The sums do not agree. Another direction may be curved more. A larger step might average an error to zero.
        return SMALLER_STEP
    if _weight(check, differences, SMALLER_STEP**2) is None:
        return None
    noise = float(torch.linalg.vector_norm(differences.noise))
    derivative = float(torch.linalg.vector_norm(differences.derivatives[0]))
    if not noise * derivative > CURVATURE_RATIO * differences.curvature**2:
        return SMALLER_STEP
    factor = 2.0
    while factor < LARGEST_FACTOR and noise * NOISE_MARGIN * NOISE_SHARE > factor * check.settings.atol:
        factor *= 2
    return factor


def _varies_within_step(check: SmallCheck, differences: Derivatives, step: float) -> bool:
    """Whether some output varies within a step, so that a larger step might average an error to zero.

    Rounding inside func changes values by as much at a much smaller step. Only noise that rounding of the outputs does
    not explain is compared with that at such a step, along the first direction.
    """
    size = max((largest(output.detach()) for output in check.problem.graph.outputs), default=0.0)
    rounding, noise = OUTPUT_ROUNDING * check.problem.unit_roundoff * size, differences.noise * differences.step
    if not bool((noise > EXPLAINED_RATIO * rounding).any()):
        return False
    finer = _differences(check, FINER_STEP * step, 0.0, measure_noise=True, count=1)
    if finer is None:
        return True
    rounded = finer.noise * finer.step
    usual = rounded.square().mean().sqrt().clamp(min=rounding)
    return bool((noise > EXPLAINED_RATIO * torch.maximum(rounded, usual)).any())


def _weight(check: SmallCheck, differences: Derivatives, share: float) -> tuple[Tensor, float] | None:
    """The weight of each output, shape (m,), empty if all are 1; and the size of an entry's error that sums show.

    None if noise may hide errors beyond the tolerance.

    share: the share of the noise that counts.
    """
    settings = check.settings
    norm, size = differences.sizes or (math.inf, math.inf)
    rounding = ROUNDING * check.problem.unit_roundoff * size * check.problem.m**0.5
    if not rounding <= settings.atol / (4 * NOISE_SHARE):
        return None
    if norm * share <= settings.atol / NOISE_SHARE:
        return torch.empty(0), settings.atol
    noise = differences.noise * (share * NOISE_MARGIN)
    weight = weights(noise, norm * share * NOISE_MARGIN, settings.atol, torch.ones_like(noise, dtype=torch.bool))
    hidden, derivative = settings.atol / weight, differences.derivatives.abs().amax(0)
    if not differences.is_complete:
        # Along a single direction, some derivatives are small by chance. Only the noise of all outputs may hide these.
        is_quiet = noise * NOISE_SHARE <= settings.atol + settings.rtol * derivative
        usual = float(derivative.square().mean().sqrt())
        derivative = torch.where(is_quiet, derivative.clamp(min=usual), derivative)
    if not bool((hidden <= settings.atol + settings.rtol * derivative).all()):
        return None
    return weight, float(hidden.amax())


@phase("directional differences")
def _differences(
    check: SmallCheck,
    step: float,
    budget: float,
    measure_noise: bool,
    count: int | None = None,
    known: Derivatives | None = None,
) -> Derivatives | None:
    """Derivatives along directions, with few evaluations; None if func raises for the steps or returns something else.

    step: relative to eps. budget: the largest 2-norm of noise with which one-sided differences are taken; 0: only
    central differences. measure_noise: whether to measure rounding inside func even if two evaluations show none.
    count: number of directions; None: that of a sketch. known: derivatives at this step, for which only the noise
    remains to be measured.
    """
    settings, count = check.settings, count or sketch_size(check.settings.confidence)
    parts = parts_of_directions(count, len(check.problem.inputs), check.is_custom)
    streams = [SKETCH_DIRECTIONS + 16 * min(k, count - 1) for k in range(len(parts))]
    along = RandomDirections(settings.seed, streams, [], settings.eps * step, min(1.0, step), parts)
    evaluate = partial(check.problem.screening_derivatives, along, KINK, budget, measure_noise, known)
    try:
        found = evaluate()
    except Exception as error:
        raise_if_transient(error, evaluate)
        return None  # the complete check decides what this means
    if isinstance(found, tuple):
        check.changed = found
        return None
    return found


def _noise_is_proportional(check: SmallCheck) -> bool:
    """Whether the noise of the last step hides errors, but is smaller than before in proportion to the step."""
    before, last = (one.differences for one in check.steps[-2:])
    low, high = (float(last.noise.norm()) * ratio for ratio in PROPORTIONAL)
    falls = last.step < before.step and low <= float(before.noise.norm()) <= high
    return falls and _weight(check, last, 1.0) is None


def changing_steps_repeat(check: SmallCheck, last_agrees: bool) -> bool:
    """Whether differences that change from one step to the other are the same when they are repeated.

    If they are not, func returned other values once, which the complete check would not detect.

    last_agrees: whether the differences of the last step agree with VJPs, and need not be repeated.
    """
    *earlier, last = check.steps
    final = last.differences.derivatives
    changing = [
        one
        for one in earlier
        if derivatives_vary(
            check.settings,
            one.differences.derivatives,
            final[: len(one.differences.derivatives)],
            rounding_of_differences(check, one.step),
        )
    ]
    return steps_repeat(check, changing if last_agrees or not changing else [*changing, last])


def steps_repeat(check: SmallCheck, steps: Sequence[MeasuredStep]) -> bool:
    """Whether the differences of some steps are the same when they are repeated; notes if they are not."""
    for step, budget, measured_noise, before in steps:
        again = _differences(check, step, budget, measured_noise)
        rounding = rounding_of_differences(check, step)
        # The result is None if func now raises or returns outputs of another kind.
        if again is None or any(
            derivatives_vary(check.settings, *pair, rounding)
            for pair in ((again.derivatives, before.derivatives), (again.noise, before.noise))
        ):
            check.irreproducible.append(ALONG_DIRECTION)
            return False
    return True


def noise_repeats(check: SmallCheck) -> bool:
    """Whether noise that no other step reduces enough is that of func; notes if func returned other values once."""
    for step, budget, measured_noise, differences in check.steps[-1:]:
        if _step_factor(check, differences) is None and func_varies(
            check.settings,
            rounding_of_differences(check, step),
            differences,
            partial(_differences, check, step, budget, measured_noise),
            is_quiet=lambda again: _weight(check, again, 1.0) is not None,
            values_move=partial(_values_vary, check),
        ):
            check.irreproducible.append(ALONG_DIRECTION)
    return not check.irreproducible


def _values_vary(check: SmallCheck) -> bool:
    problem = check.problem
    before = problem.outputs_of_graph()
    return not problem.record_again() or values_vary(problem, check.settings, problem.outputs_of_graph(), before)


def rounding_of_differences(check: SmallCheck, step: float) -> float:
    """The error of differences at `step` times eps, if rounding changes the largest output by two unit roundoffs."""
    size = max((largest(output.detach()) for output in check.problem.graph.outputs), default=0.0)
    return 2 * check.problem.unit_roundoff * size / (check.settings.eps * step)


def sum_threshold(settings: Settings, differences: Derivatives) -> float:
    """The largest difference between sums that agree.

    An error of size atol contributes at least atol / 4. If noise was not measured, it must be smaller than the rest.
    """
    return settings.atol / (4 if differences.measures_noise else 8)
