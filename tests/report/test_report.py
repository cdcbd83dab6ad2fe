"""Contents of reports: verdicts, what was compared, positions of failing entries, and the documented plain form."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import re
import time
import typing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastgrad
from fastgrad.checks.order import check
from fastgrad.core.native import IS_NATIVE
from fastgrad.core.phases import TIMED_COLUMNS, TIMED_SECONDS, Stopwatch, phase
from fastgrad.report import evidence, low_precision
from fastgrad.report.data import Certificate, Environment, Pair, Plan
from fastgrad.report.evidence import Cause, Sample
from fastgrad.report.failure import Comparison, Difference, Entry, Extent, Failure, Span, Subject
from fastgrad.report.json_form import LARGEST_TENSOR, SCHEMA
from fastgrad.report.messages import extent_text, places_text, size_text, verdict_line
from fastgrad.report.report import Report
from fastgrad.report.settings import Settings
from fastgrad.verdict.comparison import spans
from tests.planted.row import function


def uniform(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(*shape, dtype=dtype, generator=generator).add_(0.5).requires_grad_()


def scaled(*where: Any, factor: complex = 1.5) -> Any:
    """x^2 with a gradient that is off by a factor at some places."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            grad = grad_output * 2 * x.conj()
            grad[where] *= factor
            return grad

    return Square.apply


def run(func: Any, *inputs: Tensor, **settings: Any) -> Report:
    return check(func, inputs, Settings(**settings))


# Verdicts


def test_verdicts() -> None:
    assert run(torch.sin, uniform(3)).verdict == "passed"
    assert run(scaled(0), uniform(3)).verdict == "failed"
    generator = torch.Generator().manual_seed(0)
    noisy = run(lambda x: x + 1e-3 * torch.rand(x.shape, dtype=x.dtype, generator=generator), uniform(3))
    assert (noisy.verdict, noisy.passed) == ("not converged", False)
    assert "not converged: an entry differs" in verdict_line(noisy)


def test_undecided_has_a_bound() -> None:
    x = torch.linspace(-2, 2, 3000, dtype=torch.float64, requires_grad=True)
    wrong = scaled(..., factor=1 + 2e-4)  # within rtol everywhere
    report = run(wrong, x, fast_mode=True, engine="sketch")
    assert (report.verdict, report.passed) == ("undecided", True)
    assert report.undecided is not None
    assert report.undecided > 1e-5
    assert [certificate.of for certificate in report.certificates] == ["differences"]
    assert str(report).startswith(f"gradcheck undecided: no error was found, but errors up to {report.undecided:.2g}")


# Comparison


def test_pairs_of_the_dense_engine() -> None:
    report = run(lambda x, w: (x @ w, w.sum()), uniform(2, 3), uniform(3, 4), engine="dense", check_forward_ad=True)
    places = [(pair.output, pair.input, pair.mode, pair.entries) for pair in report.pairs]
    assert places == [
        (o, i, mode, m * n)
        for mode in ("reverse", "forward")
        for o, m in ((0, 8), (1, 1))
        for i, n in ((0, 6), (1, 12))
    ]
    assert all(pair.agrees and not pair.mismatches and not pair.on_pattern for pair in report.pairs)
    assert 0 < report.pairs[0].largest_absolute < 1e-8
    assert [certificate.claim for certificate in report.certificates] == [
        "backward is linear in grad_output",
        "jvp is linear in its tangent",
    ]


def test_passes_over_columns_count_once() -> None:
    x = uniform(6, 3)
    (pair,) = run(torch.exp, x, engine="dense", memory_limit=4 * 8 * 18).pairs
    assert pair.entries == 18 * 18
    assert pair.largest_absolute == run(torch.exp, x, engine="dense").pairs[0].largest_absolute


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_pairs_of_the_compressed_engine(dtype: torch.dtype) -> None:
    x, w = uniform(40, dtype=dtype), uniform(40, dtype=dtype)
    report = run(torch.mul, x, w, engine="compressed")
    dense = run(torch.mul, x, w, engine="dense")
    parts = 2 if dtype.is_complex else 1
    assert [(pair.input, pair.part, pair.entries) for pair in report.pairs] == [(i, "all", 40 * parts) for i in (0, 1)]
    assert all(pair.on_pattern for pair in report.pairs)
    for i in (0, 1):
        for name in ("largest_absolute", "largest_relative"):
            expected = max(getattr(pair, name) for pair in dense.pairs if pair.input == i)
            assert getattr(report.pairs[i], name) == pytest.approx(expected, rel=1e-12)
    bounds = {certificate.claim: certificate.bound for certificate in report.certificates}
    assert set(bounds) == {
        "the numerical entries outside the sparsity pattern are zero",
        "the analytical entries outside the sparsity pattern are zero, and backward is linear in grad_output",
    }
    assert all(0 < bound <= report.settings.atol for bound in bounds.values())


def test_a_single_pair_takes_the_comparison_that_was_made() -> None:
    x = uniform(400)
    (pair,) = run(torch.exp, x, engine="compressed").pairs
    (dense,) = run(torch.exp, x, engine="dense").pairs
    assert (pair.entries, pair.on_pattern) == (400, True)
    assert pair.largest_absolute == pytest.approx(dense.largest_absolute, rel=1e-12)


def test_a_failure_names_the_pairs_before_it() -> None:
    report = run(lambda x, w: scaled(1)(w) + x, uniform(5), uniform(5), engine="dense")
    assert [(pair.input, pair.agrees, pair.mismatches) for pair in report.pairs] == [(0, True, 0), (1, False, 1)]


@pytest.mark.parametrize("engine", ["sketch", "compressed"])
def test_located_entries_make_a_pair(engine: str) -> None:
    class Stray(torch.autograd.Function):
        """sin, with an entry in its gradient that should be zero."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            grad = grad_output * x.cos()
            grad[7] += grad_output[300]
            return grad

    report = run(Stray.apply, uniform(1000), engine=engine, fast_mode=engine == "sketch")
    (pair,) = report.pairs
    assert (pair.agrees, pair.entries) == (False, 1_000_000)
    assert report.failure is not None
    assert report.failure.comparison is not None
    (entry,) = report.failure.comparison.worst_entries
    assert (entry.output_index, entry.input_index) == ((300,), (7,))
    assert report.failure.comparison.extent == Extent(
        (Span(1000, 1, 300, 300, 1, (300,)),), (Span(1000, 1, 7, 7, 1, (7,)),)
    )


def test_entries_that_agree_once_re_measured() -> None:
    x = torch.tensor([1e-6, 1.0], dtype=torch.float64, requires_grad=True)
    (pair,) = run(torch.sqrt, x).pairs
    assert (pair.mismatches, pair.agrees) == (1, True)


def test_a_func_that_does_not_move() -> None:
    for settings in ({}, {"fast_mode": True, "engine": "sketch"}):
        (certificate,) = run(lambda x: x.detach().round(), uniform(3), **settings).certificates
        assert (certificate.claim, certificate.bound) == ("func does not depend on its inputs", 0.0)


@pytest.mark.parametrize("keywords", [{"engine": "dense"}, {"engine": "compressed"}, {"fast_mode": True}])
def test_a_report_says_up_to_which_call_gradients_were_repeated(keywords: dict[str, Any]) -> None:
    calls = 0

    def backward(grad_output: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return grad_output * (2 if calls <= right else 3)

    doubled = function(lambda x: 2 * x, backward)
    right = 10**9
    passed = run(doubled, uniform(60), **keywords)
    claims = [
        re.fullmatch(r"a custom backward gives the same .* call (\d+) of backward\)", known.claim)
        for known in passed.certificates
    ]
    (last,) = (int(claim[1]) for claim in claims if claim)
    assert last <= passed.vjps
    # All errors from that call on show.
    for right in (1, 9, last // 2, last - 1):
        calls = 0
        assert not run(doubled, uniform(60), **keywords).passed, right


def test_fast_mode_says_what_its_sums_vouch_for() -> None:
    report = run(torch.sin, uniform(100), fast_mode=True, check_forward_ad=True, engine="sketch")
    assert report.pairs == ()
    assert report.plan is not None
    assert [certificate.bound for certificate in report.certificates] == [1e-5, report.plan.detection_limit, 1e-5]


# Failing entries


def test_worst_entries_are_measured_and_in_order() -> None:
    x = uniform(4, 5)
    report = run(scaled(2), x, engine="compressed")
    assert report.failure is not None
    comparison = report.failure.comparison
    assert comparison is not None
    worst = comparison.worst_entries
    assert worst[0] == comparison.worst
    assert {entry.input_index for entry in worst} == {(2, k) for k in range(5)}
    excesses = [entry.difference / entry.allowed for entry in worst[1:]]
    assert excesses == sorted(excesses, reverse=True)
    for entry in worst:
        expected = 2 * x[entry.input_index].item()
        assert entry.error is not None
        assert entry.numerical == pytest.approx(expected, abs=1e-9)
        assert entry.analytical == pytest.approx(1.5 * expected, abs=1e-9)
    assert comparison.on_pattern


def test_entries_beyond_the_worst_are_those_at_eps() -> None:
    report = run(lambda x, w: scaled(...)(w).sum() + x.sum(), uniform(2), uniform(30), engine="dense")
    assert report.failure is not None
    assert report.failure.comparison is not None
    first, *others = report.failure.comparison.worst_entries
    assert len(others) == 7
    assert first.error is not None
    assert {entry.error for entry in others} == {None}
    assert len({entry.input_index for entry in (first, *others)}) == 8


def test_what_is_right_once_re_measured_is_no_worst_entry() -> None:
    class Root(torch.autograd.Function):
        """The square root, with a gradient that is wrong at element 2."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sqrt()

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad_output / (2 * x.sqrt()) * torch.tensor([1.0, 1.0, 1.02, 1.0], dtype=x.dtype)

    x = torch.tensor([1e-6, 2e-6, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    report = run(Root.apply, x, engine="dense")
    assert report.failure is not None
    assert report.failure.comparison is not None
    assert report.failure.comparison.mismatches == 3
    assert [entry.input_index for entry in report.failure.comparison.worst_entries] == [(2,)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_convergence_is_what_was_measured(dtype: torch.dtype) -> None:
    x = uniform(4, dtype=dtype).detach().div_(2).requires_grad_()  # for |x| < 1, all coordinates have the same steps
    failure = run(scaled(2), x, engine="dense").failure
    assert failure is not None
    steps = [difference.step for difference in failure.convergence]
    assert steps == pytest.approx([6.4e-5, 1e-6, 1e-6 / 64, 1e-6 / 64**2])
    assert failure.comparison is not None
    assert failure.comparison.worst is not None
    near = [difference for difference in failure.convergence if 1e-6 < difference.step < 1e-3]
    for difference in near:
        assert abs(difference.estimate - failure.comparison.worst.numerical) < 1e-8
        assert isinstance(difference.estimate, complex if dtype.is_complex else float)
        assert abs(difference.change) == pytest.approx(2 * difference.step * abs(difference.estimate), rel=1e-6)


def test_convergence_leaves_out_steps_that_raise() -> None:
    class Log(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if (x <= 0).any():
                raise ValueError("not in the domain")
            ctx.save_for_backward(x)
            return x.log()

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 3 * grad_output / x

    failure = run(Log.apply, torch.tensor([1e-3], dtype=torch.float64, requires_grad=True)).failure
    assert failure is not None
    assert max(difference.step for difference in failure.convergence) < 1e-3


# Extents


@given(st.lists(st.integers(1, 5), max_size=3), st.data())
def test_spans_are_the_places_along_each_dimension(shape: list[int], data: st.DataObject) -> None:
    elements = data.draw(st.lists(st.integers(0, math.prod(shape) - 1), min_size=1, max_size=12))
    found = spans(torch.tensor(elements), shape)
    assert len(found) == len(shape)
    for dimension, span in enumerate(found):
        places = sorted({int(np.unravel_index(element, shape)[dimension]) for element in elements})
        steps = {high - low for low, high in pairwise(places)}
        assert (span.size, span.count, span.first, span.last) == (shape[dimension], len(places), places[0], places[-1])
        assert span.step == (steps.pop() if len(steps) == 1 else 1 if not steps else None)
        assert span.places == tuple(places)


def test_many_places_are_counted_only() -> None:
    (span,) = spans(torch.arange(0, 30, 3), (40,))
    assert span == Span(40, 10, 0, 27, 3, ())


@pytest.mark.parametrize(
    ("outputs", "inputs", "expected"),
    [
        # One row of the input affects all outputs.
        ([(i, j) for i in range(6) for j in range(8)], [(5, j) for _ in range(6) for j in range(8)], "in0[5, :]"),
        ([(2, j) for j in range(8)], [(2, j) for j in range(8)], "out0[2, :] and in0[2, :]"),
        ([(i, 7) for i in range(6)], [(i, 7) for i in range(6)], "out0[:, 7] and in0[:, 7]"),
        ([(0, j) for j in range(4, 8)], [(0, j) for j in range(4, 8)], "out0[0, 4:8] and in0[0, 4:8]"),
        ([(i, j) for i in range(6) for j in (0, 7)], [(0, 0)] * 12, "out0[:, {0, 7}] and in0[0, 0]"),
        (
            [(i, j) for i in range(6) for j in (0, 2, 4, 6)],
            [(i, 3) for i in range(6)] * 4,
            "out0[:, 0:7:2] and in0[:, 3]",
        ),
        # Few entries at unrelated places have no extent.
        ([(0, 1), (3, 6), (5, 2)], [(0, 1), (3, 6), (5, 2)], ""),
        ([(3, 4)], [(3, 4)], ""),
    ],
)
def test_extent_in_words(outputs: list[tuple[int, ...]], inputs: list[tuple[int, ...]], expected: str) -> None:
    shape = (6, 8)
    output, input_ = (spans(torch.tensor([8 * i + j for i, j in places]), shape) for places in (outputs, inputs))
    assert extent_text(Extent(output, input_), ("out0", "in0"), len(outputs)) == (
        f"all in {expected}" if expected else ""
    )


@pytest.mark.parametrize("engine", ["dense", "compressed"])
def test_the_message_says_where(engine: str) -> None:
    with pytest.raises(fastgrad.GradcheckError) as raised:
        fastgrad.gradcheck(scaled(slice(None), 3), (uniform(6, 5),), engine=engine)
    entries = {"dense": "900 entries", "compressed": "30 nonzero entries"}[engine]
    assert f"  extent     6 of {entries}, all in out0[:, 3] and x[:, 3]\n" in str(raised.value)


def test_extents_of_sparse_inputs_are_about_all_elements() -> None:
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    x = torch.sparse_coo_tensor(torch.tensor([[0, 4, 4], [1, 0, 2]]), values, (5, 3), check_invariants=True)
    x.requires_grad_()

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return 2 * x.to_dense()

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            grad = 2 * grad_output
            grad[4] *= 3
            return grad.sparse_mask(ctx.saved_tensors[0].coalesce())

    failure = run(Times.apply, x, masked=True).failure
    assert failure is not None
    assert failure.comparison is not None
    assert failure.comparison.extent is not None
    assert failure.comparison.extent.input == (Span(5, 1, 4, 4, 1, (4,)), Span(3, 2, 0, 2, 2, (0, 2)))


# Time


def test_phases_do_not_overlap() -> None:
    report = run(torch.exp, uniform(300), engine="compressed")
    assert {"first evaluation", "numerical columns", "coloring", "zero grad_output"} <= set(report.phases)
    assert all(seconds >= 0 for seconds in report.phases.values())
    assert 0.1 * report.seconds < sum(report.phases.values()) <= report.seconds


def test_the_quickest_checks_are_not_timed() -> None:
    report = run(torch.exp, uniform(3))
    assert set(report.phases) == {"first evaluation"} or report.phases["first evaluation"] >= TIMED_SECONDS
    slow = run(lambda x: (time.sleep(TIMED_SECONDS), x.exp())[1], uniform(3))
    assert set(slow.phases) > {"first evaluation", "numerical columns"}


def test_a_check_within_func_keeps_its_own_time() -> None:
    x = uniform(TIMED_COLUMNS)

    def func(y: Tensor) -> Tensor:
        if not inner:
            inner.append(run(torch.sin, x))
        return y * y

    inner: list[Report] = []
    report = run(func, uniform(TIMED_COLUMNS))
    assert sum(inner[0].phases.values()) <= inner[0].seconds
    assert sum(report.phases.values()) <= report.seconds


def test_the_stopwatch_survives_errors() -> None:
    @phase("inner")
    def inner() -> None:
        raise ArithmeticError

    @phase("outer")
    def outer() -> None:
        with pytest.raises(ArithmeticError):
            inner()

    with Stopwatch({}) as watch:
        outer()
    assert list(watch.seconds) == ["inner", "outer"]
    assert watch.inside == pytest.approx(sum(watch.seconds.values()))
    inner_again = watch.seconds["inner"]
    with pytest.raises(ArithmeticError):
        inner()
    assert watch.seconds["inner"] == inner_again  # it has ended


# Text


def test_what_a_passed_check_says() -> None:
    x = uniform(3)
    report = run(torch.sin, x)
    pair = report.pairs[0]
    environment = report.environment
    assert environment is not None
    assert str(report) == (
        "gradcheck passed: 9 entries compared\n"
        f"  compared   d out0 / d in0: 9 entries, largest absolute error {pair.largest_absolute:.2g}, largest relative "
        f"error {pair.largest_relative:.2g}\n"
        "  certified  backward is linear in grad_output: errors of at least 1e-05 that exceed their "
        "tolerance are detected\n"
        "  engine     dense: 3 input coordinates, 3 output coordinates, 8 evaluations, "
        f"{9 if IS_NATIVE else 14} VJPs, {report.seconds * 1e3:.1f} ms\n"
        f"  settings   eps 1e-06, atol 1e-05, rtol 0.001, seed 0; fastgrad {fastgrad.__version__}, torch "
        f"{torch.__version__}, cpu"
    )


def test_many_pairs_are_not_all_printed() -> None:
    xs = [uniform(1) for _ in range(11)]
    text = str(run(lambda *values: sum(values), *xs))
    assert text.count("  compared   ") == 8
    assert "             and 3 more pairs, largest absolute error " in text


def test_a_failed_report_reads_as_the_error() -> None:
    with pytest.raises(fastgrad.GradcheckError) as raised:
        fastgrad.gradcheck(scaled(0), (uniform(3),))
    assert str(raised.value.report) == str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value)).report) == str(raised.value)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5 GiB"), (5 << 50, "5120 TiB")]
)
def test_sizes(size: int, text: str) -> None:
    assert size_text(size) == text


# The plain form

DOCUMENT = (Path(__file__).parents[2] / "docs/report.md").read_text()
NAMES = re.findall(r"^### (\w+)$", DOCUMENT, re.MULTILINE)


def documented(name: str) -> dict[str, str]:
    """The keys of a section, with their types."""
    section = DOCUMENT.partition(f"### {name}\n")[2].partition("\n### ")[0]
    keys = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] not in ("key", "---"):
            keys |= dict.fromkeys(cells[0].split(", "), cells[1])
    return keys


def fields_of(kind: Any) -> set[str]:
    return set(kind._fields) if hasattr(kind, "_fields") else {one.name for one in dataclasses.fields(kind)}


def held_by(kind: Any) -> dict[str, Any]:
    """The report class and the classes of its fields, by name, from annotations."""
    imported_for_types = vars(evidence) | vars(low_precision)
    found, todo = {}, [kind]
    while todo:
        one = todo.pop()
        found[one.__name__] = one
        for hint in typing.get_type_hints(one, localns=imported_for_types).values():
            stack = [hint]
            while stack:
                part = stack.pop()
                stack += typing.get_args(part)
                if (
                    isinstance(part, type)
                    and part.__module__.startswith("fastgrad.report.")
                    and part.__name__ not in found
                ):
                    todo.append(part)
    return found


def test_every_part_of_a_report_is_documented() -> None:
    kinds = held_by(Report)
    assert set(NAMES) == kinds.keys()
    for name, kind in kinds.items():
        computed = {"schema", "verdict", "passed"} if name == "Report" else set()
        assert set(documented(name)) == fields_of(kind) | computed, name


def conforms(value: Any, kinds: str) -> bool:
    """Whether a plain value has one of the documented types."""
    for kind in kinds.split(", "):
        if kind.startswith("list of "):
            if isinstance(value, list) and all(conforms(item, kind.removeprefix("list of ")) for item in value):
                return True
        elif kind in NAMES:
            if isinstance(value, dict) and set(value) == set(documented(kind)):
                wrong = [key for key, types in documented(kind).items() if not conforms(value[key], types)]
                assert not wrong, (kind, wrong)
                return True
        elif {
            "null": value is None,
            "str": isinstance(value, str),
            "bool": isinstance(value, bool),
            "int": isinstance(value, int) and not isinstance(value, bool),
            "float": isinstance(value, (float, int)) or value in ("nan", "inf", "-inf"),
            "complex": isinstance(value, dict) and set(value) == {"re", "im"},
            "tensor": isinstance(value, dict) and set(value) == {"shape", "dtype", "values"},
            "list": isinstance(value, list),
            "object": isinstance(value, dict),
        }[kind]:
            return True
    return False


def synthetic() -> Report:
    """A report in which every field is set, to unusual values."""
    entry = Entry((3, 17), (5, 2), complex(math.nan, 1), complex(-math.inf, 0), math.inf, 1e-9)
    comparison = Comparison(
        entries=8448,
        mismatches=2,
        worst=entry,
        largest_absolute=math.nan,
        largest_relative=math.inf,
        sum_analytical=1.0,
        sum_numerical=4.0,
        sum_product=2j,
        analytical=torch.tensor([[math.nan, 1j]]),
        numerical=torch.ones(2, LARGEST_TENSOR),
        worst_entries=(entry,),
        extent=Extent((Span(6, 1, 3, 3, 1, (3,)), Span(20, 1, 17, 17, 1, (17,))), ()),
    )
    failure = Failure(
        "mismatch", 0, 1, 0, 2, "real", "forward", comparison, "<b>", ValueError("<script>"), "kink",
        (Difference(1e-3, 1j, math.nan),),
    )  # fmt: skip
    some = torch.tensor([0, 3])
    sample = Sample((6, 20), (8, 4), some, some, some * 1j, some / 0.0, some > 0)
    return Report(
        failure=failure,
        settings=Settings(grad_outputs="ones", memory_limit=1 << 20),
        plan=Plan("compressed", 0, 0, True, "probed", 1e-3, 3, 4, 5000),
        n=8,
        m=1,
        evaluations=18,
        vjps=5,
        seconds=math.nan,
        notes=("a <note>",),
        sample=sample,
        causes=(Cause("sign", "the sign is < wrong", "all & sundry", 0.8),),
        pairs=(Pair(0, 1, 0, 2, "all", "reverse", 9, 2, False, 0.0, math.inf, True, False),),
        certificates=(Certificate("a < b", "by > 2 vectors", 1e-5),),
        undecided=1e-3,
        phases={"numerical columns": 0.25},
        environment=Environment("1", "2", "3", "cuda:0 <A>"),
        subject=Subject("F", ("x", "y"), ("float64[2]", "float64[3]"), ("float64[]",)),
    )


@pytest.mark.parametrize(
    "report",
    [
        synthetic(),
        run(torch.sin, uniform(3)),
        run(scaled(0), uniform(3)),
        run(scaled(0), uniform(40, dtype=torch.complex128)),
        run(torch.sin, uniform(100), fast_mode=True),
    ],
    ids=["synthetic", "passed", "failed", "complex", "fast"],
)
def test_real_reports_are_as_documented(report: Report) -> None:
    plain = report.to_dict()
    assert conforms(plain, "Report")
    refused: list[str] = []
    text = report.to_json(indent=1)
    assert json.loads(text, parse_constant=refused.append) == plain
    assert not refused


def test_values_that_json_does_not_know() -> None:
    plain = synthetic().to_dict()
    comparison = plain["failure"]["comparison"]
    assert comparison["worst"]["analytical"] == {"re": "nan", "im": 1.0}
    assert comparison["worst"]["numerical"] == {"re": "-inf", "im": 0.0}
    assert comparison["analytical"]["values"] == [[{"re": "nan", "im": 0.0}, {"re": 0.0, "im": 1.0}]]
    assert comparison["numerical"] == {"shape": [2, LARGEST_TENSOR], "dtype": "float32", "values": None}
    assert plain["failure"]["cause"] == "ValueError: <script>"
    assert plain["schema"] == SCHEMA
    assert f"`schema` is {SCHEMA}." in DOCUMENT


def test_a_report_holds_nothing_that_it_cannot_write() -> None:
    with pytest.raises(TypeError, match="cannot hold a set"):
        dataclasses.replace(synthetic(), notes={1}).to_dict()  # type: ignore[arg-type]


def test_a_report_is_true_where_it_passed() -> None:
    passed, failed = run(torch.sin, uniform(3)), run(scaled(0), uniform(3))
    assert passed
    assert not failed
    undecided = dataclasses.replace(passed, undecided=1e-3)
    assert undecided
    assert undecided.verdict == "undecided"
    for report in (passed, undecided):
        report.raise_if_failed()
    with pytest.raises(fastgrad.GradcheckError, match="Jacobian mismatch") as raised:
        failed.raise_if_failed()
    assert raised.value.report is failed
    assert str(raised.value) == str(failed)


def test_a_failure_is_raised_from_its_exception() -> None:
    with pytest.raises(fastgrad.GradcheckError) as raised:
        dataclasses.replace(synthetic(), seconds=0.1).raise_if_failed()
    assert isinstance(raised.value.__cause__, ValueError)


def test_reports_are_equal_that_say_the_same() -> None:
    x = uniform(3)
    passed, failed = run(torch.sin, x), run(scaled(0), x)
    again = run(scaled(0), x)
    assert failed == again
    assert hash(failed) == hash(again)
    assert failed == pickle.loads(pickle.dumps(failed))
    assert {passed, failed, again, run(torch.sin, x)} == {passed, failed}
    assert failed != passed
    assert failed != run(scaled(0), x, atol=1e-7)
    assert failed != run(scaled(0), x + 1)
    assert passed != "passed"
    # Times, and fields that depend on them, do not count; NaN equals NaN.
    slower = dataclasses.replace(synthetic(), seconds=3.0, phases={}, plan=None, evaluations=99)
    assert synthetic() == slower
    assert synthetic() != dataclasses.replace(slower, undecided=1e-2)


def test_a_report_shows_in_one_line() -> None:
    report = dataclasses.replace(run(torch.sin, uniform(3)), evaluations=1, vjps=14, m=12)
    assert repr(report) == "<Report: passed, 12 x 3, dense, 1 evaluation, 14 VJPs>"
    failed = dataclasses.replace(synthetic(), jvps=2)
    assert repr(failed) == "<Report: failed (mismatch), 1 x 8, compressed, 18 evaluations, 5 VJPs, 2 JVPs>"
    assert (
        repr([dataclasses.replace(report, plan=None)]) == "[<Report: passed, 12 x 3, no engine, 1 evaluation, 14 VJPs>]"
    )


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (Span(size=9, count=9, first=0, last=8, step=1), "all"),
        (Span(size=9, count=1, first=5, last=5, step=None), "5"),
        (Span(size=9, count=3, first=1, last=7, step=3), "1:8:3"),
        (Span(size=9, count=3, first=1, last=7, step=None, places=(1, 4, 7)), "{1, 4, 7}"),
        (Span(size=99, count=40, first=3, last=90, step=None), "within 3:91"),
    ],
)
def test_places(span: Span, text: str) -> None:
    assert places_text(span) == text
