"""Backwards that later calls of func, or their own writes, make wrong fail in torch's checker and in all engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

import fastgrad


def leaf(n: int) -> Tensor:
    return torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def sin_with_buffers(spoil: Callable[[Tensor], object], count: int = 1) -> Callable[[Tensor], Tensor]:
    """sin; `spoil` changes the gradients of all forwards except the last `count` ones."""
    last: deque[object] = deque(maxlen=count)

    class Sin(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:  # type: ignore[override]
            ctx.tag = object()  # type: ignore[attr-defined]
            last.append(ctx.tag)  # type: ignore[attr-defined]
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: FunctionCtx, g: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
            gradient = g * x.cos()
            if ctx.tag not in last:  # type: ignore[attr-defined]
                spoil(gradient)
            return gradient

    return Sin.apply


@pytest.mark.parametrize("n", [1, 3, 20, 200])
@pytest.mark.parametrize(
    "keywords", [{}, {"engine": "dense"}, {"fast_mode": True}, {"fast_mode": True, "engine": "sketch"}]
)
def test_a_later_forward_overwrites_what_backward_reads(n: int, keywords: dict[str, Any]) -> None:
    def check(spoil: Callable[[Tensor], object]) -> fastgrad.Report:
        return fastgrad.check(sin_with_buffers(spoil), leaf(n), **keywords)

    for spoil in (Tensor.zero_, lambda gradient: gradient[-1].zero_()):
        report = check(spoil)
        assert report.failure is not None
        assert report.failure.kind == "nondeterministic"
    assert check(lambda gradient: None).verdict == "passed"


@pytest.mark.parametrize(("n", "count"), [(3, 6), (12, 20), (30, 8), (100, 16), (100, 100), (1000, 127)])
@pytest.mark.parametrize("engine", ["auto", "dense", "compressed"])
def test_a_graph_whose_buffers_are_used_again_after_many_forwards(n: int, count: int, engine: Any) -> None:
    report = fastgrad.check(sin_with_buffers(Tensor.zero_, count), leaf(n), engine=engine)
    assert report.failure is not None
    assert report.failure.kind in ("nondeterministic", "mismatch")
    assert fastgrad.check(sin_with_buffers(Tensor.zero_, 10_000), leaf(n), engine=engine).passed


def exp_that_zeroes_older_results(count: int, adds_up: bool = False) -> Callable[[Tensor], Tensor]:
    """exp, or its sum; all results except the last `count` ones are set to zero without autograd's knowledge."""
    results: list[Tensor] = []

    def func(x: Tensor) -> Tensor:
        y = x.exp()
        results.append(y.detach())
        if len(results) > count:
            results.pop(0).data.zero_()
        return y.sum() if adds_up else y

    return func


@pytest.mark.parametrize("adds_up", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("n", [5, 12, 30, 100, 500])
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"engine": "dense"},
        {"engine": "dense", "memory_limit": 16_000},
        {"engine": "compressed"},
        {"fast_mode": True},
    ],
)
def test_a_later_call_writes_into_what_a_builtin_backward_reads(
    n: int, count: int, adds_up: bool, keywords: dict[str, Any]
) -> None:
    report = fastgrad.check(exp_that_zeroes_older_results(count, adds_up), leaf(n), **keywords)
    assert report.failure is not None
    assert report.failure.kind in ("nondeterministic", "mismatch")
    assert fastgrad.check(exp_that_zeroes_older_results(10_000, adds_up), leaf(n), **keywords).passed


@pytest.mark.parametrize("n", [4, 12, 30, 100])
@pytest.mark.parametrize("keywords", [{}, {"engine": "dense"}, {"engine": "compressed"}, {"fast_mode": True}])
def test_a_graph_that_is_recorded_after_the_differences_is_another_one(n: int, keywords: dict[str, Any]) -> None:
    calls = 0

    def func(x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        value = x.sin() * y
        return value if calls == 1 else value + (x - x.detach())

    x = leaf(n)
    for inputs in ((x, x), (x, x.detach().clone().requires_grad_())):
        calls = 0
        assert not fastgrad.check(func, inputs, **keywords).passed


def test_func_that_changes_while_it_is_evaluated_at_the_inputs() -> None:
    calls = 0

    class Drifts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:  # type: ignore[override]
            nonlocal calls
            calls += 1
            ctx.save_for_backward(x)
            return x.sin() + (0.1 if calls == 100 else 0.0)

        @staticmethod
        def backward(ctx: FunctionCtx, g: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
            return g * x.cos()

    report = fastgrad.check(Drifts.apply, leaf(200))
    assert report.failure is not None
    assert report.failure.kind == "nondeterministic func"
    assert "evaluated again at the inputs" in str(report)


class WritesGradOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.cos = x.cos()  # type: ignore[attr-defined]
        return x.sin()

    @staticmethod
    def backward(ctx: FunctionCtx, g: Tensor) -> Tensor:  # type: ignore[override]
        if g.is_contiguous() and 0 not in g.stride():
            return g.mul_(ctx.cos)  # type: ignore[attr-defined]
        return g * ctx.cos  # type: ignore[attr-defined]


@pytest.mark.parametrize("n", [3, 20, 200])
@pytest.mark.parametrize("fast_mode", [False, True])
def test_a_backward_that_writes_only_into_contiguous_grad_outputs(n: int, fast_mode: bool) -> None:
    report = fastgrad.check(WritesGradOutput.apply, leaf(n), fast_mode=fast_mode)
    assert report.failure is not None
    assert report.failure.kind == "modified grad_output"


@pytest.mark.parametrize("n", [1, 3, 12, 40])
@pytest.mark.parametrize("fast_mode", [False, True])
def test_a_gradient_that_is_missing_in_one_call_of_a_second_order_check(n: int, fast_mode: bool) -> None:
    calls, missing = 0, -1

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:  # type: ignore[override]
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: FunctionCtx, g: Tensor) -> Tensor | None:  # type: ignore[override]
            nonlocal calls
            (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
            calls += 1
            return None if calls == missing else 3 * x * x * g

    assert fastgrad.gradgradcheck(Cube.apply, leaf(n), fast_mode=fast_mode)
    for call in range(1, calls + 1):
        calls, missing = 0, call
        with pytest.raises((RuntimeError, AssertionError)):
            fastgrad.gradgradcheck(Cube.apply, leaf(n), fast_mode=fast_mode)


@pytest.mark.parametrize("other", [lambda y: y[:-1], lambda y: y.float(), lambda y: y[None], lambda y: None])
@pytest.mark.parametrize("n", [3, 400])
@pytest.mark.parametrize("fast_mode", [False, True])
def test_func_that_returns_another_kind_of_output_once(
    other: Callable[[Tensor], object], n: int, fast_mode: bool
) -> None:
    calls, changed = 0, -1

    def func(x: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return other(x**3) if calls == changed else x**3

    assert fastgrad.gradcheck(func, leaf(n), fast_mode=fast_mode)
    for call in range(2, calls + 1):
        calls, changed = 0, call
        with pytest.raises((RuntimeError, AssertionError)):
            fastgrad.gradcheck(func, leaf(n), fast_mode=fast_mode)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 20, 90])
@pytest.mark.parametrize("seed", range(3))
def test_a_gradient_that_is_wrong_on_all_graphs_but_the_last_one(n: int, seed: int) -> None:
    """The error is within rtol of the products in which it shows, but not within the tolerances of the entries."""
    graphs, error = 0, 1e-3

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            nonlocal graphs
            graphs += 1
            ctx.number = graphs
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            gradient = 2 * x * g
            if ctx.number < graphs:
                gradient[-1] += error * g.sum()
            return gradient

    report = fastgrad.check(Square.apply, leaf(n), seed=seed)
    assert report.failure is not None
    assert report.failure.kind == "nondeterministic"
    error = 0.0
    assert fastgrad.check(Square.apply, leaf(n), seed=seed).passed


@pytest.mark.parametrize("n", [8, 20, 90, 200])
def test_a_gradient_that_is_wrong_on_every_second_graph(n: int) -> None:
    """The first and the last graph of the check are wrong; the graph from which the rows are computed is right."""
    graphs, error = 0, 0.03

    class Sums(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            nonlocal graphs
            graphs += 1
            ctx.is_wrong = graphs % 2 == 1
            return x.cumsum(0)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            gradient = g.flip(0).cumsum(0).flip(0)
            if ctx.is_wrong:
                gradient[1] += error * g[n // 3]
            return gradient

    assert not torch.autograd.gradcheck(Sums.apply, leaf(n), raise_exception=False)
    graphs = 0
    assert not fastgrad.check(Sums.apply, leaf(n)).passed
    error = 0.0
    assert fastgrad.check(Sums.apply, leaf(n)).passed


@pytest.mark.parametrize("n", [1, 3])
def test_a_gradient_that_differs_within_rtol_if_a_vjp_is_repeated(n: int) -> None:
    last: Tensor | None = None

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            nonlocal last
            (x,) = ctx.saved_tensors
            factor = 1.0005 if last is not None and torch.equal(last, g) else 1.0
            last = g.clone()
            return factor * g * x.cos()

    assert not fastgrad.check(Sine.apply, leaf(n)).passed


@pytest.mark.parametrize("n", [1, 2, 8, 20, 90])
def test_a_backward_that_changes_what_an_older_graph_saved(n: int) -> None:
    """The first VJP on such a graph is right, and the following ones are not."""
    graphs = 0

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            nonlocal graphs
            graphs += 1
            ctx.number, ctx.x = graphs, x.detach().clone()
            return x * x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            gradient = 2 * ctx.x * g
            if ctx.number < graphs:
                ctx.x.mul_(1.1)
            return gradient

    assert not torch.autograd.gradcheck(Square.apply, leaf(n), raise_exception=False)
    assert not fastgrad.check(Square.apply, leaf(n)).passed
