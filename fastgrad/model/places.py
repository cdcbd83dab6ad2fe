"""The current position in a model: the running module, and the line of the user's code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fastgrad.core.errors import PACKAGE
from fastgrad.core.torch_private import hidden_from_dynamo
from fastgrad.report.model_data import Site

_STEP = f"{PACKAGE}model/step.py"
"""The file of `Step.loss`, which calls the model."""

_TORCH = torch.__file__.removesuffix("__init__.py")
"""The directory of torch's code."""

_WITH_CONSTANTS = {
    f"{_TORCH}nn/utils/parametrizations.py": "",
    f"{_TORCH}nn/utils/spectral_norm.py": "",
    f"{_TORCH}nn/functional.py": "_no_grad_embedding_renorm_",
}
"""Code of torch that holds values constant on purpose: files, and how names of functions begin. None of it calls code
of the user: code in C++ would have no frame, and could not be distinguished."""


class Places:
    """Knows which modules of a model are running in the thread that makes this object."""

    def __init__(self, model: Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._path: list[tuple[str, FrameType | None, bool]] = []  # name, caller's frame, grad mode
        self._thread = get_ident()

    @contextmanager
    def following(self) -> Iterator[None]:
        """A context in which modules are noted that run."""
        with (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ):
            yield

    def is_own_thread(self) -> bool:
        """Whether the current thread is that of the model; hooks of all modules also run in other threads."""
        return get_ident() == self._thread

    def _enter(self, module: Module, args: Any) -> None:
        if not self.is_own_thread():
            return
        name = self._names.get(id(module), f"<{type(module).__name__}>")
        self._path.append((name, _user_frame(), torch.is_grad_enabled()))

    def _leave(self, module: Module, args: Any, output: Any) -> None:
        if self._path and self.is_own_thread():
            self._path.pop()

    @hidden_from_dynamo
    def site(self) -> Site:
        """The current module, and the line of the innermost frame that is neither torch's nor fastgrad's."""
        frame = _user_frame()
        source = "" if frame is None else f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        return Site(self._path[-1][0] if self._path else "", source)

    def text(self) -> str:
        site = self.site()
        return site.source or site.module or "an unknown place"

    @hidden_from_dynamo
    def holds_constants(self) -> bool:
        """Whether code of torch runs that holds values constant on purpose.

        False if code of the user runs within the module, such as a hook or an activation, or has disabled gradients
        around it.
        """
        if not self._path or not self._path[-1][2] or self._path[-1][1] is not _user_frame():
            return False
        for frame, _ in walk_stack(sys._getframe(1)):
            file = frame.f_code.co_filename
            if not file.startswith(PACKAGE):
                return file in _WITH_CONSTANTS and frame.f_code.co_name.startswith(_WITH_CONSTANTS[file])
        return False


def _user_frame() -> FrameType | None:
    """The innermost frame of the model that is neither torch's nor fastgrad's; None if there is none."""
    for frame, _ in walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file == _STEP and frame.f_code.co_name == "loss":
            return None  # the caller of fastgrad is not a part of the model
        if not file.startswith((PACKAGE, _TORCH, "<frozen")):
            return frame
    return None


def short(file: str) -> str:
    """The last two parts of a path."""
    return "/".join(file.split("/")[-2:])
