"""Keywords: those of torch, those of fastgrad, and those that are rejected by name."""

from __future__ import annotations

import inspect
import json
import pickle
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch

import fastgrad
from fastgrad.testing import torch_reference


def x() -> torch.Tensor:
    return torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", ["gradcheck", "gradgradcheck"])
def test_signatures_are_torchs_and_our_eight(name: str) -> None:
    own = inspect.signature(getattr(fastgrad, name)).parameters
    torchs = inspect.signature(getattr(torch.autograd, name)).parameters
    assert [name for name in own if name in torchs] == list(torchs)
    ours = {"engine", "seed", "confidence", "memory_limit", "progress", "reference", "reference_device", "precision"}
    assert set(own) - set(torchs) == {*ours, "positional", "check_sparse_nnz"}  # and two older spellings
    assert ours == set(torch_reference._OWN_KEYWORDS)
    for parameter in torchs.values():
        # None, not False: None means "not given", because check_sparse_nnz may be given instead.
        assert own[parameter.name].default == (None if parameter.name == "masked" else parameter.default)
        assert own[parameter.name].kind == parameter.kind


@pytest.mark.parametrize("check", [fastgrad.gradcheck, fastgrad.gradgradcheck])
def test_progress(check: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in ("dense", "compressed"):
        values = torch.linspace(0, 1, 200, dtype=torch.float64).requires_grad_()
        assert check(torch.sin, (values,), progress=True, engine=engine)
        shown = capsys.readouterr().err
        assert "about" in shown
        assert "100%" in shown
    for silent in (None, False):
        assert check(torch.sin, (values,), progress=silent)
        assert capsys.readouterr().err == ""
    with pytest.raises(TypeError, match="progress must be None, True or False, got 1"):
        check(torch.sin, (values,), progress=1)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="progress=True needs tqdm: pip install tqdm"):
        check(torch.sin, (values,), progress=True)
    assert check(torch.sin, (values,), progress=None)


@pytest.mark.parametrize(
    ("check", "keywords"),
    [
        (fastgrad.gradcheck, {"check_backward_ad": False}),
        (fastgrad.gradcheck, {"check_backward_ad": False, "check_forward_ad": True, "check_batched_grad": True}),
        (fastgrad.gradcheck, {"check_batched_forward_grad": True}),
        (fastgrad.gradgradcheck, {"check_rev_over_rev": False}),
        (fastgrad.gradgradcheck, {"check_rev_over_rev": False, "check_fwd_over_rev": True}),
        (
            fastgrad.gradgradcheck,
            {
                "check_rev_over_rev": False,
                "check_fwd_over_rev": True,
                "check_undefined_grad": False,
                "check_batched_grad": True,
            },
        ),
    ],
)
def test_contradictory_keywords_are_torchs_assertions(check: Any, keywords: dict[str, Any]) -> None:
    torchs = getattr(torch.autograd, check.__name__)
    with pytest.raises(AssertionError) as expected:
        torchs(torch.sin, (x(),), **keywords)
    with pytest.raises(AssertionError) as raised:
        check(torch.sin, (x(),), **keywords)
    assert str(raised.value) == str(expected.value)


def test_eps_atol_rtol_are_used() -> None:
    wrong = lambda v: 1.01 * v.detach() * v + 0 * v  # noqa: E731
    func = lambda v: wrong(v)  # noqa: E731
    assert not fastgrad.gradcheck(func, (x(),), raise_exception=False)
    assert fastgrad.gradcheck(func, (x(),), rtol=1.0)
    assert fastgrad.gradcheck(func, (x(),), atol=1.0)
    coarse = lambda v: (100 * v).sin()  # noqa: E731
    assert fastgrad.gradcheck(coarse, (x(),))
    moves = []
    assert fastgrad.gradcheck(lambda v: (moves.append((v - x()).abs().max().item()), coarse(v))[1], (x(),), eps=1e-3)
    assert max(moves[:5]) == pytest.approx(1e-3)


def test_raise_exception_false_swallows_the_verdict_only() -> None:
    assert fastgrad.gradcheck(lambda v: v.detach() * v, (x(),), raise_exception=False) is False

    def breaks(v: torch.Tensor) -> torch.Tensor:
        raise KeyError("planted")

    with pytest.raises(KeyError):
        fastgrad.gradcheck(breaks, (x(),), raise_exception=False)


def test_errors_derive_from_torchs_and_carry_the_report() -> None:
    from torch.autograd.gradcheck import GradcheckError

    with pytest.raises(GradcheckError) as raised:
        fastgrad.gradcheck(lambda v: v.detach() * v, (x(),))
    assert isinstance(raised.value, fastgrad.GradcheckError)
    report = raised.value.report
    assert report.failure is not None
    comparison = report.failure.comparison
    assert comparison is not None
    assert (comparison.mismatches, comparison.entries) == (2, 4)
    assert comparison.worst is not None
    assert comparison.worst.difference == pytest.approx(0.7, rel=1e-6)


def test_errors_pickle_with_their_report() -> None:
    with pytest.raises(fastgrad.GradcheckError) as raised:
        fastgrad.gradcheck(lambda v: v.detach() * v, (x(),))
    copy = pickle.loads(pickle.dumps(raised.value))
    assert str(copy) == str(raised.value)
    assert copy.report.n == raised.value.report.n


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"eps": 0}, ValueError, "eps must be positive and finite, got 0"),
        ({"eps": float("nan")}, ValueError, "eps must be positive and finite, got nan"),
        ({"eps": "1e-6"}, TypeError, "eps must be a number, got '1e-6'"),
        ({"atol": -1.0}, ValueError, "atol must be at least zero, got -1.0"),
        ({"rtol": None}, TypeError, "rtol must be a number, got None"),
        ({"nondet_tol": float("nan")}, ValueError, "nondet_tol must be at least zero, got nan"),
        ({"eps": torch.tensor([1e-6])}, TypeError, "eps must be a number, got tensor([1.0000e-06])"),
        ({"atol": torch.tensor(1j)}, TypeError, "atol must be a number, got 1j"),
        ({"rtol": torch.tensor(True)}, TypeError, "rtol must be a number, got True"),
        ({"rtol": torch.tensor(-1.0)}, ValueError, "rtol must be at least zero, got -1.0"),
        ({"eps": torch.tensor(1e-6, device="meta")}, TypeError, "eps must be a number, got tensor(..., device='meta'"),
        ({"seed": 1.5}, ValueError, "seed must be None or an integer of 64 bits, got 1.5"),
        ({"seed": 2**70}, ValueError, "seed must be None or an integer"),
        ({"memory_limit": "1G"}, ValueError, "memory_limit must be None or a positive number of bytes, got '1G'"),
        ({"memory_limit": 0}, ValueError, "memory_limit must be None or a positive number"),
    ],
)
def test_bad_numbers_are_one_clear_sentence(keywords: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        fastgrad.gradcheck(torch.sin, (x(),), **keywords)


@pytest.mark.parametrize("check", [fastgrad.gradcheck, fastgrad.gradgradcheck])
def test_tensors_of_one_number_are_numbers(check: Any) -> None:
    wrong = lambda v: v.detach() * v * v  # noqa: E731
    for value in (torch.tensor(9.0), torch.tensor(9), torch.tensor(9.0, requires_grad=True)):
        for name in ("atol", "rtol"):
            keywords = {name: value}
            assert not check(wrong, (x(),), raise_exception=False)
            assert check(wrong, (x(),), **keywords)
            if not value.requires_grad:  # torch.allclose takes no such tolerance
                assert getattr(torch.autograd, check.__name__)(wrong, (x(),), **keywords)
    moves: list[float] = []
    func = lambda v: (moves.append((v - x()).abs().max().item()), v.sin())[1]  # noqa: E731
    assert check(func, (x(),), eps=torch.tensor(2**-10), atol=torch.tensor(1e-5), nondet_tol=torch.tensor(0))
    assert 2**-10 in moves


def test_unknown_engine_and_grad_outputs() -> None:
    with pytest.raises(ValueError, match="engine must be 'auto', 'dense', 'compressed' or 'sketch', got 'sparse'"):
        fastgrad.gradcheck(torch.sin, (x(),), engine="sparse")
    with pytest.raises(TypeError, match="grad_outputs must be tensors, got float at index 0"):
        fastgrad.gradgradcheck(torch.sin, (x(),), 1.0)
    with pytest.raises(ValueError, match="grad_outputs must be tensors"):
        fastgrad.gradgradcheck(torch.sin, (x(),), "twos")
    assert fastgrad.gradcheck(torch.sin, (x(),), engine="dense")


def test_engines_and_fast_mode() -> None:
    with pytest.raises(ValueError, match="engine='sketch' needs fast_mode=True"):
        fastgrad.gradcheck(torch.sin, (x(),), engine="sketch")
    with pytest.raises(TypeError, match="confidence must be None or between 0 and 1, got 'high'"):
        fastgrad.gradcheck(torch.sin, (x(),), fast_mode=True, confidence="high")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"confidence must be None or between 0 and 1, got 1"):
        fastgrad.gradcheck(torch.sin, (x(),), fast_mode=True, confidence=1)
    for beyond_floats in (10**400, -(10**400)):
        with pytest.raises(ValueError, match=r"^confidence must be None or between 0 and 1, got -?10+\.$"):
            fastgrad.gradcheck(torch.sin, (x(),), fast_mode=True, confidence=beyond_floats)
    with pytest.raises(fastgrad.GradcheckError, match="engine     sketch"):
        fastgrad.gradcheck(lambda v: v.detach() * v, (x(),), fast_mode=True, engine="sketch")
    with pytest.raises(fastgrad.GradcheckError, match="engine     dense"):
        fastgrad.gradcheck(lambda v: v.detach() * v, (x(),), fast_mode=True)  # tiny


@pytest.mark.parametrize("given", ["yes", [], 2, None, torch.tensor(True)])
def test_flags_may_be_anything_with_a_truth_value(given: Any) -> None:
    flags = ("check_undefined_grad", "check_grad_dtypes", "check_batched_grad", "fast_mode", "masked")
    for check in (fastgrad.gradcheck, fastgrad.gradgradcheck):
        assert all(check(torch.sin, (x(),), **{flag: given}) for flag in flags)


def test_check_undefined_grad() -> None:
    class NeedsGradOutput(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: torch.Tensor) -> torch.Tensor:
            ctx.set_materialize_grads(False)
            return v * 2

        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
            if grad_output is None:
                raise RuntimeError("no grad_output")
            return grad_output * 2

    func = NeedsGradOutput.apply
    assert fastgrad.gradcheck(func, (x(),), check_undefined_grad=False)
    with (
        pytest.warns(UserWarning, match="Backwards compatibility"),
        pytest.raises(fastgrad.GradcheckError, match="Expected backward function to handle undefined output") as raised,
    ):
        fastgrad.gradcheck(func, (x(),))
    assert isinstance(raised.value.__cause__, RuntimeError)

    class InventsGradient(NeedsGradOutput):
        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
            return torch.ones(2, dtype=torch.float64) if grad_output is None else grad_output * 2

    with (
        pytest.warns(UserWarning, match="check_undefined_grad"),
        pytest.raises(fastgrad.GradcheckError, match="undefined or zero"),
    ):
        fastgrad.gradcheck(InventsGradient.apply, (x(),))


def test_nondet_tol() -> None:
    class Jitter(torch.autograd.Function):
        sign = 1.0

        @staticmethod
        def forward(ctx: Any, v: torch.Tensor) -> torch.Tensor:
            return v * 2

        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
            Jitter.sign = -Jitter.sign
            return grad_output * (2 + Jitter.sign * 1e-8)

    with pytest.raises(fastgrad.GradcheckError, match=r"Backward is not reentrant(.|\n)*nondeterminism was 0.0"):
        fastgrad.gradcheck(Jitter.apply, (x(),))
    assert fastgrad.gradcheck(Jitter.apply, (x(),), nondet_tol=1e-7)
    assert not fastgrad.gradcheck(Jitter.apply, (x(),), nondet_tol=1e-9, raise_exception=False)


class Scattered(torch.autograd.Function):
    """sin, whose gradients differ from run to run by a random share; for larger grad_outputs, also by `nonlinear`."""

    share, nonlinear = 0.0, 0.0

    @staticmethod
    def forward(ctx: Any, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(v)
        return v.sin()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        (v,) = ctx.saved_tensors
        wrong = Scattered.nonlinear * (grad_output.abs() > 2)
        return grad_output * v.cos() * (1 + Scattered.share * (torch.rand_like(v) - 0.5) + wrong)


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("n", [5, 60, 200])
def test_nondet_tol_is_allowed_for_multiples_of_a_grad_output(
    n: int, fast_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    v = torch.linspace(0.2, 1.2, n, dtype=torch.float64).requires_grad_()
    monkeypatch.setattr(Scattered, "share", 1e-4)
    report = fastgrad.check(Scattered.apply, v, fast_mode=fast_mode, nondet_tol=1e-3)
    assert report.verdict == "passed", str(report)
    report = fastgrad.check(Scattered.apply, v, fast_mode=fast_mode)
    assert report.failure is not None
    assert report.failure.kind == "nondeterministic"
    monkeypatch.setattr(Scattered, "nonlinear", 0.01)
    for share in (0.0, 1e-4):
        monkeypatch.setattr(Scattered, "share", share)
        assert fastgrad.check(Scattered.apply, v, fast_mode=fast_mode, nondet_tol=1e-3).verdict == "failed"


@pytest.mark.parametrize("fast_mode", [False, True])
def test_nondet_tol_excuses_no_dependence_of_results_without_gradients(fast_mode: bool) -> None:
    """The rule of torch's slow mode: the numerical derivative must be zero for every nondet_tol."""
    many = torch.linspace(-1, 1, 30, dtype=torch.float64).requires_grad_()

    def verdicts(func: Any, nondet_tol: float) -> set[bool]:
        keywords = {"nondet_tol": nondet_tol, "raise_exception": False}
        own = fastgrad.gradcheck(func, (many,), fast_mode=fast_mode, **keywords)
        return {own, torch.autograd.gradcheck(func, (many,), **keywords)}

    generator = torch.Generator().manual_seed(0)
    for nondet_tol in (0.0, 1e-6, 1.0):
        assert verdicts(lambda v: v.detach() * 1e-8, nondet_tol) == {False}
        assert verdicts(lambda v: 1 + 1e-12 * torch.rand(30, generator=generator).double(), nondet_tol) == {False}
        assert verdicts(lambda v: v.detach() / 0, nondet_tol) == {False}
        assert verdicts(lambda v: torch.ones_like(v), nondet_tol) == {True}


def test_what_was_given_before_excuses_nothing() -> None:
    assert fastgrad.gradcheck(torch.sin, (x(),), seed=1, progress=False)
    with pytest.raises(ValueError, match="seed must be None or an integer"):
        fastgrad.gradcheck(torch.sin, (x(),), seed=True, progress=False)  # equal to 1
    with pytest.raises(TypeError, match="progress must be None, True or False"):
        fastgrad.gradcheck(torch.sin, (x(),), seed=1, progress=0)  # type: ignore[arg-type]  # equal to False
    atol = torch.tensor(1.0)
    wrong = lambda x: x + 0.5 * x.detach()  # noqa: E731
    assert fastgrad.gradcheck(wrong, (x(),), atol=atol)
    atol.fill_(1e-5)  # the same tensor, with another value
    assert not fastgrad.gradcheck(wrong, (x(),), atol=atol, raise_exception=False)


def test_dict_inputs_are_told_of_check() -> None:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    for inputs in ({"x": x}, ({"x": x},)):
        for check in (fastgrad.gradcheck, fastgrad.gradgradcheck):
            with pytest.raises(TypeError, match=r"Input 0 is a dict of tensors that require grad: .* fastgrad\.check"):
                check(lambda d: d["x"].sin(), inputs)
        assert fastgrad.check(lambda d: d["x"].sin(), inputs)


def test_a_function_class_is_told_of_apply() -> None:
    class Cube(torch.autograd.Function):
        pass

    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    checks = [fastgrad.gradcheck, fastgrad.gradgradcheck, fastgrad.check, fastgrad.adjoint_test]
    for check in (*checks, fastgrad.taylor_test, fastgrad.numerical_jacobian, fastgrad.analytical_jacobian):
        with pytest.raises(TypeError, match=r"func is the class Cube: pass Cube\.apply"):
            check(Cube, (x,))
    with pytest.raises(TypeError, match=r"pass Cube\.apply"):
        fastgrad.check(Cube, x, order=2)


@pytest.mark.parametrize("check", ["check", "taylor_test", "numerical_jacobian"])
def test_warnings_point_at_the_caller_of_any_function(check: str) -> None:
    single = torch.ones(2, requires_grad=True)
    keywords = {"precision": "strict"} if check == "check" else {}
    with pytest.warns(UserWarning, match="not a double precision") as caught:
        getattr(fastgrad, check)(torch.sin, single, **keywords)
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert [(each.filename, each.lineno) for each in caught] == [(__file__, line)]


def test_integers_of_numpy_are_integers() -> None:
    x, three = torch.randn(4, dtype=torch.float64, requires_grad=True), np.int64(3)
    report = fastgrad.check(torch.sin, x, seed=three, memory_limit=np.int64(1 << 20))
    assert report.passed
    assert json.loads(report.to_json())["settings"]["seed"] == 3
    assert fastgrad.gradcheck(torch.sin, x, seed=three)
    assert fastgrad.adjoint_test(torch.sin, x, trials=three, seed=three).passed
    with pytest.raises(ValueError, match="seed must be None or an integer of 64 bits"):
        fastgrad.gradcheck(torch.sin, x, seed=np.bool_(True))
