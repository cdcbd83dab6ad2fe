"""Writes docs/gallery.md: ten mistakes as people make them, and what a check says of each.

`python -m docs.make_gallery`; `--check` tells whether the file is what would be written, but for times and rounding.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastgrad

FILE = Path(__file__).with_name("gallery.md")

HEAD = """# A gallery of mistakes

Ten backwards as they are written, each wrong in a way that is seen in practice, and the whole message of the check.
`make gallery` writes this file; times are left out.
"""


class ForgottenFactor(torch.autograd.Function):
    """x^2: the 2 got lost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad_output * x


class WrongSign(torch.autograd.Function):
    """A difference: the second gradient has the sign of the first."""

    @staticmethod
    def forward(ctx: Any, prediction: Tensor, target: Tensor) -> Tensor:
        return prediction - target

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        return grad_output, grad_output


class MissingConjugate(torch.autograd.Function):
    """A complex product: right for real tensors, and for those only."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(z, w)
        return z * w

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        z, w = ctx.saved_tensors
        return grad_output * w, grad_output * z


class Transposed(torch.autograd.Function):
    """A linear layer with a square weight: x^T g instead of g^T x, and no shape tells."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad_output @ weight, x.t() @ grad_output


class MeanForSum(torch.autograd.Function):
    """A bias: its gradient is averaged over the batch, where it must be summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        return grad_output, grad_output.mean(0)


class LostBorder(torch.autograd.Function):
    """A moving average over three places with zeros around: the backward forgets the last place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        padded = F.pad(x, (1, 1))
        return (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        padded = F.pad(grad_output[:, :-1], (1, 2))
        return (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3


class Overwritten(torch.autograd.Function):
    """tanh: to save memory, backward works in the tensor that forward kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.kept = y.clone()
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return ctx.kept.square_().neg_().add_(1).mul(grad_output)


class ClippedGradient(torch.autograd.Function):
    """The exponential: someone clipped the gradient inside of backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad_output.clamp(-1, 1) * y


class ContiguousOnly(torch.autograd.Function):
    """A kernel that reads grad_output by its address, whatever its strides are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        row_major = grad_output.stride(0) == grad_output.shape[1]
        memory = grad_output if row_major else grad_output.t().reshape(grad_output.shape)
        return 3 * memory


class SinglePrecision(torch.autograd.Function):
    """tanh of doubles, computed in single precision inside: no gradient can be checked against it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.float().tanh().double()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad_output * (1 - y * y)


@dataclass(frozen=True)
class Mistake:
    """One exhibit."""

    title: str
    function: type[torch.autograd.Function]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float64
    keywords: dict[str, Any] = field(default_factory=dict)


MISTAKES = (
    Mistake("A forgotten factor", ForgottenFactor, ((2, 4),)),
    Mistake("A wrong sign", WrongSign, ((4,), (4,))),
    Mistake("A missing conjugate", MissingConjugate, ((2,), (2,)), torch.complex128),
    Mistake("A transposed gradient", Transposed, ((1, 3), (3, 3)), keywords={"engine": "dense"}),
    Mistake("A mean for a sum", MeanForSum, ((4, 2), (2,))),
    Mistake("A lost border", LostBorder, ((1, 10),)),
    Mistake("A saved tensor that backward overwrites", Overwritten, ((5,),)),
    Mistake("A clipped gradient", ClippedGradient, ((6,),)),
    Mistake("Right for contiguous tensors only", ContiguousOnly, ((2, 5),)),
    Mistake("Single precision inside", SinglePrecision, ((4,),)),
)


def message(mistake: Mistake) -> str:
    """What the check of a mistake says, without its time."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.rand(shape, dtype=mistake.dtype, generator=generator).add_(0.5).requires_grad_()
        for shape in mistake.shapes
    ]
    apply: Callable[..., Any] = mistake.function.apply
    try:
        fastgrad.gradcheck(apply, inputs, **mistake.keywords)
    except fastgrad.GradcheckError as error:
        return re.sub(r", [\d.]+ m?s$", "", str(error), flags=re.MULTILINE)
    raise AssertionError(f"{mistake.title} was not found")


def gallery() -> str:
    """The whole file."""
    parts = [HEAD]
    for number, mistake in enumerate(MISTAKES, 1):
        source = textwrap.dedent(inspect.getsource(mistake.function)).rstrip()
        parts.append(f"## {number}. {mistake.title}\n\n```python\n{source}\n```\n\n```\n{message(mistake)}\n```\n")
    return "\n".join(parts)


def without_chance(text: str) -> str:
    """The text without what differs from run to run: how small an error is, and calls, which depend on their cost."""
    text = re.sub(r"[\d.]+e-(0[6-9]|[1-9]\d)\b", "small", text)
    return re.sub(r"\d+ evaluations?, \d+ VJPs?", "calls", text)


def main(arguments: list[str]) -> int:
    """Writes the file, or checks it."""
    text = gallery()
    if "--check" not in arguments:
        FILE.write_text(text)
        return 0
    if without_chance(text) == without_chance(FILE.read_text()):
        return 0
    print(f"{FILE.name} is not what the checks say now: make gallery", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
