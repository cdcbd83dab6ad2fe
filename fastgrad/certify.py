"""Proofs by random cotangents: that a backward is the linear map whose rows were compared.

Rows come from one-hot, contiguous cotangents. A backward that clamps, squares or takes the sign of
grad_output, that is right only for a contiguous or only for a dense one, gives those rows and still
is wrong: v^T J summed from the rows must equal the VJP of v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgrad._native import ops
from fastgrad.compare import differ
from fastgrad.directions import COTANGENT_STREAM
from fastgrad.engines import JacobianBlock
from fastgrad.problem import Problem
from fastgrad.report import Failure, Settings

HALVED_SCALE = -4.0
"""The half-zeroed cotangent against the dense one: another sign and size, so that even a single
element shows a clamp, a sign or an absolute value of grad_output."""


class LinearityProof:
    """v^T J against the VJP of v, for two v in R^m over all outputs at once.

    Row 0 of the cotangents is dense, with components +-[0.5, 1.5), and handed over non-contiguous;
    row 1 is HALVED_SCALE times row 0 with a random half zeroed, and contiguous. For m = 1 the second
    alone, and negative, tells all that the one-hot cotangent 1 does not.
    """

    def __init__(self, problem: Problem, settings: Settings) -> None:
        self._problem = problem
        self._settings = settings
        self._cotangents = torch.empty(2, problem.m, dtype=torch.float64, device=problem.device)
        dense, halved = self._cotangents
        ops.direction_(dense, settings.seed, COTANGENT_STREAM, 0, False)
        ops.direction_(halved, settings.seed, COTANGENT_STREAM, 0, True)
        halved.mul_(HALVED_SCALE)
        if problem.m == 1:
            self._cotangents = -halved.abs_().unsqueeze(0)
        size = (2, self._cotangents.shape[0], problem.n)
        self._sums, self._squares = torch.zeros(size, dtype=torch.float64, device=problem.device)

    def add(self, block: JacobianBlock) -> None:
        """Takes a block of analytical rows into v^T J."""
        width = 2 if block.output.is_complex else 1
        offset = block.output.first + block.first_row * width + (1 if block.part == "imaginary" else 0)
        rows, columns = block.analytical.shape
        first = block.input.first + block.first_column
        ops.project_rows_(
            self._sums[:, first : first + columns],
            self._squares[:, first : first + columns],
            self._cotangents[:, offset : offset + (rows - 1) * width + 1 : width],
            block.analytical,
        )

    def failure(self) -> Failure | None:
        """Compares with the VJPs, coordinate by coordinate, once all rows are in.

        A coordinate passes within atol max|v| + rtol times the root of the sum of squares of the
        terms of v^T J: the check's own tolerance for the entries, were their errors independent.
        """
        gradients = torch.empty_like(self._sums)
        try:
            for k in range(gradients.shape[0]):
                self._vjp(k, gradients[k])
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self._raise_if_passing(k, error)
            kind = "dense and non-contiguous" if self._is_dense(k) else "with a random half of its elements zero"
            return Failure(
                "nonlinear", detail=f"it raised {type(error).__name__} for a grad_output {kind}", cause=error
            )
        settings = self._settings
        if not differ(gradients, self._sums, settings.atol, False):
            return None  # closer than any tolerance below
        size = self._cotangents.abs()
        allowed = (
            settings.atol * size.amax(1, keepdim=True)
            + settings.nondet_tol * size.sum(1, keepdim=True)
            + settings.rtol * self._squares.sqrt()
        )
        # Not "error > allowed": a NaN must count. An infinite sum was compared row by row already.
        wrong = ~((gradients - self._sums).abs() <= allowed) & self._sums.isfinite()
        if not bool(wrong.any()):
            return None
        which, coordinate = (int(i) for i in wrong.nonzero()[0])
        return self._diagnosed(which, coordinate, gradients, allowed)

    def _is_dense(self, which: int) -> bool:
        return which + self._cotangents.shape[0] == 2 and which == 0

    def _vjp(self, which: int, out: Tensor | None = None) -> Tensor:
        return self._problem.vjp(self._cotangents[which], not self._is_dense(which), out)

    def _raise_if_passing(self, which: int, error: Exception) -> None:
        """Lets an error through that does not come again: it was not the grad_output's doing."""
        try:
            self._vjp(which)
        except Exception:
            return
        raise error

    def _diagnosed(self, which: int, coordinate: int, gradients: Tensor, allowed: Tensor) -> Failure:
        block = next(block for block in self._problem.inputs if coordinate < block.first + block.size)
        again = self._vjp(which)
        if differ(again.unsqueeze(0), gradients[which].unsqueeze(0), self._settings.nondet_tol, False):
            return Failure("nondeterministic", input=block.index, input_position=block.position)
        kind = "with a random half of its elements zero"
        if self._is_dense(which):
            kind = "dense and non-contiguous"
            error = (self._problem.vjp(self._cotangents[which]) - self._sums[which]).abs()
            kind += ", though not for a contiguous copy" if bool((error <= allowed[which]).all()) else ""
        index = block.element_index((coordinate - block.first) // (2 if block.is_complex else 1))
        detail = (
            f"for a random grad_output, {kind}, the gradient of input {block.index} at {list(index)} is "
            f"{gradients[which, coordinate].item():.6g}, but the rows of the Jacobian add up to "
            f"{self._sums[which, coordinate].item():.6g} (allowed difference {allowed[which, coordinate].item():.2g})"
        )
        return Failure("nonlinear", input=block.index, input_position=block.position, detail=detail)
