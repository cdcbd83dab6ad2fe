"""Runs under torchrun: checks rows of tests/planted/distributed.py; each rank writes a JSON line for each of them.

torchrun --nproc-per-node 2 -m tests.distributed.run_rows OUT '[[["pipeline"], {"fast_mode": true}]]'
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fastgrad.distributed
from tests.planted.distributed import Row, rows


def main() -> None:
    out, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    with out.with_suffix(f".{rank}").open("w") as lines:
        for names, keywords in runs:
            for row in rows():
                if row.name in names:
                    lines.write(json.dumps(outcome(row, rank, count, keywords)) + "\n")
                    lines.flush()
    dist.destroy_process_group()


def outcome(row: Row, rank: int, count: int, keywords: dict[str, Any]) -> dict[str, Any]:
    """The result of a row on this rank."""
    func, inputs, own = row.make(rank, count)
    before = [value.detach().clone() for value in inputs]
    report = fastgrad.distributed.check(func, inputs, **own, **keywords)
    return {
        "name": row.name,
        "keywords": keywords,
        "verdict": report.verdict,
        "cause": report.causes[0].name if report.causes else "",
        "text": str(report),
        "notes": list(report.notes),
        "as before": all(bool((old == new).all()) for old, new in zip(before, inputs, strict=True)),
    }


if __name__ == "__main__":
    main()
