"""The caller's tensors and modes are unchanged after a check, even if an exception or Ctrl-C ended it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.core.native import IS_NATIVE
from fastgrad.problem.caller_state import SavedState, restores_caller_state
from tests.properties.interrupts import ERRORS, Fuse, State, outcome, run_one, writes_past_counters

Func = Callable[..., Any]


def leaf(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values or (0.3, -0.0, 0.7), dtype=dtype).requires_grad_()


def doubling(x: Tensor) -> Tensor:
    """2 x; multiplies x by 1.5 without increasing its version counter."""
    y = 2 * x
    x.data.mul_(1.5)
    return y


SECOND_ORDER: dict[str, Func] = {
    "gradgradcheck": lambda func, x, **keywords: fastgrad.gradgradcheck(func, x, raise_exception=False, **keywords),
    "check": lambda func, x, **keywords: fastgrad.check(func, x, order=2, **keywords),
}

OTHERS: dict[str, Func] = {
    "gradcheck": lambda func, x: fastgrad.gradcheck(func, x, check_forward_ad=True, raise_exception=False),
    "fast mode": lambda func, x: fastgrad.gradcheck(
        func, x, fast_mode=True, engine="sketch", check_forward_ad=True, raise_exception=False
    ),
    "compressed": lambda func, x: fastgrad.gradcheck(func, x, engine="compressed", raise_exception=False),
    "check": fastgrad.check,
    "adjoint_test": fastgrad.adjoint_test,
    "taylor_test": fastgrad.taylor_test,
    "numerical_jacobian": fastgrad.numerical_jacobian,
    "analytical_jacobian": fastgrad.analytical_jacobian,
    "jacobian": fastgrad.functional.jacobian,
    "jacobian, numerical": lambda func, x: fastgrad.functional.jacobian(func, x, numerical=True),
    "hessian": lambda func, x: fastgrad.functional.hessian(lambda v: func(v).sum(), x),
    "vjp": lambda func, x: fastgrad.functional.vjp(func, x, torch.ones_like(x)),
    "jvp": lambda func, x: fastgrad.functional.jvp(func, x, torch.ones_like(x)),
    "vhp": lambda func, x: fastgrad.functional.vhp(lambda v: func(v).sum(), x, torch.ones_like(x)),
    "hvp": lambda func, x: fastgrad.functional.hvp(lambda v: func(v).sum(), x, torch.ones_like(x)),
}

CHECKS = {**OTHERS, **{f"{name}, order 2": check for name, check in SECOND_ORDER.items()}}


@pytest.mark.parametrize("seed", range(24, 52, 2))
def test_a_sample_of_the_sweep(seed: int) -> None:
    text, ended, changed = run_one(seed, at_a_time=seed % 10 == 0)
    assert not changed, f"{text}: {ended}"


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_in_any_of_the_first_calls_of_a_func_that_writes(check: Func, error: Any) -> None:
    for at in (1, 2, 5):
        x = leaf()
        x.grad = torch.ones_like(x)
        state, fuse = State((x,)), Fuse(at, error)
        outcome(lambda x=x, fuse=fuse: check(lambda v: writes_past_counters(fuse, v), x))
        assert not state.changes(), at


@pytest.mark.parametrize("check", SECOND_ORDER.values(), ids=SECOND_ORDER)
@pytest.mark.parametrize("own", [False, True], ids=["made", "given"])
def test_second_order_is_checked_at_the_callers_inputs(check: Func, own: bool) -> None:
    seen = []

    def func(x: Tensor) -> Tensor:
        seen.append(x.detach().clone())
        return doubling(x).sin()

    x = leaf()
    keywords = {"grad_outputs": torch.ones_like(x).detach().requires_grad_()} if own else {}
    check(func, x, **keywords)
    assert torch.equal(x.detach(), leaf().detach())
    assert all(torch.allclose(values, x.detach(), atol=1e-2) for values in seen), "x and steps next to it"


def test_tensors_of_any_kind_in_containers_are_kept() -> None:
    counter, table = torch.zeros(2, dtype=torch.int64), torch.tensor([0.0, 1.0], dtype=torch.float32)
    resized, moved = torch.arange(4.0), torch.full((2,), torch.nan, dtype=torch.bfloat16)
    state = State((counter, table, resized))

    def write() -> None:
        with SavedState(counter, [{"inside": (table, resized)}], moved):
            counter.add_(1)
            table.mul_(-1).clamp_(max=0.0)
            resized.resize_(2).zero_()
            moved.data = torch.ones(3, dtype=torch.bfloat16)
            raise KeyboardInterrupt

    assert outcome(write) == "KeyboardInterrupt"
    assert not state.changes(), "-0.0 is not 0.0"
    assert moved.isnan().tolist() == [True, True]


def test_arguments_of_a_check_are_put_back() -> None:
    counter, moving = torch.zeros(1, dtype=torch.int64), torch.zeros(2).expand(3, 2)

    def func(x: Tensor, counter: Tensor, moving: Tensor, *, scale: Tensor) -> Tensor:
        counter.add_(1)
        moving[0].add_(1)
        scale.mul_(2)
        return x * x

    scale = torch.ones(2, dtype=torch.complex64).conj()
    state = State((counter, moving, scale))
    for order in (1, 2):
        assert fastgrad.check(func, (leaf(), counter, moving), kwargs={"scale": scale}, order=order)
        assert not state.changes()


def test_read_only_memory_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "table"
    np.array([0.5, np.nan, 2.0]).tofile(path)
    with pytest.warns(UserWarning, match="not writable"):
        table = torch.from_numpy(np.memmap(path, dtype=np.float64, mode="r"))
    assert fastgrad.gradcheck(lambda x, table: x * table[0], (leaf(), table))


def test_sparse_values_are_put_back() -> None:
    plain = torch.eye(3, dtype=torch.float64)
    for sparse in (plain.to_sparse(), plain.to_sparse_csr()):

        def func(x: Tensor, sparse: Tensor) -> Tensor:
            values = sparse._values() if sparse.layout is torch.sparse_coo else sparse.values()
            values.mul_(2)
            return x * x

        assert fastgrad.gradcheck(func, (leaf(), sparse))
        assert torch.equal(sparse.to_dense(), plain)


def test_gradients_and_requires_grad_are_put_back() -> None:
    def func(x: Tensor) -> Tensor:
        with torch.enable_grad():
            (x.detach().requires_grad_() ** 2).sum().backward()
        x.grad = None if x.grad is not None else torch.zeros_like(x)
        y = x * x
        x.requires_grad_(True)
        return y

    for gradient in (None, torch.ones(3, dtype=torch.float64)):
        x = leaf()
        x.grad = gradient
        fastgrad.gradcheck(func, x, raise_exception=False)
        assert x.grad is gradient

    def accumulates(x: Tensor) -> Tensor:
        (3 * x).sum().backward(retain_graph=True)
        return x * x

    x = leaf()
    x.grad = torch.ones_like(x)
    assert fastgrad.gradcheck(accumulates, x)
    assert x.grad.tolist() == [1, 1, 1]


def test_graphs_of_overwritten_inputs_are_not_used_unnoticed() -> None:
    def func(x: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(2)
        return x * x

    x = leaf()
    outputs, _ = fastgrad.functional.vjp(func, x, torch.ones_like(x), create_graph=True)
    assert torch.equal(x.detach(), leaf().detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


def test_parameters_are_put_back() -> None:
    class Growing(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).sin()
            self.weight.data.add_(1)
            return y

    module = Growing(3, 2, dtype=torch.float64)
    state = State(tuple(module.parameters()))
    for order in (1, 2):
        fastgrad.check(module, leaf(), order=order)
        assert not state.changes()


@pytest.mark.skipif(not IS_NATIVE, reason="plain Python restores no nodes")
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("view", [lambda y: y, lambda y: y[1:], lambda y: y.view(3, 1)], ids=["itself", "part", "view"])
def test_the_graph_of_an_input_that_func_overwrites_is_put_back(check: Func, view: Callable[[Tensor], Tensor]) -> None:
    base = leaf()
    y = base * 3
    x = view(y)
    node, expected = x.grad_fn, torch.autograd.grad(x.sum(), base, retain_graph=True)[0]
    outcome(lambda: check(lambda x: x.mul_(2).sin(), x))
    assert x.grad_fn is node
    assert torch.equal(torch.autograd.grad(x.sum(), base, retain_graph=True)[0], expected)
    assert torch.equal(torch.autograd.grad(y.sum(), base)[0], torch.full_like(base, 3))


@pytest.mark.skipif(not IS_NATIVE, reason="plain Python restores no nodes")
def test_a_view_without_grad_that_func_overwrites_is_a_leaf_again() -> None:
    base = leaf().detach()
    table = base[1:]

    def func(x: Tensor, table: Tensor) -> Tensor:
        table.copy_(x[1:])
        return x * x

    assert fastgrad.gradcheck(func, (leaf(), table))
    assert not table.requires_grad
    assert not base.requires_grad


def test_what_func_draws_and_sets_is_its_own() -> None:
    def func(x: Tensor) -> Tensor:
        torch.rand(1)
        torch.set_grad_enabled(False)
        return x * 1.0

    state = torch.get_rng_state()
    fastgrad.gradcheck(func, leaf(), raise_exception=False)
    assert torch.is_grad_enabled()
    assert not torch.equal(torch.get_rng_state(), state)


def test_every_public_function_that_calls_func_keeps_the_callers_state() -> None:
    kept = restores_caller_state(lambda: None).__code__
    for module in (fastgrad, fastgrad.functional):
        for name in module.__all__:
            function = getattr(module, name)
            if inspect.isfunction(function) and "func" in inspect.signature(function).parameters:
                assert function.__code__ is kept, name
