"""The derivative of the loss along random directions of all parameters, by autograd and by differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastgrad.core.memory import OUT_OF_MEMORY
from fastgrad.core.random import SKETCH_DIRECTIONS, uniform_like
from fastgrad.model.step import Step
from fastgrad.report.model_data import EndToEnd

STEPS = {torch.float64: 1e-6, torch.float32: 2.0**-9, torch.bfloat16: 2.0**-4, torch.float16: 2.0**-5}
"""Step of parameters, relative to their root mean square, at which truncation and rounding of the loss balance."""

SMALLER = 2.0**-6
"""The second step, relative to the first. It crosses a 64th as many kinks."""

ALLOWED = {torch.float64: 1e-4, torch.float32: 2e-2, torch.bfloat16: 0.2, torch.float16: 0.1}
"""Allowed error of a directional derivative, relative to the root of the sum of squares of its terms: kinks that a step
crosses account for 1e-5 in double precision."""

MAX_AMPLIFIED = 100.0
"""Parameters with small gradients are moved further, at most by this factor."""

NEGLIGIBLE = 1e-6
"""A gradient that contributes less than this, relative to the largest contribution, is rounding, for example that of a
bias before a norm."""

SMALLEST_MOVE = 1e-2
"""Least size of a parameter, to which its steps are relative: its values may be zero, for example those of a bias."""

LARGE_MOVE = 0.5
"""Large step of parameters, relative to their size, which also changes values that are rounded to integers."""

NEXT_TO = 0.1
"""Distance by which parameters at a kink of the loss are moved, relative to their sizes."""

DEPENDS = 256.0
"""Least difference of two losses, in units of the spacing of numbers of their size, that shows a dependence."""

TINY_STEPS = (2.0**-20, 2.0**-21, 2.0**-22)
"""Steps, relative to that of such a difference, at which only rounding changes the loss. If terms cancel, for example
in the sum of a normalized batch, rounding is larger than the size of the loss suggests."""

ABOVE_ROUNDING = 16.0
"""Least difference of two losses, relative to those at `TINY_STEPS`, that shows a dependence."""


@dataclass
class DirectionalComparison:
    """A direction of the parameters, and the derivatives along it by differences and by autograd."""

    vectors: list[Tensor | None]
    numerical: float
    noise: float
    size: float = 0.0
    """The root of the sum of squares of the terms by autograd or, if it is larger, the modulus of `numerical`."""
    analytical: float = 0.0
    allowed: float = 0.0

    @property
    def agrees(self) -> bool:
        return abs(self.analytical - self.numerical) <= self.allowed


class LossDerivatives:
    """Derivatives of a step's loss; after `enter_precise`, in double precision if the model supports it.

    Attributes
    ----------
    dtype
        Dtype of the loss.
    loss
        The loss.
    gradients
        Gradients of the parameters.
    """

    def __init__(self, step: Step, seed: int) -> None:
        self._step, self._seed = step, seed
        self.dtype, self.loss = torch.float64, 0.0
        self.gradients: list[Tensor | None] = []

    def measure(self) -> None:
        """Computes the gradients at the current parameters."""
        loss = self._step.loss()
        self.dtype, self.loss = loss.dtype, float(loss.detach())
        self.gradients = self._step.gradients(loss)

    def direction(self, number: int) -> list[Tensor | None]:
        """A random direction of all parameters with gradients, relative to their sizes; larger for small gradients."""
        moves = [self._uniform(i, number) for i in range(len(self._step.parameters))]
        missing = self.missing()
        shares = [0.0 if g is None else _norm(_real_product(g, u)) for g, u in zip(self.gradients, moves, strict=True)]
        largest = max(shares, default=0.0)
        return [
            None if i in missing else u * (min(MAX_AMPLIFIED, largest / share) if share > NEGLIGIBLE * largest else 1.0)
            for i, (u, share) in enumerate(zip(moves, shares, strict=True))
        ]

    def only(self, which: Sequence[int], number: int = 0) -> list[Tensor | None]:
        """A random direction of some parameters."""
        return [self._uniform(i, number) if i in which else None for i in range(len(self._step.parameters))]

    def _uniform(self, i: int, number: int) -> Tensor:
        parameter = self._step.parameters[i]
        size = _norm(parameter) / math.sqrt(max(1, parameter.numel()))
        stream = SKETCH_DIRECTIONS + 16 * (number * len(self._step.parameters) + i)
        return uniform_like(parameter.detach(), self._seed, stream) * max(size, SMALLEST_MOVE)

    def along(self, vectors: list[Tensor | None]) -> DirectionalComparison:
        """Both derivatives along a direction, from eight evaluations at two steps; of the step with less noise."""
        found = []
        for step in self._steps():
            coarse, size = self._change(vectors, 2 * step)
            fine, _ = self._change(vectors, step)
            coarse, fine = coarse / (4 * step), fine / (2 * step)
            noise = abs(fine - coarse) + self._rounding(size, step)
            found.append(DirectionalComparison(vectors, (4 * fine - coarse) / 3, noise))
        return self.compared(min(found, key=lambda one: one.noise), self.gradients)

    def quickly_along(self, vectors: list[Tensor | None]) -> DirectionalComparison:
        """Like `along`, but from two or four evaluations if they agree with autograd."""
        for step in self._steps():
            change, size = self._change(vectors, step)
            made = DirectionalComparison(vectors, change / (2 * step), self._rounding(size, step))
            found = self.compared(made, self.gradients)
            if found.agrees:
                return found
        return self.along(vectors)

    def _steps(self) -> tuple[float, float]:
        step = STEPS.get(self.dtype, STEPS[torch.float32])
        return step, step * SMALLER

    def _rounding(self, size: float, step: float) -> float:
        return torch.finfo(self.dtype).eps * size / step

    def compared(self, along: DirectionalComparison, gradients: Sequence[Tensor | None]) -> DirectionalComparison:
        """The derivative `along` by differences, compared with other gradients."""
        pairs = zip(gradients, along.vectors, strict=True)
        terms = [_real_product(g, u) for g, u in pairs if g is not None and u is not None]
        analytical = math.fsum(float(one.sum()) for one in terms)
        size = math.hypot(*(float(torch.linalg.vector_norm(one)) for one in terms), 0.0)
        size = max(size, abs(along.numerical))
        allowed = ALLOWED.get(self.dtype, ALLOWED[torch.float32]) * size + 8 * along.noise
        return replace(along, analytical=analytical, size=size, allowed=allowed)

    def _change(self, vectors: Sequence[Tensor | None], step: float) -> tuple[float, float]:
        """The difference of the losses at a step ahead and a step behind, and the sum of their moduli."""
        ahead, behind = self._loss_at(vectors, step), self._loss_at(vectors, -step)
        return ahead - behind, abs(ahead) + abs(behind)

    def _loss_at(self, vectors: Sequence[Tensor | None], by: float) -> float:
        with self._step.moved(vectors, by):
            return float(self._step.loss().detach())

    def at_kink(self, found: Sequence[DirectionalComparison]) -> bool:
        """Whether the loss has a kink along a wrong direction, or along parameters without gradients."""
        missing = self.missing()
        suspects = [one.vectors for one in found if not one.agrees] + ([self.only(missing)] if missing else [])
        return any(map(self.has_kink, suspects))

    def has_kink(self, vectors: Sequence[Tensor | None]) -> bool:
        """Whether the one-sided derivatives along a direction differ, by the same amount for a smaller step."""
        gaps = []
        for step in self._steps():
            left, middle, right = (self._loss_at(vectors, by) for by in (-step, 0.0, step))
            size = max(abs(right - middle), abs(middle - left)) / step
            noise = self._rounding(abs(left) + abs(right), step)
            gaps.append(abs(left - 2 * middle + right) / step)
            if not gaps[-1] > ALLOWED.get(self.dtype, ALLOWED[torch.float32]) * size + 8 * noise:
                return False
        return gaps[0] / 2 < gaps[1] < 2 * gaps[0]

    def moves(self, which: Sequence[int]) -> bool:
        """Whether the loss depends on some parameters, for a small or a large step."""
        vectors = self.only(which)
        for step in (math.sqrt(self._steps()[0]), LARGE_MOVE):
            change, size = self._change(vectors, step)
            if abs(change) <= DEPENDS * torch.finfo(self.dtype).eps * size:
                continue
            rounding = max(abs(self._change(vectors, step * tiny)[0]) for tiny in TINY_STEPS)
            if not abs(change) <= ABOVE_ROUNDING * rounding or not self.repeats():
                return True
        return False

    def repeats(self) -> bool:
        """Whether two calls of the model from the same state give the same loss, up to rounding."""
        first, second = (float(self._step.loss().detach()) for _ in range(2))
        if not (math.isfinite(first) and math.isfinite(second)):
            return repr(first) == repr(second)
        return abs(first - second) <= DEPENDS * torch.finfo(self.dtype).eps * (abs(first) + abs(second))

    def missing(self) -> list[int]:
        """The parameters without a gradient, or with a zero gradient."""
        return [i for i, g in enumerate(self.gradients) if g is None or not bool(g.any())]

    def is_stationary(self) -> bool:
        """Whether gradients are zero and right although the loss depends on these parameters, in second order."""
        zero = [i for i in self.missing() if self.gradients[i] is not None]
        return bool(zero) and self.moves(zero) and self.along(self.only(zero)).agrees

    def result(self, found: Sequence[DirectionalComparison]) -> EndToEnd:
        return EndToEnd(
            analytical=tuple(one.analytical for one in found),
            numerical=tuple(one.numerical for one in found),
            allowed=tuple(one.allowed for one in found),
            size=tuple(one.size for one in found),
            dtype=str(self.dtype).removeprefix("torch."),
            evaluations=self._step.evaluations,
        )


def enter_precise(step: Step, whole: LossDerivatives, stack: ExitStack) -> str:
    """Measures the gradients in double precision, for as long as the stack is open, or else in the model's dtype.

    Returns the reason why double precision is impossible; empty otherwise.
    """
    why = ""
    if any(parameter.dtype is not torch.float64 for parameter in step.parameters):
        with ExitStack() as trial:
            try:
                trial.enter_context(step.in_double())
                whole.measure()
                if whole.dtype is torch.float64:
                    stack.push(trial.pop_all())
                    return ""
                why = f"the loss of its copy in double precision is {str(whole.dtype).removeprefix('torch.')}"
            except OUT_OF_MEMORY:
                raise
            except Exception as error:
                why = f"its copy in double precision raises {type(error).__name__}"
    whole.measure()
    return why


def _real_product(gradient: Tensor, u: Tensor) -> Tensor:
    """The terms of a directional derivative, in double precision; of complex parameters, their real parts."""
    terms = (gradient.conj() * u).real if gradient.is_complex() else gradient * u
    return terms.double()


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach()))
