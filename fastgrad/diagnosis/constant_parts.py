"""Results and operands of operators that a backward may treat as constants, and func with these held constant."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastgrad.core.torch_private import tensors_in
from fastgrad.problem.signature import place_name
from fastgrad.problem.validation import is_differentiable

_NOT_OF_THE_USER = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules["fastgrad"]))

MAX_ELEMENTS = 1 << 22
"""Largest number of values that are kept: 32 MiB in double precision. A func with more values is not examined."""

_ORDINALS = {0: "first", 1: "second", 2: "third"}


@dataclass(frozen=True)
class OperatorCall:
    """A call of an operator: its name, file and line; time: its number among the calls of this operator there."""

    name: str
    file: str
    line: int
    time: int

    def __str__(self) -> str:
        """The operator and its line."""
        return f"{self.name} ({place_name(self.file, self.line)})"


@dataclass(frozen=True)
class ConstantPart:
    """The result of a call of an operator or, if `operand` is a number, the operand with this number."""

    call: OperatorCall
    operand: int | None = None

    def __str__(self) -> str:
        """The description of the part and its line."""
        which = "result" if self.operand is None else f"{_ORDINALS.get(self.operand, self.operand + 1)} operand"
        return f"the {which} of {self.call}"


@dataclass(frozen=True)
class _Known:
    """The value of a part: a result that depends on the inputs and does not require grad, or an operand.

    is_cut: whether recording ends at this result, for example of detach(): an operand requires grad, and gradients were
    recorded. Otherwise the operator ran without recording, for example in the forward of a custom Function.
    is_reduction: whether the result has fewer elements than the largest operand.
    """

    value: Any
    is_cut: bool = False
    is_reduction: bool = False


class _Calls(TorchFunctionMode):
    """A mode that numbers the calls of each operator at each line."""

    def __init__(self) -> None:
        super().__init__()
        self._times: Counter[tuple[str, str, int]] = Counter()

    def _call(self, func: Callable[..., Any]) -> OperatorCall | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_OF_THE_USER):
            frame = frame.f_back
        if frame is None:
            return None
        place = _name_of(func), frame.f_code.co_filename, frame.f_lineno
        self._times[place] += 1
        return OperatorCall(*place, self._times[place])


class ConstantParts(_Calls):
    """A mode that records results that depend on the inputs but do not require grad, and their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[ConstantPart, _Known] = {}
        self._derived: dict[int, Tensor] = {}  # the tensors are kept, so that no other tensor gets their ids
        self._left = MAX_ELEMENTS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling() or self._left < 0:
            return func(*args, **(kwargs or {}))  # traced as if this mode were not active
        result = func(*args, **(kwargs or {}))
        tensors = tensors_in((args, kwargs))
        sources = [tensor for tensor in tensors if tensor.requires_grad or id(tensor) in self._derived]
        call = self._call(func)
        is_value = isinstance(result, float) or is_differentiable(result)
        if call is None or not sources or not is_value or _is_in_place(call.name):
            return result
        if isinstance(result, Tensor):
            if result.requires_grad:
                return result
            self._derived[id(result)] = result
        size = result.numel() if isinstance(result, Tensor) else 1
        is_reduction = size < max(tensor.numel() for tensor in sources)
        is_cut = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sources)
        self._keep(ConstantPart(call), result, is_cut, is_reduction)
        if not is_cut and len(sources) > 1:  # operators with several operands, for example a sum or a product
            for number, value in enumerate(args):
                if any(value is source for source in sources):
                    self._keep(ConstantPart(call, number), value)
        return result

    def _keep(self, part: ConstantPart, value: Any, is_cut: bool = False, is_reduction: bool = False) -> None:
        self._left -= value.numel() if isinstance(value, Tensor) else 1
        if self._left < 0:
            self.known.clear()
            self._derived.clear()
        else:
            self.known[part] = _Known(_copy(value), is_cut, is_reduction)

    @property
    def cuts(self) -> tuple[ConstantPart, ...]:
        """The results at which recording ends."""
        return tuple(part for part, known in self.known.items() if known.is_cut)

    def groups(self) -> Iterator[tuple[ConstantPart, ...]]:
        """Sets of parts that are not cuts and may be treated as constants, the most likely first."""
        # The last parts first: a value that is computed from a constant is also constant.
        others = [part for part, known in reversed(self.known.items()) if not known.is_cut]
        reductions = tuple(part for part in others if self.known[part].is_reduction)
        singles = sorted(others, key=lambda part: part.operand is not None)
        groups = (*((part,) for part in reductions), reductions, *((part,) for part in singles))
        yield from (group for group in dict.fromkeys(groups) if group)


class HeldConstant(_Calls):
    """A mode in which the parts `held` have their recorded values, as constants."""

    def __init__(self, parts: ConstantParts, held: Iterable[ConstantPart]) -> None:
        super().__init__()
        self._held = {part: parts.known[part].value for part in held}
        self._calls_with = {part.call for part in self._held}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        call = self._call(func)
        if call is None or call not in self._calls_with:
            return func(*args, **(kwargs or {}))
        operands = [_copy(self._held.get(ConstantPart(call, number), value)) for number, value in enumerate(args)]
        result = func(*operands, **(kwargs or {}))
        return _copy(self._held.get(ConstantPart(call), result))


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _name_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    return str(func.__self__.__name__) if name == "__get__" else name  # type: ignore[attr-defined]


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and (not name.endswith("__") or name.startswith(("__i", "__set")))
