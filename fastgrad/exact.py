"""Exact verdicts by structure: guess or probe, color, compare compressed Jacobians, certify, follow up.

Every entry of the pattern is compared as in the dense engine. That no entry lies outside of it, and
that the backward is the linear map that its compressed rows say, is certified by random directions
and cotangents. A certificate that fails is a lead, not a verdict: it ends at a single entry that is
wrong by itself, or in a larger pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fastgrad._native import ops
from fastgrad._torch import phase
from fastgrad.certify import LinearityProof, groups_failure, linearity_certificate, one_hot_failure, separate_failure
from fastgrad.coloring import Indices
from fastgrad.compare import Findings, PairComparison, largest, tolerances
from fastgrad.confirm import entry_in_row, located_failure, mismatch_failure, row_entry
from fastgrad.coordinates import PIECE, Block, block_with
from fastgrad.engines import EXPANDED, GAPPED, HALVED, compressed, row_parts
from fastgrad.engines.compressed import Compression
from fastgrad.engines.sketch import Differences, directional_differences
from fastgrad.fast import QUIET, Screening, screen
from fastgrad.locate import locate
from fastgrad.patterns import Patterns
from fastgrad.plan import (
    ENTRY_BYTES,
    VJP_COST,
    FirstLook,
    dense_is_small,
    pays_to_compress,
    prefers_columns,
    replays_groups,
    takes_long,
)
from fastgrad.problem import Problem
from fastgrad.report import Certificate, Failure, Part, Plan, Settings
from fastgrad.sparsity import HANDFUL, Mask, Pattern
from fastgrad.tolerances import ROUNDING
from fastgrad.trial import RefusedError

ATTEMPTS = 6
"""Patterns to try: guesses, what probing finds, from both sides or from one, with and without what is dense, and what
certificates add to it."""

BRIEF_PROBES = 512
"""After so many without an end, dense rows and columns may be in the way."""

MOST_LEADS = 8
"""Rows, and columns, of a failed certificate to follow up."""

CERTIFICATES = 2
"""Directions of the numerical certificate."""

SMALLER = (2.0**-10, 2.0**-14, 2.0**-17)
"""Of the step, at which failed rows are certified again: joint steps cross kinks that single ones do not."""


HOPELESS = 1 / 4
"""Of the rows: where more are wrong, it is not for kinks, and smaller steps do not help."""


@dataclass(frozen=True)
class Outcome:
    """How the Jacobians were computed, and the failure, if any."""

    plan: Plan
    failure: Failure | None


@dataclass(frozen=True)
class _Learnt:
    """Entries that a pattern lacks; `refuted`: there are too many to be told one by one."""

    rows: Indices
    columns: Indices
    refuted: bool = False


@phase("compressed Jacobians")
def check_by_structure(problem: Problem, settings: Settings, look: FirstLook, findings: Findings) -> Outcome | None:
    """The verdict on all Jacobians in reverse mode; None where no structure makes it cheaper than the dense engine."""
    if look.reacted is None or not bool(look.base.isfinite().all()):
        return None
    problem.forget_outputs()
    patterns = Patterns(problem, settings, look)
    finders: Iterator[Callable[[], Pattern | None]] = iter((patterns.guess, patterns.decode, patterns.probe))
    if takes_long(2 * problem.n + problem.m, look):
        # Dense rows and dense columns may hide a structure from both sides, and be all there is.
        brief = partial(patterns.probe, most=BRIEF_PROBES), partial(patterns.probe, most=BRIEF_PROBES, splits_hubs=True)
        finders = iter((patterns.guess, patterns.decode, *brief, patterns.probe, patterns.dense))
    pattern: Pattern | None = None
    certifies, asked, dense_columns = True, False, None
    for _ in range(ATTEMPTS):
        while pattern is None:
            find = next(finders, None)
            if find is None:
                return None
            pattern = find()
        guessed = find in (patterns.guess, patterns.decode)
        compression = _compression(problem, look, pattern, certifies, dense_columns)
        column_groups = compression.column_groups.count
        row_groups = sum(grouping.count for grouping in compression.row_groups)
        by_columns = prefers_columns(column_groups, row_groups)
        if not pays_to_compress(problem, settings, column_groups, None if by_columns else row_groups):
            return None
        plan = _plan(problem, settings, look, compression)
        calls = 2 * column_groups + (column_groups if by_columns else row_groups)
        problem.progress.start(calls, look.seconds * calls, f"{column_groups} column groups")
        try:
            verdict = _Verdict(problem, settings, plan, compression, look)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # of func, which may take single steps only
            return None
        if verdict.numerical_leads and dense_is_small(problem, settings):
            return None
        if verdict.numerical_leads is None:
            pattern, finders = None, iter((partial(patterns.probe, watch_gradients=False),))
            continue
        if guessed and len(verdict.numerical_leads) > MOST_LEADS:
            pattern = None  # a wrong guess
            continue
        found: Failure | _Learnt | None = None
        if by_columns:
            by_columns, found = verdict.by_columns()
        if not by_columns:
            if certifies and not asked and takes_long(VJP_COST * row_groups, look):
                asked, dense = True, pattern.dense_columns()
                if dense.any():
                    dense_columns = dense
                    continue
            if not pays_to_compress(problem, settings, column_groups, row_groups):
                return None
            found = verdict.by_rows()
        if found is None and compression.leaves_out:
            screening = verdict.screen_apart()
            if screening.undecided is not None:
                certifies, dense_columns = False, None
                continue
            found = screening.failure
        if found is None or isinstance(found, Failure):
            if found is None:
                verdict.record()
            findings.add(verdict.findings)
            return Outcome(verdict.plan if by_columns else replace(verdict.plan, row_groups=row_groups), found)
        if dense_is_small(problem, settings):
            return None
        pattern = None if found.refuted else pattern.with_entries(found.rows, found.columns)
    return None


def _compression(
    problem: Problem, look: FirstLook, pattern: Pattern, certifies: bool, columns_apart: Mask | None
) -> Compression:
    """The groups; without the dense rows, where they may be certified and keep columns apart for long."""
    rows_apart: Mask | None = None
    if certifies and takes_long(2 * int(np.diff(pattern.starts).max(initial=0)), look):
        dense = pattern.dense_rows()
        rows_apart = dense if dense.any() else None
    return compressed.compress(problem, pattern, rows_apart, columns_apart)


def _plan(problem: Problem, settings: Settings, look: FirstLook, compression: Compression) -> Plan:
    pattern, groups = compression.pattern, compression.column_groups.count
    memory = pattern.nnz * ENTRY_BYTES
    replayed = replays_groups(problem, settings, look, groups)
    if replayed:
        memory += 8 * groups * problem.m
    record, origin = look.record_graph, pattern.origin
    return Plan("compressed", 0, 0, record, origin, column_groups=groups, memory=memory, replayed=replayed)


def numerical_entries(problem: Problem, settings: Settings, look: FirstLook) -> tuple[Compression, Tensor] | None:
    """The numerical Jacobian, compressed and certified: its pattern with groups, and the entries; None: not found."""
    for compression, verdict in _compressions(problem, settings, look):
        if verdict.numerical_leads == []:
            return compression, verdict.numerical
    return None


def analytical_entries(problem: Problem, settings: Settings, look: FirstLook) -> tuple[Compression, Tensor] | None:
    """The analytical Jacobian in reverse mode, as `numerical_entries`."""
    for compression, verdict in _compressions(problem, settings, look):
        values, _ = compressed.analytical_entries(problem, compression, repeat=False)
        if verdict.is_certified(values):
            return compression, values
    return None


def _compressions(problem: Problem, settings: Settings, look: FirstLook) -> Iterator[tuple[Compression, _Verdict]]:
    """What a guess and what probing lead to, as far as there is something and it repays."""
    if look.reacted is None or not bool(look.base.isfinite().all()):
        return
    patterns = Patterns(problem, settings, look)
    for find in (patterns.guess, patterns.decode, patterns.probe, partial(patterns.probe, watch_gradients=False)):
        pattern = find()
        if pattern is None:
            continue
        compression = compressed.compress(problem, pattern)
        columns, rows = compression.column_groups.count, sum(grouping.count for grouping in compression.row_groups)
        if pays_to_compress(problem, settings, columns, rows):
            plan = Plan("compressed", 0, 0, look.record_graph, pattern.origin)
            yield compression, _Verdict(problem, settings, plan, compression, look)


@dataclass(frozen=True)
class _Discrepancies:
    """Directional derivatives of each output against what the entries of a pattern add up to.

    Attributes
    ----------
    error
        The largest difference: float64, shape (m,).
    base, rounding
        The outputs, and what rounding may do to a derivative, relative to them.
    """

    differences: Differences
    error: Tensor
    base: Tensor
    rounding: float
    settings: Settings

    def is_clear(self) -> bool:
        """Whether nothing is wrong and nothing loud, by the largest of all outputs: told without more vectors."""
        error, noise, size = (largest(values) for values in (self.error, self.differences.noise, self.base))
        return max(error, 4 * noise + self.rounding * size) <= self.settings.atol

    @property
    def blur(self) -> Tensor:
        """What rounding and noise explain of an error."""
        return self.rounding * self.base.abs() + 4 * self.differences.noise

    @property
    def allowed(self) -> Tensor:
        """Errors up to here are none."""
        return self.settings.atol + self.blur

    @property
    def wrong(self) -> Tensor:
        """Where more differs than is allowed; a NaN does."""
        return ~(self.error <= self.allowed)

    @property
    def loud(self) -> Tensor:
        """Where nothing can be certified to within the tolerance."""
        return ~(self.blur <= self.settings.atol + self.settings.rtol * self.differences.size())


class _Verdict:
    """The verdict that one pattern leads to."""

    def __init__(
        self, problem: Problem, settings: Settings, plan: Plan, compression: Compression, look: FirstLook
    ) -> None:
        self._problem = problem
        self._settings = settings
        self.plan = plan
        self._compression = compression
        self._look = look
        self.findings = Findings()
        self._proofs: Iterable[LinearityProof] | None = None
        try:
            self._measure()
        except RefusedError as error:
            self._measure_one_by_one(str(error))
        if self.plan.replayed and self.numerical_leads != []:
            self._measure_one_by_one("they do not add up to evaluations one by one")

    def _measure(self) -> None:
        self.numerical = compressed.numerical_entries(self._problem, self.plan, self._compression, self._settings.eps)
        self.numerical_leads = self._certify_numerical()

    def _measure_one_by_one(self, why: str) -> None:
        """Instead of replays."""
        self.plan = replace(self.plan, replayed=False, reason=f"{self.plan.reason}; no replays: {why}")
        self._measure()

    def by_columns(self) -> tuple[bool, Failure | _Learnt | None]:
        """Whether the backward, differentiated, gives proven columns; then as `by_rows`."""
        problem = self._problem
        problem.graph()  # what func raises is not about its backward
        try:
            self._analytical = compressed.linear_entries(problem, self._compression)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # it cannot be differentiated
            return False, None
        proofs = self._proofs = list(self._proofs_of(self._all_kinds, self._analytical))
        try:
            if any(proof.leads() for proof in proofs):
                return False, None
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # for some layout
            return False, None
        failure = one_hot_failure(problem, self._settings)
        if failure is None:
            failure = separate_failure(problem, self._settings, proofs[0].cotangent(0), proofs[0].gradients()[0])
        return True, failure or self._judged(None)

    def by_rows(self) -> Failure | _Learnt | None:
        """A failure, or what the pattern lacks, or nothing."""
        problem, compression = self._problem, self._compression
        problem.graph()  # what func raises is not about its backward
        self._proofs = None
        try:
            self._analytical, matches = compressed.analytical_entries(problem, compression)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            try:
                self._analytical, _ = compressed.analytical_entries(problem, compression, repeat=False)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception:  # one-hot grad_outputs may not raise
                return _joined([], refuted=True)
            detail = f"it raised {type(error).__name__} for a constant grad_output, or for a larger one"
            return Failure("nonlinear", detail=detail, cause=error)
        repeat: Failure | None = None
        for output, repeated, match in matches:
            part: Part = "imaginary" if output.is_complex else "all"
            places = output.index, None, output.position, None, part
            if self._settings.check_grad_dtypes and not match.dtypes:
                return Failure("dtype", *places)
            if not match.sizes:
                return Failure("size", *places)
            if not match.repeats and repeat is None:
                grouping = compression.row_groups[output.index]
                groups = [grouping.members(g) for g in range(repeated)]
                repeat = groups_failure(problem, self._settings, output, groups)
                if repeat is not None and repeat.kind == "nonlinear":
                    repeat = self._first_row_failure(output.first + int(groups[0][0])) or repeat
        if repeat is not None and repeat.kind == "nondeterministic":
            return repeat
        return self._judged(repeat)

    def _judged(self, repeat: Failure | None) -> Failure | _Learnt | None:
        """The comparison of all entries, then a failure of repeated groups, then the certificates."""
        differs = self._differs()
        if differs and self.plan.replayed:
            self._measure_one_by_one("a mismatch is looked at one by one")
            differs = self._differs()
        failure = self._mismatch() if differs and not self._only_mixed() else None
        failure = failure or repeat
        if failure is not None:
            return failure
        return self._certified() or (self._mismatch() if differs else None)

    def _certified(self) -> Failure | _Learnt | None:
        """That nothing lies outside of the pattern, and that the backward is linear."""
        found = self._follow_rows(self.numerical_leads or [])
        if isinstance(found, Failure):
            return found
        learnt = [found]
        self._certified_kinds = self._all_kinds if self._proofs else self._kinds
        for proof in self._proofs or self._proofs_of(self._kinds, self._analytical):
            try:
                leads = proof.leads()
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception:
                return proof.failure()  # says for which grad_output it raised, or raises again
            found = self._follow_columns(proof, leads)
            if isinstance(found, Failure) or found.refuted:
                return found
            learnt.append(found)
            if not any(some.rows.size for some in learnt):
                failure = proof.failure()
                if failure is not None:
                    return failure
        if not any(some.rows.size or some.refuted for some in learnt):
            return None
        rows, columns = (np.concatenate([getattr(some, name) for some in learnt]) for name in ("rows", "columns"))
        if any(some.refuted for some in learnt):
            return _Learnt(rows, columns, refuted=True)
        pattern = self._compression.pattern
        return _Learnt(rows, columns) if rows.size and pattern.with_entries(rows, columns).nnz > pattern.nnz else None

    @property
    def _all_kinds(self) -> tuple[int, ...]:
        """Which cotangents there can be: what is expanded is zero at no row."""
        return (GAPPED, HALVED, EXPANDED) if self._compression.rows_apart is None else (GAPPED, HALVED)

    @property
    def _kinds(self) -> tuple[int, ...]:
        """Which cotangents to try: not the expanded one where the second run of the only row group was one."""
        outputs = self._problem.outputs
        whole = len(outputs) == 1 and not outputs[0].is_complex and self._compression.row_groups[0].count == 1
        return (GAPPED, HALVED) if whole else self._all_kinds

    def is_certified(self, analytical: Tensor) -> bool:
        """Whether VJPs are what analytical entries add up to."""
        return not any(proof.leads() for proof in self._proofs_of((GAPPED, HALVED), analytical))

    def _proofs_of(self, kinds: tuple[int, ...], analytical: Tensor) -> Iterator[LinearityProof]:
        """One of all kinds of cotangents or, where the problem is large and vectors are dear, one at a time."""
        is_small = self._problem.n + self._problem.m <= PIECE
        for some in [kinds] if is_small else [(kind,) for kind in kinds]:
            apart = self._compression.rows_apart, self._compression.columns_apart
            proof = LinearityProof(self._problem, self._settings, self._repeats_all, self._moving_group, some, *apart)
            proof.add_entries(self._compression.rows, self._compression.columns, analytical)
            yield proof

    @property
    def _repeats_all(self) -> bool:
        """Whether no row group ran only once."""
        return all(grouping.count <= compressed.REPEATED_GROUPS for grouping in self._compression.row_groups)

    def _moving_group(self) -> Failure | None:
        """Two runs of every row group: the first that moves by more than nondet_tol."""
        for output, grouping in zip(self._problem.outputs, self._compression.row_groups, strict=True):
            for g in range(grouping.count):
                failure = groups_failure(self._problem, self._settings, output, [grouping.members(g)])
                if failure is not None:
                    return failure
        return None

    def screen_apart(self) -> Screening:
        """The verdict on dense rows and columns that no group has, as fast mode's on all; certified where it passes."""
        settings, compression = self._settings, self._compression
        if compression.rows_apart is not None:
            screening = self._screen(rows=compression.rows_apart)
            if screening.failure is not None or screening.undecided is not None:
                return screening
            self._note_certified(int(compression.rows_apart.sum()), "row", screening)
            if screening.bound > QUIET * settings.atol:
                self.findings.note_undecided(screening.bound)
        if compression.columns_apart is None:
            return Screening()
        # One by one, as far as they are few: beside the entry of another column, a small one would not be heard.
        columns = compression.columns_apart.nonzero().reshape(-1)
        for some in torch.split(columns, 1 if columns.numel() <= HANDFUL else columns.numel()):
            selected = torch.zeros_like(compression.columns_apart).index_fill_(0, some, True)
            screening = self._screen(columns=selected)
            if screening.failure is not None or screening.undecided is not None:
                return screening
        self._note_certified(columns.numel(), "column", screening)
        return screening

    def _screen(self, rows: Tensor | None = None, columns: Tensor | None = None) -> Screening:
        screening = screen(self._problem, self._settings, rows, columns)
        if screening.raised is not None:
            raise screening.raised
        return screening

    def _note_certified(self, count: int, kind: str, screening: Screening) -> None:
        names = f"{count} dense {kind}{'s' if count > 1 else ''}"
        self.findings.notes.append(f"{names} certified by random vectors, not compared entry by entry")
        for certificate in screening.certificates:
            self.findings.certificates.append(replace(certificate, claim=f"in {names}, {certificate.claim}"))

    def record(self) -> None:
        """Of a check that passed: what was compared, and what the certificates vouch for."""
        bound = 2 * self._numerical_bound  # components of the directions are 1/2 and more
        method = f"{CERTIFICATES} random directions, the derivatives along them against the sums of entries"
        self.findings.certificates.append(Certificate("no numerical entry outside of the pattern", method, bound))
        claim = "no analytical entry outside of it, and backward is linear in grad_output"
        self.findings.certificates.append(linearity_certificate(claim, self._certified_kinds, self._settings.atol / 2))
        if self.findings.pairs:
            return  # some entries differed at eps, and all were compared one pair at a time
        inputs, outputs = self._problem.inputs, self._problem.outputs
        for output in outputs:
            within = self._compression.entries_of(output)
            columns, *entries = (
                values[within] for values in (self._compression.columns, self._analytical, self.numerical)
            )
            for block in inputs:
                if self._compression.leaves_out_pair(output, block):
                    continue
                pair = PairComparison(output, block, self._settings.atol, self._settings.rtol, on_pattern=True)
                if len(inputs) == len(outputs) == 1:
                    # The comparison that found no difference was of this very pair.
                    pair.add_statistics(columns.numel() // block.width, self._statistics)
                elif len(inputs) == 1:
                    pair.add_agreeing(*entries)
                else:
                    own = (columns >= block.first) & (columns < block.first + block.size)
                    pair.add_agreeing(*(values[own] for values in entries))
                self.findings.add_pair(pair.pair("all", agrees=True))

    def _differs(self) -> bool:
        """Whether any entry of the pattern may differ by the allclose rule."""
        settings = self._settings
        entries = self._analytical.unsqueeze(0), self.numerical.unsqueeze(0)
        domains = {block.is_complex for block in self._problem.inputs}
        # Where some entries are complex and some real, coordinate by coordinate: both within 2^-1/2 suffices.
        share = 1.0 if len(domains) == 1 else 2**-0.5
        tolerances = settings.atol * share, settings.rtol * share
        self._statistics = ops.compare(*entries, *tolerances, domains == {True}, False).tolist()
        return bool(self._statistics[0])

    def _only_mixed(self) -> bool:
        """Whether the worst entries that differ do so because others, outside of the pattern, add to them.

        An analytical one adds to an entry in its column, a numerical one to an entry in its row. The worst
        rows are computed by themselves, and where that does not do, columns.
        """
        rows, columns = self._compression.rows, self._compression.columns
        excess = self._excesses(slice(None))
        differing = (~(excess <= 1)).nonzero().reshape(-1)
        worst = differing[excess[differing].nan_to_num(torch.inf).argsort(descending=True)]
        measured: set[int] = set()
        for row in list(dict.fromkeys(rows[worst[: 16 * MOST_LEADS]].tolist()))[:MOST_LEADS]:
            mine = (rows == row).nonzero().reshape(-1)
            self._analytical[mine] = self._one_hot_gradient(row)[columns[mine]]
            still = mine[~(self._excesses(mine) <= 1)]
            for column in columns[still[:MOST_LEADS]].tolist():
                if column not in measured:
                    measured.add(column)
                    within = columns == column
                    difference = self._single_difference(column)
                    self.numerical[within] = difference[rows[within]]
            if bool((~(self._excesses(mine) <= 1)).any()):
                return False
        return True

    def _excesses(self, entries: Tensor | slice) -> Tensor:
        """|analytical - numerical| over what is allowed, coordinate by coordinate."""
        numerical = self.numerical[entries]
        atol, rtol = tolerances(self._problem, self._settings, self._compression.columns[entries])
        return (self._analytical[entries] - numerical).abs() / (atol + rtol * numerical.abs())

    def _single_difference(self, column: int) -> Tensor:
        """The numerical entries of a column, in rows that are not apart."""
        difference = self._problem.difference_columns(column, 1, self._settings.eps, self.plan.record_graph)[0]
        apart = self._compression.rows_apart
        return difference if apart is None else difference.masked_fill_(apart, 0.0)

    def _first_row_failure(self, row: int) -> Failure | None:
        """Whether a single row of a backward that is not linear is wrong by itself: it says more."""
        gradient = self._one_hot_gradient(row)
        within = self._compression.rows == row
        expected = torch.zeros_like(gradient)
        expected[self._compression.columns[within]] = self.numerical[within]
        atol, rtol = tolerances(self._problem, self._settings)
        error = (gradient - expected).abs() / (atol + rtol * expected.abs())
        column = int(error.nan_to_num(torch.inf).argmax())
        if error[column] <= 1:
            return None
        found = row_entry(self._problem, self._settings, row, gradient, column)
        return located_failure([found]) if found.survivor is not None else None

    def _mismatch(self) -> Failure | None:
        """Every entry of the pattern under the allclose rule, in torch's order of judging."""
        problem = self._problem
        self.findings = Findings()  # entries outside of the pattern may have been mixed in before
        for output, part in row_parts(problem.outputs):
            for block in problem.inputs:
                pair = self._pair(output, part, block)
                group_of = self._compression.column_group_of
                failure = mismatch_failure(problem, self.plan, pair, part, self._settings, self.findings, group_of)
                if failure is not None:
                    return failure
        return None

    def _pair(self, output: Block, part: Part, block: Block) -> PairComparison:
        within = self._compression.entries_of(output)
        own = self._settings.of(block.index)
        pair = PairComparison(output, block, own.atol, own.rtol)
        rows, columns = self._compression.rows[within] - output.first, self._compression.columns[within] - block.first
        chosen = (columns >= 0) & (columns < block.size)
        if part != "all":
            chosen &= rows % 2 == (1 if part == "imaginary" else 0)
        analytical, numerical = self._analytical[within][chosen], self.numerical[within][chosen]
        width = block.width
        row_elements = rows[chosen][::width] // output.width
        pair.add_entries(analytical, numerical, row_elements, columns[chosen][::width] // width)
        return pair

    def _certify_numerical(self) -> list[int] | None:
        """Outputs whose derivatives along random directions are not what the entries add up to, worst first.

        None where some are too loud for that, and the pattern does not come from watching them.
        """
        settings, numerical = self._settings, self._compression.pattern.is_numerical
        self._numerical_bound = settings.atol
        # One direction at a time, half of the evaluations for all but the first: enough to tell that nothing is wrong.
        if all(
            self._discrepancies(settings.eps, k, count=1, extrapolated=1 if k == 0 else 0).is_clear()
            for k in range(CERTIFICATES)
        ):
            return []
        found = smaller = self._discrepancies(settings.eps, 0)
        if found.is_clear():
            return []
        loud, wrong, bound = found.loud, found.wrong, found.allowed
        hopeless = int(wrong.sum()) > HOPELESS * wrong.numel()
        for attempt, share in enumerate(() if hopeless else SMALLER, 1):
            if not bool((wrong if numerical else wrong | loud).any()):
                break
            # Where joint steps cross kinks, smaller ones do not; but they say less where values are large.
            smaller = self._discrepancies(settings.eps * share, attempt)
            loud = loud & smaller.loud
            wrong = wrong & (smaller.wrong | (smaller.allowed > found.error / 2))
            bound = torch.where(smaller.wrong, bound, torch.minimum(bound, smaller.allowed))
        self._numerical_bound = float(bound.amax())
        if not numerical and bool(loud.any()):
            return None
        rows = wrong.nonzero().reshape(-1)
        if not rows.numel():
            return []
        self._differences = smaller.differences if bool(smaller.wrong[rows].any()) else found.differences
        return rows[(found.error / found.allowed)[rows].nan_to_num(torch.inf).argsort(descending=True)].tolist()

    def _discrepancies(
        self, eps: float, attempt: int, count: int = CERTIFICATES, extrapolated: int = CERTIFICATES
    ) -> _Discrepancies:
        """Derivatives along random directions against what the entries add up to; as `directional_differences`."""
        problem, settings, base = self._problem, self._settings, self._look.base
        rows_apart, columns_apart = self._compression.rows_apart, self._compression.columns_apart
        differences = directional_differences(
            problem, settings, base, eps, count, attempt, extrapolated=extrapolated, still=columns_apart
        )
        if rows_apart is not None:
            base = base.masked_fill(rows_apart, 0.0)
            for values in (differences.derivatives, differences.noise):
                values.masked_fill_(rows_apart, 0.0)
        error = torch.zeros_like(base)
        for u, derivatives in zip(differences.directions.unbind(), differences.derivatives.unbind(), strict=True):
            total = torch.zeros_like(base)
            ops.project_entries_(total, None, u, self._compression.columns, self._compression.rows, self.numerical)
            torch.maximum(error, total.sub_(derivatives).abs_(), out=error)
        return _Discrepancies(differences, error, base, ROUNDING * differences.rounding, settings)

    def _one_hot_gradient(self, row: int) -> Tensor:
        """A row of the backward in columns that are not apart.

        The grad_outputs of other outputs are undefined, as in torch's checker.
        """
        one_hot = torch.zeros(1, self._problem.m, dtype=torch.float64, device=self._problem.device)
        one_hot[0, row] = 1.0
        gradient = self._problem.vjp(one_hot, only=block_with(self._problem.outputs, row))[0]
        apart = self._compression.columns_apart
        return gradient if apart is None else gradient.masked_fill_(apart, 0.0)

    def _follow_rows(self, rows: list[int]) -> Failure | _Learnt:
        """Down to the entry of each row that is wrong; or all that its gradient says belongs to it."""
        problem, settings = self._problem, self._settings
        learnt = []
        for row in rows[:MOST_LEADS]:
            differences, gradient = self._differences, self._one_hot_gradient(row)
            u = differences.directions[0]
            error = (differences.derivatives[0, row] - u @ gradient).item()
            if not abs(error) <= settings.atol / 4:
                found = entry_in_row(problem, settings, row, gradient, u, differences.eps, error)
                if found.survivor is not None:
                    return located_failure([found])
            columns = np.flatnonzero(gradient.cpu().numpy())
            learnt.append((np.full(columns.size, row), columns))
        return _joined(learnt, refuted=len(rows) > MOST_LEADS)

    def _follow_columns(self, proof: LinearityProof, leads: list[tuple[int, int]]) -> Failure | _Learnt:
        """Down to the entry of each column that is wrong; or what the pattern lacks in it."""
        learnt: list[tuple[Indices, Indices]] = []
        if leads and dense_is_small(self._problem, self._settings):
            return _joined(learnt, refuted=True)
        which_of = {column: which for which, column in reversed(leads)}  # of several, the worst
        columns_in_turn = list(dict.fromkeys(column for _, column in leads))
        for column in columns_in_turn[:MOST_LEADS]:
            row, gradient = self._locate_row(proof.cotangent(which_of[column]), column)
            if (gradient[column] - self._entry(row, column)).abs().item() == 0:
                continue  # one-hot grad_outputs agree: not linear, or rounding
            found = row_entry(self._problem, self._settings, row, gradient, column)
            if found.survivor is not None:
                return located_failure([found])
            columns = np.flatnonzero(gradient.cpu().numpy())
            learnt.append((np.full(columns.size, row), columns))
            rows = np.flatnonzero(self._single_difference(column).cpu().numpy())
            learnt.append((rows, np.full(rows.size, column)))
        return _joined(learnt, refuted=bool(learnt) and len(columns_in_turn) > MOST_LEADS)

    def _entry(self, row: int, column: int) -> Tensor:
        """The analytical entry, zero outside of the pattern."""
        here = (self._compression.rows == row) & (self._compression.columns == column)
        return self._analytical[here].sum()

    def _locate_row(self, cotangent: Tensor, column: int) -> tuple[int, Tensor]:
        """The row behind a wrong component of a VJP, and its gradient."""
        here = self._compression.columns == column
        rows, entries = self._compression.rows[here], self._analytical[here]

        def residual(vector: Tensor) -> float:
            gradient = self._problem.vjp(vector.unsqueeze(0))[0]
            return float((gradient[column] - vector[rows] @ entries).item())

        row = locate(residual, cotangent, residual(cotangent))
        return row, self._one_hot_gradient(row)


def _joined(learnt: list[tuple[Indices, Indices]], refuted: bool) -> _Learnt:
    empty = np.empty(0, dtype=np.int64)
    rows, columns = zip(*learnt, strict=True) if learnt else ((empty,), (empty,))
    return _Learnt(np.concatenate(rows), np.concatenate(columns), refuted)
