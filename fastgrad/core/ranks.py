"""Messages between rank 0, which runs a check, and the other ranks, through the store of the process group."""

from __future__ import annotations

import pickle
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fastgrad.core import torch_private
from fastgrad.core.errors import text_of
from fastgrad.core.heartbeats import INTERVAL, Heartbeats

_LOST_SECONDS = 3 * INTERVAL
"""Rank 0 counts as lost if it sends no heartbeat for this many seconds after a message did not come in time."""

_TIMEOUT_FACTOR = 2.0
"""Limit of the wait for a rank, as a multiple of the time limit of a call of func: a collective may wait for several
ranks in turn."""

MAX_BYTES = 4 << 20
"""Largest number of bytes of a message in one entry of the store, whose limit is 8 MiB; longer messages use several
entries."""

_COUNT_BYTES = 4
"""Size in bytes of the number of further entries, with which a message begins."""

_WORTH_DELETING = 1 << 12
"""Messages of more than this many bytes are deleted from the store. For shorter ones, deleting is not worth it, because
it takes as long as fetching."""

_checks: Counter[str] = Counter()
"""Number of checks per group in this process. It is equal on all ranks, and part of the keys of a check's messages."""


_free_connections: WeakKeyDictionary[dist.ProcessGroup, list[Any]] = WeakKeyDictionary()
"""For each group, connections to its store that are not in use. A later check uses them again."""


class RankError(RuntimeError):
    """The calls of the ranks differ, or a rank raised, exited, or did not answer in time."""


@contextmanager
def store_errors_as_rank_errors() -> Iterator[None]:
    """A context or decorator: a network error of the store becomes a `RankError`, because rank 0 may have exited."""
    try:
        yield
    except dist.DistNetworkError as error:
        raise RankError("rank 0 or the store of the process group has exited during the check") from error


class _MessageTimeoutError(Exception):
    """A message did not come in time."""


@dataclass(frozen=True)
class RankFailure:
    """The error of a rank: its exception as text, and the collective in which it timed out, if any."""

    rank: int
    text: str
    collective: str = ""


def rank_failure(rank: int, error: BaseException) -> RankFailure:
    """Describes an exception of a rank as a `RankFailure`."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame.name for frame in frames if "torch/distributed" in frame.filename and frame.name != "wrapper"]
    waited = any(phrase in str(error) for phrase in ("Timed out", "timed out", "timeout", "Connection closed"))
    own = [frame for frame in frames if "torch/" not in frame.filename and "fastgrad/" not in frame.filename]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return RankFailure(rank, f"{text_of(error)}{place}", inside[-1] if waited and inside else "")


class Ranks:
    """The ranks of a group during one check."""

    def __init__(self, group: object, seconds: float, entry: str = "fastgrad.distributed.check") -> None:
        """seconds: time limit of a call of func; entry: the name of the function that all ranks call.

        Raises unless this process belongs to the group.
        """
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "group must be a process group that contains this process, for example "
                f"torch.distributed.group.WORLD, got {group!r}."
            )
        self._entry = entry
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        _checks[group.group_name] += 1
        self._prefix = f"fastgrad/{_checks[group.group_name]}"
        self._timeout = _TIMEOUT_FACTOR * seconds
        self._group = group
        self._free = _free_connections.setdefault(group, [])
        self._connections: list[Any] = []
        # Two connections, because a thread that waits on a connection blocks it for other threads.
        self._store = self.connection()
        self._heartbeats = Heartbeats(self.connection(), self.rank, self._is_well)
        self._is_stale = self._was_stale = False
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def set_limit(self, seconds: float) -> None:
        """Sets the time limit of a call of func, and of waiting in a collective of the group."""
        self._timeout = _TIMEOUT_FACTOR * seconds
        for store in (self._store, self._heartbeats.store):
            store.set_timeout(timedelta(seconds=self._timeout))
        torch_private.set_timeout(self._group, timedelta(seconds=seconds))

    @contextmanager
    def during_check(self) -> Iterator[None]:
        """A context in which rank 0 sends heartbeats; on leaving it, the timeout of the group is as before."""
        before = torch_private.timeout_of(self._group)
        try:
            with self._heartbeats if self.rank == 0 else nullcontext():
                yield
        finally:
            self.end_connections()
            torch_private.set_timeout(self._group, before)

    def _is_well(self) -> bool:
        """Whether this rank sends heartbeats."""
        return True

    @contextmanager
    def validation(self) -> Iterator[None]:
        """A context before `gather`: if it raises, `gather` raises a RankError with the reason on the other ranks.

        All arguments are validated in this context. So every call takes part in `gather`, and the number of checks
        stays equal on all ranks.
        """
        try:
            yield
        except Exception as error:
            with suppress(RankError):  # the store may have ended
                self._send(RankFailure(self.rank, text_of(error)))
            raise

    def gather(self, value: Any) -> list[Any]:
        """Gathers one value per rank on all ranks at the beginning of a check, and returns them by rank."""
        self._send(value)
        found = [self._next(rank, f"did not call {self._entry}") for rank in range(self.count)]
        for rank, (entry, _) in enumerate(found):
            if entry != found[0][0]:
                called = f"rank 0 called {found[0][0]}, and rank {rank} {entry}"
                raise RankError(f"The calls of the ranks differ: {called}.")
        values = [value for _, value in found]
        rejected = [one for one in values if isinstance(one, RankFailure)]
        if rejected:
            raise RankError("; ".join(f"rank {one.rank} rejected its arguments: {one.text}" for one in rejected))
        return values

    def _send(self, value: Any) -> None:
        """Sends this rank's value to the `gather` of all ranks."""
        for rank in range(self.count):
            self._push(rank, (self._entry, value))

    def order(self, values: Sequence[Any]) -> None:
        """Sends a request from rank 0 to each other rank; values: one request per rank."""
        for rank in range(1, self.count):
            self._push(rank, values[rank])

    def answers(self) -> list[Any]:
        """The answers of the other ranks, from rank 1 on."""
        return [self._next(rank, "did not answer") for rank in range(1, self.count)]

    def next_order(self) -> Any:
        """The next request of rank 0."""
        while True:
            try:
                return self._pop(0)
            except _MessageTimeoutError as error:
                self._heartbeats.silence(0)
                time.sleep(_LOST_SECONDS)
                if self._heartbeats.silence(0) >= _LOST_SECONDS:
                    raise RankError(f"rank 0 has not responded for {_LOST_SECONDS:g} s") from error

    def answer(self, value: Any) -> None:
        """Sends the answer to rank 0."""
        self._push(0, value)

    def end(self, value: Any) -> None:
        """Sends the result from rank 0, and waits until all ranks have it: the store may end with rank 0."""
        self.order([value] * self.count)
        with suppress(RankError):
            self.answers()

    def connection(self) -> Any:
        """A connection to the store for this check: an unused one, or a new one."""
        connection = self._free.pop() if self._free else torch_private.store_of(self._group).clone()
        self._connections.append(connection)
        store = distributed_c10d.PrefixStore(self._prefix, connection)
        store.set_timeout(timedelta(seconds=self._timeout))
        return store

    def end_connections(self) -> None:
        """Keeps the connections for the next check, unless a wait timed out, because making one may take seconds."""
        if not self._was_stale:
            self._free += self._connections

    def _next(self, rank: int, what: str) -> Any:
        try:
            return self._pop(rank)
        except _MessageTimeoutError as error:
            later = range(rank + 1, self.count)
            store = self.connection()
            missing = [rank, *(other for other in later if not store.check([self._key_from(other)]))]
            several = "ranks" if len(missing) > 1 else "rank"
            numbers = ", ".join(map(str, missing))
            raise RankError(f"{several} {numbers} {what} within {self._timeout:g} s") from error

    @store_errors_as_rank_errors()
    def _push(self, rank: int, value: Any) -> None:
        self._write(f"{self.rank} to {rank}, {self._sent[rank]}", pickle.dumps(value))
        self._sent[rank] += 1

    def _write(self, key: str, data: bytes) -> None:
        """Puts a message into the store. Its first entry holds the number of further entries, and is written last."""
        others = range(MAX_BYTES, len(data), MAX_BYTES)
        for i, begin in enumerate(others):
            self._store.set(f"{key}, {i}", data[begin : begin + MAX_BYTES])
        self._store.set(key, len(others).to_bytes(_COUNT_BYTES, "big") + data[:MAX_BYTES])

    def _read(self, key: str, first: bytes) -> bytes:
        """The whole message, given its first entry."""
        return b"".join([first[_COUNT_BYTES:], *map(self._store.get, _further(key, first))])

    def _delete_rest(self, key: str, first: bytes) -> None:
        """Deletes the further entries of a message."""
        for other in _further(key, first):
            self._store.delete_key(other)

    @store_errors_as_rank_errors()
    def _pop(self, rank: int) -> Any:
        if self._is_stale:  # the old connection could return a late answer to an earlier request
            self._store, self._is_stale = self.connection(), False
        key = self._key_from(rank)
        try:
            value = self._store.get(key)
        except dist.DistNetworkError:
            raise
        except RuntimeError as error:
            self._is_stale = self._was_stale = True
            raise _MessageTimeoutError from error
        if len(value) > _WORTH_DELETING:
            self._store.delete_key(key)
        data = self._read(key, value)
        self._delete_rest(key, value)
        self._received[rank] += 1
        return pickle.loads(data)

    def _key_from(self, rank: int) -> str:
        return f"{rank} to {self.rank}, {self._received[rank]}"


def _further(key: str, first: bytes) -> list[str]:
    """The keys of the further entries of a message."""
    return [f"{key}, {i}" for i in range(int.from_bytes(first[:_COUNT_BYTES], "big"))]
