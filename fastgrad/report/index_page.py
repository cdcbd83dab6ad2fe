"""The failing checks of a test session as one HTML page, with links to their reports."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple
from urllib.parse import quote

from fastgrad.report import html


class Entry(NamedTuple):
    """A failing check: file name of its report, test, checker, and first line of the message."""

    file: str
    test: str
    checker: str
    line: str


def page(summary: Sequence[str], entries: Sequence[Entry]) -> str:
    """The page: the session's summary, and a row per failing check."""
    found = "failing check" if len(entries) == 1 else "failing checks"
    headline = f"{len(entries)} {found}" if entries else "No check failed"
    rows = "".join(
        f'<tr><td><a href="{quote(one.file)}">{escape(one.test)}</a></td><td>{escape(one.checker)}</td>'
        f"<td>{escape(one.line)}</td></tr>"
        for one in sorted(entries)
    )
    head = "<thead><tr><th>test</th><th>checker</th><th>failure</th></tr></thead>"
    table = f'<div class="wide"><table>{head}<tbody>{rows}</tbody></table></div>'
    sections = [
        html.section("Failing checks", table) if entries else "",
        html.section("Summary", f"<pre>{escape(chr(10).join(summary))}</pre>"),
    ]
    body = html.article("failed" if entries else "passed", headline, sections)
    return html.document(f"fastgrad: {headline}", body)
