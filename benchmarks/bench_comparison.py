"""Compares fastgrad with other gradient checkers: time, calls, memory, and the errors that each of them finds.

Writes results/comparison.json, one figure per question and docs/comparison.md; `--page` writes the figures and the
page again from the saved result. Each cell of the first three questions is measured in its own process, on one
CPU, where the tool and fastgrad are timed in turn after both have passed.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.gradcheck import GradcheckError

from benchmarks import bench_history
from benchmarks.bench_fast import normal
from benchmarks.bench_large import once, time_up
from benchmarks.checkers import ATOL, CHECKERS, RTOL, Checker, Function, Namespace, Problem, counted, problem
from benchmarks.measure import RESULTS, geometric_mean, time_alone, time_pair, write
from benchmarks.wrong_gradients import RIGHT, WRONG, N, WrongGradient, with_structure, wrong_entries

NAME = "comparison"
PAGE = bench_history.PAGE
SIZES = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
KERNEL = 5
EXACT, FAST = (
    next(checker for checker in CHECKERS if checker.name == f"fastgrad {mode}") for mode in ("exact", "fast")
)
EVERY = {checker.name: checker.every for checker in CHECKERS}

OVER_MEMORY = ("MemoryError", "can't allocate memory", "not enough memory", "RESOURCE_EXHAUSTED", "bad_alloc")
LOCATED = re.compile(
    r"d out0\[(\d+)\] / d \w+\[(\d+)\]|at index \((\d+), (\d+)\)|^ \[(\d+), (\d+)\]: ", flags=re.MULTILINE
)
"""How tools name an entry of the Jacobian: fastgrad, torch.testing, and numpy.testing."""
IMPORTED = ("scipy.optimize", "scipy.sparse", "numdifftools", "jax.test_util", "torch.testing", "torch.func")
KINDS = ("not linear in grad_output", "not reentrant")


def _sine(xp: Namespace, x: Any) -> Any:
    return xp.sin(x)


def _stencil(xp: Namespace, x: Any) -> Any:
    return xp.sin(x[2:]) * x[:-2] + x[1:-1] ** 2


def _softmax(xp: Namespace, x: Any) -> Any:
    if xp is not torch:
        import jax

        xp = jax.nn
    return x.shape[0] * xp.softmax(x, 0)


def _convolution(xp: Namespace, z: Any) -> Any:
    """The first elements are the kernel."""
    kernel, x = z[:KERNEL], z[KERNEL:]
    if xp is not torch:
        return xp.correlate(x, kernel, mode="same")
    return F.conv1d(x[None, None], kernel[None, None], padding=KERNEL // 2)[0, 0]


def _bands(n: int, *offsets: int, rows: int) -> Any:
    from scipy.sparse import diags_array

    return diags_array([1.0] * len(offsets), offsets=list(offsets), shape=(rows, n), format="csr")


def _convolution_structure(n: int) -> Any:
    import numpy as np
    from scipy.sparse import hstack

    m = n - KERNEL
    reach = KERNEL // 2
    return hstack([np.ones((m, KERNEL)), _bands(m, *range(-reach, reach + 1), rows=m)], format="csr")


CASES: dict[str, tuple[str, Function, Callable[[int], Any] | None]] = {
    "elementwise": ("sin(x)", _sine, lambda n: _bands(n, 0, rows=n)),
    "banded": ("sin(x[2:]) x[:-2] + x[1:-1]^2", _stencil, lambda n: _bands(n, 0, 1, 2, rows=n - 2)),
    "dense": ("n softmax(x)", _softmax, None),
    "convolution": (
        f"conv1d of x with a kernel of {KERNEL} elements. Both are inputs. The Jacobian has a band and {KERNEL} dense "
        "columns",
        _convolution,
        _convolution_structure,
    ),
}
"""Description, function, and pattern of its Jacobian for n inputs; None if that is all entries."""


def make(case: str, n: int) -> Problem:
    """A case with n inputs."""
    _, func, structure = CASES[case]
    return problem(func, normal(n).detach(), structure and partial(structure, n))


def installed(checkers: Iterable[Checker] = CHECKERS) -> list[Checker]:
    """Those that can run here."""
    return [checker for checker in checkers if find_spec(checker.module)]


def same_function(problem: Problem) -> None:
    """Raises if jax computes other values."""
    import jax.numpy

    assert problem.jax is not None
    expected = problem.func(problem.x.detach()).numpy()
    torch.testing.assert_close(
        torch.tensor(problem.jax()(jax.numpy.asarray(problem.x.detach().numpy()))).numpy(), expected
    )


def prepare(options: argparse.Namespace) -> None:
    """Sets one CPU, one thread and the limits, in the process that measures."""
    warnings.simplefilter("ignore")
    gc.freeze()  # imported modules are not searched for again
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    size = int(options.memory * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    signal.signal(signal.SIGALRM, time_up)


def rival(checker: Checker) -> Checker:
    """The check of fastgrad that is timed in turn with a tool."""
    return EXACT if checker.every or checker is FAST else FAST


def cell(case: str, n: int, checker: Checker, own: Checker | None, options: argparse.Namespace) -> dict[str, Any]:
    """One tool on one case, measured here. own: the check of fastgrad that is timed in turn with it."""
    for tool in filter(None, (checker, own)):
        tool.check(make(case, SIZES[0]))  # imports and setup of the first call
    case_problem = make(case, n)
    if checker.module == "jax":
        same_function(case_problem)

    def call() -> bool:
        return checker.check(case_problem) is None

    def beside() -> None:
        if own is not None:
            own.check(case_problem)

    row = once(call, options.cap)
    if row["verdict"] is not True:
        over = any(word in row["verdict"] for word in OVER_MEMORY)
        return {**row, "verdict": "over memory" if over else row["verdict"]}
    first, quick = row["first_seconds"], row["first_seconds"] < options.quick
    if quick:  # without the compilation for this size
        row |= once(call, options.cap) | {"first_seconds": first}
        counting, counts = counted(case_problem)
        checker.check(counting)
        row |= {"evaluations": counts.evaluations, "backwards": counts.backwards}
    if quick:
        pair = time_pair(call, beside, options.rounds, options.budget)
        row |= {"seconds": pair.baseline, "spread": pair.baseline_spread, "rounds": pair.rounds}
        seconds = pair.candidate
    else:
        row |= {"seconds": first, "spread": (first, first), "rounds": 1}
        (seconds,) = time_alone(beside, 1, 0.0)
    if own is not None:
        row |= {"own": own.name, "own_seconds": seconds, "ratio": row["seconds"] / seconds}
    return row


def apart(call: Callable[[], Any], seconds: float) -> Any:
    """The result of a call in a process of its own, or a row without a verdict."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send(call())
        except Exception as error:
            sender.send({"verdict": f"raises {type(error).__name__}: {error}"})

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(seconds) else {"verdict": "killed"}
    except EOFError:
        return {"verdict": "ended without a word"}
    finally:
        process.kill()
        process.join()


def predicted(times: Sequence[float], growth: float) -> float:
    """Predicts the seconds for the next size from the growth of the last two sizes; at least linear growth."""
    if not times:
        return 0.0
    return times[-1] * max(growth, times[-1] / times[-2] if len(times) > 1 else 0.0)


def measured(case: str, checkers: Sequence[Checker], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one case: each tool over the sizes, until it passes the cap."""
    rows: list[dict[str, Any]] = []
    times: dict[str, list[float]] = {checker.name: [] for checker in checkers}
    stopped: dict[str, str] = {}
    for place, n in enumerate(options.sizes):
        growth = n / options.sizes[place - 1] if place else 1.0
        passed: set[str] = set()
        for checker in checkers:
            row: dict[str, Any] = {"question": "cost", "case": case, "n": n, "tool": checker.name}
            seconds = predicted(times[checker.name], growth)
            if not checker.serves(make(case, options.sizes[0])):
                row["verdict"] = "not for this"
            elif checker.name in stopped:
                row["verdict"] = stopped[checker.name]
            elif seconds > options.cap:
                row |= {"verdict": "over cap", "predicted_seconds": seconds}
            else:
                own = rival(checker) if rival(checker).name in passed else None
                row |= apart(partial(_prepared, cell, case, n, checker, own, options), 6 * options.cap + 60)
            if str(row["verdict"]).startswith("more than"):
                row["verdict"] = "over cap"
            if row["verdict"] is True:
                passed.add(checker.name)
                times[checker.name].append(row["seconds"])
            elif row["verdict"] in ("over cap", "over memory"):
                stopped[checker.name] = row["verdict"]
            rows.append(row)
            print(f"{case:12s} {n:8d} {checker.name:22s} {row['verdict']!s:14.60s} {_seconds(row)}", flush=True)
    return rows


def _prepared(call: Callable[..., Any], *arguments: Any) -> Any:
    prepare(arguments[-1])
    return call(*arguments[:-1], arguments[-1])


def outcome(checker: Checker, problem: Problem) -> tuple[str, str]:
    """A tool's verdict on a gradient, and its message: passes, fails, or raises another exception."""
    try:
        checker.check(problem)
    except (GradcheckError, AssertionError) as error:
        return "fails", str(error)
    except Exception as error:
        return "raises", f"{type(error).__name__}: {error}"
    return "passes", ""


def judged(message: str, wrong: set[tuple[int, int]], width: int) -> str:
    """What a failure says: it names a wrong entry or the kind of error, or only fails."""
    for match in LOCATED.finditer(message):
        output, input = (int(index) for index in match.groups() if index is not None)
        own = match.group(1) is not None
        if ((output, input) if own else (output // width, input // width)) in wrong:
            return "entry"
    return "kind" if any(kind in message for kind in KINDS) else "found"


def found(planted: WrongGradient, checkers: Sequence[Checker]) -> list[dict[str, Any]]:
    """One row per tool for one wrong gradient, whose right twin fastgrad must pass."""
    right = planted.right()
    EXACT.check(right)
    wrong = wrong_entries(planted.wrong(), right)
    rows = []
    for checker in checkers:
        case = planted.wrong()
        row: dict[str, Any] = {"question": "errors", "case": planted.name, "tool": checker.name}
        if checker.serves(case):
            start = time.perf_counter()
            verdict, message = outcome(checker, case)
            row["seconds"] = time.perf_counter() - start
            if verdict == "fails":
                verdict = judged(message, wrong, 2 if right.x.is_complex() else 1)
            row |= {"verdict": {"passes": "missed"}.get(verdict, verdict), "wrong entries": len(wrong)}
            row["message"] = message[:160]
        else:
            row["verdict"] = "not for this"
        rows.append(row)
    return rows


def alarms(name: str, checkers: Sequence[Checker]) -> list[dict[str, Any]]:
    """One row per tool for one right gradient."""
    func, point = RIGHT[name]
    case = with_structure(problem(func, point().detach()))
    rows = []
    for checker in checkers:
        start = time.perf_counter()
        verdict, message = outcome(checker, case)
        verdict = {"fails": "false alarm"}.get(verdict, verdict)
        row = {"question": "alarms", "case": name, "tool": checker.name, "verdict": verdict, "message": message[:160]}
        rows.append(row | {"seconds": time.perf_counter() - start})
    return rows


def verdicts(checkers: Sequence[Checker], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of both questions about verdicts."""
    rows: list[dict[str, Any]] = []
    for planted in options.wrong:
        rows += found(planted, checkers)
    for name in options.right:
        rows += alarms(name, checkers)
    return rows


# The page.

HEAD = f"""# Comparison with other tools

This page compares fastgrad with other gradient checkers: the cost of a check, and the errors that it finds. There are
two kinds of tools: some compare every entry of the Jacobian, others compare one or a few numbers for all entries. In
each column, the best result among tools of the same kind is bold.

`make comparison` repeats the measurements and writes this page and `benchmarks/results/{NAME}.json`.

Each tool is used in its usual way on a function of one float64 vector, with its own step sizes. All tools use the
tolerance |analytical - numerical| <= {ATOL:g} + {RTOL:g} |numerical|:

| tool | every entry | comparison |
| --- | --- | --- |
"""
SPEED = """
## Time

Each cell: the median time of a check of a right gradient with n inputs; the tool and fastgrad take turns. A check of
more than {quick:g} s is run once. Imports, and jax's compilation at the first call of a size, are excluded.

* "> cap": more than {cap:g} s, measured or predicted from the last two sizes (at least linear growth).
* "> memory": more than {memory:g} GiB of address space.
* "fails": the check fails or raises although the gradient is right.
* "-": no sparsity pattern to pass, because all entries of the Jacobian are nonzero.

![seconds of a check against the number of inputs](../benchmarks/results/{name}-speed.png)
"""
RATIOS = """
The next table summarizes the columns above:

* "fastest": in how many columns the tool is the fastest of its kind;
* ratio: the tool's time, divided by that of the fastgrad checker under "compared with";
* "faster": how many of these ratios are below 1.

jax's first call of a size, with the compilation, took {first}.

| tool | fastest | compared with | faster | geometric mean of the ratio | smallest | largest |
| --- | --- | --- | --- | --- | --- | --- |
"""
CALLS = """
## Calls of func and backward

Each cell: evaluations of func + backward passes of one check that passes. A call with a batch of perturbations or
grad_outputs counts as one call, so the numbers for "by hand" are small. Checks that take more than {quick:g} s are not
counted.

![calls against the number of inputs](../benchmarks/results/{name}-calls.png)
"""
MEMORY = """
## Memory

Peak resident memory of the process in MiB, minus the memory before the check. Checks of less than {quick:g} s are
measured at the second call.

![memory of a check against the number of inputs](../benchmarks/results/{name}-memory.png)
"""
ERRORS = """
## Wrong gradients that are found

Each tool checks {count} wrong gradients of functions with {n} inputs. The function is 2 sin(x), unless the name of the
error says otherwise. With more inputs, tools that compare one number miss larger errors of one entry. numdifftools
would be too slow there.

* In jax, the errors are implemented by `custom_vjp`. One cannot occur there ("-"): jax arrays have no strides.
* For "by hand", the differences are computed from the forward alone, because `torch.func.vmap` has no rule for the
  custom Function.
* Tools that support only real numbers get real and imaginary parts as coordinates.

Verdicts:

* **entry**: the check fails, and the message names a wrong entry.
* **kind**: no entry is wrong, but the message names the error (not linear in grad_output, not deterministic).
* found: the check fails, but the message names no wrong entry. torch prints both Jacobians, abridged.
* missed: the check passes.

![which tool finds which error](../benchmarks/results/{name}-errors.png)

"""
ALARMS = """
## Right gradients that are rejected

A tool should pass these right gradients. At most of the points, differences are inaccurate. A tool that detects few
errors also raises few false alarms.

"""


def _seconds(row: dict[str, Any]) -> str:
    seconds = row.get("seconds")
    if seconds is None:
        return ""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _mib(row: dict[str, Any]) -> int:
    return max(round(row["memory_mib"]), 0)


def _memory(row: dict[str, Any]) -> str:
    return f"{_mib(row):,}"


def _calls(row: dict[str, Any]) -> str:
    return f"{row['evaluations']:,} + {row['backwards']:,}" if "evaluations" in row else ""


WORDS = {"over cap": "> cap", "over memory": "> memory", "not for this": "-", True: "not counted"}


def _chosen(rows: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row.get(key) == value for key, value in fields.items())]


def _unique(rows: list[dict[str, Any]], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def cost_table(
    rows: list[dict[str, Any]], text: Callable[[dict[str, Any]], str], value: Callable[[dict[str, Any]], float | None]
) -> str:
    """Table of one case: tools by sizes, the least value of a column in bold, for each kind of tools."""
    sizes = _unique(rows, "n")
    best: dict[tuple[int, bool], float] = {}
    for row in rows:
        if row["verdict"] is True and (own := value(row)) is not None:
            column = row["n"], EVERY[row["tool"]]
            best[column] = min(own, best.get(column, own))

    def entry(row: dict[str, Any]) -> str:
        words = text(row) if row["verdict"] is True else ""
        if not words:
            return WORDS.get(row["verdict"], "fails")
        return f"**{words}**" if value(row) == best.get((row["n"], EVERY[row["tool"]])) else words

    body = [[tool, *map(entry, _chosen(rows, tool=tool))] for tool in _unique(rows, "tool")]
    return _table(["n", *(f"{n:,}" for n in sizes)], body)


def quickest(costs: list[dict[str, Any]], every: bool) -> list[str]:
    """The tool that takes the least time, for each case and size that a tool of this kind completes."""
    passed = [row for row in _chosen(costs, verdict=True) if EVERY[row["tool"]] == every]
    columns = dict.fromkeys((row["case"], row["n"]) for row in passed)
    return [min(_chosen(passed, case=case, n=n), key=lambda row: row["seconds"])["tool"] for case, n in columns]


def ratio_table(costs: list[dict[str, Any]]) -> str:
    """The table of the tools compared with fastgrad and with each other, without its head."""
    lines = []
    for tool in _unique(costs, "tool"):
        pairs = [row for row in _chosen(costs, tool=tool) if "ratio" in row]
        winners = quickest(costs, EVERY[tool])
        line = [tool, f"{winners.count(tool)} of {len(winners)}"]
        if pairs:
            ratios = [row["ratio"] for row in pairs]
            quicker = sum(ratio < 1 for ratio in ratios)
            figures = (geometric_mean(ratios), min(ratios), max(ratios))
            line += [pairs[0]["own"], f"{quicker} of {len(ratios)}", *(f"{figure:.3g}" for figure in figures)]
        lines.append([*line, *[""] * (7 - len(line))])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def verdict_table(rows: list[dict[str, Any]], good: Sequence[str], head: str, total: str) -> str:
    """Errors, or right gradients, by tools; the good verdicts are in bold and counted below."""
    tools = _unique(rows, "tool")

    def entry(row: dict[str, Any]) -> str:
        verdict = row["verdict"]
        words = str(WORDS.get(verdict, verdict))
        return f"**{words}**" if verdict in good else words

    body = [[case, *map(entry, _chosen(rows, case=case))] for case in _unique(rows, "case")]
    counts = []
    for tool in tools:
        asked = [row for row in _chosen(rows, tool=tool) if row["verdict"] != "not for this"]
        counts.append(f"{sum(row['verdict'] in (*good, 'found') for row in asked)} of {len(asked)}")
    return _table([head, *tools], [*body, [total, *counts]])


def page(result: dict[str, Any]) -> str:
    """The whole page, from a result as it was written."""
    rows, summary, environment = result["rows"], result["summary"], result["environment"]
    costs, errors, right = (_chosen(rows, question=question) for question in ("cost", "errors", "alarms"))
    limits = {"name": NAME, **{key: summary[key] for key in ("cap", "memory", "quick")}}
    what = {checker.name: checker.what for checker in CHECKERS}
    versions = ", ".join(f"{name} {number}" for name, number in summary["versions"].items())
    load = ", ".join(f"{value:.2g}" for value in summary["load"])
    parts = [
        HEAD
        + "".join(f"| {tool} | {'yes' if EVERY[tool] else 'no'} | {what[tool]} |\n" for tool in _unique(rows, "tool"))
    ]
    parts.append(
        f"\n{environment['cpu']}, one CPU, Python {environment['python']}, torch {environment['torch']}, fastgrad "
        f"{environment['fastgrad']}, {versions}. Load average before and after: {load}.\n"
    )
    questions: tuple[tuple[str, Any, Any], ...] = (
        (SPEED, _seconds, lambda row: row["seconds"]),
        (CALLS, _calls, lambda row: row["evaluations"] + row["backwards"] if "evaluations" in row else None),
        (MEMORY, _memory, _mib),
    )
    for head, text, value in questions:
        parts.append(head.format(**limits))
        for case in _unique(costs, "case"):
            table = cost_table(_chosen(costs, case=case), text, value)
            parts.append(f"\n{case.capitalize()}: {CASES[case][0]}\n\n{table}")
        if head is SPEED:
            first = [row["first_seconds"] for row in _chosen(costs, verdict=True, tool="jax check_grads")]
            parts.append(RATIOS.format(first=f"{min(first):.2g} to {max(first):.2g} s") + ratio_table(costs))
    parts.append(ERRORS.format(count=len(_unique(errors, "case")), n=N, **limits))
    parts.append(verdict_table(errors, ("entry", "kind"), "error", "found"))
    parts.append(ALARMS + verdict_table(right, ("passes",), "function", "passed"))
    parts.append("\n" + bench_history.section(bench_history.kept()))
    return "".join(parts)


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    """Draws the figure of each question."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import ListedColormap

    costs, errors = _chosen(rows, question="cost"), _chosen(rows, question="errors")
    cases, tools = _unique(costs, "case"), _unique(rows, "tool")
    quantities: dict[str, tuple[str, Callable[[dict[str, Any]], float | None]]] = {
        "speed": ("seconds", lambda row: row["seconds"]),
        "calls": (
            "evaluations + backward passes",
            lambda row: row["evaluations"] + row["backwards"] if "evaluations" in row else None,
        ),
        "memory": ("MiB above what there was before", lambda row: max(row["memory_mib"], 0.1)),
    }
    for name, (label, value) in quantities.items():
        figure, panels = plt.subplots(1, len(cases), figsize=(3.4 * len(cases), 4.6), sharey=True, squeeze=False)
        for case, axes in zip(cases, panels[0], strict=True):
            for place, tool in enumerate(tools):
                passed = _chosen(costs, case=case, tool=tool, verdict=True)
                points = [(row["n"], value(row)) for row in passed if value(row) is not None]
                own = tool.startswith("fastgrad")
                style = {"color": "black" if own else f"C{place}", "linewidth": 2.0 if own else 1.0}
                style |= {"marker": "os^vD<>Phx"[place % 10], "linestyle": "-" if EVERY[tool] else "--"}
                axes.plot(*zip(*points, strict=True), label=tool, markersize=4, **style) if points else None
            axes.set(xscale="log", yscale="log", xlabel="n", title=case)
            axes.grid(alpha=0.3)
        panels[0][0].set_ylabel(label)
        handles = {
            text: line for axes in panels[0] for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=5, fontsize=8, frameon=False)
        figure.tight_layout(rect=(0, 0.1, 1, 1))
        figure.savefig(folder / f"{NAME}-{name}.png", dpi=100)
        plt.close(figure)
    levels = ("missed", "raises", "not for this", "found", "kind", "entry")
    names = _unique(errors, "case")
    grid = [[levels.index(row["verdict"]) for row in _chosen(errors, case=case)] for case in names]
    figure, axes = plt.subplots(figsize=(8.5, 0.24 * len(names) + 2.2), layout="constrained")
    colors = ListedColormap(["#c0392b", "#8e44ad", "#ecf0f1", "#a9dfbf", "#27ae60", "#1e8449"])
    axes.imshow(grid, cmap=colors, vmin=-0.5, vmax=5.5, aspect="auto")
    for y, line in enumerate(grid):
        for x, level in enumerate(line):
            text = WORDS.get(levels[level], levels[level])
            axes.text(x, y, text, ha="center", va="center", fontsize=6, color="black" if level in (2, 3) else "white")
    axes.set_xticks(range(len(tools)), tools, rotation=35, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    figure.savefig(folder / f"{NAME}-errors.png", dpi=110)
    plt.close(figure)


def publish() -> None:
    """Writes figures and page from the saved result."""
    result = json.loads((RESULTS / f"{NAME}.json").read_text())
    draw(result["rows"], RESULTS)
    PAGE.write_text(page(result))


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The errors that each tool found and missed, and its time divided by fastgrad's."""
    summary: dict[str, Any] = {}
    for tool in _unique(rows, "tool"):
        errors = [row for row in _chosen(rows, question="errors", tool=tool) if row["verdict"] != "not for this"]
        right = _chosen(rows, question="alarms", tool=tool)
        ratios = [row["ratio"] for row in _chosen(rows, question="cost", tool=tool) if "ratio" in row]
        summary[tool] = {
            "errors": len(errors),
            "found": sum(row["verdict"] in ("entry", "kind", "found") for row in errors),
            "named": sum(row["verdict"] in ("entry", "kind") for row in errors),
            "false alarms": sum(row["verdict"] != "passes" for row in right),
            "time over fastgrad": geometric_mean(ratios) if ratios else None,
        }
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--cap", type=float, default=8.0, help="seconds of one check above which a tool is not tried")
    parser.add_argument("--memory", type=float, default=8.0, help="GiB of address space of each process")
    parser.add_argument("--quick", type=float, default=1.0, help="seconds of a check that is counted and repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.5, help="seconds of timing a pair")
    parser.add_argument("--match", default="", help="only cases, and errors, with this in their names; nothing is kept")
    parser.add_argument("--page", action="store_true", help="write figures and page from the kept result")
    options = parser.parse_args()
    if options.page:
        publish()
        return
    # Before jax starts; it would take a thread for every CPU.
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "NPROC": "1"}
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    missing = [checker.name for checker in CHECKERS if checker not in installed()]
    if missing:
        sys.exit(f"not installed: what {', '.join(missing)} needs; pip install --group comparison")
    options.wrong = [planted for planted in WRONG if options.match in planted.name]
    options.right = [name for name in RIGHT if options.match in name]
    for module in IMPORTED:  # once, and not in each process; none of them starts anything
        import_module(module)
    load = [os.getloadavg()[0]]
    start = time.perf_counter()
    rows = [row for case in CASES if options.match in case for row in measured(case, CHECKERS, options)]
    rows += apart(partial(_prepared, verdicts, CHECKERS, options), 600)
    load.append(os.getloadavg()[0])
    summary = {
        "tools": summarize(rows),
        "versions": {name: version(name) for name in ("numpy", "scipy", "numdifftools", "jax", "jaxlib")},
        "load": load,
        "seconds": time.perf_counter() - start,
        **{key: getattr(options, key) for key in ("cap", "memory", "quick", "rounds", "budget")},
    }
    for tool, figures in summary["tools"].items():
        print(f"{tool:22s} {figures}")
    print(f"{summary['seconds']:.0f} s, load average {load}")
    if not options.match:
        print(write(NAME, summary, rows))
        publish()


if __name__ == "__main__":
    main()
