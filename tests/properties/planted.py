"""Custom Functions of operators whose backward, double backward or jvp has one of many errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

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
    """Applies a function of real numbers to both parts of complex ones."""

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
    """The values that a kernel reads if it assumes that every grad_output is contiguous."""
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


def _dense(x: Tensor) -> Tensor:
    return x if x.layout is torch.strided else x.to_dense()


def _specified(like: Tensor) -> Tensor:
    """1 where a sparse tensor specifies an element, else 0: strided, of its shape."""
    if like.layout is torch.sparse_coo:
        ones: Tensor = torch.sparse_coo_tensor(like._indices(), torch.ones_like(like._values()), like.shape)
    else:
        by_rows = like.layout in (torch.sparse_csr, torch.sparse_bsr)
        outer, inner = (
            (like.crow_indices(), like.col_indices()) if by_rows else (like.ccol_indices(), like.row_indices())
        )
        ones = torch.sparse_compressed_tensor(
            outer, inner, torch.ones_like(like.values()), like.shape, layout=like.layout
        )
    return (ones.to_dense() != 0).to(like.dtype)


def _in_layout(x: Tensor, like: Tensor, specified: Tensor) -> Tensor:
    """A strided tensor in the layout of a sparse one, with the elements that are specified or not zero."""
    if like.layout is torch.sparse_coo:
        pattern = (specified + (x != 0)).to_sparse(like.sparse_dim())
        shape, indices = like.shape[: like.sparse_dim()], pattern.indices()
        flat = torch.zeros(indices.shape[1], dtype=torch.int64)
        for size, index in zip(shape, indices, strict=True):
            flat = flat * size + index
        values = x.reshape(-1, *like.shape[like.sparse_dim() :])[flat]
        return torch.sparse_coo_tensor(indices, values, like.shape, is_coalesced=True)
    blocks = like.values().shape[1:3] if like.layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    # A value cannot be NaN and not zero at once: the pattern comes from a tensor of ones, the values from the other.
    ones = ((specified + (x != 0)) != 0).to(x.dtype)
    pattern = ones.to_sparse(layout=like.layout, blocksize=blocks, dense_dim=like.dense_dim())
    return x.sparse_mask(pattern)


def _of_sparse(change: Callable[[Tensor, Tensor, list[Tensor], int], Tensor]) -> Wrong:
    """The gradient of the first sparse argument changed: change(gradient, argument, grad_outputs, number)."""

    def wrong(right: Any, grads: list[Tensor], number: int, state: dict[str, Any]) -> Gradients:
        gradients: Gradients = list(right(grads))
        for i, like in enumerate(state["wanted"]):
            if like.layout is not torch.strided:
                gradients[i] = change(gradients[i], like, grads, number)  # type: ignore[arg-type]
                break
        return gradients

    return wrong


def _value(x: Tensor, like: Tensor, grads: list[Tensor], number: int) -> Tensor:
    specified, dense = _specified(like), _dense(x).clone()
    places = specified.reshape(-1).nonzero().reshape(-1)
    if len(places):
        dense.view(-1)[places[number % len(places)]] *= 1.1
    return dense if x.layout is torch.strided else _in_layout(dense, like, specified)


def _outside(x: Tensor, like: Tensor, grads: list[Tensor], number: int) -> Tensor:
    specified, dense = _specified(like), _dense(x).clone()
    places = (specified.reshape(-1) == 0).nonzero().reshape(-1)
    if len(places):
        total = grads[0].sum()
        dense.view(-1)[places[number % len(places)]] += 0.5 * (total if dense.is_complex() else total.real)
    return dense if number % 2 else _in_layout(dense, like, specified)


def _shifted(x: Tensor, like: Tensor, grads: list[Tensor], number: int) -> Tensor:
    dim = number % x.ndim
    return _in_layout(_dense(x).roll(1, dim), like, _specified(like).roll(1, dim))


def _twice(x: Tensor, like: Tensor, grads: list[Tensor], number: int) -> Tensor:
    if x.layout is not torch.sparse_coo:
        return x
    indices, values = torch.cat([x._indices()] * 2, 1), torch.cat([x._values() * 0.25, x._values() * 0.75])
    return torch.sparse_coo_tensor(indices, values, x.shape)


def _other_layout(x: Tensor, like: Tensor, grads: list[Tensor], number: int) -> Tensor:
    if like.layout is torch.sparse_coo:
        return _dense(x).to_sparse_csr() if x.ndim == 2 else x
    return _dense(x).to_sparse()


def _other_sparse_dim(x: Tensor, like: Tensor, grads: list[Tensor], number: int) -> Tensor:
    if like.layout is not torch.sparse_coo or x.ndim == 1:
        return x
    return _dense(x).to_sparse(like.sparse_dim() % x.ndim + 1)


def _restricted(x: Tensor, like: Tensor, grads: list[Tensor], number: int) -> Tensor:
    return _dense(x) * _specified(like)


OF_SPARSE: dict[str, Wrong] = {
    "wrong value": _of_sparse(_value),
    "outside the specified": _of_sparse(_outside),
    "shifted pattern": _of_sparse(_shifted),
    "restricted to the specified": _of_sparse(_restricted),
    "strided": _of_sparse(lambda x, like, g, n: _dense(x)),
    "all specified": _of_sparse(lambda x, like, g, n: _in_layout(_dense(x), like, torch.ones(x.shape).to(x.dtype))),
    "each value in two parts": _of_sparse(_twice),
    "other layout": _of_sparse(_other_layout),
    "other sparse_dim": _of_sparse(_other_sparse_dim),
}
SPARSE_ERRORS = (
    *OF_SPARSE,
    *("sign", "zero", "factor", "percent", "below tolerance", "nan", "none", "real part", "ones", "clamp", "power"),
    *("storage order", "contiguous required", "one-hot only", "last", "noise", "third call", "asks"),
    *("undefined raises", "undefined crashes", "undefined as ones"),
)
"""Errors of backwards whose gradients may be sparse: strided, in two parts or with all specified they stay right."""

ERRORS |= OF_SPARSE

LINEAR = {
    *("sign", "zero", "factor", "percent", "element", "rolled", "transposed", "mean"),
    *("wrong value", "outside the specified", "shifted pattern", "restricted to the specified"),
}
"""Errors of backwards that stay linear: if large enough, one-hot grad_outputs show them."""

COMPLEX = {"conjugate", "forgets conj", "real part"}
"""Errors without an effect on real numbers."""

UNDEFINED = {"undefined raises", "undefined crashes", "undefined as ones"}
"""Errors of backwards that are handed undefined grad_outputs as they are."""

BACKWARD_ONLY = UNDEFINED | {"transposed", "mean", "not reduced", "wrong size", "third call", "scales grad_output"}
"""Errors that a jvp cannot have: a tangent has its result's shape, and is not run again to be compared."""


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
            positions = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]

            def right(grads: Sequence[Tensor]) -> list[Tensor]:
                return list(_gradients(op, positions, arguments, grads))

            if level == "double backward" and torch.is_grad_enabled():

                def gradients(*values: Tensor) -> tuple[Tensor, ...]:
                    return _gradients(op, positions, values[len(grads) :], values[: len(grads)])

                found: Any = planted(gradients, "backward", name, number)(*grads, *arguments)
            else:
                state["wanted"] = [arguments[i] for i in positions]
                found = wrong(right, list(grads), number, state) if level == "backward" else right(grads)
            every: list[Any] = [None] * len(arguments)
            for i, gradient in zip(positions, found, strict=False):
                every[i] = gradient
            return tuple(every)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            arguments = ctx.saved_tensors
            positions = differentiable(arguments)

            def right(tangents: Sequence[Tensor]) -> list[Tensor]:
                return list(_tangents(op, positions, arguments, tangents))

            given = [torch.zeros_like(arguments[i]) if tangents[i] is None else tangents[i] for i in positions]
            found = (wrong if level == "jvp" else _right)(right, given, number, state)
            return tuple(found) if isinstance(state["results"], tuple) else found[0]

    return Planted.apply


def differentiable(arguments: Sequence[Tensor]) -> list[int]:
    """Positions of the values that can require grad."""
    return [i for i, x in enumerate(arguments) if x.is_floating_point() or x.is_complex()]
