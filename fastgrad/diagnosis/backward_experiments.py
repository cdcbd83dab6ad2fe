"""Experiments with backward after a failure: repeated runs, other scales, other layouts, sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastgrad.core.memory import OUT_OF_MEMORY
from fastgrad.core.native import Layout
from fastgrad.core.precision import ROUNDING
from fastgrad.core.random import EVIDENCE_STREAM, RandomState, direction
from fastgrad.core.torch_private import nodes_behind
from fastgrad.diagnosis.experiments import Experiments
from fastgrad.engines.grad_output_kinds import CONSTANT
from fastgrad.engines.sketch import directional_differences
from fastgrad.report.evidence import Sample

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


class BackwardExperiments(Experiments):
    """Evidence from runs of backward."""

    def _vjps(self, sample: Sample | None) -> None:
        v = self._cotangent(0)
        gradient = self._try(2, lambda: self._vjp(v))
        if gradient is None or not bool(gradient.isfinite().all()):
            return
        block = self._input
        if sample is not None and block is not None and block.elements is None:
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
