"""`python -m fastgrad demo`: checks real operators with fastgrad and with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgrad.report.report import Report
from fastgrad.testing.patch import Check, ask_both
from fastgrad.testing.torch_reference import Outcome


class SquaredReLU(torch.autograd.Function):
    """max(x, 0)^2, as a user would write it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0) ** 2

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        """2 max(x, 0) times grad_output."""
        x: Tensor = ctx.saved_tensors[0]
        return grad_output * 2 * x.clamp(min=0)


class ForgottenFactor(SquaredReLU):
    """The same with a planted error: the factor 2 is missing."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        """Half of the right gradient, on purpose."""
        x: Tensor = ctx.saved_tensors[0]
        return grad_output * x.clamp(min=0)


def operators() -> list[tuple[str, Callable[..., Any], tuple[Tensor, ...]]]:
    """The names of the demo's operators, with their functions and inputs; a separate generator draws the inputs."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(*shape, dtype=dtype, generator=generator, device="cpu").requires_grad_()

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Written out, because torch's fused kernel has no second derivative.
        return torch.softmax(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5, dim=-1) @ value

    def lstm_cell(x: Tensor, h: Tensor, c: Tensor, w_x: Tensor, w_h: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = (x @ w_x + h @ w_h).chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    return [
        ("linear", F.linear, (normal(4, 6), normal(5, 6), normal(5))),
        ("conv2d", F.conv2d, (normal(1, 2, 6, 6), normal(3, 2, 3, 3))),
        ("layer norm", lambda x, w, b: F.layer_norm(x, (8,), w, b), (normal(5, 8), normal(8), normal(8))),
        ("attention", attention, (normal(1, 2, 4, 3), normal(1, 2, 4, 3), normal(1, 2, 4, 3))),
        ("LSTM cell", lstm_cell, (normal(2, 3), normal(2, 4), normal(2, 4), normal(3, 16), normal(4, 16))),
        ("complex FFT", torch.fft.fft, (normal(3, 8, dtype=torch.complex128),)),
        ("custom Function", SquaredReLU.apply, (normal(6, 8),)),
        ("planted error", ForgottenFactor.apply, (normal(6, 8),)),
    ]


def main() -> int:
    """Prints the table and the message of the planted error; returns 0 if all verdicts are as expected."""
    print(f"{'check':<14} {'operator':<16} {'n':>4} {'m':>4}  {'verdict':<8}{'evals':>6} {'VJPs':>5} {'ms':>8}", end="")
    print(f"   {'torch':<8}{'ms':>9} {'ratio':>6}")
    as_expected, planted = True, None
    for operator, func, inputs in operators():
        for checker in ("gradcheck", "gradgradcheck"):
            for _warm_up_first in range(2):
                check = ask_both(checker, (func, inputs), {})
            assert check.report is not None
            assert check.torch is not None
            print(_row(operator, check, check.report, check.torch))
            # gradgradcheck passes: autograd differentiates the planted backward correctly.
            wrong = operator == "planted error" and checker == "gradcheck"
            planted = check.ours.error if wrong else planted
            as_expected &= check.ours.verdict == check.torch.verdict == ("failed" if wrong else "passed")
    print(f"\nThe message of the planted error:\n\n{planted}")
    return 0 if as_expected else 1


def _row(operator: str, check: Check, report: Report, torchs: Outcome) -> str:
    return (
        f"{check.name:<14} {operator:<16} {report.n:>4} {report.m:>4}  {check.ours.verdict:<8}{report.evaluations:>6} "
        f"{report.vjps:>5} {report.seconds * 1e3:>8.1f}   {torchs.verdict:<8}{torchs.seconds * 1e3:>9.1f} "
        f"{torchs.seconds / report.seconds:>5.1f}x"
    )
