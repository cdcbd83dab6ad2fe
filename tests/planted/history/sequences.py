"""Wrong gradients of operations on sequences."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tests.planted.history.shipped import MXNET, Shipped, beside, derived
from tests.planted.row import function, normal


def _half_rotated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _rotary(x: Tensor, angles: Tensor) -> Tensor:
    return x * angles.cos() + _half_rotated(x) * angles.sin()


def _rotary_multiplied_last(g: Tensor, x: Tensor, angles: Tensor) -> tuple[Tensor, None]:
    return g * angles.cos() - _half_rotated(g) * angles.sin(), None


def _causal_attention(q: Tensor, k: Tensor, v: Tensor, aligned_at_the_end: bool = True) -> Tensor:
    scores = q @ k.mT
    hidden = torch.ones_like(scores).triu(1 + (len(k) - len(q)) * aligned_at_the_end) > 0
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


FORGET = torch.tensor([0.9 + 0.1j, 0.8 - 0.3j, -0.5 + 0.7j, 1.0 + 0.2j]).to(torch.complex128)


def _scan(x: Tensor, forget: Tensor = FORGET) -> Tensor:
    states = [x[0]]
    for value, factor in zip(x[1:], forget[1:], strict=False):
        states.append(factor * states[-1] + value)
    return torch.stack(states)


def _scan_in_blocks(g: Tensor, x: Tensor) -> Tensor:
    grad = torch.empty_like(x)
    scale, carry = torch.ones_like(x[0]), torch.zeros_like(x[0])
    for block in reversed(torch.arange(len(x)).split(2)):
        grad[block] = derived(partial(_scan, forget=FORGET[block]))(g[block], x[block])[0] * scale + carry
        scale, carry = FORGET[block].prod().conj(), grad[block[0]]
    return grad


def _left_to_right(x: Tensor, weight: Tensor) -> Tensor:
    return x.cumsum(0) @ weight


def _right_to_left(x: Tensor, weight: Tensor) -> Tensor:
    return x.flip(0).cumsum(0).flip(0) @ weight


def _bidirectional(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return torch.cat((_left_to_right(x, left), _right_to_left(x, right)), -1)


def _bidirectional_overwritten(g: Tensor, x: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
    from_left, grad_left = derived(_left_to_right)(g[:, :2], x, left)
    from_right, grad_right = derived(_right_to_left)(from_left[:, 2:], x, right)
    return from_left + from_right, grad_left, grad_right


SEQUENCES = [
    Shipped(
        "rotary embedding whose halves have different angles", "PaddlePaddle",
        "https://github.com/PaddlePaddle/Paddle/pull/74716",
        function(_rotary, _rotary_multiplied_last), _rotary,
        beside(normal((3, 4)), torch.tensor([0.3, 1.1, 0.8, 2.0])),
        beside(normal((3, 4)), torch.tensor([0.3, 1.1, 0.3, 1.1])),
    ),
    Shipped(
        "causal attention with fewer queries than keys", "ffpa-attn", "https://github.com/xlite-dev/ffpa-attn/pull/300",
        function(_causal_attention, derived(partial(_causal_attention, aligned_at_the_end=False))), _causal_attention,
        normal((2, 3), (4, 3), (4, 2)), normal((3, 3), (3, 3), (3, 2)),
    ),
    Shipped(
        "carry between the blocks of a scan", "accelerated-scan", "https://github.com/proger/accelerated-scan/pull/15",
        function(_scan, _scan_in_blocks), _scan, normal((4,), dtype=torch.complex128),
        normal((2,), dtype=torch.complex128),
    ),
    Shipped(
        "bidirectional layer overwrites grad_output before its second direction reads it", "MXNet",
        MXNET + "pull/18203",
        function(_bidirectional, _bidirectional_overwritten), _bidirectional, normal((3, 4), (4, 2), (4, 2)),
        normal((3, 4), (4, 2), (4, 2)),
    ),
]  # fmt: skip
