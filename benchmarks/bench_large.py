"""Exact checks of operators of realistic size: fastgrad, its own dense engine, and torch's slow mode.

Each side of each case runs in a process of its own, with a limit of time and of memory: at these sizes
torch needs hours, or more memory than there is. `--sin` compares n = 1e6 with torch's fast mode instead.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.gradcheck import GradcheckError

import fastgrad
from benchmarks.cases import LARGE, Case, large_case, leaves
from benchmarks.measure import RESULTS, PeakMemory, geometric_mean, pair_row, time_alone, time_pair, write
from fastgrad.checks.order import check
from fastgrad.problem.second_order import Backward, differentiable_outputs
from fastgrad.report.messages import failure_message
from fastgrad.report.settings import Settings

ROOT = Path(__file__).parents[1]

NOT_TINY = 50e-6
"""Seconds of one evaluation from which the driver's own time should be small."""

SECONDS_PER_ENTRY = 1e-7
"""Predicted time of the dense engine per entry, in addition to evaluations and VJPs."""

SIDES = ("fastgrad", "dense", "torch")
HEADER = (
    f"{'case':34s} {'n':>8s} {'m':>8s} {'engine':>10s} {'groups':>11s} {'evals':>6s} {'VJPs':>6s} "
    f"{'fastgrad':>9s} {'MiB':>6s} {'dense':>9s} {'torch':>9s} {'ratio':>8s} {'overhead':>8s}"
)

STARTING = 120
"""Seconds for a process to start and to make its case, before it watches its own time."""


class TimeUpError(BaseException):
    """The time limit of a check; not an Exception, so that no checker treats it as an exception of func."""


def time_up(*_: object) -> None:
    raise TimeUpError


def once(call: Callable[[], bool | str], limit: float) -> dict[str, Any]:
    """The verdict of one call, or why there is none; its seconds and its memory."""
    start = time.perf_counter()
    verdict: bool | str
    with PeakMemory() as memory:
        try:
            signal.setitimer(signal.ITIMER_REAL, limit)
            verdict = call()
        except GradcheckError as error:
            verdict = f"fails: {str(error)[:300]}"
        except TimeUpError:
            verdict = f"more than {limit:g} s"
        except Exception as error:
            verdict = f"raises {type(error).__name__}: {str(error)[:200]}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return {"verdict": verdict, "first_seconds": time.perf_counter() - start, "memory_mib": memory.mib}


def timed(call: Callable[[], bool | str], options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """As `once`, with the median of more calls if the first call passes and leaves time for them."""
    row = once(call, limit)
    seconds = [row["first_seconds"]]
    if row["verdict"] is True and seconds[0] < options.budget:
        seconds = time_alone(call, options.rounds, options.budget)
    return {
        **row,
        "seconds": statistics.median(seconds),
        "spread": (min(seconds), max(seconds)),
        "rounds": len(seconds),
    }


def checked(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that fastgrad checks, and its arguments."""
    if case.grad_outputs is None:
        return case.func, case.inputs
    return Backward(case.func, case.inputs, case.grad_outputs), case.inputs + case.grad_outputs


def unit_costs(case: Case) -> tuple[float, float, float]:
    """Seconds of one evaluation without and with a graph, and of one VJP, after a warm-up.

    A backward that is evaluated repeatedly at one point keeps its forward pass if possible, as in the check.
    """
    func, inputs = checked(case)

    def plain() -> None:
        with torch.no_grad():
            func(*inputs)

    outputs = differentiable_outputs(func(*inputs))
    grads = [torch.randn_like(output) for output in outputs]
    calls: Sequence[Callable[[], Any]] = (
        plain,
        lambda: func(*inputs),
        lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True),
    )
    for call in calls:
        call()
    without, recording, vjp = (statistics.median(time_alone(call, 1000, 0.2)) for call in calls)
    return without, recording, vjp


def own_row(case: Case, options: argparse.Namespace, engine: str) -> dict[str, Any]:
    """The side of fastgrad: verdict and report first, then times."""
    settings = Settings(nondet_tol=case.nondet_tol, masked=case.masked, engine=engine)
    check(torch.sin, leaves((200,)), Settings(engine="compressed"))  # late imports
    without, recording, vjp = unit_costs(case)
    reports = []

    def run() -> bool | str:
        reports.append(check(*checked(case), settings))
        report = reports[-1]
        return report.passed or f"fails: {failure_message(report)}"

    row = timed(run, options, options.own_limit)
    row |= {"evaluation_us": 1e6 * without, "recorded_evaluation_us": 1e6 * recording, "vjp_us": 1e6 * vjp}
    if reports and reports[0].plan is not None:
        report, plan = reports[0], reports[0].plan
        calls = report.evaluations * (recording if plan.record_graph else without) + report.vjps * vjp
        row |= {"n": report.n, "m": report.m, "engine": plan.engine, "reason": plan.reason, "notes": report.notes}
        row |= {"column_groups": plan.column_groups, "row_groups": plan.row_groups}
        row |= {"evaluations": report.evaluations, "vjps": report.vjps, "overhead": row["seconds"] / calls}
    return row


def torch_row(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """The side of torch's slow mode."""
    keywords: dict[str, Any] = {"nondet_tol": case.nondet_tol, "masked": case.masked}
    torch.autograd.gradcheck(torch.sin, leaves((2,)))  # late imports

    def run() -> bool:
        if case.grad_outputs is None:
            return bool(torch.autograd.gradcheck(case.func, case.inputs, **keywords))
        return bool(torch.autograd.gradgradcheck(case.func, case.inputs, case.grad_outputs, **keywords))

    return timed(run, options, options.torch_limit)


def child(side: str, name: str, options: argparse.Namespace) -> None:
    """One side of one case, here; prints JSON."""
    size = int(options.memory * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    signal.signal(signal.SIGALRM, time_up)
    case = large_case(name)
    row = torch_row(case, options) if side == "torch" else own_row(case, options, side)
    print(json.dumps(row))


def apart(side: str, name: str, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """One side of one case in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.bench_large", "--child", side, "--match", name]
    for key in ("threads", "memory", "torch_limit", "own_limit", "rounds", "budget"):
        command += ["--" + key.replace("_", "-"), str(getattr(options, key))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    seconds = 1.5 * limit + STARTING
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"verdict": f"more than {limit:g} s", "first_seconds": limit, "memory_mib": None}
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        ending = (done.stderr.splitlines() or [""])[-1]
        return {"verdict": f"ends with {done.returncode}: {ending}", "first_seconds": None, "memory_mib": None}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row: both sides, and fastgrad's dense engine if that is feasible."""
    own = apart("auto", name, options, options.own_limit)
    row: dict[str, Any] = {"name": name, "fastgrad": own, "dense": None, "ratio": None}
    if own["verdict"] is True and own["engine"] != "dense":
        predicted = (2 * own["n"] * own["evaluation_us"] + own["m"] * own["vjp_us"]) * 1e-6
        predicted += own["n"] * own["m"] * SECONDS_PER_ENTRY
        row["dense_predicted_seconds"] = predicted
        if predicted <= options.dense_limit:
            row["dense"] = apart("dense", name, options, options.own_limit)
    row["torch"] = apart("torch", name, options, options.torch_limit)
    if own["verdict"] is True and row["torch"]["verdict"] is True:
        row["ratio"] = row["torch"]["seconds"] / own["seconds"]
    return row


def ended(side: dict[str, Any] | None) -> bool:
    """Whether a side reached a verdict on the gradient."""
    return side is not None and (side["verdict"] is True or str(side["verdict"]).startswith("fails"))


def right(row: dict[str, Any]) -> bool:
    """Whether fastgrad passed, and no other side reached a different verdict."""
    return row["fastgrad"]["verdict"] is True and all(
        row[side]["verdict"] is True for side in ("dense", "torch") if ended(row[side])
    )


def largest(values: dict[str, float]) -> tuple[str, float] | None:
    return max(values.items(), key=itemgetter(1), default=None)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    finished = [row for row in rows if row["ratio"] is not None]
    dense = {
        row["name"]: row["fastgrad"]["seconds"] / row["dense"]["seconds"]
        for row in rows
        if row["dense"] and row["dense"]["verdict"] is True
    }
    overheads = {
        row["name"]: row["fastgrad"]["overhead"]
        for row in rows
        if row["fastgrad"]["verdict"] is True and row["fastgrad"]["evaluation_us"] >= 1e6 * NOT_TINY
    }
    wrong = [row for row in rows if not right(row)]
    return {
        "cases": len(rows),
        "not right": {row["name"]: [(row[side] or {}).get("verdict") for side in SIDES] for row in wrong},
        "finished by torch": len(finished),
        "geometric mean, torch slow / fastgrad": geometric_mean(row["ratio"] for row in finished),
        "not finished by torch": {
            row["name"]: {
                "torch": row["torch"]["verdict"],
                "fastgrad seconds": row["fastgrad"].get("seconds"),
                "fastgrad MiB": row["fastgrad"]["memory_mib"],
            }
            for row in rows
            if not ended(row["torch"])
        },
        "geometric mean, dense / fastgrad": geometric_mean(1 / ratio for ratio in dense.values()),
        "largest fastgrad / dense": largest(dense),
        "evaluations of 50 us and more": len(overheads),
        "geometric mean overhead of those": geometric_mean(overheads.values()),
        "largest overhead of those": largest(overheads),
    }


def line(row: dict[str, Any]) -> str:
    """A row of the table."""

    def seconds(side: dict[str, Any] | None) -> str:
        if side is None:
            return "-"
        return f"{side['seconds']:.3g} s" if side["verdict"] is True else str(side["verdict"])[:40]

    own = row["fastgrad"]
    if own["verdict"] is not True:
        return f"{row['name']:34s} {own['verdict']}; torch: {seconds(row['torch'])}"
    groups = f"{own['column_groups']}+{own['row_groups'] or '-'}" if own["engine"] == "compressed" else "-"
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3g}"
    return (
        f"{row['name']:34s} {own['n']:8d} {own['m']:8d} {own['engine']:>10s} {groups:>11s} {own['evaluations']:6d} "
        f"{own['vjps']:6d} {seconds(own):>9s} {own['memory_mib']:6.0f} {seconds(row['dense']):>9s} "
        f"{seconds(row['torch']):>9s} {ratio:>8s} {own['overhead']:8.2f}"
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws one point per case: the ratio of times by the entries of the Jacobian; none if torch lacked memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 6), layout="constrained")
    passing = [row for row in rows if row["fastgrad"]["verdict"] is True]
    late = [row for row in passing if str(row["torch"]["verdict"]).startswith("more than")]
    finished = [row for row in passing if row["ratio"] is not None]
    axes.margins(x=0.12)  # room for the names
    for chosen, marker, label in ((finished, "o", "torch finished"), (late, "^", "at least so many: torch did not")):
        if not chosen:
            continue
        sizes = [row["fastgrad"]["n"] * row["fastgrad"]["m"] for row in chosen]
        ratios = [row["ratio"] or row["torch"]["first_seconds"] / row["fastgrad"]["seconds"] for row in chosen]
        axes.scatter(sizes, ratios, s=18, marker=marker, label=label)
        for row, size, ratio in zip(chosen, sizes, ratios, strict=True):
            axes.annotate(row["name"], (size, ratio), fontsize=5, xytext=(3, 2), textcoords="offset points")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="entries of the Jacobian, n m", ylabel="torch slow / fastgrad, time")
    axes.set_title(f"exact gradcheck of {len(finished) + len(late)} operators of real size")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def sin_rows(rounds: int, budget: float) -> list[dict[str, Any]]:
    """Sin of 1e6 elements: torch's fast mode against fastgrad's exact check and its fast mode, paired."""
    x = leaves((1_000_000,))
    rows = []

    def torchs() -> bool:
        return bool(torch.autograd.gradcheck(torch.sin, x, fast_mode=True))

    for title, fast, blind in (("exact", False, False), ("exact, blind", False, True), ("fast", True, False)):
        # Blind: without guesses from shapes.
        with patch("fastgrad.structure.detection.ProblemPatterns.guess", return_value=None) if blind else nullcontext():
            own = partial(fastgrad.gradcheck, torch.sin, x, fast_mode=fast)
            report = check(torch.sin, x, Settings(fast_mode=fast))
            if not (report.passed and report.plan and own() and torchs()):
                raise RuntimeError(f"sin does not pass on both sides: {title}")
            with PeakMemory() as own_memory:
                own()
            with PeakMemory() as torch_memory:
                torchs()
            pair = time_pair(torchs, own, rounds, budget)
        row: dict[str, Any] = {"fastgrad": title, "engine": report.plan.engine, "reason": report.plan.reason}
        row |= {"evaluations": report.evaluations, "vjps": report.vjps, **pair_row(pair)}
        rows.append(row | {"memory_mib": own_memory.mib, "torch_memory_mib": torch_memory.mib})
        print(
            f"{title:14s} {report.evaluations:6d} evaluations {report.vjps:4d} VJPs {pair.candidate:8.3f} s "
            f"{own_memory.mib:6.0f} MiB   torch fast {pair.baseline:8.3f} s {torch_memory.mib:6.0f} MiB   "
            f"ratio {pair.ratio:.2f}   {report.plan.reason}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--match", default="", help="only cases with this in their names")
    parser.add_argument("--quick", action="store_true", help="limits of 20 s for torch and for the dense engine")
    parser.add_argument("--torch-limit", type=float, default=600.0, help="seconds of torch for one check")
    parser.add_argument("--own-limit", type=float, default=600.0, help="seconds of fastgrad for one check")
    parser.add_argument("--dense-limit", type=float, default=120.0, help="predicted seconds of the dense engine")
    parser.add_argument("--memory", type=float, default=12.0, help="GiB of address space of each process")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=5.0, help="seconds of timing a side")
    parser.add_argument("--sin", action="store_true", help="n = 1e6 against torch's fast mode instead")
    parser.add_argument("--name", default="", help="write results/<name>.json; large, or large-sin, by default")
    parser.add_argument("--child", choices=("auto", "dense", "torch"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    if options.child:
        child(options.child, options.match, options)
        return
    if options.sin:
        rows = sin_rows(options.rounds, options.budget)
        summary = {row["fastgrad"]: f"torch's fast mode takes {row['ratio']:.2f} times as long" for row in rows}
        print(write(options.name or "large-sin", summary, rows))
        return
    if options.quick:
        options.torch_limit = options.dense_limit = 20.0
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    result = options.name or "large"
    print(HEADER)
    for name in LARGE:
        if options.match in name:
            rows.append(measure(name, options))
            print(line(rows[-1]), flush=True)
            summary = summarize(rows)
            write(result, summary, rows)  # after each case, because all cases take hours
    for key, value in summary.items():
        print(f"{key:40s} {value}")
    draw(rows, RESULTS / f"{result}.png")
    print(RESULTS / f"{result}.json")
    if summary["not right"]:
        sys.exit("fastgrad is not right everywhere")


if __name__ == "__main__":
    main()
