"""Experiments that explain a wrong gradient of the loss if all operations are right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fastgrad.core import torch_private
from fastgrad.model.end_to_end import NEXT_TO, DirectionalComparison, LossDerivatives
from fastgrad.model.hooks import Hook
from fastgrad.model.recorder import DetachedPath, Recorder, full_name, padding_row
from fastgrad.model.saved import Saved
from fastgrad.model.step import Step
from fastgrad.report.model_data import Finding, Site

MAX_PARAMETERS = 64
"""Largest number of parameters that are examined one by one."""

MAX_CUTS = 32
"""Largest number of detached paths that are tried one by one."""

MAX_SAVED = 32
"""Largest number of changed tensors that are tried one by one."""

MAX_SITES = 8
"""Largest number of places that a finding lists."""

Gradients = list[Tensor | None]
Result = TypeVar("Result")


class _DivergedError(Exception):
    """The model ran different operations than in the recorded step."""


class _Held(torch_private.DispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which some events return their recorded results."""

    def __init__(self, names: dict[int, str], values: dict[int, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._values, self._event = names, values, 0

    @torch_private.hidden_from_dynamo
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator; for a held event, returns the recorded result instead of the new one."""
        result = func(*args, **(kwargs or {}))
        event, self._event = self._event, self._event + 1
        if event not in self._names:
            return result
        if full_name(func) != self._names[event]:
            raise _DivergedError
        if event not in self._values:
            self._values[event] = _copy(result)
            return result
        if func._schema.is_mutable:
            values = torch_private.tensors_in(self._values[event])
            for tensor, value in zip(torch_private.tensors_in(result), values, strict=True):
                tensor.copy_(value)
            return result
        value, padding = _copy(self._values[event]), padding_row(func, args, kwargs or {})
        return value if padding is None else torch.where((args[1] == padding).unsqueeze(-1), value, result)


@contextmanager
def _holding(names: dict[int, str], values: dict[int, Any]) -> Iterator[None]:
    # With these hooks, autograd runs the same operators as in the recorded step.
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), _Held(names, values):
        yield


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(map(_copy, value)) if type(value) in (tuple, list) else value


@dataclass
class LossErrorExperiments:
    """Experiments on one step, in its current precision.

    Attributes
    ----------
    findings
        Proven errors.
    remarks
        Other observations.
    undecided
        What cannot be decided.
    intended_detached
        Values that torch's own modules treat as constants.
    """

    step: Step
    whole: LossDerivatives
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    intended_detached: list[DetachedPath] = field(default_factory=list)

    @contextmanager
    def holding_intended_constants(self) -> Iterator[None]:
        """A context in which constants of torch's modules (spectral norm's vectors) are held fixed."""
        self.intended_detached = [cut for cut in self._record()[0].detached if cut.is_intended]
        held = self._holding([])
        if held is None or not self.intended_detached:
            yield
            return
        names = ", ".join(dict.fromkeys(cut.site.module or "the model" for cut in self.intended_detached))
        self.remarks.append(
            f"held constant: values that have no gradient by design (spectral norm, max_norm, padding_idx), in {names}"
        )
        with self.step.inside(held):
            yield

    def next_to_kink(self, operations: Sequence[str]) -> AbstractContextManager[None]:
        """A context in which the parameters are next to a kink of the loss; operations: those that may cause it."""
        examined = enumerate(self.step.names[:MAX_PARAMETERS])
        names = [name for i, name in examined if self.whole.has_kink(self.whole.only([i]))]
        whose = f" with respect to {_listed(names)}" if names else ""
        cause = f" (probably that of {_listed(operations)})" if operations else ""
        self.undecided.append(
            f"the loss has a kink at the parameters{cause}: its one-sided derivatives{whose} differ, so it has no "
            f"derivative there; the gradient was compared at other values of the parameters, about {NEXT_TO:.0%} away"
        )
        return self._next_to()

    def next_to_stationary_point(self) -> AbstractContextManager[None]:
        """A context in which the parameters are next to a point at which a right gradient of zero may hide errors."""
        self.remarks.append(
            "some gradients are zero, which is right; to find errors that this may hide, the gradient of the loss was "
            f"also compared at other values of the parameters, about {NEXT_TO:.0%} away"
        )
        return self._next_to()

    @contextmanager
    def _next_to(self) -> Iterator[None]:
        every = range(len(self.step.parameters))
        with self.step.moved(self.whole.only(every, 2), NEXT_TO):
            self.whole.measure()
            yield

    def look_at_missing(self) -> None:
        """Reports whether the loss depends on parameters without a gradient and, if so, where their path ends."""
        missing = self.whole.missing()
        if not missing or not math.isfinite(self.whole.loss):  # NaN does not show what it depends on
            return
        moving = [i for i in missing[:MAX_PARAMETERS] if self.whole.moves([i])] if self.whole.moves(missing) else []
        still = [self.step.names[i] for i in missing if i not in moving]
        if still:
            self.remarks.append(
                f"{_listed(still)} {_get(still)} no gradient, and the loss does not depend on {_it(still)}"
            )
        if not moving:
            return
        if not self.whole.repeats():
            names = tuple(self.step.names[i] for i in moving)
            self.remarks.append(
                f"{_listed(names)} {_get(names)} no gradient; whether the loss depends on {_it(names)} is not known, "
                "because two calls of the model from the same state give different losses"
            )
            return
        recorder, _ = self._record()
        stopped = self._stopped_by_hooks(recorder, moving)
        moving = [i for i in moving if i not in stopped]
        if not moving:
            return
        names = tuple(self.step.names[i] for i in moving)
        detached = [cut for cut in _unintended(recorder) if set(recorder.parameters_of(cut.parameters)) & set(moving)]
        alone = [cut for cut in detached[:MAX_CUTS] if self._explains_by_detaching([cut], moving)]
        ends = alone or (detached if detached and self._explains_by_detaching(detached, moving) else [])
        text = f"{_listed(names)} {_get(names)} no gradient, but the loss depends on {_it(names)}"
        zero = all(self.whole.gradients[i] is not None for i in moving)
        if not ends and zero and self.whole.along(self.whole.only(moving)).agrees:
            text = (
                f"the gradient of {_listed(names)} is zero, which is right, because the loss is piecewise constant in "
                f"{_it(names)}, for example because of round() or sign()"
            )
        if ends:
            text += f": the path ends in {ends[0].name}{at(ends[0].site)}"
        self.findings.append(Finding("detached", text, _sites(ends), "", names, 1.0))

    def _stopped_by_hooks(self, recorder: Recorder, missing: Sequence[int]) -> list[int]:
        """The parameters whose gradients are zero because of hooks: without hooks, they agree with differences.

        Also adds the finding.
        """
        hooks = recorder.hooks.changed()
        gradients = self._record(mutes_hooks=True)[1] if hooks else []
        which = [i for i in missing if hooks and (one := gradients[i]) is not None and bool(one.any())]
        if not which or not self.whole.compared(self.whole.along(self.whole.only(which)), gradients).agrees:
            return []
        names = tuple(self.step.names[i] for i in which)
        self._add_hooks([hook for hook in hooks if hook.returned_zero] or hooks, names, 1.0)
        return which

    def _explains_by_detaching(self, detached: Sequence[DetachedPath], which: Sequence[int]) -> bool:
        """Whether the loss no longer depends on some parameters if these detached paths keep their values."""
        return self._while_held(detached, lambda: not self.whole.moves(which)) or False

    def _while_held(self, detached: Sequence[DetachedPath], run: Callable[[], Result]) -> Result | None:
        """The result of run while detached paths keep their values; None if the model then runs other operations."""
        held = self._holding(detached)
        if held is None:
            return None
        try:
            with self.step.inside(held):
                return run()
        except _DivergedError:
            return None

    def _holding(self, detached: Sequence[DetachedPath]) -> Callable[[], AbstractContextManager[None]] | None:
        """A maker of contexts in which detached paths keep their values at the current parameters.

        None if the model runs other operations than those recorded.
        """
        around = partial(_holding, {cut.event: cut.name for cut in [*detached, *self.intended_detached]}, {})
        try:
            with self.step.inside(around):
                self.step.loss()
        except _DivergedError:
            return None
        return around

    def explain(self, along: DirectionalComparison) -> None:
        """Finds the reason for a wrong derivative along a direction, and adds the findings."""
        wrong = self._wrong_parameters()
        names = tuple(self.step.names[i] for i in wrong)
        recorder, _ = self._record()
        hooks, saved = recorder.hooks.changed(), recorder.saved.changed()
        numbers = frozenset(one.number for one in saved)
        behind = set(wrong or range(len(self.step.parameters)))
        detached = [cut for cut in _unintended(recorder) if behind & set(recorder.parameters_of(cut.parameters))]
        held = self._while_held(detached, lambda: self.whole.along(along.vectors)) if detached else None
        gradients: dict[tuple[str, ...], Gradients] = {(): self.whole.gradients}
        if hooks:
            gradients["hook",] = self._record(mutes_hooks=True)[1]
        if saved:
            gradients["saved",] = self._record(kept_saved=numbers)[1]
        if hooks and saved:
            gradients["hook", "saved"] = self._record(mutes_hooks=True, kept_saved=numbers)[1]
        derivatives: dict[tuple[str, ...], DirectionalComparison] = {(): along}
        if held is not None:
            derivatives["cut",] = held
        pairs = [(g, d) for d in derivatives for g in gradients if g + d]
        pairs.sort(key=lambda pair: len(pair[0] + pair[1]))  # the fewest reasons that explain the error
        agree = (g + d for g, d in pairs if self.whole.compared(derivatives[d], gradients[g]).agrees)
        explained: tuple[str, ...] = next(agree, ())
        error = abs(along.analytical - along.numerical) / along.size if along.size else 1.0
        if "hook" in explained:
            self._add_hooks(hooks, names, error)
        if "saved" in explained:
            self._add_saved(saved, along, names, error)
        if "cut" in explained:
            self._add_detached(detached, along, names, error)
        if not explained:
            self._add_unexplained(recorder, names, error)

    def _add_hooks(self, hooks: Sequence[Hook], names: tuple[str, ...], error: float) -> None:
        for hook in hooks:
            change = "makes gradients zero" if hook.returned_zero else "changes gradients"
            text = (
                f"the hook {hook.name} of {hook.owner} {change}; without the hook, the gradients agree with differences"
            )
            found = Finding("hook", text, (hook.site,), hook.name, names, error)
            if not any(one.text == text for one in self.findings):
                self.findings.append(found)

    def _add_saved(
        self, saved: Sequence[Saved], along: DirectionalComparison, names: tuple[str, ...], error: float
    ) -> None:
        def counts(one: Saved) -> bool:
            gradients = self._record(kept_saved=frozenset({one.number}))[1]
            return abs(self.whole.compared(along, gradients).analytical - along.analytical) > along.allowed

        saved = list(filter(counts, saved[:MAX_SAVED])) or saved
        unknown = frozenset(one.number for one in saved if not one.writer)
        if unknown:
            watching = self._record(watched=unknown)[0]
            for one in saved:
                one.writer = one.writer or watching.saved.all[one.number].writer
        for one in {(one.site, one.writer): one for one in saved}.values():
            by = one.writer or "code outside of torch's operators"
            text = f"a tensor that was saved for backward{at(one.site)} was changed before backward read it, by {by}"
            self.findings.append(Finding("saved tensor", text, (one.site,), "", names, error))

    def _add_detached(
        self, detached: Sequence[DetachedPath], along: DirectionalComparison, names: tuple[str, ...], error: float
    ) -> None:
        def counts(cut: DetachedPath) -> bool:
            held = self._while_held([cut], lambda: self.whole.along(along.vectors))
            return held is not None and abs(held.numerical - along.numerical) > along.allowed

        counting = list(filter(counts, detached[:MAX_CUTS])) or list(detached)
        text = (
            f"autograd treats the result of {counting[0].name}{at(counting[0].site)} as a constant, although it "
            "depends on parameters; with this result held fixed, differences agree with the gradients"
        )
        self.findings.append(Finding("detached", text, _sites(counting), counting[0].name, names, error))

    def _add_unexplained(self, recorder: Recorder, names: tuple[str, ...], error: float) -> None:
        whose = f" with respect to {_listed(list(names))}" if names else ""
        text = f"the gradient of the loss{whose} is wrong, but no operation that was checked is wrong"
        if not math.isfinite(self.whole.loss):
            text = f"the loss is {self.whole.loss}, so it has no gradient; no operation that was checked is wrong"
        foreign = [f"{name}{at(site)}" for name, site in recorder.foreign.items()]
        text += f"; not checked: {', '.join(foreign)}" if foreign else ""
        self.findings.append(Finding("end to end", text, (), "", names, error))

    def _wrong_parameters(self) -> list[int]:
        missing = self.whole.missing()
        others = [i for i in range(len(self.step.parameters)) if i not in missing]
        return [i for i in others[:MAX_PARAMETERS] if not self.whole.quickly_along(self.whole.only([i])).agrees]

    def _record(self, **keywords: Any) -> tuple[Recorder, Gradients]:
        recorder = Recorder(self.step, **keywords)
        return recorder, record(self.step, recorder)


def record(step: Step, recorder: Recorder) -> Gradients:
    """Runs one step while the recorder records it; returns the gradients."""
    step.reset()
    with recorder.hooks.watching(), step.keeps_hooks(), step.inside(recorder.recording):
        loss = step.loss()
        recorder.use(loss)
        return step.gradients(loss)


def _unintended(recorder: Recorder) -> list[DetachedPath]:
    return [cut for cut in recorder.detached if not cut.is_intended]


def _get(names: Sequence[str]) -> str:
    return "gets" if len(names) == 1 else "get"


def _it(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"


def _listed(names: Sequence[str]) -> str:
    """A list of names, shortened."""
    if len(names) <= 4:
        return ", ".join(names)
    return f"{', '.join(names[:3])} and {len(names) - 3} more"


def at(site: Site) -> str:
    """The place as text for a sentence."""
    where = f" at {site.source}" if site.source else ""
    return where + (f" in module {site.module}" if site.module else "")


def _sites(detached: Sequence[DetachedPath]) -> tuple[Site, ...]:
    return tuple(dict.fromkeys(cut.site for cut in detached))[:MAX_SITES]
