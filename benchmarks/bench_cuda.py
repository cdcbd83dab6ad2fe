"""On a GPU: checks against torch's, and the operators' bandwidth against that of a copy.

Verdicts come first; timed calls are synchronized. Writes results/<device>.json and a table next to it. With
--at-least, fails if exact checks are not this many times faster than torch's, on geometric average.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fastgrad
from benchmarks.cases import Case, leaves
from benchmarks.measure import RESULTS, geometric_mean, pair_row, time_pair, write
from fastgrad.checks.order import check
from fastgrad.engines import cuda_graph
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings

ops = torch.ops.fastgrad


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


CASES = [
    Case("sin, 2,000", torch.sin, leaves((2000,))),
    Case("bias + GELU, 32 x 64", bias_gelu, leaves((32, 64), (64,))),
    Case("softmax, 128 x 16", lambda x: x.softmax(-1), leaves((128, 16))),
    Case("layer_norm, 32 x 64", lambda x: F.layer_norm(x, (64,)), leaves((32, 64))),
    Case("linear, 32 x 24 by 16", F.linear, leaves((32, 24), (16, 24), (16,))),
    Case("conv2d, 2 x 4 x 12 x 12", F.conv2d, leaves((2, 4, 12, 12), (8, 4, 3, 3), (8,))),
    Case("attention, 2 x 16 x 8", F.scaled_dot_product_attention, leaves(*[(1, 2, 16, 8)] * 3)),
    Case("matmul, complex", torch.matmul, leaves((16, 12), (12, 8), dtype=torch.complex128)),
]

LARGE = [
    Case("sin, 8,000", torch.sin, leaves((8000,))),
    Case("layer_norm, 256 x 32", lambda x: F.layer_norm(x, (32,)), leaves((256, 32))),
    Case("conv2d, 4 x 4 x 22 x 22", F.conv2d, leaves((4, 4, 22, 22), (4, 4, 3, 3))),
]
"""Cases with sparse Jacobians, run in slow mode only, because torch takes seconds for each."""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def on(case: Case, device: torch.device) -> Case:
    return replace(case, inputs=tuple(value.detach().to(device).requires_grad_() for value in case.inputs))


def checks(
    cases: list[Case], modes: tuple[str, ...], device: torch.device, rounds: int, budget: float
) -> Iterator[dict[str, Any]]:
    """Compares slow mode with the exact engines, and fast mode with the sketch: one row per case and mode."""
    for case in (on(case, device) for case in cases):
        for mode in modes:
            fast_mode = mode == "fast"

            def run(checker: Callable[..., bool], case: Case = case, fast_mode: bool = fast_mode) -> bool:
                passed = checker(case.func, case.inputs, fast_mode=fast_mode)
                synchronize(device)
                return passed

            if not (run(torch.autograd.gradcheck) and run(fastgrad.gradcheck)):
                raise RuntimeError(f"{case.name} does not pass on both sides")
            report = check(case.func, case.inputs, Settings(fast_mode=fast_mode))
            pair = time_pair(
                lambda run=run: run(torch.autograd.gradcheck), lambda run=run: run(fastgrad.gradcheck), rounds, budget
            )
            calls = {"evaluations": report.evaluations, "vjps": report.vjps, "engine": report.plan.engine}
            yield {"name": case.name, "mode": mode, "n": report.n, "m": report.m, **calls, **pair_row(pair)}


def quick(x: Tensor) -> Tensor:
    """A function of some kernels of a few microseconds each."""
    return (x.cumsum(0) * x).sin()


def only_block(blocks: Iterator[Tensor]) -> Tensor:
    (block,) = blocks  # exhausts the iterator, which releases the graph
    return block


def replays(device: torch.device, rounds: int, budget: float) -> Iterator[dict[str, Any]]:
    """Compares replays of a CUDA graph, with its capture, with single calls for the same columns and rows."""
    (x,) = (value.detach().to(device).requires_grad_() for value in leaves((1000,)))
    with Problem(quick, (x,)) as problem:
        (output,) = problem.outputs
        within = 0, problem.n
        ways: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
            "columns": (
                lambda: problem.difference_columns(*within, 1e-6, False),
                lambda: cuda_graph.difference_columns(problem, *within, 1e-6, False),
            ),
            "rows": (
                lambda: problem.analytical_rows(output, False, *within, problem.inputs)[0],
                lambda: only_block(
                    cuda_graph.analytical_rows(problem, output, False, 0, [output.size], problem.inputs)
                ),
            ),
        }
        for name, (loop, replay) in ways.items():
            torch.testing.assert_close(replay(), loop(), rtol=0, atol=1e-8)
            pair = time_pair(*(lambda way=way: (way(), synchronize(device)) for way in (loop, replay)), rounds, budget)
            yield {"name": f"{name}, one by one / replayed", "n": problem.n, **pair_row(pair)}


def median_seconds(call: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """The median time of a call on the device, by CUDA events, after a warm-up."""
    call()
    seconds = []
    for _ in range(rounds):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def kernels(device: torch.device, n: int, rounds: int) -> Iterator[dict[str, Any]]:
    """The bandwidth of each operator (bytes that it must move, by time), relative to a copy of n float64 numbers."""
    generator = torch.Generator().manual_seed(0)
    x, y, z, out = (torch.randn(n, dtype=torch.float64, generator=generator).to(device) for _ in range(4))
    noise = torch.zeros_like(x)
    index = torch.arange(n, device=device)
    side = int(n**0.5)
    # as in a check that passes
    left, right = (values[: side * side].view(side, side) for values in (x, x + 1e-9 * y))
    rows = torch.stack([x, y, z])
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "copy": (lambda: out.copy_(x), 16 * n),
        "displace_": (lambda: ops.displace_(out, x, y, 1e-6), 24 * n),
        "perturb_coordinates_, all": (lambda: ops.perturb_coordinates_(out, x, index, 1, 1e-6, 0.0), 24 * n),
        "flatten_": (lambda: ops.flatten_(out, x), 16 * n),
        "central_difference_": (lambda: ops.central_difference_(out, y, x, 0, 1e-6, 0.0), 24 * n),
        "decompress_": (lambda: ops.decompress_(out, x, y, index, index), 32 * n),
        "project_entries_": (lambda: ops.project_entries_(out, noise, x, index, index, y), 64 * n),
        "richardson_": (lambda: ops.richardson_(out, noise, x, y, z, y, z, 1e-6, 2.0**-52), 64 * n),
        "direction_": (lambda: ops.direction_(out, 0, 0, 0, False), 8 * n),
        "dots, 3 rows": (lambda: ops.dots(rows, x), 32 * n),
        "compare": (lambda: ops.compare(left, right, 1e-5, 1e-3, False, False), 16 * side * side),
        "compare, transposed": (lambda: ops.compare(left, right.t(), 1e-5, 1e-3, False, False), 16 * side * side),
    }
    copied = 0.0
    for name, (call, size) in calls.items():
        bandwidth = size / median_seconds(call, device, rounds)
        copied = copied or bandwidth
        yield {"kernel": name, "bytes": size, "bytes_per_second": bandwidth, "of_copy": bandwidth / copied}


def table(
    rows: list[dict[str, Any]], replayed: list[dict[str, Any]], found: list[dict[str, Any]], summary: dict[str, Any]
) -> str:
    lines = ["| check | mode | n x m | torch, ms | fastgrad, ms | ratio | evaluations | VJPs |", "| --- " * 8 + "|"]
    for row in rows:
        times = f"{1e3 * row['baseline']:.1f} | {1e3 * row['candidate']:.1f} | {row['ratio']:.1f}"
        size = f"{row['n']} x {row['m']}"
        lines.append(f"| {row['name']} | {row['mode']} | {size} | {times} | {row['evaluations']} | {row['vjps']} |")
    lines += ["", "| 1,000 of | one by one, ms | replayed, ms | ratio |", "| --- " * 4 + "|"]
    for row in replayed:
        times = f"{1e3 * row['baseline']:.1f} | {1e3 * row['candidate']:.1f}"
        lines.append(f"| {row['name'].split(',')[0]} | {times} | {row['ratio']:.1f} |")
    lines += ["", "| operator | GB/s | of a copy |", "| --- " * 3 + "|"]
    lines += [f"| {row['kernel']} | {row['bytes_per_second'] / 1e9:.0f} | {row['of_copy']:.2f} |" for row in found]
    lines += ["", *(f"{name}: {value}" for name, value in summary.items()), ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds a case, where rounds take longer")
    parser.add_argument("--size", type=int, default=1 << 26, help="float64 numbers for the bandwidths")
    parser.add_argument("--no-large", action="store_true", help="leave out the large operators")
    parser.add_argument("--at-least", type=float, default=0.0, help="the ratio to torch's slow mode")
    parser.add_argument("--name", default="")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench_cuda: no CUDA device here", file=sys.stderr)
        return 2
    # For both checkers: torch's fails if a convolution adds in another order in the second run.
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    label = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    name = options.name or re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
    rows = list(checks(CASES, ("slow", "fast"), device, options.rounds, options.budget))
    large = list(checks(LARGE, ("slow",), device, 1, options.budget)) if not options.no_large else []
    replayed = list(replays(device, options.rounds, options.budget)) if device.type == "cuda" else []
    found = list(kernels(device, options.size, 20))
    ratio = {mode: geometric_mean(row["ratio"] for row in rows if row["mode"] == mode) for mode in ("slow", "fast")}
    summary = {
        "device": label,
        "torch slow / fastgrad exact": ratio["slow"],
        "torch slow / fastgrad exact, large": geometric_mean(row["ratio"] for row in large),
        "torch fast / fastgrad fast": ratio["fast"],
        "CUDA": torch.version.cuda,
    }
    path = write(name, summary, rows + large + replayed + found)
    text = table(rows + large, replayed, found, summary)
    (RESULTS / f"{name}.md").write_text(text)
    print(text)
    print(path)
    if ratio["slow"] < options.at_least:
        print(
            f"bench_cuda: {ratio['slow']:.2f} times torch's speed, at least {options.at_least} asked", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
