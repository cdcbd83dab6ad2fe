"""A cause that may fit the entries by chance is not named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastgrad.checks.order import check
from fastgrad.diagnosis import experiments
from fastgrad.diagnosis.chance import classes, is_supported
from fastgrad.report.messages import HEADLINE_CONFIDENCE
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings
from tests.planted.row import function


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causes must not depend on the load of the machine."""
    monkeypatch.setattr(experiments, "SECONDS", 60.0)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("analytical", "failing", "tried", "expected"),
    [
        (numbers(0.5, 1.5, 2.5), 3, 1000, True),  # three different values
        (numbers(0.5, -0.5, 1.5), 3, 1000, False),
        (numbers(0.5, 0.5 + 1e-9, 1.5), 3, 1000, False),
        (numbers(*[1.0] * 400), 400, 1, False),  # any order of equal values is the same
        (numbers(*[0.0, 1.0] * 3), 6, 1, False),  # 20 orders
        (numbers(*[0.0, 1.0] * 6), 12, 1, True),  # 924 orders
        (numbers(*[0.0, 1.0] * 6), 12, 10, False),
        (torch.complex(numbers(*[0.0, 1.0] * 6), numbers(*[0.0] * 12)), 12, 1, True),
        (numbers(0.5, 1.5, torch.inf), 3, 1, False),
        (numbers(), 0, 1, False),
    ],
)
def test_what_is_evidence(analytical: Tensor, failing: int, tried: int, expected: bool) -> None:
    is_failing = torch.arange(analytical.numel()) < failing
    assert is_supported(analytical, is_failing, tried) == expected


def test_values_that_differ_by_rounding_are_in_one_class() -> None:
    assert classes(numbers(2.0, 0.0, 2.0 + 1e-9, -1.0, 1e-12)).tolist() == [2, 1, 2, 0, 1]
    assert len(set(classes(torch.complex(numbers(1.0, 1.0, 2.0), numbers(0.0, 1.0, 0.0))).tolist())) == 3


def failed(
    forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor, Tensor], Tensor], x: Tensor, fast: bool = False
) -> Report:
    report = check(function(forward, backward), x.requires_grad_(), Settings(fast_mode=fast))
    assert not report.passed
    return report


def draws(size: int, count: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(size, dtype=torch.float64, generator=generator) for _ in range(count)]


MASKS: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = [
    (lambda x: x.clamp(-1, 1), lambda g, x: g * (x < 1)),
    (lambda x: x.clamp(-1, 1), lambda g, x: g),
    (lambda x: x.clamp(0, 1), lambda g, x: g * (x > 0)),
    (lambda x: x.clamp(min=0), lambda g, x: g),
    (lambda x: x.clamp(min=0), lambda g, x: g * (x < 0)),
    (lambda x: torch.where(x > 0, x, 0.1 * x), lambda g, x: torch.where(x > 0, g, 0.01 * g)),
]


@pytest.mark.parametrize("size", [5, 7])
@pytest.mark.parametrize(("forward", "backward"), MASKS)
def test_a_wrong_mask_of_few_elements_is_no_changed_tensor(
    forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor, Tensor], Tensor], size: int
) -> None:
    for x in draws(size, 16):
        report = check(function(forward, backward), x.requires_grad_(), Settings())  # passes if no bound is exceeded
        names = {cause.name for cause in report.causes}
        assert not names & {"saved tensor", "rolled", "permuted", "boundary", "last tile"}, report.causes


def test_an_element_that_was_selected_wrongly_is_not_shifted() -> None:
    for x in draws(40, 3) + draws(400, 2):
        for fast in (False, True):
            report = failed(lambda x: x.min(), lambda g, x: g * (x == x.max()), x.clone(), fast)
            assert not {"rolled", "permuted", "saved tensor", "zero gradient"} & {cause.name for cause in report.causes}


def test_a_halo_needs_a_dimension_along_which_elements_depend_on_each_other() -> None:
    def ends(report: Report) -> list[str]:
        return [cause.text for cause in report.causes if cause.name == "boundary"]

    last = torch.arange(12) >= 10
    report = failed(torch.sin, lambda g, x: g * torch.where(last, x, x.cos()), draws(12)[0])
    assert ends(report) == ["derivatives are wrong only at the last 2 positions along dimension 0 of in0"]
    neighbors = torch.eye(12).double() + torch.eye(12).double().roll(1, 0).tril()
    report = failed(lambda x: neighbors @ x, lambda g, x: neighbors.t() @ g.masked_fill(last, 0.0), draws(12)[0])
    assert ends(report) == [
        "derivatives are wrong only at the last 3 positions along dimension 0 of in0; check the padding or halo"
    ]


def test_nearly_equal_entries_do_not_show_a_factor() -> None:
    x = numbers(1.0, 1.0001)
    report = failed(lambda x: x**3 / 3, lambda g, x: g * (x * x + 0.3), x)
    assert "constant factor" not in {cause.name for cause in report.causes}
    report = failed(lambda x: x**3 / 3, lambda g, x: 1.3 * g * x * x, x)
    assert "constant factor" in {cause.name for cause in report.causes}


def test_a_factor_of_equal_entries_next_to_right_ones_is_not_called_missing() -> None:
    x = numbers(0.5, -2.0, -1.5, 0.1, 0.7, -0.3)
    report = failed(lambda x: torch.where(x > 0, x, 0.1 * x), lambda g, x: torch.where(x > 0, g, 0.01 * g), x)
    (cause,) = [cause for cause in report.causes if cause.name == "constant factor"]
    assert cause.text == "every wrong analytical entry is 0.1 x the numerical one"
    assert cause.confidence < HEADLINE_CONFIDENCE


@pytest.mark.parametrize(("sign", "size"), [(1, "large"), (-1, "small")])
def test_a_term_may_be_missing_or_added(sign: int, size: str) -> None:
    report = failed(torch.sin, lambda g, x: g * (x.cos() + 0.1 * sign), draws(6)[0])
    (text,) = [cause.text for cause in report.causes if cause.name == "missing term"]
    assert text.startswith(f"every wrong analytical entry is too {size} by 0.1: backward omits or adds a term")


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        (lambda g: g[0].sum(0), "omits most of the outputs that depend on the element: a sum or a mean over "
         "grad_output is missing along dimension 0 of out0"),
        (lambda g: g[:, 0].sum(0), "missing along dimension 1 of out0"),
        (lambda g: g[0, 0], "missing along dimensions 0, 1 of out0"),
    ],
)  # fmt: skip
def test_only_dimensions_that_are_not_summed_are_named(kept: Callable[[Tensor], Tensor], says: str) -> None:
    report = failed(lambda b: b.sin().expand(4, 5, 3) * 1, lambda g, b: kept(g) * b.cos(), draws(3)[0])
    (text,) = [cause.text for cause in report.causes if cause.name == "missing reduction"]
    assert says in text


def test_half_is_not_most() -> None:
    report = failed(lambda b: b.sin().expand(2, 6) * 1, lambda g, b: g[0] * b.cos(), draws(6)[0])
    (text,) = [cause.text for cause in report.causes if cause.name == "missing reduction"]
    assert "omits about half of the outputs" in text


def test_a_mean_over_one_element_is_not_named() -> None:
    report = failed(lambda x: x.reshape(1, 4).sum(1), lambda g, x: 4 * g.expand(4), draws(4)[0])
    assert not [cause for cause in report.causes if "the 1 elements" in cause.text], report.causes
