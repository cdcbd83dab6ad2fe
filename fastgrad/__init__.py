"""Gradient checks for PyTorch operators of real size: right, fast and helpful."""

from typing import TYPE_CHECKING, Any

from fastgrad._version import __version__
from fastgrad.api import check, gradcheck, gradgradcheck
from fastgrad.errors import GradcheckError
from fastgrad.jacobians import analytical_jacobian, numerical_jacobian
from fastgrad.report import Report

if TYPE_CHECKING:
    from fastgrad import functional as functional

__all__ = [
    "GradcheckError",
    "Report",
    "__version__",
    "analytical_jacobian",
    "check",
    "gradcheck",
    "gradgradcheck",
    "numerical_jacobian",
]


def __getattr__(name: str) -> Any:
    """`fastgrad.functional`, imported when it is first asked for: a gradient check needs none of it."""
    if name == "functional":
        import importlib

        return importlib.import_module("fastgrad.functional")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
