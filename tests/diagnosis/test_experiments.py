"""Evidence costs nothing if a check passes and little if it fails; it changes no verdict and no input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.checks.order import check
from fastgrad.diagnosis import evidence, experiments, samples
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings
from tests.planted import TABLE
from tests.planted.row import function


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evidence must not depend on the load of the machine."""
    monkeypatch.setattr(experiments, "SECONDS", 60.0)


class Counted:
    """sin, with a gradient that is off by a factor; counts its calls and those of its backward."""

    def __init__(self, factor: float = 2.0, scale: Callable[[Tensor], Any] = lambda x: 1.0) -> None:
        self.calls = 0
        self.vjps = 0
        self._func = function(self._forward, self._backward)
        self._factor = factor
        self._scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self._func(x)

    def _forward(self, x: Tensor) -> Tensor:
        return x.sin()

    def _backward(self, g: Tensor, x: Tensor) -> Tensor:
        self.vjps += 1
        return self._factor * g * x.cos() * self._scale(x)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).requires_grad_()


ENGINES = [
    {"engine": "dense"},
    {"engine": "compressed"},
    {"engine": "sketch", "fast_mode": True},
]


@pytest.mark.parametrize("keywords", ENGINES)
def test_a_check_that_passes_gathers_nothing(keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    func = Counted(factor=1.0)
    report = check(func, leaf(5, 6), Settings(**keywords))
    assert report.passed
    assert func.calls == report.evaluations
    assert func.vjps == report.vjps
    monkeypatch.setattr(evidence, "diagnosed", pytest.fail)
    assert check(Counted(factor=1.0), leaf(5, 6), Settings(**keywords)).passed


@pytest.mark.parametrize("keywords", ENGINES)
@pytest.mark.parametrize("shape", [(), (3,), (5, 6), (40, 40)])
def test_a_check_that_fails_costs_about_twice(keywords: dict[str, Any], shape: tuple[int, ...]) -> None:
    func = Counted()
    report = check(func, leaf(*shape), Settings(**keywords))
    used = report.evaluations + report.vjps
    assert report.evidence is not None
    assert func.calls + func.vjps - used == report.evidence.calls
    assert report.evidence.calls <= used + experiments.MORE_CALLS


def test_nobody_asks_for_evidence_where_nobody_reads_it() -> None:
    func = Counted()
    assert not fastgrad.gradcheck(func, leaf(5, 6), raise_exception=False, engine="dense")
    again = Counted()
    report = check(again, leaf(5, 6), Settings(engine="dense"))
    assert func.calls + func.vjps == report.evaluations + report.vjps


def test_calls_stay_within_their_bound_over_all_planted_errors() -> None:
    for row in TABLE[::6]:
        if row.order == 1:
            report = check(row.wrong, row.inputs(), Settings(**row.keywords))
            if report.evidence is not None:
                used = report.evaluations + report.vjps
                assert report.evidence.calls <= used + experiments.MORE_CALLS, row.name


def test_slow_functions_are_not_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "SECONDS", 0.0)
    func = Counted()
    report = check(func, leaf(5, 6), Settings())
    assert not report.passed
    assert report.evidence is not None
    assert report.evidence.calls == 0
    assert func.calls == report.evaluations
    # The entries that the engine measured are sufficient evidence.
    assert [cause.name for cause in report.causes] == ["constant factor"]


def raising_after(calls: int, error: BaseException) -> Callable[[Tensor], Tensor]:
    """2 x with a gradient of 3; raises after this many calls of func and backward."""
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1
        if count > calls:
            raise error

    def forward(x: Tensor) -> Tensor:
        tick()
        return 2 * x

    def backward(g: Tensor, x: Tensor) -> Tensor:
        tick()
        return 3 * g

    return function(forward, backward)


def test_experiments_that_raise_are_dropped() -> None:
    x = leaf(4)
    before = x.detach().clone()
    used = check(raising_after(10**6, ValueError()), x, Settings())
    count = used.evaluations + used.vjps
    for more in (0, 1, 5, 9, 14, 20, 30):
        report = check(raising_after(count + more, ValueError("no more")), x, Settings())
        assert report.failure is not None
        assert report.failure.kind == used.failure.kind == "mismatch"
        assert torch.equal(x, before)


def test_an_interrupt_passes_through_and_inputs_are_restored() -> None:
    x = leaf(4)
    before = x.detach().clone()
    used = check(raising_after(10**6, ValueError()), x, Settings())
    count = used.evaluations + used.vjps
    for more in (1, 7, 20):
        with pytest.raises(KeyboardInterrupt):
            check(raising_after(count + more, KeyboardInterrupt()), x, Settings())
        assert torch.equal(x, before)
        assert x.grad is None


def test_the_sample_holds_both_jacobians() -> None:
    x = leaf(3, 2)
    for keywords in ENGINES:
        report = check(Counted(scale=lambda x: torch.where(x < 0, 1.0, 0.5)), x, Settings(**keywords))
        sample = report.sample
        assert sample is not None
        assert sample.complete
        assert (sample.output_shape, sample.input_shape) == ((3, 2), (3, 2))
        numerical = torch.zeros(6, 6, dtype=torch.float64)
        numerical[sample.outputs, sample.inputs] = sample.numerical
        torch.testing.assert_close(numerical, torch.diag(x.detach().reshape(-1).cos()), atol=1e-8, rtol=0)
        wrong = sample.inputs[sample.failing]
        assert sorted(wrong.tolist()) == (x.detach().reshape(-1) < 0).nonzero().reshape(-1).tolist()
        torch.testing.assert_close(sample.input_values, x.detach().reshape(-1)[sample.inputs], atol=0, rtol=0)


LARGE = [
    ((300, 400), lambda x: torch.where(x < 0, 1.0, 0.5), "region"),
    ((300, 400), lambda x: torch.tensor([0.5] * 384 + [1.0] * 16), "last tile"),
    ((300, 390), lambda x: torch.tensor([0.5] * 200 + [1.0] + [0.5] * 189).double(), "slice"),
    ((120_000,), lambda x: 1.0, "constant factor"),
]


@pytest.mark.parametrize("keywords", [{}, {"fast_mode": True}])
@pytest.mark.parametrize(("shape", "scale", "cause"), LARGE)
def test_large_operators(
    shape: tuple[int, ...], scale: Callable[[Tensor], Any], cause: str, keywords: dict[str, Any]
) -> None:
    report = check(Counted(scale=scale), leaf(*shape), Settings(**keywords))
    assert report.sample is not None
    assert report.sample.analytical.numel() <= samples.MAX_ENTRIES
    assert cause in [found.name for found in report.causes], report.causes


@pytest.mark.parametrize(
    ("backward", "cause"),
    [
        (lambda g, x: (g * x.cos()).mT, "transposed"),
        (lambda g, x: (g * x.cos()).roll(3, 1), "rolled"),
        (lambda g, x: (g * x.cos()).flip(0), "permuted"),
        (lambda g, x: g.roll(-1, 0) * x.cos(), "rolled"),
    ],
)
def test_large_jacobians_that_are_rearranged(backward: Callable[[Tensor, Tensor], Tensor], cause: str) -> None:
    report = check(function(torch.sin, backward), leaf(150, 150), Settings(fast_mode=True))
    assert report.causes[0].name == cause, report.causes


@pytest.mark.parametrize("keywords", [{"fast_mode": True}, {"engine": "compressed"}])
@pytest.mark.parametrize("size", [2990, 3001])
def test_the_last_tile_begins_where_entries_are_wrong(size: int, keywords: dict[str, Any]) -> None:
    """A sample of few entries also fits larger tiles, which begin at entries that are right."""
    report = check(Counted(1.0, lambda x: 1 + 0.5 * (torch.arange(size) >= 2976)), leaf(size), Settings(**keywords))
    begins = "derivatives are wrong only in the last tile: from index 2976, a multiple of 32, to the end"
    assert report.causes[0].text.startswith(begins)
    for cause in report.causes:
        if cause.name == "boundary":
            assert f"the last {size - 2976} positions" in cause.text


@pytest.mark.parametrize(
    ("threshold", "text"),
    [(-1.7, None), (-1.0, "derivatives are wrong only where x < -1"), (0.0, "derivatives are wrong only where x < 0")],
)
def test_a_threshold_in_a_sample_is_tested_next_to_it(threshold: float, text: str | None) -> None:
    report = check(Counted(1.0, lambda x: 1 + 0.5 * (x < threshold)), leaf(3000), Settings(fast_mode=True))
    said = [cause.text for cause in report.causes if cause.name == "region" and not cause.text.startswith("in a")]
    assert said == ([] if text is None else [text])


class OfGraph(torch.autograd.Function):
    """sin, with a gradient that is wrong in each but the first backward of a graph; no tensor changes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        wrong = hasattr(ctx, "used")
        ctx.used = True
        return g * x.cos() * (1.5 if wrong else 1)


def test_state_on_ctx_is_no_saved_tensor() -> None:
    (cause,) = check(OfGraph.apply, leaf(5), Settings()).causes
    assert cause.text.startswith("backward changes what it reads: a tensor that forward saved, or state on ctx")


@pytest.mark.parametrize("sets_seed", [False, True])
def test_a_backward_that_draws_random_numbers(sets_seed: bool) -> None:
    apply = function(torch.sin, lambda g, x: g * x.cos() * (1 + torch.rand(x.shape, dtype=x.dtype)))

    def func(x: Tensor) -> Tensor:
        if sets_seed:  # then the first backward after each forward gives the same gradient
            torch.manual_seed(0)
        y: Tensor = apply(x)
        return y

    (cause,) = check(func, leaf(5), Settings()).causes
    assert cause.text == "backward draws random numbers: draw them in forward, and save them for backward"


def test_a_func_that_draws_random_numbers_is_no_backward_that_does() -> None:
    overwriting = OfGraph.apply

    def func(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        y: Tensor = overwriting(x * (1 + torch.rand(x.shape, dtype=x.dtype)))
        return y

    (cause,) = check(func, leaf(5), Settings()).causes
    assert cause.name == "saved tensor"


def test_a_backward_that_is_wrong_in_some_calls() -> None:
    calls = 0

    def backward(g: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return g * x.cos() * (1 if calls % 3 else 1.5)

    (cause,) = check(function(torch.sin, backward), leaf(5), Settings()).causes
    assert cause.text.startswith("repeated calls of backward give different values: ")


@pytest.mark.parametrize("noise", [1e-15, 1e-12])
def test_a_func_that_varies_little_does_not_hide_the_cause(noise: float) -> None:
    class Varying(torch.autograd.Function):
        """exp, with small random changes as from atomic additions; the gradient is twice the right one."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.exp() * (1 + noise * torch.rand(x.shape, dtype=x.dtype))
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            (y,) = ctx.saved_tensors
            return 2 * g * y

    causes = check(Varying.apply, leaf(5), Settings()).causes
    assert [cause.name for cause in causes] == ["constant factor"]


def test_values_of_a_func_that_varied_once_are_no_evidence() -> None:
    calls = 0

    def func(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * (2 if calls == 9 else 1)

    report = check(func, leaf(4), Settings())
    assert report.failure is not None
    assert report.failure.kind == "mismatch"
    assert not report.causes
    assert "because    func is not deterministic" in str(report)


def test_the_gradient_of_a_func_that_varies_is_not_said_to_be_wrong() -> None:
    def func(x: Tensor) -> Tensor:
        return x.sin() * (1 + 1e-8 * torch.rand((), dtype=x.dtype))

    text = str(check(func, leaf(5), Settings()))
    assert text.startswith("func: numerical gradient of x (float64[5]) varies from call to call; it differs from the ")
    assert "is wrong" not in text
    assert text.count("not deterministic") + text.count("gives different values") == 2  # the first line, and the cause


def test_small_differences_may_come_from_uninitialized_memory() -> None:
    calls = 0

    def backward(g: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        unused = x.new_tensor([1e-310 * (calls % 5)])  # uninitialized memory often holds such numbers
        return torch.cat([g * x[1:].cos(), unused])

    report = check(function(lambda x: x[:-1].sin(), lambda g, x: backward(g, x.roll(1))), leaf(5), Settings())
    assert report.failure is not None
    assert report.failure.kind == "nondeterministic"
    assert "uninitialized memory" in report.causes[0].text


class OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[misc, untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.cos()


def test_a_zero_second_derivative_may_come_from_once_differentiable() -> None:
    report = fastgrad.check(OnceDifferentiable.apply, leaf(5), order=2)
    assert "@once_differentiable" in report.causes[0].text


def test_errors_of_zero_are_left_out() -> None:
    text = str(check(function(lambda x: x.clamp(-1, 1), lambda g, x: g.clone()), leaf(12), Settings()))
    assert "largest absolute error 1\n" in text
    x = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert "largest" not in str(check(function(torch.prod, lambda g, x: g * x.prod() / x), x, Settings()))


def test_only_finite_errors_are_called_finite() -> None:
    text = str(check(torch.sqrt, torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True), Settings()))
    assert "largest finite absolute error" in text
    assert "finite" not in str(check(function(torch.sin, lambda g, x: g), leaf(5), Settings()))


def test_a_single_wrong_entry_is_one_element() -> None:
    def backward(g: Tensor, x: Tensor) -> Tensor:
        return (g * x.cos()).index_fill(0, torch.tensor([2]), 0.0)

    report = check(function(torch.sin, backward), leaf(5), Settings())
    text = "the wrong analytical entry is zero: a term is missing, or backward returns None or excludes this element"
    assert report.causes[0].text == text


def one_input(**keywords: Any) -> Report:
    return check(Counted(), leaf(4), Settings(**keywords))


def test_default_device_and_dtype_do_not_matter() -> None:
    expected = one_input().causes
    torch.set_default_device("meta")
    try:
        with torch.device("meta"):
            x = torch.randn(4, dtype=torch.float64, device="cpu").requires_grad_()
            report = check(Counted(), x, Settings())
    finally:
        torch.set_default_device(None)
    assert [cause.name for cause in report.causes] == [cause.name for cause in expected]
    assert report.evidence is not None
    assert report.evidence.scaled is not None
    assert report.sample is not None


def test_generators_stay_as_they_are() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    check(Counted(), leaf(4), Settings())
    check(Counted(), leaf(200, 200), Settings())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("rows", [2, 600, 1200])
def test_positions_in_a_sample_are_tested_on_the_other_entries(rows: int, fast: bool) -> None:
    n = 1200
    factor = torch.linspace(0.5, 2, n, dtype=torch.float64)
    places = n - 1 - torch.arange(rows) if rows == n else torch.arange(rows) + 3

    def backward(g: Tensor, x: Tensor) -> Tensor:
        return (factor * g).index_add(0, places, 0.25 * g[:rows])

    report = check(function(lambda x: factor * x, backward), leaf(n), Settings(fast_mode=fast))
    texts = [cause.text for cause in report.causes if cause.name == "boundary"]
    assert texts == (
        ["derivatives are wrong only at the first 2 positions along dimension 0 of out0; check the padding or halo"]
        * (rows == 2)
    )
    assert report.evidence.places is None or all(is_right == (rows == 2) for _, is_right in report.evidence.places)


def test_rounding_of_a_gradient_that_cancels_is_not_nonlinear() -> None:
    for func in (
        lambda x: x.softmax(-1).sum() + 0.1 * x.detach().sum(),
        lambda x: x.sin() ** 2 + x.cos() ** 2 + 0.1 * x.detach(),
    ):
        report = fastgrad.check(func, (leaf(20),))
        assert not report.passed
        assert not [cause for cause in report.causes if "additive" in cause.text], report.causes


def test_a_rounding_residue_is_not_a_lower_dtype() -> None:
    for seed in range(10):
        x = torch.randn(60, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        report = fastgrad.check(lambda x: (1e5 * x - (1e5 * x).roll(1)).sum(), (x,))
        assert not [cause for cause in report.causes if "returns double precision" in cause.text], seed
