"""check_variants: checks one function in many situations (variants)."""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastgrad.api.checkers import check, default_keywords
from fastgrad.api.settings import pop_per_input, settings_of, with_precision
from fastgrad.core import native, torch_private
from fastgrad.core.errors import is_of_fastgrad
from fastgrad.problem.arguments import FlatFunction
from fastgrad.problem.caller_state import SavedState, restores_caller_state
from fastgrad.problem.signature import function_name
from fastgrad.problem.transforms import reject_transformed
from fastgrad.problem.validation import as_float, as_seed, check_kwargs, disabled_gradients
from fastgrad.report.report import Report
from fastgrad.report.variants import AS_GIVEN, VariantRow, VariantsReport, VariantVerdict
from fastgrad.variants import compilation, derivatives, layouts, points, state
from fastgrad.variants.case import Case, NotApplicableError, Outcome, Subject, Variant, subject_of, tensors_of
from fastgrad.variants.kinks import examined
from fastgrad.variants.values import difference

_NO_SUCH_DERIVATIVE = (
    *("not implemented", "marked with @once_differentiable", "must override the setup_context"),
    *("does not require grad", "no output that requires grad", "with an output that requires grad"),
    *("does not support forward", "forward AD", "must implement the jvp function"),
    "functions with out=... arguments don't support",
    "torch.func.{grad, vjp, jacrev, hessian} don't yet support",
    *("vmap over", "vmap: ", "incompatible with vmap", "generate_vmap_rule"),
    "has_fw_view() INTERNAL ASSERT FAILED",  # batched tangents of views, as in torch.fft
)
"""Phrases of exceptions that mean that a kind of derivative does not exist."""

_NO_SUCH_LAYOUT = (
    *("output is not supported at gradcheck", "no forward-mode AD for sparse inputs", "forward AD gradcheck"),
    *("expected sparse coordinate tensor layout", "expected layout"),
)
"""Phrases of exceptions that mean that a kind of derivative does not exist for a layout of the inputs."""


_TRANSFORMS = "batched gradients", "forward mode, batched tangents", "torch.func.vjp", "under vmap"
"""Beginnings of the names of variants that need transforms of torch.func."""

_BY_DIFFERENCES = "forward mode", "forward over reverse"
"""Beginnings of the names of variants that compare with differences in the dtype of the inputs. Others have a reference
in double precision."""


@restores_caller_state
def check_variants(
    func: Callable[..., Any],
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    only: Sequence[str] | None = None,
    compiled: bool = False,
    seconds: float = 60.0,
    seed: int = 0,
    **keywords: Any,
) -> VariantsReport:
    """Checks a function in many situations (variants), one after the other.

    Each variant derives a function and inputs from the given ones, and checks them with `fastgrad.check`: at zeros and
    ties, with a strided input, in double backward, after another forward. A check at one random point misses errors
    there.

    Parameters
    ----------
    func, inputs, kwargs
        As in `fastgrad.check`: tensors with requires_grad=True, also nested, and the parameters of a module are
        checked. Integer tensors are treated as indices. Inputs that are positive everywhere stay positive.
    only
        Families ("state", "points", "layouts", "derivatives", "compiled"), or single variants ("points: zeros"); by
        default all except "compiled".
    compiled
        Include the family "compiled": func under torch.compile (each compilation takes seconds), func on fake
        tensors, and `torch.library.opcheck` for a registered operator.
    seconds
        Time limit; variants that would begin later are "not run", and the verdict is "incomplete".
    seed
        Seed of all random numbers.
    keywords
        Keywords of `fastgrad.check`: fast_mode, eps, atol, rtol, nondet_tol, check_undefined_grad, masked, engine,
        confidence, memory_limit, progress and precision. eps, atol and rtol are single numbers.

    Returns
    -------
    VariantsReport
        One row per variant. It is not a failure if func itself raises, or has no derivative at a generated point.
        `passed` is True only if a variant passed, none failed or raised, and all were run.

    Raises
    ------
    ValueError, TypeError, RuntimeError, NotImplementedError
        An argument cannot be used.

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    >>> fastgrad.check_variants(torch.sin, x).passed
    True
    """
    start = time.perf_counter()
    _check_arguments(seconds, kwargs, keywords)
    reject_transformed({"func": func, "inputs": inputs, "kwargs": kwargs})
    seed = as_seed(seed)
    subject = subject_of(func, inputs, kwargs or {}, seed)
    chosen = _chosen(_variants(subject), only, compiled)
    rows: list[VariantRow] = []
    for variant in chosen:
        begin = time.perf_counter()
        if begin - start > seconds:
            rows.append(VariantRow(variant.family, variant.name, "not run", f"{seconds:g} s have elapsed", 0.0))
            continue
        with SavedState(func, subject.inputs), state.restored_module(subject), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _outcome(variant, subject, {**keywords, "seed": seed})
        took = time.perf_counter() - begin
        rows.append(VariantRow(variant.family, variant.name, found.verdict, found.detail, took, found.report))
    return VariantsReport(tuple(rows), seed, time.perf_counter() - start)


_KEYWORDS = (
    *("eps", "atol", "rtol", "nondet_tol", "check_undefined_grad", "fast_mode", "masked", "engine"),
    *("confidence", "memory_limit", "progress", "precision"),
)
"""Keywords of `fastgrad.check` that mean the same in every variant."""


def _variants(subject: Subject) -> list[Variant]:
    """All variants in the order in which they run: first those that fail most often and those that are cheap."""
    first, *others = points.VARIANTS
    of_layouts = *layouts.VARIANTS, *layouts.of_inputs(subject)
    of_derivatives = *derivatives.of_inputs(subject), *derivatives.VARIANTS
    return [first, *state.VARIANTS, *others, *of_layouts, *of_derivatives, *compilation.VARIANTS]


def _check_arguments(seconds: object, kwargs: object, keywords: dict[str, Any]) -> None:
    unknown = sorted(set(keywords) - set(_KEYWORDS))
    if unknown:
        raise TypeError(f"check_variants does not take {', '.join(unknown)}; it takes {', '.join(_KEYWORDS)}.")
    given = {**default_keywords(), **keywords}
    per_input = pop_per_input(given)
    if per_input:
        name, value = next(iter(per_input.items()))
        raise TypeError(f"{name} must be one number, because the variants have other inputs than func; got {value!r}.")
    with_precision(settings_of(given), None, None, given.get("precision", "auto"))
    check_kwargs(kwargs)
    disabled = disabled_gradients()
    if disabled is not None:
        raise ValueError(f"check_variants records gradients, but {disabled}.")
    if _is_nested():
        raise ValueError(
            "check_variants cannot run within forward_ad.dual_level or a transform of torch.func, because it uses both."
        )
    as_float("seconds", seconds)


def _is_nested() -> bool:
    """Whether a level of forward-mode AD or a transform of torch.func is active."""
    try:
        native.at_dual_level(lambda: None)  # waits until checks in other threads have left their level
    except RuntimeError:
        return True
    return torch_private.transforms_are_active()


def _chosen(among: list[Variant], only: Sequence[str] | None, compiled: bool) -> list[Variant]:
    if only is None:
        return [one for one in among if compiled or one.family != "compiled"]
    if not isinstance(only, Sequence) or isinstance(only, str) or not all(isinstance(name, str) for name in only):
        raise TypeError(f"only= must be a list of names of variants or families, got {only!r}.")
    if not only:
        raise ValueError("only= must name at least one variant or family, got an empty list.")
    families = dict.fromkeys(variant.family for variant in among)
    known = {*families, *(one.path for one in among)}
    unknown = [name for name in only if name not in known]
    if unknown:
        names = ", ".join(map(repr, unknown))
        raise ValueError(f"only= contains unknown names: {names}; the families are {', '.join(families)}.")
    return [one for one in among if one.family in only or one.path in only]


def _outcome(variant: Variant, subject: Subject, keywords: dict[str, Any]) -> Outcome:
    if variant.name.startswith(_TRANSFORMS) and not subject.is_strided:
        return Outcome("not applicable", "torch.func supports strided tensors only")
    if variant.name.startswith(_BY_DIFFERENCES) and subject.has_16_bits and "eps" not in keywords:
        return Outcome("not applicable", "rounding to 16 bits hides the change of func over the usual eps; pass eps")
    try:
        case = variant.make(subject)
    except Exception as reason:
        text = str(reason) if isinstance(reason, NotApplicableError) else _first_line(reason)
        return Outcome("not applicable", text)
    if isinstance(case, Outcome):
        return case
    raised: list[Exception] = []
    try:
        report = check(_named(case.func, subject, raised), case.inputs, **{**keywords, **case.keywords})
    except Exception as error:
        return _of_exception(variant, subject, case, error, any(error is one for one in raised))
    if report.verdict == "passed":
        return _of_values(case, report, {**default_keywords(), **keywords}["nondet_tol"])
    line = str(report).partition("\n")[0]
    cause = None if report.failure is None else report.failure.cause
    if cause is not None and _does_not_exist(variant, cause):
        return Outcome("not applicable", _first_line(cause))
    verdict: VariantVerdict = "undecided" if report.verdict in ("not converged", "undecided") else "failed"
    if report.failure is not None and variant.is_elsewhere:
        return Outcome(*_at_a_chosen_point(case, verdict, line), report)
    return Outcome(verdict, line, report)


def _of_values(case: Case, report: Report, allowed: float) -> Outcome:
    """The outcome if the gradients are those of the case's function: its values must be right, too."""
    if case.expected is None:
        return Outcome("passed", "", report)
    wrong = difference(partial(case.func, *case.inputs), case.expected, allowed)
    return Outcome("failed", wrong) if wrong else Outcome("passed", "", report)


def _named(func: Callable[..., Any], subject: Subject, raised: list[Exception]) -> Callable[..., Any]:
    """A function with the names of the caller's function and inputs, and with its parameters if these are the inputs.

    raised: gets the exceptions of func.
    """

    def called(*arguments: Any) -> Any:
        try:
            return func(*arguments)
        except Exception as error:
            raised.append(error)
            raise

    named = FlatFunction(called, function_name(subject.called) or "<lambda>", subject.names)
    if len(subject.arguments) == len(subject.inputs) and all(map(operator.is_, subject.arguments, subject.inputs)):
        named.__wrapped__ = subject.called  # type: ignore[attr-defined]
    return named


def _does_not_exist(variant: Variant, error: BaseException) -> bool:
    return variant.family == "derivatives" and any(one in str(error) for one in _NO_SUCH_DERIVATIVE)


def _of_exception(variant: Variant, subject: Subject, case: Case, error: Exception, is_of_func: bool) -> Outcome:
    text = _first_line(error)
    is_unusable = is_of_fastgrad(error) or str(error).startswith("func must return")
    if variant.path == AS_GIVEN and is_unusable and not is_of_func:
        raise error
    no_such_layout = not subject.is_strided and any(one in str(error) for one in _NO_SUCH_LAYOUT)
    if no_such_layout or _does_not_exist(variant, error):
        return Outcome("not applicable", text)
    # func may also raise next to the point: at zero, -eps may be outside its domain.
    if variant.is_elsewhere and is_of_func:
        return Outcome("not applicable", f"func raises {text}")
    try:
        has_graph = any(value.requires_grad for value in tensors_of(case.func(*case.inputs)))
    except Exception as own:
        return Outcome("not applicable", f"func raises {_first_line(own)}")
    if variant.is_elsewhere and not has_graph:  # for example, an empty tuple for an empty tensor
        return Outcome("not applicable", "no output requires grad")
    return Outcome("raised", text)


def _at_a_chosen_point(case: Case, verdict: VariantVerdict, line: str) -> tuple[VariantVerdict, str]:
    """Judges a failure at a generated point: it counts only if an entry that has a derivative is wrong."""
    func, inputs = case.tested_for_kinks or (case.func, case.inputs)
    try:
        found = examined(lambda *arguments: tensors_of(func(*arguments)), inputs)
    except Exception as error:
        return "undecided", f"the check fails here, but next to this point func raises {_first_line(error)}"
    if found is None:
        return "undecided", "the check fails here, but the Jacobian is too large to test whether the derivative exists"
    without, wrong = found
    if wrong or not without:
        return verdict, line
    return "no derivative", (
        f"{without} {'entry has' if without == 1 else 'entries have'} no derivative: the one-sided "
        "derivatives differ, are infinite, or are hidden by rounding of the output"
    )


def _first_line(error: Exception) -> str:
    first, _, rest = str(error).partition("\n")
    reason = f" {rest.partition(chr(10))[0]}" if first.endswith(":") else ""  # what a backend of torch.compile raised
    return f"{type(error).__name__}: {first}{reason}"
