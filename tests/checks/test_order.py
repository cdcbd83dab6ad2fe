"""Forward mode, undefined tangents and batched gradients, through check()."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

import fastgrad
from fastgrad.checks.order import check
from fastgrad.report.settings import Settings

FORWARD = Settings(check_forward_ad=True, check_backward_ad=False)


class Squared(torch.autograd.Function):
    """x * x; its jvp is tangent(x, tangent of x)."""

    tangent = staticmethod(lambda x, t: 2 * x * t)

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0].conj() * grad

    @classmethod
    def with_tangent(cls, tangent: Any) -> Any:
        return type("Planted", (cls,), {"jvp": staticmethod(lambda ctx, t: tangent(ctx.saved_tensors[0], t))}).apply


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


@pytest.mark.parametrize(
    ("func", "inputs"),
    [
        (torch.sin, (leaf(3, 2),)),
        (torch.mul, (leaf(4), leaf(4))),
        (torch.mul, (leaf(4, dtype=torch.complex128), leaf(4))),
        (torch.view_as_real, (leaf(3, dtype=torch.complex128),)),
        (lambda x: (x.sum(), x.detach(), torch.complex(x, x**2)), (leaf(5),)),
        (torch.matmul, (leaf(6, 4)[::2].t(), leaf(3, 2))),
        (lambda x: x * 1, (leaf(0),)),
    ],
)
@pytest.mark.parametrize("memory_limit", [None, 1])
def test_forward_mode_passes_what_is_right(func: Any, inputs: tuple[Tensor, ...], memory_limit: int | None) -> None:
    before = [value.detach().clone() for value in inputs]
    for settings in (FORWARD, Settings(check_forward_ad=True)):
        assert check(func, inputs, Settings(**{**vars(settings), "memory_limit": memory_limit})).passed
    assert all(torch.equal(value, old) for value, old in zip(inputs, before, strict=True))


def test_forward_mode_costs_one_evaluation_a_column() -> None:
    n = 40
    report = check(torch.sin, (leaf(n),), FORWARD)
    # Two for the linearity of the jvp, two for an undefined tangent.
    assert report.jvps <= n + 4
    assert report.evaluations - report.jvps <= 2 * n + 6
    assert report.vjps == 0


def test_the_same_tensor_twice_is_one_input() -> None:
    w = leaf(3)
    assert fastgrad.gradcheck(torch.mul, (w, w), check_forward_ad=True)


@pytest.mark.parametrize(
    ("dtype", "tangent", "headline"),
    [
        (
            torch.float64,
            lambda x, t: 2.1 * x * t,
            "Jacobian computed with forward mode mismatch for output 0 with respect to input 0:",
        ),
        (
            torch.complex128,
            lambda x, t: torch.complex((2 * x * t).real, (2.1 * x * t).imag),
            "While considering the imaginary part of complex inputs only, Jacobian computed with forward mode mismatch "
            "for output 0 with respect to input 0:",
        ),
        (torch.float64, lambda x, t: 2 * x * t.clamp(-1, 1), "jvp is not linear in its tangent: "),
    ],
)
def test_wrong_jvps_are_named(dtype: torch.dtype, tangent: Any, headline: str) -> None:
    func = Squared.with_tangent(tangent)
    assert fastgrad.gradcheck(func, leaf(3, dtype=dtype))
    with pytest.raises(fastgrad.GradcheckError) as raised:
        fastgrad.gradcheck(func, leaf(3, dtype=dtype), check_forward_ad=True)
    assert any(line.startswith(headline) for line in str(raised.value).splitlines()[:2])
    assert raised.value.report.failure is not None
    assert raised.value.report.failure.mode == "forward"


@pytest.mark.parametrize(("n", "right"), [(5, 1), (5, 3), (5, 5), (5, 6), (300, 1), (300, 250), (300, 300), (300, 301)])
def test_a_jvp_that_is_wrong_after_some_calls_is_not_deterministic(n: int, right: int) -> None:
    calls = 0

    def tangent(x: Tensor, t: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return 2 * x * t * (1 if calls <= right else 0.5)

    settings = Settings(check_forward_ad=True, check_undefined_grad=False, engine="dense")
    report = check(Squared.with_tangent(tangent), (leaf(n),), settings)
    assert report.failure is not None
    assert report.failure.kind == "nondeterministic"
    assert "was first" in report.failure.detail
    assert report.causes == ()


def test_values_of_a_jvp_that_changes_little_differ_in_the_message() -> None:
    calls = 0

    def tangent(x: Tensor, t: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return 2 * x * t * (1 + 1e-8 * calls)

    settings = Settings(atol=1e-9, rtol=1e-9, check_forward_ad=True, check_undefined_grad=False)
    failure = check(Squared.with_tangent(tangent), (leaf(5),), settings).failure
    assert failure is not None
    assert failure.kind == "nondeterministic"
    first, later = failure.detail.split("was first ")[1].split(" and later ")
    assert first != later


class Product(torch.autograd.Function):
    """a * b; an undefined tangent of a counts as ones."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)
        ctx.set_materialize_grads(False)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return (None, None) if grad is None else (grad * b, grad * a)

    @staticmethod
    def jvp(ctx: Any, s: Tensor | None, t: Tensor | None) -> Tensor:
        a, b = ctx.saved_tensors
        s = torch.ones_like(a) if s is None else s
        return s * b if t is None else s * b + a * t


def test_an_undefined_tangent_is_reported_with_one_element() -> None:
    report = check(Product.apply, (leaf(700), leaf(700)), Settings(check_forward_ad=True))
    assert report.failure is not None
    assert report.failure.kind == "undefined tangent"
    words = r"at \[\d+\], the tangent of the output is \S+ for the undefined tangent and \S+ for zero"
    assert re.fullmatch(words, report.failure.detail)


@pytest.mark.parametrize("seed", range(10))
def test_every_tangent_is_tried_negative(seed: int) -> None:
    func = Squared.with_tangent(lambda x, t: 2 * x * t.abs())
    with pytest.raises(fastgrad.GradcheckError, match="jvp is not linear in its tangent"):
        fastgrad.gradcheck(func, leaf(), check_forward_ad=True, seed=seed)


def test_a_backward_that_raises_for_every_grad_output_is_not_called_nonlinear() -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("for any grad_output")

    # An empty output has no row that runs the backward.
    with pytest.raises(RuntimeError, match="for any grad_output"):
        fastgrad.gradcheck(lambda x, y: (Raises.apply(x), y.sin()), (leaf(0), leaf(2)))


def test_the_worst_entry_of_a_forward_jacobian_is_named_by_output_and_input() -> None:
    def tangent(x: Tensor, t: Tensor) -> Tensor:
        result = 2 * x * t
        result[0, 2] += 0.5 * t[1, 1]
        return result

    with pytest.raises(fastgrad.GradcheckError, match=r"d out0\[0, 2\] / d x\[1, 1\]"):
        fastgrad.gradcheck(Squared.with_tangent(tangent), leaf(2, 3), check_forward_ad=True)


@pytest.mark.parametrize("call", range(2, 30, 3))
def test_inputs_are_restored_where_a_jvp_raises(call: int) -> None:
    x, calls = leaf(3), 0
    before = x.detach().clone()

    def func(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return x.sin()

    try:
        fastgrad.gradcheck(func, x, check_forward_ad=True)
    except KeyboardInterrupt:
        pass
    else:
        assert calls < call
    assert torch.equal(x, before)
    assert x.grad is None
    with torch.autograd.forward_ad.dual_level():  # none was left open
        pass


def test_batched_gradients_name_what_differs() -> None:
    def leaking(x: Tensor, grad: Tensor) -> Tensor:
        return 2 * x * grad

    assert fastgrad.gradcheck(
        Squared.with_tangent(leaking),
        leaf(3),
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )
    with pytest.raises(fastgrad.GradcheckError, match="While computing batched gradients, got: ") as raised:
        fastgrad.gradcheck(
            Squared.with_tangent(lambda x, t: 2 * x * t * (1 if t.sum().item() < 1e9 else 2)),
            leaf(3),
            check_forward_ad=True,
            check_batched_forward_grad=True,
        )
    assert "failed while testing batched gradient computation with forward-mode AD" in str(raised.value)
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_nothing_is_drawn_from_the_global_generator() -> None:
    state = torch.get_rng_state()
    assert fastgrad.gradcheck(
        torch.sin, leaf(3), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("fast_mode", "most"), [(False, 60), (True, 9)])
@pytest.mark.parametrize("n", [40, 400])
def test_cost_of_a_derivative_that_is_not_implemented(n: int, fast_mode: bool, most: int) -> None:
    """Torch's slow mode evaluates the numerical Jacobian first: 2 n evaluations, two calls of func each."""
    calls = 0

    def attention(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        query = x.reshape(1, 1, -1, 4)
        return torch.nn.functional.scaled_dot_product_attention(query, 2 * query, query.cos())

    x = torch.linspace(0.1, 1, n, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="flash_attention_for_cpu_backward is not implemented"):
        fastgrad.gradgradcheck(attention, (x,), fast_mode=fast_mode)
    assert calls <= most


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("n", [12, 400])
def test_cost_of_a_custom_backward_that_raises(n: int, fast_mode: bool) -> None:
    calls = 0

    class Raising(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("planted")

    x = torch.linspace(0.1, 1, n, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="planted"):
        fastgrad.gradcheck(Raising.apply, (x,), fast_mode=fast_mode)
    assert calls == 1


@pytest.mark.parametrize(("fast_mode", "most"), [(False, 20), (True, 9)])
def test_cost_of_a_jvp_that_is_not_implemented(fast_mode: bool, most: int) -> None:
    class WithoutJvp(Squared):
        jvp = torch.autograd.Function.jvp

    calls = 0

    def func(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return WithoutJvp.apply(x)

    x = torch.linspace(0.1, 1, 400, dtype=torch.float64, requires_grad=True)
    with pytest.raises(NotImplementedError, match="You must implement the jvp function"):
        fastgrad.gradcheck(func, (x,), check_forward_ad=True, check_backward_ad=False, fast_mode=fast_mode)
    assert calls <= most


def test_an_output_is_judged_before_what_the_next_one_raises() -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise KeyError("planted")

    for checker in (torch.autograd.gradcheck, fastgrad.gradcheck):
        with pytest.raises(GradcheckError, match="Jacobian mismatch for output 0"):
            checker(lambda x: (x.detach() * x, Raises.apply(x)), (leaf(3),))


def is_batched(grad: Tensor) -> bool:
    try:
        grad.sum().item()
    except RuntimeError:  # a batch has no single value
        return True
    return False


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize(
    ("of_second", "expected"),
    [
        (lambda batched: 3.0 if batched else 1.0, "Expected:\ntensor"),
        (lambda batched: None if batched else 1.0, "Expected:\ntensor"),
        (lambda batched: 3.0 if batched else None, "Expected:\nNone"),
    ],
)
def test_a_batch_that_differs_for_the_second_input_is_shown(of_second: Any, expected: str, fast_mode: bool) -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            return 2 * x + (y if of_second(False) is not None else 0 * y)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            factor = of_second(is_batched(grad))
            return 2 * grad, None if factor is None else factor * grad

    inputs = leaf(3), leaf(3)
    assert fastgrad.gradcheck(Sum.apply, inputs, fast_mode=fast_mode)
    report = fastgrad.check(Sum.apply, inputs, fast_mode=fast_mode, check_batched_grad=True)
    assert report.failure is not None
    assert report.failure.kind == "batched differs"
    assert (report.failure.output, report.failure.input) == (0, 1)
    assert expected in str(report)
