"""Derivatives at one point as linear maps between the elements of tensors: products with seeds, by autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastgrad.core import native, torch_private
from fastgrad.core.random import GRAPH_STREAM, direction, uniform_like
from fastgrad.problem.coordinates import Block, blocks_of
from fastgrad.structure.sparsity import Mask

Product = Callable[[list[Tensor]], Sequence[Tensor | None]]


class LinearMap:
    """A matrix with a row per element of some tensors (sources) and a column per element of other tensors (targets).

    The product of a seed (one number per source element) with the matrix has one number per target element. Seeds are
    real: the row of a complex output is its VJP with the cotangent 1, not 1j.

    Attributes
    ----------
    sources, targets
        Blocks that give the first element of each tensor. Their tensors are placeholders: on the meta device, and real,
        so that an element is one coordinate.
    m, n
        Number of elements of the sources, and of the targets.
    dtype, device
        Dtype and device of products: the promoted dtype of all targets.
    spacing
        The ulp of 1 in the coarsest dtype of all sources and targets.
    is_custom
        Whether products run custom code, such as a custom backward or a hook, which need not be linear.
    """

    def __init__(
        self, apply: Product, sources: Sequence[Tensor], targets: Sequence[Tensor], is_custom: bool = False
    ) -> None:
        """apply: maps seeds, shaped like the sources, to products, shaped like the targets; None means zeros."""
        self.sources, self.targets = _elements(sources), _elements(targets)
        self.m, self.n = (sum(block.size for block in blocks) for blocks in (self.sources, self.targets))
        self.dtype = functools.reduce(torch.promote_types, (target.dtype for target in targets))
        self.device = targets[0].device
        self.is_custom = is_custom
        self._apply = apply
        self._source_tensors = sources
        self.spacing = max(torch.finfo(tensor.dtype).eps for tensor in (*sources, *targets))

    def rounded(self, seed: Tensor) -> Tensor:
        """The seed after rounding to the dtypes of the sources: float64, shape (m,)."""
        seed = seed.clone()
        for block, tensor in zip(self.sources, self._source_tensors, strict=True):
            own = block.slice
            seed[own] = seed[own].to(tensor.dtype.to_real()).to(torch.float64)
        return seed

    def product(self, seed: Tensor) -> Tensor:
        """The product of a seed (float64, shape (m,), on the CPU): shape (n,), of `dtype`, on `device`."""
        # The seed of each source has its own memory: backward may write into it or view it as complex numbers.
        seeds = [
            seed[block.slice].to(tensor, copy=True).reshape(tensor.shape)
            for block, tensor in zip(self.sources, self._source_tensors, strict=True)
        ]
        flat = []
        for block, found in zip(self.targets, self._apply(seeds), strict=True):
            if found is None:
                flat.append(torch.zeros(block.size, dtype=self.dtype, device=self.device))
            else:
                flat.append(found.detach().to_dense().reshape(-1).to(self.dtype))
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def reaction(self, chosen: Mask, stream: int) -> Mask:
        """The targets, shape (n,), that react to the chosen sources, shape (m,), with random components."""
        seed = torch.where(torch.from_numpy(chosen), direction(self.m, 0, stream), 0.0)
        reacting: Mask = (self.product(seed) != 0).cpu().numpy()
        return reacting


def _elements(tensors: Sequence[Tensor]) -> tuple[Block, ...]:
    placeholders = [torch.empty(tensor.shape, device="meta") for tensor in tensors]
    return blocks_of(placeholders, range(len(placeholders)), once=False)


def backward_map(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> LinearMap:
    """The map v -> v^T J, one VJP per product; outputs that do not require grad add nothing."""
    tracked = [output for output in outputs if output.requires_grad]

    def apply(seeds: list[Tensor]) -> Sequence[Tensor | None]:
        if not tracked:
            return [None] * len(inputs)
        chosen = [seed for seed, output in zip(seeds, outputs, strict=True) if output.requires_grad]
        return native.vjp(tracked, inputs, chosen, False)

    return LinearMap(apply, outputs, inputs, not native.runs_no_custom_code(tracked, inputs))


def backward_of_backward_map(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> LinearMap | None:
    """The map u -> J u, by differentiating v -> v^T J, one VJP per product; None if that is not possible.

    All tensors are real. This map and `backward_map` use the same graph of func. The caller must test that
    the derivative of the backward is right.
    """
    tracked = [output for output in outputs if output.requires_grad]
    cotangents = [uniform_like(output, 0, GRAPH_STREAM).requires_grad_() for output in tracked]
    try:
        with torch.enable_grad():
            gradients = native.vjp(tracked, inputs, cotangents, True)
    except RuntimeError:
        return None
    heads = {k: gradient for k, gradient in enumerate(gradients) if gradient is not None and gradient.requires_grad}
    if not heads:
        return None

    def apply(seeds: list[Tensor]) -> Sequence[Tensor | None]:
        tangents = iter(native.vjp(list(heads.values()), cotangents, [seeds[k] for k in heads], False))
        return [next(tangents) if output.requires_grad else None for output in outputs]

    return LinearMap(apply, inputs, outputs)


def tangents_along(
    func: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], tangents: Sequence[Tensor]
) -> list[Tensor | None]:
    """The tangents of func's outputs for tangents of its inputs; None for an output without a tangent."""

    def evaluate() -> list[Tensor | None]:
        duals = [torch_private.make_dual(value, tangent) for value, tangent in zip(inputs, tangents, strict=True)]
        return [torch_private.tangent_of(output) for output in func(*duals)]

    return native.at_dual_level(evaluate)
