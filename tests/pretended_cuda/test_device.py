"""The simulated device behaves as a CUDA device, as far as checks can see."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastgrad
from fastgrad.checks import one_block
from fastgrad.checks.order import check
from fastgrad.problem.problem import Problem
from fastgrad.report.settings import Settings
from tests.pretended_cuda.plugin import ops

DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]


class Calls(TorchDispatchMode):
    """Counts the operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[op.overloadpacket.__name__] += 1
        return op(*args, **(kwargs or {}))


def leaf(*shape: int, device: torch.device = DEVICES[0]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(device).requires_grad_()


def test_fresh_memory_is_nan_and_on_the_current_device() -> None:
    for index, device in enumerate(DEVICES):
        with torch.cuda.device(index):
            fresh = torch.empty(3, dtype=torch.float64, device="cuda")
        assert fresh.device == device
        assert bool(fresh.isnan().all())
    assert torch.cuda.current_device() == 0


def test_tensors_of_several_devices_do_not_meet() -> None:
    x, y = torch.ones(3, device=DEVICES[0]), torch.ones(3, device=DEVICES[1])
    for other in (y, torch.ones(3)):
        with pytest.raises(RuntimeError, match="same device"):
            torch.add(x, other)
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([x, other])
    assert torch.equal(x * torch.tensor(2.0), x + x)  # a number
    assert torch.equal(x[torch.tensor([0, 2])], x[:2])  # indices
    assert torch.equal(y.to(DEVICES[0]), x)


def test_backward_runs_on_a_thread_of_the_device() -> None:
    class Tells(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append((threading.get_ident(), torch.cuda.current_device(), grad.device))
            return grad * 2

    seen: list[Any] = []
    for device in DEVICES:
        Tells.apply(leaf(3, device=device)).sum().backward()
    assert [place for _, *place in seen] == [[0, DEVICES[0]], [1, DEVICES[1]]]
    assert len({threading.get_ident(), *(thread for thread, *_ in seen)}) == 3


def test_what_waits_for_the_device_is_counted_and_can_be_forbidden() -> None:
    x = leaf(4).detach()
    before = ops.reads()
    waits = [lambda: x.sum().item(), lambda: x.cpu(), lambda: x.nonzero(), lambda: torch.ones(2).to(x.device)]
    for wait in waits:
        wait()
    assert ops.reads() - before == len(waits)
    y = x.sin().add_(1).view(2, 2).t().contiguous()
    assert ops.reads() - before == len(waits)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y.cos()
        for wait in waits:
            with pytest.raises(RuntimeError, match="synchronizing"):
                wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(y.isfinite().all())


def test_streams_and_events() -> None:
    default = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    assert side != default
    assert torch.cuda.Stream() != side
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        assert torch.cuda.current_stream(1) == torch.cuda.default_stream(1)
        (grad,) = torch.autograd.grad(leaf(3).sin().sum(), [x := leaf(3)], allow_unused=True)
        assert grad is None
        (grad,) = torch.autograd.grad(x.sin().sum(), x)
    assert torch.cuda.current_stream() == default
    torch.testing.assert_close(grad, x.detach().cos())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) >= 0


def test_backward_runs_on_the_stream_of_the_forward() -> None:
    side, seen = torch.cuda.Stream(), []
    with torch.cuda.stream(side):
        y = leaf(3).sin()
    y.register_hook(lambda _: seen.append(torch.cuda.current_stream()))
    y.sum().backward()
    assert seen == [side]


def test_random_numbers_are_the_devices_own() -> None:
    torch.manual_seed(0)
    cpu = torch.get_rng_state()
    state = torch.cuda.get_rng_state(0)
    first = torch.rand(3, device="cuda"), torch.nn.functional.dropout(torch.ones(8, device="cuda"))
    torch.cuda.set_rng_state(state, 0)
    again = torch.rand(3, device="cuda"), torch.nn.functional.dropout(torch.ones(8, device="cuda"))
    assert all(map(torch.equal, first, again))
    assert torch.equal(torch.get_rng_state(), cpu)
    generators = [torch.Generator("cuda").manual_seed(5) for _ in range(2)]
    assert torch.equal(*(torch.randn(3, generator=generator, device="cuda") for generator in generators))


def test_views_share_memory_and_outputs_are_resized() -> None:
    x = leaf(4, 6).detach()
    x.t()[1:3].fill_(7.0)
    assert bool((x[:, 1:3] == 7).all())
    out = torch.empty(0, dtype=torch.float64, device="cuda")
    torch.sin(x, out=out)
    torch.testing.assert_close(out.cpu(), x.cpu().sin(), rtol=0, atol=0)
    z = torch.view_as_complex(leaf(5, 2).detach())
    assert z.conj().is_conj()
    torch.testing.assert_close((z.conj() * z).cpu(), z.cpu().conj() * z.cpu())
    zeros = torch._efficientzerotensor((3,), device="cuda")
    assert zeros._is_zerotensor()
    assert torch.equal(zeros + 1, torch.ones(3, device="cuda"))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors(layout: torch.layout) -> None:
    dense = leaf(4, 6).detach().relu()
    sparse = dense.to_sparse(layout=layout)
    assert sparse.device == dense.device
    assert sparse.layout == layout
    assert torch.equal(sparse.to_dense(), dense)
    assert torch.equal(sparse.cpu().to_dense(), dense.cpu())


def test_kernels_of_the_project_refuse_several_devices() -> None:
    x = leaf(3).detach()
    with pytest.raises(RuntimeError, match="displace_: all tensors must be on one device"):
        torch.ops.fastgrad.displace_(x, x.clone(), x.cpu(), 1.0)


@pytest.mark.parametrize("numel", [3, 700])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keywords", [{}, {"fast_mode": True}, {"engine": "dense"}])
def test_a_single_real_output(device: torch.device, numel: int, keywords: dict[str, Any]) -> None:
    for func in (lambda x: x.sin().sum(), lambda x: x[:1] * 2, lambda x: (x * x).mean()):
        assert fastgrad.gradcheck(func, (leaf(numel, device=device),), **keywords)
    with pytest.raises(fastgrad.GradcheckError):
        fastgrad.gradcheck(lambda x: x.sum() * x.detach()[0], (leaf(numel, device=device),), **keywords)


def test_rows_of_a_small_problem_are_one_vectorized_backward_and_few_reads() -> None:
    x = leaf(20)
    with Problem(lambda x: x.cumsum(0).sin(), (x,)) as problem:
        assert problem.vectorizes
        whole = one_block.whole_backward(problem, Settings(), 1e-6)
        assert whole.vectorized
        assert whole.add_up
    before = ops.reads()
    report = check(lambda x: x.cumsum(0).sin(), (x,), Settings())
    assert report.passed
    assert report.vjps <= 20 + 10
    assert ops.reads() - before <= 13


def test_columns_of_a_small_problem_are_one_vectorized_call_and_few_reads() -> None:
    before = ops.reads()
    report = check(lambda x: x.cumsum(0).sin(), (leaf(100),), Settings())
    assert report.passed
    assert report.plan is not None
    assert report.plan.batch == 100
    assert report.evaluations <= 16
    # 13 for rows, as above, and 14 for the columns and their tests. They replace the launches of 184 evaluations.
    assert ops.reads() - before <= 27


def test_calls_for_a_column() -> None:
    inputs = leaf(40), leaf(30)
    before = [x.detach().clone() for x in inputs]
    of_cpu_inputs = tuple(x.cpu().requires_grad_() for x in before)
    with Problem(lambda x, y: torch.cat([x.sin(), y]), inputs) as problem:
        with Calls() as calls:
            columns = problem.difference_columns(0, 70, 1e-6, False)
        with Problem(lambda x, y: torch.cat([x.sin(), y]), of_cpu_inputs) as of_cpu:
            assert torch.equal(columns.cpu(), of_cpu.difference_columns(0, 70, 1e-6, False))
    # A coordinate is restored with the first step of the next one, and the last one of each input separately.
    own = {"perturb_coordinate_": 2 * 70 + 2, "flatten_": 70, "central_difference_": 70, "as_strided": 2 * 70}
    assert {name: calls.counts[name] for name in own} == own
    assert all(torch.equal(x.detach(), old) for x, old in zip(inputs, before, strict=True))
