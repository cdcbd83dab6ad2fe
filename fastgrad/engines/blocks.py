"""Blocks of both Jacobians, which the dense engine yields and the caller compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fastgrad.core.native import GradientsMatch, UnspecifiedEntry
from fastgrad.problem.coordinates import Block
from fastgrad.report.failure import Part

REPEATED_ROWS = 2
"""Number of rows of each part of an output that are run twice, to detect a backward that is not deterministic in these
rows. Torch's checker runs all rows twice; here, repeated VJPs of dense vectors test the other rows."""

REPEAT_SCALE = -4.0
"""The factor of the cotangent in the second run. Because its sign and size differ from those of 1, the second run
also detects a backward that clamps grad_output (at less than 4), takes its sign or squares it. Its size is a power of
two, so that a linear backward gives the same bits."""

MAX_AT_ONCE = 1 << 14
"""Largest number of coordinates of inputs and outputs for which many VJPs are run in one call of native code."""

MAX_CACHED = 1 << 10
"""Largest number of output coordinates for which grad_outputs are cached (40 kB), because a test suite checks many
functions of the same shapes."""


@dataclass(eq=False, repr=False, slots=True)
class JacobianBlock:
    """Rows of one output against one input, computed both ways.

    Attributes
    ----------
    first_row
        The element of the output that row 0 belongs to.
    first_column
        The coordinate of the input that column 0 belongs to.
    analytical, numerical
        float64, shape (rows, columns); the columns are real coordinates of the input.
    repeated
        The first rows again: float64, shape (repeated rows, columns). Each VJP was run a second time, directly after
        the first run, with REPEAT_SCALE times its cotangent. The result was divided by REPEAT_SCALE, which is exact.
    match
        Properties of the gradients of all inputs that these rows come from, and whether the second run gave equal
        values.
    unspecified
        Under masked semantics, the largest entry of these gradients at an element that a sparse input does not specify;
        its row is counted from first_row.
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


def row_parts(outputs: Sequence[Block]) -> list[tuple[Block, Part]]:
    """Outputs in the order of comparison: first real outputs and imaginary parts of complex ones, then real parts."""
    groups: list[tuple[Block, Part]] = [(output, "imaginary" if output.is_complex else "all") for output in outputs]
    return groups + [(output, "real") for output in outputs if output.is_complex]


def one_hot_elements(elements: int, seed: int) -> list[int]:
    """The elements of an output that get a one-hot grad_output: one chosen by seed, and the last one.

    A kernel that treats the end of a tensor separately may be wrong there only for sparse grad_outputs. Two elements
    are needed, because a backward may return the gradient of the first call again.
    """
    anywhere = seed % elements
    last = elements - 1 if anywhere != elements - 1 else 0
    return [anywhere, last] if elements > 1 else [anywhere]
