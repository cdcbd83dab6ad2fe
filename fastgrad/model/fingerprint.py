"""A fingerprint that changes with every change of a tensor's bits."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastgrad.core.torch_private import hidden_from_dynamo
from fastgrad.problem.coordinates import own_values

_WORD = 8
"""Bytes that are mixed together."""

_ROW = 1 << 16
"""Number of random factors of each kind that are drawn once."""


@functools.cache
def _factors(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Three vectors of random odd integers, int64, shape (_ROW,): odd factors lose no information modulo 2^64."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**62), 2**62, (3, _ROW), generator=generator, dtype=torch.int64, device="cpu") * 2 + 1
    return drawn[0].to(device), drawn[1].to(device), drawn[2].to(device)


@hidden_from_dynamo
def fingerprint(tensor: Tensor) -> int:
    """A sum of a tensor's mixed and weighted words of 64 bits modulo 2^64, which changes if any one word changes.

    If several words change, the fingerprint stays the same with a probability of about 2^-64.
    """
    if tensor.layout is torch.sparse_coo:
        return fingerprint(tensor._indices()) + fingerprint(tensor._values())
    values = own_values(tensor)
    if values is None or not values.numel():
        return 0
    values = values.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    raw = values.resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % _WORD:
        raw = raw.clone()
    whole = raw.numel() // _WORD * _WORD
    last = torch.nn.functional.pad(raw[whole:], (0, _WORD - raw.numel() + whole))
    return 5 * _of_words(last.view(torch.int64)) + (_of_words(raw[:whole].view(torch.int64)) if whole else 0)


def _of_words(words: Tensor) -> int:
    """The fingerprint of words: int64, shape (words,)."""
    *within, across = _factors(words.device)
    rows, rest = divmod(words.numel(), _ROW)
    total = 0
    if rows:
        sums = _mixed(words[: rows * _ROW].view(rows, _ROW), *within).sum(1, dtype=torch.int64)
        factors = across.repeat(-(-rows // _ROW))[:rows]
        total += int((sums * factors).sum())
    if rest:
        total += 3 * int(_mixed(words[rows * _ROW :], *(factors[:rest] for factors in within)).sum(dtype=torch.int64))
    return total


def _mixed(words: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Products with odd factors, whose upper halves change the lower ones before the second factor.

    Without this, a change of the uppermost bit would have the same effect at each word, and two would cancel.
    """
    products = words * first
    halves = products.view(torch.int32)  # the lower half of each word comes first
    halves[..., ::2] ^= halves[..., 1::2]
    return products.mul_(second)
