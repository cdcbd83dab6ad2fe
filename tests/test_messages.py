"""What a person reads: whole texts, so that a change of wording is a decision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fastgrad
from fastgrad.diagnose import constant_factor, is_zero
from fastgrad.messages import engine_line, failure_message
from fastgrad.report import Comparison, Entry, Failure, FailureKind, Plan, Report, Settings


def report(failure: Failure | None, **keywords: object) -> Report:
    values: dict[str, object] = {
        "failure": failure,
        "settings": Settings(),
        "plan": Plan("dense", 8, 8, True, ""),
        "n": 8,
        "m": 1,
        "evaluations": 18,
        "vjps": 5,
        "seconds": 0.00412,
    }
    return Report(**(values | keywords))  # type: ignore[arg-type]


def comparison(**keywords: object) -> Comparison:
    values: dict[str, object] = {
        "entries": 8448,
        "mismatches": 12,
        "worst": Entry((3, 17), (5, 2), 0.4821, 0.9642, 9.742e-4),
        "largest_absolute": 0.4821,
        "largest_relative": 0.5,
        "sum_analytical": 1.0,
        "sum_numerical": 4.0,
        "sum_product": 2.0 + 0j,
    }
    return Comparison(**(values | keywords))  # type: ignore[arg-type]


def test_a_mismatch() -> None:
    failure = Failure("mismatch", output=0, input=1, output_position=0, input_position=2, comparison=comparison())
    assert failure_message(report(failure)) == (
        "Jacobian mismatch for output 0 with respect to input 1,\n"
        "  worst      d out0[3, 17] / d in1[5, 2]   analytical 0.4821   numerical 0.9642\n"
        "             |difference| 0.482, allowed 0.00097 = atol 1e-05 + rtol 0.001 * |numerical|\n"
        "  extent     12 of 8448 entries\n"
        "             largest absolute error 0.482, largest relative error 0.5\n"
        "  looks like the analytical gradient is 0.5 x the numerical one there (residual 0e+00): a missing factor 2\n"
        "  where      input 1 is argument 2 of func (tensors without gradients are not counted)\n"
        "  engine     dense: 8 input coordinates, 1 output coordinate, 18 evaluations, 5 VJPs, 4.1 ms\n"
        "  reproduce  fastgrad.gradcheck(..., eps=1e-06, atol=1e-05, rtol=0.001, seed=0)"
    )


@pytest.mark.parametrize(
    ("name", "keywords", "expected"),
    [
        ("gradcheck", {}, "gradcheck(..., eps=1e-06, atol=1e-05, rtol=0.001, seed=0)"),
        (
            "gradcheck",
            {"check_forward_ad": True, "check_backward_ad": False, "rtol": 0.01, "engine": "dense", "seed": 3},
            "gradcheck(..., eps=1e-06, atol=1e-05, rtol=0.01, check_forward_ad=True, check_backward_ad=False, "
            "engine='dense', seed=3)",
        ),
        ("gradgradcheck", {}, "gradgradcheck(..., eps=1e-06, atol=1e-05, rtol=0.001, seed=0)"),
        (
            "gradgradcheck",
            {"gen_non_contig_grad_outputs": True, "masked": True},
            "gradgradcheck(..., gen_non_contig_grad_outputs=True, eps=1e-06, atol=1e-05, rtol=0.001, masked=True, "
            "seed=0)",
        ),
        (
            "gradgradcheck",
            {"grad_outputs": "ones", "seed": 5},
            'gradgradcheck(..., grad_outputs="ones", eps=1e-06, atol=1e-05, rtol=0.001, seed=5)',
        ),
        (
            "gradgradcheck",
            {"check_fwd_over_rev": True, "check_rev_over_rev": False, "check_undefined_grad": False},
            "gradgradcheck(..., eps=1e-06, atol=1e-05, rtol=0.001, check_fwd_over_rev=True, "
            "check_rev_over_rev=False, check_undefined_grad=False, seed=0)",
        ),
        (
            "gradgradcheck",
            {"grad_outputs": torch.ones(3, dtype=torch.float64), "fast_mode": True, "engine": "sketch"},
            "gradgradcheck(..., grad_outputs=..., eps=1e-06, atol=1e-05, rtol=0.001, fast_mode=True, "
            "engine='sketch', seed=0)",
        ),
    ],
)
def test_the_call_that_reproduces_a_failure(name: str, keywords: dict[str, Any], expected: str) -> None:
    x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    func = DerivativesTimes.apply
    with pytest.raises(fastgrad.GradcheckError) as raised:
        getattr(fastgrad, name)(func, (x,), **keywords)
    lines = [line for line in str(raised.value).splitlines() if line.startswith("  reproduce ")]
    assert lines == [f"  reproduce  fastgrad.{expected}"]
    # What it says is a call.
    arguments = {"func": func, "inputs": (x,), "grad_outputs": keywords.get("grad_outputs")}
    call = expected.replace("grad_outputs=...", "grad_outputs=grad_outputs").replace("(...,", "(func, inputs,")
    with pytest.raises(fastgrad.GradcheckError) as again:
        eval("fastgrad." + call, {"fastgrad": fastgrad, **arguments})
    assert str(again.value).partition("  engine ")[0] == str(raised.value).partition("  engine ")[0]


class DerivativesTimes(torch.autograd.Function):
    """x^3, with first and second derivatives 1.5 times as large as they are, in both modes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return Doubled.apply(4.5 * x * x * grad_output)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 4.5 * x * x * tangent


class Doubled(torch.autograd.Function):
    """The identity, with a derivative of two."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        return 2 * grad_output

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return 2 * tangent


@pytest.mark.parametrize(
    ("kind", "phrase"),
    [
        ("nonzero numerical gradient", "Numerical gradient for function expected to be zero"),
        ("dtype", "Gradient has dtype mismatch"),
        ("size", "Analytical gradient has incorrect size"),
        ("nondeterministic", "Backward is not reentrant, i.e., "),
        ("nonlinear", "backward is not linear in grad_output"),
        ("not multiplied by grad_output", "backward not multiplied by grad_output"),
        ("incorrect gradient", "grad is incorrect type"),
        ("undefined grad raises", "Expected backward function to handle undefined output grads"),
        ("undefined grad not zero", "Expected all input grads to be undefined or zero"),
    ],
)
def test_key_phrases_come_first(kind: FailureKind, phrase: str) -> None:
    failure = Failure(kind, output=0, input=0, output_position=0, input_position=0, detail="grad is incorrect type")
    text = failure_message(report(failure, notes=("a note",)))
    assert text.startswith(phrase)
    assert "\n  note       a note" in text
    assert "  where" not in text


def test_parts_of_complex_outputs() -> None:
    failure = Failure("mismatch", 0, 0, 0, 0, part="imaginary", comparison=comparison(sum_product=0j))
    first = failure_message(report(failure)).splitlines()[0]
    assert first == (
        "While considering the imaginary part of complex outputs only, "
        "Jacobian mismatch for output 0 with respect to input 0,"
    )


def test_small_matrices_are_shown() -> None:
    small = comparison(analytical=torch.tensor([[1.0]]), numerical=torch.tensor([[2.0]]))
    text = failure_message(report(Failure("mismatch", 0, 0, 0, 0, comparison=small)))
    assert "numerical:tensor([[2.]])\nanalytical:tensor([[1.]])" in text


def test_a_passed_report_has_no_message() -> None:
    with pytest.raises(ValueError, match="passed"):
        failure_message(report(None))
    assert engine_line(report(None, seconds=2.5)).endswith("5 VJPs, 2.50 s")


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        ((4.0, 1.0, 2.0 + 0j), 2.0),
        ((1.0, 1.0, -1.0 + 0j), -1.0),
        ((1.0, 1.0, 0.9 + 0j), None),  # not explained
        ((1.0, 1.0, 1j), None),  # a phase is no factor
        ((0.0, 1.0, 0j), None),
        ((math.nan, 1.0, complex(math.nan)), None),
    ],
)
def test_constant_factor(sums: tuple[float, float, complex], expected: float | None) -> None:
    found = constant_factor(comparison(sum_analytical=sums[0], sum_numerical=sums[1], sum_product=sums[2]))
    assert (found[0] if found else None) == expected


def test_no_factor_from_a_single_entry() -> None:
    assert constant_factor(comparison(mismatches=1)) is None


def test_zero() -> None:
    assert is_zero(comparison(sum_analytical=0.0))
    assert not is_zero(comparison())


def test_a_nan_is_reported_as_such() -> None:
    z = torch.zeros(2, dtype=torch.complex128, requires_grad=True)
    with pytest.raises(fastgrad.GradcheckError, match="analytical nan"):
        fastgrad.gradgradcheck(lambda v: torch.linalg.norm(v, 0.5), (z,), torch.ones((), dtype=torch.float64))
