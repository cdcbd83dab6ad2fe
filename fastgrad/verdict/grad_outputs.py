"""Checks beyond the values of a Jacobian: zero, undefined and batched grad_outputs and tangents, attributes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastgrad.core import native, torch_private
from fastgrad.core.phases import phase
from fastgrad.core.random import BATCH_STREAM, TANGENT_STREAM, uniform_like
from fastgrad.problem.coordinates import Block
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Failure, FailureKind, Mode, Settings

BATCH = 2
"""Vectors in a batched gradient: torch tries as many."""


@phase("zero grad_output")
def check_zero_grad_output(
    problem: Problem, settings: Settings, gradients: Sequence[Tensor | None] | None = None
) -> Failure | None:
    """A zero grad_output must give zero gradients, each with its input's layout, dtype, device and size.

    gradients: those that it gave, where they are at hand.
    """
    if gradients is None:
        gradients = problem.zero_gradients()
    for block, gradient in zip(problem.inputs, gradients, strict=True):
        if gradient is not None and not native.is_plain_zero(gradient, block.tensor):
            failure = _attribute_failure(block, gradient, settings.masked)
            if failure is not None:
                return failure
    return None


def _attribute_failure(block: Block, gradient: Tensor, masked: bool) -> Failure | None:
    expected = block.tensor
    kind: FailureKind = "incorrect gradient"
    detail = _layout_difference(gradient, expected)
    if detail:
        pass
    elif not _is_zero(gradient, masked):
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


def _layout_difference(gradient: Tensor, expected: Tensor) -> str:
    """What is wrong with a layout that is not strided, which always is right."""
    if gradient.layout is torch.strided:
        return ""
    if gradient.layout is not expected.layout:
        return f"grad is incorrect layout ({gradient.layout} is not {expected.layout})"
    if gradient.layout is not torch_private.MKLDNN:
        sparse = str(gradient.layout).removeprefix("torch.").removesuffix("_coo")
        for name in ("sparse_dim", "dense_dim"):
            found, wanted = (getattr(tensor, name)() for tensor in (gradient, expected))
            if found != wanted:
                return f"grad is {sparse} tensor, but has incorrect {name} {found}, expected {wanted}"
    return ""


def _is_zero(gradient: Tensor, masked: bool = False) -> bool:
    """Whether a gradient of any layout is zero; under masked semantics, within torch.allclose's atol."""
    dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
    return torch.allclose(dense, torch.zeros_like(dense)) if masked else not bool(dense.any())


@phase("undefined grad_outputs")
def check_undefined_grads(problem: Problem, at_hand: Sequence[Sequence[Tensor | None]] | None = None) -> Failure | None:
    """Undefined grad_outputs, all of them and then one at a time, must work and count as zeros.

    at_hand: the gradients that they gave, where these are.
    """
    if at_hand is not None:
        return next(filter(None, (_undefined_failure(problem, gradients) for gradients in at_hand)), None)
    for only in (None, *(problem.outputs if len(problem.outputs) > 1 else ())):
        try:
            gradients = problem.undefined_gradients(only)
        except RuntimeError as error:
            return Failure("undefined grad raises", cause=error)
        failure = _undefined_failure(problem, gradients)
        if failure is not None:
            return failure
    return None


def _undefined_failure(problem: Problem, gradients: Sequence[Tensor | None]) -> Failure | None:
    for block, gradient in zip(problem.inputs, gradients, strict=True):
        if gradient is not None and not native.is_plain_zero(gradient, block.tensor) and not _is_zero(gradient):
            return Failure("undefined grad not zero", input=block.index, input_position=block.position)
    return None


@phase("undefined tangents")
def check_undefined_tangents(problem: Problem, settings: Settings) -> Failure | None:
    """An undefined tangent of one input must count as zero, whatever the tangents of the others."""
    random = [uniform_like(block.tensor, settings.seed, TANGENT_STREAM, block.first) for block in problem.inputs]
    for k, block in enumerate(problem.inputs):
        zero = torch.zeros_like(block.tensor.detach())
        with_zero, with_none = (problem.jvp([*random[:k], tangent, *random[k + 1 :]]) for tangent in (zero, None))
        for output, left, right in zip(problem.outputs, with_zero, with_none, strict=True):
            if not _allclose(left, right):
                return Failure(
                    "undefined tangent",
                    output.index,
                    block.index,
                    output.position,
                    block.position,
                    mode="forward",
                    detail=f"{right} for the undefined tangent, {left} for zero",
                )
    return None


def _allclose(left: Tensor | None, right: Tensor | None) -> bool:
    """torch.allclose at its defaults, None being zero."""
    if left is None or right is None:
        return not any(value is not None and bool(value.any()) for value in (left, right))
    return torch.allclose(left, right)


@phase("batched gradients")
def check_batched_gradients(problem: Problem, settings: Settings) -> Failure | None:
    """The backward of each output under vmap must give what two runs of it give."""
    outputs = problem.graph()
    inputs = [block.tensor for block in problem.inputs]
    for block, output in zip(problem.outputs, outputs, strict=True):

        def vjp(cotangent: Tensor, output: Tensor = output) -> tuple[Tensor, ...]:
            problem.vjps += 1
            found = torch.autograd.grad(output, inputs, cotangent, retain_graph=True, allow_unused=True)
            return tuple(
                like.detach().new_zeros(()).expand(like.shape) if gradient is None else gradient
                for gradient, like in zip(found, inputs, strict=True)
            )

        failure = _batch_failure(vjp, output, block.size, settings, "reverse")
        if failure is not None:
            which, cause, detail = failure
            if which is None:
                return Failure("batched raises", block.index, None, block.position, detail=detail, cause=cause)
            other = problem.inputs[which]
            return Failure("batched differs", block.index, other.index, block.position, other.position, detail=detail)
    return None


@phase("batched tangents")
def check_batched_tangents(problem: Problem, settings: Settings) -> Failure | None:
    """The JVP of each input under vmap must give what two runs of it give."""
    for k, block in enumerate(problem.inputs):

        def jvp(tangent: Tensor, k: int = k) -> tuple[Tensor, ...]:
            found = problem.jvp([tangent if i == k else None for i in range(len(problem.inputs))])
            return tuple(
                output.tensor.new_zeros(()).expand(output.tensor.shape) if value is None else value
                for value, output in zip(found, problem.outputs, strict=True)
            )

        failure = _batch_failure(jvp, block.tensor, block.size, settings, "forward")
        if failure is not None:
            which, cause, detail = failure
            if which is None:
                return Failure(
                    "batched raises",
                    None,
                    block.index,
                    None,
                    block.position,
                    mode="forward",
                    detail=detail,
                    cause=cause,
                )
            other = problem.outputs[which]
            return Failure(
                "batched differs",
                other.index,
                block.index,
                other.position,
                block.position,
                mode="forward",
                detail=detail,
            )
    return None


def _batch_failure(
    product: Callable[[Tensor], tuple[Tensor, ...]], like: Tensor, size: int, settings: Settings, mode: Mode
) -> tuple[int | None, Exception | None, str] | None:
    """Which result of a vectorized product differs from single ones, the exception of vmap, and what to say."""
    vectors = [uniform_like(like, settings.seed, BATCH_STREAM, k * size) for k in range(BATCH)]
    expected = [torch.stack(results) for results in zip(*(product(vector) for vector in vectors), strict=True)]
    with warnings.catch_warnings():
        # Of vmap, about operators that it runs in a loop: slow is not wrong.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        try:
            found = torch_private.batched(product)(torch.stack(vectors))
        except RuntimeError as error:
            return None, error, str(error)
    for k, (batched, single) in enumerate(zip(found, expected, strict=True)):
        if not torch.allclose(batched, single):
            return k, None, f"Got:\n{batched}\n\nExpected:\n{single}"
    return None
