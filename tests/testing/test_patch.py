"""fastgrad.patch: torch's checkers forward to fastgrad, however they are reached, and are restored afterwards."""

from __future__ import annotations

import functools
import gc
import inspect
import pickle
import sys
import threading
import unittest
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck as early
from torch.autograd import gradgradcheck as early_gradgrad
from torch.testing._internal import common_utils

import fastgrad
from fastgrad.testing.patch import DisagreementError
from fastgrad.testing.torch_reference import is_calling_torch
from tests import processes


class Rolled(torch.autograd.Function):
    """2 x, with gradients at wrong positions: torch's fast mode passes it at n = 8000."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return 2 * grad_output.roll(1)


class Halved(torch.autograd.Function):
    """2 x, with half of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output


class Holder:
    check = staticmethod(early)


def closed_over(check: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *arguments: check(*arguments)


IN_A_PARTIAL = functools.partial(early, eps=1e-5)
IN_A_CLOSURE = closed_over(early)


def normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def is_torchs() -> bool:
    codes = {early.__code__.co_filename, early_gradgrad.__code__.co_filename}
    return all(name.endswith(("autograd/gradcheck.py", "autograd\\gradcheck.py")) for name in codes)


def test_all_ways_to_torchs_checkers_lead_to_fastgrad() -> None:
    x = normal(3)
    module = sys.modules["torch.autograd.gradcheck"]
    with fastgrad.patch() as checks:
        from torch.autograd import gradcheck as late
        from torch.autograd.gradcheck import gradgradcheck as late_gradgrad

        ways: list[Callable[..., bool]] = [early, late, module.gradcheck, torch.autograd.gradcheck]
        ways += [Holder.check, IN_A_PARTIAL, IN_A_CLOSURE]
        ways += [early_gradgrad, late_gradgrad, module.gradgradcheck, torch.autograd.gradgradcheck]
        for way in ways:
            assert way(torch.sin, x) is True
            assert early(func=torch.sin, inputs=(x,)) is True
    expected = [name for way in ["gradcheck"] * 7 + ["gradgradcheck"] * 4 for name in (way, "gradcheck")]
    assert [check.name for check in checks] == expected
    assert all(check.report is not None and check.report.passed for check in checks)
    assert checks[10].report is not None
    assert checks[10].report.settings.eps == 1e-5, "the partial's keyword"
    assert early(torch.sin, x)
    assert len(checks) == 22, "left again"


def test_the_wrappers_of_torch_testing_keep_their_defaults() -> None:
    with fastgrad.patch() as checks:
        assert common_utils.gradcheck(torch.sin, normal(3))
        assert common_utils.gradgradcheck(torch.sin, normal(3), fast_mode=False)
    assert [check.name for check in checks] == ["gradcheck", "gradgradcheck"]
    settings = [check.report.settings for check in checks if check.report is not None]
    fast = not common_utils.TEST_WITH_SLOW_GRADCHECK
    assert [(s.fast_mode, s.check_batched_grad) for s in settings] == [(fast, True), (False, True)]


def test_everything_is_restored() -> None:
    codes = early.__code__, early_gradgrad.__code__
    signatures = inspect.signature(early), inspect.signature(early_gradgrad)

    def interrupted(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    @fastgrad.patch()
    def check() -> None:
        assert not is_torchs()
        # Suites inspect the signature to learn which keywords this torch takes.
        assert (inspect.signature(early), inspect.signature(early_gradgrad)) == signatures
        early(interrupted, normal(3))

    with pytest.raises(KeyboardInterrupt):
        check()
    assert is_torchs()
    assert (early.__code__, early_gradgrad.__code__) == codes
    assert (inspect.signature(early), inspect.signature(early_gradgrad)) == signatures
    assert not hasattr(early, "__signature__")


def test_functions_whose_body_runs_after_the_call_are_not_decorated() -> None:
    async def coroutine() -> None: ...

    async def asynchronous_generator() -> AsyncIterator[int]:
        yield 0

    def generator() -> Iterator[int]:
        yield 0

    for function in (coroutine, asynchronous_generator, generator):
        with pytest.raises(TypeError, match=r"fastgrad\.patch\(\) cannot decorate an async or generator function"):
            fastgrad.patch()(function)

    @fastgrad.patch(compare=True)
    def doubled(value: int, *, times: int = 1) -> int:
        """Doc."""
        assert not is_torchs()
        return 2 * value if times == 1 else doubled(2 * value, times=times - 1)

    assert (doubled(1), doubled(1, times=3), doubled.__doc__, is_torchs()) == (2, 8, "Doc.", True)


def test_arguments_are_validated_before_anything_runs() -> None:
    with pytest.raises(TypeError, match=r"^fastgrad\.patch\(\) as a decorator needs a function, got 3\.$"):
        fastgrad.patch()(3)  # type: ignore[call-overload, type-var, arg-type]
    with pytest.raises(TypeError, match=r"cannot decorate a class: decorate its methods\. Got <class .*TestCase"):
        fastgrad.patch()(unittest.TestCase)
    with pytest.raises(RuntimeError, match=r"^fastgrad\.patch\(\) was left without being entered\.$"):
        fastgrad.patch().__exit__(None, None, None)
    with pytest.raises(TypeError, match=r"^compare must be True or False, got 'x'\.$"):
        fastgrad.patch(compare="x")  # type: ignore[arg-type]


def test_contexts_nest_and_hold_for_all_threads() -> None:
    with fastgrad.patch() as outer:
        with fastgrad.patch() as inner:
            thread = threading.Thread(target=early, args=(torch.sin, normal(3)))
            thread.start()
            thread.join()
        early(torch.cos, normal(3))
        assert (len(inner), len(outer)) == (1, 1)
    first, second = fastgrad.patch(), fastgrad.patch()
    first.__enter__()
    checks = second.__enter__()
    first.__exit__(None, None, None)  # not the innermost one, which stays active
    early(torch.sin, normal(3))
    second.__exit__(None, None, None)
    assert len(checks) == 1
    assert is_torchs()


def test_failures_are_fastgrads() -> None:
    x = normal(4)
    with fastgrad.patch() as checks:
        with pytest.raises(fastgrad.GradcheckError, match="worst      d out0"):
            early(Halved.apply, x)
        assert early(Halved.apply, x, raise_exception=False) is False
        with pytest.raises(ZeroDivisionError):
            early(lambda x: x / 0 if False else 1 / 0, x, raise_exception=False)
        with pytest.raises(TypeError, match="keyword-only"):
            early(torch.sin, x, 1e-6)
    assert [check.ours.verdict for check in checks] == ["failed", "failed", "raised", "raised"]
    assert [check.report is None for check in checks] == [False, False, True, True]


def test_warnings_point_at_the_caller() -> None:
    with fastgrad.patch(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        early(torch.neg, torch.ones(2, requires_grad=True), eps=1e-5, raise_exception=False)
    assert {warning.filename for warning in caught} == {__file__}


def test_compare_asks_torch_without_coming_back() -> None:
    with fastgrad.patch(compare=True) as checks:
        early(torch.sin, normal(3))
        # Torch's gradgradcheck calls gradcheck, which is patched.
        early_gradgrad(torch.sin, normal(3))
        # Keywords that torch does not have.
        early(torch.sin, normal(3), engine="dense", seed=3, check_sparse_nnz=None)
        early_gradgrad(lambda x: x**3, normal(3), "ones", memory_limit=10**6, masked=None)
    assert [check.name for check in checks] == ["gradcheck", "gradgradcheck"] * 2
    assert [(check.ours.verdict, check.torch and check.torch.verdict) for check in checks] == [("passed", "passed")] * 4
    assert all(check.torch is not None and check.torch.seconds > 0 for check in checks)


@pytest.mark.parametrize("raise_exception", [True, False])
def test_compare_raises_where_the_verdicts_differ(raise_exception: bool) -> None:
    with fastgrad.patch(compare=True) as checks, pytest.raises(DisagreementError) as caught:
        early(Rolled.apply, normal(8000), fast_mode=True, raise_exception=raise_exception)
    text = str(caught.value)
    assert "fastgrad's gradcheck failed, and torch's passed" in text
    assert "\nJacobian mismatch for output 0 with respect to input 0:\n" in text
    assert "torch: passed after" in text
    assert caught.value.check is checks[0]
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_compare_agrees_where_both_fail_or_both_raise() -> None:
    s = torch.eye(3, dtype=torch.float64).to_sparse().requires_grad_()
    with fastgrad.patch(compare=True) as checks:
        with pytest.raises(fastgrad.GradcheckError):
            early(Halved.apply, normal(4))
        assert early(Halved.apply, normal(4), raise_exception=False) is False
        with pytest.raises(NotImplementedError, match="no forward-mode AD for sparse"):
            early(lambda s: s.to_dense(masked_grad=False) * 2, s, check_forward_ad=True)
    assert [check.differs for check in checks] == [False, False, False]


def test_compare_restores_the_inputs_if_func_is_interrupted_in_torchs_checker() -> None:
    x = normal(3)
    values = x.detach().clone()

    def interrupted(x: Tensor) -> Tensor:
        if is_calling_torch() and not torch.equal(x, values):
            raise KeyboardInterrupt
        return x.sin()

    with fastgrad.patch(compare=True), pytest.raises(KeyboardInterrupt):
        early(interrupted, x)
    assert torch.equal(x, values)


def test_compare_gives_torch_the_random_numbers_that_fastgrad_had() -> None:
    seen: list[Tensor] = []

    def noisy(x: Tensor) -> Tensor:
        seen.append(torch.rand(1))
        return x * 2

    def draws(compare: bool) -> Tensor:
        torch.manual_seed(5)
        seen.clear()
        with fastgrad.patch(compare=compare):
            early(noisy, normal(2))
            early_gradgrad(torch.sin, normal(2))  # torch's checker draws grad_outputs
        return torch.rand(3)

    alone = draws(compare=False)
    ours = len(seen)
    assert torch.equal(draws(compare=True), alone), "torch's draws do not count"
    assert len(seen) > ours
    assert torch.equal(seen[0], seen[ours]), "torch begins where fastgrad began"


@pytest.mark.parametrize("kind", ["nested", "sparse"])
def test_what_fastgrad_does_not_check_torch_does_not_either(kind: str) -> None:
    # Therefore there is no fallback to torch's checkers. If torch supports one of these one day, fastgrad should, too.
    if kind == "sparse":
        inputs = torch.eye(3, dtype=torch.float64).to_sparse_csr().requires_grad_()
        func: Callable[[Tensor], Tensor] = lambda x: x.to_dense(masked_grad=False) * 2  # noqa: E731
    else:
        rows = [torch.randn(2, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)]
        inputs = torch.nested.nested_tensor(rows, requires_grad=True)
        func = lambda x: x.to_padded_tensor(0.0)  # noqa: E731
    keywords = {"check_forward_ad": kind == "sparse"}
    with pytest.raises(NotImplementedError):
        fastgrad.gradcheck(func, inputs, **keywords)
    with pytest.raises((RuntimeError, AttributeError, NotImplementedError)):
        torch.autograd.gradcheck(func, inputs, **keywords)


WRAPPED = """
import functools, torch, warnings

warnings.simplefilter("ignore")

calls = []

def wrap(check):
    {wrapper}

torch.autograd.gradcheck = wrap(torch.autograd.gradcheck)
module = __import__("sys").modules["torch.autograd.gradcheck"]
module.gradcheck, own = torch.autograd.gradcheck, module.gradcheck
before = own.__code__, dict(vars(own))

import fastgrad
assert torch.autograd.gradcheck is module.gradcheck
assert (own.__code__, dict(vars(own))) == before

def rolled(x):
    return Rolled.apply(x)

class Rolled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad_output):
        return 2 * grad_output.roll(1)

x = torch.rand(5, dtype=torch.float64, requires_grad=True)
for _ in range(2):
    with fastgrad.patch() as checks:
        for check in (torch.autograd.gradcheck, own):
            try:
                check(rolled, (x,))
            except fastgrad.GradcheckError:
                pass
        torch.autograd.gradgradcheck(torch.sin, (x,))
    assert [check.name for check in checks] == ["gradcheck", "gradcheck", "gradgradcheck"], checks
    assert (own.__code__, dict(vars(own))) == before
    assert torch.autograd.gradcheck(torch.sin, (x,))
    with fastgrad.patch(compare=True) as checks:
        torch.autograd.gradcheck(torch.sin, (x,))
    assert [check.torch.verdict for check in checks] == ["passed"]
assert calls
"""

WRAPPERS = {
    "wraps": """
    @functools.wraps(check)
    def wrapped(*arguments, **keywords):
        calls.append(1)
        return check(*arguments, **keywords)
    return wrapped
""",
    "closure": "return lambda *arguments, **keywords: calls.append(1) or check(*arguments, **keywords)",
    "callable object": """
    class Wrapped:
        def __init__(self):
            self.held = [check]
        def __call__(self, *arguments, **keywords):
            calls.append(1)
            return self.held[0](*arguments, **keywords)
    return Wrapped()
""",
    "partial": "calls.append(1); return functools.partial(check, eps=1e-6)",
}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_checkers_that_somebody_wrapped_before(wrapper: str) -> None:
    result = processes.run(WRAPPED.format(wrapper=wrapper.strip()))
    assert result.returncode == 0, result.stderr


def test_contexts_may_end_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    code = early.__code__
    first, second = fastgrad.patch(), fastgrad.patch()
    with first as outer:
        # Wrapped while patched, and still wrapped afterwards.
        monkeypatch.setattr(torch.autograd, "gradcheck", functools.partial(early, eps=1e-5))
        inner = second.__enter__()
    assert torch.autograd.gradcheck(torch.sin, normal(3))
    assert (len(outer), [check.report.settings.eps for check in inner]) == (0, [1e-5])
    second.__exit__(None, None, None)
    assert early.__code__ is code
    assert torch.autograd.gradcheck(torch.sin, normal(3))
    assert len(inner) == 1


def test_a_checker_that_is_gone_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch.autograd.gradcheck"], "gradcheck", len)
    monkeypatch.setattr(gc, "get_objects", list)
    with (
        pytest.raises(RuntimeError, match=r"torch's gradcheck cannot be patched: it was replaced by"),
        fastgrad.patch(),
    ):
        pass
    monkeypatch.undo()
    with fastgrad.patch() as checks:
        early(torch.sin, normal(2))
    assert len(checks) == 1


def test_equal_contexts_nest() -> None:
    before, x = torch.autograd.gradcheck.__code__, torch.ones(3, dtype=torch.float64, requires_grad=True)
    with fastgrad.patch() as outer:
        with fastgrad.patch() as inner:
            pass
        torch.autograd.gradcheck(torch.sin, (x,))
    assert (len(outer), len(inner)) == (1, 0)
    assert torch.autograd.gradcheck.__code__ is before
