"""Exact mode of a small check: all entries, compared row by row."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fastgrad.checks.one_block import jacobian, product_at_hand, same_afterwards, whole_backward
from fastgrad.checks.small_calls import compared_columns, numerical_columns, outputs_repeat
from fastgrad.checks.small_result import Errors, SmallCheck
from fastgrad.core.native import SmallProblem, WholeBackward
from fastgrad.core.phases import phase
from fastgrad.report.settings import Settings
from fastgrad.verdict.repeated_calls import RepeatedCalls


def rows_agree(check: SmallCheck) -> bool:
    """Compares all entries by reverse mode; returns whether they agree, so that no complete check is needed.

    Without custom code, the VJPs run on the first graph after the differences have called func, as in torch's checker.
    """
    problem, outputs = check.problem, check.problem.outputs_of_graph()
    columns = None if problem.is_custom else numerical_columns(check)
    check.backward = check.noted(partial(whole_backward, problem, check.settings, problem.working_seconds))
    if check.backward is None:
        return False
    check.on_graph.vjps += check.backward.vjps
    if problem.is_custom:
        columns = numerical_columns(check)
    if columns is not None:
        check.errors = compared_columns(check, columns, partial(_errors, problem, check.settings, check.backward))
    if check.errors is None or not check.noted(partial(_same_afterwards, check)):
        return False
    return outputs_repeat(check, outputs)


@phase("repeated calls")
def _same_afterwards(check: SmallCheck) -> bool:
    """Whether gradients are the same on a graph recorded after the differences; for custom code, also on the first."""
    problem, backward = check.problem, check.backward
    assert backward is not None
    if problem.is_custom:
        return _rows_repeat(check, backward)
    if not problem.record_again():
        check.vjp_varies = True
        return False
    at_hand = product_at_hand(problem, check.settings, backward)
    check.on_graph.vjps += 1
    if problem.repeats(*at_hand):
        return True
    # Some bits differ. If the gradients agree within the tolerances, the complete check uses them.
    if not same_afterwards(check.on_graph, check.settings, *at_hand):
        check.vjp_varies, check.backward = True, None
    return False


def _rows_repeat(check: SmallCheck, backward: WholeBackward) -> bool:
    calls = RepeatedCalls(check.on_graph, check.settings)
    calls.take(jacobian(check.on_graph, backward), backward.products)
    # The differences have called func since the first graph was recorded.
    moves_there = calls.older_graph_failure() is not None
    check.vjp_varies = moves_there or not check.problem.record_again() or calls.failure() is not None
    check.certificates += calls.certificates()
    return not check.vjp_varies


@phase("comparison")
def _errors(problem: SmallProblem, settings: Settings, backward: WholeBackward, columns: Tensor) -> Errors | None:
    return problem.errors(backward, columns, settings.atol, settings.rtol, settings.check_grad_dtypes)
