"""Fast mode in forward mode: JVPs of random tangents against differences, and against each other."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fastgrad.checks.sketch import LARGER, MAX_DOUBTFUL, MAX_SINGLE, MAX_STEPS, Screening, StepSizes
from fastgrad.core.errors import raise_unless_of_func
from fastgrad.core.phases import phase
from fastgrad.core.precision import ROUNDING
from fastgrad.core.tensors import differ, largest
from fastgrad.engines.blocks import REPEAT_SCALE
from fastgrad.engines.plan import EXACT_CALLS
from fastgrad.engines.sketch import Differences, rounded_rows
from fastgrad.problem.coordinates import block_with, restricted
from fastgrad.problem.problem import Problem
from fastgrad.report.failure import Failure
from fastgrad.report.settings import Settings
from fastgrad.verdict.confirm import Found, difference_along, entry_at, located_failure
from fastgrad.verdict.locate import locate
from fastgrad.verdict.negation import negation_failure
from fastgrad.verdict.repeated_rows import ALONG_DIRECTION, nondeterministic_func, nonlinear_sum, raised_for
from fastgrad.verdict.tangents import (
    OF_INPUTS,
    changed_sum,
    combined_tangents,
    jvps_of_parts,
    repeated_tangents_failure,
    sums_certificate,
)

SMALLEST_SHARE = 1 / 8
"""If an entry is wrong for tangents of one sign, the sum of JVPs that must be zero contains at least this share of the
error: magnitudes of components are in [0.5, 1.5), and the factor of the second direction is -4 times that of the first.
"""

_OF_TERMS = "for a sum of tangents", "those of its terms add up to"
"""When a JVP is compared with others, and with which: for messages, as `OF_INPUTS`."""


@phase("forward-mode screen")
def screen_forward(problem: Problem, settings: Settings, rows: Tensor | None = None) -> Screening:
    """The verdict on all Jacobians in forward mode: J u against its difference, output by output.

    rows: mask of the rows to check, shape (m,); None: all. Selected rows must also explain `Problem.unexplained_jvps`,
    and up to SMALL_BOUND_STEPS step sizes are tried for them, until the bound is small.
    """
    return _ForwardScreen(problem, settings, rows).run()


class _ForwardScreen(StepSizes):
    """Compares products at one step size after another, until all outputs are verified or something is wrong.

    If an output disagrees at one step size, but no wrong entry is found, the joint step may cross a kink. Another step
    size then verifies this output only if it would reveal an error of the size that was seen.
    """

    def __init__(self, problem: Problem, settings: Settings, rows: Tensor | None) -> None:
        super().__init__(problem, settings, rows)
        self._suspected = torch.zeros_like(self._hidden)
        # The differences at `eps`, and the errors of the JVPs there.
        self._first: tuple[Differences, Tensor] | None = None
        # The JVP of the one-hot tangent of `combined_tangents`, which runs before all others.
        self._one_hot: Tensor | None = None
        self._nonlinear = 0.0  # the error that may be hidden because jvp is linear only within its tolerance

    def run(self) -> Screening:
        """The verdict, after at most MAX_STEPS step sizes."""
        problem, settings = self._problem, self._settings
        while self._attempt < MAX_STEPS:
            is_first = self._attempt == 0
            self._extrapolated = 1 if is_first else self._count
            differences = self._differences(self._count, self._extrapolated)
            if is_first and not self._domains_match():
                return Screening(Failure("tangent dtype", mode="forward"))
            try:
                tangents = problem.jvps_of(differences.directions)
            except Exception as error:  # a one-hot tangent did not raise
                raise_unless_of_func(error)
                return Screening(raised_for("a random tangent", error, "forward"))
            failure = self._linearity_failure(differences, tangents) if is_first else None
            if failure is None and is_first and bool((self._excess(differences, tangents) > 1).any()):
                allowed = self._allowed(differences, tangents)
                failure = repeated_tangents_failure(problem, settings, differences.directions, (), tangents, allowed)
                tentative, self._extrapolated = differences, self._count  # enough to show that something is wrong
                differences = self._differences(self._count, self._extrapolated)
                if self._contradicts(tentative, differences):
                    failure = failure or nondeterministic_func(problem, ALONG_DIRECTION)
            failure = failure or self._compare(differences, tangents)
            if failure is not None:
                return Screening(failure)
            if not bool(self._pending.any()):
                self._smallest_bound = min(self._smallest_bound, self._bound)
                if self._unresolved or self._nonlinear or not self._tries_larger_step():
                    return self._verified()
                assert self._selected is not None
                self._pending, self._bound = self._selected.clone(), settings.atol
                self._eps, self._attempt = self._eps * LARGER, self._attempt + 1
                continue
            if math.isfinite(self._smallest_bound):
                return self._verified()
            if is_first and self._noise_varies(differences):
                return Screening(nondeterministic_func(problem, ALONG_DIRECTION))
            if is_first and (self._nonlinear or 2 * problem.n + problem.m <= EXACT_CALLS):
                break  # another step size shows nothing else, or the exact engine costs no more
            self._go_to_next_step(differences)
        return self._undecided(float(self._hidden[self._pending].amax()))

    def _domains_match(self) -> bool:
        """Whether complex outputs have complex tangents and real outputs real ones, if that is checked."""
        problem, settings = self._problem, self._settings
        if not problem.n:
            return True
        self._one_hot, match = problem.tangent_columns(settings.seed % problem.n, 1)
        return match or not settings.check_grad_dtypes

    def _verified(self) -> Screening:
        bound = self._smallest_bound
        if self._unresolved or self._nonlinear:
            return self._undecided(bound)
        return Screening(
            certificates=(sums_certificate(self._count, bound, self._widest, self._settings),), bound=bound
        )

    def _undecided(self, hidden: float) -> Screening:
        size = max(self._bound, self._unresolved, self._nonlinear, hidden)
        return Screening(undecided=self._settings.of_entries(size))

    def _allowed(self, differences: Differences, tangents: Tensor) -> Tensor:
        rounding = ROUNDING * self._problem.unit_roundoff * (tangents.abs() + differences.derivatives.abs())
        return self._settings.atol / 4 + 4 * differences.noise + rounding

    def _excess(self, differences: Differences, tangents: Tensor) -> Tensor:
        """Errors of J u divided by the allowed errors, zero for outputs that are verified: shape (count, m)."""
        errors = (tangents - differences.derivatives).abs() / self._allowed(differences, tangents)
        return torch.where(self._pending, errors.nan_to_num(torch.inf), 0.0)

    def _compare(self, differences: Differences, tangents: Tensor) -> Failure | None:
        """The failure of a wrong entry, or of a JVP that is not linear; marks the outputs that are verified."""
        excess, errors = self._excess(differences, tangents), differences.derivatives - tangents
        for row in excess.amax(0).argsort(descending=True)[:MAX_DOUBTFUL].tolist():
            k = int(excess[:, row].argmax())
            if not excess[k, row] > 1:
                break
            found = self._entry(differences, row, k, errors[k, row].item())
            if found.remeasured is not None:
                return located_failure([found])
            failure = self._half_failure(differences.directions[k], tangents[k])
            if failure is not None:
                return failure
            self._unresolved = max(self._unresolved, found.unresolved)
        self._first = self._first or (differences, errors)
        failure, unexplained = self._examine_rounded(differences)
        if failure is not None:
            return failure
        excess[:, unexplained], errors[:, unexplained] = torch.inf, self._first[1][:, unexplained]
        # The components of a direction are at least 1/2 in magnitude. The difference along it has an error of `noise`.
        resolution = 2 * (self._allowed(differences, tangents) + differences.noise).amax(0)
        self._verify(differences, excess, errors.abs().nan_to_num(torch.inf), resolution)
        return None

    def _examine_rounded(self, differences: Differences) -> tuple[Failure | None, list[int]]:
        """Examines the outputs for which rounding inside func may hide changes at this step.

        Returns a failure or None, and the outputs whose changes at `eps` no single entry explains.
        """
        assert self._first is not None
        first, errors = self._first
        rows = rounded_rows(self._problem, self._settings, first, differences, self._pending)
        unexplained = []
        for number, row in enumerate(rows):
            error = errors[:, row]
            k = int(error.abs().argmax())
            if number < MAX_SINGLE and abs(error[k].item()) > self._settings.atol / 4:
                found = self._entry(first, row, k, error[k].item())
                if found.remeasured is not None:
                    return located_failure([found]), []
                self._unresolved = max(self._unresolved, found.unresolved)
                error = error - found.along(first.directions)
            if not largest(error) <= self._settings.atol / 4:
                unexplained.append(row)
        return None, unexplained

    def _verify(self, differences: Differences, excess: Tensor, errors: Tensor, resolution: Tensor) -> None:
        """Marks the outputs that are verified, and notes the size of the errors that may be hidden in each output."""
        allowed = self._settings.allowed(differences.size())
        contradicts = (resolution > self._suspected) & (self._suspected > 0)
        verified = self._pending & (4 * differences.noise <= allowed) & (excess <= 1).all(0) & ~contradicts
        undecided_sums = torch.where(verified, resolution, torch.maximum(resolution, 4 * errors.amax(0)))
        self._hidden = torch.minimum(self._hidden, undecided_sums.nan_to_num(torch.inf))
        if bool(verified.any()):
            self._widest = max(self._widest, differences.eps)
            self._bound = max(self._bound, float(self._hidden[verified].amax()))
        self._suspected = torch.maximum(self._suspected, torch.where(excess > 1, errors, 0.0).amax(0))
        self._pending &= ~verified

    def _entry(self, differences: Differences, row: int, k: int, value: float) -> Found:
        column = self._column(differences.eps, row, differences.directions[k], value)
        return entry_at(self._problem, self._settings, row, column)

    def _column(self, eps: float, row: int, tangent: Tensor, value: float | None = None) -> int:
        """The column whose entry explains the error of an output for a tangent; value: this error, if it is known."""
        problem = self._problem

        def residual(vector: Tensor) -> float:
            return difference_along(problem, vector, eps, row) - problem.jvp_coordinates(vector)[row].item()

        return locate(residual, tangent, residual(tangent) if value is None else value)

    def _linearity_failure(self, differences: Differences, tangents: Tensor) -> Failure | None:
        """The failure if JVPs do not add up as those of a linear map do."""
        failure = self._combination_failure(differences.directions, tangents) or self._earlier_failure()
        if failure is not None or self._selected is not None or len(self._problem.inputs) < 2:
            return failure
        return self._inputs_failure(differences, tangents[0])

    def _inputs_failure(self, differences: Differences, tangent: Tensor) -> Failure | None:
        """The failure if the JVP of the first direction is not the sum of those for the tangent of one input at a time.

        A wrong entry is reported if there is one. tangent: the JVP of the first direction, shape (m,).
        """
        problem, u = self._problem, differences.directions[0]

        def terms(whole: Tensor) -> Tensor:
            return torch.cat([-whole[None], problem.separate_jvps(u, undefined=False)])

        found = terms(tangent)
        failure = self._sum_failure(found, lambda: terms(problem.jvp_coordinates(u)), u, OF_INPUTS)
        if failure is None or failure.kind != "nonlinear":
            return failure
        row = int(found.sum(0).abs().nan_to_num(torch.inf).argmax())
        for block in problem.inputs:
            entry = entry_at(problem, self._settings, row, self._column(differences.eps, row, restricted(u, block)))
            if entry.remeasured is not None:
                return located_failure([entry])
        return failure

    def _combination_failure(self, directions: Tensor, tangents: Tensor) -> Failure | None:
        """The failure if the JVP of a combination of directions is not the same combination of their `tangents`."""
        problem, settings = self._problem, self._settings
        combined, shares = combined_tangents(directions, settings.seed)
        products = problem.jvps_of(combined)
        if self._one_hot is not None and differ(products[1:], self._one_hot, settings.atol, False):
            failure = repeated_tangents_failure(problem, settings, combined[1:], (), self._one_hot)
            if failure is not None:
                return failure

        def terms(*parts: Tensor) -> Tensor:
            return (torch.cat(parts) * shares[:, None]).roll(2, 0)

        def repeat() -> Tensor:
            return terms(problem.jvps_of(directions[:2]), problem.jvps_of(combined))

        return self._sum_failure(terms(tangents[:2], products), repeat, directions[1])

    def _earlier_failure(self) -> Failure | None:
        """The failure if the JVP of a sum of earlier tangents, some of them one-hot, is not the sum of their JVPs."""
        summed = self._problem.unexplained_jvps
        if summed is None or self._selected is None:
            return None
        tangent, product, left_out = summed.tangent, summed.product, ~self._selected

        def terms() -> Tensor:
            return torch.stack([-product, self._problem.jvp_coordinates(tangent)]).masked_fill_(left_out, 0.0)

        return self._sum_failure(terms(), terms, tangent)

    def _half_failure(self, u: Tensor, tangent: Tensor) -> Failure | None:
        """The failure if the JVP of u, shape (n,), is not the sum of the JVPs of its halves, which are run scaled."""

        def terms(whole: Tensor) -> Tensor:
            return torch.cat([-whole[None], jvps_of_parts(self._problem, self._settings, u)])

        return self._sum_failure(terms(tangent), lambda: terms(self._problem.jvp_coordinates(u)), u)

    def _sum_failure(
        self, terms: Tensor, repeat: Callable[[], Tensor], u: Tensor, texts: tuple[str, str] = _OF_TERMS
    ) -> Failure | None:
        """The failure if terms, shape (count, m), do not add up to zero: JVPs of tangents, times their factors.

        The first term must be the negated sum of the others. If the terms add up to zero within their tolerance, but
        not up to rounding, they are computed again by `repeat`, because one of the JVPs may have been wrong only once.
        If they do not change, an entry may be wrong for tangents of one sign. This searches for such an entry in the
        JVP of u, shape (n,), and notes the error that may be hidden if none is found. texts: as `OF_INPUTS`.
        """
        error, sizes = terms.sum(0).abs(), terms.abs().sum(0)
        # Terms that are not finite, or near overflow, are left out: they are compared with differences. But if only one
        # term is not finite, it is wrong, because the others add up to a finite value.
        counts = (terms * REPEAT_SCALE**2).isfinite().sum(0)
        finite = counts == len(terms)
        single = (counts == len(terms) - 1) & (terms.isfinite().sum(0) == len(terms) - 1)
        # Directions are in units of each input's own atol, so the smallest atol is right for all.
        wrong = single | (finite & ~(error <= self._settings.atol + self._settings.loosest().rtol * sizes))
        allowed = self._settings.atol * SMALLEST_SHARE + ROUNDING * self._problem.unit_roundoff * sizes
        doubtful = wrong | (finite & (error > allowed))
        if not bool(doubtful.any()):
            return None
        failure = changed_sum(self._settings, terms.sum(0), repeat().sum(0), allowed, self._problem.outputs)
        if failure is not None:
            return failure
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            numbers = -terms[0, row].item(), terms[1:, row].sum().item()
            return nonlinear_sum("forward", block_with(self._problem.outputs, row), row, *texts, *numbers)
        self._nonlinear = max(self._nonlinear, float(torch.where(doubtful, error, 0.0).amax()) / SMALLEST_SHARE)
        return negation_failure(self._problem, self._settings, "forward", u)
