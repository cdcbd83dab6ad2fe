"""Plain Python in place of the compiled module: the same numbers and verdicts, and a warning."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastgrad.core import native
from fastgrad.core.plain import operators, patterns
from tests import processes
from tests.core.test_ops import samples

pytestmark = pytest.mark.skipif(not native.IS_NATIVE, reason="compares with the compiled module")


def copies(arguments: tuple[Any, ...]) -> list[Any]:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]


@pytest.mark.parametrize(("op", "arguments"), samples())
def test_operators_do_the_same(op: Any, arguments: tuple[Any, ...]) -> None:
    ours, theirs = copies(arguments), copies(arguments)
    found = getattr(operators, op.__name__)(*ours)
    expected = op(*theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)
    if expected is not None:
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("first", [0, 1, 3, 4, (1 << 34) + 2, 2**63 - 209])
def test_directions_are_the_same_bit_for_bit(first: int, halved: bool) -> None:
    ours, theirs = torch.empty(2, 200, dtype=torch.float64)
    operators.direction_(ours, -5, 1 << 33, first, halved)
    native.ops.direction_(theirs, -5, 1 << 33, first, halved)
    assert torch.equal(ours.view(torch.int64), theirs.view(torch.int64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_steps_are_the_same_bit_for_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    origin = torch.randn(5, 7, generator=generator, dtype=torch.float64).mul(1e3).to(dtype)
    chosen = torch.arange(0, 35, 3)
    ours, theirs = origin.clone(), origin.clone()
    operators.perturb_coordinates_(ours, origin, chosen, 1, 1e-6, 2.0**-6)
    native.ops.perturb_coordinates_(theirs, origin, chosen, 1, 1e-6, 2.0**-6)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, origin)
    others = torch.tensor([-1, 0, 6, ours.numel() * 2])
    operators.perturb_coordinates_(ours, origin, chosen[-2:], -1, 1e-6, 2.0**-6, others)
    native.ops.perturb_coordinates_(theirs, origin, chosen[-2:], -1, 1e-6, 2.0**-6, others)
    assert torch.equal(ours, theirs)
    operators.perturb_coordinate_(ours, origin, 5, -1, 1e-6, 2.0**-6, 3)
    torch.ops.fastgrad.perturb_coordinate_(theirs, origin, 5, -1, 1e-6, 2.0**-6, 3)
    assert torch.equal(ours, theirs)


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x.t().contiguous().t(),
    lambda x: x.new_zeros(5, 14)[:, ::2].copy_(x),
    lambda x: x.conj().clone().conj(),
    lambda x: x[0, 0].clone(),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_coordinates_are_perturbed_alike_in_each_layout(layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    origin = layout(torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=dtype))
    ours, theirs = origin.clone(memory_format=torch.preserve_format), origin.clone(memory_format=torch.preserve_format)
    origin = origin.resolve_conj().contiguous()
    size = operators.coordinate_count(origin)
    for coordinate in range(size):
        restored = torch.tensor([(coordinate + 1) % size, -1, size])
        for values, perturb in ((ours, operators.perturb_coordinates_), (theirs, native.ops.perturb_coordinates_)):
            perturb(values, origin, torch.tensor([coordinate]), 1, 0.25, 0.5, restored if size > 2 else None)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, origin)


class _Sizes(TorchDispatchMode):
    """Notes the size of the largest tensor that an operator has made, other than a view of `values`."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.memory, self.largest = values.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for made in found if isinstance(found, tuple | list) else (found,):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() != self.memory:
                self.largest = max(self.largest, made.untyped_storage().nbytes() // made.element_size())
        return found


@pytest.mark.parametrize("restored", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_other_coordinates_are_not_copied(dtype: torch.dtype, restored: int | None) -> None:
    values = torch.zeros(1000, dtype=dtype)
    with _Sizes(values) as sizes:
        operators.perturb_coordinate_(values, values, 3, 1, 0.25, 0.5, restored)
    assert sizes.largest < 10
    assert torch.view_as_real(values)[1, 1] == 0.25 if dtype.is_complex else values[3] == 0.25


@pytest.mark.parametrize("seed", range(8))
def test_patterns_are_colored_alike(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.rand(30, 30, generator=generator) < 0.02 * (seed + 1)
    dense = dense | dense.t()
    members = dense.nonzero()[:, 1].contiguous()
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), dense.sum(1).cumsum(0)])
    assert torch.equal(patterns.color(starts, members, 30), native.color(starts, members, 30))
    for most in (3, 30):
        assert torch.equal(patterns.star_color(starts, members, most), native.star_color(starts, members, most))
    for ours, theirs in zip(
        patterns.transpose(starts, members, 30), native.transpose(starts, members, 30), strict=True
    ):
        assert torch.equal(ours, theirs)


VERDICTS = """
import json, math, warnings
import torch
warnings.simplefilter("ignore", RuntimeWarning)
import fastgrad
from fastgrad.core import native
from fastgrad.tools.demo import ForgottenFactor

class Conjugated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * z
    @staticmethod
    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        return 2 * z * g  # should be conjugated

class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x
    @staticmethod
    def backward(ctx, g):
        return 2 * g.clamp(-1, 1)

def tensor(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()

x, z, wide = tensor(4, 5), tensor(3, dtype=torch.complex128), tensor(200)
sparse = tensor(4, 5).detach().relu().to_sparse().requires_grad_()
mutates = lambda x: (x.sin(), x.detach().add_(0))[0]
cases = [
    ("gradcheck", torch.sin, (x,), {}), ("gradcheck", ForgottenFactor.apply, (x,), {}),
    ("gradcheck", Conjugated.apply, (z,), {}), ("gradcheck", torch.linalg.vector_norm, (z,), {}),
    ("gradcheck", Clamped.apply, (x,), {}), ("gradcheck", Clamped.apply, (wide,), {"fast_mode": True}),
    ("gradcheck", torch.matmul, (x, tensor(5, 3)), {}), ("gradgradcheck", torch.tanh, (x,), {}),
    ("gradgradcheck", torch.matmul, (x, tensor(5, 3)), {}), ("gradcheck", torch.cumsum, (wide, 0), {}),
    ("gradcheck", torch.exp, (wide,), {"fast_mode": True}),
    ("gradcheck", torch.abs, (torch.zeros(3).double().requires_grad_(),), {}),
    ("gradcheck", lambda s: s.to_dense().square(), (sparse,), {"masked": True}),
    ("gradcheck", torch.sin, (x,), {"check_forward_ad": True}),
    ("gradcheck", ForgottenFactor.apply, (wide,), {"engine": "compressed"}),
    ("gradcheck", mutates, (x,), {}),
    ("gradcheck", torch.sin, (tensor(3, dtype=torch.float32),), {}),
    ("gradgradcheck", ForgottenFactor.apply, (x,), {}), ("gradcheck", torch.sort, (x,), {}),
]
found = []
for name, func, inputs, options in cases:
    try:
        getattr(fastgrad, name)(func, inputs, **options)
        found.append("passed")
    except Exception as error:
        # The rest of the text depends on the engine, which depends on time.
        found.append(f"{type(error).__name__}: {str(error).split(' (residual')[0].splitlines()[0].partition(':')[0]}")
print(json.dumps([native.IS_NATIVE, found]))
"""


def run(code: str, choice: str) -> subprocess.CompletedProcess[str]:
    return processes.run(code, FASTGRAD_NATIVE=choice)


def test_verdicts_and_their_first_lines_are_the_same() -> None:
    import json

    results = [run(VERDICTS, choice) for choice in ("0", "1")]
    assert [result.returncode for result in results] == [0, 0], results[0].stderr + results[1].stderr
    (is_native, plain), (is_compiled, compiled) = (json.loads(result.stdout) for result in results)
    assert (is_native, is_compiled) == (False, True)
    assert plain == compiled
    assert {"passed"} < set(plain)


def test_it_says_once_that_it_is_slower() -> None:
    result = run("import fastgrad, fastgrad.functional", "0")
    assert result.returncode == 0
    assert result.stderr.count("RuntimeWarning: fastgrad runs in plain Python") == 1
    assert run("import fastgrad", "1").stderr == ""


def test_another_choice_is_one_sentence() -> None:
    last = run("import fastgrad", "yes").stderr.strip().splitlines()[-1]
    assert last == "ImportError: FASTGRAD_NATIVE must be auto, 0 or 1, got 'yes'."


def test_what_was_installed_without_it_runs_unless_it_is_demanded() -> None:
    fake = (
        "import sys, types\nbuild = types.ModuleType('fastgrad._build')\nbuild.TORCH = build.CUDA = None\n"
        "sys.modules['fastgrad._build'] = build\nimport fastgrad\n"
        "from fastgrad.core import native\nprint(native.IS_NATIVE)"
    )
    assert run(fake, "auto").stdout.strip() == "False"
    assert "compiled module is missing" in run(fake, "1").stderr
