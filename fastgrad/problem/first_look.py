"""A few evaluations at and near the inputs that show the cost, the sparsity and the noise of func."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastgrad.core.errors import unless_rejected
from fastgrad.core.native import SmallProblem
from fastgrad.core.phases import clock
from fastgrad.core.precision import ROUNDING
from fastgrad.core.random import GRAPH_STREAM, direction
from fastgrad.core.tensors import differ, largest_finite
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings

if TYPE_CHECKING:
    from numpy.typing import NDArray

CALL_SECONDS, NODE_SECONDS, CUSTOM_SECONDS, COORDINATE_SECONDS = 3e-6, 1.2e-6, 2.4e-6, 2e-9
"""Usual seconds of an evaluation: per call, and in addition per node of its graph, per custom Function, and per
coordinate. `python -m benchmarks.bench_costs` measures them. On a CUDA device, calls and the work of the engines take
three to six times as long. Therefore, the choices for the CPU are also right for CUDA."""

BACKWARD_SECONDS = 2e-6
"""Additional time of an evaluation if func is itself a backward: one forward and one run of autograd's engine."""

SLOW_SECONDS, SLOW_FACTOR = 3e-3, 10
"""func is slow if an evaluation takes more seconds than the first number, and more than the usual seconds times the
second number. Then its measured seconds are used, without the time of other processes. Otherwise, only numbers of nodes
and coordinates are used, so that the choices on a busy machine are the same as on an idle one."""


@dataclass(frozen=True, eq=False, repr=False)
class FirstLook:
    """Results of a few evaluations at x and at one point next to it.

    Attributes
    ----------
    record_graph
        Whether func must record gradients while it is evaluated for differences, to give the same values.
    base
        The outputs at x: float64, shape (m,).
    moved
        Which coordinates differ between the two points, a random half of them: shape (n,).
    reacted
        Which outputs differ between the two points: shape (m,). None if func raises at the second point.
    seconds
        Seconds of one evaluation: the usual cost or, if func is slow, the measured time.
    measured
        Measured seconds of one evaluation, for estimates and trials; the choice of the engine does not use it.
    obstacles
        Reasons for using the dense engine, as text; extended during the check.
    """

    record_graph: bool
    base: Tensor
    moved: NDArray[np.bool_]
    reacted: NDArray[np.bool_] | None
    seconds: float
    measured: float
    obstacles: list[str] = field(default_factory=list)


class KnownLook(NamedTuple):
    """A displacement of a random half of the inputs, shape (n,), and the outputs with and without it, shape (m,).

    base: the outputs at x. values, seconds: the outputs at x + displacement, and the time of this evaluation.
    """

    displacement: Tensor
    base: Tensor
    values: Tensor
    seconds: float


def first_look(problem: Problem, settings: Settings, known: KnownLook | None = None) -> FirstLook:
    """Compares the outputs of func with and without a graph, at one point next to x.

    If the outputs are equal, evaluations for differences record no graph. Otherwise, they record one, and also if func
    raises without a graph, for example because it calls autograd itself. The comparison takes two evaluations, in
    addition to the first one at x. Two evaluations at x itself are compared later, if a pattern is sought by comparing
    outputs bit by bit.

    known: results of a small check, which has made the first of these two evaluations.
    """
    half = direction(problem.n, settings.seed, GRAPH_STREAM, halved=True)
    displacement = problem.displacement(half.to(problem.device), settings.eps) if known is None else known.displacement
    # Outputs may be views of inputs, and then change when inputs are restored. Therefore, func is evaluated again.
    base = problem.evaluate(True) if problem.mutates_inputs else problem.base()
    next_to_x, plain = torch.empty_like(base) if known is None else known.values, torch.empty_like(base)
    moved = half.numpy() != 0

    def evaluate(values: Tensor, record: bool) -> float:
        start = clock(problem.device)
        problem.values_along(displacement, (1.0,), (values,), record)
        return clock(problem.device) - start

    def look(record: bool, reacted: NDArray[np.bool_] | None, *seconds: float) -> FirstLook:
        # The shortest time is used: in longer calls, another process may have run, or a library was initialized.
        usual = usual_seconds(problem, min(problem.working_seconds, *seconds))
        return FirstLook(record, base, moved, reacted, usual, seconds[-1])

    def gives_again(values: Tensor, record: bool) -> bool:
        again = torch.empty_like(values)
        evaluate(again, record)
        return not values_vary(problem, settings, again, values)

    seconds = known.seconds if known is not None else unless_rejected(partial(evaluate, next_to_x, True))
    if seconds is None:  # func accepts only single steps
        return look(True, None, problem.seconds)
    reacted = (next_to_x.view(torch.int64) != base.view(torch.int64)).cpu().numpy()
    # func may raise without a graph, for example because it calls autograd.
    without = unless_rejected(partial(evaluate, plain, False)) if torch.is_grad_enabled() else None
    if without is not None and torch.equal(next_to_x, plain):
        return look(False, reacted, seconds, without)
    # The mode explains a difference only if repeated evaluations in each mode give the same values.
    if without is not None and not (gives_again(plain, False) and gives_again(next_to_x, True)):
        problem.irreproducible.append("next to the inputs")
    return look(True, reacted, seconds)


def values_vary(problem: Problem | SmallProblem, settings: Settings, again: Tensor, values: Tensor) -> bool:
    """Whether repeated outputs, shape (m,), differ by more than rounding explains and differences tolerate."""
    return differ(again[None], values[None], _allowed_change(problem, settings, values), False)


def base_varies(problem: Problem, settings: Settings) -> bool:
    """Whether the outputs of a later graph at x differed from `problem.base()`."""
    return problem.base_change > 0 and problem.base_change > _allowed_change(problem, settings, problem.base())


def _allowed_change(problem: Problem | SmallProblem, settings: Settings, values: Tensor) -> float:
    """The largest change of repeated outputs, shape (m,), that rounding explains or a difference tolerates."""
    size = largest_finite(values)  # values that are not finite must not change at all
    return max(ROUNDING * problem.unit_roundoff * size, settings.eps * settings.atol)


def usual_seconds(problem: Problem | SmallProblem, measured: float) -> float:
    """Seconds of one evaluation: estimated from the numbers of coordinates and nodes, or measured if func is slow."""
    usual = CALL_SECONDS + COORDINATE_SECONDS * (problem.n + problem.m)
    usual += NODE_SECONDS * problem.nodes + CUSTOM_SECONDS * problem.custom_nodes
    usual += 0.0 if problem.records_differences else BACKWARD_SECONDS
    return measured if measured > max(SLOW_SECONDS, SLOW_FACTOR * usual) else usual
