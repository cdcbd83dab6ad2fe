"""Names only the results that autograd or a backward treats as constants, with operator and line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import fastgrad
from fastgrad.diagnosis import constant_parts, experiments
from fastgrad.diagnosis.constant_parts import ConstantParts, HeldConstant


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "SECONDS", 60.0)


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


class RootMeanSquare(Function):
    """A right gradient with a wrong second derivative, because forward saves a value that depends on x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)  # saved
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        x, scale = ctx.saved_tensors
        return scale * grad_output - x * scale**3 * (grad_output * x).mean(-1, keepdim=True)


class Recomputed(RootMeanSquare):
    """A right gradient and a right second derivative."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        x, _ = ctx.saved_tensors
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return scale * grad_output - x * scale**3 * (grad_output * x).mean(-1, keepdim=True)


class Constant(RootMeanSquare):
    """Treats the root mean square as a constant."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        _, scale = ctx.saved_tensors
        return scale * grad_output


class Swish(Function):
    """Omits the first term of the product rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()  # product

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad_output * x * x.sigmoid() * (1 - x.sigmoid())


def gated(x: Tensor) -> Tensor:
    return x * x.detach().sigmoid()  # cut


def scaled(x: Tensor) -> Tensor:
    with torch.no_grad():
        deviation = x.std(-1, keepdim=True)  # without gradients
    return x / deviation


def total(x: Tensor) -> Tensor:
    return x * x.sum().item()  # a number


def centered(x: Tensor) -> Tensor:
    return (x - x.data.mean()).tanh()  # data


ROWS: list[tuple[Callable[..., Any], int, str, str, Any]] = [
    (RootMeanSquare.apply, 2, "the result of mean", "saved", RootMeanSquare),
    (Constant.apply, 1, "the result of mean", "saved", RootMeanSquare),
    (Swish.apply, 1, "the first operand of mul", "product", Swish),
    (gated, 1, "the result of detach", "cut", gated),
    (scaled, 1, "the result of std", "without gradients", scaled),
    (total, 1, "the result of item", "a number", total),
    (centered, 1, "the result of data", "data", centered),
]


FILE = rf"\S*{__name__.rpartition('.')[2]}\.py"


def line_with(comment: str, source: Any) -> int:
    lines, first = inspect.getsourcelines(source)
    return next(first + k for k, line in enumerate(lines) if line.rstrip().endswith(f"# {comment}"))


@pytest.mark.parametrize("keywords", [{}, {"engine": "dense"}, {"fast_mode": True}], ids=str)
@pytest.mark.parametrize(("func", "order", "part", "comment", "source"), ROWS)
def test_the_operator_and_its_line_are_named(
    func: Callable[..., Any], order: Any, part: str, comment: str, source: Any, keywords: dict[str, Any]
) -> None:
    report = fastgrad.check(func, leaf(4, 6), order=order, **keywords)
    assert report.causes[0].name == "constant part", report.causes
    assert re.search(rf"{part} \({FILE}:{line_with(comment, source)}\)", report.causes[0].text)


def test_twins_pass() -> None:
    x = leaf(4, 6)
    assert fastgrad.gradcheck(RootMeanSquare.apply, x)
    assert fastgrad.gradcheck(Recomputed.apply, x)
    assert fastgrad.gradgradcheck(Recomputed.apply, x)


def test_of_both_statistics_both_are_named() -> None:
    def normalized(x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = x.mean(-1, keepdim=True)
            deviation = x.std(-1, keepdim=True)
        return (x - mean) / deviation

    cause = fastgrad.check(normalized, leaf(3, 7)).causes[0]
    assert cause.name == "constant part"
    assert "the result of std" in cause.text
    assert "the result of mean" in cause.text


def test_two_calls_in_one_line_are_named_once() -> None:
    def normalized(x: Tensor) -> Tensor:
        return (x - x.mean().detach()) / x.std().detach()

    cause = fastgrad.check(normalized, leaf(3, 7)).causes[0]
    assert cause.name == "constant part"
    assert cause.text.count("the result of detach") == 1


def test_other_mistakes_are_no_constants() -> None:
    class Tanh(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.tanh()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
            (y,) = ctx.saved_tensors
            return grad_output * (1 - y.abs())

    report = fastgrad.check(Tanh.apply, leaf(5))
    assert not report.passed
    assert "constant part" not in {cause.name for cause in report.causes}


def test_held_parts_have_the_values_that_they_had() -> None:
    x, y = leaf(3), leaf(3, seed=1)
    parts = ConstantParts()
    with parts:
        before = gated(x)
    assert [part.call.name for part in parts.cuts] == ["detach"]
    with HeldConstant(parts, parts.cuts):
        held = gated(y)
    assert torch.equal(before, x * x.sigmoid())
    assert torch.equal(held, y * x.sigmoid())


def test_a_compiled_function_is_not_looked_into() -> None:
    compiled = torch.compile(gated, backend="eager")
    report = fastgrad.check(compiled, leaf(4))
    assert not report.passed


def test_a_large_func_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constant_parts, "MAX_ELEMENTS", 30)
    parts = ConstantParts()
    with parts:
        gated(leaf(5))
    assert parts.known
    parts = ConstantParts()
    with parts:
        for _ in range(20):
            gated(leaf(5))
    assert not parts.known
    assert not list(parts.groups())
