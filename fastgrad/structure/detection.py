"""Where the entries of a problem's Jacobian may be: guesses first, then what evaluations and VJPs tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fastgrad.core.errors import raise_unless_of_func
from fastgrad.core.phases import phase
from fastgrad.core.random import PROBE_COTANGENT, PROBE_DIRECTION, direction
from fastgrad.problem.first_look import FirstLook
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Settings
from fastgrad.structure import sparsity
from fastgrad.structure.sparsity import Mask, Pattern


@dataclass(frozen=True)
class Budget:
    """What detecting a pattern may cost, and how large the pattern may be.

    Attributes
    ----------
    probes
        Evaluations and VJPs that may be spent on finding a pattern.
    probes_if_likely
        The same once one begins to show.
    paying_entries
        Entries up to which a pattern may cost less than a dense Jacobian.
    admitted_entries
        Entries of a sparse Jacobian that memory admits.
    looks_again
        Whether a guess of which the first look says nothing is worth one more evaluation.
    """

    probes: int
    probes_if_likely: int
    paying_entries: int
    admitted_entries: int
    looks_again: bool


class Patterns:
    """Where the entries may be: guesses, and what probes tell."""

    def __init__(
        self,
        problem: Problem,
        settings: Settings,
        look: FirstLook,
        budget: Budget,
        vjp: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """vjp: that of a cotangent, shapes (1, m) and (1, n); None: of problem."""
        self._problem = problem
        self._vjp = vjp or problem.vjp
        self._settings = settings
        self._look = look
        assert look.reacted is not None  # without it there is nothing to refute a guess
        self._reacted = look.reacted
        self._budget = budget
        self._spent = 0
        self._base = look.base.view(torch.int64)

    @phase("pattern")
    def guess(self) -> Pattern | None:
        """What shapes, or values that are only moved, say."""
        blocks = self._problem.inputs, self._problem.outputs

        def guesses() -> Iterator[Pattern | None]:
            yield sparsity.guess(*blocks)
            if any(block.is_complex for side in blocks for block in side):
                return  # an entry would be four coordinates
            yield sparsity.guess_in_order(*blocks)
            yield sparsity.guess_moved(
                self._problem.coordinates().cpu().numpy(), self._look.base.cpu().numpy(), self._reacted
            )

        for pattern in guesses():
            if pattern is not None and self._is_plausible(pattern):
                return pattern
        return None

    @phase("pattern")
    def dense(self) -> Pattern | None:
        """Every entry, of few rows or columns."""
        pattern = sparsity.guess_dense(self._problem.inputs, self._problem.outputs)
        return pattern if pattern is not None and self._is_plausible(pattern) else None

    @phase("pattern")
    def decode(self) -> Pattern | None:
        """What the bits of indices say, where each output depends on one element of each input, or the other way."""
        if not self._budget.probes or not self._is_steady:
            return None
        blocks = self._problem.inputs, self._problem.outputs
        try:
            share = float(self._reacted.mean())
            pattern = sparsity.decoded(
                self._reacting_outputs, self._reacting_inputs, *blocks, share, self._budget.probes
            )
        except Exception as error:
            raise_unless_of_func(error)
            return None  # as below
        return pattern if pattern is not None and self._is_plausible(pattern) else None

    @phase("pattern")
    def probe(
        self, *, most: int | None = None, watch_gradients: bool = True, splits_hubs: bool = False
    ) -> Pattern | None:
        """What outputs and, with watch_gradients, gradients show when blocks are moved.

        most: how many evaluations and VJPs it may take; None: as many as may repay.
        """
        budget, if_likely = self._budget.probes - self._spent, self._budget.probes_if_likely - self._spent
        if most is not None:
            budget, if_likely = min(budget, most), min(if_likely, most)
        problem = self._problem
        blocks = problem.inputs, problem.outputs
        if sum(map(sparsity.probes_to_arrange, blocks)) >= budget or not self._is_steady:
            return None
        try:
            columns = sparsity.Refinement(self._reacting_outputs, problem.inputs, problem.m, splits_hubs)
            rows = None
            if watch_gradients:
                rows = sparsity.Refinement(self._reacting_inputs, problem.outputs, problem.n, splits_hubs)
            return sparsity.refined(columns, rows, *blocks, self._has_room, budget, if_likely)
        except Exception as error:
            raise_unless_of_func(error)
            return None  # one-hot cotangents, or single steps, may not raise

    def _is_plausible(self, pattern: Pattern) -> bool:
        """Whether it repays, fits in memory, and explains the first look, or another one where that shows nothing."""
        moved = self._look.moved
        if not (self._has_room(pattern.nnz) and sparsity.explains_look(pattern, moved, self._reacted)):
            return False
        if not pattern.touched(moved).all():
            return True
        separating = sparsity.separating_columns(pattern)
        if not separating.any():
            return True
        if not self._budget.looks_again:
            return False
        try:
            return sparsity.explains_look(pattern, separating, self._reacting_outputs(separating))
        except Exception as error:
            raise_unless_of_func(error)
            return False  # it takes single steps only

    def _has_room(self, entries: int) -> bool:
        """Whether a pattern of so many entries may repay, and memory admits it."""
        paying, admitted = self._budget.paying_entries, self._budget.admitted_entries
        if admitted < entries <= paying:
            obstacle = f"memory admits {admitted} entries of a sparse Jacobian that may have {entries}"
            self._look.obstacles.append(obstacle)
        return entries <= min(paying, admitted)

    @cached_property
    def _is_steady(self) -> bool:
        """Whether evaluations at x are equal in every bit: those that move by themselves tell nothing."""
        return torch.equal(self._problem.evaluate(self._look.record_graph).view(torch.int64), self._base)

    @cached_property
    def _steps(self) -> Tensor:
        u = direction(self._problem.n, self._settings.seed, PROBE_DIRECTION)
        return self._problem.displacement(u.to(self._problem.device), self._settings.eps)

    @cached_property
    def _cotangent(self) -> Tensor:
        return direction(self._problem.m, self._settings.seed, PROBE_COTANGENT).to(self._problem.device)

    def _reacting_outputs(self, moved: Mask) -> Mask:
        self._spent += 1
        displacement = torch.where(torch.from_numpy(moved).to(self._problem.device), self._steps, 0.0)
        values = self._problem.evaluate(self._look.record_graph, displacement).view(torch.int64)
        reacting: Mask = (values != self._base).cpu().numpy()
        return reacting

    def _reacting_inputs(self, chosen: Mask) -> Mask:
        self._spent += 1
        rows = torch.where(torch.from_numpy(chosen).to(self._problem.device), self._cotangent, 0.0)
        reacting: Mask = (self._vjp(rows.unsqueeze(0))[0] != 0).cpu().numpy()
        return reacting
