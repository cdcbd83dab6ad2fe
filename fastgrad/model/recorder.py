"""Records one forward pass: operations with their inputs, saved tensors, detached paths, hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fastgrad.core import torch_private
from fastgrad.core.random import generators_of
from fastgrad.model.hooks import HookWatch
from fastgrad.model.places import Places
from fastgrad.model.saved import Saved, SavedWatch, address, unrecorded
from fastgrad.model.step import Step
from fastgrad.problem.arguments import Rebuild, flatten
from fastgrad.report.model_data import Site

MAX_SITES = 8
"""Largest number of places, and of further calls of a custom Function, that are kept per operation."""

_OF_CUSTOM_OPERATOR = "torch._library.autograd"
"""The module of the Functions that torch makes for operators of `torch.library`."""


@dataclass(eq=False)
class Call:
    """A distinct operation, with copies of its arguments.

    Attributes
    ----------
    name
        Its name in reports.
    target
        An operator, or a custom Function.
    tensors
        The tensors among its arguments: copies, except for parameters.
    rebuild
        Rebuilds the arguments from as many tensors.
    differentiable
        Which of the tensors require grad.
    written
        Which of the tensors the operation writes to.
    random
        Whether it may draw random numbers.
    generators
        The generators of the model, from which a custom Function may draw.
    sites, count
        Where it was called, and how often.
    used
        Which of its results were used.
    omitted
        Why it cannot be checked; empty if it can.
    others
        Further calls with their own copies of arguments; only for custom Functions.
    """

    name: str
    target: Any
    tensors: list[Tensor]
    rebuild: Rebuild
    differentiable: list[int]
    written: set[int] = field(default_factory=set)
    random: bool = False
    generators: list[torch.Generator] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    count: int = 0
    used: set[int] = field(default_factory=set)
    omitted: str = ""
    others: list[Call] = field(default_factory=list)

    @property
    def is_custom(self) -> bool:
        return isinstance(self.target, type)


@dataclass(eq=False)
class DetachedPath:
    """An unrecorded event whose result depends on parameters."""

    event: int
    name: str
    site: Site
    parameters: int
    """One bit for each parameter that its result depends on."""
    alias: weakref.ref[Tensor] | None
    """Its result, if it has only one and all of it is detached."""
    is_intended: bool
    """Whether torch does this on purpose, for example in spectral norm, or for the padding row of an embedding."""


_SYMMETRIC = "for symmetric perturbations of a matrix"

_DERIVATIVES_FOR_SOME_INPUTS = {
    **dict.fromkeys(("aten._ctc_loss", "aten._cudnn_ctc_loss"), "together with that of the log_softmax before it"),
    **dict.fromkeys(("aten.linalg_cholesky_ex", "aten.cholesky", "aten._linalg_eigh"), _SYMMETRIC),
    **dict.fromkeys(("aten.cholesky_solve", "aten.cholesky_inverse"), "together with that of the Cholesky factor"),
}
"""Operators that are not checked separately, because their gradients are derivatives only under a condition, which is
stated here."""


class Recorder(torch_private.DispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records the operations of a forward pass, in the thread that runs it.

    Attributes
    ----------
    calls
        Distinct operations, in the order of their first calls.
    places
        The current position in the model.
    saved, hooks, detached
        Saved tensors, hooks, and paths that autograd does not record.
    foreign
        Functions of torch's own that are not operators, for example activation checkpointing.

    Parameters
    ----------
    step
        The step of the model, whose parameters are tracked through it.
    memory_limit
        Bytes for copies of the inputs of operations; None: operations are not kept.
    kept_saved
        Which saved tensors are copied, by `Saved.number`; backward gets the copies.
    mutes_hooks
        Whether hooks are prevented from returning or writing other gradients.
    watched
        Which saved tensors are compared before and after every operation, by `Saved.number`.
    """

    def __init__(
        self,
        step: Step,
        *,
        memory_limit: int | None = None,
        kept_saved: frozenset[int] = frozenset(),
        mutes_hooks: bool = False,
        watched: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[Any, Call] = {}
        self.places = Places(step.model)
        self._generators = generators_of(step.model)
        self.saved = SavedWatch(self.places, kept_saved, watched)
        self.hooks = HookWatch(step.model, self.places, mutes_hooks)
        self.detached: list[DetachedPath] = []
        self.foreign: dict[str, Site] = {}
        self._left, self._keeps_calls = memory_limit or 0, memory_limit is not None
        self._parameters = step.parameters
        self._inside = 0  # number of custom Functions that are running
        self._masks: dict[int, tuple[weakref.ref[Tensor], int, tuple[Call, int] | None]] = {}
        self._aliases: dict[int, DetachedPath] = {}
        self._memory: dict[int, int] = {}  # masks, by the address of a storage
        for bit, parameter in enumerate(self._parameters):
            self._follow(parameter, 1 << bit, None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the forward pass that runs inside."""
        with (
            self.places.following(),
            torch_private.functions_through(self._apply),
            saved_tensors_hooks(self._pack, self.saved.unpack),
            self,
        ):
            yield

    def parameters_of(self, mask: int) -> list[int]:
        """The numbers of the parameters in a mask."""
        return [bit for bit in range(len(self._parameters)) if mask >> bit & 1]

    def _look(self, writer: Callable[[], str]) -> None:
        if not self._inside:
            self.saved.look(writer)

    # Events: operators that run below autograd, in their order.

    @torch_private.hidden_from_dynamo
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = torch_private.tensors_in((args, kwargs))
        recording = torch.is_grad_enabled() and not self._inside
        needs_grad = any(tensor.requires_grad for tensor in tensors)
        mask, lost = self._look_up(tensors)
        padding = padding_row(func, args, kwargs) if recording else None
        call = None
        if recording and needs_grad and self._keeps_calls and not _is_detach(func):
            call = self._keep(full_name(func), func, (args, kwargs))
        self._look(self.saved.by_nobody)
        result = func(*args, **kwargs)
        outputs = torch_private.tensors_in(result)
        if call is not None and call.count == 1 and not _has_derivative(func, outputs):
            del self.calls[next(reversed(self.calls))]
            call = None
        if mask and not self._inside:
            if self._stops(func, outputs, recording, needs_grad, lost):
                alias = weakref.ref(outputs[0]) if len(outputs) == 1 else None
                self._note_detached(func, mask, alias, self.places.holds_constants())
            elif padding is not None and bool((args[1] == padding).any()):
                self._note_detached(func, mask, None, is_intended=True)
        if func._schema.is_mutable and tensors:
            where = f"{_name_of(func)} at {self.places.text()}"
            self.saved.note_writes(torch_private.tensors_in(_written(func, args, kwargs)), where)
        for number, output in enumerate(outputs):
            self._follow(output, mask, (call, number) if call else None)
        self.saved.events += 1
        self._look(lambda: f"{_name_of(func)} at {self.places.text()}")
        return result

    def _note_detached(self, func: Any, mask: int, alias: weakref.ref[Tensor] | None, is_intended: bool) -> None:
        path = DetachedPath(self.saved.events, full_name(func), self.places.site(), mask, alias, is_intended)
        self.detached.append(path)

    def _stops(self, func: Any, outputs: Sequence[Tensor], recording: bool, needs_grad: bool, lost: bool) -> bool:
        """Whether the recording of values that depend on parameters ends at this event."""
        if _name_of(func) in _ONLY_SHAPES:
            return False
        if not needs_grad:
            return lost  # for an alias made by .data: at the first operator that gets it
        return not recording or _is_detach(func) or not _has_derivative(func, outputs)

    def _look_up(self, tensors: Sequence[Tensor]) -> tuple[int, bool]:
        """The parameters on which some tensors depend; and whether one tensor is an alias unknown to autograd."""
        mask, lost = 0, False
        for tensor in tensors:
            self.use(tensor)
            known = self._masks.get(id(tensor))
            if known is not None and known[0]() is tensor:
                mask |= known[1]
            elif found := self._memory.get(address(tensor), 0):
                mask |= found
                lost = lost or not tensor.requires_grad
        return mask, lost

    def use(self, tensor: Tensor) -> None:
        """Notes that a tensor is used: by an operator, or as the loss."""
        cut = self._aliases.pop(id(tensor), None)
        if cut is not None and cut.alias is not None and cut.alias() is tensor:
            self.detached.append(cut)
        known = self._masks.get(id(tensor))
        if known is not None and known[0]() is tensor and known[2] is not None:
            known[2][0].used.add(known[2][1])

    def _follow(self, tensor: Tensor, mask: int, made_by: tuple[Call, int] | None) -> None:
        self._masks[id(tensor)] = weakref.ref(tensor), mask, made_by
        self._memory[address(tensor)] = mask

    # Operations.

    def _apply(self, function: type, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs a custom Function, and keeps the call."""
        is_own, name = is_own_function(function), function_name(function)
        tensors = torch_private.tensors_in(args)
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        kept = None
        if needs_grad and not self._inside and is_own and self._keeps_calls:
            kept = self._keep(name, function, (args, {}))
        elif needs_grad and not self._inside and not is_own and function.__module__ != "torch.nn.modules._functions":
            self.foreign.setdefault(name, self.places.site())
        mask, _ = self._look_up(tensors)
        versions = [torch_private.version_of(tensor) for tensor in tensors]
        self._look(self.saved.by_nobody)
        self._inside += 1
        try:
            result = call(*args)
        finally:
            self._inside -= 1
        if kept is not None:
            kept.written |= {i for i, tensor in enumerate(tensors) if torch_private.version_of(tensor) != versions[i]}
        for number, output in enumerate(torch_private.tensors_in(result)):
            self._follow(output, mask, (kept, number) if kept else None)
        self._look(lambda: f"{name} at {self.places.text()}")
        return result

    def _keep(self, name: str, target: Any, arguments: Any) -> Call:
        """The call of an operation; if it is the first of its kind, with copies of its arguments."""
        found: list[tuple[str, Tensor]] = []
        rebuild = flatten(arguments, "", lambda tensor: True, found)
        assert rebuild is not None  # not None, because an argument requires grad
        plain = rebuild(iter([Tensor] * len(found)))
        layouts = tuple(
            (tuple(one.shape), one.stride() if one.layout is torch.strided else (), one.dtype, one.requires_grad)
            for _, one in found
        )
        key = target, layouts, _key_of(plain)
        call = self.calls.get(key)
        if call is None:
            call = self.calls[key] = self._copied(name, target, found, rebuild)
        elif isinstance(target, type) and len(call.others) < MAX_SITES:
            other = self._copied(name, target, found, rebuild)
            other.sites, other.used = [self.places.site()], call.used
            call.others.append(other)
        call.count += 1
        site = self.places.site()
        if site not in call.sites and len(call.sites) < MAX_SITES:
            call.sites.append(site)
        return call

    def _copied(self, name: str, target: Any, found: Sequence[tuple[str, Tensor]], rebuild: Rebuild) -> Call:
        own = {id(parameter) for parameter in self._parameters}
        tensors = [tensor for _, tensor in found]
        fresh = list({id(tensor): tensor for tensor in tensors if id(tensor) not in own}.values())
        size = sum(tensor.numel() * tensor.element_size() for tensor in fresh)
        differentiable = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        call = Call(name, target, tensors, rebuild, differentiable)
        if size > self._left:
            call.tensors = [torch.empty_like(tensor, device="meta") for tensor in tensors]
            call.omitted = f"its inputs take {size:,} bytes, and memory_limit leaves {self._left:,}"
            return call
        self._left -= size
        with unrecorded():
            copies = {id(tensor): tensor.detach().clone() for tensor in fresh}  # each tensor is copied once
        call.tensors = [copies.get(id(tensor), tensor) for tensor in tensors]
        if call.is_custom:
            call.random, call.generators = True, self._generators
        else:
            call.random = torch.Tag.nondeterministic_seeded in target.tags
            args, kwargs = rebuild(iter(range(len(tensors))))
            call.written = {number for number in _written(target, args, kwargs) if isinstance(number, int)}
            if target.namespace == "aten" and _argument(target, args, kwargs, "scale_grad_by_freq"):
                call.omitted = "scale_grad_by_freq: by design, its gradient is not the derivative"
            condition = _DERIVATIVES_FOR_SOME_INPUTS.get(".".join(name.split(".")[:2]))  # the name without the overload
            if condition is not None:
                call.omitted = f"by design, its gradient is the derivative only {condition}"
        return call

    def _pack(self, tensor: Tensor) -> Saved:
        if self.detached and self.detached[-1].alias is not None and self.detached[-1].alias() is tensor:
            self._aliases[id(tensor)] = self.detached.pop()  # a detach by autograd itself, unless its result is used
        return self.saved.pack(tensor)


class _Identity:
    """Equal only to one of the same object, which it keeps alive: another object may otherwise get its address."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


_PLAIN = bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format
"""Types of arguments that are compared by their text, which also tells True from 1, and 0.0 from -0.0."""


def _key_of(argument: Any) -> Any:
    """A hashable key that is equal for arguments with which an operation does the same."""
    if isinstance(argument, tuple | list):
        return type(argument), tuple(map(_key_of, argument))
    if isinstance(argument, dict):
        return dict, tuple((_key_of(name), _key_of(value)) for name, value in argument.items())
    return (type(argument), repr(argument)) if type(argument) in _PLAIN else _Identity(argument)


_ONLY_SHAPES = frozenset({"sym_size", "sym_stride", "sym_numel", "empty_like", "zeros_like", "ones_like", "new_zeros"})
"""Operators that take no values from their input."""


def _name_of(func: Any) -> str:
    return str(func._schema.name).rpartition("::")[2]


def full_name(func: Any) -> str:
    """The name of an operator, with its overload if that is not the default."""
    return str(func).removesuffix(".default")


def is_own_function(function: type) -> bool:
    """Whether a custom Function is not one of torch's own, such as that of activation checkpointing."""
    return function.__module__ == _OF_CUSTOM_OPERATOR or not function.__module__.startswith("torch.")


def function_name(function: type) -> str:
    """The name of a custom Function, or of the operator of `torch.library` for which torch has made it."""
    return function.__name__.removeprefix("GeneratedBackwardFor_").removesuffix("_default")


def _has_derivative(func: Any, outputs: Sequence[Tensor]) -> bool:
    """Whether an operator returns floating numbers that depend on its inputs."""
    return _name_of(func) not in _ONLY_SHAPES and any(one.is_floating_point() or one.is_complex() for one in outputs)


def padding_row(func: Any, args: Any, kwargs: Mapping[str, Any]) -> int | None:
    """The row of an embedding's weight that gets no gradient by design; None for other operators."""
    row = _argument(func, args, kwargs, "padding_idx") if func is torch.ops.aten.embedding.default else None
    return row if row is not None and row >= 0 else None


def _argument(func: Any, args: Any, kwargs: Mapping[str, Any], name: str) -> Any:
    """The value of an operator's argument; None if it has no such argument."""
    return next((value for one, value in _bound(func, args, kwargs) if one.name == name), None)


def _is_detach(func: Any) -> bool:
    return func in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes to."""
    return [
        value for one, value in _bound(func, args, kwargs) if one.alias_info is not None and one.alias_info.is_write
    ]


def _bound(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yields each argument in an operator's schema with its value."""
    for number, one in enumerate(func._schema.arguments):
        yield one, args[number] if number < len(args) else kwargs.get(one.name, one.default_value)
