"""Saves and restores the caller's state: inputs, their gradients, the grad mode."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Module
from torch.nn.parameter import Parameter, is_lazy

from fastgrad.core import native, torch_private
from fastgrad.core.memory import Parameters, Result
from fastgrad.problem.arguments import check_has_no_cycle, flatten
from fastgrad.problem.coordinates import own_values

_PLAIN = frozenset({float, int, bool, str, type(None), FunctionType, BuiltinFunctionType, MethodType})
"""Common types of arguments that contain no tensors."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype in which bits are compared, by the size of an element in bytes."""


_NO_CONTEXT = nullcontext()


class SavedState:
    """The state of all tensors in some values, including containers and modules.

    A tensor that does not require grad is written by `restore` only if its values have changed. As a context manager,
    this object restores the state on leaving, also after an exception.
    """

    def __init__(self, *values: Any) -> None:
        self._is_recording = torch.is_grad_enabled()
        with self._context():
            self._tensors = [
                native.KeptTensor.keep(tensor) or _KeptTensor(torch_private.without_transforms(tensor))
                for tensor in tensors_in(values, {})
            ]

    def __enter__(self) -> SavedState:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restores everything; may be called again, for example after an interrupted call."""
        if torch.is_grad_enabled() != self._is_recording:
            torch.set_grad_enabled(self._is_recording)
        with self._context():
            for kept in self._tensors:
                kept.restore()

    @staticmethod
    def _context() -> AbstractContextManager[None]:
        return torch_private.below_transforms() if torch_private.transforms_are_active() else _NO_CONTEXT


def restores_caller_state(entry: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorates a function that calls the caller's func: restores the caller's tensors afterwards.

    The tensors are saved before func can be called, and are restored no matter how the function ends.
    """

    @functools.wraps(entry)
    def keeping(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        __tracebackhide__ = True  # under pytest a failure shows the caller's line
        try:
            kept = SavedState(*arguments, *keywords.values())
        except RecursionError:
            for name, value in inspect.signature(entry).bind(*arguments, **keywords).arguments.items():
                check_has_no_cycle(name, value)
            raise
        try:
            return entry(*arguments, **keywords)
        finally:
            try:
                kept.restore()
            except KeyboardInterrupt:
                kept.restore()
                raise

    return torch_private.hidden_from_dynamo(keeping)


def tensors_in(values: Iterable[Any], found: dict[int, Tensor]) -> Iterable[Tensor]:
    """Adds each tensor in values to `found` once, and returns all found; of a module, parameters that require grad."""
    for value in values:
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif type(value) in (tuple, list):
            tensors_in(value, found)  # for these common containers, `flatten` takes ten times as long
        elif isinstance(value, Module):
            found |= {id(each): each for each in value.parameters() if each.requires_grad and not is_lazy(each)}
        elif type(value) not in _PLAIN:
            inside: list[tuple[str, Tensor]] = []
            flatten(value, "", lambda tensor: True, inside)
            found |= {id(tensor): tensor for _, tensor in inside}
    return found.values()


class _KeptTensor:
    """A tensor with its saved bits, graph, gradient and requires_grad; see `native.KeptTensor` for plain tensors."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._history = native.KeptHistory(tensor)
        self._requires_grad = tensor.requires_grad
        self._has_gradient = tensor.is_leaf or tensor.retains_grad  # reading .grad of other tensors warns
        self._gradient = tensor.grad if self._has_gradient else None
        self._kept_gradient = None if self._gradient is None else _KeptTensor(self._gradient)
        self._version = torch_private.version_of(tensor)
        # Writes to the alias do not increase the version counter of the tensor, because it has its own.
        self._alias = None if _is_opaque(tensor) else tensor.data
        self._memory = None if self._alias is None else _memory(self._alias, self._requires_grad)
        self._bits = None if self._memory is None else self._memory.clone()
        # `x.data = ...` and `x.resize_()` move a tensor.
        is_strided = self._alias is not None and self._alias.layout is torch.strided
        self._place = _place(tensor) if is_strided else None

    def restore(self) -> None:
        tensor = self._tensor
        if self._alias is not None and self._place is not None and _place(tensor) != self._place:
            tensor.data = self._alias
        if self._memory is not None and self._bits is not None:
            self._write(self._memory, self._bits)
        self._history.restore()
        if tensor.requires_grad != self._requires_grad and tensor.is_leaf:
            tensor.requires_grad_(self._requires_grad)
        if self._has_gradient and tensor.grad is not self._gradient:
            tensor.grad = self._gradient
        if self._kept_gradient is not None:
            self._kept_gradient.restore()

    def _write(self, memory: Tensor, bits: Tensor) -> None:
        # Memory of tensors that do not require grad may be read-only: it is written only if it has changed.
        if memory.layout is torch.strided and not _is_backed(memory):
            # The memory is allocated again, because func freed it.
            memory.untyped_storage().resize_(torch_private.bytes_needed(memory))
        elif not self._requires_grad and torch.equal(memory, bits):
            return
        if memory.is_inference():
            with torch.inference_mode():
                memory.copy_(bits)
        else:
            memory.copy_(bits)
        if torch_private.version_of(self._tensor) != self._version:
            increment_version(self._tensor)  # graphs that func recorded may refer to the values that func wrote


def _place(tensor: Tensor) -> tuple[object, ...]:
    """The address, shape and strides of a strided tensor."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _is_backed(tensor: Tensor) -> bool:
    """Whether a strided tensor's storage is large enough for its elements."""
    return tensor.untyped_storage().nbytes() >= torch_private.bytes_needed(tensor)


def _is_opaque(tensor: Tensor) -> bool:
    """Whether a tensor has no accessible memory."""
    is_plain = type(tensor) in (Tensor, Parameter)
    return tensor.is_meta or tensor.is_nested or (not is_plain and torch_private.is_dispatched_to_python(tensor))


def _memory(tensor: Tensor, is_written: bool) -> Tensor | None:
    """The memory of a tensor's values; None if it is not accessible.

    A dimension of stride 0 is reduced to one element. If is_written, the values are returned in their own dtype.
    Otherwise, their bits are returned as integers, so that a comparison includes all bits.
    """
    values = own_values(tensor)
    if values is None or (values.layout is torch.strided and not _is_backed(values)):
        return None
    values = values.detach()  # views of a sparse tensor's values are not views of that tensor
    if not is_written:
        values = torch_private.unconjugated(values)
        if values.is_complex():
            values = torch.view_as_real(values)
        if values.is_floating_point():
            values = values.view(_INTEGERS[values.element_size()])
    for dimension, (size, stride) in enumerate(zip(values.shape, values.stride(), strict=True)):
        if stride == 0 and size > 1:
            values = values.narrow(dimension, 0, 1)
    return values
