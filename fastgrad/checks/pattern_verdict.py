"""The verdict on one sparsity pattern: measures its entries, compares them, and certifies that there are no others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fastgrad.core.errors import raise_unless_of_func, raised_by, unless_rejected
from fastgrad.core.native import ops
from fastgrad.core.tensors import checksum, differ, largest, largest_change, largest_finite
from fastgrad.engines import compressed, executor
from fastgrad.engines.compressed import Compression
from fastgrad.engines.executor import RejectedError
from fastgrad.problem.first_look import FirstLook
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Pair, Plan
from fastgrad.report.failure import Failure, Part
from fastgrad.report.settings import Settings
from fastgrad.verdict.analytical_certificate import AnalyticalCertificate
from fastgrad.verdict.comparison import Findings, entry_count, excesses
from fastgrad.verdict.confirm import entries_failure, pattern_mismatch
from fastgrad.verdict.incomplete import MAX_SUSPECTS, Incomplete, incomplete
from fastgrad.verdict.linearity import one_hot_rows, separate_failure
from fastgrad.verdict.numerical_certificate import NumericalCertificate
from fastgrad.verdict.repeated_calls import RepeatedCalls
from fastgrad.verdict.repeated_rows import groups_failure, nondeterministic, raised_for
from fastgrad.verdict.tangent_certificate import TangentCertificate

MAX_SINGLE_COLUMNS = 64
"""Largest number of columns, of entries that differ, to measure one by one."""


class _Entries:
    """The numerical and analytical entries of a pattern, and their comparison.

    Attributes
    ----------
    compression
        The pattern with its groups.
    of_func
        The certificate of the numerical entries.
    """

    _of_backward: AnalyticalCertificate
    _of_jvp: TangentCertificate | None
    _statistics: list[float]

    def __init__(
        self,
        problem: Problem,
        settings: Settings,
        plan: Plan,
        compression: Compression,
        look: FirstLook,
        calls: RepeatedCalls | None = None,
    ) -> None:
        self._problem = problem
        self._settings = settings
        self.plan = plan
        self.compression = compression
        self._calls = calls
        self.findings = Findings()
        self._values_of_groups: Tensor | None = None
        self.of_func = NumericalCertificate(problem, settings, compression, look)
        try:
            self._measure()
        except RejectedError as error:
            replay = partial(self._entries, self.plan)
            self._measure_one_by_one(str(error))
            executor.note_if_repeated(problem, error, replay, "in replays")
        if self.plan.replayed and self.numerical_suspects != []:
            self._measure_wrong_replays_again("their results do not add up to those of single evaluations")

    def _entries(self, plan: Plan | None = None) -> Tensor:
        """The numerical entries as a plan, by default the current one, computes them: float64, shape (nnz,)."""
        return compressed.numerical_entries(self._problem, plan or self.plan, self.compression, self._settings.eps)

    def _measure(self) -> None:
        numerical = self._entries()
        self._measured = checksum(numerical)
        self.numerical_suspects = self.of_func.screen(numerical)

    @property
    def numerical(self) -> Tensor:
        """The numerical entries: float64, shape (nnz,)."""
        return self.of_func.values

    def _measure_one_by_one(self, why: str) -> None:
        """Measures the entries by one evaluation at a time instead of replays."""
        self.plan = replace(self.plan, replayed=False, reason=f"{self.plan.reason}; no replays: {why}")
        self._measure()

    def _measure_wrong_replays_again(self, why: str) -> None:
        before, plan, atol = self.numerical, self.plan, self._settings.loosest().atol
        self._measure_one_by_one(why)
        if not differ(before[None], self.numerical[None], atol, False):
            return  # the replays differ only by rounding
        with suppress(RejectedError):
            if not differ(self._entries(plan)[None], self.numerical[None], atol, False):
                self._problem.irreproducible.append("in replays")  # the replays were wrong once

    def repeat_differences(self) -> None:
        """Measures the column groups of a rejected pattern again, and records if func now gives other values."""
        now = checksum(self._entries())
        # If the two repeats differ, func rounds differently in each run.
        if now != self._measured and now == checksum(self._entries()):
            self._problem.irreproducible.append("at steps of several inputs")

    def repeat_suspects(self) -> None:
        """Like `repeat_differences`, if differences along directions contradict the entries."""
        if self.numerical_suspects:
            self.repeat_differences()

    def _differs(self) -> bool:
        """Whether any entry in the pattern may differ by the allclose rule."""
        settings = self._settings
        entries = self._of_backward.values.unsqueeze(0), self.numerical.unsqueeze(0)
        domains = {block.is_complex for block in self._problem.inputs}
        # If some entries are complex and some real, coordinates are compared: a complex entry is close if the error of
        # each of its coordinates is at most 2^-1/2 times the tolerance.
        share = 1.0 if len(domains) == 1 else 2**-0.5
        tolerances = settings.atol * share, settings.rtol * share
        self._statistics = ops.compare(*entries, *tolerances, domains == {True}, False).tolist()
        return bool(self._statistics[0])

    def _confirmed_mismatch(self, may_be_sums: bool = False) -> Failure | None:
        """The failure of entries that differ; None if they differ only by added entries from outside the pattern.

        An analytical entry outside the pattern is added to another one in its column, a numerical entry to another one
        in its row. The worst rows are computed separately and, if entries still differ, so are their columns. If this
        changes entries, other entries may also be sums. In this case, only an entry that was computed separately is
        reported. may_be_sums: whether the pattern is already known to lack entries.
        """
        rows, columns = self.compression.rows, self.compression.columns
        excess = self._excesses(slice(None))
        differing = (~(excess <= 1)).nonzero().reshape(-1)
        worst = differing[excess[differing].nan_to_num(torch.inf).argsort(descending=True)]
        measured: set[int] = set()
        are_sums = may_be_sums
        for row in list(dict.fromkeys(rows[worst[: 16 * MAX_SUSPECTS]].tolist()))[:MAX_SUSPECTS]:
            mine = (rows == row).nonzero().reshape(-1)
            before = self._of_backward.values[mine], self.numerical[mine]
            self._of_backward.replace_values(mine, self._of_backward.row_alone(row)[columns[mine]])
            still = mine[~(self._excesses(mine) <= 1)][:MAX_SUSPECTS]
            for column in columns[still].tolist():
                if column not in measured:
                    measured.add(column)
                    self._measure_column(column)
            change = max(map(largest_change, before, (self._of_backward.values[mine], self.numerical[mine])))
            are_sums = are_sums or not change <= self._settings.atol
            wrong = still[~(self._excesses(still) <= 1)]
            if not wrong.numel():
                continue
            if not are_sums or any(block.is_complex for block in (*self._problem.inputs, *self._problem.outputs)):
                return self._mismatch()
            entries = (values[wrong] for values in (rows, columns, self._of_backward.values, self.numerical))
            failure, unresolved = entries_failure(self._problem, self._settings, *entries)
            if failure is not None:
                return failure
            if unresolved:
                self.findings.note_undecided(unresolved)
        return None

    def _separates_sums(self, values: Tensor) -> bool:
        """Measures the columns of the numerical entries that differ most from `values`, one column at a time.

        Next to a kink, the difference of a column group may contain entries that the pattern lacks. If differences
        change, all column groups are repeated, because func may also have returned other values once. Returns False if
        no entry of the measured columns differs any more, and there are other columns.
        """
        excess = self._excess_of(values).nan_to_num(torch.inf)
        worst = (excess > 1).nonzero().reshape(-1)
        if not worst.numel():
            return True
        columns = self.compression.columns[worst[excess[worst].argsort(descending=True)]].tolist()
        suspects = list(dict.fromkeys(columns))
        changes = [self._measure_column(column) for column in suspects[:MAX_SUSPECTS]]
        if max(changes) <= self._settings.atol:
            return True
        for column in suspects[MAX_SUSPECTS:MAX_SINGLE_COLUMNS]:
            self._measure_column(column)
        self.repeat_differences()
        measured = torch.tensor(suspects[:MAX_SINGLE_COLUMNS], device=excess.device)
        own = torch.isin(self.compression.columns, measured)
        return len(suspects) <= MAX_SINGLE_COLUMNS or not bool((self._excess_of(values[own], own) <= 1).all())

    def _measure_column(self, column: int) -> float:
        """Replaces the numerical entries of a column by differences for this column alone; returns how they change."""
        within, excluded = self.compression.columns == column, self.compression.excluded_rows
        difference = self._problem.difference_columns(column, 1, self._settings.eps, self.plan.record_graph)
        if excluded is not None:
            difference.masked_fill_(excluded, 0.0)
        before, own = self.numerical[within], difference[0, self.compression.rows[within]]
        self.numerical[within] = own
        return largest_change(before, own)

    def _excesses(self, entries: Tensor | slice) -> Tensor:
        """|analytical - numerical| divided by the allowed error, coordinate by coordinate: shape (entries,)."""
        return self._excess_of(self._of_backward.values[entries], entries)

    def _excess_of(self, values: Tensor, entries: Tensor | slice = slice(None)) -> Tensor:
        numerical, columns = self.numerical[entries], self.compression.columns[entries]
        return excesses(self._problem, self._settings, values, numerical, columns)

    def _mismatch(self) -> Failure | None:
        """The failure of the first pair with an entry that is wrong by the allclose rule, in torch's order."""
        self.findings = Findings()  # earlier findings may count entries outside the pattern that were added to others
        entries = self.compression, self._of_backward.values, self.numerical
        return pattern_mismatch(self._problem, self.plan, *entries, self._settings, self.findings)

    def _record_pairs(self) -> None:
        """Records the comparison of each output and input, all of whose entries agree."""
        if self.findings.pairs:
            return  # some entries differed at eps, so all pairs were compared one by one
        compression, own = self.compression, (self._settings.atol, self._settings.rtol)
        is_only_pair = len(self._problem.inputs) == len(self._problem.outputs) == 1
        for output, block in itertools.product(self._problem.outputs, self._problem.inputs):
            if compression.leaves_out_pair(output, block):
                continue
            within = compression.entries_of(output)
            columns = compression.columns[within]
            chosen = (columns >= block.first) & (columns < block.end)
            statistics = self._statistics  # of all entries
            if not is_only_pair:
                found, wanted = (values[within][chosen][None] for values in (self._of_backward.values, self.numerical))
                statistics = ops.compare(found, wanted, *own, block.is_complex, False).tolist()
            places = output.index, block.index, output.position, block.position
            largest = max(0.0, statistics[4]), max(0.0, statistics[5])
            count = int(chosen.sum()) // block.width
            self.findings.add_pair(Pair(*places, "all", "reverse", count, 0, True, *largest, True))


class PatternVerdict(_Entries):
    """The verdict that one pattern leads to."""

    def is_certified(self, values: Tensor) -> bool:
        """Whether sums of the entries equal VJPs and, for a custom backward, two rows that are run separately agree."""
        certificate, rows = self._certificate_of(values, self._calls), (0, self._problem.m - 1)
        return certificate.explains_products() and (not self._problem.is_custom or certificate.explains_rows(rows))

    def by_columns(self) -> tuple[bool, Failure | Incomplete | None]:
        """Compares columns from differentiating the backward.

        Returns whether these columns are verified and, if so, the result as from `by_rows`.
        """
        problem = self._problem
        problem.graph()  # recorded here, so that an exception of func is not taken for one of its backward
        values = unless_rejected(partial(compressed.linear_entries, problem, self.compression))
        if values is None:  # the backward cannot be differentiated
            return False, None
        self._of_backward = self._certificate_of(values, self._calls)
        if not unless_rejected(self._of_backward.explains_products):  # backward may raise for some layout
            return False, None
        failure, _ = one_hot_rows(problem, self._settings)
        if failure is None:
            failure = separate_failure(problem, self._settings, *self._of_backward.first_product())
        return True, failure or self._judged(None)

    def by_rows(self) -> Failure | Incomplete | None:
        """Compares and certifies entries from VJPs of row groups: a failure, what the pattern lacks, or None."""
        problem, compression = self._problem, self.compression
        problem.graph()  # recorded here, so that an exception of func is not taken for one of its backward
        try:
            values, matches = compressed.analytical_entries(problem, compression)
        except Exception as error:
            raise_unless_of_func(error)
            run = partial(compressed.analytical_entries, problem, compression)
            if raised_by(partial(run, repeat=False)) is not None:
                return incomplete([], refuted=True)  # the backward may accept only one-hot grad_outputs
            again = raised_by(run)
            if again is None:
                raise  # it depends on the number of the call, not on grad_output
            return raised_for("a constant grad_output, or for a larger one", again)
        self._of_backward = self._certificate_of(values, self._calls)
        self._values_of_groups = values
        repeat: Failure | None = None
        for output, repeated, match in matches:
            part: Part = "imaginary" if output.is_complex else "all"
            failure = partial(Failure.at, output=output, part=part)
            if self._settings.check_grad_dtypes and not match.dtypes:
                return failure("dtype")
            if not match.sizes:
                return failure("size")
            if not match.repeats and repeat is None:
                groups = compression.row_groups[output.index].members()[:repeated]
                repeat = groups_failure(problem, self._settings, output, groups)
                if repeat is not None and repeat.kind in ("nonlinear", "raises"):
                    first = output.first + int(groups[0][0])
                    repeat = self.of_func.row_failure(first, self._of_backward.row_alone(first)) or repeat
                own = self._settings.loosest()
                if repeat is None and not match.movement <= own.atol + own.rtol * largest(values):
                    repeat = failure("nondeterministic")  # the difference did not recur
        if repeat is not None and repeat.kind == "nondeterministic":
            return repeat
        return self._judged(repeat)

    def varies(self) -> Failure | None:
        """The failure if row groups of a rejected pattern give other values when they run again, also on a new graph.

        If a group is wrong only once, or func records a wrong graph once, a right pattern looks wrong. The next pattern
        has other groups and a new graph, which may not show the error.
        """
        on_same_graph = self._problem.is_custom and self._groups_vary()
        self._problem.forget_graph()
        return nondeterministic(self._problem.outputs[0]) if on_same_graph or self._groups_vary() else None

    def _groups_vary(self) -> bool:
        before = self._values_of_groups
        if before is None:
            return False
        again, _ = compressed.analytical_entries(self._problem, self.compression, repeat=False)
        # Values may differ by rtol times the largest one. Values that are not finite must recur.
        own = self._settings.loosest()
        allowed = own.atol + self._settings.nondet_tol * self._problem.m
        allowed += own.rtol * largest_finite(before)
        return not bool(torch.isclose(again, before, rtol=0.0, atol=allowed, equal_nan=True).all())

    def _judged(self, repeat: Failure | None) -> Failure | Incomplete | None:
        """Compares all entries, then certifies them: a failure, what the pattern lacks, or None.

        repeat: the failure of repeated groups, which counts if no entry is wrong.
        """
        differs = self._differs()
        if differs and self.plan.replayed:
            self._measure_wrong_replays_again("a mismatch is checked again, one call at a time")
            differs = self._differs()
        measured = (self._of_backward.values.clone(), self.numerical.clone()) if differs else ()
        failure = self._confirmed_mismatch() if differs else None
        if failure is not None:
            return self._beside_other_entries(failure)
        if repeat is not None:
            return repeat
        found = self._certified()
        if found is None:
            # Entries may have changed when they were measured separately, although none outside the pattern was found.
            now = self._of_backward.values, self.numerical
            change = max([self._of_backward.changed_by, *map(largest_change, measured, now)])
            if not change <= self._settings.atol / 4:
                return incomplete([], unexplained=change)
        if found is None and self._of_backward.has_changed:
            differs = self._differs()
        return found or (self._mismatch() if differs else None)

    def hidden(self) -> float:
        """The size up to which errors may be hidden in a check that passed; 0 if this size is too small to matter."""
        bound = max(self.of_func.bound, self._of_backward.bound)
        return bound if bound > self.of_func.asked else 0.0

    def _certificate_of(self, values: Tensor, calls: RepeatedCalls | None) -> AnalyticalCertificate:
        row_failure = self.of_func.row_failure
        return AnalyticalCertificate(self._problem, self._settings, self.compression, values, row_failure, calls)

    def _certified(self) -> Failure | Incomplete | None:
        """Certifies that no entry lies outside the pattern, and that the backward is linear.

        Returns a failure or what the pattern lacks; None if everything is certified.
        """
        of_func, of_backward = self.of_func, self._of_backward
        certifications: tuple[Callable[[], Failure | Incomplete], ...] = (
            lambda: of_func.follow(self.numerical_suspects, of_backward.row_alone),
            of_backward.compare_rows,
            lambda: of_backward.certify(of_func.asked),
            self._certify_func,
            of_backward.compare_more_rows,
        )
        learnt = []
        unexplained: float | None = None
        for certify in certifications:
            if unexplained is not None and certify == self._certify_func:
                continue  # the pattern does not explain another result, so this test cannot certify it
            found = certify()
            if isinstance(found, Failure) or found.refuted:
                return found
            if found.unexplained is not None:
                unexplained = max(found.unexplained, unexplained or 0.0)
            learnt.append((found.rows, found.columns))
        found, pattern = incomplete(learnt), self.compression.pattern
        if found.rows.size and pattern.with_entries(found.rows, found.columns).nnz > pattern.nnz:
            return found
        return None if unexplained is None else incomplete([], unexplained=unexplained)

    def _certify_func(self) -> Failure | Incomplete:
        """Compares derivatives of outputs with the analytical entries, which VJPs have already confirmed."""
        rows = self.of_func.certify(self._of_backward.values, self._of_backward.row_alone)
        if rows is None:
            return incomplete([], refuted=True)
        if isinstance(rows, Failure):
            return rows
        found = self.of_func.follow(rows, self._of_backward.row_alone)
        if isinstance(found, Failure) or not found.is_nothing:
            return found
        return self.of_func.at_eps().certify(self._of_backward.values, self._of_backward.row_alone)

    def undecided(self, unexplained: float) -> Failure | None:
        """The failure of a wrong entry in the pattern; otherwise records the comparison, without certificates."""
        failure = self._mismatch() if self._differs() else None
        self.findings.note_undecided(unexplained)
        if failure is None:
            self._record_pairs()
        return failure

    def forward(self, plan: Plan) -> Failure | Tensor | None:
        """Compares the entries by JVPs of column groups with the numerical ones, which must have been certified.

        Returns a failure or, if there is none, the entries by JVPs: float64, shape (nnz,). None: this pattern cannot
        decide on forward mode. plan: how the numerical entries were computed. Rows that are left out are not examined.
        """
        if self.compression.excluded_columns is not None:
            return None
        made = partial(TangentCertificate, self._problem, self._settings, self.compression)
        certificate = self._of_jvp = unless_rejected(made)  # jvp may raise for tangents that are not one-hot
        if certificate is None:
            return None
        if not unless_rejected(partial(certificate.certify, self.of_func.asked)):
            return unless_rejected(certificate.wrong_entry)
        if not self._separates_sums(certificate.values):
            return None
        entries = self.compression, certificate.values, self.numerical
        failure = pattern_mismatch(self._problem, plan, *entries, self._settings, self.findings, "forward")
        if failure is not None:  # the jvp may also be wrong only for the sum of a group
            return failure if certificate.confirms_worst(self.numerical) else None
        self.findings.certificates.append(certificate.certificate())
        return certificate.values

    def jvps_vary(self) -> Failure | None:
        """The failure if the JVPs of `forward` have another sum when they run again."""
        assert self._of_jvp is not None
        return unless_rejected(partial(self._of_jvp.varies, self.of_func.asked))

    def record(self) -> None:
        """Records, for a check that passed, what was compared and what the certificates cover."""
        self.findings.certificates += [self.of_func.certificate(), self._of_backward.certificate()]
        if self.hidden():
            self.findings.note_undecided(self.hidden())
        self._record_pairs()

    def _beside_other_entries(self, failure: Failure) -> Failure | Incomplete:
        """The failure to report if entries in the pattern do not match; or what the pattern lacks.

        If the pattern lacks entries, only an entry that was computed separately is reported, or a larger error outside
        the pattern; the message then says "at least", because there may be more.
        """
        elsewhere = self._certificate_of(self._of_backward.values, None).certify(self.of_func.asked)
        lacks_entries = isinstance(elsewhere, Failure) or elsewhere.refuted or elsewhere.rows.size > 0
        lacks_entries = lacks_entries or bool(self.numerical_suspects)
        if lacks_entries and failure.comparison is not None and failure.comparison.exhaustive:
            self.findings = Findings()  # its pairs count sums of several entries as entries
            confirmed = self._confirmed_mismatch(may_be_sums=True)
            if confirmed is None:  # the entries that differ are sums of several entries
                found = elsewhere if isinstance(elsewhere, Failure) else self._certified()
                return found or incomplete([], refuted=True)
            failure = confirmed
        comparison = failure.comparison
        assert comparison is not None
        unexplained = 0.0 if isinstance(elsewhere, Failure) else elsewhere.unexplained or 0.0
        if not lacks_entries and unexplained <= comparison.largest_absolute:
            return failure
        self.findings.pairs = [pair for pair in self.findings.pairs if not pair.agrees]
        other = elsewhere.comparison if isinstance(elsewhere, Failure) else None
        if isinstance(elsewhere, Failure) and other and other.largest_absolute > comparison.largest_absolute:
            self.findings.pairs = []
            return elsewhere
        # A tensor that is passed twice is one input, but has two numbers.
        output = next(block for block in self._problem.outputs if block.index == failure.output)
        input_ = next(block for block in self._problem.inputs if block.index == failure.input)
        whole = replace(comparison, entries=entry_count(output, input_), exhaustive=False, on_pattern=False)
        return replace(failure, comparison=whole)
