"""The memory that a check may use, and the exceptions that mean a lack of memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
"""Exceptions that mean a lack of memory; `raises_memory_error` converts that of the CPU's allocator."""

UNKNOWN_BYTES = 4 << 30
"""Assumed free bytes if the system does not report them: less than most machines have."""

CPU_ALLOCATOR = "can't allocate memory"
"""A phrase of the RuntimeError of torch's CPU allocator."""


def free_bytes(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup"), address_space: int | None = None
) -> int:
    """Bytes that this process may still allocate: the minimum over all limits.

    Memory that the system uses for cached files and can reclaim counts as free.

    Parameters
    ----------
    proc, cgroups
        Where these file systems are mounted.
    address_space
        The limit of the process's virtual memory, in bytes; None: its own (RLIMIT_AS).
    """
    limits = [*_left_by_groups(proc, cgroups), _left_by_system(proc)]
    space = _address_space() if address_space is None else address_space
    used = _first_number(proc / "self" / "statm")
    if space is not None and used is not None:
        limits.append(space - used * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min((limit for limit in limits if limit is not None), default=UNKNOWN_BYTES))


def _left_by_system(proc: Path) -> int | None:
    """Free bytes according to /proc/meminfo; None if nothing is reported.

    Without /proc/meminfo, the free pages are used or, if these are unknown, half of all pages.
    """
    kilobytes = _fields(proc / "meminfo").get("MemAvailable")
    if kilobytes is not None:
        return 1024 * kilobytes
    for name, share in (("SC_AVPHYS_PAGES", 1), ("SC_PHYS_PAGES", 2)):
        try:
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") // share
        except (AttributeError, OSError, ValueError):  # the system does not report this number
            continue
    return None


def _left_by_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yields the free bytes of each control group of the process and of its parents, version 1 and 2."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names, reclaimable = cgroups, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            reclaimable = "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        # In a container, the path may be that of the host, and only the root exists. Missing files impose no limit.
        for directory in (group, *group.parents):
            limit, used = (_first_number(directory / name) for name in names)
            if limit is not None and used is not None:
                yield limit - used + min(used, _fields(directory / "memory.stat").get(reclaimable, 0))
            if directory == root:
                break


def _address_space() -> int | None:
    try:
        import resource  # imported here to keep `import fastgrad` fast
    except ImportError:  # not a POSIX system
        return None
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _first_number(path: Path) -> int | None:
    """The number at the beginning of a file; None if there is no file or no number ("max" means no limit)."""
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _fields(path: Path) -> dict[str, int]:
    """The numbers in a file by name, as in `MemAvailable: 1024 kB` or `inactive_file 1024`; empty without the file."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def raises_memory_error(func: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorates a function that allocates memory: a RuntimeError of the CPU allocator becomes a MemoryError.

    A RuntimeError would count as an error of func or backward.
    """

    @functools.wraps(func)
    def wrapped(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        try:
            return func(*arguments, **keywords)
        except RuntimeError as error:
            if CPU_ALLOCATOR not in str(error):
                raise
            raise MemoryError(str(error)) from error

    return wrapped


class RaisedOnce(BaseException):
    """func or backward raised an exception that means a lack of memory, but not when the calls were repeated.

    It is no Exception, so that no handler takes it for a lack of memory, or for an exception that recurs.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error
        """What func or backward raised."""


class RecurringMemoryError(MemoryError):
    """A lack of memory that recurred when the calls were repeated; its cause is the exception itself."""


def lacks_again(run: Callable[[], object]) -> bool:
    """Whether calls that lacked memory lack it again."""
    try:
        raises_memory_error(run)()
    except OUT_OF_MEMORY:
        return True
    except Exception:  # for example, because torch was left in another state
        return False
    return False


def repeats_if_memory_lacks(func: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorates a function that calls func or backward: if memory is lacking, it runs again under the same conditions.

    If the lack recurs, less memory may help: RecurringMemoryError. Otherwise func or backward raised once, and no
    engine may take the place of another because of it: RaisedOnce. `as_raised` gives the exception itself. Errors are
    converted as in `raises_memory_error`.
    """
    allocating = raises_memory_error(func)

    @functools.wraps(func)
    def wrapped(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        try:
            return allocating(*arguments, **keywords)
        except RecurringMemoryError:  # an inner function has run again
            raise
        except OUT_OF_MEMORY as error:
            if not lacks_again(functools.partial(func, *arguments, **keywords)):
                raise RaisedOnce(error) from error
            raise RecurringMemoryError(str(error)) from error

    return wrapped
