"""Results of a check in a dtype narrower than double."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastgrad.report.failure import modulus
from fastgrad.report.json_form import EqualByContent


@dataclass(frozen=True)
class RoundedEntry:
    """A component of a VJP in a lower dtype, against double precision.

    Attributes
    ----------
    output, output_position
        Of the only output element whose grad_output was not zero, as in ``Failure``; None if all had one.
    output_index
        That element.
    input, input_position, input_index
        The element whose gradient it is.
    found
        By autograd, in the lower dtype.
    expected
        By the reference, or by differences.
    allowed
        The allowed difference.
    unit
        The unit roundoff of the input's dtype.
    """

    output: int | None
    output_position: int | None
    output_index: tuple[int, ...] | None
    input: int
    input_position: int
    input_index: tuple[int, ...]
    found: complex
    expected: complex
    allowed: float
    unit: float

    @property
    def error(self) -> float:
        """``|found - expected|``."""
        return modulus(self.found - self.expected)

    @property
    def error_units(self) -> float:
        """The error in units of rounding of the expected value; infinite if the value is zero."""
        return _in_units(self.error, self)

    @property
    def allowed_units(self) -> float:
        """The allowed error in the same units."""
        return _in_units(self.allowed, self)


def _in_units(value: float, entry: RoundedEntry) -> float:
    size = modulus(entry.expected) * entry.unit
    return value / size if size else math.inf


@dataclass(frozen=True, eq=False)
class LowPrecision(EqualByContent):
    """Reference, numbers and bounds of a check in float32, bfloat16 or float16.

    Attributes
    ----------
    dtypes
        Of the checked inputs.
    unit
        The largest unit roundoff of inputs and outputs.
    reference
        Name of the reference; empty: differences in its own dtype.
    products
        VJPs that were compared.
    rows
        A description of their grad_outputs.
    entries
        Components of them.
    draws
        Runs in perturbed arithmetic that measured the rounding.
    rounded_once
        Whether the function was seen to compute in a finer dtype and to round at the end, and was held to that.
    second_look
        Entries that were within their allowance only once inputs were perturbed relative to the largest.
    out_of_range
        Entries that were not compared, as the reference leaves the range of the dtype.
    worst
        The worst entry.
    wrong
        Entries beyond their allowance.
    forward
        The worst output's error, over the allowed one.
    smallest
        The error, relative to an entry, that would have been found in half of the entries: those of at least a
        hundredth of the largest of their VJP.
    smallest_most
        The same in nine of ten entries.
    hidden
        The share of these entries that might be zero, as rounding explains errors of their size.
    smallest_scale
        A common relative error of a whole gradient that would have been found; None if that was not tested.
    undecided
        Why there is no verdict; empty if there is one.
    remedy
        How to get one.
    reference_report
        Of the check of the reference itself, in double precision, in its plain form.
    """

    dtypes: tuple[str, ...] = ()
    unit: float = 0.0
    reference: str = ""
    products: int = 0
    rows: str = ""
    entries: int = 0
    draws: int = 0
    rounded_once: bool = False
    second_look: int = 0
    out_of_range: int = 0
    worst: RoundedEntry | None = None
    wrong: int = 0
    forward: float | None = None
    smallest: float | None = None
    smallest_most: float | None = None
    hidden: float | None = None
    smallest_scale: float | None = None
    undecided: str = ""
    remedy: str = ""
    reference_report: Mapping[str, Any] | None = None
