"""Tests whether outputs change along random directions as the entries of a sparse Jacobian predict.

Until this is tested, a pattern is a guess. If the pattern lacks an entry, it is missing from the sum of the entries, or
it was added to another entry of its row that was measured together with it. In both cases the sum differs from the
derivative of its output, along almost every direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastgrad.core.tensors import checksum, largest
from fastgrad.engines.compressed import Compression, dense_row, predicted
from fastgrad.engines.plan import dense_is_small
from fastgrad.engines.sketch import (
    EXPLAINED_RATIO,
    FINER_STEP,
    Differences,
    are_smooth,
    directional_differences,
)
from fastgrad.problem.first_look import FirstLook
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Certificate
from fastgrad.report.failure import Failure
from fastgrad.report.settings import Settings
from fastgrad.structure.coloring import Indices
from fastgrad.verdict.comparison import excesses, tolerances
from fastgrad.verdict.confirm import Found, entries_failure, entry_at, entry_in_row, located_failure
from fastgrad.verdict.incomplete import MAX_SUSPECTS, Incomplete, incomplete
from fastgrad.verdict.outside_pattern import OUTPUT_ROUNDING, SMALLER_STEPS, EpsCertificate
from fastgrad.verdict.repeated_differences import Taken, note_changes

SAME_CHANGE = 0.01
"""Relative difference up to which the changes of an output at several steps count as the same."""

MIN_STEPS = 3
"""Number of steps, the smallest ones, at which the changes of an output must be the same to count as a jump."""

MAX_SUBTRACTED = 8
"""Largest number of harmless entries of a row (those that differ at eps, but are right when re-measured) that are
subtracted from its unexplained part."""

DIRECTIONS, DIRECTIONS_WATCHED = 3, 2
"""Number of directions of the numerical certificate. The second number applies if the pattern was found by comparing
outputs bit by bit."""

MAX_DIRECTIONS = 30
"""Largest number of directions that are used if rounding of the numerical entries may hide entries that matter. With
the default confidence, 30 directions find entries that are twice as large as this rounding."""

NEGLIGIBLE_ERROR = 2.0**-10
"""Share of atol below which an error of a derivative along a direction is ignored. With the default confidence, three
directions find entries that are a thousand times as large as this error, that is, of about atol."""

STARTS = (1.0, 2.0**2, 2.0**4, 2.0**6, 2.0**9, 2.0**12)
"""Candidates for the first step, in units of eps. The smallest one with negligible rounding is used."""

LARGEST_TWO_POINT = 2.0**4
"""Largest step, in units of eps, for which two evaluations suffice for a derivative along a direction."""

LARGER_STEPS = 2.0**5, 2.0**12
"""Further steps, in units of eps, for which rounding is relatively small."""

SMOOTH_PAIRS, SMOOTH_SHARE = ((2.0**5, 2.0**3), (2.0**6, 2.0**4), (2.0**8, 2.0**6)), 2.0**-4
"""Pairs of steps, in units of eps, at which an output has the same derivatives, up to this share, if kinks do not
explain its error at a smaller step. Near ties make derivatives irregular: of 100,000 sorted values that are 10 eps
apart, none has the same derivatives up to 0.09. Rounding to float32 changes them by up to 0.013."""

ROUNDING_RATIO = 1 / 32
"""Rounding inside func changes it by about as much at each of three smaller steps; all three changes are less than this
share of the first one with a probability of about 1e-4. A derivative changes func in proportion to the step, so at most
by a thousandth at these steps."""

FEW_HIDING = 2.0**-8
"""Largest share of outputs that may hide entries which matter, for example outputs next to kinks. The check is then
undecided. If more outputs may hide entries, the pattern is sought by comparing outputs bit by bit instead."""

MAX_SEPARATED = 64
"""Largest number of outputs that may hide entries, and of columns of these outputs, to examine separately."""

SOON_SEPARATED = 16
"""Up to this many such outputs and columns are examined separately after the first of the further steps. The other four
would take 48 evaluations, and 48 for repeats; each column takes two."""

MAX_FOLLOW_UP_CALLS = 200
"""Number of calls that further steps may take: six steps in three directions with four evaluations each, the same again
without the columns that are examined separately, and these columns. Repeats of these steps are not counted. If the
dense engine takes no more calls, it is used instead."""

MAX_WRONG_SHARE = 1 / 4
"""If more than this share of the rows is wrong, kinks are not the reason, and smaller steps do not help."""


def numerical_certificate(directions: int, watched: bool, bound: float) -> Certificate:
    """The certificate from random directions; watched: whether outputs were also compared bit by bit."""
    method = f"derivatives along {directions} random directions, compared with sums of entries"
    method += watched * "; outputs were also compared bit for bit"
    return Certificate("the numerical entries outside the sparsity pattern are zero", method, bound)


class _Discrepancies(NamedTuple):
    """Directional derivatives of each output against the sums of the entries of a pattern.

    Attributes
    ----------
    error
        The largest difference: float64, shape (m,).
    allowed
        The part of an error that rounding and noise explain: float64, shape (m,).
    """

    error: Tensor
    allowed: Tensor

    @property
    def wrong(self) -> Tensor:
        """Where the error is larger than explained; a NaN counts as larger."""
        return ~(self.error <= self.allowed)


_Excluded = tuple[Tensor, Tensor]
"""Outputs that are examined separately (bool, shape (m,)), and the columns that are measured one by one."""


class NumericalCertificate:
    """Certifies that no entry of func lies outside a pattern, and that the entries in the pattern are those of func.

    Attributes
    ----------
    values
        The numerical entries in the pattern: float64, shape (nnz,).
    bound
        The smallest size of an entry outside the pattern that is detected; known after `certify` has run.
    """

    values: Tensor
    _excluded: _Excluded | None = None
    _analytical: Tensor | None = None

    def __init__(self, problem: Problem, settings: Settings, compression: Compression, look: FirstLook) -> None:
        self._problem = problem
        self._settings = settings
        self._compression = compression
        self._base = look.base
        self.bound, self._count, self._margin, self._shares = 0.0, 1, 1.0, (1.0, 1.0)
        # The largest error that outputs may hide but that does not matter; the largest possible error of an entry that
        # no step resolved; whether an output jumps next to x.
        self._explained, self._unresolved, self._jumps, self._was_in_doubt = 0.0, 0.0, False, False
        # For each output, the step, in units of eps, with the largest difference that no entry explains.
        self._refuting: dict[int, float] = {}

    @property
    def may_hide_entries(self) -> bool:
        """Whether rounding or noise may hide entries that matter."""
        return self.bound > self.asked

    def certificate(self) -> Certificate:
        """The certificate for the case that nothing is missing."""
        watched = self._compression.pattern.is_numerical
        return numerical_certificate(self._count, watched, self.bound)

    def screen(self, values: Tensor) -> list[int]:
        """The numbers of outputs that do not change along one direction as the entries predict, worst first."""
        self.values = values
        # The first step is chosen for the typical output. For a few large outputs, larger steps are tried afterwards.
        usual = float(torch.linalg.vector_norm(self._base, 1)) / max(1, self._base.numel())
        scale = usual * OUTPUT_ROUNDING * 2 * self._problem.unit_roundoff / self._settings.eps
        enough = (step for step in STARTS if scale <= NEGLIGIBLE_ERROR * self._settings.atol * step)
        self._start = next(enough, STARTS[-1])
        self._first = self._of_direction(0)()
        if not bool(self._compared(self._first, None).wrong.any()):
            return []
        taken = [(self._of_direction(0), checksum(self._first.derivatives))]
        note_changes(self._problem, self._settings, self._base, taken)
        return self._unexplained_rows(None)

    def certify(
        self, analytical: Tensor | None, row_of: Callable[[int], Tensor] | None = None
    ) -> Failure | list[int] | None:
        """Tests that outputs change along random directions as entries predict.

        If analytical entries are given, they are used instead of the numerical ones. They are more accurate, because
        VJPs have confirmed them. And an entry that only func has is not added to another analytical entry, as it is to
        a numerical entry of its group.

        Parameters
        ----------
        analytical
            The analytical entries: float64, shape (nnz,); None: the numerical entries are used.
        row_of
            Returns a row of the backward, run separately.

        Returns
        -------
        Failure or list or None
            A failure, or the numbers of the outputs that do not change as predicted. None if the dense engine costs
            less than further steps, or if too many outputs may hide entries, so that another pattern must be found.
        """
        watched = self._compression.pattern.is_numerical
        self._use_directions(DIRECTIONS_WATCHED if watched else DIRECTIONS, analytical)
        noise, found = self._first.noise, self._compared(self._first, analytical)
        taken = [(self._of_direction(0), checksum(self._first.derivatives))]
        del self._first  # this frees the memory of several vectors
        for k in range(1, self._count):
            if bool(found.wrong.any()):
                break
            differences = self._of_direction(k)()
            # Noise along one direction, for example from a kink, allows errors along all directions.
            noise = torch.maximum(noise, differences.noise)
            found = self._compared(replace(differences, noise=noise, sizes=None), analytical)
            taken.append((self._of_direction(k), checksum(differences.derivatives)))
        rows: list[int] = []
        explained = not bool(found.wrong.any())
        if explained:
            self._explained_to(found.allowed / self._margin)
        self._was_in_doubt = not explained or bool(self._hiding.numel())
        if self._was_in_doubt:
            note_changes(self._problem, self._settings, self._base, taken)
            if dense_is_small(self._problem, self._settings, MAX_FOLLOW_UP_CALLS):
                return None
            rows = self._unexplained_rows(analytical)
            if analytical is not None and row_of is not None:
                failure, rows = self._separated(rows, analytical, row_of)
                if failure is not None:
                    return failure
            if not watched and self._excluded is None:  # otherwise more directions do not help
                count = _enough_directions(self._settings.confidence, self._count, self.bound / self.asked)
                if count and not dense_is_small(self._problem, self._settings, 8 * count):
                    self._use_directions(count, analytical)
                    rows = list(dict.fromkeys((*rows, *self._unexplained_rows(analytical))))
        if watched and not self._jumps:
            # Outputs were compared bit by bit. Differences cannot show an entry that changes no bit of its output.
            self.bound = max(min(self.bound, self.asked), self._unresolved)
        elif self._hiding.numel() > FEW_HIDING * self._base.numel():
            return None
        return rows

    def _use_directions(self, count: int, analytical: Tensor | None) -> None:
        """Sets the shares of errors that are certain to be found with `count` directions."""
        # A missing entry is multiplied by a component of a direction or, if it was added to another entry, by the
        # difference of two components. This difference is smaller than s with probability s, and in all directions with
        # probability s^count.
        together = (1 - self._settings.confidence) ** (1 / count)
        self._count, self._margin = count, together if analytical is None else 0.5
        self._shares = (self._margin / together, 1.0)

    def follow(self, rows: list[int], row_of: Callable[[int], Tensor]) -> Failure | Incomplete:
        """The failure of a wrong entry in some rows or, if there is none, the missing entries of these rows."""
        learnt: list[tuple[Indices, Indices]] = []
        for row in rows[:MAX_SUSPECTS]:
            gradient = row_of(row)
            found = self._subtracted_entries(row, gradient)
            if not isinstance(found, list):
                return found
            columns = np.union1d(np.flatnonzero(gradient.cpu().numpy()), [j for entry in found for j in entry.columns])
            learnt.append((np.full(columns.size, row), columns.astype(np.int64)))
        return incomplete(learnt, refuted=len(rows) > MAX_SUSPECTS)

    def row_failure(self, row: int, gradient: Tensor) -> Failure | None:
        """The failure if a row of the backward, run separately, is wrong by the allclose rule; gradient: shape (n,)."""
        error = excesses(self._problem, self._settings, gradient, dense_row(self._compression, self.values, row))
        column = int(error.nan_to_num(torch.inf).argmax())
        if error[column] <= 1:
            return None
        found = entry_at(self._problem, self._settings, row, column, gradient)
        self._unresolved = max(self._unresolved, found.unresolved)
        return located_failure([found]) if found.remeasured is not None else None

    def at_eps(self) -> EpsCertificate:
        """The certificate at steps of exactly eps."""
        arguments = self._problem, self._settings, self._compression, self._base, self.values
        return EpsCertificate(*arguments, self._start > 1.0 or self._was_in_doubt)

    def _unexplained_rows(self, analytical: Tensor | None, excluded: _Excluded | None = None) -> list[int]:
        """The outputs that do not change as entries predict, worst first; notes the outputs that may hide entries.

        This takes several steps in the same directions. For each output, the step with the best resolution decides, as
        far as `_shown` allows. The differences of all steps must be the same when they are repeated. If outputs and
        columns are excluded, only these outputs are examined, and these columns do not move.
        """
        bounds: dict[float, Tensor] = {}
        errors: dict[float, Tensor] = {}
        noises: dict[float, Tensor] = {}
        soon = SOON_SEPARATED if analytical is not None and excluded is None else 0
        kinds = [None] if analytical is None else [None, analytical]
        steps = [1.0]
        taken: list[Taken] = []
        times, refuting = torch.ones_like(self._base), torch.zeros_like(self._base)
        while steps:
            step = steps.pop(0)
            measure = partial(self._differences_along, step, self._count, extrapolated=self._count, excluded=excluded)
            differences = measure()
            taken.append((measure, checksum(differences.derivatives)))
            noises[step] = differences.noise
            found = [self._compared(differences, entries) for entries in kinds]
            bounds[step], errors[step] = _resolved(found)
            beyond = (found[-1].error / found[-1].allowed).nan_to_num(torch.inf)
            refuting.masked_fill_(beyond > times, step)
            torch.maximum(times, beyond, out=times)
            if step == FINER_STEP:
                _keep_structure(bounds[step], errors[step], differences.noise * step, noises[1.0])
                continue
            shares = self._base.new_tensor(self._shares[: len(found)]).unsqueeze(1)
            known = (_shown(bounds, errors, self.asked * self._margin / shares) * shares).amin(0)
            if excluded is not None:
                known = known.where(excluded[0], 0.0)
            rows, hiding = known.isinf(), known / self._margin > self.asked
            unexplained = int(rows.sum())
            if not bool(hiding.any()) or (step == 1.0 and unexplained > MAX_WRONG_SHARE * rows.numel()):
                break
            if step == 1.0:
                varies = analytical is not None and bool((_is_noisy(differences, self._base) & hiding).any())
                steps = _further_steps(unexplained > 0, varies)
            elif _separable_columns(self._problem, self._compression, hiding.nonzero().reshape(-1), soon) is not None:
                break
        note_changes(self._problem, self._settings, self._base, taken)
        overruled = torch.stack([error.amin(0) for error in errors.values()]).any(0) & ~rows
        overruled = overruled if excluded is None else overruled & excluded[0]
        entries = [self.values if kind is None else kind for kind in kinds]
        arguments = self._compression, overruled, differences.directions[:DIRECTIONS], entries
        rows |= _is_smooth(self._problem, self._settings, *arguments, self.asked * self._margin)
        jumps = _is_jump(noises, self._problem.unit_roundoff * self._base.abs() / self._settings.eps)
        self._jumps = bool((jumps & (known > self.asked)).any())
        self._explained_to(known.masked_fill(rows, 0.0) / self._margin, excluded)
        refuted = torch.stack([error[0] for error in errors.values()]).amax(0)
        worst_first = rows.nonzero().reshape(-1)[refuted[rows].argsort(descending=True)]
        self._refuting |= zip(worst_first[:MAX_SUSPECTS].tolist(), refuting[worst_first].tolist(), strict=False)
        self._excluded, self._analytical = excluded, analytical
        return worst_first.tolist()

    def _explained_to(self, sizes: Tensor, excluded: _Excluded | None = None) -> None:
        """Stores up to which size outputs may hide entries; sizes: of each output, float64, shape (m,)."""
        earlier = self._explained if excluded is not None else 0.0
        self._explained = max(earlier, largest(sizes.where(sizes <= self.asked, 0.0)))
        self._hiding = (sizes > self.asked).nonzero().reshape(-1)
        self.bound = max(self._explained, largest(sizes), self._unresolved)

    def _separated(
        self, unexplained: list[int], analytical: Tensor, row_of: Callable[[int], Tensor]
    ) -> tuple[Failure | None, list[int]]:
        """Examines outputs again that are not explained or may hide entries, if they are few.

        Returns the failure, if any, and the numbers of the outputs that are still not explained.

        Such outputs may be next to kinks. If their columns move together with others, they cross the kinks at every
        step for which rounding is small. Therefore these columns are measured one by one, and only all others move
        together.
        """
        compression = self._compression
        rows = torch.unique(torch.cat([self._hiding, self._hiding.new_tensor(unexplained)]))
        columns = _separable_columns(self._problem, compression, rows, MAX_SEPARATED)
        if columns is None:
            return None, unexplained
        mine = torch.isin(compression.rows, rows)
        excluded = torch.zeros_like(self._base, dtype=torch.bool).index_fill_(0, rows, True), columns
        expected = analytical.new_zeros(columns.numel(), rows.numel())
        places = zip((columns, rows), (compression.columns[mine], compression.rows[mine]), strict=True)
        expected[tuple(torch.searchsorted(known, own) for known, own in places)] = analytical[mine]
        differences = self._problem.difference_columns
        found = torch.stack([differences(column, 1, self._settings.eps, True)[0][rows] for column in columns.tolist()])
        atol, rtol = tolerances(self._problem, self._settings, columns.unsqueeze(1))
        allowed = atol + rtol * found.abs()
        differs = ~((expected - found).abs() <= allowed)
        lacking = rows[differs.any(0)].tolist()
        for row in lacking:  # their entries may be outside the pattern, or be added to other entries
            expected[:, int(torch.searchsorted(rows, row))] = row_of(row)[columns]
        differs = ~((expected - found).abs() <= allowed)
        if lacking and not bool(differs.any()):
            for row in lacking:
                self._refuting.setdefault(row, 1.0)
            return None, list(dict.fromkeys((*lacking, *unexplained)))
        which = differs.nonzero(as_tuple=True)
        coordinates = rows[which[1]], columns[which[0]]
        where = self._problem, self._settings, *coordinates
        failure, unresolved = entries_failure(*where, expected[which], found[which])
        if failure is not None:
            return failure, []
        self._unresolved = max(self._unresolved, unresolved)
        return None, self._unexplained_rows(analytical, excluded)

    def _subtracted_entries(self, row: int, gradient: Tensor) -> list[Found] | Failure | Incomplete:
        """The harmless entries that, together with the row's gradient, explain how its output changes."""
        problem, settings = self._problem, self._settings
        measure = partial(self._differences_along, count=self._count, extrapolated=self._count, excluded=self._excluded)
        differences = measure(self._refuting[row])
        if not bool(differences.derivatives[:, row].isfinite().all()):
            differences = measure(SMALLER_STEPS[0])  # func is not defined at the distance of the step
        allowed = float(self._compared(differences, self._analytical).allowed[row])
        allowed += NEGLIGIBLE_ERROR * settings.atol
        found: list[Found] = []
        errors = differences.derivatives[:, row] - differences.directions @ gradient
        while True:
            k = int(errors.abs().nan_to_num(torch.inf).argmax())
            if abs(errors[k].item()) <= allowed:
                return found
            if len(found) == MAX_SUBTRACTED:
                break
            where = row, gradient, differences.directions[k], differences.eps, errors[k].item(), found
            entry = entry_in_row(problem, settings, *where)
            if entry.remeasured is not None:
                return located_failure([entry])
            self._unresolved = max(self._unresolved, entry.unresolved)
            if any(entry.columns == known.columns for known in found):
                break
            found.append(entry)
            errors = errors - entry.along(differences.directions)
        return incomplete([], unexplained=math.inf)  # harmless entries may cancel an entry that matters

    @cached_property
    def asked(self) -> float:
        """The smallest size of an entry outside the pattern that matters.

        It is atol or, if larger, the size that changes the largest output by two ulps at a step of eps.
        """
        one_bit = 4 * self._problem.unit_roundoff * largest(self._base) / self._settings.eps
        return max(self._settings.atol, one_bit)

    def _differences_along(
        self, step: float, count: int, extrapolated: int, first: int = 0, excluded: _Excluded | None = None
    ) -> Differences:
        """Like `directional_differences`, without the excluded outputs and columns.

        step: in units of eps. first: number of the first direction. Each number is the same direction at all steps.
        """
        compression = self._compression
        fixed = compression.excluded_columns
        if excluded is not None:
            none = torch.zeros(self._problem.n, dtype=torch.bool, device=self._problem.device)
            fixed = (none if fixed is None else fixed).index_fill(0, excluded[1], True)
        arguments = self._problem, self._settings, self._base, self._settings.eps * step, count, 0
        differences = directional_differences(*arguments, extrapolated=extrapolated, fixed=fixed, first=first)
        if compression.excluded_rows is not None:
            for values in (differences.derivatives, differences.noise):
                values.masked_fill_(compression.excluded_rows, 0.0)
            differences.sizes = None
        return differences

    def _of_direction(self, number: int) -> Callable[[], Differences]:
        """A function that measures the differences along one direction at the first step."""
        extrapolated = 1 if number == 0 else int(self._start > LARGEST_TWO_POINT)
        return partial(self._differences_along, self._start, 1, extrapolated=extrapolated, first=number)

    def _compared(self, differences: Differences, analytical: Tensor | None) -> _Discrepancies:
        """Compares derivatives along random directions with the sums of analytical or, if None, numerical entries."""
        base, entries = self._base, self.values if analytical is None else analytical
        if self._compression.excluded_rows is not None:
            base = base.masked_fill(self._compression.excluded_rows, 0.0)
        error = torch.zeros_like(base)
        for u, derivatives in zip(differences.directions.unbind(), differences.derivatives.unbind(), strict=True):
            torch.maximum(error, predicted(self._compression, u, entries).sub_(derivatives).abs_(), out=error)
        relative, share = OUTPUT_ROUNDING * differences.rounding, 1.0
        if analytical is None:
            relative = max(relative, OUTPUT_ROUNDING * 2 * self._problem.unit_roundoff / self._settings.eps)
            # Errors of the numerical entries of a row have random signs: their sum grows with the root of their number.
            share = max(1, self._compression.pattern.most_in_row) ** 0.5
        allowed = base.abs().mul_(relative * share).add_(differences.noise, alpha=4.0 * share)
        return _Discrepancies(error, allowed.clamp_(min=NEGLIGIBLE_ERROR * self._settings.atol))


def _is_noisy(differences: Differences, base: Tensor) -> Tensor:
    """Whether outputs are noisier than their rounding explains: bool, shape (m,)."""
    return 4 * differences.noise > OUTPUT_ROUNDING * differences.rounding * base.abs()


def _further_steps(unexplained: bool, varies: bool) -> list[float]:
    """The steps after eps, in their order; varies: whether outputs may vary within eps."""
    if unexplained:
        return [*SMALLER_STEPS, *LARGER_STEPS]
    return [*([FINER_STEP] if varies else []), *LARGER_STEPS, *SMALLER_STEPS]


def _resolved(found: list[_Discrepancies]) -> tuple[Tensor, Tensor]:
    """What each comparison resolves, infinite where it found an error; and the errors found, otherwise zero."""
    bounds = [one.allowed.masked_fill(one.wrong, torch.inf) for one in found]
    errors = [one.error.nan_to_num(torch.inf).masked_fill_(~one.wrong, 0.0) for one in found]
    return torch.stack(bounds), torch.stack(errors)


def _keep_structure(bounds: Tensor, errors: Tensor, noise: Tensor, noise_at_eps: Tensor) -> None:
    """Of results at FINER_STEP, keeps the errors of outputs that vary within eps, and nothing else.

    Nothing is resolved there, because rounding inside func may hide entries. noise: in units of func's values over eps.
    """
    bounds.fill_(torch.inf)
    errors.masked_fill_(noise * EXPLAINED_RATIO > noise_at_eps, 0.0)


def _is_smooth(
    problem: Problem,
    settings: Settings,
    compression: Compression,
    overruled: Tensor,
    directions: Tensor,
    kinds: list[Tensor],
    least: float,
) -> Tensor:
    """A mask of the overruled outputs that have a slope which neither entries nor kinks explain: bool, shape (m,).

    At a small step, entries explain these outputs, but not at all larger ones. Kinks that only larger steps cross may
    be the reason. Otherwise rounding inside func hides an entry at the small step.

    kinds: numerical and, if they are known, analytical entries. least: the largest slope that does not count.
    """
    rows = overruled.nonzero().reshape(-1)
    for entries in kinds if rows.numel() else ():
        explained = torch.stack([predicted(compression, u, entries) for u in directions])
        for steps in SMOOTH_PAIRS:
            where = directions, rows, explained[:, rows]
            rows = rows[are_smooth(problem, settings, *where, least, steps, SMOOTH_SHARE)]
    return torch.zeros_like(overruled).index_fill_(0, rows, True)


def _shown(bounds: dict[float, Tensor], errors: dict[float, Tensor], negligible: Tensor) -> Tensor:
    """The size up to which the steps leave errors of each output undetected; infinite if an error is not explained.

    An error that one step found is ignored only if another step did not find it and would have resolved it. A larger
    step may average a derivative out. So it decides about an error of a smaller step only if this error is negligible,
    or comes from rounding inside func: then even smaller steps change func by about as much.

    Parameters
    ----------
    bounds
        For each step, the resolution if no error was found there, otherwise infinity: shape (kinds, m).
    errors
        For each step, the error that was found, or zero: shape (kinds, m).
    negligible
        The size from which errors matter: shape (kinds, 1).
    """
    largest_error = torch.stack(list(errors.values())).amax(0)
    shown = []
    for step, bound in bounds.items():
        found = torch.where((bound <= largest_error / 2) | (largest_error == 0), bound, torch.inf)
        for smaller, error in errors.items():
            if smaller >= step:
                continue
            is_rounding = torch.zeros_like(error, dtype=torch.bool)
            for smallest, change in errors.items():
                if smallest < smaller:
                    is_rounding |= change * smallest >= error * smaller * ROUNDING_RATIO
            averaged = torch.where(error <= negligible, error, torch.inf)
            found = torch.maximum(found, averaged.masked_fill_(is_rounding, 0.0))
        shown.append(found)
    return torch.stack(shown).amin(0)


def _separable_columns(problem: Problem, compression: Compression, rows: Tensor, most: int) -> Tensor | None:
    """The columns of some rows; None if there are none or more than `most` of either, or if a block is complex."""
    is_complex = any(block.is_complex for block in (*problem.inputs, *problem.outputs))
    if is_complex or not 0 < rows.numel() <= most:
        return None
    columns = torch.unique(compression.columns[torch.isin(compression.rows, rows)])
    return columns if 0 < columns.numel() <= most else None


def _enough_directions(confidence: float, count: int, ratio: float) -> int:
    """The number of directions that find errors smaller by this ratio than `count` directions find.

    0 if they are more than MAX_DIRECTIONS, or if `count` directions are enough.
    """
    if not 1 < ratio < math.inf:
        return 0
    missed = math.log(1 - confidence)
    share = missed / count + math.log(ratio)
    enough = math.ceil(missed / share) + 1 if share < 0 else 0
    return enough if enough <= MAX_DIRECTIONS else 0


def _is_jump(noises: dict[float, Tensor], rounding: Tensor) -> Tensor:
    """Which outputs change by the same amount at the smallest steps, and by more than rounding: bool, shape (m,).

    Outputs were compared bit by bit at only a few points, which may all lie on one side of a jump. noises: the noise of
    derivatives, shape (m,), by step, in units of eps. rounding: one rounding error of an output, in the same units.
    """
    changes = torch.stack([noises[step] * step for step in sorted(noises)[:MIN_STEPS]])
    least, most = changes.amin(0), changes.amax(0)
    return (least >= (1 - SAME_CHANGE) * most) & (most > OUTPUT_ROUNDING * rounding) & (len(noises) >= MIN_STEPS)
