"""Constants per dtype, and the ratio of a difference to its tolerance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LOWER = (torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex32)
"""The dtypes below double precision."""

RELATIVE_STEP = {
    torch.float64: 2.0**-24,
    torch.float32: 2.0**-11,
    torch.float16: 2.0**-5,
    torch.bfloat16: 2.0**-4,
}
"""Step relative to |x| if an absolute step would not change x.

About the square root of the unit roundoff (2^-53, 2^-24, 2^-11, 2^-8): where the rounding of a
one-sided difference balances its truncation (Nocedal & Wright, Numerical Optimization, section 8.1),
raised a little for float64, whose function values are rarely good to the last bit.
"""


ROUNDING = 64.0
"""Allowed error of computed values and sums, in units of their estimated rounding error."""


def relative_step(dtype: torch.dtype) -> float:
    """`RELATIVE_STEP` of a floating or complex dtype; that of float64 for dtypes that are not in the table."""
    return RELATIVE_STEP.get(dtype.to_real(), RELATIVE_STEP[torch.float64])


def modulus(value: complex) -> float:
    """|value|; abs() raises for some complex infinities and NaNs."""
    return math.hypot(value.real, value.imag)


def number_of(coordinates: Sequence[float]) -> complex:
    """The real or complex number that one or two coordinates make."""
    return coordinates[0] if len(coordinates) == 1 else complex(*coordinates)


def excess(difference: float, allowed: float) -> float:
    """The ratio of a difference to its tolerance; infinite if the ratio is not finite."""
    times = abs(difference) / allowed if allowed else math.inf
    return math.inf if math.isnan(times) else times


def last_digit(values: Tensor) -> Tensor:
    """The value of the last binary digit of each number that is not zero: float64; zero for zeros, infinity and NaN."""
    mantissa, exponent = torch.frexp(torch.where(values.isfinite(), values, 0.0))
    digits = (mantissa.abs() * 2.0**53).to(torch.int64)
    return torch.ldexp((digits & -digits).to(torch.float64), exponent - 53)


def spacing(dtype: torch.dtype) -> float:
    """The distance from 1 to the next larger number of a floating or complex dtype (one ulp)."""
    return torch.finfo(dtype.to_real()).eps
