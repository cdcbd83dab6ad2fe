"""gradgradcheck: grad_outputs, documented examples, and errors that only second derivatives show."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.problem.second_order import random_grad_outputs
from tests.costs import set_costs


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


def test_random_grad_outputs() -> None:
    outputs = (leaf(2, 3), leaf(4, dtype=torch.complex128), leaf())
    state = torch.get_rng_state()
    for noncontiguous in (False, True):
        grads = random_grad_outputs(outputs, 0, noncontiguous)
        for grad, output in zip(grads, outputs, strict=True):
            assert (grad.shape, grad.dtype) == (output.shape, output.dtype)
            assert grad.requires_grad
            assert grad.is_leaf
            assert grad.is_contiguous() != (noncontiguous and grad.numel() > 1)
            assert bool((torch.view_as_real(grad) if grad.is_complex() else grad).abs().le(1).all())
    assert torch.equal(torch.get_rng_state(), state), "the global generator is not drawn from"
    assert not torch.equal(random_grad_outputs(outputs, 1, False)[0], grads[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("noncontiguous", [False, True])
def test_passes(dtype: torch.dtype, noncontiguous: bool) -> None:
    x, y = leaf(2, 3, dtype=dtype), leaf(3, dtype=dtype)
    assert fastgrad.gradgradcheck(lambda x, y: x.exp() * y, (x, y), gen_non_contig_grad_outputs=noncontiguous)


def test_given_grad_outputs() -> None:
    x = leaf(3)
    for grad_outputs in (leaf(3), (leaf(3),), [leaf(3)], leaf(3).detach(), "ones"):
        assert fastgrad.gradgradcheck(torch.exp, (x,), grad_outputs)
    with pytest.raises(ValueError, match="needs one grad_output for each output that requires grad"):
        fastgrad.gradgradcheck(torch.exp, (x,), (leaf(3), leaf(3)))
    with pytest.raises(ValueError, match=r"output 0 has shape \(3,\), but its grad_output has shape \(4,\)"):
        fastgrad.gradgradcheck(torch.exp, (x,), (leaf(4),))


class Cube(torch.autograd.Function):
    """x^3 with a double backward of its own."""

    factor = 3.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad_output


class CubeOfDetached(Cube):
    """First derivative right, second derivative lost: x was detached in backward."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x.detach() ** 2 * grad_output


def test_the_documented_example_and_its_wrong_twin() -> None:
    """The example of Lucid's documentation: (x ** 3).sum() with grad_outputs of ones."""
    x = leaf(3)
    assert fastgrad.gradgradcheck(lambda x: (x**3).sum(), [x], "ones")
    assert fastgrad.gradgradcheck(Cube.apply, (x,))
    assert fastgrad.gradcheck(CubeOfDetached.apply, (x,))
    for grad_outputs in (None, "ones"):
        with pytest.raises(fastgrad.GradcheckError, match=r"Jacobian mismatch|expected to be zero"):
            fastgrad.gradgradcheck(lambda x: CubeOfDetached.apply(x).sum(), [x], grad_outputs)


def test_a_linear_function_has_no_second_derivative() -> None:
    x = leaf(3)
    assert fastgrad.gradgradcheck(lambda x: 2 * x, (x,)) == torch.autograd.gradgradcheck(lambda x: 2 * x, (x,))
    assert fastgrad.gradgradcheck(lambda x: x.sum(), (x,))


def test_the_backward_is_evaluated_without_a_graph_of_its_own() -> None:
    recorded = []

    class Looks(Cube):
        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            recorded.append(torch.is_grad_enabled())
            (x,) = ctx.saved_tensors
            return 3 * x * x * grad_output

    assert fastgrad.gradgradcheck(Looks.apply, (leaf(40),), engine="dense")
    assert recorded.count(False) > 2 * 80


def test_no_output_with_a_gradient_is_an_error() -> None:
    with pytest.raises(ValueError, match="an output that requires grad, but this func has none"):
        fastgrad.gradgradcheck(lambda x: x.detach(), (leaf(2),))
    with torch.no_grad(), pytest.raises(ValueError, match="gradients are disabled here"):
        fastgrad.gradgradcheck(torch.exp, (leaf(2),))


def test_the_forward_pass_is_not_run_again_where_only_grad_outputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    set_costs(monkeypatch, trial_seconds=math.inf)  # on a busy machine, vmapped batches would be tried
    x = torch.linspace(0.1, 1, 5, dtype=torch.float64).requires_grad_()
    calls = 0

    def func(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return v.repeat(40).sin()

    assert fastgrad.gradgradcheck(func, (x,), engine="dense")
    # Of about 410 evaluations, only those that move x call forward (at most two each), and a few that record.
    assert calls <= 2 * 5 + 12


@pytest.mark.parametrize("engine", ["dense", "compressed"])
def test_a_backward_that_reads_what_the_last_forward_left(engine: str) -> None:
    """The graph of an earlier forward pass would give another gradient, so only the last graph is reused."""
    x = torch.linspace(0.1, 1, 6, dtype=torch.float64).requires_grad_()
    left: list[Tensor] = []

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: Tensor) -> Tensor:
            ctx.save_for_backward(v)
            left[:] = [v.detach().clone()]
            return v.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (v,) = ctx.saved_tensors
            return grad * (v.cos() + 0 * left[0] + (v - v.detach()) * 0)

    assert fastgrad.gradgradcheck(Sine.apply, (x,), engine=engine)


def test_a_forward_that_differs_from_call_to_call_runs_every_time() -> None:
    x = torch.linspace(0.1, 1, 5, dtype=torch.float64).requires_grad_()
    calls = 0

    def func(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return v.repeat(2).sin() * (1 + 2.0**-50 * (calls % 2))

    assert fastgrad.gradgradcheck(func, (x,), engine="dense")
    assert calls > 2 * 15


def saves_a_buffer(buffer: Tensor) -> type[torch.autograd.Function]:
    """The sine. forward overwrites the buffer that its last call saved, so only the backward of the last call runs."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            buffer[: x.numel()] = x.cos()
            ctx.save_for_backward(buffer, x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            _, x = ctx.saved_tensors
            return grad * x.cos()

    return Sine


@pytest.mark.parametrize("keywords", [{}, {"fast_mode": True}, {"engine": "dense"}, {"engine": "compressed"}])
@pytest.mark.parametrize("size", [1, 3, 40])
def test_a_graph_that_only_runs_before_the_next_forward(size: int, keywords: dict[str, Any]) -> None:
    func = saves_a_buffer(torch.empty(2 * size, dtype=torch.float64)).apply
    x = leaf(size)
    assert torch.autograd.gradgradcheck(func, (x,))
    assert fastgrad.gradgradcheck(func, (x,), **keywords)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_that_is_not_raised_again_is_raised(kind: type[BaseException]) -> None:
    """Whichever call of backward raises it."""
    calls = 0
    when = -1

    class Raises(Cube):
        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == when:
                raise kind("once")
            return Cube.backward(ctx, grad_output)

    x = leaf(3)
    assert fastgrad.gradgradcheck(Raises.apply, (x,))
    for when in range(1, calls + 1):
        calls = 0
        with pytest.raises(kind, match="once"):
            fastgrad.gradgradcheck(Raises.apply, (x,))
        assert calls == when or kind is ValueError


def test_an_exception_of_some_grad_outputs_is_raised() -> None:
    class Raises(Cube):
        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            if grad_output[0] < lowest:
                raise ValueError("below")
            return Cube.backward(ctx, grad_output)

    x, grad_output = leaf(3), leaf(3)
    lowest = float(grad_output.detach()[0])
    with pytest.raises(ValueError, match="below"):
        fastgrad.gradgradcheck(Raises.apply, (x,), (grad_output,))
