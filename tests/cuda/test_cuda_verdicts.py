"""Verdicts on a GPU: planted errors, operators, engines and modes; what a check changes on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fastgrad
from fastgrad.checks.order import check
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings
from tests.cuda.test_cuda_ops import no_waiting
from tests.planted.known import ROWS
from tests.planted.row import Row

MODES = {
    "dense": {"engine": "dense"},
    "compressed": {"engine": "compressed"},
    "sketch": {"engine": "sketch", "fast_mode": True},
}


def moved(inputs: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    return tuple(value.detach().to(device).requires_grad_(value.requires_grad) for value in inputs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_planted_errors(row: Row, mode: str, device: torch.device) -> None:
    own = fastgrad.gradgradcheck if row.order == 2 else fastgrad.gradcheck
    keywords = {**row.keywords, **MODES[mode]}
    assert own(row.right, moved(row.inputs(), device), **keywords)
    with pytest.raises(fastgrad.GradcheckError) as raised:
        own(row.wrong, moved(row.inputs(), device), **keywords)
    assert mode == "sketch" or row.phrase in str(raised.value)


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes)


def exp_and_move(x: Tensor) -> Tensor:
    y = x.exp()  # its backward needs only y
    x.data.add_(1.0)
    return y


OPERATORS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "sin": (torch.sin, leaves((300,))),
    "mul, broadcast": (torch.mul, leaves((8, 5), (2, 1, 5))),
    "matmul": (torch.matmul, leaves((7, 5), (5, 6))),
    "matmul, complex": (torch.matmul, leaves((4, 3), (3, 2), dtype=torch.complex128)),
    "exp, complex": (torch.exp, leaves((20,), dtype=torch.complex128)),
    "softmax": (lambda x: x.softmax(-1), leaves((20, 7))),
    "layer_norm": (lambda x: F.layer_norm(x, (9,)), leaves((6, 9))),
    "conv2d": (F.conv2d, leaves((2, 3, 7, 7), (4, 3, 3, 3), (4,))),
    "attention": (F.scaled_dot_product_attention, leaves(*[(1, 2, 6, 4)] * 3)),
    "sort": (lambda x: x.sort(-1).values, leaves((6, 8))),
    "two outputs": (lambda x: (x.tanh(), x.tanh().pow(2).sum()), leaves((30,))),
    "changes its input": (exp_and_move, leaves((12,))),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str, mode: str, device: torch.device) -> None:
    func, inputs = OPERATORS[name]
    reports = [check(func, moved(inputs, place), Settings(**MODES[mode])) for place in (torch.device("cpu"), device)]
    assert [report.failure for report in reports] == [None, None]
    assert reports[1].plan.engine == reports[0].plan.engine


@pytest.mark.parametrize("name", ["matmul", "conv2d", "softmax", "exp, complex"])
def test_second_order_and_forward_mode(name: str, device: torch.device) -> None:
    func, inputs = OPERATORS[name]
    assert fastgrad.gradgradcheck(func, moved(inputs, device))
    assert fastgrad.gradcheck(func, moved(inputs, device), check_forward_ad=True)


@pytest.mark.parametrize("numel", [1_000_003])
def test_a_large_elementwise_operator(numel: int, device: torch.device) -> None:
    (x,) = moved(leaves((numel,)), device)
    for keywords in ({}, {"fast_mode": True}):
        assert fastgrad.gradcheck(torch.sin, (x,), **keywords)


def test_inputs_on_several_devices() -> None:
    x, y = leaves((5,), (5,))
    x, y = moved((x,), torch.device("cuda", 0))[0], y.detach().requires_grad_()
    for keywords in MODES.values():
        assert fastgrad.gradcheck(lambda a, b: a.cpu().sin() * b, (x, y), **keywords)
        assert fastgrad.gradcheck(lambda a, b: (a * b.to(a.device)).tanh(), (x, y), **keywords)


def test_layouts_of_inputs(device: torch.device) -> None:
    base = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    for x in (base.t(), base[:, ::2], base[1:, 3:]):
        leaf = x.detach().requires_grad_()
        for keywords in MODES.values():
            assert fastgrad.gradcheck(lambda a: a.sin() * a, (leaf,), **keywords)


def test_sparse_inputs(device: torch.device) -> None:
    dense = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    for sparse in (dense.relu().to_sparse(), dense.relu().to_sparse_csr()):
        x = sparse.detach().requires_grad_()
        for masked in (False, True):
            assert fastgrad.gradcheck(lambda a, m=masked: a.to_dense(masked_grad=m).sin(), (x,), masked=masked)


def test_inputs_streams_and_generators_stay_as_they_were(device: torch.device) -> None:
    (x,) = moved(leaves((40,)), device)
    before, state = x.detach().clone(), torch.cuda.get_rng_state(device)
    current, stream = torch.cuda.current_device(), torch.cuda.current_stream(device)
    for keywords in MODES.values():
        assert fastgrad.gradcheck(torch.sin, (x,), **keywords)
    assert torch.equal(x.detach().view(torch.int64), before.view(torch.int64))
    assert torch.equal(torch.cuda.get_rng_state(device), state)
    assert (torch.cuda.current_device(), torch.cuda.current_stream(device)) == (current, stream)


def test_loops_do_not_wait_for_the_device(device: torch.device) -> None:
    (x,) = moved(leaves((200,)), device)
    with Problem(torch.sin, (x,)) as problem:
        problem.graph()
        output = problem.outputs[0]
        # Setup that is done once in a process, such as the comparison of the first VJPs with autograd's.
        problem.difference_columns(0, 4, 1e-6, True)
        problem.analytical_rows(output, False, 0, 2, problem.inputs, 0, -4.0)
        problem.graph()
        torch.cuda.synchronize(device)
        with no_waiting():
            columns = problem.difference_columns(0, 200, 1e-6, True)
        problem.graph()  # waits, to compare its outputs with the first ones
        with no_waiting():
            rows, _, _ = problem.analytical_rows(output, False, 0, 200, problem.inputs, 0, -4.0)
        torch.testing.assert_close(columns.t(), rows, rtol=1e-6, atol=1e-8)
