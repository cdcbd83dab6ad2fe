"""`python -m fastgrad bench`: compares verdicts and times with torch's checker for a few operators."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgrad.testing.patch import Check, ask_both

ROUNDS = 5


Row = dict[str, Any]
"""One operator in one mode: both verdicts, both median times in seconds, and how often both checkers were timed."""


def rows(seconds: float, device: str) -> Iterator[Row]:
    """Times both checkers in turn on the operators, for about `seconds` seconds in all."""
    cases = _operators(device)
    for number, (name, func, inputs) in enumerate(cases):
        for fast_mode in (False, True):
            remaining = 2 * (len(cases) - number) - fast_mode
            start = time.perf_counter()
            row = _measured(name, func, inputs, fast_mode, seconds / remaining)
            seconds -= time.perf_counter() - start
            yield row


def _measured(name: str, func: Callable[..., Any], inputs: tuple[Tensor, ...], fast_mode: bool, budget: float) -> Row:
    end = time.perf_counter() + budget
    ask_both("gradcheck", (func, inputs), {"fast_mode": fast_mode})  # not timed: imports, first runs of kernels
    checks: list[Check] = []
    while not checks or (len(checks) < ROUNDS and time.perf_counter() < end):
        checks.append(ask_both("gradcheck", (func, inputs), {"fast_mode": fast_mode}))
    check = checks[0]
    assert check.torch is not None
    report = check.report
    seconds = statistics.median(check.ours.seconds for check in checks)
    torch_seconds = statistics.median(check.torch.seconds for check in checks if check.torch)
    return {
        "operator": name,
        "fast_mode": fast_mode,
        "n": 0 if report is None else report.n,
        "m": 0 if report is None else report.m,
        "engine": report.plan.engine if report is not None and report.plan else "none",
        "verdict": check.ours.verdict,
        "torch_verdict": check.torch.verdict,
        "seconds": seconds,
        "torch_seconds": torch_seconds,
        "rounds": len(checks),
        "ratio": torch_seconds / seconds,
    }


def printed(measured: Iterable[Row]) -> list[Row]:
    """Prints each row of the table once it is measured; returns the rows."""
    print(f"{'operator':<12} {'mode':<5} {'n':>6} {'m':>6}  {'engine':<11}{'verdict':<8}{'ms':>9}", end="")
    print(f"   {'torch':<8}{'ms':>10} {'ratio':>8}")
    done = []
    for row in measured:
        done.append(row)
        print(
            f"{row['operator']:<12} {'fast' if row['fast_mode'] else 'slow':<5} {row['n']:>6} {row['m']:>6}  "
            f"{row['engine']:<11}{row['verdict']:<8}{row['seconds'] * 1e3:>9.1f}   {row['torch_verdict']:<8}"
            f"{row['torch_seconds'] * 1e3:>10.1f} {row['ratio']:>7.2f}x",
            flush=True,
        )
    for mode, mean in means(done).items():
        print(f"torch's time divided by fastgrad's in {mode} mode: {mean:.2g} (geometric mean)")
    print(
        "torch's fast mode compares one number per pair of input and output; fastgrad's fast mode finds single "
        "wrong entries"
    )
    return done


def means(measured: Sequence[Row]) -> dict[str, float]:
    """The geometric means of torch's time divided by fastgrad's, by mode."""
    return {
        mode: statistics.geometric_mean(row["ratio"] for row in measured if row["fast_mode"] is (mode == "fast"))
        for mode in ("slow", "fast")
    }


def document(measured: Sequence[Row], device: str) -> dict[str, Any]:
    """The table as JSON fields."""
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "device": device,
        "rows": list(measured),
        "geometric means": means(measured),
    }


def _operators(device: str) -> list[tuple[str, Callable[..., Any], tuple[Tensor, ...]]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator, device="cpu").to(device).requires_grad_()

    index = torch.randint(64, (96,), generator=generator, device="cpu").to(device)
    return [
        ("sin, small", torch.sin, (normal(3, 4),)),
        ("sin", torch.sin, (normal(32, 32),)),
        ("layer norm", lambda x, w, b: F.layer_norm(x, (16,), w, b), (normal(24, 16), normal(16), normal(16))),
        ("conv2d", F.conv2d, (normal(1, 2, 10, 10), normal(3, 2, 3, 3))),
        ("matmul", torch.matmul, (normal(12, 16), normal(16, 8))),
        ("softmax", lambda x: torch.softmax(x, -1), (normal(24, 16),)),
        ("gather rows", lambda x: x[index], (normal(64, 6),)),
        ("cumsum", lambda x: x.cumsum(0), (normal(200),)),
    ]
