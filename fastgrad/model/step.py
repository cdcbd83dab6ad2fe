"""One training step, repeatable from the same state: the loss, and the gradients of the parameters."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module
from torch.overrides import TorchFunctionMode

from fastgrad.core import torch_private
from fastgrad.core.random import RandomState, generators_of
from fastgrad.lowprecision.reference import without_autocast
from fastgrad.lowprecision.references import Doubled
from fastgrad.lowprecision.rounding import DOUBLE
from fastgrad.problem.arguments import Buffers, Kept, flatten
from fastgrad.problem.caller_state import SavedState

_CASTS = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16})
_LOWER_TYPE = re.compile(r"(Float|Half|BFloat16)Tensor$")


class Step:
    """The model, called from the same state every time.

    This is a context manager: on leaving it, also after an exception, parameters, buffers, gradients, hooks, modes and
    random states are as they were on entering.

    Attributes
    ----------
    names, parameters
        The parameters that require grad and their names. A shared parameter occurs once.
    evaluations
        Number of calls of the model.
    unscaled
        Modules with ``scale_grad_by_freq``, by name. It is switched off, because it divides gradients by design.
    around
        Makes a context for each call of the model and the loss.
    """

    def __init__(
        self,
        model: Module,
        inputs: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss: Callable[[Any], Tensor] | None,
    ) -> None:
        self.model, self._inputs, self._kwargs, self._loss = model, inputs, dict(kwargs), loss
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [one for _, one in named]
        self.evaluations = 0
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._kept = SavedState([*model.parameters(), *model.buffers()], inputs, self._kwargs)
        self._buffers, self._written = Buffers(model), _written(inputs, self._kwargs)
        self._random = _RandomStates([*generators_of(model), *inputs, *self._kwargs.values()])
        self._modules = [(module, module.training, dict(module._buffers)) for module in model.modules()]
        self.unscaled = {
            name: module
            for name, module in model.named_modules()
            if type(module).forward in (Embedding.forward, EmbeddingBag.forward) and module.scale_grad_by_freq
        }
        owners: list[Any] = [*model.parameters(), *model.modules()]
        self._hooks = [
            (owner, name, table, None if table is None else dict(table))
            for owner in owners
            for name, table in torch_private.hook_tables(owner).items()
        ]

    def __enter__(self) -> Step:
        for module in self.unscaled.values():
            module.scale_grad_by_freq = False
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        except KeyboardInterrupt:
            self._restore()
            raise

    def _restore(self) -> None:
        for module in self.unscaled.values():
            module.scale_grad_by_freq = True
        self.reset()
        self._kept.restore()

    def reset(self) -> None:
        """Resets the state that a call of the model may change, except parameters."""
        self._random.restore()
        for module, training, slots in self._modules:
            if module.training != training:
                module.training = training
            module._buffers.clear()
            module._buffers.update(slots)
        for owner, name, table, entries in self._hooks:
            if table is None:
                if getattr(owner, name) is not None:
                    setattr(owner, name, None)
            elif table != entries:
                table.clear()
                table.update(entries)
        self._buffers.restore(thoroughly=True)
        for kept in self._written:
            kept.restore(look=False)

    def given(self) -> list[tuple[str, Tensor]]:
        """The parameters, buffers and arguments of the model, and their names in texts."""
        found: list[tuple[str, Tensor]] = [(f"parameter {name}", one) for name, one in self.model.named_parameters()]
        found += [(f"buffer {name}", one) for name, one in self.model.named_buffers()]
        flatten(self._inputs, "inputs", lambda tensor: True, found)
        flatten(self._kwargs, "kwargs", lambda tensor: True, found)
        return found

    def inside(self, around: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
        """A context in which each call of the model runs in a context that `around` makes."""
        return _swapped(self, "around", around)

    def keeps_hooks(self) -> AbstractContextManager[None]:
        """A context in which the current hooks stay registered, for code that watches them."""
        return _swapped(self, "_hooks", [])

    def loss(self) -> Tensor:
        """The loss, with its graph."""
        self.reset()
        self.evaluations += 1
        with torch.enable_grad(), self.around():
            result = self.model(*self._inputs, **self._kwargs)
            loss = result if self._loss is None else self._loss(result)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = type(loss).__name__
            if isinstance(loss, Tensor):
                what = f"a tensor of dtype {loss.dtype} and shape {tuple(loss.shape)}"
            which = "without loss=, model must return" if self._loss is None else "loss must return"
            raise TypeError(f"{which} a real tensor of one element, got {what}.")
        return loss

    def gradients(self, loss: Tensor) -> list[Tensor | None]:
        """The gradients of the loss with respect to the parameters."""
        for parameter in self.parameters:
            parameter.grad = None
        tables = [torch_private.hook_tables(one)["_post_accumulate_grad_hooks"] for one in self.parameters]
        kept = [(table, dict(table)) for table in tables if table]
        try:
            for table, _ in kept:
                table.clear()  # they may have side effects, such as a step of an optimizer
            if loss.requires_grad:
                loss.sum().backward()  # type: ignore[no-untyped-call]
        finally:
            for table, hooks in kept:
                table.update(hooks)
        found = [None if one.grad is None else one.grad.detach() for one in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return [one if one is None or one.layout is torch.strided else one.to_dense() for one in found]

    @contextmanager
    def in_double(self) -> Iterator[None]:
        """A context in which parameters, buffers, inputs and new tensors have double precision."""
        default = torch.get_default_dtype()
        before = self._inputs, self._kwargs, self._buffers, self._written
        doubled = Doubled(None)
        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, default)
            originals = [(one, one.data) for one in [*self.model.parameters(), *self.model.buffers()]]
            try:
                for tensor, data in originals:
                    if tensor.dtype in DOUBLE:
                        tensor.grad = None
                        tensor.data = data.to(DOUBLE[tensor.dtype])
                self._inputs, self._kwargs = doubled(self._inputs), doubled(self._kwargs)
                self._buffers, self._written = Buffers(self.model), _written(self._inputs, self._kwargs)
                torch.set_default_dtype(torch.float64)
                stack.enter_context(without_autocast())
                stack.enter_context(_InDouble())
                yield
            finally:
                for tensor, data in originals:
                    tensor.grad = None
                    tensor.data = data
                self._inputs, self._kwargs, self._buffers, self._written = before

    @contextmanager
    def moved(self, along: Sequence[Tensor | None], by: float) -> Iterator[None]:
        """A context in which parameters are moved along a direction."""
        moving = [(one, u) for one, u in zip(self.parameters, along, strict=True) if u is not None]
        kept = [parameter.detach().clone() for parameter, _ in moving]
        try:
            for parameter, u in moving:
                parameter.data.add_(u.to(parameter.dtype), alpha=by)
            yield
        finally:
            for (parameter, _), values in zip(moving, kept, strict=True):
                parameter.data.copy_(values)


def _written(*arguments: Any) -> list[Kept]:
    """The tensors among the arguments of a model that are restored before every call: it may write to them."""

    def is_writable(tensor: Tensor) -> bool:
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        return is_plain and not (tensor.is_meta or tensor.is_nested or tensor.is_inference())

    found: list[tuple[str, Tensor]] = []
    flatten(arguments, "", is_writable, found)
    return [Kept(one) for one in {id(one): one for _, one in found}.values()]


class _RandomStates(RandomState):
    """The state of the random generators of torch, Python and numpy, and of generators among some values."""

    def __init__(self, values: Iterable[object]) -> None:
        super().__init__(values)
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        super().restore()
        random.setstate(self._python)
        np.random.set_state(self._numpy)


class _InDouble(TorchFunctionMode):
    """A mode in which torch's functions get floating-point arguments in double precision, and casts give it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in _CASTS:
            return args[0].double()
        if func is Tensor.type:
            args, kwargs = (*args[:1], *map(_double_type, args[1:])), {k: _double_type(v) for k, v in kwargs.items()}
        writes = name.endswith("_") or name in ("__setitem__", "__get__", "__set__")
        if writes and name != "__setitem__":
            return func(*args, **kwargs)
        # Tensors that are written to must keep their identity.
        first, rest = (args[:1], args[1:]) if writes else ((), args)
        return func(*first, *as_double(rest), **as_double(kwargs))


def _double_type(value: Any) -> Any:
    """An argument of `Tensor.type`: for torch.FloatTensor or "torch.FloatTensor", the name of the double type."""
    is_type = isinstance(value, type(torch.FloatTensor))
    name = f"{value.__module__}.{value.__name__}" if is_type else value
    return _LOWER_TYPE.sub("DoubleTensor", name) if isinstance(name, str) else value


def as_double(value: Any) -> Any:
    """A value with the tensors and dtypes that it holds in double precision."""
    if isinstance(value, Tensor):
        return value.to(DOUBLE[value.dtype]) if value.dtype in DOUBLE else value
    if isinstance(value, torch.dtype):
        return DOUBLE.get(value, value)
    if type(value) in (tuple, list):
        return type(value)(as_double(one) for one in value)
    if type(value) is dict:
        return {key: as_double(one) for key, one in value.items()}
    return value


@contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
