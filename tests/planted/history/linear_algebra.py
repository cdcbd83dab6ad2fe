"""Wrong gradients of products, factorizations and solutions."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.planted.history.shipped import FORWARD, JAX, TORCH, Shipped, at, beside, with_jvp
from tests.planted.row import function, normal


def _inverse(factor: Tensor) -> Tensor:
    return torch.linalg.inv(factor.tril() @ factor.tril().mT)


def _inverse_jvp(tangent: Tensor, factor: Tensor) -> Tensor:
    inverse, product = _inverse(factor), tangent.tril() @ factor.tril().mT
    return -inverse @ (product + product.mT) @ inverse


def _inverse_jvp_reordered(tangent: Tensor, factor: Tensor) -> Tensor:
    half = _inverse(factor) @ tangent.tril() @ _inverse(factor) @ factor.tril().mT
    return -half - half.mT


def _upper_cholesky(x: Tensor) -> Tensor:
    return torch.linalg.cholesky(x.triu() + x.triu(1).mT, upper=True)


def _upper_cholesky_of_all_elements(g: Tensor, x: Tensor) -> Tensor:
    factor = _upper_cholesky(x)
    inverse = torch.linalg.inv(factor)
    product = (factor @ g.triu().mT).tril()
    return inverse @ (product - product.diagonal().diag() / 2).mT @ inverse.mT


def _unit_solve(matrix: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(matrix, b, upper=False, unitriangular=True)


def _unit_solve_with_diagonal(g: Tensor, matrix: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    grad_b = torch.linalg.solve_triangular(matrix.mT, g, upper=True, unitriangular=True)
    return -(grad_b @ _unit_solve(matrix, b).mT).tril(), grad_b


def _sparse(values: Tensor, where: Tensor) -> Tensor:
    return values.new_zeros(3, 3).index_put(tuple(where), values)


def _transposed_sparse_matmul(values: Tensor, dense: Tensor, where: Tensor) -> Tensor:
    return _sparse(values, where).mT @ dense


def _not_transposed(g: Tensor, values: Tensor, dense: Tensor, where: Tensor) -> tuple[Tensor, Tensor, None]:
    row, column = where
    return (g[row] * dense[column]).sum(-1), _sparse(values, where) @ g, None


LINEAR_ALGEBRA = [
    Shipped(
        "matmul of complex numbers without conj", "TensorFlow", "https://github.com/tensorflow/tensorflow/issues/4859",
        function(torch.matmul, lambda g, a, b: (g @ b.mT, a.mT @ g)), torch.matmul,
        normal((2, 3), (3, 2), dtype=torch.complex128), normal((2, 3), (3, 2), dtype=torch.complex128),
    ),
    Shipped(
        "cholesky_inverse in forward mode", "PyTorch", TORCH + "issues/196682",
        with_jvp(_inverse, _inverse_jvp_reordered), with_jvp(_inverse, _inverse_jvp), at([[1.7, 0.0], [1.0, 2.0]]),
        at([[1.7, 0.2], [1.0, 2.0]]), keywords=FORWARD,
    ),
    Shipped(
        "cholesky with respect to the triangle that it does not read", "JAX", JAX + "issues/40421",
        function(_upper_cholesky, _upper_cholesky_of_all_elements), _upper_cholesky, at([[4.0, 1.0], [1.0, 3.0]]),
        at([[2.3, 0.4], [0.7, 1.9]]),
    ),
    Shipped(
        "solve_triangular with respect to a diagonal that counts as ones", "PyTensor",
        "https://github.com/pymc-devs/pytensor/issues/1230",
        function(_unit_solve, _unit_solve_with_diagonal), _unit_solve, normal((3, 3), (3, 2)), normal((3, 3), (3, 2)),
    ),
    Shipped(
        "sparse matmul with a transposed matrix", "JAX", JAX + "issues/40625",
        function(_transposed_sparse_matmul, _not_transposed), _transposed_sparse_matmul,
        beside(normal((3,), (3, 2)), torch.tensor([[0, 0, 1], [0, 2, 1]])),
        beside(normal((3,), (3, 2)), torch.tensor([[0, 1, 2], [0, 1, 2]])),
    ),
]  # fmt: skip
