"""Parts of the report of a model as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastgrad.report.json_form import EqualByContent
from fastgrad.report.report import Report

FindingKind = Literal["operation", "saved tensor", "detached", "hook", "end to end", "not finite"]
"""Where the cause of a finding lies; "end to end" stands for a wrong gradient that no operation explains, "not finite"
for a loss or a gradient that is not finite."""

OperationVerdict = Literal["right", "wrong", "undecided", "not checked"]
"""The verdict on one operation."""


@dataclass(frozen=True)
class Site:
    """The place of a call: module and line.

    Attributes
    ----------
    module
        The path of the innermost module that ran, as in ``named_modules``; empty: the model itself.
    source
        File and line of the innermost call that is neither torch's nor fastgrad's.
    """

    module: str
    source: str


@dataclass(frozen=True, eq=False)
class Operation(EqualByContent):
    """An operation of the model, checked separately at its recorded inputs.

    Attributes
    ----------
    name
        The operator, for example ``aten.addmm``, or the name of the custom Function.
    inputs
        Dtype and shape of each tensor argument.
    sites
        Where the operation was called with inputs of these shapes and layouts.
    calls
        Number of calls.
    verdict
        "right", "wrong", "undecided" or "not checked".
    detail
        The reason for a verdict other than "right"; and how the operation was checked, if not in the usual way.
    error
        The difference between v^T J u by autograd and by differences, for random u and v, relative to the root of the
        sum of squares of its terms; None if it was not measured.
    dtype
        The dtype in which the operation was checked.
    evaluations, vjps
        Calls of the operation and of its backward during the check.
    seconds
        Wall time of the check.
    report
        The report of the full check in fast mode, if there was one.
    """

    name: str
    inputs: tuple[str, ...]
    sites: tuple[Site, ...]
    calls: int
    verdict: OperationVerdict
    detail: str = ""
    error: float | None = None
    dtype: str = ""
    evaluations: int = 0
    vjps: int = 0
    seconds: float = 0.0
    report: Report | None = None


@dataclass(frozen=True)
class Finding:
    """An error that differences have shown, or where values that are not finite first appear.

    Attributes
    ----------
    kind
        The kind of error.
    text
        A sentence without its period.
    sites
        The places of the error, in the order of the calls.
    operator
        The name of the operation, if the finding is about an operation.
    parameters
        Parameters whose gradients are wrong, as far as examined, or not finite.
    error
        As `Operation.error`; as `EndToEnd.error` if the finding is not about an operation; None if it is about values
        that are not finite.
    """

    kind: FindingKind
    text: str
    sites: tuple[Site, ...] = ()
    operator: str = ""
    parameters: tuple[str, ...] = ()
    error: float | None = None


@dataclass(frozen=True)
class EndToEnd:
    """The derivative of the loss along random directions of all parameters.

    Attributes
    ----------
    analytical
        The derivatives by autograd, one per direction.
    numerical
        The derivatives by differences of the loss.
    allowed
        The allowed difference for each direction.
    size
        For each direction, the root of the sum of squares of the terms of the derivative.
    dtype
        The dtype in which the model ran.
    evaluations
        Calls of the model, in total.
    """

    analytical: tuple[float, ...]
    numerical: tuple[float, ...]
    allowed: tuple[float, ...]
    size: tuple[float, ...]
    dtype: str
    evaluations: int

    @property
    def verdict(self) -> Literal["right", "wrong", "undecided"]:
        """The verdict; undecided if nothing differs and an allowed difference exceeds a hundredth of `size`."""
        pairs = list(zip(self.analytical, self.numerical, self.allowed, strict=True))
        if any(not abs(a - n) <= allowed for a, n, allowed in pairs):
            return "wrong"
        hidden = (allowed > 1e-2 * size for allowed, size in zip(self.allowed, self.size, strict=True) if size)
        return "undecided" if any(hidden) else "right"

    @property
    def error(self) -> float:
        """The largest difference, relative to `size`; absolute where `size` is zero."""
        pairs = zip(self.analytical, self.numerical, self.size, strict=True)
        return max((abs(a - n) / size if size else abs(a - n) for a, n, size in pairs), default=0.0)
