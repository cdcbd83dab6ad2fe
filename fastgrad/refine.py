"""Re-measuring entries that fail at eps: Ridders extrapolation over many steps, with an error estimate.

Sources: Ridders, "Accurate computation of F'(x) and F'(x) F''(x)", Advances in Engineering Software
(1982); Richardson extrapolation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastgrad._torch import phase
from fastgrad.coordinates import Block, block_with
from fastgrad.memory import OUT_OF_MEMORY
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

WIDER = 64.0
"""Up to so many times eps func must go straight, for its slope at eps to count."""

ROUNDED = 2.0**-6
"""What func may round inside, over its movement at eps: more than this, and what it rounds to is func itself."""

FINEST = 4
"""Steps whose scatter measures the noise of func."""

TOGETHER = 1 << 11
"""Entries whose estimates, some 200 each, are compared at a time."""

UNRESOLVED = 64.0
"""What the derivative of an entry may be off, in units of its tolerance, for the entry to be left open: rounding beside
a kink. Beyond, the derivative did not converge."""

MOST_OTHERS = 7
"""Wrong entries to tell of beside the worst."""


@dataclass(frozen=True)
class Refinement:
    """Entries of the numerical Jacobian, refined.

    Attributes
    ----------
    values, errors
        The derivatives and how far they may be off: float64, shape (entries,).
    converged
        Whether the error is within the tolerance: bool, shape (entries,).
    left, right
        One-sided derivatives with the step eps: float64, shape (entries,).
    doubtful
        Whether func goes straight through x with another slope where steps are eps and larger, so that
        the values come from its rounding: bool, shape (entries,).
    curved
        Whether the one-sided derivatives come closer to each other at smaller steps: bool, shape (entries,).
    steps, changes, widths
        What was measured, large steps first: how far the coordinate was moved to either side, by how much
        func changed in between, and what that is divided by; zero where no step was taken. Float64, shape
        (entries, steps).
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

    def of(self, entries: slice) -> Refinement:
        """That of some of the entries."""
        return Refinement(*(getattr(self, field.name)[entries] for field in fields(self)))

    def is_kink(self, entry: int, atol: float, rtol: float) -> bool:
        """Whether the one-sided derivatives differ by more than the tolerance, at smaller steps, too."""
        left, right = self.left[entry].item(), self.right[entry].item()
        if bool(self.curved[entry]):
            return False
        return abs(left - right) > 2 * (atol + rtol * max(abs(left), abs(right)))


@dataclass(frozen=True)
class Measured:
    """What func did when coordinates, of inputs that take one step, were moved together, by steps from large to small.

    Attributes
    ----------
    rounding
        What it may do to the outputs: float64, shape (entries,).
    left, right
        One-sided derivatives with the step eps: float64, shape (entries,).
    eps
        That step.
    steps, widths, changes, bends
        How far the coordinate was moved to either side; what is between the two points, zero where it takes no
        step as small as this; f(x + h) - f(x - h); f(x + h) - 2 f(x) + f(x - h): shape (steps, entries).
    """

    rounding: Tensor
    left: Tensor
    right: Tensor
    eps: float
    steps: Tensor
    widths: Tensor
    changes: Tensor
    bends: Tensor


def refine(
    problem: Problem, inputs: Tensor, outputs: Tensor, record_graph: bool, eps: float, atol: float, rtol: float
) -> Refinement:
    """Derivatives of some outputs with respect to one coordinate each, over steps from large to small.

    An estimate from some steps counts only if all smaller ones agree with it to within func's own
    noise: a large step would make a rounding look like the identity.

    Parameters
    ----------
    inputs, outputs
        Coordinates in [0, n), of inputs that take one step, and in [0, m): int64, shape (entries,). They are moved
        together: no output here may depend on two of them.
    """
    return settled([measured(problem, inputs, outputs, record_graph, eps)], atol, rtol)


def measured(problem: Problem, inputs: Tensor, outputs: Tensor, record_graph: bool, eps: float) -> Measured:
    """The evaluations behind `refine`: two a step, and three; at most some 90."""
    where, owner = torch.unique(inputs, return_inverse=True)
    block = block_with(problem.inputs, int(where[0]))
    x = problem.coordinates()[where].abs()
    ulp = spacing(block.tensor.dtype)
    smallest = torch.maximum(SMALLEST_STEP * x, 4 * ulp * x.clamp(min=2.0**-40))
    displacement = torch.zeros(problem.n, dtype=torch.float64, device=problem.device)
    # Like all other values of a copy with all elements specified, where an input is sparse.
    base = problem.evaluate(record_graph, displacement)[outputs]
    # An infinite x takes no step, nor does a NaN.
    step = torch.where(x.isfinite(), LARGEST_STEP * x.clamp(min=1.0), 0.0)
    steps, widths, changes, bends = [], [], [], []
    while bool((step >= smallest).any()):
        displacement[where] = torch.where(step >= smallest, step, 0.0)
        try:
            plus, minus = (problem.evaluate(record_graph, displacement, sign)[outputs] for sign in (1.0, -1.0))
        except OUT_OF_MEMORY:
            raise
        except Exception:  # outside of func's domain, say: a smaller step may be inside
            step = step / RATIO
            continue
        steps.append(step[owner])
        widths.append(problem.realized_width(displacement, 1.0)[where][owner])
        changes.append(plus - minus)
        bends.append((plus - base) + (minus - base))
        step = step / RATIO
    left, right = _one_sided(problem, where, owner, outputs, base, record_graph, eps)
    found = [torch.stack(some) if some else base.new_empty(0, base.numel()) for some in (steps, widths, changes, bends)]
    rounding = _rounding(problem, outputs, base, x[owner], found[2])
    return Measured(rounding, left, right, eps * block.step, *found)


def settled(found: Sequence[Measured], atol: float, rtol: float) -> Refinement:
    """The derivatives that measurements, of inputs that take one step, tell; end to end."""
    most = max(len(one.steps) for one in found)
    rounding, left, right = (torch.cat([getattr(one, name) for one in found]) for name in ("rounding", "left", "right"))
    steps, widths, changes, bends = (
        torch.cat([pad(getattr(one, name), (0, 0, 0, most - len(one.steps))) for one in found], 1)
        for name in ("steps", "widths", "changes", "bends")
    )
    taken = widths != 0
    slopes = torch.where(taken, changes / widths, 0.0)
    values, errors = extrapolate(slopes, widths, rounding, atol, rtol)
    eps = found[0].eps
    doubtful = _is_rounded(slopes, steps, left, right, values, eps, atol, rtol)
    some = doubtful.nonzero().reshape(-1)
    if some.numel():
        # func's rounding is what smaller steps find beside its slope at eps, where that is little.
        slope = (left + right)[some] / 2
        finer = torch.where(steps[:, some] <= eps, widths[:, some], 0.0)
        noise = ((slopes[:, some] - slope) * finer).abs().amax(0)
        little = noise <= ROUNDED * 2 * eps * slope.abs()
        some, noise = some[little], noise[little]
        better = extrapolate(slopes[:, some], widths[:, some], torch.maximum(noise, rounding[some]), atol, rtol)
        sure = better[1] <= atol + rtol * better[0].abs()
        some = some[sure]
        values[some], errors[some] = (result[sure] for result in better)
        doubtful[some] = False
    # Not "errors > allowed": a NaN has not converged.
    converged = errors <= atol + rtol * values.abs()
    curved = _is_curved(bends, steps, taken, (right - left).abs(), eps)
    return Refinement(values, errors, converged, left, right, doubtful, curved, steps.t(), changes.t(), widths.t())


def _is_rounded(
    slopes: Tensor,
    steps: Tensor,
    left: Tensor,
    right: Tensor,
    values: Tensor,
    eps: float,
    atol: float,
    rtol: float,
) -> Tensor:
    """Whether func goes straight through x at eps and larger steps, with another slope than the values."""
    wider = (steps >= RATIO * eps) & (steps <= WIDER * eps)
    # Next to a kink the two sides differ; under curvature, they or the wider steps do.
    middle = (left + right) / 2
    apart = (middle - values).abs().nan_to_num(torch.inf)  # a value that is open excuses nothing
    bent = torch.where(wider, (slopes - middle).abs(), (left - right).abs())
    straight = (bent <= STRAIGHT * torch.minimum(apart, middle.abs())).all(0) & wider.any(0)
    return straight & (apart > atol + rtol * values.abs().nan_to_num())


def _is_curved(bends: Tensor, steps: Tensor, taken: Tensor, at_eps: Tensor, eps: float) -> Tensor:
    """Whether one-sided derivatives come together as steps shrink; f(x + h) - 2 f(x) + f(x - h) over h tells.

    bends, steps, taken: shape (steps, rows), large steps first; at_eps: shape (rows,).
    """
    if not len(steps):
        return torch.zeros_like(at_eps, dtype=torch.bool)
    small = taken & (steps <= eps / 8)
    first = small.to(torch.int8).argmax(0, keepdim=True)
    smaller = (bends / steps).gather(0, first)[0].abs()
    return small.any(0) & (smaller <= at_eps / 2)


def _rounding(problem: Problem, rows: Tensor, base: Tensor, x: Tensor, changes: Tensor) -> Tensor:
    """One ulp of each output or, where that is larger, of |x|, its coordinate's, or of 1; not more than func shows.

    An output near zero may be what two numbers of order 1 leave: at x = 0, exp(x) - 1 does not move for
    steps below 1e-16, and no derivative of zero follows. But then it changes by multiples of 1e-16 only.

    Parameters
    ----------
    changes
        Of the outputs, for steps of many sizes: float64, shape (steps, entries).
    """
    ulp = torch.empty(problem.m, dtype=torch.float64, device=base.device)
    for block in problem.outputs:
        ulp[block.first : block.first + block.size] = spacing(block.tensor.dtype)
    mantissa, exponent = torch.frexp(torch.where(changes.isfinite(), changes, 0.0))
    digits = (mantissa.abs() * 2.0**53).to(torch.int64)
    quantum = torch.ldexp((digits & -digits).to(torch.float64), exponent - 53)  # the last binary digit that is set
    inside = ulp[rows] * x.clamp(min=1.0)
    for one in quantum:
        inside = torch.where(one != 0, torch.minimum(inside, 2 * one), inside)
    return torch.maximum(ulp[rows] * base.abs(), inside)


def _one_sided(
    problem: Problem, where: Tensor, owner: Tensor, rows: Tensor, base: Tensor, record_graph: bool, eps: float
) -> tuple[Tensor, Tensor]:
    direction = torch.zeros(problem.n, dtype=torch.float64, device=problem.device)
    direction[where] = 1.0
    displacement = problem.displacement(direction, eps)
    step = displacement[where][owner]
    try:
        plus, minus = (problem.evaluate(record_graph, displacement, sign)[rows] for sign in (1.0, -1.0))
    except OUT_OF_MEMORY:
        raise
    except Exception:  # one side is outside of func's domain
        missing = torch.full_like(base, torch.nan)
        return missing, missing
    return (base - minus) / step, (plus - base) / step


def extrapolate(slopes: Tensor, widths: Tensor, rounding: Tensor, atol: float, rtol: float) -> tuple[Tensor, Tensor]:
    """The best estimate of each entry and its error; NaN, infinite, where there is none.

    Parameters
    ----------
    slopes, widths
        Plain differences and what they were divided by: shape (steps, entries), large steps first. A step
        that an entry did not take, one of the last, has width zero.
    """
    values = torch.full_like(rounding, torch.nan)
    errors = torch.full_like(rounding, torch.inf)
    if len(widths):
        for first in range(0, rounding.numel(), TOGETHER):
            own = slice(first, first + TOGETHER)
            values[own], errors[own] = _extrapolated(slopes[:, own], widths[:, own], rounding[own], atol, rtol)
    return values, errors


def _extrapolated(slopes: Tensor, widths: Tensor, rounding: Tensor, atol: float, rtol: float) -> tuple[Tensor, Tensor]:
    values = torch.full_like(rounding, torch.nan)
    errors_of_values = torch.full_like(rounding, torch.inf)
    taken = widths != 0
    # Of every step and order: shape (steps, ORDER + 1, entries); an estimate of order k rests on k larger steps.
    shape = len(widths), ORDER + 1, rounding.numel()
    estimates, differences = slopes.new_full(shape, torch.nan), slopes.new_full(shape, torch.nan)
    estimates[:, 0] = slopes
    # Where no smaller step moves func, a kink lies between the larger step and this one.
    still = (slopes == 0).flip(0).cummin(0).values.flip(0)
    differences[1:, 0] = torch.where(still[1:], 0.0, slopes.diff(dim=0).abs())
    for k in range(1, min(len(widths) - 1, ORDER) + 1):
        coarse, fine = estimates[k - 1 : -1, k - 1], estimates[k:, k - 1]
        estimates[k:, k] = fine + (fine - coarse) / (RATIO ** (2 * k) - 1)
        differences[k:, k] = torch.maximum((estimates[k:, k] - fine).abs(), (estimates[k:, k] - coarse).abs())
    # In units of func's values: how the finest steps scatter around a line of their own.
    finest = taken & (taken.sum(0) - taken.cumsum(0) < FINEST)
    width = torch.where(finest, widths, 0.0)
    line = (slopes * width.square()).sum(0) / width.square().sum(0)
    noise = torch.maximum(rounding, ((slopes - line) * width).abs().nan_to_num(0.0).amax(0))
    errors = differences + (noise / widths).unsqueeze(1)
    score = errors / (atol + rtol * estimates.abs())
    score = torch.where(taken.unsqueeze(1) & score.isfinite(), score, torch.inf).reshape(-1, rounding.numel())
    # The best one that all smaller steps agree with: mostly the first that is looked at.
    open_, place = (torch.arange(size, device=score.device) for size in (rounding.numel(), len(widths)))
    while open_.numel():
        least, best = score[:, open_].min(0)
        open_, best = open_[least.isfinite()], best[least.isfinite()]
        step, order = best // (ORDER + 1), best % (ORDER + 1)
        where = step, order, open_
        estimate, error, width = estimates[where], errors[where], widths[:, open_]
        off = ((slopes[:, open_] - estimate) * width).abs()
        # In slopes at smaller steps the error is no larger: in func's values it shrinks with them.
        near = off <= 8 * torch.maximum(noise[open_], error * width)
        agrees = (near | (place.unsqueeze(1) < step) | (width == 0)).all(0)
        settled_now = open_[agrees]
        values[settled_now], errors_of_values[settled_now] = estimate[agrees], error[agrees]
        score[best[~agrees], open_[~agrees]] = torch.inf
        open_ = open_[~agrees]
    return values, errors_of_values


@dataclass(frozen=True)
class Suspects:
    """Entries of one output and one input that differ at eps, that with the largest difference first.

    Attributes
    ----------
    inputs, outputs
        Coordinates: int64, shape (entries, 1 or 2), two where they make one complex entry.
    analytical, numerical
        The entries, the latter at eps: complex128, shape (entries,).
    input_elements, output_elements
        Numbers of the elements among those that have coordinates: int64, shape (entries,).
    """

    inputs: Tensor
    outputs: Tensor
    analytical: Tensor
    numerical: Tensor
    input_elements: Tensor
    output_elements: Tensor

    def of(self, entries: Tensor) -> Suspects:
        """Some of the entries, by number or mask."""
        return Suspects(*(getattr(self, field.name)[entries] for field in fields(self)))

    def entry(
        self, problem: Problem, which: int, own: Tolerances, refined: complex | None = None, error: float | None = None
    ) -> Entry:
        """One of them for a report; refined: its numerical value, known to within an error."""
        output, block = self.blocks(problem, which)
        numerical = complex(self.numerical[which]) if refined is None else refined
        analytical = complex(self.analytical[which])
        is_real = self.inputs.shape[1] == self.outputs.shape[1] == 1
        return Entry(
            output.element_index(int(self.output_elements[which])),
            block.element_index(int(self.input_elements[which])),
            analytical.real if is_real else analytical,
            numerical.real if is_real else numerical,
            own.atol + own.rtol * modulus(numerical),
            error,
        )

    def blocks(self, problem: Problem, which: int) -> tuple[Block, Block]:
        """The output and the input of one of them."""
        output, input_ = int(self.outputs[which, 0]), int(self.inputs[which, 0])
        return block_with(problem.outputs, output), block_with(problem.inputs, input_)


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


def not_finite(problem: Problem, record_graph: bool, settings: Settings, suspects: Suspects) -> Survivor | None:
    """The first of some suspected entries that no step can settle: func, x or the analytical one is not finite."""
    base = problem.evaluate(record_graph, torch.zeros(problem.n, dtype=torch.float64, device=problem.device))
    values, x = base[suspects.outputs], problem.coordinates()[suspects.inputs]
    of_func, of_input = ~values.isfinite().all(1), ~x.isfinite().all(1)
    of_backward = ~suspects.analytical.isfinite()
    wrong = of_func | of_input | of_backward
    if not bool(wrong.any()):
        return None
    # Of the many that one element may spoil, one of that element.
    order = (of_func.int() + of_input.int() + of_backward.int()).argsort(descending=True, stable=True)
    worst = int(order[0])
    output, block = suspects.blocks(problem, worst)
    own = settings.of(block.index)
    entries = [suspects.entry(problem, int(i), own) for i in order[: min(int(wrong.sum()), 1 + MOST_OTHERS)]]
    entry = entries[0]
    where = f"input {block.index} at {list(entry.input_index)} is {_number(x[worst])}"
    if bool(of_func[worst]):
        detail = f"func is not finite: output {output.index} at {list(entry.output_index)} is {_number(values[worst])}"
        detail += f", and {where}"
    elif bool(of_input[worst]):
        detail = f"{where}: it takes no step"
    else:
        value = complex(suspects.analytical[worst])
        detail = f"the analytical derivative is not finite: {value if value.imag else value.real:g}, where {where}"
    return Survivor(entry, detail, "not finite", (), tuple(entries[1:]))


def _number(coordinates: Tensor) -> str:
    """A value of one or two coordinates in words."""
    numbers = coordinates.tolist()
    return f"{numbers[0] if len(numbers) == 1 else complex(*numbers):.6g}"


@phase("re-measuring")
def surviving(
    problem: Problem, record_graph: bool, settings: Settings, groups: Sequence[Suspects]
) -> tuple[Survivor | None, Tensor, float]:
    """The worst of some suspected entries, if any is wrong after re-measuring; and which ones are: bool, end to end.

    Last, what those may be off that agree as far as their derivatives are known, and are not known to the tolerance.
    groups: of one input; the entries of each are moved together.
    """
    own = settings.of(block_with(problem.inputs, int(groups[0].inputs[0, 0])).index)
    columns = []
    for part in range(groups[0].inputs.shape[1]):
        found = [
            measured(
                problem,
                group.inputs[:, part].repeat_interleave(group.outputs.shape[1]),
                group.outputs.reshape(-1),
                record_graph,
                settings.eps,
            )
            for group in groups
        ]
        columns.append(settled(found, own.atol, own.rtol))
    suspects = Suspects(*(torch.cat([getattr(group, field.name) for group in groups]) for field in fields(Suspects)))
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
    agrees = difference <= allowed
    off = errors.abs()
    is_open = agrees & ~converged & ~doubtful & (off <= UNRESOLVED * allowed)
    for which in map(int, is_open.nonzero().reshape(-1)):  # subclasses have no tolist
        rows = range(which * shape[1], (which + 1) * shape[1])
        is_open[which] = all(column.is_kink(row, atol, rtol) for column in columns for row in rows)
    unresolved = float(off[is_open].amax()) if bool(is_open.any()) else 0.0
    wrong = ~(agrees & (converged | is_open))
    if not bool(wrong.any()):
        return None, wrong, unresolved
    # Converged entries first: they are sure. A NaN is never sure.
    excess = torch.where(wrong, torch.where(converged, difference / allowed, 0.0), -1.0)
    worst_first = excess.argsort(descending=True, stable=True)
    order = [int(which) for which in worst_first[: min(int(wrong.sum()), 1 + MOST_OTHERS)]]  # subclasses have no tolist
    entries = []
    for which in order:
        refined = (complex(values[which]), float(errors[which].abs())) if converged[which] else ()
        entries.append(suspects.entry(problem, which, own, *refined))
    worst = order[0]
    trouble = _trouble(columns, suspects, worst, bool(converged[worst]), own)
    survivor = Survivor(entries[0], *trouble, _convergence(columns, shape, worst), tuple(entries[1:]))
    return survivor, wrong, unresolved


def _convergence(columns: list[Refinement], shape: torch.Size, entry: int) -> tuple[Difference, ...]:
    """What was measured of an entry; the steps are those of its first coordinate."""
    of_entry = slice(entry * shape[1], (entry + 1) * shape[1])
    own = [column.of(of_entry) for column in columns]
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
