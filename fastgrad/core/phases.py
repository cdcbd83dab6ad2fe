"""Seconds per phase of a check."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter, process_time

import torch

from fastgrad.core.memory import Parameters, Result, raises_memory_error
from fastgrad.core.torch_private import profiler_is_enabled

TIMED_COLUMNS = 32
TIMED_SECONDS = 1e-3
"""Phases are timed if there are at least this many input coordinates, or if the first evaluation takes at least this
many seconds. In the quickest checks, timing would take two percent of the time."""


def clock(device: torch.device) -> float:
    """Synchronizes the device and returns the time in seconds; otherwise only launches of kernels would be timed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def working_seconds(seconds: float, since: float, device: torch.device) -> float:
    """The part of the last `seconds` in which the processor ran this process; on a CUDA device, all of them.

    since: the `process_time` at the beginning of these seconds. A CUDA device works while the process waits.
    """
    return seconds if device.type == "cuda" else min(seconds, process_time() - since)


class Stopwatch:
    """The seconds per phase, without nested phases, of one thread; measured from `__enter__` to `__exit__`.

    Attributes
    ----------
    seconds
        Seconds by the name of the phase. This is the dict that was passed at creation; seconds are added to it.
    inside
        Seconds of the phases that ended within the current phase.
    """

    __slots__ = ("_before", "inside", "seconds")

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.inside = 0.0

    def __enter__(self) -> Stopwatch:
        self._before = running.watch
        running.watch = self
        return self

    def __exit__(self, *_: object) -> None:
        running.watch = self._before


def stopwatch(seconds: dict[str, float], columns: int, first: float) -> AbstractContextManager[object]:
    """A `Stopwatch`, or a context that does nothing in the quickest checks.

    columns: number of input coordinates. first: seconds of the first evaluation.
    """
    return Stopwatch(seconds) if columns >= TIMED_COLUMNS or first >= TIMED_SECONDS else nullcontext()


class _Running(threading.local):
    """The stopwatch of a thread's running check, if any."""

    watch: Stopwatch | None = None


running = _Running()


def phase(name: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorates a function: its time is measured as a phase of the running check.

    While torch.profiler runs, the phase is a range named `fastgrad: ...`. A phase costs about one microsecond, and a
    range costs eight more. An error of the CPU's allocator becomes a MemoryError.
    """

    def decorate(func: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        func = raises_memory_error(func)

        def ranged(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
            with torch.profiler.record_function(f"fastgrad: {name}"):
                return func(*arguments, **keywords)

        @functools.wraps(func)
        def timed(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
            run = ranged if profiler_is_enabled() else func
            watch = running.watch
            if watch is None:
                return run(*arguments, **keywords)
            # This is inlined, because small checks have a dozen phases of a few microseconds.
            outside, watch.inside = watch.inside, 0.0
            start = perf_counter()
            try:
                return run(*arguments, **keywords)
            finally:
                elapsed = perf_counter() - start
                watch.seconds[name] = watch.seconds.get(name, 0.0) + elapsed - watch.inside
                watch.inside = outside + elapsed

        return timed

    return decorate
