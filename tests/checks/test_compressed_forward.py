"""Forward mode on a sparsity pattern gives the verdicts of the dense engine in a few calls; wrong jvps fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import fastgrad
from fastgrad.report.report import Report
from tests.costs import set_costs

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
    assert counts == [(21, 8)] * 2


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
    assert "jvp raises for some tangents, but not for all" in str(report)


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
    assert report.jvps <= 14


def complex_leaf(*shape: int) -> Tensor:
    return torch.view_as_complex(leaf(*shape, 2).detach()).requires_grad_()


@pytest.mark.parametrize("keywords", [BOTH, FORWARD])
@pytest.mark.parametrize(
    ("func", "inputs"),
    [
        (torch.sin, (complex_leaf(300),)),
        (torch.abs, (complex_leaf(400),)),
        (lambda x: torch.complex(x.sin(), x.cos()), (leaf(SIZE),)),
        (lambda z, x: (z * x, x.exp(), z.conj() * z), (complex_leaf(300), leaf(300))),
        (lambda z: z / z.abs().sum(1, keepdim=True), (complex_leaf(40, 10),)),
    ],
)
def test_complex_tensors_take_few_calls(
    func: Callable[..., Any], inputs: tuple[Tensor, ...], keywords: dict[str, bool]
) -> None:
    report, dense = (fastgrad.check(func, inputs, engine=engine, **keywords) for engine in ("auto", "dense"))
    assert report.passed
    assert report.plan is not None
    assert report.plan.engine == "compressed"
    assert report.jvps <= 30
    assert report.evaluations <= 90
    # Places, parts and modes, in the same order.
    pairs, expected = ([pair[:6] for pair in one.pairs if pair.mode == "forward"] for one in (report, dense))
    assert pairs == expected
    assert any("jvp is linear" in certificate.claim for certificate in report.certificates)


class ComplexProduct(torch.autograd.Function):
    """z * w, whose jvp adds an entry: a part of one output element changes with a part of one input element."""

    entry: tuple[int, int, int, int, float]

    @staticmethod
    def forward(z: Tensor, w: Tensor) -> Tensor:
        return z * w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_forward(*inputs)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[1].conj(), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Tensor) -> Tensor:
        output, of_output, input_, of_input, size = ComplexProduct.entry
        found = torch.view_as_real(tangent * ctx.saved_tensors[1]).clone()
        found[output, of_output] += size * torch.view_as_real(tangent.resolve_conj())[input_, of_input]
        return torch.view_as_complex(found)


@pytest.mark.parametrize("keywords", [BOTH, FORWARD])
@pytest.mark.parametrize("of_output", [0, 1])
@pytest.mark.parametrize("of_input", [0, 1])
@pytest.mark.parametrize("input_", [3, 200])
@pytest.mark.parametrize("size", [2e-3, 1.0])
def test_a_wrong_complex_entry_fails_as_in_the_dense_engine(
    input_: int, of_output: int, of_input: int, size: float, keywords: dict[str, bool]
) -> None:
    ComplexProduct.entry = 3, of_output, input_, of_input, size
    z, w = complex_leaf(300), 0.5 * complex_leaf(300).detach()
    reports = [fastgrad.check(lambda z: ComplexProduct.apply(z, w), z, engine=one, **keywords) for one in ENGINES]
    found, expected = (wrong_entry(report) for report in reports)
    assert found[:-1] == expected[:-1]
    assert found[-1] == pytest.approx(expected[-1])
    # If the entry is outside the pattern, it may take all columns to tell it from the entry to which it is added.
    assert input_ != 3 or reports[0].jvps < reports[1].jvps / 4


def wrong_entry(report: Report) -> tuple[Any, ...]:
    """How and where a report failed in forward mode, and the analytical value there."""
    failure = report.failure
    assert failure is not None
    assert failure.mode == "forward"
    assert failure.comparison is not None
    worst = failure.comparison.worst
    assert worst is not None
    return failure.kind, failure.part, worst.output_index, worst.input_index, worst.analytical


ENGINES = "auto", "dense"


class SineAndCosine(torch.autograd.Function):
    """sin(x) and cos(y), with a jvp that loses one element of the first if the tangent of y is zero."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), y.cos()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_forward(*inputs)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grads[0] * x.cos(), -grads[1] * y.sin()

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        found = tangents[0] * x.cos()
        if not tangents[1].any():
            found[258] = 0
        return found, -tangents[1] * y.sin()


@pytest.mark.parametrize("keywords", [BOTH, FORWARD])
def test_a_jvp_that_is_wrong_if_another_tangent_is_zero_fails(keywords: dict[str, bool]) -> None:
    assert not fastgrad.check(SineAndCosine.apply, (leaf(400), leaf(1, 300)), **keywords).passed


def wrong_for_few(tangent: Tensor, product: Tensor) -> Tensor:
    if tangent.count_nonzero() < 5:
        product[50:250] *= 2
    return product


def by_dual_tensors(x: Tensor) -> Tensor:
    primal, tangent = forward_ad.unpack_dual(x)
    if tangent is None:
        return x.sin()
    return forward_ad.make_dual(primal.sin(), wrong_for_few(tangent, tangent * primal.detach().cos()))


def with_a_function_in_forward_mode_only(x: Tensor) -> Tensor:
    if forward_ad.unpack_dual(x).tangent is None:
        return x * x
    found: Tensor = Square.apply(x, lambda x, tangent, _: wrong_for_few(tangent, right(x, tangent)))
    return found


@pytest.mark.parametrize("func", [by_dual_tensors, with_a_function_in_forward_mode_only])
@pytest.mark.parametrize("keywords", [BOTH, FORWARD])
def test_custom_code_that_runs_in_forward_mode_only_is_found(
    func: Callable[[Tensor], Tensor], keywords: dict[str, bool]
) -> None:
    report = fastgrad.check(func, (leaf(1000),), **keywords)
    assert report.failure is not None
    assert report.failure.mode == "forward"


@pytest.mark.parametrize("call", range(1, 6))
def test_a_tangent_that_func_makes_wrong_in_one_call_fails(call: int) -> None:
    calls = itertools.count(1)

    def func(x: Tensor) -> Tensor:
        primal, tangent = forward_ad.unpack_dual(x)
        if tangent is None:
            return x.sin()
        return forward_ad.make_dual(primal.sin(), tangent * primal.cos() + 0.1 * (next(calls) == call))

    report = fastgrad.check(func, (leaf(SIZE),), **FORWARD)
    assert report.failure is not None
    assert report.failure.mode == "forward"


JUMPS = {
    "floor": torch.floor,
    "step": lambda x: (x > 0).double() + x * 0,
    "small step": lambda x: 1e-3 * (x >= 0) + 0 * x,
    "two outputs": lambda x: (x.floor(), x.sin()),
    "product": lambda x: x.floor() * x.roll(1),
}


@pytest.mark.parametrize("keywords", [{}, BOTH, FORWARD])
@pytest.mark.parametrize("name", JUMPS)
def test_a_jump_between_elements_that_cross_it_with_it_fails(name: str, keywords: dict[str, bool]) -> None:
    x = leaf(1000).detach().abs() * 0.1 + 0.1
    x[:4] = torch.tensor([0.0, 3e-7, 6e-7, 9e-7])
    assert not fastgrad.check(JUMPS[name], (x.requires_grad_(),), **keywords).passed


def test_a_jump_in_a_sum_of_elements_that_cross_it_fails() -> None:
    x = (torch.arange(1800, dtype=torch.float64) * 1e-6).requires_grad_()
    assert not fastgrad.check(lambda x: x.view(-1, 10).floor().sum(1), (x,)).passed


def test_an_entry_that_is_wrong_only_in_a_sum_is_not_called_wrong() -> None:
    def jvp(x: Tensor, tangent: Tensor, _: int) -> Tensor:
        found = right(x, tangent)
        if tangent.count_nonzero() > 1:
            found[258] *= 1.5
        return found

    report = fastgrad.check(square(jvp), (leaf(400),), **FORWARD)
    assert report.failure is not None
    assert report.failure.kind == "nonlinear"


class LossOfTwo(torch.autograd.Function):
    """sum(x^2 + x sin(y)) with a given jvp of (x, y, their tangents, number of the call)."""

    jvp_of: Callable[..., Tensor]
    calls = 0

    @staticmethod
    def forward(x: Tensor, y: Tensor, jvp: Callable[..., Tensor]) -> Tensor:
        return (x * x + x * y.sin()).sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.derivative = inputs[2]
        ctx.save_for_forward(*inputs[:2])
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        return grad * (2 * x + y.sin()), grad * x * y.cos(), None

    @staticmethod
    def jvp(ctx: Any, s: Tensor, t: Tensor, _: None) -> Tensor:
        LossOfTwo.calls += 1
        found: Tensor = ctx.derivative(*ctx.saved_tensors, s, t, LossOfTwo.calls)
        return found


def of_loss(x: Tensor, y: Tensor, s: Tensor, t: Tensor, _: int = 0) -> Tensor:
    return ((2 * x + y.sin()) * s).sum() + (x * y.cos() * t).sum()


def loss(jvp: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    LossOfTwo.calls = 0
    return lambda x, y: LossOfTwo.apply(x, y, jvp)


@pytest.mark.parametrize("keywords", [BOTH, FORWARD])
@pytest.mark.parametrize("func", [lambda x: x.sin().sum(), lambda x: (x.sin(), x.cos().sum())], ids=["loss", "beside"])
def test_a_loss_in_forward_mode_takes_as_few_calls_at_any_size(
    func: Callable[[Tensor], Any], keywords: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_costs(monkeypatch, single_calls_seconds=0.0)
    for n in (5000, 20_000):
        report = fastgrad.check(func, (leaf(n),), **keywords)
        assert report.passed
        assert report.plan is not None
        assert report.plan.engine == "compressed"
        assert report.evaluations < 700  # without a backward, most of them find the pattern
        assert report.jvps <= 20
        assert any("in forward mode, 1 dense row certified" in note for note in report.notes)
        assert any("1 dense row, no single entry of forward mode" in c.claim for c in report.certificates)


WRONG_LOSSES: dict[str, Callable[..., Tensor]] = {
    "entry off by 1 %": lambda x, y, s, t, _: of_loss(x, y, s, t) + 0.01 * ((2 * x + y.sin()) * s)[200],
    "last entry": lambda x, y, s, t, _: of_loss(x, y, s, t) + 1e-2 * t[-1],
    "one-hot": lambda x, y, s, t, _: of_loss(x, y, s, t) * (1.01 if s.count_nonzero() + t.count_nonzero() < 2 else 1),
    "dense": lambda x, y, s, t, _: of_loss(x, y, s, t) * (1.01 if (s * t).count_nonzero() == s.numel() else 1),
    "mostly zero": lambda x, y, s, t, _: of_loss(x, y, s, t) * (1.1 if 1 < s.count_nonzero() < 100 else 1),
    "absolute": lambda x, y, s, t, _: of_loss(x, y, s.abs(), t),
    "one absolute": lambda x, y, s, t, _: of_loss(x, y, s, t) + 1e-3 * (s[3].abs() - s[3]),
    "clamped": lambda x, y, s, t, _: of_loss(x, y, s.clamp(-1, 1), t),
    "squared": lambda x, y, s, t, _: of_loss(x, y, s, t) + 1e-3 * (s * s).sum(),
    "other tangent zero": lambda x, y, s, t, _: of_loss(x, y, s, t) - (0 if t.any() else (2 * x * s)[9]),
    **{
        f"call {call}": lambda x, y, s, t, n, call=call: of_loss(x, y, s, t) + 0.1 * (n == call)
        for call in (1, 2, 8, 100, 129, 134)
    },
}


@pytest.mark.parametrize("keywords", [BOTH, FORWARD])
@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_a_wrong_jvp_of_a_loss_fails(name: str, keywords: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    set_costs(monkeypatch, single_calls_seconds=0.0)
    x = leaf(600)
    x.data[[9, 200]] = 1.0
    y = leaf(600).detach().add(0.3).requires_grad_()
    assert fastgrad.check(loss(of_loss), (x, y), **keywords).passed
    report = fastgrad.check(loss(WRONG_LOSSES[name]), (x, y), **keywords)
    assert report.failure is not None
    assert report.failure.mode == "forward"
    if name.startswith("call"):
        assert report.failure.kind == "nondeterministic"


def test_a_custom_jvp_that_is_wrong_only_for_mostly_zero_tangents_fails() -> None:
    def jvp(x: Tensor, tangent: Tensor, _: int) -> Tensor:
        return right(x, tangent) * (1.1 if 1 < tangent.count_nonzero() < x.numel() / 10 else 1.0)

    for keywords in (BOTH, FORWARD):
        report = fastgrad.check(square(jvp), (leaf(SIZE),), **keywords)
        assert report.failure is not None
        assert report.failure.kind == "nonlinear"


@pytest.mark.parametrize("keywords", [BOTH, FORWARD])
def test_a_right_jvp_in_single_precision_needs_no_dense_engine(keywords: dict[str, bool]) -> None:
    def jvp(x: Tensor, tangent: Tensor, _: int) -> Tensor:
        return right(x.float(), tangent.float()).double()

    report = fastgrad.check(square(jvp), (leaf(SIZE),), **keywords)
    assert report.verdict == "passed"
    assert report.plan is not None
    assert report.plan.engine == "compressed"
    assert report.jvps < 400
    assert all(certificate.bound <= 1e-5 for certificate in report.certificates)
    wrong = square(lambda x, tangent, n: jvp(x, tangent, n) + 3e-5 * tangent.roll(1))
    assert not fastgrad.check(wrong, (leaf(SIZE),), **keywords).passed


@pytest.mark.parametrize("keywords", [BOTH, FORWARD])
@pytest.mark.parametrize("jvp", [lambda t: t.clamp(-1, 1), Tensor.abs], ids=["clamped", "absolute"])
def test_a_nonlinear_jvp_fails_with_few_calls(jvp: Callable[[Tensor], Tensor], keywords: dict[str, bool]) -> None:
    report = fastgrad.check(square(lambda x, tangent, _: 2 * x * jvp(tangent)), (leaf(SIZE),), **keywords)
    assert report.failure is not None
    assert report.failure.kind == "nonlinear"
    assert report.jvps < 200


@pytest.mark.parametrize("seed", range(4, 14))
def test_the_sum_of_a_column_group_next_to_near_ties_is_not_called_nondeterministic(seed: int) -> None:
    """The pattern is that at x; at eps, a median also depends on the elements that are nearly tied with it."""
    x = torch.rand(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for group in range(20):
        tied = slice(5 * group, 5 * group + 2 + group % 3)
        x[tied] = x[5 * group] + 4e-7 * torch.randperm(2 + group % 3, generator=torch.Generator().manual_seed(group))
    modes = {"check_forward_ad": True, "check_backward_ad": False}
    assert fastgrad.check(lambda x: x.view(-1, 5).median(1).values, x.requires_grad_(), seed=seed, **modes).passed
