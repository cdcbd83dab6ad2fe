"""Measures entries that differ at eps again, with many steps: which of them are wrong, and how to report them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fastgrad.core.phases import phase
from fastgrad.core.precision import number_of
from fastgrad.engines.measured_steps import LARGEST_STEP, measured
from fastgrad.engines.ridders import Refinement, settled
from fastgrad.engines.stairs import mark_stairs
from fastgrad.problem.problem import Problem
from fastgrad.report.failure import FUNC_VARIES, Difference, Entry, NumericalIssue
from fastgrad.report.number_text import digits_apart
from fastgrad.verdict.comparison import Suspects

MAX_UNDECIDED_ERROR = 64.0
"""Largest error of a derivative, in units of the tolerance, for which an entry is undecided, for example because of
rounding next to a kink. With a larger error, the derivative counts as not converged."""

CLEAR_DIFFERENCE = 16.0
"""The least difference for which a few steps suffice to show that an entry is wrong, in units of the sum of its
tolerance and the estimated error of its derivative."""

MAX_OTHER_ENTRIES = 7
"""Largest number of wrong entries to report in addition to the worst one."""


class RemeasuredEntry(NamedTuple):
    """An entry, for the report, that is also wrong at other steps, or whose derivative cannot be determined.

    convergence: its measurements, large steps first. others: more such entries that were re-measured at the same time.
    noise: the largest error of the differences at eps, among the entries that were re-measured and converged.
    eps_misleads: whether the difference at eps may not be the derivative, for an entry that is not known to be wrong.
    """

    entry: Entry
    detail: str
    numerical_issue: NumericalIssue | None = None
    convergence: tuple[Difference, ...] = ()
    others: tuple[Entry, ...] = ()
    noise: float = 0.0
    eps_misleads: bool = False


def not_finite(problem: Problem, record_graph: bool, suspects: Suspects) -> RemeasuredEntry | None:
    """A suspected entry that cannot be re-measured, because func, x or the analytical entry is not finite.

    None if there is none. Of several, the one to which most of these reasons apply comes first in the report.
    """
    base = problem.evaluate(record_graph, torch.zeros(problem.n, dtype=torch.float64, device=problem.device))
    values, x = base[suspects.outputs], problem.coordinates()[suspects.inputs]
    of_func, of_input = ~values.isfinite().all(1), ~x.isfinite().all(1)
    of_backward = ~suspects.analytical.isfinite()
    wrong = of_func | of_input | of_backward
    if not bool(wrong.any()):
        return None
    # One element that is not finite may make many entries wrong, because infinity times zero is NaN. The entry that is
    # reported is one of this element itself.
    votes = torch.stack([of_func, of_input, of_backward, suspects.analytical.isinf()])
    order = votes.sum(0).argsort(descending=True, stable=True)
    worst = int(order[0])
    output, block = suspects.output, suspects.input
    entries = [suspects.entry(int(i)) for i in order[: min(int(wrong.sum()), 1 + MAX_OTHER_ENTRIES)]]
    entry = entries[0]
    where = f"input {block.index} at {list(entry.input_index)} is {_number(x[worst])}"
    if bool(of_func[worst]):
        detail = f"func is not finite: output {output.index} at {list(entry.output_index)} is {_number(values[worst])}"
        # If the input and its entry are finite, func's value does not come from this input, which is then not named.
        detail += f", and {where}" if bool(of_input[worst] | of_backward[worst]) else ""
    elif bool(of_input[worst]):
        detail = f"{where}, so differences cannot be computed there"
    else:
        value = complex(suspects.analytical[worst])
        detail = f"the analytical derivative is not finite: {value if value.imag else value.real:g}, where {where}"
    return RemeasuredEntry(entry, detail, "not finite", (), tuple(entries[1:]))


def _number(coordinates: Tensor) -> str:
    """The text of a value of one or two coordinates."""
    return f"{number_of(coordinates.tolist()):.6g}"


@phase("re-measuring")
def worst_remeasured(
    problem: Problem, record_graph: bool, eps: float, groups: Sequence[Suspects], quickly: bool = True
) -> tuple[RemeasuredEntry | None, Tensor, float]:
    """Re-measures suspected entries of one output and one input.

    Parameters
    ----------
    groups
        Groups of entries; the elements of a group are moved together.
    quickly
        Whether a few steps are tried first. If they show entries that are clearly wrong, the result has only these.

    Returns
    -------
    tuple
        The worst entry that is wrong after re-measuring, if any; which entries are wrong: bool, shape (entries,) over
        all groups; and the possible error of entries that agree within the errors of their derivatives, but not within
        the tolerance.
    """
    # With a larger eps, all of a few steps may be larger than the scale on which func varies.
    if quickly and eps * groups[0].input.step <= LARGEST_STEP:
        found = _Remeasured(problem, record_graph, eps, groups, quickly=True)
        clear = _clearly_wrong(found)
        if bool(clear.any()):
            return _worst_of(found, clear), clear, 0.0
    found = _Remeasured(problem, record_graph, eps, groups, quickly=False)
    off = found.errors.abs()
    agrees = found.differences <= found.allowed
    # A gradient is wrong if it agrees only with slopes that come from rounding inside func.
    is_undecided = agrees & ~found.converged & ~found.are_no_slopes & (off <= MAX_UNDECIDED_ERROR * found.allowed)
    for which in map(int, is_undecided.nonzero().reshape(-1)):  # tensor subclasses have no tolist
        is_undecided[which] = all(found.kinks(which)) and found.is_one_sided(which)
    unresolved = float(off[is_undecided].amax()) if bool(is_undecided.any()) else 0.0
    wrong = ~(agrees & (found.converged | is_undecided)) | found.moved
    return _worst_of(found, wrong) if bool(wrong.any()) else None, wrong, unresolved


class _Remeasured:
    """Suspects of several groups, and their refined derivatives.

    Attributes
    ----------
    columns
        One `Refinement` per part (real, imaginary) of the input.
    values, errors
        The entries and their errors: complex128, shape (entries,).
    allowed, differences
        The tolerances of the entries, and how far the analytical values are from them: float64, shape (entries,).
    are_no_slopes
        Where rounding inside func explains the value, or func jumps at x: bool, shape (entries,).
    converged
        Where the error is within the tolerance, and the value is a slope: bool, shape (entries,).
    """

    def __init__(
        self, problem: Problem, record_graph: bool, eps: float, groups: Sequence[Suspects], quickly: bool
    ) -> None:
        """Re-measures the suspects; quickly: as in `measured`."""
        self.suspects = Suspects.joined(groups)
        self.columns = _refined(problem, record_graph, eps, groups, quickly)
        self.values, self.errors = self.entries("values"), self.entries("errors")
        self.allowed = self.suspects.tolerances.allowed(self.values)
        self.differences = (self.suspects.analytical - self.values).abs()
        self.are_no_slopes = self.any_part("doubtful") | self.any_part("jumps")
        self.converged = (self.errors.abs() <= self.allowed) & ~self.are_no_slopes  # a NaN has not converged

    def entries(self, name: str) -> Tensor:
        """A field of the refinements, real or complex: complex128, shape (entries,)."""
        # The two coordinates of a complex entry are in two refinements, or side by side in one.
        parts = torch.cat([getattr(column, name).reshape(self.suspects.outputs.shape) for column in self.columns], 1)
        return torch.complex(parts[:, 0], parts[:, 1] if parts.shape[1] == 2 else torch.zeros_like(parts[:, 0]))

    def any_part(self, name: str) -> Tensor:
        """Whether a field of the refinements is true or nonzero for any coordinate: bool, shape (entries,)."""
        shape = self.suspects.outputs.shape
        return torch.cat([getattr(column, name).reshape(shape) for column in self.columns], 1).any(1)

    def parts(self, entry: int) -> list[tuple[Refinement, int]]:
        """The refinements of an entry's coordinates, and the index of each coordinate there."""
        width = self.suspects.outputs.shape[1]
        rows = range(entry * width, (entry + 1) * width)
        return [(column, row) for column in self.columns for row in rows]

    def kinks(self, entry: int) -> Iterator[bool]:
        """Whether func has a kink, for each coordinate of an entry."""
        return (column.is_kink(row, self.suspects.tolerances) for column, row in self.parts(entry))

    def is_one_sided(self, entry: int) -> bool:
        """Whether each coordinate's derivative is one of the one-sided derivatives at eps, as next to a single kink."""
        own = float(self.allowed[entry])
        return all(
            min(abs(side[row].item() - column.values[row].item()) for side in (column.left, column.right))
            <= own + column.errors[row].item()
            for column, row in self.parts(entry)
        )

    @cached_property
    def moved(self) -> Tensor:
        """Where func gave different values when it was evaluated again at the same points: bool, shape (entries,)."""
        again, numerical = self.entries("at_eps"), self.suspects.numerical
        finite = again.isfinite(), numerical.isfinite()
        both = finite[0] & finite[1]
        size = torch.where(both, torch.maximum(again.abs(), numerical.abs()), 0.0)
        allowed = self.suspects.tolerances.allowed(size) + self.entries("moves").abs()
        differ = torch.where(both, (again - numerical).abs() > allowed, finite[0] != finite[1])
        return (differ & ~again.isnan()) | ~(self.entries("drift").abs() <= allowed)


def _refined(
    problem: Problem, record_graph: bool, eps: float, groups: Sequence[Suspects], quickly: bool
) -> list[Refinement]:
    """The refined derivatives of the suspects, one `Refinement` per part (real, imaginary) of the input."""
    width, own = groups[0].outputs.shape[1], groups[0].tolerances
    places = [
        [(group.inputs[:, part].repeat_interleave(width), group.outputs.reshape(-1)) for group in groups]
        for part in range(groups[0].inputs.shape[1])
    ]
    parts = [[measured(problem, *place, record_graph, eps, quickly) for place in of_part] for of_part in places]
    columns = settled(parts, own, width)
    for column, of_part in zip(columns, places, strict=True):
        end = 0
        for inputs, outputs in of_part:
            begin, end = end, end + outputs.numel()
            mark_stairs(problem, record_graph, eps, inputs, outputs, column.of(slice(begin, end)), own)
    return columns


def _clearly_wrong(found: _Remeasured) -> Tensor:
    """A mask of the entries that a few steps show to be wrong: func is smooth there, and the difference is large."""
    clear = found.converged & (found.differences > CLEAR_DIFFERENCE * (found.allowed + found.errors.abs()))
    for which in map(int, clear.nonzero().reshape(-1)):
        clear[which] = not any(found.kinks(which))
    return clear


def _worst_of(found: _Remeasured, wrong: Tensor) -> RemeasuredEntry:
    """The worst of the wrong entries, and further wrong entries, for the report."""
    suspects, values, converged = found.suspects, found.values, found.converged
    change = (values - suspects.numerical).abs()
    eps_misleads = not bool(((converged & (change <= found.allowed)) | wrong).all())
    at_eps = (suspects.analytical - suspects.numerical).abs() / suspects.tolerances.allowed(suspects.numerical)
    # Converged entries first, because they are certain. A NaN is never certain.
    excess = torch.where(converged, 1 + found.differences / found.allowed, (at_eps / (1 + at_eps)).nan_to_num(1.0))
    excess = torch.where(wrong, excess, -1.0)
    worst_first = excess.argsort(descending=True, stable=True)
    # Tensor subclasses have no tolist.
    order = [int(which) for which in worst_first[: min(int(wrong.sum()), 1 + MAX_OTHER_ENTRIES)]]
    detail, issue = _numerical_issue(found, order[0])
    entries = []
    for which in order:
        sure = bool(converged[which]) and not bool(found.moved[which]) and issue != "not converged"
        refined = (complex(values[which]), float(found.errors[which].abs())) if sure else ()
        entries.append(suspects.entry(which, *refined))
    noise = torch.where(converged, change + found.entries("moves").abs(), 0.0).nan_to_num(0.0, 0.0)
    convergence = _convergence(found.parts(order[0]))
    return RemeasuredEntry(
        entries[0], detail, issue, convergence, tuple(entries[1:]), float(noise.amax()), eps_misleads
    )


def _convergence(parts: list[tuple[Refinement, int]]) -> tuple[Difference, ...]:
    """The measurements of the coordinates of an entry; the steps are those of its first coordinate."""
    column, row = parts[0]
    pairs = [zip(column.changes[row].tolist(), column.widths[row].tolist(), strict=True) for column, row in parts]
    return tuple(
        Difference(step, number_of([change for change, _ in own]), number_of([change / width for change, width in own]))
        for step, *own in zip(column.steps[row].tolist(), *pairs, strict=False)
        if all(width for _, width in own)
    )


def _numerical_issue(found: _Remeasured, worst: int) -> tuple[str, NumericalIssue | None]:
    """Special properties of the worst entry's derivative: a clause, and the name of the property."""
    suspects, own, parts = found.suspects, found.suspects.tolerances, found.parts(worst)
    moved = bool(found.moved[worst])
    jump = max((column.jumps[row].item() for column, row in parts), key=abs)
    if jump and not moved:
        return (
            f"func is discontinuous at the inputs: its value changes by {abs(jump):.3g} from one side to the other, "
            "however small the step is",
            "discontinuity",
        )
    quantum = max(column.quantum[row].item() for column, row in parts)
    if quantum:
        return (
            f"func changes only by multiples of {quantum:.3g}, which is too coarse for steps of eps: an intermediate "
            "result may be very large or have lower precision",
            "low precision",
        )
    for column, row in parts:
        if column.is_kink(row, own) and not _is_steep(column, row):
            return _kink(column, row)
    at_eps = suspects.numerical[worst].abs().item()
    is_constant = not any(bool(column.values[row]) for column, row in parts)
    # If the analytical entry is zero, it agrees, and func may have a kink between x and the steps that change it.
    if is_constant and at_eps > own.atol and bool(suspects.analytical[worst] != 0):
        return (
            f"func does not change at all over steps much smaller than eps, but changes by {at_eps:.3g} x eps over a "
            "step of eps: an intermediate result may have lower precision",
            "low precision",
        )
    if any(bool(column.doubtful[row]) for column, row in parts):
        return (
            "the derivative from steps much smaller than eps does not agree with how func changes within eps: an "
            "intermediate result may have lower precision",
            "low precision",
        )
    if not bool(found.converged[worst]):
        return (
            "the numerical derivative did not converge over steps from 1e-2 down to the size of rounding: func is not "
            "smooth there, varies within much less than eps, or is so large that rounding hides its changes over small "
            "steps",
            "not converged",
        )
    if moved:
        return FUNC_VARIES, None
    return "", None


def _kink(column: Refinement, row: int) -> tuple[str, NumericalIssue]:
    """The clause about a kink at the inputs, or next to them, and its name."""
    left, right = column.left[row].item(), column.right[row].item()
    digits = digits_apart(left, right)
    sides = f"{left:.{digits}g} (left) and {right:.{digits}g} (right)"
    if bool(column.bent[row]):
        return f"func has a kink at the inputs: the one-sided derivatives are {sides}", "kink"
    return (
        f"func has a kink next to the inputs: with steps of eps, the one-sided derivatives are {sides}; they are "
        "closer to each other with much smaller steps",
        "not converged",
    )


def _is_steep(column: Refinement, row: int) -> bool:
    """Whether one-sided derivatives differ only because of curvature: then their mean is not the refined value."""
    mean = (column.left[row].item() + column.right[row].item()) / 2
    value = column.values[row].item()
    return not abs(mean - value) <= 1e-3 * abs(column.left[row].item() - column.right[row].item())
