"""Causes from the positions of wrong entries: a slice, a boundary, a kernel's last tile, a region of values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastgrad.core.tensors import element_index
from fastgrad.diagnosis.wording import Side
from fastgrad.report.evidence import Cause, CauseName, Sample
from fastgrad.report.settings import Tolerances

CHANCE = 0.05
"""A rule for the positions of wrong entries is named if it fits by chance with at most this probability."""

CHANCE_IN_SAMPLE = 0.35
"""The largest such probability for a rule that is named only if the entries outside of a sample confirm it."""

CHANCE_OF_HALO = 0.35
"""The largest such probability for a rule that names the ends along a dimension along which elements depend on each
other: mistakes are common there."""

_HALO = "; check the padding or halo"

JUMP = 30.0
"""Least ratio of the errors in a region to those outside it; both are relative to the allowed error."""

COMMON_THRESHOLDS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, -3.0, 6.0)
"""Common thresholds in code, the most likely first."""

MIN_BLOCK = 4
"""Smallest block size of kernels that is considered; block sizes are powers of two."""


IN_SAMPLE = 0.6
"""The confidence of a rule that was derived from a sample is multiplied by this, unless other entries confirm it."""


@dataclass(frozen=True)
class Elements:
    """Elements of the output or the input: their numbers in C order and their values at x, shape (elements,)."""

    shape: tuple[int, ...]
    elements: Tensor
    values: Tensor | None

    @property
    def index(self) -> Tensor:
        """Their multi-indices: int64, shape (elements, dimensions)."""
        return torch.stack(element_index(self.elements, self.shape), 1)


Covers = Callable[[Elements], Tensor]
"""Tells which elements are wrong according to a rule: bool, shape (elements,)."""

Numbers = Callable[[Elements], Tensor]
"""A number of each element, for example its value or an index: shape (elements,)."""


@dataclass(frozen=True)
class Rule:
    """A rule for the positions of wrong entries, as a cause.

    sampled: the numbers of the elements from which the rule was derived, if they are a sample; otherwise None.
    chance: the probability that it fits by chance. edges: which of the covered elements are next to elements that are
    not covered, for each boundary that the rule names.
    """

    cause: Cause
    side: Side
    covers: Covers
    sampled: Tensor | None
    chance: float
    edges: tuple[Covers, ...] = ()


@dataclass(frozen=True)
class _JudgedElements(Elements):
    """The elements of the output or the input that have nonzero entries, and which of them have wrong ones (`bad`).

    If an element is wrong at which func has no nonzero entries, any element could be wrong, so all are included.

    excess: for each element, the largest ratio of an error to the allowed error. mixing: as from `_mixing`. share: the
    share of wrong entries among the nonzero entries of bad elements. entries: number of wrong entries, and of all
    nonzero entries. is_complete: whether all entries were examined, not a sample.
    """

    side: Side
    name: str
    bad: Tensor
    excess: Tensor
    mixing: frozenset[int] | None
    share: float
    entries: tuple[int, int]
    is_complete: bool

    def rule(
        self,
        name: CauseName,
        where: str,
        tried: int,
        base: float,
        covers: Covers,
        edges: tuple[Covers, ...] = (),
        max_chance: float = CHANCE,
    ) -> Rule | None:
        """A rule for positions; None unless it covers all wrong and no right elements, or if chance may explain it.

        where: completes "derivatives are wrong only". tried: the number of rules of this kind; max_chance: the largest
        probability that one of them fits by chance, with which the rule is still returned if all elements are known;
        base: its confidence if the probability is zero.
        """
        bad, total = int(self.bad.sum()), self.bad.numel()
        chance = tried * _chance(bad, total)
        if not torch.equal(covers(self), self.bad) or chance > (max_chance if self.is_complete else CHANCE_IN_SAMPLE):
            return None
        wrong = {1: "the only element", 2: "both elements"}.get(bad, f"all {bad:,} elements")
        sampled = "" if self.is_complete else " in the sample"
        others = "not of the other one" if total - bad == 1 else f"of none of the {total - bad:,} others"
        measure = f"true of {wrong} with wrong entries, and {others}{sampled}"
        # If each input element belongs to one output element, prefer the rule for the input.
        confidence = base * (1 - chance) - (0.0 if self.side == "input" else 0.01)
        cause = Cause(name, f"derivatives are wrong only {where}", measure, confidence)
        return Rule(cause, self.side, covers, None if self.is_complete else self.elements, chance, edges)


def _chance(chosen: int, total: int) -> float:
    """The probability that `chosen` random elements out of `total` are exactly the given ones.

    math.comb would be exact, but takes seconds for a million elements.
    """
    return math.exp(math.lgamma(chosen + 1) + math.lgamma(total - chosen + 1) - math.lgamma(total + 1))


def _places(sample: Sample, side: Side, name: str, settings: Tolerances) -> _JudgedElements | None:
    elements, values, shape = (
        (sample.inputs, sample.input_values, sample.input_shape)
        if side == "input"
        else (sample.outputs, sample.output_values, sample.output_shape)
    )
    nonzero = (sample.analytical != 0) | (sample.numerical != 0)
    unused = ~torch.isin(elements[sample.failing], elements[sample.numerical != 0])
    counted = torch.ones_like(nonzero) if bool(unused.any()) else nonzero
    unique, number = torch.unique(elements[counted], return_inverse=True)
    bad = torch.zeros(unique.numel(), dtype=torch.bool, device="cpu")
    failing = sample.failing[counted]
    bad[number[failing]] = True
    entries = int(failing.sum()), int(nonzero.sum())
    of_bad = int((bad[number] & nonzero[counted]).sum())
    if not shape or unique.numel() < 2 or not bool(bad.any()) or bool(bad.all()):
        return None
    if entries[0] * 2 <= of_bad and int(bad.sum()) < 3:
        return None  # single entries are wrong, not the values at these places
    if values is not None:
        values = values.new_empty(unique.numel()).index_copy(0, number, values[counted])
    error = (sample.analytical - sample.numerical).abs() / settings.allowed(sample.numerical)
    of_entries = error.nan_to_num(math.inf)[counted]
    excess = of_entries.new_zeros(unique.numel()).scatter_reduce(0, number, of_entries, "amax")
    mixing, share = _mixing(sample, nonzero), entries[0] / of_bad
    return _JudgedElements(shape, unique, values, side, name, bad, excess, mixing, share, entries, sample.complete)


def _mixing(sample: Sample, nonzero: Tensor) -> frozenset[int] | None:
    """Dimensions along which an output depends on inputs at another index; None if the numbers of dimensions differ."""
    if len(sample.input_shape) != len(sample.output_shape):
        return None
    ins = element_index(sample.inputs[nonzero], sample.input_shape)
    outs = element_index(sample.outputs[nonzero], sample.output_shape)
    return frozenset(dim for dim, (i, o) in enumerate(zip(ins, outs, strict=True)) if bool((i != o).any()))


def place_causes(
    sample: Sample, names: tuple[str, str], settings: Tolerances, tested: Iterable[tuple[str, bool]] = ()
) -> list[Cause]:
    """The causes of `place_rules`.

    tested: texts of causes from a sample, and whether other entries confirm them; those that they contradict are left
    out. The text of a cause from a sample that was not tested says that it is about the sample.
    """
    is_right = dict(tested)
    found = []
    for rule in place_rules(sample, names, settings):
        cause = rule.cause
        if rule.sampled is not None and cause.text in is_right:
            if not is_right[cause.text]:
                continue
            cause = replace(
                cause, measure=f"{cause.measure}; sums of the other entries with random weights confirm this"
            )
        elif rule.sampled is not None:
            if rule.chance > CHANCE:
                continue
            text = f"in a sample of {sample.failing.numel():,} entries, {cause.text}"
            cause = replace(cause, text=text, confidence=IN_SAMPLE * cause.confidence)
        found.append(cause)
    return found


def place_rules(sample: Sample, names: tuple[str, str], settings: Tolerances) -> list[Rule]:
    """Rules for the positions of wrong entries, in the output and the input."""
    sides = _places(sample, "input", names[0], settings), _places(sample, "output", names[1], settings)
    most = max((places.share for places in sides if places is not None), default=0.0)
    found: list[Rule | None] = []
    for places in sides:
        # If few entries of the wrong elements on this side are wrong, but most on the other side, this side is not the
        # reason.
        if places is not None and places.share >= most / 2:
            found += (
                _element(places),
                *_tails(places),
                _ends(places),
                _slice(places),
                _triangle(places),
                _region(places),
            )
    return [rule for rule in found if rule is not None]


def _element(places: _JudgedElements) -> Rule | None:
    """The rule if all entries of a single element are wrong, and no others; None unless chance is unlikely."""
    wrong, total = places.entries
    if int(places.bad.sum()) != 1 or wrong < 3 or places.share < 1:
        return None
    element = places.elements[places.bad]
    spot = ", ".join(map(str, places.index[places.bad][0].tolist()))
    chance = places.bad.numel() * _chance(wrong, total)
    sampled = "" if places.is_complete else "sampled "
    measure = f"all {wrong:,} {sampled}entries of this element are wrong, and none of the other {total - wrong:,}"
    if chance > CHANCE:
        return None
    cause = Cause("slice", f"derivatives are wrong only in {places.name}[{spot}]", measure, 0.95 * (1 - chance))
    sample = None if places.is_complete else places.elements
    return Rule(cause, places.side, lambda some: some.elements == element, sample, chance)


def _triangle(places: _JudgedElements) -> Rule | None:
    """A rule for elements that are wrong only above, below, on or off the diagonal of the last two dimensions."""
    if places.index.shape[1] < 2:
        return None
    row, column = places.index[:, -2], places.index[:, -1]
    if int(row.max()) != int(column.max()) or int(row.max()) < 2:
        return None
    end = f"the diagonal of the last two dimensions of {places.name}; look for a mask, tril() or triu()"
    for where, sign in (("above", "<"), ("below", ">"), ("on", "=="), ("off", "!=")):
        covers = _where(lambda some: some.index[:, -2] - some.index[:, -1], sign, 0)
        rule = places.rule("triangle", f"{where} {end}", 4, 0.93, covers)
        if rule is not None:
            return rule
    return None


def _tails(places: _JudgedElements) -> list[Rule | None]:
    """Rules for elements that are wrong from a multiple of a block size on: along some dimensions, or in memory.

    There is at most one if all elements are known; a sample may fit several block sizes.
    """
    index, bad = places.index, places.bad
    total = math.prod(places.shape)
    bounds = [(f"dimension {dim} of {places.name}", _along(dim), size) for dim, size in enumerate(places.shape)]
    if len(places.shape) > 1:
        bounds.append((f"the elements of {places.name} in memory", lambda some: some.elements, total))
    for what, number, size in bounds:
        along = number(places)
        blocks = _tail_blocks(int(along[~bad].max()), int(along[bad].min()), size)
        rules = []
        for start, block in blocks.items():
            where = f"in the last tile: from index {start}, a multiple of {block}, to the end of {what} (size {size})"
            base, covers, edge = 0.94 if block >= 8 else 0.88, _where(number, ">=", start), _where(number, "==", start)
            rules.append(places.rule("last tile", where, 2, base, covers, (edge,)))
        if rules:
            return rules[:1] if places.is_complete else rules
    # The elements are right in a box that begins at the first element, and nowhere else.
    right = index[~bad]
    ends = right.amax(0)
    if bool(right.amin(0).any()) or bool((index[bad] <= ends).all(1).any()):
        return []
    cut = {dim: int(ends[dim]) + 1 for dim, size in enumerate(places.shape) if int(ends[dim]) + 1 < size}
    found = [_tail_blocks(start - 1, start, places.shape[dim]).get(start) for dim, start in cut.items()]
    if len(found) < 2 or None in found:
        return []
    multiples = " and ".join(str(block) for block in sorted({block for block in found if block}))
    limits = f"the last multiples of {multiples} along the dimensions of {places.name}"
    edges = tuple(_where(_along(dim), "==", start) for dim, start in cut.items())
    where = f"in the last tiles: they are right up to {limits}"
    return [places.rule("last tile", where, 2, 0.93, lambda some: (some.index > ends).any(1), edges)]


def _along(dim: int) -> Numbers:
    return lambda some: some.index[:, dim]


def _tail_blocks(last_right: int, first_wrong: int, size: int) -> dict[int, int]:
    """The last multiples of block sizes that separate right from wrong indices, each with the largest such size."""
    found: dict[int, int] = {}
    block = 1 << max(0, (size - 1).bit_length())
    while block >= MIN_BLOCK:
        start = size - size % block
        if 0 < start < size and last_right < start <= first_wrong:
            found.setdefault(start, block)
        block //= 2
    return found


def _ends(places: _JudgedElements) -> Rule | None:
    """A rule for elements that are wrong only at the first or last indices along a dimension, or at all borders."""
    index, bad = places.index, places.bad
    for dim, size in enumerate(places.shape):
        right, wrong = index[~bad][:, dim], index[bad][:, dim]
        low, high = int(right.min()), int(right.max())
        inside = (wrong >= low) & (wrong <= high)
        most = max(1, size // 3)
        first, last = low, size - 1 - high
        if size < 3 or bool(inside.any()) or first > most or last > most or not first + last:
            continue
        if first and last and not (bool((wrong < low).any()) and bool((wrong > high).any())):
            continue  # the elements at one of the ends have no entries
        ends = " and ".join(
            f"the {which} {'position' if count == 1 else f'{count} positions'}"
            for which, count in (("first", first), ("last", last))
            if count
        )
        hint, most_chance = (_HALO, CHANCE_OF_HALO) if dim in (places.mixing or ()) else ("", CHANCE)
        if first and last:
            base = 0.93
        elif first + last > 1 or len(places.shape) == 1:
            base = 0.9
        else:  # a single wrong row may be the first or last one by chance
            base = 0.91 if (dim >= 2 if places.mixing is None else dim in places.mixing) else 0.7
        where = f"at {ends} along dimension {dim} of {places.name}{hint}"
        return places.rule("boundary", where, 2, base, *_outside([(dim, low, high)], places.shape), most_chance)
    right = index[~bad]
    if right.numel() and len(places.shape) > 1:
        low_corner, high_corner = right.amin(0), right.amax(0)
        within = ((index[bad] >= low_corner) & (index[bad] <= high_corner)).all(1)
        sizes = torch.tensor(places.shape, device="cpu")
        margins = torch.maximum(low_corner, sizes - 1 - high_corner)
        if not bool(within.any()) and int((margins > 0).sum()) > 1 and bool((margins <= sizes // 3).all()):
            where = f"along the borders of {places.name}{_HALO if places.mixing else ''}"
            ranges = list(zip(range(len(places.shape)), low_corner.tolist(), high_corner.tolist(), strict=True))
            return places.rule("boundary", where, 2, 0.93, *_outside(ranges, places.shape))
    return None


def _outside(inside: list[tuple[int, int, int]], shape: tuple[int, ...]) -> tuple[Covers, tuple[Covers, ...]]:
    """The elements outside of some ranges, and the edges of such a rule; inside: dimension, first and last index."""
    bounds = [(dim, index) for dim, low, high in inside for index in (low - 1, high + 1) if 0 <= index < shape[dim]]
    dims, low, high = (torch.tensor(numbers, device="cpu") for numbers in zip(*inside, strict=True))
    edges = tuple(_where(_along(dim), "==", index) for dim, index in bounds)
    return lambda some: ((some.index[:, dims] < low) | (some.index[:, dims] > high)).any(1), edges


def _slice(places: _JudgedElements) -> Rule | None:
    """A rule for elements that are wrong at only one index along a dimension, or along several dimensions."""
    index, bad = places.index, places.bad
    if int(bad.sum()) < 2 and places.bad.numel() < 2 * sum(places.shape):
        return None
    wrong = index[bad]
    is_fixed = (wrong == wrong[0]).all(0).tolist()
    fixed = [dim for dim, size in enumerate(places.shape) if size > 1 and is_fixed[dim]]
    if not fixed or len(fixed) == len(places.shape):
        return None
    rules = sum(torch.unique(index[:, dim]).numel() for dim in range(len(places.shape)))
    for count in range(1, len(fixed) + 1):
        for dims in map(list, itertools.combinations(fixed, count)):
            covers = _at(dims, wrong[0, dims])
            if bool((covers(places) & ~bad).any()):
                continue
            spot = ", ".join(str(int(wrong[0, dim])) if dim in dims else ":" for dim in range(len(places.shape)))
            return places.rule("slice", f"in {places.name}[{spot}]", rules**count, 0.9, covers)
    return None


def _at(dims: list[int], index: Tensor) -> Covers:
    return lambda some: (some.index[:, dims] == index).all(1)


def _region(places: _JudgedElements) -> Rule | None:
    """A rule for elements that are wrong only if their values are on one side of a threshold, or between two."""
    values, bad = places.values, places.bad
    if values is None or values.is_complex() or not bool(values.isfinite().all()):
        return None
    if not float(places.excess[~bad].max()) <= min(0.1, float(places.excess[bad].min()) / JUMP):
        return None  # no gap between right and wrong elements: the formula itself is wrong
    exactly = _single_value(places)
    if exactly is not None:
        return exactly
    kinds: tuple[tuple[str, Numbers], ...] = (
        (places.name, _values),
        (f"|{places.name}|", lambda some: _values(some).abs()),
    )
    for what, number in kinds:
        right, wrong = number(places)[~bad], number(places)[bad]
        if float(wrong.max()) < float(right.min()):
            last_wrong, first_right, sign = float(wrong.max()), float(right.min()), "<"
        elif float(wrong.min()) > float(right.max()):
            last_wrong, first_right, sign = float(wrong.min()), float(right.max()), ">"
        else:
            continue
        threshold, natural = _threshold(*sorted((last_wrong, first_right)))
        if wrong.numel() == 1 and not natural:
            return None  # a single wrong element often has the largest or smallest value by chance
        base = 0.92 if natural else 0.89
        sign += "=" * (threshold == last_wrong)
        covers = _where(number, sign, threshold)
        edge = _last_of(covers, number, sign[0])
        where = f"where {what} {sign} {threshold:.4g}"
        return places.rule("region", where, 2 if natural else 4, base, covers, (edge,))
    right, wrong = values[~bad], values[bad]
    low, high = float(wrong.min()), float(wrong.max())
    if bool((right < low).any()) and bool((right > high).any()):
        begin, _ = _threshold(float(right[right < low].max()), low)
        end, _ = _threshold(high, float(right[right > high].min()))
        signs = "<=" if begin == low else "<", "<=" if end == high else "<"
        where = f"where {begin:.4g} {signs[0]} {places.name} {signs[1]} {end:.4g}"
        first, last = _where(_values, signs[0].replace("<", ">"), begin), _where(_values, signs[1], end)
        edges = _last_of(first, _values, ">"), _last_of(last, _values, "<")
        tried = places.bad.numel() ** 2
        return places.rule("region", where, tried, 0.85, lambda some: first(some) & last(some), edges)
    return None


def _last_of(covers: Covers, number: Numbers, sign: str) -> Covers:
    """The covered elements whose numbers are nearest to the threshold of a region."""

    def edge(some: Elements) -> Tensor:
        numbers, covered = number(some), covers(some)
        return numbers == (numbers[covered].max() if sign == "<" else numbers[covered].min())

    return edge


def _values(some: Elements) -> Tensor:
    assert some.values is not None
    return some.values


def _where(number: Numbers, sign: str, threshold: float) -> Covers:
    """Tells which numbers are on one side of a threshold or equal to it, as `sign` says."""
    compare = {"<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge, "==": torch.eq, "!=": torch.ne}[sign]
    return lambda some: compare(number(some), threshold)


def _single_value(places: _JudgedElements) -> Rule | None:
    """A rule for elements that are wrong only if they have a certain value, for example zero in a mask."""
    wrong = _values(places)[places.bad]
    value = float(wrong[0])
    if wrong.numel() == 1 and value not in COMMON_THRESHOLDS:
        return None
    return places.rule("region", f"where {places.name} is {value + 0.0:.4g}", 2, 0.92, _where(_values, "==", value))


def _threshold(low: float, high: float) -> tuple[float, bool]:
    """A number from `low` to `high`, if possible a round one, and whether it is a common threshold."""
    for natural in COMMON_THRESHOLDS:
        if low <= natural <= high:
            return natural, True
    for digits in range(-3, 12):
        rounded = round((low + high) / 2, digits)
        if low <= rounded <= high:
            return rounded, False
    return (low + high) / 2, False
