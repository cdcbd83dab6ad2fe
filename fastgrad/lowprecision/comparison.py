"""Compares VJPs in a lower dtype with those of a reference in double precision, entry by entry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastgrad.core.native import Layout
from fastgrad.core.precision import number_of
from fastgrad.lowprecision import allowance
from fastgrad.lowprecision.probes import LAYOUTS, Probes
from fastgrad.lowprecision.reference import Products
from fastgrad.lowprecision.rounding import coarsest, unit_roundoff
from fastgrad.problem.coordinates import Block, block_with
from fastgrad.problem.problem import Problem
from fastgrad.report.low_precision import RoundedEntry

AT_A_TIME = 64
"""Largest number of VJPs that share the 13 more runs of a second look."""

SIGNIFICANT = 0.01
"""Entries smaller than this share of the largest entry of their VJP are not counted."""

SCALE_UNITS = 1.0
SCALE_ERRORS = 3.0
"""Allowed common relative error of a whole gradient: `SCALE_UNITS` unit roundoffs, for rounding that affects all
entries alike, plus `SCALE_ERRORS` standard errors of the mean; or, if this is larger, `SCALE_ERRORS` times the common
error of perturbed runs. Chosen together with the factors of `allowance`."""


@dataclass(frozen=True)
class Common:
    """A common relative error of the gradient of one input: the mean over entries of dense VJPs.

    error, allowed: relative to the gradient. entries: the effective number of averaged entries, in which those of
    little weight hardly count. is_alike: whether the error is about the same for each grad_output.
    """

    block: Block
    error: float
    allowed: float
    entries: float
    is_alike: bool

    @property
    def is_excessive(self) -> bool:
        """Whether rounding does not explain the error."""
        return self.is_alike and abs(self.error) > self.allowed


class Comparison:
    """The comparison of the VJPs of some probes.

    Attributes
    ----------
    problem, products, probes
        The function, the reference and the grad_outputs.
    low, exact
        The VJPs: float64, shape (count, n).
    spread
        The measured rounding.
    error, size, scale, limit
        Modulus of the error, modulus of the reference, effect of rounding and allowed error; shape (count, n) each.
    dtype
        The coarsest real dtype of inputs and outputs, to which results are rounded.
    once
        Whether only the error of a single rounding is allowed.
    excused
        Number of entries that are within the allowed error only after a second look.
    """

    def __init__(self, problem: Problem, products: Products, probes: Probes) -> None:
        self.problem, self.products, self.probes = problem, products, probes
        self.dtype = coarsest([block.tensor.dtype for block in (*problem.inputs, *problem.outputs)])
        contiguous = [Layout.CONTIGUOUS] * (probes.cotangents.shape[0] - probes.dense)
        self.low = problem.vjp(probes.cotangents, [*LAYOUTS[: probes.dense], *contiguous]).to(products.device)
        self.exact = products.exact(probes.cotangents)
        self.spread = allowance.spread_of(products, probes.cotangents, self.exact, self.dtype)
        self.draws = 2 * allowance.DRAWS + 1
        self.excused = 0
        inputs = products.inputs
        self.error, self.size = inputs.moduli(self.low - self.exact), inputs.moduli(self.exact)
        self.scale = self.spread.products + inputs.rounding(self.size)
        self.once = self.dtype is not torch.float32 and allowance.is_rounded_once(self.error, self.size, inputs)
        self.limit = allowance.allowed(self.scale, self.size, inputs.units, allowance.FACTOR[self.dtype], self.once)

    def forward(self) -> tuple[float, int]:
        """The largest ratio of an output's error to its allowed error, and the output's coordinate.

        If the ratio exceeds 1, a second look may increase the allowed error.
        """
        products, outputs = self.products, self.products.outputs
        values = self.problem.base().to(products.device)
        size, error = outputs.moduli(products.values), outputs.moduli(values - products.values)
        same = (values == products.values) | (values.isnan() & products.values.isnan())
        beyond_range = ~values.isfinite() & (size > outputs.largest)

        def ratio(spread: Tensor) -> Tensor:
            limit = allowance.FORWARD * (spread + outputs.rounding(size))
            return torch.where(same | beyond_range, 0.0, error / limit).nan_to_num(nan=torch.inf)

        found = ratio(self.spread.values)
        if float(found.max()) > 1:
            spread, _ = self._second_spread(self.probes.cotangents[:1], self.exact[:1])
            found = ratio(torch.maximum(self.spread.values, spread.nan_to_num(0.0)))
        return float(found.max()), int(found.argmax())

    def overflows(self) -> tuple[Tensor, Tensor]:
        """Entries that are not finite although the reference is in range: unexplained ones, and explained ones.

        Masks of shape (count, n). An entry is explained if it is also not finite in the reference with every result
        rounded to the dtype: an intermediate result leaves the range of the dtype.
        """
        in_range = self._is_in_range()
        infinite = ~self.low.isfinite() & in_range
        explained = infinite & ~self.spread.rounded.isfinite()
        # If a derivative with respect to an input is out of range, zero times it is not finite, either.
        return infinite & ~explained, explained & in_range.all(0)

    def wrong_beyond_range(self) -> Tensor:
        """Mask of the wrong entries where the reference is outside the dtype's range: shape (count, n).

        There, an entry may be NaN, or infinite or the largest number with the sign of the reference.
        """
        inputs = self.products.inputs
        beyond = self.exact.isfinite() & (self.exact.abs() > inputs.largest) & (self.error > self.limit)
        return beyond & (self.low * self.exact.sign() < (1 - inputs.units) * inputs.largest)

    def _is_in_range(self) -> Tensor:
        return self.size <= self.products.inputs.largest  # this is false for NaN

    @property
    def out_of_range(self) -> int:
        """Number of entries for which the reference leaves the range of the dtype or is not finite."""
        return int((~self._is_in_range()).sum())

    def ratio(self) -> Tensor:
        """Ratios of error to allowed error, shape (count, n); zero where there is nothing to compare."""
        comparable = self.low.isfinite() & self._is_in_range() & self.limit.isfinite()
        return torch.where(comparable, self.error / self.limit, 0.0)

    def look_again(self) -> None:
        """Increases the allowed errors of VJPs with entries beyond them, if more draws show larger rounding."""
        ratio = self.ratio()
        beyond = int((ratio > 1).sum())
        if not beyond:
            return
        worst = ratio.amax(1)
        order = worst.argsort(descending=True)[: int((worst > 1).sum())]
        for some in torch.split(order, AT_A_TIME):
            self.look_again_at(some)
            if bool((self.ratio()[some] > 1).any()):
                break
        self.excused = max(0, beyond - int((self.ratio() > 1).sum()))

    def look_again_at(self, some: Tensor) -> None:
        """Takes a second look at the VJPs with these numbers: may increase their `scale` and `limit`."""
        _, spread = self._second_spread(self.probes.cotangents[some.to(self.problem.device)], self.exact[some])
        inputs, size = self.products.inputs, self.size[some]
        scale = torch.maximum(self.scale[some], spread.nan_to_num(nan=0.0, posinf=0.0) + inputs.rounding(size))
        limit = allowance.allowed(scale, size, inputs.units, allowance.SECOND_FACTOR[self.dtype], self.once)
        self.limit[some] = torch.maximum(self.limit[some], limit)
        self.scale[some] = scale

    def _second_spread(self, cotangents: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
        self.draws = 2 * allowance.DRAWS + 1 + allowance.SECOND_DRAWS + 1
        return allowance.second_spread(self.products, cotangents, exact, self.dtype)

    def entry_at(self, largest: Tensor) -> RoundedEntry:
        """The component of a VJP at the first largest element of values or of a mask, shape (count, n)."""
        probe, coordinate = divmod(int(largest.to(torch.float64).argmax()), largest.shape[1])
        block = block_with(self.problem.inputs, coordinate)
        found, exact = (_element(vectors[probe], coordinate, block) for vectors in (self.low, self.exact))
        row, limit = int(self.probes.rows[probe]), float(self.limit[probe, coordinate])
        return rounded_entry(self.problem, row, coordinate, found, exact, limit)

    def smallest_errors(self) -> tuple[float, float, float] | None:
        """Three numbers about the significant entries, or None if there are none.

        The relative errors that would certainly have been found in half and in 90 % of these entries, and the share of
        them that could be zero without being detected.
        """
        usual = torch.where(self._is_in_range(), self.size, 0.0)
        significant = (usual > 0) & (usual >= SIGNIFICANT * usual.amax(1, keepdim=True)) & self.error.isfinite()
        if not bool(significant.any()):
            return None
        found = ((self.limit + self.error) / self.size)[significant]
        found = found.nan_to_num(torch.inf, torch.inf).sort().values
        hidden = float((found >= 1).double().mean())
        return float(found[(found.numel() - 1) // 2]), float(found[int(0.9 * (found.numel() - 1))]), hidden

    def common_errors(self) -> list[Common]:
        """The common relative error of the gradient of each input, over the dense grad_outputs; empty in float32.

        If another input or an output is 16-bit, inputs of wider dtypes are included: their gradients are allowed the
        same rounding. The constant grad_output is left out: entries of its gradient may all be the same sum, with the
        same error.
        """
        if self.dtype is torch.float32:
            return []
        found = self._common(self.low - self.exact)
        # An intermediate result that many entries depend on, for example the logarithm of a sum, gives them the same
        # relative error. So the common errors of runs in perturbed arithmetic are measured, too.
        squares = [0.0] * len(self.problem.inputs)
        cotangents = self.probes.cotangents[: self.probes.dense - 1]
        for gradients in allowance.plain_draws(self.products, cotangents, self.dtype) if found else ():
            for one in self._common(gradients - self.exact[: len(gradients)]):
                squares[one.block.index] += one.error**2 / allowance.DRAWS
        found = [_allowing(one, squares[one.block.index] ** 0.5) for one in found]
        if any(one.is_excessive for one in found):
            gradients = allowance.with_underflow(self.products, cotangents, self.dtype)
            common = {one.block.index: one.error for one in self._common(gradients - self.exact[: len(gradients)])}
            found = [_allowing(one, abs(common.get(one.block.index, 0.0))) for one in found]
        return found

    def _common(self, errors: Tensor) -> list[Common]:
        """The common part of errors of the dense VJPs, for each input that has one.

        A weighted mean of the relative errors of the entries, first per grad_output, then over all of them.
        """
        found, dense = [], self.probes.dense - 1
        for block in self.problem.inputs:
            exact, size, scale, error = (
                values[:dense, block.slice] for values in (self.exact, self.size, self.scale, errors)
            )
            usable = error.isfinite() & scale.isfinite() & size.isfinite() & (size > 0)
            weight = torch.where(usable, 1 / scale.square(), 0.0)
            squares = torch.where(usable, weight * size.square(), 0.0)
            totals, sums = squares.sum(1), torch.where(usable, weight * error * exact, 0.0).sum(1)
            some = totals != 0
            totals, means = totals[some], sums[some] / totals[some]
            if not bool(some.any()):
                continue
            total = float(totals.sum())
            mean = float(means @ totals) / total
            alike = bool(((means * mean > 0) & (means.abs() > abs(mean) / 2)).all())
            # Squares of shares of the total, because squares of very small numbers are zero.
            entries = float((1 / (squares[some] / totals.unsqueeze(1)).square().sum(1)).sum())
            allowed = SCALE_UNITS * unit_roundoff(self.dtype) + SCALE_ERRORS / total**0.5
            found.append(Common(block, mean, allowed, entries, alike))
        return found


def _allowing(common: Common, of_runs: float) -> Common:
    """The common error, if runs of the reference have a common error of this size."""
    return replace(common, allowed=max(common.allowed, SCALE_ERRORS * of_runs))


def rounded_entry(
    problem: Problem, row: int, coordinate: int, found: complex, expected: complex, allowed: float
) -> RoundedEntry:
    """A `RoundedEntry` for a report.

    This is entry (row, coordinate) of the Jacobian or, if row is negative, component `coordinate` of a VJP whose
    grad_output is not one-hot.
    """
    block = block_with(problem.inputs, coordinate)
    of_output: tuple[Any, Any, Any] = None, None, None
    if row >= 0:
        output = block_with(problem.outputs, row)
        of_output = output.index, output.position, output.index_at(row)
    of_input = block.index, block.position, block.index_at(coordinate)
    return RoundedEntry(*of_output, *of_input, found, expected, allowed, unit_roundoff(block.tensor.dtype))


def _element(vector: Tensor, coordinate: int, block: Block) -> complex:
    """The element to which a coordinate belongs; a float if the block is real."""
    first = coordinate - (coordinate - block.first) % block.width
    return number_of(vector[first : first + block.width].tolist())
