"""A problem whose columns and rows all ranks compute; rank 0 does the rest, and what costs less than messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastgrad.core import native
from fastgrad.core.phases import clock, phase
from fastgrad.problem.coordinates import Block
from fastgrad.problem.problem import Problem
from fastgrad.sharding.workers import Work, Workers

WORTH_SHARING = 0.02
"""Seconds that work takes on one rank from which on it is shared, beside those of its bytes: some ten messages."""

_BYTES_A_SECOND = 50e6
"""Bytes that go through the store in a second, to it and from it: a quarter of what one machine was measured to do, so
that a network, or a busy machine, does so, too."""

_CALLS = {"columns": (2, 0, 0), "tangents": (1, 0, 1), "column groups": (2, 0, 0), "rows": (0, 1, 0)}
_CALLS["row groups"] = _CALLS["rows"]
"""Evaluations, VJPs and JVPs that an item of some work takes."""


@dataclass(frozen=True)
class _Groups:
    """What `native.Groups` is made of, to be sent."""

    coordinates: Tensor
    starts: Tensor
    entries: Tensor
    entry_starts: Tensor
    positions: Tensor

    def on(self, device: torch.device) -> _Groups:
        """The same with entries on a device: messages come on the CPU."""
        return replace(self, entries=self.entries.to(device), positions=self.positions.to(device))

    def entries_of(self, begin: int, end: int) -> Tensor:
        """The entries in some groups."""
        return self.entries[int(self.entry_starts[begin]) : int(self.entry_starts[end])]

    def part(self, begin: int, end: int) -> native.Groups:
        """These groups alone, of a vector of their entries alone."""
        first, last = int(self.starts[begin]), int(self.starts[end])
        entries = self.entries_of(begin, end)
        return native.Groups(
            self.coordinates[first:last],
            self.starts[begin : end + 1] - first,
            torch.arange(entries.numel(), device=entries.device),
            self.entry_starts[begin : end + 1] - self.entry_starts[begin],
            self.positions[entries],
        )


def _sent(groups: native.Groups, positions: Tensor) -> _Groups:
    return _Groups(groups.coordinates, groups.starts, groups.entries, groups.entry_starts, positions)


class ShardedProblem(Problem):
    """The problem of rank 0, which shares its work, or of another, which does parts; counts calls as one rank would."""

    def __init__(self, workers: Workers, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._workers = workers
        self.ranks = workers.count
        self._evaluations_elsewhere = 0
        workers.problem = self

    @property
    def evaluations(self) -> int:
        """Calls of func so far, on all ranks."""
        return super().evaluations + self._evaluations_elsewhere

    @phase("numerical columns")
    def difference_columns(self, first: int, count: int, eps: float, record_graph: bool) -> Tensor:
        """As `Problem.difference_columns`."""
        if not self._shares(count):
            return super().difference_columns(first, count, eps, record_graph)
        columns = torch.empty(count, self.m, dtype=torch.float64, device=self.device)
        self._do(Work("columns", (first, eps, record_graph)), (0, count), columns.__setitem__, columns)
        return columns

    @phase("numerical columns")
    def difference_groups(
        self, groups: native.Groups, rows: Tensor, columns: Tensor, eps: float, record_graph: bool
    ) -> Tensor:
        """As `Problem.difference_groups`."""
        count = groups.starts.numel() - 1
        if not self._shares(count):
            return super().difference_groups(groups, rows, columns, eps, record_graph)
        values = torch.zeros(rows.numel(), dtype=torch.float64, device=self.device)
        sent = _sent(groups, rows)

        def store(items: slice, found: Tensor) -> None:
            values[sent.entries_of(items.start, items.stop)] = found

        self._do(Work("column groups", (sent, columns, eps, record_graph)), (0, count), store, values, rows, columns)
        return values

    @phase("analytical columns")
    def tangent_columns(self, first: int, count: int) -> tuple[Tensor, bool]:
        """As `Problem.tangent_columns`."""
        before = self.jvps
        if self._shares(count):
            columns = torch.empty(count, self.m, dtype=torch.float64, device=self.device)
            if self._do(Work("tangents", (first,)), (0, count), columns.__setitem__, columns):
                return columns, True
        self.jvps = before
        return super().tangent_columns(first, count)

    @phase("analytical rows")
    def analytical_rows(
        self,
        output: Block,
        imaginary: bool,
        first: int,
        count: int,
        inputs: Sequence[Block],
        repeated: int,
        scale: float,
    ) -> tuple[Tensor, Tensor, native.GradientsMatch]:
        """As `Problem.analytical_rows`; those that are run twice are run here."""
        before, head = self.vjps, max(1, repeated)
        if self._shares(count - head):
            rows = torch.empty(count, sum(block.size for block in inputs), dtype=torch.float64, device=self.device)
            own = super().analytical_rows(output, imaginary, first, head, inputs, repeated, scale)
            rows[:head], again, match = own
            work = Work("rows", (output.index, imaginary, first, tuple(self.inputs.index(block) for block in inputs)))
            if _is_usual(match) and self._do(work, (head, count), rows.__setitem__, rows):
                return rows, again, match
        self.vjps = before
        return super().analytical_rows(output, imaginary, first, count, inputs, repeated, scale)

    @phase("analytical rows")
    def vjp_groups(
        self,
        output: Block,
        groups: native.Groups,
        columns: Tensor,
        count: int,
        values: Tensor,
        repeated: int,
        scale: float,
    ) -> native.GradientsMatch:
        """As `Problem.vjp_groups`; those that are run twice are run here."""
        before, head = self.vjps, max(1, repeated)
        if self._shares(count - head):
            sent = _sent(groups, columns)

            def store(items: slice, found: Tensor) -> None:
                values[sent.entries_of(items.start, items.stop)] = found

            match = super().vjp_groups(output, groups.part(0, head), columns, head, values, repeated, scale)
            work = Work("row groups", (output.index, sent, scale))
            if _is_usual(match) and self._do(work, (head, count), store, values, columns):
                return match
        self.vjps = before
        return super().vjp_groups(output, groups, columns, count, values, repeated, scale)

    def part(self, work: Work, begin: int, end: int) -> Tensor | None:
        """Items begin, ..., end - 1 of some work; None where their gradients are unusual, for rank 0 to look at."""
        parts: dict[str, Callable[..., Tensor | None]] = {
            "columns": self._columns,
            "column groups": self._column_groups,
            "tangents": self._tangents,
            "rows": self._rows,
            "row groups": self._row_groups,
        }
        return parts[work.name](begin, end, *work.arguments)

    def _columns(self, begin: int, end: int, first: int, eps: float, record_graph: bool) -> Tensor:
        return super().difference_columns(first + begin, end - begin, eps, record_graph)

    def _column_groups(
        self, begin: int, end: int, groups: _Groups, columns: Tensor, eps: float, record_graph: bool
    ) -> Tensor:
        groups = groups.on(self.device)
        part, own = groups.part(begin, end), columns.to(self.device)[groups.entries_of(begin, end)]
        return super().difference_groups(part, own, own, eps, record_graph)

    def _tangents(self, begin: int, end: int, first: int) -> Tensor | None:
        columns, match = super().tangent_columns(first + begin, end - begin)
        return columns if match else None

    def _rows(
        self, begin: int, end: int, output: int, imaginary: bool, first: int, inputs: Sequence[int]
    ) -> Tensor | None:
        blocks = [self.inputs[k] for k in inputs]
        rows, _, match = super().analytical_rows(
            self.outputs[output], imaginary, first + begin, end - begin, blocks, 0, 1.0
        )
        return rows if _is_usual(match) else None

    def _row_groups(self, begin: int, end: int, output: int, groups: _Groups, scale: float) -> Tensor | None:
        groups = groups.on(self.device)
        part = groups.part(begin, end)
        values = torch.zeros(groups.entries_of(begin, end).numel(), dtype=torch.float64, device=self.device)
        match = super().vjp_groups(self.outputs[output], part, values, end - begin, values, 0, scale)
        return values if _is_usual(match) else None

    def _shares(self, items: int) -> bool:
        return self._workers.leads and items > 1

    def _do(self, work: Work, items: tuple[int, int], store: Callable[[slice, Tensor], None], *sent: Tensor) -> bool:
        """Does work: the first item here, to see what one costs, and the others on all ranks, if they cost enough.

        Returns
        -------
        bool
            False where something is unusual, and all is to be done without sharing.
        """
        first, last = items
        usual = True

        def run(begin: int, end: int) -> None:
            nonlocal usual
            found = self.part(work, begin, end)
            usual = usual and found is not None
            if found is not None:
                store(slice(begin, end), found)

        def take(begin: int, end: int, found: Tensor) -> None:
            store(slice(begin, end), found.to(self.device))
            calls = [(end - begin) * each for each in _CALLS[work.name]]
            self._evaluations_elsewhere += calls[0]
            self.vjps += calls[1]
            self.jvps += calls[2]
            self.progress.step(calls[0] + calls[1])

        start = clock(self.device)
        run(first, first + 1)
        seconds, rest = clock(self.device) - start, last - first - 1
        messages = sum(8 * tensor.numel() for tensor in sent) / _BYTES_A_SECOND
        if not usual:
            return False
        if rest * seconds < WORTH_SHARING + messages:
            run(first + 1, last)
            return usual
        return self._workers.share(work, (first + 1, last), seconds, run, take) and usual


def _is_usual(match: native.GradientsMatch) -> bool:
    return match.dtypes and match.sizes and all(entry.value == 0 for entry in match.unspecified.values())
