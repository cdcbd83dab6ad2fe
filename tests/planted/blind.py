"""Planted errors by an author who has not read the engines: what goes wrong in hand-written gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.planted.row import Row, function, normal

Function = Callable[..., Any]
Inputs = Callable[[], tuple[Any, ...]]

COMPLEX = torch.complex128
LINEAR = "not linear in grad_output"
RAISES = "raises for some"
SECOND_INPUT = "Jacobian mismatch for output 0 with respect to input 1"
SECOND_OUTPUT = "Jacobian mismatch for output 1 with respect to input 0"
IMAGINARY = "While considering the imaginary part of complex outputs only, Jacobian mismatch for output 0"
FORWARD = "Jacobian computed with forward mode mismatch for output 0 with respect to input 0"
FORWARD_SECOND = "Jacobian computed with forward mode mismatch for output 0 with respect to input 1"
REENTRANT = "Backward is not reentrant"
BATCHED = "failed while testing batched gradient computation"


def leaves(*tensors: Tensor) -> Inputs:
    """Makes new leaves with these values and memory layouts in every call."""
    return lambda: tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pair(
    name: str, forward: Function, wrong: Function, right: Function, inputs: Inputs | None = None, **rest: Any
) -> Row:
    """The row of one forward with a wrong and a right backward."""
    rest |= {} if inputs is None else {"inputs": inputs}
    return Row(name, function(forward, wrong), function(forward, right), **rest)


RIGHT_SINE = function(torch.sin, lambda g, x: g * x.cos())


def sine(name: str, wrong: Function, inputs: Inputs | None = None, **rest: Any) -> Row:
    """The row of sin(x) with a wrong backward, for errors that do not depend on the function."""
    rest |= {} if inputs is None else {"inputs": inputs}
    return Row(name, function(torch.sin, wrong), RIGHT_SINE, **rest)


def dual(forward: Function, backward: Function, jvp: Function, materialize: bool = True) -> Function:
    """A custom Function with both modes: backward(*grad_outputs, *inputs) and jvp(*tangents, *inputs)."""

    class Dual(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Any:
            ctx.set_materialize_grads(materialize)
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)
            return forward(*inputs)

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
            return backward(*grad_outputs, *ctx.saved_tensors)

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor) -> Any:
            return jvp(*tangents, *ctx.saved_tensors)

    return Dual.apply


def unmaterialized(forward: Function, backward: Function) -> Function:
    """A custom Function whose backward gets None for an undefined grad_output."""
    return dual(forward, backward, lambda *_: None, materialize=False)


def scaled(grad: Tensor, index: Any, factor: float) -> Tensor:
    """A copy of grad with the part at index multiplied by factor."""
    grad = grad.clone()
    grad[index] = grad[index] * factor
    return grad


# Values: the wrong formula, or the right one in the wrong place.


def _one_negative() -> Tensor:
    x = 0.1 + torch.linspace(0, 2, 200, dtype=torch.float64)
    x[131] = -1.0
    return x


SQUARE = normal((3, 3))
CUBE_SHAPED = normal((2, 3, 4))

VALUES = [
    pair(
        "product rule, one term",
        lambda x: x * x.sin(),
        lambda g, x: g * x * x.cos(),
        lambda g, x: g * (x.sin() + x * x.cos()),
    ),
    sine("flipped", lambda g, x: (g * x.cos()).flip(0)),
    sine("transposed gradient", lambda g, x: (g * x.cos()).t(), SQUARE),
    sine("permuted channels", lambda g, x: (g * x.cos())[:, [1, 0, 2]], CUBE_SHAPED),
    sine("last of four hundred", lambda g, x: scaled(g * x.cos(), -1, 0.0), normal((400,))),
    sine("last item of a batch", lambda g, x: scaled(g * x.cos(), -1, -1.0), normal((5, 2, 3))),
    pair(
        "one negative input of two hundred",
        lambda x: torch.where(x > 0, x, 0.1 * x),
        lambda g, x: torch.where(x > 0, g, 0 * g),
        lambda g, x: torch.where(x > 0, g, 0.1 * g),
        leaves(_one_negative()),
    ),
    sine("one element is not a number", lambda g, x: scaled(g * x.cos(), (1, 2), float("nan"))),
]

# Structure: entries of the Jacobian that are missing, or that should not be there.


def _coupled(x: Tensor) -> Tensor:
    y = x.sin()
    y[0] += 0.01 * x[-1]
    return y


def _coupled_grad(g: Tensor, x: Tensor) -> Tensor:
    grad = g * x.cos()
    grad[-1] += 0.01 * g[0]
    return grad


def _reversed_cumsum(g: Tensor) -> Tensor:
    return g.flip(0).cumsum(0).flip(0)


TAKEN = torch.tensor([0, 3, 3, 5, 1, 3])


def _taken(accumulate: bool) -> Function:
    return lambda g, x: torch.zeros_like(x).index_put((TAKEN,), g, accumulate=accumulate)


def _conv(x: Tensor, w: Tensor) -> Tensor:
    return torch.conv1d(x, w, padding=1)


def _conv_grads(g: Tensor, x: Tensor, w: Tensor, flip: bool = True) -> tuple[Tensor, Tensor]:
    kernel = w.transpose(0, 1).flip(2) if flip else w.transpose(0, 1)
    return _conv(g, kernel), torch.nn.grad.conv1d_weight(x, w.shape, g, padding=1)


def _standardized(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0, unbiased=False)


def _standardized_grad(g: Tensor, x: Tensor) -> Tensor:
    y = _standardized(x)
    return (g - g.mean(0) - y * (g * y).mean(0)) / x.std(0, unbiased=False)


STRUCTURE = [
    pair("hidden coupling", _coupled, lambda g, x: g * x.cos(), _coupled_grad, normal((60,))),
    # The rows and columns of the error sum to zero, so a probe with ones does not detect it.
    sine("phantom coupling that cancels", lambda g, x: g * x.cos() + 0.01 * (g.roll(1) - g.roll(2)), normal((40,))),
    pair("centering dropped", lambda x: x - x.mean(), lambda g, x: g, lambda g, x: g - g.mean(), normal((40,))),
    pair(
        "softmax diagonal only",
        lambda x: x.softmax(-1),
        lambda g, x: g * x.softmax(-1) * (1 - x.softmax(-1)),
        lambda g, x: x.softmax(-1) * (g - (g * x.softmax(-1)).sum(-1, keepdim=True)),
    ),
    pair(
        "cumulative sum, direction",
        lambda x: x.cumsum(0),
        lambda g, x: g.cumsum(0),
        lambda g, x: _reversed_cumsum(g),
        normal((20,)),
    ),
    pair("duplicates overwritten", lambda x: x[TAKEN], _taken(False), _taken(True), normal((6,))),
    pair(
        "convolution not flipped",
        _conv,
        lambda g, x, w: _conv_grads(g, x, w, flip=False),
        _conv_grads,
        normal((2, 2, 4), (2, 2, 3)),
    ),
    pair(
        "batch norm without the variance",
        _standardized,
        lambda g, x: (g - g.mean(0)) / x.std(0, unbiased=False),
        _standardized_grad,
        normal((6, 2)),
    ),
    sine("leak across the batch", lambda g, x: g * x.cos() + 2e-3 * g.sum(0, keepdim=True), normal((8, 3))),
    pair(
        "broadcast: wrong dimension",
        lambda x, b: x * b,
        lambda g, x, b: (g * b, (g * x).sum(1)),
        lambda g, x, b: (g * b, (g * x).sum(0)),
        normal((3, 3), (3,)),
        phrase=SECOND_INPUT,
    ),
]

# Tensors that forward keeps for backward.


def _changed_after_saving(change: bool) -> Function:
    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            kept = x.exp()
            ctx.save_for_backward(kept)
            if change:
                kept.data.mul_(1.5)  # .data, or autograd itself would notice
            return x.exp()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * ctx.saved_tensors[0]

    return Exponential.apply


def _kept_by_the_class(x: Tensor) -> Tensor:
    """sin(x) + sin(2x); both calls keep their input in the same place, and the second input remains."""
    kept: list[Tensor] = []

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            kept[:] = [x.detach().clone()]
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * kept[0].cos()

    return Sine.apply(x) + Sine.apply(2 * x)


def _scale_in_place(g: Tensor, x: Tensor) -> Tensor:
    return g.mul_(x.cos())


def _mutable_sine(backward: Function) -> Function:
    """The sum passes the same tensor to both terms; because of the product, this is not the caller's grad_output."""
    custom = function(torch.sin, backward)
    return lambda x: 1.5 * (2 * x + custom(x))


SAVED = [
    pair("input taken for the output", torch.exp, lambda g, x: g * x, lambda g, x: g * x.exp()),
    Row("changed after saving", _changed_after_saving(True), _changed_after_saving(False)),
    Row(
        "saved by the class",
        _kept_by_the_class,
        lambda x: RIGHT_SINE(x) + RIGHT_SINE(2 * x),
    ),
    Row("writes into grad_output", _mutable_sine(_scale_in_place), _mutable_sine(lambda g, x: g * x.cos())),
]

# Several inputs and outputs, unusual shapes and memory layouts.


def _sine_and_cosine(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.cos()


def _both(g: Tensor, h: Tensor, x: Tensor) -> Tensor:
    return g * x.cos() - h * x.sin()


def _in_place(slope: float) -> Function:
    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.mul_(3)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return slope * g

    return lambda x: Triple.apply(x.clone())


def _transposed_leaf() -> tuple[Tensor]:
    return (normal((4, 3))()[0].detach().t().requires_grad_(),)


def _memory(x: Tensor) -> Tensor:
    """The values that code reads if it assumes that x is contiguous."""
    return x.detach().as_strided(x.shape, torch.empty(x.shape).stride())


SEVERAL = [
    pair("outputs swapped", _sine_and_cosine, lambda g, h, x: h * x.cos() - g * x.sin(), _both),
    pair(
        "third input only",
        lambda x, y, z: x * y * z,
        lambda g, x, y, z: (g * y * z, g * x * z, g * x),
        lambda g, x, y, z: (g * y * z, g * x * z, g * x * y),
        normal((3,), (3,), (3,)),
        phrase="Jacobian mismatch for output 0 with respect to input 2",
    ),
    pair(
        "none for an input that matters",
        lambda x, y: x * y,
        lambda g, x, y: (g * y, None),
        lambda g, x, y: (g * y, g * x),
        normal((4,), (4,)),
        phrase=SECOND_INPUT,
    ),
    sine("a single number", lambda g, x: g * x.sin(), leaves(torch.tensor(0.4, dtype=torch.float64))),
    pair(
        "beside an empty input",
        lambda x, y: x.sum() + y.exp(),
        lambda g, x, y: (g.sum().expand(x.shape), g),
        lambda g, x, y: (g.sum().expand(x.shape), g * y.exp()),
        normal((0, 3), (4,)),
        phrase=SECOND_INPUT,
    ),
    # Autograd sums a gradient over an extra dimension without an error.
    sine("a dimension too many", lambda g, x: torch.stack([g * x.cos(), g * x.cos()])),
    sine("gradient in bfloat16", lambda g, x: (g * x.cos()).bfloat16(), keywords={"check_grad_dtypes": True}),
    sine(
        "sparse gradient for a dense input", lambda g, x: (g * x.cos()).to_sparse(), phrase="grad is incorrect layout"
    ),
    sine("input's memory read in order", lambda g, x: g * _memory(x).cos(), _transposed_leaf),
    Row("in place", _in_place(2.0), _in_place(3.0)),
]

# How backward uses grad_output.


def _raises_for_both(g: Tensor, h: Tensor, x: Tensor) -> Tensor:
    if g.any() and h.any():
        raise RuntimeError("one gradient at a time")
    return _both(g, h, x)


# Each of these is the identity for one-hot grad_outputs.
SINGLE = {
    "grad_output cubed": lambda g: g**3,
    "grad_output quantized": lambda g: (4 * g).round() / 4,
    "leaky for negative grad_output": lambda g: torch.where(g < 0, 0.5 * g, g),
    "largest grad_output only": lambda g: g * (g.abs() == g.abs().max()),
    "by the sign of grad_output's sum": lambda g: g * (1.0 if g.sum() >= 0 else 1.5),
    "product of neighboring grad_outputs": lambda g: g + g * g.roll(1, -1),
}
# Each of these is the sum of grad_output for one-hot grad_outputs.
REDUCED = {
    "maximum for sum": lambda g: g.amax(),
    "compounded for sum": lambda g: (g + 1).prod() - 1,
}
# The last argument is the input. Each of the two grad_outputs alone gives the right gradient.
JOINT = {
    "product of two grad_outputs": lambda g, h, x: _both(g, h, x) + g * h,
    "second grad_output replaces the first": lambda g, h, x: _both(0 * g if h.any() else g, h, x),
}


def _dense_only(g: Tensor, x: Tensor) -> Tensor:
    return g * x.cos() * (1.0 if bool((g != 0).all()) else 1.1)


def _expanded_wrong(g: Tensor, x: Tensor) -> Tensor:
    return g * x.cos() * (1.1 if 0 in g.stride() else 1.0)


UNSEEN = {"phrase": LINEAR, "torch_sees": False}

GRAD_OUTPUT = [
    *(sine(name, lambda g, x, change=change: change(g) * x.cos(), **UNSEEN) for name, change in SINGLE.items()),
    *(
        pair(
            name,
            lambda x: x.sin().expand(6) * 1,
            lambda g, x, reduce=reduce: reduce(g) * x.cos(),
            lambda g, x: g.sum() * x.cos(),
            leaves(torch.tensor(0.4, dtype=torch.float64)),
            **UNSEEN,
        )
        for name, reduce in REDUCED.items()
    ),
    *(pair(name, _sine_and_cosine, wrong, _both, **UNSEEN) for name, wrong in JOINT.items()),
    pair("raises for two grad_outputs", _sine_and_cosine, _raises_for_both, _both, phrase=RAISES, torch_sees=False),
    # torch checks the real and the imaginary part of the output separately.
    pair(
        "real part times imaginary part",
        lambda z: z * z,
        lambda g, z: 2 * (g + g.real * g.imag) * z.conj(),
        lambda g, z: 2 * g * z.conj(),
        normal((4,), dtype=COMPLEX),
        **UNSEEN,
    ),
    # The grad_output from a sum is expanded: all elements share one place in memory.
    sine("wrong for an expanded grad_output", _expanded_wrong, **UNSEEN),
    sine("right for dense only", _dense_only),
    pair(
        "not multiplied, second input",
        lambda x, y: x.sin() + 0 * y,
        lambda g, x, y: (g * x.cos(), torch.full_like(y, 1e-6)),
        lambda g, x, y: (g * x.cos(), 0 * g),
        normal((4,), (4,)),
        phrase="backward not multiplied by grad_output",
    ),
]

# Gradients that are undefined: backward gets None.


def _raises_for_none(g: Tensor | None, x: Tensor) -> Tensor:
    if g is None:
        raise RuntimeError("grad_output is undefined")
    return g * x.cos()


def _ones_for_none(g: Tensor | None, x: Tensor) -> Tensor:
    return x.cos() if g is None else g * x.cos()


def _none_for_none(g: Tensor | None, x: Tensor) -> Tensor | None:
    return None if g is None else g * x.cos()


def _both_or_none(g: Tensor | None, h: Tensor | None, x: Tensor) -> Tensor:
    return (0 * x if g is None else g * x.cos()) - (0 * x if h is None else h * x.sin())


def _first_or_one(g: Tensor | None, h: Tensor | None, x: Tensor) -> Tensor:
    return _both_or_none(torch.ones_like(x) if g is None else g, h, x)


RIGHT_UNDEFINED = unmaterialized(torch.sin, _none_for_none)

UNDEFINED = [
    Row(
        "raises for an undefined grad_output",
        unmaterialized(torch.sin, _raises_for_none),
        RIGHT_UNDEFINED,
        phrase="Expected backward function to handle undefined output grads",
    ),
    Row(
        "one for an undefined grad_output",
        unmaterialized(torch.sin, _ones_for_none),
        RIGHT_UNDEFINED,
        phrase="Expected all input grads to be undefined or zero",
    ),
    Row(
        "one for the undefined of two",
        unmaterialized(_sine_and_cosine, _first_or_one),
        unmaterialized(_sine_and_cosine, _both_or_none),
        phrase=SECOND_OUTPUT,
    ),
]

# Determinism. Counters are periodic, so the result of a row does not depend on earlier checks.


def _turning(factors: list[float]) -> Function:
    """Multiplies the gradient by the next factor in every call."""
    turn = itertools.cycle(factors)
    return lambda g, x: g * x.cos() * next(turn)


def _random_for_the_last(g: Tensor, x: Tensor) -> Tensor:
    grad = g * x.cos()
    return grad * (1 + 1e-9 * torch.rand(()).item()) if g[-1] != 0 else grad


def _accumulating() -> Function:
    total = torch.zeros(7, dtype=torch.float64)
    return lambda g, x: total.add_(g * x.cos()).clone()


SEVEN = normal((7,))
MOVES = {"phrase": REENTRANT}

DETERMINISM = [
    sine("random for the last row only", _random_for_the_last, normal((100,)), **MOVES),
    sine("every second call, seven rows", _turning([1.0, 1 + 1e-9]), SEVEN, **MOVES),
    # With twelve rows, torch runs each row twice with the same factor.
    sine("every second call, twelve rows", _turning([1.0, 1 + 1e-9]), torch_sees=False, **MOVES),
    sine("far off at every fifth call", _turning([1.0, 1.0, 1.0, 1.0, 2.0]), SEVEN, **MOVES),
    sine("accumulates over calls", _accumulating(), SEVEN, **MOVES),
    pair(
        "random for the second output",
        _sine_and_cosine,
        lambda g, h, x: g * x.cos() - h * x.sin() * (1 + 1e-9 * torch.rand(()).item()),
        _both,
        **MOVES,
    ),
]

# Kinks, with inputs well away from them.

AROUND_ZERO = leaves(double(-2.3, -1.2, -0.3, 0.2, 0.4, 1.7))

KINKS = [
    pair("threshold moved", torch.relu, lambda g, x: g * (x > 0.3), lambda g, x: g * (x > 0), AROUND_ZERO),
    pair("straight through", torch.round, lambda g, x: g, lambda g, x: 0 * g, AROUND_ZERO),
    pair(
        "clamp's mask inverted",
        lambda x: x.clamp(-1, 1),
        lambda g, x: g * (x.abs() > 1),
        lambda g, x: g * (x.abs() < 1),
        AROUND_ZERO,
    ),
]

# Magnitudes and conditioning.

# The matrix has condition number 9e3 and is not symmetric, so its transpose is different.
STEEP = torch.tensor([[1.0, 0.5, 0.26], [0.5, 0.3, 0.2], [0.25, 0.2, 0.1695]], dtype=torch.float64)

MAGNITUDES = [
    pair(
        "growing to ten to the ten",
        torch.exp,
        lambda g, x: 1.01 * g * x.exp(),
        lambda g, x: g * x.exp(),
        leaves(double(0, 7, 15, 23)),
    ),
    pair(
        "tiny, with atol to match",
        lambda x: 1e-7 * x.sin(),
        lambda g, x: -1e-7 * g * x.cos(),
        lambda g, x: 1e-7 * g * x.cos(),
        keywords={"atol": 1e-12},
    ),
    pair(
        "badly conditioned system",
        lambda b: torch.linalg.solve(STEEP, b),
        lambda g, b: torch.linalg.solve(STEEP, g),
        lambda g, b: torch.linalg.solve(STEEP.t(), g),
        normal((3,)),
    ),
]

# Complex numbers.


def _times_modulus_grad(g: Tensor, z: Tensor) -> Tensor:
    return g * z.abs() + z * (g.conj() * z).real / z.abs()


FOUR_COMPLEX = normal((4,), dtype=COMPLEX)


def _real_and_complex() -> tuple[Tensor, Tensor]:
    return normal((4,))()[0], FOUR_COMPLEX()[0]


CONJUGATES = [
    pair(
        "product, one conjugate missing",
        lambda x, y: x * y,
        lambda g, x, y: (g * y.conj(), g * x),
        lambda g, x, y: (g * y.conj(), g * x.conj()),
        normal((4,), (4,), dtype=COMPLEX),
        phrase="with respect to input 1",
    ),
    pair(
        "real part of grad_output only",
        lambda z: z * (2 + 1j),
        lambda g, z: g.real * (2 - 1j),
        lambda g, z: g * (2 - 1j),
        FOUR_COMPLEX,
        phrase=IMAGINARY,
    ),
    pair(
        "complex to real, conjugate",
        lambda z: z.abs() ** 2,
        lambda g, z: 2 * g * z.conj(),
        lambda g, z: 2 * g * z,
        FOUR_COMPLEX,
    ),
    pair(
        "real input, complex weight",
        lambda x, w: x * w,
        lambda g, x, w: ((g * w).real, g * x),
        lambda g, x, w: ((g * w.conj()).real, g * x),
        _real_and_complex,
        phrase=IMAGINARY,
    ),
    pair(
        "not holomorphic, half of it",
        lambda z: z * z.abs(),
        lambda g, z: g * z.abs(),
        _times_modulus_grad,
        FOUR_COMPLEX,
    ),
    pair(
        "Fourier transform for its adjoint",
        torch.fft.fft,
        lambda g, z: torch.fft.fft(g),
        lambda g, z: 5 * torch.fft.ifft(g),
        normal((5,), dtype=COMPLEX),
    ),
]

# Second order: the gradient is right, but the second derivative is wrong.


def cube(double_backward: Function, double_jvp: Function | None = None) -> Function:
    """x**3 whose gradient is a custom Function with this backward (h, g, x) and jvp (tangents of g and x, g, x)."""

    def right_jvp(g_dot: Tensor, x_dot: Tensor, g: Tensor, x: Tensor) -> Tensor:
        return 3 * x**2 * g_dot + 6 * x * g * x_dot

    first = dual(lambda g, x: 3 * g * x**2, double_backward, double_jvp or right_jvp)
    return dual(lambda x: x**3, lambda g, x: first(g, x), lambda x_dot, x: 3 * x**2 * x_dot)


def complex_cube(double_backward: Function) -> Function:
    first = function(lambda g, z: 3 * g * z.conj() ** 2, double_backward)
    return function(lambda z: z**3, lambda g, z: first(g, z))


def _cube_grads(h: Tensor, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return 3 * h * x**2, 6 * h * g * x


def _complex_cube_grads(h: Tensor, g: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return 3 * h * z**2, 6 * h.conj() * g * z.conj()


FOUR = normal((4,))
RIGHT_CUBE = cube(_cube_grads)
RIGHT_COMPLEX_CUBE = complex_cube(_complex_cube_grads)


def second(name: str, wrong: Function, **rest: Any) -> Row:
    return Row(name, cube(wrong), RIGHT_CUBE, FOUR, order=2, **rest)


def second_pair(name: str, forward: Function, wrong: Function, right: Function, inputs: Inputs, **rest: Any) -> Row:
    return pair(name, forward, wrong, right, inputs, order=2, **rest)


def _kept_off_the_graph(keep: bool) -> Function:
    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.exp()
            ctx.save_for_backward(y)
            ctx.y = y.clone()
            return y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * (ctx.y if keep else ctx.saved_tensors[0])

    return Exponential.apply


SECOND_ORDER = [
    second("double backward, one element", lambda h, g, x: (3 * h * x**2, scaled(6 * h * g * x, 1, 1.5))),
    second("double backward, none for grad_output", lambda h, g, x: (None, 6 * h * g * x), phrase=SECOND_INPUT),
    second("double backward, clamped", lambda h, g, x: _cube_grads(h.clamp(-1, 1), g, x), **UNSEEN),
    second(
        "double backward, random",
        lambda h, g, x: (3 * h * x**2, 6 * h * g * x * (1 + 1e-9 * torch.rand(()).item())),
        **MOVES,
    ),
    Row("double backward off the graph", _kept_off_the_graph(True), _kept_off_the_graph(False), FOUR, order=2),
    second_pair(
        "double backward, input detached",
        lambda x: x**3,
        lambda g, x: 3 * g * x.detach() ** 2,
        lambda g, x: 3 * g * x**2,
        FOUR,
    ),
    second_pair(
        "double backward, cross term",
        lambda x, y: x**2 * y,
        lambda g, x, y: (2 * g * x * y.detach(), g * x**2),
        lambda g, x, y: (2 * g * x * y, g * x**2),
        normal((4,), (4,)),
        phrase=SECOND_INPUT,
    ),
    second_pair(
        "double backward, second gradient",
        lambda x, w: x @ w,
        lambda g, x, w: (g @ w.t(), x.detach().t() @ g),
        lambda g, x, w: (g @ w.t(), x.t() @ g),
        normal((2, 3), (3, 2)),
        phrase=SECOND_OUTPUT,
    ),
    second_pair(
        "double backward, hidden coupling",
        lambda x: x.sin() + x.sum() ** 2 / 2,
        lambda g, x: g * x.cos() + g.sum() * x.sum().detach(),
        lambda g, x: g * x.cos() + g.sum() * x.sum(),
        normal((10,)),
    ),
    Row(
        "double backward, missing conjugate",
        complex_cube(lambda h, g, z: (3 * h * z**2, 6 * h * g * z.conj())),
        RIGHT_COMPLEX_CUBE,
        FOUR_COMPLEX,
        order=2,
        phrase=IMAGINARY,
    ),
    Row(
        "double backward, complex grad_output",
        complex_cube(lambda h, g, z: (3 * h * z.conj() ** 2, 6 * h.conj() * g * z.conj())),
        RIGHT_COMPLEX_CUBE,
        FOUR_COMPLEX,
        order=2,
        phrase="with respect to input 1",
    ),
]

# Forward mode.

FORWARD_MODE = {"check_forward_ad": True}


def sine_jvp(name: str, jvp: Function, inputs: Inputs | None = None, **rest: Any) -> Row:
    """The row of sin(x) with a right backward and a wrong jvp(tangent, input)."""
    right = dual(torch.sin, lambda g, x: g * x.cos(), lambda t, x: t * x.cos())
    rest = {"keywords": FORWARD_MODE, "phrase": FORWARD} | rest | ({} if inputs is None else {"inputs": inputs})
    return Row(name, dual(torch.sin, lambda g, x: g * x.cos(), jvp), right, **rest)


def dual_pair(
    name: str, forward: Function, backward: Function, wrong: Function, right: Function, inputs: Inputs, **rest: Any
) -> Row:
    """The row of one function with a right backward, a wrong and a right jvp."""
    rest = {"keywords": FORWARD_MODE, "phrase": FORWARD} | rest
    return Row(name, dual(forward, backward, wrong), dual(forward, backward, right), inputs, **rest)


def _dense_raises(t: Tensor, x: Tensor) -> Tensor:
    if int((t != 0).sum()) > 1:
        raise RuntimeError("one tangent at a time")
    return t * x.cos()


def _product_jvp(s: Tensor | None, t: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
    return (0 * x if s is None else s * y) + (0 * y if t is None else x * t)


def _product(jvp: Function) -> Function:
    """The product; its jvp gets None for an undefined tangent."""

    def backward(g: Tensor | None, x: Tensor, y: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if g is None else (g * y, g * x)

    return dual(lambda x, y: x * y, backward, jvp, materialize=False)


def _no_backward(*_: Any) -> None:
    raise RuntimeError("no backward")


NOT_LINEAR_JVP = {
    "jvp squares the tangent": lambda t: t * t,
    "jvp drops the tangent's negative part": lambda t: t.relu(),
}

JVPS = [
    sine_jvp("jvp factor", lambda t, x: 1.01 * t * x.cos()),
    sine_jvp("jvp one element", lambda t, x: scaled(t * x.cos(), (1, 2), 1.5)),
    sine_jvp(
        "jvp of complex dtype",
        lambda t, x: t * x.cos() + 0j,
        keywords={**FORWARD_MODE, "check_grad_dtypes": True},
        phrase="Forward AD gradient has dtype mismatch",
    ),
    *(
        sine_jvp(name, lambda t, x, change=change: change(t) * x.cos(), phrase="not linear in", torch_sees=False)
        for name, change in NOT_LINEAR_JVP.items()
    ),
    sine_jvp("jvp raises for a dense tangent", _dense_raises, phrase=RAISES, torch_sees=False),
    Row(
        "jvp right, backward wrong",
        dual(torch.sin, lambda g, x: g * x.sin(), lambda t, x: t * x.cos()),
        dual(torch.sin, lambda g, x: g * x.cos(), lambda t, x: t * x.cos()),
        keywords=FORWARD_MODE,
    ),
    Row(
        "jvp alone",
        dual(torch.sin, _no_backward, lambda t, x: t * x.sin()),
        dual(torch.sin, _no_backward, lambda t, x: t * x.cos()),
        keywords={**FORWARD_MODE, "check_backward_ad": False},
        phrase=FORWARD,
    ),
    dual_pair(
        "jvp transposes the weight",
        lambda x, w: x @ w,
        lambda g, x, w: (g @ w.t(), x.t() @ g),
        lambda s, t, x, w: s @ w.t() + x @ t,
        lambda s, t, x, w: s @ w + x @ t,
        normal((2, 3), (3, 3)),
    ),
    dual_pair(
        "jvp of the second input missing",
        lambda x, y: x * y,
        lambda g, x, y: (g * y, g * x),
        lambda s, t, x, y: s * y,
        lambda s, t, x, y: s * y + x * t,
        normal((4,), (4,)),
        phrase=FORWARD_SECOND,
    ),
    dual_pair(
        "jvp wrong in the second output",
        _sine_and_cosine,
        _both,
        lambda t, x: (t * x.cos(), t * x.sin()),
        lambda t, x: (t * x.cos(), -t * x.sin()),
        FOUR,
        phrase="Jacobian computed with forward mode mismatch for output 1 with respect to input 0",
    ),
    dual_pair(
        "jvp of a product of tangents",
        lambda x, y: x * y,
        lambda g, x, y: (g * y, g * x),
        lambda s, t, x, y: s * y + x * t + s * t,
        lambda s, t, x, y: s * y + x * t,
        normal((4,), (4,)),
        phrase="not linear in",
        torch_sees=False,
    ),
    Row(
        "jvp one for an undefined tangent",
        _product(lambda s, t, x, y: _product_jvp(s, torch.ones_like(y) if t is None else t, x, y)),
        _product(_product_jvp),
        normal((4,), (4,)),
        keywords=FORWARD_MODE,
        phrase="Mismatch in tangent values for output",
    ),
    dual_pair(
        "jvp with a conjugate too many",
        lambda z: z * z,
        lambda g, z: 2 * g * z.conj(),
        lambda t, z: 2 * t * z.conj(),
        lambda t, z: 2 * t * z,
        FOUR_COMPLEX,
        phrase="While considering the imaginary part of complex inputs only, " + FORWARD,
    ),
    dual_pair(
        "jvp real to complex",
        lambda x: torch.complex(x.sin(), x.cos()),
        lambda g, x: g.real * x.cos() - g.imag * x.sin(),
        lambda t, x: torch.complex(t * x.cos(), t * x.sin()),
        lambda t, x: torch.complex(t * x.cos(), -t * x.sin()),
        FOUR,
    ),
]


def forward_over_reverse(name: str, jvp: Function, **rest: Any) -> Row:
    keywords = {"check_fwd_over_rev": True}
    return Row(name, cube(_cube_grads, jvp), RIGHT_CUBE, FOUR, order=2, keywords=keywords, **rest)


FORWARD_OVER_REVERSE = [
    forward_over_reverse(
        "forward over reverse, input", lambda s, t, g, x: 3 * x**2 * s + 3 * x * g * t, phrase=FORWARD
    ),
    forward_over_reverse(
        "forward over reverse, grad_output", lambda s, t, g, x: x**2 * s + 6 * x * g * t, phrase=FORWARD_SECOND
    ),
]

# Batched gradients: single ones are right, batches are wrong.


def _skips_zeros(g: Tensor, x: Tensor) -> Tensor:
    return g * x.cos() if g.abs().sum().item() else torch.zeros_like(x)


def _approximate_when_batched(g: Tensor, x: Tensor) -> Tensor:
    try:
        g.data_ptr()
    except RuntimeError:
        return g * (1 - x**2 / 2)
    return g * x.cos()


IN_BATCHES = {"check_batched_grad": True}

BATCHES = [
    sine("batched: reads a number", _skips_zeros, keywords=IN_BATCHES, phrase="While computing batched gradients"),
    sine("batched: an approximation", _approximate_when_batched, keywords=IN_BATCHES, phrase=BATCHED),
    second(
        "batched: double backward",
        lambda h, g, x: (3 * h * x**2, 6 * g * x * h if h.any() else 0 * x),
        keywords=IN_BATCHES,
        phrase=BATCHED,
    ),
    sine_jvp(
        "batched: jvp reads a number",
        _skips_zeros,
        keywords={**FORWARD_MODE, "check_batched_forward_grad": True},
        phrase="While computing batched gradients",
    ),
    sine_jvp(
        "batched: jvp an approximation",
        _approximate_when_batched,
        keywords={**FORWARD_MODE, "check_batched_forward_grad": True},
        phrase="batched gradient computation with forward-mode AD",
    ),
]

# Sparse inputs. Torch's own check of undefined gradients cannot compare sparse ones.

MASKED = {"masked": True, "check_undefined_grad": False}
UNMASKED = {"masked": False, "check_undefined_grad": False}


def _coo() -> tuple[Tensor]:
    indices = torch.tensor([[0, 1, 2, 2], [1, 0, 0, 2]])
    return (torch.sparse_coo_tensor(indices, double(0.5, -1, 2, 0.8), (3, 3), is_coalesced=True).requires_grad_(),)


def _hybrid() -> tuple[Tensor]:
    values = torch.stack([double(0.5, -1.0), double(2.0, 0.8)])
    return (torch.sparse_coo_tensor([[0, 2]], values, (3, 2), is_coalesced=True).requires_grad_(),)


def _csr() -> tuple[Tensor]:
    return (_coo()[0].detach().to_sparse_csr().requires_grad_(),)


def _bsr() -> tuple[Tensor]:
    dense = normal((4, 4))()[0].detach()
    dense[:2, 2:] = 0
    return (dense.to_sparse_bsr((2, 2)).requires_grad_(),)


def _coo_and_dense() -> tuple[Tensor, Tensor]:
    return (*_coo(), *normal((3, 2))())


def _slope(g: Tensor, s: Tensor) -> Tensor:
    """The gradient of sin(s), also at the zeros of s."""
    return g * s.to_dense().cos()


def _masked_slope(g: Tensor, s: Tensor) -> Tensor:
    return _slope(g, s).sparse_mask(s)


def _columns_rolled(g: Tensor, s: Tensor) -> Tensor:
    values = _masked_slope(g, s).values()
    return torch.sparse_csr_tensor(s.crow_indices(), torch.tensor([0, 1, 1, 2]), values, s.shape)


def _blocks(g: Tensor, s: Tensor, transpose: bool) -> Tensor:
    rows, columns = torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1])
    values = _slope(g, s).unflatten(0, (2, 2)).unflatten(2, (2, 2)).transpose(1, 2)[rows, columns]
    values = values.transpose(1, 2) if transpose else values
    return torch.sparse_bsr_tensor(s.crow_indices(), s.col_indices(), values, s.shape)


def sparse(name: str, wrong: Function, right: Function, inputs: Inputs, keywords: dict[str, Any], **rest: Any) -> Row:
    """The row of sin(s) for a sparse s, with a dense result."""
    return pair(name, lambda s: s.to_dense().sin(), wrong, right, inputs, keywords=keywords, **rest)


SPARSE = [
    sparse("sparse values", lambda g, s: 1.1 * _masked_slope(g, s), _masked_slope, _coo, MASKED),
    sparse("sparse pattern too narrow", _masked_slope, lambda g, s: _slope(g, s).to_sparse(), _coo, UNMASKED),
    sparse("dense gradient for a masked sparse input", _slope, _masked_slope, _coo, MASKED),
    sparse(
        "sparse dimensions",
        lambda g, s: _slope(g, s).to_sparse(1),
        lambda g, s: _slope(g, s).to_sparse(2),
        _coo,
        UNMASKED,
        phrase="grad is sparse tensor, but has incorrect sparse_dim",
    ),
    sparse(
        "sparse rows, second column",
        lambda g, s: scaled(_slope(g, s), (slice(None), 1), 1.1).to_sparse(1),
        lambda g, s: _slope(g, s).to_sparse(1),
        _hybrid,
        UNMASKED,
    ),
    pair(
        "sparse times dense",
        lambda s, w: s.to_dense() @ w,
        lambda g, s, w: ((g @ w.t()).sparse_mask(s), s.to_dense() @ g),
        lambda g, s, w: ((g @ w.t()).sparse_mask(s), s.to_dense().t() @ g),
        _coo_and_dense,
        keywords=MASKED,
        phrase=SECOND_INPUT,
    ),
    sparse("CSR columns", _columns_rolled, _masked_slope, _csr, MASKED),
    sparse(
        "COO gradient for a CSR input",
        lambda g, s: _slope(g, s).to_sparse(),
        lambda g, s: _slope(g, s).to_sparse_csr(),
        _csr,
        UNMASKED,
        phrase="grad is incorrect layout",
    ),
    sparse("BSR blocks transposed", lambda g, s: _blocks(g, s, True), lambda g, s: _blocks(g, s, False), _bsr, MASKED),
]

ROWS: list[Row] = [
    *VALUES,
    *STRUCTURE,
    *SAVED,
    *SEVERAL,
    *GRAD_OUTPUT,
    *UNDEFINED,
    *DETERMINISM,
    *KINKS,
    *MAGNITUDES,
    *CONJUGATES,
    *SECOND_ORDER,
    *JVPS,
    *FORWARD_OVER_REVERSE,
    *BATCHES,
    *SPARSE,
]
