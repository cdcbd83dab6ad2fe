"""Entries that differ at eps are re-measured, in both modes, with three outcomes and messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.engines.measured_steps import measured
from fastgrad.engines.ridders import settled
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Tolerances

Func = Callable[[Tensor], Tensor]


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def scaled(func: Func, factor: float) -> Func:
    """func, with its gradient times a factor."""
    return lambda v: func(v) * factor + (1 - factor) * func(v).detach()


HILBERT = torch.tensor([[1 / (i + j + 1) for j in range(7)] for i in range(7)], dtype=torch.float64)
# Differences at eps = 1e-6 are wrong here, because of truncation, rounding or a kink.
HARD: dict[str, tuple[Func, Tensor]] = {
    "sqrt at 1e-6": (torch.sqrt, leaf(1e-6)),
    "log at 1e-5": (torch.log, leaf(1e-5)),
    "linear at 1e9": (lambda v: 3 * v, leaf(1e9)),
    "linear at 1e12": (lambda v: 3 * v, leaf(1e12)),
    "sin of 1e5 x": (lambda v: (1e5 * v).sin(), leaf(0.7, 0.2)),
    "inverse of a Hilbert matrix": (torch.linalg.inv, HILBERT.clone().requires_grad_()),
    "sort with a gap of 1e-10": (lambda v: v.sort().values, leaf(0.3, 0.3 + 1e-10, 0.9, 0.1)),
}
CANCELLING: dict[str, Func] = {
    "exp(x) - 1": lambda v: v.exp() - 1,
    "(1 + x) - 1": lambda v: (1 + v) - 1,
    "x + 0.1 in a sine, less the sine of 0.1": lambda v: (v + 0.1).sin() - torch.tensor(0.1, dtype=v.dtype).sin(),
    "in float32": lambda v: ((1 + v.float()) - 1).double(),
}
MODES: list[dict[str, Any]] = [{}, {"fast_mode": True, "engine": "sketch"}]


@pytest.mark.parametrize("mode", MODES, ids=["exact", "fast"])
@pytest.mark.parametrize("name", HARD)
def test_eps_is_not_the_last_word(name: str, mode: dict[str, Any]) -> None:
    func, x = HARD[name]
    assert fastgrad.gradcheck(func, (x,), **mode)
    assert not fastgrad.gradcheck(scaled(func, 1.01), (x,), **mode, raise_exception=False)


SEEDS = range(5)


def _near_ties(seed: int) -> Tensor:
    x = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x[3] = x[0] + 1e-10
    return x


def _random(size: float, shape: tuple[int, ...] = (3,)) -> Callable[[int], Tensor]:
    def values(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return size * (0.5 + torch.rand(shape, dtype=torch.float64, generator=generator))

    return values


AT_RANDOM: dict[str, tuple[Func, Callable[[int], Tensor]]] = {
    "sqrt": (torch.sqrt, _random(1e-6)),
    "1/x": (torch.reciprocal, _random(1e-5)),
    "log": (torch.log, _random(1e-5)),
    "linear at 1e9": (lambda v: 3 * v, _random(1e9)),
    "linear at 1e12": (lambda v: 3 * v, _random(1e12)),
    "sin of 1e5 x": (lambda v: (1e5 * v).sin(), _random(1.0)),
    "inverse of a Hilbert matrix": (lambda v: torch.linalg.inv(HILBERT * v), _random(1.0, ())),
    "near ties": (lambda v: v.sort().values, _near_ties),
    "rectifier next to zero": (torch.relu, lambda seed: _random(1e-8)(seed) - 1e-8),
    "1e8 added and taken away": (lambda v: (v + 1e8) - 1e8, _random(0.5)),
}


@pytest.mark.parametrize("engine", ["dense", "compressed"])
@pytest.mark.parametrize("name", AT_RANDOM)
def test_one_percent_shows_at_hard_points(name: str, engine: str) -> None:
    func, inputs = AT_RANDOM[name]
    off = lambda v: scaled(func, 1.01)(v) + 0.02 * (name == "rectifier next to zero") * (v - v.detach())  # noqa: E731
    for seed in SEEDS:
        x = inputs(seed).requires_grad_()
        assert fastgrad.gradcheck(func, (x,), engine=engine), seed
        assert not fastgrad.gradcheck(off, (x,), engine=engine, raise_exception=False), seed


@pytest.mark.parametrize("mode", MODES, ids=["exact", "fast"])
def test_what_is_rounded_inside(mode: dict[str, Any]) -> None:
    """With rounding far below eps, only the gradient of func without rounding passes; with coarser rounding, none."""
    x = leaf(0.3, 0.6, 0.8)
    shifted = lambda v: (v + 1e8) - 1e8  # noqa: E731
    assert not torch.autograd.gradcheck(shifted, (x,), raise_exception=False)
    assert fastgrad.gradcheck(shifted, (x,), **mode)
    for factor in (0.0, 0.99, 1.01, -1.0):
        assert not fastgrad.gradcheck(scaled(shifted, factor), (x,), **mode, raise_exception=False)
    for digits in (1e3, 1e4, 1e5, 1e6 / 3):
        rounded = lambda v, digits=digits: v + ((digits * v).round() / digits - v).detach()  # noqa: E731
        assert not fastgrad.gradcheck(rounded, (x,), **mode, raise_exception=False)


class Single(torch.autograd.Function):
    """sin in single precision, times `size`; its gradient is off by `error`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: float, error: float | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.size, ctx.error = size, error
        return (size * x.float().sin()).double()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        derivative = ctx.size * x.cos() + ctx.error if ctx.error is not None else torch.zeros_like(x)
        return grad * derivative, None, None


@pytest.mark.parametrize("atol", [1e-5, 1e-3])
def test_a_stair_of_single_precision_excuses_no_gradient_of_zero(atol: float) -> None:
    """Near the maximum of sin, a stair is about as wide as eps."""
    for seed in range(8):
        x = (
            1.5 + 0.3 * torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        ).requires_grad_()
        zero = lambda x: Single.apply(x, 1.0, None)  # noqa: E731
        assert not torch.autograd.gradcheck(zero, (x,), atol=atol, raise_exception=False)
        assert not fastgrad.gradcheck(zero, (x,), atol=atol, raise_exception=False), seed


@pytest.mark.parametrize("error", [1.6e-5, -1.6e-5])
def test_a_stair_excuses_no_error_of_the_size_of_the_tolerance(error: float) -> None:
    x = leaf(0.31, 0.62, 0.83, 1.1, -0.7, -1.3)
    keywords = {"atol": 1e-5, "rtol": 1e-6, "raise_exception": False}
    assert fastgrad.gradcheck(lambda x: Single.apply(x, 1e-5, 0.0), (x,), **keywords)
    for i in range(x.numel()):
        own = torch.zeros_like(x).index_fill_(0, torch.tensor(i), error)
        wrong = lambda x, own=own: Single.apply(x, 1e-5, 0.0) + own * (x - x.detach())  # noqa: E731
        assert not torch.autograd.gradcheck(wrong, (x,), **keywords)
        assert not fastgrad.gradcheck(wrong, (x,), **keywords), i


def test_slopes_that_rounding_makes_equal_accuse_no_gradient() -> None:
    """At several steps, func changes by few units in its last place, with a ratio of exactly 4."""
    for place in ([8032.760780963507, 1748.3339327910357], [-10608.166785462863, 9995.09354781176]):
        func = lambda z: (0.8 * z[0] + 1e-3 * z[0] ** 3 + 0.1 * z[1]).reshape(1)  # noqa: E731
        assert fastgrad.gradcheck(func, (leaf(*place),))
    x = 1e4 * torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    heat = lambda x: x + 0.1 * (x.roll(1) + x.roll(-1) - 2 * x) + 1e-3 * x**3  # noqa: E731
    assert fastgrad.gradcheck(heat, (x.requires_grad_(),))
    wrong = lambda x: heat(x) + 1e-2 * (x - x.detach())  # noqa: E731
    assert not fastgrad.gradcheck(wrong, (x,), raise_exception=False)


def test_a_kink_far_below_eps_is_no_rounding() -> None:
    for gap in (1e-7, 1e-9, 5e-11):
        assert fastgrad.gradcheck(lambda v: v.sort().values, (leaf(0.9, 0.9 + gap),))
    for gap in (1e-7, 1e-9, 1e-11, 1e-13):  # near zero, the values show that func rounds less
        assert fastgrad.gradcheck(torch.relu, (leaf(gap, -gap),))


@pytest.mark.parametrize("slope", [1.0, 0.0])
@pytest.mark.parametrize("jump", [-1e-3, 1e-5, 1e-6, -1e-7, 1e-8, 2.5e-9])
def test_a_jump_at_the_inputs_is_no_rounding(jump: float, slope: float) -> None:
    x = leaf(0.7, 0.3, -0.4)
    func = lambda v: slope * v.sin() + jump * (v.detach() > 0.3)  # noqa: E731
    assert not torch.autograd.gradcheck(func, (x,), raise_exception=False)
    with pytest.raises(fastgrad.GradcheckError, match=rf"func is discontinuous .* changes by {abs(jump):.3g} from one"):
        fastgrad.gradcheck(func, (x,))
    assert fastgrad.gradcheck(func, (x + 1e-9,))  # next to the jump, smaller steps are taken


@pytest.mark.parametrize("mode", MODES, ids=["exact", "fast"])
@pytest.mark.parametrize("x", [0.0, 1e-13, 1e-9, 1e-5])
@pytest.mark.parametrize("name", CANCELLING)
def test_values_that_round_to_zero_excuse_no_gradient(name: str, x: float, mode: dict[str, Any]) -> None:
    """Steps below the rounding inside func change nothing, or only the rest of func."""
    func = CANCELLING[name]
    inputs = (leaf(*[x] * 3),)
    for rest in (0.0, 0.5):
        lost = lambda v, rest=rest: func(v).detach() + 0 * v + rest * v  # noqa: E731
        assert not torch.autograd.gradcheck(lost, inputs, raise_exception=False)
        assert not fastgrad.gradcheck(lost, inputs, **mode, raise_exception=False)
        if name != "in float32":
            assert fastgrad.gradcheck(lambda v, rest=rest: func(v) + rest * v, inputs, **mode)


@pytest.mark.parametrize("mode", MODES, ids=["exact", "fast"])
def test_hard_ones_that_cancel(mode: dict[str, Any]) -> None:
    for func, x in (
        (lambda v: (1 + (1e5 * v).sin()) - 1, 0.0),  # two sides of a sine alike
        (lambda v: v.sqrt() - 1e-3, 1e-6),
        (lambda v: torch.relu(v) + torch.relu(v - 1e-8), -1e-8),  # zero below, kinks on one side
    ):
        inputs = (leaf(x),)
        assert not torch.autograd.gradcheck(func, inputs, raise_exception=False)
        assert fastgrad.gradcheck(func, inputs, **mode)
        wrong = lambda v, func=func: scaled(func, 1.01)(v) + 0.1 * (v - v.detach())  # noqa: E731
        assert not fastgrad.gradcheck(wrong, inputs, **mode, raise_exception=False)


def test_torch_fails_most_of_them() -> None:
    failed = [
        name for name, (func, x) in HARD.items() if not torch.autograd.gradcheck(func, (x,), raise_exception=False)
    ]
    assert len(failed) >= 5


@pytest.mark.parametrize("mode", MODES, ids=["exact", "fast"])
def test_steep_one_over_x(mode: dict[str, Any]) -> None:
    x = leaf(1e-5)
    assert fastgrad.gradcheck(lambda v: 1 / v, (x,), **mode)
    assert not fastgrad.gradcheck(scaled(lambda v: 1 / v, 0.99), (x,), **mode, raise_exception=False)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        return v.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize("mode", MODES, ids=["exact", "fast"])
@pytest.mark.parametrize(
    ("func", "x", "words"),
    [
        (StraightThrough.apply, leaf(0.3, 0.6), r"analytical 1   numerical 0 \+-"),
        (
            torch.relu,
            leaf(0.0, 1.0),
            r"func has a kink at the inputs: the one-sided derivatives are 0 \(left\) and 1 \(right\)",
        ),
        (lambda v: v.float().sin().double(), leaf(0.7, 0.1), "computes in float32"),
        (
            lambda v: v.float().double(),
            leaf(0.77),
            r"numerical 0\.98\d+\n *\|difference\| 0\.01\d+[^$]*\n *largest absolute error 0\.01\d+, .* error 0\.01",
        ),
        (
            scaled(lambda v: 1 / v, 1.02),
            leaf(1e-5),
            r"at eps: largest absolute error .*, largest relative error 0\.0098\d* \(the worst entry was measured",
        ),
        (lambda v: v + 1e-2 * (1e17 * v).sin().detach(), leaf(0.7, 0.1), "did not converge"),
    ],
)
def test_what_still_fails_says_why(func: Func, x: Tensor, words: str, mode: dict[str, Any]) -> None:
    with pytest.raises(fastgrad.GradcheckError, match=words):
        fastgrad.gradcheck(func, (x,), **mode)


class Factors(torch.autograd.Function):
    """The identity of complex numbers; each part of its gradient is multiplied by a factor of its own."""

    @staticmethod
    def forward(z: Tensor, real: float, imaginary: float) -> Tensor:
        return z.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        ctx.factors = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        real, imaginary = ctx.factors
        return torch.complex(real * grad.real, imaginary * grad.imag), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return Factors.backward(ctx, tangent)[0]


MIXED: dict[str, Func] = {
    "square of the modulus": lambda z: z.abs() ** 2,
    "square": lambda z: z * z,
    "product of the parts": lambda z: z.real * z.imag,
}
FORWARD_ONLY: dict[str, Any] = {"check_forward_ad": True, "check_backward_ad": False}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *itertools.product(MIXED, MODES),
        # Forward mode judges the parts of the inputs separately, and for the modulus therefore also the entries.
        *itertools.product(["square", "product of the parts"], [FORWARD_ONLY]),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_rounding_of_a_small_part_is_judged_by_the_modulus_of_the_entry(
    name: str, swapped: bool, mode: dict[str, Any]
) -> None:
    """Rounding of values near 1e16 exceeds the small part of an entry, but not its tolerance, rtol times 2e8."""
    func = MIXED[name]
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        large, small = (0.5 + torch.rand(3, dtype=torch.float64, generator=generator) for _ in range(2))
        parts = [1e8 * large, small * torch.tensor([0.0, 1.0, 3e6], dtype=torch.float64)]
        z = torch.complex(*(reversed(parts) if swapped else parts)).requires_grad_()
        assert fastgrad.gradcheck(func, (z,), **mode), seed
        for factors in ((1.01, 1.01), (1.0, -1.0), (1.0, 2.0), (2.0, 1.0)):
            wrong = lambda z, factors=factors: func(Factors.apply(z, *factors))  # noqa: E731
            assert not fastgrad.gradcheck(wrong, (z,), **mode, raise_exception=False), (seed, factors)


def test_passing_checks_pay_nothing() -> None:
    calls = 0

    def func(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return v.sin()

    fastgrad.gradcheck(func, (leaf(0.1, 0.2, 0.3),))
    assert calls <= 2 * 3 + 3


def test_a_step_at_which_func_raises_is_dropped() -> None:
    x = leaf(1e-4)

    def func(v: Tensor) -> Tensor:
        if v.item() < 0:
            raise ValueError("negative")
        return v.sqrt()

    with Problem(func, (x,)) as problem:
        (refined,) = settled([[measured(problem, torch.tensor([0]), torch.tensor([0]), True, 1e-6)]], Tolerances())
    assert bool(refined.errors[0] <= Tolerances().allowed(refined.values[0]))
    assert refined.values[0].item() == pytest.approx(50, rel=1e-6)
    assert refined.errors[0].item() >= abs(refined.values[0].item() - 50)


def test_the_report_says_what_was_re_measured() -> None:
    from fastgrad.checks.order import check
    from fastgrad.report.settings import Settings

    report = check(torch.sqrt, (leaf(1e-6, 1.0),), Settings())
    assert report.passed
    assert "1 of 4 entries" in report.notes[0]
    assert "when measured again with other steps" in report.notes[0]


NEAR_TIES: dict[str, Func] = {
    "max": lambda v: v.max(),
    "max - min": lambda v: v.max() - v.min(),
    "sort": lambda v: v.sort().values,
    "topk": lambda v: v.topk(2).values,
}


@pytest.mark.parametrize("mode", [{}, FORWARD_ONLY], ids=["reverse", "forward"])
@pytest.mark.parametrize("engine", ["dense", "compressed", "sketch"])
@pytest.mark.parametrize("name", NEAR_TIES)
def test_values_that_are_nearly_tied(name: str, engine: str, mode: dict[str, Any]) -> None:
    func = NEAR_TIES[name]
    keywords = {**mode, "engine": engine, "fast_mode": engine == "sketch"}
    for gap in (3e-7, 1e-8, 1e-10):
        x = leaf(0.3, 0.97, 0.97 + gap, 0.1, -0.5, 0.7)
        assert fastgrad.gradcheck(func, (x,), **keywords), gap
        assert not fastgrad.gradcheck(scaled(func, 1.01), (x,), **keywords, raise_exception=False), gap


@pytest.mark.parametrize("mode", [{}, FORWARD_ONLY], ids=["reverse", "forward"])
def test_a_kink_next_to_the_inputs_is_not_said_to_be_at_them(mode: dict[str, Any]) -> None:
    """Too close for differences: the check fails, but neither the gradient nor a kink at the inputs is to blame."""
    at_the_inputs = "func has a kink at the inputs"
    report = fastgrad.check(torch.max, (leaf(0.3, 0.97, 0.97 + 1e-12),), **mode)
    assert report.verdict == "not converged"
    assert at_the_inputs not in str(report)
    assert [cause.name for cause in report.causes] == ["truncation"]
    assert not fastgrad.check(scaled(torch.max, 1.5), (leaf(0.3, 0.97, 0.97 + 1e-12),), **mode)
    tied = fastgrad.check(lambda v: v.max(0).values, (leaf(0.3, 0.97, 0.97),), **mode)
    assert at_the_inputs in str(tied)


def test_a_zero_entry_next_to_a_tie_of_large_values_is_not_wrong() -> None:
    """Rounding of values near 1e13 hides whether the entry is zero; no cause about the gradient is shown."""
    func = lambda v: v.exp().sort().values  # noqa: E731
    report = fastgrad.check(func, (leaf(30.0, 30.0 - 4e-7),))
    assert report.verdict == "not converged"
    assert [cause.name for cause in report.causes] == ["truncation"]
    assert fastgrad.check(scaled(func, 1.01), (leaf(30.0, 30.0 - 4e-7),)).verdict != "passed"


def without(share: float, x: Tensor) -> Tensor:
    """Zero, with `share` as its gradient: subtracted from a function, it makes its gradient wrong."""
    return share * (x - x.detach())


@pytest.mark.parametrize("mode", MODES, ids=["exact", "fast"])
@pytest.mark.parametrize("n", [1, 40])
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (lambda x: (x.relu() + 1e6) - 1e6, None),
        (lambda x: ((x.abs() + x / 2) + 1e6) - 1e6 - without(0.5, x), None),
        (lambda x: ((x + 1e5 * x**2) + 1e8) - 1e8 - without(1, x), lambda x: ((x + 1e5 * x**2) + 1e6) - 1e6),
        (lambda x: ((x + 1e9 * x**3) + 1e6) - 1e6 - without(1, x), lambda x: ((x + 1e7 * x**3) + 1e6) - 1e6),
    ],
)
def test_steps_that_rounding_inside_func_absorbs_excuse_no_gradient(
    wrong: Func, right: Func | None, n: int, mode: dict[str, Any]
) -> None:
    x = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    assert not torch.autograd.gradcheck(wrong, (x,), raise_exception=False)
    assert not fastgrad.gradcheck(wrong, (x,), **mode, raise_exception=False)
    if right is not None:
        assert torch.autograd.gradcheck(right, (x,))
        assert fastgrad.gradcheck(right, (x,), **mode)


@pytest.mark.parametrize("mode", MODES, ids=["exact", "fast"])
@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 2.0])
def test_rounding_that_hides_the_derivative_at_eps(factor: float, mode: dict[str, Any]) -> None:
    """The values are multiples of 2e-9. They change by 6e-10 or less at eps, or by a multiple of 2e-9."""

    def func(x: Tensor) -> Tensor:
        return (scaled(torch.exp, factor)(x) + 1e7) - 1e7

    x = torch.linspace(-10.0, -8.0, 40, dtype=torch.float64, requires_grad=True)
    with pytest.raises(fastgrad.GradcheckError) as raised:
        fastgrad.gradcheck(func, (x,), **mode)
    worst = raised.value.report.failure
    assert worst is not None
    assert worst.numerical_issue == "low precision"
    assert "func changes only by multiples of 1.86e-09" in str(raised.value)
    assert "+-" not in str(raised.value)


def test_an_estimated_error_includes_a_hidden_derivative() -> None:
    x = torch.linspace(-10.0, -8.0, 40, dtype=torch.float64)
    with Problem(lambda x: (x.exp() + 1e7) - 1e7, (x.requires_grad_(),)) as problem:
        every = torch.arange(40)
        found = settled([[measured(problem, every, every, True, 1e-6)]], Tolerances(atol=1e-6, rtol=1e-3))[0]
    assert bool(((found.values - x.detach().exp()).abs() <= found.errors).all())


@pytest.mark.parametrize("x", [0.5 - 1e-7, 0.5 + 1e-7])
def test_one_jump_next_to_the_inputs_is_not_rounding(x: float) -> None:
    assert fastgrad.gradcheck(torch.round, (leaf(x, 0.2),))


@pytest.mark.parametrize("eps", [1e3, 1e6, 1e8])
@pytest.mark.parametrize("func", [torch.sin, lambda v: (-v * v).exp()])
def test_a_large_eps_finds_right_gradients_right(func: Func, eps: float) -> None:
    x = leaf(0.1, 0.5, 1.2)
    assert fastgrad.gradcheck(func, (x,), eps=eps)
    assert not fastgrad.gradcheck(scaled(func, 1.1), (x,), eps=eps, raise_exception=False)


STEEP: dict[str, tuple[Func, float, float]] = {
    "step at 1e8": (lambda x: torch.sigmoid(1e4 * (x - 1e8)), 1e8 + 5e-5, 1e-6),
    "peak at 1e8": (lambda x: 1 / (1 + (1e3 * (x - 1e8)) ** 2), 1e8 + 5e-4, 1e-6),
    "peak at 1e10": (lambda x: 1 / (1 + (10 * (x - 1e10)) ** 2), 1e10 + 0.05, 1e-6),
    "peak at 1e7": (lambda x: 1 / (1 + (1e4 * (x - 1e7)) ** 2), 1e7 + 5e-5, 1e-6),
    "sine at 3e7": (lambda x: torch.sin(1e4 * x), 3.3e7 + 1.1, 1e-6),
    "step at 1e10, large eps": (lambda x: torch.sigmoid(1e2 * (x - 1e10)), 1e10 + 5e-3, 1e-3),
}


@pytest.mark.parametrize("engine", ["dense", "compressed", "sketch"])
@pytest.mark.parametrize("mode", [{}, FORWARD_ONLY], ids=["reverse", "forward"])
@pytest.mark.parametrize("name", STEEP)
def test_curvature_at_large_x_is_no_rounding(name: str, mode: dict[str, Any], engine: str) -> None:
    func, x, eps = STEEP[name]
    keywords = {**mode, "engine": engine, "fast_mode": engine == "sketch", "eps": eps, "raise_exception": False}
    assert fastgrad.gradcheck(func, (leaf(x),), **keywords)
    for factor in (0.0, 0.5, 1.01):
        assert not fastgrad.gradcheck(scaled(func, factor), (leaf(x),), **keywords), factor


@pytest.mark.parametrize("mode", MODES, ids=["exact", "fast"])
def test_curvature_at_large_x_is_no_rounding_of_a_gradient(mode: dict[str, Any]) -> None:
    class Softplus(torch.autograd.Function):
        """Its backward is a constant for autograd."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return torch.nn.functional.softplus(1e4 * (x - 1e8)) / 1e4

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * torch.sigmoid(1e4 * (x - 1e8)).detach()

    x = leaf(1e8 + 5e-5)
    assert fastgrad.gradcheck(Softplus.apply, (x,), **mode)
    assert not fastgrad.gradgradcheck(Softplus.apply, (x,), **mode, raise_exception=False)
    assert fastgrad.gradgradcheck(lambda x: torch.nn.functional.softplus(1e4 * (x - 1e8)) / 1e4, (x,), **mode)


def test_rounding_of_the_argument_at_large_x_is_still_rounding() -> None:
    for frequency, x in ((1e3, 1e8 + 0.3), (3.0, 1e8)):
        func = lambda v, frequency=frequency: torch.sin(frequency * v)  # noqa: E731
        assert fastgrad.gradcheck(func, (leaf(x),))
        assert not fastgrad.gradcheck(scaled(func, 1.01), (leaf(x),), raise_exception=False)


def triangles(share: float, period: float) -> Func:
    """The identity plus a triangle wave with slopes +-share."""
    return lambda x: x + share * period * (x / period - (x / period).round()).abs()


def ramps(excess: float, length: float, start: float) -> Func:
    """A func with the slopes 1 + excess and 1 in turn, each over a length."""

    def func(x: Tensor) -> Tensor:
        place = (x - start) / length
        steep = torch.div(place, 2, rounding_mode="floor") + torch.remainder(place, 2).clamp(max=1)
        return x + excess * length * steep

    return func


KINKS: dict[str, tuple[Func, float, float, float]] = {
    **{
        f"triangles of {period:g} eps, x at {distance:g} eps, eps {eps}": (
            triangles(share, period * eps),
            (3 * period + distance) * eps,
            eps,
            1.0,
        )
        for eps, period, share, distance in (
            (1e-6, 10.0, 0.5, 0.02),
            (1e-6, 10.0, 0.9, 0.016),
            (1e-6, 1 / 0.03, 0.15, 0.1),
            (1e-6, 1 / 0.03, 0.05, 0.3),
            (1e-4, 10.0, 0.5, 0.02),
        )
    },
    **{
        f"ramps of {length:g} eps": (ramps(excess, length * eps, x - start * eps), x, eps, 1 + excess / 2)
        for length, start, excess, eps, x in (
            (14.654219512732391, -0.765033398996258, 0.1934893321722082, 1e-6, 0.0),
            (11.596761608249412, 0.7806105053394383, 0.20425800069640807, 1e-6, 0.3),
            (21.299603046824764, 0.743602113151214, 0.13398022999325285, 1e-6, 0.0),
            (2.7873843195387202, -0.6968126853738319, 0.1331780048992054, 1e-4, 0.0),
        )
    },
}


@pytest.mark.parametrize("engine", ["dense", "compressed", "sketch"])
@pytest.mark.parametrize("name", KINKS)
def test_kinks_within_and_beyond_eps_are_no_staircase(name: str, engine: str) -> None:
    """The mean slope of func, which is neither its slope at x nor that at eps."""
    func, x, eps, mean = KINKS[name]
    keywords = {"eps": eps, "engine": engine, "fast_mode": engine == "sketch", "raise_exception": False}
    wrong = lambda v: func(v).detach() + mean * (v - v.detach())  # noqa: E731
    assert not torch.autograd.gradcheck(wrong, (leaf(x),), eps=eps, raise_exception=False)
    assert not fastgrad.gradcheck(wrong, (leaf(x),), **keywords)
    if name.startswith("triangles"):
        assert fastgrad.gradcheck(func, (leaf(x),), **keywords)


def test_a_derivative_next_to_a_kink_is_one_of_the_one_sided_derivatives() -> None:
    """Rounding inside func absorbs the kink at the smallest steps, and leaves the mean slope there."""
    length, start = 13.747886261700677e-6, 7.634259682510746e-9
    func = lambda x: x + 1.277 * length * (1 - (torch.remainder((x - start) / length, 2.0) - 1).abs())  # noqa: E731
    wrong = lambda v: func(v).detach() + (v - v.detach())  # noqa: E731
    assert not fastgrad.gradcheck(wrong, (leaf(0.0),), raise_exception=False)


# Functions, and a wrong gradient (the same for all coordinates) that lacks a term.
LACKING: dict[str, tuple[Func, float]] = {
    "a fast wave": (lambda v: v + 5e-9 * torch.sin(2e8 * v), 1.0),
    "a narrow ramp": (lambda v: v + 0.1 * (v + 1e-7).clamp(0.0, 2e-7), 1.0),
    "a wave next to 1e6": (lambda v: 1e6 + v + 3e-9 * torch.sin(1e6 * v), 1.0),
    "a step next to 1e7": (lambda v: 1e7 + v + 1e-8 * torch.tanh(1e6 * v), 1.0),
    "a term that rounding absorbs at small steps": (lambda v: v + 0.1 * (torch.relu(v + 1e-7) - 1e-7), 1.0),
}


@pytest.mark.parametrize("engine", ["dense", "compressed"])
@pytest.mark.parametrize("name", LACKING)
def test_a_term_that_changes_the_difference_at_eps_is_no_rounding(name: str, engine: str) -> None:
    func, gradient = LACKING[name]
    wrong = lambda v: func(v).detach() + gradient * (v - v.detach())  # noqa: E731
    assert not torch.autograd.gradcheck(wrong, (leaf(0.0),), raise_exception=False)
    assert not fastgrad.gradcheck(wrong, (leaf(0.0),), raise_exception=False, engine=engine)


@pytest.mark.parametrize(
    ("x", "eps", "width"), [(1e3, 1e-6, 5.8e-10), (1e5, 1e-6, 1.2e-9), (1e6, 1e-4, 5.8e-8), (1e7, 1e-3, 5.8e-7)]
)
def test_a_ramp_far_narrower_than_eps_at_a_large_x_is_no_rounding(x: float, eps: float, width: float) -> None:
    func = lambda v: 17 * (v.detach() - x).clamp(-width, width) + 0 * v  # noqa: E731
    assert not torch.autograd.gradcheck(func, (leaf(x),), eps=eps, raise_exception=False)
    assert not fastgrad.gradcheck(func, (leaf(x),), eps=eps, raise_exception=False)


@pytest.mark.parametrize("engine", ["dense", "compressed", "sketch"])
@pytest.mark.parametrize("curvature", [1e2, 1e6, 1e8])
def test_curvature_does_not_hide_a_term_in_single_precision(curvature: float, engine: str) -> None:
    func = lambda v: curvature * (v - 5.0) ** 2 + 2 * v + v.detach().float().double()  # noqa: E731
    keywords = {"engine": engine, "fast_mode": engine == "sketch", "raise_exception": False}
    assert not torch.autograd.gradcheck(func, (leaf(5.0),), raise_exception=False)
    assert not fastgrad.gradcheck(func, (leaf(5.0),), **keywords)
