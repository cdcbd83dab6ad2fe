"""Wrong gradients and right ones that look wrong, each written once for torch and for jax."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from benchmarks.bench_fast import Wrong, normal
from benchmarks.checkers import ATOL, RTOL, Function, Namespace, Problem, problem, real

N = 256
SIDE = 16

Vjp = Callable[[Any], Any]
Backward = Callable[[Namespace, Vjp, Any, Any], Any]
"""backward(xp, vjp, grad_output, x): a gradient, made of the right one, vjp(grad_output)."""


class Planted(Wrong):
    """func with a wrong backward that can call the right VJP."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        def vjp(grad: Tensor) -> Tensor:
            return torch.autograd.grad(ctx.y, ctx.x, grad, retain_graph=True)[0]

        return ctx.change(torch, vjp, grad, ctx.x.detach()), None, None


def _doubled_sine(xp: Namespace, x: Any) -> Any:
    return 2 * xp.sin(x)


def _square(xp: Namespace, x: Any) -> Any:
    return x * x


def _weight(xp: Namespace) -> Any:
    places = xp.arange(SIDE * SIDE).reshape(SIDE, SIDE)
    return xp.cos(places * 1.0 + 0 * xp.ones(1, dtype=xp.float64)) / 4


def _matmul(xp: Namespace, x: Any) -> Any:
    return (x.reshape(SIDE, SIDE) @ _weight(xp)).reshape(-1)


def _bias(xp: Namespace, x: Any) -> Any:
    """Adds the first SIDE coordinates to each row of the others."""
    return (x[SIDE:].reshape(-1, SIDE) + x[:SIDE]).reshape(-1)


def _softmax(xp: Namespace, x: Any) -> Any:
    e = xp.exp(x.reshape(-1, 16))
    return (e / e.sum(-1)[:, None]).reshape(-1)


def _of(indices: Callable[[Any], Any], change: Callable[[Any], Any]) -> Backward:
    """The right gradient, changed at some places."""

    def backward(xp: Namespace, vjp: Vjp, grad: Any, x: Any) -> Any:
        gradient = vjp(grad)
        return xp.where(indices(xp.arange(x.shape[0])), change(gradient), gradient)

    return backward


def _one_entry(error: float) -> Backward:
    def backward(xp: Namespace, vjp: Vjp, grad: Any, x: Any) -> Any:
        return vjp(grad) + xp.where(xp.arange(x.shape[0]) == x.shape[0] // 3, error * grad[-1], 0 * grad[-1])

    return backward


def _scaled(factor: float) -> Backward:
    return lambda xp, vjp, grad, x: factor * vjp(grad)


def _unsteady() -> Backward:
    calls = itertools.count()
    return lambda xp, vjp, grad, x: vjp(grad) * (1 + 1e-6 * (next(calls) % 3))


def _real_part(xp: Namespace, vjp: Vjp, grad: Any, x: Any) -> Any:
    gradient = vjp(grad)
    return xp.real(gradient) + 0j * gradient


def _complex_normal(n: int) -> Tensor:
    return torch.complex(*normal(2 * n).detach().view(2, n))


@dataclass(frozen=True)
class WrongGradient:
    """A function with a wrong backward. strided: the error depends on strides, which jax does not have."""

    name: str
    backward: Backward
    func: Function = _doubled_sine
    point: Callable[[int], Tensor] = normal
    strided: bool = False

    def right(self) -> Problem:
        """The function with its right gradient."""
        return with_structure(problem(self.func, self.point(N)))

    def wrong(self) -> Problem:
        """The function with its wrong gradient."""
        right = self.right()

        @cache
        def of_jax() -> Callable[[Any], Any]:
            import jax

            func = partial(self.func, jax.numpy)

            def backward(x: Any, grad: Any) -> tuple[Any]:
                vjp = jax.vjp(func, x)[1]
                return (self.backward(jax.numpy, lambda grad: vjp(grad)[0], grad, x),)

            planted = jax.custom_vjp(func)
            planted.defvjp(lambda x: (func(x), x), backward)
            return planted

        return Problem(
            right.x,
            lambda x: Planted.apply(x, right.func, self.backward),
            right.forward,
            None if self.strided else of_jax,
            right.structure,
        )


def with_structure(problem: Problem) -> Problem:
    """The problem with the pattern of its Jacobian, in real coordinates, as it is at x."""

    @cache
    def structure() -> Any:
        from scipy.sparse import csr_array

        coordinates = real(problem)
        return csr_array((jacobian(coordinates.func, coordinates.x) != 0).numpy())

    return Problem(problem.x, problem.func, problem.forward, problem.jax, structure)


def wrong_entries(wrong: Problem, right: Problem) -> set[tuple[int, int]]:
    """Entries (output, input) that one backward pass per row gets wrong by more than the tolerance."""
    width = 2 if right.x.is_complex() else 1
    found, expected = (jacobian(real(side).func, real(side).x.detach()) for side in (wrong, right))
    places = ((found - expected).abs() > ATOL + RTOL * expected.abs()).nonzero() // width
    return {(int(output), int(input)) for output, input in places}


WRONG = (
    WrongGradient("one entry by 1e-4", _one_entry(1e-4)),
    WrongGradient("one entry by 1e-2", _one_entry(1e-2)),
    WrongGradient("one entry by 1", _one_entry(1.0)),
    WrongGradient("one entry by 10", _one_entry(10.0)),
    WrongGradient("rolled by one place", lambda xp, vjp, grad, x: xp.roll(vjp(grad), 1)),
    WrongGradient("sign", _scaled(-1)),
    WrongGradient("sign of a tenth", _of(lambda i: i < N // 10, lambda gradient: -gradient)),
    WrongGradient("times 1.002", _scaled(1.002)),
    WrongGradient("times 1.01", _scaled(1.01)),
    WrongGradient("times 1.1", _scaled(1.1)),
    WrongGradient("a factor 2 forgotten", _scaled(0.5)),
    WrongGradient("zero", _scaled(0)),
    WrongGradient("the last place forgotten", _of(lambda i: i == N - 1, lambda gradient: 0 * gradient)),
    WrongGradient("times 1.01 where x < 0", lambda xp, vjp, grad, x: vjp(grad) * xp.where(x < 0, 1.01, 1.0)),
    WrongGradient("another point: the saved x is off by 0.01", lambda xp, vjp, grad, x: 2 * xp.cos(x + 0.01) * grad),
    WrongGradient(
        "matmul with the weight not transposed",
        lambda xp, vjp, grad, x: (grad.reshape(SIDE, SIDE) @ _weight(xp)).reshape(-1),
        _matmul,
    ),
    WrongGradient("a mean for a sum over a broadcast", _of(lambda i: i < SIDE, lambda g: g / (N // SIDE - 1)), _bias),
    WrongGradient("softmax without its sum", lambda xp, vjp, grad, x: _softmax(xp, x) * grad, _softmax),
    WrongGradient(
        "complex: a conjugate missing", lambda xp, vjp, grad, x: xp.conj(vjp(xp.conj(grad))), _square, _complex_normal
    ),
    WrongGradient("complex: the real part only", _real_part, _square, _complex_normal),
    WrongGradient("not multiplied by grad_output", lambda xp, vjp, grad, x: vjp(xp.ones_like(grad))),
    WrongGradient("grad_output clamped to [-1, 1]", lambda xp, vjp, grad, x: vjp(xp.clip(grad, -1, 1))),
    WrongGradient("grad_output squared", lambda xp, vjp, grad, x: vjp(grad * grad)),
    WrongGradient("modulus of grad_output", lambda xp, vjp, grad, x: vjp(xp.abs(grad))),
    WrongGradient(
        "zero for a grad_output that is not contiguous",
        lambda xp, vjp, grad, x: vjp(grad if grad.is_contiguous() else 0 * grad),
        strided=True,
    ),
    WrongGradient(
        "times 1.01 for a dense grad_output",
        lambda xp, vjp, grad, x: vjp(grad) * xp.where((grad != 0).sum() > 1, 1.01, 1.0),
    ),
    WrongGradient("differs by 1e-6 from run to run", _unsteady()),
)


def _between(low: float, high: float, n: int = 100) -> Tensor:
    return torch.linspace(low, high, n, dtype=torch.float64)


def _hilbert() -> Tensor:
    places = torch.arange(1, 8, dtype=torch.float64)
    return (1 / (places[:, None] + places - 1)).flatten()


def _quiet() -> Tensor:
    """A point with one small element among large ones."""
    x = _between(1e3, 2e3)
    x[50] = 1e-3
    return x


RIGHT: dict[str, tuple[Function, Callable[[], Tensor]]] = {
    "2 sin(x)": (_doubled_sine, lambda: normal(N)),
    "x W": (_matmul, lambda: normal(N)),
    "softmax": (_softmax, lambda: normal(N)),
    "complex z^2": (_square, lambda: _complex_normal(N)),
    "sqrt(x) at 1e-6": (lambda xp, x: xp.sqrt(x), lambda: _between(1e-6, 2e-6)),
    "log(x) at 1e-5": (lambda xp, x: xp.log(x), lambda: _between(1e-5, 2e-5)),
    "1 / x at 1e-5": (lambda xp, x: 1 / x, lambda: _between(1e-5, 2e-5)),
    "sin(1e5 x)": (lambda xp, x: xp.sin(1e5 * x), lambda: _between(0, 1)),
    "3 x at 1e9": (lambda xp, x: 3 * x, lambda: _between(1e9, 2e9)),
    "3 x at 1e12": (lambda xp, x: 3 * x, lambda: _between(1e12, 2e12)),
    "1e8 sin(x)": (lambda xp, x: 1e8 * xp.sin(x), lambda: normal(100).detach()),
    "sum of x^2, one x small": (lambda xp, x: (x * x).sum().reshape(1), _quiet),
    "abs(x) at 1e-7": (lambda xp, x: xp.abs(x), lambda: _between(1e-7, 2e-7)),
    "inverse of a 7 x 7 Hilbert matrix": (
        lambda xp, x: xp.linalg.inv(x.reshape(7, 7)).reshape(-1),
        _hilbert,
    ),
}
"""Functions with right gradients, at points where some of them are hard to check."""
