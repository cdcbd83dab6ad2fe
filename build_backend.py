"""setuptools, and torch of the minor version in use where wheels are built in isolation."""

from __future__ import annotations

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


def get_requires_for_build_wheel(config_settings: dict[str, str] | None = None) -> list[str]:
    """What compiling takes, beside a compiler."""
    paths = sysconfig.get_paths()
    own = build_meta.get_requires_for_build_wheel(config_settings)
    return [*own, torch_requirement([paths["purelib"], paths["platlib"]]), "numpy", "ninja"]


get_requires_for_build_editable = get_requires_for_build_wheel
