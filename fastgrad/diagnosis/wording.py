"""The words in which causes from entries speak of derivatives: names of tensors, and the terms of a mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastgrad.report.failure import Failure
from fastgrad.report.messages import names_of
from fastgrad.report.report import Report

Side = Literal["input", "output"]


@dataclass(frozen=True)
class Wording:
    """Words for the derivatives of an output with respect to an input, which have these names.

    derivative: what computes the analytical derivatives, "backward" or "the jvp". In forward mode of a second or higher
    order, it is func's backward, whose jvp autograd derives.
    """

    input: str
    output: str
    is_forward: bool = False
    derivative: str = "backward"

    @property
    def names(self) -> tuple[str, str]:
        """The names of the input and the output."""
        return self.input, self.output

    @property
    def vectors(self) -> str:
        """What the derivative adds up."""
        return "tangents" if self.is_forward else "grad_output"

    def vector(self, side: Side) -> str:
        """The vector, or the result, at one side of the Jacobian."""
        if self.is_forward:
            return f"the tangent of {self.input if side == 'input' else 'the output'}"
        return f"the gradient of {self.input}" if side == "input" else "grad_output"

    def of_backward(self, reason: str) -> str:
        """The part of a sentence that is true of backward only; empty for a jvp."""
        return reason if self.derivative == "backward" else ""


def wording(report: Report, failure: Failure) -> Wording:
    """The words for a failure."""
    output, input_ = names_of(report, failure)
    is_forward = failure.mode == "forward"
    derivative = "the jvp" if is_forward and report.settings.order == 1 else "backward"
    return Wording(input_, "the output" if report.input_names else output, is_forward, derivative)
