"""Gradient checks for PyTorch operators of real size: right, fast and helpful."""

from fastgrad._version import __version__
from fastgrad.api import check, gradcheck, gradgradcheck
from fastgrad.errors import GradcheckError
from fastgrad.jacobians import analytical_jacobian, numerical_jacobian
from fastgrad.opinions import AdjointTest, TaylorTest, adjoint_test, taylor_test
from fastgrad.report import Report

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
    "taylor_test",
]
