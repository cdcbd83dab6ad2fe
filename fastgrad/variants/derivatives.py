"""Variants of the derivative: order, mode, nesting of modes, batches, transforms, and inputs that require grad."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual

from fastgrad.core import native
from fastgrad.variants.case import Case, NotApplicableError, Subject, Variant, as_given, tensors_of


def _reverse_over_forward(subject: Subject) -> Case:
    """The JVP along a random direction as a function of the inputs: its gradient is reverse over forward mode."""
    generator = torch.Generator().manual_seed(subject.seed)
    tangents = tuple(
        torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor) for tensor in subject.tensors()
    )

    def pushed(*arguments: Any) -> Any:
        pairs = zip(subject.checked, tangents, strict=True)
        duals = (make_dual(arguments[i], tangent) for i, tangent in pairs)  # type: ignore[no-untyped-call]
        results = map(unpack_dual, tensors_of(subject.of_checked(arguments)(*duals)))
        return tuple(torch.zeros_like(one.primal) if one.tangent is None else one.tangent for one in results)

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


def _under_vmap(subject: Subject) -> Case:
    """Two calls of func, at the inputs and next to them, as one batch."""
    neighbor, differentiable = subject.neighbor(), _differentiable(subject)

    def func(*arguments: Any) -> Any:
        others = neighbor(arguments)
        stacked = tuple(torch.stack([arguments[i], others[i]]) for i in subject.checked)
        mapped = torch.func.vmap(lambda *one: differentiable(subject.of_checked(arguments)(*one)), randomness="same")
        return mapped(*stacked)

    return Case(func, subject.inputs)


def _differentiable(subject: Subject) -> Callable[[Any], tuple[Tensor, ...]]:
    """Returns a function that selects the outputs that require grad from a result of func."""
    outputs = tensors_of(subject.func(*subject.inputs))
    numbers = [k for k, value in enumerate(outputs) if value.requires_grad]
    if not numbers:
        raise NotApplicableError("no output requires grad")
    return lambda result: tuple(tensors_of(result)[k] for k in numbers)


def _only_input(number: int) -> Callable[[Subject], Case]:
    def make(subject: Subject) -> Case:
        changed = list(subject.inputs)
        for k, i in enumerate(subject.checked):
            if k != number:
                changed[i] = changed[i].detach().clone()  # another input may share its memory
        differentiable = _differentiable(subject)
        return Case(lambda *arguments: differentiable(subject.func(*arguments)), tuple(changed))

    return make


def of_inputs(subject: Subject) -> list[Variant]:
    """One variant per checked input, if there are several, in which no other one requires grad.

    Tests code that runs only if a gradient is needed.
    """
    numbers = range(len(subject.checked)) if len(subject.checked) > 1 else ()
    return [Variant("derivatives", f"input {subject.checked[k]} alone", _only_input(k)) for k in numbers]


_forward_over_reverse = as_given(order=2, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False)

VARIANTS = (
    *(Variant("derivatives", f"order {order}", as_given(order=order)) for order in (2, 3, 4)),
    Variant("derivatives", "forward mode", as_given(check_forward_ad=True, check_backward_ad=False)),
    Variant("derivatives", "reverse over forward", _reverse_over_forward),
    Variant("derivatives", "forward over reverse", _forward_over_reverse),
    Variant("derivatives", "batched gradients", as_given(check_batched_grad=True)),
    Variant("derivatives", "torch.func.vjp", _by_func_vjp),
    Variant("derivatives", "under vmap", _under_vmap),
)
