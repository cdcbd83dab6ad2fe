"""Ten kernels of a kind that exists only in lower dtypes, fused and composed, with planted mistakes.

A fused kernel is a torch.autograd.Function that computes in float32 and rounds its results to the dtype of its inputs.
Its composed twin applies torch's operators one after another, and runs in double precision, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Gradients = tuple[Tensor, ...]


@dataclass(frozen=True)
class Kernel:
    """A function with a backward written by hand.

    Attributes
    ----------
    composed
        The function by torch's operators.
    backward
        (grad_output, *inputs, wrong) -> the gradients of the floating inputs; wrong names a mistake, or is empty.
    shapes
        Of the floating inputs, which come first.
    mistakes
        The mistakes of `backward`.
    rest
        Makes the other inputs.
    spread
        The standard deviation of the floating inputs.
    """

    composed: Callable[..., Tensor]
    backward: Callable[..., Gradients]
    shapes: tuple[tuple[int, ...], ...]
    mistakes: tuple[str, ...]
    rest: Callable[[torch.Generator], tuple[Tensor, ...]] = lambda generator: ()
    spread: float = 1.0

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
        """Random ones; the floating ones require grad."""
        generator = torch.Generator().manual_seed(seed)
        made = [self.spread * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes]
        return (*(value.to(dtype).requires_grad_() for value in made), *self.rest(generator))

    def fused(self, mistake: str = "") -> Callable[..., Tensor]:
        """The kernel, right or with one of `mistakes` or of `GENERAL`."""
        kernel, count = self, len(self.shapes)

        class Fused(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Tensor) -> Tensor:
                ctx.save_for_backward(*inputs)
                wide = [value.float() if value.is_floating_point() else value for value in inputs]
                return kernel.composed(*wide).to(inputs[0].dtype)

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:
                inputs = ctx.saved_tensors
                wide = [value.float() if value.is_floating_point() else value for value in inputs]
                own = mistake if mistake in kernel.mistakes else ""
                found = kernel.backward(grad.float(), *wide, own)
                if mistake and not own:
                    found = GENERAL[mistake](found)
                rounded = [value.to(like.dtype) for value, like in zip(found, inputs, strict=False)]
                return (*rounded, *[None] * (len(inputs) - count))

        return Fused.apply  # type: ignore[no-any-return]


def _in_one_entry(factor: float) -> Callable[[Gradients], Gradients]:
    """Changes one entry of the first gradient: the one at the upper quartile."""

    def change(gradients: Gradients) -> Gradients:
        first = gradients[0].clone(memory_format=torch.contiguous_format)
        flat = first.view(-1)
        flat[flat.abs().argsort()[3 * flat.numel() // 4]] *= factor
        return (first, *gradients[1:])

    return change


def _without_last_row(gradients: Gradients) -> Gradients:
    first = gradients[0].clone(memory_format=torch.contiguous_format)
    first[-1] = 0
    return (first, *gradients[1:])


GENERAL: dict[str, Callable[[Gradients], Gradients]] = {
    "zeros": lambda gradients: tuple(torch.zeros_like(value) for value in gradients),
    "one sign": lambda gradients: (-gradients[0], *gradients[1:]),
    "last row left out": _without_last_row,
    "one entry zero": _in_one_entry(0.0),
    "one entry x 1.1": _in_one_entry(1.1),
    "all x 1.01": lambda gradients: tuple(1.01 * value for value in gradients),
}
"""Mistakes that every kernel can have: made in float32, before the results are rounded."""


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def _softmax_backward(g: Tensor, x: Tensor, wrong: str) -> Gradients:
    p = x.softmax(-1)
    inner = (g * p).sum(-1, keepdim=True)
    if wrong == "mean instead of sum":
        inner = inner / x.shape[-1]
    if wrong == "without the sum":
        inner = torch.zeros_like(inner)
    if wrong == "sum over the other dimension":
        inner = (g * p).sum(0, keepdim=True)
    return (p * (g - inner),)


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def _layer_norm_backward(g: Tensor, x: Tensor, w: Tensor, b: Tensor, wrong: str) -> Gradients:
    inverse = (x.var(-1, unbiased=wrong == "unbiased variance", keepdim=True) + 1e-5).rsqrt()
    y = (x - x.mean(-1, keepdim=True)) * inverse
    h = g if wrong == "weight forgotten" else g * w
    mean = 0 if wrong == "mean's term forgotten" else h.mean(-1, keepdim=True)
    slope = 0 if wrong == "variance's term forgotten" else (h * y).mean(-1, keepdim=True)
    of_w = (g * x).sum(0) if wrong == "weight's gradient of raw inputs" else (g * y).sum(0)
    return inverse * (h - mean - y * slope), of_w, g.sum(0)


EPS = 1e-3


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * w


def _rms_norm_backward(g: Tensor, x: Tensor, w: Tensor, wrong: str) -> Gradients:
    eps = 0.0 if wrong == "eps forgotten" else EPS
    inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    y, h = x * inverse, g * w
    slope = (h * y).sum(-1, keepdim=True) if wrong == "sum instead of mean" else (h * y).mean(-1, keepdim=True)
    if wrong == "inverse is constant":
        slope = torch.zeros_like(slope)
    of_w = (g * y)[:-1].sum(0) if wrong == "weight's gradient without the last row" else (g * y).sum(0)
    return inverse * (h - y * slope), of_w


def _gelu_backward(g: Tensor, x: Tensor, wrong: str) -> Gradients:
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    if wrong == "factor of the density":
        density = density * math.sqrt(2)
    phi = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if wrong == "tanh's derivative":
        y = x.detach().requires_grad_()
        with torch.enable_grad():
            (own,) = torch.autograd.grad(F.gelu(y, approximate="tanh").sum(), y)
        return (g * own,)
    if wrong == "sigmoid's approximation":
        s = torch.sigmoid(1.702 * x)
        return (g * (s + 1.702 * x * s * (1 - s)),)
    return (g * (phi if wrong == "without the density" else phi + x * density),)


def _swiglu(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def _swiglu_backward(g: Tensor, x: Tensor, y: Tensor, wrong: str) -> Gradients:
    s = torch.sigmoid(x)
    slope = s * (1 + x * (1 - s))
    if wrong == "gate's slope without x":
        slope = s * (2 - s)
    if wrong == "gate is linear":
        slope = s
    if wrong == "gate and value exchanged":
        return g * x * s, g * y * slope
    return g * y * slope, g * (s if wrong == "silu without x" else x * s)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _scores(q, k).softmax(-1) @ v


def _scores(q: Tensor, k: Tensor) -> Tensor:
    n = q.shape[-2]
    later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(later, -3e4)


def _attention_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, wrong: str) -> Gradients:
    p = _scores(q, k).softmax(-1)
    of_p = g @ v.mT
    inner = (p * of_p).sum(-1, keepdim=True)
    if wrong == "inner product left out":
        inner = torch.zeros_like(inner)
    of_scores = p * (of_p - inner) / math.sqrt(q.shape[-1])
    if wrong == "scale left out":
        of_scores = of_scores * math.sqrt(q.shape[-1])
    if wrong == "diagonal masked":
        of_scores = of_scores.tril(-1)
    of_k = of_scores @ q if wrong == "key's gradient not transposed" else of_scores.mT @ q
    return of_scores @ k, of_k, p.mT @ g


def _angles(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = torch.arange(x.shape[-2], dtype=torch.float64, device=x.device)[:, None] * rates
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _rotary(x: Tensor) -> Tensor:
    cos, sin = _angles(x)
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _rotary_backward(g: Tensor, x: Tensor, wrong: str) -> Gradients:
    cos, sin = _angles(x)
    if wrong == "angle has the wrong sign":
        sin = -sin
    if wrong == "angles one position late":
        cos, sin = cos.roll(1, 0), sin.roll(1, 0)
    left, right = g.chunk(2, -1)
    if wrong == "halves exchanged":
        left, right = right, left
    of_right = right * cos if wrong == "one term left out" else right * cos - left * sin
    return (torch.cat([left * cos + right * sin, of_right], -1),)


SMOOTHING = 0.1


def _cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    logs = x.log_softmax(-1)
    own = logs.gather(-1, target[:, None])[:, 0]
    return -(1 - SMOOTHING) * own - SMOOTHING * logs.mean(-1)


def _cross_entropy_backward(g: Tensor, x: Tensor, target: Tensor, wrong: str) -> Gradients:
    smoothing = 0.0 if wrong == "smoothing forgotten" else SMOOTHING
    classes = x.shape[-1]
    wanted = torch.full_like(x, smoothing / (classes - 1 if wrong == "smoothing over the others" else classes))
    share = 1.0 if wrong == "target's share not reduced" else 1 - smoothing
    wanted = wanted.scatter_add(-1, target[:, None], torch.full_like(x[:, :1], share))
    p = x.softmax(-1)
    if wrong == "target off by one":
        wanted = wanted.roll(1, -1)
    return ((p - wanted) * g[:, None],)


def _split_matmul(a: Tensor, b: Tensor) -> Tensor:
    half = a.shape[-1] // 2
    return a[..., :half] @ b[..., :half, :] + a[..., half:] @ b[..., half:, :]


def _split_matmul_backward(g: Tensor, a: Tensor, b: Tensor, wrong: str) -> Gradients:
    half = a.shape[-1] // 2
    of_a, of_b = g @ b.mT, a.mT @ g
    if wrong == "second part left out":
        of_a = torch.cat([of_a[..., :half], torch.zeros_like(of_a[..., half:])], -1)
    if wrong == "parts exchanged":
        of_a = of_a.roll(half, -1)
    if wrong == "summed over the batch":
        of_b = of_b.sum(0, keepdim=True).expand_as(of_b)
    if wrong == "last column of a tile left out":
        of_b = torch.cat([of_b[..., :-1], torch.zeros_like(of_b[..., -1:])], -1)
    return of_a, of_b


PLACES = 6


def _scatter_add(x: Tensor, w: Tensor, index: Tensor) -> Tensor:
    return x.new_zeros(PLACES, x.shape[1]).index_add(0, index, x * w[:, None])


def _scatter_add_backward(g: Tensor, x: Tensor, w: Tensor, index: Tensor, wrong: str) -> Gradients:
    gathered = g[(index + 1) % PLACES] if wrong == "index off by one" else g[index]
    if wrong == "repeated places divided":
        gathered = gathered / torch.bincount(index, minlength=PLACES)[index][:, None]
    if wrong == "only the last of a place":
        last = torch.zeros(PLACES, dtype=torch.int64).scatter_(0, index, torch.arange(len(index)))
        gathered = gathered * (last[index] == torch.arange(len(index)))[:, None]
    of_w = gathered.sum(-1) if wrong == "weight's gradient without x" else (gathered * x).sum(-1)
    return gathered * w[:, None], of_w


KERNELS = {
    "softmax": Kernel(
        *(_softmax, _softmax_backward, ((8, 24),)),
        ("mean instead of sum", "without the sum", "sum over the other dimension"),
    ),
    "layer norm": Kernel(
        *(_layer_norm, _layer_norm_backward, ((8, 24), (24,), (24,))),
        (
            *("mean's term forgotten", "variance's term forgotten", "weight forgotten"),
            *("weight's gradient of raw inputs", "unbiased variance"),
        ),
    ),
    "RMS norm": Kernel(
        *(_rms_norm, _rms_norm_backward, ((8, 24), (24,))),
        ("eps forgotten", "sum instead of mean", "inverse is constant", "weight's gradient without the last row"),
        spread=0.1,
    ),
    "GELU": Kernel(
        *(F.gelu, _gelu_backward, ((8, 24),)),
        ("factor of the density", "tanh's derivative", "sigmoid's approximation", "without the density"),
    ),
    "SwiGLU": Kernel(
        *(_swiglu, _swiglu_backward, ((8, 24), (8, 24))),
        ("gate's slope without x", "gate is linear", "gate and value exchanged", "silu without x"),
    ),
    "attention": Kernel(
        *(_attention, _attention_backward, ((2, 8, 6), (2, 8, 6), (2, 8, 6))),
        ("inner product left out", "scale left out", "diagonal masked", "key's gradient not transposed"),
    ),
    "rotary embedding": Kernel(
        *(_rotary, _rotary_backward, ((2, 8, 12),)),
        ("angle has the wrong sign", "angles one position late", "halves exchanged", "one term left out"),
    ),
    "cross entropy": Kernel(
        *(_cross_entropy, _cross_entropy_backward, ((8, 24),)),
        ("smoothing forgotten", "smoothing over the others", "target's share not reduced", "target off by one"),
        rest=lambda generator: (torch.randint(24, (8,), generator=generator),),
    ),
    "split matmul": Kernel(
        *(_split_matmul, _split_matmul_backward, ((2, 6, 16), (2, 16, 6))),
        ("second part left out", "parts exchanged", "summed over the batch", "last column of a tile left out"),
    ),
    "scatter-add": Kernel(
        *(_scatter_add, _scatter_add_backward, ((12, 8), (12,))),
        ("index off by one", "repeated places divided", "only the last of a place", "weight's gradient without x"),
        rest=lambda generator: (torch.randint(PLACES, (12,), generator=generator),),
    ),
}
