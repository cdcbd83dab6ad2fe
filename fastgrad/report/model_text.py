"""The report of a model as text."""

from __future__ import annotations

import math

from fastgrad.report.model_data import EndToEnd, Finding, ModelReportData, Operation, Site
from fastgrad.report.number_text import count, digits_apart, seconds_text

MAX_ROWS = 12
"""Largest number of operations that a summary lists."""

HEAD = ("operation", "verdict", "error", "calls", "time", "module", "line")
"""The heads of the table of operations."""


def headline(report: ModelReportData) -> str:
    """The verdict, and the first finding."""
    if report.findings:
        first = report.findings[0]
        name = first.operator if first.kind == "operation" else first.kind
        return f"check_model failed: {name}{f' in{place(first.sites[0])}' if first.sites else ''}"
    omitted = sum(one.verdict == "not checked" for one in report.operations)
    not_checked = f", {omitted} of them not checked" if omitted else ""
    operations = count(len(report.operations), "distinct operation")
    return f"check_model {report.verdict}: {operations}{not_checked}, no error found"


def summary(report: ModelReportData) -> str:
    """The text of a report."""
    lines = [headline(report)]
    for number, finding in enumerate(report.findings, 1):
        lines += finding_lines(number, finding)
    lines.append(f"  end to end  {end_to_end_line(report.end_to_end)}")
    table = [HEAD, *(row(one) for one in report.operations[:MAX_ROWS])]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines.append("  operations (wrong ones first, then sorted by error):")
    for cells in table:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append(f"    {'  '.join(padded).rstrip()}")
    if len(report.operations) > MAX_ROWS:
        lines.append(f"    and {len(report.operations) - MAX_ROWS} more")
    lines += [f"  undecided   {one}" for one in report.undecided]
    lines += [f"  remark      {remark}" for remark in report.remarks]
    lines.append(f"  cost        {cost_line(report)}")
    return "\n".join(lines)


def short(report: ModelReportData) -> str:
    """A report on one line, in angle brackets."""
    found = ", ".join(one.operator or one.kind for one in report.findings[:3])
    return (
        f"<ModelReport: {report.verdict}{f' ({found})' if found else ''}, {count(len(report.operations), 'operation')}>"
    )


def finding_lines(number: int, finding: Finding) -> list[str]:
    """A finding, with its places and parameters."""
    lines = [f"  {number}. {finding.kind}: {finding.text}"]
    lines += [f"     {'at' if not i else 'and'}{place(site)}" for i, site in enumerate(finding.sites)]
    if finding.parameters:
        listed = ", ".join(finding.parameters[:4])
        more = f" and {len(finding.parameters) - 4} more" if len(finding.parameters) > 4 else ""
        lines.append(f"     parameters: {listed}{more}")
    return lines


def place(site: Site) -> str:
    """A module and, if known, a line; begins with a space."""
    return (f" module {site.module}" if site.module else " the model") + (f", {site.source}" if site.source else "")


def end_to_end_line(whole: EndToEnd) -> str:
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


def row(operation: Operation) -> tuple[str, ...]:
    """A row of the table of operations."""
    site = operation.sites[0] if operation.sites else Site("", "")
    error = "" if operation.error is None else f"{operation.error:.1e}"
    cost = str(operation.calls), seconds_text(operation.seconds)
    return operation.name, operation.verdict, error, *cost, site.module or "the model", site.source


def cost_line(report: ModelReportData) -> str:
    """The time in seconds and in steps of the model, and the numbers of calls."""
    passes = report.seconds / report.step_seconds if report.step_seconds else 0.0
    evaluations = sum(one.evaluations for one in report.operations)
    vjps = sum(one.vjps for one in report.operations)
    return (
        f"{seconds_text(report.seconds)}, or the time of {passes:.1f} forward and backward passes of the model; "
        f"{count(report.end_to_end.evaluations, 'call')} of the model, {count(evaluations, 'evaluation')} and "
        f"{count(vjps, 'VJP')} of operations"
    )
