"""Tests whether products of a backward equal the sums of the entries of a sparse Jacobian.

Rows that share no column of a pattern are computed by one VJP. An entry that the pattern lacks is then added to another
entry, or lost. In both cases a product of the backward differs from the sum of the entries, although perhaps by little
more than rounding. The responsible rows are run separately, until the entries explain every product.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fastgrad.core.errors import raise_unless_of_func
from fastgrad.core.tensors import PIECE, largest
from fastgrad.engines import compressed
from fastgrad.engines.compressed import Compression
from fastgrad.engines.grad_output_kinds import DENSE, GRAD_OUTPUT_KINDS, NON_CONTIGUOUS, NOT_EXPANDED, GradOutputKind
from fastgrad.engines.plan import dense_is_small
from fastgrad.problem.coordinates import block_with
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Certificate
from fastgrad.report.failure import Failure
from fastgrad.report.settings import Settings
from fastgrad.structure.coloring import Indices
from fastgrad.verdict.incomplete import Incomplete, incomplete
from fastgrad.verdict.linearity import LinearityTest, detected_size, linearity_certificate
from fastgrad.verdict.locate import locate
from fastgrad.verdict.repeated_calls import RepeatedCalls
from fastgrad.verdict.repeated_rows import groups_failure, variation_between

MAX_ROWS = 16
"""Largest number of rows to run, one after the other, if the entries do not explain a product of the backward."""

MAX_COTANGENTS = 12
"""Largest number of random cotangents. An entry that the rounding of larger entries hides in one product may show in
another."""

SAME = 1e-12
"""Relative difference up to which a row that is run separately equals the known one."""


def analytical_certificate(kinds: tuple[GradOutputKind, ...], bound: float) -> Certificate:
    """The certificate of a test with grad_outputs of some kinds."""
    claim = "the analytical entries outside the sparsity pattern are zero, and backward is linear in grad_output"
    return linearity_certificate(claim, kinds, bound)


class AnalyticalCertificate:
    """Certifies that no entry of the backward lies outside a pattern, and that the backward is linear in grad_output.

    Attributes
    ----------
    values
        The entries in the pattern: float64, shape (nnz,). Those of rows that were run separately are replaced.
    has_changed
        Whether any entries were replaced.
    changed_by
        The largest difference between a row that was run separately and the same row run together with others.
    bound
        The smallest size of an entry outside the pattern that is detected; known after `certify` has run.
    """

    def __init__(
        self,
        problem: Problem,
        settings: Settings,
        compression: Compression,
        values: Tensor,
        row_failure: Callable[[int, Tensor], Failure | None],
        calls: RepeatedCalls | None,
    ) -> None:
        """Stores the arguments.

        row_failure: returns the failure of a row, from its number and its gradient (float64, shape (n,)), if it is
        wrong. calls: the VJPs that were run before, if any. VJPs of a custom backward that are not compared with rows
        are added.
        """
        self._problem = problem
        self._settings = settings
        self._compression = compression
        self._row_failure = row_failure
        self._calls = calls or RepeatedCalls(problem, settings)
        self._replaced: dict[int, Tensor] = {}  # the rows that were run separately, by number
        self._tests: Sequence[LinearityTest] = ()
        self._tested_kinds: tuple[GradOutputKind, ...] = ()
        self._asked = 0.0  # the argument of `certify`
        self.values = values
        self._owns_values = False  # whether `values` is a copy
        self._lacks_small_entries = False  # whether the pattern lacks only entries that are too small to be detected
        self.bound = 0.0
        self.changed_by = 0.0

    @property
    def has_changed(self) -> bool:
        return bool(self._replaced)

    def replace_values(self, which: slice | Tensor, entries: Tensor) -> None:
        """Replaces some of the entries; the tensor that was passed to the constructor keeps its values."""
        if not self._owns_values:
            self.values, self._owns_values = self.values.clone(), True
        self.values[which] = entries

    def certificate(self) -> Certificate:
        """The certificate for the case that nothing is missing."""
        return analytical_certificate(self._tested_kinds, self.bound)

    def compare_rows(self) -> Failure | Incomplete:
        """Compares rows that were run separately earlier with the same rows computed together with others."""
        return incomplete([]) if self._compression.leaves_out else self._compared(self._calls.rows)

    def compare_more_rows(self) -> Failure | Incomplete:
        """Like `compare_rows`, for further rows (in a small problem, most or all), after everything else agreed."""
        return incomplete([]) if self._compression.leaves_out else self._compared(self._calls.run_more_rows())

    def _compared(self, rows: Mapping[int, Tensor]) -> Failure | Incomplete:
        learnt: list[tuple[Indices, Indices]] = []
        for row, gradient in rows.items():
            known = self._row(row)
            # Relative to the known row: if a row is infinite only when it is run separately, the change is not small.
            if largest(gradient - known) <= SAME * largest(known):
                continue
            failure = self._learn_row(row, gradient, learnt)
            if failure is not None:
                return failure
        return incomplete(learnt)

    def certify(self, asked: float) -> Failure | Incomplete:
        """Tests that VJPs equal the sums of the analytical entries; returns a failure, or what the pattern lacks.

        asked: the smallest size of an entry outside the pattern that matters.
        """
        learnt = []
        resolution = 0.0
        self._asked = asked
        self._tested_kinds = self._all_kinds if self._tests else self._kinds
        early, self._tests = self._tests or self._tests_of(self._tested_kinds), ()
        for linearity in itertools.chain(early, self._contiguous_tests()):
            found = self._result_of(linearity)
            if isinstance(found, Failure) or found.ends:
                return found
            learnt.append((found.rows, found.columns))
            resolution = max(resolution, linearity.resolution)
        found = self._tested_with_more_cotangents(resolution)
        return found if isinstance(found, Failure) or not found.is_nothing else incomplete(learnt)

    def _contiguous_tests(self) -> Iterator[LinearityTest]:
        """Yields a test with a dense, contiguous cotangent: a custom backward may be wrong only for this kind."""
        if not self._problem.is_custom:
            return
        self._tested_kinds = (*self._tested_kinds, DENSE)
        for linearity in self._tests_of((DENSE,)):
            known = None if self._compression.leaves_out else self._calls.product
            if known is not None:
                linearity.take(known, 0.0)
            yield linearity

    def _result_of(self, linearity: LinearityTest) -> Failure | Incomplete:
        """The result of a test: a failure, or what the pattern lacks."""
        try:
            linearity.gradients()
        except Exception as error:
            raise_unless_of_func(error)
            # The failure says for which grad_output backward raised; or backward raises again.
            failure = linearity.failure()
            if failure is None:
                raise  # only one call raised
            return failure
        self._add(linearity)
        found = self._follow_columns(linearity)
        if isinstance(found, Failure) or not found.is_nothing:
            return found
        failure = linearity.failure()
        if failure is not None and self._lacks_small_entries:
            return incomplete([], refuted=True)  # without these entries, a right backward may appear nonlinear
        return failure or found

    def _tested_with_more_cotangents(self, resolution: float) -> Failure | Incomplete:
        """Tests with further cotangents, until the rounding of large entries is unlikely to hide an entry that matters.

        `detected_size` says what is unlikely. If only one of the two components is zero, as in half of all halved
        cotangents, the missing entry is multiplied by the other component.
        """
        count, confidence = 1, self._settings.confidence
        while detected_size(resolution, count, confidence) > self._asked and count < MAX_COTANGENTS:
            linearity = next(self._tests_of((NON_CONTIGUOUS,), count))
            found = self._result_of(linearity)
            if isinstance(found, Failure) or not found.is_nothing:
                return found
            resolution = max(resolution, linearity.resolution)
            count += 1
        self.bound = detected_size(resolution, count, confidence)
        return incomplete([])

    def _follow_columns(self, linearity: LinearityTest) -> Failure | Incomplete:
        """Looks for the wrong entry, or for entries that the pattern lacks, in at most MAX_ROWS rows.

        A product is not explained if the pattern lacks an entry, or if an entry was computed together with an entry
        that the pattern lacks. In both cases, a row differs when it is run separately.
        """
        learnt: list[tuple[Indices, Indices]] = []
        for _ in range(MAX_ROWS):
            suspects = linearity.suspects()
            if not suspects or (self._lacks_small_entries and self._is_small(linearity, suspects)):
                return incomplete(learnt)
            if dense_is_small(self._problem, self._settings):
                return incomplete(learnt, refuted=True)
            which, column = suspects[0]
            row, gradient = self._locate_row(linearity.cotangents[which], column)
            known = self._row(row)
            change = gradient - known
            if not abs(change[column].item()) > SAME * abs(gradient[column].item()):
                break  # rows that are run separately do not explain the product
            failure = self._learn_row(row, gradient, learnt)
            if failure is not None:
                return failure
            linearity.replace_row(row, change)
        else:
            # Perhaps these rows lack only entries that are too small for sparsity detection, and other rows do, too.
            self._lacks_small_entries = self.changed_by <= self._largest_certifiable and self._is_small(
                linearity, linearity.suspects()
            )
            return incomplete([]) if self._lacks_small_entries else incomplete(learnt, refuted=True)
        failure = linearity.failure()
        if failure is not None:
            return failure
        if self._is_small(linearity, suspects):  # perhaps rounding, for example of a backward in a lower precision
            return incomplete(learnt)
        self.bound = linearity.largest_error(suspects)
        return incomplete([], unexplained=self.bound)

    @property
    def _largest_certifiable(self) -> float:
        """Largest error of a product with which further cotangents can still exclude entries that matter."""
        return self._asked / detected_size(1.0, MAX_COTANGENTS, self._settings.confidence)

    def _is_small(self, linearity: LinearityTest, suspects: Sequence[tuple[int, int]]) -> bool:
        """Whether further cotangents can still exclude entries that matter; notes the largest error of the suspects."""
        error = linearity.largest_error(suspects)
        if not error <= self._largest_certifiable:
            return False
        linearity.resolution = max(linearity.resolution, error)
        return True

    def _locate_row(self, cotangent: Tensor, column: int) -> tuple[int, Tensor]:
        """The row that explains the error of a component of a VJP: its number, and its gradient from `row_alone`."""
        here = self._compression.columns == column
        rows, entries = self._compression.rows[here], self.values[here]
        beside = [(row, gradient[column].item()) for row, gradient in self._replaced.items() if not (rows == row).any()]

        def residual(vector: Tensor) -> float:
            gradient = self._problem.vjp(vector.unsqueeze(0))[0]
            known = float(vector[rows] @ entries) + sum(vector[row].item() * entry for row, entry in beside)
            return gradient[column].item() - known

        row = locate(residual, cotangent, residual(cotangent))
        return row, self.row_alone(row)

    def row_alone(self, row: int) -> Tensor:
        """A row of the backward, run separately: float64, shape (n,), zero in excluded columns.

        The grad_outputs of other outputs are undefined, as in torch's checker.
        """
        gradient = self._problem.row(row, only=block_with(self._problem.outputs, row))
        excluded = self._compression.excluded_columns
        return gradient if excluded is None else gradient.masked_fill_(excluded, 0.0)

    def _row(self, row: int) -> Tensor:
        """The analytical row as far as it is known: float64, shape (n,)."""
        gradient = torch.zeros(self._problem.n, dtype=torch.float64, device=self._problem.device)
        if row in self._replaced:
            return gradient.copy_(self._replaced[row])
        mine = self._compression.entries_of_row(row)
        return gradient.index_copy_(0, self._compression.columns[mine], self.values[mine])

    def _learn_row(self, row: int, gradient: Tensor, learnt: list[tuple[Indices, Indices]]) -> Failure | None:
        """The failure of a row that was run separately; a right row replaces the known one and is added to `learnt`."""
        failure = self._row_failure(row, gradient)
        if failure is not None:
            return failure
        mine = self._compression.entries_of_row(row)
        self.changed_by = max(self.changed_by, variation_between(self._row(row), gradient))
        self._replaced[row] = gradient
        self.replace_values(mine, gradient[self._compression.columns[mine]])
        columns = np.flatnonzero(gradient.cpu().numpy())
        learnt.append((np.full(columns.size, row), columns))
        return None

    @property
    def _all_kinds(self) -> tuple[GradOutputKind, ...]:
        """The kinds of grad_output that can be used: if rows are excluded, not the expanded one, which has no zeros."""
        return GRAD_OUTPUT_KINDS if self._compression.excluded_rows is None else NOT_EXPANDED

    @property
    def _kinds(self) -> tuple[GradOutputKind, ...]:
        """The kinds of grad_output to run; not the expanded one if the second run of a group of all rows used it."""
        outputs = self._problem.outputs
        whole = len(outputs) == 1 and not outputs[0].is_complex and self._compression.row_groups[0].count == 1
        return NOT_EXPANDED if whole else self._all_kinds

    def explains_products(self) -> bool:
        """Whether products equal the sums of the entries, up to rounding; keeps the tests for `certify`."""
        self._tests = list(self._tests_of(self._all_kinds))
        for linearity in self._tests:
            self._add(linearity)
        return not any(linearity.suspects() for linearity in self._tests)

    def _add(self, linearity: LinearityTest) -> None:
        if self._problem.is_custom:
            self._calls.add(linearity.cotangents, linearity.gradients())

    def explains_rows(self, rows: Iterable[int]) -> bool:
        """Whether rows that are run separately equal the rows that were computed together, up to rounding."""
        pairs = ((self.row_alone(row), self._row(row)) for row in rows)
        return all(largest(gradient - known) <= SAME * largest(known) for gradient, known in pairs)

    def first_product(self) -> tuple[Tensor, Tensor]:
        """The first cotangent of `explains_products`, and its VJP: float64, shapes (m,) and (n,)."""
        linearity = self._tests[0]
        return linearity.cotangents[0], linearity.gradients()[0]

    def _tests_of(self, kinds: tuple[GradOutputKind, ...], number: int = 0) -> Iterator[LinearityTest]:
        """Yields one test with all kinds or, if memory is short, one per kind; number: as in `linearity_cotangents`."""
        is_small = self._problem.n + self._problem.m <= PIECE
        repeats_all = all(grouping.count <= compressed.REPEATED_GROUPS for grouping in self._compression.row_groups)
        moving = partial(_varying_group, self._problem, self._settings, self._compression)
        for some in [kinds] if is_small else [(kind,) for kind in kinds]:
            excluded = self._compression.excluded_rows, self._compression.excluded_columns
            linearity = LinearityTest(self._problem, self._settings, repeats_all, moving, some, *excluded, number)
            entries = self._compression.rows, self._compression.columns, self.values
            linearity.add_entries(*entries, self._compression.pattern.most_in_column)
            for row, gradient in self._replaced.items():
                gradient = gradient.index_fill(0, self._compression.columns[self._compression.entries_of_row(row)], 0.0)
                linearity.replace_row(row, gradient)
            yield linearity


def _varying_group(problem: Problem, settings: Settings, compression: Compression) -> Failure | None:
    """Runs every row group several times, also scaled; returns the first failure of `groups_failure`, if any."""
    for output, grouping in zip(problem.outputs, compression.row_groups, strict=True):
        for members in grouping.members():
            failure = groups_failure(problem, settings, output, [members])
            if failure is not None:
                return failure
    return None
