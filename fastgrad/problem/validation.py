"""Validates func, its inputs and its outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastgrad.core import torch_private
from fastgrad.core.errors import warn
from fastgrad.core.precision import LOWER
from fastgrad.problem.coordinates import Block, overlap, overlaps_itself, own_values

_SUPPORTED = frozenset({torch.float64, torch.complex128, *LOWER})
"""Dtypes whose elements the compiled module can perturb and read."""

DISABLED = "gradients are disabled here"
"""The beginning of the text of `disabled_gradients`."""


def is_integer(value: Any) -> bool:
    """Whether an argument is an integer, of Python or of NumPy; True and False do not count as integers."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def as_seed(seed: Any, expected: str = "an integer of 64 bits") -> int:
    """The seed; raises a ValueError unless it is a 64-bit integer. expected: what the caller accepts, in words."""
    if not (is_integer(seed) and -(2**63) <= seed < 2**63):
        raise ValueError(f"seed must be {expected}, got {seed!r}.")
    return int(seed)


def as_float(name: str, value: Any, zero: bool = True) -> float:
    """The value of a keyword as a float; raises unless it is at least zero or, if not `zero`, positive and finite."""
    if type(value) is float and (value >= 0 if zero else value > 0) and value < math.inf:
        return value
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_meta:
        value = value.item()  # torch's arithmetic also takes tensors of one number
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    number = nearest_float(value)
    if not (number >= 0 if zero else 0 < number < math.inf):
        raise ValueError(f"{name} must be {'at least zero' if zero else 'positive and finite'}, got {value!r}.")
    return number


def nearest_float(value: Real) -> float:
    """The number as a float; infinite if it is beyond the range of floats."""
    try:
        return float(value)
    except OverflowError:  # an integer
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]


def as_bool(name: str, value: Any) -> bool:
    """The truth value of a keyword; raises a TypeError if it has none."""
    try:
        return bool(value)
    except (RuntimeError, TypeError, ValueError) as error:  # for example, of a tensor or an array
        raise TypeError(f"{name} must be True or False, got {value!r}.") from error


def check_kwargs(kwargs: object) -> None:
    """Raises a TypeError unless kwargs can be keyword arguments of func."""
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise TypeError(f"kwargs must be a mapping from names to keyword arguments, got {kwargs!r}.")


def disabled_gradients() -> str | None:
    """Why func does not record gradients here, as text; None if it does."""
    if torch.is_grad_enabled():
        return None
    inference = torch.is_inference_mode_enabled()
    mode = "torch.inference_mode" if inference else "torch.no_grad or torch.set_grad_enabled(False)"
    return f"{DISABLED} by {mode}"


def raise_without_graph(who: str) -> NoReturn:
    """Raises a ValueError, because no output of func requires grad; who: the function that needs such an output."""
    because = disabled_gradients()
    if because is None and torch_private.transforms_are_active():
        because = "its outputs may be tensors of the transform of torch.func that is active"
    reason = f": {because}" if because else ""
    raise ValueError(f"{who} needs a func with an output that requires grad, but this func has none{reason}.")


def is_differentiable(value: Any) -> bool:
    """Whether a value is a tensor that can carry a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def differentiable_inputs(
    inputs: tuple[Any, ...], names: tuple[str, ...], warn_of_precision: bool, who: str = "gradcheck"
) -> list[int]:
    """The positions of the inputs to check; raises if an input cannot be checked, warns if its precision is low.

    who: the function that needs such inputs.
    """
    for i, value in enumerate(inputs):
        held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        if any(isinstance(v, Tensor) and v.requires_grad for v in held):
            raise TypeError(
                f"Input {i} is a {type(value).__name__} of tensors that require grad: pass them one by one, or use "
                "fastgrad.check."
            )
    positions = [i for i, value in enumerate(inputs) if isinstance(value, Tensor) and value.requires_grad]
    for i in positions:
        value = inputs[i]
        if warn_of_precision and value.dtype not in (torch.float64, torch.complex128):
            warn(
                f"{names[i] if names else f'Input #{i}'} requires gradient and is not a double precision floating "
                f"point or complex tensor. Rounding to its dtype, {value.dtype}, may be larger than the change of "
                "func over a step of eps, so the check may fail."
            )
        _check_values(value, names[i] if names else f"input {i}", names[i] if names else f"The {i}th input")
    if not positions:
        count = len(inputs)
        few = "there are no inputs" if not count else "the only input is not a tensor with requires_grad=True"
        raise ValueError(
            f"{who} expects at least one input tensor to require gradient, but "
            + (few if count < 2 else f"none of the {count} inputs is a tensor with requires_grad=True")
            + "."
        )
    _check_memory(inputs, positions, names)
    return positions


def _check_values(value: Tensor, name: str, subject: str) -> None:
    """Raises unless the elements of an input can be perturbed one by one; name, subject: its names in messages."""
    _check_kind(value, name, subject)
    if value.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{subject} was created under torch.inference_mode, so autograd does not record all operations on it: pass "
            "a copy, input.detach().clone().requires_grad_()."
        )
    values = own_values(value)
    if values is None or (values.is_contiguous() and values.numel()):
        return  # the memory is not accessible, or elements do not overlap
    if any(stride == 0 and size > 1 for size, stride in zip(values.shape, values.stride(), strict=True)):
        raise RuntimeError(
            f"{subject} has a dimension with stride 0. Several of its elements share one memory location and cannot be "
            "perturbed one by one: pass a copy, input.detach().clone().requires_grad_()."
        )
    if overlaps_itself(values):
        raise RuntimeError(
            f"{subject} overlaps itself in memory (shape {tuple(values.shape)}, stride {values.stride()}): its "
            "elements cannot be perturbed one by one; pass a copy, input.detach().clone().requires_grad_()."
        )


def _check_kind(value: Tensor, name: str, subject: str) -> None:
    """Raises unless the compiled module supports such a tensor; name, subject: its names in messages."""
    if value.is_nested:
        raise NotImplementedError(f"fastgrad does not support nested tensors, but {name} is one.")
    if torch_private.is_transformed(value):
        raise NotImplementedError(f"fastgrad does not support tensors of a torch.func transform, but {name} is one.")
    if value.is_meta:
        raise ValueError(f"{subject} is on the meta device: a gradient check needs values.")
    if value.dtype not in _SUPPORTED:
        raise NotImplementedError(f"fastgrad does not support {value.dtype}, the dtype of {name}.")


def _check_memory(inputs: tuple[Any, ...], positions: list[int], names: tuple[str, ...]) -> None:
    """Raises if two different inputs share memory."""
    for k, i in enumerate(positions):
        for j in positions[:k]:
            if inputs[i] is inputs[j]:
                continue
            values, others = own_values(inputs[i]), own_values(inputs[j])
            if values is not None and others is not None and overlap(values, others):
                pair = f"{names[j]} and {names[i]}" if names else f"Inputs {j} and {i}"
                raise RuntimeError(
                    f"{pair} are different tensors that overlap in memory: perturbing one also changes the other, "
                    "but autograd treats them as independent; pass the same tensor twice, or copies."
                )


def check_outputs(results: tuple[Any, ...]) -> None:
    """Raises unless func returned a flat tuple of tensors that can be differentiated."""
    if results and not any(isinstance(value, Tensor) for value in results):
        kinds = ", ".join(type(value).__name__ for value in results)
        raise TypeError(f"func must return a Tensor or a tuple of Tensors, got {kinds}.")
    for i, value in enumerate(results):
        if isinstance(value, (list, tuple, dict)):
            raise TypeError(
                f"func must return a Tensor or a flat tuple of them; result {i} is a {type(value).__name__}."
            )
    # If no output requires grad, the differences of all outputs are computed and must be zero.
    compares_all = not any(isinstance(value, Tensor) and value.requires_grad for value in results)
    for i, value in enumerate(results):
        if not isinstance(value, Tensor) or not (value.requires_grad or (compares_all and is_differentiable(value))):
            continue
        _check_kind(value, f"result {i} of func", f"Result {i} of func")
        if value.layout is not torch.strided:
            kind = "MKLDNN" if value.layout is torch_private.MKLDNN else "Sparse"
            raise ValueError(
                f"{kind} output is not supported at gradcheck yet. "
                "Return output.to_dense(masked_grad=...) from func instead."
            )


def changed_message(expected: Block, found: Any, when: str) -> str:
    """The error message for an output of another kind than in the first call."""
    if isinstance(found, Tensor) and found.device != expected.tensor.device:
        what, got = "on the same device", f"devices {expected.tensor.device} and {found.device}"
    elif not isinstance(found, Tensor):
        what, got = "as a tensor in the same place", f"{found!r} as result {expected.position}"
    elif found.shape != expected.tensor.shape:
        what, got = "with the same shape", f"shapes {expected.tensor.shape} and {found.shape}"
    else:
        what, got = "with the same dtype", f"dtypes {expected.tensor.dtype} and {found.dtype}"
    return f"Expected `func` to return outputs {what} when inputs are {when}, but got: {got}."
