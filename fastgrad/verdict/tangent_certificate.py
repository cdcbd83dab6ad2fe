"""Tests whether JVPs equal the sums of the entries of a sparse Jacobian that was computed by forward mode.

Columns that share no row of a pattern share one JVP. So an entry that the pattern lacks is added to another entry of
its row. The JVP of a random tangent then differs from the sum of the entries by more than rounding.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from fastgrad.core.native import ops
from fastgrad.core.random import TANGENT_STREAM, direction
from fastgrad.core.tensors import differ, largest, ones_at
from fastgrad.engines.blocks import one_hot_elements
from fastgrad.engines.compressed import Compression, tangent_entries
from fastgrad.engines.grad_output_kinds import SPARSE
from fastgrad.problem.coordinates import restricted
from fastgrad.problem.forward import SummedJvps
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Certificate
from fastgrad.report.failure import Failure
from fastgrad.report.settings import Settings
from fastgrad.verdict.analytical_certificate import MAX_COTANGENTS, SAME
from fastgrad.verdict.comparison import excesses
from fastgrad.verdict.confirm import entry_at, located_failure
from fastgrad.verdict.linearity import (
    NEGLIGIBLE_COMPONENT,
    TERM_ROUNDING,
    detected_size,
    disagreement,
    measured_rounding,
    sum_rounding,
    term_sizes,
)
from fastgrad.verdict.locate import locate
from fastgrad.verdict.repeated_calls import MAX_CALLS
from fastgrad.verdict.tangents import changed_sum, nonlinear_parts, tangent_directions

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
        # Largest error of a JVP with which MAX_COTANGENTS tangents still exclude entries that matter.
        self._negligible = 0.0
        self._error = 0.0
        self._mismatch: tuple[Tensor, int, float] | None = None
        problem.unexplained_jvps = self._summed  # kept until they are explained, also if a JVP raises
        self.values = tangent_entries(problem, compression, self._jvps_of)

    def certify(self, wanted: float) -> bool:
        """Whether the entries explain all JVPs, also of one-hot and of random tangents.

        If not, or if rows are left out of the pattern, the JVPs remain in `Problem.unexplained_jvps`. wanted: the size
        from which entries outside the pattern must be detected.
        """
        self._negligible = wanted / detected_size(1.0, MAX_COTANGENTS, self._settings.confidence)
        explains = self._columns_agree() and self._sums_agree(wanted) and self._problem.domains_match
        if not (explains and self._explains_earlier_jvps()):
            return False
        if self._compression.excluded_rows is None:
            self._problem.unexplained_jvps = None
        return True

    def varies(self, wanted: float) -> Failure | None:
        """The failure if the sum of all JVPs changes when the same JVPs run again; wanted: as in `certify`."""
        self._problem.unexplained_jvps = None
        again = TangentCertificate(self._problem, self._settings, self._compression)
        again.certify(wanted)
        first, later = self._summed, again._summed
        self._problem.unexplained_jvps = first
        if not torch.equal(first.tangent, later.tangent):
            return None  # earlier JVPs, or others, are in one of the sums
        rounding = TERM_ROUNDING * self._problem.unit_roundoff * first.product.abs()
        allowed = rounding + self._settings.atol / 8
        return changed_sum(self._settings, first.product, later.product, allowed, self._problem.outputs)

    def wrong_entry(self) -> Failure | None:
        """The failure of an entry that explains why `certify` returned False, if JVP and differences confirm it."""
        if self._mismatch is None:
            return None
        tangent, row, value = self._mismatch

        def residual(vector: Tensor) -> float:
            return self._problem.jvp_coordinates(vector)[row].item() - self._sums(vector[None])[0][0, row].item()

        found = entry_at(self._problem, self._settings, row, locate(residual, tangent, value))
        if found.remeasured is None:
            return nonlinear_parts(self._problem, self._settings, tangent)
        return located_failure([found])

    def confirms_worst(self, numerical: Tensor) -> bool:
        """Whether the entry that differs most from the numerical one is the same if its column is run separately."""
        rows, columns = self._compression.rows, self._compression.columns
        excess = excesses(self._problem, self._settings, self.values, numerical, columns)
        worst = int(excess.nan_to_num(torch.inf).argmax())
        tangent = ones_at(self._problem.n, columns[worst], self._problem.device)
        alone = self._problem.jvp_coordinates(tangent)[rows[worst]]
        return not differ(alone[None, None], self.values[worst][None, None], SAME * largest(alone[None]), False)

    def certificate(self) -> Certificate:
        """The certificate, after `certify` has returned True."""
        method = f"weighted sums of entries compared with the JVPs of {self._tangents} random tangents (one has zeros)"
        return Certificate(CLAIM, method, self._bound)

    def _jvps_of(self, tangents: Tensor) -> Tensor:
        """JVPs, shape (count, m), with zeros in the rows that are left out; all rows are added to the sum of JVPs."""
        return self._in_pattern(self._summed.jvps_of(tangents))

    def _in_pattern(self, products: Tensor) -> Tensor:
        excluded = self._compression.excluded_rows
        return products if excluded is None else products.masked_fill(excluded, 0.0)

    def _columns_agree(self) -> bool:
        """Whether columns that are run separately equal those that were computed together, up to rounding."""
        n, device = self._problem.n, self._problem.device
        for column in self._separate_columns():
            one_hot = ones_at(n, column, device)[None]
            product, (known, _) = self._jvps_of(one_hot), self._sums(one_hot)
            error = product - known
            if not largest(error) <= SAME * largest(known) and not self._is_negligible(error, one_hot):
                self._note_mismatch(one_hot, error)
                return False
        if not self._runs_custom:
            return True
        tangent = torch.empty(n, dtype=torch.float64, device=device)
        SPARSE.fill_(tangent, self._settings.seed, TANGENT_STREAM + 16 * MAX_COTANGENTS)
        return self._resolution(tangent[None]) is not None

    def _is_negligible(self, errors: Tensor, tangents: Tensor) -> bool:
        """Whether errors of JVPs, for example rounding in a lower precision, are too small to matter; notes them.

        errors, tangents: shapes (count, m) and (count, n).
        """
        smallest = torch.where(tangents == 0, torch.inf, tangents.abs()).amin(1)
        size = largest(errors.abs().amax(1) / smallest)  # the size of an entry that may cause these errors
        if not size <= self._negligible:
            return False
        self._error = max(self._error, size)
        return True

    def _note_mismatch(self, tangents: Tensor, errors: Tensor) -> None:
        """Notes the tangent and the output with the largest error: shapes (count, n) and (count, m)."""
        k, row = divmod(int(errors.abs().argmax()), errors.shape[1])
        self._mismatch = tangents[k], row, errors[k, row].item()

    def _separate_columns(self) -> list[int]:
        """Two columns of each input; more if func contains custom code, whose jvp may be right only for sums."""
        inputs = [block for block in self._problem.inputs if block.size]
        columns = {block.first + k for block in inputs for k in one_hot_elements(block.size, self._settings.seed)}
        if self._runs_custom:
            n, count = self._problem.n, min(self._problem.n, MAX_CALLS)
            # If not all columns are run, `_columns_agree` runs a mostly zero tangent in place of the last of these.
            columns.update(k * n // count for k in range(count - (n > count)))
        return sorted(columns)

    @cached_property
    def _runs_custom(self) -> bool:
        ones = torch.ones(1, self._problem.n, dtype=torch.float64, device=self._problem.device)
        return self._problem.runs_custom_jvp(lambda: self._jvps_of(ones))

    def _sums_agree(self, wanted: float) -> bool:
        """Whether JVPs of as many random tangents as are needed equal the sums of the entries, up to rounding."""
        tangents = tangent_directions(self._problem.n, self._settings.seed, self._problem.device)
        resolution, count = 0.0, 1
        while True:
            found = self._resolution(tangents)
            if found is None or (count == 1 and not self._inputs_agree(tangents[:1])):
                return False
            resolution = max(resolution, found, self._error)
            self._bound, self._tangents = detected_size(resolution, count, self._settings.confidence), count + 1
            if self._bound <= wanted or count == MAX_COTANGENTS:
                return self._bound <= wanted
            stream = TANGENT_STREAM + 16 * count
            tangents = direction(self._problem.n, self._settings.seed, stream, device=self._problem.device)[None]
            count += 1

    def _inputs_agree(self, tangent: Tensor) -> bool:
        """Whether JVPs in which only one of several inputs has a nonzero tangent equal their sums."""
        inputs = [block for block in self._problem.inputs if block.size]
        return len(inputs) < 2 or all(self._resolution(restricted(tangent, block)) is not None for block in inputs)

    def _resolution(self, tangents: Tensor) -> float | None:
        """The largest error of a JVP that rounding may explain; None if a JVP differs by more from its sum."""
        products, (sums, squares) = self._jvps_of(tangents), self._sums(tangents)
        sizes = term_sizes(squares, sums)
        roundoff = self._problem.unit_roundoff
        rounding = sum_rounding(self._compression.pattern.most_in_row, roundoff)
        allowed = rounding * sizes + NEGLIGIBLE_COMPONENT * self._settings.atol
        error = products - sums
        if not bool((error.abs() <= allowed).all()):
            measured = measured_rounding(lambda factor: self._jvps_of(tangents * factor), products, sizes, roundoff)
            allowed = torch.maximum(allowed, measured)
        beyond = error.masked_fill(error.abs() <= allowed, 0.0)
        if largest(beyond) == 0 or self._is_negligible(beyond, tangents):
            return largest(allowed)
        self._note_mismatch(tangents, beyond)
        return None

    def _explains_earlier_jvps(self) -> bool:
        """Whether the entries explain the sum of all JVPs, also of those that another pattern did not explain."""
        tangent, product = self._summed.tangent[None], self._in_pattern(self._summed.product[None])
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
