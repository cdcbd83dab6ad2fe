"""Blocks of both Jacobians, which every engine yields and the caller compares."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastgrad.core.native import GradientsMatch, UnspecifiedEntry
from fastgrad.problem.coordinates import Block
from fastgrad.report.failure import Part

REPEATED_ROWS = 2
"""Rows of each part of an output that are run twice, to find a backward that is not deterministic in these rows.
Torch's checker runs all rows twice; for the others see `certify`."""

REPEAT_SCALE = -4.0
"""The second cotangent against the first: another sign and size, so that a clamp up to some 5, a sign or
a square of grad_output shows too; a power of two, so that a linear backward gives the same bits."""

MOST_AT_ONCE = 1 << 14
"""Coordinates of inputs and outputs up to which many VJPs are run in one call of native code."""

MOST_CACHED = 1 << 10
"""Coordinates of the outputs up to which grad_outputs are kept, 40 kB: a suite checks many functions of the same
shapes."""


@dataclass(slots=True)
class JacobianBlock:
    """Rows of one output against one input, computed both ways.

    Attributes
    ----------
    first_row
        The element of the output that row 0 belongs to.
    first_column
        The coordinate of the input that column 0 belongs to.
    analytical, numerical
        float64, shape (rows, columns), columns being real coordinates of the input.
    repeated
        The first rows once more: each VJP was run again at once with REPEAT_SCALE times its cotangent
        and divided by that, which is exact. Float64, shape (repeated rows, columns).
    match
        Properties of the gradients behind these rows, of all inputs, and whether the second run
        gave equal values.
    unspecified
        The largest entry of the gradients behind these rows at an element that a sparse input does not
        specify, under masked semantics; its row counts from first_row.
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
    unspecified: UnspecifiedEntry | None = None


@dataclass(slots=True)
class TangentBlock:
    """Columns of one output against one input, by forward-mode AD and by differences.

    For a complex input, `part` says which of its coordinates.

    Attributes
    ----------
    first_element
        The element of the input that row 0 belongs to.
    analytical, numerical
        float64, shape (elements, real coordinates of the output): one row per column of the Jacobian.
    """

    output: Block
    part: Part
    input: Block
    first_element: int
    analytical: Tensor
    numerical: Tensor


def row_parts(outputs: tuple[Block, ...]) -> list[tuple[Block, Part]]:
    """Outputs in the order of judging: imaginary parts come, with the real outputs, before real parts."""
    groups: list[tuple[Block, Part]] = [(output, "imaginary" if output.is_complex else "all") for output in outputs]
    return groups + [(output, "real") for output in outputs if output.is_complex]


def one_hot_elements(elements: int, seed: int) -> list[int]:
    """The elements of an output that get a one-hot grad_output: one anywhere and the last.

    Code that treats the end of a tensor separately, such as a kernel's tail, may do so for sparse grad_outputs only. A
    backward may return what it kept of the first one.
    """
    anywhere = seed % elements
    last = elements - 1 if anywhere != elements - 1 else 0
    return [anywhere, last] if elements > 1 else [anywhere]
