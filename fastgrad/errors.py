"""The error of a failed check."""

from __future__ import annotations

from torch.autograd.gradcheck import GradcheckError as TorchGradcheckError

from fastgrad.report import Report


class GradcheckError(TorchGradcheckError):
    """A failed gradient check, with the numbers behind the message in `report`.

    Derives from torch's ``GradcheckError`` (a ``RuntimeError``), so code that catches that one keeps working.
    """

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type[GradcheckError], tuple[str, Report]]:
        """Pickles with the report: test runners send errors between processes."""
        return type(self), (str(self), self.report)
