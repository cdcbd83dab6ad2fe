"""Random directions and cotangents from a seed; the state of torch's generators."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fastgrad.core.native import ops

# Numbers of streams: each use of random numbers in a check has its own stream, so that no two use the same numbers.
GRAPH_STREAM = 0
COTANGENT_STREAM = 1
GRAD_OUTPUT_STREAM = 2
TANGENT_STREAM = 3
BATCH_STREAM = 4
PROBE_DIRECTION = 7
PROBE_COTANGENT = 8
NEW_GRAD_OUTPUT_STREAM = 13
EPS_DIRECTION = 14
# A check may use any number of streams of the following kinds: multiples of 16 are added.
SKETCH_DIRECTIONS = 5
SKETCH_COTANGENTS = 6
DUALITY_STREAM = 9
EVIDENCE_STREAM = 10
TRIAL_STREAM = 11
PRECISION_STREAM = 12


CPU = torch.device("cpu")


def direction(
    size: int, seed: int, stream: int, first: int = 0, halved: bool = False, device: torch.device = CPU
) -> Tensor:
    """Components first, first + 1, ... of direction (seed, stream): float64, shape (size,), made on the device.

    Magnitudes are uniform in [0.5, 1.5), and signs are random (Philox4x32-10). With halved, a random half is zero, but
    never component 0. The bits are the same on every device.
    """
    out = torch.empty(size, dtype=torch.float64, device=device)
    ops.direction_(out, seed, stream, first, halved)
    return out


def dense_pair(n: int, m: int, seed: int, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A random u in R^n and a random v in R^m, for v^T J u; each number gives other ones."""
    stream = DUALITY_STREAM + 16 * (2 * number)
    return direction(n, seed, stream, device=device), direction(m, seed, stream + 16, device=device)


def uniform(size: int, seed: int, stream: int, first: int = 0, device: torch.device = CPU) -> Tensor:
    """Random numbers, uniform in [-1, 1): float64, shape (size,)."""
    return direction(size, seed, stream, first, device=device).abs_().sub_(1.0).mul_(2.0)


def uniform_like(tensor: Tensor, seed: int, stream: int, first: int = 0) -> Tensor:
    """A contiguous tensor with the shape, dtype and device of `tensor`, and components uniform in [-1, 1).

    first is the number of its first component in the stream; a complex element has two.
    """
    width = 2 if tensor.is_complex() else 1
    real = uniform(tensor.numel() * width, seed, stream, first, tensor.device).to(tensor.dtype.to_real())
    return (torch.view_as_complex(real.view(-1, 2)) if width == 2 else real).reshape(tensor.shape)


def generators_of(model: torch.nn.Module) -> list[torch.Generator]:
    """The generators that are attributes of a model or of its submodules."""
    attributes = (value for module in model.modules() for value in vars(module).values())
    return [value for value in attributes if isinstance(value, torch.Generator)]


class RandomState:
    """The state of torch's generators, to be restored before each run of a function.

    values: objects, any of which may be a further generator.
    """

    def __init__(self, values: Iterable[object] = ()) -> None:
        self._others = [(value, value.get_state()) for value in values if isinstance(value, torch.Generator)]
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        for generator, state in self._others:
            generator.set_state(state)

    def has_changed(self) -> bool:
        """Whether the CPU generator has advanced since this state was saved."""
        return not torch.equal(self._cpu, torch.get_rng_state())
