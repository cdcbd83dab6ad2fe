"""Measures the figures of the cost model on this machine: python -m benchmarks.bench_costs [--device cuda].

Each is printed next to the model's. Medians of one process and one thread; nothing is written.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

import fastgrad
from fastgrad.core.phases import clock
from fastgrad.engines.cost_model import COSTS
from fastgrad.problem import first_look
from fastgrad.problem.problem import Problem
from fastgrad.problem.second_order import Backward

SIZE = 1000
"""Input coordinates: calls take microseconds, so that their overhead shows."""

SMALL = 100
"""The same for small checks."""

DENSE_CALLS = 2 + 6 * COSTS.vjp_evaluations
"""Calls of the dense engine in a small check, in evaluations, in addition to rows and columns."""

DEVICE = torch.device("cpu")
"""Where the inputs are; main() sets it."""


def leaf(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(DEVICE).requires_grad_()


def median_seconds(run: Callable[[], Any], rounds: int) -> float:
    """The median time of a call, after a first call."""
    run()
    found = []
    for _ in range(rounds):
        start = clock(DEVICE)
        run()
        found.append(clock(DEVICE) - start)
    return statistics.median(found)


def calls_seconds(func: Callable[..., Any], inputs: tuple[Tensor, ...], rounds: int) -> tuple[float, float]:
    """The median times of an evaluation that records a graph, and of a VJP."""
    with Problem(func, inputs) as problem:
        cotangent = torch.ones(1, problem.m, dtype=torch.float64, device=DEVICE)
        problem.graph()
        evaluation = median_seconds(lambda: problem.evaluate(True), rounds)
        problem.graph()
        return evaluation, median_seconds(lambda: problem.vjp(cotangent), rounds)


def jvp_ratio(func: Callable[..., Any], inputs: tuple[Tensor, ...], rounds: int) -> float:
    """The median time of a JVP, in evaluations without a graph."""
    with Problem(func, inputs) as problem:
        evaluation = median_seconds(lambda: problem.evaluate(False), rounds)
        tangent = torch.ones(1, problem.n, dtype=torch.float64, device=DEVICE)
        return median_seconds(lambda: problem.jvps_of(tangent), rounds) / evaluation


def beside_the_calls(check: Callable[[], fastgrad.Report], evaluation: float, vjp: float, rounds: int) -> float:
    """Seconds of a check without its calls of func and backward."""
    report = check()
    assert report.passed, report
    return median_seconds(check, rounds) - report.evaluations * evaluation - report.vjps * vjp


class Sine(torch.autograd.Function):
    """A custom Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output * ctx.saved_tensors[0].cos()


def usual_costs(rounds: int) -> dict[str, tuple[float, float]]:
    """Time of an evaluation for a difference: as assumed from its nodes, and as measured."""

    def seconds(func: Callable[..., Any], *inputs: Tensor, records: bool = True) -> float:
        with Problem(func, inputs, records_differences=records) as problem:
            columns = min(problem.n, 16)
            found = median_seconds(lambda: problem.difference_columns(0, columns, 1e-6, True), rounds)
            return found / (2 * columns)

    def chain(link: Callable[..., Any], count: int) -> Callable[..., Any]:
        return lambda x: reduce(lambda value, _: link(value), range(count), x)

    x, count = leaf(16), 20
    one, many = seconds(torch.sin, x), seconds(chain(torch.sin, count), x)
    node = (many - one) / (count - 1)
    call = one - 2 * node  # the cost of a call, without the nodes of sin and of its input
    custom = (seconds(chain(Sine.apply, count), x) - many) / count
    grad_output = leaf(16)
    backward = Backward(torch.sin, (x,), (grad_output,))
    with Problem(backward, (x, grad_output), records_differences=False) as problem:
        assumed = call + node * problem.nodes
    return {
        "CALL_SECONDS": (first_look.CALL_SECONDS, call),
        "NODE_SECONDS": (first_look.NODE_SECONDS, node),
        "CUSTOM_SECONDS": (first_look.CUSTOM_SECONDS, custom),
        "BACKWARD_SECONDS": (first_look.BACKWARD_SECONDS, seconds(backward, x, grad_output, records=False) - assumed),
    }


def measured(rounds: int) -> dict[str, float]:
    """The costs, by their names in the model."""
    x = leaf(SIZE)
    evaluation, vjp = calls_seconds(torch.sin, (x,), rounds)
    # So costly that only the time of func and backward matters, and of the most common kinds.
    functions: tuple[tuple[Callable[..., Any], tuple[Tensor, ...]], ...] = (
        (torch.matmul, (leaf(300, 300), leaf(300, 300))),
        (torch.tanh, (leaf(1_000_000),)),
        (lambda x: x.softmax(-1), (leaf(1000, 1000),)),
        (torch.nn.functional.conv2d, (leaf(8, 16, 32, 32), leaf(16, 16, 3, 3))),
    )
    ratios = [heavy_vjp / heavy for function in functions for heavy, heavy_vjp in [calls_seconds(*function, rounds)]]
    _, least = calls_seconds(lambda x: x.clone(), (leaf(1),), rounds)
    sketch = fastgrad.check(torch.sin, x, fast_mode=True, engine="sketch")
    compressed = fastgrad.check(torch.sin, x, engine="compressed")
    few = leaf(SMALL)
    small = fastgrad.check(torch.sin, few)  # a small check of a pattern, on the CPU

    def calls_of(report: fastgrad.Report) -> float:
        """Calls, in evaluations, without those of groups."""
        groups = 2 * (report.plan.column_groups or 0) + COSTS.vjp_evaluations * (report.plan.row_groups or 0)
        return report.evaluations + COSTS.vjp_evaluations * report.vjps - groups

    return {
        "vjp_seconds": least,
        "vjp_evaluations": statistics.geometric_mean(ratios),
        "jvp_evaluations": statistics.geometric_mean(jvp_ratio(*function, rounds) for function in functions),
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
        "certificate_evaluations": calls_of(compressed),
        "small_pattern_seconds": beside_the_calls(
            lambda: fastgrad.check(torch.sin, few), *calls_seconds(torch.sin, (few,), rounds), rounds
        ),
        "small_pattern_calls": calls_of(small) - DENSE_CALLS,
    }


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    global DEVICE
    DEVICE = torch.device(options.device)
    print(f"{'cost':<26}{'model':>12}{'measured':>12}")
    rows = {name: (getattr(COSTS, name), value) for name, value in measured(options.rounds).items()}
    for name, (assumed, value) in (usual_costs(options.rounds) | rows).items():
        print(f"{name:<26}{assumed:>12.3g}{value:>12.3g}")


if __name__ == "__main__":
    main()
