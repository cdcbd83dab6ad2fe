"""The failing checks of a test session as one HTML page, with links to their reports."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from urllib.parse import quote

from fastgrad.report import html
from fastgrad.report.number_text import count


def page(summary: Sequence[str], entries: Sequence[list[str]]) -> str:
    """The page: the session's summary, and a row per failing check.

    entries: for each failing check, the file name of its report, test, checker, and first line of the message.
    """
    headline = count(len(entries), "failing check") if entries else "No check failed"
    rows = "".join(
        f'<tr><td><a href="{quote(file)}">{escape(test)}</a></td><td>{escape(checker)}</td><td>{escape(line)}</td></tr>'
        for file, test, checker, line in sorted(entries)
    )
    head = "<thead><tr><th>test</th><th>checker</th><th>failure</th></tr></thead>"
    table = f'<div class="wide"><table>{head}<tbody>{rows}</tbody></table></div>'
    sections = [
        html.section("Failing checks", table) if entries else "",
        html.section("Summary", f"<pre>{escape(chr(10).join(summary))}</pre>"),
    ]
    body = html.article("failed" if entries else "passed", headline, sections)
    return html.document(f"fastgrad: {headline}", body)
