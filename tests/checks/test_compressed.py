"""The compressed engine: the cost of structures, named wrong entries, and functions that mislead probes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

import fastgrad
from benchmarks.cases import large_case
from fastgrad.checks.order import check
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings
from fastgrad.structure import sparsity

ENGINES = ["auto", "dense", "compressed", "sketch"]


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


def compressed(func: Callable[..., Any], *inputs: Tensor, **settings: Any) -> Report:
    report = check(func, inputs, Settings(engine="compressed", **settings))
    assert report.plan is not None
    assert report.plan.engine == "compressed"
    return report


def worst_entry(report: Report) -> tuple[int, int]:
    """The entry that the failure names, for an input and an output with one dimension."""
    assert report.failure is not None
    assert report.failure.comparison is not None
    worst = report.failure.comparison.worst
    assert worst is not None
    return worst.output_index[0], worst.input_index[0]


def function(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A custom Function of one input: backward(x, grad) is its gradient."""

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, x: Tensor) -> Any:
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return backward(x, *grads)

    return Custom.apply  # type: ignore[no-any-return]


COMPLEX = torch.complex128
STRUCTURES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], int, int | None]] = {
    # function, inputs, column groups, row groups (None: analytical columns)
    "sin": (torch.sin, (normal(4000),), 1, 1),
    "mul, broadcast": (torch.mul, (normal(30, 40), normal(40)), 2, None),
    "softmax": (lambda x: x.softmax(-1), (normal(200, 16),), 16, 16),
    "transpose": (lambda x: x.t().exp(), (normal(60, 70),), 1, 1),
    "gather": (lambda x: x[torch.arange(1999, -1, -1)], (normal(2000),), 1, 1),
    "sort": (lambda x: x.sort().values, (torch.arange(1000.0, dtype=torch.float64).flip(0).requires_grad_(),), 1, 1),
    "bmm": (torch.bmm, (normal(40, 4, 5), normal(40, 5, 3)), 10, 5),
    "convolution": (torch.nn.functional.conv1d, (normal(2, 3, 100), normal(4, 3, 3)), 20, None),
    "scaled by one number": (torch.mul, (normal(400), normal(1)), 2, None),
    "max pool": (lambda x: torch.nn.functional.max_pool1d(x, 3), (normal(4, 300),), 1, 1),
    "views of the input": (lambda x: x.view(20, 10, 20)[:, :, 3:], (normal(40, 100),), 1, 1),
    "diff": (torch.diff, (normal(1000),), 2, 2),
    "complex exp": (torch.exp, (normal(500, dtype=COMPLEX),), 2, 2),
    "complex to real": (torch.abs, (normal(500, dtype=COMPLEX),), 2, 1),
    "real to complex": (lambda x: torch.complex(x, x.sin()), (normal(500),), 1, 2),
    "fft of rows": (lambda x: torch.fft.fft(x), (normal(60, 8, dtype=COMPLEX),), 16, 16),
    "two outputs": (lambda x: (x.sin(), x.cos()), (normal(1000),), 1, 2),
    "batched inverse": (torch.linalg.inv, ((normal(50, 3, 3) + 5 * torch.eye(3)).detach().requires_grad_(),), 9, 9),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_what_a_structure_costs(name: str) -> None:
    func, inputs, columns, rows = STRUCTURES[name]
    report = compressed(func, *inputs)
    assert report.passed
    assert report.notes == ()
    plan = report.plan
    assert plan is not None
    assert plan.column_groups is not None
    assert plan.column_groups <= columns
    assert (plan.row_groups is None) == (rows is None)
    if rows is not None:
        assert plan.row_groups is not None
        assert plan.row_groups <= rows
    analytical = columns + 10 if rows is None else rows
    probing = 6 * max(columns, analytical).bit_length() * max(report.n, report.m).bit_length() + 20
    assert report.evaluations <= 20 + 2 * columns + probing
    assert report.vjps <= 12 + analytical + probing


def test_a_guess_costs_fifteen_evaluations_and_seven_vjps() -> None:
    report = compressed(torch.sin, normal(100_000))
    assert report.passed
    assert (report.evaluations, report.vjps) == (15, 7)


def test_blind_costs_sixty_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgrad.structure.detection.ProblemPatterns.guess", lambda self: None)
    report = check(torch.sin, (normal(100_000),), Settings())
    assert report.passed
    assert report.plan is not None
    assert report.plan.engine == "compressed"
    assert report.evaluations <= 60


def test_one_side_is_hopeless_and_the_other_trivial() -> None:
    x = normal(5, 5, 5)
    calls = 0

    def func(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x.repeat(5, 5, 5, 5)

    report = fastgrad.check(func, (x,), order=2)
    assert report.passed
    assert report.evaluations <= 1300
    assert calls <= 1300


def test_auto_keeps_to_the_dense_engine_where_nothing_is_sparse() -> None:
    weight = normal(60, 60).detach()
    report = check(lambda x: weight @ x, (normal(60),), Settings())
    assert report.passed
    assert report.plan is not None
    assert report.plan.engine == "dense"
    assert report.evaluations <= 1.3 * 2 * 60 + 8


SIN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, int] | None]] = {
    # The backward that replaces grad * cos(x), and the wrong entry.
    "one entry": (lambda x, g: _changed(g * x.cos(), 777, 0.01 * g[777]), (777, 777)),
    "an entry off the pattern": (lambda x, g: _changed(g * x.cos(), 777, 0.01 * g[20]), (20, 777)),
    "rolled": (lambda x, g: (g * x.cos()).roll(1), None),
    "zero": (lambda x, g: 0 * g, None),
    "scaled by 1.01": (lambda x, g: 1.01 * g * x.cos(), None),
    "clamps grad_output": (lambda x, g: g.clamp(-1, 1) * x.cos(), None),
    "ignores grad_output": (lambda x, g: x.cos(), None),
}


def _changed(values: Tensor, where: int, by: Tensor) -> Tensor:
    values = values.clone()
    values[where] += by
    return values


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("name", SIN)
def test_wrong_gradients_fail(name: str, blind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if blind:
        monkeypatch.setattr("fastgrad.structure.detection.ProblemPatterns.guess", lambda self: None)
    backward, entry = SIN[name]
    report = compressed(function(torch.sin, backward), normal(2000))
    assert report.failure is not None
    if entry is not None:
        assert worst_entry(report) == entry
    assert report.evaluations + report.vjps <= 300


class Scale(torch.autograd.Function):
    """x times a number; the derivative of its backward may be wrong or missing."""

    how = "right"

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, factor = ctx.saved_tensors
        wrong = 1.5 if Scale.how == "wrong" else 1.0
        if Scale.how == "not differentiable":
            with torch.no_grad():
                return grad * factor, (grad * x).sum().reshape(1)
        if Scale.how == "other derivative":
            # The same values, but another derivative with respect to grad.
            return grad * factor + (grad - grad.detach()), (grad * x).sum().reshape(1)
        return grad * factor * wrong, (grad * x).sum().reshape(1)


@pytest.mark.parametrize("how", ["right", "wrong", "not differentiable", "other derivative"])
def test_analytical_columns_need_their_proof(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 2 column groups and 400 row groups; rows are used if the derivative of the backward is not verified."""
    monkeypatch.setattr(Scale, "how", how)
    report = compressed(Scale.apply, normal(400), normal(1))
    assert report.passed == (how != "wrong")
    assert report.plan is not None
    assert (report.plan.row_groups is None) == (how in ("right", "wrong"))


@pytest.mark.parametrize("engine", ["dense", "compressed"])
def test_a_backward_that_raises_for_all_but_one_hot_grad_outputs(engine: str) -> None:
    def backward(x: Tensor, grad: Tensor) -> Tensor:
        if int(grad.count_nonzero()) > 1:
            raise ValueError("too many")
        return grad * x.cos()

    report = check(function(torch.sin, backward), (normal(60),), Settings(engine=engine))
    assert report.failure is not None
    assert report.failure.kind == "raises"
    assert report.failure.detail.startswith("ValueError for ")


@pytest.mark.parametrize("number", range(1, 9))
def test_an_exception_of_one_call_is_not_attributed_to_its_grad_output(number: int) -> None:
    calls = 0

    def backward(x: Tensor, grad: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == number:
            raise ValueError("once")
        return grad * x.cos()

    with pytest.raises(ValueError, match="once"):
        check(function(torch.sin, backward), (normal(60),), Settings(engine="compressed"))


def test_an_exception_for_large_grad_outputs_is_attributed_to_them() -> None:
    def backward(x: Tensor, grad: Tensor) -> Tensor:
        if float(grad.abs().max()) > 2:
            raise ValueError("too large")
        return grad * x.cos()

    failure = check(function(torch.sin, backward), (normal(60),), Settings(engine="compressed")).failure
    assert failure is not None
    assert failure.detail == "ValueError for a constant grad_output, or for a larger one"


def test_a_dependence_that_the_backward_ignores() -> None:
    func = function(lambda x: _changed(x.sin(), 20, 0.01 * x[777]), lambda x, g: g * x.cos())
    report = compressed(func, normal(2000))
    assert worst_entry(report) == (20, 777)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_the_certificate_sees_what_the_look_did_not(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """If values are large, a smaller step resolves less and cannot dismiss an error."""
    monkeypatch.setattr(sparsity, "explains_look", lambda *_: True)
    func = function(lambda x: _changed(size + x.sin(), 20, 5e-3 * x[777]), lambda x, g: g * x.cos())
    report = compressed(func, normal(2000))
    assert worst_entry(report) == (20, 777)


@pytest.mark.parametrize("size", [0.0, 1e3])
def test_an_entry_outside_the_pattern_that_varies_within_eps_is_found(size: float) -> None:
    x = torch.linspace(0.1, 1, 400, dtype=torch.float64)
    place = x[3].item()

    def func(x: Tensor) -> Tensor:  # its gradient lacks the derivative of output 300 with respect to input 3, 0.01
        term = 1e-9 * (1e7 * (x[3] - place)).sin() * (torch.arange(400) == 300)
        return size + x.sin() + term.detach()

    report = compressed(func, x.requires_grad_())
    assert report.failure is not None
    assert worst_entry(report) == (300, 3)


def test_entries_that_a_guess_misses_are_learnt() -> None:
    """Output 150 also depends on input 7, which the first look does not show."""
    x = normal(300)

    def func(v: Tensor) -> Tensor:
        return v.sin() + torch.where(torch.arange(300) == 150, 0.01 * v[7], 0.0)

    report = compressed(func, x)
    assert report.passed
    wrong = function(func, lambda v, g: g * v.cos())
    assert not compressed(wrong, x).passed


def _noisy(x: Tensor) -> Tensor:
    return x.sin() + 1e-13 * torch.rand(x.shape, dtype=x.dtype)


class _Stateful:
    """Rounding that differs in every call, as from a cache that is filled."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.sin() * (1 + 2.0**-50 * (self.calls % 3))


def _two_paths(x: Tensor) -> Tensor:
    return x.sin() if torch.is_grad_enabled() else x.double().sin() * (1 + 2.0**-40)


class _Fragile:
    """Raises if only some elements have moved."""

    def __init__(self, x: Tensor) -> None:
        self.x = x.detach().clone()

    def __call__(self, x: Tensor) -> Tensor:
        moved = int((x.detach() != self.x).sum())
        if 1 < moved < x.numel():
            raise RuntimeError("some of it moved")
        return x.sin()


class _FragileToMoreThanOne(_Fragile):
    def __call__(self, x: Tensor) -> Tensor:
        if int((x.detach() != self.x).sum()) > 1:
            raise RuntimeError("some of it moved")
        return x.sin()


class _Closure:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.x.flip(0)


X = normal(160)
ZERO = torch.cat([torch.zeros(80, dtype=torch.float64), normal(80, seed=1).detach()]).requires_grad_()
WIDE = (10.0 ** torch.linspace(-12, 12, 160, dtype=torch.float64)).requires_grad_()
MISLEADING: dict[str, tuple[Callable[[], Callable[..., Any]], Tensor]] = {
    "two inputs that matter only together": (lambda: lambda x: x + (x[3] - X[3].item()) * (x[9] - X[9].item()), X),
    "a term that is zero at x": (lambda: lambda x: x[:80] * x[80:], ZERO),
    "a jump next to x": (lambda: lambda x: x.sin() + (x > X.detach() + 1e-4).double(), X),
    "noise": (lambda: _noisy, X),
    "state between calls": (_Stateful, X),
    "a closure over the input": (lambda: _Closure(X), X),
    "raises when probed": (lambda: _Fragile(X), X),
    "takes single steps only": (lambda: _FragileToMoreThanOne(X), X),
    "another path under no_grad": (lambda: _two_paths, X),
    "all magnitudes": (lambda: lambda x: 3 * x, WIDE),
    "all magnitudes, squared": (lambda: lambda x: (x * x).sqrt(), WIDE),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MISLEADING)
def test_misleading_functions(name: str, engine: str) -> None:
    make, x = MISLEADING[name]
    keywords: dict[str, Any] = {"engine": engine, "fast_mode": engine == "sketch"}
    right = make()
    assert fastgrad.gradcheck(right, (x,), **keywords)
    report = check(right, (x,), Settings(**keywords))
    # Without column groups, entries are re-measured column by column.
    assert report.evaluations + report.vjps <= (10 if engine in ("auto", "dense") else 4) * (2 * 160 + 160)

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, output: Tensor) -> Tensor:
            return output.clone()

        @staticmethod
        def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
            return _changed(grad, 33, 0.1 * grad[33])

    assert not fastgrad.gradcheck(lambda x: Wrong.apply(right(x)), (x,), **keywords, raise_exception=False)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_engine_asked_for_is_in_the_message(engine: str) -> None:
    func = function(torch.sin, SIN["one entry"][0])
    with pytest.raises(fastgrad.GradcheckError) as raised:
        fastgrad.gradcheck(func, normal(800), engine=engine, fast_mode=engine == "sketch")
    expected = "compressed: 1 column group, 1 row group" if engine in ("auto", "compressed") else f"{engine}: "
    assert expected in str(raised.value)


VECTORS_HELD = """
import torch, fastgrad
from benchmarks.measure import PeakMemory
n = 1_000_000
x = torch.randn(n, dtype=torch.float64, requires_grad=True)
fastgrad.gradcheck(torch.sin, x)  # memory that the first check of a process allocates permanently
with PeakMemory() as peak:
    fastgrad.gradcheck(torch.sin, x)
print(peak.mib * 2**20 / (8 * n))
"""


def test_memory_stays_near_the_vectors() -> None:
    # Every vector is mapped separately, so that freed memory that the heap keeps does not count.
    result = subprocess.run(
        [sys.executable, "-c", VECTORS_HELD],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 5 < float(result.stdout) <= 21, "five at least: it is measured at all"


def uniform(n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(n, generator=generator, dtype=torch.float64) + 0.5).requires_grad_()


def test_neighbors_closer_than_eps_are_measured_one_by_one() -> None:
    """Closest values 4.5e-10 apart: steps that do not swap them are so small that rounding hides errors below 6e-5."""
    report = fastgrad.check(lambda v: v.sort()[0], uniform(20_000, seed=4), engine="compressed")
    assert report.passed
    assert report.evaluations <= 380
    assert all(certificate.bound <= 1e-5 for certificate in report.certificates)


def test_what_no_step_resolves_to_the_tolerance_is_left_open() -> None:
    """Closest values 4.7e-11 apart: steps that do not swap them resolve their entries to 1.2e-5, not to 1e-5."""
    report = fastgrad.check(lambda v: v.sort()[0], uniform(100_000, seed=0))
    assert report.verdict == "undecided"
    assert report.undecided is not None
    assert 1e-5 < report.undecided < 1.3e-5
    assert report.evaluations <= 940


def test_only_other_engines_decide_what_a_pattern_does_not_explain() -> None:
    x = torch.linspace(0.1, 2, 60, dtype=torch.float64)
    x[3], x[0], x[1] = x[9] + 4.7e-11, 1 + 4.7e-11, 1
    x.requires_grad_()
    verdicts = {
        name: fastgrad.check(lambda x: x.sort()[0] * x, x, engine=name).verdict
        for name in ("auto", "dense", "compressed")
    }
    assert verdicts == {"auto": "passed", "dense": "passed", "compressed": "undecided"}


@pytest.mark.parametrize("missing", [0.0, 1.2e-5])
def test_many_directions_make_up_for_rounding_of_entries_in_large_outputs(missing: float) -> None:
    """Each analytical entry is wrong by 70 % of its tolerance, so numerical entries must explain the outputs."""
    scales = torch.linspace(1, 30, 2000, dtype=torch.float64)
    wrong = scales + 0.7 * (1e-5 + 1e-3 * scales)

    def forward(x: Tensor) -> Tensor:
        result = scales * x
        result[5] += missing * x[900]
        return result

    report = fastgrad.check(function(forward, lambda x, grad: wrong * grad), uniform(2000, seed=0))
    if missing:
        assert worst_entry(report) == (5, 900)
    else:
        assert report.passed
        assert "sums of entries" in report.certificates[0].method
        assert report.certificates[0].bound <= 1e-5
        assert report.evaluations <= 212


@pytest.mark.parametrize("missing", [0.0, 3e-5])
def test_a_row_that_three_directions_do_not_explain_is_followed(missing: float) -> None:
    """Output 1605 is small, and rounding of its terms is not. All analytical entries are off by 1e-6 of their size."""
    generator = torch.Generator().manual_seed(1)
    a, b, values = (torch.randn(3000, generator=generator, dtype=torch.float64) for _ in range(3))

    def forward(x: Tensor) -> Tensor:
        result = a * x + b * x.roll(1)
        result[1605] += missing * x[40]
        return result

    func = function(forward, lambda x, grad: (1 + 1e-6) * (a * grad + (b * grad).roll(-1)))
    report = fastgrad.check(func, values.requires_grad_())
    if missing:
        assert worst_entry(report) == (1605, 40)
    else:
        assert report.passed
        assert report.evaluations <= 300


@pytest.mark.parametrize("n", [300, 1000])
def test_a_kink_at_negative_zero_is_no_undecided_error(n: int) -> None:
    x = normal(n).detach()
    x[5] = -0.0
    x.requires_grad_()
    assert fastgrad.check(torch.relu, x).verdict == "failed"
    assert fastgrad.check(lambda x: x * x.detach().sign(), x).verdict == "passed"


def test_the_dense_engine_decides_about_an_entry_that_a_large_one_may_hide() -> None:
    def func(x: Tensor) -> Tensor:
        missing = torch.zeros_like(x)
        missing[100] = 1e-3 * x.detach()[150]
        return 1e6 * x + missing

    report = fastgrad.check(func, normal(300))
    assert worst_entry(report) == (100, 150)
    assert fastgrad.check(lambda x: 1e6 * x, normal(300)).verdict == "passed"


class SortOffByOne(torch.autograd.Function):
    """Sorts; its backward may swap the gradients of the two closest values, and adds `extra` seven places on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: float, swaps: bool) -> Tensor:
        values, order = x.sort()
        ctx.closest, ctx.order, ctx.extra, ctx.swaps = int(values.diff().argmin()), order, extra, swaps
        return values

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        k, order = ctx.closest, ctx.order.clone()
        if ctx.swaps:
            order[k], order[k + 1] = order[k + 1].clone(), order[k].clone()
        gradient = torch.empty_like(grad_output).scatter_(0, order, grad_output)
        gradient[order[k + 7]] += ctx.extra * grad_output[k]
        return gradient, None, None


@pytest.mark.parametrize(("extra", "swaps"), [(0.0, True), (3e-5, False), (3e-5, True)])
def test_a_wrong_gradient_of_neighbors_closer_than_eps_fails(extra: float, swaps: bool) -> None:
    report = fastgrad.check(lambda v: SortOffByOne.apply(v, extra, swaps), uniform(20_000, seed=4))
    assert report.verdict == "failed"


INDEX = torch.randint(0, 400, (300,), generator=torch.Generator().manual_seed(1))
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda x: x.flip(0),
    "gather": lambda x: x[INDEX],
    "pad": lambda x: torch.nn.functional.pad(x, (3, 4)),
    "maximum": lambda x: x.view(20, 20).amax(1),
    "repeat": lambda x: x.repeat(3),
    "reshape": lambda x: x.view(20, 20),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_only_moves_elements_is_guessed(name: str) -> None:
    move, x = MOVES[name], normal(400)
    right = compressed(move, x)
    assert right.passed
    assert right.plan is not None
    assert right.plan.reason.startswith("guessed")

    def wrong(x: Tensor) -> Tensor:
        moved = move(x)
        mask = torch.zeros_like(moved)
        mask.view(-1)[7] = 1.0
        return moved + (0.99 - 1) * mask * (moved - moved.detach())

    report = check(wrong, (x,), Settings(engine="compressed"))
    assert report.failure is not None
    assert report.failure.comparison is not None
    worst = report.failure.comparison.worst
    assert worst is not None
    assert worst.numerical == pytest.approx(1.0, rel=1e-6)
    assert worst.analytical == pytest.approx(0.99, rel=1e-6)


def test_what_looks_moved_at_x_only_is_not_taken_for_it() -> None:
    x = normal(400)
    x0 = x.detach().clone()

    def disguised(x: Tensor) -> Tensor:  # at x, the other term is zero
        return x.flip(0) + 2 * (x - x0).roll(7)

    def forgotten(x: Tensor) -> Tensor:
        return x.flip(0) + 2 * (x - x0).roll(7).detach()

    assert check(disguised, (x,), Settings(engine="compressed")).passed
    report = check(forgotten, (x,), Settings(engine="compressed"))
    assert report.failure is not None
    assert report.failure.comparison is not None
    assert report.failure.comparison.worst is not None
    assert report.failure.comparison.worst.numerical == pytest.approx(2.0, rel=1e-6)


def test_second_order_of_a_convolution_is_probed_no_longer_than_it_pays_off() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, 8, 8), (4, 3, 3, 3)
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    report = fastgrad.check(torch.nn.functional.conv2d, inputs, order=2)
    assert report.passed
    assert report.plan is not None
    assert report.plan.engine == "compressed"
    assert report.evaluations + report.vjps < 0.4 * (2 * report.n + report.m)


@pytest.mark.parametrize("engine", ["auto", "compressed"])
@pytest.mark.parametrize("n", [400, 4000])
def test_a_backward_in_single_precision_is_certified_below_the_tolerance(n: int, engine: str) -> None:
    """Products differ from sums of rows by rounding in single precision, which no row explains."""
    single = function(torch.sin, lambda x, g: (g.float() * x.cos().float()).double())
    x = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    report = fastgrad.check(single, x, engine=engine)
    assert report.passed, report
    assert report.plan is not None
    assert report.plan.engine == "compressed"
    linear = next(one for one in report.certificates if "backward is linear" in one.claim)
    assert 1e-8 < linear.bound <= 1e-5


def test_an_undecided_check_states_what_its_backward_may_hide() -> None:
    """In this case, the certificate once stated "errors of any size"."""
    bent = function(torch.sin, lambda x, g: g * x.cos() + 1e-5 * g.abs())
    x = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    report = fastgrad.check(bent, x, engine="compressed")
    assert report.verdict == "undecided"
    assert all(one.bound >= 1e-5 for one in report.certificates if "backward is linear" in one.claim)


def band(x: Tensor) -> Tensor:
    return 3 * x + 2 * x.roll(1) + x[0]


class WrongOnAndOffItsPattern(torch.autograd.Function):
    """Wrong by 0.01 in an entry on the pattern, and by 7 in an entry outside of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return band(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        gradient = 3 * g + 2 * g.roll(-1)
        gradient[0] += g.sum()
        gradient[7] += 0.01 * g[7]
        gradient[2] += 7 * g[7]
        return gradient


class WrongInTwoInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return band(a) + 2 * b.roll(3)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        of_a, of_b = 3 * g + 2 * g.roll(-1), 2 * g.roll(-3)
        of_a[0] += g.sum()
        of_a[2] += 7 * g[7]
        of_b[4] += 0.01 * g[7]
        return of_a, of_b


class WrongOnAndOffTheDiagonal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        gradient = 3 * g
        gradient[0] += 0.01 * g[0]
        gradient[5] += 7 * g[9]
        return gradient


@pytest.mark.parametrize("n", [20, 400])
@pytest.mark.parametrize(
    ("func", "inputs"), [(WrongOnAndOffItsPattern, 1), (WrongInTwoInputs, 2), (WrongOnAndOffTheDiagonal, 1)]
)
def test_a_failure_on_the_pattern_hides_no_larger_one_outside(func: Any, inputs: int, n: int) -> None:
    report = compressed(func.apply, *(normal(n, seed=k) for k in range(inputs)))
    assert report.failure is not None
    comparison = report.failure.comparison
    assert comparison is not None
    assert report.failure.input == 0
    assert comparison.largest_absolute == pytest.approx(7.0)
    assert not comparison.on_pattern
    assert comparison.mismatches == 2 or not comparison.exhaustive
    assert not [pair for pair in report.pairs if pair.agrees]


def test_sums_of_small_entries_next_to_large_ones_are_no_wrong_entry() -> None:
    # The tried pattern lacks the entries 9e-6, so seven of them are added up in compressed Jacobians.
    n, shared = 400, 50
    generator = torch.Generator().manual_seed(0)
    sizes = 1e7 * (1 + torch.rand(n, dtype=torch.float64, generator=generator))
    index = torch.arange(n) % shared

    def func(x: Tensor) -> Tensor:
        own, small = x[:n], x[n:]
        return torch.cat([sizes * own + 9e-6 * small[index], 0.5 * small])

    x = torch.randn(n + shared, dtype=torch.float64, generator=generator).requires_grad_()
    assert fastgrad.check(func, x).passed


def test_many_entries_that_are_too_small_for_detection_need_no_dense_engine() -> None:
    """The pattern lacks thousands of entries, because some gates are saturated. None of them exceeds 1e-8."""
    case = large_case("LSTM cell")
    report = fastgrad.check(case.func, case.inputs)
    assert report.passed
    assert report.plan is not None
    assert report.plan.engine == "compressed"
    assert report.evaluations < 1000
    assert all(certificate.bound < report.settings.atol for certificate in report.certificates)

    def wrong(*inputs: Tensor) -> tuple[Tensor, ...]:
        first, *others = case.func(*inputs)
        extra = 1e-4 * inputs[0][-1, -1]
        return first + (extra - extra.detach()) * torch.eye(*first.shape, dtype=first.dtype), *others

    failure = fastgrad.check(wrong, case.inputs).failure
    assert failure is not None
    assert failure.kind == "mismatch"


class ScaledBand(torch.autograd.Function):
    """A band matrix times x; its rows are multiplied by `sizes`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, sizes: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(sizes)
        return sizes * (x + x.roll(-1) - x.roll(-2))

    @staticmethod
    def backward(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (sizes,) = ctx.saved_tensors  # type: ignore[attr-defined]
        v = sizes * g
        return v + v.roll(1) - v.roll(2), None


@pytest.mark.parametrize("n", [60, 800])
def test_rounding_of_large_products_is_no_failure_without_a_relative_tolerance(n: int) -> None:
    # All points, sizes and steps are such that the differences are exact.
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        sizes = 2.0 ** torch.randint(0, 31, (n,), generator=generator).double()
        x = torch.randint(-4, 5, (n,), generator=generator).double().requires_grad_()
        report = fastgrad.check(lambda x, s=sizes: ScaledBand.apply(x, s), x, eps=2.0**-20, atol=1e-8, rtol=0.0)
        assert report.passed, report


class NextToItsDomain(torch.autograd.Function):
    """A square root whose gradient has one more entry than func, at `row` and `column`."""

    row, column, extra = 32, 33, 5.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient = grad_output * 0.5 / x.sqrt()
        gradient[NextToItsDomain.column] += NextToItsDomain.extra * grad_output[NextToItsDomain.row]
        return gradient


@pytest.mark.parametrize("keywords", [{}, {"engine": "compressed"}], ids=str)
@pytest.mark.parametrize(
    ("row", "column", "extra"), [(32, 33, 5.0), (32, 32, 5.0), (32, 33, -1.5e-3), (0, 0, 0.0)], ids=str
)
def test_an_input_next_to_the_domain_of_func_hides_nothing(
    keywords: dict[str, Any], row: int, column: int, extra: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"row": row, "column": column, "extra": extra}.items():
        monkeypatch.setattr(NextToItsDomain, name, value)
    x = torch.rand(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
    x[77] = 1e-7  # func is NaN one step below
    report = fastgrad.check(NextToItsDomain.apply, (x.requires_grad_(),), **keywords)
    assert report.verdict == ("failed" if extra else "passed")
    if extra:
        assert report.failure is not None
        assert report.failure.comparison is not None
        worst = report.failure.comparison.worst
        assert worst is not None
        assert (worst.output_index, worst.input_index) == ((row,), (column,))


@pytest.mark.parametrize("missing", [1, 2])
def test_a_pattern_of_complex_elements_that_lacks_single_coordinates(missing: int) -> None:
    """The gradient has real entries outside the pattern, which are within the tolerance."""
    rows, columns = torch.tensor([200, 300][:missing]), torch.tensor([7, 60][:missing])

    def func(z: Tensor) -> Tensor:
        added = torch.zeros(400, dtype=torch.float64).index_add(0, rows, 0.5e-5 * z.real[columns])
        return z * z + (added - added.detach())

    z = normal(400, dtype=COMPLEX)
    report = fastgrad.check(func, z)
    assert report.verdict == "passed"
    assert report.plan is not None
    assert report.plan.engine == "compressed"
    assert not fastgrad.check(lambda z: func(z) + 2e-5 * z.roll(1).detach(), z).passed


def test_a_wrong_input_behind_a_tensor_that_is_passed_twice() -> None:
    a, b = (torch.linspace(0, end, 30, dtype=torch.float64, requires_grad=True) for end in (1, 2))

    def func(a: Tensor, again: Tensor, b: Tensor) -> Tensor:
        total = 0.01 * b.sum()
        return a + again + b + (total.detach() - total)

    report = fastgrad.check(func, (a, a, b))
    assert report.failure is not None
    assert (report.failure.kind, report.failure.input) == ("mismatch", 2)
    assert report.failure.comparison is not None
    assert report.failure.comparison.entries == 30 * 30
