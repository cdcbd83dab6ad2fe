"""Evidence after a failure: entries around the worst one, and experiments with func and its backward.

The evidence does not change the verdict. Calls and time are bounded; an experiment that raises gives no evidence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fastgrad.core.phases import phase
from fastgrad.diagnosis.causes import diagnose
from fastgrad.diagnosis.experiments import BackwardExperiments, FuncExperiments
from fastgrad.diagnosis.hypotheses import HYPOTHESIS_CALLS, Hypotheses
from fastgrad.diagnosis.locations import place_rules
from fastgrad.diagnosis.samples import Samples
from fastgrad.diagnosis.wording import wording
from fastgrad.problem.coordinates import Block
from fastgrad.problem.problem import Problem
from fastgrad.report.evidence import Cause, Explanation, Sample
from fastgrad.report.messages import MAX_CAUSES, names_of
from fastgrad.report.report import Report

_GENERAL_CAUSES = {"missing reduction", "zero gradient"}
"""Causes from entries that may have a more specific reason: backward treats an operator's result as a constant."""


@phase("evidence")
def diagnosed(problem: Problem, report: Report, known_sample: Sample | None = None) -> Report:
    """The report of a failed check, with entries of the failing pair, evidence and probable causes added.

    The experiments take at most MORE_CALLS calls more than the check itself took, and about one second.

    Parameters
    ----------
    report
        The report of the check that failed, with its failure, plan, calls and seconds.
    known_sample
        Entries of the failing pair that the engine measured. They are used if there are no whole matrices and measuring
        all entries takes too many calls.
    """
    failure = report.failure
    kinds = ("mismatch", "nonlinear", "raises", "nondeterministic", "not multiplied by grad_output")
    # For other kinds, calling func again gives no further evidence.
    if failure is not None and failure.kind in kinds and problem.has_graph and problem.n and problem.m:
        return _Investigation(problem, report, failure, known_sample).run()
    return replace(report, causes=diagnose(report))


class _Investigation(Samples, BackwardExperiments, FuncExperiments):
    """Runs the experiments: cheap and conclusive ones first, some others only if these do not explain the failure."""

    def run(self) -> Report:
        """Runs the experiments; returns the report with entries, evidence and causes."""
        causes: tuple[Cause, ...] = ()
        failure, sample = self._failure, None
        if failure.kind == "mismatch" and failure.comparison is not None and self._pair:
            sample = self._sample(*self._pair, failure.comparison)
        self._try(2, self._repeatability_of_func)
        if failure.mode == "reverse":
            self._vjps(sample)
        if failure.kind == "mismatch":
            self._other_measurements()
            if failure.mode == "reverse" and self._pair:
                names, left = self._name_of, self._left
                hypotheses = Hypotheses(self._problem, self._settings, *self._pair, self._record, names, left, sample)
                causes = self._hypotheses(hypotheses)
        evidence = replace(self._evidence, calls=self._calls() - self._before)
        report = replace(self._report, sample=sample, evidence=evidence)
        return replace(report, causes=causes or diagnose(report))

    def _name_of(self, block: Block) -> str:
        """The name of an input in the message."""
        place = replace(self._failure, input=block.index, input_position=block.position)
        return names_of(self._report, place)[1]

    def _hypotheses(self, hypotheses: Hypotheses) -> tuple[Cause, ...]:
        """Tests hypotheses by random sums over all entries until one explains them.

        Returns the probable causes if these end the search; otherwise none.
        """
        sample = hypotheses.sample
        self._explain(hypotheses.independent)
        self._explain(hypotheses.swapped)
        settles = self._failure.numerical_issue is None  # if there is an issue, func itself explains the failure
        if settles:
            self._explain(hypotheses.cut)
        if sample is None or not sample.complete:
            self._explain(hypotheses.rearranged)
        if sample is not None:
            self._confirm_places(hypotheses, sample)
        causes = diagnose(replace(self._report, sample=sample, evidence=self._evidence))
        if causes and causes[0].name not in _GENERAL_CAUSES:
            return causes
        if settles:
            self._explain(hypotheses.taken_for_constant)
        if not causes:
            self._explain(hypotheses.multiplied)
            self._explain(hypotheses.result_for_input)
            self._explain(hypotheses.at_changed_input)
        return ()

    def _confirm_places(self, hypotheses: Hypotheses, sample: Sample) -> None:
        """Tests the most probable of the rules for positions that are derived from a sample, not from all entries."""
        names, own = wording(self._report, self._failure).names, self._settings.of(self._failure.input or 0)
        rules = sorted(place_rules(sample, names, own), key=lambda rule: -rule.cause.confidence)
        found: list[tuple[str, bool]] = []
        for rule in rules:
            if rule.sampled is None or sum(is_right for _, is_right in found) == MAX_CAUSES:
                continue
            is_right = self._try(HYPOTHESIS_CALLS, partial(hypotheses.confirms, rule))
            if is_right is not None:
                found.append((rule.cause.text, is_right))
        self._note(places=tuple(found) or None)

    def _explain(self, hypothesis: Callable[[], Explanation | None]) -> None:
        if self._evidence.explanation is None:
            self._note(explanation=self._try(HYPOTHESIS_CALLS, hypothesis))
