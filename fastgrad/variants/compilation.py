"""Variants in which a function is compiled, runs on fake tensors, or is a registered operator."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastgrad.core import torch_private
from fastgrad.problem.arguments import as_tuple
from fastgrad.variants.case import Case, NotApplicableError, Outcome, Subject, Variant


def _compiled(backend: str, dynamic: bool) -> Callable[[Subject], Case]:
    def make(subject: Subject) -> Case:
        if backend == "inductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
            raise NotApplicableError("there is no C++ compiler")
        compiled = torch_private.compiled(subject.called, backend, dynamic)
        return Case(subject.flat(compiled), subject.inputs)

    return make


def _on_fake_tensors(subject: Subject) -> Outcome:
    """Compares shapes and dtypes of results and gradients with those on fake tensors."""
    mode = torch_private.fake_mode()
    fakes = tuple(mode.from_tensor(x.detach()).requires_grad_(x.requires_grad) for x in subject.inputs)
    real_results = _tensors(subject.func(*subject.inputs))
    with mode:
        fake_results = _tensors(subject.func(*fakes))
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


def _tensors(result: Any) -> list[Tensor | None]:
    return [value for value in as_tuple(result) if isinstance(value, Tensor)]


def _gradients(results: list[Tensor | None], inputs: tuple[Tensor, ...], checked: list[int]) -> Sequence[Tensor | None]:
    differentiable = [value for value in results if value is not None and value.requires_grad]
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
    wrong = [f"{name}: {str(said).partition(chr(10))[0]}" for name, said in found.items() if said != "SUCCESS"]
    return Outcome("failed", "; ".join(wrong)) if wrong else Outcome("passed")


VARIANTS = (
    Variant("compiled", "fake tensors", _on_fake_tensors),
    Variant("compiled", "opcheck", _opcheck),
    Variant("compiled", "aot_eager", _compiled("aot_eager", False)),
    Variant("compiled", "aot_eager, dynamic shapes", _compiled("aot_eager", True)),
    Variant("compiled", "inductor", _compiled("inductor", False)),
    Variant("compiled", "inductor, dynamic shapes", _compiled("inductor", True)),
)
