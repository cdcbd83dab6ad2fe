"""Replays of a CUDA graph and vmapped batches on CUDA give the columns of the loop; refused ones leave no traces."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgrad.checks.order import check
from fastgrad.engines import cuda_graph, executor, vmapped
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings
from tests.checks.test_sketch import doubled
from tests.costs import set_costs
from tests.engines.test_vmapped import leaf

EPS = 1e-6
DENSE = Settings(engine="dense")


KEPT: list[Any] = []
"""Graphs of invalid captures, of which other tests need not know."""


def chain(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Many small kernels, some through libraries."""
    h = torch.tanh(x @ y)
    for _ in range(4):
        h = h.softmax(-1) @ h.t()
    return h, h.cumsum(0).sum(1)


def inputs(device: torch.device) -> tuple[Tensor, Tensor]:
    x, y = leaf(6, 8), leaf(8, 6, seed=1)
    return x.detach().to(device).requires_grad_(), y.detach().to(device).t().contiguous().t().requires_grad_()


def complex_func(x: Tensor) -> Tensor:
    return torch.fft.fft(x).cumsum(0)


def reserved_memory(device: torch.device) -> int:
    """Memory that torch's allocator reserves and cannot free."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()  # one per handle and stream, 32 MiB on newer devices
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


@pytest.fixture
def as_before(device: torch.device) -> Iterator[None]:
    """Asserts that stream, generator and allocator are unchanged."""
    torch.zeros(1, device=device)
    generator = torch.cuda.default_generators[device.index]
    streams = [torch.cuda.current_stream(k) for k in range(torch.cuda.device_count())]
    current, state = torch.cuda.current_device(), generator.get_state()
    reserved = reserved_memory(device)
    yield
    assert [torch.cuda.current_stream(k) for k in range(torch.cuda.device_count())] == streams
    assert torch.cuda.current_device() == current
    assert torch.equal(generator.get_state(), state)
    assert reserved_memory(device) - reserved <= 64 << 20
    # If the generator were still in capture mode, set_state would raise. If the allocator were, nothing would be freed.
    torch.rand(8, device=device)
    generator.set_state(state)
    held = reserved_memory(device)
    torch.empty(1 << 28, dtype=torch.uint8, device=device)
    assert reserved_memory(device) == held


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("record_graph", [False, True])
def test_replayed_columns_are_those_of_the_loop(device: torch.device, record_graph: bool) -> None:
    for func, arguments in (
        (chain, inputs(device)),
        (complex_func, (leaf(40, dtype=torch.complex128).detach().to(device).requires_grad_(),)),
    ):
        with Problem(func, arguments) as problem:
            assert cuda_graph.obstacle(problem) is None
            single = problem.difference_columns(0, problem.n, EPS, record_graph)
            columns = cuda_graph.difference_columns(problem, 0, problem.n, EPS, record_graph)
            torch.testing.assert_close(columns, single, rtol=0, atol=1e-8)
            assert executor.disagreement(problem, Settings(), 0, columns, record_graph) == 1


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("size", [1024, 1050])
def test_many_columns_at_a_time(device: torch.device, size: int) -> None:
    x = leaf(size).detach().to(device).requires_grad_()
    with Problem(lambda x: x.cumsum(0).sin(), (x,)) as problem:
        single = problem.difference_columns(0, size, EPS, False)
        columns = cuda_graph.difference_columns(problem, 0, size, EPS, False)
        torch.testing.assert_close(columns, single, rtol=0, atol=1e-8)


@pytest.mark.usefixtures("as_before")
def test_replayed_rows_are_those_of_the_loop(device: torch.device) -> None:
    for func, arguments in (
        (chain, inputs(device)),
        (complex_func, (leaf(40, dtype=torch.complex128).detach().to(device).requires_grad_(),)),
    ):
        with Problem(func, arguments) as problem:
            problem.vjp(torch.ones(1, problem.m, dtype=torch.float64, device=device))  # a graph on this stream
            for output in problem.outputs:
                for imaginary in (False, True) if output.is_complex else (False,):
                    count = output.tensor.numel()
                    single, _, _ = problem.analytical_rows(output, imaginary, 0, count, problem.inputs)
                    counts = [count - count // 2, count // 2]
                    blocks = cuda_graph.analytical_rows(problem, output, imaginary, 0, counts, problem.inputs)
                    rows = torch.cat([block.clone() for block in blocks])
                    torch.testing.assert_close(rows, single, rtol=1e-10, atol=1e-12)


def waits(grad: Tensor) -> Tensor:
    torch.cuda.synchronize(grad.device)
    return grad


def elsewhere(grad: Tensor) -> Tensor:
    with torch.cuda.stream(torch.cuda.default_stream(grad.device)):
        return grad * 1


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda grad: grad * (1.0 if grad.sum() > -9 else 2.0), "backward reads values"),
        (lambda grad: grad + 0 * torch.rand_like(grad), "backward draws random numbers"),
        (elsewhere, "backward uses streams of its own"),
        (waits, "backward cannot be captured"),  # the capture is invalid, which no operator shows
    ],
)
def test_refused_rows(
    change: Callable[[Tensor], Tensor], reason: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = leaf(40).detach().to(device).requires_grad_()
    monkeypatch.setattr(cuda_graph, "_abandoned", KEPT)
    generator = torch.cuda.default_generators[device.index]
    state = generator.get_state()
    with Problem(doubled(lambda grad, _: change(grad)), (x,)) as problem:
        (output,) = problem.outputs
        with pytest.raises(executor.RejectedError, match=reason):
            next(cuda_graph.analytical_rows(problem, output, False, 0, [40], problem.inputs))
        rows, _, _ = problem.analytical_rows(output, False, 0, 40, problem.inputs)
    generator.set_state(state)
    torch.testing.assert_close(rows, 2 * torch.eye(40, dtype=torch.float64, device=device))


def test_a_graph_of_the_users_keeps_rows_from_being_captured(device: torch.device) -> None:
    x = leaf(40).detach().to(device).requires_grad_()
    kept = x.sin()  # the node of x belongs to this stream, and all graphs of x use it
    with Problem(lambda x: x.cumsum(0), (x,)) as problem:
        refused = pytest.raises(executor.RejectedError, match="backward runs on streams of its own")
        with refused:
            next(cuda_graph.analytical_rows(problem, problem.outputs[0], False, 0, [40], problem.inputs))
    assert kept.requires_grad


@pytest.mark.usefixtures("as_before")
def test_batched_columns_are_those_of_the_loop(device: torch.device) -> None:
    with Problem(chain, inputs(device)) as problem:
        single = problem.difference_columns(0, problem.n, EPS, False)
        columns = vmapped.difference_columns(problem, 0, problem.n, 17, EPS)
        torch.testing.assert_close(columns, single, rtol=0, atol=1e-8)


def test_on_a_stream_of_the_users(device: torch.device) -> None:
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        x = torch.zeros(40, dtype=torch.float64, device=device)
        torch.cuda._sleep(100_000_000)  # code that does not wait for the stream reads zeros
        x.copy_(leaf(40).detach())
        x.requires_grad_()
        with Problem(lambda x: x.cumsum(0).exp(), (x,)) as problem:
            columns = cuda_graph.difference_columns(problem, 0, 40, EPS, False)
            single = problem.difference_columns(0, 40, EPS, False)
            torch.testing.assert_close(columns, single, rtol=0, atol=1e-7)


def synchronizes(x: Tensor) -> Tensor:
    torch.cuda.synchronize(x.device)
    return x.cumsum(0)


def synchronizes_and_swallows(x: Tensor) -> Tensor:
    with suppress(RuntimeError):
        torch.cuda.current_stream(x.device).synchronize()
    return x.cumsum(0)


def launches_elsewhere(x: Tensor) -> Tensor:
    with torch.cuda.stream(torch.cuda.default_stream(x.device)):
        return x.cumsum(0)


REFUSED: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (lambda x: x * x.sum().item(), "reads values"),
    (lambda x: x[x > -9].cumsum(0), "shape depends on values"),
    (lambda x: x + 0 * torch.rand_like(x), "random"),
    (lambda x: x.cumsum(0) + torch.ones(40, dtype=torch.float64).to(x.device), "another device"),
    (lambda x: x.cpu().cumsum(0).to(x.device), "another device"),
    (launches_elsewhere, "streams of its own"),
    # The capture is invalid, which no operator shows.
    (synchronizes, "cannot be captured"),
    (synchronizes_and_swallows, "cannot be captured"),
]


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(("func", "reason"), REFUSED)
def test_refused(
    func: Callable[[Tensor], Tensor], reason: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = leaf(40).detach().to(device).requires_grad_()
    bits = x.detach().clone()
    monkeypatch.setattr(cuda_graph, "_abandoned", KEPT)
    generator = torch.cuda.default_generators[device.index]
    state = generator.get_state()
    with Problem(func, (x,)) as problem:
        with pytest.raises(executor.RejectedError, match=reason):
            cuda_graph.difference_columns(problem, 0, 40, EPS, False)
        assert torch.equal(x.detach(), bits)
        # Afterwards single calls are made, then another capture.
        problem.difference_columns(0, 40, EPS, False)
    generator.set_state(state)  # the generator keeps the state after func's draws
    with Problem(lambda x: x.cumsum(0), (x,)) as problem:
        columns = cuda_graph.difference_columns(problem, 0, 40, EPS, False)
        torch.testing.assert_close(columns, torch.ones_like(columns).triu(), rtol=0, atol=1e-8)


def test_replays_do_not_wait_for_the_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    capture, modes = cuda_graph._capture, [torch.cuda.get_sync_debug_mode()]

    def captured(*arguments: Any) -> Any:
        graph = capture(*arguments)
        torch.cuda.set_sync_debug_mode("error")
        return graph

    x = leaf(40).detach().to(device).requires_grad_()
    with Problem(lambda x: x.cumsum(0), (x,)) as problem:
        widths = problem.coordinate_widths(EPS)
        monkeypatch.setattr(cuda_graph, "_capture", captured)
        monkeypatch.setattr(problem, "coordinate_widths", lambda _: widths)
        try:
            cuda_graph.difference_columns(problem, 0, 40, EPS, False)
        finally:
            torch.cuda.set_sync_debug_mode(modes[0])


def test_replayed_groups(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    set_costs(monkeypatch, trial_seconds=0.0)
    x = leaf(60, 20).detach().to(device).requires_grad_()
    compressed = Settings(engine="compressed")
    right = check(lambda x: x.cumsum(-1).exp(), (x,), compressed)
    assert right.passed
    assert right.plan is not None
    assert right.plan.replayed, right.plan.reason
    wrong = check(lambda x: torch.cat([x[:5], x[5:].detach()]).cumsum(-1), (x,), compressed)
    assert wrong.failure is not None
    assert wrong.failure.kind == "mismatch"
    assert wrong.plan is not None
    assert "a mismatch is checked again, one call at a time" in wrong.plan.reason


@pytest.mark.parametrize("way", ["batches", "replays"])
def test_verdicts(way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return chain(torch.cat([x[:5], x[5:].detach()]), y)

    speedup = executor.speedup

    def forced(*arguments: Any) -> float:
        speedup(*arguments)
        of_batches = getattr(arguments[-1], "func", None) is vmapped.difference_columns
        return 10.0 if of_batches is (way == "batches") else 0.0

    set_costs(monkeypatch, guess_seconds=0.0)
    set_costs(monkeypatch, trial_seconds=0.0)
    monkeypatch.setattr(executor, "speedup", forced)
    right = check(chain, inputs(device), DENSE)
    assert right.passed
    assert right.plan is not None
    assert (right.plan.replayed, right.plan.batch is not None) == (way == "replays", way == "batches")
    assert right.plan.rows_replayed == (way == "replays"), right.plan.reason
    failed = check(wrong, inputs(device), DENSE)
    assert failed.failure is not None
    assert failed.failure.kind == "mismatch"
    assert failed.failure.input == 0
    assert failed.plan is not None
    assert "a mismatch is checked again, one call at a time" in failed.plan.reason
