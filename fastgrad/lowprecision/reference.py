"""A function in double precision at the point of the lower dtype: exact and perturbed outputs and VJPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fastgrad.core import native
from fastgrad.core.errors import raise_if_transient, text_of, unless_rejected
from fastgrad.core.memory import Result
from fastgrad.core.precision import LOWER
from fastgrad.core.random import RandomState
from fastgrad.lowprecision.rounding import Arithmetic, largest_number, smallest_subnormal, unit_roundoff
from fastgrad.problem.arguments import as_tuple
from fastgrad.problem.coordinates import Block, per_coordinate
from fastgrad.problem.problem import Problem

PIECE = 1 << 20
"""Largest number of components in a batch of VJPs or of their cotangents: 8 MiB."""

Perturbed = Literal["nothing", "each", "relative to the largest"]
"""Perturbation of inputs: none, by each element's own unit, or by the unit of the largest element of the tensor."""


@dataclass(frozen=True)
class Reference:
    """The function with which another one is compared.

    Attributes
    ----------
    func
        Takes the arguments, returns what the function returns, in double precision.
    arguments
        The arguments of the function, with floating tensors converted to double precision.
    name
        Its name in messages.
    """

    func: Callable[..., Any]
    arguments: tuple[Any, ...]
    name: str


class IncomparableError(Exception):
    """The reference does not run, or its results do not match those of the function."""


def comparable(name: str, run: Callable[[], Result]) -> Result:
    """Runs a reference; raises IncomparableError if it raises twice."""
    try:
        return run()
    except IncomparableError:
        raise
    except Exception as error:
        raise_if_transient(error, run)
        raise IncomparableError(f"{name} raises {text_of(error)}") from error


@contextmanager
def without_autocast() -> Iterator[None]:
    """A context without autocast, on the CPU and on CUDA devices."""
    with ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class Coordinates:
    """The coordinates of all inputs, or of all outputs, with constants of their dtypes: shape (coordinates,).

    Attributes
    ----------
    units, subnormals, largest
        The unit roundoff, the smallest positive number and the largest finite number.
    """

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        self._blocks = blocks
        self.units = per_coordinate(blocks, lambda block: unit_roundoff(block.tensor.dtype), device)
        self.subnormals = per_coordinate(blocks, lambda block: smallest_subnormal(block.tensor.dtype), device)
        self.largest = per_coordinate(blocks, lambda block: largest_number(block.tensor.dtype), device)

    def rounding(self, sizes: Tensor) -> Tensor:
        """The largest rounding error of numbers of these sizes, shape (..., coordinates)."""
        return self.units * sizes + self.subnormals

    def moduli(self, coordinates: Tensor) -> Tensor:
        """The modulus of the element to which each coordinate belongs: shape (..., coordinates), as the argument."""
        moduli = coordinates.abs()
        for block in self._blocks:
            if block.is_complex:
                within = moduli[..., block.slice]
                pairs = within.reshape(*within.shape[:-1], -1, 2)
                sizes = torch.linalg.vector_norm(pairs, dim=-1, keepdim=True)
                within.copy_(sizes.expand_as(pairs).reshape(within.shape))
        return moduli


class Products:
    """Outputs and VJPs of a reference, in the coordinates of the problem that is compared with it.

    Attributes
    ----------
    values
        The outputs of the reference: float64, shape (m,).
    inputs, outputs
        The coordinates of the problem.
    vectorizes
        Whether many VJPs run at once.
    failures
        Operators that could not be perturbed.
    """

    def __init__(self, reference: Reference, problem: Problem, states: RandomState) -> None:
        """Runs the reference once; raises IncomparableError if its results cannot be compared."""
        self._reference = reference
        self._states = states
        self._problem = problem
        self._leaves = [reference.arguments[block.position] for block in problem.inputs]
        self.device = self._leaves[0].device
        self.inputs, self.outputs = (Coordinates(blocks, self.device) for blocks in (problem.inputs, problem.outputs))
        self.failures: set[str] = set()
        self._graph = comparable(reference.name, partial(self._run, self._leaves))
        if not any(output.requires_grad for output in self._graph):
            raise IncomparableError(f"no output of {reference.name} requires grad")
        for output, block in zip(self._graph, problem.outputs, strict=True):
            dtype = output.dtype
            if not 2 * unit_roundoff(dtype) < unit_roundoff(block.tensor.dtype) and dtype in LOWER:
                # A lower dtype that is not finer than that of func's output.
                name = str(dtype).removeprefix("torch.")
                raise IncomparableError(f"{reference.name} returns {name} even for inputs in double precision")
        self.values = self._flat(self._graph)
        graph = tuple(output for output in self._graph if output.requires_grad)
        self.vectorizes = native.runs_no_custom_code(graph, self._leaves) and self._tries_batch()

    def _run(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs that correspond to those of the problem, for given values of the inputs."""
        put = {id(old): new for old, new in zip(self._leaves, leaves, strict=True)}
        arguments = [put.get(id(value), value) for value in self._reference.arguments]
        self._states.restore()
        with without_autocast(), torch.enable_grad():
            results = as_tuple(self._reference.func(*arguments))
        outputs = []
        for block in self._problem.outputs:
            found = results[block.position] if block.position < len(results) else None
            if not isinstance(found, Tensor):
                raise IncomparableError(f"{self._reference.name} returns no tensor as result {block.position}")
            if found.shape != block.tensor.shape or found.is_complex() != block.is_complex:
                of_func, of_reference = (_kind(value) for value in (block.tensor, found))
                raise IncomparableError(
                    f"result {block.position} of {self._reference.name} is a {of_reference}, but that of func is a "
                    f"{of_func}"
                )
            if found.layout is not torch.strided:
                raise IncomparableError(f"{self._reference.name} returns a sparse tensor as result {block.position}")
            outputs.append(found)
        return tuple(outputs)

    def _tries_batch(self) -> bool:
        """Whether a batch of two VJPs runs and gives the results of a single VJP."""
        v = torch.ones(2, self._problem.m, dtype=torch.float64, device=self.device)
        batch = unless_rejected(partial(self._gradients, self._graph, self._leaves, v, True))
        if batch is None:
            return False
        single = self._gradients(self._graph, self._leaves, v[:1], False)
        return torch.allclose(batch, single.expand_as(batch), 1e-6, 1e-12, equal_nan=True)

    def exact(self, cotangents: Tensor) -> Tensor:
        """The VJPs of cotangents, shape (count, m): float64, shape (count, n)."""
        return torch.cat([self._products(self._graph, self._leaves, v) for v in self._pieces(cotangents)])

    def draw(self, arithmetic: Arithmetic, cotangents: Tensor, inputs: Perturbed) -> tuple[Tensor, Tensor]:
        """Outputs, shape (m,), and VJPs, shape (count, n), in perturbed arithmetic: float64.

        Unless inputs is "nothing", both the inputs and the cotangents are perturbed, too.
        """
        leaves = [self._perturbed(arithmetic, leaf, inputs) for leaf in self._leaves]
        made = []
        with arithmetic:
            graph = self._run(leaves)
            for v in self._pieces(cotangents):
                noisy = v if inputs == "nothing" else arithmetic.perturbed(v)
                made.append(self._products(graph, leaves, noisy))
        self.failures |= arithmetic.failures
        return self._flat(graph), torch.cat(made)

    @staticmethod
    def _perturbed(arithmetic: Arithmetic, leaf: Tensor, inputs: Perturbed) -> Tensor:
        value = leaf.detach().clone()
        if inputs != "nothing" and value.numel():
            value = arithmetic.perturbed(value, value.abs().amax() if inputs == "relative to the largest" else None)
        return value.requires_grad_()

    def _pieces(self, cotangents: Tensor) -> tuple[Tensor, ...]:
        size = max(1, PIECE // max(self._problem.n, self._problem.m)) if self.vectorizes else cotangents.shape[0]
        return torch.split(cotangents.to(self.device), max(1, size))

    def _products(self, graph: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Tensor) -> Tensor:
        if self.vectorizes and cotangents.shape[0] > 1:
            return self._gradients(graph, leaves, cotangents, True)
        return torch.cat([self._gradients(graph, leaves, v, False) for v in torch.split(cotangents, 1)])

    def _gradients(self, graph: Sequence[Tensor], leaves: Sequence[Tensor], v: Tensor, batched: bool) -> Tensor:
        pairs = [one for one in zip(graph, self._problem.outputs, strict=True) if one[0].requires_grad]
        grads = [self._shaped(v[:, block.slice], block, output) for output, block in pairs]
        outputs, given = [output for output, _ in pairs], grads if batched else [grad[0] for grad in grads]
        found = torch.autograd.grad(
            outputs, list(leaves), given, retain_graph=True, allow_unused=True, is_grads_batched=batched
        )
        products = torch.zeros(v.shape[0], self._problem.n, dtype=torch.float64, device=self.device)
        for block, gradient in zip(self._problem.inputs, found, strict=True):
            if gradient is not None:
                gradient = gradient.detach()
                gradient = gradient if gradient.layout is torch.strided else gradient.to_dense()
                products[:, block.slice] = _coordinates(gradient, block).reshape(v.shape[0], block.size).to(self.device)
        return products

    @staticmethod
    def _shaped(v: Tensor, block: Block, output: Tensor) -> Tensor:
        if block.is_complex:
            v = torch.view_as_complex(v.reshape(v.shape[0], block.size // 2, 2).contiguous())
        return v.reshape(v.shape[0], *block.tensor.shape).to(device=output.device, dtype=output.dtype)

    def _flat(self, outputs: Sequence[Tensor]) -> Tensor:
        pairs = zip(outputs, self._problem.outputs, strict=True)
        parts = [_coordinates(output.detach(), block) for output, block in pairs]
        return torch.cat([part.reshape(-1).to(self.device) for part in parts])


def _kind(tensor: Tensor) -> str:
    """In words: complex or real, and the shape."""
    return f"{'complex' if tensor.is_complex() else 'real'} tensor of shape {tuple(tensor.shape)}"


def _coordinates(tensor: Tensor, block: Block) -> Tensor:
    """The real coordinates of a tensor in float64; for a complex block, the last dimension is (real, imaginary)."""
    if block.is_complex:
        tensor = tensor if tensor.is_complex() else tensor.to(torch.complex128)
        return torch.view_as_real(tensor.resolve_conj().resolve_neg().to(torch.complex128))
    return (tensor.real if tensor.is_complex() else tensor).to(torch.float64)
