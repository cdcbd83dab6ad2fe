"""Evidence after a failure, and probable causes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fastgrad.report.json_form import EqualByContent

ValueCause = Literal["constant factor", "sign", "zero gradient", "missing conjugate", "complex factor"]
RearrangementCause = Literal["transposed", "rolled", "permuted", "missing reduction", "overwritten", "wrong dimension"]
FormulaCause = Literal["swapped gradients", "repeated gradient", "missing factor", "missing term", "constant part"]
PositionCause = Literal["region", "slice", "boundary", "last tile", "triangle"]
StateCause = Literal["saved tensor", "nondeterminism", "dependent inputs"]
GradOutputCause = Literal["nonlinear backward", "layout of grad_output", "sparse grad_output", "modified grad_output"]
NumericalCause = Literal["truncation", "rounding", "kink", "discontinuity", "low precision", "not finite"]
ModeCause = Literal["modes disagree", "both modes wrong"]

CauseName = Literal[
    ValueCause, RearrangementCause, FormulaCause, PositionCause, StateCause, GradOutputCause, NumericalCause, ModeCause
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
        A sentence without its period.
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
        Shape of the output.
    input_shape
        Shape of the input.
    outputs
        The number, in C order, of the output element of each entry: int64, shape (entries,).
    inputs
        The number, in C order, of the input element of each entry: int64, shape (entries,).
    analytical
        The derivatives by autograd: float64 or complex128, shape (entries,).
    numerical
        The derivatives by differences at eps, of the same dtype and shape.
    failing
        Which entries differ by more than their tolerance: bool, shape (entries,).
    input_values
        The value of the input element of each entry, shape (entries,).
    output_values
        The value of the output element of each entry at x, shape (entries,).
    complete
        Whether all other entries are zero in both Jacobians.
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
    """A hypothesis that agrees with sums of all entries of the failing Jacobian, with random weights.

    Attributes
    ----------
    name
        The cause.
    text
        Description of the hypothesis.
    error
        The largest error of the sums, relative to the sum of the moduli of their terms.
    """

    name: CauseName
    text: str
    error: float


@dataclass(frozen=True, eq=False)
class Evidence(EqualByContent):
    """Results of the experiments after a failure; None if an experiment was not run, exceeded the budget, or raised.

    Unless stated otherwise, a gradient is the VJP of one random dense cotangent v with respect to all inputs. After a
    mismatch, v is zero outside the failing output. The deviation of a gradient from another one is their largest
    difference, divided by the largest component of the other one.

    Attributes
    ----------
    calls
        Number of calls of func and backward, in addition to those that the report counts.
    func_varies
        The largest difference between the outputs of two evaluations at x.
    runs
        Per graph, the deviations of its gradients from the first gradient of the first graph.
    draws
        Whether backward draws random numbers from torch's CPU generator.
    vanishes
        Whether the gradient is zero at the input elements of all failing entries.
    after_others
        Deviation of a gradient whose graph was recorded before func was evaluated at another point, from a gradient
        without this evaluation.
    after_call
        Deviation of a gradient whose graph was recorded after func was evaluated at another point, from one whose graph
        was recorded after an evaluation at x.
    scaled
        For each scale c: c; the deviation of 1/c times the gradient for c v; and the largest component of the gradient
        for c v, divided by that of the gradient for v.
    at_zero
        The largest component of the gradient for a zero cotangent.
    split
        Deviation of the sum of the gradients for three parts of v, one of which has a single nonzero element.
    added
        Deviation of the sum of the gradients for two dense vectors that add up to v.
    non_contiguous
        Deviation of the gradient for a non-contiguous v from the gradient for its contiguous copy. It is infinite if
        only one of the two gradients is finite, or if only the gradient for the copy is zero.
    offset
        The same for a v with a storage offset.
    expanded
        The same for a constant v, expanded with stride 0.
    non_contiguous_error
        The exception for a non-contiguous v, if its contiguous copy raises none; non_contiguous is then None.
    offset_error, expanded_error
        The exception for a v at a storage offset, and for an expanded v.
    modified
        If backward writes into its grad_output: deviation of the gradient from the gradient of a backward that gets a
        copy of grad_output.
    dense_error
        ``|v^T J u - v . (difference along u)|`` for one random u, divided by the sum of the moduli of its terms.
    output_dtype
        The narrowest dtype that exactly represents the failing output at a point next to x, if it is narrower than
        double. Only finite, non-integer values count, and only those that differ from the values at x.
    slopes
        Pairs of a large step and the central difference quotient of the worst entry for this step.
    rounding
        The machine epsilon of the output's dtype, times the modulus of the worst entry's output coordinate.
    other_mode
        The worst entry, computed by the mode of AD that did not fail.
    adjoint_error
        As in `fastgrad.AdjointTest.error`.
    other_part
        The analytical and the numerical value of the worst entry in the part of a complex output that did not fail; in
        forward mode, of a complex input.
    explanation
        A hypothesis that explains the analytical Jacobian: for example a rearrangement of the numerical one, or the
        Jacobian of another function.
    places
        Texts of causes that were derived from the positions of wrong entries in a sample, and whether random sums over
        the other entries confirm these causes.
    """

    calls: int = 0
    func_varies: float | None = None
    runs: tuple[tuple[float, ...], ...] | None = None
    draws: bool | None = None
    vanishes: bool | None = None
    after_others: float | None = None
    after_call: float | None = None
    scaled: tuple[tuple[float, float, float], ...] | None = None
    at_zero: float | None = None
    split: float | None = None
    added: float | None = None
    non_contiguous: float | None = None
    offset: float | None = None
    expanded: float | None = None
    non_contiguous_error: str | None = None
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
    places: tuple[tuple[str, bool], ...] | None = None
