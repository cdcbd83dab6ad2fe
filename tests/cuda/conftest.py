"""The tests of this folder need a GPU; if they cannot run, test_device.py states the reason in one line."""

from __future__ import annotations

import importlib

import pytest
import torch


def obstacle() -> str | None:
    """Why these tests cannot run here; None if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device here"
    if importlib.import_module("fastgrad._build").CUDA is None:
        return "fastgrad was built without CUDA: rebuild it with FASTGRAD_CUDA=1"
    return None


# If they were collected, a thousand skipped tests would be listed.
collect_ignore_glob = ["test_cuda_*.py"] if obstacle() else []


@pytest.fixture(params=["the current device", "another device"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """cuda:0, which is current, and cuda:1, which is not."""
    if request.param == "the current device":
        return torch.device("cuda", 0)
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return torch.device("cuda", 1)
