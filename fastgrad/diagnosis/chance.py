"""How likely it is that a hypothesis agrees with some entries by chance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MIN_DISTINCT = 3
"""A hypothesis that predicts this many different wrong values is not right by chance."""

MAX_CHANCE = 0.01
"""Largest probability of agreement by chance with which a hypothesis that predicts fewer values is named."""

SAME = 1e-6
"""Two values are the same if they differ by at most this share of the largest value; differences are less accurate."""


def is_supported(analytical: Tensor, failing: Tensor, tried: int) -> bool:
    """Whether chance is an unlikely reason that a hypothesis predicts these analytical entries.

    Masks and selections have the same few values everywhere, such as 0 and 1, so several hypotheses may predict them.
    Then only the positions of these values are evidence: they are compared with all other orders of the same values.

    Parameters
    ----------
    analytical
        The entries that are not zero in both Jacobians, shape (entries,).
    failing
        Which of them are wrong: bool, shape (entries,).
    tried
        The number of hypotheses that were compared with these entries.
    """
    if bool((~analytical.isfinite()).any()):
        return False
    values = classes(analytical)
    wrong = analytical[failing]
    if torch.unique(classes(wrong[wrong != 0].abs())).numel() >= MIN_DISTINCT:
        return True
    counts = torch.unique(values, return_counts=True)[1].tolist()
    orders = math.lgamma(values.numel() + 1) - sum(math.lgamma(count + 1) for count in counts)
    return math.log(tried / MAX_CHANCE) <= orders


def classes(values: Tensor) -> Tensor:
    """Numbers that are equal where values are the same: int64, shape (values,)."""
    if values.is_complex():
        real, imaginary = classes(values.real), classes(values.imag)
        return real * (values.numel() + 1) + imaginary
    order = values.argsort()
    gaps = values[order].diff() > SAME * values.abs().max() if values.numel() else values.bool()
    found = torch.zeros(values.numel(), dtype=torch.int64, device=values.device)
    found[order[1:]] = gaps.cumsum(0)
    return found
