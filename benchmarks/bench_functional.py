"""Jacobians and Hessians against torch.autograd.functional: its loop, and its vectorize=True, in one process.

Equality is checked before anything is timed. Memory limits the size of torch's cases.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import functional as torchs

from benchmarks.measure import geometric_mean, pair_row, time_alone, time_pair, write
from fastgrad import functional

LARGEST = 1e-9
"""Difference that is still equality, as a share of the largest entry."""


def rosenbrock(x: Tensor) -> Tensor:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def arrow(x: Tensor) -> Tensor:
    return (x[0].sin() * x[1:] ** 2).sum()


def stencil(x: Tensor) -> Tensor:
    return x[2:].sin() * x[:-2] + x[1:-1] ** 2


@dataclass(frozen=True)
class Case:
    """name of the function, func of n elements, and whether torch also runs with vectorize=True."""

    name: str
    what: str
    func: Callable[[Tensor], Tensor]
    n: int
    vectorize: bool = True


CASES = [
    Case("jacobian", "elementwise", torch.sin, 1_000),
    Case("jacobian", "elementwise", torch.sin, 10_000),
    Case("jacobian", "stencil of 3", stencil, 4_000),
    Case("jacobian", "softmax of 10", lambda x: x.view(-1, 10).softmax(-1), 2_000),
    Case("jacobian", "dense", lambda x: x.cumsum(0).sin(), 1_000),
    Case("hessian", "Rosenbrock", rosenbrock, 1_000),
    Case("hessian", "Rosenbrock", rosenbrock, 4_000),
    Case("hessian", "Rosenbrock", rosenbrock, 10_000, vectorize=False),
    Case("hessian", "arrow", arrow, 2_000),
]


class Counted(torch.autograd.Function):
    """The identity; counts its backward passes."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Counted.calls += 1
        return grad.clone()


def products(case: Case, x: Tensor) -> int:
    """VJPs that fastgrad takes; a Hessian's gradient is one of them."""
    Counted.calls = 0
    getattr(functional, case.name)(lambda v: case.func(Counted.apply(v)), x, sparse="auto")
    return Counted.calls


def check_equal(found: Tensor, expected: Tensor) -> None:
    """Raises if a result, sparse or not, differs from torch's; overwrites `expected`, to save memory."""
    if found.layout is torch.strided:
        torch.testing.assert_close(found, expected, rtol=0, atol=LARGEST * float(expected.abs().max()))
        return
    where = tuple(found.indices())
    limit = LARGEST * float(expected.abs().max())
    torch.testing.assert_close(found.values(), expected[where], rtol=0, atol=limit)
    expected[where] = 0
    if int(expected.count_nonzero()):
        raise AssertionError("the sparse result lacks entries")


def run(case: Case, rounds: int, budget: float) -> list[dict[str, Any]]:
    x = torch.randn(case.n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = []
    for vectorize in (False, True) if case.vectorize else (False,):

        def baseline(vectorize: bool = vectorize) -> Tensor:
            return getattr(torchs, case.name)(case.func, x, vectorize=vectorize)

        def own(sparse: Any = "auto") -> Tensor:
            return getattr(functional, case.name)(case.func, x, sparse=sparse)

        expected = baseline()
        check_equal(own(False), expected)
        check_equal(own(), expected)
        del expected
        pair = time_pair(baseline, own, rounds, budget)
        strided = statistics.median(time_alone(lambda: own(False), rounds, budget))
        row = {"name": case.name, "func": case.what, "n": case.n}
        row |= {"torch": "vectorize=True" if vectorize else "loop", "layout": str(own().layout)}
        row |= {"products": products(case, x), "strided": strided, "strided ratio": pair.baseline / strided}
        rows.append({**row, **pair_row(pair)})
        print(
            f"{case.name:9} {case.what:13} n={case.n:<6} {row['torch']:15} {pair.baseline:8.4f} s  "
            f"auto {pair.candidate:7.4f} s {pair.ratio:7.1f}x  strided {strided:7.4f} s {row['strided ratio']:6.1f}x   "
            f"{row['products']} VJPs",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=2.0)
    parser.add_argument("--largest", type=int, default=10_000, help="elements of the largest cases")
    parser.add_argument("--note", default="", help="what else the machine did, say")
    parser.add_argument("--save", action="store_true", help="write results/functional.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for case in CASES if case.n <= options.largest for row in run(case, options.rounds, options.budget)]
    summary: dict[str, Any] = {}
    for side in ("loop", "vectorize=True"):
        of_side = [row for row in rows if row["torch"] == side]
        summary[f"torch {side} / sparse='auto'"] = geometric_mean(row["ratio"] for row in of_side)
        summary[f"torch {side} / sparse=False"] = geometric_mean(row["strided ratio"] for row in of_side)
    if options.note:
        summary["note"] = options.note
    print(summary)
    if options.save:
        print(write("functional", summary, rows))


if __name__ == "__main__":
    main()
