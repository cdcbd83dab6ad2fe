"""Gradient checks of functions whose tensors are distributed over the ranks of a process group."""

from fastgrad.core.ranks import RankError
from fastgrad.distributed.check import check

__all__ = ["RankError", "check"]
