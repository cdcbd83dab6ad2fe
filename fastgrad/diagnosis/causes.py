"""Derives probable causes from the evidence; none if the evidence supports none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from fastgrad.core.precision import LOWER, modulus
from fastgrad.diagnosis.value_causes import EXACT, RESIDUAL, of_sample, of_sums
from fastgrad.diagnosis.wording import wording
from fastgrad.problem.validation import DISABLED
from fastgrad.report.evidence import Cause, CauseName, Evidence
from fastgrad.report.failure import Entry, Failure
from fastgrad.report.messages import varying
from fastgrad.report.number_text import digits_apart
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings

AS_ROUNDING = 1e-4
"""Upper limit of differences between runs that the order of additions may explain, relative to the gradient (1,000
float32 terms)."""

MIN_DEVIATION = 1e-6
"""Least relative difference of two gradients that counts as evidence; rounding is smaller."""


def diagnose(report: Report) -> tuple[Cause, ...]:
    """The probable causes of a failure, the most probable first; empty without evidence."""
    failure = report.failure
    if failure is None:
        return ()
    evidence = report.evidence or Evidence()
    own = report.settings.of(failure.input or 0)
    found = [
        *_of_kind(failure, report.notes),
        *_of_func(failure, evidence, report.settings),
        *_of_backward(failure, evidence, report.settings),
    ]
    sample = report.sample
    if failure.kind == "mismatch":
        found += _of_modes(failure, evidence, report.settings)
        found += _of_experiments(failure, evidence)
        comparison = failure.comparison
        is_clear = comparison is None or 2 * comparison.unclear <= comparison.mismatches
        # Values that depend on eps, or vary from call to call, are no evidence.
        is_known = is_clear and failure.numerical_issue != "not converged" and not failure.func_varies
        if is_known and sample is not None and bool(sample.failing.any()):
            found += of_sample(sample, report, failure, own)
        elif is_known and failure.comparison is not None:
            found += of_sums(failure.comparison, wording(report, failure))
    best: dict[str, Cause] = {}
    for cause in sorted(found, key=lambda cause: -cause.confidence):
        best.setdefault(cause.name, cause)
    causes = tuple(_without_contradictions(list(best.values())))
    lower = _lower_dtype(report, causes)
    return causes if lower is None else (lower, *(cause for cause in causes if cause.name != lower.name))


def _lower_dtype(report: Report, others: Sequence[Cause]) -> Cause | None:
    """The cause "low precision" if an input has a lower dtype, with the call that tests this cause; otherwise None."""
    if report.subject is None:
        return None
    for dtype in LOWER:
        name = str(dtype).removeprefix("torch.")
        if any(kind.startswith(f"{name}[") for kind in report.subject.inputs):
            text = f"an input is {name}: rounding to {name} is larger than the change of func over a step of eps"
            # Forward mode accepts no reference.
            reference = "" if report.settings.check_forward_ad else 'reference="float64", or with '
            measure = f"to test this, repeat the call with {reference}inputs in double precision"
            return Cause("low precision", text, measure, max([0.5, *(cause.confidence for cause in others)]))
    return None


def _without_contradictions(causes: list[Cause]) -> Iterator[Cause]:
    """Leaves out unlikely causes, and causes that contradict or repeat the first one.

    If func, the call, or a backward that is nonlinear or not deterministic comes first, only this cause is left.
    """
    first = causes[0].name if causes else None
    numerical = {"kink", "discontinuity", "low precision", "truncation", "rounding"}
    for cause in causes:
        if first in {"nondeterminism", "nonlinear backward", "dependent inputs", *numerical} and cause.name != first:
            continue
        if first == "constant part" and cause.name in {"missing reduction", "zero gradient", "constant factor"}:
            continue  # these describe the same error
        if cause.confidence >= 0.3:
            yield cause


# Kinds of failure that suffice as evidence.


def _of_kind(failure: Failure, notes: Sequence[str]) -> Iterator[Cause]:
    if failure.kind == "nonzero numerical gradient":
        detached = (
            "func detaches its result from its inputs, for example by detach(), .data, .item(), .numpy() or no_grad()"
        )
        text = next((note for note in notes if note.startswith(DISABLED)), detached)
        measure = f"a numerical derivative of {failure.detail}, although no output requires grad"
        yield Cause("zero gradient", text, measure, 0.9)


# Properties of func: whether it varies from call to call, is curved, or rounds.


_OF_ISSUES = {
    "low precision": ("shown by differences over many steps", 0.9),
    "kink": ("shown by one-sided differences", 0.95),
    "discontinuity": ("shown by differences over many steps", 0.96),
    "not finite": ("shown by the values at the inputs", 0.98),
}
"""Evidence and confidence of the causes that re-measuring an entry shows."""


def _of_func(failure: Failure, evidence: Evidence, settings: Settings) -> Iterator[Cause]:
    worst = failure.comparison.worst if failure.comparison else None
    # If the worst entry was measured in spite of the variation, the variation is not the reason for its difference.
    is_measured = worst is not None and worst.error is not None and worst.difference > worst.allowed + worst.error
    if evidence.func_varies and not is_measured:
        text = (
            f"{varying(settings)} gives different values for the same inputs: look for random numbers, state, "
            "atomic additions, or uninitialized memory"
        )
        yield Cause("nondeterminism", text, f"two calls at the same inputs differ by {evidence.func_varies:.2g}", 0.97)
    if evidence.output_dtype is not None and failure.kind == "mismatch":
        text = f"func computes in {evidence.output_dtype} and returns double precision"
        measure = (
            "after a small change of the inputs, all changed output values that are not integers can be "
            f"represented in {evidence.output_dtype}"
        )
        yield Cause("low precision", text, measure, 0.96)
    elif failure.numerical_issue is not None and failure.numerical_issue != "not converged":
        yield Cause(failure.numerical_issue, failure.detail, *_OF_ISSUES[failure.numerical_issue])
    own = settings.of(failure.input or 0)
    if worst is not None and evidence.slopes:
        yield from _of_stairs(own.eps, worst, evidence.slopes)
    if worst is not None and failure.convergence and evidence.rounding is not None:
        slopes = {difference.step: complex(difference.estimate) for difference in failure.convergence}
        is_open = failure.numerical_issue == "not converged"
        yield from _of_steps(own.eps, complex(worst.analytical), slopes, evidence.rounding, is_open)


def _of_stairs(eps: float, worst: Entry, slopes: tuple[tuple[float, float], ...]) -> Iterator[Cause]:
    """The cause if func is constant over steps of eps but follows the analytical entry over large steps."""
    step, slope = max(slopes)
    analytical = complex(worst.analytical).real
    if step > eps and modulus(worst.numerical) == 0 and slope and abs(slope - analytical) <= abs(analytical) / 4:
        text = (
            "func is piecewise constant, because it rounds an intermediate result: to a lower precision, or by round()"
        )
        measure = (
            f"func does not change over steps of {eps:g}, but over a step of {step:.2g} its slope is {slope:.3g}; "
            f"the analytical derivative is {analytical:.3g}"
        )
        yield Cause("low precision", text, measure, 0.9)


def _of_steps(
    eps: float, analytical: complex, slopes: dict[float, complex], ulp: float, is_open: bool
) -> Iterator[Cause]:
    """The cause if truncation or rounding of the differences explains the disagreement.

    is_open: whether the numerical derivative did not converge. Then no cause that follows from its values is certain.
    """
    measured = min(slopes, key=lambda h: abs(math.log(h / eps)))
    off = abs(slopes[measured] - analytical)
    rounding_error = 8 * ulp / measured
    if off <= rounding_error:
        text = (
            f"rounding hides the change of func over a step of eps = {eps:g}: errors of one ulp in func's values "
            f"change the derivative by up to {ulp / eps:.2g}; use a larger eps, or subtract a constant offset from "
            "func's values"
        )
        measure = f"the derivatives differ by {off:.2g}, which rounding explains"
        yield Cause("rounding", text, measure, 0.95 if is_open else 0.92)
        return
    finer = [(h, slope) for h, slope in slopes.items() if h < measured and abs(slope - analytical) <= 8 * ulp / h < off]
    if finer:
        h, slope = finer[0]
        why = "func is curved, or has a kink or a jump, within eps of the inputs"
        text = f"eps = {eps:g} is too large: {why}; use a smaller eps"
        measure = (
            f"the derivatives differ by {off:.2g} at eps, but only by {abs(slope - analytical):.2g} at a step of "
            f"{h:.2g}, where the numerical derivative is {_number(slope)}"
        )
        yield Cause("truncation", text, measure, 0.95 if is_open else 0.88)


# Properties of backward as a function of grad_output.


def _of_backward(failure: Failure, evidence: Evidence, settings: Settings) -> Iterator[Cause]:
    moving = list(_of_runs(evidence, settings))
    yield from moving
    if moving:
        return  # if gradients vary from run to run, they are no evidence for other causes
    linear = failure.kind != "mismatch"
    if evidence.after_others is not None and evidence.after_others > MIN_DEVIATION:
        text = (
            "backward reads a tensor that other calls of func overwrite, for example in a global variable, on the "
            "class or in a shared buffer: use ctx.save_for_backward, which keeps one tensor per graph"
        )
        measure = f"relative change {evidence.after_others:.2g} of the gradient after a call of func at another point"
        yield Cause("saved tensor", text, measure, 0.93)
    elif evidence.after_call is not None and evidence.after_call > MIN_DEVIATION:
        text = (
            "backward uses a value of an earlier call of func, for example one kept in a global variable, on the "
            "class or on the module: use ctx.save_for_backward, which keeps the values of each call"
        )
        measure = (
            f"relative change {evidence.after_call:.2g} of the gradient if func runs at another point before forward"
        )
        yield Cause("saved tensor", text, measure, 0.93)
    if evidence.at_zero is not None and evidence.at_zero != 0:
        text = "backward does not multiply its result, or a term of it, by grad_output"
        measure = f"for a zero grad_output, the largest element of the gradient is {evidence.at_zero:.2g}"
        yield Cause("nonlinear backward", text, measure, 0.95)
    scaled = evidence.scaled or ()
    nonlinear = next((one for one in scaled if not one[1] <= MIN_DEVIATION), None)
    if nonlinear is not None:
        c, deviation, size = nonlinear
        measure = f"the gradient is zero for a grad_output, but not for {c:g} x this grad_output"
        if math.isfinite(size):
            measure = (
                f"for {c:g} x grad_output, the gradient is {size:.3g} x as large; its relative difference from {c:g} x "
                f"the original gradient is {deviation:.2g}"
            )
        yield Cause("nonlinear backward", _how_nonlinear(scaled), measure, 0.94)
        return
    is_wrong_if_contiguous = evidence.dense_error is not None and evidence.dense_error > settings.rtol
    layout = list(_of_layouts(evidence, linear, not linear and is_wrong_if_contiguous))
    if evidence.modified is not None and (evidence.modified > MIN_DEVIATION or layout):
        yield _modified(evidence)
    else:
        yield from layout
    yield from _of_terms(evidence)


def _of_terms(evidence: Evidence) -> Iterator[Cause]:
    """The cause if the gradients for the terms of a grad_output do not add up to the gradient of their sum."""
    if evidence.added is not None and not evidence.added <= MIN_DEVIATION:
        look = "look for a quantization, a maximum, or a product of elements of grad_output"
        measure = (
            "the gradients for two dense grad_outputs do not add up to the gradient for their sum: "
            f"relative difference {evidence.added:.2g}"
        )
        yield Cause("nonlinear backward", f"backward is not additive in grad_output: {look}", measure, 0.94)
    elif evidence.split is not None and not evidence.split <= MIN_DEVIATION:
        text = "backward depends on which elements of grad_output are zero"
        if evidence.dense_error is not None:
            is_right = evidence.dense_error <= 10 * MIN_DEVIATION
            text += f": it is {'right' if is_right else 'wrong'} for a grad_output without zeros"
            text += ", but not for all others" if is_right else ""
        measure = (
            "the gradients for parts of a grad_output do not add up to the gradient for the whole: "
            f"relative difference {evidence.split:.2g}"
        )
        yield Cause("sparse grad_output", text, measure, 0.92)


def _of_layouts(evidence: Evidence, linear: bool, only_exceptions: bool) -> Iterator[Cause]:
    """The causes for layouts of grad_output.

    only_exceptions: whether only those for which backward raises count, because it is also wrong for a contiguous one.
    """
    contiguous = "look for a data_ptr(), view() or kernel that assumes contiguous memory"
    aligned = "look for a kernel that ignores the storage offset, or uses aligned loads"
    kinds = (
        (evidence.non_contiguous, evidence.non_contiguous_error, "is non-contiguous", contiguous),
        (evidence.offset, evidence.offset_error, "has a storage offset", aligned),
        (evidence.expanded, evidence.expanded_error, "is expanded (stride 0)", contiguous),
    )
    for deviation, error, how, mistake in kinds:
        if error is None and (only_exceptions or deviation is None or deviation <= MIN_DEVIATION):
            continue
        if error is not None or deviation is None:
            measure = error or ""
        elif math.isinf(deviation):
            measure = "one gradient is zero and the other is not, or an element is finite in only one of them"
        else:
            measure = f"the relative difference of the two gradients is {deviation:.2g}"
        text = (
            f"backward {'is wrong' if error is None else 'raises'} for a grad_output that {how}, but not for a "
            f"contiguous copy: {mistake}"
        )
        confidence = 0.8 if how.startswith("is expanded") and not linear else 0.93
        yield Cause("layout of grad_output", text, measure, confidence)
        return


def _modified(evidence: Evidence) -> Cause:
    error = evidence.non_contiguous_error or evidence.offset_error or evidence.expanded_error
    if evidence.modified is not None and evidence.modified > MIN_DEVIATION:
        measure = f"relative change {evidence.modified:.2g} of the gradient if backward gets a copy of grad_output"
    else:
        measure = "a dense grad_output has different values after the call"
        measure += f"; for another layout, backward raises {error}" if error else ""
    text = "backward writes into grad_output, which other nodes also read: write into a new tensor instead"
    return Cause("modified grad_output", text, measure, 0.97)


def _of_runs(evidence: Evidence, settings: Settings) -> Iterator[Cause]:
    graphs = evidence.runs
    if graphs is None or not max(map(max, graphs)) > settings.nondet_tol:
        return
    if evidence.func_varies and all(len(set(graph)) == 1 for graph in graphs):
        return  # the gradients vary because func does
    runs = [deviation for graph in graphs for deviation in graph]
    measure = f"{len(runs)} runs of one VJP differ by up to {max(runs):.2g} times the largest element of the gradient"
    if evidence.draws:  # if func sets the seed, these runs repeat like those of a backward that writes what it reads
        text = "backward draws random numbers: draw them in forward, and save them for backward"
        yield Cause("nondeterminism", text, measure, 0.97)
    elif all(graph == graphs[0][: len(graph)] for graph in graphs):
        text = "backward changes what it reads: a tensor that forward saved, or state on ctx"
        yield Cause(
            "saved tensor", text, f"{measure}; after another forward, backward gives the first gradient again", 0.96
        )
    elif all(earlier < later for earlier, later in itertools.pairwise(runs)):
        text = "the gradient changes with each call of backward: backward modifies an input, or state, that it reads"
        yield Cause("saved tensor", text, measure, 0.96)
    else:
        order = "atomic additions in a varying order, " if max(runs) < AS_ROUNDING else ""
        reasons = f"look for random numbers, state, {order}missing synchronization, or uninitialized memory"
        yield Cause("nondeterminism", f"repeated calls of backward give different values: {reasons}", measure, 0.95)


def _how_nonlinear(scaled: tuple[tuple[float, float, float], ...]) -> str:
    sizes = {c: size for c, _, size in scaled}
    deviations = {c: deviation for c, deviation, _ in scaled}
    powers = [math.log(size) / math.log(c) for c, size in sizes.items() if c > 0 and size > 0 and math.isfinite(size)]
    if deviations.get(-1.0, 0.0) > MIN_DEVIATION and all(d <= MIN_DEVIATION for c, d in deviations.items() if c > 0):
        return (
            "backward treats positive and negative grad_outputs differently: look for an abs(), a relu, or a comparison"
        )
    power = round(sum(powers) / len(powers), 2) if powers else 1.0
    if power != 1.0 and max(powers) - min(powers) < 0.01:
        if abs(power) < 0.01:
            return (
                "the size of the gradient does not grow with grad_output: backward clamps or normalizes grad_output, "
                "or uses only its sign"
            )
        return f"backward raises grad_output to the power {power:g}"
    return (
        "backward clamps or rounds grad_output, multiplies its elements with each other, or is nonlinear in another way"
    )


# Forward mode against reverse mode.


def _of_modes(failure: Failure, evidence: Evidence, settings: Settings) -> Iterator[Cause]:
    worst, other = failure.comparison.worst if failure.comparison else None, evidence.other_mode
    if worst is None or other is None or failure.numerical_issue is not None or failure.func_varies:
        return
    own, name = ("backward", "forward") if failure.mode == "reverse" else ("the jvp", "reverse")
    numerical, analytical = complex(worst.numerical), complex(worst.analytical)
    if not math.isfinite(modulus(numerical)):
        return  # the tolerance is infinite as well, so every value would be within it
    adjoint = "" if evidence.adjoint_error is None else f"; error of the adjoint test {evidence.adjoint_error:.2g}"
    measure = f"{name} mode gives {_number(other, digits_apart(analytical, numerical))}{adjoint}"
    confidence = 0.97 if settings.check_forward_ad and settings.check_backward_ad else 0.45
    if modulus(other - numerical) <= worst.allowed:
        text = f"{name} mode gives the right value of the worst entry, so only {own} is wrong"
        yield Cause("modes disagree", text, measure, confidence)
    elif modulus(other - analytical) <= EXACT * modulus(analytical) and modulus(other) > 0:
        text = (
            "forward and reverse mode agree with each other but not with func: a formula that both use is wrong, or "
            "func does not compute what the formula assumes"
        )
        yield Cause("both modes wrong", text, measure, confidence)


def _number(value: complex, digits: int = 6) -> str:
    """A derivative; -0 is written as 0."""
    return f"{value:.{digits}g}" if value.imag else f"{value.real + 0.0:.{digits}g}"


_OF_EXPLANATIONS: dict[CauseName, float] = {"saved tensor": 0.85, "dependent inputs": 0.98, "repeated gradient": 0.86}
"""Confidences of causes from hypotheses that explain random sums; that of all others is 0.94."""


def _of_experiments(failure: Failure, evidence: Evidence) -> Iterator[Cause]:
    if evidence.explanation is not None:
        explanation = evidence.explanation
        measure = f"sums of all entries with random weights agree with this to {explanation.error:.1g}"
        yield Cause(explanation.name, explanation.text, measure, _OF_EXPLANATIONS.get(explanation.name, 0.94))
    other = evidence.other_part
    if other is not None and failure.mode == "reverse" and failure.comparison and failure.comparison.worst:
        worst = failure.comparison.worst
        found, wanted = complex(worst.analytical), complex(worst.numerical)
        off, size = modulus(other[0] - other[1]), modulus(other[1])
        if modulus(found + wanted) <= RESIDUAL * modulus(wanted) and off <= RESIDUAL * size:
            text = (
                f"the gradient of the {failure.part} part of the output has the wrong sign, and that of the other part "
                "is right: a conj() of grad_output, or of its factor, is missing"
            )
            yield Cause("missing conjugate", text, f"the error of the gradient of the other part is {off:.1g}", 0.97)
        elif modulus(found) == 0 and size and off <= RESIDUAL * size:
            dropped = "imaginary" if failure.part == "imaginary" else "real"
            text = (
                f"backward ignores the {dropped} part of grad_output, and the gradient of the other part is right: "
                "look for .real or .imag in backward"
            )
            yield Cause("complex factor", text, f"the error of the gradient of the other part is {off:.1g}", 0.95)
