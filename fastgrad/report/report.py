"""The outcome of a check, as text, as plain data, as a page and as figures; and the error of one that failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.autograd.gradcheck import GradcheckError as TorchGradcheckError

from fastgrad.report import messages
from fastgrad.report.data import ReportData

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Report(ReportData):
    """The outcome of one check: true where it passed.

    Two reports are equal that say the same of the same: settings, sizes, names, failure, bounds and largest errors
    count, and plan, calls, times and experiments, which may depend on what else the machine does, do not.

    docs/report.md describes it, and its parts, as plain data.

    Attributes
    ----------
    failure
        The first failure in the order of the checks; None where there is none.
    settings
        The keywords.
    plan
        How the Jacobians were computed.
    n
        Real coordinates of the differentiable inputs.
    m
        Real coordinates of the differentiable outputs.
    evaluations
        Calls of func.
    vjps
        Calls of autograd's backward.
    seconds
        Wall time.
    jvps
        Evaluations that carried tangents.
    notes
        What else was seen.
    sample
        Entries of the pair that failed.
    evidence
        Experiments after the failure, whose calls and time are not counted here.
    causes
        The most probable first.
    input_names
        What `fastgrad.check` calls the tensors that `Failure.input_position` counts; gradcheck, whose messages
        count, has none.
    output_names
        The same of `Failure.output_position`.
    pairs
        What was compared, up to the pair that failed.
    certificates
        What random vectors vouch for.
    undecided
        Errors up to this size may be hidden, where fast mode, or what was certified, had to leave something open.
    phases
        Seconds by phase.
    environment
        Versions and device.
    subject
        Names, dtypes and shapes, of a check that failed.
    precision
        What the check of a function of a lower dtype rests on.

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    >>> report = fastgrad.check(lambda x: x * x.detach(), x)
    >>> report.verdict, report.failure.kind
    ('failed', 'mismatch')
    """

    def __bool__(self) -> bool:
        """`passed`, so that ``assert fastgrad.check(func, inputs)`` does what it says."""
        return self.passed

    def raise_if_failed(self) -> None:
        """Raises a failure, as `gradcheck` does.

        Raises
        ------
        GradcheckError
            With `str` of this report for its message, and this as its ``report``.
        """
        __tracebackhide__ = True  # under pytest a failure shows the caller's line
        if self.failure is not None:
            raise GradcheckError(str(self), self) from self.failure.cause

    def to_html(self) -> str:
        """The report as one HTML page that needs nothing else, with figures where matplotlib is there."""
        from fastgrad.report import html  # only here, and below: a check that passes needs no pictures

        return html.page(self)

    def plot(self) -> Figure:
        """Figures of a failure: where the errors are, how large, and how the derivative depends on the step.

        Raises
        ------
        ImportError
            matplotlib is missing.
        ValueError
            The report holds no entries, as that of a check that passed.
        """
        from fastgrad.report import html

        return html.figure(self)

    def __repr__(self) -> str:
        """One line: verdict, size of the Jacobian, engine and calls."""
        return messages.short(self)

    def __str__(self) -> str:
        """What a person reads: of a failure, the error's message."""
        return messages.summary(self)

    def _repr_html_(self) -> str:
        """`to_html` for a notebook's cell."""
        from fastgrad.report import html

        return html.fragment(self)


class GradcheckError(TorchGradcheckError):
    """A failed gradient check, with the numbers behind the message in its report.

    Derives from torch's ``GradcheckError`` (a ``RuntimeError``), so code that catches that one keeps working.

    Attributes
    ----------
    report
        A `fastgrad.Report`.

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

    __module__ = "fastgrad"  # by which tracebacks name it

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type[GradcheckError], tuple[str, Report]]:
        """Pickles with the report: test runners send errors between processes."""
        return type(self), (str(self), self.report)
