"""Settings of CUDA's libraries during a check: what is set, and that the caller's settings are restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.backends import cuda, cudnn, mkldnn

from fastgrad.checks.order import check
from fastgrad.core.backends import exact_libraries
from fastgrad.core.torch_private import unfrozen_backends
from fastgrad.report.settings import Settings

PRECISIONS = (cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul)
FLAGS = [
    (cudnn, "deterministic"),
    (cudnn, "benchmark"),
    (cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    (cuda.matmul, "allow_fp16_accumulation"),
]


def set_backend(where: Any, name: str, value: Any) -> None:
    with unfrozen_backends():
        setattr(where, name, value)


def told(getter: Callable[[], Any]) -> Any:
    try:
        return getter()
    except RuntimeError:
        return "contradiction"


def state() -> list[Any]:
    older = [torch.get_float32_matmul_precision, lambda: cudnn.allow_tf32, lambda: cuda.matmul.allow_tf32]
    newer = [place.fp32_precision for place in PRECISIONS]
    return [*map(told, older), *newer, *(getattr(where, name) for where, name in FLAGS)]


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    with ExitStack() as stack:
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        for where, name in [(cudnn, "allow_tf32"), *FLAGS]:
            stack.callback(set_backend, where, name, getattr(where, name))
        yield


CALLERS: dict[str, Callable[[], None]] = {
    "as torch begins": lambda: None,
    "TF32 for products": lambda: torch.set_float32_matmul_precision("medium"),
    "TF32 for products, the newer way": lambda: set_backend(cuda.matmul, "fp32_precision", "tf32"),
    "no TF32": lambda: set_backend(cudnn, "allow_tf32", False),
    "TF32 for convolutions alone": lambda: set_backend(cudnn.rnn, "fp32_precision", "ieee"),
    "cuDNN chooses": lambda: set_backend(cudnn, "benchmark", True),
}


@pytest.mark.parametrize("error", [None, ValueError])
@pytest.mark.parametrize("caller", CALLERS)
def test_settings_hold_within_and_are_put_back(caller: str, error: type[Exception] | None) -> None:
    CALLERS[caller]()
    before = state()
    try:
        with exact_libraries(True, doubles=False) as notes:
            assert all(place.fp32_precision not in ("tf32", "bf16") for place in PRECISIONS[:3])
            assert [getattr(where, name) for where, name in FLAGS] == [True, False, False, False, False]
            if error is not None:
                raise error
    except ValueError:
        pass
    assert state() == before
    assert any("deterministic" in note for note in notes)
    assert any("TF32" in note for note in notes) is (caller != "no TF32")


def test_what_was_not_asked_for_stays() -> None:
    before = cudnn.deterministic, cudnn.benchmark
    with exact_libraries(False, doubles=True) as notes:
        assert (cudnn.deterministic, cudnn.benchmark) == before
    assert notes == []


@pytest.mark.parametrize("nondet_tol", [0.0, 1e-9])
def test_a_check_sets_them_where_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch, nondet_tol: float) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    seen = []

    def func(x: Tensor) -> Tensor:
        seen.append((cudnn.deterministic, cudnn.conv.fp32_precision == "tf32"))
        return x.sin()

    before = state()
    assert check(
        func, (torch.ones(3, dtype=torch.float64, requires_grad=True),), Settings(nondet_tol=nondet_tol)
    ).passed
    assert set(seen) == {(nondet_tol == 0, False)}
    assert state() == before
