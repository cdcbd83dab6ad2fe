"""Tests whether a negated vector gives the negated product: a derivative that depends on a sign is not linear."""

from __future__ import annotations

from torch import Tensor

from fastgrad.core.tensors import largest, ones_at
from fastgrad.problem.coordinates import Block, block_with
from fastgrad.problem.problem import Problem
from fastgrad.report.failure import Failure, Mode
from fastgrad.report.number_text import digits_apart
from fastgrad.report.settings import Settings
from fastgrad.verdict.locate import locate

MAX_COMPONENTS = 8
"""Largest number of components of a product, the worst ones, that are traced to an element of the vector."""


def linear_bound(error: Tensor, settings: Settings) -> float:
    """The smallest error, for vectors of one sign, that sums detect; error: the difference of products and sums."""
    return max(settings.atol, 2 * largest(error))  # nonzero components of a vector are at least 1/2 in magnitude


def negation_failure(problem: Problem, settings: Settings, mode: Mode, vector: Tensor) -> Failure | None:
    """The failure if an entry has different values for a vector and for the negated vector.

    vector: a tangent, shape (n,), or a grad_output, shape (m,).

    The tolerance of a product is relative to all of its terms, and may hide a wrong entry next to larger ones. But the
    products of a vector and of the negated vector add up to zero, up to rounding, component by component. If the sum of
    a component is not zero, `locate` finds the responsible element of the vector, with two products per call.
    """
    plus, minus = _products(problem, mode, vector)
    not_finite_once = (plus.isfinite() & ~minus.isfinite()).nonzero()
    if not_finite_once.numel():
        return _not_finite(problem, mode, int(not_finite_once[0]), plus, minus)
    sums = plus + minus
    sizes = sums.abs().nan_to_num(0.0, 0.0, 0.0)  # components of plus that are not finite were compared elsewhere
    for component in sizes.argsort(descending=True)[:MAX_COMPONENTS].tolist():
        if not sizes[component] > settings.atol / 2 + settings.nondet_tol:
            break

        def total(part: Tensor, component: int = component) -> float:
            one, other = _products(problem, mode, part)
            return (one[component] + other[component]).item()

        element = locate(total, vector, sums[component].item())
        failure = _element_failure(problem, settings, mode, element, component)
        if failure is not None:
            return failure
    return None


def nonlinear_component(mode: Mode, block: Block, at: int, when: str, value: str, but: str) -> Failure:
    """The failure of a component of a gradient, or of a tangent in forward mode; but: what its value contradicts.

    at: the coordinate of this component among those of all inputs; in forward mode, of all outputs.
    """
    what = "gradient of input" if mode == "reverse" else "tangent of output"
    detail = f"{when}, the {what} {block.index} at {list(block.index_at(at))} is {value}, but {but}"
    return Failure.at("nonlinear", *((None, block) if mode == "reverse" else (block, None)), mode=mode, detail=detail)


def _not_finite(problem: Problem, mode: Mode, component: int, plus: Tensor, minus: Tensor) -> Failure:
    """The failure of a component that is finite for a vector, but not for the negated one."""
    block = block_with(problem.inputs if mode == "reverse" else problem.outputs, component)
    when = f"for a random {'grad_output' if mode == 'reverse' else 'tangent'}"
    but = f"for the negated one it is {minus[component].item():.6g}"
    return nonlinear_component(mode, block, component, when, f"{plus[component].item():.6g}", but)


def _products(problem: Problem, mode: Mode, vector: Tensor) -> tuple[Tensor, Tensor]:
    """The products of a vector and of the negated vector."""
    run = problem.jvps_of if mode == "forward" else problem.vjp
    return run(vector[None])[0], run(-vector[None])[0]


def _element_failure(problem: Problem, settings: Settings, mode: Mode, element: int, component: int) -> Failure | None:
    """The failure if negating a one-hot vector does not negate a component of its VJP or JVP."""
    one_hot = ones_at(problem.n if mode == "forward" else problem.m, element, problem.device)
    plus, minus = (product[component].item() for product in _products(problem, mode, one_hot))
    row, column = (component, element) if mode == "forward" else (element, component)
    output, block = block_with(problem.outputs, row), block_with(problem.inputs, column)
    own = settings.of(block.index)
    # Each of the two values may have an error up to the tolerance.
    if not abs(plus + minus) > 2 * (own.atol + own.rtol * abs(plus)) + settings.nondet_tol:
        return None
    of_output = f"output {output.index} at {list(output.index_at(row))}"
    of_input = f"input {block.index} at {list(block.index_at(column))}"
    detail = (
        f"for the one-hot tangent of {of_input}, the tangent of {of_output}"
        if mode == "forward"
        else f"for the one-hot grad_output of {of_output}, the gradient of {of_input}"
    )
    digits = digits_apart(plus, -minus)
    detail += f" is {plus:.{digits}g}, but for the negated one it is {minus:.{digits}g}"
    return Failure.at("nonlinear", output, block, mode=mode, detail=detail)
