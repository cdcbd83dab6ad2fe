"""A check whose func is costly, on one rank and on two: seconds, and the part that more ranks do not reduce.

    python -m benchmarks.bench_sharded                  3000 x 3000, 10 ms a call, two ranks; ten minutes
    python -m benchmarks.bench_sharded --size 300       seconds

The two run in turn, and the shortest time of each counts. Reports must be equal. The CPU time is that of the busiest
rank: on a machine with an idle core for each rank, the check would take this time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import fastgrad

ROOT = Path(__file__).parents[1]
STEP = 0.5
"""The step of the flow."""


class Flow(torch.autograd.Function):
    """Steps of y + STEP sin(k * y), by FFTs in numpy: every output depends on every input; the call is one of Python's.

    transform: the transform of k, shape (size // 2 + 1,).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, transform: Any, steps: int) -> Tensor:
        y, ctx.sums = x.detach().numpy().copy(), []
        for _ in range(steps):
            ctx.sums.append(np.fft.irfft(np.fft.rfft(y) * transform, y.size))
            y = y + STEP / steps * np.sin(ctx.sums[-1])
        ctx.transform = transform
        return torch.from_numpy(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        g = grad.numpy().copy()
        for found in reversed(ctx.sums):
            turned = np.fft.rfft(STEP / len(ctx.sums) * np.cos(found) * g) * np.conj(ctx.transform)
            g = g + np.fft.irfft(turned, g.size)
        return torch.from_numpy(g), None, None


def take_part(out: Path, size: int, steps: int, engine: str) -> None:
    """Runs one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    numbers = np.random.default_rng(0)
    transform = np.fft.rfft(numbers.standard_normal(size) / size**0.5)
    x = torch.from_numpy(numbers.standard_normal(size)).requires_grad_()
    dist.barrier()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    report = fastgrad.check(lambda x: Flow.apply(x, transform, steps), x, engine=engine, group=dist.group.WORLD)
    seconds, own = time.perf_counter() - begin, time.process_time() - cpu_begin
    of_ranks: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    if dist.get_rank() == 0:
        found = {"seconds": seconds, "report": str(report.pairs) + str(report.certificates), "phases": report.phases}
        found |= {"cpu": of_ranks, "evaluations": report.evaluations, "vjps": report.vjps, "plan": report.plan.reason}
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def run(ranks: int, size: int, steps: int, engine: str) -> dict[str, Any]:
    """The result that rank 0 measures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", "benchmarks.bench_sharded", "--rank", str(out), "--size", str(size), "--steps", str(steps)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "--engine", engine], cwd=ROOT, env=environment, check=True, capture_output=True)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def steps_for(size: int, seconds: float) -> int:
    """The number of steps that take this many seconds on an idle machine, from the shortest of some calls."""
    x, transform, best = torch.ones(size, dtype=torch.float64), np.ones(size // 2 + 1), float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        Flow.apply(x, transform, 10)
        best = min(best, (time.perf_counter() - begin) / 10)
    return max(1, round(seconds / best))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=3000)
    parser.add_argument("--milliseconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rank", type=Path)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    if options.rank is not None:
        take_part(options.rank, options.size, options.steps, options.engine)
        return
    steps = options.steps or steps_for(options.size, options.milliseconds / 1e3)
    best: dict[int, dict[str, Any]] = {}
    for _ in range(options.repeats):
        for ranks in options.ranks:
            found = run(ranks, options.size, steps, options.engine)
            cpu = ", ".join(f"{own:.2f}" for own in found["cpu"])
            print(f"{ranks} ranks: {found['seconds']:.2f} s, of the CPU: {cpu} s", flush=True)
            best[ranks] = min(best.get(ranks, found), found, key=lambda one: one["seconds"])
    assert len({one["report"] for one in best.values()}) == 1, "reports differ"
    first = best[options.ranks[0]]
    for ranks, found in best.items():
        gain, own_gain = first["seconds"] / found["seconds"], max(first["cpu"]) / max(found["cpu"])
        print(f"{ranks} ranks, best: {found['seconds']:.2f} s, {gain:.2f} times as fast; by CPU time {own_gain:.2f}")
        print("  " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found["phases"].items()))
        print(f"  {found['evaluations']} evaluations, {found['vjps']} VJPs; {found['plan']}")


if __name__ == "__main__":
    main()
