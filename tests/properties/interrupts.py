"""Interrupted checks: inputs and modes are unchanged after any exception of func or backward, and after Ctrl-C.

`python -m tests.properties.interrupts --runs 2000` prints how many runs there were, how they ended, and every one that
left something changed, which fails the run.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import fastgrad


class PlannedError(Exception):
    """The exception of a func here."""


ERRORS = (PlannedError, RuntimeError, KeyboardInterrupt)


@dataclass
class Fuse:
    """Counts the calls of func and backward, and raises in one of them."""

    at: int = 0
    error: type[BaseException] = PlannedError
    calls: int = 0

    def burn(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise self.error("planned")


class Burning(torch.autograd.Function):
    """The identity; counts its calls of forward, backward and jvp on a fuse, which raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse) -> Tensor:
        fuse.burn()
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return Burning.apply(grad_output, ctx.fuse), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        ctx.fuse.burn()
        return tangent.clone()


def pure(fuse: Fuse, *tensors: Tensor) -> Tensor:
    return Burning.apply(sum((tensor * tensor).sum() * k for k, tensor in enumerate(tensors, 1)) * tensors[0], fuse)


def wrong(fuse: Fuse, *tensors: Tensor) -> Tensor:
    return pure(fuse, *tensors) * tensors[0].detach()


def elementwise(fuse: Fuse, *tensors: Tensor) -> Tensor:
    return Burning.apply(tensors[0] * tensors[0] * tensors[0], fuse)


def writes_past_counters(fuse: Fuse, *tensors: Tensor) -> Tensor:
    result = pure(fuse, *(tensor * 1 for tensor in tensors))
    for tensor in tensors:
        tensor.data.mul_(1.25)
    fuse.burn()
    return result


def writes_in_place(fuse: Fuse, *tensors: Tensor) -> Tensor:
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(1.25)
    return pure(fuse, *tensors)


def moves_its_data(fuse: Fuse, *tensors: Tensor) -> Tensor:
    result = pure(fuse, *(tensor * 1 for tensor in tensors))
    tensors[0].data = tensors[0].data * 2
    fuse.burn()
    return result


def differentiates(fuse: Fuse, *tensors: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = tensors[0].detach().requires_grad_()
        leaf.abs().square().sum().backward()
        if tensors[0].is_leaf and not tensors[0].is_inference():
            tensors[0].grad = leaf.grad
    return pure(fuse, *tensors)


FUNCS = (pure, wrong, elementwise, writes_past_counters, writes_in_place, moves_its_data, differentiates)


@dataclass
class State:
    """State that must not change: the inputs and their gradients, bit by bit, and the modes."""

    tensors: tuple[Tensor, ...]
    before: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = self.now()

    def now(self) -> list[Any]:
        return [
            *(self._of(tensor) for tensor in self.tensors),
            ("grad mode", torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            ("defaults", torch.get_default_dtype(), torch.get_default_device()),
            ("generator", torch.get_rng_state().numpy().tobytes()),
            ("deterministic", torch.are_deterministic_algorithms_enabled()),
            ("anomaly", torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            ("threads", torch.get_num_threads(), threading.active_count()),
            ("forward AD", forward_ad._current_level),
            ("warnings", list(warnings.filters)),
        ]

    @staticmethod
    def _of(tensor: Tensor) -> tuple[Any, ...]:
        values = tensor.detach()
        grad = tensor.grad if tensor.is_leaf else None
        place = values.data_ptr(), values.stride(), values.is_conj()
        bits = values.resolve_conj().numpy().tobytes()
        return (
            tensor.requires_grad,
            place,
            bits,
            None if grad is None else (id(grad), grad.numpy().tobytes()),
        )

    def changes(self) -> list[str]:
        names = [f"tensor {i}" for i in range(len(self.tensors))]
        return [
            names[i] if i < len(names) else old[0]
            for i, (old, new) in enumerate(zip(self.before, self.now(), strict=True))
            if old != new
        ]


@dataclass
class Case:
    """One check of one function at some inputs."""

    text: str
    run: Callable[[], object]
    fuse: Fuse
    state: State


def tensors_for(pick: random.Random, dtype: torch.dtype, count: int) -> tuple[Tensor, ...]:
    made = []
    for _ in range(count):
        values = torch.tensor([pick.uniform(0.3, 0.9) for _ in range(12)], dtype=torch.float64).view(3, 4).to(dtype)
        values[0, 0] = -0.0 if not dtype.is_complex and pick.random() < 0.3 else values[0, 0]
        kind = pick.choice(("contiguous", "transposed", "strided", "small"))
        values = {"transposed": values.t(), "strided": values[:, ::2], "small": values[0, :2]}.get(kind, values)
        made.append(values.requires_grad_())
        if pick.random() < 0.3:
            made[-1].grad = torch.ones_like(made[-1])
    return tuple(made)


ENTRIES = (
    "gradcheck",
    "gradgradcheck",
    "check",
    "check of second order",
    "adjoint_test",
    "taylor_test",
    "numerical_jacobian",
    "analytical_jacobian",
    "functional",
)


def case(pick: random.Random) -> Case:
    """A random check."""
    entry = pick.choices(ENTRIES, (6, 6, 2, 2, 1, 1, 1, 1, 1))[0]
    func = pick.choice(FUNCS)
    dtype = (
        torch.complex128 if pick.random() < 0.25 and not entry.startswith(("functional", "taylor")) else torch.double
    )
    inputs = tensors_for(pick, dtype, pick.choice((1, 1, 2)))
    if len(inputs) == 2:  # equal shapes, as sums of products need
        inputs = (inputs[0], inputs[0].detach().clone().requires_grad_(pick.random() < 0.7))
    fuse = Fuse()
    bound = partial(func, fuse)
    keywords: dict[str, Any] = {}
    grad_outputs: Tensor | None = None
    if entry in ("gradcheck", "gradgradcheck", "check", "check of second order"):
        second = entry in ("gradgradcheck", "check of second order")
        keywords = {
            "fast_mode": pick.random() < 0.4,
            "engine": pick.choice(("auto", "dense", "compressed")),
            "check_fwd_over_rev" if second else "check_forward_ad": pick.random() < 0.3,
            "check_batched_grad": pick.random() < 0.1,
        }
        if keywords["fast_mode"] and pick.random() < 0.6:
            keywords["engine"] = "sketch"
        if second and pick.random() < 0.5:
            grad_outputs = torch.full_like(inputs[0], 0.5).detach().requires_grad_(pick.random() < 0.7)
        if entry.startswith("grad"):
            keywords["raise_exception"] = pick.random() < 0.7
        if entry == "check of second order":
            keywords["order"] = 2
        if grad_outputs is not None:
            keywords["grad_outputs"] = grad_outputs
        checker = fastgrad.check if entry.startswith("check") else getattr(fastgrad, entry)
        run = partial(checker, bound, inputs, **keywords)
    elif entry == "functional":
        name = pick.choice(("jacobian", "vjp", "jvp", "hessian"))
        keywords = {"numerical": True} if pick.random() < 0.4 else {}
        target = (lambda *tensors: bound(*tensors).sum()) if name in ("hessian", "vjp") else bound
        arguments = (inputs, tuple(torch.ones_like(each).detach() for each in inputs)) if name == "jvp" else (inputs,)
        run = partial(getattr(fastgrad.functional, name), target, *arguments, **keywords)
        entry = f"functional.{name}"
    else:
        run = partial(getattr(fastgrad, entry), bound, inputs)
    told = {name: value for name, value in keywords.items() if not isinstance(value, Tensor)}
    own = "" if grad_outputs is None else ", own grad_outputs"
    shapes = ", ".join(f"{tuple(each.shape)} {each.dtype}, grad {each.requires_grad}" for each in inputs)
    text = f"{entry} of {func.__name__} at {shapes}; {told}{own}"
    state = State((*inputs, *(() if grad_outputs is None else (grad_outputs,))))
    return Case(text, run, fuse, state)


def interrupted(run: Callable[[], object], seconds: float) -> None:
    """Runs, with a KeyboardInterrupt after some time, as Ctrl-C raises it: between any two steps of the interpreter."""
    runs = False

    def interrupt(*_: object) -> None:
        if runs:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        runs = True
        run()
    finally:
        runs = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(run: Callable[[], object]) -> str:
    """How a check ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run()
        except BaseException as error:
            if isinstance(error, (SystemExit, MemoryError)):
                raise
            return type(error).__name__
    return "returned"


def run_one(seed: int, at_a_time: bool) -> tuple[str, str, list[str]]:
    """A check that is interrupted at a random call or, with at_a_time, at a random time: its text, end and changes."""
    whole = case(random.Random(seed))
    start = time.perf_counter()
    ended = outcome(whole.run)
    seconds = time.perf_counter() - start
    changed = whole.state.changes()
    if changed or not whole.fuse.calls:
        return whole.text, ended, changed
    pick = random.Random(seed + 1)
    cut = case(random.Random(seed))
    if at_a_time:
        moment = pick.uniform(1e-5, seconds)
        ended = outcome(partial(interrupted, cut.run, moment))
        return f"{cut.text}; alarm after {moment:.2g} s", ended, cut.state.changes()
    # Early calls are special: the first may come before anything is saved.
    cut.fuse.at = min(pick.choice((1, 2, 3, pick.randint(1, whole.fuse.calls))), whole.fuse.calls)
    cut.fuse.error = pick.choice(ERRORS)
    ended = outcome(cut.run)
    text = f"{cut.text}; {cut.fuse.error.__name__} in call {cut.fuse.at} of {whole.fuse.calls}"
    return text, ended, cut.state.changes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alarms", type=float, default=0.3, help="the share that is cut short by a signal")
    options = parser.parse_args()
    ends: Counter[str] = Counter()
    bad = 0
    for number in range(options.runs):
        seed = 1_000_003 * options.seed + 2 * number
        text, ended, changed = run_one(seed, number % 100 < 100 * options.alarms)
        ends[ended] += 1
        if changed:
            bad += 1
            print(f"seed {seed}: {text}\n  {ended}, and changed: {', '.join(changed)}", flush=True)
    print(
        f"{options.runs} runs: {', '.join(f'{count} {end}' for end, count in ends.most_common())}; {bad} left changes"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
