"""Forward mode on a sparsity pattern: the verdicts of the dense engine, for a few calls; wrong jvps fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad

SIZE = 700
BOTH = {"check_forward_ad": True}
FORWARD = {"check_forward_ad": True, "check_backward_ad": False}


def leaf(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


class Square(torch.autograd.Function):
    """x^2 with a given jvp of (x, tangent, number of the call)."""

    jvp_of: Callable[[Tensor, Tensor, int], Tensor]
    calls = 0

    @staticmethod
    def forward(x: Tensor, jvp: Callable[[Tensor, Tensor, int], Tensor]) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.x, ctx.derivative = inputs
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return 2 * ctx.x * grad_output, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        Square.calls += 1
        found: Tensor = ctx.derivative(ctx.saved_tensors[0], tangent, Square.calls)
        return found


def square(jvp: Callable[[Tensor, Tensor, int], Tensor]) -> Callable[[Tensor], Tensor]:
    Square.calls = 0
    return lambda x: Square.apply(x, jvp)


def right(x: Tensor, tangent: Tensor, _: int = 0) -> Tensor:
    return 2 * x * tangent


def with_entry(row: int, column: int, size: float) -> Callable[[Tensor, Tensor, int], Tensor]:
    """A jvp that adds an entry to the Jacobian."""

    def jvp(x: Tensor, tangent: Tensor, _: int) -> Tensor:
        found = right(x, tangent)
        return found.index_add(0, torch.tensor([row]), size * tangent[column : column + 1])

    return jvp


@pytest.mark.parametrize("keywords", [BOTH, FORWARD])
@pytest.mark.parametrize(
    ("func", "inputs"),
    [
        (torch.sin, (leaf(SIZE),)),
        (lambda x: x.softmax(1), (leaf(40, 20),)),
        (lambda x, y: x * y, (leaf(30, 30), leaf(30, 1))),
        (lambda x: (x.sin(), x.roll(1)), (leaf(SIZE),)),
        (lambda x: torch.nn.functional.avg_pool1d(x[None], 3)[0], (leaf(4, 300),)),
    ],
)
def test_a_right_jvp_passes_with_few_calls(
    func: Callable[..., Any], inputs: tuple[Tensor, ...], keywords: dict[str, bool]
) -> None:
    report = fastgrad.check(func, inputs, **keywords)
    assert report.passed
    assert report.plan is not None
    assert report.plan.engine == "compressed"
    assert report.jvps <= 80
    assert report.evaluations <= 200
    pairs = [pair for pair in report.pairs if pair.mode == "forward"]
    outputs = func(*inputs)
    assert len(pairs) == len(inputs) * (len(outputs) if isinstance(outputs, tuple) else 1)
    assert any("jvp is linear" in certificate.claim for certificate in report.certificates)
    assert bool(report.vjps) == ("check_backward_ad" not in keywords)


def test_the_number_of_calls_does_not_grow() -> None:
    counts = []
    for n in (1000, 20_000):
        report = fastgrad.check(torch.sin, (leaf(n),), **FORWARD)
        counts.append((report.evaluations, report.jvps))
    assert counts == [(20, 7)] * 2


@pytest.mark.parametrize("keywords", [BOTH, FORWARD])
@pytest.mark.parametrize("size", [1e-4, 1e-2])
def test_a_wrong_entry_outside_the_pattern_is_found_with_few_calls(size: float, keywords: dict[str, bool]) -> None:
    x = leaf(5000)
    report = fastgrad.check(square(with_entry(3, 2500, size)), (x,), **keywords)
    assert report.failure is not None
    assert report.failure.comparison is not None
    assert report.failure.comparison.worst is not None
    assert report.failure.comparison.worst.output_index == (3,)
    assert report.failure.comparison.worst.input_index == (2500,)
    assert not report.failure.comparison.exhaustive
    assert report.evaluations < 200
    assert report.jvps < 100


@pytest.mark.parametrize("keywords", [BOTH, FORWARD])
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (SIZE - 1, SIZE - 1), (3, 500), (SIZE - 1, 0), (256, 257)])
def test_a_wrong_entry_fails(row: int, column: int, size: float, keywords: dict[str, bool]) -> None:
    x = leaf(SIZE)
    if row == column:
        x.data[row] = 0.01  # so that the tolerance of the entry is small
    report = fastgrad.check(square(with_entry(row, column, size)), (x,), **keywords)
    assert report.failure is not None
    assert report.failure.kind in ("mismatch", "nonlinear")
    assert report.failure.mode == "forward"
    if report.failure.kind == "mismatch":
        assert report.failure.comparison is not None
        worst = report.failure.comparison.worst
        assert worst is not None
        assert (worst.output_index, worst.input_index) == ((row,), (column,))


@pytest.mark.parametrize("keywords", [BOTH, FORWARD])
@pytest.mark.parametrize(
    "jvp",
    [
        lambda x, tangent, _: 2 * x * tangent.clamp(-1, 1),
        lambda x, tangent, _: 2 * x * tangent.abs(),
        lambda x, tangent, _: 2 * x * tangent * (1.0 if tangent.count_nonzero() > 1 else 1.1),
        lambda x, tangent, _: 2 * x * tangent * (1.1 if tangent.count_nonzero() == x.numel() else 1.0),
        lambda x, tangent, _: 2 * x * tangent * 1.01,
        lambda x, tangent, _: 2 * x.roll(1) * tangent,
    ],
    ids=["clamped", "absolute", "wrong if one-hot", "wrong if dense", "factor", "rolled"],
)
def test_a_wrong_jvp_fails(jvp: Callable[[Tensor, Tensor, int], Tensor], keywords: dict[str, bool]) -> None:
    report = fastgrad.check(square(jvp), (leaf(SIZE),), **keywords)
    assert report.failure is not None
    assert report.failure.mode == "forward"


@pytest.mark.parametrize("keywords", [BOTH, FORWARD])
@pytest.mark.parametrize("call", [1, 2, 3, 20, 100, 128, 129, 130, 131])
def test_a_jvp_that_is_wrong_in_one_call_fails(call: int, keywords: dict[str, bool]) -> None:
    func = square(lambda x, tangent, number: right(x, tangent) + 0.1 * (number == call))
    report = fastgrad.check(func, (leaf(SIZE),), **keywords)
    assert call <= report.jvps
    assert report.failure is not None


@pytest.mark.parametrize("keywords", [BOTH, FORWARD])
@pytest.mark.parametrize("calls", [{1, 3}, {1, 2}, {2, 4}, {1, 130}])
def test_what_no_pattern_explains_the_dense_engine_must_explain(calls: set[int], keywords: dict[str, bool]) -> None:
    func = square(lambda x, tangent, number: right(x, tangent) + 0.1 * number * (number in calls))
    assert not fastgrad.check(func, (leaf(SIZE),), **keywords).passed


@pytest.mark.parametrize("keywords", [BOTH, FORWARD])
def test_a_jvp_that_is_wrong_only_for_a_constant_tangent_fails(keywords: dict[str, bool]) -> None:
    func = square(lambda x, tangent, _: right(x, tangent) + 0.1 * bool((tangent == 1).all()))
    report = fastgrad.check(func, (leaf(SIZE),), **keywords)
    assert report.failure is not None
    assert "the columns of the Jacobian" in str(report)


@pytest.mark.parametrize("keywords", [BOTH, FORWARD])
def test_a_custom_jvp_is_called_often(keywords: dict[str, bool]) -> None:
    report = fastgrad.check(square(right), (leaf(SIZE),), **keywords)
    assert report.passed
    assert report.jvps >= 128


def test_an_exception_in_one_jvp_is_raised() -> None:
    def jvp(x: Tensor, tangent: Tensor, number: int) -> Tensor:
        if number == 2:
            raise RuntimeError("launch failed")
        return right(x, tangent)

    with pytest.raises(RuntimeError, match="launch failed"):
        fastgrad.gradcheck(square(jvp), (leaf(SIZE),), **FORWARD)


def test_a_jvp_that_accepts_one_hot_tangents_only_is_compared_by_the_dense_engine() -> None:
    def jvp(x: Tensor, tangent: Tensor, _: int) -> Tensor:
        if tangent.count_nonzero() == x.numel():
            raise RuntimeError("too dense")
        return right(x, tangent)

    report = fastgrad.check(square(jvp), (leaf(SIZE),), **FORWARD)
    assert report.failure is not None
    assert report.failure.kind == "raises"


def test_tolerances_per_input_hold() -> None:
    x, y = leaf(SIZE), leaf(SIZE).detach().mul(2).requires_grad_()

    def func(x: Tensor, y: Tensor) -> Tensor:
        return square(lambda x, tangent, _: 2 * x * tangent * 1.01)(x) + y.sin()

    assert not fastgrad.check(func, (x, y), **FORWARD).passed
    assert fastgrad.check(func, (x, y), rtol={"inputs[0]": 0.1}, **FORWARD).passed
    assert not fastgrad.check(func, (x, y), rtol={"inputs[1]": 0.1}, **FORWARD).passed


def test_second_derivatives_by_forward_over_reverse_exploit_sparsity() -> None:
    keywords = {"check_fwd_over_rev": True, "check_rev_over_rev": False, "check_undefined_grad": False}
    report = fastgrad.check(torch.sin, (leaf(SIZE),), order=2, **keywords)
    assert report.passed
    assert report.jvps <= 12


def test_complex_tensors_use_the_dense_engine() -> None:
    x = torch.view_as_complex(leaf(300, 2).detach()).requires_grad_()
    report = fastgrad.check(torch.sin, (x,), **FORWARD)
    assert report.passed
    assert report.plan is not None
    assert report.plan.engine == "dense"
