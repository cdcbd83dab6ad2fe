"""Whether the CUDA tests run here."""

from __future__ import annotations

import pytest
import torch

from tests.cuda.conftest import obstacle


def test_the_cuda_tests_run() -> None:
    reason = obstacle()
    if reason:
        pytest.skip(f"all CUDA tests: {reason}")
    assert torch.ones(3, device="cuda").sum().item() == 3
