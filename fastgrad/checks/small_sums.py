"""Fast mode of a small check: random sums of entries, with few calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from fastgrad.checks.one_block import rows_agree
from fastgrad.checks.small_calls import add_products, earlier_vjps_repeat, first_outputs_repeat, outputs_repeat
from fastgrad.checks.small_result import SmallCheck
from fastgrad.checks.small_steps import (
    SMALLER_STEP,
    changing_steps_repeat,
    differences_by_step,
    noise_repeats,
    steps_repeat,
    sum_threshold,
)
from fastgrad.core.native import Derivatives, largest_residuals
from fastgrad.core.phases import phase
from fastgrad.core.precision import ROUNDING
from fastgrad.core.tensors import differ, largest_finite, near
from fastgrad.engines.blocks import REPEAT_SCALE
from fastgrad.engines.grad_output_kinds import CONSTANT
from fastgrad.engines.plan import compares_undecided_entries, sketch_size
from fastgrad.engines.sketch import NOISE_SHARE
from fastgrad.engines.small_sketch import REPEATED, ScreeningGradOutputs, screening_grad_outputs, weighted_grad_outputs
from fastgrad.report.settings import Settings
from fastgrad.verdict.linearity import one_sign_failure
from fastgrad.verdict.repeated_calls import first_varying, repeated_calls_certificate
from fastgrad.verdict.repeated_rows import allowed_movement

EXPANDED_MARGIN = 256.0
"""Factor of the noise's 2-norm by which the sum for an expanded grad_output may be off if its VJP is that of a
contiguous one: errors from curvature differ by factors of up to 27 along other directions, and errors of many outputs
may add up, because all components of this grad_output are equal."""

ADDED_MARGIN = 8.0
"""The same for the sum of all outputs' noise."""


def sums_or_rows_agree(check: SmallCheck) -> bool:
    """Compares sums or, if they decide nothing and this takes fewer calls than sums at other steps, all entries.

    Returns whether they agree; if not, the complete check decides. If entries are not compared, differences that
    changed between steps are repeated here, because the complete check does not use them: func may have returned other
    values once.
    """
    if sums_agree(check):
        return True
    if check.undecided_sums is None:
        return False
    problem, outputs = check.problem, check.problem.outputs_of_graph()
    if problem.is_custom or not compares_undecided_entries(problem, check.settings):
        if noise_repeats(check):
            changing_steps_repeat(check, last_agrees=False)
        return False
    if rows_agree(check):
        return _undecided_calls_repeat(check, outputs)
    noise_repeats(check)
    return False


def sums_agree(check: SmallCheck, weighted: bool = True) -> bool:
    """Compares sums of entries along random directions; returns whether they agree.

    A few VJPs run on the graph of the first evaluation, those of a custom backward before and after the differences.
    Then all VJPs run on a new graph, which is recorded after the differences. Outputs whose differences are noisy have
    smaller weights, as far as their tolerances allow.

    weighted: whether sums with weights count.
    """
    problem, settings, plain = check.problem, check.settings, _plain(check)
    on_first_graph = _EarlyVjps(check, plain)
    if problem.is_custom and on_first_graph.run() is None:
        return False
    done: tuple[ScreeningGradOutputs, Tensor] | None = None
    contradicted = 0.0  # the largest step at which sums disagree although differences are not noisy
    for differences, weight, bound in differences_by_step(check):
        if weight.numel() and not weighted:
            norm = differences.sizes[0] if differences.sizes else math.inf
            if norm * SMALLER_STEP**2 > settings.atol / NOISE_SHARE:
                break
            continue
        early = on_first_graph.run_after_differences()
        if early is None:
            return False
        if not weight.numel() and not _early_agrees(settings, differences, plain, early):
            contradicted = max(contradicted, differences.step)
            continue
        made = _grad_outputs(check, weight) if weight.numel() else plain
        if done is None or done[0] is not made:
            gradients = check.noted(partial(_all_vjps, check, made, plain, early))
            if gradients is None:
                return False
            done = made, gradients
        if not _agree(check, differences, *done, weight.numel() > 0):
            contradicted = max(contradicted, differences.step)
        elif differences.step < contradicted:
            break  # rounding inside func may hide changes at the smaller step; the complete check looks for it
        else:
            if not changing_steps_repeat(check, last_agrees=True):
                return False
            if not check.noted(partial(earlier_vjps_repeat, check, made.of_all)):
                return False
            check.bound, check.differences = bound, (differences, weight, bound)
            return not problem.is_custom or _custom_vjps_are_consistent(check, *done)
    on_first_graph.leave_undecided()
    return False


class _EarlyVjps:
    """VJPs on the graph of the first evaluation; those of a custom backward run before and after the differences."""

    def __init__(self, check: SmallCheck, plain: ScreeningGradOutputs) -> None:
        self._check, self._plain = check, plain
        self._gradients: Tensor | None = None
        self._runs_again = check.problem.is_custom

    def run(self) -> Tensor | None:
        """The gradients, shape (1 or 2, n); computed once. None if backward raises, which is noted."""
        if self._gradients is None:
            self._gradients = self._check.noted(partial(_early_vjps, self._check, self._plain))
        return self._gradients

    def run_after_differences(self) -> Tensor | None:
        """The same gradients; None also if those of a custom backward have changed since they ran before."""
        if self._gradients is None or not self._runs_again:
            return self.run()
        self._runs_again = False
        return self._gradients if self._check.noted(partial(self._repeat, self._gradients)) else None

    @phase("repeated calls")
    def _repeat(self, gradients: Tensor) -> bool:
        """Whether the VJPs are the same after the differences have called func; notes if they are not.

        They run in reverse order, so that a backward that is wrong in every third call gives another gradient.
        """
        check, settings, order = self._check, self._check.settings, [1, 0]
        known, cotangents = gradients[order], self._plain.early[order]
        again, _ = check.on_graph.vjps_of(cotangents, [self._plain.early_only[row] for row in order])
        allowed = settings.atol + settings.nondet_tol * float(cotangents.abs().sum(1).amax())
        check.vjp_varies = not bool(torch.isclose(again, known, settings.rtol, allowed, equal_nan=True).all())
        return not check.vjp_varies

    def leave_undecided(self) -> None:
        """Keeps the gradients for comparisons with later calls, because the sums did not agree at any step."""
        check, early = self._check, self.run()
        if early is None:
            return
        if check.steps and check.is_consistent:
            check.undecided_sums = early
        if check.products is None:
            check.products = self._plain.early, early


def _layout(check: SmallCheck) -> tuple[tuple[int, int, int], ...]:
    """For each output: its first coordinate, the number of coordinates per element, and the number of elements."""
    outputs = check.problem.outputs
    starts = accumulate((elements * width for _, elements, width in outputs), initial=0)
    return tuple((first, width, elements) for first, (_, elements, width) in zip(starts, outputs, strict=False))


def _grad_outputs(check: SmallCheck, weight: Tensor) -> ScreeningGradOutputs:
    """The grad_outputs for weights from `differences_by_step`."""
    problem, settings = check.problem, check.settings
    arguments = _layout(check), settings.seed, sketch_size(settings.confidence), problem.is_custom
    return weighted_grad_outputs(*arguments, weight) if weight.numel() else screening_grad_outputs(*arguments)


def _plain(check: SmallCheck) -> ScreeningGradOutputs:
    return _grad_outputs(check, torch.empty(0))


def _undecided_calls_repeat(check: SmallCheck, outputs: Tensor) -> bool:
    """Whether the calls of undecided sums give the same results again. They are repeated after all entries agreed.

    outputs: those of the graph on which the sums depend. The entries have been compared on a later graph.
    """
    assert check.undecided_sums is not None
    if not steps_repeat(check, check.steps) or not outputs_repeat(check, outputs):
        return False
    plain = _plain(check)
    repeated = check.noted(partial(_early_vjps, check, plain))
    return repeated is not None and _same_as_early(check, plain, repeated, check.undecided_sums)


@phase("backward")
def _early_vjps(check: SmallCheck, plain: ScreeningGradOutputs) -> Tensor:
    """VJPs, shape (1 or 2, n): of a multiple of a dense grad_output and, for custom code, of a one-hot one."""
    return check.on_graph.vjps_of(plain.early, plain.early_only)[0]


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
    gradients, match = check.on_graph.vjps_of(made.vectors, made.only, made.layouts)
    add_products(check, made.vectors[: made.of_all], gradients[: made.of_all])
    if not match.sizes or (settings.check_grad_dtypes and not match.dtypes):
        check.vjp_varies = True
        return None
    if not match.strided:  # without custom code, no zero grad_output runs that would show this
        return None
    unweighted, product = plain.vectors[REPEATED : REPEATED + 1], gradients[REPEATED : REPEATED + 1]
    if made is not plain:
        product = check.on_graph.vjp(unweighted)
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
        check.vjp_varies = differ(check.on_graph.vjp(plain.early[:1]), early[:1], allowed, False)
    if problem.is_custom:
        close = torch.isclose(again[1], early[1], settings.rtol, settings.atol + settings.nondet_tol, equal_nan=True)
        check.vjp_varies = check.vjp_varies or not bool(close.all())
    return False


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
    least = allowed[expanded]
    allowed[expanded] += ADDED_MARGIN * noise
    is_quiet = residuals[expanded] <= allowed[expanded]
    if not is_quiet:
        added = ADDED_MARGIN * CONSTANT * float(differences.noise.sum())
        allowed[expanded] = least + (added if is_weighted else max(added, EXPANDED_MARGIN * noise))
    return all(residual <= most for residual, most in zip(residuals, allowed, strict=True)) and (
        is_quiet or _same_if_contiguous(check, made.vectors[expanded], gradients[expanded])
    )


def _same_if_contiguous(check: SmallCheck, vector: Tensor, gradient: Tensor) -> bool:
    """Whether a VJP equals that of a contiguous cotangent with the same values."""
    again = check.on_graph.vjp(vector[None])
    allowed = check.settings.atol + check.settings.rtol * gradient.abs()
    same = near(again[0], gradient, allowed + allowed_movement(check.settings, vector))
    if not bool(same.all()):
        add_products(check, vector[None], again)
    return bool(same.all())


def _one_sign_is_linear(check: SmallCheck, made: ScreeningGradOutputs, gradients: Tensor) -> bool:
    """Whether cotangents whose elements all have one sign give VJPs that agree with that of row REPEATED."""
    failure = one_sign_failure(check.on_graph, check.settings, made.vectors[REPEATED], gradients[REPEATED])
    check.vjp_varies = failure is not None and failure.kind == "nondeterministic"
    return failure is None


def _zeros_are_zero(check: SmallCheck) -> bool:
    """Whether zero and undefined grad_outputs give zeros. These run last, because they detect the fewest errors.

    Without custom code, the mostly zero cotangent shows whether zeros give zeros, unless it has only one element.
    """
    problem, undefined = check.problem, check.settings.check_undefined_grad
    zeros, outputs = problem.is_custom or problem.m == 1, len(problem.outputs)
    check.on_graph.vjps += zeros + ((1 + (outputs if outputs > 1 else 0)) if undefined else 0)
    are_zero = problem.are_zeros_zero(zeros, undefined)
    check.vjp_varies = check.vjp_varies or are_zero is False
    return bool(are_zero)


def _custom_vjps_are_consistent(check: SmallCheck, made: ScreeningGradOutputs, gradients: Tensor) -> bool:
    """Whether VJPs of a third graph, and of grad_outputs of one sign, follow from those that agreed."""
    tests = _same_on_third, _one_sign_is_linear
    return all(check.noted(partial(test, check, made, gradients)) for test in tests)


@phase("repeated calls")
def _same_on_third(check: SmallCheck, made: ScreeningGradOutputs, gradients: Tensor) -> bool:
    """Whether a custom backward gives the same one-hot row and product on a third graph, and zeros for zeros."""
    if not first_outputs_repeat(check):
        return False
    if not check.problem.record_again():
        check.vjp_varies = True
        return False
    rounding = _repeat(check, made, gradients, [made.again, REPEATED])
    if rounding is None:
        return False
    what = "dense VJP and one-hot row"
    tolerance = max(check.settings.nondet_tol, rounding)
    check.certificates.append(repeated_calls_certificate(what, check.on_graph.vjps, tolerance))
    return _zeros_are_zero(check)


def _repeat(
    check: SmallCheck, made: ScreeningGradOutputs, gradients: Tensor, order: list[int], run_again: Sequence[int] = ()
) -> float | None:
    """The largest difference from earlier gradients that counts as rounding; None if gradients differ by more.

    run_again: as in `first_varying`.
    """

    def tolerance(row: int) -> float:
        return allowed_movement(check.settings, made.vectors[row])

    rows = made.vectors, made.only, gradients.clone()
    moving, rounding = first_varying(check.on_graph, check.settings, *rows, order, tolerance, run_again)
    check.vjp_varies = moving is not None
    return None if check.vjp_varies else rounding
