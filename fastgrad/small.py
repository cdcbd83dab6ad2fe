"""Small problems: all VJPs in one call, from the graph at hand; and one look at Jacobians that agree."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fastgrad._native import WholeBackward
from fastgrad.certify import ALL_KINDS, linear_backward, proof_cotangents
from fastgrad.compare import Findings
from fastgrad.engines import REPEAT_SCALE, REPEATED_ROWS
from fastgrad.plan import is_one_block, looks_first
from fastgrad.problem import Problem
from fastgrad.report import Pair, Settings
from fastgrad.tolerances import ROUNDING


def is_small(problem: Problem, settings: Settings) -> bool:
    """Whether all of backward can be run ahead of the differences: func need not be evaluated for it again.

    Not where there are several outputs: one is judged before the next is differentiated.
    """
    return (
        problem.has_graph
        and settings.check_backward_ad
        and not settings.check_forward_ad
        and len(problem.outputs) == 1
        and all(block.tensor.layout is torch.strided for block in problem.inputs)
        and is_one_block(problem, settings)
        and not looks_first(problem, settings)
    )


@lru_cache(16)
def _cotangents(m: int, seed: int, device: torch.device) -> Tensor:
    # A single row needs no proof: it is repeated at another scale.
    return proof_cotangents(m, seed, device, ALL_KINDS if m > 1 else ())


def whole_backward(problem: Problem, settings: Settings) -> WholeBackward:
    """All VJPs of a check of a problem that is small."""
    return problem.whole_backward(
        _cotangents(problem.m, settings.seed, problem.device),
        REPEATED_ROWS,
        REPEAT_SCALE,
        settings.check_undefined_grad,
        settings.atol,
        ROUNDING * problem.unit_roundoff * problem.m**0.5,
    )


def agrees(problem: Problem, settings: Settings, backward: WholeBackward, columns: Tensor, findings: Findings) -> bool:
    """Whether all entries agree, and so does what the rows came with: then there is nothing to be judged part by part.

    columns: all of the numerical Jacobian, float64, shape (n, m).
    """
    of_rows = backward.parts[0]
    dtypes_match = of_rows.match.dtypes or not settings.check_grad_dtypes
    if backward.moved or not (backward.add_up and of_rows.match.repeats and of_rows.match.sizes and dtypes_match):
        return False
    (output,) = problem.outputs
    own = [settings.of(block.index) for block in problem.inputs]
    errors = problem.largest_errors(of_rows.rows, columns, [one.atol for one in own], [one.rtol for one in own])
    if errors is None:
        return False
    for block, largest in zip(problem.inputs, errors, strict=True):
        entries = output.tensor.numel() * block.tensor.numel()
        places = output.index, block.index, output.position, block.position
        findings.pairs.append(Pair(*places, "all", "reverse", entries, 0, True, *largest, False))
    if problem.m > 1:
        findings.certificates.append(linear_backward(ALL_KINDS, settings.atol))
    return True
