"""Whole messages, so that no wording changes by accident."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

import fastgrad
from fastgrad.diagnosis import experiments
from fastgrad.report import rounding_text
from fastgrad.report.data import Plan
from fastgrad.report.evidence import Cause, CauseName
from fastgrad.report.failure import Comparison, Entry, Failure, FailureKind
from fastgrad.report.low_precision import LowPrecision
from fastgrad.report.messages import engine_line, failure_message, verdict_line
from fastgrad.report.number_text import digits_apart
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings
from tests.planted.causes import CAUSES
from tests.planted.row import function


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages must not depend on the load of the machine."""
    monkeypatch.setattr(experiments, "SECONDS", 60.0)


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
    half = Cause(
        "constant factor",
        "every wrong analytical entry is 0.5 x the numerical one",
        "residual 1e-09",
        0.9,
    )
    assert failure_message(report(failure, causes=(half,))) == (
        "func: gradient of in1 is wrong in 12 of 8,448 entries of the Jacobian; "
        "probable cause: every wrong analytical entry is 0.5 x the numerical one\n"
        "Jacobian mismatch for output 0 with respect to input 1:\n"
        "  worst      d out0[3, 17] / d in1[5, 2]   analytical 0.4821   numerical 0.9642\n"
        "             |difference| 0.482, allowed 0.00097 = atol 1e-05 + rtol 0.001 * |numerical|\n"
        "  extent     12 of 8,448 entries\n"
        "             largest absolute error 0.482, largest relative error 0.5\n"
        "  probably every wrong analytical entry is 0.5 x the numerical one (residual 1e-09)\n"
        "  where      input 1 is argument 2 of func (only tensors that require grad are numbered)\n"
        "  engine     dense: 8 input coordinates, 1 output coordinate, 18 evaluations, 5 VJPs, 4.1 ms\n"
        "  reproduce  fastgrad.gradcheck(..., eps=1e-06, atol=1e-05, rtol=0.001, seed=0)"
    )


def test_entries_that_may_differ_by_rounding_are_not_called_wrong() -> None:
    found = report(Failure("mismatch", 0, 1, 0, 2, comparison=comparison(unclear=11)))
    lines = failure_message(found).splitlines()
    assert lines[0] == "func: gradient of in1 is wrong in at least 1 of 8,448 entries of the Jacobian"
    assert (
        lines[4] == "  extent     12 of 8,448 entries differ at eps (11 perhaps because of rounding or the size of eps)"
    )
    assert verdict_line(found) == "gradcheck failed: at least 1 of 8,448 entries of d out0 / d in1 is wrong"


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
    # The line is a valid call.
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
def test_key_phrases_follow_the_first_line(kind: FailureKind, phrase: str) -> None:
    failure = Failure(kind, output=0, input=0, output_position=0, input_position=0, detail="grad is incorrect type")
    text = failure_message(report(failure, notes=("a note",)))
    first, second = text.splitlines()[:2]
    assert first.startswith("func: ")
    assert "{" not in first
    assert second.startswith(phrase)
    assert "\n  note       a note" in text
    assert "  where" not in text


def test_kinds_of_arguments_that_are_not_all_checked() -> None:
    x, y = torch.ones(2, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64)
    for value in (x, y):
        value.requires_grad_()

    def func(first: torch.Tensor, again: torch.Tensor, number: int, other: torch.Tensor) -> torch.Tensor:
        return first.sum() + again.sum() + number * other.detach().sum() + 0 * other.sum()

    found = fastgrad.check(func, (x, x, 3, y))
    assert str(found).startswith("func: gradient of inputs[3] (float64[3, 4]) is wrong in 12 of 12 entries"), str(found)
    assert "inputs[0] float64[2], inputs[3] float64[3, 4]" in found.to_html()


def test_parts_of_complex_outputs() -> None:
    failure = Failure("mismatch", 0, 0, 0, 0, part="imaginary", comparison=comparison(sum_product=0j))
    first, key_phrase = failure_message(report(failure)).splitlines()[:2]
    assert first == "func: gradient of in0 (imaginary part of outputs) is wrong in 12 of 8,448 entries of the Jacobian"
    assert key_phrase == (
        "While considering the imaginary part of complex outputs only, "
        "Jacobian mismatch for output 0 with respect to input 0:"
    )


def test_small_matrices_are_shown() -> None:
    small = comparison(analytical=torch.tensor([[1.0]]), numerical=torch.tensor([[2.0]]))
    text = failure_message(report(Failure("mismatch", 0, 0, 0, 0, comparison=small)))
    assert "numerical:tensor([[2.]])\nanalytical:tensor([[1.]])" in text


def test_a_passed_report_has_no_message() -> None:
    with pytest.raises(ValueError, match="did not fail"):
        failure_message(report(None))
    assert engine_line(report(None, seconds=2.5)).endswith("5 VJPs, 2.50 s")


ZERO = "every wrong analytical entry is zero: a term is missing, or backward returns None or excludes these elements"

CAUSE_LINES: dict[CauseName, tuple[str, ...]] = {
    "constant factor": ("probably every wrong analytical entry is 0.5 x the numerical one: the factor 2 is missing",),
    "sign": ("probably every wrong analytical entry is -1 x the numerical one: a sign is wrong",),
    "zero gradient": ("probably " + ZERO,),
    "transposed": (
        "probably the analytical Jacobian is the transpose of the numerical one: backward applies the matrix, "
        "kernel or scan of forward instead of its transpose (for a convolution, the flipped kernel)",
    ),
    "rolled": ("probably grad_output is shifted by 2 along dimension 1",),
    "permuted": (
        "probably grad_output has the right values at wrong positions: backward applies a permutation instead of its "
        "inverse, or the inverse instead of the permutation",
    ),
    "missing reduction": (
        "probably each element of in2 affects 15 outputs, and the gradient of in2 is 0.3333 x the right one: backward "
        "takes a mean instead of a sum",
        "or every wrong analytical entry is 0.3333 x the numerical one: the factor 3 is "
        "missing, perhaps a mean instead of a sum over the 3 elements along dimension 0 of out0",
    ),
    "missing conjugate": ("probably backward uses the complex conjugate of the right derivative: a conj() is missing",),
    "complex factor": (
        "probably every wrong analytical entry is 0.6+0.8j x the numerical one: the factor 0.6-0.8j is missing",
    ),
    "region": (
        "probably derivatives are wrong only where in0 < 0",
        "and there " + ZERO,
    ),
    "slice": (
        "probably derivatives are wrong only in in0[:, 1, :]",
        "and there every wrong analytical entry is 2 x the numerical one: the factor 0.5 is missing, "
        "or the factor 2 is superfluous",
    ),
    "boundary": (
        "probably derivatives are wrong only at the first position and the last position along dimension 1 of in0; "
        "check the padding or halo",
        "and there every wrong analytical entry is 0.5 x the numerical one: the factor 2 is missing",
    ),
    "last tile": (
        "probably derivatives are wrong only in the last tile: from index 24, a multiple of 8, to the end of "
        "dimension 0 of in0 (size 29)",
        "or derivatives are wrong only at the last 5 positions along dimension 0 of in0",
        "and there " + ZERO,
    ),
    "triangle": (
        "probably derivatives are wrong only above the diagonal of the last two dimensions of in0; look for a mask, "
        "tril() or triu()",
        "and there every wrong analytical entry is 0.5 x the numerical one: the factor 2 is missing",
    ),
    "swapped gradients": (
        "probably the gradient of in0 is that of in1: backward returns gradients in the wrong order",
    ),
    "repeated gradient": (
        "probably backward returns the gradient of in0 twice: for in0, where it is right, and for in1",
    ),
    "missing term": (
        "probably every wrong analytical entry is too small by 1: backward omits or adds a term that is linear in "
        "the input, for example a residual connection",
    ),
    "missing factor": ("probably the gradient of in0 must also be multiplied by in1",),
    "overwritten": (
        "probably the gradient of each element of in0 comes from only one of the outputs that the element affects: for "
        "repeated indices or overlapping windows, gradients are assigned instead of accumulated",
        "or every wrong analytical entry is zero: a term is missing",
    ),
    "wrong dimension": (
        "probably backward sums, or scans, along dimension 0; in func, elements depend on each other along dimension 1",
    ),
    "saved tensor": (
        "probably backward reads a tensor that other calls of func overwrite, for example in a global variable, on "
        "the class or in a shared buffer: use ctx.save_for_backward, which keeps one tensor per graph",
    ),
    "nondeterminism": (
        "probably repeated calls of backward give different values: look for random numbers, state, "
        "missing synchronization, or uninitialized memory",
    ),
    "nonlinear backward": (
        "probably backward clamps or rounds grad_output, multiplies its elements with each other, or is nonlinear in "
        "another way",
    ),
    "layout of grad_output": (
        "probably backward is wrong for a grad_output that is non-contiguous, but not for a contiguous copy: look "
        "for a data_ptr(), view() or kernel that assumes contiguous memory",
    ),
    "sparse grad_output": (
        "probably backward depends on which elements of grad_output are zero: it is right for a grad_output without "
        "zeros, but not for all others",
    ),
    "modified grad_output": (
        "probably backward writes into grad_output, which other nodes also read: write into a new tensor instead",
    ),
    "dependent inputs": (
        "probably in1 was computed from in0; autograd includes this dependence, and differences do not: "
        "pass independent tensors, for example tensor.detach().requires_grad_()",
    ),
    "truncation": (
        "probably eps = 0.0001 is too large: func is curved, or has a kink or a jump, within eps of the inputs; use a "
        "smaller eps",
    ),
    "rounding": (
        "probably rounding hides the change of func over a step of eps = 1e-06: errors of one ulp in func's values "
        "change the derivative by up to 2.2e+02; use a larger eps, or subtract a constant offset from func's values",
    ),
    "discontinuity": (
        "probably func is discontinuous at the inputs: its value changes by 1e-06 from one side to the other, however "
        "small the step is",
    ),
    "kink": ("probably func has a kink at the inputs: the one-sided derivatives are 0 (left) and 2 (right)",),
    "low precision": ("probably func computes in float32 and returns double precision",),
    "modes disagree": ("probably reverse mode gives the right value of the worst entry, so only the jvp is wrong",),
    "both modes wrong": (
        "probably forward and reverse mode agree with each other but not with func: a formula that both use is "
        "wrong, or func does not compute what the formula assumes",
    ),
    "not finite": ("probably func is not finite: output 0 at [1] is -inf, and input 0 at [1] is 0",),
    "constant part": (
        "probably backward treats the result of mean (LINE) as a constant: its contribution to the gradient is missing",
    ),
}


def test_every_cause_has_its_words() -> None:
    assert set(CAUSE_LINES) == set(get_args(CauseName))


@pytest.mark.parametrize("cause", CAUSE_LINES)
def test_probable_causes_in_words(cause: CauseName) -> None:
    row = next(row for row in CAUSES if row.cause == cause)
    with pytest.raises(fastgrad.GradcheckError) as raised:
        fastgrad.gradcheck(row.wrong, row.inputs(), **row.keywords)
    text = str(raised.value)
    heads = ("  probably ", "  or ", "  and there ")
    lines = [line for line in text.splitlines() if line.startswith(heads)]
    # The last digits of the evidence in parentheses differ between machines.
    said = [re.sub(r"\(\S+\.py:\d+\)", "(LINE)", line[2:].rpartition(" (")[0]) for line in lines]
    assert said == list(CAUSE_LINES[cause])
    assert "  because" not in text
    measures = [cause.measure for cause in raised.value.report.causes[: len(lines)]]
    assert [line.endswith(f" ({measure})") for line, measure in zip(lines, measures, strict=True)] == [True] * len(
        lines
    )


def _product(wrong: str) -> Callable[..., Any]:
    """The product of x and y. A derivative of the gradient of x is wrong: that with respect to y, or to grad_output."""
    half = function(lambda t: 1 * t, lambda g, _: g / 2)
    return function(
        lambda x, y: x * y,
        lambda g, x, y: (half(g) * y if wrong == "grad_output" else g * half(y), g * x),
    )


@pytest.mark.parametrize(
    ("wrong", "worst"), [("in1", "d grad(in0)[0] / d in1[0]"), ("grad_output", "d grad(in0)[0] / d grad_output[0]")]
)
def test_second_order_names_gradients_and_grad_outputs(wrong: str, worst: str) -> None:
    x, y = (torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (2.0, 3.0))
    with pytest.raises(fastgrad.GradcheckError) as raised:
        fastgrad.gradgradcheck(_product(wrong), (x, y))
    text = str(raised.value)
    assert f"gradient of {wrong} (float64[1]) through grad(in0) is wrong in 1 of 1 entry" in text
    assert f"  worst      {worst}   " in text
    assert "  where  " not in text  # the first line has both names


@pytest.mark.parametrize("fast_mode", [False, True])
def test_second_order_names_gradients_of_a_tensor_that_is_passed_twice(fast_mode: bool) -> None:
    w, y = (torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (2.0, 3.0))

    def func(*factors: torch.Tensor) -> torch.Tensor:
        return factors[0] * factors[1].detach() * factors[2].sin()

    for inputs in ((w, w, y), (y, w, w)):
        report = fastgrad.check(func, inputs, order=2, fast_mode=fast_mode)
        assert report.verdict == "failed"
        with pytest.raises(fastgrad.GradcheckError) as raised:
            fastgrad.gradgradcheck(func, inputs, fast_mode=fast_mode)
        assert raised.value.report.subject.results == ("grad(in0)", "grad(in1)", "grad(in2)")


@pytest.mark.parametrize(
    ("backward", "where"),
    [
        (lambda g, x: g * x.sin(), []),  # the first line names the input, and the only output needs no name
        (lambda g, x: (g * x.cos()).abs(), ["  where      input 0 is inputs[0]"]),  # the first line states the cause
    ],
)
def test_names_of_the_first_line_are_not_repeated(backward: Callable[..., Any], where: list[str]) -> None:
    x = torch.full((3,), 0.5, dtype=torch.float64, requires_grad=True)
    text = failure_message(fastgrad.check(function(torch.sin, backward), x))
    assert [line for line in text.splitlines() if line.startswith("  where  ")] == where


def test_one_of_several_grad_outputs_is_named_by_its_number() -> None:
    half = function(lambda t: 1 * t, lambda g, _: g / 2)
    func = function(lambda x: (x.sin(), 2 * x), lambda g, h, x: g * x.cos() + 2 * half(h))
    with pytest.raises(fastgrad.GradcheckError, match=r"gradient of grad_outputs\[1\] \(float64"):
        fastgrad.gradgradcheck(func, torch.ones(2, dtype=torch.float64, requires_grad=True))


def test_a_value_is_not_more_accurate_than_its_rounding() -> None:
    with pytest.raises(fastgrad.GradcheckError, match=r"numerical 0\.5 \+- 6e-17"):
        fastgrad.gradcheck(torch.relu, torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize(
    ("first", "second", "least", "expected"),
    [
        (1.25, 1.5, 6, 6),
        (1.2345678, 1.2345679, 6, 8),
        (1.0, 1.0 + 2.0**-52, 6, 17),
        (1.00000001 + 2j, 1 + 2j, 6, 9),
        (1.001e-5, 1e-5, 2, 4),
        (0.25, 0.25, 6, 6),
        (math.nan, math.nan, 6, 6),
    ],
)
def test_numbers_that_differ_have_different_texts(first: complex, second: complex, least: int, expected: int) -> None:
    assert digits_apart(first, second, least) == expected


def test_the_numbers_of_small_errors_differ_in_messages() -> None:
    worst = Entry((3, 17), (5, 2), 1.00000002, 1.0, 1.999e-8)
    lines = failure_message(report(Failure("mismatch", 0, 1, 0, 2, comparison=comparison(worst=worst)))).splitlines()
    assert lines[2].endswith("analytical 1.00000002   numerical 1")
    assert lines[3].strip().startswith("|difference| 2e-08, allowed 1.999e-08 = ")


def test_the_numbers_of_small_nonlinearities_differ_in_messages() -> None:
    keywords: dict[str, Any] = {"atol": 1e-9, "rtol": 1e-9}
    x = torch.full((3,), 0.5, dtype=torch.float64, requires_grad=True)
    func = function(torch.sin, lambda g, x: g * x.cos() * torch.where(g > 0, 1.0, 1 + 1e-7))
    found = fastgrad.check(func, x, **keywords).failure
    assert found is not None
    assert found.kind == "nonlinear"
    wrong, right = found.detail.split(" gives ")[2].split(" instead of ")
    assert wrong != right


def test_three_causes_at_most_and_none_without_evidence() -> None:
    failure = Failure("mismatch", 0, 0, 0, 0, comparison=comparison())
    many = tuple(Cause("nondeterminism", f"cause {k}", "measured", 0.9 - k / 10) for k in range(5))
    lines = failure_message(report(failure, causes=many)).splitlines()
    assert lines[0].endswith("; probable cause: cause 0")
    assert [line for line in lines[1:] if "cause" in line] == [
        "  probably cause 0 (measured)",
        "  or cause 1 (measured)",
        "  or cause 2 (measured)",
    ]
    assert "probably" not in failure_message(report(failure))


def test_no_tolerance_is_stated_for_a_value_that_is_not_finite() -> None:
    worst = Entry((3, 17), (5, 2), 1.0, math.nan, math.nan)
    lines = failure_message(report(Failure("mismatch", 0, 1, 0, 2, comparison=comparison(worst=worst)))).splitlines()
    assert lines[3].strip() == (
        "|difference| nan, and no difference is allowed, because the numerical value is not finite"
    )


def test_a_nan_is_reported_as_such() -> None:
    z = torch.zeros(2, dtype=torch.complex128, requires_grad=True)
    with pytest.raises(fastgrad.GradcheckError, match="analytical nan"):
        fastgrad.gradgradcheck(lambda v: torch.linalg.norm(v, 0.5), (z,), torch.ones((), dtype=torch.float64))


class Derived(torch.autograd.Function):
    """The identity, with the backward and the jvp of a test."""

    backward_of: Callable[[torch.Tensor | None], Any] = staticmethod(lambda g: g)
    jvp_of: Callable[[torch.Tensor | None], Any] = staticmethod(lambda t: t)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return x.to_dense() if x.layout is not torch.strided else x.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor | None) -> Any:
        return Derived.backward_of(grad_output)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor | None) -> Any:
        return Derived.jvp_of(tangent)


def no_undefined(grad_output: torch.Tensor | None) -> torch.Tensor:
    if grad_output is None:
        raise RuntimeError("no grad_output")
    return grad_output * 1


def item(g: torch.Tensor | None) -> torch.Tensor | None:
    return None if g is None else g * (g * 0 + 1).sum().div(g.numel()).item()


RUNS = iter(range(1 << 30))
FORWARD = {"check_forward_ad": True, "check_backward_ad": False}

PHRASES: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None, dict[str, Any]]] = {
    "Jacobian mismatch for output 0 with respect to input 0": (lambda g: g if g is None else 2 * g, None, {}),
    "Jacobian computed with forward mode mismatch for output 0 with respect to input 0": (
        lambda g: g,
        lambda t: t if t is None else 2 * t,
        FORWARD,
    ),
    "Backward is not reentrant, i.e., ": (lambda g: g if g is None else g * (1 + 1e-3 * next(RUNS)), None, {}),
    "The tolerance for nondeterminism was 0.0": (lambda g: g if g is None else g * (1 + next(RUNS)), None, {}),
    "backward not multiplied by grad_output": (lambda g: g if g is None else g + (g == 0).all(), None, {}),
    "Expected backward function to handle undefined output grads": (no_undefined, None, {}),
    "Expected all input grads to be undefined or zero": (
        lambda g: torch.ones(3, dtype=torch.float64) if g is None else g * 1,
        None,
        {},
    ),
    "gradcheck or gradgradcheck failed while testing batched gradient computation": (
        item,
        None,
        {"check_batched_grad": True},
    ),
    "While computing batched gradients, got:": (item, None, {"check_batched_grad": True}),
    "gradcheck failed while testing batched gradient computation with forward-mode AD": (
        lambda g: g,
        item,
        {**FORWARD, "check_batched_forward_grad": True, "check_undefined_grad": False},
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("phrase", PHRASES)
def test_key_phrases_are_in_both_messages(phrase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backward, jvp, keywords = PHRASES[phrase]
    monkeypatch.setattr(Derived, "backward_of", staticmethod(backward))
    monkeypatch.setattr(Derived, "jvp_of", staticmethod(jvp or Derived.jvp_of))
    x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    for check in (torch.autograd.gradcheck, fastgrad.gradcheck):
        with pytest.raises(RuntimeError, match=re.escape(phrase)):
            check(Derived.apply, (x,), **keywords)


def test_key_phrases_of_errors_and_warnings_are_in_both_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    y = torch.ones(2, dtype=torch.float64)
    backward = {"check_backward_ad": False}
    for phrase, error, func, inputs, keywords in (
        ("gradcheck expects at least one input tensor to require gradient", ValueError, torch.sin, y, {}),
        ("The 0th input has a dimension with stride 0.", RuntimeError, torch.sin, x[0].expand(3), {}),
        ("Sparse output is not supported at gradcheck yet.", ValueError, lambda v: v.to_sparse(), x, {}),
        ("Numerical gradient for function expected to be zero", RuntimeError, lambda v: v.detach() * 2, x, {}),
        (
            "Expected at least one of check_forward_ad or check_backward_ad to be True",
            AssertionError,
            abs,
            x,
            backward,
        ),
        (
            "Setting check_batched_grad=True requires check_backward_ad to be True",
            AssertionError,
            torch.sin,
            x,
            {**FORWARD, "check_batched_grad": True},
        ),
        (
            "Setting check_batched_forward_grad=True requires check_forward_ad to be True",
            AssertionError,
            torch.sin,
            x,
            {"check_batched_forward_grad": True},
        ),
    ):
        for check in (torch.autograd.gradcheck, fastgrad.gradcheck):
            with pytest.raises(error, match=re.escape(phrase)):
                check(func, inputs, **keywords)
    monkeypatch.setattr(Derived, "backward_of", staticmethod(no_undefined))
    for check in (torch.autograd.gradcheck, fastgrad.gradcheck):
        with pytest.warns(UserWarning, match="Input #0 requires gradient and is not a double precision floating point"):
            check(torch.sin, x.detach().float().requires_grad_(), eps=1e-5, raise_exception=False)
        with pytest.warns(
            UserWarning, match="Backwards compatibility: New undefined gradient support checking feature"
        ):
            assert not check(Derived.apply, x, raise_exception=False)


def test_undefined_tangents_have_torchs_phrase() -> None:
    failure = Failure("undefined tangent", 1, 0, 1, 0, mode="forward", detail="at [0], it is 1 for")
    first, second = failure_message(report(failure)).splitlines()[:2]
    assert first == "func: the jvp does not treat an undefined tangent of in0 as zero"
    assert second.startswith("Mismatch in tangent values for output with index: 1 when ")


def test_a_single_entry_row_or_variant_is_named_in_the_singular() -> None:
    x = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    (note,) = fastgrad.check(lambda x: x**3, x, eps=0.1, rtol=0.0, atol=5e-3, engine="dense").notes
    assert note.startswith("1 of 1 entry of output 0 with respect to input 0 differs at eps=0.1 and agrees when")
    variants = fastgrad.check_variants(torch.sin, x, only=["points: as given"])
    assert variants.headline() == "check_variants passed: 0 of 1 variant failed"
    assert repr(variants) == "<VariantsReport: passed, 1 variant>"
    low = fastgrad.check(torch.sin, x.detach().bfloat16().requires_grad_())
    assert "6 entries of 6 VJPs (5 random grad_outputs and the only row)" in str(low)


@pytest.mark.parametrize(
    ("smallest", "most", "text"),
    [
        (
            0.011,
            1.5,
            "an error of about 1.1 %, relative to the reference, would have been found in half of the compared entries"
            ", and an error of about 150 % in 90 % of them",
        ),
        (
            0.5,
            math.inf,
            "an error of about 50 %, relative to the reference, would have been found in half of the compared entries; "
            "rounding may hide errors of any size in 10 % of them",
        ),
        (math.inf, math.inf, "rounding may hide errors of any size in half of the compared entries"),
    ],
)
def test_errors_that_would_have_been_found_in_a_lower_dtype(smallest: float, most: float, text: str) -> None:
    precision = LowPrecision(reference="func in float64", smallest=smallest, smallest_most=most)
    assert rounding_text.passed(precision) == text
    if smallest < math.inf:
        by_differences = rounding_text.passed(LowPrecision(products=4, smallest=smallest, smallest_most=most))
        assert by_differences.startswith(f"an error of {100 * smallest:g} % would have been found in half of 4 dire")
        assert by_differences.endswith("; an error of a single entry may be hidden")
