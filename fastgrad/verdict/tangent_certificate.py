"""Whether JVPs equal the sums of the entries of a sparse Jacobian that was computed by forward mode.

Columns that share no row of a pattern share one JVP. So an entry that the pattern lacks is added to another entry of
its row. The JVP of a random tangent then differs from the sum of the entries by more than rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgrad.core.native import ops
from fastgrad.core.random import TANGENT_STREAM, direction
from fastgrad.core.tensors import differ, largest
from fastgrad.engines.blocks import one_hot_elements
from fastgrad.engines.compressed import Compression, tangent_entries
from fastgrad.problem.forward import SummedJvps
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Certificate
from fastgrad.report.failure import Failure
from fastgrad.report.settings import Settings
from fastgrad.verdict.analytical_certificate import MAX_COTANGENTS, SAME
from fastgrad.verdict.comparison import tolerances
from fastgrad.verdict.confirm import entry_at, located_failure
from fastgrad.verdict.linearity import (
    NEGLIGIBLE,
    detected_size,
    disagreement,
    measured_rounding,
    sum_rounding,
    term_sizes,
)
from fastgrad.verdict.locate import locate
from fastgrad.verdict.repeated_calls import MAX_CALLS
from fastgrad.verdict.tangents import tangent_directions

CLAIM = "the forward-mode entries outside the sparsity pattern are zero, and jvp is linear in its tangent"


class TangentCertificate:
    """Certifies that no entry of forward mode lies outside a pattern, and that the jvp is linear in its tangent.

    Attributes
    ----------
    values
        The entries in the pattern, by JVPs of column groups: float64, shape (nnz,).
    """

    def __init__(self, problem: Problem, settings: Settings, compression: Compression) -> None:
        self._problem = problem
        self._settings = settings
        self._compression = compression
        self._summed = problem.unexplained_jvps or SummedJvps(problem)
        self._tangents = 0
        self._bound = 0.0
        self._mismatch: tuple[Tensor, int, float] | None = None
        problem.unexplained_jvps = self._summed  # until they are explained, also if a JVP raises
        self.values = tangent_entries(problem, compression, self._summed.jvps_of)

    def certify(self, wanted: float) -> bool:
        """Whether the entries explain all JVPs, also of one-hot and of random tangents.

        If not, the JVPs remain in `Problem.unexplained_jvps`. wanted: the size from which entries outside the pattern
        must be detected.
        """
        explains = self._columns_agree() and self._sums_agree(wanted) and self._problem.domains_match
        if not (explains and self._explains_earlier_jvps()):
            return False
        self._problem.unexplained_jvps = None
        return True

    def wrong_entry(self) -> Failure | None:
        """The failure of an entry that explains why `certify` returned False, if JVP and differences confirm it."""
        if self._mismatch is None:
            return None
        tangent, row, value = self._mismatch

        def residual(vector: Tensor) -> float:
            return self._problem.jvp_coordinates(vector)[row].item() - self._sums(vector[None])[0][0, row].item()

        found = entry_at(self._problem, self._settings, row, locate(residual, tangent, value))
        return None if found.remeasured is None else located_failure([found])

    def confirms_worst(self, numerical: Tensor) -> bool:
        """Whether the entry that differs most from the numerical one is the same if its column is run separately."""
        rows, columns = self._compression.rows, self._compression.columns
        atol, rtol = tolerances(self._problem, self._settings, columns)
        excess = (self.values - numerical).abs() / (atol + rtol * numerical.abs())
        worst = int(excess.nan_to_num(torch.inf).argmax())
        tangent = torch.zeros(self._problem.n, dtype=torch.float64, device=self._problem.device)
        tangent[columns[worst]] = 1.0
        alone = self._problem.jvp_coordinates(tangent)[rows[worst]]
        return not differ(alone[None, None], self.values[worst][None, None], SAME * largest(alone[None]), False)

    def certificate(self) -> Certificate:
        """The certificate, after `certify` has returned True."""
        method = f"J u against the JVP of u, {self._tangents} random tangents, one of them half zero"
        return Certificate(CLAIM, method, self._bound)

    def _columns_agree(self) -> bool:
        """Whether columns that are run separately equal those that were computed together, up to rounding."""
        for column in self._separate_columns():
            tangent = torch.zeros(1, self._problem.n, dtype=torch.float64, device=self._problem.device)
            tangent[0, column] = 1.0
            product = self._summed.jvps_of(tangent)
            known, _ = self._sums(tangent)
            if not largest(product - known) <= SAME * largest(known):
                self._note_mismatch(tangent, product - known)
                return False
        return True

    def _note_mismatch(self, tangents: Tensor, errors: Tensor) -> None:
        """Notes the tangent and the output with the largest error: shapes (count, n) and (count, m)."""
        k, row = divmod(int(errors.abs().argmax()), errors.shape[1])
        self._mismatch = tangents[k], row, errors[k, row].item()

    def _separate_columns(self) -> list[int]:
        """Two columns of each input; more if func contains custom code, whose jvp may be right only for sums."""
        inputs = [block for block in self._problem.inputs if block.size]
        columns = {block.first + k for block in inputs for k in one_hot_elements(block.size, self._settings.seed)}
        if self._problem.runs_custom_jvp():
            n = self._problem.n
            columns.update(k * n // min(n, MAX_CALLS) for k in range(min(n, MAX_CALLS)))
        return sorted(columns)

    def _sums_agree(self, wanted: float) -> bool:
        """Whether JVPs of as many random tangents as are needed equal the sums of the entries, up to rounding."""
        tangents = tangent_directions(self._problem.n, self._settings.seed, self._problem.device)
        resolution, count = 0.0, 1
        while True:
            found = self._resolution(tangents)
            if found is None or (count == 1 and not self._inputs_agree(tangents[:1])):
                return False
            resolution = max(resolution, found)
            self._bound, self._tangents = detected_size(resolution, count, self._settings.confidence), count + 1
            if self._bound <= wanted or count == MAX_COTANGENTS:
                return self._bound <= wanted
            stream = TANGENT_STREAM + 16 * count
            tangents = direction(self._problem.n, self._settings.seed, stream, device=self._problem.device)[None]
            count += 1

    def _inputs_agree(self, tangent: Tensor) -> bool:
        """Whether JVPs in which only one of several inputs has a nonzero tangent equal their sums."""
        inputs = [block for block in self._problem.inputs if block.size]
        if len(inputs) < 2:
            return True
        for block in inputs:
            alone = torch.zeros_like(tangent)
            alone[:, block.slice] = tangent[:, block.slice]
            if self._resolution(alone) is None:
                return False
        return True

    def _resolution(self, tangents: Tensor) -> float | None:
        """The largest error of a JVP that rounding may explain; None if a JVP differs by more from its sum."""
        products, (sums, squares) = self._summed.jvps_of(tangents), self._sums(tangents)
        sizes = term_sizes(squares, sums)
        roundoff = self._problem.unit_roundoff
        rounding = sum_rounding(self._compression.pattern.most_in_row, roundoff)
        allowed = rounding * sizes + NEGLIGIBLE * self._settings.atol
        error = products - sums
        if not bool((error.abs() <= allowed).all()):
            again = self._summed.jvps_of
            measured = measured_rounding(lambda factor: again(tangents * factor), products, sizes, roundoff)
            allowed = torch.maximum(allowed, measured)
        if bool((error.abs() <= allowed).all()):
            return largest(allowed)
        self._note_mismatch(tangents, error)
        return None

    def _explains_earlier_jvps(self) -> bool:
        """Whether the entries explain the sum of all JVPs, also of those that another pattern did not explain."""
        tangent, product = self._summed.tangent[None], self._summed.product[None]
        sums = tangent, product, *self._sums(tangent)
        own = self._settings.loosest()
        return disagreement(*sums, self._settings, own.atol, own.rtol) is None

    def _sums(self, tangents: Tensor) -> tuple[Tensor, Tensor]:
        """J u for tangents u, shape (count, n), from the entries; and the sums of the squared terms: (count, m)."""
        sums, squares = tangents.new_zeros(2, tangents.shape[0], self._problem.m).unbind()
        entries = self._compression.columns, self._compression.rows, self.values
        for tangent, total, square in zip(tangents, sums, squares, strict=True):
            ops.project_entries_(total, square, tangent, *entries)
        return sums, squares
