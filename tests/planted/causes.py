"""Planted errors, each with the cause that a failed check must name first; by the author of the diagnosis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.planted.row import Planted, function, normal

Function = Callable[..., Any]
Index = tuple[int, ...]
COMPLEX = torch.complex128


def pair(forward: Function, wrong: Function, right: Function) -> dict[str, Function]:
    """One forward with a wrong and a right backward(*grad_outputs, *inputs)."""
    return {"wrong": function(forward, wrong), "right": function(forward, right)}


def both_modes(forward: Function, backward: Function, jvp: Function) -> Function:
    """A custom Function with backward(*grad_outputs, *inputs) and jvp(*tangents, *inputs)."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Any:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)
            return forward(*inputs)

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
            return backward(*grad_outputs, *ctx.saved_tensors)

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor) -> Any:
            return jvp(*tangents, *ctx.saved_tensors)

    return Both.apply


def leaves(*tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Makes new leaves with these values in every call."""
    return lambda: tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)


def linspace(low: float, high: float, count: int) -> Tensor:
    return torch.linspace(low, high, count, dtype=torch.float64)


# Values: how the wrong entries follow from the right ones.


def _squared_error(p: Tensor, t: Tensor) -> Tensor:
    return (p - t).square().mean()


def _squared_error_grads(factor: float) -> Function:
    def backward(g: Tensor, p: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        grad = g * factor * (p - t) / p.numel()
        return grad, -grad

    return backward


def _batch_loss(x: Tensor, w: Tensor) -> Tensor:
    """A loss that is summed over features and averaged over the batch."""
    return (x * w).sin().sum(1).mean(0)


def _batch_loss_grads(average: bool) -> Function:
    def backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        inner = g * (x * w).cos() / (x.shape[0] if average else 1)
        return inner * w, (inner * x).sum(0)

    return backward


def _swish_grad(second: float) -> Function:
    """Swish with a custom double backward, whose gradient with respect to x is multiplied by `second`."""

    def derivative(x: Tensor) -> Tensor:
        s = x.sigmoid()
        return s * (1 + x * (1 - s))

    def curvature(x: Tensor) -> Tensor:
        s = x.sigmoid()
        return s * (1 - s) * (2 + x * (1 - 2 * s))

    inner = function(lambda g, x: g * derivative(x), lambda h, g, x: (h * derivative(x), second * h * g * curvature(x)))
    return function(lambda x: x * x.sigmoid(), lambda g, x: inner(g, x))


def _likelihood_grad(sign: float) -> Function:
    def backward(g: Tensor, logits: Tensor) -> Tensor:
        target = torch.zeros_like(logits)
        target[:, 1] = 1
        return sign * g * (target - logits.softmax(1)) / logits.shape[0]

    return backward


def _likelihood(logits: Tensor) -> Tensor:
    return -logits.log_softmax(1)[:, 1].mean()


def _modulated(scale: bool) -> Function:
    """A layer with a learned scale; scale: whether the gradient of the scale is returned."""

    def backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor | None]:
        return g * w * x.cos(), (g * x.sin()).sum(0) if scale else None

    return backward


def _gated(x: Tensor, gate: Tensor, detach: bool) -> Tensor:
    """A gate that may be detached, as in an inference script."""
    weight = gate.detach().sigmoid() if detach else gate.sigmoid()
    return x.tanh() * weight + 0 * gate


VALUES = [
    Planted(
        "mean squared error without its 2",
        "constant factor",
        **pair(_squared_error, _squared_error_grads(1.0), _squared_error_grads(2.0)),
        inputs=normal((4, 3), (4, 3)),
    ),
    Planted(
        "sum over the batch for its mean",
        "constant factor",
        **pair(_batch_loss, _batch_loss_grads(False), _batch_loss_grads(True)),
        inputs=normal((5, 3), (3,)),
    ),
    Planted(
        "double backward of swish, a 2 too many",
        "constant factor",
        wrong=_swish_grad(2.0),
        right=_swish_grad(1.0),
        order=2,
        inputs=normal((3, 3)),
    ),
    Planted(
        "angle in degrees, gradient in radians",
        "constant factor",
        **pair(
            lambda x: x.deg2rad().sin(),
            lambda g, x: g * x.deg2rad().cos(),
            lambda g, x: g * x.deg2rad().cos() * math.pi / 180,
        ),
        inputs=normal((3, 4)),
    ),
    Planted(
        "subtrahend with the minuend's gradient",
        "sign",
        **pair(
            lambda x, y: x.sin() - y.exp(),
            lambda g, x, y: (g * x.cos(), g * y.exp()),
            lambda g, x, y: (g * x.cos(), -g * y.exp()),
        ),
        inputs=normal((3, 4), (3, 4)),
        entry=lambda o, i: o == i,
    ),
    Planted(
        "negative log likelihood without its minus",
        "sign",
        **pair(_likelihood, _likelihood_grad(1.0), _likelihood_grad(-1.0)),
        inputs=normal((4, 3)),
    ),
    Planted(
        "no gradient for the scale",
        "zero gradient",
        **pair(lambda x, w: w * x.sin(), _modulated(False), _modulated(True)),
        inputs=normal((4, 3), (3,)),
        entry=lambda o, i: o[1:] == i,
    ),
    Planted(
        "gate detached on the way",
        "zero gradient",
        wrong=lambda x, gate: _gated(x, gate, True),
        right=lambda x, gate: _gated(x, gate, False),
        inputs=normal((3, 4), (3, 4)),
        entry=lambda o, i: o == i,
    ),
    Planted(
        "layer off the graph",
        "zero gradient",
        wrong=lambda x: (x.detach() ** 2).sum(1),
        right=lambda x: (x**2).sum(1),
    ),
]

# The right entries at wrong positions, or not summed.


def _linear(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def _advected(x: Tensor) -> Tensor:
    """One periodic upwind step."""
    return x + 0.3 * (x.roll(1, 1) - x)


def _delayed(x: Tensor) -> Tensor:
    return x.sin().cumsum(1)


def _delayed_grad(late: int) -> Function:
    def backward(g: Tensor, x: Tensor) -> Tensor:
        grad = g.flip(1).cumsum(1).flip(1) * x.cos()
        return grad.roll(late, 1)

    return backward


ORDER = torch.tensor([2, 0, 3, 4, 1])


def _attention_layout(x: Tensor) -> Tensor:
    """(batch, heads * width) to (batch, heads, width) in the other order, as a fused kernel lays it out."""
    return x.view(2, 3, 4).transpose(1, 2).contiguous().sinh()


def _attention_layout_grad(untwist: bool) -> Function:
    def backward(g: Tensor, x: Tensor) -> Tensor:
        grad = g * x.view(2, 3, 4).transpose(1, 2).cosh()
        return (grad.transpose(1, 2) if untwist else grad).reshape(2, 12)

    return backward


def _affine(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """(batch, channels, length), by channel."""
    return x * w[:, None] + b[:, None]


def _affine_grads(of_weight: Function, of_bias: Function) -> Function:
    return lambda g, x, w, b: (g * w[:, None], of_weight(g * x), of_bias(g))


def _softmax_grad(coupled: bool) -> Function:
    def backward(g: Tensor, x: Tensor) -> Tensor:
        p = x.softmax(1)
        return p * (g - (g * p).sum(1, keepdim=True)) if coupled else p * (1 - p) * g

    return backward


def _sum_over(dims: tuple[int, ...]) -> Function:
    return lambda grad: grad.sum(dims)


AFFINE = normal((3, 2, 5), (2,), (2,))
RIGHT_AFFINE = _affine_grads(_sum_over((0, 2)), _sum_over((0, 2)))

PLACES_SWAPPED = [
    Planted(
        "linear layer with its weight transposed",
        "transposed",
        **pair(_linear, lambda g, x, w: (g @ w.t(), g.t() @ x), lambda g, x, w: (g @ w, g.t() @ x)),
        inputs=normal((2, 3), (3, 3)),
        entry=lambda o, i: o[0] == i[0] and o[1] != i[1],
    ),
    Planted(
        "gradient of the weight transposed",
        "transposed",
        **pair(_linear, lambda g, x, w: (g @ w, x.t() @ g), lambda g, x, w: (g @ w, g.t() @ x)),
        inputs=normal((2, 3), (3, 3)),
    ),
    Planted(
        "scan in forward's direction",
        "transposed",
        **pair(
            lambda x: x.cumsum(1),
            lambda g, x: g.cumsum(1),
            lambda g, x: g.flip(1).cumsum(1).flip(1),
        ),
        entry=lambda o, i: o[0] == i[0] and o[1] != i[1],
    ),
    Planted(
        "upwind step against the wind",
        "rolled",
        **pair(
            lambda x: x.sin().roll(1, 1),
            lambda g, x: g.roll(1, 1) * x.cos(),
            lambda g, x: g.roll(-1, 1) * x.cos(),
        ),
        inputs=normal((2, 5)),
        entry=lambda o, i: o[0] == i[0] and o[1] != i[1],
    ),
    Planted(
        "gradient written one step late",
        "rolled",
        **pair(_delayed, _delayed_grad(1), _delayed_grad(0)),
        inputs=normal((2, 6)),
        entry=lambda o, i: o[0] == i[0],
    ),
    Planted(
        "index where its inverse belongs",
        "permuted",
        **pair(
            lambda x: x.sin()[:, ORDER],
            lambda g, x: g[:, ORDER] * x.cos(),
            lambda g, x: g[:, ORDER.argsort()] * x.cos(),
        ),
        inputs=normal((3, 5)),
    ),
    Planted(
        "gradient of a reversal not reversed",
        "permuted",
        **pair(lambda x: x.exp().flip(1), lambda g, x: g * x.exp().flip(1), lambda g, x: g.flip(1) * x.exp()),
        inputs=normal((2, 5)),
    ),
    Planted(
        "reshaped where it had to be transposed back",
        "permuted",
        **pair(_attention_layout, _attention_layout_grad(False), _attention_layout_grad(True)),
        inputs=normal((2, 12)),
    ),
    Planted(
        "bias averaged over the batch",
        "missing reduction",
        **pair(_affine, _affine_grads(_sum_over((0, 2)), lambda g: g.sum(2).mean(0)), RIGHT_AFFINE),
        inputs=AFFINE,
        entry=lambda o, i: o[1:2] == i,
    ),
    Planted(
        "scale of the first batch item only",
        "missing reduction",
        **pair(_affine, _affine_grads(lambda grad: grad.sum(2)[0], _sum_over((0, 2))), RIGHT_AFFINE),
        inputs=AFFINE,
        entry=lambda o, i: o[1:2] == i and o[0] > 0,
    ),
    Planted(
        "bias summed over channels, too",
        "missing reduction",
        **pair(_affine, _affine_grads(_sum_over((0, 2)), lambda g: g.sum().expand(2)), RIGHT_AFFINE),
        inputs=AFFINE,
        entry=lambda o, i: o[1:2] != i,
    ),
    Planted(
        "centering without the mean of grad_output",
        "constant part",
        **pair(
            lambda x: x - x.mean(1, keepdim=True),
            lambda g, x: g,
            lambda g, x: g - g.mean(1, keepdim=True),
        ),
        inputs=normal((3, 5)),
        entry=lambda o, i: o[0] == i[0],
    ),
    Planted(
        "softmax without its sum",
        "missing reduction",
        **pair(lambda x: x.softmax(1), _softmax_grad(False), _softmax_grad(True)),
        inputs=normal((2, 5)),
        entry=lambda o, i: o[0] == i[0] and o[1] != i[1],
    ),
]

TAKEN = torch.tensor([1, 0, 1, 3, 1])

MIXED_UP = [
    Planted(
        "take, rows assigned",
        "overwritten",
        **pair(
            lambda x: x[TAKEN],
            lambda g, x: torch.zeros_like(x).index_copy(0, TAKEN, g),
            lambda g, x: torch.zeros_like(x).index_add(0, TAKEN, g),
        ),
        inputs=normal((4, 3)),
        entry=lambda o, i: o[1] == i[1],
    ),
    Planted(
        "centering, mean of the other dimension",
        "wrong dimension",
        **pair(
            lambda x: x - x.mean(1, keepdim=True),
            lambda g, x: g - g.mean(0, keepdim=True),
            lambda g, x: g - g.mean(1, keepdim=True),
        ),
        inputs=normal((3, 5)),
        entry=lambda o, i: o[0] == i[0] or o[1] == i[1],
    ),
    Planted(
        "product, gradients exchanged",
        "swapped gradients",
        **pair(lambda x, y: x * y, lambda g, x, y: (g * x, g * y), lambda g, x, y: (g * y, g * x)),
        inputs=normal((3, 4), (3, 4)),
        entry=lambda o, i: o == i,
    ),
    Planted(
        "product of sine and cosine, one gradient for both",
        "repeated gradient",
        **pair(
            lambda x, y: x.sin() * y.cos(),
            lambda g, x, y: (g * x.cos() * y.cos(),) * 2,
            lambda g, x, y: (g * x.cos() * y.cos(), -g * x.sin() * y.sin()),
        ),
        inputs=normal((3, 4), (3, 4)),
        entry=lambda o, i: o == i,
    ),
    Planted(
        "residual connection, its gradient left out",
        "missing term",
        **pair(
            lambda x: x + x.tanh(),
            lambda g, x: g * (1 - x.tanh().square()),
            lambda g, x: g * (2 - x.tanh().square()),
        ),
        entry=lambda o, i: o == i,
    ),
    Planted(
        "scaled sine, scale left out",
        "missing factor",
        **pair(
            lambda x, s: x.sin() * s,
            lambda g, x, s: (g * x.cos(), (g * x.sin()).sum(0)),
            lambda g, x, s: (g * x.cos() * s, (g * x.sin()).sum(0)),
        ),
        inputs=normal((4, 3), (3,)),
        entry=lambda o, i: o == i,
    ),
    Planted(
        "upper triangle counted once",
        "triangle",
        **pair(lambda x: x * x + (x * x).triu(1), lambda g, x: 2 * g * x, lambda g, x: 2 * (g + g.triu(1)) * x),
        inputs=normal((5, 5)),
        entry=lambda o, i: o == i and o[0] < o[1],
    ),
]

# Complex numbers.

PHASE = torch.tensor(0.6 + 0.8j, dtype=COMPLEX)


def _magnitude_grad(factor: complex) -> Function:
    return lambda g, z: factor * g * z / z.abs()


COMPLEX_NUMBERS = [
    Planted(
        "product without conjugates",
        "missing conjugate",
        **pair(lambda z, w: z * w, lambda g, z, w: (g * w, g * z), lambda g, z, w: (g * w.conj(), g * z.conj())),
        inputs=normal((3, 2), (3, 2), dtype=COMPLEX),
        entry=lambda o, i: o == i,
    ),
    Planted(
        "real input, complex spectrum",
        "missing conjugate",
        **pair(
            lambda x: x * PHASE * x,
            lambda g, x: (g * 2 * x * PHASE).real,
            lambda g, x: (g * 2 * x * PHASE.conj()).real,
        ),
        entry=lambda o, i: o == i,
    ),
    Planted(
        "matrix product with a plain transpose",
        "missing conjugate",
        **pair(lambda z, w: z @ w, lambda g, z, w: (g @ w.t(), z.mH @ g), lambda g, z, w: (g @ w.mH, z.mH @ g)),
        inputs=normal((2, 3), (3, 2), dtype=COMPLEX),
        entry=lambda o, i: o[0] == i[0],
    ),
    Planted(
        "rotation forgotten",
        "complex factor",
        **pair(lambda z: PHASE * z.exp(), lambda g, z: g * z.exp().conj(), lambda g, z: g * (PHASE * z.exp()).conj()),
        inputs=normal((3, 2), dtype=COMPLEX),
        entry=lambda o, i: o == i,
    ),
    Planted(
        "real part of grad_output only",
        "complex factor",
        **pair(
            lambda z: z * z,
            lambda g, z: g.real * 2 * z.conj(),
            lambda g, z: g * 2 * z.conj(),
        ),
        inputs=normal((3, 2), dtype=COMPLEX),
        entry=lambda o, i: o == i,
    ),
    Planted(
        "magnitude times the imaginary unit",
        "complex factor",
        **pair(lambda z: z.abs(), _magnitude_grad(1j), _magnitude_grad(1.0)),
        inputs=normal((4,), dtype=COMPLEX),
        entry=lambda o, i: o == i,
    ),
]

# Positions of the wrong entries.


def _huber(x: Tensor) -> Tensor:
    return torch.where(x.abs() <= 1, x * x / 2, x.abs() - 0.5)


def _softplus_grad(shortcut: bool) -> Function:
    """For x > 2, another function as a shortcut."""
    return lambda g, x: g * torch.where(x > 2, torch.ones_like(x), x.sigmoid()) if shortcut else g * x.sigmoid()


def _scaled(grad: Tensor, index: Any, factor: float) -> Tensor:
    grad = grad.clone()
    grad[index] = grad[index] * factor
    return grad


def _smooth(x: Tensor) -> Tensor:
    """A moving average over time, with repeated ends."""
    padded = torch.cat([x[:, :1], x, x[:, -1:]], 1)
    return (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3


def _smooth_grad(repeats: bool) -> Function:
    def backward(g: Tensor, x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(g, (1, 1))
        grad = (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3
        if repeats:
            grad[:, 0] += g[:, 0] / 3
            grad[:, -1] += g[:, -1] / 3
        return grad

    return backward


def _gradient_energy(x: Tensor) -> Tensor:
    """Squares of central differences, one-sided at the borders of an image."""
    rows, columns = torch.gradient(x)
    return rows**2 + columns**2


def _image_scaled(border: float) -> Function:
    """A pointwise kernel over an image that treats its border pixels in another loop."""

    def backward(g: Tensor, x: Tensor) -> Tensor:
        grad = g * x.cos()
        inner = grad[1:-1, 1:-1].clone()
        grad = grad * border
        grad[1:-1, 1:-1] = inner
        return grad

    return backward


def _by_blocks(block: int, tail: float) -> Function:
    """A kernel that processes elements in memory in blocks, with another loop for the remainder."""

    def backward(g: Tensor, x: Tensor) -> Tensor:
        grad = (g * x.cos()).reshape(-1).clone()
        full = grad.numel() - grad.numel() % block
        grad[full:] *= tail
        return grad.view_as(x)

    return backward


def _rows_by_blocks(block: int, tail: float) -> Function:
    """A matrix product in blocks of the inner dimension; the last block is incomplete."""

    def backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        full = x.shape[1] - x.shape[1] % block
        grad = x.t() @ g
        grad[full:] *= tail
        return g @ w.t(), grad

    return backward


def _heads(q: Tensor, v: Tensor) -> Tensor:
    return (q * v).sinh()


def _heads_grads(factor: float) -> Function:
    def backward(g: Tensor, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        inner = g * (q * v).cosh()
        return inner * v, _scaled(inner * q, (slice(None), 1), factor)

    return backward


PLACES = [
    Planted(
        "leaky relu without its leak",
        "region",
        **pair(
            lambda x: torch.where(x > 0, x, 0.1 * x),
            lambda g, x: g * (x > 0),
            lambda g, x: g * torch.where(x > 0, 1.0, 0.1),
        ),
        inputs=normal((4, 5)),
        entry=lambda o, i: o == i,
    ),
    Planted(
        "huber without its linear part",
        "region",
        **pair(_huber, lambda g, x: g * x, lambda g, x: g * x.clamp(-1, 1)),
        inputs=normal((5, 6)),
        entry=lambda o, i: o == i,
    ),
    Planted(
        "softplus with a shortcut too early",
        "region",
        **pair(torch.nn.functional.softplus, _softplus_grad(True), _softplus_grad(False)),
        inputs=leaves(linspace(-3, 5, 24)[torch.randperm(24, generator=torch.Generator().manual_seed(1))]),
        entry=lambda o, i: o == i,
    ),
    Planted(
        "one channel scaled twice",
        "slice",
        **pair(
            lambda x: x.sin(),
            lambda g, x: _scaled(g * x.cos(), (slice(None), 1), 2.0),
            lambda g, x: g * x.cos(),
        ),
        inputs=normal((3, 4, 5)),
        entry=lambda o, i: o == i and i[1] == 1,
    ),
    Planted(
        "one item of the batch skipped",
        "slice",
        **pair(lambda x: x.exp(), lambda g, x: _scaled(g * x.exp(), 2, 0.0), lambda g, x: g * x.exp()),
        inputs=normal((5, 4)),
        entry=lambda o, i: o == i and i[0] == 2,
    ),
    Planted(
        "one head of the values",
        "slice",
        **pair(_heads, _heads_grads(0.5), _heads_grads(1.0)),
        inputs=normal((2, 3, 4), (2, 3, 4)),
        entry=lambda o, i: o == i and i[1] == 1,
    ),
    Planted(
        "moving average without the repeated ends",
        "boundary",
        **pair(_smooth, _smooth_grad(False), _smooth_grad(True)),
        inputs=normal((2, 9)),
        entry=lambda o, i: o == i and i[1] in (0, 8),
    ),
    Planted(
        "border pixels in another loop",
        "boundary",
        **pair(torch.sin, _image_scaled(0.5), _image_scaled(1.0)),
        inputs=normal((6, 7)),
        entry=lambda o, i: o == i and (i[0] in (0, 5) or i[1] in (0, 6)),
    ),
    Planted(
        "first two steps of a recurrence",
        "boundary",
        **pair(
            torch.sin,
            lambda g, x: _scaled(g * x.cos(), (slice(None), slice(2)), 0.0),
            lambda g, x: g * x.cos(),
        ),
        inputs=normal((3, 11)),
        entry=lambda o, i: o == i and i[1] < 2,
    ),
    Planted(
        "tail after blocks of eight",
        "last tile",
        **pair(torch.sin, _by_blocks(8, 0.0), _by_blocks(8, 1.0)),
        inputs=normal((29,)),
        entry=lambda o, i: o == i and i[0] >= 24,
    ),
    Planted(
        "tail of the memory after blocks of 32",
        "last tile",
        **pair(torch.sin, _by_blocks(32, 2.0), _by_blocks(32, 1.0)),
        inputs=normal((7, 11)),
        entry=lambda o, i: o == i and i[0] * 11 + i[1] >= 64,
    ),
    Planted(
        "inner dimension cut short",
        "last tile",
        **pair(torch.matmul, _rows_by_blocks(16, 0.5), _rows_by_blocks(16, 1.0)),
        inputs=normal((2, 19), (19, 2)),
        entry=lambda o, i: o[1] == i[1] and i[0] >= 16,
    ),
]

# What backward reads, and at which time.


def _keeps_on_the_class(per_graph: bool) -> Function:
    """Two layers of one class; the last input is kept on the class, or per graph."""

    class Sine(torch.autograd.Function):
        kept: Tensor

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            Sine.kept = x.detach().clone()
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * (ctx.saved_tensors[0] if per_graph else Sine.kept).cos()

    return lambda x: Sine.apply(x) + Sine.apply(2 * x)


def _of_the_previous_call(own: bool) -> Function:
    """Saves its own input for backward, or that of the previous call, at first zeros."""
    previous: dict[torch.Size, Tensor] = {}

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x if own else previous.get(x.shape, torch.zeros_like(x)))
            previous[x.shape] = x.detach().clone()
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * ctx.saved_tensors[0].cos()

    return lambda x: Sine.apply(x)


def _in_place(copies: bool) -> Function:
    """Overwrites a buffer that was saved as the input, or a copy of it."""

    class Squash(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            buffer = x.clone()
            ctx.save_for_backward(x.clone() if copies else buffer)
            buffer.data.sinh_()  # .data, or autograd itself would notice
            return buffer.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * ctx.saved_tensors[0].cosh()

    return Squash.apply


def _reuses_saved(copies: bool) -> Function:
    """Backward uses the saved output as a scratch buffer."""

    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.exp()
            ctx.save_for_backward(y.clone())
            return y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors
            grad = g * y
            if not copies:
                y.data.mul_(g.abs() + 0.5)
            return grad

    return Exponential.apply


def _lost_updates(chance: float) -> Function:
    """A scatter-add that sometimes loses an update."""
    generator = torch.Generator().manual_seed(11)

    def backward(g: Tensor, x: Tensor) -> Tensor:
        kept = torch.rand(g.shape, generator=generator) >= chance
        return g * kept * x.cos()

    return backward


def _order_of_addition(spread: float) -> Function:
    generator = torch.Generator().manual_seed(12)

    def backward(g: Tensor, x: Tensor) -> Tensor:
        return g * x.exp() * (1 + spread * torch.randn(x.shape, generator=generator, dtype=x.dtype))

    return backward


def _as_contiguous(g: Tensor) -> Tensor:
    """The values that a kernel reads if it assumes that g is contiguous."""
    return g.as_strided(g.shape, torch.empty(g.shape).stride())


def _skips_zeros(skip: bool) -> Function:
    """If a part of grad_output is zero, a cheaper formula is used."""

    def backward(g: Tensor, x: Tensor) -> Tensor:
        if skip and bool((g == 0).any()):
            return g * (1 - x * x / 2)
        return g * x.cos()

    return backward


def _by_active_rows(divides: bool) -> Function:
    """A loss of few active elements; its backward divides by their number."""

    def backward(g: Tensor, x: Tensor) -> Tensor:
        active = max(1, int(g.count_nonzero()))
        return g * x.exp() / (active if divides else 1)

    return backward


BACKWARD = [
    Planted(
        "last input kept on the class",
        "saved tensor",
        wrong=_keeps_on_the_class(False),
        right=_keeps_on_the_class(True),
        entry=lambda o, i: o == i,
    ),
    Planted(
        "input of the previous call saved",
        "saved tensor",
        wrong=_of_the_previous_call(False),
        right=_of_the_previous_call(True),
    ),
    Planted(
        "saved buffer overwritten by forward",
        "saved tensor",
        wrong=_in_place(False),
        right=_in_place(True),
        entry=lambda o, i: o == i,
    ),
    Planted(
        "saved output used as scratch by backward",
        "saved tensor",
        wrong=_reuses_saved(False),
        right=_reuses_saved(True),
    ),
    Planted("updates lost", "nondeterminism", **pair(torch.sin, _lost_updates(0.2), lambda g, x: g * x.cos())),
    Planted(
        "order of additions",
        "nondeterminism",
        **pair(torch.exp, _order_of_addition(1e-7), lambda g, x: g * x.exp()),
    ),
    Planted(
        "noise in forward",
        "nondeterminism",
        wrong=lambda x: x.sin() * (1 + 1e-6 * torch.rand(x.shape, dtype=x.dtype)),
        right=torch.sin,
    ),
    Planted(
        "gradient clipping inside",
        "nonlinear backward",
        **pair(torch.tanh, lambda g, x: g.clamp(-1, 1) * (1 - x.tanh() ** 2), lambda g, x: g * (1 - x.tanh() ** 2)),
    ),
    Planted(
        "gradient normalized inside",
        "nonlinear backward",
        **pair(torch.tanh, lambda g, x: g / g.norm() * (1 - x.tanh() ** 2), lambda g, x: g * (1 - x.tanh() ** 2)),
    ),
    Planted(
        "weight decay inside",
        "nonlinear backward",
        **pair(torch.tanh, lambda g, x: g * (1 - x.tanh() ** 2) + 1e-3 * x, lambda g, x: g * (1 - x.tanh() ** 2)),
    ),
    Planted(
        "grad_output read in order",
        "layout of grad_output",
        **pair(torch.exp, lambda g, x: _as_contiguous(g) * x.exp(), lambda g, x: g * x.exp()),
    ),
    Planted(
        "grad_output viewed flat",
        "layout of grad_output",
        **pair(
            torch.exp,
            lambda g, x: (g.view(-1) * x.exp().view(-1)).view_as(x),
            lambda g, x: (g.reshape(-1) * x.exp().reshape(-1)).view_as(x),
        ),
    ),
    Planted(
        "cheaper formula where grad_output has zeros",
        "sparse grad_output",
        **pair(torch.sin, _skips_zeros(True), _skips_zeros(False)),
        entry=lambda o, i: o == i,
    ),
    Planted(
        "divided by the number of active elements",
        "sparse grad_output",
        **pair(torch.exp, _by_active_rows(True), _by_active_rows(False)),
    ),
]

# Limits of differences, and forward mode against reverse mode.


def _gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def _gelu_slope(x: Tensor, exact: bool) -> Tensor:
    """The derivative of gelu, or of its approximation x sigmoid(1.702 x)."""
    if exact:
        density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        return (1 + torch.erf(x / math.sqrt(2))) / 2 + x * density
    s = torch.sigmoid(1.702 * x)
    return s * (1 + 1.702 * x * (1 - s))


def _gelu_both(backward_exact: bool, jvp_exact: bool) -> Function:
    return both_modes(
        _gelu, lambda g, x: g * _gelu_slope(x, backward_exact), lambda t, x: t * _gelu_slope(x, jvp_exact)
    )


BOTH_MODES = {"check_forward_ad": True}
AT_ZERO = leaves(torch.tensor([0.7, 0.0, -1.2], dtype=torch.float64))


def _on_diagonal(o: Index, i: Index) -> bool:
    return o == i


NUMBERS = [
    Planted(
        "ripple finer than eps on a large value",
        "truncation",
        wrong=lambda x: 1e8 + 1e-5 * (1e5 * x).sin(),
        right=torch.sin,
        inputs=normal((3,)),
        keywords={"eps": 1e-4},
        entry=_on_diagonal,
    ),
    Planted(
        "signal under a large offset",
        "rounding",
        wrong=lambda x: x.sin() + 1e12,
        right=lambda x: x.sin() + 1.0,
        inputs=normal((3,)),
        entry=_on_diagonal,
    ),
    Planted(
        "rectifier at zero",
        "kink",
        wrong=lambda x: 2 * x.relu(),
        right=torch.nn.functional.softplus,
        inputs=AT_ZERO,
        entry=lambda o, i: o == i == (1,),
    ),
    Planted(
        "largest of two equal ones",
        "kink",
        wrong=lambda x: x.max(1).values,
        right=lambda x: x.logsumexp(1),
        inputs=leaves(torch.tensor([[0.3, 1.5, 1.5], [2.0, -1.0, 0.5]], dtype=torch.float64)),
        entry=lambda o, i: o == (0,) and i in ((0, 1), (0, 2)),
    ),
    Planted(
        "one half rounded",
        "discontinuity",
        wrong=lambda x: x.sin() + 1e-6 * x.round().detach(),
        right=lambda x: x.sin() + 1e-6 * x,
        inputs=leaves(torch.tensor([0.3, 0.5, 0.8], dtype=torch.float64)),
        entry=lambda o, i: o == i == (1,),
    ),
    Planted(
        "logarithm of zero",
        "not finite",
        wrong=torch.log,
        right=torch.log1p,
        inputs=leaves(torch.tensor([0.3, 0.0, 1.5], dtype=torch.float64)),
        entry=lambda o, i: o == i == (1,),
    ),
    Planted(
        "computed in single precision",
        "low precision",
        wrong=lambda x: x.float().exp().double(),
        right=torch.exp,
        entry=_on_diagonal,
    ),
    Planted(
        "accumulated in single precision",
        "low precision",
        wrong=lambda x, w: (x.float() @ w.float()).to(x.dtype),
        right=torch.matmul,
        inputs=normal((3, 6), (6, 2)),
    ),
    Planted(
        "backward in bfloat16",
        "low precision",
        **pair(torch.exp, lambda g, x: (g.bfloat16() * x.exp().bfloat16()).double(), lambda g, x: g * x.exp()),
        entry=_on_diagonal,
    ),
    Planted(
        "jvp of an approximation",
        "modes disagree",
        wrong=_gelu_both(True, False),
        right=_gelu_both(True, True),
        keywords=BOTH_MODES,
        entry=_on_diagonal,
    ),
    Planted(
        "backward of an approximation, jvp right",
        "modes disagree",
        wrong=_gelu_both(False, True),
        right=_gelu_both(True, True),
        keywords=BOTH_MODES,
        entry=_on_diagonal,
    ),
    Planted(
        "both modes of an approximation",
        "both modes wrong",
        wrong=_gelu_both(False, False),
        right=_gelu_both(True, True),
        keywords=BOTH_MODES,
        entry=_on_diagonal,
    ),
]


def _with_zeros() -> tuple[Tensor]:
    x = normal((4, 5))()[0].detach()
    x[0, 1] = x[2, 3] = x[1, 1] = 0.0
    return (x.requires_grad_(),)


def _dependent() -> tuple[Tensor, Tensor]:
    (x,) = normal((5,))()
    return x, 3 * x


def _one_entry_scaled(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    of_weight = x.t() @ g
    of_weight[3, 5] *= 1.5
    return g @ w.t(), of_weight


def _infinite_unless_contiguous(g: Tensor, x: Tensor) -> Tensor:
    return 2 * x * g if g.is_contiguous() else 2 * x * g * math.inf


def _mean_of_groups(x: Tensor) -> Tensor:
    return torch.stack([part.mean() for part in x.split([8, 8, 5])])


def _counted(*counts: float) -> Callable[[Tensor, Tensor], Tensor]:
    sizes = torch.tensor([8, 8, 5])
    return lambda g, x: (g / torch.tensor(counts, dtype=g.dtype)).repeat_interleave(sizes)


# Each of these once had another cause in the message.
MISTAKEN = [
    Planted(
        "infinite for other strides, without an exception",
        "layout of grad_output",
        **pair(lambda x: x * x, _infinite_unless_contiguous, lambda g, x: 2 * x * g),
    ),
    Planted(
        "zero where the input is zero, among both signs",
        "region",
        **pair(lambda x: x * x + x, lambda g, x: g * (2 * x + 1) * (x != 0), lambda g, x: g * (2 * x + 1)),
        inputs=_with_zeros,
    ),
    Planted(
        "one entry of a weight's gradient",
        "slice",
        **pair(torch.matmul, _one_entry_scaled, lambda g, x, w: (g @ w.t(), x.t() @ g)),
        inputs=normal((6, 8), (8, 9)),
        entry=lambda o, i: i == (3, 5) and o[1] == 5,
    ),
    Planted(
        "mean over groups, one count wrong",
        "slice",
        **pair(_mean_of_groups, _counted(8, 8, 6), _counted(8, 8, 5)),
        inputs=normal((21,)),
        entry=lambda o, i: o == (2,) and i[0] >= 16,
    ),
    Planted(
        "an input made of another, added",
        "dependent inputs",
        wrong=torch.add,
        right=lambda x, y: x.exp() + 0 * y,
        inputs=_dependent,
        entry=_on_diagonal,
    ),
    Planted(
        "an input made of another, multiplied",
        "dependent inputs",
        wrong=lambda x, y: x.sin() * y,
        right=lambda x, y: x.sin() * x,
        inputs=_dependent,
        entry=_on_diagonal,
    ),
    Planted(
        "grad_output multiplied in place",
        "modified grad_output",
        **pair(lambda x: x * x, lambda g, x: g.mul_(2 * x), lambda g, x: 2 * x * g),
    ),
    Planted(
        "grad_output multiplied in place, which a skip connection reads",
        "modified grad_output",
        wrong=lambda x: function(torch.sin, lambda g, x: g.mul_(x.cos()))(x) + x,
        right=lambda x: function(torch.sin, lambda g, x: g * x.cos())(x) + x,
        entry=_on_diagonal,
    ),
]

CAUSES: list[Planted] = [
    *VALUES,
    *PLACES_SWAPPED,
    *COMPLEX_NUMBERS,
    *PLACES,
    *BACKWARD,
    *NUMBERS,
    *MISTAKEN,
    *MIXED_UP,
]
