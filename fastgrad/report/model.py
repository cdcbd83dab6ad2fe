"""The report of `check_model`."""

from __future__ import annotations

from dataclasses import dataclass

from fastgrad.report import model_text
from fastgrad.report.model_data import ModelReportData
from fastgrad.report.report import Result


@dataclass(frozen=True, eq=False)
class ModelReport(ModelReportData, Result):
    """The result of `fastgrad.check_model`; true if no error was found.

    Attributes
    ----------
    findings
        The errors that were found; the most probable reason for a wrong gradient comes first.
    operations
        Each distinct operation; wrong ones first, the others sorted by error.
    end_to_end
        The derivative of the loss along random directions, by autograd and by differences.
    remarks
        Observations that are not errors, and everything that was not checked.
    step_seconds
        Time of one forward and backward pass of the model.
    seconds
        Time of the whole check.
    environment
        Versions and device.
    undecided
        What could not be decided, except for operations; the verdict is then not "passed".

    Examples
    --------
    >>> import torch, fastgrad
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> report = fastgrad.check_model(model, torch.randn(16, 4), lambda y: y.square().mean())
    >>> report.verdict, report.findings
    ('passed', ())
    """

    def to_html(self) -> str:
        """The report as one self-contained HTML page."""
        from fastgrad.report import model_page  # imported here because most checks need no page

        return model_page.page(self)

    def __str__(self) -> str:
        """A summary of several lines."""
        return model_text.summary(self)

    def __repr__(self) -> str:
        """One line."""
        return model_text.short(self)

    def _repr_html_(self) -> str:
        """The page of `to_html` as a fragment, for notebooks."""
        from fastgrad.report import model_page

        return model_page.fragment(self)
