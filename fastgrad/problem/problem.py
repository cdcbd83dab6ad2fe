"""The function under test as a map of real coordinates: its values, differences, VJPs and JVPs."""

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
from fastgrad.problem.forward import ForwardMode
from fastgrad.problem.reverse import ReverseMode
from fastgrad.problem.second_order import Backward


class Problem(ReverseMode, ForwardMode):
    """The map f: R^n -> R^m of func and its inputs, with its derivatives by autograd.

    This is a context manager: on leaving it, also after an exception or Ctrl-C, the inputs have the bits that they had
    on entering. Its methods take the eps of the check; the step of an input is eps times `Block.step`.

    Attributes
    ----------
    inputs, outputs
        The coordinates of the differentiable inputs, and of the outputs whose differences are taken: the outputs that
        require grad or, if there are none, all outputs that could.
    has_graph
        Whether any output requires grad.
    is_custom
        Whether a custom Function, a hook or other user code runs in backward, as far as visible.
    became_custom
        Whether such code runs on a later graph, but not on the first one.
    vectorizes
        Whether VJPs may be vectorized: only if no such code runs.
    nodes, custom_nodes
        Number of nodes of the graph of the outputs, and number of custom Functions among them.
    records_differences
        Whether func records gradients when it is evaluated next to x.
    n, m
        Numbers of real coordinates of inputs and outputs.
    device
        The device of Jacobian blocks, which is the device of the outputs.
    seconds
        Seconds of the first evaluation.
    working_seconds
        The part of these seconds in which the processor ran this process; on a CUDA device, all of them.
    ranks
        Number of processes that compute columns and rows.
    has_checkpoint, restores
        Whether a file keeps columns and rows, and whether some were loaded from it since `restores` was last set to
        False.
    progress
        The bar that shows how far the check is.
    unit_roundoff
        Half an ulp of the coarsest dtype among inputs and outputs.
    scales
        The different pairs of step and weight of the inputs.
    mixes_inputs
        Whether there is more than one such pair.
    base_change
        The largest difference so far between `base` and the outputs of a later graph at x.
    irreproducible
        The evaluations that gave other values when they were repeated, as text.
    unspecified
        The largest magnitude so far of an entry of a VJP at an element that a sparse input does not specify.
    derivative_error
        The last exception that `vjps_of` or `jvps_of` has raised.
    evaluations, vjps, jvps
        Numbers of calls of func, of VJPs and of JVPs so far; a JVP is one of the evaluations.
    """

    @property
    def differentiates_custom_code(self) -> bool:
        """Whether func runs custom code, or, for second derivatives, the function whose backward it is."""
        return self.is_custom or (isinstance(self.func, Backward) and self.func.is_custom)

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
