"""gradcheck and gradgradcheck: keywords in, raise or return out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fastgrad._torch import hidden_from_dynamo
from fastgrad.check import check
from fastgrad.errors import GradcheckError, warn
from fastgrad.messages import failure_message
from fastgrad.problem import as_tuple
from fastgrad.report import GradOutputs, Settings
from fastgrad.second_order import Backward, differentiable_outputs, random_grad_outputs

TensorOrTensors = Tensor | Sequence[Any]


@hidden_from_dynamo
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
    engine: str = "auto",
    seed: int | None = None,
    confidence: float | None = None,
    memory_limit: int | None = None,
    progress: bool | None = None,
) -> bool:
    """Checks the gradients that autograd computes for func against central differences of func.

    Every entry of the Jacobian of every differentiable output with respect to every input that
    requires grad is compared: |analytical - numerical| <= atol + rtol |numerical|. For a complex
    output, its imaginary and its real part are checked as two real functions; for a complex input an
    entry is the conjugate Wirtinger derivative, and its modulus is compared. The backward must also
    be deterministic, linear in grad_output and multiplied by it, and accept undefined grad_outputs.

    Parameters
    ----------
    func
        Takes the inputs, returns a Tensor or a tuple or list of Tensors; results that require grad
        are differentiable outputs, others are ignored.
    inputs
        A Tensor, or a tuple or list. Tensors with requires_grad=True, of any shape and layout and of
        floating or complex dtype (double precision wanted), are checked. Everything else is passed
        through. The same tensor may be given twice.
    eps
        Step of the differences; the step that is really taken, rounded to the input's dtype, divides.
        A number, or a real tensor without dimensions, as are the tolerances.
    atol, rtol
        Absolute and relative tolerance.
    raise_exception
        Raise GradcheckError on failure; otherwise return False.
    nondet_tol
        How far two runs of the same backward may be apart.
    check_undefined_grad
        Check that undefined grad_outputs are accepted and count as zeros.
    check_grad_dtypes
        Check that gradients have the dtypes of their inputs.
    check_batched_grad, check_batched_forward_grad
        Check that gradients, or forward-mode derivatives, computed under vmap equal single ones.
    check_forward_ad
        Check the Jacobians of forward-mode AD, too. The jvp must be linear in its tangents and take
        undefined ones (the latter with check_undefined_grad).
    check_backward_ad
        Check reverse mode.
    fast_mode
        Compare random combinations of the entries instead of every entry: the cost does not grow with
        the size of the Jacobian. A wrong entry is located and confirmed by itself. What stays open is
        decided by the exact engine where that is affordable; otherwise the report says so.
    masked
        Ignore the unspecified elements of sparse inputs: only specified ones are perturbed, and
        gradients of the others must be zero. Otherwise sparse inputs are perturbed as copies with all
        elements specified. False by default.
    check_sparse_nnz
        The old name of masked.
    engine
        "auto"; "dense" computes every row and every column; "compressed" computes groups of them, on the
        pattern of the Jacobian, also where "auto" would find that too dear, and falls back to "dense"
        where there is no pattern; "sketch", with fast_mode, never takes an exact engine for small
        problems.
    seed
        Of the random cotangents and evaluation points; 0 by default. Torch's generators are not touched.
    confidence
        Of fast mode: the probability to find two errors that cancel in a row or a column, from 1000 atol
        on; 1 - 1e-9 by default. Single errors above the tolerance are always found.
    progress
        Show a bar of the calls of func and backward, by tqdm; by default where a check will take long, on a
        terminal, and tqdm is there.
    memory_limit
        Bytes for the block of numerical columns that is held at a time; by default a quarter of what
        is free. A smaller limit repeats more VJPs.

    Returns
    -------
    bool
        True where the check passed.

    Raises
    ------
    GradcheckError
        The check failed; `report` on the error holds the numbers.
    ValueError, RuntimeError, TypeError, AssertionError
        An argument cannot be checked, or func changed its results under perturbation.
    NotImplementedError
        An input is of a kind that is not there yet: nested, or sparse in forward mode.
    ImportError
        progress=True without tqdm.

    Notes
    -----
    The inputs are perturbed in place and are restored bit for bit when the call ends, however it
    ends; no other thread may use them meanwhile. The definition is that of
    `torch.autograd.gradcheck`; docs/differences.md lists where the verdicts differ.
    """
    _refuse_positional(positional)
    masked = _masked(masked, check_sparse_nnz)
    if not (check_forward_ad or check_backward_ad):
        raise AssertionError("Expected at least one of check_forward_ad or check_backward_ad to be True")
    if check_batched_grad and not check_backward_ad:
        raise AssertionError("Setting check_batched_grad=True requires check_backward_ad to be True")
    if check_batched_forward_grad and not check_forward_ad:
        raise AssertionError("Setting check_batched_forward_grad=True requires check_forward_ad to be True")
    if progress is not None and not isinstance(progress, bool):
        raise TypeError(f"progress must be None, True or False, got {progress!r}.")
    if engine not in ("auto", "dense", "compressed", "sketch"):
        raise ValueError(f"engine must be 'auto', 'dense', 'compressed' or 'sketch', got {engine!r}.")
    if engine == "sketch" and not fast_mode:
        raise ValueError("engine='sketch' compares sums of entries, not every entry: it needs fast_mode=True.")
    if confidence is not None and not 0 < _number("confidence", confidence) < 1:
        raise ValueError(f"confidence must be None or between 0 and 1, got {confidence!r}.")
    if seed is not None and not (_is_integer(seed) and -(2**63) <= seed < 2**63):
        raise ValueError(f"seed must be None or an integer of 64 bits, got {seed!r}.")
    if memory_limit is not None and not (_is_integer(memory_limit) and memory_limit > 0):
        raise ValueError(f"memory_limit must be None or a positive number of bytes, got {memory_limit!r}.")
    settings = Settings(
        eps=_number("eps", eps, zero=False),
        atol=_number("atol", atol),
        rtol=_number("rtol", rtol),
        nondet_tol=_number("nondet_tol", nondet_tol),
        check_undefined_grad=check_undefined_grad,
        check_grad_dtypes=check_grad_dtypes,
        check_batched_grad=check_batched_grad,
        check_batched_forward_grad=check_batched_forward_grad,
        check_forward_ad=check_forward_ad,
        check_backward_ad=check_backward_ad,
        fast_mode=fast_mode,
        masked=bool(masked),
        engine=engine,
        seed=0 if seed is None else seed,
        confidence=1 - 1e-9 if confidence is None else float(confidence),
        memory_limit=memory_limit,
        progress=progress,
        grad_outputs=func.made if isinstance(func, Backward) else None,
    )
    return _raise_or_return(func, inputs, settings, raise_exception)


@hidden_from_dynamo
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
    engine: str = "auto",
    seed: int | None = None,
    confidence: float | None = None,
    memory_limit: int | None = None,
    progress: bool | None = None,
) -> bool:
    """Checks the second derivatives of func: the gradients of its backward against central differences of it.

    The backward is checked as a function of the inputs and the grad_outputs, as `gradcheck` checks func.

    Parameters
    ----------
    func, inputs
        As in `gradcheck`.
    grad_outputs
        One tensor for each output that requires grad; those that require grad are checked with the
        inputs. By default random in [-1, 1); "ones" stands for ones that do not require grad.
    gen_non_contig_grad_outputs
        Make the random grad_outputs non-contiguous.
    check_rev_over_rev, check_fwd_over_rev
        Differentiate the backward in reverse mode, in forward mode, or in both.

    The other parameters, what is returned and what is raised are those of `gradcheck`.
    """
    _refuse_positional(positional)
    masked = _masked(masked, check_sparse_nnz)
    if not (check_fwd_over_rev or check_rev_over_rev):
        raise AssertionError("Expected at least one of check_fwd_over_rev or check_rev_over_rev to be True")
    if check_undefined_grad and not check_rev_over_rev:
        raise AssertionError("Setting check_undefined_grad=True requires check_rev_over_rev to be True")
    if check_batched_grad and not check_rev_over_rev:
        raise AssertionError("Setting check_batched_grad=True requires check_rev_over_rev to be True")
    inputs = as_tuple(inputs)
    made: GradOutputs = "given"
    if grad_outputs is None or isinstance(grad_outputs, str):
        outputs = differentiable_outputs(func(*inputs))
        if grad_outputs is None:
            grads = random_grad_outputs(outputs, 0 if seed is None else seed, gen_non_contig_grad_outputs)
            made = "non-contiguous" if gen_non_contig_grad_outputs else "random"
        elif grad_outputs == "ones":
            grads = tuple(torch.ones_like(output, requires_grad=False) for output in outputs)
            made = "ones"
        else:
            raise ValueError(f'grad_outputs must be tensors, None or "ones", got {grad_outputs!r}.')
    else:
        grads = as_tuple(grad_outputs)
        for i, grad in enumerate(grads):
            if not isinstance(grad, Tensor):
                raise TypeError(f"grad_outputs must be tensors, got {type(grad).__name__} as number {i}.")
    return gradcheck(
        Backward(func, inputs, grads, made),
        inputs + grads,
        eps=eps,
        atol=atol,
        rtol=rtol,
        raise_exception=raise_exception,
        nondet_tol=nondet_tol,
        check_undefined_grad=check_undefined_grad,
        check_grad_dtypes=check_grad_dtypes,
        check_batched_grad=check_batched_grad,
        check_forward_ad=check_fwd_over_rev,
        check_backward_ad=check_rev_over_rev,
        fast_mode=fast_mode,
        masked=masked,
        engine=engine,
        seed=seed,
        confidence=confidence,
        memory_limit=memory_limit,
        progress=progress,
    )


def _refuse_positional(positional: tuple[Any, ...]) -> None:
    """Names the keyword: torch 1.8 and Lucid took eps, atol, rtol, ... by position."""
    if positional:
        raise TypeError(
            f"eps and all that follows it must be given by keyword, eps={positional[0]!r}, say; got "
            f"{len(positional)} more positional argument{'s' if len(positional) > 1 else ''} than there are."
        )


def _masked(masked: bool | None, check_sparse_nnz: bool | None) -> bool | None:
    """The value of masked, given under its present or its old name."""
    if check_sparse_nnz is None:
        return masked
    warn("check_sparse_nnz is the old name of masked: use masked.", FutureWarning)
    if masked is not None and masked != check_sparse_nnz:
        raise ValueError(f"masked={masked} and check_sparse_nnz={check_sparse_nnz} contradict each other: give masked.")
    return check_sparse_nnz


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(name: str, value: Any, zero: bool = True) -> float:
    """The value of a keyword as a float, if it is a number at least zero (or above zero)."""
    if type(value) is float and (value >= 0 if zero else value > 0) and value < math.inf:
        return value
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_meta:
        value = value.item()  # torch's arithmetic takes tensors of one number, too
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    number = float(value)
    if not (number >= 0 if zero else 0 < number < math.inf):
        raise ValueError(f"{name} must be {'at least zero' if zero else 'positive and finite'}, got {value!r}.")
    return number


def _raise_or_return(
    func: Callable[..., Any], inputs: TensorOrTensors, settings: Settings, raise_exception: bool
) -> bool:
    report = check(func, inputs, settings, explain=raise_exception)
    if report.failure is not None and report.failure.kind.startswith("undefined grad"):
        warn(
            "Backwards compatibility: undefined grad_outputs are checked by default; "
            "check_undefined_grad=False leaves them out."
        )
    if report.failure is not None and raise_exception:
        raise GradcheckError(failure_message(report), report) from report.failure.cause
    return report.passed
