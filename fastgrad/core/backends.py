"""Sets CUDA's libraries to full precision and deterministic algorithms during a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.backends import cuda, cudnn, mkldnn

from fastgrad.core.torch_private import set_backend


@contextmanager
def exact_libraries(deterministic: bool, doubles: bool) -> Iterator[list[str]]:
    """A context without TF32 and reduced-precision sums and, if requested, with deterministic convolutions.

    The caller's settings, which are the process's, are restored afterwards. Differences of functions that round to ten
    bits would be noise, and cuDNN's own choice of algorithms adds in another order every time.

    Parameters
    ----------
    doubles
        All inputs are of double precision: then there is no note about lower precision.

    Yields
    ------
    list
        Notes, if the caller's settings were different.
    """
    notes = []
    with ExitStack() as stack:
        if _set_full_precision(stack) and not doubles:
            notes.append("TF32 was switched off during the check")
        if deterministic and not cudnn.deterministic:
            notes.append("cuDNN used deterministic algorithms during the check, because nondet_tol is 0")
            _set(stack, cudnn, "deterministic", True)
            _set(stack, cudnn, "benchmark", False)
        yield notes


def _set_full_precision(stack: ExitStack) -> bool:
    """Whether the context changed a setting."""
    # torch has an older and a newer setting, and raises if they contradict each other: the older one sets both, and
    # the newer ones are restored last.
    convolutions, recurrent, on_cpu = cudnn.conv, cudnn.rnn, mkldnn.matmul  # type: ignore[attr-defined]
    places = (cuda.matmul, convolutions, recurrent, on_cpu)
    newer = [place.fp32_precision for place in places]
    for place, value in zip(places, newer, strict=True):
        stack.callback(set_backend, place, "fp32_precision", value)
    matmul = _or_none(torch.get_float32_matmul_precision)
    convolution = _or_none(lambda: cudnn.allow_tf32)
    if matmul not in (None, "highest"):
        stack.callback(torch.set_float32_matmul_precision, matmul)
        torch.set_float32_matmul_precision("highest")
    if convolution:
        _set(stack, cudnn, "allow_tf32", False)
    for place in places[:3]:
        if place.fp32_precision == "tf32":
            set_backend(place, "fp32_precision", "ieee")
    changed = "tf32" in newer[:3]
    for name in (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ):
        _set(stack, cuda.matmul, name, False)
    return changed


def _or_none(getter: Callable[[], Any]) -> Any:
    """A setting; None if torch's two ways to read it disagree."""
    try:
        return getter()
    except RuntimeError:
        return None


def _set(stack: ExitStack, where: Any, name: str, value: Any) -> None:
    stack.callback(set_backend, where, name, getattr(where, name))
    set_backend(where, name, value)
