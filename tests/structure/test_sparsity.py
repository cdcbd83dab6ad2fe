"""Patterns that are guessed from shapes or found by refinement, compared with the true pattern."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgrad.problem.coordinates import Block
from fastgrad.structure.refinement import Refinement, refined
from fastgrad.structure.sparsity import (
    BAND,
    Mask,
    Pattern,
    decode,
    decoded,
    explains_look,
    guess_band,
    guess_in_order,
    guess_moved,
    guess_pointwise,
)


def blocks(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Block]:
    found, first = [], 0
    for index, shape in enumerate(shapes):
        tensor = torch.zeros(shape, dtype=dtype)
        size = tensor.numel() * (2 if dtype.is_complex else 1)
        found.append(Block(index, index, tensor, first, size))
        first += size
    return found


def dense(pattern: Pattern) -> np.ndarray:
    matrix = np.zeros((pattern.m, pattern.n), dtype=bool)
    matrix[pattern.rows(), pattern.columns] = True
    return matrix


def oracle(matrix: np.ndarray) -> tuple[Callable[[Mask], Mask], Callable[[Mask], Mask]]:
    """The rows that react to columns, and the columns that react to rows, of a known matrix."""
    return lambda columns: matrix[:, columns].any(1), lambda rows: matrix[rows].any(0)


def probe(matrix: np.ndarray, inputs: list[Block], outputs: list[Block], budget: int = 10**9) -> Pattern | None:
    """Refinement by an oracle that knows the matrix."""
    reacting, reached = oracle(matrix)
    sides = Refinement(reacting, inputs, matrix.shape[0]), Refinement(reached, outputs, matrix.shape[1])
    return refined(*sides, inputs, outputs, lambda entries: True, budget)


def test_a_pointwise_guess() -> None:
    pattern = guess_pointwise(blocks((3, 4), (4,)), blocks((3, 4)))
    assert pattern is not None
    expected = np.concatenate([np.eye(12, dtype=bool), np.tile(np.eye(4, dtype=bool), (3, 1))], 1)
    assert (dense(pattern) == expected).all()


def test_a_complex_element_depends_on_both_coordinates() -> None:
    pattern = guess_pointwise(blocks((3,), dtype=torch.complex128), blocks((3,), dtype=torch.complex128))
    assert pattern is not None
    assert (dense(pattern) == np.kron(np.eye(3), np.ones((2, 2))).astype(bool)).all()


def test_no_guess_where_shapes_do_not_broadcast() -> None:
    assert guess_pointwise(blocks((3, 4)), blocks((4, 3))) is None


def test_what_splits_and_joins_is_guessed_in_order() -> None:
    pattern = guess_in_order(blocks((3, 4), (2,)), blocks((5,), (9,)))
    assert pattern is not None
    assert (dense(pattern) == np.eye(14, dtype=bool)).all()
    assert guess_in_order(blocks((3, 4)), blocks((11,))) is None


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_a_band_is_guessed_from_one_product(is_symmetric: bool) -> None:
    n = 3 * BAND
    matrix = np.eye(n, dtype=bool) | np.eye(n, k=2, dtype=bool)
    pattern = guess_band(oracle(matrix)[1], n, n, is_symmetric)
    assert pattern is not None
    assert (dense(pattern) == (matrix | matrix.T if is_symmetric else matrix)).all()
    assert pattern.origin == "guessed from one product: a band"
    assert guess_band(lambda rows: np.zeros(n, dtype=bool), n, n, is_symmetric) is None
    assert guess_band(lambda rows: np.ones(n, dtype=bool), n, n, is_symmetric) is None


def test_a_permutation_is_no_band() -> None:
    matrix = np.eye(1000, dtype=bool)[np.arange(1000).reshape(40, 25).T.reshape(-1)]
    assert guess_band(oracle(matrix)[1], 1000, 1000, False) is None


def test_a_band_may_have_zeros() -> None:
    matrix = np.eye(1000, dtype=bool) | np.eye(1000, k=2, dtype=bool)
    kept = matrix & (np.random.default_rng(0).random(1000) < 0.5)[:, None]  # such as the rows of a relu
    pattern = guess_band(oracle(kept)[1], 1000, 1000, False)
    assert pattern is not None
    assert (dense(pattern) == matrix).all()


@settings(deadline=None)
@given(st.data())
def test_what_is_moved_is_guessed_from_values(data: st.DataObject) -> None:
    n, m = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    values = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(n) - 0.5
    sources = np.array(data.draw(st.lists(st.integers(-1, n - 1), min_size=m, max_size=m)))  # -1: a constant
    results = np.where(sources < 0, 7.25, values[sources])
    pattern = guess_moved(values, results, sources >= 0)
    expected = np.zeros((m, n), dtype=bool)
    expected[np.flatnonzero(sources >= 0), sources[sources >= 0]] = True
    if not expected.any():
        assert pattern is None
        return
    assert pattern is not None
    assert (dense(pattern) == expected).all()


def test_equal_values_do_not_say_which_was_moved() -> None:
    values = np.array([1.0, 2.0, 1.0])
    assert guess_moved(values, values[::-1].copy(), np.ones(3, dtype=bool)) is None
    assert guess_moved(values + np.arange(3), np.full(3, 9.0), np.ones(3, dtype=bool)) is None
    assert guess_moved(values[:0], values[:0], np.ones(0, dtype=bool)) is None


def test_one_look_refutes_a_guess() -> None:
    pattern = guess_pointwise(blocks((8,)), blocks((8,)))
    assert pattern is not None
    moved = np.arange(8) % 2 == 0
    assert explains_look(pattern, moved, np.arange(8) % 4 == 0)
    assert not explains_look(pattern, moved, np.arange(8) < 2)


def test_entries_can_be_added() -> None:
    pattern = guess_pointwise(blocks((3,)), blocks((3,)))
    assert pattern is not None
    more = pattern.with_entries(np.array([2, 0, 1]), np.array([0, 2, 1]))
    assert more.starts.tolist() == [0, 2, 3, 5]
    assert more.columns.tolist() == [0, 2, 1, 0, 2]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_refinement_finds_every_entry(data: st.DataObject) -> None:
    inputs = blocks(*data.draw(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=3)))
    outputs = blocks(*data.draw(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=2)))
    n, m = (sum(block.size for block in side) for side in (inputs, outputs))
    if not (n and m):
        return
    density = data.draw(st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]))
    matrix = np.random.default_rng(data.draw(st.integers(0, 2**32))).random((m, n)) < density
    pattern = probe(matrix, inputs, outputs)
    assert pattern is not None
    assert (dense(pattern) >= matrix).all()


def test_a_diagonal_takes_two_probes_a_level() -> None:
    n = 4096
    order = np.random.default_rng(0).permutation(n)
    counts = [0, 0]

    def reacting(columns: Mask) -> Mask:
        counts[0] += 1
        selected: Mask = columns[order]
        return selected

    def reached(rows: Mask) -> Mask:
        counts[1] += 1
        return np.isin(np.arange(n), order[rows])

    sides = Refinement(reacting, blocks((n,)), n), Refinement(reached, blocks((n,)), n)
    pattern = refined(*sides, blocks((n,)), blocks((n,)), lambda entries: True, 1000)
    assert pattern is not None
    assert (pattern.columns == order).all()
    assert pattern.nnz == n
    assert max(counts) <= 24


def test_one_side_may_be_hopeless() -> None:
    """Each of 16 rows has 256 entries of its own, spread over all columns."""
    matrix = (np.arange(4096) % 16)[None, :] == np.arange(16)[:, None]
    pattern = probe(matrix, blocks((4096,)), blocks((16,)), budget=100)
    assert pattern is not None
    assert (dense(pattern) == matrix).all()


def test_windows_show_before_channels() -> None:
    """A convolution: outputs depend on all channels, at three neighboring positions."""
    window = np.abs(np.arange(64)[:, None] - np.arange(64)[None, :]) <= 1
    matrix = np.kron(np.ones((32, 32), dtype=bool), window)
    pattern = probe(matrix, blocks((32, 64)), blocks((32, 64)), budget=400)
    assert pattern is not None
    assert (dense(pattern) >= matrix).all()
    assert pattern.nnz <= 2 * matrix.sum()


def test_no_structure_is_given_up_early() -> None:
    pattern = probe(np.ones((2048, 2048), dtype=bool), blocks((2048,)), blocks((2048,)), budget=300)
    assert pattern is not None
    assert pattern.nnz == 2048**2


def test_no_probes_give_no_pattern() -> None:
    assert probe(np.eye(1024, dtype=bool), blocks((1024,)), blocks((1024,)), budget=0) is None


def test_few_probes_give_what_they_do_not_rule_out() -> None:
    matrix = np.eye(1024, dtype=bool)
    pattern = probe(matrix, blocks((1024,)), blocks((1024,)), budget=10)
    assert pattern is not None
    assert (dense(pattern) >= matrix).all()
    assert matrix.sum() < pattern.nnz <= 1024**2 / 4


def test_a_pattern_that_must_be_finished() -> None:
    matrix = np.eye(1024, dtype=bool)
    reacting, reached = oracle(matrix)
    sides = Refinement(reacting, blocks((1024,)), 1024), Refinement(reached, blocks((1024,)), 1024)
    assert refined(*sides, blocks((1024,)), blocks((1024,)), lambda entries: True, 10, 10, False) is None


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_single_sources_are_decoded(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    m = data.draw(st.integers(1, 40))
    matrix = np.zeros((m, sum(sizes)), dtype=bool)
    first = 0
    for size in sizes:
        for row in range(m):
            source = data.draw(st.integers(-1, size - 1))
            if source >= 0:
                matrix[row, first + source] = True
        first += size
    inputs, outputs = blocks(*((size,) for size in sizes)), blocks((m,))
    by_columns = decoded(*oracle(matrix), inputs, outputs, 0.0, 1000)
    assert by_columns is not None
    assert (dense(by_columns) == matrix).all()
    most = sum(2 + (size - 1).bit_length() for size in sizes)
    assert by_columns.origin.startswith(f"found by {most} evaluations")
    assert decode(oracle(matrix)[0], inputs, most - 1) is None
    sources = decode(oracle(matrix.T)[1], inputs, 1000)  # the same for rows
    assert sources is not None
    assert (
        np.sort(sources[0] * 100 + sources[1]) == np.flatnonzero(np.pad(matrix, ((0, 0), (0, 100 - sum(sizes)))))
    ).all()


def test_columns_of_one_entry_are_decoded_from_the_rows() -> None:
    matrix = np.kron(np.ones((1, 4)), np.eye(32)) > 0  # rows i depend on i, i + 32, ...
    pattern = decoded(*oracle(matrix), blocks((128,)), blocks((32,)), 1.0, 1000)
    assert pattern is not None
    assert (dense(pattern) == matrix).all()
    assert pattern.origin == "found by 7 VJPs, one per bit of the outputs' indices"


def test_two_sources_are_not_decoded() -> None:
    probes = [0]
    reacting, reached = oracle(np.eye(64, dtype=bool) | np.eye(64, k=1, dtype=bool))

    def counted(selection: Mask) -> Mask:
        probes[0] += 1
        return reacting(selection)

    assert decoded(counted, reached, blocks((64,)), blocks((64,)), 0.5, 1000) is None
    assert probes[0] == 2
    assert decoded(counted, reached, blocks((64,)), blocks((64,)), 0.95, 1000) is None
    assert probes[0] == 2


def test_decoded_entries_are_those_of_whole_complex_elements() -> None:
    matrix = np.zeros((8, 8), dtype=bool)
    matrix[np.arange(0, 8, 2), [6, 5, 3, 0]] = True  # only of real parts
    pattern = decoded(*oracle(matrix), *(blocks((4,), dtype=torch.complex128) for _ in range(2)), 0.0, 1000)
    assert pattern is not None
    assert (dense(pattern) == np.kron(np.eye(4)[::-1], np.ones((2, 2)))).all()
