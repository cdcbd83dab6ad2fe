"""Writes docs/gallery.md: typical mistakes, and the message of a check for each.

`python -m docs.make_gallery`; `--check` tells whether the file is what would be written, but for times and rounding.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path

import torch

import fastgrad
from docs.gallery_mistakes import MISTAKES, Mistake

FILE = Path(__file__).with_name("gallery.md")

HEAD = """# A gallery of mistakes

<!-- `make gallery` writes this page. -->

Each of these 24 functions has a typical mistake. Below it is the message of `fastgrad.gradcheck` (for the last one, of
`fastgrad.gradgradcheck`), without its time. [Reading a failure](reading-a-failure.md) explains the lines.
From the second message on, the lines `engine` and `reproduce` and the two matrices are omitted.
"""


def message(mistake: Mistake) -> str:
    """The message of the check of a mistake, without its time."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.rand(shape, dtype=mistake.dtype, generator=generator).add_(0.5).requires_grad_()
        for shape in mistake.shapes
    ]
    checker = fastgrad.gradcheck if mistake.order == 1 else fastgrad.gradgradcheck
    try:
        checker(mistake.called, [*inputs, *mistake.others], **mistake.keywords)
    except fastgrad.GradcheckError as error:
        return re.sub(r", [\d.]+ m?s$", "", str(error), flags=re.MULTILINE)
    raise AssertionError(f"{mistake.title} was not found")


def gallery() -> str:
    """The whole file."""
    parts = [HEAD]
    for number, mistake in enumerate(MISTAKES, 1):
        source = textwrap.dedent(inspect.getsource(mistake.function)).rstrip()
        text = message(mistake)
        if number > 1:
            text = re.sub(r"\n(  engine |  reproduce |numerical:).*", "", text, flags=re.DOTALL)
        parts.append(f"## {number}. {mistake.title}\n\n```python\n{source}\n```\n\n```\n{text}\n```\n")
    return "\n".join(parts)


def without_chance(text: str) -> str:
    """The text without the parts that differ from run to run.

    That is how small an error is, what uninitialized memory holds, calls, which depend on their cost, and which of
    several errors that are equal but for rounding is called the worst, which depends on the processor.
    """
    text = re.sub(r"(worst +d out\d+)(\[[\d, ]+\])? / d \w+(\[[\d, ]+\])?", r"\1 somewhere", text)
    text = re.sub(r"(of one VJP differ by up to) \S+", r"\1 some", text)
    text = re.sub(r"[\d.]+e-(0[6-9]|[1-9]\d)\b", "small", text)
    return re.sub(r"[\d,]+ evaluations?, [\d,]+ VJPs?", "calls", text)


def main(arguments: list[str]) -> int:
    """Writes the file, or checks it."""
    text = gallery()
    if "--check" not in arguments:
        FILE.write_text(text)
        return 0
    if without_chance(text) == without_chance(FILE.read_text()):
        return 0
    print(f"{FILE.name} is not what the checks say now: make gallery", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
