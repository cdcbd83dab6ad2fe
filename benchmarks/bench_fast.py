"""Fast mode against torch's fast mode: what each finds among wrong gradients, and what a passing check costs.

Both sides run in one process. torch computes the whole slow Jacobian for its message when it fails, so it
gets wrong gradients only up to a size where that is feasible.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fastgrad
from benchmarks.measure import geometric_mean, pair_row, time_pair, write
from fastgrad.checks.order import check
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings

LARGEST_FOR_TORCH = 2_000


class Wrong(torch.autograd.Function):
    """func, with the gradient that `change` makes from the right gradient and grad_output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, func: Callable[[Tensor], Tensor], change: Any) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = func(ctx.x)
        ctx.change = change
        return ctx.y.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (gradient,) = torch.autograd.grad(ctx.y, ctx.x, grad, retain_graph=True)
        return ctx.change(gradient, grad), None, None


def one_entry(error: float) -> Callable[[Tensor, Tensor], Tensor]:
    def change(gradient: Tensor, grad: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[gradient.numel() // 3] += error * grad.reshape(-1)[-1]
        return gradient

    return change


def batch_item(gradient: Tensor, _: Tensor) -> Tensor:
    """The gradient, with that of the second of ten items doubled."""
    gradient = gradient.clone()
    item = gradient.view(10, -1)[1]
    item *= 2
    return gradient


def transposed(gradient: Tensor, _: Tensor) -> Tensor:
    side = math.isqrt(gradient.numel())
    return gradient.view(side, side).t().reshape(-1)


def small_rows(gradient: Tensor, _: Tensor) -> Tensor:
    """The gradient without the rows of `uneven` that are 1e-3."""
    return gradient * (torch.arange(gradient.numel()) % 2)


def weight(x: Tensor) -> Tensor:
    """A linear layer with the square weight x."""
    side = math.isqrt(x.numel())
    data = torch.linspace(-1, 1, 5 * side, dtype=torch.float64).view(5, side)
    return (data @ x.view(side, side).t()).flatten()


def uneven(x: Tensor) -> Tensor:
    """Every other row of the Jacobian is 1e8, the others 1e-3."""
    scale = torch.full_like(x, 1e-3)
    scale[1::2] = 1e8
    return scale * x


def channel_sign(gradient: Tensor, _: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient[: gradient.numel() // 10] *= -1
    return gradient


CHANGES: dict[str, Any] = {
    "one entry, 1e-4": one_entry(1e-4),
    "one entry, 1e-2": one_entry(1e-2),
    "one entry, 1": one_entry(1.0),
    "rolled": lambda g, _: g.roll(1),
    "sign of a tenth": channel_sign,
    "x 1.002": lambda g, _: 1.002 * g,
    "x 1.01": lambda g, _: 1.01 * g,
    "x 1.1": lambda g, _: 1.1 * g,
    "zero": lambda g, _: 0 * g,
    "one batch item": batch_item,
}
FUNCS: dict[str, Callable[[Tensor], Tensor]] = {
    "elementwise": lambda x: 2 * x.sin(),
    "matmul": lambda x: (x.view(-1, 10) @ torch.linspace(-1, 1, 70, dtype=torch.float64).view(10, 7)).flatten(),
    "gather": lambda x: x.flip(0) * 2,
    "softmax": lambda x: x.numel() * x.softmax(0),
}
WRONGS = [(name, func, what, change) for name, func in FUNCS.items() for what, change in CHANGES.items()]
WRONGS += [
    ("weight", weight, "transposed", transposed),
    ("rows of 1e8 and of 1e-3", uneven, "those of 1e-3 zero", small_rows),
]
PASSING: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "sin": (torch.sin, 10**6),
    "relu": (torch.relu, 10**6),
    "sin, 1e5": (torch.sin, 10**5),
    "softmax": (lambda x: x.softmax(0), 10**5),
    "loss": (lambda x: (x**2).sum(), 10**5),
    "layer_norm": (lambda x: torch.nn.functional.layer_norm(x.view(-1, 100), (100,)), 10**5),
    "conv1d": (
        lambda x: torch.nn.functional.conv1d(x.view(10, 10, -1), torch.ones(10, 10, 5, dtype=torch.float64)),
        10**5,
    ),
    "matmul": (lambda x: x.view(-1, 100) @ torch.ones(100, 100, dtype=torch.float64), 10**5),
}


def normal(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, dtype=torch.float64, generator=generator).requires_grad_()


def detection(sizes: list[int]) -> list[dict[str, Any]]:
    rows = []
    for name, func, what, change in WRONGS:
        for n in sizes:
            x = normal(math.isqrt(n) ** 2 if change is transposed else n)
            wrong = lambda x, func=func, change=change: Wrong.apply(x, func, change)  # noqa: E731
            report = check(wrong, (x,), Settings(fast_mode=True, engine="sketch"))
            torchs = "not asked"
            if n <= LARGEST_FOR_TORCH:
                passed = torch.autograd.gradcheck(wrong, (x,), fast_mode=True, raise_exception=False)
                torchs = "missed" if passed else "found"
            own = "missed" if report.passed else "found" if names_a_wrong_entry(report, wrong, func, x) else "misnamed"
            rows.append({"func": name, "n": x.numel(), "error": what, "torch fast": torchs, "fastgrad fast": own})
            rows[-1] |= {"evaluations": report.evaluations, "vjps": report.vjps, "seconds": report.seconds}
            print(rows[-1], flush=True)
    return rows


def names_a_wrong_entry(report: Report, wrong: Any, func: Any, x: Tensor) -> bool:
    """Whether the entry that a failure names differs, by more than its tolerance, from func's own gradient there."""
    worst = report.failure and report.failure.comparison and report.failure.comparison.worst
    if not worst:
        return False
    (row,), (column,) = worst.output_index, worst.input_index
    found, right = (torch.autograd.grad(f(x)[row], x)[0][column].item() for f in (wrong, func))
    return abs(found - right) > 1e-5 + 1e-3 * abs(right) and abs(found - worst.analytical) <= 1e-9 * abs(found)


def costs(rounds: int, budget: float) -> list[dict[str, Any]]:
    rows = []
    for name, (func, n) in PASSING.items():
        x = normal(n)
        torchs = lambda func=func, x=x: torch.autograd.gradcheck(func, (x,), fast_mode=True)  # noqa: E731
        own = lambda func=func, x=x: fastgrad.gradcheck(func, (x,), fast_mode=True)  # noqa: E731
        if not (torchs() and own()):
            raise RuntimeError(f"{name} does not pass on both sides")
        report = check(func, (x,), Settings(fast_mode=True))
        pair = time_pair(torchs, own, rounds, budget)
        rows.append({"name": name, "n": n, "evaluations": report.evaluations, "vjps": report.vjps, **pair_row(pair)})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 10_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--name", default="fast-mode")
    options = parser.parse_args()
    torch.set_num_threads(1)
    passing = costs(options.rounds, options.budget)
    found = detection([n for n in options.sizes if n % 10 == 0])
    summary = {
        "torch fast / fastgrad fast, passing": geometric_mean(row["ratio"] for row in passing),
        "wrong gradients": len(found),
        "found by fastgrad": sum(row["fastgrad fast"] == "found" for row in found),
        "asked of torch": sum(row["torch fast"] != "not asked" for row in found),
        "found by torch": sum(row["torch fast"] == "found" for row in found),
    }
    print(summary)
    print(write(options.name, summary, passing + found))


if __name__ == "__main__":
    main()
