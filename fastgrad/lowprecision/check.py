"""The check of a function in a lower dtype: reference, outputs, VJPs and grad_outputs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from fastgrad.checks import order
from fastgrad.checks.complete import other_checks_failure
from fastgrad.checks.description import environment, subject, why_restored
from fastgrad.core.progress import Progress
from fastgrad.core.random import RandomState
from fastgrad.core.tensors import largest, largest_change, near
from fastgrad.lowprecision.comparison import Comparison
from fastgrad.lowprecision.probes import probes_of, random_cotangent
from fastgrad.lowprecision.reference import IncomparableError, Products, Reference, comparable
from fastgrad.lowprecision.verdict import Outcome, judge, judge_by_differences
from fastgrad.problem.arguments import as_tuple
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Plan
from fastgrad.report.failure import Failure
from fastgrad.report.low_precision import LowPrecision
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings
from fastgrad.verdict.comparison import Findings

SAME_DRAW = 16.0
"""Allowed difference of two runs of func with the same random state, in units of the largest value: atomic additions
may run in another order."""

_ISSUES_AT_X = {
    "kink": "there is a kink",
    "discontinuity": "func is discontinuous",
    "not converged": "the numerical derivative does not converge",
    "not finite": "the derivative is not finite",
}
"""Failures of a reference that may be due to x (`Failure.numerical_issue`), and clauses that describe them."""

_OF_ZEROS = ("not multiplied by grad_output", "undefined grad not zero")

NEARBY = 2.0**-10
"""Largest relative distance from x of the points where a reference is checked if it has such a failure at x."""


def obstacle(inputs: Any, settings: Settings) -> str:
    """The reason why inputs cannot be checked with measured rounding; empty if they can."""
    checked = [value for value in as_tuple(inputs) if isinstance(value, Tensor) and value.requires_grad]
    if any(value.layout is not torch.strided for value in checked):
        return "sparse and MKLDNN inputs are checked with tolerances only"
    if any(value.dtype is torch.complex32 for value in checked):
        return "complex32 inputs are checked with tolerances only"
    if settings.check_forward_ad:
        return "forward mode is checked with tolerances only"
    if not settings.check_backward_ad:
        return "without reverse mode, checks use tolerances only"
    return ""


def check(
    func: Callable[..., Any],
    inputs: Any,
    settings: Settings,
    reference: Callable[[], Reference],
    names: tuple[str, ...] = (),
) -> Report:
    """Checks the gradients of a function in a lower dtype with measured rounding.

    Parameters
    ----------
    func, inputs, settings, names
        As in `fastgrad.checks.order.check`.
    reference
        Makes the function to compare with. A reference that the caller passed must run. If the caller passed none and
        the function does not run in double precision, gradients are compared with differences.
    """
    arguments = as_tuple(inputs)
    why = obstacle(arguments, settings)
    if why and settings.reference is not None:
        raise NotImplementedError(f"reference= cannot be used here: {why}.")
    if why:
        report = order.check(func, inputs, settings, names)
        return replace(report, notes=(*report.notes, why))
    states = RandomState()
    try:
        return LowerCheck(func, arguments, settings, names, states).report(reference)
    finally:
        states.restore()


@dataclass
class LowerCheck:
    """One check in a lower dtype.

    Attributes
    ----------
    states
        The random states from which every call of func starts.
    comparison
        Comparison with a reference, once `report` has run; None if there was none.
    """

    func: Callable[..., Any]
    arguments: tuple[Any, ...]
    settings: Settings
    names: tuple[str, ...]
    states: RandomState
    comparison: Comparison | None = None

    def __post_init__(self) -> None:
        self._start = time.perf_counter()
        checked = [value for value in self.arguments if isinstance(value, Tensor) and value.requires_grad]
        dtypes = tuple(dict.fromkeys(str(value.dtype).removeprefix("torch.") for value in checked))
        self._outcome = Outcome(LowPrecision(dtypes=dtypes))

    def report(self, make: Callable[[], Reference]) -> Report:
        with (
            order.full_precision(self.arguments, self.settings) as notes,
            Progress(self.settings.progress) as progress,
            Problem(
                *(self.func, self.arguments, self.settings.masked, progress, self.names), warn_of_precision=False
            ) as problem,
        ):
            if not problem.has_graph:
                return order.check(self.func, self.arguments, self.settings, self.names)
            self._outcome.notes += notes
            self._outcome.note(unit=problem.unit_roundoff)
            if self._is_random(problem):
                self._outcome.note(
                    undecided="func is random: two runs with the same inputs and the same state of torch's generators "
                    "differ",
                    remedy="set the seed of func's own generator in every call",
                )
                return self._finished(problem)
            try:
                found = self._with_reference(problem, make)
            except IncomparableError as error:
                if self.settings.reference is not None:
                    raise ValueError(f"The reference cannot be used: {error}.") from error.__cause__
                note = f"compared with differences, because there is no reference in double precision: {error}"
                self._outcome.notes.append(note)
                if problem.n and problem.m:
                    judge_by_differences(problem, self.settings.seed, self._outcome)
                found = None
            return self._finished(problem) if found is None else found  # a report of a failure is falsy

    def _is_random(self, problem: Problem) -> bool:
        """Whether func is random although the states of torch's generators are restored.

        Also notes in `_draws` whether func changes these states. Afterwards, the graph is that of the original states.
        """
        first = problem.base()
        self.states.restore()
        again = problem.evaluate(True)
        self._draws = self.states.has_changed()
        self.states.restore()
        problem.graph()
        allowed = SAME_DRAW * problem.unit_roundoff * largest(first[first.isfinite()])
        return not bool(near(first, again, allowed).all())

    def _with_reference(self, problem: Problem, make: Callable[[], Reference]) -> Report | None:
        """Compares with the reference; returns a report if the reference itself is wrong."""
        reference = make()
        products = Products(reference, problem, self.states)
        self._outcome.note(reference=reference.name)
        failed = self._check_reference(problem, reference)
        if failed is not None or not self._outcome.is_undecided:
            return failed
        if not problem.n or not problem.m:
            return None
        probes = probes_of(problem, self.settings.fast_mode, products.vectorizes, self.settings.seed)
        self.comparison = judge(problem, products, probes, self._outcome)
        if self._draws and self._outcome.failure is not None:
            self._outcome.failure, self._outcome.causes = None, ()
            self._outcome.note(
                undecided="func draws random numbers, and its gradients differ from those of the reference by more "
                "than rounding explains; in double precision torch may draw different numbers",
                remedy="draw them in the same dtype in func and in the reference, or pass them as an input",
            )
        if products.failures:
            names = ", ".join(sorted(products.failures))
            self._outcome.notes.append(f"operators whose rounding was not measured: {names}")
        return None

    def _check_reference(self, problem: Problem, reference: Reference) -> Report | None:
        """Checks the reference in double precision; returns its report if it fails."""
        func = self._seeded(reference.func) if self._draws else reference.func
        report, nearby = comparable(reference.name, partial(self._first_that_passes, func, reference.arguments))
        if nearby:
            self._outcome.notes.append(f"the reference was checked next to the inputs, because at the inputs {nearby}")
        if report.failure is not None and _computes_coarsely(report) and self.settings.reference is None:
            self._outcome.note(reference="")
            raise IncomparableError(f"{reference.name} computes in a lower dtype internally")
        self._outcome.note(reference_report=report.to_dict())
        if report.failure is None:
            return None
        # A derivative that is not finite, at x and next to it, is wrong if func is finite.
        is_wrong = report.failure.numerical_issue == "not finite" and bool(problem.base().isfinite().all())
        if (report.failure.numerical_issue is not None and not is_wrong) or _computes_coarsely(report):
            self._outcome.note(
                undecided="the reference cannot be checked in double precision: "
                + (report.causes[0].text if report.causes else str(report.failure.numerical_issue)),
                remedy="pass a reference= that computes in double precision throughout, and inputs without kinks",
            )
            return None
        note = (
            f"{reference.name} itself is wrong (found by differences in double precision), so rounding is not the "
            f"cause; the gradients in {', '.join(self._outcome.precision.dtypes)} were not compared"
        )
        return replace(report, settings=self.settings, precision=self._outcome.precision, notes=(*report.notes, note))

    def _first_that_passes(self, func: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Report, str]:
        """The report of a reference at x or, if it fails only at x, next to x; and a clause with the reason, or ""."""
        report = order.check(func, arguments, self.settings, self.names, explain=False)
        if report.failure is None:
            return report, ""
        explained = order.check(func, arguments, self.settings, self.names)
        if explained.failure is None:
            return report, ""  # the second check did not fail, but the first failure counts
        numerical_issue = str(explained.failure.numerical_issue)
        for factor in (-NEARBY, NEARBY) if numerical_issue in _ISSUES_AT_X else ():
            nearby = order.check(func, _nearby(arguments, factor), self.settings, self.names, explain=False)
            if nearby.failure is None:
                return nearby, _ISSUES_AT_X[numerical_issue]
        return explained, ""

    def _seeded(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps func: every call starts from the original random state."""

        @wraps(func)
        def seeded(*arguments: Any) -> Any:
            self.states.restore()
            return func(*arguments)

        return seeded

    def _attributes(self, problem: Problem) -> Failure | None:
        """The failure of a check other than that of values, as in double precision; None if all pass."""
        failure = self._two_runs(problem) or other_checks_failure(problem, self.settings, Findings())
        if failure is not None and failure.kind in _OF_ZEROS and self._outcome.precision.out_of_range:
            self._outcome.notes.append(
                f"zero grad_outputs were not checked ({failure.kind}): if the derivative is not finite, "
                "its product with zero is not zero"
            )
            failure = None
        return failure

    def _two_runs(self, problem: Problem) -> Failure | None:
        """A failure if two runs of backward differ, or if a gradient has the wrong size or dtype; None otherwise."""
        if not problem.n or not problem.m:
            return None
        v = random_cotangent(problem, self.settings.seed, 1)
        (left, right), match = problem.vjps_of(torch.stack([v, v]), [-1, -1])
        if self.settings.check_grad_dtypes and not match.dtypes:
            return Failure("dtype")
        if not match.sizes:
            return Failure("size")
        return Failure("nondeterministic") if largest_change(left, right) > self.settings.nondet_tol else None

    def _finished(self, problem: Problem) -> Report:
        outcome = self._outcome
        if outcome.is_undecided:
            outcome.failure = self._attributes(problem)
        if problem.mutates_inputs:
            outcome.notes.append(why_restored(problem))
        precision = outcome.precision
        reason = "a lower dtype, compared with double precision" if precision.reference else "a lower dtype"
        return Report(
            failure=outcome.failure,
            settings=self.settings,
            plan=Plan("reference" if precision.reference else "differences", 0, 0, True, reason),
            n=problem.n,
            m=problem.m,
            evaluations=problem.evaluations,
            vjps=problem.vjps,
            seconds=time.perf_counter() - self._start,
            notes=tuple(outcome.notes),
            causes=outcome.causes,
            input_names=self.names,
            undecided=math.inf if precision.undecided else None,
            environment=environment(problem.device),
            subject=subject(self.func, problem) if outcome.failure is not None else None,
            precision=precision,
        )


def _computes_coarsely(report: Report) -> bool:
    """Whether a reference in double precision computes in a lower dtype internally."""
    coarse = report.evidence is not None and report.evidence.output_dtype is not None
    named = any(cause.name == "low precision" for cause in report.causes[:1])
    return coarse or named or (report.failure is not None and report.failure.numerical_issue == "low precision")


def _nearby(arguments: tuple[Any, ...], factor: float) -> tuple[Any, ...]:
    """Arguments next to the given ones: each element of a checked tensor is changed by a random share of itself.

    The share is between factor / 2 and factor. Zeros are changed by a share of the mean magnitude of their tensor.
    """
    made: dict[int, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for value in arguments:
        if isinstance(value, Tensor) and value.requires_grad and id(value) not in made:
            plain = value.detach()
            drawn = torch.rand(plain.shape, generator=generator, dtype=torch.float64, device="cpu")
            part = factor * (0.5 + 0.5 * drawn)
            size = torch.where(plain == 0, plain.abs().mean(), plain) if plain.numel() else plain
            made[id(value)] = (plain + part.to(plain.device) * size).requires_grad_()
    return tuple(made.get(id(value), value) if isinstance(value, Tensor) else value for value in arguments)
