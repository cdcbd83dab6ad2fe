"""Small checks whose columns come from vectorized calls: same verdicts, few calls; single calls where these fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.checks.order import check
from fastgrad.checks.small_calls import MAX_VECTORIZED_NUMBERS
from fastgrad.engines import cost_model, vmapped
from fastgrad.report.report import Report
from tests.costs import set_costs
from tests.planted.row import function

N = 24


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectorized calls are tried even if single calls take less time."""
    set_costs(monkeypatch, vectorized_columns_seconds=0.0)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()


def report_of(func: Callable[..., Any], *inputs: Any, **keywords: Any) -> tuple[Report, int]:
    """The report, and how often func was called."""
    calls = 0

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return func(*arguments)

    return fastgrad.check(counted, inputs, **keywords), calls


def is_vectorized(report: Report) -> bool:
    return report.plan is not None and report.plan.batch is not None


def in_vectorized_call(x: Tensor) -> bool:
    return bool(torch._C._functorch.maybe_get_level(x) != -1)


def chain(x: Tensor) -> Tensor:
    return (x.sin().cumsum(0) * x).tanh()


RIGHT: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (chain, (leaf(N),)),
    (lambda x, y: (x @ y, (x.sum() * y).cumsum(1), 2), (leaf(4, 5), leaf(5, 3))),
    (lambda x, s, z: x.sum() * torch.fft.fft(z) * s, (leaf(5), 3.0, leaf(9, dtype=torch.complex128))),
    (lambda x: (x.cumsum(0) * x.t()[0, 0]).t(), (leaf(4, 6).detach().t().requires_grad_(),)),
    (lambda x: (x * 0 + 1, x.exp().sum()), (leaf(N),)),
]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize(("func", "inputs"), RIGHT)
def test_right_functions_pass(func: Callable[..., Any], inputs: tuple[Any, ...], order: Any) -> None:
    report, calls = report_of(func, *inputs, order=order, engine="dense")
    assert report.passed
    assert is_vectorized(report)
    assert report.plan is not None
    assert report.plan.batch == report.n
    # The first evaluation, one with all inputs moved, a vectorized call, two columns, two directions, a new graph; in
    # second order, also the call that makes grad_outputs, and graphs for negated and recorded gradients.
    assert calls <= (16 if order == 1 else 20)


def test_calls_do_not_depend_on_the_number_of_columns() -> None:
    assert [report_of(chain, leaf(n), engine="dense")[1] for n in (16, 40, 120)] == [16, 16, 16]


def imprecise(x: Tensor) -> Tensor:
    """Rounding makes sums of columns differ from differences along random directions by more than atol / 16."""
    return 3e4 * chain(x)


def test_a_rejected_vectorized_call_takes_few_evaluations() -> None:
    report, calls = report_of(imprecise, leaf(N), engine="dense")
    assert report.passed
    assert not is_vectorized(report)
    # One with all inputs moved; a vectorized call and four evaluations along a direction, both again. The two columns
    # of single calls, which agreed, are used.
    assert calls == 2 * N + 2 + 1 + 2 * (1 + 4)


@pytest.mark.parametrize("call", range(2, 2 * N + 13))
def test_each_call_after_a_rejected_vectorized_call_counts(call: int) -> None:
    made = 0

    def func(x: Tensor) -> Tensor:
        nonlocal made
        made += 1
        return imprecise(x) * (1.01 if made == call else 1.0)

    assert not fastgrad.check(func, (leaf(N),), engine="dense").passed


def test_few_columns_of_a_fast_function_come_from_single_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "COSTS", cost_model.CostModel())
    assert report_of(torch.sin, leaf(30), engine="dense")[1] == 62
    assert report_of(torch.sin, leaf(90), engine="dense")[1] == 16
    assert report_of(chain, leaf(45), engine="dense")[1] == 16


@pytest.mark.parametrize("n", [500, 530])
def test_points_of_a_vectorized_call_fit_in_a_cache(n: int) -> None:
    report, calls = report_of(lambda x: x.sin().sum(), leaf(n), engine="dense")
    assert report.passed
    assert (calls <= 16) is (n * (n + 2) <= MAX_VECTORIZED_NUMBERS)


@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_a_wrong_entry_fails_by_single_calls(mode: str) -> None:
    """The reported entry comes from single calls, and the text does not mention batches."""
    weight = torch.ones(N, N, dtype=torch.float64)

    def func(x: Tensor) -> Tensor:
        y = weight @ x.sin()
        wrong = torch.zeros(N, dtype=torch.float64)
        wrong[7] = 0.1
        return y + (wrong * (x - x.detach())).sum()

    keywords = {"check_forward_ad": True, "check_backward_ad": False} if mode == "forward" else {}
    report, calls = report_of(func, leaf(N), **keywords)
    assert not report.passed
    assert report.failure is not None
    assert report.failure.kind == "mismatch"
    assert calls > 2 * N


def reads(x: Tensor) -> Tensor:
    return chain(x) * (2.0 if float(x.detach().sum()) < 1e9 else 1.0)


def has_no_rule(x: Tensor) -> Tensor:
    return torch.column_stack([chain(x)])


def differs(x: Tensor) -> Tensor:
    return x.cumsum(0) if in_vectorized_call(x) else chain(x)


def differs_for_single_steps(x: Tensor) -> Tensor:
    if in_vectorized_call(x):
        return x.cumsum(0)
    is_single = (x.detach() != leaf(N)).sum() == 1
    return torch.where(is_single, x.cumsum(0) * 2, x.cumsum(0))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("func", [reads, has_no_rule, differs])
def test_functions_that_cannot_be_vectorized(func: Callable[[Tensor], Tensor], order: Any) -> None:
    report, calls = report_of(func, leaf(N), order=order, engine="dense")
    assert report.passed
    assert not is_vectorized(report)
    assert calls >= 2 * N


def test_single_columns_are_compared() -> None:
    report, _ = report_of(differs_for_single_steps, leaf(N))
    assert not report.passed


def test_a_func_that_ignores_its_arguments() -> None:
    """The parameters of a module, which are perturbed in place."""
    module = torch.nn.Linear(4, 6, dtype=torch.float64)
    x = leaf(3, 4).detach()
    report, calls = report_of(lambda *parameters: module(x).tanh(), *module.parameters(), engine="dense")
    assert report.passed
    assert not is_vectorized(report)
    assert calls <= 2 * 30 + 16


@pytest.mark.parametrize("order", [1, 2])
def test_tensors_that_func_keeps_are_usable_afterwards(order: Any) -> None:
    kept: list[Tensor] = []

    def func(x: Tensor) -> Tensor:
        kept.append(x.detach().sum())
        return chain(x)

    assert fastgrad.check(func, (leaf(N),), order=order).passed
    assert all(torch.isfinite(value).item() for value in kept)


def test_random_numbers_are_not_used_in_vectorized_calls() -> None:
    """A vectorized call could draw one number for all columns, so that no column would show that func is random."""
    report, _ = report_of(lambda x: chain(x) + 1e-3 * torch.rand_like(x), leaf(N))
    assert not report.passed


def test_outputs_of_another_kind_along_directions_only_prevent_vectorization(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the steps that verify vectorized columns change the number of outputs: columns from single calls decide."""
    monkeypatch.setattr(vmapped, "READING", frozenset())
    x = leaf(N)
    before = x.detach().clone()

    def func(v: Tensor) -> Tensor:
        if in_vectorized_call(v):
            return chain(v)
        steps = (v.detach() - before).abs()
        return chain(v)[: N - 1 if int(steps.ne(0).sum()) > 1 and float(steps.min()) < 0.95e-6 else N]

    report, _ = report_of(func, x, engine="dense")
    assert report.passed
    assert not is_vectorized(report)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("factor", [1.01, 1 + 1e-9])
@pytest.mark.parametrize("call", range(2, 16))
def test_a_single_wrong_call_fails(call: int, factor: float, order: Any) -> None:
    made = 0

    def func(x: Tensor) -> Tensor:
        nonlocal made
        made += 1
        return chain(x) * (factor if made == call else 1.0)

    assert not fastgrad.check(func, (leaf(N),), order=order).passed


def test_an_exception_in_a_vectorized_call_that_comes_once_is_raised() -> None:
    raised: list[bool] = []

    def func(x: Tensor) -> Tensor:
        if in_vectorized_call(x) and not raised:
            raised.append(True)
            raise ValueError("once")
        return chain(x)

    with pytest.raises(ValueError, match="once"):
        fastgrad.check(func, (leaf(N),))


def test_an_interrupt_in_a_vectorized_call() -> None:
    x = leaf(N)
    before = x.detach().clone()

    def func(x: Tensor) -> Tensor:
        if in_vectorized_call(x):
            raise KeyboardInterrupt
        return chain(x)

    with pytest.raises(KeyboardInterrupt):
        fastgrad.check(func, (x,))
    assert torch.equal(x, before)
    assert torch._C._functorch.maybe_current_level() is None


def test_custom_functions_are_called_with_single_points() -> None:
    func = function(lambda x: x.cumsum(0).sin(), lambda g, x: (g * x.cumsum(0).cos()).flip(0).cumsum(0).flip(0))
    report, calls = report_of(func, leaf(N), engine="dense")
    assert report.passed
    assert not is_vectorized(report)
    assert calls > 2 * N


def test_compiled_functions_are_not_compiled_again() -> None:
    compilations: list[bool] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compilations.append(True)
        return module.forward

    compiled = torch.compile(chain, backend=backend)
    compiled(leaf(N))
    report, _ = report_of(compiled, leaf(N))
    assert report.passed
    assert is_vectorized(report)
    assert len(compilations) == 1


def test_no_tolerance_that_tests_could_use() -> None:
    report = check(chain, (leaf(N),), fastgrad.report.settings.Settings(atol=0.0, rtol=1e-3, engine="dense"))
    assert not is_vectorized(report)
