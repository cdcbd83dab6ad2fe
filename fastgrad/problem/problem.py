"""The function under test as a map of real coordinates: evaluate, difference, VJP; and the caller's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fastgrad.core import native, torch_private
from fastgrad.core.errors import as_raised, warn
from fastgrad.core.memory import told_as_memory_error
from fastgrad.core.phases import clock, phase
from fastgrad.core.precision import relative_step, spacing
from fastgrad.core.progress import STEP, Progress
from fastgrad.core.random import GRAPH_STREAM, uniform_like
from fastgrad.core.tensors import PIECE, pieces
from fastgrad.problem.arguments import refuse_function_class
from fastgrad.problem.coordinates import Block, block_with, blocks_of, memory_of, overlap, overlaps_itself, own_values
from fastgrad.report.data import modulus

_ALIKE = ((1.0, 1.0),)
"""The scales of inputs that all have the same."""

_SPARSE_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A tuple as it is, a list as a tuple, anything else as a tuple of one."""
    return value if isinstance(value, tuple) else tuple(value) if isinstance(value, list) else (value,)


def disabled_gradients() -> str | None:
    """What keeps func from recording gradients here, in words; None where nothing does."""
    if torch.is_grad_enabled():
        return None
    inference = torch.is_inference_mode_enabled()
    mode = "torch.inference_mode" if inference else "torch.no_grad or torch.set_grad_enabled(False)"
    return f"gradients are disabled here by {mode}"


def is_differentiable(value: Any) -> bool:
    """Whether a value is a tensor that can carry a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _differentiable_inputs(inputs: tuple[Any, ...], names: tuple[str, ...], warn_of_precision: bool) -> list[int]:
    """Positions of the inputs to check; raises or warns about those that cannot be checked well."""

    def called(i: int, otherwise: str) -> str:
        return names[i] if names else otherwise

    positions = [i for i, value in enumerate(inputs) if isinstance(value, Tensor) and value.requires_grad]
    for i, value in enumerate(inputs):
        held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        if any(isinstance(v, Tensor) and v.requires_grad for v in held):
            raise TypeError(
                f"Input {i} is a {type(value).__name__} of tensors that require grad: pass them one by one, or use "
                "fastgrad.check."
            )
    for i in positions:
        value = inputs[i]
        if warn_of_precision and value.dtype not in (torch.float64, torch.complex128):
            warn(
                f"{called(i, f'Input #{i}')} requires gradient and is not a double precision floating point or complex "
                f"tensor, but {value.dtype}: differences with a small eps drown in its rounding, and the check will "
                "likely fail."
            )
        if value.is_nested:
            raise NotImplementedError(f"fastgrad checks no nested tensors; {called(i, f'input {i}')} is one.")
        if value.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{called(i, f'The {i}th input')} was made under torch.inference_mode, and autograd records nothing "
                "that is done with it: pass a copy, input.detach().clone().requires_grad_()."
            )
        if value.is_meta:
            raise ValueError(f"{called(i, f'Input {i}')} is on the meta device: a gradient check needs values.")
        values = own_values(value)
        if values is None or (values.is_contiguous() and values.numel()):
            continue  # out of reach; or free of overlap
        if any(stride == 0 and size > 1 for size, stride in zip(values.shape, values.stride(), strict=True)):
            raise RuntimeError(
                f"{called(i, f'The {i}th input')} has a dimension with stride 0. Several of its elements share one "
                "place in memory and cannot be perturbed one by one: pass a copy, "
                "input.detach().clone().requires_grad_()."
            )
        if overlaps_itself(values):
            raise RuntimeError(
                f"{called(i, f'The {i}th input')} overlaps itself in memory (shape {tuple(values.shape)}, stride "
                f"{values.stride()}): "
                "its elements cannot be perturbed one by one; pass a copy, input.detach().clone().requires_grad_()."
            )
    if not positions:
        raise ValueError(
            "gradcheck expects at least one input tensor to require gradient, but none of the "
            f"{len(inputs)} inputs is a tensor with requires_grad=True."
        )
    for k, i in enumerate(positions):
        for j in positions[:k]:
            if inputs[i] is inputs[j]:
                continue
            values, others = own_values(inputs[i]), own_values(inputs[j])
            if values is not None and others is not None and overlap(values, others):
                raise RuntimeError(
                    f"{called(j, f'Inputs {j}')} and {called(i, f'{i}')} are different tensors that overlap in memory: "
                    "perturbing one would change the other behind autograd's back; pass the same tensor twice, or "
                    "copies."
                )
    return positions


def evaluated_apart(func: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What func returns for arguments that no problem is made of yet; strided ones that require grad are restored."""
    checked: list[Tensor] = []
    for value in arguments:
        is_checked = isinstance(value, Tensor) and value.requires_grad and not value.is_nested
        if is_checked and value.layout is torch.strided and not any(value is other for other in checked):
            checked.append(value)
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


def _check_outputs(results: tuple[Any, ...]) -> None:
    if results and not any(isinstance(value, Tensor) for value in results):
        kinds = ", ".join(type(value).__name__ for value in results)
        raise TypeError(f"func must return a Tensor or a tuple of Tensors, got {kinds}.")
    for i, value in enumerate(results):
        if isinstance(value, (list, tuple, dict)):
            raise TypeError(
                f"func must return a Tensor or a flat tuple of them; result {i} is a {type(value).__name__}."
            )
        if not isinstance(value, Tensor) or value.layout is torch.strided or not value.requires_grad:
            continue
        kind = (
            "Sparse" if value.layout in _SPARSE_LAYOUTS else "MKLDNN" if value.layout is torch_private.MKLDNN else None
        )
        if kind:
            raise ValueError(
                f"{kind} output is not supported at gradcheck yet. "
                "Return output.to_dense(masked_grad=...) from func instead."
            )


class Problem:
    """f: R^n -> R^m, seen through func, its inputs and autograd.

    A context manager: on leaving it, exceptions and Ctrl-C included, the inputs hold the bits they
    had on entering. The eps that its methods take is the check's; an input's own is `Block.step` times as large.

    Attributes
    ----------
    inputs, outputs
        The coordinates of the differentiable inputs, and of the outputs to difference: those that
        require grad or, where there is none, all that could.
    has_graph
        Whether any output requires grad.
    is_custom
        Whether a custom Function, a hook or other code of the user's is seen to run in backward.
    vectorizes
        Whether VJPs may be vectorized: where no such code is.
    n, m
        Real coordinates of inputs and outputs.
    device
        Where Jacobian blocks live: with the outputs.
    seconds
        What the first evaluation took.
    progress
        The bar that shows how far the check is.
    scales
        The different pairs of step and weight that its inputs have.
    mixes_inputs
        Whether there is more than one.
    unspecified
        The largest entry that `vjp` met at an element that a sparse input does not specify.
    evaluations, vjps, jvps
        Calls of func and of backward so far; a JVP is one of the evaluations.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        arguments: tuple[Any, ...],
        masked: bool = False,
        progress: Progress | None = None,
        names: tuple[str, ...] = (),
        scales: Sequence[tuple[float, float]] = (),
        warn_of_precision: bool = True,
    ) -> None:
        """With what messages call the arguments, if they do, and the step and weight of each checked one."""
        refuse_function_class(func)
        positions = _differentiable_inputs(arguments, names, warn_of_precision)
        memories = {position: memory_of(arguments[position], masked) for position in positions}
        self._memories = memories
        self.inputs = blocks_of(arguments, positions, once=True, memories=memories, scales=scales)
        self.scales = tuple(dict.fromkeys((block.step, block.weight) for block in self.inputs)) if scales else _ALIKE
        self.mixes_inputs = self.scales is not _ALIKE and len(self.scales) > 1
        self._names = names
        self.n = self.inputs[-1].first + self.inputs[-1].size
        self.outputs: tuple[Block, ...] = ()
        self.m = 0
        self.device = self.inputs[0].tensor.device
        self.has_graph = False
        self.is_custom = self.vectorizes = False
        self.seconds = 0.0
        self.unspecified = 0.0
        self.progress = progress or Progress(False)
        self.vjps = 0
        self.jvps = 0
        self._arguments = arguments
        self._graph: tuple[Tensor, ...] | None = None
        self._base: Tensor | None = None
        self._coordinates: Tensor | None = None
        self._input_tensors = [block.tensor for block in self.inputs]
        self._natives = []
        for block in self.inputs:
            where = block.tensor, block.first, relative_step(block.tensor.dtype)
            memory = memories[block.position]
            self._natives.append(
                native.InputBlock(*where)
                if memory is None
                else native.InputBlock(*where, memory.stand_in, memory.values, memory.elements)
            )
        self._evaluator = native.Evaluator(func, arguments, self._natives)

    def __enter__(self) -> Problem:
        """Evaluates func once, to learn its outputs."""
        try:
            self._trace()
        except BaseException:
            self._evaluator.restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
        raised = None if error is None else as_raised(error)
        if raised is not None and raised is not error:
            raise raised from raised.__cause__

    def restore(self) -> None:
        """Puts the bits that they had at first back into all inputs."""
        self._graph = None
        self._evaluator.restore()

    @property
    def mutates_inputs(self) -> bool:
        """Whether func was seen to change its inputs; they are restored around every evaluation."""
        return self._evaluator.mutates_inputs

    @property
    def evaluations(self) -> int:
        """Calls of func so far."""
        return self._evaluator.evaluations

    @phase("first evaluation")
    def _trace(self) -> None:
        start = clock(self.device)
        results = as_tuple(self._evaluator.evaluate(True))
        self.seconds = clock(next((v.device for v in results if isinstance(v, Tensor)), self.device)) - start
        if self._evaluator.inputs_changed():
            self._evaluator.mutates_inputs = True  # or they hold a NaN, and it does no harm
        _check_outputs(results)
        positions = [i for i, value in enumerate(results) if is_differentiable(value) and value.requires_grad]
        self.has_graph = bool(positions)
        if not positions:
            positions = [i for i, value in enumerate(results) if is_differentiable(value)]
        detached = {position: results[position].detach() for position in positions}
        # func may return one tensor twice, and torch counts it twice.
        self.outputs = blocks_of(detached, positions, once=False)
        if self.outputs:
            self.m = self.outputs[-1].first + self.outputs[-1].size
            self.device = self.outputs[0].tensor.device
        if self.has_graph:
            self._graph = tuple(results[position] for position in positions)
            self.is_custom = not native.runs_no_custom_code(self._graph, self._input_tensors)
            self.vectorizes = not self.is_custom
        self._specs = [native.OutputSpec(block.position, block.tensor) for block in self.outputs]

    def forget_outputs(self) -> None:
        """Frees the memory of the first evaluation's outputs, if it is much; what they look like stays known."""
        if self.m <= PIECE or any(type(block.tensor) is not Tensor for block in self.outputs):
            return
        self.outputs = tuple(
            replace(block, tensor=block.tensor.new_empty(()).expand(block.tensor.shape)) for block in self.outputs
        )
        self._specs = [native.OutputSpec(block.position, block.tensor) for block in self.outputs]

    @cached_property
    def unit_roundoff(self) -> float:
        """Half an ulp of the coarsest dtype among inputs and outputs."""
        return max(spacing(block.tensor.dtype) for block in (*self.inputs, *self.outputs)) / 2

    def name_of(self, block: Block) -> str:
        """What messages call an input."""
        return self._names[block.position] if self._names else f"input {block.position}"

    @told_as_memory_error
    def graph(self) -> tuple[Tensor, ...]:
        """The outputs of an evaluation at x, recorded by autograd; made anew after any other evaluation."""
        if self._graph is None:
            self._graph = self._selected(self._evaluator.evaluate(True))
            for block, output in zip(self.outputs, self._graph, strict=True):
                if not output.requires_grad:
                    raise AssertionError(
                        f"Expected `func` to return the same differentiable outputs on every call, but result "
                        f"{block.position} no longer requires grad."
                    )
        return self._graph

    def graph_of_its_own(self) -> tuple[Tensor, ...]:
        """The outputs of another evaluation at x, whose graph nobody else has: it runs on the current stream."""
        self._graph = None
        graph = self.graph()
        self._graph = None
        return graph

    def displacement(self, direction: Tensor, eps: float) -> Tensor:
        """Steps times a direction u: of at least eps each, and large enough to move every coordinate.

        Parameters
        ----------
        direction
            float64, shape (n,).

        Returns
        -------
        Tensor
            float64, shape (n,): max(eps, r |x_j|) u_j, r the `relative_step` of the input's dtype, eps that
            of the input; eps u_j where x_j is not finite.
        """
        steps = self.coordinates().abs()
        for block in self.inputs:
            within = steps[block.first : block.first + block.size]
            own_eps = eps * block.step
            within.mul_(relative_step(block.tensor.dtype)).nan_to_num_(own_eps, posinf=own_eps).clamp_(min=own_eps)
        return steps.mul_(direction)

    def parts_of(self, vector: Tensor) -> Iterator[tuple[Tensor, float, float]]:
        """A vector in R^n, part by part: what lies in the inputs of one step and one weight, and these two.

        The vector itself where all inputs have the same; a part that is zero, or weighs nothing, is left out.
        """
        if not self.mixes_inputs:
            yield vector, *self.scales[0]
            return
        for step, weight in self.scales:
            part = torch.zeros_like(vector)
            for block in self.inputs:
                if (block.step, block.weight) == (step, weight):
                    within = slice(block.first, block.first + block.size)
                    part[within] = vector[within]
            if weight and bool(part.any()):
                yield part, step, weight

    def realize(
        self, displacement: Tensor, realized: Tensor, seed: int, stream: int, eps: float, relative: float = 1.0
    ) -> None:
        """Of a random direction, the `displacement` and what `values_along` it, extrapolated, really measure.

        Parameters
        ----------
        displacement
            Written: float64, shape (n,).
        realized
            Written: the displacement over eps, up to rounding to the inputs' dtypes. Float64, shape (n,).
        seed, stream
            Which direction, as of `directions.direction`.
        relative
            A factor of the relative steps at large magnitudes.
        """
        self._evaluator.realize(displacement, realized, seed, stream, eps, relative)

    @told_as_memory_error
    def values_along(
        self, displacement: Tensor, scales: Sequence[float], values: Sequence[Tensor], record_graph: bool = True
    ) -> None:
        """Writes the outputs at x + scale displacement, for several scales, into values: float64, shape (m,) each."""
        self._graph = None
        changed = self._evaluator.values_along(displacement, scales, values, self._specs, record_graph)
        if changed is not None:
            when = "perturbed together" if scales[changed[0]] else "evaluated again"
            raise AssertionError(_changed(self.outputs[changed[1]], changed[2], when))

    def coordinates(self) -> Tensor:
        """The real coordinates of the inputs at x: float64, shape (n,)."""
        if self._coordinates is None:
            self._coordinates = self._evaluator.coordinates().to(self.device)
        return self._coordinates

    def realized_width(self, displacement: Tensor, scale: float) -> Tensor:
        """(x + scale d) - (x - scale d) as rounding to the inputs' dtypes leaves it: float64, shape (n,)."""
        widths = torch.empty_like(displacement)
        self._evaluator.realized_widths(widths, displacement, scale)
        return widths

    @told_as_memory_error
    def evaluate(self, record_graph: bool, displacement: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """The outputs at x or, with a displacement (float64, shape (n,)), at x + scale displacement.

        Returns
        -------
        Tensor
            float64, shape (m,): a copy, so that func may reuse its buffers.
        """
        self._graph = None
        if displacement is not None:
            # Copied before the inputs are restored: outputs may be views of them.
            values = torch.empty(self.m, dtype=torch.float64, device=self.device)
            self.values_along(displacement, (scale,), (values,), record_graph)
            return values
        return self._flat(self._selected(self._evaluator.evaluate(record_graph)))

    def evaluate_with(self, block: Block, tensor: Tensor) -> tuple[Tensor, ...]:
        """The outputs, as func makes them, where a tensor stands in the place of an input."""
        self._graph = None
        arguments = tuple(tensor if value is block.tensor else value for value in self._arguments)
        return self._selected(self._evaluator.evaluate_at(arguments))

    def base(self) -> Tensor:
        """The outputs at x: float64, shape (m,); evaluated once, or known from the first evaluation."""
        if self._base is None:
            # Where func gets stand-ins while inputs are perturbed, it may depend on what they specify.
            stands_in = any(memory is not None and memory.stand_in is not None for memory in self._memories.values())
            if stands_in:
                self._base = self.evaluate(True, torch.zeros(self.n, dtype=torch.float64, device="cpu"))
            elif self.evaluations == 1:
                self._base = self._flat(block.tensor for block in self.outputs)
            else:
                self._base = self.evaluate(True)
        return self._base

    def _flat(self, outputs: Iterable[Tensor]) -> Tensor:
        flat = torch.empty(self.m, dtype=torch.float64, device=self.device)
        for block, output in zip(self.outputs, outputs, strict=True):
            native.flatten_(flat[block.first : block.first + block.size], output.detach())
        return flat

    def _selected(self, result: Any) -> tuple[Tensor, ...]:
        """The outputs in what func returned, if they look as they did at first."""
        results = as_tuple(result)
        selected = []
        for block in self.outputs:
            found = results[block.position] if block.position < len(results) else None
            expected = block.tensor
            if not isinstance(found, Tensor) or (
                (found.shape, found.dtype, found.device) != (expected.shape, expected.dtype, expected.device)
            ):
                raise AssertionError(_changed(block, found, "evaluated again"))
            selected.append(found)
        return tuple(selected)

    @phase("numerical columns")
    def difference_columns(self, first: int, count: int, eps: float, record_graph: bool) -> Tensor:
        """Columns first, ..., first + count - 1 of the numerical Jacobian by central differences.

        Returns
        -------
        Tensor
            float64, shape (count, m): one row a column of the Jacobian. Two evaluations each.

        Raises
        ------
        AssertionError
            Where a perturbed func returns another number of outputs, other shapes or other dtypes.
        """
        self._graph = None
        columns = torch.empty(count, self.m, dtype=torch.float64, device=self.device)
        step = STEP if self.progress.is_shown else max(1, count)
        begin = 0
        while begin < count:
            # A slice of all would take as long as a small column.
            some, own_eps = columns[begin : begin + step] if begin or step < count else columns, eps
            if self.mixes_inputs:
                block = block_with(self.inputs, first + begin)
                some, own_eps = some[: block.first + block.size - first - begin], eps * block.step
            changed = self._evaluator.difference_columns(first + begin, some, self._specs, own_eps, record_graph)
            if changed is not None:
                self._raise_changed(*changed, own_eps)
            self.progress.step(2 * some.shape[0])
            begin += some.shape[0]
        return columns

    @phase("numerical columns")
    def difference_groups(
        self, groups: native.Groups, rows: Tensor, columns: Tensor, eps: float, record_graph: bool
    ) -> Tensor:
        """Entries of the numerical Jacobian, groups of columns that share no row perturbed together.

        The numbers are those of `difference_columns`; two evaluations a group, whose columns take one step.

        Parameters
        ----------
        rows, columns
            Of each entry: int64, shape (entries,).

        Returns
        -------
        Tensor
            float64, shape (entries,).
        """
        self._graph = None
        values = torch.zeros(rows.numel(), dtype=torch.float64, device=self.device)
        count = groups.starts.numel() - 1
        step = 1 if self.mixes_inputs else STEP if self.progress.is_shown else max(1, count)
        for begin in range(0, count, step):
            part = groups if step >= count else groups.part(begin, begin + step)
            own_eps = eps
            if self.mixes_inputs:
                own_eps *= block_with(self.inputs, int(groups.coordinates[int(groups.starts[begin])])).step
            changed = self._evaluator.difference_groups(part, values, self.m, self._specs, own_eps, record_graph)
            if changed is not None:
                self._raise_changed(*changed, own_eps)
            self.progress.step(2 * min(step, count - begin))
        widths = self.coordinate_widths(eps)
        for some in pieces(0, values.numel(), values.device):
            values[some].div_(widths[columns[some]])
        return values

    def coordinate_widths(self, eps: float) -> Tensor:
        """What a single coordinate's difference divides by: float64, shape (n,)."""
        widths = torch.empty(self.n, dtype=torch.float64, device=self.device)
        self._evaluator.coordinate_widths(widths, [eps * block.step for block in self.inputs])
        return widths

    @phase("analytical rows")
    def vjp_groups(
        self, output: Block, groups: native.Groups, count: int, values: Tensor, repeated: int, scale: float
    ) -> native.GradientsMatch:
        """Writes the analytical entries of an output's rows into values: float64, shape (entries,).

        `count` groups of rows that share no column have one VJP each; each of the first `repeated` is
        run again, `scale` (a power of two) times as large.
        """
        # With other outputs, what reaches backward may be a sum of grad_outputs, and not expanded in use.
        expand, graph = len(self.outputs) == 1, self.graph()[output.index]
        match = native.vjp_groups(graph, self._natives, groups, values, self.n, repeated, scale, expand)
        self.vjps += count + repeated
        self.progress.step(count + repeated)
        return match

    @phase("analytical rows")
    def analytical_rows(
        self,
        output: Block,
        imaginary: bool,
        first: int,
        count: int,
        inputs: Sequence[Block],
        repeated: int,
        scale: float,
    ) -> tuple[Tensor, Tensor, native.GradientsMatch]:
        """Rows of the analytical Jacobian of one output, by VJPs with one-hot cotangents.

        The cotangents are 1 or, for `imaginary`, 1j at elements first, ..., first + count - 1. Each of
        the first `repeated` is run again at once, `scale` (a power of two) times as large.

        Returns
        -------
        tuple
            The rows (float64, shape (count, coordinates of `inputs` end to end)), those of the second
            run divided by scale (the same, with `repeated` rows), and what the gradients looked like.
        """
        natives = self._natives
        size = self.n
        if len(inputs) < len(natives):
            natives = [natives[self.inputs.index(block)] for block in inputs]
            size = sum(block.size for block in inputs)
        rows = torch.empty(count, size, dtype=torch.float64, device=self.device)
        again = torch.empty(repeated, size, dtype=torch.float64, device=self.device)
        match = native.vjp_rows(self.graph()[output.index], natives, first, imaginary, rows, again, scale)
        self.vjps += count + repeated
        self.progress.step(count + repeated)
        return rows, again, match

    @phase("backward")
    def whole_backward(
        self,
        cotangents: Tensor,
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
        cotangents
            As of `vjp`, the first gapped and the last expanded; or none.
        repeated, scale
            As of `analytical_rows`.
        undefined
            Whether to run undefined grad_outputs, too.
        fewest_vectorized
            From so many rows of an output on, they are one vectorized VJP, where the backward can be vectorized;
            0: never. Without `repeated` only.
        atol, rtol
            Up to which the products of the cotangents are what the rows add up to; rtol of the largest sum.
        """
        whole = native.whole_backward(
            self.graph(), self._natives, cotangents, repeated, scale, undefined, fewest_vectorized, atol, rtol
        )
        self.vjps += whole.vjps
        self.progress.step(whole.vjps)
        return whole

    @told_as_memory_error
    def vjp(self, cotangents: Tensor, gapped: int = 0, expanded: int = 0, only: Block | None = None) -> Tensor:
        """V J for rows of cotangents, one VJP a row.

        Parameters
        ----------
        cotangents
            float64, shape (count, m).
        gapped
            For so many rows, from the first, backward gets grad_outputs with transposed strides and
            gaps; for the others contiguous ones.
        expanded
            For so many rows, the last, single values expanded with stride 0: the row must be constant
            over each output.
        only
            The one output that gets a grad_output, the others undefined ones.

        Returns
        -------
        Tensor
            The products: float64, shape (count, n); zero where an input does not matter.
        """
        outputs = self.graph()
        if only is not None:
            outputs = outputs[only.index : only.index + 1]
            cotangents = cotangents[:, only.first : only.first + only.size]
        products, match = native.vjp_coordinates(outputs, self._natives, cotangents, gapped, expanded)
        for entry in match.unspecified.values():
            if not modulus(entry.value) <= self.unspecified:  # a NaN is the largest
                self.unspecified = modulus(entry.value)
        self.vjps += cotangents.shape[0]
        return products

    def vjp_of_older_graph(self, cotangents: Tensor, displacement: Tensor, only: Block | None = None) -> Tensor:
        """V J as `vjp` gives it, from a graph at x that was made before func was evaluated at x + displacement."""
        graph = self.graph()
        self.evaluate(True, displacement)
        self._graph = graph
        try:
            return self.vjp(cotangents, only=only)
        finally:
            self._graph = None

    @told_as_memory_error
    def zero_gradients(self, outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Autograd's gradients of `outputs` for zero grad_outputs, one an input block, as backward made them.

        None where it made none.
        """
        self.vjps += 1
        return native.vjp_of_zeros(outputs, self._input_tensors)

    def columns_of_backward(self, groups: Iterable[Tensor]) -> Iterator[Tensor]:
        """J u by the backward alone, differentiated once more: v -> v^T J is linear, and u its grad_output.

        Parameters
        ----------
        groups
            For each u, the coordinates at which it is 1, the others being 0: int64, shape (count,).

        Returns
        -------
        Iterator
            J u, one a group: float64, shape (m,), the same memory every time. One VJP each, and one more.

        Raises
        ------
        RuntimeError
            The backward cannot be differentiated; whatever else it raises.
        """
        outputs = self.graph()
        cotangents = [
            uniform_like(block.tensor, 0, GRAPH_STREAM, block.first).requires_grad_() for block in self.outputs
        ]
        found = torch.autograd.grad(outputs, self._input_tensors, cotangents, create_graph=True, allow_unused=True)
        self.vjps += 1
        of_inputs = [(block, g) for block, g in zip(self.inputs, found, strict=True) if g is not None]
        of_inputs = [(block, gradient) for block, gradient in of_inputs if gradient.requires_grad]
        u = torch.zeros(self.n, dtype=torch.float64, device=self.device)
        product = torch.zeros(self.m, dtype=torch.float64, device=self.device)
        for group in groups:
            u.zero_()[group] = 1.0
            grad_outputs = []
            for block, gradient in of_inputs:
                grad_outputs.append(torch.empty_like(gradient, memory_format=torch.contiguous_format).detach())
                native.ops.unflatten_(grad_outputs[-1], u[block.first : block.first + block.size])
            gradients = [gradient for _, gradient in of_inputs]
            tangents = native.vjp(gradients, cotangents, grad_outputs, False)
            self.vjps += 1
            for output, tangent in zip(self.outputs, tangents, strict=True):
                within = product[output.first : output.first + output.size]
                within.zero_() if tangent is None else native.flatten_(within, tangent)
            yield product

    @phase("analytical columns")
    def tangent_columns(self, first: int, count: int) -> tuple[Tensor, bool]:
        """Columns first, ..., first + count - 1 of the Jacobian by forward-mode AD, one evaluation each.

        Returns
        -------
        tuple
            float64, shape (count, m): one row a column of the Jacobian; and whether tangents were complex
            for complex outputs and real for real ones.
        """
        self._graph = None
        self._require_forward_ad()
        columns = torch.empty(count, self.m, dtype=torch.float64, device=self.device)

        def evaluate() -> tuple[tuple[int, int, Any] | None, bool]:
            duals, tangents = self._duals([torch.zeros_like(block.tensor.detach()) for block in self.inputs])
            return self._evaluator.tangent_columns(first, columns, self._specs, duals, tangents)

        changed, domains_match = native.at_dual_level(evaluate)
        self.jvps += count
        if changed is not None:
            self._raise_changed(*changed, 0.0)
        return columns, domains_match

    @told_as_memory_error
    def jvp(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Tangents of `outputs` for tangents of `inputs`, None being undefined; one evaluation."""
        self._graph = None
        self._require_forward_ad()

        def evaluate() -> list[Tensor | None]:
            duals, _ = self._duals(tangents)
            results = self._selected(self._evaluator.evaluate_at(duals))
            self.jvps += 1
            return [torch_private.tangent_of(result) for result in results]

        return native.at_dual_level(evaluate)

    def jvp_coordinates(self, direction: Tensor) -> Tensor:
        """J u for a direction u (float64, shape (n,)) by forward-mode AD: float64, shape (m,); one evaluation."""
        tangents = []
        for block in self.inputs:
            tangents.append(torch.empty_like(block.tensor.detach()))
            native.ops.unflatten_(tangents[-1], direction[block.first : block.first + block.size])
        product = torch.zeros(self.m, dtype=torch.float64, device=self.device)
        for output, tangent in zip(self.outputs, self.jvp(tangents), strict=True):
            if tangent is not None:
                within = product[output.first : output.first + output.size]
                native.flatten_(within, tangent.to(output.tensor.dtype))
        return product

    def _require_forward_ad(self) -> None:
        for block in self.inputs:
            layout = block.tensor.layout
            if layout is torch_private.MKLDNN:
                raise ValueError("MKLDNN inputs are not support for forward AD gradcheck.")
            if layout is not torch.strided:
                raise NotImplementedError(
                    f"torch has no forward-mode AD for sparse inputs, and {self.name_of(block)} has layout {layout}: "
                    "leave check_forward_ad out."
                )

    def _duals(self, tangents: Sequence[Tensor | None]) -> tuple[tuple[Any, ...], list[Tensor]]:
        """Arguments for func, the checked ones detached and with tangents; and the tangents inside them."""
        duals: dict[int, Tensor] = {}
        inside: list[Tensor] = []
        for block, tangent in zip(self.inputs, tangents, strict=True):
            dual = block.tensor.detach()
            if tangent is not None:
                dual = torch_private.make_dual(dual, tangent)
                # Where the input is a view, make_dual may have copied the tangent.
                within = torch_private.tangent_of(dual)
                inside.append(tangent if within is None else within)
            duals[id(block.tensor)] = dual
        return tuple(duals.get(id(value), value) for value in self._arguments), inside

    def _raise_changed(self, coordinate: int, output: int, found: Any, eps: float) -> None:
        block = block_with(self.inputs, coordinate)
        index = block.index_at(coordinate)
        when = f"perturbed on index {index} of {self.name_of(block)} by {eps}"
        raise AssertionError(_changed(self.outputs[output], found, when))


def _changed(expected: Block, found: Any, when: str) -> str:
    """What to say when func returned another kind of output than at first."""
    if isinstance(found, Tensor) and found.device != expected.tensor.device:
        what, got = "on the same device", f"devices {expected.tensor.device} and {found.device}"
    elif not isinstance(found, Tensor):
        what, got = "as a tensor in the same place", f"{found!r} as result {expected.position}"
    elif found.shape != expected.tensor.shape:
        what, got = "with the same shape", f"shapes {expected.tensor.shape} and {found.shape}"
    else:
        what, got = "with the same dtype", f"dtypes {expected.tensor.dtype} and {found.dtype}"
    return f"Expected `func` to return outputs {what} when inputs are {when}, but got: {got}."
