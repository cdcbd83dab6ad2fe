"""Small checks in a few native calls: their cost, what they find, and what they pass on to the complete check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fastgrad
from fastgrad.checks import one_block, small, small_sums
from fastgrad.core import native
from fastgrad.core.native import SmallProblem
from tests.planted.row import function

Func = Callable[..., Any]

CUBE = function(lambda x: x**3, lambda g, x: 3 * x * x * g)

pytestmark = pytest.mark.skipif(not native.IS_NATIVE, reason="plain Python has no small checks")


def leaf(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, dtype=dtype, generator=generator) + 0.5).requires_grad_()


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize(
    ("func", "inputs"),
    [
        (torch.sin, (leaf(1),)),
        (torch.sin, (leaf(),)),
        (torch.mm, (leaf(4, 5), leaf(5, 3, seed=1))),
        (lambda x: x.softmax(-1), (leaf(6, 5),)),
        (lambda x: (x.sin(), None, x.sum(), torch.arange(3)), (leaf(9),)),
        (lambda z: z * z.conj() + z**3, (leaf(7, dtype=torch.complex128),)),
        (torch.exp, (leaf(6, 5).detach().t().requires_grad_(),)),
        (lambda x, scale: x * scale, (leaf(8), 3.0)),
        (lambda x: [x.exp(), x[::2]], (leaf(30),)),
        (CUBE, (leaf(8),)),
    ],
)
def test_right_gradients_pass_at_once(
    func: Func, inputs: tuple[Any, ...], fast_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastgrad.checks.complete.Problem", None)
    monkeypatch.setattr("fastgrad.engines.plan.usual_seconds", lambda *_: 1e-6)  # however slow the machine is
    assert fastgrad.check(func, inputs, fast_mode=fast_mode).passed


@pytest.mark.parametrize(
    ("func", "n", "evaluations", "vjps"),
    [
        # Evaluations: the first one, two along the first direction, one along each other direction, and one for a new
        # graph. VJPs: three dense grad_outputs, one mostly zero and one constant; an undefined grad_output; a multiple
        # of a dense one on the first graph.
        (torch.sin, 30, 6, 7),
        # A number: one random and one constant grad_output.
        (lambda x: x.sin().mean(), 30, 6, 5),
        # In addition: one evaluation for a third graph; VJPs of a half zero grad_output, a zero one, two one-hot ones,
        # a multiple, a small positive one and a negative one; repeats of a dense one, of this one and both one-hot ones
        # on the third graph, and of a dense and a one-hot one on the first graph.
        (function(torch.sin, lambda g, x: g * x.cos()), 30, 7, 20),
        (function(lambda x: x.sin().mean(), lambda g, x: g * x.cos() / 30), 30, 7, 14),
    ],
)
def test_cost_in_fast_mode(func: Func, n: int, evaluations: int, vjps: int) -> None:
    report = fastgrad.check(func, leaf(n), fast_mode=True)
    assert (report.evaluations, report.vjps) == (evaluations, vjps)


@pytest.mark.parametrize(
    ("func", "vjps"),
    [
        (torch.sin, 7),
        # One dense grad_output also for each output separately, and the other output's undefined.
        (lambda x: (x.sin(), x.cos()), 11),
    ],
)
def test_cost_of_a_large_function_in_fast_mode(func: Func, vjps: int) -> None:
    """Curvature takes one more evaluation along each direction but the first."""
    report = fastgrad.check(func, leaf(20_000), fast_mode=True)
    assert (report.verdict, report.evaluations, report.vjps) == ("passed", 8, vjps)


@pytest.mark.parametrize("func", [lambda x: (x * x).sum(), lambda x: x.relu().sum()])
def test_cost_of_a_large_loss_in_fast_mode(func: Func) -> None:
    """Rounding of the large value takes one more evaluation, and central differences along all directions.

    A step that is wider because of rounding would cross kinks, and the curvature would look like kinks.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50_000, dtype=torch.float64, generator=generator).requires_grad_()
    report = fastgrad.check(func, x, fast_mode=True)
    assert (report.verdict, report.evaluations, report.vjps) == ("passed", 9, 6)


@pytest.mark.parametrize(
    ("func", "evaluations", "vjps"),
    [
        # Rounding adds up in the sum of all outputs, which are normalized by one number.
        (lambda x: x.numel() * x.softmax(0), 8, 8),
        # Three evaluations at eps, and three at a smaller step, show that rounding inside func needs a larger step,
        # which takes seven more.
        (lambda x: x.cumsum(0), 15, 9),
        (lambda x: torch.view_as_real(torch.fft.rfft(x)), 12, 8),
    ],
)
def test_rounding_of_a_large_function_in_fast_mode(func: Func, evaluations: int, vjps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(65_536, dtype=torch.float64, generator=generator).requires_grad_()
    report = fastgrad.check(func, x, fast_mode=True)
    assert (report.verdict, report.evaluations, report.vjps) == ("passed", evaluations, vjps)
    assert max(certificate.bound for certificate in report.certificates[:1]) < 2e-2


def test_sums_that_disagree_are_not_left_for_a_larger_step() -> None:
    """Over the larger step, which rounding inside func suggests, the missing term averages to zero."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3000, dtype=torch.float64, generator=generator).requires_grad_()
    term = torch.zeros_like(x)
    term[1000] = 3e-6  # its derivative at x is 0.013

    report = fastgrad.check(lambda x: x.cumsum(0) + (term * (1e4 * x).sin()).detach(), x, fast_mode=True)
    assert not report.passed


def test_little_memory_leaves_a_large_function_to_the_complete_check() -> None:
    report = fastgrad.check(torch.sin, leaf(20_000), fast_mode=True, memory_limit=10_000_000)
    assert (report.verdict, report.evaluations, report.vjps) == ("passed", 10, 14)


def test_the_rounding_of_a_long_sum_takes_a_larger_step() -> None:
    report = fastgrad.check(lambda x: x.cumsum(0) / x.numel(), leaf(50_000), fast_mode=True)
    assert report.passed
    assert report.evaluations == 21


def test_one_wrong_entry_of_a_large_function_is_found_in_fast_mode() -> None:
    def backward(g: Tensor, x: Tensor) -> Tensor:
        gradient = g * x.cos()
        gradient[777] += 1e-3 * g[9999]
        return gradient

    report = fastgrad.check(function(torch.sin, backward), leaf(20_000), fast_mode=True)
    assert report.failure is not None
    assert report.failure.comparison is not None
    worst = report.failure.comparison.worst
    assert worst is not None
    assert (worst.output_index, worst.input_index) == ((9999,), (777,))


def test_cost_after_a_jump() -> None:
    """Func jumps if an element of the target moves. Random directions do not decide, so all entries are compared.

    20 differences of entries; 3 along the first direction, and again; one evaluation at x, and one for a new graph.
    """

    def func(x: Tensor, target: Tensor) -> Tensor:
        return torch.where(target == 1, x, 0) + torch.where(target == -1, (1 - x).clamp(min=0), 0)

    target = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64, requires_grad=True)
    report = fastgrad.check(func, (leaf(5), target), fast_mode=True)
    assert (report.verdict, report.evaluations, report.vjps) == ("passed", 28, 13)


@pytest.mark.parametrize("m", [2, 3, 5, 11, 12, 20])
def test_cost_without_a_pattern(m: int) -> None:
    """The rows, four products of which one is repeated, and an undefined grad_output; 2 n steps, and two graphs."""
    matrix = torch.randn(m, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    report = fastgrad.check(lambda x: (matrix @ x).sin(), leaf(4))
    assert (report.verdict, report.evaluations, report.vjps) == ("passed", 10, m + 6)


def test_a_failing_check_without_a_pattern_runs_what_a_passing_one_leaves_out() -> None:
    """Two rows again, twice; zeros; and a product: for a failure, the backward must be known to repeat."""
    report = fastgrad.check(lambda x: x * x.detach().sum(), leaf(5))
    assert (report.verdict, report.vjps) == ("failed", 18)


def test_cost_of_a_backward_that_rounds_more_than_a_few_operations() -> None:
    """The VJP of a multiple is another one by 1e-12 of its size: this is no state that func keeps."""
    x = (1e4 * (leaf(5, 5, 5).detach() - 1)).requires_grad_()
    report = fastgrad.check(lambda x: x.logcumsumexp(0), x, fast_mode=True)
    assert (report.verdict, report.evaluations, report.vjps) == ("passed", 6, 8)


def test_sums_that_disagree_for_the_first_vjp_need_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 1 + 1e-7, two evaluations do not show the rounding inside func, which a third one measures."""
    runs = mock.Mock(wraps=small_sums._all_vjps)
    monkeypatch.setattr(small_sums, "_all_vjps", runs)
    x = leaf(30)
    assert fastgrad.check(lambda x: (x.sin() + 1e4) - 1e4, x, fast_mode=True).passed
    assert runs.call_count == 1


@pytest.mark.parametrize("error", [0.0, 5e-5])
def test_a_constant_grad_output_with_stride_zero(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of all outputs add up in its sum. If the sum is off, the VJP must be that of a contiguous grad_output."""

    def backward(g: Tensor, x: Tensor) -> Tensor:
        gradient = g * x.cos()
        gradient[7] += error if g.stride() == (0,) else 0.0
        return gradient

    runs = mock.Mock(wraps=small_sums._same_if_contiguous)
    monkeypatch.setattr(small_sums, "_same_if_contiguous", runs)
    x = torch.linspace(0.02, 0.5, 2000, dtype=torch.float64, requires_grad=True)
    passes = fastgrad.check(function(torch.sin, backward), x, fast_mode=True, rtol=0.0).passed
    assert (passes, runs.called) == (not error, True)


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("error", [1e-3, 0.1])
@pytest.mark.parametrize("n", [1, 5, 30])
def test_wrong_gradients_fail(n: int, error: float, fast_mode: bool) -> None:
    for wrong in (
        lambda x: x.sin() + torch.cat([x[:-1], x[-1:].detach()]) * error * 10,
        function(lambda x: x**3, lambda g, x: 3 * x * x * g * (1 + 10 * error)),
    ):
        assert not fastgrad.check(wrong, leaf(n), fast_mode=fast_mode, rtol=0.0).passed
        assert not torch.autograd.gradcheck(wrong, leaf(n), rtol=0.0, raise_exception=False)


def unpacks(unpack: Callable[[Tensor], Tensor], pack: Callable[[Tensor], Tensor] = lambda saved: saved) -> Func:
    def func(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return x.sin()

    return func


@pytest.mark.parametrize("n", [1, 3, 14])
@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("is_wrong", [lambda call: call % 2 == 0, lambda call: call % 3 == 0, lambda call: call >= 5])
def test_hooks_of_saved_tensors_that_keep_a_state(is_wrong: Callable[[int], bool], fast_mode: bool, n: int) -> None:
    calls = 0

    def unpack(saved: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return saved * 1.5 if is_wrong(calls) else saved

    assert not native.runs_no_custom_code([unpacks(unpack)(leaf(3))], [leaf(3)])
    assert not fastgrad.check(unpacks(unpack), leaf(n), fast_mode=fast_mode).passed
    assert fastgrad.check(unpacks(lambda saved: saved), leaf(n), fast_mode=fast_mode).passed


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("call", range(1, 8))
def test_what_a_hook_of_a_saved_tensor_raises_once_is_raised(call: int, fast_mode: bool) -> None:
    calls = 0

    def unpack(saved: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            raise ValueError("once")
        return saved

    with pytest.raises(ValueError, match="once"):
        fastgrad.gradcheck(unpacks(unpack), leaf(3), fast_mode=fast_mode)


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("n", [1, 3, 14, 100])
def test_saved_memory_that_later_calls_overwrite(n: int, fast_mode: bool) -> None:
    workspace = torch.zeros(n, dtype=torch.float64)

    def with_factor(write: Callable[[Tensor], object]) -> Func:
        def func(x: Tensor) -> Tensor:
            write(x.detach().cos())
            return x.sin().detach() + workspace * (x - x.detach())

        return func

    def verdict(write: Callable[[Tensor], object], check: Callable[..., bool]) -> bool:
        workspace.zero_()
        return check(with_factor(write), leaf(n), fast_mode=fast_mode, raise_exception=False)

    for write, passes in ((workspace.data.add_, False), (workspace.data.copy_, True)):
        assert verdict(write, torch.autograd.gradcheck) == passes
        assert verdict(write, fastgrad.gradcheck) == passes


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("n", [5, 14])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("call", range(1, 7))
def test_what_func_raises_once_is_raised(call: int, dtype: torch.dtype, n: int, fast_mode: bool) -> None:
    calls = 0

    def func(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            raise ValueError("once")
        return z.sin() * z

    with pytest.raises(ValueError, match="once"):
        fastgrad.gradcheck(func, leaf(n, dtype=dtype), fast_mode=fast_mode)


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("fault", [lambda y: y.detach(), lambda y: y[:-1], lambda y: y * 1.5])
def test_a_later_graph_that_is_another_one_is_no_pass(fault: Func, fast_mode: bool) -> None:
    """Only the call that records the graph after the differences is wrong."""
    x, calls, wrong = leaf(6), 0, -1

    def func(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return fault(x.sin()) if calls == wrong else x.sin()

    engine = {"fast_mode": True, "engine": "sketch"} if fast_mode else {}
    assert fastgrad.check(func, x, **engine).passed  # type: ignore[arg-type]
    calls, wrong = 0, calls
    assert not fastgrad.check(func, x, **engine).passed  # type: ignore[arg-type]


def test_where_func_takes_single_steps_only_entries_are_compared() -> None:
    x = leaf(30)
    start = x.detach().clone()

    def func(x: Tensor) -> Tensor:
        if int((x.detach() != start).sum()) > 1:
            raise ValueError("one at a time")
        return x.sin()

    report = fastgrad.check(func, x, fast_mode=True)
    assert report.passed
    assert report.plan.engine == "dense"


@pytest.mark.parametrize("fast_mode", [False, True])
def test_a_gradient_that_moved_is_no_pass(fast_mode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails even if the complete check does not see the change."""
    monkeypatch.setattr(small.SmallProblem, "repeats", lambda *_: False)
    monkeypatch.setattr(small_sums.torch, "equal", lambda *_: False)
    assert fastgrad.check(torch.sin, leaf(30), fast_mode=fast_mode).passed  # the same within the tolerances
    monkeypatch.setattr(one_block, "same_afterwards", lambda *_: False)
    monkeypatch.setattr(small_sums, "differ", lambda *_: True)
    report = fastgrad.check(torch.sin, leaf(30), fast_mode=fast_mode)
    assert report.failure is not None
    assert report.failure.kind == "nondeterministic"


def test_every_vjp_is_counted_if_the_last_bits_of_gradients_change() -> None:
    calls = iter(range(100))

    def alternating(x: Tensor) -> Tensor:
        return x.sin() * (1.0 + 2.0**-52 * (next(calls) % 2))

    # 12 as for a gradient that stays the same, one that shows that it is the same within the tolerances, and 16 of the
    # complete check.
    report = fastgrad.check(alternating, leaf(6))
    assert (report.passed, report.evaluations, report.vjps) == (True, 15, 29)


def test_vjps_that_are_not_compared_with_rows_are_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first VJP is wrong, and the differences are too noisy for the small check to show it."""
    monkeypatch.setattr(small_sums, "_agree", lambda *_: False)
    calls = 0

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return 3 * x * x * grad * (1.5 if calls == 1 else 1.0)

    assert fastgrad.check(CUBE, leaf(30), fast_mode=True).passed
    assert not fastgrad.check(function(lambda x: x**3, backward), leaf(30), fast_mode=True).passed


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("n", [2, 20, 200])
def test_a_sparse_gradient_of_a_strided_input_is_no_pass(n: int, fast_mode: bool) -> None:
    rows = torch.arange(n)
    report = fastgrad.check(lambda weight: F.embedding(rows, weight, sparse=True), leaf(n, 2), fast_mode=fast_mode)
    assert report.failure is not None
    assert report.failure.detail == "grad is incorrect layout (torch.sparse_coo is not torch.strided)"
    assert report.notes == ()


def test_what_needs_care_is_not_called() -> None:
    def refused(func: Func, *arguments: Any) -> bool:
        return SmallProblem.trace(func, arguments, 1e-8, True) is None

    def never(*_: Any) -> Tensor:
        raise AssertionError("called")

    x = leaf(4)
    assert refused(never, leaf(4, dtype=torch.float32))
    assert refused(never, leaf(1).expand(4))
    assert refused(never, x, x)
    assert refused(never, x, x.view(2, 2))
    assert refused(never, leaf(0))
    assert refused(never, x.detach())
    assert refused(never, x, [x.detach()])
    assert refused(never, x, ({},))
    itself: list[Any] = []
    itself.append(itself)
    assert refused(never, x, itself)
    assert refused(never, leaf(4).to_sparse())
    with torch.no_grad():
        assert refused(never, x)
    with Nothing():
        assert refused(never, x)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert refused(never, x)
    assert not refused(torch.sin, x)
    assert not refused(lambda x, *_: x.sin(), x, (1, [2.0, None]), "a")


@pytest.mark.parametrize(
    ("func", "fast_modes"),
    [
        (F.silu, (False, True)),
        (F.mish, (False, True)),
        (torch.abs, (False, True)),
        (torch.linalg.inv, (False, True)),
        (lambda x: torch.linalg.norm(x, torch.inf), (False, True)),
        (torch.matrix_exp, (True,)),  # an exact check looks for a sparsity pattern first
    ],
    ids=["silu", "mish", "abs", "inv", "norm", "matrix_exp"],
)
def test_rounding_and_zeros_without_memory_need_no_complete_check(func: Any, fast_modes: tuple[bool, ...]) -> None:
    """Recorded or scaled gradients may be rounded differently; a gradient may be a zero tensor without memory."""
    x = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    # The first call of an operator in a process takes longer, and then its time counts.
    (gradient,) = torch.autograd.grad(func(x).sum(), x, create_graph=True)
    if gradient.requires_grad:
        gradient.sum().backward()
    with mock.patch("fastgrad.checks.complete.complete_check", side_effect=AssertionError("a complete check")):
        for fast_mode in fast_modes:
            assert fastgrad.gradcheck(func, x, fast_mode=fast_mode)
            assert fastgrad.gradgradcheck(func, x, fast_mode=fast_mode)


def test_sums_that_decide_nothing_are_followed_by_all_entries() -> None:
    # Next to 0, higher derivatives are so large that no step resolves the sums; each entry passes by rtol.
    x = torch.linspace(0.02, 0.5, 12, dtype=torch.float64, requires_grad=True)
    report = fastgrad.check(lambda x: torch.polygamma(1, x), (x,), fast_mode=True)
    assert report.passed
    assert report.plan is not None
    assert report.plan.engine == "dense"
    assert report.notes == ("decided by the exact engine, because random directions gave no verdict",)
    assert len(report.pairs) == 1
    assert report.evaluations <= 2 * 12 + 30
    assert report.vjps <= 25


class Polygamma(torch.autograd.Function):
    """polygamma(1, x) with a custom backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.polygamma(1, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.polygamma(2, x)


def test_sums_of_a_custom_backward_that_decide_nothing_are_followed_by_few_entries_or_other_sums() -> None:
    few = torch.linspace(0.02, 0.5, 12, dtype=torch.float64, requires_grad=True)
    report = fastgrad.check(Polygamma.apply, (few,), fast_mode=True)
    assert report.passed
    assert report.plan is not None
    assert report.plan.engine == "dense"
    assert report.notes == ("decided by the exact engine, because random directions gave no verdict",)
    assert report.evaluations <= 2 * 12 + 20
    assert report.vjps <= 40
    many = torch.linspace(0.02, 0.5, 22, dtype=torch.float64, requires_grad=True)
    assert fastgrad.check(Polygamma.apply, (many,), fast_mode=True).evaluations > 2 * 22 + 20


def test_a_step_that_is_larger_because_of_rounding_becomes_smaller_because_of_curvature() -> None:
    x = torch.linspace(0.02, 0.5, 8, dtype=torch.float64, requires_grad=True)
    scale = torch.arange(1.0, 9.0, dtype=torch.float64)

    def func(x: Tensor) -> Tensor:
        return (2 * x).exp().sum() * (scale * x.sum()).sin()

    report = fastgrad.check(func, (x,), fast_mode=True, atol=1e-8)
    assert report.passed
    # The outputs at first, three evaluations at the first step, seven at the second one, and a new graph.
    assert report.evaluations == 12


def test_noise_that_is_proportional_to_the_step_is_reduced_by_a_third_step() -> None:
    clamped = torch.linspace(0.5, 1.0, 40, dtype=torch.float64)
    x = clamped.clone().requires_grad_()

    def func(x: Tensor) -> Tensor:
        return (x - clamped).relu().square().sum()

    report = fastgrad.check(func, (x,), fast_mode=True)
    assert report.passed
    assert report.evaluations <= 2 + 3 * 7
    assert not fastgrad.check(lambda x: func(x) + 0.01 * (x - x.detach()).sum(), (x,), fast_mode=True).passed


@pytest.mark.parametrize("n", [12, 30])
def test_sums_take_a_larger_step_if_rounding_inside_dominates(n: int) -> None:
    x = torch.linspace(-1, 1, n, dtype=torch.float64, requires_grad=True)
    report = fastgrad.check(lambda x: (1e-3 * x.exp() + 300.0) - 300.0, x, fast_mode=True, atol=1e-7, rtol=0.0)
    assert report.passed
    # At eps: four evaluations, with one-sided derivatives; one that measures rounding inside func; four more, with
    # central differences. Three at a smaller step, which show that func rounds. Seven at the larger step, and four
    # repeats, because the derivatives changed.
    assert (report.evaluations, report.vjps) == (25, 7)
    (claim,) = (one.claim for one in report.certificates if one.claim.startswith("no single entry"))
    assert "apart from terms that vary within a step of" in claim


@pytest.mark.parametrize("size", [1e3, 1e4])
@pytest.mark.parametrize("n", [12, 60])
def test_sums_take_no_larger_step_if_func_varies_within_eps(size: float, n: int) -> None:
    def func(x: Tensor) -> Tensor:  # its gradient lacks the derivative of the wave, 0.01, of one coordinate
        wave = 1e-8 * (1e6 * (x - 0.5)).sin() * (torch.arange(n) == n // 2)
        return size + x + wave.detach()

    x = torch.linspace(0, 1, n, dtype=torch.float64)
    x[n // 2] = 0.5
    assert not fastgrad.check(func, (x.requires_grad_(),), fast_mode=True).passed


@pytest.mark.parametrize("call", range(2, 16))
def test_a_value_that_only_sums_saw_is_not_dropped(call: int) -> None:
    # If sums decide nothing, all entries are compared, without these values.
    calls = 0

    def wrong_once(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        y = torch.polygamma(1, x)
        return y + 1e-3 * x.flip(0) * (calls == call)

    x = torch.linspace(0.02, 0.5, 12, dtype=torch.float64, requires_grad=True)
    report = fastgrad.check(wrong_once, (x,), fast_mode=True)
    assert calls > call
    assert report.failure is not None


@pytest.mark.parametrize("n", [30, 300])
def test_symmetric_functions_are_deterministic(n: int) -> None:
    """f(x + h) + f(x - h) = 2 f(x): two evaluations show no noise, further ones do."""
    x = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    for func in (lambda x: x.clamp(-1e-6, 1e-6), lambda x: (1e5 * x).clamp(-1, 1) + 1e3):
        assert fastgrad.check(func, x, fast_mode=True).passed
    x = torch.full((n,), 1e4, dtype=torch.float64, requires_grad=True)
    assert fastgrad.check(lambda x: 1e-3 * ((x - 1e4) / 1e-3).sin(), x).passed
