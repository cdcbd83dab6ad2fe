"""Small problems: all VJPs are run in one call, on the current graph, and all entries are compared at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from fastgrad.checks.small_calls import compared_columns, numerical_columns, outputs_repeat
from fastgrad.checks.small_result import Errors, SmallCheck, compared_pairs
from fastgrad.core.native import Rows, SmallProblem, WholeBackward, largest_errors
from fastgrad.core.phases import phase
from fastgrad.core.precision import ROUNDING
from fastgrad.engines.blocks import REPEAT_SCALE, REPEATED_ROWS, row_parts
from fastgrad.engines.grad_output_kinds import GRAD_OUTPUT_KINDS, HALVED
from fastgrad.engines.plan import is_one_block, most_vectorized_rows
from fastgrad.problem.problem import Problem
from fastgrad.problem.small_backward import SmallBackward
from fastgrad.report.settings import Settings
from fastgrad.verdict.comparison import Findings
from fastgrad.verdict.linearity import linear_backward, linearity_cotangents
from fastgrad.verdict.repeated_calls import RepeatedCalls
from fastgrad.verdict.repeated_rows import graphs_agree

MIN_VECTORIZED, MIN_VECTORIZED_ON_DEVICES = 12, 6
"""Least number of rows for which one vectorized VJP takes less time than single VJPs: on the CPU, and on other devices.
On the CPU, single VJPs call the nodes of a small graph directly. There, the number is between 12 (for five nodes) and
more than 60 (for one node), as measured with sin, softmax, layer norm and a chain of five operators."""

SHARED_SECONDS = 0.1
"""Least seconds of evaluations, one per row, for which ranks share the rows of a small problem. If they take less,
rank 0 runs all rows in one call."""


def is_small(problem: Problem, settings: Settings) -> bool:
    """Whether all of backward can be run at once, before the differences, and compared with them at once."""
    return (
        problem.has_graph
        and settings.check_backward_ad
        and not settings.check_forward_ad
        and all(block.tensor.layout is torch.strided for block in problem.inputs)
        and is_one_block(problem, settings)
        and (problem.ranks == 1 or problem.seconds * problem.m < SHARED_SECONDS)
    )


@lru_cache(16)
def _cotangents(m: int, seed: int, device: torch.device) -> Tensor:
    # A single row needs no further test: it is repeated at another scale.
    return linearity_cotangents(m, seed, device, GRAD_OUTPUT_KINDS if m > 1 else ())


def _products(problem: Problem | SmallProblem, settings: Settings) -> tuple[Tensor, Sequence[int]]:
    """The cotangents of the products, shape (count, m), and the layout of each."""
    layouts = [kind.layout for kind in GRAD_OUTPUT_KINDS] if problem.m > 1 else ()
    return _cotangents(problem.m, settings.seed, problem.device), layouts


@phase("backward")
def whole_backward(problem: Problem | SmallProblem, settings: Settings, seconds: float) -> WholeBackward:
    """All VJPs of a check of a small problem, vectorized if possible; seconds: the time of one evaluation.

    In a small check without custom code, one product is repeated later, on another graph; no other VJP is repeated.
    """
    m, fewest = problem.m, _fewest_vectorized(problem)
    vectorized = fewest <= m <= most_vectorized_rows(problem, seconds)
    return problem.whole_backward(
        *_products(problem, settings),
        0 if vectorized else REPEATED_ROWS,  # the products of vectors detect rows that vary or are not homogeneous
        REPEAT_SCALE,
        settings.check_undefined_grad,
        fewest if vectorized else 0,
        settings.atol,
        ROUNDING * problem.unit_roundoff * m**0.5 if m > 1 else 0.0,
    )


def _fewest_vectorized(problem: Problem | SmallProblem) -> int:
    device = problem.tensor_device if isinstance(problem, SmallProblem) else problem.device
    return MIN_VECTORIZED if device.type == "cpu" else MIN_VECTORIZED_ON_DEVICES


def runs_single_rows(problem: Problem | SmallProblem) -> bool:
    """Whether `whole_backward` runs each row separately."""
    return problem.m < _fewest_vectorized(problem)


def take_calls(problem: Problem, backward: WholeBackward, calls: RepeatedCalls) -> None:
    """Passes VJPs of a whole backward to `calls`, to be repeated later.

    If rows were vectorized, or are not consistent with the products, runs the first VJPs of `calls` now instead.
    """
    if runs_single_rows(problem) and backward.add_up and not backward.movement:
        calls.take(jacobian(problem, backward), backward.products)
    else:
        calls.run_first()


@lru_cache(16)
def _single_one(device: torch.device) -> Tensor:
    return torch.ones(1, 1, dtype=torch.float64, device=device)


def product_at_hand(
    problem: Problem | SmallProblem, settings: Settings, backward: WholeBackward
) -> tuple[Tensor, Tensor, int]:
    """VJPs that are known: cotangents and VJPs, shapes (count, m) and (count, n), and the number of a VJP to repeat.

    The cotangent of this VJP is contiguous.
    """
    cotangents = _cotangents(problem.m, settings.seed, problem.device)
    if problem.m > 1:
        return cotangents, backward.products, GRAD_OUTPUT_KINDS.index(HALVED)
    only = next(part.rows for part in backward.parts if part.rows.shape[0])
    return _single_one(problem.device), only, 0


def same_afterwards(
    problem: Problem | SmallBackward, settings: Settings, cotangents: Tensor, gradients: Tensor, row: int
) -> bool:
    """Whether a graph that is recorded after other evaluations gives the same gradient as the first graph.

    torch's checker also records its graph after other evaluations. This detects state that func keeps between calls.

    cotangents, gradients, row: several VJPs and the number of the one to repeat, as from `product_at_hand`.
    """
    _, other = problem.first_other_vjp(cotangents[row][None], [-1], [0], gradients[row][None])
    return other is None or graphs_agree(problem, settings, other, gradients[row][None], cotangents[row])


def same_on_first_graph(problem: Problem, settings: Settings, cotangents: Tensor, gradients: Tensor, row: int) -> bool:
    """Whether the first graph still gives the same gradient; arguments: as in `same_afterwards`.

    torch's checker also runs backward on its first graph after other evaluations, which may overwrite what this graph
    saved.
    """
    again = problem.vjp_of_first_graph(cotangents[row][None])
    return graphs_agree(problem, settings, again, gradients[row][None], cotangents[row])


def single_rows(backward: WholeBackward) -> Sequence[Rows]:
    """The rows, if they were run as in the dense engine; otherwise empty.

    Vectorized rows are left out, because vectorization may be the cause of a failure. Rows are also left out if
    vectorization was planned but not possible, because none of them was run twice.
    """
    usual = all(part.repeated.shape[0] == min(part.rows.shape[0], REPEATED_ROWS) for part in backward.parts)
    return backward.parts if usual else ()


def jacobian(problem: Problem | SmallBackward, backward: WholeBackward) -> Tensor:
    """All rows of a backward: float64, shape (m, n)."""
    rows = torch.empty(problem.m, problem.n, dtype=torch.float64, device=problem.device)
    for (output, part), found in zip(row_parts(problem.outputs), backward.parts, strict=True):
        rows[output.slice][int(part == "imaginary") :: output.width] = found.rows
    return rows


@phase("comparison")
def agrees(problem: Problem, settings: Settings, backward: WholeBackward, columns: Tensor, findings: Findings) -> bool:
    """Whether all entries agree and the properties of the rows are right; then it adds the results to the findings.

    columns: all of the numerical Jacobian, float64, shape (n, m).
    """
    if backward.movement or not backward.add_up:
        return False
    own = [settings.of(block.index) for block in problem.inputs]
    inputs = [
        (block.size, block.is_complex, one.atol, one.rtol) for block, one in zip(problem.inputs, own, strict=True)
    ]
    errors = []
    for (output, part), found in zip(row_parts(problem.outputs), backward.parts, strict=True):
        match = found.match
        if not (match.repeats and match.sizes and (match.dtypes or not settings.check_grad_dtypes)):
            return False
        first = output.first + int(part == "imaginary")
        of_part = largest_errors(found.rows, columns, first, output.width, inputs)
        if of_part is None:
            return False
        errors.append(of_part)
    findings.pairs += compared_pairs(problem.outputs, problem.inputs, errors, "reverse")
    if problem.m > 1:
        findings.certificates.append(linear_backward(GRAD_OUTPUT_KINDS, settings.atol))
    return True


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
        check.errors = compared_columns(
            check, columns, partial(_errors_of_small, problem, check.settings, check.backward)
        )
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
    # Some bits differ. If the gradients agree within the tolerances, the complete check decides with new ones.
    check.vjp_varies = not same_afterwards(check.on_graph, check.settings, *at_hand)
    check.backward = None
    return False


def complete_backward(check: SmallCheck) -> None:
    """Runs the VJPs that a check without custom code has left out, because the complete check uses them.

    If VJPs changed, or there is no graph, drops those that ran.
    """
    problem, backward = check.problem, check.backward
    if backward is None or not backward.brief:
        return
    if check.vjp_varies or not problem.is_plain:
        check.backward = None
        return
    given = *_products(problem, check.settings), REPEATED_ROWS, REPEAT_SCALE
    check.backward = check.noted(partial(problem.completed, backward, *given))
    if check.backward is not None:
        check.on_graph.vjps += check.backward.vjps - backward.vjps


def _rows_repeat(check: SmallCheck, backward: WholeBackward) -> bool:
    calls = RepeatedCalls(check.on_graph, check.settings)
    calls.take(jacobian(check.on_graph, backward), backward.products)
    # The differences have called func since the first graph was recorded.
    moves_there = calls.older_graph_failure() is not None
    check.vjp_varies = moves_there or not check.problem.record_again() or calls.failure() is not None
    check.certificates += calls.certificates()
    return not check.vjp_varies


@phase("comparison")
def _errors_of_small(
    problem: SmallProblem, settings: Settings, backward: WholeBackward, columns: Tensor
) -> Errors | None:
    return problem.errors(backward, columns, settings.atol, settings.rtol, settings.check_grad_dtypes)
