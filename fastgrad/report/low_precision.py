"""Results of a check in a dtype narrower than double."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastgrad.core.precision import modulus
from fastgrad.report.json_form import EqualByContent


@dataclass(frozen=True)
class RoundedEntry:
    """A component of a VJP in a lower dtype, compared with double precision.

    Attributes
    ----------
    output, output_position
        As in ``Failure``, for the output of the only element with a nonzero grad_output; None if grad_output was dense.
    output_index
        The index of this element; None if grad_output was dense.
    input, input_position, input_index
        The input element of the gradient.
    found
        The gradient by autograd in the lower dtype.
    expected
        The gradient by the reference, or by differences.
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
        """The allowed error in the units of `error_units`."""
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
        Dtypes of the checked inputs.
    unit
        The largest unit roundoff of inputs and outputs.
    reference
        Name of the reference; empty: the function was compared with differences in its own dtype.
    products
        Number of VJPs that were compared.
    rows
        A description of their grad_outputs.
    entries
        Number of components of these VJPs.
    draws
        Number of runs in perturbed arithmetic that measured the rounding.
    rounded_once
        Whether the function computes in a wider dtype internally, so that a smaller error was allowed.
    second_look
        Number of entries that were within their allowance only after inputs were perturbed relative to the largest
        element of their tensor.
    out_of_range
        Number of entries that were not compared, because the reference leaves the range of the dtype.
    worst
        The worst entry.
    wrong
        Number of entries with more than the allowed error.
    forward
        The error of the worst output, divided by the allowed error.
    smallest
        The relative error that would have been found in half of the entries. Only entries count that are at least a
        hundredth of the largest entry of their VJP. Without a reference, directional derivatives are used instead of
        entries.
    smallest_most
        The relative error that would have been found in 90 % of these entries.
    hidden
        The share of these entries that could be zero without being detected.
    smallest_scale
        The common relative error of a whole gradient that would have been found; None if this was not tested.
    undecided
        Why there is no verdict; empty if there is one.
    remedy
        How to get a verdict.
    reference_report
        The report of the check of the reference itself, in double precision, as from `Report.to_dict`.
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
