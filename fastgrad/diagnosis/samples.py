"""Samples of the failing Jacobian: all of its entries, the entries that are known, or those around the worst one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fastgrad.core.random import EVIDENCE_STREAM, direction
from fastgrad.core.tensors import element_index, element_number
from fastgrad.diagnosis.experiments import OTHER_CALLS, Experiments
from fastgrad.problem.coordinates import Block
from fastgrad.report.evidence import Sample
from fastgrad.report.failure import Comparison, Entry

MAX_ENTRIES = 1 << 14
"""Largest number of entries of a sample."""

MAX_COLUMNS, MAX_ROWS = 12, 24
"""Numbers of columns and rows of a large Jacobian that are computed: two evaluations per column, one VJP per row."""

LARGEST_BLOCK = 1 << 8
"""Largest block size of kernels for which a sample includes the elements where the last block begins."""


class Samples(Experiments):
    """Entries of the failing pair."""

    def _sample(self, output: Block, block: Block, comparison: Comparison) -> Sample | None:
        """Entries of the failing pair: all if affordable, otherwise the known ones, or those around the worst one.

        None if these do not contain a wrong entry.
        """
        rows, columns = output.tensor.numel(), block.size
        whole = 2 * columns + rows if self._failure.mode == "reverse" else 3 * columns
        sample = None
        if comparison.analytical is not None and comparison.numerical is not None:
            # In torch's layout: one row per input element, also for a sparse input.
            sample = self._of_matrices(comparison.analytical.t(), comparison.numerical.t(), output, block)
        elif whole <= self._left() - OTHER_CALLS and rows * columns <= 1 << 22:
            sample = self._try(whole, lambda: self._whole(output, block))
        if sample is None and self._known_sample is not None:
            chosen = _thinned(self._known_sample.failing, self._settings.seed)
            names = "outputs", "inputs", "analytical", "numerical", "failing"
            sample = replace(self._known_sample, **{name: getattr(self._known_sample, name)[chosen] for name in names})
        if sample is None and comparison.worst is not None:
            worst = comparison.worst
            sample = self._try(3, lambda: self._part(output, block, worst))
        if sample is None or not bool(sample.failing.any()):
            return None
        return self._try(1, lambda: self._with_values(sample, output, block)) or sample

    def _with_values(self, sample: Sample, output: Block, block: Block) -> Sample:
        """The sample with the values at x of its input elements and output elements."""
        at, values = self._problem.coordinates(), self._problem.base()
        element = sample.inputs
        is_densified = block.elements is None and block.tensor.layout is not torch.strided
        if block.elements is not None:
            specified = block.elements.cpu()
            order = specified.argsort()
            element = order[torch.searchsorted(specified[order], element)]
        # The unspecified zeros of a sparse input are a property of its layout, not of its values.
        input_values = None if is_densified else _paired(at[block.slice], block).cpu()[element]
        output_values = _paired(values[output.slice], output).cpu()[sample.outputs]
        return replace(sample, input_values=input_values, output_values=output_values)

    def _whole(self, output: Block, block: Block) -> Sample:
        numerical = self._problem.difference_columns(block.first, block.size, self._settings.eps, self._record)
        if self._failure.mode == "forward":
            tangents, _ = self._problem.tangent_columns(block.first, block.size)
            analytical = self._entries(tangents, output, block)
        else:
            analytical = self._rows(output, block, 0, output.tensor.numel())
        return self._of_matrices(analytical, self._entries(numerical, output, block), output, block)

    def _part(self, output: Block, block: Block, worst: Entry) -> Sample:
        """The entries in some columns and rows: those of the worst entry, of its neighbors and of likely borders."""
        places = element_number(worst.input_index, block.tensor.shape)
        chosen = _around(places, tuple(block.tensor.shape), self._settings.seed)
        if block.elements is not None:
            where = {int(element): k for k, element in enumerate(block.elements.tolist())}
            chosen = [where[element] for element in chosen if element in where]
        budget = self._left() - OTHER_CALLS
        count = max(1, min(MAX_COLUMNS, budget // (4 * block.width)))
        chosen = chosen[:count]
        columns = [block.first + block.width * element for element in chosen]
        eps, width = self._settings.eps, block.width
        measured = [self._problem.difference_columns(column, width, eps, self._record) for column in columns]
        numerical = self._entries(torch.cat(measured), output, block)
        # Rows with the largest entry of a chosen column: in a sparse Jacobian, most other rows are zero there.
        row = element_number(worst.output_index, output.tensor.shape)
        sizes = numerical.abs().nan_to_num(0.0)
        rows = [row, *sizes.argmax(0).tolist(), *_around(row, tuple(output.tensor.shape), self._settings.seed)]
        rows = list(dict.fromkeys(rows))[: max(2 * count, min(MAX_ROWS, budget // 2))]
        if self._failure.mode == "forward":
            own = torch.cat([self._problem.tangent_columns(column, width)[0] for column in columns])
            analytical = self._entries(own, output, block)[rows]
        else:
            analytical = torch.cat([self._rows(output, block, element, 1) for element in rows])[:, chosen]
        return self._of_matrices(analytical, numerical[rows], output, block, (rows, chosen))

    def _entries(self, columns: Tensor, output: Block, block: Block) -> Tensor:
        """Entries of the failing part from columns (coordinates, m): shape (output elements, input elements)."""
        own = columns[:, output.slice]
        imaginary = int(self._failure.part == "imaginary")
        if self._failure.mode == "forward":
            return _paired(own[imaginary :: block.width], output).t()
        return _paired(own[:, imaginary :: output.width].t(), block)

    def _rows(self, output: Block, block: Block, first: int, count: int) -> Tensor:
        """Analytical rows of some successive elements of an output: shape (count, input elements)."""
        imaginary = self._failure.part == "imaginary"
        rows, _, _ = self._problem.analytical_rows(output, imaginary, first, count, [block])
        return _paired(rows, block)

    def _of_matrices(
        self,
        analytical: Tensor,
        numerical: Tensor,
        output: Block,
        block: Block,
        part: tuple[list[int], list[int]] | None = None,
    ) -> Sample:
        """A sample from two matrices, shape (output elements, input elements), of at most `MAX_ENTRIES` entries.

        If whole matrices have more, entries that agree and are zero in both are left out first, but for one of each
        row and column that has no others. part: the elements of the matrices' rows and columns; None: all.
        """
        analytical, numerical = analytical.cpu(), numerical.cpu()
        own = self._settings.of(block.index)
        failing = ~torch.isclose(analytical, numerical, rtol=own.rtol, atol=own.atol)
        kept = failing | (analytical != 0) | (numerical != 0)
        if part is not None or kept.numel() <= MAX_ENTRIES:
            kept = torch.ones_like(kept)
        else:
            kept[~kept.any(1), 0] = True
            kept[0, ~kept.any(0)] = True
        i, j = kept.nonzero(as_tuple=True)
        chosen = _thinned(failing[kept], self._settings.seed)
        i, j = i[chosen], j[chosen]
        count = block.size // block.width
        element = torch.arange(count, device="cpu") if block.elements is None else block.elements.cpu()
        complete = part is None and block.elements is None and i.numel() == int(kept.sum())
        shapes = tuple(output.tensor.shape), tuple(block.tensor.shape)
        entries = analytical[i, j], numerical[i, j], failing[i, j]
        if part is not None:
            i, j = (torch.tensor(some, device="cpu")[places] for some, places in zip(part, (i, j), strict=True))
        return Sample(*shapes, i, element[j], *entries, complete=complete)


def _around(element: int, shape: tuple[int, ...], seed: int) -> list[int]:
    """An element, its neighbors along each dimension, the ends, the borders of last blocks, and random elements."""
    index = element_index(element, shape)
    places, along = [index], list[list[int]]()
    for dim, size in enumerate(shape):
        here, block = index[dim], 8
        near = [here + 1, here - 1, 0, size - 1]
        while block < size and block <= LARGEST_BLOCK:
            near += [size - size % block, size - size % block - 1]
            block *= 2
        along.append([k for k in near if 0 <= k < size])
    for turn in range(max(map(len, along), default=0)):
        for dim, candidates in enumerate(along):
            if turn < len(candidates):
                places.append((*index[:dim], candidates[turn], *index[dim + 1 :]))
        # Random elements as well: neighbors alone cannot distinguish a single wrong element from a rule.
        where = direction(max(1, len(shape)), seed, EVIDENCE_STREAM + 16 * 9, 8 * turn).abs_().sub_(0.5).tolist()
        places.append(tuple(min(size - 1, int(share * size)) for share, size in zip(where, shape, strict=False)))
    return [element_number(place, shape) for place in dict.fromkeys(places)]


def _paired(coordinates: Tensor, block: Block) -> Tensor:
    """Elements of a block from their coordinates along the last dimension, of which a complex element has two."""
    pairs = (*coordinates.shape[:-1], -1, 2)
    return torch.view_as_complex(coordinates.reshape(pairs).contiguous()) if block.is_complex else coordinates


def _thinned(failing: Tensor, seed: int) -> Tensor:
    """The numbers of at most MAX_ENTRIES entries, half of them failing if there are enough of both: int64, sorted."""
    if failing.numel() <= MAX_ENTRIES:
        return torch.arange(failing.numel(), device="cpu")
    generator = torch.Generator("cpu").manual_seed(seed % (1 << 63))
    order = torch.randperm(failing.numel(), generator=generator, device="cpu")
    wrong, right = order[failing[order]], order[~failing[order]]
    wrong = wrong[: max(MAX_ENTRIES // 2, MAX_ENTRIES - right.numel())]
    return torch.cat([wrong, right[: MAX_ENTRIES - wrong.numel()]]).sort().values
