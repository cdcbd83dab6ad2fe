"""The progress bar of long checks: evaluations, backward passes and the remaining time."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

LONG = 20.0
"""Expected seconds of a check from which a bar is shown by default, on a terminal."""

STEP = 64
"""Number of columns or column groups between two updates of the bar."""


class Progress:
    """The progress bar of a check: a context manager that closes the bar at the end.

    wanted: the keyword `progress` of the check; None: the bar is shown for long checks on a terminal.
    """

    def __init__(self, wanted: bool | None) -> None:
        self._wanted = wanted
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def start(self, calls: int, seconds: float, what: str) -> None:
        """Shows a bar for a number of calls of func and backward with an expected duration in seconds.

        Raises
        ------
        ImportError
            progress=True was passed, and tqdm is missing.
        """
        if self._wanted is False or (self._wanted is None and not (seconds >= LONG and sys.stderr.isatty())):
            return
        try:
            tqdm = import_module("tqdm").tqdm
        except ImportError:
            if self._wanted is None:
                return
            raise ImportError("progress=True needs tqdm: pip install tqdm.") from None
        if self._bar is not None:
            self._bar.close()
        hint = "; fast_mode=True is faster" if seconds >= LONG else ""
        self._bar = tqdm(total=calls, desc=f"{what}, about {_duration(seconds)}{hint}", unit=" calls", file=sys.stderr)

    @property
    def is_shown(self) -> bool:
        return self._bar is not None

    def step(self, calls: int) -> None:
        """Advances the bar by a number of calls."""
        if self._bar is not None:
            self._bar.update(min(calls, self._bar.total - self._bar.n))  # repeated calls may exceed the total


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 9.5 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
