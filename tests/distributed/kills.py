"""Checks that are killed repeatedly and resume from their checkpoint must report the same in the end.

    python -m tests.distributed.kills 50

kills 50 checks, on one and on two ranks in turn, and prints reports that differ from those of uninterrupted checks.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastgrad.sharding import checkpoint, problem, workers
from tests.distributed.ranks import started_ranks
from tests.distributed.run_sharded import checks, outcome

NAMES = (
    *("compressed, right", "compressed, wrong", "compressed by columns, right", "several passes, right"),
    *("several passes, wrong", "forward mode", "second derivatives", "own steps"),
)
"""Names of checks that take many calls."""

_CALLS = itertools.count(1)


def keep_all() -> None:
    """Makes all work go into the checkpoint immediately, item by item."""
    problem.WORTH_KEEPING, checkpoint.COMMIT_SECONDS, workers._PART_SECONDS = -1.0, -1.0, (0.0, 0.0)


def killed_at(call: int, func: Callable[..., Any]) -> Callable[..., Any]:
    """func; its process is killed at call number `call` on rank 0, or -call on another rank if negative; 0: never."""

    def killing(*arguments: Tensor) -> Any:
        number = next(_CALLS) if os.environ["RANK"] == "0" else -next(_CALLS)
        if number == int(os.environ["KILLED_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return func(*arguments)

    os.environ["KILLED_AT"] = str(call)  # the checkpoint does not compare the environment
    return killing


def take_part(name: str, call: int, path: Path, out: Path) -> None:
    """Runs one rank of a check; the environment has the number of ranks."""
    torch.set_num_threads(1)
    keep_all()
    group = None
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
        group, problem.WORTH_SHARING = dist.group.WORLD, -1.0
    func, make, keywords = checks()[name]
    found = outcome(killed_at(call, func), make, keywords | {"checkpoint": path}, group)
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps([next(_CALLS) - 1, found]))
    os._exit(0)  # the group may wait for ranks that are gone


def run(name: str, call: int, ranks: int, path: Path) -> tuple[int, dict[str, Any]] | None:
    """The number of calls of func on rank 0, and its report; None if it was killed."""
    out = path.with_suffix(".json")
    out.unlink(missing_ok=True)
    with started_ranks(ranks, "tests.distributed.kills", name, str(call), str(path), str(out)) as started:
        for process in started:
            process.wait(60)
    calls, found = json.loads(out.read_text()) if out.exists() else (0, {"raised": "RankError"})
    return None if found.get("raised") == "RankError" else (calls, found)


def after_kills(name: str, calls: Sequence[int], ranks: Sequence[int]) -> tuple[int, int, dict[str, Any]]:
    """Kills a check at some calls; returns the number of kills, the calls of the last run, and its report."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        for kills, (call, count) in enumerate(zip([*calls, 0], ranks, strict=True)):
            found = run(name, call, count, path)
            assert path.exists() == (found is None), f"{name}, killed at {call} of {count}: {path.exists()}, {found}"
            if found is not None:
                return kills, *found
    raise AssertionError(f"{name} did not end")


def main() -> None:
    if len(sys.argv) > 2:
        take_part(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
        return
    kills = differing = 0
    for number in itertools.count():
        name = NAMES[number % len(NAMES)]
        with tempfile.TemporaryDirectory() as folder:
            whole = run(name, 0, 1, Path(folder) / "checkpoint")
        assert whole is not None
        ranks = [1 + (number + turn) % 2 for turn in range(3)]
        # A rank other than 0 makes few calls if it begins late.
        late = whole[0] * (4 + number % 5) // 9
        calls = [late if count == 1 else late // 2 if number % 4 < 2 else -2 for count in ranks[:2]]
        killed, last, report = after_kills(name, calls, ranks)
        kills += killed
        is_same = report == whole[1]
        differing += not is_same
        print(
            f"{name}: killed at calls {calls} of {ranks[:2]} ranks; {whole[0]} calls without, {last} in the last run,"
            f" on {ranks[killed]} ranks; {'the same report' if is_same else f'{report} instead of {whole[1]}'}",
            flush=True,
        )
        if kills >= int(sys.argv[1]):
            break
    print(f"{kills} kills, {differing} reports differ")


if __name__ == "__main__":
    main()
