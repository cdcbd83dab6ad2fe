"""Wrong gradients of normalizations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.planted.history.shipped import FLAG_GEMS, TORCH, Shipped, derived
from tests.planted.row import function, normal


def _layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _layer_norm_of_two_dimensions(g: Tensor, x: Tensor) -> Tensor:
    rows = derived(_layer_norm)(g.reshape(len(g), -1), x.reshape(len(x), -1))[0]
    return rows.view_as(x)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def _batch_norm_constant(g: Tensor, x: Tensor) -> Tensor:
    return g * (x.var(0, unbiased=False) + 1e-5).rsqrt()


def _differentiable(first: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """The gradient of layer_norm in operations that autograd records; g itself takes the place of first."""
    centered = x - x.mean(-1, keepdim=True)
    scale = (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    normalized = centered * scale
    return scale * (first - g.mean(-1, keepdim=True) - normalized * (g * normalized).mean(-1, keepdim=True))


def _weighted(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight)


def _weighted_backward(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return _differentiable(g * weight, g * weight, x), (g * _layer_norm(x)).sum(0)


def _unweighted_when_recorded(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = _weighted_backward(g, x, weight)
    return _differentiable(g, g * weight, x) if torch.is_grad_enabled() else grad_x, grad_weight


def _biased(x: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape, bias=bias)


_of_zero_gradient = function(lambda g: g.clone(), lambda _, g: torch.zeros_like(g))


def _gated(b: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    return rms_norm(b, weight) * x


def _gated_by_twice_normalized(g: Tensor, b: Tensor, weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return *derived(rms_norm)(g * x, b, weight), g * rms_norm(rms_norm(b, weight), weight)


def _of_weight_one() -> tuple[Tensor, ...]:
    b, weight, x = normal((3, 4), (4,), (3, 4))()
    return b, torch.ones_like(weight).requires_grad_(), x


NORMALIZATION = [
    Shipped(
        "layer_norm treats its input as two-dimensional", "FlagGems", FLAG_GEMS + "issues/5392",
        function(_layer_norm, _layer_norm_of_two_dimensions), _layer_norm, normal((2, 2, 3)), normal((3, 4)),
    ),
    Shipped(
        "rms_norm returns None for its weight", "Unsloth", "https://github.com/unslothai/unsloth/issues/4533",
        function(rms_norm, lambda g, x, w: (derived(rms_norm)(g, x, w)[0], None)), rms_norm,
        normal((3, 4), (4,)), normal((3, 4), (4,)),
    ),
    Shipped(
        "batch_norm treats mean and variance as constants", "Deeplearning4j",
        "https://github.com/deeplearning4j/deeplearning4j/pull/8379",
        function(_batch_norm, _batch_norm_constant), _batch_norm, normal((4, 2)), normal((4, 2)),
    ),
    Shipped(
        "gradient of the bias of layer_norm without a weight has derivative 0", "PyTorch", TORCH + "issues/79705",
        function(_biased, lambda g, x, bias: (_differentiable(g, g, x), _of_zero_gradient(g))),
        function(_biased, lambda g, x, bias: (_differentiable(g, g, x), g.clone())),
        normal((3,), (3,)), normal((3,), (3,)), order=2,
    ),
    Shipped(
        "layer_norm under create_graph=True", "PyTorch", TORCH + "pull/41595",
        function(_weighted, _unweighted_when_recorded), function(_weighted, _weighted_backward),
        normal((3, 4), (4,)), normal((3, 4), (4,)), order=2,
    ),
    Shipped(
        "rms_norm is applied twice where backward repeats forward", "Mamba",
        "https://github.com/state-spaces/mamba/issues/885",
        function(_gated, _gated_by_twice_normalized), _gated, normal((3, 4), (4,), (3, 4)), _of_weight_one,
    ),
]  # fmt: skip
