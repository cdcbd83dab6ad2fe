"""Parts are combined to whole tensors and the reverse; parts that do not fit are named."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from fastgrad.distributed.placements import Placement, difference, held_by, mismatch, parts_of, whole_of


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(-1), Replicate(), Partial()])
def test_parts_make_the_whole(placement: Placement) -> None:
    whole = torch.arange(12, dtype=torch.float64).view(3, 4)
    like = list(whole.tensor_split(3, placement.dim)) if isinstance(placement, Shard) else [torch.zeros(3, 4)] * 3
    parts = parts_of(whole, placement, like)
    assert len(parts) == 3
    assert torch.equal(whole_of(parts, placement), whole)
    if isinstance(placement, Partial):
        assert len({float(part.sum()) for part in parts}) == 3


def test_an_element_is_held_by_one_rank() -> None:
    shapes = [torch.Size((2, 3)), torch.Size((2, 0)), torch.Size((2, 2))]
    assert held_by(Shard(1), shapes, [1, 2]) == (0, [1, 2])
    assert held_by(Shard(1), shapes, [1, 4]) == held_by(Shard(-1), shapes, [1, 4]) == (2, [1, 1])
    with pytest.raises(IndexError, match=r"index \[0, 5\] is outside all parts"):
        held_by(Shard(1), shapes, [0, 5])


@pytest.mark.parametrize(
    ("placement", "shapes", "text"),
    [
        (Shard(1), [(2, 3), (2, 5)], ""),
        (Shard(0), [(2, 3), (2, 5)], "other dimensions differ: [2, 3] on rank 0, [2, 5] on rank 1"),
        (Shard(-2), [(2, 3), (4, 3)], ""),
        (Shard(-1), [(2, 3), (4, 3)], "other dimensions differ: [2, 3] on rank 0, [4, 3] on rank 1"),
        (Shard(2), [(2, 3), (2, 3)], "is S(2), which needs at least 3 dimensions, but has 2 dimensions on rank 0"),
        (Shard(-3), [(2, 3), (2, 3)], "is S(-3), which needs at least 3 dimensions, but has 2 dimensions on rank 0"),
        (Shard(0), [(2,), ()], "is S(0), which needs at least 1 dimension, but has 0 dimensions on rank 1"),
        (Replicate(), [(2, 3), (2, 3)], ""),
        (Replicate(), [(2, 3), (3, 2)], "its shapes differ: [2, 3] on rank 0, [3, 2] on rank 1"),
    ],
)
def test_shapes_that_do_not_fit_are_named(placement: Placement, shapes: list[tuple[int, ...]], text: str) -> None:
    found = mismatch(placement, [torch.zeros(shape) for shape in shapes])
    assert (text in found) if text else not found


def test_dtypes_that_differ_are_named() -> None:
    text = "has different dtypes on the ranks: torch.float32, torch.float64"
    assert mismatch(Replicate(), [torch.zeros(2), torch.zeros(2).double()]) == text


def test_replicated_tensors_may_differ_by_rounding_only() -> None:
    x = torch.tensor([1.0, torch.nan, torch.inf, 3.0], dtype=torch.float64)
    near, apart, lost = x.clone(), x.clone(), x.clone()
    near[3] += 2.0**-51
    apart[0] += 1e-6
    lost[3] = torch.nan
    assert difference([x, x.clone(), near], Replicate()) is None
    assert difference([x[:0], x[:0]], Replicate()) is None
    assert difference([x, apart], Shard(0)) is None
    found = difference([x, near, apart], Replicate())
    assert found is not None
    assert (found.rank, found.index, found.on_first) == (2, [0], 1.0)
    missing = difference([x, lost], Replicate())
    assert missing is not None
    assert (missing.rank, missing.index) == (1, [3])
