"""The operators of csrc/ops, in terms of torch's own operators; the headers in csrc/ops document the contracts."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fastgrad.core.torch_private import below_autograd

hidden_from_autograd = below_autograd()
"""Decorates a function: it runs without graph recording, version counting and `__torch_function__`."""


def real_coordinates(tensor: Tensor) -> Tensor:
    """The real coordinates in C order, in the tensor's own dtype."""
    resolved = tensor.resolve_conj().resolve_neg()
    return (torch.view_as_real(resolved) if resolved.is_complex() else resolved).reshape(-1)


def coordinate_count(tensor: Tensor) -> int:
    """The number of real coordinates of a tensor."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def with_coordinates(coordinates: Tensor, like: Tensor) -> Tensor:
    """A tensor with the shape and domain of `like`, from real coordinates in its dtype."""
    if not like.is_complex():
        return coordinates.reshape(like.shape)
    parts = coordinates.reshape(-1, 2)
    return torch.complex(parts[:, 0], parts[:, 1]).reshape(like.shape)


def moved(x: Tensor, step: Tensor | float) -> Tensor:
    """The sum of x and step, computed in float64 and rounded to the dtype of x."""
    return (x.to(torch.float64) + step).to(x.dtype)


def realized_width(x: Tensor, step: Tensor | float) -> Tensor:
    """(x + step) - (x - step) after rounding, in float64; 2 step if this is not finite."""
    width = moved(x, step).to(torch.float64) - moved(x, -step).to(torch.float64)
    return torch.where(width.isfinite(), width, 2 * step)


def coordinate_step(x: Tensor, eps: float, relative_step: float) -> Tensor:
    """The step: eps if it changes x, otherwise relative_step |x|."""
    steps = x.to(torch.float64).abs() * relative_step
    return torch.where(realized_width(x, eps) == 0, steps, eps)


@hidden_from_autograd
def perturb_coordinate_(
    x: Tensor,
    origin: Tensor,
    coordinate: int,
    sign: int,
    eps: float,
    relative_step: float,
    restored: int | None = None,
) -> None:
    others = None if restored is None else torch.tensor([restored], device="cpu")
    perturb_coordinates_(x, origin, torch.tensor([coordinate], device="cpu"), sign, eps, relative_step, others)


@hidden_from_autograd
def perturb_coordinates_(
    values: Tensor,
    origin: Tensor,
    coordinates: Tensor,
    sign: int,
    eps: float,
    relative_step: float,
    restored: Tensor | None = None,
) -> None:
    chosen, at_x = coordinates.to(values.device), real_coordinates(origin)
    if restored is not None:
        own = restored.to(values.device)
        # Instead of numbers that are no coordinates, the first chosen coordinate is restored, which is written below.
        own = torch.where((own >= 0) & (own < len(at_x)), own, chosen[:1])
        _write(values, own, at_x.index_select(0, own))
    found = at_x.index_select(0, chosen)
    if sign:
        found = moved(found, sign * coordinate_step(found, eps, relative_step))
    _write(values, chosen, found)


def _write(tensor: Tensor, coordinates: Tensor, values: Tensor) -> None:
    """Sets some real coordinates of a tensor; all others are neither read nor written."""
    view, places = tensor, list[Tensor]()
    if tensor.is_complex():
        view = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
        values = torch.where(coordinates % 2 == 1, -values, values) if tensor.is_conj() else values
    for size in reversed(view.shape):
        places.insert(0, coordinates % size)
        coordinates = coordinates // size
    view.index_put_(tuple(places), values) if places else view.copy_(values[-1])


@hidden_from_autograd
def displace_(x: Tensor, origin: Tensor, displacement: Tensor, scale: float) -> None:
    x.copy_(origin if scale == 0 else with_coordinates(moved(real_coordinates(origin), scale * displacement), x))


@hidden_from_autograd
def flatten_(out: Tensor, tensor: Tensor) -> None:
    out.copy_(real_coordinates(tensor))


@hidden_from_autograd
def unflatten_(tensor: Tensor, coordinates: Tensor) -> None:
    tensor.copy_(with_coordinates(coordinates.to(tensor.real.dtype if tensor.is_complex() else tensor.dtype), tensor))


@hidden_from_autograd
def central_difference_(
    column: Tensor, minus: Tensor, origin: Tensor, coordinate: int, eps: float, relative_step: float
) -> None:
    x = real_coordinates(origin)[coordinate]
    width = realized_width(x, coordinate_step(x, eps, relative_step))
    column.sub_(real_coordinates(minus).to(torch.float64)).div_(width)


def _philox(seed: int, stream: int, groups: np.ndarray) -> np.ndarray:
    """Philox4x32-10, as in csrc/kernels/philox.h: four words for each group, shape (groups, 4)."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    zero = np.zeros_like(groups)
    c0, c1 = groups & low, groups >> shift
    c2, c3 = zero + np.uint64(stream & 0xFFFFFFFF), zero + np.uint64(stream >> 32 & 0xFFFFFFFF)
    for turn in range(10):
        key0, key1 = (
            np.uint64((key + turn * weyl) & 0xFFFFFFFF) for key, weyl in ((seed, 0x9E3779B9), (seed >> 32, 0xBB67AE85))
        )
        product0, product1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (product1 >> shift) ^ c1 ^ key0,
            product1 & low,
            (product0 >> shift) ^ c3 ^ key1,
            product0 & low,
        )
    return np.stack([c0, c1, c2, c3], axis=1)


@hidden_from_autograd
def direction_(out: Tensor, seed: int, stream: int, first: int, halved: bool) -> None:
    count, group = out.numel(), first >> 2
    groups = np.arange((first + count + 3 >> 2) - group, dtype=np.uint64) + np.uint64(group)
    begin = first - 4 * group
    words = _philox(seed, stream, groups).reshape(-1)[begin : begin + count].astype(np.int64)
    kept = 1 - (words >> 1 & 1) if halved else np.ones(count, dtype=np.int64)
    if first == 0:
        kept[:1] = 1
    magnitude = 0.5 + (words >> 2) * (1.0 / 2**30)
    out.copy_(torch.from_numpy(magnitude * (kept * (2 * (words & 1) - 1))))


@hidden_from_autograd
def realize_(
    displacement: Tensor,
    realized: Tensor,
    origin: Tensor,
    seed: int,
    stream: int,
    first: int,
    eps: float,
    relative_step: float,
) -> None:
    own = real_coordinates(origin)
    direction_(displacement, seed, stream, first, False)
    steps = (own.to(torch.float64).abs() * relative_step).clamp_min(eps)
    displacement.mul_(torch.where(steps.isfinite(), steps, eps))
    halves = 8.0 * realized_width(own, displacement / 2)
    realized.copy_((halves - realized_width(own, displacement)) / (6.0 * eps))


@hidden_from_autograd
def decompress_(
    values: Tensor, compressed: Tensor, subtrahend: Tensor | None, positions: Tensor, entries: Tensor
) -> None:
    places = positions.index_select(0, entries)
    found = compressed.index_select(0, places)
    if subtrahend is not None:
        found = found - subtrahend.index_select(0, places)
    values.index_copy_(0, entries, found)


@hidden_from_autograd
def dots(rows: Tensor, vector: Tensor) -> Tensor:
    terms = torch.where(vector == 0, 0.0, rows * vector)
    return torch.stack([terms.sum(1), terms.abs().sum(1)], 1)


@hidden_from_autograd
def richardson_(
    derivative: Tensor,
    noise: Tensor,
    base: Tensor,
    plus: Tensor,
    minus: Tensor,
    half_plus: Tensor,
    half_minus: Tensor,
    eps: float,
    ulp: float,
) -> None:
    whole, half = plus - minus, half_plus - half_minus
    derivative.copy_((8.0 * half - whole) / (6.0 * eps))
    rounding = ulp * base.abs()
    kink = ((plus + minus - 2.0 * base) - 4.0 * (half_plus + half_minus - 2.0 * base)).abs()
    found = torch.maximum((2.0 * half - whole).abs(), 2.0 * rounding)
    found = torch.where((kink > 64.0 * rounding) & (kink > found), kink, found) / (2.0 * eps)
    noise.copy_(torch.maximum(noise, found))


@hidden_from_autograd
def compare(
    analytical: Tensor, numerical: Tensor, atol: float, rtol: float, complex_entries: bool, equal_nan: bool
) -> Tensor:
    if analytical.numel() == 0:
        return torch.tensor([0.0, -1, -1, -1, *[0.0] * 6], dtype=torch.float64, device=analytical.device)
    a, n = analytical, numerical
    if complex_entries:
        a, n = (torch.complex(block[:, ::2], block[:, 1::2]) for block in (a, n))
    error, size = (a - n).abs(), n.abs()
    equal = a == n
    if equal_nan:
        equal = equal | (a.isnan() & n.isnan())
    finite = error.isfinite()
    allowed = size * rtol + atol
    mismatch = ~(equal | (finite & (error <= allowed)))
    excess = error / allowed
    excess = torch.where(finite & (excess >= 0), excess, math.inf)
    excess = torch.where(equal, -1.0, excess)
    relative = error / size
    counted = finite & ~equal
    product = a * n.conj()
    worst = excess.reshape(-1).argmax()
    largest = excess.reshape(-1)[worst]
    place = torch.stack([worst.div(error.shape[1], rounding_mode="floor"), worst % error.shape[1]]).double()
    imaginary = product.imag if complex_entries else torch.zeros_like(error)
    real = product.real if complex_entries else product
    sums = [torch.where(mismatch, term, 0.0).sum() for term in (a.abs() ** 2, size**2, real, imaginary)]
    return torch.stack([
        mismatch.sum().double(),
        largest,
        *torch.where(largest >= 0, place, -1.0),
        torch.where(counted, error, 0.0).max(),
        torch.where(counted & relative.isfinite(), relative, 0.0).max(),
        *sums,
    ])  # fmt: skip


@hidden_from_autograd
def project_rows_(
    sums: Tensor,
    squares: Tensor,
    cotangents: Tensor,
    rows: Tensor,
    first_row: int,
    row_step: int,
    first_column: int,
) -> None:
    if len(rows):
        weights = cotangents[:, first_row : first_row + (len(rows) - 1) * row_step + 1 : row_step]
        sums.narrow(1, first_column, rows.shape[1]).add_(weights @ rows)
        squares.narrow(1, first_column, rows.shape[1]).add_(weights**2 @ rows**2)


@hidden_from_autograd
def project_entries_(
    sums: Tensor, squares: Tensor | None, vector: Tensor, sources: Tensor, targets: Tensor, entries: Tensor
) -> None:
    terms = vector.index_select(0, sources) * entries
    sums.index_add_(0, targets, terms)
    if squares is not None:
        squares.index_add_(0, targets, terms * terms)
