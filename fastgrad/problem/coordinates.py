"""Tensor layouts and the real coordinates of f: R^n -> R^m.

A real element is one coordinate, and a complex element is two, (re, im), in C order of the logical indices. The tensors
of one side are concatenated. Under masked semantics, only the specified elements of a sparse tensor are coordinates, in
the order of its values; otherwise all elements are coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgrad.core import torch_private
from fastgrad.core.tensors import element_index
from fastgrad.report.failure import Part


@dataclass(frozen=True, eq=False)
class Block:
    """The coordinates of one differentiable tensor.

    index is the tensor's number among the differentiable inputs, or among the differentiable outputs
    (an input that is passed twice has the index of its first occurrence). position is its position
    among func's arguments or results. Its coordinates are first, ..., first + size - 1. If only some
    elements have coordinates, elements holds their flat (C order) numbers: int64, shape (elements,).
    For an input, step is its step relative to the check's eps, and weight is the factor of its errors
    in sums over inputs whose tolerances differ.
    """

    index: int
    position: int
    tensor: Tensor
    first: int
    size: int
    elements: Tensor | None = None
    step: float = 1.0
    weight: float = 1.0

    @property
    def is_complex(self) -> bool:
        """Whether an element has two coordinates."""
        return self.tensor.is_complex()

    @property
    def width(self) -> int:
        """Number of real coordinates of an element."""
        return 2 if self.is_complex else 1

    @property
    def end(self) -> int:
        """The coordinate after the last one."""
        return self.first + self.size

    @property
    def slice(self) -> slice:
        """The slice of its coordinates among those of all blocks."""
        return slice(self.first, self.first + self.size)

    def element_index(self, element: int) -> tuple[int, ...]:
        """The multi-index of an element, given its number among those that have coordinates."""
        number = element if self.elements is None else int(self.elements[element])
        return element_index(number, self.tensor.shape)

    def index_at(self, coordinate: int) -> tuple[int, ...]:
        """The multi-index of the element to which a coordinate of the block, in [first, end), belongs."""
        return self.element_index((coordinate - self.first) // self.width)

    def part_at(self, coordinate: int) -> Part:
        """The part of its element that a coordinate of the block is."""
        return "all" if not self.is_complex else "imaginary" if (coordinate - self.first) % 2 else "real"


def per_coordinate(blocks: Sequence[Block], value: Callable[[Block], float], device: torch.device) -> Tensor:
    """The value of each coordinate's block: float64, shape (coordinates,)."""
    sizes = torch.tensor([block.size for block in blocks], device="cpu")
    values = torch.tensor([value(block) for block in blocks], dtype=torch.float64, device="cpu")
    return values.repeat_interleave(sizes).to(device)


def block_with(blocks: Sequence[Block], coordinate: int) -> Block:
    """The block that contains a coordinate."""
    return next(block for block in blocks if coordinate < block.end)


def restricted(vector: Tensor, block: Block) -> Tensor:
    """A copy of a vector of all coordinates, or of several vectors, that is zero outside a block."""
    part = torch.zeros_like(vector)
    part[..., block.slice] = vector[..., block.slice]
    return part


class Memory(NamedTuple):
    """The memory in which the coordinates of a non-strided input can be perturbed.

    Attributes
    ----------
    stand_in
        The tensor that func gets instead of the input while inputs are perturbed; None: the input itself. For an MKLDNN
        input, whose elements cannot be written, only the dtype and layout of this tensor matter.
    values
        A strided tensor. Perturbing it perturbs the stand-in, and its C order is the order of the coordinates.
    elements
        As in Block.
    """

    stand_in: Tensor | None
    values: Tensor
    elements: Tensor | None = None


def own_values(tensor: Tensor) -> Tensor | None:
    """The strided memory of a tensor: the tensor itself, or its values; None if it is not accessible (MKLDNN)."""
    if tensor.layout is torch.strided:
        return tensor
    if tensor.layout is torch_private.MKLDNN:
        return None
    return tensor.detach()._values() if tensor.layout is torch.sparse_coo else tensor.detach().values()


def memory_of(tensor: Tensor, masked: bool) -> Memory | None:
    """The memory in which the coordinates of a non-strided tensor can be perturbed; None for a strided one."""
    if tensor.layout is torch.strided:
        return None
    plain = tensor.detach()
    if tensor.layout is torch_private.MKLDNN:
        return Memory(plain, plain.to_dense())
    values = own_values(plain)
    if masked and values is not None:
        return Memory(None, values, _specified_elements(plain, values))
    # The result is copied, because to_dense() may return a view.
    dense = plain.to_dense().contiguous().clone()
    stand_in, values = _densified_coo(plain, dense) if plain.layout is torch.sparse_coo else _densified(plain, dense)
    return Memory(stand_in.requires_grad_(), values)


def _specified_elements(tensor: Tensor, values: Tensor) -> Tensor:
    """The flat element number of each value of a sparse tensor: shape (values.numel(),)."""
    if tensor.layout is torch.sparse_coo:
        shape, block = tensor.shape[: tensor.sparse_dim()], math.prod(values.shape[1:])
        sparse = torch.zeros(values.shape[0], dtype=torch.int64, device=values.device)
        for size, index in zip(shape, tensor._indices(), strict=True):
            sparse = sparse * size + index
        return (sparse.unsqueeze(-1) * block + torch.arange(block, device=values.device)).reshape(-1)
    count = values.numel()
    numbers = torch.arange(1, count + 1, device=values.device).reshape(values.shape)
    compressed, plain, _ = _compression(tensor)
    where = _compressed_like(tensor, compressed, plain, numbers).to_dense().reshape(-1)
    specified = where.nonzero().reshape(-1)
    elements = torch.empty(count, dtype=torch.int64, device=values.device)
    elements[where[specified] - 1] = specified
    return elements


def _compression(tensor: Tensor) -> tuple[Tensor, Tensor, bool]:
    """The compressed and the plain indices of a compressed sparse tensor, and whether rows are compressed."""
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), True
    return tensor.ccol_indices(), tensor.row_indices(), False


def _compressed_like(tensor: Tensor, compressed: Tensor, plain: Tensor, values: Tensor) -> Tensor:
    """A tensor with the layout and shape of a compressed sparse tensor, but with these indices and values."""
    return torch.sparse_compressed_tensor(
        compressed, plain, values, tensor.shape, layout=tensor.layout, device=values.device, check_invariants=False
    )


def _densified_coo(tensor: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    """A COO tensor like `tensor` with all elements specified, over the memory of `dense`; and that memory."""
    sparse = tensor.shape[: tensor.sparse_dim()]
    indices = torch.ones(sparse, device=tensor.device).nonzero().t()
    values = dense.reshape(indices.shape[1], *tensor.shape[tensor.sparse_dim() :])
    return torch.sparse_coo_tensor(
        indices, values, tensor.shape, device=values.device, is_coalesced=True, check_invariants=False
    ), dense


def _densified(tensor: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    """A compressed tensor like `tensor` with all elements specified; and its values, as a view in logical order."""
    compressed, _, by_rows = _compression(tensor)
    batch = compressed.dim() - 1
    blocked = tensor.layout in (torch.sparse_bsr, torch.sparse_bsc)
    height, width = tensor.values().shape[batch + 1 : batch + 3] if blocked else (1, 1)
    rows, columns = tensor.shape[batch] // height, tensor.shape[batch + 1] // width
    lead, rest = tensor.shape[:batch], tensor.shape[batch + 2 :]
    # The dimensions (row, row in block, column, column in block) are permuted to the order of the layout, and back.
    order = (0, 2, 1, 3) if by_rows else (2, 0, 1, 3)
    dims = [*range(batch), *(batch + dim for dim in order), *range(batch + 4, batch + 4 + len(rest))]
    memory = dense.reshape(*lead, rows, height, columns, width, *rest).permute(dims).contiguous()
    logical = memory.permute([dims.index(dim) for dim in range(len(dims))])
    values = memory.reshape(*lead, rows * columns, *((height, width) if blocked else ()), *rest)
    outer, inner = (rows, columns) if by_rows else (columns, rows)
    ends = torch.arange(outer + 1, device=compressed.device) * inner
    inside = torch.arange(inner, device=compressed.device).repeat(outer)
    ends, inside = (numbers.to(compressed.dtype).expand(*lead, -1) for numbers in (ends, inside))
    return _compressed_like(tensor, ends, inside, values), logical


def blocks_of(
    tensors: Sequence[Any] | Mapping[int, Any],
    selected: Sequence[int],
    once: bool,
    memories: Mapping[int, Memory | None] | None = None,
    scales: Sequence[tuple[float, float]] = (),
) -> tuple[Block, ...]:
    """The blocks of the tensors at the selected positions; with `once`, a tensor that occurs again adds no block.

    memories: those of non-strided tensors, by position. scales: step and weight of each tensor; empty: all are 1.
    """
    blocks: list[Block] = []
    seen: set[int] = set()
    first = 0
    for index, position in enumerate(selected):
        tensor = tensors[position]
        if once and id(tensor) in seen:
            continue
        seen.add(id(tensor))
        memory = memories.get(position) if memories else None
        elements = None if memory is None else memory.elements
        size = (tensor.numel() if elements is None else elements.numel()) * (2 if tensor.is_complex() else 1)
        blocks.append(Block(index, position, tensor, first, size, elements, *(scales[index] if scales else ())))
        first += size
    return tuple(blocks)


def _addresses(tensor: Tensor, base: int) -> Tensor:
    """Byte addresses of the elements of a strided tensor, relative to base, shape (numel,)."""
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    return offsets.reshape(-1) * tensor.element_size() + (tensor.data_ptr() - base)


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a strided tensor share memory."""
    if tensor.is_contiguous() or tensor.numel() < 2 or not torch_private.may_overlap_itself(tensor):
        return False
    addresses = _addresses(tensor, tensor.data_ptr()).sort().values
    return bool((addresses[1:] == addresses[:-1]).any())


def overlap(left: Tensor, right: Tensor) -> bool:
    """Whether two strided tensors share memory; this is exact, also for interleaved views of one storage."""
    if left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr() or not (left.numel() and right.numel()):
        return False
    spans = []
    for tensor in (left, right):
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()))
    (begin, end), (other_begin, other_end) = spans
    if end <= other_begin or other_end <= begin:
        return False
    base = min(begin, other_begin)
    unit = min(left.element_size(), right.element_size())
    touched = []
    for tensor in (left, right):
        words = torch.arange(tensor.element_size() // unit, device="cpu") * unit
        touched.append((_addresses(tensor, base).unsqueeze(-1) + words).reshape(-1))
    return bool(torch.isin(touched[0], touched[1]).any())
