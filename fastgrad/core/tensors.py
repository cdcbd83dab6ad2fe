"""Small helpers for tensors: pieces of long ones, numbers of elements, largest differences."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fastgrad.core.native import ops

Number = TypeVar("Number", int, Tensor)

PIECE = 1 << 15
"""Number of coordinates per slice, small enough that temporaries stay in the cache."""


def pieces(count: int, device: torch.device) -> Iterator[slice]:
    """Yields consecutive slices that cover [0, count): at most PIECE long on the CPU, a single one on other devices."""
    size = PIECE if device.type == "cpu" else max(1, count)
    for begin in range(0, count, size):
        yield slice(begin, min(begin + size, count))


def element_number(index: Sequence[int], shape: Sequence[int]) -> int:
    """The number, in C order, of the element at an index."""
    number = 0
    for place, size in zip(index, shape, strict=True):
        number = number * size + place
    return number


def element_index(number: Number, shape: Sequence[int]) -> tuple[Number, ...]:
    """The index of an element from its number, or of each element from a tensor of numbers; inverts `element_number`.

    For tensors, torch.unravel_index imports the compiler, which takes a second.
    """
    index = []
    for size in reversed(shape):
        index.append(number % size)
        number = number // size
    return tuple(reversed(index))


def ones_at(size: int, places: int | Tensor, device: torch.device) -> Tensor:
    """A vector that is 1 at some places and 0 elsewhere: float64, shape (size,)."""
    vector = torch.zeros(size, dtype=torch.float64, device=device)
    vector[places] = 1.0
    return vector


def differ(left: Tensor, right: Tensor, tolerance: float, complex_entries: bool) -> bool:
    """Whether any entry of two blocks differs by more than an absolute tolerance; two NaNs do not differ."""
    if left.numel() > 2 * PIECE and torch.equal(left, right):
        return False
    if left.numel() > 2 * PIECE and not complex_entries and left.is_contiguous() and right.is_contiguous():
        # Most compared blocks are equal except for rounding; a NaN is handled below.
        pair = left.view(-1), right.view(-1)
        every = pieces(left.numel(), left.device)
        if all(bool((pair[0][some] - pair[1][some]).abs_().max() <= tolerance) for some in every):
            return False
    return bool(ops.compare(left, right, tolerance, 0.0, complex_entries, True).tolist()[0])


def near(left: Tensor, right: Tensor, allowed: Tensor | float) -> Tensor:
    """A mask of the real elements that differ by at most allowed; where not finite, they must be equal or both NaN."""
    close = ((left - right).abs() <= allowed) & left.isfinite() & right.isfinite()
    return close | (left == right) | (left.isnan() & right.isnan())


def largest_change(left: Tensor, right: Tensor) -> float:
    """The largest difference of real elements; infinite if one is not finite, unless both are equal or both NaN."""
    if torch.equal(left, right):
        return 0.0
    change = (left - right).abs_()
    change[(left == right) | (left.isnan() & right.isnan())] = 0.0
    return largest(change.nan_to_num_(math.inf))


def checksum(values: Tensor) -> int:
    """The CRC-32 of the bits of a strided tensor."""
    return zlib.crc32(values.detach().cpu().contiguous().numpy().data)


def largest(values: Tensor) -> float:
    """The largest magnitude; zero if there are no elements, NaN if an element is NaN."""
    if values.numel() <= PIECE:
        return float(torch.linalg.vector_norm(values, math.inf)) if values.numel() else 0.0
    # For many elements, this is four times as fast as a norm, and makes no copy.
    return float(torch.stack(values.aminmax()).abs().amax())


def largest_finite(values: Tensor) -> float:
    """The largest magnitude of the finite elements; zero if there are none."""
    return largest(values.nan_to_num(0.0, 0.0, 0.0))


def without_subclass(tensor: Tensor) -> Tensor:
    """The tensor or, for a subclass, which may have no memory of its own, a copy of its values."""
    if type(tensor) is Tensor:
        return tensor
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    values.copy_(tensor)
    return values
