"""A check over several ranks gives the report of one rank; it ends if a rank differs, raises, exits or stops."""

from __future__ import annotations

import collections
import functools
import json
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastgrad
from fastgrad.core.ranks import RankError
from fastgrad.report.failure import Failure
from fastgrad.report.settings import Settings
from fastgrad.sharding.calls import described, digest, reject_differences
from fastgrad.sharding.workers import Workers, _picklable
from fastgrad.tools import cli
from tests.distributed.faults import Fault, run
from tests.distributed.ranks import run_ranks
from tests.distributed.run_sharded import RAISED, SIZES, checks

NOT_SHARED = ("fast", "lower dtype", "forward mode, right", "second derivatives, fast")
"""Beginnings of the names of checks whose work may be too small to be shared."""


@functools.cache
def said() -> dict[str, dict[tuple[int, int], tuple[int, dict[str, Any]]]]:
    """The number of parts computed, and the report, by check and by (number of ranks, 0 without a group; rank)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "said"
        run_ranks(max(SIZES), "tests.distributed.run_sharded", str(out), err=f"{out}.err")
        found: dict[str, dict[tuple[int, int], tuple[int, dict[str, Any]]]] = {}
        for rank in range(max(SIZES)):
            for line in out.with_suffix(f".{rank}").read_text().splitlines():
                name, size, parts, report = json.loads(line)
                found.setdefault(name, {})[size, rank] = parts, report
        return found


@pytest.mark.parametrize("name", checks())
def test_the_report_is_that_of_one_rank(name: str) -> None:
    of_ranks = said()[name]
    _, alone = of_ranks[0, 0]
    assert len(of_ranks) == 1 + sum(SIZES)
    assert alone["verdict"] == ("failed" if name.endswith("wrong") else "passed")
    assert alone["as before"]
    for (size, rank), (_, report) in of_ranks.items():
        assert report == alone, f"rank {rank} of {size}"


def test_the_work_was_shared() -> None:
    for name, of_ranks in said().items():
        if name in RAISED or name.startswith(NOT_SHARED):
            continue
        for size in SIZES[1:]:
            assert sum(of_ranks[size, rank][0] for rank in range(1, size)) > 0, name


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["check", "torch:sin", "-i", "float64[6]", "--distributed"]) == 0
    assert "gradcheck passed: 36 entries compared" in capsys.readouterr().out
    assert not torch.distributed.is_initialized()


def test_the_command_line_needs_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "torch:sin", "-i", "float64[6]", "--distributed"]) == 2
    assert "--distributed needs torchrun" in capsys.readouterr().err


def test_at_least_forty_checks() -> None:
    assert len(checks()) >= 40


@pytest.mark.parametrize("name", RAISED)
def test_every_rank_raises(name: str) -> None:
    for (size, rank), (_, found) in said()[name].items():
        kind, text = RAISED[name]
        assert (found["raised"], text in found["text"]) == (kind, True), f"rank {rank} of {size}: {found}"
        assert found["as before"]


def test_all_ranks_end() -> None:
    """`python -m tests.distributed.faults 100 sharded` runs the others."""
    assert run(Fault("exits", rank=1, call=20, sharded=True, patience=2.0, size=100)) == []


def test_what_differs_is_named() -> None:
    x, scale = torch.ones(3), 2.0
    settings = Settings()

    def call(func: Any = lambda x: x * scale, **values: Any) -> dict[str, str]:
        return described(func, {"inputs[0]": x, "flag": True, **values}, settings)

    first = call()
    assert first == call()
    for part, other in [
        ("inputs[0]", call(**{"inputs[0]": torch.ones(3, requires_grad=True)})),
        ("inputs[0]", call(**{"inputs[0]": torch.ones(6)[::2]})),
        ("inputs[0]", call(**{"inputs[0]": torch.tensor([1.0, 1.0, 1.0 + 1e-6])})),
        ("flag", call(flag=1)),
        ("func", call(lambda x: x * (scale + 1))),
        ("func", call(torch.nn.Linear(2, 2))),
        ("atol", first | {"atol": "1.0"}),
    ]:
        with pytest.raises(RankError, match="The calls of the ranks differ") as raised:
            reject_differences([first, first, other], "fastgrad.check")
        assert f": {part} is" in str(raised.value)
        assert "on rank 2" in str(raised.value)


def test_what_func_captures_counts() -> None:
    def scaled(factor: Any) -> Any:
        return lambda x: x * factor

    pairs = [(scaled(2.0), scaled(3.0)), (scaled(torch.ones(2)), scaled(torch.zeros(2)))]
    pairs += [(functools.partial(torch.add, 1), functools.partial(torch.add, 2))]
    pairs += [(scaled(np.ones(2)), scaled(np.zeros(2)))]
    pairs += [(scaled(torch.eye(2).to_sparse()), scaled(torch.zeros(2, 2).to_sparse()))]
    pairs += [(torch.nn.Linear(2, 2).forward, torch.nn.Linear(2, 2).forward)]
    pairs += [(scaled(with_method(2)), scaled(with_method(3)))]
    pairs += [(scaled({1, 2}), scaled({1, 3})), (scaled(frozenset("ab")), scaled(frozenset("ac")))]
    pairs += [(scaled(collections.deque([1])), scaled(collections.deque([2])))]
    for one, other in pairs:
        assert described(one, {}, Settings())["func"] != described(other, {}, Settings())["func"]
    assert described(scaled(2.0), {}, Settings()) == described(scaled(2.0), {}, Settings())


FACTOR = 2.0


def test_a_global_that_only_an_inner_function_reads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def func(x: Any) -> Any:
        return (lambda: x * FACTOR)()

    first = described(func, {}, Settings())
    assert described(func, {}, Settings()) == first
    monkeypatch.setitem(func.__globals__, "FACTOR", 3.0)
    assert described(func, {}, Settings())["func"] != first["func"]


def test_the_order_of_a_set_does_not_count() -> None:
    one, other = {0, 32}, {32, 0}
    assert list(one) != list(other)
    assert digest(one) == digest(other)


def with_method(factor: int) -> type:
    class Static:
        @staticmethod
        def scaled(x: Any) -> Any:
            return x * factor

    return Static


def test_a_function_may_hold_itself() -> None:
    def made(factor: float) -> Any:
        def repeated(x: Any, times: int = 1) -> Any:
            return repeated(x * factor, times - 1) if times else x

        return repeated

    assert described(made(2.0), {}, Settings()) == described(made(2.0), {}, Settings())
    assert described(made(2.0), {}, Settings()) != described(made(3.0), {}, Settings())


def test_no_group() -> None:
    with pytest.raises(TypeError, match="group must be a process group"):
        Workers("world")


def test_a_cause_that_cannot_be_sent_is_sent_as_text() -> None:
    class LocalError(Exception):
        pass

    report = fastgrad.check(torch.sin, torch.ones(3, dtype=torch.float64, requires_grad=True))
    assert _picklable(report) is report
    failed = replace(report, failure=Failure("nonlinear", detail="it raised", cause=LocalError("planted")))
    sent = pickle.loads(pickle.dumps(_picklable(failed)))
    assert str(sent.failure.cause) == "LocalError: planted"
    assert sent.failure.detail == "it raised"
    unsent = replace(report, notes=(lambda: "no text",))  # type: ignore[arg-type]
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        _picklable(unsent)
