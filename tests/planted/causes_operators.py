"""Mistakes in backwards of common operators, with their true causes; most were written before the rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.planted.causes_blind import by_autograd, leaves
from tests.planted.row import function, normal

Function = Callable[..., Any]
COMPLEX = torch.complex128
DOUBLE = torch.float64


@dataclass(frozen=True)
class Operator:
    """One mistake. Each of `causes` is right as the first cause. No cause is wrong, unless None is among them."""

    name: str
    causes: tuple[str | None, ...]
    wrong: Function
    right: Function
    inputs: Callable[[], tuple[Any, ...]]


OPERATORS: list[Operator] = []


def plant(name: str, causes: str | None, forward: Function, wrong: Function, inputs: Any) -> None:
    """Adds a mistake of a backward(grad_output, *inputs)."""
    named = tuple(cause.strip() for cause in causes.split("/")) if causes else (None,)
    right = function(forward, by_autograd(forward))
    OPERATORS.append(Operator(name, named, function(forward, wrong), right, inputs))


def as_if(name: str, causes: str | None, forward: Function, other: Function, inputs: Any) -> None:
    """Adds a mistake whose backward is that of another function."""
    plant(name, causes, forward, by_autograd(other), inputs)


def positive(*shapes: tuple[int, ...]) -> Any:
    return leaves(*(x.detach().abs() + 0.5 for x in normal(*shapes)()))


# Normalizations with constant statistics.

as_if(
    "centering, mean detached",
    "detached",
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: x - x.mean(-1, keepdim=True).detach(),
    normal((4, 6)),
)
as_if(
    "layer norm, both statistics detached",
    "detached",
    lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
    lambda x: (x - x.mean(-1, keepdim=True).detach()) / x.std(-1, keepdim=True).detach(),
    normal((3, 7)),
)
as_if(
    "layer norm, variance detached",
    "detached",
    lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
    lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True).detach(),
    normal((3, 5)),
)
as_if(
    "batch norm, statistics of a batch of images detached",
    "detached",
    lambda x: (x - x.mean((0, 2), keepdim=True)) / x.std((0, 2), keepdim=True),
    lambda x: (x - x.mean((0, 2), keepdim=True).detach()) / x.std((0, 2), keepdim=True).detach(),
    normal((4, 3, 5)),
)


def rms(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


plant(
    "rms norm, reciprocal root as a constant",
    "detached",
    lambda x, w: x * rms(x) * w,
    lambda g, x, w: (g * rms(x) * w, (g * x * rms(x)).sum(0)),
    normal((5, 6), (6,)),
)
plant(
    "softmax, elementwise p (1 - p)",
    "missing reduction",
    lambda x: x.softmax(-1),
    lambda g, x: g * x.softmax(-1) * (1 - x.softmax(-1)),
    normal((4, 5)),
)
as_if(
    "unit vectors, norm detached",
    "detached",
    lambda x: x / x.norm(dim=1, keepdim=True),
    lambda x: x / x.norm(dim=1, keepdim=True).detach(),
    normal((6, 3)),
)
plant(
    "weight norm, direction as if the norm were constant",
    "detached",
    lambda v, s: s * v / v.norm(dim=1, keepdim=True),
    lambda g, v, s: (
        g * s / v.norm(dim=1, keepdim=True),
        (g * v / v.norm(dim=1, keepdim=True)).sum(1, keepdim=True),
    ),
    normal((4, 5), (4, 1)),
)
as_if(
    "attention, maximum and sum of the softmax detached",
    "detached",
    lambda s: (s - s.amax(-1, keepdim=True)).exp() / s.exp().sum(-1, keepdim=True),
    lambda s: (s - s.amax(-1, keepdim=True).detach()).exp() / s.exp().sum(-1, keepdim=True).detach(),
    normal((2, 4, 4)),
)
as_if(
    "cosine similarity, norms detached",
    "detached",
    lambda x, y: (x * y).sum(-1) / x.norm(dim=-1) / y.norm(dim=-1),
    lambda x, y: (x * y).sum(-1) / x.norm(dim=-1).detach() / y.norm(dim=-1).detach(),
    normal((4, 5), (4, 5)),
)
as_if(
    "reward minus baseline, baseline detached over the batch",
    "detached",
    lambda r: (r - r.mean(0)) ** 2,
    lambda r: (r - r.mean(0).detach()) ** 2,
    normal((8, 2)),
)

# Sums along another dimension.


def softmax_backward(dim: int, sum_dim: int) -> Function:
    def backward(g: Tensor, x: Tensor) -> Tensor:
        p = x.softmax(dim)
        return p * (g - (g * p).sum(sum_dim, keepdim=True))

    return backward


plant(
    "softmax, inner sum along rows", "wrong dimension", lambda x: x.softmax(1), softmax_backward(1, 0), normal((4, 6))
)
plant(
    "softmax over channels, inner sum over the last",
    "wrong dimension",
    lambda x: x.softmax(1),
    softmax_backward(1, -1),
    normal((2, 3, 4)),
)
as_if(
    "softmax, probabilities recomputed along rows",
    "wrong dimension",
    lambda x: x.softmax(-1),
    lambda x: x.softmax(0),
    normal((5, 5)),
)
plant(
    "log softmax, probabilities of the other dimension",
    "wrong dimension",
    lambda x: x.log_softmax(1),
    lambda g, x: g - x.softmax(1) * g.sum(0, keepdim=True),
    normal((3, 5)),
)
as_if(
    "centering, along the other dimension",
    "wrong dimension",
    lambda x: x - x.mean(1, keepdim=True),
    lambda x: x - x.mean(0, keepdim=True),
    normal((4, 5)),
)
plant(
    "cumulative sum, the other dimension",
    "wrong dimension",
    lambda x: x.cumsum(0),
    lambda g, x: g.flip(1).cumsum(1).flip(1),
    normal((4, 4)),
)

# The gradient of another argument.


def exchanged(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return grads[0], grads[2], grads[1]


plant(
    "product, factors swapped",
    "swapped gradients",
    lambda x, y: x * y,
    lambda g, x, y: (g * x, g * y),
    normal((3, 5), (3, 5)),
)
plant(
    "matmul, results in the wrong order",
    "swapped gradients",
    lambda a, b: a @ b,
    lambda g, a, b: (a.t() @ g, g @ b.t()),
    normal((4, 4), (4, 4)),
)
plant(
    "division, results in the wrong order",
    "swapped gradients",
    lambda x, y: x / y,
    lambda g, x, y: (-g * x / y**2, g / y),
    positive((3, 4), (3, 4)),
)
plant(
    "key and value gradients in the wrong order",
    "swapped gradients",
    lambda q, k, v: (q @ k.t()).softmax(-1) @ v,
    lambda g, q, k, v: exchanged(by_autograd(lambda q, k, v: (q @ k.t()).softmax(-1) @ v)(g, q, k, v)),
    normal((3, 4), (5, 4), (5, 4)),
)
plant(
    "power of a base and exponent, in the wrong order",
    "swapped gradients",
    lambda x, y: x**y,
    lambda g, x, y: (g * x**y * x.log(), g * y * x ** (y - 1)),
    positive((6,), (6,)),
)

# The input in place of the result.

plant("tanh, of the input", "wrong tensor", lambda x: x.tanh(), lambda g, x: g * (1 - x * x), normal((3, 4)))
plant("sigmoid, of the input", "wrong tensor", lambda x: x.sigmoid(), lambda g, x: g * x * (1 - x), normal((3, 4)))
plant("exp, of the input", "wrong tensor", lambda x: x.exp(), lambda g, x: g * x, normal((7,)))
plant("sqrt, of the input", "wrong tensor", lambda x: x.sqrt(), lambda g, x: g / (2 * x), positive((3, 3)))
plant("reciprocal, of the result", "wrong tensor", lambda x: 1 / x, lambda g, x: -g * x**2, positive((4, 3)))

# A factor that was left out.

plant(
    "layer norm, weight left out",
    "missing factor",
    lambda x, w: functional.layer_norm(x, (6,)) * w,
    lambda g, x, w: (
        by_autograd(lambda x: functional.layer_norm(x, (6,)))(g, x),
        (g * functional.layer_norm(x, (6,))).sum(0),
    ),
    normal((3, 6), (6,)),
)
plant(
    "gated unit, gate's gradient without the value",
    "missing factor",
    lambda gate, up: functional.silu(gate) * up,
    lambda g, gate, up: (by_autograd(functional.silu)(g, gate), g * functional.silu(gate)),
    normal((4, 5), (4, 5)),
)
plant(
    "weighted squared error, weight left out",
    "missing factor",
    lambda p, t, w: (w * (p - t) ** 2).sum(),
    lambda g, p, t, w: (2 * g * (p - t), -2 * g * w * (p - t), g * (p - t) ** 2),
    normal((3, 5), (3, 5), (5,)),
)
plant(
    "scale applied twice",
    "extra factor / missing factor",
    lambda x, s: x * s,
    lambda g, x, s: (g * s * s, (g * x).sum(0)),
    normal((4, 3), (3,)),
)
plant("silu, one term of two", "detached", lambda x: x * x.sigmoid(), lambda g, x: g * x.sigmoid(), normal((4, 3)))

# Indices.

INDEX = torch.tensor([2, 0, 2, 4, 0])


def assigned(g: Tensor, table: Tensor) -> Tensor:
    grad = torch.zeros_like(table)
    grad[INDEX] = g
    return grad


plant("embedding, rows assigned", "overwritten", lambda table: table[INDEX], assigned, normal((6, 3)))
PLACES = torch.tensor([[0, 0, 1], [2, 1, 2]])
plant(
    "gather, scattered without adding",
    "overwritten",
    lambda x: x.gather(1, PLACES),
    lambda g, x: torch.zeros_like(x).scatter(1, PLACES, g),
    normal((2, 4)),
)


def frames_assigned(g: Tensor, x: Tensor) -> Tensor:
    grad = torch.zeros_like(x)
    for i in range(g.shape[0]):
        grad[2 * i : 2 * i + 4] = g[i]
    return grad


plant("frames, overlaps assigned", "overwritten", lambda x: x.unfold(0, 4, 2), frames_assigned, normal((12,)))
PERMUTATION = torch.tensor([3, 0, 4, 1, 2])
plant(
    "index_select, the permutation instead of its inverse",
    "permuted / transposed",
    lambda x: x[PERMUTATION],
    lambda g, x: g[PERMUTATION],
    normal((5, 2)),
)
plant("roll, the same shift", "rolled", lambda x: x.roll(2, 1), lambda g, x: g.roll(2, 1), normal((3, 7)))
plant(
    "pixel shuffle, axes in another order",
    "permuted / transposed",
    lambda x: x.view(2, 2, 3, 3).permute(2, 0, 3, 1).reshape(6, 6),
    lambda g, x: g.view(3, 2, 3, 2).permute(3, 1, 0, 2).reshape(4, 3, 3),
    normal((4, 3, 3)),
)
plant(
    "transpose, viewed back",
    "permuted / transposed",
    lambda x: x.t().contiguous(),
    lambda g, x: g.reshape(x.shape),
    normal((3, 5)),
)
plant(
    "grouped heads, repeated in the other order",
    "permuted / transposed / None",
    lambda k: k.repeat_interleave(2, 0),
    lambda g, k: g.view(2, 3, 4).sum(0),
    normal((3, 4)),
)

# Convolutions.

plant(
    "convolution, kernel not flipped",
    "flipped",
    lambda x, w: functional.conv1d(x, w, padding=1),
    lambda g, x, w: (
        functional.conv1d(g, w.transpose(0, 1), padding=1),
        torch.nn.grad.conv1d_weight(x, w.shape, g, padding=1),
    ),
    normal((2, 2, 6), (2, 2, 3)),
)
plant(
    "image convolution, kernel not flipped",
    "flipped",
    lambda x, w: functional.conv2d(x, w, padding=1),
    lambda g, x, w: (
        functional.conv2d(g, w.transpose(0, 1), padding=1),
        torch.nn.grad.conv2d_weight(x, w.shape, g, padding=1),
    ),
    normal((1, 1, 4, 5), (1, 1, 3, 3)),
)
plant(
    "convolution, flipped along one of two dimensions",
    "flipped",
    lambda x, w: functional.conv2d(x, w, padding=1),
    lambda g, x, w: (
        functional.conv2d(g, w.flip(2).transpose(0, 1), padding=1),
        torch.nn.grad.conv2d_weight(x, w.shape, g, padding=1),
    ),
    normal((1, 1, 5, 4), (1, 1, 3, 3)),
)
plant(
    "convolution, weight's gradient flipped",
    "flipped",
    lambda x, w: functional.conv1d(x, w),
    lambda g, x, w: (torch.nn.grad.conv1d_input(x.shape, w, g), torch.nn.grad.conv1d_weight(x, w.shape, g).flip(-1)),
    normal((1, 1, 8), (1, 1, 3)),
)
plant(
    "cumulative sum, not reversed",
    "transposed / flipped",
    lambda x: x.cumsum(0),
    lambda g, x: g.cumsum(0),
    normal((5,)),
)

# Masks and triangles.

TRIANGLE = torch.ones(5, 5, dtype=DOUBLE).tril()
plant("causal scores, mask not applied", "triangle", lambda s: s.tril(), lambda g, s: g, normal((5, 5)))
plant(
    "causal scores, the other triangle",
    "triangle",
    lambda s: (s * TRIANGLE) ** 2,
    lambda g, s: 2 * g * s * TRIANGLE.t(),
    normal((2, 5, 5)),
)
plant(
    "causal scores, diagonal left out", "triangle", lambda s: s.tril() * 3, lambda g, s: 3 * g.tril(-1), normal((5, 5))
)
plant(
    "symmetric part, one triangle only",
    "triangle",
    lambda a: a @ a.t(),
    lambda g, a: (g + g.t()).tril() @ a,
    normal((4, 4)),
)
TARGET = torch.tensor([1, -100, 3, 0, -100, 2])


def nll(x: Tensor) -> Tensor:
    return functional.cross_entropy(x, TARGET)


def nll_backward(g: Tensor, x: Tensor, count: int, masked: bool) -> Tensor:
    grad = x.softmax(1) - functional.one_hot(TARGET.clamp(min=0), 4)
    return g * grad * (TARGET >= 0).unsqueeze(1) / count if masked else g * grad / count


plant(
    "cross entropy, ignored rows have a gradient",
    "slice",
    nll,
    lambda g, x: nll_backward(g, x, 4, False),
    normal((6, 4)),
)
plant(
    "cross entropy, ignored rows counted",
    "constant factor",
    nll,
    lambda g, x: nll_backward(g, x, 6, True),
    normal((6, 4)),
)

# Factors and reductions.

plant(
    "attention, scale left out of one gradient",
    "constant factor",
    lambda q, k: q @ k.t() / 2,
    lambda g, q, k: (g @ k, g.t() @ q / 2),
    normal((3, 4), (5, 4)),
)
plant(
    "variance, divided by n",
    "constant factor",
    lambda x: x.var(1),
    lambda g, x: 2 * g.unsqueeze(1) * (x - x.mean(1, keepdim=True)) / 5,
    normal((3, 5)),
)
plant(
    "bias, mean over the batch",
    "missing reduction / constant factor",
    lambda x, b: x * 2 + b,
    lambda g, x, b: (2 * g, g.mean(0)),
    normal((6, 3), (3,)),
)
plant(
    "bias, first item only",
    "missing reduction / slice",
    lambda x, b: x * 2 + b,
    lambda g, x, b: (2 * g, g[0]),
    normal((6, 3), (3,)),
)
plant(
    "softmax, temperature left out",
    "constant factor",
    lambda x: (x / 3).softmax(-1),
    lambda g, x: by_autograd(lambda z: z.softmax(-1))(g, x / 3),
    normal((3, 4)),
)
plant(
    "divergence, sign",
    "sign",
    lambda p, q: (p * (p.log() - q.log())).sum(),
    lambda g, p, q: (g * (p.log() - q.log() + 1), g * p / q),
    positive((7,), (7,)),
)
plant(
    "bias without a gradient",
    "zero gradient",
    lambda x, b: x.exp() + b,
    lambda g, x, b: (g * x.exp(), torch.zeros_like(b)),
    normal((2, 3), (3,)),
)


# Regions and places.

plant(
    "leaky relu, slope forgotten",
    "region",
    lambda x: functional.leaky_relu(x, 0.2),
    lambda g, x: g * (x > 0),
    normal((5, 6)),
)
plant("hardtanh, gradient outside", "region", lambda x: x.clamp(-1, 1), lambda g, x: g, normal((5, 6)))
plant(
    "huber loss, large errors as small ones",
    "region",
    lambda x: functional.huber_loss(x, torch.zeros_like(x), reduction="none"),
    lambda g, x: g * x,
    normal((6, 6)),
)
plant(
    "pooling, the odd column forgotten",
    "boundary / slice / last tile",
    lambda x: x**2,
    lambda g, x: functional.pad((2 * g * x)[:, : x.shape[1] // 2 * 2], (0, x.shape[1] % 2)),
    normal((4, 7)),
)
plant(
    "tiles of four, last of each forgotten",
    "slice / None",
    lambda x: x**3,
    lambda g, x: 3 * g * x**2 * torch.tensor([1.0, 1, 1, 0], dtype=DOUBLE).repeat(3),
    normal((2, 12)),
)


def scaled_in_place(g: Tensor, x: Tensor, y: Tensor) -> Any:
    return g.mul_(2), g * 3


plant(
    "sum, grad_output scaled in place",
    "modified grad_output",
    lambda x, y: 2 * x + 3 * y,
    scaled_in_place,
    normal((3, 4), (3, 4)),
)
plant(
    "matmul, one entry of a weight gradient scaled",
    "slice",
    lambda x, w: x @ w,
    lambda g, x, w: (
        g @ w.t(),
        (x.t() @ g) * torch.ones_like(w).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(2.0, dtype=DOUBLE)),
    ),
    normal((4, 6), (6, 7)),
)

# Complex numbers.

plant(
    "complex product, no conjugate",
    "missing conjugate",
    lambda x, y: x * y,
    lambda g, x, y: (g * y, g * x.conj()),
    normal((3, 2), (3, 2), dtype=COMPLEX),
)
plant(
    "complex matmul, transposed without conjugate",
    "missing conjugate",
    lambda a, b: a @ b,
    lambda g, a, b: (g @ b.t(), a.mH @ g),
    normal((2, 3), (3, 2), dtype=COMPLEX),
)
plant(
    "squared magnitude, factor of two",
    "constant factor",
    lambda z: (z * z.conj()).real,
    lambda g, z: g * z,
    normal((5,), dtype=COMPLEX),
)
plant(
    "complex exponential, no conjugate",
    "missing conjugate",
    lambda z: z.exp(),
    lambda g, z: g * z.exp(),
    normal((4,), dtype=COMPLEX),
)

# Rotations.


def rotate(x: Tensor, sign: int = 1) -> Tensor:
    angle = torch.arange(4, dtype=DOUBLE).unsqueeze(1) * torch.tensor([0.3, 0.7], dtype=DOUBLE)
    cos, sin = angle.cos(), angle.sin() * sign
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


plant(
    "rotary embedding, rotated forward again", "transposed", lambda x: rotate(x), lambda g, x: rotate(g), normal((4, 4))
)
plant(
    "fourier transform, forward again",
    "missing conjugate",
    lambda z: torch.fft.fft(z),
    lambda g, z: torch.fft.fft(g),
    normal((5,), dtype=COMPLEX),
)
plant("outer product, transposed", "transposed", lambda x: x.t() * 2, lambda g, x: 2 * g, normal((4, 4)))
plant(
    "gelu, the derivative without the density",
    None,
    lambda x: functional.gelu(x),
    lambda g, x: g * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    normal((3, 5)),
)
