"""Variants of the point: points where gradients may be wrong although they are right at random points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgrad.variants.case import SPREADS, Case, NotApplicableError, Subject, Variant, as_given, is_finite

LARGE, TINY = 1e3, 1e-3
"""Factors by which the given values are multiplied."""

MANY = 1025
"""Rows or columns, one more than the most threads of a CUDA block (1024: CUDA C++ programming guide, compute
capabilities)."""

MAX_ELEMENTS = 1 << 17
"""Largest number of elements of all inputs, and of all results, with many rows or columns: a func that takes a
microsecond per element takes a tenth of a second."""


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


def _size(subject: Subject, dim: int, other: int) -> tuple[set[int], int]:
    """The inputs that have dimensions, and the size of their first or last one, if it is the same for all of them."""
    sizes = {i: value.shape[dim] for i, value in enumerate(subject.given) if value.ndim}
    if len(set(sizes.values())) != 1 or other in sizes.values():
        which = "last" if dim else "first"
        raise NotApplicableError(
            f"the inputs have no dimensions, or their {which} dimensions differ in size or have this size already"
        )
    return set(sizes), next(iter(sizes.values()))


def _few(dim: int, count: int) -> Callable[[Subject], Case]:
    """Only the first rows (dim 0) or columns (dim -1)."""

    def make(subject: Subject) -> Case:
        chosen, size = _size(subject, dim, count)
        if count > size:
            raise NotApplicableError("the inputs are empty")
        return Case(subject.func, subject.with_changed(lambda x: x.narrow(dim, 0, count).clone(), chosen))

    return make


def _many(dim: int) -> Callable[[Subject], Case]:
    """Repeated rows (dim 0) or columns (dim -1), in checked inputs with values next to the given ones."""

    def make(subject: Subject) -> Case:
        chosen, size = _size(subject, dim, MANY)
        if not size or sum(subject.given[i].numel() for i in chosen) // size * MANY > MAX_ELEMENTS:
            raise NotApplicableError("the inputs are empty or would be too large")
        positions = torch.arange(MANY) % size
        repeated = subject.with_changed(lambda x: x.index_select(dim, positions.to(x.device)), chosen)
        checked = chosen & set(subject.checked)
        for spread in SPREADS:
            generator = torch.Generator().manual_seed(subject.seed)
            inputs = tuple(_varied(x, spread, generator) if i in checked else x for i, x in enumerate(repeated))
            if is_finite(subject.func, inputs, MAX_ELEMENTS):
                return Case(subject.func, inputs, {"fast_mode": True})
        raise NotApplicableError("func raises or is not finite for these inputs, or its results are too large")

    return make


def _varied(x: Tensor, spread: float, generator: torch.Generator) -> Tensor:
    """A leaf with values next to those of x: each is larger (or smaller) by a random share of at most |spread|."""
    factors = 1 + spread * torch.rand(x.shape, generator=generator, dtype=torch.float64)
    return (x.detach() * factors.to(x.device, x.dtype.to_real())).requires_grad_()


def _same_twice(subject: Subject) -> Case:
    """One tensor in place of all inputs like it: a positive one, if one of them is positive everywhere."""
    kind = _kind(subject.inputs[subject.checked[0]])
    like = [i for i in subject.checked if _kind(subject.inputs[i]) == kind]
    if len(like) < 2:
        raise NotApplicableError("no two inputs that require grad have the same shape and dtype")
    chosen = next((i for i in like if _is_positive(subject.inputs[i].detach())), like[0])

    def func(*arguments: Any) -> Any:
        return subject.func(*(arguments[chosen] if i in like else value for i, value in enumerate(arguments)))

    # The derivative along equal inputs may exist although func has no derivative at this point.
    whole = subject.with_changed(lambda _: subject.inputs[chosen].detach().clone(), set(like))
    return Case(func, subject.inputs, tested_for_kinks=(subject.func, whole))


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.layout, tensor.device


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
    Variant("points", "the same tensor twice", _same_twice, True),
    Variant("points", "one row", _few(0, 1), True),
    Variant("points", "no rows", _few(0, 0), True),
    Variant("points", "many rows", _many(0)),
    Variant("points", "one column", _few(-1, 1), True),
    Variant("points", "no columns", _few(-1, 0), True),
    Variant("points", "many columns", _many(-1)),
)
