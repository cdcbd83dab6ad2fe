"""Probable causes from the values of entries: constant factors, missing terms, signs, lower precision."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fastgrad.diagnosis.chance import MIN_DISTINCT, SAME
from fastgrad.diagnosis.locations import place_causes
from fastgrad.diagnosis.rearrangements import constant_count, shared_by, structure_causes
from fastgrad.diagnosis.wording import Wording, wording
from fastgrad.report.evidence import Cause, Evidence, Sample
from fastgrad.report.failure import Comparison, Failure
from fastgrad.report.report import Report
from fastgrad.report.settings import Tolerances

RESIDUAL = 1e-3
"""Largest residual with which a factor is named as the cause, relative to the 2-norm of the analytical entries."""

EXACT = 1e-4
"""Largest relative difference between a factor and the number that explains it (2, -1, or the size of a tensor)."""

NAMED_FACTORS = {
    math.pi: "pi",
    1 / math.pi: "1 / pi",
    math.pi / 180: "pi / 180 (degrees to radians)",
    180 / math.pi: "180 / pi (radians to degrees)",
}
"""Constants, and their inverses, that are named if they are missing as a factor."""


def constant_factor(comparison: Comparison) -> tuple[float, float] | None:
    """(k, residual) if analytical = k * numerical over the mismatched entries, by least squares.

    residual is |analytical - k numerical| / |analytical|. None without a factor, or with fewer than two entries.
    """
    if comparison.mismatches < 2 or not 0 < comparison.sum_analytical * comparison.sum_numerical < math.inf:
        return None
    if abs(comparison.sum_product.imag) > RESIDUAL * abs(comparison.sum_product):
        return None
    factor = comparison.sum_product.real / comparison.sum_numerical
    product = abs(comparison.sum_product)
    unexplained = 1 - product * product / (comparison.sum_analytical * comparison.sum_numerical)
    residual = math.sqrt(max(0.0, unexplained))
    return (factor, residual) if residual <= most_unexplained(factor) else None


def most_unexplained(factor: complex, variation: float = math.inf) -> float:
    """Largest residual with which a factor is named; for a factor near 1, a tenth of its distance from 1.

    variation: the relative variation of the entries. Any smooth function of entries that vary little is nearly
    proportional to them, so the residual must also be much smaller than the variation.
    """
    return min(RESIDUAL, abs(factor - 1) / 10, variation / 100)


def _variation(n: Tensor) -> float:
    """The difference of the largest and the smallest modulus, relative to the largest; infinite if all are equal."""
    sizes = n.abs()
    variation = float((sizes.max() - sizes.min()) / sizes.max())
    return variation if variation > SAME else math.inf


def is_zero(comparison: Comparison) -> bool:
    """Whether every mismatched analytical entry is zero, and some numerical one is not."""
    return comparison.mismatches > 0 and comparison.sum_analytical == 0 and comparison.sum_numerical > 0


def of_sums(comparison: Comparison, words: Wording) -> Iterator[Cause]:
    if is_zero(comparison):
        yield _zero(words, comparison.mismatches, 0.6, 1)
    factor = constant_factor(comparison)
    if factor is not None:
        k, residual = factor
        yield _factor(k, f"{_fit_text(residual)}; the factor was not compared with single entries", {}, 0.6)


def _zero(words: Wording, count: int, confidence: float, order: int, is_whole: bool = True) -> Cause:
    """The cause if wrong entries are zero; is_whole: whether all entries of their input elements may be zero."""
    why = "a term is missing"
    if is_whole:
        why += words.of_backward(
            f", or backward returns None or excludes {'this element' if count == 1 else 'these elements'}"
        )
    if order > 1:
        why = (
            "a term is missing, or backward treats a value as a constant; look for detach(), .data, no_grad(), "
            "@once_differentiable, and for tensors kept on ctx without save_for_backward"
        )
    text = f"{'the' if count == 1 else 'every'} wrong analytical entry is zero: {why}"
    return Cause("zero gradient", text, f"{count:,} wrong {'entry' if count == 1 else 'entries'}", confidence)


def _factor(k: float, measure: str, sizes: dict[str, int], confidence: float, selected: int = 0) -> Cause:
    if abs(k + 1) <= EXACT:
        text = "every wrong analytical entry is -1 x the numerical one: a sign is wrong"
        return Cause("sign", text, measure, confidence + 0.01)
    large = [(what, size) for what, size in sizes.items() if size > 2]
    perhaps = [name for value, name in NAMED_FACTORS.items() if abs(k * value - 1) <= EXACT]
    perhaps += [f"a mean over {what}" for what, size in large if abs(k / size - 1) <= EXACT]
    perhaps += [f"a mean instead of a sum over {what}" for what, size in large if abs(k * size - 1) <= EXACT]
    if selected > 1:
        counts = [what for what, size in large if abs(k * size - selected) <= EXACT * selected]
        perhaps += [f"a mean over {what} instead of the {selected} elements that func uses" for what in counts]
    why = f", perhaps {perhaps[0]}" if perhaps else f", or the factor {k:.4g} is superfluous" if abs(k) > 1 else ""
    text = f"every wrong analytical entry is {k:.4g} x the numerical one: the factor {1 / k:.4g} is missing{why}"
    return Cause("constant factor", text, measure, confidence)


def _fit_text(residual: float) -> str:
    return f"relative residual of the fit {residual:.1g}"


def of_sample(sample: Sample, report: Report, failure: Failure, settings: Tolerances) -> list[Cause]:
    evidence = report.evidence or Evidence()
    words = wording(report, failure)
    values = list(_of_values(sample, failure, evidence, report.settings.order, settings, words))
    structure = list(structure_causes(sample, settings, words))
    found = [*structure, *values]
    # These causes also explain which entries are right, so that a cause from positions is not needed.
    replaces_places = {"transposed", "rolled", "permuted", "overwritten", "wrong dimension"}
    if not any(cause.name in replaces_places for cause in structure):
        found += place_causes(sample, words.names, settings, evidence.places or ())
    found += _of_precision(sample, words)
    return found


def _of_values(
    sample: Sample, failure: Failure, evidence: Evidence, order: int, settings: Tolerances, words: Wording
) -> Iterator[Cause]:
    """Causes from the relation of wrong analytical entries to numerical ones."""
    a, n = sample.analytical[sample.failing], sample.numerical[sample.failing]
    finite = a.isfinite() & n.isfinite()
    a, n = a[finite], n[finite]
    count = a.numel()
    if not count or not bool((n != 0).any()):
        return
    if bool((a == 0).all()):
        others = (sample.analytical != 0) & torch.isin(sample.inputs, sample.inputs[sample.failing])
        if not sample.complete and count < MIN_DISTINCT:
            return  # too few entries to tell what the other wrong ones are
        if not bool(others.any()) and evidence.vanishes is not False:
            yield _zero(words, count, 0.87, order)
        elif sample.complete:
            yield _zero(words, count, 0.5, order, is_whole=False)
        return
    sizes = _sizes(sample, words.names)
    if a.is_complex():
        yield from _of_complex(a, n, failure, sizes, settings, words)
        return
    k, residual = fit(a, n, settings)
    # Equal wrong entries next to right ones are no better evidence of a factor than one entry: a mask may be wrong.
    right = ~sample.failing & ((sample.analytical != 0) | (sample.numerical != 0))
    is_alone = count == 1 or (bool(right.any()) and _variation(n) == math.inf)
    is_named = any(abs(k / value - 1) <= EXACT / 10 for value in (-1.0, 2.0, 0.5, *NAMED_FACTORS))
    if residual > most_unexplained(k, _variation(n)):
        places = [torch.unique(elements[sample.failing]).numel() for elements in (sample.inputs, sample.outputs)]
        if places == [count, count]:
            yield from _constant_difference(a, n, words)
    elif abs(k) > 0 and is_alone and not is_named and count >= MIN_DISTINCT:
        text = f"every wrong analytical entry is {k.real:.4g} x the numerical one"
        yield Cause("constant factor", text, f"{count} equal entries", 0.6)
    elif abs(k) > 0 and (is_named or not is_alone):
        # The number of input elements on which each output depends, if all entries are known.
        selected = constant_count(sample.outputs[sample.numerical != 0]) if sample.complete else 0
        yield _factor(k.real, _fit_text(residual), sizes, 0.6 if is_alone else 0.86, selected)
        shared = shared_by(sample)
        counts = [size for size in {shared, *sample.output_shape} if size > 1 and shared and shared % size == 0]
        if any(min(abs(k.real * size - 1), abs(k.real / size - 1)) <= EXACT for size in counts):
            taken = "a mean instead of a sum" if abs(k.real) < 1 else "a sum instead of a mean"
            gradient = "derivative with respect to" if words.is_forward else "gradient of"
            text = (
                f"each element of {words.input} affects {shared} outputs, and the {gradient} {words.input} is "
                f"{k.real:.4g} x the right one{words.of_backward(f': backward takes {taken}')}"
            )
            yield Cause("missing reduction", text, _fit_text(residual), 0.88)


def _constant_difference(a: Tensor, n: Tensor, words: Wording) -> Iterator[Cause]:
    """The cause if wrong entries, one per input and output element, differ from the right ones by the same number."""
    off = n - a
    difference = float(off.mean())
    spread = float((off - difference).abs().max())
    varying = float(n.max() - n.min()) > max(RESIDUAL * abs(difference), 100 * spread)
    if a.numel() > 2 and varying and spread <= EXACT * abs(difference):
        text = (
            f"every wrong analytical entry is too {'small' if difference > 0 else 'large'} by {abs(difference):.4g}"
            + words.of_backward(
                ": backward omits or adds a term that is linear in the input, for example a residual connection"
            )
        )
        yield Cause("missing term", text, f"true of {a.numel()} entries, to within {spread:.1g}", 0.9)


def _of_complex(
    a: Tensor, n: Tensor, failure: Failure, sizes: dict[str, int], settings: Tolerances, words: Wording
) -> Iterator[Cause]:
    if a.numel() == 1:
        return
    k, residual = fit(a, n, settings)
    conjugate, conjugate_residual = fit(a, n.conj().resolve_conj(), settings)
    if residual <= most_unexplained(k):
        if abs(k.imag) <= RESIDUAL * abs(k):
            yield _factor(k.real, _fit_text(residual), sizes, 0.86)
        else:
            text = (
                f"every wrong analytical entry is {_complex_text(k)} x the numerical one: the factor "
                f"{_complex_text(1 / k)} is missing"
            )
            yield Cause("complex factor", text, _fit_text(residual), 0.89)
    elif conjugate_residual <= RESIDUAL:
        c = conjugate if failure.part != "imaginary" else -conjugate
        plain = abs(c - 1) <= EXACT
        more = ": a conj() is missing" if plain else f", multiplied by {_complex_text(c)}"
        text = f"{words.derivative} uses the complex conjugate of the right derivative{more}"
        measure = _fit_text(conjugate_residual)
        yield Cause("missing conjugate" if plain else "complex factor", text, measure, 0.95 if plain else 0.85)
    else:
        for part, kept in (("real", n.real + 0j), ("imaginary", 1j * n.imag)):
            scale, part_residual = fit(a, kept, settings)
            if part_residual <= RESIDUAL and bool((kept != 0).any()):
                gradient = "derivative" if words.is_forward else "gradient"
                times = "" if abs(scale - 1) <= EXACT else f", times {_complex_text(scale)}"
                text = f"the analytical {gradient} is the {part} part of the right one{times}"
                yield Cause("complex factor", text, _fit_text(part_residual), 0.9)


def _complex_text(k: complex) -> str:
    """A complex factor without a part that is only rounding."""
    if abs(k.imag) <= EXACT * abs(k):
        return f"{k.real:.4g}"
    return f"{k.imag:.4g}j" if abs(k.real) <= EXACT * abs(k) else f"{k:.4g}"


def fit(a: Tensor, n: Tensor, settings: Tolerances | None = None) -> tuple[complex, float]:
    """The k that minimizes |a - k n|, and the residual |a - k n| / |a|; (0, infinity) if a or n is zero.

    With settings, the residual is also infinite if an entry of k n differs from that of a by more than its tolerance:
    large entries decide on k, and the factor is said to be that of every entry.
    """
    total = float((n.abs() ** 2).sum())
    size = float(a.abs().square().sum().sqrt())
    if not total or not size:
        return 0j, math.inf
    k = complex((a * n.conj()).sum().item()) / total
    fitted = (k if a.is_complex() else k.real) * n
    difference = (a - fitted).abs()
    if settings is not None and bool((difference > settings.allowed(fitted)).any()):
        return k, math.inf
    return k, float(difference.square().sum().sqrt()) / size


def _sizes(sample: Sample, names: tuple[str, str]) -> dict[str, int]:
    """Sizes by which a gradient may be off as a factor; keys: descriptions of the sizes."""
    sizes: dict[str, int] = {}
    for name, shape in zip(names, (sample.input_shape, sample.output_shape), strict=True):
        for dim, size in enumerate(shape):
            sizes.setdefault(f"the {size} elements along dimension {dim} of {name}", size)
        sizes.setdefault(f"the {math.prod(shape)} elements of {name}", math.prod(shape))
    return sizes


def _of_precision(sample: Sample, words: Wording) -> Iterator[Cause]:
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
            text = (
                f"{words.derivative} computes in {short}: {short} represents all entries of the analytical "
                f"{'Jacobian' if words.is_forward else 'gradient'} exactly"
            )
            measure = f"shown by {a.numel()} entries with relative errors of up to {float(off):.1g}"
            yield Cause("low precision", text, measure, 0.95)
            return
