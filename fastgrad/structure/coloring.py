"""Coloring one side of a sparsity pattern: which columns, or rows, can share an evaluation.

A pattern joins vertices (e.g. columns) to targets (the rows in which a column has entries), in
CSR form: vertex k has the targets members[starts[k]:starts[k + 1]], distinct and in [0, targets).
Index arrays are NumPy arrays, because torch's default device and dispatch modes do not affect these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fastgrad.core import native

Indices = np.ndarray[Any, np.dtype[np.int64]]


def color(starts: Indices, members: Indices, targets: int) -> Indices:
    """Colors such that no two vertices of one color share a target: a distance-2 coloring of one side.

    The method is first fit: each vertex in turn, in natural order, gets the lowest color that fits. The largest number
    of vertices at one target is a lower bound of the number of colors. If the coloring takes more colors, a second one
    begins with the vertices that have most targets, and the coloring with fewer colors is returned (Curtis, Powell &
    Reid 1974; Gebremedhin, Manne & Pothen 2005, section 3). The GIL is released.

    Parameters
    ----------
    starts
        Shape (vertices + 1,), ascending from 0 to the number of nonzeros.
    members
        Shape (nonzeros,).
    targets
        Number of targets.

    Returns
    -------
    Indices
        Shape (vertices,). The colors 0, 1, ..., count - 1 are all used; a vertex without
        targets has color 0.
    """
    return native.color(torch.from_numpy(starts), torch.from_numpy(members), targets).numpy()


def star_color(starts: Indices, members: Indices, most: int) -> Indices | None:
    """Colors of a symmetric pattern, such that the product of a color shows each entry or its mirror image separately.

    This is a star coloring (Gebremedhin, Tarafdar, Manne & Pothen 2007): neighbors have different colors, and no path
    over four vertices has only two colors. Therefore, for each entry (i, j), row i has no second entry with the color
    of j, or row j has no second entry with the color of i. The method is first fit, in natural order or beginning with
    the vertices that have most targets. The GIL is released.

    Parameters
    ----------
    starts, members
        As in `color`; the targets are the vertices, and the pattern is symmetric, which is not checked.
        Entries on the diagonal do not matter.
    most
        The largest useful number of colors.

    Returns
    -------
    Indices or None
        Shape (vertices,), as in `color`; None if more colors are needed.
    """
    found: Indices = native.star_color(torch.from_numpy(starts), torch.from_numpy(members), most).numpy()
    return found if found.size == starts.size - 1 else None


def groups(colors: Indices, arange: Callable[[int], Indices] = np.arange) -> tuple[Indices, Indices]:
    """The groups, that is, the vertices of each color, as `bucket` returns them."""
    return bucket(colors, int(colors.max()) + 1 if colors.size else 0, arange)


def bucket(keys: Indices, count: int, arange: Callable[[int], Indices] = np.arange) -> tuple[Indices, Indices]:
    """The positions of each key in [0, count), by a counting sort.

    Returns (order, starts), shapes (keys,) and (count + 1,): key c is at the positions
    order[starts[c]:starts[c + 1]], ascending. arange: makes the order if count is 1.
    """
    if count == 1:
        return arange(keys.size), np.array([0, keys.size])
    order, starts = native.bucket(torch.from_numpy(keys), count)
    return order.numpy(), starts.numpy()


def transpose(starts: Indices, members: Indices, targets: int) -> tuple[Indices, Indices]:
    """The transposed pattern, by a counting sort.

    Parameters are those of `color`.

    Returns
    -------
    tuple
        (starts, members), shapes (targets + 1,) and (nonzeros,): target t has the vertices
        members[starts[t]:starts[t + 1]], ascending.
    """
    found = native.transpose(torch.from_numpy(starts), torch.from_numpy(members), targets)
    return found[0].numpy(), found[1].numpy()
