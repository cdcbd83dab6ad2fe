"""Checks beyond the values of a Jacobian: zero, undefined and batched vectors, and attributes of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from fastgrad.core import native, torch_private
from fastgrad.core.errors import raise_if_transient
from fastgrad.core.memory import raises_memory_error
from fastgrad.core.phases import phase
from fastgrad.core.random import BATCH_STREAM, TANGENT_STREAM, uniform_like
from fastgrad.core.tensors import element_index
from fastgrad.engines.blocks import MAX_CACHED
from fastgrad.problem.problem import Problem
from fastgrad.problem.small_backward import SmallBackward
from fastgrad.report.failure import Failure
from fastgrad.report.number_text import digits_apart
from fastgrad.report.settings import Settings

BATCH = 2
"""Number of vectors in a batched VJP or JVP, the same as in torch's checker."""


@phase("zero grad_output")
def check_zero_grad_output(
    problem: Problem, settings: Settings, gradients: Sequence[Tensor | None] | None = None
) -> Failure | None:
    """Checks that a zero grad_output gives zero gradients, each with its input's layout, dtype, device and size.

    gradients: those for zero grad_outputs, if they are known.
    """
    if gradients is None:
        gradients = problem.zero_gradients()
    for block, gradient in zip(problem.inputs, gradients, strict=True):
        if gradient is None or native.is_plain_zero(gradient, block.tensor):
            continue
        detail = _layout_difference(gradient, block.tensor)
        if not detail and not _is_zero(gradient, settings.masked):
            return Failure.at("not multiplied by grad_output", input=block)
        properties = (
            ("type", gradient.dtype, block.tensor.dtype),
            ("device", gradient.device, block.tensor.device),
            ("size", tuple(gradient.shape), tuple(block.tensor.shape)),
        )
        differences = (
            f"grad is incorrect {what} ({found} is not {due})" for what, found, due in properties if found != due
        )
        detail = detail or next(differences, "")
        if detail:
            return Failure.at("incorrect gradient", input=block, detail=detail)
    return None


def _layout_difference(gradient: Tensor, expected: Tensor) -> str:
    """What is wrong with a gradient's layout, as text; empty if nothing is, as for every strided gradient."""
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
def check_undefined_grads(problem: Problem, known: Sequence[Sequence[Tensor | None]] | None) -> Failure | None:
    """Checks that undefined grad_outputs count as zeros: first all of them at once, then one at a time.

    known: the gradients for these grad_outputs, if they are known.
    """
    for number, only in enumerate((None, *(problem.outputs if len(problem.outputs) > 1 else ()))):
        try:
            gradients = problem.undefined_gradients(only) if known is None else known[number]
        except RuntimeError as error:
            raise_if_transient(error, partial(problem.undefined_gradients, only))
            return Failure("undefined grad raises", cause=error)
        for block, gradient in zip(problem.inputs, gradients, strict=True):
            if gradient is not None and not native.is_plain_zero(gradient, block.tensor) and not _is_zero(gradient):
                return Failure.at("undefined grad not zero", input=block)
    return None


@phase("undefined tangents")
def check_undefined_tangents(problem: Problem, settings: Settings) -> Failure | None:
    """Checks that an undefined tangent of one input counts as zero, for random tangents of the other inputs."""
    random = [uniform_like(block.tensor, settings.seed, TANGENT_STREAM, block.first) for block in problem.inputs]
    for k, block in enumerate(problem.inputs):
        zero = torch.zeros_like(block.tensor.detach())
        with_zero, with_none = (problem.jvp([*random[:k], tangent, *random[k + 1 :]]) for tangent in (zero, None))
        for output, left, right in zip(problem.outputs, with_zero, with_none, strict=True):
            if not _allclose(left, right):
                return Failure.at("undefined tangent", output, block, mode="forward", detail=_worst_text(left, right))
    return None


def _worst_text(with_zero: Tensor | None, with_none: Tensor | None) -> str:
    """The values of two tangents of an output, None for zero, at the element where they differ most."""
    like = with_zero if with_zero is not None else with_none
    assert like is not None
    left, right = (torch.zeros_like(like) if value is None else value for value in (with_zero, with_none))
    worst = int((left - right).abs().nan_to_num(torch.inf).argmax())
    index = list(element_index(worst, tuple(like.shape)))
    found, expected = (value.reshape(-1)[worst].item() for value in (right, left))
    digits = digits_apart(found, expected)
    return (
        f"at {index}, the tangent of the output is {found:.{digits}g} for the undefined tangent and "
        f"{expected:.{digits}g} for zero"
    )


def _allclose(left: Tensor | None, right: Tensor | None) -> bool:
    """torch.allclose with its default tolerances; None counts as zero."""
    if left is None or right is None:
        return not any(value is not None and bool(value.any()) for value in (left, right))
    return torch.allclose(left, right)


@phase("batched gradients")
def batched_failure(graph: native.Graph, problem: Problem | SmallBackward, settings: Settings) -> Failure | None:
    """The failure if a VJP of an output under vmap raises, or differs from single VJPs; BATCH + 1 VJPs per output."""
    problem.vjps += (BATCH + 1) * len(graph.outputs)
    for number, tensor in enumerate(graph.outputs):
        vectors = batch_vectors(tensor, settings.seed)
        single = [graph.vjp_of_one(number, vector) for vector in vectors.unbind()]
        try:
            batched = _vectorized_vjp(graph, number, vectors)
        except RuntimeError as error:
            raise_if_transient(error, partial(_vectorized_vjp, graph, number, vectors))
            return Failure.at("batched raises", problem.outputs[number], detail=str(error), cause=error)
        if not native.are_close(batched, single):
            for block, *gradients in zip(problem.inputs, batched, *single, strict=True):
                detail = _difference(*gradients)
                if detail is not None:
                    return Failure.at("batched differs", problem.outputs[number], block, detail=detail)
    return None


@raises_memory_error
def _vectorized_vjp(graph: native.Graph, number: int, vectors: Tensor) -> list[Tensor | None]:
    # Of a copy, because a backward may write into grad_output, and may return it as a gradient.
    return native.vectorized_vjp(graph, number, vectors.clone())


def _difference(batched: Tensor | None, *single: Tensor | None) -> str | None:
    """The message if gradients of a vectorized VJP differ from those of single ones; otherwise None."""
    like = next((gradient for gradient in single if gradient is not None), None)
    if like is None:
        return None if batched is None or not bool(batched.any()) else f"Got:\n{batched}\n\nExpected:\nNone"
    expected = torch.stack([torch.zeros_like(like) if gradient is None else gradient for gradient in single])
    batched = torch.zeros_like(expected) if batched is None else batched
    return None if torch.allclose(batched, expected) else f"Got:\n{batched}\n\nExpected:\n{expected}"


def batch_vectors(like: Tensor, seed: int) -> Tensor:
    """Random grad_outputs of an output, or tangents of an input: shape (BATCH, *like.shape)."""
    make = _known_batch_vectors if like.numel() <= MAX_CACHED else _known_batch_vectors.__wrapped__
    vectors = make(like.shape, like.dtype, like.device, seed)
    return vectors.clone() if make is _known_batch_vectors else vectors  # a backward may write into them


@lru_cache(64)
def _known_batch_vectors(shape: torch.Size, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    size = shape.numel() * (2 if dtype.is_complex else 1)
    like = torch.empty((), dtype=dtype, device=device).expand(shape)
    return torch.stack([uniform_like(like, seed, BATCH_STREAM, k * size) for k in range(BATCH)])


@phase("batched tangents")
def check_batched_tangents(problem: Problem, settings: Settings) -> Failure | None:
    """Checks that a JVP of each input under vmap equals two separate JVPs; costs BATCH + 1 JVPs per input."""
    for k, block in enumerate(problem.inputs):

        def jvp(tangent: Tensor, k: int = k) -> tuple[Tensor, ...]:
            found = problem.jvp([tangent if i == k else None for i in range(len(problem.inputs))])
            return tuple(
                output.tensor.new_zeros(()).expand(output.tensor.shape) if value is None else value
                for value, output in zip(found, problem.outputs, strict=True)
            )

        vectors = batch_vectors(block.tensor, settings.seed)
        expected = [torch.stack(results) for results in zip(*map(jvp, vectors.unbind()), strict=True)]
        vectorized = partial(torch_private.batched(jvp), vectors)
        with torch_private.quiet_vmap():
            try:
                found = vectorized()
            except RuntimeError as error:
                raise_if_transient(error, vectorized)
                return Failure.at("batched raises", input=block, mode="forward", detail=str(error), cause=error)
        for output, batched, single in zip(problem.outputs, found, expected, strict=True):
            if not torch.allclose(batched, single):
                detail = f"Got:\n{batched}\n\nExpected:\n{single}"
                return Failure.at("batched differs", output, block, mode="forward", detail=detail)
    return None
