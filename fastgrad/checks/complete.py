"""The complete check: values and linearity of derivatives, attributes of backward, then evidence of a failure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fastgrad.checks.dense import dense_check
from fastgrad.checks.description import environment, subject, why_restored
from fastgrad.checks.one_block import is_small, runs_single_rows, take_calls
from fastgrad.checks.small_result import UNDECIDED_SUMS, SmallCheck
from fastgrad.core.errors import as_raised, raise_if_transient, raise_unless_of_func, raised_by, unless_rejected
from fastgrad.core.memory import OUT_OF_MEMORY
from fastgrad.core.phases import stopwatch
from fastgrad.core.progress import Progress
from fastgrad.core.random import GRAPH_STREAM, direction
from fastgrad.engines import cost_model
from fastgrad.engines.dense import columns_one_by_one
from fastgrad.engines.plan import (
    compares_undecided_entries,
    dense_is_small,
    is_affordable,
    make_plan,
    make_sketch_plan,
    sketches,
    takes_first_look,
    tries_structure,
    with_less_memory,
)
from fastgrad.problem.coordinates import block_with
from fastgrad.problem.first_look import base_varies, first_look, values_vary
from fastgrad.problem.problem import Problem
from fastgrad.problem.second_order import Backward
from fastgrad.problem.validation import disabled_gradients
from fastgrad.report.data import Plan
from fastgrad.report.failure import Failure, Mode
from fastgrad.report.number_text import count
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings
from fastgrad.verdict.comparison import Findings
from fastgrad.verdict.confirm import located_pair
from fastgrad.verdict.grad_outputs import (
    batched_failure,
    check_batched_tangents,
    check_undefined_grads,
    check_undefined_tangents,
    check_zero_grad_output,
)
from fastgrad.verdict.modes import modes_failure
from fastgrad.verdict.recording import check_new_grad_outputs, check_recorded_gradients, moves_on_one_graph
from fastgrad.verdict.repeated_calls import RepeatedCalls
from fastgrad.verdict.repeated_rows import nondeterministic, nondeterministic_func
from fastgrad.verdict.tangents import nondeterministic_jvp, nonlinear_in_inputs, repeated_tangents_failure

if TYPE_CHECKING:
    from fastgrad.checks.sketch import Screening
    from fastgrad.report.evidence import Sample
    from fastgrad.sharding.problem import Partition


def complete_check(
    func: Callable[..., Any],
    arguments: tuple[Any, ...],
    settings: Settings,
    names: tuple[str, ...],
    explain: bool,
    partition: Partition | None,
    start: float,
    notes: list[str],
    small: SmallCheck | None,
) -> tuple[Report, bool]:
    """Runs the complete check; uses the results of a small check, if any.

    start: the `time.perf_counter` at the beginning of the check. notes: about the settings of libraries, for the
    report. Returns the report, and `Problem.became_custom`.
    """
    make_problem: Callable[..., Problem] = Problem if partition is None else partition.problem
    if small is not None:
        make_problem = partial(Problem, traced=small.problem)
    with (
        Progress(settings.progress if partition is None or partition.leads else False) as progress,
        make_problem(
            func,
            arguments,
            settings.masked,
            progress,
            names,
            # Per input: its step, relative to eps, and the weight of its errors in sums, below 1 if its atol is larger.
            [
                (own.eps / settings.eps, settings.atol / own.atol if 0 < settings.atol < own.atol else 1.0)
                for own in settings.inputs
            ],
            # Differences of a backward use gradients that are computed without a graph, as in training.
            # check_recorded_gradients compares them with gradients that are computed with a graph.
            records_differences=not isinstance(func, Backward),
        ) as problem,
    ):
        if small is not None:
            _take_small_check(small, problem)
        findings = Findings() if small is None else small

        def run() -> Report:
            report_of = partial(_report, problem, names, notes, start)
            report = report_of(settings, findings)
            if not explain or report.failure is None:
                return report
            sample = findings.sample
            if dense_is_small(problem, settings):
                report, sample = _with_every_entry(report, sample, report_of)
            from fastgrad.diagnosis.evidence import diagnosed  # imported here: a check that passes does not need it

            return diagnosed(problem, replace(report, subject=subject(func, problem)), sample)

        report = run() if partition is None else partition.report(run)
        return report, problem.became_custom


def _with_every_entry(
    report: Report, sample: Sample | None, report_of: Callable[[Settings, Findings], Report]
) -> tuple[Report, Sample | None]:
    """The report and the sample of the dense engine, if an entry is wrong, but not all others were compared.

    Returns the given report and sample if all entries were compared, or if the dense engine shows no mismatch.
    """
    comparison, plan = report.failure.comparison if report.failure else None, report.plan
    if comparison is None or comparison.exhaustive or plan is None or plan.engine != "compressed":
        return report, sample
    every = Findings()
    try:
        exact = report_of(replace(report.settings, engine="dense"), every)
    except Exception as error:
        raise_unless_of_func(error)
        return report, sample
    if exact.failure is None or exact.failure.kind != "mismatch" or exact.plan is None:
        return report, sample
    plan = replace(exact.plan, reason=f"{plan.reason}; after a failure, every entry was compared")
    return replace(exact, settings=report.settings, plan=plan), every.sample


def _take_small_check(small: SmallCheck, problem: Problem) -> None:
    """Uses the results of a small check as the first results of the complete check."""
    if small.changed is not None:
        problem.raise_changed(*small.changed, small.settings.eps)
    problem.vjps, problem.jvps = small.on_graph.vjps, small.jvps
    problem.irreproducible += small.irreproducible
    small.certificates = []
    if small.look is not None:
        problem.set_base(small.look.base)
    device, products, tangents = problem.device, small.products, small.tangents
    small.backward = None if small.backward is None else small.backward.to(device)
    small.columns = None if small.columns is None else small.columns.to(device)
    small.tangent_columns = None if small.tangent_columns is None else small.tangent_columns.to(device)
    small.products = None if products is None else (products[0].to(device), products[1].to(device))
    small.tangents = None if tangents is None else (tangents[0].to(device), tangents[1], tangents[2].to(device))


def _report(
    problem: Problem, names: tuple[str, ...], notes: list[str], start: float, settings: Settings, findings: Findings
) -> Report:
    """Runs all checks and returns the report, without causes; start, notes: as in `complete_check`."""
    seconds = {"first evaluation": time.perf_counter() - start}
    with stopwatch(seconds, problem.n, seconds["first evaluation"]):
        plan, failure = _first_failure(problem, settings, findings)
    if failure is not None and failure.comparison is not None and all(pair.agrees for pair in findings.pairs):
        findings.add_pair(located_pair(failure, failure.comparison))
    if problem.device.type == "cuda":
        findings.notes += notes
    disabled = disabled_gradients()
    findings.notes += [disabled] if disabled else []
    if problem.mutates_inputs:
        findings.notes.append(why_restored(problem))
    if problem.freed_first_graph:
        findings.notes.append(
            "a new graph ran out of memory; the first graph, which is kept for a comparison, was freed"
        )
    return Report(
        failure=failure,
        settings=settings,
        plan=plan,
        n=problem.n,
        m=problem.m,
        evaluations=problem.evaluations,
        vjps=problem.vjps,
        jvps=problem.jvps,
        seconds=time.perf_counter() - start,
        phases=dict(seconds),
        notes=tuple(findings.notes),
        input_names=names,
        pairs=tuple(findings.pairs),
        certificates=tuple(findings.certificates),
        undecided=findings.undecided,
        environment=environment(problem.device),
    )


def _first_failure(problem: Problem, settings: Settings, findings: Findings) -> tuple[Plan, Failure | None]:
    backward = problem.func if isinstance(problem.func, Backward) else None
    if problem.n and not problem.m:
        _evaluate_empty_outputs(problem, settings)
    if problem.has_graph and (backward is not None or (problem.is_custom and problem.evaluations == 1)):
        problem.base()  # called while the first evaluation still provides this value: backward may modify outputs
    sums_are_open = isinstance(findings, SmallCheck) and findings.undecided_sums is not None
    if sums_are_open and (not settings.check_backward_ad or compares_undecided_entries(problem, settings)):
        findings.notes.append(UNDECIDED_SUMS)
        plan, failure = _exact(problem, settings, findings)
    elif sketches(problem, settings) and findings.backward is None:
        calls = RepeatedCalls(problem, settings)
        calls.run_first()
        if findings.products is not None:
            calls.add(*findings.products)
        plan, failure = _screened(problem, settings, findings)
        if failure is None:
            failure = calls.failure() or calls.older_graph_failure()
            findings.certificates += calls.certificates()
    else:
        plan, failure = _exact(problem, settings, findings)
    if failure is None and problem.has_graph:
        failure = other_checks_failure(problem, settings, findings)
    records = problem.has_graph and torch.is_grad_enabled()
    if backward is not None and records and (failure is None or failure.kind == "mismatch"):
        failure = check_recorded_gradients(problem, settings) or failure
        if failure is None:
            failure = check_new_grad_outputs(problem, settings, backward)
    if failure is None and settings.check_forward_ad:
        failure = _forward_failure(problem, settings, findings)
        if failure is None and settings.check_backward_ad and problem.has_graph:
            failure = modes_failure(problem, settings, findings)
    elif failure is not None and failure.kind in ("mismatch", "nonlinear") and failure.mode == "forward":
        # If values are wrong in some calls only, report that calls differ, which is the cause.
        failure = _varying_tangents(problem, settings, findings) or failure
    if failure is None and findings.vjp_varies:
        failure = nondeterministic(problem.outputs[0])
    if failure is None and backward is not None and moves_on_one_graph(problem, settings, backward):
        problem.irreproducible.append("on the same graph")
    if failure is None and base_varies(problem, settings):
        problem.irreproducible.append("at the inputs")
    if failure is None and problem.irreproducible:
        failure = nondeterministic_func(problem, problem.irreproducible[0])
    if failure is None and findings.early is not None:
        raise findings.early  # backward raised early, but did not raise again when the checks ran in order
    return plan, failure


def _evaluate_empty_outputs(problem: Problem, settings: Settings) -> None:
    """Evaluates func next to x if its outputs are empty at x; raises if some are not empty there."""
    step = problem.displacement(direction(problem.n, settings.seed, GRAPH_STREAM).to(problem.device), settings.eps)
    for scale in (1.0, -1.0):
        if unless_rejected(partial(problem.evaluate, True, step, scale)) is None:
            columns_one_by_one(problem, settings, 0, problem.n, record_graph=True)  # raises, and names the coordinate


def _forward_failure(problem: Problem, settings: Settings, findings: Findings) -> Failure | None:
    """The failure of JVPs that differ when repeated, or of a complex tangent of a real output, or vice versa."""
    failure = _varying_tangents(problem, settings, findings)
    if failure is None and findings.jvp_varies:
        failure = nondeterministic_jvp(problem.outputs[0], "some runs were right and others were not")
    if failure is None and settings.check_grad_dtypes and not (findings.domains_match and problem.domains_match):
        failure = Failure("tangent dtype", mode="forward")
    return failure


def _varying_tangents(problem: Problem, settings: Settings, findings: Findings) -> Failure | None:
    """The failure of JVPs that differ when repeated."""
    if findings.tangents is None:
        return None
    return repeated_tangents_failure(problem, settings, *findings.tangents)


def other_checks_failure(problem: Problem, settings: Settings, findings: Findings) -> Failure | None:
    """The failure of the checks besides the Jacobians: modified vectors; undefined, zero and batched vectors."""
    backward = findings.backward
    failure = _modified(problem, settings)
    if failure is None and settings.check_forward_ad and settings.check_undefined_grad:
        failure = check_undefined_tangents(problem, settings)
    if failure is None and settings.check_forward_ad:
        failure = nonlinear_in_inputs(problem, settings)
    if failure is None and settings.check_batched_forward_grad:
        failure = check_batched_tangents(problem, settings)
    if failure is not None or not settings.check_backward_ad:
        return failure
    if settings.check_batched_grad:
        failure = findings.batched or batched_failure(problem.vjp_graph(), problem, settings)
    if backward is not None and backward.are_zero:
        return failure
    if failure is None:
        failure = check_zero_grad_output(problem, settings, backward.zeros[0] if backward else None)
    if failure is None and settings.check_undefined_grad:
        failure = check_undefined_grads(problem, backward.zeros[1:] if backward else None)
    return failure


def _modified(problem: Problem, settings: Settings) -> Failure | None:
    """The failure of a jvp or backward that has modified a tangent, a grad_output or an output.

    Whatever uses it afterwards gets wrong values.
    """
    if problem.modified_tangent is not None:
        return Failure.at("modified tangent", input=problem.modified_tangent, mode="forward")
    if problem.modified_cotangent >= 0:
        return Failure.at("modified grad_output", problem.outputs[problem.modified_cotangent])
    if problem.modified_output >= 0:
        return Failure.at("modified output", problem.outputs[problem.modified_output])
    return _modified_large_output(problem, settings) if problem.is_custom and not problem.mutates_inputs else None


def _modified_large_output(problem: Problem, settings: Settings) -> Failure | None:
    """As `_modified`, for outputs too large to be compared after each VJP, if func still gives the first values."""
    for values in problem.graph_values():
        base = problem.base()
        vary = partial(values_vary, problem, settings)
        if vary(values, base) and not vary(problem.evaluate(True, problem.zero_displacement()), base):
            row = int((values - base).abs().nan_to_num(math.inf).argmax())
            return Failure.at("modified output", block_with(problem.outputs, row))
    return None


def _exact(problem: Problem, settings: Settings, findings: Findings) -> tuple[Plan, Failure | None]:
    """Compares every entry of every Jacobian; runs a few VJPs before and again afterwards, and compares them, too."""
    calls = RepeatedCalls(problem, settings)
    # The early VJPs must use the first graph. If nothing runs before whole_backward, its VJPs are the first ones.
    at_once = is_small(problem, settings) and runs_single_rows(problem) and not takes_first_look(problem, settings)
    if findings.backward is not None:
        take_calls(problem, findings.backward, calls)
    elif not at_once:
        calls.run_first()
    if findings.products is not None:
        calls.add(*findings.products)
    plan, failure = _all_entries(problem, settings, calls, findings)
    if findings.early is None and (failure is None or failure.kind == "mismatch"):
        # If an entry is wrong in some calls only, report that calls differ, which is the cause.
        failure = calls.failure(one_round=failure is not None) or failure or calls.older_graph_failure()
        findings.certificates += calls.certificates()
    return plan, failure


def _all_entries(
    problem: Problem, settings: Settings, calls: RepeatedCalls, findings: Findings
) -> tuple[Plan, Failure | None]:
    """Compares every entry of every Jacobian: those of a sparsity pattern if that costs less, otherwise all."""
    look, obstacle = None, ""
    first: Mode = "reverse" if settings.check_backward_ad else "forward"
    _raise_at_first(first, problem, findings)
    try:
        known = findings.look if isinstance(findings, SmallCheck) else None
        look = first_look(problem, settings, known) if takes_first_look(problem, settings) else None
        if look is not None and tries_structure(problem, settings, look):
            from fastgrad.checks.compressed import check_by_structure  # imported here to keep `import fastgrad` fast

            outcome = check_by_structure(problem, settings, look, calls, findings)
            if outcome is not None:
                return outcome
            _raise_at_first(first, problem, findings)
    except OUT_OF_MEMORY:
        obstacle = "; the compressed engine ran out of memory"
    plan = make_plan(problem, settings, look)
    plan = replace(plan, reason=plan.reason + obstacle) if obstacle else plan
    planned = 2 * problem.n + problem.m
    evaluations = planned + cost_model.COSTS.jvp_evaluations * problem.n * settings.check_forward_ad
    seconds = look.measured * evaluations if look else 0.0
    problem.progress.start(planned, seconds, count(planned, "call"))
    while True:
        own = Findings(
            backward=findings.backward,
            early=findings.early,
            columns=findings.columns,
            tangent_columns=findings.tangent_columns,
        )
        try:
            plan, failure = dense_check(problem, plan, settings, look, own, calls)
        except OUT_OF_MEMORY as error:
            smaller = with_less_memory(problem, plan, settings)
            if smaller is None:
                lack = as_raised(error)
                raise MemoryError(_out_of_memory_message(problem, plan, settings, lack)) from lack
            plan = smaller
        else:
            findings.add(own)
            return plan, failure


def _raise_at_first(mode: Mode, problem: Problem, findings: Findings) -> None:
    """Raises what the first row, or the first column of forward mode, raises, if a call has raised.

    The checks would end with this exception, but only after all differences.
    """
    raised = findings.early or problem.derivative_error
    if raised is None or not problem.m or not problem.n or not problem.has_graph:
        return
    if mode == "forward":
        error = raised_by(partial(problem.tangent_columns, 0, 1))
    else:
        error = raised_by(partial(problem.row, 0, block_with(problem.outputs, 0)))
    if error is not None:
        # A backward that has changed its inputs may now raise with another text.
        raise raised if type(error) is type(raised) else error


def _out_of_memory_message(problem: Problem, plan: Plan, settings: Settings, error: BaseException) -> str:
    lack = str(error).strip().removesuffix(".") or type(error).__name__
    limit = "by default a share of the free memory" if settings.memory_limit is None else f"now {settings.memory_limit}"
    return (
        f"The check ran out of memory, with {plan.memory} bytes for {plan.columns_per_pass} of {problem.n} columns of "
        f"the Jacobian at a time: {lack}. In addition, func and its graph need memory: make the inputs smaller, or set "
        f"a lower memory_limit= (in bytes; {limit}), which leaves more for func."
    )


def _screened(problem: Problem, settings: Settings, findings: Findings) -> tuple[Plan, Failure | None]:
    """Runs fast mode; the exact engine decides what the sketch leaves open, if that is affordable."""
    from fastgrad.checks.sketch import screen, screen_constant  # imported here to keep `import fastgrad` fast
    from fastgrad.checks.sketch_forward import screen_forward

    def exactly(what: str) -> tuple[Plan, Failure | None]:
        findings.notes.append(f"decided by the exact engine, because {what}")
        return _exact(problem, settings, findings)

    plan = make_sketch_plan(settings)
    if not problem.m:
        if isinstance(problem.func, Backward):
            problem.evaluate(False)  # raises if only the first call returned None for all inputs
        return plan, None  # nothing to compare
    if not problem.has_graph:
        screens: dict[Mode, Callable[[Problem, Settings], Screening]] = {"reverse": screen_constant}
    else:
        screens = {"reverse": screen} if settings.check_backward_ad else {}
        screens |= {"forward": screen_forward} if settings.check_forward_ad else {}
    for mode, run in screens.items():
        _raise_at_first(mode, problem, findings)
        try:
            found = run(problem, settings)
        except Exception as error:
            raise_unless_of_func(error)
            if not is_affordable(problem):
                raise
            _raise_at_first(mode, problem, findings)
            # func raised next to x. If it does not raise for steps of single coordinates, the exact engine may decide.
            raise_if_transient(error, partial(run, problem, settings))
            return exactly("func raised next to the inputs")
        if found.raised is not None:
            # The exact engine raises this in the order of the checks; if it does not, the exception is raised here.
            if is_affordable(problem):
                plan, failure = exactly("backward raised")
                if failure is not None:
                    return plan, failure
            raise found.raised
        if found.failure is not None and found.failure.kind in ("nonlinear", "raises") and is_affordable(problem):
            # The exact engine names the output and the input of the entry.
            what = "jvp" if found.failure.mode == "forward" else "backward"
            exact_plan, failure = exactly(f"{what} is not linear")
            return (plan, found.failure) if failure is None else (exact_plan, failure)
        if found.failure is not None:
            return plan, found.failure
        if found.undecided is None:
            findings.certificates += found.certificates
            continue
        if is_affordable(problem):
            return exactly("random directions gave no verdict")
        findings.note_undecided(found.undecided)
    return plan, None
