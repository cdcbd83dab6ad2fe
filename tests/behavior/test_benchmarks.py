"""Benchmarks without the tools that they need."""

from __future__ import annotations

import pytest

from benchmarks import cuda_registers


def test_a_missing_tool_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.argv", ["cuda_registers"])
    with pytest.raises(SystemExit) as stop:
        cuda_registers.main()
    assert stop.value.code == "cuda_registers needs nvcc, cuobjdump and c++filt, but nvcc was not found."  # status 1
