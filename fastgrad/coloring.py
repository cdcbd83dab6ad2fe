"""Coloring one side of a sparsity pattern: which columns, or rows, can share an evaluation.

A pattern joins vertices (the columns, say) to targets (the rows in which a column has entries), in
CSR form: vertex k has the targets members[starts[k]:starts[k + 1]], distinct and in [0, targets).
All tensors here are int64, contiguous and on the CPU, and none is mutated; others are refused with a
RuntimeError that names the argument.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgrad import _native


def color(starts: Tensor, members: Tensor, targets: int) -> Tensor:
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
    Tensor
        Int64, shape (vertices,). The colors 0, 1, ..., count - 1 are all used; a vertex without
        targets has color 0.
    """
    return _native.color(starts, members, targets)


def groups(colors: Tensor) -> tuple[Tensor, Tensor]:
    """The vertices of each color: what is perturbed together.

    Returns (order, starts): the vertices of color c are order[starts[c]:starts[c + 1]], rising.
    Shapes (vertices,) and (count + 1,) for the colors 0, 1, ..., count - 1, shape (vertices,).
    """
    count = int(colors.max()) + 1 if colors.numel() else 0
    each_its_own = torch.arange(colors.numel() + 1, dtype=torch.int64, device="cpu")
    starts, order, _ = transpose(each_its_own, colors, count)
    return order, starts


def transpose(starts: Tensor, members: Tensor, targets: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pattern seen from its targets, by a counting sort.

    Parameters are those of `color`.

    Returns
    -------
    tuple of Tensor
        (starts, members, order), shapes (targets + 1,), (nonzeros,) and (nonzeros,): target t has the
        vertices members[starts[t]:starts[t + 1]], rising, and entry k of the transpose is entry
        order[k] of the pattern.
    """
    return _native.transpose(starts, members, targets)
