"""`python -m fastgrad doctor`: versions, devices and threads, a self-test, and what is missing."""

from __future__ import annotations

import json
import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastgrad._version import __version__
from fastgrad.core import native
from fastgrad.testing.patch import ask
from fastgrad.tools.demo import ForgottenFactor, SquaredReLU

OPTIONAL = {
    "tqdm": "the progress bar of long checks",
    "matplotlib": "figures in reports",
    "pytest": "pytest --fastgrad",
}


def diagnosis() -> dict[str, Any]:
    """The diagnosis as plain data: versions, devices, self-tests and missing components."""
    threads = torch.get_num_threads()
    devices = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return {
        "fastgrad": __version__,
        "location": str(Path(__file__).parents[1]),
        "path": "native" if native.IS_NATIVE else "plain Python: the same verdicts, slower",
        "built against": f"torch {native.BUILT_AGAINST}, {_cuda(native.CUDA)}" if native.IS_NATIVE else "nothing",
        "torch": f"{torch.__version__}, {_cuda(torch.version.cuda)}",
        "python": f"{platform.python_version()} ({sys.executable})",
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpu": f"{torch.backends.cpu.get_cpu_capability()}, {threads} thread{'' if threads == 1 else 's'}"
        f"{'' if _has_openmp() else ', torch without OpenMP'}",
        "devices": {device: _device_name(device) for device in devices},
        "self-test": [row for device in devices for row in _self_test(device)],
        "missing": _missing(),
    }


def main(as_json: bool) -> int:
    """Prints the diagnosis; returns 0 if every self-test had the expected verdict."""
    found = diagnosis()
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print(found)
    return 0 if all(row["right"] for row in found["self-test"]) else 1


def _print(found: dict[str, Any]) -> None:
    for name, value in found.items():
        if isinstance(value, str):
            print(f"{name:<14} {value}")
    for device, name in found["devices"].items():
        print(f"{'device':<14} {device}: {name}")
    for row in found["self-test"]:
        line = "as expected" if row["right"] else "NOT AS EXPECTED"
        print(f"{'self-test':<14} {row['device']}, {row['engine']}, {row['operator']}: {row['verdict']}, {line}")
    for line in found["missing"] or ["nothing"]:
        print(f"{'missing':<14} {line}")


def _self_test(device: str) -> list[dict[str, Any]]:
    """Checks a right operator and one with a missing factor, with each engine."""
    generator = torch.Generator().manual_seed(0)
    x: Tensor = torch.randn(20, 10, dtype=torch.float64, generator=generator, device="cpu").to(device).requires_grad_()
    rows = []
    for engine in ("dense", "compressed", "sketch"):
        for operator, expected in ((SquaredReLU, "passed"), (ForgottenFactor, "failed")):
            check = ask("gradcheck", (operator.apply, x), {"engine": engine, "fast_mode": engine == "sketch"})
            error, report = check.ours.error, check.report
            verdict = f"{type(error).__name__}: {error}" if report is None else report.verdict
            name = "right backward" if expected == "passed" else "wrong backward"
            rows.append(
                {"device": device, "engine": engine, "operator": name, "verdict": verdict, "right": verdict == expected}
            )
    return rows


def _cuda(version: str | None) -> str:
    return f"CUDA {version}" if version else "no CUDA"


def _device_name(device: str) -> str:
    if device == "cpu":
        return platform.processor() or platform.machine()
    properties = torch.cuda.get_device_properties(device)
    capability = f"sm_{properties.major}{properties.minor}"
    return f"{properties.name}, {capability}, {properties.total_memory / 2**30:.0f} GiB"


def _missing() -> list[str]:
    lines = [f"{name}, for {what}: pip install {name}" for name, what in OPTIONAL.items() if find_spec(name) is None]
    if not native.IS_NATIVE:
        lines.append(f"fastgrad's compiled module: {native.HOW_TO_BUILD}")
    elif torch.version.cuda is not None and native.CUDA is None:
        nvcc = "nvcc" if which("nvcc") else "nvcc, which is not on the PATH"
        lines.append(f"fastgrad's CUDA kernels, though torch has CUDA: rebuild with FASTGRAD_CUDA=1 and {nvcc}")
    if torch.version.cuda is not None and torch.cuda.device_count() == 0:
        lines.append("a CUDA device that torch can use")
    if not _has_openmp():
        lines.append("OpenMP in torch: all operators run on one thread")
    return lines


def _has_openmp() -> bool:
    return bool(torch.backends.openmp.is_available())  # type: ignore[no-untyped-call]
