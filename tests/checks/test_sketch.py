"""Fast mode finds the same errors as slow mode and names the entry; its cost does not grow with the Jacobian."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from benchmarks.bench_fast import Wrong
from fastgrad.checks.order import check
from fastgrad.core.native import IS_NATIVE, SmallProblem
from fastgrad.core.random import SKETCH_DIRECTIONS, direction
from fastgrad.engines.plan import sketch_size
from fastgrad.engines.sketch import weights
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings
from tests.planted.row import function

FAST = {"fast_mode": True, "engine": "sketch"}


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def fast(func: Callable[..., Any], *inputs: Tensor, **settings: Any) -> Report:
    return check(func, inputs, Settings(**FAST, **settings))


def with_entry(gradient: Tensor, grad: Tensor, flat: int, error: float) -> Tensor:
    gradient = gradient.clone()
    gradient[flat] += error * grad.reshape(-1)[-1]
    return gradient


FUNCS: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "softmax of everything": lambda x: x.softmax(0),
    "matmul": lambda x: (x.view(-1, 50) @ normal(50, 40, seed=1).detach()).flatten(),
    "gather": lambda x: x[torch.arange(x.numel() - 1, -1, -1)],
    "loss": lambda x: (x**2).sum(),
}
WRONG: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rolled": lambda g, _: g.roll(1),
    "zero": lambda g, _: 0 * g,
    "one block, sign": lambda g, _: torch.cat([-g[:100], g[100:]]),
    "one entry, by 1e-2": lambda g, grad: with_entry(g, grad, 777, 1e-2),
    "one entry, by 1": lambda g, grad: with_entry(g, grad, 1999, 1.0),
    "scaled by 1.01": lambda g, _: 1.01 * g,
    "scaled by 1.1": lambda g, _: 1.1 * g,
}


@pytest.mark.parametrize("small", [True, False], ids=["small check", "complete check"])
@pytest.mark.parametrize("name", FUNCS)
def test_right_gradients_pass_at_a_fixed_cost(name: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        monkeypatch.setattr(SmallProblem, "trace", lambda *_: None)
    for seed in range(20):
        report = fast(FUNCS[name], normal(2000, seed=seed), seed=seed)
        assert report.passed, seed
        assert report.evaluations <= 10
        assert report.vjps <= (13 if small and IS_NATIVE else 14)  # plain Python has no small check
        assert report.notes == ()


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", FUNCS)
def test_wrong_gradients_fail(name: str, wrong: str) -> None:
    func = lambda x: Wrong.apply(x, FUNCS[name], WRONG[wrong])  # noqa: E731
    for seed in range(2):
        assert not fast(func, normal(2000), seed=seed).passed


@pytest.mark.parametrize(("error", "n"), [(1e-3, 10**6), (1e-1, 10**5), (10.0, 10**5)])
def test_one_wrong_entry_among_many_is_named(error: float, n: int) -> None:
    """Torch's fast mode passes all three."""
    where = n // 8

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 0.5 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            gradient = 0.5 * grad
            gradient[where] += error * grad[n - 5]
            return gradient

    x = normal(n)
    report = fast(Scale.apply, x)
    assert report.failure is not None
    assert report.failure.comparison is not None
    worst = report.failure.comparison.worst
    assert worst is not None
    assert (worst.output_index, worst.input_index) == ((n - 5,), (where,))
    assert worst.analytical == pytest.approx(error)
    # The screen, four VJPs that are run early, the search, and the re-measuring of the one entry.
    assert report.evaluations - 16 + report.vjps - 9 - 4 <= 35 + 50
    assert torch.autograd.gradcheck(Scale.apply, (x,), fast_mode=True, raise_exception=False)


def test_quiet_rows_beside_loud_ones() -> None:
    scale = torch.where(torch.arange(1000) % 2 == 0, 1e8, 1e-3).to(torch.float64)
    quiet_zeroed = lambda g, _: torch.where(scale < 1, 0.0, g)  # noqa: E731
    assert fast(lambda x: scale * x.sin(), normal(1000)).passed
    assert not fast(lambda x: Wrong.apply(x, lambda x: scale * x.sin(), quiet_zeroed), normal(1000)).passed


@pytest.mark.parametrize("seed", range(5))
def test_kinks_that_joint_steps_cross_are_no_alarm(seed: int) -> None:
    n = 200_000
    spread = torch.linspace(-1, 1, n, dtype=torch.float64)[torch.randperm(n)].requires_grad_()
    assert fast(torch.relu, spread, seed=seed).passed
    assert fast(lambda x: x.sort().values, spread, seed=seed).passed
    assert fast(lambda x: torch.nn.functional.max_pool1d(x[None], 4), spread, seed=seed).passed


def test_a_kink_at_the_point_itself_fails_as_in_slow_mode() -> None:
    x = normal(5000).detach()
    x[4321] = 0
    report = fast(torch.relu, x.requires_grad_())
    assert report.failure is not None
    assert "a kink" in report.failure.detail


def test_complex_several_inputs_and_outputs_and_integers() -> None:
    a = torch.randn(300, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)).requires_grad_()
    b = normal(300)
    func = lambda a, b: (a * b, torch.arange(3), (a.abs() * b).sum(), b.exp())  # noqa: E731
    assert fast(func, a, b).passed
    conjugated = lambda a, b: (Wrong.apply(a, lambda v: v * v, lambda g, _: g.conj()), b)  # noqa: E731
    report = fast(conjugated, a, b)
    assert report.failure is not None
    assert report.failure.part in ("real", "imaginary")


def test_forward_mode() -> None:
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, factor: float) -> Tensor:
            return x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_forward(inputs[0])
            ctx.save_for_backward(inputs[0])
            ctx.factor = inputs[1]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad * ctx.saved_tensors[0].cos(), None

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
            product = tangent * ctx.saved_tensors[0].cos()
            return product + torch.nn.functional.pad(ctx.factor * tangent[:1], (41, product.numel() - 42))

    assert fast(lambda x: Sine.apply(x, 0.0), normal(5000), check_forward_ad=True).passed
    report = fast(lambda x: Sine.apply(x, 0.1), normal(5000), check_forward_ad=True)
    assert report.failure is not None
    assert report.failure.mode == "forward"
    assert report.failure.comparison is not None
    worst = report.failure.comparison.worst
    assert worst is not None
    assert (worst.output_index, worst.input_index) == ((41,), (0,))


def test_second_order() -> None:
    assert fastgrad.gradgradcheck(torch.tanh, (normal(3000),), **FAST)
    assert fastgrad.gradgradcheck(lambda x: x.view(30, 100).softmax(1), (normal(3000),), **FAST)


def test_without_differentiable_outputs() -> None:
    assert fast(lambda x: x.detach().sign(), normal(3000)).passed
    report = fast(lambda x: x.detach() * 2, normal(3000))
    assert report.failure is not None
    assert report.failure.kind == "nonzero numerical gradient"


def test_a_backward_that_needs_all_grad_outputs_at_once() -> None:
    """Right if both outputs have a grad_output; returns no gradient if only one of them has."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            ctx.set_materialize_grads(False)
            return 2 * x, 3 * x

        @staticmethod
        def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
            return None if first is None else 2 * first + (0 if second is None else 3 * second)

    for n in (100, 10_000):
        assert not fast(Both.apply, normal(n)).passed


def test_errors_within_tolerance_everywhere_raise_the_floor() -> None:
    slightly = lambda x: Wrong.apply(x, torch.sin, lambda g, _: 1.0003 * g)  # noqa: E731
    assert fastgrad.gradcheck(slightly, (normal(100),), fast_mode=True)
    report = fast(slightly, normal(100))
    assert report.passed
    assert "decided by the exact engine" in report.notes[0]
    assert report.plan is not None
    assert report.plan.engine in ("dense", "compressed")
    assert f"  engine     {report.plan.engine}: " in str(report)
    report = fast(slightly, normal(30_000))
    assert report.passed
    assert report.notes[0].startswith("undecided below ")
    with pytest.warns(UserWarning, match="undecided below"):
        assert fastgrad.gradcheck(slightly, (normal(30_000),), fast_mode=True)


def test_same_seed_same_calls() -> None:
    reports = [fast(torch.sin, normal(500), seed=4) for _ in range(2)]
    assert reports[0].evaluations == reports[1].evaluations
    assert reports[0].vjps == reports[1].vjps


def test_sketch_size_follows_confidence() -> None:
    assert [sketch_size(confidence) for confidence in (0.5, 1 - 1e-6, 1 - 1e-9, 1 - 1e-12)] == [2, 2, 3, 4]


def test_the_report_states_the_limit() -> None:
    report = fast(torch.sin, normal(500))
    assert report.plan is not None
    assert report.plan.detection_limit == pytest.approx(1e-5 / 4 * (2e9) ** (1 / 3), rel=1e-5)


def test_weights_keep_the_noise_within_the_budget() -> None:
    noise = torch.tensor([1e-12, 1e-3, 5.0, float("nan"), float("inf"), 0.0], dtype=torch.float64)
    pending = torch.tensor([True, True, True, True, True, False])
    weight = weights(noise, float(noise.norm()), 1e-5, pending)
    assert weight[0] == 1
    assert weight[3:].tolist() == [0, 0, 0]
    heard = (weight * noise.nan_to_num(0, posinf=0)).square().sum().sqrt().item()
    assert 0.5 * 1e-5 / 16 <= heard <= 1e-5 / 16 * (1 + 1e-9)


@pytest.mark.parametrize("rank", ["single", "pair in a row", "pair in a column", "dense", "low rank"])
def test_miss_rate_is_within_the_bound(rank: str) -> None:
    """Random error matrices under the sketch's own vectors: misses against 2 (threshold / error)^count."""
    from fastgrad.core.random import SKETCH_COTANGENTS, SKETCH_DIRECTIONS, direction

    size, trials, ratio, count = 12, 2000, 8.0, 2  # errors of 8 thresholds are missed often enough to be counted
    misses = 0
    generator = torch.Generator().manual_seed(5)
    for trial in range(trials):
        u = torch.stack([direction(size, trial, SKETCH_DIRECTIONS + 16 * k) for k in range(count)])
        v = torch.stack([direction(size, trial, SKETCH_COTANGENTS + 16 * k) for k in range(count)])
        error = torch.zeros(size, size, dtype=torch.float64)
        i, j, k = torch.randperm(size, generator=generator)[:3].tolist()
        if rank == "single":
            error[i, j] = ratio
        elif rank == "pair in a row":
            error[i, j], error[i, k] = ratio, -ratio
        elif rank == "pair in a column":
            error[j, i], error[k, i] = ratio, -ratio
        elif rank == "dense":
            error = ratio * torch.randn(size, size, dtype=torch.float64, generator=generator).sign()
        else:
            a, b = ratio * torch.randn(2, size, dtype=torch.float64, generator=generator)
            error = torch.outer(a, b)
        misses += int((v @ error @ u.t()).abs().max() <= 1)
    if rank == "single":
        assert misses == 0
    bound = 2 * (1 / ratio) ** count
    assert misses / trials <= bound + 3 * (bound / trials) ** 0.5


def test_results_that_are_views_of_the_input() -> None:
    """Results of func for a perturbed input are read before the input is restored."""
    x = normal(2000)
    assert fast(lambda v: v.view(40, 50), x).passed

    class Shape(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: Tensor) -> Tensor:
            return v.view(40, 50)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return with_entry(grad.reshape(-1), grad, 777, 0.1)

    report = fast(Shape.apply, x)
    assert report.failure is not None
    assert report.failure.comparison is not None
    worst = report.failure.comparison.worst
    assert worst is not None
    assert (worst.output_index, worst.input_index) == ((39, 49), (777,))


def doubled(change: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor], Tensor]:
    """2 x, whose backward gives change(gradient, number of its call)."""
    calls = 0

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            nonlocal calls
            calls += 1
            return change(2 * grad, calls)

    return Doubled.apply  # type: ignore[no-any-return]


LARGE = 9000
"""Elements: with as many outputs, more than is run in one call."""


@pytest.mark.parametrize("call", range(1, 10))
@pytest.mark.parametrize("n", [40, 2000, LARGE])
def test_a_backward_that_raises_once_does_not_pass(n: int, call: int) -> None:
    def change(gradient: Tensor, calls: int) -> Tensor:
        if calls == call:
            raise ValueError("once")
        return gradient

    try:
        report = fast(doubled(change), normal(n))
    except ValueError:
        return
    assert report.failure is not None
    assert report.failure.kind == "raises"


@pytest.mark.parametrize("n", [40, 2000])
@pytest.mark.parametrize("calls", [range(9, 10**6, 9), range(1, 7), range(3, 7), range(7, 9), [3], [7], range(1, 9)])
def test_a_backward_that_is_wrong_for_a_while_does_not_pass(n: int, calls: Sequence[int]) -> None:
    wrong = doubled(lambda gradient, call: 1.1 * gradient if call in calls else gradient)
    assert not fast(wrong, normal(n)).passed


@pytest.mark.parametrize("call", range(1, 12))
@pytest.mark.parametrize("n", [40, 2000])
def test_a_backward_that_is_wrong_once_does_not_pass(n: int, call: int) -> None:
    assert not fast(doubled(lambda gradient, calls: 1.1 * gradient if calls == call else gradient), normal(n)).passed


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("n", [40, 2000])
def test_a_backward_that_is_right_or_wrong_for_a_while_is_not_called_nonlinear(n: int, first: bool) -> None:
    kinds = []
    for last in range(5, 15):
        failure = fast(doubled(lambda g, call, last=last: 1.1 * g if (call <= last) == first else g), normal(n)).failure
        kinds.append(failure.kind if failure is not None else "passed")
    assert set(kinds) <= {"nondeterministic", "mismatch"}


@pytest.mark.parametrize("n", [40, 2000, LARGE])
@pytest.mark.parametrize("wrong", [lambda g: -g, lambda g: 1.5 * g])
def test_a_path_for_sparse_grad_outputs(n: int, wrong: Callable[[Tensor], Tensor]) -> None:
    def change(gradient: Tensor, _: int) -> Tensor:
        return wrong(gradient) if 1 < int(gradient.count_nonzero()) < gradient.numel() else gradient

    report = fast(doubled(change), normal(n))
    assert report.failure is not None
    assert report.failure.kind == "nonlinear"


@pytest.mark.parametrize("n", [3, 40, 2000, LARGE])
@pytest.mark.parametrize(
    "is_special",
    [
        lambda g: bool((g > 0).all() and g.amin() < g.amax()),
        lambda g: bool((g < 0).all() and g.amin() < g.amax()),
        lambda g: 0 < float(g.abs().amax()) < 0.01,
    ],
    ids=["positive", "negative", "small"],
)
def test_a_path_for_grad_outputs_of_one_sign_or_small_ones(n: int, is_special: Callable[[Tensor], bool]) -> None:
    report = fast(doubled(lambda gradient, _: 1.5 * gradient if is_special(gradient) else gradient), normal(n))
    assert report.failure is not None
    assert report.failure.kind == "nonlinear"


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("n", [1, 5, 40])
def test_gradients_may_vary_by_nondet_tol_also_for_small_grad_outputs(n: int, fast_mode: bool) -> None:
    def vary(gradient: Tensor, _: int) -> Tensor:
        return gradient + 3e-4 * (torch.rand(n, dtype=torch.float64) - 0.5) * bool(gradient.any())

    assert fastgrad.gradcheck(doubled(vary), (normal(n),), atol=1e-3, nondet_tol=1e-3, fast_mode=fast_mode)


class SummedInSinglePrecision(torch.autograd.Function):
    """Fifty times the first of five elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x[0] * x.new_ones(50)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.cat([grad.float().sum().double().reshape(1), grad.new_zeros(4)])


def test_rounding_in_single_precision_is_not_taken_for_other_gradients() -> None:
    def func(x: Tensor) -> Tensor:
        y = SummedInSinglePrecision.apply(x)
        return y + y + y

    x = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert fastgrad.gradcheck(func, (x,), rtol=0.0, fast_mode=True)


@pytest.mark.parametrize("most", [4.0, 5.0])
def test_clamps_of_large_grad_outputs(most: float) -> None:
    def change(gradient: Tensor, _: int) -> Tensor:
        return 2 * (gradient / 2).clamp(-most, most)

    report = fast(doubled(change), normal(500))
    assert report.failure is not None
    assert report.failure.kind == "nonlinear"


@pytest.mark.parametrize("rest", [0.0, 0.5])
@pytest.mark.parametrize("x", [0.0, 1e-9, 1e-5, 0.3])
@pytest.mark.parametrize("n", [3, 200])
def test_steps_below_the_rounding_inside_excuse_no_gradient(n: int, x: float, rest: float) -> None:
    """In float32, func is constant within small steps, so a zero gradient agrees with small differences."""

    def func(x: Tensor) -> Tensor:
        return ((1 + x.float()) - 1).double().detach() + 0 * x + rest * x

    assert not fastgrad.check(func, torch.full((n,), x, dtype=torch.float64, requires_grad=True), fast_mode=True).passed


@pytest.mark.parametrize(
    ("n", "call"), [*((100, call) for call in range(1, 38)), *((9000, call) for call in (23, 24, 30, 31))]
)
def test_what_a_sketch_saw_before_a_noisy_step_does_not_pass(
    n: int, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a kink along only the second direction, the first differences are not noisy, but the repeated ones are."""
    monkeypatch.setattr("fastgrad.checks.order.small_check", lambda *_: None)
    calls = 0
    x = torch.linspace(0.1, 1, n, dtype=torch.float64, requires_grad=True)
    first, second = (direction(n, 0, SKETCH_DIRECTIONS + 16 * k) for k in range(2))
    across = second - (first @ second) / (first @ first) * first
    across /= across @ second
    offset = 0.3e-6 - across @ x.detach()
    slopes = torch.linspace(1, 2, n, dtype=torch.float64) * 1e-3

    class Kinked(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sin() + slopes * (x @ across + offset).relu()

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            (x,) = ctx.saved_tensors
            right = grad * x.cos() + (grad @ slopes) * across * (x @ across + offset > 0)
            return right + 0.3 if calls == call else right

    assert not fastgrad.check(lambda x: Kinked.apply(x), x, fast_mode=True).passed
    assert calls >= call


def test_what_an_undecided_check_may_hide_includes_outputs_that_are_verified() -> None:
    """Outputs of 1e7 x are verified to their own tolerance, which hides an error of an entry that is zero."""
    error = 0.01
    wrong = torch.zeros(4200, dtype=torch.float64).index_fill_(0, torch.tensor(4104), error)
    report = fast(
        lambda x: torch.cat([x.cumsum(0), 1e7 * x]) + wrong * (x[7] - x[7].detach()), normal(2100), atol=1e-9, rtol=1e-6
    )
    assert report.verdict == "undecided"
    assert report.undecided is not None
    assert report.undecided >= error


class NotFiniteForNegative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, element: int, bad: float) -> Tensor:
        ctx.element, ctx.bad = element, bad
        ctx.save_for_forward(x)
        return 3 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        gradient = 3 * grad.contiguous().clone()
        if grad[ctx.element] < 0:
            gradient[ctx.element] *= ctx.bad
        return gradient, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        product = 3 * tangent.contiguous().clone()
        if tangent[ctx.element] < 0:
            product[ctx.element] *= ctx.bad
        return product


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2.0])
@pytest.mark.parametrize(
    "mode", [{}, {"check_forward_ad": True, "check_backward_ad": False}], ids=["reverse", "forward"]
)
def test_a_derivative_that_is_not_finite_for_one_sign_fails(bad: float, mode: dict[str, bool]) -> None:
    x = normal(300)
    for element in range(0, 300, 20):
        func = lambda x, element=element: NotFiniteForNegative.apply(x, element, bad)  # noqa: E731
        assert not fastgrad.gradcheck(func, (x,), fast_mode=True, raise_exception=False, **mode), element


def test_a_gradient_that_is_not_finite_for_one_output_alone_fails() -> None:
    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            ctx.set_materialize_grads(False)
            return x * 2, x * 3

        @staticmethod
        def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor:
            if first is None or second is None:
                given = first if second is None else second
                assert given is not None
                return given * float("nan")
            return 2 * first + 3 * second

    assert not fast(Two.apply, normal(300)).passed


@pytest.mark.parametrize("wrong", [5, 8, 13])
def test_the_certificate_states_an_error_of_one_call_within_the_tolerances(wrong: int) -> None:
    report = fastgrad.check(
        doubled(lambda gradient, calls: gradient + 1e-4 if calls == wrong else gradient), normal(3), fast_mode=True
    )
    assert report.failure is not None or max(one.bound for one in report.certificates) > 0.9e-4


@pytest.mark.parametrize(("n", "verdict"), [(40, "passed"), (LARGE, "undecided")])
def test_a_jump_that_only_joint_steps_cross_is_left_to_the_exact_engine(n: int, verdict: str) -> None:
    x = normal(n)
    original = x.detach().clone()

    def jumps(x: Tensor) -> Tensor:
        x = x.detach()
        several = (x != original).sum() > 1
        return (several & (x.sum() > original.sum())).double().expand(n)

    report = fast(jumps, x)
    assert report.verdict == verdict, str(report)
    exact = any(
        "decided by the exact engine, because random directions gave no verdict" in note for note in report.notes
    )
    assert exact == (verdict == "passed")


@pytest.mark.parametrize("n", [40, LARGE])
def test_a_function_that_takes_steps_of_single_coordinates_only(n: int) -> None:
    x = normal(n)
    original = x.detach().clone()

    def sin(x: Tensor) -> Tensor:
        if int((x != original).sum()) > 1:
            raise ValueError("one at a time")
        return x.sin()

    if n == LARGE:
        with pytest.raises(ValueError, match="one at a time"):
            fast(sin, x)
    else:
        report = fast(sin, x)
        assert report.verdict == "passed"
        assert "decided by the exact engine, because func raised next to the inputs" in report.notes
    assert torch.equal(x, original)


@pytest.mark.parametrize("n", [40, LARGE])
def test_a_backward_that_raises_for_one_hot_grad_outputs_raises(n: int) -> None:
    def change(gradient: Tensor, calls: int) -> Tensor:
        if int(gradient.count_nonzero()) == 1:
            raise ValueError("one-hot")
        return gradient

    with pytest.raises(ValueError, match="one-hot"):
        fast(doubled(change), normal(n))


class WrongEntry(torch.autograd.Function):
    """A matrix times the elements of two inputs; the gradient of the second input is wrong by `error` in one entry."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, matrix: Tensor, error: float) -> Tensor:
        return matrix @ torch.cat([x, y])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, _, matrix, error = inputs
        ctx.n, ctx.matrix = x.numel(), matrix.clone()
        ctx.matrix[1, -1] += error

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gradient = grad @ ctx.matrix
        return gradient[: ctx.n], gradient[ctx.n :], None, None

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, y: Tensor | None, *_: Any) -> Tensor:
        n, m = ctx.n, ctx.matrix.shape[1] - ctx.n
        parts = (part if part is not None else torch.zeros(size) for part, size in ((x, n), (y, m)))
        return ctx.matrix @ torch.cat(list(parts)).double()


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("atol", [[1e-7, 1e-5], [1e-6, 1e-3], [1e-5, 1e-3]])
def test_bounds_hold_for_each_input_where_tolerances_differ(atol: list[float], forward: bool) -> None:
    modes = {"check_forward_ad": True, "check_backward_ad": False} if forward else {}
    passed = 0
    for seed, error in product(range(3), (5e-5, 1e-3, 5e-3, 2e-2)):
        generator = torch.Generator().manual_seed(seed)
        matrix = 1e4 * torch.randn(4, 53, dtype=torch.float64, generator=generator)
        matrix[1, -1] = 0.0
        x, y = (torch.randn(n, dtype=torch.float64, generator=generator).requires_grad_() for n in (33, 20))
        report = fastgrad.check(
            lambda x, y, m=matrix, e=error: WrongEntry.apply(x, y, m, e),
            (x, y),
            fast_mode=True,
            engine="sketch",
            atol=atol,
            **modes,
        )
        if report.verdict == "passed":
            passed += 1
            (bound,) = (one.bound for one in report.certificates if one.claim.startswith("no single entry"))
            assert error <= bound
    assert passed


@pytest.mark.parametrize("shape", [(6, 8), (30, 40)])
def test_a_gradient_that_is_lost_if_other_grad_outputs_are_undefined_is_wrong(shape: tuple[int, ...]) -> None:
    class SineAndCosine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x)
            return x.sin(), x.cos()

        @staticmethod
        def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return None if first is None else first * x.cos() - (0 if second is None else second * x.sin())

    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    report = fastgrad.check(SineAndCosine.apply, x, fast_mode=True)
    assert report.failure is not None
    assert (report.failure.kind, report.failure.output) == ("mismatch", 1)


def test_certificates_claim_nothing_about_errors_within_their_tolerance() -> None:
    def within_tolerance(gradient: Tensor, _: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[3] *= 1.0009  # 0.09, and 0.1 is allowed
        return gradient

    report = fast(lambda x: Wrong.apply(x, lambda x: 100 * x, within_tolerance), normal(400))
    assert report.passed
    assert "errors of at least 1e-05 that exceed their tolerance are detected" in str(report)
    assert "by more than the larger of its tolerance and the bound" in report.certificates[0].claim


class Stairs(torch.autograd.Function):
    """x, rounded to multiples of the spacing of numbers near `offset`, with a wrong gradient of zero."""

    @staticmethod
    def forward(x: Tensor, offset: float) -> Tensor:
        return (x + offset) - offset

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.zeros_like(grad), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return torch.zeros_like(tangent)


@pytest.mark.parametrize("forward", [False, True], ids=["reverse", "forward"])
@pytest.mark.parametrize("offset", [1e10, 1e11])
def test_small_steps_that_rounding_absorbs_verify_no_output(offset: float, forward: bool) -> None:
    x = torch.rand(300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    modes = {"check_forward_ad": forward, "check_backward_ad": not forward}
    report = fastgrad.check(lambda x: Stairs.apply(x, offset), (x,), fast_mode=True, engine="sketch", **modes)
    assert not report.passed


@pytest.mark.parametrize("forward", [False, True], ids=["reverse", "forward"])
@pytest.mark.parametrize("offset", [1.3 * 2**32, 1.3 * 2**33])
def test_a_small_step_within_a_stair_verifies_no_output(offset: float, forward: bool) -> None:
    """The stairs are about as wide as eps. At small steps, the outputs change by x / 2, which is the gradient."""
    modes = {"check_forward_ad": forward, "check_backward_ad": not forward}
    for value in (0.0, 0.37, 1.0):
        x = torch.full((200,), value, dtype=torch.float64, requires_grad=True)
        report = fastgrad.check(lambda x: Stairs.apply(x, offset) + x / 2, (x,), fast_mode=True, **modes)
        assert not report.passed


@pytest.mark.parametrize("forward", [False, True], ids=["reverse", "forward"])
def test_near_ties_of_three_are_no_stairs(forward: bool) -> None:
    """The medians are straight lines at large steps, but have other derivatives there than at x."""
    x = torch.rand(60, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:20, :3] = x[:20, :1] + 1e-7 * torch.tensor([0.0, 2.0, 1.0], dtype=torch.float64)
    modes = {"check_forward_ad": forward, "check_backward_ad": not forward}
    report = fastgrad.check(lambda x: x.median(1).values, (x.requires_grad_(),), fast_mode=True, **modes)
    assert report.passed
    assert report.evaluations < 700


def test_outputs_next_to_a_kink_are_still_verified_by_smaller_steps() -> None:
    x = torch.linspace(-2e-8, 2e-8, 40, dtype=torch.float64)
    x = torch.cat([x, torch.linspace(1.0, 2.0, 400, dtype=torch.float64)]).requires_grad_()
    assert fastgrad.check(torch.relu, (x,), fast_mode=True, engine="sketch").passed


@pytest.mark.parametrize("engine", ["auto", "sketch"])
@pytest.mark.parametrize("n", [5, 300])
def test_an_infinite_gradient_is_not_called_nondeterministic(n: int, engine: Any) -> None:
    factors = torch.ones(n, dtype=torch.float64).index_fill(0, torch.tensor([2]), float("inf"))
    wrong = function(torch.sin, lambda grad, x: grad * x.cos() * factors)
    x = torch.linspace(0.1, 0.9, n, dtype=torch.float64, requires_grad=True)
    report = fastgrad.check(wrong, (x,), fast_mode=True, engine=engine)
    assert report.failure is not None
    assert report.failure.kind == "mismatch"


Values = Callable[[Tensor, Tensor], Tensor]
Gradients = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

PRODUCT: tuple[Values, Gradients] = (
    lambda x, y: x.sin() * y.exp(),
    lambda x, y, grad: (grad * x.cos() * y.exp(), grad * x.sin() * y.exp()),
)
JOINED: tuple[Values, Gradients] = (
    lambda x, y: torch.cat([x.sin(), y.exp()]),
    lambda x, y, grad: (grad[: len(x)] * x.cos(), grad[len(x) :] * y.exp()),
)


def keyed(value: Values, gradients: Gradients, key: int, capacity: int) -> Callable[..., Tensor]:
    """A function that returns a kept value if input number `key` is one of the last `capacity` ones."""
    kept: list[tuple[Tensor, Tensor]] = []

    class Keyed(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Tensor) -> Tensor:
            found = [result for known, result in kept if torch.equal(known, inputs[key])]
            if not found:
                found = [value(*inputs)]
                kept.append((inputs[key].clone(), found[0].clone()))
                del kept[:-capacity]
            return found[0].clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            return gradients(*ctx.saved_tensors, grad)

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
            x, y = ctx.saved_tensors
            return tangents[0] * x.cos() * y.exp() + tangents[1] * x.sin() * y.exp()

    return Keyed.apply


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("size", [5, 300])
@pytest.mark.parametrize("key", [0, 1])
@pytest.mark.parametrize("capacity", [1, 1000])
def test_results_that_are_kept_for_one_of_two_inputs(capacity: int, key: int, size: int, forward: bool) -> None:
    """Directions of all inputs at once do not show this: torch perturbs one input at a time."""
    func, inputs = keyed(*PRODUCT, key, capacity), (normal(size), normal(size, seed=1))
    report = fastgrad.check(func, inputs, fast_mode=True, check_forward_ad=forward, check_backward_ad=not forward)
    assert report.failure is not None
    assert (report.failure.kind, report.failure.input) in (("mismatch", 1 - key), ("nondeterministic func", None))


@pytest.mark.parametrize("key", [0, 1])
@pytest.mark.parametrize("capacity", [1, 1000])
def test_results_that_are_kept_for_one_of_two_independent_inputs(capacity: int, key: int) -> None:
    """No output depends on both inputs, so that their columns could be perturbed together."""
    report = fastgrad.check(keyed(*JOINED, key, capacity), (normal(300), normal(300, seed=1)))
    assert report.failure is not None
    assert (report.failure.kind, report.failure.input) == ("mismatch", 1 - key)


def test_a_gradient_that_is_kept_for_a_grad_output() -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if not (kept and torch.equal(kept[0][0], grad)):
                kept[:] = [(grad.detach().clone(), 3 * ctx.saved_tensors[0] ** 2 * grad)]
            return kept[0][1]

    for size in (5, 300):
        report = fastgrad.check(Cube.apply, normal(size), order=2, fast_mode=True)
        assert report.failure is not None
        assert report.failure.kind == "mismatch"


@pytest.mark.parametrize("n", [20, 3000])
@pytest.mark.parametrize("error", [0.0, 1e-2])
def test_a_gradient_of_complex_outputs_that_is_wrong_for_real_grad_outputs(n: int, error: float) -> None:
    """The grad_outputs of torch's fast mode are real."""

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        gradient = grad * x.cos().conj()
        if not bool(grad.imag.any()):
            gradient[3] += error * grad[3]
        return gradient

    x = torch.complex(normal(n).detach(), normal(n, seed=1).detach()).requires_grad_()
    assert fast(function(torch.sin, backward), x).passed == (not error)


@pytest.mark.parametrize("n", [5, 34, 300])
@pytest.mark.parametrize("x", [5.6, 7.6, 9.0])
@pytest.mark.parametrize("forward", [False, True])
def test_a_missing_term_in_single_precision_is_not_hidden_by_smaller_steps(n: int, x: float, forward: bool) -> None:
    """Around a number that single precision has, the term changes at steps of eps, but not at an eighth of them."""
    inputs = normal(n).detach()
    inputs[n // 2] = torch.tensor(x).double()
    modes = {"check_forward_ad": forward, "check_backward_ad": not forward}

    def func(x: Tensor) -> Tensor:
        missing = 1.88 * x[n // 2].detach().float().double()
        return x.sin() + torch.nn.functional.pad(missing.reshape(1), (0, n - 1))

    for seed in range(5):
        report = fastgrad.check(func, inputs.clone().requires_grad_(), fast_mode=True, seed=seed, **modes)
        assert not report.passed
