"""Checks of a backward beyond its values: zero and undefined grad_outputs, dtype, device, size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastgrad import _torch
from fastgrad._native import GradientsMatch
from fastgrad.coordinates import Block
from fastgrad.problem import Problem
from fastgrad.report import Failure, FailureKind


def check_zero_grad_output(
    problem: Problem, product: Tensor | None = None, match: GradientsMatch | None = None
) -> Failure | None:
    """A zero grad_output must give zero gradients, each with its input's layout, dtype, device and size.

    product (shape (n,)) and match are what `Problem.vjp` made of a zero cotangent, where it was asked.
    """
    if product is not None and match is not None and match.attributes and not bool(product.any()):
        return None
    for block, gradient in zip(problem.inputs, problem.gradients(_zeros(problem.graph())), strict=True):
        if gradient is not None:
            failure = _attribute_failure(block, gradient)
            if failure is not None:
                return failure
    return None


def _zeros(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(output, memory_format=torch.contiguous_format) for output in outputs]


def _attribute_failure(block: Block, gradient: Tensor) -> Failure | None:
    expected = block.tensor
    kind: FailureKind = "incorrect gradient"
    detail = ""
    if gradient.layout is not torch.strided:
        detail = f"grad is incorrect layout ({gradient.layout} is not {expected.layout})"
    elif bool(gradient.any()):
        kind = "not multiplied by grad_output"
    elif gradient.dtype != expected.dtype:
        detail = f"grad is incorrect type ({gradient.dtype} is not {expected.dtype})"
    elif gradient.device != expected.device:
        detail = f"grad is incorrect device ({gradient.device} is not {expected.device})"
    elif gradient.shape != expected.shape:
        detail = f"grad is incorrect size ({tuple(gradient.shape)} is not {tuple(expected.shape)})"
    else:
        return None
    return Failure(kind, input=block.index, input_position=block.position, detail=detail)


def check_undefined_grads(problem: Problem) -> Failure | None:
    """Undefined grad_outputs, all of them and then one at a time, must work and count as zeros."""
    outputs = problem.graph()
    undefined = [_torch.undefined_grad(output) for output in outputs]
    trials = [undefined]
    if len(outputs) > 1:
        trials += [[*outputs[:i], undefined[i], *outputs[i + 1 :]] for i in range(len(outputs))]
    zeros = _zeros(outputs)
    for trial in trials:
        try:
            gradients = problem.gradients(zeros, trial)
        except RuntimeError as error:
            return Failure("undefined grad raises", cause=error)
        for block, gradient in zip(problem.inputs, gradients, strict=True):
            if gradient is not None and bool(gradient.any()):
                return Failure("undefined grad not zero", input=block.index, input_position=block.position)
    return None
