"""An interrupted check resumes from its checkpoint and gives the report of an uninterrupted check."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.sharding.checkpoint import Checkpoint
from fastgrad.tools import cli
from tests.distributed import kills
from tests.distributed.run_sharded import checks, outcome
from tests.planted.row import function

CALL = {"func": "sin", "atol": "1e-05"}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a checkpoint into which all work goes, item by item."""
    monkeypatch.setattr("fastgrad.sharding.problem.WORTH_KEEPING", -1.0)
    monkeypatch.setattr("fastgrad.sharding.checkpoint.COMMIT_SECONDS", -1.0)
    monkeypatch.setattr("fastgrad.sharding.workers._PART_SECONDS", (0.0, 0.0))
    return tmp_path / "checkpoint"


class _Counted:
    """A function that counts its calls, and raises at one of them."""

    def __init__(self, func: Callable[..., Any], raises_at: int = 0) -> None:
        self._func, self._raises_at = func, raises_at
        self.calls = 0

    def __call__(self, *arguments: Tensor) -> Any:
        self.calls += 1
        if self.calls == self._raises_at:
            raise KeyboardInterrupt
        return self._func(*arguments)


@pytest.mark.parametrize("name", kills.NAMES)
def test_the_report_is_that_of_a_check_without(name: str, path: Path) -> None:
    func, make, keywords = checks()[name]
    whole = _Counted(func)
    expected = outcome(whole, make, keywords, None)
    for calls in (whole.calls // 2, whole.calls // 3):
        with pytest.raises(KeyboardInterrupt):
            fastgrad.check(_Counted(func, calls), make(), checkpoint=path, **keywords)
        assert path.exists()
    assert outcome(_Counted(func), make, keywords | {"checkpoint": path}, None) == expected
    assert not path.exists()


@pytest.mark.parametrize(
    ("engine", "forward", "calls"), [("dense", False, 390), ("dense", True, 590), ("compressed", False, 270)]
)
def test_what_is_kept_is_not_computed_again(engine: Any, forward: bool, calls: int, path: Path) -> None:
    x = torch.linspace(-1, 1, 200, dtype=torch.float64, requires_grad=True)
    func = _bands if engine == "compressed" else _sums
    keywords = {"engine": engine, "check_forward_ad": forward, "checkpoint": path}
    with pytest.raises(KeyboardInterrupt):
        fastgrad.check(_Counted(func, calls), x, **keywords)
    rest = _Counted(func)
    report = fastgrad.check(rest, x, **keywords)
    assert report.passed
    assert report.plan.engine == engine
    assert rest.calls < 0.65 * report.evaluations, (rest.calls, report)


def _sums(x: Tensor) -> Tensor:
    return x.cumsum(0)


def _bands(x: Tensor) -> Tensor:
    return x.unfold(0, 64, 1).cos().prod(-1)


def test_another_check(path: Path) -> None:
    x = torch.ones(5, dtype=torch.float64, requires_grad=True)
    with pytest.raises(KeyboardInterrupt):
        fastgrad.check(_Counted(torch.sin, 4), x, checkpoint=path)
    with pytest.raises(ValueError, match=r"belongs to another check: inputs\[0\] was .*Remove the file"):
        fastgrad.check(_Counted(torch.sin), x * 2, checkpoint=path)
    with pytest.raises(ValueError, match=r"atol was 1e-05, and is now 0\.001"):
        fastgrad.check(_Counted(torch.sin), x, atol=1e-3, checkpoint=path)
    assert fastgrad.check(_Counted(torch.sin), x, memory_limit=1 << 20, checkpoint=path).passed


def test_another_file(path: Path) -> None:
    path.write_text("notes, of some length, that are not to be lost")
    with pytest.raises(ValueError, match="is not a checkpoint of fastgrad"):
        Checkpoint(path, CALL)
    assert path.read_text().startswith("notes")
    with pytest.raises(ValueError, match="cannot be opened"):
        Checkpoint(path.parent / "missing" / "checkpoint", CALL)


def test_a_damaged_file(path: Path) -> None:
    x = torch.ones(60, dtype=torch.float64, requires_grad=True)
    with pytest.raises(KeyboardInterrupt):
        fastgrad.check(_Counted(lambda x: x.cumsum(0).sin(), 80), x, engine="dense", checkpoint=path)
    data = bytearray(path.read_bytes())
    data[4096:] = bytes(255 - byte for byte in data[4096:])
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"is damaged: .*Remove the file, or pass another path"):
        fastgrad.check(_Counted(lambda x: x.cumsum(0).sin()), x, engine="dense", checkpoint=path)


def test_two_processes(path: Path) -> None:
    with Checkpoint(path, CALL), pytest.raises(ValueError, match="in use by another process"):
        Checkpoint(path, CALL)


def test_a_part_is_taken_once(path: Path) -> None:
    values = torch.arange(6, dtype=torch.float64).view(3, 2)
    with contextlib.suppress(KeyboardInterrupt), Checkpoint(path, CALL) as checkpoint:
        for _ in range(2):
            checkpoint.store("columns", 4, 7, values)
        assert not checkpoint.take("columns", 0, 9), "this run has stored it"
        raise KeyboardInterrupt
    with Checkpoint(path, CALL) as checkpoint:
        assert not checkpoint.take("columns", 5, 9)
        assert not checkpoint.take("rows", 0, 9)
        for _ in range(2):
            (part,) = checkpoint.take("columns", 0, 9)
            assert (part.first, part.last) == (4, 7)
            assert torch.equal(checkpoint.values(part), values)
        assert not checkpoint.take("columns", 0, 9)


def test_columns_of_another_function_are_refused(path: Path) -> None:
    """Objects are identified only by their class; sums of their columns show that they compute something else."""
    x = torch.linspace(-1, 1, 40, dtype=torch.float64, requires_grad=True)
    scale = torch.ones(40, dtype=torch.float64)
    factors = [scale, scale.clone()]
    factors[1][30] = 1.5

    class Scaled:
        def __init__(self, factor: Tensor, raises_at: int = 0) -> None:
            self.factor, self.calls, self.raises_at = factor, itertools.count(1), raises_at

        def __call__(self, x: Tensor) -> Tensor:
            if next(self.calls) == self.raises_at:
                raise KeyboardInterrupt
            return (x * self.factor).cumsum(0)

    for first, second in (factors, reversed(factors)):
        with pytest.raises(KeyboardInterrupt):
            fastgrad.check(Scaled(first, 75), x, engine="dense", checkpoint=path)
        report = fastgrad.check(Scaled(second), x, engine="dense", checkpoint=path)
        assert report.passed, report


def test_columns_of_another_forward_are_refused(path: Path) -> None:
    """A forward that was changed does not pass because of saved columns that agree with its backward."""
    x = torch.linspace(-1, 1, 40, dtype=torch.float64, requires_grad=True)
    state = {"changed": False, "calls": 0}

    def forward(x: Tensor) -> Tensor:
        state["calls"] += 1
        if state["calls"] == 75 and not state["changed"]:
            raise KeyboardInterrupt
        y = x.cumsum(0)
        return y + 0.5 * x[30] * (torch.arange(40) == 35) if state["changed"] else y

    class Sums:
        def __call__(self, x: Tensor) -> Any:
            return function(forward, lambda grad, x: grad.flip(0).cumsum(0).flip(0))(x)

    with pytest.raises(KeyboardInterrupt):
        fastgrad.check(Sums(), x, engine="dense", checkpoint=path)
    state["changed"] = True
    assert not fastgrad.check(Sums(), x, engine="dense", checkpoint=path).passed


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_groups_of_another_function_are_refused(part: str, path: Path) -> None:
    """A band matrix; the entry in row 30 and column 33 was changed, only in forward or only in backward."""
    x = torch.linspace(-1, 1, 200, dtype=torch.float64, requires_grad=True)
    state = {"changed": False, "calls": 0}

    def changed(where: str) -> float:
        if where == part:
            state["calls"] += 1
            if state["calls"] == (270 if part == "forward" else 130) and not state["changed"]:
                raise KeyboardInterrupt
        return 0.5 * (state["changed"] and where == part)

    def forward(x: Tensor) -> Tensor:
        more = changed("forward") * x[33].sin() * (torch.arange(137) == 30)
        return _bands(x) + more

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(_bands(x), x, grad)
        return gradient + changed("backward") * grad[30] * (torch.arange(200) == 33)

    class Bands:
        def __call__(self, x: Tensor) -> Any:
            return function(forward, backward)(x)

    with pytest.raises(KeyboardInterrupt):
        fastgrad.check(Bands(), x, engine="compressed", checkpoint=path)
    state["changed"] = True
    assert not fastgrad.check(Bands(), x, engine="compressed", checkpoint=path).passed


def test_rows_of_another_backward_are_refused(path: Path) -> None:
    """A backward that is wrong now does not pass because of saved rows from when it was right."""
    x = torch.linspace(-1, 1, 40, dtype=torch.float64, requires_grad=True)
    state = {"wrong": False, "vjps": 0}

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        state["vjps"] += 1
        if state["vjps"] == 38 and not state["wrong"]:
            raise KeyboardInterrupt
        gradient = grad.flip(0).cumsum(0).flip(0)
        if state["wrong"]:
            gradient[7] += grad[30]
        return gradient

    class Sums:
        def __call__(self, x: Tensor) -> Any:
            return function(lambda x: x.cumsum(0), backward)(x)

    with pytest.raises(KeyboardInterrupt):
        fastgrad.check(Sums(), x, engine="dense", checkpoint=path)
    state["wrong"] = True
    assert not fastgrad.check(Sums(), x, engine="dense", checkpoint=path).passed


def test_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Checkpoint._opened

    def small(checkpoint: Checkpoint) -> sqlite3.Connection:
        database = opened(checkpoint)
        database.execute("PRAGMA max_page_count = 8")
        return database

    monkeypatch.setattr(Checkpoint, "_opened", small)
    x = torch.linspace(-1, 1, 60, dtype=torch.float64, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="cannot be written: database or disk is full"):
        report = fastgrad.check(torch.sin, x, engine="dense", checkpoint=path)
    assert report.passed


def test_the_command_line(path: Path) -> None:
    command = ["check", "torch:sin", "-i", "float64[6]", "--checkpoint", str(path)]
    assert cli.main(command) == 0
    assert not path.exists()


def test_a_process_that_is_killed() -> None:
    """`python -m tests.distributed.kills 50` kills more."""
    func, make, keywords = checks()["forward mode"]
    killed, calls, report = kills.after_kills("forward mode", [150], [1, 2])
    assert killed == 1
    assert calls < 253
    assert report == outcome(func, make, keywords, None)


@pytest.mark.parametrize("n", [3, 40])
def test_complex_tangents_of_real_outputs_fail_with_a_checkpoint_too(n: int, path: Path) -> None:
    class ComplexTangent(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return (2 * tangent).to(torch.complex128)

    x = torch.linspace(0.2, 0.9, n, dtype=torch.float64).requires_grad_()
    keywords: dict[str, Any] = {"check_forward_ad": True, "check_grad_dtypes": True, "engine": "dense"}
    expected = fastgrad.check(ComplexTangent.apply, x, **keywords)
    report = fastgrad.check(ComplexTangent.apply, x, checkpoint=path, **keywords)
    for found in (expected, report):
        assert found.failure is not None
        assert found.failure.kind == "tangent dtype"
    assert not path.exists()
