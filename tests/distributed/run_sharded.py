"""Runs under torchrun with 4 ranks: checks that groups of 1, 2 and 4 ranks share; each rank writes its results.

torchrun --nproc-per-node 4 -m tests.distributed.run_sharded OUT
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import fastgrad
from fastgrad.checks import one_block
from fastgrad.engines import cost_model
from fastgrad.sharding import problem, workers
from tests.planted.known import ROWS
from tests.planted.row import function, normal

SIZES = (1, 2, 4)

Check = tuple[Callable[..., Any], Any, dict[str, Any]]
"""func, inputs and keywords."""

_LEFT_OUT = (
    *("nondeterministic", "mutates", "scalar output", "sign of", "positive", "absolute", "square", "small factor"),
    *("negative inputs", "one channel", "extra term", "none", "raises if", "second input", "real to complex"),
    *("rolled", "zero", "contiguous only", "complex to real", "broadcast"),
)
"""Parts of the names of rows that are left out: backwards with a state, and those that others stand for."""


def windows(x: Tensor) -> Tensor:
    """Products of neighbors, eight at a time: a banded Jacobian."""
    return x.unfold(0, 8, 1).cos().prod(-1)


wrong_windows = function(windows, lambda g, x: _window_gradient(g, x) * (1 + (torch.arange(x.numel()) == 37)))
right_windows = function(windows, lambda g, x: _window_gradient(g, x))


def _window_gradient(g: Tensor, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(windows(x), x, g)[0]


def checks() -> dict[str, Check]:
    """Checks by name: planted mistakes and their right twins, then modes and engines, each right and wrong."""
    found: dict[str, Check] = {}
    for row in ROWS:
        if not any(part in row.name for part in _LEFT_OUT):
            for name, func in (("wrong", row.wrong), ("right", row.right)):
                found[f"{row.name}, {name}"] = func, row.inputs, {"order": row.order, **row.keywords}
    long, square = normal((96,)), normal((9, 9))
    products = {"right": lambda a: a @ a, "wrong": function(lambda a: a @ a, lambda g, a: g @ a.t() + a @ g)}
    for name, func in (("right", right_windows), ("wrong", wrong_windows)):
        found[f"compressed, {name}"] = func, long, {"engine": "compressed"}
        found[f"compressed by columns, {name}"] = func, long, {"engine": "compressed", "memory_limit": 1 << 20}
        found[f"fast, {name}"] = func, long, {"fast_mode": True, "engine": "sketch"}
    for name, func in products.items():
        found[f"several passes, {name}"] = func, square, {"engine": "dense", "memory_limit": 3000}
        found[f"forward mode, {name}"] = torch.sin if name == "right" else func, square, {"check_batched_grad": True}
        found[f"fast product, {name}"] = func, square, {"fast_mode": True, "engine": "sketch"}
    found["forward mode"] = torch.tanh, square, {"check_forward_ad": True}
    found["second derivatives"] = lambda a: (a @ a).tanh(), normal((3, 3)), {"order": 2}
    found["second derivatives, fast"] = torch.tanh, square, {"order": 2, "fast_mode": True, "engine": "sketch"}
    found["own steps"] = torch.mul, normal((5,), (5,)), {"eps": [1e-6, 1e-5], "engine": "dense"}
    found["lower dtype"] = torch.tanh, normal((6,), dtype=torch.float32), {}
    found["module"] = torch.nn.BatchNorm1d(3, dtype=torch.float64), normal((4, 3)), {}
    return found


RAISED = {
    "other values": ("RankError", "inputs[0] is float64[3, 4]"),
    "another function": ("RankError", "func is"),
    "other tolerances": ("RankError", "atol is 1e-05 on rank 0, and 0.001 on rank"),
    "one raises": ("RankError", "raised ValueError: planted"),
    "all raise": ("ZeroDivisionError", "division"),
}
"""Checks that end with an exception on every rank, of which class, and what it says."""


def raising(name: str, rank: int) -> Check:
    """A check whose calls differ between ranks, or that raises. The last rank of any group is not rank 0."""
    make, keywords = normal((3, 4)), {"engine": "dense"}
    if name == "other values":
        return torch.sin, lambda: [value.detach().add(rank).requires_grad_() for value in make()], keywords
    if name == "another function":
        return torch.cos if rank else torch.sin, make, keywords
    if name == "other tolerances":
        return torch.sin, make, {**keywords, "atol": 1e-3 if rank else 1e-5}
    if name == "all raise":
        return lambda x: x / (1 // 0), make, keywords
    return _RaisesOnce(), make, keywords


class _RaisesOnce:
    """Raises in its second call on rank 1."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        if dist.get_rank() == 1 and self.calls == 2:
            raise ValueError("planted")
        return x * 2


def share_all() -> list[int]:
    """Makes all work shared, in short messages; rank 0 leaves the first part to others. Counts this rank's parts."""
    problem.WORTH_SHARING, workers._SEGMENT = -1.0, 512
    # Costs of a fast machine, so that one rank and several choose the same engines and VJPs on a busy one.
    one_block.SHARED_SECONDS = math.inf
    cost_model.COSTS = cost_model.COSTS._replace(
        guess_seconds=math.inf, trial_seconds=math.inf, vectorized_seconds=math.inf
    )
    parts, part = [0], problem.PartitionedProblem.part
    begin = workers.Workers._next_part

    def counted(self: Any, *arguments: Any) -> Any:
        parts[0] += 1
        return part(self, *arguments)

    def after_others(self: Any, number: int, count: int = 1) -> int:
        end = time.monotonic() + 5.0
        while count == 1 and self.leads and self.count > 1 and time.monotonic() < end:
            if self._store.add(f"next {number}", 0):
                break
        return begin(self, number, count)

    problem.PartitionedProblem.part = counted  # type: ignore[method-assign]
    workers.Workers._next_part = after_others  # type: ignore[method-assign]
    return parts


def outcome(func: Callable[..., Any], make: Any, keywords: dict[str, Any], group: Any) -> dict[str, Any]:
    """The result of a check, without values that depend on the machine."""
    inputs = make()
    before, state = [value.detach().clone() for value in inputs], torch.get_rng_state()
    try:
        with mock.patch("fastgrad.checks.order.small_check", return_value=None):  # ranks share complete checks
            report = fastgrad.check(func, inputs, group=group, **keywords)
    except Exception as error:
        found: dict[str, Any] = {"raised": type(error).__name__, "text": str(error)}
    else:
        found = report.to_dict()
        for part in (found, (found["precision"] or {}).get("reference_report") or {}):
            for key in ("seconds", "phases", "plan", "evaluations", "vjps", "jvps", "evidence"):
                part.pop(key, None)
    found["as before"] = torch.equal(torch.get_rng_state(), state) and all(map(torch.equal, before, inputs))
    return found


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    parts = share_all()
    with Path(f"{sys.argv[1]}.{rank}").open("w") as lines:
        for name, (func, make, keywords) in checks().items():
            if rank == 0:
                lines.write(json.dumps([name, 0, 0, outcome(func, make, keywords, None)]) + "\n")
            for size, group in groups.items():
                if rank < size:
                    before = parts[0]
                    found = outcome(func, make, keywords, group)
                    lines.write(json.dumps([name, size, parts[0] - before, found]) + "\n")
        for name in RAISED:
            if rank < 2:
                found = outcome(*raising(name, rank), groups[2])
                lines.write(json.dumps([name, 2, 0, found]) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
