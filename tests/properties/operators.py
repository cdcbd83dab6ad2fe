"""Inputs and operators that generated programs are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 5.0
"""Largest modulus of a value; steps with larger results are left out, so that differences stay exact enough."""

MAX_ELEMENTS = 24
"""Largest number of elements of one value, because torch's slow mode takes long."""

UNFIT = (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError)
"""What an operator raises for values that it does not take."""


class Short:
    """A dataclass whose repr is the expression that makes it, without default values."""

    def __repr__(self) -> str:
        given = ((each.name, getattr(self, each.name), each.default) for each in fields(self))  # type: ignore[arg-type]
        arguments = ", ".join(f"{name}={value!r}" for name, value, usual in given if value != usual)
        return f"{type(self).__name__}({arguments})"


def _gaps(x: Tensor) -> Tensor:
    return torch.stack([x, x + 9], -1)[..., 0]


def _within(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(3), x.reshape(-1), x.new_zeros(2)])[3 : 3 + x.numel()].view(x.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "gaps": _gaps,
    "transposed with gaps": lambda x: _gaps(x.transpose(0, -1).contiguous()).transpose(0, -1),
    "within a buffer": _within,
    "not a leaf": lambda x: x.clone().requires_grad_() * 1,
    "lazily conjugate": lambda x: torch.conj_physical(x).conj(),
    "lazily negative": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "expanded": lambda x: x[..., :1].expand(x.shape),
}
LAZY = {"float64": "lazily negative", "complex128": "lazily conjugate"}
"""Layouts whose storage holds other values than the tensor, and a bit that says so."""


def _uncoalesced(x: Tensor) -> Tensor:
    once = x.to_sparse()
    values = torch.cat([once.values() * 0.25, once.values() * 0.75])
    return torch.sparse_coo_tensor(torch.cat([once.indices()] * 2, 1), values, x.shape)


def _blocks(x: Tensor) -> tuple[int, int]:
    """Block sizes: 2 if it divides the rows or columns, otherwise 1. Half-filled blocks specify zeros."""
    return 2 - x.shape[0] % 2, 2 - x.shape[1] % 2


SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda x: x.to_sparse(),
    "uncoalesced": _uncoalesced,
    "hybrid": lambda x: x.to_sparse(1),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr(_blocks(x)),
    "bsc": lambda x: x.to_sparse_bsc(_blocks(x)),
    "hybrid, two sparse dimensions": lambda x: x.to_sparse(2),
    "csr with a dense dimension": lambda x: x.to_sparse_csr(dense_dim=1),
    "csc with a dense dimension": lambda x: x.to_sparse_csc(dense_dim=1),
    "bsr with a dense dimension": lambda x: x.to_sparse_bsr(_blocks(x), dense_dim=1),
    "bsc with a dense dimension": lambda x: x.to_sparse_bsc(_blocks(x), dense_dim=1),
}
SPARSE_DIMS = {name: 1 if name == "hybrid" else 2 for name in SPARSE}
DENSE_DIMS = {name: int(name == "hybrid" or "two" in name or "dense" in name) for name in SPARSE}


@dataclass(frozen=True, repr=False)
class Input(Short):
    """An argument of a program; same_as: the earlier input that is the same tensor."""

    shape: tuple[int, ...] = ()
    dtype: str = "float64"
    layout: str = "contiguous"
    fill: str = "normal"
    seed: int = 0
    requires_grad: bool = True
    same_as: int | None = None

    def make(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)
        if dtype is torch.int64:
            return torch.randint(0, 6, self.shape, generator=generator)
        if self.fill == "zeros":
            values = torch.zeros(self.shape, dtype=dtype)
        elif self.fill == "integers":
            values = torch.randint(-2, 3, self.shape, generator=generator).to(dtype)
        else:
            values = torch.randn(self.shape, dtype=dtype, generator=generator).mul_(0.7)
        if self.layout in SPARSE:
            kept = self.shape[: SPARSE_DIMS[self.layout]]
            if self.fill != "full":
                some = torch.rand(kept, generator=generator) < 0.6
                values = values * some.reshape(*kept, *[1] * (values.ndim - len(kept)))
            values = SPARSE[self.layout](values)
        else:
            values = LAYOUTS[self.layout](values)
        if self.layout == "not a leaf":
            return values if self.requires_grad else values.detach()
        return values.detach().requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Op:
    """apply(*values, *numbers); takes: one letter a value: a any, r real, c complex, s sparse, i integer.

    Numbers are small natural numbers; their meaning depends on the values (for example a dimension, modulo ndim).
    """

    apply: Callable[..., Any]
    takes: str = "a"
    numbers: int = 0


def _dim(x: Tensor, number: int) -> int:
    return number % x.ndim


def _dims(x: Tensor, number: int) -> list[int]:
    """The dimensions that the bits of a number select; all of them if none is selected."""
    return [d for d in range(x.ndim) if number >> d & 1] or list(range(x.ndim))


def _square(x: Tensor) -> Tensor:
    return (x * x.conj()).real


def _reshape(x: Tensor, number: int) -> Tensor:
    divisors = [d for d in range(1, x.numel() + 1) if x.numel() % d == 0] or [1]
    return x.reshape(-1) if number == 0 else x.reshape(divisors[number % len(divisors)], -1)


def _permute(x: Tensor, number: int) -> Tensor:
    return x.transpose(number % x.ndim, -1) if number < 3 else x.permute(*range(1, x.ndim), 0)


def _narrow(x: Tensor, dim: int, start: int) -> Tensor:
    dim = _dim(x, dim)
    start %= x.shape[dim]
    return x.narrow(dim, start, (x.shape[dim] - start + 1) // 2)


def _pad(x: Tensor, before: int, after: int) -> Tensor:
    return F.pad(x, (before % 3, after % 2), value=0.5)


def _gather(x: Tensor, index: Tensor, dim: int) -> Tensor:
    dim = _dim(x, dim)
    shape = [index.numel() if d == dim else 1 for d in range(x.ndim)]
    return x.gather(
        dim, (index % x.shape[dim]).view(shape).expand([-1 if d == dim else s for d, s in enumerate(x.shape)])
    )


def _index_select(x: Tensor, index: Tensor, dim: int) -> Tensor:
    return x.index_select(_dim(x, dim), index.reshape(-1) % x.shape[_dim(x, dim)])


def _index_add(x: Tensor, index: Tensor, dim: int) -> Tensor:
    picked = _index_select(x, index, dim)
    return x.index_add(_dim(x, dim), index.reshape(-1) % x.shape[_dim(x, dim)], picked.sin())


def _in_place(x: Tensor, number: int) -> Tensor:
    y = x.clone()
    y[..., :1] *= 1 + number / 4
    return y.mul_(x)


def _dense(x: Tensor) -> Tensor:
    return x if x.layout is torch.strided else x.to_dense()


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("i,j->ij", x.reshape(-1), y.reshape(-1))


OPS: dict[str, Op] = {
    "sin": Op(torch.sin),
    "tanh": Op(torch.tanh, "r"),
    "exp": Op(lambda x: (x / 4).exp()),
    "square": Op(lambda x: x**2),
    "cube": Op(lambda x: x**3 / 4),
    "sigmoid": Op(torch.sigmoid, "r"),
    "log1p": Op(lambda x: (x**2).log1p(), "r"),
    "softplus": Op(F.softplus, "r"),
    "neg": Op(torch.neg),
    "scale": Op(lambda x, n: x * (n / 2 - 1), numbers=1),
    "add": Op(torch.add, "aa"),
    "mul": Op(torch.mul, "aa"),
    "sub": Op(torch.sub, "aa"),
    "div": Op(lambda x, y: x / (2 + _square(y)), "aa"),
    "atan2": Op(lambda x, y: torch.atan2(x, 2 + y * y), "rr"),
    "where": Op(lambda x, y: torch.where(torch.ones_like(x.real).cumsum(-1) % 2 == 1, x, y), "aa"),
    "lerp": Op(lambda x, y: x.lerp(y, 0.3), "aa"),
    "sum": Op(lambda x, n, keep: x.sum(_dims(x, n), keepdim=keep % 2 == 1), numbers=2),
    "mean": Op(lambda x, n, keep: x.mean(_dims(x, n), keepdim=keep % 2 == 1), numbers=2),
    "logsumexp": Op(lambda x, n, keep: x.logsumexp(_dims(x, n), keepdim=keep % 2 == 1), "r", 2),
    "prod": Op(lambda x, d: x.prod(_dim(x, d)), numbers=1),
    "matmul": Op(torch.matmul, "aa"),
    "matmul of transposes": Op(lambda x, y: x.transpose(-1, -2) @ y, "aa"),
    "outer": Op(_outer, "aa"),
    "gram": Op(lambda x: x.transpose(-1, -2) @ x / 2),
    "inner": Op(lambda x, y: torch.einsum("...i,...i->...", x, y), "aa"),
    "reshape": Op(_reshape, numbers=1),
    "permute": Op(_permute, numbers=1),
    "unsqueeze": Op(lambda x, n: x.unsqueeze(n % (x.ndim + 1)), numbers=1),
    "expand": Op(lambda x, n: x.expand(n % 3 + 1, *x.shape), numbers=1),
    "flip": Op(lambda x, n: x.flip(_dims(x, n)), numbers=1),
    "roll": Op(lambda x, n, d: x.roll(n, _dim(x, d)), numbers=2),
    "cat": Op(lambda x, y, d: torch.cat([x, y], _dim(x, d)), "aa", 1),
    "stack": Op(lambda x, y, d: torch.stack([x, y], d % (x.ndim + 1)), "aa", 1),
    "index_select": Op(_index_select, "ai", 1),
    "gather": Op(_gather, "ai", 1),
    "index_add": Op(_index_add, "ai", 1),
    "narrow": Op(_narrow, numbers=2),
    "select": Op(lambda x, d, n: x.select(_dim(x, d), n % x.shape[_dim(x, d)]), numbers=2),
    "step": Op(lambda x: x[..., ::2]),
    "pad": Op(_pad, numbers=2),
    "tril": Op(torch.tril),
    "diagonal": Op(torch.diagonal),
    "clone": Op(torch.clone),
    "in place": Op(_in_place, numbers=1),
    "softmax": Op(lambda x, d: x.softmax(_dim(x, d)), "r", 1),
    "log_softmax": Op(lambda x, d: x.log_softmax(_dim(x, d)), "r", 1),
    "layer_norm": Op(lambda x: F.layer_norm(x, x.shape[-1:], eps=0.1), "r"),
    "cumsum": Op(lambda x, d: x.cumsum(_dim(x, d)), numbers=1),
    "conj": Op(torch.conj, "c"),
    "real": Op(torch.real, "c"),
    "imag": Op(torch.imag, "c"),
    "squared modulus": Op(_square, "c"),
    "view_as_real": Op(lambda x: torch.view_as_real(x.resolve_conj()), "c"),
    "view_as_complex": Op(lambda x: torch.view_as_complex(torch.stack([x, x.sin()], -1)), "r"),
    "complex": Op(torch.complex, "rr"),
    "turn": Op(lambda x: x * (0.6 + 0.8j)),
    "fft": Op(lambda x, d: torch.fft.fft(x, dim=_dim(x, d), norm="ortho"), numbers=1),
    "ifft": Op(lambda x, d: torch.fft.ifft(x, dim=_dim(x, d), norm="ortho"), "c", 1),
    "rfft": Op(lambda x: torch.fft.rfft(x, norm="ortho"), "r"),
    "irfft": Op(lambda x: torch.fft.irfft(x, norm="ortho"), "c"),
}
SPARSE_OPS: dict[str, Op] = {
    "to_dense": Op(lambda x: x.to_dense(), "s"),
    "to_dense, masked": Op(lambda x: x.to_dense(masked_grad=True), "s"),
    "to_dense, not masked": Op(lambda x: x.to_dense(masked_grad=False), "s"),
    "sparse.mm": Op(torch.sparse.mm, "sa"),
    "sparse matmul": Op(torch.matmul, "sa"),
    "sparse.addmm": Op(lambda x, s, y: torch.sparse.addmm(x, s, y), "asa"),
    "sparse.sampled_addmm": Op(lambda s, x, y: torch.sparse.sampled_addmm(s, x, y).to_dense(), "saa"),
    "sparse.mm of sparse": Op(lambda s, t: _dense(torch.sparse.mm(s, t.transpose(0, 1))), "ss"),
    "sparse.sum": Op(lambda x: torch.sparse.sum(x), "s"),
    "sparse.sum of a dimension": Op(lambda x, d: _dense(torch.sparse.sum(x, _dim(x, d))), "s", 1),
    "sparse.softmax": Op(lambda x, d: torch.sparse.softmax(x, _dim(x, d)).to_dense(), "s", 1),
    "sparse mul": Op(lambda x: (x * 1.5).to_dense(), "s"),
    "sparse add": Op(lambda x, y: (x + y).to_dense(), "ss"),
    "sparse cat": Op(lambda x, y: torch.cat([x, y]).to_dense(), "ss"),
    "sparse times sparse": Op(lambda x, y: (x * y).to_dense(), "ss"),
    "sparse times dense": Op(lambda x, y: _dense(x * y), "sa"),
    "sparse sin": Op(lambda x: x.sin().to_dense(), "s"),
    "sparse tanh": Op(lambda x: x.tanh().to_dense(), "s"),
    "sparse square": Op(lambda x: (x**2).to_dense(), "s"),
    "sparse transpose": Op(lambda x: x.transpose(0, 1).to_dense(), "s"),
    "sparse_mask": Op(lambda x, s: x.sparse_mask(s).to_dense(), "as"),
    "index_select of sparse": Op(lambda x, i: x.index_select(0, i % x.shape[0]).to_dense(), "si"),
    "to_sparse_coo": Op(lambda x: x.to_sparse_coo().to_dense(), "s"),
    "to_sparse_csr": Op(lambda x: x.to_sparse_csr().to_dense(), "s"),
    "square of values": Op(lambda x: (x.coalesce() if x.is_sparse else x).values().square().sum(), "s"),
}


def _fits(value: Any, letter: str) -> bool:
    if not isinstance(value, Tensor) or (value.layout is not torch.strided) != (letter == "s"):
        return False
    if letter == "i":
        return not (value.is_floating_point() or value.is_complex())
    return (value.is_floating_point() and letter in "ars") or (value.is_complex() and letter in "acs")


def _moderate(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.numel() > MAX_ELEMENTS:
        return False
    return value.numel() == 0 or bool(value.detach().abs().max() <= LARGEST)  # false for a NaN


def results(op: Op, values: list[Tensor], numbers: tuple[int, ...], last: bool) -> dict[tuple[int, ...], Tensor]:
    """The results of op for all suitable values, by their positions; last: the last value must be among them."""
    places = [[i for i, value in enumerate(values) if _fits(value, letter)] for letter in op.takes]
    found = {}
    for positions in product(*places):
        if last and len(values) - 1 not in positions:
            continue
        try:
            result = op.apply(*(values[i] for i in positions), *numbers)
        except UNFIT:
            continue
        if _moderate(result):
            found[positions] = result
    return found
