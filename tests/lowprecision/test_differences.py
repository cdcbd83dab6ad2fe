"""Verdicts in lower dtypes by differences alone, if nothing runs in double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from tests.lowprecision.test_check import DTYPES, each_dtype, normal, tanh_slope


def in_this_dtype_only(dtype: torch.dtype, slope: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    class Tanh(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if x.dtype is not dtype:
                raise TypeError(f"there is no kernel for {x.dtype}")
            ctx.save_for_backward(x)
            return x.float().tanh().to(dtype)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return slope(grad.float(), x.float()).to(dtype)

    return Tanh.apply  # type: ignore[no-any-return]


@each_dtype
def test_right_and_wrong_functions(dtype: torch.dtype) -> None:
    x = normal(3, 4, dtype=dtype)
    right = fastgrad.check(in_this_dtype_only(dtype, tanh_slope), x)
    assert right.verdict == "passed", str(right)
    assert right.precision is not None
    assert right.precision.reference == ""
    assert "of 8 directional derivatives" in str(right)
    assert "an error of a single entry may be hidden" in str(right)
    assert any("there is no kernel for torch.float64" in note for note in right.notes)
    for factor in (0.0, -1.0, 1.5):

        def slope(g: Tensor, x: Tensor, factor: float = factor) -> Tensor:
            return factor * tanh_slope(g, x)

        wrong = fastgrad.check(in_this_dtype_only(dtype, slope), x)
        assert wrong.failure is not None, str(wrong)
        assert wrong.failure.kind == "beyond rounding"
        # All twelve entries are wrong; the search ends with the first.
        assert "is wrong in at least 1 entry, by more than rounding" in str(wrong)
        worst = wrong.precision.worst  # type: ignore[union-attr]
        assert worst is not None
        assert worst.found.real == pytest.approx(factor * worst.expected.real, rel=0.1, abs=1e-6)


def test_an_exception_without_a_message_has_no_colon_in_the_note() -> None:
    def func(x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise RuntimeError
        return 2 * x

    (note,) = fastgrad.check(func, normal(3, dtype=torch.float32)).notes
    assert note.endswith("func in float64 raises RuntimeError")


class OneComplexDtype(torch.autograd.Function):
    """z conj(z) z, which has no kernel for complex128; the derivatives with respect to z and conj(z) times factors."""

    factors = (1.0, 1.0)

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        if z.dtype is not torch.complex64:
            raise TypeError(f"there is no kernel for {z.dtype}")
        ctx.save_for_backward(z)
        return z * z.conj() * z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (z,) = ctx.saved_tensors
        holomorphic, other = OneComplexDtype.factors
        return holomorphic * grad * (2 * z * z.conj()).conj() + other * (grad.conj() * z * z)


@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (1.0, -1.0), (1.001, 1.0), (1.0, 1.001)])
def test_complex_functions(factors: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneComplexDtype, "factors", factors)
    report = fastgrad.check(OneComplexDtype.apply, normal(3, 4, dtype=torch.complex64))
    assert report.verdict == ("passed" if factors == (1.0, 1.0) else "failed"), str(report)
    assert report.precision is not None
    assert report.precision.reference == ""


def test_an_error_of_a_thousandth_in_float32() -> None:
    slope = lambda g, x: 1.001 * tanh_slope(g, x)  # noqa: E731
    report = fastgrad.check(in_this_dtype_only(torch.float32, slope), normal(3, 4, dtype=torch.float32))
    assert report.verdict == "failed"


@each_dtype
def test_kinks_and_jumps_are_no_failure(dtype: torch.dtype) -> None:
    class Stairs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if x.dtype is torch.float64:
                raise TypeError("no")
            ctx.save_for_backward(x)
            return x.abs() + (4 * x).floor()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * x.sign()

    assert fastgrad.check(Stairs.apply, normal(3, 4, dtype=dtype)).verdict in ("passed", "undecided")


def test_a_required_reference_must_run() -> None:
    assert DTYPES
    func = in_this_dtype_only(torch.bfloat16, tanh_slope)
    with pytest.raises(ValueError, match=r"The reference cannot be used: .* no kernel for"):
        fastgrad.check(func, normal(3, dtype=torch.bfloat16), reference="float64")


class WideInside(torch.autograd.Function):
    """A product that always computes in float32, as kernels do."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x.float() * w.float()).tanh().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # type: ignore[override]
        x, w = (saved.float() for saved in ctx.saved_tensors)
        inner = grad_output.float() * (1 - (x * w).tanh() ** 2)
        return (inner * w).to(grad_output.dtype), (inner * x * WideInside.factor).to(grad_output.dtype)


def test_a_function_that_computes_in_float32_inside_is_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(torch.randn(4, 5, generator=generator).bfloat16().requires_grad_() for _ in range(2))
    report = fastgrad.check(WideInside.apply, inputs)
    assert (report.verdict, report.precision.reference) == ("passed", "")  # type: ignore[union-attr]
    assert any("computes in a lower dtype internally" in note for note in report.notes)
    monkeypatch.setattr(WideInside, "factor", 1.5)
    assert fastgrad.check(WideInside.apply, inputs).verdict == "failed"


@each_dtype
def test_a_gradient_that_is_not_finite_fails_where_differences_are(dtype: torch.dtype) -> None:
    def slope(g: Tensor, x: Tensor) -> Tensor:
        return torch.where(x == x.max(), torch.nan, tanh_slope(g, x))

    report = fastgrad.check(in_this_dtype_only(dtype, slope), normal(3, 4, dtype=dtype))
    assert report.failure is not None, str(report)
    assert report.failure.kind == "not finite"
    assert report.precision is not None
    assert report.precision.worst is not None
    assert report.precision.worst.found.real != report.precision.worst.found.real
    assert "the differences are" in str(report)


def test_an_infinite_derivative_is_no_failure() -> None:
    class Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if x.dtype is torch.float64:
                raise TypeError("no")
            ctx.save_for_backward(x)
            return x.abs().sqrt()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * 0.5 * x.sign() / x.abs().sqrt()

    x = torch.tensor([0.5, 0.0, 2.0], requires_grad=True)
    assert fastgrad.check(Root.apply, x).verdict == "undecided"


@pytest.mark.parametrize("outside", ["raises", "is nan"])
@pytest.mark.parametrize("is_finite", [True, False])
def test_a_function_that_is_defined_only_at_x_is_undecided(outside: str, is_finite: bool) -> None:
    x = normal(3, dtype=torch.bfloat16)
    domain = x.detach().clone()

    class AtX(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if x.dtype is torch.float64 or (outside == "raises" and not torch.equal(x, domain)):
                raise ValueError("outside of the domain")
            return torch.where(x == domain, x.sin(), torch.nan)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * domain.cos() if is_finite else grad / 0

    report = fastgrad.check(AtX.apply, x)
    assert report.verdict == "undecided", str(report)
    if is_finite:
        assert "differences in this dtype resolve no derivative here" in str(report)
    else:
        assert "the gradient of input 0 at [0] is not finite, and differences in this dtype do not show" in str(report)
    assert torch.equal(x, domain)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_outputs_that_are_defined_only_at_x_hide_no_error_of_the_others(factor: float) -> None:
    x = normal(3, dtype=torch.bfloat16)
    first = x.detach()[0].clone()

    class FirstAtX(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if x.dtype is torch.float64:
                raise TypeError("no")
            return torch.stack([torch.where(x[0] == first, x[0].sin(), torch.nan), x[1], x[2]])

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.stack([grad[0] * first.cos(), factor * grad[1], grad[2]])

    report = fastgrad.check(FirstAtX.apply, x)
    assert report.verdict == ("passed" if factor == 1 else "failed"), str(report)
    if factor != 1:
        assert report.precision is not None
        assert report.precision.worst is not None
        assert report.precision.worst.output_index == report.precision.worst.input_index == (1,)


def test_a_sum_of_rows_that_overflows_is_undecided() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if x.dtype is torch.float64:
                raise TypeError("no")
            return x.expand(8, 2) * 2.0**14

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.sum(0, keepdim=True) * 2.0**14

    report = fastgrad.check(Scaled.apply, torch.tensor([[1.0, 2.0]], dtype=torch.float16, requires_grad=True))
    assert report.verdict == "undecided", str(report)
    assert "is not finite, and differences in this dtype do not show" in str(report)
    assert "smaller inputs" in str(report)


def test_an_error_that_no_single_entry_shows_is_undecided() -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if x.dtype is torch.float64:
                raise TypeError("no")
            return x.float().sum().to(x.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return (1.1 * grad).expand(256)

    x = normal(256, dtype=torch.bfloat16).detach().abs().requires_grad_()
    report = fastgrad.check(Sum.apply, x)
    assert report.verdict == "undecided", str(report)
    assert "no single wrong entry was found" in str(report)
