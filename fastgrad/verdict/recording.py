"""Whether gradients that are recorded, for a second derivative, are those that are not."""

from __future__ import annotations

import torch

from fastgrad.problem.coordinates import block_with
from fastgrad.problem.problem import Problem
from fastgrad.report.failure import Failure
from fastgrad.report.settings import Settings


def check_recorded_gradients(problem: Problem, settings: Settings) -> Failure | None:
    """The gradients of a backward that is run with create_graph=True, and without, within the tolerances.

    Training uses those without, and a second derivative is that of those with.
    """
    recorded, plain = problem.base(), problem.base_without_graph()
    if torch.equal(recorded, plain):
        return None
    difference = (recorded - plain).abs()
    allowed = settings.atol + settings.nondet_tol + settings.rtol * plain.abs()
    wrong = ~((difference <= allowed) | (recorded == plain) | (recorded.isnan() & plain.isnan()))
    if not bool(wrong.any()):
        return None
    worst = int(torch.where(wrong, difference.nan_to_num(torch.inf), -1.0).argmax())
    output = block_with(problem.outputs, worst)
    detail = (
        f"{recorded[worst].item():.6g} with it, {plain[worst].item():.6g} without, in output {output.index} of the "
        f"backward, at the worst of {int(wrong.sum())} elements"
    )
    return Failure("recorded gradient", output=output.index, output_position=output.position, detail=detail)
