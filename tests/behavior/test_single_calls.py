"""A func that returns other values in a single call: what a check has seen of it, it does not drop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad

Func = Callable[[Tensor], Tensor]


def leaf(n: int) -> Tensor:
    noise = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return (torch.linspace(0.02, 0.5, n, dtype=torch.float64) + 1e-3 * noise).requires_grad_()


def wrong_once(func: Func, wrong: int) -> tuple[Func, Callable[[], int]]:
    """func, which returns more than that in one call; and the number of its calls so far."""
    calls = 0

    def called(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        y = func(x)
        return y + 0.1 * (x.flip(0) if y.shape == x.shape else x.sum()) if calls == wrong else y

    return called, lambda: calls


def outcome(func: Func, n: int, wrong: int, keywords: dict[str, Any]) -> tuple[str, int, tuple[int, ...]]:
    """The verdict, the calls of func, and what the report counts."""
    called, calls = wrong_once(func, wrong)
    report = fastgrad.check(called, leaf(n), **keywords)
    return report.verdict, calls(), (report.evaluations, report.vjps, report.jvps)


FUNCS: dict[str, Func] = {
    "sin": torch.sin,
    "sum of exp": lambda x: x.exp().sum(),
    "sin of cumsum": lambda x: x.cumsum(0).sin(),
    "large": lambda x: x.sin() + 1e6,
}
KEYWORDS: dict[str, dict[str, Any]] = {
    "exact": {},
    "fast": {"fast_mode": True},
    "forward": {"fast_mode": True, "check_forward_ad": True},
    "compressed": {"engine": "compressed"},
    "sketch": {"fast_mode": True, "engine": "sketch"},
}


@pytest.mark.parametrize("keywords", KEYWORDS.values(), ids=KEYWORDS)
@pytest.mark.parametrize("name", FUNCS)
def test_a_check_that_makes_other_calls_because_of_one_value_does_not_pass(name: str, keywords: dict[str, Any]) -> None:
    """Values that are compared with nothing, for example those next to zero tangents, change nothing."""
    verdict, calls, counts = outcome(FUNCS[name], 8, 0, keywords)
    assert verdict == "passed"
    for wrong in range(1, calls + 1):
        found = outcome(FUNCS[name], 8, wrong, keywords)
        assert found[0] == "failed" or found[1:] == (calls, counts), wrong


@pytest.mark.parametrize("keywords", [{}, {"fast_mode": True}, {"fast_mode": True, "engine": "sketch"}])
@pytest.mark.parametrize("n", [6, 30])
def test_the_same_for_second_derivatives(n: int, keywords: dict[str, Any]) -> None:
    verdict, calls, counts = outcome(torch.sin, n, 0, {"order": 2, **keywords})
    assert verdict == "passed"
    for wrong in range(1, calls + 1):
        found = outcome(torch.sin, n, wrong, {"order": 2, **keywords})
        assert found[0] == "failed" or found[1:] == (calls, counts), wrong


@pytest.mark.parametrize("wrong", range(2, 15))
def test_each_difference_of_a_large_sparse_check_counts(wrong: int) -> None:
    assert outcome(torch.sin, 2000, 0, {})[1] == 15
    assert outcome(torch.sin, 2000, wrong, {})[0] == "failed"


@pytest.mark.parametrize(("keywords", "calls"), [({}, range(2, 10)), ({"check_forward_ad": True}, range(2, 18))])
def test_each_difference_of_a_large_check_in_fast_mode_counts(keywords: dict[str, Any], calls: range) -> None:
    """Differences that look wrong, or are noisy, are replaced by better ones, and must be the same if repeated."""
    keywords = {"fast_mode": True, **keywords}
    _, usual, _ = outcome(torch.sin, 20_000, 0, keywords)
    for wrong in calls:
        verdict, made, _ = outcome(torch.sin, 20_000, wrong, keywords)
        assert verdict == "failed" or made == usual, wrong
