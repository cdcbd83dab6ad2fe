"""Coloring and transposing patterns, compared with the definition in plain Python."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgrad.core import native
from fastgrad.structure import coloring
from fastgrad.structure.coloring import Indices

Lists = list[list[int]]


def csr(lists: Lists) -> tuple[Indices, Indices]:
    sizes = np.array([0, *map(len, lists)], dtype=np.int64)
    return sizes.cumsum(), np.array([t for targets in lists for t in targets], dtype=np.int64)


def lists_of(starts: Indices, members: Indices) -> Lists:
    return [members[a:b].tolist() for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]


def slow_first_fit(lists: Lists, order: list[int]) -> list[int]:
    """The oracle: each vertex gets the lowest color that no vertex with a common target has."""
    colors: dict[int, int] = {}
    for vertex in order:
        near = {colors[other] for other in colors if set(lists[other]) & set(lists[vertex])}
        colors[vertex] = next(color for color in range(len(lists)) if color not in near)
    return [colors[vertex] for vertex in range(len(lists))]


def slow_coloring(lists: Lists, targets: int) -> list[int]:
    """The oracle of the choice between the two orders."""
    natural = slow_first_fit(lists, list(range(len(lists))))
    bound = max((sum(t in own for own in lists) for t in range(targets)), default=0)
    if not lists or max(natural) + 1 <= max(bound, 1):
        return natural
    largest_first = slow_first_fit(lists, sorted(range(len(lists)), key=lambda vertex: -len(lists[vertex])))
    return min(natural, largest_first, key=max)


def assert_valid(lists: Lists, colors: Indices) -> None:
    seen = set()
    for targets, color in zip(lists, colors.tolist(), strict=True):
        assert color == 0 or targets
        for target in targets:
            assert (target, color) not in seen, "two vertices of one color share a target"
            seen.add((target, color))
    assert set(colors.tolist()) == set(range(count(colors)))


def count(colors: Indices) -> int:
    return int(colors.max()) + 1 if colors.size else 0


def colored(lists: Lists, targets: int) -> Indices:
    colors = coloring.color(*csr(lists), targets)
    assert colors.dtype == np.int64
    assert_valid(lists, colors)
    return colors


@st.composite
def patterns(draw: st.DrawFn) -> tuple[Lists, int]:
    targets = draw(st.integers(0, 12))
    own = st.lists(st.integers(0, targets - 1), unique=True, max_size=5) if targets else st.just([])
    return draw(st.lists(own, max_size=25)), targets


@settings(max_examples=300, deadline=None)
@given(patterns())
def test_color_is_first_fit_in_the_better_order(pattern: tuple[Lists, int]) -> None:
    lists, targets = pattern
    assert colored(lists, targets).tolist() == slow_coloring(lists, targets)


@settings(max_examples=150, deadline=None)
@given(patterns())
def test_transpose(pattern: tuple[Lists, int]) -> None:
    lists, targets = pattern
    starts, members = coloring.transpose(*csr(lists), targets)
    assert lists_of(starts, members) == [[v for v, own in enumerate(lists) if t in own] for t in range(targets)]
    back = coloring.transpose(starts, members, len(lists))
    assert lists_of(*back) == [sorted(own) for own in lists]


@settings(max_examples=100, deadline=None)
@given(patterns())
def test_groups_list_the_vertices_of_each_color(pattern: tuple[Lists, int]) -> None:
    colors = coloring.color(*csr(pattern[0]), pattern[1])
    order, starts = coloring.groups(colors)
    assert starts.size == count(colors) + 1
    expected = [[v for v, own in enumerate(colors.tolist()) if own == c] for c in range(count(colors))]
    assert lists_of(starts, order) == expected


@st.composite
def graphs(draw: st.DrawFn) -> Lists:
    """Symmetric patterns, some vertices being their own targets."""
    n = draw(st.integers(0, 9))
    pairs = [(i, j) for i in range(n) for j in range(i + 1)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return symmetric(n, chosen)


def symmetric(n: int, pairs: list[tuple[int, int]]) -> Lists:
    own: list[set[int]] = [set() for _ in range(n)]
    for i, j in pairs:
        own[i].add(j)
        own[j].add(i)
    return [sorted(targets) for targets in own]


def is_star_coloring(lists: Lists, colors: dict[int, int]) -> bool:
    """The definition: neighbors differ, and every path over four colored vertices has three colors or more."""
    near = {v: [w for w in lists[v] if w != v and w in colors] for v in colors}
    if any(colors[v] == colors[w] for v in near for w in near[v]):
        return False
    paths = ((a, b, c, d) for b in near for c in near[b] for a in near[b] for d in near[c] if len({a, b, c, d}) == 4)
    return all(len({colors[v] for v in path}) > 2 for path in paths)


def slow_star_coloring(lists: Lists, order: list[int]) -> list[int]:
    """The oracle of first fit."""
    colors: dict[int, int] = {}
    for vertex in order:
        fitting = (c for c in range(len(lists)) if is_star_coloring(lists, {**colors, vertex: c}))
        colors[vertex] = next(fitting)
    return [colors[vertex] for vertex in range(len(lists))]


@settings(max_examples=120, deadline=None)
@given(graphs())
def test_star_color_is_first_fit_in_the_better_order(lists: Lists) -> None:
    natural = slow_star_coloring(lists, list(range(len(lists))))
    expected = natural
    if natural and max(natural) + 1 > 2:
        largest_first = slow_star_coloring(lists, sorted(range(len(lists)), key=lambda vertex: -len(lists[vertex])))
        expected = min(natural, largest_first, key=max)
    colors = coloring.star_color(*csr(lists), len(lists))
    assert colors is not None
    assert colors.tolist() == expected
    assert is_star_coloring(lists, dict(enumerate(expected)))
    # Decompression requires that one end of each edge has no second neighbor with the color of the other end.
    for i, own in enumerate(lists):
        for j in own:
            alone = [[w for w in lists[a] if w != a and colors[w] == colors[b]] == [b] for a, b in ((i, j), (j, i))]
            assert i == j or any(alone)


@settings(max_examples=50, deadline=None)
@given(graphs(), st.integers(0, 4))
def test_star_color_gives_up_beyond_the_colors_that_are_of_use(lists: Lists, most: int) -> None:
    everything = coloring.star_color(*csr(lists), len(lists))
    assert everything is not None
    colors = coloring.star_color(*csr(lists), most)
    assert (colors is None) == (count(everything) > most)
    assert colors is None or count(colors) == count(everything)


@pytest.mark.parametrize(
    ("lists", "colors"),
    [
        pytest.param([[k] for k in range(9)], 1, id="diagonal"),
        pytest.param(symmetric(300, [(0, k) for k in range(300)]), 2, id="arrow"),
        pytest.param(symmetric(300, [(299, k) for k in range(300)]), 2, id="arrow-of-the-last"),
        pytest.param(symmetric(300, [(k, k + 1) for k in range(299)]), 3, id="path"),
        pytest.param(symmetric(30, [(i, j) for i in range(30) for j in range(i)]), 30, id="dense"),
    ],
)
def test_known_symmetric_structures(lists: Lists, colors: int) -> None:
    found = coloring.star_color(*csr(lists), len(lists))
    assert found is not None
    assert count(found) == colors


def test_star_coloring_of_a_large_arrow_and_grid_takes_seconds() -> None:
    side = 150
    grid = np.arange(side * side).reshape(side, side)
    edges = np.concatenate(
        [np.stack([grid[1:], grid[:-1]], -1), np.stack([grid[:, 1:], grid[:, :-1]], -1).reshape(side - 1, side, 2)]
    )
    pairs = np.concatenate(
        [edges.reshape(-1, 2), np.stack([np.arange(1, side * side), np.zeros(side * side - 1, int)], 1)]
    )
    both = np.unique(np.concatenate([pairs, pairs[:, ::-1]]), axis=0)
    starts = np.concatenate([[0], np.bincount(both[:, 0], minlength=side * side).cumsum()])
    begin = time.process_time()
    colors = coloring.star_color(starts, np.ascontiguousarray(both[:, 1]), 100)
    assert colors is not None
    assert (colors[both[:, 0]] != colors[both[:, 1]]).all()
    assert time.process_time() - begin < 5


def linear_layer(batch: int, inputs: int, outputs: int) -> Lists:
    """The pattern of y = x W^T: columns (b, i) of x, then columns (o, i) of W; rows (b, o) of y."""
    own = [[b * outputs + o for o in range(outputs)] for b in range(batch) for _ in range(inputs)]
    return own + [[b * outputs + o for b in range(batch)] for o in range(outputs) for _ in range(inputs)]


@pytest.mark.parametrize(
    ("lists", "targets", "colors"),
    [
        pytest.param([[k] for k in range(200)], 200, 1, id="diagonal"),
        pytest.param([[k // 7 * 7 + j for j in range(7)] for k in range(210)], 210, 7, id="blocks"),
        pytest.param([[j for j in range(k - 2, k + 3) if 0 <= j < 300] for k in range(300)], 300, 5, id="banded"),
        pytest.param([list(range(150)) for _ in range(150)], 150, 150, id="dense"),
        pytest.param([[k, 200] for k in range(200)] + [[201]], 202, 200, id="one-dense-target"),
        pytest.param([[0] if k == 0 else [] for k in range(5)], 1, 1, id="vertices-without-targets"),
        pytest.param([[] for _ in range(4)], 0, 1, id="no-targets"),
        pytest.param([], 3, 0, id="no-vertices"),
    ],
)
def test_known_structures(lists: Lists, targets: int, colors: int) -> None:
    assert count(colored(lists, targets)) == colors


def test_rows_of_a_linear_layer() -> None:
    # y[b, o] depends on x with the same b and on W with the same o, so the colors form a Latin square.
    batch, inputs, outputs = 8, 3, 8
    starts, members = coloring.transpose(*csr(linear_layer(batch, inputs, outputs)), batch * outputs)
    colors = coloring.color(starts, members, batch * inputs + outputs * inputs)
    assert_valid(lists_of(starts, members), colors)
    assert count(colors) == 8
    square = colors.reshape(batch, outputs)
    for line in (*square, *square.T):
        assert sorted(line.tolist()) == list(range(8))


def test_more_colors_than_one_pass_handles() -> None:
    generator = np.random.default_rng(0)
    lists = [generator.permutation(20)[: 1 + k % 9].tolist() for k in range(500)]
    colors = colored(lists, 20)
    assert count(colors) > 128
    assert colors.tolist() == slow_coloring(lists, 20)


def blocks() -> tuple[Indices, Indices, int]:
    block = np.arange(200_000) // 10 * 10
    return np.arange(200_001) * 10, (block[:, None] + np.arange(10)).reshape(-1), 200_000


def random() -> tuple[Indices, Indices, int]:
    # One target in each tenth of all targets, so that the ten targets of a vertex are distinct.
    members = np.random.default_rng(0).integers(0, 20_000, (200_000, 10)) + np.arange(10) * 20_000
    return np.arange(200_001) * 10, members.reshape(-1), 200_000


@pytest.mark.parametrize("pattern", [blocks, random])
def test_two_million_nonzeros_take_seconds(pattern: Callable[[], tuple[Indices, Indices, int]]) -> None:
    starts, members, targets = pattern()
    begin = time.process_time()
    colors = coloring.color(starts, members, targets)
    of_targets, vertices = coloring.transpose(starts, members, targets)
    order, key_starts = coloring.bucket(members, targets)
    grouped, group_starts = coloring.groups(colors)
    seconds = time.process_time() - begin
    assert np.array_equal(key_starts, of_targets)
    assert np.array_equal(members[order], np.arange(targets).repeat(np.diff(of_targets)))
    assert np.array_equal(order // 10, vertices)
    # If a color had a target twice, the pair (target, color) would occur twice.
    pairs = members * count(colors) + colors.repeat(10)
    assert np.unique(pairs).size == pairs.size
    assert np.array_equal(colors[grouped], np.arange(count(colors)).repeat(np.diff(group_starts)))
    if pattern is blocks:
        assert count(colors) == 10
    assert seconds < 4


@pytest.mark.parametrize("function", [coloring.color, coloring.transpose])
@pytest.mark.parametrize(
    ("starts", "members", "targets", "message"),
    [
        ([], [], 1, "starts must have one element more than there are vertices, got no element"),
        ([0, 1], [0, 0], 1, "starts must rise from 0 to the number of members, 2, got 0 to 1"),
        ([1, 2], [0, 0], 1, "starts must rise from 0"),
        ([0, 2, 1, 2], [0, 0], 1, "starts must rise from 0"),
        ([0, 2], [0, 3], 3, r"members must be in \[0, 3\), got 3"),
        ([0, 2], [0, -1], 3, r"members must be in \[0, 3\), got -1"),
        ([0], [], -1, "the bound of members must be >= 0, got -1"),
    ],
)
def test_a_bad_pattern_is_refused(
    function: Callable[..., object], starts: list[int], members: list[int], targets: int, message: str
) -> None:
    arguments = [np.array(values, dtype=np.int64) for values in (starts, members)]
    with pytest.raises(RuntimeError, match=f"{function.__name__}: {message}"):
        function(*arguments, targets)


@pytest.mark.parametrize("function", [native.color, native.transpose])
def test_other_tensors_are_refused(function: Callable[..., object]) -> None:
    starts, members = torch.tensor([0, 1, 3]), torch.tensor([0, 1, 2])
    for bad in (members.int(), members.double(), members[None], torch.arange(6)[::2]):
        with pytest.raises(RuntimeError, match="members must be a contiguous int64 tensor with one dimension"):
            function(starts, bad, 6)
    with pytest.raises(RuntimeError, match="starts must be a contiguous int64 tensor with one dimension"):
        function(starts.int(), members, 6)
    with pytest.raises(RuntimeError, match="starts and members must be on the CPU, got cpu and meta"):
        function(starts, members.to("meta"), 6)
