"""A func that returns other values in a single call: a check that has used these values fails."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.core.native import IS_NATIVE
from tests.costs import set_costs
from tests.planted.row import function

Func = Callable[[Tensor], Tensor]


def leaf(n: int) -> Tensor:
    noise = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return (torch.linspace(0.02, 0.5, n, dtype=torch.float64) + 1e-3 * noise).requires_grad_()


def wrong_once(func: Func, wrong: int, factor: float) -> tuple[Func, Callable[[], int]]:
    """A func that returns larger values in one call; and a function that returns the number of calls so far."""
    calls = 0

    def called(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        y = func(x)
        return y + factor * (x.flip(0) if y.shape == x.shape else x.sum()) if calls == wrong else y

    return called, lambda: calls


def outcome(
    func: Func, n: int, wrong: int, keywords: dict[str, Any], factor: float = 0.1
) -> tuple[str, int, tuple[int, ...]]:
    """The verdict, the number of calls of func, and the numbers of calls in the report."""
    called, calls = wrong_once(func, wrong, factor)
    report = fastgrad.check(called, leaf(n), **keywords)
    return report.verdict, calls(), (report.evaluations, report.vjps, report.jvps)


FUNCS: dict[str, Func] = {
    "sin": torch.sin,
    "sum of exp": lambda x: x.exp().sum(),
    "sin of cumsum": lambda x: x.cumsum(0).sin(),
    "large": lambda x: x.sin() + 1e6,
    # With a small atol, the first step of fast mode is larger because of rounding, and then smaller again.
    "curved": lambda x: (2 * x).exp().sum() * (torch.arange(1.0, 9.0, dtype=x.dtype) * x.sum()).sin(),
}
KEYWORDS: dict[str, dict[str, Any]] = {
    "exact": {},
    "fast": {"fast_mode": True},
    "fast with a small atol": {"fast_mode": True, "atol": 1e-8},
    "forward": {"fast_mode": True, "check_forward_ad": True},
    "forward alone": {"check_forward_ad": True, "check_backward_ad": False},
    "compressed": {"engine": "compressed"},
    "sketch": {"fast_mode": True, "engine": "sketch"},
}


@pytest.mark.parametrize("factor", [0.1, math.nan, math.inf])
@pytest.mark.parametrize("keywords", KEYWORDS.values(), ids=KEYWORDS)
@pytest.mark.parametrize("name", FUNCS)
def test_a_check_that_makes_other_calls_because_of_one_value_does_not_pass(
    name: str, keywords: dict[str, Any], factor: float
) -> None:
    """Values that are not compared, for example those next to zero tangents, have no effect."""
    verdict, calls, counts = outcome(FUNCS[name], 8, 0, keywords)
    assert verdict == "passed"
    for wrong in range(1, calls + 1):
        found = outcome(FUNCS[name], 8, wrong, keywords, factor)
        assert found[0] == "failed" or found[1:] == (calls, counts), wrong


@pytest.mark.parametrize("factor", [0.1, math.nan])
def test_a_third_step_of_fast_mode_does_not_hide_values_of_earlier_steps(factor: float) -> None:
    clamped = leaf(8).detach()

    def func(x: Tensor) -> Tensor:  # the second derivative jumps at x, and the noise is proportional to the step
        return (2.5 * (x - clamped).relu()).square().sum()

    verdict, calls, counts = outcome(func, 8, 0, {"fast_mode": True})
    assert (verdict, calls) == ("passed", 2 + 3 * 7 + 7)  # the first step is repeated, because the derivatives change
    for wrong in range(1, calls + 1):
        found = outcome(func, 8, wrong, {"fast_mode": True}, factor)
        assert found[0] in ("failed", "not converged") or found[1:] == (calls, counts), wrong


@pytest.mark.parametrize("factor", [0.1, math.nan])
def test_each_further_step_of_a_certificate_counts(factor: float) -> None:
    """Differences at six steps decide on these steep outputs. An error at one step may be absent at a better step."""

    def steep(x: Tensor) -> Tensor:
        return torch.polygamma(1, x + 0.02)

    verdict, usual, _ = outcome(steep, 200, 0, {})
    assert (verdict, usual > 200) == ("passed", True)
    for wrong in [*range(1, 30), *range(30, usual + 1, 3)]:
        verdict, made, _ = outcome(steep, 200, wrong, {}, factor)
        assert verdict == "failed" or made == usual, wrong


def outer(x: Tensor) -> Tensor:
    """A sparse Jacobian plus small entries everywhere. So each pattern is rejected."""
    return x[:, None] * x.new_ones(1, 5) + 1e-3 * x.sum()


def in_order(x: Tensor) -> Tensor:
    return x.sort()[0] ** 2


@pytest.mark.parametrize(
    ("func", "n", "wrong"),
    [
        (torch.sin, 50, 1),  # the values at x, with which no guess agrees
        (outer, 200, 129),  # a difference of a pattern that is then left to the dense engine
        (in_order, 3000, 194),  # a difference of a group of suspected entries, which are right when measured alone
    ],
)
def test_one_call_of_a_rejected_pattern(func: Func, n: int, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_costs(monkeypatch, trial_columns=10**9)  # otherwise the number of calls would depend on their time
    noise = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = (noise + 0.3).requires_grad_()
    calls = 0

    def once(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return func(x) + 0.1 * (calls == wrong)

    assert fastgrad.check(func, x).passed
    assert not fastgrad.check(once, x).passed
    assert calls >= wrong


@pytest.mark.parametrize(
    "keywords", [{}, {"engine": "dense"}, {"engine": "compressed"}, {"fast_mode": True}, {"nondet_tol": 1e-3}]
)
@pytest.mark.parametrize("n", [3, 50])
@pytest.mark.parametrize("func", [torch.sin, torch.sum, torch.square])
def test_the_first_call_returns_other_values(func: Func, n: int, keywords: dict[str, Any]) -> None:
    """No difference uses the values of this call."""
    calls = 0

    def once(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return func(x) + 0.1 * (calls == 1)

    assert fastgrad.check(func, leaf(n), **keywords).passed
    report = fastgrad.check(once, leaf(n), **keywords)
    assert report.failure is not None
    assert report.failure.kind == "nondeterministic func"


def test_the_first_graph_has_other_gradients() -> None:
    """One entry is three times as large. The first graph gives the rows of a small check of a pattern."""
    calls = 0

    def func(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        y = x.sin()
        factor = torch.ones_like(y)
        factor[100] = 3.0
        return y * factor - (y * (factor - 1)).detach() if calls == 1 else y

    report = fastgrad.check(func, leaf(200))
    assert report.failure is not None
    assert report.failure.kind == "nondeterministic"


@pytest.mark.parametrize("n", [200, 3000])
def test_one_graph_with_other_gradients(n: int) -> None:
    """The values are the same in all calls, but one graph gives doubled gradients."""

    def made_by(wrong: int) -> tuple[str, int]:
        calls = 0

        def func(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            y = torch.polygamma(1, x + 0.02)
            return y * 2 - y.detach() if calls == wrong else y

        return fastgrad.check(func, leaf(n)).verdict, calls

    verdict, usual = made_by(0)
    assert verdict == "passed"
    for wrong in range(1, min(usual, 40) + 1, 1 if n == 200 else 3):
        found = made_by(wrong)
        assert found[0] == "failed" or found[1] == usual, wrong


@pytest.mark.parametrize("keywords", [{}, {"fast_mode": True}, {"fast_mode": True, "engine": "sketch"}])
@pytest.mark.parametrize("n", [6, 30])
def test_the_same_for_second_derivatives(n: int, keywords: dict[str, Any]) -> None:
    verdict, calls, counts = outcome(torch.sin, n, 0, {"order": 2, **keywords})
    assert verdict == "passed"
    for wrong in range(1, calls + 1):
        found = outcome(torch.sin, n, wrong, {"order": 2, **keywords})
        assert found[0] == "failed" or found[1:] == (calls, counts), wrong


@pytest.mark.parametrize("keywords", [{}, {"check_forward_ad": True, "check_backward_ad": False}], ids=["", "forward"])
@pytest.mark.parametrize("factor", [0.1, math.nan, math.inf])
def test_each_call_of_undecided_sums_counts(factor: float, keywords: dict[str, Any]) -> None:
    """Func jumps at x, so random directions decide nothing. After the entries have agreed, their calls are repeated."""

    def func(x: Tensor) -> Tensor:
        return torch.where(x == x.detach().round(), x, 0)

    x = torch.arange(1.0, 13.0, dtype=torch.float64)
    verdict, usual = "", 0
    for wrong in range(60):
        called, calls = wrong_once(func, wrong, factor)
        report = fastgrad.check(called, x.clone().requires_grad_(), fast_mode=True, **keywords)
        if not wrong:
            verdict, usual = report.verdict, calls()
        assert report.verdict == "failed" or (report.verdict, calls()) == (verdict, usual), wrong


SPARSE_CALLS = 9 if IS_NATIVE else 15
"""Calls of func in a sparse check; plain Python has no small checks. The last one only records a graph."""


@pytest.mark.parametrize("wrong", range(2, SPARSE_CALLS))
def test_each_difference_of_a_large_sparse_check_counts(wrong: int) -> None:
    assert outcome(torch.sin, 2000, 0, {})[1] == SPARSE_CALLS
    assert outcome(torch.sin, 2000, wrong, {})[0] == "failed"


@pytest.mark.parametrize(("keywords", "calls"), [({}, range(2, 10)), ({"check_forward_ad": True}, range(2, 18))])
def test_each_difference_of_a_large_check_in_fast_mode_counts(keywords: dict[str, Any], calls: range) -> None:
    """Differences that look wrong or are noisy are replaced by better ones. If repeated, they must be the same."""
    keywords = {"fast_mode": True, **keywords}
    _, usual, _ = outcome(torch.sin, 20_000, 0, keywords)
    for wrong in calls:
        verdict, made, _ = outcome(torch.sin, 20_000, wrong, keywords)
        assert verdict == "failed" or made == usual, wrong


class Product(torch.autograd.Function):
    """x.sin() * y, whose backward adds `extra` to the gradient of x in call number `wrong`."""

    wrong = calls = 0
    extra = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x.sin() * y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        Product.calls += 1
        wrong = Product.extra if Product.calls == Product.wrong else 0.0
        return grad_output * x.cos() * y + wrong, grad_output * x.sin()


@pytest.mark.parametrize("extra", [7.0, math.nan, math.inf])
@pytest.mark.parametrize("keywords", [{}, {"fast_mode": True}, {"check_batched_grad": True}, {"dtype": torch.float32}])
def test_each_call_of_a_backward_counts(keywords: dict[str, Any], extra: float) -> None:
    """In a lower dtype, this tests only the calls of the check in double precision and those of the products."""
    dtype = keywords.get("dtype", torch.float64)
    own = {name: value for name, value in keywords.items() if name != "dtype"}
    x = torch.linspace(0.3, 0.9, 3, dtype=dtype, requires_grad=True)
    y = torch.linspace(0.9, 1.3, 3, dtype=dtype, requires_grad=True)

    def verdict(wrong: int) -> str:
        Product.wrong, Product.calls, Product.extra = wrong, 0, extra
        return fastgrad.check(lambda x, y: (Product.apply(x, y), x.square().sum()), (x, y), **own).verdict

    assert verdict(0) == "passed"
    calls = Product.calls if dtype is torch.float64 else 25
    assert [wrong for wrong in range(1, calls + 1) if verdict(wrong) == "passed"] == []


class Sine(torch.autograd.Function):
    """sin, whose backward adds `extra` to an element of its result in call number `wrong`."""

    wrong = calls = 0
    extra = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        Sine.calls += 1
        gradient = grad_output * x.cos()
        return gradient + Sine.extra * (torch.arange(x.numel()) == 0) if Sine.calls == Sine.wrong else gradient


@pytest.mark.parametrize("extra", [1.0, 0.01, math.nan])
@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("n", [1, 3, 20])
def test_each_call_of_a_backward_counts_in_gradgradcheck(n: int, fast_mode: bool, extra: float) -> None:
    x = torch.linspace(0.3, 0.9, n, dtype=torch.float64, requires_grad=True)

    def passes(wrong: int) -> bool:
        Sine.wrong, Sine.calls, Sine.extra = wrong, 0, extra
        return fastgrad.gradgradcheck(Sine.apply, (x,), fast_mode=fast_mode, raise_exception=False)

    assert passes(0)
    assert [wrong for wrong in range(1, Sine.calls + 1) if passes(wrong)] == []


@pytest.mark.parametrize("wrong", range(1, 13))
def test_each_call_of_a_backward_of_one_complex_output_counts(wrong: int) -> None:
    """The first calls are those of sparsity detection."""
    calls = 0

    def backward(grad_output: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return grad_output * x.cos().conj() + 9.0 * (calls == wrong)

    func = function(lambda x: x.sin().sum(), backward)
    x = torch.randn(60, dtype=torch.complex128, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert fastgrad.check(func, x).verdict == "failed"


@pytest.mark.parametrize("extra", [9.0, math.nan])
@pytest.mark.parametrize("n", [257, 10_000])
def test_each_call_of_a_backward_of_large_values_counts(n: int, extra: float) -> None:
    """At the second step of a small check, outputs get weights, and new grad_outputs replace the first ones."""
    wrong = 0
    is_zero: list[bool] = []

    def backward(grad_output: Tensor, x: Tensor) -> Tensor:
        is_zero.append(not bool(grad_output.any()))
        right = torch.empty_like(grad_output).scatter_(0, x.argsort(), 1.5 * grad_output)
        return right + extra if len(is_zero) == wrong else right

    func = function(lambda x: 1.5 * x.sort()[0], backward)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    x = (order.double() + 1).requires_grad_()

    def verdict() -> str:
        return fastgrad.check(func, x, fast_mode=True, seed=33).verdict

    assert verdict() == "passed"
    for wrong in [call for call, zero in enumerate(is_zero, 1) if not zero]:
        is_zero.clear()
        assert verdict() == "failed", wrong


@pytest.mark.parametrize(
    ("dtype", "keywords"),
    [(torch.float64, {"engine": "compressed"}), (torch.float64, {"fast_mode": True}), (torch.float32, {})],
)
def test_an_exception_of_one_call_does_not_end_in_a_pass(dtype: torch.dtype, keywords: dict[str, Any]) -> None:
    calls = wrong = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == wrong:
            raise RuntimeError("launch failed")

    def forward(x: Tensor) -> Tensor:
        count()
        return x.sin()

    def backward(grad_output: Tensor, x: Tensor) -> Tensor:
        count()
        return grad_output * x.cos()

    func = function(forward, backward)
    x = torch.linspace(0.1, 0.9, 12, dtype=dtype, requires_grad=True)

    def passes() -> bool:
        return fastgrad.check(lambda x: func(x).outer(func(x)).sum(0) + func(x), x, **keywords).passed

    assert passes()
    for wrong in range(1, calls + 1, 1 + calls // 20):
        calls = 0
        passed = False
        with contextlib.suppress(RuntimeError):
            passed = passes()
        assert not passed, wrong


@pytest.mark.parametrize(("n", "scale", "offset"), [(60, 1e4, 0.0), (1000, 1.0, 1e4)])
def test_each_call_of_a_backward_counts_if_rounding_is_large(n: int, scale: float, offset: float) -> None:
    """The sums of the small check decide nothing, and the complete check uses its VJPs."""
    calls = wrong = 0

    def backward(grad_output: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return grad_output * (x.cos() + 1) * (math.nan if calls == wrong else scale)

    func = function(lambda x: (x.sin() + x) * scale + offset, backward)
    x = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def verdict() -> str:
        return fastgrad.check(func, x, fast_mode=True).verdict

    assert verdict() == "passed"
    for wrong in range(1, calls - 1):  # the last two get zeros
        calls = 0
        assert verdict() == "failed", wrong


class _Wrapped(torch.Tensor):
    """A constant factor whose operators run in Python and return plain tensors; one of its calls in backward is wrong.

    Factors of quantized weights work like this.
    """

    values: Tensor
    wrong_call: int
    calls: int

    @staticmethod
    def __new__(cls, values: Tensor, wrong_call: int) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)
        made.values, made.wrong_call, made.calls = values, wrong_call, 0
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*(value.values if isinstance(value, _Wrapped) else value for value in args), **(kwargs or {}))
        for factor in (value for value in args if isinstance(value, _Wrapped)):
            if torch._C._current_autograd_node() is not None:  # in a backward
                factor.calls += 1
                result = result + 0.5 if factor.calls == factor.wrong_call else result
        return result


@pytest.mark.skipif(not IS_NATIVE, reason="plain Python does not see saved tensors")
@pytest.mark.parametrize("keywords", [{}, {"engine": "dense"}, {"fast_mode": True}], ids=str)
@pytest.mark.parametrize("n", [5, 20, 60])
def test_backward_of_a_wrapped_factor_in_one_call(n: int, keywords: dict[str, Any]) -> None:
    x = torch.linspace(0.2, 0.9, n, dtype=torch.float64, requires_grad=True)
    values = torch.linspace(1.0, 2.0, n, dtype=torch.float64)
    right = _Wrapped(values, 0)
    assert fastgrad.check(lambda x: x * right, x, **keywords).passed
    assert right.calls > 3
    for wrong_call in range(1, right.calls + 1, 2):
        factor = _Wrapped(values, wrong_call)
        passed = fastgrad.check(lambda x, factor=factor: x * factor, x, **keywords).passed
        # Fewer calls may suffice than in the first check of a process, which may be slower.
        assert not passed or factor.calls < wrong_call, wrong_call
