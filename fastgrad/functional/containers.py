"""Converts arguments and results to the forms of torch.autograd.functional: tuples or not, strided or sparse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from fastgrad.core.tensors import element_index
from fastgrad.functional.compressed import Entries
from fastgrad.problem.validation import is_differentiable

Func = Callable[..., Any]
Tensors = tuple[Tensor, ...]
Sparse = bool | Literal["auto"]
Parts = list[list[Tensor]]
"""Parts of a Jacobian: one list per output, with one part per input."""

OUTPUTS = "outputs of the user-provided function"

SPARSE_SHARE = 0.25
"""sparse="auto" gives sparse tensors if at most this share of the entries can differ from zero."""


def as_tensors(value: Any, what: str, name: str) -> tuple[bool, Tensors]:
    """Whether a value is a tuple, and its Tensors as a tuple; raises if it holds anything else."""
    is_tuple = isinstance(value, tuple)
    for i, each in enumerate(value if is_tuple else (value,)):
        if not isinstance(each, Tensor):
            where = f"the value at index {i}" if is_tuple else f"the given {what}"
            raise TypeError(
                f"The {what} given to {name} must be either a Tensor or a tuple of Tensors, but {where} has type "
                f"{type(each)}."
            )
    return is_tuple, value if is_tuple else (value,)


def as_inputs(value: Any, name: str) -> tuple[bool, Tensors]:
    """Like `as_tensors`, for inputs, which must be at least one, and floating point or complex."""
    is_tuple, inputs = as_tensors(value, "inputs", name)
    if not inputs:
        raise ValueError(f"The inputs given to {name} must hold at least one Tensor, got an empty tuple.")
    for i, one in enumerate(inputs):
        if not is_differentiable(one):
            where = f"the value at index {i}" if is_tuple else "the given input"
            raise RuntimeError(
                f"The inputs given to {name} must be floating point or complex, but {where} has dtype {one.dtype}."
            )
    return is_tuple, inputs


def vector(v: Any, like: Tensors, is_tuple: bool, name: str) -> Tensors:
    """The vector as a tuple of tensors of the sizes of `like`; None stands for 1 if `like` has a single element."""
    if v is None:
        if len(like) != 1 or like[0].numel() != 1:
            of = "user-provided function returns" if name == "vjp" else "input to the user-provided function is"
            raise RuntimeError(f"The vector v can only be None if the {of} a single Tensor with a single element.")
        return tuple(torch.ones_like(other, requires_grad=False) for other in like)
    _, given = as_tensors(v, "v", name)
    if len(given) != len(like):
        if not is_tuple:
            raise RuntimeError(f"The given v should contain a single Tensor, but is a tuple of {len(given)} Tensors.")
        raise RuntimeError(f"v is a tuple of invalid length: should be {len(like)} but got {len(given)}.")
    for i, (each, other) in enumerate(zip(given, like, strict=True)):
        if each.shape != other.shape:
            which = f"Entry {i} in v" if is_tuple else "v"
            raise RuntimeError(f"{which} has invalid size: should be {other.shape} but got {each.shape}.")
    return tuple(each.detach() for each in given)


def scalar(result: Any, name: str, strict: bool = False) -> Tensor:
    """The single tensor that func returned; raises if there are several, or if it has several elements."""
    is_tuple, outputs = as_tensors(result, OUTPUTS, name)
    check_tracked(outputs, strict)
    if is_tuple:
        raise RuntimeError(f"The function given to {name} should return a single Tensor, but it returned a tuple.")
    if outputs[0].numel() != 1:
        raise RuntimeError(
            f"The Tensor returned by the function given to {name} should contain a single element, but its shape is "
            f"{tuple(outputs[0].shape)}."
        )
    return outputs[0]


def check_tracked(outputs: Tensors, strict: bool) -> None:
    """In strict mode, raises unless all outputs require grad."""
    for i, output in enumerate(outputs):
        if strict and not output.requires_grad:
            raise RuntimeError(
                f"Output {i} of the user-provided function does not require gradients. In strict mode, outputs must be "
                "computed in a differentiable manner from the inputs."
            )


def form(tensors: Sequence[Tensor], is_tuple: bool) -> Any:
    """The tensors, detached, as a tuple; if not is_tuple, only the first."""
    found = tuple(tensor.detach() for tensor in tensors)
    return found if is_tuple else found[0]


def nested(parts: Parts, outputs_are_tuple: bool, inputs_are_tuple: bool) -> Any:
    """The parts of a Jacobian as nested tuples, without levels for single tensors."""
    rows = [tuple(row) if inputs_are_tuple else row[0] for row in parts]
    return tuple(rows) if outputs_are_tuple else rows[0]


def zeros(output: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """A part of a Jacobian that is zero: shape (*output.shape, *value.shape)."""
    return torch.zeros((*output.shape, *value.shape), dtype=dtype, device=value.device)


def sparse_part(rows: Tensor, columns: Tensor, values: Tensor, output: torch.Size, value: torch.Size) -> Tensor:
    """A COO tensor of shape (*output, *value) from a matrix of elements; its entries are sorted by row, then column."""
    indices = [*element_index(rows, output), *element_index(columns, value)]
    where = torch.stack(indices) if indices else rows.new_empty(0, values.numel())
    return torch.sparse_coo_tensor(
        where, values, (*output, *value), device=values.device, is_coalesced=True, check_invariants=False
    )


def is_sparse_enough(found: Entries, sparse: Sparse) -> bool:
    """Whether a matrix whose structure was found is returned sparse."""
    return sparse is True or (sparse == "auto" and found.values.numel() <= SPARSE_SHARE * found.m * found.n)


def of_entries(
    found: Entries,
    outputs: Tensors,
    inputs: Tensors,
    dtypes: list[list[torch.dtype]],
    sparse: bool,
    elsewhere: float = 0.0,
) -> Parts:
    """The parts of a sparse matrix of elements, in the requested layout; elsewhere: other elements of dense parts."""
    parts: Parts = []
    row_starts = accumulate((output.numel() for output in outputs), initial=0)
    column_starts = list(accumulate((value.numel() for value in inputs), initial=0))
    for output, row_start, of_output in zip(outputs, row_starts, dtypes, strict=False):
        parts.append([])
        for value, column_start, dtype in zip(inputs, column_starts, of_output, strict=False):
            rows, columns, values = found.rows, found.columns, found.values
            if len(outputs) > 1 or len(inputs) > 1:
                rows, columns = rows - row_start, columns - column_start
                own = (rows >= 0) & (rows < output.numel()) & (columns >= 0) & (columns < value.numel())
                rows, columns, values = rows[own], columns[own], values[own]
            values = values.real.to(dtype) if values.is_complex() and not dtype.is_complex else values.to(dtype)
            if sparse:
                part = sparse_part(rows, columns, values, output.shape, value.shape)
            else:
                part = zeros(output, value, dtype).fill_(elsewhere)
                part.view(-1)[rows * value.numel() + columns] = values
            parts[-1].append(part)
    return parts
