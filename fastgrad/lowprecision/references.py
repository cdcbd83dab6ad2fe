"""Makes references in double precision, from the function itself or from the caller's reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fastgrad.core.errors import text_of
from fastgrad.lowprecision.reference import IncomparableError, Reference
from fastgrad.lowprecision.rounding import DOUBLE
from fastgrad.problem.arguments import Call, flatten
from fastgrad.problem.second_order import Backward
from fastgrad.problem.signature import function_name

Wanted = Callable[..., Any] | str | None
"""A function; "float64": the checked function itself; None: the same, if it runs in double precision."""

MakeReference = Callable[[], Reference]


class Doubled:
    """Copies values, with tensors of lower dtypes in double precision. A tensor that occurs twice is copied once."""

    def __init__(self, device: str | None) -> None:
        """device: the device of all copies; None: each tensor's own."""
        self._device = None if device is None else torch.device(device)
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, value: Any) -> Any:
        """The copy of a value, nested or not."""
        if isinstance(value, Module):
            return copy.deepcopy(value).to(device=self._device).double()
        found: list[tuple[str, Tensor]] = []
        rebuild = flatten(value, "", lambda tensor: True, found)
        return value if rebuild is None else rebuild(iter([self._tensor(tensor) for _, tensor in found]))

    def _tensor(self, value: Tensor) -> Tensor:
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        dtype = DOUBLE.get(value.dtype, value.dtype)
        made = value
        if dtype is not value.dtype or value.requires_grad or self._device not in (None, value.device):
            made = value.detach().to(device=self._device or value.device, dtype=dtype, copy=True)
            made.requires_grad_(value.requires_grad)
        self._known[id(value)] = value, made
        return made


def reference_for_call(call: Call, wanted: Wanted, device: str | None) -> Reference:
    """The reference of a `Call`: the call of the reference's function, with the same tensors checked."""
    doubled = Doubled(device)
    function, name = _function(call.func, wanted, doubled)
    if isinstance(call.func, Module) and not isinstance(function, Module) and call.wrt != "inputs":
        raise TypeError(
            "The reference of a module whose parameters are checked must be a module with the same parameters, got "
            f"{type(function).__name__}; wrt='inputs' checks the inputs alone."
        )
    made = Call(function, doubled(call.inputs), doubled(call.kwargs), call.wrt)
    _check_shapes(made, call)
    with torch.no_grad():
        for own, tensor in zip(made.tensors, call.tensors, strict=True):
            own.copy_(tensor)  # a module passed as reference may have other values
    return Reference(made, made.tensors, name)


def _check_shapes(reference: Call, call: Call) -> None:
    """Raises a TypeError unless the checked tensors of the reference have the shapes of func's."""
    needs = (
        "The reference needs as many checked tensors as func, of the same shapes (a module: the same parameters), but "
    )
    if len(reference.tensors) != len(call.tensors):
        raise TypeError(f"{needs}it has {len(reference.tensors)}, and func has {len(call.tensors)}.")
    for name, other, own in zip(call.names, reference.tensors, call.tensors, strict=True):
        if other.shape != own.shape:
            raise TypeError(
                f"{needs}{name} has shape {tuple(other.shape)} in the reference and {tuple(own.shape)} in func."
            )


def second_order_reference(
    make: MakeReference, backward: Backward, grad_outputs: tuple[Tensor, ...], device: str | None
) -> Reference:
    """The reference for a `Backward`, made from the reference for the function that it differentiates."""
    first = make()
    grads = Doubled(device)(grad_outputs)
    func = Backward(first.func, first.arguments, grads, backward.made)
    return Reference(func, first.arguments + grads, f"the backward of {first.name}")


def make_reference(
    func: Callable[..., Any], arguments: tuple[Any, ...], wanted: Wanted, device: str | None
) -> Reference:
    """The reference of func(*arguments); func may be a `Backward`."""
    if isinstance(func, Backward):
        first = partial(make_reference, func.__wrapped__, arguments[: func.count], wanted, device)
        return second_order_reference(first, func, arguments[func.count :], device)
    doubled = Doubled(device)
    function, name = _function(func, wanted, doubled)
    return Reference(function, doubled(arguments), name)


def _function(func: Callable[..., Any], wanted: Wanted, doubled: Doubled) -> tuple[Callable[..., Any], str]:
    """The function of a reference, in double precision if it is a module; and its name."""
    if wanted is None or isinstance(wanted, str):
        function, name = func, f"{function_name(func) or 'func'} in float64"
    else:
        function, name = wanted, function_name(wanted) or "the reference"
    try:
        return doubled(function) if isinstance(function, Module) else function, name
    except Exception as error:
        raise IncomparableError(f"the module cannot be copied: {text_of(error)}") from error
