"""Causes for right entries at wrong positions, and for missing sums: compares both Jacobians as matrices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fastgrad.diagnosis.chance import MIN_DISTINCT, classes, is_supported
from fastgrad.diagnosis.wording import Side, Wording
from fastgrad.report.evidence import Cause, CauseName, Sample
from fastgrad.report.settings import Tolerances

OUTER = 1e-3
"""Largest ratio of the second to the first singular value of an outer product, which rounding and eps perturb."""

LARGEST_MATRIX = 1 << 18
"""Largest number of entries of a Jacobian that is compared with its rearrangements."""

MAX_SHIFTS = 256

MAX_SCREENED = 256
"""Number of wrong entries that are tried first, to reject most rearrangements."""


def _broadcast_dims(sample: Sample) -> list[int]:
    """The output dimensions along which broadcasting expands the input; none if the shapes do not broadcast."""
    missing = len(sample.output_shape) - len(sample.input_shape)
    padded = (1,) * missing + sample.input_shape
    if missing < 0 or any(own not in (1, size) for own, size in zip(padded, sample.output_shape, strict=True)):
        return []
    return [dim for dim, (own, size) in enumerate(zip(padded, sample.output_shape, strict=True)) if own == 1 < size]


def shared_by(sample: Sample) -> int:
    """Number of outputs per input element, if it is constant and each output depends on one element; otherwise 0."""
    numerical = sample.numerical != 0
    outputs, inputs = sample.outputs[numerical], sample.inputs[numerical]
    return constant_count(inputs) if torch.unique(outputs).numel() == outputs.numel() else 0


def constant_count(elements: Tensor) -> int:
    """How often each of some elements occurs; 0 if this varies, or if there are none."""
    counts = torch.unique(elements, return_counts=True)[1]
    return int(counts[0]) if counts.numel() and bool((counts == counts[0]).all()) else 0


@dataclass(frozen=True)
class _Matrices:
    """Both Jacobians, shape (*output, *input), with NaN for unknown entries; outputs: number of output dimensions.

    size: numbers of output and input elements.
    """

    analytical: Tensor
    numerical: Tensor
    settings: Tolerances
    outputs: int
    size: tuple[int, int]

    @cached_property
    def known(self) -> Tensor:
        """A mask of the known entries."""
        return ~(self.numerical.isnan() | self.analytical.isnan())

    @cached_property
    def wrong(self) -> Tensor:
        """A mask of the known entries that differ."""
        return self.known & ~self._close(self.numerical)

    def flat(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The analytical and the numerical Jacobian, with zeros for unknown entries; which are known, which differ.

        Shape `size`.
        """
        a, n = (matrix.nan_to_num(0.0).reshape(self.size) for matrix in (self.analytical, self.numerical))
        known = self.known.reshape(self.size)
        return a, n, known, known & ~((a - n).abs() <= self.settings.allowed(n))

    def explains(self, rearranged: Tensor, tried: int) -> int:
        """Number of wrong entries that a rearrangement explains; 0 if it contradicts an entry, or may fit by chance.

        tried: the number of rearrangements up to this one.
        """
        some = rearranged[self._some_wrong] - self.analytical[self._some_wrong]
        if bool((some.abs() > self.settings.allowed(rearranged[self._some_wrong])).any()):
            return 0  # the usual case: testing these few entries first takes a hundredth of the time of testing all
        # Nonzero analytical entries are compared before the others, because zeros agree with most rearrangements.
        places, analytical = self._nonzero
        some = rearranged[places]
        known = ~some.isnan()
        if int(known.sum()) < max(2, analytical.numel() // 2):
            return 0
        off = (some - analytical).abs() > self.settings.allowed(some)
        if bool((off & known).any()):
            return 0
        known = ~(rearranged.isnan() | self.analytical.isnan())
        if bool((~self._close(rearranged) & known).any()):
            return 0
        wrong = ~self._close(self.numerical) & known
        nonzero = wrong & ((self.analytical != 0) | (rearranged != 0))
        return int(wrong.sum()) if int(nonzero.sum()) > 1 and self.supports(tried) else 0

    def supports(self, tried: int) -> bool:
        """Whether the known entries are enough to decide between `tried` hypotheses."""
        some = self.known & ((self.analytical != 0) | (self.numerical != 0))
        return is_supported(self.analytical[some], self.wrong[some], tried)

    @cached_property
    def _nonzero(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """The indices of the analytical entries that are known and not zero, and their values."""
        places = (~self.analytical.isnan() & (self.analytical != 0)).nonzero().unbind(1)
        return places, self.analytical[places]

    @cached_property
    def _some_wrong(self) -> tuple[Tensor, ...]:
        return self.wrong.nonzero()[:MAX_SCREENED].unbind(1)

    def _close(self, other: Tensor) -> Tensor:
        return (self.analytical - other).abs() <= self.settings.allowed(other)


def _matrices(sample: Sample, settings: Tolerances) -> _Matrices | None:
    size = math.prod(sample.output_shape), math.prod(sample.input_shape)
    if math.prod(size) > LARGEST_MATRIX:
        return None

    def matrix(values: Tensor) -> Tensor:
        entries = torch.full(size, 0.0 if sample.complete else math.nan, dtype=values.dtype, device="cpu")
        entries[sample.outputs, sample.inputs] = values
        return entries.reshape((*sample.output_shape, *sample.input_shape))

    return _Matrices(matrix(sample.analytical), matrix(sample.numerical), settings, len(sample.output_shape), size)


def structure_causes(sample: Sample, settings: Tolerances, words: Wording) -> Iterator[Cause]:
    """Causes from a comparison of both Jacobians as matrices."""
    matrices = _matrices(sample, settings)
    if matrices is None:
        return
    for explain in (_of_rearrangements, _of_broadcasting, _of_permutations, _of_dimensions, _of_reductions):
        found = list(explain(matrices, sample, words))
        yield from found
        if found:
            return


Rearrangement = tuple[CauseName, str, Tensor]
"""A cause, its text, and the order: the number, in C order, of the element that moves to each place."""


def rearrangements(
    shape: tuple[int, ...], side: Side, words: Wording, most_shifts: int = MAX_SHIFTS
) -> Iterator[Rearrangement]:
    """Rearrangements of one side of a Jacobian: transposed, shifted or reversed."""
    what, name = words.vector(side), words.input if side == "input" else words.output
    dims = range(len(shape))
    numbers = torch.arange(math.prod(shape), device="cpu").view(shape)

    def shown(shift: int, size: int) -> int:
        # Rows of the Jacobian that are shifted by k result from a grad_output that is shifted by -k, and columns from a
        # tangent that is shifted by -k.
        return shift if (side == "input") != words.is_forward or 2 * shift == size else -shift

    for p, q in itertools.combinations(dims, 2):
        if shape[p] == shape[q] > 1:
            text = f"{what} is transposed: dimensions {p} and {q} of {name} are swapped"
            yield "transposed", text, numbers.transpose(p, q).flatten()
    for dim, size in enumerate(shape):
        for shift in _nearest_first(size, most_shifts):
            text = f"{what} is shifted by {shown(shift, size)} along dimension {dim}"
            yield "rolled", text, numbers.roll(shift, dim).flatten()
    if len(shape) > 1:
        for shift in _nearest_first(math.prod(shape), most_shifts):
            text = f"{what} is shifted by {shown(shift, math.prod(shape))} in memory, over all of its elements"
            yield "rolled", text, numbers.flatten().roll(shift)
    for dim, size in enumerate(shape):
        if size > 1:
            yield "permuted", f"{what} is reversed along dimension {dim}", numbers.flip(dim).flatten()
    if len(shape) > 1:
        yield "permuted", f"{what} is reversed along all dimensions", numbers.flatten().flip(0)


def _nearest_first(size: int, most: int) -> Iterable[int]:
    shifts = itertools.chain.from_iterable((k, -k) for k in range(1, size // 2 + 1))
    return itertools.islice((shift for shift in shifts if -shift * 2 != size), most)


def _of_rearrangements(matrices: _Matrices, sample: Sample, words: Wording) -> Iterator[Cause]:
    """The cause if the entries are right, but rearranged."""
    for number, (name, text, rearranged) in enumerate(_rearranged(matrices, sample, words)):
        count = matrices.explains(rearranged, number + 1)
        if count > 1:
            yield Cause(name, text, f"explains all {count} wrong entries", 0.94)
            return


def _rearranged(matrices: _Matrices, sample: Sample, words: Wording) -> Iterator[tuple[CauseName, str, Tensor]]:
    """Yields the numerical Jacobian with other orders of inputs or outputs, then transposed, with name and text."""
    n, outputs = matrices.numerical, matrices.outputs
    flat = n.reshape(matrices.size)
    for name, text, order in rearrangements(sample.input_shape, "input", words):
        yield name, text, flat[:, order].reshape(n.shape)
    for name, text, order in rearrangements(sample.output_shape, "output", words):
        yield name, text, flat[order].reshape(n.shape)
    if sample.input_shape != sample.output_shape or not sample.output_shape:
        return
    is_permutation = all(bool(((flat != 0).sum(dim) <= 1).all()) for dim in (0, 1))
    candidates = [("", n.permute(*range(outputs, n.dim()), *range(outputs)))]
    candidates += [(f"along dimension {dim} ", n.transpose(dim, outputs + dim)) for dim in range(outputs)]
    for along, transposed in candidates:
        if is_permutation:
            reason = words.of_backward(": backward applies the permutation of forward instead of its inverse")
            yield "permuted", f"the analytical Jacobian is the inverse of the numerical one{reason}", transposed
        else:
            yield "transposed", f"{along}{adjoint(words)}", transposed


def adjoint(words: Wording) -> str:
    """The cause of a transposed Jacobian."""
    return "the analytical Jacobian is the transpose of the numerical one" + words.of_backward(
        ": backward applies the matrix, kernel or scan of forward instead of its transpose (for a convolution, the "
        "flipped kernel)"
    )


def _of_permutations(matrices: _Matrices, sample: Sample, words: Wording) -> Iterator[Cause]:
    """The cause if each row, or each column, has the right values in another order."""
    if not sample.complete or min(matrices.size) < 2:
        return
    a, n = (matrix.reshape(matrices.size) for matrix in (matrices.analytical, matrices.numerical))
    if a.is_complex():
        a, n = a.abs(), n.abs()
    allowed = matrices.settings.allowed(n.abs().max())
    # If all entries are equal, a row has the right values whatever its order is, so columns must have them, too.
    is_mask = torch.unique(classes(n[n != 0])).numel() < MIN_DISTINCT
    off = [(a.sort(dim).values - n.sort(dim).values).abs().max() for dim in (0, 1)]
    if not matrices.supports(2):
        return
    for dim, what, count in ((1, words.vector("input"), n.shape[1]), (0, words.vector("output"), n.shape[0])):
        difference = max(off) if is_mask else off[dim]
        moved = int((~((a - n).abs() <= allowed)).any(1 - dim).sum())
        # If all values of each row (or column) are equal, their order cannot be wrong.
        spread = (n.amax(dim) - n.amin(dim)).max()
        if bool(difference <= allowed) and moved > 1 and bool(spread > 10 * allowed):
            text = f"{what} has the right values at wrong positions" + words.of_backward(
                ": backward applies a permutation instead of its inverse, or the inverse instead of the permutation"
            )
            measure = (
                f"after sorting, entries differ by at most {float(difference):.1g}; {moved} of {count} positions are "
                "wrong"
            )
            yield Cause("permuted", text, measure, 0.91)
            return


def _of_broadcasting(matrices: _Matrices, sample: Sample, words: Wording) -> Iterator[Cause]:
    """The cause if backward sums over the wrong dimensions of grad_output for an input that func expands."""
    a, n, known, wrong = matrices.flat()
    if a.is_complex() or shared_by(sample) < 2 or not bool((a != 0).any()):
        return
    # Each output depends on one element of the input, so each numerical row has one nonzero entry. If backward sums
    # grad_output over all dimensions, every analytical entry of the row has its value. If backward sums over wrong
    # dimensions, some wrong entries have its value, and the others are zero.
    row = n.gather(1, n.abs().argmax(1, keepdim=True))
    equal = ((a - row).abs() <= matrices.settings.allowed(row)) | ~known
    everywhere = bool(equal.all())
    misplaced = bool(_broadcast_dims(sample)) and bool((equal | (a == 0)).all())
    if (everywhere and a.shape[1] > 1) or (misplaced and bool((wrong & (n == 0)).any())):
        text = (
            f"each element of {words.input} affects several outputs, but its gradient is summed over "
            f"{'all' if everywhere else 'the wrong dimension'} of grad_output"
        )
        if words.is_forward:
            text = (
                f"each output depends on one element of {words.input}, but the jvp adds up the tangents of "
                f"{'all' if everywhere else 'wrong'} elements"
            )
        count = int(wrong.sum())
        explained = "the only wrong entry" if count == 1 else f"all {count} wrong entries"
        yield Cause("missing reduction", text, f"explains {explained}", 0.95)


def _of_dimensions(matrices: _Matrices, sample: Sample, words: Wording) -> Iterator[Cause]:
    """The cause if elements depend on each other along one dimension in func, but along another in backward."""
    if sample.input_shape != sample.output_shape:
        return
    func, backward = (_coupled_dims(matrix, matrices.outputs) for matrix in (matrices.numerical, matrices.analytical))
    if func and backward and not backward & func:
        along, instead = (", ".join(map(str, sorted(dims))) for dims in (func, backward))
        text = (
            f"{words.derivative} sums, or scans, along dimension {instead}; in func, elements depend on each other "
            f"along dimension {along}"
        )
        measure = f"all analytical entries that couple elements along dimension {along} are zero"
        yield Cause("wrong dimension", text, measure, 0.93)


def _coupled_dims(matrix: Tensor, outputs: int) -> set[int]:
    """The dimensions along which the indices of outputs and inputs with a nonzero entry differ."""
    size = matrix.abs().nan_to_num(0.0)
    places = (size > 1e-6 * size.max()).nonzero()
    differ = (places[:, :outputs] != places[:, outputs:]).any(0)
    return set(differ.nonzero().flatten().tolist())


def _of_reductions(matrices: _Matrices, sample: Sample, words: Wording) -> Iterator[Cause]:
    """The cause if backward lacks a sum or a mean over grad_output, or assigns gradients instead of adding them."""
    a, n, known, wrong = matrices.flat()
    if a.is_complex():
        return
    lost, extra, total = wrong & (a == 0), wrong & (n == 0), int(wrong.sum())
    columns = (n != 0).any(0)
    # Columns with missing entries, and the share of their numerical entries that is missing.
    columns_lost = lost.any(0)
    kept = (a != 0).any(0)
    share = lost[:, columns_lost].sum() / max(1, int((n[:, columns_lost] != 0).sum()))
    spread = int(columns_lost.sum()) * 10 >= int(columns.sum()) * 9
    # If only whole rows are missing, backward omits these outputs, not a sum, unless each depends on a single element.
    of_one = bool(((n != 0).sum(1) <= 1).all())
    in_rows = of_one or bool(lost[(a != 0).any(1)].any())
    both = int((columns_lost & kept).sum()) * 2 >= int(columns_lost.sum()) > 0
    # Each output depends on at most one element of the input, and each such element has one nonzero analytical entry.
    single = of_one and bool((((a != 0).sum(0) == 1) | ~columns).all())
    if bool((lost == wrong).all()) and total and single and not _broadcast_dims(sample):
        measure = "every wrong entry is zero; each input element with wrong entries has one nonzero analytical entry"
        yield Cause("overwritten", _overwritten(words), measure, 0.94)
        return
    if not bool(extra.any()) and int(lost.sum()) * 2 >= total > 1 and both and spread and in_rows and share >= 0.45:
        text = _missing_sum(words, "most" if share > 0.55 else "about half", _summed_dims(matrices, sample))
        measure = (
            f"{int(lost.sum())} of {total} wrong entries are zero; at least half of the input elements with such zeros "
            "also have nonzero analytical entries"
        )
        yield Cause("missing reduction", text, measure, 0.92)
        return
    if int(extra.sum()) * 2 < total and _is_outer(torch.where(known, a - n, 0.0), n):
        text = f"a sum or a mean over {words.vectors} is missing, superfluous or multiplied by a wrong factor"
        measure = "within each block of the Jacobian, the error is an outer product of two vectors"
        yield Cause("missing reduction", text, measure, 0.75)


def _summed_dims(matrices: _Matrices, sample: Sample) -> list[int]:
    """The broadcast dimensions along which each gradient has only entries of one index; none if this varies."""
    kept = matrices.analytical.nan_to_num(0.0).flatten(matrices.outputs) != 0
    found = []
    for dim in _broadcast_dims(sample):
        others = [other for other in range(matrices.outputs) if other != dim]
        indices = (kept.any(tuple(others)) if others else kept).reshape(-1, kept.shape[-1]).sum(0)
        if bool((indices <= 1).all()):
            found.append(dim)
    return found


def _overwritten(words: Wording) -> str:
    if words.is_forward:
        return f"the tangent of each element of {words.input} reaches only one of the outputs that the element affects"
    return (
        f"the gradient of each element of {words.input} comes from only one of the outputs that the element affects: "
        "for repeated indices or overlapping windows, gradients are assigned instead of accumulated"
    )


def _missing_sum(words: Wording, share: str, dims: list[int]) -> str:
    gradient, omits = ("tangent", "does not reach") if words.is_forward else ("gradient", "omits")
    missing = f"a sum or a mean over {words.vectors} is missing"
    if dims:
        missing = "the tangent is not expanded" if words.is_forward else missing
        missing += f" along dimension{'s' if len(dims) > 1 else ''} {', '.join(map(str, dims))} of {words.output}"
    reason = f"{missing}, or a mean or norm is treated as a constant"
    outputs = f"{share} of the outputs that depend on the element"
    return f"the {gradient} of each element of {words.input} {omits} {outputs}: {reason}"


def _is_outer(error: Tensor, n: Tensor) -> bool:
    """Whether an error, but not `n`, is an outer product in each of its parts, which share no row or column."""
    size = error.abs()
    noise = 1e-6 * float(size.max())
    left = size > noise
    parts = 0
    while bool(left.any()) and parts < 64:
        row = int(left.any(1).nonzero()[0])
        columns = left[row]
        rows = left[:, columns].any(1)
        if int(rows.sum()) < 3 or int(columns.sum()) < 3:
            return False
        block = error[rows][:, columns]
        if bool(left[rows].any(0).logical_and(~columns).any()):
            return False  # this block shares rows with other columns, so it is no separate part
        values = torch.linalg.svdvals(block)
        wanted = torch.linalg.svdvals(n[rows][:, columns])
        if float(values[1]) > OUTER * float(values[0]) or float(wanted[1]) <= OUTER * float(wanted[0]):
            return False
        left = left & ~(rows.unsqueeze(1) & columns.unsqueeze(0))
        parts += 1
    return parts > 0
