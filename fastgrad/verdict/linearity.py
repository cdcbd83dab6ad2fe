"""Tests that a backward is the linear map whose rows were compared.

Rows come from one-hot, contiguous cotangents. The rows of some wrong backwards are right: those of a backward that
clamps, squares or takes the sign of grad_output, or that is right only for one-hot or only for contiguous grad_outputs.
Therefore the first rows are repeated at another scale, and v^T J, summed from the rows, must equal the VJP of v.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fastgrad.core.errors import raise_unless_of_func
from fastgrad.core.native import Layout, ops
from fastgrad.core.phases import phase
from fastgrad.core.precision import ROUNDING
from fastgrad.core.random import COTANGENT_STREAM
from fastgrad.core.tensors import differ, largest
from fastgrad.engines.blocks import REPEAT_SCALE, JacobianBlock, one_hot_elements
from fastgrad.engines.grad_output_kinds import GRAD_OUTPUT_KINDS, NON_CONTIGUOUS, SMALL, GradOutputKind
from fastgrad.problem.coordinates import block_with
from fastgrad.problem.problem import Problem
from fastgrad.problem.small_backward import SmallBackward
from fastgrad.report.data import Certificate
from fastgrad.report.failure import Failure
from fastgrad.report.settings import Settings
from fastgrad.verdict.comparison import tolerances
from fastgrad.verdict.negation import linear_bound, negation_failure
from fastgrad.verdict.repeated_rows import (
    RERUNS,
    allowed_movement,
    by_inputs,
    nondeterministic,
    nonlinear_sum,
    raised_for,
    rows_vary,
    variation_between,
)

TERM_ROUNDING, SUM_ROUNDING = 8.0, 2.0
"""Allowed error of a sum of c terms, in units of rounding of the root of the sum of their squares. The first number is
for the few operations that compute each term. The second is for the additions; it is multiplied by sqrt(c), because
errors of additions have random signs."""

NEGLIGIBLE_COMPONENT = 1e-9
"""Share of atol below which a component of a product is ignored."""

RESCALED = 1.3, -0.7
"""Factors of a cotangent that show how a backward rounds: the VJP of the multiple is divided by the factor. Powers of
two would not change the rounding."""

MEASURED = 8.0
"""Allowed error of a sum, in units of the rounding that `RESCALED` cotangents show. The two samples of this rounding
may both be too small."""

LARGEST_MEASURED = 0.5
"""Largest measured rounding, relative to the root of the sum of squares of the terms, as an exponent of the unit
roundoff. If more than half of the digits change, this is not rounding: the backward is not linear."""


def linearity_certificate(claim: str, kinds: tuple[GradOutputKind, ...], bound: float) -> Certificate:
    """The certificate of a test with grad_outputs v of some kinds, in which v^T J was equal to the VJP of v."""
    names = ", ".join(kind.short for kind in kinds)
    return Certificate(
        claim,
        f"v^T J (sums of entries) compared with the VJP of v, for {len(kinds)} cotangents: {names}",
        bound,
    )


def linear_backward(kinds: tuple[GradOutputKind, ...], bound: float) -> Certificate:
    """The certificate that a backward is linear."""
    return linearity_certificate("backward is linear in grad_output", kinds, bound)


def term_sizes(squares: Tensor, sums: Tensor) -> Tensor:
    """Scale of rounding: the root of a sum of squares of terms or, if these overflow, the size of the sum."""
    sizes = squares.sqrt()
    return sizes if math.isfinite(largest(sizes)) else torch.where(sizes.isinf(), sums.abs(), sizes)


def sum_rounding(most_terms: float, unit_roundoff: float) -> float:
    """Allowed error of a sum of so many terms, relative to the root of the sum of their squares."""
    return float((TERM_ROUNDING + SUM_ROUNDING * most_terms**0.5) * unit_roundoff)


def disagreement(
    vectors: Tensor,
    products: Tensor,
    sums: Tensor,
    squares: Tensor,
    settings: Settings,
    atol: float | Tensor,
    rtol: float | Tensor,
    movement: Callable[[], Tensor] | None = None,
) -> tuple[int, int, Tensor] | None:
    """Where products of a map with `vectors` first differ from the sums of its entries, if anywhere.

    Returns the number of the vector, the component, and the allowed errors of all products, of their shape. The allowed
    error of a component is atol max|v| + rtol times the root of the sum of squares of its terms. If the errors of the
    entries are independent, this corresponds to the check's own tolerance for entries. atol, rtol: one number for all
    components, or one for each. movement: returns the difference of the products from run to run, as far as nondet_tol
    allows it.
    """
    sizes = vectors.abs().amax(1, keepdim=True)
    if not differ(products, sums, settings.atol * min(1.0, float(sizes.amin())), False):
        return None  # all errors are within any tolerance below
    allowed = atol * sizes + rtol * term_sizes(squares, sums)
    if settings.nondet_tol and movement is not None:
        allowed = allowed + movement()
    # Not "error > allowed", because a NaN must count as wrong. The entries of an infinite sum were already compared.
    wrong = ~((products - sums).abs() <= allowed) & sums.isfinite()
    if not bool(wrong.any()):
        return None
    which, component = (int(i) for i in wrong.nonzero()[0])
    return which, component, allowed


def measured_rounding(
    scaled_products: Callable[[float], Tensor], products: Tensor, sizes: Tensor, unit_roundoff: float
) -> Tensor:
    """Rounding of products of a linear map with vectors, from products with multiples of these vectors.

    scaled_products: gives the products with the vectors times a factor. sizes: as from `term_sizes`. All tensors have
    the shape of the products.
    """
    rounding = torch.zeros_like(products)
    for factor in RESCALED:
        scaled = scaled_products(factor).div_(factor)
        rounding = torch.maximum(rounding, scaled.sub_(products).abs_().mul_(MEASURED))
    return torch.minimum(rounding, unit_roundoff**LARGEST_MEASURED * sizes).nan_to_num_(0.0)


def detected_size(resolution: float, vectors: int, confidence: float) -> float:
    """The size from which entries outside a pattern are detected by so many random vectors.

    If an entry was computed together with another one, it is multiplied in a product by the difference of two
    components of the vector. This difference is smaller than s with probability s, and for all vectors with probability
    s^vectors. resolution: the largest error of a product that rounding may explain.
    """
    return float(resolution / (4 * (1 - confidence)) ** (1 / vectors))


def linearity_cotangents(
    m: int, seed: int, device: torch.device, kinds: tuple[GradOutputKind, ...], number: int = 0
) -> Tensor:
    """The cotangents of a `LinearityTest`, one of each kind: float64, shape (kinds, m).

    number: which set of cotangents; each number gives different vectors.
    """
    cotangents = torch.empty(len(kinds), m, dtype=torch.float64, device=device)
    for kind, cotangent in zip(kinds, cotangents.unbind(), strict=True):
        kind.fill_(cotangent, seed, COTANGENT_STREAM + 16 * (kind.stream + len(GRAD_OUTPUT_KINDS) * number))
    return cotangents


class LinearityTest:
    """Compares v^T J with the VJP of v in R^m, for all outputs at once, and for one v of each kind.

    If there is a single row (m = 1), this test is not needed, because the row was repeated at another scale.
    """

    def __init__(
        self,
        problem: Problem,
        settings: Settings,
        rows_repeated: bool,
        moving: Callable[[], Failure | None],
        kinds: tuple[GradOutputKind, ...] = GRAD_OUTPUT_KINDS,
        excluded_rows: Tensor | None = None,
        excluded_columns: Tensor | None = None,
        number: int = 0,
        sums_again: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Makes the cotangents.

        rows_repeated: whether all rows were run twice. moving: runs all rows again, and returns a failure if one
        differs. kinds: the kinds of v. excluded_rows, excluded_columns: masks of the rows and columns that J leaves
        out, shapes (m,) and (n,); if rows are left out, no v may be expanded. number: as in `linearity_cotangents`.
        sums_again: runs all rows again, and gives their sums for cotangents of shape (count, m).
        """
        self._problem = problem
        self._settings = settings
        self._rows_repeated = rows_repeated
        self._moving = moving
        self._sums_again = sums_again
        self._kinds = kinds
        self.cotangents = linearity_cotangents(problem.m, settings.seed, problem.device, kinds, number)
        if excluded_rows is not None:
            self.cotangents.masked_fill_(excluded_rows, 0.0)
        self._excluded_columns = excluded_columns
        self._sums = torch.zeros(len(kinds), problem.n, dtype=torch.float64, device=problem.device)
        self._squares = torch.zeros_like(self._sums)
        self._gradients: Tensor | None = None
        self._variation = 0.0  # how far VJPs of the same cotangents differ
        self._most_terms = 1.0  # the largest number of terms of a sum
        self.resolution = 0.0  # as from `suspects`

    def take(self, gradients: Tensor, movement: float) -> None:
        """Uses known VJPs of the cotangents, shape (kinds, n); movement: how far two runs of the first VJP differ."""
        self._gradients, self._variation = gradients, movement

    def certificate(self) -> Certificate:
        """The certificate for the case that the test found no failure."""
        return linear_backward(self._kinds, linear_bound(self._error, self._settings))

    @property
    def _error(self) -> Tensor:
        return (self.gradients() - self._sums).nan_to_num(0.0, 0.0, 0.0)  # infinite entries were compared before

    def add(self, block: JacobianBlock) -> None:
        """Adds a block of analytical rows to v^T J."""
        width = block.output.width
        first_row = block.output.first + block.first_row * width + (1 if block.part == "imaginary" else 0)
        first_column = block.input.first + block.first_column
        ops.project_rows_(self._sums, self._squares, self.cotangents, block.analytical, first_row, width, first_column)

    def add_entries(self, rows: Tensor, columns: Tensor, analytical: Tensor, most_terms: int) -> None:
        """Adds the entries of a sparse Jacobian, at coordinates rows and columns, to v^T J.

        most_terms: number of entries of the column with the most entries.
        """
        self._most_terms = float(most_terms)
        for cotangent, total, square in zip(self.cotangents, self._sums, self._squares, strict=True):
            ops.project_entries_(total, square, cotangent, rows, columns, analytical)

    @phase("linearity of backward")
    def failure(self) -> Failure | None:
        """Compares v^T J with the VJPs, coordinate by coordinate, after all rows were added."""
        try:
            self.gradients()
        except Exception as error:
            raise_unless_of_func(error)
            return self._raised(error)
        failure = self._nonlinear() or self._movement()
        if failure is not None or largest(self._error) <= self._settings.atol:
            return failure
        return negation_failure(self._problem, self._settings, "reverse", self.cotangents[0])

    def gradients(self) -> Tensor:
        """The VJPs of the cotangents: float64, shape (kinds, n)."""
        if self._gradients is None:
            self._gradients = self._vjps(first_graph=True)
            if self._excluded_columns is not None:
                self._sums = torch.where(self._excluded_columns, self._gradients, self._sums)
            if self._kinds[0] is NON_CONTIGUOUS and not self._rows_repeated:
                # The VJP is run again immediately.
                self._variation = variation_between(self._vjp(0), self._gradients[:1])
        return self._gradients

    def suspects(self) -> list[tuple[int, int]]:
        """Components of VJPs that differ from sums of entries beyond rounding: (number of v, coordinate), worst first.

        If a difference is larger than the rounding of a few operations, the rounding of the backward is measured. This
        finds an entry that is missing from a sparse Jacobian, unless the rounding of the other entries of its column
        is larger. `resolution` is then the largest allowed difference.
        """
        gradients = self.gradients()
        negligible = self.resolution = NEGLIGIBLE_COMPONENT * self._settings.atol
        if torch.equal(gradients, self._sums):
            return []
        rounding = sum_rounding(self._most_terms, self._problem.unit_roundoff)
        allowed = self._term_sizes.mul_(rounding).add_(negligible)
        error = (gradients - self._sums).abs_()
        found = ~(error <= allowed) & self._sums.isfinite()
        if bool(found.any()):
            allowed = torch.maximum(allowed, self._measured_rounding())
            found = ~(error <= allowed) & self._sums.isfinite()
        self.resolution = float(allowed.amax()) if allowed.numel() else 0.0
        which, column = found.nonzero(as_tuple=True)
        order = (error / allowed)[which, column].nan_to_num(torch.inf).argsort(descending=True)
        return list(zip(which[order].tolist(), column[order].tolist(), strict=True))

    def largest_error(self, suspects: Sequence[tuple[int, int]]) -> float:
        """Twice the largest distance of a VJP from the sum of entries; components of cotangents are at least 1/2."""
        errors = (abs(float(self.gradients()[suspect] - self._sums[suspect])) for suspect in suspects)
        return 2 * max(errors, default=0.0)

    def replace_row(self, row: int, change: Tensor) -> None:
        """Updates v^T J after a row of J changed; change: float64, shape (n,)."""
        self._sums.addr_(self.cotangents[:, row], change)

    def _measured_rounding(self) -> Tensor:
        """Rounding of the VJPs or, if larger, their allowed difference from run to run: float64, shape (kinds, n)."""
        rounding = measured_rounding(self._vjps, self.gradients(), self._term_sizes, self._problem.unit_roundoff)
        return torch.maximum(rounding, self._allowed_variation()) if self._settings.nondet_tol else rounding

    @property
    def _term_sizes(self) -> Tensor:
        return term_sizes(self._squares, self._sums)

    def _allowed_variation(self) -> Tensor:
        """Allowed error of VJPs that may vary from run to run: float64, shape (kinds, n)."""
        moved = torch.zeros_like(self.gradients())
        for _ in range(RERUNS):
            moved = torch.maximum(moved, (self._vjps() - self.gradients()).abs_())
        at_most = self._settings.nondet_tol * self.cotangents.abs().sum(1, keepdim=True)
        return torch.minimum(moved * MEASURED, at_most)

    def _nonlinear(self) -> Failure | None:
        atol, rtol = tolerances(self._problem, self._settings)
        rtol = rtol + ROUNDING * self._problem.unit_roundoff
        products = self.cotangents, self.gradients(), self._sums, self._squares
        found = disagreement(*products, self._settings, atol, rtol, self._allowed_variation)
        if found is None:
            return None
        which, component, allowed = found
        again = self._vjps()[which, component]
        if bool((again - self._sums[which, component]).abs() <= allowed[which, component]):
            return nondeterministic(self._problem.outputs[0])  # the VJP was wrong on the first graph, or in one call
        return self._diagnosed(which, component, allowed)

    def _vjps(self, scale: float = 1.0, first_graph: bool = False) -> Tensor:
        """The VJPs; first_graph: whether the last one is run on the first graph, which later calls may have changed."""
        cotangents = self.cotangents if scale == 1.0 else self.cotangents * scale
        layouts = [kind.layout for kind in self._kinds]
        if not first_graph:
            return self._problem.vjp(cotangents, layouts)
        last = self._problem.vjp_of_first_graph(cotangents[-1:], layouts[-1:])
        return torch.cat([self._problem.vjp(cotangents[:-1], layouts[:-1]), last]) if len(layouts) > 1 else last

    def _vjp(self, which: int) -> Tensor:
        """Runs one of the VJPs again, shape (1, n)."""
        return self._problem.vjp(self.cotangents.narrow(0, which, 1), [self._kinds[which].layout])

    def _raised(self, error: Exception) -> Failure:
        """The failure for a cotangent for which backward raises.

        Raises the exception instead if a zero grad_output raises, too, or if no cotangent raises again.
        """
        for which, kind in enumerate(self._kinds):
            try:
                self._vjp(which)
            except Exception as again:
                self._problem.vjp(torch.zeros_like(self.cotangents[:1]))  # raises if any grad_output would
                return raised_for(kind.text, again)
        raise error

    def _movement(self) -> Failure | None:
        """Tests whether rows that were run only once are deterministic, by repeated VJPs of the same cotangents.

        If the VJPs are equal bit for bit, the rows are assumed to be deterministic. But if sums of rows differ from the
        VJPs, and change if all rows are run again, a row was wrong once. If the VJPs are not equal, sums may have been
        added up in another order although no single row differs. Only running all rows twice can decide this.
        """
        unit, m, gradients = ROUNDING * self._problem.unit_roundoff, self._problem.m, self.gradients()
        rounding = unit * m**0.5 * largest(self._sums)
        if differ(gradients, self._sums, rounding, False):
            self._variation = max(self._variation, *(variation_between(self._vjps(), gradients) for _ in range(RERUNS)))
            if not self._variation and self._problem.is_custom and self._sums_again is not None:
                allowed = rounding + self._settings.nondet_tol
                changed = differ(self._sums_again(self.cotangents), self._sums, allowed, False)
                return nondeterministic(self._problem.outputs[0]) if changed else None
        if not self._variation:
            return None
        failure = self._moving()
        rounding = unit * m * largest(self._term_sizes)  # the error if the same terms are added up in another order
        movements = float(self.cotangents.abs().sum(1).amax())  # the movement of a sum, relative to that of single rows
        if failure is None and self._variation > max(rounding, self._settings.nondet_tol * movements):
            return nondeterministic(self._problem.outputs[0])
        return failure

    def _diagnosed(self, which: int, coordinate: int, allowed: Tensor) -> Failure:
        block, gradients = block_with(self._problem.inputs, coordinate), self.gradients()
        if differ(self._vjp(which), gradients[which : which + 1], self._settings.nondet_tol, False):
            return Failure.at("nondeterministic", input=block)
        text = self._kinds[which].text
        if self._kinds[which].layout != Layout.CONTIGUOUS:
            contiguous = self._problem.vjp(self.cotangents[which : which + 1])
            if bool(((contiguous[0] - self._sums[which]).abs() <= allowed[which]).all()):
                text += " (but not for a contiguous copy)"
        numbers = (values[which, coordinate].item() for values in (gradients, self._sums, allowed))
        addends = "the rows of the Jacobian, weighted by grad_output, add up to"
        return nonlinear_sum("reverse", block, coordinate, f"for {text}", addends, *numbers)


def one_hot_rows(problem: Problem, settings: Settings) -> tuple[Failure | None, dict[int, Tensor]]:
    """Checks dtype, size, determinism and homogeneity of the backward of each output, at one element of each part.

    Returns the failure, if any, and all rows that were run, each float64, shape (n,), with their numbers as keys.
    """
    found: dict[int, Tensor] = {}
    for imaginary in (True, False):
        for output in problem.outputs:
            if (imaginary and not output.is_complex) or not output.size:
                continue
            part = output.part_at(output.first + imaginary)
            element, *last = one_hot_elements(output.tensor.numel(), settings.seed)
            run = partial(problem.analytical_rows, output, imaginary, element, 1, repeated=1, scale=REPEAT_SCALE)
            rows, again, match = run()
            found[output.first + element * output.width + int(imaginary)] = rows[0]
            failure = partial(Failure.at, output=output, part=part)
            if settings.check_grad_dtypes and not match.dtypes:
                return failure("dtype"), found
            if not match.sizes:
                return failure("size"), found
            if not match.repeats and rows_vary(problem, output, part, element, 1, settings.nondet_tol):
                return failure("nondeterministic"), found
            pairs = by_inputs(problem.inputs, settings, rows, again)
            moves = not match.repeats and settings.nondet_tol and rows_vary(problem, output, part, element, 1, 0.0)
            variation = settings.nondet_tol if moves else 0.0
            if not match.repeats and any(
                differ(left, right, own.atol + variation, False) for own, left, right in pairs
            ):
                # Two gradients also differ if one of the runs was wrong.
                later, later_again, _ = run()
                runs = (rows, later), (again, later_again)
                if any(differ(before, after, settings.nondet_tol, False) for before, after in runs):
                    return failure("nondeterministic"), found
                detail = (
                    f"a grad_output of {REPEAT_SCALE:g} at element {list(output.element_index(element))} of output "
                    f"{output.index} does not give {REPEAT_SCALE:g} times the gradient that a grad_output of 1 gives"
                )
                return failure("nonlinear", detail=detail), found
            for other in last:
                rows, _, _ = problem.analytical_rows(output, imaginary, other, 1)
                found[output.first + other * output.width + int(imaginary)] = rows[0]
    return None, found


def linearity_failure(
    problem: Problem, settings: Settings, cotangent: Tensor, gradient: Tensor, kind: str, part: Tensor | None = None
) -> tuple[Failure | None, Tensor]:
    """The failure if a VJP is not the sum of the VJPs of two parts of its cotangent, which are run negated.

    Returns the failure, if any, and the error of this sum, shape (n,).

    Parameters
    ----------
    cotangent
        float64, shape (m,).
    gradient
        VJP of the cotangent, which may have had any layout: float64, shape (n,).
    part
        One of the two parts, shape (m,); None: a random half of the elements. Both parts are contiguous.
    """
    addends = "the sum of -backward(-part) over two parts of this grad_output is"
    if part is None:
        half = torch.empty_like(cotangent)
        ops.direction_(half, settings.seed, COTANGENT_STREAM, 0, True)
        part = torch.where(half == 0, 0.0, cotangent)
        addends = "the sum of -backward(-half) over the two halves of this grad_output is"
    both = torch.stack([part, cotangent - part]).neg_()
    parts = -problem.vjp(both)
    failure = _sum_failure(problem, settings, gradient, parts, f"for {kind}", addends)
    if failure is not None and differ(-problem.vjp(both), parts, settings.nondet_tol, False):
        failure = nondeterministic(problem.outputs[0])
    return failure, gradient - parts.sum(0)


def scaled_failure(problem: Problem, settings: Settings, cotangent: Tensor, gradient: Tensor) -> Failure | None:
    """The failure if REPEAT_SCALE times a cotangent does not give REPEAT_SCALE times its VJP.

    cotangent: shape (m,); gradient: its VJP, shape (n,).
    """
    multiple = (cotangent * REPEAT_SCALE).unsqueeze(0)
    scaled = problem.vjp(multiple) / REPEAT_SCALE
    scale, finite = REPEAT_SCALE, gradient.isfinite()
    if not bool(scaled.isfinite()[0, finite].all()):  # an overflow recurs, and a negated cotangent does not overflow
        if not torch.equal(problem.vjp(multiple).isfinite(), scaled.isfinite()):
            return nondeterministic(problem.outputs[0])
        scaled, scale = -problem.vjp(-cotangent.unsqueeze(0)), -1.0
    error = torch.where(finite, gradient - scaled, 0.0)  # entries that are not finite were compared with differences
    movement = allowed_movement(settings, cotangent)
    if largest(error) <= settings.atol + movement:
        return None
    failure = negation_failure(problem, settings, "reverse", cotangent)
    atol, rtol = tolerances(problem, settings)
    allowed = 2 * (atol * largest(cotangent.abs()) + rtol * gradient.abs())  # both gradients may have errors
    if failure is not None or bool((error.abs() <= allowed).all()):
        return failure
    again = problem.vjp(torch.stack([cotangent, scale * cotangent]))
    if differ(again, torch.cat([gradient[None], scale * scaled]), movement * abs(scale), False):
        return nondeterministic(problem.outputs[0])  # two gradients also differ if one of the runs was wrong
    addends = f"the gradient for {scale:g} times this grad_output, divided by {scale:g}, is"
    return _sum_failure(problem, settings, gradient, scaled, "for a random grad_output", addends)


def one_sign_failure(
    problem: Problem | SmallBackward, settings: Settings, cotangent: Tensor, gradient: Tensor
) -> Failure | None:
    """The failure if VJPs of a positive and of a negative cotangent do not agree with that of one with both signs.

    The positive one is SMALL |cotangent|, and the negative one is cotangent / 4 - |cotangent|. cotangent: random, with
    both signs, shape (m,); gradient: its VJP, shape (n,).
    """
    size = cotangent.abs()
    vectors = torch.stack([SMALL * size, 0.25 * cotangent - size, cotangent])
    multiple = f"{1 / SMALL:g}"
    addends = (
        "the gradients for a grad_output with both signs and for a positive grad_output with elements near "
        f"1/{multiple} imply"
    )

    def failure(gradients: Tensor, changes: Tensor | None = None) -> Failure | None:
        parts = torch.stack([0.25 * gradients[2], gradients[0] / -SMALL])
        which = "for a negative grad_output"
        return _sum_failure(problem, settings, gradients[1], parts, which, addends, 1 / SMALL, changes)

    if failure(torch.cat([problem.vjp(vectors[:2]), gradient[None]])) is None:
        return None
    again = problem.vjp(vectors)
    if failure(again) is None:
        return nondeterministic(problem.outputs[0])
    scales = cotangent.new_tensor(RESCALED).abs()[:, None]  # the multiples have the same signs
    small, negative = ((problem.vjp(scales * vectors[k]) / scales - again[k]).abs().amax(0) for k in range(2))
    return failure(again, small / SMALL + negative)


def separate_failure(problem: Problem, settings: Settings, cotangent: Tensor, gradient: Tensor) -> Failure | None:
    """The failure if a VJP is not the sum of the VJPs of single outputs, whose other grad_outputs are undefined."""
    if len(problem.outputs) == 1:
        return None
    parts = torch.cat([problem.vjp(cotangent[None], only=output) for output in problem.outputs])
    which = "for random grad_outputs of all outputs at once"
    return _sum_failure(
        problem, settings, gradient, parts, which, "the gradients for the grad_output of one output at a time add up to"
    )


def _sum_failure(
    problem: Problem | SmallBackward,
    settings: Settings,
    gradient: Tensor,
    parts: Tensor,
    which: str,
    addends: str,
    factor: float = 1.0,
    changes: Tensor | None = None,
) -> Failure | None:
    """The failure if a gradient, shape (n,), differs from the sum of parts, shape (count, n), beyond the tolerance.

    factor: the largest one by which a part was multiplied. changes: how far VJPs of multiples of the grad_output,
    divided by the factors, differ from the gradient, because backward rounds, for example in float32: shape (n,).
    """
    total = parts.sum(0)
    atol, rtol = tolerances(problem, settings)
    allowed = atol + settings.nondet_tol * factor + (rtol + ROUNDING * problem.unit_roundoff) * parts.abs().sum(0)
    if changes is not None:
        allowed += MEASURED * torch.minimum(changes.nan_to_num(0.0), allowed)
    # A sum of finite parts may overflow: not compared. A part that is not finite is wrong if the gradient is finite.
    differs = ~((gradient - total).abs() <= allowed) & total.isfinite()
    wrong = differs | (gradient.isfinite() & ~parts.isfinite().all(0))
    if not bool(wrong.any()):
        return None
    coordinate = int(wrong.nonzero()[0])
    block, own, summed = block_with(problem.inputs, coordinate), gradient[coordinate].item(), total[coordinate].item()
    return nonlinear_sum("reverse", block, coordinate, which, addends, own, summed)
