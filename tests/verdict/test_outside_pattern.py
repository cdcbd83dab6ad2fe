"""Entries outside a sparsity pattern that show only at steps of eps, at inputs so large that other steps exceed eps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.verdict.incomplete import incomplete
from fastgrad.verdict.outside_pattern import EpsCertificate
from tests.costs import set_costs

LARGE = 1000.0
"""At this input, steps along random directions are 2^-24 times as large: 60 times eps."""

Func = Callable[[Tensor], Tensor]


def inputs(n: int) -> Tensor:
    return torch.full((n,), LARGE, dtype=torch.float64, requires_grad=True)


def narrow_ramp(x: Tensor) -> Tensor:
    """A term of slope 0.03 at x, without a gradient, that is constant from 0.04 eps on."""
    return 0.03 * (x.detach() - LARGE).clamp(-4e-8, 4e-8)


def first_input_in_last_output(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(narrow_ramp(x[:1]), (x.numel() - 1, 0))


class Ramp(torch.autograd.Function):
    """The ramp with derivatives of zero in both modes."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return narrow_ramp(x) + 0.0 * x

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None: ...

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 0.0 * grad

    @staticmethod
    def jvp(ctx: object, tangent: Tensor) -> Tensor:
        return 0.0 * tangent


class TestWrongGradients:
    @pytest.mark.parametrize(
        "func",
        [
            lambda x: narrow_ramp(x) + 0.0 * x,
            lambda x: narrow_ramp(x) + 1e-3 * x,
            lambda x: 2.0 * x + first_input_in_last_output(x),
            lambda x: 1e-3 * x[1:] * x[:-1] + first_input_in_last_output(x)[1:],
        ],
        ids=["without entries", "pointwise", "one entry", "banded"],
    )
    @pytest.mark.parametrize("n", [60, 1000])
    def test_fail(self, func: Func, n: int) -> None:
        report = fastgrad.check(func, inputs(n))
        assert report.failure is not None
        assert report.failure.kind == "mismatch"

    @pytest.mark.parametrize("slope", [0.1, 0.237])
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_fail_at_small_inputs_and_outputs(self, offset: float, slope: float) -> None:
        """One entry of a ramp hides behind the tolerance of a larger one, and behind the noise of its output."""

        def func(x: Tensor) -> Tensor:
            ramp = slope * x[333].detach().clamp(-2e-8, 2e-8)
            return 10.0 * x.sin() + offset + ramp * torch.nn.functional.one_hot(torch.tensor(250), 1000)

        report = fastgrad.check(func, torch.zeros(1000, dtype=torch.float64, requires_grad=True))
        assert report.failure is not None
        assert report.failure.kind == "mismatch"

    @pytest.mark.parametrize("backward", [False, True])
    def test_fail_in_forward_mode(self, backward: bool) -> None:
        report = fastgrad.check(Ramp.apply, inputs(1000), check_forward_ad=True, check_backward_ad=backward)
        assert report.failure is not None
        assert report.failure.kind == "mismatch"


def test_more_outputs_than_are_examined_give_up_a_pattern() -> None:
    """Thirty outputs round in float32. Each may hide an entry outside the pattern, and not all are examined."""
    torch.manual_seed(1)
    x = (30 + 30 * torch.rand(64, dtype=torch.float64)).requires_grad_()
    rounds = torch.arange(64) < 30

    def func(x: Tensor) -> Tensor:
        return x.sin() + 1e-4 * rounds * x.float().double()

    assert fastgrad.check(func, x, seed=1, engine="compressed").verdict == "undecided"
    report = fastgrad.check(func, x, seed=1)
    assert (report.verdict, report.plan.engine if report.plan else "") == ("passed", "dense")


class TestRightGradients:
    @pytest.mark.parametrize("size", [30.0, LARGE])
    @pytest.mark.parametrize(
        ("func", "most"),
        [
            (lambda x: x.sin(), 2),
            (lambda x: x[1:] * x[:-1], 2),
            (lambda x: x.sort().values, 2),
            # Each output rounds differently. Five steps, all repeated, and two evaluations for each of eight outputs.
            (lambda x: x.view(20, -1).t() @ x.view(20, -1)[:, :3], 2 * 2 * 5 + 2 * 8),
        ],
        ids=["sin", "products", "sort", "matmul"],
    )
    def test_pass_with_few_more_evaluations(
        self, monkeypatch: pytest.MonkeyPatch, func: Func, most: int, size: float
    ) -> None:
        # The same engine on any machine.
        set_costs(monkeypatch, guess_seconds=0.0, align_seconds=0.0, probe_seconds=0.0)
        normal = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        x = (size * normal).requires_grad_()
        report = fastgrad.check(func, x)
        assert report.passed
        monkeypatch.setattr(EpsCertificate, "certify", lambda *_: incomplete([]))
        assert 0 <= report.evaluations - fastgrad.check(func, x).evaluations <= most
