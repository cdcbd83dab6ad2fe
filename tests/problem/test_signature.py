"""Names of functions and their parameters: custom Functions, modules, partials, lambdas and builtins."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgrad
from fastgrad.problem.signature import function_name, kind_of, parameter_names
from tests.api.test_inputs import Cube, leaf


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        return input * weight

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        input, weight = ctx.saved_tensors
        return grad_output * weight, 0.5 * grad_output * input


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(input: Tensor, *others: Tensor) -> Tensor:
        return input.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return None


def product(left: Tensor, right: Tensor, *, scale: float = 1.0) -> Tensor:
    return left * right * scale


@functools.wraps(product)
def wrapped(*arguments: Any, **keywords: Any) -> Tensor:
    return product(*arguments, **keywords)


@pytest.mark.parametrize(
    ("func", "name", "parameters"),
    [
        (Scaled.apply, "Scaled", ("input", "weight")),
        (WithSetup.apply, "WithSetup", ("input",)),
        (product, "product", ("left", "right")),
        (wrapped, "product", ("left", "right")),
        (functools.partial(product, scale=2.0), "product", ("left", "right")),
        (nn.Linear(2, 2), "Linear", ("input",)),
        (lambda x, *rest: x, "", ("x",)),
        (torch.sin, "sin", ()),
    ],
)
def test_names(func: Callable[..., Any], name: str, parameters: tuple[str, ...]) -> None:
    assert function_name(func) == name
    assert parameter_names(func) == parameters


def test_names_never_raise() -> None:
    class Odd:
        __signature__ = "none"

        def __call__(self, x: Tensor) -> Tensor:
            return x

    circular = Odd()
    circular.__wrapped__ = circular  # type: ignore[attr-defined]
    for func in (Odd(), circular):
        assert function_name(func) == "Odd"
        assert parameter_names(func) == ()


def test_kinds() -> None:
    assert kind_of(torch.ones(3, 4)) == "float32[3, 4]"
    assert kind_of(torch.ones((), dtype=torch.complex128)) == "complex128[]"


def first_line(checker: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(fastgrad.GradcheckError) as raised:
        checker(*arguments, **keywords)
    return str(raised.value).splitlines()[0]


@pytest.mark.parametrize(
    ("engine", "extent"), [("dense", "12 of 144 entries"), ("compressed", "12 of 12 nonzero entries")]
)
def test_the_first_line_names_function_argument_extent_and_cause(engine: str, extent: str) -> None:
    line = first_line(fastgrad.gradcheck, Scaled.apply, (leaf(3, 4), leaf(3, 4)), engine=engine)
    assert line == (
        f"Scaled: gradient of weight (float64[3, 4]) is wrong in {extent} of the Jacobian; "
        "probable cause: every wrong analytical entry is 0.5 x the numerical one: the factor 2 is "
        "missing"
    )


def test_the_first_line_of_other_arguments() -> None:
    two = first_line(fastgrad.gradcheck, lambda x: (x.sin(), Scaled.apply(x, x)), (leaf(2),))
    assert two.startswith("func: gradient of x (float64[2]) through out1 is wrong in 2 of 4 entries")
    second = first_line(fastgrad.gradgradcheck, Cube.apply, (leaf(2),))
    assert second.startswith("backward of Cube: gradient of x (float64[2]) is wrong in 2 of 4 entries")
