"""Backwards that later calls of func, or their own writes, spoil: torch's checker fails them, and so do all engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

import fastgrad


def leaf(n: int) -> Tensor:
    return torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def sin_with_one_buffer(spoil: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    """sin; the gradient of a forward that is not the last one is changed by spoil."""
    last: list[object] = [None]

    class Sin(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:  # type: ignore[override]
            ctx.tag = last[0] = object()  # type: ignore[attr-defined]
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: FunctionCtx, g: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
            gradient = g * x.cos()
            if ctx.tag is not last[0]:  # type: ignore[attr-defined]
                spoil(gradient)
            return gradient

    return Sin.apply


@pytest.mark.parametrize("n", [1, 3, 20, 200])
@pytest.mark.parametrize(
    "keywords", [{}, {"engine": "dense"}, {"fast_mode": True}, {"fast_mode": True, "engine": "sketch"}]
)
def test_a_later_forward_overwrites_what_backward_reads(n: int, keywords: dict[str, Any]) -> None:
    def check(spoil: Callable[[Tensor], object]) -> fastgrad.Report:
        return fastgrad.check(sin_with_one_buffer(spoil), leaf(n), **keywords)

    for spoil in (Tensor.zero_, lambda gradient: gradient[-1].zero_()):
        report = check(spoil)
        assert report.failure is not None
        assert report.failure.kind == "nondeterministic"
    assert check(lambda gradient: None).verdict == "passed"


class WritesGradOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.cos = x.cos()  # type: ignore[attr-defined]
        return x.sin()

    @staticmethod
    def backward(ctx: FunctionCtx, g: Tensor) -> Tensor:  # type: ignore[override]
        if g.is_contiguous() and 0 not in g.stride():
            return g.mul_(ctx.cos)  # type: ignore[attr-defined]
        return g * ctx.cos  # type: ignore[attr-defined]


@pytest.mark.parametrize("n", [3, 20, 200])
@pytest.mark.parametrize("fast_mode", [False, True])
def test_batched_gradients_show_that_backward_writes_into_grad_output(n: int, fast_mode: bool) -> None:
    report = fastgrad.check(WritesGradOutput.apply, leaf(n), check_batched_grad=True, fast_mode=fast_mode)
    assert report.failure is not None
    assert report.failure.kind == "batched differs"
