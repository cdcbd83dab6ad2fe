"""setuptools, and torch of the minor version in use where wheels are built in isolation."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib import metadata

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that are setuptools' own)

OLDEST_TORCH = "2.11"


def torch_requirement(directories: list[str]) -> str:
    """Torch of the minor version that is installed in one of the directories, or any that is new enough.

    pip hides the packages of the environment that it installs into from an isolated build; their directory is the
    interpreter's. The compiled module works with the minor version of torch that it was compiled against only.
    """
    for found in metadata.distributions(name="torch", path=directories):
        major, minor = found.version.split(".")[:2]
        return f"torch=={major}.{minor}.*"
    return f"torch>={OLDEST_TORCH}"


def obstacle() -> str | None:
    """Why the compiled module is not built: FASTGRAD_NATIVE=auto does without it then, 0 always, and 1 never."""
    choice = os.environ.get("FASTGRAD_NATIVE", "auto")
    if choice not in ("auto", "0", "1"):
        raise SystemExit(f"FASTGRAD_NATIVE must be auto, 0 or 1, got {choice!r}.")
    if choice == "0":
        return "FASTGRAD_NATIVE is 0"
    compiler = os.environ.get("CXX", "c++").split()[0]
    found = None
    if not sys.platform.startswith("linux"):
        found = f"it is built only on Linux, not on {sys.platform}"
    elif not any(shutil.which(name) for name in (compiler, "g++", "clang++")):
        found = "there is no C++ compiler"
    if found and choice == "1":
        raise SystemExit(f"FASTGRAD_NATIVE=1 requires fastgrad's compiled module, but {found}.")
    return found


def get_requires_for_build_wheel(config_settings: dict[str, str] | None = None) -> list[str]:
    """What compiling takes, beside a compiler; nothing where nothing is compiled."""
    own = build_meta.get_requires_for_build_wheel(config_settings)
    if obstacle():
        return own
    paths = sysconfig.get_paths()
    return [*own, torch_requirement([paths["purelib"], paths["platlib"]]), "numpy", "ninja"]


get_requires_for_build_editable = get_requires_for_build_wheel
