"""Blocks of real coordinates, and memory overlap by exact addresses."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgrad.problem.coordinates import blocks_of, overlap, overlaps_itself


def test_blocks_lie_end_to_end_and_once() -> None:
    a, b, c = torch.zeros(2, 3), torch.zeros(4, dtype=torch.complex64), torch.zeros(())
    blocks = blocks_of((a, 5, b, a, c), (0, 2, 3, 4), once=True)
    assert [(block.index, block.position, block.first, block.size) for block in blocks] == [
        (0, 0, 0, 6),
        (1, 2, 6, 8),
        (3, 4, 14, 1),
    ]
    assert [block.first for block in blocks_of((a, a), (0, 1), once=False)] == [0, 6]
    assert blocks[0].element_index(5) == (1, 2)
    assert blocks[2].element_index(0) == ()


layouts = st.tuples(
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.lists(st.integers(0, 4), min_size=3, max_size=3),
    st.integers(0, 4),
)


@settings(max_examples=300, deadline=None)
@given(left=layouts, right=layouts)
def test_overlap_against_sets_of_elements(
    left: tuple[list[int], list[int], int], right: tuple[list[int], list[int], int]
) -> None:
    base = torch.arange(64)
    views = [base.as_strided(size, stride[: len(size)], offset) for size, stride, offset in (left, right)]
    elements = [view.reshape(-1).tolist() for view in views]
    assert overlap(*views) == bool(set(elements[0]) & set(elements[1]))
    for view, found in zip(views, elements, strict=True):
        assert overlaps_itself(view) == (len(set(found)) < len(found))


def test_overlap_of_different_dtypes() -> None:
    z = torch.zeros(4, dtype=torch.complex128)
    assert overlap(z[1:], torch.view_as_real(z)[1, 1])
    assert not overlap(z[1:], torch.view_as_real(z)[0, 1])
    assert not overlap(z, torch.zeros(4))
