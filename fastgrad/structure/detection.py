"""Detects the sparsity pattern of a matrix: guesses first, then probing by products with its columns and rows.

`Detection` works with any source of such products. Here it is a problem, whose outputs at perturbed inputs are compared
bit by bit with those at x. In `functional`, it is a linear map.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fastgrad.core.errors import raise_if_transient, unless_rejected
from fastgrad.core.phases import phase
from fastgrad.core.precision import ROUNDING
from fastgrad.core.random import PROBE_COTANGENT, PROBE_DIRECTION, direction
from fastgrad.core.tensors import checksum, largest
from fastgrad.problem.coordinates import Block
from fastgrad.problem.first_look import FirstLook, values_vary
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings
from fastgrad.structure import aligned, refinement, sparsity
from fastgrad.structure.sparsity import Mask, Pattern

Found = TypeVar("Found")


class Budget(NamedTuple):
    """Budgets of sparsity detection: calls, and the size of the pattern.

    Attributes
    ----------
    probes
        Evaluations and VJPs that may be spent on finding a pattern.
    probes_if_likely
        The same if the probes so far make a sparse pattern likely.
    paying_entries
        Largest number of entries with which a pattern may cost less than a dense Jacobian.
    admitted_entries
        Largest number of entries of a sparse Jacobian that fits in memory.
    looks
        Evaluations that may be spent on guesses that the first look does not test.
    aligning_calls
        A pattern by aligned dimensions that takes at most this many calls is used without probing for a better one; 0:
        such a pattern is not searched for.
    """

    probes: int
    probes_if_likely: int
    paying_entries: int
    admitted_entries: int
    looks: int
    aligning_calls: int = 0


class Detection(ABC):
    """Patterns of a matrix. A subclass defines which rows react to selected columns, and which columns to rows."""

    def __init__(self, inputs: Sequence[Block], outputs: Sequence[Block], budget: Budget) -> None:
        self._blocks = inputs, outputs
        self._n, self._m = (sum(block.size for block in blocks) for blocks in self._blocks)
        self._budget = budget
        self._spent = 0
        # Takes self: an attribute that refers to self would keep the problem's tensors until a garbage collection.
        self._last_probe: Callable[[Any], object] = lambda _: None

    @abstractmethod
    def _guesses(self) -> Iterator[Pattern | None]:
        """Yields guesses from shapes and values; None if a guess does not apply."""

    @abstractmethod
    def _explains(self, pattern: Pattern) -> bool:
        """Whether a pattern is consistent with the products so far; this may take another product."""

    @abstractmethod
    def _reacting_outputs(self, moved: Mask) -> Mask:
        """The rows that react to the selected columns: shapes (m,) and (n,)."""

    @abstractmethod
    def _reacting_inputs(self, chosen: Mask) -> Mask:
        """The columns that react to the selected rows: shapes (n,) and (m,)."""

    @property
    def _is_steady(self) -> bool:
        """Whether repeated products are equal."""
        return True

    @phase("pattern")
    def guess(self) -> Pattern | None:
        """The first guess that may be right."""
        return next(self.guesses(), None)

    def guesses(self) -> Iterator[Pattern]:
        """Yields all guesses that may be right."""
        return filter(None, map(self._plausible, self._guesses()))

    @phase("pattern")
    def dense(self) -> Pattern | None:
        """The dense pattern, if there are only a few rows or columns; otherwise None."""
        return self._plausible(sparsity.guess_dense(*self._blocks))

    @phase("pattern")
    def probe(
        self,
        *,
        most: int | None = None,
        watch_outputs: bool = True,
        watch_gradients: bool = True,
        splits_hubs: bool = False,
    ) -> Pattern | None:
        """The pattern by probing outputs, gradients, or both with blocks of columns or rows; None if none is found.

        most: the largest number of products. If None, probing takes at most the products that pay off, and the pattern
        may have more entries than necessary. splits_hubs: as in `Refinement`.
        """
        budget, if_likely = self._budget.probes - self._spent, self._budget.probes_if_likely - self._spent
        if most is not None:
            budget, if_likely = min(budget, most), min(if_likely, most)
        inputs, outputs = self._blocks
        if sum(map(refinement.probes_to_arrange, self._blocks)) >= budget or not self._is_steady:
            return None

        def search() -> Pattern | None:
            columns = rows = None
            if watch_outputs:
                columns = refinement.Refinement(self._probe_columns, inputs, self._m, splits_hubs)
            if watch_gradients:
                rows = refinement.Refinement(self._probe_rows, outputs, self._n, splits_hubs)
            return refinement.refined(columns, rows, inputs, outputs, self._has_room, budget, if_likely, most is None)

        return self._found(search)

    def _found(self, search: Callable[[], Found | None]) -> Found | None:
        """The result of a search; None if its last probe raises repeatedly: func or backward may accept other calls."""
        try:
            return search()
        except Exception as error:
            raise_if_transient(error, partial(self._last_probe, self))
            return None

    def _probe_columns(self, moved: Mask) -> Mask:
        self._spent += 1
        self._last_probe = lambda patterns: patterns._reacting_outputs(moved)
        return self._reacting_outputs(moved)

    def _probe_rows(self, chosen: Mask) -> Mask:
        self._spent += 1
        self._last_probe = lambda patterns: patterns._reacting_inputs(chosen)
        return self._reacting_inputs(chosen)

    def _plausible(self, pattern: Pattern | None) -> Pattern | None:
        """The pattern if there is one that may pay off, fits in memory, and explains the products so far."""
        return pattern if pattern is not None and self._has_room(pattern.nnz) and self._explains(pattern) else None

    def _has_room(self, entries: int) -> bool:
        """Whether a pattern of this many entries may pay off and fits in memory."""
        return entries <= min(self._budget.paying_entries, self._budget.admitted_entries)


class ProblemPatterns(Detection):
    """Patterns of a problem's Jacobian: a product with columns is an evaluation, a product with rows is a VJP.

    No other test compares the evaluations with entries. So `repeat_suspects` compares their weighted sum with a VJP.
    """

    def __init__(
        self,
        problem: Problem,
        settings: Settings,
        look: FirstLook,
        budget: Budget,
        vjp: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """vjp: returns the VJP, shape (1, n), of a cotangent, shape (1, m); None: `Problem.vjp`."""
        super().__init__(problem.inputs, problem.outputs, budget)
        self._problem = problem
        self._vjp = vjp or problem.vjp
        self._settings = settings
        self._look = look
        assert look.reacted is not None  # guesses are tested by the first look; without it, none can be rejected
        self._reacted = look.reacted
        self._base = look.base.view(torch.int64)
        self._seen: list[tuple[bytes, int]] = []  # of each evaluation: the columns that were moved, and the checksum

    def _guesses(self) -> Iterator[Pattern | None]:
        yield sparsity.guess_pointwise(*self._blocks)
        if not any(block.is_complex for side in self._blocks for block in side):  # an entry may have four coordinates
            yield sparsity.guess_in_order(*self._blocks)
            yield sparsity.guess_moved(
                self._problem.coordinates().cpu().numpy(), self._look.base.cpu().numpy(), self._reacted
            )
        if self._saves_probes:
            yield self._aligned()

    @cached_property
    def _alignment(self) -> aligned.Alignment | None:
        """The aligned dimensions, if testing them costs little."""
        needed = aligned.probes_to_align(*self._blocks) if self._budget.aligning_calls else 0
        if not 0 < needed <= self._budget.looks // 2 - self._spent:
            return None
        return self._found(partial(aligned.align, self._probe_columns, *self._blocks, self._has_room))

    def _aligned(self) -> Pattern | None:
        return None if self._alignment is None else self._alignment.pattern

    @cached_property
    def _saves_probes(self) -> bool:
        """Whether this pattern takes so few calls that probing for a better one would take more."""
        calls = self._budget.aligning_calls
        if self._alignment is None or 2 * self._alignment.most_in_row > calls:
            return False
        return 2 * self._alignment.most_in_row + self._alignment.pattern.most_in_column <= calls

    @phase("pattern")
    def align(self) -> Pattern | None:
        """The pattern by aligned dimensions; None if there is none, or if it was among the guesses."""
        return None if self._saves_probes else self._plausible(self._aligned())

    @phase("pattern")
    def decode(self) -> Pattern | None:
        """The pattern by index bits, if each output depends on one element of each input, or the reverse."""
        if not self._budget.probes or not self._is_steady:
            return None
        probes, share = (self._probe_columns, self._probe_rows), float(self._reacted.mean())
        return self._plausible(
            self._found(partial(sparsity.decoded, *probes, *self._blocks, share, self._budget.probes))
        )

    def _explains(self, pattern: Pattern) -> bool:
        """Whether a pattern explains which outputs react in the first look or, if all could, in another evaluation."""
        moved = self._look.moved
        if not sparsity.explains_look(pattern, moved, self._reacted):
            return False
        if not pattern.touched(moved).all():
            return True
        separating = sparsity.separating_columns(pattern)
        if not separating.any():
            return True
        if self._spent >= self._budget.looks:
            return False
        reacted = unless_rejected(partial(self._probe_columns, separating))  # func may accept only single steps
        return reacted is not None and sparsity.explains_look(pattern, separating, reacted)

    def _has_room(self, entries: int) -> bool:
        paying, admitted = self._budget.paying_entries, self._budget.admitted_entries
        if admitted < entries <= paying:
            obstacle = f"memory allows {admitted} entries of a sparse Jacobian that may have {entries}"
            self._look.obstacles.append(obstacle)
        return super()._has_room(entries)

    @cached_property
    def _is_steady(self) -> bool:
        """Whether repeated evaluations at x are equal bit for bit; otherwise probing is impossible."""
        values = self._problem.evaluate(self._look.record_graph)
        is_steady = torch.equal(values.view(torch.int64), self._base)
        if not is_steady and values_vary(self._problem, self._settings, values, self._look.base):
            self._problem.irreproducible.append("at the inputs")
        return is_steady

    @cached_property
    def _steps(self) -> Tensor:
        u = direction(self._problem.n, self._settings.seed, PROBE_DIRECTION)
        return self._problem.displacement(u.to(self._problem.device), self._settings.eps)

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor]:
        """Weighted sums over all evaluations: of the displacements, and of the changes of the outputs."""
        return torch.zeros_like(self._steps), torch.zeros_like(self._look.base)

    def repeat_suspects(self) -> None:
        """Repeats the evaluations of detection if a VJP does not explain their sum; notes if func's values change."""
        if not self._seen:
            return
        # A backward may accept only one-hot cotangents, or func may raise: other checks report this.
        if unless_rejected(self._changes_when_repeated):
            self._problem.irreproducible.append("while a sparsity pattern was sought")

    def _changes_when_repeated(self) -> bool:
        """Whether the evaluations, or the VJP that should explain their sum, give other values when run again.

        The sum and the VJP may differ because of curvature, a wrong gradient, or a func that returned other values
        once. Only in the last case do the values change.
        """
        if self._vjp_explains_sum():
            return False
        for packed, digest in self._seen:
            moved = np.unpackbits(np.frombuffer(packed, np.uint8), count=self._problem.n).astype(bool)
            if checksum(self._problem.evaluate(self._look.record_graph, self._displacement(moved))) != digest:
                return True
        return self._vjp_explains_sum()

    def _vjp_explains_sum(self) -> bool:
        gradient, (step, change) = self._vjp(self._cotangent[None])[0], self._sums
        expected, actual = gradient * step, float(self._cotangent @ change)
        noise = ROUNDING * self._problem.unit_roundoff * largest(self._look.base) * self._problem.m**0.5
        size, length = (float(torch.linalg.vector_norm(vector)) for vector in (expected, step))
        allowed = sparsity.CURVED * size + self._settings.atol * length + noise * len(self._seen)
        return bool(abs(actual - float(expected.sum())) <= allowed)

    def _displacement(self, moved: Mask) -> Tensor:
        return torch.where(torch.from_numpy(moved).to(self._problem.device), self._steps, 0.0)

    @cached_property
    def _cotangent(self) -> Tensor:
        return direction(self._problem.m, self._settings.seed, PROBE_COTANGENT).to(self._problem.device)

    def _reacting_outputs(self, moved: Mask) -> Mask:
        displacement = self._displacement(moved)
        values = self._problem.evaluate(self._look.record_graph, displacement)
        weight = 1.0 - 0.5 / (1 + len(self._seen))  # the weights are unequal, so that opposite changes do not cancel
        step, change = self._sums
        step += weight * displacement
        change += weight * (values - self._look.base)
        self._seen.append((np.packbits(moved).tobytes(), checksum(values)))
        reacting: Mask = (values.view(torch.int64) != self._base).cpu().numpy()
        return reacting

    def _reacting_inputs(self, chosen: Mask) -> Mask:
        rows = torch.where(torch.from_numpy(chosen).to(self._problem.device), self._cotangent, 0.0)
        reacting: Mask = (self._vjp(rows.unsqueeze(0))[0] != 0).cpu().numpy()
        return reacting
