"""The compiled module: checked against the installed torch first, and imported nowhere else."""

from __future__ import annotations

import importlib.util
from enum import IntEnum

import torch

MISSING = (
    "fastgrad's compiled module is missing: build it with `make develop`, or with "
    "`pip install --no-build-isolation .`, in its source tree."
)

try:
    from fastgrad import _build
except ImportError:
    raise ImportError(MISSING) from None


def _release(version: str) -> list[str]:
    """Major and minor: releases of one minor number have the same binary interface."""
    return version.split(".")[:2]


if _release(_build.TORCH) != _release(str(torch.__version__)) or _build.CUDA not in (None, torch.version.cuda):
    raise ImportError(
        f"fastgrad was compiled against torch {_build.TORCH} (CUDA {_build.CUDA}) and this is "
        f"torch {torch.__version__} (CUDA {torch.version.cuda}): install the wheel whose version ends in "
        f"+torch{'.'.join(_release(str(torch.__version__)))}, or rebuild it with "
        "`pip install --no-build-isolation --force-reinstall --no-deps .` in its source tree."
    )

if importlib.util.find_spec("fastgrad._C") is None:
    raise ImportError(MISSING)

from fastgrad._C import (  # noqa: E402  (after the checks)
    Derivatives,
    Evaluator,
    GradientsMatch,
    Graph,
    Groups,
    InputBlock,
    OutputSpec,
    PlainBackward,
    RandomDirections,
    Rows,
    UnspecifiedEntry,
    WholeBackward,
    at_dual_level,
    backward_streams,
    bucket,
    check_memory,
    color,
    compare,
    count_nodes,
    direction_,
    first_other_vjp,
    flatten_,
    flattened,
    is_plain_zero,
    largest_errors,
    largest_residuals,
    project_rows_,
    runs_no_custom_code,
    star_color,
    transpose,
    vjp,
    vjp_coordinates,
    vjp_groups,
    vjp_rows,
    whole_backward,
)


class Layout(IntEnum):
    """How a grad_output lies in memory; `csrc/loops.h` says more."""

    CONTIGUOUS = 0
    GAPPED = 1
    OFFSET = 2
    EXPANDED = 3


class ops:  # noqa: N801  (a namespace, like torch.ops.fastgrad)
    """The operators by name, resolved once: looking one up costs as much as running it on a small block.

    Those that every check runs go to the dispatcher without torch.ops, whose way there costs as much again.
    """

    compare = staticmethod(compare)
    direction_ = staticmethod(direction_)
    decompress_ = torch.ops.fastgrad.decompress_.default
    dots = torch.ops.fastgrad.dots.default
    flatten_ = torch.ops.fastgrad.flatten_.default
    perturb_coordinates_ = torch.ops.fastgrad.perturb_coordinates_.default
    project_entries_ = torch.ops.fastgrad.project_entries_.default
    project_rows_ = staticmethod(project_rows_)
    richardson_ = torch.ops.fastgrad.richardson_.default
    unflatten_ = torch.ops.fastgrad.unflatten_.default


__all__ = [
    "Derivatives",
    "Evaluator",
    "GradientsMatch",
    "Graph",
    "Groups",
    "InputBlock",
    "Layout",
    "OutputSpec",
    "PlainBackward",
    "RandomDirections",
    "Rows",
    "UnspecifiedEntry",
    "WholeBackward",
    "at_dual_level",
    "backward_streams",
    "bucket",
    "check_memory",
    "color",
    "count_nodes",
    "first_other_vjp",
    "flatten_",
    "flattened",
    "is_plain_zero",
    "largest_errors",
    "largest_residuals",
    "ops",
    "runs_no_custom_code",
    "star_color",
    "transpose",
    "vjp",
    "vjp_coordinates",
    "vjp_groups",
    "vjp_rows",
    "whole_backward",
]
