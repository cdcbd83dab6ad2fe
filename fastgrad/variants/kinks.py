"""Points at which a function has no derivative: what differences to either side say of each entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastgrad.core.random import TANGENT_STREAM, direction
from fastgrad.problem.arguments import as_tuple

MOST_ENTRIES = 1 << 16
"""Entries of the Jacobian that are examined."""

DIRECTIONS = 3
"""Random ones along which derivatives must add up."""

STEP, FINER = 1e-5, 2.0**-4
"""A step, relative to max(|x|, 1), and the second one relative to it."""

RELATIVE, ABSOLUTE = 1e-2, 1e-3
"""What differences to either side, and those of two steps, may be apart where a function is smooth; and what a
gradient may be off: one-sided differences are no better."""


@dataclass(frozen=True)
class Examined:
    """How many entries have no derivative, and how many have one that the gradient is not."""

    without: int
    wrong: int


def examined(func: Callable[..., Any], inputs: tuple[Any, ...], checked: list[int]) -> Examined | None:
    """Looks at every entry from either side; None where there are too many. A complex number is two real ones.

    An output has a derivative where it has one along each coordinate, and these add up along other directions: the
    median of equal numbers moves with none of them alone, and with all together.
    """
    outputs = _differentiable(func(*inputs))
    base, point = _flat(outputs), _flat([inputs[i] for i in checked])
    n, m = point.numel(), base.numel()
    if n * m > MOST_ENTRIES:
        return None
    gradient = torch.cat([_rows(outputs, inputs[i]) for i in checked], 1)
    scale = point.abs().clamp(min=1.0)
    slopes, smooth = torch.zeros(m, n, dtype=torch.float64), torch.zeros(m, n, dtype=torch.bool)
    for coordinate in range(n):
        u = torch.zeros(n, dtype=torch.float64)
        u[coordinate] = 1.0
        slope, smooth[:, coordinate] = _slope(func, inputs, checked, base, u * scale)
        slopes[:, coordinate] = slope / scale[coordinate]
    adds_up = torch.ones(m, dtype=torch.bool)
    for number in range(DIRECTIONS):
        u = direction(n, number, TANGENT_STREAM) * scale
        slope, agree = _slope(func, inputs, checked, base, u)
        adds_up &= agree & ((slope - slopes @ u).abs() <= _allowed(slopes.abs() @ u.abs()))
    exists = smooth & adds_up.unsqueeze(1)
    # A grad_output of zero times an infinite derivative is NaN, in the whole column.
    spoilt = ~exists.all(0) & ~gradient.isfinite()
    wrong = exists & ~spoilt & ~((gradient - slopes).abs() <= _allowed(slopes.abs()))
    return Examined(int((~exists).sum()), int(wrong.sum()))


def _allowed(size: Tensor) -> Tensor:
    return RELATIVE * size + ABSOLUTE


def _slope(
    func: Callable[..., Any], inputs: tuple[Any, ...], checked: list[int], base: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """The slopes of all outputs along a direction, and where both sides and both steps agree."""
    sides = [
        sign * (_flat(_differentiable(func(*_moved(inputs, checked, sign * step * u)))) - base) / step
        for step in (STEP, STEP * FINER)
        for sign in (1.0, -1.0)
    ]
    central = (sides[2] + sides[3]) / 2
    pairs = (sides[2], sides[3]), (sides[0], sides[1]), (sides[2], sides[0])
    agree = torch.stack([(left - right).abs() <= _allowed(central.abs()) for left, right in pairs]).all(0)
    return central.nan_to_num(0.0, 0.0, 0.0), agree


def _moved(inputs: tuple[Any, ...], checked: list[int], by: Tensor) -> list[Any]:
    moved, first = list(inputs), 0
    for i in checked:
        value = inputs[i].detach()
        count = value.numel() * (2 if value.is_complex() else 1)
        part = by[first : first + count]
        part = torch.view_as_complex(part.view(-1, 2)) if value.is_complex() else part
        moved[i] = (value + part.view(value.shape).to(value)).requires_grad_()
        first += count
    return moved


def _differentiable(result: Any) -> list[Tensor]:
    return [value for value in as_tuple(result) if isinstance(value, Tensor) and value.requires_grad]


def _reals(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu().resolve_conj()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().reshape(-1)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *map(_reals, tensors)])


def _rows(outputs: list[Tensor], x: Tensor) -> Tensor:
    """The gradients of all outputs' real numbers: float64, shape (m, n)."""
    rows = [torch.zeros(0, _reals(x).numel(), dtype=torch.float64)]
    for output in outputs:
        units: tuple[Any, ...] = (1, 1j) if output.is_complex() else (1,)
        for element in range(output.numel()):
            for unit in units:
                one = torch.zeros(output.numel(), dtype=output.dtype, device=output.device)
                one[element] = unit
                (row,) = torch.autograd.grad(output, x, one.view(output.shape), retain_graph=True, allow_unused=True)
                rows.append(_reals(torch.zeros_like(x) if row is None else row).unsqueeze(0))
    return torch.cat(rows)
