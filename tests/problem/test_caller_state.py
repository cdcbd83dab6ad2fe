"""Actions of a caller, or of func, on memory, threads and exceptions that affect a check."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import fastgrad

CHECKS = [fastgrad.gradcheck, fastgrad.gradgradcheck]
ENGINES: list[dict[str, Any]] = [
    {},
    {"engine": "dense"},
    {"engine": "compressed"},
    {"fast_mode": True},
    {"fast_mode": True, "engine": "sketch"},
]

each_check = pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
each_engine = pytest.mark.parametrize("engine", ENGINES, ids=str)


def leaf(*shape: int) -> Tensor:
    return torch.linspace(0.2, 0.9, torch.Size(shape).numel(), dtype=torch.float64).view(shape).requires_grad_()


def free(x: Tensor) -> None:
    x.detach().untyped_storage().resize_(0)


def shrink(x: Tensor) -> None:
    x.detach().untyped_storage().resize_(8)


def replace(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    def act(x: Tensor) -> None:
        x.data = make(x.data)

    return act


TAKEN: dict[str, Callable[[Tensor], None]] = {
    "freed": free,
    "shrunk": shrink,
    "empty": replace(lambda data: torch.empty(0, dtype=data.dtype)),
    "another": replace(torch.Tensor.clone),
    "transposed": replace(torch.Tensor.t),
    "larger": replace(lambda data: data.repeat(30, 40)),
    "float32": replace(torch.Tensor.float),
}


@each_engine
@each_check
@pytest.mark.parametrize("late", [False, True], ids=["at once", "perturbed"])
@pytest.mark.parametrize("act", TAKEN.values(), ids=TAKEN)
def test_memory_taken_away_is_an_error_and_is_given_back(
    act: Callable[[Tensor], None], late: bool, check: Any, engine: dict[str, Any]
) -> None:
    x = leaf(3, 4)
    before, memory = x.detach().clone(), x.data
    calls = 0

    def func(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        y = x.sin() * 2
        if not late or calls > 4:
            act(x)
        return y

    # In second order, the checked func is a backward, which raises torch's error for a gradient of the wrong shape.
    message = "freed or replaced the memory" if check is fastgrad.gradcheck else None
    with pytest.raises(RuntimeError, match=message):
        check(func, (x,), **engine)
    assert x.is_set_to(memory)
    assert torch.equal(x, before)
    assert x.requires_grad
    assert fastgrad.gradcheck(torch.sin, (x,))


def test_the_message_says_which_input_and_what_to_do() -> None:
    def func(x: Tensor, y: Tensor) -> Tensor:
        z = x * y
        free(y)
        return z

    with pytest.raises(RuntimeError, match=r"replaced the memory of differentiable input 1.*or change a copy of the"):
        fastgrad.gradcheck(func, (leaf(3), leaf(3)))


def test_memory_that_was_freed_before_is_refused() -> None:
    x = leaf(1000)
    free(x)
    with pytest.raises(RuntimeError, match="needs 8000 bytes of storage, which was freed or shrunk to 0"):
        fastgrad.gradcheck(torch.sin, (x,))


def test_gradgradcheck_restores_what_its_first_call_changes() -> None:
    x = leaf(5)
    before = x.detach().clone()

    def normalizing(x: Tensor) -> Tensor:
        with torch.no_grad():
            x.div_(x.norm())
        return (x * x.detach()).sin()

    fastgrad.gradgradcheck(normalizing, (x,), raise_exception=False)
    assert torch.equal(x, before)


class Stops(torch.autograd.Function):
    """Raises at a call of forward, backward or jvp."""

    calls: ClassVar[dict[str, int]] = {}
    at: ClassVar[tuple[str, int]] = ("", 0)
    error: ClassVar[BaseException] = StopIteration("mine")

    @classmethod
    def count(cls, name: str) -> None:
        cls.calls[name] = cls.calls.get(name, 0) + 1
        if (name, cls.calls[name]) == cls.at:
            raise cls.error

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        Stops.count("forward")
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Stops.count("backward")
        return grad * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        Stops.count("jvp")
        return tangent * ctx.saved_tensors[0].cos()


def outcome_at(place: tuple[str, int], error: BaseException, check: Any, engine: dict[str, Any]) -> object:
    """What a check returns or raises if a call raises; for a failure, the detail of the report."""
    Stops.calls, Stops.at, Stops.error = {}, place, error
    order = 2 if check is fastgrad.gradgradcheck else 1
    forward = {} if order == 2 else {"check_forward_ad": True}
    try:
        return check(Stops.apply, (leaf(40),), **forward, **engine)
    except BaseException as raised:
        return raised


@each_engine
@each_check
@pytest.mark.parametrize("name", ["forward", "backward", "jvp"])
def test_exceptions_arrive_as_they_are(name: str, check: Any, engine: dict[str, Any]) -> None:
    for number in (1, 2, 3, 5, 8, 13, 30, 60, 100):
        stop, plain = StopIteration("mine"), KeyError("mine")
        found = outcome_at((name, number), stop, check, engine)
        expected = outcome_at((name, number), plain, check, engine)
        if expected is plain:
            assert found is stop, f"call {number}: {found!r}"
        else:
            assert type(found) is type(expected), f"call {number}: {found!r} and {expected!r}"


def test_an_error_of_funcs_own_generator_is_left_as_it_is() -> None:
    def numbers() -> Iterator[int]:
        raise StopIteration
        yield 1

    def func(x: Tensor) -> Tensor:
        return x * next(numbers())

    with pytest.raises(RuntimeError, match="generator raised StopIteration"):
        fastgrad.gradcheck(func, (leaf(3),), engine="dense")


def has_dual_level() -> bool:
    """Whether a level of forward-mode AD is still set, in Python or below."""
    if forward_ad._current_level != -1:
        return True
    with forward_ad.dual_level():  # raises below a level
        return False


class Wakes:
    """Raises KeyboardInterrupt in the main thread, once, after some time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        self._before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)


def test_an_interrupt_leaves_no_level_of_forward_mode() -> None:
    x = leaf(3)
    from fastgrad.problem.problem import Problem

    with Problem(torch.sin, (x,)) as problem:
        for k in range(300):
            try:
                with Wakes(2e-4 + 1e-6 * k):
                    while True:
                        problem.jvp([None])
            except KeyboardInterrupt:
                pass
            assert not has_dual_level(), f"after interrupt {k}"
    assert fastgrad.gradcheck(torch.sin, (x,), check_forward_ad=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, StopIteration])
def test_an_exception_in_forward_mode_leaves_no_level(error: type[BaseException]) -> None:
    def func(x: Tensor) -> Tensor:
        if forward_ad._current_level >= 0:
            raise error
        return x.sin()

    for engine in ENGINES:
        with pytest.raises(error):
            fastgrad.gradcheck(func, (leaf(40),), check_forward_ad=True, check_backward_ad=False, **engine)
        assert not has_dual_level()


def in_threads(count: int, work: Callable[[], object]) -> list[object]:
    """What each thread returned or raised; asserts that none waits forever."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 300
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads)
    return found


@pytest.mark.parametrize("engine", [{}, {"fast_mode": True, "engine": "sketch"}], ids=str)
def test_threads_take_turns_in_forward_mode(engine: dict[str, Any]) -> None:
    def raises(x: Tensor) -> Tensor:
        if forward_ad._current_level >= 0:
            raise ValueError("mine")
        return x.sin()

    def work() -> list[object]:
        found: list[object] = []
        for _ in range(4):
            found.append(fastgrad.gradcheck(torch.sin, (leaf(4),), check_forward_ad=True, **engine))
            with pytest.raises(ValueError, match="mine"):
                fastgrad.gradcheck(raises, (leaf(4),), check_forward_ad=True, **engine)
        return found

    assert in_threads(8, work) == [[True] * 4] * 8


def test_a_check_within_forward_mode_does_not_wait_for_itself() -> None:
    def func(x: Tensor) -> Tensor:
        if forward_ad._current_level >= 0:
            fastgrad.gradcheck(torch.sin, (leaf(2),), check_forward_ad=True)
        return x.sin()

    def work() -> bool:
        return fastgrad.gradcheck(func, (leaf(2),), check_forward_ad=True)

    (found,) = in_threads(1, work)
    assert isinstance(found, RuntimeError)
    assert "ested forward mode AD" in str(found)


def test_a_tensor_that_func_multiplies_by_one_that_requires_grad_is_left_without_a_graph() -> None:
    weight, y = (torch.rand(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x = torch.rand(4, dtype=torch.float64)
    before = x.clone()

    def func(y: Tensor, x: Tensor) -> Tensor:
        x.mul_(weight)
        return 2 * y

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fastgrad.gradcheck(func, (y, x))
    assert torch.equal(x, before)
    assert x.is_leaf
    assert not x.requires_grad
