"""Probable causes of a wrong gradient of a distributed function: the rank, and the error in communication."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from fastgrad.core.random import COTANGENT_STREAM, direction
from fastgrad.core.ranks import RankError
from fastgrad.distributed.placements import Space, held_by, parts_of, whole_of
from fastgrad.distributed.session import Session, cotangent_parts
from fastgrad.report.evidence import Cause, RankCauseName
from fastgrad.report.failure import Failure
from fastgrad.report.number_text import digits_apart
from fastgrad.report.report import Report

PER_RANK = 8
"""Number of coordinates per rank at which gradients are compared with differences, by two evaluations each."""

UNEXPLAINED = 1e-3
"""A cause explains the gradients if the relative residual is at most this number, the rtol of gradcheck."""

CONFIDENCE = 0.97


def explained(report: Report, session: Session, arguments: tuple[Any, ...], checked: Sequence[int]) -> Report:
    """The report with causes and notes about the ranks."""
    notes = [
        f"ranks hold different values of {what} {number}, whose placement is Replicate(): at {apart.index}, rank "
        f"{apart.rank} has {apart.found:.{digits}g} and rank 0 has {apart.on_first:.{digits}g}"
        for (what, number), apart in session.differences.items()
        for digits in [digits_apart(apart.found, apart.on_first)]
    ]
    failure = report.failure
    if failure is None and notes:
        (what, number), *_ = session.differences
        places = number if what == "output" else None, number if what == "gradient" else None
        failure, *notes = Failure("ranks differ", *places, detail=notes[0]), *notes[1:]
        report = replace(report, failure=failure)
    if failure is None or failure.input is None or report.settings.grad_outputs is not None:
        return replace(report, notes=(*report.notes, *notes))
    notes += _place(failure, session)
    inputs = [arguments[i].detach() for i in checked]
    found: list[Cause] = []
    if not any(tensor.is_complex() for tensor in inputs):
        with suppress(RankError):  # func may raise at other inputs
            sampled = _sampled(session, inputs, failure.input, report.settings.eps)
            found = _causes(sampled, session.inputs[failure.input])
    return replace(report, causes=(*found, *report.causes), notes=(*report.notes, *notes))


def _place(failure: Failure, session: Session) -> list[str]:
    """A note that names the ranks that hold the worst entry; empty if this entry is unknown."""
    worst = failure.comparison.worst if failure.comparison is not None else None
    if worst is None or failure.input is None:
        return []
    space, parts = session.inputs[failure.input], session.base[failure.input]
    name = f"input {failure.input}, {space.placement},"
    if not isinstance(space.placement, Shard):
        return [f"{name} is held by all ranks"]
    rank, index = held_by(space.placement, [part.shape for part in parts], worst.input_index)
    return [f"the gradient of {name} is wrong on rank {rank}, at index {index} of the part on this rank"]


class _Sampled(NamedTuple):
    """The gradient of a rank at some elements of its part of an input, and the differences there.

    Attributes
    ----------
    found
        The rank's gradient.
    numerical
        By differences.
    own
        The part of the numerical derivative that is due to the rank's own results.
    """

    found: Tensor
    numerical: Tensor
    own: Tensor


def _causes(sampled: Sequence[_Sampled], space: Space) -> list[Cause]:
    """The causes that explain the gradients of all ranks."""
    count = len(sampled)
    found, numerical, own = (torch.cat(values) for values in zip(*sampled, strict=True))
    if not bool(numerical.any()) or not bool(found.isfinite().all()):
        return []
    partial, replicated = (isinstance(space.gradient, kind) for kind in (Partial, Replicate))
    total = sum(one.found for one in sampled) if partial or replicated else None
    alike = all(_same(one.found, sampled[0].found) for one in sampled)
    if replicated and not alike and _same(total, sampled[0].numerical):
        text = (
            "the gradients of the ranks add up to the right gradient: an all_reduce is missing, or the placement must "
            "be Partial()"
        )
        return [_cause("reduction missing between ranks", text)]
    if _same(found, own) and not _same(found, numerical) and not (partial or alike):
        text = "each rank has only the contribution of its own results: the sum over ranks is missing in backward"
        return [_cause("reduction missing between ranks", text)]
    if partial and _same(found, numerical):
        text = (
            f"each rank has the whole gradient, but the placement Partial() counts it {count} times: it was reduced "
            "once too often, or its placement must be Replicate()"
        )
        return [_cause("reduced twice", text)]
    joined, right = (total, sampled[0].numerical) if partial else (found, numerical)
    for factor, words in ((count, "multiplied"), (1 / count, "divided")):
        for power, times in ((1, ""), (2, " twice")):
            if _same(joined, factor**power * right):
                return [_cause("number of ranks", f"the gradient is {words}{times} by the number of ranks, {count}")]
    return _of_some_ranks(sampled, space)


def _of_some_ranks(sampled: Sequence[_Sampled], space: Space) -> list[Cause]:
    """Causes in which some ranks are right, or have the gradients of other ranks."""
    wrong = [rank for rank, one in enumerate(sampled) if not _same(one.found, one.numerical)]
    if isinstance(space.gradient, Shard):
        others = [
            next((k for k, one in enumerate(sampled) if k != rank and _same(sampled[rank].found, one.numerical)), -1)
            for rank in wrong
        ]
        if wrong and min(others) >= 0:
            pairs = ", ".join(
                f"rank {rank} has the gradient of rank {k}" for rank, k in zip(wrong, others, strict=True)
            )
            return [
                _cause("wrong shard", f"some ranks have the gradient of another rank's part of the tensor: {pairs}")
            ]
    if not isinstance(space.gradient, Partial) and 0 < len(wrong) < len(sampled):
        ranks = f"rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
        return [_cause("one rank", f"the gradient is wrong only on {ranks}: the other ranks have the right gradient")]
    return []


def _cause(name: RankCauseName, text: str) -> Cause:
    measure = (
        f"relative difference below {UNEXPLAINED:g} at up to {PER_RANK} elements per rank, for random grad_outputs"
    )
    return Cause(name, text, measure, CONFIDENCE)


def _same(left: Any, right: Tensor) -> bool:
    """Whether two vectors differ by no more than a small part of their size."""
    if left is None or left.shape != right.shape:
        return False
    size = max(float(left.norm()), float(right.norm()))
    return float((left - right).norm()) <= UNEXPLAINED * size


def _sampled(session: Session, inputs: Sequence[Tensor], which: int, eps: float) -> list[_Sampled]:
    """The gradients of an input on all ranks, with differences."""
    graph = session.call(inputs, True)
    outputs = list(zip(graph.outputs, graph.output_like, strict=True))
    cotangents = [_random_like(whole_of(like, space.placement), number) for number, (space, like) in enumerate(outputs)]
    held = session.backward(graph, cotangents, False).parts[which]
    parts = [cotangent_parts(v, space, like) for v, (space, like) in zip(cotangents, outputs, strict=True)]
    placement, like = session.inputs[which].placement, session.base[which]
    numbers = torch.arange(inputs[which].numel()).view(inputs[which].shape)
    held_numbers = parts_of(numbers, placement, like) if isinstance(placement, Shard) else [numbers for _ in like]

    def difference(number: int) -> tuple[float, list[float]]:
        """The derivative along one coordinate: of all results, and of the results of each rank."""

        def results_at(change: float) -> Any:
            moved = [tensor.clone() for tensor in inputs]
            moved[which].view(-1)[number] += change
            return session.call(moved, False).parts

        sides = zip(results_at(eps), results_at(-eps), strict=True)
        of_ranks = [[(plus - minus) / (2 * eps) for plus, minus in zip(*both, strict=True)] for both in sides]
        joined = (whole_of(own, space.placement) for own, (space, _) in zip(of_ranks, outputs, strict=True))
        total = sum(float((v.cpu() * d).sum()) for v, d in zip(cotangents, joined, strict=True))
        pairs = list(zip(parts, of_ranks, strict=True))
        return total, [sum(float((v[rank] * d[rank]).sum()) for v, d in pairs) for rank in range(len(like))]

    known = functools.cache(difference)
    found = []
    for rank, (part, local, zeros) in enumerate(zip(held, held_numbers, like, strict=True)):
        some = torch.linspace(0, max(0, local.numel() - 1), min(PER_RANK, local.numel())).round().long()
        gradient = (zeros * 0 if part is None else part).reshape(-1)[some]
        at = [known(int(number)) for number in local.reshape(-1)[some]]
        values = torch.tensor([(total, own[rank]) for total, own in at], dtype=torch.float64).view(-1, 2)
        found.append(_Sampled(gradient.double(), *values.unbind(1)))
    return found


def _random_like(tensor: Tensor, number: int) -> Tensor:
    v = direction(tensor.numel(), number, COTANGENT_STREAM)
    return v.view(tensor.shape).to(tensor.dtype)
