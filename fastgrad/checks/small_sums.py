"""Fast mode of a small check: random sums of entries, with few calls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from fastgrad.checks.small_result import SmallCheck
from fastgrad.core.errors import raise_if_transient
from fastgrad.core.native import Derivatives, Layout, RandomDirections, flattened, largest_residuals
from fastgrad.core.phases import phase
from fastgrad.core.precision import ROUNDING
from fastgrad.core.random import SKETCH_DIRECTIONS
from fastgrad.core.tensors import differ, largest, largest_finite, near
from fastgrad.engines.blocks import REPEAT_SCALE
from fastgrad.engines.grad_output_kinds import CONSTANT
from fastgrad.engines.plan import sketch_size
from fastgrad.engines.sketch import KINK, NOISE_SHARE, derivatives_vary, func_varies, parts_of_directions, weights
from fastgrad.engines.small_sketch import REPEATED, ScreeningGradOutputs, screening_grad_outputs, weighted_grad_outputs
from fastgrad.problem.first_look import values_vary
from fastgrad.problem.small_backward import SmallBackward
from fastgrad.report.settings import Settings
from fastgrad.verdict.linearity import one_sign_failure
from fastgrad.verdict.repeated_calls import first_varying, repeated_calls_certificate
from fastgrad.verdict.repeated_rows import ALONG_DIRECTION, allowed_movement

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

EXPANDED_MARGIN = 256.0
"""Factor of the noise by which the sum for an expanded grad_output may be off if its VJP is that of a contiguous one.
All its components are equal, so the errors of many outputs may add up; and errors from curvature differ by factors of
up to 27 along other directions."""


@phase("numerical columns")
def numerical_columns(check: SmallCheck) -> Tensor | None:
    """Measures the numerical Jacobian: float64, shape (n, m); notes outputs of another kind, and then returns None."""
    found = check.problem.difference_columns(check.settings.eps)
    if isinstance(found, tuple):
        check.changed = found
        return None
    check.columns = found
    return found


def sums_agree(check: SmallCheck, weighted: bool = True) -> bool:
    """Compares sums of entries along random directions; returns whether they agree.

    A few VJPs run on the graph of the first evaluation, those of a custom backward before and after the differences.
    Then all VJPs run on a new graph, which is recorded after the differences. Outputs whose differences are noisy have
    smaller weights, as far as their tolerances allow.

    weighted: whether sums with weights count.
    """
    settings = check.settings
    problem = check.problem
    plain = _plain(check)
    run_early = partial(check.noted, partial(_early_vjps, check, plain))
    early = run_early() if problem.is_custom else None
    if early is None and problem.is_custom:
        return False
    done: tuple[ScreeningGradOutputs, Tensor] | None = None
    is_repeated = not problem.is_custom
    for differences, weight, bound in differences_by_step(check):
        if weight.numel() and not weighted:
            norm = differences.sizes[0] if differences.sizes else math.inf
            if norm * SMALLER_STEP**2 > settings.atol / NOISE_SHARE:
                break
            continue
        if early is not None and not is_repeated:
            is_repeated = True
            again = check.noted(partial(_run_after_differences, check, plain, early))
            if again is None or check.vjp_varies:
                return False
        early = run_early() if early is None else early
        if early is None:
            return False
        if not weight.numel() and not _early_agrees(settings, differences, plain, early):
            continue
        made = _grad_outputs(check, weight) if weight.numel() else plain
        if done is None or done[0] is not made:
            gradients = check.noted(partial(_all_vjps, check, made, plain, early))
            if gradients is None:
                return False
            done = made, gradients
        if _agree(check, differences, *done, weight.numel() > 0):
            if not changing_steps_repeat(check, last_agrees=True):
                return False
            if not check.noted(partial(earlier_vjps_repeat, check, done[0].of_all)):
                return False
            check.bound, check.differences = bound, (differences, weight, bound)
            if not problem.is_custom:
                return True
            third, one_sign = partial(_same_on_third, check, *done), partial(_one_sign_is_linear, check, *done)
            return check.noted(third) is not None and bool(check.noted(one_sign))
    early = run_early() if early is None else early
    if early is None:
        return False
    if check.steps and check.is_consistent:
        check.undecided_sums = early
    if check.products is None:
        check.products = plain.early, early
    return False


def _layout(check: SmallCheck) -> tuple[tuple[int, int, int], ...]:
    """For each output: its first coordinate, the number of coordinates per element, and the number of elements."""
    outputs = check.problem.outputs
    starts = accumulate((elements * width for _, elements, width in outputs), initial=0)
    return tuple((first, width, elements) for first, (_, elements, width) in zip(starts, outputs, strict=False))


def _grad_outputs(check: SmallCheck, weight: Tensor) -> ScreeningGradOutputs:
    """The grad_outputs for weights from `_weight`."""
    problem, settings = check.problem, check.settings
    arguments = _layout(check), settings.seed, sketch_size(settings.confidence), problem.is_custom
    return weighted_grad_outputs(*arguments, weight) if weight.numel() else screening_grad_outputs(*arguments)


def _plain(check: SmallCheck) -> ScreeningGradOutputs:
    return _grad_outputs(check, torch.empty(0))


def outputs_of(check: SmallCheck) -> Tensor:
    """The outputs of the current graph: float64, shape (m,)."""
    return flattened([output.detach() for output in check.problem.graph.outputs]).clone()


def first_outputs_repeat(check: SmallCheck) -> bool:
    """Whether the current graph has the outputs of the first one; only those of a backward are kept.

    The outputs of a graph are not used otherwise: differences are those of other evaluations.
    """
    excused = check.problem.records_differences or check.settings.nondet_tol
    return bool(excused) or outputs_repeat(check, check.problem.base())


def outputs_repeat(check: SmallCheck, before: Tensor) -> bool:
    """Whether the current graph has the outputs of an older one: float64, shape (m,)."""
    outputs = outputs_of(check)
    before = before.to(outputs.device)
    if torch.equal(outputs, before) or not values_vary(check.problem, check.settings, outputs, before):
        return True
    check.irreproducible.append("at the inputs")
    return False


def undecided_calls_repeat(check: SmallCheck, outputs: Tensor) -> bool:
    """Whether the calls of undecided sums give the same results again. They are repeated after all entries agreed.

    outputs: those of the graph on which the sums depend. The entries have been compared on a later graph.
    """
    assert check.undecided_sums is not None
    if not steps_repeat(check, check.steps) or not outputs_repeat(check, outputs):
        return False
    plain = _plain(check)
    repeated = check.noted(partial(_early_vjps, check, plain))
    return repeated is not None and _same_as_early(check, plain, repeated, check.undecided_sums)


def changing_steps_repeat(check: SmallCheck, last_agrees: bool) -> bool:
    """Whether differences that change from one step to the other are the same when they are repeated.

    If they are not, func returned other values once, which the complete check would not detect.

    last_agrees: whether the differences of the last step agree with VJPs, and need not be repeated.
    """
    *earlier, last = check.steps
    final = last[2].derivatives
    changing = [
        (step, budget, before)
        for step, budget, before in earlier
        if derivatives_vary(
            check.settings, before.derivatives, final[: len(before.derivatives)], rounding_of_differences(check, step)
        )
    ]
    return steps_repeat(check, changing if last_agrees or not changing else [*changing, last])


def steps_repeat(check: SmallCheck, steps: Sequence[tuple[float, float, Derivatives]]) -> bool:
    """Whether the differences of some steps are the same when they are repeated; notes if they are not."""
    for step, budget, before in steps:
        again = _differences(check, step, budget, before.measures_noise)
        rounding = rounding_of_differences(check, step)
        # The result is None if func now raises or returns outputs of another kind.
        if again is None or any(
            derivatives_vary(check.settings, *pair, rounding)
            for pair in ((again.derivatives, before.derivatives), (again.noise, before.noise))
        ):
            check.irreproducible.append(ALONG_DIRECTION)
            return False
    return True


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
        check.steps.append((step, budget, differences))
        known = None if differences.measures_noise else differences
        count += differences.measures_noise
        weighed = _weight(check, differences, 1.0)
        if weighed is not None and differences.is_complete:
            yield differences, *weighed
            if known is not None:
                continue
        factor = _step_factor(check, differences)
        if factor is None:
            return
        step, budget = factor * differences.step / settings.eps, 0.0


def _noise_is_proportional(check: SmallCheck) -> bool:
    """Whether the noise of the last step hides errors, but is smaller than before in proportion to the step."""
    (*_, before), (*_, last) = check.steps[-2:]
    low, high = (float(last.noise.norm()) * ratio for ratio in PROPORTIONAL)
    falls = last.step < before.step and low <= float(before.noise.norm()) <= high
    return falls and _weight(check, last, 1.0) is None


def noise_repeats(check: SmallCheck) -> bool:
    """Whether noise that no other step reduces enough is that of func; notes if func returned other values once."""
    for step, budget, differences in check.steps[-1:]:
        if _step_factor(check, differences) is None and _noise_varies(check, step, budget, differences):
            check.irreproducible.append(ALONG_DIRECTION)
    return not check.irreproducible


def _step_factor(check: SmallCheck, differences: Derivatives) -> float | None:
    """The factor from a step to one at which the noise, from curvature or rounding, is probably small enough.

    None if neither is the reason for the noise: this may be a kink, or a func that returns other values for the same
    inputs.
    """
    if _weight(check, differences, 1.0) is not None:
        return SMALLER_STEP  # the sums do not agree: another direction may be curved more
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


def rounding_of_differences(check: SmallCheck, step: float) -> float:
    """The error of differences at `step` times eps, if rounding changes the largest output by two unit roundoffs."""
    size = max((largest(output.detach()) for output in check.problem.graph.outputs), default=0.0)
    return 2 * check.problem.unit_roundoff * size / (check.settings.eps * step)


def _noise_varies(check: SmallCheck, step: float, budget: float, differences: Derivatives) -> bool:
    """Like `func_varies`, for differences at a step."""
    return func_varies(
        check.settings,
        rounding_of_differences(check, step),
        differences,
        partial(_differences, check, step, budget, differences.measures_noise),
        is_quiet=lambda again: _weight(check, again, 1.0) is not None,
        values_move=partial(_values_vary, check),
    )


def _values_vary(check: SmallCheck) -> bool:
    before = outputs_of(check)
    return not check.problem.record_again() or values_vary(check.problem, check.settings, outputs_of(check), before)


@phase("backward")
def _early_vjps(check: SmallCheck, plain: ScreeningGradOutputs) -> Tensor:
    """VJPs, shape (1 or 2, n): of a multiple of a dense grad_output and, for custom code, of a one-hot one."""
    check.vjps += len(plain.early_only)
    return check.problem.vjps(plain.early, [Layout.CONTIGUOUS] * len(plain.early_only), plain.early_only)[0]


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
    hidden = settings.atol / weight
    if not bool((hidden <= settings.atol + settings.rtol * differences.derivatives.abs().amax(0)).all()):
        return None
    return weight, float(hidden.amax())


@phase("repeated calls")
def _run_after_differences(check: SmallCheck, plain: ScreeningGradOutputs, early: Tensor) -> Tensor:
    """Runs the early VJPs again, after the differences have called func; returns them.

    If they have changed, this is noted. They run in reverse order, so that a backward that is wrong in every third
    call gives another gradient.
    """
    settings = check.settings
    order = [1, 0]
    known, cotangents = early[order], plain.early[order]
    again = _vjps(check, cotangents, [plain.early_only[row] for row in order])
    allowed = settings.atol + settings.nondet_tol * float(cotangents.abs().sum(1).amax())
    check.vjp_varies = not bool(torch.isclose(again, known, settings.rtol, allowed, equal_nan=True).all())
    return again


@phase("backward")
def _all_vjps(
    check: SmallCheck, made: ScreeningGradOutputs, plain: ScreeningGradOutputs, early: Tensor
) -> Tensor | None:
    """The VJPs of all grad_outputs in `made`, on a newly recorded graph: float64, shape (rows, n).

    None if something is inconsistent: the graph, the size, dtype or layout of a gradient, a repeated VJP, a sum of
    VJPs, or, without custom code, the gradients for zero grad_outputs.
    """
    problem, settings = check.problem, check.settings
    if not problem.record_again():
        check.vjp_varies = True
        return None
    gradients, match = problem.vjps(made.vectors, made.layouts, made.only)
    check.vjps += len(made.only)
    add_products(check, made.vectors[: made.of_all], gradients[: made.of_all])
    if not match.sizes or (settings.check_grad_dtypes and not match.dtypes):
        check.vjp_varies = True
        return None
    if not match.strided:  # without custom code, no zero grad_output runs that would show this
        return None
    unweighted, product = plain.vectors[REPEATED : REPEATED + 1], gradients[REPEATED : REPEATED + 1]
    if made is not plain:
        product = _vjps(check, unweighted)
    again = product * REPEAT_SCALE
    if problem.is_custom:
        again = torch.cat([again, gradients[made.again : made.again + 1]])
    if not _same_as_early(check, plain, again, early):
        add_products(check, unweighted, product)
        return None
    if made.separate:
        parts = gradients[made.separate]
        beyond = (gradients[REPEATED] - parts.sum(0)).abs() - settings.atol - settings.rtol * parts.abs().sum(0)
        if not bool((beyond <= 0).all()):
            check.vjp_varies = bool(beyond.isfinite().all())
            if not check.vjp_varies:  # an overflow recurs; a value that is not finite in one run only is an error
                rows = [REPEATED, *made.separate]
                _repeat(check, made, gradients, rows, run_again=rows)
            return None
    # A backward may be wrong only after several calls on the same graph. This is about the tenth call.
    if (problem.is_custom or not torch.equal(again, early)) and _repeat(
        check, made, gradients, [REPEATED], run_again=[REPEATED]
    ) is None:
        return None
    if not problem.is_custom and not _zeros_are_zero(check):
        return None
    return gradients


def _vjps(check: SmallCheck, cotangents: Tensor, only: Sequence[int] = (-1,)) -> Tensor:
    """VJPs of contiguous cotangents: float64, shape (count, n); only: as in `Problem.vjps_of`."""
    gradients, _ = check.problem.vjps(cotangents, [Layout.CONTIGUOUS] * len(only), only)
    check.vjps += len(only)
    return gradients


def add_products(check: SmallCheck, vectors: Tensor, gradients: Tensor) -> None:
    """Adds cotangents and their VJPs to those whose sum is checked by one later VJP."""
    if check.products is None:
        check.products = vectors, gradients
    else:
        check.products = torch.cat([check.products[0], vectors]), torch.cat([check.products[1], gradients])


@phase("repeated calls")
def earlier_vjps_repeat(check: SmallCheck, last: int) -> bool:
    """Whether VJPs that decided nothing add up to the VJP of the sum of their cotangents.

    last: number of rows at the end that are left out, because they led to a decision.
    """
    settings = check.settings
    assert check.products is not None
    cotangents, gradients = (rows[: rows.shape[0] - last] for rows in check.products)
    if cotangents.shape[0]:
        total = cotangents.sum(0, keepdim=True)
        again = _vjps(check, total)
        allowed = settings.atol + settings.rtol * gradients.abs().amax(0) + allowed_movement(settings, total)
        check.vjp_varies = not bool(near(again, gradients.sum(0), allowed).all())
    return not check.vjp_varies


def _same_as_early(check: SmallCheck, plain: ScreeningGradOutputs, again: Tensor, early: Tensor) -> bool:
    """Whether VJPs equal the early ones of the first graph; notes if they have changed."""
    settings = check.settings
    if torch.equal(again, early):
        return True
    problem, sums = check.problem, plain.early.abs().sum(1).tolist()
    rounding = ROUNDING * problem.unit_roundoff * problem.m**0.5 * largest_finite(early[0])
    if not problem.is_custom and not differ(again, early, max(settings.atol, rounding), False):
        return True  # a built-in backward may round differently at another scale
    # The complete check decides about small differences.
    allowed = max(4 * settings.atol, rounding) + settings.nondet_tol * sums[0]
    if differ(again[:1], early[:1], allowed, False):
        # Repeated at the same scale as the first time.
        check.vjp_varies = differ(_vjps(check, plain.early[:1]), early[:1], allowed, False)
    if problem.is_custom:
        close = torch.isclose(again[1], early[1], settings.rtol, settings.atol + settings.nondet_tol, equal_nan=True)
        check.vjp_varies = check.vjp_varies or not bool(close.all())
    return False


def sum_threshold(settings: Settings, differences: Derivatives) -> float:
    """The largest difference between sums that agree.

    An error of size atol contributes at least atol / 4. If noise was not measured, it must be smaller than the rest.
    """
    return settings.atol / (4 if differences.measures_noise else 8)


def _early_agrees(settings: Settings, differences: Derivatives, plain: ScreeningGradOutputs, early: Tensor) -> bool:
    """Whether sums for the first early VJP agree. If they do not, no other VJPs are needed at this step."""
    vectors, gradients = plain.early[:1], early[:1]
    (residual,) = largest_residuals(vectors, differences.derivatives, gradients, differences.directions)
    return residual <= abs(REPEAT_SCALE) * sum_threshold(settings, differences)


def _agree(
    check: SmallCheck, differences: Derivatives, made: ScreeningGradOutputs, gradients: Tensor, is_weighted: bool
) -> bool:
    norm = differences.sizes[0] if differences.sizes else math.inf
    threshold = sum_threshold(check.settings, differences)
    residuals = largest_residuals(made.vectors, differences.derivatives, gradients, differences.directions)
    allowed = [share * threshold for share in made.shares]
    for row, coordinate in made.one_hot.items():
        allowed[row] += 4 * float(differences.noise[coordinate])
    # An expanded grad_output has no weights.
    expanded, noise = made.expanded, CONSTANT * norm
    is_quiet = residuals[expanded] <= allowed[expanded] + 8 * noise
    allowed[expanded] += (8 if is_weighted else EXPANDED_MARGIN) * noise
    return all(residual <= most for residual, most in zip(residuals, allowed, strict=True)) and (
        is_quiet or _same_if_contiguous(check, made.vectors[expanded], gradients[expanded])
    )


def _same_if_contiguous(check: SmallCheck, vector: Tensor, gradient: Tensor) -> bool:
    """Whether a VJP equals that of a contiguous cotangent with the same values."""
    again = _vjps(check, vector[None])
    allowed = check.settings.atol + check.settings.rtol * gradient.abs()
    same = near(again[0], gradient, allowed + allowed_movement(check.settings, vector))
    if not bool(same.all()):
        add_products(check, vector[None], again)
    return bool(same.all())


def _one_sign_is_linear(check: SmallCheck, made: ScreeningGradOutputs, gradients: Tensor) -> bool:
    """Whether cotangents whose elements all have one sign give VJPs that agree with that of row REPEATED."""
    backward = SmallBackward(check.problem, check.vjps)
    failure = one_sign_failure(backward, check.settings, made.vectors[REPEATED], gradients[REPEATED])
    check.vjps = backward.vjps
    check.vjp_varies = failure is not None and failure.kind == "nondeterministic"
    return failure is None


def _zeros_are_zero(check: SmallCheck) -> bool:
    """Whether zero and undefined grad_outputs give zeros. These run last, because they detect the fewest errors.

    Without custom code, the mostly zero cotangent shows whether zeros give zeros, unless it has only one element.
    """
    problem, undefined = check.problem, check.settings.check_undefined_grad
    zeros, outputs = problem.is_custom or problem.m == 1, len(problem.outputs)
    check.vjps += zeros + ((1 + (outputs if outputs > 1 else 0)) if undefined else 0)
    are_zero = problem.are_zeros_zero(zeros, undefined)
    check.vjp_varies = check.vjp_varies or are_zero is False
    return bool(are_zero)


@phase("repeated calls")
def _same_on_third(check: SmallCheck, made: ScreeningGradOutputs, gradients: Tensor) -> Tensor | None:
    """The gradients if a custom backward gives the same one-hot row and product on a third graph; otherwise None.

    Also None if zero grad_outputs do not give zeros.
    """
    if not first_outputs_repeat(check):
        return None
    if not check.problem.record_again():
        check.vjp_varies = True
        return None
    rounding = _repeat(check, made, gradients, [made.again, REPEATED])
    if rounding is None:
        return None
    what = "product and one-hot row"
    check.certificates.append(repeated_calls_certificate(what, check.vjps, max(check.settings.nondet_tol, rounding)))
    return gradients if _zeros_are_zero(check) else None


def _repeat(
    check: SmallCheck, made: ScreeningGradOutputs, gradients: Tensor, order: list[int], run_again: Sequence[int] = ()
) -> float | None:
    """The largest difference from earlier gradients that counts as rounding; None if gradients differ by more.

    run_again: as in `first_varying`.
    """
    again = SmallBackward(check.problem, check.vjps)

    def tolerance(row: int) -> float:
        return allowed_movement(check.settings, made.vectors[row])

    rows = made.vectors, made.only, gradients.clone()
    moving, rounding = first_varying(again, check.settings, *rows, order, tolerance, run_again)
    check.vjps, check.vjp_varies = again.vjps, moving is not None
    return None if check.vjp_varies else rounding
