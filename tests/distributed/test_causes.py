"""Causes and messages for errors between ranks, from synthetic gradients, answers and errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

import fastgrad
from fastgrad.core.ranks import RankFailure
from fastgrad.distributed.causes import _causes, _Sampled, explained
from fastgrad.distributed.placements import Difference, Space
from fastgrad.distributed.session import Answer, _by_result, _in_words

RIGHT = torch.tensor([[1.0, 2.0, -1.0], [0.5, -3.0, 2.0]], dtype=torch.float64)
"""The derivatives at three elements of each of two ranks."""


def named(space: Space, found: Tensor, right: Tensor = RIGHT, own: Tensor = 0.3 * RIGHT) -> list[str]:
    sampled = [_Sampled(*each) for each in zip(found, right, own, strict=True)]
    return [cause.name for cause in _causes(sampled, space)]


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (2 * RIGHT, "number of ranks"),
        (RIGHT / 4, "number of ranks"),
        (RIGHT.flip(0), "wrong shard"),
        (torch.stack([RIGHT[0], 7 * RIGHT[1]]), "one rank"),
        (0.3 * RIGHT, "reduction missing between ranks"),
        (7 * RIGHT, ""),
        (RIGHT * torch.nan, ""),
    ],
)
def test_gradients_of_parts(found: Tensor, name: str) -> None:
    assert named(Space(Shard(0), Shard(0)), found) == ([name] if name else [])


def test_gradients_of_sums_and_copies() -> None:
    same = RIGHT[:1].expand(2, 3)
    assert named(Space(Partial(), Partial()), same, same) == ["reduced twice"]
    shares = torch.stack([0.4 * same[0], 0.6 * same[0]])
    assert named(Space(Replicate(), Replicate()), shares, same) == ["reduction missing between ranks"]
    assert named(Space(Replicate(), Replicate()), 2 * same, same) == ["number of ranks"]


def test_no_cause_is_named_where_func_does_not_depend_on_the_input() -> None:
    assert named(Space(Shard(0), Shard(0)), 2 * RIGHT, 0 * RIGHT) == []


@pytest.mark.parametrize(("what", "places"), [("output", (1, None)), ("gradient", (None, 1))])
def test_ranks_that_differ_are_a_failure_of_a_check_that_passed(what: str, places: tuple[Any, Any]) -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    apart = Difference(2, [0], 1.5, 1.0)
    session: Any = SimpleNamespace(
        differences={(what, 1): apart},
        inputs=[Space(Replicate(), Replicate())] * 2,
        base=[[x.detach()] * 3] * 2,
        call=lambda *_: (_ for _ in ()).throw(fastgrad.distributed.RankError("func raised")),
    )
    report = explained(fastgrad.check(torch.mul, (x, x.detach().clone().requires_grad_())), session, (x, x), [0, 1])
    assert report.failure is not None
    assert report.failure.kind == "ranks differ"
    assert (report.failure.output, report.failure.input) == places
    said = f"ranks hold different values of {what} 1, whose placement is Replicate(): at [0], rank 2 has 1.5 and rank 0"
    assert said in str(report)


def test_ranks_return_the_same_number_of_results() -> None:
    one = Answer((torch.ones(2),), (True,))
    two = Answer((torch.ones(2), None), (False, False))
    parts, differentiable = _by_result([one, Answer((torch.ones(2),), (False,))])
    assert [len(part) for part in parts] == [2]
    assert differentiable == [True]
    with pytest.raises(ValueError, match="got 1 on rank 0, 2 on rank 1"):
        _by_result([one, two])


def test_the_rank_that_did_not_wait_is_the_cause() -> None:
    raised, waited = RankFailure(1, "ValueError: planted"), RankFailure(0, "timed out", "all_reduce")
    assert _in_words([raised], 2) == "rank 1 raised ValueError: planted"
    assert _in_words([waited, raised], 2) == "rank 1 raised ValueError: planted; rank 0 timed out in all_reduce"
    assert _in_words([waited], 2) == "rank 0 timed out in all_reduce; rank 1 did not enter it"
    assert "rank 1 did not enter it (in second derivatives, autograd runs no" in _in_words([waited], 2, True)
    assert _in_words([waited], 4) == "rank 0 timed out in all_reduce; ranks 1, 2, 3 did not enter it"
