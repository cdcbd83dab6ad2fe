"""`fastgrad.patch`: makes torch's checkers forward their calls to fastgrad's."""

from __future__ import annotations

import functools
import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import FunctionType
from typing import Any, TypeGuard

from fastgrad.api import checkers
from fastgrad.core.memory import Parameters, Result
from fastgrad.core.random import RandomState
from fastgrad.core.torch_private import hidden_from_dynamo
from fastgrad.report.report import Report
from fastgrad.testing import torch_reference
from fastgrad.testing.torch_reference import Outcome, outcome_of, setting


@dataclass(frozen=True)
class Check:
    """One call of a patched checker.

    Attributes
    ----------
    name
        "gradcheck" or "gradgradcheck".
    ours
        The outcome of fastgrad's check.
    report
        The report of fastgrad's check; None if an exception prevented a verdict.
    torch
        The outcome of torch's checker, if both ran.
    """

    name: str
    ours: Outcome
    report: Report | None
    torch: Outcome | None = None

    @property
    def differs(self) -> bool:
        """Whether the verdicts differ. Two exceptions of any types are not a difference."""
        return self.torch is not None and self.torch.verdict != self.ours.verdict


class DisagreementError(AssertionError):
    """fastgrad and torch disagree about a check; `check` has both outcomes, and the message quotes both messages."""

    def __init__(self, check: Check) -> None:
        assert check.torch is not None
        fast = check.report is not None and check.report.settings.fast_mode
        settles = " torch's fast mode compares one number: its slow mode shows which verdict is right." if fast else ""
        super().__init__(
            f"fastgrad's {check.name} {check.ours.verdict}, and torch's {check.torch.verdict}. docs/differences.md "
            f"in fastgrad's source tree lists the intended differences.{settles}\n\n"
            f"fastgrad: {_described(check.ours)}\n\ntorch: {_described(check.torch)}"
        )
        self.check = check

    def __reduce__(self) -> tuple[type[DisagreementError], tuple[Check]]:
        """Pickles only the check, from which unpickling makes the message again."""
        return type(self), (self.check,)


def _described(outcome: Outcome) -> str:
    text = f"{outcome.verdict} after {outcome.seconds:.3g} s"
    return text if outcome.error is None else f"{text}\n{type(outcome.error).__name__}: {outcome.error}"


@dataclass(eq=False)
class _Session:
    """An active `patch`; equal only to itself, because sessions may have made the same checks."""

    compare: bool
    estimates: bool = False
    checks: list[Check] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Patch(AbstractContextManager[list[Check]]):
    """What `fastgrad.patch` returns: a context manager, and a decorator of functions."""

    def __init__(self, compare: bool) -> None:
        self._compare = compare
        self._entered: list[AbstractContextManager[_Session]] = []

    def __enter__(self) -> list[Check]:
        context = _in_force(_Session(self._compare))
        checks = context.__enter__().checks
        self._entered.append(context)
        return checks

    def __exit__(self, *error: Any) -> bool | None:
        if not self._entered:
            raise RuntimeError("fastgrad.patch() was left without being entered.")
        return self._entered.pop().__exit__(*error)

    def __call__(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        if not callable(function):
            raise TypeError(f"fastgrad.patch() as a decorator needs a function, got {function!r}.")
        if isinstance(function, type):
            raise TypeError(f"fastgrad.patch() cannot decorate a class: decorate its methods. Got {function!r}.")
        kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
        if any(is_kind(function) for is_kind in kinds):
            raise TypeError(
                "fastgrad.patch() cannot decorate an async or generator function, because its body runs after the "
                f"call has returned; use it in a with statement inside the function. Got {function!r}."
            )

        @functools.wraps(function)
        def patched(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
            __tracebackhide__ = True
            with Patch(self._compare):
                return function(*arguments, **keywords)

        return patched


def patch(*, compare: bool = False) -> Patch:
    """A context in which `torch.autograd.gradcheck` and `gradgradcheck` run fastgrad's checkers.

    The functions themselves forward the call, so it does not matter how they are reached: as attributes of
    torch.autograd, by names imported before or within the context, from a `functools.partial`, a class or a
    closure, or through the wrappers of `torch.testing` and of other packages, whose defaults still apply. The
    context applies to all threads. Contexts may be nested: the innermost one decides and records. torch's helper
    functions (such as `get_numerical_jacobian`) are not replaced.

    Parameters
    ----------
    compare
        Run torch's checker as well, after fastgrad's, from the same state of torch's random generators. Where
        the verdicts agree, the result is fastgrad's.

    Returns
    -------
    context manager
        Its value is the list of `Check`: the calls so far, in order, without calls that a KeyboardInterrupt or
        SystemExit ended. It is also a decorator of functions that are neither async nor generators.

    Raises
    ------
    DisagreementError
        From a check, with compare=True: one checker passed, the other failed or raised. An AssertionError,
        for any value of raise_exception.
    TypeError
        `compare` is not True or False, or the context decorates anything but a function, or an async or generator
        function.

    Notes
    -----
    What fastgrad does not check (nested tensors, sparse inputs in forward mode) raises NotImplementedError. Torch's
    checkers raise for these, too, so nothing falls back to them.

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    >>> with fastgrad.patch():
    ...     gradcheck = torch.autograd.gradcheck  # fastgrad's
    ...     gradcheck(torch.sin, (x,))
    True
    """
    if not isinstance(compare, bool):
        raise TypeError(f"compare must be True or False, got {compare!r}.")
    return Patch(compare)


@contextmanager
def estimate() -> Iterator[list[float]]:
    """Like `patch`, but checks are not run: they return True after a few calls of func.

    Yields
    ------
    list of float
        The estimated seconds of each call so far.
    """
    with _in_force(_Session(compare=False, estimates=True)) as session:
        yield session.seconds


@contextmanager
def _in_force(session: _Session) -> Iterator[_Session]:
    with _lock:
        if not _sessions:
            _redirect()
        _sessions.append(session)
    try:
        yield session
    finally:
        with _lock:
            _sessions.remove(session)
            if not _sessions:
                _restore()


def _forward(name: str, positional: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Runs one call of a patched checker; returns whether it passed, or raises as this checker does."""
    __tracebackhide__ = True
    sessions = _sessions[-1:]  # the list is empty if another thread has just left the last context
    if torch_reference.is_calling_torch() or not sessions:
        return bool(_TORCH[name].original(*positional, **keywords))
    [session] = sessions
    if session.estimates:
        session.seconds.append(_estimated(name, positional, keywords))
        return True
    check = ask_both(name, positional, keywords) if session.compare else ask(name, positional, keywords)
    session.checks.append(check)
    if check.differs:
        raise DisagreementError(check)
    error = check.ours.error
    if error is not None and (check.ours.verdict == "raised" or keywords.get("raise_exception", True)):
        try:
            raise error
        finally:
            del error, check  # a traceback that refers to its own frame would keep the inputs in memory
    return error is None


def _estimated(name: str, positional: tuple[Any, ...], keywords: dict[str, Any]) -> float:
    with setting(checkers.estimates, True):
        try:
            getattr(checkers, name)(*positional, **keywords)
        except checkers.Estimate as found:
            return found.seconds
    return 0.0


def ask(name: str, positional: tuple[Any, ...], keywords: dict[str, Any]) -> Check:
    """Runs fastgrad's checker; the result has the error of a failure for any value of raise_exception."""
    reports: list[Report] = []

    def run() -> None:
        __tracebackhide__ = True
        getattr(checkers, name)(*positional, **keywords | {"raise_exception": True})

    with setting(checkers.watcher, reports.append):
        ours = outcome_of(run)
    return Check(name, ours, None if ours.verdict == "raised" else reports[-1])


def ask_both(name: str, positional: tuple[Any, ...], keywords: dict[str, Any]) -> Check:
    """Runs fastgrad's checker, then torch's, from the same state of torch's random generators."""
    before = RandomState()
    check = ask(name, positional, keywords)
    after = RandomState()
    before.restore()
    try:
        torchs = getattr(torch_reference, f"torch_{name}")(*positional, **keywords)
    finally:
        after.restore()
    return Check(name, check.ours, check.report, torchs)


# The bodies that torch's functions have while they forward to fastgrad. These bodies run with torch's globals and
# therefore import what they need. They pass on all parameters.
@hidden_from_dynamo
def _gradcheck(func: Callable[..., Any], inputs: Any, *arguments: Any, **keywords: Any) -> bool:
    __tracebackhide__ = True
    from fastgrad.testing.patch import _forward

    return _forward("gradcheck", (func, inputs, *arguments), keywords)


@hidden_from_dynamo
def _gradgradcheck(
    func: Callable[..., Any], inputs: Any, grad_outputs: Any = None, *arguments: Any, **keywords: Any
) -> bool:
    __tracebackhide__ = True
    from fastgrad.testing.patch import _forward

    return _forward("gradgradcheck", (func, inputs, grad_outputs, *arguments), keywords)


class _Redirection:
    """One of torch's checkers, a copy of the original, and the replacement of its body."""

    def __init__(self, function: FunctionType, body: Any) -> None:
        self.function = function
        name = f"{function.__name__} of torch"
        self.original = FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
        self.original.__kwdefaults__ = function.__kwdefaults__
        # Test suites inspect the signature to learn which keywords this version of torch has.
        vars(function)["__signature__"] = inspect.signature(function)
        function.__code__ = body.__code__

    def undo(self) -> None:
        self.function.__code__ = self.original.__code__
        del vars(self.function)["__signature__"]


def _torchs_own(name: str) -> FunctionType:
    """The original function of torch, even if its name was replaced by a wrapper."""
    # Not the attribute torch.autograd.gradcheck: it is the function, which hides the module of the same name.
    module = import_module("torch.autograd.gradcheck")

    def is_torchs(value: object) -> TypeGuard[FunctionType]:
        if type(value) is not FunctionType or value.__name__ != name:
            return False
        return (value.__code__.co_name, value.__code__.co_filename) == (name, module.__file__)

    there = getattr(module, name)
    # A wrapper may hold torch's function in a closure, an attribute or anywhere else.
    found = there if is_torchs(there) else next(filter(is_torchs, gc.get_objects()), None)
    if found is None:
        raise RuntimeError(f"torch's {name} cannot be patched: it was replaced by {there!r}.")
    return found


_BODIES = {"gradcheck": _gradcheck, "gradgradcheck": _gradgradcheck}
_TORCH: dict[str, _Redirection] = {}
"""The redirections of the last `patch`; kept for threads that are still in a call when it ends."""
_lock = threading.Lock()
_sessions: list[_Session] = []


def _redirect() -> None:
    functions = {name: _torchs_own(name) for name in _BODIES}  # if one name cannot be found, none is replaced
    for name, body in _BODIES.items():
        _TORCH[name] = _Redirection(functions[name], body)


def _restore() -> None:
    for diversion in _TORCH.values():
        diversion.undo()
