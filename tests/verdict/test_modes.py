"""Derivatives of forward and reverse mode that differ, although each agrees with some differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.report.settings import Settings
from fastgrad.verdict.modes import modes_agree

SLOPE, HALF_WIDTH = 1.5e-4, 2.8e-8
"""A ramp of this slope within HALF_WIDTH of zero. Differences at eps give the slope 4e-6, which is less than atol."""


def ramp(n: int, of_backward: float, of_jvp: float) -> Callable[[Tensor], Tensor]:
    """A function with a ramp from input n // 3 to output n // 2, and the slopes of its derivatives."""

    def placed(value: Tensor, source: int, target: int, slope: float) -> Tensor:
        return slope * torch.nn.functional.one_hot(torch.tensor(target), n) * value[source]

    class Ramp(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return placed(x.clamp(-HALF_WIDTH, HALF_WIDTH), n // 3, n // 2, SLOPE)

        @staticmethod
        def setup_context(ctx: object, inputs: object, output: object) -> None: ...

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return placed(grad, n // 2, n // 3, of_backward)

        @staticmethod
        def jvp(ctx: object, tangent: Tensor) -> Tensor:
            return placed(tangent, n // 3, n // 2, of_jvp)

    return lambda x: x.sin() + Ramp.apply(x)


def zeros(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("n", [5, 70])
class TestModes:
    @pytest.mark.parametrize(("of_backward", "of_jvp", "mode"), [(SLOPE, 0.0, "forward"), (0.0, SLOPE, "reverse")])
    def test_the_wrong_one_fails(self, of_backward: float, of_jvp: float, mode: str, n: int, fast_mode: bool) -> None:
        func = ramp(n, of_backward, of_jvp)
        report = fastgrad.check(func, zeros(n), check_forward_ad=True, fast_mode=fast_mode)
        assert report.failure is not None
        assert (report.failure.kind, report.failure.mode) == ("mismatch", mode)
        worst = report.failure.comparison.worst if report.failure.comparison else None
        assert worst is not None
        assert (worst.output_index, worst.input_index) == ((n // 2,), (n // 3,))

    def test_right_ones_pass(self, n: int, fast_mode: bool) -> None:
        assert fastgrad.gradcheck(ramp(n, SLOPE, SLOPE), zeros(n), check_forward_ad=True, fast_mode=fast_mode)


@pytest.mark.parametrize("fast_mode", [False, True])
def test_complex_modes_agree(fast_mode: bool) -> None:
    x = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    # The list is left to the complete check.
    assert fastgrad.gradcheck(lambda x, _: x * x.conj().sin(), (x, [1]), check_forward_ad=True, fast_mode=fast_mode)


def test_infinite_products_agree_if_they_are_equal() -> None:
    one, infinite = torch.ones(1, dtype=torch.float64), torch.full((1,), torch.inf, dtype=torch.float64)
    for product, agree in ((infinite, True), (-infinite, False), (one, False)):
        assert modes_agree(Settings(), 2.0**-53, (one, infinite), (one, product)) == agree
