"""Evidence after a failure, and probable causes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fastgrad.report.json_form import EqualByContent

CauseName = Literal[
    "constant factor",
    "sign",
    "transposed",
    "rolled",
    "permuted",
    "missing reduction",
    "overwritten",
    "wrong dimension",
    "swapped gradients",
    "repeated gradient",
    "missing factor",
    "missing term",
    "constant part",
    "zero gradient",
    "missing conjugate",
    "complex factor",
    "region",
    "slice",
    "boundary",
    "last tile",
    "triangle",
    "saved tensor",
    "race",
    "nonlinear backward",
    "layout of grad_output",
    "sparse grad_output",
    "modified grad_output",
    "dependent inputs",
    "truncation",
    "rounding",
    "kink",
    "low precision",
    "not finite",
    "modes disagree",
    "both modes wrong",
]
"""The names of probable causes."""

RankCauseName = Literal[
    "reduction missing between ranks", "reduced twice", "number of ranks", "wrong shard", "one rank"
]
"""The names of probable causes between ranks."""


@dataclass(frozen=True)
class Cause:
    """A probable cause of a failure.

    Attributes
    ----------
    name
        One of the names above.
    text
        A sentence for people, without its period.
    measure
        The evidence, for example a residual or a count.
    confidence
        From 0 to 1.
    """

    name: CauseName | RankCauseName
    text: str
    measure: str
    confidence: float


@dataclass(frozen=True, eq=False)
class Sample(EqualByContent):
    """Entries of the failing Jacobian of one output with respect to one input, right and wrong ones.

    Attributes
    ----------
    output_shape
        Of the output.
    input_shape
        Of the input.
    outputs
        The element of the output that each entry is about, in C order: int64, shape (entries,).
    inputs
        The same of the input.
    analytical
        The derivatives by autograd: float64 or complex128, shape (entries,).
    numerical
        The derivatives by differences at eps, of the same dtype and shape.
    failing
        Which entries differ by more than their tolerance: bool, shape (entries,).
    input_values
        The elements of the input at x, shape (entries,).
    output_values
        The elements of the output at x, shape (entries,).
    complete
        Whether the entries that are not here are zero on both sides.
    """

    output_shape: tuple[int, ...]
    input_shape: tuple[int, ...]
    outputs: Tensor
    inputs: Tensor
    analytical: Tensor
    numerical: Tensor
    failing: Tensor
    input_values: Tensor | None = None
    output_values: Tensor | None = None
    complete: bool = False


@dataclass(frozen=True)
class Explanation:
    """A hypothesis that agrees with random sums over all entries of the failing Jacobian.

    Attributes
    ----------
    name
        The cause.
    text
        What would have happened.
    error
        The error of the sums, relative to the moduli of their terms.
    """

    name: CauseName
    text: str
    error: float


@dataclass(frozen=True, eq=False)
class Evidence(EqualByContent):
    """Results of the experiments after a failure; None: not made, over the budget, or raised.

    Gradients are VJPs of one random dense cotangent v with respect to all inputs, and deviations the largest
    difference between two of them over the largest component, unless something else is said.

    Attributes
    ----------
    calls
        Of func and backward, in addition to those that the report counts.
    func_moves
        The largest difference between outputs of two evaluations at x.
    runs
        Deviations of some runs on one graph, then on a new one, and so on, from the first run.
    vanishes
        Whether the gradient is zero at all elements of the input that failing entries are about.
    after_others
        Deviation of a gradient from a graph made before func was evaluated at another point.
    scaled
        Scales c, the deviation of the gradient for c v, over c, and its size over that for v.
    at_zero
        The largest component of the gradient for a zero cotangent.
    split
        Deviation of the sum of the gradients for three parts of v, one of them a single element.
    added
        The same for v as the sum of two dense vectors.
    gapped
        Deviation for a non-contiguous v from its contiguous copy; infinite where one of them is not finite.
    offset
        Deviation for a v at a storage offset from its copy.
    expanded
        Deviation for a constant v, expanded with stride 0, from its copy.
    gapped_error
        The exception for a non-contiguous v, where its contiguous copy raises none; gapped is None then.
    offset_error, expanded_error
        The same for one at an offset, and for an expanded v.
    modified
        If a backward writes into its grad_output: deviation of the gradient from that of backwards with copies.
    dense_error
        ``|v^T J u - v . (difference along u)|``, over the sum of the moduli of its terms, for one random u.
    output_dtype
        The narrowest dtype, narrower than double, that all outputs next to x fit in without rounding.
    slopes
        Large steps, and central differences of the worst entry there.
    rounding
        One ulp of the worst entry's output.
    other_mode
        The worst entry by the mode of AD that did not fail.
    adjoint_error
        As `fastgrad.AdjointTest.error`.
    other_part
        The worst entry of the part of a complex output that did not fail, analytical and numerical.
    explanation
        A rearrangement of the numerical Jacobian that the analytical one is, or another problem whose gradient
        it is.
    """

    calls: int = 0
    func_moves: float | None = None
    runs: tuple[tuple[float, ...], ...] | None = None
    vanishes: bool | None = None
    after_others: float | None = None
    scaled: tuple[tuple[float, float, float], ...] | None = None
    at_zero: float | None = None
    split: float | None = None
    added: float | None = None
    gapped: float | None = None
    offset: float | None = None
    expanded: float | None = None
    gapped_error: str | None = None
    offset_error: str | None = None
    expanded_error: str | None = None
    modified: float | None = None
    dense_error: float | None = None
    output_dtype: str | None = None
    slopes: tuple[tuple[float, float], ...] | None = None
    rounding: float | None = None
    other_mode: complex | None = None
    adjoint_error: float | None = None
    other_part: tuple[complex, complex] | None = None
    explanation: Explanation | None = None
