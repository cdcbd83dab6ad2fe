"""Repeats differences along directions that decided nothing, and notes if func now gives other values."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fastgrad.core.tensors import checksum
from fastgrad.engines.sketch import Differences, derivatives_vary
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings
from fastgrad.verdict.repeated_rows import ALONG_DIRECTION

Taken = tuple[Callable[[], Differences], int]
"""How to measure differences again, and the checksum of their derivatives."""


def note_changes(problem: Problem, settings: Settings, base: Tensor, taken: Iterable[Taken]) -> None:
    """Repeats differences that decided nothing, and notes if func's values have changed."""
    changes = [_change(*one, settings, base) for one in taken]
    if any(changes):
        problem.irreproducible.append(ALONG_DIRECTION)


def _change(repeat: Callable[[], Differences], before: int, settings: Settings, base: Tensor) -> bool:
    """Whether differences with the checksum `before` change when repeated, other than by rounding in each run."""
    second = repeat()
    if checksum(second.derivatives) == before:
        return False
    third, rounding = repeat().derivatives, second.rounding * base.abs()
    return torch.equal(third, second.derivatives) or derivatives_vary(settings, third, second.derivatives, rounding)
