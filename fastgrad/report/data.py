"""Results of a check as frozen dataclasses, and their plain form for JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

SCHEMA = 1
"""The version of `Report.to_dict`: it increases if a key is removed or changes its meaning (docs/report.md)."""

LARGEST_TENSOR = 4096
"""Largest number of elements of a tensor whose values `Report.to_dict` includes."""

Verdict = Literal["passed", "failed", "not converged", "undecided"]
"""The outcome of a check; "undecided" where random vectors found nothing, and cannot exclude errors below a bound;
"not converged" if an entry differs and its numerical derivative does not converge."""

Part = Literal["all", "real", "imaginary"]
"""Of a complex output, which is judged part by part; in forward mode, of a complex input. Real ones have "all"."""

Mode = Literal["reverse", "forward"]
"""The mode of AD whose derivatives were compared."""

GradOutputs = Literal["given", "random", "non-contiguous", "ones"]
"""The source of gradgradcheck's grad_outputs."""

Engine = Literal["auto", "dense", "compressed", "sketch"]
"""The engine that computes the Jacobians; "auto" chooses."""

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
    "recorded gradient",
    "batched raises",
    "batched differs",
    "beyond rounding",
    "biased",
    "not finite",
    "ranks differ",
]
"""What failed, in one or two words."""

Precision = Literal["auto", "strict"]
"""Whether functions of a lower dtype are checked by measured rounding, or by tolerances as in double precision."""

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


class EqualByContent:
    """Data with tensors; two are equal if their JSON forms are equal."""

    def _content(self) -> str:
        return json.dumps(plain(self), allow_nan=False)

    def __eq__(self, other: object) -> bool:
        """Equality; tensors of more than LARGEST_TENSOR elements are compared by shape and dtype."""
        if not isinstance(other, EqualByContent) or type(self) is not type(other):
            return NotImplemented
        return self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())


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


Trouble = Literal["kink", "low precision", "not converged", "not finite"]
"""Special properties of a derivative that re-measuring with many steps found."""


@dataclass(frozen=True)
class Tolerances:
    """The step and the tolerances for one input.

    Attributes
    ----------
    eps
        The step.
    atol
        Absolute tolerance.
    rtol
        Relative tolerance.
    """

    eps: float = 1e-6
    atol: float = 1e-5
    rtol: float = 1e-3


@dataclass(frozen=True)
class Settings(Tolerances):
    """The keywords of one check; those that are not listed here are as in `fastgrad.gradcheck`.

    Attributes
    ----------
    confidence
        Of fast mode.
    grad_outputs
        How gradgradcheck came by its grad_outputs; None in gradcheck.
    order
        Of the derivatives that are checked.
    inputs
        The tolerances of each checked input, if not all have the same; eps, atol and rtol are then the
        smallest of them.
    precision
        "strict" where the tolerances hold for every dtype.
    reference
        The name of the reference that was passed for a function of a lower dtype; None: itself, in double precision.
    reference_device
        The device that was passed for it; None: that of the function.
    """

    nondet_tol: float = 0.0
    check_undefined_grad: bool = True
    check_grad_dtypes: bool = False
    check_batched_grad: bool = False
    check_batched_forward_grad: bool = False
    check_forward_ad: bool = False
    check_backward_ad: bool = True
    fast_mode: bool = False
    masked: bool = False
    engine: Engine = "auto"
    seed: int = 0
    confidence: float = 1 - 1e-9
    memory_limit: int | None = None
    progress: bool | None = False
    grad_outputs: GradOutputs | None = None
    order: int = 1
    inputs: tuple[Tolerances, ...] = ()
    precision: Precision = "auto"
    reference: str | None = None
    reference_device: str | None = None

    def of(self, index: int) -> Tolerances:
        """The tolerances of an input, by the index of its block."""
        return self.inputs[index] if self.inputs else self

    def loosest(self) -> Tolerances:
        """The largest step and tolerances of all inputs, for sums over inputs."""
        largest = (max(getattr(own, name) for own in self.inputs) for name in ("eps", "atol", "rtol"))
        return Tolerances(*largest) if self.inputs else self


@dataclass(frozen=True)
class Plan:
    """How the Jacobians are computed; the plan does not affect the verdict.

    Attributes
    ----------
    engine
        "dense", "compressed" or "sketch".
    columns_per_pass
        Of the dense engine: numerical columns held at a time; every pass repeats the VJPs.
    rows_per_block
        Of the dense engine: analytical rows computed, and compared, at a time.
    record_graph
        Whether func must record gradients while it is evaluated for differences.
    reason
        Why this engine, or where the pattern came from.
    detection_limit
        Fast mode finds errors that cancel each other in a row or a column from this size on, with the
        probability `Settings.confidence`; single ones from their tolerance on.
    column_groups
        Of a compressed Jacobian: one difference serves a group.
    row_groups
        Of a compressed Jacobian: one VJP serves a group. Without any, analytical columns come from
        differentiating the backward once more.
    memory
        Bytes that Jacobians take at a time, estimated; None in fast mode, which holds vectors alone.
    batch
        Of the dense engine: columns whose differences come from one vmapped call of func; None: every
        evaluation is a call.
    replayed
        Whether evaluations for numerical columns, or groups of them, are replays of a CUDA graph.
    rows_replayed
        Whether VJPs for the rows of the dense engine are.
    """

    engine: str
    columns_per_pass: int
    rows_per_block: int
    record_graph: bool
    reason: str
    detection_limit: float | None = None
    column_groups: int | None = None
    row_groups: int | None = None
    memory: int | None = None
    batch: int | None = None
    replayed: bool = False
    rows_replayed: bool = False


def modulus(value: complex) -> float:
    """|value|; abs() raises for some complex infinities and NaNs."""
    return math.hypot(value.real, value.imag)


@dataclass(frozen=True)
class Entry:
    """One Jacobian entry, d output / d input, under the allclose rule.

    Attributes
    ----------
    output_index
        The element of the output.
    input_index
        The element of the input.
    analytical
        The derivative by autograd; complex for a complex input: the conjugate Wirtinger derivative, as torch
        reports it.
    numerical
        The derivative by differences.
    allowed
        ``atol + rtol |numerical|``.
    error
        Estimated error of numerical, if it was re-measured over several steps.
    """

    output_index: tuple[int, ...]
    input_index: tuple[int, ...]
    analytical: complex
    numerical: complex
    allowed: float
    error: float | None = None

    @property
    def difference(self) -> float:
        """``|analytical - numerical|``."""
        return modulus(self.analytical - self.numerical)


@dataclass(frozen=True)
class Span:
    """The indices of some entries along one dimension.

    Attributes
    ----------
    size
        Of the dimension.
    count
        Number of distinct indices.
    first
        The first of them.
    last
        The last of them.
    step
        The distance between neighboring indices, if it is constant; otherwise None.
    places
        All indices if there are few; otherwise empty.
    """

    size: int
    count: int
    first: int
    last: int
    step: int | None
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class Extent:
    """The positions of some entries.

    Attributes
    ----------
    output
        One Span per dimension of the output.
    input
        One Span per dimension of the input.
    """

    output: tuple[Span, ...]
    input: tuple[Span, ...]


@dataclass(frozen=True)
class Difference:
    """One central difference of an entry.

    Attributes
    ----------
    step
        By which the input was moved to either side; for a complex entry, its first coordinate.
    change
        The change of func in between; for a complex entry, combined from its two coordinates.
    estimate
        The derivative that follows: change over the realized distance.
    """

    step: float
    change: complex
    estimate: complex


@dataclass(frozen=True, eq=False)
class Comparison(EqualByContent):
    """The Jacobian of one output with respect to one input, analytical against numerical.

    Attributes
    ----------
    entries
        How many there are.
    mismatches
        How many differ at eps by more than their tolerance.
    worst
        The worst entry, re-measured.
    largest_absolute
        The largest absolute error at eps.
    largest_relative
        The largest relative error at eps.
    sum_analytical
        The sum of ``|a|^2`` over the mismatched entries; a: analytical, n: numerical.
    sum_numerical
        The sum of ``|n|^2``.
    sum_product
        The sum of ``a conj(n)``.
    analytical
        The matrix, if it is small, in torch's layout: one row per input element, one column per output
        element.
    numerical
        The same.
    exhaustive
        Whether all entries were compared; otherwise some were located, and the numbers are about them.
    worst_entries
        The worst first, as far as they are wrong (those with an error estimate) or look wrong at eps (those
        without).
    extent
        Where mismatched entries lie.
    on_pattern
        Whether the entries are those of the Jacobian's pattern, outside of which it is zero.
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
    worst_entries: tuple[Entry, ...] = ()
    extent: Extent | None = None
    on_pattern: bool = False


class Pair(NamedTuple):
    """An output and an input whose Jacobian was compared.

    The places, part and mode are as in `Failure`, the numbers as in `Comparison`; agrees says that no entry is
    wrong: those that differ at eps agreed once re-measured.
    """

    # Not a dataclass: every check that passes makes one, and a frozen one of as many fields takes ten times as long.
    output: int
    input: int
    output_position: int
    input_position: int
    part: Part
    mode: Mode
    entries: int
    mismatches: int
    agrees: bool
    largest_absolute: float
    largest_relative: float
    on_pattern: bool


@dataclass(frozen=True)
class Certificate:
    """A statement that random vectors certify, instead of comparing every entry.

    Attributes
    ----------
    claim
        A sentence without its period.
    method
        The vectors, and what they were compared with.
    bound
        An error of one entry is detected from this size on, apart from rounding.
    """

    claim: str
    method: str
    bound: float


@dataclass(frozen=True)
class Environment:
    """Versions, and the device of the outputs."""

    fastgrad: str
    torch: str
    python: str
    device: str


@dataclass(frozen=True)
class Subject:
    """The function and tensors of a failed check.

    Attributes
    ----------
    function
        The name of func; empty if it has none.
    parameters
        Names of func's arguments, as far as known.
    inputs
        Dtype and shape of each of func's arguments up to the last checked one, for example ``float64[3, 4]``; empty if
        it is not checked.
    outputs
        The same of each differentiable output.
    source
        File and line of the custom backward, or of func if it has none: ``ops.py:12``; empty if unknown.
    test
        The id of the test that runs, under pytest.
    """

    function: str = ""
    parameters: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    source: str = ""
    test: str = ""


@dataclass(frozen=True, eq=False)
class Failure(EqualByContent):
    """Why a check failed.

    Attributes
    ----------
    kind
        What failed.
    output
        Counts the differentiable outputs, as torch's messages do.
    input
        Counts the differentiable inputs.
    output_position
        The place among func's results.
    input_position
        The place among func's arguments.
    part
        Of a complex output; in forward mode, of a complex input.
    mode
        Of AD.
    comparison
        The entries of a mismatch.
    detail
        A clause of the message.
    cause
        The exception behind the failure, if there was one.
    trouble
        Special properties of the worst entry's derivative.
    convergence
        The differences behind the worst entry, large steps first, if it was re-measured.
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
    convergence: tuple[Difference, ...] = ()


@dataclass(frozen=True)
class RoundedEntry:
    """A component of a VJP in a lower dtype, against double precision.

    Attributes
    ----------
    output, output_position
        Of the only output element whose grad_output was not zero, as in `Failure`; None if all had one.
    output_index
        That element.
    input, input_position, input_index
        The element whose gradient it is.
    found
        By autograd, in the lower dtype.
    expected
        By the reference, or by differences.
    allowed
        The allowed difference.
    unit
        The unit roundoff of the input's dtype.
    """

    output: int | None
    output_position: int | None
    output_index: tuple[int, ...] | None
    input: int
    input_position: int
    input_index: tuple[int, ...]
    found: complex
    expected: complex
    allowed: float
    unit: float

    @property
    def error(self) -> float:
        """``|found - expected|``."""
        return modulus(self.found - self.expected)

    @property
    def error_units(self) -> float:
        """The error in units of rounding of the expected value; infinite if the value is zero."""
        return _in_units(self.error, self)

    @property
    def allowed_units(self) -> float:
        """The allowed error in the same units."""
        return _in_units(self.allowed, self)


def _in_units(value: float, entry: RoundedEntry) -> float:
    size = modulus(entry.expected) * entry.unit
    return value / size if size else math.inf


@dataclass(frozen=True, eq=False)
class LowPrecision(EqualByContent):
    """Reference, numbers and bounds of a check in float32, bfloat16 or float16.

    Attributes
    ----------
    dtypes
        Of the checked inputs.
    unit
        The largest unit roundoff of inputs and outputs.
    reference
        Name of the reference; empty: differences in its own dtype.
    products
        VJPs that were compared.
    rows
        A description of their grad_outputs.
    entries
        Components of them.
    draws
        Runs in perturbed arithmetic that measured the rounding.
    rounded_once
        Whether the function was seen to compute in a finer dtype and to round at the end, and was held to that.
    second_look
        Entries that were within their allowance only once inputs were perturbed relative to the largest.
    out_of_range
        Entries that were not compared, as the reference leaves the range of the dtype.
    worst
        The worst entry.
    wrong
        Entries beyond their allowance.
    forward
        The worst output's error, over the allowed one.
    smallest
        The error, relative to an entry, that would have been found in half of the entries: those of at least a
        hundredth of the largest of their VJP.
    smallest_most
        The same in nine of ten entries.
    hidden
        The share of these entries that might be zero, as rounding explains errors of their size.
    smallest_scale
        A common relative error of a whole gradient that would have been found; None if that was not tested.
    undecided
        Why there is no verdict; empty if there is one.
    remedy
        How to get one.
    reference_report
        Of the check of the reference itself, in double precision, in its plain form.
    """

    dtypes: tuple[str, ...] = ()
    unit: float = 0.0
    reference: str = ""
    products: int = 0
    rows: str = ""
    entries: int = 0
    draws: int = 0
    rounded_once: bool = False
    second_look: int = 0
    out_of_range: int = 0
    worst: RoundedEntry | None = None
    wrong: int = 0
    forward: float | None = None
    smallest: float | None = None
    smallest_most: float | None = None
    hidden: float | None = None
    smallest_scale: float | None = None
    undecided: str = ""
    remedy: str = ""
    reference_report: Mapping[str, Any] | None = None


_SAID = "failure", "settings", "n", "m", "input_names", "output_names", "pairs", "undecided"
"""The fields that equality of reports compares."""


@dataclass(frozen=True, eq=False)
class ReportData(EqualByContent):
    """The fields of `fastgrad.Report`, which documents them; text and pages use only these."""

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
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    undecided: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    environment: Environment | None = None
    subject: Subject | None = None
    precision: LowPrecision | None = None

    @property
    def passed(self) -> bool:
        """Whether no failure was found."""
        return self.failure is None

    @property
    def verdict(self) -> Verdict:
        """The verdict."""
        if self.failure is not None:
            return "not converged" if self.failure.trouble == "not converged" else "failed"
        return "passed" if self.undecided is None else "undecided"

    def to_dict(self) -> dict[str, Any]:
        """The report as numbers, strings, lists and dicts, as docs/report.md describes them.

        Complex numbers become ``{"re", "im"}``; NaN and infinities become "nan", "inf" and "-inf"; tensors
        become ``{"shape", "dtype", "values"}``, values being None above 4096 elements.
        """
        return {"schema": SCHEMA, "verdict": self.verdict, "passed": self.passed, **plain(self)}

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict` as strict JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def _content(self) -> str:
        return json.dumps([plain(getattr(self, name)) for name in _SAID], allow_nan=False)


def plain(value: Any) -> Any:
    """The JSON form of a value."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, complex):
        return {"re": plain(value.real), "im": plain(value.imag)}
    if isinstance(value, Tensor):
        small = value.numel() <= LARGEST_TENSOR
        return {
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "values": plain(value.tolist()) if small else None,
        }
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Pair):
        return {name: plain(item) for name, item in value._asdict().items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if is_dataclass(value):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    raise TypeError(f"a report cannot hold a {type(value).__name__}.")
