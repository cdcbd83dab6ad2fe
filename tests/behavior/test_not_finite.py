"""Infinities, NaN, and numbers near the ends of the range: verdicts, messages and cost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad

Func = Callable[[Tensor], Tensor]

ELEMENTWISE: dict[str, Func] = {
    **{
        name: getattr(torch, name)
        for name in (
            *("sin", "cos", "tan", "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "abs", "neg", "relu"),
            *("sigmoid", "tanh", "sinh", "cosh", "asinh", "atan", "asin", "acosh", "reciprocal", "square", "erf"),
            *("sign", "lgamma", "nan_to_num"),
        )
    },
    **{name: getattr(torch.nn.functional, name) for name in ("softplus", "gelu", "silu", "logsigmoid")},
    "times 1e160": lambda v: 1e160 * v,
    "times 1e308": lambda v: 1e308 * v,
    "clamp": lambda v: v.clamp(-1, 1),
}
OF_PAIRS: dict[str, Func] = {
    "product": lambda v: v * v.flip(0),
    "sum of two": lambda v: v + v.flip(0),
    "quotient": lambda v: v / v.flip(0),
    "maximum": lambda v: torch.maximum(v, v.flip(0)),
    "atan2": lambda v: torch.atan2(v, v.flip(0)),
    "hypot": lambda v: torch.hypot(v, v.flip(0)),
    "sum": torch.sum,
    "mean": torch.mean,
    "prod": torch.prod,
    "max": torch.max,
    "norm": torch.linalg.vector_norm,
    "var": torch.var,
    "logsumexp": lambda v: v.logsumexp(0),
    "softmax": lambda v: v.softmax(0),
    "cumsum": lambda v: v.cumsum(0),
    "sort": lambda v: v.sort().values,
}
FUNCS = ELEMENTWISE | OF_PAIRS
VALUES = [math.inf, -math.inf, math.nan, 0.0, 1e300, 1e-300, 1e160]

# eps changes no value of 1e160 or more, so torch compares with zero.
STEPS_ARE_REALIZED = 1e160
MAX_CALLS = 3000
"""Largest number of calls of func in a check of three elements, including the search for a cause."""


class Counted:
    def __init__(self, func: Func) -> None:
        self.func = func
        self.calls = 0

    def __call__(self, v: Tensor) -> Tensor:
        self.calls += 1
        assert self.calls <= MAX_CALLS, "the check does not end"
        return self.func(v)


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("engine", ["dense", "compressed", "auto"])
@pytest.mark.parametrize("value", VALUES)
def test_verdicts_are_torchs_and_come_to_an_end(value: float, engine: str) -> None:
    others = []
    for name, func in FUNCS.items():
        expected = torch.autograd.gradcheck(func, (leaf(0.7, value, 1.3),), raise_exception=False)
        found = fastgrad.gradcheck(Counted(func), (leaf(0.7, value, 1.3),), engine=engine, raise_exception=False)
        if found != expected:
            others.append((name, found))
    if value < STEPS_ARE_REALIZED or not math.isfinite(value):
        assert others == []
    assert all(found for _, found in others)


@pytest.mark.parametrize("engine", ["dense", "compressed"])
def test_a_wrong_gradient_beside_what_is_not_finite(engine: str) -> None:
    for value in VALUES:
        for func in (torch.atan, torch.sigmoid, torch.nan_to_num):
            wrong = lambda v, func=func: 1.01 * func(v) - 0.01 * func(v).detach()  # noqa: E731
            assert not fastgrad.gradcheck(wrong, (leaf(0.7, value, 1.3),), engine=engine, raise_exception=False)


class Passing(torch.autograd.Function):
    """A clamp whose backward is the identity."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        return v.clamp(max=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize(
    ("func", "x", "words"),
    [
        (torch.log, leaf(0.7, 0.0), r"func is not finite: output 0 at \[1\] is -inf, and input 0 at \[1\] is 0"),
        (torch.sin, leaf(1.0, math.inf), r"output 0 at \[1\] is nan, and input 0 at \[1\] is inf"),
        (lambda v: v.log().sum(), leaf(0.7, 0.0), r"output 0 at \[\] is -inf, and input 0 at \[1\] is 0"),
        (torch.sqrt, leaf(0.7, 0.0), r"derivative is not finite: (nan|inf), where input 0 at \[1\] is 0"),
        (Passing.apply, leaf(0.7, math.inf), r"input 0 at \[1\] is inf, so differences cannot be computed there"),
    ],
)
def test_what_is_not_finite_is_named(func: Func, x: Tensor, words: str) -> None:
    report = fastgrad.check(func, x)
    assert report.failure is not None
    assert report.failure.numerical_issue == "not finite"
    assert report.causes[0].name == "not finite"
    with pytest.raises(fastgrad.GradcheckError, match=words):
        fastgrad.gradcheck(func, (x,))


def test_an_infinite_difference_is_no_agreement() -> None:
    class Func(torch.autograd.Function):
        """log at a point where its difference at eps is infinite, with another gradient."""

        @staticmethod
        def forward(ctx: Any, v: Tensor) -> Tensor:
            return v.log()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 0.5 * grad

    for engine in ("dense", "compressed"):
        assert not fastgrad.gradcheck(Func.apply, (leaf(1e-6),), engine=engine, raise_exception=False)


@pytest.mark.parametrize("engine", ["dense", "compressed"])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_backward_that_would_overflow_if_run_at_another_scale(count: int, engine: str) -> None:
    x = torch.linspace(0, 1e-3, count, dtype=torch.float64).requires_grad_()
    for func in (lambda v: 1e308 * v, lambda v: 1e308 * v.flip(0), lambda v: (1e308 * v)[None]):
        assert fastgrad.gradcheck(func, (x,), engine=engine)

    class Clamped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: Tensor) -> Tensor:
            return 1e308 * v

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 1e308 * grad.clamp(min=0)

    assert not fastgrad.gradcheck(Clamped.apply, (x,), engine=engine, raise_exception=False)


@pytest.mark.parametrize("engine", ["dense", "compressed", "auto"])
@pytest.mark.parametrize(
    ("func", "at"),
    [(torch.relu, 1e-7), (torch.abs, 1e-7), (torch.sqrt, 1e-6)],
)
def test_re_measuring_is_bounded_by_a_count(func: Func, at: float, engine: str) -> None:
    """In every engine, entries that share no output are moved together: single entries would take 20,000 calls."""
    n = 300
    x = (at * torch.linspace(0.1, 1, n, dtype=torch.float64)).requires_grad_()
    counted = Counted(func)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert fastgrad.gradcheck(counted, (x,), engine=engine)
    assert counted.calls <= 2 * (2 * n) + 1000
    assert not any("nan" in str(warning.message) for warning in caught)


def test_the_first_wrong_entries_decide() -> None:
    n = 60
    x = torch.linspace(0.1, 1, n, dtype=torch.float64).requires_grad_()
    report = fastgrad.check(lambda v: 1.5 * v.sin() - 0.5 * v.sin().detach(), x, engine="dense")
    assert report.evaluations <= 2 * n + 3 * 50


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("undefined", [False, True])
def test_the_tangent_of_an_infinite_input_is_not_modified(fast_mode: bool, undefined: bool) -> None:
    x = torch.tensor([[0.3, -torch.inf, 0.7], [-0.2, 0.4, -torch.inf]], dtype=torch.float64, requires_grad=True)
    forward = {"check_forward_ad": True, "check_backward_ad": False, "check_undefined_grad": undefined}
    assert fastgrad.gradcheck(lambda x: x.softmax(-1), x, **forward, fast_mode=fast_mode)
