"""Ranks that exit, stop, raise or skip a collective during a check: how the other ranks end.

    python -m tests.distributed.faults 500
    python -m tests.distributed.faults 100 sharded

runs this many, of every kind in turn, of distributed functions or of work that ranks share, and prints their outcomes.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

import fastgrad.distributed
from fastgrad.sharding import workers
from tests.distributed.ranks import started_ranks
from tests.planted.distributed import leaf, numbers, operator, own, same, total

SECONDS = 2.0
"""What a collective may wait in these checks."""

LIMIT = 30.0
"""Seconds after the fault within which every surviving rank must have ended."""

LOST = ("exits", "stops", "hangs", "is interrupted")
"""Kinds after which the rank itself does not end the check."""

KINDS = ("exits", "stops", "raises in forward", "raises in backward", "skips a collective", "is interrupted")
SHARDED_KINDS = (*LOST, "raises in forward", "raises in backward")


@dataclass(frozen=True)
class Fault:
    """The fault of a rank at one of its calls."""

    kind: str
    rank: int
    call: int
    count: int = 2
    sharded: bool = False
    patience: float = workers._LOST_SECONDS
    size: int = 400


def sums(fault: Fault) -> Any:
    """A cumulative sum in which the fault happens, for a check whose work is shared."""
    calls = {"forward": itertools.count(1), "backward": itertools.count(1)}

    def call(where: str) -> None:
        if dist.get_rank() == fault.rank and next(calls[where]) == fault.call:
            if fault.kind == "raises in backward" and where == "backward":
                raise ValueError("planted")
            if where == "forward":
                _happen(fault)
        time.sleep(0.005)

    def forward(x: Tensor) -> Tensor:
        call("forward")
        return x.cumsum(0)

    def backward(grad: Tensor) -> Tensor:
        call("backward")
        return grad.flip(0).cumsum(0).flip(0)

    return operator(forward, backward)


def _happen(fault: Fault) -> None:
    if fault.kind == "exits":
        os._exit(7)
    if fault.kind == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.kind == "hangs":
        time.sleep(10 * LIMIT)
    if fault.kind == "is interrupted":
        raise KeyboardInterrupt
    if fault.kind == "raises in forward":
        raise ValueError("planted")


def row_parallel(fault: Fault) -> Any:
    """A row-parallel product in which the fault happens."""
    rank, calls = dist.get_rank(), {"forward": 0, "backward": 0}

    def is_due(where: str) -> bool:
        calls[where] += 1
        return rank == fault.rank and calls[where] == fault.call

    def forward(x: Tensor) -> Tensor:
        if is_due("forward"):
            _happen(fault)
            if fault.kind == "skips a collective":
                return same(x)
        return total(x)

    def backward(grad: Tensor) -> Tensor:
        if is_due("backward") and fault.kind == "raises in backward":
            raise ValueError("planted")
        return total(grad) / dist.get_world_size()

    reduce = operator(forward, backward)
    return lambda x, w: reduce(x @ w)


def take_part(fault: Fault, out: Path) -> None:
    """One rank of a check in which the fault happens."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    x, w = leaf(own(numbers(1, 3, 2 * count), 1)), leaf(own(numbers(2, 2 * count, 4), 0))
    before = x.detach().clone(), w.detach().clone()
    said: dict[str, Any] = {"error": ""}
    try:
        if fault.sharded:
            workers._LOST_SECONDS = fault.patience
            long = torch.linspace(0, 1, fault.size, dtype=torch.float64, requires_grad=True)
            fastgrad.check(sums(fault), long, engine="dense", group=dist.group.WORLD)
        else:
            fastgrad.distributed.check(
                row_parallel(fault), (x, w), placements=[Shard(1), Shard(0)], outputs=Replicate(), seconds=SECONDS
            )
    except fastgrad.distributed.RankError as error:
        said["error"] = str(error)
    except ValueError as error:  # rank 0 raises the exceptions of func
        said["error"] = f"rank {rank} raised {error}"
    said["as before"] = torch.equal(x, before[0]) and torch.equal(w, before[1])
    out.with_suffix(f".{rank}").write_text(json.dumps(said))
    os._exit(0)  # the group may wait for ranks that are gone


def run(fault: Fault) -> list[str]:
    """What is wrong in the way that the surviving ranks ended; empty if nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rank"
        survivors = [rank for rank in range(fault.count) if rank != fault.rank or fault.kind not in LOST]
        with started_ranks(fault.count, "tests.distributed.faults", json.dumps(asdict(fault)), str(out)) as started:
            end, problems = time.monotonic() + 20.0 + LIMIT, []  # 20 s for imports
            for rank in survivors:
                try:
                    started[rank].wait(max(0.1, end - time.monotonic()))
                except TimeoutError:
                    problems.append(f"rank {rank} did not end")
                    continue
                path = out.with_suffix(f".{rank}")
                said = json.loads(path.read_text()) if path.exists() else {"error": "", "as before": False}
                if not said["error"]:
                    problems.append(f"rank {rank} raised no RankError")
                is_interrupted = fault.kind == "is interrupted"
                expected = "raised" if "raises" in fault.kind or is_interrupted else "no response"
                if (fault.sharded or is_interrupted) and expected not in said["error"]:
                    problems.append(f"rank {rank} says: {said['error']}")
                if not said["as before"]:
                    problems.append(f"inputs of rank {rank} are not as they were")
                if str(fault.rank) not in said["error"]:
                    problems.append(f"rank {rank} does not name rank {fault.rank}: {said['error']}")
        return problems


def main() -> None:
    is_sharded = sys.argv[2:] == ["sharded"]
    if len(sys.argv) > 2 and not is_sharded:
        take_part(Fault(**json.loads(sys.argv[1])), Path(sys.argv[2]))
        return
    count, failed = int(sys.argv[1]), 0
    for number in range(count):
        kinds = SHARDED_KINDS if is_sharded else KINDS
        turn = number // len(kinds)
        fault = Fault(kinds[number % len(kinds)], turn % 3 % (2 + number % 2), 1 + number % 17, 2 + number % 2)
        if is_sharded:  # the first calls may raise or take minutes
            fault = replace(fault, rank=turn % 2, call=20 + 7 * (turn % 9), count=2 + turn % 2, sharded=True)
        start = time.monotonic()
        problems = run(fault)
        failed += bool(problems)
        print(f"{time.monotonic() - start:5.1f} s  {fault}  {'; '.join(problems) or 'ended'}", flush=True)
    print(f"{count - failed} of {count} ended as they should")


if __name__ == "__main__":
    main()
