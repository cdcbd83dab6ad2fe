"""Derives probable causes from the evidence; none if the evidence supports none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastgrad.core.precision import LOWER
from fastgrad.diagnosis.locations import place_causes
from fastgrad.diagnosis.rearrangements import shared_by, structure_causes
from fastgrad.problem.validation import DISABLED
from fastgrad.report.evidence import Cause, CauseName, Evidence, Sample
from fastgrad.report.failure import Comparison, Entry, Failure, modulus
from fastgrad.report.messages import names_of
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings, Tolerances

RESIDUAL = 1e-3
"""A constant factor is named as the cause if it leaves at most this share of the analytical entries unexplained."""

EXACT = 1e-4
"""Largest relative difference between a factor and the number that explains it (2, -1, or the size of a tensor)."""

NAMED_FACTORS = {
    math.pi: "pi",
    1 / math.pi: "1 / pi",
    math.pi / 180: "pi / 180 (degrees to radians)",
    180 / math.pi: "180 / pi (radians to degrees)",
}
"""Constants that are named if they are missing as a factor, with their inverses."""

AS_ROUNDING = 1e-4
"""Differences between runs, relative to the gradient, that the order of additions may explain (1,000 float32 terms)."""

LEAST_DEVIATION = 1e-6
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
        if sample is not None and bool(sample.failing.any()):
            found += _of_sample(sample, report, failure, own)
        elif failure.comparison is not None:
            found += _of_sums(failure.comparison)
    best: dict[str, Cause] = {}
    for cause in sorted(found, key=lambda cause: -cause.confidence):
        best.setdefault(cause.name, cause)
    causes = tuple(_without_contradictions(list(best.values())))
    lower = _lower_dtype(report, causes)
    return causes if lower is None else (lower, *(cause for cause in causes if cause.name != lower.name))


def _lower_dtype(report: Report, others: Sequence[Cause]) -> Cause | None:
    """The cause "inputs in a lower dtype", and the call that decides whether it is the cause."""
    if report.subject is None:
        return None
    for dtype in LOWER:
        name = str(dtype).removeprefix("torch.")
        if any(kind.startswith(f"{name}[") for kind in report.subject.inputs):
            text = f"the inputs are {name}: rounding to {name} is larger than the change of func over a step of eps"
            measure = 'to test this, repeat the call with reference="float64", or with inputs in double precision'
            return Cause("low precision", text, measure, max([0.5, *(cause.confidence for cause in others)]))
    return None


def _without_contradictions(causes: list[Cause]) -> Iterator[Cause]:
    """Removes causes based on entries if func, the call or a nonlinear backward is the cause."""
    first = causes[0].name if causes else None
    numerical = {"kink", "discontinuity", "low precision", "truncation", "rounding"}
    for cause in causes:
        if first in {"race", "nonlinear backward", "dependent inputs", *numerical} and cause.name != first:
            continue
        if first == "constant part" and cause.name in {"missing reduction", "zero gradient", "constant factor"}:
            continue  # these describe the same error
        if cause.confidence >= 0.3:
            yield cause


# Kinds of failure that are evidence themselves.


def _of_kind(failure: Failure, notes: Sequence[str]) -> Iterator[Cause]:
    if failure.kind == "nonzero numerical gradient":
        detached = (
            "func detaches its result from its inputs, for example by detach(), .data, .item(), .numpy() or no_grad()"
        )
        yield Cause(
            "zero gradient",
            next((note for note in notes if note.startswith(DISABLED)), detached),
            f"a numerical derivative of {failure.detail}, although no output requires grad",
            0.9,
        )


# The function: whether it varies, is curved, or rounds.


def _of_func(failure: Failure, evidence: Evidence, settings: Settings) -> Iterator[Cause]:
    if evidence.func_moves:
        yield Cause(
            "race",
            "func gives different values in each call: random numbers, atomic additions, or uninitialized memory",
            f"two calls at the same inputs differ by {evidence.func_moves:.1e}",
            0.97,
        )
    if evidence.output_dtype is not None and failure.kind == "mismatch":
        yield Cause(
            "low precision",
            f"func computes in {evidence.output_dtype} and returns double precision: all values of the output are "
            f"exactly representable in {evidence.output_dtype}",
            "all output values at a point next to x",
            0.96,
        )
    elif failure.trouble == "low precision":
        yield Cause("low precision", failure.detail, "differences over many steps", 0.9)
    elif failure.trouble == "kink":
        yield Cause("kink", failure.detail, "one-sided differences", 0.95)
    elif failure.trouble == "discontinuity":
        yield Cause("discontinuity", failure.detail, "differences over many steps", 0.96)
    elif failure.trouble == "not finite":
        yield Cause("not finite", failure.detail, "values at x", 0.98)
    worst = failure.comparison.worst if failure.comparison else None
    own = settings.of(failure.input or 0)
    if worst is not None and evidence.slopes:
        yield from _of_stairs(own.eps, worst, evidence.slopes)
    if worst is not None and failure.convergence and evidence.rounding is not None:
        slopes = {difference.step: complex(difference.estimate).real for difference in failure.convergence}
        yield from _of_steps(own.eps, complex(worst.analytical).real, slopes, evidence.rounding)


def _of_stairs(eps: float, worst: Entry, slopes: tuple[tuple[float, float], ...]) -> Iterator[Cause]:
    """Whether func is constant for steps of eps but follows the analytical entry for large steps."""
    slope = max(slopes)[1]
    analytical = complex(worst.analytical).real
    if modulus(worst.numerical) == 0 and slope and abs(slope - analytical) <= abs(analytical) / 4:
        yield Cause(
            "low precision",
            f"func is piecewise constant: it does not change over steps of {eps:g}, but over large steps it changes as "
            "the analytical gradient predicts; func rounds an intermediate result, to a lower precision or by round()",
            f"a slope of {slope:.3g} over a step of {max(slopes)[0]:.2g}, analytical {analytical:.3g}",
            0.9,
        )


def _of_steps(eps: float, analytical: float, slopes: dict[float, float], ulp: float) -> Iterator[Cause]:
    """Whether truncation or rounding of the differences explains the disagreement."""
    measured = min(slopes, key=lambda h: abs(math.log(h / eps)))
    off = abs(slopes[measured] - analytical)
    rounding_error = 8 * ulp / measured
    if off <= rounding_error:
        yield Cause(
            "rounding",
            f"at eps = {eps:g} rounding hides the difference: one ulp of func's value, divided by eps, is "
            f"{ulp / eps:.1e}; use a larger eps, or subtract the common offset of the values",
            f"|difference| {off:.1e} is within rounding",
            0.92,
        )
        return
    finer = [(h, slope) for h, slope in slopes.items() if h < measured and abs(slope - analytical) <= 8 * ulp / h < off]
    if finer:
        h, slope = finer[0]
        yield Cause(
            "truncation",
            f"eps = {eps:g} is too large for func's curvature: a step of {h:.1e} gives the derivative {slope:.6g}, and "
            "the analytical gradient agrees with it up to rounding",
            f"the analytical gradient is off by {off:.1e} at eps, by {abs(slope - analytical):.1e} at this step",
            0.88,
        )


# The backward as a map of grad_output.


def _of_backward(failure: Failure, evidence: Evidence, settings: Settings) -> Iterator[Cause]:
    moving = list(_of_runs(evidence, settings))
    yield from moving
    if moving:
        return  # if gradients vary from run to run, they are no evidence for other causes
    linear = failure.kind != "mismatch"
    if evidence.after_others is not None and evidence.after_others > LEAST_DEVIATION:
        yield Cause(
            "saved tensor",
            "backward reads a tensor that other calls of func overwrite: in a global variable, on the class or in a "
            "shared buffer; ctx.save_for_backward keeps one tensor per graph",
            f"relative change {evidence.after_others:.1e} of the gradient after a call of func at another point",
            0.93,
        )
    if evidence.at_zero is not None and evidence.at_zero != 0:
        yield Cause(
            "nonlinear backward",
            "backward adds a term that does not depend on grad_output, or omits grad_output",
            f"a gradient of {evidence.at_zero:.2g} for a zero grad_output",
            0.95,
        )
    scaled = evidence.scaled or ()
    nonlinear = [(c, deviation, size) for c, deviation, size in scaled if not deviation <= LEAST_DEVIATION]
    if nonlinear:
        c, deviation, size = nonlinear[0]
        measure = (
            f"grad_output {c:g} times as large: gradient {size:.3g} times as large, relative deviation {deviation:.1e}"
        )
        yield Cause("nonlinear backward", _how_nonlinear(scaled), measure, 0.94)
        return
    layout = list(_of_layouts(evidence, linear))
    if evidence.modified is not None and (evidence.modified > LEAST_DEVIATION or layout):
        yield _modified(evidence)
    else:
        yield from layout
    yield from _of_terms(evidence)


def _of_terms(evidence: Evidence) -> Iterator[Cause]:
    """The cause if the gradients for the terms of a grad_output do not add up to the gradient of their sum."""
    if evidence.added is not None and not evidence.added <= LEAST_DEVIATION:
        yield Cause(
            "nonlinear backward",
            "backward is not additive in grad_output: a quantization, a maximum, or a product of its elements",
            "the gradients for two dense grad_outputs do not add up to the gradient for their sum: "
            f"deviation {evidence.added:.1e}",
            0.94,
        )
    elif evidence.split is not None and not evidence.split <= LEAST_DEVIATION:
        right_if_dense = evidence.dense_error is not None and evidence.dense_error <= 10 * LEAST_DEVIATION
        yield Cause(
            "sparse grad_output",
            "backward depends on which elements of grad_output are zero: it is right only for a grad_output "
            + ("without zeros" if right_if_dense else "with a single nonzero element, if at all"),
            "the gradients for parts of a grad_output do not add up to the gradient for the whole: "
            f"deviation {evidence.split:.1e}",
            0.92,
        )


def _of_layouts(evidence: Evidence, linear: bool) -> Iterator[Cause]:
    contiguous = "a data_ptr(), view() or kernel that assumes contiguous memory"
    aligned = "a kernel that ignores the storage offset, or uses aligned loads"
    kinds = (
        (evidence.gapped, evidence.gapped_error, "non-contiguous", contiguous),
        (evidence.offset, evidence.offset_error, "at a storage offset", aligned),
        (evidence.expanded, evidence.expanded_error, "expanded (stride 0)", contiguous),
    )
    for deviation, error, how, mistake in kinds:
        if error is None and (deviation is None or deviation <= LEAST_DEVIATION):
            continue
        if error is not None or deviation is None:
            measure = error or ""
        elif math.isinf(deviation):
            measure = "one of the two gradients is zero or not finite, and the other is not"
        else:
            measure = f"relative difference {deviation:.1e} of the two gradients"
        yield Cause(
            "layout of grad_output",
            f"backward {'is wrong' if error is None else 'raises'} for a grad_output that is {how}, but not for a "
            f"contiguous copy: {mistake}",
            measure,
            0.8 if how.startswith("expanded") and not linear else 0.93,
        )
        return


def _modified(evidence: Evidence) -> Cause:
    error = evidence.gapped_error or evidence.offset_error or evidence.expanded_error
    if evidence.modified is not None and evidence.modified > LEAST_DEVIATION:
        measure = f"relative difference {evidence.modified:.1e} of the gradient if backward gets a copy of grad_output"
    else:
        measure = "a dense grad_output has different values after the call"
        measure += f"; for other layouts {error}" if error else ""
    return Cause(
        "modified grad_output",
        "backward writes into grad_output, which other nodes also read: write into a new tensor instead",
        measure,
        0.97,
    )


def _of_runs(evidence: Evidence, settings: Settings) -> Iterator[Cause]:
    graphs = evidence.runs
    if graphs is None or not max(map(max, graphs)) > settings.nondet_tol:
        return
    runs = [deviation for graph in graphs for deviation in graph]
    measure = f"{len(runs)} runs of one VJP differ by up to {max(runs):.1e}, relative to the gradient"
    if all(graph == graphs[0][: len(graph)] for graph in graphs):
        yield Cause(
            "saved tensor",
            "backward changes a tensor that forward saved: a second backward of the same graph gives different values, "
            "and after another forward, backward gives the first values again",
            measure,
            0.96,
        )
    elif all(earlier < later for earlier, later in itertools.pairwise(runs)):
        yield Cause(
            "saved tensor",
            "the gradient changes with each call of backward: backward modifies an input, or state, that it reads",
            measure,
            0.96,
        )
    else:
        reasons = "random numbers, state, missing synchronization, or uninitialized memory"
        if max(runs) < AS_ROUNDING:
            reasons = "atomic additions in a varying order, or missing synchronization"
        yield Cause("race", f"backward gives different values in each call: {reasons}", measure, 0.95)


def _how_nonlinear(scaled: tuple[tuple[float, float, float], ...]) -> str:
    sizes = {c: size for c, _, size in scaled}
    deviations = {c: deviation for c, deviation, _ in scaled}
    powers = [math.log(size) / math.log(c) for c, size in sizes.items() if c > 0 and size > 0 and math.isfinite(size)]
    if deviations.get(-1.0, 0.0) > LEAST_DEVIATION and all(
        d <= LEAST_DEVIATION for c, d in deviations.items() if c > 0
    ):
        return "backward treats positive and negative grad_outputs differently: an abs(), a relu, or a comparison"
    power = round(sum(powers) / len(powers), 2) if powers else 1.0
    if power != 1.0 and max(powers) - min(powers) < 0.01:
        if abs(power) < 0.01:
            return "backward ignores the magnitude of grad_output: it uses only the sign, or ignores grad_output"
        return f"backward raises grad_output to the power {power:g}"
    return "backward is not linear in grad_output: for example a clamp, rounding, or a product of two grad_outputs"


# Forward mode against reverse mode.


def _of_modes(failure: Failure, evidence: Evidence, settings: Settings) -> Iterator[Cause]:
    worst, other = failure.comparison.worst if failure.comparison else None, evidence.other_mode
    if worst is None or other is None or failure.trouble is not None:
        return
    own, name = ("backward", "forward") if failure.mode == "reverse" else ("jvp", "reverse")
    numerical, analytical = complex(worst.numerical), complex(worst.analytical)
    if not math.isfinite(modulus(numerical)):
        return  # the tolerance is infinite as well, so every value would be within it
    tolerances = settings.of(failure.input or 0)
    allowed = tolerances.atol + tolerances.rtol * modulus(numerical)
    both = settings.check_forward_ad and settings.check_backward_ad
    adjoint = "" if evidence.adjoint_error is None else f"; error of the adjoint test {evidence.adjoint_error:.1e}"
    if modulus(other - numerical) <= allowed:
        yield Cause(
            "modes disagree",
            f"{name} mode gives the right value of the worst entry, so only {own} is wrong",
            f"{name} mode gives {_number(other)}{adjoint}",
            0.97 if both else 0.45,
        )
    elif modulus(other - analytical) <= EXACT * modulus(analytical) and modulus(other) > 0:
        yield Cause(
            "both modes wrong",
            "forward and reverse mode agree with each other but not with func: a formula that both use is wrong, or "
            "func does not compute what the formula assumes",
            f"{name} mode gives {_number(other)}{adjoint}",
            0.97 if both else 0.45,
        )


def _number(value: complex) -> str:
    return f"{value:.6g}" if value.imag else f"{value.real:.6g}"


_OF_EXPLANATIONS: dict[CauseName, float] = {"saved tensor": 0.85, "dependent inputs": 0.98, "repeated gradient": 0.86}
"""Confidences of causes that explain random sums, if they are not the default."""


def _of_experiments(failure: Failure, evidence: Evidence) -> Iterator[Cause]:
    if evidence.explanation is not None:
        explanation = evidence.explanation
        measure = f"random sums of all entries agree with this to {explanation.error:.0e}"
        yield Cause(explanation.name, explanation.text, measure, _OF_EXPLANATIONS.get(explanation.name, 0.94))
    other = evidence.other_part
    if other is not None and failure.mode == "reverse" and failure.comparison and failure.comparison.worst:
        worst = failure.comparison.worst
        found, wanted = complex(worst.analytical), complex(worst.numerical)
        off, size = modulus(other[0] - other[1]), modulus(other[1])
        if modulus(found + wanted) <= RESIDUAL * modulus(wanted) and off <= RESIDUAL * size:
            yield Cause(
                "missing conjugate",
                f"the {failure.part} part has the wrong sign and the other part is right: a missing conj(), of "
                "grad_output or of its factor",
                f"the other part is off by {off:.0e}",
                0.97,
            )
        elif modulus(found) == 0 and size and off <= RESIDUAL * size:
            dropped = "imaginary" if failure.part == "imaginary" else "real"
            yield Cause(
                "complex factor",
                f"backward ignores the {dropped} part of grad_output, and the other part is right: a .real or .imag in "
                "backward",
                f"the other part is off by {off:.0e}",
                0.95,
            )


# Sums over the wrong entries, the only evidence if no sample could be taken.


def constant_factor(comparison: Comparison) -> tuple[float, float] | None:
    """(k, residual) if analytical = k * numerical over the mismatched entries, by least squares.

    residual is |analytical - k numerical| / |analytical|; at least two entries are needed.
    """
    if comparison.mismatches < 2 or not 0 < comparison.sum_analytical * comparison.sum_numerical < math.inf:
        return None
    if abs(comparison.sum_product.imag) > RESIDUAL * abs(comparison.sum_product):
        return None
    factor = comparison.sum_product.real / comparison.sum_numerical
    product = abs(comparison.sum_product)
    unexplained = 1 - product * product / (comparison.sum_analytical * comparison.sum_numerical)
    residual = math.sqrt(max(0.0, unexplained))
    return (factor, residual) if residual <= _most_unexplained(factor) else None


def _most_unexplained(factor: complex) -> float:
    """Largest residual with which a factor is named; for a factor near 1, a tenth of its distance from 1."""
    return min(RESIDUAL, abs(factor - 1) / 10)


def is_zero(comparison: Comparison) -> bool:
    """Whether every mismatched analytical entry is zero."""
    return comparison.mismatches > 0 and comparison.sum_analytical == 0 and comparison.sum_numerical > 0


def _of_sums(comparison: Comparison) -> Iterator[Cause]:
    if is_zero(comparison):
        yield _zero(comparison.mismatches, 0.6, 1)
    factor = constant_factor(comparison)
    if factor is not None:
        yield _factor(*factor, {}, 0.6)


def _zero(count: int, confidence: float, order: int) -> Cause:
    why = "a missing term, or a gradient that backward returns as None"
    if order > 1:
        why = (
            "a missing term, or a value that backward treats as a constant: detach(), .data, no_grad(), or a tensor "
            "kept on ctx without save_for_backward"
        )
    return Cause(
        "zero gradient",
        f"the analytical gradient is zero wherever it is wrong: {why}",
        f"{count} {'entry' if count == 1 else 'entries'}, all zero",
        confidence,
    )


def _factor(k: float, residual: float, sizes: dict[str, int], confidence: float, selected: int = 0) -> Cause:
    if abs(k + 1) <= EXACT:
        return Cause(
            "sign", "the analytical gradient has the wrong sign", f"residual {residual:.0e}", confidence + 0.01
        )
    known = [what for what, size in sizes.items() if size > 2 and abs(k / size - 1) <= EXACT]
    inverse = [what for what, size in sizes.items() if size > 2 and abs(k * size - 1) <= EXACT]
    why = f": the factor {1 / k:.4g} is missing"
    named = [name for value, name in NAMED_FACTORS.items() if abs(k * value - 1) <= EXACT]
    if named:
        why += f", perhaps {named[0]}"
    elif known:
        why += f", perhaps a mean over {known[0]}"
    elif inverse:
        why += f", perhaps a mean instead of a sum over {inverse[0]}"
    else:
        counts = [what for what, size in sizes.items() if selected > 1 and abs(k * size / selected - 1) <= EXACT]
        if counts:
            why += f", perhaps a mean over {counts[0]} instead of the {selected} elements that func uses"
    text = f"the analytical gradient is {k:.4g} x the numerical one wherever it is wrong{why}"
    return Cause("constant factor", text, f"residual {residual:.0e}", confidence)


# The entries.


def _of_sample(sample: Sample, report: Report, failure: Failure, settings: Tolerances) -> list[Cause]:
    evidence = report.evidence or Evidence()
    values = list(_of_values(sample, failure, evidence, report.settings.order))
    structure = list(structure_causes(sample, settings))
    found = [*structure, *values]
    # These also explain the right entries, so no cause from the positions of the wrong ones is needed.
    replaces_places = {"transposed", "rolled", "permuted", "overwritten", "wrong dimension"}
    if not any(cause.name in replaces_places for cause in structure):
        found += place_causes(sample, places_named(report, failure), settings, evidence.places or ())
    found += _of_precision(sample)
    return found


def places_named(report: Report, failure: Failure) -> tuple[str, str]:
    """The names of the input and the output in causes from positions."""
    output, input_ = names_of(report, failure)
    return input_, "the output" if report.input_names else output


def _of_values(sample: Sample, failure: Failure, evidence: Evidence, order: int) -> Iterator[Cause]:
    """Causes from the relation of wrong entries to right ones."""
    a, n = sample.analytical[sample.failing], sample.numerical[sample.failing]
    finite = a.isfinite() & n.isfinite()
    a, n = a[finite], n[finite]
    count = a.numel()
    if not count or not bool((n != 0).any()):
        return
    if bool((a == 0).all()):
        others = (sample.analytical != 0) & torch.isin(sample.inputs, sample.inputs[sample.failing])
        if not bool(others.any()) and evidence.vanishes is not False:
            yield _zero(count, 0.87, order)
        elif sample.complete:
            yield _zero(count, 0.5, order)
        return
    sizes = _sizes(sample)
    if a.is_complex():
        yield from _of_complex(a, n, failure, sizes)
        return
    k, residual = _fit(a, n)
    lone = count == 1 and any(abs(k / value - 1) <= EXACT / 10 for value in (-1.0, 2.0, 0.5, *NAMED_FACTORS))
    if residual > _most_unexplained(k):
        places = [torch.unique(elements[sample.failing]).numel() for elements in (sample.inputs, sample.outputs)]
        if places == [count, count]:
            yield from _constant_difference(a, n)
    elif abs(k) > 0 and (count > 1 or lone):
        yield _factor(k.real, residual, sizes, 0.6 if lone else 0.86, _entries_per_output(sample))
        shared = shared_by(sample)
        counts = [size for size in {shared, *sample.output_shape} if size > 1 and shared and shared % size == 0]
        if any(min(abs(k.real * size - 1), abs(k.real / size - 1)) <= EXACT for size in counts):
            what = "a mean instead of a sum" if abs(k.real) < 1 else "a sum instead of a mean"
            yield Cause(
                "missing reduction",
                f"each element of the input affects {shared} outputs, and the gradient of the input is {k.real:.4g} "
                f"x the right one: {what}",
                f"residual {residual:.0e}",
                0.88,
            )


def _entries_per_output(sample: Sample) -> int:
    """Number of input elements on which each output depends; 0 if it varies or entries are missing."""
    if not sample.complete:
        return 0
    counts = torch.unique(sample.outputs[sample.numerical != 0], return_counts=True)[1]
    return int(counts[0]) if bool((counts == counts[0]).all()) else 0


def _constant_difference(a: Tensor, n: Tensor) -> Iterator[Cause]:
    """Whether wrong entries, one per input and output, differ from the right ones by the same number."""
    off = n - a
    difference = float(off.mean())
    spread = float((off - difference).abs().max())
    varying = float(n.max() - n.min()) > RESIDUAL * abs(difference)
    if a.numel() > 2 and varying and spread <= EXACT * abs(difference):
        yield Cause(
            "missing term",
            f"{difference:.4g} is missing from the gradient wherever it is wrong: backward omits a term "
            "of func that is linear in the input, for example a residual connection",
            f"in {a.numel()} entries, to within {spread:.0e}",
            0.9,
        )


def _of_complex(a: Tensor, n: Tensor, failure: Failure, sizes: dict[str, int]) -> Iterator[Cause]:
    if a.numel() == 1:
        return
    k, residual = _fit(a, n)
    conjugate, conjugate_residual = _fit(a, n.conj().resolve_conj())
    if residual <= _most_unexplained(k):
        if abs(k.imag) <= RESIDUAL * abs(k):
            yield _factor(k.real, residual, sizes, 0.86)
        else:
            yield Cause(
                "complex factor",
                f"the analytical gradient is {_complex_text(k)} x the numerical one wherever it is wrong: the factor "
                f"{_complex_text(1 / k)} is missing",
                f"residual {residual:.0e}",
                0.89,
            )
    elif conjugate_residual <= RESIDUAL:
        c = conjugate if failure.part != "imaginary" else -conjugate
        plain = abs(c - 1) <= EXACT
        yield Cause(
            "missing conjugate" if plain else "complex factor",
            "the analytical gradient is the complex conjugate of the right one"
            + (": a conj() is missing" if plain else f", multiplied by {_complex_text(c)}"),
            f"residual {conjugate_residual:.0e}",
            0.95 if plain else 0.85,
        )
    else:
        for part, kept in (("real", n.real + 0j), ("imaginary", 1j * n.imag)):
            scale, part_residual = _fit(a, kept)
            if part_residual <= RESIDUAL and bool((kept != 0).any()):
                yield Cause(
                    "complex factor",
                    f"the analytical gradient is the {part} part of the right one"
                    + ("" if abs(scale - 1) <= EXACT else f", times {_complex_text(scale)}"),
                    f"residual {part_residual:.0e}",
                    0.9,
                )


def _complex_text(k: complex) -> str:
    """A complex factor without a part that is only rounding."""
    if abs(k.imag) <= EXACT * abs(k):
        return f"{k.real:.4g}"
    return f"{k.imag:.4g}j" if abs(k.real) <= EXACT * abs(k) else f"{k:.4g}"


def _fit(a: Tensor, n: Tensor) -> tuple[complex, float]:
    """The k that minimizes |a - k n|, and the residual |a - k n| / |a|; (0, infinity) if a or n is zero."""
    total = float((n.abs() ** 2).sum())
    size = float(a.abs().square().sum().sqrt())
    if not total or not size:
        return 0j, math.inf
    k = complex((a * n.conj()).sum().item()) / total
    difference = a - (k if a.is_complex() else k.real) * n
    return k, float(difference.abs().square().sum().sqrt()) / size


def _sizes(sample: Sample) -> dict[str, int]:
    """Sizes by which a gradient may be off as a factor; keys: descriptions of the sizes."""
    sizes: dict[str, int] = {}
    for who, shape in (("input", sample.input_shape), ("output", sample.output_shape)):
        for dim, size in enumerate(shape):
            sizes.setdefault(f"the {size} elements along dimension {dim} of the {who}", size)
        sizes.setdefault(f"the {math.prod(shape)} elements of the {who}", math.prod(shape))
    return sizes


# The precision of the analytical entries.


def _of_precision(sample: Sample) -> Iterator[Cause]:
    """The cause if a lower dtype represents all analytical entries exactly, and their errors are about its rounding."""
    a, n = sample.analytical, sample.numerical
    if bool((sample.failing & ((a == 0) | (n == 0))).any()):
        return  # an entry that is zero does not result from rounding
    if a.is_complex():
        a, n = torch.view_as_real(a).reshape(-1), torch.view_as_real(n).reshape(-1)
    nonzero = (a != 0) & (n != 0) & a.isfinite()
    a, n = a[nonzero], n[nonzero]
    if a.numel() < 3 or torch.unique(a).numel() < 3:
        return
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        short = str(dtype).removeprefix("torch.")
        off = ((a - n).abs() / n.abs()).max()
        fits = bool((a.to(dtype).to(a.dtype) == a).all())
        simple = bool((a.to(torch.float64) * 16 == (a * 16).round()).all())
        if fits and not simple and float(off) <= 8 * torch.finfo(dtype).eps:
            yield Cause(
                "low precision",
                f"backward computes in {short}: {short} represents all entries of the analytical gradient exactly",
                f"{a.numel()} entries, relative errors of up to {float(off):.0e}",
                0.95,
            )
            return
