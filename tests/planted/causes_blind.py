"""Planted errors, each with its cause, by an author who has not read the diagnosis.

With at most 3,000 elements, torch's slow mode passes the correct twins and fails the wrong ones, unless a comment says
otherwise. It cannot check larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastgrad.report.evidence import CauseName
from tests.planted.row import Planted, function, normal

Function = Callable[..., Any]
Inputs = Callable[[], tuple[Any, ...]]
Index = tuple[int, ...]
Entry = Callable[[Index, Index], bool]

DOUBLE = torch.float64
COMPLEX = torch.complex128
FORWARD_MODE = {"check_forward_ad": True}
FAST = {"fast_mode": True}

BLIND: list[Planted] = []


def everywhere(output: Index, input: Index) -> bool:
    return True


def diagonal(output: Index, input: Index) -> bool:
    return output == input


def same_row(output: Index, input: Index) -> bool:
    return output[0] == input[0]


def plant(
    name: str,
    cause: CauseName,
    forward: Function,
    wrong: Function,
    right: Function,
    inputs: Inputs,
    entry: Entry = everywhere,
    order: int = 1,
    **keywords: Any,
) -> None:
    """Adds a function with a wrong backward and its right twin; a backward takes (*grad_outputs, *inputs)."""
    add(name, cause, function(forward, wrong), function(forward, right), inputs, entry, order, **keywords)


def add(
    name: str,
    cause: CauseName,
    wrong: Function,
    right: Function,
    inputs: Inputs,
    entry: Entry = everywhere,
    order: int = 1,
    **keywords: Any,
) -> None:
    BLIND.append(Planted(name, cause, wrong, right, inputs, entry, keywords, order))


def dual(forward: Function, backward: Function, jvp: Function) -> Function:
    """A custom Function with both modes: backward(*grad_outputs, *inputs) and jvp(*tangents, *inputs)."""

    class Dual(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Tensor) -> Any:
            return forward(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
            return backward(*grad_outputs, *ctx.saved_tensors)

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor) -> Any:
            return jvp(*tangents, *ctx.saved_tensors)

    return Dual.apply


def by_autograd(forward: Function) -> Function:
    """A right backward, computed by autograd."""

    def backward(*arguments: Tensor) -> Any:
        inputs = tuple(x.detach().requires_grad_() for x in arguments[1:])
        with torch.enable_grad():
            grads = torch.autograd.grad(forward(*inputs), inputs, arguments[0])
        return grads if len(grads) > 1 else grads[0]

    return backward


def leaves(*tensors: Tensor) -> Inputs:
    """Makes new leaves with these values in every call."""
    return lambda: tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)


def at_values(inputs: Inputs, holds: Callable[[float], bool]) -> Entry:
    """The diagonal entries at inputs whose value satisfies `holds`."""
    values = inputs()[0].detach()
    return lambda output, input: output == input and holds(values[input].item())


def first(inputs: Inputs) -> Tensor:
    return inputs()[0].detach()


def misplaced(right: Function, wrong: Function, shape: Index) -> Entry:
    """The entries of two permutations, of a grad_output of this shape, in which they differ."""
    places = torch.arange(math.prod(shape), dtype=DOUBLE).view(shape)
    return lambda output, input: bool(
        (right(places)[input] == places[output]) != (wrong(places)[input] == places[output])
    )


# Constant factors.

plant(
    "mean squared error, half of it",
    "constant factor",
    lambda x, y: ((x - y) ** 2).mean(),
    lambda g, x, y: (g * (x - y) / x.numel(), -g * (x - y) / x.numel()),
    lambda g, x, y: (2 * g * (x - y) / x.numel(), -2 * g * (x - y) / x.numel()),
    normal((7, 5), (7, 5)),
)

LABELS = torch.tensor([0, 3, 1, 1, 2, 4, 0, 2, 3])


def _cross_entropy_grad(g: Tensor, x: Tensor) -> Tensor:
    return g * (x.softmax(1) - functional.one_hot(LABELS, 5))


plant(
    "cross entropy, not divided by the batch",
    "constant factor",
    lambda x: functional.cross_entropy(x, LABELS),
    _cross_entropy_grad,
    lambda g, x: _cross_entropy_grad(g, x) / 9,
    normal((9, 5)),
)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.t() / q.shape[1] ** 0.5).softmax(-1) @ v


def _attention_grads(g: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, ...]:
    weights = (q @ k.t() / q.shape[1] ** 0.5).softmax(-1)
    of_weights = g @ v.t()
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
    return of_scores @ k * scale, of_scores.t() @ q / q.shape[1] ** 0.5, weights.t() @ g


plant(
    "attention, query's gradient not scaled by the root of the width",
    "constant factor",
    _attention,
    lambda g, q, k, v: _attention_grads(g, q, k, v, 1.0),
    lambda g, q, k, v: _attention_grads(g, q, k, v, 6**-0.5),
    normal((3, 6), (4, 6), (4, 2)),
    same_row,
)
plant(
    "Fourier transform, backward divides by the length",
    "constant factor",
    torch.fft.fft,
    lambda g, z: torch.fft.ifft(g),
    lambda g, z: 8 * torch.fft.ifft(g),
    normal((3, 8), dtype=COMPLEX),
    same_row,
)
plant(
    "softplus, divided by beta once more in backward",
    "constant factor",
    lambda x: functional.softplus(x, beta=3.0),
    lambda g, x: g * (3 * x).sigmoid() / 3,
    lambda g, x: g * (3 * x).sigmoid(),
    normal((30, 100)),
    diagonal,
)


def _cube(double_backward: Function) -> Function:
    inner = function(lambda g, x: 3 * g * x**2, double_backward)
    return function(lambda x: x**3, lambda g, x: inner(g, x))


add(
    "double backward of a cube, half of it",
    "constant factor",
    _cube(lambda h, g, x: (3 * h * x**2, 3 * h * g * x)),
    _cube(lambda h, g, x: (3 * h * x**2, 6 * h * g * x)),
    normal((2, 5)),
    diagonal,
    order=2,
)

# Signs.

plant(
    "difference, subtrahend",
    "sign",
    lambda x, b: x - b,
    lambda g, x, b: (g, g.sum(0)),
    lambda g, x, b: (g, -g.sum(0)),
    normal((6, 4), (4,)),
    lambda output, input: output[1] == input[0],
)
plant(
    "cosine",
    "sign",
    torch.cos,
    lambda g, x: g * x.sin(),
    lambda g, x: -g * x.sin(),
    normal((50_000,)),
    diagonal,
    **FAST,
)


def _dominant() -> tuple[Tensor]:
    return ((normal((5, 5))()[0].detach() + 5 * torch.eye(5, dtype=DOUBLE)).requires_grad_(),)


plant(
    "negative log determinant",
    "sign",
    lambda a: -torch.linalg.slogdet(a)[1],
    lambda g, a: g * a.inverse().t(),
    lambda g, a: -g * a.inverse().t(),
    _dominant,
)

add(
    "log of a sum of exponentials, jvp subtracts",
    "sign",
    dual(lambda x: x.logsumexp(1), by_autograd(lambda x: x.logsumexp(1)), lambda t, x: -(t * x.softmax(1)).sum(1)),
    dual(lambda x: x.logsumexp(1), by_autograd(lambda x: x.logsumexp(1)), lambda t, x: (t * x.softmax(1)).sum(1)),
    normal((4, 5)),
    same_row,
    check_forward_ad=True,
    check_backward_ad=False,
)
add(
    "double backward of a product, second factor's term subtracted",
    "sign",
    function(
        lambda x, y: x * y,
        lambda g, x, y: (
            function(lambda g, y: g * y, lambda h, g, y: (h * y, -h * g))(g, y),
            g * x,
        ),
    ),
    lambda x, y: x * y,
    normal((3, 4), (3, 4)),
    diagonal,
    order=2,
)

# Transposes.

plant(
    "linear layer, weight",
    "transposed",
    lambda x, w: x @ w.t(),
    lambda g, x, w: (g @ w, x.t() @ g),
    lambda g, x, w: (g @ w, g.t() @ x),
    normal((3, 4), (4, 4)),
    lambda output, input: input[0] != input[1] and output[1] in input,
)
plant(
    "batched product, second factor",
    "transposed",
    torch.bmm,
    lambda g, a, b: (g @ b.mT, g.mT @ a),
    lambda g, a, b: (g @ b.mT, a.mT @ g),
    normal((2, 3, 4), (2, 4, 4)),
    lambda output, input: output[0] == input[0] and input[1] != input[2] and output[2] in input[1:],
)
plant(
    "bilinear form, outer product the wrong way round",
    "transposed",
    lambda a, u, v: u @ a @ v,
    lambda g, a, u, v: (g * torch.outer(v, u), g * (a @ v), g * (u @ a)),
    lambda g, a, u, v: (g * torch.outer(u, v), g * (a @ v), g * (u @ a)),
    normal((6, 6), (6,), (6,)),
    lambda output, input: input[0] != input[1],
)
plant(
    "elementwise, gradient written column by column",
    "transposed",
    torch.tanh,
    lambda g, x: (g * (1 - x.tanh() ** 2)).t(),
    lambda g, x: g * (1 - x.tanh() ** 2),
    normal((50, 50)),
    lambda output, input: input[0] != input[1] and output in (input, input[::-1]),
)
plant(
    "elementwise, tiles transposed in place",
    "transposed",
    lambda x: x * x.abs(),
    lambda g, x: (2 * g * x.abs()).view(50, 20, 20).mT.reshape(50, 400),
    lambda g, x: 2 * g * x.abs(),
    normal((50, 400)),
    lambda output, input: (
        output[0] == input[0]
        and input[1] // 20 != input[1] % 20
        and output[1] in (input[1], input[1] % 20 * 20 + input[1] // 20)
    ),
    **FAST,
)

# Shifts.

plant(
    "delay line, backward delays too",
    "rolled",
    lambda x: 1.5 * x.roll(2, -1),
    lambda g, x: 1.5 * g.roll(2, -1),
    lambda g, x: 1.5 * g.roll(-2, -1),
    normal((3, 11)),
    lambda output, input: output[0] == input[0] and (output[1] - input[1]) % 11 in (2, 9),
)


def _circular(x: Tensor, taps: list[float]) -> Tensor:
    """Convolution along the last dimension, periodic, with three taps."""
    return taps[0] * x.roll(1, -1) + taps[1] * x + taps[2] * x.roll(-1, -1)


plant(
    "convolution, output window one place off in backward",
    "rolled",
    lambda x: _circular(x, [0.3, 1.0, -0.7]),
    lambda g, x: _circular(g, [-0.7, 1.0, 0.3]).roll(1, -1),
    lambda g, x: _circular(g, [-0.7, 1.0, 0.3]),
    normal((4, 5000)),
    lambda output, input: output[0] == input[0] and (input[1] - output[1] + 1) % 5000 < 4,
    **FAST,
)
plant(
    "elementwise, pointer one element too far",
    "rolled",
    torch.sin,
    lambda g, x: (g * x.cos()).roll(1),
    lambda g, x: g * x.cos(),
    normal((100_000,)),
    lambda output, input: (input[0] - output[0]) % 100_000 < 2,
    **FAST,
)

# Other permutations.


def _cell(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, 1)
    kept = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return kept, o.sigmoid() * kept.tanh()


def _cell_grads(of_c: Tensor, of_h: Tensor, gates: Tensor, c: Tensor, order: list[int]) -> tuple[Tensor, Tensor]:
    i, f, _, o = (part.sigmoid() for part in gates.chunk(4, 1))
    candidate = gates.chunk(4, 1)[2].tanh()
    kept = f * c + i * candidate
    of_kept = of_c + of_h * o * (1 - kept.tanh() ** 2)
    grads = [
        of_kept * candidate * i * (1 - i),
        of_kept * c * f * (1 - f),
        of_kept * i * (1 - candidate**2),
        of_h * kept.tanh() * o * (1 - o),
    ]
    return torch.cat([grads[k] for k in order], 1), of_kept * f


plant(
    "LSTM cell, candidate's and output gate's gradients swapped",
    "permuted",
    _cell,
    lambda g, h, gates, c: _cell_grads(g, h, gates, c, [0, 1, 3, 2]),
    lambda g, h, gates, c: _cell_grads(g, h, gates, c, [0, 1, 2, 3]),
    normal((3, 8), (3, 2)),
    lambda output, input: same_row(output, input) and input[1] >= 4 and input[1] % 2 == output[1],
)


def _unshuffle_swapped(g: Tensor) -> Tensor:
    n, c, h, w = g.shape
    return g.view(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 5, 3, 2, 4).reshape(n, 4 * c, h // 2, w // 2)


plant(
    "pixel shuffle, the two factors swapped",
    "permuted",
    lambda x: functional.pixel_shuffle(x, 2),
    lambda g, x: _unshuffle_swapped(g),
    lambda g, x: functional.pixel_unshuffle(g, 2),
    normal((2, 8, 2, 3)),
    misplaced(lambda g: functional.pixel_unshuffle(g, 2), _unshuffle_swapped, (2, 2, 4, 6)),
)
SORTABLE = normal((4, 9))
ORDER = first(SORTABLE).argsort(-1)
plant(
    "sort, gradient gathered instead of scattered",
    "permuted",
    lambda x: x.sort(-1).values,
    lambda g, x: g.gather(-1, x.argsort(-1)),
    lambda g, x: torch.zeros_like(x).scatter(-1, x.argsort(-1), g),
    SORTABLE,
    misplaced(lambda g: torch.zeros_like(g).scatter(-1, ORDER, g), lambda g: g.gather(-1, ORDER), (4, 9)),
)


def _heads(x: Tensor) -> Tensor:
    return x.view(2, 5, 3, 2).transpose(1, 2)


plant(
    "heads split, gradient viewed instead of transposed",
    "permuted",
    lambda x: _heads(x).tanh(),
    lambda g, x: g.reshape(2, 5, 6) * (1 - x.tanh() ** 2),
    lambda g, x: g.transpose(1, 2).reshape(2, 5, 6) * (1 - x.tanh() ** 2),
    normal((2, 5, 6)),
    misplaced(lambda g: g.transpose(1, 2).reshape(2, 5, 6), lambda g: g.reshape(2, 5, 6), (2, 3, 5, 2)),
)


def _reshaped(output: Index, input: Index) -> bool:
    """Whether the right and the wrong gradient have different elements of x here."""
    column, row = divmod(5 * input[0] + input[1], 3)
    return (input[0] == output[1]) != (row == output[1]) or (input[0] == row == output[1] and column != input[1])


plant(
    "linear layer, weight reshaped instead of transposed",
    "permuted",
    lambda x, w: x @ w.t(),
    lambda g, x, w: (g @ w, (x.t() @ g).reshape(w.shape)),
    lambda g, x, w: (g @ w, g.t() @ x),
    normal((4, 5), (3, 5)),
    _reshaped,
)

# Sums and means that are missing.

plant(
    "linear layer, bias from the first item of the batch",
    "missing reduction",
    lambda x, w, b: x @ w.t() + b,
    lambda g, x, w, b: (g @ w, g.t() @ x, g[0]),
    lambda g, x, w, b: (g @ w, g.t() @ x, g.sum(0)),
    normal((6, 4), (3, 4), (3,)),
    lambda output, input: output[0] != 0 and output[1] == input[0],
)


def _standardized(x: Tensor, dim: int) -> Tensor:
    return (x - x.mean(dim, keepdim=True)) / (x.var(dim, unbiased=False, keepdim=True) + 1e-5).sqrt()


def _standardized_grad(g: Tensor, x: Tensor, dim: int, mean: float = 1.0, product: float = 1.0) -> Tensor:
    """The gradient, with given multiples of its two means, of g and of g y."""
    y = _standardized(x, dim)
    means = mean * g.mean(dim, keepdim=True) + product * y * (g * y).mean(dim, keepdim=True)
    return (g - means) / (x.var(dim, unbiased=False, keepdim=True) + 1e-5).sqrt()


plant(
    "layer norm, mean of the gradient not subtracted",
    "constant part",
    lambda x: _standardized(x, 1),
    lambda g, x: _standardized_grad(g, x, 1, mean=0.0),
    lambda g, x: _standardized_grad(g, x, 1),
    normal((4, 7)),
    same_row,
)
plant(
    "batch norm, sum of the gradient for its mean",
    "missing reduction",
    lambda x: _standardized(x, 0),
    lambda g, x: _standardized_grad(g, x, 0, mean=8.0),
    lambda g, x: _standardized_grad(g, x, 0),
    normal((8, 3)),
    lambda output, input: output[1] == input[1],
)


def _softmax_grad(g: Tensor, x: Tensor) -> Tensor:
    y = x.softmax(-1)
    return y * (g - (g * y).sum(-1, keepdim=True))


plant(
    "softmax, sum over the classes missing",
    "missing reduction",
    lambda x: x.softmax(-1),
    lambda g, x: g * x.softmax(-1),
    _softmax_grad,
    normal((5, 6)),
    same_row,
)
RECTIFIED = normal((3, 2, 4, 5), (2,))
NEGATIVE = first(RECTIFIED) < 0
plant(
    "PReLU, slope's gradient from the first item of the batch",
    "missing reduction",
    functional.prelu,
    lambda g, x, w: (g * torch.where(x < 0, w.view(-1, 1, 1), 1.0), (g * x.clamp(max=0))[0].sum((1, 2))),
    lambda g, x, w: (g * torch.where(x < 0, w.view(-1, 1, 1), 1.0), (g * x.clamp(max=0)).sum((0, 2, 3))),
    RECTIFIED,
    lambda output, input: output[0] != 0 and output[1] == input[0] and bool(NEGATIVE[output]),
)

# Gradients that are zero.


def _rms(x: Tensor) -> Tensor:
    return (x * x).mean(-1, keepdim=True).add(1e-6).sqrt()


def _rms_grad(g: Tensor, x: Tensor) -> Tensor:
    y = x / _rms(x)
    return (g - y * (g * y).mean(-1, keepdim=True)) / _rms(x)


plant(
    "RMS norm, no gradient for the scale",
    "zero gradient",
    lambda x, w: w * x / _rms(x),
    lambda g, x, w: (_rms_grad(g * w, x), None),
    lambda g, x, w: (_rms_grad(g * w, x), (g * x / _rms(x)).sum(0)),
    normal((4, 6), (6,)),
    lambda output, input: output[1] == input[0],
)
add(
    "gate, detached",
    "zero gradient",
    lambda x, gate: x * gate.detach().sigmoid(),
    lambda x, gate: x * gate.sigmoid(),
    normal((3, 5), (3, 1)),
    same_row,
)


def _value_and_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    return 2 * x, x.norm(dim=1)


# The entries of the first output are right.
plant(
    "second output, grad_output ignored",
    "zero gradient",
    _value_and_norm,
    lambda g, h, x: 2 * g,
    lambda g, h, x: 2 * g + (h / x.norm(dim=1))[:, None] * x,
    normal((4, 3)),
    lambda output, input: len(output) == 1 and same_row(output, input),
)
plant(
    "elementwise product, second factor's gradient left at zero",
    "zero gradient",
    lambda x, y: x * y.tanh(),
    lambda g, x, y: (g * y.tanh(), torch.zeros_like(y)),
    lambda g, x, y: (g * y.tanh(), g * x * (1 - y.tanh() ** 2)),
    normal((20_000,), (20_000,)),
    diagonal,
    **FAST,
)
plant(
    "double backward, output detached",
    "zero gradient",
    torch.sigmoid,
    lambda g, x: g * x.detach().sigmoid() * (1 - x.detach().sigmoid()),
    lambda g, x: g * x.sigmoid() * (1 - x.sigmoid()),
    normal((3, 4)),
    diagonal,
    order=2,
)

# Conjugates.

plant(
    "complex product of matrices, transposed only",
    "missing conjugate",
    torch.matmul,
    lambda g, a, b: (g @ b.t(), a.mH @ g),
    lambda g, a, b: (g @ b.mH, a.mH @ g),
    normal((3, 2), (2, 4), dtype=COMPLEX),
    same_row,
)
plant(
    "complex square",
    "missing conjugate",
    lambda z: z * z,
    lambda g, z: 2 * g * z,
    lambda g, z: 2 * g * z.conj(),
    normal((20, 150), dtype=COMPLEX),
    diagonal,
)
# The matrix of the transform is symmetric, so only the conjugate is missing, except where its entries are real.
plant(
    "Fourier transform for its adjoint",
    "missing conjugate",
    torch.fft.fft,
    lambda g, z: torch.fft.fft(g),
    lambda g, z: 6 * torch.fft.ifft(g),
    normal((2, 6), dtype=COMPLEX),
    lambda output, input: same_row(output, input) and output[1] * input[1] % 3 != 0,
)

# Other complex factors.

plant(
    "imaginary part, factor 1j missing",
    "complex factor",
    lambda z: z.imag,
    lambda g, z: g + 0j,
    lambda g, z: g * 1j,
    normal((3, 4), dtype=COMPLEX),
    diagonal,
)
plant(
    "complex product, real part of the gradient only",
    "complex factor",
    lambda z, w: z * w,
    lambda g, z, w: ((g * w.conj()).real + 0j, g * z.conj()),
    lambda g, z, w: (g * w.conj(), g * z.conj()),
    normal((6,), (6,), dtype=COMPLEX),
    diagonal,
)
MIXER = 0.8 * torch.exp(torch.tensor(0.7j, dtype=COMPLEX))
plant(
    "mixer, phase left out of backward",
    "complex factor",
    lambda z: z * MIXER,
    lambda g, z: 0.8 * g,
    lambda g, z: g * MIXER.conj(),
    normal((30, 50), dtype=COMPLEX),
    diagonal,
)
plant(
    "argument, factor 1j missing",
    "complex factor",
    torch.angle,
    lambda g, z: g * z / z.abs() ** 2,
    lambda g, z: 1j * g * z / z.abs() ** 2,
    normal((11,), dtype=COMPLEX),
    diagonal,
)

# Regions of the input's values.

THIRTY = normal((6, 5))
plant(
    "leaky rectifier, slope forgotten",
    "region",
    lambda x: functional.leaky_relu(x, 0.1),
    lambda g, x: torch.where(x < 0, 0.01 * g, g),
    lambda g, x: torch.where(x < 0, 0.1 * g, g),
    THIRTY,
    at_values(THIRTY, lambda x: x < 0),
)
SIXTY = leaves(2 * first(normal((60,))))
plant(
    "Huber loss, quadratic branch everywhere",
    "region",
    lambda x: functional.huber_loss(x, torch.zeros_like(x), reduction="none"),
    lambda g, x: g * x,
    lambda g, x: g * x.clamp(-1, 1),
    SIXTY,
    at_values(SIXTY, lambda x: abs(x) > 1),
)
MANY = normal((250, 200))
plant(
    "clamp, mask forgotten",
    "region",
    lambda x: x.clamp(-1, 1),
    lambda g, x: g,
    lambda g, x: g * (x.abs() < 1),
    MANY,
    at_values(MANY, lambda x: abs(x) > 1),
    **FAST,
)
plant(
    "ELU, alpha forgotten in backward",
    "region",
    lambda x: functional.elu(x, 1.5),
    lambda g, x: g * torch.where(x < 0, x.exp(), 1.0),
    lambda g, x: g * torch.where(x < 0, 1.5 * x.exp(), 1.0),
    THIRTY,
    at_values(THIRTY, lambda x: x < 0),
)
WIDE = leaves(5 * first(normal((7, 9))))
plant(
    "ReLU6, upper bound forgotten",
    "region",
    functional.relu6,
    lambda g, x: g * (x > 0),
    lambda g, x: g * ((x > 0) & (x < 6)),
    WIDE,
    at_values(WIDE, lambda x: x > 6),
)


def _relative_exponential_grad(g: Tensor, x: Tensor, linear: float) -> Tensor:
    """The gradient of expm1(x) / x: a series near zero, where the quotient cancels."""
    return g * torch.where(x.abs() < 0.1, 0.5 + linear * x + x**2 / 8 + x**3 / 30, (x.exp() - x.expm1() / x) / x)


AROUND_ZERO = leaves(torch.linspace(-0.6, 0.6, 120, dtype=DOUBLE))
plant(
    "series near zero, wrong coefficient",
    "region",
    lambda x: x.expm1() / x,
    lambda g, x: _relative_exponential_grad(g, x, 1 / 6),
    lambda g, x: _relative_exponential_grad(g, x, 1 / 3),
    AROUND_ZERO,
    at_values(AROUND_ZERO, lambda x: abs(x) < 0.1),
)

# Single rows, channels, heads.

LUMA = torch.tensor([[0.299, 0.587, 0.114], [-0.169, -0.331, 0.5], [0.5, -0.419, -0.081]], dtype=DOUBLE)


def _mixed(matrix: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("ij,jhw->ihw", matrix, x)


def _with_typing_error() -> Tensor:
    matrix = LUMA.clone()
    matrix[0, 1] = 0.857
    return matrix


plant(
    "color transform, a typing error in green's weight",
    "slice",
    lambda x: _mixed(LUMA, x),
    lambda g, x: _mixed(_with_typing_error().t(), g),
    lambda g, x: _mixed(LUMA.t(), g),
    normal((3, 12, 10)),
    lambda output, input: output[0] == 0 and input[0] == 1 and output[1:] == input[1:],
)


def _grouped(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bgi,goi->bgo", x, w)


def _grouped_grads(g: Tensor, x: Tensor, w: Tensor, weights: list[int]) -> tuple[Tensor, Tensor]:
    return torch.einsum("bgo,goi->bgi", g, w[weights]), torch.einsum("bgo,bgi->goi", g, x)


plant(
    "grouped linear layer, second group with the first one's weight",
    "slice",
    _grouped,
    lambda g, x, w: _grouped_grads(g, x, w, [0, 0, 2]),
    lambda g, x, w: _grouped_grads(g, x, w, [0, 1, 2]),
    normal((5, 3, 4), (3, 2, 4)),
    lambda output, input: output[:2] == input[:2] and input[1] == 1,
)


def _rms_of_another_item(g: Tensor, x: Tensor) -> Tensor:
    r = _rms(x)
    r[3] = r[0]
    y = x / r
    return (g - y * (g * y).mean(-1, keepdim=True)) / r


plant(
    "RMS norm, one item with another one's root mean square",
    "slice",
    lambda x: x / _rms(x),
    _rms_of_another_item,
    _rms_grad,
    normal((6, 7)),
    lambda output, input: output[0] == input[0] == 3,
)
TEMPERATURES = torch.tensor([0.5, 2.0, 3.0, 0.8], dtype=DOUBLE).view(4, 1, 1)


def _heads_softmax_grad(g: Tensor, x: Tensor, temperatures: Tensor) -> Tensor:
    return temperatures * _softmax_grad(g, TEMPERATURES * x)


plant(
    "temperatures of four heads, one missing in backward",
    "slice",
    lambda x: (TEMPERATURES * x).softmax(-1),
    lambda g, x: _heads_softmax_grad(g, x, torch.tensor([0.5, 2.0, 1.0, 0.8], dtype=DOUBLE).view(4, 1, 1)),
    lambda g, x: _heads_softmax_grad(g, x, TEMPERATURES),
    normal((2, 4, 3, 5)),
    lambda output, input: output[:3] == input[:3] and output[1] == 2,
)
SCALES = torch.linspace(0.5, 2.0, 8, dtype=DOUBLE).view(8, 1, 1)
plant(
    "channel scales, sixth channel with the fifth one's",
    "slice",
    lambda x: SCALES * x.sin(),
    lambda g, x: SCALES[[0, 1, 2, 3, 4, 4, 6, 7]] * g * x.cos(),
    lambda g, x: SCALES * g * x.cos(),
    normal((8, 50, 60)),
    lambda output, input: output == input and output[0] == 5,
)

# First and last places.


def _smoothed(x: Tensor) -> Tensor:
    """A moving average, the first and last values repeated outside."""
    x = torch.cat([x[:, :1], x, x[:, -1:]], 1)
    return (x[:, :-2] + x[:, 1:-1] + x[:, 2:]) / 3


def _smoothed_grad(g: Tensor, fold: bool) -> Tensor:
    padded = functional.pad(g, (2, 2))
    padded = (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3
    grad = padded[:, 1:-1].clone()
    if fold:
        grad[:, 0] += padded[:, 0]
        grad[:, -1] += padded[:, -1]
    return grad


plant(
    "replication padding, its gradient dropped",
    "boundary",
    _smoothed,
    lambda g, x: _smoothed_grad(g, fold=False),
    lambda g, x: _smoothed_grad(g, fold=True),
    normal((3, 40)),
    lambda output, input: output == input and output[1] in (0, 39),
)


def _laplacian(x: Tensor) -> Tensor:
    return x.roll(1, 0) + x.roll(-1, 0) + x.roll(1, 1) + x.roll(-1, 1) - 4 * x


def _laplacian_zero_halo(x: Tensor) -> Tensor:
    x = functional.pad(x, (1, 1, 1, 1))
    return x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:] - 4 * x[1:-1, 1:-1]


plant(
    "periodic stencil, halo of zeros in backward",
    "boundary",
    _laplacian,
    lambda g, x: _laplacian_zero_halo(g),
    lambda g, x: _laplacian(g),
    normal((150, 200)),
    lambda output, input: abs(output[0] - input[0]) == 149 or abs(output[1] - input[1]) == 199,
)


def _slope(x: Tensor) -> Tensor:
    """Central differences, one-sided ones at both ends."""
    return torch.cat([x[1:2] - x[:1], (x[2:] - x[:-2]) / 2, x[-1:] - x[-2:-1]])


def _slope_grad_of_central_ends(g: Tensor, x: Tensor) -> Tensor:
    ends = torch.ones_like(g)
    ends[[0, -1]] = 0.5
    return by_autograd(_slope)(g * ends, x)


plant(
    "central differences, ends taken for interior points",
    "boundary",
    _slope,
    _slope_grad_of_central_ends,
    by_autograd(_slope),
    normal((30,)),
    lambda output, input: output[0] in (0, 29) and abs(output[0] - input[0]) < 2,
)


def _pool(x: Tensor) -> Tensor:
    return functional.avg_pool1d(x, 3, stride=1, padding=1, count_include_pad=False)


plant(
    "average pooling, padding counted in backward only",
    "boundary",
    _pool,
    lambda g, x: functional.avg_pool1d(g, 3, stride=1, padding=1),
    by_autograd(_pool),
    normal((2, 3, 17)),
    lambda output, input: output[:2] == input[:2] and output[2] in (0, 16) and abs(output[2] - input[2]) < 2,
)


def _upsampling(clamped: bool) -> Tensor:
    """Linear interpolation from 9 to 18 points, whose first and last lie outside of the 9."""
    matrix = torch.zeros(18, 9, dtype=DOUBLE)
    for i in range(18):
        near = i // 2
        far = near + (1 if i % 2 else -1)
        matrix[i, near] = 0.75
        if 0 <= far < 9 or clamped:
            matrix[i, min(max(far, 0), 8)] += 0.25
    return matrix


plant(
    "upsampling, neighbors outside not clamped",
    "boundary",
    lambda x: x @ _upsampling(True).t(),
    lambda g, x: g @ _upsampling(False),
    lambda g, x: g @ _upsampling(True),
    normal((4, 9)),
    lambda output, input: same_row(output, input) and output[1] in (0, 17) and input[1] == output[1] // 2,
)

# Tails of tiled kernels.


def _silu_grad(g: Tensor, x: Tensor) -> Tensor:
    s = x.sigmoid()
    return g * s * (1 + x * (1 - s))


def _full_tiles(x: Tensor, block: int) -> Tensor:
    """A copy of x with zeros after the last full block along the last dimension."""
    x = x.clone()
    x[..., x.shape[-1] // block * block :] = 0
    return x


plant(
    "SiLU in blocks of 32, tail never written",
    "last tile",
    functional.silu,
    lambda g, x: _full_tiles(_silu_grad(g, x), 32),
    _silu_grad,
    normal((100,)),
    lambda output, input: output == input and output[0] >= 96,
)


def _rms_grad_of_full_tiles(g: Tensor, x: Tensor) -> Tensor:
    y = x / _rms(x)
    return (g - y * _full_tiles(g * y, 64).mean(-1, keepdim=True)) / _rms(x)


plant(
    "RMS norm, sum over full blocks of 64 only",
    "last tile",
    lambda x: x / _rms(x),
    _rms_grad_of_full_tiles,
    _rms_grad,
    normal((3, 70)),
    lambda output, input: same_row(output, input) and output[1] >= 64,
)


def _tail_unscaled(g: Tensor, x: Tensor) -> Tensor:
    grad = 0.3 * g * x.exp()
    grad[99_328:] /= 0.3
    return grad


plant(
    "exponential in blocks of 1024, tail not scaled",
    "last tile",
    lambda x: 0.3 * x.exp(),
    _tail_unscaled,
    lambda g, x: 0.3 * g * x.exp(),
    normal((100_000,)),
    lambda output, input: output == input and output[0] >= 99_328,
)


def _rows_of_full_tiles(grad: Tensor, block: int) -> Tensor:
    return _full_tiles(grad.t(), block).t()


plant(
    "product in tiles of 16 rows, last 5 rows not computed",
    "last tile",
    lambda x, w: x @ w,
    lambda g, x, w: (_rows_of_full_tiles(g @ w.t(), 16), x.t() @ g),
    lambda g, x, w: (g @ w.t(), x.t() @ g),
    normal((37, 5), (5, 6)),
    lambda output, input: same_row(output, input) and output[0] >= 32,
)


def _suffix_sum(g: Tensor) -> Tensor:
    return g.flip(0).cumsum(0).flip(0)


def _suffix_sum_without_last_carry(g: Tensor) -> Tensor:
    """Suffix sums in blocks of 128; the sum of the incomplete block is not passed on."""
    return torch.cat([_suffix_sum(g[:256]), _suffix_sum(g[256:])])


plant(
    "cumulative sum in blocks of 128, carry of the incomplete one lost",
    "last tile",
    lambda x: x.cumsum(0),
    lambda g, x: _suffix_sum_without_last_carry(g),
    lambda g, x: _suffix_sum(g),
    normal((300,)),
    lambda output, input: output[0] >= 256 > input[0],
)

# Saved tensors.


def _keeps_input(backward: Function) -> Function:
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.x = x.detach()  # not by save_for_backward, which would notice
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return backward(g, ctx.x)

    return Sine.apply


SINE = _keeps_input(lambda g, x: g * x.cos())


def _changed_later(change: float) -> Function:
    """A residual block that adds in place to an activation that the sine has kept."""

    def block(x: Tensor) -> Tensor:
        h = 2 * x
        y = SINE(h)
        h.data.add_(change)
        return y

    return block


add(
    "activation changed in place after it was kept",
    "saved tensor",
    _changed_later(0.5),
    _changed_later(0.0),
    normal((4, 6)),
    diagonal,
)


def _reused_output(dropout: float) -> Function:
    """A tanh that keeps its output, which an in-place layer then changes."""

    class Tanh(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.y = x.tanh()
            y = ctx.y.clone()
            ctx.y.mul_(dropout)
            return y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * (1 - ctx.y**2)

    return Tanh.apply


add(
    "output kept, then scaled in place",
    "saved tensor",
    _reused_output(0.5),
    _reused_output(1.0),
    normal((35,)),
    diagonal,
)


def _scales_what_it_kept(g: Tensor, x: Tensor) -> Tensor:
    grad = g * x.cos()
    x.mul_(0.9)
    return grad


# The first call is right.
add(
    "backward works in place on what forward kept",
    "saved tensor",
    lambda x: _keeps_input(_scales_what_it_kept)(1 * x),
    lambda x: SINE(1 * x),
    normal((3, 7)),
    diagonal,
)


def _workspace(shared: bool) -> Function:
    """Two sigmoid layers that keep their outputs in one buffer, so the first output is overwritten."""

    def layers(x: Tensor) -> tuple[Tensor, Tensor]:
        buffer = torch.empty_like(x)

        class Sigmoid(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.y = buffer.copy_(x.sigmoid()) if shared else x.sigmoid()
                return x.sigmoid()

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Tensor:
                return g * ctx.y * (1 - ctx.y)

        return Sigmoid.apply(x), Sigmoid.apply(3 * x)

    return layers


add(
    "one workspace for two layers",
    "saved tensor",
    _workspace(True),
    _workspace(False),
    normal((5, 8)),
    diagonal,
)

# Emulated races: separate random generators replace the random order of atomic operations.


def _jitter(shape: torch.Size, size: float) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(11)
    return lambda: 1 + size * torch.randn(shape, dtype=DOUBLE, generator=generator)


BINS = torch.tensor([0, 3, 3, 5, 1, 3, 0, 2])
ATOMIC = _jitter(torch.Size([6, 1]), 1e-14)
plant(
    "gather, sums in an order of their own",
    "nondeterminism",
    lambda w: w[BINS],
    lambda g, w: torch.zeros_like(w).index_add(0, BINS, g) * ATOMIC(),
    lambda g, w: torch.zeros_like(w).index_add(0, BINS, g),
    normal((6, 4)),
)


def _updates() -> Function:
    lost = _jitter(torch.Size([5]), 0.3)
    return lambda g, x, w: (g * w, (g * x).sum(0) * lost())


plant(
    "scale's gradient, updates lost",
    "nondeterminism",
    lambda x, w: x * w,
    _updates(),
    lambda g, x, w: (g * w, (g * x).sum(0)),
    normal((9, 5), (5,)),
    nondet_tol=1e-9,
)
UNFINISHED = _jitter(torch.Size([30_000]), 1e-5)
plant(
    "block read before it is finished",
    "nondeterminism",
    lambda x: x * x,
    lambda g, x: 2 * g * x * UNFINISHED(),
    lambda g, x: 2 * g * x,
    normal((30_000,)),
    **FAST,
)

# Backwards that are not linear in grad_output. torch passes all three, because its grad_outputs are one-hot.


def _clipped(g: Tensor) -> Tensor:
    return g / g.norm().clamp(min=1.0)


def _linear_grads(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return g @ w, g.t() @ x


plant(
    "grad_output clipped by its norm",
    "nonlinear backward",
    lambda x, w: x @ w.t(),
    lambda g, x, w: _linear_grads(_clipped(g), x, w),
    _linear_grads,
    normal((5, 3), (4, 3)),
)


def _eight_bits(g: Tensor) -> Tensor:
    step = g.abs().amax().clamp(min=1e-300) / 127
    return (g / step).round() * step


plant(
    "grad_output in eight bits",
    "nonlinear backward",
    torch.tanh,
    lambda g, x: _eight_bits(g) * (1 - x.tanh() ** 2),
    lambda g, x: g * (1 - x.tanh() ** 2),
    normal((20_000,)),
)
plant(
    "signed root of grad_output",
    "nonlinear backward",
    lambda x: x.cumsum(0),
    lambda g, x: _suffix_sum(g.sign() * g.abs().sqrt()),
    lambda g, x: _suffix_sum(g),
    normal((9, 2)),
)

# Memory layouts of grad_output. torch passes both, because its grad_outputs are contiguous.


def _as_if_contiguous(g: Tensor) -> Tensor:
    """The values that a kernel reads if it ignores strides."""
    memory = torch.as_strided(g, (g.untyped_storage().nbytes() // 8 - g.storage_offset(),), (1,))
    return memory[torch.arange(g.numel()) % memory.numel()].view(g.shape)


plant(
    "linear layer, grad_output's strides ignored",
    "layout of grad_output",
    lambda x, w: x @ w.t(),
    lambda g, x, w: _linear_grads(_as_if_contiguous(g), x, w),
    _linear_grads,
    normal((5, 3), (4, 3)),
)
plant(
    "gradient viewed as a vector",
    "layout of grad_output",
    lambda x: x.softmax(-1),
    lambda g, x: _softmax_grad(g.view(-1).view(g.shape), x),
    _softmax_grad,
    normal((4, 3, 5)),
)

# Sparse and dense grad_outputs.


def _rows_that_begin_with_zero_skipped(g: Tensor, x: Tensor) -> Tensor:
    return _softmax_grad(g * (g[:, :1] != 0), x)


plant(
    "rows of grad_output skipped by their first element",
    "sparse grad_output",
    lambda x: x.softmax(-1),
    _rows_that_begin_with_zero_skipped,
    _softmax_grad,
    normal((6, 4)),
    lambda output, input: same_row(output, input) and output[1] != 0,
)


def _first_nonzero(g: Tensor) -> Tensor:
    """Only the first nonzero element of grad_output; zeros elsewhere."""
    flat = g.reshape(-1)
    return torch.where((flat != 0).cumsum(0) == 1, flat, 0.0).view(g.shape)


# torch passes this mistake and the next, because its grad_outputs are one-hot.
plant(
    "one nonzero grad_output taken for granted",
    "sparse grad_output",
    lambda x: x.exp(),
    lambda g, x: _first_nonzero(g) * x.exp(),
    lambda g, x: g * x.exp(),
    normal((7, 3)),
)


def _two_paths(g: Tensor, w: Tensor) -> Tensor:
    """The path for more than three rows is wrong."""
    rows = g.abs().sum(1) != 0
    factor = 2.0 if int(rows.sum()) > 3 else 1.0
    return torch.zeros_like(w).index_add(0, BINS, g) * factor


plant(
    "embedding, path for dense grad_outputs wrong",
    "sparse grad_output",
    lambda w: w[BINS],
    _two_paths,
    lambda g, w: torch.zeros_like(w).index_add(0, BINS, g),
    normal((6, 4)),
)

# Inputs at kinks. The correct twins return the mean of both sides, as central differences do.

WITH_ZEROS = leaves(torch.tensor([[1.0, -2.0, 0.0, 3.0], [0.5, 0.0, -1.0, 2.0]], dtype=DOUBLE))
plant(
    "rectifier at zero",
    "kink",
    torch.relu,
    lambda g, x: g * (x > 0),
    lambda g, x: g * torch.heaviside(x, torch.tensor(0.5, dtype=DOUBLE)),
    WITH_ZEROS,
    at_values(WITH_ZEROS, lambda x: x == 0),
)


def _ties() -> tuple[Tensor]:
    x = torch.arange(12, dtype=DOUBLE).view(3, 4)
    x[1, 2] = x[1, 3]
    return (x.requires_grad_(),)


def _first_maximum_grad(g: Tensor, x: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter(1, x.argmax(1, keepdim=True), g[:, None])


def _shared_maximum_grad(g: Tensor, x: Tensor) -> Tensor:
    largest = (x == x.amax(1, keepdim=True)).to(x.dtype)
    return g[:, None] * largest / largest.sum(1, keepdim=True)


plant(
    "maximum of two equal values, all to the first",
    "kink",
    lambda x: x.amax(1),
    _first_maximum_grad,
    _shared_maximum_grad,
    _ties,
    lambda output, input: output == (1,) and input in ((1, 2), (1, 3)),
)


def _quantized() -> tuple[Tensor]:
    return ((first(normal((20, 30))) * 8).round().div(8).requires_grad_(),)


plant(
    "hinge on quantized scores, some of them on the margin",
    "kink",
    lambda x: (1 - x).clamp(min=0),
    lambda g, x: -g * (x <= 1),
    lambda g, x: -g * torch.heaviside(1 - x, torch.tensor(0.5, dtype=DOUBLE)),
    _quantized,
    at_values(_quantized, lambda x: x == 1),
)

# Not finite.


def _row_of_zeros() -> tuple[Tensor]:
    x = first(normal((3, 4))).clone()
    x[1] = 0.0
    return (x.requires_grad_(),)


add(
    "root of a sum of squares that are all zero",
    "not finite",
    lambda x: x.square().sum(1).sqrt(),
    lambda x: (x.square().sum(1) + 0.01).sqrt(),
    _row_of_zeros,
    lambda output, input: input[:1] == (1,),
)

# Low precision inside.

plant(
    "linear layer, backward in bfloat16",
    "low precision",
    lambda x, w: x @ w.t(),
    lambda g, x, w: ((g.bfloat16() @ w.bfloat16()).double(), (g.bfloat16().t() @ x.bfloat16()).double()),
    _linear_grads,
    normal((5, 6), (4, 6)),
    same_row,
)
plant(
    "elementwise, backward in float32",
    "low precision",
    lambda x: x.exp(),
    lambda g, x: (g.float() * x.float().exp()).double(),
    lambda g, x: g * x.exp(),
    normal((40, 50)),
    diagonal,
    eps=1e-4,
    atol=1e-9,
    rtol=2e-8,
)
add(
    "forward in float32",
    "low precision",
    lambda x: x.float().sin().double(),
    torch.sin,
    normal((3, 5)),
    diagonal,
)
# Products in bfloat16, sums in double: the function is a staircase.
plant(
    "mixed precision, weight rounded",
    "low precision",
    lambda x, w: x @ w.bfloat16().double().t(),
    lambda g, x, w: (g @ w.bfloat16().double(), g.t() @ x),
    lambda g, x, w: (g @ w.bfloat16().double(), 0 * w),
    normal((5, 6), (4, 6)),
    lambda output, input: output[1] == input[0],
)

# Steps that do not suit the function. The gradients are right; only another step or another function helps.

add(
    "large constant in an energy",
    "rounding",
    lambda x: 1e13 + x.sin(),
    lambda x: 1.0 + x.sin(),
    normal((4, 3)),
    diagonal,
)
# Fast mode passes this function, because its steps are larger.
add(
    "large constant in a sum of squares",
    "rounding",
    lambda x: 3e13 + (x * x).sum(),
    lambda x: (x * x).sum(),
    normal((40,)),
)


def _single() -> tuple[Tensor]:
    return normal((7,), dtype=torch.float32)()


# All tensors are float32 and tolerances apply: the dtype is named first. torch also fails the correct twin, because it
# does not divide by the step that was taken.
add(
    "large offset in float32",
    "low precision",
    lambda x: 1e3 + x.sin(),
    torch.sin,
    _single,
    diagonal,
    precision="strict",
)
# eps covers several radians of the oscillation; with eps=1e-3 both pass. torch fails the correct twins of both.
add(
    "oscillation on a large constant",
    "truncation",
    lambda x: 1e11 + (40 * x).sin(),
    lambda x: (40 * x).sin(),
    normal((2, 4)),
    diagonal,
    eps=0.1,
)
add(
    "pulse on a large constant",
    "truncation",
    lambda x: 5e10 + torch.exp(-((15 * x) ** 2)),
    lambda x: torch.exp(-((15 * x) ** 2)),
    leaves(torch.tensor([-0.09, -0.05, 0.02, 0.04, 0.11], dtype=DOUBLE)),
    diagonal,
    eps=0.05,
)

# Modes.


def _standardized_jvp(t: Tensor, x: Tensor, product: float) -> Tensor:
    return _standardized_grad(t, x, 1, product=product)  # its Jacobian is symmetric


def _convolution(x: Tensor, w: Tensor) -> Tensor:
    return functional.conv1d(x, w, padding=1)


def _convolution_grads(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    grad = functional.conv_transpose1d(g, w, padding=1)
    return grad, torch.nn.grad.conv1d_weight(x, w.shape, g, padding=1)


def _standardized_pair(backward_product: float, jvp_product: float) -> Function:
    return dual(
        lambda x: _standardized(x, 1),
        lambda g, x: _standardized_grad(g, x, 1, product=backward_product),
        lambda t, x: _standardized_jvp(t, x, jvp_product),
    )


add(
    "layer norm, jvp takes the deviation for a constant",
    "modes disagree",
    _standardized_pair(1.0, 0.0),
    _standardized_pair(1.0, 1.0),
    normal((4, 7)),
    same_row,
    **FORWARD_MODE,
)
add(
    "layer norm, backward takes the deviation for a constant",
    "modes disagree",
    _standardized_pair(0.0, 1.0),
    _standardized_pair(1.0, 1.0),
    normal((5, 6)),
    same_row,
    **FORWARD_MODE,
)
add(
    "convolution, jvp flips the kernel",
    "modes disagree",
    dual(
        _convolution,
        _convolution_grads,
        lambda s, t, x, w: _convolution(s, w.flip(2)) + _convolution(x, t),
    ),
    dual(
        _convolution,
        _convolution_grads,
        lambda s, t, x, w: _convolution(s, w) + _convolution(x, t),
    ),
    normal((2, 3, 9), (2, 3, 3)),
    lambda output, input: output[0] == input[0] and abs(output[2] - input[2]) == 1,
    **FORWARD_MODE,
)


def _both(forward: Function, slope: Function) -> Function:
    """An elementwise function with one slope for both modes."""
    return dual(forward, lambda g, x: g * slope(x), lambda t, x: t * slope(x))


def _gelu_slope(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / 2**0.5)) + x * torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5


add(
    "GELU by erf, slope of a logistic approximation",
    "both modes wrong",
    _both(
        functional.gelu,
        lambda x: (1.702 * x).sigmoid() * (1 + 1.702 * x * (1 - (1.702 * x).sigmoid())),
    ),
    _both(functional.gelu, _gelu_slope),
    normal((5, 9)),
    diagonal,
    **FORWARD_MODE,
)
add(
    "SiLU, one minus forgotten",
    "both modes wrong",
    _both(functional.silu, lambda x: x.sigmoid() * (1 + x * x.sigmoid())),
    _both(functional.silu, lambda x: x.sigmoid() * (1 + x * (1 - x.sigmoid()))),
    normal((4, 50)),
    diagonal,
    **FORWARD_MODE,
)
