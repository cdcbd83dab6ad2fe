"""The grad_outputs with which every engine tests a backward, in addition to one-hot grad_outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fastgrad.core.native import Layout, ops
from fastgrad.engines.blocks import REPEAT_SCALE

CONSTANT = 1.25
"""The value of a constant grad_output. It is not 1, so that a backward that assumes 1 is detected."""

SMALL = 2.0**-10
"""The factor of a small grad_output, such as that of a mean over a thousand elements. Powers of two are exact."""

SPARSE_STRIDE = 17
"""A sparse grad_output has one nonzero element per this many elements. Kernels may take another path if more than three
quarters of the elements are zero. The number is prime, so that sizes of tensors are rarely multiples of it."""


@dataclass(frozen=True, eq=False, slots=True)
class GradOutputKind:
    """A kind of grad_output. Its VJP must be the sum of the Jacobian's rows, weighted by the grad_output's elements.

    Attributes
    ----------
    values
        "random": with magnitudes in [0.5, 1.5); "half zero": the same with a random half zero; "mostly zero": the same
        with all but one per SPARSE_STRIDE elements zero; "constant": all elements are CONSTANT.
    layout
        How the tensor lies in memory.
    text
        Its description in messages.
    short
        Its description in certificates.
    stream
        The stream of its random numbers, different for each kind, because one vector may show what another misses.
    scale
        The factor of random values.
    """

    values: Literal["random", "half zero", "mostly zero", "constant"]
    layout: Layout
    text: str
    short: str
    stream: int
    scale: float = 1.0

    def fill_(self, vector: Tensor, seed: int, stream: int) -> None:
        """Writes its values into a vector: float64, shape (m,); stream: that of the random numbers."""
        if self.values == "constant":
            vector.fill_(CONSTANT)
            return
        ops.direction_(vector, seed, stream, 0, self.values == "half zero")
        if self.scale != 1.0:
            vector.mul_(self.scale)
        if self.values == "mostly zero":
            # One in SPARSE_STRIDE components is kept, but at least one.
            first = seed % max(1, min(vector.numel(), SPARSE_STRIDE))
            kept = vector[first::SPARSE_STRIDE].clone()
            vector.zero_()[first::SPARSE_STRIDE] = kept


NON_CONTIGUOUS = GradOutputKind(
    "random",
    Layout.NON_CONTIGUOUS,
    "a random grad_output, dense and non-contiguous",
    "dense and non-contiguous",
    stream=0,
)
HALVED = GradOutputKind(
    "half zero",
    Layout.CONTIGUOUS,
    "a random grad_output, with half of its elements zero",
    "half of it zero",
    stream=1,
    scale=REPEAT_SCALE,
)
SPARSE = GradOutputKind(
    "mostly zero",
    Layout.OFFSET,
    "a random grad_output at a storage offset, with most of its elements zero",
    "most of it zero and at a storage offset",
    stream=2,
)
EXPANDED = GradOutputKind(
    "constant",
    Layout.EXPANDED,
    "a constant grad_output, expanded with stride 0",
    "constant and expanded",
    stream=3,
)
DENSE = GradOutputKind(
    "random",
    Layout.CONTIGUOUS,
    "a random grad_output, dense and contiguous",
    "dense and contiguous",
    stream=0,  # this kind differs from NON_CONTIGUOUS only in layout
)

GRAD_OUTPUT_KINDS = NON_CONTIGUOUS, HALVED, SPARSE, EXPANDED
"""The kinds that every backward is run with."""

NOT_EXPANDED = NON_CONTIGUOUS, HALVED, SPARSE
"""The same without the kind that has no zeros where rows are excluded."""
