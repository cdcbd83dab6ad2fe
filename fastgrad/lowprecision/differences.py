"""Directional derivatives by differences in a lower dtype, fitted over many steps, with their uncertainty."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgrad.core.errors import raise_unless_of_func, unless_rejected
from fastgrad.core.random import PRECISION_STREAM, direction
from fastgrad.lowprecision.probes import one_row, random_cotangent, row_behind
from fastgrad.lowprecision.rounding import coarsest, largest_number, unit_roundoff
from fastgrad.problem.coordinates import block_with, per_coordinate
from fastgrad.problem.problem import Problem

Numbers = NDArray[np.float64]

STEPS = {torch.float32: (3, 36), torch.float16: (4, 32), torch.bfloat16: (4, 24)}
"""Number of steps per halving of the step, and total number. The first step is half of a coordinate's scale."""

WINDOW = 8.0
"""Ratio of the largest step of a fit to its smallest."""

STANDARD_ERRORS = 6.0
"""Number of standard errors in an uncertainty."""

ROUNDING = 2.0
"""Allowed rounding of the gradient itself in a derivative along a direction: in unit roundoffs of the modulus of the
sum of its terms, plus their 2-norm."""

LARGE = 0.2
"""If a relative error is larger than this, a fit over smaller steps must also show an error: large steps may cross a
pole or a kink."""

MIN_CHANGE = 8.0
"""Least change of an output, in its unit roundoffs, for its rounding to count as random."""

DENSE = 2
ROWS = 6
"""Numbers of combinations of all outputs, and of rows of the Jacobian, that are tested."""

PERTURBED = 4
"""Number of points next to x at which an entry of a gradient is computed to measure its condition."""

MAX_ENTRIES = 16
"""Number of entries of a wrong row that are tested separately, those with the largest contribution first."""


@dataclass(frozen=True)
class Fit:
    """The error of the gradient along a direction, measured with steps up to `largest`."""

    largest: float
    error: float
    uncertainty: float


@dataclass(frozen=True)
class Finding:
    """The result for one combination of outputs and one direction of the inputs.

    row: as in `Combination`. error: the derivative along the direction, minus that by the gradient. allowed: the
    uncertainty of the error, plus the allowed rounding of the gradient. size: the sum of the moduli of the terms of the
    gradient along the direction. is_wrong: the error exceeds `allowed` and, if it is large, a fit over smaller steps
    also shows one. step: the largest component of the direction.
    """

    row: int
    error: float
    allowed: float
    size: float
    is_wrong: bool
    step: float


@dataclass(frozen=True)
class Combination:
    """A weighted sum of outputs, or a single output, and its gradient.

    row: the coordinate of a single output; negative for a sum of several. w: the weights, shape (m,). gradient: the VJP
    of w, shape (n,).
    """

    row: int
    w: Tensor
    gradient: Tensor


def combinations(problem: Problem, seed: int) -> list[Combination]:
    """Some combinations of all finite outputs, and some rows."""
    finite = problem.base().isfinite()
    dense = [
        (-1 - number, torch.where(finite, random_cotangent(problem, seed, 40 + number), 0.0)) for number in range(DENSE)
    ]
    rows = torch.randperm(problem.m, generator=torch.Generator().manual_seed(seed))[:ROWS].tolist()
    single = [(row, one_row(problem, row).cotangents[0]) for row in rows if finite[row]]
    return [Combination(row, w, problem.vjp(w.unsqueeze(0))[0]) for row, w in dense + single]


def not_finite(problem: Problem, among: Sequence[Combination]) -> tuple[int, Finding | None] | None:
    """The coordinate of the first entry that is not finite, and its derivative by differences; None if all are finite.

    The derivative is None if differences do not determine it.
    """
    wrong = [one for one in among if not bool(one.gradient.isfinite().all())]
    if not wrong:
        return None
    coordinate = int((~wrong[0].gradient.isfinite()).nonzero()[0])
    row = row_behind(problem, wrong[0].w, lambda v: (~problem.vjp(v)[:, coordinate].isfinite()).double())
    if bool(problem.row(row)[coordinate].isfinite()):
        return coordinate, None  # only a sum of rows shows it
    # First the derivative of a combination of all outputs. If that of another row is infinite, backward multiplies it
    # by a zero of grad_output, which gives NaN, and the entry may be right.
    if _derivative(problem, -1, among[0].w, coordinate) is None:
        return coordinate, None
    return coordinate, _derivative(problem, row, one_row(problem, row).cotangents[0], coordinate)


def _derivative(problem: Problem, row: int, w: Tensor, coordinate: int) -> Finding | None:
    """The derivative of a combination along one coordinate; None unless differences show that it fits in the dtype."""
    alone = torch.zeros(problem.n, dtype=torch.float64, device=problem.device)
    alone[coordinate] = _scales(problem)[coordinate]
    w = torch.where(_changing_outputs(problem, alone), w, 0.0)  # outputs that do not change only add their rounding
    found = _finding(problem, Combination(row, w, torch.zeros_like(alone)), alone)
    if found is None:
        return None
    size = max(abs(found.error), float((w * problem.base().nan_to_num(0.0, 0.0, 0.0)).abs().max()))
    dtype = block_with(problem.inputs, coordinate).tensor.dtype
    sure = found.allowed <= LARGE * size and abs(found.error) / found.step <= largest_number(dtype)
    return found if sure else None


def _changing_outputs(problem: Problem, whole: Tensor) -> Tensor:
    """Which outputs change along a direction, for two steps to each side: bool, shape (m,)."""
    base = problem.base()
    moved = torch.zeros_like(base, dtype=torch.bool)
    for step in (0.5, -0.5, 2.0**-4, -(2.0**-4)):
        values = unless_rejected(partial(problem.evaluate, False, whole, step))
        if values is not None:  # otherwise the point is outside the domain of func
            moved |= values != base
    return moved


def findings(problem: Problem, among: Sequence[Combination], seed: int) -> Iterator[Finding]:
    """Yields one result per combination that differences can resolve."""
    scale = _scales(problem)
    for one in among:
        u = direction(problem.n, seed, PRECISION_STREAM + 16 * (60 + one.row)).to(scale.device)
        signs = torch.where(one.gradient >= 0, 1.0, -1.0)
        finding = _finding(problem, one, scale * u.abs().div(1.5) * signs)
        if finding is not None:
            yield finding


def entry_of(problem: Problem, row: int, seed: int) -> tuple[int, Finding] | None:
    """An input coordinate whose entry in a row is wrong, and the result for it; None if none is found.

    Tests the `MAX_ENTRIES` entries with the largest contributions to the row.
    """
    one = Combination(row, one_row(problem, row).cotangents[0], problem.row(row))
    scale = _scales(problem)
    for coordinate in (one.gradient * scale).abs().nan_to_num(0.0).topk(min(MAX_ENTRIES, problem.n)).indices.tolist():
        alone = torch.zeros_like(scale)
        alone[coordinate] = scale[coordinate]
        finding = _finding(problem, one, alone)
        if finding is not None and finding.is_wrong:
            movement = _movement(problem, row, coordinate, seed) * finding.step
            if abs(finding.error) > finding.allowed + movement:
                return coordinate, finding
    return None


def _movement(problem: Problem, row: int, coordinate: int, seed: int) -> float:
    """The uncertainty of an entry: the largest change, times `STANDARD_ERRORS`, if inputs move by two unit roundoffs.

    All elements of the inputs are perturbed. The rounding error of a right gradient may be that large if the gradient
    is ill-conditioned.
    """
    own, output = block_with(problem.inputs, coordinate), block_with(problem.outputs, row)
    generator = torch.Generator().manual_seed(seed)
    entries = [float(problem.row(row)[coordinate])]
    for _ in range(PERTURBED):
        points = [_perturbed(block.tensor, generator) for block in problem.inputs]
        try:
            result = _part(problem.evaluate_with(problem.inputs, points)[output.index], row - output.first)
            (gradient,) = torch.autograd.grad(result, points[own.index])
        except Exception as error:
            raise_unless_of_func(error)
            continue  # the point is outside the domain of func
        entries.append(float(_part(gradient, coordinate - own.first)))
    return STANDARD_ERRORS * max(abs(entry - entries[0]) for entry in entries)


def _perturbed(tensor: Tensor, generator: torch.Generator) -> Tensor:
    signs = torch.randint(2, tensor.shape, generator=generator, device="cpu").mul(2).sub(1).to(tensor.device)
    return (tensor.detach() * (1 + unit_roundoff(tensor.dtype) * 2 * signs)).to(tensor.dtype).requires_grad_()


def _part(tensor: Tensor, coordinate: int) -> Tensor:
    """One of the tensor's own real coordinates: shape ()."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.reshape(-1)[coordinate]


def _scales(problem: Problem) -> Tensor:
    """The scale of each coordinate, shape (n,): its magnitude, at least a tenth of its tensor's root mean square."""
    made = problem.coordinates().abs().clone()
    for block in problem.inputs:
        part = made[block.slice]
        part.clamp_(min=0.1 * float(part.square().mean().sqrt()) + 1e-6 if part.numel() else 1.0)
    return made


def _finding(problem: Problem, one: Combination, whole: Tensor) -> Finding | None:
    points = _points(problem, one, whole)
    fits = [] if points is None else _fits(*points)
    if not fits:
        return None
    terms = one.gradient * whole
    unit = unit_roundoff(coarsest([block.tensor.dtype for block in problem.inputs]))
    own = ROUNDING * unit * (abs(float(terms.sum())) + float(terms.square().sum().sqrt()))
    best = min(fits, key=lambda fit: fit.uncertainty)
    finer = [fit for fit in fits if fit.largest < 0.7 * best.largest]
    uncertainty = max([best.uncertainty, *(abs(fit.error - best.error) - fit.uncertainty for fit in finer)])
    size = float(terms.abs().sum())
    allowed = uncertainty + own
    seen = any(abs(fit.error) > fit.uncertainty + own for fit in finer)
    is_wrong = abs(best.error) > allowed and (abs(best.error) <= LARGE * size or seen)
    return Finding(one.row, best.error, allowed, size, is_wrong, float(whole.abs().max()))


def _both_sides(problem: Problem, whole: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """The outputs at x + step * whole and x - step * whole: float64, shape (m,) each."""
    return problem.evaluate(False, whole, step), problem.evaluate(False, whole, -step)


def _points(problem: Problem, one: Combination, whole: Tensor) -> tuple[int, Numbers] | None:
    """Steps per halving, and a table of five rows, with one column per step; None if few steps are usable.

    The rows are: steps; odd part of the change, minus what the gradient explains; even part of the change; random
    rounding; systematic rounding.
    """
    dtype = coarsest([block.tensor.dtype for block in problem.outputs])
    per_halving, count = STEPS.get(dtype, STEPS[torch.float32])
    used = one.w != 0
    weights = one.w[used]
    units = per_coordinate(problem.outputs, lambda block: unit_roundoff(block.tensor.dtype), problem.device)[used]
    base, rows = problem.base()[used], []
    largest = problem.base().abs().nan_to_num(0.0, 0.0, 0.0).max()
    for number in range(count):
        step = 2.0 ** (-1 - number / per_halving)
        sides = unless_rejected(partial(_both_sides, problem, whole, step))
        if sides is None:
            continue  # a point is outside the domain of func
        ahead, behind = (side[used] for side in sides)
        if not bool((ahead.isfinite() & behind.isfinite()).all()):
            continue
        left = one.gradient @ problem.realized_width(whole, step) / 2
        odd = float(weights @ (ahead - behind) / 2 - left)
        even = float(weights @ (ahead + behind - 2 * base) / 2)
        noise = units * torch.maximum(ahead.abs(), behind.abs()).clamp(min=1e-300) * weights.abs()
        still = (ahead - behind).abs() * weights.abs() < MIN_CHANGE * noise
        # An output that does not change may result from the cancellation of large numbers, and has their rounding.
        noise = torch.where(still, torch.maximum(noise, units * weights.abs() * largest), noise)
        rows.append((step, odd, even, float((noise[~still] ** 2).sum() / 6) ** 0.5, float(noise[still].sum())))
    if len(rows) < 5:
        return None
    return per_halving, np.array(rows).T


def _fits(per_halving: int, points: Numbers) -> list[Fit]:
    """Fits of one, two and three odd powers to windows of steps; uncertainties include changes between neighbors."""
    steps = points[0]
    raw: dict[tuple[int, int], Fit] = {}
    tops = list(range(0, len(steps), max(1, per_halving // 2)))
    for place, top in enumerate(tops):
        inside = (steps <= steps[top] * 1.001) & (steps >= steps[top] / WINDOW * 0.999)
        for terms in (1, 2, 3):
            if inside.sum() >= terms + 3:
                raw[place, terms] = _fit([row[inside] for row in points], terms)
    fits = []
    for (place, terms), fit in raw.items():
        around = [(place + 1, terms), (place - 1, terms), (place, terms + 1), (place, terms - 1)]
        changes = [abs(raw[key].error - fit.error) for key in around if key in raw]
        if len(changes) >= 2:
            fits.append(replace(fit, uncertainty=fit.uncertainty + max(changes)))
    return fits


def _fit(points: Sequence[Numbers], terms: int) -> Fit:
    """The coefficient of t in a fitted odd polynomial, and its uncertainty: from rounding, scatter and a kink."""
    steps, odd, even, random, systematic = points
    top = steps.max()
    noise = random + systematic
    weight = np.ones_like(steps) if not noise.max() else 1 / np.maximum(noise, 1e-3 * noise.max())
    weight = weight / weight.max()
    powers = np.stack([(steps / top) ** (2 * k + 1) for k in range(terms)], 1)
    solve = np.linalg.pinv(powers * weight[:, None]) * weight
    found = solve @ odd
    rest = odd - powers @ found
    scatter = (rest**2).sum() / (len(steps) - terms)
    own = solve[0] / top
    by_model = ((own * random) ** 2).sum() ** 0.5
    by_scatter = scatter**0.5 * (own**2).sum() ** 0.5
    bias = (np.abs(own) * systematic).sum()
    kinked = np.stack([steps / top, *[(steps / top) ** (2 * k) for k in range(1, terms + 1)]], 1)
    solve = np.linalg.pinv(kinked * weight[:, None]) * weight
    kink = abs((solve @ even)[0]) / top
    uncertainty = STANDARD_ERRORS * max(by_model, by_scatter) + bias + kink
    return Fit(float(top), float(found[0] / top), float(uncertainty))
