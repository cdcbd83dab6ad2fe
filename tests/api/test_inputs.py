"""fastgrad.check: nested inputs, keyword arguments, modules; names, steps and tolerances of each input."""

from __future__ import annotations

import inspect
import random
import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

import fastgrad
from fastgrad.engines.sketch import directional_differences
from fastgrad.problem.problem import Problem
from fastgrad.report.messages import failure_message
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings
from fastgrad.verdict.confirm import difference_along
from fastgrad.verdict.numerical_certificate import STARTS
from tests.costs import set_costs

ENGINES = [
    {"engine": "dense"},
    {"engine": "compressed"},
    {"engine": "sketch", "fast_mode": True},
]
each_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda keywords: keywords["engine"])


def leaf(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


class Off(torch.autograd.Function):
    """The identity, with a gradient of grad_output * factor + constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, constant: float) -> Tensor:
        ctx.factor, ctx.constant = factor, constant
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return OffBackward.apply(grad_output, ctx.factor, ctx.constant), None, None


class OffBackward(torch.autograd.Function):
    """The linear map grad_output -> grad_output * (factor + constant)."""

    @staticmethod
    def forward(ctx: Any, grad_output: Tensor, factor: float, constant: float) -> Tensor:
        ctx.scale = factor + constant
        return grad_output * ctx.scale

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return grad_output * ctx.scale, None, None


def off(x: Tensor, factor: float = 1.0, constant: float = 0.0) -> Tensor:
    return Off.apply(x, factor, constant)


def failing_names(report: Report) -> tuple[str, str]:
    """The output and the input of the failure; each is in the first line of the message, or in the line "where"."""
    failure = report.failure
    assert failure is not None
    assert failure.output_position is not None
    assert failure.input_position is not None
    output, input_ = report.output_names[failure.output_position], report.input_names[failure.input_position]
    text = failure_message(report)
    first, key_phrase = text.splitlines()[:2]
    assert f" {input_} (" in first
    assert key_phrase == f"Jacobian mismatch for output {failure.output} with respect to input {failure.input}:"
    where = [line for line in text.splitlines() if line.startswith("  where  ")]
    if f" through {output} is wrong" in first or output == "result":
        assert not where
    else:
        assert where == [f"  where      output {failure.output} is {output}"]
    assert f"  worst      d {output}" in text
    assert f" / d {input_}" in text
    assert "  reproduce  fastgrad.check(..., " in text
    return output, input_


@dataclass(frozen=True)
class Batch:
    x: Tensor
    others: list[Any]
    scale: float = 3.0
    late: Any = field(default=None, init=False)


Pair = namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    ("wrap", "unwrap", "name"),
    [
        (lambda x: [x], lambda v: v[0], "inputs[1][0]"),
        (lambda x: {"weight": x, "n": 3}, lambda v: v["weight"], 'inputs[1]["weight"]'),
        (lambda x: {7: (None, x)}, lambda v: v[7][1], "inputs[1][7][1]"),
        (lambda x: OrderedDict({"it's": [[x]]}), lambda v: v["it's"][0][0], """inputs[1]["it's"][0][0]"""),
        (lambda x: Pair(1, x), lambda v: v.right, "inputs[1].right"),
        (lambda x: Batch(x, []), lambda v: v.x, "inputs[1].x"),
        (lambda x: [Batch(torch.ones(2), [{"y": x}])], lambda v: v[0].others[0]["y"], 'inputs[1][0].others[0]["y"]'),
    ],
)
def test_nested_inputs_are_checked_and_named(wrap: Any, unwrap: Any, name: str) -> None:
    a, x = leaf(2), leaf(2, 3, seed=1)
    value = wrap(x)

    def func(a: Tensor, nested: Any) -> Tensor:
        assert type(nested) is type(value)
        return unwrap(nested).sin() * a.unsqueeze(1)

    report = fastgrad.check(func, (a, value))
    assert report.passed
    assert report.input_names == ("inputs[0]", name)
    assert (report.n, report.output_names) == (8, ("result",))
    wrong = fastgrad.check(lambda a, nested: off(unwrap(nested), 1.5).sin() * a.unsqueeze(1), (a, value))
    assert failing_names(wrong) == ("result", name)


def test_nested_results_are_checked_and_named() -> None:
    x = leaf(3)

    def func(x: Tensor, wrong: bool) -> Any:
        y = off(x, 2.0 if wrong else 1.0)
        return {"loss": x.sum(), "n": 3, "parts": [Batch(x * 2, [y.cos(), "text"]), None], "counts": torch.ones(2)}

    assert fastgrad.check(func, (x, False)).passed
    report = fastgrad.check(func, (x, True))
    assert report.output_names == (
        'result["loss"]',
        'result["parts"][0].x',
        'result["parts"][0].others[0]',
        'result["counts"]',
    )
    assert failing_names(report) == ('result["parts"][0].others[0]', "inputs[0]")


def test_keyword_arguments_are_checked_and_named() -> None:
    x, scale, shift = leaf(4), leaf(1, seed=1), leaf(4, seed=2)

    def func(x: Tensor, *, scale: Tensor, extra: dict[str, Any], power: int, wrong: bool = False) -> Tensor:
        return (x * off(scale, -1.0 if wrong else 1.0)) ** power + extra["shift"][0]

    kwargs = {"scale": scale, "extra": {"shift": (shift,)}, "power": 2}
    report = fastgrad.check(func, x, kwargs=kwargs)
    assert report.passed
    assert report.input_names == ("inputs[0]", 'kwargs["scale"]', 'kwargs["extra"]["shift"][0]')
    report = fastgrad.check(func, x, kwargs={**kwargs, "wrong": True})
    assert failing_names(report) == ("result", 'kwargs["scale"]')
    # Only keyword arguments require grad.
    assert fastgrad.check(func, x.detach(), kwargs=kwargs).input_names == report.input_names[1:]


def test_dataclasses_stay_unregistered() -> None:
    known = set(_pytree.SUPPORTED_NODES)
    assert fastgrad.check(lambda batch: Batch(batch.x * 2, []), (Batch(leaf(2), []),)).passed
    assert set(_pytree.SUPPORTED_NODES) == known


def test_containers_that_the_user_registered() -> None:
    class Box:
        def __init__(self, held: Any) -> None:
            self.held = held

    _pytree.register_pytree_node(Box, lambda box: ([box.held], None), lambda held, _: Box(*held))
    try:
        report = fastgrad.check(lambda box: Box([off(box.held, 2.0)]), (Box(leaf(2)),))
    finally:
        del _pytree.SUPPORTED_NODES[Box]
    assert failing_names(report) == ("result[0][0]", "inputs[0][0]")


def test_func_gets_the_callers_tensors_in_containers_of_its_own() -> None:
    x, config = leaf(3), {"depth": [1]}
    inputs = [{"x": x}, config]

    def func(values: dict[str, Tensor], config: Any) -> Tensor:
        assert config is inputs[1]  # nothing to check in it
        assert values is not inputs[0]
        taken = values.pop("x")
        assert taken is x
        values["y"] = taken
        return taken.exp()

    assert fastgrad.check(func, inputs).passed
    assert inputs[0] == {"x": x}


def test_the_same_tensor_at_two_places_is_perturbed_once() -> None:
    x = leaf(4)
    report = fastgrad.check(lambda pair, *, factor: pair[0] * factor, ((x,),), kwargs={"factor": x})
    assert report.passed
    assert (report.n, report.input_names) == (4, ("inputs[0][0]", 'kwargs["factor"]'))


class Layer(nn.Module):
    """A linear layer, batch norm, and a factor that is shared with a submodule; `wrong` parameters are off."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.float64, generator=generator))
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.norm = nn.BatchNorm1d(2, dtype=torch.float64)
        self.inner = nn.Module()
        self.inner.factor = nn.Parameter(torch.tensor([0.5, 1.5], dtype=torch.float64))
        self.alias = self.inner
        self.wrong = wrong

    def forward(self, batch: dict[str, Tensor], shift: Tensor | float = 0.0) -> dict[str, Tensor]:
        weight, factor, scale, x = self.weight, self.alias.factor, self.norm.weight, batch["x"]
        if self.wrong:
            # The value stays; the gradient is doubled.
            one = {"weight": weight, "inner.factor": factor, "norm.weight": scale, "x": x}[self.wrong]
            x = x + (off(one, 2.0) - one).sum()
        normal = self.norm(x @ weight + shift) * factor * self.frozen
        return {"loss": normal.square().sum(), "rows": normal.sum(1)}


def layer(wrong: str = "", train: bool = True) -> tuple[Layer, dict[str, Tensor]]:
    return Layer(wrong).train(train), {"x": leaf(4, 3)}


NAMES = ('inputs[0]["x"]', "module.weight", "module.norm.weight", "module.norm.bias", "module.inner.factor")


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("engine", [{}, {"engine": "compressed"}], ids=["auto", "compressed"])
def test_modules_with_their_parameters(train: bool, engine: dict[str, Any]) -> None:
    module, batch = layer(train=train)
    report = fastgrad.check(module, batch, **engine)
    assert report.passed, failure_message(report)
    # A shared parameter counts once, and one that does not require grad not at all.
    assert report.input_names == NAMES
    assert report.output_names == ('result["loss"]', 'result["rows"]')
    assert report.n == 12 + 6 + 2 + 2 + 2
    assert fastgrad.check(module, batch, wrt="parameters", **engine).input_names == NAMES[1:]
    assert fastgrad.check(module, batch, wrt="inputs", **engine).input_names == NAMES[:1]
    plain = {"x": batch["x"].detach()}
    assert fastgrad.check(module, plain, kwargs={"shift": leaf(1)}, **engine).input_names == (
        'kwargs["shift"]',
        *NAMES[1:],
    )


@pytest.mark.parametrize("wrong", ["weight", "inner.factor", "norm.weight"])
@pytest.mark.parametrize("wrt", ["parameters", "both"])
def test_planted_errors_in_parameters_are_named(wrong: str, wrt: Any) -> None:
    module, batch = layer(wrong, train=False)
    assert failing_names(fastgrad.check(module, batch, wrt=wrt)) == ('result["loss"]', f"module.{wrong}")
    assert fastgrad.check(module, batch, wrt="inputs").passed


def test_planted_errors_in_the_inputs_of_a_module_are_none_of_its_parameters() -> None:
    module, batch = layer("x", train=False)
    assert failing_names(fastgrad.check(module, batch)) == ('result["loss"]', NAMES[0])
    assert fastgrad.check(module, batch, wrt="parameters").passed


@pytest.mark.parametrize("seen", [True, False])
def test_batch_norm_in_training_mode_with_a_planted_error(seen: bool) -> None:
    """The running statistics change without their version counters; backward needs them as forward left them."""
    module = nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(3, dtype=torch.float64), last=Scaled(1.5 if seen else 1.0)))
    before = [buffer.clone() for buffer in module.buffers()]
    report = fastgrad.check(module, leaf(5, 3))
    assert report.passed is not seen
    if seen:
        assert failing_names(report) == ("result", "module.last.factor")
    assert all(torch.equal(buffer, old) for buffer, old in zip(module.buffers(), before, strict=True))


class Scaled(nn.Module):
    """x * factor; the gradient of factor is `wrong` times the right one."""

    def __init__(self, wrong: float = 1.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64))
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        return x * off(self.factor, self.wrong)


class Stateful(nn.Module):
    """A module whose result depends on what the last call left in its buffers, in four ways."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.ones(3, dtype=torch.float64))
        self.register_buffer("cache", None)
        self.register_buffer("silent", torch.ones((), dtype=torch.float64), persistent=False)
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
        self.seen: list[tuple[float, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        assert self.cache is None
        self.seen.append((self.count.item(), self.mean.sum().item(), self.silent.item()))
        result = x * self.weight * self.silent.item() * (1 + self.count) * self.mean.detach()
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * result.sum()  # another tensor, with a graph
        self.cache = x.detach().clone()
        self.silent.data.mul_(1.01)  # no version counter shows it
        return result


@pytest.mark.parametrize("keywords", [{}, {"order": 2}, {"check_forward_ad": True}, *ENGINES[1:]])
def test_every_call_starts_from_the_same_buffers(keywords: dict[str, Any]) -> None:
    module = Stateful()
    count, mean, silent = module.count, module.mean, module.silent
    x = leaf(6, 3)
    report = fastgrad.check(module, x, **keywords)
    assert report.passed, failure_message(report)
    assert set(module.seen) == {(0.0, 3.0, 1.0)}
    assert len(module.seen) >= 6
    assert module.count is count
    assert module.mean is mean
    assert module.silent is silent
    assert module.cache is None
    assert (count.item(), mean.tolist(), silent.item()) == (0.0, [1.0] * 3, 1.0)
    assert not mean.requires_grad


def test_buffers_that_gradients_flow_into() -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
            return x - self.mean

    module = Averaging()
    assert fastgrad.check(module, leaf(4, 3)).passed
    assert not module.mean.requires_grad
    assert module.mean.tolist() == [0.0] * 3


def test_only_buffers_that_change_are_written() -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(4.0, dtype=torch.float64).expand(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.table

    module = Watched()  # three elements share one place in memory: nothing can be copied into it
    with pytest.raises(RuntimeError, match="single memory location"):
        module.table.data.copy_(module.table.clone())
    assert fastgrad.check(module, leaf(3, 4)).passed


def test_second_derivatives_of_a_module() -> None:
    module, batch = layer(train=False)
    report = fastgrad.check(module, batch, order=2)
    assert report.passed, failure_message(report)
    assert report.input_names == (*NAMES, 'grad_outputs["loss"]', 'grad_outputs["rows"]')
    assert report.output_names == tuple(f"grad({name})" for name in NAMES)
    assert report.settings.grad_outputs == "random"

    class Cubed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0.5, 1.5], dtype=torch.float64))
            self.unused = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"y": Cube.apply(x * self.weight)}

    wrong = fastgrad.check(Cubed(), leaf(3, 2), order=2)
    # An input that func does not use has no gradient.
    assert wrong.output_names == ("grad(inputs[0])", "grad(module.weight)")
    assert failing_names(wrong) == ("grad(inputs[0])", "inputs[0]")
    assert "fastgrad.check(..., order=2, eps=1e-06, " in failure_message(wrong)
    assert fastgrad.check(Cubed(), leaf(3, 2)).passed


class Cube(torch.autograd.Function):
    """x^3, with a right first derivative and a wrong second one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x.detach() * grad_output


def test_given_grad_outputs_may_be_nested() -> None:
    module, batch = layer(train=False)
    grads = {"loss": leaf(seed=7), "rows": leaf(4, seed=8).detach()}
    report = fastgrad.check(module, batch, order=2, grad_outputs=grads)
    assert report.passed
    assert report.input_names == (*NAMES, 'grad_outputs["loss"]', 'grad_outputs["rows"]')
    assert report.n == 24 + 1  # the gradient of the rows does not require grad
    flat = fastgrad.check(module, batch, order=2, grad_outputs=list(grads.values()), eps=[1e-6] * 5 + [1e-5])
    assert flat.input_names[-2:] == ("grad_outputs[0]", "grad_outputs[1]")
    assert flat.settings.inputs[-1].eps == 1e-5
    ones = fastgrad.check(module, batch, order=2, grad_outputs="ones", check_fwd_over_rev=True)
    assert ones.passed
    assert (ones.n, ones.settings.grad_outputs, ones.jvps > 0) == (24, "ones", True)
    gapped = fastgrad.check(module, batch, order=2, gen_non_contig_grad_outputs=True)
    assert gapped.settings.grad_outputs == "non-contiguous"


def test_forward_mode_reaches_parameters() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            return grad_output * 2

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return tangent * 3

    class Doubling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, Wrong.apply(self.weight), self.bias)

    module = Doubling(3, 2, dtype=torch.float64)
    assert fastgrad.check(module, leaf(4, 3)).passed
    report = fastgrad.check(module, leaf(4, 3), check_forward_ad=True, check_backward_ad=False)
    assert report.failure is not None
    assert report.failure.mode == "forward"
    assert report.input_names[report.failure.input_position or 0] == "module.weight"
    keywords = {"check_forward_ad": True, "check_batched_forward_grad": True, "check_batched_grad": True}
    assert fastgrad.check(nn.Linear(3, 2, dtype=torch.float64), leaf(4, 3), **keywords).passed


def test_recurrent_modules_hold_their_own_parameters_again() -> None:
    module = nn.RNN(2, 2, dtype=torch.float64)
    report = fastgrad.check(module, leaf(2, 2), check_forward_ad=True)
    assert report.passed
    assert report.input_names[1] == "module.weight_ih_l0"
    assert report.output_names == ("result[0]", "result[1]")
    # These modules list their parameters in addition to the dictionary that every module has.
    assert [id(own) for own in module._flat_weights] == [id(parameter) for parameter in module.parameters()]


def test_parameters_in_single_precision_warn_by_name() -> None:
    with pytest.warns(
        UserWarning, match=r"module\.0\.weight requires gradient and is not a double precision"
    ) as caught:
        fastgrad.check(nn.Sequential(nn.Linear(2, 1)), leaf(2, 2).detach().float(), eps=1e-2, atol=1e-2)
    assert caught[0].filename == __file__


# Third and fourth derivatives.


class _Quartic(torch.autograd.Function):
    """x^4, with half of its third derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * _QuarticSlope.apply(x)


class _QuarticSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 4 * x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 12 * x * x.detach()


@pytest.mark.parametrize("keywords", [{}, {"fast_mode": True}, {"grad_outputs": "ones"}])
def test_third_and_fourth_derivatives(keywords: dict[str, Any]) -> None:
    x = leaf(4)
    for order in (1, 2, 3, 4):
        own = keywords if order > 1 else {}
        assert fastgrad.check(torch.sin, x, order=order, **own).passed
        report = fastgrad.check(_Quartic.apply, x, order=order, **own)
        assert report.passed == (order < 3)
        assert len(set(report.input_names)) == len(report.input_names)
    third = fastgrad.check(_Quartic.apply, x, order=3)
    assert third.input_names == ("inputs[0]", "grad_outputs", "grad_output of grad(inputs[0])")
    assert third.output_names == ("grad(inputs[0])", "grad(grad_outputs)")
    assert str(third).startswith("second backward of _Quartic: gradient of inputs[0]")
    assert "fastgrad.check(..., order=3, " in str(third)


def test_third_derivatives_where_gradients_are_constant() -> None:
    report = fastgrad.check(lambda a, b: torch.nextafter(a, b) + 2 * b, (leaf(3), leaf(3)), order=3)
    assert report.passed


# Steps and tolerances of each input.


@each_engine
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize(
    ("func", "shape"),
    # In the second case, columns of the two inputs share no row, so one group would suffice for all.
    [(lambda a, b: a.sin() * b**3, (5, 4)), (lambda a, b: (a.sin(), b**3), (3, 7))],
    ids=["product", "apart"],
)
def test_every_input_takes_its_own_step(engine: dict[str, Any], order: Any, func: Any, shape: tuple[int, int]) -> None:
    a, b = leaf(5, 4), leaf(*shape, seed=1)
    at = [value.detach().clone() for value in (a, b)]
    largest = [0.0, 0.0]

    def watched(*inputs: Tensor) -> Any:
        for i, value in enumerate(inputs):
            largest[i] = max(largest[i], (value.detach() - at[i]).abs().max().item())
        return func(*inputs)

    eps = {"inputs[0]": 1e-4, "inputs[1]": 1e-6}
    report = fastgrad.check(watched, (a, b), order=order, eps=eps, **engine)
    assert report.passed, failure_message(report)
    assert report.notes == ()
    assert report.plan is not None
    assert report.plan.engine == engine["engine"]
    # Joint steps are up to 1.5 times as large. Steps that certify a pattern are the same few times eps for all inputs.
    most = 1.51 * (STARTS[2] if engine["engine"] == "compressed" else 1.0)
    for moved, step in zip(largest, eps.values(), strict=True):
        assert 0.99 * step <= moved <= most * step
    assert [own.eps for own in report.settings.inputs][:2] == [1e-4, 1e-6]


def test_differences_along_a_direction_take_each_inputs_step() -> None:
    a, b, c = (leaf(3, seed=seed) for seed in range(3))
    moves: set[tuple[bool, ...]] = set()
    largest = [0.0] * 3

    def func(*inputs: Tensor) -> Tensor:
        moved = [(value - at).abs().max().item() for value, at in zip(inputs, (a0, b0, c0), strict=True)]
        moves.add(tuple(move > 0 for move in moved))
        largest[:] = map(max, largest, moved)
        return inputs[0] * 2 + inputs[1] * 3 + inputs[2] * 5

    a0, b0, c0 = (value.detach().clone() for value in (a, b, c))
    # Steps of 1e-6 and 4e-6. Errors of the third input count a tenth; its part of the direction is a tenth already.
    with Problem(func, (a, b, c), scales=[(1.0, 1.0), (4.0, 1.0), (4.0, 0.1)]) as problem:
        u = torch.full((9,), 1.0, dtype=torch.float64)
        u[6:] = 0.1
        assert difference_along(problem, u, 1e-6, 1) == pytest.approx(2 + 3 + 0.5, rel=1e-6)
        assert largest == pytest.approx([1e-6, 4e-6, 4e-6], rel=1e-3)
        assert moves == {(False,) * 3, (True, False, False), (False, True, False), (False, False, True)}
        steps = problem.displacement(torch.ones(9, dtype=torch.float64), 1e-6)
        assert steps.tolist() == pytest.approx([1e-6] * 3 + [4e-6] * 6)
        found = directional_differences(problem, Settings(), problem.base(), 1e-6, 2, 0, extrapolated=2)
        jacobian = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64).repeat_interleave(3)
        assert found.directions[:, 6:].abs().amax() < 0.16
        assert found.directions[:, :6].abs().amin() > 0.4
        expected = (found.directions * jacobian).view(2, 3, 3).sum(1)
        assert torch.allclose(found.derivatives, expected, rtol=0, atol=1e-8)


@each_engine
def test_planted_errors_are_found_at_any_step(engine: dict[str, Any]) -> None:
    for which in range(2):
        for eps in ((1e-4, 1e-7), (1e-7, 1e-4)):

            def func(a: Tensor, b: Tensor, which: int = which) -> Tensor:
                factors = [1.0, 1.0]
                factors[which] = 1.02
                return off(a, factors[0]).sin() * off(b, factors[1]).exp()

            report = fastgrad.check(func, (leaf(5, 4), leaf(5, 4, seed=1)), eps=eps, atol=(1e-5, 2e-5), **engine)
            assert failing_names(report) == ("result", f"inputs[{which}]")
            assert report.failure is not None
            assert report.failure.comparison is not None
            worst = report.failure.comparison.worst
            assert worst is not None
            assert worst.analytical == pytest.approx(1.02 * worst.numerical, rel=1e-4)
            text = failure_message(report)
            assert f"eps=({eps[0]:g}, {eps[1]:g}), atol=(1e-05, 2e-05), rtol=0.001" in text
            assert f"= atol {1e-5 * (1 + which):g} + rtol 0.001 * |numerical|" in text


def test_a_step_may_decide() -> None:
    """One input is rounded by func and needs a large step; the other is at the end of func's domain: a small step."""
    a = (torch.arange(4, dtype=torch.float64) / 8).requires_grad_()
    b = torch.full((4,), 2.0**-10, dtype=torch.float64, requires_grad=True)

    def func(a: Tensor, b: Tensor) -> Tensor:
        if bool((b <= 0).any()):
            raise ValueError("b must be positive")
        rounded = a + ((8 * a).round() / 8 - a).detach()
        return rounded + b.sqrt()

    assert fastgrad.check(func, (a, b), eps=(0.125, 1e-6)).passed
    assert failing_names(fastgrad.check(func, (a, b))) == ("result", "inputs[0]")
    with pytest.raises(ValueError, match="b must be positive"):
        fastgrad.check(func, (a, b), eps=0.125)


@each_engine
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("tolerance", "factor", "constant", "loose"),
    [("atol", 1.0, 2e-3, 1e-2), ("rtol", 1.02, 0.0, 1e-1)],
)
def test_every_input_has_its_own_tolerance(
    engine: dict[str, Any],
    which: int,
    tolerance: str,
    factor: float,
    constant: float,
    loose: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastgrad.checks.sketch.EXACT_CALLS", 0)  # a sketch first tries other step sizes
    inputs = leaf(5, 4), leaf(5, 4, seed=1)

    def func(a: Tensor, b: Tensor) -> Tensor:
        wrong = (factor, constant), (1.0, 0.0)
        a, b = (off(value, *wrong[which != i]) for i, value in enumerate((a, b)))
        return a / 8 + b.sin() / 8

    def verdict(numbers: Any) -> Report:
        return fastgrad.check(func, inputs, **{"rtol": 1e-4, tolerance: numbers}, **engine)

    tight = 1e-5 if tolerance == "atol" else 1e-4
    own, other = [tight, tight], [tight, tight]
    own[which] = other[1 - which] = loose
    assert failing_names(verdict(tight)) == failing_names(verdict(other)) == ("result", f"inputs[{which}]")
    report = verdict(own)
    assert report.passed, failure_message(report)
    assert not any("measured again" in note for note in report.notes)  # nothing differs at eps
    undecided_sums = any("decided by the exact engine" in note for note in report.notes)
    if tolerance == "rtol" or engine["engine"] != "sketch":
        assert undecided_sums == (engine["engine"] == "sketch")  # there is no common bound for all sums of entries
    assert report.plan is not None
    assert report.plan.engine == ("dense" if undecided_sums else engine["engine"])
    assert verdict({f"inputs[{which}]": loose, f"inputs[{1 - which}]": tight}).passed
    allowed = verdict(other).failure.comparison.worst.allowed  # type: ignore[union-attr]
    assert allowed < 1e-3  # the tolerance of the input that is wrong


def test_names_stand_for_all_below_them_and_longer_ones_say_more() -> None:
    module, batch = layer(train=False)
    eps = {"module": 1e-4, "module.norm": 1e-5, "module.norm.bias": 3e-5, "inputs[0]['x']": 1e-7}
    report = fastgrad.check(module, batch, eps=eps)
    assert report.passed
    assert [own.eps for own in report.settings.inputs] == [1e-7, 1e-4, 1e-5, 3e-5, 1e-4]
    assert report.settings.eps == 1e-7
    # Names that are missing have the default. If all tolerances are equal, there is one number.
    assert [own.atol for own in fastgrad.check(module, batch, atol={"module.weight": 1e-3}).settings.inputs] == [
        1e-5,
        1e-3,
        *[1e-5] * 3,
    ]
    uniform = fastgrad.check(module, batch, rtol=[1e-2] * 5)
    assert (uniform.settings.inputs, uniform.settings.rtol) == ((), 1e-2)


class Bent(torch.autograd.Function):
    """The identity; its derivatives in both modes are 1.002, or deviate from linearity by as much."""

    @staticmethod
    def forward(x: Tensor, linear: bool) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.linear = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad + 0.002 * (grad if ctx.linear else grad.abs()), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent + 0.002 * (tangent if ctx.linear else tangent.abs())


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize(
    "mode", [{}, {"check_forward_ad": True, "check_backward_ad": False}], ids=["reverse", "forward"]
)
@pytest.mark.parametrize("engine", [*ENGINES, {}], ids=["dense", "compressed", "sketch", "auto"])
def test_an_inputs_own_tolerance_excuses_it_alone(engine: dict[str, Any], mode: dict[str, Any], linear: bool) -> None:
    inputs = leaf(5, 4), leaf(5, 4, seed=1)
    func = lambda a, b: Bent.apply(a, linear) + b.sin()  # noqa: E731
    tight, own, other = (
        fastgrad.check(func, inputs, atol=atol, rtol=0.0, **mode, **engine)
        for atol in (1e-5, (2e-2, 1e-5), (1e-5, 2e-2))
    )
    # A sum over all inputs may be off by the largest tolerance of an input; the entries of an input may not.
    assert [tight.passed, own.passed, other.passed] == [False, True, False]
    assert not any("measured again" in note for note in own.notes)


@pytest.mark.parametrize(("name", "linear"), [("atol", True), ("atol", False), ("rtol", True)])
def test_own_tolerances_of_a_jvp_in_fast_mode(name: str, linear: bool) -> None:
    inputs = leaf(5, 4), leaf(5, 4, seed=1)
    keywords: dict[str, Any] = {"rtol": 0.0, "check_forward_ad": True, "check_backward_ad": False, **ENGINES[2]}
    verdicts = [
        fastgrad.check(lambda a, b: Bent.apply(a, linear) + b.sin(), inputs, **keywords | {name: numbers}).passed
        for numbers in ((1e-6, 1e-6), (2e-2, 1e-6))
    ]
    assert verdicts == [False, True]


@each_engine
def test_outputs_whose_gradients_meet_in_a_bent_backward(engine: dict[str, Any]) -> None:
    """Each is right to within the tolerance of its input, so both together must pass."""

    def func(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        shared = Bent.apply(a, False)
        return shared * 0.5, shared.neg() + b.sin()

    inputs = leaf(5, 4), leaf(5, 4, seed=1)
    verdicts = [
        fastgrad.check(func, inputs, atol=atol, rtol=0.0, **engine).passed for atol in ((2e-2, 1e-5), (1e-5, 2e-2))
    ]
    assert verdicts == [True, False]


def test_what_is_measured_again_is_judged_by_its_own_tolerance() -> None:
    """The truncation error of a large step is more than the tolerance of the input, the error of the gradient less."""
    func = lambda a, b: a**3 + (off(a, constant=2e-3) - a) + b.sin()  # noqa: E731
    keywords: dict[str, Any] = {"eps": (0.1, 1e-6), "rtol": 0.0, "engine": "dense"}
    report = fastgrad.check(func, (leaf(3), leaf(3, seed=1)), atol=(5e-3, 1e-5), **keywords)
    assert report.passed, failure_message(report)
    assert report.notes == (
        "3 of 9 entries of output 0 with respect to input 0 differ at eps=0.1 and agree when measured again with "
        "other steps",
    )
    assert not fastgrad.check(func, (leaf(3), leaf(3, seed=1)), atol=(1e-3, 5e-3), **keywords).passed


# Keywords.


def test_check_takes_every_keyword_of_gradcheck_and_gradgradcheck() -> None:
    own = inspect.signature(fastgrad.check).parameters
    for other in (fastgrad.gradcheck, fastgrad.gradgradcheck):
        for parameter in inspect.signature(other).parameters.values():
            if parameter.name in ("raise_exception", "check_sparse_nnz", "positional"):
                continue  # check raises no GradcheckError, and never had the old names
            assert own[parameter.name].default == parameter.default
    assert set(own) - set(inspect.signature(fastgrad.gradcheck).parameters) - set(
        inspect.signature(fastgrad.gradgradcheck).parameters
    ) == {"order", "kwargs", "wrt", "group", "checkpoint"}


CHANGED: dict[str, Any] = {
    "nondet_tol": 1e-9,
    "check_undefined_grad": False,
    "check_grad_dtypes": True,
    "check_batched_grad": True,
    "check_batched_forward_grad": True,
    "check_forward_ad": True,
    "check_fwd_over_rev": True,
    "fast_mode": True,
    "masked": True,
    "engine": "dense",
    "seed": 3,
    "confidence": 0.999,
    "memory_limit": 1 << 20,
    "progress": False,
    "eps": 1e-5,
    "atol": 1e-4,
    "rtol": 1e-2,
}


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", CHANGED)
def test_every_keyword_arrives(order: Any, name: str) -> None:
    spelled = {"check_fwd_over_rev": "check_forward_ad"}.get(name, name)
    keywords = {name: CHANGED[name]}
    if name == "check_batched_forward_grad":
        keywords["check_forward_ad"] = True
    if name == "check_fwd_over_rev" if order == 1 else "forward" in name:
        with pytest.raises(ValueError, match=f"applies only to order={3 - order}, but order is {order}"):
            fastgrad.check(torch.sin, leaf(2), order=order, **keywords)
        return
    report = fastgrad.check(torch.sin, leaf(2), order=order, **keywords)
    assert report.passed
    assert getattr(report.settings, spelled) == CHANGED[name] != getattr(Settings(progress=None), spelled)


def test_check_and_the_others_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    set_costs(monkeypatch, guess_seconds=0.0)  # otherwise the number of calls would depend on their time
    x = leaf(3, 4)
    wrong: Callable[..., Any] = lambda x: off(x, 1.1).exp()  # noqa: E731
    for order, other in ((1, fastgrad.gradcheck), (2, fastgrad.gradgradcheck)):
        with pytest.raises(fastgrad.GradcheckError) as raised:
            other(wrong, (x,), seed=2, engine="dense")
        mine, theirs = fastgrad.check(wrong, (x,), order=order, seed=2, engine="dense"), raised.value.report
        assert mine.settings == theirs.settings
        assert (mine.n, mine.m, mine.vjps) == (theirs.n, theirs.m, theirs.vjps)
        assert theirs.input_names == theirs.output_names == ()
        first, theirs_first = failure_message(mine).splitlines()[0], str(raised.value).splitlines()[0]
        assert first.replace("of inputs[0]", "of x") == theirs_first


@pytest.mark.parametrize(
    ("func", "inputs", "keywords", "error", "message"),
    [
        (torch.sin, leaf(2), {"order": 5}, ValueError, "order must be 1, 2, 3 or 4, got 5."),
        (torch.sin, leaf(2), {"order": True}, ValueError, "order must be 1, 2, 3 or 4, got True."),
        (torch.sin, leaf(2), {"wrt": "weights"}, ValueError, "wrt must be 'inputs', 'parameters' or 'both', got"),
        (torch.sin, leaf(2), {"wrt": "parameters"}, TypeError, "wrt='parameters' needs a torch.nn.Module as func, got"),
        ("sin", leaf(2), {}, TypeError, "func must be callable, got str."),
        (torch.sin, leaf(2), {"eps": b"a"}, TypeError, "eps must be a number, got b'a'."),
        (torch.sin, leaf(2), {"fast_mode": torch.ones(2)}, TypeError, "fast_mode must be True or False, got tensor("),
        (torch.sin, leaf(2), {"reference_device": 2**70}, ValueError, "reference_device must be None or a torch"),
        (
            torch.sin,
            leaf(2),
            {"order": 2, "grad_outputs": (torch.ones(3, dtype=torch.float64),)},
            ValueError,
            "output 0 has shape (2,), but its grad_output has shape (3,).",
        ),
        (torch.sin, leaf(2), {"checkpoint": 1}, TypeError, "checkpoint must be None or the path of a file, got 1."),
        (torch.sin, leaf(2), {"reference_device": "disk"}, ValueError, "reference_device must be None or a torch"),
        (torch.sin, leaf(2), {"confidence": -1.0}, ValueError, "confidence must be None or between 0 and 1, got -1.0"),
        (torch.sin, leaf(2), {"kwargs": [1]}, TypeError, "kwargs must be a mapping from names to keyword"),
        (torch.sin, leaf(2), {"kwargs": {1: 2}}, TypeError, "kwargs must be a mapping from names to keyword"),
        (
            torch.sin,
            leaf(2).detach(),
            {},
            ValueError,
            "check needs a tensor with requires_grad=True in inputs or kwargs",
        ),
        (nn.ReLU(), leaf(2).detach(), {}, ValueError, "in inputs, kwargs or the module, but there is none."),
        (nn.ReLU(), leaf(2), {"wrt": "parameters"}, ValueError, "check needs a parameter with requires_grad=True"),
        (nn.LazyLinear(2), leaf(2, 2), {}, ValueError, "Parameter weight of the module is uninitialized: call"),
        (
            torch.sin,
            leaf(2),
            {"eps": [1e-6, 1e-6]},
            ValueError,
            "eps needs 1 number, one for each checked input (",
        ),
        (
            torch.sin,
            leaf(2),
            {"atol": {"x": 1.0}},
            ValueError,
            "atol has the key 'x', but the checked inputs are inputs[0]",
        ),
        (
            torch.sin,
            leaf(2),
            {"rtol": {"inputs": -1.0}},
            ValueError,
            "rtol of inputs[0] must be at least zero, got -1.0.",
        ),
        (torch.sin, leaf(2), {"eps": ["1"]}, TypeError, "eps of inputs[0] must be a number, got '1'."),
        (torch.sin, leaf(2), {"eps": "1"}, TypeError, "eps must be a number, got '1'."),
        (
            torch.sin,
            leaf(2),
            {"check_batched_grad": torch.ones(2)},
            TypeError,
            "check_batched_grad must be True or False, got tensor(",
        ),
        (torch.sin, leaf(2), {"eps": 10**400}, ValueError, "eps must be positive and finite, got 1000"),
        (torch.sin, leaf(2), {"seed": 0.5}, ValueError, "seed must be None or an integer of 64 bits, got 0.5."),
        (lambda x: {"n": 1}, leaf(2), {}, TypeError, "func must return a tensor, or a container of tensors, got dict."),
        (
            lambda d: d["w"],
            {"w": leaf(2).expand(3, 2).detach().requires_grad_()},
            {},
            RuntimeError,
            'inputs[0]["w"] has a dimension with stride 0.',
        ),
        (
            lambda d: d["w"],
            [{"w": torch.ones(2, device="meta", requires_grad=True)}],
            {},
            ValueError,
            'inputs[0]["w"] is on the meta device: a gradient check needs values.',
        ),
        (torch.sin, leaf(2), {"order": 2, "grad_outputs": 1.0}, TypeError, "grad_outputs must be tensors, got float."),
        (torch.sin, leaf(2), {"order": 2, "grad_outputs": "twos"}, ValueError, "grad_outputs must be tensors, None or"),
        (
            torch.sin,
            leaf(2),
            {"check_backward_ad": False},
            AssertionError,
            "check_forward_ad or check_backward_ad to be",
        ),
    ],
)
def test_bad_arguments_are_one_clear_sentence(
    func: Any, inputs: Any, keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        fastgrad.check(func, inputs, **keywords)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_overlapping_tensors_are_named() -> None:
    base = torch.ones(4, dtype=torch.float64)
    left, right = (base[i : i + 3].requires_grad_() for i in range(2))
    with pytest.raises(
        RuntimeError, match=r'inputs\[0\] and kwargs\["y"\] are different tensors that overlap in memory'
    ):
        fastgrad.check(lambda x, y: x + y, left, kwargs={"y": right})


# State.


@pytest.fixture
def states() -> Iterator[Callable[[Layer, Tensor], list[Any]]]:
    def snapshot(module: Layer, x: Tensor) -> list[Any]:
        tensors = [*module.parameters(), *module.buffers(), x]
        return [
            [id(tensor) for tensor in tensors],
            [tensor.detach().clone() for tensor in tensors],
            [None if tensor.grad is None else tensor.grad.clone() for tensor in tensors],
            [tensor.requires_grad for tensor in tensors],
            [submodule.training for submodule in module.modules()],
            torch.get_rng_state(),
            random.getstate(),
            torch.is_grad_enabled(),
        ]

    return snapshot


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, list):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    return torch.equal(left, right) if isinstance(left, Tensor) else bool(left == right)


class Interrupted(Layer):
    """Changes its input, parameters and buffers, and raises in one of its calls."""

    def __init__(self, call: int, error: BaseException) -> None:
        super().__init__()
        self.calls, self.call, self.error = 0, call, error

    def forward(self, batch: dict[str, Tensor], shift: Tensor | float = 0.0) -> dict[str, Tensor]:
        result = super().forward(batch, shift)
        self.calls += 1
        if self.calls == self.call:
            raise self.error
        return result


@pytest.mark.parametrize("keywords", [{}, {"order": 2}, {"check_forward_ad": True}, {"fast_mode": True}])
@pytest.mark.parametrize("wrong", ["", "weight"])
def test_state_is_as_before(states: Any, keywords: dict[str, Any], wrong: str) -> None:
    module, batch = layer(wrong)
    module.norm.eval()  # the mode of one submodule differs from that of the others
    module.weight.grad = torch.full_like(module.weight, 7.0)
    before = states(module, batch["x"])
    assert fastgrad.check(module, batch, **keywords).passed == (not wrong)
    assert equal(states(module, batch["x"]), before)


@pytest.mark.parametrize("call", [1, 10, 20, 31])
@pytest.mark.parametrize("error", [KeyError("planted"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("order", [1, 2])
def test_state_is_as_before_where_a_module_raises(states: Any, call: int, error: BaseException, order: Any) -> None:
    module, batch = Interrupted(call, error), {"x": leaf(4, 3)}
    module.weight.grad = torch.full_like(module.weight, 7.0)
    before = states(module, batch["x"])
    with pytest.raises(type(error)):
        fastgrad.check(module, batch, order=order, engine="dense")
    assert module.calls == call
    assert equal(states(module, batch["x"]), before)


CALLS: dict[str, tuple[str, Callable[[list[Any]], Any]]] = {
    "gradcheck": ("inputs", lambda inputs: fastgrad.gradcheck(torch.sin, inputs)),
    "check, kwargs": ("kwargs", lambda inputs: fastgrad.check(torch.sin, leaf(2), kwargs={"inputs": inputs})),
    "gradgradcheck": ("grad_outputs", lambda inputs: fastgrad.gradgradcheck(torch.sin, leaf(2), inputs)),
    "adjoint_test": ("inputs", lambda inputs: fastgrad.adjoint_test(torch.sin, inputs)),
    "check_variants": ("inputs", lambda inputs: fastgrad.check_variants(torch.sin, inputs)),
    "check_model": ("inputs", lambda inputs: fastgrad.check_model(nn.Linear(2, 2), inputs, torch.sum)),
    "functional": ("v", lambda inputs: fastgrad.functional.vjp(torch.sin, leaf(2), inputs)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_list_that_contains_itself_is_refused(name: str) -> None:
    argument, call = CALLS[name]
    once: list[Any] = [leaf(2)]
    once.append(once)
    within: list[Any] = [leaf(2), {"key": []}]
    within[1]["key"].append(within[1])
    for inputs in (once, within):
        with pytest.raises(ValueError, match=f"^{argument} must not have a container inside itself, but ") as raised:
            call(inputs)
        assert raised.value.__suppress_context__
    message = 'inputs must not have a container inside itself, but inputs[1]["key"][0] is inputs[1].'
    with pytest.raises(ValueError, match=re.escape(message)):
        fastgrad.gradcheck(torch.sin, within)


def test_a_result_that_contains_itself_is_refused() -> None:
    def in_list(x: Tensor) -> Any:
        result: list[Any] = [2 * x]
        result.append(result)
        return result

    def in_dict(x: Tensor) -> Any:
        result: dict[str, Any] = {"double": 2 * x}
        result["all"] = result
        return result

    for func, path in ((in_list, "[1]"), (in_dict, '["all"]')):
        message = f"func's result must not have a container inside itself, but func's result{path} is func's result."
        for order in (1, 2):
            with pytest.raises(ValueError, match=re.escape(message)) as raised:
                fastgrad.check(func, leaf(2), order=order)
            assert raised.value.__suppress_context__


def test_a_dict_that_contains_itself_is_refused() -> None:
    inputs: dict[str, Any] = {}
    inputs["key"] = inputs
    with pytest.raises(ValueError, match=re.escape('but kwargs["inputs"]["key"] is kwargs["inputs"].')):
        fastgrad.check(torch.sin, leaf(2), kwargs={"inputs": inputs})


def test_deep_nesting_is_no_cycle() -> None:
    inputs: list[Any] = [leaf(2)]
    for _ in range(10_000):
        inputs = [inputs]
    with pytest.raises(RecursionError):
        fastgrad.gradcheck(torch.sin, inputs)


def test_several_inputs_without_a_tuple() -> None:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with pytest.raises(
        TypeError, match=r"inputs must be one tuple if there are several.*got 1 positional argument too many"
    ):
        fastgrad.gradcheck(torch.mul, x, x)  # type: ignore[arg-type]
