"""Twenty-four typical mistakes, for the gallery."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class ForgottenFactor(torch.autograd.Function):
    """x^2: the gradient lacks the factor 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad_output * x


class WrongSign(torch.autograd.Function):
    """A difference: the gradient of target lacks the minus sign."""

    @staticmethod
    def forward(ctx: Any, prediction: Tensor, target: Tensor) -> Tensor:
        return prediction - target

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        return grad_output, grad_output


class MissingConjugate(torch.autograd.Function):
    """A product: the gradients lack conj(), so they are right only for real tensors."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(z, w)
        return z * w

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        z, w = ctx.saved_tensors
        return grad_output * w, grad_output * z


class Transposed(torch.autograd.Function):
    """A linear layer: for the square weight, backward returns x^T g instead of g^T x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad_output @ weight, x.t() @ grad_output


class MeanForSum(torch.autograd.Function):
    """A bias: its gradient is averaged over the batch, but must be summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        return grad_output, grad_output.mean(0)


class LostBorder(torch.autograd.Function):
    """A moving average of three elements: backward omits the last element of grad_output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        padded = F.pad(x, (1, 1))
        return (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        padded = F.pad(grad_output[:, :-1], (1, 2))
        return (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3


class Overwritten(torch.autograd.Function):
    """tanh: to save memory, backward overwrites the tensor that forward kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.kept = y.clone()
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return ctx.kept.square_().neg_().add_(1).mul(grad_output)


class ClippedGradient(torch.autograd.Function):
    """The exponential: backward clips grad_output."""

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
    """A kernel that reads grad_output by its address and ignores its strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        row_major = grad_output.stride(0) == grad_output.shape[1]
        memory = grad_output if row_major else grad_output.t().reshape(grad_output.shape)
        return 3 * memory


class SinglePrecision(torch.autograd.Function):
    """tanh of doubles, computed in single precision: differences are too inaccurate to check the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.float().tanh().double()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad_output * (1 - y * y)


class SwappedGradients(torch.autograd.Function):
    """A product: the two gradients are returned in the wrong order."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor) -> Tensor:
        ctx.save_for_backward(query, key)
        return query * key

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        query, key = ctx.saved_tensors
        return grad_output * query, grad_output * key


class NotFlipped(torch.autograd.Function):
    """A convolution: backward does not flip the kernel."""

    @staticmethod
    def forward(ctx: Any, signal: Tensor, kernel: Tensor) -> Tensor:
        ctx.save_for_backward(signal, kernel)
        return F.conv1d(signal, kernel, padding=1)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        signal, kernel = ctx.saved_tensors
        grad_kernel = torch.nn.grad.conv1d_weight(signal, kernel.shape, grad_output, padding=1)
        return F.conv1d(grad_output, kernel.transpose(0, 1), padding=1), grad_kernel


class WrongDimension(torch.autograd.Function):
    """Softmax over the last dimension: backward sums over the first."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        y = logits.softmax(1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (grad_output - (grad_output * y).sum(0, keepdim=True))


class SavedInput(torch.autograd.Function):
    """tanh: backward needs the result, but forward saved the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad_output * (1 - y * y)


class WithoutWeight(torch.autograd.Function):
    """Layer normalization: the gradient of x lacks the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        centered = x - x.mean(1, keepdim=True)
        scale = centered.square().mean(1, keepdim=True).rsqrt()
        ctx.save_for_backward(centered * scale, scale)
        return centered * scale * weight

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        y, scale = ctx.saved_tensors
        g = grad_output
        along = (g * y).mean(1, keepdim=True)
        return scale * (g - g.mean(1, keepdim=True) - y * along), (grad_output * y).sum(0)


class KeptOnce(torch.autograd.Function):
    """A lookup: if a row is looked up twice, backward keeps only one of the two gradients."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = table.shape[0]
        return table[index]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        grad = grad_output.new_zeros(ctx.rows, grad_output.shape[1])
        grad[index] = grad_output
        return grad, None


class OneTriangle(torch.autograd.Function):
    """A quadratic form: backward returns only the lower triangle of the matrix's gradient."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(matrix, x)
        return x @ matrix @ x

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        matrix, x = ctx.saved_tensors
        return grad_output * torch.outer(x, x).tril(), grad_output * (matrix + matrix.t()) @ x


def constant_statistics(x: Tensor) -> Tensor:
    """Each row is divided by its norm, which autograd treats as a constant."""
    return x / x.detach().norm(dim=1, keepdim=True)


class WrongCount(torch.autograd.Function):
    """The mean of the elements in a mask: backward divides by the number of all elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return (x * mask).sum() / mask.sum()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return grad_output * mask / mask.numel(), None


class LostResidual(torch.autograd.Function):
    """A residual connection, x + tanh(x): backward returns only the gradient of tanh(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return x + y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad_output * (1 - y * y)


class DrawnAgain(torch.autograd.Function):
    """Dropout: backward draws a new mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return x * (torch.rand(x.shape, generator=generator) < 0.5)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output * (torch.rand(grad_output.shape) < 0.5)


class LostTail(torch.autograd.Function):
    """A kernel for blocks of four elements: backward omits the last, incomplete block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad = torch.zeros_like(x)
        blocks = x.numel() // 4 * 4
        grad[:blocks] = grad_output[:blocks] * x[:blocks].cos()
        return grad


class ChangedGradOutput(torch.autograd.Function):
    """A scaling: to save memory, backward multiplies grad_output in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 0.5 * x

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output.mul_(0.5)


class ConstantInBackward(torch.autograd.Function):
    """A cube: the gradient is right, but backward detaches x, so the second derivative is wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad_output * (3 * x.detach() ** 2)


@dataclass(frozen=True)
class Mistake:
    """One exhibit.

    shapes are those of the inputs that are checked, others follow them; order is 2 for gradgradcheck.
    """

    title: str
    function: Any
    shapes: tuple[tuple[int, ...], ...]
    others: tuple[Tensor, ...] = ()
    order: int = 1
    dtype: torch.dtype = torch.float64
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def called(self) -> Callable[..., Any]:
        """What the check gets."""
        called: Callable[..., Any] = getattr(self.function, "apply", self.function)
        return called


MISTAKES = (
    Mistake("A forgotten factor", ForgottenFactor, ((2, 4),)),
    Mistake("A wrong sign", WrongSign, ((4,), (4,))),
    Mistake("Gradients in the wrong order", SwappedGradients, ((2, 3), (2, 3))),
    Mistake("A missing conjugate", MissingConjugate, ((2,), (2,)), dtype=torch.complex128),
    Mistake("A transposed gradient", Transposed, ((1, 3), (3, 3)), keywords={"engine": "dense"}),
    Mistake("A kernel that is not flipped", NotFlipped, ((1, 1, 8), (1, 1, 3))),
    Mistake("The wrong dimension", WrongDimension, ((3, 4),)),
    Mistake("A mean for a sum", MeanForSum, ((4, 2), (2,))),
    Mistake("A mean over the wrong number", WrongCount, ((6,),), (torch.tensor([1.0, 0, 1, 1, 0, 1]),)),
    Mistake("A lost factor", WithoutWeight, ((3, 4), (4,))),
    Mistake("A lost residual connection", LostResidual, ((6,),)),
    Mistake("Statistics as constants", constant_statistics, ((3, 4),)),
    Mistake("Gradients that are overwritten", KeptOnce, ((4, 2),), (torch.tensor([0, 2, 2, 3]),)),
    Mistake("One triangle of two", OneTriangle, ((4, 4), (4,))),
    Mistake("A lost border", LostBorder, ((1, 10),)),
    Mistake("A lost tail", LostTail, ((10,),)),
    Mistake("The input in place of the result", SavedInput, ((5,),)),
    Mistake("A saved tensor that backward overwrites", Overwritten, ((5,),)),
    Mistake("A mask that is drawn again", DrawnAgain, ((8,),)),
    Mistake("A clipped gradient", ClippedGradient, ((6,),)),
    Mistake("A grad_output that is changed", ChangedGradOutput, ((5,),)),
    Mistake("Right for contiguous tensors only", ContiguousOnly, ((2, 5),)),
    Mistake("Single precision inside", SinglePrecision, ((4,),)),
    Mistake("A backward that hides its input", ConstantInBackward, ((5,),), order=2),
)
