"""Whole Jacobians, by differences or by autograd, dense or sparse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fastgrad.engines.blocks import row_parts
from fastgrad.problem.arguments import as_tuple
from fastgrad.problem.caller_state import restores_caller_state
from fastgrad.problem.coordinates import Block
from fastgrad.problem.first_look import first_look
from fastgrad.problem.problem import Problem
from fastgrad.problem.transforms import rejects_transforms
from fastgrad.problem.validation import as_float, as_seed
from fastgrad.report.settings import Settings

Jacobians = tuple[tuple[Tensor, ...], ...]

_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr)


@restores_caller_state
@rejects_transforms
def numerical_jacobian(
    func: Callable[..., Any],
    inputs: Any,
    *,
    eps: float = 1e-6,
    layout: torch.layout = torch.strided,
    seed: int = 0,
) -> Jacobians:
    """The Jacobians of func at inputs, from central differences that are divided by the steps actually taken.

    If the Jacobian is sparse, columns that share no row are perturbed together. Random directions certify that the
    entries outside the sparsity pattern are zero. Entries below the precision of differences may be lost there: about
    1e-5, or 1e-5 of the largest output.

    Parameters
    ----------
    func
        Function of the inputs; returns a Tensor or a tuple or list of Tensors.
    inputs
        A Tensor, or a tuple or list. Strided tensors that require grad are perturbed in place and then restored.
    eps
        The step to each side of x.
    layout
        torch.strided, torch.sparse_coo or torch.sparse_csr.
    seed
        Seed of the random directions.

    Returns
    -------
    tuple of tuple of Tensor
        One float64 tensor per pair of an output and an input that require grad. If no output requires grad, all
        floating and complex outputs count. Strided: shape ``(*output.shape, *input.shape)``; the shape of a complex
        tensor is followed by a dimension of size 2 (real and imaginary part). Sparse: two-dimensional, with one row per
        real coordinate of the output and one column per real coordinate of the input.

    Raises
    ------
    ValueError, RuntimeError, TypeError, AssertionError
        As in `gradcheck`.

    Notes
    -----
    Replaces torch.autograd.gradcheck.get_numerical_jacobian. Source: Curtis, Powell & Reid, On the
    estimation of sparse Jacobian matrices (1974).

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    >>> ((jacobian,),) = fastgrad.numerical_jacobian(torch.square, (x,))
    >>> torch.allclose(jacobian, torch.tensor([[2.0, 0.0], [0.0, 4.0]], dtype=torch.float64), atol=1e-6)
    True
    """
    _check_layout(layout)
    seed = as_seed(seed)
    settings = Settings(eps=as_float("eps", eps, zero=False), seed=seed)
    with Problem(func, as_tuple(inputs), who="numerical_jacobian") as problem:
        _check_strided(problem)
        look = first_look(problem, settings)
        if problem.n and problem.m:
            from fastgrad.checks.compressed import atol_outside, numerical_entries

            scaled = replace(settings, atol=atol_outside(look.base))
            found = numerical_entries(problem, scaled, look) if problem.has_graph else None
            if found is not None:
                return _sparse(problem, found[0].rows, found[0].columns, found[1], layout)
        return _dense(problem, problem.difference_columns(0, problem.n, settings.eps, look.record_graph).t(), layout)


@restores_caller_state
@rejects_transforms
def analytical_jacobian(
    func: Callable[..., Any],
    inputs: Any,
    mode: Literal["reverse", "forward"] = "reverse",
    *,
    layout: torch.layout = torch.strided,
    seed: int = 0,
) -> Jacobians:
    """The Jacobians of func at inputs, computed by autograd in reverse or forward mode.

    If the Jacobian is sparse, rows that share no column share one VJP in reverse mode. Random cotangents certify that
    the entries outside the sparsity pattern are zero. Entries below rounding may be lost there: about 1e-14, or 1e-14
    of the largest entry of the column.

    Parameters
    ----------
    func, inputs, layout, seed
        As in `numerical_jacobian`.
    mode
        "reverse": one VJP per row or group of rows; "forward": one JVP per column.

    Returns
    -------
    tuple of tuple of Tensor
        As in `numerical_jacobian`.

    Raises
    ------
    ValueError, RuntimeError, TypeError, AssertionError
        As in `numerical_jacobian`; and exceptions of backward or a jvp.

    Notes
    -----
    Replaces torch.autograd.gradcheck.get_analytical_jacobian. Gradients are recorded even if the caller disabled them.

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    >>> ((jacobian,),) = fastgrad.analytical_jacobian(torch.square, (x,))
    >>> jacobian.tolist()
    [[2.0, 0.0], [0.0, 4.0]]
    """
    _check_layout(layout)
    if mode not in ("reverse", "forward"):
        raise ValueError(f"mode must be 'reverse' or 'forward', got {mode!r}.")
    seed = as_seed(seed)
    settings = Settings(seed=seed)
    # Leaving inference mode also enables both modes of AD, if the caller disabled them.
    with (
        torch.inference_mode(False),
        Problem(func, as_tuple(inputs), warn_of_precision=False, who="analytical_jacobian") as problem,
    ):
        _check_strided(problem)
        if mode == "forward" and problem.has_graph:
            return _dense(problem, problem.tangent_columns(0, problem.n)[0].t(), layout)
        if problem.n and problem.m and problem.has_graph:
            from fastgrad.checks.compressed import analytical_entries, atol_outside

            look = first_look(problem, settings)
            found = analytical_entries(problem, replace(settings, atol=atol_outside(look.base)), look)
            if found is not None:
                return _sparse(problem, found[0].rows, found[0].columns, found[1], layout)
        return _dense(problem, analytical_matrix(problem), layout)


def analytical_matrix(problem: Problem) -> Tensor:
    """The Jacobian in reverse mode, one VJP per row: float64, shape (m, n)."""
    matrix = torch.zeros(problem.m, problem.n, dtype=torch.float64, device=problem.device)
    for output, part in row_parts(problem.outputs) if problem.has_graph else ():
        imaginary, elements = part == "imaginary", output.size // output.width
        rows, _, _ = problem.analytical_rows(output, imaginary, 0, elements)
        matrix[output.first + imaginary : output.end : output.width] = rows
    return matrix


def _check_layout(layout: torch.layout) -> None:
    if layout not in _LAYOUTS:
        names = ", ".join(str(known) for known in _LAYOUTS)
        raise ValueError(f"layout must be one of {names}, got {layout}.")


def _check_strided(problem: Problem) -> None:
    for block in problem.inputs:
        if block.tensor.layout is not torch.strided:
            raise ValueError(
                f"Jacobians require strided inputs; input {block.position} has layout {block.tensor.layout}."
            )


def _shape(block: Block) -> tuple[int, ...]:
    return (*block.tensor.shape, 2) if block.is_complex else tuple(block.tensor.shape)


def _dense(problem: Problem, matrix: Tensor, layout: torch.layout) -> Jacobians:
    """The Jacobian of each pair of output and input, from the matrix of shape (m, n)."""
    return _in_layout(problem, lambda output, block: matrix[output.slice, block.slice], layout)


def _sparse(problem: Problem, rows: Tensor, columns: Tensor, values: Tensor, layout: torch.layout) -> Jacobians:
    """Like `_dense`, from the entries of the sparsity pattern; all other entries are zero."""

    def part(output: Block, block: Block) -> Tensor:
        i, j = rows - output.first, columns - block.first
        within = (i >= 0) & (i < output.size) & (j >= 0) & (j < block.size)
        indices, size = torch.stack([i[within], j[within]]), (output.size, block.size)
        return torch.sparse_coo_tensor(
            indices, values[within], size, device=values.device, is_coalesced=True, check_invariants=False
        )

    return _in_layout(problem, part, layout)


def _in_layout(problem: Problem, part: Callable[[Block, Block], Tensor], layout: torch.layout) -> Jacobians:
    """The Jacobian of each pair of output and input; part: gives its matrix, in any layout."""

    def tensor(output: Block, block: Block) -> Tensor:
        matrix = part(output, block)
        if layout is torch.strided:
            return matrix.to_dense().reshape((*_shape(output), *_shape(block)))
        return matrix if matrix.layout is layout else matrix.to_sparse(layout=layout)

    return tuple(tuple(tensor(output, block) for block in problem.inputs) for output in problem.outputs)
