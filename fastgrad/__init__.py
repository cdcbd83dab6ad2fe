"""Gradient checks for PyTorch operators of real size: right, fast and helpful."""

from typing import TYPE_CHECKING, Any

from fastgrad._version import __version__
from fastgrad.api import check, gradcheck, gradgradcheck
from fastgrad.errors import GradcheckError
from fastgrad.jacobians import analytical_jacobian, numerical_jacobian
from fastgrad.opinions import AdjointTest, TaylorTest, adjoint_test, taylor_test
from fastgrad.patching import patch
from fastgrad.report import Report

if TYPE_CHECKING:
    from fastgrad import functional as functional

__all__ = [
    "AdjointTest",
    "GradcheckError",
    "Report",
    "TaylorTest",
    "__version__",
    "adjoint_test",
    "analytical_jacobian",
    "check",
    "gradcheck",
    "gradgradcheck",
    "numerical_jacobian",
    "patch",
    "taylor_test",
]


def __getattr__(name: str) -> Any:
    """`fastgrad.functional`, imported when it is first asked for: a gradient check needs none of it."""
    if name == "functional":
        import importlib

        return importlib.import_module("fastgrad.functional")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
