"""Separates exceptions of func and backward from those of fastgrad; issues warnings that point at the caller's line."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable

from fastgrad.core.memory import OUT_OF_MEMORY, RaisedOnce, RecurringMemoryError, Result

PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The directory of the package: frames whose files are in it are fastgrad's own code."""

_CALLS_FUNC = tuple(
    PACKAGE + path.replace("/", os.sep)
    for path in (
        *("problem/", "functional/", "tools/", "testing/", "distributed/", "variants/", "lowprecision/", "model/"),
        *("core/plain/", "core/native.py", "core/errors.py"),
        *("core/torch_private.py", "engines/vmapped.py", "engines/cuda_graph.py", "verdict/grad_outputs.py"),
        "checks/one_block.py",
        "checks/small",
    )
)
"""Files that call func or backward, or define such functions. If func or backward is a builtin that raises, the
innermost frame is in one of these files."""


def _innermost_file(error: BaseException) -> str:
    """The file of the frame that raised; empty if there is none."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else trace.tb_frame.f_code.co_filename


def raise_unless_of_func(error: Exception) -> None:
    """Raises an exception again unless it is an error of func or backward: if memory is lacking, or fastgrad has a bug.

    Any other exception counts as an error of func or backward, unless its innermost frame is code of fastgrad that
    calls neither.
    """
    if isinstance(error, OUT_OF_MEMORY) or is_of_fastgrad(error):
        raise error


def is_of_fastgrad(error: Exception) -> bool:
    """Whether the innermost frame of an exception is code of fastgrad that calls neither func nor backward."""
    file = _innermost_file(error)
    if file.startswith(PACKAGE) and _is_of_compiled_module(error):
        return True
    return file.startswith(PACKAGE) and not file.startswith(_CALLS_FUNC)


def _is_of_compiled_module(error: Exception) -> bool:
    """Whether an exception says that a call of the compiled module has arguments of other types than it takes."""
    name, _, message = str(error).partition("(): ")
    if not isinstance(error, TypeError) or not message.startswith("incompatible "):
        return False
    # The signature of a method contains its class.
    return "fastgrad._C." in message or hasattr(sys.modules.get("fastgrad._C"), name)


def raised_by(run: Callable[[], object]) -> Exception | None:
    """The error of func or backward that calls raise; None if they raise nothing. Other exceptions are raised."""
    try:
        run()
    except Exception as error:
        raise_unless_of_func(error)
        return error
    return None


def raise_if_transient(error: Exception, run: Callable[[], object]) -> None:
    """Raises an exception again, unless it is an error of func or backward and the same calls raise repeatedly."""
    raise_unless_of_func(error)
    if raised_by(run) is None:
        raise error


def unless_rejected(run: Callable[[], Result]) -> Result | None:
    """The result of calls of func or backward; None if they raise repeatedly, as in `raise_if_transient`."""
    try:
        return run()
    except Exception as error:
        raise_if_transient(error, run)
        return None


def as_raised(error: BaseException) -> BaseException:
    """The exception of func or backward that another one stands for; any other exception is returned unchanged.

    These are `RecurringMemoryError`, `RaisedOnce`, and the RuntimeError by which Python replaces a StopIteration in one
    of fastgrad's own generators.
    """
    if isinstance(error, RaisedOnce):
        return error.error
    if isinstance(error, RecurringMemoryError) and error.__cause__ is not None:
        return error.__cause__
    ours = _innermost_file(error).startswith(PACKAGE)
    stopped = ours and isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration)
    return error.__cause__ if stopped and error.__cause__ is not None else error


def text_of(error: BaseException) -> str:
    """The type of an exception, and its message if it has one."""
    return ": ".join(filter(None, (type(error).__name__, str(error))))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns about the line that called into fastgrad, no matter how many frames of fastgrad lie between."""
    frame, level = sys._getframe(1), 2
    # The level is counted at run time, because gradcheck may have been called by gradgradcheck, or by another module of
    # fastgrad. Frames are recognized by their files: if torch's functions forward to fastgrad, code of fastgrad runs
    # with the globals of torch.
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
