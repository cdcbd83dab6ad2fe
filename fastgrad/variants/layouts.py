"""Variants of the memory layout of inputs; every check covers layouts of grad_outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgrad.variants.case import Case, NotApplicableError, Subject, Variant


def _laid_out(change: Callable[[Tensor], Tensor]) -> Callable[[Subject], Case]:
    def make(subject: Subject) -> Case:
        changed = subject.with_checked(change)
        if all(_layout(changed[i]) == _layout(subject.inputs[i]) for i in subject.checked):
            raise NotApplicableError("no input can have this layout")
        return Case(subject.func, changed)

    return make


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.stride(), tensor.storage_offset(), tensor.is_conj()


def _through(view: Callable[[Tensor], Tensor], base: Callable[[Tensor], Tensor]) -> Callable[[Subject], Case]:
    """Inputs made inside func, because no leaf can have this layout; view: differentiable, and the inverse of base."""

    def make(subject: Subject) -> Case:
        bases = subject.with_checked(base)
        checked = set(subject.checked)

        def func(*arguments: Any) -> Any:
            return subject.func(*(view(x) if i in checked else x for i, x in enumerate(arguments)))

        return Case(func, bases)

    return make


def _with_gaps(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1).select(-1, 0)


def _transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.ndim > 1 else x.clone()


def _at_an_offset(x: Tensor) -> Tensor:
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return memory[1:].view(x.shape).copy_(x)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x.clone()


def _conjugated(x: Tensor) -> Tensor:
    return x.conj().resolve_conj().conj() if x.is_complex() else x.clone()


def _negated(subject: Subject) -> Case:
    """Tensors whose neg bit is set, as torch makes for the imaginary part of a lazily conjugated tensor."""
    if any(x.is_complex() for x in subject.tensors()):
        raise NotApplicableError("an input is complex")
    return _through(lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag, torch.clone)(subject)


def _expanded(subject: Subject) -> Case:
    """Tensors whose rows are one row in memory."""
    rows = {x.shape[0] if x.ndim else 0 for x in subject.tensors()}
    if max(rows) < 2:
        raise NotApplicableError("no input has rows")
    sizes = {i: subject.inputs[i].shape for i in subject.checked}

    def func(*arguments: Any) -> Any:
        return subject.func(*(x.expand(sizes[i]) if i in sizes else x for i, x in enumerate(arguments)))

    def first_row(x: Tensor) -> Tensor:
        return x[:1] if x.ndim and x.shape[0] else x

    # The derivative along the expanded rows may exist although func has no derivative at this point.
    whole = subject.with_checked(lambda x: first_row(x).expand_as(x).clone())
    return Case(func, subject.with_checked(lambda x: first_row(x).clone()), smooth=(subject.func, whole))


VARIANTS = (
    Variant("layouts", "gaps between elements", _laid_out(_with_gaps)),
    Variant("layouts", "transposed in memory", _laid_out(_transposed)),
    Variant("layouts", "storage offset, unaligned", _laid_out(_at_an_offset)),
    Variant("layouts", "channels last", _laid_out(_channels_last)),
    Variant("layouts", "conjugated lazily", _laid_out(_conjugated)),
    Variant("layouts", "negated lazily", _negated),
    Variant("layouts", "rows expanded", _expanded, True),
)
