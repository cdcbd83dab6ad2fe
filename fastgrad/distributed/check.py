"""The check of a distributed function: all ranks call it, rank 0 runs it, and all ranks return its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastgrad._version import __version__
from fastgrad.api.checkers import check as check_whole
from fastgrad.core.errors import text_of
from fastgrad.core.random import RandomState
from fastgrad.core.ranks import RankError, Ranks
from fastgrad.distributed.causes import explained
from fastgrad.distributed.placements import (
    Placement,
    Space,
    checked_mesh,
    checked_space,
    difference,
    dual,
    mismatch,
    whole_of,
)
from fastgrad.distributed.session import Member, Session, follow, whole_function
from fastgrad.problem.arguments import as_tuple, check_callable, flatten
from fastgrad.problem.caller_state import restores_caller_state
from fastgrad.problem.signature import function_name
from fastgrad.problem.transforms import rejects_transforms
from fastgrad.problem.validation import as_float, check_kwargs
from fastgrad.report.report import Report
from fastgrad.sharding.calls import reject_differences

_SECONDS = 5.0
"""Default of `seconds`."""

_SHORTEST, _LONGEST = 1e-3, 1e9
"""Limits of `seconds`: process groups count whole milliseconds, and the store nanoseconds in 64 bits."""

_NOT_HERE = {
    **dict.fromkeys(("check_forward_ad", "check_fwd_over_rev"), "only reverse mode is checked"),
    **dict.fromkeys(("check_batched_grad", "check_batched_forward_grad"), "vmap does not vectorize collectives"),
    "wrt": "pass what is to be checked as inputs, parameters through torch.func.functional_call",
    "grad_outputs": "they are random, and seed= selects them",
    **dict.fromkeys(("reference", "reference_device"), "to check the formula, pass inputs in double precision"),
}
"""Keywords of `fastgrad.check` that a distributed check does not support, with the reason or what to do instead."""


@restores_caller_state
@rejects_transforms
def check(
    func: Callable[..., Any],
    inputs: Any,
    *,
    placements: Sequence[Placement | None] | None = None,
    outputs: Sequence[Placement] | Placement | None = None,
    gradients: Sequence[Placement | None] | None = None,
    output_gradients: Sequence[Placement | None] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    seconds: float = _SECONDS,
    **keywords: Any,
) -> Report:
    """Checks the gradients of a function whose tensors are distributed over the ranks of a process group.

    All ranks call this function at the same time, with the same func and their parts of the inputs. Rank 0 runs
    `fastgrad.check` with respect to the whole tensors. The other ranks take part in every call of func and of backward,
    so all ranks enter each collective equally often.

    The whole tensor of `Shard(dim)` is the concatenation of the parts along a dimension. That of `Replicate()` is the
    tensor that all ranks hold, whose elements count once. That of `Partial()` is the sum of the ranks' tensors. One
    call of func perturbs a coordinate of a whole input on all ranks that hold it.

    Parameters
    ----------
    func
        Function of this rank's parts of the inputs; returns a tensor or a tuple or list of tensors, the same number
        on every rank.
    inputs
        A tensor, or a tuple or list. Tensors with requires_grad=True are checked; everything else is passed to func
        unchanged. Parts of a sharded input may differ in size along its dimension.
    placements
        Placement of each input: `Shard(dim)`, `Replicate()` or `Partial()` of torch.distributed.tensor. None for inputs
        that are not checked, and for DTensors, which have a placement; their mesh must have one dimension.
    outputs
        Placement of each result.
    gradients
        Placement of the gradient of each input. By default as in DTensor: the placement of the input, but Replicate()
        if the input is Partial(). Pass Partial() for the gradient of a replicated parameter that is not reduced yet.
    output_gradients
        Placement of the grad_output of each result. For a Replicate() result, Partial() means that the ranks'
        grad_outputs add up, because each rank computes its own loss.
    kwargs
        Keyword arguments of func, passed unchanged; tensors in them must not require grad.
    group
        Process group; by default all ranks.
    seconds
        Time limit of a call of func or of backward, and of waiting in a collective; at least 0.001.
    keywords
        Keywords of `fastgrad.check`: order, fast_mode, eps, atol, rtol, nondet_tol, engine, seed and so on.

    Returns
    -------
    Report
        The same report on all ranks. Notes name the rank that holds the worst entry.

    Raises
    ------
    RankError
        A rank raised, exited, or did not answer in time; another rank rejected its arguments; or the calls of the
        ranks differ.
    ValueError, TypeError, NotImplementedError
        An argument of this rank, or the tensors of all ranks together, cannot be checked.

    Notes
    -----
    The conventions are those of `torch.distributed.tensor`; docs/distributed.md explains them.

    Examples
    --------
    >>> import torch, fastgrad.distributed
    >>> from torch.distributed.tensor import Partial, Replicate, Shard
    >>> def column_parallel(x, w):  # x on all ranks, w and the result in columns
    ...     return x @ w
    >>> fastgrad.distributed.check(  # doctest: +SKIP
    ...     column_parallel, (x, w), placements=[Replicate(), Shard(1)], outputs=Shard(1), gradients=[Partial(), None]
    ... ).passed
    True
    """
    random, ranks = RandomState(), _ranks_of(group)
    with ranks.during_check():
        with ranks.validation():
            ranks.set_limit(_limit(seconds))
            _reject(func, kwargs, keywords)
            arguments = as_tuple(inputs)
            checked = _checked(arguments)
            placed = _each("placements", placements, len(arguments)), _each("gradients", gradients, len(arguments))
            spaces = [_space(f"input {i}", arguments[i], placed[0][i], placed[1][i]) for i in checked]
            call: dict[str, Any] = {
                "function": function_name(func) or type(func).__name__,
                "versions": (__version__, str(torch.__version__)),
                "the set of checked inputs": tuple(checked),
                "spaces": tuple(spaces),
                "results": _result_spaces(outputs, output_gradients),
                "keywords": repr(sorted(keywords.items())),
            }
            member = Member(partial(func, **(kwargs or {})), arguments, checked)
        try:
            calls, parts = zip(*ranks.gather((call, member.parts())), strict=True)
            _reject_what_does_not_fit(calls, parts, checked)
            if ranks.rank != 0:
                outcome = follow(ranks, member)
                if isinstance(outcome, BaseException):
                    raise outcome
                assert isinstance(outcome, Report)
                return outcome
            session = Session(ranks, member, spaces, call["results"])
            session.base = [list(of_ranks) for of_ranks in zip(*parts, strict=True)]
            return _lead(session, func, arguments, checked, keywords)
        finally:
            member.restore()
            random.restore()


def _ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    if not dist.is_initialized():
        raise RuntimeError(
            "fastgrad.distributed.check needs a process group: call torch.distributed.init_process_group first."
        )
    return Ranks(dist.distributed_c10d._get_default_group() if group is None else group, _SECONDS)


def _limit(seconds: object) -> float:
    """The value of `seconds`; raises unless it is a time limit that process groups take."""
    number = as_float("seconds", seconds, zero=False)
    if not _SHORTEST <= number <= _LONGEST:
        raise ValueError(f"seconds must be between {_SHORTEST:g} and {_LONGEST:g}, got {seconds!r}.")
    return number


def _reject(func: object, kwargs: object, keywords: Mapping[str, Any]) -> None:
    check_callable(func)
    for keyword in sorted(set(keywords) & set(_NOT_HERE)):
        raise NotImplementedError(f"fastgrad.distributed.check does not take {keyword}: {_NOT_HERE[keyword]}.")
    check_kwargs(kwargs)
    found: list[tuple[str, Tensor]] = []
    flatten(kwargs, "kwargs", lambda tensor: tensor.requires_grad, found)
    for path, _ in found:
        raise ValueError(f"{path} requires grad, but only inputs are checked: pass it as an input, or detach it.")


def _checked(arguments: Sequence[Any]) -> list[int]:
    """The positions of the tensors that require grad."""
    found = [i for i, value in enumerate(arguments) if isinstance(value, Tensor) and value.requires_grad]
    if len({id(arguments[i]) for i in found}) < len(found):
        raise ValueError("a tensor is passed twice: pass it once, and let func use it twice.")
    return found


def _lead(
    session: Session, func: Callable[..., Any], arguments: tuple[Any, ...], checked: Sequence[int], keywords: Any
) -> Report:
    """Runs the check on rank 0, and informs the others of its end."""
    whole = list(arguments)
    for i, parts, space in zip(checked, session.base, session.inputs, strict=True):
        whole[i] = whole_of(parts, space.placement).to(arguments[i].device).requires_grad_()
    function = wraps(func)(whole_function(session, checked))
    outcome: Any = None
    try:
        report = check_whole(function, tuple(whole), **keywords)
        if session.broken is not None:
            raise session.broken
        outcome = report = explained(report, session, tuple(whole), checked)
        return report
    except BaseException as error:
        outcome = session.broken or RankError(f"rank 0 raised {text_of(error)}")
        if session.broken is not None and error is not session.broken:
            raise session.broken from error
        raise
    finally:
        session.end(outcome)


def _each(name: str, given: Any, count: int) -> list[Any]:
    """The value for each input, from one value or a sequence."""
    if given is None:
        return [None] * count
    found = list(given) if isinstance(given, (tuple, list)) else [given]
    if len(found) != count:
        raise ValueError(f"{name} must have one entry for each input, {count} in all, got {len(found)}.")
    return found


def _space(name: str, tensor: Tensor, placement: Any, gradient: Any) -> Space:
    """The placements of a tensor and its gradient, after validation."""
    if isinstance(tensor, DTensor):
        checked_mesh(name, tensor.device_mesh.ndim)
        placement = tensor.placements[0] if placement is None else placement
        if placement != tensor.placements[0] or gradient not in (None, dual(placement)):
            raise ValueError(f"{name} is a DTensor with the placement {tensor.placements[0]}: pass no other placement.")
    return checked_space(name, placement, gradient, isinstance(tensor, DTensor))


def _result_spaces(outputs: Any, gradients: Any) -> tuple[Space, ...] | None:
    """The placements of the results; None: the results are DTensors, which have placements."""
    if outputs is None:
        return None
    found = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    own = _each("output_gradients", gradients, len(found))
    return tuple(checked_space(f"result {k}", *both) for k, both in enumerate(zip(found, own, strict=True)))


def _reject_what_does_not_fit(
    calls: Sequence[Mapping[str, Any]], parts_of_ranks: Sequence[Sequence[Tensor]], checked: Sequence[int]
) -> None:
    """Raises if the calls of the ranks differ, or their parts do not form a tensor."""
    reject_differences(calls, "fastgrad.distributed.check with the same func, placements and keywords")
    spaces = calls[0]["spaces"]
    if not spaces:
        raise ValueError("fastgrad.distributed.check needs an input with requires_grad=True, but there is none.")
    for i, space, parts in zip(checked, spaces, zip(*parts_of_ranks, strict=True), strict=True):
        why = mismatch(space.placement, parts)
        if why:
            raise ValueError(f"input {i} {why}.")
        apart = difference(parts, space.placement)
        if apart is not None:
            raise ValueError(
                f"input {i} is Replicate(), but at {apart.index} it is {apart.on_first} on rank 0 and {apart.found} on "
                f"rank {apart.rank}."
            )
