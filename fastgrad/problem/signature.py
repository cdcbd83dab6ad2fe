"""Names of a function and its parameters, and descriptions of tensors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.nn import Module


def function_name(func: Callable[..., Any]) -> str:
    """The name of func, of the Function whose apply func is, or of the class of a callable object; empty: a lambda."""
    func = _unwrapped(func)
    if isinstance(func, partial):
        return function_name(func.func)
    custom = _function_class(func)
    if custom is not None:
        return custom.__name__
    name = str(getattr(func, "__name__", "") or type(func).__name__)
    return "" if name == "<lambda>" else name


def parameter_names(func: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's positional parameters, up to *args."""
    func = _unwrapped(func)
    custom = _function_class(func)
    called: Callable[..., Any] = func
    if custom is not None:
        called = custom.forward
    elif isinstance(func, Module):
        called = func.forward
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except Exception:  # builtins may have no signature, and objects with their own __signature__ may raise anything
        return ()
    if custom is not None and custom.setup_context is Function.setup_context:
        parameters = parameters[1:]  # ctx
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in takewhile(lambda one: one.kind in positional, parameters))


def source_of(func: Callable[..., Any]) -> str:
    """File and line of the backward of a custom Function, of a module's forward, or of a function; empty if unknown."""
    func = _unwrapped(func)
    custom = _function_class(func)
    called: Any = custom.backward if custom is not None else func
    if isinstance(func, Module):
        called = type(func).forward
    elif isinstance(func, partial):
        return source_of(func.func)
    code = getattr(called, "__code__", None)
    return place_name(code.co_filename, code.co_firstlineno) if code is not None else ""


def place_name(file: str, line: int) -> str:
    """A line as text: ``ops.py:12``, relative to the current directory if possible; in IPython, ``In[3], line 12``."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cell = shell.compile.format_code_name(file) if shell is not None else None
    if cell is not None:
        return f"{cell[1]}, line {line}"
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"


def kind_of(tensor: Tensor) -> str:
    """The dtype and shape of a tensor: ``float64[3, 4]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _unwrapped(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function that decorators wrap, if they set `__wrapped__`; otherwise func."""
    try:
        unwrapped: Callable[..., Any] = inspect.unwrap(func)
    except ValueError:  # there is a cycle of functions that wrap each other
        return func
    return unwrapped


def _function_class(func: Callable[..., Any]) -> type[Function] | None:
    """The custom Function to which func belongs if it is an apply; otherwise None."""
    owner = getattr(func, "__self__", None)
    return owner if isinstance(owner, type) and issubclass(owner, Function) else None
