"""Finds where values that are not finite first appear, if the loss or its gradient is not finite."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgrad.core import torch_private
from fastgrad.model.loss_error import at
from fastgrad.model.places import Places
from fastgrad.model.recorder import full_name, function_name, is_own_function
from fastgrad.model.saved import address, unrecorded
from fastgrad.model.step import Step
from fastgrad.problem.signature import kind_of
from fastgrad.report.model_data import Finding, Site


def not_finite_values(tensor: Tensor) -> Tensor | None:
    """The elements that are not finite, one-dimensional; None if there are none, or if torch cannot tell."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    try:
        with unrecorded():
            finite = tensor.detach().isfinite()
            return None if bool(finite.all()) else tensor.detach()[~finite]
    except RuntimeError:  # for example for a sparse tensor, or one in 8-bit precision
        return None


def find_not_finite(step: Step, loss: Tensor, gradients: Sequence[Tensor | None]) -> Finding | None:
    """Where values that are not finite come from; None if the loss and its gradient are finite.

    Also None if the gradient is not finite although the results from which backward computes it are.
    """
    value = float(loss.detach())
    named = zip(step.names, gradients, strict=True)
    names = tuple(name for name, one in named if one is not None and not_finite_values(one) is not None)
    if math.isfinite(value) and not names:
        return None
    search = _Search(step)
    with step.inside(search.searching):
        repeated = step.loss()
    if math.isfinite(value):
        step.gradients(repeated)
        origin, end = search.of_gradient(), "the loss is finite, but its gradient is not"
        if origin is None:
            return None
    else:
        origin, end = search.of_tensor(repeated), f"the loss is {value}, so it has no gradient"
    if origin is None:
        return Finding("not finite", end, (), "", names)
    sites = () if origin.site is None else (origin.site,)
    return Finding("not finite", f"{origin.text}; {end}", sites, origin.operator, names)


@dataclass(frozen=True)
class _Origin:
    """Where values that are not finite first appear: a sentence and, if they are not arguments, the operation."""

    text: str
    operator: str = ""
    site: Site | None = None


class _Search(torch_private.DispatchMode):  # type: ignore[no-untyped-call]
    """A mode that follows values that are not finite through the forward pass, and to the gradients."""

    def __init__(self, step: Step) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = Places(step.model)
        self._inside = False  # whether a custom Function is running
        self._origins: dict[int, _Origin] = {}  # by the address of a storage
        self._users: dict[int, tuple[weakref.ref[Tensor], list[_Origin | None]]] = {}
        self._first: list[_Origin | None] | None = None
        for name, tensor in step.given():
            if description := _described("contains", tensor):
                self._origins[address(tensor)] = _Origin(f"{name} {description}")

    @contextmanager
    def searching(self) -> Iterator[None]:
        """A context for the forward pass."""
        with self._places.following(), torch_private.functions_through(self._apply), self:
            yield

    def of_tensor(self, tensor: Tensor) -> _Origin | None:
        """The origin of the values of a tensor that are not finite, if known."""
        return self._origins.get(address(tensor))

    def of_gradient(self) -> _Origin | None:
        """The origin of the results whose backward made the first not finite gradient; None if they are finite."""
        return next((one for one in self._first or () if one is not None), None)

    @torch_private.hidden_from_dynamo
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._look(full_name(func), (*args, *kwargs.values()), lambda: func(*args, **kwargs))

    def _apply(self, function: type, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs a custom Function, which counts as one operation."""
        if self._inside or not is_own_function(function):
            return call(*args)

        def run() -> Any:
            self._inside = True
            try:
                return call(*args)
            finally:
                self._inside = False

        return self._look(function_name(function), args, run)

    def _look(self, name: str, arguments: Sequence[Any], run: Callable[[], Any]) -> Any:
        """Runs an operation, and notes the origin of its results that are not finite."""
        if self._inside:
            return run()
        tensors = torch_private.tensors_in(arguments)
        # The last ones first: an operator that overwrites an argument reads those after it.
        values: list[Tensor | float] = [*tensors[::-1], *(one for one in arguments if isinstance(one, float))]
        given = self._of_arguments(name, values)  # before the operation, which may write to them
        had_nan = any(map(_has_nan, values))
        result = run()
        found = None
        for output in torch_private.tensors_in(result):
            if not_finite_values(output) is None:
                continue
            site = self._places.site()
            gives = f"{name}{at(site)} {_described('gives', output)}"
            if name.removeprefix("aten.").removeprefix("new_").startswith("empty"):
                found = _Origin(f"{name}{at(site)} returns memory that is not initialized", name, site)
            elif given is None:
                found = _Origin(f"{gives}, although its inputs are finite", name, site)
            elif _has_nan(output) and not had_nan:
                found = replace(given, text=f"{given.text}; from this, {gives}")
            else:
                found = given
            self._origins[address(output)] = found
        self._watch(tensors, found)
        return result

    def _of_arguments(self, name: str, values: Sequence[Tensor | float]) -> _Origin | None:
        """The origin of the first argument with NaN, or else of the first infinite one; None if all are finite."""
        bad = [one for one in sorted(values, key=_has_nan, reverse=True) if _described("contains", one)]
        for one in bad:
            if isinstance(one, Tensor) and (origin := self.of_tensor(one)) is not None:
                return origin
        site = self._places.site()
        return _Origin(f"an argument of {name}{at(site)} {_described('contains', bad[0])}", name, site) if bad else None

    def _watch(self, tensors: Sequence[Tensor], origin: _Origin | None) -> None:
        """Looks at the gradients of an operation's arguments; origin: that of its results."""
        for tensor in tensors if torch.is_grad_enabled() else ():
            if not tensor.requires_grad:
                continue
            known = self._users.get(id(tensor))
            if known is None or known[0]() is not tensor:
                known = self._users[id(tensor)] = weakref.ref(tensor), []
                tensor.register_hook(partial(self._note, known[1]))  # type: ignore[no-untyped-call]
            known[1].append(origin)

    def _note(self, users: list[_Origin | None], gradient: Tensor) -> None:
        if self._first is None and not_finite_values(gradient) is not None:
            self._first = users


def _has_nan(value: Tensor | float) -> bool:
    if isinstance(value, float):
        return math.isnan(value)
    found = not_finite_values(value)
    return found is not None and bool(found.isnan().any())


def _described(verb: str, value: Tensor | float) -> str:
    """What a value contains, or an operation gives: ``gives nan in 2 of 6 elements of float32[2, 3]``.

    Empty if the value is finite.
    """
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"is {value}"
    found = not_finite_values(value)
    if found is None:
        return ""
    parts = torch.view_as_real(found) if found.is_complex() else found
    kinds = [("nan", parts.isnan()), ("inf", parts == math.inf), ("-inf", parts == -math.inf)]
    *others, last = (name for name, mask in kinds if bool(mask.any()))
    names = f"{', '.join(others)} and {last}" if others else last
    if value.numel() == 1:
        return f"{'is' if verb == 'contains' else verb} {names}"
    return f"{verb} {names} in {found.numel():,} of {value.numel():,} elements of {kind_of(value)}"
