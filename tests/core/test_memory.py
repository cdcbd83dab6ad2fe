"""How much memory a check may take, how much it takes, and what happens if there is too little."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.core import native
from fastgrad.core.memory import UNKNOWN_BYTES, free_bytes, raises_memory_error
from fastgrad.core.native import IS_NATIVE
from tests.costs import set_costs

GIB = 1 << 30
PAGE = os.sysconf("SC_PAGE_SIZE")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemFree: 1024 kB\nMemAvailable:   {32 << 20} kB\n")
    write(tmp_path / "proc/self/statm", f"{GIB // PAGE} 5 5 5 0 5 0\n")
    return tmp_path / "proc"


def version_2(cgroups: Path, group: str, limit: int | str, used: int, inactive: int) -> None:
    write(cgroups / group / "memory.max", f"{limit}\n")
    write(cgroups / group / "memory.current", f"{used}\n")
    write(cgroups / group / "memory.stat", f"anon 17\ninactive_file {inactive}\nactive_file 5\n")


def test_file_cache_counts_as_free(proc: Path, tmp_path: Path) -> None:
    assert free_bytes(proc, tmp_path / "none") == 32 * GIB


def test_the_limit_of_the_address_space(proc: Path, tmp_path: Path) -> None:
    assert free_bytes(proc, tmp_path / "none", address_space=8 * GIB) == 7 * GIB
    assert free_bytes(proc, tmp_path / "none", address_space=GIB // 2) == 0


@pytest.mark.parametrize("group", ["", "user/session"])
def test_groups_of_version_2(proc: Path, tmp_path: Path, group: str) -> None:
    write(proc / "self/cgroup", f"0::/{group}\n")
    version_2(tmp_path, group, 4 * GIB, 3 * GIB, 2 * GIB)
    assert free_bytes(proc, tmp_path) == 3 * GIB
    version_2(tmp_path, group, "max", 3 * GIB, 0)
    assert free_bytes(proc, tmp_path) == 32 * GIB


def test_a_group_is_limited_by_those_around_it(proc: Path, tmp_path: Path) -> None:
    write(proc / "self/cgroup", "0::/user/session\n")
    version_2(tmp_path, "user/session", 4 * GIB, 0, 0)
    version_2(tmp_path, "user", 3 * GIB, GIB, 0)
    assert free_bytes(proc, tmp_path) == 2 * GIB


@pytest.mark.parametrize("where", ["memory/docker/7f", "memory"], ids=["host's path", "container's root"])
def test_groups_of_version_1(proc: Path, tmp_path: Path, where: str) -> None:
    write(proc / "self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/7f\n0::/\n")
    write(tmp_path / where / "memory.limit_in_bytes", f"{2 * GIB}\n")
    write(tmp_path / where / "memory.usage_in_bytes", f"{2 * GIB}\n")
    write(tmp_path / where / "memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB}\n")
    assert free_bytes(proc, tmp_path) == GIB
    write(tmp_path / where / "memory.limit_in_bytes", f"{(1 << 63) - 4096}\n")  # the kernel's value for no limit
    assert free_bytes(proc, tmp_path) == 32 * GIB


def test_systems_without_these_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert free_bytes(tmp_path, tmp_path) == 1000 * 4096

    def without_free_pages(name: str) -> int:
        if name == "SC_AVPHYS_PAGES":
            raise ValueError("unrecognized configuration name")
        return {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}[name]

    monkeypatch.setattr(os, "sysconf", without_free_pages)
    assert free_bytes(tmp_path, tmp_path) == 500 * 4096
    monkeypatch.delattr(os, "sysconf")
    assert free_bytes(tmp_path, tmp_path) == UNKNOWN_BYTES


def test_the_real_one() -> None:
    assert 0 < free_bytes() < 1 << 60


def test_the_allocators_error_is_a_memory_error() -> None:
    def allocate() -> Tensor:
        return torch.empty(1 << 50)

    with pytest.raises(MemoryError, match="you tried to allocate 4503599627370496 bytes"):
        raises_memory_error(allocate)()

    def other() -> Tensor:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        raises_memory_error(other)()


@pytest.mark.skipif(not IS_NATIVE, reason="plain Python has no small checks")
@pytest.mark.parametrize("count", [0, 1, 1 << 18, (1 << 18) + 1])
def test_vectors_in_small_and_huge_pages(count: int) -> None:
    vectors = native.empty_vectors([2, count])
    assert vectors.shape == (2, count)
    assert vectors.dtype == torch.float64
    assert vectors.is_contiguous()
    vectors.fill_(1.0)
    assert float(vectors.sum()) == 2 * count


@pytest.mark.skipif(not IS_NATIVE, reason="plain Python has no small checks")
def test_vectors_for_which_there_is_no_memory() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        native.empty_vectors([1 << 50])
    with pytest.raises(RuntimeError, match="overflow"):
        native.empty_vectors([1 << 62, 4])
    with pytest.raises(RuntimeError, match="negative"):
        native.empty_vectors([-2, -(1 << 20)])


def leaf(*shape: int) -> Tensor:
    return torch.linspace(0.2, 0.9, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape).requires_grad_()


ERRORS = [
    MemoryError("planted"),
    torch.OutOfMemoryError("planted"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: planted"),
]


class Hungry:
    """Raises an out-of-memory error in evaluations number `first` to `last`."""

    def __init__(self, error: Exception, first: int, last: int) -> None:
        self.error, self.first, self.last, self.calls = error, first, last, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.first <= self.calls <= self.last:
            raise type(self.error)(*self.error.args)  # a new one each time
        return x * x


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_compressed_engine_gives_way_to_the_dense_one(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgrad.checks.order.small_check", lambda *_: None)
    report = fastgrad.check(Hungry(error, 7, 8), leaf(1000))
    assert report.passed
    assert report.plan is not None
    assert report.plan.engine == "dense"
    assert "the compressed engine ran out of memory" in report.plan.reason


@pytest.mark.parametrize("small", [True, False], ids=["small check", "complete check"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_dense_engine_takes_fewer_columns(error: Exception, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = leaf(40)
    # On a busy machine, a trial of batches would make one of the calls; a small check would make few.
    monkeypatch.setattr("fastgrad.engines.plan._column_strategy", lambda *_: (None, False, ""))
    set_costs(monkeypatch, vectorized_columns_seconds=1.0)
    if not small:
        monkeypatch.setattr("fastgrad.checks.order.small_check", lambda *_: None)
    # Every lack of memory must recur: calls are repeated once. A small check (not in plain Python) computes all columns
    # at once; it is repeated as a whole. The second lack frees the first graph, and the third is in the dense engine.
    last = 55 if small and IS_NATIVE else 51
    report = fastgrad.check(Hungry(error, 50, last), x, engine="dense")
    assert report.passed
    assert report.plan is not None
    assert report.plan.columns_per_pass == 10
    assert "out of memory: 10 of 40 columns at a time" in report.plan.reason


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("engine", "first"), [("auto", 2), ("auto", 8), ("dense", 2), ("dense", 8), ("compressed", 2), ("compressed", 8)]
)
def test_no_memory_is_no_wrong_gradient(error: Exception, engine: str, first: int) -> None:
    text = r"(?s)ran out of memory, with \d+ bytes for 2 of 40 columns .* at a time: [^.]+\. In .*memory_limit="
    with pytest.raises(MemoryError, match=text):
        fastgrad.gradcheck(Hungry(error, first, 10**9), leaf(40), engine=engine)


class Square(torch.autograd.Function):
    """Its backward raises in calls `first` to `last`."""

    calls: int
    first: int
    last: int

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        Square.calls += 1
        if Square.first <= Square.calls <= Square.last:
            torch.empty(1 << 50)
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return 2 * x * grad


@pytest.mark.parametrize("engine", ["auto", "dense", "compressed"])
@pytest.mark.parametrize("first", range(1, 5))
def test_nor_is_it_in_backward(engine: str, first: int) -> None:
    for last in (first, 10**9):
        Square.calls, Square.first, Square.last = 0, first, last
        with pytest.raises((MemoryError, RuntimeError), match="can't allocate memory") as raised:
            fastgrad.gradcheck(Square.apply, leaf(40), engine=engine)
        assert not isinstance(raised.value, fastgrad.GradcheckError)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("engine", ["auto", "dense", "compressed"])
@pytest.mark.parametrize("size", [5, 40])
def test_a_lack_that_does_not_recur_is_raised(error: Exception, engine: str, size: int) -> None:
    calls = fastgrad.check(torch.square, leaf(size), engine=engine).evaluations
    for number in range(1, calls + 1):
        with pytest.raises((MemoryError, RuntimeError), match="planted"):
            fastgrad.gradcheck(Hungry(error, number, number), leaf(size), engine=engine)


def test_a_small_check_that_lacked_memory_twice_says_so() -> None:
    report = fastgrad.check(Hungry(MemoryError("planted"), 3, 4), leaf(5))
    assert report.passed
    assert any("ran out of memory" in note for note in report.notes) == IS_NATIVE


def test_a_want_of_memory_is_told() -> None:
    report = fastgrad.check(lambda x: x.cumsum(0).sin(), leaf(100), memory_limit=8 * 100 * 10, engine="dense")
    assert report.plan is not None
    assert "memory for 10 of 100 columns at a time" in report.plan.reason
    report = fastgrad.check(torch.sin, leaf(1000), memory_limit=8 * 1000 * 5)
    assert report.plan is not None
    assert report.plan.engine == "dense"
    assert "memory allows 714 entries of a sparse Jacobian that may have 1000" in report.plan.reason
    assert "memory for 50 of 1000 columns at a time" in report.plan.reason


MEASURE = """
import resource, torch, fastgrad
torch.manual_seed(0)
torch.set_num_threads(1)
{setup}
warm = torch.ones(300, dtype=torch.float64, requires_grad=True)
for engine in ("dense", "compressed", "auto"):  # memory of imports, and of libraries at their first call
    fastgrad.check(lambda x: x.cumsum(0).sin(), warm, engine=engine)
torch.func.vmap(torch.tanh)(warm)
func(x).abs().sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = fastgrad.check(func, x, {keywords})
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert report.passed
print(1024 * (after - before), report.plan.memory, report.plan.engine)
"""


def measured(setup: str, keywords: str = "") -> tuple[int, int, str]:
    """By how much a check increases a new process's peak resident memory, the memory of the plan, and the engine."""
    script = MEASURE.format(setup=setup, keywords=keywords)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    return int(found[0]), int(found[1]), found[2]


@pytest.mark.parametrize(
    "setup",
    [
        "func = torch.fft.rfft; x = torch.randn(2000, dtype=torch.float64, requires_grad=True)",
        "W = torch.randn(1500, 1500, dtype=torch.float64) / 40; func = lambda x: torch.tanh(W @ x)\n"
        "x = torch.randn(1500, dtype=torch.float64, requires_grad=True)",
    ],
    ids=["rfft", "mix"],
)
def test_dense_jacobians_take_what_the_plan_says(setup: str) -> None:
    grown, planned, engine = measured(setup)
    assert engine == "dense"
    assert grown <= 1.2 * planned + (4 << 20)  # for the interpreter and func
    whole = 8 * 2000 * 2002 if "rfft" in setup else 8 * 1500 * 1500
    assert planned < 1.5 * whole


@pytest.mark.parametrize("modes", ["", "check_forward_ad=True", "check_forward_ad=True, check_backward_ad=False"])
def test_a_memory_limit_holds_in_each_mode(modes: str) -> None:
    # A whole Jacobian takes 32 MB. Columns of one pass are released before those of the next pass are computed, and
    # forward mode holds one piece of its own columns at a time.
    setup = """
func = lambda x: (x.sin().sum() + torch.arange(2000, dtype=torch.float64)).sin()
x = torch.randn(2000, dtype=torch.float64, requires_grad=True)
fastgrad.check(func, x[:2].detach().requires_grad_(), engine="dense", check_forward_ad=True)  # memory of imports
"""
    limit = 12_000_000
    grown, planned, engine = measured(setup, f"engine='dense', memory_limit={limit}, {modes}")
    assert engine == "dense"
    assert planned <= limit + (1 << 20)
    assert grown <= planned + (6 << 20)  # for the interpreter, func, and the vectors of the linearity test


def test_a_memory_limit_holds_a_sparse_jacobian() -> None:
    grown, planned, engine = measured(
        "func = lambda x: x.softmax(-1); x = torch.randn(16, 400, dtype=torch.float64, requires_grad=True)",
    )
    assert engine == "compressed"
    assert planned == 56 * 16 * 400 * 400
    assert grown <= 1.2 * planned


def test_address_space(tmp_path: Path) -> None:
    free = "import resource; resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)); "
    free += "import fastgrad.core.memory as m; "
    found = subprocess.run(
        [sys.executable, "-c", free + "print(m.free_bytes())"], capture_output=True, text=True, check=True
    )
    assert 0 < int(found.stdout) < 8 << 30


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("keywords", [{"engine": "dense"}, {"engine": "compressed"}, {"fast_mode": True}], ids=str)
def test_the_first_graph_gives_way_to_a_new_one(
    error: Exception, keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastgrad.checks.order.small_check", lambda *_: None)
    x, refused = leaf(40), []
    at = x.detach().clone()
    first: list[weakref.ref[Tensor]] = []

    def func(v: Tensor) -> Tensor:
        if first and torch.is_grad_enabled() and torch.equal(v, at) and first[0]() is not None:
            refused.append(1)
            raise error
        result = v.sin() * v
        first.append(weakref.ref(result))
        return result

    report = fastgrad.check(func, x, **keywords)
    assert report.passed
    assert any("the first graph" in note for note in report.notes)
    assert len(refused) == 2  # the evaluation was repeated: a lack of memory recurs


def test_a_lack_is_raised_if_the_repeated_call_raises_something_else() -> None:
    class HungryThenBroken(Hungry):
        def __call__(self, x: Tensor) -> Tensor:
            if self.calls == self.last:
                raise ValueError("later")
            return super().__call__(x)

    for engine in ("auto", "dense", "compressed"):
        with pytest.raises(MemoryError, match="planted"):
            fastgrad.gradcheck(HungryThenBroken(MemoryError("planted"), 7, 7), leaf(1000), engine=engine)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("mode", ["batched gradients", "batched tangents", "undefined grad_outputs"])
def test_no_memory_for_special_vectors_is_no_wrong_gradient(error: Exception, mode: str) -> None:
    calls, last = 0, 10**9

    def raise_in_last(gradient: Tensor | None = None) -> Tensor | None:
        nonlocal calls
        calls += 1
        if calls == last:
            raise type(error)(*error.args)
        return gradient

    def func(x: Tensor) -> Tensor:
        if mode == "batched tangents":
            raise_in_last()
        y = x.sin()
        if mode != "batched tangents" and y.requires_grad:
            y.register_hook(raise_in_last)
        return y

    def check() -> None:
        batched = {"check_batched_grad": True} if mode == "batched gradients" else {}
        forward = {"check_forward_ad": True, "check_backward_ad": False, "check_batched_forward_grad": True}
        fastgrad.gradcheck(func, leaf(4), **(forward if mode == "batched tangents" else batched))

    check()
    count, calls = calls, 0
    for number in range(1, count + 1):
        calls, last = 0, number
        with pytest.raises((MemoryError, RuntimeError), match="planted") as raised:
            check()
        assert not isinstance(raised.value, fastgrad.GradcheckError)
