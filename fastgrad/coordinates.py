"""Tensor layouts and the real coordinates of f: R^n -> R^m.

A real element is one coordinate, a complex element two, (re, im), in C order of the logical
indices; the tensors of one side are laid end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastgrad import _torch


@dataclass(frozen=True)
class Block:
    """The coordinates of one differentiable tensor.

    index counts the differentiable tensors of its side (an input given twice has the index of its
    first place); position is its place among func's arguments or results; coordinates run from
    first to first + size.
    """

    index: int
    position: int
    tensor: Tensor
    first: int
    size: int

    @property
    def is_complex(self) -> bool:
        """Whether an element is two coordinates."""
        return self.tensor.is_complex()

    def element_index(self, element: int) -> tuple[int, ...]:
        """The multi-index of the element with a flat (C order) number."""
        index = []
        for size in reversed(self.tensor.shape):
            index.append(element % size)
            element //= size
        return tuple(reversed(index))


def blocks_of(tensors: Sequence[Any] | Mapping[int, Any], selected: Sequence[int], once: bool) -> tuple[Block, ...]:
    """The blocks of the tensors at the selected positions; with `once`, the same tensor again adds none."""
    blocks: list[Block] = []
    seen: set[int] = set()
    first = 0
    for index, position in enumerate(selected):
        tensor = tensors[position]
        if once and id(tensor) in seen:
            continue
        seen.add(id(tensor))
        size = tensor.numel() * (2 if tensor.is_complex() else 1)
        blocks.append(Block(index, position, tensor, first, size))
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
    if tensor.is_contiguous() or tensor.numel() < 2 or not _torch.may_overlap_itself(tensor):
        return False
    addresses = _addresses(tensor, tensor.data_ptr()).sort().values
    return bool((addresses[1:] == addresses[:-1]).any())


def overlap(left: Tensor, right: Tensor) -> bool:
    """Whether two strided tensors share memory: exact also for interleaved views of one storage."""
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
