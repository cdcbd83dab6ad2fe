"""The order of the checks: outputs, Jacobians, linearity, attributes -> Report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch

from fastgrad.attributes import check_undefined_grads, check_zero_grad_output
from fastgrad.certify import LinearityProof, repeat_failure
from fastgrad.compare import PairComparison
from fastgrad.engines import JacobianBlock, dense
from fastgrad.plan import make_plan
from fastgrad.problem import Problem, as_tuple
from fastgrad.report import Failure, Plan, Report, Settings


def check(func: Callable[..., Any], inputs: Any, settings: Settings) -> Report:
    """Checks the derivatives that autograd computes for func at inputs against differences of func.

    Parameters
    ----------
    func
        Takes the inputs, returns a Tensor or a tuple or list of Tensors.
    inputs
        A tensor, or a tuple or list; tensors that require grad are checked, anything else is passed through.
    settings
        Step, tolerances and what to check.

    Returns
    -------
    Report
        Errors of func and of backward, and of the arguments, are raised instead.
    """
    start = time.perf_counter()
    with Problem(func, as_tuple(inputs)) as problem:
        plan = make_plan(problem, settings)
        failure = _first_failure(problem, plan, settings)
    notes = []
    if settings.fast_mode:
        notes.append("fast_mode=True ran the exact engine: the fast one is not there yet")
    if not torch.is_grad_enabled():
        notes.append("gradients are disabled where the check was called (torch.no_grad or inference_mode)")
    if problem.mutates_inputs:
        notes.append("func changes its inputs (or they hold NaN); they were restored around every evaluation")
    return Report(
        failure=failure,
        settings=settings,
        plan=plan,
        n=problem.n,
        m=problem.m,
        evaluations=problem.evaluations,
        vjps=problem.vjps,
        seconds=time.perf_counter() - start,
        notes=tuple(notes),
    )


def _first_failure(problem: Problem, plan: Plan, settings: Settings) -> Failure | None:
    if not problem.has_graph:
        return _nonzero_numerical(problem, plan, settings)
    failure = _jacobian_failure(problem, plan, settings)
    if failure is None and settings.check_undefined_grad:
        failure = check_undefined_grads(problem)
    return failure


def _nonzero_numerical(problem: Problem, plan: Plan, settings: Settings) -> Failure | None:
    """Where no output requires grad, func must not depend on its inputs."""
    for first, columns in dense.numerical_columns(problem, plan, settings.eps):
        if bool(columns.any()):
            column, row = (int(i) for i in columns.nonzero()[0])
            output = next(block for block in problem.outputs if row < block.first + block.size)
            block = next(block for block in problem.inputs if first + column < block.first + block.size)
            return Failure(
                "nonzero numerical gradient",
                output=output.index,
                input=block.index,
                output_position=output.position,
                input_position=block.position,
                detail=f"{columns[column, row].item():.6g}",
            )
    return None


def _jacobian_failure(problem: Problem, plan: Plan, settings: Settings) -> Failure | None:
    if not (problem.m and problem.n):
        return check_zero_grad_output(problem)
    proof = LinearityProof(problem, settings, plan.rows_per_block) if problem.m > 1 else None
    stream = dense.blocks(problem, plan, settings.eps)
    for _, blocks in groupby(stream, key=lambda block: (block.output.index, block.part)):
        failure = _judge(problem, blocks, settings, proof)
        if failure is not None:
            return failure
    if proof is None:
        return check_zero_grad_output(problem)
    return proof.failure() or check_zero_grad_output(problem, *proof.zero)


def _judge(
    problem: Problem, blocks: Iterable[JacobianBlock], settings: Settings, proof: LinearityProof | None
) -> Failure | None:
    """One part of one output: dtype, size, determinism, then the comparison, inputs in their order."""
    pairs: dict[int, PairComparison] = {}
    dtypes_match = sizes_match = True
    repeat: Failure | None = None
    for block in blocks:
        dtypes_match &= block.match.dtypes
        sizes_match &= block.match.sizes
        if not block.match.repeats and repeat is None:
            repeat = repeat_failure(problem, block, settings)
        pair = pairs.get(block.input.index)
        if pair is None:
            pair = pairs[block.input.index] = PairComparison(block.output, block.input, settings.atol, settings.rtol)
        pair.add(block.analytical, block.numerical, block.first_row, block.first_column)
        if proof is not None:
            proof.add(block)
    if settings.check_grad_dtypes and not dtypes_match:
        return Failure("dtype", output=block.output.index, output_position=block.output.position, part=block.part)
    if not sizes_match:
        return Failure("size", output=block.output.index, output_position=block.output.position, part=block.part)
    if repeat is not None and repeat.kind == "nondeterministic":
        return repeat
    for pair in pairs.values():
        if pair.mismatches:
            return Failure(
                "mismatch",
                output=pair.output.index,
                input=pair.input.index,
                output_position=pair.output.position,
                input_position=pair.input.position,
                part=block.part,
                comparison=pair.result(),
            )
    return repeat
