"""Times checks against torch's over torch's own operator samples: slow mode, or both fast modes.

Both checkers run in one process. Their verdicts are compared before they are timed. Times are medians of paired
rounds.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd.gradcheck import GradcheckError

import fastgrad
from benchmarks.cases import MAX_ENTRIES, Case, entries, operator_cases, operators
from benchmarks.measure import RESULTS, geometric_mean, pair_row, time_pair, write
from fastgrad.checks.order import check
from fastgrad.problem.second_order import Backward, differentiable_outputs, random_grad_outputs
from fastgrad.report.settings import Settings

BUCKETS = (("n m < 1e2", 0, 1e2), ("1e2 <= n m < 1e4", 1e2, 1e4), ("n m >= 1e4", 1e4, float("inf")))


def passes(checker: Any, case: Case, fast_mode: bool) -> bool | str:
    """The verdict, or the name of the exception."""
    try:
        return bool(checker(case.func, case.inputs, nondet_tol=case.nondet_tol, fast_mode=fast_mode))
    except GradcheckError:
        return False
    except Exception as error:
        return type(error).__name__


def second_order(case: Case) -> Case:
    """The backward of a case as a case of its own, so that both sides check the same function."""
    grads = random_grad_outputs(differentiable_outputs(case.func(*case.inputs)), 0, False)
    return Case(case.name, Backward(case.func, case.inputs, grads), case.inputs + grads, case.nondet_tol)


def measure(case: Case, fast_mode: bool, rounds: int, budget: float, longest: float) -> dict[str, Any] | str:
    """A row of the result, or the reason why there is none."""
    if entries(case) > MAX_ENTRIES:
        return f"more than {MAX_ENTRIES} entries"
    torchs = partial(passes, torch.autograd.gradcheck, case, fast_mode)
    own = partial(passes, fastgrad.gradcheck, case, fast_mode)
    start = time.perf_counter()
    if torchs() is not True or own() is not True:
        return "not passed by both"
    if time.perf_counter() - start > longest:
        return f"both sides take more than {longest:g} s"
    report = check(case.func, case.inputs, Settings(nondet_tol=case.nondet_tol, fast_mode=fast_mode))
    pair = time_pair(torchs, own, rounds, budget)
    sizes = {"n": report.n, "m": report.m, "evaluations": report.evaluations, "vjps": report.vjps}
    return {"name": case.name, **sizes, **pair_row(pair)}


def draw(rows: list[dict[str, Any]], path: Path, mode: str) -> None:
    """Draws one point per sample: the ratio of times by the entries of the Jacobian."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.scatter([row["n"] * row["m"] for row in rows], [row["ratio"] for row in rows], s=8, alpha=0.5)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="entries of the Jacobian, n m", ylabel=f"torch {mode} / fastgrad, time")
    axes.set_title(f"gradcheck of {len(rows)} operator samples, float64, {mode} mode of torch")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def redraw(name: str) -> None:
    """Draws a saved result again."""
    result = json.loads((RESULTS / f"{name}.json").read_text())
    draw(result["rows"], RESULTS / f"{name}.png", result["summary"].get("mode", "slow"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=1, help="samples an operator")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds of timing a sample")
    parser.add_argument("--longest", type=float, default=8.0, help="seconds for both sides; longer samples are listed")
    parser.add_argument("--every", type=int, default=1, help="take every k-th operator")
    parser.add_argument("--fast", action="store_true", help="fast_mode=True on both sides")
    parser.add_argument("--second-order", action="store_true", help="gradgradcheck instead of gradcheck")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="", help="write results/<name>.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for op in operators(torch.float64, *["supports_gradgrad"] * options.second_order)[:: options.every]:
        for case in operator_cases(op, torch.float64, options.limit, options.device):
            checked = second_order(case) if options.second_order else case
            row = measure(checked, options.fast, options.rounds, options.budget, options.longest)
            if isinstance(row, str):
                left_out[case.name] = row
            else:
                rows.append(row)
    ratios = [row["ratio"] for row in rows]
    summary: dict[str, Any] = {"mode": "fast" if options.fast else "slow", "cases": len(rows), "left out": left_out}
    summary["geometric mean"] = geometric_mean(ratios)
    for title, low, high in BUCKETS:
        ratios = [row["ratio"] for row in rows if low <= row["n"] * row["m"] < high]
        summary[title] = {"cases": len(ratios), "geometric mean": geometric_mean(ratios)}
    for key, value in summary.items():
        print(f"{key:20s} {value}")
    print("slowest relative to torch:")
    for row in sorted(rows, key=lambda row: row["ratio"])[:15]:
        print(f"  {row['ratio']:6.2f}  n={row['n']:<5d} m={row['m']:<5d} {row['name']}")
    if options.name:
        print(write(options.name, summary, rows))
        redraw(options.name)


if __name__ == "__main__":
    main()
