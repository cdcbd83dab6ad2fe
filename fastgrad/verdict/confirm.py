"""Measures located entries one by one, at eps and at other steps, and applies the elementwise tolerance rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fastgrad.core.precision import excess, modulus
from fastgrad.engines.blocks import row_parts
from fastgrad.engines.compressed import Compression
from fastgrad.problem.coordinates import Block, block_with
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Pair, Plan
from fastgrad.report.failure import Comparison, Entry, Extent, Failure, Mode, Part
from fastgrad.report.number_text import count
from fastgrad.report.settings import Settings
from fastgrad.verdict.comparison import (
    MAX_WORST,
    Findings,
    PairComparison,
    Suspects,
    entry_count,
    groups_without_a_common_row,
    places_along,
)
from fastgrad.verdict.locate import locate
from fastgrad.verdict.remeasure import CLEAR_DIFFERENCE, RemeasuredEntry, not_finite, worst_remeasured

UNSPECIFIED = "with masked=True, a gradient must be zero at elements that its sparse input does not specify"
"""The detail of a failure at an element that its sparse input does not specify."""

WORST = 64
"""Number of entries, the worst ones, that are re-measured before all others."""

MAX_GROUPS = 64
"""Largest number of groups of elements that are re-measured before the results are examined."""


class Found(NamedTuple):
    """A located entry: coordinates, its contribution to J_num - J_ana, and its report if it is wrong.

    unresolved: the possible error of an entry that agrees within the error of its derivative, but not within the
    tolerance; otherwise zero.
    """

    output: Block
    input: Block
    part: Part
    mode: Mode
    row: int
    columns: list[int]
    errors: list[float]
    remeasured: RemeasuredEntry | None
    unresolved: float = 0.0

    def along(self, vectors: Tensor) -> Tensor:
        """The entry's contribution to (J_num - J_ana) u in its row: float64, shape (...) for u of shape (..., n)."""
        return vectors[..., self.columns] @ vectors.new_tensor(self.errors)


def entry_in_row(
    problem: Problem,
    settings: Settings,
    row: int,
    gradient: Tensor,
    u: Tensor,
    eps: float,
    value: float,
    known: Sequence[Found] = (),
) -> Found:
    """The entry that contributes most to the difference between one output's derivative along u and gradient . u.

    Parameters
    ----------
    gradient
        The analytical row: float64, shape (n,).
    value
        This difference, without the contributions of known entries.
    known
        Entries of this row that were found before.
    """

    def residual(vector: Tensor) -> float:
        analytical = 0.0
        for part, step, weight in problem.parts_of(vector):
            h = eps * step / weight
            analytical += (problem.realized_width(part * h, 1.0) @ gradient).item() / (2 * h)
        explained = sum(entry.along(vector).item() for entry in known)
        return difference_along(problem, vector, eps, row) - analytical - explained

    return entry_at(problem, settings, row, locate(residual, u, value), gradient)


def difference_along(problem: Problem, vector: Tensor, eps: float, row: int) -> float:
    """One output's derivative along a vector (float64, shape (n,)), by a central difference.

    If inputs have different steps or weights, this takes one difference for each of them.
    """
    sides = problem.both_sides(vector, eps)
    return sum(((plus[row].item() - minus[row].item()) / (2 * h) for plus, minus, h in sides), 0.0)


def entry_at(
    problem: Problem,
    settings: Settings,
    row: int,
    column: int,
    gradient: Tensor | None = None,
    trusts_eps: bool = True,
) -> Found:
    """Measures the entry at (row, column) separately, at eps and at other steps, and tests it by the elementwise rule.

    gradient: the analytical row, shape (n,), of an entry of reverse mode; None: the entry is one of forward mode.
    trusts_eps: whether an entry that agrees at eps is not measured at other steps.
    """
    output, block = block_with(problem.outputs, row), block_with(problem.inputs, column)
    # A complex element has two coordinates. In reverse mode, those of an input make one complex entry, and those of an
    # output are two parts that are checked separately. In forward mode, inputs and outputs change roles.
    mode: Mode = "forward" if gradient is None else "reverse"
    if gradient is None:
        part, rows, columns = block.part_at(column), element_coordinates(output, row), [column]
        tangents, _ = problem.tangent_columns(column, 1)
        analytical = [tangents[0, i].item() for i in rows]
    else:
        part, rows, columns = output.part_at(row), [row], element_coordinates(block, column)
        analytical = [gradient[j].item() for j in columns]
    differences = [problem.difference_columns(j, 1, settings.eps, True)[0] for j in columns]
    numerical = [difference[i].item() for difference in differences for i in rows]
    wanted, got = (complex(*values) for values in (numerical, analytical))
    own, remeasured, unresolved = settings.of(block.index), None, 0.0
    found, expected = (torch.tensor([value], dtype=torch.complex128, device=problem.device) for value in (got, wanted))
    if not (trusts_eps and torch.isclose(found, expected, rtol=own.rtol, atol=own.atol)):
        inputs, outputs = (torch.tensor([places], device=problem.device) for places in (columns, rows))
        suspects = Suspects(output, block, own, inputs, outputs, found, expected)
        remeasured = not_finite(problem, True, suspects)
        if remeasured is None:
            remeasured, _, unresolved = worst_remeasured(problem, True, settings.eps, [suspects])
    errors = [number - value for number, value in zip(numerical, analytical, strict=True)]
    return Found(output, block, part, mode, rows[0], columns, errors, remeasured, unresolved)


def element_coordinates(block: Block, coordinate: int) -> list[int]:
    """All coordinates of the element that a coordinate belongs to."""
    first = coordinate - (coordinate - block.first) % block.width
    return list(range(first, first + block.width))


def located_failure(found: list[Found]) -> Failure:
    """The failure of the first confirmed entry; its comparison counts all such entries of the same pair and part."""
    head = found[0]
    same = [entry for entry in found if (entry.output, entry.input, entry.part) == (head.output, head.input, head.part)]
    remeasured_entries = [entry.remeasured for entry in same if entry.remeasured is not None]
    worst = max(remeasured_entries, key=lambda remeasured: _excess(remeasured.entry))
    pairs = [(remeasured.entry.analytical, remeasured.entry.numerical) for remeasured in remeasured_entries]
    finite = [(modulus(a - n), modulus(n)) for a, n in pairs if math.isfinite(modulus(a - n))]
    product = sum((complex(a) * complex(n).conjugate() for a, n in pairs), 0j)
    wrong = sorted((remeasured.entry for remeasured in remeasured_entries), key=_excess, reverse=True)
    comparison = Comparison(
        entries=entry_count(head.output, head.input),
        mismatches=len(same),
        worst=worst.entry,
        largest_absolute=max((difference for difference, _ in finite), default=0.0),
        largest_relative=max((difference / size for difference, size in finite if size), default=0.0),
        sum_analytical=sum(modulus(a) * modulus(a) for a, _ in pairs),
        sum_numerical=sum(modulus(n) * modulus(n) for _, n in pairs),
        sum_product=product,
        exhaustive=False,
        worst_entries=tuple(wrong[:MAX_WORST]),
        extent=_extent(wrong, head.output, head.input),
    )
    return _mismatch(head.output, head.input, head.part, head.mode, comparison, worst)


def _mismatch(
    output: Block, block: Block, part: Part, mode: Mode, comparison: Comparison, worst: RemeasuredEntry
) -> Failure:
    """The failure of a comparison, with what re-measuring showed for its worst entry."""
    return Failure.at(
        "mismatch",
        output,
        block,
        part=part,
        mode=mode,
        comparison=comparison,
        detail=worst.detail,
        numerical_issue=worst.numerical_issue,
        convergence=worst.convergence,
    )


def located_pair(failure: Failure, comparison: Comparison) -> Pair:
    """The `Pair` of a failure that was found from single entries."""
    places = failure.output, failure.input, failure.output_position, failure.input_position
    known = cast("tuple[int, int, int, int]", places)  # a mismatch has all four numbers
    counts = comparison.entries, comparison.mismatches
    largest = comparison.largest_absolute, comparison.largest_relative
    return Pair(
        *known, failure.part, failure.mode, *counts, False, *largest, comparison.on_pattern, comparison.exhaustive
    )


def _extent(entries: list[Entry], output: Block, input_: Block) -> Extent:
    """The positions of entries."""
    of_outputs, of_inputs = zip(*((entry.output_index, entry.input_index) for entry in entries), strict=True)
    return Extent(places_along(output, of_outputs), places_along(input_, of_inputs))


def _excess(entry: Entry) -> float:
    return excess(entry.difference, entry.allowed)


def _first_confirmed(
    problem: Problem, record_graph: bool, eps: float, suspects: Suspects, groups: Tensor
) -> tuple[RemeasuredEntry | None, Tensor, float]:
    """Re-measures suspected entries until one is wrong.

    Returns the first wrong entry, if any; which entries were re-measured: bool, shape (entries,); and the possible
    error of entries that no step resolves to the tolerance. groups: the number of each entry's group. The elements of a
    group are moved together; an element that looks wrong is then moved separately.
    """
    measured = torch.zeros_like(groups, dtype=torch.bool)
    elements, unresolved, misleads = suspects.input_elements, 0.0, False
    # The worst entries first: a wrong entry is usually among them, and there may be many others.
    for most in (WORST, len(groups)):
        left = (~measured[:most]).nonzero().reshape(-1)
        numbers, which = torch.unique(groups[left], return_inverse=True)
        # Groups are sorted by their worst entry; the first is measured first, then four, then more at a time.
        worst = torch.full_like(numbers, most).scatter_reduce_(0, which, left, "amin")
        in_turn, count = worst.argsort(), 1
        while in_turn.numel():
            chosen = [left[which == number] for number in in_turn[:count]]
            several = any(bool((elements[own] != elements[own[0]]).any()) for own in chosen)
            some = torch.cat(chosen)
            measured[some] = True
            for quickly in (True, False) if count == 1 else (False,):
                measure = partial(
                    worst_remeasured, problem, record_graph, eps, [suspects.of(own) for own in chosen], quickly
                )
                remeasured, wrong, off = measure()
                unresolved = max(unresolved, off)
                misleads |= remeasured is not None and remeasured.eps_misleads
                if remeasured is not None and several:
                    suspected = suspects.of(some[wrong])
                    others = (remeasured.entry, *remeasured.others)
                    remeasured, alone, off = _first_confirmed(
                        problem, record_graph, eps, suspected, suspected.input_elements
                    )
                    unresolved = max(unresolved, off)
                    if remeasured is not None:
                        known = {suspected.input.index_at(int(place)) for place in suspected.inputs[alone, 0]}
                        others = tuple(entry for entry in others if entry.input_index not in known)
                        remeasured = remeasured._replace(others=remeasured.others + others)
                    elif not bool(measure()[1].any()):
                        problem.irreproducible.append("at steps of several inputs")
                if remeasured is not None:
                    return remeasured._replace(eps_misleads=misleads), measured, unresolved
                misleads = True
                if not bool(wrong.any()):
                    break  # nothing looked wrong, so all steps were already taken
            in_turn, count = in_turn[count:], min(MAX_GROUPS, count * 4)
    return None, measured, unresolved


def _farthest_confirmed(
    problem: Problem, record_graph: bool, eps: float, suspects: Suspects, measured: Tensor
) -> RemeasuredEntry | None:
    """The suspected entry with the largest difference, if it is wrong and its derivative converges.

    Rounding may hide small derivatives of an output, but not a large one. measured: which entries were re-measured;
    this entry is added.
    """
    farthest = (suspects.analytical - suspects.numerical).abs().argmax().reshape(1)
    if bool(measured[farthest]):
        return None
    remeasured, _, _ = worst_remeasured(problem, record_graph, eps, [suspects.of(farthest)])
    if remeasured is None or remeasured.numerical_issue is not None:
        return None
    measured[farthest] = True
    return remeasured


def entries_failure(
    problem: Problem, settings: Settings, rows: Tensor, columns: Tensor, analytical: Tensor, numerical: Tensor
) -> tuple[Failure | None, float]:
    """The failure if a real entry that differs at eps is wrong after re-measuring, and the unresolved error.

    Parameters
    ----------
    rows, columns
        Coordinates of the entries: int64, shape (entries,). Columns that share none of these rows are moved together.
    analytical, numerical
        float64, shape (entries,).
    """
    unresolved = 0.0
    groups = groups_without_a_common_row(columns, rows, columns)
    for output, block in itertools.product(problem.outputs, problem.inputs):
        own = (columns >= block.first) & (columns < block.end) & (rows >= output.first) & (rows < output.end)
        if not bool(own.any()):
            continue
        got, wanted = (one[own].to(torch.complex128) for one in (analytical, numerical))
        places = columns[own].unsqueeze(1), rows[own].unsqueeze(1)
        suspects = Suspects(output, block, settings.of(block.index), *places, got, wanted)
        remeasured, _, off = _first_confirmed(problem, True, settings.eps, suspects, groups[own])
        unresolved = max(unresolved, off)
        if remeasured is not None:
            return located_failure([Found(output, block, "all", "reverse", 0, [], [], remeasured)]), unresolved
    return None, unresolved


def _worst_remeasured(
    problem: Problem, plan: Plan, pair: PairComparison, suspects: Suspects, settings: Settings, findings: Findings
) -> tuple[RemeasuredEntry | None, tuple[Entry, ...]]:
    """An entry that differs at eps and also after re-measuring, if any; and the worst entries."""
    groups = pair.groups(suspects)
    remeasured = not_finite(problem, plan.record_graph, suspects)
    measured = torch.zeros_like(groups, dtype=torch.bool)
    if remeasured is None:
        remeasured, measured, unresolved = _first_confirmed(problem, plan.record_graph, settings.eps, suspects, groups)
        if unresolved:
            findings.note_undecided(unresolved)
        if remeasured is not None and remeasured.numerical_issue == "not converged":
            remeasured = _farthest_confirmed(problem, plan.record_graph, settings.eps, suspects, measured) or remeasured
    if remeasured is None:
        return None, ()
    worst = [remeasured.entry, *sorted(remeasured.others, key=_excess, reverse=True)]
    others = (~measured).nonzero().reshape(-1)[: MAX_WORST + len(worst)].tolist()
    entries = [suspects.entry(which) for which in others]
    named = {(entry.output_index, entry.input_index) for entry in worst}
    worst += [entry for entry in entries if (entry.output_index, entry.input_index) not in named]
    return remeasured, tuple(worst[:MAX_WORST])


def pattern_mismatch(
    problem: Problem,
    plan: Plan,
    compression: Compression,
    analytical: Tensor,
    numerical: Tensor,
    settings: Settings,
    findings: Findings,
    mode: Mode = "reverse",
) -> Failure | None:
    """The `mismatch_failure` of the first pair of output and input, in torch's order, that has one.

    analytical, numerical: the entries in the pattern, float64, shape (nnz,). Both coordinates of a complex element have
    entries at the same places.
    """
    for output, block, part in _pairs(problem, mode):
        if compression.leaves_out_pair(output, block):
            continue
        within = compression.entries_of(output)
        rows, columns = compression.rows[within] - output.first, compression.columns[within] - block.first
        chosen = (columns >= 0) & (columns < block.size)
        if part != "all":
            chosen &= (rows if mode == "reverse" else columns) % 2 == int(part == "imaginary")
        entries = chosen.nonzero().reshape(-1)
        width = block.width
        if mode == "forward":
            width = output.width
            if output.is_complex:  # the two rows of an element come one after the other
                elements = rows[entries] // 2 * block.size + columns[entries]
                entries = entries[elements.argsort(stable=True)]
        first = entries[::width]
        places = rows[first] // output.width, columns[first] // block.width
        pair = PairComparison(output, block, settings.of(block.index), mode, group_of=compression.column_groups_of)
        along = places if mode == "reverse" else reversed(places)
        pair.add_entries(analytical[within][entries], numerical[within][entries], *along)
        failure = mismatch_failure(problem, plan, pair, part, settings, findings)
        if failure is not None:
            return failure
    return None


def _pairs(problem: Problem, mode: Mode) -> Iterator[tuple[Block, Block, Part]]:
    """Yields all pairs of an output and an input, in torch's order, with the part of the side that has parts."""
    if mode == "reverse":
        for (output, part), block in itertools.product(row_parts(problem.outputs), problem.inputs):
            yield output, block, part
        return
    parts = row_parts(problem.inputs)
    for real, output in itertools.product((False, True), problem.outputs):
        yield from ((output, block, part) for block, part in parts if (part == "real") == real)


def _pair_mismatch(
    problem: Problem,
    pair: PairComparison,
    part: Part,
    remeasured: RemeasuredEntry | None = None,
    worst: tuple[Entry, ...] = (),
) -> Failure:
    """The failure of a pair, with its worst entry: a re-measured one, or one that a sparse input does not specify.

    remeasured, worst: the results of `_worst_remeasured`, if any.
    """
    unspecified = [RemeasuredEntry(entry, UNSPECIFIED) for entry in pair.unspecified]
    found = unspecified if remeasured is None else [remeasured, *unspecified]
    first = max(found, key=lambda one: _excess(one.entry))
    unclear = pair.mismatches - len(unspecified)
    if remeasured is not None:
        unclear -= 1 + len(remeasured.others)
        if not remeasured.eps_misleads:
            noise, rounding = CLEAR_DIFFERENCE * remeasured.noise, problem.unit_roundoff / pair.tolerances.eps
            unclear = min(0 if remeasured.numerical_issue else pair.within(noise, rounding), unclear)
    if unspecified:
        worst = tuple(sorted([*worst, *pair.unspecified], key=_excess, reverse=True)[:MAX_WORST])
    return _mismatch(pair.output, pair.input, part, pair.mode, pair.result(first.entry, worst, unclear), first)


def unspecified_failure(problem: Problem, settings: Settings, vector: Tensor) -> Failure | None:
    """The failure of a row whose gradient is nonzero at an element that its sparse input does not specify.

    Of two halves of the outputs, the one with the larger gradient at such elements is halved again. None if the
    gradient of the last output is within its tolerance.

    vector: a grad_output with such a gradient, shape (m,); no component is zero.
    """
    low, high = 0, problem.m
    halves = torch.zeros(2, problem.m, dtype=torch.float64, device=problem.device)
    while True:
        middle = (low + high + 1) // 2
        for half, rows in enumerate((slice(low, middle), slice(middle, high))):
            halves[half] = 0.0
            halves[half, rows] = vector[rows] if high - low > 1 else 1.0
        found = problem.vjps_of(halves, [-1, -1])[1].unspecified
        if not found:
            return None
        number, entry = max(found.items(), key=lambda item: excess(modulus(item[1].value), 1.0))
        if high - low <= 1:
            break
        low, high = (middle, high) if entry.row else (low, middle)
    output, block = block_with(problem.outputs, low), problem.inputs[number]
    element = (low - output.first) // output.width
    pair = PairComparison(output, block, settings.of(block.index))
    pair.add_unspecified(element, entry.element, entry.value)
    return _pair_mismatch(problem, pair, output.part_at(low)) if pair.mismatches else None


def mismatch_failure(
    problem: Problem, plan: Plan, pair: PairComparison, part: Part, settings: Settings, findings: Findings
) -> Failure | None:
    """The failure of a pair, if an entry that differs at eps also differs after re-measuring."""
    if not pair.mismatches:
        findings.add_pair(pair.pair(part, agrees=True))
        return None
    remeasured: RemeasuredEntry | None = None
    worst: tuple[Entry, ...] = ()
    if pair.failing:
        remeasured, worst = _worst_remeasured(problem, plan, pair, pair.suspects(part), settings, findings)
        if remeasured is None and not pair.unspecified:
            differ, agree = ("differs", "agrees") if pair.mismatches == 1 else ("differ", "agree")
            findings.notes.append(
                f"{pair.mismatches} of {count(pair.entries, 'entry')} of output {pair.output.index} with respect to "
                f"input {pair.input.index} {differ} at eps={settings.of(pair.input.index).eps:g} and {agree} when "
                "measured again with other steps"
            )
            findings.add_pair(pair.pair(part, agrees=True))
            return None
    findings.add_pair(pair.pair(part, agrees=False))
    findings.sample = pair.sample()
    return _pair_mismatch(problem, pair, part, remeasured, worst)
