"""Tests that forward and reverse mode have the same Jacobian, where both were compared with differences.

Re-measuring may excuse an entry of one mode that differs at eps. If the other mode agrees at eps, its entry is wrong.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastgrad.core.phases import phase
from fastgrad.core.precision import ROUNDING
from fastgrad.core.random import dense_pair
from fastgrad.core.tensors import ones_at
from fastgrad.problem.coordinates import block_with
from fastgrad.problem.problem import Problem
from fastgrad.report.failure import Failure
from fastgrad.report.settings import Settings
from fastgrad.verdict.comparison import Findings
from fastgrad.verdict.confirm import element_coordinates, entry_at, located_failure
from fastgrad.verdict.locate import locate

PRODUCT_SHARE = 1 / 4
"""Smallest magnitude of the factor with which an entry enters v^T J u: components of u and v are at least 1/2."""


def modes_agree(
    settings: Settings, unit_roundoff: float, vjp: tuple[Tensor, Tensor], jvp: tuple[Tensor, Tensor]
) -> bool:
    """Whether v^T J u is the same by both modes; vjp: v and v^T J, shapes (m,) and (n,); jvp: u and J u."""
    reverse, forward = (vjp[1] @ jvp[0]).item(), (vjp[0] @ jvp[1]).item()
    difference, allowed = abs(reverse - forward), settings.atol * PRODUCT_SHARE
    if difference <= allowed or reverse == forward or (math.isnan(reverse) and math.isnan(forward)):
        return True  # also if both are infinite
    rounding = ROUNDING * unit_roundoff * (vjp[1].abs() @ jvp[0].abs()).item()
    return math.isfinite(rounding) and difference <= allowed + rounding


@phase("forward against reverse mode")
def modes_failure(problem: Problem, settings: Settings, findings: Findings) -> Failure | None:
    """The failure of an entry in which the modes differ by more than differences at eps allow, if it is wrong.

    If re-measuring does not show which of the two is wrong, the difference is noted as undecided.
    """
    u, v = dense_pair(problem.n, problem.m, settings.seed, 0, problem.device)
    gradient, tangent = problem.vjp(v[None])[0], problem.jvp_coordinates(u)
    if modes_agree(settings, problem.unit_roundoff, (v, gradient), (u, tangent)):
        return None

    def of_column(vector: Tensor) -> float:
        return float(v @ problem.jvp_coordinates(vector)) - float(gradient @ vector)

    column = locate(of_column, u, float(v @ tangent) - float(gradient @ u))
    one_hot = ones_at(problem.n, column, problem.device)
    entries = problem.jvp_coordinates(one_hot)

    def of_row(vector: Tensor) -> float:
        return float(vector @ entries) - problem.vjp(vector[None])[0, column].item()

    row = locate(of_row, v, of_row(v))
    by_reverse = problem.row(row)
    input_, output = block_with(problem.inputs, column), block_with(problem.outputs, row)
    # The elements, each a coordinate or, if complex, two.
    sizes = by_reverse[element_coordinates(input_, column)], entries[element_coordinates(output, row)]
    allowed = settings.of(input_.index).allowed(torch.stack([size.norm() for size in sizes]).amax())
    difference = abs(entries[row] - by_reverse[column])
    if bool(difference <= 2 * allowed + settings.nondet_tol):
        return None
    for row_of_mode in (by_reverse, None):
        found = entry_at(problem, settings, row, column, row_of_mode, trusts_eps=False)
        if found.remeasured is not None:
            return located_failure([found])
    findings.note_undecided(difference.item())
    return None
