"""What every engine yields: blocks of both Jacobians, for somebody else to judge."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastgrad._native import GradientsMatch
from fastgrad.coordinates import Block
from fastgrad.report import Part


@dataclass(frozen=True, slots=True)
class JacobianBlock:
    """Rows of one output against one input, computed both ways.

    Attributes
    ----------
    first_row
        The element of the output that row 0 belongs to.
    first_column
        The coordinate of the input that column 0 belongs to.
    analytical, repeated, numerical
        float64, shape (rows, columns), columns being real coordinates of the input; `repeated` holds
        the same VJPs, each run again at once.
    match
        Whether the gradients behind these rows, of all inputs, had the dtypes and sizes of their
        inputs, and whether the second run gave equal values.
    """

    output: Block
    part: Part
    input: Block
    first_row: int
    first_column: int
    analytical: Tensor
    repeated: Tensor
    numerical: Tensor
    match: GradientsMatch
