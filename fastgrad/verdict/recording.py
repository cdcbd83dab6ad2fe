"""Tests that gradients depend neither on create_graph nor on which tensor holds the values of grad_output."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgrad.core.native import flattened, ops
from fastgrad.core.random import NEW_GRAD_OUTPUT_STREAM, direction
from fastgrad.core.tensors import largest_finite
from fastgrad.problem.coordinates import block_with
from fastgrad.problem.problem import Problem
from fastgrad.problem.second_order import Backward
from fastgrad.report.failure import Failure, FailureKind
from fastgrad.report.number_text import digits_apart
from fastgrad.report.settings import Settings
from fastgrad.verdict.repeated_rows import nondeterministic_func

REPEATS = 2
"""Number of times that two different gradients are computed again; one repetition may agree by chance."""


def check_recorded_gradients(problem: Problem, settings: Settings) -> Failure | None:
    """The failure if gradients with and without create_graph=True differ by more than the tolerances.

    Training uses gradients without create_graph=True. Second derivatives need gradients with it. If gradients of the
    same kind differ, too, func or its backward is not deterministic.
    """
    recorded, unrecorded = problem.base(), problem.evaluate(False, problem.zero_displacement())
    failure = _difference(
        problem, settings, "recorded gradient", "with create_graph=True", recorded, "without", unrecorded
    )
    if failure is None:
        return None
    for _ in range(REPEATS):
        for records, known in ((True, recorded), (False, unrecorded)):
            again = problem.evaluate(records, problem.zero_displacement())
            if _difference(problem, settings, "nondeterministic func", "first", known, "later", again) is not None:
                return nondeterministic_func(problem, "at the inputs")
    return failure


def moves_on_one_graph(problem: Problem, settings: Settings, backward: Backward) -> bool:
    """Whether two runs of the backward on one graph gave gradients that differ by more than the tolerances."""
    if not backward.movement:
        return False
    size = largest_finite(problem.base())
    return backward.movement > settings.atol + settings.nondet_tol + settings.rtol * size


def check_new_grad_outputs(problem: Problem, settings: Settings, backward: Backward) -> Failure | None:
    """The failure if gradients differ between grad_outputs that are moved in place and new tensors with these values.

    The gradients differ if backward caches them by the address or identity of grad_output. The differences of such a
    backward are zero, because differences move grad_outputs in place. This is not tested if the caller passed
    grad_outputs, because func may refer to these tensors.
    """
    blocks = [block for block in problem.inputs if block.position >= backward.count]
    if backward.made == "given" or not blocks:
        return None
    displacement = torch.zeros(problem.n, dtype=torch.float64, device=problem.device)
    new = []
    for block in blocks:
        own = direction(block.size, settings.seed, NEW_GRAD_OUTPUT_STREAM, block.first, device=problem.device)
        displacement[block.slice] = own
        tensor = torch.empty_like(block.tensor.detach())
        ops.unflatten_(tensor, problem.coordinates()[block.slice] + own)
        new.append(tensor)
    moved = problem.evaluate(True, displacement)
    found = problem.evaluate_with(blocks, new)
    return _difference(problem, settings, "kept gradient", "for one", moved, "for the other", flattened(list(found)))


def _difference(
    problem: Problem, settings: Settings, kind: FailureKind, first: str, left: Tensor, second: str, right: Tensor
) -> Failure | None:
    """The failure of two sets of gradients, float64, shape (m,), that differ by more than their tolerances."""
    if torch.equal(left, right):
        return None
    wrong = ~torch.isclose(left, right, settings.rtol, settings.atol + settings.nondet_tol, equal_nan=True)
    if not bool(wrong.any()):
        return None
    worst = int(torch.where(wrong, (left - right).abs().nan_to_num(torch.inf), -1.0).argmax())
    output = block_with(problem.outputs, worst)
    one, other = left[worst].item(), right[worst].item()
    digits = digits_apart(one, other)
    number = int(wrong.sum())
    which = "the element that differs" if number == 1 else f"the worst of {number:,} elements that differ"
    values = f"{one:.{digits}g} {first} and {other:.{digits}g} {second}"
    detail = f"{which}, in output {output.index} of the backward, is {values}"
    return Failure.at(kind, output, detail=detail)
