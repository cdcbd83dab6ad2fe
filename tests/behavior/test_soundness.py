"""Wrong gradients that certificates, tolerances or a few calls may miss all fail; their right twins pass."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import fastgrad
from fastgrad.checks.order import STARTED_AGAIN
from fastgrad.report.settings import Engine
from tests.planted.adversary import ATTACKS
from tests.planted.row import function

SEEDS = {("auto", 12): 4, ("auto", 600): 2, ("dense", 12): 2, ("compressed", 12): 2}
"""Number of seeds by engine and number of elements; all other combinations have one."""

Func = Callable[..., Any]


def custom(forward: Callable[..., Tensor], backward: Callable[..., Any]) -> Func:
    """A Function whose backward gets grad_output and the inputs."""

    class Custom(Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            return forward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Any:
            return backward(grad_output, *ctx.saved_tensors)

    return Custom.apply


@dataclass(frozen=True)
class Case:
    """Makes the wrong function and its right twin for each check, because a backward may keep state."""

    name: str
    wrong: Callable[[], Func]
    right: Callable[[], Func]
    inputs: int = 1
    keywords: dict[str, Any] = field(default_factory=dict)


def scaled(factor: float, row: int, column: int, extra: float) -> Case:
    """forward: factor x. The backward adds an entry next to [column, column], which is much larger."""

    def wrong(grad: Tensor, x: Tensor) -> Tensor:
        result = factor * grad
        result[column] += extra * grad[row]
        return result

    def right(grad: Tensor, x: Tensor) -> Tensor:
        return factor * grad

    name = f"entry {extra:g} beside {factor:g}"
    return Case(name, lambda: custom(lambda x: factor * x, wrong), lambda: custom(lambda x: factor * x, right))


def lacking(factor: float, extra: float) -> Case:
    """The forward has an entry that the backward lacks, next to a much larger one."""

    def forward(x: Tensor) -> Tensor:
        result = factor * x
        result[1] += extra * x[-1]
        return result

    def right(grad: Tensor, x: Tensor) -> Tensor:
        result = factor * grad
        result[-1] += extra * grad[1]
        return result

    def wrong(grad: Tensor, x: Tensor) -> Tensor:
        return factor * grad

    return Case(
        f"entry {extra:g} missing beside {factor:g}", lambda: custom(forward, wrong), lambda: custom(forward, right)
    )


def ten_rows() -> Case:
    def wrong(grad: Tensor, x: Tensor) -> Tensor:
        result = 2 * grad
        result[1] += 1e-4 * grad[2:12].sum()
        return result

    def right(grad: Tensor, x: Tensor) -> Tensor:
        return 2 * grad

    return Case(
        "a column collects ten rows", lambda: custom(lambda x: 2 * x, wrong), lambda: custom(lambda x: 2 * x, right)
    )


def beside_harmless() -> Case:
    """One missing entry beyond the tolerance among many within it, all in one row."""

    def forward(x: Tensor) -> Tensor:
        result = 2 * x
        result[3] += 0.9e-5 * x.sum() + 3e-5 * x[77 % x.numel()]
        return result

    def right(grad: Tensor, x: Tensor) -> Tensor:
        result = 2 * grad + 0.9e-5 * grad[3]
        result[77 % x.numel()] += 3e-5 * grad[3]
        return result

    def wrong(grad: Tensor, x: Tensor) -> Tensor:
        return 2 * grad

    return Case("one entry among harmless ones", lambda: custom(forward, wrong), lambda: custom(forward, right))


def products() -> Case:
    def wrong(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = grad * y
        first[-1] += 1e-3 * grad[1]
        return first, grad * x

    def right(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return grad * y, grad * x

    return Case("entry beside x * y", lambda: custom(torch.mul, wrong), lambda: custom(torch.mul, right), inputs=2)


def detached() -> Case:
    def wrong(x: Tensor) -> Tensor:
        return 2e3 * x + 0.5 * x.sum().detach()

    def right(x: Tensor) -> Tensor:
        return 2e3 * x + 0.5 * x.sum()

    return Case("a detached sum", lambda: wrong, lambda: right)


def right_sine() -> Func:
    return custom(torch.sin, lambda grad, x: grad * x.cos())


def by_call(name: str, is_wrong: Callable[[int], bool], last_alone: bool = False) -> Case:
    """Wrong in some calls, counted from 1; in all elements or only in the last one."""

    def make() -> Func:
        calls = 0

        def backward(grad: Tensor, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            factor = torch.ones_like(x)
            factor[-1 if last_alone else slice(None)] = 1.5 if is_wrong(calls) else 1.0
            return grad * x.cos() * factor

        return custom(torch.sin, backward)

    return Case(f"wrong {name}{', in its last element' * last_alone}", make, right_sine)


def by_graph(name: str, is_wrong: Callable[[int, int], bool]) -> Case:
    """Wrong in some graphs and calls of a graph's backward, both counted from 1."""

    def make() -> Func:
        graphs = 0

        def func(x: Tensor) -> Tensor:
            nonlocal graphs
            graphs += 1
            graph, calls = graphs, 0

            def backward(grad: Tensor, x: Tensor) -> Tensor:
                nonlocal calls
                calls += 1
                return grad * x.cos() * (1.5 if is_wrong(graph, calls) else 1.0)

            return custom(torch.sin, backward)(x)

        return func

    return Case(f"wrong in {name}", make, right_sine)


def by_zeros(share: float) -> Case:
    """Wrong if more than the given share of grad_output's elements are zero."""

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        return grad * x.cos() * (1.5 if (grad == 0).double().mean() > share else 1.0)

    return Case(f"wrong for {share:.0%} zeros", lambda: custom(torch.sin, backward), right_sine)


def cached(name: str, key: Callable[[Tensor], Any]) -> Case:
    """Returns an earlier gradient if an earlier grad_output had the same key."""

    def make() -> Func:
        known: dict[Any, Tensor] = {}

        def backward(grad: Tensor, x: Tensor) -> Tensor:
            return known.setdefault(key(grad), grad * x.cos()).clone()

        return custom(torch.sin, backward)

    return Case(f"cached by {name}", make, right_sine)


def permuted() -> Case:
    def order(x: Tensor) -> Tensor:
        return torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))

    def right(grad: Tensor, x: Tensor) -> Tensor:
        return torch.empty_like(grad).index_copy_(0, order(x), grad)

    def wrong(grad: Tensor, x: Tensor) -> Tensor:
        return grad[order(x)]

    def forward(x: Tensor) -> Tensor:
        return x[order(x)]

    makers = (lambda: custom(forward, wrong)), (lambda: custom(forward, right))
    return Case("the inverse forgotten, beside nondet_tol", *makers, keywords={"nondet_tol": 1e-4})


CASES = [
    scaled(1e6, 1, -1, 900.0),
    scaled(1e3, 1, -1, 0.9),
    scaled(2.0, 1, -1, 1e-3),
    scaled(1e9, 1, -1, 5e5),
    lacking(2.0, 1.9e-3),
    lacking(1e3, 0.5),
    lacking(1e6, 100.0),
    ten_rows(),
    beside_harmless(),
    products(),
    detached(),
    by_call("in its first call", lambda call: call == 1),
    by_call("in its second call", lambda call: call == 2),
    by_call("from its 5th call on", lambda call: call >= 5),
    by_call("from its 20th call on", lambda call: call >= 20),
    by_call("from its 100th call on", lambda call: call >= 100),
    by_call("in its 5th call", lambda call: call == 5),
    by_call("from its 20th call on", lambda call: call >= 20, last_alone=True),
    by_call("in every third call", lambda call: call % 3 == 0, last_alone=True),
    by_graph("the first graph", lambda graph, _: graph == 1),
    by_graph("the second call of each graph", lambda _, call: call == 2),
    by_zeros(0.5),
    by_zeros(0.75),
    by_zeros(0.9),
    cached("sum", lambda grad: grad.sum().item()),
    cached("norm", lambda grad: grad.norm().item()),
    cached("ends", lambda grad: (grad[0].item(), grad[-1].item())),
    permuted(),
]

BY_NAME = {case.name: case for case in CASES}
ENGINES = "auto", "dense", "compressed"


def leaves(case: Case, n: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(case.inputs))


def verdicts(case: Case, n: int, seed: int, **keywords: Any) -> tuple[str, str]:
    """The verdicts of the wrong and the right function; a derivative that does not converge is a failure, too."""
    inputs = leaves(case, n, seed)
    found = (
        fastgrad.check(make(), inputs, seed=seed, **case.keywords, **keywords) for make in (case.wrong, case.right)
    )
    wrong, right = ("failed" if report.failure is not None else report.verdict for report in found)
    return wrong, right


def torch_calls(n: int) -> int:
    """The calls of backward in torch's slow mode: two per row."""
    return 2 * n


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", BY_NAME)
def test_wrong_gradients_fail_and_right_ones_pass(name: str, engine: str) -> None:
    for n in (12, 600):
        if "100th" in name and torch_calls(n) < 100:
            continue  # no checker calls it as often
        for seed in range(SEEDS.get((engine, n), 1)):
            wrong, right = verdicts(BY_NAME[name], n, seed, engine=engine)
            # The dense engine is not allowed here, so unexplained errors leave the check undecided.
            undecided = engine == "compressed" and name == "one entry among harmless ones"
            assert wrong == "failed" or (undecided and wrong == "undecided"), (n, seed)
            assert right == "passed", (n, seed)


@pytest.mark.parametrize(
    "name", [name for name in BY_NAME if name not in ("a detached sum", "one entry among harmless ones")]
)
def test_larger_ones(name: str) -> None:
    assert verdicts(BY_NAME[name], 10_000, 0) == ("failed", "passed")


def test_many_entries_that_no_search_explains_end_in_the_dense_engine() -> None:
    case = BY_NAME["a detached sum"]
    report = fastgrad.check(case.wrong(), leaves(case, 2_000, 0))
    assert not report.passed


class WrongOnce(Function):
    """The softmax of rows, whose backward adds 0.1 to the gradient in call number `wrong`."""

    calls = wrong = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.softmax(-1)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        (result,) = ctx.saved_tensors
        WrongOnce.calls += 1
        gradient = result * (grad_output - (grad_output * result).sum(-1, keepdim=True))
        return gradient + 0.1 if WrongOnce.calls == WrongOnce.wrong else gradient


@pytest.mark.parametrize("n", [12, 600])
def test_a_backward_that_is_wrong_in_one_call_fails_whichever_it_is(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(n // 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def verdict(wrong: int) -> bool:
        monkeypatch.setattr(WrongOnce, "calls", 0)
        monkeypatch.setattr(WrongOnce, "wrong", wrong)
        return fastgrad.check(WrongOnce.apply, (x,)).passed

    assert verdict(0)
    passed = [wrong for wrong in range(1, min(WrongOnce.calls, 50) + 1) if verdict(wrong)]
    assert not passed


WRONG_CALLS: dict[str, Callable[[int], bool]] = {
    "none": lambda call: False,
    "the first": lambda call: call == 1,
    "the second": lambda call: call == 2,
    "the third": lambda call: call == 3,
    "the first three": lambda call: call <= 3,
    "the first five": lambda call: call <= 5,
    "all but the first": lambda call: call > 1,
    "every second": lambda call: call % 2 == 0,
    "every third": lambda call: call % 3 == 0,
}
WRONG_HOW: dict[str, Callable[[Tensor], Any]] = {
    "half": lambda gradient: gradient.mul_(0.5),
    "zero": lambda gradient: gradient.zero_(),
    "shifted": lambda gradient: gradient.add_(1e-3),
    "the first element": lambda gradient: gradient[0].mul_(0.5),
    "the last element": lambda gradient: gradient[-1].mul_(0.5),
}


def cube_wrong_in_calls(is_wrong: Callable[[int], bool], spoil: Callable[[Tensor], Any]) -> Func:
    """x^3, whose backward is wrong in some of the calls of each graph."""

    class Cube(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.calls = 0
            return x**3

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            ctx.calls += 1
            gradient = 3 * x * x * grad_output
            if is_wrong(ctx.calls):
                spoil(gradient)
            return gradient

    return Cube.apply


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("n", [2, 3, 5, 12, 30, 100])
@pytest.mark.parametrize("calls", WRONG_CALLS)
def test_a_backward_that_is_wrong_in_some_calls_of_each_graph(calls: str, n: int, is_dense: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, dtype=torch.float64, generator=generator).requires_grad_()
    matrix = torch.randn(n, n, dtype=torch.float64, generator=generator)
    for spoil in WRONG_HOW.values():
        cube = cube_wrong_in_calls(WRONG_CALLS[calls], spoil)
        func = (lambda x, cube=cube: matrix @ cube(x)) if is_dense else cube
        assert fastgrad.check(func, (x,)).passed == (calls == "none")
        if calls == "none" or torch.autograd.gradcheck(func, (x,), fast_mode=True, raise_exception=False) is False:
            assert fastgrad.check(func, (x,), fast_mode=True).passed == (calls == "none")


def doubled(entries: dict[tuple[int, int], float], spoils: Callable[[Tensor], bool], outputs: int) -> Func:
    """2 x, and x itself as a second output; its backward has further entries (row, column) for some grad_outputs."""

    class Doubled(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            return (2 * x, x * 1)[:outputs] if outputs > 1 else 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:  # type: ignore[override]
            gradient = 2 * grads[0]
            if spoils(grads[0]):
                for (row, column), error in entries.items():
                    gradient[column] += error * grads[0][row]
            return gradient + grads[1] if outputs > 1 else gradient

    return Doubled.apply


SPOILED: dict[str, Callable[[Tensor], bool]] = {
    "contiguous ones": lambda grad: grad.is_contiguous(),
    "whole numbers": lambda grad: bool((grad == grad.round()).all()),
}


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("spoiled", SPOILED)
@pytest.mark.parametrize("n", [33, 100, 400])
def test_entries_outside_of_the_pattern_for_some_grad_outputs_only(n: int, spoiled: str, outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, dtype=torch.float64, generator=generator).requires_grad_()
    assert fastgrad.gradcheck(doubled({}, SPOILED[spoiled], outputs), x)
    places = torch.randint(0, n, (5, 2), generator=generator).tolist()
    for row, column in [(8, 26), (9, 0), (5, 32), *places]:
        for error in (0.5, 1e-3) if row != column else (0.5,):  # 1e-3 is within the tolerance of 2
            func = doubled({(row, column): error}, SPOILED[spoiled], outputs)
            assert not fastgrad.gradcheck(func, x, raise_exception=False), (row, column, error)


NEARLY_ONE_HOT: dict[str, Callable[[Tensor, int], bool]] = {
    "few nonzero elements": lambda grad, row: int((grad != 0).sum()) <= 2,
    "the largest element": lambda grad, row: int(grad.abs().argmax()) == row,
    "zero before it": lambda grad, row: row > 0 and bool(grad[row - 1] == 0),
}


@pytest.mark.parametrize("kind", NEARLY_ONE_HOT)
@pytest.mark.parametrize("n", [12, 33, 64, 100])
def test_rows_that_are_wrong_by_themselves_alone(n: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, dtype=torch.float64, generator=generator).requires_grad_()
    for row, column in torch.randint(1, n, (6, 2), generator=generator).tolist():
        spoils = lambda grad, row=row: NEARLY_ONE_HOT[kind](grad, row)  # noqa: E731
        func = doubled({(row, column): 0.5}, spoils, 1)
        assert not torch.autograd.gradcheck(func, x, raise_exception=False)
        assert not fastgrad.gradcheck(func, x, raise_exception=False), (row, column)


def cube_wrong_between(first: int, last: int, spoil: Callable[[Tensor], Any], outputs: int) -> Func:
    """x^3, and 2 x as a second output; its backward is wrong in calls `first` to `last`."""
    calls = 0

    class Cube(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            ctx.save_for_backward(x)
            return (x**3, 2 * x)[:outputs] if outputs > 1 else x**3

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:  # type: ignore[override]
            nonlocal calls
            calls += 1
            (x,) = ctx.saved_tensors
            gradient = 3 * x * x * grads[0] + (2 * grads[1] if outputs > 1 else 0)
            if first <= calls <= last:
                spoil(gradient)
            return gradient

    return Cube.apply


WINDOW_ERRORS: dict[str, Callable[[Tensor], Any]] = {
    "not a number": lambda gradient: gradient.fill_(torch.nan),
    "infinite": lambda gradient: gradient.fill_(torch.inf),
    "zero": lambda gradient: gradient.zero_(),
    "larger": lambda gradient: gradient.add_(100.0),
    "half more": lambda gradient: gradient.mul_(1.5),
}


@pytest.mark.parametrize("error", WINDOW_ERRORS)
@pytest.mark.parametrize(("n", "outputs"), [(40, 1), (64, 1), (64, 2), (200, 2)])
def test_a_backward_that_is_wrong_in_a_few_calls_of_the_compressed_engine(n: int, error: str, outputs: int) -> None:
    x = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert fastgrad.gradcheck(cube_wrong_between(1, 0, WINDOW_ERRORS[error], outputs), x)
    for first in range(1, 20):
        for length in (1, 4):
            func = cube_wrong_between(first, first + length - 1, WINDOW_ERRORS[error], outputs)
            assert not fastgrad.gradcheck(func, x, raise_exception=False), (first, length)


def neighbors_wrong_between(first: int, last: int, spoil: Callable[[Tensor], Any]) -> Func:
    """The products of neighboring elements: two row groups. The backward is wrong in calls `first` to `last`."""
    calls = 0

    class Neighbors(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x[1:] * x[:-1]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            nonlocal calls
            calls += 1
            (x,) = ctx.saved_tensors
            gradient = torch.zeros_like(x)
            gradient[1:] += grad * x[:-1]
            gradient[:-1] += grad * x[1:]
            if first <= calls <= last:
                spoil(gradient)
            return gradient

    return Neighbors.apply


@pytest.mark.parametrize("error", WINDOW_ERRORS)
@pytest.mark.parametrize(("n", "engine"), [(65, "auto"), (200, "auto"), (200, "compressed")])
def test_a_backward_of_several_row_groups_that_is_wrong_in_one_call(n: int, engine: Engine, error: str) -> None:
    x = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert fastgrad.gradcheck(neighbors_wrong_between(1, 0, WINDOW_ERRORS[error]), x, engine=engine)
    for call in range(1, 26):
        func = neighbors_wrong_between(call, call, WINDOW_ERRORS[error])
        assert not fastgrad.gradcheck(func, x, raise_exception=False, engine=engine), call


def of_one_output(shape: tuple[int, ...], is_wrong: Callable[[Any, dict[str, Any], Tensor], bool]) -> Func:
    """The sum of x^3, whose backward is twice the right one in some calls that depend on earlier calls."""
    state: dict[str, Any] = {"graphs": 0}

    class Sum(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            state["graphs"] += 1
            ctx.graph = state["graphs"]
            ctx.save_for_backward(x)
            return (x**3).sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            wrong = is_wrong(ctx, state, grad)
            state["last"] = grad.clone()
            return grad * 3 * x * x * (2 if wrong else 1)

    return Sum.apply


OF_ONE_OUTPUT: dict[str, Callable[[Any, dict[str, Any], Tensor], bool]] = {
    "never": lambda ctx, state, grad: False,
    "for the grad_output of the call before": lambda ctx, state, grad: (
        "last" in state and torch.equal(state["last"], grad)
    ),
    "in the first graph": lambda ctx, state, grad: ctx.graph == 1,
    "in the second graph": lambda ctx, state, grad: ctx.graph == 2,
}


@pytest.mark.parametrize("shape", [(), (1,), (10,), (100,)])
@pytest.mark.parametrize("when", OF_ONE_OUTPUT)
def test_one_output_whose_backward_remembers(when: str, shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    func = of_one_output(shape, OF_ONE_OUTPUT[when])
    passed = fastgrad.gradcheck(func, x, raise_exception=False)
    if when == "never":
        assert passed
    elif not torch.autograd.gradcheck(of_one_output(shape, OF_ONE_OUTPUT[when]), x, raise_exception=False):
        assert not passed


@pytest.mark.parametrize("n", [12, 600])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("keywords", [{"engine": "compressed"}, {"engine": "sketch", "fast_mode": True}], ids=str)
def test_a_one_hot_grad_output_at_the_last_row(keywords: dict[str, Any], seed: int, n: int) -> None:
    class OneHotTail(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.cos())
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
            gradient = grad_output * ctx.saved_tensors[0]
            if int((grad_output != 0).sum()) == 1:
                gradient[-1] *= 1.5
            return gradient

    x = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    assert not fastgrad.check(OneHotTail.apply, (x,), seed=seed, **keywords).passed


@pytest.mark.parametrize(("n", "row"), [(12, 7), (13, 3), (16, 5), (113, 7), (128, 125)])
@pytest.mark.parametrize("engine", ["auto", "compressed"])
def test_a_one_hot_grad_output_at_any_row(engine: str, n: int, row: int) -> None:
    class OneHotRow(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
            is_wrong = int((grad_output != 0).sum()) == 1 and bool(grad_output[row] != 0)
            return 2 * ctx.saved_tensors[0] * grad_output * (1.5 if is_wrong else 1.0)

    x = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).requires_grad_()
    assert not fastgrad.check(OneHotRow.apply, (x,), engine=engine).passed


SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "100 softmax": lambda x: 100 * x.view(-1, 10).softmax(1).reshape(-1),
    "gather": lambda x: 300 * x[torch.arange(x.numel() - 1, -1, -1)].tanh(),
}


@pytest.mark.parametrize("length", [2e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("slope", [1e-4, 1e-3])
@pytest.mark.parametrize("name", SMOOTH)
def test_a_term_on_a_scale_shorter_than_large_steps(name: str, slope: float, length: float) -> None:
    """One output has a small term whose derivative the backward lacks. A large step averages the derivative out."""
    x = torch.randn(600, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    column, row = 557, 35
    place = x[column].item()

    def func(x: Tensor) -> Tensor:
        term = slope * length * torch.sin((x.detach()[column : column + 1] - place) / length)
        return SMOOTH[name](x).index_add(0, torch.tensor([row]), term)

    report = fastgrad.check(func, (x,))
    assert report.failure is not None
    assert report.failure.comparison is not None
    assert report.failure.comparison.worst is not None
    assert report.failure.comparison.worst.output_index == (row,)
    assert report.failure.comparison.worst.input_index == (column,)


def test_an_output_that_may_hide_entries_and_has_none() -> None:
    """Next to kinks, columns are measured one by one; here, no columns are left."""
    attack = next(attack for attack in ATTACKS if attack.name == "max pool with a coupling of 0.0001: right")
    f, inputs = attack.make(1, 600)
    assert fastgrad.check(f, inputs, **dict(attack.keywords)).passed


class FromTheBeginning(Function):
    """The cube, whose backward reads grad_output from the beginning of its storage, as a kernel may do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        if grad_output.is_contiguous():
            grad_output = grad_output.as_strided(x.shape, x.stride(), 0)
        return 3 * x * x * grad_output


class ByAlignedLoads(FromTheBeginning):
    """The cube, whose backward is wrong if grad_output does not begin at a multiple of 16 bytes."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad_output * (1.0 if grad_output.data_ptr() % 16 == 0 else 1.5)


class ByTheStart(FromTheBeginning):
    """The right function: it reads from the first element of grad_output."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        first = grad_output.storage_offset() if grad_output.is_contiguous() else 0
        grad = grad_output.contiguous()
        return 3 * x * x * grad.as_strided(x.shape, x.stride(), first)


@pytest.mark.parametrize("keywords", [{}, {"engine": "dense"}, {"engine": "compressed"}, {"fast_mode": True}], ids=str)
@pytest.mark.parametrize("n", [3, 12, 40, 600, 40_000])
def test_a_backward_that_ignores_the_storage_offset_of_grad_output_fails(n: int, keywords: dict[str, Any]) -> None:
    if n == 40_000 and keywords.get("engine") == "dense":
        n = 2_000
    x = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for wrong in (FromTheBeginning, ByAlignedLoads):
        report = fastgrad.check(wrong.apply, (x,), **keywords)
        assert report.failure is not None, wrong
        assert report.failure.kind == "nonlinear"
    assert fastgrad.check(ByTheStart.apply, (x,), **keywords).passed
    if n > 600:
        return  # on a busy machine, the second that the experiments have may not suffice
    report = fastgrad.check(FromTheBeginning.apply, (x,), **keywords)
    assert report.causes[0].name == "layout of grad_output", report.causes
    assert "offset" in report.causes[0].text


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("size", [3, 400])
def test_gradients_that_are_others_where_they_are_recorded(fast_mode: bool, size: int) -> None:
    def backward(g: Tensor, x: Tensor) -> Tensor:
        return (3 if torch.is_grad_enabled() else 2) * x * g

    x = torch.randn(size, dtype=torch.float64, requires_grad=True)
    wrong, right = custom(torch.square, backward), custom(torch.square, lambda g, x: 2 * x * g)
    report = fastgrad.check(wrong, x, order=2, fast_mode=fast_mode)
    assert report.failure is not None
    assert report.failure.kind == "recorded gradient"
    assert "Backward gives different gradients with and without create_graph=True" in str(report)
    assert fastgrad.check(right, x, order=2, fast_mode=fast_mode).passed


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_gradient_that_is_detached_beside_others(fast_mode: bool, dtype: torch.dtype) -> None:
    x, y = (torch.randn(4, dtype=dtype, requires_grad=True) for _ in range(2))
    wrong = custom(torch.mul, lambda g, x, y: (g * y.conj(), (g * x.conj()).detach()))
    assert not fastgrad.gradgradcheck(wrong, (x, y), fast_mode=fast_mode, raise_exception=False)
    # A constant gradient needs no graph.
    constant = custom(lambda x, y: x.square() + y, lambda g, x, y: (2 * g * x.conj(), g))
    assert fastgrad.gradgradcheck(constant, (x, y), grad_outputs="ones", fast_mode=fast_mode)


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("n", [2, 12, 200, 3000])
def test_gradients_that_are_kept_by_the_identity_of_grad_output(n: int, fast_mode: bool) -> None:
    """Torch's checker passes the same tensor repeatedly, with different values."""
    gradients: dict[int, Tensor] = {}
    seen = []  # no identity is that of another tensor later

    def backward(grad_output: Tensor, x: Tensor) -> Tensor:
        seen.append(grad_output)
        if id(grad_output) not in gradients:
            gradients[id(grad_output)] = grad_output.flip(0).cumsum(0).flip(0)
        return gradients[id(grad_output)].clone()

    x = torch.randn(n, dtype=torch.float64, requires_grad=True)
    func = custom(lambda x: x.cumsum(0), backward)
    assert not fastgrad.gradcheck(func, (x,), fast_mode=fast_mode, raise_exception=False)


@pytest.mark.parametrize("keywords", [{}, {"engine": "compressed"}, {"fast_mode": True}], ids=str)
@pytest.mark.parametrize("n", [1, 3, 30, 300])
def test_a_backward_that_writes_into_grad_output_unless_gradients_are_recorded(
    n: int, keywords: dict[str, Any]
) -> None:
    """In `gradgradcheck`, grad_outputs are inputs: each evaluation starts from their values."""

    def square(factor: float) -> Callable[..., Any]:
        def backward(grad_output: Tensor, x: Tensor) -> Tensor:
            gradient = 2 * x * grad_output
            if not torch.is_grad_enabled():
                grad_output.zero_()
                gradient *= factor
            return gradient

        return custom(torch.square, backward)

    x = torch.randn(n, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(square(1.0), (x,))
    assert fastgrad.gradgradcheck(square(1.0), (x,), **keywords)
    # torch's checker records all gradients.
    assert not fastgrad.gradgradcheck(square(1.1), (x,), raise_exception=False, **keywords)


def test_gradients_that_are_limited_on_the_way_are_no_race() -> None:
    """A limit inside backward that only large grad_outputs reach, in sums of row groups."""

    def func(x: Tensor, y: Tensor) -> Tensor:
        sin = x.sin()
        assert sin.grad_fn is not None
        sin.grad_fn.register_hook(lambda gradients, _: tuple(g if g is None else g.clamp(-0.5, 0.5) for g in gradients))
        return (sin * y).sum()

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(80, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    small = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    for seed in range(3):
        report = fastgrad.check(func, (x, y), order=2, grad_outputs=small, seed=seed)
        assert report.failure is not None
        assert report.failure.kind == "nonlinear"


@pytest.mark.parametrize("keywords", [{"engine": "dense"}, {}, {"fast_mode": True}], ids=str)
@pytest.mark.parametrize("n", [1, 3, 12, 200])
def test_the_version_of_grad_output_counts_its_values(n: int, keywords: dict[str, Any]) -> None:
    """As in torch's checker, which writes into one grad_output, the version counter shows that the values changed."""
    kept: list[tuple[Tensor, int, Tensor]] = []

    def keeps_by_version(grad_output: Tensor, x: Tensor) -> Tensor:
        for one, version, gradient in kept:
            if one is grad_output and version == one._version:
                return gradient.clone()
        kept.append((grad_output, grad_output._version, grad_output * x.cos()))
        return kept[-1][2].clone()

    x = torch.randn(n, dtype=torch.float64, requires_grad=True)
    func = custom(torch.sin, keeps_by_version)
    assert torch.autograd.gradcheck(func, (x,))
    assert fastgrad.gradcheck(func, (x,), **keywords)
    func = custom(torch.sin, lambda g, x: g * x.cos() * (1.1 if g._version else 1.0))
    assert not torch.autograd.gradcheck(func, (x,), raise_exception=False)
    assert not fastgrad.gradcheck(func, (x,), raise_exception=False, **keywords)


@pytest.mark.parametrize("keywords", [{}, {"fast_mode": True}, {"check_backward_ad": False}], ids=str)
@pytest.mark.parametrize("n", [2, 3, 12, 200])
@pytest.mark.parametrize("key", [id, torch.Tensor.data_ptr])
def test_tangents_that_are_kept_by_the_identity_or_address_of_a_tangent(
    key: Callable[[Tensor], int], n: int, keywords: dict[str, Any]
) -> None:
    """Torch's checker passes the same tangent repeatedly, with different values."""
    kept: dict[int, Tensor] = {}
    seen = []  # no identity is that of another tensor later

    class KeepsTangents(Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            return grad_output * ctx.saved_tensors[0].cos()

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            seen.append(tangent)
            if key(tangent) not in kept:
                kept[key(tangent)] = tangent * ctx.saved_tensors[0].cos()
            return kept[key(tangent)].clone()

    x = torch.randn(n, dtype=torch.float64, requires_grad=True)
    assert not fastgrad.gradcheck(KeepsTangents.apply, (x,), check_forward_ad=True, raise_exception=False, **keywords)


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("n", [1, 3, 40, 600])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("key", [Tensor.data_ptr, id])
def test_gradients_of_a_grad_output_that_is_kept_by_its_identity_fail(
    key: Callable[[Tensor], int], dtype: torch.dtype, n: int, fast_mode: bool
) -> None:
    """Differences and gradients with respect to grad_output are both zero: only a new tensor shows the error."""
    kept: dict[int, Tensor] = {}

    def backward(g: Tensor, x: Tensor) -> Tensor:
        return 2 * x.conj() * kept.setdefault(key(g), g.detach().clone())

    x = torch.randn(n, dtype=dtype, generator=torch.Generator().manual_seed(n)).requires_grad_()
    report = fastgrad.check(custom(torch.square, backward), x, order=2, fast_mode=fast_mode)
    assert report.failure is not None
    right = custom(torch.square, lambda g, x: 2 * x.conj() * g)
    assert fastgrad.check(right, x, order=2, fast_mode=fast_mode).passed


@pytest.mark.parametrize("keywords", [{}, {"fast_mode": True}, {"check_undefined_grad": False}], ids=str)
@pytest.mark.parametrize("n", [1, 3, 400])
@pytest.mark.parametrize("change", [lambda g: g.mul_(3), lambda g: g.data.mul_(2), lambda g: g.numpy().fill(7.0)])
def test_a_backward_that_modifies_its_grad_output_fails(
    change: Callable[[Tensor], object], n: int, keywords: dict[str, Any]
) -> None:
    """Its own gradient is right, and torch does not raise, because no grad_output of one element is expanded."""
    is_wrong = True

    def backward(g: Tensor, x: Tensor) -> Tensor:
        gradient = g * 2 * x
        if is_wrong:
            change(g)
        return gradient

    x = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).requires_grad_()
    func = custom(lambda x: x.square().sum(), backward)
    report = fastgrad.check(lambda x: (x.sin(), func(x)), x, **keywords)
    assert report.failure is not None
    assert report.failure.kind == "modified grad_output"
    assert "backward modifies the grad_output of result[1] in place" in str(report)
    is_wrong = False
    assert fastgrad.check(lambda x: (x.sin(), func(x)), x, **keywords).passed


@pytest.mark.parametrize("fast_mode", [False, True])
def test_each_call_that_modifies_a_grad_output_counts(fast_mode: bool) -> None:
    """Calls with a grad_output of zeros are not compared."""
    wrong = 0
    is_zero: list[bool] = []

    def backward(g: Tensor, x: Tensor) -> Tensor:
        gradient = 2 * x * g
        is_zero.append(not bool(g.any()))
        if len(is_zero) == wrong:
            g.data.mul_(3)
        return gradient

    x = torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    func = custom(lambda x: x.square().sum(), backward)
    assert fastgrad.check(func, x, fast_mode=fast_mode).passed
    for wrong in [call for call, zero in enumerate(is_zero, 1) if not zero]:
        is_zero.clear()
        assert not fastgrad.check(func, x, fast_mode=fast_mode).passed, wrong


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("n", [3, 3000])
def test_writing_the_same_values_into_a_grad_output_is_no_error(n: int, fast_mode: bool) -> None:
    def backward(g: Tensor, x: Tensor) -> Tensor:
        factor = 3.0 if is_wrong else 1.0
        return 2 * x * (g.clone() if 0 in g.stride() else (g.clone(), g.data.mul_(factor))[0])

    x = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).requires_grad_()
    for is_wrong in (False, True):
        report = fastgrad.check(custom(torch.square, backward), x, fast_mode=fast_mode)
        assert report.passed is not is_wrong
        assert report.failure is None or report.failure.kind == "modified grad_output"


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("n", [1, 3, 400, 3000])
@pytest.mark.parametrize("change", [lambda y: y.mul_(3), lambda y: y.data.mul_(2), lambda y: y.numpy().fill(7.0)])
def test_a_backward_that_modifies_an_output_fails(change: Callable[[Tensor], object], n: int, fast_mode: bool) -> None:
    """Its own gradient is right. Functions that use the output afterwards, or backwards that saved it, get others."""
    is_wrong = True

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.square()
            ctx.save_for_backward(x)
            ctx.y = y.detach()
            return y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            if is_wrong:
                change(ctx.y)
            return 2 * x * g

    def check() -> fastgrad.Report:
        x = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).requires_grad_()
        return fastgrad.check(Square.apply, x, fast_mode=fast_mode)

    report = check()
    assert report.failure is not None
    assert report.failure.kind == "modified output"
    assert "backward modifies result in place" in str(report)
    is_wrong = False
    assert check().passed


@pytest.mark.parametrize("keywords", [{}, {"fast_mode": True}, {"check_undefined_grad": False}], ids=str)
@pytest.mark.parametrize("n", [1, 3, 400])
@pytest.mark.parametrize("change", [lambda t: t.mul_(3), lambda t: t.zero_(), lambda t: t.data.mul_(2)])
def test_a_jvp_that_modifies_its_tangent_fails(
    change: Callable[[Tensor], Tensor], n: int, keywords: dict[str, Any]
) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, y: Tensor) -> Tensor:
            return x * y

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
            ctx.save_for_forward(*inputs)

        @staticmethod
        def jvp(ctx: Any, x_tangent: Tensor, y_tangent: Tensor) -> Tensor:
            x, y = ctx.saved_tensors
            result = x_tangent * y + x * y_tangent
            if is_wrong:
                change(y_tangent)
            return result

    x, y = (torch.randn(n, dtype=torch.float64, requires_grad=True) for _ in range(2))
    forward = {"check_forward_ad": True, "check_backward_ad": False} | keywords
    for is_wrong in (True, False):
        report = fastgrad.check(Product.apply, (x, y), **forward)
        assert report.passed is not is_wrong
    is_wrong = True
    report = fastgrad.check(Product.apply, (x, y), **forward)
    assert report.failure is not None
    assert report.failure.kind == "modified tangent"
    assert "modifies the tangent of" in str(report)


@pytest.mark.parametrize("keywords", [{}, {"engine": "compressed"}, {"fast_mode": True}], ids=str)
@pytest.mark.parametrize("checker", [fastgrad.gradcheck, fastgrad.gradgradcheck])
def test_an_input_without_elements_beside_many(checker: Any, keywords: dict[str, Any]) -> None:
    x, y, empty = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in (100, 100, 0))
    assert checker(lambda x, empty, y: (x.sin() * y, 2 * empty), (x, empty, y), **keywords)
    assert checker(lambda x, empty: torch.cat([x, empty]).sin(), (x, empty), **keywords)


@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize("fast_mode", [False, True])
def test_an_empty_output_before_one_with_a_single_element(fast_mode: bool, second_order: bool) -> None:
    empty, one = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in (0, 1))
    checker = fastgrad.gradgradcheck if second_order else fastgrad.gradcheck
    torchs = torch.autograd.gradgradcheck if second_order else torch.autograd.gradcheck
    for check in (checker, torchs):
        assert check(lambda x, y: (x * 2, y * y), (empty, one), fast_mode=fast_mode)
    assert checker(lambda x, y: x.sum() * y.sum(), (empty, one), fast_mode=fast_mode)
    wrong = custom(torch.square, lambda g, x: (3 * x * g).detach())
    assert not checker(lambda x, y: (x * 2, wrong(y)), (empty, one), fast_mode=fast_mode, raise_exception=False)


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("n", [2, 9, 40])
@pytest.mark.parametrize("noise", [1e-15, 1e-13])
def test_a_backward_that_rounds_otherwise_in_each_call_is_not_accused(noise: float, n: int, fast_mode: bool) -> None:
    """Rounding as from atomic additions in another order. As in torch, runs of the same graph must agree bit by bit."""
    generator = random.Random(n)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
            ctx.save_for_backward(x, g)
            return 2 * x * g

        @staticmethod
        def backward(ctx: Any, h: Tensor) -> tuple[Tensor, Tensor]:
            x, g = ctx.saved_tensors
            return 2 * h * g, 2 * x * h

    rounded = custom(torch.square, lambda g, x: Product.apply(x, g) * (1 + noise * generator.random()))
    x = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).requires_grad_()
    assert torch.autograd.gradgradcheck(rounded, x, fast_mode=fast_mode)
    assert fastgrad.gradgradcheck(rounded, x, fast_mode=fast_mode)
    numbers = itertools.count()
    varying = custom(torch.square, lambda g, x: 2 * x * g * (1 + noise * next(numbers)))
    assert not fastgrad.gradcheck(varying, x, fast_mode=fast_mode, raise_exception=False)


class Drifting:
    """sin plus a value that grows in each call: the error of differences is constant, and smaller at larger steps."""

    def __init__(self, drift: float) -> None:
        self.drift, self.calls = drift, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.sin() + self.calls * self.drift


@pytest.mark.parametrize("keywords", [{}, {"fast_mode": True}, {"engine": "compressed"}, {"engine": "dense"}], ids=str)
@pytest.mark.parametrize("n", [5, 40])
@pytest.mark.parametrize("drift", [1e-10, 1e-9, 1e-8, 1e-7])
def test_values_that_drift_from_call_to_call(drift: float, n: int, keywords: dict[str, Any]) -> None:
    x = torch.linspace(0.3, 0.9, n, dtype=torch.float64).requires_grad_()
    assert not torch.autograd.gradcheck(Drifting(drift), x, raise_exception=False)
    report = fastgrad.check(Drifting(drift), x, **keywords)
    assert report.failure is not None
    assert report.failure.kind == "nondeterministic func" or report.causes[0].name == "nondeterminism"
    # Too small to affect the differences of either checker.
    assert torch.autograd.gradcheck(Drifting(1e-13), x)
    assert fastgrad.check(Drifting(1e-13), x, **keywords).verdict == "passed"


def test_a_func_that_returns_the_same_graph_again() -> None:
    """Torch's checker runs a VJP that frees the graph, and treats the next RuntimeError as a wrong gradient."""
    known: dict[tuple[float, ...], Tensor] = {}

    def memoized(x: Tensor) -> Tensor:
        return known.setdefault(tuple(x.tolist()), x.sin())

    x = torch.linspace(0.3, 0.9, 5, dtype=torch.float64).requires_grad_()
    assert not torch.autograd.gradcheck(memoized, x, raise_exception=False)
    known.clear()
    assert fastgrad.gradcheck(memoized, x)


def test_a_backward_that_returns_the_same_tensor_again() -> None:
    """The graph of the tensor contains those of earlier calls, which torch's checker has freed."""
    func = function(torch.sin, lambda g, x: buffer.copy_(g * x.cos()))
    x = torch.linspace(0.3, 0.9, 5, dtype=torch.float64).requires_grad_()
    buffer = torch.zeros(5, dtype=torch.float64)
    assert not torch.autograd.gradgradcheck(func, x, raise_exception=False)
    buffer = torch.zeros(5, dtype=torch.float64)
    assert fastgrad.gradgradcheck(func, x)


def scaled_sines(scale: float, error: float) -> Func:
    """The function s sin(s x) + s x[0], s = scale; its jvp adds error times the tangent of the last element."""

    class ScaledSines(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return (scale * x[:-1]).sin() * scale + scale * x[:1]

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.save_for_forward(*inputs)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            slope = scale**2 * (scale * x[:-1]).cos()
            return slope * tangent[:-1] + scale * tangent[:1] + error * tangent[-1:]

    return ScaledSines.apply


@pytest.mark.parametrize("n", [20, 50, 400, 3000])
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
def test_the_bound_of_fast_forward_mode_is_true(scale: float, n: int) -> None:
    """Large derivatives hide small errors, as the certificate states."""
    x = torch.linspace(0.3, 0.9, n, dtype=torch.float64).requires_grad_()
    keywords = {"fast_mode": True, "check_forward_ad": True, "check_backward_ad": False}
    keywords |= {"check_undefined_grad": False, "check_batched_grad": False}
    right = fastgrad.check(scaled_sines(scale, 0.0), x, **keywords)
    assert right.verdict == "passed", str(right)
    (bound,) = (certificate.bound for certificate in right.certificates if "forward mode is wrong" in certificate.claim)
    for sign in (1.0, -1.0):
        for seed in range(3):
            wrong = fastgrad.check(scaled_sines(scale, 1.05 * sign * bound), x, seed=seed, **keywords)
            assert not wrong.passed


def nearly_diagonal(n: int, seed: int, dtype: torch.dtype) -> Tensor:
    """The identity with one to nine other entries, in a corner or anywhere."""
    generator = random.Random(seed)
    matrix = torch.eye(n, dtype=dtype)
    rows, columns = (3, 4) if generator.random() < 0.6 else (n, n)
    for _ in range(generator.randint(1, 9)):
        entry = complex(generator.choice([0.5, -1.3, 0.02]), 0.7 if dtype.is_complex else 0.0)
        matrix[generator.randrange(rows), generator.randrange(columns)] = entry if dtype.is_complex else entry.real
    return matrix


@pytest.mark.parametrize("engine", ["auto", "compressed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_entries_next_to_those_of_a_pointwise_function(seed: int, dtype: torch.dtype, engine: str) -> None:
    """The guessed pattern lacks these entries, so other entries are sums of two. No sum is reported as an entry."""
    n = 800 if dtype is torch.float64 else 300
    matrix = nearly_diagonal(n, seed, dtype)
    x = torch.randn(n, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    right = custom(lambda x: matrix @ x, lambda grad, x: matrix.mH @ grad)
    assert fastgrad.check(right, x, engine=engine).verdict == "passed"
    wrong_matrix = matrix.clone()
    row, column = random.Random(seed).choice(matrix.nonzero().tolist())
    wrong_matrix[row, column] *= 1.05
    report = fastgrad.check(custom(lambda x: matrix @ x, lambda grad, x: wrong_matrix.mH @ grad), x, engine=engine)
    assert report.failure is not None
    assert report.failure.comparison is not None
    worst = report.failure.comparison.worst
    assert worst is not None
    assert (*worst.output_index, *worst.input_index) == (row, column)
    assert "not deterministic" not in str(report)


@pytest.mark.parametrize("n", [400, 5000])
@pytest.mark.parametrize(
    "func",
    [
        lambda x: torch.cat([x[:2].softmax(0), x[2:].sigmoid()]),
        lambda x: torch.cat([x[:2].sum()[None], x[:2].sum()[None], x[2:].sin()]),
        lambda x: torch.cat([x[:-3].tanh(), x[-3:].softmax(0)]),
    ],
)
def test_functions_that_are_pointwise_nearly_everywhere(func: Func, n: int) -> None:
    x = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for keywords in ({}, {"engine": "compressed"}):
        assert fastgrad.check(func, x, **keywords).verdict == "passed"


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("n", [30, 1000])
def test_a_few_columns_with_many_entries(n: int, order: int) -> None:
    matrix = torch.zeros(3, n, dtype=torch.float64)
    matrix[:, :3] = torch.tensor([[0.7, 0, 0], [1.1, 0.9, 0], [0.6, 1.3, 0.8]], dtype=torch.float64)
    x, g = (torch.linspace(0.3, 1.2, size, dtype=torch.float64).requires_grad_() for size in (n, 3))
    for keywords in ({}, {"engine": "compressed"}):
        assert fastgrad.check(lambda x: matrix @ (x * x), x, order=order, **keywords).verdict == "passed"
        assert fastgrad.check(lambda x, g: x * (matrix.t() @ g), (x, g), order=order, **keywords).verdict == "passed"


@pytest.mark.parametrize("seed", range(4))
def test_complex_outputs_of_products_with_conjugates(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, q = (
        torch.randn(4, 300, dtype=torch.complex128, generator=generator)
        * (torch.rand(4, 300, generator=generator) < 0.3)
        for _ in range(2)
    )
    x = torch.randn(300, dtype=torch.complex128, generator=generator).requires_grad_()
    assert fastgrad.check(lambda x: a @ x + q @ x.conj(), x, engine="compressed").verdict == "passed"


ONCE = {
    "pointwise": lambda x: x.sin(),
    "banded": lambda x: (x[1:] * x[:-1]).sin(),
    "permuted": lambda x: x.sin().flip(0) * x.roll(7),
    "row sums": lambda x: x.reshape(30, 10).sin().sum(1),
}


@pytest.mark.parametrize("name", ONCE)
def test_other_values_in_one_call_of_a_search_for_a_pattern(name: str) -> None:
    """The call is one of those with which no entry is compared: next to x, at x, at probes, and at rejected patterns.

    Not found: calls that record a graph for VJPs of which only zeros count, and some of those of certificates.
    """
    func = ONCE[name]
    x = torch.linspace(0.3, 0.9, 300, dtype=torch.float64).requires_grad_()
    made = wrong_call = 0

    def once(x: Tensor) -> Tensor:
        nonlocal made
        made += 1
        return func(x) * (1.01 if made == wrong_call else 1.0)

    assert fastgrad.check(once, x, engine="compressed").verdict == "passed"
    passed = []
    for call in range(2, min(made, 60) + 1):
        made, wrong_call = 0, call
        if fastgrad.check(once, x, engine="compressed").verdict == "passed":
            passed.append(call)
    assert len(passed) <= 6, passed


CANCELLATION: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "1 - cos": (lambda x: 1 - x.cos(), torch.sin),
    "pseudo-Huber": (lambda x: (1 + x * x).sqrt() - 1, lambda x: x / (1 + x * x).sqrt()),
    "cosh - 1": (lambda x: x.cosh() - 1, torch.sinh),
    "softplus": (lambda x: (x.exp() + (-x).exp()).log() - x.new_tensor(2.0).log(), torch.tanh),
}


@pytest.mark.parametrize("name", CANCELLATION)
@pytest.mark.parametrize(("factor", "at"), [(1e6, 1.3e-8), (1e6, 3e-8), (1e3, 1.2e-7)])
@pytest.mark.parametrize("fast_mode", [False, True])
def test_a_func_that_cancellation_makes_constant_at_small_steps(
    name: str, factor: float, at: float, fast_mode: bool
) -> None:
    value, derivative = CANCELLATION[name]
    x = torch.tensor([at, -1.1 * at, 1.25 * at], dtype=torch.float64, requires_grad=True)
    right = custom(lambda x: factor * value(x), lambda g, x: factor * g * derivative(x))
    missing = custom(lambda x: factor * value(x), lambda g, x: torch.zeros_like(g))
    assert fastgrad.check(right, x, fast_mode=fast_mode).verdict == "passed"
    assert fastgrad.check(missing, x, fast_mode=fast_mode).verdict == "failed"


@pytest.mark.parametrize("factor", [1e4, 1e6, 1e8])
@pytest.mark.parametrize("at", [1e-9, 4e-9])
def test_sums_of_many_elements_that_cancellation_makes_constant(factor: float, at: float) -> None:
    matrix = torch.randn(3, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = (at * matrix[0]).requires_grad_()
    cosine = custom(lambda x: factor * (1 - x.cos()), lambda g, x: torch.zeros_like(g))
    report = fastgrad.check(lambda x: matrix @ cosine(x), x, fast_mode=True)
    assert report.verdict == "failed"


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize(
    "func",
    [
        lambda x: (x - 1e-7).relu(),
        lambda x: 1e6 * (x - 1e-7).relu() ** 2,
        lambda x: (x.abs() - 2e-7).relu(),
        lambda x: (x - 3e-7).relu() + 2 * (-x - 2e-7).relu(),
        lambda x: x.clamp(min=2e-7),
    ],
)
def test_a_func_that_kinks_make_constant_at_small_steps(func: Func, fast_mode: bool) -> None:
    matrix = torch.randn(3, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = (1e-8 * matrix[0]).requires_grad_()
    assert fastgrad.check(func, x, fast_mode=fast_mode).verdict == "passed"
    assert fastgrad.check(lambda x: matrix @ func(x), x, fast_mode=fast_mode).verdict == "passed"


@pytest.mark.parametrize(
    "keywords", [{}, {"engine": "compressed"}, {"check_forward_ad": True, "check_backward_ad": False}]
)
@pytest.mark.parametrize(("n", "seed"), [(60, 6), (60, 14), (60, 35), (150, 10), (150, 12), (150, 35)])
def test_an_entry_that_rounding_inside_func_hides_at_small_steps(n: int, seed: int, keywords: dict[str, Any]) -> None:
    """The term of this entry is rounded to float32: differences at eps show it, and smaller ones show zero."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(n, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    row = torch.zeros(n, dtype=torch.float64).index_fill_(0, torch.tensor(seed % n), 1.0)

    def func(a: Tensor, b: Tensor) -> Tensor:
        return a - 2 * b + row * (1e-3 * b[(3 * seed + 1) % n].detach()).float().double()

    assert fastgrad.check(func, (a, b), **keywords).verdict == "failed"


@pytest.mark.parametrize("n", [1, 6, 20, 100])
@pytest.mark.parametrize("fast_mode", [False, True])
def test_custom_code_after_the_first_call_of_func(n: int, fast_mode: bool) -> None:
    """As if func compiled a kernel in its first call. The tests must run on graphs with this kernel."""

    def after_the_first_call(custom: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        calls = itertools.count()
        return lambda x: x.sin() if next(calls) == 0 else custom(x.sin())

    x = torch.linspace(0.2, 1.0, n, dtype=torch.float64, requires_grad=True)
    wrong = function(torch.clone, lambda grad, _: grad if grad.any() else torch.ones_like(grad))
    found = fastgrad.check(after_the_first_call(wrong), x, fast_mode=fast_mode).failure
    assert found is not None
    assert found.kind in ("not multiplied by grad_output", "undefined grad not zero")
    right = fastgrad.check(after_the_first_call(function(torch.clone, lambda grad, _: grad)), x, fast_mode=fast_mode)
    assert right.passed
    assert STARTED_AGAIN in right.notes


@pytest.mark.parametrize("n", [1, 6, 20, 100, 400])
@pytest.mark.parametrize("fast_mode", [False, True])
def test_a_wrong_first_graph_before_right_custom_code(n: int, fast_mode: bool) -> None:
    """The check may not start again without the errors of the first graph."""
    calls, right = itertools.count(), function(torch.sin, lambda grad, x: grad * x.cos())

    def func(x: Tensor) -> Tensor:
        return x.detach().sin() * (1 + x - x.detach()) if next(calls) == 0 else right(x)

    x = torch.linspace(0.2, 1.0, n, dtype=torch.float64, requires_grad=True)
    assert not fastgrad.check(func, x, fast_mode=fast_mode).passed


@pytest.mark.parametrize("n", [60, 100, 150, 300])
@pytest.mark.parametrize("check_forward_ad", [False, True])
def test_only_the_first_call_of_func_computes_another_function(n: int, check_forward_ad: bool) -> None:
    calls = itertools.count()
    x = torch.linspace(0.2, 1.0, n, dtype=torch.float64, requires_grad=True)

    def func(x: Tensor) -> Tensor:
        return (x if next(calls) == 0 else x.sin()).softmax(0)

    assert not fastgrad.check(func, x, check_forward_ad=check_forward_ad).passed


@pytest.mark.parametrize("keywords", [{}, {"fast_mode": True}, {"check_forward_ad": True, "check_backward_ad": False}])
def test_outputs_that_are_empty_only_at_x(keywords: dict[str, Any]) -> None:
    x = torch.tensor([-1.0, 0.0, -2.0], dtype=torch.float64, requires_grad=True)
    for checker in (torch.autograd.gradcheck, fastgrad.gradcheck):
        with pytest.raises(AssertionError, match="same shape when inputs are perturbed"):
            checker(lambda x: x[x > 0], (x,), **keywords)
    assert fastgrad.gradcheck(lambda x: x[x > 1], (x,), **keywords)
