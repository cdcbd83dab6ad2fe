"""The private names of torch that fastgrad needs: the only module that touches them."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._vmap_internals import _vmap
from torch.autograd import forward_ad
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

profiler_is_enabled: Callable[[], bool] = _profiler_enabled
"""Whether torch.profiler records in this thread."""

MKLDNN: torch.layout = torch._mkldnn  # type: ignore[attr-defined]

DispatchMode = TorchDispatchMode
"""Sees the operators that are called below autograd, on its thread."""


def may_overlap_itself(tensor: Tensor) -> bool:
    """Whether torch sees, or cannot rule out, two elements of a strided tensor at one address."""
    return bool(torch._debug_has_internal_overlap(tensor) != 0)


def is_dispatched_to_python(tensor: Tensor) -> bool:
    """Whether a tensor's operators are Python's (`__torch_dispatch__`), of a subclass say."""
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))


def unconjugated(tensor: Tensor) -> Tensor:
    """The memory behind a tensor that may be lazily conjugated or negated."""
    tensor = tensor.conj() if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def batched(func: Callable[..., Any]) -> Callable[..., Any]:
    """Vectorizes func over a leading dimension, by the vmap that torch uses for batched gradients."""
    return _vmap(func)


@functools.cache
def _load_decompositions() -> None:
    """What the first `make_dual` of a process imports, without the warnings of torch's that say it is old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if os.environ.get("PYTORCH_JIT", "1") == "1":  # as make_dual does
            importlib.import_module("torch._decomp.decompositions_for_jvp")


def make_dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """`torch.autograd.forward_ad.make_dual`, which has no types."""
    _load_decompositions()
    return cast(Tensor, forward_ad.make_dual(primal, tangent))  # type: ignore[no-untyped-call]


def tangent_of(dual: Tensor) -> Tensor | None:
    """The tangent of a dual tensor, None where there is none."""
    return cast("Tensor | None", forward_ad.unpack_dual(dual).tangent)  # type: ignore[no-untyped-call]


def hidden_from_dynamo(func: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Func itself: torch.compile runs it, and all that it calls, as it is.

    What torch.compiler.disable does, without importing the compiler (more than a second) and without a
    frame of its own between func and its caller, whom warnings are about.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(func.__code__, frames._FrameExecStrategy(skip, skip))
    func._torchdynamo_disable = True  # type: ignore[attr-defined]
    func._torchdynamo_disable_msg = "a gradient check needs values"  # type: ignore[attr-defined]
    return func


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a tree of lists, tuples and dicts."""
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def forget_capture(device: int, pool: tuple[int, int]) -> None:
    """Has torch's CUDA allocator end a capture that was invalid, and release its pool, where torch did not.

    Left capturing, as torch 2.11 leaves it, the allocator frees no memory and settles no events.
    """
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return  # It had ended or never begun. The pool may be released, too, and must not be twice.
    torch._C._cuda_releasePool(device, pool)


def set_backend(where: Any, name: str, value: Any) -> None:
    """Sets a flag of torch.backends, also where torch's test suites have frozen them for all but its own functions."""
    with torch.backends.__allow_nonbracketed_mutation():
        setattr(where, name, value)


def children_of(value: Any) -> tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]] | None:
    """What a container of torch's pytree holds, each with the way to it, and what makes the container anew.

    Lists, tuples, named tuples, dicts, and what the user has registered. None for anything else.
    """
    if _pytree.tree_is_leaf(value):
        return None

    def is_child(other: Any) -> bool:
        return other is not value

    try:
        found, spec = _pytree.tree_flatten_with_path(value, is_child)
    except ValueError:  # registered without names for what it holds
        leaves, spec = _pytree.tree_flatten(value, is_child)
        children = [(f"[{i}]", leaf) for i, leaf in enumerate(leaves)]
    else:
        children = [("".join(_step(key) for key in path), child) for path, child in found]
    return children, lambda made: _pytree.tree_unflatten(made, spec)


def _step(key: Any) -> str:
    """One step of a path as Python spells it: [0], ["weight"], .field."""
    text = str(key)
    plain = isinstance(key, _pytree.MappingKey) and isinstance(key.key, str) and text == f"['{key.key}']"
    return f'["{key.key}"]' if plain else text


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """What torch's opaque operators are made of, by operator."""
    return dict(importlib.import_module("torch._decomp").decomposition_table)


def preserved_version(tensor: Tensor) -> Any:
    """A context in which writes to a tensor are not seen by autograd."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]


def has_memory(tensor: Tensor) -> bool:
    """Whether a strided tensor's elements lie in memory: those of the zeros that some backwards return do not."""
    return not tensor._is_zerotensor()
