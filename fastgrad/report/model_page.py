"""The report of a model as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fastgrad.report import html, model_text
from fastgrad.report.model_data import ModelReportData


def page(report: ModelReportData) -> str:
    """The report as a complete page; see `ModelReport.to_html`."""
    return html.document(model_text.headline(report), fragment(report))


def fragment(report: ModelReportData) -> str:
    """The body of a page with its style."""
    findings = "".join(
        f"<pre>{escape(chr(10).join(model_text.finding_lines(number, one)))}</pre>"
        for number, one in enumerate(report.findings, 1)
    )
    wrong = "".join(
        f"<details><summary>{escape(one.name)}</summary><pre>{escape(str(one.report))}</pre></details>"
        for one in report.operations
        if one.report is not None and one.verdict in ("wrong", "undecided")
    )
    tables = [
        html.table(model_text.HEAD, [model_text.row(one) for one in operations], (2, 3, 4))
        for operations in (report.operations, sorted(report.operations, key=lambda one: -one.seconds))
    ]
    sections = [
        html.section("Findings", findings, wrong) if findings or wrong else "",
        html.section("End to end", f"<p>{escape(model_text.end_to_end_line(report.end_to_end))}</p>"),
        html.section("Operations by error", tables[0]),
        html.section("Operations by cost", tables[1]),
        *(_sentences(name, some) for name, some in (("Undecided", report.undecided), ("Remarks", report.remarks))),
        html.section("Cost", f"<p>{escape(model_text.cost_line(report))}</p>"),
    ]
    return html.article(report.verdict, model_text.headline(report), sections)


def _sentences(name: str, sentences: Sequence[str]) -> str:
    """A section of sentences; an empty text if there are none."""
    return html.section(name, "".join(f"<p>{escape(one)}</p>" for one in sentences)) if sentences else ""
