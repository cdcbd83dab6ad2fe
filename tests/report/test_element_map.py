"""Maps of errors in the shape of a tensor: every error at its place, with a limited number of cells."""

from __future__ import annotations

import re
from math import inf

import numpy as np
import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.report.element_map import CELL, GAP, MAX_CELLS, MAX_TILES, color, svg


def cells(drawn: str) -> dict[tuple[int, int], tuple[str, str]]:
    """Fill and title of each cell, by its place in pixels."""
    pattern = r'<rect x="(\d+)" y="(\d+)"[^>]*? fill="([^"]+)"[^>]*>(?:<title>([^<]*)</title>)?</rect>'
    return {(int(x), int(y)): (fill, title) for x, y, fill, title in re.findall(pattern, drawn)}


def drawn_of(shape: tuple[int, ...], errors: dict[tuple[int, ...], float]) -> tuple[dict[tuple[int, int], str], str]:
    numbers = np.array([int(np.ravel_multi_index(index, shape)) if shape else 0 for index in errors], dtype=np.int64)
    drawn, note = svg(shape, numbers, np.array(list(errors.values())), lambda entry: f"error {entry}")
    return {place: title for place, (_, title) in cells(drawn).items()}, note


def test_colors_tell_right_from_wrong() -> None:
    assert color(1.0) == "#7fb2cf"
    assert color(1.0001).startswith("#f4a2")
    assert color(0.0) == color(1e-9) == "#c6dbe7"
    assert color(inf) == color(1e9) == "#8f1d2c"


def test_a_matrix_is_drawn_as_one() -> None:
    found, note = drawn_of((2, 3), {(0, 1): 5.0, (1, 2): 7.0})
    assert len(found) == 6
    assert found[CELL, 0] == "error 0"
    assert found[2 * CELL, CELL] == "error 1"
    assert found[0, 0] == ""
    assert note == ""


def test_a_vector_is_a_row_and_a_number_a_cell() -> None:
    assert drawn_of((4,), {(2,): 1.0})[0][2 * CELL, 0] == "error 0"
    assert drawn_of((), {(): 1.0})[0] == {(0, 0): "error 0"}


def test_more_dimensions_are_tiles() -> None:
    found, note = drawn_of((2, 3, 4, 5), {(1, 2, 3, 4): 2.0, (0, 1, 0, 0): 3.0})
    assert len(found) == 120
    assert found[2 * (5 * CELL + GAP) + 4 * CELL, 4 * CELL + GAP + 3 * CELL] == "error 0"
    assert found[5 * CELL + GAP, 0] == "error 1"
    assert note == "There is a tile for each index of the first 2 dimensions."


def test_of_many_tiles_the_worst_are_drawn() -> None:
    errors = {(tile, 0, 0): float(tile) for tile in range(100)}
    found, note = drawn_of((100, 2, 2), errors)
    titles = {title for title in found.values() if title}
    assert titles == {f"error {tile}" for tile in range(100 - MAX_TILES, 100)}
    assert f"the {MAX_TILES} of 100 with the largest errors are shown" in note


@pytest.mark.parametrize("shape", [(10**9,), (10**9, 1), (1, 10**9), (30_000, 30_000), (50, 50, 300, 300)])
def test_large_tensors_are_binned_and_the_worst_error_of_a_bin_is_shown(shape: tuple[int, ...]) -> None:
    last = tuple(size - 1 for size in shape)
    found, note = drawn_of(shape, {last: 9.0, (0,) * len(shape): 2.0, (*last[:-1], last[-1] - (last[-1] > 0)): 3.0})
    assert len(found) <= MAX_CELLS
    assert "A cell shows the worst of" in note
    assert "error 0" in found.values()
    assert "error 1" in found.values()


class Halved(torch.autograd.Function):
    """A product; the gradient of one element of the second factor is half of the right one."""

    @staticmethod
    def forward(ctx: object, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)  # type: ignore[attr-defined]
        return x * y

    @staticmethod
    def backward(ctx: object, grad_output: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, y = ctx.saved_tensors  # type: ignore[attr-defined]
        gradient = grad_output * x
        gradient[1, 2] *= 0.5
        return grad_output * y, gradient


def test_a_page_shows_the_wrong_element_at_its_place() -> None:
    x, y = (torch.full((3, 4), value, dtype=torch.float64, requires_grad=True) for value in (2.0, 3.0))
    text = fastgrad.check(Halved.apply, (x, y)).to_html()
    of_input = text[text.index("Errors by element of inputs[1]") :].partition("</svg>")[0]
    wrong = {place: title for place, (fill, title) in cells(of_input).items() if fill not in ("none", "#c6dbe7")}
    assert list(wrong) == [(2 * CELL, CELL)]
    assert "d result[1, 2] / d inputs[1][1, 2]: analytical 1, numerical 2, " in wrong[2 * CELL, CELL]


def test_gauges_of_a_check_that_passed() -> None:
    report = fastgrad.check(torch.sin, torch.ones(3, dtype=torch.float64, requires_grad=True))
    text = report.to_html()
    assert text.count('<span class="gauge">') == 1
    (pair,) = report.pairs
    share = min(pair.largest_absolute / 1e-5, pair.largest_relative / 1e-3)
    assert f"{share:.1e}</span>" in text
