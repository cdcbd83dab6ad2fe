"""Wrong gradients of reductions, and of reads and writes at indices."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.planted.history.shipped import AUTOGRAD, FLAG_GEMS, JAX, MXNET, TORCH, Shipped, at, beside
from tests.planted.row import function, normal

INDEX = torch.tensor([0, 2, 0, 1])
DISTINCT = torch.tensor([2, 0, 3, 1])


def _overwritten(g: Tensor, x: Tensor, index: Tensor) -> tuple[Tensor, None]:
    grad = torch.zeros_like(x)
    for position, value in zip(index.tolist(), g, strict=True):
        grad[position] = value
    return grad, None


def _gather_nd(x: Tensor, index: Tensor) -> Tensor:
    return x[index[0], index[1]]


def _gather_nd_overwritten(g: Tensor, x: Tensor, index: Tensor) -> tuple[Tensor, None]:
    grad = torch.zeros_like(x)
    for row, column, value in zip(*index.tolist(), g, strict=True):
        grad[row, column] = value
    return grad, None


def _prod_no_graph(g: Tensor, x: Tensor) -> Tensor:
    zeros = x == 0
    if zeros.sum() > 1:
        return torch.zeros_like(x)
    others = [torch.cat((x[:i], x[i + 1 :])).prod() for i in range(len(x))]
    return g * torch.stack(others)


def _scatter_prod(x: Tensor) -> Tensor:
    return x.new_ones(3).scatter_reduce(0, torch.tensor([0, 2, 0, 1, 0]), x, "prod")


def _scatter_prod_masked(g: Tensor, x: Tensor) -> Tensor:
    index = torch.tensor([0, 2, 0, 1, 0])
    return (g * _scatter_prod(x))[index].div(x).masked_fill(x == 0, 0)


def _index_prod(x: Tensor, source: Tensor) -> Tensor:
    return x.index_reduce(0, torch.tensor([0, 1, 0]), source, "prod")


def _index_prod_masked(g: Tensor, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    product = g * _index_prod(x, source)
    grad_source = (product[torch.tensor([0, 1, 0])] / source).masked_fill(source == 0, 0)
    return (product / x).masked_fill(x == 0, 0), grad_source


def _weighted_logsumexp(b: Tensor) -> Tensor:
    return b.sum().log()


def _renorm(x: Tensor) -> Tensor:
    return x.renorm(2, -1, 0)


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y, p=1.0)


def _distances_euclidean(g: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    difference = x[:, None] - y
    grad = g[..., None] * difference / _distances(x, y)[..., None]
    return grad.sum(1), -grad.sum(0)


COMPLEX = normal((3,), dtype=torch.complex128)

REDUCTIONS = [
    Shipped(
        "prod divides by its input", "PyTorch", TORCH + "issues/773",
        function(lambda x: x.prod(), lambda g, x: g * x.prod() / x), torch.prod, at([2.0, 0.0, 3.0]), normal((3,)),
    ),
    Shipped(
        "prod of two zeros has no second derivative", "PyTorch", TORCH + "issues/106789",
        function(lambda x: x.prod(), _prod_no_graph), torch.prod, at([2.0, 3.0, 0.0, 0.0]), normal((4,)), order=2,
    ),
    Shipped(
        "scatter_reduce prod masks zeros", "PyTorch", TORCH + "pull/76523",
        function(_scatter_prod, _scatter_prod_masked), _scatter_prod, at([0.0, 1.5, 2.0, -1.0, 3.0]), normal((5,)),
    ),
    Shipped(
        "index_reduce prod masks zeros", "PyTorch", TORCH + "pull/77382",
        function(_index_prod, _index_prod_masked), _index_prod, at([0.0, 2.0], [1.5, 0.5, 2.0]), normal((2,), (3,)),
    ),
    Shipped(
        "gather with repeated indices", "PyTorch", TORCH + "issues/1631",
        function(lambda x, i: x.gather(0, i), _overwritten), lambda x, i: x.gather(0, i),
        beside(normal((4,)), INDEX), beside(normal((4,)), DISTINCT),
    ),
    Shipped(
        "gather_nd with repeated indices", "MXNet", MXNET + "issues/9172",
        function(_gather_nd, _gather_nd_overwritten), _gather_nd,
        beside(normal((2, 2)), torch.tensor([[1, 1, 0], [1, 1, 0]])),
        beside(normal((2, 2)), torch.tensor([[1, 0], [1, 0]])),
    ),
    Shipped(
        "take of rows with repeated indices", "HIPS autograd", AUTOGRAD + "issues/39",
        function(lambda x, i: x[i], _overwritten), lambda x, i: x[i],
        beside(normal((4, 2)), INDEX), beside(normal((4, 2)), DISTINCT),
    ),
    Shipped(
        "logsumexp with respect to a coefficient of 0", "JAX", JAX + "issues/22398",
        function(_weighted_logsumexp, lambda g, b: torch.where(b == 0, 0, g / b.sum())), _weighted_logsumexp,
        at([1.0, 0.0]), at([1.3, 0.4]),
    ),
    Shipped(
        "max gives each of the largest elements all of grad_output", "Theano",
        "https://github.com/Theano/Theano/issues/4568",
        function(torch.amax, lambda g, x: g * (x == x.amax())), torch.amax, at([1.0, 1.0]), normal((2,)),
    ),
    Shipped(
        "renorm to norm 0", "PyTorch", TORCH + "issues/80804",
        function(_renorm, lambda g, x: g), function(_renorm, lambda g, x: torch.zeros_like(x)),
        at([[0.1, 0.0], [0.0, 0.0]]), normal((2, 2)),
    ),
    Shipped(
        "norm of complex numbers is conjugated", "HIPS autograd", AUTOGRAD + "issues/666",
        function(torch.linalg.vector_norm, lambda g, x: g * x.conj() / x.norm()), torch.linalg.vector_norm,
        COMPLEX, COMPLEX,
    ),
    Shipped(
        "cdist of any p gets the gradient of p = 2", "FlagGems", FLAG_GEMS + "issues/5023",
        function(_distances, _distances_euclidean), _distances, normal((3, 2), (2, 2)), normal((3, 1), (2, 1)),
    ),
]  # fmt: skip
