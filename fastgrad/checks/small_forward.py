"""Forward mode of a small check: its JVPs in one native call, compared with differences and with each other."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from fastgrad.checks.one_block import product_at_hand
from fastgrad.checks.small_calls import compared_columns, numerical_columns, outputs_repeat
from fastgrad.checks.small_result import Errors, SmallCheck
from fastgrad.checks.small_steps import (
    changing_steps_repeat,
    differences_by_step,
    noise_repeats,
    steps_repeat,
    sum_threshold,
)
from fastgrad.core import native, torch_private
from fastgrad.core.native import Derivatives
from fastgrad.core.phases import phase
from fastgrad.core.precision import ROUNDING
from fastgrad.core.tensors import differ, largest
from fastgrad.engines.plan import compares_undecided_entries, sketch_size
from fastgrad.report.data import Certificate
from fastgrad.verdict.modes import modes_agree
from fastgrad.verdict.tangents import LINEAR_JVP, combined_tangents, sums_certificate, tangent_directions

BATCH_SCALES = torch.tensor([1.0, -2.0], dtype=torch.float64)
"""The tangents of a batch are these multiples of a known one: powers of two, so that right JVPs are exact multiples."""

MAX_COLUMNS = 256
"""Largest number of columns for which all one-hot tangents are held at once: half a megabyte."""


_Tangents = tuple[Tensor, list[int]]
"""Tangents of all inputs, end to end, for the JVPs of a small check: float64, shape (count, n); and, for each row,
which tangents are undefined, as for `ForwardMode.jvps_of`."""


def columns_agree(check: SmallCheck) -> bool:
    """Compares all columns by forward mode with the numerical ones; returns whether they agree.

    JVPs that decided nothing must be sums of these columns.
    """
    problem, settings = check.problem, check.settings
    if problem.n > MAX_COLUMNS:
        return False
    columns = numerical_columns(check)
    if columns is None:
        return False
    n, earlier, is_undecided = problem.n, check.tangents, check.undecided_sums is not None
    rows, undefined = _one_hot_directions(_sizes(check), settings.seed, settings.check_undefined_grad)
    # After undecided sums, columns alone run first: the complete check also takes them if they do not agree.
    products = _jvps(check, rows[:n], undefined[:n]) if is_undecided else _jvps(check, rows, undefined)
    if products is None:
        return False
    tangents = products[:n]

    def errors_of(columns: Tensor) -> Errors | None:
        return problem.tangent_errors(tangents, columns, settings.atol, settings.rtol)

    check.tangent_errors = compared_columns(check, columns, errors_of)
    if check.tangent_errors is None:
        check.tangent_columns = tangents
        check.tangents = earlier if is_undecided else check.tangents
        return False
    others = _jvps(check, rows[n:], undefined[n:]) if is_undecided else products[n:]
    if others is None:
        return False
    sums, others = others.tensor_split([2])
    total, undefined_are_zero = _of_inputs(check, others)
    if not undefined_are_zero or differ(total, sums[: len(total)], settings.atol, False):
        return False
    if differ(rows[n : n + 2] @ tangents, sums, settings.atol, False):
        return False
    if earlier is not None and differ(earlier[0] @ tangents, earlier[2], settings.atol, False):
        return False
    check.dense_tangent = len(rows) - n
    check.certificates.append(Certificate(*LINEAR_JVP, settings.atol))
    return True


def products_or_columns_agree(check: SmallCheck) -> bool:
    """Compares products or, if they decide nothing and this takes few calls, all columns; returns whether they agree.

    If not, the complete check decides.
    """
    if check.differences is not None:
        return _products_agree(check, *check.differences)
    if products_agree(check):
        return changing_steps_repeat(check, last_agrees=True)
    if not check.is_consistent or check.jvp_varies or not check.domains_match:
        return False
    if check.steps and compares_undecided_entries(check.problem, check.settings):
        check.undecided_sums = torch.empty(0) if check.tangents is None else check.tangents[2]
        if _columns_are_precise(check) and columns_agree(check):
            return _undecided_calls_repeat(check)
    noise_repeats(check)
    return False


def _columns_are_precise(check: SmallCheck) -> bool:
    """Whether rounding of the numerical columns allows sums of JVPs to agree within atol."""
    columns = numerical_columns(check)
    return columns is not None and ROUNDING * check.problem.unit_roundoff * largest(columns) <= check.settings.atol


def _undecided_calls_repeat(check: SmallCheck) -> bool:
    """Whether the differences of undecided products, and func at the inputs, give the same results again.

    They are repeated after all columns agreed, which also predict the JVPs. Differences of several steps are repeated
    only if they changed.
    """
    outputs, steps = check.problem.outputs_of_graph(), check.steps
    if not (steps_repeat(check, steps) if len(steps) == 1 else changing_steps_repeat(check, last_agrees=False)):
        return False
    return check.problem.record_again() and outputs_repeat(check, outputs)


def products_agree(check: SmallCheck) -> bool:
    """Compares JVPs with differences along random directions, output by output; returns whether all agree."""
    contradicted = 0.0  # the largest step at which JVPs disagree with differences that are not noisy
    for differences, weight, bound in differences_by_step(check):
        if _products_agree(check, differences, weight, bound, contradicted):
            return True
        if bool(differences.directions.isfinite().all()):  # otherwise, nothing was compared
            contradicted = max(contradicted, differences.step)
        if check.early is not None or check.jvp_varies or not check.domains_match:
            return False
    return False


def _products_agree(
    check: SmallCheck, differences: Derivatives, weight: Tensor, bound: float, contradicted: float = 0.0
) -> bool:
    """Whether JVPs agree with differences and with each other; weight, bound: as from `differences_by_step`.

    contradicted: the step below which agreement does not count, because rounding inside func may hide changes there.
    """
    settings = check.settings
    directions, earlier = differences.directions, check.tangents
    if not bool(directions.isfinite().all()):
        return False  # the step that an infinite coordinate has taken is NaN, and so are its products
    combination, shares = combined_tangents(directions, settings.seed)
    # If there are several inputs, the JVP along the first direction is the sum of those for the tangents of each input.
    together = directions[1:] if len(check.problem.inputs) > 1 else directions
    made = torch.cat([together, combination])
    made, which = _with_inputs(made, directions[0], _sizes(check), settings.check_undefined_grad)
    last = slice(-len(made), None)
    if earlier is not None and torch.equal(earlier[0][last], made):  # only the noise was measured since
        products = earlier[2][last]
    else:
        found = _jvps(check, made, which)
        if found is None:
            return False
        products = found
    tangents, combined, others = products.tensor_split([len(together), len(together) + 2])
    total, undefined_are_zero = _of_inputs(check, others)
    if not undefined_are_zero:
        return False
    tangents = torch.cat([total, tangents])
    sums = shares[None, :2] @ tangents[:2], -shares[None, 2:] @ combined
    expected = differences.derivatives
    if weight.numel():
        tangents, expected = tangents * weight, expected * weight
    if differ(tangents, expected, sum_threshold(settings, differences), False) or differ(*sums, settings.atol, False):
        return False
    # The JVPs of other steps, whose tangents are nearly the same. If they differ, the complete check repeats them.
    assert check.tangents is not None
    steps = len(check.tangents[2]) // len(made)
    if steps > 1 and differ(check.tangents[2], products.repeat(steps, 1), settings.atol, False):
        return False
    if differences.step < contradicted:
        return False
    check.dense_tangent = len(made)
    check.certificates.append(sums_certificate(sketch_size(settings.confidence), bound, differences.step, settings))
    return True


@phase("comparison")
def same_as_reverse(check: SmallCheck) -> bool:
    """Whether forward and reverse mode give the same v^T J u for a random u and v; both modes have passed."""
    problem, settings, backward = check.problem, check.settings, check.backward
    vjps = check.products if backward is None else product_at_hand(problem, settings, backward)
    assert vjps is not None
    assert check.tangents is not None
    directions, _, products = check.tangents
    dense = -check.dense_tangent
    return modes_agree(settings, problem.unit_roundoff, (vjps[0][0], vjps[1][0]), (directions[dense], products[dense]))


@phase("batched tangents")
def batched_tangents_agree(check: SmallCheck) -> bool:
    """Whether JVPs under vmap equal multiples of known or, if not, single ones; if not, the complete check decides."""
    first = 0
    for k, size in enumerate(_sizes(check)):
        if not check.noted(partial(_batch_agrees, check, k, slice(first, first + size))):
            check.jvp_varies = check.early is None
            return False
        first += size
    return True


def _batch_agrees(check: SmallCheck, k: int, own: slice) -> bool:
    """Whether JVPs of input k under vmap are right; own: its coordinates."""
    problem, input_ = check.problem, check.problem.graph.inputs[k]
    assert check.tangents is not None
    rows, _, products = check.tangents
    row = -check.dense_tangent if len(problem.inputs) == 1 else _row_of_input(check, k)
    vectors = _shaped(torch.outer(BATCH_SCALES, rows[row, own]), input_)
    check.jvps += 1
    with torch_private.quiet_vmap():
        batched = native.at_dual_level(partial(problem.batched_tangents, k, vectors))
    if isinstance(batched, tuple):
        return False
    found = [_coordinates(one) for one in batched]
    expected = [[one] for one in torch.outer(BATCH_SCALES, products[row]).unbind()]
    if native.are_close([found[0] if len(found) == 1 else torch.cat(found, 1)], expected):
        return True
    check.jvps += len(vectors)
    single = native.at_dual_level(partial(problem.tangents, k, vectors))
    return not isinstance(single, tuple) and native.are_close(batched, single)


def _row_of_input(check: SmallCheck, k: int) -> int:
    """The number, from the end, of the row of `_with_inputs` with a dense tangent of one of several inputs only."""
    inputs, undefined = len(check.problem.inputs), check.settings.check_undefined_grad
    pairs = 2 * inputs * undefined
    return 2 * (1 - k) - pairs if inputs == 2 and undefined else k - pairs - inputs


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    """Real coordinates as tensors like an input: shape (rows, *like.shape)."""
    rows = torch.view_as_complex(rows.view(len(rows), rows.shape[1] // 2, 2)) if like.is_complex() else rows
    return rows.to(like.dtype).view(len(rows), *like.shape)


def _coordinates(batched: Tensor) -> Tensor:
    """The real coordinates of each element of a batch: float64, shape (batch, coordinates)."""
    values = torch.view_as_real(batched.resolve_conj()) if batched.is_complex() else batched.resolve_neg()
    return values.reshape(len(batched), values.numel() // len(batched)).to("cpu", torch.float64)


def _sizes(check: SmallCheck) -> tuple[int, ...]:
    return tuple(elements * width for _, elements, width in check.problem.inputs)


@phase("analytical columns")
def _jvps(check: SmallCheck, rows: Tensor, undefined: list[int]) -> Tensor | None:
    """The JVPs of all rows: float64, shape (rows, m).

    None if func raises, returns something else or modifies a tangent, or if a tangent is real or complex unlike its
    output: then the complete check decides.
    """
    torch_private.load_decompositions()
    check.jvps += len(undefined)
    # func is wrapped in a lambda: if a builtin raises, the innermost frame must be in this file.
    found = check.noted(lambda: native.at_dual_level(lambda: check.problem.jvps(rows, undefined)))
    if found is None:
        return None
    changed, products, domains_match = found
    if changed is not None:
        check.jvp_varies = True
        return None
    if check.problem.evaluator.modified_tangent >= 0:
        return None
    if check.tangents is not None:
        earlier, before, known = check.tangents
        check.tangents = torch.cat([earlier, rows]), before + undefined, torch.cat([known, products])
    else:
        check.tangents = rows, undefined, products
    check.domains_match = domains_match or not check.settings.check_grad_dtypes
    return products if check.domains_match else None


def _of_inputs(check: SmallCheck, products: Tensor) -> tuple[Tensor, bool]:
    """The results of the rows that `_with_inputs` adds, from their JVPs.

    Returns
    -------
    tuple
        The sum of the JVPs for the tangent of one input at a time, shape (1, m), or (0, m) if there is only one input;
        and whether undefined tangents count as zero.
    """
    inputs = len(check.problem.inputs)
    if not len(products):
        return products, True
    pairs = 2 * inputs * check.settings.check_undefined_grad
    separate, undefined = products.tensor_split([len(products) - pairs])
    if inputs == 2 and pairs:
        separate = undefined[1::2]  # without a tangent of one input, only the other one has a tangent
    total = separate.sum(0, keepdim=True) if inputs > 1 else separate
    return total, torch.equal(undefined[::2], undefined[1::2])


@lru_cache(32)
def _one_hot_directions(sizes: tuple[int, ...], seed: int, undefined: bool) -> _Tangents:
    """One-hot tangents of all coordinates, the two of `TangentLinearityTest`, and the rows of `_with_inputs`."""
    n = sum(sizes)
    dense = tangent_directions(n, seed, torch.device("cpu"))
    rows = torch.cat([torch.eye(n, dtype=torch.float64), dense])
    return _with_inputs(rows, dense[0], sizes, undefined)


def _with_inputs(rows: Tensor, dense: Tensor, sizes: tuple[int, ...], undefined: bool) -> _Tangents:
    """The rows, and copies of the dense row: first, for each of several inputs, with a tangent of this input only.

    If undefined tangents are checked, the other tangents of these copies are undefined; otherwise, they are zero. And
    there are two more copies for each input: in the first one, the tangent of this input is zero, and in the second
    one, it is undefined. For two inputs, the latter replace the first copies.
    """
    inputs, which = len(sizes), [-1] * rows.shape[0]
    if inputs == 1 and not undefined:
        return rows, which
    separate = 0 if inputs == 1 or (inputs == 2 and undefined) else inputs
    which += [inputs + k if undefined else -1 for k in range(separate)]
    parts = torch.where(_own_coordinates(sizes), dense, 0.0)
    made = [rows, parts[:separate]]
    if undefined:
        made.append((dense - parts).repeat_interleave(2, 0))
        which += [one for k in range(inputs) for one in (-1, k)]
    return torch.cat(made), which


@lru_cache(32)
def _own_coordinates(sizes: tuple[int, ...]) -> Tensor:
    """Masks of the coordinates of each input: shape (inputs, n)."""
    numbers = torch.arange(len(sizes))
    return numbers.repeat_interleave(torch.tensor(sizes)) == numbers[:, None]
