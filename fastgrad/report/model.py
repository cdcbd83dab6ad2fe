"""The report of `check_model`: data, text and page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from fastgrad.report import html
from fastgrad.report.data import Environment
from fastgrad.report.json_form import SCHEMA, EqualByContent, plain
from fastgrad.report.model_data import EndToEnd, Finding, Operation, Site
from fastgrad.report.number_text import count, digits_apart, seconds_text
from fastgrad.report.report import Result

MAX_ROWS = 12
"""Largest number of operations that a summary lists."""

_HEAD = ("operation", "verdict", "error", "calls", "time", "module", "line")
"""The heads of the table of operations."""


@dataclass(frozen=True, eq=False)
class ModelReport(EqualByContent, Result):
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

    findings: tuple[Finding, ...]
    operations: tuple[Operation, ...]
    end_to_end: EndToEnd
    remarks: tuple[str, ...]
    step_seconds: float
    seconds: float
    environment: Environment
    undecided: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no error was found."""
        return not self.findings

    @property
    def verdict(self) -> Literal["passed", "failed", "undecided"]:
        """The verdict; undecided if no error was found but something was not checked or could not be decided."""
        if self.findings:
            return "failed"
        parts = {self.end_to_end.verdict, *(one.verdict for one in self.operations)}
        return "undecided" if self.undecided or parts & {"undecided", "not checked"} else "passed"

    def to_dict(self) -> dict[str, Any]:
        """The report as numbers, strings, lists and dicts."""
        found = plain(self)
        found["end_to_end"] |= {"verdict": self.end_to_end.verdict, "error": plain(self.end_to_end.error)}
        return {"schema": SCHEMA, "verdict": self.verdict, "passed": self.passed, **found}

    def to_html(self) -> str:
        """The report as one self-contained HTML page."""
        return html.document(self._headline(), self._repr_html_())

    def _repr_html_(self) -> str:
        """The page of `to_html` as a fragment, for notebooks."""
        findings = [_preformatted("\n".join(_finding_lines(*numbered))) for numbered in enumerate(self.findings, 1)]
        findings += [
            f"<details><summary>{escape(one.name)}</summary>{_preformatted(str(one.report))}</details>"
            for one in self.operations
            if one.report is not None and one.verdict in ("wrong", "undecided")
        ]
        by_error, by_cost = (
            html.table(_HEAD, [_row(one) for one in operations], (2, 3, 4))
            for operations in (self.operations, sorted(self.operations, key=lambda one: -one.seconds))
        )
        paragraphs = {"Undecided": self.undecided, "Remarks": self.remarks, "Cost": (self._cost_line(),)}
        sections = [
            html.section("Findings", *findings) if findings else "",
            html.section("End to end", _paragraph(_end_to_end_line(self.end_to_end))),
            html.section("Operations by error", by_error),
            html.section("Operations by cost", by_cost),
            *(html.section(title, *map(_paragraph, texts)) for title, texts in paragraphs.items() if texts),
        ]
        return html.article(self.verdict, self._headline(), sections)

    def _headline(self) -> str:
        """The verdict, and the first finding."""
        if self.findings:
            first = self.findings[0]
            name = first.operator if first.kind == "operation" else first.kind
            return f"check_model failed: {name}{f' in{_place(first.sites[0])}' if first.sites else ''}"
        omitted = sum(one.verdict == "not checked" for one in self.operations)
        not_checked = f", {omitted} of them not checked" if omitted else ""
        operations = count(len(self.operations), "distinct operation")
        return f"check_model {self.verdict}: {operations}{not_checked}, no error found"

    def _cost_line(self) -> str:
        """The time in seconds and in steps of the model, and the numbers of calls."""
        passes = self.seconds / self.step_seconds if self.step_seconds else 0.0
        evaluations = sum(one.evaluations for one in self.operations)
        vjps = sum(one.vjps for one in self.operations)
        return (
            f"{seconds_text(self.seconds)}, or the time of {passes:.1f} forward and backward passes of the model; "
            f"{count(self.end_to_end.evaluations, 'call')} of the model, {count(evaluations, 'evaluation')} and "
            f"{count(vjps, 'VJP')} of operations"
        )

    def __str__(self) -> str:
        """A summary of several lines."""
        lines = [self._headline()]
        for number, finding in enumerate(self.findings, 1):
            lines += _finding_lines(number, finding)
        lines.append(f"  end to end  {_end_to_end_line(self.end_to_end)}")
        table = [_HEAD, *(_row(one) for one in self.operations[:MAX_ROWS])]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines.append("  operations (wrong ones first, then sorted by error):")
        for cells in table:
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            lines.append(f"    {'  '.join(padded).rstrip()}")
        if len(self.operations) > MAX_ROWS:
            lines.append(f"    and {len(self.operations) - MAX_ROWS} more")
        lines += [f"  undecided   {one}" for one in self.undecided]
        lines += [f"  remark      {remark}" for remark in self.remarks]
        lines.append(f"  cost        {self._cost_line()}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """One line."""
        found = ", ".join(one.operator or one.kind for one in self.findings[:3])
        operations = count(len(self.operations), "operation")
        return f"<ModelReport: {self.verdict}{f' ({found})' if found else ''}, {operations}>"


def _finding_lines(number: int, finding: Finding) -> list[str]:
    """A finding, with its places and parameters."""
    lines = [f"  {number}. {finding.kind}: {finding.text}"]
    lines += [f"     {'at' if not i else 'and'}{_place(site)}" for i, site in enumerate(finding.sites)]
    if finding.parameters:
        listed = ", ".join(finding.parameters[:4])
        more = f" and {len(finding.parameters) - 4} more" if len(finding.parameters) > 4 else ""
        lines.append(f"     parameters: {listed}{more}")
    return lines


def _place(site: Site) -> str:
    """A module and, if known, a line; begins with a space."""
    return (f" module {site.module}" if site.module else " the model") + (f", {site.source}" if site.source else "")


def _end_to_end_line(whole: EndToEnd) -> str:
    """The derivative of the loss by autograd and by differences."""
    pairs = []
    for analytical, numerical, allowed in zip(whole.analytical, whole.numerical, whole.allowed, strict=True):
        digits = digits_apart(analytical, numerical) if abs(analytical - numerical) > allowed else 6
        pairs.append(f"{analytical:.{digits}g} / {numerical:.{digits}g}")
    largest = max((a / s for a, s in zip(whole.allowed, whole.size, strict=True) if s), default=0.0)
    is_known = whole.verdict == "undecided" and math.isfinite(largest)
    hidden = f", but errors up to {largest:.2g} would not be found" if is_known else ""
    return (
        f"{whole.verdict} in {whole.dtype}: directional derivatives of the loss (autograd / differences): "
        f"{', '.join(pairs)}; relative error {whole.error:.2g}{hidden}"
    )


def _row(operation: Operation) -> tuple[str, ...]:
    """A row of the table of operations."""
    site = operation.sites[0] if operation.sites else Site("", "")
    error = "" if operation.error is None else f"{operation.error:.1e}"
    cost = str(operation.calls), seconds_text(operation.seconds)
    return operation.name, operation.verdict, error, *cost, site.module or "the model", site.source


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"
