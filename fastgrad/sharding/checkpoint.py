"""A checkpoint file of computed columns and rows, from which a later run of the check resumes."""

from __future__ import annotations

import io
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

COMMIT_SECONDS = 1.0
"""Seconds between two commits; if the process is killed, at most the work of this time is lost."""

_ANY_VALUE = ("progress", "memory_limit")
"""Settings that do not affect columns and rows."""

_TABLES = """
CREATE TABLE IF NOT EXISTS call (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS part (
    id INTEGER PRIMARY KEY, work TEXT NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, data BLOB NOT NULL
);
"""


@dataclass(frozen=True)
class Part:
    """Items first, ..., last - 1 of some work, in row `id` of the file."""

    id: int
    first: int
    last: int


class Checkpoint:
    """The SQLite file of one check; a context manager that removes the file unless an exception ends it.

    Results that this process stored are not read back. If the same columns or rows are requested a second time, they
    are computed again, because the request may test whether they have changed.
    """

    def __init__(self, path: Path, call: Mapping[str, str]) -> None:
        """Opens or creates the file; call: the description of the call.

        Raises
        ------
        ValueError
            The file is not a checkpoint, is damaged, belongs to another call, or is in use by another process.
        """
        self._path = path
        self._committed = time.monotonic()
        self._is_full = False
        self._database = self._opened()
        try:
            with self._reading():
                self._reject_other_calls({name: value for name, value in call.items() if name not in _ANY_VALUE})
                self._known: dict[str, list[Part]] = {}
                for work, *part in self._database.execute("SELECT work, id, first, last FROM part ORDER BY id"):
                    self._known.setdefault(work, []).append(Part(*part))
        except BaseException:
            self._database.close()
            raise

    def _opened(self) -> sqlite3.Connection:
        try:
            database = sqlite3.connect(self._path, timeout=0.0, isolation_level=None)
        except sqlite3.Error as error:
            raise ValueError(f"checkpoint: {self._path} cannot be opened: {error}.") from error
        try:
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("BEGIN EXCLUSIVE")
            for statement in filter(str.strip, _TABLES.split(";")):
                database.execute(statement)
        except sqlite3.Error as error:
            database.close()
            in_use = "locked" in str(error)
            what = "is in use by another process" if in_use else f"is not a checkpoint of fastgrad: {error}"
            raise ValueError(f"checkpoint: {self._path} {what}.") from error
        return database

    def _reject_other_calls(self, call: Mapping[str, str]) -> None:
        found = dict(self._database.execute("SELECT name, value FROM call"))
        if not found:
            self._database.executemany("INSERT INTO call VALUES (?, ?)", call.items())
            self._commit()
        for name in dict.fromkeys([*found, *call]) if found else ():
            before, now = found.get(name, "missing"), call.get(name, "missing")
            if before != now:
                raise ValueError(
                    f"checkpoint: {self._path} belongs to another check: {name} was {before}, and is now {now}. "
                    "Remove the file, or pass another path."
                )

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self._attempt(lambda: self._database.execute("COMMIT"))
        self._database.close()
        if error is None:
            self._path.unlink(missing_ok=True)

    def take(self, work: str, first: int, last: int) -> list[Part]:
        """Parts of items first, ..., last - 1 that an earlier run stored, without overlaps; each is returned once."""
        known, found, end = self._known.get(work, []), [], first
        within = (part for part in known if first <= part.first and part.last <= last)
        for part in sorted(within, key=lambda part: (part.first, part.id)):
            if part.first >= end:
                end = part.last
                known.remove(part)
                found.append(part)
        return found

    def values(self, part: Part) -> Tensor:
        """The stored values of a part, float64."""
        with self._reading():
            (data,) = self._database.execute("SELECT data FROM part WHERE id = ?", (part.id,)).fetchone()
        try:
            return torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False))
        except (ValueError, OSError) as error:
            raise self._damaged(error) from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A context that raises ValueError if the file cannot be read."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> ValueError:
        return ValueError(f"checkpoint: {self._path} is damaged: {error}. Remove the file, or pass another path.")

    def discard(self, parts: Sequence[Part]) -> None:
        """Removes the given parts, which the caller found to differ from newly computed ones."""
        ids = [(part.id,) for part in parts]
        self._attempt(lambda: self._database.executemany("DELETE FROM part WHERE id = ?", ids))

    def store(self, work: str, first: int, last: int, values: Tensor) -> None:
        """Stores items first, ..., last - 1 of some work; warns if it fails."""
        file = io.BytesIO()
        np.save(file, values.cpu().numpy(), allow_pickle=False)
        row = work, first, last, file.getbuffer()
        insert = "INSERT INTO part (work, first, last, data) VALUES (?, ?, ?, ?)"
        self._attempt(lambda: self._database.execute(insert, row))
        if time.monotonic() - self._committed > COMMIT_SECONDS:
            self._attempt(self._commit)

    def _commit(self) -> None:
        self._database.execute("COMMIT")
        self._database.execute("BEGIN IMMEDIATE")
        self._committed = time.monotonic()

    def _attempt(self, write: Callable[[], Any]) -> None:
        if self._is_full:
            return
        try:
            write()
        except (sqlite3.Error, OverflowError) as error:
            self._is_full = True
            message = f"checkpoint: {self._path} cannot be written: {error}. The check continues without it."
            warnings.warn(message, RuntimeWarning, stacklevel=2)
