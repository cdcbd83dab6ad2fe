"""Allowed differences between results in a lower dtype and in double precision: measured scales and their factors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgrad.lowprecision.reference import Coordinates, Perturbed, Products
from fastgrad.lowprecision.rounding import Arithmetic, Underflow

DRAWS = 6
"""Number of runs in perturbed arithmetic, and number of further runs with perturbed inputs. The root mean square of so
few runs is uncertain by about a third; the factors below allow for this."""

SECOND_DRAWS = 12
"""Number of additional runs if the error of an entry is too large. In these runs, inputs are perturbed by the
unit of the largest element of their tensor."""

FACTOR = {torch.float32: 16.0, torch.float16: 4.0, torch.bfloat16: 4.0}
"""Allowed error of an entry of a VJP, as a multiple of the measured effect of rounding (its scale).

A kernel adds in another order, or with other intermediate results, than the reference in perturbed arithmetic. The
factors are the smallest powers of two for which all right operators of torch's database are within the allowed error,
on one sample each. The factor of float32 is larger, because another branch of a special function may differ by many
units.
"""

SECOND_FACTOR = {torch.float32: 16.0, torch.float16: 3.0, torch.bfloat16: 3.0}
"""The same in a second look, whose runs perturb inputs more. Right operators need at most 1.8, on one sample each."""

FORWARD = 16.0
"""The same for outputs, which are compared only to show that func and the reference are the same function."""

ONCE = 1.02
"""Largest error of an entry that counts as rounded once, in unit roundoffs times its modulus. Rounding to nearest gives
at most 1; two percent allow for earlier rounding in a finer dtype."""

SHARE_ONCE = 0.9
"""Share of entries that must be rounded once for the smaller allowance to apply."""

MIN_ONCE = 20
"""Least number of nonzero entries for the smaller allowance to apply."""

ALLOWED_ONCE = 1.1
"""The smaller allowance: this many unit roundoffs times the modulus of the entry, plus one scale."""

_SECOND_SEED = 2000
_SEED = 1000


@dataclass
class Spread:
    """The effect of rounding on some VJPs and on the outputs: moduli of differences from the reference.

    Attributes
    ----------
    rounded
        The difference in arithmetic that rounds every result. Shape (count, n).
    products
        The largest of three: `rounded` where it is finite, and two root mean squares, in perturbed arithmetic with the
        given inputs, and with perturbed inputs. Shape (count, n).
    values
        The same for the outputs, shape (m,).
    """

    rounded: Tensor
    products: Tensor
    values: Tensor


def spread_of(products: Products, cotangents: Tensor, exact: Tensor, dtype: torch.dtype) -> Spread:
    """Measures the effect of rounding by 2 `DRAWS` + 1 runs of the reference."""
    plain, moved = (
        _mean_square(products, cotangents, exact, inputs, [Arithmetic(dtype, _SEED + i) for i in range(DRAWS)])
        for inputs in ("nothing", "each")
    )
    rounded = _errors(products, cotangents, exact, "nothing", Arithmetic(dtype, None))
    of_values, of_products = (
        torch.maximum(torch.maximum(first, second), third.nan_to_num(nan=0.0, posinf=0.0))
        for first, second, third in zip(plain, moved, rounded, strict=True)
    )
    return Spread(rounded[1], of_products, of_values)


def second_spread(products: Products, cotangents: Tensor, exact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales of outputs and VJPs in a second look: shapes (m,) and (count, n).

    The effect of underflow counts if it is larger than that of rounding.
    """
    draws = [Arithmetic(dtype, _SECOND_SEED + i, decomposes=True) for i in range(SECOND_DRAWS)]
    of_values, of_products = _mean_square(products, cotangents, exact, "relative to the largest", draws)
    underflow = _errors(products, cotangents, exact, "nothing", Underflow(dtype))
    return torch.maximum(of_values, underflow[0]), torch.maximum(of_products, underflow[1])


def with_underflow(products: Products, cotangents: Tensor, dtype: torch.dtype) -> Tensor:
    """The VJPs, shape (count, n), if every result that may underflow is zero."""
    return products.draw(Underflow(dtype), cotangents, "nothing")[1]


def plain_draws(products: Products, cotangents: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yields the VJPs of the `DRAWS` runs of `spread_of` at the given inputs again: shape (count, n)."""
    for number in range(DRAWS):
        yield products.draw(Arithmetic(dtype, _SEED + number), cotangents, "nothing")[1]


def _errors(
    products: Products, cotangents: Tensor, exact: Tensor, inputs: Perturbed, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    """Moduli of the differences in one run: of outputs, shape (m,), and of VJPs, shape (count, n)."""
    values, gradients = products.draw(arithmetic, cotangents, inputs)
    return products.outputs.moduli(values - products.values), products.inputs.moduli(gradients - exact)


def _mean_square(
    products: Products, cotangents: Tensor, exact: Tensor, inputs: Perturbed, draws: Sequence[Arithmetic]
) -> tuple[Tensor, Tensor]:
    """Root mean squares of the moduli of differences: of outputs, shape (m,), and of VJPs, shape (count, n).

    Only finite differences count; a root is infinite if there are none.
    """
    found = [(torch.zeros_like(one), torch.zeros_like(one)) for one in (products.values, exact)]
    for arithmetic in draws:
        errors = _errors(products, cotangents, exact, inputs, arithmetic)
        for (total, number), one in zip(found, errors, strict=True):
            squares = one.square()
            total += torch.where(squares.isfinite(), squares, 0.0)
            number += squares.isfinite()
    of_values, of_products = (torch.where(number > 0, total / number, torch.inf).sqrt() for total, number in found)
    return of_values, of_products


def is_rounded_once(error: Tensor, size: Tensor, inputs: Coordinates) -> bool:
    """Whether most entries are those of the reference, rounded once. If so, the kernel computes in a wider dtype.

    error, size: moduli of differences and of the reference, shape (count, n).
    """
    nonzero = (size > 0) & error.isfinite()
    if int(nonzero.sum()) < MIN_ONCE:
        return False
    within = error <= ONCE * inputs.units * size + inputs.subnormals
    return float(within[nonzero].double().mean()) >= SHARE_ONCE


def allowed(scale: Tensor, size: Tensor, units: Tensor, factor: float, once: bool) -> Tensor:
    """The allowed error of each entry: shape (count, n).

    scale: the measured effect of rounding. size: the modulus of the reference's entry. units: the unit roundoffs of the
    inputs. factor: what scale is multiplied by. once: whether only one rounding is allowed.
    """
    if not once:
        return factor * scale
    return torch.minimum(factor * scale, ALLOWED_ONCE * units * size + scale)
