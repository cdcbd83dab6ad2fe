"""Where the time of a check goes, phase by phase."""

from __future__ import annotations

import threading
from time import perf_counter
from types import TracebackType

import torch


def clock(device: torch.device) -> float:
    """Seconds, once the device has done what it was given: without that, calls are timed, and not their work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


class Stopwatch:
    """Seconds by phase, each without the phases inside of it; runs from `__enter__` on, in one thread.

    Attributes
    ----------
    seconds
        By the names of phases: the dict that it was made with, and adds to.
    inside
        What the phases that ended within the present one took.
    """

    __slots__ = ("_before", "inside", "seconds")

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.inside = 0.0

    def __enter__(self) -> Stopwatch:
        self._before = running.watch
        running.watch = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        running.watch = self._before


class _Running(threading.local):
    """The stopwatch of the check that runs in a thread, if one does."""

    watch: Stopwatch | None = None


running = _Running()
