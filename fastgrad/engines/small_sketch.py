"""The sketch of a small problem: all its grad_outputs in one call of native code."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fastgrad.core.native import GradientsMatch, Layout, largest_residuals
from fastgrad.core.precision import ROUNDING
from fastgrad.engines.blocks import MOST_CACHED, REPEAT_SCALE, one_hot_elements
from fastgrad.engines.sketch import Cotangent, Differences, Sketch, allowed_in_row, cotangents
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings

REPEATED, RUNS = 1, 3
"""The number of the cotangent whose VJP is run several times, and the number of runs. This also detects gradients that
change every second or third time."""

_Layout = tuple[tuple[int, int, int], ...]
"""For each output: its first coordinate, the number of coordinates per element, and the number of elements."""


@dataclass(frozen=True, slots=True)
class _GradOutputs:
    """The grad_outputs of a small sketch.

    Attributes
    ----------
    vectors
        Float64, shape (rows, m).
    layouts, only
        Per row, its layout, and the only output that gets a grad_output; -1: all outputs get one.
    cotangents, rows
        The cotangents of the sketch, and the row of each.
    repeats, separate
        Rows that hold cotangent REPEATED again, for all outputs and for each output alone.
    one_hot
        By coordinate, the row that is 1 at this coordinate.
    scaled
        By coordinate, the row that is REPEAT_SCALE at this coordinate.
    """

    vectors: Tensor
    layouts: list[Layout]
    only: list[int]
    cotangents: list[Cotangent]
    rows: list[int]
    repeats: list[int]
    separate: list[int]
    one_hot: dict[int, int]
    scaled: dict[int, int]


@dataclass(slots=True)
class SmallSketch:
    """Results of the VJPs of a small sketch.

    Attributes
    ----------
    sketch
        Gradients by the number of their cotangent. The other fields are empty if all sums are within their tolerances,
        even without an allowance for rounding.
    one_hot_agree
        Whether gradients for one-hot grad_outputs have the sizes and dtypes of the inputs, are homogeneous and agree
        with the differences.
    match
        Properties of the gradients of all rows.
    """

    sketch: Sketch
    one_hot_agree: bool
    match: GradientsMatch
    _made: _GradOutputs
    _gradients: tuple[Tensor, ...]

    @property
    def vector(self) -> Tensor:
        """Cotangent REPEATED: float64, shape (m,)."""
        return self._made.vectors[self._made.rows[REPEATED]]

    @property
    def repeats(self) -> list[Tensor]:
        """VJPs of cotangent REPEATED, from the second run on: shape (n,) each."""
        return [self._gradients[row] for row in self._made.repeats]

    @property
    def separate(self) -> Tensor | None:
        """VJPs of cotangent REPEATED for each output alone: shape (outputs, n); None for a single output."""
        rows = self._made.separate
        return torch.stack([self._gradients[row] for row in rows]) if rows else None

    @property
    def one_hot(self) -> dict[int, Tensor]:
        """Gradients, shape (n,), by the coordinate at which their grad_output is 1."""
        return {coordinate: self._gradients[row] for coordinate, row in self._made.one_hot.items()}

    @property
    def scaled(self) -> dict[int, Tensor]:
        """Gradients divided by REPEAT_SCALE, shape (n,), by the coordinate where grad_output is REPEAT_SCALE."""
        return {coordinate: self._gradients[row] / REPEAT_SCALE for coordinate, row in self._made.scaled.items()}


def small_sketch(
    problem: Problem, settings: Settings, differences: Differences, weight: Tensor, count: int, all_count: bool
) -> SmallSketch:
    """The sketch at the first step size.

    weight: one per output, shape (m,); count: number of random cotangents; all_count: whether all weights are 1.
    """
    layout = tuple((block.first, block.width, block.tensor.numel()) for block in problem.outputs)
    plain = problem.m <= MOST_CACHED and all_count
    made = (
        _cached_grad_outputs(layout, settings.seed, count, weight.device)
        if plain
        else _grad_outputs(layout, settings.seed, count, weight)
    )
    gradients, match = problem.vjps_of(made.vectors, made.only, made.layouts)
    of_rows = gradients.unbind()
    sketch = Sketch(gradients={number: of_rows[row] for number, row in enumerate(made.rows)})
    agree = _compare(problem, settings, differences, made, gradients, sketch)
    agree = agree and match.sizes and (match.dtypes or not settings.check_grad_dtypes)
    agree = agree and all(
        torch.equal(of_rows[made.one_hot[coordinate]] * REPEAT_SCALE, of_rows[row])
        for coordinate, row in made.scaled.items()
    )
    return SmallSketch(sketch, agree, match, made, of_rows)


def _compare(
    problem: Problem,
    settings: Settings,
    differences: Differences,
    made: _GradOutputs,
    gradients: Tensor,
    sketch: Sketch,
) -> bool:
    """Compares sums of analytical entries with differences.

    If a sum exceeds its tolerance before rounding is allowed for, this fills in the sketch. Returns whether the
    one-hot rows agree.
    """
    of_one_hot = settings.atol / 4
    allowed = dict.fromkeys(made.one_hot.values(), of_one_hot)
    for cotangent, row in zip(made.cotangents, made.rows, strict=True):
        allowed[row] = allowed_in_row(settings, differences, cotangent)
    largest = largest_residuals(made.vectors, differences.derivatives, gradients, differences.directions)
    if all(largest[row] <= most for row, most in allowed.items()):
        return True
    derivatives, directions = differences.derivatives.t(), differences.directions.t()
    values = (made.vectors @ derivatives).addmm_(gradients, directions, alpha=-1)
    terms = (made.vectors.square() @ derivatives.square()).addmm_(gradients.square(), directions.square()).sqrt_()
    rounding = terms.mul_(ROUNDING * problem.unit_roundoff).tolist()
    errors = values.tolist()
    for cotangent, row in zip(made.cotangents, made.rows, strict=True):
        own = allowed[row]
        most = [own if abs(e) <= own else own + more for e, more in zip(errors[row], rounding[row], strict=True)]
        sketch.cotangents.append(cotangent)
        sketch.values.append(errors[row])
        sketch.allowed.append(most)
        if not cotangent.expanded:
            sketch.allowance = max(sketch.allowance, (max(most) - own) / cotangent.scale)
    noise = differences.noise
    return all(
        abs(e) <= of_one_hot + 4 * float(noise[coordinate]) + more
        for coordinate, row in made.one_hot.items()
        for e, more in zip(errors[row], rounding[row], strict=True)
    )


@lru_cache(32)
def _cached_grad_outputs(layout: _Layout, seed: int, count: int, device: torch.device) -> _GradOutputs:
    m = sum(width * elements for _, width, elements in layout)
    return _grad_outputs(layout, seed, count, torch.ones(m, dtype=torch.float64, device=device))


def _grad_outputs(layout: _Layout, seed: int, count: int, weight: Tensor) -> _GradOutputs:
    random = list(cotangents(seed, weight, count, 0))
    by_number = [cotangent.vector() for cotangent in random]
    vectors: list[Tensor] = []
    layouts: list[Layout] = []
    only: list[int] = []

    def add(vector: Tensor, output: int = -1, layout: Layout = Layout.CONTIGUOUS) -> int:
        vectors.append(vector)
        layouts.append(layout)
        only.append(output)
        return len(vectors) - 1

    rows = [add(by_number[0], layout=random[0].layout)]
    one_hot: dict[int, int] = {}
    scaled = {}
    for coordinate, output, again in _one_hot_coordinates(layout, seed):
        one = torch.zeros_like(weight)
        one[coordinate] = 1.0
        one_hot[coordinate] = add(one, output)
        if again:
            scaled[coordinate] = add(one * REPEAT_SCALE, output)
    repeats, separate = [], []
    for number, vector in enumerate(by_number[1:], 1):
        rows.append(add(vector, layout=random[number].layout))
        if number == REPEATED:
            repeats = [add(vector) for _ in range(RUNS - 1)]
            separate = [add(vector, output) for output in range(len(layout))] if len(layout) > 1 else []
    return _GradOutputs(torch.stack(vectors), layouts, only, random, rows, repeats, separate, one_hot, scaled)


def _one_hot_coordinates(layout: _Layout, seed: int) -> list[tuple[int, int, bool]]:
    """For each one-hot grad_output: its coordinate, its output, and whether a multiple of it is run, too."""
    found = []
    for imaginary in (1, 0):
        for output, (first, width, elements) in enumerate(layout):
            if imaginary >= width or not elements:
                continue
            for number, element in enumerate(one_hot_elements(elements, seed)):
                found.append((first + element * width + imaginary, output, number == 0))
    return found


@dataclass(frozen=True, slots=True)
class ScreeningGradOutputs:
    """The grad_outputs of a small check in fast mode, each of which answers several questions.

    The random cotangents of the sketch are contiguous or not, have a random half of their elements zero, are mostly
    zero, or are expanded. With several outputs, there is also one for each output alone. For custom code, which may do
    anything, there are one-hot grad_outputs in addition. Otherwise the mostly zero one is nonzero at the last element
    of each output, where kernels may take another path.

    Attributes
    ----------
    vectors
        Float64, shape (rows, m).
    layouts, only
        Per row, its layout, and the only output that gets a grad_output; -1: all outputs get one.
    shares
        Per row, the allowed error of its sums, relative to that of a dense cotangent; infinite: no comparison.
    early, early_only
        For the first graph: REPEAT_SCALE times row REPEATED and, of custom code, row `again`.
    again
        A row that is one-hot, at the last element; -1: there is none.
    one_hot
        The rows that are one-hot, and the coordinate of each.
    separate
        Rows that are row REPEATED for each output alone.
    expanded
        The row that is expanded.
    of_all
        Rows before those of `separate`.
    """

    vectors: Tensor
    layouts: list[Layout]
    only: list[int]
    shares: list[float]
    early: Tensor
    early_only: list[int]
    again: int
    one_hot: dict[int, int]
    separate: list[int]
    expanded: int
    of_all: int


@lru_cache(64)
def screening_grad_outputs(layout: _Layout, seed: int, count: int, is_custom: bool) -> ScreeningGradOutputs:
    """The grad_outputs for outputs of this layout, `count` dense random ones among them."""
    m = sum(width * elements for _, width, elements in layout)
    return weighted_grad_outputs(layout, seed, count, is_custom, torch.ones(m, dtype=torch.float64))


def weighted_grad_outputs(
    layout: _Layout, seed: int, count: int, is_custom: bool, weight: Tensor
) -> ScreeningGradOutputs:
    """The same with a weight per output, shape (m,); one-hot rows and the expanded row have no weights."""
    random = list(cotangents(seed, weight, count, 0))
    rows = [(one.vector(), one.layout, -1, abs(one.scale)) for one in random]
    expanded, repeated = len(rows) - 1, rows[REPEATED][0]
    one_hot: dict[int, int] = {}
    if is_custom:
        found = {coordinate: output for coordinate, output, _ in _one_hot_coordinates(layout, seed)}
        # One more inside of the outputs, because there may be nothing but zeros at the ends.
        found.setdefault((seed + weight.numel() // 2) % weight.numel(), -1)
        for coordinate, output in found.items():
            one = torch.zeros_like(weight)
            one[coordinate] = 1.0
            one_hot[len(rows)] = coordinate
            rows.append((one, Layout.CONTIGUOUS, output, 1.0))
    else:
        mostly_zero = rows[expanded - 1][0]
        for first, width, elements in layout:
            last = slice(first + width * max(0, elements - 1), first + width * elements)
            mostly_zero[last] = torch.where(mostly_zero[last] == 0, weight[last], mostly_zero[last])
    of_all = len(rows)
    separate = list(range(of_all, of_all + len(layout))) if len(layout) > 1 else []
    rows += [(repeated, Layout.CONTIGUOUS, output, math.inf) for output in range(len(separate))]
    vectors, layouts, only, shares = (list(column) for column in zip(*rows, strict=True))
    again = max(one_hot, key=one_hot.__getitem__, default=-1)
    early = torch.stack([repeated * REPEAT_SCALE] + ([vectors[again]] if is_custom else []))
    early_only = [-1] + ([only[again]] if is_custom else [])
    return ScreeningGradOutputs(
        torch.stack(vectors), layouts, only, shares, early, early_only, again, one_hot, separate, expanded, of_all
    )
