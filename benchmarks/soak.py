"""Tests whether memory grows: resident memory after thousands of checks of every kind in one process.

Exits with 1 if it grew by more than --allowed MiB after the warm-up.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastgrad


class Scaled(torch.autograd.Function):
    """The sine; its gradient is `factor` times the right one. If factor is None, backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        if ctx.factor is None:
            raise ArithmeticError("planted in backward")
        return ctx.factor * grad_output * ctx.saved_tensors[0].cos(), None


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(shape, dtype=dtype).requires_grad_()


def fail(check: Callable[[], Any], error: type[Exception]) -> None:
    """A check that must raise."""
    try:
        check()
    except error:
        return
    raise AssertionError(f"a check that had to raise {error.__name__} did not")


def raising_later(call: int) -> Callable[[Tensor], Tensor]:
    """The sine; raises an ArithmeticError from the given call on."""
    calls = iter(range(call))

    def func(x: Tensor) -> Tensor:
        if next(calls, None) is None:
            raise ArithmeticError("planted in func")
        return x.sin()

    return func


def without_gradients() -> None:
    with torch.no_grad():
        assert not fastgrad.gradcheck(torch.sin, leaf(3), raise_exception=False)


# New tensors and new functions in every check, so that leaks add up.
MIX: dict[str, Callable[[], Any]] = {
    "passes": lambda: fastgrad.gradcheck(lambda x: x.sin(), leaf(4, 5)),
    "complex": lambda: fastgrad.gradcheck(torch.mul, (leaf(3, dtype=torch.complex128), leaf(3))),
    "several inputs": lambda: fastgrad.gradcheck(torch.addmm, (leaf(2, 4), leaf(2, 3), leaf(3, 4))),
    "large": lambda: fastgrad.gradcheck(torch.sum, leaf(64, 4)),
    "forward mode": lambda: fastgrad.gradcheck(torch.sin, leaf(4), check_forward_ad=True),
    "batched": lambda: fastgrad.gradcheck(
        torch.sin, leaf(4), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    ),
    "second order": lambda: fastgrad.gradgradcheck(lambda x: x.sin(), leaf(4)),
    "forward over reverse": lambda: fastgrad.gradgradcheck(torch.mul, (leaf(2), leaf(2)), check_fwd_over_rev=True),
    "fails": lambda: fail(lambda: fastgrad.gradcheck(Scaled.apply, (leaf(4), 2.0)), fastgrad.GradcheckError),
    "returns False": lambda: fastgrad.gradcheck(Scaled.apply, (leaf(4), 2.0), raise_exception=False),
    "func raises": lambda: fail(lambda: fastgrad.gradcheck(raising_later(6), leaf(4)), ArithmeticError),
    "backward raises": lambda: fail(lambda: fastgrad.gradcheck(Scaled.apply, (leaf(4), None)), ArithmeticError),
    "bad argument": lambda: fail(lambda: fastgrad.gradcheck(torch.sin, leaf(4), eps=-1.0), ValueError),
    "without gradients": without_gradients,
}


def resident() -> float:
    """Memory of this process in use, in MiB (Linux, glibc)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory within the heap would hide growth
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checks", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=500, help="checks between two samples; the warm-up is as long")
    parser.add_argument("--allowed", type=float, default=1.0, help="MiB by which memory may grow")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mix = cycle(MIX.values())

    def run(checks: int) -> float:
        for check in islice(mix, checks):
            check()
        return resident()

    begin = time.perf_counter()
    first = run(options.every)
    print(f"checks   resident MiB   since the warm-up of {options.every}")
    grown = 0.0
    for done in range(options.every, options.checks + 1, options.every):
        now = run(options.every)
        grown = now - first
        print(f"{done:6d}   {now:12.1f}   {grown:+.1f}", flush=True)
    print(
        f"{options.checks} checks of {len(MIX)} kinds, torch {torch.__version__}, {time.perf_counter() - begin:.0f} s"
    )
    if grown > options.allowed:
        sys.exit(f"resident memory grew by {grown:.1f} MiB, allowed are {options.allowed:g}")


if __name__ == "__main__":
    main()
