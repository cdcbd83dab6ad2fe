"""Tests with rows of a backward that are run again or scaled: they must not change, and be linear in grad_output."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastgrad.core.native import Layout, ops
from fastgrad.core.precision import ROUNDING, number_of
from fastgrad.core.tensors import differ, largest, largest_finite, near
from fastgrad.engines.blocks import REPEAT_SCALE, REPEATED_ROWS, JacobianBlock, row_parts
from fastgrad.problem.coordinates import Block
from fastgrad.problem.problem import Problem
from fastgrad.problem.small_backward import SmallBackward
from fastgrad.report.failure import Failure, Mode, Part
from fastgrad.report.number_text import digits_apart
from fastgrad.report.settings import Settings, Tolerances
from fastgrad.verdict.negation import nonlinear_component

RERUNS = 3
"""Number of further runs of a VJP that was not exactly as expected. Three runs show gradients that change every third
time."""

SHARE_BETWEEN_GRAPHS = 2.0**-6
"""Share of the tolerances by which a VJP may differ between graphs. Noise of func that changes its gradient changes its
differences by far more, and a saved value that a later call at a distance of eps overwrites changes by about eps, so
both stay below this share. An error of one entry has a weight of at least 1/2 in a VJP, so it is found if it exceeds
1/32 of the tolerance of the largest component."""

ALONG_DIRECTION = "along a random direction"
"""Where func gave other values, for `nondeterministic_func`, if differences along a direction showed this."""


def varying_repeat(problem: Problem, block: JacobianBlock, settings: Settings) -> Failure | None:
    """The failure if the repeated rows, for all inputs, differ from run to run by more than nondet_tol."""
    rows = problem, block.output, block.part, block.first_row, block.repeated.shape[0], settings.nondet_tol
    if any(rows_vary(*rows) for _ in range(RERUNS)):
        return Failure.at("nondeterministic", block.output, part=block.part)
    return None


def rerun(problem: Problem, block: JacobianBlock) -> tuple[Tensor, Tensor]:
    """The repeated rows of a block, and those from scaled cotangents, run once more: float64, shape (repeated, n)."""
    count = block.repeated.shape[0]
    places = block.output, block.part == "imaginary", block.first_row, count
    rows, repeated, _ = problem.analytical_rows(*places, repeated=count, scale=REPEAT_SCALE)
    return rows, repeated


def varied_once(block: JacobianBlock, again: tuple[Tensor, Tensor], settings: Settings) -> Failure | None:
    """The failure if rows of a block differ from those of `rerun` by more than nondet_tol, even if only once."""
    start = block.input.first + block.first_column
    known = block.analytical[: block.repeated.shape[0]], block.repeated
    for before, after in zip(known, again, strict=True):
        within = after[:, start : start + before.shape[1]]
        if differ(before, within, settings.nondet_tol, block.input.is_complex):
            return Failure.at("nondeterministic", block.output, part=block.part)
    return None


def nonlinear_repeat(block: JacobianBlock, settings: Settings) -> Failure | None:
    """The failure if rows from scaled cotangents, which do not vary from run to run, are not multiples of the rows."""
    count = block.repeated.shape[0]
    width = block.input.width
    analytical, own = block.analytical[:count], settings.of(block.input.index)
    atol = own.atol + settings.nondet_tol
    fields = ops.compare(block.repeated, analytical, atol, own.rtol, width == 2, False).tolist()
    if not fields[0]:
        return None
    row, entry = int(fields[2]), int(fields[3])
    element = block.output.element_index(block.first_row + row)
    within = slice(entry * width, (entry + 1) * width)
    value, scaled = (number_of(rows[row, within].tolist()) for rows in (analytical, block.repeated))
    at = block.input.element_index(block.first_column // width + entry)
    wrong, right = REPEAT_SCALE * scaled + 0.0, REPEAT_SCALE * value + 0.0
    digits = digits_apart(wrong, right)
    detail = (
        f"a grad_output of 1 for output {block.output.index}{_at(element)} gives the gradient {value:.6g} of input "
        f"{block.input.index}{_at(at)}, and a grad_output of {REPEAT_SCALE:g} gives {wrong:.{digits}g} instead of "
        f"{right:.{digits}g}"
    )
    return Failure.at("nonlinear", block.output, block.input, part=block.part, detail=detail)


def _at(index: Sequence[int]) -> str:
    """An index as text; empty for a tensor without dimensions."""
    return f" at {list(index)}" if index else ""


def groups_failure(problem: Problem, settings: Settings, output: Block, groups: Sequence[Tensor]) -> Failure | None:
    """The failure of some row groups whose second, scaled run gave other gradients: nondeterministic or nonlinear.

    groups: coordinates of the output, counted from its first coordinate.
    """
    cotangents = torch.zeros(len(groups), problem.m, dtype=torch.float64, device=problem.device)
    for cotangent, group in zip(cotangents, groups, strict=True):
        cotangent[group.to(problem.device) + output.first] = 1.0
    part: Part = "imaginary" if output.is_complex else "all"
    gradients = problem.vjp(cotangents, only=output)
    again = (problem.vjp(cotangents, only=output) for _ in range(RERUNS))
    if any(differ(gradients, gradient, settings.nondet_tol, False) for gradient in again):
        return Failure.at("nondeterministic", output, part=part)
    repeats: list[tuple[slice, Sequence[Layout], str]] = [(slice(None), (), "")]
    expands = len(problem.outputs) == 1 and not output.is_complex
    whole = next((k for k, group in enumerate(groups) if expands and group.numel() == output.size), None)
    if whole is not None:
        repeats.append((slice(whole, whole + 1), [Layout.EXPANDED], ", expanded with stride 0,"))
    for rows, layouts, kind in repeats:
        products = problem.vjp(cotangents[rows] * REPEAT_SCALE, layouts, only=output) / REPEAT_SCALE
        if any(
            ops.compare(left, right, own.atol, own.rtol, False, False)[0].item()
            for own, left, right in by_inputs(problem.inputs, settings, products, gradients[rows])
        ):
            detail = (
                f"a grad_output of {REPEAT_SCALE:g} at some elements of output {output.index}{kind} does not give "
                f"{REPEAT_SCALE:g} times the gradient that a grad_output of 1 gives there"
            )
            return Failure.at("nonlinear", output, part=part, detail=detail)
    return None


def nondeterministic(output: Block) -> Failure:
    """The failure of an output of which two runs of a VJP differ."""
    return Failure.at("nondeterministic", output)


def raised_for(vector: str, error: Exception, mode: Mode = "reverse") -> Failure:
    """The failure of a VJP, or a JVP in forward mode, that raises for some vector, but not for all."""
    return Failure("raises", mode=mode, detail=f"{type(error).__name__} for {vector}", cause=error)


def nonlinear_sum(
    mode: Mode, block: Block, at: int, when: str, addends: str, own: float, total: float, allowed: float | None = None
) -> Failure:
    """Like `nonlinear_component`, for a component that is not the sum of other gradients or tangents.

    addends: these others, with a verb ("the gradients ... add up to").
    """
    own, total = own + 0.0, total + 0.0  # -0 is written as 0
    digits = digits_apart(own, total)
    but = f"{addends} {total:.{digits}g}"
    but += "" if allowed is None else f" (allowed difference {allowed:.2g})"
    return nonlinear_component(mode, block, at, when, f"{own:.{digits}g}", but)


def nondeterministic_func(problem: Problem | SmallBackward, where: str) -> Failure:
    """The failure of a func that returned other values when it was evaluated again; where: the points, as text."""
    detail = f"evaluated again {where}, it gives other values"
    return Failure.at("nondeterministic func", problem.outputs[0], detail=detail)


def by_inputs(
    inputs: Sequence[Block], settings: Settings, left: Tensor, right: Tensor
) -> Iterator[tuple[Tolerances, Tensor, Tensor]]:
    """Yields, for each input, its tolerances and its columns of two sets of gradients, shape (count, n)."""
    for block in inputs:
        within = 1, block.first, block.size
        yield settings.of(block.index), left.narrow(*within), right.narrow(*within)


def graphs_agree(
    problem: Problem | SmallBackward, settings: Settings, again: Tensor, known: Tensor, cotangent: Tensor | None = None
) -> bool:
    """Whether VJPs of a cotangent on two graphs, shape (1, n), agree.

    They need not be equal, because func may have rounded its values differently for the second graph. cotangent: shape
    (m,); None: it is one-hot.
    """
    movement = allowed_movement(settings, cotangent)
    return all(
        agrees_between_graphs(problem, own, left, right, movement)
        for own, left, right in by_inputs(problem.inputs, settings, again, known)
    )


def allowed_movement(settings: Settings, cotangent: Tensor | None) -> float:
    """The difference between two runs of a VJP that nondet_tol allows; cotangent: as in `graphs_agree`."""
    if cotangent is None or not settings.nondet_tol:
        return settings.nondet_tol
    return settings.nondet_tol * float(cotangent.abs().sum())


def agrees_between_graphs(
    problem: Problem | SmallBackward, own: Tolerances, again: Tensor, known: Tensor, movement: float
) -> bool:
    """As `graphs_agree`, for one input with its tolerances; movement: the allowed difference between two runs."""
    size = largest_finite(known)
    allowed = SHARE_BETWEEN_GRAPHS * (own.atol + own.rtol * size) + ROUNDING * problem.unit_roundoff * size
    return bool(near(again, known, allowed + movement).all())


def varying_row(problem: Problem, settings: Settings, rows_per_block: int) -> Failure | None:
    """Runs each row twice that was not yet repeated; returns a failure if two runs differ by more than nondet_tol."""
    for output in problem.outputs:
        parts: tuple[Part, ...] = ("imaginary", "real") if output.is_complex else ("all",)
        elements = output.tensor.numel()
        for part in parts:
            for first in range(REPEATED_ROWS, elements, rows_per_block):
                count = min(rows_per_block, elements - first)
                if rows_vary(problem, output, part, first, count, settings.nondet_tol):
                    return Failure.at("nondeterministic", output, part=part)
    return None


def sums_of_rows(problem: Problem, rows_per_block: int, cotangents: Tensor) -> Tensor:
    """V J from all rows, which are run again; cotangents V: float64, shape (count, m). float64, shape (count, n)."""
    sums = cotangents.new_zeros(len(cotangents), problem.n)
    for output, part in row_parts(problem.outputs):
        own = cotangents[:, output.slice][:, int(part == "imaginary") :: output.width]
        for first in range(0, own.shape[1], rows_per_block):
            count = min(rows_per_block, own.shape[1] - first)
            rows, _, _ = problem.analytical_rows(output, part == "imaginary", first, count)
            sums.addmm_(own[:, first : first + count], rows)
    return sums


def rows_vary(problem: Problem, output: Block, part: Part, first: int, count: int, nondet_tol: float) -> bool:
    """Whether two runs with the same one-hot cotangents differ by more than nondet_tol, as in torch's checker."""
    rows, again, match = problem.analytical_rows(output, part == "imaginary", first, count, repeated=count)
    if match.repeats:
        return False
    return any(
        differ(rows[:, block.slice], again[:, block.slice], nondet_tol, block.is_complex) for block in problem.inputs
    )


def variation_between(again: Tensor, gradient: Tensor) -> float:
    """The largest difference between two runs; infinite if they differ and one of them contains a NaN."""
    if torch.equal(again, gradient):
        return 0.0
    difference = largest(again - gradient)
    return math.inf if math.isnan(difference) else difference
