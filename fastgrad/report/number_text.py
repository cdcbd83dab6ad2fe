"""Numbers in texts: counts with their nouns, digits, times."""

from __future__ import annotations

import math


def count(number: int, noun: str) -> str:
    """A number with its noun, in the singular or the plural."""
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{number:,} {noun if number == 1 else plural}"


def digits_apart(first: complex, second: complex, least: int = 6) -> int:
    """The number of significant digits with which two numbers have different texts; `least` if they are equal."""
    return next((digits for digits in range(least, 18) if f"{first:.{digits}g}" != f"{second:.{digits}g}"), least)


def seconds_text(seconds: float) -> str:
    """A time, in seconds or milliseconds."""
    if not math.isfinite(seconds) or seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms"
