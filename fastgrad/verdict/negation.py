"""Whether products of a derivative are negated with their vectors: one that depends on a sign is not linear."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgrad.core.tensors import largest
from fastgrad.problem.coordinates import block_with
from fastgrad.problem.problem import Problem
from fastgrad.report.failure import Failure, Mode
from fastgrad.report.settings import Settings
from fastgrad.verdict.locate import locate


def linear_bound(error: Tensor, settings: Settings) -> float:
    """The error of an entry for vectors of one sign that sums show; error: of products, as below."""
    return max(settings.atol, 2 * largest(error))  # the components of a vector are at least 1/2


def unexplained_error_failure(
    problem: Problem, settings: Settings, mode: Mode, vectors: Tensor, error: Tensor
) -> Failure | None:
    """The failure if a product differs from the sum of entries because an entry depends on the sign of its vector.

    Tolerances allow products an error relative to all of their terms, in which a wrong entry next to larger ones may
    hide. A product that is off by more than atol is therefore compared with that of the negated vector; if they do not
    add up to zero, this finds the element behind it, with about 4 log2(size) products.

    Parameters
    ----------
    vectors
        Tangents, shape (count, n), or grad_outputs, shape (count, m).
    error
        Of their products, shape (count, m) or (count, n).
    """
    if largest(error) <= settings.atol:
        return None
    vector_number, component = divmod(int(error.abs().argmax()), error.shape[1])
    vector = vectors[vector_number]

    def product(factors: Tensor) -> float:
        products = problem.jvps_of(factors[None]) if mode == "forward" else problem.vjp(factors[None])
        return products[0, component].item()

    def even(factors: Tensor) -> float:
        return product(factors) + product(-factors)

    value = even(vector)
    if not abs(value) > settings.atol / 2 + settings.nondet_tol:
        return None
    element = locate(even, vector, value)
    one_hot = torch.zeros_like(vector)
    one_hot[element] = 1.0
    plus, minus = product(one_hot), product(-one_hot)
    row, column = (component, element) if mode == "forward" else (element, component)
    output, block = block_with(problem.outputs, row), block_with(problem.inputs, column)
    own = settings.of(block.index)
    # Each of them may be off by the tolerance.
    if not abs(plus + minus) > 2 * (own.atol + own.rtol * abs(plus)) + settings.nondet_tol:
        return None
    of_output = f"output {output.index} at {list(output.index_at(row))}"
    of_input = f"input {block.index} at {list(block.index_at(column))}"
    detail = (
        f"for the one-hot tangent of {of_input}, the tangent of {of_output}"
        if mode == "forward"
        else f"for the one-hot grad_output of {of_output}, the gradient of {of_input}"
    )
    detail += f" is {plus:.6g}, but for the negated one it is {minus:.6g}"
    return Failure("nonlinear", output.index, block.index, output.position, block.position, mode=mode, detail=detail)
