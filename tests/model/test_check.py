"""check_model: what it names, what it does not change, and what it rejects."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fastgrad
from fastgrad.model import operations
from fastgrad.model.check import check_model
from fastgrad.report import model as model_report
from tests.model.sweep import checked, names_culprit
from tests.planted.networks import Network, right_networks, wrong_networks

WRONG = {network.name: network for network in wrong_networks()}
RIGHT = {network.name: network for network in right_networks()}

some_wrong = [
    *("perceptron: missing factor", "convolutions: norm without mean", "attention: first row in place of a sum"),
    *("recurrence: wrong tail tile", "graph: wrong at negative inputs", "perceptron: in place through data"),
    *("attention: a kernel that writes outside", "convolutions: a hook on a module", "graph: a hook on a tensor"),
    *("perceptron: detach", "perceptron: item", "convolutions: numpy", "convolutions: no_grad", "attention: data"),
    "attention: integers",
]
some_right = [
    *("perceptron: untouched", "recurrence: untouched", "attention: right twin of softmax without sum"),
    "convolutions: right twin of wrong at negative inputs",
]


def squared(output: Tensor) -> Tensor:
    return output.square().mean()


def test_there_are_as_many_networks_as_the_sweep_says() -> None:
    kinds = [network.kind for network in WRONG.values()]
    assert len(WRONG) == 100
    assert kinds.count("detached") == 10
    assert kinds.count("saved tensor") + kinds.count("hook") == 20


@pytest.mark.parametrize("name", some_wrong)
def test_the_culprit_comes_first(name: str) -> None:
    report = checked(WRONG[name])
    assert names_culprit(WRONG[name], report), str(report)
    assert report.verdict == "failed"


@pytest.mark.parametrize("name", some_right)
def test_nothing_is_said_of_a_right_network(name: str) -> None:
    report = checked(RIGHT[name])
    assert report.verdict == "passed", str(report)


@pytest.mark.parametrize("network", [WRONG["perceptron: missing factor"], WRONG["attention: a hook on a tensor"]])
def test_the_model_is_left_as_it_was(network: Network) -> None:
    model, inputs, loss = network.make()
    model.get_parameter("slot.weight").grad = torch.ones(model.get_parameter("slot.weight").shape)
    model.get_submodule("slot").eval()
    model.get_parameter("slot.weight").register_hook(lambda grad: None)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = {name: list(module._forward_hooks) for name, module in model.named_modules()}
    random = torch.get_rng_state()
    check_model(model, inputs, loss)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in state.items())
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert list(grads) == ["slot.weight"]
    assert bool((grads["slot.weight"] == 1).all())
    assert model.training
    assert not model.get_submodule("slot").training
    assert {name: list(module._forward_hooks) for name, module in model.named_modules()} == hooks
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_default_dtype() is torch.float32


class Stops(nn.Module):
    """Raises in one of its calls."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.left, self.error = number, error

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x))
        self.left -= 1
        if not self.left:
            raise self.error("stop")
        return y


@pytest.mark.parametrize("number", [1, 2, 4, 5])
def test_the_model_is_left_as_it_was_when_stopped(number: int) -> None:
    model = Stops(number, KeyboardInterrupt)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    apply = torch.autograd.Function.apply
    with pytest.raises(KeyboardInterrupt):
        check_model(model, torch.randn(8, 4), squared)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in state.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.autograd.Function.apply == apply
    assert torch.get_default_dtype() is torch.float32
    assert squared(model.linear(torch.randn(2, 4))).requires_grad


def test_an_optimizer_within_backward_does_not_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    steps = []
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: steps.append(parameter.data.mul_(2)))
    assert check_model(model, torch.randn(8, 4), squared).passed
    assert not steps
    squared(model(torch.randn(8, 4))).backward()
    assert len(steps) == 1


class Single(torch.autograd.Function):
    """3 x, only in single precision; its backward returns 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise TypeError("float32 only")
        return 3 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Calls(nn.Module):
    """A linear map, followed by a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def test_an_operation_of_a_lower_dtype_alone_is_checked_in_it() -> None:
    report = check_model(Calls(Single.apply), torch.randn(8, 4), squared)
    assert (report.findings[0].operator, report.operations[0].dtype) == ("Single", "float32")
    assert report.end_to_end.dtype == "float32"
    assert any("not in double precision" in remark for remark in report.remarks)


def test_an_operator_of_torch_library_is_named() -> None:
    @torch.library.custom_op("fastgrad_tests::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    doubled.register_autograd(lambda ctx, grad: grad)
    report = check_model(Calls(doubled), torch.randn(8, 4), squared)
    assert report.findings[0].operator == "fastgrad_tests_doubled"


def test_a_function_that_is_wrong_in_a_later_call_only_is_found() -> None:
    class Rectified(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.abs()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Calls(lambda x: Rectified.apply(F.softplus(x)))
            self.second = Calls(Rectified.apply)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(self.first(x))
            return y

    report = check_model(Twice(), torch.randn(8, 4), squared)
    assert report.findings[0].operator == "Rectified"
    assert report.findings[0].sites[0].module == "second"


class Affine(torch.autograd.Function):
    """x w^T, whose backward scales the gradient of w by a factor."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w, Affine.factor * (grad.T @ x)


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "right"), (1.01, "wrong")])
def test_a_large_function_is_checked_in_full_on_fewer_rows(
    factor: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "LARGE", 64)
    monkeypatch.setattr(Affine, "factor", factor)
    model = nn.Linear(8, 24, bias=False)
    model.forward = lambda x: Affine.apply(x, model.weight)  # type: ignore[method-assign]
    report = check_model(model, torch.randn(32, 8), squared)
    custom = next(one for one in report.operations if one.name == "Affine")
    assert custom.verdict == verdict
    assert (operations.ON_FEWER_ROWS in custom.detail) == (verdict == "right")


def test_an_error_within_the_tolerance_of_entries_that_shows_end_to_end_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Affine, "factor", 1.0009)
    model = nn.Linear(8, 24, bias=False)
    model.forward = lambda x: Affine.apply(x, model.weight)  # type: ignore[method-assign]
    first = check_model(model, torch.randn(32, 8), squared).findings[0]
    assert (first.kind, first.operator) == ("end to end", "Affine")


def test_what_has_no_place_is_not_checked_and_named() -> None:
    report = check_model(Calls(torch.tanh), torch.randn(8, 4), squared, memory_limit=0)
    assert report.passed
    assert report.verdict == "undecided"
    assert "of them not checked, no error found" in str(report)
    omitted = [one for one in report.operations if one.verdict == "not checked"]
    assert omitted
    assert "memory_limit leaves 0" in omitted[0].detail


def test_a_parameter_that_the_loss_does_not_depend_on_is_a_remark() -> None:
    model = Calls(lambda x: x.tanh())
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    report = check_model(model, torch.randn(8, 4), squared)
    assert report.passed
    assert report.remarks == ("unused gets no gradient, and the loss does not depend on it",)


class OwnLinear(nn.Linear):
    """A subclass of nn.Linear."""


@pytest.mark.parametrize("linear", [nn.Linear, OwnLinear])
@pytest.mark.parametrize("spectral_norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_constants_that_torch_makes_are_meant(spectral_norm: Any, linear: type[nn.Linear]) -> None:
    model = nn.Sequential(spectral_norm(linear(4, 6)), nn.Tanh())
    report = check_model(model, torch.randn(8, 4), squared)
    assert report.verdict == "passed", str(report)
    assert any("have no gradient by design" in remark for remark in report.remarks)
    model[0].register_forward_hook(lambda module, args, output: half_detached(output))
    assert check_model(model, torch.randn(8, 4), squared).findings[0].kind == "detached"


def test_a_module_of_torch_that_runs_without_gradients_is_not_meant() -> None:
    linear = nn.utils.spectral_norm(nn.Linear(4, 4))
    model = Calls(lambda x: linear(x) * torch.no_grad()(linear)(x))
    model.inner = linear
    assert check_model(model, torch.randn(8, 4), squared).findings[0].kind == "detached"


Rejoined = Callable[[Tensor], Tensor]


def half_detached(output: Tensor) -> Tensor:
    return output.detach() / 2 + output / 2


def half_without_grad(output: Tensor) -> Tensor:
    with torch.no_grad():
        half = output / 2
    return half + output / 2


def times_its_mean(output: Tensor) -> Tensor:
    return output * output.detach().mean().item()


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


@pytest.mark.parametrize("function", [half_detached, half_without_grad, times_its_mean])
@pytest.mark.parametrize("before", [False, True])
def test_a_forward_hook_on_a_module_of_torch_is_not_by_design(function: Rejoined, before: bool) -> None:
    model = perceptron()
    if before:
        model[2].register_forward_pre_hook(lambda module, args: function(*args))
    else:
        model[0].register_forward_hook(lambda module, args, output: function(output))
    report = check_model(model, torch.randn(10, 8), squared)
    assert [finding.kind for finding in report.findings] == ["detached"]
    assert report.findings[0].sites[0].source.startswith("model/test_check.py:")


class Encoder(nn.Module):
    """A transformer layer with the given activation."""

    def __init__(self, activation: Rejoined) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.linear(x)[None])
        return y.sin()


@pytest.mark.parametrize("activation", [half_detached, torch.detach, torch.no_grad()(F.softplus)])
def test_a_function_that_a_module_of_torch_calls_is_not_by_design(activation: Rejoined) -> None:
    report = check_model(Encoder(activation), torch.randn(10, 8), squared)
    assert {finding.kind for finding in report.findings} == {"detached"}, str(report)


def test_the_report_as_text_data_and_page() -> None:
    report = checked(WRONG["perceptron: missing factor"])
    text, found = str(report), json.loads(report.to_json())
    assert text.startswith("check_model failed: Planted in module slot, planted/networks.py:")
    assert found["verdict"] == "failed"
    assert found["findings"][0]["sites"][0]["module"] == "slot"
    assert "<h2>Operations by cost</h2>" in report.to_html()
    assert not report
    with pytest.raises(fastgrad.GradcheckError, match="check_model failed: Planted"):
        report.raise_if_failed()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": torch.tanh}, TypeError, "model must be a torch.nn.Module, got builtin_function_or_method"),
        ({"loss": 3}, TypeError, "loss must be a function of the model's output, or None, got int"),
        (
            {"loss": None},
            TypeError,
            r"real tensor of one element, got .* torch.float\d+ and shape \(8, 4\)",
        ),
        ({"loss": lambda y: y.sum() * 1j}, TypeError, r"real tensor of one element, got .* torch\.complex"),
        ({"model": torch.jit.trace(nn.Linear(4, 4), torch.randn(8, 4))}, TypeError, "model is a TorchScript module"),
        ({"kwargs": 3}, TypeError, "kwargs must be a mapping"),
        ({"memory_limit": -1}, ValueError, "memory_limit must be at least zero, got -1"),
        ({"memory_limit": 1.5}, TypeError, "memory_limit must be a number of bytes, got 1.5"),
        ({"eps": 0}, ValueError, "eps must be positive and finite, got 0"),
        ({"model": nn.Tanh()}, ValueError, "needs a parameter with requires_grad=True in the model"),
        ({"model": nn.LazyLinear(3)}, ValueError, "Parameter weight of the model is uninitialized"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"model": nn.Linear(4, 4), "inputs": torch.randn(8, 4), "loss": squared, **change}
    with pytest.raises(error, match=message):
        check_model(**arguments)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mode_without_gradients_is_refused(mode: Any) -> None:
    with mode(), pytest.raises(ValueError, match=rf"gradients are disabled here by torch\.{mode.__name__}"):
        check_model(nn.Linear(4, 4), torch.randn(8, 4), squared)


def test_a_loss_that_differs_from_call_to_call_blames_no_parameter() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.unused, self.calls = nn.Linear(4, 4), nn.Parameter(torch.ones(2)), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y: Tensor = self.linear(x) * (1 + 0.1 * (self.calls % 2))
            return y

    report = check_model(Counting(), torch.randn(8, 4), squared)
    assert not [finding for finding in report.findings if finding.kind == "detached"]
    assert any(
        "unused gets no gradient; whether the loss depends on it is not known" in text for text in report.remarks
    )


def doubles_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def test_with_hooks_after_accumulation_the_verdict_is_undecided() -> None:
    model = nn.Linear(4, 4)
    model.weight.register_post_accumulate_grad_hook(doubles_gradient)
    report = check_model(model, torch.randn(8, 4), squared)
    assert report.verdict == "undecided"
    text = "the check did not run hooks of register_post_accumulate_grad_hook, which may change gradients, of weight"
    assert report.undecided == (text,)
    assert text in str(report)
    assert text in report.to_html()
    assert report.to_dict()["undecided"] == [text]


class Scaled(nn.Module):
    """sin, with a hook that scales its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        if y.requires_grad:
            y.register_hook(lambda gradient: 1.05 * gradient)
        return y


def test_a_hook_that_gets_an_expanded_gradient_is_named() -> None:
    report = check_model(nn.Sequential(nn.Linear(4, 4), Scaled()), torch.randn(3, 4), lambda y: y.sum())
    assert [finding.kind for finding in report.findings] == ["hook"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_that_a_norm_and_a_sum_cancel_are_no_finding(dtype: torch.dtype) -> None:
    """The gradient of this loss is zero, but rounding changes the loss."""
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(dtype)
        report = check_model(model, torch.randn(8, 8).to(dtype), lambda y: y.sum())
        assert report.passed, str(report)


def test_a_hook_that_returns_zeros_is_named() -> None:
    model = perceptron()
    model[0].weight.register_hook(lambda gradient: 0 * gradient)
    model[2].weight.register_hook(lambda gradient: 2 * gradient)
    report = check_model(model, torch.randn(10, 8), squared)
    found = [(finding.kind, finding.sites[0].module, finding.parameters) for finding in report.findings]
    assert found == [("hook", "0", ("0.weight",)), ("hook", "2", ("2.weight",))]
    assert (
        "of 0.weight makes gradients zero; without the hook, the gradients agree with differences"
        in report.findings[0].text
    )
    assert not report.remarks


def test_no_remark_belittles_a_hook_that_is_a_finding() -> None:
    model = perceptron()
    model[0].weight.register_hook(lambda gradient: 0 * gradient)
    report = check_model(model, torch.randn(10, 8), squared)
    assert [finding.kind for finding in report.findings] == ["hook"]
    assert not report.remarks


def test_a_hook_is_not_blamed_for_a_detached_path() -> None:
    model = Calls(half_detached)
    model.register_parameter("scale", nn.Parameter(torch.ones(4)))
    model.function = lambda x: x * model.scale.detach()
    model.linear.weight.register_hook(lambda gradient: 0 * gradient)
    report = check_model(model, torch.randn(8, 4), squared)
    found = [(finding.kind, finding.parameters) for finding in report.findings]
    assert found == [("hook", ("linear.weight",)), ("detached", ("scale",))]


TOKENS = torch.tensor([[0, 1, 2], [3, 0, 0]])


class Tied(nn.Module):
    """A functional embedding, and a linear map with the same weight."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        self.weight, self.keywords = nn.Parameter(torch.randn(10, 4)), keywords

    def forward(self, tokens: Tensor) -> Tensor:
        return (F.embedding(tokens, self.weight, **self.keywords) @ self.weight.T).tanh()


@pytest.mark.parametrize("sparse", [False, True])
def test_the_padding_row_of_an_embedding_is_held_constant(sparse: bool) -> None:
    embedding = nn.Embedding(10, 4, padding_idx=0, sparse=sparse)
    report = check_model(nn.Sequential(embedding, nn.Linear(4, 4), nn.Tanh()), TOKENS, squared)
    assert report.verdict == "passed", str(report)
    assert any("padding_idx), in 0" in remark for remark in report.remarks)
    assert all(one.verdict == "right" for one in report.operations)
    assert check_model(Tied(padding_idx=0), TOKENS, squared).verdict == "passed"


def test_padding_hides_no_other_error() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, padding_idx=0), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, output: half_detached(output))
    assert check_model(model, TOKENS, squared).findings[0].kind == "detached"


def test_gradients_that_are_divided_by_frequencies_are_not_accused() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, scale_grad_by_freq=True), nn.Tanh())
    report = check_model(model, TOKENS, squared)
    assert report.verdict == "passed", str(report)
    assert any(
        "scale_grad_by_freq, which divides gradients by design, was switched off" in one for one in report.remarks
    )
    assert model[0].scale_grad_by_freq is True
    first = check_model(Tied(scale_grad_by_freq=True), TOKENS, squared).findings[0]
    assert first.kind == "end to end"
    reason = "scale_grad_by_freq: by design, its gradient is not the derivative"
    assert f"aten.embedding was not checked: {reason}" in first.text


def zeroed(module: Any) -> Any:
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def zero_bias_and_zero_row() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    nn.init.zeros_(model[0].bias)
    return model, torch.cat([torch.randn(5, 8), torch.zeros(1, 8)])


AT_KINKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "padding row": zero_bias_and_zero_row,
    **{
        type(act).__name__: lambda act=act: (  # type: ignore[misc]
            nn.Sequential(zeroed(nn.Linear(8, 8)), act, nn.Linear(8, 1)),
            torch.randn(6, 8),
        )
        for act in (nn.ReLU(), nn.LeakyReLU(), nn.Hardtanh(0, 1), nn.PReLU())
    },
    **{
        type(norm).__name__: lambda norm=norm: (  # type: ignore[misc]
            nn.Sequential(nn.Linear(8, 8), zeroed(norm), nn.ReLU(), nn.Linear(8, 1)),
            torch.randn(6, 8),
        )
        for norm in (nn.BatchNorm1d(8), nn.LayerNorm(8))
    },
}


@pytest.mark.parametrize("name", AT_KINKS)
def test_a_kink_of_the_loss_is_named(name: str) -> None:
    torch.manual_seed(0)
    model, x = AT_KINKS[name]()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    report = check_model(model, x, squared)
    assert report.verdict == "undecided", str(report)
    assert report.undecided[0].startswith("the loss has a kink at the parameters (probably that of aten.")
    assert " in module 1" in report.undecided[0] or " in module 2" in report.undecided[0]
    assert report.end_to_end.verdict == "right"
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_kink_hides_no_error() -> None:
    torch.manual_seed(0)
    model, x = zero_bias_and_zero_row()
    model[2].register_forward_hook(lambda module, args, output: half_detached(output))  # type: ignore[index]
    report = check_model(model, x, squared)
    assert [finding.kind for finding in report.findings] == ["detached"]


def test_a_loss_that_only_jumps_is_not_said_to_detach() -> None:
    report = check_model(nn.Sequential(nn.Linear(4, 4), Sign(), nn.Linear(4, 1)), torch.randn(8, 4), squared)
    (finding,) = report.findings
    assert finding.text == (
        "the gradient of 0.weight, 0.bias is zero, which is right, because the loss is piecewise constant in them, for "
        "example because of round() or sign()"
    )


class Sign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sign()


def test_a_zero_gradient_at_a_stationary_point_is_right() -> None:
    model = nn.Sequential(zeroed(nn.Linear(4, 4)), nn.ReLU())
    report = check_model(model, torch.randn(8, 4), squared)
    assert report.verdict == "passed", str(report)
    model[1].register_forward_hook(lambda module, args, output: half_detached(output))
    assert check_model(model, torch.randn(8, 4), squared).findings[0].kind == "detached"


def test_an_operator_of_the_user_has_no_padding_row() -> None:
    @torch.library.custom_op("fastgrad_tests::embedding", mutates_args=())
    def embedding(weight: Tensor, tokens: Tensor, padding_idx: int) -> Tensor:
        return weight[tokens]

    def backward(ctx: Any, gradient: Tensor) -> Any:
        found = torch.zeros_like(ctx.saved_tensors[0]).index_put_((ctx.saved_tensors[1],), gradient, accumulate=True)
        found[0] = 0
        return found, None, None

    embedding.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]))
    model = Tied()
    model.forward = lambda tokens: embedding(model.weight, tokens, 0).tanh()  # type: ignore[method-assign]
    assert check_model(model, TOKENS, squared).findings[0].operator == "fastgrad_tests_embedding"


def test_a_model_that_is_wrapped_for_several_ranks_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        with pytest.raises(TypeError, match=r"wrapped in DistributedDataParallel: pass model\.module"):
            check_model(model, torch.randn(8, 4), squared)
        assert check_model(model.module, torch.randn(8, 4), squared).passed
    finally:
        dist.destroy_process_group()


def test_compiled_parts_are_a_remark() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"), nn.Tanh())
    report = check_model(model, torch.randn(8, 4), squared)
    assert report.passed
    assert "compiled parts of the model ran operator by operator while they were recorded" in report.remarks


class Alternating(nn.Module):
    """Runs different operations in every second call, and treats the result of a linear map as a constant."""

    def __init__(self, linear: nn.Module, cut: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.other, self.cut, self.calls = linear, nn.Linear(4, 4), cut, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = 2 * x if self.calls % 2 else x + x + 0
        z: Tensor = self.cut(self.linear(y)) + self.other(x)
        return z


def test_where_a_path_ends_is_not_said_of_a_model_that_runs_other_operations_in_each_call() -> None:
    x = torch.randn(8, 4)
    report = check_model(Alternating(nn.Linear(4, 4), Tensor.detach), x, squared)
    assert [finding.kind for finding in report.findings] == ["detached"]
    text = report.findings[0].text
    assert text == "linear.weight, linear.bias get no gradient, but the loss depends on them"
    assert report.findings[0].parameters == ("linear.weight", "linear.bias")
    normalized = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    report = check_model(Alternating(normalized, torch.tanh), x, squared)
    assert not any("held constant" in remark for remark in report.remarks)


def copied(output: Tensor) -> Tensor:
    made = torch.empty_like(output)
    with torch.no_grad():
        made.copy_(output)
    return made


class Copied(nn.Module):
    def __init__(self, joins: bool) -> None:
        super().__init__()
        self.linear, self.other, self.joins = nn.Linear(4, 4), nn.Linear(4, 4), joins

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        z: Tensor = self.other(x) + copied(y).sin()
        return z + y if self.joins else z


@pytest.mark.parametrize("joins", [False, True])
def test_a_copy_without_gradients_is_named(joins: bool) -> None:
    report = check_model(Copied(joins), torch.randn(8, 4), squared)
    assert [finding.kind for finding in report.findings] == ["detached"]
    finding = report.findings[0]
    assert "aten.copy_" in finding.text
    assert finding.parameters == ("linear.weight", "linear.bias")
    assert ("with this result held fixed, differences agree with the gradients" in finding.text) == joins


def test_of_many_parameters_the_first_are_named() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maps = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.last = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            total: Tensor = sum(one(x) for one in self.maps)  # type: ignore[assignment]
            y: Tensor = self.last(total.detach())
            return y

    report = check_model(Detached(), torch.randn(8, 4), squared)
    assert "maps.0.weight, maps.0.bias, maps.1.weight and 3 more get no gradient" in report.findings[0].text
    assert len(report.findings[0].parameters) == 6
    assert "parameters: maps.0.weight, maps.0.bias, maps.1.weight, maps.1.bias and 2 more" in str(report)


def test_results_without_derivatives_are_right() -> None:
    class Positive(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            made = (x > 0).to(x.dtype)
            ctx.mark_non_differentiable(made)
            return made

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    report = check_model(Calls(lambda x: x * Positive.apply(x)), torch.randn(8, 4), squared)
    assert report.passed
    (custom,) = (one for one in report.operations if one.name == "Positive")
    assert (custom.verdict, custom.detail) == ("right", "none of its results requires grad")


def test_an_operation_that_differences_cannot_decide_is_undecided() -> None:
    class AtX(torch.autograd.Function):
        """sin, only in bfloat16 and at the point of its first call."""

        domain: Tensor | None = None

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if x.dtype is not torch.bfloat16:
                raise TypeError("bfloat16 only")
            AtX.domain = x.detach().clone() if AtX.domain is None else AtX.domain
            ctx.save_for_backward(x)
            return torch.where(x == AtX.domain, x.sin(), torch.nan)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * x.cos()

    model = Calls(AtX.apply).to(torch.bfloat16)
    report = check_model(model, torch.randn(8, 4, dtype=torch.bfloat16), squared)
    (custom,) = (one for one in report.operations if one.name == "AtX")
    assert (custom.verdict, custom.dtype) == ("undecided", "bfloat16")
    assert "differences in this dtype resolve no derivative" in custom.detail
    assert report.verdict != "passed"


def test_a_large_function_without_rows_is_checked_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.shape = x.shape
            return x.sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.expand(ctx.shape)

    monkeypatch.setattr(operations, "LARGE", 16)
    report = check_model(Calls(Sum.apply), torch.randn(8, 4), squared)
    (custom,) = (one for one in report.operations if one.name == "Sum")
    assert custom.verdict == "right"
    assert operations.ON_FEWER_ROWS not in custom.detail
    assert custom.report is not None
    assert custom.report.n == 32


class Runs(nn.Module):
    """A linear map, a dropout, and a function of the module and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear, self.dropout, self.function = nn.Linear(4, 4, dtype=dtype), nn.Dropout(0.5), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@pytest.mark.parametrize(
    "cast",
    [
        lambda y: y.float(),
        lambda y: y.to(torch.bfloat16).to(torch.float32),
        lambda y: y.type(torch.FloatTensor),
        lambda y: y.type("torch.HalfTensor").type(dtype=torch.float32),
        lambda y: y.type(torch.float32) if y.type() else y,
    ],
)
def test_casts_to_lower_dtypes_are_none_in_double_precision(cast: Callable[[Tensor], Tensor]) -> None:
    report = check_model(Runs(lambda model, x: model.linear(x)), torch.randn(8, 4), lambda y: cast(squared(y)))
    assert report.verdict == "passed", str(report)
    assert report.end_to_end.dtype == "float64"
    assert not report.remarks


def test_a_loss_that_is_always_single_is_compared_in_the_dtype_of_the_model() -> None:
    class Single(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.from_numpy(x.detach().numpy().astype("float32"))

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    report = check_model(Runs(lambda model, x: model.linear(x)), torch.randn(8, 4), lambda y: Single.apply(squared(y)))
    assert report.passed, str(report)
    assert report.end_to_end.dtype == "float32"
    assert any("not in double precision: the loss of its copy" in remark for remark in report.remarks)


def test_a_model_in_double_precision_is_checked_as_it_is() -> None:
    model = Runs(lambda model, x: model.linear(x), torch.float64)
    report = check_model(model, torch.randn(8, 4, dtype=torch.float64), squared)
    assert report.passed
    assert report.end_to_end.dtype == "float64"


def test_modes_and_hooks_that_forward_changes_are_restored() -> None:
    def changes(model: Any, x: Tensor) -> Tensor:
        model.dropout.eval()
        model.linear.register_forward_hook(lambda *given: None)
        model.linear.weight.register_hook(lambda grad: None)
        y: Tensor = model.linear(model.dropout(x))
        return y

    model = Runs(changes)
    kept = model.linear.register_forward_hook(lambda *given: None)
    report = check_model(model, torch.randn(8, 4), squared)
    assert report.passed
    assert model.dropout.training
    assert list(model.linear._forward_hooks) == [kept.id]
    assert not model.linear.weight._backward_hooks


def test_a_loss_that_is_no_tensor_is_refused_and_a_constant_one_is_a_finding() -> None:
    with pytest.raises(TypeError, match="loss must return a real tensor of one element, got float"):
        check_model(nn.Linear(4, 4), torch.randn(8, 4), lambda y: float(y.sum()))
    report = check_model(nn.Linear(4, 4), torch.randn(8, 4), lambda y: y.detach().sum())
    assert report.findings[0].kind == "detached"
    assert report.findings[0].parameters == ("weight", "bias")


def test_an_operation_that_cannot_be_repeated_is_not_checked() -> None:
    class Once(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if x.is_leaf:
                raise ValueError("not a result of the model")
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

    model = Runs(lambda model, x: Once.apply(model.linear(x)), torch.float64)
    report = check_model(model, torch.randn(8, 4, dtype=torch.float64), squared)
    assert report.passed
    (custom,) = (one for one in report.operations if one.name == "Once")
    assert custom.verdict == "not checked"
    assert custom.detail == "it raises ValueError: not a result of the model"


def test_a_hook_that_writes_to_its_gradient_is_named() -> None:
    def scales(grad: Tensor) -> None:
        grad.mul_(1.5)

    def hooked(model: Any, x: Tensor) -> Tensor:
        y = model.linear(x)
        if y.requires_grad:
            y.register_hook(scales)
        z: Tensor = y.sin()
        return z

    report = check_model(Runs(hooked), torch.randn(8, 4), squared)
    assert [finding.kind for finding in report.findings] == ["hook"]
    assert "the hook scales" in report.findings[0].text


def test_a_sparse_operand_is_no_obstacle() -> None:
    def mixed(model: Any, x: Tensor) -> Tensor:
        return torch.sparse.mm(torch.eye(8, dtype=x.dtype).to_sparse(), model.linear(x))

    report = check_model(Runs(mixed), torch.randn(8, 4), squared)
    assert report.passed
    assert any("sparse" in one.name for one in report.operations)


def test_of_many_operations_the_first_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_report, "MAX_ROWS", 2)
    report = check_model(Runs(lambda model, x: model.linear(x)), torch.randn(8, 4), squared)
    assert f"and {len(report.operations) - 2} more" in str(report)


@pytest.mark.parametrize(
    "func",
    [
        lambda w: torch.linalg.cholesky(w @ w.T + torch.eye(4, dtype=w.dtype)).square().sum(-1).log().sum(),
        lambda w: torch.linalg.eigvalsh(w @ w.T + torch.eye(4, dtype=w.dtype)).log().sum(),
        lambda w: torch.nn.functional.ctc_loss(
            w.view(4, 1, 4).log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
        ),
    ],
    ids=["cholesky", "eigvalsh", "ctc_loss"],
)
def test_a_gradient_that_is_a_derivative_only_for_some_inputs_is_not_wrong(func: Callable[[Tensor], Tensor]) -> None:
    model = nn.Linear(4, 4, bias=False)
    model.forward = lambda x: func(model.weight)  # type: ignore[method-assign]
    report = check_model(model, torch.zeros(1))
    assert not report.findings
    assert report.end_to_end.verdict == "right"
    assert any("by design" in one.detail for one in report.operations)


class Draws(nn.Module):
    """Dropout after a linear map, with numbers drawn from a generator."""

    def __init__(self, generator: Callable[[], torch.Generator]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.generator = generator

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        y = self.linear(x)
        generator = generator or self.generator()
        mask = torch.bernoulli(torch.full_like(y, 0.5), generator=generator)
        return torch.ops.aten.rrelu_with_noise(y * mask, torch.empty_like(y), 0.1, 0.9, True, generator)


def test_generators_of_a_model_start_every_call_from_the_same_state() -> None:
    own, given = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    states = own.get_state(), given.get_state()
    model = Draws(lambda: own)
    model.own = own
    for kwargs in ({}, {"generator": given}):
        report = check_model(model, torch.randn(8, 4), squared, kwargs=kwargs)
        assert report.verdict == "passed", str(report)
    assert torch.equal(own.get_state(), states[0])
    assert torch.equal(given.get_state(), states[1])


@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_a_function_that_draws_from_a_generator_of_the_model_is_checked(factor: float) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    own = model.own = torch.Generator().manual_seed(0)

    class Dropout(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(torch.rand(x.shape, generator=own, dtype=x.dtype).round())
            return x * ctx.to_save[0]

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
            return grad_output * ctx.saved_tensors[0] * factor

    state = own.get_state()
    model[1].register_forward_hook(lambda module, inputs, output: Dropout.apply(output))
    report = check_model(model, torch.randn(8, 4), squared)
    assert report.verdict == ("passed" if factor == 1 else "failed"), str(report)
    assert "different values" not in str(report)
    assert torch.equal(own.get_state(), state)


def test_a_loss_that_differs_from_call_to_call_is_undecided_for_this_reason() -> None:
    hidden = torch.Generator().manual_seed(0)
    report = check_model(Draws(lambda: hidden), torch.randn(8, 4), squared)
    assert (report.verdict, report.end_to_end.verdict) == ("undecided", "undecided"), str(report)
    assert "two calls of the model from the same state give different losses" in str(report)
    json.loads(report.to_json())


def test_a_loss_that_is_nan_is_said_to_be_nan() -> None:
    report = check_model(nn.Linear(4, 4), torch.randn(8, 4), lambda y: (y * float("nan")).mean())
    assert report.verdict == "failed"
    assert json.loads(report.to_json())["end_to_end"]["error"] == "nan"
    assert not report.undecided
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, float("nan"))
    (finding,) = check_model(model, torch.randn(8, 4), lambda y: y.mean()).findings
    assert finding.text.endswith("; the loss is nan, so it has no gradient")


def test_the_size_of_errors_that_an_inaccurate_loss_hides_is_stated() -> None:
    report = check_model(nn.Linear(4, 4), torch.randn(8, 4), lambda y: y.mean() * 1e-9 + 1e3)
    assert report.end_to_end.verdict == "undecided", str(report)
    assert "would not be found" in str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", ["number", "parameter"])
def test_inputs_that_a_model_modifies_are_the_same_in_every_call(factor: str, dtype: torch.dtype) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.linear = nn.Parameter(torch.rand(6)), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(1.1 if factor == "number" else self.weight)
            return self.linear(x)

    torch.manual_seed(0)
    x = torch.randn(10, 6, dtype=dtype)
    before = x.clone()
    report = fastgrad.check_model(Scaled().to(dtype), x, lambda y: y.square().mean())
    assert report.verdict == "passed"
    assert torch.equal(x, before)
    assert x.is_leaf
    assert not x.requires_grad


def test_threads_take_turns() -> None:
    def verdicts(model: nn.Module, x: Tensor) -> list[str]:
        return [check_model(model, x, lambda y: (y * torch.ones(4)).sum()).verdict for _ in range(5)]

    models = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        found = Counter(verdict for some in threads.map(verdicts, models, torch.ones(3, 3, 4)) for verdict in some)
    assert found == {"passed": 15}
    assert torch.get_default_dtype() is torch.float32


class NextToThread(nn.Module):
    """A linear map, while another thread runs another module with a custom Function and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        entered, leaves = threading.Event(), threading.Event()

        def other(given: Tensor) -> Tensor:
            y: Tensor = Affine.apply(given, torch.eye(4))
            y.register_hook(lambda grad: 2 * grad)
            entered.set()
            assert leaves.wait(60)
            return y

        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(Calls(other), torch.ones(1, 4))
            assert entered.wait(60)
            y: Tensor = self.linear(x).sin()
            leaves.set()
            running.result().sum().backward()
        return y


def test_what_other_threads_run_is_not_recorded() -> None:
    report = check_model(NextToThread(), torch.randn(8, 4), squared)
    assert report.verdict == "passed", str(report)
    assert not report.remarks
    modules = {one.name: one.sites[0].module for one in report.operations}
    assert modules["aten.sin"] == ""
    assert "Affine" not in modules


def _sine(scale: float) -> type[torch.autograd.Function]:
    """A custom Function whose gradient is too large by this factor; all of them have one name."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, _: Any = None) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return scale * grad * x.cos(), None

    return Sine


class Sines(nn.Module):
    """A chain of Functions with their arguments; wrong factors of gradients cancel each other."""

    def __init__(self, calls: list[tuple[type[torch.autograd.Function], Any]]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4).double()
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        for function, argument in self.calls:
            y = function.apply(y, argument)  # type: ignore[no-untyped-call]
        return y.square().mean()


def test_functions_of_one_name_are_different_operations() -> None:
    model = Sines([(_sine(1.0), None), (_sine(2.0), None), (_sine(0.5), None)])
    report = check_model(model, torch.randn(5, 4, dtype=torch.float64))
    assert Counter(one.verdict for one in report.operations if one.name == "Sine") == {"wrong": 2, "right": 1}


class _Options:
    def __repr__(self) -> str:
        return "Options"


@pytest.mark.parametrize(
    "values", [[_Options(), _Options()], [torch.zeros(()).numpy() + k for k in range(2)], [1, True]]
)
def test_calls_with_different_arguments_are_different_operations(values: list[Any]) -> None:
    sine = _sine(1.0)
    report = check_model(Sines([(sine, value) for value in values]), torch.randn(5, 4, dtype=torch.float64))
    assert [one.calls for one in report.operations if one.name == "Sine"] == [1, 1]
