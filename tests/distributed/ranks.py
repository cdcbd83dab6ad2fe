"""Runs a module on several ranks: as torchrun does, or in processes that begin with its imports."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from tests import processes

ROOT = Path(__file__).parents[2]


def torchrun(count: int, module: str, *arguments: str) -> str:
    """What the ranks print; fails if a rank fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command += ["-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@contextmanager
def started_ranks(count: int, module: str, *arguments: str, err: str = os.devnull) -> Iterator[list[processes.Process]]:
    """Processes that run a module, in the environment that torchrun gives them; those that have not ended are killed.

    err: the beginning of the names of files to which they write their errors.
    """
    # As with torchrun, the store is in a separate process that outlives rank 0.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(count)}
    address |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    code = f"import runpy, sys; sys.argv[1:] = {arguments!r}\nrunpy.run_module({module!r}, run_name='__main__')"
    started = []
    try:
        for rank in range(count):
            own_err = err if err == os.devnull else f"{err}.{rank}"
            own = address | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(processes.Process(code, own, "fastgrad.distributed", err=own_err))
        yield started
    finally:
        for process in started:
            process.kill()


def run_ranks(count: int, module: str, *arguments: str, err: str) -> None:
    """Runs a module on ranks until all have ended; fails as soon as one does."""
    with started_ranks(count, module, *arguments, err=err) as started:
        end = time.monotonic() + 600.0
        while any(process.poll() is None for process in started):
            failed = [rank for rank, process in enumerate(started) if process.poll()]
            assert not failed, (
                f"rank {failed[0]} has ended with exit code {started[failed[0]].returncode}: "
                + Path(f"{err}.{failed[0]}").read_text()[-4000:]
            )
            assert time.monotonic() < end, "the ranks did not end"
            time.sleep(0.05)
        assert not any(process.poll() for process in started)
