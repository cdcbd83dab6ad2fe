"""Whether the bounds that reports print are true: errors of one entry, just above them, on random problems.

`python -m tests.properties.bounds --errors 100000` prints how many errors were placed, how many were found, and every
one that passed, which fails the run.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fastgrad
from fastgrad.report.report import Report

ABOVE_BOUND = 1.05
"""Times the bound that the report states."""

ABOVE_TOLERANCE = 2.05
"""Times the entry's own tolerance, where that is larger: a numerical entry may be off by as much as a difference."""

LARGEST_OUTPUT = 1e4
"""One ulp of it, over eps, is a fifth of atol; of larger ones, differences at eps resolve too little."""

ERRORS_A_PROBLEM = 8
SETTINGS: dict[str, dict[str, Any]] = {
    "sketch": {"fast_mode": True, "engine": "sketch"},
    "compressed": {"engine": "compressed"},
}


@dataclass
class Problem:
    """A function of known Jacobian: matrix @ (scale * sin(x)), where a matrix None stands for the identity."""

    x: Tensor
    scale: Tensor
    matrix: Tensor | None

    @property
    def m(self) -> int:
        """The number of outputs."""
        return self.x.numel() if self.matrix is None else self.matrix.shape[0]

    def entry(self, output: int, index: int) -> float:
        """An entry of the Jacobian."""
        weight = float(output == index) if self.matrix is None else self.matrix[output, index].item()
        return float(weight * self.scale[index] * self.x[index].cos())

    def function(self, output: int = 0, index: int = 0, error: float = 0.0) -> Callable[[Tensor], Tensor]:
        """The function, whose backward is off by an error in one entry."""
        scale, matrix = self.scale, self.matrix

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.save_for_backward(x)
                values = scale * x.sin()
                return values if matrix is None else matrix @ values

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                (x,) = ctx.saved_tensors
                result = scale * x.cos() * (grad if matrix is None else matrix.t() @ grad)
                if error:
                    result[index] = result[index] + error * grad[output]
                return result

        return Function.apply  # type: ignore[no-any-return]


def random_problem(chance: random.Random, generator: torch.Generator) -> Problem:
    """A random problem: element-wise, sparse or dense; with equal scales, different scales, or a few large entries."""
    kind = chance.choice(["element-wise", "sparse", "dense"])
    n = chance.choice([20, 60, 200] if kind != "dense" else [20, 60])

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scale = torch.full((n,), 10.0 ** chance.uniform(-3, 5), dtype=torch.float64)
    spread = chance.choice(["one", "many", "outliers"])
    if spread == "many":
        scale = scale * 10.0 ** (2 * normal(n)).clamp(-4, 4)
    elif spread == "outliers":
        scale[:: max(1, n // 3)] *= 1e6
    matrix = None
    if kind != "element-wise":
        matrix = normal(n, n)
        if kind == "sparse":
            matrix = torch.where(torch.rand(n, n, generator=generator) < 3 / n, matrix, 0.0)
    x = normal(n)
    values = scale * x.sin()
    size = (values if matrix is None else matrix @ values).abs().max().item()
    return Problem(x.requires_grad_(), scale * min(1.0, LARGEST_OUTPUT / size), matrix)


def excluded(report: Report) -> float:
    """The size from which the report excludes errors, in addition to tolerances."""
    return max([report.undecided or 0.0, *(certificate.bound for certificate in report.certificates)])


def try_problem(seed: int, engine: str, counts: Counter[str]) -> list[str]:
    """Places errors in a problem; describes those that pass although the report excludes them."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    problem = random_problem(chance, generator)
    settings = {**SETTINGS[engine], "seed": seed}
    right = fastgrad.check(problem.function(), problem.x, **settings)
    if not right.passed:
        return [f"{engine}, problem {seed}: a right function fails: {right}"]
    bound, missed = excluded(right), []
    for _ in range(ERRORS_A_PROBLEM):
        output, index = chance.randrange(problem.m), chance.randrange(problem.x.numel())
        allowed = 1e-5 + 1e-3 * abs(problem.entry(output, index))
        error = chance.choice([-1, 1]) * max(ABOVE_BOUND * bound, ABOVE_TOLERANCE * allowed)
        wrong = problem.function(output, index, error)
        if not fastgrad.gradcheck(wrong, problem.x, raise_exception=False, **settings):
            counts["found"] += 1
            continue
        report = fastgrad.check(wrong, problem.x, **settings)
        if excluded(report) >= abs(error):  # the error itself increased the bound of this report
            counts["within the bound of its own report"] += 1
            continue
        missed.append(f"{engine}, problem {seed}: {error:.3g} at [{output}, {index}], bound {bound:.3g}: {report}")
    counts["missed"] += len(missed)
    return missed


def main() -> int:
    """Runs until this many errors have been placed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--errors", type=int, default=100_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--engine", choices=list(SETTINGS), default="sketch")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    seed, wrong = arguments.first_seed, 0
    while sum(counts.values()) < arguments.errors:
        for line in try_problem(seed, arguments.engine, counts):
            wrong += 1
            print(line, flush=True)
        seed += 1
    print(f"{arguments.engine}: {sum(counts.values())} errors on {seed - arguments.first_seed} problems:", dict(counts))
    return 1 if wrong else 0


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    sys.exit(main())
