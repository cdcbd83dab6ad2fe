"""Evidence -> probable causes. Silent where there is none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from fastgrad.report import (
    Cause,
    CauseName,
    Comparison,
    Entry,
    Evidence,
    Failure,
    Report,
    Sample,
    Settings,
    Tolerances,
    modulus,
)

RESIDUAL = 1e-3
"""A constant factor is named when this much of the analytical entries, or less, is left unexplained."""

EXACT = 1e-4
"""How far a factor may be from 2, -1 or a size to be called that."""

DEVIATES = 1e-6
"""Two gradients that should be multiples of each other are not from here on; rounding explains less."""

CHANCE = 0.1
"""A rule for which entries are wrong is named where chance would fit one like it this rarely."""

CHANCE_OF_PLACES = 0.35
"""The same for slices and ends of a dimension, which are where mistakes are."""

JUMP = 30.0
"""By how much errors inside of a region, over what is allowed, exceed those outside at least."""

LARGEST_MATRIX = 1 << 18
"""Entries of a Jacobian up to which it is compared with its rearrangements."""

MOST_SHIFTS = 256

SOME = 256
"""Wrong entries that refute most rearrangements."""

Side = Literal["input", "output"]

LEAST_BLOCK = 4
"""Of a kernel, in elements along a dimension; a power of two."""


def diagnose(report: Report) -> tuple[Cause, ...]:
    """What may be behind a failure, the most probable first; nothing where no evidence speaks for anything."""
    failure = report.failure
    if failure is None:
        return ()
    evidence = report.evidence or Evidence()
    own = report.settings.of(failure.input or 0)
    found = [
        *_of_kind(failure),
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
    best: dict[CauseName, Cause] = {}
    for cause in sorted(found, key=lambda cause: -cause.confidence):
        best.setdefault(cause.name, cause)
    return tuple(_without_contradictions(list(best.values())))


def _without_contradictions(causes: list[Cause]) -> Iterator[Cause]:
    """Where the function itself is at fault, or backward no linear map, its entries are no evidence."""
    first = causes[0].name if causes else None
    numerical = {"kink", "low precision", "truncation", "rounding"}
    for cause in causes:
        if first in {"race", "nonlinear backward", *numerical} and cause.name != first:
            continue
        if cause.confidence >= 0.3:
            yield cause


# Kinds of failure that are evidence themselves.


def _of_kind(failure: Failure) -> Iterator[Cause]:
    if failure.kind == "nonzero numerical gradient":
        yield Cause(
            "zero gradient",
            "no gradient gets through func: a detach(), .data, .item(), .numpy() or no_grad() on the way",
            f"a difference of {failure.detail}, and no output requires grad",
            0.9,
        )


# The function: whether it moves, bends, rounds.


def _of_func(failure: Failure, evidence: Evidence, settings: Settings) -> Iterator[Cause]:
    if evidence.func_moves:
        yield Cause(
            "race",
            "func itself gives other values each time it is called: random numbers, atomic additions, or memory "
            "that nobody wrote",
            f"two calls at the same inputs differ by {evidence.func_moves:.1e}",
            0.97,
        )
    if evidence.output_dtype is not None and failure.kind == "mismatch":
        yield Cause(
            "low precision",
            f"func is computed in a lower precision, {evidence.output_dtype}, and returned in double: all values of "
            "the output fit in that without rounding",
            "none of them has a longer fraction",
            0.96,
        )
    elif failure.trouble == "low precision":
        yield Cause("low precision", failure.detail, "differences over many steps", 0.9)
    elif failure.trouble == "kink":
        yield Cause("kink", failure.detail, "differences on either side", 0.95)
    worst = failure.comparison.worst if failure.comparison else None
    own = settings.of(failure.input or 0)
    if worst is not None and evidence.slopes:
        yield from _of_stairs(own.eps, worst, evidence.slopes)
    if worst is not None and failure.convergence and evidence.rounding is not None:
        slopes = {difference.step: complex(difference.estimate).real for difference in failure.convergence}
        yield from _of_steps(own.eps, complex(worst.analytical).real, slopes, evidence.rounding)


def _of_stairs(eps: float, worst: Entry, slopes: tuple[tuple[float, float], ...]) -> Iterator[Cause]:
    """Whether func stands still for steps of eps and goes the analytical entry's way for large ones."""
    slope = max(slopes)[1]
    analytical = complex(worst.analytical).real
    if modulus(worst.numerical) == 0 and slope and abs(slope - analytical) <= abs(analytical) / 4:
        yield Cause(
            "low precision",
            f"func is a staircase: it stands still for steps of {eps:g}, and for large ones it goes as the analytical "
            "gradient says; something inside is rounded, to a lower precision or by a round()",
            f"a slope of {slope:.3g} over a step of {max(slopes)[0]:.2g}, analytical {analytical:.3g}",
            0.9,
        )


def _of_steps(eps: float, analytical: float, slopes: dict[float, float], ulp: float) -> Iterator[Cause]:
    """Whether the analytical entry is what differences would be, were they not too coarse or too noisy."""
    measured = min(slopes, key=lambda h: abs(math.log(h / eps)))
    off = abs(slopes[measured] - analytical)
    blur = 8 * ulp / measured
    if off <= blur:
        yield Cause(
            "rounding",
            f"the difference at eps = {eps:g} is lost in rounding: one ulp of func's value, over eps, is "
            f"{ulp / eps:.1e}; a larger eps, or values without what they share, would tell",
            f"|difference| {off:.1e}",
            0.92,
        )
        return
    finer = [(h, slope) for h, slope in slopes.items() if h < measured and abs(slope - analytical) <= 8 * ulp / h < off]
    if finer:
        h, slope = finer[0]
        yield Cause(
            "truncation",
            f"eps = {eps:g} is too large for func's curvature: at {h:.1e} the difference is {slope:.6g}, which the "
            "analytical gradient agrees with to within rounding",
            f"off by {off:.1e} at eps, by {abs(slope - analytical):.1e} there",
            0.88,
        )


# The backward as a map of grad_output.


def _of_backward(failure: Failure, evidence: Evidence, settings: Settings) -> Iterator[Cause]:
    moving = list(_of_runs(evidence, settings))
    yield from moving
    if moving:
        return  # gradients that move tell nothing else
    linear = failure.kind != "mismatch"
    if evidence.after_others is not None and evidence.after_others > DEVIATES:
        yield Cause(
            "saved tensor",
            "backward reads something that other calls of func write: a tensor kept in a global, on the class or in "
            "a shared buffer, where ctx.save_for_backward would keep one a graph",
            f"the gradient changes by {evidence.after_others:.1e} of itself when func is called elsewhere before it",
            0.93,
        )
    if evidence.at_zero is not None and evidence.at_zero != 0:
        yield Cause(
            "nonlinear backward",
            "backward adds something that does not depend on grad_output, or leaves grad_output out",
            f"a gradient of {evidence.at_zero:.2g} for a zero grad_output",
            0.95,
        )
    bent = [(c, deviation, size) for c, deviation, size in evidence.scaled or () if not deviation <= DEVIATES]
    if bent:
        yield Cause("nonlinear backward", _how_nonlinear(evidence.scaled or ()), _scaled_measure(bent), 0.94)
        return
    for deviation, how in ((evidence.gapped, "non-contiguous"), (evidence.expanded, "expanded (stride 0)")):
        if deviation is not None and not deviation <= DEVIATES:
            raises = math.isinf(deviation)
            yield Cause(
                "layout of grad_output",
                f"backward {'raises' if raises else 'is wrong'} for a grad_output that is {how}, and not for a "
                "contiguous copy: a data_ptr(), view() or kernel that takes it for contiguous",
                "the contiguous copy raises nothing" if raises else f"the two differ by {deviation:.1e} of themselves",
                0.93 if linear or how == "non-contiguous" else 0.8,
            )
            break
    if evidence.added is not None and not evidence.added <= DEVIATES:
        yield Cause(
            "nonlinear backward",
            "backward is not additive in grad_output: a quantization, a maximum, or a product of its elements",
            f"gradients for two dense grad_outputs do not add up, by {evidence.added:.1e}",
            0.94,
        )
    elif evidence.split is not None and not evidence.split <= DEVIATES:
        right = "dense" if evidence.dense_error is not None and evidence.dense_error <= 10 * DEVIATES else "sparse"
        yield Cause(
            "sparse grad_output",
            "backward looks at which elements of grad_output are zero: it is right "
            + ("for dense ones only" if right == "dense" else "for ones with a single element only, if for any"),
            f"gradients for parts of a grad_output do not add up, by {evidence.split:.1e}",
            0.92,
        )


def _of_runs(evidence: Evidence, settings: Settings) -> Iterator[Cause]:
    graphs = evidence.runs
    if graphs is None or not max(map(max, graphs)) > settings.nondet_tol:
        return
    runs = [deviation for graph in graphs for deviation in graph]
    measure = f"{len(runs)} runs of one VJP differ by up to {max(runs):.1e} of the gradient"
    if all(graph == graphs[0][: len(graph)] for graph in graphs):
        yield Cause(
            "saved tensor",
            "backward changes a tensor that forward saved: it gives other values when it is called again, and the "
            "first ones again after another forward",
            measure,
            0.96,
        )
    elif all(earlier < later for earlier, later in itertools.pairwise(runs)):
        yield Cause(
            "saved tensor",
            "each call of backward moves the gradient further: it changes what it reads, an input or something kept "
            "from call to call",
            measure,
            0.96,
        )
    else:
        yield Cause(
            "race",
            "backward gives other values each time: atomic additions, threads that do not wait, or memory that nobody "
            "wrote",
            measure,
            0.95,
        )


def _how_nonlinear(scaled: tuple[tuple[float, float, float], ...]) -> str:
    sizes = {c: size for c, _, size in scaled}
    deviations = {c: deviation for c, deviation, _ in scaled}
    powers = [math.log(size) / math.log(c) for c, size in sizes.items() if c > 0 and size > 0 and math.isfinite(size)]
    if deviations.get(-1.0, 0.0) > DEVIATES and all(d <= DEVIATES for c, d in deviations.items() if c > 0):
        return "backward treats positive and negative grad_outputs differently: an abs(), a relu, or a comparison"
    if powers and max(powers) - min(powers) < 0.01:
        power = round(sum(powers) / len(powers), 2)
        if abs(power) < 0.01:
            return "backward takes no notice of how large grad_output is: its sign(), or not it at all"
        return f"backward raises grad_output to the power {power:g}"
    return "backward is not linear in grad_output: a clamp, a quantization, or a product of two grad_outputs"


def _scaled_measure(bent: list[tuple[float, float, float]]) -> str:
    c, deviation, size = bent[0]
    return f"a grad_output {c:g} times as large: a gradient {size:.3g} times as large, off by {deviation:.1e}"


# Forward mode beside reverse mode.


def _of_modes(failure: Failure, evidence: Evidence, settings: Settings) -> Iterator[Cause]:
    worst, other = failure.comparison.worst if failure.comparison else None, evidence.other_mode
    if worst is None or other is None or failure.trouble is not None:
        return
    own, name = ("backward", "forward") if failure.mode == "reverse" else ("jvp", "reverse")
    numerical, analytical = complex(worst.numerical), complex(worst.analytical)
    tolerances = settings.of(failure.input or 0)
    allowed = tolerances.atol + tolerances.rtol * modulus(numerical)
    both = settings.check_forward_ad and settings.check_backward_ad
    adjoint = "" if evidence.adjoint_error is None else f"; adjoint test off by {evidence.adjoint_error:.1e}"
    if modulus(other - numerical) <= allowed:
        yield Cause(
            "modes disagree",
            f"{name} mode is right there, and differs: {own} alone is wrong",
            f"{name} mode gives {_number(other)}{adjoint}",
            0.97 if both else 0.45,
        )
    elif modulus(other - analytical) <= EXACT * modulus(analytical) and modulus(other) > 0:
        yield Cause(
            "both modes wrong",
            "forward and reverse mode agree with each other, and both differ from func: a formula that both use, or "
            "a func that computes something else",
            f"{name} mode gives {_number(other)}{adjoint}",
            0.97 if both else 0.45,
        )


def _number(value: complex) -> str:
    return f"{value:.6g}" if value.imag else f"{value.real:.6g}"


def _of_experiments(failure: Failure, evidence: Evidence) -> Iterator[Cause]:
    if evidence.explanation is not None:
        explanation = evidence.explanation
        text, confidence = explanation.text, 0.94
        if explanation.name == "saved tensor":
            text += ": what forward saved was changed afterwards, or is not what backward takes it for"
            confidence = 0.85
        yield Cause(
            explanation.name, text, f"explains random sums of all entries to {explanation.error:.0e}", confidence
        )
    other = evidence.other_part
    if other is not None and failure.mode == "reverse" and failure.comparison and failure.comparison.worst:
        worst = failure.comparison.worst
        found, wanted = complex(worst.analytical), complex(worst.numerical)
        off, size = modulus(other[0] - other[1]), modulus(other[1])
        if modulus(found + wanted) <= RESIDUAL * modulus(wanted) and off <= RESIDUAL * size:
            yield Cause(
                "missing conjugate",
                f"the {failure.part} part has the wrong sign and the other part is right: a missing conj(), of "
                "grad_output or of what multiplies it",
                f"the other part is off by {off:.0e}",
                0.97,
            )
        elif modulus(found) == 0 and size and off <= RESIDUAL * size:
            dropped = "imaginary" if failure.part == "imaginary" else "real"
            yield Cause(
                "complex factor",
                f"the {dropped} part of grad_output is dropped, and the other part is right: a .real or .imag in "
                "backward",
                f"the other part is off by {off:.0e}",
                0.95,
            )


# Sums over the wrong entries: all that is known where no sample could be taken.


def constant_factor(comparison: Comparison) -> tuple[float, float] | None:
    """(k, residual) if analytical = k * numerical over the mismatched entries, by least squares.

    residual is |analytical - k numerical| / |analytical|; at least two entries are needed.
    """
    if comparison.mismatches < 2 or not comparison.sum_analytical * comparison.sum_numerical > 0:
        return None
    if abs(comparison.sum_product.imag) > RESIDUAL * abs(comparison.sum_product):
        return None
    factor = comparison.sum_product.real / comparison.sum_numerical
    unexplained = 1 - abs(comparison.sum_product) ** 2 / (comparison.sum_analytical * comparison.sum_numerical)
    residual = math.sqrt(max(0.0, unexplained))
    return (factor, residual) if residual <= RESIDUAL else None


def is_zero(comparison: Comparison) -> bool:
    """Whether every mismatched analytical entry is zero."""
    return comparison.mismatches > 0 and comparison.sum_analytical == 0 and comparison.sum_numerical > 0


def _of_sums(comparison: Comparison) -> Iterator[Cause]:
    if is_zero(comparison):
        yield _zero(comparison.mismatches, 0.6)
    factor = constant_factor(comparison)
    if factor is not None:
        yield _factor(*factor, {}, 0.6)


def _zero(count: int, confidence: float) -> Cause:
    return Cause(
        "zero gradient",
        "the analytical gradient is zero wherever it is wrong: a missing term, or a None",
        f"{count} {'entry' if count == 1 else 'entries'}, all zero",
        confidence,
    )


def _factor(k: float, residual: float, sizes: dict[str, int], confidence: float) -> Cause:
    if abs(k + 1) <= EXACT:
        return Cause(
            "sign", "the analytical gradient has the wrong sign", f"residual {residual:.0e}", confidence + 0.01
        )
    known = [what for what, size in sizes.items() if size > 2 and abs(k / size - 1) <= EXACT]
    inverse = [what for what, size in sizes.items() if size > 2 and abs(k * size - 1) <= EXACT]
    why = f": a missing factor {1 / k:.4g}"
    if known:
        why += f", a mean over {known[0]} perhaps"
    elif inverse:
        why += f", a mean for a sum over {inverse[0]} perhaps"
    text = f"the analytical gradient is {k:.4g} x the numerical one there{why}"
    return Cause("constant factor", text, f"residual {residual:.0e}", confidence)


# The entries.


def _of_sample(sample: Sample, report: Report, failure: Failure, settings: Tolerances) -> list[Cause]:
    evidence = report.evidence or Evidence()
    values, structure = list(_of_values(sample, failure, evidence)), list(_of_structure(sample, settings))
    found = [*structure, *values]
    # A rearrangement explains right entries, too; a rule for where entries are wrong comes before what they are.
    if not any(cause.name in ("transposed", "rolled", "permuted") for cause in structure):
        found += _of_places(sample, _names(report, failure), settings)
    found += _of_precision(sample)
    return found


def _of_values(sample: Sample, failure: Failure, evidence: Evidence) -> Iterator[Cause]:
    """What the wrong entries are of the right ones."""
    a, n = sample.analytical[sample.failing], sample.numerical[sample.failing]
    finite = a.isfinite() & n.isfinite()
    a, n = a[finite], n[finite]
    count = a.numel()
    if not count or not bool((n != 0).any()):
        return
    if bool((a == 0).all()):
        others = (sample.analytical != 0) & torch.isin(sample.inputs, sample.inputs[sample.failing])
        if not bool(others.any()) and evidence.vanishes is not False:
            yield _zero(count, 0.87)
        elif sample.complete:
            yield _zero(count, 0.5)
        return
    sizes = _sizes(sample)
    if a.is_complex():
        yield from _of_complex(a, n, failure, sizes)
        return
    k, residual = _fit(a, n)
    lone = count == 1 and any(abs(k / value - 1) <= EXACT / 10 for value in (-1.0, 2.0, 0.5))
    if residual <= RESIDUAL and abs(k) > 0 and (count > 1 or lone):
        yield _factor(k.real, residual, sizes, 0.6 if lone else 0.86)
        shared = _shared(sample)
        counts = [size for size in {shared, *sample.output_shape} if size > 1 and shared and shared % size == 0]
        if any(min(abs(k.real * size - 1), abs(k.real / size - 1)) <= EXACT for size in counts):
            what = "a mean where a sum belongs" if abs(k.real) < 1 else "a sum where a mean belongs"
            yield Cause(
                "missing reduction",
                f"the gradient of the input, each element of which goes to {shared} outputs, is {k.real:.4g} x what "
                f"it should be: {what}",
                f"residual {residual:.0e}",
                0.88,
            )


def _of_complex(a: Tensor, n: Tensor, failure: Failure, sizes: dict[str, int]) -> Iterator[Cause]:
    k, residual = _fit(a, n)
    conjugate, conjugate_residual = _fit(a, n.conj().resolve_conj())
    lone = a.numel() == 1
    if lone:
        return
    if residual <= RESIDUAL:
        if abs(k.imag) <= RESIDUAL * abs(k):
            yield _factor(k.real, residual, sizes, 0.86)
        else:
            yield Cause(
                "complex factor",
                f"the analytical gradient is {k:.4g} x the numerical one there: a missing factor {1 / k:.4g}",
                f"residual {residual:.0e}",
                0.89,
            )
    elif conjugate_residual <= RESIDUAL:
        c = conjugate if failure.part != "imaginary" else -conjugate
        plain = abs(c - 1) <= EXACT
        yield Cause(
            "missing conjugate" if plain else "complex factor",
            "the analytical gradient is the complex conjugate of what it should be"
            + (": a conj() is missing" if plain else f", times {c:.4g}"),
            f"residual {conjugate_residual:.0e}",
            0.95 if plain else 0.85,
        )
    else:
        for part, kept in (("real", n.real + 0j), ("imaginary", 1j * n.imag)):
            scale, part_residual = _fit(a, kept)
            if part_residual <= RESIDUAL and bool((kept != 0).any()):
                yield Cause(
                    "complex factor",
                    f"the analytical gradient is the {part} part of what it should be"
                    + ("" if abs(scale - 1) <= EXACT else f", times {scale:.4g}"),
                    f"residual {part_residual:.0e}",
                    0.9,
                )


def _fit(a: Tensor, n: Tensor) -> tuple[complex, float]:
    """The best k, and |a - k n| / |a| for it; no k where n is zero."""
    total = float((n.abs() ** 2).sum())
    size = float(a.abs().square().sum().sqrt())
    if not total or not size:
        return 0j, math.inf
    k = complex((a * n.conj()).sum().item()) / total
    difference = a - (k if a.is_complex() else k.real) * n
    return k, float(difference.abs().square().sum().sqrt()) / size


def _sizes(sample: Sample) -> dict[str, int]:
    """Sizes that a factor may be, in words."""
    sizes: dict[str, int] = {}
    for who, shape in (("input", sample.input_shape), ("output", sample.output_shape)):
        for dim, size in enumerate(shape):
            sizes.setdefault(f"the {size} places along dimension {dim} of the {who}", size)
        sizes.setdefault(f"the {math.prod(shape)} elements of the {who}", math.prod(shape))
    return sizes


def _broadcast_dims(sample: Sample) -> list[int]:
    """The dimensions of the output that the input is expanded along, as broadcasting reads shapes."""
    missing = len(sample.output_shape) - len(sample.input_shape)
    padded = (1,) * missing + sample.input_shape
    if missing < 0 or any(own not in (1, size) for own, size in zip(padded, sample.output_shape, strict=True)):
        return []
    return [dim for dim, (own, size) in enumerate(zip(padded, sample.output_shape, strict=True)) if own == 1 < size]


def _shared(sample: Sample) -> int:
    """How many outputs each element of the input goes to, where each output takes one element; otherwise 0."""
    numerical = sample.numerical != 0
    outputs, inputs = sample.outputs[numerical], sample.inputs[numerical]
    counts = torch.unique(inputs, return_counts=True)[1]
    if torch.unique(outputs).numel() < outputs.numel() or not counts.numel() or bool((counts != counts[0]).any()):
        return 0
    return int(counts[0])


# Both Jacobians as matrices: the right entries in the wrong places.


@dataclass(frozen=True)
class _Matrices:
    """Both Jacobians, shape (*output, *input); NaN where an entry is not known."""

    analytical: Tensor
    numerical: Tensor
    settings: Tolerances
    outputs: int

    def explains(self, rearranged: Tensor) -> int:
        """How many wrong entries are those of the rearranged numerical Jacobian; 0 where any known entry is not."""
        some = rearranged[self._some_wrong] - self.analytical[self._some_wrong]
        if bool((some.abs() > self.settings.atol + self.settings.rtol * rearranged[self._some_wrong].abs()).any()):
            return 0  # mostly; all entries take a hundred times as long
        known = ~(rearranged.isnan() | self.analytical.isnan())
        # Zeros agree with zeros anywhere.
        telling = known & ((self.analytical != 0) | (rearranged != 0))
        all_telling = ~self.analytical.isnan() & (self.analytical != 0)
        if int(telling.sum()) < max(2, int(all_telling.sum()) // 2):
            return 0
        if bool((~self._close(rearranged) & known).any()):
            return 0
        wrong = ~self._close(self.numerical) & telling
        return int(wrong.sum())

    @cached_property
    def _some_wrong(self) -> tuple[Tensor, ...]:
        known = ~(self.numerical.isnan() | self.analytical.isnan())
        wrong = (~self._close(self.numerical) & known).nonzero()
        return wrong[:SOME].unbind(1)

    def _close(self, other: Tensor) -> Tensor:
        allowed = self.settings.atol + self.settings.rtol * other.abs()
        return (self.analytical - other).abs() <= allowed


def _matrices(sample: Sample, settings: Tolerances) -> _Matrices | None:
    shape = (*sample.output_shape, *sample.input_shape)
    if math.prod(shape) > LARGEST_MATRIX:
        return None
    fill = 0.0 if sample.complete else math.nan
    found = []
    where = sample.outputs * math.prod(sample.input_shape) + sample.inputs
    for values in (sample.analytical, sample.numerical):
        matrix = torch.full((math.prod(shape),), fill, dtype=values.dtype, device="cpu")
        matrix[where] = values
        found.append(matrix.reshape(shape))
    return _Matrices(found[0], found[1], settings, len(sample.output_shape))


def _of_structure(sample: Sample, settings: Tolerances) -> Iterator[Cause]:
    matrices = _matrices(sample, settings)
    if matrices is None:
        return
    for explain in (_of_rearrangements, _of_transpose, _of_broadcasting, _of_permutations, _of_reductions):
        found = list(explain(matrices, sample))
        yield from found
        if found:
            return


@dataclass(frozen=True)
class Rearrangement:
    """What may have happened to the dimensions of one side; apply takes a tensor and where these dimensions begin."""

    name: CauseName
    text: str
    apply: Callable[[Tensor, int], Tensor]


def rearrangements(shape: tuple[int, ...], side: Side, most_shifts: int = MOST_SHIFTS) -> Iterator[Rearrangement]:
    """What may have happened to the gradient of an input, or to grad_output: transposed, shifted or reversed."""
    what = "the gradient of the input" if side == "input" else "grad_output"
    dims = range(len(shape))
    for p, q in itertools.combinations(dims, 2):
        if shape[p] == shape[q] > 1:
            text = f"{what} is transposed: dimensions {p} and {q} of the {side} have changed places"
            yield Rearrangement("transposed", text, partial(_swapped, p, q))
    for dim, size in enumerate(shape):
        for shift in _nearest_first(size, most_shifts):
            text = f"{what} is shifted by {shift} along dimension {dim}"
            yield Rearrangement("rolled", text, partial(_rolled, shift, dim))
    if len(shape) > 1:
        for shift in _nearest_first(math.prod(shape), most_shifts):
            text = f"{what} is shifted by {shift} in memory, over all of its elements"
            yield Rearrangement("rolled", text, partial(_rolled_flat, shift, len(shape)))
    for dim, size in enumerate(shape):
        if size > 1:
            yield Rearrangement("permuted", f"{what} is reversed along dimension {dim}", partial(_flipped, (dim,)))
    if len(shape) > 1:
        yield Rearrangement("permuted", f"{what} is reversed along all dimensions", partial(_flipped, tuple(dims)))


def _swapped(p: int, q: int, tensor: Tensor, first: int) -> Tensor:
    return tensor.transpose(first + p, first + q)


def _rolled(shift: int, dim: int, tensor: Tensor, first: int) -> Tensor:
    return tensor.roll(shift, first + dim)


def _rolled_flat(shift: int, dims: int, tensor: Tensor, first: int) -> Tensor:
    return tensor.flatten(first, first + dims - 1).roll(shift, first).reshape(tensor.shape)


def _flipped(dims: tuple[int, ...], tensor: Tensor, first: int) -> Tensor:
    return tensor.flip([first + dim for dim in dims])


def _nearest_first(size: int, most: int) -> Iterable[int]:
    shifts = itertools.chain.from_iterable((k, -k) for k in range(1, size // 2 + 1))
    return itertools.islice((shift for shift in shifts if -shift * 2 != size), most)


def _of_rearrangements(matrices: _Matrices, sample: Sample) -> Iterator[Cause]:
    """The right entries, all dimensions of one side rearranged."""
    sides: tuple[tuple[Side, int, tuple[int, ...]], ...] = (
        ("input", matrices.outputs, sample.input_shape),
        ("output", 0, sample.output_shape),
    )
    for side, first, shape in sides:
        for rearrangement in rearrangements(shape, side):
            count = matrices.explains(rearrangement.apply(matrices.numerical, first))
            if count > 1:
                yield Cause(rearrangement.name, rearrangement.text, f"explains all {count} wrong entries", 0.94)
                return


def _of_transpose(matrices: _Matrices, sample: Sample) -> Iterator[Cause]:
    """Forward's matrix where its transpose belongs, in all dimensions or along one."""
    if sample.input_shape != sample.output_shape or not sample.output_shape:
        return
    n, outputs = matrices.numerical, matrices.outputs
    candidates = [("", n.permute(*range(outputs, n.dim()), *range(outputs)))]
    candidates += [(f"along dimension {dim} ", n.transpose(dim, outputs + dim)) for dim in range(outputs)]
    for along, transposed in candidates:
        count = matrices.explains(transposed)
        if count < 2:
            continue
        measure = f"explains all {count} wrong entries"
        flat = n.reshape(math.prod(sample.output_shape), -1) != 0
        if bool((flat.sum(0) <= 1).all()) and bool((flat.sum(1) <= 1).all()):
            yield Cause("permuted", _INVERSE, measure, 0.94)
        else:
            yield Cause("transposed", ADJOINT.format(along), measure, 0.94)
        return


_INVERSE = "backward permutes as forward does, where the inverse permutation belongs"
ADJOINT = (
    "{}the analytical Jacobian is the transpose of the numerical one: backward applies a matrix, a kernel or a scan as "
    "forward does, where its transpose belongs"
)


def _of_permutations(matrices: _Matrices, sample: Sample) -> Iterator[Cause]:
    """The right values of each row, or each column, in some other order."""
    if not sample.complete:
        return
    m, size = math.prod(sample.output_shape), math.prod(sample.input_shape)
    a, n = (matrix.reshape(m, size) for matrix in (matrices.analytical, matrices.numerical))
    if a.is_complex():
        a, n = a.abs(), n.abs()
    allowed = matrices.settings.atol + matrices.settings.rtol * n.abs().max()
    for dim, what, count in ((1, "the gradient", size), (0, "grad_output", m)):
        other = n.shape[1 - dim]
        if count < 2 or other < 2:
            continue
        apart = (a.sort(dim).values - n.sort(dim).values).abs().max()
        moved = int((~((a - n).abs() <= allowed)).any(1 - dim).sum())
        # A row of equal values has no order.
        spread = (n.amax(dim) - n.amin(dim)).max()
        if bool(apart <= allowed) and moved > 1 and bool(spread > 10 * allowed):
            yield Cause(
                "permuted",
                f"{what} holds the right values in the wrong places: an index, or its inverse, taken for the other",
                f"sorted, the entries agree to {float(apart):.0e}; {moved} of {count} places moved",
                0.91,
            )
            return


@dataclass(frozen=True)
class _Flat:
    """Both Jacobians, shape (outputs, inputs), real; zero where an entry is not known; and which entries differ."""

    a: Tensor
    n: Tensor
    known: Tensor
    wrong: Tensor


def _flattened(matrices: _Matrices, sample: Sample) -> _Flat | None:
    if matrices.analytical.is_complex():
        return None
    shape = math.prod(sample.output_shape), math.prod(sample.input_shape)
    a, n = (matrix.reshape(shape) for matrix in (matrices.analytical, matrices.numerical))
    known = ~(a.isnan() | n.isnan())
    a, n = a.nan_to_num(0.0), n.nan_to_num(0.0)
    wrong = known & ~((a - n).abs() <= matrices.settings.atol + matrices.settings.rtol * n.abs())
    return _Flat(a, n, known, wrong)


def _of_broadcasting(matrices: _Matrices, sample: Sample) -> Iterator[Cause]:
    """A sum over the wrong dimensions of grad_output, where the input was expanded."""
    flat = _flattened(matrices, sample)
    if flat is None or _shared(sample) < 2 or not bool((flat.a != 0).any()):
        return
    # Each output depends on one element of the input: all of its row is that entry, or that of another dimension.
    row = flat.n.gather(1, flat.n.abs().argmax(1, keepdim=True))
    equal = (flat.a - row).abs() <= matrices.settings.atol + matrices.settings.rtol * row.abs()
    everywhere = bool((equal | ~flat.known).all())
    misplaced = bool(_broadcast_dims(sample)) and bool((equal | (flat.a == 0) | ~flat.known).all())
    if (everywhere and flat.a.shape[1] > 1) or (misplaced and bool((flat.wrong & (flat.n == 0)).any())):
        yield Cause(
            "missing reduction",
            "the gradient of the input, each element of which goes to several outputs, is summed over "
            + ("all of grad_output" if everywhere else "the wrong dimension of grad_output"),
            f"explains all {int(flat.wrong.sum())} wrong entries",
            0.95,
        )


def _of_reductions(matrices: _Matrices, sample: Sample) -> Iterator[Cause]:
    """A sum or mean over grad_output that is missing."""
    flat = _flattened(matrices, sample)
    if flat is None:
        return
    a, n, known, wrong = flat.a, flat.n, flat.known, flat.wrong
    lost, extra, total = wrong & (a == 0), wrong & (n == 0), int(wrong.sum())
    columns = (n != 0).any(0)
    # Columns that lost most of their entries and kept some.
    columns_lost = lost.any(0)
    kept = (a != 0).any(0)
    share = lost[:, columns_lost].sum() / max(1, int((n[:, columns_lost] != 0).sum()))
    spread = int(columns_lost.sum()) * 2 >= int(columns.sum())
    both = int((columns_lost & kept).sum()) * 2 >= int(columns_lost.sum()) > 0
    if int(lost.sum()) * 2 >= total > 1 and both and spread and float(share) >= 0.45:
        yield Cause(
            "missing reduction",
            "each element's gradient leaves out most of the outputs that depend on it: a sum or a mean over "
            f"grad_output is missing{_along(_broadcast_dims(sample))}",
            f"{int(lost.sum())} of {total} wrong entries are zero, in columns that have others",
            0.92,
        )
        return
    if int(extra.sum()) * 2 < total and _is_outer(torch.where(known, a - n, 0.0), n):
        yield Cause(
            "missing reduction",
            "what is missing is the same for many elements, up to factors of a row and of a column: a sum or a mean "
            "over grad_output, that is subtracted or added back",
            "the error is an outer product within each part",
            0.75,
        )


def _along(dims: list[int]) -> str:
    return f" along dimension{'s' if len(dims) > 1 else ''} {', '.join(map(str, dims))} of the output" if dims else ""


def _is_outer(error: Tensor, n: Tensor) -> bool:
    """Whether an error is an outer product of two vectors in each of its parts that share no row or column."""
    size = error.abs()
    noise = 1e-6 * float(size.max())
    left = size > noise
    parts = 0
    while bool(left.any()) and parts < 64:
        row = int(left.any(1).nonzero()[0])
        columns = left[row]
        rows = left[:, columns].any(1)
        if int(rows.sum()) < 3 or int(columns.sum()) < 3:
            return False
        block = error[rows][:, columns]
        if bool(left[rows].any(0).logical_and(~columns).any()):
            return False  # not a part by itself
        values = torch.linalg.svdvals(block)
        wanted = torch.linalg.svdvals(n[rows][:, columns])
        if float(values[1]) > RESIDUAL * float(values[0]) or float(wanted[1]) <= RESIDUAL * float(wanted[0]):
            return False
        left = left & ~(rows.unsqueeze(1) & columns.unsqueeze(0))
        parts += 1
    return parts > 0


# Where the wrong entries are.


def _names(report: Report, failure: Failure) -> tuple[str, str]:
    """What to call the input and the output; outputs have no names yet where inputs have."""
    if report.input_names and failure.input_position is not None:
        return report.input_names[failure.input_position], "the output"
    return f"in{failure.input}", f"out{failure.output}"


@dataclass(frozen=True)
class _Places:
    """The elements of one side that the Jacobian has entries about: which are wrong, their values at x, and more.

    excess: the largest error there over what is allowed. mixing: as `_mixing`.
    """

    side: str
    shape: tuple[int, ...]
    elements: Tensor
    bad: Tensor
    values: Tensor | None
    excess: Tensor
    mixing: frozenset[int] | None

    @property
    def index(self) -> Tensor:
        """Multi-indices, shape (elements, dimensions)."""
        return torch.stack(_unraveled(self.elements, self.shape), 1)

    def chance(self) -> float:
        """How often as many wrong elements would be those of one given rule by chance."""
        total, bad = self.bad.numel(), int(self.bad.sum())
        return math.exp(math.lgamma(bad + 1) + math.lgamma(total - bad + 1) - math.lgamma(total + 1))


def _places(sample: Sample, side: str, settings: Tolerances) -> _Places | None:
    elements, values, shape = (
        (sample.inputs, sample.input_values, sample.input_shape)
        if side == "input"
        else (sample.outputs, sample.output_values, sample.output_shape)
    )
    telling = (sample.analytical != 0) | (sample.numerical != 0)
    own = elements[telling]
    unique, number = torch.unique(own, return_inverse=True)
    bad = torch.zeros(unique.numel(), dtype=torch.bool, device="cpu")
    failing = sample.failing[telling]
    bad[number[failing]] = True
    if not shape or unique.numel() < 2 or not bool(bad.any()) or bool(bad.all()):
        return None
    if int(failing.sum()) * 2 <= int(bad[number].sum()) and int(bad.sum()) < 3:
        return None  # single entries are wrong, not what is at these places
    if values is not None:
        of_each = torch.empty(unique.numel(), dtype=values.dtype, device="cpu")
        of_each[number] = values[telling]
        values = of_each
    allowed = settings.atol + settings.rtol * sample.numerical.abs()
    of_entries = ((sample.analytical - sample.numerical).abs() / allowed).nan_to_num(math.inf)[telling]
    excess = torch.zeros(unique.numel(), dtype=torch.float64, device="cpu").scatter_reduce(
        0, number, of_entries, "amax"
    )
    return _Places(side, shape, unique, bad, values, excess, _mixing(sample, telling))


def _unraveled(elements: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
    """The indices of elements along each dimension; torch.unravel_index imports a second's worth of compiler."""
    found = []
    for size in reversed(shape):
        found.append(elements % size)
        elements = elements // size
    return found[::-1]


def _mixing(sample: Sample, telling: Tensor) -> frozenset[int] | None:
    """Dimensions along which outputs depend on inputs at other places; None where the sides have other dimensions."""
    if len(sample.input_shape) != len(sample.output_shape):
        return None
    ins = _unraveled(sample.inputs[telling], sample.input_shape)
    outs = _unraveled(sample.outputs[telling], sample.output_shape)
    return frozenset(dim for dim, (i, o) in enumerate(zip(ins, outs, strict=True)) if bool((i != o).any()))


def _of_places(sample: Sample, names: tuple[str, str], settings: Tolerances) -> list[Cause]:
    found: list[Cause] = []
    for side in ("input", "output"):
        places = _places(sample, side, settings)
        if places is None:
            continue
        name = names[0] if side == "input" else names[1]
        # What an output's place is to an input's, where each has one of the other.
        share = 0.0 if side == "input" else 0.01
        for rule in (_tail, _ends, _slice, _region):
            cause = rule(places, name)
            if cause is not None:
                found.append(replace(cause, confidence=cause.confidence - share))
    return found


def _rule(
    name: CauseName, text: str, places: _Places, likely: float, base: float, most: float = CHANCE
) -> Cause | None:
    """A cause for a rule that all wrong elements, and no right ones, obey; None where chance would do."""
    if likely > most:
        return None
    bad, total = int(places.bad.sum()), places.bad.numel()
    of = f"{f'all {bad} wrong ones' if bad > 1 else 'the only wrong one'} of {total} elements, and no right one"
    return Cause(name, text, of, base * (1 - likely))


def _extent(index: Tensor) -> tuple[int, int]:
    return int(index.min()), int(index.max())


def _tail(places: _Places, name: str) -> Cause | None:
    """Wrong from a multiple of a block's size on, along a dimension, along several, or over all elements."""
    index, bad = places.index, places.bad
    total = math.prod(places.shape)
    bounds = []
    for dim, size in enumerate(places.shape):
        bounds.append((f"dimension {dim} of {name}", index[:, dim], size))
    if len(places.shape) > 1:
        bounds.append((f"the elements of {name} in memory", places.elements, total))
    for what, along, size in bounds:
        block = _tail_block(_extent(along[~bad])[1], _extent(along[bad])[0], size)
        if block is not None:
            start = size - size % block
            text = f"wrong in the last tile only: from {start} on of {size} along {what}, the last multiple of {block}"
            return _rule("last tile", text, places, 2 * places.chance(), 0.94 if block >= 8 else 0.88, CHANCE_OF_PLACES)
    # Right in a box from the first element on, and nowhere else.
    right = index[~bad]
    ends = right.amax(0)
    if bool(right.amin(0).any()) or bool((index[bad] <= ends).all(1).any()):
        return None
    blocks = []
    for dim, size in enumerate(places.shape):
        if int(ends[dim]) + 1 < size:
            blocks.append(_tail_block(int(ends[dim]), int(ends[dim]) + 1, size))
    if len(blocks) < 2 or any(block is None for block in blocks):
        return None
    text = f"wrong in the last tiles only: {name} is right up to the last multiples of {blocks[0]} along each dimension"
    return _rule("last tile", text, places, 2 * places.chance(), 0.93)


def _tail_block(last_right: int, first_wrong: int, size: int) -> int | None:
    """The largest block whose last multiple within size lies between a right place and a wrong one; None: none."""
    block = 1 << max(0, (size - 1).bit_length())
    while block >= LEAST_BLOCK:
        start = size - size % block
        if 0 < start < size and last_right < start <= first_wrong:
            return block
        block //= 2
    return None


def _ends(places: _Places, name: str) -> Cause | None:
    """Wrong at the first or last places along a dimension, or at all borders."""
    index, bad = places.index, places.bad
    for dim, size in enumerate(places.shape):
        right, wrong = index[~bad][:, dim], index[bad][:, dim]
        low, high = _extent(right)
        inside = (wrong >= low) & (wrong <= high)
        most = max(1, size // 3)
        first, last = low, size - 1 - high
        if size < 3 or bool(inside.any()) or first > most or last > most or not first + last:
            continue
        if first and last and not (bool((wrong < low).any()) and bool((wrong > high).any())):
            continue  # one of the ends has no entries
        where = " and ".join(
            [f"the first {_several(first)}"] * bool(first) + [f"the last {_several(last)}"] * bool(last)
        )
        text = f"wrong only at {where} along dimension {dim} of {name}: padding, or a halo"
        mixes = places.mixing is None or dim in places.mixing
        if first and last:
            base = 0.93
        elif first + last > 1 or len(places.shape) == 1:
            base = 0.9
        else:  # a single row at the end may be any row
            base = 0.91 if mixes and (places.mixing is not None or dim >= 2) else 0.7
        return _rule("boundary", text, places, 2 * places.chance(), base, CHANCE_OF_PLACES)
    right = index[~bad]
    if right.numel() and len(places.shape) > 1:
        low_corner, high_corner = right.amin(0), right.amax(0)
        within = ((index[bad] >= low_corner) & (index[bad] <= high_corner)).all(1)
        sizes = torch.tensor(places.shape, device="cpu")
        margins = torch.maximum(low_corner, sizes - 1 - high_corner)
        if not bool(within.any()) and int((margins > 0).sum()) > 1 and bool((margins <= sizes // 3).all()):
            text = f"wrong only along the borders of {name}: padding, or a halo"
            return _rule("boundary", text, places, 2 * places.chance(), 0.93)
    return None


def _several(count: int) -> str:
    return "place" if count == 1 else f"{count} places"


def _slice(places: _Places, name: str) -> Cause | None:
    """Wrong in one row, column, channel or item only, or in one of each of two dimensions."""
    index, bad = places.index, places.bad
    if int(bad.sum()) < 2 and places.bad.numel() < 2 * sum(places.shape):
        return None
    wrong = index[bad]
    fixed = [
        dim
        for dim in range(len(places.shape))
        if places.shape[dim] > 1 and bool((wrong[:, dim] == wrong[0, dim]).all())
    ]
    if not fixed or len(fixed) == len(places.shape):
        fixed_all = len(fixed) == len(places.shape)
        if not fixed or fixed_all:
            return None
    rules = sum(torch.unique(index[:, dim]).numel() for dim in range(len(places.shape)))
    for count in range(1, len(fixed) + 1):
        for dims in map(list, itertools.combinations(fixed, count)):
            inside = (index[:, dims] == wrong[0, dims]).all(1)
            if bool((inside & ~bad).any()):
                continue
            spot = ", ".join(str(int(wrong[0, dim])) if dim in dims else ":" for dim in range(len(places.shape)))
            likely = rules**count * places.chance()
            return _rule("slice", f"wrong only in {name}[{spot}]", places, likely, 0.9, CHANCE_OF_PLACES)
    return None


def _region(places: _Places, name: str) -> Cause | None:
    """Wrong only where the element's value is on one side of a threshold, or between two."""
    values, bad = places.values, places.bad
    if values is None or values.is_complex() or not bool(values.isfinite().all()):
        return None
    if not float(places.excess[~bad].max()) <= min(0.1, float(places.excess[bad].min()) / JUMP):
        return None  # wrong formulas are nearly right somewhere, too
    for what, of in ((name, values), (f"|{name}|", values.abs())):
        right, wrong = of[~bad], of[bad]
        if float(wrong.max()) < float(right.min()):
            low, high, sign = float(wrong.max()), float(right.min()), "<"
        elif float(wrong.min()) > float(right.max()):
            low, high, sign = float(right.max()), float(wrong.min()), ">"
        else:
            continue
        threshold, natural = _threshold(low, high)
        if wrong.numel() == 1 and not natural:
            return None  # the largest, or smallest, of all is one in two anyway
        likely = (2 if natural else 4) * places.chance()
        base = 0.92 if natural else 0.89
        return _rule("region", f"wrong only where {what} {sign} {threshold:.4g}", places, likely, base)
    right, wrong = values[~bad], values[bad]
    low, high = float(wrong.min()), float(wrong.max())
    if not bool(((right >= low) & (right <= high)).any()) and bool((right < low).any()) and bool((right > high).any()):
        begin, _ = _threshold(float(right[right < low].max()), low)
        end, _ = _threshold(high, float(right[right > high].min()))
        likely = places.bad.numel() ** 2 * places.chance()
        return _rule("region", f"wrong only where {begin:.4g} < {name} < {end:.4g}", places, likely, 0.85)
    return None


def _threshold(low: float, high: float) -> tuple[float, bool]:
    """A number between two, a round one if there is one; and whether it is one that code is full of."""
    for natural in (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, -3.0, 6.0):
        if low <= natural <= high:
            return natural, True
    for digits in range(-3, 12):
        rounded = round((low + high) / 2, digits)
        if low <= rounded <= high:
            return rounded, False
    return (low + high) / 2, False


# How finely the analytical entries are given.


def _of_precision(sample: Sample) -> Iterator[Cause]:
    """Analytical entries that all fit in a short format, and are off by about its rounding."""
    a, n = sample.analytical, sample.numerical
    if a.is_complex():
        a, n = torch.view_as_real(a).reshape(-1), torch.view_as_real(n).reshape(-1)
    telling = (a != 0) & (n != 0) & a.isfinite()
    a, n = a[telling], n[telling]
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
                f"backward computes in {short}: all entries of the analytical gradient fit in it without rounding",
                f"{a.numel()} entries, off by up to {float(off):.0e} of themselves",
                0.95,
            )
            return
