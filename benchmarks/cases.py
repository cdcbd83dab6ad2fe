"""The one grid of cases that benchmarks and parity tests share: torch's own operator samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fastgrad.second_order import differentiable_outputs

MOST_ENTRIES = 4_000_000
"""Samples with a larger Jacobian are listed and left out: torch slow mode holds it several times."""


@dataclass(frozen=True)
class Case:
    """One function with its differentiable inputs: func(*inputs), checkable by torch and by fastgrad."""

    name: str
    func: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    nondet_tol: float = 0.0


def entries(case: Case, second_order: bool = False) -> int:
    """Real entries of the Jacobian that a check of this case compares; 0 where func raises."""

    def coordinates(values: Any) -> int:
        return sum(value.numel() * (2 if value.is_complex() else 1) for value in values)

    try:
        m = coordinates(differentiable_outputs(case.func(*case.inputs)))
    except Exception:
        return 0
    n = coordinates(case.inputs)
    return (n + m) * n if second_order else n * m


def operators(dtype: torch.dtype, *supports: str) -> list[Any]:
    """The OpInfo entries of the installed torch with autograd for a dtype on the CPU, and with these flags set."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [
        op
        for op in op_db
        if op.supports_autograd
        and dtype in op.supported_backward_dtypes("cpu")
        and all(getattr(op, flag) for flag in supports)
    ]


def operator_cases(op: Any, dtype: torch.dtype, limit: int) -> Iterator[Case]:
    """Up to `limit` samples of an operator whose differentiable inputs are strided tensors.

    The function takes the tensors that require grad, puts them back into the sample, and applies the
    operator's gradcheck wrapper and the sample's output processing, as torch's operator tests do.
    """
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(islice(op.sample_inputs("cpu", dtype, requires_grad=True), 4 * limit))
    found = 0
    for number, sample in enumerate(samples):
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        inputs = tuple(leaves[i] for i in positions)
        if not inputs or any(value.layout is not torch.strided for value in inputs) or found == limit:
            continue
        found += 1
        name = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}[{number}]"
        func = _recomposed(op, leaves, spec, positions, sample.output_process_fn_grad)
        yield Case(name, func, inputs, op.gradcheck_nondet_tol)


def _recomposed(op: Any, leaves: list[Any], spec: Any, positions: list[int], process: Any) -> Callable[..., Any]:
    def func(*inputs: torch.Tensor) -> Any:
        filled = list(leaves)
        for position, value in zip(positions, inputs, strict=True):
            filled[position] = value
        first, args, kwargs = pytree.tree_unflatten(filled, spec)
        output = op.gradcheck_wrapper(op.op, first, *args, **kwargs)
        return process(output) if process is not None else output

    return func
