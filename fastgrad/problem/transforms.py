"""Rejects checks of tensors of torch.func's transforms, and checks within transforms that differentiate."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from fastgrad.core import torch_private
from fastgrad.core.memory import Parameters, Result
from fastgrad.problem.arguments import flatten
from fastgrad.problem.caller_state import tensors_in


def rejects_transforms(entry: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorates a check: it raises a NotImplementedError where transforms of torch.func make it impossible.

    A tensor of a transform has no memory of its own, so it cannot be perturbed. Within a transform that differentiates,
    no tensor can be perturbed. Within vmap, checks of other tensors are possible.
    """

    @functools.wraps(entry)
    def rejecting(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        __tracebackhide__ = True  # under pytest a failure shows the caller's line
        if any(map(torch_private.is_transformed, tensors_in((*arguments, *keywords.values()), {}))):
            reject_transformed(inspect.signature(entry).bind(*arguments, **keywords).arguments)
        if torch_private.differentiating_transform_is_active():
            raise NotImplementedError(
                f"{entry.__name__} cannot run within a transform of torch.func that differentiates (grad, vjp, jvp, "
                "...): call it outside of the transform."
            )
        return entry(*arguments, **keywords)

    return torch_private.hidden_from_dynamo(rejecting)


def reject_transformed(arguments: Mapping[str, Any]) -> None:
    """Raises a NotImplementedError for the first tensor of a transform among the named arguments of a check."""
    found: list[tuple[str, Tensor]] = []
    for name, value in arguments.items():
        held = dict(value.named_parameters()) if isinstance(value, Module) else value
        flatten(held, name, torch_private.is_transformed, found)
    for path, _ in found:
        raise NotImplementedError(
            f"fastgrad does not support tensors of a torch.func transform (vmap, grad, jvp, ...), but {path} is one: "
            "pass a tensor that was made outside of the transform."
        )
