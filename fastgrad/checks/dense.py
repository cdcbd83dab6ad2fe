"""Compares every entry with the dense engine, block by block, and tests that backward and jvp are linear."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fastgrad.checks.one_block import (
    agrees,
    is_small,
    jacobian,
    product_at_hand,
    same_afterwards,
    same_on_first_graph,
    single_rows,
    take_calls,
    whole_backward,
)
from fastgrad.core.native import Rows, WholeBackward
from fastgrad.engines import dense
from fastgrad.engines.blocks import REPEATED_ROWS, JacobianBlock, row_parts
from fastgrad.engines.executor import RejectedError, UnsuitableError
from fastgrad.problem.coordinates import block_with
from fastgrad.problem.first_look import FirstLook
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Certificate, Plan
from fastgrad.report.failure import Failure, Part
from fastgrad.report.settings import Settings
from fastgrad.verdict.comparison import Findings, PairComparison
from fastgrad.verdict.confirm import mismatch_failure
from fastgrad.verdict.grad_outputs import check_zero_grad_output
from fastgrad.verdict.linearity import LinearityTest
from fastgrad.verdict.repeated_calls import RepeatedCalls
from fastgrad.verdict.repeated_rows import (
    nondeterministic,
    nonlinear_repeat,
    rerun,
    sums_of_rows,
    varied_once,
    varying_repeat,
    varying_row,
)
from fastgrad.verdict.tangents import TangentLinearityTest


def dense_check(
    problem: Problem, plan: Plan, settings: Settings, look: FirstLook | None, findings: Findings, calls: RepeatedCalls
) -> tuple[Plan, Failure | None]:
    """The plan that was used, and the failure, if any.

    If batches or replays show a failure, or are refused, the entries are computed again one call at a time.
    """
    judge = _jacobian_failure if problem.has_graph else _nonzero_numerical
    suspected: Plan | None = None
    if plan.batch is not None or plan.replayed or plan.rows_replayed:
        calls.run_first()
        own = Findings()
        try:
            if judge(problem, plan, settings, own, calls) is None:
                findings.add(own)
                return plan, None
            suspected, reason = plan, "a mismatch is checked again, one call at a time"
        except RejectedError as error:
            suspected = None if isinstance(error, UnsuitableError) else plan
            reason = f"no batches or replays: {error}"
        reason = f"{plan.reason}; {reason}"
        plan = replace(plan, batch=None, replayed=False, rows_replayed=False, reason=reason)
    elif is_small(problem, settings) and findings.backward is None and findings.early is None:
        findings.on_first_graph = problem.evaluations == 1
        seconds = problem.working_seconds if look is None else min(look.measured, problem.working_seconds)
        findings.backward = findings.noted(partial(whole_backward, problem, settings, seconds))
        if findings.backward is not None:
            take_calls(problem, findings.backward, calls)
    failure = judge(problem, plan, settings, findings, calls)
    if failure is not None or suspected is None:
        return plan, failure
    # Single calls passed. If batches or replays now pass, too, func or its backward gave other values once.
    with suppress(RejectedError):
        if judge(problem, suspected, settings, Findings(), calls) is None:
            problem.irreproducible.append("in batches or replays")
    return plan, None


def _nonzero_numerical(
    problem: Problem, plan: Plan, settings: Settings, findings: Findings, _: RepeatedCalls
) -> Failure | None:
    """The failure if func depends on its inputs, although no output requires grad."""
    for first, columns in dense.numerical_columns(problem, plan, settings):
        if bool(columns.any()):
            column, row = (int(i) for i in columns.nonzero()[0])
            output, block = block_with(problem.outputs, row), block_with(problem.inputs, first + column)
            return Failure.at("nonzero numerical gradient", output, block, detail=f"{columns[column, row].item():.6g}")
        del columns  # before the next ones are computed: the memory limit is for one block
    findings.certificates.append(
        Certificate("func does not depend on its inputs", "every column: the outputs are equal, bit for bit", 0.0)
    )
    return None


def _jacobian_failure(
    problem: Problem, plan: Plan, settings: Settings, findings: Findings, calls: RepeatedCalls
) -> Failure | None:
    """The first failure of the Jacobians, pass by pass over numerical columns; forward mode is judged last."""
    nothing_to_compare = not problem.n and all(block.elements is None for block in problem.inputs)
    if not problem.m or nothing_to_compare:
        return None
    columns, backward, rows_remain = findings.columns, findings.backward, settings.check_backward_ad
    if columns is None and backward is not None:
        columns = dense.columns_one_by_one(problem, settings, 0, problem.n, plan.record_graph)
    columns_at_hand = iter([(0, columns)]) if columns is not None else dense.numerical_columns(problem, plan, settings)
    if backward is not None:
        assert columns is not None
        # This test is not needed for a custom backward, whose repeated calls include it.
        if not problem.is_custom and not _graphs_agree(problem, settings, backward, findings.on_first_graph):
            backward, findings.vjp_varies = None, True
        elif agrees(problem, settings, backward, columns, findings):
            if calls.rows:
                calls.compare_all(jacobian(problem, backward), backward.products)
            if not settings.check_forward_ad:
                return None
            rows_remain = False
    linearity = _linearity_test(problem, plan, settings) if problem.m > 1 else None
    forward = ForwardComparison(problem, plan, settings, findings) if settings.check_forward_ad else None
    rows_at_hand: Sequence[Rows] = ()
    if backward is not None:
        rows_at_hand = single_rows(backward)
        if linearity is not None:
            linearity.take(backward.products, backward.movement)
    for first, columns in columns_at_hand:
        if rows_remain:
            # In torch's order of comparison. All blocks of one output are compared before the next output is computed.
            for number, (output, part) in enumerate(row_parts(problem.outputs)):
                known = rows_at_hand[number] if rows_at_hand else None
                blocks = dense.row_blocks(problem, plan, output, part, first, columns, known)
                failure = _judge(problem, plan, blocks, settings, linearity, findings, calls)
                if failure is not None:
                    return failure
        if forward is not None:
            forward.add(first, columns)
        del columns  # before the next ones are computed: the memory limit is for one block
    if rows_remain and linearity is not None:
        failure = _linearity_failure(problem, linearity, settings)
        if failure is not None:
            return failure
        findings.certificates.append(linearity.certificate())
    if rows_remain and linearity is None and not problem.is_custom:
        one = torch.ones(1, 1, dtype=torch.float64, device=problem.device)
        if not same_on_first_graph(problem, settings, one, problem.vjp(one), 0):
            return nondeterministic(problem.outputs[0])
    return forward.failure() if forward is not None else None


def _graphs_agree(problem: Problem, settings: Settings, backward: WholeBackward, on_first_graph: bool) -> bool:
    """Whether the first graph and one that was recorded after other evaluations give the same gradient.

    on_first_graph: whether backward ran on the first graph. Otherwise its graph was recorded after other evaluations.
    """
    product = product_at_hand(problem, settings, backward)
    if not same_on_first_graph(problem, settings, *product):
        return False
    return not on_first_graph or same_afterwards(problem, settings, *product)


def _linearity_test(problem: Problem, plan: Plan, settings: Settings) -> LinearityTest:
    rows_repeated = all(output.tensor.numel() <= REPEATED_ROWS for output in problem.outputs)
    moving = partial(varying_row, problem, settings, plan.rows_per_block)
    again = partial(sums_of_rows, problem, plan.rows_per_block)
    return LinearityTest(problem, settings, rows_repeated, moving, sums_again=again)


def _linearity_failure(problem: Problem, linearity: LinearityTest, settings: Settings) -> Failure | None:
    """The failure of the linearity test, or of a gradient with a wrong layout: its conversion to strided may raise."""
    try:
        return linearity.failure()
    except RuntimeError:
        failure = check_zero_grad_output(problem, settings)
        if failure is None:
            raise
        return failure


KEPT_ELEMENTS = 65536
"""Largest number of elements of the first columns that are kept to be compared with later ones, and of their one-hot
directions: half a megabyte each."""


class ForwardComparison:
    """Compares the Jacobians by forward-mode AD with the numerical ones, and tests that the jvp is linear."""

    def __init__(self, problem: Problem, plan: Plan, settings: Settings, findings: Findings) -> None:
        self._problem = problem
        self._plan = plan
        self._settings = settings
        self._findings = findings
        self._linearity = TangentLinearityTest(problem, settings)
        self._pairs: dict[tuple[bool, int, int], tuple[Part, PairComparison]] = {}
        self._domains_match = True
        self._kept: Tensor | None = None  # the first columns; a failure may only be in some calls of jvp

    def add(self, first: int, columns: Tensor) -> None:
        """Compares the numerical columns from `first` on, shape (count, m), with JVPs: one evaluation each."""
        for start, some in dense.pieces_of_columns(self._problem, self._plan, first, columns):
            self._add(start, some)

    def _add(self, first: int, columns: Tensor) -> None:
        if self._findings.tangent_columns is None:
            tangents, domains_match = self._problem.tangent_columns(first, columns.shape[0])
            self._domains_match &= domains_match
        else:
            tangents = self._findings.tangent_columns[first : first + columns.shape[0]]
        blocks = dense.tangent_blocks(self._problem, first, columns, tangents)
        for output, block, part, element, analytical, numerical in blocks:
            # In torch's order of comparison: real inputs and imaginary parts come before real parts.
            key = part == "real", output.index, block.index
            if key not in self._pairs:
                self._pairs[key] = part, PairComparison(output, block, self._settings.of(block.index), "forward")
            self._pairs[key][1].add(analytical, numerical, element, 0)
        self._linearity.add(first, tangents)
        if self._kept is None:
            self._kept = tangents[: max(1, KEPT_ELEMENTS // max(tangents.shape[1], self._problem.n))].clone()

    def failure(self) -> Failure | None:
        """The failure, if any, after all columns were added; findings then have tangents to compute again."""
        failure = self._failure()
        if failure is not None and self._kept is not None:
            one_hot = torch.eye(len(self._kept), self._problem.n, dtype=torch.float64, device=self._problem.device)
            directions, products = map(torch.cat, zip((one_hot, self._kept), self._linearity.run, strict=True))
            self._findings.tangents = directions, [], products
        return failure

    def _failure(self) -> Failure | None:
        if self._settings.check_grad_dtypes and not self._domains_match:
            return Failure("tangent dtype", mode="forward")
        for key in sorted(self._pairs):
            part, pair = self._pairs[key]
            failure = mismatch_failure(self._problem, self._plan, pair, part, self._settings, self._findings)
            if failure is not None:
                return failure
        failure = self._linearity.failure()
        if failure is None:
            self._findings.certificates.append(self._linearity.certificate())
        return failure


def _judge(
    problem: Problem,
    plan: Plan,
    blocks: Iterable[JacobianBlock],
    settings: Settings,
    linearity: LinearityTest | None,
    findings: Findings,
    calls: RepeatedCalls,
) -> Failure | None:
    """The first failure of one part of an output: dtype, size, determinism, comparison by input, then linearity."""
    pairs: dict[int, PairComparison] = {}
    dtypes_match = sizes_match = True
    again: tuple[Tensor, Tensor] | None = None
    repeat: Failure | None = None
    for block in blocks:
        dtypes_match &= block.match.dtypes
        sizes_match &= block.match.sizes
        if not block.match.repeats and repeat is None:
            if again is None:
                repeat, again = varying_repeat(problem, block, settings), rerun(problem, block)
            repeat = repeat or varied_once(block, again, settings) or nonlinear_repeat(block, settings)
        pair = pairs.get(block.input.index)
        if pair is None:
            own = settings.of(block.input.index)
            pair = pairs[block.input.index] = PairComparison(block.output, block.input, own)
        pair.add(block.analytical, block.numerical, block.first_row, block.first_column)
        if block.unspecified is not None:
            entry = block.unspecified
            pair.add_unspecified(block.first_row + entry.row, entry.element, entry.value)
        if linearity is not None:
            linearity.add(block)
        calls.compare(block)
    if settings.check_grad_dtypes and not dtypes_match:
        return Failure.at("dtype", block.output, part=block.part)
    if not sizes_match:
        return Failure.at("size", block.output, part=block.part)
    if repeat is not None and repeat.kind == "nondeterministic":
        return repeat
    for pair in pairs.values():
        failure = mismatch_failure(problem, plan, pair, block.part, settings, findings)
        if failure is not None:
            return failure
    return repeat
