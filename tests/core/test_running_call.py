"""The call of a caller's function that another thread runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from fastgrad.core import native

HERE = str(Path(__file__))


def while_a_thread_waits(read: Callable[[int], None]) -> None:
    """Calls `read` with the id of a thread that runs a function of this file, and waits in it."""
    started, ended = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        ended.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    try:
        assert thread.ident is not None
        read(thread.ident)
    finally:
        ended.set()
        thread.join()


def test_without_a_package_it_is_the_outermost_call() -> None:
    seen = []
    while_a_thread_waits(lambda thread: seen.append(native.running_call(thread, "/nothing", [])))
    assert seen[0] is not None
    assert seen[0].f_code.co_name == "_bootstrap"


def test_a_thread_inside_a_package_runs_no_call() -> None:
    seen = []
    while_a_thread_waits(lambda thread: seen.append(native.running_call(thread, threading.__file__, [])))
    assert seen == [None]


def test_the_call_is_the_outermost_one_above_a_package() -> None:
    seen = []

    def read(thread: int) -> None:
        seen.extend(native.running_call(thread, HERE, []) for _ in range(2))

    while_a_thread_waits(read)
    assert seen[0] is not None
    assert seen[0] is seen[1]
    assert seen[0].f_code.co_filename == threading.__file__


def test_a_thread_that_does_not_exist_runs_nothing() -> None:
    assert native.running_call(0, HERE, []) is None


def test_excluded_files_hide_a_call() -> None:
    seen = []
    while_a_thread_waits(lambda thread: seen.append(native.running_call(thread, HERE, ["threading.py"])))
    assert seen == [None]
