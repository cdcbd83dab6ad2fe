"""Flattens nested arguments, keyword arguments and the parameters of a module into named tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fastgrad.core import torch_private

Wrt = Literal["inputs", "parameters", "both"]
"""The tensors whose derivatives are checked."""

Rebuild = Callable[[Iterator[Any]], Any]
"""Rebuilds a nested value from its tensors, in their order."""

Children = tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]]


def flatten(value: Any, path: str, wanted: Callable[[Tensor], bool], found: list[tuple[str, Tensor]]) -> Rebuild | None:
    """Collects the selected tensors of a nested value, each with its path.

    Containers are those of torch's pytree, and dataclasses.

    Returns
    -------
    callable
        Rebuilds the value; containers that hold selected tensors are copied. None if there are no selected tensors.
    """
    if isinstance(value, Tensor):
        if not wanted(value):
            return None
        found.append((path, value))
        return next
    held = _children_of(value)
    if held is None:
        return None
    children, make = held
    rebuilds = [(child, flatten(child, path + step, wanted, found)) for step, child in children]
    if all(rebuild is None for _, rebuild in rebuilds):
        return None
    return lambda tensors: make([child if rebuild is None else rebuild(tensors) for child, rebuild in rebuilds])


def _children_of(value: Any) -> Children | None:
    """The children of a container with their paths, and a function that rebuilds it; None if it is not a container."""
    kind = type(value)
    if kind is tuple or kind is list:
        return [(f"[{i}]", child) for i, child in enumerate(value)], kind
    held = torch_private.children_of(value)
    if held is None and dataclasses.is_dataclass(value) and not isinstance(value, (type, torch.nn.Module)):
        return _dataclass_children(value)
    return held


def _dataclass_children(value: Any) -> Children:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]

    def make(children: list[Any]) -> Any:
        made = copy.copy(value)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(made, name, child)  # the dataclass may be frozen
        return made

    return [(f".{name}", getattr(value, name)) for name in names], make


def check_has_no_cycle(name: str, value: Any) -> None:
    """Raises a ValueError if a container in a nested value contains itself; name: of the value, in the message."""
    names = {id(value): name}  # of the containers around the current one
    around: list[tuple[Any, str, Iterator[tuple[str, Any]]]] = [(value, name, _steps(value))]
    while around:
        _, path, steps = around[-1]
        step, child = next(steps, (None, None))
        if step is None:
            around.pop()
            names.popitem()
        elif id(child) in names:
            raise ValueError(
                f"{name} must not have a container inside itself, but {path + step} is {names[id(child)]}."
            ) from None  # not from the RecursionError that it explains
        else:
            around.append((child, path + step, _steps(child)))
            names[id(child)] = path + step


def _steps(value: Any) -> Iterator[tuple[str, Any]]:
    """The containers directly inside a container, with their paths."""
    held = None if isinstance(value, Tensor) else _children_of(value)
    children = [] if held is None else held[0]
    return (each for each in children if not isinstance(each[1], Tensor) and _children_of(each[1]) is not None)


def check_callable(func: object) -> None:
    """Raises a TypeError if func cannot be called, or is the class of a torch.autograd.Function."""
    if not callable(func):
        raise TypeError(f"func must be callable, got {type(func).__name__}.")
    if isinstance(func, type) and issubclass(func, torch.autograd.Function):
        raise TypeError(f"func is the class {func.__name__}: pass {func.__name__}.apply instead.")


class FlatFunction:
    """A function of tensors in place of the caller's function.

    input_names: the caller's names of these tensors, for messages.
    """

    def __init__(self, func: Callable[..., Any], name: str, input_names: tuple[str, ...]) -> None:
        self._func, self.__name__, self.input_names = func, name, input_names

    def __call__(self, *tensors: Any) -> Any:
        return self._func(*tensors)


class Call:
    """func(*inputs, **kwargs) as a function of the checked tensors: it takes tensors and returns a tuple of tensors.

    This is a context manager: on leaving it, a module's buffers have the values that they had on entering, unless
    restores_buffers is False.

    Every call gets new containers, so that func may change them. The containers hold the caller's own tensors, or those
    that the checker passes instead. The parameters of a module are perturbed in place. If the checker passes other
    tensors (dual tensors) instead of the parameters, the module is called with these tensors.

    Attributes
    ----------
    func, inputs, kwargs, wrt
        As passed at creation.
    tensors, names
        The checked tensors: inputs, then keyword arguments, then parameters; and their names in messages.
    output_names
        Names of the tensors that func returned in its first call.
    differentiable
        Whether each of these output tensors required grad.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        inputs: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        wrt: Wrt,
        restores_buffers: bool = True,
    ) -> None:
        check_callable(func)
        self.func = self.__wrapped__ = func
        self.inputs, self.kwargs, self.wrt = inputs, dict(kwargs), wrt
        self._parameters: list[_Parameter] = []
        self._buffers: Buffers | None = None
        self._rebuilds: list[Rebuild | None] = [None, None]
        found: list[tuple[str, Tensor]] = []
        if wrt != "parameters":
            named = ("inputs", self.inputs), ("kwargs", self.kwargs)
            self._rebuilds = [flatten(value, name, lambda tensor: tensor.requires_grad, found) for name, value in named]
        if isinstance(func, FlatFunction):
            pairs = zip(func.input_names, inputs, strict=True)
            found = [(name, tensor) for name, tensor in pairs if tensor.requires_grad]
        if isinstance(func, torch.nn.Module):
            self._buffers = Buffers(func) if restores_buffers else None
            self._parameters = _checked_parameters(func) if wrt != "inputs" else []
        found += [(f"module.{parameter.name}", parameter.tensor) for parameter in self._parameters]
        self.tensors = tuple(tensor for _, tensor in found)
        self.names = tuple(name for name, _ in found)
        self.output_names: tuple[str, ...] = ()
        self.differentiable: tuple[bool, ...] = ()

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        if self._buffers is not None:
            self._buffers.restore(thoroughly=True)
        for parameter in self._parameters:
            parameter.assign()

    def __call__(self, *tensors: Any) -> tuple[Tensor, ...]:
        """Calls func, and returns the tensors in its result."""
        if self._buffers is not None:
            self._buffers.restore()
        count = len(tensors) - len(self._parameters)
        own = iter(tensors[:count])
        of_inputs, of_kwargs = self._rebuilds
        inputs = self.inputs if of_inputs is None else of_inputs(own)
        kwargs = self.kwargs if of_kwargs is None else of_kwargs(own)
        pairs = zip(self._parameters, tensors[count:], strict=True)
        replaced = [(parameter, tensor) for parameter, tensor in pairs if tensor is not parameter.tensor]
        try:
            for parameter, tensor in replaced:
                parameter.put(tensor)
            result = self.func(*inputs, **kwargs)
        finally:
            for parameter, _ in replaced:
                parameter.put(parameter.tensor)
        if self.output_names and isinstance(result, Tensor):
            return (result,)
        found: list[tuple[str, Tensor]] = []
        try:
            flatten(result, "result", lambda tensor: True, found)
        except RecursionError:
            check_has_no_cycle("func's result", result)
            raise
        if not found:
            raise TypeError(f"func must return a tensor, or a container of tensors, got {type(result).__name__}.")
        if not self.output_names:
            self.output_names = tuple(name for name, _ in found)
            self.differentiable = tuple(tensor.requires_grad for _, tensor in found)
        return tuple(tensor for _, tensor in found)


@dataclasses.dataclass(eq=False)
class _Parameter:
    """A parameter of a module: its first name, and the modules that hold it, each with the parameter's name there."""

    name: str
    tensor: Tensor
    places: list[tuple[torch.nn.Module, str]]
    was_replaced: bool = False

    def put(self, tensor: Tensor) -> None:
        """Puts a tensor in the parameter's place; torch.func.functional_call would not restore aliased modules."""
        self.was_replaced = True
        for owner, name in self.places:
            owner._parameters[name] = tensor  # type: ignore[assignment]  # a dual tensor is no Parameter

    def assign(self) -> None:
        """Assigns the parameter again if it was replaced, so that modules renew their own lists of parameters."""
        for owner, name in self.places if self.was_replaced else []:
            setattr(owner, name, self.tensor)
            torch_private.renew_weight_lists(owner)


def _checked_parameters(module: torch.nn.Module) -> list[_Parameter]:
    """The parameters that require grad; a shared parameter is listed once."""
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            places.setdefault(id(parameter), []).append((owner, name))
    found = []
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"Parameter {name} of the module is uninitialized: call the module once before the check.")
        if parameter.requires_grad:
            found.append(_Parameter(name, parameter, places[id(parameter)]))
    return found


class Buffers:
    """The buffers of a module (for example running statistics), which are restored before every call.

    All buffers are copied at the beginning. Only buffers that have changed are restored: those whose version counter
    has increased and, because some operators write without increasing it, those whose values the first call changed.
    Buffers are not restored right after a call, because its backward may need the values that the call left.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._slots = [(owner, dict(owner._buffers)) for owner in module.modules() if owner._buffers]
        tensors = {id(tensor): tensor for _, slots in self._slots for tensor in slots.values() if tensor is not None}
        self._kept = [Kept(tensor) for tensor in tensors.values() if not tensor.is_meta]
        self._calls = 0

    def restore(self, thoroughly: bool = False) -> None:
        """Restores the buffers that have changed; compares all values after the first call, and if thoroughly."""
        for owner, slots in self._slots:
            for name, tensor in slots.items():
                if owner._buffers.get(name) is not tensor:
                    owner._buffers[name] = tensor
        for kept in self._kept:
            kept.restore(thoroughly or self._calls == 1)
        self._calls += 1


class Kept:
    """A tensor with its values, which are restored if its version counter has increased."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._values = tensor.detach().clone()
        self._is_leaf = tensor.is_leaf
        self._version = torch_private.version_of(tensor)
        self._unversioned = False  # whether its values change without its version counter

    def restore(self, look: bool) -> None:
        tensor = self._tensor
        if look and not self._unversioned:
            self._unversioned = tensor.layout is not torch.strided or not torch.equal(tensor.detach(), self._values)
        if self._unversioned or torch_private.version_of(tensor) != self._version:
            if self._is_leaf:
                torch_private.drop_graph_(tensor)
            # Writes through .data do not increase the version counter, which thus counts only the module's own writes.
            tensor.data.copy_(self._values)
            self._version = torch_private.version_of(tensor)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A tuple as it is, a list as a tuple, anything else as a tuple of one."""
    return value if isinstance(value, tuple) else tuple(value) if isinstance(value, list) else (value,)
