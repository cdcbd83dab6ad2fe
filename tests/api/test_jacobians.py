"""Compares whole Jacobians with torch's, with known matrices, and sparse with dense ones."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastgrad

LAYOUTS = [torch.strided, torch.sparse_coo, torch.sparse_csr]


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


FUNCS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "sin": (torch.sin, (normal(200),)),
    "softmax": (lambda x: x.softmax(-1), (normal(50, 4),)),
    "matmul": (torch.matmul, (normal(3, 4), normal(4, 5))),
    "two outputs": (lambda x, y: (x * y, (x.sum() * y).cumsum(0)), (normal(40), normal(40, seed=1))),
    "scalar": (lambda x: (x**2).sum(), (normal(2, 3),)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCS)
def test_both_equal_torchs(name: str, layout: torch.layout) -> None:
    func, inputs = FUNCS[name]
    expected = torch.autograd.functional.jacobian(func, inputs)  # type: ignore[no-untyped-call]
    if isinstance(expected[0], Tensor):
        expected = (expected,)
    before = [value.detach().clone() for value in inputs]
    for jacobians, tolerance in (
        (fastgrad.numerical_jacobian(func, inputs, layout=layout), 1e-8),
        (fastgrad.analytical_jacobian(func, inputs, layout=layout), 1e-14),
        (fastgrad.analytical_jacobian(func, inputs, "forward", layout=layout), 1e-14),
    ):
        for row, expected_row in zip(jacobians, expected, strict=True):
            for found, wanted, value in zip(row, expected_row, inputs, strict=True):
                assert found.layout is layout
                if layout is not torch.strided:
                    found, wanted = found.to_dense(), wanted.reshape(-1, value.numel())
                torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(value, old) for value, old in zip(inputs, before, strict=True))


@pytest.mark.parametrize("size", [3, 60])
def test_complex_tensors_have_two_coordinates(size: int) -> None:
    x = normal(size, dtype=torch.complex128)
    (numerical,), (analytical,) = (
        (fastgrad.numerical_jacobian(torch.square, x)[0]),
        (fastgrad.analytical_jacobian(torch.square, x)[0]),
    )
    assert numerical.shape == analytical.shape == (size, 2, size, 2)
    # d (x^2) = 2 x dx: a rotation and a scaling of (re, im).
    derivative = 2 * x.detach()
    blocks = torch.stack([derivative.real, -derivative.imag, derivative.imag, derivative.real], -1).reshape(size, 2, 2)
    expected = torch.zeros(size, 2, size, 2, dtype=torch.float64)
    expected[torch.arange(size), :, torch.arange(size), :] = blocks
    torch.testing.assert_close(numerical, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(analytical, expected)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_random_sparse_maps_are_found_exactly(data: st.DataObject) -> None:
    """Probing, coloring and decompression reproduce the matrix of a linear map."""
    m, n = data.draw(st.integers(1, 120)), data.draw(st.integers(12, 120))
    density = data.draw(st.sampled_from([0.0, 0.01, 0.03, 0.1, 0.5]))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    values = generator.integers(1, 9, (m, n)) * generator.choice([-1, 1], (m, n))
    matrix = torch.from_numpy(np.where(generator.random((m, n)) < density, values, 0).astype(np.float64))
    x = torch.from_numpy(generator.standard_normal(n)).requires_grad_()
    layout = data.draw(st.sampled_from(LAYOUTS))

    def func(v: Tensor) -> Tensor:
        return matrix @ v

    ((analytical,),) = fastgrad.analytical_jacobian(func, x, layout=layout)
    ((numerical,),) = fastgrad.numerical_jacobian(func, x, layout=layout)
    assert torch.equal(analytical.to_dense(), matrix)
    torch.testing.assert_close(numerical.to_dense(), matrix, rtol=0, atol=1e-6)


def test_a_large_sparse_jacobian_fits_in_memory() -> None:
    n = 200_000
    ((jacobian,),) = fastgrad.numerical_jacobian(torch.sin, normal(n), layout=torch.sparse_coo)
    assert jacobian.shape == (n, n)
    assert jacobian._nnz() == n
    torch.testing.assert_close(jacobian.values(), normal(n).detach().cos(), rtol=1e-7, atol=1e-7)


def test_no_graph_is_a_zero_jacobian() -> None:
    ((jacobian,),) = fastgrad.analytical_jacobian(lambda x: x.detach(), normal(3))
    assert torch.equal(jacobian, torch.zeros(3, 3, dtype=torch.float64))


@pytest.mark.parametrize("disabled", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", ["reverse", "forward"])
@pytest.mark.parametrize("size", [3, 300])
def test_gradients_that_the_caller_disabled(disabled: Any, mode: Any, size: int) -> None:
    x = normal(size)
    with disabled():
        ((found,),) = fastgrad.analytical_jacobian(torch.sin, x, mode)
        assert not torch.is_grad_enabled()
    assert torch.equal(found, x.detach().cos().diag())
    with torch.inference_mode():
        made = torch.ones(2, dtype=torch.float64).requires_grad_()
        with pytest.raises(RuntimeError, match=r"was created under torch\.inference_mode"):
            fastgrad.analytical_jacobian(torch.sin, made, mode)


def test_nothing_warns_of_an_eps_that_is_not_used() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastgrad.analytical_jacobian(torch.sin, torch.ones(2, requires_grad=True))


def test_scalars() -> None:
    x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    for jacobians in (fastgrad.numerical_jacobian(torch.sin, x), fastgrad.analytical_jacobian(torch.sin, x)):
        assert jacobians[0][0].shape == ()
        assert jacobians[0][0].item() == pytest.approx(math.cos(0.5))


@pytest.mark.parametrize("eps", [0, -1.0, math.nan, math.inf])
def test_a_bad_step_is_refused(eps: float) -> None:
    with pytest.raises(ValueError, match="eps must be positive and finite, got"):
        fastgrad.numerical_jacobian(torch.sin, normal(3), eps=eps)


def test_bad_arguments() -> None:
    for call in (fastgrad.numerical_jacobian, fastgrad.analytical_jacobian):
        with pytest.raises(ValueError, match=rf"^{call.__name__} expects at least one input tensor .* are no inputs"):
            call(torch.sin, ())  # type: ignore[operator]
        with pytest.raises(ValueError, match=r"seed must be an integer of 64 bits, got 1\.5"):
            call(torch.sin, normal(3), seed=1.5)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"layout must be one of torch\.strided, torch\.sparse_coo, torch\.sparse_csr"):
        fastgrad.numerical_jacobian(torch.sin, normal(3), layout=torch.sparse_bsr)
    with pytest.raises(ValueError, match="mode must be 'reverse' or 'forward', got 'both'"):
        fastgrad.analytical_jacobian(torch.sin, normal(3), "both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Jacobians require strided inputs; input 0 has layout torch\.sparse_coo"):
        fastgrad.numerical_jacobian(lambda s: s.to_dense(), normal(3, 3).detach().to_sparse().requires_grad_())


@pytest.mark.parametrize("n", [3, 300])
def test_what_is_not_finite_is_torchs(n: int) -> None:
    def func(x: Tensor) -> Tensor:
        return torch.cat([x.sin(), x[:1] / 0])

    x = normal(n)
    expected = torch.autograd.functional.jacobian(func, x)  # type: ignore[no-untyped-call]
    ((found,),) = fastgrad.analytical_jacobian(func, x)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14, equal_nan=True)
    ((found,),) = fastgrad.numerical_jacobian(func, x)
    torch.testing.assert_close(found[:n], x.detach().cos().diag(), rtol=1e-7, atol=1e-7)
    assert bool(found[n].isnan().all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_jacobians_without_entries_have_their_shapes(layout: torch.layout) -> None:
    for func, n, m in ((torch.sin, 0, 0), (lambda x: x[:0], 3, 0), (lambda x: x.sum().expand(2) + 1, 0, 2)):
        for jacobian in (fastgrad.numerical_jacobian, fastgrad.analytical_jacobian):
            ((found,),) = jacobian(func, normal(n), layout=layout)
            assert (found.shape, found.layout) == ((m, n), layout)
