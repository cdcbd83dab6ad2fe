"""The grad_outputs of a comparison in a lower dtype: dense ones, and one per row or group of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgrad.core.native import Layout
from fastgrad.core.random import PRECISION_STREAM, direction
from fastgrad.core.tensors import ones_at
from fastgrad.problem.problem import Problem

MAX_ROWS = 2048
"""Largest number of single rows if VJPs of the reference run in batches; each needs 13 runs."""

MAX_SINGLE_ROWS = 256
"""Largest number of single rows if VJPs of the reference run one at a time."""

MAX_ENTRIES = 1 << 21
"""Largest number of components of VJPs that are compared. Several arrays of this size, of 16 MiB each, are held."""

DENSE = 5
"""Number of dense grad_outputs, which `_dense` describes."""

LAYOUTS = Layout.NON_CONTIGUOUS, Layout.CONTIGUOUS, Layout.CONTIGUOUS, Layout.OFFSET, Layout.EXPANDED
"""The memory layouts of the dense grad_outputs."""

SCALED = 2
"""Index of the dense grad_output that is `FACTOR` times the one before."""

FACTOR = -4.0
"""The factor of the dense grad_output that is a multiple of another one: a power of two, so that it is exact."""


@dataclass(frozen=True)
class Probes:
    """Grad_outputs, the dense ones first.

    Attributes
    ----------
    cotangents
        float64, shape (count, m); exact in the dtypes of the outputs.
    rows
        The output coordinate of each one-hot grad_output, -1 for all others: int64, shape (count,).
    text
        A description of the grad_outputs.
    dense
        Number of grad_outputs from `_dense`; they come first.
    """

    cotangents: Tensor
    rows: Tensor
    text: str
    dense: int = DENSE


def one_row(problem: Problem, row: int) -> Probes:
    """A `Probes` with one one-hot grad_output, for output coordinate `row`."""
    cotangent = ones_at(problem.m, row, problem.device)
    return Probes(cotangent.unsqueeze(0), torch.tensor([row], device="cpu"), f"row {row}", dense=0)


def probes_of(problem: Problem, fast_mode: bool, vectorizes: bool, seed: int) -> Probes:
    """Dense grad_outputs and, unless in fast mode, one per row or, if there are too many, one per group of rows."""
    dense = _dense(problem, seed)
    m = problem.m
    if fast_mode:
        return Probes(dense, torch.full((DENSE,), -1, device="cpu"), f"{DENSE} random grad_outputs")
    most = min(MAX_ROWS if vectorizes else MAX_SINGLE_ROWS, max(16, MAX_ENTRIES // max(problem.n, m)))
    if m <= most:
        rows = torch.eye(m, dtype=torch.float64, device=problem.device)
        numbers = torch.cat([torch.full((DENSE,), -1, device="cpu"), torch.arange(m, device="cpu")])
        of_rows = "the only row" if m == 1 else f"all {m} rows"
        return Probes(torch.cat([dense, rows]), numbers, f"{DENSE} random grad_outputs and {of_rows}")
    # A group has every `most`-th row, so that rows of neighboring outputs, which share inputs, are in different groups.
    groups = torch.zeros(most, m, dtype=torch.float64, device=problem.device)
    every = torch.arange(m, device=problem.device)
    groups[every % most, every] = random_cotangent(problem, seed, DENSE)
    text = f"{DENSE} random grad_outputs and all {m} rows, in {most} groups"
    return Probes(torch.cat([dense, groups]), torch.full((DENSE + most,), -1, device="cpu"), text)


def row_behind(problem: Problem, cotangent: Tensor, errors: Callable[[Tensor], Tensor]) -> int:
    """The row that makes a VJP wrong, by bisection: it is searched in the half of the cotangent with the larger error.

    errors: maps cotangents, shape (count, m), to the errors of their VJPs, shape (count,).
    """
    first, last = 0, problem.m
    while last - first > 1:
        middle = (first + last) // 2
        halves = torch.zeros(2, problem.m, dtype=torch.float64, device=problem.device)
        halves[0, first:middle] = cotangent[first:middle]
        halves[1, middle:last] = cotangent[middle:last]
        left, right = errors(halves).abs().nan_to_num(torch.inf).tolist()
        first, last = (first, middle) if left >= right else (middle, last)
    return first


def random_cotangent(problem: Problem, seed: int, number: int, halved: bool = False) -> Tensor:
    """A dense grad_output, exact in the dtypes of all outputs; with halved, a random half of it is zero. Shape (m,)."""
    v = direction(problem.m, seed, PRECISION_STREAM + 16 * number, halved=halved).to(problem.device)
    for block in problem.outputs:
        part = v[block.slice]
        v[block.slice] = part.to(block.tensor.dtype.to_real()).to(torch.float64)
    return v


def _dense(problem: Problem, seed: int) -> Tensor:
    """The dense grad_outputs: two random ones, `FACTOR` times the second, one with a random half zero, one constant.

    Random ones have magnitudes in [0.5, 1.5). All are passed to backward in `LAYOUTS`. Shape (DENSE, m).
    """
    first, second = (random_cotangent(problem, seed, number) for number in range(2))
    half = random_cotangent(problem, seed, DENSE, halved=True)
    constant = torch.full((problem.m,), 0.75, dtype=torch.float64, device=problem.device)
    for block in problem.outputs:
        if block.is_complex:
            constant[block.slice][1::2] = -0.5
    return torch.stack([first, second, FACTOR * second, half, constant])
