"""The ranks of a group during a sharded check: rank 0 runs it, and all ranks compute parts of columns and rows."""

from __future__ import annotations

import io
import itertools
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fastgrad.core import native
from fastgrad.core.errors import PACKAGE
from fastgrad.core.heartbeats import INTERVAL
from fastgrad.core.ranks import RankError, RankFailure, Ranks, rank_failure, store_errors_as_rank_errors
from fastgrad.report.report import Report

_START_SECONDS = 15.0
"""Half of the allowed time difference between the calls of the ranks."""

_LOST_SECONDS = 8.0
"""A rank counts as lost if it sends no heartbeat for this many seconds, and for the time of `_LOST_CALLS` usual calls
of func."""

_LOST_CALLS = 20

_HUNG_SECONDS = 18.0
"""A rank stops sending heartbeats if a call of func or of a backward takes more than this many seconds, and more than
the time of `_HUNG_CALLS` usual calls of func. Together with the seconds above and those between two checks, this is
less than 30 seconds."""

_HUNG_CALLS = 20

_FIRST_CALL_SECONDS = 600.0
"""The same limit until the first call has ended: this call may compile func."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 2e-4, 5e-2
"""Limits of the seconds between two polls for a message: the pause is a tenth of the time waited so far."""

_COMPILERS = ("_dynamo/convert_frame.py", "_inductor/compile_fx.py")
"""Files of torch that compile func or its backward while it is called."""

_PART_SECONDS = 0.01, 1.0
"""Least duration of a part (so that messages are cheap) and largest (so that errors are detected)."""

_PARTS_PER_RANK = 64
"""Number of parts per rank; at the end a rank waits for less than one part."""


@dataclass(frozen=True)
class Work:
    """Columns, rows, or groups of them to be computed.

    Attributes
    ----------
    name, arguments
        The arguments of `Worker.part` that say what to compute.
    bounds
        The first item of each part, and the one after its last.
    """

    name: str
    arguments: tuple[Any, ...]
    bounds: tuple[tuple[int, int], ...] = ()


class Worker(Protocol):
    """The problem of a rank."""

    seconds: float

    def part(self, work: Work, begin: int, end: int) -> Any:
        """Items begin, ..., end - 1 of some work.

        None if a gradient or tangent has an unexpected dtype or size, or is nonzero at an unspecified element; rank 0
        then computes all items in one piece.
        """


class Workers(Ranks):
    """The ranks of a group that share the work of a check; a context manager.

    Attributes
    ----------
    rank, count
        The number of this rank, and the number of ranks.
    problem
        The problem of this rank; None until it is made.
    """

    def __init__(self, group: object) -> None:
        super().__init__(group, _START_SECONDS, "fastgrad.check")
        self.problem: Worker | None = None
        self._numbers = itertools.count()
        self._main = threading.get_ident()
        self._call: FrameType | None = None
        self._call_began = time.monotonic()

    def __enter__(self) -> Workers:
        self._heartbeats.__enter__()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._heartbeats.__exit__()
        if error is not None:
            with suppress(RuntimeError):  # the store may have ended
                self._announce(error)
        self.end_connections()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which runs the check."""
        return self.rank == 0

    def report(self, run: Callable[[], Report]) -> Report:
        """The report of a check, which rank 0 runs while the others compute parts."""
        if not self.leads:
            return self._follow()
        report = _picklable(run())
        self._put(f"work {next(self._numbers)}", report)
        for rank in range(1, self.count):
            self._get(f"{rank} is done")
        self._store.set("all are done", "")
        return report

    @store_errors_as_rank_errors()
    def share(
        self,
        work: Work,
        items: Sequence[tuple[int, int]],
        seconds: float,
        run: Callable[[int, int], None],
        take: Callable[[int, int, Any], None],
    ) -> bool:
        """Distributes work over all ranks: each rank repeatedly takes the next free part.

        Parameters
        ----------
        work
            What to do, without bounds.
        items
            Ranges of items: the first, and the one after the last.
        seconds
            Time of one item.
        run
            Computes a part in this process. A part that raises on another rank is also run here, in its order, and
            raises as in a check on one rank.
        take
            Receives a part that another rank has computed.

        Returns
        -------
        bool
            False if a part is unusual: then everything must be computed here.
        """
        number = next(self._numbers)
        bounds = tuple(in_parts(items, seconds, self.count))
        self._put(f"work {number}", replace(work, bounds=bounds))
        raised: dict[int, Exception] = {}
        theirs: deque[int] = deque()
        usual, expected = True, 0

        def fetch(number_of_part: int) -> None:
            nonlocal usual
            found = self._get(f"part {number} {number_of_part}")
            if isinstance(found, RankFailure):
                raised[number_of_part] = RankError(f"rank {found.rank} raised {found.text}; rank 0 did not")
            elif found is None:
                usual = False
            else:
                take(*bounds[number_of_part], found)

        try:
            while (mine := self._next_part(number)) < len(bounds):
                theirs.extend(range(expected, mine))
                expected = mine + 1
                try:
                    run(*bounds[mine])
                except Exception as error:
                    raised[mine] = error
                    break
                while theirs and self._store.check([f"part {number} {theirs[0]}"]):
                    fetch(theirs.popleft())
        finally:
            taken = self._next_part(number, len(bounds))
        for part in [*theirs, *range(expected, min(taken, len(bounds)))]:
            fetch(part)
        self._forget(number)
        for part in sorted(raised):
            run(*bounds[part])
            raise raised[part]
        return usual

    def _forget(self, number: int) -> None:
        """Frees the store's memory of finished work."""
        key = f"work {number}"
        first = self._store.get(key)
        self._put(key, None)
        # Only then are further entries deleted: a late rank may be about to read them.
        if self._store.add(f"{key} was read", 0) == self.count - 1:
            self._delete_rest(key, first)

    def _next_part(self, number: int, count: int = 1) -> int:
        """The next part of some work that no rank has begun; count: how many are then begun, or given up."""
        return int(self._store.add(f"next {number}", count)) - count

    @store_errors_as_rank_errors()
    def _follow(self) -> Report:
        while True:
            number = next(self._numbers)
            found = self._get(f"work {number}")
            if isinstance(found, Report):
                self._put(f"{self.rank} is done", None)
                with suppress(dist.DistNetworkError):  # when all parts are done, rank 0 may exit and close the store
                    self._wait("all are done")
                return found
            if isinstance(found, Work):
                self._store.add(f"work {number} was read", 1)
                self._take_part(number, found)

    def _take_part(self, number: int, work: Work) -> None:
        problem = self.problem
        assert problem is not None
        while (part := self._next_part(number)) < len(work.bounds):
            found: Any
            try:
                found = problem.part(work, *work.bounds[part])
            except Exception as error:
                found = rank_failure(self.rank, error)
            self._put(f"part {number} {part}", found)

    def _put(self, key: str, value: Any) -> None:
        file = io.BytesIO()
        _Pickler(file, protocol=5).dump(value)
        self._write(key, file.getvalue())

    def _get(self, key: str) -> Any:
        """Waits until a key is set in the store, and returns its value."""
        first = self._wait(key)
        value = pickle.loads(self._read(key, first))
        if key.startswith("part"):
            self._delete_rest(key, first)
            self._store.delete_key(key)
        return value

    def _wait(self, key: str) -> bytes:
        begin = looked = time.monotonic()
        while not self._store.check([key]):  # `store.get` would print a warning for every second of waiting
            now = time.monotonic()
            if now - looked > INTERVAL:
                self._check_ranks()
                looked = now
            time.sleep(max(_SHORTEST_PAUSE, min(_LONGEST_PAUSE, (now - begin) / 10)))
        return bytes(self._store.get(key))

    def _announce(self, error: BaseException) -> None:
        """Informs the other ranks of why this one exits."""
        if not self._store.check(["failure"]):
            is_known = isinstance(error, RankError)
            text = str(error) if is_known else f"rank {self.rank} raised {rank_failure(self.rank, error).text}"
            self._store.set("failure", text)

    def _check_ranks(self) -> None:
        """Raises if a rank has raised, or has sent no heartbeat for too long."""
        if self._store.check(["failure"]):
            raise RankError(self._store.get("failure").decode())
        usual = 0.0 if self.problem is None else self.problem.seconds
        patience = max(_LOST_SECONDS, _LOST_CALLS * usual)
        for rank in range(1, self.count) if self.leads else [0]:
            if self._heartbeats.silence(rank) > patience:
                raise RankError(f"rank {rank} has exited or hangs: no response for {patience:.0f} s")

    def _is_well(self) -> bool:
        """Whether no call of func has taken far too long; called by the thread that sends heartbeats."""
        now, call = time.monotonic(), native.running_call(self._main, PACKAGE, _COMPILERS)
        if call is None or call is not self._call:
            self._call_began, self._call = now, call
        usual = 0.0 if self.problem is None else self.problem.seconds
        limit = max(_HUNG_SECONDS, _HUNG_CALLS * usual) if usual else _FIRST_CALL_SECONDS
        return now - self._call_began <= limit


class _Pickler(pickle.Pickler):
    """Sends plain numbers through numpy, which takes a tenth of the time."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.dtype in (torch.float64, torch.int64) and not value.requires_grad:
            return torch.from_numpy, (value.cpu().numpy(),)
        return NotImplemented


def in_parts(items: Sequence[tuple[int, int]], seconds: float, ranks: int) -> Iterator[tuple[int, int]]:
    """Yields the parts of ranges of items, as (begin, end), for this many ranks; seconds: time per item."""
    count, (shortest, longest) = sum(last - first for first, last in items), _PART_SECONDS
    wanted = max(shortest, min(longest, count * seconds / (ranks * _PARTS_PER_RANK)))
    size = max(1, min(-(-count // ranks), int(wanted / max(seconds, 1e-9))))
    for first, last in items:
        for begin in range(first, last, size):
            yield begin, min(begin + size, last)


def _picklable(report: Report) -> Report:
    """The report; an exception that cannot be sent is replaced by text."""
    try:
        pickle.loads(pickle.dumps(report))
    except Exception:
        if report.failure is None or report.failure.cause is None:
            raise
        cause = report.failure.cause
        shown = RuntimeError(f"{type(cause).__name__}: {cause}")
        return replace(report, failure=replace(report.failure, cause=shown))
    return report
