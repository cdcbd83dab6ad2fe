"""The private names of torch that fastgrad needs: the only module that touches them."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

MKLDNN: torch.layout = torch._mkldnn  # type: ignore[attr-defined]


def undefined_grad(output: Tensor) -> Tensor:
    """`output` behind a node whose backward hands on an undefined gradient, whatever it is given."""
    # Its annotation says that this is a list; it is a tensor.
    return cast(Tensor, torch._C._functions.UndefinedGrad()(output))


def may_overlap_itself(tensor: Tensor) -> bool:
    """Whether torch sees, or cannot rule out, two elements of a strided tensor at one address."""
    return bool(torch._debug_has_internal_overlap(tensor) != 0)
