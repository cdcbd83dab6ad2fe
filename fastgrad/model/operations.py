"""Checks one recorded operation separately at its recorded inputs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from fastgrad.api.checkers import check
from fastgrad.core.random import SKETCH_COTANGENTS, SKETCH_DIRECTIONS, RandomState, direction, uniform_like
from fastgrad.engines.sketch import directional_differences
from fastgrad.lowprecision.reference import without_autocast
from fastgrad.lowprecision.rounding import DOUBLE
from fastgrad.model.not_finite import not_finite_values
from fastgrad.model.recorder import Call, padding_row
from fastgrad.model.step import as_double
from fastgrad.problem.arguments import as_tuple
from fastgrad.problem.problem import Problem
from fastgrad.problem.signature import kind_of
from fastgrad.report.model_data import Operation, OperationVerdict
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings

SCREEN_ERROR = 1e-6
"""The error of v^T J u, relative to its terms, up to which an operator of torch counts as right: a hundred times the
error of differences in double precision for smooth functions, a thousandth of the allowed error of entries."""

SMALLER_STEP = 2.0**-7
"""The second step, relative to eps. It crosses a hundredth of the kinks, and its rounding is still only 1e-8."""


NEXT_TO = 1e-2
"""Distance by which inputs at kinks and jumps are moved, relative to their root mean square."""


LARGE = 1 << 20
"""If the inputs of a custom Function hold at least this many numbers, only the first rows are checked in full."""

FEWER = 8
"""The number of all rows, divided by the number of those first rows."""

ON_FEWER_ROWS = (
    "only the first rows of the inputs were checked in fast mode; for all rows, one sum of derivatives, v^T J u for "
    "random u and v, agrees with differences"
)
"""The text for an operation of which only the first rows were checked in full, in the table."""

AT_KINK = (
    "checked next to its inputs, because at the inputs themselves the gradient does not agree with differences, as at "
    "a kink or a jump"
)
"""The text for an operation that was checked at moved inputs."""

_VERDICTS: dict[str, OperationVerdict] = {"passed": "right", "failed": "wrong"}
"""The verdict on an operation, by that of its check in fast mode; for all other verdicts, it is undecided."""


class _NotFiniteError(Exception):
    """A result of an operation is not finite."""


@dataclass
class _Screen:
    error: float
    """The error of v^T J u, relative to the root of the sum of squares of its terms."""
    scale: float
    """The size of a typical entry of J^T v, from the gradient or, if this is larger, from the differences."""
    agrees: bool
    evaluations: int = 0
    vjps: int = 0


def check_operation(call: Call, settings: Settings, only_finite: bool = False) -> Operation:
    """Checks one operation.

    An operator of torch is first tested by one number, v^T J u for random u and v. Custom Functions, and operators that
    do not pass this test, are checked in fast mode. With only_finite, the operation is not checked if its inputs or
    results are not finite.
    """
    start = time.perf_counter()
    kinds = tuple(kind_of(tensor) for tensor in call.tensors)
    omitted = call.omitted
    if only_finite and any(not_finite_values(tensor) is not None for tensor in call.tensors):
        omitted = omitted or "its inputs are not finite"
    operation = Operation(call.name, kinds, tuple(call.sites), call.count, "not checked", omitted)
    for double in () if omitted else (True, False):
        leaves, func = _replay(call, double, only_finite)
        dtype = ", ".join(dict.fromkeys(str(leaf.dtype).removeprefix("torch.") for leaf in leaves))
        try:
            operation = _checked(replace(operation, detail="", dtype=dtype), call, func, leaves, settings)
            break
        except _NotFiniteError:
            operation = replace(operation, detail="its results are not finite")
            break
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError) as error:
            detail = f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            operation = replace(operation, detail=detail, dtype=dtype)
        if not any(tensor.dtype in DOUBLE for tensor in call.tensors):
            break
    return replace(operation, seconds=time.perf_counter() - start)


def _checked(
    operation: Operation, call: Call, func: Callable[..., Any], leaves: list[Tensor], settings: Settings
) -> Operation:
    """The operation with its verdict; func, leaves: as from `_replay`."""
    screen = None
    if not call.is_custom and call.target.is_view and not any(leaf.is_complex() for leaf in leaves):
        error = _linear_error(func, leaves, settings)
        verdict: OperationVerdict = "right" if error <= SCREEN_ERROR else "wrong"
        return replace(operation, verdict=verdict, error=error, evaluations=1, vjps=1)
    if all(leaf.dtype in (torch.float64, torch.complex128) for leaf in leaves):
        screen = _screened(func, leaves, settings)
        if screen is None:
            return replace(operation, verdict="right", detail="none of its results requires grad", error=0.0)
        if not call.is_custom and not screen.agrees and math.isfinite(screen.scale):
            moved = _screened(func, _next_to(leaves, settings), settings)
            if moved is not None and moved.agrees:
                screen, operation = moved, replace(operation, detail=AT_KINK)
        operation = replace(operation, error=screen.error, evaluations=screen.evaluations, vjps=screen.vjps)
        if screen.agrees and not call.is_custom:
            return replace(operation, verdict="right")
    fewer = _fewer_rows(call, func, leaves) if screen is not None and screen.agrees else None
    if fewer is not None:
        leaves, func = fewer
    # If all entries are much smaller than atol, for example those of a mean, no error would exceed atol: reduce atol.
    scale = min(1.0, screen.scale) if screen is not None and screen.scale > 0 else 1.0
    report = _report(func, leaves, settings, scale)
    is_at_kink = report.failure is not None and report.failure.numerical_issue in ("kink", "discontinuity")
    if is_at_kink:
        report = _report(func, _next_to(leaves, settings), settings, scale)
    verdict = _VERDICTS.get(report.verdict, "undecided")
    failure_line = "" if verdict == "right" else str(report).partition("\n")[0]
    return replace(
        operation,
        verdict=verdict,
        detail="; ".join(filter(None, (failure_line, fewer and ON_FEWER_ROWS, AT_KINK if is_at_kink else ""))),
        evaluations=operation.evaluations + report.evaluations,
        vjps=operation.vjps + report.vjps,
        report=report,
    )


def _fewer_rows(
    call: Call, func: Callable[..., Any], leaves: list[Tensor]
) -> tuple[list[Tensor], Callable[..., Any]] | None:
    """A large operation on the first rows of its inputs; None if it is small, or gives other results for these rows."""
    if sum(leaf.numel() for leaf in leaves) < LARGE:
        return None
    outputs = [one.detach() for one in as_tuple(func(*leaves)) if isinstance(one, Tensor)]
    rows = outputs[0].shape[0] if outputs and outputs[0].ndim else 0
    first = max(1, rows // FEWER)
    if rows <= first:
        return None
    sliced = [one[:first] if one.ndim and one.shape[0] == rows else one for one in call.tensors]
    try:
        made = _replay(replace(call, tensors=sliced), True)
        found = [one.detach() for one in as_tuple(made[1](*made[0])) if isinstance(one, Tensor)]
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    if len(found) != len(outputs):
        return None
    same = all(a.shape == b[:first].shape and torch.allclose(a, b[:first]) for a, b in zip(found, outputs, strict=True))
    return made if same else None


def _report(func: Callable[..., Any], leaves: list[Tensor], settings: Settings, scale: float) -> Report:
    """The report of a check in fast mode; scale: the size of typical entries, by which atol is multiplied."""
    return check(
        func,
        tuple(leaves),
        fast_mode=True,
        eps=settings.eps,
        atol=settings.atol * scale,
        rtol=settings.rtol,
        seed=settings.seed,
        check_undefined_grad=False,
    )


def _next_to(leaves: list[Tensor], settings: Settings) -> list[Tensor]:
    """Points next to the inputs: in a model, inputs are often at kinks or jumps, for example zeros after a relu."""
    moved = []
    for i, leaf in enumerate(leaves):
        value = leaf.detach()
        size = float(torch.linalg.vector_norm(value)) / math.sqrt(max(1, value.numel()))
        noise = uniform_like(value, settings.seed, SKETCH_DIRECTIONS + 16 * i)
        size = size if math.isfinite(size) else 1.0
        moved.append((value + NEXT_TO * (size or 1.0) * noise).requires_grad_())
    return moved


def _screened(func: Callable[..., Any], leaves: list[Tensor], settings: Settings) -> _Screen | None:
    """v^T J u by autograd and by differences, for random u and v; None if nothing is differentiable."""
    with Problem(func, tuple(leaves), warn_of_precision=False) as problem:
        if not problem.has_graph:
            return None
        v = direction(problem.m, settings.seed, SKETCH_COTANGENTS).to(problem.device)
        gradient = problem.vjp(v.unsqueeze(0))[0]
        found = [_along(problem, settings, settings.eps, v, gradient)]
        if not found[0].agrees:
            found.append(_along(problem, settings, settings.eps * SMALLER_STEP, v, gradient))
        best = min(found, key=lambda one: one.error if math.isfinite(one.error) else math.inf)
        return replace(best, evaluations=problem.evaluations, vjps=problem.vjps)


def _along(problem: Problem, settings: Settings, eps: float, v: Tensor, gradient: Tensor) -> _Screen:
    """Both values of v^T J u for one step, from two evaluations; gradient: J^T v."""
    differences = directional_differences(problem, settings, problem.base(), eps, 1, 0, extrapolated=0)
    along, u = differences.derivatives[0] * v, differences.directions[0]
    numerical, analytical = float(along.sum()), float(gradient @ u)
    size = math.hypot(float(torch.linalg.vector_norm(along)), float(torch.linalg.vector_norm(gradient * u)))
    error = abs(numerical - analytical) / size if size else abs(numerical - analytical)
    scale = max(float(torch.linalg.vector_norm(gradient)), abs(numerical)) / math.sqrt(max(1, problem.n))
    return _Screen(error, scale, error <= SCREEN_ERROR)


def _linear_error(func: Callable[..., Any], leaves: list[Tensor], settings: Settings) -> float:
    """The difference of v^T J u and v^T func(u), relative to the terms: a view is linear, so both should be equal."""
    number = count(1)

    def drawn(tensor: Tensor) -> Tensor:
        return uniform_like(tensor.detach(), settings.seed, SKETCH_DIRECTIONS + 16 * next(number))

    points = [drawn(leaf).as_strided(leaf.shape, leaf.stride()).requires_grad_() for leaf in leaves]
    outputs = [output for output in as_tuple(func(*points)) if output.requires_grad]
    vectors = [drawn(output) for output in outputs]
    gradients = torch.autograd.grad(outputs, points, vectors)
    forward = [_product(*pair) for pair in zip(outputs, vectors, strict=True)]
    backward = [_product(*pair) for pair in zip(points, gradients, strict=True)]
    size = math.hypot(*(size for _, size in forward + backward))
    return abs(sum(value for value, _ in forward) - sum(value for value, _ in backward)) / size if size else 0.0


def _product(left: Tensor, right: Tensor) -> tuple[float, float]:
    """The dot product of two random tensors, and an estimate of the root of the sum of squares of its terms."""
    a, b = left.detach().reshape(-1), right.reshape(-1)
    norms = float(torch.linalg.vector_norm(a)) * float(torch.linalg.vector_norm(b))
    return float(torch.dot(a, b)), norms / math.sqrt(max(1, a.numel()))


def _replay(call: Call, double: bool, only_finite: bool = False) -> tuple[list[Tensor], Callable[..., Any]]:
    """Leaves with the values of the tensors that require grad, and the operation as a function of them.

    With only_finite, the function raises `_NotFiniteError` if a result is not finite in the first call.
    """
    values = [as_double(tensor.detach()) if double else tensor.detach() for tensor in call.tensors]
    own = {id(tensor): i for i, tensor in enumerate(call.tensors)}  # a tensor that is passed twice is one leaf
    leaves = {own[id(call.tensors[i])]: values[i].detach().clone().requires_grad_() for i in call.differentiable}
    args, kwargs = call.rebuild(iter(values))
    states = RandomState([*call.generators, *args, *kwargs.values()]) if call.random else None
    fixed = {i: ~leaf.detach().isfinite() for i, leaf in leaves.items()}
    fixed = {i: mask for i, mask in fixed.items() if bool(mask.any())}
    unbounded: dict[int, Tensor | None] = {}
    padding = None if call.is_custom else padding_row(call.target, args, kwargs)

    def replayed(*given: Tensor) -> Any:
        at = dict(zip(leaves, given, strict=True))
        at |= {i: torch.where(mask, values[i], at[i]) for i, mask in fixed.items()}
        tensors = [at.get(own[id(tensor)], values[i]) for i, tensor in enumerate(call.tensors)]
        tensors = [tensor.clone() if i in call.written else tensor for i, tensor in enumerate(tensors)]
        if states is not None:
            states.restore()
        args, kwargs = call.rebuild(iter(tensors))
        if double:
            args, kwargs = as_double(args), as_double(kwargs)
        with without_autocast(), torch.enable_grad():
            result = call.target.apply(*args) if call.is_custom else call.target(*args, **kwargs)
        if padding is not None:  # this row gets no gradient by design
            result = torch.where((args[1] == padding).unsqueeze(-1), values[0][padding], result)
        results = as_tuple(result)
        # Further results of operators, for example the statistics of a norm, may have no derivatives.
        if len(results) > 1 and call.used and not call.used >= set(range(len(results))):
            results = tuple(
                one.detach() if isinstance(one, Tensor) and i not in call.used else one for i, one in enumerate(results)
            )
        results = tuple(_finite(one, i, unbounded) for i, one in enumerate(results))
        if only_finite and any(mask is not None for mask in unbounded.values()):
            raise _NotFiniteError
        return results

    replayed.__name__ = replayed.__qualname__ = call.name.rpartition("::")[2]
    return list(leaves.values()), replayed


def _finite(result: Any, number: int, unbounded: dict[int, Tensor | None]) -> Any:
    """A result in which elements that were not finite in the first call, such as -inf of a mask, are zero.

    These elements have no derivative. unbounded: masks of these elements, by the number of the result.
    """
    if not isinstance(result, Tensor) or not (result.is_floating_point() or result.is_complex()):
        return result
    if number not in unbounded:
        mask = ~result.detach().isfinite()
        unbounded[number] = mask if bool(mask.any()) else None
    infinite = unbounded[number]
    return result if infinite is None else result.masked_fill(infinite, 0.0)
