"""Heartbeats of ranks, through a store without a process group."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch.distributed as dist

from fastgrad.core import heartbeats
from fastgrad.core.heartbeats import Heartbeats


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "INTERVAL", 0.02)


def test_a_rank_is_silent_unless_it_sends_heartbeats() -> None:
    store = dist.HashStore()
    seen = Heartbeats(store, 1, lambda: True)
    with Heartbeats(store, 0, lambda: True):
        for _ in range(5):
            time.sleep(0.2)
            assert seen.silence(0) < 0.2
    seen.silence(0)
    time.sleep(0.2)
    assert 0.2 <= seen.silence(0) < math.inf


def test_a_rank_without_a_heartbeat_yet_is_silent_from_the_first_look_on() -> None:
    seen = Heartbeats(dist.HashStore(), 1, lambda: True)
    assert seen.silence(0) == 0.0
    time.sleep(0.1)
    assert seen.silence(0) >= 0.1


def test_a_rank_that_is_not_well_is_silent_until_it_is() -> None:
    store, state = dist.HashStore(), {"well": False}
    seen = Heartbeats(store, 1, lambda: True)
    with Heartbeats(store, 0, lambda: state["well"]):
        seen.silence(0)
        time.sleep(0.2)
        assert seen.silence(0) >= 0.2
        state["well"] = True
        time.sleep(0.2)
        assert seen.silence(0) < 0.2


class _Store:
    """A store that has ended or, with `seconds`, that answers late."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.calls = seconds, 0

    def set(self, *_: Any) -> None:
        self.calls += 1
        self.check()

    def check(self, *_: Any) -> bool:
        time.sleep(self.seconds)
        raise RuntimeError("the store has ended")


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_store_that_does_not_answer(seconds: float) -> None:
    begin = time.monotonic()
    assert Heartbeats(_Store(seconds), 1, lambda: True).silence(0) == math.inf
    assert time.monotonic() - begin < 0.8


def test_a_store_that_has_ended_ends_the_heartbeats() -> None:
    store = _Store()
    with Heartbeats(store, 0, lambda: True):
        time.sleep(0.2)
    assert store.calls == 1
