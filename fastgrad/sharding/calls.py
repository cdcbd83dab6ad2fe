"""Describes the call of a check on each rank, so that the ranks can compare their calls."""

from __future__ import annotations

import hashlib
import io
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from fastgrad._version import __version__
from fastgrad.core.ranks import RankError
from fastgrad.problem.signature import function_name, kind_of
from fastgrad.report.settings import Settings

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
"""Types whose repr is the same in each process and identifies the value."""

_DIGITS = 12
"""Number of hexadecimal digits of a digest. If there are a million values, the probability that any two of them
have the same digest is about 2e-3."""

_LONGEST = 80
"""Largest number of characters of a value that messages show instead of its digest."""


def described(func: Callable[..., Any], values: Mapping[str, Any], settings: Settings) -> dict[str, str]:
    """A call as text, part by part: versions, func with what it captures, and arguments, with digests of values."""
    name = getattr(func, "__qualname__", "") or function_name(func)
    found = {"fastgrad": f"version {__version__}", "torch": f"version {torch.__version__}"}
    found["func"] = f"{getattr(func, '__module__', '')}.{name}, digest {digest(func)}"
    found |= {name: _text(value) for name, value in values.items()}
    return found | {field.name: repr(getattr(settings, field.name)) for field in fields(settings)}


def reject_differences(calls: Sequence[Mapping[str, Any]], should_be: str) -> None:
    """Raises a RankError if a rank's call differs from the call of rank 0; should_be: what all ranks must call."""
    first = calls[0]
    for rank, other in enumerate(calls):
        for part in dict.fromkeys([*first, *other]):
            mine, theirs = first.get(part, "missing"), other.get(part, "missing")
            if mine != theirs:
                raise RankError(
                    f"The calls of the ranks differ: {part} is {mine} on rank 0, and {theirs} on rank {rank}. All "
                    f"ranks must call {should_be}."
                )


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        stride = f", stride {tuple(value.stride())}" if value.layout is torch.strided else f", {value.layout}"
        grad = ", requires grad" if value.requires_grad else ""
        return f"{kind_of(value)}{stride}{grad}, values {digest(value)}"
    is_short = isinstance(value, _PLAIN) and len(_plain(value)) <= _LONGEST
    return _plain(value) if is_short else f"{type(value).__name__}, digest {digest(value)}"


def _plain(value: Any) -> str:
    """A value of _PLAIN as text; device numbers are omitted, because they differ between ranks."""
    return value.type if isinstance(value, torch.device) else repr(value)


def digest(value: Any) -> str:
    """A hexadecimal digest of a value."""
    return _digest(value, {})


def _digest(value: Any, seen: dict[int, Any]) -> str:
    found = hashlib.blake2b()
    _add(found.update, value, seen)
    return found.hexdigest()[:_DIGITS]


def _add(update: Callable[[Any], None], value: Any, seen: dict[int, Any]) -> None:
    """Adds a value to a digest; for unknown objects only the class."""
    kind = type(value)
    update(f"{kind.__module__}.{kind.__qualname__}(".encode())
    if isinstance(value, _PLAIN):
        update(_plain(value).encode())
    elif id(value) not in seen:  # a closure may hold its own function
        seen[id(value)] = value
        if isinstance(value, Tensor):
            update(f"{kind_of(value)} {value.requires_grad} {value.device.type} {value.layout}".encode())
            update(_bytes_of(value))
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            update(f"{value.dtype} {value.shape}".encode())
            update(value.tobytes())
        elif isinstance(value, (set, frozenset)):  # their order differs between processes
            update(" ".join(sorted(_digest(held, dict(seen)) for held in value)).encode())
        else:
            for held in _held_by(value):
                _add(update, held, seen)
    update(b")")


def _held_by(value: Any) -> Sequence[Any]:
    """The parts of an object that identify it."""
    if isinstance(value, Mapping):
        return [held for item in value.items() for held in item]
    if isinstance(value, (tuple, list, deque)):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Module):
        return [value.training, *value.named_parameters(), *value.named_buffers(), type(value).forward]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        held = [*map(_contents, value.__closure__ or ()), *_globals_of(value)]
        return [value.__module__, value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, held]
    if isinstance(value, CodeType):
        return [value.co_code, value.co_names, value.co_varnames, *value.co_consts]
    if isinstance(value, type):
        own = [held for held in vars(value).values() if isinstance(held, (FunctionType, staticmethod))]
        return [value.__module__, value.__qualname__, *own]
    if isinstance(value, staticmethod):
        return [value.__func__]
    owner = getattr(value, "__self__", None)  # the custom Function, if the value is the apply of one
    return [getattr(value, "__qualname__", ""), owner if isinstance(owner, type) else None]


def _globals_of(function: FunctionType) -> list[Any]:
    """Numbers, tensors and functions of its module to which a function, or one inside it, refers."""
    named = [function.__globals__.get(name) for code in _codes(function.__code__) for name in code.co_names]
    return [
        value
        for value in named
        if isinstance(value, (*_PLAIN, Tensor, np.ndarray))
        or (isinstance(value, FunctionType) and value.__module__ == function.__module__)
    ]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of the functions inside it."""
    yield code
    for held in code.co_consts:
        if isinstance(held, CodeType):
            yield from _codes(held)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return None


def _bytes_of(tensor: Tensor) -> Any:
    """The values of a tensor, as bytes; empty if the tensor cannot be saved."""
    value = tensor.detach()
    if type(tensor) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        value = value.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return value.view(torch.uint8).numpy() if value.numel() else b""
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except Exception:  # torch.save does not support every subclass
        return b""
    return file.getvalue()
