"""Tests that a jvp is the linear map whose columns were compared, and that repeated JVPs are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fastgrad.core.errors import raise_unless_of_func
from fastgrad.core.native import ops
from fastgrad.core.phases import phase
from fastgrad.core.precision import ROUNDING
from fastgrad.core.random import TANGENT_STREAM, direction
from fastgrad.core.tensors import largest, near
from fastgrad.engines.blocks import REPEAT_SCALE
from fastgrad.problem.coordinates import Block, block_with
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Certificate
from fastgrad.report.failure import Failure
from fastgrad.report.number_text import digits_apart
from fastgrad.report.settings import Settings
from fastgrad.verdict.linearity import disagreement
from fastgrad.verdict.negation import linear_bound, negation_failure
from fastgrad.verdict.repeated_rows import nonlinear_sum, raised_for


def nondeterministic_jvp(output: Block, detail: str) -> Failure:
    """The failure of an output in which two runs of a JVP differ; detail: how they differ."""
    return Failure.at("nondeterministic", output, mode="forward", detail=detail)


LINEAR_JVP = (
    "jvp is linear in its tangent",
    "weighted sums of columns compared with the JVPs of 2 random tangents (one has zeros)",
)
"""The claim and the method of a `TangentLinearityTest`'s certificate."""


def tangent_directions(n: int, seed: int, device: torch.device) -> Tensor:
    """The two tangents of a `TangentLinearityTest`: float64, shape (2, n)."""
    directions = torch.empty(2, n, dtype=torch.float64, device=device)
    for which, one in enumerate(directions):
        ops.direction_(one, seed, TANGENT_STREAM, 0, which == 1)
    dense, halved = directions
    halved.copy_(REPEAT_SCALE * torch.where(dense > 0, dense, halved))
    return directions


def combined_tangents(directions: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Two tangents whose JVPs have a weighted sum that follows from the JVPs of the first two `directions`.

    The first of them is directions[0] + REPEAT_SCALE * directions[1] with one coordinate set to zero. The second is the
    one-hot tangent of that coordinate. directions: float64, shape (count, n).

    Returns
    -------
    tuple
        The two tangents, shape (2, n), and four factors: the JVPs of the two directions and of the two tangents, each
        multiplied by its factor, must add up to zero.
    """
    shares = [1 / REPEAT_SCALE, 1.0, -1 / REPEAT_SCALE, 0.0]
    combined = directions.new_zeros(2, directions.shape[1])
    torch.add(directions[0], directions[1], alpha=REPEAT_SCALE, out=combined[0])
    if directions.shape[1]:
        alone = seed % directions.shape[1]
        shares[3] = -combined[0, alone].item() / REPEAT_SCALE
        combined[0, alone], combined[1, alone] = 0.0, 1.0
    return combined, torch.tensor(shares, dtype=torch.float64, device=directions.device)


def single_entries(of: str, bound: float, step: float, settings: Settings) -> str:
    """The claim of a certificate that sums show no wrong entry.

    of: of which Jacobian, as text, empty for that of reverse mode. bound: for entries of inputs with the smallest atol.
    step: the largest step of the differences.
    """
    # A small entry next to larger entries of its row may be off by more than its own tolerance.
    size = "its tolerance" if bound <= settings.atol else "the larger of its tolerance and the bound"
    # A difference averages such terms out.
    within = f", apart from terms that vary within a step of {step:.2g}" if step > settings.eps else ""
    return f"no single entry{of} is wrong by more than {size}{within}"


def sums_certificate(count: int, bound: float, step: float, settings: Settings) -> Certificate:
    """The certificate of products with `count` random tangents; the other arguments: as of `single_entries`."""
    claim = single_entries(" of forward mode", bound, step, settings)
    method = f"{count} random directions: J u by forward mode compared with differences, output by output"
    return Certificate(claim, method, settings.of_entries(bound))


_WHEN = "for a random tangent", "for a random tangent, with some of its elements zero", "summed over earlier tangents"
"""The tangents of a `TangentLinearityTest`, for messages."""


class TangentLinearityTest:
    """Compares J u, summed from one-hot columns, with the JVP of u, for two u in R^n over all inputs at once.

    The first u is dense, with components of magnitude in [0.5, 1.5). The second is REPEAT_SCALE times the first, with a
    random half of the negative components of the first set to zero. So every component is negative in one of the two.
    The columns, which are not repeated, were computed with positive components. J u is also compared with
    `Problem.unexplained_jvps`.

    Attributes
    ----------
    run
        The tangents that `failure` has run and their JVPs: float64, shapes (count, n) and (count, m).
    """

    def __init__(self, problem: Problem, settings: Settings) -> None:
        self._problem = problem
        self._settings = settings
        self._directions = tangent_directions(problem.n, settings.seed, problem.device)
        self._summed = problem.unexplained_jvps
        if self._summed is not None:
            self._directions = torch.cat([self._directions, self._summed.tangent[None]])
        shape = 2, self._directions.shape[0], problem.m
        self._sums, self._squares = torch.zeros(shape, dtype=torch.float64, device=problem.device).unbind()
        self._error = self._sums
        self.run = self._directions[:0], self._sums[:0]

    def add(self, first: int, tangents: Tensor) -> None:
        """Adds the analytical columns from `first` on, shape (count, m), to J u."""
        ops.project_rows_(self._sums, self._squares, self._directions, tangents, first, 1, 0)

    def certificate(self) -> Certificate:
        """The certificate for the case that the test found no failure."""
        return Certificate(*LINEAR_JVP, linear_bound(self._error, self._settings))

    @phase("linearity of jvp")
    def failure(self) -> Failure | None:
        """Compares J u with the JVPs, output by output, after all columns were added."""
        try:
            products = self._problem.jvps_of(self._directions[:2])
        except Exception as error:  # one-hot tangents did not raise
            raise_unless_of_func(error)
            return raised_for("a random tangent", error, "forward")
        self.run = self._directions[:2], products
        self._error = (products - self._sums[:2]).nan_to_num_(0.0, 0.0, 0.0)  # infinite entries were compared before
        if self._summed is not None:
            products = torch.cat([products, self._summed.product[None]])
        own = self._settings.loosest()
        rtol = own.rtol + ROUNDING * self._problem.unit_roundoff
        wrong = disagreement(self._directions, products, self._sums, self._squares, self._settings, own.atol, rtol)
        if wrong is None:
            if largest(self._error) <= self._settings.atol:
                return None
            return negation_failure(self._problem, self._settings, "forward", self._directions[0])
        which, component, allowed = wrong
        output = block_with(self._problem.outputs, component)
        numbers = (values[which, component].item() for values in (products, self._sums, allowed))
        addends = "the columns of the Jacobian, weighted by the tangent, add up to"
        return nonlinear_sum("forward", output, component, _WHEN[which], addends, *numbers)


def changed_sum(
    settings: Settings, first: Tensor, later: Tensor, allowed: Tensor, outputs: Sequence[Block]
) -> Failure | None:
    """The failure if a weighted sum of JVPs, shape (m,), changes by more than `allowed` when all of them run again."""
    changed = ~near(later, first, allowed + settings.nondet_tol)
    if not bool(changed.any()):
        return None
    row = int(changed.nonzero()[0])
    what = "a weighted sum of tangents of {}, for several tangents of the inputs,"
    return _changed(outputs, row, what, first[row].item(), later[row].item())


def _changed(outputs: Sequence[Block], row: int, what: str, first: float, later: float) -> Failure:
    """The failure of a number that changed; what: the number, with {} in place of the output element."""
    output, digits = block_with(outputs, row), digits_apart(first, later)
    what = what.format(f"output {output.index} at {list(output.index_at(row))}")
    return nondeterministic_jvp(output, f"{what} was first {first:.{digits}g} and later {later:.{digits}g}")


_OF_PARTS = f"those for {REPEAT_SCALE:g} times two parts of this tangent, divided by {REPEAT_SCALE:g}, add up to"


def jvps_of_parts(problem: Problem, settings: Settings, u: Tensor) -> Tensor:
    """The JVPs of two parts of u, shape (n,), which are run scaled: float64, shape (2, m)."""
    some = direction(u.numel(), settings.seed, TANGENT_STREAM, halved=True).to(u.device)
    part = torch.where(some == 0, 0.0, u)
    return problem.jvps_of(torch.stack([part, u - part]) * REPEAT_SCALE) / REPEAT_SCALE


def nonlinear_parts(problem: Problem, settings: Settings, u: Tensor) -> Failure | None:
    """The failure if the JVP of u, shape (n,), is not the sum of the JVPs of two parts of u, which are run scaled."""
    parts = partial(jvps_of_parts, problem, settings, u)
    return _nonlinear_terms(problem, settings, u, parts, "for a tangent", _OF_PARTS)


@phase("linearity of jvp")
def nonlinear_in_inputs(problem: Problem, settings: Settings) -> Failure | None:
    """The failure if the JVP of a tangent is not the sum of the JVPs for the tangent of one input at a time.

    The tangents of the other inputs are undefined if `check_undefined_grad` is set, and zero otherwise.
    """
    if len(problem.inputs) < 2:
        return None
    u = direction(problem.n, settings.seed, TANGENT_STREAM, device=problem.device)
    separate = partial(problem.separate_jvps, u, settings.check_undefined_grad)
    return _nonlinear_terms(problem, settings, u, separate, *OF_INPUTS)


OF_INPUTS = "for tangents of all inputs", "those for the tangent of one input at a time add up to"
"""When a JVP is compared with those of single inputs, and the latter, for messages."""


def _nonlinear_terms(
    problem: Problem, settings: Settings, u: Tensor, parts: Callable[[], Tensor], when: str, addends: str
) -> Failure | None:
    """The failure if the JVP of u, shape (n,), is not the sum of other JVPs.

    If it is not, all of them run again: if the difference changes, the jvp is not deterministic.

    parts: runs the others; float64, shape (count, m). when, addends: as for `nonlinear_sum`.
    """

    def terms() -> Tensor:
        return torch.cat([-problem.jvp_coordinates(u)[None], parts()])

    first = terms()
    error, sizes = first.sum(0).abs(), first.abs().sum(0)
    own = settings.loosest()
    allowed = own.atol + own.rtol * sizes
    # If both sums are infinite, so are derivatives, which are compared elsewhere. If only one is, it is wrong.
    wrong = ~(error <= allowed) & (first[0].isfinite() | first[1:].sum(0).isfinite())
    if not bool(wrong.any()):
        return None
    failure = changed_sum(settings, first.sum(0), terms().sum(0), allowed, problem.outputs)
    if failure is not None:
        return failure
    row = int((error / allowed).nan_to_num(torch.inf).masked_fill(~wrong, 0.0).argmax())
    numbers = -first[0, row].item(), first[1:, row].sum().item()
    return nonlinear_sum("forward", block_with(problem.outputs, row), row, when, addends, *numbers)


def repeated_tangents_failure(
    problem: Problem,
    settings: Settings,
    directions: Tensor,
    undefined: Sequence[int],
    products: Tensor,
    allowed: Tensor | None = None,
) -> Failure | None:
    """The failure if JVPs, run again, differ from earlier ones by more than `allowed`.

    directions: tangents of the inputs, float64, shape (count, n). undefined: as for `ForwardMode.jvps_of`. products:
    earlier tangents of the outputs, shape (count, m). allowed: of the same shape; None: the tolerances of entries.
    """
    again = problem.jvps_of(directions, undefined)
    close = near(again, products, settings.loosest().allowed(products.abs()) if allowed is None else allowed)
    close |= (again - products).abs() <= settings.nondet_tol
    if bool(close.all()):
        return None
    which, component = (int(i) for i in (~close).nonzero()[0])
    what = "for the same tangent of the inputs, the tangent of {}"
    return _changed(
        problem.outputs, component, what, *(values[which, component].item() for values in (products, again))
    )
