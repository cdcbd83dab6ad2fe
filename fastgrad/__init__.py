"""Gradient checks for PyTorch operators of real size: right, fast and helpful."""

from fastgrad._version import __version__
from fastgrad.api import gradcheck, gradgradcheck
from fastgrad.errors import GradcheckError
from fastgrad.report import Report

__all__ = ["GradcheckError", "Report", "__version__", "gradcheck", "gradgradcheck"]
