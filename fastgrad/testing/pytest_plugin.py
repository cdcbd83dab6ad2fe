"""`pytest --fastgrad`: patches torch's checkers for a test session, counts, compares, reports and summarizes."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgrad._version import __version__
from fastgrad.core.memory import Result
from fastgrad.report import index_page
from fastgrad.report.number_text import count, seconds_text
from fastgrad.testing.patch import Check, DisagreementError, ask_both, estimate, patch

SLOWEST = 10
"""Number of slowest checks that the summary lists."""

_OUTSIDE = "outside of tests"


@dataclass
class Summary:
    """Totals of a session's checks, as plain data that a worker of pytest-xdist can send.

    slowest: rows of seconds, torch's seconds or None, checker, engine, test. undecided: tests with undecided checks.
    reports: for each failing check, the HTML file, the test, the checker, and the first line of the message. lost:
    number of workers that ended without a summary.
    """

    checkers: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    engines: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    torch_seconds: float = 0.0
    compared: int = 0
    slowest: list[list[Any]] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    reports: list[list[str]] = field(default_factory=list)
    lost: int = 0

    def add(self, check: Check, test: str) -> None:
        """Counts a check of a test."""
        engine = check.report.plan.engine if check.report is not None and check.report.plan else None
        self.checkers[check.name] += 1
        self.verdicts["raised" if check.report is None else check.report.verdict] += 1
        if engine is not None:
            self.engines[engine] += 1
        if check.ours.verdict == "raised":
            self.errors[type(check.ours.error).__name__] += 1
        self.seconds += check.ours.seconds
        torch_seconds = None if check.torch is None else check.torch.seconds
        self.torch_seconds += torch_seconds or 0.0
        self.compared += check.torch is not None
        if check.differs:
            self.differences.append(test)
        if check.report is not None and check.report.verdict == "undecided":
            self.undecided.append(test)
        self.slowest.append([check.ours.seconds, torch_seconds, check.name, engine or "-", test])
        self._keep_slowest()

    def merge(self, other: dict[str, Any]) -> None:
        """Adds another summary, as its `as_dict` returned it."""
        for name, value in other.items():
            own = getattr(self, name)
            setattr(self, name, own + type(own)(value))
        self._keep_slowest()

    def as_dict(self) -> dict[str, Any]:
        """The fields, in types that JSON and execnet support."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    def lines(self) -> list[str]:
        if not self.verdicts and not self.lost:
            return ["no checks: no test called torch's gradcheck or gradgradcheck, or the fixtures with these names"]
        lines = [f"{count(sum(self.checkers.values()), 'check')} ({_counts(self.checkers)}): {_counts(self.verdicts)}"]
        if self.errors:
            lines[0] += f" ({_counts(self.errors)})"
        lines.append(f"fastgrad {seconds_text(self.seconds)}")
        if self.compared:
            lines[-1] += f", torch {seconds_text(self.torch_seconds)}{self._ratio()}"
            lines.append(f"verdicts that differ: {len(self.differences)}")
            lines += [f"  {test}" for test in sorted(set(self.differences))]
        if self.undecided:
            lines.append('undecided (see the message of each; engine="dense" compares every entry):')
            lines += [f"  {test}" for test in sorted(set(self.undecided))]
        if self.engines:
            lines.append(f"engines: {_counts(self.engines)}")
        if self.slowest:
            lines.append("slowest:")
        for seconds, torch_seconds, name, engine, test in self.slowest:
            torchs = "" if torch_seconds is None else f"  torch {seconds_text(torch_seconds):>8}"
            lines.append(f"  {seconds_text(seconds):>8}{torchs}  {name:<13} {engine:<10} {test}")
        if self.lost:
            lines.append(f"not counted: the checks of crashed workers ({self.lost})")
        return lines

    def _ratio(self) -> str:
        """The ratio of the times, the larger over the smaller."""
        if not self.seconds or not self.torch_seconds:
            return ""
        ratio = self.torch_seconds / self.seconds
        slower, factor = ("torch", ratio) if ratio >= 1 else ("fastgrad", 1 / ratio)
        return f" ({slower} takes {factor:{'.2g' if factor < 99 else '.0f'}} times as long)"

    def _keep_slowest(self) -> None:
        self.slowest = sorted(self.slowest, key=lambda row: -float(row[0]))[:SLOWEST]


class Durations:
    """The durations of tests, including the checks in workers of pytest-xdist."""

    def __init__(self) -> None:
        self._durations: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds up the duration of a test; the process that prints the summary gets the reports of all workers."""
        self._durations[report.nodeid] = self._durations.get(report.nodeid, 0.0) + report.duration

    def write_durations(self, directory: Path) -> Path:
        """Writes the durations file of pytest-split; returns its path."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "durations.json"
        path.write_text(json.dumps(self._durations, indent=1, sort_keys=True) + "\n")
        return path


class Session(Durations):
    """The plugin with --fastgrad: torch's checkers are patched until pytest ends."""

    def __init__(self, config: pytest.Config, compare: bool, directory: Path | None) -> None:
        super().__init__()
        self._config = config
        self._compare = compare
        self._directory = directory
        self._summary = Summary()
        self._written: Counter[str] = Counter()
        self._checks = _until_the_end(config, patch(compare=compare))
        if compare:
            # The first checks import modules, for up to a second; this must not count as time of a test.
            sine = torch.sin, torch.zeros(40, dtype=torch.float64, requires_grad=True)
            for name, fast_mode in product(("gradcheck", "gradgradcheck"), (False, True)):
                ask_both(name, sine, {"fast_mode": fast_mode})

    def pytest_report_header(self) -> str:
        """The plugin's line in the header of the session."""
        beside = ", compared with torch's" if self._compare else " instead of torch's"
        return f"fastgrad {__version__}: gradcheck and gradgradcheck{beside}"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Counts the checks of a phase, and fails the phase for a difference that the test caught or expected."""
        report = yield
        differences = []
        for check in self._taken():
            self._count(check, item.nodeid, report)
            number = 1 + sum(name.startswith("fastgrad ") for name, _ in item.user_properties)
            item.user_properties.append((f"fastgrad {check.name} {number}", _property(check)))
            if check.differs:
                differences.append(str(DisagreementError(check)))
        if differences and not report.failed:
            report.outcome = "failed"
            report.longrepr = "\n\n".join(differences)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Counts the remaining checks; a worker sends its summary."""
        for check in self._taken():
            self._count(check, _OUTSIDE)
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output["fastgrad"] = self._summary.as_dict()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Receives a worker's summary (pytest-xdist)."""
        summary = getattr(node, "workeroutput", {}).get("fastgrad")
        if summary is None:
            self._summary.lost += 1
        else:
            self._summary.merge(summary)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the totals, and writes the summary, the durations and the index page."""
        terminalreporter.section("fastgrad")
        for line in self._summary.lines():
            terminalreporter.line(line)
        if self._directory is not None:
            self.write_durations(self._directory)
            (self._directory / "summary.json").write_text(json.dumps(self._summary.as_dict(), indent=1) + "\n")
            page = index_page.page(self._summary.lines(), self._summary.reports)
            (self._directory / "index.html").write_text(page)
            terminalreporter.line(f"reports of {count(len(self._summary.reports), 'failing check')}: {self._directory}")
        step_summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if step_summary:
            with Path(step_summary).open("a") as file:
                file.write("\n".join(["### fastgrad", "", "```", *self._summary.lines(), "```", ""]))

    def _taken(self) -> list[Check]:
        """The checks since the last call."""
        taken = list(self._checks)
        del self._checks[: len(taken)]  # other threads may have appended meanwhile
        return taken

    def _count(self, check: Check, test: str, phase: pytest.TestReport | None = None) -> None:
        self._summary.add(check, test)
        if self._directory is None or check.report is None or check.report.passed:
            return
        path = self._directory / self._file_name(test)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(check.report.to_html())
        path.with_suffix(".json").write_text(check.report.to_json())
        line = str(check.report).partition("\n")[0]
        self._summary.reports.append([path.name, test, check.name, line])
        if phase is not None:
            phase.sections.append(("fastgrad's report", str(path)))

    def _file_name(self, test: str) -> str:
        """The file name for a test's next failing check: readable, valid on all systems, and unique."""
        stem = re.sub(r"[^\w.=,-]+", "-", test).strip("-")
        if len(stem) > 120:
            stem = f"{stem[:110]}-{hashlib.sha256(test.encode()).hexdigest()[:8]}"
        self._written[stem] += 1
        return f"{stem}-{self._written[stem]}.html"


class Estimates(Durations):
    """The plugin with --fastgrad=estimate: estimates durations, and marks tests with checks as skipped."""

    def __init__(self, config: pytest.Config, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._seconds = _until_the_end(config, estimate())

    def pytest_report_header(self) -> str:
        """The plugin's line in the header of the session."""
        return f"fastgrad {__version__}: estimates the times of gradcheck and gradgradcheck, and does not run them"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Adds the estimates to a test's duration, and marks it as skipped."""
        report = yield
        seconds, self._seconds[:] = sum(self._seconds), []
        if seconds:
            report.duration += seconds
            report.outcome = "skipped"
            reason = f"Skipped: its checks would take {seconds_text(seconds)}"
            report.longrepr = (str(item.path), item.location[1] or 0, reason)
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Writes the file and prints its path."""
        path = self.write_durations(self._directory)
        terminalreporter.section("fastgrad")
        total = seconds_text(sum(self._durations.values()))
        terminalreporter.line(f"{count(len(self._durations), 'test')} would take {total}: {path}")


def _until_the_end(config: pytest.Config, context: AbstractContextManager[Result]) -> Result:
    """Enters a context that is left when pytest ends, also after an error and if the session never begins."""
    stack = ExitStack()
    config.add_cleanup(stack.close)
    return stack.enter_context(context)


def _property(check: Check) -> str:
    """The value of a check's property in JUnit XML."""
    torchs = "" if check.torch is None else f", torch {check.torch.verdict} in {seconds_text(check.torch.seconds)}"
    return f"{check.ours.verdict} in {seconds_text(check.ours.seconds)}{torchs}"


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counter.most_common())
