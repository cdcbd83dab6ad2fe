"""Whether JVPs equal the sums of the entries of a sparse Jacobian that was computed by forward mode.

Columns that share no row of a pattern share one JVP. So an entry that the pattern lacks is added to another entry of
its row. The JVP of a random tangent then differs from the sum of the entries by more than rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgrad.core.native import ops
from fastgrad.core.random import TANGENT_STREAM, direction
from fastgrad.core.tensors import largest
from fastgrad.engines.blocks import one_hot_elements
from fastgrad.engines.compressed import Compression
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Certificate
from fastgrad.report.settings import Settings
from fastgrad.verdict.analytical_certificate import MAX_COTANGENTS, SAME
from fastgrad.verdict.linearity import NEGLIGIBLE, SUM_ROUNDING, TERM_ROUNDING, measured_rounding, term_sizes
from fastgrad.verdict.repeated_calls import MAX_CALLS
from fastgrad.verdict.tangents import tangent_directions

CLAIM = "the forward-mode entries outside the sparsity pattern are zero, and jvp is linear in its tangent"


class TangentCertificate:
    """Certifies that no entry of forward mode lies outside a pattern, and that the jvp is linear in its tangent."""

    def __init__(self, problem: Problem, settings: Settings, compression: Compression, values: Tensor) -> None:
        """values: the entries in the pattern, by JVPs of column groups: float64, shape (nnz,)."""
        self._problem = problem
        self._settings = settings
        self._compression = compression
        self._values = values
        self._tangents = 0
        self._bound = 0.0

    def certify(self, wanted: float) -> bool:
        """Whether the JVPs of one-hot and of random tangents equal the sums of the entries, up to rounding.

        wanted: the size from which entries outside the pattern must be detected.
        """
        return self._columns_agree() and self._sums_agree(wanted) and self._problem.domains_match

    def certificate(self) -> Certificate:
        """The certificate, after `certify` has returned True."""
        method = f"J u against the JVP of u, {self._tangents} random tangents, one of them half zero"
        return Certificate(CLAIM, method, self._bound)

    def _columns_agree(self) -> bool:
        """Whether columns that are run separately equal those that were computed together, up to rounding."""
        for column in self._separate_columns():
            tangents, domains_match = self._problem.tangent_columns(column, 1)
            if not domains_match:
                return False
            here = (self._compression.columns == column).nonzero().reshape(-1)
            known = torch.zeros_like(tangents[0])
            known[self._compression.rows[here]] = self._values[here]
            if not largest(tangents[0] - known) <= SAME * largest(known):
                return False
        return True

    def _separate_columns(self) -> list[int]:
        """Two columns of each input; more if func contains custom code, whose jvp may be right only for sums."""
        inputs = [block for block in self._problem.inputs if block.size]
        columns = {block.first + k for block in inputs for k in one_hot_elements(block.size, self._settings.seed)}
        if self._problem.is_custom:
            n = self._problem.n
            columns.update(k * n // min(n, MAX_CALLS) for k in range(min(n, MAX_CALLS)))
        return sorted(columns)

    def _sums_agree(self, wanted: float) -> bool:
        """Whether JVPs of as many random tangents as are needed equal sums; an `AnalyticalCertificate` explains it."""
        chance = 4 * (1 - self._settings.confidence)
        tangents = tangent_directions(self._problem.n, self._settings.seed, self._problem.device)
        resolution, count = 0.0, 1
        while True:
            found = self._resolution(tangents)
            if found is None:
                return False
            resolution = max(resolution, found)
            self._bound = resolution / chance ** (1 / count)
            self._tangents = count + 1
            if self._bound <= wanted or count == MAX_COTANGENTS:
                return self._bound <= wanted
            stream = TANGENT_STREAM + 16 * count
            tangents = direction(self._problem.n, self._settings.seed, stream, device=self._problem.device)[None]
            count += 1

    def _resolution(self, tangents: Tensor) -> float | None:
        """The largest error of a JVP that rounding may explain; None if a JVP differs by more from its sum."""
        products = self._problem.jvps_of(tangents)
        sums, squares = torch.zeros_like(products), torch.zeros_like(products)
        for tangent, total, square in zip(tangents, sums, squares, strict=True):
            ops.project_entries_(
                total, square, tangent, self._compression.columns, self._compression.rows, self._values
            )
        sizes = term_sizes(squares, sums)
        rounding = TERM_ROUNDING + SUM_ROUNDING * self._compression.pattern.most_in_row**0.5
        allowed = rounding * self._problem.unit_roundoff * sizes + NEGLIGIBLE * self._settings.atol
        error = (products - sums).abs_()
        if not bool((error <= allowed).all()):
            measured = measured_rounding(
                lambda factor: self._problem.jvps_of(tangents * factor), products, sizes, self._problem.unit_roundoff
            )
            allowed = torch.maximum(allowed, measured)
        return largest(allowed) if bool((error <= allowed).all()) else None
