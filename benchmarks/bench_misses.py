"""How often fast mode's random vectors miss wrong entries, against the bound that its reports state.

Random error matrices of five kinds under as many directions and cotangents as a check takes, 100,000 of each kind
and size; a figure of the share that is missed over the size of the errors, in units of the detection limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import RESULTS, write
from fastgrad.core.random import SKETCH_COTANGENTS, SKETCH_DIRECTIONS, direction
from fastgrad.engines.plan import detection_limit, sketch_size
from fastgrad.report.settings import Settings

SIZE = 12
BATCH = 10_000
RATIOS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
"""Sizes of the errors, in thresholds: where misses are frequent enough to be counted."""


def single(count: int, generator: torch.Generator) -> Tensor:
    """A matrix with one wrong entry."""
    return torch.nn.functional.one_hot(torch.randint(SIZE * SIZE, (count,), generator=generator), SIZE * SIZE).view(
        count, SIZE, SIZE
    )


def pair_in_a_row(count: int, generator: torch.Generator) -> Tensor:
    """A matrix with two wrong entries that cancel each other in a row."""
    order = torch.rand(count, SIZE, generator=generator).argsort(1)
    first, second = (torch.nn.functional.one_hot(order[:, k], SIZE) for k in (0, 1))
    rows = torch.nn.functional.one_hot(torch.randint(SIZE, (count,), generator=generator), SIZE)
    return rows.unsqueeze(2) * (first - second).unsqueeze(1)


def pair_in_a_column(count: int, generator: torch.Generator) -> Tensor:
    """A matrix with two wrong entries that cancel each other in a column."""
    return pair_in_a_row(count, generator).transpose(1, 2)


def dense(count: int, generator: torch.Generator) -> Tensor:
    """A matrix of entries of one size and random signs."""
    return torch.randn(count, SIZE, SIZE, generator=generator).sign()


def low_rank(count: int, generator: torch.Generator) -> Tensor:
    """The outer product of two random vectors, with 1 as its largest entry."""
    left, right = torch.randn(2, count, SIZE, generator=generator)
    matrices = left.unsqueeze(2) * right.unsqueeze(1)
    return matrices / matrices.abs().amax((1, 2), keepdim=True)


KINDS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "single": single,
    "pair in a row": pair_in_a_row,
    "pair in a column": pair_in_a_column,
    "dense": dense,
    "low rank": low_rank,
}


def misses(kind: str, trials: int, count: int) -> list[int]:
    """For each of RATIOS, how many error matrices all pairs of `count` cotangents and directions miss."""
    found = [0] * len(RATIOS)
    generator = torch.Generator().manual_seed(5)
    for batch in range(trials // BATCH):
        errors = KINDS[kind](BATCH, generator).to(torch.float64)
        u, v = (
            torch.stack([direction(BATCH * SIZE, batch, stream + 16 * k).view(BATCH, SIZE) for k in range(count)], 1)
            for stream in (SKETCH_DIRECTIONS, SKETCH_COTANGENTS)
        )
        largest = (v @ errors @ u.transpose(1, 2)).abs().amax((1, 2))
        found = [total + int((ratio * largest <= 1).sum()) for total, ratio in zip(found, RATIOS, strict=True)]
    return found


def draw(rows: list[dict[str, Any]], limit: float, threshold: float, count: int) -> str:
    """The figure; returns its path."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    sizes = torch.logspace(0, 1.05 * torch.log10(torch.tensor(limit / threshold)).item(), 200, dtype=torch.float64)
    bound = (2 * sizes**-count).clamp(max=1)
    axes.loglog(sizes * threshold / limit, bound, color="black", label=f"bound: min(1, 2 (threshold / e)^{count})")
    for kind, marker in zip(KINDS, "os^Dv", strict=True):
        own = [row for row in rows if row["kind"] == kind and row["missed"]]
        label = f"{kind}, {'measured' if own else 'none missed'}"
        axes.plot([row["e / limit"] for row in own], [row["share"] for row in own], marker, label=label)
    axes.axvline(1, color="gray", linestyle=":")
    axes.text(0.93, 0.4, "detection limit", rotation=90, ha="right", va="top", color="gray", size="small")
    axes.set_xlabel("size of the errors, e / detection limit")
    axes.set_ylabel("share of checks that miss them")
    axes.set_title("Wrong entries that fast mode misses")
    axes.legend(fontsize="small")
    path = RESULTS / "misses.png"
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100_000)
    options = parser.parse_args()
    settings = Settings(fast_mode=True)
    count, limit, threshold = sketch_size(settings.confidence), detection_limit(settings), settings.atol / 4
    rows = []
    for kind in KINDS:
        for ratio, missed in zip(RATIOS, misses(kind, options.trials, count), strict=True):
            bound = min(1.0, 2 * ratio**-count)
            row = {"kind": kind, "e / threshold": ratio, "e / limit": ratio * threshold / limit, "missed": missed}
            rows.append({**row, "trials": options.trials, "share": missed / options.trials, "bound": bound})
            print(rows[-1], flush=True)
    largest = max(row["share"] / row["bound"] for row in rows)
    summary = {"count": count, "confidence": settings.confidence, "largest share / bound": largest}
    print(summary)
    print(write("misses", summary, rows), draw(rows, limit, threshold, count))


if __name__ == "__main__":
    main()
