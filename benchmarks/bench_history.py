"""Wrong gradients of released libraries: which of them torch's checkers and fastgrad's find, at two points each.

Writes results/history.json and a section of docs/comparison.md; `--page` writes the section again from the kept result.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastgrad
from benchmarks.measure import RESULTS, write
from tests.planted.history import HISTORY, Shipped

NAME = "history"
PAGE = Path(__file__).parents[1] / "docs" / "comparison.md"
BEGIN, END = "<!-- history: begin -->\n", "<!-- history: end -->\n"
CHECKERS: dict[str, tuple[Callable[..., bool], Callable[..., bool]]] = {
    "torch slow": (torch.autograd.gradcheck, torch.autograd.gradgradcheck),
    "torch fast": (
        partial(torch.autograd.gradcheck, fast_mode=True),
        partial(torch.autograd.gradgradcheck, fast_mode=True),
    ),
    "fastgrad exact": (fastgrad.gradcheck, fastgrad.gradgradcheck),
    "fastgrad fast": (
        partial(fastgrad.gradcheck, fast_mode=True),
        partial(fastgrad.gradgradcheck, fast_mode=True),
    ),
}
"""Each tool's check of first and of second derivatives."""
if importlib.util.find_spec("jax") is not None:
    from benchmarks import jax_checker

    CHECKERS["jax"] = jax_checker.gradcheck, jax_checker.gradgradcheck

POINTS = ("inputs", "generic")
HEAD = """
## Wrong gradients of released libraries

Each tool checks {count} wrong gradients that libraries released, at default tolerances. They are reimplemented from
public issues (`tests/planted/history/`).

Each cell has two verdicts: at inputs for which the issue occurs, and at an ordinary random point. The last row counts
the errors that are found at the inputs of the issue, and the right versions of the same functions that pass there.
jax's checker gets backward as a custom rule. `python -m benchmarks.bench_history` makes this table; torch {torch},
fastgrad {fastgrad}.

Not every checker can find every error:

* Many of the gradients are right at the random point.
* Some are wrong only for a non-contiguous grad_output, so the checker must pass one.
* One is wrong only if backward is recorded (`create_graph=True`), so the checker must compare recorded and unrecorded
  gradients.

"""


def outcome(check: Callable[..., bool], func: Callable[..., Any], inputs: tuple[Any, ...], row: Shipped) -> str:
    """The verdict: passes, fails, or the name of another exception."""
    torch.manual_seed(0)
    try:
        return "passes" if check(func, inputs, **row.keywords, raise_exception=False) else "found"
    except Exception as error:
        return f"raises {type(error).__name__}"


def measured(row: Shipped) -> Iterable[dict[str, Any]]:
    """One result per tool."""
    for tool, checks in CHECKERS.items():
        verdicts = {
            f"{func} at {point}": outcome(checks[row.order - 1], getattr(row, func), getattr(row, point)(), row)
            for func in ("func", "twin")
            for point in POINTS
        }
        yield {"title": row.title, "library": row.library, "issue": row.issue, "tool": tool, **verdicts}


def section(result: dict[str, Any]) -> str:
    """The section of the page, from a saved result."""
    rows, environment = result["rows"], result["environment"]
    titles = list(dict.fromkeys(row["title"] for row in rows))
    tools = list(dict.fromkeys(row["tool"] for row in rows))
    lines = ["| error | library | " + " | ".join(tools) + " |", "| --- " * (2 + len(tools)) + "|"]
    for title in titles:
        of_title = {row["tool"]: row for row in rows if row["title"] == title}
        first = of_title[tools[0]]
        cells = (", ".join(of_title[tool][f"func at {point}"] for point in POINTS) for tool in tools)
        lines.append(f"| [{title}]({first['issue']}) | {first['library']} | " + " | ".join(cells) + " |")
    totals = []
    for tool in tools:
        of_tool = [row for row in rows if row["tool"] == tool]
        found = sum(row["func at inputs"] == "found" for row in of_tool)
        right = sum(row["twin at inputs"] == "passes" for row in of_tool)
        totals.append(f"{found} found, {right} right versions pass")
    lines.append(f"| of {len(titles)} | | " + " | ".join(totals) + " |")
    head = HEAD.format(count=len(titles), torch=environment["torch"], fastgrad=environment["fastgrad"])
    return BEGIN + head + "\n".join(lines) + "\n\n" + END


def kept() -> dict[str, Any]:
    """The last saved result."""
    result: dict[str, Any] = json.loads((RESULTS / f"{NAME}.json").read_text())
    return result


def publish() -> None:
    """Writes the section of the page from the saved result."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + section(kept()) + rest.partition(END)[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the section from the kept result")
    if not parser.parse_args().page:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        rows = [result for row in HISTORY for result in measured(row)]
        print(write(NAME, {"errors": len(HISTORY)}, rows))
    publish()


if __name__ == "__main__":
    main()
