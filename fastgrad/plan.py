"""Choosing how the Jacobians are computed."""

from __future__ import annotations

import math
import os

import torch

from fastgrad.directions import GRAPH_STREAM, direction
from fastgrad.problem import Problem
from fastgrad.report import Plan, Settings

BLOCK_BYTES = 1 << 20
"""Analytical rows held at a time: a few blocks of this size stay in the cache."""

FREE_MEMORY_SHARE = 0.25
"""The default memory limit, as a share of what is free."""

TINY = 24
"""Evaluations and VJPs of the dense engine up to which it costs no more than a sketch."""

AFFORDABLE_ENTRIES = 4_000_000
AFFORDABLE_CALLS = 20_000

PAIR_RATIO = 4000.0
"""Errors that cancel in a row or a column are found from this many times the threshold on."""

COLUMNS_WORTH_A_LOOK = 12
"""Columns from which two cheaper evaluations each repay the four that tell whether a graph is needed."""


def _memory_limit(settings: Settings, needed: int) -> int:
    """Bytes for the numerical columns; asks the system only where `needed` could matter."""
    if settings.memory_limit is not None:
        return settings.memory_limit
    if needed <= 1 << 26:
        return needed
    return int(FREE_MEMORY_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def needs_graph(problem: Problem, settings: Settings) -> bool:
    """Whether func gives other values when it is evaluated without recording gradients.

    Looks, at x and at one random point next to it, for any difference in any value. A func that
    differentiates inside fails without a graph, or sees to its own.
    """
    next_to_x = direction(problem.n, settings.seed, GRAPH_STREAM).to(problem.device)
    problem.realize(next_to_x, torch.empty_like(next_to_x), settings.eps)
    recorded, plain = torch.empty(2, 1, problem.m, dtype=torch.float64, device=problem.device).unbind()
    for scale in (0.0, 1.0):
        problem.values_along(next_to_x, (scale,), recorded)
        try:
            problem.values_along(next_to_x, (scale,), plain, record_graph=False)
        except Exception:
            return True
        if not torch.equal(recorded, plain):
            return True
    return False


def sketch_size(confidence: float) -> int:
    """How many directions, and cotangents, miss two cancelling errors with probability 1 - confidence at most.

    The two differ in one random component each, which must agree to within threshold / error in every
    direction: at most 2 (threshold / error)^count.
    """
    return max(2, math.ceil(math.log(2 / (1 - confidence)) / math.log(PAIR_RATIO)))


def detection_limit(settings: Settings) -> float:
    """The size from which errors that cancel in a row or a column are found with `settings.confidence`."""
    count = sketch_size(settings.confidence)
    return float(settings.atol / 4 * (2 / (1 - settings.confidence)) ** (1 / count))


def sketches(problem: Problem, settings: Settings) -> bool:
    """Whether fast mode is worth it: exact checks of tiny problems cost less."""
    return settings.engine == "sketch" or (
        settings.fast_mode and settings.engine == "auto" and 2 * problem.n + problem.m > TINY
    )


def is_affordable(problem: Problem) -> bool:
    """Whether the exact engine may decide what a sketch leaves open."""
    return problem.n * problem.m <= AFFORDABLE_ENTRIES and 2 * problem.n + problem.m <= AFFORDABLE_CALLS


def make_plan(problem: Problem, settings: Settings) -> Plan:
    """The plan for a problem whose outputs are known."""
    column_bytes = 8 * max(1, problem.m)
    limit = _memory_limit(settings, column_bytes * problem.n)
    columns = max(2, min(problem.n, limit // column_bytes))
    rows = max(1, BLOCK_BYTES // (8 * max(1, problem.n)))
    record_graph = not (torch.is_grad_enabled() and problem.n >= COLUMNS_WORTH_A_LOOK) or needs_graph(problem, settings)
    reason = "engine='dense' was asked for" if settings.engine == "dense" else "the only exact engine so far"
    return Plan("dense", columns, rows, record_graph, reason)


def make_sketch_plan(settings: Settings) -> Plan:
    """The plan of fast mode: a few directions and cotangents, gradients recorded as the caller would."""
    return Plan("sketch", 0, 0, True, "fast_mode=True", detection_limit(settings))
