"""What a check found: frozen data, no behavior beyond a few sums of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Part = Literal["all", "real", "imaginary"]
"""Which real functions of an output a row group covers: a complex output is judged part by part; in
forward mode, which coordinates of a complex input."""

Mode = Literal["reverse", "forward"]
"""The mode of AD that a failure was found in."""

GradOutputs = Literal["given", "random", "non-contiguous", "ones"]
"""How gradgradcheck came by its grad_outputs."""

FailureKind = Literal[
    "mismatch",
    "nonzero numerical gradient",
    "dtype",
    "size",
    "nondeterministic",
    "nonlinear",
    "not multiplied by grad_output",
    "incorrect gradient",
    "undefined grad raises",
    "undefined grad not zero",
    "tangent dtype",
    "undefined tangent",
    "batched raises",
    "batched differs",
]


CauseName = Literal[
    "constant factor",
    "sign",
    "transposed",
    "rolled",
    "permuted",
    "missing reduction",
    "zero gradient",
    "missing conjugate",
    "complex factor",
    "region",
    "slice",
    "boundary",
    "last tile",
    "saved tensor",
    "race",
    "nonlinear backward",
    "layout of grad_output",
    "sparse grad_output",
    "truncation",
    "rounding",
    "kink",
    "low precision",
    "modes disagree",
    "both modes wrong",
]
"""What may be behind a failure; `fastgrad.diagnose` says which, from evidence."""


@dataclass(frozen=True)
class Cause:
    """What is probably behind a failure.

    text: a sentence for people, without its period. measure: what it rests on, a residual or a count, say.
    confidence: from 0 to 1.
    """

    name: CauseName
    text: str
    measure: str
    confidence: float


@dataclass(frozen=True)
class Sample:
    """Entries of the failing Jacobian of one output with respect to one input, right and wrong ones.

    outputs, inputs: the elements of the two tensors that each entry is about (int64, shape (entries,)).
    analytical, numerical: the values (float64 or complex128, shape (entries,)).
    failing: which differ by more than their tolerance (bool, shape (entries,)).
    input_values, output_values: the elements of the input and the output at x, one an entry.
    complete: whether the entries that are not here are zero on both sides.
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


Trouble = Literal["kink", "low precision", "not converged"]
"""What re-measuring over many steps found beside, or in place of, a derivative."""


@dataclass(frozen=True)
class Evidence:
    """What experiments around a failure gave; None: not made, beyond the budget, or dropped because it raised.

    Gradients are VJPs of one random dense cotangent v with respect to all inputs, and deviations the largest
    difference between two of them over the largest component, unless something else is said.

    calls: of func and backward, beside those that the report counts.
    func_moves: the largest difference between outputs of two evaluations at x.
    runs: how far gradients of some runs on one graph, then on a new one, and so on, are from that of the first run.
    vanishes: whether the gradient is zero at all elements of the input that failing entries are about.
    after_others: deviation of a gradient from a graph made before func was evaluated at another point.
    scaled: scales c, the deviation of the gradient for c v, over c, and its size over that for v.
    at_zero: the largest component of the gradient for a zero cotangent.
    split: deviation of the sum of the gradients for three parts of v, one of them a single element.
    added: the same for v as the sum of two dense vectors.
    gapped, expanded: deviation for a non-contiguous v, and of a constant one expanded with stride 0 from its copy;
        infinite where only the other raises.
    dense_error: |v^T J u - v . (difference along u)|, over the sum of the moduli of its terms, for one random u.
    output_dtype: the narrowest dtype narrower than double that all outputs next to x fit in without rounding.
    slopes: steps, and central differences of the worst entry there; rounding is one ulp of the output.
    other_mode: the worst entry by the mode of AD that did not fail; adjoint_error: as in `AdjointTest`.
    other_part: the worst entry of the part of a complex output that did not fail, analytical and numerical.
    rearranged: a rearrangement of the numerical Jacobian that the analytical one is, and how far it is off.
    elsewhere: a point x' in words at which the gradient would be right, and how far it is off there.
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
    expanded: float | None = None
    dense_error: float | None = None
    output_dtype: str | None = None
    slopes: tuple[tuple[float, float], ...] | None = None
    rounding: float | None = None
    other_mode: complex | None = None
    adjoint_error: float | None = None
    other_part: tuple[complex, complex] | None = None
    rearranged: tuple[CauseName, str, float] | None = None
    elsewhere: tuple[str, float] | None = None


@dataclass(frozen=True)
class Settings:
    """The keywords of one check; see :func:`fastgrad.gradcheck`.

    grad_outputs: how gradgradcheck came by them; None in gradcheck.
    """

    eps: float = 1e-6
    atol: float = 1e-5
    rtol: float = 1e-3
    nondet_tol: float = 0.0
    check_undefined_grad: bool = True
    check_grad_dtypes: bool = False
    check_batched_grad: bool = False
    check_batched_forward_grad: bool = False
    check_forward_ad: bool = False
    check_backward_ad: bool = True
    fast_mode: bool = False
    masked: bool = False
    engine: str = "auto"
    seed: int = 0
    confidence: float = 1 - 1e-9
    memory_limit: int | None = None
    progress: bool | None = False
    grad_outputs: GradOutputs | None = None


@dataclass(frozen=True)
class Plan:
    """How the Jacobians are computed; nothing in it changes a verdict.

    columns_per_pass: numerical columns held at a time; every pass repeats the VJPs.
    rows_per_block: analytical rows computed, and compared, at a time.
    record_graph: whether func must record gradients while it is evaluated for differences.
    column_groups, row_groups: of a compressed Jacobian; one difference, or one VJP, serves a group. Without
    row groups, analytical columns come from differentiating the backward once more.
    detection_limit: fast mode finds errors that cancel each other in a row or a column from this size on,
    with probability `Settings.confidence`; single ones from their tolerance on.
    """

    engine: str
    columns_per_pass: int
    rows_per_block: int
    record_graph: bool
    reason: str
    detection_limit: float | None = None
    column_groups: int | None = None
    row_groups: int | None = None


def modulus(value: complex) -> float:
    """|value|; abs() raises for some complex infinities and NaNs."""
    return math.hypot(value.real, value.imag)


@dataclass(frozen=True)
class Entry:
    """One Jacobian entry, d output / d input, under the allclose rule.

    output_index and input_index address elements of the two tensors. For a complex input the values
    are complex (conjugate Wirtinger derivative, as torch reports it). allowed is atol + rtol |numerical|.
    error is how far numerical may be off, where it was re-measured over several steps.
    """

    output_index: tuple[int, ...]
    input_index: tuple[int, ...]
    analytical: complex
    numerical: complex
    allowed: float
    error: float | None = None

    @property
    def difference(self) -> float:
        """|analytical - numerical|."""
        return modulus(self.analytical - self.numerical)


@dataclass(frozen=True)
class Comparison:
    """The Jacobian of one output with respect to one input, analytical against numerical.

    sum_analytical, sum_numerical and sum_product are sums of |a|^2, |n|^2 and a conj(n) over the
    mismatched entries. exhaustive: all entries were compared; otherwise some were located, and these
    numbers are about them. The two matrices are kept only when small, in torch's layout: one row an
    input element, one column an output element; sample, where the entries of a pattern were at hand.
    """

    entries: int
    mismatches: int
    worst: Entry | None
    largest_absolute: float
    largest_relative: float
    sum_analytical: float
    sum_numerical: float
    sum_product: complex
    analytical: Tensor | None = None
    numerical: Tensor | None = None
    exhaustive: bool = True
    sample: Sample | None = None


@dataclass(frozen=True)
class Failure:
    """Why a check failed.

    output and input count the differentiable outputs and inputs, as torch's messages do;
    output_position and input_position are their places among func's results and arguments.
    detail is a clause for the message; cause is the exception behind the failure, if there was one; trouble is
    what detail says of the worst entry's derivative.
    """

    kind: FailureKind
    output: int | None = None
    input: int | None = None
    output_position: int | None = None
    input_position: int | None = None
    part: Part = "all"
    mode: Mode = "reverse"
    comparison: Comparison | None = None
    detail: str = ""
    cause: Exception | None = None
    trouble: Trouble | None = None


@dataclass(frozen=True)
class Report:
    """The outcome of one check.

    n and m count the real coordinates of the differentiable inputs and outputs; evaluations and
    vjps are the calls of func and of autograd's backward; jvps counts the evaluations that carried
    tangents; seconds is wall time. sample: entries of the pair that failed; evidence: experiments after that, not
    counted above. causes: the most probable first.
    """

    failure: Failure | None
    settings: Settings
    plan: Plan | None
    n: int
    m: int
    evaluations: int
    vjps: int
    seconds: float
    jvps: int = 0
    notes: tuple[str, ...] = ()
    sample: Sample | None = None
    evidence: Evidence | None = None
    causes: tuple[Cause, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no failure was found."""
        return self.failure is None
