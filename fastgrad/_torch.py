"""The private names of torch that fastgrad needs: the only module that touches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._vmap_internals import _vmap
from torch.autograd import forward_ad

MKLDNN: torch.layout = torch._mkldnn  # type: ignore[attr-defined]


def undefined_grad(output: Tensor) -> Tensor:
    """`output` behind a node whose backward hands on an undefined gradient, whatever it is given."""
    # Its annotation says that this is a list; it is a tensor.
    return cast(Tensor, torch._C._functions.UndefinedGrad()(output))


def may_overlap_itself(tensor: Tensor) -> bool:
    """Whether torch sees, or cannot rule out, two elements of a strided tensor at one address."""
    return bool(torch._debug_has_internal_overlap(tensor) != 0)


def batched(func: Callable[..., Any]) -> Callable[..., Any]:
    """Vectorizes func over a leading dimension, by the vmap that torch uses for batched gradients."""
    return _vmap(func)


def make_dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """`torch.autograd.forward_ad.make_dual`, which has no types."""
    return cast(Tensor, forward_ad.make_dual(primal, tangent))  # type: ignore[no-untyped-call]


def tangent_of(dual: Tensor) -> Tensor | None:
    """The tangent of a dual tensor, None where there is none."""
    return cast("Tensor | None", forward_ad.unpack_dual(dual).tangent)  # type: ignore[no-untyped-call]
