"""The classes of a variant: a function, inputs and keywords derived from the given ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from fastgrad.problem.arguments import Buffers, Call, Rebuild, as_tuple, check_callable, flatten
from fastgrad.problem.validation import differentiable_inputs
from fastgrad.report.report import Report
from fastgrad.report.variants import VariantVerdict

Family = Literal["state", "points", "layouts", "derivatives", "compiled"]

MAX_ALONE = 6
"""Largest number of inputs that are varied one at a time."""

SPREADS = 0.05, -0.05
"""Largest relative distance of values next to the given ones. These values are larger or, if func is not finite there,
smaller."""


class NotApplicableError(Exception):
    """The reason why a variant does not apply to a function."""


@dataclass(frozen=True)
class Subject:
    """The function and inputs to check.

    Attributes
    ----------
    called, arguments, keywords
        The caller's function and its arguments.
    given, parameters
        The tensors in arguments and keywords, nested or not, and the parameters of a module.
    names
        The names of the given tensors and of the parameters, as in reports of `fastgrad.check`.
    rebuilds
        Replace the given tensors by others, in arguments and in keywords.
    seed
        Seed of the random numbers.
    buffers
        Those of a module. They are restored before every call of it, not after it: its backward may need their values.
    """

    called: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    given: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...]
    names: tuple[str, ...]
    rebuilds: tuple[Rebuild | None, ...]
    seed: int
    buffers: Buffers | None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """All tensors among the inputs."""
        return self.given + self.parameters

    @property
    def is_strided(self) -> bool:
        return all(value.layout is torch.strided for value in self.inputs)

    @property
    def has_16_bits(self) -> bool:
        """Whether a checked input has a 16-bit dtype."""
        return any(value.dtype.to_real().itemsize == 2 for value in self.inputs if value.requires_grad)

    @property
    def func(self) -> Callable[..., Any]:
        """The caller's function, as a function of the inputs."""
        return self.flat(self.called)

    def results(self) -> Any:
        """The results of the caller's function at the given inputs."""
        return self.func(*self.inputs)

    def flat(self, called: Callable[..., Any]) -> Callable[..., Any]:
        """Another function with the caller's arguments, as a function of the inputs."""
        count = len(self.given)

        def func(*tensors: Any) -> Any:
            own = iter(tensors[:count])
            of_arguments, of_keywords = self.rebuilds
            arguments = self.arguments if of_arguments is None else of_arguments(own)
            keywords = self.keywords if of_keywords is None else of_keywords(own)
            if self.buffers is not None:
                self.buffers.restore()
            if not self.parameters:
                return called(*arguments, **keywords)
            with Call(called, arguments, keywords, "parameters", restores_buffers=False) as call:
                return call(*tensors[count:])

        return func

    @property
    def checked(self) -> list[int]:
        """The positions of the inputs that require grad."""
        return [i for i, value in enumerate(self.inputs) if value.requires_grad]

    def with_changed(self, change: Callable[[Tensor], Tensor], chosen: set[int]) -> tuple[Tensor, ...]:
        """Inputs in which the chosen ones are leaves with other values or another layout."""
        return tuple(
            change(x.detach()).requires_grad_(x.requires_grad) if i in chosen else x for i, x in enumerate(self.inputs)
        )

    def of_checked(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """A function of the checked inputs only; the others come from arguments."""

        def func(*checked: Any) -> Any:
            replaced = dict(zip(self.checked, checked, strict=True))
            return self.func(*(replaced.get(i, value) for i, value in enumerate(arguments)))

        return func

    def neighbor(self) -> Callable[[tuple[Any, ...]], list[Any]]:
        """A function from arguments to arguments a few percent away, at which func is finite; it is differentiable.

        Raises
        ------
        NotApplicableError
            func raises or is not finite at such arguments.
        """
        generator = torch.Generator().manual_seed(self.seed)
        drawn = [(x, torch.rand(x.shape, generator=generator, dtype=torch.float64)) for x in self.inputs]
        for spread in SPREADS:
            factors = [
                (1 + spread * part).to(x.device, x.dtype.to_real()) if x.requires_grad else None for x, part in drawn
            ]

            def make(arguments: tuple[Any, ...], factors: list[Tensor | None] = factors) -> list[Any]:
                return [x if by is None else x * by for x, by in zip(arguments, factors, strict=True)]

            if is_finite(self.func, make(self.inputs)):
                return make
        raise NotApplicableError("at inputs next to the given ones, func raises or is not finite")


def is_finite(func: Callable[..., Any], inputs: Sequence[Any], most: float = math.inf) -> bool:
    """Whether func returns finite values, and at most this many elements."""
    try:
        with torch.no_grad():
            results = tensors_of(func(*inputs))
    except Exception:
        return False
    small = sum(one.numel() for one in results) <= most
    return small and all(bool(one.isfinite().all()) for one in results if one.is_floating_point())


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    """The tensors in a result of func, nested or not."""
    found: list[tuple[str, Tensor]] = []
    flatten(result, "result", lambda tensor: True, found)
    return tuple(tensor for _, tensor in found)


@dataclass(frozen=True)
class Case:
    """The arguments of `fastgrad.check` for a variant.

    tested_for_kinks: the function and inputs for which the existence of the derivative is tested; None: func and
    inputs. expected: makes the results that func must have at the inputs; None: func may have any results.
    """

    func: Callable[..., Any]
    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    tested_for_kinks: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
    expected: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a variant."""

    verdict: VariantVerdict
    detail: str = ""
    report: Report | None = None


@dataclass(frozen=True)
class Variant:
    """A variant: a situation in which a function is checked.

    make: returns the call to check, or an outcome if none is needed; raises NotApplicableError. is_elsewhere: whether
    the point is not the caller's; func may have no derivative there.
    """

    family: Family
    name: str
    make: Callable[[Subject], Case | Outcome]
    is_elsewhere: bool = False

    @property
    def path(self) -> str:
        """Family and name, as in the argument `only` of `check_variants`."""
        return f"{self.family}: {self.name}"


def as_given(**keywords: Any) -> Callable[[Subject], Case]:
    """A maker of the case with the given function and inputs, checked with some keywords."""
    return lambda subject: Case(subject.func, subject.inputs, keywords)


def subject_of(func: Callable[..., Any], inputs: Any, kwargs: Mapping[str, Any], seed: int) -> Subject:
    """The subject of a call.

    Raises
    ------
    TypeError, ValueError, RuntimeError, NotImplementedError
        func cannot be called, there is nothing to check, or an input cannot be perturbed.
    """
    check_callable(func)
    arguments, keywords = as_tuple(inputs), dict(kwargs)
    found: list[tuple[str, Tensor]] = []
    named = ("inputs", arguments), ("kwargs", keywords)
    rebuilds = tuple(flatten(value, name, lambda tensor: True, found) for name, value in named)
    given = tuple(tensor for _, tensor in found)
    names = tuple(name for name, _ in found)
    parameters: tuple[Tensor, ...] = ()
    buffers: Buffers | None = None
    if isinstance(func, Module):
        call, buffers = Call(func, (), {}, "parameters", restores_buffers=False), Buffers(func)
        parameters, names = call.tensors, names + call.names
    if not any(tensor.requires_grad for tensor in given + parameters):
        raise ValueError("check_variants needs a tensor with requires_grad=True among inputs, but there is none.")
    differentiable_inputs(given + parameters, names, warn_of_precision=False)
    return Subject(func, arguments, keywords, given, parameters, names, rebuilds, seed, buffers)
