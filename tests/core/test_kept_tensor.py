"""The native state of plain tensors: which tensors it supports, and what it restores bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastgrad.core import native

pytestmark = pytest.mark.skipif(not native.IS_NATIVE, reason="of the compiled module")


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


class Wrapped(Tensor):
    pass


with_gradient = leaf(3)
with_gradient.grad = torch.ones_like(with_gradient)


@pytest.mark.parametrize(
    "value",
    [
        None,
        3.0,
        with_gradient,
        leaf(3) * 2,
        leaf(4, 3).detach().t().requires_grad_(),
        leaf(3).detach().as_subclass(Wrapped),
        torch.eye(3).to_sparse(),
        torch.zeros(3, device="meta"),
        torch.ones(1).expand(5),
    ],
)
def test_what_needs_more_care_is_not_taken(value: object) -> None:
    assert native.KeptTensor.keep(value) is None


def test_values_memory_and_flags_are_restored() -> None:
    x = leaf(4, 3)
    with torch.no_grad():
        x[0, 0], x[1, 1], x[2, 2] = math.nan, -0.0, math.inf
    bits, place, version = x.detach().clone().view(torch.int64), x.data_ptr(), x._version
    kept = native.KeptTensor.keep(x)
    assert kept is not None
    x.data = torch.zeros(7, dtype=torch.float64)
    x.requires_grad_(False)
    x.grad = torch.ones(7, dtype=torch.float64)
    for _ in range(2):
        kept.restore()
        assert torch.equal(x.detach().view(torch.int64), bits)
        assert (x.data_ptr(), x.requires_grad, x.grad, x.shape) == (place, True, None, (4, 3))
    with torch.no_grad():
        x.zero_()
    kept.restore()
    assert torch.equal(x.detach().view(torch.int64), bits)
    assert x._version > version + 1  # of zero_, and of the restored values


def test_freed_memory_is_allocated_again() -> None:
    x = leaf(1000)
    bits = x.detach().clone()
    kept = native.KeptTensor.keep(x)
    assert kept is not None
    x.untyped_storage().resize_(0)
    kept.restore()
    assert torch.equal(x, bits)


def test_an_unchanged_tensor_is_not_written() -> None:
    x = torch.arange(5)
    kept = native.KeptTensor.keep(x)
    assert kept is not None
    version = x._version
    kept.restore()
    assert x._version == version
