"""The verdict of a comparison in a lower dtype: a failure, undecided, or the smallest error that it detects."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fastgrad.core.native import Layout
from fastgrad.diagnosis.value_causes import fit
from fastgrad.lowprecision import differences
from fastgrad.lowprecision.comparison import Common, Comparison, rounded_entry
from fastgrad.lowprecision.probes import FACTOR, LAYOUTS, SCALED, Probes, one_row, row_behind
from fastgrad.lowprecision.reference import Products
from fastgrad.lowprecision.rounding import SMALLEST_NORMAL
from fastgrad.problem.coordinates import block_with
from fastgrad.problem.problem import Problem
from fastgrad.report.evidence import Cause
from fastgrad.report.failure import Failure, FailureKind
from fastgrad.report.low_precision import LowPrecision, RoundedEntry
from fastgrad.report.number_text import count, digits_apart

MIN_EFFECTIVE = 12.0
"""Least number of entries for a common relative error; if there are fewer, the entries themselves are compared."""

MAX_OF_SUMS = 4.0
"""Error of a sum over outputs, in units of the allowed error, that is accepted without a wrong row: a kernel that adds
in a lower dtype rounds more often than an operator of the reference."""

MAX_LOCATED = 4
"""Largest number of wrong components that are traced to a row, the worst first."""

MAX_HIDDEN = 0.9
"""Largest share of the significant entries that rounding may hide; if it hides more, the check is undecided."""

_LAYOUT_NAMES = {
    Layout.NON_CONTIGUOUS: "has gaps between its elements",
    Layout.OFFSET: "has a storage offset",
    Layout.EXPANDED: "is expanded, with stride 0",
}

MAX_TIMES = 1e6
"""Ratios of a difference to its rounding are printed if they are smaller than this."""

_SMALLER_OR_WIDER = "make the inputs smaller, or compute in a wider dtype"

SAME_FACTOR = 0.05
"""Largest relative residual with which a common factor of wrong entries is named."""


@dataclass
class Outcome:
    """The results so far; failure and precision are those of a report."""

    precision: LowPrecision
    failure: Failure | None = None
    causes: tuple[Cause, ...] = ()
    notes: list[str] = field(default_factory=list)

    def note(self, **numbers: object) -> None:
        """Sets some fields of `LowPrecision`."""
        self.precision = replace(self.precision, **numbers)  # type: ignore[arg-type]

    def fail(self, kind: FailureKind, worst: RoundedEntry, detail: str = "", **numbers: object) -> None:
        """Records a failure at the worst entry, and sets some other fields of `LowPrecision`."""
        self.note(worst=worst, **numbers)
        places = worst.output, worst.input, worst.output_position, worst.input_position
        self.failure = Failure(kind, *places, detail=detail)

    @property
    def is_undecided(self) -> bool:
        """Whether the verdict is still open."""
        return self.failure is None and not self.precision.undecided


def judge(problem: Problem, products: Products, probes: Probes, outcome: Outcome) -> Comparison:
    """Compares the VJPs of all probes, records the result in the outcome and returns the comparison."""
    comparison = Comparison(problem, products, probes)
    ratio, coordinate = comparison.forward()
    outcome.note(
        products=int(probes.cotangents.shape[0]),
        rows=probes.text,
        entries=comparison.low.numel(),
        draws=comparison.draws,
        forward=ratio,
        out_of_range=comparison.out_of_range,
        rounded_once=comparison.once,
    )
    if ratio > 1:
        _forwards_differ(comparison, coordinate, ratio, outcome)
    judges = _judge_entries, _judge_common_errors, _judge_beyond_range, _state_the_smallest
    for step in (_judge_overflows, _look_again, *judges):
        if outcome.is_undecided:
            step(comparison, outcome)
    return comparison


def judge_by_differences(problem: Problem, seed: int, outcome: Outcome) -> None:
    """Compares derivatives along some directions with differences; only a single wrong entry is a failure."""
    combinations = differences.combinations(problem, seed)
    infinite = differences.not_finite(problem, combinations)
    if infinite is not None:
        _judge_not_finite(problem, *infinite, len(combinations), outcome)
        return
    found = list(differences.findings(problem, combinations, seed))
    outcome.note(rows=f"{len(found)} directions, by differences", products=len(found), entries=len(found))
    suspects = [finding for finding in found if abs(finding.error) > finding.allowed]
    for finding in suspects:
        located = differences.entry_of(problem, finding.row, seed) if finding.row >= 0 else None
        if located is not None:
            outcome.fail("beyond rounding", _entry_by_differences(problem, *located), wrong=1)
            return
    relative = sorted((one.allowed + abs(one.error)) / one.size for one in found if one.size)
    if suspects:
        outcome.note(
            undecided="a derivative along a direction does not agree with differences, but no single wrong entry was "
            "found: a kink or a pole may be within the steps, which are large in this dtype",
            remedy="pass a reference=, or other inputs",
        )
    elif not relative or relative[len(relative) // 2] >= 1:
        undecided = "differences in this dtype resolve no derivative here: rounding hides errors of any size"
        outcome.note(undecided=undecided, remedy="pass a reference= in double precision")
    else:
        hidden = sum(value >= 1 for value in relative) / len(relative)
        most = relative[int(0.9 * (len(relative) - 1))]
        outcome.note(smallest=relative[(len(relative) - 1) // 2], smallest_most=most, hidden=hidden)


def _judge_not_finite(
    problem: Problem, coordinate: int, derivative: differences.Finding | None, products: int, outcome: Outcome
) -> None:
    """Records a failure if differences show that the derivative is finite; otherwise, the check is undecided."""
    outcome.note(rows=f"{products} directions, by differences", products=products)
    if derivative is not None:
        outcome.fail("not finite", _entry_by_differences(problem, coordinate, derivative), wrong=1)
        return
    block = block_with(problem.inputs, coordinate)
    outcome.note(
        undecided=f"the gradient of input {block.position} at {list(block.index_at(coordinate))} is not finite, "
        "and differences in this dtype do not show whether the derivative is finite",
        remedy="pass a reference= in double precision, or smaller inputs",
    )


def _entry_by_differences(problem: Problem, coordinate: int, finding: differences.Finding) -> RoundedEntry:
    """A wrong entry, with the derivative by differences as the expected value, for a report."""
    value = float(problem.row(finding.row)[coordinate])
    known = value if math.isfinite(value) else 0.0
    expected, allowed = known + finding.error / finding.step, finding.allowed / finding.step
    return rounded_entry(problem, finding.row, coordinate, value, expected, allowed)


def _forwards_differ(comparison: Comparison, coordinate: int, ratio: float, outcome: Outcome) -> None:
    problem, products = comparison.problem, comparison.products
    block = block_with(problem.outputs, coordinate)
    place = f"result {block.position}{list(block.index_at(coordinate))}"
    found, expected = float(problem.base()[coordinate]), float(products.values[coordinate])
    digits = digits_apart(found, expected)
    both = f"{place} is {found:.{digits}g} in func and {expected:.{digits}g} in the reference"
    if not math.isfinite(found) and math.isfinite(expected):
        outcome.note(
            undecided=f"an output is finite in the reference, but not in func: {both}",
            remedy="make the inputs smaller, or compute intermediate results in a wider dtype; if "
            "func is meant to compute another function than the reference, pass that function as reference=",
        )
        return
    times = f"; this difference is {ratio:.2g} times what rounding explains" if ratio < MAX_TIMES else ""
    outcome.note(
        undecided=f"func and the reference are different functions: {both}{times}",
        remedy="if func is meant to compute the same function as the reference, look for an error in func; if not, "
        "pass the right reference as reference=",
    )


def _judge_overflows(comparison: Comparison, outcome: Outcome) -> None:
    own, explained = comparison.overflows()
    if bool(own.any()):
        outcome.fail("not finite", comparison.entry_at(own), wrong=int(own.sum()))
    elif bool(explained.any()):
        outcome.note(
            worst=comparison.entry_at(explained),
            undecided=f"the gradients are not finite in {count(int(explained.sum()), 'entry')}, and those of the "
            "reference are not finite either if every result is rounded to the dtype: an intermediate result leaves "
            "the dtype's range",
            remedy=_SMALLER_OR_WIDER,
        )


def _look_again(comparison: Comparison, outcome: Outcome) -> None:
    comparison.look_again()
    if comparison.excused:
        whose = "its error" if comparison.excused == 1 else "their errors"
        outcome.notes.append(
            f"{count(comparison.excused, 'entry')} passed only a second comparison: rounding in proportion to each "
            f"element does not explain {whose}, but rounding in proportion to the largest element of its tensor, or a "
            f"flush to zero of results below {SMALLEST_NORMAL:.2g}, does"
        )
    outcome.note(draws=comparison.draws, second_look=comparison.excused)


def _judge_entries(comparison: Comparison, outcome: Outcome) -> None:
    problem, products, probes = comparison.problem, comparison.products, comparison.probes
    ratio = comparison.ratio()
    single = (probes.rows >= 0).to(ratio.device).unsqueeze(1)
    wrong = ratio > 1
    if not bool(wrong.any()):
        outcome.note(worst=comparison.entry_at(ratio))
        return
    rows = wrong & single
    if bool(rows.any()):
        entry = comparison.entry_at(torch.where(rows, ratio, 0.0))
        outcome.fail("beyond rounding", entry, wrong=int(rows.sum()))
        outcome.causes = causes_of(comparison.low[rows], comparison.exact[rows])
        return
    worst = comparison.entry_at(ratio)
    outcome.note(worst=worst, wrong=int(wrong.sum()))
    outcome.causes = causes_of(comparison.low[wrong], comparison.exact[wrong])
    if _special_grad_output(comparison, wrong, worst, outcome):
        return
    order = torch.where(wrong, ratio, 0.0).reshape(-1).topk(min(MAX_LOCATED, int(wrong.sum()))).indices.tolist()
    for number in order:
        probe, coordinate = divmod(number, ratio.shape[1])

        def errors(v: Tensor, coordinate: int = coordinate) -> Tensor:
            return (problem.vjp(v).to(products.device) - products.exact(v))[:, coordinate]

        row = row_behind(problem, probes.cotangents[probe], errors)
        alone = Comparison(problem, products, one_row(problem, row))
        alone.look_again()
        found = alone.ratio()
        if bool((found > 1).any()):
            outcome.fail("beyond rounding", alone.entry_at(found))
            return
    if float(ratio.max()) <= MAX_OF_SUMS:
        # Rounding within sums has no common sign: an error that all entries have in common is not explained by it.
        _judge_common_errors(comparison, outcome)
        if outcome.failure is not None:
            return
        outcome.note(
            undecided="the gradient of a sum over outputs differs by more than rounding of the reference explains, "
            "but the gradients of the rows that were compared alone do not",
            remedy="check whether func accumulates in the lower dtype; if so, pass a reference= that also does",
        )
        return
    outcome.fail(
        "beyond rounding",
        worst,
        "the error is in the gradient of a sum over outputs, not in a row that was compared alone",
    )


def _special_grad_output(comparison: Comparison, wrong: Tensor, worst: RoundedEntry, outcome: Outcome) -> bool:
    """Whether gradients are wrong only for one kind of grad_output: non-contiguous, offset, expanded or scaled.

    If so, records the failure.
    """
    some, probes = set(wrong.any(1).nonzero().reshape(-1).tolist()), comparison.probes
    probe = next(iter(some))
    if len(some) == 1 and probe < probes.dense and LAYOUTS[probe] in _LAYOUT_NAMES:
        plain = comparison.problem.vjp(probes.cotangents[probe : probe + 1]).to(comparison.exact.device)
        error = (plain[0] - comparison.exact[probe]).abs()
        if bool((error <= comparison.limit[probe]).all()):
            detail = (
                f"only where grad_output {_LAYOUT_NAMES[LAYOUTS[probe]]}: for a contiguous copy the gradient is right"
            )
            outcome.fail("beyond rounding", worst, detail)
            outcome.causes = (Cause("layout of grad_output", detail, "two VJPs", 0.95),)
            return True
    if some == {SCALED}:
        detail = f"for a grad_output {FACTOR:g} times as large, the gradient is not {FACTOR:g} times as large"
        outcome.failure = Failure("nonlinear", detail=detail)
        return True
    return False


def causes_of(found: Tensor, expected: Tensor) -> tuple[Cause, ...]:
    """The cause, if all wrong entries are zero or are the right values times a constant; otherwise empty."""
    if found.numel() < 2:
        return ()
    if not bool(found.any()):
        return (Cause("zero gradient", "every wrong entry is zero", f"{found.numel()} entries", 0.9),)
    k, rest = fit(found, expected)
    factor = k.real
    if not factor or not rest <= SAME_FACTOR * min(1.0, abs(1 - factor) * 4):
        return ()
    measure = f"relative residual of the fit {rest:.1g}, over {found.numel()} entries"
    if abs(factor + 1) < SAME_FACTOR:
        return (Cause("sign", "the gradient has the wrong sign", measure, 0.9),)
    return (Cause("constant factor", f"the gradient is {factor:.3g} times the right one", measure, 0.9),)


def _judge_common_errors(comparison: Comparison, outcome: Outcome) -> None:
    found = [one for one in comparison.common_errors() if one.entries >= MIN_EFFECTIVE]
    if not found:
        return
    worst = max(found, key=lambda one: abs(one.error) / one.allowed if one.is_alike else 0.0)
    _state_the_smallest_common(comparison, found, outcome)
    if worst.is_excessive:
        detail = (
            f"the entries of the gradient are {1 + worst.error:.5g} times the right ones, on average over about "
            f"{worst.entries:.0f} entries; rounding explains a relative error of {worst.allowed:.2g}"
        )
        outcome.failure = Failure.at("biased", input=worst.block, detail=detail)
        factor = f"the gradient is {1 + worst.error:.5g} times the right one"
        outcome.causes = (Cause("constant factor", factor, "the mean of relative errors", 0.9),)


def _state_the_smallest_common(comparison: Comparison, found: list[Common], outcome: Outcome) -> None:
    """Records the common error that would have been found, and the inputs for which none would have been."""
    bounds = {one.block.index: one.allowed + abs(one.error) for one in found}
    bounds = {index: bound for index, bound in bounds.items() if bound < 1}
    if not bounds:
        return
    outcome.note(smallest_scale=max(bounds.values()))
    others = [block.position for block in comparison.problem.inputs if block.size and block.index not in bounds]
    if others:
        names = ", ".join(f"input {position}" for position in others)
        subject = f"the gradient of {names} was" if len(others) == 1 else f"the gradients of {names} were"
        outcome.notes.append(
            f"{subject} not tested for an error common to all entries: too few entries are larger than rounding"
        )


def _judge_beyond_range(comparison: Comparison, outcome: Outcome) -> None:
    wrong = comparison.wrong_beyond_range()
    if bool(wrong.any()):
        outcome.note(
            worst=comparison.entry_at(wrong),
            undecided=f"the gradients are too small, or of the wrong sign, in {count(int(wrong.sum()), 'entry')} where "
            "the reference is outside the dtype's range: they are wrong, or an intermediate result leaves the range",
            remedy=_SMALLER_OR_WIDER,
        )


def _state_the_smallest(comparison: Comparison, outcome: Outcome) -> None:
    smallest = comparison.smallest_errors()
    if smallest is None:
        if comparison.out_of_range:
            undecided = "no entry was compared: the reference is outside the dtype's range in every nonzero entry"
            outcome.note(undecided=undecided, remedy=_SMALLER_OR_WIDER)
        return
    outcome.note(smallest=smallest[0], smallest_most=smallest[1], hidden=smallest[2])
    if smallest[2] > MAX_HIDDEN:
        undecided = (
            "rounding in this dtype is larger than most entries: an entry that is wrongly zero would not be detected"
        )
        outcome.note(undecided=undecided, remedy="use inputs with less cancellation, or a wider dtype")
