"""Independent tests: forward against reverse mode, and the order of a Taylor remainder."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from tests.planted.causes import both_modes


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(2)).requires_grad_()


def sine(backward: float = 1.0, jvp: float = 1.0) -> Callable[[Tensor], Tensor]:
    """sin(x), with its VJPs and JVPs multiplied by these factors."""
    return both_modes(torch.sin, lambda g, x: backward * g * x.cos(), lambda t, x: jvp * t * x.cos())


FUNCTIONS: list[tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = [
    (torch.sin, lambda: (leaf(3, 4),)),
    (torch.matmul, lambda: (leaf(3, 4), leaf(4, 2))),
    (lambda x: (x.exp(), x.sum(1)), lambda: (leaf(3, 4),)),
    (lambda z: z * z.conj() + z.exp(), lambda: (leaf(5, dtype=torch.complex128),)),
    (lambda x: x.softmax(1), lambda: (leaf(2, 3).detach().mul(50).requires_grad_(),)),
    (lambda x: 1e6 * x.sin(), lambda: (leaf(4),)),
]


@pytest.mark.parametrize(("func", "inputs"), FUNCTIONS)
def test_right_gradients_pass_both(func: Callable[..., Any], inputs: Callable[[], tuple[Tensor, ...]]) -> None:
    adjoint = fastgrad.adjoint_test(func, inputs())
    assert adjoint.passed
    assert adjoint.error < 1e-10
    for mode in ("reverse", "forward"):
        taylor = fastgrad.taylor_test(func, inputs(), mode=mode)
        assert taylor.passed
        assert taylor.rate > 1.9
        assert len(taylor.steps) == len(taylor.remainders) == 19


def test_a_linear_function_leaves_no_remainder() -> None:
    taylor = fastgrad.taylor_test(lambda x: 3 * x, leaf(4))
    assert taylor.passed
    assert taylor.rate == math.inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [0.0, 1.0, 2.0])
def test_rounding_that_hides_every_error_passes_nothing(dtype: torch.dtype, factor: float) -> None:
    taylor = fastgrad.taylor_test(sine(backward=factor), leaf(3, 4, dtype=dtype))
    assert not taylor.passed
    assert math.isnan(taylor.rate)


def test_large_values_that_hide_every_error_pass_nothing() -> None:
    wrong = sine(backward=2.0)
    assert fastgrad.taylor_test(lambda x: wrong(x) + 1e8, leaf(4)).rate == pytest.approx(1, abs=0.1)
    assert math.isnan(fastgrad.taylor_test(lambda x: wrong(x) + 1e14, leaf(4)).rate)


def test_a_constant_function_passes() -> None:
    taylor = fastgrad.taylor_test(lambda x: 0 * x + 3, leaf(4))
    assert taylor.passed
    assert taylor.rate == math.inf


@pytest.mark.parametrize(
    "func",
    [
        lambda x: torch.nn.functional.layer_norm(x, (4,)).sum(),
        lambda x: x.log_softmax(1).logsumexp(1),
        lambda x: x.sin() ** 2 + x.cos() ** 2 - 1,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_that_cancel_to_rounding_pass(func: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    for seed in range(5):
        assert fastgrad.taylor_test(func, leaf(3, 4, dtype=dtype), seed=seed).rate == math.inf


@pytest.mark.parametrize("error", [1.0, 1e-2, 1e-4])
def test_a_wrong_gradient_has_a_rate_of_one(error: float) -> None:
    wrong = sine(backward=1 + error)
    taylor = fastgrad.taylor_test(wrong, leaf(3, 4))
    assert not taylor.passed
    assert taylor.rate == pytest.approx(1, abs=0.1)
    assert fastgrad.taylor_test(wrong, leaf(3, 4), mode="forward").passed


def test_modes_that_differ_are_told_to_rounding() -> None:
    assert not fastgrad.adjoint_test(sine(backward=1 + 1e-6), leaf(3, 4)).passed
    assert fastgrad.adjoint_test(sine(backward=1 + 1e-6), leaf(3, 4), rtol=1e-5).passed
    # Both modes have the same error: only differences show it.
    assert fastgrad.adjoint_test(sine(2.0, 2.0), leaf(3, 4)).passed
    assert not fastgrad.taylor_test(sine(2.0, 2.0), leaf(3, 4)).passed


def test_the_pair_that_disagrees_is_named() -> None:
    right, wrong = sine(), sine(jvp=-1.0)
    found = fastgrad.adjoint_test(lambda a, flag, b: (a * 1, right(a) + wrong(b)), (leaf(3), True, leaf(3)))
    assert (found.output, found.input) == (1, 1)
    assert found.forward.shape == found.reverse.shape == (3, 2, 2)
    differ = (found.forward - found.reverse).abs() > 1e-8
    assert differ.tolist() == [[[False, False], [False, True]]] * 3


def test_a_nan_passes_nothing() -> None:
    nan = sine(backward=math.nan)
    assert not fastgrad.adjoint_test(nan, leaf(3)).passed
    assert not fastgrad.taylor_test(nan, leaf(3)).passed


def log(x: Tensor) -> Tensor:
    if bool((x <= 0).any()):
        raise ValueError("not positive")
    return x.log()


def next_to_zero(value: float) -> Tensor:
    return torch.tensor([value] * 6 + [1.0], dtype=torch.float64, requires_grad=True)


def test_steps_outside_of_the_domain_are_left_out() -> None:
    with pytest.warns(UserWarning, match=r"^func raised at the 4 largest of 19 steps, .*'not positive'"):
        taylor = fastgrad.taylor_test(log, next_to_zero(1e-3))
    assert taylor.passed
    assert 2 < len(taylor.steps) < 19
    assert taylor.left_out + taylor.steps == tuple(2.0 ** -(6 + k) for k in range(19))
    assert repr(taylor).endswith(f"{len(taylor.steps)} steps, func raised at {len(taylor.left_out)} larger ones>")


def test_few_steps_within_the_domain_are_not_enough() -> None:
    with pytest.raises(ValueError, match="not positive"):
        fastgrad.taylor_test(log, next_to_zero(1e-7))


@pytest.mark.parametrize("step", range(1, 19))
def test_an_exception_at_a_step_below_one_without_is_raised(step: int) -> None:
    calls = 0

    def func(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == evaluations - 18 + step:
            raise ArithmeticError("planted")
        return x.sin()

    evaluations = math.inf
    fastgrad.taylor_test(func, leaf(3))
    evaluations, calls = calls, 0
    with pytest.raises(ArithmeticError, match="planted"):
        fastgrad.taylor_test(func, leaf(3))


def test_inputs_and_seeds() -> None:
    x = leaf(3, 4)
    before = x.detach().clone()
    first, again = (fastgrad.taylor_test(torch.sin, x, seed=5) for _ in range(2))
    assert first == again
    assert first.derivative != fastgrad.taylor_test(torch.sin, x, seed=6).derivative
    assert torch.equal(x, before)
    assert x.grad is None


def test_single_precision_has_its_own_tolerance() -> None:
    x = leaf(4, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning, because the test has no eps that may be too small
        found = fastgrad.adjoint_test(torch.sin, x)
    assert found.passed
    assert found.rtol == pytest.approx(3.4e-4, rel=0.02)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: fastgrad.adjoint_test(torch.sin, leaf(2), trials=0), ValueError, "trials must be an integer of at"),
        (lambda: fastgrad.adjoint_test(torch.sin, leaf(2), rtol=-1), ValueError, "rtol must be at least zero, got -1"),
        (lambda: fastgrad.adjoint_test(torch.sin, leaf(2), seed=None), ValueError, "seed must be an integer"),  # type: ignore[arg-type]
        (lambda: fastgrad.taylor_test(torch.sin, leaf(2), seed=2.5), ValueError, "seed must be an integer"),  # type: ignore[arg-type]
        (lambda: fastgrad.taylor_test(torch.sin, leaf(2), mode="both"), ValueError, "mode must be 'reverse' or"),  # type: ignore[arg-type]
        (lambda: fastgrad.taylor_test(lambda x: x.detach(), leaf(2)), ValueError, "an output that requires grad"),
        (
            lambda: torch.no_grad()(fastgrad.taylor_test)(torch.sin, leaf(2)),
            ValueError,
            "disabled here by torch.no_grad",
        ),
        (
            lambda: fastgrad.adjoint_test(torch.sin, torch.ones(2)),
            ValueError,
            "^adjoint_test expects at least one input",
        ),
        (lambda: fastgrad.taylor_test(torch.sin, ()), ValueError, "^taylor_test expects at least one input tensor"),
    ],
)
def test_usage_errors(call: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("first", [3, 5])
def test_exceptions_of_func_are_not_hidden(first: int) -> None:
    calls = 0

    def func(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls >= first:
            raise ArithmeticError("planted")
        return x.sin()

    with pytest.raises(ArithmeticError, match="planted"):
        fastgrad.taylor_test(func, leaf(3))


def test_a_func_without_forward_mode_says_so() -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 2 * g

    with pytest.raises(NotImplementedError, match="jvp"):
        fastgrad.adjoint_test(Reverse.apply, leaf(2))
    assert fastgrad.taylor_test(Reverse.apply, leaf(2)).passed


def test_results_are_true_where_they_passed_and_compare() -> None:
    x = leaf(3)
    right, wrong = fastgrad.adjoint_test(sine(), x), fastgrad.adjoint_test(sine(jvp=1.1), x)
    assert right
    assert not wrong
    assert right == fastgrad.adjoint_test(sine(), x)
    assert len({right, wrong}) == 2
    assert repr(wrong).startswith("<AdjointTest: failed for output 0 and input 0, error 0.0")
    assert repr(right).startswith("<AdjointTest: passed, error ")
    steep, flat = fastgrad.taylor_test(sine(), x), fastgrad.taylor_test(sine(backward=1.1), x)
    assert steep
    assert not flat
    assert steep == fastgrad.taylor_test(sine(), x)
    assert len({steep, flat}) == 2
    assert repr(flat) == "<TaylorTest: failed, rate 1, 19 steps>"
    assert repr(steep) == "<TaylorTest: passed, rate 2, 19 steps>"
