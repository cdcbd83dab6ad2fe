"""Builds fastgrad._C, or does without; the metadata is in pyproject.toml, the list of sources in csrc/sources.txt."""

import os
import sys
import warnings
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

from build_backend import obstacle

try:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
except ImportError:
    torch = None  # an sdist and metadata need neither torch nor a compiler

ROOT = Path(__file__).parent


def write_build(torch_version: str | None, cuda: str | None) -> None:
    """What the module is built against, for fastgrad/core/native.py; None: there is no module."""
    (ROOT / "fastgrad/_build.py").write_text(
        '"""What the compiled module was built against; written by setup.py."""\n\n'
        f"TORCH: str | None = {torch_version!r}\nCUDA: str | None = {cuda!r}\n"
    )


def use_cuda() -> bool:
    """FASTGRAD_CUDA=auto (where torch and the machine have CUDA), 0 (never) or 1 (or fail)."""
    choice = os.environ.get("FASTGRAD_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        raise SystemExit(f"FASTGRAD_CUDA must be auto, 0 or 1, got {choice!r}.")
    available = torch.version.cuda is not None and CUDA_HOME is not None
    if choice == "1" and not available:
        raise SystemExit("FASTGRAD_CUDA=1 needs a CUDA build of torch and nvcc (CUDA_HOME).")
    return available and choice != "0"


def translation_unit(name: str, parts: list[str]) -> str:
    """One source that includes others: most of the time to compile each of them would go into torch's headers."""
    path = ROOT / "build/unity" / f"{name}.cpp"
    text = "".join(f'#include "../../{part}"\n' for part in parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return str(path.relative_to(ROOT))


def extension() -> Extension:
    """The compiled module; writes what it is built against."""
    cuda = use_cuda()
    if cuda:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    listed = (ROOT / "csrc/sources.txt").read_text().split()
    of_host = [source for source in listed if "/cuda/" not in source]
    without_python = ("csrc/ops/", "csrc/coloring", "csrc/library")
    operators = [source for source in of_host if source.startswith(without_python)]
    calling_python = [source for source in of_host if source not in operators]
    sources = [translation_unit("calling_python", calling_python), translation_unit("operators", operators)]
    sources += [source for source in listed if cuda and "/cuda/" in source]
    # Python's own CFLAGS add -g, and at::parallel_for is serial without -fopenmp.
    # -fno-trapping-math: floating-point exceptions are not used, and conditions vectorize only with this flag.
    flags = ["-O3", "-g0", "-fopenmp", "-fno-trapping-math", "-fvisibility=hidden"]
    flags += ["-Wall", "-Wextra", "-Wno-unused-parameter"]
    if os.environ.get("FASTGRAD_WERROR") == "1":
        flags.append("-Werror")
    # -fmad=false: products and sums round as on the CPU, and no kernel here is short of arithmetic.
    nvcc_flags = ["-O3", "-fmad=false"]
    sanitizers = []
    if os.environ.get("FASTGRAD_SANITIZE") == "1":
        sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
        # Python's own CFLAGS add -fwrapv, under which no signed overflow is an error.
        flags += ["-O1", "-g", "-fno-wrapv", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS", *sanitizers]
    write_build(str(torch.__version__), torch.version.cuda if cuda else None)
    return (CUDAExtension if cuda else CppExtension)(
        "fastgrad._C",
        sources,
        extra_compile_args={"cxx": flags, "nvcc": nvcc_flags} if cuda else flags,
        extra_link_args=["-fopenmp", *sanitizers],
    )


class BuildWithoutTorch(build_ext):
    """Ends the build with a message about the missing torch."""

    def run(self) -> None:
        raise SystemExit(
            "fastgrad is compiled against torch, but this build environment has none: "
            "install torch >= 2.11 first, then run pip with --no-build-isolation."
        )


class BuildOrSay(BuildExtension if torch else object):
    """Says how to do without where compiling fails."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            raise SystemExit(
                f"fastgrad's compiled module failed to build: {error}\n"
                "FASTGRAD_NATIVE=0 installs fastgrad in plain Python, with the same verdicts but slower."
            ) from error


# Not for an sdist, or for commands that only read metadata.
BUILDS = {"bdist_wheel", "build_ext", "build", "install", "editable_wheel", "develop"}
reason = None if BUILDS.isdisjoint(sys.argv) else obstacle()
if reason:
    warnings.warn(f"fastgrad is installed in plain Python, with the same verdicts but slower: {reason}.", stacklevel=1)
    write_build(None, None)
    setup()
elif torch is None:
    setup(ext_modules=[Extension("fastgrad._C", [])], cmdclass={"build_ext": BuildWithoutTorch})
else:
    setup(ext_modules=[extension()], cmdclass={"build_ext": BuildOrSay})
