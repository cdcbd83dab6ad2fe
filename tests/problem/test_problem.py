"""The caller's state, aliasing and stateful functions: the inputs are always restored bit for bit."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.utils.checkpoint import checkpoint

import fastgrad
from fastgrad.problem.problem import Problem
from tests.costs import set_costs


def leaf(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


def both(func: Callable[..., Any], inputs: Any, **keywords: Any) -> bool:
    """The verdict, which must be that of torch's slow mode."""
    verdict = fastgrad.gradcheck(func, inputs, raise_exception=False, **keywords)
    assert torch.autograd.gradcheck(func, inputs, raise_exception=False, **keywords) == verdict
    return verdict


class Bits:
    """The caller's state, to be compared with later."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        self.before = self.now()

    def now(self) -> list[Any]:
        tensors = [
            (torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t.detach()).contiguous()
            for t in self.tensors
        ]
        return [
            [t.view(torch.uint8).tolist() for t in tensors],
            [t._version for t in self.tensors],
            [t.requires_grad for t in self.tensors],
            [t.is_leaf and t.grad is not None for t in self.tensors],
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.get_rng_state().tolist(),
        ]

    def unchanged(self) -> bool:
        return self.now() == self.before


class RaisingBackward(torch.autograd.Function):
    """sin whose backward raises on its k-th call."""

    calls = 0
    raise_at = 0
    keeps_raising = False
    error: type[BaseException] = RuntimeError

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        RaisingBackward.calls += 1
        late = RaisingBackward.keeps_raising and RaisingBackward.calls > RaisingBackward.raise_at
        if late or RaisingBackward.calls == RaisingBackward.raise_at:
            raise RaisingBackward.error("planted")
        return grad_output * ctx.saved_tensors[0].cos()


class PlantedError(Exception):
    """An error that no code handles."""


@pytest.mark.parametrize("engine", ["dense", "compressed"])
@pytest.mark.parametrize("error", [PlantedError, KeyboardInterrupt])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_restored_when_func_raises_on_every_call(
    error: type[BaseException], dtype: torch.dtype, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_costs(monkeypatch, guess_seconds=0.0)  # otherwise the number of calls would depend on their time
    set_costs(monkeypatch, vectorized_columns_seconds=1.0)  # many single calls
    x = leaf(2, 7, dtype=dtype)
    with torch.no_grad():
        x[0, 0] = -0.0
        x[0, 1] = 1 + 2.0**-52
    calls = 0

    def func(value: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == raise_at:
            raise error("planted")
        return value * value

    raise_at = -1
    assert fastgrad.gradcheck(func, (x,), engine=engine)
    total = calls
    assert total > (28 if engine == "dense" else 11)
    state = Bits(x)
    for raise_at in range(1, total + 1):
        calls = 0
        # Only one call may raise without consequences: the one that tests whether func needs a graph.
        try:
            fastgrad.gradcheck(func, (x,), engine=engine)
        except error:
            pass
        else:
            assert error is PlantedError
        assert state.unchanged(), f"call {raise_at} of {total}"


@pytest.mark.filterwarnings("ignore:Backwards compatibility")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_restored_when_backward_raises_on_every_call(error: type[BaseException]) -> None:
    x = leaf(5)
    state = Bits(x)
    RaisingBackward.error = error
    RaisingBackward.raise_at = -1
    RaisingBackward.calls = 0
    assert fastgrad.gradcheck(RaisingBackward.apply, (x,))
    for raise_at in range(1, RaisingBackward.calls + 1):
        RaisingBackward.raise_at, RaisingBackward.calls = raise_at, 0
        with pytest.raises((error, fastgrad.GradcheckError)):
            fastgrad.gradcheck(RaisingBackward.apply, (x,))
        assert state.unchanged(), f"call {raise_at}"


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """Python's own handler, even if the tests started with the signal ignored, for example in a background job.

    No garbage collection meanwhile: what is raised in a callback of it (hypothesis has one) is printed and lost.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_raises")
@pytest.mark.parametrize("phase", ["evaluations", "vjps"])
def test_ctrl_c_in_the_middle_of_a_long_loop(phase: str) -> None:
    x = leaf(20_000 if phase == "evaluations" else 1)
    state = Bits(x)
    started = threading.Event()
    evaluations = 0

    def func(value: Tensor) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        if evaluations >= (50 if phase == "evaluations" else 1):
            started.set()
        return value.exp().expand(20_000) * 1.0 if phase == "vjps" else value.sum()

    def interrupt() -> None:
        started.wait()
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    begin = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        fastgrad.gradcheck(func, (x,))
    thread.join()
    assert time.perf_counter() - begin < 60
    assert state.unchanged()


def test_a_passing_check_leaves_no_trace() -> None:
    x, z = leaf(4), leaf(3, dtype=torch.complex128)
    buffer = torch.ones(2)
    state = Bits(x, z, buffer)
    assert fastgrad.gradcheck(lambda x, z, b: (x.exp(), z * z.conj() * b.sum()), (x, z, buffer))
    assert fastgrad.gradgradcheck(lambda x, z: x.exp().sum() * z, (x, z))
    assert state.unchanged()


def test_the_same_tensor_twice() -> None:
    w = leaf(3, 2)
    assert both(torch.mul, (w, w))
    calls = 0

    def func(a: Tensor, b: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return a * b

    fastgrad.gradcheck(func, (w, w))
    shared = calls
    calls = 0
    fastgrad.gradcheck(func, (w, leaf(3, 2, seed=1)))
    assert shared < calls, "an input given twice is perturbed once"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda b: (b, b[:3]), "Inputs 0 and 1 are different tensors that overlap in memory"),
        (lambda b: (b.detach().requires_grad_(), b), "Inputs 0 and 1 are different tensors"),
        (lambda b: (b[:4], b[3:]), "overlap in memory"),
        (lambda b: (b[:1].expand(3), b[3:]), "The 0th input has a dimension with stride 0"),
        (lambda b: (b[0], b.as_strided((3, 2), (1, 1), 1)), "The 1th input overlaps itself"),
    ],
)
def test_overlapping_inputs_are_one_clear_error(make: Callable[[Tensor], tuple[Tensor, ...]], message: str) -> None:
    base = leaf(6)
    state = Bits(base)
    with pytest.raises(RuntimeError, match=message):
        fastgrad.gradcheck(lambda a, b: a.sum() * b.sum(), make(base))
    assert state.unchanged()


@pytest.mark.parametrize(
    "make", [lambda b: b[:1].expand(3), lambda b: b.as_strided((3, 2), (1, 1), 1)], ids=["stride 0", "overlapping"]
)
def test_overlap_is_the_error_of_second_order_too_if_func_raises(make: Callable[[Tensor], Tensor]) -> None:
    def raises(x: Tensor) -> Tensor:
        raise LookupError

    with pytest.raises(RuntimeError, match=r"has a dimension with stride 0|overlaps itself in memory"):
        fastgrad.gradgradcheck(raises, (make(leaf(6)),))


def test_interleaved_views_do_not_overlap() -> None:
    base = leaf(6)
    assert both(lambda a, b: a * b, (base[0::2], base[1::2]))
    assert both(lambda a: a * a, (base.view(2, 3).t(),))


def test_views_returned_as_outputs() -> None:
    x = leaf(2, 3)
    assert both(lambda x: x.view(6), (x,))
    assert both(lambda x: x, (x,))
    assert both(lambda x: (x[0], x.t()), (x,))
    assert both(lambda x: x[0].expand(4, 3), (x,))


class Buffered(torch.autograd.Function):
    """x * x in a buffer that every call reuses."""

    buffer = torch.zeros(0, dtype=torch.float64)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        if Buffered.buffer.shape != x.shape:
            Buffered.buffer = torch.empty_like(x)
        return torch.mul(x.detach(), x.detach(), out=Buffered.buffer.detach())

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad_output


def test_a_reused_output_buffer() -> None:
    # torch and fastgrad both copy a result before the next call.
    assert both(Buffered.apply, (leaf(5),))


def test_inputs_that_contain_nan_are_named() -> None:
    x, y = leaf(3), leaf(3)
    with torch.no_grad():
        y[1] = torch.nan
    (note,) = fastgrad.check(torch.mul, (x, y)).notes
    assert note == "inputs[1] contains NaN; all inputs were restored before and after every evaluation"


@pytest.mark.parametrize("size", [1, 3])
def test_a_func_that_adds_one_input_to_another_in_forward_mode(size: int) -> None:
    """The tangent of the second input is that of the sum, until the next column."""

    def accumulates(x: Tensor, total: Tensor) -> Tensor:
        with torch.no_grad():
            total.add_(x)
        return 3 * x + total

    assert fastgrad.check(accumulates, (leaf(size), leaf(3)), check_forward_ad=True, check_backward_ad=False).passed


def test_an_input_mutating_func() -> None:
    x = leaf(4)
    state = Bits(x)

    def normalizes(value: Tensor) -> Tensor:
        with torch.no_grad():
            value.clamp_(-1, 1)
        return value * 3

    with torch.no_grad():
        x.clamp_(-0.9, 0.9)
    state = Bits(x)
    assert fastgrad.gradcheck(normalizes, (x,))
    assert state.now()[0] == state.before[0]

    def writes_past_the_version(value: Tensor) -> Tensor:
        result = value * 3
        value.data.add_(1.0)
        return result

    notes = fastgrad.check(writes_past_the_version, (x,)).notes
    assert notes == ("func changes its inputs; all inputs were restored before and after every evaluation",)
    assert fastgrad.gradcheck(writes_past_the_version, (x,))
    assert state.now()[0] == state.before[0], "restored, also when no version counter moved"
    with pytest.raises(fastgrad.GradcheckError):
        fastgrad.gradcheck(lambda v: writes_past_the_version(v) * v.detach(), (x,))
    assert state.now()[0] == state.before[0]


class Stateful(torch.autograd.Function):
    """x * x whose backward reads x from the last forward call, not from ctx."""

    last = torch.zeros(0)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Stateful.last = x.detach().clone()
        return x * x

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return 2 * Stateful.last * grad_output


def test_a_stateful_backward_sees_x_last() -> None:
    assert both(Stateful.apply, (leaf(5),))


def test_a_closure_over_an_input() -> None:
    w = leaf(3)
    assert both(lambda _: w * w, (w,))
    with torch.no_grad():
        constant = w.detach()
    # The captured view shares w's memory: it is perturbed too, and its gradient is missing.
    assert not both(lambda v: v * constant, (w,))


def test_non_leaf_inputs() -> None:
    x = leaf(4)
    y = x * 2
    assert both(torch.sin, (y,))
    assert x.grad is None


def test_hooks() -> None:
    x = leaf(3)
    assert both(lambda v: v.exp(), (x,))
    handle = x.register_hook(lambda grad: grad * 2)
    try:
        assert not both(lambda v: v.exp(), (x,))
    finally:
        handle.remove()

    def hooked_inside(v: Tensor) -> Tensor:
        y = v.exp()
        y.register_hook(lambda grad: grad if grad is None else grad.clone())
        return y * y

    assert both(hooked_inside, (x,))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    x = leaf(3)

    def func(v: Tensor) -> Any:
        return checkpoint(lambda u: u.sin() * u, v, use_reentrant=reentrant)

    found = []
    for checker in (torch.autograd.gradcheck, fastgrad.gradcheck):
        try:
            found.append(str(checker(func, (x,))))
        except RuntimeError as error:
            found.append(type(error).__name__)
    # Reentrant checkpointing refuses torch.autograd.grad(): the same RuntimeError from both.
    assert found == (["RuntimeError"] * 2 if reentrant else ["True"] * 2)


class DoubleInPlace(torch.autograd.Function):
    """x *= 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output * 2


class TripleClaimed(DoubleInPlace):
    """The same with a wrong factor."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output * 3


def test_mark_dirty() -> None:
    x = leaf(3)
    assert both(lambda v: DoubleInPlace.apply(v.clone()), (x,))
    assert not both(lambda v: TripleClaimed.apply(v.clone()), (x,))


class Tagged(Tensor):
    """A subclass that uses __torch_function__."""


class Wrapper(Tensor):
    """A wrapper subclass that uses __torch_dispatch__ and supports only operators of ATen."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad, strides=inner.stride()
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner.detach()

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert op.namespace in ("aten", "prim"), f"{op} reached a subclass that cannot know it"
        unwrap = lambda v: v.inner if isinstance(v, Wrapper) else v  # noqa: E731
        wrap = lambda v: Wrapper(v) if isinstance(v, Tensor) else v  # noqa: E731
        result = op(*torch.utils._pytree.tree_map(unwrap, args), **torch.utils._pytree.tree_map(unwrap, kwargs or {}))
        if op in (torch.ops.aten.copy_.default, torch.ops.aten.mul_.Tensor) and isinstance(args[0], Wrapper):
            return args[0]
        return torch.utils._pytree.tree_map(wrap, result)


def test_tensor_subclasses() -> None:
    x = leaf(2, 3)
    tagged = x.detach().as_subclass(Tagged).requires_grad_()
    assert both(torch.sin, (tagged,))
    assert not both(lambda v: v.detach() * v, (tagged,))
    parameter = torch.nn.Parameter(x.detach().clone())
    assert both(lambda p: p.exp(), (parameter,))


def test_a_wrapper_subclass() -> None:
    wrapped = Wrapper(leaf(2, 3)).requires_grad_()
    before = wrapped.inner.clone()
    assert both(torch.sin, (wrapped,))
    # torch's checker cannot print such a subclass in its message.
    assert not fastgrad.gradcheck(lambda v: v.detach() * v, (wrapped,), raise_exception=False)
    assert torch.equal(wrapped.inner, before)


def test_func_sees_no_graph_only_where_it_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    set_costs(monkeypatch, guess_seconds=0.0)  # the first look runs even for a fast func
    set_costs(monkeypatch, vectorized_columns_seconds=1.0)  # not in a small check
    x = leaf(20)
    modes = []

    def plain(v: Tensor) -> Tensor:
        modes.append(torch.is_grad_enabled())
        return v.sin()

    assert fastgrad.gradcheck(plain, (x,), engine="dense")
    assert modes.count(False) > 30

    def looks(v: Tensor) -> Tensor:
        # Right if gradients are recorded; otherwise another function, which is equal only at x.
        return v.sin() if torch.is_grad_enabled() else x.detach().sin() + 0 * v

    looks_at_mode = fastgrad.gradcheck(looks, (x,), raise_exception=False)
    assert looks_at_mode == torch.autograd.gradcheck(looks, (x,), raise_exception=False)

    def differentiates(v: Tensor) -> Any:
        return torch.autograd.grad((v**3).sum(), v, create_graph=True)

    assert both(differentiates, (x,))


def test_changed_results_are_named() -> None:
    x = leaf(3)
    calls = 0

    def shrinks(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return v * 2 if calls < 4 else v[:2] * 2

    with pytest.raises(AssertionError, match=r"(?s)Expected `func` to return outputs with the same shape when.*index"):
        fastgrad.gradcheck(shrinks, (x,))
    calls = 0

    def demotes(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return v * 2 if calls < 4 else v.float() * 2

    with pytest.raises(AssertionError, match="same dtype when inputs are perturbed"):
        fastgrad.gradcheck(demotes, (x,))
    calls = 0

    def drops(v: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return (v * 2, v * 3) if calls < 4 else (v * 2,)

    with pytest.raises(AssertionError, match="outputs as a tensor in the same place"):
        fastgrad.gradcheck(drops, (x,))


@pytest.mark.parametrize("change_at", range(1, 12))
@pytest.mark.parametrize(
    "changed", [lambda y: y[:1], lambda y: y.float(), lambda y: None, lambda y: "y", lambda y: y.detach()]
)
def test_a_result_that_changes_on_any_call_is_an_assertion(change_at: int, changed: Callable[[Tensor], Any]) -> None:
    x = leaf(3)
    state = Bits(x)
    calls = 0

    def func(v: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return changed(v.sin()) if calls > change_at else v.sin(), v.cos()

    message = ""
    try:
        fastgrad.gradcheck(func, (x,), memory_limit=100)
    except AssertionError as error:
        message = str(error)
    # One call for the outputs; then two passes (two columns, one column) with two calls per column and one for a graph.
    assert message.startswith("Expected `func` to return") == (change_at < 9)
    assert state.unchanged()


def test_a_freed_storage_is_an_error_not_a_crash() -> None:
    class Frees(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: Tensor) -> Tensor:
            ctx.save_for_backward(v)
            return v.exp()

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            (v,) = ctx.saved_tensors
            v.detach().untyped_storage().resize_(0)
            return grad_output

    with pytest.raises(RuntimeError, match="freed or replaced the memory of differentiable input 0"):
        fastgrad.gradcheck(Frees.apply, (leaf(1000),))


def test_a_lack_of_memory_that_does_not_recur_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RaisingBackward, "error", MemoryError)
    for raise_at in range(1, 21):
        RaisingBackward.raise_at, RaisingBackward.calls = raise_at, 0
        with pytest.raises(MemoryError):
            fastgrad.gradcheck(RaisingBackward.apply, (leaf(5),), raise_exception=False)
        assert RaisingBackward.calls > raise_at


def test_running_out_of_memory_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RaisingBackward, "error", MemoryError)
    with monkeypatch.context() as patch:
        patch.setattr(RaisingBackward, "keeps_raising", True)
        for raise_at in range(1, 21):
            RaisingBackward.raise_at, RaisingBackward.calls = raise_at, 0
            with pytest.raises(MemoryError):
                fastgrad.gradcheck(RaisingBackward.apply, (leaf(5),), raise_exception=False)
    monkeypatch.setattr(RaisingBackward, "error", KeyError)
    RaisingBackward.raise_at, RaisingBackward.calls = 14, 0
    with pytest.raises(KeyError):  # it does not recur, so the grad_output is not the cause
        fastgrad.gradcheck(RaisingBackward.apply, (leaf(5),), raise_exception=False)


def test_bad_inputs() -> None:
    with pytest.raises(TypeError, match="Input 0 is a list of tensors that require grad"):
        fastgrad.gradcheck(lambda pair, x: pair[0] + x, ([leaf(2)], leaf(2)))
    with pytest.raises(TypeError, match="flat tuple of them; result 1 is a tuple"):
        fastgrad.gradcheck(lambda x: (x.sin(), (x.cos(),)), (leaf(2),))
    with pytest.raises(ValueError, match="meta device"):
        fastgrad.gradcheck(torch.sin, (torch.ones(2, device="meta", requires_grad=True),))
    with pytest.raises(ValueError, match="expects at least one input tensor to require gradient"):
        fastgrad.gradcheck(torch.sin, (torch.ones(2),))
    with pytest.raises(ValueError, match="expects at least one input tensor to require gradient"):
        fastgrad.gradcheck(lambda: None, ())
    with pytest.raises(NotImplementedError, match="input 0 is one"):
        fastgrad.gradcheck(lambda s: s.sin(), (torch.nested.nested_tensor([leaf(3)], requires_grad=True),))
    with pytest.raises(TypeError, match="func must return a Tensor or a tuple of Tensors, got NoneType"):
        fastgrad.gradcheck(lambda v: None, (leaf(2),))
    with pytest.raises(ValueError, match="Sparse output is not supported at gradcheck yet"):
        fastgrad.gradcheck(lambda v: v.to_sparse(), (leaf(2),))
    with pytest.raises(ValueError, match="Sparse output is not supported at gradcheck yet"):
        fastgrad.gradcheck(lambda v: v.detach().to_sparse_csr(), (leaf(2, 2),))  # no result requires grad
    for check in (fastgrad.gradcheck, fastgrad.gradgradcheck):
        with pytest.raises(ValueError, match="The 0th input is on the meta device"):
            check(torch.sin, (torch.ones(2, device="meta", requires_grad=True),))
        with pytest.raises(NotImplementedError, match="fastgrad does not support nested tensors, but input 0 is one"):
            check(torch.sin, (torch.nested.nested_tensor([leaf(3)], requires_grad=True),))
        with pytest.raises(NotImplementedError, match=r"does not support torch\.float8_e5m2, the dtype of input 0"):
            check(lambda v: v.float(), (leaf(2).detach().to(torch.float8_e5m2).requires_grad_(),))
        with pytest.raises(ValueError, match="expects at least one input tensor to require gradient"):
            check(lambda v: v, ())
    with pytest.raises(NotImplementedError, match=r"tensors of a torch\.func transform .*, but inputs\[0\] is one"):
        torch.func.grad(lambda v: fastgrad.gradcheck(torch.sin, (v,)))(leaf(2))
    with pytest.raises(ValueError, match="Result 0 of func is on the meta device"):
        fastgrad.gradcheck(lambda v: v.to("meta"), (leaf(2),))
    with pytest.raises(
        NotImplementedError, match=r"does not support torch\.float8_e5m2, the dtype of result 0 of func"
    ):
        fastgrad.gradcheck(lambda v: v.to(torch.float8_e5m2), (leaf(2),))
    with pytest.raises(NotImplementedError, match="does not support nested tensors, but result 0 of func is one"):
        fastgrad.gradcheck(lambda v: torch.nested.as_nested_tensor([v, v]), (leaf(2),))
    with pytest.warns(UserWarning, match="Input #0 requires gradient and is not a double precision"):
        fastgrad.gradcheck(torch.sin, (leaf(2, dtype=torch.float32),), eps=1e-2, atol=1e-2)


def test_lists_scalars_empty_tensors_and_other_arguments() -> None:
    assert both(torch.sin, leaf(3))
    assert both(torch.mul, [leaf(3), 2.0])
    assert both(lambda a, k, n: (a * k)[:, :n], (leaf(2, 3), torch.arange(3), 2))
    assert both(torch.sin, (leaf(),))
    assert both(torch.sin, (leaf(0, 3),))
    assert both(lambda v: [v * 2, v.sum()], (leaf(2),))
    assert both(lambda v: v[:0] * 2, (leaf(2),))


@pytest.mark.parametrize("mode", [{}, {"fast_mode": True, "engine": "sketch"}])
def test_empty_outputs_beside_others(mode: dict[str, Any]) -> None:
    """The backward of view_as_real requires strides of 1, also for empty tensors."""
    x, z = leaf(3), torch.zeros(0, dtype=torch.complex128).requires_grad_()
    func = lambda x, z: (torch.view_as_real(z), x.sin(), x.cos())  # noqa: E731
    assert torch.autograd.gradcheck(func, (x, z))
    assert fastgrad.gradcheck(func, (x, z), **mode)


def test_results_without_gradients_are_ignored_wherever_they_stand() -> None:
    x = leaf(4)
    for func in (
        lambda v: (v > 0, v.sin(), v.argmax()),
        lambda v: (None, v.sin(), 3),
        lambda v: (v.sin(), v.detach().sum()),
    ):
        assert fastgrad.gradcheck(func, (x,))
    with pytest.raises(fastgrad.GradcheckError, match="element 2 of func's result"):
        fastgrad.gradcheck(lambda v: (v > 0, v.sin(), v.detach() * v), (x,))


def test_no_differentiable_output() -> None:
    assert both(lambda v: torch.ones(3, dtype=torch.float64), (leaf(2),))
    assert not both(lambda v: v.detach() * 2, (leaf(2),))
    with pytest.raises(GradcheckError, match="Numerical gradient for function expected to be zero"):
        fastgrad.gradcheck(lambda v: v.detach() * 2, (leaf(2),))


def test_conjugate_and_negative_views_as_inputs() -> None:
    z = leaf(3, dtype=torch.complex128)
    assert both(lambda v: v * v, (z.conj(),))
    assert both(lambda v: v * v, (z.conj().imag,))


def test_steps_are_realized() -> None:
    # 1 + 1e-6 is eight ulps and a half in float32: dividing by 2 eps would be off by several percent.
    x = torch.ones(3, dtype=torch.float32).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fastgrad.gradcheck(lambda v: v.double() * 3, (x,), rtol=1e-6)
        assert not torch.autograd.gradcheck(lambda v: v.double() * 3, (x,), raise_exception=False)


@pytest.mark.parametrize("shape", [(), (4,), (6, 3, 1), (0, 2)])
@pytest.mark.parametrize("check", [fastgrad.gradcheck, fastgrad.gradgradcheck])
def test_lazily_conjugated_and_negated_inputs(check: Any, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    conjugated = torch.complex(values, values + 1).conj()
    negated = torch.complex(values, -values).conj().imag
    assert conjugated.is_conj()
    assert negated.is_neg()
    for value in (conjugated, negated):
        before = value.clone()
        value.requires_grad_()
        for _ in range(20):  # enough to crash if memory was written out of bounds
            assert check(lambda x: x * x.sin(), value)
            assert not fastgrad.gradcheck(lambda x: x.detach() * x, value, raise_exception=False) or not value.numel()
        assert torch.equal(value, before)


class KeepsItsGradient(torch.autograd.Function):
    """2 x; its backward returns the same memory in every call, and overwrites it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, escapes: Any) -> Tensor:
        ctx.kept, ctx.escapes = kept, escapes
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.escapes(torch.mul(grad, 2, out=ctx.kept)), None, None


@pytest.mark.parametrize("escapes", [lambda kept: kept, lambda kept: kept.view(-1), lambda kept: kept.detach()])
def test_a_product_is_not_memory_that_backward_keeps(escapes: Any) -> None:
    x = torch.zeros(3000, dtype=torch.float64, requires_grad=True)
    kept = torch.zeros(3000, dtype=torch.float64)
    with Problem(lambda x: KeepsItsGradient.apply(x, kept, escapes), (x,)) as problem:
        ones = torch.ones(1, 3000, dtype=torch.float64)
        products = [problem.vjp(scale * ones) for scale in (1.0, 3.0)]
    assert [product.unique().tolist() for product in products] == [[2.0], [6.0]]
