"""Measures the figures of the cost model on this machine: python -m benchmarks.bench_costs [--rounds 15].

Each is printed beside the model's. Medians of one process and one thread; nothing is written.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fastgrad
from fastgrad.engines.cost_model import COSTS
from fastgrad.problem.problem import Problem

SIZE = 1000
"""Input coordinates: calls take microseconds, so that what surrounds them shows."""


def leaf(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def median_seconds(run: Callable[[], Any], rounds: int) -> float:
    """Of one call, after a first one."""
    run()
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def calls_seconds(func: Callable[..., Any], inputs: tuple[Tensor, ...], rounds: int) -> tuple[float, float]:
    """Of one evaluation that records a graph, and of one VJP."""
    with Problem(func, inputs) as problem:
        cotangent = torch.ones(1, problem.m, dtype=torch.float64)
        problem.graph()
        evaluation = median_seconds(lambda: problem.evaluate(True), rounds)
        problem.graph()
        return evaluation, median_seconds(lambda: problem.vjp(cotangent), rounds)


def beside_the_calls(check: Callable[[], fastgrad.Report], evaluation: float, vjp: float, rounds: int) -> float:
    """Seconds of a check that its calls of func and backward do not take."""
    report = check()
    assert report.passed, report
    return median_seconds(check, rounds) - report.evaluations * evaluation - report.vjps * vjp


def measured(rounds: int) -> dict[str, float]:
    """The costs by the names of the model's."""
    x = leaf(SIZE)
    evaluation, vjp = calls_seconds(torch.sin, (x,), rounds)
    # Heavy enough that nothing beside func and backward counts, and of the commonest kinds.
    ratios = [
        heavy_vjp / heavy
        for func, inputs in (
            (torch.matmul, (leaf(300, 300), leaf(300, 300))),
            (torch.tanh, (leaf(1_000_000),)),
            (lambda x: x.softmax(-1), (leaf(1000, 1000),)),
            (torch.nn.functional.conv2d, (leaf(8, 16, 32, 32), leaf(16, 16, 3, 3))),
        )
        for heavy, heavy_vjp in [calls_seconds(func, inputs, rounds)]
    ]
    _, least = calls_seconds(lambda x: x.clone(), (leaf(1),), rounds)
    sketch = fastgrad.check(torch.sin, x, fast_mode=True, engine="sketch")
    compressed = fastgrad.check(torch.sin, x, engine="compressed")
    groups = 2 * (compressed.plan.column_groups or 0) + COSTS.vjp_evaluations * (compressed.plan.row_groups or 0)
    return {
        "vjp_seconds": least,
        "vjp_evaluations": statistics.geometric_mean(ratios),
        "sketch_seconds": beside_the_calls(
            lambda: fastgrad.check(torch.sin, x, fast_mode=True, engine="sketch"), evaluation, vjp, rounds
        ),
        "sketch_calls": sketch.evaluations + COSTS.vjp_evaluations * sketch.vjps,
        "guess_seconds": beside_the_calls(
            lambda: fastgrad.check(torch.sin, x, engine="compressed"), evaluation, vjp, rounds
        ),
        "probe_seconds": beside_the_calls(
            lambda: fastgrad.check(lambda x: x * x.roll(1) * x.roll(7), x, engine="compressed"),
            *calls_seconds(lambda x: x * x.roll(1) * x.roll(7), (x,), rounds),
            rounds,
        ),
        "certificate_evaluations": compressed.evaluations + COSTS.vjp_evaluations * compressed.vjps - groups,
    }


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'cost':<26}{'model':>12}{'measured':>12}")
    for name, value in measured(options.rounds).items():
        print(f"{name:<26}{getattr(COSTS, name):>12.3g}{value:>12.3g}")


if __name__ == "__main__":
    main()
