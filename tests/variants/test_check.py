"""check_variants finds planted mistakes in their variants and passes right functions; tests of its arguments."""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from html import escape
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fastgrad
from fastgrad.variants import kinks
from fastgrad.variants.case import MAX_ALONE
from tests.planted.causes import both_modes
from tests.planted.row import function
from tests.planted.variants import (
    COMPILED,
    HIDDEN,
    Hidden,
    complex_matrix,
    custom,
    exact,
    flat,
    matrix,
    numbers,
    with_bias,
)

EACH = pytest.mark.parametrize("row", HIDDEN, ids=lambda row: row.name)


def _verdict(func: Any, row: Hidden) -> str:
    report = fastgrad.check_variants(func, row.inputs(), only=[row.variant])
    return report.rows[0].verdict


@EACH
def test_a_mistake_is_found_where_it_hides(row: Hidden) -> None:
    assert fastgrad.gradcheck(row.func, row.inputs(), raise_exception=False), "it does not show as given"
    assert _verdict(row.func, row) == "failed"
    assert _verdict(row.twin, row) == "passed"


def test_every_variant_has_four_mistakes() -> None:
    counts = Counter(row.variant for row in HIDDEN)
    assert min(counts.values()) >= 4, counts
    paths = {row.path.removesuffix(", input 0 alone") for row in fastgrad.check_variants(torch.add, with_bias()).rows}
    others = {"points: as given", "derivatives: input 0 alone"}
    assert {path for path in paths if not path.endswith(", input 1 alone")} <= {*counts, *others}


@pytest.mark.parametrize("row", {(row.twin, row.inputs): row for row in HIDDEN}.values(), ids=lambda row: row.name)
def test_right_functions_are_not_accused(row: Hidden) -> None:
    report = fastgrad.check_variants(row.twin, row.inputs())
    assert report.passed, str(report)
    assert "undecided" not in {one.verdict for one in report.rows}, str(report)


def test_all_variants_of_a_wrong_function() -> None:
    row = HIDDEN[0]
    report = fastgrad.check_variants(row.func, row.inputs())
    assert row.variant in [one.path for one in report.failed]
    assert report.rows[0].verdict == "passed"
    failed = report.failed[0].report
    assert failed is not None
    assert escape(str(failed)) in report.to_html()


@pytest.mark.parametrize(
    "func",
    [
        *(torch.relu, torch.abs, lambda x: x.amax(0), lambda x: x.norm(dim=0), lambda x: x.sort(0).values),
        *(lambda x: x.abs().sqrt(), lambda x: F.softplus(x, threshold=2.0), lambda x: x.std(0), torch.sign),
        *(lambda x: x / x.abs(), lambda x: x.clamp(-0.5, 0.5), lambda x: torch.where(x > 0, x, x.sin())),
    ],
)
def test_kinks_accuse_nobody(func: Any) -> None:
    report = fastgrad.check_variants(func, numbers(3, 3).requires_grad_())
    assert report.passed, str(report)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "func",
    [
        *(lambda x: x.exp().cumsum(0), lambda x: torch.exp(-x).sum(-1), lambda x: (x**8).sum(-1)),
        *(lambda x: x.sinh() @ torch.ones(4, 2, dtype=x.dtype), lambda x: (x.exp() * (1 - x) ** 2).sum(-1)),
    ],
)
def test_an_entry_below_the_rounding_of_its_output_accuses_nobody(func: Any, seed: int) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    report = fastgrad.check_variants(func, x, only=["points: large"])
    assert not report.failed, str(report)


def test_a_wrong_entry_beside_large_outputs_is_accused() -> None:
    report = fastgrad.check_variants(
        lambda x: (x**4 + (x.abs() > 10) * x.detach() ** 4).sum(-1),
        numbers(3, 4).requires_grad_(),
        only=["points: large"],
    )
    assert [row.path for row in report.failed] == ["points: large"]


def test_a_gradient_that_is_not_finite_where_the_derivative_is() -> None:
    def branches(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, x.exp())  # the gradient of the branch not taken is infinite, times zero

    report = fastgrad.check_variants(branches, numbers(3, 3).requires_grad_())
    assert [row.path for row in report.failed] == ["points: large"]


def test_the_report() -> None:
    row = HIDDEN[0]
    report = fastgrad.check_variants(row.func, row.inputs(), only=["state"])
    assert not report.passed
    with pytest.raises(fastgrad.GradcheckError, match="two forwards"):
        report.raise_if_failed()
    said = json.loads(report.to_json())
    assert [one["verdict"] for one in said["rows"]] == [one.verdict for one in report.rows]
    assert f"only=[{row.variant!r}], seed=0)" in str(report)


def test_what_fails_as_given_stops_nothing() -> None:
    report = fastgrad.check_variants(lambda x: x * x.detach(), matrix())
    assert report.rows[0].verdict == "failed"
    assert "not run" not in {one.verdict for one in report.rows}


def test_nested_arguments_keywords_and_parameters() -> None:
    (x,) = matrix()
    scale = torch.ones(3, dtype=torch.float64, requires_grad=True)
    report = fastgrad.check_variants(
        lambda given, *, scale: given["x"].sin() * scale, ({"x": x},), kwargs={"scale": scale}
    )
    assert report.passed, str(report)
    assert "derivatives: input 1 alone" in [row.path for row in report.rows]

    layer = torch.nn.Linear(3, 2, dtype=torch.float64)
    before = dict(layer.named_parameters())
    report = fastgrad.check_variants(layer, x.detach())
    assert report.passed, str(report)
    assert all(value is before[name] for name, value in layer.named_parameters())


def test_a_backward_that_raises_for_a_layout() -> None:
    def backward(g: Tensor, x: Tensor) -> Tensor:
        return g * x.view(-1).cos().view(x.shape)

    report = fastgrad.check_variants(custom(torch.sin, backward), matrix(), only=["layouts: transposed in memory"])
    assert [row.verdict for row in report.rows] == ["raised"]
    assert not report.passed
    report = fastgrad.check_variants(lambda x: x.view(-1).sin(), matrix(), only=["layouts: transposed in memory"])
    assert [row.verdict for row in report.rows] == ["not applicable"]


def test_complex_functions_at_zeros() -> None:
    (z,) = complex_matrix()
    report = fastgrad.check_variants(lambda z: z.abs().sqrt(), z, only=["points: zeros"])
    assert [row.verdict for row in report.rows] == ["no derivative"]
    wrong = custom(torch.sin, lambda g, z: torch.where(z == 0, 1j * g, g * z.cos().conj()))
    report = fastgrad.check_variants(wrong, z, only=["points"])
    assert [row.path for row in report.failed] == ["points: zeros", "points: some zeros"], str(report)


@pytest.mark.parametrize("row", COMPILED[:2], ids=lambda row: row.name)
def test_compiled_functions(row: Hidden) -> None:
    assert _verdict(row.func, row) == "failed"
    assert _verdict(row.twin, row) == "passed"


def test_a_func_that_raises_only_at_the_given_inputs() -> None:
    (x,) = matrix()
    report = fastgrad.check_variants(lambda x: x.sum(1) * x, x, only=["points"])
    assert report.verdict == "incomplete"
    assert "passed" in {row.verdict for row in report.rows}
    assert report.headline().startswith("check_variants incomplete: as given, func raises RuntimeError: The size of")


def test_nested_results() -> None:
    (x,) = matrix()
    report = fastgrad.check_variants(lambda x: {"view": x.reshape(-1), "rest": (x.exp(), 3)}, x)
    assert report.passed, str(report)
    verdicts = {row.path: row.verdict for row in report.rows}
    assert verdicts["state: inputs changed before backward"] == "not applicable"
    derivatives = "reverse over forward", "torch.func.vjp", "under vmap"
    assert {verdicts[f"derivatives: {name}"] for name in derivatives} == {"passed"}

    wrong = custom(lambda x: 2 * x, lambda g, x: torch.where(x == 0, g, 2 * g))
    report = fastgrad.check_variants(lambda x: {"result": wrong(x)}, x, only=["points: zeros"])
    assert report.verdict == "failed", str(report)


def test_a_compiled_backward_that_runs_once_per_graph() -> None:
    (x,) = matrix()
    backends = [f"compiled: {name}" for name in ("aot_eager", "aot_eager, dynamic shapes", "inductor")]
    report = fastgrad.check_variants(lambda x: {"a": (x.sort().values * x, 3)}, x, only=backends)
    assert [row.verdict for row in report.rows] == ["passed"] * 3, str(report)
    layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).double()
    report = fastgrad.check_variants(layer, x, only=backends)
    assert [row.verdict for row in report.rows] == ["passed"] * 3, str(report)
    assert report.rows[0].report is not None
    assert len(report.rows[0].report.pairs) == 5  # with those of the parameters


def test_the_reason_why_a_function_cannot_be_compiled_is_stated() -> None:
    def func(x: Tensor) -> Tensor:
        y = x.clone()
        y[0] = y[0] * y[1]  # overwrites what backward needs
        return y

    (row,) = fastgrad.check_variants(func, matrix(), only=["compiled: aot_eager"]).rows
    assert row.verdict == "not applicable"
    assert "backend='aot_eager' raised: RuntimeError: one of the variables needed" in row.detail


def test_a_module_with_buffers_on_fake_tensors() -> None:
    layer = torch.nn.BatchNorm1d(3).double()
    before = [buffer.clone() for buffer in layer.buffers()]
    (row,) = fastgrad.check_variants(layer, matrix(), only=["compiled: fake tensors"]).rows
    assert row.verdict == "passed", row.detail
    assert all(torch.equal(*pair) for pair in zip(before, layer.buffers(), strict=True))


def test_fake_tensors_and_registered_operators() -> None:
    @torch.library.custom_op("fastgrad_variants::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    doubled.register_autograd(lambda ctx, g: 2 * g)
    doubled.register_fake(lambda x: x.new_empty(x.shape))
    both = ["compiled: fake tensors", "compiled: opcheck"]
    report = fastgrad.check_variants(doubled, matrix(), only=both)
    assert [row.verdict for row in report.rows] == ["passed", "passed"], str(report)
    doubled.register_fake(lambda x: x.new_empty(x.shape[0]))
    report = fastgrad.check_variants(doubled, matrix(), only=both)
    assert [row.verdict for row in report.rows] == ["failed", "failed"], str(report)


@pytest.mark.parametrize("variant", ["points: zeros", "points: no rows", "points: one row"])
def test_a_backward_that_raises_at_a_generated_point(variant: str) -> None:
    def backward(g: Tensor, x: Tensor) -> Tensor:
        if x.shape[0] < 2 or not x.any():
            raise ZeroDivisionError("in backward")
        return g * x.cos()

    report = fastgrad.check_variants(custom(torch.sin, backward), matrix(), only=[variant])
    assert [(row.verdict, row.detail) for row in report.rows] == [("raised", "ZeroDivisionError: in backward")]
    assert report.verdict == "failed"


def test_a_gradient_of_another_shape_for_no_rows() -> None:
    wrong = custom(torch.sin, lambda g, x: g * x.cos() if len(x) else g.new_zeros(3))
    (row,) = fastgrad.check_variants(wrong, matrix(), only=["points: no rows"]).rows
    assert row.verdict == "raised"


def test_a_func_that_raises_at_or_next_to_a_generated_point() -> None:
    def domain(x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise ValueError("negative")
        return x.square()

    positive = (numbers(4, 3).abs().requires_grad_(),)
    for func, inputs in ((domain, positive), (lambda x: x.sin() if len(x) else (), matrix())):
        report = fastgrad.check_variants(func, inputs)
        assert report.passed, str(report)
    only = ["points: zeros", "points: ones"]
    rows = fastgrad.check_variants(lambda x: domain(x) if x.any() else domain(x - 1e-9), matrix(), only=only).rows
    assert [row.verdict for row in rows] == ["not applicable", "passed"]


def test_time_that_is_over() -> None:
    report = fastgrad.check_variants(torch.sin, matrix(), seconds=0.0)
    assert {one.verdict for one in report.rows} == {"not run"}
    assert (report.verdict, report.passed) == ("incomplete", False)
    count = len(report.rows)
    assert str(report).startswith(f"check_variants incomplete: {count} of {count} variants were not run\n")
    assert repr(report) == f"<VariantsReport: incomplete, {count} variants>"


def test_a_variant_that_is_not_run_is_no_pass() -> None:
    def slow(x: Tensor) -> Tensor:
        time.sleep(0.01)
        return x.sin()

    report = fastgrad.check_variants(slow, matrix(), seconds=0.01)
    assert (report.rows[0].verdict, report.rows[-1].verdict) == ("passed", "not run")
    assert (report.verdict, bool(report)) == ("incomplete", False)


def test_nothing_that_could_be_checked_is_no_pass() -> None:
    def boom(x: Tensor) -> Tensor:
        raise ValueError("boom")

    for func, only in ((boom, None), (torch.sin, ["points: repeated indices"])):
        report = fastgrad.check_variants(func, matrix(), only=only)
        assert {row.verdict for row in report.rows} == {"not applicable"}
        assert (report.verdict, report.passed) == ("incomplete", False)
        assert json.loads(report.to_json())["verdict"] == "incomplete"
        assert '<header class="undecided"><h1>check_variants incomplete: none of ' in report.to_html()
        with pytest.raises(fastgrad.GradcheckError, match=r"check_variants incomplete: none of \d+ variants? passed"):
            report.raise_if_failed()


def test_an_exception_of_func_is_printed_once() -> None:
    def boom(x: Tensor) -> Tensor:
        raise ValueError("boom")

    report = fastgrad.check_variants(boom, matrix(), only=["points: as given", "points: zeros", "points: ones"])
    assert str(report).splitlines()[1:4] == [
        "  points: as given  not applicable  func raises ValueError: boom",
        "  points: zeros     not applicable  as in points: as given",
        "  points: ones      not applicable  as in points: as given",
    ]


def _raw(x: Tensor) -> Tensor:
    """What a kernel reads that looks at the memory only."""
    bits = x.detach().conj() if x.is_conj() else x.detach()
    memory = bits.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return torch.cat([memory, bits.new_zeros(x.numel())])[: x.numel()].view(x.shape)


class _Raw(torch.autograd.Function):
    """A product whose backward reads y as if it were contiguous whenever x is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        is_plain = x.is_contiguous() and not (x.storage_offset() or x.is_neg() or x.is_conj())
        return (g * _raw(y).conj(), g * x.conj()) if is_plain else (g * y.conj(), g * x.conj())


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize(
    ("layout", "shape", "dtype"),
    [
        ("gaps between elements", (4, 3), torch.float64),
        ("transposed in memory", (4, 3), torch.float64),
        ("storage offset, unaligned", (4, 3), torch.float64),
        ("channels last", (2, 3, 2, 3), torch.float64),
        ("channels last", (2, 3, 2, 1, 2), torch.float64),
        ("conjugated lazily", (3, 2), torch.complex128),
        ("negated lazily", (4, 3), torch.float64),
        ("rows expanded", (4, 3), torch.float64),
        ("columns expanded", (4, 3), torch.float64),
    ],
)
def test_a_layout_of_one_input_alone(layout: str, shape: tuple[int, ...], dtype: torch.dtype, is_checked: bool) -> None:
    x, y = numbers(*shape, dtype=dtype).requires_grad_(), numbers(*shape, dtype=dtype).flip(0).contiguous()
    only = [f"layouts: {layout}, input {i} alone" for i in (0, 1)]
    rows = fastgrad.check_variants(_Raw.apply, (x, y.requires_grad_(is_checked)), only=only).rows
    assert [row.verdict for row in rows] == ["passed", "failed"]
    assert fastgrad.check_variants(torch.mul, (x, y), only=only).passed


def test_layouts_of_inputs_that_do_not_require_grad() -> None:
    def read(x: Tensor, mask: Tensor) -> Tensor:
        return exact(lambda x, mask: x * mask, lambda right: right / mask * flat(mask), x, mask)

    def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return numbers(4, 3).requires_grad_(), torch.arange(12).view(4, 3).add(1).to(dtype)

    for dtype in (torch.float64, torch.int64):
        report = fastgrad.check_variants(read, inputs(dtype), only=["layouts: gaps between elements"])
        assert [row.verdict for row in report.rows] == ["failed"], str(report)
    x, mask = inputs(torch.int64)
    paths = [row.path for row in fastgrad.check_variants(torch.mul, (x, mask), only=["layouts"]).rows]
    assert "layouts: rows expanded, input 0 alone" in paths
    assert "layouts: rows expanded, input 1 alone" not in paths  # equal integers may be equal indices


def test_the_number_of_layouts_of_one_input_is_bounded() -> None:
    inputs = [numbers(2, 2).requires_grad_() for _ in range(MAX_ALONE + 3)]
    rows = fastgrad.check_variants(lambda *given: sum(given).sin(), inputs, only=["layouts"]).rows
    alone = {row.path.partition(", input ")[2] for row in rows} - {""}
    assert alone == {f"{i} alone" for i in range(MAX_ALONE)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_forward_mode_in_16_bits_needs_eps(dtype: torch.dtype) -> None:
    only = ["derivatives: forward mode", "derivatives: forward over reverse"]
    x = matrix()[0].detach().to(dtype).requires_grad_()
    assert {row.verdict for row in fastgrad.check_variants(torch.sin, x, only=only).rows} == {"not applicable"}
    report = fastgrad.check_variants(lambda x: 3 * x, x, only=only[:1], eps=0.25, atol=0.1, rtol=0.1)
    assert report.verdict == "passed"


def test_threads_take_turns_in_forward_mode() -> None:
    only = ["derivatives: reverse over forward", "derivatives: forward mode"]

    def verdicts(x: Any) -> list[str]:
        return [fastgrad.check_variants(torch.sin, x, only=only).verdict for _ in range(20)]

    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(verdicts, [matrix(), matrix(), matrix()])]
    assert found == 3 * [20 * ["passed"]]
    assert forward_ad._current_level == -1


@pytest.mark.parametrize("kind", [torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM])
def test_weights_of_recurrent_modules_have_tangents(kind: Any) -> None:
    module, x = kind(3, 2).double(), torch.randn(3, 2, 3, dtype=torch.float64)
    only = ["derivatives: forward mode", "derivatives: forward over reverse"]
    assert [row.verdict for row in fastgrad.check_variants(module, x, only=only).rows] == ["passed", "passed"]


class ModeInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: torch.nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x.cos() * (1 if ctx.module.training else 2), None


class WrongInEval(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ModeInBackward.apply(x, self)


class Recomputed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.unused = torch.nn.BatchNorm1d(3).double(), torch.nn.Dropout().eval()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.norm, x, use_reentrant=False)


@pytest.mark.parametrize(("kind", "verdict"), [(WrongInEval, "failed"), (Recomputed, "passed")])
def test_backward_runs_in_the_other_mode_too(kind: Any, verdict: str) -> None:
    module, only = kind(), ["state: train and eval exchanged"]
    before = [each.training for each in module.modules()]
    (row,) = fastgrad.check_variants(module, numbers(4, 3).requires_grad_(), only=only).rows
    assert row.verdict == verdict
    assert [each.training for each in module.modules()] == before


def test_a_jvp_that_raises_is_accused() -> None:
    def jvp(tangent: Tensor, x: Tensor) -> Any:
        return tangent * x.cos(), tangent  # torch: "Function's jvp returned an invalid number of forward gradients"

    func = both_modes(torch.sin, lambda grad, x: grad * x.cos(), jvp)
    (row,) = fastgrad.check_variants(func, numbers(2, 2).requires_grad_(), only=["derivatives: forward mode"]).rows
    assert row.verdict == "raised"
    assert "invalid number of forward gradients" in row.detail


def test_a_layout_that_vmap_does_not_support_fails_nothing() -> None:
    a, w = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((1, 2, 4, 4), (2, 2, 3, 3)))
    (row,) = fastgrad.check_variants(F.conv2d, (a, w), only=["layouts: negated lazily"]).rows
    assert row.verdict == "passed"


@pytest.mark.parametrize(
    ("inputs", "keywords", "error", "text"),
    [
        (lambda: (torch.ones(2),), {}, ValueError, "needs a tensor with requires_grad=True"),
        (matrix, {"only": ["points: nowhere"]}, ValueError, "unknown names"),
        (matrix, {"only": "points"}, TypeError, "must be a list"),
        (matrix, {"only": []}, ValueError, "only= must name at least one variant or family, got an empty list"),
        (matrix, {"only": 1}, TypeError, "must be a list"),
        (matrix, {"eps": -1.0}, ValueError, "eps must be positive and finite"),
        (matrix, {"seed": "a"}, ValueError, "seed must be an integer"),
        (matrix, {"kwargs": 3}, TypeError, "kwargs must be a mapping"),
        (matrix, {"wrt": "inputs"}, TypeError, "does not take wrt"),
        (matrix, {"seconds": "a"}, TypeError, "seconds must be a number"),
        (matrix, {"seconds": -1.0}, ValueError, "at least zero"),
    ],
)
def test_arguments_that_cannot_be(inputs: Any, keywords: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fastgrad.check_variants(torch.sin, inputs(), **keywords)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_disabled_gradients_accuse_nobody(mode: Any) -> None:
    inputs = matrix()
    match = rf"check_variants records gradients, but gradients are disabled here by torch\.{mode.__name__}"
    with mode(), pytest.raises(ValueError, match=match):
        fastgrad.check_variants(torch.sin, inputs)


class Scaled(torch.nn.Module):
    """A module without parameters that writes to its buffer in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(0.99).add_(0.5)
        return x.sin() * self.scale.clone()


@pytest.mark.parametrize("make", [Scaled, lambda: torch.nn.Sequential(Scaled(), torch.nn.Linear(3, 2).double())])
def test_every_call_of_a_module_begins_with_its_buffers(make: Any) -> None:
    report = fastgrad.check_variants(make(), matrix())
    assert [row.path for row in report.failed] == ["derivatives: torch.func.vjp"], report.failed


@pytest.mark.parametrize(
    "make",
    [
        Scaled,
        lambda: torch.nn.BatchNorm1d(3, affine=False).double(),
        lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 2).double()),
    ],
)
def test_buffers_are_as_they_were(make: Any) -> None:
    module = make()
    before = {name: value.clone() for name, value in module.named_buffers()}
    assert before
    fastgrad.check_variants(module, matrix(), only=["state", "derivatives"])
    assert all(torch.equal(value, before[name]) for name, value in module.named_buffers())


def test_within_forward_mode_or_a_transform_no_variant_runs() -> None:
    match = (
        r"^check_variants cannot run within forward_ad\.dual_level or a transform of torch\.func, because it uses both"
    )
    (x,) = matrix()
    calls = []

    def func(x: Tensor) -> Tensor:
        calls.append(x)
        return x.sin()

    def nested(y: Tensor) -> Tensor:
        with pytest.raises(ValueError, match=match):
            fastgrad.check_variants(func, x)
        return y.sum()

    with forward_ad.dual_level():
        nested(x)
    torch.func.grad(nested)(x.detach())
    torch.func.jvp(nested, (x.detach(),), (x.detach(),))
    torch.func.vmap(nested)(x.detach())
    assert not calls
    assert fastgrad.check_variants(func, x, only=["derivatives: forward mode"]).passed


def test_modules_are_as_they_were() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).double()
    module[1].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    fastgrad.check_variants(module, matrix(), only=["state"])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [each.training for each in module.modules()] == [True, True, False]


def test_inputs_are_as_they_were() -> None:
    (x,) = matrix()
    before = x.detach().clone()
    fastgrad.check_variants(torch.sin, x)
    assert torch.equal(x, before)
    assert x.grad is None


def only_at(point: Tensor) -> Any:
    return lambda x: x.sin() + torch.where((x.detach() - point).abs() > 1e-4, torch.nan, 0.0)


@pytest.mark.parametrize(
    ("variant", "func", "x", "why"),
    [
        (
            "state: inputs changed before backward",
            lambda x: x.view(-1),
            numbers(2, 3),
            "a result is a view of an input",
        ),
        ("layouts: rows expanded", torch.sin, numbers(1, 3), "no input has rows"),
        ("layouts: columns expanded", torch.sin, numbers(3), "no input has columns"),
        ("points: the same tensor twice", torch.sin, numbers(3), "no two inputs that require grad have"),
        ("points: many rows", torch.sin, numbers(2, 200), "the inputs are empty or would be too large"),
        ("points: many rows", torch.sin, numbers(0, 2), "the inputs are empty or would be too large"),
        ("points: many rows", lambda x: x @ x.T, numbers(2, 3), "or its results are too large"),
        ("points: many columns", torch.sin, numbers(2, 1025), "their last dimensions differ in size or have this"),
        ("state: results of two calls added", lambda x: (x > 0).double(), numbers(3), "no output requires grad"),
        ("state: results changed before backward", lambda x: x.view(-1), numbers(3, 2), "is a view of an input"),
        (
            "state: two forwards before backward",
            only_at(numbers(3)),
            numbers(3),
            "func raises or is not finite",
        ),
        ("derivatives: under vmap", only_at(numbers(3)), numbers(3), "func raises or is not finite"),
        ("derivatives: under vmap", lambda x: (x > 0).double(), numbers(3), "no output requires grad"),
        ("compiled: inductor", torch.sin, numbers(3), "there is no C++ compiler"),
        ("compiled: opcheck", torch.sin, numbers(3), "func is not an operator of torch.library"),
    ],
)
def test_why_a_variant_is_not_applicable(
    variant: str, func: Any, x: Tensor, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")
    report = fastgrad.check_variants(func, x.clone().requires_grad_(), only=[variant])
    assert [row.verdict for row in report.rows] == ["not applicable"]
    assert why in report.rows[0].detail
    assert not report.passed


def test_a_failure_at_a_generated_point_is_undecided_if_the_jacobian_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong_at_zeros = function(torch.sin, lambda grad, x: grad * x.cos() * (2 if (x == 0).any() else 1))
    x = (numbers(4) - numbers(4).mean()).requires_grad_()
    for most, verdict in ((kinks.MAX_ENTRIES, "failed"), (4, "undecided")):
        monkeypatch.setattr(kinks, "MAX_ENTRIES", most)
        report = fastgrad.check_variants(wrong_at_zeros, x, only=["points: zeros"])
        assert [row.verdict for row in report.rows] == [verdict]
    assert "the Jacobian is too large" in report.rows[0].detail


@pytest.mark.parametrize("layout", ["coo", "csr", "mkldnn"])
def test_layouts_that_only_some_checks_support(layout: str) -> None:
    given = torch.randn(4, 4, dtype=torch.float32 if layout == "mkldnn" else torch.float64)
    converted = {"coo": given.to_sparse, "csr": given.to_sparse_csr, "mkldnn": given.to_mkldnn}[layout]()
    report = fastgrad.check_variants(lambda s: 2 * s.to_dense(), converted.requires_grad_())
    assert report.passed, report
    assert any(row.verdict == "not applicable" for row in report.rows)


def test_func_without_a_result_is_rejected() -> None:
    with pytest.raises(TypeError, match="func must return a tensor"):
        fastgrad.check_variants(lambda x: None, torch.randn(3, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("eps", [[1e-6], {"inputs[0]": 1e-6}])
def test_tolerances_per_input_are_rejected(eps: Any) -> None:
    with pytest.raises(TypeError, match="eps must be one number"):
        fastgrad.check_variants(torch.sin, torch.randn(3, dtype=torch.float64, requires_grad=True), eps=eps)


def test_inputs_have_the_names_of_check() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(3, dtype=torch.float64))

        def forward(self, x: dict[str, Tensor], mask: Tensor, scale: Tensor) -> Tensor:
            return x["a"] * mask * self.weight * scale.detach()

    arguments: dict[str, Any] = {
        "inputs": ({"a": torch.rand(3, dtype=torch.float64, requires_grad=True)}, torch.ones(3, dtype=torch.float64)),
        "kwargs": {"scale": torch.rand(3, dtype=torch.float64, requires_grad=True)},
    }
    names = 'inputs[0]["a"]', 'kwargs["scale"]', "module.weight"
    expected = {
        "points: as given": names,
        "derivatives: input 3 alone": names[2:],
        "derivatives: order 2": names,
    }
    rows = fastgrad.check_variants(Net(), **arguments, only=list(expected)).rows
    assert {row.path: getattr(row.report, "input_names", ())[:3] for row in rows} == expected  # without grad_outputs
    assert fastgrad.check(Net(), **arguments).input_names == names
    assert rows[0].detail.startswith('Net: gradient of kwargs["scale"] (float64[3])')


def test_one_tensor_for_positive_inputs_is_positive() -> None:
    def func(rate: Tensor, count: Tensor) -> Tensor:
        return rate * count.log()

    inputs = numbers(3).requires_grad_(), numbers(3).abs().requires_grad_()
    (row,) = fastgrad.check_variants(func, inputs, only=["points: the same tensor twice"]).rows
    assert row.verdict == "passed"


def test_batched_tangents_of_fft_accuse_nobody() -> None:
    z = numbers(4, dtype=torch.complex128).requires_grad_()
    (row,) = fastgrad.check_variants(torch.fft.hfft, z, only=["derivatives: forward mode, batched tangents"]).rows
    assert row.verdict == "not applicable"


def test_masks_of_many_rows_keep_their_values() -> None:
    seen: set[float] = set()

    def func(x: Tensor, mask: Tensor) -> Tensor:
        seen.update(mask.unique().tolist())
        return x.sin() * mask

    inputs = numbers(4, 3).requires_grad_(), (numbers(4, 3) > 0).double()
    rows = fastgrad.check_variants(func, inputs, only=["points: many rows", "points: many columns"]).rows
    assert [row.verdict for row in rows] == ["passed", "passed"]
    assert seen == {0.0, 1.0}
