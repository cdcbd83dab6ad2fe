"""Variants of state: events between forward and backward, and around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from fastgrad.problem.arguments import as_tuple
from fastgrad.variants.case import Case, NotApplicableError, Outcome, Subject, Variant, tensors_of
from fastgrad.variants.values import difference


def _two_forwards(subject: Subject) -> Case:
    """Two forwards before backward: finds a backward that reads state of the other forward."""
    neighbor = subject.neighbor()

    def func(*arguments: Any) -> Any:
        first = as_tuple(subject.func(*arguments))
        return (*first, *as_tuple(subject.func(*neighbor(arguments))))

    return Case(func, subject.inputs)


def _two_calls_added(subject: Subject) -> Case:
    """The sum of two calls: its backward runs that of both, and neither may overwrite the gradient of the other."""
    neighbor = subject.neighbor()
    if not any(value.requires_grad for value in tensors_of(subject.results())):
        raise NotApplicableError("no output requires grad")

    def func(*arguments: Any) -> Any:
        first, second = (tensors_of(subject.func(*given)) for given in (arguments, neighbor(arguments)))
        return tuple(map(torch.add, first, second))

    return Case(func, subject.inputs)


def _saved_as_copies() -> saved_tensors_hooks:
    """A context in which what a function saves for backward is copied: later changes affect only what it keeps itself.

    Without it, autograd would raise for a saved tensor that has changed, which would hide another one that it does not
    know.
    """
    return saved_tensors_hooks(torch.clone, lambda copy: copy)


def _inputs_changed(subject: Subject) -> Case:
    """Inputs change after forward, which may not have kept them other than by `save_for_backward`."""
    with torch.no_grad():
        results = tensors_of(subject.func(*subject.inputs))
    shared = {i for i, given in enumerate(subject.inputs) if any(_shares(value, given) for value in results)}
    if shared & set(subject.checked):
        raise NotApplicableError("a result is a view of an input, or the input itself")
    changed = [i for i in range(len(subject.inputs)) if i not in shared]

    def func(*arguments: Any) -> Any:
        given = [value.clone() if i in changed else value for i, value in enumerate(arguments)]
        with _saved_as_copies():
            result = subject.func(*given)
        with torch.no_grad():
            for i in changed:
                _change(given[i])
        return result

    return Case(func, subject.inputs)


def _change(tensor: Tensor) -> None:
    """Changes values in place; integers remain valid as indices."""
    if tensor.dtype is torch.bool:
        tensor.logical_not_()
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(1.5)
    else:
        tensor.zero_()


def _results_changed(subject: Subject) -> Case:
    """Results change in place after forward, which may not have kept them other than by `save_for_backward`.

    The change is recorded, as that of an activation in place would be, so torch decides whether it is allowed.
    """
    results = tensors_of(subject.func(*subject.inputs))
    if any(_shares(value, given) for value in results for given in subject.inputs):
        raise NotApplicableError("a result is a view of an input, or the input itself")
    changed = [k for k, value in enumerate(results) if value.requires_grad]

    def func(*arguments: Any) -> Any:
        with _saved_as_copies():
            result = subject.func(*arguments)
        found = tensors_of(result)
        for k in changed:
            found[k].mul_(-2).add_(1)  # changes values, signs and zeros
        return result

    return Case(func, subject.inputs)


def _shares(left: Tensor, right: Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr() and left.numel() > 0


def _through(call: Callable[..., Any]) -> Callable[[Subject], Case]:
    """A variant that calls the function by call(func, *arguments)."""
    return lambda subject: Case(partial(call, subject.func), subject.inputs, expected=subject.results)


@_through
def _saved_tensors_copied(func: Callable[..., Any], *arguments: Any) -> Any:
    with saved_tensors_hooks(torch.clone, torch.clone):
        return func(*arguments)


@_through
def _checkpointed(func: Callable[..., Any], *arguments: Any) -> Any:
    from torch.utils.checkpoint import checkpoint  # this import takes a second

    return checkpoint(func, *arguments, use_reentrant=False)


@_through
def _another_thread(func: Callable[..., Any], *arguments: Any) -> Any:
    records = torch.is_grad_enabled()

    def run() -> Any:
        with torch.set_grad_enabled(records):
            return func(*arguments)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def _without_recording(subject: Subject) -> Outcome:
    """Without a graph, as for all differences of a check, forward may take another branch; its values must be equal."""
    for disabled in (torch.no_grad, torch.inference_mode):
        wrong = difference(disabled()(subject.results), subject.results, 0.0)
        if wrong:
            return Outcome("failed", f"under torch.{disabled.__name__}, {wrong}")
    return Outcome("passed")


def _under_autocast(subject: Subject) -> Case:
    """Forward under autocast, backward outside; double precision is not cast."""
    kind = subject.inputs[subject.checked[0]].device.type

    def func(*arguments: Any) -> Any:
        with torch.autocast(kind, dtype=torch.bfloat16):
            return subject.func(*arguments)

    return Case(func, subject.inputs)


def _other_mode(subject: Subject) -> Case:
    """The module in its other mode, also during backward, which may read the mode or run forward again."""
    module = subject.called
    if not isinstance(module, Module):
        raise NotApplicableError("func is not a module")
    module.train(not module.training)
    return Case(subject.func, subject.inputs)


@contextmanager
def restored_module(subject: Subject) -> Iterator[None]:
    """A context at whose end a module has the buffers, and its modules the mode (train or eval), that they have now."""
    module = subject.called
    modes = {each: each.training for each in module.modules()} if isinstance(module, Module) else {}
    try:
        yield
    finally:
        for each, training in modes.items():
            each.training = training
        if subject.buffers is not None:
            subject.buffers.restore(thoroughly=True)


VARIANTS = (
    Variant("state", "two forwards before backward", _two_forwards),
    Variant("state", "results of two calls added", _two_calls_added),
    Variant("state", "inputs changed before backward", _inputs_changed),
    Variant("state", "results changed before backward", _results_changed),
    Variant("state", "saved tensors copied", _saved_tensors_copied),
    Variant("state", "checkpointed", _checkpointed),
    Variant("state", "another thread", _another_thread),
    Variant("state", "gradients disabled", _without_recording),
    Variant("state", "forward under autocast", _under_autocast),
    Variant("state", "train and eval exchanged", _other_mode),
)
