"""Random differentiable programs, right or with a planted error, and both checkers' verdicts on them.

`python -m tests.properties.programs --examples 2000 --seed 0` runs a long sweep by hand: it prints how many programs
ran and how many verdicts differ, kind by kind, and every program with a difference that docs/differences.md does not
list, which fails the run. A program prints as an expression that builds it.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

import fastgrad
from fastgrad.second_order import Backward, random_grad_outputs

LARGEST = 5.0
"""Of all values: steps whose results are larger are left out, so that differences stay exact enough."""

MOST_ELEMENTS = 24
"""Of one value: torch slow mode takes its time."""

UNFIT = (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError)
"""What an operator raises for values that it does not take."""


# Inputs


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

SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda x: x.to_sparse(),
    "uncoalesced": lambda x: torch.sparse_coo_tensor(
        torch.cat([x.to_sparse().indices()] * 2, 1), torch.cat([x.to_sparse().values()] * 2), x.shape
    ),
    "hybrid": lambda x: x.to_sparse(1),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((1, 1)),
    "bsc": lambda x: x.to_sparse_bsc((1, 1)),
}


@dataclass(frozen=True)
class Input:
    """An argument of a program; same_as: the very tensor that an earlier input is."""

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
            values = values * (torch.rand(self.shape, generator=generator) < 0.6)
            values = SPARSE[self.layout](values)
        else:
            values = LAYOUTS[self.layout](values)
        if self.layout == "not a leaf":
            return values if self.requires_grad else values.detach()
        return values.detach().requires_grad_(self.requires_grad)


# Operators


@dataclass(frozen=True)
class Op:
    """apply(*values, *numbers); takes: one letter a value: a any, r real, c complex, s sparse, i integer.

    Numbers are any small naturals: what they mean depends on the values (a dimension, modulo how many there are).
    """

    apply: Callable[..., Any]
    takes: str = "a"
    numbers: int = 0


def _dim(x: Tensor, number: int) -> int:
    return number % x.ndim


def _dims(x: Tensor, number: int) -> list[int]:
    """The dimensions that the bits of a number say, all of them where none is said."""
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
    "sparse.sum": Op(lambda x: torch.sparse.sum(x), "s"),
    "sparse mul": Op(lambda x: (x * 1.5).to_dense(), "s"),
    "sparse sin": Op(lambda x: x.sin().to_dense(), "s"),
}


def _fits(value: Any, letter: str) -> bool:
    if not isinstance(value, Tensor) or (value.layout is not torch.strided) != (letter == "s"):
        return False
    if letter == "i":
        return not (value.is_floating_point() or value.is_complex())
    return (value.is_floating_point() and letter in "ars") or (value.is_complex() and letter in "acs")


# Planted errors


Gradients = list["Tensor | None"]
Wrong = Callable[[Callable[[list[Tensor]], list[Tensor]], list[Any], int, dict[str, Any]], Gradients]
"""wrong(right, grad_outputs, number, state): right maps grad_outputs to gradients; state lasts as the function does."""


def _changed(change: Callable[[Tensor, list[Tensor], int], Tensor | None]) -> Wrong:
    """One of the gradients changed."""

    def wrong(right: Any, grads: list[Tensor], number: int, state: dict[str, Any]) -> Gradients:
        gradients: Gradients = list(right(grads))
        which = number % len(gradients)
        gradients[which] = change(gradients[which], grads, number)  # type: ignore[arg-type]
        return gradients

    return wrong


def _fed(feed: Callable[[Tensor], Tensor]) -> Wrong:
    """The gradients of changed grad_outputs."""

    def wrong(right: Any, grads: list[Tensor], number: int, state: dict[str, Any]) -> Gradients:
        return list(right([feed(grad) for grad in grads]))

    return wrong


def _parts(feed: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of real numbers on both parts of complex ones."""

    def both(x: Tensor) -> Tensor:
        return torch.complex(feed(x.real), feed(x.imag)) if x.is_complex() else feed(x)

    return both


def _element(x: Tensor, grads: list[Tensor], number: int) -> Tensor:
    scale = torch.ones(x.numel(), dtype=torch.float64)
    scale[number % max(1, x.numel()) :][:1] = 1.1
    return x * scale.view(x.shape)


def _transposed(x: Tensor, grads: list[Tensor], number: int) -> Tensor:
    return x.mT if x.ndim > 1 and x.shape[-1] == x.shape[-2] else x.flip(tuple(range(x.ndim)))


def _low_precision(x: Tensor, grads: list[Tensor], number: int) -> Tensor:
    return x.to(torch.complex64 if x.is_complex() else torch.float32)


def _storage_order(x: Tensor) -> Tensor:
    """What a kernel reads that takes every grad_output for a contiguous one."""
    strides = torch.empty(x.shape, device="meta").stride()
    within = [min(pair) for pair in zip(strides, x.stride(), strict=True)]  # a read beyond the storage would raise
    return x if x.is_conj() or x.is_neg() else x.as_strided(x.shape, within)


def _contiguous_required(x: Tensor) -> Tensor:
    return x.view(-1).view(x.shape)


def _last(right: Any, grads: list[Tensor], number: int, state: dict[str, Any]) -> Gradients:
    now = list(right(grads))
    last = state.get("last", now)
    state["last"] = [gradient.detach().clone() for gradient in now]
    return last


def _noise(right: Any, grads: list[Tensor], number: int, state: dict[str, Any]) -> Gradients:
    return [gradient * (1 + 1e-9 * torch.rand(()).item()) for gradient in right(grads)]


def _third_call(right: Any, grads: list[Tensor], number: int, state: dict[str, Any]) -> Gradients:
    state["calls"] = state.get("calls", 0) + 1
    return [gradient * (1 + 1e-9 * (state["calls"] % 3 == 0)) for gradient in right(grads)]


def _scales_grad_output(right: Any, grads: list[Tensor], number: int, state: dict[str, Any]) -> Gradients:
    gradients = [gradient.clone() for gradient in right(grads)]
    for grad in grads:
        grad.mul_(1.5)
    return list(gradients)


def _asks(right: Any, grads: list[Tensor], number: int, state: dict[str, Any]) -> Gradients:
    return list(right(grads)) if all(bool(grad.isfinite().all()) for grad in grads) else []


def _undefined_raises(right: Any, grads: list[Any], number: int, state: dict[str, Any]) -> Gradients:
    if any(grad is None for grad in grads):
        raise RuntimeError("undefined grad_output")
    return list(right(grads))


def _undefined_crashes(right: Any, grads: list[Any], number: int, state: dict[str, Any]) -> Gradients:
    return list(right([grad * 1 for grad in grads]))


def _undefined_as_ones(right: Any, grads: list[Any], number: int, state: dict[str, Any]) -> Gradients:
    results = state["results"] if isinstance(state["results"], tuple) else (state["results"],)
    return list(right([torch.ones_like(r) if grad is None else grad for grad, r in zip(grads, results, strict=True)]))


def _right(right: Any, grads: list[Tensor], number: int, state: dict[str, Any]) -> Gradients:
    return list(right(grads))


ERRORS: dict[str, Wrong] = {
    "right": _right,
    "sign": _changed(lambda x, g, n: -x),
    "zero": _changed(lambda x, g, n: x * 0),
    "factor": _changed(lambda x, g, n: x * 1.5),
    "percent": _changed(lambda x, g, n: x * 1.01),
    "below tolerance": _changed(lambda x, g, n: x * (1 + 1e-8)),
    "low precision": _changed(_low_precision),
    "element": _changed(_element),
    "rolled": _changed(lambda x, g, n: x.reshape(-1).roll(1).view(x.shape)),
    "transposed": _changed(_transposed),
    "mean": _changed(lambda x, g, n: x * (x.numel() / max(1, g[0].numel()))),
    "conjugate": _changed(lambda x, g, n: x.conj()),
    "constant": _changed(lambda x, g, n: x + 0.1),
    "small constant": _changed(lambda x, g, n: x + 1e-7),
    "nan": _changed(lambda x, g, n: x * float("nan")),
    "none": _changed(lambda x, g, n: None),
    "not reduced": _changed(lambda x, g, n: torch.stack([x, x])),
    "wrong size": _changed(lambda x, g, n: torch.cat([x.reshape(-1)] * 2 + [x.new_zeros(1)])),
    "forgets conj": lambda right, g, n, s: [x.conj() for x in right([y.conj() for y in g])],
    "real part": _fed(lambda g: g.real + 0 * g),
    "ones": _fed(torch.ones_like),
    "clamp": _fed(_parts(lambda g: g.clamp(-1, 1))),
    "modulus": _fed(_parts(torch.abs)),
    "signum": _fed(_parts(torch.sign)),
    "positive part": _fed(_parts(torch.relu)),
    "power": _fed(_parts(lambda g: g * g)),
    "storage order": _fed(_storage_order),
    "contiguous required": _fed(_contiguous_required),
    "one-hot only": _fed(lambda g: g * (1.0 if int((g != 0).sum()) <= 1 else 1.01)),
    "last": _last,
    "noise": _noise,
    "third call": _third_call,
    "scales grad_output": _scales_grad_output,
    "asks": _asks,
    "undefined raises": _undefined_raises,
    "undefined crashes": _undefined_crashes,
    "undefined as ones": _undefined_as_ones,
}
COMPLEX = {"conjugate", "forgets conj", "real part"}
"""Errors without an effect on real numbers."""

NONLINEAR = {
    *("constant", "small constant", "ones", "clamp", "modulus", "signum", "positive part", "power"),
    *("storage order", "contiguous required", "one-hot only", "scales grad_output", "real part"),
}
"""Backwards that are not one linear map of grad_output, whatever its strides and zeros."""

STRIDES = {"storage order", "contiguous required"}
"""Those that are right where strides are those of a contiguous tensor."""

UNREPEATABLE = {"last", "noise", "third call", "scales grad_output"}
"""Backwards that may give another gradient when they run again."""

UNDEFINED = {"undefined raises", "undefined crashes", "undefined as ones"}
JVP_ERRORS = (
    *("sign", "zero", "factor", "percent", "below tolerance", "element", "rolled", "conjugate", "forgets conj", "nan"),
    *(
        "none",
        "constant",
        "small constant",
        "ones",
        "clamp",
        "modulus",
        "signum",
        "positive part",
        "power",
        "real part",
    ),
    *("storage order", "contiguous required", "one-hot only", "last", "noise", "low precision", "asks"),
)


def _gradients(op: Callable[..., Any], positions: Sequence[int], arguments: Sequence[Tensor], grads: Any) -> Any:
    """The gradients of op at some of its arguments, differentiable themselves where gradients are recorded."""
    record = torch.is_grad_enabled()
    arguments = list(arguments)
    with torch.enable_grad():
        for i in positions:
            x = arguments[i]
            arguments[i] = x.view_as(x) if record and x.requires_grad else x.detach().requires_grad_()
        results = op(*arguments)
        results = results if isinstance(results, tuple) else (results,)
        kept = [(result, grad) for result, grad in zip(results, grads, strict=True) if result.requires_grad]
        wanted = [arguments[i] for i in positions]
        if not kept:
            return tuple(torch.zeros_like(x) for x in wanted)
        outputs, kept_grads = zip(*kept, strict=True)
        gradients = torch.autograd.grad(outputs, wanted, kept_grads, create_graph=record, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, gradients, strict=True))


def _tangents(op: Callable[..., Any], positions: Sequence[int], arguments: Sequence[Tensor], tangents: Any) -> Any:
    """The tangents of op's results: forward mode cannot be nested, so the transpose of the transpose."""
    arguments = [forward_ad.unpack_dual(x).primal.detach() for x in arguments]
    with torch.enable_grad():
        for i in positions:
            arguments[i].requires_grad_()
        results = op(*arguments)
        results = results if isinstance(results, tuple) else (results,)
        found = []
        for result in results:
            probe = torch.zeros_like(result).requires_grad_()
            rows: Sequence[Any] = [None] * len(positions)
            if result.requires_grad:
                wanted = [arguments[i] for i in positions]
                rows = torch.autograd.grad(result, wanted, probe, create_graph=True, allow_unused=True)
            kept = [(row, t) for row, t in zip(rows, tangents, strict=True) if row is not None and row.requires_grad]
            tangent = torch.zeros_like(result)
            if kept:
                kept_rows, kept_tangents = zip(*kept, strict=True)
                tangent = torch.autograd.grad(kept_rows, probe, kept_tangents, retain_graph=True)[0]
            found.append(tangent)
    return found


def planted(op: Callable[..., Any], level: str, name: str, number: int) -> Callable[..., Any]:
    """A custom Function of op whose backward, double backward or jvp has an error; for "right", none has."""
    wrong = ERRORS[name]
    state: dict[str, Any] = {}

    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Tensor) -> Any:
            ctx.save_for_backward(*arguments)
            ctx.save_for_forward(*arguments)
            ctx.set_materialize_grads(name not in UNDEFINED)
            results = op(*arguments)
            # A result that is a view of an argument is an alias to autograd, and forward mode then demands one of jvp.
            results = tuple(r.clone() for r in results) if isinstance(results, tuple) else results.clone()
            state["results"] = results
            return results

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            arguments = ctx.saved_tensors
            positions = _differentiable(arguments)

            def right(grads: Sequence[Tensor]) -> list[Tensor]:
                return list(_gradients(op, positions, arguments, grads))

            if level == "double backward" and torch.is_grad_enabled():

                def gradients(*values: Tensor) -> tuple[Tensor, ...]:
                    return _gradients(op, positions, values[len(grads) :], values[: len(grads)])

                found: Any = planted(gradients, "backward", name, number)(*grads, *arguments)
            else:
                found = wrong(right, list(grads), number, state) if level == "backward" else right(grads)
            every: list[Any] = [None] * len(arguments)
            for i, gradient in zip(positions, found, strict=False):
                every[i] = gradient
            return tuple(every)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            arguments = ctx.saved_tensors
            positions = _differentiable(arguments)

            def right(tangents: Sequence[Tensor]) -> list[Tensor]:
                return list(_tangents(op, positions, arguments, tangents))

            given = [torch.zeros_like(arguments[i]) if tangents[i] is None else tangents[i] for i in positions]
            found = (wrong if level == "jvp" else _right)(right, given, number, state)
            return tuple(found) if isinstance(state["results"], tuple) else found[0]

    return Planted.apply


def _differentiable(arguments: Sequence[Tensor]) -> list[int]:
    return [i for i, x in enumerate(arguments) if x.is_floating_point() or x.is_complex()]


# Programs


@dataclass(frozen=True)
class Step:
    """OPS[op] of earlier values; planted: the level, name and number of a planted error."""

    op: str
    values: tuple[int, ...]
    numbers: tuple[int, ...] = ()
    planted: tuple[str, str, int] | None = None

    def function(self) -> Callable[..., Any]:
        apply = (OPS.get(self.op) or SPARSE_OPS[self.op]).apply

        def function(*values: Tensor) -> Any:
            return apply(*values, *self.numbers)

        return function if self.planted is None else planted(function, *self.planted)


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "as it is": lambda x: x,
    "detached": lambda x: x.detach(),
    "integer": lambda x: x.detach().abs().sum().long(),
    "boolean": lambda x: x.detach().abs() > 0.1,
    "none": lambda x: None,
}
IGNORED = {"integer", "boolean", "none"}
"""Outputs that can carry no gradient."""


@dataclass(frozen=True)
class Kind:
    """A way of checking: which checker with which keywords, where errors go, which inputs; enabled: fastgrad has it."""

    check: str = "gradcheck"
    keywords: Mapping[str, bool] = field(default_factory=dict)
    levels: tuple[str, ...] = ("backward",)
    sparse: bool = False
    lazy: bool = False
    weight: int = 1
    enabled: bool = True


KINDS = {
    "reverse": Kind(weight=8),
    "second order": Kind("gradgradcheck", levels=("double backward", "double backward", "backward"), weight=3),
    "lazy": Kind(lazy=True),
    "forward": Kind(keywords={"check_forward_ad": True}, levels=("jvp", "jvp", "backward"), weight=2),
    "forward only": Kind(keywords={"check_forward_ad": True, "check_backward_ad": False}, levels=("jvp",)),
    "forward over reverse": Kind("gradgradcheck", {"check_fwd_over_rev": True}, ("backward", "double backward")),
    "batched": Kind(keywords={"check_batched_grad": True}),
    "batched second order": Kind("gradgradcheck", {"check_batched_grad": True}, ("double backward", "backward")),
    "batched forward": Kind(keywords={"check_forward_ad": True, "check_batched_forward_grad": True}, levels=("jvp",)),
    "sparse": Kind(keywords={"masked": False}, sparse=True, enabled=False),
    "masked": Kind(keywords={"masked": True}, sparse=True, enabled=False),
}


@dataclass(frozen=True)
class Program:
    """func and inputs as data, with how to check them; own: keywords that only fastgrad knows."""

    kind: str
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[tuple[int, str], ...]
    keywords: tuple[tuple[str, Any], ...] = ()
    own: tuple[tuple[str, Any], ...] = ()

    @property
    def error(self) -> str | None:
        """The planted error's name: "right" for a custom Function without one, None without a custom Function."""
        return next((step.planted[1] for step in self.steps if step.planted), None)

    @property
    def level(self) -> str | None:
        """Where the planted error is."""
        return next((step.planted[0] for step in self.steps if step.planted), None)

    @property
    def forward(self) -> bool:
        keywords = KINDS[self.kind].keywords
        return bool(keywords.get("check_forward_ad") or keywords.get("check_fwd_over_rev"))

    def results(self) -> tuple[Any, ...]:
        """What func returns."""
        results = self.make_func()(*self.make_inputs())
        return results if isinstance(results, tuple) else (results,)

    def make_inputs(self) -> tuple[Tensor, ...]:
        made: list[Tensor] = []
        for value in self.inputs:
            made.append(value.make() if value.same_as is None else made[value.same_as])
        return tuple(made)

    def make_func(self) -> Callable[..., Any]:
        """A fresh function: what a planted error remembers does not pass from one check to the next."""
        functions = [step.function() for step in self.steps]

        def func(*inputs: Tensor) -> Any:
            values = list(inputs)
            for step, function in zip(self.steps, functions, strict=True):
                values.append(function(*(values[i] for i in step.values)))
            outputs = tuple(OUTPUTS[how](values[i]) for i, how in self.outputs)
            return outputs if len(outputs) > 1 else outputs[0]

        return func


def _moderate(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.numel() > MOST_ELEMENTS:
        return False
    return value.numel() == 0 or bool(value.detach().abs().max() <= LARGEST)  # false for a NaN


def _results(op: Op, values: list[Tensor], numbers: tuple[int, ...], last: bool) -> dict[tuple[int, ...], Tensor]:
    """The results of op for all values that it takes, by their positions; last: the last value is to be among them."""
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


Pick = Callable[[Sequence[Any]], Any]
"""Chooses one of several; the first is the simplest."""


def _rarely(pick: Pick, of: int) -> bool:
    return pick(range(of)) == of - 1


def _inputs(pick: Pick, sparse: bool, lazy: bool, small: bool) -> tuple[Input, ...]:
    made: list[Input] = []
    if sparse:
        shape: tuple[int, ...] = (pick(range(1, 5)), pick(range(1, 5)))
        layout = pick(list(SPARSE))
        made.append(Input(shape, pick(["float64", "float64", "complex128"]), layout, seed=pick(range(100))))
    for _ in range(pick([1, 2] if small else [0, 1, 2] if sparse else [1, 2, 3])):
        if made and not sparse and _rarely(pick, 10):
            made.append(replace(made[-1], same_as=len(made) - 1 if made[-1].same_as is None else made[-1].same_as))
            continue
        if made and pick([True, False]):  # shapes that are related broadcast, multiply and stack
            shape = pick([made[0].shape, made[0].shape[-1:], made[0].shape[::-1], ()])
        else:
            shape = tuple(pick([2, 3, 1, 2, 3, 0] if small else [3, 2, 4, 1, 5, 6, 0]) for _ in range(pick(range(4))))
        while torch.Size(shape).numel() > (8 if small else MOST_ELEMENTS):
            shape = shape[1:]
        dtype = pick(["float64", "float64", "complex128"])
        layouts = [name for name in LAYOUTS if name not in LAZY.values()]
        if not shape:
            layouts = [name for name in layouts if "transposed" not in name and name != "expanded"]
        elif not _rarely(pick, 20):
            layouts.remove("expanded")
        fill = pick(["normal"] * 6 + ["zeros", "integers"])
        layout = LAZY[dtype] if lazy and pick([True, False]) else pick(layouts)
        made.append(Input(shape, dtype, layout, fill, pick(range(100)), not made or not _rarely(pick, 5)))
    if _rarely(pick, 4):
        made.append(Input((pick(range(5)),), "int64", seed=pick(range(100)), requires_grad=False))
    return tuple(made)


def _steps(pick: Pick, values: list[Tensor], kind: Kind) -> list[Step]:
    """Steps that fit, whose results are appended to values."""
    steps = []
    names = [pick(list(SPARSE_OPS))] if kind.sparse else []
    names += [pick(list(OPS)) for _ in range(pick(range(1, 5 if kind.check == "gradgradcheck" else 9)))]
    for name in names:
        op = OPS.get(name) or SPARSE_OPS[name]
        numbers = tuple(pick(range(8)) for _ in range(op.numbers))
        found = _results(op, values, numbers, pick([True, False]))
        if found:
            positions = pick(list(found))
            steps.append(Step(name, positions, numbers))
            values.append(found[positions])
    return steps


def _outputs(pick: Pick, values: list[Tensor]) -> list[tuple[int, str]]:
    """The last value and up to two others, some of them without gradients."""
    dense = [i for i, value in enumerate(values) if value.layout is torch.strided and _differentiable([value])]
    tracked = [i for i in dense if values[i].requires_grad]
    outputs = [(((tracked if not _rarely(pick, 10) else dense) or [0])[-1], "as it is")]
    for _ in range(pick([0, 0, 1, 2])):
        how = pick(["as it is"] * 20 + ["detached"] * 4 + sorted(IGNORED))
        outputs.insert(pick(range(len(outputs) + 1)), (pick(dense or [0]), how))
    return [(i, "detached") for i, _ in outputs] if _rarely(pick, 40) else outputs


def _plant(pick: Pick, steps: list[Step], values: list[Tensor], outputs: list[tuple[int, str]], kind: Kind) -> None:
    """Makes one of the steps that lead to the outputs a custom Function, wrong in three cases of four."""
    first = len(values) - len(steps)
    needed = {i for i, _ in outputs}
    for number in reversed(range(len(steps))):
        if first + number in needed:
            needed.update(steps[number].values)
    leading = [number for number in range(len(steps)) if first + number in needed]
    if not leading:
        return
    number = pick(leading)
    step = steps[number]
    level = pick(kind.levels)
    names = list(JVP_ERRORS if level == "jvp" else [name for name in ERRORS if name != "right"])
    if not any(value.is_complex() for value in [*(values[i] for i in step.values), values[first + number]]):
        names = [name for name in names if name not in COMPLEX]
    name = "right" if pick(range(4)) == 0 else pick(names)
    steps[number] = replace(step, planted=(level, name, pick(range(8))))


def generate(pick: Pick, kinds: Sequence[str] | None = None) -> Program:
    """A program of one of the kinds named or, by default, of those that fastgrad has."""
    allowed = [name for name, kind in KINDS.items() if kind.enabled] if kinds is None else list(kinds)
    name = pick([name for name in allowed for _ in range(KINDS[name].weight)])
    kind = KINDS[name]
    second = kind.check == "gradgradcheck"
    program = Program(name, _inputs(pick, kind.sparse, kind.lazy, second), (), ())
    values = list(program.make_inputs())
    steps = _steps(pick, values, kind)
    outputs = _outputs(pick, values)
    if pick(range(3)) > 0:
        _plant(pick, steps, values, outputs, kind)
    keywords: dict[str, Any] = {}
    if kind.keywords.get("check_backward_ad", True) and _rarely(pick, 4):
        keywords["check_undefined_grad"] = False
    if _rarely(pick, 4):
        keywords["check_grad_dtypes"] = True
    if _rarely(pick, 10):
        keywords["nondet_tol"] = 1e-6
    if second and _rarely(pick, 4):
        keywords["gen_non_contig_grad_outputs"] = True
    own: dict[str, Any] = {}
    if _rarely(pick, 4):
        own["memory_limit"] = pick([1, 200, 1000])
    if pick([False, True]):
        own["seed"] = pick(range(10))
    return replace(
        program,
        steps=tuple(steps),
        outputs=tuple(outputs),
        keywords=tuple(keywords.items()),
        own=tuple(own.items()),
    )


@st.composite
def programs(draw: st.DrawFn, kinds: Sequence[str] | None = None) -> Program:
    """`generate` as a strategy."""
    return generate(lambda options: draw(st.sampled_from(options)), kinds)


# Verdicts


@dataclass(frozen=True)
class Verdict:
    """What one checker says: "pass", "fail" or the name of an exception; kind is that of fastgrad's failure."""

    word: str
    message: str = ""
    kind: str | None = None


def verdict(program: Program, own: bool) -> Verdict:
    """The verdict of fastgrad, or of torch slow mode."""
    kind = KINDS[program.kind]
    func, inputs = program.make_func(), program.make_inputs()
    keywords = {**kind.keywords, **dict(program.keywords), **(dict(program.own) if own else {})}
    library: Any = fastgrad if own else torch.autograd
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind.check == "gradgradcheck" and not own:
            keywords["grad_outputs"] = _grad_outputs(program)
        torch.manual_seed(0)
        try:
            getattr(library, kind.check)(func, inputs, **keywords)
        except GradcheckError as error:
            report = getattr(error, "report", None)
            return Verdict("fail", str(error).strip(), report and report.failure and report.failure.kind)
        except Exception as error:
            return Verdict(type(error).__name__, str(error).strip())
    return Verdict("pass")


def _grad_outputs(program: Program) -> tuple[Tensor, ...] | None:
    """Those that fastgrad makes: where a backward is not linear, verdicts on it depend on them."""
    keywords = dict(program.keywords + program.own)
    try:
        outputs = tuple(result for result in program.results() if _tracked(result))
    except UNFIT:
        return None
    noncontiguous = keywords.get("gen_non_contig_grad_outputs", False)
    return random_grad_outputs(outputs, keywords.get("seed", 0), noncontiguous) or None


@dataclass(frozen=True)
class Comparison:
    """Both verdicts on a program; row: what in docs/differences.md lists a difference, "" where nothing does."""

    program: Program
    torchs: Verdict
    own: Verdict
    row: str = ""

    @property
    def differ(self) -> bool:
        """Whether the verdicts are not the same."""
        return self.torchs.word != self.own.word

    @property
    def unlisted(self) -> bool:
        return self.differ and not self.row

    def __str__(self) -> str:
        sides = "\n".join(
            f"  {name}: {side.word} {side.kind or ''} {side.message.splitlines()[0][:200] if side.message else ''}"
            for name, side in (("torch", self.torchs), ("fastgrad", self.own))
        )
        return f"{self.program}\n{sides}{f'{chr(10)}  listed: {self.row}' if self.row else ''}"


def compare(program: Program) -> Comparison:
    """Both checkers on a program, and the row of docs/differences.md that explains a difference, where one does."""
    found = Comparison(program, verdict(program, False), verdict(program, True))
    return replace(found, row=_listed(found)) if found.differ else found


def _listed(found: Comparison) -> str:
    """The evidence is torch's verdict on the program without what it is known to mistake."""
    program, own = found.program, found.own
    rows = []
    kept = tuple(output for output in program.outputs if output[1] not in IGNORED)
    if 0 < len(kept) < len(program.outputs):
        rows.append("bool, integer and None results")
        program = replace(program, outputs=kept)
    if program.forward:
        results = program.results()
        kept = tuple(o for o, result in zip(program.outputs, results, strict=True) if _tracked(result))
        if 0 < len(kept) < len(results):
            rows.append("results that do not require grad in forward mode")
            program = replace(program, outputs=kept)
        if any(value.same_as is not None for value in program.inputs):
            rows.append("the same tensor twice in forward mode")
            program = _once(program)
    torchs = verdict(program, False) if rows else found.torchs
    if torchs.word == own.word:
        return " and ".join(rows)
    for row, holds in _ROWS.items():
        if holds(program, torchs, own):
            return " and ".join([*rows, row])
    return ""


def _unequal(program: Program) -> bool:
    """Whether the backward that gradgradcheck takes for func gives other results when it runs again."""
    inputs, grads = program.make_inputs(), _grad_outputs(program)
    if grads is None:
        return False
    backward = Backward(program.make_func(), inputs, grads)
    first, *others = (backward(*inputs, *grads) for _ in range(4))
    return any(
        x.requires_grad != y.requires_grad or not torch.equal(x, y)
        for other in others
        for x, y in zip(first, other, strict=True)
    )


_ROWS: dict[str, Callable[[Program, Verdict, Verdict], bool]] = {
    "backward not linear in grad_output": lambda program, torchs, own: (
        torchs.word == "pass" and own.kind == "nonlinear" and program.error in NONLINEAR
    ),
    "jvp not linear in its tangent": lambda program, torchs, own: (
        torchs.word == "pass"
        and program.level == "jvp"
        and (own.kind == "nonlinear" or program.error in STRIDES)
        and program.error in NONLINEAR | {"last"}
    ),
    "undefined tangents are zero": lambda program, torchs, own: (
        torchs.word == "pass"
        and own.kind == "undefined tangent"
        and program.error in {"constant", "small constant", "ones"}
    ),
    "determinism": lambda program, torchs, own: (
        torchs.word == "pass" and own.kind == "nondeterministic" and program.error in UNREPEATABLE
    ),
    "determinism, cost": lambda program, torchs, own: (
        own.word == "pass" and "not reentrant" in torchs.message and program.error == "third call"
    ),
    "func gives other results when called again": lambda program, torchs, own: (
        KINDS[program.kind].check == "gradgradcheck" and program.error in UNREPEATABLE and _unequal(program)
    ),
    "gradgradcheck of a func without differentiable outputs": lambda program, torchs, own: (
        KINDS[program.kind].check == "gradgradcheck"
        and own.word == "ValueError"
        and not any(map(_tracked, program.results()))
    ),
}
"""Rows of docs/differences.md by what must hold of a program and the two verdicts, torch's first."""


def _tracked(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _once(program: Program) -> Program:
    """The program that gets every tensor once and uses it wherever it used the same one."""
    to = list(range(len(program.inputs) + len(program.steps)))
    for i, value in enumerate(program.inputs):
        to[i] = i if value.same_as is None else value.same_as
    return replace(
        program,
        inputs=tuple(value if value.same_as is None else Input(requires_grad=False) for value in program.inputs),
        steps=tuple(replace(step, values=tuple(to[i] for i in step.values)) for step in program.steps),
        outputs=tuple((to[i], how) for i, how in program.outputs),
    )


SIMPLEST = ("clone", "sin", "square")
"""Operators to put in place of others, the simplest first."""


def _once(program: Program) -> Program:
    """The program that gets every tensor once and uses it wherever it used the same one."""
    while True:
        number = next((i for i, value in enumerate(program.inputs) if value.same_as is not None), None)
        if number is None:
            return program
        same = program.inputs[number].same_as
        to = [same if i == number else i for i in range(len(program.inputs) + len(program.steps))]
        program = replace(
            program,
            inputs=(*program.inputs[:number], Input(requires_grad=False), *program.inputs[number + 1 :]),
            steps=tuple(replace(step, values=tuple(to[i] for i in step.values)) for step in program.steps),
            outputs=tuple((to[i], how) for i, how in program.outputs),
        )


def _simpler(program: Program) -> Iterator[Program]:
    """Programs with one thing less, or plainer."""
    for name in ("keywords", "own"):
        entries = getattr(program, name)
        for i in range(len(entries)):
            yield replace(program, **{name: entries[:i] + entries[i + 1 :]})
    for i in range(len(program.outputs)):
        yield replace(program, outputs=program.outputs[:i] + program.outputs[i + 1 :])
        for j in range(len(program.inputs) + len(program.steps)):
            if j < program.outputs[i][0]:
                how = program.outputs[i][1]
                yield replace(program, outputs=(*program.outputs[:i], (j, how), *program.outputs[i + 1 :]))
    for i in range(len(program.inputs) + len(program.steps)):
        yield from _without(program, i)
    for i, step in enumerate(program.steps):
        plainer = [replace(step, numbers=(0,) * len(step.numbers)), replace(step, planted=None)]
        if len(step.values) == 1:
            simpler = SIMPLEST[: SIMPLEST.index(step.op)] if step.op in SIMPLEST else SIMPLEST
            plainer += [Step(op, step.values, planted=step.planted) for op in simpler]
        for other in plainer:
            if other != step:
                yield replace(program, steps=(*program.steps[:i], other, *program.steps[i + 1 :]))
    for i, value in enumerate(program.inputs):
        shapes = [
            value.shape[1:],
            value.shape[:-1],
            *(tuple(min(size, most) for size in value.shape) for most in (1, 2)),
        ]
        changes: list[dict[str, Any]] = [{"shape": shape} for shape in shapes if value.shape]
        changes += [{"layout": "contiguous"}, {"fill": "normal"}, {"seed": 0}, {"same_as": None}]
        changes += [{"requires_grad": False}] + [{"dtype": "float64"}] * (value.dtype == "complex128")
        for change in changes:
            other_input = replace(value, **change)
            if other_input != value:
                yield replace(program, inputs=(*program.inputs[:i], other_input, *program.inputs[i + 1 :]))


def _without(program: Program, number: int) -> Iterator[Program]:
    """The program without an input or step that nothing uses."""
    first = len(program.inputs)
    used = {i for step in program.steps for i in step.values} | {i for i, _ in program.outputs}
    if number in used or any(value.same_as == number for value in program.inputs):
        return

    def moved(i: int) -> int:
        return i - (i > number)

    yield replace(
        program,
        inputs=tuple(
            value if value.same_as is None else replace(value, same_as=moved(value.same_as))
            for i, value in enumerate(program.inputs)
            if i != number
        ),
        steps=tuple(
            replace(step, values=tuple(moved(i) for i in step.values))
            for i, step in enumerate(program.steps, first)
            if i != number
        ),
        outputs=tuple((moved(i), how) for i, how in program.outputs),
    )


def shrunk(program: Program) -> Comparison:
    """The comparison of a simpler program with an unlisted difference of the same two verdicts."""
    best = compare(program)
    words = (best.torchs.word, best.own.word)
    found = True
    while found:
        found = False
        for candidate in _simpler(best.program):
            try:
                comparison = compare(candidate)
            except UNFIT:
                continue
            if comparison.unlisted and (comparison.torchs.word, comparison.own.word) == words:
                best, found = comparison, True
                break
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help="by default, all that fastgrad has")
    parser.add_argument("--shrink", type=int, default=0, metavar="N", help="print the first N of them smaller, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pick = random.Random(options.seed).choice
    found = []
    for _ in range(options.examples):
        comparison = compare(generate(pick, options.kinds))
        found.append(comparison)
        if comparison.unlisted:
            print(comparison, flush=True)
            if sum(each.unlisted for each in found) <= options.shrink:
                print(f"smaller: {shrunk(comparison.program)}", flush=True)
    for kind in KINDS:
        own = [comparison for comparison in found if comparison.program.kind == kind]
        if own:
            words = Counter(comparison.torchs.word for comparison in own)
            rows = Counter(comparison.row or "unlisted" for comparison in own if comparison.differ)
            print(
                f"{kind}: {len(own)} programs, torch says {dict(words)}; verdicts that differ: {dict(rows) or 'none'}"
            )
    alarms = [each for each in found if each.torchs.word != "pass" and each.program.error in (None, "right")]
    print(f"{len(alarms)} right programs that torch fails")
    unlisted = sum(comparison.unlisted for comparison in found)
    print(f"{len(found)} programs, {unlisted} verdicts differ beyond docs/differences.md")
    return 1 if unlisted else 0


if __name__ == "__main__":
    sys.exit(main())
