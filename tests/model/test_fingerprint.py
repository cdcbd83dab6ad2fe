"""Fingerprints: every single change changes them."""

from __future__ import annotations

import pytest
import torch

from fastgrad.model.fingerprint import _factors, fingerprint

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 65536, 200_003])
def test_a_single_bit_changes_it(dtype: torch.dtype, size: int) -> None:
    tensor = torch.zeros(size, dtype=dtype)
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    for place in {0, size // 2, size - 1}:
        changed = tensor.clone()
        changed[place] = 1
        assert fingerprint(changed) != before


def test_it_tells_orders_and_signs_apart() -> None:
    tensor = torch.randn(70_000)
    same = {fingerprint(one) for one in (tensor, tensor.clone(), tensor.reshape(7, -1), tensor.reshape(-1, 7).T.T)}
    assert len(same) == 1
    others = {fingerprint(one) for one in (tensor, -tensor, tensor.flip(0), tensor.roll(65536), tensor.roll(1))}
    assert len(others) == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [3, 8, 1000, 70_000])
def test_changes_of_the_uppermost_bits_do_not_cancel(dtype: torch.dtype, size: int) -> None:
    tensor = torch.randn(size, dtype=torch.float64).to(dtype)
    two = tensor.clone()
    two[:2].neg_()
    zeros = torch.zeros(size, dtype=dtype)
    moved = [zeros.clone(), zeros.clone()]
    moved[0][0], moved[1][1] = -0.0, -0.0
    found = [fingerprint(one) for one in (tensor, -tensor, two, zeros, -zeros, *moved)]
    assert len(set(found)) == len(found)


def test_products_whose_bits_are_all_inverted_do_not_collide() -> None:
    word = torch.tensor([12345, 0])
    inverse = pow(int(_factors(word.device)[0][0]), -1, 1 << 64)
    other = word.clone()
    other[0] = (-12345 - inverse + (1 << 63)) % (1 << 64) - (1 << 63)
    assert fingerprint(other) != fingerprint(word)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_values_of_sparse_tensors_change_it(layout: torch.layout) -> None:
    made = torch.eye(4).to_sparse(layout=layout)
    before = fingerprint(made)
    assert fingerprint(made.clone()) == before
    changed = made.clone()
    (changed._values() if layout is torch.sparse_coo else changed.values())[2] = 3.0
    assert fingerprint(changed) != before
    assert fingerprint(torch.eye(4).roll(1, 0).to_sparse_coo()) != fingerprint(torch.eye(4).to_sparse_coo())


def test_empty_tensors_are_alike() -> None:
    assert fingerprint(torch.empty(0, 3)) == fingerprint(torch.empty(3, 0, dtype=torch.int64)) == 0
