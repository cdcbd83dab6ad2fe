"""The tests of this folder run on a GPU; where they cannot, test_device.py says why in one line."""

from __future__ import annotations

import importlib

import pytest
import torch


def obstacle() -> str | None:
    """What keeps these tests from running here, None where nothing does."""
    if not torch.cuda.is_available():
        return "no CUDA device here"
    if importlib.import_module("fastgrad._build").CUDA is None:
        return "fastgrad was built without CUDA: rebuild it with FASTGRAD_CUDA=1"
    return None


# Collected, they would be a thousand skipped tests.
collect_ignore_glob = ["test_cuda_*.py"] if obstacle() else []


@pytest.fixture(params=["the current device", "another device"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """cuda:0, which is current, and cuda:1, which is not."""
    if request.param == "the current device":
        return torch.device("cuda", 0)
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return torch.device("cuda", 1)
