"""A map of the errors in the shape of a tensor, as an SVG with values on hover."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

import numpy as np
from numpy.typing import NDArray

MAX_TILES = 36
"""Largest number of tiles that are drawn for a tensor of more than two dimensions."""

MAX_CELLS = 2048
"""Largest number of cells in all tiles together; for larger tensors, a cell shows several elements."""

MAX_ACROSS = 48
"""Largest number of cells in a row, over all adjacent tiles."""

CELL, GAP = 16, 10
"""Width and height of a cell, and the space between tiles, in pixels."""

DECADES = 4.0
"""Ratios of error to tolerance are distinguished by color up to this many powers of ten above and below 1."""

WITHIN, BEYOND = ((198, 219, 231), (127, 178, 207)), ((244, 162, 89), (143, 29, 44))
"""Colors (red, green, blue) of the smallest and the largest errors: within the tolerance, and beyond it."""


def color(excess: float) -> str:
    """The color of an error as #rrggbb; excess: the ratio of error to tolerance."""
    decades = math.log10(excess) if 0 < excess < math.inf else math.copysign(math.inf, excess - 1)
    low, high = BEYOND if decades > 0 else WITHIN
    share = min(max(decades, -DECADES), DECADES) / DECADES + (decades <= 0)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(low, high, strict=True))


def svg(
    shape: tuple[int, ...], numbers: NDArray[np.int64], excess: NDArray[np.float64], words: Callable[[int], str]
) -> tuple[str, str]:
    """The map of a tensor, and a note about its tiles and cells.

    Parameters
    ----------
    shape
        Shape of the tensor.
    numbers, excess
        For each error, the number of its element in C order, and the ratio of the error to the allowed error.
    words
        Gives the hover text of an error from the position of the error in `numbers`.
    """
    *leading, height, width = (1, 1, *shape)
    leading = [size for size in leading if size > 1] or [1]
    tiles, rest = np.divmod(numbers, height * width)
    count = math.prod(leading)
    shown = _shown(count, tiles, excess)
    wide = -(-width // MAX_ACROSS)
    columns = -(-width // wide)
    high = -(-height // max(1, MAX_CELLS // (len(shown) * columns)))
    rows = -(-height // high)
    place = {tile: k for k, tile in enumerate(shown)}
    worst: dict[tuple[int, int, int], int] = {}
    for entry in np.argsort(excess, kind="stable"):  # a larger error replaces a smaller one in its cell
        tile = place.get(int(tiles[entry]))
        if tile is not None:
            worst[tile, int(rest[entry]) // width // high, int(rest[entry]) % width // wide] = int(entry)
    across = leading[-1] if len(shown) == count else round(math.sqrt(len(shown) * rows / columns))
    across = max(1, min(across, MAX_ACROSS // columns))
    parts = []
    for tile in range(len(shown)):
        top, left = (tile // across) * (rows * CELL + GAP), (tile % across) * (columns * CELL + GAP)
        for row, column in np.ndindex(rows, columns):
            known = worst.get((tile, row, column))
            title = f"<title>{escape(words(known))}</title>" if known is not None else ""
            parts.append(
                f'<rect x="{left + column * CELL}" y="{top + row * CELL}" width="{CELL - 1}" height="{CELL - 1}" '
                f'fill="{"none" if known is None else color(float(excess[known]))}" stroke="currentColor" '
                f'stroke-opacity=".25">{title}</rect>'
            )
    right = min(across, len(shown)) * (columns * CELL + GAP) - GAP
    bottom = -(-len(shown) // across) * (rows * CELL + GAP) - GAP
    drawn = f'<svg viewBox="-1 -1 {right + 2} {bottom + 2}" style="max-width: {right + 2}px">{"".join(parts)}</svg>'
    notes = []
    if len(shape) > 2:
        of_tiles = f"the {len(shown)} of {count} with the largest errors are shown" if len(shown) < count else ""
        dimensions = "dimension" if len(shape) == 3 else f"{len(shape) - 2} dimensions"
        notes.append(f"There is a tile for each index of the first {dimensions}{'; ' if of_tiles else ''}{of_tiles}.")
    if high * wide > 1:
        notes.append(f"A cell shows the worst of {high} x {wide} elements.")
    return drawn, " ".join(notes)


def _shown(count: int, tiles: NDArray[np.int64], excess: NDArray[np.float64]) -> list[int]:
    """The numbers of the tiles that are drawn, in increasing order: all, or those with the largest errors."""
    if count <= MAX_TILES:
        return list(range(count))
    worst_first = tiles[np.argsort(-excess, kind="stable")]
    return sorted(int(tile) for tile in list(dict.fromkeys(worst_first.tolist()))[:MAX_TILES])
