"""Backwards that assume a contiguous grad_output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.planted.history.normalization import rms_norm
from tests.planted.history.shipped import FLAG_GEMS, Shipped, derived
from tests.planted.row import function, normal


def _as_contiguous(g: Tensor) -> Tensor:
    """The values that a kernel reads if it assumes that g is contiguous; it never reads outside of the storage."""
    flat = g.as_strided((g.untyped_storage().nbytes() // g.element_size(),), (1,), 0)
    first = g.storage_offset()
    return flat[(torch.arange(g.numel()) + first) % flat.numel()].view(g.shape)


def _strided(forward: Callable[..., Tensor]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Makes forward with a backward that assumes a contiguous grad_output, and forward itself."""
    backward = derived(forward)
    return function(forward, lambda g, *inputs: backward(_as_contiguous(g), *inputs)), forward


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(0, 1)).softmax(-1) @ v


def _causal_convolution(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(F.pad(x, (2, 0)), weight[:, None], groups=len(weight))


def _pack(x: Tensor) -> Tensor:
    return torch.stack((x[:3], F.pad(x[3:], (0, 0, 0, 1))))


_MADE = [
    ("attention", "flash-attention", "https://github.com/Dao-AILab/flash-attention/issues/355", _attention,
     normal((3, 2), (4, 2), (4, 3))),
    ("mean over a dimension", "torch7 nn", "https://github.com/torch/nn/pull/345", lambda x: x.mean(2),
     normal((2, 3, 2))),
    ("region pooling", "mmcv", "https://github.com/open-mmlab/mmcv/pull/737",
     lambda x: F.max_pool2d(x, 2), normal((1, 4, 6))),
    ("causal convolution", "flash-linear-attention",
     "https://github.com/fla-org/flash-linear-attention/pull/871", _causal_convolution, normal((2, 5), (2, 3))),
    ("pack_segments", "FBGEMM", "https://github.com/pytorch/FBGEMM/pull/3006", _pack, normal((5, 2))),
    ("rms_norm", "FlagGems", FLAG_GEMS + "pull/1084", rms_norm, normal((3, 4), (4,))),
]  # fmt: skip

STRIDES = [
    Shipped(f"{title}: grad_output not contiguous", library, issue, *_strided(forward), inputs, inputs)
    for title, library, issue, forward, inputs in _MADE
]
