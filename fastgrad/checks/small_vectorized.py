"""Numerical columns of a small check from one vectorized call of func, tested by single calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fastgrad.checks.small_result import SmallCheck
from fastgrad.checks.small_steps import rounding_of_differences
from fastgrad.core.errors import unless_rejected
from fastgrad.core.native import RandomDirections
from fastgrad.core.phases import phase
from fastgrad.core.random import TRIAL_STREAM, uniform
from fastgrad.core.tensors import largest
from fastgrad.core.torch_private import vectorized_call
from fastgrad.engines import vmapped
from fastgrad.engines.executor import DIRECTIONS, SHARE
from fastgrad.engines.sketch import KINK, derivatives_vary
from fastgrad.problem.first_look import values_vary
from fastgrad.problem.second_order import Backward

EVALUATIONS_PER_DIRECTION = 4
"""Evaluations along one random direction, with Richardson extrapolation."""

SINGLE_COLUMNS = 2
"""Columns that are also computed by single calls. If func gives other values in vectorized calls, and only for steps of
one coordinate, sums along random directions do not show it."""


def vectorized_columns(check: SmallCheck) -> Tensor | None:
    """The numerical Jacobian: float64, shape (n, m); None if columns must be computed one by one.

    This is the case if func cannot be vectorized, or if it does not give the same values in vectorized and in single
    calls. If this happened only once, it is noted.
    """
    problem, settings, look = check.problem, check.settings, check.look
    displacement = (
        look.displacement if look is not None else torch.full((problem.n,), settings.eps, dtype=torch.float64)
    )
    values, is_suitable = _values_next_to_inputs(check, displacement)
    if values is None:
        return None
    is_suitable = is_suitable and (look is None or not values_vary(problem, settings, values, look.values))
    measure = partial(_columns_at_known_outputs, check, displacement, values)
    columns = measure() if is_suitable else None
    if columns is None:
        again = _values_again(check, displacement)
        if again is None or values_vary(problem, settings, again, values):
            check.irreproducible.append("next to the inputs")
        return None
    return columns if _single_calls_agree(check, columns, measure) else None


@phase("trial of columns")
def _values_next_to_inputs(check: SmallCheck, displacement: Tensor) -> tuple[Tensor | None, bool]:
    """The outputs at x + displacement, and whether func may be called with several points.

    The outputs are float64, shape (m,); None if func raises there, or returns something else.
    """
    problem = check.problem
    found: list[Tensor | tuple[int, int, Any]] = []
    points = problem.evaluator.inputs_at(displacement)
    reason = vmapped.obstacle_of(points, lambda: found.append(problem.values_of(points)), check.func)
    if found and not isinstance(found[-1], tuple):
        return found[-1], reason is None
    if found and _values_again(check, displacement) is not None:
        check.irreproducible.append("next to the inputs")
    return None, False


def _values_again(check: SmallCheck, displacement: Tensor) -> Tensor | None:
    """The outputs at x + displacement once more; None if func raises there, or returns something else."""
    with vmapped.as_vectorized():
        found = unless_rejected(partial(check.problem.values_of, check.problem.evaluator.inputs_at(displacement)))
    return None if isinstance(found, tuple) else found


def _columns_at_known_outputs(check: SmallCheck, displacement: Tensor, values: Tensor) -> Tensor | None:
    """Columns from a vectorized call; None if func raises in it, or does not return the known outputs.

    values: the outputs at x + displacement, float64, shape (m,).
    """
    eps, atol = check.settings.eps, check.settings.atol
    measure = partial(_vectorized_call, check, displacement, values)
    first = measure()
    if first is None or _relative(first[1], eps * atol) <= 1:
        return None if first is None else first[0]
    again = measure()
    if again is None or _relative(again[1], eps * atol) <= 1 or _varies(check, first[0], again[0]):
        check.irreproducible.append("in vectorized calls")
    return None


def _single_calls_agree(check: SmallCheck, columns: Tensor, measure: Callable[[], Tensor | None]) -> bool:
    """Whether single calls agree with columns from a vectorized call, which `measure` repeats.

    The vectorized call and the first test that fails are repeated. If the results differ, this is noted.
    """
    # The first direction may suffice, but each reading of results waits for a device: there, all are measured at once.
    at_once = 1 if check.problem.tensor_device.type == "cpu" else DIRECTIONS
    sums = (partial(_error_of_sums, check, range(first, first + at_once)) for first in range(0, DIRECTIONS, at_once))
    for test in (partial(_error_of_single_columns, check), *sums):
        error, measured = test(columns)
        if error <= 1:
            continue
        again = measure()
        if again is None or _varies(check, columns, again):
            check.irreproducible.append("in vectorized calls")
            return False
        error, repeated = test(again)
        if error <= 1 or _varies(check, measured, repeated):
            check.irreproducible.append("in vectorized calls")
        return False
    return True


def _varies(check: SmallCheck, before: Tensor, again: Tensor) -> bool:
    """Whether repeated derivatives, float64, show that func returned other values than at first."""
    if before.shape != again.shape:
        return True  # func raised, or returned something else
    return derivatives_vary(check.settings, again, before, rounding_of_differences(check, 1.0))


@phase("numerical columns")
def _vectorized_call(check: SmallCheck, displacement: Tensor, values: Tensor) -> tuple[Tensor, float] | None:
    """All columns, and the largest error of the known outputs; None if func raises."""
    positions = [position for position, _, _ in check.problem.inputs]
    evaluate = partial(_results, check.func, positions)
    return unless_rejected(
        partial(check.problem.vectorized_columns, evaluate, displacement, values, check.settings.eps)
    )


def _results(func: Callable[..., Any], positions: Sequence[int], arguments: tuple[Any, ...], count: int) -> Any:
    with vmapped.as_vectorized():
        if not isinstance(func, Backward):
            return vectorized_call(func, arguments, positions, count)
        with func.vectorized(count):
            return func(*arguments)


@phase("trial of columns")
def _error_of_sums(check: SmallCheck, which: range, columns: Tensor) -> tuple[float, Tensor]:
    """The error of sums of columns along random directions, relative to the allowed one, as in `executor`.

    Returns the error, and the derivatives by single calls; empty if there are none.
    """
    settings = check.settings
    streams, points = [TRIAL_STREAM + 16 * k for k in which], [EVALUATIONS_PER_DIRECTION] * len(which)
    along = RandomDirections(settings.seed, streams, points, settings.eps, 1.0)
    found = check.unless_changed(partial(check.problem.differences_along, along, KINK), "along random directions")
    if found is None:
        return torch.inf, columns.new_empty(0)
    derivatives = found.derivatives.cpu()
    return _relative(largest(derivatives - found.directions.cpu() @ columns), settings.atol), derivatives


@phase("trial of columns")
def _error_of_single_columns(check: SmallCheck, columns: Tensor) -> tuple[float, Tensor]:
    """Infinite if columns differ from those of single calls, otherwise 1; and the latter, shape (SINGLE_COLUMNS, m).

    The columns of single calls are kept, so that they need not be computed again.
    """
    settings, places = check.settings, _single_columns(check.problem.n, check.settings.seed)
    for column in places:
        measure = partial(check.problem.difference_columns, settings.eps, column, 1)
        found = check.unless_changed(measure, "at steps of one input")
        if found is None:
            return torch.inf, columns.new_empty(0)
        check.single_columns[column] = found
    single = torch.cat([check.single_columns[column] for column in places])
    return 1.0 if largest(columns[[*places]] - single) <= settings.atol else torch.inf, single


@lru_cache(64)
def _single_columns(n: int, seed: int) -> tuple[int, ...]:
    places = uniform(SINGLE_COLUMNS, seed, TRIAL_STREAM + 16 * DIRECTIONS)
    return tuple(min(n - 1, int((place + 1) / 2 * n)) for place in places.tolist())


def _relative(error: float, atol: float) -> float:
    """An error relative to the allowed one, but at least 1, for a component of a direction is at least half a step."""
    allowed = SHARE * atol / 2
    return max(1.0, error / allowed) if math.isfinite(error) else torch.inf
