"""The loop over evaluations in Python; csrc/evaluator.h documents the contracts."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fastgrad.core.memory import Result
from fastgrad.core.plain import operators as ops
from fastgrad.core.plain.operators import coordinate_count, hidden_from_autograd, real_coordinates
from fastgrad.core.torch_private import MKLDNN, bytes_needed, dual_level, is_dispatched_to_python, make_dual, tangent_of

Changed = tuple[int, int, Any]
_TURN = threading.RLock()


def _storage_bytes(tensor: Tensor) -> int | None:
    """Bytes of the tensor's storage; None if it has no storage of its own."""
    if tensor.layout != torch.strided:
        return None
    try:
        return int(tensor.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):
        return None


def _has_its_storage(tensor: Tensor) -> bool:
    held = _storage_bytes(tensor)
    return held is None or bytes_needed(tensor) <= held


def check_storage(op: str, name: str, tensor: Tensor) -> None:
    """Raises if the storage of a tensor was freed or shrunk."""
    if not _has_its_storage(tensor):
        raise RuntimeError(
            f"{op}: {name} needs {bytes_needed(tensor)} bytes of storage, which was freed or shrunk to "
            f"{_storage_bytes(tensor)}"
        )


@hidden_from_autograd
def check_memory(inputs: Sequence[Tensor]) -> None:
    for tensor in inputs:
        check_storage("func", "an input", tensor)


class InputBlock:
    @hidden_from_autograd
    def __init__(
        self,
        argument: Tensor,
        first: int,
        relative_step: float,
        stand_in: Tensor | None = None,
        values: Tensor | None = None,
        elements: Tensor | None = None,
    ) -> None:
        self.argument, self.first, self.relative_step = argument, first, relative_step
        self.stand_in, self.elements = stand_in, elements
        memory = argument if values is None else values
        check_storage("InputBlock", "values", memory)
        self.values = memory.data
        self.origin = self.values.clone(memory_format=torch.contiguous_format)
        self.size = coordinate_count(self.origin)
        self.kept = [(self.values, self.origin)]
        if stand_in is not None:
            own = argument.data
            if own.layout not in (torch.strided, MKLDNN):
                own = (own._values() if own.layout == torch.sparse_coo else own.values()).data
            check_storage("InputBlock", "argument", own)
            self.kept.append((own, own.clone()))

    def is_in_place(self) -> bool:
        """Whether perturbing `values` perturbs the argument."""
        now, then = self.argument, self.values
        if not all(_has_its_storage(memory) for memory, _ in self.kept):
            return False
        if now.layout != torch.strided or is_dispatched_to_python(now):
            return True
        fields = [(x.dtype, x.shape, x.stride(), x.storage_offset(), x.untyped_storage()._cdata) for x in (now, then)]
        return fields[0] == fields[1]

    def restore(self) -> None:
        for memory, origin in self.kept:
            if not _has_its_storage(memory):
                memory.untyped_storage().resize_(bytes_needed(memory))
            memory.copy_(origin)
        if not self.is_in_place():
            self.argument.data = self.values


@hidden_from_autograd
def check_in_place(inputs: Sequence[InputBlock]) -> None:
    for k, block in enumerate(inputs):
        if not block.is_in_place():
            raise RuntimeError(
                f"func, or its backward, freed or replaced the memory of differentiable input {k}, as `x.data = ...` "
                "and `x.untyped_storage().resize_(0)` do: fastgrad perturbs the input in that memory. Change the "
                "values in place, or change a copy of the input."
            )


class OutputSpec(NamedTuple):
    position: int
    like: Tensor


class Groups(NamedTuple):
    coordinates: Tensor
    starts: Tensor
    entries: Tensor
    entry_starts: Tensor
    positions: Tensor

    def part(self, first: int, last: int) -> Groups:
        own = slice(first, min(last, len(self.starts) - 1) + 1)
        return self._replace(starts=self.starts[own], entry_starts=self.entry_starts[own])

    def of(self, g: int) -> tuple[slice, Tensor]:
        """The slice of a group's coordinates, and the numbers of its entries."""
        (begin, end), (first, last) = self.starts[g : g + 2].tolist(), self.entry_starts[g : g + 2].tolist()
        return slice(begin, end), self.entries[first:last]


class RandomDirections(NamedTuple):
    seed: int
    streams: Sequence[int]
    points: Sequence[int]
    step: float
    relative: float
    parts: Sequence[int] = ()


@dataclass
class Derivatives:
    directions: Tensor
    derivatives: Tensor
    noise: Tensor
    sizes: None = None


def properties_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape


def visit_outputs(
    result: Any, outputs: Sequence[OutputSpec], visit: Callable[[int, Tensor, slice], None]
) -> tuple[int, Any] | None:
    """Calls visit with each expected output; returns the number and value of the first unexpected one."""
    found, offset = result if isinstance(result, tuple | list) else (result,), 0
    for o, (position, like) in enumerate(outputs):
        value = found[position] if position < len(found) else None
        if not isinstance(value, Tensor) or properties_of(value) != properties_of(like):
            return o, value
        size = coordinate_count(like)
        visit(o, value, slice(offset, offset + size))
        offset += size
    return None


def with_domain_of(tensor: Tensor, value: Tensor) -> Tensor:
    """Converts a gradient or tangent to the domain (real or complex) of its tensor."""
    if value.is_complex() == tensor.is_complex():
        return value
    return value.real if value.is_complex() else value.to(value.dtype.to_complex())


@hidden_from_autograd
def _two_points(
    curve: float, derivative: Tensor, noise: Tensor, base: Tensor, plus: Tensor, minus: Tensor, step: float, ulp: float
) -> None:
    half = 1 / (2 * step)
    derivative.copy_((plus - minus) * half)
    bend = (plus + minus - 2 * base).abs() * half
    usual = derivative.square().mean().sqrt()
    smooth = curve * (derivative.abs() + usual) + 32 * ulp / step * base.abs()
    noise.copy_(torch.maximum(noise, torch.where(bend <= smooth, 0.0, bend)))


def _into(row: Tensor) -> Callable[[int, Tensor, slice], None]:
    """A visitor that concatenates outputs into a row."""
    return lambda _, output, at: ops.flatten_(row[at], output)


class Evaluator:
    def __init__(self, func: Callable[..., Any], arguments: tuple[Any, ...], blocks: Sequence[InputBlock]) -> None:
        self._func, self._arguments, self._blocks = func, arguments, list(blocks)
        self._size = sum(block.size for block in self._blocks)
        self.evaluations = 0
        self.mutates_inputs = False
        self.modified_tangent = -1
        self.records_differences = True

    def _versions(self) -> list[int]:
        return [0 if block.argument.is_inference() else block.argument._version for block in self._blocks]

    def _call(self, record_graph: bool, arguments: tuple[Any, ...]) -> Any:
        check_in_place(self._blocks)
        versions = self._versions()
        self.evaluations += 1
        try:
            with torch.set_grad_enabled(record_graph and torch.is_grad_enabled()):
                result = self._func(*arguments)
        finally:
            self.mutates_inputs = self.mutates_inputs or self._versions() != versions
        check_in_place(self._blocks)
        return result

    def _perturbed(self, record_graph: bool) -> Any:
        """Calls func at its perturbed inputs, and returns its result."""
        arguments = list(self._arguments)
        for block in self._blocks:
            if block.stand_in is not None:
                # The elements of an MKLDNN tensor cannot be written, so a new tensor is made.
                mkldnn = block.argument.layout == MKLDNN
                stand_in = block.values.to_mkldnn().requires_grad_() if mkldnn else block.stand_in
                arguments = [stand_in if value is block.argument else value for value in arguments]
        return self._call(record_graph and self.records_differences, tuple(arguments))

    @hidden_from_autograd
    def restore(self) -> None:
        for block in self._blocks:
            block.restore()

    @contextlib.contextmanager
    def _restoring(self, restore: Callable[..., object], *args: Any) -> Iterator[None]:
        try:
            yield
        finally:
            with contextlib.suppress(Exception):  # the memory was freed or replaced: the last restore() reports it
                restore(*args)

    def _put_back(self, move: Callable[[int], None]) -> None:
        self.restore() if self.mutates_inputs or not all(block.is_in_place() for block in self._blocks) else move(0)

    def _restore_if_mutated(self) -> None:
        if self.mutates_inputs:
            self.restore()

    @hidden_from_autograd
    def inputs_changed(self) -> bool:
        check_in_place(self._blocks)
        pairs = [pair for block in self._blocks for pair in block.kept]
        strided = [[x if x.layout == torch.strided else x.to_dense() for x in pair] for pair in pairs]
        return not all(torch.equal(real_coordinates(x), real_coordinates(y)) for x, y in strided)

    @hidden_from_autograd
    def coordinates(self) -> Tensor:
        if not self._blocks:
            return torch.empty(0, dtype=torch.float64, device="cpu")
        device = self._blocks[0].origin.device
        return torch.cat([real_coordinates(block.origin).to(device, torch.float64) for block in self._blocks])

    @hidden_from_autograd
    def coordinate_widths(self, widths: Tensor, eps: Sequence[float]) -> None:
        for block, own in zip(self._blocks, eps, strict=True):
            x = real_coordinates(block.origin)
            step = ops.coordinate_step(x, own, block.relative_step)
            widths.narrow(0, block.first, block.size).copy_(ops.realized_width(x, step))

    @hidden_from_autograd
    def realized_widths(self, widths: Tensor, displacement: Tensor, scale: float) -> None:
        for block in self._blocks:
            step = scale * displacement.narrow(0, block.first, block.size).to(block.origin.device)
            width = ops.realized_width(real_coordinates(block.origin), step)
            widths.narrow(0, block.first, block.size).copy_(width)

    def evaluate(self, record_graph: bool) -> Any:
        self._restore_if_mutated()
        return self._call(record_graph, self._arguments)

    def evaluate_at(self, arguments: tuple[Any, ...]) -> Any:
        self._restore_if_mutated()
        return self._call(True, arguments)

    @hidden_from_autograd
    def realize(
        self, displacement: Tensor, realized: Tensor, seed: int, stream: int, eps: float, relative: float
    ) -> None:
        for block in self._blocks:
            step, out = (x.narrow(0, block.first, block.size) for x in (displacement, realized))
            origin = block.origin.to(displacement.device)
            ops.realize_(step, out, origin, seed, stream, block.first, eps, relative * block.relative_step)

    def values_along(
        self,
        displacement: Tensor,
        scales: Sequence[float],
        values: Sequence[Tensor],
        outputs: Sequence[OutputSpec],
        record_graph: bool,
    ) -> Changed | None:
        check_in_place(self._blocks)
        with self._restoring(self.restore):
            for s, (scale, row) in enumerate(zip(scales, values, strict=True)):
                for block in self._blocks:
                    own = displacement.narrow(0, block.first, block.size).to(block.values.device)
                    ops.displace_(block.values, block.origin, own, scale)
                result = self._perturbed(record_graph)
                if changed := visit_outputs(result, outputs, _into(row)):
                    return s, *changed
        return None

    def differences_along(
        self,
        along: RandomDirections,
        base: Tensor,
        curve: float,
        fixed: Tensor | None,
        outputs: Sequence[OutputSpec],
        ulps: Sequence[float],
    ) -> Derivatives | Changed:
        count, m = len(along.streams), sum(coordinate_count(spec.like) for spec in outputs)
        displacement = base.new_empty(self._size)
        found = Derivatives(base.new_empty(count, self._size), base.new_empty(count, m), base.new_zeros(m))
        for k, (stream, points) in enumerate(zip(along.streams, along.points, strict=True)):
            self.realize(displacement, found.directions[k], along.seed, stream, along.step, along.relative)
            still = _fixed_along(along, k, self._blocks, fixed, like=displacement)
            displacement.masked_fill_(still, 0.0)
            found.directions[k].masked_fill_(still, 0.0)
            values = [base.new_empty(m) for _ in range(points)]
            if changed := self.values_along(displacement, (1.0, -1.0, 0.5, -0.5)[:points], values, outputs, True):
                return changed
            offset = 0
            for spec, ulp in zip(outputs, ulps, strict=True):
                at = slice(offset, offset := offset + coordinate_count(spec.like))
                rows = (row[at] for row in values)
                own: Any = (found.derivatives[k, at], found.noise[at], base[at], *rows, along.step, ulp)
                if points == 4:
                    ops.richardson_(*own)
                else:
                    _two_points(curve, *own)
        return found

    def difference_columns(
        self, first: int, columns: Tensor, outputs: Sequence[OutputSpec], eps: float, record_graph: bool
    ) -> Changed | None:
        check_in_place(self._blocks)
        self._restore_if_mutated()
        minus = columns.new_empty(columns.shape[1])
        for j, column in enumerate(columns, first):
            chosen = torch.tensor([j], device="cpu")
            if changed := self._both_sides(chosen, column, minus, outputs, eps, record_graph):
                return j, *changed
            block = self._block_of(j)
            ops.central_difference_(column, minus, block.origin, j - block.first, eps, block.relative_step)
        return None

    def _both_sides(
        self, chosen: Tensor, plus: Tensor, minus: Tensor, outputs: Sequence[OutputSpec], eps: float, record_graph: bool
    ) -> tuple[int, Any] | None:
        """Writes the outputs with some coordinates moved up and down; returns the first unexpected output."""

        def move(sign: int) -> None:
            for block in self._blocks:
                within = chosen[(chosen >= block.first) & (chosen < block.first + block.size)] - block.first
                if len(within):
                    ops.perturb_coordinates_(block.values, block.origin, within, sign, eps, block.relative_step)

        with self._restoring(self._put_back, move):
            for sign, row in ((1, plus), (-1, minus)):
                self._restore_if_mutated()
                move(sign)
                if changed := visit_outputs(self._perturbed(record_graph), outputs, _into(row)):
                    return changed
        return None

    def _block_of(self, coordinate: int) -> InputBlock:
        return next(block for block in self._blocks if coordinate < block.first + block.size)

    def difference_groups(
        self,
        groups: Groups,
        values: Tensor,
        m: int,
        outputs: Sequence[OutputSpec],
        eps: float,
        record_graph: bool,
    ) -> Changed | None:
        check_in_place(self._blocks)
        self._restore_if_mutated()
        plus, minus = values.new_empty(2, m)
        for g in range(len(groups.starts) - 1):
            own, entries = groups.of(g)
            chosen = groups.coordinates[own]
            if changed := self._both_sides(chosen, plus, minus, outputs, eps, record_graph):
                return int(chosen[0]), *changed
            ops.decompress_(values, plus, minus, groups.positions, entries)
        return None

    def tangent_columns(
        self,
        first: int,
        columns: Tensor,
        outputs: Sequence[OutputSpec],
        duals: tuple[Any, ...],
        tangents: Sequence[Tensor],
    ) -> tuple[Changed | None, bool]:
        domains_match = True
        zeros = [torch.zeros_like(tangent, memory_format=torch.contiguous_format) for tangent in tangents]
        for j, column in enumerate(columns):
            block = self._block_of(first + j)
            b = self._blocks.index(block)

            def set_tangent(sign: int, b: int = b, coordinate: int = first + j - block.first) -> None:
                for tangent in tangents if self.mutates_inputs else ():
                    hidden_from_autograd(tangent.zero_)()  # func changed it together with its input
                ops.perturb_coordinate_(tangents[b], zeros[b], coordinate, sign, 1.0, 0.0)

            with self._restoring(set_tangent, 0):
                set_tangent(1)
                changed, match = _visit_tangents(self.evaluate_at(duals), outputs, column)
                domains_match = domains_match and match
                if changed:
                    return (first + j, *changed), domains_match
        return None, domains_match

    def jvps(
        self, directions: Tensor, undefined: Sequence[int], products: Tensor, outputs: Sequence[OutputSpec]
    ) -> tuple[Changed | None, bool]:
        domains_match, tangents = True, dict[int, Tensor]()
        for k, (direction, product) in enumerate(zip(directions, products, strict=True)):
            given: list[tuple[int, Tensor, Tensor]] = []
            duals = self._dual_arguments(direction, undefined[k] if undefined else -1, tangents, given)
            result = self.evaluate_at(duals)
            if self.modified_tangent < 0 and not self.mutates_inputs:
                self.modified_tangent = next((b for b, now, values in given if not are_same(now, values)), -1)
            changed, match = _visit_tangents(result, outputs, product)
            domains_match = domains_match and match
            if changed:
                return (k, *changed), domains_match
        return None, domains_match

    def _dual_arguments(
        self, direction: Tensor, undefined: int, tangents: dict[int, Tensor], given: list[tuple[int, Tensor, Tensor]]
    ) -> tuple[Any, ...]:
        """Arguments with tangents; tangents: the tensors of the last call, by input, which are reused.

        Adds to `given` the index of the input, the tangent that func gets, and a copy of it.
        """
        duals = {}
        for b, block in enumerate(self._blocks):
            dual = block.argument.detach()
            if b != undefined if undefined < len(self._blocks) else b == undefined - len(self._blocks):
                tangents[b] = reused(tangents.get(b), torch.empty_like(dual))
                ops.unflatten_(tangents[b], direction[block.first : block.first + block.size])
                dual = make_dual(dual, tangents[b])
                inside = tangent_of(dual)  # this is a copy if the input is a view
                if inside is not None:
                    given.append((b, inside, inside.clone()))
            duals[id(block.argument)] = dual
        return tuple(duals.get(id(value), value) for value in self._arguments)


def _fixed_along(
    along: RandomDirections, k: int, blocks: Sequence[InputBlock], fixed: Tensor | None, like: Tensor
) -> Tensor:
    """The coordinates that do not move along direction k: those that are fixed, and those of other parts."""
    found = torch.zeros_like(like, dtype=torch.bool) if fixed is None else fixed.clone()
    for b, block in enumerate(blocks if along.parts and along.parts[k] >= 0 else ()):
        found[block.first : block.first + block.size] |= b % (1 + max(along.parts)) != along.parts[k]
    return found


def are_same(left: Tensor, right: Tensor) -> bool:
    """Whether all values are equal; a NaN, which is the tangent of an infinite input, equals a NaN."""
    return left.shape == right.shape and torch.allclose(left, right, rtol=0.0, atol=0.0, equal_nan=True)


def reused(last: Tensor | None, new: Tensor) -> Tensor:
    """The last tensor that func or a backward got, if it has the properties of the new one; otherwise the new one."""
    same = last is not None and not last.requires_grad and (last.shape, last.dtype) == (new.shape, new.dtype)
    found = last if last is not None and same and last.stride() == new.stride() else new
    count_as_written(found)
    return found


def count_as_written(tensor: Tensor) -> None:
    """Increases the version counter as an operation in place would, because `hidden_from_autograd` operators do not."""
    if not tensor.is_inference():
        increment_version(tensor)


def _visit_tangents(result: Any, outputs: Sequence[OutputSpec], column: Tensor) -> tuple[tuple[int, Any] | None, bool]:
    domains_match = True

    def take(o: int, x: Tensor, at: slice) -> None:
        nonlocal domains_match
        tangent, like = tangent_of(x), outputs[o].like
        if tangent is None:
            column[at].zero_()
            return
        domains_match = domains_match and tangent.is_complex() == like.is_complex()
        ops.flatten_(column[at], with_domain_of(like, tangent))

    return visit_outputs(result, outputs, take), domains_match


def at_dual_level(body: Callable[[], Result]) -> Result:
    with _TURN, dual_level():
        return body()


def largest_errors(
    rows: Tensor, columns: Tensor, first_row: int, row_step: int, inputs: Sequence[tuple[int, bool, float, float]]
) -> list[tuple[float, float]] | None:
    numerical = columns.t()[first_row : first_row + max(0, len(rows) - 1) * row_step + 1 : row_step][: len(rows)]
    errors, first = [], 0
    for size, is_complex, atol, rtol in inputs:
        own = slice(first, first := first + size)
        fields = ops.compare(rows[:, own], numerical[:, own], atol, rtol, is_complex, False).tolist()
        if fields[0] or math.isnan(fields[0]):
            return None
        errors.append((fields[4], fields[5]))
    return errors


@hidden_from_autograd
def flattened(tensors: Sequence[Tensor]) -> Tensor:
    pieces = [real_coordinates(tensor).to(tensors[0].device, torch.float64) for tensor in tensors]
    # The copy makes a plain tensor of a subclass.
    return torch.empty(sum(map(len, pieces)), dtype=torch.float64, device=tensors[0].device).copy_(torch.cat(pieces))


def largest_residuals(cotangents: Tensor, derivatives: Tensor, gradients: Tensor, directions: Tensor) -> list[float]:
    values = cotangents @ derivatives.t() - gradients @ directions.t()
    found: list[float] = values.abs().amax(1).tolist() if values.numel() else [0.0] * len(cotangents)
    return found
