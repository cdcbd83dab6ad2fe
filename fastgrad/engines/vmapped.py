"""Numerical columns from many points in one call of func, vectorized as by torch.func.vmap.

A batching rule may be missing, and tensors that func captures are not batched. Therefore, `executor` compares the
columns with columns that are computed one call at a time.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fastgrad.core import torch_private
from fastgrad.core.errors import raise_if_transient
from fastgrad.core.memory import OUT_OF_MEMORY, RaisedOnce, lacks_again
from fastgrad.core.native import ops
from fastgrad.core.phases import phase
from fastgrad.core.precision import relative_step
from fastgrad.engines.executor import RejectedError, UnsuitableError
from fastgrad.problem.coordinates import Block
from fastgrad.problem.problem import Problem
from fastgrad.problem.second_order import Backward

MIN_COLUMNS = 4
"""Least number of columns of a batch."""

TRIED = 16
"""Least number of columns of a trial: with fewer, the time of the call itself hides the time of each column."""

MAX_COLUMNS = 512
"""Largest number of columns of a batch."""

HOST_BYTES = 4 << 20
DEVICE_BYTES = 64 << 20
"""Bytes of the inputs and outputs of one batch: on the CPU, about the size of a cache; on a GPU, enough to use all of
it."""


def column_bytes(problem: Problem) -> int:
    """Bytes that one column of a batch takes, including outputs and their copies, but not func's own memory."""
    return 16 * (max(block.size for block in problem.inputs) + 2 * problem.m)


def most_columns(problem: Problem, limit: int | None) -> int:
    """Largest number of columns of a batch; if fewer than MIN_COLUMNS, there are no batches.

    limit: the memory limit in bytes, of which a batch may take an eighth; None: there is none.
    """
    room = DEVICE_BYTES if problem.device.type == "cuda" else HOST_BYTES
    room = room if limit is None else min(room, limit // 8)
    return min(MAX_COLUMNS, problem.n, room // column_bytes(problem))


READING = frozenset(
    (
        *("item", "tolist", "numpy", "data_ptr", "__array__", "__dlpack__"),
        *("__bool__", "__int__", "__float__", "__complex__", "__index__"),
    )
)
"""Functions that read a tensor's values into Python, which is not possible with batched tensors."""


class _Observed(TorchFunctionMode):
    """Tracks the results of torch's functions: those that still exist after func has returned were kept by func.

    reads_values: whether any of the functions is in READING.
    """

    def __init__(self, points: Sequence[Tensor]) -> None:
        super().__init__()
        self._results = [weakref.ref(point) for point in points]
        self.reads_values = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads_values |= getattr(func, "__name__", "") in READING
        result = func(*args, **(kwargs or {}))
        self._results += [weakref.ref(value) for value in tree_leaves(result) if isinstance(value, Tensor)]
        return result

    def keeps_results(self) -> bool:
        return any(result() is not None for result in self._results)


@contextmanager
def as_vectorized() -> Iterator[None]:
    """A context for vectorized calls, and for single calls that show whether func can be vectorized.

    func records no graph, and its warnings are dropped: earlier calls have shown them. Warnings of torch that a
    vectorized operator is slow are dropped, too.
    """
    with torch.no_grad(), torch_private.uncompiled(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@phase("trial of replays or batches")
def obstacle(problem: Problem, eps: float) -> str | None:
    """Why func must not be called in batches, as text; None if no reason is known.

    Tensors that func keeps, for example a sum of its losses, would be batched tensors after a batch. If func reads
    values, it raises in a batch, perhaps after it has set a flag that it then does not reset. Therefore, func is
    evaluated once per input, without a batch. All elements of the input are perturbed, so that a func that caches
    results by the values of its inputs computes and keeps them again. Tensors that func changes in place count as kept.
    """
    for block in problem.inputs:
        points = [block.tensor.detach() + eps * block.step]
        reason = obstacle_of(points, partial(problem.evaluate_with, [block], points), problem.func)
        if reason is not None:
            return reason
    return None


def obstacle_of(points: list[Tensor], evaluate: Callable[[], Any], func: Callable[..., Any]) -> str | None:
    """As `obstacle`, for one call of func at new tensors, which this function removes from the list `points`."""
    observed = _Observed(points)
    try:
        with as_vectorized(), observed:
            evaluate()
    except Exception as error:
        raise_if_transient(error, evaluate)
        return f"func raises {type(error).__name__}"
    if isinstance(func, Backward):
        func.forget()
    points.clear()
    if observed.reads_values:
        return "func reads values of tensors"
    if observed.keeps_results():
        return "func keeps tensors between calls"
    return None


@phase("numerical columns")
def difference_columns(
    problem: Problem, first: int, count: int, size: int, eps: float, single: Callable[[int, int], Tensor] | None = None
) -> Tensor:
    """The columns of `Problem.difference_columns`, up to rounding: at most `size` of them in one call of func.

    func records no graph. The points are the same, bit for bit.

    Parameters
    ----------
    single
        Computes columns one by one, given the number of the first and their count. It is used for inputs for which func
        raises in a batch, because batches of other inputs may work. None: all inputs must allow batches.

    Raises
    ------
    RejectedError
        func raises in a batch, or returns another kind of output than at first.
    """
    columns = torch.empty(count, problem.m, dtype=torch.float64, device=problem.device)
    widths = problem.coordinate_widths(eps)[first : first + count]
    for block in problem.inputs:
        low, high = max(block.first, first), min(block.end, first + count)
        for begin in range(low, high, size):
            some = slice(begin - first, min(begin + size, high) - first)
            evaluate = partial(_evaluated, problem, block, begin - block.first, some.stop - some.start, eps)
            try:
                plus, minus = evaluate()
            except OUT_OF_MEMORY as error:
                if not lacks_again(evaluate):
                    raise RaisedOnce(error) from error
                raise UnsuitableError("out of memory") from error  # one call at a time needs less memory
            except Exception as error:
                raise_if_transient(error, evaluate)
                if single is None:
                    raise RejectedError(f"func raises {type(error).__name__}") from error
                columns[some.start : high - first] = single(begin, high - begin)
                break
            torch.sub(plus, minus, out=columns[some]).div_(widths[some].unsqueeze(1))
            problem.progress.step(2 * (some.stop - some.start))
    return columns


def _outputs_at(problem: Problem, block: Block, points: Tensor) -> tuple[Tensor, ...]:
    """The outputs at several points of one input; their first dimension counts the points."""
    count, func = points.shape[0], problem.func
    with as_vectorized():
        if not isinstance(func, Backward):
            evaluate = partial(problem.evaluate_with, [block])
            return tuple(torch_private.vectorized_call(lambda point: evaluate([point]), [points], [0], count))
        inputs = [
            points if other is block else other.tensor.detach().expand(count, *other.tensor.shape)
            for other in problem.inputs
        ]
        with func.vectorized(count):
            return problem.evaluate_with(problem.inputs, inputs, several=True)


def _evaluated(problem: Problem, block: Block, first: int, count: int, eps: float) -> tuple[Tensor, Tensor]:
    """The outputs with coordinate first, first + 1, ... of an input moved up and down: float64, (count, m) each."""
    x = block.tensor.detach()
    points = x.new_empty((2 * count, *x.shape))
    points.copy_(x)
    for sign, side in ((1, points[:count]), (-1, points[count:])):
        # In point k, coordinate first + k is moved. Its index counts the coordinates of all points of this side.
        moved = torch.arange(count, device=x.device) * (block.size + 1) + first
        ops.perturb_coordinates_(side, side, moved, sign, eps * block.step, relative_step(x.dtype))
    found = _outputs_at(problem, block, points)
    values = torch.empty(2 * count, problem.m, dtype=torch.float64, device=problem.device)
    for output, batch in zip(problem.outputs, found, strict=True):
        result = batch.detach()  # func may enable gradient recording
        real = torch.view_as_real(result.resolve_conj()) if output.is_complex else result
        values[:, output.slice] = real.reshape(2 * count, output.size)
    return values[:count], values[count:]
