"""Gradient checks for PyTorch operators."""

import importlib
from typing import TYPE_CHECKING, Any

from fastgrad._version import __version__
from fastgrad.api.checkers import check, gradcheck, gradgradcheck
from fastgrad.report.report import GradcheckError, Report

if TYPE_CHECKING:
    from fastgrad import distributed as distributed
    from fastgrad import functional as functional
    from fastgrad.api.jacobians import analytical_jacobian, numerical_jacobian
    from fastgrad.model.check import check_model
    from fastgrad.report.model import ModelReport
    from fastgrad.report.variants import VariantsReport
    from fastgrad.testing.patch import patch
    from fastgrad.variants.check import check_variants
    from fastgrad.verdict.adjoint_taylor import AdjointTest, TaylorTest, adjoint_test, taylor_test

__all__ = [
    "AdjointTest",
    "GradcheckError",
    "ModelReport",
    "Report",
    "TaylorTest",
    "VariantsReport",
    "__version__",
    "adjoint_test",
    "analytical_jacobian",
    "check",
    "check_model",
    "check_variants",
    "gradcheck",
    "gradgradcheck",
    "numerical_jacobian",
    "patch",
    "taylor_test",
]


_IMPORTED_WHEN_ASKED_FOR = {
    "AdjointTest": "fastgrad.verdict.adjoint_taylor",
    "ModelReport": "fastgrad.report.model",
    "TaylorTest": "fastgrad.verdict.adjoint_taylor",
    "VariantsReport": "fastgrad.report.variants",
    "adjoint_test": "fastgrad.verdict.adjoint_taylor",
    "analytical_jacobian": "fastgrad.api.jacobians",
    "check_model": "fastgrad.model.check",
    "check_variants": "fastgrad.variants.check",
    "numerical_jacobian": "fastgrad.api.jacobians",
    "patch": "fastgrad.testing.patch",
    "taylor_test": "fastgrad.verdict.adjoint_taylor",
}
"""Modules of public names that a gradient check does not need; they are imported at first use."""


def __getattr__(name: str) -> Any:
    """Imports public names at first use, including `fastgrad.functional` and `fastgrad.distributed`."""
    if name in ("distributed", "functional"):
        return importlib.import_module(f"fastgrad.{name}")
    if name in _IMPORTED_WHEN_ASKED_FOR:
        value = globals()[name] = getattr(importlib.import_module(_IMPORTED_WHEN_ASKED_FOR[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
