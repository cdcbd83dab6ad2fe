"""The cost of sparsity detection for dense Jacobians, and engines that are chosen by counts and sizes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.core.native import IS_NATIVE, SmallProblem
from fastgrad.engines import cost_model
from fastgrad.problem.first_look import SLOW_SECONDS, usual_seconds
from fastgrad.report.report import Report
from tests.costs import set_costs

Func = Callable[..., Any]


def leaf(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def mix(n: int, m: int) -> Func:
    weight = leaf(m, n, seed=5).detach() / n**0.5  # larger weights would saturate tanh
    return lambda *xs: torch.tanh(weight @ torch.cat([x.reshape(-1) for x in xs]))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes sparsity detection run even for a fast func, without trials of batches and without vectorized rows."""
    set_costs(monkeypatch, guess_seconds=0.0)
    set_costs(monkeypatch, probe_seconds=0.0)
    set_costs(monkeypatch, certificate_evaluations=0)
    set_costs(monkeypatch, trial_columns=10**9)
    set_costs(monkeypatch, vectorized_rows=0)  # otherwise the number of VJPs would depend on their time


def run(func: Func, *inputs: Tensor, **keywords: Any) -> Report:
    report = fastgrad.check(func, inputs, check_undefined_grad=False, **keywords)
    assert report.passed
    return report


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("shapes", "m"),
    [(((12,),), 4), (((4,),) * 3, 4), (((8,),) * 3, 8), (((12,),) * 2, 12), (((24,),), 24), (((4, 6),), 8)],
)
def test_where_there_is_no_structure_the_look_costs_little(shapes: tuple[Any, ...], m: int, seed: int) -> None:
    inputs = [leaf(*shape, seed=k) for k, shape in enumerate(shapes)]
    n = sum(x.numel() for x in inputs)
    report = run(mix(n, m), *inputs, seed=seed)
    assert report.plan is not None
    assert report.plan.engine == "dense"
    assert report.evaluations <= 2 * n + 4
    # Two rows run twice, a zero grad_output, and the products of four cotangents, of which one runs twice.
    assert report.vjps <= m + 2 + 1 + 4 + 1 + 1  # the last on the first graph, which later calls may have changed


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    ("shapes", "m"),
    [(((40,),), 4), (((40,),), 40), (((24,),) * 2, 24), (((10, 10),), 100), (((4, 5, 6),), 50), (((40, 2),) * 8, 9)],
)
def test_exploring_takes_a_tenth_of_the_dense_engines_calls(shapes: tuple[Any, ...], m: int) -> None:
    inputs = [leaf(*shape, seed=k) for k, shape in enumerate(shapes)]
    n = sum(x.numel() for x in inputs)
    func = mix(n, m)
    report, dense = run(func, *inputs), run(func, *inputs, engine="dense")
    assert report.plan is not None
    assert report.plan.engine == "dense"
    explored = report.evaluations + report.vjps - dense.evaluations - dense.vjps
    assert explored <= (2 * n + m) / cost_model.COSTS.exploring_share
    assert report.evaluations <= 2 * n + 4 + (2 * n + m) / cost_model.COSTS.exploring_share


@pytest.mark.usefixtures("slow")
def test_what_is_seen_is_worth_more() -> None:
    # Every output depends on two inputs, which no guess covers.
    x, order = leaf(200), torch.randperm(200, generator=torch.Generator().manual_seed(1))
    report = run(lambda x: x[order].reshape(100, 2).prod(1), x)
    assert report.plan is not None
    assert report.plan.engine == "compressed"


def ordinary() -> list[tuple[str, Func, tuple[Tensor, ...]]]:
    """Forty checks of usual size."""
    pointwise = [torch.sin, torch.exp, torch.tanh, torch.sigmoid, torch.square]
    cases: list[tuple[str, Func, tuple[Tensor, ...]]] = []
    for size in (3, 10, 30, 100):
        cases += [(f"{func.__name__} {size}", func, (leaf(size),)) for func in pointwise]
        cases.append((f"mul {size}", torch.mul, (leaf(size), leaf(size, seed=1))))
        cases.append((f"sum {size}", torch.sum, (leaf(size),)))
        cases.append((f"cumsum {size}", lambda x: x.cumsum(0).sin(), (leaf(size),)))
    cases += [
        ("matmul", torch.matmul, (leaf(4, 5), leaf(5, 3))),
        ("larger matmul", torch.matmul, (leaf(8, 9), leaf(9, 7))),
        ("bmm", torch.bmm, (leaf(3, 4, 5), leaf(3, 5, 2))),
        ("softmax", lambda x: x.softmax(-1), (leaf(6, 10),)),
        ("layer norm", lambda x: torch.nn.functional.layer_norm(x, (8,)), (leaf(5, 8),)),
        ("linear", torch.nn.functional.linear, (leaf(6, 8), leaf(4, 8), leaf(4))),
        ("conv", torch.nn.functional.conv1d, (leaf(2, 3, 9), leaf(4, 3, 3))),
        ("inverse", torch.linalg.inv, (leaf(4, 4),)),
    ]
    return cases


def test_a_busy_machine_chooses_as_an_idle_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    # Far more than the delays, also if this machine is busy.
    monkeypatch.setattr("fastgrad.problem.first_look.SLOW_SECONDS", 0.1)
    jitter = random.Random(0)
    cases = ordinary()
    assert len(cases) == 40
    for name, func, inputs in cases:

        def late(*arguments: Tensor, func: Func = func) -> Any:
            time.sleep(jitter.random() * 1e-3)
            return func(*arguments)

        quiet, noisy = fastgrad.check(func, inputs), fastgrad.check(late, inputs)
        assert quiet.plan is not None
        assert noisy.plan is not None
        assert (name, quiet.verdict, quiet.plan.engine) == (name, noisy.verdict, noisy.plan.engine)


@pytest.mark.parametrize("fast_mode", [False, True])
def test_measured_seconds_choose_no_engine(fast_mode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def engines(measured: float) -> list[str]:
        for user in ("problem.first_look", "engines.plan"):
            monkeypatch.setattr(f"fastgrad.{user}.usual_seconds", lambda problem, _: usual_seconds(problem, measured))
        reports = [fastgrad.check(func, inputs, fast_mode=fast_mode) for _, func, inputs in ordinary()]
        return [report.plan.engine for report in reports if report.plan is not None]

    assert engines(0.0) == engines(0.99 * SLOW_SECONDS)


def engine_after(pause: Callable[[float], None], n: int, **keywords: Any) -> str:
    """The engine for a func of n elements that pauses for some milliseconds in each call."""

    def func(x: Tensor) -> Tensor:
        pause(4e-3)
        return x.sin()

    plan = fastgrad.check(func, leaf(n), **keywords).plan
    assert plan is not None
    return plan.engine


def test_what_is_slow_by_far_is_looked_at() -> None:
    def works(seconds: float) -> None:
        end = time.thread_time() + seconds  # process_time counts other threads
        while time.thread_time() < end:
            pass

    assert engine_after(works, 16) == "compressed"
    # For so few elements, all entries of a fast func are compared, with a small check and without.
    assert engine_after(works, 6 if IS_NATIVE else 9, fast_mode=True) == "sketch"


@pytest.mark.parametrize("native", [True, False])
def test_time_of_other_processes_chooses_no_engine(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # A func that sleeps takes much wall time and little CPU time, like a func that was interrupted.
    if not native:
        monkeypatch.setattr(SmallProblem, "trace", lambda *_: None)
    assert engine_after(time.sleep, 16) == "dense"
    n = 6 if native and IS_NATIVE else 9
    assert engine_after(time.sleep, n, fast_mode=True) == engine_after(lambda _: None, n, fast_mode=True) == "dense"
