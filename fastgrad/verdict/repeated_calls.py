"""Detects a custom backward that keeps state: a few VJPs are run early, and again after all others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from fastgrad.core.memory import OUT_OF_MEMORY
from fastgrad.core.native import Layout
from fastgrad.core.phases import phase
from fastgrad.core.precision import ROUNDING
from fastgrad.core.tensors import differ, largest, largest_finite, near
from fastgrad.engines.blocks import MAX_AT_ONCE, MAX_CACHED, JacobianBlock
from fastgrad.engines.grad_output_kinds import GRAD_OUTPUT_KINDS, NON_CONTIGUOUS, SPARSE
from fastgrad.problem.coordinates import Block, block_with
from fastgrad.problem.first_look import values_vary
from fastgrad.problem.problem import Problem
from fastgrad.problem.small_backward import SmallBackward
from fastgrad.report.data import Certificate
from fastgrad.report.failure import Failure
from fastgrad.report.number_text import digits_apart
from fastgrad.report.settings import Settings
from fastgrad.verdict.comparison import tolerances
from fastgrad.verdict.grad_outputs import check_zero_grad_output
from fastgrad.verdict.linearity import MEASURED, RESCALED, linearity_cotangents, one_sign_failure
from fastgrad.verdict.negation import nonlinear_component
from fastgrad.verdict.repeated_rows import (
    agrees_between_graphs,
    allowed_movement,
    graphs_agree,
    nondeterministic,
    nondeterministic_func,
)

FIRST_PRODUCT, LAST_PRODUCT = NON_CONTIGUOUS, SPARSE
"""Kinds of the cotangents that are run before and after the rows: the first gives a product of all rows, the second a
product of few rows. The cotangents are contiguous here.

Suppose that a backward is wrong in the first calls on every graph. In the first run, these calls are the product of all
rows and the last row; in the repeated run, they are another row and the product. So some gradients differ.
"""

FIRST_PRODUCTS = 4
"""How often an exact check repeats the product of all rows. Including its first run, the product is then once the
first, second, ... and fifth call on a graph. So an error in one of these calls is found, whichever entry is wrong."""

SUM_MULTIPLE = -(2.0**-6)
"""If a VJP is not the sum of other VJPs, the VJP of this multiple of its cotangent shows whether backward is nonlinear.
The multiple is small and has the opposite sign: a backward that limits the size of grad_output, or depends on its sign,
treats it differently."""

MAX_CALLS = 128
"""Least number of calls of a custom backward in an exact check, and of func before a VJP on the first graph is run
again; or the number of calls in torch's checker, if it is smaller. A backward that is wrong from one of these calls on
is found."""


class RepeatedCalls:
    """Runs a few VJPs before all others and repeats them at the end of a check, to find state in a custom backward.

    Only a custom backward can keep state. torch's checker, which runs each row twice, finds a backward that is wrong
    from some call on. So does this class, if the call is among the first MAX_CALLS or, in fast mode, among the calls
    of the check. If backward has no custom code or is not checked, nothing is run.

    Attributes
    ----------
    rows
        Rows of the Jacobian that were run separately, before all others: float64, shape (n,); keys: their numbers.
    """

    def __init__(self, problem: Problem | SmallBackward, settings: Settings) -> None:
        self._problem = problem
        self._settings = settings
        self._most = 0 if settings.fast_mode else min(2 * problem.m, MAX_CALLS)
        self.rows: dict[int, Tensor] = {}
        self._raised: Exception | None = None
        self._varying_output: Block | None = None
        # The sum of several cotangents, the sum of their VJPs, and the largest size of each component of these VJPs.
        # The VJP of the summed cotangents equals the sum of the VJPs, unless one of them is wrong.
        self._summed: tuple[Tensor, Tensor, Tensor] | None = None
        self._last = 0
        self._known: Tensor | None = None
        self._layouts: list[Layout] = []  # of the cotangent of the first product
        self._product_tolerance = self._rounding = 0.0
        self._is_needed = settings.check_backward_ad and problem.is_custom and problem.m > 0
        if not self._is_needed:
            return
        m = problem.m
        # The last row is included, because kernels may treat the remainder at the end separately.
        self._rows = list(dict.fromkeys([m - 1, settings.seed % m, (settings.seed + m // 2) % m]))
        self._outputs = [block_with(problem.outputs, row).index for row in self._rows]
        if m > 1:
            self._outputs = [-1, *self._outputs, -1]
        self._calls = range(len(self._outputs))
        self._at_once = len(self._calls) if problem.n + m <= MAX_AT_ONCE else 1

    def run_first(self) -> None:
        """Runs the first VJPs, unless they are known; keeps exceptions for `failure`."""
        if not self._is_needed or self._known is not None or self._raised is not None:
            return
        try:
            self._known = self._run()
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            self._raised = error
            return
        self.rows = dict(zip(self._rows, self._known[1:-1] if self._problem.m > 1 else self._known, strict=True))

    def take(self, jacobian: Tensor, products: Tensor) -> None:
        """Uses VJPs that ran before all others as the first VJPs, unless the first VJPs have already been run.

        jacobian: the rows, float64, shape (m, n). products: the VJPs of the `linearity_cotangents` of
        GRAD_OUTPUT_KINDS, whose grad_outputs may have had any layout: float64, shape (kinds, n).
        """
        if not self._is_needed or self._known is not None:
            return
        if self._problem.m == 1:
            self._known = jacobian
            return
        first, last = (products[GRAD_OUTPUT_KINDS.index(kind)] for kind in (FIRST_PRODUCT, LAST_PRODUCT))
        self._known, self._layouts = torch.stack([first, *jacobian[self._rows], last]), [FIRST_PRODUCT.layout]
        self._product_tolerance = self._settings.atol

    def _run(self) -> Tensor:
        problem = self._problem
        known = torch.empty(len(self._calls), problem.n, dtype=torch.float64, device=problem.device)
        for first in self._calls[:: self._at_once]:
            calls = self._calls[first : first + self._at_once]
            within = slice(calls.start, calls.stop)
            known[within] = problem.vjps_of(self._cotangents(calls), self._outputs[within])[0]
        return known

    def _cotangents(self, calls: range) -> Tensor:
        m, seed, device, rows = self._problem.m, self._settings.seed, self._problem.device, tuple(self._rows)
        if m <= MAX_CACHED:
            return _cached_cotangents(m, seed, device, rows, range(len(rows) + 2))[calls.start : calls.stop]
        return _cached_cotangents.__wrapped__(m, seed, device, rows, calls)

    def vjp(self, cotangent: Tensor) -> Tensor:
        """A VJP, shape (1, n), that is not compared with rows; the sum of all such VJPs is compared at the end."""
        gradient = self._problem.vjp(cotangent)
        self.add(cotangent, gradient)
        return gradient

    def add(self, cotangents: Tensor, gradients: Tensor) -> None:
        """Adds cotangents and VJPs, shapes (count, m) and (count, n), to the sum that is compared at the end."""
        if self._summed is None:
            like = cotangents[0], gradients[0]
            self._summed = torch.zeros_like(like[0]), torch.zeros_like(like[1]), torch.zeros_like(like[1])
        total, sums, sizes = self._summed
        for cotangent, gradient in zip(cotangents, gradients, strict=True):
            total += cotangent
            sums += gradient
            torch.maximum(sizes, gradient.abs(), out=sizes)

    def run_more_rows(self) -> dict[int, Tensor]:
        """Further rows, run separately: all others if there are at most MAX_CALLS, otherwise evenly spaced ones.

        Each row is float64, shape (n,); keys: row numbers. Empty in fast mode, or if vectors take much memory.
        """
        problem = self._problem
        if not self._most or not self.rows or self._at_once == 1:
            return {}
        some = [row for row in range(0, problem.m, -(-problem.m // MAX_CALLS)) if row not in self.rows]
        cotangents = torch.zeros(len(some), problem.m, dtype=torch.float64, device=problem.device)
        cotangents[range(len(some)), some] = 1.0
        outputs = [block_with(problem.outputs, row).index for row in some]
        return dict(zip(some, problem.vjps_of(cotangents, outputs)[0], strict=True))

    @property
    def product(self) -> Tensor | None:
        """The product of all rows with the cotangent FIRST_PRODUCT, shape (1, n), if it was run before all others."""
        return self._known[:1] if self._known is not None and self.rows and self._problem.m > 1 else None

    def compare(self, block: JacobianBlock) -> None:
        """Compares the first rows with the rows of a block, which were run later; `failure` returns the result."""
        width, count = block.output.width, block.analytical.shape[0]
        first = block.output.first + block.first_row * width + int(block.part == "imaginary")
        start = block.input.first + block.first_column
        for row, gradient in self.rows.items():
            which, other = divmod(row - first, width)
            if other or not 0 <= which < count:
                continue
            again = block.analytical[which : which + 1]
            known = gradient[None, start : start + again.shape[1]]
            own = self._settings.of(block.input.index)
            if not agrees_between_graphs(self._problem, own, again, known, self._settings.nondet_tol):
                self._varying_output = block.output
            self._rounding = max(self._rounding, largest_finite(again - known))

    def compare_all(self, jacobian: Tensor, products: Tensor) -> None:
        """Like `compare`, for all rows of the Jacobian, shape (m, n), and for the first and the last product.

        It is called only if there are `rows`. products: the VJPs of the `linearity_cotangents` of GRAD_OUTPUT_KINDS,
        shape (kinds, n).
        """
        for row, known in self.rows.items():
            if not graphs_agree(self._problem, self._settings, jacobian[row : row + 1], known[None]):
                self._varying_output = block_with(self._problem.outputs, row)
            self._rounding = max(self._rounding, largest_finite(jacobian[row] - known))
        if self._known is None or self._problem.m == 1:
            return
        for call, kind in (self._calls[0], FIRST_PRODUCT), (self._calls[-1], LAST_PRODUCT):
            again, known = products[GRAD_OUTPUT_KINDS.index(kind)][None], self._known[call : call + 1]
            if not graphs_agree(self._problem, self._settings, again, known, self._cotangents(range(call, call + 1))):
                self._varying_output = self._problem.outputs[0]
            self._rounding = max(self._rounding, largest_finite(again - known))

    @phase("repeated calls")
    def failure(self, one_round: bool = False) -> Failure | None:
        """Repeats the first VJPs, after all others, and returns a failure if one differs; raises an earlier exception.

        one_round: whether to end after one round, even if the check then makes fewer than MAX_CALLS calls.
        """
        if self._raised is not None:
            raise self._raised
        if self._varying_output is not None:
            return nondeterministic(self._varying_output)
        failure = None if self._summed is None else self._sum_failure(*self._summed)
        if self._known is None:
            return failure
        if failure is None:
            varying = self._first_varying(self._known, self._order(one_round))
            failure = None if varying is None else nondeterministic(varying)
            self._last = self._problem.vjps
            return failure or (None if one_round else self._one_sign_failure(self._known[0]))
        return self._one_sign_failure(self._known[0]) or failure

    def _one_sign_failure(self, known: Tensor) -> Failure | None:
        problem, settings = self._problem, self._settings
        failure = one_sign_failure(problem, settings, self._cotangents(range(1))[0], known)
        if failure is None or not isinstance(problem, Problem):
            return failure
        return check_zero_grad_output(problem, settings) or failure  # a gradient for zero is a simpler explanation

    @phase("repeated calls")
    def older_graph_failure(self) -> Failure | None:
        """The failure if a graph gives another gradient after func has been called again.

        Later calls of func may overwrite what the first call saved. torch's checker also calls func between the forward
        and the backward of a graph, twice per input coordinate. An exact check also calls func that often, but at most
        MAX_CALLS times. If func changes its inputs, no graph is valid after another call.
        """
        if self._known is None or self._problem.mutates_inputs:
            return None
        problem, settings = self._problem, self._settings
        if isinstance(problem, Problem) and not settings.fast_mode:
            base = problem.base()
            for _ in range(min(2 * problem.n, MAX_CALLS) - problem.evaluations_since_first_graph()):
                if values_vary(problem, settings, problem.evaluate(True, problem.zero_displacement()), base):
                    return nondeterministic_func(problem, "at the inputs")
        # In exact mode, a row is run as well: the first VJP may have changed what the graph saved.
        for call in [0] if settings.fast_mode else [0, min(1, problem.m - 1)]:
            number, known = self._outputs[call], self._known[call : call + 1]
            only = None if number < 0 else problem.outputs[number]
            # The cotangent differs from that of the call before, so that the gradient of that call is not right here.
            cotangent, layouts = self._cotangents(range(call, call + 1)), [] if call else self._layouts
            again = problem.vjp_of_older_graph(2 * cotangent, layouts, only) / 2
            if not torch.equal(again, known) and not graphs_agree(problem, settings, again, known, cotangent):
                return nondeterministic(problem.outputs[max(0, number)])
            self._rounding = max(self._rounding, largest_finite(again - known))
        return None

    def _order(self, one_round: bool) -> list[int]:
        """The numbers of the calls to repeat: each at least once.

        Unless one_round, they are repeated in a cycle until `_most` VJPs have been run. If m = 1: the only call, twice.
        """
        if self._problem.m == 1:
            return [0, 0]  # the same call twice, as in torch's checker
        first, last_row, row, *others, last = self._calls
        # In the first round, no call has its earlier position, so an error in the first call on each graph is found.
        once = [row, *[first] * (FIRST_PRODUCTS if self._most else 1), last, last_row, *others]
        # Seven or eleven calls (prime numbers), so that an error in every second, third, ... call reaches each of them.
        cycle = [*once, first, row, first] if others else once
        count = len(once) if one_round else max(len(once), self._most - self._problem.vjps)
        return [cycle[call % len(cycle)] for call in range(count)]

    def _first_varying(self, known: Tensor, order: list[int]) -> Block | None:
        """The output of the first call, in this order, whose gradient differs from the known one; None if none does."""
        if self._at_once == len(self._calls):
            parts = [(self._calls, order, False)]
        else:
            parts = [(range(call, call + 1), [0], call in order[:number]) for number, call in enumerate(order)]
        for calls, positions, is_repeated in parts:
            within = slice(calls.start, calls.stop)
            vjps = self._cotangents(calls), self._outputs[within], known[within], positions
            tolerance = partial(self._tolerance, known, calls)
            run_again = [0] if is_repeated else []
            moving, rounding = first_varying(self._problem, self._settings, *vjps, tolerance, run_again)
            self._rounding = max(self._rounding, rounding)
            if moving is not None:
                return moving
        return None

    def _tolerance(self, known: Tensor, calls: range, position: int) -> float:
        """The allowed difference of a gradient from run to run; position: of its call among some calls."""
        call = calls[position]
        if self._problem.m == 1 or 0 < call <= len(self._rows):
            return self._settings.nondet_tol
        # A value that is not finite must recur. It does not count for the tolerance.
        rounding = ROUNDING * self._problem.unit_roundoff * largest_finite(known[call])
        movement = allowed_movement(self._settings, self._cotangents(range(call, call + 1)))
        return max(rounding, movement, self._product_tolerance)

    def certificates(self) -> list[Certificate]:
        """What the repeated calls certify, if any were needed."""
        if not self._last:
            return []
        what = "row" if self._problem.m == 1 else f"{len(self._rows)} rows and two other VJPs"
        tolerance = max(self._settings.nondet_tol, self._product_tolerance, self._rounding)
        return [repeated_calls_certificate(what, self._last, tolerance)]

    def _sum_failure(self, cotangent: Tensor, gradient: Tensor, sizes: Tensor) -> Failure | None:
        """The failure if one of the VJPs that were not compared with rows was wrong, or backward is not linear."""
        again = self._problem.vjp(cotangent[None])[0]
        atol, rtol = tolerances(self._problem, self._settings)
        allowed = atol + rtol * sizes + allowed_movement(self._settings, cotangent)
        allowed += ROUNDING * self._problem.unit_roundoff * torch.maximum(sizes, again.abs()).nan_to_num(0.0, 0.0, 0.0)
        # The sum of infinite gradients may be NaN, or infinite with the other sign.
        infinite = ~(again.isfinite() | gradient.isfinite())
        if not bool((near(again, gradient, allowed) | infinite).all()):
            scales = cotangent.new_tensor([SUM_MULTIPLE, *RESCALED])[:, None]
            multiples = self._problem.vjp(scales * cotangent) / scales
            # How the backward rounds, for example if it computes in float32. A change beyond `allowed` is not rounding.
            changes = (multiples - again).abs().amax(0).nan_to_num(0.0, 0.0, 0.0)
            rounding = MEASURED * torch.minimum(changes, allowed)
            if not bool((near(again, gradient, allowed + rounding) | infinite).all()):
                return self._sum_explanation(cotangent, again, allowed, scales, multiples)
        # A difference beyond rounding may be an error of one call. It is within the tolerances and is certified.
        difference = largest_finite(again - gradient)
        if difference > ROUNDING * self._problem.unit_roundoff * largest(sizes):
            self._rounding = max(self._rounding, difference)
        return None

    def _sum_explanation(
        self, cotangent: Tensor, again: Tensor, allowed: Tensor, scales: Tensor, multiples: Tensor
    ) -> Failure:
        """The failure if the VJP of a cotangent, shape (n,), is not the sum of earlier VJPs: nonlinear or varying.

        multiples: the VJPs of the cotangent times the scales, divided by the scales: shape (scales, n).
        """
        off = (~near(multiples, again.expand_as(multiples), allowed)).nonzero()
        if not off.numel() or not bool(near(self._problem.vjp(cotangent[None])[0], again, allowed).all()):
            return nondeterministic(self._problem.outputs[0])
        which, at = (int(index) for index in off[0])
        block, scale = block_with(self._problem.inputs, at), float(scales[which])
        value, multiple = again[at].item(), multiples[which, at].item()
        digits = digits_apart(value, multiple)
        but = f"for {scale:g} times this grad_output it is {scale * multiple:.{digits}g}"
        return nonlinear_component("reverse", block, at, "for one grad_output", f"{value:.{digits}g}", but)


def repeated_calls_certificate(what: str, last: int, tolerance: float) -> Certificate:
    """The certificate of repeated calls; what: the gradients; last: the number of the last call of backward."""
    claim = (
        f"a custom backward gives the same {what} when run again after all other calls (the last of these repeats is "
        f"call {last} of backward)"
    )
    return Certificate(claim, f"{what}: run early, and again after all others", tolerance, "differences")


def first_varying(
    problem: Problem | SmallBackward,
    settings: Settings,
    cotangents: Tensor,
    only: Sequence[int],
    known: Tensor,
    order: Sequence[int],
    tolerance: Callable[[int], float],
    run_again: Collection[int] = (),
) -> tuple[Block | None, float]:
    """Runs VJPs of rows of cotangents in order, until one gives another gradient than before.

    Returns the output of this VJP, if any, and the largest difference from `known` that was allowed.

    Parameters
    ----------
    cotangents, only, order
        As in `Problem.first_other_vjp`.
    known
        The gradients, shape (rows, n). Gradients of another graph may be rounded differently. Therefore the first VJP
        of a row may differ from its known gradient within the tolerances of entries; it then replaces this gradient.
    tolerance
        Returns the allowed difference of a row's gradient from run to run.
    run_again
        Rows whose known gradients are from the same graph.
    """
    done = 0
    of_this_graph = set(run_again)
    rounding = 0.0
    while done < len(order):
        run, other = problem.first_other_vjp(cotangents, only, order[done:], known)
        of_this_graph.update(order[done : done + run - 1])
        done += run
        row = order[done - 1]
        before = known[row : row + 1]
        if other is not None:
            is_new = differ(other, before, tolerance(row), False)
            if is_new and (row in of_this_graph or not graphs_agree(problem, settings, other, before, cotangents[row])):
                return problem.outputs[max(0, only[row])], rounding
            rounding = max(rounding, largest_finite(other - before))
            if is_new:
                before.copy_(other)
        of_this_graph.add(row)
    return None, rounding


@lru_cache(32)
def _cached_cotangents(m: int, seed: int, device: torch.device, rows: tuple[int, ...], calls: range) -> Tensor:
    """The cotangents of some calls: first product, one-hot rows, last product; float64, shape (calls, m)."""
    if m == 1:
        return torch.ones(len(calls), 1, dtype=torch.float64, device=device)
    cotangents = torch.zeros(len(calls), m, dtype=torch.float64, device=device)
    for call, cotangent in zip(calls, cotangents, strict=True):
        if 0 < call <= len(rows):
            cotangent[rows[call - 1]] = 1.0
        else:
            kind = LAST_PRODUCT if call else FIRST_PRODUCT
            cotangent.copy_(linearity_cotangents(m, seed, device, (kind,))[0])
    return cotangents
