"""Sets CUDA's libraries to full precision and deterministic algorithms during a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.backends import cuda, cudnn, mkldnn

from fastgrad.core.torch_private import unfrozen_backends


@contextmanager
def exact_libraries(deterministic: bool, doubles: bool) -> Iterator[list[str]]:
    """A context without TF32 and reduced-precision sums and, if requested, with deterministic convolutions.

    The caller's settings, which apply to the whole process, are restored afterwards. The differences of a function that
    rounds to ten bits would be only noise, and the algorithms that cuDNN chooses may add in a different order every
    time.

    Parameters
    ----------
    doubles
        Whether all inputs have double precision. Then there is no note about lower precision.

    Yields
    ------
    list
        Notes for the report, if the caller's settings were changed.
    """
    notes = []
    restored: list[Callable[[], None]] = []
    try:
        with unfrozen_backends():
            if _set_full_precision(restored) and not doubles:
                notes.append("TF32 was switched off during the check")
            if deterministic and not cudnn.deterministic:
                notes.append("cuDNN used deterministic algorithms during the check, because nondet_tol is 0")
                _set(restored, cudnn, "deterministic", True)
                _set(restored, cudnn, "benchmark", False)
        yield notes
    finally:
        with unfrozen_backends():
            for restore in reversed(restored):
                restore()


def _set_full_precision(restored: list[Callable[[], None]]) -> bool:
    """Disables TF32 and reduced-precision sums, and returns whether TF32 was enabled.

    restored: functions that restore the caller's settings are appended; they must be called in reverse order.
    """
    places: tuple[Any, ...] = (cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul)  # type: ignore[attr-defined]
    newer = [place.fp32_precision for place in places]
    matmul = _or_none(torch.get_float32_matmul_precision)
    convolution = _or_none(lambda: cudnn.allow_tf32)
    if matmul not in (None, "highest") or convolution or "tf32" in newer[:3]:
        # torch has older and newer settings, and raises if they contradict each other. Setting an older one also sets
        # the newer ones. Therefore, the newer settings are restored last.
        restored += [
            partial(setattr, place, "fp32_precision", value) for place, value in zip(places, newer, strict=True)
        ]
    if matmul not in (None, "highest"):
        restored.append(partial(torch.set_float32_matmul_precision, matmul))
        torch.set_float32_matmul_precision("highest")
    if convolution:
        _set(restored, cudnn, "allow_tf32", False)
    for place in places[:3]:
        if place.fp32_precision == "tf32":
            place.fp32_precision = "ieee"
    for name in (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ):
        _set(restored, cuda.matmul, name, False)
    return "tf32" in newer[:3]


def _or_none(getter: Callable[[], Any]) -> Any:
    """A setting; None if torch's two ways to read it disagree."""
    try:
        return getter()
    except RuntimeError:
        return None


def _set(restored: list[Callable[[], None]], where: Any, name: str, value: Any) -> None:
    before = getattr(where, name)
    if before != value:
        restored.append(partial(setattr, where, name, before))
        setattr(where, name, value)
