"""Variants of the derivative: order, mode, nesting of modes, batches, transforms, and inputs that require grad."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgrad.core import native, torch_private
from fastgrad.variants import layouts
from fastgrad.variants.case import MAX_ALONE, Case, NotApplicableError, Outcome, Subject, Variant, as_given, tensors_of


def _reverse_over_forward(subject: Subject) -> Case:
    """The JVP along a random direction as a function of the inputs: its gradient is reverse over forward mode."""
    generator = torch.Generator().manual_seed(subject.seed)
    checked = {i: subject.inputs[i] for i in subject.checked}
    tangents = {i: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for i, x in checked.items()}

    def pushed(*arguments: Any) -> Any:
        duals = (torch_private.make_dual(arguments[i], tangent) for i, tangent in tangents.items())
        results = tensors_of(subject.of_checked(arguments)(*duals))
        pairs = ((result, torch_private.tangent_of(result)) for result in results)
        return tuple(torch.zeros_like(result) if tangent is None else tangent for result, tangent in pairs)

    return Case(lambda *arguments: native.at_dual_level(partial(pushed, *arguments)), subject.inputs)


def _by_func_vjp(subject: Subject) -> Case:
    """Func with the gradients that torch.func.vjp computes."""
    differentiable = _differentiable(subject)

    class ByVjp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
            ctx.save_for_backward(*arguments)
            return tuple(value.clone() for value in differentiable(subject.func(*arguments)))

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *grads: Tensor) -> Any:
            arguments = tuple(value.detach() for value in ctx.saved_tensors)
            checked = (arguments[i] for i in subject.checked)
            pulled = torch.func.vjp(lambda *one: differentiable(subject.of_checked(arguments)(*one)), *checked)[1]
            gradients = dict(zip(subject.checked, pulled(grads), strict=True))
            return tuple(map(gradients.get, range(len(arguments))))

    return Case(ByVjp.apply, subject.inputs)


def _under_vmap(axis: int, number: int | None = None) -> Callable[[Subject], Case]:
    """Two calls of func, at the inputs and next to them, as one batch.

    axis: the batch dimension. number: the only input with a batch; None: all that are checked.
    """

    def make(subject: Subject) -> Case:
        neighbor, differentiable = subject.neighbor(), _differentiable(subject)
        batched = set(subject.checked) if number is None else {number}
        axes = tuple(axis if i in batched else None for i in range(len(subject.inputs)))

        def called(*arguments: Any) -> tuple[Tensor, ...]:
            return differentiable(subject.func(*arguments))

        def func(*arguments: Any) -> Any:
            others = neighbor(arguments)
            given = (torch.stack([x, others[i]], axis) if i in batched else x for i, x in enumerate(arguments))
            return torch.func.vmap(called, axes, randomness="same")(*given)

        def expected() -> Any:
            others = neighbor(subject.inputs)
            second = (others[i] if i in batched else x for i, x in enumerate(subject.inputs))
            return tuple(map(torch.stack, zip(called(*subject.inputs), called(*second), strict=True)))

        return Case(func, subject.inputs, expected=expected)

    return make


def _differentiable(subject: Subject) -> Callable[[Any], tuple[Tensor, ...]]:
    """Returns a function that selects the outputs that require grad from a result of func."""
    outputs = tensors_of(subject.func(*subject.inputs))
    numbers = [k for k, value in enumerate(outputs) if value.requires_grad]
    if not numbers:
        raise NotApplicableError("no output requires grad")
    return lambda result: tuple(tensors_of(result)[k] for k in numbers)


def _requiring(chosen: Collection[int]) -> Callable[[Subject], Case]:
    """Only the chosen ones of the checked inputs require grad."""

    def make(subject: Subject) -> Case:
        changed = list(subject.inputs)
        for i in subject.checked:
            if i not in chosen:
                changed[i] = changed[i].detach().clone()  # another input may share its memory
        differentiable = _differentiable(subject)
        return Case(lambda *arguments: differentiable(subject.func(*arguments)), tuple(changed))

    return make


def of_inputs(subject: Subject) -> list[Variant]:
    """Variants of one of several inputs: only this one, or only the others, require grad, or it alone is a batch."""
    checked = subject.checked
    alone = checked if len(checked) > 1 else ()
    left_out = checked[:MAX_ALONE] if len(checked) > 2 else ()  # of two inputs, the other one is alone
    batched = range(min(MAX_ALONE, len(subject.inputs))) if len(subject.inputs) > 1 else ()
    return [
        *(Variant("derivatives", f"input {i} alone", _requiring({i})) for i in alone),
        *(Variant("derivatives", f"all but input {i}", _requiring(set(checked) - {i})) for i in left_out),
        *(Variant("derivatives", f"under vmap, input {i} alone", _under_vmap(0, i)) for i in batched),
    ]


_FORWARD_MODE = {"check_forward_ad": True, "check_backward_ad": False}


def _in_forward_mode(layout: Variant) -> Variant:
    """The variant in which inputs, and so tangents, have a layout. torch gives a tangent the layout of its tensor."""

    def make(subject: Subject) -> Case | Outcome:
        case = layout.make(subject)
        return replace(case, keywords=_FORWARD_MODE) if isinstance(case, Case) else case

    return Variant("derivatives", f"forward mode, {layout.name}", make, layout.is_elsewhere)


_forward_over_reverse = as_given(order=2, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False)

VARIANTS = (
    *(Variant("derivatives", f"order {order}", as_given(order=order)) for order in (2, 3, 4)),
    Variant("derivatives", "forward mode", as_given(**_FORWARD_MODE)),
    *map(_in_forward_mode, layouts.VARIANTS),
    Variant(
        "derivatives", "forward mode, batched tangents", as_given(**_FORWARD_MODE, check_batched_forward_grad=True)
    ),
    Variant("derivatives", "reverse over forward", _reverse_over_forward),
    Variant("derivatives", "forward over reverse", _forward_over_reverse),
    Variant("derivatives", "batched gradients", as_given(check_batched_grad=True)),
    Variant("derivatives", "torch.func.vjp", _by_func_vjp),
    Variant("derivatives", "under vmap", _under_vmap(0)),
    Variant("derivatives", "under vmap, last dimension", _under_vmap(-1)),
)
