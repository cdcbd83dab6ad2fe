"""Colors for the output of the command line on a terminal."""

from __future__ import annotations

import os
import re
from typing import TextIO

_BOLD, _DIM, _RED, _GREEN, _YELLOW = "1", "2", "31", "32", "33"
"""Parameters of the escape sequence "select graphic rendition" (ECMA-48, 8.3.117)."""

_VERDICT_OF_A_CHECK = r"(?m)^(?:gradcheck|gradgradcheck|check_variants) "

_STYLES = {
    _VERDICT_OF_A_CHECK + "passed": _GREEN,
    _VERDICT_OF_A_CHECK + "failed": _RED,
    _VERDICT_OF_A_CHECK + "(?:undecided|not converged|incomplete)": _YELLOW,
    r"(?m)(?<=  )(?:failed|raised)(?=$|  )": _RED,  # the verdict of a variant, in its column
    r"(?m)^  (?:probably|or) .*$": _BOLD,
    r"(?m)^  [a-z]+(?=  )": _DIM,  # labels
}


def takes_colors(stream: TextIO) -> bool:
    """Whether to color text for a stream: NO_COLOR or FORCE_COLOR decides; without them, whether it is a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def colored(text: str) -> str:
    """A report's text with its verdicts, labels and causes in colors."""
    for pattern, style in _STYLES.items():
        text = re.sub(pattern, rf"\033[{style}m\g<0>\033[0m", text)
    return text
