"""Verdicts in float32, bfloat16 and float16, against a reference in double precision."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastgrad
from fastgrad.lowprecision import probes
from fastgrad.lowprecision.rounding import unit_roundoff
from tests.planted.kernels import GENERAL, KERNELS
from tests.planted.row import function

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_mode = pytest.mark.parametrize("fast_mode", [False, True], ids=["slow", "fast"])


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype).requires_grad_()


def product(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh()


def elementwise(
    forward: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """A function that computes in float32 and rounds; slope: (grad_output, x) -> gradient."""

    class Elementwise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return forward(x.float()).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return slope(grad.float(), x.float()).to(x.dtype)

    return Elementwise.apply  # type: ignore[no-any-return]


def tanh_slope(g: Tensor, x: Tensor) -> Tensor:
    return g * (1 - x.tanh() ** 2)


@each_mode
@each_dtype
@pytest.mark.parametrize("func", [F.gelu, lambda x: x.softmax(-1)], ids=["gelu", "softmax"])
def test_right_functions_pass_against_themselves(func: Any, dtype: torch.dtype, fast_mode: bool) -> None:
    report = fastgrad.check(func, normal(3, 4, dtype=dtype), fast_mode=fast_mode)
    assert report.verdict == "passed", str(report)
    precision = report.precision
    assert precision is not None
    assert precision.unit == unit_roundoff(dtype)
    assert precision.smallest is not None
    assert 1 < precision.smallest / precision.unit < 200
    assert "would have been found in half of the compared entries" in str(report)
    assert "a single entry may be hidden" not in str(report)
    assert (precision.reference_report or {})["verdict"] == "passed"


@pytest.mark.parametrize(
    ("name", "dtype"), zip(["rotary embedding", "layer norm", "attention"], DTYPES, strict=True), ids=str
)
def test_kernels(name: str, dtype: torch.dtype) -> None:
    kernel = KERNELS[name]
    inputs = kernel.inputs(dtype)
    keywords: dict[str, Any] = {"reference": kernel.composed, "fast_mode": True}
    for right in (kernel.fused(), kernel.composed):
        assert fastgrad.check(right, inputs, **keywords).verdict == "passed"
    for mistake in ("zeros", "one sign", "last row left out", kernel.mistakes[0]):
        report = fastgrad.check(kernel.fused(mistake), inputs, **keywords)
        assert report.failure is not None, mistake
        assert report.failure.kind == "beyond rounding"


@pytest.mark.parametrize("name", KERNELS)
def test_no_kernel_passes_with_zeros(name: str) -> None:
    kernel = KERNELS[name]
    inputs = kernel.inputs(torch.bfloat16)
    report = fastgrad.check(kernel.fused("zeros"), inputs, reference=kernel.composed, fast_mode=True)
    assert report.verdict == "failed"
    assert len(kernel.mistakes) + len(GENERAL) >= 7


@each_dtype
def test_a_wrong_entry_is_named_with_its_error_in_units(dtype: torch.dtype) -> None:
    def slope(g: Tensor, x: Tensor) -> Tensor:
        made = tanh_slope(g, x)
        made[1, 2] *= 1.5
        return made

    func = elementwise(torch.tanh, slope)
    for fast_mode in (False, True):
        report = fastgrad.check(func, normal(3, 4, dtype=dtype), reference=torch.tanh, fast_mode=fast_mode)
        worst = report.precision.worst  # type: ignore[union-attr]
        assert worst is not None
        assert worst.output_index == worst.input_index == (1, 2)
        assert worst.error_units * worst.unit == pytest.approx(0.5, abs=0.05)
        assert worst.allowed < worst.error
    with pytest.raises(
        fastgrad.GradcheckError, match=r"Jacobian mismatch for output 0 with respect to input 0"
    ) as caught:
        fastgrad.gradcheck(func, normal(3, 4, dtype=dtype), reference=torch.tanh)
    text = str(caught.value)
    assert "units of rounding, allowed" in text
    assert "d out0[1, 2] / d x[1, 2]" in text or "d out0[1, 2] / d in0[1, 2]" in text
    assert "reference=tanh" in text


def test_a_gradient_that_is_one_percent_too_large_is_found_though_no_entry_shows_it() -> None:
    func = elementwise(torch.tanh, lambda g, x: 1.01 * tanh_slope(g, x))
    right = elementwise(torch.tanh, tanh_slope)
    x = normal(8, 8, dtype=torch.bfloat16)
    assert fastgrad.check(right, x, reference=torch.tanh).verdict == "passed"
    report = fastgrad.check(func, x, reference=torch.tanh)
    assert report.failure is not None
    assert report.failure.kind == "biased"
    assert "1.0098 times the right one" in str(report)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_rounding_of_one_number_that_all_entries_depend_on_is_no_common_error(dtype: torch.dtype) -> None:
    def logsumexp(x: Tensor) -> Tensor:
        return x.logsumexp(-1)

    for seed in range(20):
        assert fastgrad.check(logsumexp, normal(4, 50, dtype=dtype, seed=seed), fast_mode=True).verdict == "passed"
    wrong = elementwise(torch.tanh, lambda g, x: 1.03 * tanh_slope(g, x))
    assert fastgrad.check(wrong, normal(64, dtype=dtype), reference=torch.tanh).failure is not None


@pytest.mark.parametrize("factor", [1.0, 1.012, 1.02, 1.03])
def test_an_error_of_sums_that_is_common_to_all_entries_is_not_undecided(factor: float) -> None:
    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return (x.float() @ w.float()).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            of_w = factor * (x.float().t() @ grad.float())
            return (grad.float() @ w.float().t()).to(x.dtype), of_w.to(w.dtype)

    for seed in range(4):
        x, w = normal(64, 32, dtype=torch.bfloat16, seed=seed), normal(32, 8, dtype=torch.bfloat16, seed=10 + seed)
        report = fastgrad.check(Linear.apply, (x, w), reference=torch.matmul, fast_mode=True)
        assert report.verdict == ("failed" if factor != 1 else "passed"), seed


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "passed"), (1.01, "failed")])
def test_a_float32_gradient_in_a_bfloat16_kernel_has_no_common_error(factor: float, verdict: str) -> None:
    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return (x.float() @ w).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return (grad.float() @ w.t()).to(x.dtype), factor * (x.float().t() @ grad.float())

    x, w = normal(16, 32, dtype=torch.bfloat16), normal(32, 8, dtype=torch.float32)
    report = fastgrad.check(Linear.apply, (x, w), reference=torch.matmul)
    assert report.verdict == verdict
    if report.failure is not None:
        assert (report.failure.kind, report.failure.input) == ("biased", 1)


@pytest.mark.parametrize("factor", [1e-30, 1e-90])
def test_no_common_error_is_stated_for_a_gradient_below_rounding(factor: float) -> None:
    x, y = (normal(32, dtype=torch.float16, seed=seed) for seed in range(2))
    report = fastgrad.check(lambda x, y: x + factor * y, (x, y))
    assert report.verdict == "passed"
    assert report.precision is not None
    assert report.precision.smallest_scale is not None
    assert report.precision.smallest_scale < 0.01
    assert "the gradient of input 1 was not tested for an error common to all entries" in str(report)


def test_a_formula_that_is_wrong_in_every_dtype_is_found_by_the_check_of_the_reference() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 2 * grad * x**2

    report = fastgrad.check(Wrong.apply, normal(3, dtype=torch.bfloat16))
    assert report.failure is not None
    assert report.failure.kind == "mismatch"
    assert any("found by differences in double precision" in note for note in report.notes)


@each_dtype
def test_another_function_is_undecided(dtype: torch.dtype) -> None:
    x = normal(3, 4, dtype=dtype)
    report = fastgrad.check(torch.tanh, x, reference=lambda x: 1.2 * x.tanh())
    assert report.verdict == "undecided"
    assert "different functions: result 0" in report.precision.undecided  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="The check is undecided: func and the reference are different functions"):
        assert fastgrad.gradcheck(torch.tanh, x, reference=lambda x: 1.2 * x.tanh())


@each_dtype
@pytest.mark.parametrize(("units", "verdict"), [(24, "passed"), (40, "undecided")])
def test_a_constant_that_rounding_hides_is_no_other_function(dtype: torch.dtype, units: int, verdict: str) -> None:
    constant = units * unit_roundoff(dtype)
    report = fastgrad.check(lambda x: torch.sin(x) + constant, normal(100, dtype=dtype), reference=torch.sin)
    assert report.verdict == verdict, str(report)


def test_an_overflow_is_not_finite() -> None:
    func = elementwise(torch.tanh, lambda g, x: torch.where(x > 0, g / 0.0, tanh_slope(g, x)))
    report = fastgrad.check(func, normal(4, 4, dtype=torch.float16), reference=torch.tanh)
    assert report.failure is not None
    assert report.failure.kind == "not finite"
    assert "the reference is in the range of the dtype" in str(report)


def test_an_overflow_of_the_reference_is_left_out() -> None:
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16).requires_grad_()

    def func(x: Tensor) -> Tensor:
        return x * 60000.0 * x / 60000.0 if x.dtype is torch.float64 else x * x

    report = fastgrad.check(func, x)
    assert report.verdict == "passed"
    large = torch.tensor([300.0, 1.0, 2.0], dtype=torch.float16).requires_grad_()
    report = fastgrad.check(lambda x: x**3, large)
    assert report.precision is not None
    assert report.precision.out_of_range > 0
    assert report.verdict == "passed", str(report)


@each_mode
def test_inputs_random_state_and_modes_are_as_before(fast_mode: bool) -> None:
    x = normal(3, 4, dtype=torch.bfloat16)
    bits, state = x.detach().clone(), torch.get_rng_state()
    torch.rand(1)
    torch.set_rng_state(state)

    def raising(v: Tensor) -> Tensor:
        if v.dtype is torch.float64:
            torch.rand(3)
            raise KeyError("here")
        v.detach().add_(1)
        return v.sin()

    fastgrad.check(torch.sin, x, fast_mode=fast_mode)
    with pytest.raises(ValueError, match="KeyError"):
        fastgrad.check(raising, x, fast_mode=fast_mode, reference="float64")
    assert torch.equal(x, bits)
    assert x.grad is None
    assert x.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_dropout_under_torchs_generator_and_a_function_that_draws_from_its_own() -> None:
    generator = random.Random(0)
    x = normal(6, dtype=torch.bfloat16)
    report = fastgrad.check(lambda x: x * generator.random(), x)
    assert report.verdict == "undecided"
    assert "func is random" in str(report)

    def masked(x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, dtype=torch.float32) > 0.5)

    assert fastgrad.check(masked, x).verdict == "passed"


@pytest.mark.parametrize("layout", ["gapped", "expanded"])
def test_layouts_of_grad_output(layout: str) -> None:
    def slope(g: Tensor, x: Tensor) -> Tensor:
        is_expanded = g.stride(-1) == 0
        is_gapped = not (is_expanded or g.is_contiguous())
        return tanh_slope(g * 2 if (is_gapped if layout == "gapped" else is_expanded) else g, x)

    class Strided(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.tanh()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return slope(grad, *ctx.saved_tensors)

    report = fastgrad.check(Strided.apply, normal(4, 6, dtype=torch.bfloat16), reference=torch.tanh)
    assert report.failure is not None
    assert any(cause.name == "layout of grad_output" for cause in report.causes), str(report)


def test_a_failure_for_one_layout_names_the_input_of_the_worst_entry() -> None:
    class Strided(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(x, y)
            return x.tanh() + y.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, y = ctx.saved_tensors
            is_gapped = not (grad.stride(-1) == 0 or grad.is_contiguous())
            return tanh_slope(grad * (1.1 if is_gapped else 1.0), x), grad * y.cos() * (3.0 if is_gapped else 1.0)

    inputs = normal(4, 6, dtype=torch.float32), normal(4, 6, dtype=torch.float32, seed=1)
    report = fastgrad.check(Strided.apply, inputs, reference=lambda x, y: x.tanh() + y.sin())
    assert [cause.name for cause in report.causes] == ["layout of grad_output"]
    assert report.failure is not None
    assert report.precision is not None
    assert report.precision.worst is not None
    assert report.failure.input == report.precision.worst.input == 1


def test_a_backward_that_clamps_or_ignores_grad_output() -> None:
    clamps = elementwise(torch.tanh, lambda g, x: tanh_slope(g.clamp(-2, 2), x))
    ignores = elementwise(torch.tanh, lambda g, x: 1 - x.tanh() ** 2 + 0 * g)
    for func in (clamps, ignores):
        assert fastgrad.check(func, normal(4, 6, dtype=torch.bfloat16), reference=torch.tanh).verdict == "failed"


def test_undefined_grad_outputs() -> None:
    class TwoOutputs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            ctx.set_materialize_grads(False)
            return 2 * x, 3 * x

        @staticmethod
        def backward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
            if left is None or right is None:
                raise RuntimeError("expected two tensors")
            return 2 * left + 3 * right

    report = fastgrad.check(TwoOutputs.apply, normal(3, dtype=torch.bfloat16), reference=lambda x: (2 * x, 3 * x))
    assert report.failure is not None
    assert report.failure.kind == "undefined grad raises"


def test_mixed_dtypes_have_units_of_their_own() -> None:
    x, w = normal(4, 6, dtype=torch.bfloat16), normal(6, dtype=torch.float32)
    report = fastgrad.check(lambda x, w: F.layer_norm(x.float(), (6,), w), (x, w))
    assert report.verdict in ("passed", "undecided")
    report = fastgrad.check(lambda x, w: x.to(w.dtype) * w, (x, w), reference=lambda x, w: x * w)
    assert report.verdict == "passed", str(report)
    assert report.precision is not None
    assert set(report.precision.dtypes) == {"bfloat16", "float32"}


def test_complex64() -> None:
    x = normal(3, 4, dtype=torch.complex64)
    report = fastgrad.check(lambda x: (x * x).exp(), x)
    assert report.verdict == "passed", str(report)
    report = fastgrad.check(_WrongConjugate.apply, x, reference=lambda x: x * x)
    assert report.verdict == "failed"


@each_mode
@pytest.mark.parametrize("missing", [10.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.complex64, *DTYPES], ids=str)
def test_a_missing_derivative_is_no_sign_of_low_precision(dtype: torch.dtype, missing: float, fast_mode: bool) -> None:
    """All entries of this backward, including zeros, are exact in the dtype of x."""
    report = fastgrad.check(lambda x: x * x + missing * x.roll(1).detach(), normal(4, dtype=dtype), fast_mode=fast_mode)
    assert report.verdict == "failed"
    assert report.causes[0].name == "constant part"


@pytest.mark.parametrize("dtype", [torch.complex64, *DTYPES], ids=str)
def test_the_default_device_does_not_matter(dtype: torch.dtype) -> None:
    x, w = normal(5, dtype=dtype), normal(5, dtype=dtype, seed=1)
    with torch.device("meta"):
        for fast_mode in (False, True):
            assert fastgrad.gradcheck(torch.mul, (x, w), fast_mode=fast_mode)
            with pytest.raises(fastgrad.GradcheckError):
                fastgrad.gradcheck(lambda x: x * x.roll(1).detach(), (x,), fast_mode=fast_mode)
        assert fastgrad.gradgradcheck(torch.mul, (x, w))


class _WrongConjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grad * x


def test_modules_are_compared_with_a_copy_in_double_precision() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)).to(torch.bfloat16)
    x = normal(4, 6, dtype=torch.bfloat16)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    report = fastgrad.check(module, x)
    assert report.verdict == "passed", str(report)
    assert "module.0.weight" in report.input_names
    assert all(torch.equal(*pair) for pair in zip(module.parameters(), before, strict=True))
    assert module[0].weight.dtype is torch.bfloat16
    assert fastgrad.gradcheck(module, (x,))
    other = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3))
    assert fastgrad.check(module, x, reference=other).verdict == "passed"
    with pytest.raises(TypeError, match="must be a module with the same parameters"):
        fastgrad.check(module, x, reference=lambda x: x)


def test_tolerances_of_the_callers_and_strict_are_as_in_double_precision() -> None:
    x = normal(4, dtype=torch.float32)
    for keywords in ({"eps": 1e-2, "atol": 1e-2}, {"precision": "strict"}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = fastgrad.check(torch.sin, x, **keywords)  # type: ignore[arg-type]
        assert report.precision is None
    with_reference = fastgrad.check(torch.sin, x, eps=1e-5, reference=torch.sin)
    assert with_reference.precision is not None


def test_a_strict_failure_names_the_dtype_first() -> None:
    x = normal(4, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="not a double precision"):
        report = fastgrad.check(torch.sin, x, precision="strict")
    assert report.failure is not None
    assert report.causes[0].name == "low precision"
    assert 'repeat the call with reference="float64"' in str(report)


def test_double_precision_is_checked_as_ever() -> None:
    x = normal(4, dtype=torch.float64)
    assert fastgrad.check(torch.sin, x, reference=torch.cos).precision is None
    assert fastgrad.check(torch.sin, x) == fastgrad.check(torch.sin, x)


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"precision": "loose"}, ValueError, "precision must be 'auto' or 'strict', got 'loose'"),
        ({"reference": 3}, TypeError, "reference must be None, 'float64' or a function, got 3"),
        ({"reference": torch.sin, "precision": "strict"}, ValueError, "uses tolerances, not a reference"),
        (
            {"reference": torch.sin, "check_forward_ad": True},
            NotImplementedError,
            "forward mode is checked with tolerances",
        ),
        ({"reference": lambda x: x.sum()}, ValueError, "The reference cannot be used: .* shape"),
    ],
)
def test_what_is_refused(keywords: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fastgrad.gradcheck(torch.sin, normal(3, dtype=torch.float32), **keywords)


def test_second_derivatives() -> None:
    x, w = normal(3, 4, dtype=torch.bfloat16), normal(4, 2, dtype=torch.bfloat16)
    report = fastgrad.check(product, (x, w), order=2)
    assert report.verdict == "passed", str(report)
    assert report.precision is not None
    assert fastgrad.gradgradcheck(product, (x, w))

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * x.cos().detach()

    with pytest.raises(fastgrad.GradcheckError):
        fastgrad.gradgradcheck(Wrong.apply, (x,), reference=torch.sin)


def test_grad_dtypes_repeats_and_reports() -> None:
    calls = 0

    def slope(g: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return tanh_slope(g, x) * (1 + calls % 2 * 2.0**-7)

    x = normal(3, 4, dtype=torch.bfloat16)
    report = fastgrad.check(elementwise(torch.tanh, slope), x, reference=torch.tanh, check_grad_dtypes=True)
    assert report.failure is not None
    assert report.failure.kind in ("nondeterministic", "beyond rounding", "biased", "nonlinear")
    right = fastgrad.check(elementwise(torch.tanh, tanh_slope), x, reference=torch.tanh, check_grad_dtypes=True)
    assert right.verdict == "passed"
    assert '"precision"' in right.to_json()
    assert "passed" in right.to_html()
    assert right.precision is not None
    assert right.precision.rounded_once


@pytest.mark.parametrize(
    ("make", "keywords", "why"),
    [
        (lambda x: x.detach().to_sparse().requires_grad_(), {"masked": True}, "sparse and MKLDNN inputs are checked"),
        (lambda x: x, {"check_forward_ad": True}, "forward mode is checked"),
    ],
)
def test_what_is_checked_with_tolerances_only(make: Any, keywords: dict[str, Any], why: str) -> None:
    x = make(torch.eye(3, dtype=torch.float32).requires_grad_())

    def func(x: Tensor) -> Tensor:
        return 2 * x.to_dense()

    report = fastgrad.check(func, x, eps=2.0**-6, atol=1e-3, **keywords)
    assert report.verdict == "passed", str(report)
    with pytest.raises(NotImplementedError, match=f"reference= cannot be used here: {why} with tolerances only"):
        fastgrad.check(func, x, reference=func, **keywords)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = fastgrad.check(func, x, **keywords)
    assert report.precision is None
    assert f"{why} with tolerances only" in report.notes


def test_results_without_a_graph_must_not_depend_on_the_inputs() -> None:
    x = normal(3, 4, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fastgrad.check(lambda x: torch.ones(2), x).verdict == "passed"
        report = fastgrad.check(lambda x: 8 * x.detach(), x, reference=lambda x: 8 * x, eps=2.0**-6)
    assert report.failure is not None
    assert report.failure.kind == "nonzero numerical gradient"


def test_empty_inputs_pass_with_and_without_a_reference() -> None:
    def raising(x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise TypeError("there is no kernel for float64")
        return x.sin()

    x = torch.empty(0, 3, dtype=torch.bfloat16, requires_grad=True)
    for func in (torch.sin, raising):
        report = fastgrad.check(func, x)
        assert report.verdict == "passed"
        assert report.n == report.m == 0


def test_values_that_are_not_finite_are_undecided() -> None:
    report = fastgrad.check(lambda x: x * torch.nan, normal(3, dtype=torch.bfloat16))
    assert report.verdict == "undecided"
    assert "func is not finite: output 0 at [0] is nan" in str(report)
    x = torch.tensor([1.0, torch.nan], dtype=torch.bfloat16, requires_grad=True)
    report = fastgrad.check(torch.sin, x)
    assert report.verdict == "undecided"
    assert "inputs[0] contains NaN; all inputs were restored before and after every evaluation" in report.notes
    assert torch.equal(x.isnan(), torch.tensor([False, True]))


def test_nan_in_a_single_call_does_not_pass() -> None:
    calls = {"forward": 0, "backward": 0}
    bad = {"forward": -1, "backward": -1}

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return counted("forward", x.sin())

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return counted("backward", grad * ctx.saved_tensors[0].cos())

    def counted(name: str, value: Tensor) -> Tensor:
        calls[name] += 1
        return torch.full_like(value, torch.nan) if calls[name] == bad[name] else value

    def checked(name: str = "forward", number: int = -1) -> fastgrad.Report:
        calls.update(forward=0, backward=0)
        bad.update({"forward": -1, "backward": -1, name: number})
        return fastgrad.check(Sine.apply, normal(3, dtype=torch.float32), reference=torch.sin)

    assert checked().verdict == "passed"
    # The values of the third forward call are not compared: it only records the graph.
    for name, count in {"forward": 2, "backward": calls["backward"]}.items():
        verdicts = [checked(name, number).verdict for number in range(1, count + 1)]
        assert "passed" not in verdicts, (name, verdicts)


def test_a_backward_that_depends_on_random_numbers_is_undecided() -> None:
    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x, torch.rand(x.shape) > 0.5)
            return x.tanh()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            x, mask = ctx.saved_tensors
            return tanh_slope(grad, x) * mask * 2

    state = torch.get_rng_state()
    report = fastgrad.check(Masked.apply, normal(3, 4, dtype=torch.bfloat16), reference=torch.tanh)
    assert report.verdict == "undecided"
    assert not report.causes
    assert "func draws random numbers, and its gradients differ from those of the reference" in str(report)
    assert torch.equal(torch.get_rng_state(), state)


def test_references_that_are_not_in_double_precision() -> None:
    x = normal(3, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="the reference returns bfloat16 even for inputs in double precision"):
        fastgrad.check(torch.tanh, x, reference=lambda x: x.tanh().to(torch.bfloat16))
    report = fastgrad.check(torch.tanh, x, reference=lambda x: x.to(torch.bfloat16).tanh().to(x.dtype))
    assert report.verdict == "undecided"
    assert "func computes in bfloat16 and returns double precision" in str(report)
    for func, why in (
        (lambda x: x.tanh().to(torch.bfloat16), "returns bfloat16 even for inputs in double precision"),
        (lambda x: x.to(torch.bfloat16).tanh().to(x.dtype), "computes in a lower dtype internally"),
    ):
        report = fastgrad.check(func, x)
        assert report.verdict == "passed"
        assert report.precision is not None
        assert report.precision.reference == ""
        assert any(why in note for note in report.notes)


def test_a_float32_mask_is_no_lower_dtype() -> None:
    report = fastgrad.check(lambda x: x * (torch.rand(x.shape) * 2 > 1), normal(3, 4, dtype=torch.bfloat16))
    assert report.verdict == "passed", str(report)
    assert report.precision is not None
    assert report.precision.reference


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        (lambda x: x.detach().tanh(), "no output of the reference requires grad"),
        (lambda x: x.tanh().to_sparse(), "the reference returns a sparse tensor as result 0"),
        (lambda x: (x.tanh(),), "the reference returns no tensor as result 1"),
        (
            lambda x: x.tanh() + 0j,
            r"result 0 of the reference is a complex tensor of shape \(3,\), but that of func is a real tensor",
        ),
        (
            lambda x: x.tanh()[:2],
            r"result 0 of the reference is a real tensor of shape \(2,\), but that of func is a real tensor of .*3",
        ),
    ],
)
def test_results_of_a_reference_that_cannot_be_compared(reference: Any, text: str) -> None:
    def func(x: Tensor) -> tuple[Tensor, ...]:
        return (x.tanh(), x.sin()) if "result 1" in text else (x.tanh(),)

    with pytest.raises(ValueError, match=f"The reference cannot be used: {text}"):
        fastgrad.check(func, normal(3, dtype=torch.bfloat16), reference=reference)


def test_a_module_of_other_parameters_is_no_reference() -> None:
    module, x = nn.Linear(4, 2).to(torch.bfloat16), normal(3, 4, dtype=torch.bfloat16)
    for other, differs in (
        (nn.Linear(4, 3), r"module\.weight has shape \(3, 4\) in the reference and \(2, 4\) in func"),
        (nn.Linear(4, 2, bias=False), "it has 2, and func has 3"),
    ):
        with pytest.raises(TypeError, match=rf"\(a module: the same parameters\), but {differs}\.$"):
            fastgrad.check(module, x, reference=other)


def test_a_tensor_that_is_given_twice_is_one_input_of_the_reference() -> None:
    x = normal(3, 4, dtype=torch.bfloat16)
    report = fastgrad.check(torch.mul, (x, x))
    assert report.verdict == "passed", str(report)
    assert report.precision is not None
    assert report.precision.reference


def test_autocast_does_not_reach_the_reference() -> None:
    x = normal(4, 3, dtype=torch.float32)
    with torch.autocast("cpu"):
        report = fastgrad.check(lambda x: x @ x.T, x)
        assert torch.is_autocast_enabled("cpu")
    assert report.verdict == "passed", str(report)
    assert report.precision is not None
    assert report.precision.reference


class _OneSided(torch.autograd.Function):
    """abs, with a one-sided derivative at zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x >= 0, 1.0, -1.0).to(x.dtype) * grad


class _WrongNextToZero(_OneSided):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x == 0, 1.0, 2 * x.sign()).to(x.dtype) * grad


def test_at_a_kink_the_reference_is_checked_next_to_it() -> None:
    x = torch.tensor([0.0, 0.0, -1.0], dtype=torch.bfloat16, requires_grad=True)
    scale = torch.tensor(2.0, dtype=torch.bfloat16)
    report = fastgrad.check(lambda x, scale: _OneSided.apply(x) * scale, (x, scale))
    assert report.verdict == "passed", str(report)
    assert "the reference was checked next to the inputs, because at the inputs there is a kink" in report.notes
    report = fastgrad.check(_WrongNextToZero.apply, x)
    assert report.verdict == "undecided"
    assert "the reference cannot be checked in double precision: func has a kink" in str(report)


def test_products_with_zero_are_not_checked_where_a_derivative_is_not_finite() -> None:
    x = torch.tensor([0.0, 1.0, 4.0], dtype=torch.bfloat16, requires_grad=True)
    report = fastgrad.check(lambda x: x.abs().sqrt(), x)
    assert report.verdict == "passed", str(report)
    assert (
        "the reference was checked next to the inputs, because at the inputs the derivative is not finite"
        in report.notes
    )
    assert any("zero grad_outputs were not checked" in note for note in report.notes)
    assert "entries whose reference is outside th" in str(report)


def test_batched_gradients_are_those_of_vmap() -> None:
    reads_values = function(torch.sin, lambda grad, x: grad * x.cos() * bool(grad.isfinite().all()))
    x = normal(3, dtype=torch.bfloat16)
    assert fastgrad.check(reads_values, x).verdict == "passed"
    assert fastgrad.check(torch.sin, x, check_batched_grad=True).verdict == "passed"
    report = fastgrad.check(reads_values, x, check_batched_grad=True)
    assert report.failure is not None
    assert report.failure.kind.startswith("batched")


def test_gradients_that_are_all_zero() -> None:
    x = normal(3, 4, dtype=torch.bfloat16)
    report = fastgrad.check(lambda x: x * 0, x)
    assert report.verdict == "passed"
    assert "all compared gradients are zero" in str(report)
    report = fastgrad.check(lambda x, y: x.tanh() + y * 0, (x, normal(3, 4, dtype=torch.bfloat16, seed=1)))
    assert report.verdict == "passed"
    assert "all compared gradients are zero" not in str(report)


def test_a_reference_that_is_beyond_the_range_everywhere_is_undecided() -> None:
    report = fastgrad.check(lambda x: x * 1e30 * 1e30, normal(3, 4, dtype=torch.float32))
    assert report.verdict == "undecided"
    assert "no entry was compared: the reference is outside the dtype's range" in str(report)


@pytest.mark.parametrize(
    ("factors", "verdict"),
    [((1e30, 1e30), "passed"), ((1e30, -1e30), "undecided"), ((1e30, 1.0), "undecided"), ((0.0, 1.0), "undecided")],
)
def test_a_wrong_entry_where_the_reference_is_beyond_the_range_is_undecided(
    factors: tuple[float, float], verdict: str
) -> None:
    scale = torch.tensor([1e60, 1.0, 2.0, 3.0], dtype=torch.float64)
    func = elementwise(
        lambda x: x * scale, lambda g, x: torch.where(scale > 1e9, g * factors[0] * factors[1], g * scale.float())
    )
    report = fastgrad.check(func, normal(4, dtype=torch.float32), reference=lambda x: x * scale)
    assert report.verdict == verdict, str(report)
    assert ("too small, or of the wrong sign, in" in str(report)) == (verdict == "undecided")


def test_an_intermediate_result_beyond_the_range_is_undecided() -> None:
    report = fastgrad.check(lambda x: (x * 1e-3) * 6e4, normal(3, dtype=torch.float16))
    assert report.verdict == "undecided"
    assert "an intermediate result leaves the dtype's range" in str(report)
    assert "make the inputs smaller" in str(report)


def test_rounding_that_hides_most_entries_is_undecided() -> None:
    x = torch.full((3, 4), 7.0, dtype=torch.bfloat16).requires_grad_()
    report = fastgrad.check(lambda x: (x - x.mean()) / (x - x.mean() + 0.001), x)
    assert report.verdict == "undecided"
    assert "an entry that is wrongly zero would not be detected" in str(report)


@pytest.mark.parametrize(("count", "verdict"), [(32, "passed"), (128, "undecided"), (256, "failed")])
def test_sums_that_accumulate_in_the_lower_dtype(count: int, verdict: str) -> None:
    def expanded(x: Tensor) -> Tensor:
        return x.expand(count) * 1.0

    class Expanded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return expanded(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            total = torch.zeros_like(grad[:1])
            for one in grad.split(1):
                total = total + one
            return total

    report = fastgrad.check(Expanded.apply, normal(1, dtype=torch.bfloat16), reference=expanded, fast_mode=True)
    assert report.verdict == verdict, str(report)
    if verdict == "undecided":
        assert "check whether func accumulates in the lower dtype" in str(report)
        # Fast mode compares hardly any row.
        assert "but the gradients of the rows that were compared alone do not" in str(report)
    if verdict == "failed":
        assert "the error is in the gradient of a sum over outputs, not in a row that was compared alone" in str(report)


def test_a_failure_of_sums_names_the_worst_entry() -> None:
    def expanded(x: Tensor, y: Tensor) -> Tensor:
        return x.expand(256) + y.expand(256)

    def accumulated(grad: Tensor, share: float) -> Tensor:
        total = torch.zeros_like(grad[:1])
        for one in grad.split(1):
            total = total + one
        return (share * total.double() + (1 - share) * grad.double().sum()).to(grad.dtype)

    class Expanded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            return expanded(x, y)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            return accumulated(grad, 1.0), accumulated(grad, 0.9)

    inputs = normal(1, dtype=torch.bfloat16), normal(1, dtype=torch.bfloat16)
    report = fastgrad.check(Expanded.apply, inputs, reference=expanded, fast_mode=True)
    assert report.failure is not None
    assert report.precision is not None
    assert report.precision.worst is not None
    assert report.failure.input == report.precision.worst.input == 0


def test_a_wrong_gradient_of_equal_grad_outputs_is_not_blamed_on_their_layout() -> None:
    func = elementwise(torch.tanh, lambda g, x: tanh_slope(g, x) * (2 if (g == g.reshape(-1)[0]).all() else 1))
    report = fastgrad.check(func, normal(3, 4, dtype=torch.bfloat16), reference=torch.tanh)
    assert report.failure is not None
    assert (
        report.failure.detail
        == "the error is in the gradient of a sum over outputs, not in a row that was compared alone"
    )
    assert all(cause.name != "layout of grad_output" for cause in report.causes)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def silu_slope(g: Tensor, x: Tensor) -> Tensor:
    s = 1 / (1 + torch.exp(-x))
    return g * s * (1 + x * (1 - s))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("func", [elementwise(silu, silu_slope), torch.nn.functional.silu], ids=["kernel", "operator"])
def test_results_that_underflow_are_no_errors(func: Any, dtype: torch.dtype) -> None:
    tail = torch.linspace(-105, -88.75, 40)
    x = torch.cat([torch.linspace(-3, 3, 100), tail]).to(dtype).requires_grad_()
    report = fastgrad.check(func, x, reference=torch.nn.functional.silu)
    assert report.verdict == "passed", str(report)
    report = fastgrad.check(func, tail.to(dtype).requires_grad_(), reference=torch.nn.functional.silu)
    assert "rounding in this dtype is larger than most entries" in report.precision.undecided, str(report)


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, 16 * 1.008e-38), (torch.bfloat16, 3.05 * 1.008e-38)], ids=str
)
@pytest.mark.parametrize(("share", "verdict"), [(0.97, "passed"), (1.03, "failed")])
def test_an_error_above_underflow_fails(dtype: torch.dtype, allowed: float, share: float, verdict: str) -> None:
    x = torch.tensor([1.0, 2.0, 0.5, -92.0], dtype=dtype, requires_grad=True)
    extra = share * allowed - 1.008e-38  # the derivative at -92 is -1.008e-38, and becomes zero
    func = elementwise(silu, lambda g, x: silu_slope(g, x) + g * (x < 0) * extra)
    report = fastgrad.check(func, x, reference=torch.nn.functional.silu)
    assert report.verdict == verdict, str(report)


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "passed"), (1.02, "failed")])
def test_a_common_error_next_to_underflow_is_found(factor: float, verdict: str) -> None:
    x = torch.cat([torch.linspace(-3, 3, 100), torch.linspace(-105, -88.75, 40)]).bfloat16().requires_grad_()
    func = elementwise(silu, lambda g, x: factor * silu_slope(g, x))
    report = fastgrad.check(func, x, reference=torch.nn.functional.silu)
    assert report.verdict == verdict, str(report)


def test_errors_within_the_rounding_of_the_largest_element_are_excused() -> None:
    x = torch.tensor([100.0, 100.0, 0.01, 0.02, 0.03, -0.01], dtype=torch.bfloat16, requires_grad=True)
    for error, verdict in ((0.25, "passed"), (25.0, "failed")):
        func = elementwise(lambda x: x * x, lambda g, x, error=error: g * (2 * x + (x < 1) * error))
        report = fastgrad.check(func, x, reference=lambda x: x * x)
        assert report.verdict == verdict, str(report)
        excused = any("passed only a second comparison: " in note for note in report.notes)
        assert excused == (verdict == "passed")


def test_one_wrong_row_among_more_than_are_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "MAX_SINGLE_ROWS", 16)

    def slope(g: Tensor, x: Tensor) -> Tensor:
        made = tanh_slope(g, x)
        made[20] *= 1.5
        return made

    class Tanh(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.tanh()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return tanh_slope(grad, *ctx.saved_tensors)

    wrong = elementwise(torch.tanh, slope)
    x = normal(24, dtype=torch.bfloat16)
    report = fastgrad.check(wrong, x, reference=Tanh.apply)
    assert report.precision is not None
    assert "all 24 rows, in 16 groups" in report.precision.rows
    assert report.precision.worst is not None
    assert report.precision.worst.output_index == report.precision.worst.input_index == (20,)
    assert report.failure is not None
    assert report.failure.kind == "beyond rounding"


@pytest.mark.parametrize("mode", [{}, {"fast_mode": True}], ids=["exact", "fast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", ["inf", "nan"])
def test_a_gradient_that_is_not_finite_is_wrong_where_func_is_finite(
    factor: str, dtype: torch.dtype, mode: dict[str, Any]
) -> None:
    factors = torch.tensor([1.0, 1.0, float(factor), 1.0])
    wrong = function(torch.sin, lambda grad, x: grad * x.cos() * factors.to(x.dtype))
    report = fastgrad.check(wrong, (torch.linspace(0.1, 0.9, 4, dtype=dtype).requires_grad_(),), **mode)
    assert report.verdict == "failed"
    assert f"d inputs[0][2]   analytical {factor}   numerical" in str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_inputs_and_outputs_without_elements(dtype: torch.dtype) -> None:
    empty = torch.zeros(0, 3, dtype=dtype, requires_grad=True)
    x = torch.linspace(0.2, 1.0, 4).to(dtype).requires_grad_()
    assert fastgrad.gradcheck(lambda empty, x: (empty.sum() + x.sin(), x[:0]), (empty, x))
    assert fastgrad.gradcheck(lambda empty: empty.sin(), (empty,))
