"""Paired timing in one process, and the environment that a result must record."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import fastgrad

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Pair:
    """Seconds of two calls that were timed in turn: medians and spreads (min, max)."""

    baseline: float
    candidate: float
    baseline_spread: tuple[float, float]
    candidate_spread: tuple[float, float]
    rounds: int

    @property
    def ratio(self) -> float:
        """The ratio of the medians: how many times as fast the candidate is."""
        return self.baseline / self.candidate


def time_pair(baseline: Callable[[], Any], candidate: Callable[[], Any], rounds: int, budget: float) -> Pair:
    """Times two calls in turn, after one warm-up of each, for up to `rounds` rounds or `budget` seconds."""
    baseline()
    candidate()
    seconds: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + budget
    while len(seconds[0]) < rounds and (not seconds[0] or time.perf_counter() < end):
        for call, found in zip((baseline, candidate), seconds, strict=True):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    left, right = seconds
    return Pair(
        statistics.median(left),
        statistics.median(right),
        (min(left), max(left)),
        (min(right), max(right)),
        len(left),
    )


def time_alone(call: Callable[[], Any], rounds: int, budget: float) -> list[float]:
    """Seconds of each of up to `rounds` calls, as many as `budget` seconds allow, at least one."""
    seconds: list[float] = []
    while not seconds or (len(seconds) < rounds and sum(seconds) + seconds[-1] < budget):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


class PeakMemory:
    """A context that measures the peak resident memory of this process above that at entry (Linux, glibc)."""

    mib = 0.0

    def __enter__(self) -> PeakMemory:
        """Resets the peak."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # free memory within the heap would hide growth
        self._before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        Path("/proc/self/clear_refs").write_text("5")
        return self

    def __exit__(self, *_: object) -> None:
        """Reads the peak."""
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        self.mib = (peak - self._before) / 2**20


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean; NaN if there are no values."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def environment() -> dict[str, Any]:
    """Machine, versions and peak memory so far."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "fastgrad": fastgrad.__version__,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def write(name: str, summary: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """Writes a result as JSON under results/."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), "summary": summary, "rows": rows}, indent=1) + "\n")
    return path


def pair_row(pair: Pair) -> dict[str, Any]:
    """A pair as JSON fields."""
    return {**asdict(pair), "ratio": pair.ratio}
