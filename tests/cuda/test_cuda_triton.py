"""A Triton kernel: x sigmoid(x), right, and wrong in the part of the last block that is not full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad

triton = pytest.importorskip("triton", reason="needs Triton")
tl = pytest.importorskip("triton.language", reason="needs Triton")

SIZE, BLOCK = 10_003, 128
TAIL = SIZE // BLOCK * BLOCK
"""The first element that no full block holds."""


@triton.jit
def swish_kernel(x, y, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    where = tl.program_id(0) * block + tl.arange(0, block)
    inside = where < size
    v = tl.load(x + where, mask=inside, other=0.0)
    tl.store(y + where, v / (1 + tl.exp(-v)), mask=inside)


# The elements from `end` on get the gradient of the identity, as if the tail was forgotten.
@triton.jit
def swish_backward_kernel(dy, x, dx, size, end, block: tl.constexpr):  # type: ignore[no-untyped-def]
    where = tl.program_id(0) * block + tl.arange(0, block)
    inside = where < size
    v = tl.load(x + where, mask=inside, other=0.0)
    s = 1 / (1 + tl.exp(-v))
    slope = tl.where(where < end, s * (1 + v * (1 - s)), 1.0)
    tl.store(dx + where, slope * tl.load(dy + where, mask=inside, other=0.0), mask=inside)


def operator(end: int) -> Callable[..., Tensor]:
    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            y = torch.empty_like(x)
            swish_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), block=BLOCK)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            dx = torch.empty_like(x)
            # A kernel that takes pointers ignores strides, but grad_outputs need not be contiguous.
            blocks = (triton.cdiv(x.numel(), BLOCK),)
            swish_backward_kernel[blocks](dy.contiguous(), x, dx, x.numel(), end, block=BLOCK)
            return dx

    return Swish.apply


def inputs() -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(SIZE, dtype=torch.float64, generator=generator).cuda().requires_grad_(),)


@pytest.mark.parametrize("fast_mode", [False, True])
def test_the_right_one_passes(fast_mode: bool) -> None:
    assert fastgrad.gradcheck(operator(SIZE), inputs(), fast_mode=fast_mode)


@pytest.mark.parametrize("fast_mode", [False, True])
def test_the_forgotten_tail_is_found(fast_mode: bool) -> None:
    with pytest.raises(fastgrad.GradcheckError, match="Jacobian mismatch for output 0 with respect to input 0"):
        fastgrad.gradcheck(operator(TAIL), inputs(), fast_mode=fast_mode)
