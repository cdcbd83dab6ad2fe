"""The cause that is named first is the planted one; without evidence, none is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.checks.order import check
from fastgrad.diagnosis import experiments
from fastgrad.diagnosis.causes import _of_stairs, diagnose
from fastgrad.diagnosis.value_causes import constant_factor, is_zero
from fastgrad.report.data import Plan
from fastgrad.report.evidence import CauseName, Evidence, Explanation, Sample
from fastgrad.report.failure import Comparison, Difference, Entry, Failure
from fastgrad.report.messages import HEADLINE_CONFIDENCE
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings
from tests.planted import TABLE
from tests.planted.causes import CAUSES, Function, both_modes
from tests.planted.causes_blind import BLIND
from tests.planted.causes_operators import OPERATORS, Operator
from tests.planted.row import Planted, function

PLANTED = [*CAUSES, *BLIND]

# The cause that is named first for these mistakes, which is not the planted one.
CONFUSED: dict[str, CauseName | None] = {
    # The dimensions of the mistake are not those of the tensor.
    "elementwise, tiles transposed in place": None,
    # The kept tensor is not the input at another point, and later calls do not overwrite it.
    "activation changed in place after it was kept": None,
    "output kept, then scaled in place": None,
    "one workspace for two layers": None,
}


# Causes that are planted only by the author of the diagnosis, or in OPERATORS.
WITHOUT_BLIND_CASE: set[CauseName] = {
    "modified grad_output",
    "dependent inputs",
    "overwritten",
    "wrong dimension",
    "swapped gradients",
    "repeated gradient",
    "missing factor",
    "missing term",
    "triangle",
    "discontinuity",
}


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causes must not depend on the load of the machine."""
    monkeypatch.setattr(experiments, "SECONDS", 60.0)


def failed(row: Planted, **keywords: Any) -> Report:
    checker = fastgrad.gradgradcheck if row.order == 2 else fastgrad.gradcheck
    with pytest.raises(fastgrad.GradcheckError) as raised:
        checker(row.wrong, row.inputs(), **{**row.keywords, **keywords})
    return raised.value.report


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in PLANTED])
def test_the_planted_cause_is_named_first(row: Planted) -> None:
    report = failed(row)
    comparison = report.failure.comparison
    if comparison is not None and comparison.worst is not None:
        assert row.entry(comparison.worst.output_index, comparison.worst.input_index)
    named = report.causes[0].name if report.causes else None
    assert named == CONFUSED.get(row.name, row.cause), report.causes
    assert all(0 < cause.confidence <= 1 and cause.measure for cause in report.causes)
    assert [cause.confidence for cause in report.causes] == sorted((c.confidence for c in report.causes), reverse=True)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in PLANTED])
def test_the_right_twin_passes(row: Planted) -> None:
    checker = fastgrad.gradgradcheck if row.order == 2 else fastgrad.gradcheck
    assert checker(row.right, row.inputs(), **row.keywords)


def test_at_most_one_in_ten_is_confused_and_every_cause_is_planted() -> None:
    assert len(CONFUSED) <= len(PLANTED) / 10
    assert CONFUSED.keys() <= {row.name for row in PLANTED}
    assert {row.cause for row in CAUSES} == set(get_args(CauseName))
    assert {row.cause for row in BLIND} == set(get_args(CauseName)) - WITHOUT_BLIND_CASE
    assert min(len(CAUSES), len(BLIND)) >= 36


@pytest.mark.parametrize(
    "keywords", [{"engine": "dense"}, {"engine": "compressed"}, {"engine": "sketch", "fast_mode": True, "seed": 2}]
)
def test_every_engine_leads_to_the_same_cause(keywords: dict[str, Any]) -> None:
    seen = set()
    for row in CAUSES:
        if row.cause not in seen:
            seen.add(row.cause)
            assert failed(row, **keywords).causes[0].name == row.cause, row.name


# Names of the causes in OPERATORS, as reports call them.
SYNONYMS: dict[str, CauseName] = {
    "detached": "constant part",
    # the input instead of the result, or the reverse
    "wrong tensor": "saved tensor",
}

# The cause that is named first for these mistakes; it is not among their true causes.
MISSED: dict[str, CauseName | None] = {
    # This cause is also true: the transpose of a convolution has the flipped kernel.
    "convolution, kernel not flipped": "transposed",
    "image convolution, kernel not flipped": "transposed",
    "convolution, flipped along one of two dimensions": "transposed",
    "convolution, weight's gradient flipped": "permuted",
    # A stride is not a slice.
    "tiles of four, last of each forgotten": "zero gradient",
    "cross entropy, ignored rows have a gradient": None,
}


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in OPERATORS])
def test_mistakes_in_usual_operators(row: Operator) -> None:
    assert fastgrad.gradcheck(row.right, row.inputs())
    with pytest.raises(fastgrad.GradcheckError) as raised:
        fastgrad.gradcheck(row.wrong, row.inputs())
    causes = raised.value.report.causes
    named = causes[0].name if causes else None
    if row.name in MISSED:
        assert named == MISSED[row.name], causes
    else:
        assert named in {SYNONYMS.get(cause or "", cause) for cause in row.causes}, causes


@pytest.mark.parametrize(
    ("name", "cause"), [("input taken for the output", "saved tensor"), ("third input only", "missing factor")]
)
def test_formulas_with_a_named_cause(name: str, cause: CauseName) -> None:
    row = next(row for row in TABLE if row.name == name)
    assert check(row.wrong, row.inputs(), Settings(**row.keywords)).causes[0].name == cause


# Wrong formulas have no simple cause, and a right gradient has none at all.
SILENT = [
    "one element",
    "phantom coupling that cancels",
    "leak across the batch",
    "outputs swapped",
    "beside an empty input",
    "a single number",
    "input's memory read in order",
    "clamp's mask inverted",
]


@pytest.mark.parametrize("name", SILENT)
def test_a_wrong_formula_has_no_named_cause(name: str) -> None:
    row = next(row for row in TABLE if row.name == name)
    report = check(row.wrong, row.inputs(), Settings(**row.keywords))
    assert report.failure is not None
    assert [cause for cause in report.causes if cause.confidence > 0.5] == []


def test_a_derivative_that_is_not_finite_is_named() -> None:
    row = next(row for row in TABLE if row.name == "one element is not a number")
    report = check(row.wrong, row.inputs(), Settings(**row.keywords))
    assert report.causes[0].name == "not finite"
    assert report.causes[0].text.startswith("the analytical derivative is not finite: nan, where input 0 at [1, 2] is ")


def test_a_passed_check_has_no_causes() -> None:
    report = check(torch.sin, torch.randn(3, dtype=torch.float64).requires_grad_(), Settings())
    assert (report.passed, report.causes, report.sample, report.evidence) == (True, (), None, None)


# From data alone.


def report_of(
    analytical: Tensor,
    numerical: Tensor,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    values: Tensor | None = None,
    evidence: Evidence | None = None,
    **of_failure: Any,
) -> Report:
    """The report of a failed check with these Jacobians, shape (outputs, inputs)."""
    i, j = torch.ones(analytical.shape).nonzero(as_tuple=True)
    a, n = analytical[i, j], numerical[i, j]
    failing = (a - n).abs() > 1e-5 + 1e-3 * n.abs()
    sample = Sample(*shapes, i, j, a, n, failing, None if values is None else values.reshape(-1)[j], None, True)
    worst = Entry((0,) * len(shapes[0]), (0,) * len(shapes[1]), complex(a[failing][0]), complex(n[failing][0]), 1e-5)
    comparison = Comparison(a.numel(), int(failing.sum()), worst, 1.0, 1.0, 1.0, 1.0, 1.0 + 0j)
    failure = Failure("mismatch", 0, 0, 0, 0, comparison=comparison, **of_failure)
    plan = Plan("dense", 8, 8, True, "")
    return Report(failure, Settings(), plan, 8, 8, 18, 8, 0.01, sample=sample, evidence=evidence)


def first(report: Report) -> CauseName | None:
    causes = diagnose(report)
    return causes[0].name if causes else None


def full(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def elementwise(count: int) -> Tensor:
    return torch.diag(1 + full(1, count)[0].abs())


N = full(6, 6)
SQUARE = ((2, 3), (2, 3))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda n: 2 * n, "constant factor"),
        (lambda n: n / 6, "constant factor"),
        (lambda n: -n, "sign"),
        (lambda n: 0 * n, "zero gradient"),
        (lambda n: n.t(), "transposed"),
        (lambda n: n.reshape(6, 2, 3).roll(1, 2).reshape(6, 6), "rolled"),
        (lambda n: n.roll(2, 0), "rolled"),
        (lambda n: n.reshape(6, 2, 3).flip(2).reshape(6, 6), "permuted"),
        (lambda n: n[:, [3, 1, 4, 0, 5, 2]], "permuted"),
        (lambda n: n + 1e-3 * full(6, 6).flip(0), None),
        (lambda n: n.abs() + 0.3, None),
    ],
)
def test_what_a_full_jacobian_tells(change: Callable[[Tensor], Tensor], cause: CauseName | None) -> None:
    assert first(report_of(change(N).contiguous(), N, SQUARE)) == cause


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (math.pi, "the factor 0.3183 is missing, perhaps 1 / pi"),
        (1 / math.pi, "the factor 3.142 is missing, perhaps pi"),
        (180 / math.pi, "the factor 0.01745 is missing, perhaps pi / 180 (degrees to radians)"),
        (math.pi / 180, "the factor 57.3 is missing, perhaps 180 / pi (radians to degrees)"),
        (3.1, "the factor 0.3226 is missing, or the factor 3.1 is superfluous"),
        (1 / 3.1, "the factor 3.1 is missing"),
    ],
)
def test_named_factors(factor: float, text: str) -> None:
    (cause,) = diagnose(report_of(factor * N, N, SQUARE))
    assert cause.name == "constant factor"
    assert cause.text.endswith(text)


def test_what_a_square_input_tells() -> None:
    n = full(4, 9)
    swapped = n.reshape(4, 3, 3).mT.reshape(4, 9)
    (cause,) = diagnose(report_of(swapped, n, ((4,), (3, 3))))
    assert (cause.name, cause.text) == (
        "transposed",
        "the gradient of in0 is transposed: dimensions 0 and 1 of in0 are swapped",
    )
    assert cause.measure == "explains all 24 wrong entries"


@pytest.mark.parametrize(
    ("shape", "wrong", "cause", "text"),
    [
        ((4, 5), lambda i: i[:, 1] == 2, "slice", "derivatives are wrong only in in0[:, 2]"),
        ((3, 4, 5), lambda i: (i[:, 0] == 1) & (i[:, 1] == 2), "slice", "derivatives are wrong only in in0[1, 2, :]"),
        (
            (3, 9),
            lambda i: (i[:, 1] == 0) | (i[:, 1] == 8),
            "boundary",
            "derivatives are wrong only at the first position and the last",
        ),
        (
            (3, 9),
            lambda i: i[:, 1] < 2,
            "boundary",
            "derivatives are wrong only at the first 2 positions along dimension 1",
        ),
        (
            (6, 7),
            lambda i: (i == 0).any(1) | (i[:, 0] == 5) | (i[:, 1] == 6),
            "boundary",
            "derivatives are wrong only along the borders",
        ),
        (
            (21,),
            lambda i: i[:, 0] >= 16,
            "last tile",
            "from index 16, a multiple of 16, to the end of dimension 0 of in0 (size 21)",
        ),
        (
            (3, 21),
            lambda i: i[:, 1] >= 16,
            "last tile",
            "from index 16, a multiple of 16, to the end of dimension 1 of in0 (size 21)",
        ),
        (
            (7, 11),
            lambda i: i[:, 0] * 11 + i[:, 1] >= 64,
            "last tile",
            "from index 64, a multiple of 64, to the end of the elements",
        ),
        ((10, 11), lambda i: (i >= 8).any(1), "last tile", "up to the last multiples of 8"),
        ((4, 5), lambda i: (i[:, 0] == 1) & (i[:, 1] == 2), None, ""),
        ((4, 5), lambda i: (i[:, 0] + i[:, 1]) % 2 == 0, None, ""),
    ],
)
def test_where_the_wrong_entries_are(
    shape: tuple[int, ...], wrong: Callable[[Tensor], Tensor], cause: CauseName | None, text: str
) -> None:
    count = math.prod(shape)
    n = elementwise(count)
    index = torch.stack(torch.unravel_index(torch.arange(count), shape), 1)
    a = torch.where(torch.diag(wrong(index)), n + full(count, count), n)
    causes = diagnose(report_of(a, n, (shape, shape)))
    assert (causes[0].name if causes else None) == cause
    assert text in (causes[0].text if causes else "")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda x: x < 0, "derivatives are wrong only where in0 < 0"),
        (lambda x: x.abs() > 1, "derivatives are wrong only where |in0| > 1"),
        (lambda x: (x > -1.1) & (x < 2), "< in0 < "),
        (lambda x: x > 99, None),
    ],
)
def test_regions(wrong: Callable[[Tensor], Tensor], text: str | None) -> None:
    x = 2 * full(1, 30)[0]
    n = elementwise(30)
    a = torch.diag(torch.diag(n) + torch.where(wrong(x), 0.5 + full(1, 30)[0].abs(), 0.0))
    if text is None:
        a = a + torch.diag(0.5 * full(1, 30)[0])  # wrong everywhere
    causes = diagnose(report_of(a, n, ((30,), (30,)), x))
    assert bool(causes) == (text is not None)
    assert text is None or (causes[0].name == "region" and text in causes[0].text)


@pytest.mark.parametrize(
    ("sign", "wrong", "text"),
    [
        (1, lambda x: x == 0, "derivatives are wrong only where in0 is 0"),
        (-1, lambda x: x == 0, "derivatives are wrong only where in0 is 0"),
        (1, lambda x: x <= 1, "derivatives are wrong only where in0 <= 1"),
        (1, lambda x: x < 1, "derivatives are wrong only where in0 < 1"),
        (1, lambda x: x >= 1, "derivatives are wrong only where in0 >= 1"),
        (1, lambda x: x > 1, "derivatives are wrong only where in0 > 1"),
    ],
)
def test_bounds_of_a_region_that_elements_lie_on(sign: int, wrong: Callable[[Tensor], Tensor], text: str) -> None:
    x = sign * (full(1, 30)[0].abs() + 0.2)
    x[[3, 8, 20]], x[[4, 9]] = 0.0, 1.0
    n = elementwise(30)
    a = n + torch.diag(torch.where(wrong(x), 0.5, 0.0))
    causes = diagnose(report_of(a, n, ((30,), (30,)), x))
    assert (causes[0].name, causes[0].text) == ("region", text)


def test_the_side_is_named_whose_entries_are_all_wrong() -> None:
    x, n = full(6, 8), torch.zeros(6, 9, 8, 9, dtype=torch.float64)
    for k in range(9):
        n[:, k, :, k] = x
    a = n.clone()
    a[:, 5, 3, 5] *= 1.5
    (cause, factor) = diagnose(report_of(a.view(54, 72), n.view(54, 72), ((6, 9), (8, 9))))
    assert (cause.text, factor.name) == ("derivatives are wrong only in in0[3, 5]", "constant factor")
    assert cause.measure == "all 6 entries of this element are wrong, and none of the other 426"
    a = n.clone()
    a[1, 2, :, 2] *= 1.5
    causes = diagnose(report_of(a.view(54, 72), n.view(54, 72), ((6, 9), (8, 9))))
    assert causes[0].text == "derivatives are wrong only in out0[1, 2]"


def test_a_rule_that_fits_a_sample_is_stated_of_the_sample() -> None:
    n = elementwise(30)
    a = n.clone()
    a[:2, :2] *= 2
    report = report_of(a, n, ((30,), (30,)))
    report = replace(report, sample=replace(report.sample, complete=False))
    cause = next(cause for cause in diagnose(report) if cause.name == "boundary")
    text = "derivatives are wrong only at the first 2 positions along dimension 0 of in0"
    assert cause.text == f"in a sample of 900 entries, {text}"
    assert cause.confidence < HEADLINE_CONFIDENCE
    cause = diagnose(replace(report, evidence=Evidence(places=((text, True),))))[0]
    assert (cause.text, cause.confidence > HEADLINE_CONFIDENCE) == (text, True)
    assert cause.measure.endswith("in the sample; sums of the other entries with random weights confirm this")
    refuted = diagnose(replace(report, evidence=Evidence(places=((text, False),))))
    assert text not in " ".join(cause.text for cause in refuted)


def test_entries_of_one_element_in_a_sample_are_called_sampled() -> None:
    n = full(12, 12)
    a = n.clone()
    a[5] += 1
    report = report_of(a, n, ((12,), (12,)))
    report = replace(report, sample=replace(report.sample, complete=False))
    cause = next(cause for cause in diagnose(report) if cause.name == "slice")
    assert cause.text == "in a sample of 144 entries, derivatives are wrong only in out0[5]"
    assert cause.measure == "all 12 sampled entries of this element are wrong, and none of the other 132"


def test_an_error_that_grows_is_no_region() -> None:
    x = full(1, 30)[0]
    n = elementwise(30)
    assert first(report_of(n + torch.diag(0.01 * x**4), n, ((30,), (30,)), x)) is None


REDUCED = torch.eye(3, dtype=torch.float64).repeat(4, 1)  # a bias of 3 over a batch of 4


@pytest.mark.parametrize(
    ("analytical", "numerical", "shapes"),
    [
        (REDUCED / 4, REDUCED, ((4, 3), (3,))),
        (torch.ones(12, 3, dtype=torch.float64), REDUCED, ((4, 3), (3,))),
        (torch.cat([REDUCED[:3], 0 * REDUCED[3:]]), REDUCED, ((4, 3), (3,))),
        (torch.eye(6, dtype=torch.float64), torch.eye(6, dtype=torch.float64) - 1 / 6, ((6,), (6,))),
        (N + torch.outer(full(1, 6)[0], full(1, 7)[0, 1:]), N, ((6,), (6,))),
    ],
)
def test_missing_reductions(analytical: Tensor, numerical: Tensor, shapes: Any) -> None:
    assert first(report_of(analytical, numerical, shapes)) == "missing reduction"


@pytest.mark.parametrize("rows", [[0, 3, 6], [0, 2, 4, 6, 8, 10]])
def test_rows_of_zeros_are_no_missing_reduction(rows: list[int]) -> None:
    n = elementwise(12) + torch.diag(1 + full(1, 11)[0].abs(), 1)
    a = n.clone()
    a[rows] = 0
    assert first(report_of(a, n, ((12,), (12,)))) == "zero gradient"


@pytest.mark.parametrize(
    ("change", "part", "cause"),
    [
        (torch.conj, "real", "missing conjugate"),
        (lambda n: -n.conj(), "imaginary", "missing conjugate"),
        (lambda n: 1j * n, "real", "complex factor"),
        (lambda n: n.real + 0j, "real", "complex factor"),
        (lambda n: 2 * n, "real", "constant factor"),
        (lambda n: -n, "real", "sign"),
    ],
)
def test_complex_entries(change: Callable[[Tensor], Tensor], part: str, cause: CauseName) -> None:
    n = torch.complex(full(4, 4), full(4, 4).t())
    assert first(report_of(change(n).resolve_conj(), n, ((4,), (4,)), part=part)) == cause


EXPERIMENTS: list[tuple[Evidence, CauseName]] = [
    (Evidence(func_varies=1e-9), "nondeterminism"),
    (Evidence(runs=((0.0, 0.1, 0.2), (0.0, 0.1), (0.0, 0.1, 0.2))), "saved tensor"),
    (Evidence(runs=((0.0, 0.1, 0.2), (0.3, 0.4), (0.5, 0.6, 0.7))), "saved tensor"),
    (Evidence(runs=((0.0, 0.3, 0.2), (0.1, 0.4), (0.2, 0.1, 0.3))), "nondeterminism"),
    (Evidence(after_others=0.1), "saved tensor"),
    (Evidence(after_call=0.1), "saved tensor"),
    (Evidence(at_zero=1e-3), "nonlinear backward"),
    (Evidence(scaled=((-1.0, 2.0, 1.0), (4.0, 3.0, 16.0), (0.5, 0.5, 0.25))), "nonlinear backward"),
    (Evidence(non_contiguous=0.5), "layout of grad_output"),
    (Evidence(non_contiguous=math.inf), "layout of grad_output"),
    (Evidence(non_contiguous=0.5, dense_error=0.1), None),  # type: ignore[list-item]
    (Evidence(non_contiguous=0.5, dense_error=5e-4), "layout of grad_output"),  # right within rtol
    (Evidence(expanded_error="RuntimeError: no"), "layout of grad_output"),
    (Evidence(expanded_error="RuntimeError: no", dense_error=0.1), "layout of grad_output"),
    (Evidence(expanded_error="RuntimeError: no", modified=0.0), "modified grad_output"),
    (Evidence(modified=0.1), "modified grad_output"),
    (Evidence(modified=0.0), None),  # type: ignore[list-item]
    (Evidence(explanation=Explanation("dependent inputs", "one made of another", 1e-10)), "dependent inputs"),
    (Evidence(split=0.2, added=0.0), "sparse grad_output"),
    (Evidence(split=0.2, added=0.1), "nonlinear backward"),
    (Evidence(output_dtype="float32"), "low precision"),
    (Evidence(other_part=(1 + 0j, 1 + 0j)), "missing conjugate"),
    (Evidence(explanation=Explanation("rolled", "shifted", 1e-10)), "rolled"),
    (Evidence(explanation=Explanation("saved tensor", "right for input 0 squared", 1e-10)), "saved tensor"),
    (Evidence(other_mode=1 + 0j), "modes disagree"),
    (Evidence(other_mode=-1 + 0j), "both modes wrong"),
    (Evidence(rounding=1e-6), "rounding"),
    (Evidence(rounding=1e-10), "truncation"),
    (Evidence(), None),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("found", "cause"), EXPERIMENTS)
def test_what_experiments_tell(found: Evidence, cause: CauseName | None) -> None:
    """The imaginary part has one wrong entry, -1 instead of 1."""
    report = report_of(torch.tensor([[-1.0]]).double(), torch.tensor([[1.0]]).double(), ((), ()), part="imaginary")
    slopes = tuple(Difference(h, 2 * h * slope, slope) for h, slope in ((1e-6, 3.0), (1e-9, -1.1)))
    failure = replace(report.failure, convergence=slopes)
    report = replace(report, failure=failure, sample=None, evidence=found, settings=Settings(check_forward_ad=True))
    assert first(report) == cause


@pytest.mark.parametrize(
    ("found", "says", "measure"),
    [
        (
            Evidence(non_contiguous=math.inf),
            "backward is wrong for a grad_output that is non-contiguous",
            "finite in only one of them",
        ),
        (
            Evidence(non_contiguous=0.5),
            "backward is wrong for a grad_output that is non-contiguous",
            "the relative difference of the two gradients is 0.5",
        ),
        (
            Evidence(non_contiguous_error="ValueError: no"),
            "backward raises for a grad_output that is non-cont",
            "ValueError",
        ),
        (Evidence(expanded_error="ValueError: no"), "backward raises for a grad_output that is expanded", "ValueError"),
    ],
)
def test_only_an_exception_is_said_to_be_raised(found: Evidence, says: str, measure: str) -> None:
    cause, *_ = diagnose(replace(report_of(N + 1, N, SQUARE), sample=None, evidence=found))
    assert cause.text.startswith(says)
    assert measure in cause.measure


@pytest.mark.parametrize(("share", "order"), [(1e-3, ""), (1e-6, "atomic additions in a varying order, ")])
def test_small_random_numbers_are_not_taken_for_an_order_of_additions(share: float, order: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def backward(g: Tensor, x: Tensor) -> Tensor:
        return g * x.cos() * (1 + share * torch.rand(x.shape, generator=generator, dtype=x.dtype))

    x = torch.linspace(0.2, 0.9, 3, dtype=torch.float64, device="cpu").requires_grad_()
    (cause,) = check(function(torch.sin, backward), (x,), Settings()).causes
    reasons = f"look for random numbers, state, {order}missing synchronization, or uninitialized memory"
    assert cause.text == f"repeated calls of backward give different values: {reasons}"


@pytest.mark.parametrize("numerical", [math.inf, math.nan])
def test_no_mode_is_right_about_what_is_not_finite(numerical: float) -> None:
    comparison = Comparison(4, 1, Entry((), (), 1.0, numerical, numerical), numerical, numerical, 1.0, numerical, 0j)
    failure = Failure("mismatch", 0, 0, 0, 0, comparison=comparison)
    report = Report(failure, Settings(), None, 1, 1, 2, 1, 0.1, evidence=Evidence(other_mode=2 + 0j))
    assert diagnose(report) == ()


def test_a_zero_of_the_other_mode_has_no_sign() -> None:
    comparison = Comparison(4, 1, Entry((), (), 1.0, 0.0, 1e-5), 1.0, 0.0, 1.0, 0.0, 0j)
    failure = Failure("mismatch", 0, 0, 0, 0, comparison=comparison, mode="forward")
    report = Report(failure, Settings(), None, 1, 1, 2, 1, 0.1, evidence=Evidence(other_mode=complex(-0.0, 0.0)))
    assert [cause.measure for cause in diagnose(report)] == ["reverse mode gives 0"]


@pytest.mark.parametrize(
    ("dense_error", "says"),
    [
        (None, ""),
        (1e-9, ": it is right for a grad_output without zeros, but not for all others"),
        (0.1, ": it is wrong for a grad_output without zeros"),
    ],
)
def test_which_zeros_of_grad_output_matter_is_not_guessed(dense_error: float | None, says: str) -> None:
    """The backward may be right for some grad_outputs with zeros, and wrong for others."""
    found = Evidence(split=0.2, added=0.0, dense_error=dense_error)
    cause, *_ = diagnose(replace(report_of(N + 1, N, SQUARE), sample=None, evidence=found))
    assert cause.text == "backward depends on which elements of grad_output are zero" + says


def test_differences_that_do_not_converge_are_no_evidence_for_a_factor() -> None:
    """All differences of sin(s x) at eps are the derivative times sin(s eps) / (s eps): a factor without meaning."""
    x = torch.tensor([1.0, 0.2, 0.0], dtype=torch.float64, requires_grad=True)
    report = check(lambda x: (1e12 * x).sin(), (x,), Settings())
    assert (report.verdict, report.causes) == ("not converged", ())


@pytest.mark.parametrize(("eps", "count"), [(1e-6, 1), (0.5, 0)])
def test_only_steps_larger_than_eps_show_that_func_is_a_staircase(eps: float, count: int) -> None:
    worst = Entry((0,), (0,), analytical=1.0, numerical=0.0, allowed=1e-5)
    assert len([*_of_stairs(eps, worst, ((0.125, 1.1), (0.0625, 0.9)))]) == count


LOGARITHM = "func is not finite: output 0 at [2] is -inf"


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({}, f"{LOGARITHM}, and input 0 at [2] is 0"),
        ({"check_forward_ad": True}, f"{LOGARITHM}, and input 0 at [2] is 0"),
        ({"check_forward_ad": True, "check_backward_ad": False}, f"{LOGARITHM}, and input 0 at [2] is 0"),
        ({"check_forward_ad": True, "fast_mode": True, "engine": "sketch"}, f"{LOGARITHM}, and input 0 at [2] is 0"),
    ],
)
def test_the_logarithm_of_zero_is_not_finite_in_either_mode(keywords: dict[str, Any], text: str) -> None:
    x = torch.tensor([1.0, 2.0, 0.0, 3.0], dtype=torch.float64, requires_grad=True)
    (cause,) = check(torch.log, (x,), Settings(**keywords)).causes
    assert (cause.name, cause.text) == ("not finite", text)


@pytest.mark.parametrize(
    ("scaled", "text"),
    [
        (((-1.0, 2.0, 1.0), (4.0, 3.0, 16.0), (0.5, 0.5, 0.25)), "to the power 2"),
        (
            ((-1.0, 0.0, 1.0), (4.0, 0.75, 1.0), (0.5, 1.0, 1.0)),
            "the size of the gradient does not grow with grad_output",
        ),
        (((-1.0, 2.0, 1.0), (4.0, 0.0, 4.0), (0.5, 0.0, 0.5)), "positive and negative grad_outputs differently"),
        (((-1.0, 0.0, 1.0), (4.0, 0.7, 1.2), (0.5, 0.2, 0.6)), "clamps or rounds"),
        (((-1.0, 0.3, 1.0), (4.0, 0.3, 4.0), (0.5, 0.3, 0.5)), "is nonlinear in another way"),
    ],
)
def test_how_backward_is_not_linear(scaled: Any, text: str) -> None:
    report = report_of(-N, N, SQUARE, evidence=Evidence(scaled=scaled))
    (cause,) = diagnose(report)
    assert cause.name == "nonlinear backward"
    assert text in cause.text


def test_a_kink_leaves_no_room_for_other_causes() -> None:
    report = report_of(
        -N, N, SQUARE, evidence=Evidence(other_mode=-1 + 0j), numerical_issue="kink", detail="a kink: here"
    )
    assert [cause.text for cause in diagnose(report)] == ["a kink: here"]


def test_no_gradient_at_all() -> None:
    failure = Failure("nonzero numerical gradient", 0, 0, 0, 0, detail="2")
    report = Report(failure, Settings(), None, 1, 1, 2, 0, 0.1)
    assert first(report) == "zero gradient"


@pytest.mark.parametrize("kind", ["dtype", "size", "incorrect gradient", "batched raises", "undefined tangent"])
def test_other_failures_are_silent(kind: Any) -> None:
    assert diagnose(Report(Failure(kind, 0, 0, 0, 0), Settings(), None, 1, 1, 2, 0, 0.1)) == ()


# If no sample could be taken, sums over all wrong entries are the evidence.


def sums(analytical: float, numerical: float, product: complex, mismatches: int = 12) -> Comparison:
    return Comparison(100, mismatches, None, 1.0, 1.0, analytical, numerical, product)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (sums(4.0, 1.0, 2.0 + 0j), 2.0),
        (sums(1.0, 1.0, -1.0 + 0j), -1.0),
        (sums(1.0, 1.0, 0.9 + 0j), None),  # not explained
        (sums(1.0, 1.0, 1j), None),  # a phase is no factor
        (sums(0.0, 1.0, 0j), None),
        (sums(math.nan, 1.0, complex(math.nan)), None),
        (sums(4.0, 1.0, 2.0 + 0j, mismatches=1), None),  # of a single entry
    ],
)
def test_a_factor_from_sums(found: Comparison, expected: float | None) -> None:
    factor = constant_factor(found)
    assert (factor[0] if factor else None) == expected
    report = Report(Failure("mismatch", 0, 0, 0, 0, comparison=found), Settings(), None, 1, 1, 2, 0, 0.1)
    assert bool(diagnose(report)) == (expected is not None or is_zero(found))


def test_zero_from_sums() -> None:
    assert is_zero(sums(0.0, 1.0, 0j))
    assert not is_zero(sums(1.0, 1.0, 0j))


class Cube(torch.autograd.Function):
    """x^3; the gradient is off by a share that differs between elements, or by a common factor near 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x**3

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gradient = 3 * x * x * grad_output
        return (gradient * ctx.factor if ctx.factor else gradient + 0.01 * grad_output * x.sin()), None


@pytest.mark.parametrize(("factor", "is_named"), [(0.0, False), (1.01, True), (1.004, True), (0.5, True)])
def test_a_factor_near_1_is_named_only_if_it_explains_the_error(factor: float, is_named: bool) -> None:
    x = torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    report = check(Cube.apply, (x, factor), Settings())
    assert not report.passed
    assert ("constant factor" in {cause.name for cause in report.causes}) == is_named


@pytest.mark.parametrize(
    ("jvp", "text"),
    [
        (lambda t, x: 0 * t, "every wrong analytical entry is zero: a term is missing"),
        (lambda t, x: t.flip(0).cumsum(0).flip(0), "the analytical Jacobian is the transpose of the numerical one"),
    ],
)
def test_the_cause_of_a_wrong_jvp_says_nothing_about_backward(jvp: Callable[..., Tensor], text: str) -> None:
    func = both_modes(lambda x: x.cumsum(0), lambda g, x: g.flip(0).cumsum(0).flip(0), jvp)
    x = torch.linspace(1, 2, 6, dtype=torch.float64, requires_grad=True)
    report = fastgrad.check(func, x, check_forward_ad=True, check_backward_ad=False, check_undefined_grad=False)
    assert report.causes[0].text == text


MATRIX = full(6, 6)
ONCE = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]], dtype=torch.float64)
REPEATED = torch.tensor([0, 1, 1, 2, 0])
OTHERS = torch.tensor([2, 0, 4, 1, 5, 3])


def _linear(matrix: Tensor, jvp: Callable[..., Tensor]) -> Function:
    return both_modes(lambda x: matrix @ x, lambda g, x: matrix.t() @ g, jvp)


@pytest.mark.parametrize(
    ("func", "text"),
    [
        (
            _linear(MATRIX, lambda t, x: (MATRIX @ t).roll(2)),
            "the tangent of the output is shifted by 2 along dimension 0",
        ),
        (_linear(MATRIX, lambda t, x: MATRIX @ t.roll(2)), "the tangent of {} is shifted by 2 along dimension 0"),
        (
            _linear(MATRIX, lambda t, x: (MATRIX @ t).roll(3)),
            "the tangent of the output is shifted by 3 along dimension 0",
        ),
        (
            _linear(MATRIX, lambda t, x: (MATRIX @ t)[OTHERS]),
            "the tangent of the output has the right values at wrong positions",
        ),
        (_linear(MATRIX, lambda t, x: MATRIX @ t[OTHERS]), "the tangent of {} has the right values at wrong positions"),
        (
            both_modes(
                lambda x: 2 * x[REPEATED],
                lambda g, x: torch.zeros_like(x).index_add(0, REPEATED, 2 * g),
                lambda t, x: 2 * ONCE @ t[:3],
            ),
            "the tangent of each element of {} reaches only one of the outputs that the element affects",
        ),
        (
            both_modes(lambda x: x.expand(4, 6).clone(), lambda g, x: g.sum(0), lambda t, x: t.sum().expand(4, 6)),
            "each output depends on one element of {}, but the jvp adds up the tangents of all elements",
        ),
        (
            both_modes(
                lambda x: x.expand(4, 6).clone(),
                lambda g, x: g.sum(0),
                lambda t, x: torch.cat([t.expand(1, 6), torch.zeros(3, 6, dtype=t.dtype)]),
            ),
            "the tangent of each element of {} does not reach most of the outputs that depend on the element: the "
            "tangent is not expanded along dimension 0 of the output, or a mean or norm is treated as a constant",
        ),
        (
            both_modes(lambda x: x - x.mean(), lambda g, x: g - g.mean(), lambda t, x: 1 * t),
            "the tangent of each element of {} does not reach most of the outputs that depend on the element: a sum or "
            "a mean over tangents is missing, or a mean or norm is treated as a constant",
        ),
        (
            both_modes(torch.sin, lambda g, x: g * x.cos(), lambda t, x: (t * x.cos()).float().double()),
            "the jvp computes in float32: float32 represents all entries of the analytical Jacobian exactly",
        ),
    ],
)
def test_the_cause_of_a_wrong_jvp_speaks_of_tangents(func: Function, text: str) -> None:
    x = torch.linspace(1, 2, 6, dtype=torch.float64).sqrt().requires_grad_()
    keywords: dict[str, Any] = {"check_forward_ad": True, "check_backward_ad": False, "check_undefined_grad": False}
    # Below the rounding of float32, above that of the differences.
    report = fastgrad.check(func, x, **keywords, atol=2e-9, rtol=2e-9)
    assert report.causes[0].text == text.format("inputs[0]")


@pytest.mark.parametrize(
    ("backward", "text"),
    [
        (lambda g, x: MATRIX.t() @ g.roll(2), "grad_output is shifted by 2 along dimension 0"),
        (lambda g, x: (MATRIX.t() @ g).roll(2), "the gradient of inputs[0] is shifted by 2 along dimension 0"),
        (lambda g, x: MATRIX.t() @ g.roll(3), "grad_output is shifted by 3 along dimension 0"),
    ],
)
@pytest.mark.parametrize("fast_mode", [False, True])
def test_shifts_are_those_of_backward(backward: Callable[..., Tensor], text: str, fast_mode: bool) -> None:
    func = function(lambda x: MATRIX @ x, backward)
    report = fastgrad.check(func, torch.ones(6, dtype=torch.float64, requires_grad=True), fast_mode=fast_mode)
    assert report.causes[0].text == text


def test_a_gradient_that_is_zero_for_one_sign_is_described_without_a_quotient() -> None:
    func = function(lambda x: 2 * x, lambda g, x: 2 * g.clamp(min=0))
    x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    measures = {cause.measure for seed in range(4) for cause in fastgrad.check(func, x, seed=seed).causes}
    assert "the gradient is zero for a grad_output, but not for -1 x this grad_output" in measures
    assert not any("nan" in measure for measure in measures)


def linear(forward: Tensor, backward: Tensor) -> Callable[[Tensor], Tensor]:
    """A func that multiplies x by `forward`, and has the gradient of a multiplication by `backward`."""
    return function(lambda x: forward @ x, lambda grad, x: backward.t() @ grad)


def causes_of(forward: Tensor, backward: Tensor) -> list[str]:
    x = torch.linspace(1, 2, forward.shape[1], dtype=torch.float64, requires_grad=True)
    report = fastgrad.check(linear(forward, backward), x)
    assert report.failure is not None
    return [cause.text for cause in report.causes]


@pytest.mark.parametrize("complex_factor", [False, True])
def test_a_factor_is_that_of_every_wrong_entry(complex_factor: bool) -> None:
    """Least squares find the factor of the large entry."""
    unit = 1 + 0.5j if complex_factor else 1.0
    right = torch.linspace(1, 2, 30, dtype=torch.float64) * unit
    right[27] = 4e-4 * unit
    for small, is_factor in ((1.13, True), (0.885, False)):
        wrong = right.clone()
        wrong[5] *= 1.13
        wrong[27] *= small
        n, a = right[[5, 27]], wrong[[5, 27]]
        places = torch.tensor([5, 27])
        sample = Sample((30,), (30,), places, places, a, n, torch.tensor([True, True]), complete=True)
        failure = Failure("mismatch", 0, 0, 0, 0)
        report = Report(failure, Settings(), None, 1, 1, 2, 0, 0.1, sample=sample)
        assert any("1.13 x the numerical one" in cause.text for cause in diagnose(report)) is is_factor


@pytest.mark.parametrize("output", [True, False])
def test_a_spurious_entry_may_be_anywhere(output: bool) -> None:
    """One spurious entry of 90,000; at 225 elements of one side, which are zero or in the last tile, func has none."""
    generator = torch.Generator().manual_seed(1)
    used, all_elements = torch.randint(75, (300,), generator=generator), torch.arange(300)
    forward = torch.zeros(300, 300, dtype=torch.float64)
    forward[(used, all_elements) if output else (all_elements, used)] = torch.linspace(1, 2, 300, dtype=torch.float64)
    backward = forward.clone()
    backward[(87, 298) if output else (1, 282)] = 0.0356
    assert causes_of(forward, backward) == []


def test_a_spurious_block_is_still_located() -> None:
    forward = torch.zeros(300, 300, dtype=torch.float64)
    forward[torch.arange(300), torch.arange(300) % 75] = 1.5
    backward = forward.clone()
    backward[torch.arange(44), torch.arange(256, 300)] = torch.linspace(1, 2, 44, dtype=torch.float64)
    assert any("from index 256, a multiple of 256, to the end" in text for text in causes_of(forward, backward))
