"""VJPs of small graphs by calls of their nodes equal those of the autograd engine, which otherwise runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fastgrad
from benchmarks.cases import operator_cases, operators
from fastgrad.core import native

EVERY = 23
"""CI tests one in this many of torch's operators; all of them take two minutes."""


def blocks_of(inputs: Sequence[Tensor]) -> list[native.InputBlock]:
    first, blocks = 0, []
    for value in inputs:
        blocks.append(native.InputBlock(value, first, 0.0))
        first += value.numel() * (2 if value.is_complex() else 1)
    return blocks


def compared(outputs: Sequence[Tensor], inputs: Sequence[Tensor], count: int = 4) -> native.Graph:
    """Compares VJPs with torch's; returns the graph."""
    sizes = [value.numel() * (2 if value.is_complex() else 1) for value in outputs]
    rows = torch.randn(count, sum(sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    graph = native.Graph(outputs, inputs)
    found, _ = native.vjp_coordinates(graph, blocks_of(inputs), rows)
    for row, gradient in zip(rows, found, strict=True):
        parts = row.split(sizes)
        cotangents = [
            (torch.view_as_complex(part.view(-1, 2).clone()) if value.is_complex() else part.clone())
            .view(value.shape)
            .to(value.dtype)
            for part, value in zip(parts, outputs, strict=True)
        ]
        expected = torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True, allow_unused=True)
        flat = [
            torch.view_as_real(torch.zeros_like(x) if g is None else g.resolve_conj()).flatten()
            if x.is_complex()
            else (torch.zeros_like(x) if g is None else g.to_dense() if g.layout is torch.sparse_coo else g).flatten()
            for x, g in zip(inputs, expected, strict=True)
        ]
        assert torch.equal(gradient.nan_to_num(7.0), torch.cat(flat).double().nan_to_num(7.0))
    return graph


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()


def many_paths(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a = x.sin()
    for k in range(5):
        a = a * x + y.cos() * (k + 1) - a.exp() * y
    return a, (a * y).sum(), x.unsqueeze(0) @ y


@pytest.mark.parametrize(
    ("func", "inputs"),
    [
        (torch.sin, [leaf(5)]),
        (many_paths, [leaf(4), leaf(4)]),
        (lambda x, y: (x, x * y, y.sum()), [leaf(3), leaf(3)]),
        (lambda x: (x * x.conj(), x.real.exp()), [leaf(3, dtype=torch.complex128)]),
        (lambda x, w, b: torch.layer_norm(x, (4,), w, b).softmax(-1), [leaf(3, 4), leaf(4), leaf(4)]),
        (lambda x, w: torch.conv1d(x, w, padding=1).relu(), [leaf(2, 3, 6), leaf(4, 3, 3)]),
        (lambda x, y: x.sum(), [leaf(3), leaf(3)]),
    ],
    ids=["one node", "many paths", "an input is an output", "complex", "layer norm", "convolution", "unused input"],
)
def test_nodes_give_what_the_engine_gives(func: Callable[..., Any], inputs: list[Tensor]) -> None:
    outputs = func(*inputs)
    graph = compared(outputs if isinstance(outputs, tuple) else (outputs,), inputs)
    assert graph.bypasses_engine
    for gradients in (graph.vjp_of_zeros(), graph.vjp_of_undefined(None), graph.vjp_of_undefined(0)):
        assert all(gradient is None or not gradient.any() for gradient in gradients)


def test_inputs_within_the_graph() -> None:
    x = leaf(4)
    inner = x.exp()
    assert compared((inner.sin() * x, inner * 2), [inner, x]).bypasses_engine


def test_what_is_not_plain_is_left_to_the_engine() -> None:
    calls = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            calls.append(1)
            return 2 * grad_output

    x = leaf(3)
    output = Counted.apply(x)
    assert not compared((output,), [x]).bypasses_engine
    assert len(calls) == 8  # four VJPs of each: none is run twice
    hooked = x.sin()
    hooked.register_hook(lambda g: 2 * g)
    assert not compared((hooked * 1,), [x]).bypasses_engine
    with torch.autograd.detect_anomaly(check_nan=False):
        assert not compared((x.sin(),), [x]).bypasses_engine
    large = x
    for _ in range(100):
        large = large.sin()
    assert not compared((large,), [x]).bypasses_engine


def test_a_node_that_raises_raises_in_the_engines_words() -> None:
    x = leaf(3)
    output = x.sin().exp()
    graph = compared((output,), [x])
    assert graph.bypasses_engine
    with torch.no_grad():
        output.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.vjp_of_zeros()


def test_hooks_on_saved_tensors() -> None:
    calls = []

    def recomputed(x: Tensor) -> Tensor:
        calls.append(1)
        for _ in range(5):
            x = x.sin()
        return x

    x = leaf(3)
    graph = compared((checkpoint(recomputed, x, use_reentrant=False),), [x])
    assert not graph.bypasses_engine  # the engine runs the function once per VJP, not once per saved tensor

    def unpack(saved: Tensor) -> Tensor:
        if fails:
            raise ValueError("of a hook")
        return saved

    fails = False
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        output = x.sin()
    graph = compared((output,), [x])
    fails = True
    with pytest.raises(ValueError, match="of a hook"):
        graph.vjp_of_zeros()


def test_memory_that_was_freed_is_refused() -> None:
    x = leaf(3)
    graph = compared((x.sin(),), [x])
    x.detach().untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="an input"):
        graph.vjp_of_zeros()
    x.detach().untyped_storage().resize_(24)


def test_inputs_must_be_those_of_the_graph() -> None:
    x, y = leaf(3), leaf(3)
    graph = native.Graph((x.sin(),), [x])
    with pytest.raises(RuntimeError, match="must be the blocks of the 1 inputs of the graph"):
        native.vjp_coordinates(graph, blocks_of([y]), torch.ones(1, 3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"number of an output, in \[0, 1\), got 1"):
        graph.vjp_of_undefined(1)


def operator_outputs(func: Callable[..., Any], inputs: Sequence[Any]) -> list[Tensor]:
    found = func(*inputs)
    values = found if isinstance(found, (tuple, list)) else (found,)
    return [value for value in values if isinstance(value, Tensor) and value.requires_grad]


@pytest.mark.parametrize("op", operators(torch.float64)[::EVERY], ids=lambda op: op.name)
def test_nodes_of_operators(op: Any) -> None:
    for case in operator_cases(op, torch.float64, 3, all_tensors=True):
        inputs = [x for x in case.inputs if isinstance(x, Tensor) and x.requires_grad]
        outputs = operator_outputs(case.func, case.inputs)
        if outputs and all(value.layout is torch.strided for value in (*inputs, *outputs)):
            compared(outputs, inputs)


@pytest.mark.filterwarnings("ignore:ComplexHalf support", "ignore:Input #1 requires gradient")
def test_a_result_in_complex_half_precision() -> None:
    x = torch.tensor([0.3, 0.5, -0.2], dtype=torch.float64, requires_grad=True)
    assert fastgrad.gradgradcheck(lambda x: x.chalf(), (x,))
