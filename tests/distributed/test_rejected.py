"""If a rank rejects its arguments, all ranks raise at once, and the next calls are right."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks

PROMPT = 5.0
"""Seconds in which every call must end; the shortest limit of waiting for a rank is 10 s."""

REJECTED = {
    "placement on 1": "TypeError: input 0 needs a placement (Shard(dim), Replicate() or Partial()), got 'x'.",
    "func on 1": "TypeError: func must be callable, got int.",
    "seconds on 1": "ValueError: seconds must be positive and finite, got -1.0.",
    "seconds on 0": "ValueError: seconds must be positive and finite, got nan.",
    "outputs on 0": "TypeError: result 0 needs a placement (Shard(dim), Replicate() or Partial()), got 'x'.",
    "keyword on 0": (
        "NotImplementedError: fastgrad.distributed.check does not take check_forward_ad: only reverse mode is checked."
    ),
    "eps on 1": "ValueError: eps must be positive and finite, got -1.0.",
    "engine on 0": "ValueError: engine must be 'auto', 'dense', 'compressed' or 'sketch', got 'x'.",
    "checkpoint on 1": "TypeError: checkpoint must be None or the path of a file, got 3.",
}
"""What the rank in the name raises."""

ON_BOTH = {
    "seconds on both": "seconds must be positive and finite, got 0.0.",
    "large seconds on both": "seconds must be between 0.001 and 1e+09, got 1000000000000.0.",
}

DIFFERENT = {
    "entry on 1": "rank 0 called fastgrad.distributed.check, and rank 1 fastgrad.check.",
    "inputs on 1": "the set of checked inputs is (0,) on rank 0, and (1,) on rank 1.",
}


@functools.cache
def said() -> dict[str, list[str]]:
    """The outcome on each rank, by the name of the call."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "said"
        run_ranks(2, "tests.distributed.run_rejected", str(out), err=f"{out}.err")
        found: dict[str, list[str]] = {}
        for rank in range(2):
            for line in out.with_suffix(f".{rank}").read_text().splitlines():
                name, outcome, seconds, is_kept = json.loads(line)
                assert seconds < PROMPT, f"rank {rank}, {name}: {seconds:.1f} s, {outcome}"
                assert is_kept, f"rank {rank}, {name}"
                found.setdefault(name, []).append(outcome)
        return found


@pytest.mark.parametrize("name", REJECTED)
def test_the_rank_raises_its_error_and_the_other_names_the_rank(name: str) -> None:
    rank, error = int(name[-1]), REJECTED[name]
    assert said()[name][rank] == error
    assert said()[name][1 - rank] == f"RankError: rank {rank} rejected its arguments: {error}"


@pytest.mark.parametrize(("name", "text"), ON_BOTH.items())
def test_an_argument_that_is_wrong_on_both(name: str, text: str) -> None:
    assert said()[name] == [f"ValueError: {text}"] * 2


@pytest.mark.parametrize(("name", "text"), DIFFERENT.items())
def test_calls_that_differ(name: str, text: str) -> None:
    assert all(one.startswith(f"RankError: The calls of the ranks differ: {text}") for one in said()[name])


@pytest.mark.parametrize("name", [*REJECTED, *ON_BOTH, *DIFFERENT])
def test_the_next_calls_are_right(name: str) -> None:
    assert said()[f"{name}, then wrong"] == ["failed"] * 2
    assert said()[f"{name}, then right"] == ["passed"] * 2
