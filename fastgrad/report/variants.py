"""The report of `check_variants`: a table of verdicts, text and JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from fastgrad.report import html
from fastgrad.report.json_form import SCHEMA, EqualByContent, plain
from fastgrad.report.number_text import count, seconds_text
from fastgrad.report.report import Report, Result

VariantVerdict = Literal["failed", "passed", "undecided", "no derivative", "not applicable", "raised", "not run"]
"""The verdict of a variant."""

AS_GIVEN = "points: as given"
"""The path of the variant that is the caller's own call."""


@dataclass(frozen=True)
class VariantRow:
    """One variant.

    Attributes
    ----------
    family, name
        Family and name of the variant.
    verdict
        "no derivative": the function has none at the variant's point; this is not a failure. "raised": backward
        raised, but func did not. "not run": the time limit was reached.
    detail
        The reason, in one line; empty if it passed.
    seconds
        Time of the variant.
    report
        The report of the check, if there was one.
    """

    family: str
    name: str
    verdict: VariantVerdict
    detail: str
    seconds: float
    report: Report | None = None

    @property
    def path(self) -> str:
        """Family and name, as in the argument `only` of `check_variants`."""
        return f"{self.family}: {self.name}"


@dataclass(frozen=True, eq=False)
class VariantsReport(EqualByContent, Result):
    """The result of `fastgrad.check_variants`; true if it passed.

    Attributes
    ----------
    rows
        One row per variant, in the order in which they ran.
    seed
        Seed of the check.
    seconds
        Time of the whole check.

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    >>> report = fastgrad.check_variants(torch.sin, x, only=["points"])
    >>> report.passed, report.rows[0].path
    (True, 'points: as given')
    """

    rows: tuple[VariantRow, ...]
    seed: int
    seconds: float

    @property
    def verdict(self) -> Literal["passed", "failed", "incomplete"]:
        """The verdict; incomplete if no variant failed, but some were not run, none passed, or func raises as given."""
        if self.failed:
            return "failed"
        is_complete = self._count("passed") > 0 and not self._count("not run") and not self._obstacle()
        return "passed" if is_complete else "incomplete"

    @property
    def passed(self) -> bool:
        """Whether no variant failed or raised, at least one passed, func runs as given, and all variants were run."""
        return self.verdict == "passed"

    @property
    def failed(self) -> tuple[VariantRow, ...]:
        """The variants that failed, or whose backward raised."""
        return tuple(row for row in self.rows if row.verdict in ("failed", "raised"))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data; each row's report as in `Report.to_dict`."""
        reports = [None if row.report is None else row.report.to_dict() for row in self.rows]
        rows = [plain({**vars(row), "report": report}) for row, report in zip(self.rows, reports, strict=True)]
        verdict = {"verdict": self.verdict, "passed": self.passed}
        return {"schema": SCHEMA, **verdict, "rows": rows, "seed": self.seed, "seconds": self.seconds}

    def to_html(self) -> str:
        """The report as one self-contained HTML page: the table, and the reports of failures."""
        return html.document(self.headline(), self._repr_html_())

    def _repr_html_(self) -> str:
        ran = [(row.path, row.verdict, seconds_text(row.seconds)) for row in self._ran]
        remarks = [(row.path, row.verdict, row.detail) for row in self.rows if row.detail and row not in self.failed]
        found = "".join(
            f"<details><summary>{escape(row.path)}: {escape(row.detail)}</summary>"
            f"<pre>{escape(str(row.detail if row.report is None else row.report))}</pre></details>"
            for row in self.failed
        )
        sections = [
            html.section("What is wrong", found) if found else "",
            html.section("Variants", html.table(("variant", "verdict", "time"), ran, (2,))),
            html.section("Remarks", html.table(("variant", "verdict", "why"), remarks)) if remarks else "",
            html.section("What it cost", f"<p>{escape(seconds_text(self.seconds))}</p>"),
        ]
        kind = "undecided" if self.verdict == "incomplete" else self.verdict  # pages have no color for "incomplete"
        return html.article(kind, self.headline(), sections)

    @property
    def _ran(self) -> list[VariantRow]:
        return [row for row in self.rows if row.verdict not in ("not applicable", "not run")]

    def _obstacle(self) -> str:
        """Why the caller's own call could not be checked; empty if it was."""
        return next((row.detail for row in self.rows if row.path == AS_GIVEN and row.verdict == "not applicable"), "")

    def _count(self, verdict: VariantVerdict) -> int:
        return sum(row.verdict == verdict for row in self.rows)

    def headline(self) -> str:
        """The verdict and its reason, in one line."""
        reason = f"{len(self.failed)} of {count(len(self._ran), 'variant')} failed"
        if self.verdict == "incomplete":
            late, total = self._count("not run"), count(len(self.rows), "variant")
            was = "was" if late == 1 else "were"
            reason = f"{late} of {total} {was} not run" if late else f"none of {total} passed"
            if self._obstacle() and self._count("passed"):
                reason = f"as given, {self._obstacle()}"
        return f"check_variants {self.verdict}: {reason}"

    def _content(self) -> str:
        return json.dumps([[row.path, row.verdict, row.detail] for row in self.rows])

    def __str__(self) -> str:
        """A summary of several lines."""
        lines = [self.headline()]
        width = max((len(row.path) for row in self.rows), default=0)
        kinds = max((len(row.verdict) for row in self.rows), default=0)
        first = {row.detail: row.path for row in reversed(self.rows) if row.detail.startswith("func raises")}
        for row in self.rows:
            same = first.get(row.detail, row.path)
            detail = row.detail if same == row.path else f"as in {same}"
            lines.append(f"  {row.path.ljust(width)}  {row.verdict.ljust(kinds)}  {detail}".rstrip())
        lines += [
            f"  reproduce   fastgrad.check_variants(..., only=[{row.path!r}], seed={self.seed})" for row in self.failed
        ]
        lines.append(f"  cost        {seconds_text(self.seconds)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """One line."""
        return f"<VariantsReport: {self.verdict}, {count(len(self.rows), 'variant')}>"
