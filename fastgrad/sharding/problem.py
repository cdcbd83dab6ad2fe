"""A problem whose columns and rows are computed in parts, by all ranks and with a checkpoint."""

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
from fastgrad.report.report import Report
from fastgrad.sharding.calls import digest
from fastgrad.sharding.checkpoint import Checkpoint
from fastgrad.sharding.workers import Work, Workers, in_parts

Store = Callable[[int, int, Tensor], None]
"""Writes the results of items begin, ..., end - 1 to their positions; takes begin, end and the results."""

Positions = Callable[[int, int], slice | Tensor]
"""Gives the positions of the results of items begin, ..., end - 1 among all results."""

WORTH_SHARING = 0.02
"""Seconds. Work is shared if it takes longer on one rank than this plus the time to send it: the time of about ten
messages."""

WORTH_KEEPING = 1.0
"""Seconds. Work that takes longer is saved in a checkpoint. A killed process may lose this much work in any case."""

_BYTES_A_SECOND = 50e6
"""Bytes per second through the store, to it and from it: a quarter of the rate measured on one machine, so that it
also holds for a network or a busy machine."""

_CALLS = {"columns": (2, 0, 0), "tangents": (1, 0, 1), "column groups": (2, 0, 0), "rows": (0, 1, 0)}
_CALLS["row groups"] = _CALLS["rows"]
"""Numbers of evaluations, VJPs and JVPs per item of some work."""


@dataclass(frozen=True)
class _Groups:
    """The fields of `native.Groups`, in a form that can be sent to other ranks."""

    coordinates: Tensor
    starts: Tensor
    entries: Tensor
    entry_starts: Tensor
    positions: Tensor

    def on(self, device: torch.device) -> _Groups:
        """The same groups with entries on a device; messages arrive on the CPU."""
        return replace(self, entries=self.entries.to(device), positions=self.positions.to(device))

    def entries_of(self, begin: int, end: int) -> Tensor:
        """The entries in some groups."""
        return self.entries[int(self.entry_starts[begin]) : int(self.entry_starts[end])]

    def part(self, begin: int, end: int) -> native.Groups:
        """A subset of the groups, for a vector of only their entries."""
        first, last = int(self.starts[begin]), int(self.starts[end])
        entries = self.entries_of(begin, end)
        return native.Groups(
            self.coordinates[first:last],
            self.starts[begin : end + 1] - first,
            torch.arange(entries.numel(), device=entries.device),
            self.entry_starts[begin : end + 1] - self.entry_starts[begin],
            self.positions[entries],
        )


def _sent(groups: native.Groups) -> _Groups:
    return _Groups(groups.coordinates, groups.starts, groups.entries, groups.entry_starts, groups.positions)


@dataclass(frozen=True)
class Partition:
    """The ranks that compute parts of a check, and its checkpoint; None: only this process, no checkpoint."""

    workers: Workers | None = None
    checkpoint: Checkpoint | None = None

    @property
    def leads(self) -> bool:
        """Whether this process runs the check; other ranks only compute parts."""
        return self.workers is None or self.workers.leads

    def report(self, run: Callable[[], Report]) -> Report:
        """The report of a check, on all ranks."""
        return run() if self.workers is None else self.workers.report(run)

    def problem(self, *arguments: Any, **keywords: Any) -> PartitionedProblem:
        """The problem of these arguments of `Problem`."""
        return PartitionedProblem(self, *arguments, **keywords)


class PartitionedProblem(Problem):
    """A problem whose columns and rows are computed in parts: by the ranks of a group, with a checkpoint, or both.

    The problem of rank 0 shares its work, and the problems of other ranks compute parts of it. Calls are counted as if
    one rank made them.
    """

    def __init__(self, partition: Partition, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._leads = partition.leads
        self._workers, self._checkpoint = partition.workers, partition.checkpoint
        self._evaluations_elsewhere = 0
        if self._workers is not None:
            self.ranks = self._workers.count
            self._workers.problem = self
        self.has_checkpoint = self._checkpoint is not None

    @property
    def evaluations(self) -> int:
        """Calls of func so far, on all ranks and for results from the checkpoint."""
        return super().evaluations + self._evaluations_elsewhere

    @phase("numerical columns")
    def difference_columns(self, first: int, count: int, eps: float, record_graph: bool) -> Tensor:
        """Like `Problem.difference_columns`."""
        if not self._divides(count):
            return super().difference_columns(first, count, eps, record_graph)
        columns = torch.empty(count, self.m, dtype=torch.float64, device=self.device)
        self._do(Work("columns", (eps, record_graph)), (first, first + count), columns, _rows_from(first))
        return columns

    @phase("numerical columns")
    def difference_groups(self, groups: native.Groups, columns: Tensor, eps: float, record_graph: bool) -> Tensor:
        """Like `Problem.difference_groups`."""
        count = groups.starts.numel() - 1
        if not self._divides(count):
            return super().difference_groups(groups, columns, eps, record_graph)
        values = torch.zeros(columns.numel(), dtype=torch.float64, device=self.device)
        sent = _sent(groups)
        work = Work("column groups", (sent, columns, eps, record_graph))
        self._do(work, (0, count), values, sent.entries_of, groups.positions, columns)
        return values

    @phase("analytical columns")
    def tangent_columns(self, first: int, count: int) -> tuple[Tensor, bool]:
        """Like `Problem.tangent_columns`."""
        before = self.jvps
        if self._divides(count):
            columns = torch.empty(count, self.m, dtype=torch.float64, device=self.device)
            if self._do(Work("tangents", ()), (first, first + count), columns, _rows_from(first)):
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
        inputs: Sequence[Block] | None = None,
        repeated: int = 0,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor, native.GradientsMatch]:
        """As `Problem.analytical_rows`; rows that are run twice are run in this process."""
        before, head = self.vjps, max(1, repeated)
        inputs = self.inputs if inputs is None else inputs
        if self._divides(count - head):
            rows = torch.empty(count, sum(block.size for block in inputs), dtype=torch.float64, device=self.device)
            own = super().analytical_rows(output, imaginary, first, head, inputs, repeated, scale)
            rows[:head], again, match = own
            work = Work("rows", (output.index, imaginary, tuple(self.inputs.index(block) for block in inputs)))
            if _is_usual(match) and self._do(work, (first + head, first + count), rows, _rows_from(first)):
                return rows, again, match
        self.vjps = before
        return super().analytical_rows(output, imaginary, first, count, inputs, repeated, scale)

    @phase("analytical rows")
    def vjp_groups(
        self, output: Block, groups: native.Groups, values: Tensor, repeated: int, scale: float
    ) -> native.GradientsMatch:
        """As `Problem.vjp_groups`; groups that are run twice are run in this process."""
        before, head, count = self.vjps, max(1, repeated), groups.starts.numel() - 1
        if self._divides(count - head):
            sent = _sent(groups)
            match = super().vjp_groups(output, groups.part(0, head), values, repeated, scale)
            work = Work("row groups", (output.index, sent, scale))
            if _is_usual(match) and self._do(work, (head, count), values, sent.entries_of, groups.positions):
                return match
        self.vjps = before
        return super().vjp_groups(output, groups, values, repeated, scale)

    def part(self, work: Work, begin: int, end: int) -> Tensor | None:
        """Items begin, ..., end - 1 of some work; None if their gradients are unusual, so that rank 0 computes them."""
        parts: dict[str, Callable[..., Tensor | None]] = {
            "columns": self._columns,
            "column groups": self._column_groups,
            "tangents": self._tangents,
            "rows": self._rows,
            "row groups": self._row_groups,
        }
        return parts[work.name](begin, end, *work.arguments)

    def _columns(self, begin: int, end: int, eps: float, record_graph: bool) -> Tensor:
        return super().difference_columns(begin, end - begin, eps, record_graph)

    def _column_groups(
        self, begin: int, end: int, groups: _Groups, columns: Tensor, eps: float, record_graph: bool
    ) -> Tensor:
        groups = groups.on(self.device)
        part, own = groups.part(begin, end), columns.to(self.device)[groups.entries_of(begin, end)]
        return super().difference_groups(part, own, eps, record_graph)

    def _tangents(self, begin: int, end: int) -> Tensor | None:
        columns, match = super().tangent_columns(begin, end - begin)
        return columns if match else None

    def _rows(self, begin: int, end: int, output: int, imaginary: bool, inputs: Sequence[int]) -> Tensor | None:
        blocks = [self.inputs[k] for k in inputs]
        rows, _, match = super().analytical_rows(self.outputs[output], imaginary, begin, end - begin, blocks)
        return rows if _is_usual(match) else None

    def _row_groups(self, begin: int, end: int, output: int, groups: _Groups, scale: float) -> Tensor | None:
        groups = groups.on(self.device)
        part = groups.part(begin, end)
        values = torch.zeros(groups.entries_of(begin, end).numel(), dtype=torch.float64, device=self.device)
        match = super().vjp_groups(self.outputs[output], part, values, 0, scale)
        return values if _is_usual(match) else None

    def _divides(self, items: int) -> bool:
        return items > 1 and self._leads

    def _do(self, work: Work, items: tuple[int, int], values: Tensor, positions: Positions, *also_sent: Tensor) -> bool:
        """Computes the items of some work: the first one here, to measure its cost, then the missing ones in parts.

        Parameters
        ----------
        values, positions
            Where the results are stored.
        also_sent
            Tensors that other ranks need; their size is part of the cost of sharing.

        Returns
        -------
        bool
            False if something is unusual: then everything must be done in one piece.
        """

        def store(begin: int, end: int, found: Tensor) -> None:
            values[positions(begin, end)] = found

        (first, last), sent = items, (values, *also_sent)
        start = clock(self.device)
        head = self.part(work, first, first + 1)
        seconds = clock(self.device) - start
        if head is None:
            return False
        store(first, first + 1, head)
        missing, checkpoint = [(first + 1, last)], self._checkpoint
        if checkpoint is None:
            return self._rest(work, missing, seconds, store, sent)
        name = f"{work.name} {digest(work.arguments)}"
        missing = self._restored(name, items, head, store, work)
        if sum(end - begin for begin, end in missing) * seconds < WORTH_KEEPING:
            return self._rest(work, missing, seconds, store, sent)

        def store_and_keep(begin: int, end: int, found: Tensor) -> None:
            store(begin, end, found)
            checkpoint.store(name, begin, end, found)

        if missing == [(first + 1, last)]:
            checkpoint.store(name, first, first + 1, head)
        return self._rest(work, missing, seconds, store_and_keep, sent)

    def _rest(
        self, work: Work, missing: list[tuple[int, int]], seconds: float, store: Store, sent: Sequence[Tensor]
    ) -> bool:
        """Computes missing items, on all ranks if this takes longer than sending results; seconds: time per item."""
        usual = True

        def run(begin: int, end: int) -> None:
            nonlocal usual
            found = self.part(work, begin, end)
            usual = usual and found is not None
            if found is not None:
                store(begin, end, found)

        def take(begin: int, end: int, found: Tensor) -> None:
            store(begin, end, found.to(self.device))
            self._count_as_done(work, end - begin)

        rest = sum(end - begin for begin, end in missing)
        sending = sum(8 * tensor.numel() for tensor in sent) / _BYTES_A_SECOND
        if self._workers is not None and rest * seconds >= WORTH_SHARING + sending:
            return self._workers.share(work, missing, seconds, run, take) and usual
        for begin, end in in_parts(missing, seconds, 1):
            run(begin, end)
        return usual

    def _restored(
        self, name: str, items: tuple[int, int], head: Tensor, store: Store, work: Work
    ) -> list[tuple[int, int]]:
        """Loads saved items if the first item is unchanged; returns the missing ranges.

        The other items are tested by sums over all items, like columns and rows from other ranks.
        """
        checkpoint, (first, last) = self._checkpoint, items
        assert checkpoint is not None
        parts = checkpoint.take(name, first, last)
        if not parts or parts[0].first != first or not _begins_with(checkpoint.values(parts[0]), head):
            checkpoint.discard(parts)
            return [(first + 1, last)]
        self.restores = True
        end, missing = first + 1, []
        for part in parts:
            if part.first > end:
                missing.append((end, part.first))
            store(part.first, part.last, checkpoint.values(part).to(self.device))
            self._count_as_done(work, part.last - max(end, part.first))
            end = part.last
        return [*missing, (end, last)] if end < last else missing

    def _count_as_done(self, work: Work, items: int) -> None:
        """Counts calls that were made on other ranks or loaded."""
        evaluations, vjps, jvps = (items * each for each in _CALLS[work.name])
        self._evaluations_elsewhere += evaluations
        self.vjps += vjps
        self.jvps += jvps
        self.progress.step(evaluations + vjps)


def _rows_from(first: int) -> Positions:
    """The positions of items in a tensor whose row 0 is item `first`."""
    return lambda begin, end: slice(begin - first, end - first)


def _begins_with(values: Tensor, head: Tensor) -> bool:
    """Whether the first numbers are those of `head`, bit for bit."""
    stored, now = values.reshape(-1)[: head.numel()], head.cpu().reshape(-1)
    return stored.numel() == now.numel() and torch.equal(stored.view(torch.int64), now.view(torch.int64))


def _is_usual(match: native.GradientsMatch) -> bool:
    return match.dtypes and match.sizes and all(entry.value == 0 for entry in match.unspecified.values())
