"""Replays of a captured step, on a substitute for torch.cuda that records operators below autograd and repeats them.

As in a capture, recorded operators have no effect, and memory that is allocated meanwhile contains garbage.
"""

from __future__ import annotations

import _thread
import gc
import inspect
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from fastgrad.checks import order
from fastgrad.checks.order import check
from fastgrad.core import torch_private
from fastgrad.engines import cost_model, cuda_graph, executor, plan, vmapped
from fastgrad.engines.blocks import REPEATED_ROWS
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Plan
from fastgrad.report.settings import Settings
from tests.checks.test_sketch import doubled
from tests.costs import set_costs
from tests.engines.test_vmapped import leaf

EPS = 1e-6


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: dict[int, tuple[Any, Any]] = {}
        self.made: dict[int, Any] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = torch_private.tensors_in((args, kwargs))
        if op._schema.is_mutable:
            for tensor in given:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.made:
                    self.before.setdefault(storage._cdata, (storage, storage.clone()))
        out = op(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in given}
        own = [t for t in torch_private.tensors_in(out) if t.untyped_storage()._cdata not in known]
        for tensor in own:
            self.made[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        self.calls.append((op, args, kwargs, own))
        return out

    def undo(self) -> None:
        for storage, before in self.before.values():
            storage.copy_(before)
        for storage in self.made.values():
            storage.fill_(0x7F)


class Generator:
    def __init__(self) -> None:
        self.state = torch.zeros(2, dtype=torch.uint8)
        self.put_back: Any = None

    def get_state(self) -> Tensor:
        return self.state.clone()

    def clone_state(self) -> str:
        return "a clone"

    def graphsafe_set_state(self, state: Any) -> None:
        self.put_back = state


class Cuda:
    """The parts of torch.cuda that fastgrad.engines.cuda_graph uses."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.default_generators = {None: Generator()}
        self.streams: list[Any] = ["current"]
        self.modes: list[tuple[Any, str]] = []
        self.end_fails = False
        self.while_replaying: Callable[[], None] = lambda: None
        double = self

        class CUDAGraph:
            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                assert double.streams[-1] != "current"
                assert not gc.isenabled()
                double.modes.append((pool, capture_error_mode))
                double.log.append("begin")
                self.recorder = Recorder()
                self.recorder.__enter__()

            def capture_end(self) -> None:
                assert double.streams[-1] != "current"
                self.recorder.__exit__(None, None, None)
                self.recorder.undo()
                if double.end_fails:
                    raise RuntimeError("operation failed due to a previous error during capture")
                double.log.append("end")

            def replay(self) -> None:
                assert double.streams[-1] != "current"
                double.log.append("replay")
                double.while_replaying()
                with torch._C._AutoDispatchBelowAutograd():
                    for op, args, kwargs, own in self.recorder.calls:
                        again = op(*args, **kwargs)
                        for old, new in zip(own, torch_private.tensors_in(again) if own else (), strict=True):
                            old.copy_(new)

            def reset(self) -> None:
                double.log.append("reset")

        self.CUDAGraph = CUDAGraph

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 7)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams.pop()

    def current_stream(self, device: torch.device) -> Any:
        return Stream(self.log, "current") if self.streams == ["current"] else self.streams[-1]

    def Stream(self, device: torch.device) -> Any:  # noqa: N802  (torch's name)
        return Stream(self.log, "side")


@dataclass(frozen=True)
class Stream:
    log: list[str]
    name: str

    @property
    def stream_id(self) -> int:
        return hash(self.name)

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    double = Cuda()
    # The tensors are on the CPU, but a small problem on a device is not set up in one call.
    monkeypatch.setattr(order, "small_check", lambda *_: None)
    monkeypatch.setattr(cuda_graph, "cuda", double)
    monkeypatch.setattr(cuda_graph, "_abandoned", [])
    monkeypatch.setattr(cuda_graph, "_side_stream", lru_cache(None)(cuda_graph._side_stream.__wrapped__))
    monkeypatch.setattr(torch_private, "forget_capture", lambda *what: double.log.append(f"forget {what}"))
    return double


def test_the_double_is_like_torch() -> None:
    for name in vars(Cuda).keys() | {"CUDAGraph", "default_generators", "get_allocator_backend"}:
        assert name.startswith("_") or hasattr(torch.cuda, name)
    for name in ("capture_begin", "capture_end", "replay", "reset"):
        theirs = inspect.signature(getattr(torch.cuda.CUDAGraph, name)).parameters
        assert inspect.signature(getattr(Cuda().CUDAGraph, name)).parameters.keys() <= theirs.keys()
    for name in ("get_state", "clone_state", "graphsafe_set_state"):
        assert hasattr(torch.Generator, name)


FUNCS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (lambda x: x.cumsum(0).sin(), (leaf(40),)),
    (lambda x, y: (x @ y, 2.0, (x.sum() * y).cumsum(1)), (leaf(5, 9), leaf(9, 4, seed=2))),
    (lambda x, s, y: torch.outer(x.sin(), y * y) * s, (leaf(7), 3.0, leaf(12, dtype=torch.complex128, seed=3))),
    (lambda x: (x.cumsum(0) * x.t()[0, 0]).t(), (leaf(4, 6).detach().t().requires_grad_(),)),
    (lambda x: x, (leaf(30),)),
]


@pytest.mark.parametrize("record_graph", [False, True])
@pytest.mark.parametrize(("func", "inputs"), FUNCS)
def test_columns_are_those_of_the_loop(
    cuda: Cuda, func: Callable[..., Any], inputs: tuple[Any, ...], record_graph: bool
) -> None:
    tensors = [v for v in inputs if isinstance(v, Tensor)]
    bits = [v.detach().clone() for v in tensors]
    with Problem(func, inputs) as problem:
        single = problem.difference_columns(0, problem.n, EPS, record_graph)
        for first, count in ((0, problem.n), (1, problem.n - 1)):
            columns = cuda_graph.difference_columns(problem, first, count, EPS, record_graph)
            assert torch.equal(columns, single[first : first + count])
            assert executor.disagreement(problem, Settings(), first, columns, record_graph) == 1
    assert cuda.streams == ["current"]
    assert gc.isenabled()
    assert all(torch.equal(v.detach(), old) and v._version == 0 for v, old in zip(tensors, bits, strict=True))


def test_every_input_has_its_own_step(cuda: Cuda) -> None:
    inputs = leaf(20), leaf(20, seed=2)
    with Problem(lambda x, y: x.exp().cumsum(0) * y.sin(), inputs, scales=[(1000.0, 1.0), (1.0, 1.0)]) as problem:
        columns = cuda_graph.difference_columns(problem, 0, 40, EPS, False)
        assert torch.equal(columns, problem.difference_columns(0, 40, EPS, False))


def test_order_of_streams_and_life_of_the_graph(cuda: Cuda) -> None:
    calls = []

    def func(x: Tensor) -> Tensor:
        calls.append(list(cuda.streams))
        return x.cumsum(0)

    with Problem(func, (leaf(20),)) as problem:
        del calls[:]
        cuda_graph.difference_columns(problem, 0, 20, EPS, False)
    assert len(calls) == 2 * (cuda_graph.EAGER_STEPS + 1)
    assert all(len(streams) == 2 for streams in calls)
    replays = 20 - cuda_graph.EAGER_STEPS
    captured = ["side waits", "begin", "end", "current waits"]
    assert cuda.log == [*captured, "side waits", *["replay"] * replays, "current waits", "reset"]
    assert cuda.modes == [((0, 7), "thread_local")]


@pytest.mark.parametrize("rest", [0, 5])
def test_many_columns_are_captured_several_at_a_time(cuda: Cuda, rest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "MIN_REPLAYS", 25)
    size = cuda_graph.EAGER_STEPS + 72 + rest
    calls = Counted(10**6, torch.exp)
    with Problem(calls, (leaf(size),)) as problem:
        single = problem.difference_columns(0, size, EPS, False)
        calls.calls = 0
        assert torch.equal(cuda_graph.difference_columns(problem, 0, size, EPS, False), single)
    together = size // 25
    replays, eager = divmod(size - cuda_graph.EAGER_STEPS, together)
    assert 1 < together < cuda_graph.MAX_TOGETHER
    assert cuda.log.count("replay") == replays
    assert calls.calls == 2 * (cuda_graph.EAGER_STEPS + together + eager)


def test_a_graph_holds_a_bounded_number_of_steps(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "MIN_REPLAYS", 1)
    size = cuda_graph.EAGER_STEPS + 4 * cuda_graph.MAX_TOGETHER
    with Problem(lambda x: x.cumsum(0), (leaf(size),)) as problem:
        single = problem.difference_columns(0, size, EPS, False)
        assert torch.equal(cuda_graph.difference_columns(problem, 0, size, EPS, False), single)
    assert cuda.log.count("replay") == 4


def test_a_func_that_raises_after_the_replays(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "MIN_REPLAYS", 10)
    x = leaf(40)  # four columns at a time, so one of the 37 is left
    bits = x.detach().clone()
    func = Counted(1 + 2 * (cuda_graph.EAGER_STEPS + 4) + 1, raising(ValueError))
    with Problem(func, (x,)) as problem, pytest.raises(executor.RejectedError, match="cannot be replayed"):
        cuda_graph.difference_columns(problem, 0, 40, EPS, False)
    assert cuda.log[-1] == "reset"
    assert torch.equal(x.detach(), bits)


def test_few_columns_are_evaluated_plainly(cuda: Cuda) -> None:
    with Problem(lambda x: x.cumsum(0), (leaf(cuda_graph.MIN_COLUMNS - 1),)) as problem:
        columns = cuda_graph.difference_columns(problem, 0, problem.n, EPS, False)
        assert torch.equal(columns, problem.difference_columns(0, problem.n, EPS, False))
    assert cuda.log == []


def draws_unseen(x: Tensor) -> Tensor:
    cuda_graph.cuda.default_generators[None].state += 1
    return x.cumsum(0)


def on_a_stream_of_its_own(x: Tensor) -> Tensor:
    with cuda_graph.cuda.stream("own"):  # type: ignore[arg-type]
        return x.cumsum(0)


@pytest.mark.parametrize(
    ("func", "reason"),
    [
        (on_a_stream_of_its_own, "streams of its own"),
        (lambda x: x * x.sum().item(), "reads values"),
        (lambda x: x * (1.0 if x.sum() > 0 else 2.0), "reads values"),
        (lambda x: x[x > -9], "shape depends on values"),
        (lambda x: x + 0 * torch.rand(40), "random"),
        (lambda x: torch.nn.functional.dropout(x, 0.0001), "random"),
        (lambda x: x + torch.zeros(40, device="meta").numel(), "another device"),
        (draws_unseen, "random"),
    ],
)
def test_what_a_replay_would_not_repeat_is_refused_before_a_capture(
    cuda: Cuda, func: Callable[[Tensor], Tensor], reason: str
) -> None:
    x = leaf(40)
    bits = x.detach().clone()
    with Problem(func, (x,)) as problem, pytest.raises(executor.RejectedError, match=reason):
        cuda_graph.difference_columns(problem, 0, 40, EPS, False)
    assert "begin" not in cuda.log
    assert cuda.log[-1] == "current waits"
    assert cuda.streams == ["current"]
    assert torch.equal(x.detach(), bits)


def test_a_cpu_scalar_is_part_of_the_launch(cuda: Cuda) -> None:
    watch = cuda_graph._Watch(torch.device("meta"), "func")
    x = torch.zeros(3, device="meta")
    half = torch.tensor(0.5)
    with watch:
        x * half
    with watch, pytest.raises(executor.RejectedError, match="another device"):
        x.copy_(torch.zeros(3))
    with watch, pytest.raises(executor.RejectedError, match="another device"):
        half.to("meta")
    with watch, pytest.raises(executor.RejectedError, match="another device"):
        torch.tensor([1.0, 2.0])


def test_memory_that_a_capture_found_is_kept(cuda: Cuda) -> None:
    x, buffer = torch.ones(3), torch.zeros(3)
    found, watch = {value.data_ptr() for value in (x, buffer)}, cuda_graph._Watch(x.device, "func")
    with watch:
        torch.zeros(3).add_(buffer.copy_(x)).view(3, 1).t()
        del buffer
    assert {value.data_ptr() for value in watch._kept} == found


class Counted:
    """A cumulative sum that changes from some call on."""

    def __init__(self, call: int, then: Callable[[Tensor], Tensor]) -> None:
        self.calls, self.call, self.then = 0, call, then

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.cumsum(0) if self.calls < self.call else self.then(x)


def test_what_depends_on_the_number_of_calls_does_not_agree(cuda: Cuda) -> None:
    # One call for the outputs, two for each step, and two captured. From the next call on, results are doubled.
    func = Counted(1 + 2 * (cuda_graph.EAGER_STEPS + 1) + 1, lambda x: 2 * x.cumsum(0))
    with Problem(func, (leaf(40),)) as problem:
        columns = cuda_graph.difference_columns(problem, 0, 40, EPS, False)
        assert executor.disagreement(problem, Settings(), 0, columns, False) > 1


def raising(error: type[BaseException]) -> Callable[[Tensor], Tensor]:
    def then(x: Tensor) -> Tensor:
        raise error

    return then


CAPTURED_CALL = 1 + 2 * cuda_graph.EAGER_STEPS + 2
"""The second of the two that are captured."""


@pytest.mark.parametrize("call", [3, CAPTURED_CALL])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_func_raises(cuda: Cuda, error: type[BaseException], call: int) -> None:
    x = leaf(40)
    bits = x.detach().clone()
    expected = KeyboardInterrupt if error is KeyboardInterrupt else executor.RejectedError
    with Problem(Counted(call, raising(error)), (x,)) as problem:
        with pytest.raises(expected):
            cuda_graph.difference_columns(problem, 0, 40, EPS, False)
        assert torch.equal(x.detach(), bits)
    captured = ["begin", "end", "reset"] if call == CAPTURED_CALL else []
    assert cuda.log == ["side waits", *captured, "current waits"]
    assert cuda_graph._abandoned == []
    assert cuda.streams == ["current"]
    assert gc.isenabled()


@pytest.mark.parametrize("also_raises", [False, True])
def test_an_invalid_capture_is_cleaned_up(cuda: Cuda, also_raises: bool) -> None:
    x = leaf(40)
    bits = x.detach().clone()
    cuda.end_fails = True
    call = CAPTURED_CALL if also_raises else 10**6
    with Problem(Counted(call, raising(ValueError)), (x,)) as problem:
        with pytest.raises(executor.RejectedError, match="cannot be captured"):
            cuda_graph.difference_columns(problem, 0, 40, EPS, False)
        assert torch.equal(x.detach(), bits)
    assert cuda.log == ["side waits", "begin", "reset", "forget (None, (0, 7))", "current waits"]
    assert cuda.default_generators[None].put_back == "a clone"
    assert len(cuda_graph._abandoned) == 1
    assert cuda.streams == ["current"]
    assert gc.isenabled()


def test_ctrl_c_while_replaying(cuda: Cuda) -> None:
    def interrupt() -> None:
        if cuda.log.count("replay") == 5:
            raise KeyboardInterrupt

    cuda.while_replaying = interrupt
    x = leaf(40)
    bits = x.detach().clone()
    with pytest.raises(KeyboardInterrupt), Problem(lambda x: x.cumsum(0), (x,)) as problem:
        cuda_graph.difference_columns(problem, 0, 40, EPS, False)
    assert cuda.log[-1] == "reset"
    assert torch.equal(x.detach(), bits)


def test_a_disabled_collector_stays_disabled(cuda: Cuda) -> None:
    gc.disable()
    try:
        with Problem(lambda x: x.cumsum(0), (leaf(40),)) as problem:
            cuda_graph.difference_columns(problem, 0, 40, EPS, False)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_allocator_forgets_what_it_had_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def end(device: int, pool: Any) -> None:
        called.append("end")
        if pool == "never begun":
            raise RuntimeError

    fake = SimpleNamespace(_cuda_endAllocateToPool=end, _cuda_releasePool=lambda *_: called.append("release"))
    monkeypatch.setattr(torch_private.torch, "_C", fake)
    torch_private.forget_capture(0, "never begun")  # type: ignore[arg-type]
    assert called == ["end"]
    torch_private.forget_capture(0, (0, 1))
    assert called == ["end", "end", "release"]


def planned(problem: Problem, settings: Settings, look: Any) -> Plan:
    return replace(plan.make_plan(problem, settings, look), replayed=True)


@pytest.fixture
def replaying(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    monkeypatch.setattr("fastgrad.checks.complete.make_plan", planned)
    return cuda


def planned_rows(problem: Problem, settings: Settings, look: Any) -> Plan:
    return replace(plan.make_plan(problem, settings, look), rows_replayed=True)


@pytest.fixture
def replaying_rows(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    monkeypatch.setattr("fastgrad.checks.complete.make_plan", planned_rows)
    return cuda


DENSE = Settings(engine="dense")


@pytest.mark.parametrize("limit", [None, 9000])
def test_a_right_gradient_passes(replaying: Cuda, limit: int | None) -> None:
    report = check(lambda x: x.cumsum(0).sin(), (leaf(40),), replace(DENSE, memory_limit=limit))
    assert report.passed
    assert report.plan is not None
    assert report.plan.replayed
    assert "replay" in replaying.log


def test_a_wrong_gradient_fails_one_by_one(replaying: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor) -> Tensor:
        return torch.cat([x[:7], x[7:].detach()]).cumsum(0)

    report = check(wrong, (leaf(40),), DENSE)
    monkeypatch.undo()
    alone = check(wrong, (leaf(40),), DENSE)
    assert report.failure is not None
    assert alone.failure is not None
    assert report.failure.comparison == alone.failure.comparison
    assert report.plan is not None
    assert not report.plan.replayed
    assert "a mismatch is checked again, one call at a time" in report.plan.reason


@pytest.mark.parametrize(
    ("error", "passes"),
    [(RuntimeError("CUDA error: operation not permitted when stream is capturing"), True), (ValueError(), False)],
)
def test_only_errors_of_func_are_leads(
    replaying: Cuda, error: Exception, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first capture may fail because a library is initialized in it; func that raises once is not deterministic."""
    set_costs(monkeypatch, trial_columns=10**9)  # no batches, for any duration of a call
    raised = []

    def func(x: Tensor) -> Tensor:
        if replaying.log[-1:] == ["begin"] and not raised:
            raised.append(error)
            raise error
        return x.cumsum(0).sin()

    report = check(func, (leaf(300),), Settings())
    assert raised
    assert report.passed is passes
    assert report.plan is not None
    assert "no batches or replays: func cannot be captured" in report.plan.reason
    assert passes or (report.failure is not None and report.failure.kind == "nondeterministic func")


def test_refused_replays_are_told(replaying: Cuda) -> None:
    report = check(lambda x: x.cumsum(0) * (1.0 if x.sum() > -1e9 else 2.0), (leaf(40),), DENSE)
    assert report.passed
    assert report.plan is not None
    assert not report.plan.replayed
    assert "no batches or replays: func reads values of tensors" in report.plan.reason


def rows_of(problem: Problem, first: int, count: int, replayed: bool) -> list[Tensor]:
    """The rows of each output; of a complex output, for the real part and then for the imaginary part."""
    return [
        next(cuda_graph.analytical_rows(problem, output, imaginary, first, [count], problem.inputs))
        if replayed
        else problem.analytical_rows(output, imaginary, first, count, problem.inputs)[0]
        for output in problem.outputs
        for imaginary in ((False, True) if output.is_complex else (False,))
    ]


@pytest.mark.parametrize(("func", "inputs"), [case for case in FUNCS if case[0] is not FUNCS[-1][0]])
def test_rows_are_those_of_the_loop(cuda: Cuda, func: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    tensors = [v for v in inputs if isinstance(v, Tensor)]
    bits = [v.detach().clone() for v in tensors]
    with Problem(func, inputs) as problem:
        fewest = min(output.tensor.numel() for output in problem.outputs)
        single = rows_of(problem, 1, fewest - 1, replayed=False)
        evaluations, vjps = problem.evaluations, problem.vjps
        for rows, expected in zip(rows_of(problem, 1, fewest - 1, replayed=True), single, strict=True):
            torch.testing.assert_close(rows, expected, rtol=1e-14, atol=0)
        assert problem.vjps - vjps == (fewest - 1) * len(single)
        assert problem.evaluations - evaluations == len(single)
    together = max(1, (fewest - 1) // cuda_graph.MIN_REPLAYS)
    assert cuda.log.count("replay") == (fewest - 1 - cuda_graph.EAGER_STEPS) // together * len(single)
    assert {mode for _, mode in cuda.modes} == {"global"}
    assert cuda.streams == ["current"]
    assert all(torch.equal(v.detach(), old) and v._version == 0 for v, old in zip(tensors, bits, strict=True))


def test_all_blocks_of_rows_are_of_one_capture(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "MIN_REPLAYS", 10)
    counts = [20, 23, 1]  # four rows at a time
    x = leaf(50)
    with Problem(lambda x: (x.exp().cumsum(0), x.sum()), (x,)) as problem:
        output, vjps = problem.outputs[0], problem.vjps
        blocks = cuda_graph.analytical_rows(problem, output, False, 3, counts, problem.inputs)
        assert cuda.log == []
        found = [rows.clone() for rows in blocks]
        assert problem.vjps - vjps == sum(counts)
        single = problem.analytical_rows(output, False, 3, sum(counts), problem.inputs)[0]
    assert [len(rows) for rows in found] == counts
    torch.testing.assert_close(torch.cat(found), single, rtol=1e-14, atol=0)
    assert cuda.log.count("begin") == cuda.log.count("reset") == 1
    assert cuda.log.count("replay") == (20 - cuda_graph.EAGER_STEPS) // 4 + 23 // 4
    assert cuda.streams == ["current"]


def test_a_graph_ends_with_the_last_block_that_is_asked_for(cuda: Cuda) -> None:
    with Problem(lambda x: x.cumsum(0), (leaf(50),)) as problem:
        blocks = cuda_graph.analytical_rows(problem, problem.outputs[0], False, 0, [25, 25], problem.inputs)
        next(blocks)
        assert "reset" not in cuda.log
        del blocks
        assert cuda.log[-1] == "reset"


def test_few_rows_are_run_plainly(cuda: Cuda) -> None:
    with Problem(lambda x: x.cumsum(0), (leaf(40),)) as problem:
        rows = rows_of(problem, 3, cuda_graph.MIN_COLUMNS - 1, replayed=True)
        assert torch.equal(rows[0], rows_of(problem, 3, cuda_graph.MIN_COLUMNS - 1, replayed=False)[0])
    assert cuda.log == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda grad: grad * (1.0 if grad.sum() > -1e9 else 2.0), "backward reads values"),
        (lambda grad: grad + 0 * torch.rand(40), "backward draws random numbers"),
        (lambda grad: grad[grad > -9], "backward has results whose shape depends"),
    ],
)
def test_a_backward_that_a_replay_would_not_repeat_is_refused(
    cuda: Cuda, change: Callable[[Tensor], Any], reason: str
) -> None:
    with (
        Problem(doubled(lambda grad, _: change(grad)), (leaf(40),)) as problem,
        pytest.raises(executor.RejectedError, match=reason),
    ):
        rows_of(problem, 0, 40, replayed=True)
    assert "begin" not in cuda.log
    assert cuda.log[-1] == "current waits"


def test_rows_beside_other_threads_are_refused(cuda: Cuda) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        refused = pytest.raises(executor.RejectedError, match="other Python threads")
        with Problem(lambda x: x.cumsum(0), (leaf(40),)) as problem, refused:
            rows_of(problem, 0, 40, replayed=True)
    finally:
        done.set()
        thread.join()


def test_threads_that_cannot_touch_cuda_do_not_matter(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def wait() -> None:
        threading.current_thread()
        done.wait()

    def of_a_notebook() -> None:
        done.wait()

    of_a_notebook.__module__ = "ipykernel.iostream"
    thread = threading.Thread(target=of_a_notebook)
    thread.start()
    _thread.start_new_thread(wait, ())  # like autograd's threads, which the threading module did not make
    deadline = time.monotonic() + 60
    while not any(isinstance(other, threading._DummyThread) for other in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    try:
        with Problem(lambda x: x.cumsum(0), (leaf(40),)) as problem, tqdm(total=1, file=io.StringIO()):
            rows_of(problem, 0, 40, replayed=True)
    finally:
        done.set()
        thread.join()
    assert "replay" in cuda.log


def test_a_backward_on_other_streams_is_refused(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph.native, "backward_streams", lambda *_: [Stream([], "other").stream_id])
    refused = pytest.raises(executor.RejectedError, match="backward runs on streams of its own")
    with Problem(lambda x: x.cumsum(0), (leaf(40),)) as problem, refused:
        rows_of(problem, 0, 40, replayed=True)
    assert "begin" not in cuda.log


def test_a_backward_on_the_cpu_runs_on_no_stream() -> None:
    x = leaf(3)
    assert cuda_graph.native.backward_streams([x.sin().exp()], [x]) == []


def test_a_right_gradient_passes_by_replayed_rows(replaying_rows: Cuda) -> None:
    report = check(lambda x: x.cumsum(0).sin(), (leaf(40),), DENSE)
    assert report.passed
    assert report.plan is not None
    assert report.plan.rows_replayed
    assert replaying_rows.log.count("replay") == 40 - REPEATED_ROWS - cuda_graph.EAGER_STEPS


def test_blocks_of_rows_of_a_check_are_of_one_capture(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_blocks(problem: Problem, settings: Settings, look: Any) -> Plan:
        return replace(planned_rows(problem, settings, look), rows_per_block=20)

    monkeypatch.setattr("fastgrad.checks.complete.make_plan", in_blocks)
    z = leaf(25, dtype=torch.complex128)
    report = check(lambda x, z: (x.cumsum(0).sin(), z.cumsum(0) * x[0]), (leaf(50), z), DENSE)
    assert report.passed
    assert report.plan is not None
    assert report.plan.rows_replayed
    assert cuda.log.count("begin") == cuda.log.count("reset") == 3  # the second output has two parts


def test_a_wrong_row_fails_one_by_one(replaying_rows: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = doubled(lambda grad, _: torch.cat([grad[:7], 3 * grad[7:]]))
    report = check(wrong, (leaf(40),), DENSE)
    monkeypatch.undo()
    alone = check(wrong, (leaf(40),), DENSE)
    assert report.failure is not None
    assert alone.failure is not None
    assert report.failure.comparison == alone.failure.comparison
    assert report.plan is not None
    assert not report.plan.rows_replayed
    assert "a mismatch is checked again, one call at a time" in report.plan.reason


@pytest.mark.parametrize("is_once", [False, True])
def test_rows_that_replays_get_wrong_are_run_one_by_one(is_once: bool, replaying_rows: Cuda) -> None:
    log = replaying_rows.log
    factor = torch.ones((), dtype=torch.float64)

    def wrong() -> None:
        captures = log.count("begin")
        begun = [number for number, entry in enumerate(log) if entry == "begin"]
        own = log[begun[-1] :].count("replay")
        factor.fill_(1.5 if own == 5 and not (is_once and captures > 1) else 1.0)

    replaying_rows.while_replaying = wrong
    report = check(doubled(lambda grad, _: grad * factor), (leaf(40),), DENSE)
    assert log.count("replay") >= 5
    assert report.passed is not is_once  # replays are to blame only if they are wrong again
    assert report.plan is not None
    assert not report.plan.rows_replayed


def test_rows_that_cannot_be_captured_are_run_one_by_one(replaying_rows: Cuda) -> None:
    report = check(doubled(lambda grad, _: grad * (1.0 if grad.sum() > -1e9 else 2.0)), (leaf(40),), DENSE)
    assert report.passed
    assert report.plan is not None
    assert not report.plan.rows_replayed
    assert "no batches or replays: backward reads values of tensors" in report.plan.reason


def test_which_rows_are_replayed(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def speedup(problem: Any, atol: float, first: int, count: int, *ways: Any) -> float:
        asked.append(count)
        return 2.0

    monkeypatch.setattr(cuda_graph, "obstacle", lambda _: None)
    monkeypatch.setattr(executor, "obstacle", lambda _: None)
    monkeypatch.setattr(executor, "speedup", speedup)
    outputs = [SimpleNamespace(tensor=torch.empty(size)) for size in (10, 800)]
    problem: Any = SimpleNamespace(m=810, device=CUDA0, ranks=1, outputs=outputs, has_graph=True)
    look: Any = SimpleNamespace(measured=1e-3)
    assert plan._row_strategy(problem, Settings(), look) == (
        True,
        "; replays of a VJP: 2 times as fast as single calls",
    )
    assert asked == [50]
    assert not plan._row_strategy(problem, Settings(check_backward_ad=False), look)[0]
    problem.has_graph = False
    assert not plan._row_strategy(problem, Settings(), look)[0]
    problem.has_graph, look.measured = True, 1e-6
    assert not plan._row_strategy(problem, Settings(), look)[0]
    look.measured, problem.device = 1.0, torch.device("cpu")
    assert not plan._row_strategy(problem, Settings(), look)[0]
    assert asked == [50]


@pytest.mark.parametrize(
    ("error", "always", "leads"),
    [
        (executor.RejectedError, False, ["in replays of a VJP"]),
        (executor.RejectedError, True, []),
        (executor.UnsuitableError, False, []),
    ],
)
def test_a_trial_of_rows_that_is_refused_once_is_a_lead(
    error: type[executor.RejectedError], always: bool, leads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = []

    def speedup(*_: Any) -> float:
        trials.append(1)
        if always or len(trials) == 1:
            raise error("refused")
        return 2.0

    monkeypatch.setattr(cuda_graph, "obstacle", lambda _: None)
    monkeypatch.setattr(executor, "obstacle", lambda _: None)
    monkeypatch.setattr(executor, "speedup", speedup)
    outputs = [SimpleNamespace(tensor=torch.empty(800))]
    problem: Any = SimpleNamespace(m=800, device=CUDA0, ranks=1, outputs=outputs, has_graph=True)
    problem.irreproducible = []
    look: Any = SimpleNamespace(measured=1e-3)
    assert plan._row_strategy(problem, Settings(), look) == (False, "; replays of a VJP: refused")
    assert problem.irreproducible == leads


COMPRESSED = Settings(engine="compressed")


# More than 1,024 elements: fewer are copied on the CPU without operators, which could not be recorded.


@pytest.fixture
def replaying_groups(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    monkeypatch.setattr("fastgrad.checks.compressed.replays_groups", lambda *_: True)
    return cuda


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_groups_are_those_of_the_loop(
    replaying_groups: Cuda, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[Any, ...]] = []
    replayed = cuda_graph.difference_groups

    def kept(problem: Problem, *arguments: Any) -> Tensor:
        found.append((replayed(problem, *arguments), *arguments))
        return found[-1][0]

    monkeypatch.setattr(cuda_graph, "difference_groups", kept)
    inputs = leaf(20, 60).to(dtype).detach().t().requires_grad_(), leaf(20, dtype=dtype, seed=1)
    bits = [v.detach().clone() for v in inputs]
    report = check(lambda x, y: (x.exp().cumsum(-1) * y, x.exp()), inputs, COMPRESSED)
    assert report.passed
    assert report.plan is not None
    assert report.plan.replayed
    ((values, _, count, rows, columns, *_),) = found
    assert replaying_groups.log.count("replay") == count - cuda_graph.EAGER_STEPS
    with Problem(lambda x, y: (x.exp().cumsum(-1) * y, x.exp()), inputs) as problem:
        single = problem.difference_columns(0, problem.n, EPS, False)
    torch.testing.assert_close(values, single[columns, rows], rtol=0, atol=1e-8)
    assert all(torch.equal(v.detach(), old) and v._version == 0 for v, old in zip(inputs, bits, strict=True))


def test_groups_leave_out_what_is_apart(replaying_groups: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    set_costs(monkeypatch, single_calls_seconds=0.0)
    report = check(lambda x: (x.cumsum(-1), x.exp().sum()), (leaf(60, 20),), COMPRESSED)
    assert report.passed
    assert report.plan is not None
    assert report.plan.replayed
    assert report.plan.column_groups == 20
    assert "1 dense row certified" in report.notes[0]


def test_groups_of_a_wrong_gradient_fail_one_by_one(replaying_groups: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor) -> Tensor:
        return torch.cat([x[:3], x[3:].detach()]).cumsum(-1)

    x = leaf(60, 20)
    report = check(wrong, (x,), COMPRESSED)
    monkeypatch.undo()
    alone = check(wrong, (x,), COMPRESSED)
    assert report.failure is not None
    assert alone.failure is not None
    assert report.failure.comparison == alone.failure.comparison
    assert report.plan is not None
    assert not report.plan.replayed


@pytest.mark.parametrize("is_once", [False, True])
def test_groups_that_replays_get_wrong_are_taken_one_by_one(replaying_groups: Cuda, is_once: bool) -> None:
    """Replays that are always wrong are no evidence about func; if they are wrong once, func gave other values."""
    buffer = torch.ones((), dtype=torch.float64)
    begun = []

    def wrong() -> None:
        begun.append(replaying_groups.log.count("begin"))
        number = begun.count(begun[-1])
        buffer.fill_(2.0 if number == 5 and not (is_once and begun[-1] > 1) else 1.0)

    replaying_groups.while_replaying = wrong
    report = check(lambda x: x.cumsum(-1) * buffer, (leaf(60, 20),), COMPRESSED)
    assert begun[-1] == 2
    assert report.passed is not is_once
    assert not is_once or (report.failure is not None and report.failure.kind == "nondeterministic func")
    assert report.plan is not None
    assert not report.plan.replayed
    assert "no replays: their results do not add up" in report.plan.reason


def test_groups_that_cannot_be_captured(replaying_groups: Cuda) -> None:
    report = check(lambda x: x.cumsum(-1) * (1.0 if x.sum() > -1e9 else 2.0), (leaf(60, 20),), COMPRESSED)
    assert report.passed
    assert report.plan is not None
    assert not report.plan.replayed
    assert "no replays: func reads values of tensors" in report.plan.reason


@pytest.mark.parametrize("fails", [1, 1000])
def test_groups_whose_capture_raises_once(replaying_groups: Cuda, fails: int) -> None:
    raised: list[int] = []

    def func(x: Tensor) -> Tensor:
        if replaying_groups.log[-1:] == ["begin"] and len(raised) < fails:
            raised.append(1)
            raise ValueError
        return x.cumsum(-1)

    report = check(func, (leaf(60, 20),), COMPRESSED)
    assert raised
    assert report.passed is (fails > 1)
    assert report.plan is not None
    assert "no replays: func cannot be captured (ValueError)" in report.plan.reason


CUDA0 = torch.device("cuda", 0)


def test_which_groups_are_replayed(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "obstacle", lambda _: None)
    monkeypatch.setattr(executor, "obstacle", lambda _: None)
    problem: Any = SimpleNamespace(m=1000, device=CUDA0)
    look: Any = SimpleNamespace(measured=1e-3)
    roomy = Settings(memory_limit=8 * 64 * 1000)
    assert plan.replays_groups(problem, roomy, look, 64)
    assert not plan.replays_groups(problem, roomy, look, 65)
    assert not plan.replays_groups(problem, roomy, look, cuda_graph.MIN_COLUMNS - 1)
    look.measured = cost_model.COSTS.trial_seconds / 256
    assert not plan.replays_groups(problem, roomy, look, 64)
    look.measured, problem.device = 1.0, torch.device("cpu")
    assert not plan.replays_groups(problem, roomy, look, 64)


def on(*devices: torch.device) -> Any:
    """A substitute for a problem, with the devices that may prevent a capture."""
    blocks = [SimpleNamespace(tensor=SimpleNamespace(device=device)) for device in devices]
    return SimpleNamespace(device=devices[0], inputs=blocks, outputs=blocks[-1:])


def test_obstacles(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, capturing = "native", False
    monkeypatch.setattr(cuda, "get_allocator_backend", lambda: backend, raising=False)
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: capturing, raising=False)
    assert cuda_graph.obstacle(on(CUDA0, CUDA0)) is None
    assert cuda_graph.obstacle(on(torch.device("cpu"))) == "func does not run on an NVIDIA device"
    assert cuda_graph.obstacle(on(CUDA0, torch.device("cuda", 1))) == "func uses several devices"
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: True)
    assert cuda_graph.obstacle(on(CUDA0)) == "autocast caches results that a capture does not compute"
    monkeypatch.setattr(torch, "is_autocast_cache_enabled", lambda: False)
    assert cuda_graph.obstacle(on(CUDA0)) is None
    cuda_graph._abandoned.append("a graph")
    assert cuda_graph.obstacle(on(CUDA0)) == "an earlier capture was invalid"
    cuda_graph._abandoned.clear()
    capturing = True
    assert cuda_graph.obstacle(on(CUDA0)) == "a capture is under way"
    backend = "cudaMallocAsync"
    assert cuda_graph.obstacle(on(CUDA0)) == "torch's own allocator is not in use"


@pytest.mark.parametrize(
    ("batches", "replays", "record_graph", "chosen"),
    [
        (2.0, 8.0, False, (None, True)),
        (8.0, 2.0, False, (100, False)),
        (8.0, 2.0, True, (None, True)),
        (1.1, 1.2, False, (None, False)),
        (None, 3.0, False, (None, True)),
        (3.0, None, False, (100, False)),
    ],
)
def test_the_faster_way_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
    batches: float | None,
    replays: float | None,
    record_graph: bool,
    chosen: tuple[int | None, bool],
) -> None:
    def speedup(*arguments: Any) -> float:
        gain = batches if arguments[-1].func is vmapped.difference_columns else replays
        if gain is None:
            raise executor.RejectedError("func raises ValueError")
        return gain

    monkeypatch.setattr(executor, "obstacle", lambda _: None)
    monkeypatch.setattr(cuda_graph, "obstacle", lambda _: None)
    monkeypatch.setattr(vmapped, "most_columns", lambda *_: 100)
    monkeypatch.setattr(vmapped, "obstacle", lambda *_: None)
    monkeypatch.setattr(executor, "speedup", speedup)
    block = SimpleNamespace(first=0, size=1000)
    problem: Any = SimpleNamespace(
        records_differences=True, n=1000, device=CUDA0, ranks=1, inputs=[block], difference_columns=torch.empty
    )
    look: Any = SimpleNamespace(record_graph=record_graph, measured=1.0)
    *found, said = plan._column_strategy(problem, Settings(), look)
    assert tuple(found) == chosen
    if None in (batches, replays):
        assert "func raises ValueError" in said
