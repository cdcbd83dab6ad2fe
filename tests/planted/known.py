"""Planted errors by authors who know the engines: classes of mistakes, and difficult cases for each engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.planted.row import Row, function, normal


def square(backward: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """The function x * x with a given backward."""
    return function(lambda x: x * x, backward)


RIGHT_SQUARE = square(lambda g, x: 2 * x * g)


def _element(g: Tensor, x: Tensor) -> Tensor:
    grad = 2 * x * g
    grad[1, 2] += 0.1 * g[1, 2]
    return grad


def moves_every_third_call(calls: int = 0) -> Callable[[Tensor, Tensor], Tensor]:
    """A backward of x * x; calls: the number of calls that it assumes."""

    def backward(g: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return 2 * x * g * (1 + 1e-9 * (calls % 3 == 0))

    return backward


def _contiguous_only(g: Tensor, x: Tensor) -> Tensor:
    storage = g.as_strided(g.shape, torch.empty(g.shape).stride())
    return 2 * x * storage


def _needs_contiguous(g: Tensor, x: Tensor) -> Tensor:
    return (2 * x).view(-1).mul(g.view(-1)).view_as(x)


def _dense_wrong(g: Tensor, x: Tensor) -> Tensor:
    return 2 * x * g * (1.0 if int((g != 0).sum()) <= 1 else 1.01)


def _mutates(g: Tensor, x: Tensor) -> Tensor:
    grad = 2 * x * g
    x.data.mul_(1.001)
    return grad


LINEAR = "not linear in grad_output"
RAISES = "raises for some grad_outputs"
PHRASES = {
    "clamp": lambda g, x: 2 * x * g.clamp(-1, 1),
    "square": lambda g, x: 2 * x * g * g,
    "absolute value": lambda g, x: 2 * x * g.abs(),
    "sign of grad_output": lambda g, x: 2 * x * g.sign(),
    "positive part": lambda g, x: 2 * x * g.relu(),
}

ROWS = [
    Row("sign", square(lambda g, x: -2 * x * g), RIGHT_SQUARE),
    Row("factor", square(lambda g, x: x * g), RIGHT_SQUARE, phrase="the factor 2 is missing"),
    Row("small factor", square(lambda g, x: 2.01 * x * g), RIGHT_SQUARE),
    Row("zero", square(lambda g, x: 0 * g), RIGHT_SQUARE, phrase="every wrong analytical entry is zero"),
    Row("none", square(lambda g, x: None), RIGHT_SQUARE),  # type: ignore[arg-type, return-value]
    Row("rolled", square(lambda g, x: (2 * x * g).roll(1, 1)), RIGHT_SQUARE),
    Row("one element", square(_element), RIGHT_SQUARE, phrase="d out0[1, 2] / d in0[1, 2]"),
    Row("negative inputs only", square(lambda g, x: 2 * x * g * torch.where(x < 0, 1.1, 1.0)), RIGHT_SQUARE),
    Row(
        "one channel",
        square(lambda g, x: 2 * x * g * torch.tensor([1.0, 1, 1, 2], device=g.device).double()),
        RIGHT_SQUARE,
    ),
    Row("extra term", square(lambda g, x: 2 * x * g + 1e-3), RIGHT_SQUARE),
    Row(
        "transposed weight",
        function(lambda a, b: a @ b, lambda g, a, b: (g @ b, a.t() @ g)),
        function(lambda a, b: a @ b, lambda g, a, b: (g @ b.t(), a.t() @ g)),
        inputs=normal((2, 3), (3, 3)),
    ),
    Row(
        "second input",
        function(lambda a, b: a * b, lambda g, a, b: (g * b, g * a * 1.5)),
        torch.mul,
        inputs=normal((3,), (3,)),
        phrase="Jacobian mismatch for output 0 with respect to input 1",
    ),
    Row(
        "broadcast: mean for sum",
        function(lambda a, b: a + b, lambda g, a, b: (g, g.mean(0))),
        torch.add,
        inputs=normal((2, 3), (3,)),
        phrase="with respect to input 1",
    ),
    Row(
        "second output",
        function(lambda a: (a.sin(), a.cos()), lambda g, h, a: g * a.cos() + h * a.sin()),
        lambda a: (a.sin(), a.cos()),
        inputs=normal((4,)),
        phrase="Jacobian mismatch for output 1 with respect to input 0",
    ),
    Row(
        "ignores grad_output",
        square(lambda g, x: 2 * x),
        RIGHT_SQUARE,
    ),
    Row(
        "not multiplied, constant function",
        function(lambda x: x.sum() * 0, lambda g, x: torch.zeros_like(x) + 1e-6),
        lambda x: x.sum() * 0,
        phrase="backward not multiplied by grad_output",
    ),
    Row(
        "nondeterministic",
        square(lambda g, x: 2 * x * g * (1 + 1e-9 * torch.rand(()).item())),
        RIGHT_SQUARE,
        phrase="Backward is not reentrant",
    ),
    # torch runs all 12 rows, then all again. Because 12 is a multiple of 3, both runs give the same values.
    Row(
        "nondeterministic every third call",
        square(moves_every_third_call()),
        RIGHT_SQUARE,
        phrase="Backward is not reentrant",
        torch_sees=False,
    ),
    Row("mutates what it saved", square(_mutates), RIGHT_SQUARE, phrase="Backward is not reentrant"),
    *(Row(name, square(backward), RIGHT_SQUARE, phrase=LINEAR, torch_sees=False) for name, backward in PHRASES.items()),
    *(
        Row(
            f"{name}, scalar output",
            function(lambda x: (x * x).sum(), backward),
            lambda x: (x * x).sum(),
            phrase=LINEAR,
            torch_sees=False,
        )
        for name, backward in PHRASES.items()
    ),
    Row("contiguous only", square(_contiguous_only), RIGHT_SQUARE, phrase=RAISES, torch_sees=False),
    Row("raises if not contiguous", square(_needs_contiguous), RIGHT_SQUARE, phrase=RAISES, torch_sees=False),
    Row("right for one-hot only", square(_dense_wrong), RIGHT_SQUARE, phrase=LINEAR, torch_sees=False),
    Row(
        "missing conjugate",
        function(lambda z: z * z, lambda g, z: 2 * z * g),
        function(lambda z: z * z, lambda g, z: 2 * z.conj() * g),
        inputs=normal((3, 4), dtype=torch.complex128),
        phrase="While considering the imaginary part of complex outputs only, Jacobian mismatch",
    ),
    Row(
        "complex to real",
        function(lambda z: z.abs() ** 2, lambda g, z: z * g),
        function(lambda z: z.abs() ** 2, lambda g, z: 2 * z * g),
        inputs=normal((3, 4), dtype=torch.complex128),
    ),
    Row(
        "real to complex",
        function(lambda x: torch.complex(x, x * x), lambda g, x: g.real + x * g.imag),
        function(lambda x: torch.complex(x, x * x), lambda g, x: g.real + 2 * x * g.imag),
        phrase="While considering the imaginary part of complex outputs only, ",
    ),
    Row(
        "double backward",
        function(
            lambda x: x**3,
            lambda g, x: function(lambda g, x: 3 * x * x * g, lambda h, g, x: (3 * x * x * h, 5 * x * g * h))(g, x),
        ),
        lambda x: x**3,
        order=2,
    ),
    Row(
        "double backward, grad_output",
        function(
            lambda x: x**3,
            lambda g, x: function(lambda g, x: 3 * x * x * g, lambda h, g, x: (x * x * h, 6 * x * g * h))(g, x),
        ),
        lambda x: x**3,
        order=2,
        phrase="with respect to input 1",
    ),
    Row(
        "large magnitudes",
        function(lambda x: 1e8 * x.sin(), lambda g, x: 1.01e8 * x.cos() * g),
        lambda x: 1e8 * x.sin(),
    ),
    Row(
        "straight-through rounding",
        function(lambda x: (1e5 * x).round() / 1e5, lambda g, x: g),
        lambda x: x.detach() * 0 + x * 1.0,
    ),
]
