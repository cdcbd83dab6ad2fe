"""Checks in float32, bfloat16 and float16: which right functions are rejected, and which planted errors are found.

Operators are those of torch's operator database, against themselves in double precision. Samples are numbered among
those with 2 to 20,000 elements; torch's seed is a checksum of name and number. The factors of `fastgrad.lowprecision`
were chosen on sample 0, and defects of the implementation were found on samples 0 and 1. What is reported is the
held-out part: sample 2 (the default). Where the database has fewer, the last one is drawn again by another seed.

Errors are planted into single entries of rows of the Jacobian, up to 16 rows per sample: into each entry of at least
a hundredth of the largest of its row. An entry counts as found if the error exceeds the allowed error after the second
look, which every such row gets here. A whole gradient scaled by 1.01 counts as found if the mean over its entries, of
20 or more, shows it. For comparison, on the same VJPs: torch.testing.assert_close at its default tolerances for the
dtype; and the rule of tests of fused attention kernels, by which the largest error may be twice that of the same
operators in the low dtype (here: with every result rounded to it).

The kernels are those of tests/planted/kernels.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import statistics
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import fastgrad
from benchmarks.cases import operators
from benchmarks.measure import RESULTS
from fastgrad.lowprecision.allowance import FACTOR, allowed
from fastgrad.lowprecision.check import LowerCheck
from fastgrad.lowprecision.comparison import SIGNIFICANT, Comparison
from fastgrad.lowprecision.reference import RandomState, Reference
from fastgrad.lowprecision.references import Doubled
from fastgrad.report.settings import Settings
from tests.planted.kernels import GENERAL, KERNELS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PLANTED = {"float32": (1e-3, -1.0), "bfloat16": (0.05, 0.1, -1.0), "float16": (0.01, 0.05, -1.0)}
"""Relative errors of single entries; -1 makes them zero."""

CLOSE = {"float32": (1.3e-6, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float16": (1e-3, 1e-5)}
"""rtol and atol of torch.testing.assert_close."""

ROWS = 16
LARGEST = 20_000


class OutOfTimeError(BaseException):
    """The time limit of a sample was reached."""


def sample_cases(op: Any, dtype: torch.dtype, numbers: range) -> Iterator[tuple[str, Any, Any, tuple[Tensor, ...]]]:
    """Name, function, reference and inputs of held-out samples; numbers count the usable samples."""
    for number in numbers:
        torch.manual_seed(zlib.crc32(f"{op.formatted_name} {number}".encode()) % 2**31)
        random.seed(number)
        samples = itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=True), 24)
        usable = [made for made in (_case(op, sample) for sample in samples) if made is not None]
        if len(usable) > number:
            yield f"{op.formatted_name}[{number}]", *usable[number]
        elif usable:
            yield f"{op.formatted_name}[{len(usable) - 1}, seed {number}]", *usable[-1]


def _case(op: Any, sample: Any) -> Any:
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    inputs = tuple(leaves[i] for i in places)
    count = sum(value.numel() for value in inputs)
    if not 2 <= count <= LARGEST or any(value.layout is not torch.strided for value in inputs):
        return None

    def function(own: list[Any]) -> Any:
        def func(*values: Tensor) -> Any:
            filled = list(own)
            for place, value in zip(places, values, strict=True):
                filled[place] = value
            args, kwargs = pytree.tree_unflatten(filled, spec)
            result = op.gradcheck_wrapper(op.op, *args, **kwargs)
            return sample.output_process_fn_grad(result) if sample.output_process_fn_grad is not None else result

        return func

    doubled = Doubled(None)
    return function(leaves), function([doubled(leaf) for leaf in leaves]), inputs


def operator_row(name: str, dtype: str, func: Any, reference: Any, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """The verdict on a right operator, and the planted errors that the check and the other rules would find."""
    made = Doubled(None)(inputs)
    start = time.perf_counter()
    run = LowerCheck(func, inputs, Settings(reference="float64"), (), RandomState())
    report = run.report(lambda: Reference(reference, made, "the operator in float64"))
    row: dict[str, Any] = {"name": name, "dtype": dtype, "verdict": report.verdict, "n": report.n, "m": report.m}
    row["seconds"] = time.perf_counter() - start
    precision = report.precision
    if precision is None or (report.failure is not None and not precision.products):
        return {**row, "verdict": "reference fails", "why": str(report.failure.kind if report.failure else "")}
    if report.failure is not None:
        row["why"] = str(report).splitlines()[0][:300]
    if precision.undecided:
        row["why"] = precision.undecided[:300]
    if run.comparison is not None and report.verdict == "passed" and run.comparison.size.numel():
        row |= {"found": found_shares(run.comparison, dtype)}
    if precision.second_look or (run.comparison is not None and report.failure is not None):
        comparison, inputs = run.comparison, run.comparison.products.inputs
        first = comparison.spread.products + inputs.rounding(comparison.size), comparison.size, inputs.units
        beyond = comparison.error > allowed(*first, FACTOR[comparison.dtype], comparison.once)
        row["second look"] = (
            float((comparison.error / comparison.scale)[beyond].nan_to_num(0).max()) if bool(beyond.any()) else 0
        )
    if run.comparison is not None and report.verdict in ("passed", "failed"):
        row |= other_rules(run.comparison, dtype)
    return row


def found_shares(comparison: Comparison, dtype: str) -> dict[str, Any]:
    """Shares of planted errors that are found, by rule and error."""
    numbers = (comparison.probes.rows >= 0).nonzero().reshape(-1)
    generator = torch.Generator().manual_seed(0)
    some = numbers[torch.randperm(len(numbers), generator=generator)[:ROWS]]
    found: dict[str, Any] = {}
    if len(some):
        low, exact, size = comparison.low[some], comparison.exact[some], comparison.size[some]
        first = comparison.limit[some].clone()
        comparison.look_again_at(some)
        limit, error = comparison.limit[some], comparison.error[some]
        significant = (size > 0) & (size >= SIGNIFICANT * size.amax(1, keepdim=True)) & error.isfinite()
        rtol, atol = CLOSE[dtype]
        twice = 2 * comparison.spread.rounded[some].amax(1, keepdim=True)
        for relative in PLANTED[dtype] if bool(significant.any()) else ():
            planted = (low + relative * low - exact).abs()
            rules = {
                "fastgrad": limit,
                "first look": first,
                "assert_close": rtol * size + atol,
                "twice the error": twice.expand_as(size),
            }
            for rule, allowed in rules.items():
                found[f"{rule} {relative:g}"] = float((planted > allowed)[significant].double().mean())
    if dtype != "float32":
        scaled = scaled_is_found(comparison)
        if scaled is not None:
            found["scaled 1.01"] = scaled
    return found


def scaled_is_found(comparison: Comparison) -> float | None:
    """The share of dense VJPs, of 20 effective entries or more, in which a factor of 1.01 is found."""
    results = []
    for one in comparison.common_errors():
        if one.entries >= 20 and one.allowed < 1:
            results.append(abs(one.error + 0.01 * (1 + one.error)) > one.allowed)
    return statistics.mean(results) if results else None  # a common error is the same for each grad_output


def other_rules(comparison: Comparison, dtype: str) -> dict[str, bool]:
    """Whether the other rules reject a right operator."""
    rtol, atol = CLOSE[dtype]
    finite = comparison.error.isfinite() & comparison.size.isfinite()
    error = torch.where(finite, comparison.error, 0.0)
    close = bool((error > rtol * comparison.size.nan_to_num(0.0) + atol).any())
    twice = bool((error.amax(1) > 2 * comparison.spread.rounded.nan_to_num(torch.inf).amax(1) + 1e-5).any())
    return {"assert_close accuses": close, "twice the error accuses": twice}


def run_operators(dtype: str, numbers: range, every: int, first: int, limit: float, out: Any) -> None:
    """Writes one line of JSON per sample."""

    def interrupt(*_: Any) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGALRM, interrupt)
    for op in operators(DTYPES[dtype])[first::every]:
        try:
            cases = list(sample_cases(op, DTYPES[dtype], numbers))
        except Exception as error:
            cases = []
            out.write(
                json.dumps({"name": op.formatted_name, "dtype": dtype, "verdict": f"no sample: {error}"[:200]}) + "\n"
            )
        for name, func, reference, inputs in cases:
            signal.setitimer(signal.ITIMER_REAL, limit)
            try:
                row = operator_row(name, dtype, func, reference, inputs)
            except OutOfTimeError:
                row = {"name": name, "dtype": dtype, "verdict": "out of time"}
            except Exception as error:
                row = {
                    "name": name,
                    "dtype": dtype,
                    "verdict": "raised",
                    "why": f"{type(error).__name__}: {error}"[:300],
                }
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            out.write(json.dumps(row) + "\n")
            out.flush()


def operator_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums of one dtype."""
    judged = [row for row in rows if row["verdict"] in ("passed", "failed", "undecided")]
    table: dict[str, Any] = {
        "samples": len(judged),
        "passed": sum(row["verdict"] == "passed" for row in judged),
        "failed": [row["name"] for row in judged if row["verdict"] == "failed"],
        "undecided": [row["name"] for row in judged if row["verdict"] == "undecided"],
        "left out": {row["name"]: row["verdict"] for row in rows if row not in judged},
    }
    for rule in ("assert_close accuses", "twice the error accuses"):
        table[rule] = sum(row.get(rule, False) for row in judged)
    shares: dict[str, list[float]] = {}
    for row in judged:
        for key, share in row.get("found", {}).items():
            shares.setdefault(key, []).append(share)
    table["found, mean over samples"] = {key: round(statistics.mean(values), 4) for key, values in shares.items()}
    table["seconds, median"] = round(statistics.median([row["seconds"] for row in judged] or [0]), 3)
    return table


def kernel_table(dtype: str, fast_mode: bool, seed: int) -> dict[str, Any]:
    """Right kernels rejected, planted mistakes found, and the time against the float64 check of the composed kernel."""
    torch_dtype = DTYPES[dtype]
    table: dict[str, Any] = {"accused": [], "missed": [], "right": 0, "mistakes": 0, "ratios": []}
    for name, kernel in KERNELS.items():
        inputs, doubles = kernel.inputs(torch_dtype, seed), kernel.inputs(torch.float64, seed)
        for label, func in (("fused", kernel.fused()), ("composed", kernel.composed)):
            seconds = []
            for each, values, keywords in (
                (func, inputs, {"reference": kernel.composed}),
                (kernel.composed, doubles, {}),
            ):
                times = []
                for _ in range(3):
                    start = time.perf_counter()
                    report = fastgrad.check(each, values, fast_mode=fast_mode, **keywords)
                    times.append(time.perf_counter() - start)
                    if values is inputs and report.verdict != "passed" and not times[1:]:
                        table["accused"].append(f"{name}, {label}: {report.verdict}")
                seconds.append(statistics.median(times))
            table["right"] += 1
            table["ratios"].append(seconds[0] / seconds[1])
        for mistake in (*kernel.mistakes, *GENERAL):
            report = fastgrad.check(kernel.fused(mistake), inputs, reference=kernel.composed, fast_mode=fast_mode)
            table["mistakes"] += 1
            if report.verdict != "failed":
                table["missed"].append(f"{name}, {mistake}: {report.verdict}")
    ratios = table.pop("ratios")
    table["time over that of float64"] = {"median": round(statistics.median(ratios), 1), "most": round(max(ratios), 1)}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["kernels", "operators", "summary"])
    parser.add_argument("--dtype", choices=list(DTYPES), action="append")
    parser.add_argument("--samples", type=int, nargs=2, default=(2, 2), help="the first and the last")
    parser.add_argument("--every", type=int, default=1, help="take every k-th operator")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds a sample")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fast", action="store_true", help="kernels with fast_mode=True")
    parser.add_argument("--lines", default="build/low-precision.jsonl", help="where operators' rows are kept")
    parser.add_argument("--name", default="", help="summary: write results/<name>.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dtypes = options.dtype or list(DTYPES)
    if options.what == "kernels":
        for dtype in dtypes:
            print(dtype, json.dumps(kernel_table(dtype, options.fast, options.seed), indent=1))
    elif options.what == "operators":
        numbers = range(options.samples[0], options.samples[1] + 1)
        Path(options.lines).parent.mkdir(parents=True, exist_ok=True)
        with open(options.lines, "a") as out:
            for dtype in dtypes:
                run_operators(dtype, numbers, options.every, options.first, options.limit, out)
    else:
        with open(options.lines) as lines:
            rows = [json.loads(line) for line in lines]
        result = {dtype: operator_table([row for row in rows if row["dtype"] == dtype]) for dtype in dtypes}
        print(json.dumps(result, indent=1))
        if options.name:
            kernels = {dtype: kernel_table(dtype, options.fast, options.seed) for dtype in dtypes}
            path = RESULTS / f"{options.name}.json"
            path.write_text(json.dumps({"operators": result, "kernels": kernels}, indent=1) + "\n")
            print(path)


if __name__ == "__main__":
    main()
