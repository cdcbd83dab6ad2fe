"""Variants in which a function is compiled, runs on fake tensors, or is a registered operator."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fastgrad.core import torch_private
from fastgrad.problem.arguments import flatten
from fastgrad.variants.case import Case, NotApplicableError, Outcome, Subject, Variant, tensors_of


def _compiled(backend: str, dynamic: bool) -> Callable[[Subject], Case]:
    def make(subject: Subject) -> Case:
        if backend == "inductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
            raise NotApplicableError("there is no C++ compiler")
        compiled = torch_private.compiled(subject.called, backend, dynamic)
        return Case(_with_new_graphs(subject.flat(compiled)), subject.inputs, expected=subject.results)

    return make


def _with_new_graphs(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose backward calls func again, and runs the backward of this graph once.

    A check runs backward several times on a graph. A compiled backward may raise then, or return wrong values, because
    it may overwrite what the graph saved.
    """

    def run(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return func(*arguments)
        recorded: list[_Recorded] = []
        tensors = _NewGraph.apply(func, recorded, *arguments)  # type: ignore[no-untyped-call]
        (made,) = recorded
        return made.result if made.rebuild is None else made.rebuild(iter(tensors))

    return run


class _Recorded:
    """The result of a call that was recorded, its tensors that require grad, and what rebuilds it from them."""

    def __init__(self, func: Callable[..., Any], arguments: Sequence[Any]) -> None:
        found: list[tuple[str, Tensor]] = []
        with torch.enable_grad():
            self.result = func(*arguments)
            self.rebuild = flatten(self.result, "result", lambda tensor: tensor.requires_grad, found)
        self.tensors = [tensor for _, tensor in found]


class _NewGraph(torch.autograd.Function):
    """func(*arguments), recorded again for each backward."""

    @staticmethod
    def forward(ctx: Any, func: Callable[..., Any], recorded: list[_Recorded], *arguments: Any) -> tuple[Tensor, ...]:
        ctx.func = func
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arguments)
        recorded.append(_Recorded(func, arguments))
        return tuple(tensor.detach().clone() for tensor in recorded[0].tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        arguments = ctx.saved_tensors
        pairs = zip(_Recorded(ctx.func, arguments).tensors, grads, strict=True)
        defined = [(tensor, grad) for tensor, grad in pairs if grad is not None]
        wanted = [value for value in arguments if value.requires_grad]
        outputs, vectors = [tensor for tensor, _ in defined], [grad for _, grad in defined]
        found = iter(torch.autograd.grad(outputs, wanted, vectors, allow_unused=True) if defined else ())
        return (None, None, *(next(found, None) if value.requires_grad else None for value in arguments))


def _on_fake_tensors(subject: Subject) -> Outcome:
    """Compares shapes and dtypes of results and gradients with those on fake tensors."""
    mode = torch_private.fake_mode()
    fakes = tuple(mode.from_tensor(x.detach()).requires_grad_(x.requires_grad) for x in subject.inputs)
    real_results = tensors_of(subject.func(*subject.inputs))
    fake_results = tensors_of(subject.flat(_Within(mode, subject.called))(*fakes))
    different = _difference("output", real_results, fake_results)
    if different:
        return Outcome("failed", different)
    real_gradients = _gradients(real_results, subject.inputs, subject.checked)
    try:
        with mode:
            fake_gradients = _gradients(fake_results, fakes, subject.checked)
    except Exception as error:
        return Outcome("raised", f"backward, on fake tensors: {type(error).__name__}: {error}".partition("\n")[0])
    different = _difference("gradient", real_gradients, fake_gradients)
    return Outcome("failed", different) if different else Outcome("passed")


class _Within(Module):
    """A function or module that is called within a mode; the buffers of a module are restored outside of it."""

    def __init__(self, mode: Any, called: Callable[..., Any]) -> None:
        super().__init__()
        self._mode, self._called = mode, called

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        with self._mode:
            return self._called(*arguments, **keywords)


def _gradients(results: Sequence[Tensor], inputs: tuple[Tensor, ...], checked: list[int]) -> Sequence[Tensor | None]:
    differentiable = [value for value in results if value.requires_grad]
    ones = [torch.ones_like(value) for value in differentiable]
    return torch.autograd.grad(differentiable, [inputs[i] for i in checked], ones, allow_unused=True)


def _difference(what: str, real: Sequence[Tensor | None], fake: Sequence[Tensor | None]) -> str:
    for number, (expected, found) in enumerate(zip(map(_described, real), map(_described, fake), strict=True)):
        if expected != found:
            return f"{what} {number} is {found} on fake tensors, but {expected} on real ones"
    return ""


def _described(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _opcheck(subject: Subject) -> Outcome:
    """Runs `torch.library.opcheck` on a registered operator; other variants check its gradients."""
    if not torch_private.is_registered(subject.called):
        raise NotApplicableError("func is not an operator of torch.library")
    operator: Any = subject.called
    found = torch.library.opcheck(operator, subject.arguments, dict(subject.keywords), raise_exception=False)
    wrong = [f"{name}: {str(result).partition(chr(10))[0]}" for name, result in found.items() if result != "SUCCESS"]
    return Outcome("failed", "; ".join(wrong)) if wrong else Outcome("passed")


VARIANTS = (
    Variant("compiled", "fake tensors", _on_fake_tensors),
    Variant("compiled", "opcheck", _opcheck),
    Variant("compiled", "aot_eager", _compiled("aot_eager", False)),
    Variant("compiled", "aot_eager, dynamic shapes", _compiled("aot_eager", True)),
    Variant("compiled", "inductor", _compiled("inductor", False)),
    Variant("compiled", "inductor, dynamic shapes", _compiled("inductor", True)),
)
