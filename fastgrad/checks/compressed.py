"""Exact checks of sparse Jacobians: finds and colors a pattern, compares compressed Jacobians, and certifies the rest.

Every entry of the pattern is compared as in the dense engine. Random directions and cotangents certify that no
entry lies outside the pattern, and that the backward is the linear map with these rows. A certificate that fails
is not yet a verdict: it leads to a single entry that is wrong when measured separately, or to a larger pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fastgrad.checks.pattern_verdict import PatternVerdict
from fastgrad.checks.sketch import SMALL_BOUND, Screening, screen
from fastgrad.checks.sketch_forward import screen_forward
from fastgrad.core.errors import unless_rejected
from fastgrad.core.phases import phase
from fastgrad.core.tensors import largest
from fastgrad.engines import compressed, cost_model
from fastgrad.engines.compressed import Compression, compress_for
from fastgrad.engines.plan import (
    can_be_dense,
    column_evaluations,
    dense_is_small,
    detection_budget,
    is_affordable,
    pays_to_compress,
    prefers_columns,
    replays_groups,
    takes_long,
)
from fastgrad.problem.first_look import FirstLook
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Plan
from fastgrad.report.failure import Failure
from fastgrad.report.number_text import count
from fastgrad.report.settings import Settings
from fastgrad.structure.detection import ProblemPatterns
from fastgrad.structure.sparsity import ALWAYS_FEW, Mask, Pattern, with_whole_elements
from fastgrad.verdict.comparison import Findings
from fastgrad.verdict.incomplete import MAX_SUSPECTS, Incomplete
from fastgrad.verdict.numerical_certificate import NumericalCertificate
from fastgrad.verdict.repeated_calls import RepeatedCalls

ATTEMPTS = 6
"""Largest number of patterns to try. These are guesses, patterns from probing (by columns, by rows or by both; with and
without dense rows and columns), and all of these with the entries that certificates add."""

BRIEF_PROBES = 512
"""If probing has not ended after this many probes, dense rows and columns may be the reason."""

Outcome = tuple[Plan, Failure | None]
"""How the Jacobians were computed, and the failure, if any."""

Next = Literal["pattern", "dense engine"]
"""What to do if a pattern led to no verdict: try the next candidate, or leave the check to the dense engine."""


@phase("compressed Jacobians")
def check_by_structure(
    problem: Problem, settings: Settings, look: FirstLook, calls: RepeatedCalls, findings: Findings
) -> Outcome | None:
    """The verdict on all Jacobians; None if no pattern makes the check cheaper than the dense engine.

    calls: holds rows and a product that were run before; receives products that may not be compared with the entries.
    """
    if look.reacted is None or not bool(look.base.isfinite().all()):
        return None
    problem.forget_outputs()
    return _ByStructure(problem, settings, look, calls, findings).outcome()


class _Candidates:
    """Patterns to try: guesses first, then those from probing; a certificate may add entries to each of them.

    Attributes
    ----------
    patterns
        Finds the patterns.
    pattern
        The current pattern; None: `compress` takes the next one.
    is_guess
        Whether the current pattern, or the one that it extends, was guessed.
    """

    def __init__(self, problem: Problem, settings: Settings, look: FirstLook, calls: RepeatedCalls) -> None:
        self._problem, self._settings, self._look = problem, settings, look
        vjp = calls.vjp if settings.check_backward_ad else None
        patterns = ProblemPatterns(problem, settings, look, detection_budget(problem, settings, look), vjp)
        self.patterns = patterns
        # Without a backward, patterns are found by evaluations alone.
        probe = partial(patterns.probe, watch_gradients=settings.check_backward_ad)
        decode = [patterns.decode] if settings.check_backward_ad else []
        finders: list[Callable[[], Pattern | None]] = [patterns.guess, *decode, probe, patterns.align]
        if takes_long(column_evaluations(settings) * problem.n + problem.m, look):
            # Dense rows and columns may hide the sparsity of the rest from all probes. All entries may even be in such
            # rows and columns.
            brief = partial(probe, most=BRIEF_PROBES)
            finders[-2:] = [brief, partial(brief, splits_hubs=True), probe, patterns.align, patterns.dense]
        self._finders = iter(finders)
        self._guess_finders = patterns.guess, patterns.decode, patterns.align
        self.pattern: Pattern | None = None
        self._certifies, self._may_exclude_columns = True, True
        self._excluded_columns: Mask | None = None
        self.is_guess = False

    def compress(self) -> Compression | None:
        """The groups of the current pattern, or of the next one; None: no pattern is left.

        Columns that share a dense row are in different groups. If this gives so many groups that they would take long,
        dense rows are left out and certified instead, as far as possible.
        """
        while self.pattern is None:
            find = next(self._finders, None)
            if find is None:
                return None
            self.pattern = find()
            self.is_guess = find in self._guess_finders
        rows: Mask | None = None
        if self._certifies and takes_long(column_evaluations(self._settings) * self.pattern.most_in_row, self._look):
            dense = self.pattern.dense_rows()
            rows = dense if dense.any() else None
        return compress_for(self._problem, self.pattern, rows, self._excluded_columns)

    def exclude_columns(self) -> bool:
        """Excludes dense columns, because they prevent rows from sharing a group; returns whether there are any.

        Excluded columns are certified instead of compared.
        """
        if not (self._certifies and self._may_exclude_columns) or self.pattern is None:
            return False
        self._may_exclude_columns, dense = False, self.pattern.dense_columns()
        self._excluded_columns = dense if dense.any() else self._excluded_columns
        return bool(dense.any())

    def exclude_nothing(self) -> None:
        """Stops excluding rows and columns. They could not be certified, so every entry must be compared."""
        self._certifies, self._excluded_columns = False, None

    def learn(self, found: Incomplete, may_hide_entries: bool) -> None:
        """Adds entries that the pattern lacks; may_hide_entries: whether rounding or noise of func may hide entries."""
        assert self.pattern is not None
        if found.refuted and not self.pattern.is_numerical and may_hide_entries:
            self._finders = iter((partial(self.patterns.probe, watch_gradients=False),))
        if found.refuted:
            self.pattern = None
            return
        extended = self.pattern.with_entries(found.rows, found.columns)
        # Comparisons take the coordinates of a complex element in pairs.
        whole = with_whole_elements(extended, self._problem.inputs, self._problem.outputs)
        self.pattern = replace(whole, is_numerical=extended.is_numerical)


class _ByStructure:
    """Tries one pattern after the other, until one leads to a verdict."""

    def __init__(
        self, problem: Problem, settings: Settings, look: FirstLook, calls: RepeatedCalls, findings: Findings
    ) -> None:
        self._problem, self._settings, self._look = problem, settings, look
        self._calls, self._findings = calls, findings
        self._candidates = _Candidates(problem, settings, look, calls)

    def outcome(self) -> Outcome | None:
        """The outcome of the first pattern that leads to a verdict, if any."""
        is_reverse = self._settings.check_backward_ad
        attempt = self._attempt if is_reverse else self._attempt_forward
        answer: Outcome | Next = "pattern"
        for _ in range(ATTEMPTS):
            compression = self._candidates.compress()
            if compression is None:
                break
            answer = attempt(compression)
            if answer != "pattern":
                break
        outcome = None if isinstance(answer, str) else answer
        if outcome is None or (is_reverse and outcome[1] is None):
            self._candidates.patterns.repeat_suspects()
        return outcome

    def _attempt(self, compression: Compression) -> Outcome | Next:
        """Measures, compares and certifies the entries of one pattern; returns the outcome, or what to do next."""
        problem, settings, look, candidates = self._problem, self._settings, self._look, self._candidates
        column_groups = compression.column_groups.count
        row_groups = sum(grouping.count for grouping in compression.row_groups)
        by_columns = prefers_columns(column_groups, row_groups)
        if not pays_to_compress(problem, settings, column_groups, None if by_columns else row_groups):
            return "dense engine"
        planned = 2 * column_groups + (column_groups if by_columns else row_groups)
        problem.progress.start(planned, look.seconds * planned, count(column_groups, "column group"))
        verdict = self._measured(compression)
        if verdict is None:
            return "dense engine"
        if verdict.numerical_suspects and dense_is_small(problem, settings):
            verdict.repeat_differences()
            return "dense engine"
        if candidates.is_guess and len(verdict.numerical_suspects) > MAX_SUSPECTS:
            verdict.repeat_differences()
            candidates.pattern = None
            return "pattern"
        found: Failure | Incomplete | None = None
        if by_columns:
            by_columns, found = verdict.by_columns()
        if not by_columns:
            if takes_long(cost_model.COSTS.vjp_evaluations * row_groups, look) and candidates.exclude_columns():
                verdict.repeat_suspects()
                return "pattern"
            if not pays_to_compress(problem, settings, column_groups, row_groups):
                verdict.repeat_suspects()
                return "dense engine"
            found = verdict.by_rows()
        if found is None and compression.leaves_out:
            screening = _screen_excluded(problem, settings, compression, verdict.findings)
            if screening.undecided is not None:
                candidates.exclude_nothing()
                verdict.repeat_suspects()
                return "pattern"
            found = screening.failure
        plan = verdict.plan if by_columns else replace(verdict.plan, row_groups=row_groups)
        return self._answer(verdict, found, plan)

    def _answer(self, verdict: PatternVerdict, found: Failure | Incomplete | None, plan: Plan) -> Outcome | Next:
        """The outcome, or what to do next, from the result of a pattern: a failure, what it lacks, or None."""
        problem, settings, candidates = self._problem, self._settings, self._candidates
        if isinstance(found, Incomplete):
            found = verdict.varies() or found
        if isinstance(found, Incomplete):
            verdict.repeat_differences()
            if found.unexplained is None:
                if dense_is_small(problem, settings):
                    return "dense engine"
                candidates.learn(found, verdict.of_func.may_hide_entries)
                return "pattern"
            if can_be_dense(problem, settings):
                return "dense engine"
            found = verdict.undecided(found.unexplained)
        elif found is None and verdict.hidden() and is_affordable(problem) and can_be_dense(problem, settings):
            verdict.repeat_differences()
            return "dense engine"
        elif found is None:
            verdict.record()
            if settings.check_forward_ad:
                forward = self._forward(verdict, plan)
                if forward is None and verdict.compression.excluded_rows is not None:
                    candidates.exclude_nothing()
                    verdict.repeat_suspects()
                    return "pattern"
                if forward is None:
                    return "dense engine"
                found = forward if isinstance(forward, Failure) else None
        self._findings.add(verdict.findings)
        return plan, found

    def _attempt_forward(self, compression: Compression) -> Outcome | Next:
        """Like `_attempt` if only forward mode is checked: the pattern is found and certified by func alone."""
        candidates = self._candidates
        if not pays_to_compress(self._problem, self._settings, compression.column_groups.count, 0):
            candidates.pattern = None
            return "pattern"
        verdict = self._measured(compression)
        if verdict is None:
            return "dense engine"
        if not verdict.numerical_suspects:
            found = self._forward(verdict, verdict.plan)
            passes = isinstance(found, Tensor) and _explains_func(verdict.of_func, found)
            if passes:
                self._findings.certificates.append(verdict.of_func.certificate())
            if passes or isinstance(found, Failure):
                self._findings.add(verdict.findings)
                return verdict.plan, found if isinstance(found, Failure) else None
        verdict.repeat_differences()
        if compression.leaves_out:
            candidates.exclude_nothing()
        else:
            candidates.pattern = None
        return "pattern"

    def _forward(self, verdict: PatternVerdict, plan: Plan) -> Failure | Tensor | None:
        """As `PatternVerdict.forward`, also for the rows that are left out of the pattern."""
        found, rows = verdict.forward(plan), verdict.compression.excluded_rows
        if rows is None or not isinstance(found, Tensor):
            return found
        screening = screen_forward(self._problem, self._settings, rows)
        if screening.undecided is not None or (screening.failure is not None and screening.failure.kind == "nonlinear"):
            # One of many JVPs may have been wrong in a single call.
            return verdict.jvps_vary() or screening.failure
        if screening.failure is not None:
            return screening.failure
        self._problem.unexplained_jvps = None
        _note_certified_rows(self._settings, verdict.findings, rows, screening, "in forward mode, ")
        return found

    def _measured(self, compression: Compression) -> PatternVerdict | None:
        """Measures the numerical entries; None if func raises, perhaps for steps of several coordinates."""
        problem, settings, look = self._problem, self._settings, self._look
        pattern, groups = compression.pattern, compression.column_groups.count
        memory = pattern.nnz * cost_model.COSTS.entry_bytes
        replayed = replays_groups(problem, settings, look, groups)
        if replayed:
            memory += 8 * groups * problem.m
        record, origin = look.record_graph, pattern.origin
        plan = Plan("compressed", 0, 0, record, origin, column_groups=groups, memory=memory, replayed=replayed)
        return unless_rejected(partial(PatternVerdict, problem, settings, plan, compression, look, self._calls))


def _explains_func(of_func: NumericalCertificate, entries: Tensor) -> bool:
    """Whether outputs change as the entries predict, and no rounding or noise may hide other entries."""
    return of_func.certify(entries) == [] and not of_func.may_hide_entries and of_func.at_eps().explains(entries)


def atol_outside(base: Tensor) -> float:
    """The default atol for outputs of shape (m,), or this share of the largest one if that is less than 1."""
    return Settings().atol * min(1.0, largest(base) or 1.0)


def numerical_entries(
    problem: Problem, settings: Settings, look: FirstLook
) -> tuple[Compression, Tensor, float] | None:
    """The numerical Jacobian, compressed and certified; None: no pattern was found and certified.

    Returns the pattern with its groups, the entries (float64, shape (nnz,)), and the size from which an entry outside
    the pattern is detected.
    """
    for compression, verdict in _compressions(problem, settings, look):
        # If there are no suspects, the outputs change along random directions as the numerical entries predict.
        of_func = verdict.of_func
        explained = not verdict.numerical_suspects and of_func.certify(None) == []
        if explained and of_func.at_eps().explains(verdict.numerical):
            return compression, verdict.numerical, verdict.of_func.bound
    return None


def analytical_entries(problem: Problem, settings: Settings, look: FirstLook) -> tuple[Compression, Tensor] | None:
    """The analytical Jacobian by reverse mode: the pattern and the entries, as in `numerical_entries`."""
    for compression, verdict in _compressions(problem, settings, look):
        values, _ = compressed.analytical_entries(problem, compression, repeat=False)
        if verdict.is_certified(values):
            return compression, values
    return None


def _compressions(
    problem: Problem, settings: Settings, look: FirstLook
) -> Iterator[tuple[Compression, PatternVerdict]]:
    """Yields the groups and the verdict of each pattern that guesses and probing find, if the pattern pays off."""
    if look.reacted is None or not bool(look.base.isfinite().all()):
        return
    patterns = ProblemPatterns(problem, settings, look, detection_budget(problem, settings, look))
    without_gradients = partial(patterns.probe, watch_gradients=False)
    finders = patterns.guess, patterns.decode, patterns.probe, without_gradients, patterns.align
    for pattern in filter(None, (find() for find in finders)):
        compression = compress_for(problem, pattern)
        columns, rows = compression.column_groups.count, sum(grouping.count for grouping in compression.row_groups)
        if pays_to_compress(problem, settings, columns, rows):
            plan = Plan("compressed", 0, 0, look.record_graph, pattern.origin)
            yield compression, PatternVerdict(problem, settings, plan, compression, look)


def _screen_excluded(problem: Problem, settings: Settings, compression: Compression, findings: Findings) -> Screening:
    """Fast mode's verdict on the dense rows and columns that are in no group; adds certificates if they pass."""
    if compression.excluded_rows is not None:
        screening = screen(problem, settings, rows=compression.excluded_rows)
        if screening.failure is not None or screening.undecided is not None:
            return screening
        _note_certified_rows(settings, findings, compression.excluded_rows, screening)
    if compression.excluded_columns is None:
        return Screening()
    # A few dense columns are screened one by one: in a joint step, rounding of large columns would hide a small entry.
    columns = compression.excluded_columns.nonzero().reshape(-1)
    for some in torch.split(columns, 1 if columns.numel() <= ALWAYS_FEW else columns.numel()):
        selected = torch.zeros_like(compression.excluded_columns).index_fill_(0, some, True)
        screening = screen(problem, settings, columns=selected)
        if screening.failure is not None or screening.undecided is not None:
            return screening
    _note_certified(findings, columns.numel(), "column", screening)
    return screening


def _note_certified_rows(
    settings: Settings, findings: Findings, rows: Tensor, screening: Screening, mode: str = ""
) -> None:
    _note_certified(findings, int(rows.sum()), "row", screening, mode)
    if screening.bound > SMALL_BOUND * settings.atol:
        findings.note_undecided(settings.of_entries(screening.bound))


def _note_certified(findings: Findings, count: int, kind: str, screening: Screening, mode: str = "") -> None:
    names = f"{mode}{count} dense {kind}{'s' if count > 1 else ''}"
    findings.notes.append(f"{names} certified by random vectors, not compared entry by entry")
    for certificate in screening.certificates:
        # Certificates of forward mode name the mode in their claims.
        claim = f"in {names.removeprefix(mode)}, {certificate.claim}"
        findings.certificates.append(replace(certificate, claim=claim))
