"""Small checks of every entry of a sparse Jacobian whose pattern is guessed, with few calls.

A guess assumes that each output element depends on at most one element of each input. It is certified by the
differences and VJPs of `small_sums`. If the entries do not explain these, the complete check decides.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from fastgrad.checks.small_calls import add_products
from fastgrad.checks.small_result import Errors, SmallCheck, SmallPattern
from fastgrad.checks.small_steps import rounding_of_differences, steps_repeat
from fastgrad.checks.small_sums import sums_agree
from fastgrad.core import native
from fastgrad.core.native import flattened, largest_errors
from fastgrad.core.phases import phase
from fastgrad.core.random import EPS_DIRECTION, GRAPH_STREAM, direction
from fastgrad.core.tensors import largest
from fastgrad.engines.blocks import MAX_AT_ONCE, one_hot_elements
from fastgrad.engines.compressed import compress
from fastgrad.engines.grad_output_kinds import DENSE, GRAD_OUTPUT_KINDS
from fastgrad.engines.plan import admitted_entries, sketch_size, small_pattern_pays, takes_first_look
from fastgrad.engines.sketch import derivatives_vary
from fastgrad.problem.coordinates import Block, blocks_of
from fastgrad.problem.first_look import KnownLook, values_vary
from fastgrad.report.settings import Settings
from fastgrad.structure import sparsity
from fastgrad.structure.sparsity import Mask, Pattern
from fastgrad.verdict.analytical_certificate import analytical_certificate
from fastgrad.verdict.linearity import sum_rounding
from fastgrad.verdict.numerical_certificate import NEGLIGIBLE_ERROR, numerical_certificate
from fastgrad.verdict.outside_pattern import OUTPUT_ROUNDING, exceeds_eps

LARGEST_SHARE = 1 / 4
"""Largest error of a sum of entries, relative to atol, that rounding and curvature may explain."""

MAX_CACHED_GUESS = 1 << 12
"""Largest number of coordinates of inputs and outputs for which guesses from shapes are cached (up to 0.3 MB each). A
test suite checks many functions of the same shapes."""

MIN_UNREACHED = 4
"""Least number of outputs that, by the guess, do not depend on the half of the inputs that moves first. With fewer such
outputs, this evaluation would refute few wrong guesses."""

CURVATURE_MARGIN = 9.0
"""Factor of the noise, which is measured along the first direction. Components of directions differ by factors of up to
3, and errors from curvature by factors of up to 9."""


def guessed_pattern(check: SmallCheck) -> SmallPattern | None:
    """A guess that agrees with one more evaluation, if comparing its entries costs less than comparing all entries."""
    problem, settings = check.problem, check.settings
    if problem.is_custom or not problem.m:
        return None
    if settings.engine != "auto" or settings.check_forward_ad or problem.tensor_device.type != "cpu":
        return None
    if problem.n + problem.m > MAX_AT_ONCE or any(width > 1 for _, _, width in (*problem.inputs, *problem.outputs)):
        return None
    reacted: Mask | None = None
    for pattern in _guesses(check):
        if not small_pattern_pays(problem, pattern.compression.column_groups.count, len(pattern.only)):
            continue
        entries, reached = pattern.compression.pattern.nnz, _reached(pattern, settings.seed)
        if admitted_entries(settings, entries) < entries or reached.size - reached.sum() < MIN_UNREACHED:
            continue
        reacted = _reacting_outputs(check) if reacted is None else reacted
        if reacted is None or problem.evaluator.mutates_inputs:
            return None
        if not (reacted & ~reached).any():
            return pattern
    return None


def repeat_look(check: SmallCheck) -> None:
    """Notes if func gives other values when it is called again at the points of the first look.

    If the complete check takes a `first_look`, this is left to the complete check.
    """
    if check.look is None or takes_first_look(check.problem, check.settings):
        return
    displacement, zero = check.look.displacement, torch.zeros_like(check.look.displacement)
    for where, at, values in (
        ("next to the inputs", displacement, check.look.values),
        ("at the inputs", zero, check.look.base),
    ):
        again = _values_at(check, at)
        if again is None or values_vary(check.problem, check.settings, again, values):
            check.irreproducible.append(where)


@lru_cache(16)
def _halved(n: int, seed: int) -> Tensor:
    """A random direction that moves half of the inputs' coordinates: float64, shape (n,), zero for the other half."""
    return direction(n, seed, GRAPH_STREAM, halved=True)


@lru_cache(16)
def _reached(pattern: SmallPattern, seed: int) -> Mask:
    """A mask of the outputs that may change, by a pattern, if the coordinates of `_halved` move: shape (m,)."""
    pattern_of_entries = pattern.compression.pattern
    return pattern_of_entries.touched(_halved(pattern_of_entries.n, seed).numpy() != 0)


def entries_agree(check: SmallCheck, pattern: SmallPattern) -> bool:
    """Compares the entries in a pattern, and certifies that there are no others; returns whether both succeed.

    The VJPs of the rows run on the first graph, after the differences have called func.
    """
    numerical = _numerical_entries(check, pattern)
    if numerical is None:
        return False
    gradients = check.noted(partial(_rows, check, pattern))
    if gradients is None:
        return False
    compression = pattern.compression
    analytical = gradients[pattern.row_groups, compression.columns]
    errors = _errors(check.settings, pattern, gradients, numerical)
    sums_are_right = errors is not None and sums_agree(check, weighted=False)
    if sums_are_right and _sums_are_explained(check, pattern, gradients, analytical):
        check.errors, check.pattern = errors, pattern
        return True
    _repeat_what_differs(check, pattern, numerical if errors is None else None)
    add_products(check, pattern.grad_outputs, gradients)
    check.undecided_sums = None  # the complete check does not compare sums
    return False


def _repeat_what_differs(check: SmallCheck, pattern: SmallPattern, numerical: Tensor | None) -> None:
    """Notes if differences that decided nothing, or were compared with nothing, change when they are repeated.

    numerical: the numerical entries, shape (entries,), if some differ from the analytical ones; otherwise None.
    """
    if not check.is_consistent or not steps_repeat(check, check.steps):
        return
    if numerical is not None:
        again = _numerical_entries(check, pattern)
        rounding = rounding_of_differences(check, 1.0)
        if again is None or derivatives_vary(check.settings, again, numerical, rounding):
            check.irreproducible.append("at steps of several inputs")
            return
    repeat_look(check)


def _guesses(check: SmallCheck) -> Iterator[SmallPattern]:
    problem = check.problem
    sides = problem.graph.inputs, problem.graph.outputs
    shapes = tuple(tuple(tensor.shape for tensor in side) for side in sides)
    cached = problem.n + problem.m <= MAX_CACHED_GUESS
    yield from (_guesses_by_shape if cached else _guesses_by_shape.__wrapped__)(*shapes, check.is_custom)
    if not takes_first_look(problem, check.settings):
        return  # finding equal values takes as long as the dense engine
    values, results = (flattened([tensor.detach() for tensor in side]).numpy() for side in sides)
    pattern = sparsity.guess_moved(values, results, np.ones(results.size, dtype=np.bool_))
    if pattern is not None:
        inputs, outputs = map(_blocks, shapes)
        yield _in_groups(pattern, inputs, outputs, check.is_custom)


@lru_cache(16)
def _guesses_by_shape(
    inputs: tuple[torch.Size, ...], outputs: tuple[torch.Size, ...], separate_inputs: bool
) -> tuple[SmallPattern, ...]:
    sides = _blocks(inputs), _blocks(outputs)
    guesses = sparsity.guess_pointwise(*sides), sparsity.guess_in_order(*sides)
    return tuple(_in_groups(pattern, *sides, separate_inputs) for pattern in guesses if pattern is not None)


def _blocks(shapes: tuple[torch.Size, ...]) -> tuple[Block, ...]:
    """The coordinates of real strided tensors of some shapes."""
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    return blocks_of(tensors, range(len(shapes)), once=False)


def _in_groups(
    pattern: Pattern, inputs: tuple[Block, ...], outputs: tuple[Block, ...], separate_inputs: bool
) -> SmallPattern:
    compression = compress(pattern, inputs, outputs, torch.device("cpu"), separate_inputs=separate_inputs)
    vectors: list[Tensor] = []
    only: list[int] = []
    row_groups = torch.empty(pattern.nnz, dtype=torch.int64, device="cpu")
    for output, grouping in zip(outputs, compression.row_groups, strict=True):
        for members, entries in zip(grouping.members(), grouping.entries(), strict=True):
            row_groups[entries] = len(vectors)
            vectors.append(output.first + members)
            only.append(output.index)
    row_group_count = len(vectors)
    for output in outputs:
        for element in one_hot_elements(output.size, 0) if output.size else []:
            vectors.append(torch.tensor([output.first + element], device="cpu"))
            only.append(output.index)
    grad_outputs = torch.zeros(len(vectors), pattern.m, dtype=torch.float64, device="cpu")
    for row, coordinates in enumerate(vectors):
        grad_outputs[row, coordinates] = 1.0
    return SmallPattern(compression, inputs, outputs, grad_outputs, only, row_groups, row_group_count)


def _reacting_outputs(check: SmallCheck) -> Mask | None:
    """A mask of the outputs that change if a random half of the inputs moves: shape (m,).

    None if func raises for such a step, or returns something else.
    """
    displacement, base = _halved(check.problem.n, check.settings.seed) * check.settings.eps, check.problem.base()
    start = time.perf_counter()
    values = _values_at(check, displacement)
    if values is None:
        return None
    check.look = KnownLook(displacement, base, values, time.perf_counter() - start)
    return (values.view(torch.int64) != base.view(torch.int64)).numpy()


def _values_at(check: SmallCheck, displacement: Tensor) -> Tensor | None:
    return check.unless_changed(partial(check.problem.values_at, displacement), "next to the inputs")


@phase("numerical columns")
def _numerical_entries(check: SmallCheck, pattern: SmallPattern) -> Tensor | None:
    """The numerical entries, shape (entries,); None if func raises for steps of groups, or returns something else."""
    compression = pattern.compression
    groups = compression.column_groups.groups
    run = partial(check.problem.difference_entries, groups, compression.columns, check.settings.eps)
    return check.unless_changed(run, "at steps of several inputs")


@phase("backward")
def _rows(check: SmallCheck, pattern: SmallPattern) -> Tensor | None:
    """The VJPs of the grad_outputs of a pattern, shape (rows, n); None if a size, dtype or layout is wrong."""
    gradients, match = check.on_graph.vjps_of(pattern.grad_outputs, pattern.only)
    check.vjp_varies = not match.sizes or (check.settings.check_grad_dtypes and not match.dtypes)
    return gradients if match.strided and not check.vjp_varies else None


@phase("comparison")
def _errors(settings: Settings, pattern: SmallPattern, gradients: Tensor, numerical: Tensor) -> Errors | None:
    """By output, and by input, the largest absolute and relative error; None if an entry is wrong."""
    compression = pattern.compression
    columns = gradients.new_zeros(gradients.shape[1], gradients.shape[0])
    columns[compression.columns, pattern.row_groups] = numerical
    inputs = [(block.size, False, settings.atol, settings.rtol) for block in pattern.inputs]
    errors = []
    first = 0
    for grouping in compression.row_groups:
        own = largest_errors(gradients[first : first + grouping.count], columns, first, 1, inputs)
        if own is None:
            return None
        errors.append(own)
        first += grouping.count
    return errors


def _explains_look(check: SmallCheck, analytical: Tensor, columns: Tensor, rows: Tensor) -> bool:
    """Whether the entries explain how the outputs changed in the first look, up to the curvature of func."""
    assert check.look is not None
    settings, look = check.settings, check.look
    allowed = settings.eps * settings.atol + OUTPUT_ROUNDING * check.problem.unit_roundoff * largest(look.base)
    moved = look.displacement[None], (look.values - look.base)[None]
    return native.explained_sums(analytical, columns, rows, *moved, allowed, sparsity.CURVED) is not None


def _explains_eps(check: SmallCheck, analytical: Tensor, columns: Tensor, rows: Tensor) -> bool:
    """Whether the entries explain how the outputs change at steps of exactly eps, if other steps exceed eps."""
    settings, eps = check.settings, check.settings.eps
    x = flattened([tensor.detach() for tensor in check.problem.graph.inputs])
    if not exceeds_eps(x, x.dtype, eps):
        return True
    displacement = eps * direction(x.numel(), settings.seed, EPS_DIRECTION)
    plus, minus = _values_at(check, displacement), _values_at(check, -displacement)
    if plus is None or minus is None:
        return False
    # Entries below atol are not wrong, and a component of the direction is at least 1/2.
    allowed = eps * settings.atol + 2 * OUTPUT_ROUNDING * check.problem.unit_roundoff * largest(check.problem.base())
    moved = ((x + displacement) - (x - displacement))[None], (plus - minus)[None]
    if native.explained_sums(analytical, columns, rows, *moved, allowed, 0.0) is not None:
        return True
    for at, before in ((displacement, plus), (-displacement, minus)):
        again = _values_at(check, at)
        if again is None or values_vary(check.problem, settings, again, before):
            check.irreproducible.append("at steps of several inputs")
    return False


@phase("certificates")
def _sums_are_explained(check: SmallCheck, pattern: SmallPattern, gradients: Tensor, analytical: Tensor) -> bool:
    """Whether entries outside the pattern are zero: the entries must explain derivatives along directions, and VJPs.

    If they are, adds the certificates.
    """
    settings = check.settings
    problem, compression = check.problem, pattern.compression
    assert check.differences is not None
    assert check.products is not None
    differences = check.differences[0]
    columns, rows, negligible = compression.columns, compression.rows, NEGLIGIBLE_ERROR * settings.atol
    rounding = OUTPUT_ROUNDING * 2 * problem.unit_roundoff / differences.step
    allowed = max(negligible, CURVATURE_MARGIN * largest(differences.noise) + rounding * largest(problem.base()))
    along = differences.directions, differences.derivatives
    of_func = native.explained_sums(analytical, columns, rows, *along, allowed, 0.0)
    if of_func is None or not of_func <= LARGEST_SHARE * settings.atol:
        return False
    if not (_explains_look(check, analytical, columns, rows) and _explains_eps(check, analytical, columns, rows)):
        return False
    rounding = sum_rounding(compression.pattern.most_in_column, problem.unit_roundoff)
    count = pattern.row_group_count
    alone = pattern.grad_outputs[count:], gradients[count:]
    sizes = [
        native.explained_sums(analytical, rows, columns, *products, negligible, rounding)
        for products in (check.products, alone)
    ]
    if None in sizes:
        return False
    # A missing entry that was added to a larger one is multiplied by the difference of two random numbers.
    chance = (4 * (1 - settings.confidence)) ** (1 / sketch_size(settings.confidence))
    of_backward = max(size for size in sizes if size is not None) / chance
    if not of_backward <= settings.atol:
        return False
    watched, count = compression.pattern.is_numerical, len(differences.derivatives)
    check.certificates += [
        numerical_certificate(count, watched, 2 * of_func),
        analytical_certificate((*GRAD_OUTPUT_KINDS, DENSE), of_backward),
    ]
    return True
