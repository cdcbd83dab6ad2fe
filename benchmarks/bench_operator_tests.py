"""Times checks against torch's as torch's operator tests call them: grad, forward mode and second order.

Per operator sample, torch's tests call gradcheck with batched gradients, dtypes and undefined gradients checked;
gradcheck in forward mode, with batched tangents where the operator supports them; and gradgradcheck twice, the second
time with non-contiguous grad_outputs. The same calls are made here, both sides in one process, in turn. The verdicts
are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.autograd.gradcheck import GradcheckError

import fastgrad
from benchmarks.cases import MAX_ENTRIES, Case, entries, operator_cases, operators
from benchmarks.measure import geometric_mean, pair_row, time_pair, write

KINDS = ("grad", "forward", "gradgrad")
BUCKETS = (("n m <= 100", 0, 100), ("100 < n m <= 1e4", 100, 1e4), ("n m > 1e4", 1e4, float("inf")))

Checker = Callable[..., bool]


def calls_of(op: Any, kind: str, fast_mode: bool, nondet_tol: float) -> list[dict[str, Any]]:
    """The keywords of each call that torch's tests make for one sample; none where the operator lacks the mode."""
    common = {"nondet_tol": nondet_tol, "check_grad_dtypes": True, "fast_mode": fast_mode}
    if kind == "grad":
        return [common | {"check_batched_grad": op.check_batched_grad}]
    if kind == "forward":
        batched = {"check_batched_forward_grad": op.check_batched_forward_grad}
        modes = {"check_forward_ad": True, "check_backward_ad": False, "check_undefined_grad": False}
        return [common | batched | modes] if op.supports_forward_ad else []
    second = common | {"check_batched_grad": op.check_batched_gradgrad}
    return [second | {"gen_non_contig_grad_outputs": flag} for flag in (False, True)] if op.supports_gradgrad else []


def verdict(checker: Checker, case: Case, calls: list[dict[str, Any]]) -> bool | str:
    """Whether all calls pass, or the name of the exception."""
    try:
        return all(checker(case.func, case.inputs, **keywords) for keywords in calls)
    except GradcheckError:
        return False
    except Exception as error:
        return type(error).__name__


def row_of(case: Case, op: Any, kind: str, options: argparse.Namespace) -> dict[str, Any] | str:
    """One row of the result, or why there is none."""
    calls = calls_of(op, kind, options.fast, case.nondet_tol)
    if not calls:
        return "not supported"
    size = entries(case, kind == "gradgrad")
    if not 0 < size <= MAX_ENTRIES:
        return f"no entries, or more than {MAX_ENTRIES}"
    torchs, own = (
        (torch.autograd.gradgradcheck, fastgrad.gradgradcheck)
        if kind == "gradgrad"
        else (torch.autograd.gradcheck, fastgrad.gradcheck)
    )
    found = verdict(torchs, case, calls), verdict(own, case, calls)
    if found != (True, True):
        return "not passed by both" if found[0] == found[1] else f"verdicts differ: torch {found[0]}, own {found[1]}"
    pair = time_pair(
        partial(verdict, torchs, case, calls), partial(verdict, own, case, calls), options.rounds, options.budget
    )
    return {"name": case.name, "kind": kind, "entries": size, **pair_row(pair)}


def cases(options: argparse.Namespace) -> Iterator[tuple[Any, Case]]:
    """The operators with their samples."""
    for op in islice(operators(torch.float64), options.first, None, options.every):
        for case in operator_cases(op, torch.float64, options.limit):
            yield op, case


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means of torch's time divided by fastgrad's, of all samples and by size; and the samples below 0.8."""
    found: dict[str, Any] = {"cases": len(rows), "geometric mean": geometric_mean(row["ratio"] for row in rows)}
    found["ratio of totals"] = sum(row["baseline"] for row in rows) / sum(row["candidate"] for row in rows)
    for title, low, high in BUCKETS:
        ratios = [row["ratio"] for row in rows if low < row["entries"] <= high]
        found[title] = {"cases": len(ratios), "geometric mean": geometric_mean(ratios)}
    found["slower than 0.8"] = [f"{row['name']} {row['ratio']:.2f}" for row in rows if row["ratio"] < 0.8]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=1, help="samples per operator")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.5, help="seconds of timing per sample and kind")
    parser.add_argument("--every", type=int, default=1, help="take every k-th operator")
    parser.add_argument("--first", type=int, default=0, help="the first operator to take")
    parser.add_argument("--fast", action="store_true", help="fast_mode=True on both sides")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--name", default="", help="write results/<name>.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for op, case in cases(options):
        for kind in options.kinds:
            row = row_of(case, op, kind, options)
            if isinstance(row, str):
                left_out[f"{case.name} {kind}"] = row
            else:
                rows.append(row)
    differing = {name: reason for name, reason in left_out.items() if reason.startswith("verdicts differ")}
    print(f"{len(left_out)} left out; verdicts that differ: {differing or 'none'}")
    summary: dict[str, Any] = {"mode": "fast" if options.fast else "slow", "left out": left_out}
    for kind in options.kinds:
        of_kind = [row for row in rows if row["kind"] == kind]
        summary[kind] = summary_of(of_kind)
        print(kind, *(f"  {key:20s} {value}" for key, value in summary[kind].items()), sep="\n")
    if options.name:
        print(write(options.name, summary, rows))


if __name__ == "__main__":
    main()
