"""The grad_outputs of a small check in fast mode."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fastgrad.core import native
from fastgrad.core.native import Layout
from fastgrad.engines.blocks import MAX_AT_ONCE, REPEAT_SCALE, one_hot_elements
from fastgrad.engines.sketch import cotangents, imaginary_parts

REPEATED, RUNS = 1, 3
"""The number of the cotangent whose VJP is run several times, and the number of runs. Three runs also detect gradients
that change only every second or third time."""

_Layout = tuple[tuple[int, int, int], ...]
"""For each output: its first coordinate, the number of coordinates per element, and the number of elements."""


def _one_hot_coordinates(layout: _Layout, seed: int) -> dict[int, int]:
    """Maps the coordinate of each one-hot grad_output to the number of its output."""
    return {
        first + element * width + imaginary: output
        for imaginary in (1, 0)
        for output, (first, width, elements) in enumerate(layout)
        if imaginary < width and elements
        for element in one_hot_elements(elements, seed)
    }


class ScreeningGradOutputs(NamedTuple):
    """The grad_outputs of a small check in fast mode, each of which serves several tests.

    The random cotangents of the sketch are contiguous or not, have a random half of their elements zero, are mostly
    zero, or are expanded. If there are several outputs, one cotangent is also run for each output separately. For
    custom code, there are also one-hot grad_outputs and, if outputs are complex, a real one. Without custom code, no
    cotangent is half zero, because the mostly zero one shows how kernels treat zeros; it is nonzero at the last element
    of each output, where kernels may take another path. If the only output is a number, one dense and one constant
    cotangent are enough: no layout differs, and no element can be zero.

    Attributes
    ----------
    vectors
        Float64, shape (rows, m).
    layouts, only
        Per row, its layout, and the number of the only output that gets a grad_output; -1: all outputs get one.
    shares
        Per row, the allowed error of its sums, relative to that of a dense cotangent; infinite: no comparison.
    early, early_only
        The vectors for the first graph: REPEAT_SCALE times row REPEATED and, for custom code, row `again`; and for each
        the number of its only output, as in `only`.
    again
        Number of the row that is one-hot at the last coordinate; -1: there is none.
    one_hot
        The coordinate of each one-hot row, by the number of the row.
    separate
        Numbers of the rows that equal row REPEATED, for each output separately.
    expanded
        Number of the row that is expanded.
    of_all
        Number of rows before those of `separate`.
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


def screening_grad_outputs(layout: _Layout, seed: int, count: int, is_custom: bool) -> ScreeningGradOutputs:
    """The grad_outputs for outputs of this layout; `count` of them are random and dense."""
    m = sum(width * elements for _, width, elements in layout)
    make = _unweighted_grad_outputs if m <= MAX_AT_ONCE else _unweighted_grad_outputs.__wrapped__
    return make(layout, seed, count, is_custom, m)


@lru_cache(64)
def _unweighted_grad_outputs(layout: _Layout, seed: int, count: int, is_custom: bool, m: int) -> ScreeningGradOutputs:
    return weighted_grad_outputs(layout, seed, count, is_custom, torch.ones(m, dtype=torch.float64))


def weighted_grad_outputs(
    layout: _Layout, seed: int, count: int, is_custom: bool, weight: Tensor
) -> ScreeningGradOutputs:
    """The same with a weight per output coordinate, shape (m,); one-hot rows and the expanded row are not weighted."""
    pairs = [slice(first, first + 2 * elements) for first, width, elements in layout if is_custom and width == 2]
    random = list(cotangents(seed, weight, count, 0, imaginary_parts(weight, pairs)))
    if not is_custom:
        del random[count]  # removes the cotangent that is half zero
    is_number = weight.numel() == 1
    if is_number:
        random = [random[-1], random[REPEATED]]
    expanded = 0 if is_number else len(random) - 1
    found = _one_hot_coordinates(layout, seed) if is_custom else {}
    if is_custom:
        # One more coordinate, inside the outputs, because the rows of their last elements may be zero.
        found.setdefault((seed + weight.numel() // 2) % weight.numel(), -1)
    one_hot = dict(enumerate(found, len(random)))
    of_all = len(random) + len(one_hot)
    separate = list(range(of_all, of_all + len(layout))) if len(layout) > 1 else []
    vectors = native.empty_vectors([of_all + len(separate), weight.numel()])
    rows = vectors.unbind()
    for row, one in zip(rows, random, strict=False):
        one.fill_(row)
    for number, coordinate in one_hot.items():
        rows[number].zero_()[coordinate] = 1.0
    for number in separate:
        rows[number].copy_(rows[REPEATED])
    if not is_custom and not is_number:
        mostly_zero = rows[expanded - 1]
        for first, width, elements in layout:
            last = slice(first + width * max(0, elements - 1), first + width * elements)
            mostly_zero[last] = torch.where(mostly_zero[last] == 0, weight[last], mostly_zero[last])
    layouts = [one.layout for one in random] + [Layout.CONTIGUOUS] * (len(rows) - len(random))
    only = [-1] * len(random) + [*found.values()] + list(range(len(separate)))
    shares = [abs(one.scale) for one in random] + [1.0] * len(one_hot) + [math.inf] * len(separate)
    again = max(one_hot, key=one_hot.__getitem__, default=-1)
    early = torch.stack([rows[REPEATED] * REPEAT_SCALE] + ([rows[again]] if is_custom else []))
    early_only = [-1] + ([only[again]] if is_custom else [])
    return ScreeningGradOutputs(
        vectors, layouts, only, shares, early, early_only, again, one_hot, separate, expanded, of_all
    )
