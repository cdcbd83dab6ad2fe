"""Wrong gradients of activations, embeddings, convolutions, pooling and resizing."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.planted.history.shipped import FLAG_GEMS, TORCH, Shipped, at, derived
from tests.planted.row import function, normal


def _swiglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


def _swiglu_row_zero(g: Tensor, x: Tensor) -> Tensor:
    grad = torch.zeros_like(x)
    grad[0] = derived(_swiglu)(g, x)[0][-1]
    return grad


def _silu_product(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def _silu_product_in_place(g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    grads = derived(_silu_product)(g, a, b)
    for saved, grad in zip((a, b), grads, strict=True):
        saved.data.copy_(grad)  # like a write by a kernel, which autograd does not notice
    return grads


def _bags(weight: Tensor, mode: str) -> Tensor:
    return F.embedding_bag(torch.tensor([0, 1, 2, 3, 4, 0]), weight, torch.tensor([0, 3]), mode=mode)


def _bags_max(weight: Tensor) -> Tensor:
    return _bags(weight, "max")


def _gelu_not_written(g: Tensor, x: Tensor) -> Tensor:
    return derived(F.gelu)(g, x)[0] if g.is_contiguous() else torch.zeros_like(x)


def _transposed_convolution(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv_transpose1d(x, weight, stride=2)


def _transposed_convolution_unstrided(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return g[..., : x.shape[-1]] * weight, derived(_transposed_convolution)(g, x, weight)[1]


def _interpolated(x: Tensor) -> Tensor:
    corners = torch.tensor([[0.3, -1.0], [2.0, 0.7]]).to(x)
    u, v = x.unbind(-1)
    return (torch.stack((1 - u, u), -1) @ corners * torch.stack((1 - v, v), -1)).sum(-1)


def _first_coordinate_only(g: Tensor, x: Tensor) -> Tensor:
    return derived(_interpolated)(g, x)[0] * torch.tensor([1.0, 0.0])


def _average_pool(x: Tensor) -> Tensor:
    return F.avg_pool1d(x, 3, ceil_mode=True)


def _average_pool_of_full_windows(g: Tensor, x: Tensor) -> Tensor:
    return g.repeat_interleave(3, -1)[..., : x.shape[-1]] / 3


FLAT_AT_THE_BORDER = torch.tensor([[[[0.0, 1.0, 2.0, 2.0], [1.0, 3.0, 1.5, 1.5]]]]).double()


def _sampled(grid: Tensor, padding_mode: str = "border") -> Tensor:
    return F.grid_sample(FLAT_AT_THE_BORDER, grid, padding_mode=padding_mode, align_corners=True)


def _enlarged(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear")


def _enlarged_column_by_height(g: Tensor, x: Tensor) -> Tensor:
    height, width = x.shape[-2:]
    return derived(_enlarged)(g.roll(max(0, height - width), -1), x)[0]


def _to_ten(x: Tensor) -> Tensor:
    return F.interpolate(x, 10, mode="linear", align_corners=True)


def _to_ten_within_a_window(g: Tensor, x: Tensor) -> Tensor:
    n = x.shape[-1]
    weights = _to_ten(torch.eye(n).to(x)[None])[0]
    centers = (torch.arange(n)[:, None] * 9 / (n - 1)).ceil()
    return g @ (weights * ((torch.arange(10) - centers).abs() <= math.ceil(10 / n) + 2)).mT


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2)


def _doubled_beside_exp(x: Tensor) -> Tensor:
    return torch.cat((_doubled(x), x.exp()), -1)


LAYERS = [
    Shipped(
        "swiglu writes all rows to row 0", "Triton-distributed",
        "https://github.com/ByteDance-Seed/Triton-distributed/pull/185",
        function(_swiglu, _swiglu_row_zero), _swiglu, normal((3, 4)), normal((1, 4)),
    ),
    Shipped(
        "swiglu writes gradients over its inputs, which others have saved", "Liger-Kernel",
        "https://github.com/linkedin/Liger-Kernel/issues/254",
        lambda x: function(_silu_product, _silu_product_in_place)(*[x.exp()] * 2),
        lambda x: _silu_product(*[x.exp()] * 2), normal((3,)), normal((3,)),
    ),
    Shipped(
        "gelu does not write where grad_output is strided", "PyTorch", TORCH + "issues/112006",
        function(F.gelu, _gelu_not_written), F.gelu, normal((2, 2, 3)), normal((2, 2, 3)),
    ),
    Shipped(
        "embedding_bag max gets the gradient of mean", "FlagGems", FLAG_GEMS + "issues/5220",
        function(_bags_max, lambda g, w: derived(lambda w: _bags(w, "mean"))(g, w)[0]), _bags_max,
        normal((5, 3)), normal((5, 3)),
    ),
    Shipped(
        "transposed convolution of stride 2 and kernel size 1", "PyTorch", TORCH + "issues/63314",
        function(_transposed_convolution, _transposed_convolution_unstrided), _transposed_convolution,
        normal((1, 1, 2), (1, 1, 1)), normal((1, 1, 2), (1, 1, 1)),
    ),
    Shipped(
        "grid encoder has a gradient in the first coordinate only", "torch-ngp",
        "https://github.com/ashawkey/torch-ngp/issues/149",
        function(_interpolated, _first_coordinate_only), _interpolated, normal((3, 2)), normal((3, 2)),
    ),
    Shipped(
        "average pooling divides the last window by its full size", "PyTorch Inductor", TORCH + "issues/198119",
        function(_average_pool, _average_pool_of_full_windows), _average_pool, normal((1, 1, 5)), normal((1, 1, 6)),
    ),
    Shipped(
        "grid_sample at the border of the image", "PyTorch", TORCH + "issues/23925",
        function(_sampled, derived(partial(_sampled, padding_mode="zeros"))), _sampled, at([[[[1.0, -0.2]]]]),
        at([[[[0.2, -0.2], [-0.7, 0.4]]]]),
    ),
    Shipped(
        "bilinear upsampling reads the wrong column where height exceeds width", "torch-xpu-ops",
        "https://github.com/intel/torch-xpu-ops/pull/4380",
        function(_enlarged, _enlarged_column_by_height), _enlarged, normal((1, 1, 3, 2)), normal((1, 1, 2, 3)),
    ),
    Shipped(
        "linear upsampling sums over too narrow a window", "FlagGems", FLAG_GEMS + "issues/5218",
        function(_to_ten, _to_ten_within_a_window), _to_ten, normal((1, 1, 2)), normal((1, 1, 4)),
    ),
    Shipped(
        "upsampling overwrites what another use of its input has accumulated", "Candle",
        "https://github.com/huggingface/candle/pull/3507",
        function(_doubled_beside_exp, lambda g, x: derived(_doubled)(g[..., : 2 * x.shape[-1]], x)[0]),
        _doubled_beside_exp, normal((1, 1, 3)), normal((1, 1, 3)),
    ),
]  # fmt: skip
