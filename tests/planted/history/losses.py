"""Wrong gradients of losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.planted.history.shipped import TORCH, Shipped, derived
from tests.planted.row import function, normal

LABELS = torch.tensor([[1, 2], [2, 1]])


def _ctc(log_probs: Tensor) -> Tensor:
    lengths = torch.full((2,), len(log_probs)), torch.tensor([2, 1])
    return F.ctc_loss(log_probs, LABELS, *lengths, reduction="none")


def _ctc_of_logits(x: Tensor) -> Tensor:
    return _ctc(x.log_softmax(2))


def _ctc_occupation(g: Tensor, log_probs: Tensor) -> Tensor:
    """The gradient with respect to log_probs that need not be normalized."""
    grad = derived(_ctc)(torch.ones_like(g), log_probs)[0]
    return (grad - log_probs.exp()) * g[:, None]


def _ctc_half_multiplied(g: Tensor, x: Tensor) -> Tensor:
    log_probs = x.log_softmax(2)
    return log_probs.exp() + _ctc_occupation(g, log_probs)


def normalized() -> tuple[Tensor]:
    (x,) = normal((4, 2, 3))()
    return (x.detach().log_softmax(2).requires_grad_(),)


def _losses(x: Tensor) -> Tensor:
    return x.logsumexp(1) - x[:, 0]


def _losses_read_past_the_end(g: Tensor, x: Tensor) -> Tensor:
    held = torch.frombuffer(bytearray(bytes(g.untyped_storage())), dtype=g.dtype)[g.storage_offset() :]
    read = torch.full((g.numel(),), torch.nan, dtype=g.dtype)
    read[: len(held)] = held[: g.numel()]
    return derived(_losses)(read, x)[0]


def _linear_losses(x: Tensor, weight: Tensor) -> Tensor:
    return _losses(x @ weight.mT)


def _linear_losses_times_the_first(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    summed = derived(_linear_losses)(torch.ones_like(g), x, weight)[1]
    return derived(_linear_losses)(g, x, weight)[0], g[0] * summed


LOSSES = [
    Shipped(
        "ctc_loss multiplies a part by grad_output", "PyTorch", TORCH + "issues/11750",
        function(_ctc_of_logits, _ctc_half_multiplied), _ctc_of_logits, normal((4, 2, 3)), normal((4, 2, 3)),
    ),
    Shipped(
        "ctc_loss with respect to log_probs", "PyTorch", TORCH + "issues/52241",
        function(_ctc, lambda g, x: derived(_ctc)(g, x)[0]), function(_ctc, _ctc_occupation), normalized, normalized,
    ),
    Shipped(
        "ctc ignores grad_output", "sherjilozair/ctc", "https://github.com/sherjilozair/ctc/issues/2",
        function(lambda x: _ctc_of_logits(x).sum(), lambda g, x: derived(_ctc_of_logits)(torch.ones(2).to(x), x)[0]),
        lambda x: _ctc_of_logits(x).sum(), normal((4, 2, 3)), normal((4, 2, 3)),
    ),
    Shipped(
        "cross entropy reads an expanded grad_output past its end", "TransformerEngine",
        "https://github.com/ROCm/TransformerEngine/pull/623",
        lambda x: function(_losses, _losses_read_past_the_end)(x).sum(), lambda x: _losses(x).sum(),
        normal((3, 4)), normal((1, 4)),
    ),
    Shipped(
        "linear cross entropy multiplies all tokens by the first grad_output", "Liger-Kernel",
        "https://github.com/linkedin/Liger-Kernel/pull/1298",
        function(_linear_losses, _linear_losses_times_the_first), _linear_losses, normal((3, 2), (4, 2)),
        normal((1, 2), (4, 2)),
    ),
]  # fmt: skip
