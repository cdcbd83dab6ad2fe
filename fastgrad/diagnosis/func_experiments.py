"""Experiments with func after a failure, and other ways to measure the worst entry."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from fastgrad.core.precision import modulus, spacing
from fastgrad.core.random import EVIDENCE_STREAM, direction
from fastgrad.core.tensors import element_number
from fastgrad.diagnosis.experiments import Experiments
from fastgrad.problem.coordinates import Block
from fastgrad.report.failure import Entry
from fastgrad.verdict.adjoint_taylor import adjoint

NARROWER = (torch.bfloat16, torch.float16, torch.float32)

FEWER_BITS = 3
"""All values of a lower dtype fit in this many bits less only by chance: one value does with a probability of 1/8."""

LARGE_STEPS = (2.0**-3, 2.0**-4, 2.0**-5)
"""Large steps for an entry whose differences at eps are zero: func may be piecewise constant."""


class FuncExperiments(Experiments):
    """Evidence about the worst entry from runs of func and from the other mode."""

    def _repeatability_of_func(self) -> None:
        first, second = (self._problem.evaluate(True) for _ in range(2))
        self._note(func_varies=float((first - second).abs().nan_to_num(0.0).max()))

    def _other_measurements(self) -> None:
        worst = self._failure.comparison.worst if self._failure.comparison is not None else None
        self._try(2, self._precision)
        if worst is None or self._output is None or self._input is None:
            return
        output, block = self._output, self._input
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
        chosen = self._output or problem.outputs[0]
        own = chosen.slice
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
            element, width = element_number(worst.output_index, output.tensor.shape), output.width
            value = [
                self._problem.analytical_rows(output, part == 1, element, 1, [block])[0][0, column - block.first].item()
                for part in range(width)
            ]
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
            other = self._failure.part != "imaginary"
            row += 1 if other else -1
            element = element_number(worst.output_index, output.tensor.shape)
            gradient, _, _ = self._problem.analytical_rows(output, other, element, 1, [block])
            columns = self._problem.difference_columns(column, block.width, self._settings.eps, self._record)
            own = slice(column - block.first, column - block.first + block.width)
            found = complex(*gradient[0, own].tolist()), complex(*columns[:, row].tolist())
        self._note(other_part=found)


def _fit(values: Tensor, bits: int) -> bool:
    """Whether this many bits of the significand represent all values exactly."""
    significands = torch.frexp(values).mantissa * 2.0**bits
    return bool((significands == significands.round()).all())
