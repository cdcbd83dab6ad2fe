"""Registers, spills and the expected bandwidth of each CUDA kernel, read from the compiled code without a device.

    python -m benchmarks.cuda_registers [--page]

Compiles the kernels with nvcc for sm_90, and writes results/cuda-registers.json and a table in docs/gpu-ci.md; `--page`
writes the table again from the kept result.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import RESULTS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gpu-ci.md"
RESULT = RESULTS / "cuda-registers.json"
ON_A_DEVICE = RESULTS / "nvidia-h200.json"
BEGIN, END = "<!-- registers: begin -->\n", "<!-- registers: end -->\n"

THREADS, BLOCK = 2048, 256
"""Threads that a multiprocessor of sm_90 holds, and threads of one block of these kernels."""

REGISTERS = 65536
"""32-bit registers of a multiprocessor (CUDA programming guide, specifications for each compute capability)."""

BYTES_PER_CYCLE = 4.8e12 / 132 / 1.98e9
"""Memory bandwidth per multiprocessor of an H200: 4.8 TB/s, 132 multiprocessors, 1.98 GHz (NVIDIA's data sheet)."""

ISSUED_PER_CYCLE, DOUBLES_PER_CYCLE = 4, 2
"""Instructions of warps that a multiprocessor of sm_90 begins in a cycle: four schedulers, and 64 lanes of float64."""

ELEMENT_BYTES = {
    "compare_kernel<false>": (16, 16),
    "compare_kernel<true>": (32, 32),
    "chunks_kernel": (16, 16),
    "dots_kernel": (16, 16),
    "Decompress": (40, 40),
    "Richardson": (64, 64),
    "central_difference_kernel<double>": (24, 24),
    "Realize<double>": (24, 24),
    "Displace<double>": (24, 24),
    "PerturbCoordinates<double>": (24, 24),
    "Direction": (8, 8),
    "Unflatten<double>": (16, 16),
    "Flatten<double>": (16, 16),
    **{f"project_rows_kernel<{k}>": (8 * (1 + k), 8) for k in (1, 2, 4, 8)},  # weights stay in the cache
}
"""Bytes per float64 element of each kernel: those that its code reads and writes, and those that memory moves."""

MEASURED = {
    "compare_kernel<false>": "compare",
    "dots_kernel": "dots, 3 rows",
    "Decompress": "decompress_",
    "Richardson": "richardson_",
    "central_difference_kernel<double>": "central_difference_",
    "Displace<double>": "displace_",
    "PerturbCoordinates<double>": "perturb_coordinates_, all",
    "Direction": "direction_",
    "Flatten<double>": "flatten_",
}
"""The row of bench_cuda's result that measures a kernel."""

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)([^;]*);")
WIDTHS = {"64": 8, "128": 16, "U8": 1, "S8": 1, "U16": 2, "S16": 2}


def compiled(source: Path, folder: Path) -> tuple[str, str]:
    """Output of ptxas for a file's kernels, and their machine code; names as in the source."""
    include = Path(torch.__file__).parent / "include"
    stub = folder / "c10" / "cuda" / "impl"  # a CPU build of torch lacks this generated header
    stub.mkdir(parents=True, exist_ok=True)
    (stub / "cuda_cmake_macros.h").write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    where = [flag for path in (include, include / "torch/csrc/api/include", folder) for flag in ("-isystem", str(path))]
    target = folder / f"{source.stem}.cubin"
    options = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-fmad=false", "-arch=sm_90", "-Xptxas", "-v", "-cubin"]
    said = _run("nvcc", *options, f"-I{ROOT / 'csrc'}", *where, str(source), "-o", str(target))
    code = _run("cuobjdump", "-sass", str(target))
    return _run("c++filt", text=said), _run("c++filt", text=code)


def _run(*command: str, text: str | None = None) -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SystemExit(f"cuda_registers needs nvcc, cuobjdump and c++filt, but {command[0]} was not found.") from None
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {done.stderr or done.stdout}")
    return done.stdout + done.stderr


def resources(said: str) -> Iterable[tuple[str, dict[str, int]]]:
    """Kernels with their registers, bytes of spills and of shared memory."""
    for part in said.split("Compiling entry function '")[1:]:
        numbers = {
            "registers": r"Used (\d+) registers",
            "spilled": r"(\d+) bytes spill stores",
            "shared": r"(\d+) bytes smem",
        }
        found = {name: re.search(pattern, part) for name, pattern in numbers.items()}
        yield part.partition("'")[0], {name: int(match[1]) if match else 0 for name, match in found.items()}


def loops(code: str) -> Iterable[tuple[str, dict[str, int]]]:
    """Kernels with the inner loop that moves most bytes: the most that an iteration of a thread executes and moves."""
    for part in code.split("Function : ")[1:]:
        lines = [match for line in part.splitlines() if (match := INSTRUCTION.match(line))]
        addresses = [int(line[1], 16) for line in lines]
        jumps = [
            (addresses.index(target), k)
            for k, line in enumerate(lines)
            if line[2].startswith("BRA") and (to := re.search(r"0x([0-9a-f]+)", line[3]))
            if (target := int(to[1], 16)) in addresses and target < addresses[k]
        ]
        inner = [
            jump for jump in jumps if not any(jump[0] <= k < m <= jump[1] for k, m in jumps if (k, m) != jump)
        ] or [(0, len(lines) - 1)]
        bodies = [[line[2] for line in lines[first : last + 1]] for first, last in inner]
        body = max(bodies, key=_bytes_moved)
        doubles = sum(name.startswith(("DADD", "DMUL", "DFMA", "DSETP", "F2F.F64")) for name in body)
        yield part.partition("\n")[0], {"instructions": len(body), "float64": doubles, "bytes": _bytes_moved(body)}


def _bytes_moved(body: list[str]) -> int:
    return sum(_width(name) for name in body if name.startswith(("LDG", "STG", "RED", "ATOMG")))


def _width(name: str) -> int:
    return next((size for mark, size in WIDTHS.items() if mark in name.split(".")), 4)


def short(name: str) -> str:
    """The name of a kernel's functor or, if it has none, of the kernel, without namespaces."""
    name = re.sub(r"fastgrad::|cuda::|\(anonymous namespace\)::", "", name)
    functor = re.search(r"(?:elementwise|components)_kernel<(\w+(?:<[\w ]+>)?)", name)
    return functor[1] if functor else re.sub(r"^void |\(.*", "", name)


def measured() -> list[dict[str, Any]]:
    """All kernels."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for source in sorted((ROOT / "csrc" / "cuda").glob("*.cu")):
            said, code = compiled(source, Path(folder))
            bodies = {short(name): body for name, body in loops(code)}
            for name, numbers in resources(said):
                body = bodies[short(name)]
                held = REGISTERS // (-(-max(numbers["registers"], 1) // 8) * 8 * BLOCK) * BLOCK
                own = {"kernel": short(name), **numbers, "occupancy": min(held, THREADS) / THREADS, **body}
                rows.append({**own, **(bandwidth(body, *ELEMENT_BYTES[own["kernel"]]) if _is_in(own) else {})})
    return rows


def _is_in(row: dict[str, Any]) -> bool:
    return row["kernel"] in ELEMENT_BYTES and row["bytes"] > 0


def bandwidth(body: dict[str, int], accessed: int, moved: int) -> dict[str, float]:
    """Instructions, float64 instructions and memory traffic per element; and the share of a copy's bandwidth."""
    elements = body["bytes"] / accessed
    memory = 32 * elements * moved / BYTES_PER_CYCLE
    issue = max(body["instructions"] / ISSUED_PER_CYCLE, body["float64"] / DOUBLES_PER_CYCLE)
    return {
        "element_instructions": body["instructions"] / elements,
        "element_float64": body["float64"] / elements,
        "element_bytes": moved,
        "bandwidth": memory / max(memory, issue),
    }


def table(result: dict[str, Any]) -> str:
    """The section of the page."""
    spilled = sum(row["spilled"] for row in result["rows"])
    head = (
        f"The table lists the kernels for `float64`, as {result['compiler']} compiles them for sm_90 "
        f"(`python -m benchmarks.cuda_registers`). All {len(result['rows'])} kernels, including those for lower "
        f"dtypes, spill {spilled} bytes of registers in total."
    )
    columns = (
        '"instructions": instructions per element in the inner loop, in all its branches;',
        '"of float64": how many of these compute in float64;',
        '"bytes": the memory traffic per element;',
        '"predicted": the bandwidth relative to a copy, computed from the number of instructions, without latencies;',
        '"measured": this bandwidth on an H200 (`benchmarks/results/nvidia-h200.json`).',
    )
    measured = {row["kernel"]: row["of_copy"] for row in json.loads(ON_A_DEVICE.read_text())["rows"] if "kernel" in row}
    lines = [
        *textwrap.wrap(head, 128),
        "",
        *(f"* {column}" for column in columns),
        "",
        "| kernel | registers | shared bytes | occupancy | instructions | of float64 | bytes | predicted | measured |",
        "| --- " * 9 + "|",
    ]
    for row in result["rows"]:
        if any(dtype in row["kernel"] for dtype in ("float>", "Float16", "BFloat16")):
            continue
        element = (
            f"{row['element_instructions']:.0f} | {row['element_float64']:.0f} | {row['element_bytes']} | "
            f"{row['bandwidth']:.2f}"
            if "bandwidth" in row
            else "- | - | - | -"
        )
        own = measured.get(MEASURED.get(row["kernel"], ""))
        found = "-" if own is None else f"{own:.2f}"
        fields = row["registers"], row["shared"], f"{row['occupancy']:.2f}", element, found
        lines.append(f"| `{row['kernel']}` | {' | '.join(map(str, fields))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help="write the table again from the kept result")
    if not parser.parse_args().page:
        compiler = re.search(r"release ([\d.]+)", _run("nvcc", "--version"))
        result = {"compiler": f"nvcc {compiler[1] if compiler else '?'}", "rows": measured()}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    text = table(json.loads(RESULT.read_text()))
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(before + BEGIN + "\n" + text + "\n" + END + after)
    print(text)


if __name__ == "__main__":
    main()
