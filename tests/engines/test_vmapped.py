"""Batches under vmap give the columns of a loop up to rounding, or are rejected; they never change a verdict."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

import fastgrad
from fastgrad.checks.order import check
from fastgrad.engines import executor, vmapped
from fastgrad.problem.problem import Problem
from fastgrad.problem.second_order import Backward, grad_outputs_for
from fastgrad.report.settings import Settings, Tolerances
from tests.costs import set_costs

EPS = 1e-6
DENSE = Settings(engine="dense")


def leaf(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses batches for every func that accepts them, even if they are slower."""
    set_costs(monkeypatch, guess_seconds=0.0)
    set_costs(monkeypatch, trial_seconds=0.0)
    set_costs(monkeypatch, trial_gain=0.0)
    set_costs(monkeypatch, vectorized_columns_seconds=1.0)  # not in a small check


W = leaf(9, 9, seed=1).detach()
TRANSPOSED = leaf(4, 6).detach().t().requires_grad_()
TWICE = leaf(8)
FUNCS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (lambda x: x.softmax(0), (leaf(70),)),
    (lambda x: torch.linalg.inv(x + 9 * torch.eye(9)), (leaf(9, 9),)),
    (lambda x, y: (x @ y, 2.0, (x.sum() * y).cumsum(1)), (leaf(5, 9), leaf(9, 4, seed=2))),
    (lambda x, s, y: torch.outer(x.sin(), y * y) * s, (leaf(7), 3.0, leaf(3, dtype=torch.complex128, seed=3))),
    (lambda z: torch.fft.fft(z).conj(), (leaf(33, dtype=torch.complex128),)),
    (lambda x: (x.cumsum(0) * x.t()[0, 0]).t(), (TRANSPOSED,)),
    (lambda x, y: x.sum() * y, (TWICE, TWICE)),
    (lambda x, y: (x * 0 + 1, y.exp()), (leaf(3), leaf())),
    (lambda x, y: x[1:].tanh().cumsum(0), (leaf(6), leaf(0))),
]


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(("func", "inputs"), FUNCS)
def test_columns_are_those_of_the_loop(func: Callable[..., Any], inputs: tuple[Any, ...], size: int) -> None:
    with Problem(func, inputs) as problem:
        single = problem.difference_columns(0, problem.n, EPS, False)
        for first, count in ((0, problem.n), (problem.n // 3, problem.n // 2)):
            columns = vmapped.difference_columns(problem, first, count, size, EPS)
            torch.testing.assert_close(columns, single[first : first + count], rtol=0, atol=1e-8)
            assert executor.disagreement(problem, Settings(), first, columns, False) == 1


def test_a_func_that_records_by_itself() -> None:
    factor = leaf()  # the captured tensor requires grad, too

    def func(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return factor * x.sin()

    with Problem(func, (leaf(12),)) as problem:
        columns = vmapped.difference_columns(problem, 0, 12, 5, EPS)
        assert not columns.requires_grad
        torch.testing.assert_close(columns, problem.difference_columns(0, 12, EPS, False), rtol=0, atol=1e-8)


def test_points_are_the_same_bits() -> None:
    x = (leaf(12).detach() * torch.logspace(-9, 12, 12, dtype=torch.float64)).requires_grad_()
    y = leaf(4, dtype=torch.float32)
    with Problem(lambda x, y: (x * 1, y * 1), (x, y), warn_of_precision=False) as problem:
        columns = vmapped.difference_columns(problem, 0, problem.n, 5, EPS)
        assert torch.equal(columns, problem.difference_columns(0, problem.n, EPS, False))


def test_func_is_called_once_a_batch() -> None:
    with Problem(lambda x: x.cumsum(0), (leaf(20),)) as problem:
        before = problem.evaluations
        vmapped.difference_columns(problem, 0, 20, 8, EPS)
        assert problem.evaluations == before + 3


class NoRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.sum() + (g * x).sum()


class WrongRule(torch.autograd.Function):
    """In a batch, the first point gets the outputs of the second point."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x.sum(-1, keepdim=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.sum() + (g * x).sum()

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        out = WrongRule.apply(x)
        out[0] = out[1]
        return out, 0


BUFFER = torch.zeros(80, dtype=torch.float64)
CAPTURED = leaf(80)
KEPT: dict[str, Tensor] = {}


def kept(x: Tensor) -> Tensor:
    KEPT["last"] = x
    return x


def summed(x: Tensor) -> Tensor:
    y = x.cumsum(0)
    KEPT["sum"] = KEPT.get("sum", 0) + y.detach().sum()
    return y


REFUSING: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
    ("no batching rule", NoRule.apply, "func raises"),
    ("reads a value", lambda x: x.cumsum(0) * (2 if x.sum().item() < 1e9 else 3), "func reads values"),
    ("draws", lambda x: x.cumsum(0) + 0 * torch.rand(80).double(), "func raises"),
    ("writes into what it captured", lambda x: BUFFER.copy_(x).cumsum(0), "func keeps tensors"),
    ("keeps its argument", lambda x: kept(x).cumsum(0), "func keeps tensors"),
    ("keeps a result", lambda x: kept(x.cumsum(0)), "func keeps tensors"),
    ("adds up results", summed, "func keeps tensors"),
    ("ignores its argument", lambda _: CAPTURED.cumsum(0), "values differ"),
    ("a wrong rule", WrongRule.apply, "do not agree"),
    ("returns what it should not", lambda x: x.cumsum(0) if x.requires_grad else x.sum(), "func raises"),
]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("func", "reason"), [case[1:] for case in REFUSING], ids=[case[0] for case in REFUSING])
def test_refused_where_batches_are_not_the_function(func: Callable[[Tensor], Tensor], reason: str) -> None:
    state = torch.get_rng_state()
    x = CAPTURED if reason == "values differ" else leaf(80)
    bits = x.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = check(func, (x,), DENSE)
    assert report.plan is not None
    assert report.plan.batch is None
    assert reason in report.plan.reason
    assert report.passed == check(func, (x,), replace(DENSE, memory_limit=1000)).passed
    assert torch.equal(x.detach(), bits)
    if reason != "func raises":
        assert not any(torch._C._functorch.is_functorch_wrapped_tensor(value) for value in KEPT.values())
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("always")
def test_an_input_whose_batches_raise_is_differenced_one_by_one() -> None:
    x, bias = leaf(80), leaf(6)

    def func(x: Tensor, bias: Tensor) -> Tensor:
        if torch._C._functorch.is_batchedtensor(bias):
            raise RuntimeError("no batches of bias")
        return x.cumsum(0) * bias.prod()

    report = check(func, (x, bias), DENSE)
    assert report.passed
    assert report.plan is not None
    assert report.plan.batch is not None
    assert 12 < report.evaluations < 80


@pytest.mark.usefixtures("always")
def test_a_wrong_rule_is_seen_wherever_it_is_wrong() -> None:
    x = leaf(80)
    with Problem(lambda x: x.cumsum(0), (x,)) as problem:
        columns = vmapped.difference_columns(problem, 0, 80, 80, EPS)
        assert executor.disagreement(problem, Settings(), 0, columns, False) == 1
        for row, column in ((0, 0), (79, 79), (41, 17)):
            off = columns.clone()
            off[column, row] += 1e-5
            assert executor.disagreement(problem, Settings(), 0, off, False) > 1
        off = columns.clone()
        off[3, 4] = torch.nan
        assert executor.disagreement(problem, Settings(), 0, off, False) > 1


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("limit", [None, 250_000])
@pytest.mark.parametrize(("func", "inputs"), FUNCS[:3])
def test_right_gradients_pass(func: Callable[..., Any], inputs: tuple[Any, ...], limit: int | None) -> None:
    report = check(func, inputs, replace(DENSE, memory_limit=limit))
    assert report.passed
    assert report.plan is not None
    assert report.plan.batch is not None
    assert "times as fast as single calls" in report.plan.reason
    assert report.evaluations < report.n


def wrong(x: Tensor, y: Tensor) -> Tensor:
    """The gradient of y[2, 1] is missing."""
    mask = torch.zeros_like(y)
    mask[2, 1] = 1.0
    return x.cumsum(0) @ (y * (1 - mask) + (y * mask).detach())


@pytest.mark.usefixtures("always")
def test_a_failure_is_told_from_evaluations_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = leaf(10, 8), leaf(8, 4, seed=2)
    report = check(wrong, inputs, DENSE)
    set_costs(monkeypatch, trial_columns=10**9)
    alone = check(wrong, inputs, DENSE)
    assert report.plan is not None
    assert report.plan.batch is None
    assert "a mismatch is checked again, one call at a time" in report.plan.reason
    assert report.failure is not None
    assert alone.failure is not None
    assert report.failure.input == alone.failure.input == 1
    assert report.failure.comparison == alone.failure.comparison
    assert report.pairs == alone.pairs


@pytest.mark.usefixtures("always")
def test_what_batches_get_wrong_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = vmapped.difference_columns

    def off(*arguments: Any) -> Tensor:
        columns = honest(*arguments)
        columns[-1, -1] += 1.0
        return columns

    monkeypatch.setattr(vmapped, "difference_columns", off)
    monkeypatch.setattr(executor, "disagreement", lambda *_: 1.0)
    monkeypatch.setattr(executor, "speedup", lambda *_: 10.0)
    report = check(lambda x: x.cumsum(0), (leaf(80),), DENSE)
    assert report.passed


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("error", "passes"), [(5e-6, True), (1e-3, False)])
def test_batches_that_are_off_once_are_a_lead_unless_it_is_rounding(
    error: float, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = vmapped.difference_columns, []

    def off_once(*arguments: Any) -> Tensor:
        columns = honest(*arguments)
        calls.append(arguments)
        columns[3, 5] += error * (len(calls) == 1)
        return columns

    monkeypatch.setattr(vmapped, "difference_columns", off_once)
    monkeypatch.setattr(executor, "speedup", lambda *_: 10.0)
    report = check(lambda x: x.cumsum(0).sin(), (leaf(300),), Settings())
    assert calls
    assert report.plan is not None
    assert "no batches or replays: the columns do not agree" in report.plan.reason
    assert report.passed is passes
    assert passes or (report.failure is not None and report.failure.kind == "nondeterministic func")


def test_constant_functions() -> None:
    no_graph = leaf(80)
    for func, passed in ((lambda _: torch.ones(5).double(), True), (lambda x: x.detach().cumsum(0), False)):
        assert check(func, (no_graph,), DENSE).passed is passed


@pytest.mark.usefixtures("always")
def test_every_input_has_its_own_step_and_tolerance() -> None:
    own = Tolerances(1e-5, 1e-4, 1e-3), Tolerances(1e-6, 1e-5, 1e-3)
    settings = replace(DENSE, inputs=own)
    inputs = leaf(40), leaf(40, seed=2)
    report = check(lambda x, y: x.sum() * y, inputs, settings)
    assert report.passed
    assert report.plan is not None
    assert report.plan.batch is not None


def test_the_clock_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    set_costs(monkeypatch, guess_seconds=0.0)
    set_costs(monkeypatch, trial_seconds=0.0)
    set_costs(monkeypatch, vectorized_columns_seconds=1.0)  # not in a small check
    for seconds, faster in (((0.0, 1.0, 1.1), True), ((0.0, 1.0, 401.0), False)):
        clock = iter(seconds)
        monkeypatch.setattr(executor, "clock", lambda _, clock=clock: next(clock))
        report = check(lambda x: x.cumsum(0), (leaf(80),), DENSE)
        assert report.passed
        assert report.plan is not None
        assert (report.plan.batch is not None) is faster
        assert ("0.01 times as fast" in report.plan.reason) is not faster


@pytest.mark.usefixtures("always")
def test_not_tried_where_func_needs_a_graph_or_changes_inputs() -> None:
    def differs_without_graph(x: Tensor) -> Tensor:
        return x.cumsum(0) * (1 if torch.is_grad_enabled() else 2)

    def changes(x: Tensor) -> Tensor:
        with torch.no_grad():
            x.detach().mul_(1.0)
        return x.cumsum(0)

    for func, reason in ((differs_without_graph, ""), (changes, "no batches or replays: func changes its inputs")):
        report = check(func, (leaf(80),), DENSE)
        assert report.passed
        assert report.plan is not None
        assert report.plan.batch is None
        assert report.plan.reason.endswith(reason)


@pytest.mark.usefixtures("always")
def test_ctrl_c_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = leaf(80)
    bits = x.detach().clone()

    def interrupted(v: Tensor) -> Tensor:
        if torch.func is not None and type(v) is Tensor and v is not x:
            raise KeyboardInterrupt
        return v.cumsum(0)

    with pytest.raises(KeyboardInterrupt):
        check(interrupted, (x,), DENSE)
    assert torch.equal(x.detach(), bits)


def test_a_batch_keeps_to_an_eighth_of_the_limit() -> None:
    with Problem(lambda x: x.cumsum(0), (leaf(1000),)) as problem:
        for limit in (10**5, 10**6, 10**7):
            size = vmapped.most_columns(problem, limit)
            assert size * vmapped.column_bytes(problem) <= limit // 8
        assert vmapped.most_columns(problem, 10**5) < vmapped.MIN_COLUMNS <= vmapped.most_columns(problem, None)


SECOND_ORDER: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (lambda q, k, v: torch.softmax(q @ k.t(), -1) @ v, (leaf(3, 4), leaf(5, 4, seed=2), leaf(5, 2, seed=3))),
    (lambda x, w: torch.nn.functional.conv1d(x, w), (leaf(1, 2, 9), leaf(3, 2, 3, seed=2))),
    (lambda x: (x.sin(), 3, x.detach(), x.cumsum(0) * x), (leaf(8),)),
    (lambda x, y: x * x.abs().sum() + 0 * y.detach().sum(), (leaf(6, dtype=torch.complex128), leaf(2))),
]


@pytest.mark.parametrize(("func", "inputs"), SECOND_ORDER)
def test_columns_of_a_backward(func: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    grads = grad_outputs_for(func, inputs, "random", 0)
    backward = Backward(func, inputs, grads)
    with Problem(backward, inputs + grads, records_differences=False) as problem:
        single = problem.difference_columns(0, problem.n, EPS, False)
        columns = vmapped.difference_columns(problem, 0, problem.n, 100, EPS)
        torch.testing.assert_close(columns, single, rtol=0, atol=1e-8)
        # Outside, backward runs as before.
        assert torch.equal(problem.difference_columns(0, problem.n, EPS, False), single)


@pytest.mark.usefixtures("always")
def test_second_order_in_batches() -> None:
    report = fastgrad.check(lambda x: x.cumsum(0).exp() * x.sum(), (leaf(64),), order=2, engine="dense")
    assert report.passed
    assert report.plan is not None
    assert report.plan.batch is not None
    assert report.evaluations < 64


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("wrong", [False, True])
def test_a_func_that_differs_under_transforms(wrong: bool) -> None:
    """The batched columns are refused; a wrong second derivative fails by single calls."""

    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return g * (x.detach() if wrong else x).exp()

    def func(x: Tensor) -> Tensor:
        in_transform = torch._C._functorch.maybe_get_level(x) != -1
        return x.cumsum(0).sin() * 2 if in_transform else Exp.apply(x.cumsum(0)) * x.sum()

    report = fastgrad.check(func, (leaf(64),), order=2, engine="dense")
    assert report.passed is not wrong
    assert report.plan is not None
    assert report.plan.batch is None
    assert "the values differ from those of single calls" in report.plan.reason


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("begin", [0, 40])
def test_a_cache_with_a_key_of_some_elements(order: Any, begin: int) -> None:
    """Steps of the other elements get a cached result, but not in batches, for which no key can be computed."""
    cache: dict[tuple[float, ...], Tensor] = {}

    def func(x: Tensor) -> Tensor:
        z = x
        with suppress(RuntimeError):
            key = tuple(x.detach()[begin : begin + 40].tolist())
            if key not in cache:
                cache.clear()
                cache[key] = x.detach().clone()
            z = cache[key] + (x - x.detach())
        return z.cumsum(0).sin()

    assert not fastgrad.check(func, (leaf(80),), order=order, engine="dense").passed


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("order", [1, 2])
def test_a_flag_that_is_not_reset_by_an_exception(order: Any) -> None:
    busy = []

    def func(x: Tensor) -> Tensor:
        assert not busy
        busy.append(True)
        scale = 2.0 if float(x.detach().sum()) < 1e9 else 3.0
        busy.clear()
        return (x.cumsum(0) * scale).sin()

    assert fastgrad.check(func, (leaf(80),), order=order, engine="dense").passed
    assert not busy


@pytest.mark.usefixtures("always")
def test_single_columns_are_compared() -> None:
    """A function that keeps no tensors, and that does not change for steps of single elements."""
    x = leaf(80)
    origin = x.detach().clone()

    def func(x: Tensor) -> Tensor:
        if torch._C._functorch.maybe_get_level(x) != -1:
            return x.cumsum(0)
        is_single = (x.detach() != origin).sum() == 1
        return torch.where(is_single, origin.cumsum(0) + 0 * x, x.cumsum(0))

    report = fastgrad.check(func, (x,), engine="dense")
    assert not report.passed
    assert report.plan is not None
    assert report.plan.batch is None


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("where", ["plain", "batch"])
def test_an_exception_that_comes_once_is_raised(where: str, order: Any) -> None:
    """Raised by the call that observes func, or by the first batch."""
    raised: list[str] = []

    def func(x: Tensor) -> Tensor:
        observed = any(isinstance(mode, vmapped._Observed) for mode in _get_current_function_mode_stack())
        here = "batch" if torch._C._functorch.maybe_get_level(x) != -1 else "plain" if observed else ""
        if here == where and not raised:
            raised.append(here)
            raise ValueError("once")
        return x.cumsum(0).sin()

    with pytest.raises(ValueError, match="once"):
        fastgrad.check(func, (leaf(80),), order=order, engine="dense")
