"""Validates the keywords of a check and builds its Settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastgrad.core.errors import warn
from fastgrad.core.precision import LOWER
from fastgrad.problem.arguments import check_callable
from fastgrad.problem.signature import function_name
from fastgrad.problem.validation import as_bool, as_float, as_seed, is_integer, nearest_float
from fastgrad.report.number_text import count
from fastgrad.report.settings import UNNAMED, GradOutputs, Settings, Tolerances

_DEFAULTS = (Tolerances.eps, Tolerances.atol, Tolerances.rtol)

OneOrEach = float | Sequence[float] | Mapping[str, float]
"""One number for all inputs, one per input, or a mapping from input names."""


def reject_positional(positional: tuple[Any, ...]) -> NoReturn:
    """Raises a TypeError that names the keyword: torch 1.8 and Lucid accepted eps, atol, rtol, ... by position."""
    if isinstance(positional[0], Tensor) and positional[0].requires_grad:
        required = "inputs must be one tuple if there are several, for example gradcheck(func, (x, y))"
    else:
        required = f"eps and all arguments after it are keyword-only, for example eps={positional[0]!r}"
    raise TypeError(f"{required}; got {count(len(positional), 'positional argument')} too many.")


_OTHERS = ("grad_outputs", "order", "inputs", "precision", "reference", "reference_device")
_FIRST_ORDER = {field.name: field.name for field in fields(Settings) if field.name not in _OTHERS}
"""The keyword of gradcheck for each field of Settings, except those in `_OTHERS`, which are set afterwards."""

_SECOND_ORDER = {
    **{name: keyword for name, keyword in _FIRST_ORDER.items() if name != "check_batched_forward_grad"},
    "check_forward_ad": "check_fwd_over_rev",
    "check_backward_ad": "check_rev_over_rev",
}
"""The keywords of gradgradcheck for the same fields; it has no check_batched_forward_grad."""

_NAMES = {True: tuple(_FIRST_ORDER.values()), False: tuple(_SECOND_ORDER.values())}
"""The keywords of the fields, for gradcheck (True) and for gradgradcheck (False)."""

_FLAGS = frozenset(field.name for field in fields(Settings) if field.type == "bool")
"""Fields that are true or false; callers may pass anything with a truth value."""

_PLAIN = frozenset({float, int, bool, str, type(None)})


def settings_of(keywords: Mapping[str, Any], made: GradOutputs | None = None) -> Settings:
    """Validates the keywords of a check and returns its settings.

    made: how grad_outputs are made, for second derivatives.
    """
    names = _NAMES[made is None]
    given = [keywords[name] for name in names]
    # Most checks have the same keywords as the previous one, so settings are cached. They are not cached if a number is
    # given as a tensor, whose value may change.
    make = _known_settings if _PLAIN.issuperset(map(type, given)) else _new_settings
    return make(made, *given)


def _new_settings(made: GradOutputs | None, *given: Any) -> Settings:
    keywords = dict(zip(_NAMES[made is None], given, strict=True))
    table = _FIRST_ORDER if made is None else _SECOND_ORDER
    for name in _FLAGS.intersection(table):
        keywords[table[name]] = as_bool(table[name], keywords[table[name]])
    forward, reverse = table["check_forward_ad"], table["check_backward_ad"]
    if not (keywords[forward] or keywords[reverse]):
        raise AssertionError(f"Expected at least one of {forward} or {reverse} to be True")
    if made is not None and keywords["check_undefined_grad"] and not keywords[reverse]:
        raise AssertionError(f"Setting check_undefined_grad=True requires {reverse} to be True")
    if keywords["check_batched_grad"] and not keywords[reverse]:
        raise AssertionError(f"Setting check_batched_grad=True requires {reverse} to be True")
    if made is None and keywords["check_batched_forward_grad"] and not keywords[forward]:
        raise AssertionError(f"Setting check_batched_forward_grad=True requires {forward} to be True")
    progress, engine = keywords["progress"], keywords["engine"]
    confidence, seed, memory_limit = keywords["confidence"], keywords["seed"], keywords["memory_limit"]
    if progress is not None and not isinstance(progress, bool):
        raise TypeError(f"progress must be None, True or False, got {progress!r}.")
    if engine not in ("auto", "dense", "compressed", "sketch"):
        raise ValueError(f"engine must be 'auto', 'dense', 'compressed' or 'sketch', got {engine!r}.")
    if engine == "sketch" and not keywords["fast_mode"]:
        raise ValueError("engine='sketch' needs fast_mode=True, because it compares sums of entries, not every entry.")
    if confidence is not None and not isinstance(confidence, Real):
        raise TypeError(f"confidence must be None or between 0 and 1, got {confidence!r}.")
    if confidence is not None and not 0 < nearest_float(confidence) < 1:
        raise ValueError(f"confidence must be None or between 0 and 1, got {confidence!r}.")
    if memory_limit is not None and not (is_integer(memory_limit) and memory_limit > 0):
        raise ValueError(f"memory_limit must be None or a positive number of bytes, got {memory_limit!r}.")
    values = {name: keywords[keyword] for name, keyword in table.items()}
    values["eps"] = as_float("eps", keywords["eps"], zero=False)
    for name in ("atol", "rtol", "nondet_tol"):
        values[name] = as_float(name, keywords[name])
    values["seed"] = 0 if seed is None else as_seed(seed, "None or an integer of 64 bits")
    values["memory_limit"] = None if memory_limit is None else int(memory_limit)
    values["confidence"] = Settings.confidence if confidence is None else float(confidence)
    return Settings(**values, grad_outputs=made, order=1 if made is None else 2)


_known_settings = lru_cache(64, typed=True)(_new_settings)


def with_precision(settings: Settings, reference: Any, reference_device: Any, precision: Any) -> Settings:
    """The settings with the keywords for lower dtypes, which are validated."""
    if reference is None and reference_device is None and precision == "auto":
        return settings
    if precision not in ("auto", "strict"):
        raise ValueError(f"precision must be 'auto' or 'strict', got {precision!r}.")
    if not (reference is None or reference == "float64" or callable(reference)):
        raise TypeError(f"reference must be None, 'float64' or a function, got {reference!r}.")
    if callable(reference):
        check_callable(reference)
    if precision == "strict" and not (reference is None and reference_device is None):
        raise ValueError("precision='strict' uses tolerances, not a reference: do not pass reference=.")
    name = reference if reference is None or isinstance(reference, str) else function_name(reference) or UNNAMED
    try:
        device = None if reference_device is None else str(torch.device(reference_device))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"reference_device must be None or a torch device, got {reference_device!r}.") from error
    return replace(settings, precision=precision, reference=name, reference_device=device)


def measures_rounding(inputs: Sequence[Any], settings: Settings) -> bool:
    """Whether a check uses measured rounding: for inputs of a lower dtype, unless precision is "strict".

    If the caller gives a step or tolerances but no reference, the check uses these instead.
    """
    if not any(isinstance(value, Tensor) and value.dtype in LOWER and value.requires_grad for value in inputs):
        return False
    own = settings.inputs or (settings.eps, settings.atol, settings.rtol) != _DEFAULTS
    return settings.precision == "auto" and (not own or settings.reference is not None)


def pop_per_input(keywords: dict[str, Any]) -> dict[str, Any]:
    """Replaces per-input eps, atol and rtol in the keywords by the defaults; returns the per-input ones."""
    own = {}
    for name in ("eps", "atol", "rtol"):
        if isinstance(keywords[name], (Mapping, Sequence)) and not isinstance(keywords[name], (str, bytes)):
            own[name], keywords[name] = keywords[name], getattr(Tolerances, name)
    return own


def with_per_input(settings: Settings, own: Mapping[str, Any], names: Sequence[str]) -> Settings:
    """The settings with per-input eps, atol and rtol, given as one number per name or as a mapping."""
    if not own:
        return settings
    columns = [_one_each(name, own.get(name, getattr(settings, name)), names) for name in ("eps", "atol", "rtol")]
    inputs = tuple(Tolerances(*row) for row in zip(*columns, strict=True))
    smallest = Tolerances(*(min(column) for column in columns))
    return replace(settings, **vars(smallest), inputs=inputs if set(inputs) != {smallest} else ())


def _one_each(name: str, given: Any, names: Sequence[str]) -> list[float]:
    """A keyword's number for each input; the keys of a mapping are names of inputs, or the beginnings of names."""
    if isinstance(given, Mapping):
        found = [getattr(Tolerances, name)] * len(names)
        # If several keys fit, the longest one is the most specific.
        for key in sorted(given, key=lambda key: len(str(key))):
            path = str(key).replace("'", '"')
            within = [i for i, known in enumerate(names) if known == path or known.startswith((path + ".", path + "["))]
            if not within:
                raise ValueError(f"{name} has the key {key!r}, but the checked inputs are {', '.join(names)}.")
            for i in within:
                found[i] = given[key]
    else:
        found = list(given) if isinstance(given, Sequence) else [given] * len(names)
        if len(found) != len(names):
            raise ValueError(
                f"{name} needs {count(len(names), 'number')}, one for each checked input ({', '.join(names)}), got "
                f"{len(found)}."
            )
    return [
        as_float(f"{name} of {known}", value, zero=name != "eps") for known, value in zip(names, found, strict=True)
    ]


def masked_by_old_name(masked: bool | None, check_sparse_nnz: bool) -> bool:
    """Warns that masked was passed under its old name; returns its value."""
    warn("check_sparse_nnz is the old name of masked: use masked.", FutureWarning)
    if masked is not None and masked != check_sparse_nnz:
        raise ValueError(f"masked={masked} and check_sparse_nnz={check_sparse_nnz} differ: pass only masked.")
    return check_sparse_nnz
