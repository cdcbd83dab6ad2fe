"""Columns, column groups or rows by replays of a CUDA graph, whose steps read their numbers from the device.

For a column, the step restores the previous coordinate, perturbs its own coordinate in both directions and writes the
difference of func into a row. For a column group, it perturbs the coordinates of one color. For a row, it runs the VJP
of a one-hot cotangent. If there are many steps, a graph holds several of them. The numbers of columns, colors and rows
are kept on the device and increased there, so a replay needs nothing from the host and waits for nothing.

A replay repeats what func launched on the stream during the capture. If func reads values, takes another path, draws
random numbers, accesses memory of the host or uses a stream of its own, a replay is not an evaluation. Therefore,
operators are inspected for this before the capture, an invalid capture is rejected, `executor.disagreement` compares
the columns with plain evaluations, and a certificate tests the groups.

Autograd runs backward on a thread of its own, and each node on the stream that was current when forward made the node.
Therefore, the graph to differentiate is recorded on the capturing stream, and nodes of other streams prevent the
capture. The capture of backward forbids unsafe calls in all threads: if another thread may make one, backward is not
captured.
"""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, cuda

from fastgrad.core import native, torch_private
from fastgrad.core.memory import OUT_OF_MEMORY
from fastgrad.core.native import ops
from fastgrad.core.phases import phase
from fastgrad.core.precision import relative_step
from fastgrad.engines.executor import RejectedError, UnsuitableError
from fastgrad.problem.coordinates import Block
from fastgrad.problem.problem import Problem

EAGER_STEPS = 3
"""Number of steps that are run before the capture, on its stream, so that func's caches, library handles and autotuning
are initialized."""

MIN_COLUMNS = 16
"""Least number of steps for which capturing pays off."""

MAX_TOGETHER = 4
"""Largest number of steps in one graph. The host launches this many in less time than the device takes to run them.
Capturing more takes more time than it saves: on an H200, capturing 31 steps of ten kernels each took half the time of
1,000 columns."""

MIN_REPLAYS = 32
"""Least number of replays for which a graph gets several steps. On the host, capturing a step takes as long as running
it."""

_ERROR_MODES = {"func": "thread_local", "backward": "global"}
"""The threads whose unsafe calls end a capture. "relaxed" must not be used: every replay would write to memory that was
freed without torch's knowledge."""

_CALLS = {"func": 2, "backward": 1}
"""Number of calls of func, or of backward, in a step."""

_UNFIT = {
    torch.Tag.data_dependent_output: "reads values of tensors",
    torch.Tag.dynamic_output_shape: "has results whose shape depends on values",
    torch.Tag.nondeterministic_seeded: "draws random numbers",
}

_QUIET = frozenset({"IPython", "_pydevd_bundle", "debugpy", "ipykernel", "tqdm"})
"""Packages whose threads serve progress bars, notebooks and debuggers, and make no CUDA calls."""

_OF_CUDA = re.compile("cuda|cudnn|cublas|cusolver|captur", re.IGNORECASE)
"""Words in the errors of CUDA's libraries, and in torch's errors about captures."""

Step = Callable[[Tensor, Tensor, Tensor], None]
"""Takes the numbers of the previous step and of its own, int64 of shape (1,), and fills a row, shape (coordinates,)."""

_abandoned: list[Any] = []
"""The graph whose capture was invalid, if any. It is kept because torch's pool of pinned memory may still query it. No
further graph is captured, because memory that is reserved for a capture may be lost."""


def obstacle(problem: Problem) -> str | None:
    """What prevents func from being captured, as far as is known without calling it; None if nothing does."""
    device = problem.device
    if device.type != "cuda" or torch.version.hip is not None:
        return "func does not run on an NVIDIA device"
    if any(block.tensor.device != device for block in (*problem.inputs, *problem.outputs)):
        return "func uses several devices"
    if _abandoned:
        return "an earlier capture was invalid"
    if cuda.get_allocator_backend() != "native":
        return "torch's own allocator is not in use"
    if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
        return "autocast caches results that a capture does not compute"
    with cuda.device(device):
        return "a capture is under way" if cuda.is_current_stream_capturing() else None


@phase("numerical columns")
def difference_columns(problem: Problem, first: int, count: int, eps: float, record_graph: bool) -> Tensor:
    """The columns of `Problem.difference_columns`, up to rounding; those of small inputs are computed one at a time.

    Raises
    ------
    RejectedError
        func, or what it calls, cannot be captured.
    """
    columns = torch.empty(count, problem.m, dtype=torch.float64, device=problem.device)
    for block in problem.inputs:
        low, high = max(block.first, first), min(block.end, first + count)
        rows = columns[low - first : max(low, high) - first]
        if high - low >= MIN_COLUMNS:
            _replay(problem, block, low, rows, eps, record_graph)
        elif high > low:
            rows.copy_(problem.difference_columns(low, high - low, eps, record_graph))
    return columns


@phase("numerical columns")
def difference_groups(
    problem: Problem, colors: Tensor, count: int, rows: Tensor, columns: Tensor, eps: float, record_graph: bool
) -> Tensor:
    """The entries of `Problem.difference_groups`, up to rounding: float64, shape (entries,).

    Parameters
    ----------
    colors
        The group of each column, one of `count`; -1: none. int64, shape (n,).
    rows, columns
        The row and column of each entry: int64, shape (entries,).

    Raises
    ------
    RejectedError
        func, or what it calls, cannot be captured.
    """
    steps = problem.displacement(torch.ones(problem.n, dtype=torch.float64, device=problem.device), eps)
    differences = torch.empty(count, problem.m, dtype=torch.float64, device=problem.device)
    rest = torch.zeros_like(steps)

    def step(_: Tensor, color: Tensor, row: Tensor) -> None:
        moved = torch.where(colors == color, steps, rest)
        torch.sub(problem.evaluate(record_graph, moved), problem.evaluate(record_graph, moved, -1.0), out=row)

    with _Replays(problem, lambda: step, 0, count, differences) as replays:
        replays.take(count)
    return differences[colors[columns], rows].div_(problem.realized_width(steps, 1.0)[columns])


def analytical_rows(
    problem: Problem, output: Block, imaginary: bool, first: int, counts: Sequence[int], inputs: Sequence[Block]
) -> Iterator[Tensor]:
    """Yields blocks of rows, as from `Problem.analytical_rows` without repeated rows; few rows are run without replays.

    Backward is captured once, for all blocks.

    Parameters
    ----------
    counts
        The number of rows of each block.

    Yields
    ------
    Tensor
        float64, shape (count, coordinates of all `inputs`); overwritten by the next block.

    Raises
    ------
    RejectedError
        Backward cannot be captured, or a gradient differs from its input in shape, dtype or layout.
    """
    if counts[0] < MIN_COLUMNS:
        for count in counts:
            yield problem.analytical_rows(output, imaginary, first, count, inputs)[0]
            first += count
        return
    if any(map(_may_use_cuda, threading.enumerate())):
        raise UnsuitableError("other Python threads run, and a capture of backward could disturb them")
    device = problem.device
    tensors = [block.tensor for block in inputs]
    like = [(tensor.shape, tensor.dtype, tensor.layout) for tensor in tensors]
    sizes = [block.size for block in inputs]
    rows = torch.empty(max(counts), sum(sizes), dtype=torch.float64, device=device)
    cotangent = torch.empty(output.tensor.numel(), dtype=output.tensor.dtype, device=device)

    def begin() -> Step:
        results = problem.graph_of_its_own()[output.index : output.index + 1]
        if not {cuda.current_stream(device).stream_id}.issuperset(native.backward_streams(results, tensors)):
            raise UnsuitableError("backward runs on streams of its own")

        def step(_: Tensor, element: Tensor, row: Tensor) -> None:
            cotangent.zero_().index_fill_(0, element, 1j if imaginary else 1.0)
            found = native.vjp(results, tensors, [cotangent.view(output.tensor.shape)], False)
            for segment, expected, own in zip(torch.split(row, sizes), like, found, strict=True):
                if own is None:
                    segment.zero_()
                elif (own.shape, own.dtype, own.layout) == expected:
                    native.flatten_(segment, own)
                else:
                    raise RejectedError("a gradient differs from its input in shape, dtype or layout")

        return step

    with _Replays(problem, begin, first, sum(counts), rows, "backward") as replays:
        take = phase("analytical rows")(replays.take)
        for count in counts:
            take(count)
            problem.vjps += count
            yield rows[:count]


def _may_use_cuda(thread: threading.Thread) -> bool:
    """Whether a thread other than the current one may make calls that a capture for all threads forbids."""
    # If autograd's own threads run Python, they are listed as dummy threads. They wait for work from this thread.
    if thread is threading.current_thread() or isinstance(thread, threading._DummyThread):
        return False
    runs = getattr(thread, "_target", None) or type(thread)
    return str(getattr(runs, "__module__", None)).partition(".")[0] not in _QUIET


@lru_cache(None)
def _side_stream(device: torch.device) -> Any:
    """The stream for captures, one per device: torch and its libraries allocate memory for each stream separately."""
    return cuda.Stream(device)  # type: ignore[no-untyped-call]


def _replay(problem: Problem, block: Block, first: int, rows: Tensor, eps: float, record_graph: bool) -> None:
    values = block.tensor.data  # `data` has its own version counter, as in all perturbations
    origin = values.clone(memory_format=torch.contiguous_format)
    steps = eps * block.step, relative_step(values.dtype)

    def step(previous: Tensor, coordinate: Tensor, row: Tensor) -> None:
        ops.perturb_coordinates_(values, origin, coordinate, 1, *steps, previous)
        plus = problem.evaluate(record_graph)
        ops.perturb_coordinates_(values, origin, coordinate, -1, *steps)
        torch.sub(plus, problem.evaluate(record_graph), out=row)

    with _Replays(problem, lambda: step, first - block.first, rows.shape[0], rows) as replays:
        replays.take(rows.shape[0])
    rows.div_(problem.coordinate_widths(eps)[first : first + rows.shape[0]].unsqueeze(1))


class _Replays:
    """Steps of func or backward: the first EAGER_STEPS are run eagerly, the others by replays of one graph."""

    def __init__(
        self,
        problem: Problem,
        begin: Callable[[], Step],
        first: int,
        count: int,
        rows: Tensor,
        who: Literal["func", "backward"] = "func",
    ) -> None:
        """Stores the arguments.

        Parameters
        ----------
        begin
            Makes the step, on the capturing stream.
        first, count
            The number of the first step, and the number of steps.
        rows
            The rows that the steps fill: float64, shape (rows, coordinates).
        """
        self._problem, self._who = problem, who
        self._begin, self._first, self._rows = begin, first, rows
        self._together = max(1, min(MAX_TOGETHER, count // MIN_REPLAYS))
        self._graph: Any = None

    def take(self, count: int) -> None:
        """Fills `count` rows, from the first row on; the first call must fill EAGER_STEPS rows or more."""
        problem, who, device = self._problem, self._who, self._problem.device
        with cuda.device(device):
            current, side = cuda.current_stream(device), _side_stream(device)
            if self._graph is None:
                side.wait_stream(current)
                try:
                    with cuda.stream(side):
                        self._capture()
                except RejectedError:
                    raise
                except Exception as error:
                    raise _rejected(f"{who} cannot be captured", error) from error
                finally:
                    current.wait_stream(side)
                    problem.restore()
                count -= EAGER_STEPS
            side.wait_stream(current)
            try:
                with cuda.stream(side):  # the captured steps use memory of this stream
                    for _ in range(count // self._together):
                        self._graph.replay()
                        problem.progress.step(_CALLS[who] * self._together)
                    if count % self._together:
                        self._take_steps(count % self._together)
                    self._numbers[1].copy_(self._from_zero)  # the next step fills the first row
            except Exception as error:
                raise _rejected(f"{who} cannot be replayed", error) from error
            finally:
                current.wait_stream(side)

    def _capture(self) -> None:
        device, who = self._problem.device, self._who
        self._step = self._begin()
        # The numbers of steps are read from the device. The results of several steps are written at once.
        self._from_zero = torch.arange(-1, self._together, device=device)
        self._numbers = torch.stack([self._from_zero + self._first, self._from_zero])
        self._given = self._rows.new_empty(self._together, self._rows.shape[1])
        self._run_eagerly()
        self._watch = _Watch(device, who)
        with self._watch:
            self._graph = _capture(lambda: self._take_steps(self._together), device, _ERROR_MODES[who])

    def _take_steps(self, count: int) -> None:
        own, places = self._numbers
        for k in range(count):
            self._step(own[k : k + 1], own[k + 1 : k + 2], self._given[k])
        self._rows.index_copy_(0, places[1 : count + 1], self._given[:count])
        self._numbers.add_(count)

    def _run_eagerly(self) -> None:
        """Runs the first EAGER_STEPS steps, and inspects the operators of the first step."""
        generator = cuda.default_generators[self._problem.device.index]
        drawn = generator.get_state()
        with _Watch(self._problem.device, self._who):
            self._take_steps(1)
        for _ in range(EAGER_STEPS - 1):
            self._take_steps(1)
        if not torch.equal(generator.get_state(), drawn):
            raise RejectedError(f"{self._who} draws random numbers")
        if self._problem.mutates_inputs:
            raise RejectedError("func changes its inputs")

    def __enter__(self) -> _Replays:
        return self

    def __exit__(self, *_: object) -> None:
        if self._graph is None:
            return
        self._graph.reset()
        del self._watch  # frees the tensors that replays used
        if self._who == "func":
            self._problem.restore()  # no step restores the coordinate that the last step perturbed


def _rejected(what: str, error: Exception) -> RejectedError:
    """The error to raise: an UnsuitableError if a CUDA library raised, otherwise a RejectedError."""
    of_cuda = isinstance(error, RuntimeError) and _OF_CUDA.search(str(error)) is not None
    of_cuda = of_cuda or isinstance(error, OUT_OF_MEMORY)
    return (UnsuitableError if of_cuda else RejectedError)(f"{what} ({type(error).__name__})")


def _capture(step: Callable[[], None], device: torch.device, error_mode: str) -> Any:
    """Captures the step as a CUDA graph, on the current stream; nothing of the step is executed.

    error_mode: the threads whose unsafe calls end the capture. If the capture fails, the states of stream, generator
    and allocator are restored. After an invalid capture, some versions of torch reset little more than the stream.
    From torch 2.15 on, the capture may end properly although the instantiation of the graph fails. Then the allocator
    reports that it does not know the pool.
    """
    generator = cuda.default_generators[device.index]
    state = generator.clone_state()
    graph, pool = cuda.CUDAGraph(), cuda.graph_pool_handle()
    ended = False
    collects = gc.isenabled()
    gc.disable()  # destructors may call CUDA, which would invalidate the capture
    try:
        try:
            graph.capture_begin(pool=pool, capture_error_mode=error_mode)
            step()
        finally:
            graph.capture_end()
            ended = True
    except BaseException:
        graph.reset()
        if not ended:
            _abandoned.append(graph)
            torch_private.forget_capture(device.index, pool)
            generator.graphsafe_set_state(state)
        raise
    finally:
        if collects:
            gc.enable()
    return graph


class _Watch(torch_private.DispatchMode):  # type: ignore[no-untyped-call]
    """Raises if an operator does what a replay would not repeat; keeps tensors that were made before the capture.

    Replays read and write the memory that the capture used. Therefore, these tensors must outlive all replays.
    """

    def __init__(self, device: torch.device, who: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._who = who
        self._device = device
        self._stream = cuda.current_stream(device)
        self._made: set[int] = set()
        self._kept: list[Tensor] = []

    @torch_private.hidden_from_dynamo
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tag, what in _UNFIT.items():
            if tag in op.tags:
                raise RejectedError(f"{self._who} {what}")
        if cuda.current_stream(self._device) != self._stream:
            raise RejectedError(f"{self._who} uses streams of its own")
        result = op(*args, **kwargs)
        for given in torch_private.tensors_in((args, kwargs)):
            # A CPU scalar that is not copied is part of the launch, and the same in every replay.
            if given.device != self._device and (given.dim() > 0 or "copy" in op.__name__):
                raise RejectedError(f"{self._who} uses memory of another device")
            if _memory(given) not in self._made:
                self._kept.append(given)
        for made in torch_private.tensors_in(result):
            if made.device != self._device:
                raise RejectedError(f"{self._who} uses memory of another device")
            self._made.add(_memory(made))
        return result


def _memory(tensor: Tensor) -> int:
    """A number that identifies the storage of a tensor during its lifetime."""
    return int(tensor.untyped_storage()._cdata)
