"""The results of a small check, on which the complete check builds if it does not pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from fastgrad.core.errors import unless_rejected
from fastgrad.core.memory import Result
from fastgrad.core.native import Derivatives, SmallProblem
from fastgrad.engines import cost_model
from fastgrad.engines.blocks import row_parts
from fastgrad.problem.coordinates import Block
from fastgrad.problem.first_look import KnownLook
from fastgrad.problem.second_order import Backward
from fastgrad.problem.small_backward import SmallBackward
from fastgrad.report.data import Pair, Plan
from fastgrad.report.failure import Mode
from fastgrad.report.settings import Settings
from fastgrad.verdict.comparison import Findings

if TYPE_CHECKING:
    from fastgrad.engines.compressed import Compression


Errors = list[list[tuple[float, float]]]
"""The largest absolute and relative error, by part of a tensor on one side, and by tensor on the other side."""


@dataclass(frozen=True, eq=False, repr=False)
class SmallPattern:
    """A sparsity pattern in groups, with the grad_outputs that give its rows.

    Attributes
    ----------
    inputs
        The coordinates of the inputs.
    grad_outputs
        Float64, shape (row groups + one-hot rows, m).
    only
        The index of the output to which each of these rows belongs.
    row_groups
        The row group of each entry: int64, shape (entries,).
    row_group_count
        The number of row groups. Further rows are one-hot, and must equal rows computed together with others.
    """

    compression: Compression
    inputs: tuple[Block, ...]
    outputs: tuple[Block, ...]
    grad_outputs: Tensor
    only: list[int]
    row_groups: Tensor
    row_group_count: int

    def plan(self) -> Plan:
        """The plan of a check of its entries."""
        pattern, columns, rows = self.compression.pattern, self.compression.column_groups.count, self.row_group_count
        memory = pattern.nnz * cost_model.COSTS.entry_bytes
        return Plan("compressed", 0, 0, True, pattern.origin, column_groups=columns, row_groups=rows, memory=memory)

    def entries_between(self, output: int, input: int) -> int:
        """Number of entries in the rows of an output and the columns of an input."""
        columns = self.compression.pattern.columns[self.compression.entries_of(self.outputs[output])]
        block = self.inputs[input]
        return int(((columns >= block.first) & (columns < block.end)).sum())


UNDECIDED_SUMS = "decided by the exact engine, because random directions gave no verdict"
"""The note of a report if sums decided nothing, and all entries were compared."""


class MeasuredStep(NamedTuple):
    """How directional derivatives were measured, so that the measurement can be repeated.

    Attributes
    ----------
    step
        Relative to eps.
    budget
        The largest 2-norm of noise with which one-sided differences are taken.
    measures_noise
        Whether rounding inside func was measured in any case.
    """

    step: float
    budget: float
    measures_noise: bool
    differences: Derivatives


@dataclass(eq=False, repr=False, kw_only=True)
class SmallCheck(Findings):
    """The results of a small check: for its report if it passes, otherwise for the complete check, which uses them.

    Attributes
    ----------
    func, problem, settings
        func, or the backward whose derivatives are checked; its first evaluation and its graph; and the keywords of the
        check.
    vectorization_failed
        Whether vectorized calls cannot measure `columns`, or did not decide.
    changed
        Where and what func returned instead of its outputs, if `columns` could not be computed for this reason.
    moved, jvp_varies
        As in `Findings`; also true if a gradient had a wrong size or dtype, or func returned outputs of another kind.
        The complete check then finds the error. If it finds none, some calls were right and others wrong.
    single_columns
        Columns that single calls gave to test a vectorized call, by number: float64, shape (1, m).
    errors
        By output and part, and by input, the largest absolute and relative error; None if the complete check must
        compare them.
    pattern
        The pattern if only its entries were compared, because all others are certified to be zero.
    tangent_errors
        By input and part, and by output, the same for forward mode.
    differences
        Directional derivatives that agree with VJPs; the weight of each output, empty if all are 1; and `bound`.
    look
        The evaluation that was compared with guesses of the sparsity pattern.
    irreproducible
        As in `Problem`.
    steps
        The steps at which directional derivatives were measured, whether they agree or not.
    undecided_sums
        The early VJPs, or the JVPs, of sums that did not agree, although all calls were consistent. The reason may be
        curvature, kinks or rounding.
    bound
        The size of an error of one entry that the sums show.
    dense_tangent
        The number, from the end, of a row of `tangents` without zeros; known after forward mode has passed.
    jvps
        Calls of func in forward mode.
    seconds
        By phase, without the first evaluation; not measured for the quickest checks.
    passes
        Whether all tests passed, so that the complete check does not run.
    starts_again
        Whether everything agreed, but only a later graph runs custom code: the complete check uses no results.
    on_graph
        Runs and counts the calls of backward on the current graph.
    is_custom
        Whether func runs custom code, or, for second derivatives, the function whose backward it is.
    """

    func: Callable[..., Any]
    problem: SmallProblem
    settings: Settings
    vectorization_failed: bool = False
    changed: tuple[int, int, Any] | None = None
    single_columns: dict[int, Tensor] = field(default_factory=dict)
    errors: Errors | None = None
    pattern: SmallPattern | None = None
    tangent_errors: Errors | None = None
    differences: tuple[Derivatives, Tensor, float] | None = None
    look: KnownLook | None = None
    irreproducible: list[str] = field(default_factory=list)
    steps: list[MeasuredStep] = field(default_factory=list)
    undecided_sums: Tensor | None = None
    bound: float = 0.0
    dense_tangent: int = 0
    jvps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    passes: bool = False
    starts_again: bool = False

    def __post_init__(self) -> None:
        self.on_graph = SmallBackward(self.problem)
        self.is_custom = self.problem.is_custom or (isinstance(self.func, Backward) and self.func.is_custom)

    @property
    def is_consistent(self) -> bool:
        """Whether repeated calls gave the same values, no call raised, and all outputs were of the expected kind."""
        return not (self.vjp_varies or self.irreproducible) and self.changed is None and self.early is None

    def unless_changed(self, run: Callable[[], Result | tuple[Any, ...]], where: str) -> Result | None:
        """The result of calls of func; None if it raises, or returns outputs of another kind, also when repeated.

        If it returned outputs of another kind only once, this is noted. where: the calls, as text.
        """
        found = unless_rejected(run)
        if not isinstance(found, tuple):
            return found
        if not isinstance(unless_rejected(run), tuple | None):
            self.irreproducible.append(where)
        return None

    def compared(self) -> list[Pair]:
        """The pairs whose entries were all compared, for a check that passed; empty if only sums were compared."""
        inputs, outputs = self.on_graph.inputs, self.on_graph.outputs
        forward = list(compared_pairs(inputs, outputs, self.tangent_errors, "forward"))
        forward.sort(key=lambda pair: (pair.part == "real", pair.output, pair.input))
        reverse = compared_pairs(outputs, inputs, self.errors, "reverse")
        if self.pattern is not None:
            entries_between = self.pattern.entries_between
            return [
                pair._replace(entries=entries_between(pair.output, pair.input), on_pattern=True) for pair in reverse
            ]
        return [*reverse, *forward]


def compared_pairs(outer: Sequence[Block], inner: Sequence[Block], errors: Errors | None, mode: Mode) -> Iterator[Pair]:
    """Yields what was compared, by part of the outer side (outputs in reverse mode) and by tensor of the inner side."""
    if errors is None:
        return
    for (one, part), of_part in zip(row_parts(outer), errors, strict=True):
        for other, largest in zip(inner, of_part, strict=True):
            output, input_ = (one, other) if mode == "reverse" else (other, one)
            entries = output.tensor.numel() * input_.tensor.numel()
            places = output.index, input_.index, output.position, input_.position
            yield Pair(*places, part, mode, entries, 0, True, *largest, False)
