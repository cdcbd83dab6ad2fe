"""The function that gradgradcheck checks: a backward as a function of inputs and grad_outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastgrad.core import native, torch_private
from fastgrad.core.random import GRAD_OUTPUT_STREAM, uniform_like
from fastgrad.problem.arguments import as_tuple
from fastgrad.problem.caller_state import SavedState
from fastgrad.problem.evaluation import evaluated_and_restored
from fastgrad.problem.validation import differentiable_inputs, raise_without_graph
from fastgrad.report.settings import GradOutputs


def differentiable_outputs(result: Any) -> tuple[Tensor, ...]:
    """The results of func that require grad."""
    results = as_tuple(result)
    return tuple([results[position] for position in _differentiable(results)])


def _differentiable(results: tuple[Any, ...]) -> list[int]:
    """The positions of the results that require grad."""
    return [i for i, value in enumerate(results) if isinstance(value, Tensor) and value.requires_grad]


def random_grad_outputs(outputs: tuple[Tensor, ...], seed: int, noncontiguous: bool) -> tuple[Tensor, ...]:
    """One leaf per output that requires grad, with its shape, dtype and device, uniform in [-1, 1).

    noncontiguous: whether a leaf with more than one element takes every second element of a buffer.
    """
    if torch_private.transforms_are_active():  # within it, torch does not make leaves that require grad
        raise NotImplementedError(
            "Random grad_outputs cannot be made within a transform of torch.func: pass grad_outputs, or call the check "
            "outside of the transform."
        )
    grads = []
    first = 0
    for output in outputs:
        grad = uniform_like(output, seed, GRAD_OUTPUT_STREAM, first)
        first += output.numel() * (2 if output.is_complex() else 1)
        if noncontiguous and grad.numel() > 1:
            grad = torch.stack([grad, grad], -1).select(-1, 0)
        grads.append(grad.requires_grad_())
    return tuple(grads)


def made_by(grad_outputs: Any, noncontiguous: bool) -> GradOutputs:
    """The source of the grad_outputs, from the keywords of gradgradcheck."""
    if grad_outputs is None:
        return "non-contiguous" if noncontiguous else "random"
    if not isinstance(grad_outputs, str):
        return "given"
    if grad_outputs != "ones":
        raise ValueError(f'grad_outputs must be tensors, None or "ones", got {grad_outputs!r}.')
    return "ones"


def _may_be_invalid(value: Tensor) -> bool:
    """Whether an input cannot be restored after a call of func, or may overlap itself in memory."""
    return value.is_nested or value.is_meta or (value.layout is torch.strided and not value.is_contiguous())


def grad_outputs_for(
    func: Callable[..., Any], inputs: tuple[Any, ...], made: GradOutputs, seed: int
) -> tuple[Tensor, ...]:
    """Calls func, and makes one grad_output per output that requires grad."""
    checked = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    if not checked or any(_may_be_invalid(value) for value in checked):
        differentiable_inputs(inputs, (), False)  # if inputs are invalid, this raises before func is called
    with SavedState(inputs):
        outputs = differentiable_outputs(evaluated_and_restored(func, inputs))
    if made == "ones":
        return tuple(torch.ones_like(output, requires_grad=False) for output in outputs)
    return random_grad_outputs(outputs, seed, made == "non-contiguous")


class Backward:
    """Callable (*inputs, *grad_outputs) -> the gradients of func that exist.

    The gradients are recorded if gradient recording is enabled during the call. The forward pass is always recorded,
    because backward needs its graph. Arguments that required grad when this object was made are made to require grad
    again, because forward-mode AD passes detached arguments.

    If only grad_outputs have changed since the last forward pass, and gradients are not recorded, the graph of the last
    forward pass is used again. The first time, a new forward pass tests that this gives the same gradients. If not,
    the last graph runs once more, because its gradients may have been wrong once. If the last graph raises exceptions,
    but a new one does not, no graph is used again.

    made: how the grad_outputs were made, for messages. count, grad_output_count: number of the inputs, which come
    first, and of the grad_outputs. inputs: the positions of the inputs that require grad. exist: which of these inputs
    had a gradient in the last call. is_custom: whether func runs custom code in backward.
    """

    _positions: Sequence[int] = ()
    """The positions of the outputs that required grad when gradients were last recorded."""

    _points = 0
    """The number of points in each call; 0 for one point without a dimension for it."""

    def __init__(
        self,
        func: Callable[..., Any],
        inputs: tuple[Any, ...],
        grad_outputs: tuple[Any, ...],
        made: GradOutputs = "given",
    ) -> None:
        self.made = made
        self._func = self.__wrapped__ = func
        self.count, self.grad_output_count = len(inputs), len(grad_outputs)
        self.inputs = [i for i, value in enumerate(inputs) if isinstance(value, Tensor) and value.requires_grad]
        self._grad_outputs = [i for i, value in enumerate(grad_outputs) if value.requires_grad]
        self._record_forward = torch.is_grad_enabled()
        self._unrecorded = native.UnrecordedBackward(
            func, _reject_outputs, self.count, self.inputs, self._grad_outputs, self._record_forward
        )
        self.exist: list[bool] = []
        self.is_custom = False

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        """The gradients with respect to the inputs that require grad; those that are None are left out."""
        gradients: Sequence[Tensor | None]
        if self._points:
            gradients = self._at_points(arguments)
        else:
            gradients = self._recorded(*arguments) if torch.is_grad_enabled() else self._not_recorded(arguments)
        exist = [gradient is not None for gradient in gradients]
        if self.exist and exist != self.exist:
            raise RuntimeError("backward returns None for an input in some calls, but not in others.")
        self.exist = exist
        return tuple([gradient for gradient in gradients if gradient is not None])

    def _check_shapes(self, outputs: Sequence[Tensor], grad_outputs: Sequence[Tensor]) -> None:
        for position, output, grad in zip(self._positions, outputs, grad_outputs, strict=True):
            if not output.is_nested and output.shape != grad.shape:
                raise ValueError(
                    f"grad_outputs must have the shapes of func's outputs: output {position} has shape "
                    f"{tuple(output.shape)}, but its grad_output has shape {tuple(grad.shape)}."
                )

    def _recorded(self, *arguments: Any) -> list[Tensor | None]:
        self.forget()
        inputs, grad_outputs = arguments[: self.count], arguments[self.count :]
        checked = [inputs[i] for i in self.inputs]
        for value in [*checked, *(grad_outputs[i] for i in self._grad_outputs)]:
            if not value.requires_grad:
                value.requires_grad_()
        with torch.set_grad_enabled(self._record_forward):
            results = as_tuple(self._func(*inputs))
            self._positions = _differentiable(results)
            outputs = tuple([results[position] for position in self._positions])
            native.check_memory(checked)
            if not outputs or len(outputs) != len(grad_outputs):
                _reject_outputs(len(outputs), len(grad_outputs))
            if self.made == "given":
                self._check_shapes(outputs, grad_outputs)
            if not self.exist:
                self.is_custom = not native.runs_no_custom_code(outputs, checked)
            return _all_differentiable(native.vjp(outputs, checked, grad_outputs, True), [*checked, *grad_outputs])

    def _not_recorded(self, arguments: tuple[Any, ...]) -> Sequence[Tensor | None]:
        """The gradients, which are not recorded.

        If the call raises on the kept graph, it is repeated. If it raises again, this graph may be unusable: the call
        runs on a new graph, and no graph is reused from then on. Otherwise the exception does not come from the reuse,
        and is raised.
        """
        unrecorded = self._unrecorded
        try:
            return unrecorded.call(arguments)
        except Exception:
            if not unrecorded.keeps_graph or not _raises_again(unrecorded, arguments):
                raise
        # For example, func overwrites what its last call saved for backward.
        unrecorded.stop_reusing()
        return unrecorded.call(arguments)

    @property
    def movement(self) -> float:
        """The largest change of gradients between two runs on the same graph, if they differed from a new graph's."""
        return self._unrecorded.movement

    def forget(self) -> None:
        self._unrecorded.forget()

    @contextmanager
    def vectorized(self, count: int) -> Iterator[None]:
        """A context in which a call gives the gradients at `count` points, from one call of func and one backward.

        The arguments that require grad in other calls are leaves of their own. Their first dimension counts the points,
        as does that of the gradients. A point does not influence the gradients of others, because func is vectorized.
        """
        self._points = count
        try:
            yield
        finally:
            self._points = 0

    def _at_points(self, arguments: Sequence[Any]) -> list[Tensor | None]:
        given, grad_outputs = list(arguments[: self.count]), arguments[self.count :]
        checked = [given[i].requires_grad_() for i in self.inputs]
        with torch.set_grad_enabled(self._record_forward):
            results = torch_private.vectorized_call(self._func, given, self.inputs, self._points)
            outputs = differentiable_outputs(results)
            if not outputs or len(outputs) != len(grad_outputs):
                _reject_outputs(len(outputs), len(grad_outputs))
            cotangents = [grad.expand(output.shape) for grad, output in zip(grad_outputs, outputs, strict=True)]
            return native.vjp(outputs, checked, cotangents, False)


def gradient_names(names: Sequence[str], backward: Backward) -> tuple[str, ...]:
    """The names of the results of a backward; names: those of func's inputs that require grad."""
    return tuple(f"grad({name})" for name, exists in zip(names, backward.exist, strict=True) if exists)


def _raises_again(unrecorded: native.UnrecordedBackward, arguments: tuple[Any, ...]) -> bool:
    try:
        unrecorded.call(arguments)
    except Exception:
        return True
    return False


def _reject_outputs(outputs: int, grad_outputs: int) -> None:
    """Raises if no output requires grad, or if there is not one grad_output for each output that requires grad."""
    if not outputs:
        raise_without_graph("gradgradcheck")
    raise ValueError(
        f"gradgradcheck needs one grad_output for each output that requires grad: expected "
        f"{outputs}, got {grad_outputs}."
    )


def _all_differentiable(gradients: list[Tensor | None], arguments: list[Tensor]) -> list[Tensor | None]:
    """Makes all gradients require grad if one does: a detached gradient has a derivative of zero, which is checked."""
    is_detached = [gradient is not None and not gradient.requires_grad for gradient in gradients]
    if not any(is_detached) or not any(gradient is not None and gradient.requires_grad for gradient in gradients):
        return gradients
    sources = [value for value in arguments if value.requires_grad and value.layout is torch.strided]
    if not sources:
        return gradients
    nothing = sources[0].reshape(-1)[:0].sum()
    nothing = nothing.real if nothing.is_complex() else nothing
    return [
        gradient + nothing.to(gradient.device, gradient.dtype)
        if gradient is not None and detached and gradient.layout is torch.strided
        else gradient
        for gradient, detached in zip(gradients, is_detached, strict=True)
    ]
