"""What func raised inside a generator, and warnings that point at the caller."""

from __future__ import annotations

import os
import sys
import warnings

_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The package: the frames of fastgrad's own code."""


def as_raised(error: BaseException) -> BaseException:
    """What func or a backward raised, where Python made a RuntimeError of it: a StopIteration that left a generator.

    Only of fastgrad's own generators; anything else is returned as it is.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    ours = trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE)
    stopped = ours and isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration)
    return error.__cause__ if stopped and error.__cause__ is not None else error


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns about the line that called into fastgrad, however many frames of fastgrad lie between."""
    frame, level = sys._getframe(1), 2
    # Counted, not written down: gradcheck may have been called by gradgradcheck, or by another module here. By files:
    # where torch's functions forward to fastgrad, code of fastgrad runs with their globals.
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
