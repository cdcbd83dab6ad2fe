"""Verdicts for functions in float32, bfloat16 and float16: measured rounding instead of fixed tolerances."""

from fastgrad.lowprecision.check import check as check_lower
from fastgrad.lowprecision.references import make_reference, reference_for_call, second_order_reference

__all__ = ["check_lower", "make_reference", "reference_for_call", "second_order_reference"]
