"""Small checks: set up, run and compared in a few native calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fastgrad.checks.one_block import (
    jacobian,
    product_at_hand,
    runs_single_rows,
    same_afterwards,
    whole_backward,
)
from fastgrad.core.errors import as_raised, raise_if_transient, raise_unless_of_func
from fastgrad.core.memory import OUT_OF_MEMORY
from fastgrad.core.native import (
    Derivatives,
    GradientsMatch,
    RandomDirections,
    SmallProblem,
    WholeBackward,
    largest_residuals,
)
from fastgrad.core.phases import TIMED_COLUMNS, TIMED_SECONDS, Stopwatch, phase
from fastgrad.core.precision import ROUNDING, relative_step
from fastgrad.core.random import SKETCH_DIRECTIONS
from fastgrad.engines.blocks import EXPANDED_VALUE, MOST_AT_ONCE, REPEAT_SCALE
from fastgrad.engines.plan import EXACT_CALLS, is_one_block, looks_first, sketch_size, sketches
from fastgrad.engines.sketch import EXTRAPOLATED, KINK, NOISE_SHARE
from fastgrad.engines.small_sketch import REPEATED, ScreeningGradOutputs, screening_grad_outputs
from fastgrad.problem.arguments import refuse_function_class
from fastgrad.problem.small_backward import SmallBackward
from fastgrad.report.data import Certificate, Pair, Part, Settings
from fastgrad.verdict.grad_outputs import BATCH, BatchedDifference, batched_difference
from fastgrad.verdict.repeated_calls import RepeatedCalls, first_moving, repeated_calls_certificate

RELATIVE_STEP = relative_step(torch.float64)

SMALLER_STEP = 1 / 8
"""Step of the second comparison of sums, relative to eps. Errors by curvature are proportional to its square, so they
are 64 times smaller. Rounding of values up to about 100 is still within the threshold."""


LARGER_STEP = 256
"""Of the third look: rounding is as much smaller, and extrapolation keeps the error by curvature, which goes with the
fourth power of the step, below 1e-12 where the derivatives of func are of the size of its values."""


@dataclass(slots=True)
class SmallCheck:
    """The results of a small check: for its report if it passes, otherwise for the complete check to start from.

    Attributes
    ----------
    problem
        func, its first evaluation and its graph.
    backward
        All VJPs; None where there are none yet.
    raised
        What backward raised.
    columns
        The numerical Jacobian: float64, shape (n, m); or where and what func returned in place of its outputs.
    moved
        Whether a VJP was seen that does not fit the others, or has another size or dtype: the complete check names the
        fault, or it was one of some calls only.
    batched
        Where batched gradients differ.
    errors
        By output and part, and by input, the largest absolute and relative error; None where something is to be judged.
    products
        Where sums were compared, grad_outputs and their VJPs: float64, shapes (rows, m) and (rows, n).
    multiple
        A multiple of one of them, and of its VJP: float64, shapes (1, m) and (1, n).
    certificates
        What repeated calls of a custom backward vouch for.
    vjps
        Calls of backward.
    seconds
        By phase, beside the first evaluation; of the quickest checks they are not measured.
    passes
        Whether nothing is left to be judged.
    """

    problem: SmallProblem
    backward: WholeBackward | None = None
    raised: Exception | None = None
    columns: Tensor | tuple[int, int, Any] | None = None
    moved: bool = False
    batched: BatchedDifference | None = None
    errors: list[list[tuple[float, float]]] | None = None
    products: tuple[Tensor, Tensor] | None = None
    multiple: tuple[Tensor, Tensor] | None = None
    certificates: list[Certificate] = field(default_factory=list)
    vjps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    passes: bool = False

    @property
    def is_judged(self) -> bool:
        """Whether something was seen that is an error of func or of its backward, whatever else agrees."""
        return self.raised is not None or self.moved or isinstance(self.columns, tuple)

    def pairs(self) -> list[Pair]:
        """What was compared, where all entries agree; nothing where sums were."""
        if self.errors is None:
            return []
        outputs = list(enumerate(self.problem.outputs))
        parts: list[tuple[int, int, int, Part]] = [
            (number, position, elements, "imaginary" if width == 2 else "all")
            for number, (position, elements, width) in outputs
        ]
        parts += [(number, position, elements, "real") for number, (position, elements, width) in outputs if width == 2]
        return [
            Pair(number, k, position, of_input, part, "reverse", elements * size, 0, True, *largest, False)
            for (number, position, elements, part), errors in zip(parts, self.errors, strict=True)
            for k, ((of_input, size, _), largest) in enumerate(zip(self.problem.inputs, errors, strict=True))
        ]


def small_check(
    func: Callable[..., Any], arguments: tuple[Any, ...], settings: Settings, is_backward: bool
) -> SmallCheck | None:
    """Runs a small check if func and the settings allow it; otherwise returns None without calling func.

    is_backward: whether func is the backward of a function; if so, its gradients with and without a graph are compared.
    """
    if (
        not settings.check_backward_ad
        or settings.check_forward_ad
        or settings.inputs
        or settings.progress
        or settings.engine == "compressed"
        or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    ):
        return None
    refuse_function_class(func)
    problem = SmallProblem.trace(func, arguments, RELATIVE_STEP, not is_backward)
    if problem is None:
        return None
    check = SmallCheck(problem)
    if not problem.is_plain:
        return check
    worth_it = problem.n >= TIMED_COLUMNS or problem.seconds >= TIMED_SECONDS
    try:
        with Stopwatch(check.seconds) if worth_it else nullcontext():
            if _values_pass(check, settings):
                check.passes = _attributes_pass(check, settings, is_backward)
    except OUT_OF_MEMORY:
        return SmallCheck(problem)  # the complete check asks for less
    except BaseException as error:
        problem.evaluator.restore()
        raised = as_raised(error)
        if raised is not error:
            raise raised from raised.__cause__
        raise
    return check


def _values_pass(check: SmallCheck, settings: Settings) -> bool:
    """Whether gradients and differences agree, in sums or entry by entry, and nothing is left to judge."""
    problem = check.problem
    if sketches(problem, settings):
        if problem.n + problem.m > MOST_AT_ONCE:
            return False
        if _sketch(check, settings):
            return _same_afterwards(check, settings)
        # Entry by entry, few calls decide what sums leave open.
        few = settings.engine == "auto" and 2 * problem.n + problem.m <= EXACT_CALLS
        return few and not problem.is_custom and not check.is_judged and _exact(check, settings)
    if not is_one_block(problem, settings) or looks_first(problem, settings):
        return False
    if problem.is_custom and not runs_single_rows(problem):
        return False
    return _exact(check, settings) and _same_afterwards(check, settings)


def _attributes_pass(check: SmallCheck, settings: Settings, is_backward: bool) -> bool:
    """Whether batched gradients agree and, if func is a backward, its gradients are the same without a graph."""
    problem = check.problem
    if settings.check_batched_grad:
        check.batched = batched_difference(problem.graph, problem.graph.outputs, settings)
        check.vjps += (BATCH + 1) * len(problem.outputs)
    return check.batched is None and not (is_backward and not problem.is_same_unrecorded())


def _exact(check: SmallCheck, settings: Settings) -> bool:
    """Compares all entries; whether nothing is left to be judged."""
    problem = check.problem
    try:
        check.backward = _backward(problem, settings)
    except Exception as error:
        raise_unless_of_func(error)
        check.raised = error
        return False
    check.vjps += check.backward.vjps
    check.columns = _columns(problem, settings)
    if not isinstance(check.columns, tuple):
        check.errors = _errors(problem, settings, check.backward, check.columns)
    return check.errors is not None


@phase("repeated calls")
def _same_afterwards(check: SmallCheck, settings: Settings) -> bool:
    """Whether gradients are the same on a graph that is recorded after the differences."""
    problem, backward = check.problem, check.backward
    try:
        if backward is not None and problem.is_custom:
            return problem.record_again() and _rows_repeat(check, settings, backward)
        if backward is not None:
            at_hand = product_at_hand(problem, settings, backward)
        else:
            assert check.multiple is not None
            at_hand = (*check.multiple, 0)
        check.vjps += 1
        if problem.repeats(*at_hand):
            return True
        # Some bits differ. If the gradients agree within the tolerances on another graph, the complete check uses them.
        if problem.record_again() and not same_afterwards(SmallBackward(problem, check.vjps), settings, *at_hand):
            check.moved, check.backward = True, None
    except Exception as error:
        raise_unless_of_func(error)
        check.raised = error
    return False


def _rows_repeat(check: SmallCheck, settings: Settings, backward: WholeBackward) -> bool:
    again = SmallBackward(check.problem, check.vjps)
    calls = RepeatedCalls(again, settings)
    calls.take(jacobian(again, backward), backward.products)
    check.moved = calls.failure() is not None
    check.vjps = again.vjps
    check.certificates += calls.certificates()
    return not check.moved


@phase("repeated calls")
def _products_repeat(check: SmallCheck, settings: Settings, made: ScreeningGradOutputs, gradients: Tensor) -> bool:
    """Whether a custom backward repeats a product on the first graph, and that and one-hot rows on the second."""

    def moves(order: list[int]) -> bool:
        again = SmallBackward(check.problem, check.vjps)
        moving = first_moving(
            again,
            settings,
            made.vectors,
            made.only,
            gradients,
            order,
            lambda row: settings.nondet_tol * float(made.vectors[row].abs().sum()),
        )
        check.vjps, check.moved = again.vjps, moving is not None
        return check.moved

    if moves([REPEATED]) or not check.problem.record_again() or moves([*made.one_hot, REPEATED]):
        return False
    what = "a dense and a one-hot grad_output of each output"
    check.certificates.append(repeated_calls_certificate(what, check.vjps, settings.nondet_tol))
    return True


@phase("backward")
def _backward(problem: SmallProblem, settings: Settings) -> WholeBackward:
    return whole_backward(problem, settings, problem.seconds)


@phase("numerical columns")
def _columns(problem: SmallProblem, settings: Settings) -> Tensor | tuple[int, int, Any]:
    return problem.difference_columns(settings.eps)


@phase("comparison")
def _errors(
    problem: SmallProblem, settings: Settings, backward: WholeBackward, columns: Tensor
) -> list[list[tuple[float, float]]] | None:
    return problem.errors(backward, columns, settings.atol, settings.rtol, settings.check_grad_dtypes)


def _sketch(check: SmallCheck, settings: Settings) -> bool:
    """Compares sums of entries along random directions; returns whether nothing is left to judge.

    VJPs run first, on the graph of the first evaluation, so the noise of the differences is not known yet, and the
    cotangents have no weights. If the differences are too noisy for that, the complete check uses other cotangents.
    """
    problem = check.problem
    count = sketch_size(settings.confidence)
    starts = accumulate((elements * width for _, elements, width in problem.outputs), initial=0)
    layout = tuple(
        (first, width, elements) for first, (_, elements, width) in zip(starts, problem.outputs, strict=False)
    )
    made = screening_grad_outputs(layout, settings.seed, count, problem.is_custom)
    try:
        gradients, match = _vjps(check, settings, made)
        check.products = made.vectors[: made.of_all], gradients[: made.of_all]
        check.multiple = made.multiple, gradients[REPEATED : REPEATED + 1] * REPEAT_SCALE
        if not match.sizes or (settings.check_grad_dtypes and not match.dtypes):
            check.moved = True
            return False
        if not _repeats(check, settings, made, gradients):
            return False
        if problem.is_custom and not _products_repeat(check, settings, made, gradients):
            return False
        if not _zeros(check, settings):
            check.moved = True
            return False
    except Exception as error:
        raise_unless_of_func(error)
        check.raised = error
        return False
    # One-sided differences may be wrong if curvature depends on the direction, and central ones if derivatives of
    # higher order are large. So the second comparison takes a smaller step, and only central differences.
    return any(
        not check.is_judged and _sums_agree(check, settings, made, gradients, look)
        for look in (_first_look, _smaller_step, _larger_step)
    )


@phase("backward")
def _vjps(check: SmallCheck, settings: Settings, made: ScreeningGradOutputs) -> tuple[Tensor, GradientsMatch]:
    problem = check.problem
    found = problem.vjps(made.vectors, made.layouts, made.only)
    check.vjps += len(made.only)
    return found


@phase("backward")
def _zeros(check: SmallCheck, settings: Settings) -> bool:
    """Whether zero and undefined grad_outputs give zeros: run last, as a wrong factor does not show in them."""
    outputs = len(check.problem.outputs)
    undefined = (1 + (outputs if outputs > 1 else 0)) if settings.check_undefined_grad else 0
    check.vjps += 1 + undefined
    return check.problem.are_zeros_zero(settings.check_undefined_grad)


def _repeats(check: SmallCheck, settings: Settings, made: ScreeningGradOutputs, gradients: Tensor) -> bool:
    """Whether multiples of a grad_output give multiples, and one of all outputs what those of each add up to."""
    gradient = gradients[REPEATED]
    # What custom code rounds in its own way is left to the complete check.
    if any(not torch.equal(gradients[row], gradient * REPEAT_SCALE) for row in made.again):
        return False
    if not made.separate:
        return True
    parts = gradients[made.separate]
    beyond = (gradient - parts.sum(0)).abs() - settings.atol - settings.rtol * parts.abs().sum(0)
    check.moved = bool((beyond > 0).any()) and bool(beyond.isfinite().all())
    return bool((beyond <= 0).all())


def _sums_agree(
    check: SmallCheck,
    settings: Settings,
    made: ScreeningGradOutputs,
    gradients: Tensor,
    look: Callable[[SmallProblem, Settings], Derivatives | tuple[int, int, Any]],
) -> bool:
    """Whether sums of analytical entries are what differences give."""
    try:
        differences = look(check.problem, settings)
    except Exception as error:
        raise_if_transient(error, partial(look, check.problem, settings))
        return False  # the complete check decides what that means
    if isinstance(differences, tuple):
        check.columns = differences
        return False
    norm, largest = differences.sizes or (math.inf, math.inf)
    rounding = ROUNDING * check.problem.unit_roundoff * largest * check.problem.m**0.5
    if not (norm <= settings.atol / NOISE_SHARE and rounding <= settings.atol / (4 * NOISE_SHARE)):
        return False
    residuals = largest_residuals(made.vectors, differences.derivatives, gradients, differences.directions)
    allowed = [share * settings.atol / 4 for share in made.shares]
    allowed[made.expanded] += 8 * EXPANDED_VALUE * norm
    return all(residual <= most for residual, most in zip(residuals, allowed, strict=True))


@phase("directional differences")
def _first_look(problem: SmallProblem, settings: Settings) -> Derivatives | tuple[int, int, Any]:
    """Derivatives from the fewest evaluations."""
    return problem.screening_derivatives(_along(settings, 1.0, []), KINK, settings.atol / (2 * NOISE_SHARE))


@phase("directional differences")
def _smaller_step(problem: SmallProblem, settings: Settings) -> Derivatives | tuple[int, int, Any]:
    """Central differences with a smaller step: they are less off beside kinks and where there is much curvature."""
    return problem.screening_derivatives(_along(settings, SMALLER_STEP, []), KINK, 0.0)


@phase("directional differences")
def _larger_step(problem: SmallProblem, settings: Settings) -> Derivatives | tuple[int, int, Any]:
    """Extrapolated differences with a larger step: they are less off where rounding is large beside the tolerance."""
    count = sketch_size(settings.confidence)
    return problem.differences_along(_along(settings, LARGER_STEP, [EXTRAPOLATED] * count), KINK)


def _along(settings: Settings, step: float, points: list[int]) -> RandomDirections:
    """The random directions; step: relative to eps."""
    streams = [SKETCH_DIRECTIONS + 16 * k for k in range(sketch_size(settings.confidence))]
    return RandomDirections(settings.seed, streams, points, settings.eps * step, min(1.0, step))
