"""Specifications in command-line arguments: a function to check, its inputs and its keywords.

FUNCTION  MODULE:NAME  or  FILE.py:NAME; NAME may have attributes after dots, and each part may be called: Net().forward
INPUT     DTYPE[SIZE,...]      float64[64,32]  float64[]  complex128[8]  bool[5]
          DTYPE[SIZE,...]{LOW..HIGH}   int64[64]{0..31}  float64[10]{0.5..2}
          followed by options  ,nograd  ,noncontiguous  ,channels_last  ,layout=coo|csr|csc|bsr|bsc
          ,blocksize=2x2  ,density=0.5
          @FILE                a tensor, or a list of them, that torch.save wrote
          anything else        a Python literal: 3, 0.5, None, (1, 2), 'mean'
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgrad.core.errors import text_of


class SpecError(ValueError):
    """An invalid specification, described in one sentence."""


_TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[^]]*)\](?:\{(?P<range>[^}]*)\})?(?P<options>(?:,.*)?)")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*")
_LAYOUTS = ("strided", "coo", "csr", "csc", "bsr", "bsc")


def call(
    function: str, inputs: Sequence[str], keywords: Sequence[str], seed: int, device: torch.device | str
) -> dict[str, Any]:
    """The arguments func, inputs and kwargs of a check, made from specifications.

    Parameters
    ----------
    function, inputs
        A FUNCTION and INPUTs, as above. An `autograd.Function` stands for its apply; the class of an `nn.Module` is
        called without arguments. A module is converted to the dtype of the first floating or complex input.
    keywords
        NAME=LITERAL, passed to the function; a bare word is a string.
    seed
        Seed of the values of the tensors.
    device
        Device of tensors and modules.

    Raises
    ------
    SpecError
        A specification is malformed, or names something that does not exist.
    """
    generator = torch.Generator().manual_seed(seed)
    arguments = tuple(value for text in inputs for value in parse_input(text, generator, device))
    if not arguments:
        raise SpecError("pass one --input per positional argument of the function, for example --input 'float64[4,3]'")
    named = by_name("--keyword", map(_keyword, keywords))
    func = find(function)
    if isinstance(func, type) and issubclass(func, torch.autograd.Function):
        func = func.apply
    elif isinstance(func, type) and issubclass(func, torch.nn.Module):
        try:
            func = func()
        except TypeError as error:
            raise SpecError(
                f"{function} is a module class that needs arguments ({error}): name an instance, or a function "
                "without parameters that returns one, for example make_layer()"
            ) from None
    if isinstance(func, torch.nn.Module):
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        dtypes = [value.dtype for value in tensors if value.is_floating_point() or value.is_complex()]
        func = func.to(device=device, dtype=dtypes[0] if dtypes else torch.float64)
    elif not callable(func):
        raise SpecError(f"{function} is of type {type(func).__name__}, which cannot be called")
    return {"func": func, "inputs": arguments, "kwargs": named}


def find(text: str) -> Any:
    """Imports the module or file, and returns the object with this name, called where the name has "()".

    Raises
    ------
    SpecError
        There is no such file, module or name, or importing or calling it raised.
    """
    where, colon, path = text.rpartition(":")
    if not colon or not where or not path:
        raise SpecError(f"a function must be module:name or file.py:name, got {text!r}")
    found: Any = _module(where)
    name = where
    for step in path.split("."):
        attribute = step.removesuffix("()")
        try:
            found = getattr(found, attribute)
        except AttributeError:
            raise SpecError(f"{name} has no attribute {attribute!r}") from None
        name = f"{name}:{step}" if name == where else f"{name}.{step}"
        if attribute != step:
            try:
                found = found()
            except (Exception, SystemExit) as error:
                raise SpecError(f"calling {name} raised {text_of(error)}") from error
    return found


def _module(where: str) -> Any:
    is_file = where.endswith(".py")
    path = Path(where)
    if is_file and not path.is_file():
        raise SpecError(f"there is no file {where}")
    # As with `python file.py` and `python -m module`, modules in the same directory can be imported.
    directory = str((path.parent if is_file else Path()).resolve())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        if not is_file:
            return importlib.import_module(where)
        name = path.stem if path.stem not in sys.modules else f"_checked_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            raise SpecError(f"there is no module {where!r} (Python also looked in {directory})") from None
        raise SpecError(f"importing {where} raised ModuleNotFoundError: {error}") from error
    except (Exception, SystemExit) as error:
        raise SpecError(f"importing {where} raised {text_of(error)}") from error


def parse_input(text: str, generator: torch.Generator, device: torch.device | str) -> tuple[Any, ...]:
    """The arguments that an INPUT specifies: a single one, or those saved in a file.

    Floating and complex tensors require grad unless there is ,nograd; their components are normal or, in a range,
    uniform in [LOW, HIGH). Integers are uniform in LOW..HIGH, both included. An element of a sparse tensor is specified
    with probability `density`, by default 0.5.

    Raises
    ------
    SpecError
        The specification is malformed.
    """
    if text.startswith("@"):
        return _loaded(text[1:], device)
    match = _TENSOR.fullmatch(text.strip())
    if match is None:
        try:
            return (ast.literal_eval(text),)
        except (ValueError, SyntaxError):
            raise SpecError(
                "an input must be a tensor (for example float64[64,32] or int64[64]{0..31}), @FILE or a Python "
                f"literal, got {text!r}"
            ) from None
    dtype = getattr(torch, match["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise SpecError(f"torch has no dtype {match['dtype']!r}, in {text!r}")
    differentiable = dtype.is_floating_point or dtype.is_complex
    try:
        options = _options(match["options"])
        tensor = _random(dtype, _shape(match["shape"]), match["range"], generator)
        tensor = _laid_out(tensor, options, generator).to(device)
    except SpecError as error:
        raise SpecError(f"{error}, in {text!r}") from None
    except (RuntimeError, ValueError, IndexError, TypeError, OverflowError) as error:
        raise SpecError(f"{text!r} cannot be made: {str(error).splitlines()[0]}") from error
    return (tensor.detach().requires_grad_(differentiable and "nograd" not in options),)


def _shape(text: str) -> tuple[int, ...]:
    sizes = [size.strip() for size in text.split(",")] if text.strip() else []
    if not all(size.isdecimal() for size in sizes):
        raise SpecError("the sizes of a tensor must be integers separated by commas")
    return tuple(int(size) for size in sizes)


def _options(text: str) -> dict[str, str]:
    given = dict(option.strip().partition("=")[::2] for option in text.split(",")[1:])
    known = ("nograd", "noncontiguous", "channels_last", "layout", "blocksize", "density")
    for name, value in given.items():
        if name not in known or bool(value) != (name in known[3:]):
            raise SpecError(
                "the options of a tensor are nograd, noncontiguous, channels_last, layout=, blocksize= and density=, "
                f"got {name + ('=' + value if value else '')!r}"
            )
    options = {"layout": "strided", "blocksize": "2x2", "density": "0.5", **given}
    if options["layout"] not in _LAYOUTS:
        raise SpecError(f"layout must be one of {', '.join(_LAYOUTS)}")
    if not re.fullmatch(r"\d+x\d+", options["blocksize"]):
        raise SpecError("blocksize must be two sizes separated by an x, for example 2x2")
    if not re.fullmatch(_NUMBER, options["density"]) or not 0 <= float(options["density"]) <= 1:
        raise SpecError("density must be a number from 0 to 1")
    return options


def _random(dtype: torch.dtype, shape: tuple[int, ...], limits: str | None, generator: torch.Generator) -> Tensor:
    if dtype is torch.bool:
        if limits is not None:
            raise SpecError("a bool tensor has no range")
        return torch.randint(2, shape, generator=generator).bool()
    # Drawn in double precision, so that a seed gives the same values in every dtype, up to rounding.
    wide = torch.complex128 if dtype.is_complex else torch.float64
    if limits is None:
        if not (dtype.is_floating_point or dtype.is_complex):
            example = f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]{{0..9}}"
            raise SpecError(f"integers need a range, for example {example}")
        return torch.randn(shape, dtype=wide, generator=generator).to(dtype)
    match = _RANGE.fullmatch(limits)
    if match is None or float(match[1]) > float(match[2]):
        raise SpecError("a range must be low..high, as in {0..31} or {0.5..2}")
    if dtype.is_floating_point or dtype.is_complex:
        low, high = float(match[1]), float(match[2])
        parts = torch.rand((*shape, 2 if dtype.is_complex else 1), dtype=torch.float64, generator=generator)
        parts = low + (high - low) * parts
        return (torch.view_as_complex(parts) if dtype.is_complex else parts.squeeze(-1)).to(dtype)
    try:
        first, last = int(match[1]), int(match[2])
        smallest, largest = torch.tensor([first, last], dtype=dtype).tolist()
    except (ValueError, RuntimeError, OverflowError):
        raise SpecError("the range of integers must be two integers that fit the dtype") from None
    return torch.randint(smallest, largest + 1, shape, generator=generator).to(dtype)


def _laid_out(tensor: Tensor, options: dict[str, str], generator: torch.Generator) -> Tensor:
    layout = options["layout"]
    if layout != "strided":
        if "noncontiguous" in options or "channels_last" in options:
            raise SpecError("noncontiguous and channels_last are for strided tensors")
        specified = torch.rand(tensor.shape, generator=generator) < float(options["density"])
        tensor = tensor * specified
        blocks = tuple(int(size) for size in options["blocksize"].split("x"))
        convert: Callable[..., Tensor] = getattr(tensor, f"to_sparse_{layout}")
        return convert(blocks) if layout in ("bsr", "bsc") else convert()
    if "channels_last" in options:
        return tensor.contiguous(memory_format=torch.channels_last)
    if "noncontiguous" in options:
        if tensor.ndim == 0:
            raise SpecError("a tensor without dimensions is contiguous")
        return torch.stack([tensor, tensor], -1).select(-1, 0)
    return tensor


def _loaded(path: str, device: torch.device | str) -> tuple[Any, ...]:
    path, *options = path.split(",")
    if options not in ([], ["nograd"]):
        raise SpecError(f"after @FILE only nograd is allowed, got {','.join(options)!r}")
    if not path:
        raise SpecError("@ must be followed by the path of a file, as in @inputs.pt")
    if not Path(path).is_file():
        raise SpecError(f"there is no file {path}")
    try:
        loaded = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        raise SpecError(
            f"{path} does not contain tensors saved by torch.save: {text_of(error).splitlines()[0]}"
        ) from error
    values = tuple(loaded) if isinstance(loaded, list | tuple) else (loaded,)
    for value in values:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            value.requires_grad_(not options)
    return values


def by_name(option: str, given: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Values by their names; raises if an option gives a name twice."""
    found: dict[str, Any] = {}
    for name, value in given:
        if name in found:
            raise SpecError(f"{option} gives {name} twice")
        found[name] = value
    return found


def _keyword(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise SpecError(f"a keyword must be name=value, for example dim=1 or reduction=sum, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        if value.isidentifier():
            return name, value
        raise SpecError(f"the value of a keyword must be a Python literal or a bare word, got {text!r}") from None


def described(value: Any) -> str:
    """An argument as text, written like an INPUT."""
    if not isinstance(value, Tensor):
        return repr(value)
    text = f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]"
    if value.layout is not torch.strided:
        text += f",layout={str(value.layout).removeprefix('torch.').removeprefix('sparse_')}"
    return text + (",nograd" if not value.requires_grad and (value.is_floating_point() or value.is_complex()) else "")
