"""Heartbeats: numbers in the store of a process group by which a rank shows that it runs, and others notice."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

INTERVAL = 1.0
"""Seconds between heartbeats: well below the seconds after which a rank counts as lost."""

_LOOK_INTERVALS = 2
"""A store that has not answered after this many intervals does not answer."""


class Heartbeats:
    """The heartbeats of the ranks of a group; as a context, this rank sends its own.

    Attributes
    ----------
    store
        A connection to the store that nothing else waits on: a thread that waits on a connection blocks it for others.
    """

    def __init__(self, store: Any, rank: int, is_well: Callable[[], bool]) -> None:
        """is_well: called before each heartbeat of this rank, which is sent only if it returns True."""
        self.store = store
        self._rank, self._is_well = rank, is_well
        self._changes: dict[int, tuple[bytes, float]] = {}
        self._ended = threading.Event()
        self._sending = threading.Thread(target=self._send, daemon=True)

    def __enter__(self) -> Heartbeats:
        self._sending.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._sending.join()

    def silence(self, rank: int) -> float:
        """Seconds without a heartbeat of a rank, as far as calls have seen; infinite if the store does not answer."""
        beat, now = self._last(rank), time.monotonic()
        if beat is None:
            return math.inf
        if self._changes.get(rank, (None, 0.0))[0] != beat:
            self._changes[rank] = beat, now
        return now - self._changes[rank][1]

    def _send(self) -> None:
        for number in itertools.count():
            try:
                if self._is_well():
                    self.store.set(_key(self._rank), str(number))
            except RuntimeError:  # the store has ended, so the check has ended, too
                return
            if self._ended.wait(INTERVAL):
                return

    def _last(self, rank: int) -> bytes | None:
        """The last heartbeat of a rank, empty if there is none yet; None if the store does not answer."""
        found: list[bytes] = []

        def look() -> None:
            with suppress(RuntimeError):
                found.append(bytes(self.store.get(_key(rank))) if self.store.check([_key(rank)]) else b"")

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        looking.join(_LOOK_INTERVALS * INTERVAL)
        return found[0] if found else None


def _key(rank: int) -> str:
    return f"{rank} is alive"
