"""Coloring one side of a sparsity pattern: which columns, or rows, can share an evaluation.

A pattern joins vertices (the columns, say) to targets (the rows in which a column has entries), in
CSR form: vertex k has the targets members[starts[k]:starts[k + 1]], distinct and in [0, targets).
Index arrays are of NumPy: no default device or dispatch mode of torch touches them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fastgrad import _native

Indices = NDArray[np.int64]


def color(starts: Indices, members: Indices, targets: int) -> Indices:
    """Colors such that no two vertices of one color share a target: a distance-2 coloring of one side.

    First fit, each vertex in turn the lowest color that fits, in natural order; where that misses the
    lower bound, the largest number of vertices at one target, also with the vertices of most targets
    first, and the coloring with fewer colors counts (Curtis, Powell & Reid 1974; Gebremedhin, Manne &
    Pothen 2005, section 3). The GIL is released.

    Parameters
    ----------
    starts
        Shape (vertices + 1,), rising from 0 to the number of nonzeros.
    members
        Shape (nonzeros,).
    targets
        How many targets there are.

    Returns
    -------
    Indices
        Shape (vertices,). The colors 0, 1, ..., count - 1 are all used; a vertex without
        targets has color 0.
    """
    return _native.color(torch.from_numpy(starts), torch.from_numpy(members), targets).numpy()


def groups(colors: Indices) -> tuple[Indices, Indices]:
    """The vertices of each color, what is perturbed together, as `bucket` returns them."""
    return bucket(colors, int(colors.max()) + 1 if colors.size else 0)


def bucket(keys: Indices, count: int) -> tuple[Indices, Indices]:
    """Places of each key in [0, count), by a counting sort.

    Returns (order, starts), shapes (keys,) and (count + 1,): key c stands at the places
    order[starts[c]:starts[c + 1]], rising.
    """
    if count == 1:
        return np.arange(keys.size), np.array([0, keys.size])
    starts, order, _ = transpose(np.arange(keys.size + 1), keys, count)
    return order, starts


def transpose(starts: Indices, members: Indices, targets: int) -> tuple[Indices, Indices, Indices]:
    """The pattern seen from its targets, by a counting sort.

    Parameters are those of `color`.

    Returns
    -------
    tuple
        (starts, members, order), shapes (targets + 1,), (nonzeros,) and (nonzeros,): target t has the
        vertices members[starts[t]:starts[t + 1]], rising, and entry k of the transpose is entry
        order[k] of the pattern.
    """
    found = _native.transpose(torch.from_numpy(starts), torch.from_numpy(members), targets)
    return found[0].numpy(), found[1].numpy(), found[2].numpy()
