"""A failure: what failed, and the entries that differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from fastgrad.core.precision import modulus
from fastgrad.report.json_form import EqualByContent

Part = Literal["all", "real", "imaginary"]
"""The checked part of a complex output; in forward mode, of a complex input. "all" for real tensors."""

Mode = Literal["reverse", "forward"]
"""The mode of AD whose derivatives were compared."""

ValueFailure = Literal["mismatch", "nonzero numerical gradient", "ranks differ"]
RoundingFailure = Literal["beyond rounding", "biased", "not finite"]
FormFailure = Literal["dtype", "size", "incorrect gradient", "tangent dtype"]
RepeatFailure = Literal["nondeterministic", "nondeterministic func", "recorded gradient", "kept gradient"]
GradOutputFailure = Literal["nonlinear", "raises", "not multiplied by grad_output", "batched raises", "batched differs"]
UndefinedFailure = Literal["undefined grad raises", "undefined grad not zero", "undefined tangent"]
ModificationFailure = Literal["modified grad_output", "modified output", "modified tangent"]

FailureKind = Literal[
    ValueFailure, RoundingFailure, FormFailure, RepeatFailure, GradOutputFailure, UndefinedFailure, ModificationFailure
]
"""What failed, in a few words."""

NumericalIssue = Literal["kink", "discontinuity", "low precision", "not converged", "not finite"]
"""Special properties of a derivative that re-measuring with many steps found."""

FUNC_VARIES = "func is not deterministic: evaluated again at the same points, it gives other values"
"""The detail of a mismatch that the variation of func may explain."""


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
        The derivative by autograd. For a complex input, it is complex: twice the conjugate Wirtinger derivative, as in
        torch.
    numerical
        The derivative by differences.
    allowed
        ``atol + rtol |numerical|``.
    error
        Estimated error of the numerical derivative, if it was re-measured with several steps; otherwise None.
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
        Size of the dimension.
    count
        Number of distinct indices.
    first
        The smallest of these indices.
    last
        The largest of these indices.
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
        The distance by which the input was moved to each side; for a complex entry, the distance of its first
        coordinate.
    change
        The difference of the two values of func; for a complex entry, combined from its two coordinates.
    estimate
        The resulting derivative: change divided by the distance of the two points after rounding.
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
        Number of entries of this Jacobian.
    mismatches
        Number of entries that differ at eps by more than their tolerance.
    worst
        The worst entry, re-measured if possible.
    largest_absolute
        The largest absolute error at eps that is a number.
    largest_relative
        The largest relative error at eps that is finite.
    sum_analytical
        The sum of ``|a|^2`` over the mismatched entries; a: analytical, n: numerical.
    sum_numerical
        The sum of ``|n|^2`` over the same entries.
    sum_product
        The sum of ``a conj(n)`` over the same entries.
    analytical
        The analytical matrix, if it is small, in torch's layout: one row per input element, one column per output
        element.
    numerical
        The numerical matrix, in the same layout.
    exhaustive
        Whether all entries were compared. If not, the numbers refer to the entries that were located.
    worst_entries
        Some of the worst entries, the worst first. Entries with an error estimate are wrong. Entries without one differ
        at eps, or are at elements that a sparse input does not specify.
    extent
        The positions of the mismatched entries.
    on_pattern
        Whether only the entries of the sparsity pattern are counted. All others are zero.
    unclear
        Number of mismatches that may result from the rounding, or from the step, of the differences at eps.
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
    unclear: int = 0


@dataclass(frozen=True)
class Subject:
    """The function and tensors of a failed check.

    Attributes
    ----------
    function
        The name of func; empty if it has none.
    parameters
        Names of func's arguments, as far as known; in second order, they are followed by those of the grad_outputs.
    inputs
        Dtype and shape of each of func's arguments up to the last checked one, for example ``float64[3, 4]``; empty for
        an argument that is not checked.
    outputs
        Dtype and shape of each differentiable output.
    source
        File and line of the custom backward, or of func if it has none: ``ops.py:12``; empty if unknown.
    test
        Under pytest, the id of the test that was running; otherwise empty.
    results
        In second order, the names of the gradients that are differentiated: ``grad(x)``; otherwise empty.
    """

    function: str = ""
    parameters: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    source: str = ""
    test: str = ""
    results: tuple[str, ...] = ()


class Place(Protocol):
    """A differentiable input or output: its number (index), and its position among func's arguments or results."""

    @property
    def index(self) -> int: ...

    @property
    def position(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Failure(EqualByContent):
    """Why a check failed.

    Attributes
    ----------
    kind
        What failed.
    output
        Number of the output, counting only differentiable ones, as in torch's messages.
    input
        Number of the input, counting only differentiable ones.
    output_position
        Position of the output among func's results.
    input_position
        Position of the input among func's arguments.
    part
        Part of a complex output; in forward mode, part of a complex input.
    mode
        Mode of AD: "reverse" or "forward".
    comparison
        The entries of a mismatch.
    detail
        A clause of the message.
    cause
        The exception that caused the failure, if there was one.
    numerical_issue
        Special properties of the worst entry's derivative.
    convergence
        The differences of the worst entry, large steps first, if it was re-measured.
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
    numerical_issue: NumericalIssue | None = None
    convergence: tuple[Difference, ...] = ()

    @property
    def func_varies(self) -> bool:
        """Whether the entries that differ were measured with values of func that vary from call to call."""
        return self.detail == FUNC_VARIES

    @classmethod
    def at(cls, kind: FailureKind, output: Place | None = None, input: Place | None = None, **others: Any) -> Failure:
        """A failure at an output, an input, or a pair of both; others: the other fields, by name."""
        return cls(
            kind,
            None if output is None else output.index,
            None if input is None else input.index,
            None if output is None else output.position,
            None if input is None else input.position,
            **others,
        )
