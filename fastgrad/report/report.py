"""The report of a check (text, data, HTML page, figures) and the exception of a failed check."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, cast

from torch.autograd.gradcheck import GradcheckError as TorchGradcheckError

from fastgrad.report import messages
from fastgrad.report.data import ReportData

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Result(ABC):
    """What the reports of all checks have in common."""

    @property
    @abstractmethod
    def passed(self) -> bool:
        """Whether no error was found."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The report as numbers, strings, lists and dicts."""

    def __bool__(self) -> bool:
        """The value of `passed`, for example in ``assert fastgrad.check(func, inputs)``."""
        return self.passed

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict` as strict JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def raise_if_failed(self) -> None:
        """Raises GradcheckError if the check failed, as `gradcheck` does.

        Raises
        ------
        GradcheckError
            With `str` of this report as its message, and this report as its ``report``.
        """
        __tracebackhide__ = True  # under pytest a failure shows the caller's line
        if not self.passed:
            failure = getattr(self, "failure", None)  # only a Report has this attribute
            raise GradcheckError(str(self), cast(Any, self)) from getattr(failure, "cause", None)


class Report(ReportData, Result):
    """The result of one check; its truth value is `passed`.

    Two reports are equal if their settings, sizes, names, failures, bounds and largest errors are equal. Plan, calls,
    times and experiments are not compared, because they may depend on the load of the machine.

    docs/report.md describes the report and its parts as plain data.

    Attributes
    ----------
    failure
        The first failure in the order of the checks; None if there is none.
    settings
        The keywords.
    plan
        How the Jacobians were computed.
    n
        Number of real coordinates of the differentiable inputs.
    m
        Number of real coordinates of the differentiable outputs.
    evaluations
        Number of calls of func.
    vjps
        Number of calls of autograd's backward.
    seconds
        Wall time.
    jvps
        Number of evaluations with tangents.
    notes
        Other observations.
    sample
        Entries of the pair that failed.
    evidence
        Results of the experiments after the failure; their calls and time are not counted above.
    causes
        Probable causes, the most probable first.
    input_names
        The paths of the tensors that `Failure.input_position` counts, in `fastgrad.check`; empty in gradcheck,
        whose messages use numbers.
    output_names
        The paths of the tensors that `Failure.output_position` counts.
    pairs
        The compared pairs of output and input, up to the pair that failed.
    certificates
        Statements that random vectors certify.
    undecided
        If the check is undecided, errors up to this size may be hidden; otherwise None.
    phases
        Seconds per phase.
    environment
        Versions and device.
    subject
        Names, dtypes and shapes of a check that failed.
    precision
        Reference, numbers and bounds of a check in a lower dtype.

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    >>> report = fastgrad.check(lambda x: x * x.detach(), x)
    >>> report.verdict, report.failure.kind
    ('failed', 'mismatch')
    """

    def to_html(self) -> str:
        """The report as one self-contained HTML page; with figures if matplotlib is installed."""
        from fastgrad.report import html  # imported here because most checks need no page

        return html.document(messages.verdict_line(self), html.fragment(self))

    def plot(self) -> Figure:
        """Figures of a failure: positions and sizes of the errors, and the derivative for each step.

        Raises
        ------
        ImportError
            matplotlib is missing.
        ValueError
            The report has no entries, for example because the check passed.
        """
        from fastgrad.report import figures

        return figures.figure(self)

    def __repr__(self) -> str:
        """One line: verdict, size of the Jacobian, engine and calls."""
        return messages.short(self)

    def __str__(self) -> str:
        """A summary of several lines; for a failure, the message of the error."""
        return messages.summary(self)

    def _repr_html_(self) -> str:
        """The page of `to_html` as a fragment, for notebooks."""
        from fastgrad.report import html

        return html.fragment(self)


class GradcheckError(TorchGradcheckError):
    """Raised if a gradient check fails; its report holds the data.

    Derives from torch's ``GradcheckError`` (a ``RuntimeError``), so code that catches torch's error keeps working.

    Attributes
    ----------
    report
        A `fastgrad.Report` or, after `raise_if_failed`, the report whose method it is.

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    >>> try:
    ...     fastgrad.gradcheck(lambda x: x * x.detach(), (x,))
    ... except fastgrad.GradcheckError as error:
    ...     print(error.report.failure.kind)
    mismatch
    """

    __module__ = "fastgrad"  # tracebacks show this name

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type[GradcheckError], tuple[str, Report]]:
        """Pickles the error with its report, because test runners send errors between processes."""
        return type(self), (str(self), self.report)
