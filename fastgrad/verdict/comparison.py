"""Compares blocks of the analytical and the numerical Jacobian, pair by pair of output and input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastgrad.core import native
from fastgrad.core.errors import raise_unless_of_func
from fastgrad.core.memory import Result
from fastgrad.core.native import WholeBackward, ops
from fastgrad.core.phases import phase
from fastgrad.core.precision import modulus
from fastgrad.core.tensors import element_index, element_number
from fastgrad.problem.coordinates import Block, per_coordinate
from fastgrad.problem.problem import Problem
from fastgrad.problem.small_backward import SmallBackward
from fastgrad.report.data import Certificate, Pair
from fastgrad.report.failure import Comparison, Entry, Extent, Failure, Mode, Part, Span
from fastgrad.report.settings import Settings, Tolerances
from fastgrad.structure import coloring

if TYPE_CHECKING:
    from fastgrad.report.evidence import Sample

MAX_MATRIX_ENTRIES = 256
"""Largest number of entries of a Jacobian that is kept as a whole, for the message."""

MAX_WORST = 8
"""Largest number of wrong entries that a comparison names."""

MANY_DEPENDENTS = 4
"""Columns are moved one by one if more than one in this many entries of a block are wrong or nonzero, and belong to
outputs that differ: moving columns together would then save little."""

FEW_PLACES = 8
"""Largest number of indices along a dimension that an extent lists one by one."""

Elements = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Returns the elements to which rows and columns of entries in a block belong."""


@dataclass(eq=False, repr=False)
class Findings:
    """What a check finds in addition to its verdict.

    Attributes
    ----------
    backward
        All VJPs of a small problem, if they were run at once.
    on_first_graph
        Whether these VJPs ran on the graph of the first evaluation.
    early
        The exception that one of these VJPs or, in a small check, another call raised. It is raised again after all
        checks, unless one of them has failed or raised.
    columns
        The numerical Jacobian, if it is known: float64, shape (n, m).
    tangent_columns
        The same by forward mode.
    batched
        The failure of a vectorized VJP that is known to raise or to differ.
    vjp_varies
        Whether a VJP is known to have given different gradients in two runs.
    jvp_varies
        The same for a JVP.
    domains_match
        False if a tangent is known to be complex although its output is real, or vice versa.
    products
        VJPs that were run and may not be compared with rows: cotangents and gradients, float64, shapes (count, m) and
        (count, n).
    tangents
        JVPs that were run: tangents of the inputs, float64, shape (count, n); for each JVP, which tangents were
        undefined, as for `ForwardMode.jvps_of`; and tangents of the outputs, shape (count, m).
    """

    notes: list[str] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    certificates: list[Certificate] = field(default_factory=list)
    undecided: float | None = None
    sample: Sample | None = None
    backward: WholeBackward | None = None
    on_first_graph: bool = True
    early: Exception | None = None
    columns: Tensor | None = None
    tangent_columns: Tensor | None = None
    batched: Failure | None = None
    vjp_varies: bool = False
    jvp_varies: bool = False
    domains_match: bool = True
    products: tuple[Tensor, Tensor] | None = None
    tangents: tuple[Tensor, list[int], Tensor] | None = None

    def noted(self, run: Callable[[], Result | None]) -> Result | None:
        """The result of `run`, which calls func or its backward; None if it raises, which `early` then holds."""
        try:
            return run()
        except Exception as error:
            raise_unless_of_func(error)
            self.early = error
            return None

    def add(self, other: Findings) -> None:
        """Adds the findings of a part of the check."""
        self.notes += other.notes
        self.pairs += other.pairs
        self.certificates += other.certificates
        self.sample = other.sample or self.sample
        self.backward, self.early = other.backward or self.backward, other.early or self.early
        self.vjp_varies, self.jvp_varies = self.vjp_varies or other.vjp_varies, self.jvp_varies or other.jvp_varies
        self.domains_match = self.domains_match and other.domains_match
        self.batched, self.tangents = self.batched or other.batched, self.tangents or other.tangents
        if other.undecided is not None:
            self.undecided = max(other.undecided, self.undecided or 0.0)

    def note_undecided(self, bound: float) -> None:
        """Notes that errors up to a bound may be hidden, or errors of any size if the bound is infinite or NaN."""
        from fastgrad.report.messages import undecided_text  # imported here to keep `import fastgrad` fast

        bound = math.inf if math.isnan(bound) else bound
        self.notes.append(undecided_text(bound))
        self.undecided = max(bound, self.undecided or 0.0)

    def add_pair(self, pair: Pair) -> None:
        """Adds a pair. A pair that is added again, for example in each pass over the columns, counts once."""
        for number, known in enumerate(self.pairs):
            if known[:6] == pair[:6]:
                self.pairs[number] = pair._replace(
                    entries=known.entries + pair.entries,
                    mismatches=known.mismatches + pair.mismatches,
                    largest_absolute=max(known.largest_absolute, pair.largest_absolute),
                    largest_relative=max(known.largest_relative, pair.largest_relative),
                )
                return
        self.pairs.append(pair)


def tolerances(
    problem: Problem | SmallBackward, settings: Settings, columns: Tensor | slice = slice(None)
) -> tuple[float | Tensor, float | Tensor]:
    """The atol and rtol of coordinates of the inputs: float64, shape (columns,), or numbers where all are the same."""
    if not settings.inputs:
        return settings.atol, settings.rtol
    atol = per_coordinate(problem.inputs, lambda block: settings.of(block.index).atol, problem.device)
    rtol = per_coordinate(problem.inputs, lambda block: settings.of(block.index).rtol, problem.device)
    return atol[columns], rtol[columns]


def excesses(
    problem: Problem, settings: Settings, values: Tensor, numerical: Tensor, columns: Tensor | slice = slice(None)
) -> Tensor:
    """|values - numerical| divided by the allowed error, coordinate by coordinate; columns: of these coordinates."""
    atol, rtol = tolerances(problem, settings, columns)
    return (values - numerical).abs() / (atol + rtol * numerical.abs())


@dataclass(frozen=True)
class Suspects:
    """Entries of one output and one input that differ at eps. Those that come first are re-measured first.

    Attributes
    ----------
    tolerances
        Tolerances of the input.
    inputs, outputs
        Coordinates: int64, shape (entries, 1 or 2); two coordinates make one complex entry.
    analytical, numerical
        The values of the entries, numerical ones at eps: complex128, shape (entries,).
    """

    output: Block
    input: Block
    tolerances: Tolerances
    inputs: Tensor
    outputs: Tensor
    analytical: Tensor
    numerical: Tensor

    @property
    def input_elements(self) -> Tensor:
        """Number of each entry's input element, among the elements that have coordinates: int64, shape (entries,)."""
        return (self.inputs[:, 0] - self.input.first) // self.input.width

    def _of_each(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.inputs, self.outputs, self.analytical, self.numerical

    def of(self, entries: Tensor) -> Suspects:
        """Some of the suspects, selected by number or mask."""
        return Suspects(self.output, self.input, self.tolerances, *(values[entries] for values in self._of_each()))

    @staticmethod
    def joined(groups: Sequence[Suspects]) -> Suspects:
        """The entries of several groups of one output and one input, end to end."""
        head = groups[0]
        values = zip(*(group._of_each() for group in groups), strict=True)
        return Suspects(head.output, head.input, head.tolerances, *map(torch.cat, values))

    def entry(self, which: int, refined: complex | None = None, error: float | None = None) -> Entry:
        """One of the entries, for a report; refined: its numerical value after re-measuring; error: of this value."""
        numerical = complex(self.numerical[which]) if refined is None else refined
        analytical = complex(self.analytical[which])
        places = self.output.index_at(int(self.outputs[which, 0])), self.input.index_at(int(self.inputs[which, 0]))
        is_real = self.inputs.shape[1] == self.outputs.shape[1] == 1
        found, wanted = (analytical.real, numerical.real) if is_real else (analytical, numerical)
        return Entry(*places, found, wanted, self.tolerances.atol + self.tolerances.rtol * modulus(numerical), error)


@dataclass(eq=False, repr=False)
class PairComparison:
    """Compares the two Jacobians of one output with respect to one input, block by block.

    In reverse mode a block has one row per element of the output and one column per coordinate of the input; in forward
    mode it has one row per element of the input and one column per coordinate of the output. group_of: returns the
    column group of each coordinate; columns of a group share no row. None: no groups are known.
    """

    output: Block
    input: Block
    tolerances: Tolerances
    mode: Mode = "reverse"
    group_of: Callable[[Tensor], Tensor] | None = None
    entries: int = 0
    mismatches: int = 0
    largest_absolute: float = 0.0
    largest_relative: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0] * 4)
    matrices: tuple[Tensor, Tensor] | None = None
    unspecified: list[Entry] = field(default_factory=list)
    failing: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    dependent: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    has_many_dependents: bool = False
    on_pattern: bool = False
    entries_at_hand: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    @phase("comparison")
    def add(self, analytical: Tensor, numerical: Tensor, first_row: int, first_column: int) -> None:
        """Adds a block.

        Parameters
        ----------
        analytical, numerical
            float64, shape (rows, columns).
        first_row, first_column
            The element of row 0 and the coordinate of column 0.
        """
        width = self._width
        first = first_column // width
        self._take_in(analytical, numerical, lambda row, column: (first_row + row, first + column))
        whole = self.output.tensor.numel() * self.input.tensor.numel()
        if self.mismatches and whole <= MAX_MATRIX_ENTRIES and analytical.numel() == whole * width:
            matrices = _matrix(analytical, width), _matrix(numerical, width)
            # In torch's layout: one row per input element, one column per output element.
            self.matrices = matrices if self.mode == "forward" else (matrices[0].t(), matrices[1].t())

    @phase("comparison")
    def add_entries(self, analytical: Tensor, numerical: Tensor, rows: Tensor, columns: Tensor) -> None:
        """Adds entries of a sparse Jacobian.

        Parameters
        ----------
        analytical, numerical
            float64, shape (coordinates,): one per entry, or two side by side that make one complex entry.
        rows, columns
            The elements of each entry, as in a block: int64, shape (entries,).
        """
        self.on_pattern = True
        self.entries_at_hand = analytical, numerical, rows, columns
        self._take_in(analytical[None], numerical[None], lambda _, entry: (rows[entry], columns[entry]))

    @property
    def _width(self) -> int:
        """Number of coordinates along a row of a block that make one entry."""
        return 2 if (self.output if self.mode == "forward" else self.input).is_complex else 1

    def _take_in(self, analytical: Tensor, numerical: Tensor, elements: Elements) -> None:
        """Adds a block."""
        atol, rtol, width = self.tolerances.atol, self.tolerances.rtol, self._width
        statistics = ops.compare(analytical, numerical, atol, rtol, width == 2, False).tolist()
        mismatches, _, _, _, absolute, relative, *sums = statistics
        self.entries += analytical.numel() // width
        self.largest_absolute = max(self.largest_absolute, absolute)
        self.largest_relative = max(self.largest_relative, relative)
        if mismatches:
            self.mismatches += int(mismatches)
            self.sums = [total + term for total, term in zip(self.sums, sums, strict=True)]
            self._keep_failing(analytical, numerical, elements)

    def _keep_failing(self, analytical: Tensor, numerical: Tensor, elements: Elements) -> None:
        """Keeps the entries of a block that differ: elements along rows and columns, and both values."""
        values = [_matrix(block, self._width) for block in (analytical, numerical)]
        differing = self._differ(*values)
        rows, columns = differing.nonzero(as_tuple=True)
        found, wanted = (value[rows, columns].to(torch.complex128) for value in values)
        self.failing.append((*elements(rows, columns), found, wanted))
        # For each output element with a wrong entry, all input elements on which it depends. In forward mode: for each
        # input element with a wrong entry, all output elements that depend on it.
        dependent = differing.any(1, keepdim=True) & (differing | (values[1] != 0))
        self.has_many_dependents |= int(dependent.sum()) > dependent.numel() // MANY_DEPENDENTS
        if not self.has_many_dependents:
            self.dependent.append(elements(*dependent.nonzero(as_tuple=True)))

    def _differ(self, analytical: Tensor, numerical: Tensor) -> Tensor:
        """A mask of the entries that differ by torch's rule: if values are not finite, only equal infinities agree."""
        return ~torch.isclose(analytical, numerical, rtol=self.tolerances.rtol, atol=self.tolerances.atol)

    def _failing(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The entries that differ: elements of the output and of the input, analytical and numerical values."""
        rows, columns, analytical, numerical = (torch.cat(tensors) for tensors in zip(*self.failing, strict=True))
        outputs, inputs = (columns, rows) if self.mode == "forward" else (rows, columns)
        return outputs, inputs, analytical, numerical

    def within(self, noise: float, rounding: float) -> int:
        """The number of entries that differ, but by no more than their tolerance plus noise.

        rounding: the rounding error of a difference, relative to the output element. It counts where it exceeds noise.
        """
        outputs, _, analytical, numerical = self._failing()
        values = torch.empty(self.output.size, dtype=torch.float64, device=self.output.tensor.device)
        native.flatten_(values, self.output.tensor.detach())
        sizes = torch.linalg.vector_norm(values.view(-1, self.output.width), dim=1)[outputs]
        allowed = self.tolerances.allowed(numerical) + (rounding * sizes).clamp(min=noise)
        return int(((analytical - numerical).abs() <= allowed).sum())

    def _extent(self) -> Extent:
        """The positions of the entries that differ."""
        outputs, inputs = self._failing()[:2] if self.failing else (None, None)
        return Extent(
            places_along(self.output, [entry.output_index for entry in self.unspecified], outputs),
            places_along(self.input, [entry.input_index for entry in self.unspecified], inputs),
        )

    def suspects(self, part: Part) -> Suspects:
        """The entries that differ (at least one), the one with the largest ratio of difference to tolerance first."""
        outputs, inputs, analytical, numerical = self._failing()
        excess = ((analytical - numerical).abs() / self.tolerances.allowed(numerical)).nan_to_num(torch.inf)
        order = excess.argsort(descending=True, stable=True)
        outputs, inputs, analytical, numerical = (values[order] for values in (outputs, inputs, analytical, numerical))

        def coordinates(block: Block, elements: Tensor, judged_by_parts: bool) -> Tensor:
            first = block.first + elements.unsqueeze(1) * block.width
            if judged_by_parts:
                return first + (part == "imaginary")
            return torch.cat([first, first + 1], 1) if block.width == 2 else first

        forward = self.mode == "forward"
        places = coordinates(self.input, inputs, forward), coordinates(self.output, outputs, not forward)
        return Suspects(self.output, self.input, self.tolerances, *places, analytical, numerical)

    def groups(self, suspects: Suspects) -> Tensor:
        """For each suspect, the number of the group of its input element: int64, shape (entries,).

        The elements of a group may be perturbed together: if an output and an element of the group have an entry that
        differs, this output depends, at eps, on no other element of the group.
        """
        if self.group_of is not None:
            return self.group_of(suspects.inputs[:, 0])
        elements = suspects.input_elements
        if self.has_many_dependents:
            return elements
        sides = [torch.cat(side) for side in zip(*self.dependent, strict=True)]
        outputs, inputs = reversed(sides) if self.mode == "forward" else sides
        return groups_without_a_common_row(elements, outputs, inputs)

    def add_unspecified(self, row: int, element: int, value: complex) -> None:
        """Adds an analytical entry at an element that a sparse input does not specify; the numerical value is zero."""
        atol = self.tolerances.atol
        if not modulus(value) <= atol:
            self.entries += 1
            self.mismatches += 1
            index = element_index(element, self.input.tensor.shape)
            value = value if self.input.is_complex else value.real
            entry = Entry(self.output.element_index(row), index, value, 0.0, atol)
            if math.isfinite(modulus(value)):
                self.largest_absolute = max(self.largest_absolute, modulus(value))
            self.unspecified.append(entry)

    def sample(self) -> Sample | None:
        """All entries of a sparse Jacobian, right and wrong ones; None for a dense one, whose blocks are not kept."""
        if self.entries_at_hand is None:
            return None
        from fastgrad.report.evidence import Sample  # imported here: a check that passes does not need it

        analytical, numerical, *elements = self.entries_at_hand
        rows, columns = reversed(elements) if self.mode == "forward" else elements
        dtype = torch.complex128 if self._width == 2 else torch.float64
        found, wanted = (_matrix(block[None], self._width)[0].cpu().to(dtype) for block in (analytical, numerical))
        shapes = tuple(self.output.tensor.shape), tuple(self.input.tensor.shape)
        return Sample(*shapes, rows.cpu(), columns.cpu(), found, wanted, self._differ(found, wanted))

    def result(self, worst: Entry, worst_entries: tuple[Entry, ...], unclear: int) -> Comparison:
        """The comparison so far, as data; the parameters are fields of `Comparison`."""
        sum_analytical, sum_numerical, re, im = self.sums
        analytical, numerical = self.matrices or (None, None)
        return Comparison(
            entries=entry_count(self.output, self.input) if self._is_partial else self.entries,
            mismatches=self.mismatches,
            worst=worst,
            largest_absolute=self.largest_absolute,
            largest_relative=self.largest_relative,
            sum_analytical=sum_analytical,
            sum_numerical=sum_numerical,
            sum_product=complex(re, im),
            analytical=analytical,
            numerical=numerical,
            worst_entries=worst_entries,
            extent=self._extent() if self.mismatches else None,
            on_pattern=self.on_pattern,
            exhaustive=not self.unspecified and not self._is_partial,  # only one unspecified entry per block is kept
            unclear=unclear,
        )

    @property
    def _is_partial(self) -> bool:
        """Whether some columns were not compared: those after the first block of columns with a wrong entry."""
        return not self.on_pattern and self.entries < entry_count(self.output, self.input)

    def pair(self, part: Part, agrees: bool) -> Pair:
        """The `Pair` of this comparison; agrees: its outcome."""
        places = self.output.index, self.input.index, self.output.position, self.input.position
        largest = self.largest_absolute, self.largest_relative
        counts = self.entries, self.mismatches
        exhaustive = agrees or not self._is_partial
        return Pair(*places, part, self.mode, *counts, agrees, *largest, self.on_pattern, exhaustive)


def entry_count(output: Block, block: Block) -> int:
    """Number of entries of the Jacobian of an output with respect to an input; its complex entries count once."""
    return output.tensor.numel() * (block.size // block.width)


def groups_without_a_common_row(moved: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The group of each column in `moved`: int64, of the same shape. Columns of one group share no row.

    rows, columns: the entries, int64, shape (entries,).
    """
    own, which = torch.unique(moved.cpu(), return_inverse=True)
    columns = columns.cpu()
    chosen = torch.isin(columns, own)
    vertices = torch.searchsorted(own, columns[chosen])
    targets, members = torch.unique(rows.cpu()[chosen], return_inverse=True)
    starts = torch.cat([vertices.new_zeros(1), vertices.bincount(minlength=own.numel()).cumsum(0)])
    colors = coloring.color(starts.numpy(), members[vertices.argsort(stable=True)].numpy(), targets.numel())
    return torch.from_numpy(colors)[which].to(moved.device)


def places_along(block: Block, indices: Iterable[tuple[int, ...]], elements: Tensor | None = None) -> tuple[Span, ...]:
    """The positions of the elements at some indices and, if any, of others, by number, in the tensor of a block."""
    shape = block.tensor.shape
    numbers = torch.tensor([element_number(index, shape) for index in indices], dtype=torch.int64, device="cpu")
    if elements is not None:
        own = elements if block.elements is None else block.elements[elements.cpu()]
        numbers = torch.cat([own, numbers.to(own.device)])
    return spans(numbers, shape)


def spans(elements: Tensor, shape: Sequence[int]) -> tuple[Span, ...]:
    """The positions of some elements: one `Span` per dimension of their tensor.

    Parameters
    ----------
    elements
        Numbers of the elements in C order: int64, shape (elements,), at least one.
    """
    found = []
    for size in reversed(shape):
        taken = torch.zeros(size, dtype=torch.bool, device=elements.device)
        taken[elements % size] = True
        elements = elements // size
        places = taken.nonzero().reshape(-1)
        count, first, last = places.numel(), int(places[0]), int(places[-1])
        step = (last - first) // (count - 1) if count > 1 else 1
        regular = bool((places.diff() == step).all())
        few = tuple(places.tolist()) if count <= FEW_PLACES else ()
        found.append(Span(size, count, first, last, step if regular else None, few))
    return tuple(reversed(found))


def _matrix(block: Tensor, width: int) -> Tensor:
    """A copy of a block, complex if `width` is 2."""
    matrix = block.contiguous().clone()
    if width == 2:
        matrix = torch.view_as_complex(matrix.view(matrix.shape[0], -1, 2))
    return matrix
