"""Finds the hooks of a model that change gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fastgrad.core import torch_private
from fastgrad.model.places import Places, short
from fastgrad.report.model_data import Site


@dataclass(eq=False)
class Hook:
    """A function that was called with gradients."""

    name: str
    owner: str
    site: Site
    changed: bool = False
    returned_zero: bool = False


class HookWatch:
    """Watches the hooks of a model that are called with gradients.

    Attributes
    ----------
    hooks
        The hooks that existed before, and those that were registered while they were watched.

    Parameters
    ----------
    model
        The model that has the hooks.
    places
        The current position in it.
    mutes
        Whether hooks are prevented from returning or writing other gradients.
    """

    def __init__(self, model: Module, places: Places, mutes: bool) -> None:
        self.hooks: list[Hook] = []
        self._model, self._places, self._mutes = model, places, mutes

    def changed(self) -> list[Hook]:
        return [hook for hook in self.hooks if hook.changed]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context for forward and backward in which the hooks that get gradients are watched."""
        parameters = [(parameter, name) for name, parameter in self._model.named_parameters()]
        modules = [(module, name) for name, module in self._model.named_modules()]
        names = {id(parameter): name for parameter, name in parameters}
        kept: list[tuple[dict[Any, Callable[..., Any]], dict[Any, Callable[..., Any]]]] = []
        register: Any = Tensor.register_hook

        def watched(tensor: Tensor, hook: Callable[..., Any]) -> Any:
            # A mode that intercepts torch's functions calls this function twice.
            if hasattr(hook, "is_watched") or not self._places.is_own_thread():
                return register(tensor, hook)
            site = self._places.site()
            own = "a tensor of " + (f"module {site.module}" if site.module else "the model")
            return register(tensor, self._watch(hook, names.get(id(tensor), own), site))

        try:
            for owner, name in [*parameters, *modules]:
                for table in torch_private.backward_hooks(owner):
                    kept.append((table, dict(table)))
                    is_module = isinstance(owner, Module)
                    site = Site(name if is_module else name.rpartition(".")[0], "")
                    own = (f"module {name}" if is_module else name) if name else "the model"
                    for key, hook in list(table.items()):
                        table[key] = self._watch(hook, own, site)
            Tensor.register_hook = watched  # type: ignore[method-assign]
            yield
        finally:
            Tensor.register_hook = register  # type: ignore[method-assign]
            for table, original in kept:
                table.update(original)

    def _watch(self, hook: Callable[..., Any], owner: str, site: Site) -> Callable[..., Any]:
        """A hook that calls the original (or ignores its result) and records whether it changes gradients."""
        code = getattr(hook, "__code__", None)
        place = f" ({short(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""
        seen = Hook(f"{getattr(hook, '__name__', type(hook).__name__)}{place}", owner, site)
        self.hooks.append(seen)

        def watched(*args: Any) -> Any:
            # A tensor's hook takes a gradient, a module's takes the module and gradients.
            given = args[-1] if len(args) == 1 else args[1]
            before = torch_private.tensors_in(args[-1:] if len(args) == 1 else args[1:])
            kept = [tensor.detach().clone() for tensor in before]
            result = hook(*args)
            returned = torch_private.tensors_in(given if result is None else result)
            wrote = any(not _same(tensor, copy) for tensor, copy in zip(before, kept, strict=True))
            originals = kept[: len(torch_private.tensors_in(given))]
            if not wrote and len(returned) == len(originals) and all(map(_same, returned, originals)):
                return result
            is_zero = not any(bool(one.any()) for one in returned)
            seen.returned_zero = is_zero and (seen.returned_zero or not seen.changed)
            seen.changed = True
            if not self._mutes:
                return result
            for tensor, copy in zip(before, kept, strict=True):
                # Only a changed tensor is written to, because writing to an expanded one raises.
                if not _same(tensor, copy):
                    tensor.detach().copy_(copy)
            return None

        watched.is_watched = True  # type: ignore[attr-defined]
        return watched


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and bool(torch.allclose(left, right, 0.0, 0.0, equal_nan=True))
