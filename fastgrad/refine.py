"""Re-measuring entries that fail at eps: Ridders extrapolation over many steps, with an error estimate.

Sources: Ridders, "Accurate computation of F'(x) and F'(x) F''(x)", Advances in Engineering Software
(1982); Richardson extrapolation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fastgrad._torch import phase
from fastgrad.coordinates import block_with
from fastgrad.problem import Problem
from fastgrad.report import Difference, Entry, Settings, Tolerances, Trouble, modulus
from fastgrad.tolerances import spacing

LARGEST_STEP = 1e-2
"""Relative to max(|x|, 1)."""

SMALLEST_STEP = 1e-13
"""Relative to |x|; at least 4 ulp of x."""

RATIO = 4.0
ORDER = 4
STRAIGHT = 0.2
"""Slopes at eps are of one straight line where they differ by at most this share of them, and of their distance to
the refined one."""

FINEST = 4
"""Steps whose scatter measures the noise of func."""

MOST_OTHERS = 7
"""Wrong entries to tell of beside the worst."""

MOST_ELEMENTS = 32
"""Input elements, moved together with that of the worst entry, to look for others in."""


@dataclass(frozen=True)
class Refinement:
    """Entries of the numerical Jacobian, refined.

    Attributes
    ----------
    values, errors
        The derivatives and how far they may be off: float64, shape (rows,).
    converged
        Whether the error is within the tolerance: bool, shape (rows,).
    left, right
        One-sided derivatives with the step eps: float64, shape (rows,).
    doubtful
        Whether func goes straight through x with another slope where steps are eps and larger, so that
        the values come from its rounding: bool, shape (rows,).
    curved
        Whether the one-sided derivatives come closer to each other at smaller steps: bool, shape (rows,).
    steps, changes, widths
        What was measured, large steps first: how far the coordinate was moved to either side, by how much
        func changed in between, and what that is divided by; zero where no step was taken. Float64, shape
        (rows, steps).
    """

    values: Tensor
    errors: Tensor
    converged: Tensor
    left: Tensor
    right: Tensor
    doubtful: Tensor
    curved: Tensor
    steps: Tensor
    changes: Tensor
    widths: Tensor

    def of_rows(self, rows: slice) -> Refinement:
        """That of some of the rows."""
        return Refinement(*(getattr(self, field.name)[rows] for field in fields(self)))

    def is_kink(self, row: int, atol: float, rtol: float) -> bool:
        """Whether the one-sided derivatives differ by more than the tolerance, at smaller steps, too."""
        left, right = self.left[row].item(), self.right[row].item()
        if bool(self.curved[row]):
            return False
        return abs(left - right) > 2 * (atol + rtol * max(abs(left), abs(right)))


def refine(
    problem: Problem,
    coordinates: Sequence[int],
    rows: Sequence[Tensor],
    record_graph: bool,
    eps: float,
    atol: float,
    rtol: float,
) -> Refinement:
    """Derivatives of some outputs with respect to one coordinate each, over steps from large to small.

    An estimate from some steps counts only if all smaller ones agree with it to within func's own
    noise: a large step would make a rounding look like the identity.

    Parameters
    ----------
    coordinates
        In [0, n), of inputs that take one step. They are moved together: no output may depend on two of them.
    rows
        Coordinates of outputs, for each of these: int64, shape (rows,); end to end in the result.
    """
    all_rows = torch.cat(list(rows))
    counts = torch.tensor([own.numel() for own in rows], device=all_rows.device)
    owner = torch.arange(len(rows), device=all_rows.device).repeat_interleave(counts)
    where = torch.tensor(coordinates, device=problem.device)
    x = problem.coordinates()[where].abs()
    ulps = [spacing(block_with(problem.inputs, coordinate).tensor.dtype) for coordinate in coordinates]
    ulp = torch.tensor(ulps, dtype=torch.float64, device=x.device)
    smallest = torch.maximum(SMALLEST_STEP * x, 4 * ulp * x.clamp(min=2.0**-40))
    displacement = torch.zeros(problem.n, dtype=torch.float64, device=problem.device)
    # Like all other values of a copy with all elements specified, where an input is sparse.
    base = problem.evaluate(record_graph, displacement)[all_rows]
    step = LARGEST_STEP * x.clamp(min=1.0)
    steps, widths, differences, bends = [], [], [], []
    while bool((step >= smallest).any()):
        displacement[where] = torch.where(step >= smallest, step, 0.0)
        try:
            plus, minus = (problem.evaluate(record_graph, displacement, sign)[all_rows] for sign in (1.0, -1.0))
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # outside of func's domain, say: a smaller step may be inside
            step = step / RATIO
            continue
        steps.append(step[owner])
        # Zero where a coordinate takes no step as small as this.
        widths.append(problem.realized_width(displacement, 1.0)[where][owner])
        differences.append(plus - minus)
        bends.append((plus - base) + (minus - base))
        step = step / RATIO
    left, right = _one_sided(problem, where, owner, all_rows, base, record_graph, eps)
    if not steps:
        missing = torch.full_like(base, torch.nan)
        no = torch.zeros_like(base, dtype=torch.bool)
        nothing = base.new_empty(base.numel(), 0)
        return Refinement(missing, missing.abs(), no, left, right, no, no, nothing, nothing, nothing)
    width, change, every_step = (torch.stack(measured) for measured in (widths, differences, steps))
    taken = width != 0
    slopes = torch.where(taken, change / width, 0.0)
    values, errors = extrapolate(slopes, width, _rounding(problem, all_rows, base, x[owner]), atol, rtol)
    # Not "errors > allowed": a NaN has not converged.
    converged = errors <= atol + rtol * values.abs()
    doubtful = torch.zeros_like(converged)
    wider = (every_step >= RATIO * eps * block_with(problem.inputs, coordinates[0]).step).sum(0) - 1
    if bool((wider >= 0).all()):
        # Next to a kink the two sides differ; under curvature, they or the wider step do.
        middle = (left + right) / 2
        apart = (middle - values).abs()
        bent = torch.maximum((left - right).abs(), (slopes.gather(0, wider.unsqueeze(0))[0] - middle).abs())
        straight = bent <= STRAIGHT * torch.minimum(apart, middle.abs())
        doubtful = straight & (apart > atol + rtol * values.abs())
    own_eps = eps * block_with(problem.inputs, coordinates[0]).step
    curved = _is_curved(torch.stack(bends), every_step, taken, (right - left).abs(), own_eps)
    return Refinement(values, errors, converged, left, right, doubtful, curved, every_step.t(), change.t(), width.t())


def _is_curved(bends: Tensor, steps: Tensor, taken: Tensor, at_eps: Tensor, eps: float) -> Tensor:
    """Whether one-sided derivatives come together as steps shrink; f(x + h) - 2 f(x) + f(x - h) over h tells.

    bends, steps, taken: shape (steps, rows), large steps first; at_eps: shape (rows,).
    """
    small = taken & (steps <= eps / 8)
    first = small.to(torch.int8).argmax(0, keepdim=True)
    smaller = (bends / steps).gather(0, first)[0].abs()
    return small.any(0) & (smaller <= at_eps / 2)


def _rounding(problem: Problem, rows: Tensor, base: Tensor, x: Tensor) -> Tensor:
    """One ulp of each output or, where that is larger, of |x|, its coordinate's, or of 1.

    An output near zero may be what two numbers of order 1 leave: at x = 0, exp(x) - 1 does not move for
    steps below 1e-16, and no derivative of zero follows.
    """
    ulp = torch.empty(problem.m, dtype=torch.float64, device=base.device)
    for block in problem.outputs:
        ulp[block.first : block.first + block.size] = spacing(block.tensor.dtype)
    return ulp[rows] * torch.maximum(base.abs(), x.clamp(min=1.0))


def _one_sided(
    problem: Problem, where: Tensor, owner: Tensor, rows: Tensor, base: Tensor, record_graph: bool, eps: float
) -> tuple[Tensor, Tensor]:
    direction = torch.zeros(problem.n, dtype=torch.float64, device=problem.device)
    direction[where] = 1.0
    displacement = problem.displacement(direction, eps)
    step = displacement[where][owner]
    try:
        plus, minus = (problem.evaluate(record_graph, displacement, sign)[rows] for sign in (1.0, -1.0))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # one side is outside of func's domain
        missing = torch.full_like(base, torch.nan)
        return missing, missing
    return (base - minus) / step, (plus - base) / step


def extrapolate(slopes: Tensor, widths: Tensor, rounding: Tensor, atol: float, rtol: float) -> tuple[Tensor, Tensor]:
    """The best estimate of each row and its error.

    Parameters
    ----------
    slopes, widths
        Plain differences and what they were divided by: shape (steps, rows), large steps first. A step
        that a row did not take, one of the last, has width zero.
    """
    taken = widths != 0
    finest = taken & (taken.sum(0) - taken.cumsum(0) < FINEST)
    values = torch.full_like(rounding, torch.nan)
    errors = torch.full_like(rounding, torch.inf)
    previous: list[Tensor] = []
    for s in range(len(widths)):
        current = [slopes[s]]
        for k in range(1, min(s, ORDER) + 1):
            factor = RATIO ** (2 * k)
            current.append(current[k - 1] + (current[k - 1] - previous[k - 1]) / (factor - 1))
        for k, estimate in enumerate(current):
            if k:
                error = torch.maximum((estimate - current[k - 1]).abs(), (estimate - previous[k - 1]).abs())
            elif s:
                # Where no smaller step moves func, a kink lies between the larger step and this one.
                still = (slopes[s:] == 0).all(0)
                error = torch.where(still, 0.0, (estimate - previous[0]).abs())
            else:
                continue
            # In units of func's values, over all steps from this one down.
            off = torch.where(taken[s:], ((slopes[s:] - estimate) * widths[s:]).abs(), 0.0)
            noise = torch.maximum(rounding, torch.where(finest[s:], off, 0.0).amax(0))
            error = error + noise / widths[s]
            agrees = (off <= 8 * torch.maximum(noise, error * widths[s:])).all(0)
            closer = error / (atol + rtol * estimate.abs()) < errors / (atol + rtol * values.abs().nan_to_num())
            better = taken[s] & agrees & closer
            values = torch.where(better, estimate, values)
            errors = torch.where(better, error, errors)
        previous = current
    return values, errors


@dataclass(frozen=True)
class Suspects:
    """Entries of one input element's columns that differ at eps.

    Attributes
    ----------
    inputs
        The coordinates of the element: two where they make one complex entry.
    outputs
        Coordinates of outputs: int64, shape (entries, 1 or 2), two where they make one complex entry.
    analytical, numerical
        The entries, the latter at eps: complex128, shape (entries,).
    input_index
        The element.
    output_indices
        One an entry.
    """

    inputs: tuple[int, ...]
    outputs: Tensor
    analytical: Tensor
    numerical: Tensor
    input_index: tuple[int, ...]
    output_indices: Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Survivor:
    """An entry that is wrong also at other steps, or whose derivative no step settles; and what to say of it.

    convergence: what was measured of it, large steps first. others: more such entries, of those that were
    re-measured with it.
    """

    entry: Entry
    detail: str
    trouble: Trouble | None = None
    convergence: tuple[Difference, ...] = ()
    others: tuple[Entry, ...] = ()


@phase("re-measuring")
def surviving(problem: Problem, record_graph: bool, settings: Settings, batch: Sequence[Suspects]) -> Survivor | None:
    """The worst of some suspected entries, if any is wrong after re-measuring.

    batch: of elements of one input that share no output, the worst first; they are moved together.
    """
    rows = [suspects.outputs.reshape(-1) for suspects in batch]
    own = settings.of(block_with(problem.inputs, batch[0].inputs[0]).index)
    columns = [
        refine(problem, coordinates, rows, record_graph, settings.eps, own.atol, own.rtol)
        for coordinates in zip(*(suspects.inputs for suspects in batch), strict=True)
    ]
    first = 0
    survivor: Survivor | None = None
    others: list[Entry] = []
    elements = MOST_ELEMENTS
    for suspects, outputs in zip(batch, rows, strict=True):
        mine = slice(first, first + outputs.numel())
        found = _worst([column.of_rows(mine) for column in columns], suspects, own)
        if found is not None:
            others += [found.entry] * (survivor is not None) + list(found.others)
            survivor = survivor or found
        elements -= survivor is not None
        if len(others) >= MOST_OTHERS or elements <= 0:
            break
        first = mine.stop
    return replace(survivor, others=tuple(others[:MOST_OTHERS])) if survivor is not None else None


def _worst(columns: list[Refinement], suspects: Suspects, own: Tolerances) -> Survivor | None:
    """The worst entry of one input element that is wrong, given its one or two columns."""
    atol, rtol = own.atol, own.rtol
    shape = suspects.outputs.shape
    values, errors = (
        _entries([getattr(column, name).reshape(shape) for column in columns]) for name in ("values", "errors")
    )
    converged = torch.stack([column.converged.reshape(shape).all(1) for column in columns]).all(0)
    difference = (suspects.analytical - values).abs()
    allowed = atol + rtol * values.abs()
    doubtful = torch.stack([column.doubtful.reshape(shape).any(1) for column in columns]).any(0)
    # What is left of func below its own rounding excuses no gradient.
    converged &= ~(doubtful & (difference <= allowed))
    wrong = ~(converged & (difference <= allowed))
    if not bool(wrong.any()):
        return None
    # Converged entries first: they are sure. A NaN is never sure.
    excess = torch.where(wrong, torch.where(converged, difference / allowed, 0.0), -1.0)
    worst_first = excess.argsort(descending=True, stable=True)
    order = [int(which) for which in worst_first[: min(int(wrong.sum()), 1 + MOST_OTHERS)]]  # subclasses have no tolist
    real = len(suspects.inputs) == shape[1] == 1
    entries = []
    for which in order:
        sure = bool(converged[which])
        numerical = complex(values[which] if sure else suspects.numerical[which])
        analytical = complex(suspects.analytical[which])
        entry = Entry(
            suspects.output_indices[which],
            suspects.input_index,
            analytical.real if real else analytical,
            numerical.real if real else numerical,
            atol + rtol * modulus(numerical),
            float(errors[which].abs()) if sure else None,
        )
        entries.append(entry)
    worst = order[0]
    trouble = _trouble(columns, suspects, worst, bool(converged[worst]), own)
    return Survivor(entries[0], *trouble, _convergence(columns, shape, worst), tuple(entries[1:]))


def _convergence(columns: list[Refinement], shape: torch.Size, entry: int) -> tuple[Difference, ...]:
    """What was measured of an entry; the steps are those of its first coordinate."""
    of_entry = slice(entry * shape[1], (entry + 1) * shape[1])
    own = [column.of_rows(of_entry) for column in columns]
    measured = []
    for s in range(min(column.steps.shape[1] for column in own)):
        if all(bool((column.widths[:, s] != 0).all()) for column in own):
            changes = [column.changes[:, s].reshape(1, -1) for column in own]
            estimates = [(column.changes[:, s] / column.widths[:, s]).reshape(1, -1) for column in own]
            change, estimate = (complex(_entries(values)[0]) for values in (changes, estimates))
            if len(own) == shape[1] == 1:
                change, estimate = change.real, estimate.real
            measured.append(Difference(float(own[0].steps[0, s]), change, estimate))
    return tuple(measured)


def _entries(columns: list[Tensor]) -> Tensor:
    """Complex entries of real ones, shape (entries, 1 or 2) each: (re, im) are two columns, or side by side."""
    if len(columns) == 2:
        return torch.complex(columns[0][:, 0], columns[1][:, 0])
    (column,) = columns
    return torch.complex(column[:, 0], column[:, 1] if column.shape[1] == 2 else torch.zeros_like(column[:, 0]))


def _trouble(
    columns: list[Refinement], suspects: Suspects, worst: int, sure: bool, own: Tolerances
) -> tuple[str, Trouble | None]:
    """What is special about the worst entry's derivative, as a clause and by name."""
    width = suspects.outputs.shape[1]
    for column in columns:
        for row in range(worst * width, (worst + 1) * width):
            if column.is_kink(row, own.atol, own.rtol) and not _is_steep(column, row):
                sides = f"{column.left[row].item():.6g} (left) and {column.right[row].item():.6g} (right)"
                return f"a kink: the one-sided derivatives are {sides}", "kink"
    at_eps = suspects.numerical[worst].abs().item()
    rows = slice(worst * width, (worst + 1) * width)
    if not any(bool(column.values[rows].any()) for column in columns) and at_eps > own.atol:
        return (
            f"func does not move at all for steps much below eps, and by {at_eps:.3g} x eps at eps: "
            "is something inside computed in a lower precision?",
            "low precision",
        )
    if any(bool(column.doubtful[rows].any()) for column in columns):
        return (
            "steps much below eps give another derivative, though func goes straight through there: is something "
            "inside computed in a lower precision?",
            "low precision",
        )
    if not sure:
        return (
            "the numerical derivative did not converge over steps from 1e-2 down to rounding: func is not smooth there",
            "not converged",
        )
    return "", None


def _is_steep(column: Refinement, row: int) -> bool:
    """Whether one-sided derivatives differ by curvature alone: their mean is not the refined value."""
    mean = (column.left[row].item() + column.right[row].item()) / 2
    value = column.values[row].item()
    return not abs(mean - value) <= 1e-3 * abs(column.left[row].item() - column.right[row].item())
