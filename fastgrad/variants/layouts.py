"""Variants of the memory layout of inputs; every check covers layouts of grad_outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgrad.problem.validation import is_differentiable
from fastgrad.variants.case import MAX_ALONE, Case, NotApplicableError, Subject, Variant

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory formats by the number of dimensions."""

Make = Callable[[Subject, set[int]], Case]
"""Makes the case in which some of the inputs have another layout."""


def _laid_out(change: Callable[[Tensor], Tensor]) -> Make:
    def make(subject: Subject, chosen: set[int]) -> Case:
        changed = subject.with_changed(change, chosen)
        if all(_layout(new) == _layout(old) for new, old in zip(changed, subject.inputs, strict=True)):
            raise NotApplicableError("no input can have this layout")
        return Case(subject.func, changed, expected=subject.results)

    return make


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.stride(), tensor.storage_offset(), tensor.is_conj()


def _through(view: Callable[[Tensor], Tensor], base: Callable[[Tensor], Tensor]) -> Make:
    """Makes inputs inside func, because no leaf can have this layout; view: differentiable, and the inverse of base."""

    def make(subject: Subject, chosen: set[int]) -> Case:
        def func(*arguments: Any) -> Any:
            return subject.func(*(view(x) if i in chosen else x for i, x in enumerate(arguments)))

        return Case(func, subject.with_changed(base, chosen), expected=subject.results)

    return make


def _with_gaps(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1).select(-1, 0)


def _transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.ndim > 1 else x.clone()


def _at_an_offset(x: Tensor) -> Tensor:
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return memory[1:].view(x.shape).copy_(x)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=FORMATS[x.ndim]) if x.ndim in FORMATS else x.clone()


def _conjugated(x: Tensor) -> Tensor:
    return x.conj().resolve_conj().conj() if x.is_complex() else x.clone()


def _negated(subject: Subject, chosen: set[int]) -> Case:
    """Tensors whose neg bit is set, like the imaginary part of a lazily conjugated tensor."""
    real = {i for i in chosen if subject.inputs[i].is_floating_point()}
    if not real:
        raise NotApplicableError("no input is real")
    return _through(lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag, torch.clone)(subject, real)


def _expanded(dim: int) -> Make:
    """Tensors whose rows (dim 0) or columns (dim -1) are the same memory."""

    def make(subject: Subject, chosen: set[int]) -> Case:
        found = ((i, subject.inputs[i]) for i in chosen)
        sizes = {i: x.shape for i, x in found if is_differentiable(x) and x.ndim > -dim and x.shape[dim] > 1}
        if not sizes:
            raise NotApplicableError(f"no input has {'columns' if dim else 'rows'}")

        def func(*arguments: Any) -> Any:
            return subject.func(*(x.expand(sizes[i]) if i in sizes else x for i, x in enumerate(arguments)))

        # The derivative along the expanded dimension may exist although func has no derivative at this point.
        whole = subject.with_changed(lambda x: x.narrow(dim, 0, 1).expand_as(x).clone(), set(sizes))
        first = subject.with_changed(lambda x: x.narrow(dim, 0, 1).clone(), set(sizes))
        return Case(func, first, tested_for_kinks=(subject.func, whole), expected=lambda: subject.func(*whole))

    return make


_LAYOUTS: tuple[tuple[str, Make, bool], ...] = (
    ("gaps between elements", _laid_out(_with_gaps), False),
    ("transposed in memory", _laid_out(_transposed), False),
    ("storage offset, unaligned", _laid_out(_at_an_offset), False),
    ("channels last", _laid_out(_channels_last), False),
    ("conjugated lazily", _laid_out(_conjugated), False),
    ("negated lazily", _negated, False),
    ("rows expanded", _expanded(0), True),
    ("columns expanded", _expanded(-1), True),
)
"""Names of layouts, makers of cases, and `Variant.is_elsewhere`."""


def _strided(subject: Subject) -> list[int]:
    """The inputs whose layout can change: also those that do not require grad, such as masks."""
    return [i for i, x in enumerate(subject.inputs) if x.layout is torch.strided]


def _of(make: Make, chosen: set[int] | None = None) -> Callable[[Subject], Case]:
    """Makes the case of the chosen inputs; by default, of all."""
    return lambda subject: make(subject, set(_strided(subject)) if chosen is None else chosen)


def _applies(make: Make, subject: Subject, i: int) -> bool:
    try:
        make(subject, {i})
    except Exception:
        return False
    return True


def of_inputs(subject: Subject) -> list[Variant]:
    """Variants with each layout for one of several inputs: they find code that assumes one layout for all inputs."""
    positions = _strided(subject)
    return [
        Variant("layouts", f"{name}, input {i} alone", _of(make, {i}), is_elsewhere)
        for i in (positions[:MAX_ALONE] if len(positions) > 1 else ())
        for name, make, is_elsewhere in _LAYOUTS
        if _applies(make, subject, i)
    ]


VARIANTS = tuple(Variant("layouts", name, _of(make), is_elsewhere) for name, make, is_elsewhere in _LAYOUTS)
