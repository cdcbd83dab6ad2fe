"""The numerical counterparts of the functional API, by refined differences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fastgrad.core import native
from fastgrad.functional import containers
from fastgrad.functional.compressed import Entries
from fastgrad.functional.containers import Func, Sparse, Tensors
from fastgrad.functional.finite_differences import (
    Differences,
    derivative_along,
    jacobian_by_differences,
    second_derivatives,
)
from fastgrad.problem.coordinates import Block


def numerical_jacobian(
    func: Func, inputs: Tensors, is_tuple: bool, sparse: Sparse, forward: bool, return_error: bool
) -> Any:
    """`functional.jacobian` by differences; forward: whether dtypes and complex entries are those of forward mode."""
    seen = _Seen(func, inputs, "jacobian")
    found = jacobian_by_differences(seen, inputs, return_error)
    dtypes = [[output.dtype if forward else value.dtype for value in inputs] for output in seen.outputs]
    entries, errors = _of_elements(found, inputs, seen.outputs, forward)
    is_sparse = sparse is True or (found.is_compressed and containers.is_sparse_enough(entries, sparse))
    of_values = containers.of_entries(entries, seen.outputs, inputs, dtypes, is_sparse)
    result = containers.nested(of_values, seen.is_tuple, is_tuple)
    if not return_error:
        return result
    real = [[dtype.to_real() if dtype.is_complex else dtype for dtype in row] for row in dtypes]
    of_errors = containers.of_entries(errors, seen.outputs, inputs, real, is_sparse, found.error_elsewhere)
    return result, containers.nested(of_errors, seen.is_tuple, is_tuple)


def numerical_hessian(func: Func, inputs: Tensors, is_tuple: bool, sparse: Sparse, return_error: bool) -> Any:
    """`functional.hessian` by second differences."""
    _, blocks, values, errors = _second_derivatives("hessian", func, inputs, None)

    def part(matrix: Tensor, left: Block, right: Block) -> Tensor:
        own = matrix[left.slice, right.slice].reshape((*left.tensor.shape, *right.tensor.shape)).to(right.tensor.dtype)
        return own.to_sparse() if sparse is True else own

    def parts(matrix: Tensor) -> Any:
        rows = [[part(matrix, left, right) for right in blocks] for left in blocks]
        return containers.nested(rows, is_tuple, is_tuple)

    return (parts(values), parts(errors)) if return_error else parts(values)


def numerical_vjp(func: Func, inputs: Tensors, is_tuple: bool, v: Any, return_error: bool) -> tuple[Any, ...]:
    """`functional.vjp` from the Jacobian by differences, with its errors."""
    seen = _Seen(func, inputs, "vjp")
    found = jacobian_by_differences(seen, inputs, return_error)
    cotangents = containers.vector(v, seen.outputs, seen.is_tuple, "vjp")
    m, n = (sum(block.size for block in blocks) for blocks in (found.outputs, found.inputs))
    all_weights = torch.zeros(m, dtype=torch.float64, device=found.values.device)
    for block in found.outputs:
        cotangent = cotangents[block.position].to(seen.outputs[block.position].dtype)
        native.flatten_(all_weights[block.slice], cotangent)
    weights = all_weights[found.rows]

    def total(entries: Tensor) -> Tensor:
        return torch.zeros(n, dtype=torch.float64, device=entries.device).index_add_(0, found.columns, entries)

    # If a weight is zero, an infinite error does not count.
    errors = total(torch.where(weights == 0, 0.0, weights.abs() * found.errors))
    errors += found.error_elsewhere * float(all_weights[all_weights.isfinite()].abs().sum())
    output, values = containers.form(seen.outputs, seen.is_tuple), total(weights * found.values)
    return _product(output, found.inputs, inputs, is_tuple, values, errors)


def numerical_jvp(func: Func, inputs: Tensors, tangents: Tensors) -> tuple[Any, ...]:
    """`functional.jvp` by differences along v, with its errors."""
    seen = _Seen(func, inputs, "jvp")
    primals = tuple(value.detach() for value in inputs)
    seen(*(value.clone().requires_grad_() for value in primals))
    blocks, values, errors = derivative_along(seen, primals, tangents)
    output = containers.form(seen.outputs, seen.is_tuple)
    return _product(output, blocks, seen.outputs, seen.is_tuple, values, errors)


def numerical_hessian_product(
    name: str, func: Func, inputs: Tensors, is_tuple: bool, tangents: Tensors
) -> tuple[Any, ...]:
    """`functional.vhp` and `functional.hvp`, which are equal for differences, with their errors."""
    _check_real(inputs, name)
    flat = torch.cat([tangent.detach().reshape(-1).to(torch.float64) for tangent in tangents])
    output, blocks, values, errors = _second_derivatives(name, func, inputs, flat)
    return _product(output, blocks, inputs, is_tuple, values, errors)


class _Seen:
    """Wraps func so that it returns a tuple; keeps the first result, and whether func itself returned a tuple."""

    def __init__(self, func: Func, inputs: Tensors, name: str) -> None:
        _check_strided(inputs, name)
        self.outputs: Tensors = ()
        self.is_tuple = False
        self._func = func
        self._name = name

    def __call__(self, *arguments: Tensor) -> Tensors:
        is_tuple, outputs = containers.as_tensors(self._func(*arguments), containers.OUTPUTS, self._name)
        if not self.outputs:
            self.is_tuple, self.outputs = is_tuple, tuple(output.detach().clone() for output in outputs)
        return outputs


def _product(
    output: Any, blocks: Sequence[Block], like: Tensors, is_tuple: bool, values: Tensor, errors: Tensor
) -> tuple[Any, ...]:
    """Func's output, the product and its errors, of the form of `like`."""

    def unflattened(coordinates: Tensor) -> Tensors:
        """Tensors like `like` from real coordinates; zeros for a tensor without coordinates."""
        tensors = [
            torch.zeros_like(other, requires_grad=False, memory_format=torch.contiguous_format) for other in like
        ]
        for block in blocks:
            native.ops.unflatten_(tensors[block.position], coordinates[block.slice])
        return tuple(tensors)

    of_errors = [error.abs() for error in unflattened(errors)]
    return output, containers.form(unflattened(values), is_tuple), containers.form(of_errors, is_tuple)


def _check_strided(inputs: Tensors, name: str) -> None:
    for i, value in enumerate(inputs):
        if value.layout is not torch.strided:
            raise ValueError(f"{name} with numerical=True needs strided inputs; input {i} has layout {value.layout}.")


def _check_real(tensors: Tensors, name: str) -> None:
    if any(tensor.is_complex() for tensor in tensors):
        raise NotImplementedError(
            f"{name} with numerical=True needs real inputs and a real output: pass torch.view_as_real(x), and let func "
            "begin with torch.view_as_complex."
        )


def _second_derivatives(
    name: str, func: Func, inputs: Tensors, v: Tensor | None
) -> tuple[Tensor, tuple[Block, ...], Tensor, Tensor]:
    """The value of func, followed by the results of `second_derivatives`."""
    _check_strided(inputs, name)
    seen: list[Tensor] = []

    def single(*arguments: Tensor) -> Tensors:
        output = containers.scalar(func(*arguments), name)
        if not seen:
            seen.append(output.detach().clone())
            _check_real((output, *inputs), name)
        return (output.reshape(1),)

    found = second_derivatives(single, inputs, v)
    return seen[0], *found


def _of_elements(found: Differences, inputs: Tensors, outputs: Tensors, forward: bool) -> tuple[Entries, Entries]:
    """The Jacobian over elements, and its errors, from the Jacobian over real coordinates.

    An entry is the gradient for a grad_output of 1. So for a complex output, only the row of the real part is used. For
    a complex input, two columns give the real and the imaginary part of the entry. In forward mode, outputs and inputs
    are interchanged.
    """
    row_of, row_part, m = _elements(found.outputs, outputs)
    column_of, column_part, n = _elements(found.inputs, inputs)
    parts = row_part[found.rows], column_part[found.columns]
    seeded, seen = reversed(parts) if forward else parts
    chosen = seeded == 0
    places = (row_of[found.rows] * max(1, n) + column_of[found.columns])[chosen]
    keys, where = torch.unique(places, return_inverse=True)
    values, imaginary = found.values[chosen], seen[chosen] == 1
    if bool(imaginary.any()):
        values = torch.complex(torch.where(imaginary, 0.0, values), torch.where(imaginary, values, 0.0))
    sums = torch.zeros(keys.numel(), dtype=values.dtype, device=values.device).index_add_(0, where, values)
    squares = torch.zeros_like(keys, dtype=torch.float64).index_add_(0, where, found.errors[chosen].square())
    rows, columns = keys // max(1, n), keys % max(1, n)
    return Entries(rows, columns, sums, m, n), Entries(rows, columns, squares.sqrt(), m, n)


def _elements(blocks: Sequence[Block], tensors: Tensors) -> tuple[Tensor, Tensor, int]:
    """The element of each coordinate; its part (0: real, 1: imaginary); and the number of elements of all tensors."""
    firsts = list(accumulate((tensor.numel() for tensor in tensors), initial=0))
    device = tensors[0].device if tensors else None
    coordinates = [torch.arange(block.size, device=device) for block in blocks]
    none = torch.zeros(0, dtype=torch.int64, device=device)
    elements = [own // block.width + firsts[block.position] for own, block in zip(coordinates, blocks, strict=True)]
    parts = [own % block.width for own, block in zip(coordinates, blocks, strict=True)]
    return torch.cat([none, *elements]), torch.cat([none, *parts]), firsts[-1]
