"""Networks with one planted mistake each: a wrong operation, a corruption between operations, a detached path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.planted.row import function

Slot = Callable[[int], nn.Module]
"""Makes the module that is put into a network, for a number of features: it keeps the shape of its input."""


@dataclass(frozen=True)
class Network:
    """A network, and what a check of it must name first.

    kind, operator and module are those of the first finding; kind is None where the network is right. culprit is the
    parameter that gets no gradient, of a detached path.
    """

    name: str
    make: Callable[[], tuple[nn.Module, Any, Callable[[Any], Tensor]]]
    kind: str | None = None
    operator: str = ""
    module: str = ""


# Families: a network around a slot, its inputs and its loss.


class Perceptron(nn.Module):
    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.norm = nn.BatchNorm1d(24)
        self.slot = slot(24)
        self.last = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.slot(self.norm(self.first(x))).tanh())


class Convolutions(nn.Module):
    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.slot = slot(8)
        self.body = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.stem(x)).relu()
        h = self.slot(h.movedim(1, -1)).movedim(-1, 1)
        return self.head(F.max_pool2d(self.body(h), 2).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.project = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.wide = nn.Linear(16, 32)
        self.slot = slot(32)
        self.narrow = nn.Linear(32, 16)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (4, 4)).transpose(1, 2) for one in self.project(self.norm(x)).chunk(3, -1))
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        x = x + self.narrow(self.slot(F.gelu(self.wide(x))))
        return self.head(x.mean(1))


class Recurrence(nn.Module):
    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 12)
        self.cell = nn.GRU(12, 16, batch_first=True)
        self.slot = slot(16)
        self.step = nn.Linear(32, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        states, last = self.cell(self.table(tokens))
        h = last[0]
        for state in self.slot(states).unbind(1):
            h = torch.tanh(self.step(torch.cat([h, state], -1)))
        return self.head(h)


class Graph(nn.Module):
    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self.message = nn.Linear(8, 16)
        self.slot = slot(16)
        self.update = nn.Linear(24, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        messages = self.slot(F.silu(self.message(nodes[edges[0]])))
        summed = torch.zeros(nodes.shape[0], 16).index_add(0, edges[1], messages)
        return self.head(F.elu(self.update(torch.cat([nodes, summed], -1))))


def _classes(rows: int) -> Callable[[Any], Tensor]:
    target = torch.randint(0, 5, (rows,))
    return lambda output: F.cross_entropy(output, target)


def _inputs(family: type[nn.Module]) -> tuple[Any, int]:
    if family is Perceptron:
        return torch.randn(16, 12), 16
    if family is Convolutions:
        return torch.randn(4, 3, 12, 12), 4
    if family is Attention:
        return torch.randn(4, 6, 16), 4
    if family is Recurrence:
        return torch.randint(0, 20, (4, 5)), 4
    return (torch.randn(10, 8), torch.randint(0, 10, (2, 30))), 10


FAMILIES: tuple[type[nn.Module], ...] = (Perceptron, Convolutions, Attention, Recurrence, Graph)


def made(family: type[nn.Module], slot: Slot) -> tuple[nn.Module, Any, Callable[[Any], Tensor]]:
    """A network of a family, the same in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        inputs, rows = _inputs(family)
        loss = _classes(rows)
        return family(slot), inputs, loss


# Operations: a forward, a wrong backward and a right one.


@dataclass(frozen=True)
class Fault:
    """A custom Function of x and a parameter of shape (features,), with a wrong and a right backward."""

    name: str
    forward: Callable[[Tensor, Tensor], Tensor]
    wrong: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    right: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _rows(tensor: Tensor) -> Tensor:
    """The sum over all dimensions except the last."""
    return tensor.reshape(-1, tensor.shape[-1]).sum(0)


def _zero(w: Tensor) -> Tensor:
    return torch.zeros_like(w)


def elementwise(
    name: str, forward: Callable[[Tensor], Tensor], wrong: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor]
) -> Fault:
    """The product w f(x), in which only the derivative of f is wrong."""

    def backward(slope: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        return lambda g, x, w: (g * w * slope(x), _rows(g * forward(x)))

    return Fault(name, lambda x, w: w * forward(x), backward(wrong), backward(right))


def _tail(x: Tensor) -> Tensor:
    """The derivative of sin, without that of the last elements."""
    slope = x.cos().reshape(-1)
    slope[-(slope.numel() % 64 or 32) :] = 1.0
    return slope.reshape(x.shape)


def _normalized(x: Tensor) -> tuple[Tensor, Tensor]:
    inverse = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
    return (x - x.mean(-1, keepdim=True)) * inverse, inverse


def _norm_backward(mean: bool, product: bool) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    def backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y, inverse = _normalized(x)
        h = g * w
        inner = h - (h.mean(-1, keepdim=True) if mean else 0.0)
        inner = inner - (y * (h * y).mean(-1, keepdim=True) if product else 0.0)
        return inverse * inner, _rows(g * y)

    return backward


def _softmax_backward(right: bool) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    def backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = (w * x).softmax(-1)
        inner = y * (g - (g * y).sum(-1, keepdim=True)) if right else y * g
        return inner * w, _rows(inner * x)

    return backward


def _scale_backward(reduce: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    return lambda g, x, w: (g * w, reduce(g * x))


def _first_row(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])[0]


def _mean_row(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).mean(0)


def _outer_backward(right: bool) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The backward of x + w (w . x), row by row."""

    def backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        of_w = (g * (x @ w).unsqueeze(-1)) + (x * (g @ w).unsqueeze(-1) if right else 0.0)
        return g + (g @ w).unsqueeze(-1) * w, _rows(of_w)

    return backward


def _shift_backward(by: int) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    return lambda g, x, w: ((g * w).roll(by, -1), _rows(g * x.roll(1, -1)))


FAULTS = (
    elementwise("missing factor", lambda x: x * x, lambda x: x, lambda x: 2 * x),
    elementwise(
        "wrong at negative inputs",
        lambda x: torch.where(x > 0, x, 0.1 * x),
        lambda x: torch.ones_like(x),
        lambda x: torch.where(x > 0, 1.0, 0.1).to(x.dtype),
    ),
    elementwise(
        "missing term",
        lambda x: x * x.sigmoid(),
        lambda x: x.sigmoid(),
        lambda x: x.sigmoid() * (1 + x * (1 - x.sigmoid())),
    ),
    elementwise("wrong sign", lambda x: x.cos(), lambda x: x.sin(), lambda x: -x.sin()),
    elementwise("wrong tail tile", lambda x: x.sin(), _tail, lambda x: x.cos()),
    elementwise("one percent off", lambda x: x.tanh(), lambda x: 1.01 / x.cosh() ** 2, lambda x: 1 / x.cosh() ** 2),
    elementwise(
        "gradient of clamped elements",
        lambda x: x.clamp(-0.5, 0.5),
        lambda x: torch.ones_like(x),
        lambda x: (x.abs() < 0.5).to(x.dtype),
    ),
    Fault(
        "norm without mean", lambda x, w: w * _normalized(x)[0], _norm_backward(False, True), _norm_backward(True, True)
    ),
    Fault(
        "norm without product",
        lambda x, w: w * _normalized(x)[0],
        _norm_backward(True, False),
        _norm_backward(True, True),
    ),
    Fault("softmax without sum", lambda x, w: (w * x).softmax(-1), _softmax_backward(False), _softmax_backward(True)),
    Fault("first row in place of a sum", lambda x, w: x * w, _scale_backward(_first_row), _scale_backward(_rows)),
    Fault("mean in place of a sum", lambda x, w: x * w, _scale_backward(_mean_row), _scale_backward(_rows)),
    Fault(
        "product without one term",
        lambda x, w: x + w * (x @ w).unsqueeze(-1),
        _outer_backward(False),
        _outer_backward(True),
    ),
    Fault("rolled the wrong way", lambda x, w: x.roll(1, -1) * w, _shift_backward(1), _shift_backward(-1)),
)


class Custom(nn.Module):
    """A custom Function of x and a weight."""

    def __init__(self, features: int, apply: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 + torch.rand(features))
        self._apply_function = apply

    def forward(self, x: Tensor) -> Tensor:
        return self._apply_function(x, self.weight)


def custom(fault: Fault, right: bool) -> Slot:
    """The slot for a fault, or for its right twin."""
    apply = function(fault.forward, fault.right if right else fault.wrong)
    return lambda features: Custom(features, apply)


# Corruptions: the forward pass is right, but saved tensors or gradients are changed before backward uses them.


class Gate(nn.Module):
    """x sigmoid(w x); afterwards, `corrupt` changes saved tensors."""

    def __init__(self, features: int, corrupt: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 + torch.rand(features))
        self.corrupt = corrupt

    def forward(self, x: Tensor) -> Tensor:
        gate = (self.weight * x).sigmoid()
        y = x * gate
        self.corrupt(gate, y)
        return y


class Overrun(torch.autograd.Function):
    """The identity; its kernel also writes to the memory of another tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        other.detach().numpy()[...] *= 0.5
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def _through_data(gate: Tensor, y: Tensor) -> None:
    gate.data.mul_(0.5)


def _through_a_view(gate: Tensor, y: Tensor) -> None:
    gate.data[..., ::2].zero_()


def _by_a_kernel(gate: Tensor, y: Tensor) -> None:
    Overrun.apply(y, gate.detach())


def _hook(gate: Tensor, y: Tensor) -> None:
    gate.register_hook(lambda grad: 0.5 * grad)


class Hooked(Gate):
    """A gate with a backward hook on the module."""

    def __init__(self, features: int) -> None:
        super().__init__(features, lambda gate, y: None)
        self.register_full_backward_hook(lambda module, grad_input, grad_output: tuple(0.5 * one for one in grad_input))


CORRUPTIONS: dict[str, tuple[str, Slot]] = {
    "in place through data": ("saved tensor", lambda features: Gate(features, _through_data)),
    "in place through a view": ("saved tensor", lambda features: Gate(features, _through_a_view)),
    "a kernel that writes outside": ("saved tensor", lambda features: Gate(features, _by_a_kernel)),
    "a hook on a tensor": ("hook", lambda features: Gate(features, _hook)),
    "a hook on a module": ("hook", Hooked),
}


# Detached paths.


class Detached(nn.Module):
    """x (1 + f(w x)), where f's path is not recorded."""

    def __init__(self, features: int, cut: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 + torch.rand(features))
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.cut(self.weight * x))


def _without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.tanh()


CUTS: dict[str, Callable[[Tensor], Any]] = {
    "detach": lambda x: x.tanh().detach(),
    "item": lambda x: x.square().mean().item(),
    "numpy": lambda x: torch.from_numpy(x.tanh().detach().numpy().copy()),
    "no_grad": _without_grad,
    "data": lambda x: x.data.tanh(),
    "integers": lambda x: (8 * x).long() / 8,
}


def detached(cut: Callable[[Tensor], Any]) -> Slot:
    """The slot for a cut."""
    return lambda features: Detached(features, cut)


def _named(family: type[nn.Module], what: str) -> str:
    return f"{family.__name__.lower()}: {what}"


def wrong_networks() -> Iterator[Network]:
    """100 networks, each with one mistake: 70 wrong operations, 20 corruptions, 10 detached paths."""
    for family in FAMILIES:
        for fault in FAULTS:
            slot = custom(fault, False)
            yield Network(_named(family, fault.name), _maker(family, slot), "operation", "Planted", "slot")
    names = list(CORRUPTIONS)
    for i, family in enumerate(FAMILIES):
        # Hooks on tensors and on modules in turn.
        for name in [*names[:3], names[3 + i % 2]]:
            kind, slot = CORRUPTIONS[name]
            yield Network(_named(family, name), _maker(family, slot), kind, "", "slot")
    cuts = list(CUTS)
    for i, family in enumerate(FAMILIES):
        for name in (cuts[2 * i % len(cuts)], cuts[(2 * i + 1) % len(cuts)]):
            yield Network(_named(family, name), _maker(family, detached(CUTS[name])), "detached", "", "slot")


def right_networks() -> Iterator[Network]:
    """The right twin of each wrong operation, and networks with nothing in the slot."""
    for family in FAMILIES:
        yield Network(_named(family, "untouched"), _maker(family, lambda features: nn.Identity()))
        for fault in FAULTS:
            yield Network(_named(family, f"right twin of {fault.name}"), _maker(family, custom(fault, True)))


def _maker(family: type[nn.Module], slot: Slot) -> Callable[[], tuple[nn.Module, Any, Callable[[Any], Tensor]]]:
    return lambda: made(family, slot)
