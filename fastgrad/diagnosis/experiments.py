"""Shared state of the experiments after a failure: the failed check, the remaining calls, and the evidence."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from fastgrad.core.memory import Result
from fastgrad.core.tensors import element_number
from fastgrad.problem.coordinates import Block
from fastgrad.problem.problem import Problem
from fastgrad.report.evidence import Evidence, Sample
from fastgrad.report.failure import Entry, Failure
from fastgrad.report.report import Report

MORE_CALLS = 96
"""Number of calls of func and backward that experiments may take in addition to the number that the check itself
took."""

OTHER_CALLS = 72
"""Number of these calls that a sample of the entries leaves to the other experiments."""

SECONDS = 1.0
"""Largest wall time of the experiments, in seconds; with the measured time of a call, it limits their calls."""


class Experiments:
    """A failed check, the evidence so far, and the number of calls that experiments may still make."""

    def __init__(self, problem: Problem, report: Report, failure: Failure, known_sample: Sample | None) -> None:
        self._problem = problem
        self._report = report
        self._failure = failure
        self._known_sample = known_sample
        self._settings = report.settings
        self._record = report.plan.record_graph if report.plan else True
        self._before = self._calls()
        used = report.evaluations + report.vjps
        self._most = used + MORE_CALLS
        self._cost = report.seconds / max(1, used)
        self._start = time.perf_counter()
        pair = failure.output is not None and failure.input is not None
        self._output = next((block for block in problem.outputs if pair and block.index == failure.output), None)
        self._input = next((block for block in problem.inputs if pair and block.index == failure.input), None)
        # The error is searched for only in the output that failed, because later outputs have not been compared.
        self._only = self._output if failure.kind == "mismatch" else None
        self._evidence = Evidence()

    def _calls(self) -> int:
        return self._problem.evaluations + self._problem.vjps

    def _left(self) -> int:
        """The number of calls that may still be made."""
        seconds = SECONDS - (time.perf_counter() - self._start)
        in_time = int(seconds / self._cost) if self._cost > 0 else self._most
        return min(self._most - (self._calls() - self._before), in_time)

    def _try(self, calls: int, experiment: Callable[[], Result]) -> Result | None:
        """The result of an experiment; None if too few calls remain or it raises."""
        if calls > self._left():
            return None
        try:
            return experiment()
        except Exception:  # func raises, or memory is too small: the failure is reported without this evidence
            return None

    def _note(self, **found: object) -> None:
        self._evidence = replace(self._evidence, **found)  # type: ignore[arg-type]

    def _coordinates(self, output: Block, block: Block, worst: Entry) -> tuple[int, int]:
        """Coordinates of the worst entry in all inputs and in all outputs; if complex, of the part that fails."""
        element = element_number(worst.input_index, block.tensor.shape)
        if block.elements is not None:
            element = int((block.elements == element).nonzero()[0])
        row = output.first + output.width * element_number(worst.output_index, output.tensor.shape)
        column = block.first + block.width * element
        imaginary = int(self._failure.part == "imaginary")
        return (column + imaginary, row) if self._failure.mode == "forward" else (column, row + imaginary)
