"""Small checks of CUDA tensors in native code, and VJPs that call the nodes of a graph without the autograd engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fastgrad
from fastgrad.core import native
from fastgrad.problem import first_look


def leaf(*shape: int, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, dtype=dtype, generator=generator).to(device).requires_grad_()


class Halved(torch.autograd.Function):
    """exp, with half of the gradient of element 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.exp())
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        gradient = grad_output * ctx.saved_tensors[0]
        gradient.view(-1)[2].mul_(0.5)
        return gradient


@pytest.mark.parametrize(
    "func", [torch.sin, lambda x: x.cumsum(-1), lambda x: (x * x, x.sum()), lambda x: F.linear(x, x)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_no_complete_check_is_needed(
    device: torch.device, func: Callable[..., Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_look, "SLOW_SECONDS", math.inf)  # first calls compile and load kernels
    x = leaf(2, 3, device=device, dtype=dtype)
    with mock.patch("fastgrad.checks.complete.complete_check", side_effect=AssertionError("a complete check")):
        for fast_mode in (False, True):
            assert fastgrad.gradcheck(func, (x,), fast_mode=fast_mode, check_forward_ad=True, check_batched_grad=True)
            if dtype is torch.float64:
                assert fastgrad.gradgradcheck(func, (x,), fast_mode=fast_mode)
        assert fastgrad.gradcheck(torch.sin, (leaf(3, device=torch.device("cpu")),))  # although CUDA is in use


def test_reports_are_those_of_the_cpu(device: torch.device) -> None:
    cpu = torch.device("cpu")
    for keywords in ({}, {"fast_mode": True, "engine": "sketch"}):
        on_cpu, on_device = (
            fastgrad.check(torch.cos, (leaf(2, 2, device=where),), **keywords) for where in (cpu, device)
        )
        assert on_device.passed
        calls = [(report.evaluations, report.vjps, report.certificates) for report in (on_cpu, on_device)]
        assert calls[0] == calls[1]
        assert str(device) in on_device.environment.device
        assert any("cuDNN" in note for note in on_device.notes)
        assert not torch.backends.cudnn.deterministic


@pytest.mark.parametrize("fast_mode", [False, True])
def test_what_a_small_check_found_is_used_by_the_complete_one(device: torch.device, fast_mode: bool) -> None:
    report = fastgrad.check(Halved.apply, (leaf(5, device=device),), fast_mode=fast_mode)
    assert report.failure is not None
    assert report.failure.kind == "mismatch"
    assert report.failure.comparison is not None
    assert report.failure.comparison.worst is not None
    assert report.failure.comparison.worst.input_index == (2,)


def test_tensors_on_several_devices_need_a_complete_check(device: torch.device) -> None:
    x, y = leaf(3, device=device), leaf(3, device=torch.device("cpu"))
    assert fastgrad.gradcheck(lambda x: x.sin().cpu(), (x,))
    assert fastgrad.gradcheck(lambda x, y: x.sin().cpu() * y, (x, y))


def test_nodes_are_called_without_the_engine_on_the_current_stream(device: torch.device) -> None:
    x = leaf(5, device=device)
    with torch.cuda.device(device):
        graph = native.Graph([x.sin().exp()], [x])
        ones = torch.ones(5, dtype=torch.float64, device=device)
        (first,) = graph.vjp([ones])
        assert graph.bypasses_engine
        (again,) = graph.vjp([ones])
        assert torch.equal(first, again)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            (elsewhere,) = graph.vjp([ones])
        torch.cuda.current_stream(device).wait_stream(stream)
        assert torch.equal(first, elsewhere)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        assert fastgrad.gradcheck(lambda x: x.sin().exp(), (leaf(5, device=device),))
