"""What a check found: frozen data, a few sums of it, and its plain form for JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = 1
"""The version of what `Report.to_dict` returns: it grows when a key changes its meaning or goes. docs/report.md."""

LARGEST_TENSOR = 4096
"""Elements up to which `Report.to_dict` writes a tensor out."""

Verdict = Literal["passed", "failed", "not converged", "undecided"]
"""undecided: fast mode found nothing, and cannot exclude errors below a bound. not converged: an entry
differs, and no step settles its numerical derivative."""

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


@dataclass(frozen=True)
class Explanation:
    """A hypothesis that random sums over all entries of the failing Jacobian agree with.

    name: the cause. text: what would have happened. error: how far the sums are off, over their terms.
    """

    name: CauseName
    text: str
    error: float


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
    slopes: large steps, and central differences of the worst entry there; rounding: one ulp of its output.
    other_mode: the worst entry by the mode of AD that did not fail; adjoint_error: as in `AdjointTest`.
    other_part: the worst entry of the part of a complex output that did not fail, analytical and numerical.
    explanation: a rearrangement of the numerical Jacobian that the analytical one is, or another point at which the
        gradient would be right.
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
    explanation: Explanation | None = None


Trouble = Literal["kink", "low precision", "not converged"]
"""What re-measuring over many steps found beside, or in place of, a derivative."""


@dataclass(frozen=True)
class Tolerances:
    """The step of the differences with respect to an input, and how far its entries may be off."""

    eps: float = 1e-6
    atol: float = 1e-5
    rtol: float = 1e-3


@dataclass(frozen=True)
class Settings(Tolerances):
    """The keywords of one check; see :func:`fastgrad.gradcheck`.

    grad_outputs: how gradgradcheck came by them; None in gradcheck. inputs: the tolerances of each checked
    input, where not all have the same; eps, atol and rtol are the smallest of them.
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
    engine: str = "auto"
    seed: int = 0
    confidence: float = 1 - 1e-9
    memory_limit: int | None = None
    progress: bool | None = False
    grad_outputs: GradOutputs | None = None
    inputs: tuple[Tolerances, ...] = ()

    def of(self, index: int) -> Tolerances:
        """The tolerances of an input, by the index of its block."""
        return self.inputs[index] if self.inputs else self

    def loosest(self) -> Tolerances:
        """The largest of each: for sums over inputs, which fail a check only where no input excuses them."""
        largest = (max(getattr(own, name) for own in self.inputs) for name in ("eps", "atol", "rtol"))
        return Tolerances(*largest) if self.inputs else self


@dataclass(frozen=True)
class Plan:
    """How the Jacobians are computed; nothing in it changes a verdict.

    columns_per_pass: numerical columns held at a time; every pass repeats the VJPs.
    rows_per_block: analytical rows computed, and compared, at a time.
    record_graph: whether func must record gradients while it is evaluated for differences.
    column_groups, row_groups: of a compressed Jacobian; one difference, or one VJP, serves a group. Without
    row groups, analytical columns come from differentiating the backward once more.
    memory: bytes that Jacobians take at a time, estimated; None in fast mode, which holds vectors alone.
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
    memory: int | None = None


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
class Span:
    """The places along one dimension that some entries take.

    size: of the dimension. count: distinct places, from first to last. step: their distance, where it is
    the same for all; None where it is not. places: all of them, where they are few.
    """

    size: int
    count: int
    first: int
    last: int
    step: int | None
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class Extent:
    """Where entries lie: one Span a dimension of the output, and of the input."""

    output: tuple[Span, ...]
    input: tuple[Span, ...]


@dataclass(frozen=True)
class Difference:
    """One central difference of an entry.

    step: by which the input was moved to either side. change: by how much func moved in between.
    estimate: the derivative that follows, change over the realized distance. Of a complex entry, change and
    estimate are made of those of its two coordinates, and step is that of the first.
    """

    step: float
    change: complex
    estimate: complex


@dataclass(frozen=True)
class Comparison:
    """The Jacobian of one output with respect to one input, analytical against numerical.

    sum_analytical, sum_numerical and sum_product are sums of |a|^2, |n|^2 and a conj(n) over the
    mismatched entries. exhaustive: all entries were compared; otherwise some were located, and these
    numbers are about them. The two matrices are kept only when small, in torch's layout: one row an
    input element, one column an output element. worst_entries: the worst first, as far as they are wrong
    (those with an error estimate) or look wrong at eps (those without). extent: where mismatched entries
    lie. on_pattern: the entries are those of the Jacobian's pattern; what lies outside of it is zero.
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
    """An output and an input whose Jacobian was compared; places, part and mode as in Failure.

    mismatches: entries that differ at eps; agrees: none of them after re-measuring. The largest errors are those
    at eps. on_pattern: as in Comparison.
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
    """What random vectors vouch for, where not every entry was looked at by itself.

    claim: a sentence without its period. method: the vectors, and what they were compared with.
    bound: an error of one entry shows from this size on, beside rounding.
    """

    claim: str
    method: str
    bound: float


@dataclass(frozen=True)
class Environment:
    """Where a check ran: versions, and the device of the outputs."""

    fastgrad: str
    torch: str
    python: str
    device: str


@dataclass(frozen=True)
class Failure:
    """Why a check failed.

    output and input count the differentiable outputs and inputs, as torch's messages do;
    output_position and input_position are their places among func's results and arguments.
    detail is a clause for the message; cause is the exception behind the failure, if there was one.
    trouble is what detail says of the worst entry's derivative. convergence: the differences behind the worst entry,
    large steps first, where it was re-measured.
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
class Report:
    """The outcome of one check.

    n and m count the real coordinates of the differentiable inputs and outputs; evaluations and
    vjps are the calls of func and of autograd's backward; jvps counts the evaluations that carried
    tangents; seconds is wall time, phases its parts. sample: entries of the pair that failed; evidence:
    experiments after that, whose calls and time are not counted here. causes: the most probable first.
    pairs: what was compared, up to the pair that failed. undecided: errors up to this size may be hidden,
    where fast mode had to leave something open. input_names and output_names: what :func:`fastgrad.check`
    calls the tensors that `Failure.input_position` and `Failure.output_position` count; gradcheck, whose
    messages count, has none.
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
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    undecided: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    environment: Environment | None = None

    @property
    def passed(self) -> bool:
        """Whether no failure was found."""
        return self.failure is None

    @property
    def verdict(self) -> Verdict:
        """The outcome in a word or two."""
        if self.failure is not None:
            return "not converged" if self.failure.trouble == "not converged" else "failed"
        return "passed" if self.undecided is None else "undecided"

    def to_dict(self) -> dict[str, Any]:
        """The report as numbers, strings, lists and dicts, as docs/report.md describes them.

        Complex numbers become {"re", "im"}; NaN and infinities become "nan", "inf" and "-inf"; tensors
        become {"shape", "dtype", "values"}, values being None above LARGEST_TENSOR elements.
        """
        return {"schema": SCHEMA, "verdict": self.verdict, "passed": self.passed, **_plain(self)}

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict` as strict JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_html(self) -> str:
        """The report as one HTML page that needs nothing else, with figures where matplotlib is there."""
        from fastgrad import render  # only here, and below: data knows nothing of pictures, nor needs to be dear

        return render.page(self)

    def plot(self) -> Figure:
        """Figures of a failure: where the errors are, how large, and how the derivative depends on the step.

        Raises
        ------
        ImportError
            matplotlib is missing.
        ValueError
            The report holds no entries, as that of a check that passed.
        """
        from fastgrad import render

        return render.figure(self)

    def __str__(self) -> str:
        """What a person reads: of a failure, the error's message."""
        from fastgrad import messages

        return messages.summary(self)

    def _repr_html_(self) -> str:
        """`to_html` for a notebook's cell."""
        from fastgrad import render

        return render.fragment(self)


def _plain(value: Any) -> Any:
    """A value as JSON knows it."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, complex):
        return {"re": _plain(value.real), "im": _plain(value.imag)}
    if isinstance(value, Tensor):
        small = value.numel() <= LARGEST_TENSOR
        return {
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "values": _plain(value.tolist()) if small else None,
        }
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Pair):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    raise TypeError(f"a report cannot hold a {type(value).__name__}.")
