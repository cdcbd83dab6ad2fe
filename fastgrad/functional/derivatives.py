"""Jacobians and Hessians: the signatures of torch.autograd.functional, with fewer calls if they are sparse.

In reverse mode, func is called once, and products are VJPs on its graph. If rows or columns can share products, a
Jacobian or Hessian takes one product per group, for sparse and for strided results. Otherwise, it takes one product
per row, in a native loop. With numerical=True, derivatives are computed from values of func, and have an error
estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fastgrad.core import native, torch_private
from fastgrad.engines.plan import BLOCK_BYTES
from fastgrad.functional import containers
from fastgrad.functional.compressed import entries_by_structure
from fastgrad.functional.containers import Func, Parts, Sparse, Tensors
from fastgrad.functional.linear_map import LinearMap, backward_map, backward_of_backward_map, tangents_along
from fastgrad.functional.numerical import numerical_hessian, numerical_jacobian
from fastgrad.functional.products import check_product_options
from fastgrad.problem.arguments import check_callable
from fastgrad.problem.caller_state import restores_caller_state
from fastgrad.problem.validation import as_bool, is_differentiable

Name = Literal["jacobian", "hessian"]
Strategy = Literal["reverse-mode", "forward-mode"]

BATCH_BYTES = 1 << 26
"""Bytes of seeds and products that vectorize=True holds at a time."""


@dataclass(frozen=True)
class _Options:
    """The keywords for the computation and the form of a Jacobian or Hessian; name: of the function."""

    name: Name
    create_graph: bool
    strict: bool
    vectorize: bool
    sparse: Sparse
    forward: bool


def _options(name: Name, create_graph: Any, strict: Any, vectorize: Any, sparse: Sparse, strategy: str) -> _Options:
    flags = {"create_graph": create_graph, "strict": strict, "vectorize": vectorize}
    checked = {keyword: as_bool(keyword, value) for keyword, value in flags.items()}
    if strategy not in ("forward-mode", "reverse-mode"):
        raise AssertionError(f'Expected strategy to be either "forward-mode" or "reverse-mode", got {strategy!r}.')
    return _Options(name, **checked, sparse=sparse, forward=strategy == "forward-mode")


@restores_caller_state
def jacobian(
    func: Func,
    inputs: Any,
    create_graph: bool = False,
    strict: bool = False,
    vectorize: bool = False,
    strategy: Strategy = "reverse-mode",
    *,
    sparse: Sparse = False,
    numerical: bool = False,
    return_error: bool = False,
) -> Any:
    """The Jacobian of func at inputs, as torch.autograd.functional.jacobian gives it.

    Parameters
    ----------
    func
        Takes the inputs, returns a Tensor or a tuple of Tensors.
    inputs
        A Tensor or a tuple of Tensors, floating or complex.
    create_graph
        Make the result differentiable. It is then computed row by row, because an entry that is zero at the inputs
        may have a nonzero derivative.
    strict
        Raise if an output does not depend on an input, instead of returning zeros.
    vectorize
        If no structure helps, compute many rows at once by vmap. Needed for complex outputs, whose
        rows are the gradients of their real parts, and for forward mode.
    strategy
        "reverse-mode" or "forward-mode". Forward mode takes one evaluation of func per group of columns.
    sparse
        False: strided tensors. True: sparse COO tensors. "auto": sparse COO tensors if a structure was found and at
        most a quarter of the entries can differ from zero, otherwise strided tensors. Specified entries of a sparse
        result may also be zero.
    numerical
        Differentiate by refined central differences of func instead, about 40 evaluations per group of
        columns; func needs no gradient.
    return_error
        With numerical=True: also return an estimate of the error of each entry. For a sparsity pattern, this takes
        90 to 450 evaluations more.

    Returns
    -------
    Tensor or nested tuple of Tensor
        Shape ``(*output.shape, *input.shape)``; dtype of the input, or in forward mode of the output. If func
        returns a tuple, or if inputs is a tuple, the result is a tuple of such tensors. If both are tuples, it is
        result[i][j] for output i and input j. With return_error, a pair (result, error) of the same form is
        returned. Errors are real, and infinite if no two steps agree. If a sparsity pattern was found, entries
        outside it are zero. Their error in dense results is the size from which a nonzero entry would probably have
        been detected.

    Raises
    ------
    TypeError
        Inputs or outputs that are neither Tensors nor tuples of Tensors.
    RuntimeError
        strict=True and an output that does not depend on an input; strict=True with vectorize or forward
        mode; complex outputs without vectorize.
    AssertionError
        An unknown strategy.
    NotImplementedError
        Forward mode with create_graph, or without vectorize.
    ValueError
        Keywords that cannot be combined: numerical=True with create_graph or strict, sparse=True with
        create_graph, return_error without numerical.

    Notes
    -----
    For about 30 rows or more, the pattern is guessed or probed by VJPs on the graph of a single evaluation. VJPs with
    random vectors certify that no entry lies outside the pattern. Sources: Curtis, Powell & Reid (1974); Griewank &
    Mitev (2002).

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> fastgrad.functional.jacobian(torch.square, x).tolist()
    [[2.0, 0.0], [0.0, 4.0]]
    """
    check_callable(func)
    is_tuple, given = containers.as_inputs(inputs, "jacobian")
    options = _options("jacobian", create_graph, strict, vectorize, sparse, strategy)
    _check_options(options, numerical, return_error)
    if numerical:
        return numerical_jacobian(func, given, is_tuple, sparse, options.forward, return_error)
    outputs_are_tuple, parts = _matrix(func, given, options)
    return containers.nested(parts, outputs_are_tuple, is_tuple)


@restores_caller_state
def hessian(
    func: Func,
    inputs: Any,
    create_graph: bool = False,
    strict: bool = False,
    vectorize: bool = False,
    outer_jacobian_strategy: Strategy = "reverse-mode",
    *,
    sparse: Sparse = False,
    numerical: bool = False,
    return_error: bool = False,
) -> Any:
    """The Hessian of func at inputs, as torch.autograd.functional.hessian gives it.

    Rows with the same color of a star coloring share a VJP of the gradient. Symmetry separates their entries. If the
    second derivatives are not symmetric, this is detected, and the Hessian is computed without symmetry.

    Parameters
    ----------
    func
        Takes the inputs, returns a Tensor with a single element.
    outer_jacobian_strategy
        How the gradient is differentiated, as `strategy` of `jacobian`.
    inputs, create_graph, strict, vectorize, sparse, numerical, return_error
        As for `jacobian`. With numerical, second differences of func are used. For n elements, which must be real,
        they take 22 n (n + 1) / 2 evaluations.

    Returns
    -------
    Tensor or tuple of tuple of Tensor
        Shape ``(*input.shape, *input.shape)``; for a tuple of inputs, result[i][j] for inputs i and j, of the
        dtype of j. With return_error, (result, error).

    Raises
    ------
    TypeError, RuntimeError, AssertionError, NotImplementedError, ValueError
        As in `jacobian`. RuntimeError also if func does not return a single Tensor with a single element.

    Notes
    -----
    Source: Gebremedhin, Tarafdar, Manne & Pothen, New acyclic and star coloring algorithms (2007).

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> fastgrad.functional.hessian(lambda x: (x**2).sum(), x).tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    check_callable(func)
    is_tuple, given = containers.as_inputs(inputs, "hessian")
    options = _options("hessian", create_graph, strict, vectorize, sparse, outer_jacobian_strategy)
    _check_options(options, numerical, return_error)
    if numerical:
        return numerical_hessian(func, given, is_tuple, sparse, return_error)

    def gradient_at(*arguments: Tensor) -> Tensors:
        with torch.enable_grad():
            # Within a transform of torch.func, `requires_grad_` raises.
            tracked = tuple(value if value.requires_grad else value.requires_grad_() for value in arguments)
            output = containers.scalar(func(*tracked), "hessian", strict)
            gradients: Sequence[Tensor | None] = [None] * len(tracked)
            if output.requires_grad:
                gradients = torch.autograd.grad(output, tracked, create_graph=True, allow_unused=True)
            filled = _zeros_for_none(gradients, tracked)
            for i, gradient in enumerate(filled):
                if strict and not gradient.requires_grad:
                    raise RuntimeError(
                        "While computing the hessian, found that the jacobian of the user-provided function with "
                        f"respect to input {i} is independent of the input. This is not allowed in strict mode. "
                        "It happens if the function is linear."
                    )
            return filled

    _, parts = _matrix(gradient_at, given, options)
    return containers.nested(parts, is_tuple, is_tuple)


def _primals(inputs: Tensors, create_graph: bool) -> Tensors:
    """New tensors that require grad, so that func's own use of the caller's tensors is not differentiated."""
    return tuple(
        (value.clone() if value.is_sparse else value.view_as(value))
        if create_graph and value.requires_grad
        else value.detach().requires_grad_()
        for value in inputs
    )


def _zeros_for_none(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensors:
    """The gradients as strided tensors; None means zeros."""
    pairs = zip(gradients, like, strict=True)
    return tuple((torch.zeros_like(other) if each is None else each).to_dense() for each, other in pairs)


def _check_options(options: _Options, numerical: bool, return_error: bool) -> None:
    """Raises if keywords cannot be combined."""
    if options.sparse not in (True, False, "auto"):
        raise ValueError(f"sparse must be True, False or 'auto', got {options.sparse!r}.")
    if options.sparse is True and options.create_graph:
        raise ValueError(
            "sparse=True and create_graph=True cannot be combined: entries that are zero are not stored, but "
            "their derivatives may not be zero."
        )
    check_product_options(options.create_graph, options.strict, numerical, return_error)
    function = f"fastgrad.functional.{options.name}"
    if options.forward and not numerical:
        for keyword, error in (("create_graph", NotImplementedError), ("strict", RuntimeError)):
            if getattr(options, keyword):
                raise error(
                    f"{function}: `{keyword}=True` and forward mode are not supported together: set "
                    f'`{keyword}=False`, or choose "reverse-mode".'
                )
        if not options.vectorize:
            raise NotImplementedError(
                f'{function}: forward mode is only implemented for `vectorize=True`: set it, or choose "reverse-mode".'
            )
        if torch_private.transforms_are_active():
            raise NotImplementedError(
                f'{function}: forward mode is not supported within a transform of torch.func: choose "reverse-mode".'
            )
    if options.strict and options.vectorize:
        raise RuntimeError(
            f"{function}: `strict=True` and `vectorize=True` are not supported together: set one of them to False."
        )


def _matrix(func: Func, given: Tensors, options: _Options) -> tuple[bool, Parts]:
    """Whether func returns a tuple, and the parts of its Jacobian."""
    if options.forward:
        return _forward(func, given, options)
    with torch.enable_grad():
        primals = _primals(given, options.create_graph)
        outputs_are_tuple, outputs = containers.as_tensors(func(*primals), containers.OUTPUTS, options.name)
        containers.check_tracked(outputs, options.strict)
        # Integers have no gradient: they are replaced by a floating tensor without a graph.
        outputs = tuple(each if is_differentiable(each) else each.to(torch.float32) for each in outputs)
        return outputs_are_tuple, _reverse(outputs, primals, options)


def _reverse(outputs: Tensors, inputs: Tensors, options: _Options) -> Parts:
    """The Jacobian of recorded outputs: from groups of rows or columns if it is sparse, otherwise row by row."""
    if not options.vectorize:
        for output in outputs:
            if output.is_complex() and output.requires_grad and output.numel():
                raise RuntimeError(
                    f"grad can be implicitly created only for real scalar outputs but got {output.dtype}: "
                    "vectorize=True takes the real parts of complex outputs."
                )
    if options.strict:
        _check_dependence(outputs, inputs)
    tensors = (*outputs, *inputs)
    if options.create_graph or not all(_is_plain(tensor, inputs[0].device) for tensor in tensors):
        return _joined(_rows_by_torch(outputs, inputs, options), outputs, inputs, options)
    is_real = not any(tensor.is_complex() for tensor in tensors)
    columns = (lambda: backward_of_backward_map(outputs, inputs)) if is_real else (lambda: None)
    found = entries_by_structure(backward_map(outputs, inputs), columns, options.name == "hessian" and is_real)
    if found is not None:
        dtypes = [[value.dtype for value in inputs] for _ in outputs]
        return containers.of_entries(found, outputs, inputs, dtypes, containers.is_sparse_enough(found, options.sparse))
    blocks = _rows_by_torch(outputs, inputs, options) if options.vectorize else _rows(outputs, inputs)
    if options.sparse is True:
        return _joined(blocks, outputs, inputs, options)
    parts = [[containers.zeros(output, value, value.dtype) for value in inputs] for output in outputs]
    for o, first, rows in blocks:
        for part, row in zip(parts[o], rows, strict=True):
            part.view(outputs[o].numel(), -1)[first : first + len(row)] = row
    return parts


def _is_plain(tensor: Tensor, device: torch.device) -> bool:
    """Whether native loops can read the tensor's values: it is plain, strided, and on the given device."""
    return (
        tensor.layout is torch.strided
        and tensor.device == device
        and not tensor.is_meta
        and type(tensor) in (Tensor, torch.nn.Parameter)
    )


def _check_dependence(outputs: Tensors, inputs: Tensors) -> None:
    """Strict mode: raises unless every output has a gradient with respect to every input."""
    for i, output in enumerate(outputs):
        if output.numel():
            cotangents = (torch.ones_like(output),)
            gradients = torch.autograd.grad((output,), inputs, cotangents, retain_graph=True, allow_unused=True)
            for j, gradient in enumerate(gradients):
                if gradient is None:
                    raise RuntimeError(
                        f"Output {i} of the user-provided function is independent of input {j}. This is not allowed in "
                        "strict mode."
                    )


Rows = Iterator[tuple[int, int, list[Tensor]]]
"""Blocks of rows of a Jacobian: the index of the output, the element of the first row, and for each input a tensor of
shape (rows, elements)."""


def _rows(outputs: Tensors, inputs: Tensors) -> Rows:
    """Yields rows from a native loop, with one VJP per row; the rows of a block fit in a cache."""
    natives = [native.InputBlock(value, 0, 0.0) for value in inputs]
    sizes = [value.numel() * (2 if value.is_complex() else 1) for value in inputs]
    size = sum(sizes)
    step = max(1, BLOCK_BYTES // (8 * max(1, size)))
    graph = native.Graph(outputs, inputs)
    for o, output in enumerate(outputs):
        if not output.requires_grad:
            continue
        for first in range(0, output.numel(), step):
            count = min(step, output.numel() - first)
            rows = torch.empty(count, size, dtype=torch.float64, device=output.device)
            match = native.vjp_rows(graph, o, natives, first, False, rows, rows[:0], 1.0)
            if not match.sizes:
                raise RuntimeError(
                    f"The backward of output {o} returned a gradient whose size is not that of the input."
                )
            parts = zip(inputs, rows.split_with_sizes(sizes, 1), strict=True)
            yield o, first, [torch.complex(x[:, ::2], x[:, 1::2]) if value.is_complex() else x for value, x in parts]


def _rows_by_torch(outputs: Tensors, inputs: Tensors, options: _Options) -> Rows:
    """Yields rows for tensors of any kind; records them with create_graph; computes many at once with vectorize."""
    size = sum(value.numel() for value in inputs)
    # Within a transform of torch.func, batched gradients are wrong: torch's vmap of VJPs knows no other transforms.
    is_batched = options.vectorize and not torch_private.transforms_are_active()
    for o, output in enumerate(outputs):
        if not output.requires_grad:
            continue
        step = max(1, BATCH_BYTES // (16 * max(1, output.numel() + size))) if is_batched else 1
        for first in range(0, output.numel(), step):
            count = min(step, output.numel() - first)
            seeds = torch.zeros(count, output.numel(), dtype=output.dtype, device=output.device)
            seeds.diagonal(first).fill_(1)
            seeds = seeds.reshape((count, *output.shape) if is_batched else output.shape)
            found = torch.autograd.grad(
                output,
                inputs,
                seeds,
                retain_graph=True,
                create_graph=options.create_graph,
                allow_unused=True,
                is_grads_batched=is_batched,
            )
            for i, row in enumerate(found):
                if options.strict and options.create_graph and not row.requires_grad:
                    raise RuntimeError(
                        f"The jacobian of the user-provided function is independent of input {i}. This is not allowed "
                        "in strict mode when create_graph=True."
                    )
            shapes = [(count, value.numel()) for value in inputs]
            rows = [
                torch.zeros(shape, dtype=value.dtype, device=value.device)
                if row is None
                else row.to_dense().reshape(shape)
                for row, value, shape in zip(found, inputs, shapes, strict=True)
            ]
            yield o, first, rows


def _joined(blocks: Rows, outputs: Tensors, inputs: Tensors, options: _Options) -> Parts:
    """The parts of a Jacobian, concatenated from blocks of rows; differentiable with create_graph.

    In a sparse result, zeros are dropped from each block as it is computed.
    """
    layout = torch.sparse_coo if options.sparse is True else torch.strided

    def part(output: Tensor, value: Tensor, rows: list[Tensor]) -> Tensor:
        size = output.numel(), value.numel()
        whole = torch.cat(rows or [torch.zeros(size, dtype=value.dtype, device=value.device, layout=layout)])
        if layout is torch.strided:
            return whole.reshape((*output.shape, *value.shape))
        whole = whole.coalesce()
        i, j = whole.indices()
        return containers.sparse_part(i, j, whole.values().to(value.dtype), output.shape, value.shape)

    found: list[list[list[Tensor]]] = [[[] for _ in inputs] for _ in outputs]
    for o, _, block in blocks:
        for of_input, rows in zip(found[o], block, strict=True):
            kept = rows if options.create_graph else rows.detach()
            of_input.append(kept if layout is torch.strided else kept.to_sparse())
    return [
        [part(output, value, rows) for value, rows in zip(inputs, of_output, strict=True)]
        for output, of_output in zip(outputs, found, strict=True)
    ]


def _forward(func: Func, given: Tensors, options: _Options) -> tuple[bool, Parts]:
    """The Jacobian by forward-mode AD: from groups of columns if sparse, otherwise many columns at once by vmap."""
    primals = tuple(value.detach() for value in given)
    outputs_are_tuple, found_outputs = containers.as_tensors(func(*primals), containers.OUTPUTS, options.name)
    outputs = tuple(output.detach() for output in found_outputs)

    def tuple_of(*arguments: Tensor) -> Tensors:
        return containers.as_tensors(func(*arguments), containers.OUTPUTS, options.name)[1]

    dtypes = [[output.dtype for _ in primals] for output in outputs]
    if all(_is_plain(tensor, primals[0].device) and is_differentiable(tensor) for tensor in (*outputs, *primals)):
        is_real = not any(tensor.is_complex() for tensor in (*outputs, *primals))
        along = LinearMap(partial(tangents_along, tuple_of, primals), primals, outputs)
        found = entries_by_structure(along, symmetric=options.name == "hessian" and is_real)
        if found is not None:
            sparse = containers.is_sparse_enough(found, options.sparse)
            return outputs_are_tuple, containers.of_entries(found.transposed(), outputs, primals, dtypes, sparse)
    parts = [[containers.zeros(output, value, output.dtype) for value in primals] for output in outputs]

    def tangents(*seeds: Tensor) -> Tensors:
        shaped = [seed.view_as(value) for seed, value in zip(seeds, primals, strict=True)]
        return _zeros_for_none(tangents_along(tuple_of, primals, shaped), outputs)

    size = sum(value.numel() for value in primals)
    step = max(1, BATCH_BYTES // (16 * max(1, size + sum(output.numel() for output in outputs))))
    for k, value in enumerate(primals):
        for first in range(0, value.numel(), step):
            count = min(step, value.numel() - first)
            seeds = [each.new_zeros(count, each.numel()) for each in primals]
            seeds[k].diagonal(first).fill_(1)
            for row, output, columns in zip(parts, outputs, torch_private.batched(tangents)(*seeds), strict=True):
                own = row[k].view(output.numel(), value.numel())[:, first : first + count]
                own.copy_(columns.detach().reshape(count, -1).t())
    if options.sparse is True:
        parts = [[part.to_sparse() for part in row] for row in parts]
    return outputs_are_tuple, parts
