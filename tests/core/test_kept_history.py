"""The nodes of tensors in the graph are restored after in-place operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastgrad.core import native

pytestmark = pytest.mark.skipif(not native.IS_NATIVE, reason="plain Python restores no nodes")

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda y: y,
    "slice": lambda y: y[1:],
    "view": lambda y: y.view(2, 2),
    "transposed": lambda y: y.view(2, 2).t(),
    "view of a view": lambda y: y.view(2, 2)[1],
    "real part": lambda y: torch.view_as_complex(y.view(2, 2)).real,
}


def leaf() -> Tensor:
    return torch.tensor([0.3, 0.5, 0.8, 1.1], dtype=torch.float64, requires_grad=True)


def write(x: Tensor) -> None:
    values = x.detach().clone()
    x.mul_(2).sin_()
    x.detach().copy_(values)  # the values are restored, as a check does


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_gradients_through_a_tensor_stay_as_they_were(view: Callable[[Tensor], Tensor]) -> None:
    base = leaf()
    y = base * 3
    x, other = view(y), y[:3]
    node, expected = x.grad_fn, torch.autograd.grad(x.sum(), base, retain_graph=True)
    kept = native.KeptHistory(x)
    for _ in range(2):
        write(x)
        assert not torch.equal(torch.autograd.grad(x.sum(), base, retain_graph=True)[0], expected[0])
        kept.restore()
        assert x.grad_fn is node
        assert torch.equal(torch.autograd.grad(x.sum(), base, retain_graph=True)[0], expected[0])
        assert torch.autograd.grad(other.sum(), base, retain_graph=True)[0].tolist() == [3, 3, 3, 0]


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_tensors_without_grad_are_leaves_again(view: Callable[[Tensor], Tensor]) -> None:
    base = leaf().detach()
    x = view(base)
    kept = native.KeptHistory(x)
    x.mul_(torch.ones((), dtype=torch.float64, requires_grad=True))
    assert x.requires_grad
    kept.restore()
    for one in (x, base):
        assert one.is_leaf
        assert not one.requires_grad
        assert one.grad_fn is None


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("is_used", [False, True])
def test_gradients_are_still_retained(view: Callable[[Tensor], Tensor], is_used: bool) -> None:
    y = leaf() * 3
    x = view(y)
    y.retain_grad()
    x.retain_grad()
    hooked: list[Tensor] = []
    x.register_hook(hooked.append)
    kept = native.KeptHistory(x)
    write(x)
    if is_used:
        x.sum()  # autograd makes the node of a view when it is used
    kept.restore()
    x.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))
    assert y.grad is not None
    assert len(hooked) == 1


def test_a_view_without_grad_recorded_keeps_its_node() -> None:
    x = (leaf() * 3)[1:]
    node = x.grad_fn
    kept = native.KeptHistory(x)
    with torch.no_grad():
        x.mul_(2)
    kept.restore()
    assert x.grad_fn is node


def test_a_view_that_was_stale_is_renewed() -> None:
    base = leaf()
    y = base * 3
    x = y[1:]
    y.mul_(2)  # the node of x is not yet that of this version
    kept = native.KeptHistory(x)
    write(x)
    kept.restore()
    assert torch.autograd.grad(x.sum(), base)[0].tolist() == [0, 6, 6, 6]
