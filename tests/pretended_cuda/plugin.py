"""Loads the simulated CUDA device, and replaces the functions of torch.cuda by those of this device.

`pytest -p tests.pretended_cuda.plugin`. It must be imported before torch, which looks for devices only once.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LIBRARY = Path(os.environ.get("FASTGRAD_PRETENDED_CUDA", "build/cmake/libpretended_cuda.so")).resolve()
"""What `make test-pretended-cuda` builds."""

if "torch" in sys.modules:
    raise ImportError("the simulated CUDA device must be loaded before torch")
ctypes.CDLL(str(LIBRARY), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402  (after the device)
from torch import cuda  # noqa: E402

ops = torch.ops.pretended_cuda
DEVICES = 2
DEVICE_TYPE = torch.Stream(device="cuda:0").device_type


def index_of(device: Any = None) -> int:
    if device is None or (not isinstance(device, int) and torch.device(device).index is None):
        return int(ops.current_device())
    return device if isinstance(device, int) else torch.device(device).index


# torch's base classes; the classes of a CUDA build add only functions that are not used here.
def new_stream(device: Any = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(device=torch.device("cuda", index_of(device)), priority=priority)


def new_event(enable_timing: bool = False) -> torch.Event:
    return torch.Event(device="cuda", enable_timing=enable_timing)


def stream_with(number: int, index: int) -> torch.Stream:
    return torch.Stream(stream_id=number, device_index=index, device_type=DEVICE_TYPE)


def current_stream(device: Any = None) -> torch.Stream:
    return stream_with(ops.current_stream(index_of(device)), index_of(device))


def set_stream(stream: torch.Stream) -> None:
    ops.exchange_stream(stream.device_index, stream.stream_id)


_mode = 0


def set_sync_debug_mode(mode: int | str) -> None:
    global _mode
    _mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode) if isinstance(mode, str) else mode
    ops.forbid_reads(_mode == 2)


def synchronize(device: Any = None) -> None:
    """Nothing to wait for; torch's own synchronize is no error in that mode either."""


REPLACED = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: DEVICES,
    "current_device": lambda: index_of(),
    "set_device": lambda device: ops.exchange_device(index_of(device)),
    "_exchange_device": ops.exchange_device,
    "_maybe_exchange_device": lambda device: ops.exchange_device(device) if device >= 0 else -1,
    "get_device_name": lambda device=None: "simulated CUDA device",
    "get_device_capability": lambda device=None: (8, 0),
    "get_device_properties": lambda device=None: SimpleNamespace(major=8, minor=0, total_memory=1 << 37),
    "Stream": new_stream,
    "Event": new_event,
    "current_stream": current_stream,
    "default_stream": lambda device=None: stream_with(0, index_of(device)),
    "set_stream": set_stream,
    "synchronize": synchronize,
    "get_sync_debug_mode": lambda: _mode,
    "set_sync_debug_mode": set_sync_debug_mode,
    "is_current_stream_capturing": lambda: False,
    "get_allocator_backend": lambda: "pretended",
    "default_generators": tuple(ops.default_generator(index) for index in range(DEVICES)),
    "mem_get_info": lambda device=None: (1 << 36, 1 << 37),
    "memory_reserved": lambda device=None: 0,
    "memory_allocated": lambda device=None: 0,
    "empty_cache": lambda: None,
    "_sleep": lambda cycles: None,
}

for name, value in REPLACED.items():
    assert hasattr(cuda, name) or name == "_sleep", name
    for module in (cuda, cuda.random, cuda.memory):
        if hasattr(module, name) or module is cuda:
            setattr(module, name, value)

import fastgrad  # noqa: E402, F401  (registers the operators)
from fastgrad import _build  # noqa: E402

_build.CUDA = "pretended"
