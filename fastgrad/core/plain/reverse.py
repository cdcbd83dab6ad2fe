"""The loop over VJPs in Python; csrc/vjp.h documents the contracts."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fastgrad.core.plain import operators as ops
from fastgrad.core.plain.evaluator import (
    Groups,
    InputBlock,
    are_same,
    check_in_place,
    check_memory,
    check_storage,
    count_as_written,
    properties_of,
    reused,
    with_domain_of,
)
from fastgrad.core.plain.operators import coordinate_count, hidden_from_autograd
from fastgrad.core.torch_private import (
    drop_graph_,
    is_custom_node,
    is_dispatched_to_python,
    modes_are_active,
    nodes_behind,
    quiet_vmap,
    undefined_gradient,
)

Gradients = list[Tensor | None]


@dataclass
class UnspecifiedEntry:
    row: int
    element: int
    value: complex


@dataclass
class GradientsMatch:
    dtypes: bool = True
    sizes: bool = True
    strided: bool = True
    repeats: bool = True
    movement: float = 0.0
    unspecified: dict[int, UnspecifiedEntry] = field(default_factory=dict)

    def update_largest(self, k: int, gradient: Tensor, elements: Tensor, row: int, divisor: float) -> None:
        """Updates the largest entry, divided by a power of two, at unspecified elements of a sparse input."""
        others = gradient.div(divisor).index_fill_(0, elements, 0)
        if others.numel() == 0:
            return
        element = int(others.abs().argmax())  # argmax finds a NaN, if there is one
        value = complex(others[element])
        known = self.unspecified.get(k)
        if math.isnan(abs(value)) or abs(value) > (abs(known.value) if known else 0.0):
            self.unspecified[k] = UnspecifiedEntry(row, element, value)


@dataclass
class Rows:
    rows: Tensor
    repeated: Tensor
    match: GradientsMatch


@dataclass
class WholeBackward:
    parts: list[Rows] = field(default_factory=list)
    vectorized: bool = False
    products: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64, device="cpu"))
    movement: float = 0.0
    add_up: bool = True
    zeros: list[Gradients] = field(default_factory=list)
    are_zero: bool = True
    vjps: int = 0


def vjp(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], create_graph: bool
) -> Gradients:
    for name, tensors in (("an output", outputs), ("an input", inputs), ("a cotangent", cotangents)):
        for tensor in tensors:
            if tensor is not None:
                hidden_from_autograd(check_storage)("vjp", name, tensor)
    return list(torch.autograd.grad(outputs, inputs, cotangents, True, create_graph, allow_unused=True))


@hidden_from_autograd
def _copy(tensor: Tensor | None) -> Tensor | None:
    """A copy of a tensor, for `_is_modified`; None if it is not plain and strided."""
    is_plain = tensor is not None and tensor.layout is torch.strided and not is_dispatched_to_python(tensor)
    return tensor.clone() if tensor is not None and is_plain else None


@hidden_from_autograd
def _is_modified(tensor: Tensor | None, copy: Tensor | None) -> bool:
    return tensor is not None and copy is not None and not are_same(tensor, copy)


class Graph:
    """The graph behind some outputs, for VJPs by the autograd engine."""

    bypasses_engine = False

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self.outputs, self.inputs = list(outputs), list(inputs)
        self.modified_output = self.modified_cotangent = -1

    def vjp(self, cotangents: Sequence[Tensor | None]) -> Gradients:
        return self.vjps_of(range(len(self.outputs)), cotangents)

    def vjp_of_one(self, output: int, cotangent: Tensor) -> Gradients:
        return self.vjps_of([output], [cotangent])

    def vjps_of(self, which: Sequence[int], cotangents: Sequence[Tensor | None]) -> Gradients:
        outputs = [self.outputs[o] for o in which]
        before = [(_copy(output), _copy(cotangent)) for output, cotangent in zip(outputs, cotangents, strict=True)]
        gradients = vjp(outputs, self.inputs, cotangents, False)
        for number, output, cotangent, (own, given) in zip(which, outputs, cotangents, before, strict=True):
            if _is_modified(output, own):
                self.modified_output = number
            if _is_modified(cotangent, given):
                self.modified_cotangent = number
        return gradients

    def vjp_of_zeros(self) -> Gradients:
        return self._of_zeros(self.outputs)

    def vjp_of_undefined(self, one: int | None) -> Gradients:
        behind = [undefined_gradient(output) if one in (None, o) else output for o, output in enumerate(self.outputs)]
        return self._of_zeros(behind)

    def _of_zeros(self, outputs: Sequence[Tensor]) -> Gradients:
        zeros = [
            hidden_from_autograd(torch.zeros_like)(output, memory_format=torch.contiguous_format) for output in outputs
        ]
        return vjp(outputs, self.inputs, zeros, False)


class KeptHistory:
    """Makes a tensor that did not require grad a leaf again; csrc/kept_history.h restores all nodes."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._requires_grad = tensor, tensor.requires_grad

    def restore(self) -> None:
        if not self._requires_grad:
            drop_graph_(self._tensor)


class KeptTensor:
    """Keeps no tensor; in plain Python, `SavedState` keeps all of them itself."""

    @staticmethod
    def keep(_: object) -> None:
        return None


class SmallProblem:
    """Sets up no problem in one call; in plain Python, `Problem` sets up all of them."""

    @staticmethod
    def trace(*_: object) -> None:
        return None


def _largest_change(left: Gradients, right: Gradients) -> float:
    changes = [0.0]
    for a, b in zip(left, right, strict=True):
        if a is None or b is None or a.shape != b.shape:
            changes.append(0.0 if a is b else torch.inf)
        elif a.layout is b.layout is torch.strided and a.numel():
            equal = (a == b) | (a.isnan() & b.isnan())
            changes.append(float((a - b).abs().masked_fill(equal, 0.0).nan_to_num(torch.inf).max()))
    return max(changes)


class UnrecordedBackward:
    """The gradients of func as a function of inputs and grad_outputs; csrc/unrecorded_backward.h has the contract."""

    def __init__(
        self,
        func: Callable[..., Any],
        refuse: Callable[[int, int], None],
        count: int,
        inputs: Sequence[int],
        grad_outputs: Sequence[int],
        record: bool,
    ) -> None:
        self._func, self._reject, self._count, self._record = func, refuse, count, record
        self._inputs, self._grad_outputs = inputs, grad_outputs
        self._kept: tuple[Graph, list[Tensor]] | None = None
        self._reuses: bool | None = None
        self.movement = 0.0

    @property
    def keeps_graph(self) -> bool:
        return self._kept is not None

    def forget(self) -> None:
        self._kept = None

    def stop_reusing(self) -> None:
        self._kept, self._reuses = None, False

    def call(self, arguments: tuple[Any, ...]) -> Gradients:
        given, grad_outputs = arguments[: self._count], arguments[self._count :]
        checked = [given[i] for i in self._inputs]
        for value in (*checked, *(grad_outputs[i] for i in self._grad_outputs)):
            if not value.requires_grad:  # a needless call would be visible to a TorchFunctionMode
                value.requires_grad_()
        with torch.set_grad_enabled(self._record):
            if self._kept is None or not self._is_kept_at(checked, *self._kept):
                self._kept = None
                first = self._forward(given, grad_outputs, checked)
                gradients = first[0].vjp(grad_outputs)
                self._kept = None if self._reuses is False else first
                return gradients
            if self._reuses:
                return self._kept[0].vjp(grad_outputs)
            versions = [value._version for value in grad_outputs]
            gradients = self._forward(given, grad_outputs, checked)[0].vjp(grad_outputs)
            if versions != [value._version for value in grad_outputs]:
                self.stop_reusing()  # a backward that has written into its grad_outputs cannot run on them again
                return gradients
            again = self._kept[0].vjp(grad_outputs)
            self._reuses = all(map(self._is_same, gradients, again))
            if not self._reuses:
                self.movement = _largest_change(again, self._kept[0].vjp(grad_outputs))
                self.stop_reusing()
        return gradients

    @staticmethod
    def _is_same(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        return a.layout is b.layout is torch.strided and torch.equal(a, b)

    @staticmethod
    def _is_kept_at(inputs: Sequence[Tensor], graph: Graph, values: Sequence[Tensor]) -> bool:
        return all(
            new is old and value.layout is torch.strided and torch.equal(new, value)
            for new, old, value in zip(inputs, graph.inputs, values, strict=True)
        )

    def _forward(
        self, given: tuple[Any, ...], grad_outputs: tuple[Any, ...], inputs: list[Tensor]
    ) -> tuple[Graph, list[Tensor]]:
        result = self._func(*given)
        found = result if isinstance(result, tuple | list) else (result,)
        outputs = [value for value in found if isinstance(value, Tensor) and value.requires_grad]
        check_memory(inputs)
        if not outputs or len(outputs) != len(grad_outputs):
            self._reject(len(outputs), len(grad_outputs))
        return Graph(outputs, inputs), [value.detach().clone() for value in inputs]


def is_plain_zero(gradient: Tensor, input: Tensor) -> bool:
    usual = gradient.layout == torch.strided and gradient.dtype == torch.float64 and gradient.device.type == "cpu"
    if not usual or gradient.numel() > 1024 or is_dispatched_to_python(gradient) or gradient.is_neg():
        return False
    alike = properties_of(gradient) == properties_of(input) and gradient.is_contiguous()
    return alike and not hidden_from_autograd(torch.count_nonzero)(gradient).item()


@hidden_from_autograd
def _flatten_gradients(
    gradients: Gradients,
    inputs: Sequence[InputBlock],
    target: Tensor,
    k: int,
    match: GradientsMatch,
    scale: float = 1.0,
) -> None:
    """Writes the concatenated gradients, divided by a power of two, into row k of the target."""
    check_in_place(inputs)  # a backward can also change inputs
    end = 0
    for i, (gradient, block) in enumerate(zip(gradients, inputs, strict=True)):
        segment = target[k, end : (end := end + block.size)]
        if gradient is not None:
            match.sizes = match.sizes and gradient.shape == block.argument.shape
            match.dtypes = match.dtypes and gradient.dtype == block.argument.dtype
            match.strided = match.strided and gradient.layout == torch.strided
        if gradient is None or gradient.shape != block.argument.shape:
            segment.zero_()
            continue
        gradient = gradient if gradient.layout == torch.strided else gradient.to_dense()
        gradient = with_domain_of(block.origin, gradient)
        if block.elements is not None:
            gradient = gradient.reshape(-1)
            match.update_largest(i, gradient, block.elements, k, scale)
            gradient = gradient.index_select(0, block.elements)
        ops.flatten_(segment, gradient)
        segment.div_(scale)


@hidden_from_autograd
def _grad_output(output: Tensor, coordinates: Tensor, layout: int, last: Tensor | None) -> Tensor:
    """The grad_output of an output with the given coordinates, in a `native.Layout`.

    last: the last contiguous grad_output. It is reused, as in torch's checker, because a backward may cache gradients
    by the identity or address of grad_output.
    """
    if layout == 3 and coordinates.numel():
        value = torch.empty((), dtype=output.dtype, device=output.device)
        ops.unflatten_(value, coordinates[: 2 if output.is_complex() else 1])
        return value.expand(output.shape)
    made = torch.empty_like(output, memory_format=torch.contiguous_format)
    if layout == 0:
        made = reused(last, made)
    if layout in (1, 2) and output.numel():
        nan = output.detach().new_full((), math.nan)
        if layout == 1:
            made = nan.repeat(*reversed(output.shape), 2)[..., 0].permute(tuple(reversed(range(output.dim()))))
        else:
            offset = 1 if output.grad_fn is not None and is_custom_node(output.grad_fn) else 2
            made = nan.repeat(output.numel() + offset)[offset:].view(output.shape)
    ops.unflatten_(made, coordinates)
    return made


def _vjp_of_row(graph: Graph, row: Tensor, layout: int, only: int, last: dict[int, Tensor]) -> Gradients:
    """The VJP of a row of cotangents; last: the last contiguous grad_output of each output, by the output's number."""
    chosen, grad_outputs, offset = [], [], 0
    for o, output in enumerate(graph.outputs):
        own = row[offset : (offset := offset + coordinate_count(output))]
        if only in (-1, o):
            chosen.append(o)
            grad_outputs.append(_grad_output(output, own, layout, last.get(o)))
            if layout == 0:
                last[o] = grad_outputs[-1]
    return graph.vjps_of(chosen, grad_outputs)


def vjp_coordinates(
    graph: Graph,
    inputs: Sequence[InputBlock],
    cotangents: Tensor,
    layouts: Sequence[int] = (),
    only: Sequence[int] = (),
) -> tuple[Tensor, GradientsMatch]:
    match, last = GradientsMatch(), dict[int, Tensor]()
    products = cotangents.new_empty(len(cotangents), sum(block.size for block in inputs))
    for k, row in enumerate(cotangents):
        found = _vjp_of_row(graph, row, layouts[k] if layouts else 0, only[k] if only else -1, last)
        _flatten_gradients(found, inputs, products, k, match)
    return products, match


def first_other_vjp(
    graph: Graph,
    inputs: Sequence[InputBlock],
    cotangents: Tensor,
    only: Sequence[int],
    order: Sequence[int],
    known: Tensor,
) -> tuple[int, Tensor | None, GradientsMatch]:
    match, last, gradient = GradientsMatch(), dict[int, Tensor](), torch.empty_like(known[:1])
    for run, k in enumerate(order, 1):
        found = _vjp_of_row(graph, cotangents[k], 0, only[k] if only else -1, last)
        _flatten_gradients(found, inputs, gradient, 0, match)
        if not torch.equal(gradient[0], known[k]):
            return run, gradient, match
    return len(order), None, match


def _is_repeated(gradient: Tensor, again: Tensor, rerun: Callable[[float], None], scale: float) -> bool:
    """Whether a multiple of grad_output gave the same gradient; if that overflowed, a smaller multiple is tested."""
    if torch.equal(gradient, again):
        return True
    if again.isfinite().all() or not gradient.isfinite().all():
        return False
    rerun(scale)
    if again.isfinite().all():
        again.fill_(torch.nan)
        return False
    rerun(1 / scale)
    return torch.equal(gradient, again)


def vjp_rows(
    graph: Graph,
    which: int,
    inputs: Sequence[InputBlock],
    first: int,
    imaginary: bool,
    rows: Tensor,
    repeated: Tensor,
    repeat_scale: float,
) -> GradientsMatch:
    match, output = GradientsMatch(), graph.outputs[which]
    cotangent = hidden_from_autograd(torch.empty_like)(output, memory_format=torch.contiguous_format)

    def run(i: int, scale: float, into: Tensor) -> None:
        with_one = rows.new_zeros(coordinate_count(output))
        with_one[(first + i) * (2 if output.is_complex() else 1) + imaginary] = scale
        count_as_written(cotangent)
        ops.unflatten_(cotangent, with_one)
        _flatten_gradients(graph.vjp_of_one(which, cotangent), inputs, into, i, match, scale)

    for i in range(len(rows)):
        run(i, 1.0, rows)
        if i < len(repeated):
            run(i, repeat_scale, repeated)
    for i, (row, again) in enumerate(zip(rows, repeated, strict=False)):
        match.repeats &= _is_repeated(row, again, partial(run, i, into=repeated), repeat_scale)
    return match


def vjp_groups(
    graph: Graph,
    which: int,
    inputs: Sequence[InputBlock],
    groups: Groups,
    values: Tensor,
    n: int,
    repeated: int,
    repeat_scale: float,
    expand: bool,
) -> GradientsMatch:
    match, output = GradientsMatch(), graph.outputs[which]
    gradient, again = values.new_empty(1, n), values.new_empty(1, n)
    coordinates = groups.coordinates.to(values.device)

    def run(chosen: Tensor, scale: float, into: Tensor) -> None:
        cotangent = values.new_zeros(coordinate_count(output)).index_fill_(0, chosen, scale)
        is_constant = not output.is_complex() and len(chosen) == output.numel()
        layout = 3 if expand and scale != 1.0 and is_constant else 0
        found = graph.vjp_of_one(which, _grad_output(output, cotangent, layout, None))
        _flatten_gradients(found, inputs, into, 0, match, scale)

    for g in range(len(groups.starts) - 1):
        own, entries = groups.of(g)
        chosen = coordinates[own]
        run(chosen, 1.0, gradient)
        ops.decompress_(values, gradient[0], None, groups.positions, entries)
        if g < repeated:
            run(chosen, repeat_scale, again)
            rerun = partial(run, chosen, into=again)
            if not _is_repeated(gradient, again, rerun, repeat_scale):
                match.repeats = False
                match.movement = max(match.movement, _largest_difference(gradient, again))
    return match


def _largest_difference(left: Tensor, right: Tensor) -> float:
    if torch.equal(left, right):
        return 0.0
    largest = float((left - right).abs().max())
    return math.inf if math.isnan(largest) else largest


def runs_no_custom_code(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """As the compiled function, except that Python does not see hooks of inner nodes and of saved tensors."""
    tensors = (*outputs, *inputs)
    if modes_are_active() or any(is_dispatched_to_python(x) or x._backward_hooks for x in tensors):
        return False
    return all(number < 1000 and not is_custom_node(node) for number, node in enumerate(nodes_behind(outputs)))


def count_nodes(outputs: Sequence[Tensor], most: int) -> tuple[int, int]:
    found = [is_custom_node(node) for _, node in zip(range(most), nodes_behind(outputs), strict=False)]
    return len(found), sum(found)


def running_call(thread: int, package: str, excluded: Sequence[str]) -> FrameType | None:
    """The frame of the outermost function that a thread runs above all files in `package`; None if it runs none.

    Also None if the file of one of these functions ends with one of `excluded`. The compiled module does the same
    without giving up the interpreter. Here, the thread may change its frames while they are read.
    """
    frame, found = sys._current_frames().get(thread), None
    while frame is not None and not frame.f_code.co_filename.startswith(package):
        if frame.f_code.co_filename.endswith(tuple(excluded)):
            return None
        frame, found = frame.f_back, frame
    return found


def backward_streams(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[int]:
    """The value -1 (unknown) if a tensor is not on the CPU: Python cannot see the streams of nodes."""
    return [-1] if any(tensor.device.type != "cpu" for tensor in (*outputs, *inputs)) else []


def _take_zeros(whole: WholeBackward, graph: Graph, inputs: Sequence[InputBlock], undefined: bool) -> None:
    count = len(graph.outputs)
    only = [None, *(range(count) if count > 1 else ())] if undefined else []
    trials: list[Callable[[], Gradients]] = [graph.vjp_of_zeros, *(partial(graph.vjp_of_undefined, o) for o in only)]
    for trial in trials:
        found = trial()
        check_in_place(inputs)
        whole.vjps += 1
        for k, (gradient, block) in enumerate(zip(found, inputs, strict=True)):
            if gradient is not None and not is_plain_zero(gradient, block.argument):
                whole.are_zero = False
                found[k] = gradient.clone()  # compared later, when backward may have overwritten the original
        whole.zeros.append(found)


def whole_backward(
    graph: Graph,
    inputs: Sequence[InputBlock],
    cotangents: Tensor,
    layouts: Sequence[int],
    repeated: int,
    repeat_scale: float,
    undefined: bool,
    fewest_vectorized: int,
    atol: float,
    rtol: float,
) -> WholeBackward:
    whole, n, outputs = WholeBackward(), sum(block.size for block in inputs), graph.outputs
    takes = [(o, output.is_complex()) for o, output in enumerate(outputs)]
    takes += [(o, False) for o, output in enumerate(outputs) if output.is_complex()]
    if len(cotangents):
        whole.products = vjp_coordinates(graph, inputs, cotangents, layouts)[0]
        whole.vjps += len(cotangents)
    sizes = [coordinate_count(output) for output in outputs]
    jacobian = cotangents.new_empty(sum(sizes), n)
    of_outputs = torch.split(jacobian, sizes)
    for o, imaginary in takes:
        count = outputs[o].numel()
        twice = min(count, repeated)
        rows = of_outputs[o][int(imaginary) :: 2 if outputs[o].is_complex() else 1]
        again = cotangents.new_empty(twice, n)
        match = vjp_rows(graph, o, inputs, 0, imaginary, rows, again, repeat_scale)
        whole.parts.append(Rows(rows, again, match))
        whole.vjps += count + twice
    _take_zeros(whole, graph, inputs, undefined)
    if len(cotangents) == 0:
        return whole
    if any(len(part.repeated) < len(part.rows) for part in whole.parts):
        second = vjp_coordinates(graph, inputs, cotangents[:1], layouts[:1])[0]
        whole.vjps += 1
        whole.movement = _largest_difference(second, whole.products[:1])
    sums = cotangents @ jacobian
    if sums.numel():
        tolerance = (sums.abs().max() * rtol).clamp_max(atol)
        whole.add_up = bool((whole.products - sums).abs().max() <= tolerance)
    return whole


def vectorized_vjp(graph: Graph, output: int, cotangents: Tensor) -> Gradients:
    with quiet_vmap():
        found = torch.autograd.grad(
            graph.outputs[output],
            graph.inputs,
            cotangents,
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=True,
        )
    return list(found)


def are_close(batched: Sequence[Tensor | None], single: Sequence[Sequence[Tensor | None]]) -> bool:
    def close(left: Tensor | None, right: Tensor | None) -> bool:
        if left is None or right is None:
            return left is right
        return (
            left.layout is right.layout is torch.strided and left.dtype is right.dtype and torch.allclose(left, right)
        )

    return all(
        close(None if rows is None else rows[k], gradient)
        for k, gradients in enumerate(single)
        for rows, gradient in zip(batched, gradients, strict=True)
    )
