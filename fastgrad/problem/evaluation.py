"""func as a map of real coordinates: evaluations at x and at perturbed points; restores the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import process_time
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastgrad.core import native
from fastgrad.core.errors import as_raised
from fastgrad.core.memory import OUT_OF_MEMORY, raises_memory_error, repeats_if_memory_lacks
from fastgrad.core.phases import clock, phase, working_seconds
from fastgrad.core.precision import relative_step, spacing
from fastgrad.core.progress import Progress
from fastgrad.core.tensors import PIECE, largest_change
from fastgrad.problem.arguments import as_tuple, check_callable
from fastgrad.problem.coordinates import Block, block_with, blocks_of, memory_of
from fastgrad.problem.validation import changed_message, check_outputs, differentiable_inputs, is_differentiable

Self = TypeVar("Self", bound="Evaluation")

MAX_NODES = 256
"""Largest number of graph nodes that are counted. func with many more nodes is slow: its measured time is used."""

_UNKNOWN_NODES = 8
"""The assumed number of nodes if the outputs have no graph."""


def evaluated_and_restored(func: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Calls func before a problem exists, and returns its result; restores strided arguments that require grad."""
    tensors = [value for value in arguments if isinstance(value, Tensor) and value.requires_grad]
    checked = [tensor for tensor in tensors if not tensor.is_nested and tensor.layout is torch.strided]
    blocks = [
        native.InputBlock(block.tensor, block.first, 0.0)
        for block in blocks_of(checked, range(len(checked)), once=True)
    ]
    evaluator = native.Evaluator(func, arguments, blocks)
    try:
        results = evaluator.evaluate(True)
        if evaluator.inputs_changed():
            evaluator.restore()
    except BaseException:
        evaluator.restore()
        raise
    return results


@contextmanager
def derivative_error_kept(problem: Evaluation) -> Iterator[None]:
    """Keeps an exception of VJPs or JVPs in `derivative_error`, unless memory was lacking."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OUT_OF_MEMORY):
            problem.derivative_error = error
        raise


def _check_that_all_require_grad(outputs: Sequence[Tensor], blocks: Sequence[Block]) -> None:
    for block, output in zip(blocks, outputs, strict=True):
        if not output.requires_grad:
            raise AssertionError(
                f"Expected `func` to return the same differentiable outputs on every call, but result "
                f"{block.position} no longer requires grad."
            )


class Evaluation:
    """The outputs of func at x and at perturbed points; see `fastgrad.problem.problem.Problem`."""

    derivative_error: Exception | None = None

    def __init__(
        self,
        func: Callable[..., Any],
        arguments: tuple[Any, ...],
        masked: bool = False,
        progress: Progress | None = None,
        names: tuple[str, ...] = (),
        scales: Sequence[tuple[float, float]] = (),
        warn_of_precision: bool = True,
        records_differences: bool = True,
        traced: native.SmallProblem | None = None,
        who: str = "gradcheck",
    ) -> None:
        """names: names of the arguments in messages, if any. scales: the step and the weight of each checked argument.

        records_differences: whether func records gradients when it is evaluated next to x, as in torch's checker,
        unless it is known to give the same values without recording. traced: a small problem that has already called
        func at these arguments. who: the function that is called, for messages.
        """
        check_callable(func)
        positions = differentiable_inputs(arguments, names, warn_of_precision, who)
        memories = self._memories = {position: memory_of(arguments[position], masked) for position in positions}
        self.inputs = blocks_of(arguments, positions, once=True, memories=memories, scales=scales)
        self.scales = tuple(dict.fromkeys((block.step, block.weight) for block in self.inputs))
        self.mixes_inputs = len(self.scales) > 1
        self._names = names
        self.n = self.inputs[-1].first + self.inputs[-1].size
        self.outputs: tuple[Block, ...] = ()
        self.m = 0
        self.device = self.inputs[0].tensor.device
        self.has_graph = False
        self.is_custom = self.became_custom = self.vectorizes = False
        self.nodes, self.custom_nodes = _UNKNOWN_NODES, 0
        self.records_differences = records_differences
        self.seconds = self.working_seconds = self.unit_roundoff = self.unspecified = self.base_change = 0.0
        self.ranks = 1
        self.has_checkpoint = self.restores = self.freed_first_graph = False
        self.progress = progress or Progress(False)
        self.vjps = self.jvps = 0
        self.func = func
        self._arguments = arguments
        self._recorded: native.Graph | None = None
        # Kept, because its VJPs show whether later calls overwrite saved tensors.
        self._first: native.Graph | None = None
        self._first_number = 1
        self._base: Tensor | None = None
        self.irreproducible: list[str] = []
        self._coordinates: Tensor | None = None
        self._input_tensors = [block.tensor for block in self.inputs]
        self._traced = traced
        if traced is not None:
            self._natives, self._evaluator = traced.blocks, traced.evaluator
            return
        self._natives = [self._native(block) for block in self.inputs]
        self._evaluator = native.Evaluator(func, arguments, self._natives)
        self._evaluator.records_differences = records_differences

    def _native(self, block: Block) -> native.InputBlock:
        where = block.tensor, block.first, relative_step(block.tensor.dtype)
        memory = self._memories[block.position]
        if memory is None:
            return native.InputBlock(*where)
        return native.InputBlock(*where, memory.stand_in, memory.values, memory.elements)

    def __enter__(self: Self) -> Self:
        """Evaluates func once, to learn its outputs."""
        try:
            self._trace()
        except BaseException:
            self._evaluator.restore()
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.restore()
        raised = None if error is None else as_raised(error)
        if raised is not None and raised is not error:
            raise raised from raised.__cause__

    def restore(self) -> None:
        """Restores the original bits of all inputs."""
        self._recorded = self._first = None
        self._evaluator.restore()

    @property
    def mutates_inputs(self) -> bool:
        """Whether func changed its inputs; they are restored for every evaluation."""
        return self._evaluator.mutates_inputs

    @property
    def evaluations(self) -> int:
        """Calls of func so far."""
        return self._evaluator.evaluations

    @phase("first evaluation")
    def _trace(self) -> None:
        if self._traced is not None:
            results, self.seconds = as_tuple(self._traced.result), self._traced.seconds
            self.working_seconds = self._traced.working_seconds
            self._traced.release()
        else:
            start, since = clock(self.device), process_time()
            results = as_tuple(self._evaluator.evaluate(True))
            device = next((v.device for v in results if isinstance(v, Tensor)), self.device)
            self.seconds = clock(device) - start
            self.working_seconds = working_seconds(self.seconds, since, device)
        if self._evaluator.inputs_changed():
            self._evaluator.mutates_inputs = True  # also set if an input contains a NaN, which is harmless
        check_outputs(results)
        positions = [i for i, value in enumerate(results) if is_differentiable(value) and value.requires_grad]
        self.has_graph = bool(positions)
        if not positions:
            positions = [i for i, value in enumerate(results) if is_differentiable(value)]
        detached = {position: results[position].detach() for position in positions}
        # func may return a tensor twice; torch then counts it twice.
        self.outputs = blocks_of(detached, positions, once=False)
        if self.outputs:
            self.m = self.outputs[-1].first + self.outputs[-1].size
            self.device = self.outputs[0].tensor.device
        if self.has_graph:
            first = native.Graph([results[position] for position in positions], self._input_tensors)
            self._recorded = first if self.evaluations == 1 else None
            self.nodes, self.custom_nodes = native.count_nodes(first.outputs, MAX_NODES)
            self.is_custom = not native.runs_no_custom_code(first.outputs, self._input_tensors)
            self.vectorizes = not self.is_custom
            self._first = first if self.evaluations == 1 or not self.mutates_inputs else None
        self._specs = [native.OutputSpec(block.position, block.tensor) for block in self.outputs]
        self._ulps = [spacing(block.tensor.dtype) for block in self.outputs]
        self.unit_roundoff = max([*self._ulps, *[spacing(block.tensor.dtype) for block in self.inputs]]) / 2

    def forget_outputs(self) -> None:
        """Frees the outputs of the first evaluation if they are large; their shapes and dtypes stay known."""
        if self.m <= PIECE or any(type(block.tensor) is not Tensor for block in self.outputs):
            return
        self.outputs = tuple(
            replace(block, tensor=block.tensor.new_empty(()).expand(block.tensor.shape)) for block in self.outputs
        )
        self._specs = [native.OutputSpec(block.position, block.tensor) for block in self.outputs]

    def name_of(self, block: Block) -> str:
        """The name of an input in messages."""
        return self._names[block.position] if self._names else f"input {block.position}"

    @raises_memory_error
    def graph(self) -> tuple[Tensor, ...]:
        """The outputs at x with their graph; func is evaluated again if it was called since the last graph."""
        return tuple(self.vjp_graph().outputs)

    def vjp_graph(self) -> native.Graph:
        """The graph of the outputs at x for VJPs with respect to all inputs; recorded as in `graph`."""
        if self._recorded is None:
            try:
                self._recorded = self._recorded_graph()
            except OUT_OF_MEMORY:
                if self._first is None:
                    raise
                self._first, self.freed_first_graph = None, True  # a new graph needs its memory
                self._recorded = self._recorded_graph()
            outputs = self._recorded.outputs
            _check_that_all_require_grad(outputs, self.outputs)
            self._compare_with_first(outputs)
            self.became_custom |= not (self.is_custom or native.runs_no_custom_code(outputs, self._input_tensors))
        return self._recorded

    def _compare_with_first(self, outputs: Sequence[Tensor]) -> None:
        """Measures the largest difference between outputs of a later call and `base`, or those of the first call.

        Nothing is measured if func changes its inputs, of which outputs may be views, or gets stand-ins for them, or if
        the first outputs were large, so that only their shapes are known. On a GPU, this waits for the device.
        """
        is_known = self._base is not None or self.m <= PIECE
        if is_known and not self.mutates_inputs and self.zero_displacement() is None:
            first = self._flat(block.tensor for block in self.outputs) if self._base is None else self._base
            change = largest_change(self._flat(output.detach() for output in outputs), first)
            self.base_change = max(self.base_change, change)

    @repeats_if_memory_lacks
    def _recorded_graph(self) -> native.Graph:
        return native.Graph(self._selected(self._evaluator.evaluate(True)), self._input_tensors)

    def forget_graph(self) -> None:
        """Forgets the last graph, so that the next one is that of a new evaluation."""
        self._recorded = None

    def graph_of_its_own(self) -> tuple[Tensor, ...]:
        """The outputs of a separate evaluation at x with its own graph, on the current stream."""
        self.forget_graph()
        graph = self.graph()
        self.forget_graph()
        return graph

    def displacement(self, direction: Tensor, eps: float) -> Tensor:
        """Steps times a direction u; each step is at least eps and large enough to change its coordinate.

        Parameters
        ----------
        direction
            float64, shape (n,).

        Returns
        -------
        Tensor
            float64, shape (n,): max(eps, r |x_j|) u_j, where r is the `relative_step` of the input's dtype and eps is
            the step of the input; eps u_j if x_j is not finite.
        """
        steps = self.coordinates().abs()
        for block in self.inputs:
            within = steps[block.slice]
            own_eps = eps * block.step
            within.mul_(relative_step(block.tensor.dtype)).nan_to_num_(own_eps, posinf=own_eps).clamp_(min=own_eps)
        return steps.mul_(direction)

    def parts_of(self, vector: Tensor) -> Iterator[tuple[Tensor, float, float]]:
        """Yields (part, step, weight): the part of a vector in R^n for the inputs with this step and weight.

        If all inputs have the same step and weight, the part is the vector itself. Parts that are zero or have a weight
        of zero are left out.
        """
        if not self.mixes_inputs:
            yield vector, *self.scales[0]
            return
        for step, weight in self.scales:
            part = torch.zeros_like(vector)
            for block in self.inputs:
                if (block.step, block.weight) == (step, weight):
                    within = block.slice
                    part[within] = vector[within]
            if weight and bool(part.any()):
                yield part, step, weight

    @repeats_if_memory_lacks
    def values_along(
        self, displacement: Tensor, scales: Sequence[float], values: Sequence[Tensor], record_graph: bool
    ) -> None:
        """Writes the outputs at x + scale displacement, for several scales, into values: float64, shape (m,) each."""
        self._recorded = None
        changed = self._evaluator.values_along(displacement, scales, values, self._specs, record_graph)
        if changed is not None:
            when = "perturbed together" if scales[changed[0]] else "evaluated again"
            raise AssertionError(changed_message(self.outputs[changed[1]], changed[2], when))

    @repeats_if_memory_lacks
    def differences_along(
        self, along: native.RandomDirections, base: Tensor, curve: float, fixed: Tensor | None
    ) -> native.Derivatives:
        """The derivatives of the outputs along random directions.

        Parameters
        ----------
        along
            The directions, and the number of evaluations for each: two or four.
        base
            The outputs at x: float64, shape (m,).
        curve
            Largest relative distance of a smooth function's one-sided derivatives from the central one.
        fixed
            True for coordinates that do not move, shape (n,).
        """
        self._recorded = None
        found = self._evaluator.differences_along(along, base, curve, fixed, self._specs, self._ulps)
        if isinstance(found, tuple):
            raise AssertionError(changed_message(self.outputs[found[1]], found[2], "perturbed together"))
        return found

    def coordinates(self) -> Tensor:
        """The real coordinates of the inputs at x: float64, shape (n,)."""
        if self._coordinates is None:
            self._coordinates = self._evaluator.coordinates().to(self.device)
        return self._coordinates

    def realized_width(self, displacement: Tensor, scale: float) -> Tensor:
        """(x + scale d) - (x - scale d) after rounding to the inputs' dtypes: float64, shape (n,)."""
        widths = torch.empty_like(displacement)
        self._evaluator.realized_widths(widths, displacement, scale)
        return widths

    @repeats_if_memory_lacks
    def evaluate(self, record_graph: bool, displacement: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """The outputs at x or, with a displacement (float64, shape (n,)), at x + scale displacement.

        Returns
        -------
        Tensor
            float64, shape (m,): a copy, so that func may reuse its buffers.
        """
        self._recorded = None
        if displacement is not None:
            # values_along copies outputs before it restores the inputs, because outputs may be views of them.
            values = torch.empty(self.m, dtype=torch.float64, device=self.device)
            self.values_along(displacement, (scale,), (values,), record_graph)
            return values
        return self._flat(self._selected(self._evaluator.evaluate(record_graph)))

    def evaluate_with(
        self, blocks: Sequence[Block], tensors: Sequence[Tensor], several: bool = False
    ) -> tuple[Tensor, ...]:
        """The outputs of func with other tensors in place of some inputs.

        several: whether the first dimension of these tensors, and of the outputs, counts points.
        """
        self._recorded = None
        others = {id(block.tensor): tensor for block, tensor in zip(blocks, tensors, strict=True)}
        arguments = tuple(others.get(id(value), value) for value in self._arguments)
        results = self._evaluator.evaluate_at(arguments)
        return tuple(results[block.position] for block in self.outputs) if several else self._selected(results)

    def base(self) -> Tensor:
        """The outputs at x: float64, shape (m,); evaluated once, or known from the first evaluation."""
        if self._base is None:
            if self.evaluations == 1 and self.zero_displacement() is None:
                self._base = self._flat(block.tensor for block in self.outputs)
            else:
                values = self.evaluate(True, self.zero_displacement())
                self._compare_with_first([values])
                self._base = values
        return self._base

    def set_base(self, base: Tensor) -> None:
        """Sets `base` to known outputs at x: float64, shape (m,)."""
        self._base = base.to(self.device)

    def zero_displacement(self) -> Tensor | None:
        """The displacement for evaluations at x: None, or zeros if func gets stand-ins for perturbed inputs.

        func may give other values for stand-ins than for the inputs themselves.
        """
        stands_in = any(memory is not None and memory.stand_in is not None for memory in self._memories.values())
        return torch.zeros(self.n, dtype=torch.float64, device="cpu") if stands_in else None

    def _flat(self, outputs: Iterable[Tensor]) -> Tensor:
        tensors = list(outputs)
        return native.flattened(tensors) if tensors else torch.empty(0, dtype=torch.float64, device=self.device)

    def _selected(self, result: Any) -> tuple[Tensor, ...]:
        """The outputs in func's result; raises if shapes, dtypes, devices or positions have changed."""
        results = as_tuple(result)
        selected = []
        for block in self.outputs:
            found = results[block.position] if block.position < len(results) else None
            expected = block.tensor
            if not isinstance(found, Tensor) or (
                (found.shape, found.dtype, found.device) != (expected.shape, expected.dtype, expected.device)
            ):
                raise AssertionError(changed_message(block, found, "evaluated again"))
            selected.append(found)
        return tuple(selected)

    def raise_changed(self, coordinate: int, output: int, found: Any, eps: float) -> None:
        block = block_with(self.inputs, coordinate)
        when = f"perturbed on index {block.index_at(coordinate)} of {self.name_of(block)} by {eps}"
        raise AssertionError(changed_message(self.outputs[output], found, when))
