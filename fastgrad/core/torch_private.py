"""All private names of torch that fastgrad uses."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._vmap_internals import _vmap
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fastgrad.core.memory import Parameters, Result

profiler_is_enabled: Callable[[], bool] = _profiler_enabled
"""Whether torch.profiler records in this thread."""

MKLDNN: torch.layout = torch._mkldnn  # type: ignore[attr-defined]


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that intercepts the operators called below autograd on its thread.

    When torch's own class is first used, it imports the compiler, to hide `__torch_dispatch__` from it. This takes two
    seconds. This class does not: its subclasses decorate their `__torch_dispatch__` with `hidden_from_dynamo`.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """A context in which functions compiled by torch.compile run as they are written.

    Within a mode that fastgrad sets, they would be compiled again. This takes seconds, and torch allows it only a few
    times per function.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def may_overlap_itself(tensor: Tensor) -> bool:
    """Whether two elements of a strided tensor may share an address, as far as torch knows."""
    return bool(torch._debug_has_internal_overlap(tensor) != 0)


def is_dispatched_to_python(tensor: Tensor) -> bool:
    """Whether a tensor's operators are implemented in Python (`__torch_dispatch__`), for example by a subclass."""
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))


below_transforms: Callable[[], contextlib.AbstractContextManager[None]] = torch._C._DisableFuncTorch
"""A context in which operators of plain tensors ignore active transforms of torch.func."""


def transforms_are_active() -> bool:
    """Whether a transform of torch.func is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def differentiating_transform_is_active() -> bool:
    """Whether a transform of torch.func other than vmap is active; within it, inputs cannot be changed in place."""
    if not transforms_are_active():
        return False
    vmap = torch._C._functorch.TransformType.Vmap
    return any(level.key() != vmap for level in torch._C._functorch.get_interpreter_stack() or ())


is_transformed: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor belongs to a transform of torch.func, so that it has no memory of its own."""


def without_transforms(tensor: Tensor) -> Tensor:
    """The tensor that has the memory: for a tensor of a transform, the one that it wraps."""
    while is_transformed(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def renew_weight_lists(module: torch.nn.Module) -> None:
    """Renews the lists of weights that a recurrent module keeps in addition to its parameters.

    The module compares its parameters with weak references from the last call. Therefore, it does not notice if a
    parameter is replaced a second time.
    """
    if isinstance(module, torch.nn.RNNBase):
        module._init_flat_weights()


def drop_graph_(tensor: Tensor) -> None:
    """Makes a leaf again of a tensor into which values that require grad were written; torch cannot do so for views."""
    if not tensor.is_leaf and not tensor._is_view():
        tensor.detach_()


def version_of(tensor: Tensor) -> int:
    """The number of writes to a tensor so far; zero for inference tensors, which do not count writes."""
    return 0 if tensor.is_inference() else tensor._version


def bytes_needed(tensor: Tensor) -> int:
    """Bytes of storage up to the last element of a strided tensor."""
    if not tensor.numel():
        return 0
    last = sum(int(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.element_size()


def unconjugated(tensor: Tensor) -> Tensor:
    """The memory behind a tensor that may be lazily conjugated or negated."""
    tensor = tensor.conj() if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


@contextlib.contextmanager
def quiet_vmap() -> Iterator[None]:
    """A context without vmap's warnings about operators that it runs in a loop, which are only slower."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def batched(func: Callable[..., Any]) -> Callable[..., Any]:
    """Vectorizes func over a leading dimension, by the vmap that torch uses for batched gradients."""
    return _vmap(func)


def vectorized_call(func: Callable[..., Any], arguments: Sequence[Any], positions: Sequence[int], count: int) -> Any:
    """The results of func for `count` points in one call, which `torch.func.vmap` would vectorize in the same way.

    Tensors lie at `positions` of the arguments. Their first dimension counts the points, as does the first dimension of
    all tensors among the results. A random operator raises. Without the bookkeeping for nested containers, this takes
    half the time of `torch.func.vmap`.
    """
    given = list(arguments)
    level = torch._C._functorch._vmap_increment_nesting(count, "error")
    try:
        for position in positions:
            given[position] = torch._C._functorch._add_batch_dim(given[position], 0, level)
        results = func(*given)
        several = isinstance(results, (list, tuple))
        unwrapped = [
            torch._C._functorch._remove_batch_dim(value, level, count, 0) if isinstance(value, Tensor) else value
            for value in (results if several else (results,))
        ]
    finally:
        torch._C._functorch._vmap_decrement_nesting()
    return tuple(unwrapped) if several else unwrapped[0]


@functools.cache
def load_decompositions() -> None:
    """Imports what the first `make_dual` of a process would import, without torch's deprecation warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if os.environ.get("PYTORCH_JIT", "1") == "1":  # make_dual has the same condition
            importlib.import_module("torch._decomp.decompositions_for_jvp")


DUAL_TENSOR_FUNCTIONS = (torch._make_dual, torch._unpack_dual)
"""What `torch.autograd.forward_ad.make_dual` and `unpack_dual` call."""


def make_dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """`torch.autograd.forward_ad.make_dual`, with type annotations."""
    load_decompositions()
    return cast(Tensor, forward_ad.make_dual(primal, tangent))  # type: ignore[no-untyped-call]


def tangent_of(dual: Tensor) -> Tensor | None:
    """The tangent of a dual tensor; None if there is none."""
    return cast("Tensor | None", forward_ad.unpack_dual(dual).tangent)  # type: ignore[no-untyped-call]


def hidden_from_dynamo(func: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Disables torch.compile for func and everything that it calls.

    Like torch.compiler.disable, but does not import the compiler (which takes more than a second), and adds
    no frame between func and its caller, so that warnings still point at the caller.
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
    """Ends an invalid capture in torch's CUDA allocator and releases its pool, if torch did not.

    torch 2.11 leaves the allocator in capture mode. Then the allocator frees no memory and settles no events.
    """
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return  # the capture has ended or never begun; the pool may be released, and must not be released twice
    torch._C._cuda_releasePool(device, pool)


def unfrozen_backends() -> contextlib.AbstractContextManager[None]:
    """A context in which the flags of torch.backends can be set, even if torch's test suites have frozen them."""
    return torch.backends.__allow_nonbracketed_mutation()


def children_of(value: Any) -> tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]] | None:
    """The children of a container of torch's pytree with their paths, and a function that rebuilds the container.

    Containers are lists, tuples, named tuples, dicts, and types that the user has registered. For all other values, the
    result is None.
    """
    if _pytree.tree_is_leaf(value):
        return None
    try:
        return _children_of(value)
    except RecursionError:
        return _children_of(copy.copy(value))  # a container directly inside itself is a child of its copy


def _children_of(value: Any) -> tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]]:
    def is_child(other: Any) -> bool:
        return other is not value

    try:
        found, spec = _pytree.tree_flatten_with_path(value, is_child)
    except ValueError:  # the container was registered without names of its children
        leaves, spec = _pytree.tree_flatten(value, is_child)
        children = [(f"[{i}]", leaf) for i, leaf in enumerate(leaves)]
    else:
        children = [("".join(_step(key) for key in path), child) for path, child in found]
    return children, lambda made: _pytree.tree_unflatten(made, spec)


def _step(key: Any) -> str:
    """One step of a path in Python syntax: [0], ["weight"], .field."""
    text = str(key)
    plain = isinstance(key, _pytree.MappingKey) and isinstance(key.key, str) and text == f"['{key.key}']"
    return f'["{key.key}"]' if plain else text


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table of torch's decompositions of operators into simpler ones, by operator."""
    return dict(importlib.import_module("torch._decomp").decomposition_table)


def preserved_version(tensor: Tensor) -> Any:
    """A context in which writes to a tensor do not change its version counter."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]


def has_memory(tensor: Tensor) -> bool:
    """Whether a strided tensor has memory; the zero tensors that some backwards return have none."""
    return not tensor._is_zerotensor()


def store_of(group: Any) -> Any:
    """The key-value store of a process group."""
    from torch.distributed import distributed_c10d  # only here: torch may be built without it

    return distributed_c10d._get_process_group_store(group)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Sets the timeout of collectives of a process group."""
    from torch.distributed import distributed_c10d  # only here: torch may be built without it

    distributed_c10d._set_pg_timeout(timeout, group)


def timeout_of(group: Any) -> timedelta:
    """The timeout of collectives of a process group."""
    devices = group._device_types
    return cast("timedelta", group._get_backend(devices[0]).options._timeout)


_FUNCTION: Any = torch.autograd.function._SingleLevelFunction
"""The class whose `apply` all custom Functions call."""

_ENTRIES: dict[int, Callable[..., Any]] = {}
"""What `apply` calls instead, by thread."""

_ENTRIES_LOCK = threading.Lock()


def _apply(cls: type, *args: Any, **kwargs: Any) -> Any:
    call = functools.partial(super(_FUNCTION, cls).apply, **kwargs)
    entry = _ENTRIES.get(threading.get_ident())
    return call(*args) if entry is None else entry(cls, call, args)


@contextlib.contextmanager
def functions_through(entry: Callable[..., Any]) -> Iterator[None]:
    """A context in which `Function.apply` calls entry(cls, call, args), even if apply was looked up before.

    Calls in other threads are not affected.
    """
    thread = threading.get_ident()
    outer = _ENTRIES.get(thread)
    try:
        with _ENTRIES_LOCK:
            _ENTRIES[thread] = entry
            _FUNCTION.apply = classmethod(_apply)
        yield
    finally:
        with _ENTRIES_LOCK:
            if outer is None:
                _ENTRIES.pop(thread, None)
            else:
                _ENTRIES[thread] = outer
            if not _ENTRIES and "apply" in vars(_FUNCTION):
                del _FUNCTION.apply


def backward_hooks(owner: Any) -> list[dict[Any, Callable[..., Any]]]:
    """The tables of functions that a tensor, or a module, calls with gradients in backward."""
    names = ("_backward_hooks", "_backward_pre_hooks") if isinstance(owner, torch.nn.Module) else ("_backward_hooks",)
    return [table for name in names if (table := getattr(owner, name))]


def has_accumulation_hooks(parameter: Tensor) -> bool:
    """Whether functions run after a gradient is accumulated into a parameter's grad."""
    return bool(parameter._post_accumulate_grad_hooks)


def hook_tables(owner: Any) -> dict[str, Any]:
    """All tables of hooks of a tensor or a module, by attribute; the value is None if there is no table yet."""
    if isinstance(owner, Tensor):
        return {name: getattr(owner, name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")}
    return {name: table for name, table in vars(owner).items() if "_hooks" in name and isinstance(table, dict)}


@contextlib.contextmanager
def no_modes() -> Iterator[None]:
    """A context without function modes and dispatch modes."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def compiled(func: Callable[..., Any], backend: str, dynamic: bool) -> Callable[..., Any]:
    """Compiles func by torch.compile, with a sufficient recompilation limit; beyond it, calls raise."""
    config = importlib.import_module("torch._dynamo.config")
    graph = torch.compile(func, backend=backend, dynamic=dynamic)

    def run(*args: Any, **kwargs: Any) -> Any:
        with config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
            return graph(*args, **kwargs)

    return run


def fake_mode() -> Any:
    """A mode in which operators compute only shapes, strides and dtypes; its `from_tensor` makes tensors for it."""
    return importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode(allow_non_fake_inputs=True)


def is_registered(func: object) -> bool:
    """Whether a function is an operator of torch.library."""
    custom = importlib.import_module("torch._library.custom_ops").CustomOpDef
    return isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, custom))


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """A context without graph recording, version counting and `__torch_function__`."""
    with torch._C._AutoDispatchBelowADInplaceOrView(), torch._C.DisableTorchFunction():
        yield


def undefined_gradient(output: Tensor) -> Tensor:
    """An alias of an output, made by a node whose backward passes on an undefined gradient."""
    return cast(Tensor, torch._C._functions.UndefinedGrad()(output))


def nodes_behind(tensors: Iterable[Tensor]) -> Iterator[Node]:
    """Yields each node of the graph of some tensors once."""
    seen: set[Node] = set()
    stack = [tensor.grad_fn for tensor in tensors]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack += [behind for behind, _ in node.next_functions]


def is_custom_node(node: Any) -> bool:
    """Whether a node of a graph is a custom Function, of Python or C++."""
    return isinstance(node, torch._C._FunctionBase) or "CppNode" in node.name()


def modes_are_active() -> bool:
    """Whether a dispatch mode is active, so that Python intercepts the operators below autograd."""
    return bool(torch._C._len_torch_dispatch_stack())


@contextlib.contextmanager
def dual_level() -> Iterator[None]:
    """A context with a level of forward-mode AD; func may exit this level early."""
    outer = forward_ad._current_level
    level = torch._C._enter_dual_level()
    forward_ad._current_level = level
    try:
        yield
    finally:
        forward_ad._current_level = outer
        with contextlib.suppress(RuntimeError):
            torch._C._exit_dual_level(level=level)
