"""Columns and rows from batches or replays instead of one call at a time: whether this is possible, faster and right.

Batches of points and replays of a captured graph can be slower than one call at a time, and wrong if func has side
effects. Therefore, they are first timed on a few columns, and used only if they agree with single calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fastgrad.core.phases import clock, phase
from fastgrad.core.random import TRIAL_STREAM, direction, uniform
from fastgrad.core.tensors import ones_at
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings

DIRECTIONS = 2
"""Number of random directions along which the columns of one pass must add up. Along a single direction, errors of two
columns may cancel."""

SCALES = (1.0, -1.0, 0.5, -0.5)
"""Steps along each of these directions, in units of eps: the last two are for Richardson extrapolation."""

SHARE = 1 / 8
"""Share of atol by which columns from batches or replays may differ from those of single calls, because of rounding."""

BEYOND_ROUNDING = 2 / SHARE
"""A disagreement that is larger than the allowed one by this factor does not come from rounding: func's values differ
by more than eps times atol."""

SINGLE_CALLS = 4
"""Number of columns or rows that are computed one call at a time for comparison."""


class RejectedError(Exception):
    """Columns or rows cannot be computed by batches or replays, or are wrong; the message says why."""


class UnsuitableError(RejectedError):
    """Columns or rows cannot be computed by batches or replays, for a reason that does not concern func.

    Memory does not suffice, a CUDA library or another thread forbids the capture, or results are rounded differently.
    A second attempt may succeed, for example because libraries have been initialized.
    """


def obstacle(problem: Problem) -> str | None:
    """What prevents batches and replays, as text; None if nothing does."""
    if problem.mutates_inputs:
        return "func changes its inputs"
    if problem.has_checkpoint:
        return "a checkpoint keeps columns and rows that were computed one by one"
    if any(
        type(block.tensor) not in (Tensor, torch.nn.Parameter) or block.tensor.layout is not torch.strided
        for block in problem.inputs
    ):
        return "an input is not a plain strided tensor"
    return None


@phase("trial of replays or batches")
def speedup(
    problem: Problem,
    atol: float,
    first: int,
    count: int,
    single: Callable[[int, int], Tensor],
    several: Callable[[int, int], Tensor],
) -> float:
    """The speedup of batches or replays over one call at a time, measured on `count` columns or rows.

    Parameters
    ----------
    single, several
        Functions of (first, count) that give columns or rows first, ..., first + count - 1: float64, shape
        (count, coordinates).

    Raises
    ------
    RejectedError
        The results differ, or `several` raises this error.
    """
    singles = min(SINGLE_CALLS, count)
    last = first + count - singles
    several(last, 1)  # if `several` raises, it raises here, at little cost; otherwise this call is a warm-up
    begin = clock(problem.device)
    expected = single(last, singles)
    between = clock(problem.device)
    found = several(first, count)
    end = clock(problem.device)
    if not torch.allclose(found[-singles:], expected, rtol=0.0, atol=atol):
        raise RejectedError("the values differ from those of single calls")
    return (between - begin) / singles * count / (end - between)


def note_if_repeated(problem: Problem, error: RejectedError, trial: Callable[[], object], where: str) -> None:
    """Notes if a trial that was refused succeeds when repeated, which suggests that func returned other values once.

    where: the calls of the trial, as text.
    """
    if isinstance(error, UnsuitableError):
        return
    try:
        trial()
    except RejectedError:
        return
    problem.irreproducible.append(where)


@phase("trial of columns")
def disagreement(problem: Problem, settings: Settings, first: int, columns: Tensor, record_graph: bool) -> float:
    """The error of sums of columns, relative to the allowed error, if larger than 1; otherwise 1.

    It is infinite if a sum is not finite, or if a column that is tested separately is wrong. An entry that is wrong by
    more than SHARE of atol is detected, unless other errors cancel it. Some errors appear only if one coordinate is
    perturbed at a time, for example if func caches a result for all inputs with the same first elements. Such errors
    are detected in the first and last column of each input and in SINGLE_CALLS other columns.

    Parameters
    ----------
    columns
        float64, shape (count, m).
    """
    eps, atol, seed = settings.eps, settings.atol, settings.seed
    within = slice(first, first + columns.shape[0])
    values = [torch.empty(problem.m, dtype=torch.float64, device=problem.device) for _ in SCALES]
    for which in range(DIRECTIONS):
        u = torch.zeros(problem.n, dtype=torch.float64, device=problem.device)
        u[within] = direction(columns.shape[0], seed, TRIAL_STREAM + 16 * which, first, device=problem.device)
        displacement = problem.displacement(u, eps)
        problem.values_along(displacement, SCALES, values, record_graph)
        whole, halves = (values[0] - values[1]) / 2, values[2] - values[3]
        expected = (problem.realized_width(displacement, 1.0)[within] / 2) @ columns
        error = float(torch.linalg.vector_norm(halves + (halves - whole) / 3 - expected, torch.inf))
        # A component of a direction is at least half a step. Not "error > allowed", because a NaN must not agree.
        allowed = SHARE * atol * eps * min(block.step for block in problem.inputs) / 2
        if not error <= allowed:
            return error / allowed if allowed and math.isfinite(error) else math.inf
    last = first + columns.shape[0]
    ends = {end for block in problem.inputs for end in (block.first, block.end - 1) if first <= end < last}
    others = (uniform(SINGLE_CALLS, seed, TRIAL_STREAM + 16 * DIRECTIONS, first) + 1) / 2 * columns.shape[0]
    for column in sorted(ends | {first + int(other) for other in others}):
        displacement = problem.displacement(ones_at(problem.n, column, problem.device), eps)
        width = float(problem.realized_width(displacement, 1.0)[column])
        if not width:
            continue  # rounding makes eps zero here
        problem.values_along(displacement, SCALES[:2], values[:2], record_graph)
        if not torch.allclose(columns[column - first], (values[0] - values[1]) / width, rtol=0.0, atol=atol):
            return math.inf
    return 1.0
