"""Gradient checks for PyTorch operators of real size: right, fast and helpful."""

from fastgrad._version import __version__
from fastgrad.api import check, gradcheck, gradgradcheck
from fastgrad.errors import GradcheckError
from fastgrad.jacobians import analytical_jacobian, numerical_jacobian
from fastgrad.patching import patch
from fastgrad.report import Report

__all__ = [
    "GradcheckError",
    "Report",
    "__version__",
    "analytical_jacobian",
    "check",
    "gradcheck",
    "gradgradcheck",
    "numerical_jacobian",
    "patch",
]
