"""Verdicts on a CUDA device, simulated or real, against those on the CPU, over torch's operator samples.

`make sweep-pretended-cuda`; with --real, on a machine with a GPU. Each part of the operators has its own process, since
the simulated device is loaded before torch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

MAX_ENTRIES = {"pretended": 40_000, "real": 400_000}
"""Largest size of the checked Jacobians: a call on the simulated device costs 50 times as much as on the CPU."""

UNLIKE = {
    "nn.functional.scaled_dot_product_attention": "has other kernels on CUDA, which the CPU's stand for in part",
    "tensor_split": "takes indices on the CPU only, and samples are moved whole",
}
"""Operators that are left out, and why."""


def compare_operator(
    op: Any, dtype: Any, limit: int, fast_mode: bool, most_entries: int = MAX_ENTRIES["pretended"]
) -> list[tuple[str, str, str]]:
    """(sample, verdict on the CPU, on the device) of samples of an operator; with messages where they differ."""
    import fastgrad
    from benchmarks.cases import entries, operator_cases
    from tests.parity.sweep import verdict

    found = []
    for place, moved in zip(operator_cases(op, dtype, limit), operator_cases(op, dtype, limit, "cuda:0"), strict=True):
        if entries(place) > most_entries:
            continue
        cpu, device = (verdict(fastgrad.gradcheck, case, fast_mode=fast_mode) for case in (place, moved))
        differ = cpu[0] != device[0]
        found.append((place.name, *(f"{said}: {message}" if differ else said for said, message in (cpu, device))))
    return found


def sweep(part: int, parts: int, limit: int, dtypes: list[str], match: str, most_entries: int) -> Counter[str]:
    import torch

    from benchmarks.cases import operators

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for dtype in dtypes:
        for op in operators(getattr(torch, dtype))[part::parts]:
            if match not in op.name or op.name in UNLIKE:
                continue
            for fast_mode in (False, True):
                for name, cpu, cuda in compare_operator(op, getattr(torch, dtype), limit, fast_mode, most_entries):
                    counts["samples"] += 1
                    if cpu != cuda:
                        counts["different"] += 1
                        print(f"{dtype} {name} fast_mode={fast_mode}: CPU {cpu!r}, device {cuda!r}", flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=2, help="samples an operator")
    parser.add_argument("--dtypes", nargs="+", default=["float64", "complex128"])
    parser.add_argument("--match", default="", help="only operators whose name contains this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--part", type=int, help="of so many jobs, which one: in a process of its own")
    parser.add_argument("--real", action="store_true", help="the GPU of this machine instead of the simulated device")
    options = parser.parse_args()
    if options.part is None:
        command = [sys.executable, "-m", "tests.pretended_cuda.sweep", *sys.argv[1:]]
        children = [subprocess.Popen([*command, "--part", str(part)]) for part in range(options.jobs)]
        return max([child.wait() for child in children])
    if not options.real:
        from tests.pretended_cuda import plugin  # noqa: F401  (before torch)

    most_entries = MAX_ENTRIES["real" if options.real else "pretended"]
    counts = sweep(options.part, options.jobs, options.limit, options.dtypes, options.match, most_entries)
    print(f"{counts['samples']} samples, {counts['different']} with another verdict on the device", flush=True)
    return 1 if counts["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
