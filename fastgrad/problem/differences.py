"""Numerical Jacobians: central differences, column by column or group by group."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastgrad.core import native
from fastgrad.core.memory import repeats_if_memory_lacks
from fastgrad.core.phases import phase
from fastgrad.core.progress import STEP
from fastgrad.core.tensors import pieces
from fastgrad.problem.coordinates import block_with
from fastgrad.problem.evaluation import Evaluation


class CentralDifferences(Evaluation):
    """Columns of the numerical Jacobian."""

    @phase("numerical columns")
    @repeats_if_memory_lacks
    def difference_columns(self, first: int, count: int, eps: float, record_graph: bool) -> Tensor:
        """Columns first, ..., first + count - 1 of the numerical Jacobian by central differences.

        Returns
        -------
        Tensor
            float64, shape (count, m): one row per column of the Jacobian. Each takes two evaluations.

        Raises
        ------
        AssertionError
            If a perturbed func returns another number of outputs, other shapes or other dtypes.
        """
        self._recorded = None
        columns = torch.empty(count, self.m, dtype=torch.float64, device=self.device)
        step = STEP if self.progress.is_shown else max(1, count)
        begin = 0
        while begin < count:
            # A slice of all columns is avoided, because making it would take as long as a small column.
            some, own_eps = columns[begin : begin + step] if begin or step < count else columns, eps
            if self.mixes_inputs:
                block = block_with(self.inputs, first + begin)
                some, own_eps = some[: block.end - first - begin], eps * block.step
            changed = self._evaluator.difference_columns(first + begin, some, self._specs, own_eps, record_graph)
            if changed is not None:
                self.raise_changed(*changed, own_eps)
            self.progress.step(2 * some.shape[0])
            begin += some.shape[0]
        return columns

    @phase("numerical columns")
    @repeats_if_memory_lacks
    def difference_groups(self, groups: native.Groups, columns: Tensor, eps: float, record_graph: bool) -> Tensor:
        """Entries of the numerical Jacobian; groups of columns that share no row are perturbed together.

        The entries equal those of `difference_columns`. A group takes two evaluations; its columns have the same step.

        Parameters
        ----------
        columns
            The column of each entry: int64, shape (entries,).

        Returns
        -------
        Tensor
            float64, shape (entries,).
        """
        self._recorded = None
        values = torch.zeros(columns.numel(), dtype=torch.float64, device=self.device)
        count = groups.starts.numel() - 1
        step = 1 if self.mixes_inputs else STEP if self.progress.is_shown else max(1, count)
        for begin in range(0, count, step):
            part = groups if step >= count else groups.part(begin, begin + step)
            own_eps = eps
            if self.mixes_inputs:
                own_eps *= block_with(self.inputs, int(groups.coordinates[int(groups.starts[begin])])).step
            changed = self._evaluator.difference_groups(part, values, self.m, self._specs, own_eps, record_graph)
            if changed is not None:
                self.raise_changed(*changed, own_eps)
            self.progress.step(2 * min(step, count - begin))
        widths = self.coordinate_widths(eps)
        for some in pieces(values.numel(), values.device):
            values[some].div_(widths[columns[some]])
        return values

    def both_sides(self, vector: Tensor, eps: float) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yields the outputs at x + h u and at x - h u, and h, for each part u of a vector as from `parts_of`."""
        for part, step, weight in self.parts_of(vector):
            h = eps * step / weight
            displacement = part * h
            yield self.evaluate(True, displacement), self.evaluate(True, displacement, -1.0), h

    def coordinate_widths(self, eps: float) -> Tensor:
        """The divisor of each single coordinate's difference: float64, shape (n,)."""
        widths = torch.empty(self.n, dtype=torch.float64, device=self.device)
        self._evaluator.coordinate_widths(widths, [eps * block.step for block in self.inputs])
        return widths
