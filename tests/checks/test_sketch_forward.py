"""Fast mode in forward mode: jvps that depend on signs, and entries whose errors have either sign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.core.native import SmallProblem
from fastgrad.report.report import Report

FORWARD: dict[str, Any] = {"check_forward_ad": True, "check_backward_ad": False}
WRONG = 13


def beside(weight: float, change: Callable[[Tensor], Tensor]) -> Any:
    """The function x + weight * y, whose jvp changes the tangent of x."""

    class Beside(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, y: Tensor) -> Tensor:
            return x + weight * y

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor, other: Tensor) -> Tensor:
            return change(tangent.clone()) + weight * other

    return Beside.apply


def one_sided(sign: float, error: float) -> Callable[[Tensor], Tensor]:
    def change(tangent: Tensor) -> Tensor:
        if sign * tangent[WRONG] > 0:
            tangent[WRONG] *= 1 + error
        return tangent

    return change


def report(func: Any, n: int, seed: int = 0, **keywords: Any) -> Report:
    inputs = [torch.full((n,), value, dtype=torch.float64, requires_grad=True) for value in (0.3, 0.5)]
    return fastgrad.check(func, inputs, seed=seed, **FORWARD, **keywords)


@pytest.mark.parametrize("small", [True, False], ids=["small check", "complete check"])
@pytest.mark.parametrize("func", [lambda x: x[:0], lambda x: (x[:0], x[:0].sin())])
def test_outputs_without_elements_pass(func: Any, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        monkeypatch.setattr(SmallProblem, "trace", lambda *_: None)
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    found = fastgrad.check(func, x, fast_mode=True, engine="sketch", check_forward_ad=True)
    assert found.passed
    assert found.notes == ()
    assert found.plan is not None
    assert found.plan.engine == "sketch"


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("weight", "error"), [(1, 0.003), (20, 0.01), (1000, -1.0)])
def test_a_jvp_that_is_wrong_for_one_sign_fails(weight: float, error: float, sign: float, fast_mode: bool) -> None:
    """Next to larger derivatives, the sums of JVPs are off by less than the tolerance of their terms."""
    for seed in range(3):
        found = report(beside(weight, one_sided(sign, error)), 40, seed, fast_mode=fast_mode)
        assert found.failure is not None, found
        assert found.failure.kind in ("mismatch", "nonlinear"), found


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("n", [3000, 10_000])
def test_a_large_function_that_is_wrong_for_one_sign_fails(n: int, sign: float) -> None:
    for seed in range(3):
        assert report(beside(20, one_sided(sign, 0.01)), n, seed, fast_mode=True).failure is not None


@pytest.mark.parametrize(("n", "verdict"), [(100, "passed"), (2500, "undecided")])
def test_a_jvp_in_single_precision_is_left_to_the_exact_engine(n: int, verdict: str) -> None:
    """If there are too many entries for the exact engine, the check is undecided below a small error."""

    class Single(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sin() * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_forward(*inputs)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return (tangent.float() * (x.cos() * x + x.sin()).float()).double()

    x = (100 * torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).requires_grad_()
    found = fastgrad.check(Single.apply, x, fast_mode=True, **FORWARD)
    assert found.verdict == verdict, found
    assert found.undecided is None or found.undecided < 0.5  # entries are up to 300


@pytest.mark.parametrize("n", [40, 3000])
def test_right_ones_pass_with_the_smallest_bound(n: int) -> None:
    found = report(beside(1000, lambda tangent: tangent), n, fast_mode=True)
    assert found.passed
    assert all(one.bound <= 1e-5 for one in found.certificates), found


@pytest.mark.parametrize("error", [0.01, -0.01])
def test_a_wrong_entry_of_a_sum_is_located(error: float) -> None:
    """For errors of one sign, some seeds once located another entry, and a larger step verified the sum."""
    generator = torch.Generator().manual_seed(1)
    right = torch.randn(300, generator=generator, dtype=torch.float64)
    wrong = right.clone()
    wrong[7] *= 1 + error

    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return (right * x).sum()[None]

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return (wrong * tangent).sum()[None]

    x = torch.rand(300, generator=generator, dtype=torch.float64).requires_grad_()
    for seed in range(40):
        found = fastgrad.check(Weighted.apply, x, fast_mode=True, seed=seed, **FORWARD)
        assert found.failure is not None, f"seed {seed}: {found}"
        assert "d inputs[0][7]" in str(found)


def product_with_jvp(change: Callable[[list[Tensor | None]], float], defined: bool) -> Any:
    """The product of its inputs; change: the factor of the jvp for some tangents, None for undefined ones.

    defined: whether the jvp gets zeros for undefined tangents.
    """

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(*factors: Tensor) -> Tensor:
            return torch.stack(factors).prod(0)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_forward(*inputs)
            ctx.set_materialize_grads(defined)

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
            factors = torch.stack(ctx.saved_tensors)
            terms = [factors.prod(0) / x * u for x, u in zip(factors, tangents, strict=True) if u is not None]
            return change(list(tangents)) * torch.stack(terms).sum(0)

    return Product.apply


def only_of(which: int) -> Callable[[list[Tensor | None]], float]:
    def change(tangents: list[Tensor | None]) -> float:
        nonzero = [k for k, tangent in enumerate(tangents) if tangent is not None and tangent.any()]
        return 1.5 if nonzero == [which] else 1.0

    return change


@pytest.mark.parametrize("undefined", [False, True])
@pytest.mark.parametrize("size", [3, 300])
@pytest.mark.parametrize(("inputs", "which"), [(2, 0), (2, 1), (3, 0), (3, 2)])
def test_a_jvp_that_is_wrong_if_only_one_input_has_a_tangent(
    inputs: int, which: int, size: int, undefined: bool
) -> None:
    factors = tuple(1 + torch.rand(size, dtype=torch.float64).requires_grad_() for _ in range(inputs))
    func = product_with_jvp(only_of(which), defined=True)
    found = fastgrad.check(func, factors, fast_mode=True, check_undefined_grad=undefined, **FORWARD)
    assert found.failure is not None
    assert (found.failure.kind, found.failure.input) == ("mismatch", which)


def test_a_jvp_that_is_wrong_for_two_undefined_tangents() -> None:
    def change(tangents: list[Tensor | None]) -> float:
        return 1.5 if tangents.count(None) == 2 else 1.0

    func = product_with_jvp(change, defined=False)
    for size in (3, 300):
        factors = tuple(1 + torch.rand(size, dtype=torch.float64).requires_grad_() for _ in range(3))
        for fast_mode in (False, True):
            found = fastgrad.check(func, factors, fast_mode=fast_mode, **FORWARD)
            assert found.failure is not None
            assert found.failure.kind == "nonlinear"
            assert "for tangents of all inputs" in str(found)
            # As in torch, undefined tangents are not tested if check_undefined_grad=False.
            assert fastgrad.check(func, factors, fast_mode=fast_mode, check_undefined_grad=False, **FORWARD).passed


@pytest.mark.parametrize("size", [3, 300])
@pytest.mark.parametrize("fast_mode", [False, True])
def test_a_jvp_of_two_inputs_that_is_wrong_in_one_call(fast_mode: bool, size: int) -> None:
    factors = tuple(torch.linspace(1 + k, 2 + k, size, dtype=torch.float64).requires_grad_() for k in range(2))

    def wrong_in(call: int) -> Report:
        calls = 0

        def change(tangents: list[Tensor | None]) -> float:
            nonlocal calls
            calls += 1
            return 1.5 if calls == call else 1.0

        return fastgrad.check(product_with_jvp(change, defined=True), factors, fast_mode=fast_mode, **FORWARD)

    right = wrong_in(0)
    assert right.passed
    passes = [call for call in range(1, right.jvps + 1) if wrong_in(call).passed]
    assert not passes


def test_a_jvp_that_is_wrong_in_one_call_of_a_large_check() -> None:
    """The first one has a one-hot tangent, whose JVP is computed again."""

    def wrong_in(call: int) -> tuple[bool, int]:
        calls = 0

        class Steep(torch.autograd.Function):
            @staticmethod
            def forward(x: Tensor) -> Tensor:
                return 20 * (3 * x).exp()

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
                ctx.save_for_forward(output)

            @staticmethod
            def jvp(ctx: Any, tangent: Tensor) -> Tensor:
                nonlocal calls
                calls += 1
                (output,) = ctx.saved_tensors
                return 3 * output * tangent + (1e6 if calls == call else 0.0)

        x = torch.randn(3000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        return fastgrad.check(lambda x: Steep.apply(x), x, fast_mode=True, **FORWARD).passed, calls

    passed, count = wrong_in(0)
    assert passed
    assert not [call for call in range(1, count + 1) if wrong_in(call)[0]]
