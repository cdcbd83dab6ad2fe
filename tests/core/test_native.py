"""The compiled module is checked before it is loaded, and importing fastgrad takes little time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fastgrad
from tests.processes import run

FAKE = """
import sys, types
build = types.ModuleType("fastgrad._build")
build.TORCH, build.CUDA = {torch!r}, {cuda!r}
sys.modules["fastgrad._build"] = build
import fastgrad
"""


@pytest.mark.parametrize(("torch_version", "cuda"), [("2.12.0+cpu", None), (None, "12.1")])
def test_another_torch_is_one_clear_sentence(torch_version: str | None, cuda: str | None) -> None:
    import torch

    result = run(FAKE.format(torch=torch_version or str(torch.__version__), cuda=cuda))
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: fastgrad was compiled against torch")
    assert "--no-build-isolation" in last
    assert "+torch" + ".".join(str(torch.__version__).split(".")[:2]) + "," in last
    assert "undefined symbol" not in result.stderr


def test_a_patch_release_is_no_other_torch() -> None:
    import torch

    major, minor, *_ = str(torch.__version__).split(".")
    assert run(FAKE.format(torch=f"{major}.{minor}.99+cpu", cuda=None)).returncode == 0


def test_an_unbuilt_tree_says_how_to_build() -> None:
    result = run("import sys; sys.modules['fastgrad._build'] = None; import fastgrad")
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: fastgrad's compiled module is missing")
    assert "make develop" in last
    assert "pip install --no-build-isolation" in last


def test_the_version_is_stated_once() -> None:
    root = Path(__file__).parents[2]
    assert fastgrad.__version__ in (root / "fastgrad/_version.py").read_text()
    assert f"## {fastgrad.__version__}" in (root / "CHANGELOG.md").read_text()
    for name in ("pyproject.toml", "setup.py", "CMakeLists.txt"):
        assert fastgrad.__version__ not in (root / name).read_text()


def test_import_costs_little_beyond_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # With bytecode, as installed. Processor time, compared with importing torch: machines differ in speed. Without
    # garbage collection: a collection of torch's objects takes longer than the import, and may begin in either.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    clock, folder = "time.process_time()", f"sys.pycache_prefix = {str(tmp_path)!r}"
    code = f"import gc, sys, time; gc.disable(); s = {clock}; import torch; t = {clock}; {folder}; import fastgrad"
    command = [sys.executable, "-c", f"{code}; print(({clock} - t) / (t - s))"]
    ratios: list[float] = []
    while len(ratios) < 3 and min(ratios, default=1.0) >= 1 / 16:  # the first run writes the bytecode
        ratios.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert min(ratios) < 1 / 16, ratios
