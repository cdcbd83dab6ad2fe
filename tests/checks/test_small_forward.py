"""Forward mode of small checks: its cost, reports equal to those of the complete check, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.core import native
from fastgrad.core.native import SmallProblem
from fastgrad.core.precision import relative_step
from fastgrad.core.random import SKETCH_DIRECTIONS, direction
from fastgrad.report.report import Report
from tests.checks.test_small import leaf

Func = Callable[..., Any]
Jvp = Callable[[Tensor, int], Any]

pytestmark = pytest.mark.skipif(not native.IS_NATIVE, reason="plain Python has no small checks")

FORWARD: dict[str, Any] = {"check_forward_ad": True, "check_backward_ad": False}
COMPLEX = leaf(3, dtype=torch.complex128)
RIGHT: list[tuple[Func, tuple[Any, ...]]] = [
    (torch.sin, (leaf(1),)),
    (torch.mm, (leaf(2, 3), leaf(3, 2, seed=1))),
    (lambda x: (x.exp(), None, x.sum(), torch.arange(3)), (leaf(4),)),
    (lambda z: z * 1j + z**3, (COMPLEX,)),
    (lambda z, x: (z * x, x.sum(), z.abs()), (COMPLEX, leaf(3))),
    (lambda z: torch.view_as_real(z), (COMPLEX,)),
    (torch.exp, (leaf(3, 2).detach().t().requires_grad_(),)),
    (lambda x, scale: x * scale[0], (leaf(5), (3.0, 1))),
]


def with_jvp(jvp: Jvp) -> Func:
    """x**2; its jvp is computed from the right tangent and the number of the call."""
    calls = 0

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * x

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad * ctx.saved_tensors[0]

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Any:
            nonlocal calls
            calls += 1
            return jvp(2 * tangent * ctx.saved_tensors[0], calls)

    return lambda x: Square.apply(x)


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("func", "inputs"), RIGHT)
def test_right_derivatives_pass_at_once(
    func: Func, inputs: tuple[Any, ...], backward: bool, fast_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keywords = FORWARD | {"check_backward_ad": backward, "check_batched_forward_grad": True, "fast_mode": fast_mode}
    complete = _complete(func, inputs, **keywords)
    monkeypatch.setattr("fastgrad.checks.complete.Problem", None)
    monkeypatch.setattr("fastgrad.engines.plan.usual_seconds", lambda *_: 1e-6)  # however slow the machine is
    small = fastgrad.check(func, inputs, **keywords)
    assert small.passed
    assert small.plan is not None
    assert complete.plan is not None
    if small.plan.engine == complete.plan.engine:
        assert [pair[:8] for pair in small.pairs] == [pair[:8] for pair in complete.pairs]
        assert {one.claim for one in small.certificates} <= {one.claim for one in complete.certificates}


def _complete(func: Func, inputs: tuple[Any, ...], **keywords: Any) -> Report:
    """The report of the complete check."""
    with mock.patch("fastgrad.checks.order.small_check", return_value=None):
        return fastgrad.check(func, inputs, **keywords)


def test_costs() -> None:
    # The first evaluation; two per column; the columns, two that prove linearity, and zero and undefined tangents.
    report = fastgrad.check(torch.sin, leaf(3), **FORWARD)
    assert (report.evaluations, report.vjps, report.jvps) == (1 + 6 + 7, 0, 3 + 2 + 2)
    # Two evaluations along the first direction, one along each other direction. JVPs: the three directions, two
    # tangents that add up to zero with the first two directions, and zero and undefined tangents.
    report = fastgrad.check(torch.sin, leaf(30), **FORWARD, fast_mode=True)
    assert (report.evaluations, report.vjps, report.jvps) == (1 + 4 + 7, 0, 3 + 2 + 2)


@pytest.mark.parametrize("undefined", [False, True])
@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize(("func", "inputs"), [*RIGHT, (lambda x, y: (x * y, x[:0]), (leaf(3), leaf(3, seed=1)))])
def test_a_batch_is_compared_with_a_known_jvp(
    func: Func, inputs: tuple[Any, ...], fast_mode: bool, undefined: bool
) -> None:
    keywords = FORWARD | {"check_undefined_grad": undefined, "fast_mode": fast_mode}
    counts = [
        fastgrad.check(func, inputs, **keywords, check_batched_forward_grad=batched).jvps for batched in (False, True)
    ]
    assert counts[1] == counts[0] + sum(isinstance(one, Tensor) for one in inputs)


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("lost", [0, -1])
def test_a_jvp_that_is_wrong_for_one_element_of_a_batch_fails(position: int, fast_mode: bool, lost: int) -> None:
    """The tangent of one input is a batch, and one output loses its derivative then."""

    def wrong(which: int, tangent: Tensor) -> Tensor:
        if which != position or not torch._C._functorch.is_legacy_batchedtensor(tangent):
            return tangent
        mask = torch.ones(3, dtype=torch.float64)
        mask[lost] = 0.0
        return tangent * mask

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, y: Tensor) -> Tensor:
            return x + y

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
            return sum(wrong(which, one) for which, one in enumerate(tangents) if one is not None)  # type: ignore[return-value]

    keywords = FORWARD | {"check_batched_forward_grad": True, "fast_mode": fast_mode}
    report = fastgrad.check(Sum.apply, (leaf(3), leaf(3, seed=1)), **keywords)
    assert report.failure is not None
    assert report.failure.kind == "batched differs"


def test_undecided_products_are_replaced_by_columns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Along random directions, func has kinks at x. The three evaluations are repeated after all columns agreed.
    x = torch.arange(1.0, 11.0, dtype=torch.float64).requires_grad_()
    monkeypatch.setattr("fastgrad.checks.complete.Problem", None)
    report = fastgrad.check(
        lambda x: (x - x.detach().round()).abs().sum() + (x * x).sum(), x, **FORWARD, fast_mode=True
    )
    assert (report.verdict, report.plan and report.plan.engine) == ("passed", "dense")
    assert report.jvps == 10 + 2 + 2
    assert report.evaluations == 1 + 3 + 20 + report.jvps + 3 + 1


def test_columns_of_a_small_check_are_not_computed_again() -> None:
    # Entries agree when they are measured again. The columns, two sums, and zero and undefined tangents, and all of
    # them repeated. The complete check computes only the sums and the last two again.
    report = fastgrad.check(lambda x: 1e-5 * (1e5 * x).sin() + x, leaf(5), **FORWARD)
    assert report.passed
    assert report.jvps == 2 * (5 + 2 + 2) + 2 + 2


def test_infinite_coordinates_take_no_exact_check() -> None:
    x = leaf(24).detach()
    x[::3] = -torch.inf
    report = fastgrad.check(lambda x: x.softmax(0), x.requires_grad_(), **FORWARD, fast_mode=True)
    assert (report.verdict, report.plan and report.plan.engine) == ("passed", "sketch")
    assert report.evaluations < 2 * 24


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("n", [1, 4, 30])
@pytest.mark.parametrize(
    "jvp",
    [
        lambda tangent, _: tangent * 1.01,
        lambda tangent, _: tangent.abs(),
        lambda tangent, _: torch.where(tangent == 0, 0.1, tangent),
        lambda tangent, _: torch.cat([tangent[:-1], tangent[-1:] * 0]),
        lambda tangent, _: tangent + 0.1,
        lambda tangent, _: torch.complex(tangent, tangent),
    ],
    ids=["factor", "absolute", "zeros", "last", "constant", "complex"],
)
def test_wrong_jvps_fail(jvp: Jvp, n: int, fast_mode: bool) -> None:
    keywords = FORWARD | {"check_grad_dtypes": True, "fast_mode": fast_mode}
    assert not fastgrad.check(with_jvp(jvp), leaf(n), **keywords).passed


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("wrong", range(1, 6))
@pytest.mark.parametrize("n", [3, 30])
def test_a_jvp_that_is_wrong_once_fails(n: int, wrong: int, fast_mode: bool) -> None:
    func = with_jvp(lambda tangent, call: tangent + 0.5 if call == wrong else tangent)
    report = fastgrad.check(func, leaf(n), **FORWARD, fast_mode=fast_mode)
    assert not report.passed
    assert report.failure is not None
    if report.failure.kind == "nondeterministic":
        assert "was first" in str(report), str(report)


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("call", range(1, 6))
def test_what_a_jvp_raises_once_is_raised(call: int, fast_mode: bool) -> None:
    def jvp(tangent: Tensor, number: int) -> Tensor:
        if number == call:
            raise ValueError("once")
        return tangent

    with pytest.raises(ValueError, match="once"):
        fastgrad.check(with_jvp(jvp), leaf(3), **FORWARD, fast_mode=fast_mode)


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("n", [3, 30])
@pytest.mark.parametrize("wrong", [1, 2, 3, 4, 5, 0])
def test_a_tangent_that_is_complex_once_or_only_if_dense_fails(wrong: int, n: int, fast_mode: bool) -> None:
    def jvp(tangent: Tensor, call: int) -> Tensor:
        is_wrong = call == wrong if wrong else int((tangent != 0).sum()) > 1
        return torch.complex(tangent, torch.zeros_like(tangent)) if is_wrong else tangent

    keywords = FORWARD | {"check_grad_dtypes": True, "fast_mode": fast_mode}
    report = fastgrad.check(with_jvp(jvp), leaf(n), **keywords)
    assert report.failure is not None
    assert report.failure.kind == "tangent dtype"


@pytest.mark.parametrize("wrong", range(1, 13))
def test_a_jvp_that_is_wrong_once_at_either_step_fails(wrong: int) -> None:
    """An output that is curved only along the second direction: the first step disagrees along it."""
    n = 30
    first, second = (direction(n, 0, SKETCH_DIRECTIONS + 16 * k) for k in range(2))
    across = second - (first @ second) / (first @ first) * first
    across /= across @ second
    x = leaf(n).detach()
    x = (
        x - (x @ across) / (across @ across) * across
    ).requires_grad_()  # so that rounding is no larger than that of x.sin()
    calls = 0

    class Curved(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return torch.cat([x.sin(), 500 * (x @ across)[None] ** 2])

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad[:-1] * x.cos() + grad[-1] * 1000 * (x @ across) * across

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            (x,) = ctx.saved_tensors
            right = torch.cat([tangent * x.cos(), 1000 * (x @ across) * (tangent @ across)[None]])
            return right + 0.5 if calls == wrong else right

    report = fastgrad.check(lambda x: Curved.apply(x), x, **FORWARD, fast_mode=True)
    assert not report.passed
    assert calls >= wrong


@pytest.mark.parametrize("wrong", range(1, 7))
def test_a_jvp_that_is_wrong_once_fails_although_it_is_right_at_two_later_steps(wrong: int) -> None:
    calls = 0

    class Coupled(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.exp() + x * x.roll(1)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            ctx.save_for_forward(*inputs)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            (x,) = ctx.saved_tensors
            right = x.exp() * tangent + x.roll(1) * tangent + x * tangent.roll(1)
            return right + 0.5 if calls == wrong else right

    x = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    report = fastgrad.check(lambda x: Coupled.apply(x), x, **FORWARD, fast_mode=True)
    assert not report.passed
    assert calls > 12


def test_other_results_under_forward_mode() -> None:
    def shorter(x: Tensor) -> Tensor:
        is_dual = torch.autograd.forward_ad.unpack_dual(x).tangent is not None
        return x[:-1].exp() if is_dual else x.exp()

    with pytest.raises(AssertionError, match="to return outputs with the same shape"):
        fastgrad.check(shorter, leaf(3), **FORWARD)


def test_native_calls_refuse_what_does_not_fit() -> None:
    problem = SmallProblem.trace(torch.sin, (leaf(3),), relative_step(torch.float64), True)
    assert problem is not None
    rows, columns = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)

    def refused(match: str, name: str, *arguments: Any) -> None:
        with pytest.raises(RuntimeError, match=match):
            native.at_dual_level(lambda: getattr(problem, name)(*arguments))

    refused("must have shape", "jvps", rows[:, :2], [])
    refused("float64", "jvps", rows.float(), [])
    refused("undefined must be empty, or one of", "jvps", rows, [0])
    refused("undefined must be empty, or one of", "jvps", rows, [0, 2])
    refused("input must be in", "tangents", 1, rows)
    refused("input must be in", "batched_tangents", -1, rows)
    refused("must have at least one dimension", "batched_tangents", 0, torch.ones((), dtype=torch.float64))
    refused("must have shape", "tangent_errors", rows, columns, 1e-5, 1e-3)
    refused("must have shape", "tangent_errors", columns, rows, 1e-5, 1e-3)


@pytest.mark.parametrize("keywords", [{}, FORWARD, {"check_forward_ad": True, "check_batched_grad": True}], ids=str)
@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("m", [0, 1, 30])
def test_an_input_without_elements(m: int, fast_mode: bool, keywords: dict[str, Any]) -> None:
    class Zeros(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.new_zeros(m)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            return grad_output.new_zeros(0)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return tangent.new_zeros(m)

    assert fastgrad.gradcheck(Zeros.apply, (leaf(0),), fast_mode=fast_mode, **{"check_forward_ad": True, **keywords})
