"""The order of the checks: outputs, Jacobians, linearity, attributes -> Report."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastgrad._version import __version__
from fastgrad.checks.one_block import (
    agrees,
    is_small,
    jacobian,
    product_at_hand,
    runs_single_rows,
    same_afterwards,
    single_rows,
    take_calls,
    whole_backward,
)
from fastgrad.checks.small import small_check
from fastgrad.checks.small_result import SmallCheck
from fastgrad.core.backends import exact_libraries
from fastgrad.core.errors import raise_if_transient, raise_unless_of_func
from fastgrad.core.memory import OUT_OF_MEMORY
from fastgrad.core.native import Rows
from fastgrad.core.phases import TIMED_COLUMNS, TIMED_SECONDS, Stopwatch
from fastgrad.core.progress import Progress
from fastgrad.engines import dense
from fastgrad.engines.blocks import REPEATED_ROWS, JacobianBlock
from fastgrad.engines.executor import RefusedError
from fastgrad.engines.plan import (
    is_affordable,
    looks_first,
    make_plan,
    make_sketch_plan,
    sketches,
    small_plan,
    tries_structure,
    with_less_memory,
)
from fastgrad.engines.probes import PROBES
from fastgrad.problem.arguments import as_tuple
from fastgrad.problem.coordinates import block_with
from fastgrad.problem.first_look import FirstLook, first_look
from fastgrad.problem.problem import Problem
from fastgrad.problem.second_order import Backward
from fastgrad.problem.signature import function_name, kind_of, parameter_names, source_of
from fastgrad.problem.validation import disabled_gradients
from fastgrad.report.data import Certificate, Environment, Failure, Part, Plan, Sample, Settings, Subject
from fastgrad.report.report import Report
from fastgrad.verdict.comparison import Findings, PairComparison
from fastgrad.verdict.confirm import located_pair, mismatch_failure
from fastgrad.verdict.grad_outputs import (
    check_batched_gradients,
    check_batched_tangents,
    check_undefined_grads,
    check_undefined_tangents,
    check_zero_grad_output,
)
from fastgrad.verdict.linearity import (
    LinearityProof,
    linear_backward,
    moved_once,
    moving_repeat,
    moving_row,
    nondeterministic,
    nonlinear_repeat,
    rerun,
)
from fastgrad.verdict.recording import check_recorded_gradients
from fastgrad.verdict.repeated_calls import RepeatedCalls
from fastgrad.verdict.tangents import TangentProof, nondeterministic_jvp, repeated_tangents_failure

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
        What messages call the inputs; by default they count them.
    explain
        Gather evidence after a failure and look for probable causes.
    partition
        The ranks that share the work and all return the report, and the checkpoint; None: neither.

    Returns
    -------
    Report
        Errors of func and of backward, and of the arguments, are raised instead.
    """
    start = time.perf_counter()
    arguments = as_tuple(inputs)
    small = small_check(func, arguments, settings, isinstance(func, Backward)) if partition is None else None
    if small is not None and small.passes:
        return _report_of_small(small, settings, names, start)
    make_problem: Callable[..., Problem] = Problem if partition is None else partition.problem
    if small is not None:
        make_problem = partial(Problem, traced=small.problem)
    with (
        _exact_libraries(arguments, settings) as notes,
        Progress(settings.progress if partition is None or partition.leads else False) as progress,
        make_problem(
            func,
            arguments,
            settings.masked,
            progress,
            names,
            _scales(settings) if settings.inputs else (),
            # Differences of a backward use gradients without a graph, as in training; check_recorded_gradients compares
            # gradients with a graph with them.
            records_differences=not isinstance(func, Backward),
        ) as problem,
    ):
        findings = Findings() if small is None else _go_on_from(small, problem, settings)

        def run() -> Report:
            report = _report(problem, settings, names, findings, notes, start, isinstance(func, Backward))
            if not explain or report.failure is None:
                return report
            return _diagnosed(problem, replace(report, subject=subject(func, problem)), findings.sample)

        return run() if partition is None else partition.report(run)


def _go_on_from(small: SmallCheck, problem: Problem, settings: Settings) -> Findings:
    """The results of a small check, for the complete check."""
    columns = small.columns
    if isinstance(columns, tuple):
        problem.raise_changed(*columns, settings.eps)
        columns = None
    problem.vjps, problem.jvps = small.vjps, small.jvps
    return Findings(
        backward=small.backward,
        early=small.raised,
        columns=columns,
        batched=small.batched,
        moved=small.moved,
        jvp_moved=small.jvp_moved,
        domains_match=small.domains_match,
        products=small.products,
        tangents=small.tangents,
    )


def _report_of_small(small: SmallCheck, settings: Settings, names: tuple[str, ...], start: float) -> Report:
    """The report of a small check that passes."""
    problem = small.problem
    certificates: tuple[Certificate, ...] = ()
    if small.errors is None and small.tangent_errors is None:
        plan = make_sketch_plan(settings)
        if settings.check_backward_ad:
            from fastgrad.checks.sketch import certificates_of  # imported here to keep `import fastgrad` fast

            certificates = certificates_of(settings, small.bound)
    else:
        plan = small_plan(problem.n, problem.m, settings.engine)
        if settings.check_backward_ad and problem.m > 1:
            certificates = (linear_backward(PROBES, settings.atol),)
    return Report(
        failure=None,
        settings=settings,
        plan=plan,
        n=problem.n,
        m=problem.m,
        evaluations=problem.evaluator.evaluations,
        vjps=small.vjps,
        jvps=small.jvps,
        seconds=time.perf_counter() - start,
        phases={"first evaluation": problem.seconds, **small.seconds},
        input_names=names,
        pairs=tuple(small.pairs()),
        certificates=(*certificates, *small.certificates),
        environment=environment(problem.device),
    )


def _report(
    problem: Problem,
    settings: Settings,
    names: tuple[str, ...],
    findings: Findings,
    notes: list[str],
    start: float,
    of_backward: bool,
) -> Report:
    """The report without causes; notes: on libraries; start: when the check began, by `time.perf_counter`."""
    seconds = {"first evaluation": time.perf_counter() - start}
    worth_it = problem.n >= TIMED_COLUMNS or seconds["first evaluation"] >= TIMED_SECONDS
    with Stopwatch(seconds) if worth_it else nullcontext():
        plan, failure = _first_failure(problem, settings, findings, of_backward)
    if failure is not None and failure.comparison is not None and all(pair.agrees for pair in findings.pairs):
        findings.add_pair(located_pair(failure, failure.comparison))
    if problem.device.type == "cuda":
        findings.notes += notes
    findings.notes += _notes(problem)
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


def _notes(problem: Problem) -> list[str]:
    """Unusual properties of func and of the caller's modes."""
    disabled = disabled_gradients()
    changes = "func changes its inputs, or they contain NaN; they were restored around every evaluation"
    return ([disabled] if disabled else []) + ([changes] if problem.mutates_inputs else [])


def subject(func: Callable[..., Any], problem: Problem) -> Subject:
    """Checked function, for a report."""
    parameters = parameter_names(func)
    if isinstance(func, Backward):
        parameters = parameters[: func.count]  # grad_outputs come after them
    kinds = {block.position: kind_of(block.tensor) for block in problem.inputs}
    return Subject(
        function_name(func),
        parameters,
        tuple(kinds.get(position, "") for position in range(max(kinds, default=-1) + 1)),
        tuple(kind_of(block.tensor) for block in problem.outputs),
        source_of(func),
        os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0],
    )


def _diagnosed(problem: Problem, report: Report, at_hand: Sample | None) -> Report:
    """The report of a failed check, with evidence and probable causes."""
    from fastgrad.diagnosis.evidence import diagnosed  # only here: a check that passes needs none

    return diagnosed(problem, report, at_hand)


def _exact_libraries(arguments: tuple[Any, ...], settings: Settings) -> AbstractContextManager[list[str]]:
    """A context without TF32 and the like, if CUDA's libraries may be in use; it yields notes for the report."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext([])
    checked = [value for value in arguments if isinstance(value, Tensor) and value.requires_grad]
    doubles = all(value.dtype in (torch.float64, torch.complex128) for value in checked)
    return exact_libraries(settings.nondet_tol == 0, doubles)


def _scales(settings: Settings) -> list[tuple[float, float]]:
    """For each input: its step, relative to eps, and the weight of its errors in sums: less if its atol is larger."""
    return [
        (own.eps / settings.eps, settings.atol / own.atol if 0 < settings.atol < own.atol else 1.0)
        for own in settings.inputs
    ]


def _first_failure(
    problem: Problem, settings: Settings, findings: Findings, is_backward: bool
) -> tuple[Plan, Failure | None]:
    if is_backward and problem.has_graph:
        problem.base()  # now, while the first evaluation gives it
    if sketches(problem, settings) and findings.backward is None:
        runs_backward = problem.has_graph and settings.check_backward_ad
        calls = RepeatedCalls(problem, settings) if runs_backward else None
        if calls is not None:
            calls.run_first()
            if findings.products is not None:
                calls.add(*findings.products)
        plan, failure = _screened(problem, settings, findings)
        if failure is None and calls is not None:
            failure = calls.failure()
            findings.certificates += calls.certificates()
    else:
        plan, failure = _exact(problem, settings, findings)
    if failure is None and problem.has_graph:
        failure = _attribute_failure(problem, settings, findings)
    if (
        (failure is None or failure.kind == "mismatch")
        and problem.has_graph
        and is_backward
        and torch.is_grad_enabled()
    ):
        failure = check_recorded_gradients(problem, settings) or failure
    if failure is None and settings.check_forward_ad:
        failure = _forward_failure(problem, settings, findings)
    if failure is None and findings.moved:
        failure = nondeterministic(problem.outputs[0])
    if failure is None and findings.early is not None:
        raise findings.early  # backward raised early, and not again in the order of the checks
    return plan, failure


def _forward_failure(problem: Problem, settings: Settings, findings: Findings) -> Failure | None:
    """The failure of JVPs that do not come again, and of tangents whose domain was wrong in some calls."""
    failure = None
    if findings.tangents is not None:
        failure = repeated_tangents_failure(problem, settings, *findings.tangents)
    if failure is None and findings.jvp_moved:
        failure = nondeterministic_jvp(problem.outputs[0], "some runs were right and others were not")
    if failure is None and settings.check_grad_dtypes and not (findings.domains_match and problem.domains_match):
        failure = Failure("tangent dtype", mode="forward")
    return failure


def _attribute_failure(problem: Problem, settings: Settings, findings: Findings) -> Failure | None:
    """The checks besides the Jacobians: undefined, zero and batched grad_outputs and tangents."""
    failure, backward = None, findings.backward
    if settings.check_forward_ad and settings.check_undefined_grad:
        failure = check_undefined_tangents(problem, settings)
    if failure is None and settings.check_batched_forward_grad:
        failure = check_batched_tangents(problem, settings)
    if failure is not None or not settings.check_backward_ad:
        return failure
    if settings.check_batched_grad:
        failure = check_batched_gradients(problem, settings, findings.batched)
    if backward is not None and backward.are_zero:
        return failure
    if failure is None:
        failure = check_zero_grad_output(problem, settings, backward.zeros[0] if backward else None)
    if failure is None and settings.check_undefined_grad:
        failure = check_undefined_grads(problem, backward.zeros[1:] if backward else None)
    return failure


def _exact(problem: Problem, settings: Settings, findings: Findings) -> tuple[Plan, Failure | None]:
    """Compares every entry of every Jacobian, and a few VJPs from before with the same VJPs afterwards."""
    runs_backward = problem.has_graph and settings.check_backward_ad
    calls = RepeatedCalls(problem, settings) if runs_backward else None
    # This must be on the first graph. If nothing else runs before whole_backward, its VJPs are the first ones.
    at_once = is_small(problem, settings) and runs_single_rows(problem) and not looks_first(problem, settings)
    if calls is not None and findings.backward is not None:
        take_calls(problem, findings.backward, calls)
    elif calls is not None and not at_once:
        calls.run_first()
    if calls is not None and findings.products is not None:
        calls.add(*findings.products)
    plan, failure = _all_entries(problem, settings, calls, findings)
    if calls is not None and findings.early is None and (failure is None or failure.kind == "mismatch"):
        # If an entry is wrong in some calls only, report that calls differ, which is the cause.
        failure = calls.failure(one_round=failure is not None) or failure
        findings.certificates += calls.certificates()
    return plan, failure


def _all_entries(
    problem: Problem, settings: Settings, calls: RepeatedCalls | None, findings: Findings
) -> tuple[Plan, Failure | None]:
    """Compares every entry of every Jacobian: those of a sparsity pattern if that costs less, otherwise all."""
    look, obstacle = None, ""
    try:
        look = first_look(problem, settings) if looks_first(problem, settings) else None
        if look is not None and calls is not None and tries_structure(problem, settings, look):
            from fastgrad.checks.compressed import check_by_structure  # imported here to keep `import fastgrad` fast

            outcome = check_by_structure(problem, settings, look, calls, findings)
            if outcome is not None:
                return outcome.plan, outcome.failure
    except OUT_OF_MEMORY:
        obstacle = "; the compressed engine ran out of memory"
    plan = make_plan(problem, settings, look)
    plan = replace(plan, reason=plan.reason + obstacle) if obstacle else plan
    count = 2 * problem.n + problem.m
    problem.progress.start(count, look.measured * count if look else 0.0, f"{count} calls")
    while True:
        own = Findings(backward=findings.backward, early=findings.early, columns=findings.columns)
        try:
            plan, failure = _dense(problem, plan, settings, look, own, calls)
        except OUT_OF_MEMORY as error:
            smaller = with_less_memory(problem, plan)
            if smaller is None:
                raise MemoryError(_want_of_memory(problem, plan, settings, error)) from error
            plan = smaller
        else:
            findings.add(own)
            return plan, failure


def _want_of_memory(problem: Problem, plan: Plan, settings: Settings, error: BaseException) -> str:
    limit = "by default a share of the free memory" if settings.memory_limit is None else f"now {settings.memory_limit}"
    return (
        f"The check ran out of memory, with {plan.memory} bytes for {plan.columns_per_pass} of {problem.n} columns of "
        f"the Jacobian at a time: {str(error) or type(error).__name__} In addition, func and its graph need memory: "
        f"make the inputs smaller, or leave more for func by a lower memory_limit= (in bytes; {limit})."
    )


def _dense(
    problem: Problem,
    plan: Plan,
    settings: Settings,
    look: FirstLook | None,
    findings: Findings,
    calls: RepeatedCalls | None,
) -> tuple[Plan, Failure | None]:
    judge = _jacobian_failure if problem.has_graph else _nonzero_numerical
    if plan.batch is not None or plan.replayed or plan.rows_replayed:
        if calls is not None:
            calls.run_first()
        own = Findings()
        try:
            failure = judge(problem, plan, settings, own, calls)
        except RefusedError as error:
            reason = f"one by one after all: {error}"
        else:
            if failure is None:
                findings.add(own)
                return plan, None
            reason = "a mismatch is followed up one by one"
        reason = f"{plan.reason}; {reason}"
        plan = replace(plan, batch=None, replayed=False, rows_replayed=False, reason=reason)
    elif is_small(problem, settings) and findings.backward is None and findings.early is None:
        findings.on_first_graph = problem.evaluations == 1
        try:
            findings.backward = whole_backward(problem, settings, look.measured if look else problem.seconds)
        except Exception as error:
            raise_unless_of_func(error)
            findings.early = error
        else:
            if calls is not None:
                take_calls(problem, findings.backward, calls)
    return plan, judge(problem, plan, settings, findings, calls)


def _screened(problem: Problem, settings: Settings, findings: Findings) -> tuple[Plan, Failure | None]:
    """Fast mode; the exact engine decides what it leaves open, if that is affordable."""
    from fastgrad.checks.sketch import (  # imported here to keep `import fastgrad` fast
        screen,
        screen_constant,
        screen_forward,
    )

    def exactly(what: str) -> tuple[Plan, Failure | None]:
        findings.notes.append(f"{what} was decided by the exact engine")
        return _exact(problem, settings, findings)

    plan = make_sketch_plan(settings)
    if not problem.has_graph:
        screens = [screen_constant]
    else:
        modes = (settings.check_backward_ad, screen), (settings.check_forward_ad, screen_forward)
        screens = [run for is_checked, run in modes if is_checked]
    for run in screens:
        try:
            found = run(problem, settings)
        except Exception as error:
            raise_unless_of_func(error)
            if not is_affordable(problem):
                raise
            # func raised next to x. If it accepts steps of single coordinates, the exact engine may still decide.
            raise_if_transient(error, partial(run, problem, settings))
            return exactly("a check whose func raised next to the inputs")
        if found.raised is not None:
            # The exact engine raises it in the order of the checks; if it does not raise again, it is raised here.
            if is_affordable(problem):
                plan, failure = exactly("a backward that raised")
                if failure is not None:
                    return plan, failure
            raise found.raised
        if found.failure is not None and found.failure.kind == "nonlinear" and is_affordable(problem):
            # The exact engine names the output and the input of the entry.
            exact_plan, failure = exactly("which entry a backward that is not linear gets wrong")
            return (plan, found.failure) if failure is None else (exact_plan, failure)
        if found.failure is not None:
            return plan, found.failure
        if found.undecided is None:
            findings.certificates += found.certificates
            continue
        if is_affordable(problem):
            return exactly("what the sketch left open")
        findings.note_undecided(found.undecided)
    return plan, None


@lru_cache(8)
def environment(device: torch.device) -> Environment:
    """Versions and device, for a report."""
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    return Environment(__version__, str(torch.__version__), platform.python_version(), name)


def _nonzero_numerical(
    problem: Problem, plan: Plan, settings: Settings, findings: Findings, _: RepeatedCalls | None
) -> Failure | None:
    """If no output requires grad, func must not depend on its inputs."""
    for first, columns in dense.numerical_columns(problem, plan, settings):
        if bool(columns.any()):
            column, row = (int(i) for i in columns.nonzero()[0])
            output, block = block_with(problem.outputs, row), block_with(problem.inputs, first + column)
            return Failure(
                "nonzero numerical gradient",
                output=output.index,
                input=block.index,
                output_position=output.position,
                input_position=block.position,
                detail=f"{columns[column, row].item():.6g}",
            )
    findings.certificates.append(Certificate("func does not depend on its inputs", "every column, bit by bit", 0.0))
    return None


def _jacobian_failure(
    problem: Problem, plan: Plan, settings: Settings, findings: Findings, calls: RepeatedCalls | None
) -> Failure | None:
    """The Jacobians, pass by pass over numerical columns; reverse mode is judged before forward mode."""
    nothing_to_compare = not problem.n and all(block.elements is None for block in problem.inputs)
    if not problem.m or nothing_to_compare:
        return None
    columns_at_hand = dense.numerical_columns(problem, plan, settings)
    backward, rows_remain = findings.backward, settings.check_backward_ad
    if backward is not None:
        columns = findings.columns
        if columns is None:
            columns = dense.columns_one_by_one(problem, settings, 0, problem.n, plan.record_graph)
        # Not for a custom backward, because repeated calls test the same; and not for a later graph, because it was
        # recorded after other evaluations anyway.
        is_asked = findings.on_first_graph and not problem.is_custom
        if is_asked and not same_afterwards(problem, settings, *product_at_hand(problem, settings, backward)):
            backward, findings.moved = None, True
        elif agrees(problem, settings, backward, columns, findings):
            if calls is not None and calls.rows:
                calls.see_all(jacobian(problem, backward))
            if not settings.check_forward_ad:
                return None
            rows_remain = False
        columns_at_hand = iter([(0, columns)])
    rows_repeated = all(output.tensor.numel() <= REPEATED_ROWS for output in problem.outputs)
    moving = partial(moving_row, problem, settings, plan.rows_per_block)
    proof = LinearityProof(problem, settings, rows_repeated, moving) if problem.m > 1 else None
    forward = ForwardComparison(problem, plan, settings, findings) if settings.check_forward_ad else None
    rows_at_hand: Sequence[Rows] = ()
    if backward is not None:
        rows_at_hand = single_rows(backward)
        if proof is not None:
            proof.take(backward.products, backward.movement)
    for first, columns in columns_at_hand:
        if rows_remain:
            for blocks in dense.row_blocks(problem, plan, first, columns, rows_at_hand):
                failure = _judge(problem, plan, blocks, settings, proof, findings, calls)
                if failure is not None:
                    return failure
        if forward is not None:
            forward.add(first, columns)
    if rows_remain and proof is not None:
        failure = _proof_failure(problem, proof, settings)
        if failure is not None:
            return failure
        findings.certificates.append(proof.certificate())
    return forward.failure() if forward is not None else None


def _proof_failure(problem: Problem, proof: LinearityProof, settings: Settings) -> Failure | None:
    """The proof's failure, or that of a gradient with a wrong layout: converting it to strided may raise."""
    try:
        return proof.failure()
    except RuntimeError:
        failure = check_zero_grad_output(problem, settings)
        if failure is None:
            raise
        return failure


class ForwardComparison:
    """The Jacobians by forward-mode AD against the numerical ones, and the linearity of the jvp."""

    def __init__(self, problem: Problem, plan: Plan, settings: Settings, findings: Findings) -> None:
        self._problem = problem
        self._plan = plan
        self._settings = settings
        self._findings = findings
        self._proof = TangentProof(problem, settings)
        self._pairs: dict[tuple[bool, int, int], tuple[Part, PairComparison]] = {}
        self._domains_match = True

    def add(self, first: int, columns: Tensor) -> None:
        """Adds the numerical columns from `first` on, shape (count, m): one evaluation each."""
        tangents, domains_match = self._problem.tangent_columns(first, columns.shape[0])
        self._domains_match &= domains_match
        for block in dense.tangent_blocks(self._problem, first, columns, tangents):
            # In torch's order of judging: imaginary parts come, with the real inputs, before real parts.
            key = block.part == "real", block.output.index, block.input.index
            if key not in self._pairs:
                own = self._settings.of(block.input.index)
                pair = PairComparison(block.output, block.input, own.atol, own.rtol, "forward")
                self._pairs[key] = block.part, pair
            self._pairs[key][1].add(block.analytical, block.numerical, block.first_element, 0)
            self._proof.add(block)

    def failure(self) -> Failure | None:
        """The verdict, once all columns are in."""
        if self._settings.check_grad_dtypes and not self._domains_match:
            return Failure("tangent dtype", mode="forward")
        for key in sorted(self._pairs):
            part, pair = self._pairs[key]
            failure = mismatch_failure(self._problem, self._plan, pair, part, self._settings, self._findings)
            if failure is not None:
                return failure
        failure = self._proof.failure()
        if failure is None:
            self._findings.certificates.append(self._proof.certificate())
        return failure


def _judge(
    problem: Problem,
    plan: Plan,
    blocks: Iterable[JacobianBlock],
    settings: Settings,
    proof: LinearityProof | None,
    findings: Findings,
    calls: RepeatedCalls | None,
) -> Failure | None:
    """One part of one output: dtype, size, determinism, then the comparison, inputs in their order."""
    pairs: dict[int, PairComparison] = {}
    dtypes_match = sizes_match = True
    again: tuple[Tensor, Tensor] | None = None
    repeat: Failure | None = None
    for block in blocks:
        dtypes_match &= block.match.dtypes
        sizes_match &= block.match.sizes
        if not block.match.repeats and repeat is None:
            if again is None:
                repeat, again = moving_repeat(problem, block, settings), rerun(problem, block)
            repeat = repeat or moved_once(block, again, settings) or nonlinear_repeat(block, settings)
        pair = pairs.get(block.input.index)
        if pair is None:
            own = settings.of(block.input.index) if settings.inputs else settings
            pair = pairs[block.input.index] = PairComparison(block.output, block.input, own.atol, own.rtol)
        pair.add(block.analytical, block.numerical, block.first_row, block.first_column)
        if block.unspecified is not None:
            entry = block.unspecified
            pair.add_unspecified(block.first_row + entry.row, entry.element, entry.value)
        if proof is not None:
            proof.add(block)
        if calls is not None:
            calls.see(block)
    if settings.check_grad_dtypes and not dtypes_match:
        return Failure("dtype", output=block.output.index, output_position=block.output.position, part=block.part)
    if not sizes_match:
        return Failure("size", output=block.output.index, output_position=block.output.position, part=block.part)
    if repeat is not None and repeat.kind == "nondeterministic":
        return repeat
    for pair in pairs.values():
        failure = mismatch_failure(problem, plan, pair, block.part, settings, findings)
        if failure is not None:
            return failure
    return repeat
