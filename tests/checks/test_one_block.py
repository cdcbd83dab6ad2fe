"""Small problems: VJPs in one call, vectorized if they run no Python; disagreements are judged row by row."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import fastgrad
from fastgrad.checks import one_block
from fastgrad.checks.order import check
from fastgrad.core.native import largest_errors
from fastgrad.core.torch_private import DispatchMode
from fastgrad.engines import cost_model
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings
from tests.costs import set_costs
from tests.problem.test_problem import KeepsItsGradient

SETTINGS = Settings()


@pytest.fixture(autouse=True)
def vectorizes_from_six_rows_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_block, "MIN_VECTORIZED", 6)


def leaf(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


def backward_of(func: Callable[..., Any], inputs: tuple[Tensor, ...], seconds: float = 1e-6) -> Any:
    """All VJPs, computed as if an evaluation took this many seconds."""
    with Problem(func, inputs) as problem, mock.patch.object(cost_model, "COSTS", cost_model.CostModel()):
        return one_block.whole_backward(problem, SETTINGS, seconds)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "exp": (torch.exp, (leaf(5, 4),)),
    "matmul": (torch.matmul, (leaf(4, 3), leaf(3, 5, seed=1))),
    "softmax": (lambda x: x.softmax(1), (leaf(3, 5),)),
    "cumsum, no batching rule": (lambda x: x.cumsum(0), (leaf(12),)),
    "conv": (lambda x, w: F.conv1d(x, w), (leaf(1, 2, 9), leaf(3, 2, 3, seed=1))),
    "outputs of several sizes": (lambda x: (x.sin(), x.sum(), x[:3] * x[3:6]), (leaf(10),)),
    "an input without gradient in one output": (lambda x, y: (x * 2, (x * y).sin()), (leaf(9), leaf(9, seed=1))),
    "complex": (lambda z: z * z.conj() + z**3, (leaf(10, dtype=torch.complex128),)),
    "complex of real": (torch.fft.fft, (leaf(10),)),
    "real of complex": (lambda z: z.abs(), (leaf(11, dtype=torch.complex128),)),
    "zero-dimensional": (lambda x: x.sin(), (leaf(),)),
    "empty": (lambda x: x[:0], (leaf(10),)),
    "transposed input": (lambda x: x.exp(), (leaf(4, 5).detach().t().requires_grad_(),)),
    "float32": (lambda x: x.float().sin().double(), (leaf(10),)),
}


@pytest.mark.parametrize("name", CASES)
def test_vectorized_rows_are_those_of_single_vjps(name: str) -> None:
    func, inputs = CASES[name]
    vectorized, singly = backward_of(func, inputs), backward_of(func, inputs, seconds=1.0)
    assert not singly.vectorized
    largest = max(part.rows.shape[0] for part in singly.parts)
    assert vectorized.vectorized == (largest >= 6)
    assert len(vectorized.parts) == len(singly.parts)
    for left, right in zip(vectorized.parts, singly.parts, strict=True):
        torch.testing.assert_close(left.rows, right.rows, rtol=1e-14, atol=1e-14)
        assert torch.equal(left.repeated, right.repeated[: left.repeated.shape[0]])
        assert left.match.repeats
        assert left.match.dtypes
        assert left.match.sizes
    assert vectorized.vjps <= singly.vjps
    assert vectorized.add_up == singly.add_up == (name != "float32")  # rounding in float32 is examined
    assert vectorized.are_zero == singly.are_zero


@pytest.mark.parametrize("name", CASES)
def test_what_agrees_at_once_is_what_is_judged_part_by_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    func, inputs = CASES[name]
    tolerances = Settings(eps=1e-2, atol=1e-2) if name == "float32" else SETTINGS
    set_costs(monkeypatch, guess_seconds=math.inf)  # for machines of any speed
    at_once = check(func, inputs, tolerances)
    monkeypatch.setattr("fastgrad.checks.dense.agrees", lambda *_: False)
    in_parts = check(func, inputs, tolerances)
    assert at_once.passed
    assert in_parts.passed
    assert at_once.pairs == in_parts.pairs
    assert at_once.certificates == in_parts.certificates
    for module in ("complete", "dense"):
        monkeypatch.setattr(f"fastgrad.checks.{module}.is_small", lambda *_: False)
    assert check(func, inputs, tolerances).pairs == at_once.pairs


@pytest.mark.parametrize("row", [0, 2, 9])
def test_a_wrong_row_is_named_however_it_was_found(row: int) -> None:
    def wrong(x: Tensor) -> Tensor:
        scale = torch.ones(10, dtype=torch.float64)
        scale[row] = 0.0
        return x * scale + x.detach() * (1 - scale)  # only torch's own operators: it is vectorized

    x = leaf(10)
    assert backward_of(wrong, (x,)).vectorized
    report = check(wrong, (x,), SETTINGS)
    assert report.failure is not None
    assert report.failure.kind == "mismatch"
    assert report.failure.comparison is not None
    assert report.failure.comparison.worst is not None
    assert report.failure.comparison.worst.output_index == report.failure.comparison.worst.input_index == (row,)
    assert report.failure.comparison.mismatches == 1


def test_the_fault_of_vectorizing_is_none_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    x, original = leaf(10), one_block.whole_backward

    def spoiled(*arguments: Any) -> Any:
        whole = original(*arguments)
        assert whole.vectorized
        whole.parts[0].rows[5] = 7.0
        return whole

    monkeypatch.setattr(one_block, "whole_backward", spoiled)
    report = check(torch.exp, (x,), SETTINGS)
    assert report.passed
    # All rows again, two of them twice, and one product on the first graph and on a new one; no other calls.
    assert report.vjps == backward_of(torch.exp, (x,)).vjps + 10 + 2 + 2


class Squares(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Squares.calls += 1
        (x,) = ctx.saved_tensors
        return torch.from_numpy(2 * x.detach().numpy() * grad.numpy())  # one grad_output at a time


def test_python_in_backward_gets_one_grad_output_at_a_time() -> None:
    Squares.calls = 0
    whole = backward_of(lambda x: Squares.apply(x.sin()).exp(), (leaf(10),))
    assert not whole.vectorized
    assert Squares.calls == whole.vjps


@pytest.mark.parametrize("where", ["input", "inside", "node"])
def test_hooks_get_one_grad_output_at_a_time(where: str) -> None:
    x, seen = leaf(10), []

    def hook(*gradients: Any) -> None:
        seen.append(gradients)

    def func(v: Tensor) -> Tensor:
        y = v.sin()
        if where == "inside":
            y.register_hook(hook)
        if where == "node":
            assert y.grad_fn is not None
            y.grad_fn.register_hook(hook)
        return y.exp()

    handle = x.register_hook(hook) if where == "input" else None
    whole = backward_of(func, (x,))
    assert not whole.vectorized
    assert len(seen) == whole.vjps
    if handle is not None:
        handle.remove()


def test_what_cannot_be_vectorized_is_run_singly_without_a_word() -> None:
    def noisy(v: Tensor) -> Tensor:  # backward recomputes it, but vmap allows no random numbers
        return v * (1 + 0 * torch.rand(10, dtype=torch.float64))

    def func(x: Tensor) -> Any:
        return checkpoint(noisy, x, use_reentrant=False)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not backward_of(func, (leaf(10),)).vectorized
        assert check(func, (leaf(10),), SETTINGS).passed
        assert check(lambda x: x.cumsum(0), (leaf(12),), SETTINGS).passed  # has no batching rule


def test_rows_that_were_to_be_vectorized_are_judged_anew() -> None:
    x = leaf(12)
    for func in (torch.exp, lambda x: x.split(3), lambda x: x.split(9)):
        assert not one_block.single_rows(backward_of(func, (x,)))
        singly = backward_of(func, (x,), seconds=1.0)
        assert len(one_block.single_rows(singly)) == len(singly.parts)


def test_a_slow_function_is_not_vectorized() -> None:
    assert backward_of(torch.exp, (leaf(10),), seconds=2e-4).vectorized
    assert not backward_of(torch.exp, (leaf(10),), seconds=2e-3).vectorized


def test_an_error_that_does_not_come_again_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: Any) -> Any:
        raise KeyError("once")

    monkeypatch.setattr(one_block, "whole_backward", raises)
    with pytest.raises(KeyError, match="once"):
        fastgrad.gradcheck(torch.exp, (leaf(3),))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_largest_errors_are_those_of_compare(dtype: torch.dtype) -> None:
    with Problem(lambda x, y: (x * y).sin(), (leaf(6, dtype=dtype), leaf(6, dtype=dtype, seed=1))) as problem:
        whole = one_block.whole_backward(problem, SETTINGS, 1.0)
        columns = problem.difference_columns(0, problem.n, 1e-6, True)
        first, width = (1, 2) if dtype.is_complex else (0, 1)
        rows = whole.parts[0].rows
        each = [(block.size, dtype.is_complex) for block in problem.inputs]
        usual = [(*one, 1e-5, 1e-3) for one in each]
        found = largest_errors(rows, columns, first, width, usual)
        assert found is not None
        numerical = columns.t()[first::width]
        for block, (absolute, _) in zip(problem.inputs, found, strict=True):
            within = block.slice
            error = rows[:, within] - numerical[:, within]
            entries = torch.view_as_complex(error.reshape(6, -1, 2).contiguous()) if dtype.is_complex else error
            assert absolute == pytest.approx(float(entries.abs().max()), rel=1e-12)
        assert largest_errors(rows, columns, first, width, [usual[0], (*each[1], 1e-16, 0.0)]) is None
        with pytest.raises(RuntimeError, match="must be contiguous and on one device"):
            largest_errors(rows, columns[:3], first, width, usual)


class Logged(torch.Tensor):
    """A wrapper subclass that runs Python for every operator, also for those of its gradients."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Logged:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = tree_map(lambda value: value.inner if isinstance(value, Logged) else value, args)
        result = func(*unwrapped, **(kwargs or {}))
        return tree_map(lambda value: Logged(value) if isinstance(value, Tensor) else value, result)


def test_tensor_subclasses_get_one_grad_output_at_a_time() -> None:
    with Problem(lambda x: x.sin(), (leaf(10),)) as problem:
        assert problem.vectorizes
    with Problem(lambda x: Logged(x.detach()).requires_grad_() * x, (leaf(10),)) as problem:
        assert not problem.vectorizes


def test_dispatch_modes_get_one_grad_output_at_a_time() -> None:
    class Watching(DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Watching(), Problem(torch.sin, (leaf(10),)) as problem:
        assert not problem.vectorizes


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("engine", ["auto", "dense"])
def test_a_backward_that_returns_what_it_keeps_passes(engine: Any, dtype: torch.dtype) -> None:
    x = torch.randn(4, 5, dtype=dtype, generator=torch.Generator().manual_seed(0)).t().requires_grad_()
    kept = torch.zeros(4, 5, dtype=dtype).t()
    assert fastgrad.gradcheck(lambda x: KeepsItsGradient.apply(x, kept, lambda kept: kept), (x,), engine=engine)
