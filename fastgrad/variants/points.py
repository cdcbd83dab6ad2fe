"""Variants of the point: points where gradients may be wrong although they are right at random points."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastgrad.variants.case import Case, NotApplicableError, Subject, Variant, as_given

LARGE, TINY = 1e3, 1e-3
"""Factors by which the given values are multiplied."""


def _is_positive(tensor: Tensor) -> bool:
    return not tensor.is_complex() and bool((tensor > 0).all())


def _at(change: Callable[[Tensor], Tensor], keeps_sign: bool = True) -> Callable[[Subject], Case]:
    def make(subject: Subject) -> Case:
        chosen = {i for i in subject.checked if keeps_sign or not _is_positive(subject.inputs[i].detach())}
        if not chosen:
            raise NotApplicableError("only positive points are tested, because the inputs are positive everywhere")
        return Case(subject.func, subject.with_changed(change, chosen))

    return make


def _with_zeros(tensor: Tensor) -> Tensor:
    changed = tensor.clone(memory_format=torch.contiguous_format)
    changed.view(-1)[::3] = 0
    return changed


def _first_rows_equal(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    if tensor.ndim and tensor.shape[0] > 1:
        changed[1] = changed[0]
    return changed


def _sorted_by_size(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).sort().values.view(tensor.shape) if not tensor.is_complex() else tensor.clone()


def _with_repeated_indices(subject: Subject) -> Case:
    chosen = {i for i, x in enumerate(subject.inputs) if x.dtype in (torch.int32, torch.int64) and x.numel() > 1}
    if not chosen:
        raise NotApplicableError("no input holds integers")
    return Case(subject.func, subject.with_changed(lambda x: torch.full_like(x, int(x.flatten()[0])), chosen))


def _first_rows(count: int) -> Callable[[Subject], Case]:
    def make(subject: Subject) -> Case:
        rows = {i: value.shape[0] for i, value in enumerate(subject.given) if value.ndim}
        if len(set(rows.values())) != 1 or count in rows.values():
            raise NotApplicableError(
                "the inputs have no dimensions, or their first dimensions differ in size or have this size already"
            )
        return Case(subject.func, subject.with_changed(lambda x: x[:count].clone(), set(rows)))

    return make


VARIANTS = (
    Variant("points", "as given", as_given()),
    Variant("points", "zeros", _at(torch.zeros_like, False), True),
    Variant("points", "some zeros", _at(_with_zeros, False), True),
    Variant("points", "ones", _at(torch.ones_like), True),
    Variant("points", "two equal rows", _at(_first_rows_equal), True),
    Variant("points", "negative", _at(lambda x: x if x.is_complex() else -x.abs(), False), True),
    Variant("points", "ascending", _at(_sorted_by_size), True),
    Variant("points", "large", _at(lambda x: LARGE * x), True),
    Variant("points", "tiny", _at(lambda x: TINY * x), True),
    Variant("points", "repeated indices", _with_repeated_indices, True),
    Variant("points", "one row", _first_rows(1), True),
    Variant("points", "no rows", _first_rows(0), True),
)
