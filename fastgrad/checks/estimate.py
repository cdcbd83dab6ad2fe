"""Estimates the duration of a check from a few evaluations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastgrad.engines import cost_model
from fastgrad.engines.plan import dense_seconds, sketches
from fastgrad.problem.arguments import as_tuple
from fastgrad.problem.first_look import first_look
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings


def estimated_seconds(func: Callable[..., Any], inputs: Any, settings: Settings) -> float:
    """Seconds that a check would take: the calls of its engine, times the measured time per call.

    For an exact check, the calls are those of the dense engine; with a sparsity pattern, there may be fewer.
    """
    with Problem(func, as_tuple(inputs), settings.masked) as problem:
        if not problem.m or not problem.n:
            return problem.seconds
        look = first_look(problem, settings)
        # The measured time may be used, because it does not choose the engine.
        look = replace(look, seconds=max(look.seconds, look.measured))
        if sketches(problem, settings):
            return problem.seconds + cost_model.COSTS.sketch_seconds + cost_model.COSTS.sketch_calls * look.seconds
        return problem.seconds + dense_seconds(problem, look.seconds)
