"""Properties of autograd's graph: the inputs that it reaches, and backwards that write into grad_output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fastgrad.core.torch_private import nodes_behind


def depends_on(tensor: Tensor, other: Tensor) -> bool:
    """Whether autograd recorded that `tensor` was computed from `other`."""
    if tensor is other or tensor.grad_fn is None or not other.requires_grad:
        return False
    return get_gradient_edge(other).node in set(nodes_behind([tensor]))


@contextmanager
def written_gradients(outputs: Sequence[Tensor]) -> Iterator[Callable[[], bool]]:
    """Observes backward passes; yields a function that tells whether any node wrote into its grad_output."""
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        kept.extend((gradient, gradient.clone()) for gradient in gradients if gradient is not None)

    with _before_each(outputs, keep):
        yield lambda: not all(torch.allclose(gradient, copy, 0, 0, equal_nan=True) for gradient, copy in kept)


@contextmanager
def copied_gradients(outputs: Sequence[Tensor]) -> Iterator[None]:
    """Passes copies of gradients to every node, so that writes into them do not affect other nodes."""

    def copy(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if gradient is None else gradient.clone() for gradient in gradients)

    with _before_each(outputs, copy):
        yield


@contextmanager
def _before_each(outputs: Sequence[Tensor], hook: Callable[[tuple[Tensor | None, ...]], Any]) -> Iterator[None]:
    handles = [node.register_prehook(hook) for node in nodes_behind(outputs)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
