"""Looks for entries outside a pattern at steps of exactly eps.

If inputs or outputs are large, rounding would dominate small steps along random directions. Larger ones average out a
term of func that varies within eps, or it hides behind the noise of its output. The entries in the pattern are measured
at eps; here all others are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from fastgrad.core.precision import relative_step
from fastgrad.core.random import EPS_DIRECTION, direction
from fastgrad.core.tensors import checksum, largest
from fastgrad.engines.compressed import Compression, dense_row, predicted
from fastgrad.engines.sketch import FINER_STEP, Differences
from fastgrad.problem.problem import Problem
from fastgrad.report.failure import Failure
from fastgrad.report.settings import Settings
from fastgrad.verdict.confirm import Found, entry_in_row, located_failure
from fastgrad.verdict.incomplete import MAX_SUSPECTS, Incomplete, incomplete
from fastgrad.verdict.repeated_differences import Taken, note_changes

OUTPUT_ROUNDING = 8.0
"""Allowed error of a derivative along a direction, times its step, in units of rounding of the output."""

SMALLER_STEPS = 2.0**-10, 2.0**-14, 2.0**-17
"""Further steps, in units of eps. If many coordinates move together, they may cross kinks that a single one does not
cross; smaller steps may avoid this."""

COLUMNS_PER_OUTPUT = 8
"""Least number of columns per output that is examined: its two evaluations are at most an eighth of the dense engine's.
"""


def exceeds_eps(values: Tensor, dtype: torch.dtype, eps: float) -> bool:
    """Whether steps along random directions exceed eps for some of the coordinates of an input of this dtype."""
    return largest(values) * relative_step(dtype) > eps


class EpsCertificate:
    """Certifies that no entry lies outside a pattern, by one direction in which each coordinate moves by about eps.

    Parameters
    ----------
    base
        The outputs at x: float64, shape (m,).
    numerical
        The numerical entries in the pattern: float64, shape (nnz,).
    is_needed
        Whether steps along other directions exceeded eps because of large outputs, or left outputs unexplained. Large
        inputs are found here.
    """

    def __init__(
        self,
        problem: Problem,
        settings: Settings,
        compression: Compression,
        base: Tensor,
        numerical: Tensor,
        is_needed: bool,
    ) -> None:
        self._problem, self._settings, self._compression = problem, settings, compression
        self._base, self._numerical = base, numerical
        coordinates, eps = problem.coordinates(), settings.eps
        inputs = ((coordinates[one.slice], one.tensor.dtype, eps * one.step) for one in problem.inputs)
        self._is_needed = is_needed or any(exceeds_eps(*one) for one in inputs)

    @cached_property
    def _vector(self) -> Tensor:
        """The direction: float64, shape (n,)."""
        vector = direction(self._problem.n, self._settings.seed, EPS_DIRECTION, device=self._problem.device)
        fixed = self._compression.excluded_columns
        return vector if fixed is None else vector.masked_fill_(fixed, 0.0)

    def explains(self, entries: Tensor) -> bool:
        """Whether the entries, float64 of shape (nnz,), are all that func has."""
        found = self.certify(entries, partial(dense_row, self._compression, entries))
        return not isinstance(found, Failure) and found.is_nothing

    def certify(self, analytical: Tensor, row_of: Callable[[int], Tensor]) -> Failure | Incomplete:
        """A failure, or what the pattern lacks.

        analytical: the entries in the pattern: float64, shape (nnz,). row_of: a row of the backward, shape (n,).
        """
        if not self._is_needed:
            return incomplete([])
        taken: list[Taken] = []
        differences = self._taken(1.0, taken)
        error, allowed = self._compared(differences, analytical)
        wrong = ~(error <= allowed)
        if not bool(wrong.any()):
            return incomplete([])
        if int(wrong.sum()) > MAX_SUSPECTS:
            # Analytical entries may be off by their tolerances, but numerical ones are measured at this step.
            share = self._compression.pattern.most_in_row**0.5
            wrong &= ~(self._compared(differences, self._numerical)[0] <= allowed * max(1.0, share))
        smaller: list[Taken] = []
        if bool(wrong.any()):
            wrong &= ~self._is_next_to_kinks(analytical, error, smaller)
        rows = wrong.nonzero().reshape(-1)
        taken += smaller if rows.numel() else []
        worst = rows[error[rows].argsort(descending=True)].tolist()
        entries: list[Found] = []
        unexplained = 0.0
        most = max(MAX_SUSPECTS, self._problem.n // COLUMNS_PER_OUTPUT)
        for row in worst[:most]:
            own = differences.derivatives[0, row].item(), allowed[row].item()
            entry, rest = self._entry_outside(row, *own, row_of(row), taken)
            if entry is not None and entry.remeasured is not None:
                return located_failure([entry])
            unexplained = max(unexplained, rest)
            entries += [] if entry is None else [entry]
            if len(entries) == MAX_SUSPECTS:
                break
        if not entries and len(worst) > most:  # with more entries, the other outputs are compared again
            unexplained = max(unexplained, error[worst[most]].item())
        note_changes(self._problem, self._settings, self._base, taken)
        learnt = [(np.full(len(entry.columns), entry.row), np.array(entry.columns)) for entry in entries]
        return incomplete(learnt, unexplained=unexplained or None)

    def _taken(self, step: float, taken: list[Taken], vector: Tensor | None = None) -> Differences:
        """The differences along a vector at a step in units of eps, which are added to those to repeat."""
        measure = partial(self._differences, step * self._settings.eps, vector)
        differences = measure()
        taken.append((measure, checksum(differences.derivatives)))
        return differences

    def _is_next_to_kinks(self, analytical: Tensor, at_eps: Tensor, taken: list[Taken]) -> Tensor:
        """Which outputs agree with their entries at a smaller step, and change there: bool, shape (m,).

        Kinks within eps explain their errors at eps, of shape (m,), if errors of this size would show at the smaller
        step. An output that does not change there may be rounded.
        """
        explained = torch.zeros_like(self._base, dtype=torch.bool)
        for step in (FINER_STEP, *SMALLER_STEPS):
            differences = self._taken(step, taken)
            error, allowed = self._compared(differences, analytical)
            explained |= (error <= allowed) & (allowed < at_eps) & (differences.size() > 2 * allowed)
        return explained

    def _compared(self, differences: Differences, analytical: Tensor) -> tuple[Tensor, Tensor]:
        """Errors of derivatives along the direction, infinite for NaN, and allowed ones: float64, shape (m,) each."""
        error = predicted(self._compression, differences.directions[0], analytical)
        error.sub_(differences.derivatives[0]).abs_().nan_to_num_(torch.inf)  # func may be undefined at this distance
        if self._compression.excluded_rows is not None:
            error.masked_fill_(self._compression.excluded_rows, 0.0)
        # Entries below atol are not wrong, and a component of the direction is at least 1/2.
        rounding = self._base.abs().mul_(OUTPUT_ROUNDING * differences.rounding)
        return error, rounding.clamp_(min=self._settings.atol / 2)

    def _differences(self, eps: float, vector: Tensor | None = None) -> Differences:
        """Central differences along a vector, by default the direction; steps are not larger for large inputs."""
        problem, vector = self._problem, self._vector if vector is None else vector
        derivatives, moved = torch.zeros_like(self._base), torch.zeros_like(vector)
        for part, step, weight in problem.parts_of(vector):
            h = eps * step / weight
            plus, minus = (problem.evaluate(True, part * h, sign) for sign in (1.0, -1.0))
            derivatives += (plus - minus).div_(2 * h)
            moved += problem.realized_width(part * h, 1.0).div_(2 * h)
        rounding = 2 * problem.unit_roundoff / eps * sum(weight / step for step, weight in problem.scales)
        return Differences(eps, moved[None], derivatives[None], torch.zeros_like(derivatives), rounding)

    def _entry_outside(
        self, row: int, derivative: float, allowed: float, gradient: Tensor, taken: list[Taken]
    ) -> tuple[Found | None, float]:
        """The entry outside the pattern that explains an output's derivative, if any, and the size of what it leaves.

        An output that depends only on the inputs in its row of the pattern changes by the same amount, bit by bit, if
        only these move. Its entries were compared at eps, so nothing is left.
        """
        inside, outside = torch.zeros_like(self._vector), self._vector.clone()
        own = self._compression.columns[self._compression.entries_of_row(row)]
        inside[own], outside[own] = outside[own], 0.0
        again: list[Taken] = []
        rest = derivative - (self._taken(1.0, again, inside).derivatives[0, row].item() if own.numel() else 0.0)
        if abs(rest) <= allowed:  # a value that is wrong once would not have been the same
            return None, 0.0
        taken += again
        entry = entry_in_row(self._problem, self._settings, row, gradient, outside, self._settings.eps, rest)
        rest = abs(rest - entry.along(outside).item())
        if rest <= allowed:
            return entry, entry.unresolved
        return entry, math.inf if math.isnan(rest) else max(entry.unresolved, rest)
