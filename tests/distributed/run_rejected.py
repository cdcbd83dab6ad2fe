"""Runs on two ranks: calls that a rank rejects, each followed by a wrong and a right gradient.

Each rank writes a JSON line for each call: its name, the outcome, its seconds, and whether everything is as before.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate

import fastgrad
import fastgrad.distributed
from fastgrad.core import torch_private

Call = Callable[[], fastgrad.Report]


def wrong(x: Tensor) -> Tensor:
    return x.sin() * x.detach()


def over_ranks(x: Tensor, func: Any = torch.sin, **keywords: Any) -> fastgrad.Report:
    """A check of a distributed function."""
    return fastgrad.distributed.check(func, (x,), **{"placements": [Replicate()], "outputs": Replicate(), **keywords})


def shared(x: Tensor, func: Any = torch.sin, **keywords: Any) -> fastgrad.Report:
    """A check whose work the ranks share."""
    return fastgrad.check(func, x, group=dist.group.WORLD, **keywords)


def of_one_factor(x: Tensor, which: int) -> fastgrad.Report:
    """A check of the derivative of a product with respect to one factor."""
    factors = [x.detach().clone().requires_grad_(k == which) for k in range(2)]
    return fastgrad.distributed.check(torch.mul, factors, placements=[Replicate()] * 2, outputs=Replicate())


def rejected(x: Tensor, rank: int) -> dict[str, Call]:
    """Calls by name; only the rank in the name has a wrong argument."""
    one, first = partial(over_ranks, x), partial(shared, x)
    keywords = {
        "placement on 1": (one, 1, {"placements": ["x"]}),
        "func on 1": (one, 1, {"func": 3}),
        "seconds on 1": (one, 1, {"seconds": -1.0}),
        "seconds on 0": (one, 0, {"seconds": float("nan")}),
        "outputs on 0": (one, 0, {"outputs": "x"}),
        "keyword on 0": (one, 0, {"check_forward_ad": True}),
        "eps on 1": (first, 1, {"eps": -1.0}),
        "engine on 0": (first, 0, {"engine": "x"}),
        "checkpoint on 1": (first, 1, {"checkpoint": 3}),
    }
    calls = {name: partial(call, **given if rank == where else {}) for name, (call, where, given) in keywords.items()}
    return {
        **calls,
        "seconds on both": partial(one, seconds=0.0),
        "large seconds on both": partial(one, seconds=1e12),
        "entry on 1": first if rank else one,
        "inputs on 1": partial(of_one_factor, x, rank),
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.linspace(0.1, 1.0, 3, dtype=torch.float64).requires_grad_()
    before, state, limit = x.detach().clone(), torch.get_rng_state(), torch_private.timeout_of(dist.group.WORLD)
    over_ranks(x)  # makes the connections
    with Path(f"{sys.argv[1]}.{rank}").open("w") as lines:
        for name, call in rejected(x, rank).items():
            follows = {f"{name}, then wrong": partial(over_ranks, x, wrong), f"{name}, then right": partial(shared, x)}
            for title, each in {name: call, **follows}.items():
                start = time.monotonic()
                try:
                    outcome = each().verdict
                except Exception as error:
                    outcome = f"{type(error).__name__}: {error}"
                is_kept = torch.equal(x, before) and torch.equal(torch.get_rng_state(), state)
                is_kept = is_kept and torch_private.timeout_of(dist.group.WORLD) == limit
                lines.write(json.dumps([title, outcome, time.monotonic() - start, is_kept]) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
