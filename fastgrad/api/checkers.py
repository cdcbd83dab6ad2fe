"""The public checkers: gradcheck, gradgradcheck and check."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from fastgrad.api.settings import (
    OneOrEach,
    masked_by_old_name,
    measures_rounding,
    pop_per_input,
    reject_positional,
    settings_of,
    with_per_input,
    with_precision,
)
from fastgrad.checks.order import check as run
from fastgrad.checks.order import verdict
from fastgrad.core.errors import warn
from fastgrad.problem.arguments import Call, Wrt, as_tuple, check_callable, flatten
from fastgrad.problem.caller_state import SavedState, restores_caller_state
from fastgrad.problem.second_order import Backward, grad_outputs_for, gradient_names, made_by
from fastgrad.problem.transforms import rejects_transforms
from fastgrad.problem.validation import check_kwargs
from fastgrad.report.messages import undecided_text
from fastgrad.report.report import Report
from fastgrad.report.settings import Engine, GradOutputs, Precision, Settings

if TYPE_CHECKING:
    from fastgrad.sharding.problem import Partition

TensorOrTensors = Tensor | Sequence[Any]

Found = TypeVar("Found")

watcher: ContextVar[Callable[[Report], object] | None] = ContextVar("fastgrad_watcher", default=None)
"""If not None: a function that is called with the report of each gradcheck and gradgradcheck that has a verdict."""

estimates: ContextVar[bool] = ContextVar("fastgrad_estimates", default=False)
"""Whether checks raise an `Estimate` of their duration instead of running."""


class Estimate(Exception):  # noqa: N818
    """Contains the estimated duration of a check, in `seconds`; raised to end the check, not as an error."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the check would take {seconds:.3g} s")
        self.seconds = seconds


@restores_caller_state
@rejects_transforms
def gradcheck(
    func: Callable[..., Any],
    inputs: TensorOrTensors,
    *positional: Any,
    eps: float = 1e-6,
    atol: float = 1e-5,
    rtol: float = 1e-3,
    raise_exception: bool = True,
    nondet_tol: float = 0.0,
    check_undefined_grad: bool = True,
    check_grad_dtypes: bool = False,
    check_batched_grad: bool = False,
    check_batched_forward_grad: bool = False,
    check_forward_ad: bool = False,
    check_backward_ad: bool = True,
    fast_mode: bool = False,
    masked: bool | None = None,
    check_sparse_nnz: bool | None = None,
    engine: Engine = "auto",
    seed: int | None = None,
    confidence: float | None = None,
    memory_limit: int | None = None,
    progress: bool | None = None,
    reference: Callable[..., Any] | Literal["float64"] | None = None,
    reference_device: torch.device | str | None = None,
    precision: Precision = "auto",
) -> bool:
    """Checks the gradients that autograd computes for func against central differences of func.

    Every entry of the Jacobian of every differentiable output with respect to every input that
    requires grad is compared: ``|analytical - numerical| <= atol + rtol |numerical|``. For a complex
    output, its imaginary and its real part are checked as two real functions. For a complex input, an
    entry is twice the conjugate Wirtinger derivative, which is the gradient by torch's convention, and
    ``|...|`` is the modulus. The backward must also be deterministic and linear in grad_output, return
    zeros for a grad_output of zeros, and accept undefined grad_outputs.

    Parameters
    ----------
    func
        Function of the inputs; returns a Tensor or a tuple or list of Tensors. Results that require grad
        are differentiable outputs; others are ignored.
    inputs
        A Tensor, or a tuple or list. Tensors with requires_grad=True, of any shape and layout and of
        floating or complex dtype (preferably double precision), are checked. Everything else is passed to
        func unchanged. The same tensor may be passed twice.
    eps
        Step of the differences to each side. Differences are divided by the step actually taken, which is rounded
        to the input's dtype. eps, atol and rtol are numbers or real tensors without dimensions.
    atol, rtol
        Absolute and relative tolerance.
    raise_exception
        Raise GradcheckError on failure; otherwise return False.
    nondet_tol
        Allowed difference between two runs of the same backward.
    check_undefined_grad
        Check that backward accepts undefined grad_outputs and treats them as zeros.
    check_grad_dtypes
        Check that gradients have the dtypes of their inputs.
    check_batched_grad, check_batched_forward_grad
        Check that gradients, or forward-mode derivatives, computed under vmap equal those
        computed one call at a time.
    check_forward_ad
        Also check the Jacobians of forward-mode AD. The jvp must be linear in its tangents and accept
        undefined ones (the latter with check_undefined_grad).
    check_backward_ad
        Check reverse mode.
    fast_mode
        Compare random combinations of the entries instead of every entry: the cost does not grow with the size of
        the Jacobian. A wrong entry is located and confirmed separately. If the random combinations do not decide,
        the exact engine does. If that is too expensive, the check is undecided.
    masked
        Ignore the unspecified elements of sparse inputs: only specified ones are perturbed, and
        gradients of the others must be zero. Otherwise sparse inputs are perturbed as copies with all
        elements specified. False by default.
    check_sparse_nnz
        The old name of masked.
    engine
        "auto" chooses the engine. "dense" computes every row and column. "compressed" computes groups of rows and
        columns on the sparsity pattern of the Jacobian, even if "auto" would consider it too expensive. Without a
        pattern, it is replaced by "dense"; if the pattern does not explain all values, the check is undecided.
        "sketch" (with fast_mode) uses random combinations for small problems too.
    seed
        Seed of the random cotangents and evaluation points; 0 by default. Torch's generators are not used.
    confidence
        Probability that fast mode finds two errors of at least 1000 atol that cancel in a row or a column;
        1 - 1e-9 by default. Single errors above their tolerance and the bound of the certificate are always found.
    progress
        Show a progress bar of the calls of func and backward (tqdm). By default it is shown on a terminal
        if the check is expected to take long and tqdm is installed.
    memory_limit
        Bytes for the numerical columns that are held at a time; by default half of the free memory. With a smaller
        limit, more VJPs are repeated, and sparsity is used only for Jacobians with fewer entries. MemoryError is
        raised if a 20th of the columns does not fit.
    reference
        For inputs in float32, bfloat16 or float16: the function in double precision with which func is
        compared at the same values. Either a function of the same arguments, or "float64" for func itself. By
        default, it is func itself if func runs in double precision; otherwise gradients are compared with differences
        in the lower dtype.
    reference_device
        Device on which the reference runs; by default the device of func.
    precision
        "auto": gradients in a lower dtype may differ from those of the reference by the measured rounding of that
        dtype. The reference is checked by differences, with eps, atol and rtol. "strict": eps, atol and rtol apply
        to every dtype. The same if one of them is given without a reference.

    Returns
    -------
    bool
        True if the check passed.

    Raises
    ------
    GradcheckError
        The check failed; its ``report`` holds the numbers.
    ValueError, RuntimeError, TypeError, AssertionError
        An argument cannot be checked, or func returned outputs of another kind, for example of another
        shape, for perturbed inputs.
    NotImplementedError
        An input is not supported: nested, or sparse in forward mode.
    ImportError
        progress=True without tqdm.

    Notes
    -----
    The inputs are perturbed in place and are always restored bit for bit when the call ends; no other
    thread may use them during the call. The definition is that of `torch.autograd.gradcheck`;
    docs/differences.md lists the cases in which the verdicts differ.

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.randn(1000, dtype=torch.float64, requires_grad=True)
    >>> fastgrad.gradcheck(torch.sin, (x,))
    True
    >>> fastgrad.gradcheck(lambda x: x * x.detach(), (x,), raise_exception=False)
    False
    """
    __tracebackhide__ = True  # under pytest a failure shows the caller's line
    if positional:
        reject_positional(positional)
    if check_sparse_nnz is not None:
        masked = masked_by_old_name(masked, check_sparse_nnz)
    keywords: dict[str, Any] = {
        **{"eps": eps, "atol": atol, "rtol": rtol, "nondet_tol": nondet_tol},
        **{"check_undefined_grad": check_undefined_grad, "check_grad_dtypes": check_grad_dtypes},
        **{"check_batched_grad": check_batched_grad, "check_batched_forward_grad": check_batched_forward_grad},
        **{"check_forward_ad": check_forward_ad, "check_backward_ad": check_backward_ad, "fast_mode": fast_mode},
        **{"masked": masked, "engine": engine, "seed": seed, "confidence": confidence, "memory_limit": memory_limit},
        **{"progress": progress},
    }
    settings = settings_of(keywords)
    settings = with_precision(settings, reference, reference_device, precision)
    return _raise_or_return(func, as_tuple(inputs), settings, raise_exception, reference)


@restores_caller_state
@rejects_transforms
def gradgradcheck(
    func: Callable[..., Any],
    inputs: TensorOrTensors,
    grad_outputs: TensorOrTensors | str | None = None,
    *positional: Any,
    eps: float = 1e-6,
    atol: float = 1e-5,
    rtol: float = 1e-3,
    gen_non_contig_grad_outputs: bool = False,
    raise_exception: bool = True,
    nondet_tol: float = 0.0,
    check_undefined_grad: bool = True,
    check_grad_dtypes: bool = False,
    check_batched_grad: bool = False,
    check_fwd_over_rev: bool = False,
    check_rev_over_rev: bool = True,
    fast_mode: bool = False,
    masked: bool | None = None,
    check_sparse_nnz: bool | None = None,
    engine: Engine = "auto",
    seed: int | None = None,
    confidence: float | None = None,
    memory_limit: int | None = None,
    progress: bool | None = None,
    reference: Callable[..., Any] | Literal["float64"] | None = None,
    reference_device: torch.device | str | None = None,
    precision: Precision = "auto",
) -> bool:
    """Checks the second derivatives of func: the gradients of its backward against central differences of backward.

    The backward is checked as a function of the inputs and the grad_outputs, as `gradcheck` checks func.
    Parameters that are not listed here, return value and exceptions are as in `gradcheck`.

    Parameters
    ----------
    func, inputs
        As in `gradcheck`.
    grad_outputs
        One tensor per output that requires grad. Tensors that require grad are checked with the inputs. By
        default random in [-1, 1); with "ones", ones that do not require grad.
    gen_non_contig_grad_outputs
        Make the random grad_outputs non-contiguous.
    check_rev_over_rev, check_fwd_over_rev
        Differentiate the backward in reverse mode, in forward mode, or in both.

    Returns
    -------
    bool
        True if the check passed.

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    >>> fastgrad.gradgradcheck(torch.tanh, (x,))
    True
    """
    __tracebackhide__ = True  # under pytest a failure shows the caller's line
    if positional:
        reject_positional(positional)
    if check_sparse_nnz is not None:
        masked = masked_by_old_name(masked, check_sparse_nnz)
    keywords: dict[str, Any] = {
        **{"eps": eps, "atol": atol, "rtol": rtol, "nondet_tol": nondet_tol},
        **{"check_undefined_grad": check_undefined_grad, "check_grad_dtypes": check_grad_dtypes},
        **{"check_batched_grad": check_batched_grad, "check_fwd_over_rev": check_fwd_over_rev},
        **{"check_rev_over_rev": check_rev_over_rev, "fast_mode": fast_mode, "masked": masked, "engine": engine},
        **{"seed": seed, "confidence": confidence, "memory_limit": memory_limit, "progress": progress},
    }
    settings = settings_of(keywords, made_by(grad_outputs, gen_non_contig_grad_outputs))
    settings = with_precision(settings, reference, reference_device, precision)
    backward, arguments = _second_order(func, as_tuple(inputs), grad_outputs, settings)
    return _raise_or_return(backward, arguments, settings, raise_exception, reference)


@restores_caller_state
@rejects_transforms
def check(
    func: Callable[..., Any],
    inputs: Any,
    *,
    order: Literal[1, 2, 3, 4] = 1,
    kwargs: Mapping[str, Any] | None = None,
    wrt: Wrt = "both",
    eps: OneOrEach = 1e-6,
    atol: OneOrEach = 1e-5,
    rtol: OneOrEach = 1e-3,
    nondet_tol: float = 0.0,
    check_undefined_grad: bool = True,
    check_grad_dtypes: bool = False,
    check_batched_grad: bool = False,
    check_batched_forward_grad: bool = False,
    check_forward_ad: bool = False,
    check_backward_ad: bool = True,
    grad_outputs: Any = None,
    gen_non_contig_grad_outputs: bool = False,
    check_fwd_over_rev: bool = False,
    check_rev_over_rev: bool = True,
    fast_mode: bool = False,
    masked: bool | None = None,
    engine: Engine = "auto",
    seed: int | None = None,
    confidence: float | None = None,
    memory_limit: int | None = None,
    progress: bool | None = None,
    reference: Callable[..., Any] | Literal["float64"] | None = None,
    reference_device: torch.device | str | None = None,
    precision: Precision = "auto",
    group: torch.distributed.ProcessGroup | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Report:
    """Checks derivatives of a function or a module with nested inputs, and returns a report.

    The comparisons and verdicts are those of `gradcheck` and `gradgradcheck`.

    Parameters
    ----------
    func
        Function of the inputs and keyword arguments; returns a tensor or a container of tensors. A module is
        checked in its current mode (train or eval). Its buffers, for example the running statistics of batch
        norm, are restored before every call and at the end.
    inputs
        A tuple or list of arguments, or a single argument. Tensors with requires_grad=True are checked, also in
        nested lists, tuples, dicts, dataclasses and other containers of torch's pytree. Everything else is passed
        to func unchanged. Every call gets new containers with the caller's tensors.
    order
        1: the gradients of func, as in `gradcheck`. 2: those of its backward, as in `gradgradcheck`. 3: those of
        the backward of this backward, with random grad_outputs. 4: those of one more backward.
    kwargs
        Keyword arguments of func; tensors in them are checked like those of inputs.
    wrt
        Tensors whose derivatives are checked. "inputs": tensors in inputs and kwargs; "parameters": parameters
        of a module that require grad, a shared parameter once; "both": all of these (for a function, its inputs).
    eps, atol, rtol
        As in `gradcheck`. Either one number for all inputs, or one per checked tensor in the order of
        `Report.input_names`, or a mapping from names to numbers. A name also applies to all names below it (for
        example "module"). Inputs without a number have the default. Inputs with different steps are never perturbed
        together, so certificates and fast mode take separate evaluations for each step. Tests that combine all
        inputs (linearity of a jvp) use the largest tolerances.
    check_forward_ad, check_backward_ad, check_batched_forward_grad
        With order=1, as in `gradcheck`.
    grad_outputs, gen_non_contig_grad_outputs, check_fwd_over_rev, check_rev_over_rev
        With order=2 and above, as in `gradgradcheck`. grad_outputs may be nested like func's result.
    reference
        As in `gradcheck`. If func is a module whose parameters are checked, pass a module with the same parameters.
        It gets the values of func's parameters. "float64" is a copy of func in double precision.
    group
        Process group whose ranks share the work, for example `torch.distributed.group.WORLD`. Every rank has func
        and all inputs, and calls this function with the same arguments. If computing the columns and rows of the
        Jacobians takes long, they are divided among all ranks. All ranks return the report that a check on one
        rank would return. None: this process only.
    checkpoint
        File in which the columns and rows of a long exact check are saved. If the process is killed or raises, the
        same call resumes from the file, with any number of ranks, and returns the same report as an uninterrupted
        check. The file is removed at the end of the check. Only rank 0 reads and writes it.

    Returns
    -------
    Report
        `passed` is True if the check passed. Otherwise `failure` describes the error; `GradcheckError` is not
        raised. `input_names` and `output_names` are the paths of the checked tensors:
        ``inputs[0]["weight"]``, ``kwargs["scale"]``, ``module.conv.weight``, ``result["loss"]``; with order=2 also
        ``grad_outputs["loss"]`` and the result ``grad(module.conv.weight)``; with order=3 also
        ``grad_output of grad(module.conv.weight)``, and with order=4 ``second grad_output of ...``.

    Raises
    ------
    ValueError, RuntimeError, TypeError, AssertionError, NotImplementedError, ImportError
        As in `gradcheck`; and exceptions of func.
    fastgrad.distributed.RankError
        A RuntimeError, with `group`: the ranks' calls differ, or a rank raised, exited or hangs.

    Notes
    -----
    The other parameters are those of `gradcheck`. State of a module outside its buffers stays as the last call left
    it. Dropout draws new numbers in every call: check such a module after eval(). Tensors in containers that are
    unknown to torch's pytree are not found.

    Examples
    --------
    >>> import torch, fastgrad
    >>> layer = torch.nn.Linear(4, 3, dtype=torch.float64)
    >>> report = fastgrad.check(layer, torch.randn(8, 4, dtype=torch.float64, requires_grad=True))
    >>> report.passed, report.input_names
    (True, ('inputs[0]', 'module.weight', 'module.bias'))
    """
    keywords: dict[str, Any] = {
        **{"eps": eps, "atol": atol, "rtol": rtol, "nondet_tol": nondet_tol, "memory_limit": memory_limit},
        **{"check_undefined_grad": check_undefined_grad, "check_grad_dtypes": check_grad_dtypes},
        **{"check_batched_grad": check_batched_grad, "check_batched_forward_grad": check_batched_forward_grad},
        **{"check_forward_ad": check_forward_ad, "check_backward_ad": check_backward_ad, "progress": progress},
        **{"grad_outputs": grad_outputs, "gen_non_contig_grad_outputs": gen_non_contig_grad_outputs},
        **{"check_fwd_over_rev": check_fwd_over_rev, "check_rev_over_rev": check_rev_over_rev},
        **{"fast_mode": fast_mode, "masked": masked, "engine": engine, "seed": seed, "confidence": confidence},
    }
    arguments = func, inputs, order, kwargs, wrt, keywords, reference, reference_device, precision
    if group is None and checkpoint is None:
        return _report_of_call(*_validated(*arguments))
    return _in_parts(partial(_validated, *arguments), group, checkpoint)


def _validated(
    func: Callable[..., Any],
    inputs: Any,
    order: int,
    kwargs: Mapping[str, Any] | None,
    wrt: Wrt,
    keywords: dict[str, Any],
    reference: Any,
    reference_device: Any,
    precision: Precision,
) -> tuple[Any, ...]:
    """The arguments of `_report_of_call`, from those of `check`, which are validated."""
    _check_own_arguments(func, order, kwargs, wrt)
    _reject_keywords_of_the_other_order(order, keywords)
    own, grad_outputs = pop_per_input(keywords), keywords["grad_outputs"]
    made = made_by(grad_outputs, keywords["gen_non_contig_grad_outputs"]) if order > 1 else None
    settings = with_precision(replace(settings_of(keywords, made), order=order), reference, reference_device, precision)
    return func, as_tuple(inputs), kwargs or {}, wrt, grad_outputs, settings, own, reference


def _in_parts(
    validated: Callable[[], tuple[Any, ...]],
    group: torch.distributed.ProcessGroup | None,
    checkpoint: str | os.PathLike[str] | None,
) -> Report:
    """Like `_report_of_call(*validated())`, on the ranks of a group or with a checkpoint."""
    from fastgrad.sharding.check import Validated, in_parts  # imported here to keep `import fastgrad` fast

    def check() -> Validated:
        if not (checkpoint is None or isinstance(checkpoint, (str, os.PathLike))):
            raise TypeError(f"checkpoint must be None or the path of a file, got {checkpoint!r}.")
        call = validated()
        func, inputs, kwargs, wrt, grad_outputs, settings, own, reference = call
        values = {"wrt": wrt, "grad_outputs": grad_outputs, "reference": reference}
        values |= {f"inputs[{i}]": value for i, value in enumerate(inputs)}
        values |= {f'kwargs["{name}"]': value for name, value in kwargs.items()}
        values |= {f"{name} by input": given for name, given in own.items()}
        return Validated(partial(_report_of_call, *call), func, values, settings)

    return in_parts(check, group, checkpoint)


def _report_of_call(
    func: Callable[..., Any],
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    wrt: Wrt,
    grad_outputs: Any,
    settings: Settings,
    own: Mapping[str, Any],
    reference: Any,
    partition: Partition | None = None,
) -> Report:
    """The report of `check` for these arguments; own: eps, atol and rtol per input."""
    with Call(func, inputs, kwargs, wrt) as call:
        if not call.tensors:
            raise ValueError(_NOTHING[wrt if isinstance(func, Module) else "inputs"])

        def make() -> Any:
            from fastgrad.lowprecision import reference_for_call  # imported here to keep `import fastgrad` fast

            return reference_for_call(call, reference, settings.reference_device)

        if settings.order == 1:
            own_settings = with_per_input(settings, own, call.names)
            return _named(lambda: call.output_names, call, call.tensors, own_settings, make, call.names, partition)
        return _higher_order_report(call, grad_outputs, settings, own, make, partition)


def _run(
    func: Callable[..., Any],
    arguments: tuple[Any, ...],
    settings: Settings,
    make: Callable[[], Any],
    by_tolerances: Callable[[], Found],
    names: tuple[str, ...] = (),
) -> Found | Report:
    """The report of `by_tolerances` or, in lower dtypes, of a check by measured rounding; make: makes the reference."""
    if estimates.get():
        from fastgrad.engines.plan import estimated_seconds  # imported here to keep `import fastgrad` fast

        raise Estimate(estimated_seconds(func, arguments, settings))
    if not measures_rounding(arguments, settings):
        return by_tolerances()
    from fastgrad.lowprecision import check_lower  # imported here to keep `import fastgrad` fast

    return check_lower(func, arguments, settings, make, names)


def _named(
    output_names: Callable[[], tuple[str, ...]],
    func: Callable[..., Any],
    arguments: tuple[Any, ...],
    settings: Settings,
    make: Callable[[], Any],
    names: tuple[str, ...],
    partition: Partition | None,
) -> Report:
    """The report of `_run` with the names of the outputs, which are known once func has been called."""

    def report(by: Partition | None = None) -> Report:
        by_tolerances = partial(run, func, arguments, settings, names, partition=by)
        found = _run(func, arguments, settings, make, by_tolerances, names)
        return replace(found, output_names=output_names())

    if partition is not None and measures_rounding(arguments, settings):
        return partition.report(report)  # only rank 0 calls func
    return report(partition)


def _higher_order_report(
    call: Call,
    grad_outputs: Any,
    settings: Settings,
    own: Mapping[str, Any],
    make: Callable[[], Any],
    partition: Partition | None,
) -> Report:
    backward, arguments, names = _second_order_of_call(call, grad_outputs, settings)
    make = partial(_reference_of_backward, make, backward, arguments[len(call.tensors) :], settings.reference_device)
    known = call.names
    for order in range(3, settings.order + 1):
        made: GradOutputs = "ones" if settings.grad_outputs == "ones" else "random"
        grads = grad_outputs_for(backward, arguments, made, settings.seed + order)
        with SavedState(arguments):
            found = backward(*arguments)  # results that are constants get no grad_output
        named = zip(gradient_names(known, backward), found, strict=True)
        results = [name for name, value in named if value.requires_grad]
        known = tuple(name for name, value in zip(names, arguments, strict=True) if value.requires_grad)
        backward = Backward(backward, arguments, grads, made)
        make = partial(_reference_of_backward, make, backward, grads, settings.reference_device)
        which = "grad_output" if order == 3 else "second grad_output"
        arguments, names = arguments + grads, (*names, *(f"{which} of {result}" for result in results))
    checked = [name for name, value in zip(names, arguments, strict=True) if value.requires_grad]
    own_settings = with_per_input(settings, own, checked)
    output_names = partial(gradient_names, known, backward)
    return _named(output_names, backward, arguments, own_settings, make, names, partition)


def _reference_of_backward(
    make: Callable[[], Any], backward: Backward, grads: tuple[Tensor, ...], device: str | None
) -> Any:
    from fastgrad.lowprecision import second_order_reference

    return second_order_reference(make, backward, grads, device)


def _second_order_of_call(
    call: Call, grad_outputs: Any, settings: Settings
) -> tuple[Backward, tuple[Tensor, ...], tuple[str, ...]]:
    """The result of `_second_order`, and the names of the arguments; grad_outputs may be nested."""
    if settings.grad_outputs == "given":
        found: list[tuple[str, Any]] = []
        flatten(grad_outputs, "grad_outputs", lambda tensor: True, found)
        if not found:
            raise TypeError(f"grad_outputs must be tensors, got {type(grad_outputs).__name__}.")
        grad_outputs = tuple(tensor for _, tensor in found)
        names = tuple(name for name, _ in found)
    backward, arguments = _second_order(call, call.tensors, grad_outputs, settings)
    if settings.grad_outputs != "given":
        outputs = zip(call.output_names, call.differentiable, strict=True)
        names = tuple(f"grad_outputs{name.removeprefix('result')}" for name, exists in outputs if exists)
    return backward, arguments, call.names + names


_FIRST_ORDER_ONLY = {"check_forward_ad": False, "check_backward_ad": True, "check_batched_forward_grad": False}
_SECOND_ORDER_ONLY = {
    "check_fwd_over_rev": False,
    "check_rev_over_rev": True,
    "grad_outputs": None,
    "gen_non_contig_grad_outputs": False,
}
"""Keywords of `check` that apply only to order 1, or only to higher orders, with their defaults."""

_NOTHING = {
    "inputs": "check needs a tensor with requires_grad=True in inputs or kwargs, but there is none.",
    "parameters": "check needs a parameter with requires_grad=True in the module, but there is none.",
    "both": "check needs a tensor with requires_grad=True in inputs, kwargs or the module, but there is none.",
}
"""Messages if there is nothing to check, by wrt."""


def default_keywords() -> dict[str, Any]:
    """The keywords of `gradcheck` with their defaults."""
    return {name: one.default for name, one in inspect.signature(gradcheck).parameters.items()}


def _check_own_arguments(func: Callable[..., Any], order: object, kwargs: object, wrt: object) -> None:
    """Validates the arguments that `check` has and `gradcheck` lacks."""
    if not isinstance(order, int) or isinstance(order, bool) or order not in (1, 2, 3, 4):
        raise ValueError(f"order must be 1, 2, 3 or 4, got {order!r}.")
    if wrt not in ("inputs", "parameters", "both"):
        raise ValueError(f"wrt must be 'inputs', 'parameters' or 'both', got {wrt!r}.")
    if wrt == "parameters" and not isinstance(func, Module):
        raise TypeError(f"wrt='parameters' needs a torch.nn.Module as func, got {type(func).__name__}.")
    check_kwargs(kwargs)
    check_callable(func)


def _reject_keywords_of_the_other_order(order: int, keywords: Mapping[str, Any]) -> None:
    other, defaults = (2, _SECOND_ORDER_ONLY) if order == 1 else (1, _FIRST_ORDER_ONLY)
    for keyword, default in defaults.items():
        if keywords[keyword] is not default:
            raise ValueError(f"{keyword} applies only to order={other}, but order is {order}.")


def _second_order(
    func: Callable[..., Any], inputs: tuple[Any, ...], grad_outputs: Any, settings: Settings
) -> tuple[Backward, tuple[Any, ...]]:
    """The backward that a check of second derivatives checks, and its arguments; may call func to make grad_outputs."""
    check_callable(func)
    made = settings.grad_outputs or "given"
    if made != "given":
        grads = grad_outputs_for(func, inputs, made, settings.seed)
    else:
        grads = as_tuple(grad_outputs)
        for i, grad in enumerate(grads):
            if not isinstance(grad, Tensor):
                raise TypeError(f"grad_outputs must be tensors, got {type(grad).__name__} at index {i}.")
    return Backward(func, inputs, grads, made), inputs + grads


def _raise_or_return(
    func: Callable[..., Any], inputs: tuple[Any, ...], settings: Settings, raise_exception: bool, reference: Any
) -> bool:
    __tracebackhide__ = True
    watch = watcher.get()

    def make() -> Any:
        from fastgrad.lowprecision import make_reference

        return make_reference(func, inputs, reference, settings.reference_device)

    by_tolerances = partial(verdict, explain=raise_exception) if watch is None else run
    report = _run(func, inputs, settings, make, partial(by_tolerances, func, inputs, settings))
    if report is None:
        return True
    if watch is not None:
        watch(report)
    if report.precision is not None and report.precision.undecided:
        warn(f"The check is undecided: {report.precision.undecided}. To get a verdict: {report.precision.remedy}.")
    elif report.undecided is not None and report.failure is None:
        more = "fast_mode=False" if settings.fast_mode else "engine='dense'"
        warn(f"No error was found, but the check is {undecided_text(report.undecided)}. {more} compares every entry.")
    if report.failure is None:
        return True
    if report.failure.kind.startswith("undefined grad"):
        warn(
            "Backwards compatibility: New undefined gradient support checking feature: undefined grad_outputs are "
            "checked by default; check_undefined_grad=False disables this check."
        )
    if raise_exception:
        report.raise_if_failed()
    return False
