"""Text of a check in a lower dtype: the error, the allowed error, and the errors that would have been found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastgrad.report.failure import FailureKind
from fastgrad.report.number_text import count, digits_apart

if TYPE_CHECKING:
    from fastgrad.report.low_precision import LowPrecision, RoundedEntry


def passed(precision: LowPrecision) -> str:
    """The end of a headline: the errors that would have been found."""
    if precision.smallest is None:
        return "all compared gradients are zero"
    if not precision.reference:
        where = f"{precision.products:,} directional derivatives"
        return f"{_found(precision, '', '', where)}; an error of a single entry may be hidden"
    text = _found(precision, "about ", ", relative to the reference,", "the compared entries")
    if precision.smallest_scale is not None:
        text += f"; an error of {_percent(precision.smallest_scale)} common to all entries would have been found"
    if precision.hidden:
        text += f"; in {_percent(precision.hidden)} of the entries, rounding may hide an error of 100 %"
    return text


def _found(precision: LowPrecision, about: str, relative: str, where: str) -> str:
    """The errors that would have been found in half and in 90 % of the entries, if there are such errors."""
    smallest, most = precision.smallest, precision.smallest_most
    if smallest is None or not math.isfinite(smallest):
        return f"rounding may hide errors of any size in half of {where}"
    text = f"an error of {about}{_percent(smallest)}{relative} would have been found in half of {where}"
    if most is None or not math.isfinite(most):
        return f"{text}; rounding may hide errors of any size in 10 % of them"
    return f"{text}, and an error of {about}{_percent(most)} in 90 % of them"


def lines(precision: LowPrecision) -> list[str]:
    """The lines of a summary."""
    found = [f"  dtype      {', '.join(precision.dtypes)}; unit roundoff 2^{math.log2(precision.unit):.0f}"]
    if precision.undecided:
        found.append(f"  undecided  {precision.undecided}")
        found.append(f"  remedy     {precision.remedy}")
    if precision.products:
        found.append(_compared(precision))
    if precision.worst is not None and not precision.undecided:
        found.append(f"  worst      {_sizes(precision.worst)}")
    if precision.out_of_range:
        found.append(
            f"  left out   {count(precision.out_of_range, 'entry')} whose reference is outside the dtype's range"
        )
    return found


def _compared(precision: LowPrecision) -> str:
    if not precision.reference:
        return f"  compared   {precision.rows} in the lower dtype"
    held = "; func computes in a wider dtype, so a smaller error is allowed" if precision.rounded_once else ""
    return (
        f"  compared   {count(precision.entries, 'entry')} of {count(precision.products, 'VJP')} ({precision.rows}) "
        f"with {precision.reference}; rounding measured in {count(precision.draws, 'run')}{held}"
    )


def verdict(kind: FailureKind, precision: LowPrecision) -> str:
    """The middle of a failure's first line."""
    entries = count(precision.wrong, "entry")
    # With differences, the search ends with the first wrong entry.
    where = f"{entries} of {count(precision.products, 'VJP')}" if precision.reference else f"at least {entries}"
    if kind == "not finite":
        return f"is not finite in {where}"
    if kind == "biased":
        return "is wrong by a common factor"
    return f"is wrong in {where}, by more than rounding to {', '.join(precision.dtypes)} explains"


def key_phrase(kind: FailureKind, precision: LowPrecision | None) -> str:
    """The end of the message's key phrase: how the gradient is wrong."""
    has_reference = precision is None or bool(precision.reference)
    if kind == "not finite":
        by = "the reference is in the range of the dtype" if has_reference else "the differences are finite"
        return f"the gradient is not finite, but {by}"
    if kind == "biased":
        return "the mean of all entries differs from the reference by more than rounding explains"
    other = "the reference" if has_reference else "the numerical one"
    return f"the gradient differs from {other} by more than rounding explains"


def details(precision: LowPrecision, worst: RoundedEntry, names: tuple[str, str], detail: str) -> list[str]:
    """The lines of a message about the worst entry, and about the comparison."""
    if worst.output_index is None:
        name = f"gradient of {names[1]}{index_text(worst.input_index)} for a dense grad_output"
    else:
        name = f"d {names[0]}{index_text(worst.output_index)} / d {names[1]}{index_text(worst.input_index)}"
    digits = digits_apart(worst.found, worst.expected)
    found = [f"  worst      {name}   found {worst.found:.{digits}g}   expected {worst.expected:.{digits}g}"]
    found.append(f"             {_sizes(worst)}")
    if detail:
        found.append(f"  because    {detail}")
    if precision.products:
        found.append(_compared(precision))
    return found


def _sizes(worst: RoundedEntry) -> str:
    unit = f"one unit is 2^{math.log2(worst.unit):.0f} of the entry"
    if math.isinf(worst.error_units) or math.isnan(worst.error_units):
        return "error {}, allowed {}".format(*excess_texts(worst.error, worst.allowed))
    error, allowed = excess_texts(worst.error, worst.allowed)
    units, allowed_units = excess_texts(worst.error_units, worst.allowed_units)
    return (
        f"error {units} units of rounding, allowed {allowed_units} ({unit}); absolute error {error}, allowed {allowed}"
    )


def excess_texts(error: float, allowed: float) -> tuple[str, str]:
    """The texts of an error and of the allowed error, which is smaller."""
    digits = digits_apart(error, allowed, 2)
    return f"{error:.{max(3, digits)}g}", f"{allowed:.{digits}g}"


def index_text(index: Sequence[int]) -> str:
    """An index in brackets; empty for a tensor without dimensions."""
    return f"[{', '.join(str(i) for i in index)}]" if index else ""


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"
