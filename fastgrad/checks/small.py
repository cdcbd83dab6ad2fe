"""Small checks, which are set up, run and compared in a few native calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fastgrad.checks.one_block import complete_backward, rows_agree, runs_single_rows
from fastgrad.checks.small_calls import columns_are_vectorized, earlier_vjps_repeat, first_outputs_repeat
from fastgrad.checks.small_result import SmallCheck
from fastgrad.core.errors import as_raised
from fastgrad.core.memory import OUT_OF_MEMORY, lacks_again
from fastgrad.core.native import SmallProblem
from fastgrad.core.phases import stopwatch
from fastgrad.core.precision import RELATIVE_STEP, ROUNDING
from fastgrad.engines.plan import (
    is_one_block,
    sketches,
    small_pattern_pays,
    sums_fit,
    takes_first_look,
    vectorization_pays,
)
from fastgrad.problem.arguments import check_callable
from fastgrad.problem.second_order import Backward
from fastgrad.report.settings import Settings
from fastgrad.verdict.grad_outputs import batched_failure

_Agree = Callable[[SmallCheck], bool]


def small_check(func: Callable[..., Any], arguments: tuple[Any, ...], settings: Settings) -> SmallCheck | None:
    """Runs a small check if func and the settings allow it; otherwise returns None without calling func."""
    if settings.inputs or settings.progress or settings.engine == "compressed":
        return None
    check_callable(func)
    check = _traced(func, arguments, settings)
    if check is None or not check.problem.is_plain:
        return check
    problem = check.problem
    try:
        with stopwatch(check.seconds, problem.n, problem.seconds):
            _run(check)
    except OUT_OF_MEMORY:
        problem.evaluator.restore()
        if not lacks_again(partial(_run_again, func, arguments, settings)):
            raise  # func or backward raised this once
        # As if nothing had run: the complete check needs less memory.
        check = _without_results(check)
        check.notes.append("the calls of a small check ran out of memory")
        return check
    except BaseException as error:
        problem.evaluator.restore()
        raised = as_raised(error)
        if raised is not error:
            raise raised from raised.__cause__
        raise
    # If func changes its inputs only while no graph is recorded, the first graph has saved inputs that changed later.
    return _without_results(check) if problem.evaluator.mutates_inputs else check


def _traced(func: Callable[..., Any], arguments: tuple[Any, ...], settings: Settings) -> SmallCheck | None:
    """A small check after the first evaluation; None without an evaluation if the arguments do not allow one."""
    problem = SmallProblem.trace(func, arguments, RELATIVE_STEP[torch.float64], not isinstance(func, Backward))
    return None if problem is None else SmallCheck(func=func, problem=problem, settings=settings)


def _without_results(check: SmallCheck) -> SmallCheck:
    return SmallCheck(func=check.func, problem=check.problem, settings=check.settings)


def _run(check: SmallCheck) -> None:
    agree = _values_pass(check)
    graph = check.problem.graph if check.problem.is_plain else None
    if graph is not None and max(graph.modified_cotangent, graph.modified_output) >= 0:
        check.vjp_varies = True  # if this does not recur in the complete check, it was the error of one call
    elif agree and check.is_consistent and check.problem.became_custom:
        check.starts_again = True
    elif agree and check.is_consistent:
        check.passes = _other_checks_pass(check)
    if not check.passes:
        complete_backward(check)


def _run_again(func: Callable[..., Any], arguments: tuple[Any, ...], settings: Settings) -> None:
    """Runs a small check from the beginning, only for its exceptions."""
    check = _traced(func, arguments, settings)
    if check is None or not check.problem.is_plain:
        return
    try:
        _run(check)
    finally:
        check.problem.evaluator.restore()


def _values_pass(check: SmallCheck) -> bool:
    """Whether derivatives and differences agree, in sums or entry by entry; if not, the complete check decides."""
    problem, settings = check.problem, check.settings
    if sketches(problem, settings):
        return sums_fit(problem, settings) and _sums_agree(check) and _tangents_agree(check)
    pattern = None
    if small_pattern_pays(problem, 1, 1):
        from fastgrad.checks.small_pattern import entries_agree, guessed_pattern  # here to keep `import fastgrad` fast

        pattern = guessed_pattern(check)
        if pattern is not None and entries_agree(check, pattern):
            return True
    if not check.is_consistent or not is_one_block(problem, settings):
        return False
    takes_look = takes_first_look(problem, settings)
    may_vectorize = not takes_look or vectorization_pays(problem, settings)
    if not (may_vectorize and columns_are_vectorized(check)):
        if takes_look:
            return False
        if check.look is not None and pattern is None:
            from fastgrad.checks.small_pattern import repeat_look  # here to keep `import fastgrad` fast

            repeat_look(check)
    if settings.check_backward_ad and problem.is_custom and not runs_single_rows(problem):
        return False
    agree = (not settings.check_backward_ad or rows_agree(check)) and _tangents_agree(check)
    return agree and (pattern is None or earlier_vjps_repeat(check, 0))


def _sums_agree(check: SmallCheck) -> bool:
    if not check.settings.check_backward_ad:
        return True
    from fastgrad.checks.small_sums import sums_or_rows_agree  # here to keep `import fastgrad` fast

    return sums_or_rows_agree(check)


def _tangents_agree(check: SmallCheck) -> bool:
    if not check.settings.check_forward_ad:
        return True
    # imported here to keep `import fastgrad` fast
    from fastgrad.checks.small_forward import columns_agree, products_or_columns_agree, same_as_reverse

    agree = products_or_columns_agree if sketches(check.problem, check.settings) else columns_agree
    return agree(check) and (not check.settings.check_backward_ad or same_as_reverse(check))


def _other_checks_pass(check: SmallCheck) -> bool:
    """Whether the remaining checks pass: batched derivatives and, if func is a backward, its gradients without a graph.

    The latter are computed for negated grad_outputs and must be the negated gradients. A backward that caches gradients
    by the address or identity of grad_output fails this.
    """
    problem, settings = check.problem, check.settings
    if settings.check_batched_forward_grad:
        from fastgrad.checks.small_forward import batched_tangents_agree  # here to keep `import fastgrad` fast

        if not batched_tangents_agree(check):
            return False
    if settings.check_backward_ad and settings.check_batched_grad:
        check.batched = batched_failure(problem.graph, check.on_graph, settings)
    func = check.func
    if check.batched is not None or not isinstance(func, Backward):
        return check.batched is None
    if func.movement or not first_outputs_repeat(check):
        return False
    negates = partial(problem.negates_unrecorded, func.count, ROUNDING * problem.unit_roundoff)
    if negates():
        return True
    func.forget()
    if not settings.nondet_tol and negates():  # func or its backward returned other values the first time
        check.irreproducible.append("with negated grad_outputs")
    return False
