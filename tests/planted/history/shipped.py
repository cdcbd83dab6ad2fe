"""The class of a wrong gradient of a release, and helpers to plant it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shipped:
    """A wrong gradient of a release, and its right twin.

    issue: the address of the public issue or pull request that describes it. inputs makes inputs at which func is
    wrong, and generic an ordinary random point, where func may be right. order is 1 for gradcheck and 2 for
    gradgradcheck, called with keywords.
    """

    title: str
    library: str
    issue: str
    func: Callable[..., Any]
    twin: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    generic: Callable[[], tuple[Any, ...]]
    order: int = 1
    keywords: Mapping[str, Any] = field(default_factory=dict)


def at(*values: Any) -> Callable[[], tuple[Tensor, ...]]:
    """Makes leaves with these values."""
    return lambda: tuple(torch.tensor(value).to(_double(value)).requires_grad_() for value in values)


def _double(value: Any) -> torch.dtype:
    return torch.complex128 if torch.tensor(value).is_complex() else torch.float64


def beside(source: Callable[[], tuple[Tensor, ...]], *constants: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Makes the leaves of source, followed by constants."""
    return lambda: (*source(), *constants)


def derived(forward: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The backward that torch derives for forward."""

    def backward(g: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs]
            return torch.autograd.grad(forward(*leaves), leaves, g)

    return backward


def with_jvp(forward: Callable[[Tensor], Tensor], jvp: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """A function of one input whose backward is torch's, and whose forward mode is jvp(tangent, x)."""

    class WithJvp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)
            return forward(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return derived(forward)(g, *ctx.saved_tensors)[0]

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return jvp(tangent, *ctx.saved_tensors)

    return WithJvp.apply


FORWARD = {"check_forward_ad": True}
AUTOGRAD, FLAG_GEMS = "https://github.com/HIPS/autograd/", "https://github.com/flagos-ai/FlagGems/"
JAX, MXNET = "https://github.com/jax-ml/jax/", "https://github.com/apache/mxnet/"
TORCH, TT_METAL = "https://github.com/pytorch/pytorch/", "https://github.com/tenstorrent/tt-metal/"
