"""A check whose work is done in parts: by the ranks of a group, with a checkpoint, or both."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastgrad.core.random import RandomState
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings
from fastgrad.sharding.calls import described, reject_differences
from fastgrad.sharding.checkpoint import Checkpoint
from fastgrad.sharding.problem import Partition
from fastgrad.sharding.workers import Workers


class Validated(NamedTuple):
    """A check whose arguments are valid.

    Attributes
    ----------
    run
        Runs the check.
    func, values, settings
        Its arguments; values by their names in messages.
    """

    run: Callable[[Partition], Report]
    func: Callable[..., Any]
    values: Mapping[str, Any]
    settings: Settings


def in_parts(
    validated: Callable[[], Validated],
    group: torch.distributed.ProcessGroup | None,
    checkpoint: str | os.PathLike[str] | None,
) -> Report:
    """The report of a check on several ranks, with a checkpoint, or both.

    Parameters
    ----------
    validated
        Validates the arguments of the check; if it raises on a rank, all ranks raise.
    group
        As in `fastgrad.check`.
    checkpoint
        As in `fastgrad.check`.
    """
    random = RandomState()
    with nullcontext() if group is None else Workers(group) as workers:
        try:
            with nullcontext() if workers is None else workers.validation():
                run, func, values, settings = validated()
                call = described(func, values, settings)
            if workers is not None:
                should_be = "fastgrad.check with the same func, values and keywords"
                reject_differences(workers.gather(call), should_be)
            if checkpoint is None or not (workers is None or workers.leads):
                return run(Partition(workers))
            with Checkpoint(Path(checkpoint), call) as file:
                return run(Partition(workers, file))
        finally:
            if workers is not None:
                random.restore()  # func drew random numbers on some ranks only; all must continue in one state
