"""Fast mode: compares a sketch (random sums of entries), locates errors and confirms each by a single entry."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from fastgrad.core.errors import raise_unless_of_func
from fastgrad.core.native import Layout, ops
from fastgrad.core.phases import phase
from fastgrad.core.precision import ROUNDING, excess
from fastgrad.core.random import SKETCH_DIRECTIONS, direction
from fastgrad.core.tensors import differ, largest
from fastgrad.engines.blocks import MAX_AT_ONCE
from fastgrad.engines.plan import EXACT_CALLS, detection_limit, sketch_size
from fastgrad.engines.sketch import (
    NOISE_SHARE,
    Cotangent,
    Differences,
    Sketch,
    all_count_fully,
    contradicts,
    cotangents,
    directional_differences,
    func_varies,
    imaginary_parts,
    residual_row,
    rounded_rows,
    weights,
)
from fastgrad.engines.small_sketch import REPEATED, RUNS
from fastgrad.problem.coordinates import block_with
from fastgrad.problem.first_look import values_vary
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Certificate
from fastgrad.report.failure import Failure
from fastgrad.report.settings import Settings
from fastgrad.verdict.confirm import Found, difference_along, entry_in_row, located_failure, unspecified_failure
from fastgrad.verdict.linearity import linearity_failure, one_hot_rows, scaled_failure, separate_failure
from fastgrad.verdict.locate import locate
from fastgrad.verdict.repeated_rows import (
    ALONG_DIRECTION,
    allowed_movement,
    nondeterministic,
    nondeterministic_func,
    raised_for,
)
from fastgrad.verdict.tangents import single_entries

MAX_STEPS = 5
"""Largest number of step sizes to try."""

SMALLER, LARGER = 2.0**-5, 2.0**6
"""Factors from one step size to the next: smaller if joint steps cross kinks, larger if rounding dominates."""

SMALL_BOUND, SMALL_BOUND_STEPS = 16, 3
"""The bound to aim at for selected rows, in units of atol, and the number of step sizes to try for it."""

MAX_ENTRIES = 8
"""Largest number of wrong entries to look for."""

MAX_DOUBTFUL = 8
"""Largest number of outputs to examine that look wrong in a sum but prove to be right, before another step size."""

MAX_SINGLE = 4
"""Largest number of outputs to examine one by one, if they could not be verified at any step size."""


@dataclass
class Screening:
    """What fast mode found.

    Attributes
    ----------
    failure
        The confirmed failure, if any.
    undecided
        The largest error that may be hidden, if the verdict is undecided; otherwise None.
    raised
        The exception that backward raised for a one-hot grad_output, if all rows and columns are checked.
    certificates
        The certificates, if nothing was found and nothing is undecided.
    bound
        The size from which errors of single entries are found, in inputs with the smallest atol. It may exceed the
        tolerance of a small entry that is next to larger ones.
    """

    failure: Failure | None = None
    undecided: float | None = None
    raised: Exception | None = None
    certificates: tuple[Certificate, ...] = ()
    bound: float = 0.0


@phase("screen")
def screen(
    problem: Problem, settings: Settings, rows: Tensor | None = None, columns: Tensor | None = None
) -> Screening:
    """The verdict on all Jacobians in reverse mode, from a number of evaluations that does not depend on their size.

    An output counts as verified if the noise of its differences is within its tolerance. All other outputs are tried
    again at other steps, then one by one.

    rows, columns: masks of the rows and columns to check, shapes (m,) and (n,); None: all. For selected rows, up to
    SMALL_BOUND_STEPS step sizes are tried, until the bound is small.
    """
    return _Screen(problem, settings, rows, columns).run()


class StepSizes:
    """What the screens of both modes know about the outputs, from one step size to the next.

    rows: mask of the rows to check, shape (m,); None: all.
    """

    _fixed: Tensor | None = None

    def __init__(self, problem: Problem, settings: Settings, rows: Tensor | None) -> None:
        self._problem, self._settings, self._selected = problem, settings, rows
        self._count = sketch_size(settings.confidence)
        self._base = problem.base()
        self._eps, self._attempt = settings.eps, 0
        self._extrapolated = 1  # the fewest evaluations: usually enough if nothing is wrong
        self._pending = torch.ones(problem.m, dtype=torch.bool, device=problem.device) if rows is None else rows.clone()
        # Per output, the size from which errors were found at the best step size so far.
        self._hidden = torch.where(self._pending, math.inf, 0.0).to(torch.float64)
        self._bound = settings.atol
        self._widest = settings.eps  # the largest step that verified an output
        self._smallest_bound = math.inf  # of the step sizes at which all selected rows were verified
        self._unresolved = 0.0  # the largest possible error of an entry that no step resolved

    def _differences(self, count: int | None, extrapolated: int) -> Differences:
        """Differences along the first `count` directions at this step size; None: all."""
        arguments = self._problem, self._settings, self._base, self._eps, count or self._count, self._attempt
        return directional_differences(*arguments, extrapolated=extrapolated, fixed=self._fixed, in_parts=True)

    def _contradicts(self, tentative: Differences, differences: Differences) -> bool:
        """Whether better differences at this step size show that func returned other values for the tentative ones."""
        repeat = partial(self._differences, self._count, 1)
        return contradicts(self._settings, self._base, tentative, differences, repeat)

    def _noise_varies(self, differences: Differences) -> bool:
        """Like `func_varies`, but repeated differences never count as quiet."""
        problem, settings, base = self._problem, self._settings, self._base
        return func_varies(
            settings,
            differences.rounding * base.abs(),
            differences,
            partial(self._differences, extrapolated=self._extrapolated),
            is_quiet=lambda again: False,
            values_move=lambda: values_vary(problem, settings, problem.evaluate(True), base),
        )

    def _tries_larger_step(self) -> bool:
        """Whether selected rows, which are verified, are checked again at a step at which rounding matters less."""
        is_small = self._bound <= SMALL_BOUND * self._settings.atol
        return self._selected is not None and not is_small and self._attempt + 1 < SMALL_BOUND_STEPS

    def _go_to_next_step(self, differences: Differences) -> None:
        """To a smaller one if any pending output is noisier than rounding explains; otherwise to a larger one."""
        rough = ~(differences.noise <= 2 * differences.rounding * self._base.abs())[self._pending]
        if bool(rough.any()) and differences.eps <= self._settings.eps:
            self._eps = differences.eps * SMALLER
        else:
            self._eps = max(differences.eps, self._settings.eps) * LARGER
        self._attempt += 1


class _Screen(StepSizes):
    """Compares sketches at one step size after another, until all outputs are verified or something is wrong."""

    def __init__(self, problem: Problem, settings: Settings, rows: Tensor | None, columns: Tensor | None) -> None:
        super().__init__(problem, settings, rows)
        pairs = [output.slice for output in problem.outputs if problem.is_custom and output.is_complex]
        self._imaginary = imaginary_parts(self._base, pairs)
        self._fixed = None if columns is None else ~columns
        self._first: Differences | None = None  # those of the first step size
        self._tentative: Differences | None = None  # the differences for which a sum looked wrong
        # The weights of the tentative sketch, and its VJPs by the number of their cotangent.
        self._earlier: tuple[Tensor, Mapping[int, Tensor]] | None = None
        self._doubted: dict[int, float] = {}  # per output that no wrong entry explains, the smallest error of its sums
        self._suspected = 0.0  # the largest error that sums suggested but single entries did not confirm

    def run(self) -> Screening:
        """The verdict, after at most MAX_STEPS step sizes."""
        while self._attempt < MAX_STEPS:
            differences = self._differences(self._count, self._extrapolated)
            self._first = self._first or differences
            tentative = self._tentative if self._attempt == 0 else None
            if tentative is not None and self._contradicts(tentative, differences):
                return Screening(nondeterministic_func(self._problem, ALONG_DIRECTION))
            verdict = self._judge(differences)
            if verdict is not None:
                return verdict
        if math.isfinite(self._smallest_bound):
            return self._verified(self._smallest_bound)
        assert self._first is not None
        return self._one_by_one(self._first)

    def _judge(self, differences: Differences) -> Screening | None:
        """The verdict at this step size; None if more differences or another step size are needed."""
        problem, settings = self._problem, self._settings
        search = _Search(problem, settings, differences)
        noise, norm = _noise(problem, settings, differences)
        weight = weights(noise, norm, settings.atol, self._pending)
        tentative = self._extrapolated < self._count
        try:
            failure = _one_hot(problem, settings, search, differences) if self._attempt == 0 else None
        except Exception as error:
            raise_unless_of_func(error)
            if self._selected is not None or self._fixed is not None:
                raise
            return Screening(raised=error)
        if failure is not None:
            return Screening(failure)
        sketch, failure = self._rows(differences, weight, tentative)
        if failure is not None:
            return Screening(failure)
        flagged = sketch.worst()
        if flagged is not None and tentative:
            self._extrapolated = self._count  # differences that can prove that something is wrong
            self._tentative = differences
            self._earlier = weight, sketch.gradients
            failure = self._rerun_failure(sketch.gradients, weight)
            return None if failure is None else Screening(failure)
        if flagged is not None:
            failure = search.run(sketch) or self._rerun_failure(sketch.gradients, weight)
            flagged = sketch.worst()
        failure = failure or self._examine_rounded(differences, search)
        if failure is not None:
            return Screening(failure)
        self._note_hidden(search, sketch, weight)
        if search.nonlinear:
            return self._undecided(search.nonlinear)
        self._unresolved = max(self._unresolved, search.unresolved)
        for row, size in search.doubtful.items():
            self._doubted[row] = min(size, self._doubted.get(row, math.inf))
        if not problem.unspecified <= settings.atol / 4:
            failure = unspecified_failure(problem, settings, sketch.cotangents[0].vector())
            return self._undecided(problem.unspecified) if failure is None else Screening(failure)
        if flagged is not None:
            return self._unconfirmed(differences, search, sketch.values[flagged[0]][flagged[1]])
        return self._verify(differences, search, sketch, weight)

    def _note_hidden(self, search: _Search, sketch: Sketch, weight: Tensor) -> None:
        """Notes, for each output, the size from which an error of one of its entries shows in these sums."""
        worst = sketch.worst()
        beyond = 1.0 if worst is None else excess(*(of[worst[0]][worst[1]] for of in (sketch.values, sketch.allowed)))
        hidden = torch.where(weight > 0, (self._settings.atol + 4 * sketch.allowance) * beyond / weight, math.inf)
        for row, size in search.doubtful.items():
            hidden[row] = max(hidden[row].item(), 4 * size)
        torch.minimum(self._hidden, hidden.nan_to_num_(math.inf), out=self._hidden)

    def _undecided(self, size: float) -> Screening:
        """The verdict "undecided": errors up to this size may be hidden, or larger ones that the sums do not show."""
        return Screening(undecided=self._settings.of_entries(max(size, float(self._hidden.amax()))))

    def _known(self, weight: Tensor) -> Mapping[int, Tensor]:
        """VJPs of the same cotangents in an earlier sketch; keys: numbers of cotangents."""
        if self._earlier is None or self._attempt or not torch.equal(self._earlier[0], weight):
            return {}
        return self._earlier[1]

    def _cotangents(self, weight: Tensor) -> list[Cotangent]:
        return list(cotangents(self._settings.seed, weight, self._count, self._attempt, self._imaginary))

    def _rows(self, differences: Differences, weight: Tensor, tentative: bool) -> tuple[Sketch, Failure | None]:
        """The sketch, and a failure if the backward is not deterministic, depends on layouts, or raises.

        This runs one VJP after the other. A tentative sketch ends with the first cotangent for which something looks
        wrong. At the first step size, the first VJP uses the first graph, and another one is run several times.
        """
        problem, settings, repeat, earlier = self._problem, self._settings, self._attempt == 0, self._known(weight)
        sketch = Sketch()
        for number, cotangent in enumerate(self._cotangents(weight)):
            try:
                vector = cotangent.vector()
                first_graph = repeat and not number
                values, allowed, gradient = residual_row(problem, settings, differences, cotangent, vector, first_graph)
                failure = None
                if repeat and number == REPEATED:
                    repeats = problem.vjp(vector.expand(RUNS - 1, -1))
                    failure = _repeat_failure(problem, settings, vector, gradient, repeats)
            except Exception as error:  # one-hot grad_outputs did not raise
                raise_unless_of_func(error)
                return sketch, raised_for(cotangent.kind, error)
            if failure is None and number in earlier and _vjp_varies(settings, gradient, earlier[number]):
                failure = nondeterministic(problem.outputs[0])
            if failure is not None:
                return sketch, failure
            looks_wrong = any(excess(*pair) > 1 for pair in zip(values, allowed, strict=True))
            if problem.n <= MAX_AT_ONCE or looks_wrong:
                sketch.gradients[number] = gradient  # kept, to be compared with a rerun before the weights change
            if looks_wrong and not tentative and cotangent.layout != Layout.CONTIGUOUS:
                failure, _ = linearity_failure(problem, settings, vector, gradient, cotangent.kind)
                if failure is not None:
                    return sketch, failure
            if cotangent.layout == Layout.EXPANDED and not (looks_wrong and tentative):
                continue  # an expanded cotangent has no weights, and only tests the layout
            sketch.cotangents.append(cotangent)
            sketch.values.append(values)
            sketch.allowed.append(allowed)
            sketch.allowance = max(sketch.allowance, max(allowed) / cotangent.scale - settings.atol / 4)
            if looks_wrong and tentative:
                break
        return sketch, None

    def _rerun_failure(self, gradients: Mapping[int, Tensor], weight: Tensor) -> Failure | None:
        """The failure if VJPs differ when they are run again, before weights change; keys: numbers of cotangents."""
        rows = self._cotangents(weight)
        for number, gradient in gradients.items():
            again = self._problem.vjp(rows[number].vector().unsqueeze(0), [rows[number].layout])[0]
            if _vjp_varies(self._settings, again, gradient):
                return nondeterministic(self._problem.outputs[0])
        return None

    def _unconfirmed(self, differences: Differences, search: _Search, value: float) -> Screening | None:
        """Decides what follows if a sum looks wrong, but no wrong entry was found at this step size."""
        if math.isfinite(self._smallest_bound):
            return self._verified(self._smallest_bound)  # no sum was wrong at another step size
        self._suspected = max(self._suspected, 4 * abs(value))
        if not search.doubtful:
            return self._undecided(self._suspected)  # small errors in many entries: another step does not help
        return self._at_next_step(differences)

    def _verify(self, differences: Differences, search: _Search, sketch: Sketch, weight: Tensor) -> Screening | None:
        """If no sum looks wrong, verifies the outputs whose noise is within their tolerance."""
        settings, self._widest = self._settings, max(self._widest, differences.eps)
        if not search.doubtful and all_count_fully(weight) and not sketch.allowance:
            return self._verified(self._bound)
        hidden = torch.where(weight > 0, (settings.atol + 4 * sketch.allowance) / weight, math.inf)
        verified = (hidden <= settings.allowed(differences.size())) & hidden.isfinite()
        verified[[*search.doubtful]] = False
        for row, size in self._doubted.items():
            # At this step size, an error of the size seen at another step would be hidden.
            if float(hidden[row]) > size:
                verified[row] = False
        self._bound = max(self._bound, float(hidden.masked_fill_(~verified, 0.0).amax()))
        if bool((self._pending & ~verified).any()):
            self._pending &= ~verified
            return self._at_next_step(differences)
        self._smallest_bound = min(self._smallest_bound, self._bound)
        if not self._tries_larger_step():
            return self._verified(self._smallest_bound)
        # All rows are checked again at a larger step, where rounding matters less (and curvature perhaps more).
        self._bound, self._extrapolated = settings.atol, self._count
        self._eps, self._attempt = self._eps * LARGER, self._attempt + 1
        return None

    def _examine_rounded(self, differences: Differences, search: _Search) -> Failure | None:
        """Examines the outputs for which rounding inside func may hide changes at this step.

        Returns a failure, or adds the outputs whose changes at `eps` no single entry explains to the doubtful ones.
        """
        assert self._first is not None
        problem, settings = self._problem, self._settings
        at_eps = _Search(problem, settings, self._first)
        for number, row in enumerate(rounded_rows(problem, settings, self._first, differences, self._pending)):
            left = math.inf
            if number < MAX_SINGLE:
                gradient = problem.row(row)
                found = at_eps.examine_row(row, gradient=gradient)
                if found is not None and found.remeasured is not None:
                    return located_failure([found])
                _, left = at_eps.row_errors(row, gradient, found)
            if not left <= settings.atol / 4:
                search.doubtful[row] = left
        search.unresolved = max(search.unresolved, at_eps.unresolved)
        return None

    def _at_next_step(self, differences: Differences) -> Screening | None:
        """Goes on to another step size, or leaves a small problem to the exact engine, which costs no more."""
        problem = self._problem
        if self._attempt == 0 and self._noise_varies(differences):
            return Screening(nondeterministic_func(problem, ALONG_DIRECTION))
        if self._selected is None and self._eps == self._settings.eps and 2 * problem.n + problem.m <= EXACT_CALLS:
            return Screening(undecided=math.inf)
        self._go_to_next_step(differences)
        return None

    def _one_by_one(self, differences: Differences) -> Screening:
        """The verdict after a few of the outputs that no step size verified were examined separately."""
        search = _Search(self._problem, self._settings, differences)
        for row in self._pending.nonzero().reshape(-1)[:MAX_SINGLE].tolist():
            found = search.examine_row(row)
            if found is not None and found.remeasured is not None:
                return Screening(located_failure([found]))
            if found is None:
                own = max(self._settings.atol, 4 * differences.noise[row].item())
                self._hidden[row] = min(self._hidden[row].item(), own)
        return self._undecided(max(self._suspected, self._unresolved, search.unresolved))

    def _verified(self, bound: float) -> Screening:
        return verified(self._settings, bound, self._widest, self._unresolved)


def verified(settings: Settings, bound: float, step: float, unresolved: float = 0.0) -> Screening:
    """The result if no sum looks wrong.

    bound: the size of an error that the sums show; step: the largest step of the differences; unresolved: the possible
    error of an entry that no step resolved.
    """
    if unresolved:
        return Screening(undecided=settings.of_entries(max(bound, unresolved)))
    cancelling = settings.of_entries(detection_limit(settings) * (bound / settings.atol if settings.atol else 0.0))
    claim = single_entries("", bound, step, settings)
    certificates = _sketch_certificates(claim, settings.of_entries(bound), cancelling, settings.confidence)
    return Screening(certificates=certificates, bound=bound)


@lru_cache(16)
def _sketch_certificates(claim: str, bound: float, cancelling: float, confidence: float) -> tuple[Certificate, ...]:
    count = sketch_size(confidence)
    method = f"{count} random directions, {count + 1} cotangents: sums of analytical entries compared with differences"
    pairs = f"the same sums, with probability {confidence:.10g}"
    return (
        Certificate(claim, method, bound),
        Certificate("no two wrong entries of a row or column cancel each other", pairs, cancelling),
    )


def _noise(problem: Problem, settings: Settings, differences: Differences) -> tuple[Tensor, float]:
    """Noise of each output's differences, shape (m,), plus rounding of gradients if it matters; and the 2-norm."""
    rounding = ROUNDING * problem.unit_roundoff
    if rounding * differences.largest * problem.m**0.5 <= settings.atol / (4 * NOISE_SHARE):
        return differences.noise, differences.noise_norm
    noise = differences.noise + rounding * differences.size()
    return noise, float(torch.linalg.vector_norm(noise))


def _one_hot(problem: Problem, settings: Settings, search: _Search, differences: Differences) -> Failure | None:
    """The failure for one-hot grad_outputs of each output: of `one_hot_rows`, or of a comparison with differences."""
    failure, rows = one_hot_rows(problem, settings)
    for row, gradient in rows.items() if failure is None else ():
        error = differences.derivatives[:, row] - differences.directions @ gradient
        allowed = settings.atol / 4 + 4 * differences.noise[row] + ROUNDING * problem.unit_roundoff * gradient.norm()
        if bool((error.abs() <= allowed).all()):
            continue
        rounding = ROUNDING * problem.unit_roundoff * largest(gradient)
        again = problem.row(row, only=block_with(problem.outputs, row))
        if differ(again[None], gradient[None], max(rounding, settings.nondet_tol), False):
            return nondeterministic(problem.outputs[0])
        found = search.examine_row(row, gradient=gradient)
        if found is not None and found.remeasured is not None:
            return located_failure([found])
        search.doubtful[row] = largest(error)
    return failure


def _repeat_failure(
    problem: Problem, settings: Settings, vector: Tensor, gradient: Tensor, repeats: Iterable[Tensor]
) -> Failure | None:
    """The failure if a VJP differs when run again or scaled, or is not the sum of the VJPs of single outputs."""
    failure = separate_failure(problem, settings, vector, gradient)
    moved = [again for again in repeats if not torch.equal(again, gradient)]
    if any(differ(again[None], gradient[None], allowed_movement(settings, vector), False) for again in moved):
        return nondeterministic(problem.outputs[0])
    return failure or scaled_failure(problem, settings, vector, gradient)


def _vjp_varies(settings: Settings, gradient: Tensor, earlier: Tensor) -> bool:
    """Whether a VJP on another graph differs from an earlier one of the same cotangent by more than atol.

    False if nondet_tol allows differences.
    """
    return not settings.nondet_tol and differ(gradient[None], earlier[None], settings.atol, False)


class _Search:
    """Locates the wrong entry behind a wrong sum: first its row, then its column."""

    def __init__(self, problem: Problem, settings: Settings, differences: Differences) -> None:
        self._problem = problem
        self._settings = settings
        self._differences = differences
        self.doubtful: dict[int, float] = {}  # outputs that no wrong entry explains, and the error of their sums
        self.unresolved = 0.0
        self.nonlinear = 0.0  # the error that a backward may hide because it is linear only within its tolerance

    def run(self, sketch: Sketch) -> Failure | None:
        """The failure of the confirmed entries, at most MAX_ENTRIES; subtracts what was examined from the sketch."""
        found: list[Found] = []
        suspects = 0
        while len(found) < MAX_ENTRIES and suspects < MAX_DOUBTFUL:
            flagged = sketch.worst()
            if flagged is None:
                break
            which, k = flagged
            before = abs(sketch.values[which][k])
            row = self._row(sketch.cotangents[which], k, sketch.values[which][k], found)
            entry = self.examine_row(row, k, found)
            if entry is not None and entry.remeasured is not None:
                found.append(entry)
                sketch.subtract(entry.row, entry.along(self._differences.directions))
                if abs(sketch.values[which][k]) > before / 2:
                    break  # many entries are wrong: more of them would add no information
                continue
            if found:
                break
            if entry is None:
                failure = self._nonlinear(sketch.cotangents[which], sketch.cotangents[0], k, sketch.values[which][k])
                if failure is not None:
                    return failure
            error, left = self.row_errors(row, self._problem.row(row), entry)
            if entry is None or not left <= self._settings.atol / 4:
                self.doubtful[row] = left
            sketch.subtract(row, error)
            suspects += 1
        return located_failure(found) if found else None

    def _nonlinear(self, cotangent: Cotangent, dense: Cotangent, k: int, value: float) -> Failure | None:
        """The failure if backward is not linear; notes an error within the tolerance if it explains the value."""
        vector = cotangent.vector()
        gradient = self._problem.vjp(vector.unsqueeze(0))[0]
        # A cotangent with zeros is split into a dense part and the rest: two halves would have the same error again.
        part = dense.vector() if cotangent.scale != 1.0 else None
        failure, error = linearity_failure(self._problem, self._settings, vector, gradient, cotangent.kind, part)
        along = abs(float(error @ self._differences.directions[k]))
        if along >= abs(value) / 2:
            self.nonlinear = max(self.nonlinear, 4 * along)
        return failure

    def _row(self, cotangent: Cotangent, k: int, value: float, found: list[Found]) -> int:
        derivatives, u = self._differences.derivatives[k : k + 1], self._differences.directions[k]

        def residual(vector: Tensor) -> float:
            numerical = ops.dots(derivatives, vector)[0, 0].item()
            total = float(numerical - (u @ self._problem.vjp(vector.unsqueeze(0))[0]).item())
            return total - sum(vector[entry.row].item() * entry.along(u).item() for entry in found)

        return locate(residual, cotangent.vector(), value)

    def row_errors(self, row: int, gradient: Tensor, entry: Found | None) -> tuple[Tensor, float]:
        """One output's (J_num - J_ana) U, shape (directions,), and the largest of them without the error of an entry.

        gradient: the output's analytical row, shape (n,).
        """
        directions = self._differences.directions
        error = self._differences.derivatives[:, row] - directions @ gradient
        return error, largest(error if entry is None else error - entry.along(directions))

    def examine_row(
        self, row: int, k: int = 0, found: list[Found] | None = None, gradient: Tensor | None = None
    ) -> Found | None:
        """The entry behind a row's residual, measured separately; None if the residual is at most atol / 4.

        gradient: the row, shape (n,); None: it is computed with zeros as the other elements of all grad_outputs.
        """
        found = [entry for entry in found or [] if entry.row == row]
        gradient = self._problem.row(row) if gradient is None else gradient
        error, _ = self.row_errors(row, gradient, None)
        u = self._differences.directions[k]
        eps = self._differences.eps
        value = error[k].item() - sum(entry.along(u).item() for entry in found)

        if abs(value) <= self._settings.atol / 4:
            return None
        entry = entry_in_row(self._problem, self._settings, row, gradient, u, eps, value, found)
        self.unresolved = max(self.unresolved, entry.unresolved)
        return entry


def screen_constant(problem: Problem, settings: Settings) -> Screening:
    """The verdict if no output requires grad: func must not depend on its inputs."""
    for attempt, eps in enumerate((settings.eps, settings.eps * SMALLER)):
        for k in range(sketch_size(settings.confidence)):
            u = direction(problem.n, settings.seed, SKETCH_DIRECTIONS + 16 * (16 * attempt + k)).to(problem.device)
            displacement = problem.displacement(u, eps)
            plus, minus = (problem.evaluate(False, displacement, sign) for sign in (1.0, -1.0))
            moved = plus - minus != 0  # as in slow mode, inf - inf is NaN, which counts as a change
            if not bool(moved.any()):
                continue
            row = int(moved.nonzero()[0])
            vector = displacement / eps
            for block in problem.inputs:
                vector[block.slice] *= block.weight / block.step
            change = partial(difference_along, problem, eps=eps, row=row)
            column = locate(change, vector, change(vector))
            value = problem.difference_columns(column, 1, settings.eps, False)[0, row].item()
            if value:
                output, block = block_with(problem.outputs, row), block_with(problem.inputs, column)
                return Screening(Failure.at("nonzero numerical gradient", output, block, detail=f"{value:.6g}"))
            break  # only the joint step changed the output, for example across a jump: try smaller steps
        else:
            method = f"{sketch_size(settings.confidence)} random directions: the outputs are equal, bit for bit"
            return Screening(certificates=(Certificate("func does not depend on its inputs", method, 0.0),))
    return Screening(undecided=float("inf"))
