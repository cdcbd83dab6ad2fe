"""The only importer of the compiled module: checks it against the installed torch, or imports plain Python instead."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch

from fastgrad._version import __version__

try:
    from fastgrad import _build
except ImportError:
    _build = None  # type: ignore[assignment]

HOW_TO_BUILD = "build it with `make develop` or `pip install --no-build-isolation .` in the source tree"


def _release(version: str) -> list[str]:
    """The major and minor number of a version: releases that share both have the same binary interface."""
    return version.split(".")[:2]


def _is_native() -> bool:
    """Whether to use the compiled module; raises ImportError if it is required and cannot be used."""
    choice = os.environ.get("FASTGRAD_NATIVE", "auto")
    if choice not in ("auto", "0", "1"):
        raise ImportError(f"FASTGRAD_NATIVE must be auto, 0 or 1, got {choice!r}.")
    if choice == "0":
        return False
    if _build is not None and _build.TORCH is None and choice == "auto":
        return False  # the package was installed without the compiled module on purpose
    if _build is None or _build.TORCH is None or importlib.util.find_spec("fastgrad._C") is None:
        raise ImportError(
            f"fastgrad's compiled module is missing: {HOW_TO_BUILD}, or use plain Python with FASTGRAD_NATIVE=0."
        )
    if _release(_build.TORCH) != _release(str(torch.__version__)) or _build.CUDA not in (None, torch.version.cuda):
        release = ".".join(_release(str(torch.__version__)))
        raise ImportError(
            f"fastgrad was compiled against torch {_build.TORCH} (CUDA {_build.CUDA}) and this is "
            f"torch {torch.__version__} (CUDA {torch.version.cuda}): install the wheel fastgrad "
            f"{__version__.partition('+')[0]}+torch{release}, or rebuild it with "
            "`pip install --no-build-isolation --force-reinstall --no-deps fastgrad`, from its source tree or sdist."
        )
    return True


IS_NATIVE = _is_native()
"""Whether the compiled module is in use; otherwise plain Python is."""

BUILT_AGAINST: str | None = _build.TORCH if IS_NATIVE else None
CUDA: str | None = _build.CUDA if IS_NATIVE else None
"""The versions that the compiled module was built against: torch, and CUDA if it has CUDA kernels."""

if TYPE_CHECKING or IS_NATIVE:
    from fastgrad._C import *
else:
    from fastgrad.core.plain.evaluator import *
    from fastgrad.core.plain.operators import *
    from fastgrad.core.plain.patterns import *
    from fastgrad.core.plain.reverse import *

    warnings.warn(
        "fastgrad runs in plain Python because its compiled module is missing. The verdicts are the same, but checks "
        f"are slower. For full speed, {HOW_TO_BUILD}.",
        RuntimeWarning,
        stacklevel=2,
    )


class Layout(IntEnum):
    """How a grad_output lies in memory; `csrc/vjp.h` describes the layouts."""

    CONTIGUOUS = 0
    NON_CONTIGUOUS = 1
    OFFSET = 2
    EXPANDED = 3


def _operator(name: str) -> Any:
    if IS_NATIVE:
        return getattr(torch.ops.fastgrad, name).default
    return staticmethod(getattr(importlib.import_module("fastgrad.core.plain.operators"), name))


class ops:  # noqa: N801  (a namespace, like torch.ops.fastgrad)
    """The operators by name.

    They are looked up only once, because a lookup takes as long as running an operator on a small block. Operators that
    every check runs are called without torch.ops, which would double their overhead.
    """

    compare = staticmethod(compare)
    direction_ = staticmethod(direction_)
    decompress_ = _operator("decompress_")
    dots = _operator("dots")
    flatten_ = _operator("flatten_")
    perturb_coordinates_ = _operator("perturb_coordinates_")
    project_entries_ = _operator("project_entries_")
    project_rows_ = staticmethod(project_rows_)
    richardson_ = _operator("richardson_")
    unflatten_ = _operator("unflatten_")
