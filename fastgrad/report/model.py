"""The outcome of a check of a model: every operation, what lies between them, and the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from fastgrad.report import model_text
from fastgrad.report.model_data import ModelReportData
from fastgrad.report.report import GradcheckError


@dataclass(frozen=True, eq=False)
class ModelReport(ModelReportData):
    """The outcome of `fastgrad.check_model`: true where nothing wrong was found.

    Attributes
    ----------
    findings
        What is wrong, the probable culprit first.
    operations
        Each distinct operation, those that are wrong first, then by error.
    end_to_end
        The derivative of the loss.
    remarks
        What was seen and is not shown to be wrong, and what was not checked.
    step_seconds
        One forward and backward pass of the model.
    seconds
        The whole check.
    environment
        Versions and device.

    Examples
    --------
    >>> import torch, fastgrad
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> report = fastgrad.check_model(model, torch.randn(16, 4), lambda y: y.square().mean())
    >>> report.verdict, report.findings
    ('passed', ())
    """

    def __bool__(self) -> bool:
        """`passed`."""
        return self.passed

    def raise_if_failed(self) -> None:
        """Raises what was found.

        Raises
        ------
        GradcheckError
            With `str` of this report for its message, and this as its ``report``.
        """
        __tracebackhide__ = True  # under pytest a failure shows the caller's line
        if self.findings:
            raise GradcheckError(str(self), cast(Any, self))

    def to_html(self) -> str:
        """The report as one HTML page that needs nothing else."""
        from fastgrad.report import model_page  # only here: a check that passes needs no page

        return model_page.page(self)

    def __str__(self) -> str:
        """What a person reads."""
        return model_text.summary(self)

    def __repr__(self) -> str:
        """One line."""
        return model_text.short(self)

    def _repr_html_(self) -> str:
        """`to_html` for a notebook's cell."""
        from fastgrad.report import model_page

        return model_page.fragment(self)
