"""The sparsity patterns that an exact check tries, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fastgrad.engines.compressed import Compression, compress_for
from fastgrad.engines.plan import column_evaluations, detection_budget, takes_long
from fastgrad.problem.first_look import FirstLook
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings
from fastgrad.structure.detection import ProblemPatterns
from fastgrad.structure.sparsity import Mask, Pattern, with_whole_elements
from fastgrad.verdict.numerical_certificate import Incomplete
from fastgrad.verdict.repeated_calls import RepeatedCalls

BRIEF_PROBES = 512
"""If probing has not ended after this many probes, dense rows and columns may be the reason."""


class Candidates:
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
