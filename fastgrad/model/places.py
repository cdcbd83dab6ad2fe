"""The current position in a model: the running module, and the line of the user's code."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.nn import Module

from fastgrad.core.errors import PACKAGE
from fastgrad.core.torch_private import hidden_from_dynamo
from fastgrad.report.model_data import Site

_STEP = f"{PACKAGE}model/step.py"
"""The name of the function that calls the model."""

_TORCH = torch.__file__.removesuffix("__init__.py")
"""The directory of torch's code."""


class Places:
    """The modules of a model that run, the innermost last: its methods are hooks of all modules."""

    def __init__(self, model: Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._path: list[tuple[str, bool]] = []

    def enter(self, module: Module, args: Any) -> None:
        """Called before a module runs."""
        is_torchs = type(module).__module__.startswith("torch.") and torch.is_grad_enabled()
        self._path.append((self._names.get(id(module), f"<{type(module).__name__}>"), is_torchs))

    def leave(self, module: Module, args: Any, output: Any) -> None:
        """Called after a module has run."""
        if self._path:
            self._path.pop()

    def site(self) -> Site:
        """The current place in the model."""
        return Site(self._path[-1][0] if self._path else "", caller())

    def text(self) -> str:
        """The current place as text."""
        site = self.site()
        return site.source or site.module or "an unknown place"

    def in_module_of_torch(self) -> bool:
        """Whether a module of torch runs, whose detached values are intentional."""
        return bool(self._path) and self._path[-1][1]


@hidden_from_dynamo
def caller() -> str:
    """File and line of the innermost frame that is neither torch's nor fastgrad's; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _STEP and frame.f_code.co_name == "loss":
            return ""  # the caller of fastgrad is not a line of the model
        if not file.startswith((PACKAGE, _TORCH, "<frozen")):
            return f"{short(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def short(file: str) -> str:
    """The last two parts of a path."""
    return "/".join(file.split("/")[-2:])
