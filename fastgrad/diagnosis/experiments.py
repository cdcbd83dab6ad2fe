"""Evidence after a failure: entries around the worst one, and experiments with func and its backward.

Nothing here changes a verdict. Calls and time are bounded; an experiment that raises is dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from fastgrad.core.memory import OUT_OF_MEMORY
from fastgrad.core.phases import phase
from fastgrad.core.precision import spacing
from fastgrad.core.random import EVIDENCE_STREAM, direction
from fastgrad.diagnosis.autograd_graph import copied_gradients, written_gradients
from fastgrad.diagnosis.causes import diagnose
from fastgrad.diagnosis.hypotheses import HYPOTHESIS_CALLS, Hypotheses
from fastgrad.engines.blocks import EXPANDED_VALUE
from fastgrad.engines.sketch import directional_differences
from fastgrad.problem.coordinates import Block
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Comparison, Entry, Evidence, Explanation, Failure, Sample, modulus
from fastgrad.report.report import Report
from fastgrad.verdict.adjoint_taylor import adjoint

MORE_CALLS = 64
"""Calls of func and backward, beside as many as the check itself took."""

SECONDS = 1.0
"""Wall time, by the measured cost of a call."""

MOST_ENTRIES = 1 << 14
"""Of a sample."""

MOST_COLUMNS, MOST_ROWS = 12, 24
"""Of a Jacobian that is too dear to be computed whole: two evaluations each, and one VJP."""

LARGEST_BLOCK = 1 << 8
"""Of a kernel whose tail a sample looks for."""

LARGEST_WATCHED = 1 << 22
"""Real coordinates of inputs and outputs up to which grad_outputs are copied to see whether backward changes them."""

SCALES = (-1.0, 4.0, 0.5)
"""Of cotangents; powers of two, so that a linear backward gives the same bits."""

RUNS = (3, 2, 3)
"""Of one VJP, on one graph after the other; not one number, or what moves at every third call would look alike."""

NARROWER = (torch.bfloat16, torch.float16, torch.float32)

LARGE_STEPS = (2.0**-3, 2.0**-4, 2.0**-5)
"""At which an entry is measured whose differences at eps are zero: func may be a staircase."""

RESOLVED = 1e-5
"""Noise of a directional derivative, relative to its terms, above which it says nothing."""

Result = TypeVar("Result")


@phase("evidence")
def gather(problem: Problem, report: Report, at_hand: Sample | None = None) -> tuple[Sample | None, Evidence | None]:
    """Entries of the failing pair, and experiments; about as many calls as the check took, and a second, at most.

    Parameters
    ----------
    report
        Of the check that failed, with its failure, plan, calls and seconds.
    at_hand
        Entries of the failing pair that its engine had; perhaps with what lies outside of a pattern mixed in.

    Returns
    -------
    tuple
        None where nothing was to be learnt from calling func again.
    """
    failure = report.failure
    if failure is None or failure.kind not in ("mismatch", "nonlinear", "nondeterministic", *_ZERO_KINDS):
        return None, None
    if not problem.has_graph or not problem.n or not problem.m:
        return None, None
    return _Investigation(problem, report, failure, at_hand).run()


_ZERO_KINDS = ("not multiplied by grad_output",)


class _Investigation:
    """The experiments, cheap and telling ones first; later ones only while nothing explains the failure."""

    def __init__(self, problem: Problem, report: Report, failure: Failure, at_hand: Sample | None) -> None:
        self._problem = problem
        self._report = report
        self._failure = failure
        self._at_hand = at_hand
        self._settings = report.settings
        self._record = report.plan.record_graph if report.plan else True
        self._before = self._calls()
        used = report.evaluations + report.vjps
        self._affordable = used
        self._most = used + MORE_CALLS
        self._cost = report.seconds / max(1, used)
        self._start = time.perf_counter()
        pair = failure.output is not None and failure.input is not None
        self._output = next((block for block in problem.outputs if pair and block.index == failure.output), None)
        self._input = next((block for block in problem.inputs if pair and block.index == failure.input), None)
        # What is wrong with one output is looked for there: the others have not been judged.
        self._only = self._output if failure.kind == "mismatch" else None
        self._evidence = Evidence()

    def run(self) -> tuple[Sample | None, Evidence | None]:
        """All of it."""
        failure, sample = self._failure, None
        if failure.kind == "mismatch" and failure.comparison is not None and self._output and self._input:
            sample = self._sample(self._output, self._input, failure.comparison)
        self._try(2, self._movement_of_func)
        if failure.mode == "reverse":
            self._vjps(sample)
        if failure.kind == "mismatch":
            self._second_opinions()
            if failure.mode == "reverse" and self._output is not None and self._input is not None:
                pair = self._output, self._input
                self._hypotheses(Hypotheses(self._problem, *pair, self._settings.seed, self._record), sample)
        return sample, replace(self._evidence, calls=self._calls() - self._before)

    def _hypotheses(self, hypotheses: Hypotheses, sample: Sample | None) -> None:
        """What explains all entries at once, by random sums of them; the first that does."""
        self._explain(hypotheses.independent)
        if sample is None or not sample.complete:
            self._explain(hypotheses.rearranged)
        if not self._report_with(sample).causes:
            self._explain(lambda: hypotheses.elsewhere(self._left))

    def _explain(self, hypothesis: Callable[[], Explanation | None]) -> None:
        if self._evidence.explanation is None:
            self._note(explanation=self._try(HYPOTHESIS_CALLS, hypothesis))

    def _report_with(self, sample: Sample | None) -> Report:
        report = replace(self._report, sample=sample, evidence=self._evidence)
        return replace(report, causes=diagnose(report))

    def _calls(self) -> int:
        return self._problem.evaluations + self._problem.vjps

    def _left(self) -> int:
        """Calls that may still be made."""
        seconds = SECONDS - (time.perf_counter() - self._start)
        in_time = int(seconds / self._cost) if self._cost > 0 else self._most
        return min(self._most - (self._calls() - self._before), in_time)

    def _try(self, calls: int, experiment: Callable[[], Result]) -> Result | None:
        """What an experiment gives, if there are calls left for it and it does not raise."""
        if calls > self._left():
            return None
        try:
            return experiment()
        except Exception:  # of func, or for want of memory: the failure stands, and this says nothing of it
            return None

    def _note(self, **found: object) -> None:
        self._evidence = replace(self._evidence, **found)  # type: ignore[arg-type]

    # Entries

    def _sample(self, output: Block, block: Block, comparison: Comparison) -> Sample | None:
        """Entries of the failing pair: all where that is affordable, else those at hand, or around the worst."""
        rows, columns = output.tensor.numel(), block.size
        whole = 2 * columns + rows if self._failure.mode == "reverse" else 3 * columns
        sample = None
        if comparison.analytical is not None and comparison.numerical is not None:
            # In torch's layout; those of a sparse input have a row an element, too.
            sample = self._of_matrices(comparison.analytical.t(), comparison.numerical.t(), output, block)
        elif whole <= min(self._affordable, self._left()) and rows * columns <= 1 << 22:
            sample = self._try(whole, lambda: self._whole(output, block))
        if sample is None and self._at_hand is not None:
            sample = _thinned_sample(self._at_hand, self._settings.seed)
        if sample is None and comparison.worst is not None:
            worst = comparison.worst
            sample = self._try(3, lambda: self._part(output, block, worst))
        if sample is None or not bool(sample.failing.any()):
            return None
        return self._try(1, lambda: self._with_values(sample, output, block)) or sample

    def _with_values(self, sample: Sample, output: Block, block: Block) -> Sample:
        """Also the inputs' and outputs' values at x."""
        at, values = self._problem.coordinates(), self._problem.base()
        element = sample.inputs
        is_densified = block.elements is None and block.tensor.layout is not torch.strided
        if block.elements is not None:
            specified = block.elements.cpu()
            order = specified.argsort()
            element = order[torch.searchsorted(specified[order], element)]
        return replace(
            sample,
            # The zeros that a sparse input does not specify are a matter of layout, not of values.
            input_values=None if is_densified else _elements(at, block).cpu()[element],
            output_values=_elements(values, output).cpu()[sample.outputs],
        )

    def _whole(self, output: Block, block: Block) -> Sample:
        numerical = self._columns(block, range(block.size // block.width))
        if self._failure.mode == "forward":
            tangents, _ = self._problem.tangent_columns(block.first, block.size)
            found = self._entries(tangents, output, block)
            return self._of_matrices(found, self._entries(numerical, output, block), output, block)
        analytical = self._rows(output, block, range(output.tensor.numel()))
        return self._of_matrices(analytical, self._entries(numerical, output, block), output, block)

    def _part(self, output: Block, block: Block, worst: Entry) -> Sample:
        """The entries in some columns and rows: those of the worst entry, its neighbors and likely borders."""
        places = _flat(worst.input_index, block.tensor.shape)
        chosen = list(_around(places, tuple(block.tensor.shape), self._settings.seed))
        if block.elements is not None:
            where = {int(element): k for k, element in enumerate(block.elements.tolist())}
            chosen = [where[element] for element in chosen if element in where]
        budget = self._left() - 40
        count = max(1, min(MOST_COLUMNS, budget // (4 * block.width)))
        chosen = chosen[:count]
        numerical = self._entries(self._columns(block, chosen), output, block)
        # The outputs that the chosen elements matter most for: where a Jacobian is sparse, nothing else says anything.
        row = _flat(worst.output_index, output.tensor.shape)
        heard = numerical.abs().nan_to_num(0.0)
        rows = [row, *heard.argmax(0).tolist(), *_around(row, tuple(output.tensor.shape), self._settings.seed)]
        rows = list(dict.fromkeys(rows))[: max(2 * count, min(MOST_ROWS, budget // 2))]
        if self._failure.mode == "forward":
            own = torch.cat([self._tangents(block, element) for element in chosen])
            analytical = self._entries(own, output, block)[rows]
        else:
            analytical = self._rows(output, block, rows)[:, chosen]
        return self._of_matrices(analytical, numerical[rows], output, block, rows, chosen)

    def _columns(self, block: Block, elements: Iterable[int]) -> Tensor:
        """Numerical columns of some elements of an input: float64, shape (coordinates, m)."""
        eps, width = self._settings.eps, block.width
        elements = list(elements)
        if elements == list(range(block.size // width)):
            return self._problem.difference_columns(block.first, block.size, eps, self._record)
        columns = (block.first + width * element for element in elements)
        return torch.cat([self._problem.difference_columns(j, width, eps, self._record) for j in columns])

    def _tangents(self, block: Block, element: int) -> Tensor:
        return self._problem.tangent_columns(block.first + block.width * element, block.width)[0]

    def _entries(self, columns: Tensor, output: Block, block: Block) -> Tensor:
        """Entries of the failing part from columns (coordinates, m): shape (output elements, input elements)."""
        own = columns[:, output.first : output.first + output.size]
        imaginary = int(self._failure.part == "imaginary")
        if self._failure.mode == "forward":
            own = own[imaginary :: block.width]
            return (_paired(own) if output.is_complex else own).t()
        own = own[:, imaginary :: output.width].t()
        return _paired(own) if block.is_complex else own

    def _rows(self, output: Block, block: Block, elements: Iterable[int]) -> Tensor:
        """Analytical rows of some elements of an output: shape (elements, input elements)."""
        imaginary = self._failure.part == "imaginary"
        elements = list(elements)
        runs = [(elements[0], len(elements))] if elements == list(range(output.tensor.numel())) else None
        rows = [
            self._problem.analytical_rows(output, imaginary, first, count, [block], 0, 1.0)[0]
            for first, count in runs or [(element, 1) for element in elements]
        ]
        return _paired(torch.cat(rows)) if block.is_complex else torch.cat(rows)

    def _of_matrices(
        self,
        analytical: Tensor,
        numerical: Tensor,
        output: Block,
        block: Block,
        rows: list[int] | None = None,
        columns: list[int] | None = None,
    ) -> Sample:
        """A sample of two matrices, shape (output elements, input elements); some of the zeros are left out."""
        analytical, numerical = analytical.cpu(), numerical.cpu()
        own = self._settings.of(block.index)
        failing = _failing(analytical, numerical, own.atol, own.rtol)
        whole = rows is None and columns is None
        kept = failing | (analytical != 0) | (numerical != 0)
        if not whole or kept.numel() <= MOST_ENTRIES:
            kept = torch.ones_like(kept)
        i, j = kept.nonzero(as_tuple=True)
        chosen = _thinned(failing[kept], self._settings.seed)
        i, j = i[chosen], j[chosen]
        element = (
            torch.arange(block.size // block.width, device="cpu") if block.elements is None else block.elements.cpu()
        )
        complete = whole and block.elements is None and i.numel() == int(kept.sum())
        return Sample(
            tuple(output.tensor.shape),
            tuple(block.tensor.shape),
            i if rows is None else torch.tensor(rows, device="cpu")[i],
            element[j if columns is None else torch.tensor(columns, device="cpu")[j]],
            _wide(analytical[i, j]),
            _wide(numerical[i, j]),
            failing[i, j],
            complete=complete,
        )

    # Experiments with backward

    def _vjps(self, sample: Sample | None) -> None:
        v = self._cotangent(0)
        gradient = self._try(2, lambda: self._vjp(v))
        if gradient is None or not bool(gradient.isfinite().all()):
            return
        block = self._input
        if sample is not None and block is not None and block.elements is None:
            own = gradient[0, block.first : block.first + block.size].reshape(-1, block.width).cpu()
            self._note(vanishes=not bool(own[sample.inputs[sample.failing]].any()))
        self._try(sum(RUNS) + 2 * len(RUNS), lambda: self._repeated(v))
        self._try(3, lambda: self._after_others(v))
        self._try(len(SCALES) + 1, lambda: self._scaled(v))
        self._try(1, lambda: self._note(at_zero=float(self._vjp(torch.zeros_like(v)).abs().max())))
        self._try(6, lambda: self._split(v))
        self._layouts(v)
        if self._problem.is_custom and self._problem.m + self._problem.n <= LARGEST_WATCHED:
            self._try(3, lambda: self._modified(v))
        self._try(6, lambda: self._dense(v))

    def _cotangent(self, number: int) -> Tensor:
        v = direction(self._problem.m, self._settings.seed, EVIDENCE_STREAM + 16 * number)
        if self._only is not None:
            v[: self._only.first] = 0.0
            v[self._only.first + self._only.size :] = 0.0
        return v.to(self._problem.device).unsqueeze(0)

    def _vjp(self, cotangents: Tensor, gapped: int = 0, expanded: int = 0) -> Tensor:
        return self._problem.vjp(cotangents, gapped, expanded, self._only)

    def _repeated(self, v: Tensor) -> None:
        graphs = []
        for count in RUNS:
            self._problem.evaluate(True)  # the next VJP makes a new graph
            graphs.append([self._vjp(v) for _ in range(count)])
        first = graphs[0][0]
        self._note(runs=tuple(tuple(_deviation(run, first) for run in graph) for graph in graphs))

    def _after_others(self, v: Tensor) -> None:
        before = self._vjp(v)
        away = direction(self._problem.n, self._settings.seed, EVIDENCE_STREAM + 16 * 7).to(self._problem.device)
        after = self._problem.vjp_of_older_graph(v, away.mul_(2.0**-4), self._only)
        self._note(after_others=_deviation(after, before))

    def _scaled(self, v: Tensor) -> None:
        gradient = self._vjp(v)
        size = _size(gradient)
        found = []
        for scale in SCALES:
            other = self._vjp(scale * v)
            found.append((scale, _deviation(other / scale, gradient), _size(other) / size if size else math.nan))
        self._note(scaled=tuple(found))

    def _split(self, v: Tensor) -> None:
        half = direction(self._problem.m, self._settings.seed, EVIDENCE_STREAM, halved=True).to(v.device)
        single = torch.zeros_like(v)
        first = self._only.first if self._only is not None else 0
        single[0, first] = v[0, first]
        some = torch.where(half == 0, 0.0, v - single)
        parts = self._vjp(torch.cat([single, some, v - single - some]))
        gradient = self._vjp(v)
        self._note(split=_deviation(parts.sum(0, keepdim=True), gradient))
        other = self._cotangent(1)
        parts = self._vjp(torch.cat([other, v - other]))
        self._note(added=_deviation(parts.sum(0, keepdim=True), gradient))

    def _layouts(self, v: Tensor) -> None:
        contiguous = self._try(1, lambda: self._vjp(v))
        if contiguous is not None and self._left() > 0:
            deviation, error = _deviation_or_error(lambda: self._vjp(v, gapped=1), contiguous)
            self._note(gapped=deviation, gapped_error=error)
        ones = torch.full_like(v, EXPANDED_VALUE)
        contiguous = self._try(2, lambda: self._vjp(ones))
        if contiguous is not None:
            deviation, error = _deviation_or_error(lambda: self._vjp(ones, expanded=1), contiguous)
            self._note(expanded=deviation, expanded_error=error)

    def _modified(self, v: Tensor) -> None:
        graph = self._problem.graph()
        outputs = graph if self._only is None else (graph[self._only.index],)
        with written_gradients(outputs) as written:
            gradient = self._vjp(v)
            if not written():
                return
        with copied_gradients(outputs):
            self._note(modified=_deviation(gradient, self._vjp(v)))

    def _dense(self, v: Tensor) -> None:
        problem, settings = self._problem, self._settings
        differences = directional_differences(problem, settings, problem.base(), settings.eps, 1, 0, extrapolated=1)
        terms = v[0] * differences.derivatives[0]
        others = self._vjp(v)[0] * differences.directions[0]
        size = float(terms.abs().sum() + others.abs().sum())
        noise = float(v[0].abs() @ differences.noise)
        if size and noise <= RESOLVED * size:
            self._note(dense_error=abs(float(terms.sum() - others.sum())) / size)

    # Experiments with func, and second opinions

    def _movement_of_func(self) -> None:
        first, second = (self._problem.evaluate(True) for _ in range(2))
        self._note(func_moves=float((first - second).abs().nan_to_num(0.0).max()))

    def _second_opinions(self) -> None:
        worst = self._failure.comparison.worst if self._failure.comparison is not None else None
        self._try(2, self._precision)
        if worst is None or self._output is None or self._input is None:
            return
        output, block = self._output, self._input
        if modulus(worst.numerical) == 0:
            self._try(2 * len(LARGE_STEPS), lambda: self._slopes(output, block, worst))
        if self._failure.trouble in ("not converged", "low precision"):
            self._try(1, lambda: self._rounding(output, block, worst))
        self._try(2, lambda: self._other_mode(output, block, worst))
        if self._evidence.other_mode is not None:
            self._try(len(self._problem.inputs) + len(self._problem.outputs) + 1, self._adjoint)
        if self._failure.part != "all":
            self._try(6, lambda: self._other_part(output, block, worst))

    def _adjoint(self) -> None:
        self._note(adjoint_error=adjoint(self._problem, 1, None, self._settings.seed).error)

    def _precision(self) -> None:
        """Whether outputs next to x are all numbers of a narrower dtype: doubles that are chance would not be."""
        problem = self._problem
        base = problem.base()
        away = direction(problem.n, self._settings.seed, EVIDENCE_STREAM + 16 * 6).mul_(2.0**-10).to(problem.device)
        values = problem.evaluate(True, away)
        for output in problem.outputs:
            if output.tensor.dtype not in (torch.float64, torch.complex128):
                return
        chosen = self._output or problem.outputs[0]
        own = slice(chosen.first, chosen.first + chosen.size)
        moved = values[own][(values[own] != base[own]) & values[own].isfinite()]
        moved = moved[moved != moved.round()]
        for dtype in NARROWER:
            if moved.numel() and bool((moved.to(dtype).to(torch.float64) == moved).all()):
                self._note(output_dtype=str(dtype).removeprefix("torch."))
                return

    def _slopes(self, output: Block, block: Block, worst: Entry) -> None:
        column, row = self._coordinates(output, block, worst)
        displacement = torch.zeros(self._problem.n, dtype=torch.float64, device=self._problem.device)
        found = []
        for step in LARGE_STEPS:
            displacement[column] = step
            plus, minus = (self._problem.evaluate(self._record, displacement, sign)[row].item() for sign in (1.0, -1.0))
            width = self._problem.realized_width(displacement, 1.0)[column].item()
            if width:
                found.append((step, (plus - minus) / width))
        self._note(slopes=tuple(found))

    def _rounding(self, output: Block, block: Block, worst: Entry) -> None:
        _, row = self._coordinates(output, block, worst)
        self._note(rounding=spacing(output.tensor.dtype) * abs(self._problem.base()[row].item()))

    def _coordinates(self, output: Block, block: Block, worst: Entry) -> tuple[int, int]:
        """The first coordinate of the worst entry's input element, and the output's of the failing part."""
        element = _flat(worst.input_index, block.tensor.shape)
        if block.elements is not None:
            element = int((block.elements == element).nonzero()[0])
        row = output.first + output.width * _flat(worst.output_index, output.tensor.shape)
        column = block.first + block.width * element
        imaginary = int(self._failure.part == "imaginary")
        return (column + imaginary, row) if self._failure.mode == "forward" else (column, row + imaginary)

    def _other_mode(self, output: Block, block: Block, worst: Entry) -> None:
        column, row = self._coordinates(output, block, worst)
        if self._failure.mode == "reverse":
            tangents, _ = self._problem.tangent_columns(column, block.width)
            value = tangents[:, row].tolist()
        else:
            element, width = _flat(worst.output_index, output.tensor.shape), output.width
            value = [
                self._problem.analytical_rows(output, part == 1, element, 1, [block], 0, 1.0)[0][
                    0, column - block.first
                ].item()
                for part in range(width)
            ]
        self._note(other_mode=complex(*value))

    def _other_part(self, output: Block, block: Block, worst: Entry) -> None:
        """The same entry of the other part of a complex output, or in forward mode input."""
        column, row = self._coordinates(output, block, worst)
        if self._failure.mode == "forward":
            column += -1 if self._failure.part == "imaginary" else 1
            numerical = self._problem.difference_columns(column, 1, self._settings.eps, self._record)
            analytical, _ = self._problem.tangent_columns(column, 1)
            rows = slice(row, row + output.width)
            found = complex(*analytical[0, rows].tolist()), complex(*numerical[0, rows].tolist())
        else:
            other = self._failure.part != "imaginary"
            row += 1 if other else -1
            element = _flat(worst.output_index, output.tensor.shape)
            gradient, _, _ = self._problem.analytical_rows(output, other, element, 1, [block], 0, 1.0)
            columns = self._problem.difference_columns(column, block.width, self._settings.eps, self._record)
            own = slice(column - block.first, column - block.first + block.width)
            found = complex(*gradient[0, own].tolist()), complex(*columns[:, row].tolist())
        self._note(other_part=found)


def _flat(index: tuple[int, ...], shape: Iterable[int]) -> int:
    """The number, in C order, of an element."""
    number = 0
    for i, size in zip(index, shape, strict=True):
        number = number * size + i
    return number


def _around(element: int, shape: tuple[int, ...], seed: int) -> Iterator[int]:
    """An element, its neighbors along each dimension, the ends, where tails of blocks begin, and random others."""
    index = []
    for size in reversed(shape):
        index.append(element % size)
        element //= size
    index.reverse()
    seen: set[tuple[int, ...]] = set()

    def places() -> Iterator[tuple[int, ...]]:
        yield tuple(index)
        along: list[list[int]] = []
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
                    yield (*index[:dim], candidates[turn], *index[dim + 1 :])
            # Every other one at random: neighbors alone would not tell a place from a rule.
            where = direction(max(1, len(shape)), seed, EVIDENCE_STREAM + 16 * 9, 8 * turn).abs_().sub_(0.5).tolist()
            yield tuple(min(size - 1, int(share * size)) for share, size in zip(where, shape, strict=False))

    for place in places():
        if place not in seen:
            seen.add(place)
            yield _flat(place, shape)


def _elements(coordinates: Tensor, block: Block) -> Tensor:
    """The elements of a block, from all coordinates of its side."""
    own = coordinates[block.first : block.first + block.size]
    return torch.view_as_complex(own.contiguous().view(-1, 2)) if block.is_complex else own


def _paired(coordinates: Tensor) -> Tensor:
    """Complex entries of pairs of columns, shape (rows, entries)."""
    return torch.view_as_complex(coordinates.contiguous().view(coordinates.shape[0], -1, 2))


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _failing(analytical: Tensor, numerical: Tensor, atol: float, rtol: float) -> Tensor:
    return ~torch.isclose(analytical, numerical, rtol=rtol, atol=atol)


def _thinned(failing: Tensor, seed: int) -> Tensor:
    """The numbers of at most MOST_ENTRIES of some entries, failing ones not crowded out, nor these crowding out."""
    if failing.numel() <= MOST_ENTRIES:
        return torch.arange(failing.numel(), device="cpu")
    generator = torch.Generator("cpu").manual_seed(seed % (1 << 63))
    order = torch.randperm(failing.numel(), generator=generator, device="cpu")
    wrong, right = order[failing[order]], order[~failing[order]]
    wrong = wrong[: max(MOST_ENTRIES // 2, MOST_ENTRIES - right.numel())]
    return torch.cat([wrong, right[: MOST_ENTRIES - wrong.numel()]]).sort().values


def _thinned_sample(sample: Sample, seed: int) -> Sample:
    chosen = _thinned(sample.failing, seed)
    names = "outputs", "inputs", "analytical", "numerical", "failing"
    return replace(sample, **{name: getattr(sample, name)[chosen] for name in names})


def _size(gradient: Tensor) -> float:
    return float(gradient.abs().max())


def _deviation(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest component; infinite where one is not finite and the other is."""
    difference, size = float((found - expected).abs().max()), _size(expected)
    if difference != difference:
        return math.inf
    return difference / size if size else (math.inf if difference else 0.0)


def _deviation_or_error(run: Callable[[], Tensor], expected: Tensor) -> tuple[float | None, str | None]:
    try:
        return _deviation(run(), expected), None
    except OUT_OF_MEMORY:
        return None, None
    except Exception as error:
        return None, f"{type(error).__name__}: {_first_sentence(str(error))}"


def _first_sentence(text: str) -> str:
    return text.strip().partition("\n")[0].partition(". ")[0].removesuffix(".")
