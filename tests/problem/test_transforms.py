"""Checks within transforms of torch.func, and of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad

CHECKS: dict[str, Callable[..., Any]] = {
    "gradcheck": fastgrad.gradcheck,
    "gradgradcheck": fastgrad.gradgradcheck,
    "check": fastgrad.check,
    "check, second order": partial(fastgrad.check, order=2),
    "numerical_jacobian": fastgrad.numerical_jacobian,
    "analytical_jacobian": fastgrad.analytical_jacobian,
    "taylor_test": fastgrad.taylor_test,
    "adjoint_test": fastgrad.adjoint_test,
}

OTHERS: dict[str, Callable[..., Any]] = {
    "check_variants": fastgrad.check_variants,
    "check_model": lambda func, inputs: fastgrad.check_model(torch.nn.Linear(3, 1).double(), inputs),
}
"""Checks that run within no transform."""

TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "grad": lambda func: torch.func.grad(func)(ones()),
    "jvp": lambda func: torch.func.jvp(func, (ones(),), (ones(),)),
    "vmap": lambda func: torch.func.vmap(func)(torch.ones(2, 3, dtype=torch.float64)),
}

UNSUPPORTED = r"^fastgrad does not support tensors of a torch\.func transform \(vmap, grad, jvp, \.\.\.\), but "

every_check = pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check in CHECKS.items()])
every_transform = pytest.mark.parametrize("within", [pytest.param(one, id=name) for name, one in TRANSFORMS.items()])


def ones() -> Tensor:
    return torch.ones(3, dtype=torch.float64)


def leaf() -> Tensor:
    return torch.tensor([0.3, 0.5, 0.8], dtype=torch.float64, requires_grad=True)


@every_check
@every_transform
def test_a_tensor_of_a_transform_is_named(check: Callable[..., Any], within: Callable[..., Any]) -> None:
    def checked(x: Tensor) -> Tensor:
        with pytest.raises(NotImplementedError, match=UNSUPPORTED + r"inputs\[1\] is one: pass a tensor that was made"):
            check(torch.mul, (other, x))
        return x.sum()

    other = leaf()
    within(checked)


@pytest.mark.parametrize("check", [pytest.param(one, id=name) for name, one in {**CHECKS, **OTHERS}.items()])
@every_transform
def test_a_tensor_that_a_transform_left_behind_is_named(check: Callable[..., Any], within: Callable[..., Any]) -> None:
    kept: list[Tensor] = []

    def keeping(x: Tensor) -> Tensor:
        kept.append(x)
        return x.sum()

    within(keeping)
    with pytest.raises(NotImplementedError, match=UNSUPPORTED + r"inputs\[0\] is one"):
        check(torch.sin, (kept[0],))


def test_grad_outputs_and_parameters_of_a_transform_are_named() -> None:
    module, y = torch.nn.Linear(3, 1).double(), leaf()

    def checked(x: Tensor) -> Tensor:
        with pytest.raises(NotImplementedError, match=UNSUPPORTED + r"grad_outputs is one"):
            fastgrad.gradgradcheck(torch.sin, y, x)
        module._parameters["bias"] = x[:1]  # type: ignore[assignment]
        with pytest.raises(NotImplementedError, match=UNSUPPORTED + r'func\["bias"\] is one'):
            fastgrad.check(module, y)
        return x.sum()

    torch.func.grad(checked)(ones())


@every_check
@pytest.mark.parametrize("name", ["grad", "jvp"])
def test_no_check_runs_within_a_transform_that_differentiates(check: Callable[..., Any], name: str) -> None:
    x, calls = leaf(), 0

    def func(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x.sin()

    def checked(y: Tensor) -> Tensor:
        with pytest.raises(NotImplementedError, match=r"^\w+ cannot run within a transform of torch\.func that diff"):
            check(func, x)
        return y.sum()

    TRANSFORMS[name](checked)
    assert not calls


@every_check
def test_checks_of_other_tensors_run_within_vmap(check: Callable[..., Any]) -> None:
    def checked(y: Tensor) -> Tensor:
        if "gradgradcheck" in str(check) or "order" in str(check):
            with pytest.raises(NotImplementedError, match=r"^Random grad_outputs cannot be made within a transform of"):
                check(torch.sin, x)
            assert check(torch.sin, x, grad_outputs=grad_output)
        else:
            assert check(torch.sin, x)
        return y

    x, grad_output = leaf(), leaf()
    TRANSFORMS["vmap"](checked)


def test_results_of_a_transform_are_named() -> None:
    def checked(y: Tensor) -> Tensor:
        with pytest.raises(NotImplementedError, match=r"tensors of a torch\.func transform, but result 0 of func is"):
            fastgrad.gradcheck(lambda x: x * y, x)
        with pytest.raises(ValueError, match=r"has none: its outputs may be tensors of the transform of torch\.func"):
            fastgrad.gradgradcheck(lambda x: x * y, x, grad_output)
        return y

    x, grad_output = leaf(), leaf()
    TRANSFORMS["vmap"](checked)


@every_transform
def test_a_model_is_checked_within_no_transform(within: Callable[..., Any]) -> None:
    def checked(x: Tensor) -> Tensor:
        with pytest.raises(ValueError, match=r"^check_model cannot run within a transform of torch\.func"):
            fastgrad.check_model(model, inputs)
        return x.sum()

    model, inputs = torch.nn.Linear(3, 1).double(), leaf()
    within(checked)
