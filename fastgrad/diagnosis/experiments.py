"""Experiments after a failure: with func, and with backward (repeated runs, other scales and layouts, sums)."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastgrad.core.memory import OUT_OF_MEMORY, Result
from fastgrad.core.native import Layout
from fastgrad.core.precision import ROUNDING, modulus, spacing
from fastgrad.core.random import EVIDENCE_STREAM, RandomState, direction
from fastgrad.core.tensors import element_number
from fastgrad.core.torch_private import nodes_behind
from fastgrad.engines.grad_output_kinds import CONSTANT
from fastgrad.engines.sketch import directional_differences
from fastgrad.problem.coordinates import Block
from fastgrad.problem.problem import Problem
from fastgrad.report.evidence import Evidence, Sample
from fastgrad.report.failure import Entry, Failure
from fastgrad.report.report import Report
from fastgrad.verdict.adjoint_taylor import adjoint

MORE_CALLS = 96
"""Number of calls of func and backward that experiments may take in addition to the number that the check itself
took."""

OTHER_CALLS = 72
"""Number of these calls that a sample of the entries leaves to the other experiments."""

SECONDS = 1.0
"""Largest wall time of the experiments, in seconds; with the measured time of a call, it limits their calls."""

LARGEST_WATCHED = 1 << 22
"""Largest number of coordinates, of inputs and outputs, for which grad_outputs are copied to detect writes."""

SCALES = (-1.0, 4.0, 0.5)
"""Scales of cotangents: powers of two up to sign, by which the gradients of a linear backward scale exactly."""

RUNS = (3, 2, 3)
"""Numbers of runs of one VJP on each of several graphs. With equal numbers, a change at every third call might be
missed."""

NEGLIGIBLE = 2.0**-10
"""Share of atol up to which a difference of gradients is no evidence."""

RESOLVED = 1e-5
"""Largest relative noise of a directional derivative that counts as evidence."""

Gradients = tuple[Tensor | None, ...]
"""The grad_outputs of a node of the graph; None: undefined."""

NARROWER = (torch.bfloat16, torch.float16, torch.float32)

FEWER_BITS = 3
"""All values of a lower dtype fit in this many bits less only by chance: one value does with a probability of 1/8."""

LARGE_STEPS = (2.0**-3, 2.0**-4, 2.0**-5)
"""Large steps for an entry whose differences at eps are zero: func may be piecewise constant."""


class Experiments:
    """A failed check, the evidence so far, and the number of calls that experiments may still make."""

    def __init__(self, problem: Problem, report: Report, failure: Failure, known_sample: Sample | None) -> None:
        self._problem = problem
        self._report = report
        self._failure = failure
        self._known_sample = known_sample
        self._settings = report.settings
        self._record = report.plan.record_graph if report.plan else True
        self._before = self._calls()
        used = report.evaluations + report.vjps
        self._most = used + MORE_CALLS
        self._cost = report.seconds / max(1, used)
        self._start = time.perf_counter()
        pairs = itertools.product(problem.outputs, problem.inputs)
        failing = failure.output, failure.input
        self._pair = next((pair for pair in pairs if (pair[0].index, pair[1].index) == failing), None)
        # The error is searched for only in the output that failed, because later outputs have not been compared.
        self._only = self._pair[0] if self._pair is not None and failure.kind == "mismatch" else None
        self._evidence = Evidence()

    def _calls(self) -> int:
        return self._problem.evaluations + self._problem.vjps

    def _left(self) -> int:
        """The number of calls that may still be made."""
        seconds = SECONDS - (time.perf_counter() - self._start)
        in_time = int(seconds / self._cost) if self._cost > 0 else self._most
        return min(self._most - (self._calls() - self._before), in_time)

    def _try(self, calls: int, experiment: Callable[[], Result]) -> Result | None:
        """The result of an experiment; None if too few calls remain or it raises."""
        if calls > self._left():
            return None
        try:
            return experiment()
        except Exception:  # func raises, or memory is too small: the failure is reported without this evidence
            return None

    def _note(self, **found: object) -> None:
        self._evidence = replace(self._evidence, **found)  # type: ignore[arg-type]

    def _coordinates(self, output: Block, block: Block, worst: Entry) -> tuple[int, int]:
        """Coordinates of the worst entry in all inputs and in all outputs; if complex, of the part that fails."""
        element = element_number(worst.input_index, block.tensor.shape)
        if block.elements is not None:
            element = int((block.elements == element).nonzero()[0])
        row = output.first + output.width * element_number(worst.output_index, output.tensor.shape)
        column = block.first + block.width * element
        imaginary = int(self._failure.part == "imaginary")
        return (column + imaginary, row) if self._failure.mode == "forward" else (column, row + imaginary)


class BackwardExperiments(Experiments):
    """Evidence from runs of backward."""

    def _vjps(self, sample: Sample | None) -> None:
        v = self._cotangent(0)
        gradient = self._try(2, lambda: self._vjp(v))
        if gradient is None or not bool(gradient.isfinite().all()):
            return
        if sample is not None and self._pair is not None and self._pair[1].elements is None:
            block = self._pair[1]
            own = gradient[0, block.slice].reshape(-1, block.width).cpu()
            self._note(vanishes=not bool(own[sample.inputs[sample.failing]].any()))
        self._try(sum(RUNS) + 2 * len(RUNS), lambda: self._repeated(v))
        self._try(5, lambda: self._after_others(v))
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
            v[self._only.end :] = 0.0
        return v.to(self._problem.device).unsqueeze(0)

    def _vjp(self, cotangents: Tensor, layouts: Sequence[Layout] = ()) -> Tensor:
        return self._problem.vjp(cotangents, layouts, self._only)

    def _repeated(self, v: Tensor) -> None:
        graphs = []
        draws = False
        for count in RUNS:
            self._problem.evaluate(True)  # the next VJP makes a new graph
            graph = [self._vjp(v)]
            state = RandomState()  # func may have drawn until here
            graph += [self._vjp(v) for _ in range(count - 1)]
            draws = draws or state.has_changed()
            graphs.append(graph)
        first = graphs[0][0]
        self._note(runs=tuple(tuple(_deviation(run, first) for run in graph) for graph in graphs), draws=draws)

    def _after_others(self, v: Tensor) -> None:
        before = self._vjp(v)
        away = direction(self._problem.n, self._settings.seed, EVIDENCE_STREAM + 16 * 7).to(self._problem.device)
        after = self._problem.vjp_before(v, self._only, away.mul_(2.0**-4))
        self._note(after_others=_deviation(after, before))
        self._problem.evaluate(True, away)  # the next VJP makes a new graph
        self._note(after_call=_deviation(self._vjp(v), before))

    def _scaled(self, v: Tensor) -> None:
        gradient = self._vjp(v)
        size = _size(gradient) or math.nan
        others = [(scale, self._vjp(scale * v)) for scale in SCALES]
        found = ((c, self._nonlinearity(other / c, gradient), _size(other) / size) for c, other in others)
        self._note(scaled=tuple(found))

    def _split(self, v: Tensor) -> None:
        half = direction(self._problem.m, self._settings.seed, EVIDENCE_STREAM, halved=True).to(v.device)
        single = torch.zeros_like(v)
        first = self._only.first if self._only is not None else 0
        single[0, first] = v[0, first]
        some = torch.where(half == 0, 0.0, v - single)
        parts = self._vjp(torch.cat([single, some, v - single - some]))
        gradient = self._vjp(v)
        self._note(split=self._nonlinearity(parts.sum(0, keepdim=True), gradient))
        other = self._cotangent(1)
        parts = self._vjp(torch.cat([other, v - other]))
        self._note(added=self._nonlinearity(parts.sum(0, keepdim=True), gradient))

    def _layouts(self, v: Tensor) -> None:
        contiguous = self._try(1, lambda: self._vjp(v))
        if contiguous is not None and self._left() > 0:
            self._layout("non_contiguous", v, Layout.NON_CONTIGUOUS, contiguous)
            self._layout("offset", v, Layout.OFFSET, contiguous)
        ones = torch.full_like(v, CONSTANT)
        contiguous = self._try(2, lambda: self._vjp(ones))
        if contiguous is not None:
            self._layout("expanded", ones, Layout.EXPANDED, contiguous)

    def _layout(self, name: str, v: Tensor, layout: Layout, expected: Tensor) -> None:
        try:
            self._note(**{name: self._nonlinearity(self._vjp(v, [layout]), expected)})
        except OUT_OF_MEMORY:
            return
        except Exception as error:
            sentence = str(error).strip().partition("\n")[0].partition(". ")[0].removesuffix(".")
            self._note(**{f"{name}_error": f"{type(error).__name__}: {sentence}"})

    def _modified(self, v: Tensor) -> None:
        graph = self._problem.graph()
        outputs = graph if self._only is None else (graph[self._only.index],)
        kept: list[tuple[Tensor, Tensor]] = []

        def keep(gradients: Gradients) -> None:
            kept.extend((gradient, gradient.clone()) for gradient in gradients if gradient is not None)

        def copy(gradients: Gradients) -> Gradients:
            return tuple(None if gradient is None else gradient.clone() for gradient in gradients)

        with _before_each_node(outputs, keep):
            gradient = self._vjp(v)
        if not all(torch.allclose(gradient, before, 0, 0, equal_nan=True) for gradient, before in kept):
            with _before_each_node(outputs, copy):  # writes into copies do not affect other nodes
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

    def _nonlinearity(self, found: Tensor, expected: Tensor) -> float:
        """Like `_deviation`, but zero if rounding explains the difference, or if it is negligible."""
        negligible = max(NEGLIGIBLE * self._settings.atol, ROUNDING * self._problem.unit_roundoff)
        return 0.0 if float((found - expected).abs().max()) <= negligible else _deviation(found, expected)


class FuncExperiments(Experiments):
    """Evidence about the worst entry from runs of func and from the other mode."""

    def _repeatability_of_func(self) -> None:
        first, second = (self._problem.evaluate(True) for _ in range(2))
        self._note(func_varies=float((first - second).abs().nan_to_num(0.0).max()))

    def _other_measurements(self) -> None:
        worst = self._failure.comparison.worst if self._failure.comparison is not None else None
        self._try(2, self._precision)
        if worst is None or self._pair is None:
            return
        output, block = self._pair
        if modulus(worst.numerical) == 0:
            self._try(2 * len(LARGE_STEPS), lambda: self._slopes(output, block, worst))
        if self._failure.numerical_issue in ("not converged", "low precision"):
            self._try(1, lambda: self._rounding(output, block, worst))
        begin = time.perf_counter()
        self._try(2, lambda: self._other_mode(output, block, worst))
        self._start += time.perf_counter() - begin  # not counted: forward mode may import torch's compiler
        if self._evidence.other_mode is not None:
            calls, seed = len(self._problem.inputs) + len(self._problem.outputs) + 1, self._settings.seed
            self._try(calls, lambda: self._note(adjoint_error=adjoint(self._problem, 1, None, seed).error))
        if self._failure.part != "all":
            self._try(6, lambda: self._other_part(output, block, worst))

    def _precision(self) -> None:
        """Notes the narrowest lower dtype, if any, that exactly represents the failing output at inputs next to x."""
        problem = self._problem
        if any(output.tensor.dtype not in (torch.float64, torch.complex128) for output in problem.outputs):
            return
        base = problem.base()
        away = direction(problem.n, self._settings.seed, EVIDENCE_STREAM + 16 * 6).mul_(2.0**-10).to(problem.device)
        values = problem.evaluate(True, away)
        own = (self._pair or problem.outputs)[0].slice
        moved = values[own][(values[own] != base[own]) & values[own].isfinite()]
        moved = moved[moved != moved.round()]
        for dtype in NARROWER:
            # Small multiples of a power of two, for example what rounding leaves, are representable in any dtype.
            bits = 1 - round(math.log2(torch.finfo(dtype).eps))
            is_exact = bool((moved.to(dtype).to(torch.float64) == moved).all())
            if is_exact and not _fit(moved, bits - FEWER_BITS):
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

    def _other_mode(self, output: Block, block: Block, worst: Entry) -> None:
        column, row = self._coordinates(output, block, worst)
        if self._failure.mode == "reverse":
            tangents, _ = self._problem.tangent_columns(column, block.width)
            value = tangents[:, row].tolist()
        else:
            value = [self._problem.row(row + part, output)[column].item() for part in range(output.width)]
        self._note(other_mode=complex(*value))

    def _other_part(self, output: Block, block: Block, worst: Entry) -> None:
        """Measures the worst entry in the other part of a complex output; in forward mode, of a complex input."""
        column, row = self._coordinates(output, block, worst)
        if self._failure.mode == "forward":
            column += -1 if self._failure.part == "imaginary" else 1
            numerical = self._problem.difference_columns(column, 1, self._settings.eps, self._record)
            analytical, _ = self._problem.tangent_columns(column, 1)
            rows = slice(row, row + output.width)
            found = complex(*analytical[0, rows].tolist()), complex(*numerical[0, rows].tolist())
        else:
            row += -1 if self._failure.part == "imaginary" else 1
            gradient = self._problem.row(row, output)[column : column + block.width]
            columns = self._problem.difference_columns(column, block.width, self._settings.eps, self._record)
            found = complex(*gradient.tolist()), complex(*columns[:, row].tolist())
        self._note(other_part=found)


@contextmanager
def _before_each_node(outputs: Sequence[Tensor], hook: Callable[[Gradients], Any]) -> Iterator[None]:
    """Calls a hook with the grad_outputs of each node that runs; a result of the hook replaces them."""
    handles = [node.register_prehook(hook) for node in nodes_behind(outputs)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _deviation(found: Tensor, expected: Tensor) -> float:
    """The largest difference, divided by the largest expected component.

    It is infinite if only one of two corresponding components is finite, or if only `expected` is zero.
    """
    difference, size = float((found - expected).abs().max()), _size(expected)
    if difference != difference:
        return math.inf
    return difference / size if size else (math.inf if difference else 0.0)


def _size(gradient: Tensor) -> float:
    return float(gradient.abs().max())


def _fit(values: Tensor, bits: int) -> bool:
    """Whether this many bits of the significand represent all values exactly."""
    significands = torch.frexp(values).mantissa * 2.0**bits
    return bool((significands == significands.round()).all())
