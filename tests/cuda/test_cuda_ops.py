"""Every operator gives the same on CPU and CUDA, bit for bit (sums up to rounding), and never waits for the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad  # noqa: F401  (registers the operators)

ops = torch.ops.fastgrad
STEP = 2.0**-24
BLOCK, MAX_BLOCKS = 256, 4096
"""As in csrc/cuda/launch.h."""
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3, MAX_BLOCKS * BLOCK + 1]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.view(-1, 1 if x.numel() % 2 else 2).t().contiguous().t(),
    "gapped": lambda x: torch.stack([x, x], -1)[..., 0],
}


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(*shape, dtype=torch.complex128 if dtype.is_complex else torch.float64, generator=generator).to(
        dtype
    )


def origins(dtype: torch.dtype, size: int) -> Tensor:
    """Random values and special ones."""
    values = numbers(dtype, size)
    special = torch.tensor([1e4, -0.0, math.inf, math.nan, 1e-3])[: max(0, size - 1)]
    values[: special.numel()] = special.to(values.real.dtype)
    return values


def real_coordinates(dtype: torch.dtype, size: int) -> int:
    return size * (2 if dtype.is_complex else 1)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Makes torch raise if it waits for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def on(device: torch.device, value: Any) -> Any:
    """A copy with the same strides."""
    if not isinstance(value, Tensor):
        return value
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return copy.copy_(value)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether values are equal, including signs of zeros; all NaNs are equal."""
    pair = [torch.view_as_real(value) if value.is_complex() else value for value in (left, right)]
    nan = [value.isnan() for value in pair]
    equal = torch.equal(*nan) and torch.equal(*(value.signbit() & ~value.isnan() for value in pair))
    return equal and torch.equal(*(value.masked_fill(where, 0) for value, where in zip(pair, nan, strict=True)))


def run_both(op: Any, arguments: tuple[Any, ...], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator was given, and what it returned, from both devices."""
    found = []
    for place in (torch.device("cpu"), device):
        own = tuple(on(place, value) for value in arguments)
        if place.type == "cpu":
            result = op(*own)
        else:
            torch.cuda.synchronize(place)
            with no_waiting():
                result = op(*own)
        tensors = [value for value in (*own, result) if isinstance(value, Tensor)]
        assert all(value.device == place for value in tensors)
        found.append([value.cpu() for value in tensors])
    return found[0], found[1]


def assert_same_bits(op: Any, arguments: tuple[Any, ...], device: torch.device) -> None:
    for cpu, cuda in zip(*run_both(op, arguments, device), strict=True):
        assert same_bits(cpu, cuda)


def assert_close(op: Any, arguments: tuple[Any, ...], device: torch.device) -> None:
    for cpu, cuda in zip(*run_both(op, arguments, device), strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=1e-11, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_perturb(size: int, dtype: torch.dtype, layout: str, device: torch.device) -> None:
    x = LAYOUTS[layout](origins(dtype, size))
    origin = x.clone(memory_format=torch.contiguous_format)
    n = real_coordinates(dtype, size)
    chosen = torch.arange(0, n, 3)
    for sign in (1, -1, 0):
        for eps in (0.25, 1e-6):
            step = sign, eps, STEP
            for coordinate in {0, n // 2, n - 1} if n else ():
                assert_same_bits(ops.perturb_coordinate_, (x, origin, coordinate, *step), device)
                if n > 1:
                    other = (coordinate + 1) % n
                    assert_same_bits(ops.perturb_coordinate_, (x + 7, origin, coordinate, *step, other), device)
            assert_same_bits(ops.perturb_coordinates_, (x, origin, chosen, *step), device)
            restored = torch.tensor([-1, *range(1, n, 3), n])
            assert_same_bits(ops.perturb_coordinates_, (x + 7, origin, chosen, *step, restored), device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_displace_and_realize(size: int, dtype: torch.dtype, layout: str, device: torch.device) -> None:
    x = LAYOUTS[layout](origins(dtype, size))
    origin = x.clone(memory_format=torch.contiguous_format)
    n = real_coordinates(dtype, size)
    steps = numbers(torch.float64, 2 * n)[::2]
    for scale in (1.0, -0.5, 0.0):
        assert_same_bits(ops.displace_, (x, origin, steps, scale), device)
    assert_same_bits(ops.realize_, (*torch.zeros(2, n).double().unbind(), origin, 3, 1, 5, 1e-3, STEP), device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_flatten_unflatten_and_difference(size: int, dtype: torch.dtype, layout: str, device: torch.device) -> None:
    x = LAYOUTS[layout](origins(dtype, size))
    n = real_coordinates(dtype, size)
    for stride in (1, 2):
        out = numbers(torch.float64, stride * n)[::stride]
        assert_same_bits(ops.flatten_, (out, x), device)
        assert_same_bits(ops.unflatten_, (x, out), device)
        for of_origin in DTYPES:
            origin = origins(of_origin, 7)
            for coordinate in (0, 2, 6):
                assert_same_bits(ops.central_difference_, (out, x, origin, coordinate, 1e-3, STEP), device)


@pytest.mark.parametrize("size", SIZES)
def test_direction(size: int, device: torch.device) -> None:
    for stride, halved in ((1, False), (3, True)):
        out = torch.zeros(stride * size, dtype=torch.float64)[::stride]
        assert_same_bits(ops.direction_, (out, 2**40 + 5, 3, 2**33 + 1, halved), device)


@pytest.mark.parametrize("size", SIZES)
def test_richardson_and_decompress(size: int, device: torch.device) -> None:
    values = [origins(torch.float64, size).roll(k) for k in range(7)]
    assert_same_bits(ops.richardson_, (*values, 1e-3, 2.0**-52), device)
    positions = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    for subtrahend in (None, values[2]):
        arguments = values[0], values[1], subtrahend, positions, torch.arange(0, size, 2)
        assert_same_bits(ops.decompress_, arguments, device)


@pytest.mark.parametrize("size", SIZES)
def test_project_entries(size: int, device: torch.device) -> None:
    vector, entries = numbers(torch.float64, 13), numbers(torch.float64, size)
    sources, targets = torch.arange(size) % 13, torch.arange(size) * 3 % 17
    for squares in (None, torch.zeros(17, dtype=torch.float64)):
        arguments = torch.zeros(17, dtype=torch.float64), squares, vector, sources, targets, entries
        assert_close(ops.project_entries_, arguments, device)


@pytest.mark.parametrize("count", [1, 3, 10])
@pytest.mark.parametrize("size", SIZES)
def test_dots(size: int, count: int, device: torch.device) -> None:
    rows, vector = numbers(torch.float64, count, size), numbers(torch.float64, size)
    if size > 1:
        vector[1], rows[0, 1] = 0.0, math.nan
    assert_close(ops.dots, (rows, vector), device)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (3, 31), (700, 2), (9, 33), (2, 70_000), (40, 1000)])
def test_project_rows(shape: tuple[int, int], transposed: bool, device: torch.device) -> None:
    rows = numbers(torch.float64, *shape)
    rows = rows.t().contiguous().t() if transposed else rows
    cotangents = numbers(torch.float64, 3, 2 * shape[0] + 1)
    sums, squares = numbers(torch.float64, 3, shape[1] + 4), torch.zeros(3, shape[1] + 4, dtype=torch.float64)
    assert_close(ops.project_rows_, (sums, squares, cotangents, rows, 1, 2, 3), device)


@pytest.mark.parametrize("complex_entries", [False, True])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1, 2), (31, 66), (33, 62), (700, 2), (2, 70_000), (1500, 1600)])
def test_compare(shape: tuple[int, int], complex_entries: bool, device: torch.device) -> None:
    numerical = numbers(torch.float64, *shape)
    analytical = numerical.clone()
    analytical.view(-1)[::7] *= 1.25  # many tie for the worst
    unheard = analytical.clone()
    unheard.view(-1)[5:6] = math.nan  # and the sums are not finite
    for a in (analytical, unheard):
        for n in (numerical, numerical.t().contiguous().t()):
            assert_close(ops.compare, (a, n, 1e-5, 1e-3, complex_entries, False), device)


def test_sums_are_the_same_every_time(device: torch.device) -> None:
    analytical, numerical = (numbers(torch.float64, 900, 1100 + k)[:, :1100].to(device) for k in range(2))
    vector = numerical[0].contiguous()
    compared = ops.compare(analytical, numerical, 1e-5, 1e-3, False, False)
    dots = ops.dots(analytical.contiguous(), vector)
    entries, targets = analytical.reshape(-1), torch.arange(analytical.numel(), device=device) ** 2 % 17

    def projected() -> Tensor:
        sums = torch.zeros(17, dtype=torch.float64, device=device)
        ops.project_entries_(sums, None, vector, targets, targets, entries)
        return sums

    along = projected()
    for _ in range(5):
        assert torch.equal(projected(), along)
        assert torch.equal(ops.compare(analytical, numerical, 1e-5, 1e-3, False, False), compared)
        assert torch.equal(ops.dots(analytical.contiguous(), vector), dots)


def test_runs_on_the_current_stream(device: torch.device) -> None:
    x = torch.zeros(1 << 20, dtype=torch.float64, device=device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # work on other streams overtakes it
        x.fill_(3.0)
        out = torch.empty_like(x)
        ops.flatten_(out, x)
    stream.synchronize()
    assert bool((out == 3.0).all())


def test_tensors_on_several_devices(device: torch.device) -> None:
    gradient = numbers(torch.float32, 3, 4).to(device)
    row = torch.zeros(12, dtype=torch.float64)
    ops.flatten_(row, gradient)
    assert torch.equal(row, gradient.cpu().double().view(-1))
    ops.unflatten_(gradient, 2 * row)
    assert torch.equal(gradient.cpu().double().view(-1), 2 * row)
    origin = torch.tensor([0.5], dtype=torch.float64, device=device)
    column = row.clone()
    ops.central_difference_(column, torch.zeros(12), origin, 0, 0.25, STEP)
    torch.testing.assert_close(column, row / 0.5)
    with pytest.raises(RuntimeError, match="compare: all tensors must be on one device"):
        ops.compare(torch.zeros(1, 1).double().to(device), torch.zeros(1, 1).double(), 0.0, 0.0, False, False)
