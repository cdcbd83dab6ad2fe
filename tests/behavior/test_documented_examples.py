"""What documentation states about gradcheck and gradgradcheck: examples, notes, parameters, old names."""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import inspect
import io
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

import fastgrad
from docs.make_gallery import without_chance
from fastgrad.core.native import IS_NATIVE
from fastgrad.report.evidence import CauseName

TORCHS = [torch.autograd.gradcheck, torch.autograd.gradgradcheck]
CHECKS = [fastgrad.gradcheck, fastgrad.gradgradcheck]
each_check = pytest.mark.parametrize("check", CHECKS)
ONLY_FORWARD = {"check_forward_ad": True, "check_backward_ad": False}
ONLY_FORWARD_OVER_REVERSE = {"check_fwd_over_rev": True, "check_rev_over_rev": False, "check_undefined_grad": False}


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


def function(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    jvp: Callable[..., Any] | None = None,
    materialize: bool = True,
) -> Callable[..., Any]:
    """A custom Function: backward(grad_output, input) -> gradient, jvp(tangent, input) -> tangent of the output."""

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)
            ctx.set_materialize_grads(materialize)
            return forward(x)

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Any:
            return backward(grad_output, *ctx.saved_tensors)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Any:
            assert jvp is not None
            return jvp(tangent, *ctx.saved_tensors)

    return Custom.apply


def doubled(x: Tensor, error: float) -> Tensor:
    """2 x, with an analytical derivative of 2 + error."""
    return 2 * x + error * (x - x.detach())


def double(jvp_factor: float = 2, backward: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """2 x, with a jvp and a backward of its own."""
    return function(lambda x: 2 * x, backward or (lambda grad, x: 2 * grad), lambda tangent, x: jvp_factor * tangent)


def square(double: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """x^2, whose backward calls `double`: only second derivatives show errors of double's derivative."""
    return function(lambda x: x * x, lambda grad, x: grad * double(x), lambda tangent, x: tangent * 2 * x)


def below_and_above(check: Any, error: float) -> list[tuple[Callable[..., Any], tuple[Any, ...], bool]]:
    """Functions whose first or second derivative, 2, is off by a little less and a little more than error."""
    rows = []
    for factor, passes in ((0.99, True), (1.01, False)):
        wrong = lambda x, factor=factor: doubled(x, factor * error)  # noqa: E731
        rows.append((wrong if check is fastgrad.gradcheck else square(wrong), arguments(check, leaf(3)), passes))
    return rows


def arguments(check: Any, x: Tensor) -> tuple[Any, ...]:
    """Inputs, and grad_outputs of ones."""
    return ((x,),) if check is fastgrad.gradcheck else ((x,), "ones")


# Examples


def sum_of_cubes(x: Tensor) -> Tensor:
    return (x**3).sum()


def test_sum_of_cubes() -> None:
    x = leaf(3)
    assert fastgrad.gradgradcheck(sum_of_cubes, [x], grad_outputs="ones") is True
    assert fastgrad.gradgradcheck(sum_of_cubes, [x]) is True
    assert fastgrad.gradcheck(sum_of_cubes, [x]) is True


@pytest.mark.parametrize(
    "slope", [lambda x: 3 * x.detach() ** 2, lambda x: 3 * x * x.detach()], ids=["detached", "half detached"]
)
def test_sum_of_cubes_with_a_wrong_second_derivative(slope: Callable[[Tensor], Tensor]) -> None:
    cube = function(lambda x: x**3, lambda grad, x: grad * slope(x))
    func = lambda x: cube(x).sum()  # noqa: E731
    x = leaf(3)
    assert fastgrad.gradcheck(func, [x]), "the first derivative is right"
    with pytest.raises(fastgrad.GradcheckError):
        fastgrad.gradgradcheck(func, [x], grad_outputs="ones")
    assert fastgrad.gradgradcheck(func, [x], grad_outputs="ones", raise_exception=False) is False
    with pytest.raises(fastgrad.GradcheckError):
        fastgrad.gradgradcheck(func, [x])


def test_the_sum_of_the_gradient_as_a_function() -> None:
    """A second-order check by hand: func differentiates inside."""

    def summed_gradient(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x: torch.autograd.grad(func(x), x, create_graph=True)[0].sum()

    assert fastgrad.gradcheck(summed_gradient(sum_of_cubes), [leaf(3)])
    wrong = square(lambda x: doubled(x, 0.5))
    assert not fastgrad.gradcheck(summed_gradient(lambda x: wrong(x).sum()), [leaf(3)], raise_exception=False)


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, i: Tensor) -> Tensor:
        result = i.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return grad_output * result


class ExpOfInput(Exp):
    @staticmethod
    def forward(ctx: Any, i: Tensor) -> Tensor:
        ctx.save_for_backward(i)
        return i.exp()


@each_check
def test_a_custom_exp(check: Any) -> None:
    assert check(Exp.apply, leaf(3))
    assert not fastgrad.gradcheck(ExpOfInput.apply, leaf(3), raise_exception=False)


@each_check
def test_an_error_in_backward_comes_through(check: Any) -> None:
    def backward(grad: Tensor, x: Tensor) -> Tensor:
        raise RuntimeError("planted in backward")

    custom = function(lambda x: x.clone(), backward)
    for raise_exception in (True, False):
        with pytest.raises(RuntimeError, match="planted in backward") as raised:
            check(lambda x: custom(x).sum(), leaf(10, 10), raise_exception=raise_exception)
        assert not isinstance(raised.value, fastgrad.GradcheckError)
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.warns(UserWarning, match="Traceback of forward call"),
        pytest.raises(RuntimeError, match="planted in backward"),
    ):
        check(lambda x: custom(x).sum(), leaf(10, 10))


def test_anomaly_detection_finds_a_nan() -> None:
    func = lambda x: x + 0 * (0 * x).sqrt()  # noqa: E731
    assert not fastgrad.gradcheck(func, leaf(3), raise_exception=False)
    with torch.autograd.set_detect_anomaly(True):
        assert fastgrad.gradcheck(torch.exp, leaf(3))
        with pytest.warns(UserWarning, match="SqrtBackward0"), pytest.raises(RuntimeError, match="nan values"):
            fastgrad.gradcheck(func, leaf(3))


def test_a_hook_that_doubles_the_gradient() -> None:
    x = leaf(3)
    hook = x.register_hook(lambda grad: grad * 2)
    assert not fastgrad.gradcheck(torch.exp, x, raise_exception=False)
    hook.remove()
    assert fastgrad.gradcheck(torch.exp, x)


@each_check
def test_inputs_that_are_no_leaves(check: Any) -> None:
    base = leaf(10)
    x = base + 2
    assert check(torch.exp, x)
    assert not x.is_leaf
    assert base.grad is None


def test_disabled_gradients() -> None:
    x = leaf(3)
    assert not fastgrad.gradcheck(torch.no_grad()(torch.exp), x, raise_exception=False)
    with torch.no_grad():
        assert not fastgrad.gradcheck(torch.exp, x, raise_exception=False)
        assert fastgrad.gradcheck(torch.enable_grad()(torch.exp), x)
        with torch.set_grad_enabled(True):
            assert fastgrad.gradcheck(torch.exp, x)
        assert not torch.is_grad_enabled()


def test_contexts_of_custom_functions() -> None:
    class InPlace(Exp):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            ctx.save_for_backward(x.exp_(), None)
            return x

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            result, nothing = ctx.saved_tensors
            assert nothing is None
            assert ctx.needs_input_grad == (True,)
            return grad_output * result

    class Sort(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            values, indices = x.sort()
            ctx.mark_non_differentiable(indices)
            ctx.save_for_backward(indices)
            return values, indices

        @staticmethod
        def backward(ctx: Any, grad_values: Tensor, _: Tensor) -> Tensor:
            (indices,) = ctx.saved_tensors
            return torch.zeros_like(grad_values).scatter(0, indices, grad_values)

    assert fastgrad.gradcheck(lambda x: InPlace.apply(x.clone()), leaf(3))
    assert fastgrad.gradcheck(Sort.apply, leaf(5))


def test_a_saved_tensor_that_was_changed_in_place() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fastgrad.gradcheck(lambda x: x.exp().mul_(2), leaf(3))


# Notes


@each_check
def test_less_than_double_precision_warns(check: Any) -> None:
    """The check may fail, as torch's does; fastgrad also uses larger steps."""
    with pytest.warns(UserWarning, match="not a double precision"):
        check(sum_of_cubes, leaf(3, dtype=torch.float32), eps=1e-5, raise_exception=False)


def test_a_point_without_derivative() -> None:
    assert not fastgrad.gradcheck(
        torch.relu, torch.zeros(2, dtype=torch.float64).requires_grad_(), raise_exception=False
    )


@each_check
def test_overlapping_memory_is_an_error(check: Any) -> None:
    overlapping = torch.ones(1, dtype=torch.float64).expand(3)
    with pytest.raises(RuntimeError, match="stride 0"):
        check(torch.exp, overlapping.requires_grad_())
    with pytest.raises(RuntimeError, match="stride 0"):
        fastgrad.gradgradcheck(torch.exp, leaf(3), overlapping)
    assert check(torch.mul, (leaf(3), overlapping.detach())), "it is not checked"


def test_complex_inputs_and_outputs() -> None:
    z = leaf(3, dtype=torch.complex128)
    for func in (torch.exp, torch.abs, lambda z: z * z.conj() + 1j * z):
        for check in CHECKS:
            assert check(func, z)
    assert fastgrad.gradcheck(lambda x: torch.exp(1j * x), leaf(3))
    no_conj = function(lambda z: z * z, lambda grad, z: grad * 2 * z)
    assert not fastgrad.gradcheck(no_conj, z, raise_exception=False)


@pytest.mark.parametrize("part", ["real", "imaginary"])
def test_each_part_of_a_complex_output_is_checked(part: str) -> None:
    scale = (2, 1) if part == "real" else (1, 2)
    wrong = function(torch.clone, lambda grad, z: torch.complex(scale[0] * grad.real, scale[1] * grad.imag))
    with pytest.raises(fastgrad.GradcheckError, match=f"{part} part"):
        fastgrad.gradcheck(wrong, leaf(3, dtype=torch.complex128))


def test_without_differentiable_outputs_differences_must_vanish() -> None:
    with pytest.raises(fastgrad.GradcheckError, match="expected to be zero"):
        fastgrad.gradcheck(lambda x: x.detach().exp(), leaf(3))
    assert fastgrad.gradcheck(torch.sign, leaf(3))
    assert fastgrad.gradcheck(lambda x: x.detach().sign(), leaf(3))


def test_results_keep_shape_and_dtype() -> None:
    x = leaf(3)
    before = x.detach().clone()
    moved = lambda v: not torch.equal(v.detach(), before)  # noqa: E731
    with pytest.raises(AssertionError, match="same shape"):
        fastgrad.gradcheck(lambda v: v.exp()[:2] if moved(v) else v.exp(), x)
    with pytest.raises(AssertionError, match="same dtype"):
        fastgrad.gradcheck(lambda v: v.exp().float() if moved(v) else v.exp(), x)


# Parameters


@each_check
def test_func_returns_a_tensor_or_a_tuple(check: Any) -> None:
    assert check(lambda x: x.exp(), leaf(3, 4))
    assert check(lambda x: (x.exp(), x.argmax(), *x.max(0)), leaf(3, 4))


@each_check
def test_inputs_are_a_tensor_or_a_tuple_and_those_that_require_grad_are_checked(check: Any) -> None:
    assert check(torch.exp, leaf(3))
    assert check(lambda x, y, k: x * y * k, (leaf(3), leaf(3), torch.tensor([1, 2, 3])))
    wrong_in_y = lambda x, y: x * x * doubled(y, 1.0)  # noqa: E731
    assert not check(wrong_in_y, (leaf(3), leaf(3)), raise_exception=False)
    assert check(wrong_in_y, (leaf(3), leaf(3).detach()))
    for no_input in (torch.ones(3, dtype=torch.float64), torch.tensor([1, 2])):
        with pytest.raises(ValueError, match="requires_grad=True"):
            check(torch.sin, no_input)


@each_check
@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_eps_is_the_step(check: Any, eps: float) -> None:
    x = leaf(3)
    moves = []

    def func(v: Tensor) -> Tensor:
        moves.append((v.detach() - x.detach()).abs().max().item())
        return v**2

    here = x.detach().clone().requires_grad_()
    assert check(func, *arguments(check, here), eps=eps)
    assert max(moves) == pytest.approx(eps, rel=1e-3)


@each_check
def test_a_kink_within_eps_is_not_a_mismatch(check: Any) -> None:
    """A kink 0.001 away from the point: a step of 0.01 crosses it, and smaller steps decide."""
    x = leaf(3)
    kink = x.detach() + 1e-3
    func = lambda x: (x - kink).relu() ** (1 if check is fastgrad.gradcheck else 2)  # noqa: E731
    assert check(func, *arguments(check, x))
    assert check(func, *arguments(check, x), eps=1e-2)


@each_check
@pytest.mark.parametrize(
    ("tolerances", "error"),
    [
        ({}, 1e-5 + 2 * 1e-3),
        ({"rtol": 0}, 1e-5),
        ({"atol": 1e-3, "rtol": 0}, 1e-3),
        ({"atol": 0, "rtol": 0.01}, 0.02),
        ({"atol": 0, "rtol": 0.5}, 1.0),
        ({"atol": 0.5, "rtol": 0.25}, 1.0),
    ],
)
def test_atol_and_rtol_are_those_of_allclose(check: Any, tolerances: dict[str, float], error: float) -> None:
    for func, given, passes in below_and_above(check, error):
        assert check(func, *given, **tolerances, raise_exception=False) is passes


@each_check
def test_raise_exception(check: Any) -> None:
    (_, _, _), (func, given, _) = below_and_above(check, 1.0)
    assert check(func, *given, raise_exception=False) is False
    with pytest.raises(GradcheckError) as raised:
        check(func, *given)
    for word in ("output 0", "input 0", "analytical", "numerical", "3.01"):
        assert word in str(raised.value)


@each_check
def test_nondet_tol_is_zero_or_given(check: Any) -> None:
    signs = [1.0]

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        signs.append(-signs[-1])
        return grad * (2 + signs[-1] * 1e-8)

    jitter = double(backward=backward)
    func = jitter if check is fastgrad.gradcheck else square(jitter)
    with pytest.raises(fastgrad.GradcheckError, match="not reentrant"):
        check(func, leaf(3))
    assert check(func, leaf(3), nondet_tol=1e-6)
    assert not check(func, leaf(3), nondet_tol=1e-10, raise_exception=False)


@each_check
def test_check_undefined_grad_is_on(check: Any) -> None:
    def backward(grad: Tensor | None, x: Tensor) -> Tensor:
        if grad is None:
            raise RuntimeError("no grad_output")
        return 2 * grad

    needs_grad = function(lambda x: 2 * x, backward, materialize=False)
    func = needs_grad if check is fastgrad.gradcheck else square(needs_grad)
    assert check(func, leaf(3), check_undefined_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(fastgrad.GradcheckError, match="undefined"):
            check(func, leaf(3))


@each_check
def test_check_grad_dtypes_accepts_what_autograd_computes(check: Any) -> None:
    """Autograd converts a gradient of another dtype."""
    assert check(lambda x: 1j * x.exp(), leaf(3), check_grad_dtypes=True)
    returns_float = function(torch.sum, lambda grad, x: grad.float() * torch.ones(3))
    assert fastgrad.gradcheck(returns_float, leaf(3), check_grad_dtypes=True)


@each_check
def test_fast_mode_finds_the_same(check: Any) -> None:
    for dtype in (torch.float64, torch.complex128):
        assert check(torch.exp, leaf(3, dtype=dtype), fast_mode=True)
        wrong = lambda x: x * doubled(x, 0.1)  # noqa: E731
        assert not check(wrong, leaf(3, dtype=dtype), fast_mode=True, raise_exception=False)


def test_check_backward_ad_and_check_rev_over_rev_need_an_alternative() -> None:
    with pytest.raises(AssertionError, match="check_backward_ad"):
        fastgrad.gradcheck(torch.exp, leaf(3), check_backward_ad=False)
    with pytest.raises(AssertionError, match="check_rev_over_rev"):
        fastgrad.gradgradcheck(torch.exp, leaf(3), check_rev_over_rev=False)
    assert fastgrad.gradcheck(torch.exp, leaf(3), check_backward_ad=True)
    assert fastgrad.gradgradcheck(torch.exp, leaf(3), check_rev_over_rev=True)


def test_given_grad_outputs_are_used_and_checked_where_they_require_grad() -> None:
    seen = []

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        seen.append(grad.detach().clone())
        return 2 * x * grad.detach()

    lost = function(torch.square, backward)
    given = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for grad_outputs in (given, (given,)):
        assert fastgrad.gradgradcheck(lost, leaf(3), grad_outputs)
    assert any(torch.equal(grad, given) for grad in seen)
    with pytest.raises(fastgrad.GradcheckError, match="input 1"):
        fastgrad.gradgradcheck(lost, leaf(3), given.requires_grad_())
    with pytest.raises(fastgrad.GradcheckError, match="input 1"):
        fastgrad.gradgradcheck(lost, leaf(3))
    func = lambda x, y: (x * y, y.exp(), y.argmax())  # noqa: E731
    assert fastgrad.gradgradcheck(func, (leaf(3), leaf(3)), (leaf(3), leaf(3)))


def test_gen_non_contig_grad_outputs_is_for_those_not_given() -> None:
    contiguous = []

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        contiguous.append(grad.is_contiguous())
        return 2 * x * grad

    func = function(torch.square, backward)
    # The first VJP uses the unchanged grad_outputs.
    for keywords, first in (({}, True), ({"gen_non_contig_grad_outputs": True}, False)):
        contiguous.clear()
        assert fastgrad.gradgradcheck(func, leaf(3, 4), **keywords)
        assert contiguous[0] is first
    contiguous.clear()
    assert fastgrad.gradgradcheck(func, leaf(3, 4), leaf(3, 4), gen_non_contig_grad_outputs=True)
    assert contiguous[0]


# Forward mode and batched gradients


def test_check_forward_ad_compares_the_jvp() -> None:
    assert fastgrad.gradcheck(double(), leaf(3), check_forward_ad=True)
    assert fastgrad.gradcheck(double(jvp_factor=3), leaf(3)), "off by default"
    with pytest.raises(fastgrad.GradcheckError, match="forward mode"):
        fastgrad.gradcheck(double(jvp_factor=3), leaf(3), check_forward_ad=True)


def test_check_forward_ad_needs_the_inputs_that_func_is_given() -> None:
    x = leaf(3)
    assert fastgrad.gradcheck(lambda _: x.exp(), x)
    assert not fastgrad.gradcheck(lambda _: x.exp(), x, **ONLY_FORWARD, raise_exception=False)


def no_backward(grad: Tensor, x: Tensor) -> Tensor:
    raise RuntimeError("backward was called")


def test_check_backward_ad_false_runs_no_backward() -> None:
    func = double(backward=no_backward)
    assert fastgrad.gradcheck(func, leaf(3), **ONLY_FORWARD)
    assert not fastgrad.gradcheck(double(jvp_factor=3), leaf(3), **ONLY_FORWARD, raise_exception=False)
    with pytest.raises(RuntimeError, match="backward was called"):
        fastgrad.gradcheck(func, leaf(3), check_forward_ad=True)


def test_check_fwd_over_rev() -> None:
    right, wrong = square(double()), square(double(jvp_factor=3))
    assert fastgrad.gradgradcheck(right, leaf(3), check_fwd_over_rev=True)
    assert fastgrad.gradgradcheck(wrong, leaf(3)), "off by default"
    with pytest.raises(fastgrad.GradcheckError, match="forward mode"):
        fastgrad.gradgradcheck(wrong, leaf(3), check_fwd_over_rev=True)


def test_check_rev_over_rev_false_leaves_forward_over_reverse() -> None:
    assert fastgrad.gradgradcheck(square(double(backward=no_backward)), leaf(3), **ONLY_FORWARD_OVER_REVERSE)
    wrong = square(double(jvp_factor=3))
    assert not fastgrad.gradgradcheck(wrong, leaf(3), **ONLY_FORWARD_OVER_REVERSE, raise_exception=False)


def looks_at_values(grad: Tensor, x: Tensor) -> Tensor:
    """Reads a number into Python, which vmap does not allow."""
    return 2 * grad if float(grad.sum()) == 0 else grad * 2


@each_check
def test_check_batched_grad(check: Any) -> None:
    func = double(backward=looks_at_values)
    func = func if check is fastgrad.gradcheck else square(func)
    assert check(torch.exp, leaf(3), check_batched_grad=True)
    assert check(func, leaf(3)), "off by default"
    with pytest.raises(fastgrad.GradcheckError, match="batched"):
        check(func, leaf(3), check_batched_grad=True)


def test_check_batched_forward_grad() -> None:
    assert fastgrad.gradcheck(torch.exp, leaf(3), check_forward_ad=True, check_batched_forward_grad=True)
    func = function(lambda x: 2 * x, lambda grad, x: 2 * grad, looks_at_values)
    assert fastgrad.gradcheck(func, leaf(3), check_forward_ad=True), "off by default"
    with pytest.raises(fastgrad.GradcheckError, match="batched"):
        fastgrad.gradcheck(func, leaf(3), check_forward_ad=True, check_batched_forward_grad=True)


# Sparse inputs

LAYOUTS = [torch.sparse_coo, torch.sparse_csr]


def sparse(layout: torch.layout = torch.sparse_coo) -> Tensor:
    dense = torch.tensor([[0.0, 1.5, 0.0], [2.0, 0.0, -0.7]], dtype=torch.float64)
    return dense.to_sparse(layout=layout).requires_grad_()


def masked_gradient(s: Tensor) -> Tensor:
    """The gradient is zero at unspecified elements."""
    return 2 * s.to_dense(masked_grad=True)


def full_gradient(s: Tensor) -> Tensor:
    return 2 * s.to_dense(masked_grad=False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fast_mode", [False, True])
def test_masked_ignores_gradients_of_unspecified_elements(layout: torch.layout, fast_mode: bool) -> None:
    s = sparse(layout)
    assert fastgrad.gradcheck(masked_gradient, s, masked=True, fast_mode=fast_mode)
    for masked in (None, False):
        assert fastgrad.gradcheck(full_gradient, s, masked=masked, fast_mode=fast_mode)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masked", [None, False])
def test_gradients_of_unspecified_elements_count_by_default(layout: torch.layout, masked: bool | None) -> None:
    with pytest.raises(fastgrad.GradcheckError, match="mismatch"):
        fastgrad.gradcheck(masked_gradient, sparse(layout), masked=masked)


def test_masked_without_sparse_inputs_changes_nothing() -> None:
    for check in CHECKS:
        assert check(torch.exp, leaf(3), masked=True)
        assert not check(lambda x: x * doubled(x, 1.0), leaf(3), masked=True, raise_exception=False)
    product = lambda s, x: torch.sparse.mm(s, x) ** 2  # noqa: E731
    for masked in (False, True):
        assert fastgrad.gradgradcheck(product, (sparse().detach(), leaf(3, 2)), masked=masked)


def test_wrong_gradients_of_specified_elements_fail_masked_or_not() -> None:
    for func, masked in ((masked_gradient, True), (full_gradient, False)):
        wrong = lambda s, func=func: doubled(func(s), 0.1)  # noqa: E731
        assert not fastgrad.gradcheck(wrong, sparse(), masked=masked, raise_exception=False)


def test_check_sparse_nnz_is_an_old_name_of_masked() -> None:
    with pytest.warns(FutureWarning, match="masked"):
        assert fastgrad.gradcheck(masked_gradient, sparse(), check_sparse_nnz=True)
    with pytest.warns(FutureWarning, match="masked"):
        assert fastgrad.gradcheck(full_gradient, sparse(), check_sparse_nnz=False)
    with pytest.warns(FutureWarning, match="masked"):
        assert not fastgrad.gradcheck(masked_gradient, sparse(), check_sparse_nnz=False, raise_exception=False)
    with pytest.warns(FutureWarning, match="masked"):
        assert fastgrad.gradcheck(masked_gradient, sparse(), check_sparse_nnz=True, masked=True)
    with pytest.warns(FutureWarning, match="masked"):
        assert fastgrad.gradcheck(torch.exp, leaf(3), check_sparse_nnz=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert fastgrad.gradcheck(torch.exp, leaf(3), check_sparse_nnz=None)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("masked", [False, True])
def test_check_sparse_nnz_must_agree_with_masked(masked: bool) -> None:
    with pytest.raises(ValueError, match=r"check_sparse_nnz(.|\n)*masked|masked(.|\n)*check_sparse_nnz"):
        fastgrad.gradcheck(torch.exp, leaf(3), check_sparse_nnz=not masked, masked=masked)


# Positional arguments of old versions

_NUMBERS = (1e-6, 1e-5, 1e-3)


@pytest.mark.parametrize(
    ("check", "positional"),
    [
        (fastgrad.gradcheck, _NUMBERS[:1]),
        (fastgrad.gradcheck, _NUMBERS[:2]),
        (fastgrad.gradcheck, _NUMBERS),
        (fastgrad.gradcheck, (*_NUMBERS, True, False, 0.0, True, False, False)),
        (fastgrad.gradgradcheck, (None, *_NUMBERS[:1])),
        (fastgrad.gradgradcheck, (None, *_NUMBERS)),
        (fastgrad.gradgradcheck, (None, *_NUMBERS, True)),
        (fastgrad.gradgradcheck, ("ones", *_NUMBERS, False)),
        (fastgrad.gradgradcheck, (None, *_NUMBERS, False, True, 0.0, True, False, False)),
    ],
)
def test_positional_extras_are_refused_by_name(check: Any, positional: tuple[Any, ...]) -> None:
    calls = []

    def func(x: Tensor) -> Tensor:
        calls.append(x)
        return x.exp()

    with pytest.raises(TypeError, match=r"\beps\b"):
        check(func, leaf(3), *positional)
    assert not calls, "refused before anything runs"


@each_check
def test_the_same_as_keywords(check: Any) -> None:
    keywords = {"eps": 1e-6, "atol": 1e-5, "rtol": 1e-3, "raise_exception": True, "nondet_tol": 0.0}
    assert check(func=torch.exp, inputs=leaf(3), **keywords) is True
    assert fastgrad.gradgradcheck(torch.exp, leaf(3), leaf(3), **keywords) is True


# The project's own pages

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    # The gallery is generated by running its examples: tests/behavior/test_gallery.py. The other page needs ranks:
    # tests/distributed/test_page.py.
    if "```python" in page.read_text() and page.name not in ("gallery.md", "distributed.md")
]


def without_measurements(text: str) -> str:
    """What examples print, without times, calls, versions and the sizes of negligible errors."""
    own = r"[\d,]+ evaluations, [\d,]+ VJPs|[\d.]+ m?s\b|fastgrad [\d.]+, torch .*|0e\+00\b"
    return without_chance(re.sub(own, "...", text)).strip()


def run_examples(text: str) -> int:
    """Runs the Python blocks of a page in order, and returns how many results were compared.

    If the comment after a line is a Python value, the line must have this value. A text block directly after an example
    must be its output. Functions that are named test_... are run as tests, with fastgrad's fixtures.
    """
    names: dict[str, Any] = {"__name__": "example"}
    compared = 0
    torch.manual_seed(0)
    for block, printed in re.findall(r"```python\n(.*?)```(?:\s*```text\n(.*?)```)?", text, re.DOTALL):
        known = set(names)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            for statement in ast.parse(block).body:
                if not isinstance(statement, ast.Expr):
                    exec(compile(ast.Module([statement], []), "example", "exec"), names)
                    continue
                value = eval(compile(ast.Expression(statement.value), "example", "eval"), names)
                line = block.splitlines()[statement.end_lineno - 1]  # type: ignore[operator]
                if not IS_NATIVE and line.startswith("report.evaluations, report.vjps"):
                    continue  # plain Python has no small check, so it makes more calls
                comment = line.partition("  # ")[2]
                with contextlib.suppress(SyntaxError, ValueError):
                    expected = ast.literal_eval(comment)
                    compared += 1
                    assert value == expected, block
            for name in [name for name in names if name.startswith("test_") and name not in known]:
                run_as_test(names[name])
        if printed:
            compared += 1
            assert without_measurements(output.getvalue()) == without_measurements(printed)
    return compared


def run_as_test(function: Callable[..., None]) -> None:
    """Calls a test of an example as pytest does; skips it if its skipif mark says so."""
    marks = getattr(function, "pytestmark", [])
    if not any(mark.name == "skipif" and mark.args[0] for mark in marks):
        function(**{name: getattr(fastgrad, name) for name in inspect.signature(function).parameters})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operators = types.ModuleType("mypackage")
    operators.fused_bias_gelu = lambda x, bias: torch.nn.functional.gelu(x + bias)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mypackage", operators)
    run_examples(page.read_text())


@pytest.mark.parametrize(
    "page",
    [
        "```python\n1 + 1  # 3\n```",
        "```python\nprint(1)\n```\n\n```text\n2\n```",
        "```python\nassert False\n```",
        "```python\ndef test_gradcheck(gradcheck):\n    assert gradcheck is None\n```",
    ],
)
def test_wrong_examples_are_found(page: str) -> None:
    with pytest.raises(AssertionError):
        run_examples(page)


def test_results_in_examples_are_compared() -> None:
    assert run_examples((ROOT / "README.md").read_text()) == 4
    assert run_examples("```python\n1 + 1  # 2\n1 + 1  # two\nprint(3)\n```\n\n```text\n3\n```") == 2


def test_the_message_in_the_readme() -> None:
    text, names = (ROOT / "README.md").read_text(), {"torch": torch}
    ((source, printed),) = re.findall(r"```python\n(class Square.*?)\ntry:.*?```\n(Square: .*?)```", text, re.DOTALL)
    exec(source, names)
    torch.manual_seed(0)
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    # On a slow machine, another engine would be chosen.
    with pytest.raises(GradcheckError) as raised:
        fastgrad.gradcheck(names["Square"].apply, (x,), engine="dense")
    message = str(raised.value).replace("engine='dense', ", "")
    assert without_measurements(message) == without_measurements(printed)


def parameters(*functions: Callable[..., Any]) -> set[str]:
    signatures = [inspect.signature(function).parameters.values() for function in functions]
    return {one.name for own in signatures for one in own if one.kind is not one.VAR_POSITIONAL}


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("coming-from-torch.md", {f"`{name}`" for name in parameters(*CHECKS, *TORCHS)}),
        ("reading-a-failure.md", {f"| {name} |" for name in typing.get_args(CauseName)}),
        ("api.md", {f"fastgrad.{name}\n" for name in fastgrad.__all__ if name != "__version__"}),
    ],
)
def test_nothing_is_missing_from_a_page(page: str, names: set[str]) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert names
    assert not [name for name in names if name not in text]


def test_every_page_is_in_the_table_of_contents() -> None:
    contents = re.findall(r"^([\w-]+)$", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    assert {"index", *contents} == {page.stem for page in (ROOT / "docs").iterdir() if page.suffix in (".md", ".ipynb")}


def test_relative_links_lead_somewhere() -> None:
    """Follows the links of the README. Sphinx checks the links of the pages, and anchors."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text())
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


PUBLIC = [name for name in fastgrad.__all__ if not name.startswith("_")]
FUNCTIONAL = fastgrad.functional.__all__
RESULTS = {"AdjointTest": "adjoint_test", "TaylorTest": "taylor_test"}
"""What a function with an example returns."""


@pytest.mark.parametrize("name", [*(n for n in PUBLIC if n not in RESULTS), *(f"functional.{n}" for n in FUNCTIONAL)])
def test_examples_in_docstrings_give_what_they_say(name: str) -> None:
    public = functools.reduce(getattr, name.split("."), fastgrad)
    examples = doctest.DocTestFinder(recurse=False).find(inspect.unwrap(public), name, module=False, globs={})
    assert sum(len(test.examples) for test in examples) >= 2, "no example"
    torch.manual_seed(0)
    printed = io.StringIO()
    for test in examples:
        doctest.DocTestRunner().run(test, out=printed.write)
    assert not printed.getvalue(), printed.getvalue()
