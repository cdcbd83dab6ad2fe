"""A planted error: a function with a wrong gradient, its correct twin, and the expected verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastgrad.report.evidence import CauseName


def function(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A custom Function: backward(*grad_outputs, *inputs) -> gradients."""

    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Any:
            ctx.save_for_backward(*inputs)
            return forward(*inputs)

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
            return backward(*grad_outputs, *ctx.saved_tensors)

    return Planted.apply


def anywhere(output: tuple[int, ...], input: tuple[int, ...]) -> bool:
    """Whether an entry is wrong: always true."""
    return True


def normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Callable[[], tuple[Tensor, ...]]:
    """Makes leaves of these shapes with standard normal components, the same in every call."""

    def inputs() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(3)
        return tuple(torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes)

    return inputs


_TWELVE = normal((3, 4))


@dataclass(frozen=True)
class Row:
    """One planted error.

    inputs makes fresh inputs; order is 1 for gradcheck and 2 for gradgradcheck, called with keywords;
    phrase is what the message must contain; torch_sees whether torch's slow mode fails `wrong` too, and
    torch_passes whether it passes `right`. Both are measured, never assumed.
    """

    name: str
    wrong: Callable[..., Any]
    right: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]] = _TWELVE
    order: int = 1
    keywords: Mapping[str, Any] = field(default_factory=dict)
    phrase: str = "Jacobian mismatch for output 0 with respect to input 0"
    torch_sees: bool = True
    torch_passes: bool = True


@dataclass(frozen=True)
class Planted:
    """One planted error whose cause a failed check must name first.

    entry: whether the entry with these indices of the output and of the input is one that is really wrong. The
    other fields are those of Row.
    """

    name: str
    cause: CauseName
    wrong: Callable[..., Any]
    right: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]] = _TWELVE
    entry: Callable[[tuple[int, ...], tuple[int, ...]], bool] = anywhere
    keywords: Mapping[str, Any] = field(default_factory=dict)
    order: int = 1
