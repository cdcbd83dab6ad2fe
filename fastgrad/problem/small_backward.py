"""The backward of a small problem, for the tests that repeat VJPs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from fastgrad.core import native
from fastgrad.problem.coordinates import Block, blocks_of


class SmallBackward:
    """The methods of `Problem` that run backward, on the graph that a small problem recorded last.

    Attributes
    ----------
    vjps
        Number of calls of backward so far.
    """

    def __init__(self, problem: native.SmallProblem) -> None:
        self._problem = problem
        self.is_custom, self.device, self.unit_roundoff = problem.is_custom, problem.device, problem.unit_roundoff
        self.n, self.m, self.vjps = problem.n, problem.m, 0

    @property
    def mutates_inputs(self) -> bool:
        """As in `Problem`."""
        return self._problem.evaluator.mutates_inputs

    # Most checks need neither.
    @cached_property
    def inputs(self) -> tuple[Block, ...]:
        return _blocks(self._problem.inputs, self._problem.graph.inputs)

    @cached_property
    def outputs(self) -> tuple[Block, ...]:
        # Detached, because these tensors must not keep this graph when another one is recorded.
        return _blocks(self._problem.outputs, [output.detach() for output in self._problem.graph.outputs])

    def vjps_of(
        self, cotangents: Tensor, only: Sequence[int], layouts: Sequence[int] = ()
    ) -> tuple[Tensor, native.GradientsMatch]:
        """As in `Problem`."""
        found = self._problem.vjps(cotangents, layouts, only)
        self.vjps += len(only)
        return found

    def vjp(self, cotangents: Tensor, layouts: Sequence[int] = (), only: Block | None = None) -> Tensor:
        """As in `Problem`."""
        return self.vjps_of(cotangents, [-1 if only is None else only.index] * cotangents.shape[0], layouts)[0]

    vjp_of_older_graph = vjp
    """As in `Problem`. It uses the first graph if the differences have called func after it was recorded."""

    def first_other_vjp(
        self, cotangents: Tensor, only: Sequence[int], order: Sequence[int], known: Tensor
    ) -> tuple[int, Tensor | None]:
        """As in `Problem`."""
        run, other, _ = self._problem.first_other_vjp(cotangents, only, order, known)
        self.vjps += run
        return run, other


def _blocks(places: Sequence[tuple[int, int, int]], tensors: Sequence[Tensor]) -> tuple[Block, ...]:
    positions = [position for position, _, _ in places]
    return blocks_of(dict(zip(positions, tensors, strict=True)), positions, once=False)
