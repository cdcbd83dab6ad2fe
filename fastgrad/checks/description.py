"""Describes the checked function, the versions and the device for a report."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from fastgrad._version import __version__
from fastgrad.problem.problem import Problem
from fastgrad.problem.second_order import Backward, gradient_names
from fastgrad.problem.signature import function_name, kind_of, parameter_names, source_of
from fastgrad.report.data import Environment
from fastgrad.report.failure import Subject


def subject(func: Callable[..., Any], problem: Problem) -> Subject:
    """The checked function, for a report."""
    parameters = parameter_names(func)
    results: tuple[str, ...] = ()
    if isinstance(func, Backward):
        parameters, results = _names_in_second_order(func, parameters)
    kinds = {block.position: kind_of(block.tensor) for block in problem.inputs}
    return Subject(
        function_name(func),
        parameters,
        tuple(kinds.get(position, "") for position in range(max(kinds, default=-1) + 1)),
        tuple(kind_of(block.tensor) for block in problem.outputs),
        source_of(func),
        os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0],
        results,
    )


def _names_in_second_order(backward: Backward, parameters: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the arguments of a backward and of its results; parameters: the names of func's parameters."""
    numbers = {position: number for number, position in enumerate(backward.inputs)}
    names = list(parameters[: backward.count])
    names += [f"in{numbers[i]}" if i in numbers else "" for i in range(len(names), backward.count)]
    checked = [names[i] for i in backward.inputs]
    several = backward.grad_output_count > 1
    names += [f"grad_outputs[{k}]" if several else "grad_output" for k in range(backward.grad_output_count)]
    return tuple(names), gradient_names(checked, backward)


def why_restored(problem: Problem) -> str:
    """A note on inputs that differed from themselves after a call: func changes them, or they contain NaN."""
    x = problem.coordinates()
    found = ", ".join(problem.name_of(block) for block in problem.inputs if bool(x[block.slice].isnan().any()))
    why = f"{found} contains NaN" if found else "func changes its inputs"
    return f"{why}; all inputs were restored before and after every evaluation"


@lru_cache(8)
def environment(device: torch.device) -> Environment:
    """Versions and device, for a report."""
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    return Environment(__version__, str(torch.__version__), platform.python_version(), name)
