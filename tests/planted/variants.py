"""Mistakes that a check at one random point misses, each with the variant that finds it and its right twin."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hidden:
    """func is wrong in the variant, and right as given; twin is right everywhere."""

    name: str
    variant: str
    func: Callable[..., Any]
    twin: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(shape, dtype=dtype, generator=generator)


def matrix() -> tuple[Any, ...]:
    return (numbers(4, 3).requires_grad_(),)


def images() -> tuple[Any, ...]:
    return (numbers(2, 2, 2, 2).requires_grad_(),)


def complex_matrix() -> tuple[Any, ...]:
    return (numbers(3, 2, dtype=torch.complex128).requires_grad_(),)


def with_index() -> tuple[Any, ...]:
    return numbers(4).requires_grad_(), torch.tensor([2, 0, 3])


def with_bias() -> tuple[Any, ...]:
    return numbers(4, 3).requires_grad_(), numbers(3).requires_grad_()


def with_number() -> tuple[Any, ...]:
    return numbers(4, 3).requires_grad_(), numbers().requires_grad_()


def keeping_result(
    forward: Callable[[Tensor], Tensor],
    slope: Callable[[Tensor], Tensor],
    save: Callable[[Any, Tensor], None] = lambda ctx, y: ctx.save_for_backward(y),
    load: Callable[[Any], Tensor] = lambda ctx: ctx.saved_tensors[0],
) -> Callable[..., Any]:
    """A Function whose backward multiplies by slope(y); save and load: how it keeps its result y."""

    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = forward(x)
            save(ctx, y)
            return y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g * slope(load(ctx))

    return Planted.apply  # type: ignore[no-any-return]


def custom(
    forward: Callable[..., Tensor],
    backward: Callable[..., Any],
    save: Callable[[Any, Tensor], None] | None = None,
    load: Callable[[Any], Tensor] | None = None,
) -> Callable[..., Any]:
    """A Function of one input; save and load: how it keeps it."""

    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if save is None:
                ctx.save_for_backward(x)
            else:
                save(ctx, x)
            return forward(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return backward(g, ctx.saved_tensors[0] if load is None else load(ctx))

    return Planted.apply  # type: ignore[no-any-return]


def cosine(g: Tensor, x: Tensor) -> Tensor:
    return g * x.cos().conj()


SINE = custom(torch.sin, cosine)


def flat(x: Tensor) -> Tensor:
    """The values that a kernel reads from the beginning of the storage if it assumes contiguous memory."""
    memory = x.detach().as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return memory[: x.numel()].reshape(x.shape)


def _without_last(right: Tensor) -> Tensor:
    right = right.clone()
    right.reshape(-1)[-1:] = 0
    return right if right.is_contiguous() else torch.zeros_like(right)


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "half too much": lambda right: 1.5 * right,
    "the opposite": torch.neg,
    "nothing": torch.zeros_like,
    "the last entry lost": _without_last,
}
"""What is made of a right gradient."""


OTHER_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "one more": lambda right: right + 1,
    "the last value lost": lambda right: right - (right - _without_last(right)).detach(),
    "the values of other rows": lambda right: right + right.detach().flip(0) - right.detach(),
    "a millionth more": lambda right: right + 1e-6,
}
"""What is made of right values, with a right gradient."""


def exact(right: Callable[..., Tensor], mistake: Callable[[Tensor], Tensor], *inputs: Tensor) -> Tensor:
    """The value of `right`, with a wrong gradient."""
    gradient = mistake(right(*inputs))
    return right(*inputs).detach() + gradient - gradient.detach()


# State ---------------------------------------------------------------------------------------------------------------

_kept: dict[Any, Any] = {}
_workspace = torch.zeros(64, dtype=torch.float64)
_local = threading.local()


def _into_global(ctx: Any, x: Tensor) -> None:
    _kept["x"] = x.detach().clone()


def _into_workspace(ctx: Any, x: Tensor) -> None:
    ctx.shape = x.shape
    _workspace[: x.numel()] = x.detach().reshape(-1)


def _once_into_table(ctx: Any, x: Tensor) -> None:
    ctx.shape = x.shape
    _kept.setdefault(x.shape, x.detach().clone())


def _into_stack(ctx: Any, x: Tensor) -> None:
    _kept["stack"] = [*_kept.get("stack", [])[-3:], x.detach().clone()]


def _into_attribute(ctx: Any, x: Tensor) -> None:
    ctx.x = x.detach()


def _into_list(ctx: Any, x: Tensor) -> None:
    ctx.kept = [x.detach()]


def _into_array(ctx: Any, x: Tensor) -> None:
    ctx.array = x.detach().numpy()


def _into_view(ctx: Any, x: Tensor) -> None:
    ctx.view, ctx.shape = x.detach().view(-1), x.shape


def _with_address(ctx: Any, x: Tensor) -> None:
    ctx.save_for_backward(x)
    ctx.address = x.data_ptr()


def _with_reference(ctx: Any, x: Tensor) -> None:
    kept = x.detach().clone()
    ctx.save_for_backward(kept)
    ctx.reference = weakref.ref(kept.untyped_storage())


def _with_mark(ctx: Any, x: Tensor) -> None:
    x.mark = True  # type: ignore[attr-defined]
    ctx.save_for_backward(x)


def _with_neighbor(ctx: Any, x: Tensor) -> None:
    ctx.save_for_backward(torch.stack([x.detach(), x.detach().exp()])[1])


def _by_neighbor(ctx: Any) -> Tensor:
    return flat(ctx.saved_tensors[0])


def _if_marked(ctx: Any) -> Tensor:
    (x,) = ctx.saved_tensors
    return x if getattr(x, "mark", False) else torch.zeros_like(x)


def _if_same_address(ctx: Any) -> Tensor:
    (x,) = ctx.saved_tensors
    return x if x.data_ptr() == ctx.address else torch.zeros_like(x)


def _if_alive(ctx: Any) -> Tensor:
    (x,) = ctx.saved_tensors
    return x if ctx.reference() is not None else torch.zeros_like(x)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _saved_otherwise_in_backward(mistake: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def save(ctx: Any, x: Tensor) -> None:
        ctx.save_for_backward(mistake(x + 1) if _in_backward() else x + 1)

    return custom(torch.sin, cosine, save, lambda ctx: ctx.saved_tensors[0] - 1)


def _by_flag(mistake: Callable[[Tensor], Tensor], flag: Callable[[], Any], usual: Any) -> Callable[..., Any]:
    """Wrong if a flag is not at its usual value in forward."""

    def save(ctx: Any, x: Tensor) -> None:
        ctx.save_for_backward(x)
        ctx.is_usual = flag() == usual

    def load(ctx: Any) -> Any:
        return ctx.saved_tensors[0], ctx.is_usual

    def backward(g: Tensor, loaded: Any) -> Tensor:
        x, is_usual = loaded
        return cosine(g, x) if is_usual else mistake(cosine(g, x))

    return custom(torch.sin, backward, save, load)


class Gathered(torch.autograd.Function):
    """Rows of x at an index; save and load: how it keeps the index."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, save: Callable[..., None], load: Callable[..., Tensor]) -> Tensor:
        ctx.like, ctx.load = x.shape, load
        save(ctx, index)
        return x[index]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.new_zeros(ctx.like).index_add(0, ctx.load(ctx), g), None, None, None


class Masked(torch.autograd.Function):
    """A product with a mask or factor; save and load: how it keeps this."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, save: Callable[..., None], load: Callable[..., Tensor]) -> Tensor:
        ctx.load = load
        save(ctx, mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.load(ctx), None, None, None


class ByMode(torch.nn.Module):
    """Wrong in one of two modes; without a mistake, right in both."""

    def __init__(self, mistake: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.mistake = mistake

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() if self.training or self.mistake is None else exact(torch.sin, self.mistake, x)


STATE = [
    *(
        Hidden(name, "state: two forwards before backward", custom(torch.sin, cosine, save, load), SINE, matrix)
        for name, save, load in (
            ("kept in a global", _into_global, lambda ctx: _kept["x"]),
            (
                "kept in a workspace",
                _into_workspace,
                lambda ctx: _workspace[: ctx.shape.numel()].view(ctx.shape).clone(),
            ),
            ("kept once for each shape", _once_into_table, lambda ctx: _kept[ctx.shape]),
            ("kept on a stack", _into_stack, lambda ctx: _kept["stack"][-1]),
        )
    ),
    *(
        Hidden(name, "state: inputs changed before backward", custom(torch.sin, cosine, save, load), SINE, matrix)
        for name, save, load in (
            ("kept as an attribute", _into_attribute, lambda ctx: ctx.x),
            ("kept in a list", _into_list, lambda ctx: ctx.kept[0]),
            ("kept as an array", _into_array, lambda ctx: torch.from_numpy(ctx.array)),
            ("kept as a view", _into_view, lambda ctx: ctx.view.view(ctx.shape)),
        )
    ),
    *(
        Hidden(
            f"{name} kept as an attribute",
            "state: inputs changed before backward",
            lambda x, other, function=function: function.apply(x, other, _into_attribute, lambda ctx: ctx.x),
            lambda x, other, function=function: function.apply(
                x, other, lambda ctx, other: ctx.save_for_backward(other), lambda ctx: ctx.saved_tensors[0]
            ),
            inputs,
        )
        for name, function, inputs in (
            ("an index", Gathered, with_index),
            ("a mask", Masked, lambda: (*matrix(), numbers(4, 3).flip(0) > 0)),
            ("a factor that does not require grad", Masked, lambda: (*matrix(), numbers(4, 3).flip(0))),
        )
    ),
    *(
        Hidden(name, "state: results changed before backward", func, twin, matrix)
        for name, func, twin in (
            (
                f"the result of {forward.__name__} {name}",
                keeping_result(forward, slope, save, load),
                keeping_result(forward, slope),
            )
            for forward, slope in (
                (torch.exp, torch.clone),
                (torch.tanh, lambda y: 1 - y * y),
                (torch.relu, lambda y: y > 0),
            )
            for name, save, load in (
                ("kept as an attribute", _into_attribute, lambda ctx: ctx.x),
                ("kept as a view", _into_view, lambda ctx: ctx.view.view(ctx.shape)),
            )
        )
    ),
    *(
        Hidden(name, "state: saved tensors copied", custom(torch.sin, cosine, save, load), SINE, matrix)
        for name, save, load in (
            ("known by its address", _with_address, _if_same_address),
            ("known by its storage", _with_reference, _if_alive),
            ("known by an attribute", _with_mark, _if_marked),
            ("in front of another one", _with_neighbor, _by_neighbor),
        )
    ),
    *(
        Hidden(f"{name} of what is saved in backward", "state: checkpointed", func, SINE, matrix)
        for name, func in ((name, _saved_otherwise_in_backward(mistake)) for name, mistake in MISTAKES.items())
    ),
    *(
        Hidden(f"{name} in another thread", "state: another thread", func, SINE, matrix)
        for name, func in (
            (name, _by_flag(mistake, threading.get_ident, threading.get_ident())) for name, mistake in MISTAKES.items()
        )
    ),
    *(
        Hidden(
            f"{name} without a graph",
            "state: gradients disabled",
            lambda x, other=other: x.sin() if torch.is_grad_enabled() else other(x.sin()),
            torch.sin,
            matrix,
        )
        for name, other in OTHER_VALUES.items()
    ),
    *(
        Hidden(f"{name} under autocast", "state: forward under autocast", func, SINE, matrix)
        for name, func in (
            (name, _by_flag(mistake, partial(torch.is_autocast_enabled, "cpu"), False))
            for name, mistake in MISTAKES.items()
        )
    ),
    *(
        Hidden(f"{name} in eval", "state: train and eval exchanged", ByMode(mistake), ByMode(), matrix)
        for name, mistake in MISTAKES.items()
    ),
]


# Points and layouts --------------------------------------------------------------------------------------------------


def _where(condition: Callable[[Tensor], Any], mistake: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return custom(torch.sin, lambda g, x: mistake(cosine(g, x)) if bool(condition(x)) else cosine(g, x))


CONDITIONS: dict[str, tuple[Callable[[Tensor], Any], Callable[[], tuple[Any, ...]]]] = {
    "points: zeros": (lambda x: (x == 0).all(), matrix),
    "points: some zeros": (lambda x: (x == 0).any() and (x != 0).any(), matrix),
    "points: ones": (lambda x: (x == 1).all(), matrix),
    "points: two equal rows": (lambda x: (x[0] == x[1]).all() and (x[0] != x[2]).any(), matrix),
    "points: negative": (lambda x: (x < 0).all(), matrix),
    "points: ascending": (lambda x: (x.reshape(-1).diff() > 0).all(), matrix),
    "points: large": (lambda x: x.abs().max() > 100, matrix),
    "points: tiny": (lambda x: 0 < x.abs().max() < 1e-2, matrix),
    "points: one row": (lambda x: x.shape[0] == 1, matrix),
    "points: many rows": (lambda x: x.shape[0] > 1024, matrix),
    "points: one column": (lambda x: x.shape[1] == 1, matrix),
    "points: many columns": (lambda x: x.shape[1] > 1024, matrix),
    "layouts: gaps between elements": (lambda x: x.stride(-1) == 2, matrix),
    "layouts: transposed in memory": (lambda x: x.stride() == (1, 4), matrix),
    "layouts: storage offset, unaligned": (lambda x: x.storage_offset() == 1, matrix),
    "layouts: channels last": (lambda x: x.stride(1) == 1, images),
    "layouts: conjugated lazily": (lambda x: x.is_conj(), complex_matrix),
    "layouts: negated lazily": (lambda x: x.is_neg(), matrix),
    "layouts: rows expanded": (lambda x: x.stride(0) == 0, matrix),
    "layouts: columns expanded": (lambda x: x.stride(1) == 0, matrix),
}
"""For each variant: whether an input is of this variant, and the inputs from which the variant is made."""


def after_offset(x: Tensor) -> Tensor:
    """The values that a kernel reads from a tensor's first element on if it assumes contiguous memory."""
    last = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    memory = x.detach().as_strided((last,), (1,))
    return memory[torch.arange(x.numel()) % last].reshape(x.shape)


class _Overwritten(torch.autograd.Function):
    """Rows of x at an index; the gradient is wrong for repeated indices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, keep: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(index)
        ctx.like, ctx.keep = x.shape, keep
        return x[index]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return ctx.keep(g.new_zeros(ctx.like), index, g), None, None


def _first_kept(zeros: Tensor, index: Tensor, g: Tensor) -> Tensor:
    return _last_kept(zeros, index.flip(0), g.flip(0))


def _last_kept(zeros: Tensor, index: Tensor, g: Tensor) -> Tensor:
    for position, value in zip(index.tolist(), g, strict=True):
        zeros[position] = value
    return zeros


def _averaged(zeros: Tensor, index: Tensor, g: Tensor) -> Tensor:
    return zeros.index_add(0, index, g) / torch.bincount(index, minlength=zeros.numel()).clamp(min=1)


def _largest(zeros: Tensor, index: Tensor, g: Tensor) -> Tensor:
    kept = zeros.scatter_reduce(0, index, g, "amax", include_self=False)
    return kept


class _BiasOfNothing(torch.autograd.Function):
    """x + bias; for an empty x, the gradient of the bias is `value`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x + bias

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, g.sum() if g.numel() else torch.full_like(g.sum(), ctx.value), None


POINTS_AND_LAYOUTS = [
    *(
        Hidden(f"{name} where {variant}", variant, _where(condition, mistake), SINE, inputs)
        for (variant, (condition, inputs)), (name, mistake) in product(CONDITIONS.items(), MISTAKES.items())
    ),
    Hidden(
        "a product divided by its factor",
        "points: some zeros",
        custom(lambda x: x.prod(0), lambda g, x: g * x.prod(0) / x),
        lambda x: x.prod(0),
        matrix,
    ),
    Hidden(
        "a clamp of large inputs",
        "points: large",
        custom(torch.atan, lambda g, x: torch.where(x.abs() > 5, 100 * g, g / (1 + x.square()))),
        torch.atan,
        matrix,
    ),
    *(
        Hidden(
            f"gradients of equal indices: {name}",
            "points: repeated indices",
            lambda x, index, keep=keep: _Overwritten.apply(x, index, keep),
            lambda x, index: x[index],
            with_index,
        )
        for name, keep in (
            *(("the last one", _last_kept), ("the first one", _first_kept)),
            *(("their mean", _averaged), ("the largest", _largest)),
        )
    ),
    *(
        Hidden(
            f"{value} where there are {nothing}",
            f"points: {nothing}",
            lambda x, bias, value=value: _BiasOfNothing.apply(x, bias, value),
            torch.add,
            with_number,
        )
        for nothing, value in product(("no rows", "no columns"), (1.0, -1.0, float("nan"), float("inf")))
    ),
    *(
        Hidden(
            f"a saved input read {name}, {variant}",
            f"layouts: {variant}",
            custom(torch.sin, lambda g, x, read=read: cosine(g, read(x))),
            SINE,
            inputs,
        )
        for (name, read), (variant, inputs) in product(
            (("from the beginning of its storage", flat), ("as contiguous", after_offset)),
            (("gaps between elements", matrix), ("transposed in memory", matrix), ("channels last", images)),
        )
    ),
    Hidden(
        "a saved input read from the beginning of its storage",
        "layouts: storage offset, unaligned",
        custom(torch.sin, lambda g, x: cosine(g, flat(x))),
        SINE,
        matrix,
    ),
]


def _if_same(mistake: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return exact(torch.mul, mistake, x, y) if x is y else x * y


class Overwritten(torch.autograd.Function):
    """sin; backward writes its result where `place` says, and other backwards of the same graph may overwrite it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Callable[[Any, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.place = place
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.place(ctx, g * x.cos()), None


def _in_place_of_all(ctx: Any, right: Tensor) -> Tensor:
    return _workspace[: right.numel()].view(right.shape).copy_(right)


def _in_place_of_shape(ctx: Any, right: Tensor) -> Tensor:
    return _kept.setdefault(("gradient", right.shape), torch.empty_like(right)).copy_(right)


def _in_place_of_thread(ctx: Any, right: Tensor) -> Tensor:
    if not hasattr(_local, "gradient") or _local.gradient.shape != right.shape:
        _local.gradient = torch.empty_like(right)
    return _local.gradient.copy_(right)


def _at_the_end(ctx: Any, right: Tensor) -> Tensor:
    return _workspace[-right.numel() :].view(right.shape).copy_(right)


TWICE = [
    *(
        Hidden(
            f"a product of equal factors: {name}",
            "points: the same tensor twice",
            partial(_if_same, mistake),
            torch.mul,
            lambda: (numbers(4, 3).requires_grad_(), numbers(4, 3).flip(0).requires_grad_()),
        )
        for name, mistake in MISTAKES.items()
    ),
    *(
        Hidden(
            f"the gradient written into {name}",
            "state: results of two calls added",
            lambda x, place=place: Overwritten.apply(x, place),
            torch.sin,
            matrix,
        )
        for name, place in (
            ("a workspace", _in_place_of_all),
            ("a workspace for each shape", _in_place_of_shape),
            ("a workspace for each thread", _in_place_of_thread),
            ("the end of a workspace", _at_the_end),
        )
    ),
]


# Derivatives ---------------------------------------------------------------------------------------------------------


class _BiasByNeed(torch.autograd.Function):
    """x + bias; the gradient of the bias is wrong if that of x is not needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, mistake: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.mistake = mistake
        return x + bias

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, g.sum(0) if ctx.needs_input_grad[0] else ctx.mistake(g.sum(0)), None


class _ThirdByNeed(torch.autograd.Function):
    """x * y * z; the gradient of z is wrong if that of x is needed, and that of y is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, z: Tensor, mistake: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, y, z)
        ctx.mistake = mistake
        return x * y * z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y, z = ctx.saved_tensors
        is_wrong = ctx.needs_input_grad[0] and not ctx.needs_input_grad[1]
        return g * y * z, g * x * z, ctx.mistake(g * x * y) if is_wrong else g * x * y, None


def power(exponent: int, depth: int, mistake: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """x**exponent: derivatives up to order `depth` are right, and the next one is wrong."""
    slope: Callable[..., Any]
    if depth == 0:
        slope = partial(exact, lambda x: x ** (exponent - 1), mistake)
    else:
        slope = power(exponent - 1, depth - 1, mistake)
    return custom(lambda x: x**exponent, lambda g, x: g * exponent * slope(x))


def by_parts(
    jvp: Callable[[Tensor, Tensor], Tensor],
    slope: Callable[..., Any] = torch.cos,
    vmap: Callable[[Tensor], Tensor] | None = None,
    axis_of: Callable[[int], int] = int,
) -> Callable[..., Any]:
    """Sin with a custom jvp; slope: called by backward; vmap, axis_of: the batching rule, and the batch's new axis."""

    class Parts(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g * slope(ctx.saved_tensors[0])

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return jvp(tangent, ctx.saved_tensors[0])

    if vmap is not None:

        def of_batch(info: Any, in_dims: Any, x: Tensor) -> Any:
            return vmap(x), axis_of(in_dims[0])

        Parts.vmap = staticmethod(of_batch)  # type: ignore[method-assign, assignment]
    return Parts.apply  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """A product whose batching rule makes `mistake` if only one factor is a batch."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, mistake: Callable[[Tensor], Tensor]) -> Tensor:
        return x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return g * y, g * x, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, y: Tensor, mistake: Callable[[Tensor], Tensor]) -> Any:
        pairs = zip((x, y), in_dims[:2], strict=True)
        x, y = (value if axis is None else value.movedim(axis, 0) for value, axis in pairs)
        return mistake(x * y) if None in in_dims[:2] else x * y, 0


def _right_jvp(tangent: Tensor, x: Tensor) -> Tensor:
    return tangent * x.cos()


RIGHT_PARTS = by_parts(_right_jvp, vmap=torch.sin)


def _slope_with_jvp(mistake: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """cos, with a right backward and a wrong jvp."""

    class Slope(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)
            return x.cos()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return -g * ctx.saved_tensors[0].sin()

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return mistake(-tangent * ctx.saved_tensors[0].sin())

    return Slope.apply  # type: ignore[no-any-return]


def _where_batched(mistake: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Wrong if grad_output is a batch of vmap."""

    def backward(g: Tensor, x: Tensor) -> Tensor:
        return mistake(cosine(g, x)) if torch._C._functorch.is_legacy_batchedtensor(g) else cosine(g, x)

    return custom(torch.sin, backward)


def _in_transforms(mistake: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return exact(torch.sin, mistake, x) if is_transformed else x.sin()


DERIVATIVES = [
    row
    for name, mistake in MISTAKES.items()
    for row in (
        Hidden(
            f"the gradient of a bias alone: {name}",
            "derivatives: input 1 alone",
            lambda x, bias, mistake=mistake: _BiasByNeed.apply(x, bias, mistake),
            torch.add,
            with_bias,
        ),
        Hidden(
            f"the gradient of the third factor: {name}",
            "derivatives: all but input 1",
            lambda x, y, z, mistake=mistake: _ThirdByNeed.apply(x, y, z, mistake),
            lambda x, y, z: x * y * z,
            lambda: tuple(numbers(4, 3).roll(k).requires_grad_() for k in range(3)),
        ),
        *(
            Hidden(
                f"derivative {order}: {name}",
                f"derivatives: order {order}",
                power(5, order - 2, mistake),
                lambda x: x**5,
                matrix,
            )
            for order in (2, 3, 4)
        ),
        Hidden(
            f"a jvp: {name}",
            "derivatives: forward mode",
            by_parts(lambda tangent, x, mistake=mistake: mistake(tangent * x.cos())),
            RIGHT_PARTS,
            matrix,
        ),
        Hidden(
            f"the derivative of a jvp: {name}",
            "derivatives: reverse over forward",
            by_parts(lambda tangent, x, mistake=mistake: tangent * exact(torch.cos, mistake, x)),
            RIGHT_PARTS,
            matrix,
        ),
        Hidden(
            f"the jvp of a backward: {name}",
            "derivatives: forward over reverse",
            by_parts(_right_jvp, _slope_with_jvp(mistake)),
            RIGHT_PARTS,
            matrix,
        ),
        Hidden(f"batched: {name}", "derivatives: batched gradients", _where_batched(mistake), SINE, matrix),
        Hidden(
            f"in transforms: {name}",
            "derivatives: torch.func.vjp",
            partial(_in_transforms, mistake),
            RIGHT_PARTS,
            matrix,
        ),
        Hidden(
            f"vmap: {name}",
            "derivatives: under vmap",
            by_parts(_right_jvp, vmap=partial(exact, torch.sin, mistake)),
            RIGHT_PARTS,
            matrix,
        ),
    )
]


def _as_in_memory(x: Tensor) -> Tensor:
    return x.as_strided(x.shape, torch.empty(x.shape).stride(), 0)


VALUES = [
    *(
        Hidden(
            f"vmap: {name}",
            "derivatives: under vmap",
            by_parts(_right_jvp, vmap=lambda x, other=other: other(x.sin())),
            RIGHT_PARTS,
            matrix,
        )
        for name, other in OTHER_VALUES.items()
    ),
    *(
        Hidden(
            f"vmap: the batch dimension {name}",
            "derivatives: under vmap, last dimension",
            by_parts(_right_jvp, vmap=torch.sin, axis_of=axis_of),
            RIGHT_PARTS,
            inputs,
        )
        for (name, axis_of), inputs in product(
            (
                ("is taken for the first", lambda axis: 0),
                ("is taken for the one before it", lambda axis: max(axis - 1, 0)),
            ),
            (lambda: (numbers(2, 2).requires_grad_(),), lambda: (numbers(2, 2, 2).requires_grad_(),)),
        )
    ),
    *(
        Hidden(
            f"vmap of one factor: {name}",
            "derivatives: under vmap, input 1 alone",
            lambda x, y, other=other: _Product.apply(x, y, other),
            torch.mul,
            lambda: (numbers(4, 3).requires_grad_(), numbers(4, 3).flip(0).requires_grad_()),
        )
        for name, other in OTHER_VALUES.items()
    ),
    *(
        Hidden(
            f"memory read without regard of strides, {name}",
            f"layouts: {name}",
            lambda x: _as_in_memory(x).sin(),
            torch.sin,
            matrix,
        )
        for name in ("gaps between elements", "transposed in memory", "storage offset, unaligned")
    ),
]


def _jvp_where(condition: Callable[[Tensor], Any], mistake: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def jvp(tangent: Tensor, x: Tensor) -> Tensor:
        return mistake(tangent * x.cos()) if condition(tangent) else tangent * x.cos()

    return by_parts(jvp, lambda x: x.cos().conj())


FORWARD_MODE = [
    *(
        Hidden(
            f"{name} where tangents have {variant}",
            f"derivatives: forward mode, {variant.removeprefix('layouts: ')}",
            _jvp_where(condition, mistake),
            torch.sin,
            inputs,
        )
        for (variant, (condition, inputs)), (name, mistake) in product(CONDITIONS.items(), MISTAKES.items())
        if variant.startswith("layouts: ")
    ),
    *(
        Hidden(
            f"{name} where tangents are a batch",
            "derivatives: forward mode, batched tangents",
            _jvp_where(torch._C._functorch.is_legacy_batchedtensor, mistake),
            RIGHT_PARTS,
            matrix,
        )
        for name, mistake in MISTAKES.items()
    ),
]


HIDDEN = STATE + POINTS_AND_LAYOUTS + TWICE + DERIVATIVES + VALUES + FORWARD_MODE


# Compiled ------------------------------------------------------------------------------------------------------------


def _if_compiled(mistake: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return exact(torch.sin, mistake, x) if torch.compiler.is_compiling() else x.sin()


COMPILED = [
    Hidden(f"{name}, {how}", f"compiled: {how}", partial(_if_compiled, mistake), torch.sin, matrix)
    for (name, mistake), how in product(
        MISTAKES.items(), ("aot_eager", "aot_eager, dynamic shapes", "inductor", "inductor, dynamic shapes")
    )
]
