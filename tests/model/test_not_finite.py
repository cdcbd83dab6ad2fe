"""check_model names what gives the first value that is not finite, and accuses no operation that gets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastgrad import check_model
from fastgrad.report.model import ModelReport

INF, NAN = float("inf"), float("nan")


def squared(output: Tensor) -> Tensor:
    return output.square().mean()


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def model_of(function: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), Calls(function), nn.Linear(6, 2)).to(dtype)


def report_of(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32, loss: Callable[[Tensor], Tensor] = squared
) -> ModelReport:
    return check_model(model_of(function, dtype), torch.randn(8, 4, dtype=dtype), loss)


def verdicts(report: ModelReport) -> dict[str, tuple[str, str]]:
    return {f"{one.name} in {one.sites[0].module}": (one.verdict, one.detail) for one in report.operations}


REMARK = "operations whose inputs or results are not finite were not checked"
INPUTS, RESULTS = ("not checked", "its inputs are not finite"), ("not checked", "its results are not finite")


def test_the_operation_that_gives_the_first_nan_is_named() -> None:
    report = report_of(torch.log)
    assert report.verdict == "failed"
    (finding,) = report.findings
    assert (finding.kind, finding.operator, finding.sites[0].module) == ("not finite", "aten.log", "1")
    name, _, rest = finding.text.partition(" at ")
    assert name == "aten.log"
    assert rest.partition(" in module ")[2] == (
        "1 gives nan in 22 of 48 elements of float32[8, 6], although its inputs are finite; the loss is nan, so it "
        "has no gradient"
    )
    assert finding.parameters == ("0.weight", "0.bias", "2.weight", "2.bias")
    found = verdicts(report)
    assert found["aten.addmm in 0"] == ("right", "")
    assert found["aten.log in 1"] == RESULTS
    assert found["aten.addmm in 2"] == found["aten.mean in "] == INPUTS
    assert not {one.verdict for one in report.operations} & {"wrong", "undecided"}
    assert str(report).startswith("check_model failed: not finite in module 1, ")
    assert REMARK in report.remarks
    json.loads(report.to_json())
    assert "gives nan in 22 of 48" in report.to_html()


def exploding(x: Tensor) -> Tensor:
    return (3000 * x).exp()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_overflow_is_named_and_what_makes_nan_of_it(dtype: torch.dtype) -> None:
    (finding,) = report_of(exploding, dtype).findings
    assert (finding.kind, finding.operator, finding.sites[0].module) == ("not finite", "aten.exp", "1")
    assert " in module 1 gives inf in " in finding.text
    assert (
        "although its inputs are finite; from this, aten.addmm in module 2 gives nan, inf and -inf in " in finding.text
    )
    assert finding.text.endswith("; the loss is nan, so it has no gradient")


def test_an_overflow_of_single_precision_only_is_named() -> None:
    report = report_of(lambda x: (100 * x).exp(), loss=lambda y: y.abs().log().mean())
    assert report.end_to_end.dtype == "float64"
    assert report.end_to_end.verdict == "right", str(report)
    (finding,) = report.findings
    assert finding.operator == "aten.exp"
    assert not [one for one in report.operations if one.verdict == "wrong"]


def with_nan(*shape: int) -> Tensor:
    tensor = torch.randn(shape)
    tensor.view(-1)[-1] = NAN
    return tensor


def test_values_that_are_given_are_named() -> None:
    model, x = model_of(torch.tanh), torch.randn(8, 4)
    (finding,) = check_model(model, with_nan(8, 4), squared).findings
    begin = "inputs[0] contains nan in 1 of 32 elements of float32[8, 4]; the loss is nan"
    assert (finding.kind, finding.text.startswith(begin)) == ("not finite", True), finding.text
    model[2].weight.data[1, 2] = NAN
    (finding,) = check_model(model, x, squared).findings
    assert finding.text.startswith("parameter 2.weight contains nan in 1 of 12 elements of float32[2, 6]; ")
    (finding,) = report_of(torch.tanh, loss=lambda y: (y * NAN).mean()).findings
    place, _, rest = finding.text.partition(" is nan; ")
    assert place.startswith("an argument of aten.mul.Tensor at ")
    assert rest == "the loss is nan, so it has no gradient"
    target = with_nan(8, 2)
    (finding,) = check_model(model_of(torch.tanh), x, lambda y: (y - target).square().mean()).findings
    assert finding.operator == "aten.sub.Tensor"
    assert finding.text.startswith("an argument of aten.sub.Tensor at ")
    assert " contains nan in 1 of 16 elements of float32[8, 2]; " in finding.text


def test_buffers_and_keywords_are_named() -> None:
    class Shifted(nn.Module):
        shift: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("shift", torch.zeros(()))

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            y: Tensor = scale * (self.linear(x) + self.shift)
            return y

    model, x = Shifted(), torch.randn(8, 4)
    (finding,) = check_model(model, x, squared, kwargs={"scale": with_nan(4)}).findings
    assert finding.text.startswith('kwargs["scale"] contains nan in 1 of 4 elements')
    model.shift.fill_(INF)
    (finding,) = check_model(model, x, squared, kwargs={"scale": torch.ones(4)}).findings
    assert finding.text == "buffer shift is inf; the loss is inf, so it has no gradient"


class Attention(nn.Module):
    """Attention with a mask of -inf; the first rows are masked completely."""

    def __init__(self, masked: int = 0) -> None:
        super().__init__()
        self.query, self.key, self.value, self.masked = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), masked

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(8, 8, dtype=torch.bool).triu(1)
        mask[: self.masked] = True
        scores = (self.query(x) @ self.key(x).T).masked_fill(mask, -INF)
        return scores.softmax(-1) @ self.value(x)


def test_the_softmax_of_a_row_that_is_masked_completely_is_named() -> None:
    (finding,) = check_model(Attention(2), torch.randn(8, 4), squared).findings
    assert finding.text.startswith("an argument of aten.masked_fill.Scalar at ")
    assert " is -inf; from this, aten._softmax at " in finding.text
    assert " gives nan in 16 of 64 elements of float32[8, 8]; the loss is nan" in finding.text


def log_of_the_positive(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.log(), 0.0)


@pytest.mark.parametrize(
    "make",
    [
        Attention,
        lambda: nn.Sequential(nn.Linear(4, 4), Calls(log_of_the_positive)),
        lambda: nn.Sequential(nn.Linear(4, 9), nn.Unflatten(1, (1, 3, 3)), nn.MaxPool2d(2, 1, 1)),
        lambda: nn.Sequential(nn.Linear(4, 4), Calls(lambda x: torch.where(x > 0, x, -INF).amax(0))),
    ],
)
def test_a_finite_loss_with_finite_gradients_passes(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    report = check_model(make(), torch.randn(8, 4), squared)
    assert report.verdict == "passed", str(report)


def test_targets_that_are_missing_pass() -> None:
    target = with_nan(8, 2)

    def loss(output: Tensor) -> Tensor:
        return torch.where(target.isnan(), 0.0, output - target).square().mean()

    assert report_of(torch.tanh, loss=loss).verdict == "passed"


def root_of_the_positive(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.sqrt(), 0.0)


def test_nan_that_a_mask_hides_in_the_loss_but_not_in_the_gradient_is_named() -> None:
    report = report_of(root_of_the_positive)
    (finding,) = report.findings
    assert (finding.kind, finding.operator) == ("not finite", "aten.sqrt")
    assert " in module 1 gives nan in 22 of 48 elements" in finding.text
    assert finding.text.endswith("; the loss is finite, but its gradient is not")
    assert finding.parameters == ("0.weight", "0.bias")
    assert verdicts(report)["aten.sqrt in 1"] == RESULTS
    assert verdicts(report)["aten.addmm in 2"] == ("right", "")


def test_only_what_makes_the_gradient_nan_is_named() -> None:
    target = with_nan(8, 2)

    def loss(output: Tensor) -> Tensor:  # the derivative of the root at zero is infinite
        return torch.where(target.isnan(), 0.0, output - target).square().mean() + (0 * output).sum().sqrt()

    report = report_of(torch.tanh, loss=loss)
    assert report.verdict == "failed"
    assert "not finite" not in {one.kind for one in report.findings}


class Nan(torch.autograd.Function):
    """2 x; forward or backward gives NaN."""

    in_forward = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (NAN if Nan.in_forward else 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * NAN


def test_a_function_is_named_as_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = report_of(Nan.apply).findings
    assert (finding.operator, finding.sites[0].module) == ("Nan", "1")
    assert "gives nan in 48 of 48 elements" in finding.text
    monkeypatch.setattr(Nan, "in_forward", False)
    report = report_of(Nan.apply)
    assert [(one.kind, one.operator) for one in report.findings] == [("operation", "Nan")]


def test_a_parameter_is_not_called_detached_from_a_loss_that_is_nan() -> None:
    model = model_of(torch.log)
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    report = check_model(model, torch.randn(8, 4), squared)
    assert [one.kind for one in report.findings] == ["not finite"]


def test_memory_that_is_not_initialized_is_not_named() -> None:
    def filled(x: Tensor) -> Tensor:
        made = torch.empty_like(x)
        made[:4], made[4:] = x[:4].log(), x[4:]
        return made

    torch.use_deterministic_algorithms(True)  # fills such memory with NaN
    try:
        assert bool(torch.empty(3).isnan().all())
        (finding,) = report_of(filled).findings
    finally:
        torch.use_deterministic_algorithms(False)
    assert finding.operator == "aten.log"


def test_nan_in_the_first_call_only_has_no_place() -> None:
    calls: list[float] = []

    def loss(output: Tensor) -> Tensor:
        calls.append(1.0 if calls else NAN)
        return calls[-1] * squared(output)

    (finding,) = report_of(torch.tanh, loss=loss).findings
    assert (finding.kind, finding.text) == ("not finite", "the loss is nan, so it has no gradient")


def test_wrong_operations_before_the_first_nan_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad

    report = report_of(lambda x: Twice.apply(x).log())
    assert [(one.kind, one.operator) for one in report.findings] == [("not finite", "aten.log"), ("operation", "Twice")]


def test_the_model_is_left_as_it_was() -> None:
    model = model_of(torch.log)
    state, random = {name: one.clone() for name, one in model.state_dict().items()}, torch.get_rng_state()
    x = torch.randn(8, 4)
    torch.set_rng_state(random)
    check_model(model, x, lambda y: F.dropout(y).square().mean())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    assert not any(one._backward_hooks for one in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
