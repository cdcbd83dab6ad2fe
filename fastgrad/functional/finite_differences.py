"""Derivatives from values of func only: refined differences, each with an error estimate.

First derivatives are Ridders extrapolations of central differences over steps from large to small. Columns that share
no row are perturbed together. Second derivatives are extrapolations of second differences along sums of coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from fastgrad.checks.compressed import atol_outside, numerical_entries
from fastgrad.core.errors import raise_unless_of_func
from fastgrad.core.native import ops
from fastgrad.core.precision import ROUNDING, spacing
from fastgrad.core.random import SKETCH_DIRECTIONS, direction
from fastgrad.core.tensors import largest, ones_at
from fastgrad.engines.compressed import Compression
from fastgrad.engines.extrapolation import extrapolate
from fastgrad.engines.measured_steps import LARGEST_STEP, RATIO, Measured, measured
from fastgrad.engines.plan import MIN_COLUMNS_FOR_PROBING
from fastgrad.engines.ridders import settled
from fastgrad.engines.rounding_inside import KINK_SHARE, hidden_derivatives, is_constant, kink
from fastgrad.engines.stairs import mark_stairs
from fastgrad.problem.coordinates import Block
from fastgrad.problem.first_look import first_look
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings, Tolerances

SECOND_STEPS = tuple(2.0 ** -(3 + 2 * k) for k in range(11))
"""Steps of second differences, relative to max(|x|, 1) of a coordinate. The differences of the last steps show only
rounding."""

MAX_NOISE = 2.0**10
"""Largest noise of second differences, in units of rounding. If the differences at the finest steps scatter more, no
step is small enough, for example because all steps cross a pole."""

CLOSER_SHARE = 2.0**-6
"""Factor from the step of one-sided derivatives to a smaller step. At a kink, the gap between the derivatives does not
shrink; on a smooth curve, it shrinks with the step."""

EXACT = 64.0
"""Least size of a change, in units of the smallest one, for which rounding inside func hardly matters."""

DIRECTIONS_ELSEWHERE = 2
"""Number of random directions whose derivatives show the size of entries outside a pattern."""

LEAST_COMPONENT = 0.25
"""An entry outside a pattern is multiplied by a component of a direction, at least 0.5, or, if it was added to another
entry, by the difference of two components. In two directions, one is at least this large with a probability of 0.95."""


@dataclass(frozen=True)
class Differences:
    """A Jacobian over real coordinates: entries that are not listed are zero.

    Attributes
    ----------
    inputs, outputs
        The coordinates of each tensor; outputs that are neither floating nor complex tensors are left out.
    is_compressed
        Whether a structure was found, so that not all entries are listed.
    rows, columns
        The row and column of each entry: int64, shape (entries,).
    values, errors
        The entries and their estimated errors: float64, shape (entries,). An error is infinite if no two steps agree.
    error_elsewhere
        The error of entries that are not listed: larger ones would probably have been noticed.
    """

    inputs: tuple[Block, ...]
    outputs: tuple[Block, ...]
    is_compressed: bool
    rows: Tensor
    columns: Tensor
    values: Tensor
    errors: Tensor
    error_elsewhere: float


def jacobian_by_differences(func: Callable[..., Any], inputs: Sequence[Tensor], needs_errors: bool) -> Differences:
    """The Jacobian of func, a tuple of Tensors, at strided inputs: about 40 evaluations per group of columns.

    needs_errors: whether errors are used. If so, a sparsity pattern takes two `derivative_along` more.
    """
    with _problem(func, inputs) as problem:
        settings = _detection_settings(problem)
        none = torch.zeros(0, dtype=torch.float64, device=problem.device)
        found, parts = None, [(none.long(), none.long(), none, none)]
        if problem.n and problem.m:
            look = first_look(problem, settings)
            found = numerical_entries(problem, settings, look)
            for columns, rows in _groups(problem, None if found is None else found[0]):
                parts.append((rows, columns, *_refined(problem, columns, rows, look.record_graph)))
        rows, columns, values, errors = (torch.cat(side) for side in zip(*parts, strict=True))
        blocks, elsewhere = (problem.inputs, problem.outputs), 0.0 if found is None else found[2]
    result = Differences(*blocks, found is not None, rows, columns, values, errors, elsewhere)
    return _with_error_elsewhere(func, inputs, result) if needs_errors and found is not None else result


def _with_error_elsewhere(func: Callable[..., Any], inputs: Sequence[Tensor], found: Differences) -> Differences:
    """A compressed Jacobian with the errors that derivatives along random directions show.

    The bound of the pattern's certificate is used instead where it is smaller, unless a derivative contradicts it. An
    entry outside the pattern may have been added to one in the pattern, so its size is part of all errors.
    """
    n, m = (sum(block.size for block in blocks) for blocks in (found.inputs, found.outputs))
    largest_shown, least_shown = torch.zeros(2, m, dtype=torch.float64, device=found.values.device)
    primals = [value.detach() for value in inputs]
    for number in range(DIRECTIONS_ELSEWHERE):
        vector = direction(n, 0, SKETCH_DIRECTIONS + 16 * number, device=largest_shown.device)
        tangents = [torch.zeros_like(value, memory_format=torch.contiguous_format) for value in primals]
        for block in found.inputs:
            ops.unflatten_(tangents[block.position], vector[block.slice])
        _, derivative, error = derivative_along(func, primals, tangents)
        factors = vector[found.columns]
        unexplained = derivative.index_add(0, found.rows, -factors * found.values).abs()
        error = error.index_add(0, found.rows, factors.abs() * found.errors)
        largest_shown = torch.maximum(largest_shown, unexplained + error)
        least_shown = torch.maximum(least_shown, (unexplained - error).nan_to_num(0.0))
    bound = (largest_shown / LEAST_COMPONENT).nan_to_num(math.inf).clamp(max=found.error_elsewhere)
    elsewhere = largest(torch.maximum(bound, least_shown / LEAST_COMPONENT))
    return replace(found, errors=found.errors + elsewhere, error_elsewhere=elsewhere)


def _step(problem: Problem) -> float:
    """The step within which func should be nearly linear: that of checks, or a larger one for lower precision."""
    return min(LARGEST_STEP, max(Settings().eps, math.sqrt(2 * problem.unit_roundoff)))


def _detection_settings(problem: Problem) -> Settings:
    """Settings with a step at which rounding hides no entry of atol outside a pattern, but at most LARGEST_STEP.

    A refined column takes forty evaluations. Therefore, any sparse pattern pays off.
    """
    base = problem.base()
    atol = atol_outside(base)
    eps = min(LARGEST_STEP, max(_step(problem), 4 * problem.unit_roundoff * largest(base) / atol))
    return Settings(eps=eps, atol=atol, engine="compressed" if problem.n >= MIN_COLUMNS_FOR_PROBING else "auto")


def _groups(problem: Problem, compression: Compression | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the columns and rows of the entries of each column group; without a compression, of each column."""
    if compression is None:
        every = torch.arange(problem.m, device=problem.device)
        yield from ((torch.full_like(every, column), every) for column in range(problem.n))
        return
    for entries in compression.column_groups.entries():
        if entries.numel():
            yield compression.columns[entries], compression.rows[entries]


def _refined(problem: Problem, columns: Tensor, rows: Tensor, record_graph: bool) -> tuple[Tensor, Tensor]:
    """Derivatives and their errors, float64, shape (entries,).

    At a kink, the error is at least half of the difference between the one-sided derivatives.
    """
    settings, eps = Settings(), _step(problem)
    own = Tolerances(atol=settings.atol, rtol=0.0)
    one = measured(problem, columns, rows, record_graph, eps)
    (found,) = settled([[one]], own)
    mark_stairs(problem, record_graph, eps, columns, rows, found, own)
    mean, gap = (found.left + found.right) / 2, (found.left - found.right).abs()
    is_undecided = found.values.isnan()
    values = torch.where(is_undecided, mean, found.values)
    size = torch.maximum(found.left.abs(), found.right.abs())
    errors = torch.where(is_undecided, torch.inf, torch.maximum(found.errors, _hidden(one, found.values)))
    # Small steps at which func changes by less than its internal rounding agree on another slope, often zero.
    rounded = found.doubtful & ~is_undecided
    if bool(rounded.any()):
        first = (found.widths != 0).to(torch.int8).argmax(1, keepdim=True)
        widest = (found.changes.gather(1, first) / found.widths.gather(1, first)).squeeze(1)
        values = torch.where(rounded, widest, values)
        errors = torch.where(rounded, (widest - mean).abs() + gap, errors)
    kink = gap > 2 * settings.allowed(size)
    if bool(kink.any()):
        kink &= _gap_closer(problem, columns, rows, record_graph, eps) >= gap / 2
    return values, torch.where(kink, torch.maximum(errors.nan_to_num(posinf=0.0), gap / 2), errors)


def _hidden(one: Measured, values: Tensor) -> Tensor:
    """How far a derivative that rounding inside func hides at small steps is from `values`: shape (entries,).

    Small steps do not change 1 + x^6 next to 0.01, for example, or a term in lower precision. What larger steps show
    besides `values` may be its derivative, unless all of them show a kink.
    """
    rest, zeros = one.changes - values.nan_to_num() * one.widths, torch.zeros_like(values)
    rest = torch.where((one.widths == 0) | (rest.abs() <= ROUNDING * one.rounding), 0.0, rest)
    hiding, seen = one._replace(changes=rest), rest.isfinite() & (rest != 0)
    smallest = torch.where(seen & is_constant(hiding), rest.abs(), torch.inf).amin(0)
    hidden = hidden_derivatives(hiding, smallest, zeros, Tolerances(0.0, 0.0), zeros)
    exact = seen & (rest.abs() >= EXACT * smallest)
    kinks = kink(one.bends[:-1], one.bends[1:], one.ratio, one.steps[1:])
    least = torch.where(exact[1:] & exact[:-1], kinks, torch.inf).nan_to_num(torch.inf).amin(0)
    return torch.where(least <= KINK_SHARE * hidden, hidden, 0.0)


def _gap_closer(problem: Problem, columns: Tensor, rows: Tensor, record_graph: bool, eps: float) -> Tensor:
    """The gap between one-sided derivatives with smaller steps than eps: float64, shape (entries,)."""
    displacement = problem.displacement(ones_at(problem.n, columns, problem.device), eps)
    scales = 0.0, CLOSER_SHARE, -CLOSER_SHARE
    base, plus, minus = (problem.evaluate(record_graph, displacement, scale) for scale in scales)
    bends = (plus - base - (base - minus)).abs()
    return bends[rows] / (displacement[columns] * CLOSER_SHARE)


def derivative_along(
    func: Callable[..., Any], inputs: Sequence[Tensor], tangents: Sequence[Tensor]
) -> tuple[tuple[Block, ...], Tensor, Tensor]:
    """J u for one direction u, all inputs moved together: about 40 evaluations, or more if func may be a staircase.

    Returns
    -------
    tuple
        The coordinates of the outputs; J u and its errors, float64, shape (coordinates,).
    """
    sizes = [(largest(value.abs()), largest(tangent.abs())) for value, tangent in zip(inputs, tangents, strict=True)]
    longest = max(size for _, size in sizes)
    if not longest or not math.isfinite(longest):
        longest = 1.0
    scale = 2.0 ** math.floor(math.log2(max(1.0, *(size for size, _ in sizes)) / longest))
    dtype = max((value.dtype.to_real() for value in inputs), key=spacing)

    # The position along the line is 1 at the inputs, not 0, so that no step is smaller than the rounding of 1.
    def moved(place: Tensor) -> Any:
        step = (place - 1) * scale
        return func(*(value + step.to(value.device) * tangent for value, tangent in zip(inputs, tangents, strict=True)))

    with _problem(moved, [torch.ones((), dtype=dtype, device=inputs[0].device)]) as problem:
        every = torch.arange(problem.m, device=problem.device)
        if not problem.m:
            return problem.outputs, every.double(), every.double()
        values, errors = _refined(problem, torch.zeros_like(every), every, first_look(problem, Settings()).record_graph)
        return problem.outputs, values / scale, errors / scale


def second_derivatives(
    func: Callable[..., Any], inputs: Sequence[Tensor], v: Tensor | None
) -> tuple[tuple[Block, ...], Tensor, Tensor]:
    """The Hessian of func, which returns one real value, at real inputs, or its product with v (float64, shape (n,)).

    This takes second differences along x_i and x_i + x_j, or along x_i, v and x_i + v: n (n + 1) / 2 or 2 n + 1
    directions, with 22 evaluations each.

    Returns
    -------
    tuple
        The coordinates of the inputs; the Hessian or product and its errors, float64, shape (n, n) or (n,).
    """
    with _problem(func, inputs) as problem:
        n = problem.n
        if not n:
            nothing = torch.zeros((0, 0) if v is None else 0, dtype=torch.float64, device=problem.device)
            return problem.inputs, nothing, nothing
        scales = 2.0 ** problem.coordinates().abs().clamp(min=1.0).log2().floor()
        record_graph = first_look(problem, Settings()).record_graph
        base = problem.base()

        def axis(i: int) -> Tensor:
            direction = torch.zeros(n, dtype=torch.float64, device=problem.device)
            direction[i] = scales[i]
            return direction

        def bend(direction: Tensor) -> Tensor:
            return _second_differences(problem, record_graph, base, direction)

        own = [bend(axis(i)) for i in range(n)]
        rounding = 2 * problem.unit_roundoff * base.abs().clamp(min=1.0)
        if v is None:
            pairs = list(combinations(range(n), 2))
            mixed = [(bend(axis(i) + axis(j)) - own[i] - own[j]) / 2 for i, j in pairs]
            values, errors = _settled_bends([*own, *mixed], rounding)
            i, j = torch.tensor([*((i, i) for i in range(n)), *pairs], device=values.device).unbind(1)
            matrices = torch.zeros(2, n, n, dtype=torch.float64, device=values.device)
            matrices[:, i, j] = matrices[:, j, i] = torch.stack([values, errors]) / (scales[i] * scales[j])
            return problem.inputs, matrices[0], matrices[1]
        v = v.to(problem.device)
        length = float((v / scales).abs().max()) or 1.0
        along = bend(v / length)
        mixed = [(bend(axis(i) + v / length) - own[i] - along) / 2 for i in range(n)]
        values, errors = _settled_bends(mixed, rounding)
        return problem.inputs, values * length / scales, errors * length / scales


def _second_differences(problem: Problem, record_graph: bool, base: Tensor, direction: Tensor) -> Tensor:
    """(f(x + h d) - 2 f(x) + f(x - h d)) / h^2 for each h in SECOND_STEPS: shape (steps,); NaN where func raises."""
    bends = torch.full((len(SECOND_STEPS),), torch.nan, dtype=torch.float64, device=base.device)
    for s, step in enumerate(SECOND_STEPS):
        try:
            plus, minus = (problem.evaluate(record_graph, direction, sign * step)[0] for sign in (1.0, -1.0))
        except Exception as error:  # the point may be outside func's domain; a smaller step may stay inside
            raise_unless_of_func(error)
            if step == SECOND_STEPS[-1]:
                raise
            continue
        bends[s] = (plus - base[0] + (minus - base[0])) / step**2
    return bends


def _settled_bends(bends: list[Tensor], rounding: Tensor) -> tuple[Tensor, Tensor]:
    """Second derivatives and their errors from second differences; if no two steps agree, those of the middle step."""
    slopes = torch.stack(bends, 1)
    widths = torch.tensor(SECOND_STEPS, dtype=torch.float64, device=slopes.device).square().unsqueeze(1)
    noise = 4 * rounding.expand(slopes.shape[1])
    values, errors = extrapolate(slopes, widths.expand_as(slopes), noise, RATIO, MAX_NOISE * noise)
    return torch.where(values.isnan(), slopes[len(slopes) // 2], values), errors


@contextmanager
def _problem(func: Callable[..., Any], inputs: Sequence[Tensor]) -> Iterator[Problem]:
    """A context with a problem of func without gradients, at copies of the inputs, for differences of all outputs."""

    def plain(*arguments: Tensor) -> tuple[Tensor, ...]:
        return tuple(output.detach() for output in func(*arguments))

    copies = tuple(value.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for value in inputs)
    # func may itself use autograd, which must work in any grad mode of the caller.
    with torch.enable_grad(), Problem(plain, copies, warn_of_precision=False) as problem:
        yield problem
