"""Calls that all small checks make: evaluations, columns and VJPs, and their repeats."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastgrad.checks.small_result import Errors, SmallCheck
from fastgrad.core.phases import phase
from fastgrad.core.tensors import largest, near
from fastgrad.engines.plan import vectorized_columns_pay
from fastgrad.problem.first_look import values_vary
from fastgrad.verdict.repeated_rows import allowed_movement

MAX_VECTORIZED_NUMBERS = 1 << 18
"""Largest number of values, of inputs and outputs, on one side of the differences of a vectorized call: 4 MB for both
sides, about the size of a cache."""


def numerical_columns(check: SmallCheck) -> Tensor | None:
    """Measures the numerical Jacobian: float64, shape (n, m); notes outputs of another kind, and then returns None."""
    return check.columns if check.columns is not None or columns_are_vectorized(check) else single_columns(check)


def columns_are_vectorized(check: SmallCheck) -> bool:
    """Whether vectorized calls measure the numerical Jacobian, which is then kept."""
    if not check.vectorization_failed and _may_be_vectorized(check):
        from fastgrad.checks.small_vectorized import vectorized_columns  # here to keep `import fastgrad` fast

        check.columns = vectorized_columns(check)
    check.vectorization_failed = check.columns is None
    return not check.vectorization_failed


def _may_be_vectorized(check: SmallCheck) -> bool:
    problem, settings = check.problem, check.settings
    if settings.fast_mode:
        return False  # sums along random directions decided nothing, so they would not verify the columns either
    fits = problem.n * (problem.n + 2 * problem.m) <= MAX_VECTORIZED_NUMBERS
    return fits and not check.is_custom and settings.atol > 0 and vectorized_columns_pay(problem)


@phase("numerical columns")
def single_columns(check: SmallCheck) -> Tensor | None:
    """As `numerical_columns`, one call of func at a time, except for columns that are known from such calls."""
    check.vectorization_failed = True
    first, pieces, n = 0, [], check.problem.n
    for column in [*sorted(check.single_columns), n]:
        found = check.problem.difference_columns(check.settings.eps, first, column - first)
        if isinstance(found, tuple):
            check.changed = found
            return None
        pieces += [found, check.single_columns[column]] if column < n else [found]
        first = column + 1
    check.columns = torch.cat(pieces) if check.single_columns else pieces[0]
    return check.columns


def compared_columns(check: SmallCheck, columns: Tensor, compare: Callable[[Tensor], Errors | None]) -> Errors | None:
    """The errors of all entries; None if one is wrong, also if vectorized columns are computed again by single calls.

    compare: gives the errors for numerical columns, float64, shape (n, m); None if an entry is wrong.
    """
    errors = compare(columns)
    if errors is not None or check.vectorization_failed:
        return errors
    again = _columns_one_by_one(check, columns)
    return None if again is None else compare(again)


def _columns_one_by_one(check: SmallCheck, vectorized: Tensor) -> Tensor | None:
    """As `single_columns`, after vectorized columns did not agree with the analytical ones.

    If both kinds of columns differ, this is noted, because the vectorized ones agreed with single calls.
    """
    from fastgrad.engines.sketch import derivatives_vary  # here to keep `import fastgrad` fast

    columns = single_columns(check)
    if columns is not None:
        rounding = 2 * check.problem.unit_roundoff * largest(check.problem.base()) / check.settings.eps
        if derivatives_vary(check.settings, columns, vectorized, rounding):
            check.irreproducible.append("in vectorized calls")
    return columns


def first_outputs_repeat(check: SmallCheck) -> bool:
    """Whether the current graph has the outputs of the first one; only those of a backward are kept.

    The outputs of a graph are not used otherwise: differences are those of other evaluations.
    """
    excused = check.problem.records_differences or check.settings.nondet_tol
    return bool(excused) or outputs_repeat(check, check.problem.base())


def outputs_repeat(check: SmallCheck, before: Tensor) -> bool:
    """Whether the current graph has the outputs of an older one: float64, shape (m,)."""
    outputs = check.problem.outputs_of_graph()
    if torch.equal(outputs, before) or not values_vary(check.problem, check.settings, outputs, before):
        return True
    check.irreproducible.append("at the inputs")
    return False


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
        again = check.on_graph.vjp(total)
        allowed = settings.atol + settings.rtol * gradients.abs().amax(0) + allowed_movement(settings, total)
        check.vjp_varies = not bool(near(again, gradients.sum(0), allowed).all())
    return not check.vjp_varies
