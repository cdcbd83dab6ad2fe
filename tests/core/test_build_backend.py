"""Isolated builds use the minor version of torch that is installed in the target environment."""

from __future__ import annotations

from pathlib import Path

import pytest

import build_backend


@pytest.mark.parametrize(
    ("version", "requirement"),
    [("2.13.0+cpu", "torch==2.13.*"), ("2.11.1", "torch==2.11.*"), (None, "torch>=2.11")],
)
def test_torch_of_the_minor_version_that_is_installed(version: str | None, requirement: str, tmp_path: Path) -> None:
    if version is not None:
        metadata = tmp_path / f"torch-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    assert build_backend.torch_requirement([str(tmp_path)]) == requirement


def test_the_oldest_torch_is_that_of_the_metadata() -> None:
    text = (Path(build_backend.__file__).parent / "pyproject.toml").read_text()
    assert f'"torch>={build_backend.OLDEST_TORCH}"' in text
