"""The order of the checks: a small check in native code and, if it does not pass, the complete check."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastgrad.checks.description import environment
from fastgrad.checks.small import small_check
from fastgrad.checks.small_result import UNDECIDED_SUMS, SmallCheck
from fastgrad.core.backends import exact_libraries
from fastgrad.engines.grad_output_kinds import GRAD_OUTPUT_KINDS
from fastgrad.engines.plan import make_sketch_plan, small_plan
from fastgrad.problem.arguments import as_tuple
from fastgrad.report.data import Certificate
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings
from fastgrad.verdict.linearity import linear_backward

if TYPE_CHECKING:
    from fastgrad.sharding.problem import Partition


def check(
    func: Callable[..., Any],
    inputs: Any,
    settings: Settings,
    names: tuple[str, ...] = (),
    explain: bool = True,
    partition: Partition | None = None,
) -> Report:
    """Checks the derivatives that autograd computes for func at inputs against differences of func.

    Parameters
    ----------
    func
        Takes the inputs, returns a Tensor or a tuple or list of Tensors.
    inputs
        A tensor, or a tuple or list; tensors that require grad are checked, anything else is passed through.
    settings
        Step, tolerances and what to check.
    names
        Names of the inputs in messages; by default, messages use their numbers.
    explain
        Whether to collect evidence after a failure and to look for probable causes.
    partition
        The ranks that share the work (all of them return the report) and the checkpoint; None: one rank, no checkpoint.

    Returns
    -------
    Report
        Errors of func and of backward, and of the arguments, are raised instead.
    """
    start = time.perf_counter()
    found = _checked(func, inputs, settings, names, explain, partition, start)
    return found if isinstance(found, Report) else _report_of_small(found, names, start)


def verdict(func: Callable[..., Any], inputs: Any, settings: Settings, explain: bool) -> Report | None:
    """Like `check`, but None if a small check passes: a report takes a fifth of the time of the smallest checks."""
    found = _checked(func, inputs, settings, (), explain, None, time.perf_counter())
    return found if isinstance(found, Report) else None


def _checked(
    func: Callable[..., Any],
    inputs: Any,
    settings: Settings,
    names: tuple[str, ...],
    explain: bool,
    partition: Partition | None,
    start: float,
) -> Report | SmallCheck:
    """A small check if it passes; otherwise the report of the complete check."""
    arguments = as_tuple(inputs)
    with full_precision(arguments, settings) as notes:
        small = small_check(func, arguments, settings) if partition is None else None
        if small is not None and small.passes:
            small.notes = notes
            return small
        from fastgrad.checks.complete import complete_check  # imported here to keep `import fastgrad` fast

        run = partial(complete_check, func, arguments, settings, names, explain, partition, start, notes)
        return _with_custom_code(run, small, partition is not None)


STARTED_AGAIN = (
    "the backward runs custom code, but not that of the first call of func; the check started again, and counts only "
    "later calls"
)
"""The note of a report if custom code ran only on a later graph."""


def _with_custom_code(
    run: Callable[[SmallCheck | None], tuple[Report, bool]], small: SmallCheck | None, shared: bool
) -> Report:
    """The report of a complete check, which starts again if only later graphs run custom code.

    All tests then run on graphs with custom code: func may compile a kernel in its first call. A check that ranks share
    does not start again, because other ranks may have other graphs.
    """
    starts_again = small is not None and small.starts_again
    report, became_custom = run(None if starts_again else small)
    if became_custom and report.passed and not starts_again and not shared:
        starts_again = True
        report, _ = run(None)
    return replace(report, notes=(*report.notes, STARTED_AGAIN)) if starts_again else report


def full_precision(arguments: tuple[Any, ...], settings: Settings) -> AbstractContextManager[list[str]]:
    """A context without TF32 and similar modes, if CUDA's libraries may be in use; yields notes for the report."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext([])
    checked = [value for value in arguments if isinstance(value, Tensor) and value.requires_grad]
    doubles = all(value.dtype in (torch.float64, torch.complex128) for value in checked)
    return exact_libraries(settings.nondet_tol == 0, doubles)


def _report_of_small(small: SmallCheck, names: tuple[str, ...], start: float) -> Report:
    """The report of a small check that passes."""
    problem, settings = small.problem, small.settings
    certificates: tuple[Certificate, ...] = ()
    if small.errors is None and small.tangent_errors is None:
        plan = make_sketch_plan(settings)
        if settings.check_backward_ad and small.differences is not None:
            from fastgrad.checks.sketch import verified  # imported here to keep `import fastgrad` fast

            certificates = verified(settings, small.bound, small.differences[0].step).certificates
    elif small.pattern is not None:
        plan = small.pattern.plan()
    else:
        is_vectorized = small.columns is not None and not small.vectorization_failed
        plan = small_plan(problem.n, problem.m, settings.engine, is_vectorized)
        if settings.check_backward_ad and problem.m > 1:
            certificates = (linear_backward(GRAD_OUTPUT_KINDS, settings.atol),)
    notes = small.notes if problem.tensor_device.type == "cuda" else []
    if small.undecided_sums is not None:
        notes = [*notes, UNDECIDED_SUMS]
    return Report(
        failure=None,
        settings=settings,
        plan=plan,
        n=problem.n,
        m=problem.m,
        evaluations=problem.evaluator.evaluations,
        vjps=small.on_graph.vjps,
        jvps=small.jvps,
        seconds=time.perf_counter() - start,
        notes=tuple(notes),
        phases={"first evaluation": problem.seconds, **small.seconds},
        input_names=names,
        pairs=tuple(small.compared()),
        certificates=(*certificates, *small.certificates),
        environment=environment(problem.tensor_device),
    )
