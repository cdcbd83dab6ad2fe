"""check_variants: planted mistakes are found where they hide, right functions are not accused, arguments."""

from __future__ import annotations

import json
from collections import Counter
from html import escape
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fastgrad
from tests.planted.variants import COMPILED, HIDDEN, Hidden, complex_matrix, custom, matrix, numbers, with_bias

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
    others = {"points: as given", "derivatives: input 0 alone"}
    assert {row.path for row in fastgrad.check_variants(torch.add, with_bias()).rows} <= {*counts, *others}


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


def test_time_that_is_over() -> None:
    report = fastgrad.check_variants(torch.sin, matrix(), seconds=0.0)
    assert {one.verdict for one in report.rows[1:]} == {"not run"}


@pytest.mark.parametrize("kind", [torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM])
def test_weights_of_recurrent_modules_have_tangents(kind: Any) -> None:
    module, x = kind(3, 2).double(), torch.randn(3, 2, 3, dtype=torch.float64)
    only = ["derivatives: forward mode", "derivatives: forward over reverse"]
    assert [row.verdict for row in fastgrad.check_variants(module, x, only=only).rows] == ["passed", "passed"]


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
        (matrix, {"only": []}, ValueError, "only must name at least one variant or family, got an empty list"),
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
