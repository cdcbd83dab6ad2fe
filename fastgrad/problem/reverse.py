"""Analytical Jacobians by reverse-mode AD: products with cotangents, and rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fastgrad.core import native
from fastgrad.core.memory import repeats_if_memory_lacks
from fastgrad.core.phases import phase
from fastgrad.core.precision import modulus
from fastgrad.core.random import GRAPH_STREAM, uniform_like
from fastgrad.core.tensors import ones_at
from fastgrad.problem.coordinates import Block
from fastgrad.problem.evaluation import Evaluation, derivative_error_kept


class ReverseMode(Evaluation):
    """Vector-Jacobian products.

    Attributes
    ----------
    modified_cotangent, modified_output
        The index of an output whose grad_output, or whose value, backward has modified; -1: none.
    """

    modified_cotangent = modified_output = -1

    @phase("analytical rows")
    @repeats_if_memory_lacks
    def vjp_groups(
        self, output: Block, groups: native.Groups, values: Tensor, repeated: int, scale: float
    ) -> native.GradientsMatch:
        """Writes the analytical entries of an output's rows into values: float64, shape (entries,).

        The rows of a group share no column, and take one VJP. Each of the first `repeated` groups is run again, with
        `scale` (plus or minus a power of two) times its cotangent.
        """
        # With several outputs, backward may get a sum of grad_outputs, which is not expanded.
        expand = len(self.outputs) == 1
        graph = self.vjp_graph()
        match = native.vjp_groups(graph, output.index, self._natives, groups, values, self.n, repeated, scale, expand)
        vjps = groups.starts.numel() - 1 + repeated
        self._note_vjps(graph, vjps)
        self.progress.step(vjps)
        return match

    @phase("analytical rows")
    @repeats_if_memory_lacks
    def analytical_rows(
        self,
        output: Block,
        imaginary: bool,
        first: int,
        count: int,
        inputs: Sequence[Block] | None = None,
        repeated: int = 0,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor, native.GradientsMatch]:
        """Rows of the analytical Jacobian of one output and some inputs (None: all), by VJPs with one-hot cotangents.

        The cotangents are 1 or, for `imaginary`, 1j at elements first, ..., first + count - 1. The VJPs of the first
        `repeated` are each run again immediately, with `scale` (plus or minus a power of two) times the cotangent.

        Returns
        -------
        tuple
            The rows: float64, shape (count, coordinates of these inputs); the rows of the second runs, divided by
            scale: float64, shape (repeated, coordinates); and properties of the gradients.
        """
        natives, graph, size = self._natives, self.vjp_graph(), self.n
        if inputs is not None and len(inputs) < len(natives):
            natives = [natives[self.inputs.index(block)] for block in inputs]
            graph = native.Graph(self.graph(), [block.tensor for block in inputs])
            size = sum(block.size for block in inputs)
        rows = torch.empty(count, size, dtype=torch.float64, device=self.device)
        again = torch.empty(repeated, size, dtype=torch.float64, device=self.device)
        match = native.vjp_rows(graph, output.index, natives, first, imaginary, rows, again, scale)
        self._note_vjps(graph, count + repeated)
        self.progress.step(count + repeated)
        return rows, again, match

    @phase("backward")
    @repeats_if_memory_lacks
    def whole_backward(
        self,
        cotangents: Tensor,
        layouts: Sequence[int],
        repeated: int,
        scale: float,
        undefined: bool,
        fewest_vectorized: int,
        atol: float,
        rtol: float,
    ) -> native.WholeBackward:
        """All VJPs of a check of a small problem, in one call.

        Parameters
        ----------
        cotangents, layouts
            As in `vjp`; may be empty.
        repeated, scale
            As in `analytical_rows`.
        undefined
            Whether to also run undefined grad_outputs.
        fewest_vectorized
            If an output has at least this many rows, one vectorized VJP computes them, if the backward can be
            vectorized and `repeated` is 0; 0: never.
        atol, rtol
            The products of the cotangents may differ from the sums of the rows by atol or, if smaller, by rtol times
            the largest sum.
        """
        graph, given = self.vjp_graph(), (cotangents, layouts, repeated, scale, undefined)
        whole = native.whole_backward(graph, self._natives, *given, fewest_vectorized, atol, rtol)
        self._note_vjps(graph, whole.vjps)
        self.progress.step(whole.vjps)
        return whole

    @repeats_if_memory_lacks
    def vjp(self, cotangents: Tensor, layouts: Sequence[int] = (), only: Block | None = None) -> Tensor:
        """V J for rows of cotangents, one VJP per row.

        Parameters
        ----------
        cotangents
            float64, shape (count, m).
        layouts
            For each row, the `native.Layout` of the grad_outputs; empty: all are contiguous. A row that is expanded
            must be constant over each output.
        only
            The only output that gets a grad_output; those of all other outputs are undefined.

        Returns
        -------
        Tensor
            The products: float64, shape (count, n); zero for inputs that the outputs do not depend on.
        """
        which = [-1 if only is None else only.index] * cotangents.shape[0]
        return self.vjps_of(cotangents, which, layouts)[0]

    def row(self, row: int, only: Block | None = None) -> Tensor:
        """A row of the Jacobian, by a one-hot grad_output: float64, shape (n,); only: as in `vjp`."""
        return self.vjp(ones_at(self.m, row, self.device)[None], only=only)[0]

    @repeats_if_memory_lacks
    def vjps_of(
        self, cotangents: Tensor, only: Sequence[int], layouts: Sequence[int] = ()
    ) -> tuple[Tensor, native.GradientsMatch]:
        """V J as in `vjp`, and properties of the gradients.

        only: per row, the index of the only output that gets a grad_output; -1: all outputs get one.
        """
        graph = self.vjp_graph()
        with derivative_error_kept(self):
            products, match = native.vjp_coordinates(graph, self._natives, cotangents, layouts, only)
        self._note_vjps(graph, len(only), match)
        return products, match

    @repeats_if_memory_lacks
    def first_other_vjp(
        self, cotangents: Tensor, only: Sequence[int], order: Sequence[int], known: Tensor
    ) -> tuple[int, Tensor | None]:
        """Runs the VJPs of rows of cotangents in order, until one differs from its row of `known`.

        cotangents, only: as in `vjps_of`. known: float64, shape (count, n).

        Returns
        -------
        tuple
            The number of VJPs that were run; and the VJP that differs, shape (1, n), or None if none differs.
        """
        graph = self.vjp_graph()
        run, other, match = native.first_other_vjp(graph, self._natives, cotangents, only, order, known)
        self._note_vjps(graph, run, match)
        return run, other

    def _note_vjps(self, graph: native.Graph, vjps: int, match: native.GradientsMatch | None = None) -> None:
        """Counts VJPs of a graph, and notes what they have modified and the gradients at unspecified elements."""
        self.modified_cotangent = max(self.modified_cotangent, graph.modified_cotangent)
        self.modified_output = max(self.modified_output, graph.modified_output)
        for entry in match.unspecified.values() if match is not None else ():
            if not modulus(entry.value) <= self.unspecified:  # a NaN counts as the largest
                self.unspecified = modulus(entry.value)
        self.vjps += vjps

    def graph_values(self) -> list[Tensor]:
        """The present values of the outputs of the first and of the last graph, if they are kept: each of shape (m,).

        Empty unless `base` is known, with which they can be compared.
        """
        graphs = [graph for graph in (self._first, self._recorded) if graph and self._base is not None]
        return [self._flat(output.detach() for output in graph.outputs) for graph in graphs]

    def vjp_of_older_graph(self, cotangents: Tensor, layouts: Sequence[int], only: Block | None) -> Tensor:
        """V J as in `vjp`, from the first graph if func was called since; otherwise as in `vjp_before`."""
        if self.evaluations_since_first_graph():
            return self.vjp_of_first_graph(cotangents, layouts, only)
        return self.vjp_before(cotangents, only)

    def evaluations_since_first_graph(self) -> int:
        """Number of calls of func since the first graph. If that was not kept, the current graph becomes the first."""
        if self._first is None:
            self._first, self._first_number = self.vjp_graph(), self.evaluations
        return self.evaluations - self._first_number

    def vjp_of_first_graph(self, cotangents: Tensor, layouts: Sequence[int] = (), only: Block | None = None) -> Tensor:
        """V J as in `vjp`, from the first graph if it is kept and func does not change its inputs."""
        if self._first is None or self.mutates_inputs:
            return self.vjp(cotangents, layouts, only)
        recorded, self._recorded = self._recorded, self._first
        try:
            return self.vjp(cotangents, layouts, only)
        finally:
            self._recorded = recorded

    def vjp_before(self, cotangents: Tensor, only: Block | None, displacement: Tensor | None = None) -> Tensor:
        """V J as in `vjp`, from a graph at x, after one more evaluation of func, at x or at x + displacement."""
        recorded = self.vjp_graph()
        self.evaluate(True, displacement)
        self._recorded = recorded
        try:
            return self.vjp(cotangents, only=only)
        finally:
            self._recorded = None

    @repeats_if_memory_lacks
    def zero_gradients(self) -> list[Tensor | None]:
        """Autograd's gradients for zero grad_outputs, one per input block; None where autograd returns none."""
        self.vjps += 1
        return self.vjp_graph().vjp_of_zeros()

    @repeats_if_memory_lacks
    def undefined_gradients(self, only: Block | None) -> list[Tensor | None]:
        """The same for undefined grad_outputs: of all outputs, or of one output while the others get zeros."""
        self.vjps += 1
        return self.vjp_graph().vjp_of_undefined(None if only is None else only.index)

    def columns_of_backward(self, groups: Iterable[Tensor]) -> Iterator[Tensor]:
        """J u by differentiating the backward v -> v^T J, which must be linear, with grad_output u.

        Parameters
        ----------
        groups
            For each u, the coordinates at which u is 1: int64, shape (count,). All other coordinates are 0.

        Returns
        -------
        Iterator
            J u, one per group: float64, shape (m,), in the same memory each time. This takes one VJP per group and one
            more VJP.

        Raises
        ------
        RuntimeError
            The backward cannot be differentiated. It may also raise other exceptions.
        """
        outputs = self.graph()
        cotangents = [
            uniform_like(block.tensor, 0, GRAPH_STREAM, block.first).requires_grad_() for block in self.outputs
        ]
        found = torch.autograd.grad(outputs, self._input_tensors, cotangents, create_graph=True, allow_unused=True)
        self.vjps += 1
        pairs = zip(self.inputs, found, strict=True)
        of_inputs = [(block, gradient) for block, gradient in pairs if gradient is not None and gradient.requires_grad]
        gradients = [gradient for _, gradient in of_inputs]
        u = torch.zeros(self.n, dtype=torch.float64, device=self.device)
        product = torch.zeros(self.m, dtype=torch.float64, device=self.device)
        for group in groups:
            u.zero_()[group] = 1.0
            grad_outputs = []
            for block, gradient in of_inputs:
                grad_outputs.append(torch.empty_like(gradient, memory_format=torch.contiguous_format).detach())
                native.ops.unflatten_(grad_outputs[-1], u[block.slice])
            tangents = native.vjp(gradients, cotangents, grad_outputs, False)
            self.vjps += 1
            for output, tangent in zip(self.outputs, tangents, strict=True):
                within = product[output.slice]
                within.zero_() if tangent is None else native.flatten_(within, tangent)
            yield product
