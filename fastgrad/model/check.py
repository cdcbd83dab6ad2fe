"""check_model: checks each operation of a model, the gradient of the loss, and the connections between operations."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from fastgrad.api.checkers import default_keywords
from fastgrad.api.settings import settings_of
from fastgrad.checks.description import environment
from fastgrad.core import torch_private
from fastgrad.core.memory import free_bytes
from fastgrad.core.torch_private import hidden_from_dynamo
from fastgrad.model.end_to_end import DirectionalComparison, LossDerivatives, enter_precise
from fastgrad.model.loss_error import LossErrorExperiments, at, record
from fastgrad.model.not_finite import find_not_finite
from fastgrad.model.operations import AT_KINK, SCREEN_ERROR, check_operation
from fastgrad.model.recorder import Recorder
from fastgrad.model.step import Step
from fastgrad.problem.arguments import as_tuple, check_has_no_cycle
from fastgrad.problem.transforms import reject_transformed
from fastgrad.problem.validation import check_kwargs, disabled_gradients, is_integer
from fastgrad.report.model import ModelReport
from fastgrad.report.model_data import EndToEnd, Finding, Operation
from fastgrad.report.settings import Settings

DIRECTIONS = 2
"""Number of random directions of all parameters, for the end-to-end test."""

_TURN = threading.RLock()
"""Held during a check, which changes what all threads share: the default dtype, random states and methods of torch."""

NOT_REPEATED = (
    "two calls of the model from the same state give different losses, so differences of the loss are not derivatives, "
    "and the gradient of the loss was not compared with them"
)
"""The reason why such an end-to-end test is undecided."""

ONLY_FINITE = "operations whose inputs or results are not finite were not checked"
"""The remark if the loss or its gradient is not finite."""

MAX_OMITTED = 3
"""If nothing explains an error, up to this many operations that were not checked are named."""


def check_model(
    model: Module,
    inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    eps: float = 1e-6,
    atol: float = 1e-5,
    rtol: float = 1e-3,
    seed: int = 0,
    memory_limit: int | None = None,
) -> ModelReport:
    """Finds the operation of a model whose gradient is wrong, or the reason between operations.

    One step of the model is recorded. Each distinct operation (operator, shapes, layouts and other arguments) is
    checked separately at its recorded inputs, in double precision if the operation supports it. Then the derivative of
    the loss along random directions of all parameters is compared with differences of the loss. If this derivative is
    wrong and all operations are right, experiments look for the reason: saved tensors that were changed before
    backward, paths that autograd does not record, or hooks that change gradients.

    Parameters
    ----------
    model
        Checked in its current mode (train or eval), with respect to its parameters that require grad.
    inputs
        A tuple or list of arguments of the model, or a single argument; may be nested.
    loss
        Function of the model's output; returns a real tensor of one element. None: the model returns the loss.
    kwargs
        Keyword arguments of the model.
    eps, atol, rtol
        As in `gradcheck`, for each operation. If all entries of an operation are small, atol is reduced.
    seed
        Seed of the random vectors. Every call of the model starts from the same random state, so dropout may be on.
    memory_limit
        Bytes for copies of the operations' inputs; by default a quarter of the free memory. Operations whose inputs
        do not fit are not checked, and the report lists them.

    Returns
    -------
    ModelReport
        `passed` is True if no error was found; `findings` lists the errors, the most probable reason first, and
        `undecided` what could not be decided, for example at a kink of the loss.

    Raises
    ------
    TypeError, ValueError
        An argument cannot be used.
    Exception
        An exception of the model, the loss or a backward in the first step.

    Notes
    -----
    These are restored afterwards: parameters, buffers, gradients, hooks, the train or eval mode of every module, and
    random states (also of generators that are attributes of modules, or arguments). Other state of a module stays as
    the last call left it. Checks in several threads take turns.

    The Jacobian of an operator of torch is first tested by one number, v^T J u for random u and v. A custom Function is
    always checked in fast mode. Unused results, for example the statistics of a norm, are not checked.

    Examples
    --------
    >>> import torch, fastgrad
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> report = fastgrad.check_model(model, torch.randn(16, 4), lambda y: y.square().mean())
    >>> report.passed, report.end_to_end.verdict
    (True, 'right')
    """
    start = time.perf_counter()
    _check_arguments(model, inputs, loss, kwargs, memory_limit)
    settings = settings_of(
        {**default_keywords(), "eps": eps, "atol": atol, "rtol": rtol, "seed": seed, "fast_mode": True}
    )
    limit = free_bytes() // 4 if memory_limit is None else memory_limit
    with _TURN, Step(model, as_tuple(inputs), kwargs or {}, loss) as step:
        return _checked(step, settings, limit, start)


hidden_from_dynamo(check_model)


def _checked(step: Step, settings: Settings, limit: int, start: float) -> ModelReport:
    before = time.perf_counter()
    first = step.loss()
    device = first.device
    gradients = step.gradients(first)
    step_seconds = time.perf_counter() - before
    not_finite = find_not_finite(step, first, gradients)
    del first, gradients
    recorder = Recorder(step, memory_limit=limit)
    record(step, recorder)
    step.reset()
    calls = list(recorder.calls.values())
    operations = [check_operation(call, settings, only_finite=not_finite is not None) for call in calls]
    remarks = _remarks(recorder, step) + ([] if not_finite is None else [ONLY_FINITE])
    experiments = LossErrorExperiments(step, LossDerivatives(step, settings.seed))
    end_to_end = _end_to_end(experiments, recorder, operations, remarks)
    if end_to_end.verdict == "wrong" and not_finite is None and not _any_wrong(operations):
        found = [check_operation(other, settings) for call in calls for other in call.others]
        operations += [one for one in found if one.verdict == "wrong"]
        if len(operations) == len(calls):
            experiments = LossErrorExperiments(step, LossDerivatives(step, settings.seed))
            end_to_end = _end_to_end(experiments, recorder, operations, remarks, explains=True)
    operations.sort(key=_order)
    wrong = (one for one in operations if one.verdict == "wrong")
    findings = [] if not_finite is None else [not_finite]
    findings += [Finding("operation", one.detail, one.sites, one.name, (), one.error) for one in wrong]
    findings += [_with_suspect(one, operations) for one in experiments.findings]
    if end_to_end.verdict != "wrong":
        remarks += _harmless(recorder, step, findings)
    return ModelReport(
        tuple(findings),
        tuple(operations),
        replace(end_to_end, evaluations=step.evaluations),
        tuple(dict.fromkeys(remarks + experiments.remarks)),
        step_seconds,
        time.perf_counter() - start,
        environment(device),
        tuple(dict.fromkeys([*experiments.undecided, *_not_run(step)])),
    )


def _end_to_end(
    experiments: LossErrorExperiments,
    recorder: Recorder,
    operations: Sequence[Operation],
    remarks: list[str],
    explains: bool = False,
) -> EndToEnd:
    """Tests the gradient of the loss and parameters without a gradient; with explains, also looks for a reason."""
    whole = experiments.whole

    def compare() -> list[DirectionalComparison]:
        return [whole.quickly_along(whole.direction(number)) for number in range(DIRECTIONS)]

    with ExitStack() as stack:
        why = enter_precise(experiments.step, whole, stack)
        if why:
            remarks.append(f"the end-to-end test ran the model in its own dtype, not in double precision: {why}")
        if any(cut.is_intended for cut in recorder.detached):
            stack.enter_context(experiments.holding_intended_constants())
        found = compare()
        if whole.result(found).verdict != "right" and not whole.repeats():
            experiments.undecided.append(NOT_REPEATED)
            found = [replace(one, allowed=math.inf) for one in found]
        elif whole.at_kink(found):
            kinks = [f"{one.name}{at(one.sites[0])}" for one in operations if AT_KINK in one.detail]
            stack.enter_context(experiments.next_to_kink(kinks))
            found = compare()
        elif all(one.agrees for one in found) and whole.is_stationary():
            stack.enter_context(experiments.next_to_stationary_point())
            found = compare()
        experiments.look_at_missing()
        wrong: DirectionalComparison | None = next((one for one in found if not one.agrees), None)
        if explains and wrong is not None:
            experiments.explain(wrong)
        elif wrong is not None and _any_wrong(operations):
            remarks.append(
                "the gradient of the loss is wrong, perhaps only because of the wrong operations: correct them, and "
                "check again"
            )
    return whole.result(found)


def _any_wrong(operations: Sequence[Operation]) -> bool:
    return any(one.verdict == "wrong" for one in operations)


def _order(operation: Operation) -> tuple[int, float]:
    """Sort key of the table of operations: wrong ones first, then by error."""
    verdicts = ["wrong", "undecided", "not checked", "right"]
    return verdicts.index(operation.verdict), -(operation.error or 0.0)


def _with_suspect(finding: Finding, operations: list[Operation]) -> Finding:
    """The finding; if it is unexplained, with the unchecked operations and the one with the largest accepted error."""
    if finding.kind != "end to end":
        return finding
    omitted = [f"; {one.name} was not checked: {one.detail}" for one in operations if one.verdict == "not checked"]
    finding = replace(finding, text=finding.text + "".join(omitted[:MAX_OMITTED]))
    worst = max((one for one in operations if one.error is not None), key=lambda one: one.error or 0.0, default=None)
    if worst is None or not (worst.error or 0.0) > SCREEN_ERROR:
        return finding
    text = f"{finding.text}; the largest error within the tolerances is that of {worst.name}: {worst.error:.1e}"
    return replace(finding, text=text, operator=worst.name, sites=worst.sites)


def _remarks(recorder: Recorder, step: Step) -> list[str]:
    remarks = [
        f"{name} is an autograd.Function of torch: only the end-to-end test covers it and the operations in it"
        for name in recorder.foreign
    ]
    if step.unscaled:
        names = ", ".join(name or "the model" for name in step.unscaled)
        remarks.append(
            f"scale_grad_by_freq, which divides gradients by design, was switched off during the check: {names}"
        )
    if any(type(module).__name__ == "OptimizedModule" for module in step.model.modules()):
        remarks.append("compiled parts of the model ran operator by operator while they were recorded")
    return remarks


def _not_run(step: Step) -> list[str]:
    """What is undecided because hooks were not run: they may have side effects, such as a step of an optimizer."""
    names = [name for name, one in step.model.named_parameters() if torch_private.has_accumulation_hooks(one)]
    text = "the check did not run hooks of register_post_accumulate_grad_hook, which may change gradients, of"
    return [f"{text} {', '.join(names)}"] if names else []


def _harmless(recorder: Recorder, step: Step, findings: Sequence[Finding]) -> list[str]:
    """Remarks about changes that do not affect the gradient of the loss."""
    buffers = {id(buffer) for buffer in step.model.buffers()}
    changed = [one for one in recorder.saved.changed() if id(one.tensor) not in buffers]
    remarks = [
        f"a tensor that was saved for backward{at(one.site)} was changed before backward read it, but this does not "
        "change the gradient of the loss"
        for one in changed
    ]
    found = [(one.operator, one.sites) for one in findings]
    hooks = [one for one in recorder.hooks.changed() if (one.name, (one.site,)) not in found]
    return remarks + [
        f"the hook {one.name} of {one.owner} changes gradients by less than the test detects" for one in hooks
    ]


def _check_arguments(model: object, inputs: object, loss: object, kwargs: object, memory_limit: Any) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, DistributedDataParallel):
        raise TypeError("model is wrapped in DistributedDataParallel: pass model.module.")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of the model's output, or None, got {type(loss).__name__}.")
    check_kwargs(kwargs)
    check_has_no_cycle("inputs", inputs)
    check_has_no_cycle("kwargs", kwargs)
    if torch_private.transforms_are_active():
        raise ValueError("check_model cannot run within a transform of torch.func, because it calls backward.")
    reject_transformed({"model": model, "inputs": inputs, "kwargs": kwargs})
    if memory_limit is not None and not is_integer(memory_limit):
        raise TypeError(f"memory_limit must be a number of bytes, got {memory_limit!r}.")
    if memory_limit is not None and memory_limit < 0:
        raise ValueError(f"memory_limit must be at least zero, got {memory_limit}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model is a TorchScript module, whose operations cannot be recorded: pass the original module.")
    disabled = disabled_gradients()
    if disabled is not None:
        raise ValueError(f"check_model records gradients, but {disabled}.")
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(f"Parameter {lazy[0]} of the model is uninitialized: call the model once before the check.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("check_model needs a parameter with requires_grad=True in the model, but there is none.")
