"""The private names of torch: what their replacements do to other threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from fastgrad.core.torch_private import functions_through


class Twice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


def test_each_thread_sees_its_own_functions_only() -> None:
    seen: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        return lambda function, call, args: seen.append(name) or call(*args)

    def called() -> list[str]:
        seen.clear()
        assert Twice.apply(torch.ones(())).item() == 2
        return seen.copy()

    before = [dict(vars(one)) for one in Function.__mro__[1:3]]
    here, there = functions_through(noting("here")), functions_through(noting("there"))
    with ThreadPoolExecutor(1) as thread:
        here.__enter__()
        assert (called(), thread.submit(called).result()) == (["here"], [])
        thread.submit(there.__enter__).result()
        assert (called(), thread.submit(called).result()) == (["here"], ["there"])
        with functions_through(noting("inner")):
            assert called() == ["inner"]
        here.__exit__(None, None, None)
        assert (called(), thread.submit(called).result()) == ([], ["there"])
        thread.submit(there.__exit__, None, None, None).result()
        assert (called(), thread.submit(called).result()) == ([], [])
    assert [dict(vars(one)) for one in Function.__mro__[1:3]] == before
