"""Every operator against an independent oracle: CPU kernel, plain ATen kernel, Meta, schema."""

from __future__ import annotations

import contextlib
import importlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgrad.core.random import direction  # registers the operators, too

ops = torch.ops.fastgrad
REAL = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*REAL, torch.complex128, torch.complex64]
STEP = 2.0**-24
KERNELS = ["CPU", "CompositeExplicitAutograd"]


def call(kernel: str, op: Any, *arguments: Any) -> Any:
    """Calls a kernel of an operator, for tensors on any device."""
    return op.default._op_dk(getattr(torch._C.DispatchKey, kernel), *arguments)


def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(*shape, dtype=torch.complex128 if dtype.is_complex else torch.float64, generator=generator)
    return values.to(dtype)


def coordinates(value: torch.Tensor) -> np.ndarray:
    """The oracle's real coordinates: element by element in Python."""
    flat = value.resolve_conj().to(torch.complex128 if value.is_complex() else torch.float64).reshape(-1).tolist()
    return np.array([part for v in flat for part in ((v.real, v.imag) if isinstance(v, complex) else (v,))])


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "gapped": lambda x: torch.stack([x, x], -1)[..., 0],
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_perturb_coordinate(kernel: str, layout: str, dtype: torch.dtype) -> None:
    origin = tensor(dtype, 3, 4)
    eps = 0.25
    for coordinate in (0, 5, coordinates(origin).size - 1):
        for sign in (-1, 1, 0):
            x = LAYOUTS[layout](origin.clone())
            if sign == 0:
                x.fill_(7.0)
            before = coordinates(x)
            call(kernel, ops.perturb_coordinate_, x, origin, coordinate, sign, eps, STEP)
            after = coordinates(x)
            value = coordinates(origin)[coordinate] + sign * eps
            expected = torch.tensor(value, dtype=torch.float64).to(dtype.to_real()).double().item()
            assert after[coordinate] == expected
            assert np.array_equal(np.delete(after, coordinate), np.delete(before, coordinate))


@pytest.mark.parametrize("kernel", KERNELS)
def test_perturb_takes_a_relative_step_where_eps_moves_nothing(kernel: str) -> None:
    origin = torch.tensor([1e12, 1.0], dtype=torch.float64)
    x = origin.clone()
    call(kernel, ops.perturb_coordinate_, x, origin, 0, 1, 1e-6, STEP)
    assert x[0].item() == 1e12 + 1e12 * STEP


@pytest.mark.parametrize("kernel", KERNELS)
def test_restoring_is_bit_for_bit(kernel: str) -> None:
    origin = torch.tensor([-0.0, math.nan, math.inf], dtype=torch.float64)
    x = torch.ones(3, dtype=torch.float64)
    for coordinate in range(3):
        call(kernel, ops.perturb_coordinate_, x, origin, coordinate, 0, 1e-6, STEP)
    assert torch.equal(x.view(torch.int64), origin.view(torch.int64))


def bits(value: torch.Tensor) -> np.ndarray:
    """The bytes of the real coordinates, in C order."""
    flat = (torch.view_as_real(value) if value.is_complex() else value).reshape(-1)
    return flat.contiguous().view(torch.uint8).numpy().reshape(flat.numel(), -1)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_perturb_coordinates_is_perturb_coordinate_for_each(kernel: str, layout: str, dtype: torch.dtype) -> None:
    origin = tensor(dtype, 3, 4)
    origin[0, 0], origin[0, 1], origin[0, 2], origin[0, 3] = 1e4, -0.0, math.inf, math.nan
    count = coordinates(origin).size
    for chosen in ([], [0], [count - 1], [0, 2, 3, 5, 6, count - 1], list(range(count))):
        for sign in (-1, 1, 0):
            for eps in (0.25, 1e-6):
                start = LAYOUTS[layout](origin.clone())
                if sign == 0:
                    start.fill_(7.0)
                one, many = LAYOUTS[layout](start.clone()), LAYOUTS[layout](start.clone())
                for coordinate in chosen:
                    call(kernel, ops.perturb_coordinate_, one, origin, coordinate, sign, eps, STEP)
                arguments = (torch.tensor(chosen, dtype=torch.int64), sign, eps, STEP)
                call(kernel, ops.perturb_coordinates_, many, origin, *arguments)
                assert np.array_equal(bits(many), bits(one))
                untouched = np.setdiff1d(np.arange(count), chosen)
                assert np.array_equal(bits(many)[untouched], bits(start)[untouched])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_another_coordinate_is_restored_in_the_same_call(kernel: str, layout: str, dtype: torch.dtype) -> None:
    origin = tensor(dtype, 3, 4)
    origin[0, 0], origin[0, 1], origin[0, 2], origin[0, 3] = 1e4, -0.0, math.inf, math.nan
    count = coordinates(origin).size
    for restored in (0, 1, 3, count - 1):
        for coordinate in {1, 2, count - 1} - {restored}:
            start = LAYOUTS[layout](origin.clone().fill_(7.0))
            together, one_by_one, listed = (LAYOUTS[layout](start.clone()) for _ in range(3))
            call(kernel, ops.perturb_coordinate_, one_by_one, origin, restored, 0, 0.25, STEP)
            call(kernel, ops.perturb_coordinate_, one_by_one, origin, coordinate, -1, 0.25, STEP)
            call(kernel, ops.perturb_coordinate_, together, origin, coordinate, -1, 0.25, STEP, restored)
            assert np.array_equal(bits(together), bits(one_by_one))
            others = torch.tensor([-1, restored, count, 2**62])  # coordinates outside are skipped
            arguments = (torch.tensor([coordinate]), -1, 0.25, STEP, others)
            call(kernel, ops.perturb_coordinates_, listed, origin, *arguments)
            assert np.array_equal(bits(listed), bits(one_by_one))


def test_perturb_coordinates_of_conjugate_and_negative_views() -> None:
    z = tensor(torch.complex128, 5)
    for view in (lambda t: t.conj(), lambda t: t.conj().imag):
        memory = z.clone()
        x = view(memory)
        origin = x.resolve_conj().resolve_neg().clone()
        expected = origin.clone()
        chosen = torch.tensor([1, 4])
        for coordinate in chosen.tolist():
            ops.perturb_coordinate_(expected, origin, coordinate, 1, 0.25, STEP)
        ops.perturb_coordinates_(x, origin, chosen, 1, 0.25, STEP)
        assert np.array_equal(coordinates(x.resolve_neg()), coordinates(expected))
        ops.perturb_coordinates_(x, origin, chosen, 0, 0.25, STEP)
        assert torch.equal(memory, z)


@pytest.mark.parametrize("kernel", KERNELS)
def test_many_coordinates_and_entries_use_all_threads_and_agree(kernel: str) -> None:
    origin = tensor(torch.float64, 200, 500).t().contiguous().t().contiguous()
    chosen = torch.arange(1, origin.numel(), 2)
    positions = torch.randperm(origin.numel(), generator=torch.Generator().manual_seed(0))
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            x = origin.clone().t().contiguous().t()
            call(kernel, ops.perturb_coordinates_, x, origin, chosen, -1, 1e-6, STEP)
            values = torch.zeros(origin.numel(), dtype=torch.float64)
            call(kernel, ops.decompress_, values, origin.view(-1), x.reshape(-1), positions, chosen)
            found.append((x, values))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    expected = origin.view(-1).clone()
    expected[1::2] -= 1e-6
    assert torch.equal(found[0][0].reshape(-1), expected)


N = 1 << 19
LARGE = [torch.linspace(0.5, 1.5, N, dtype=torch.float64).roll(k) for k in range(7)]
BLOCK = LARGE[0].view(8, -1)
INDICES = torch.arange(N)
SUMS, SQUARES = torch.zeros(2, 2, BLOCK.shape[1], dtype=torch.float64)
WEIGHTS = torch.ones(2, 8, dtype=torch.float64)
SHARED: dict[str, Callable[[], Any]] = {
    "direction_": lambda: ops.direction_(LARGE[0], 0, 0, 0, False),
    "displace_": lambda: ops.displace_(*LARGE[:3], 1e-6),
    "realize_": lambda: ops.realize_(*LARGE[:3], 0, 1, 2, 1e-6, STEP),
    "perturb_coordinates_": lambda: ops.perturb_coordinates_(*LARGE[:2], INDICES, 1, 1e-6, STEP),
    "flatten_": lambda: ops.flatten_(*LARGE[:2]),
    "decompress_": lambda: ops.decompress_(*LARGE[:3], INDICES, INDICES),
    "richardson_": lambda: ops.richardson_(*LARGE, 1e-6, 2.0**-52),
    "dots": lambda: ops.dots(BLOCK, BLOCK[0]),
    "compare": lambda: ops.compare(BLOCK, BLOCK, 1e-5, 1e-3, False, False),
    "project_rows_": lambda: ops.project_rows_(SUMS, SQUARES, WEIGHTS, BLOCK, 0, 1, 0),
}


def cpu_ticks() -> dict[str, int]:
    """User time of each thread of this process (Linux)."""
    ticks = {}
    for thread in Path("/proc/self/task").iterdir():
        # Threads of earlier tests may end while they are read.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            ticks[thread.name] = int((thread / "stat").read_text().rpartition(")")[2].split()[11])
    return ticks


@pytest.mark.parametrize("name", SHARED)
def test_threads_share_a_large_block(name: str) -> None:
    threads = torch.get_num_threads()
    before = cpu_ticks()
    working = 0
    try:
        torch.set_num_threads(2)
        end = time.monotonic() + 20
        while working < 2 and time.monotonic() < end:
            SHARED[name]()
            # More than one or two ticks: a thread that waits for work uses these.
            working = sum(ticks > before.get(thread, 0) + 2 for thread, ticks in cpu_ticks().items())
    finally:
        torch.set_num_threads(threads)
    assert working >= 2


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("subtracted", [True, False])
def test_decompress(kernel: str, subtracted: bool) -> None:
    compressed = torch.tensor([1.5, -0.0, math.inf, 4.0], dtype=torch.float64)
    subtrahend = torch.tensor([0.5, 0.0, math.inf, math.nan], dtype=torch.float64) if subtracted else None
    positions = torch.tensor([3, 0, 1, 2, 0, 3, 1])
    for entries in ([], [1], [6, 2, 3, 0]):
        values = torch.full((7,), 9.0, dtype=torch.float64)
        call(
            kernel, ops.decompress_, values, compressed, subtrahend, positions, torch.tensor(entries, dtype=torch.int64)
        )
        for e, value in enumerate(values):
            expected = torch.tensor(9.0, dtype=torch.float64)
            if e in entries:
                expected = compressed[positions[e]]
                if subtrahend is not None:
                    expected = expected - subtrahend[positions[e]]
            assert math.isnan(value) if expected.isnan() else np.array_equal(bits(value), bits(expected))


@pytest.mark.parametrize("kernel", KERNELS)
def test_project_entries(kernel: str) -> None:
    vector, entries = tensor(torch.float64, 4), tensor(torch.float64, 6)
    sources, targets = torch.tensor([3, 0, 0, 1, 3, 3]), torch.tensor([1, 1, 0, 2, 2, 1])
    dense = torch.zeros(5, 4, dtype=torch.float64).index_put_((targets, sources), entries, accumulate=True)
    for squares in (None, torch.ones(5, dtype=torch.float64)):
        sums = torch.full((5,), 2.0, dtype=torch.float64)
        call(kernel, ops.project_entries_, sums, squares, vector, sources, targets, entries)
        torch.testing.assert_close(sums, 2 + dense @ vector)
    terms = vector[sources] * entries
    torch.testing.assert_close(squares, torch.ones(5).double().index_add_(0, targets, terms**2))
    nothing = torch.empty(0, dtype=torch.int64)
    call(kernel, ops.project_entries_, sums, None, vector, nothing, nothing, entries[:0])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128])
def test_displace(kernel: str, layout: str, dtype: torch.dtype) -> None:
    origin = tensor(dtype, 3, 4)
    origin[0, 0] = 1e9
    x = LAYOUTS[layout](origin.clone())
    values = coordinates(origin)
    displacement = tensor(torch.float64, 2 * values.size)[::2]
    call(kernel, ops.displace_, x, origin, displacement, -0.5)
    expected = values.astype(np.float64) - 0.5 * displacement.numpy()
    np.testing.assert_allclose(coordinates(x), expected, rtol=1e-6 if dtype == torch.float32 else 1e-15)
    call(kernel, ops.displace_, x, origin, displacement, 0.0)
    assert torch.equal(x, origin)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128])
def test_realize(kernel: str, dtype: torch.dtype) -> None:
    origin = tensor(dtype, 3, 4)
    origin[0, 0], origin[0, 1] = 1e9, math.inf
    values = coordinates(origin)
    u = direction(values.size, 3, 1, 5)
    displacement, realized = torch.zeros_like(u), torch.zeros_like(u)
    call(kernel, ops.realize_, displacement, realized, origin, 3, 1, 5, 1e-3, STEP)
    finite = np.isfinite(values)
    steps = np.maximum(1e-3, STEP * np.abs(values.astype(np.float64)))
    np.testing.assert_allclose(displacement.numpy()[finite], (steps * u.numpy())[finite], rtol=1e-15)
    d = displacement.numpy()
    real = torch.view_as_real(origin).numpy().dtype if origin.is_complex() else origin.numpy().dtype
    width = lambda h: (values + h).astype(real).astype(float) - (values - h).astype(real).astype(float)  # noqa: E731
    with np.errstate(invalid="ignore"):
        expected = (8 * width(d / 2) - width(d)) / 6e-3
    np.testing.assert_allclose(realized.numpy()[finite], expected[finite], rtol=1e-12, atol=1e-12)
    assert realized.isfinite().all() == displacement.isfinite().all(), "an infinite coordinate has no width"


@pytest.mark.parametrize("kernel", KERNELS)
def test_dots(kernel: str) -> None:
    rows, vector = tensor(torch.float64, 3, 40000), tensor(torch.float64, 40000)
    vector[7] = 0
    rows[1, 7] = math.nan
    found = call(kernel, ops.dots, rows, vector)
    terms = rows.nan_to_num().numpy() * vector.numpy()
    np.testing.assert_allclose(found.numpy(), np.stack([terms.sum(1), np.abs(terms).sum(1)], 1), rtol=1e-10)
    assert found.isfinite().all(), "a zero silences its column"
    rows[1, 8] = math.nan
    assert found.shape == (3, 2)
    assert math.isnan(call(kernel, ops.dots, rows, vector)[1, 0])


@pytest.mark.parametrize("kernel", KERNELS)
def test_richardson(kernel: str) -> None:
    eps, x, u = 1e-3, 0.7, 1.25
    funcs = [math.exp, lambda t: 3 * t + 1, lambda t: abs(t - x), lambda t: float(t > x + 0.6e-3), lambda t: math.nan]
    slopes = [math.exp(x) * u, 3 * u, 0.0, None, math.nan]
    at = lambda h: torch.tensor([f(x + h * u) for f in funcs], dtype=torch.float64)  # noqa: E731
    derivative, noise = torch.zeros(2, len(funcs), dtype=torch.float64)
    noise[1] = 5.0
    arguments = [at(0), at(eps), at(-eps), at(eps / 2), at(-eps / 2)]
    call(kernel, ops.richardson_, derivative, noise, *arguments, eps, 2.0**-52)
    for found, wanted in zip(derivative.tolist(), slopes, strict=True):
        assert wanted is None or found == pytest.approx(wanted, rel=1e-11, abs=1e-11, nan_ok=True)
    smooth, kept, kink, jump, nan = noise.tolist()
    # Truncation of D(h) alone: h^2 u^3 times the third derivative, over 8.
    assert smooth == pytest.approx(eps**2 * u**3 * math.exp(x) / 8, rel=1e-2)
    assert kept == 5.0
    assert kink == pytest.approx(u, rel=1e-9), "invisible in D, which is zero at both steps"
    assert jump >= 1 / (2 * eps)
    assert math.isnan(nan)


@pytest.mark.parametrize("kernel", KERNELS)
def test_direction(kernel: str) -> None:
    out = torch.zeros(2001, dtype=torch.float64)
    call(kernel, ops.direction_, out[::2], 3, 1, 7, False)
    u = out[::2]
    assert out[1::2].count_nonzero() == 0
    assert bool(((u.abs() >= 0.5) & (u.abs() < 1.5)).all())
    assert abs(u.mean()) < 0.1
    tail = torch.empty(1000, dtype=torch.float64)
    ops.direction_(tail, 3, 1, 8, False)
    assert torch.equal(u[1:], tail), "a component depends on its coordinate alone"
    halved = torch.empty(1001, dtype=torch.float64)
    call(kernel, ops.direction_, halved, 3, 1, 7, True)
    assert torch.equal(halved[halved != 0], u[halved != 0])
    assert 400 < int((halved == 0).sum()) < 600


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_flatten_and_unflatten(kernel: str, layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](tensor(dtype, 3, 4))
    expected = coordinates(x)
    out = torch.full((2 * expected.size,), -1.0, dtype=torch.float64)
    call(kernel, ops.flatten_, out[::2], x)
    assert np.array_equal(out[::2].numpy(), expected)
    assert bool((out[1::2] == -1).all())
    back = LAYOUTS[layout](torch.zeros_like(x))
    call(kernel, ops.unflatten_, back, out[::2])
    assert torch.equal(back, x)


def test_flatten_resolves_conjugate_and_negative_views() -> None:
    z = tensor(torch.complex128, 5)
    out = torch.empty(10, dtype=torch.float64)
    ops.flatten_(out, z.conj())
    assert np.array_equal(out.numpy(), coordinates(z.conj().resolve_conj()))
    imaginary = torch.empty(5, dtype=torch.float64)
    ops.flatten_(imaginary, z.conj().imag)
    assert torch.equal(imaginary, -z.imag)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128])
def test_central_difference(kernel: str, dtype: torch.dtype) -> None:
    origin = torch.tensor([0.3, -1e9, math.inf], dtype=torch.float64)
    plus, minus = tensor(dtype, 3, 2), -tensor(dtype, 3, 2).t().contiguous().t()
    for coordinate, width in ((0, (0.3 + 1e-6) - (0.3 - 1e-6)), (1, (-1e9 + 1e-6) - (-1e9 - 1e-6)), (2, 2e-6)):
        column = torch.empty(2 * coordinates(plus).size, dtype=torch.float64)[::2]
        ops.flatten_(column, plus)
        call(kernel, ops.central_difference_, column, minus, origin, coordinate, 1e-6, STEP)
        np.testing.assert_allclose(column.numpy(), (coordinates(plus) - coordinates(minus)) / width, rtol=1e-14)


def compare_oracle(a: np.ndarray, n: np.ndarray, atol: float, rtol: float, equal_nan: bool) -> dict[str, float]:
    """A plain loop over the entries that compares them by torch.isclose."""
    result = {"mismatches": 0.0, "absolute": 0.0, "relative": 0.0, "excess": -1.0}
    for x, y in zip(a.ravel(), n.ravel(), strict=True):
        close = torch.isclose(torch.tensor(x), torch.tensor(y), atol=atol, rtol=rtol, equal_nan=equal_nan).item()
        result["mismatches"] += not close
        with np.errstate(invalid="ignore"):
            error = abs(x - y)
        if x == y or not np.isfinite(error):
            continue
        result["absolute"] = max(result["absolute"], error)
        if abs(y) > 0 and np.isfinite(error / abs(y)):
            result["relative"] = max(result["relative"], error / abs(y))
    return result


values = st.floats(width=32, allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 1.0, 1.0005, -1.0, 2.0])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_nan_beside_an_infinity_is_a_nan(kernel: str) -> None:
    analytical, numerical = (torch.tensor([[re, math.nan]], dtype=torch.float64) for re in (0.0, math.inf))
    assert call(kernel, ops.compare, analytical, numerical, 1e-5, 1e-3, True, True)[0] == 0
    assert call(kernel, ops.compare, analytical, numerical, 1e-5, 1e-3, True, False)[0] == 1


@settings(max_examples=150, deadline=None)
@given(data=st.data(), complex_entries=st.booleans(), equal_nan=st.booleans())
def test_compare_against_the_oracle(data: st.DataObject, complex_entries: bool, equal_nan: bool) -> None:
    rows = data.draw(st.integers(0, 4))
    columns = data.draw(st.integers(0, 5)) * (2 if complex_entries else 1)
    size = rows * columns
    flat = [data.draw(st.lists(values, min_size=size, max_size=size)) for _ in range(2)]
    a, n = (torch.tensor(v, dtype=torch.float64).reshape(rows, columns) for v in flat)
    atol, rtol = data.draw(st.sampled_from([(1e-5, 1e-3), (0.0, 0.0), (1.0, 0.0), (0.0, 0.5)]))

    def entries(block: torch.Tensor) -> np.ndarray:
        return torch.view_as_complex(block.reshape(rows, -1, 2)).numpy() if complex_entries else block.numpy()

    if size:
        expected = compare_oracle(entries(a), entries(n), atol, rtol, equal_nan)
    else:
        expected = {"mismatches": 0.0, "absolute": 0.0, "relative": 0.0}
    results = []
    for kernel in KERNELS:
        for numerical in (n, n.t().contiguous().t()):
            fields = call(kernel, ops.compare, a, numerical, atol, rtol, complex_entries, equal_nan)
            assert fields[0].item() == expected["mismatches"]
            assert fields[4].item() == pytest.approx(expected["absolute"], rel=1e-12)
            assert fields[5].item() == pytest.approx(expected["relative"], rel=1e-12)
            results.append(fields[1].item())
    assert results == pytest.approx([results[0]] * len(results), rel=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("complex_entries", [False, True])
def test_compare_finds_the_worst_entry_and_sums_the_wrong_ones(kernel: str, complex_entries: bool) -> None:
    width = 2 if complex_entries else 1
    numerical = torch.ones(7, 100 * width, dtype=torch.float64)
    analytical = numerical.clone()
    analytical[3, 40 * width] = 2.0
    analytical[6, 97 * width] = -5.0
    fields = call(kernel, ops.compare, analytical, numerical, 1e-5, 1e-3, complex_entries, False).tolist()
    assert fields[0] == 2
    assert fields[2:4] == [6, 97]
    assert fields[4] == pytest.approx(6.0)
    if not complex_entries:
        assert fields[6:] == pytest.approx([29.0, 2.0, -3.0, 0.0])


@pytest.mark.parametrize("kernel", KERNELS)
def test_project_rows(kernel: str) -> None:
    rows, cotangents = tensor(torch.float64, 5, 7), tensor(torch.float64, 5, 2).t()
    sums, squares = torch.ones(2, 7, dtype=torch.float64), torch.zeros(2, 14, dtype=torch.float64)[:, ::2]
    call(kernel, ops.project_rows_, sums, squares, cotangents, rows, 0, 1, 0)
    torch.testing.assert_close(sums, 1 + cotangents @ rows)
    torch.testing.assert_close(squares, cotangents**2 @ rows**2)
    sums = torch.zeros(2, 7, dtype=torch.float64)
    call(kernel, ops.project_rows_, sums, squares, cotangents, rows[:2, :3], 1, 3, 4)
    torch.testing.assert_close(sums[:, 4:], cotangents[:, [1, 4]] @ rows[:2, :3])
    assert sums[:, :4].count_nonzero() == 0


def samples() -> list[Any]:
    x = tensor(torch.complex128, 3)
    real = tensor(torch.float64, 6)
    block = tensor(torch.float64, 2, 6)
    return [
        pytest.param(ops.perturb_coordinate_, (x.clone(), x, 1, 1, 1e-6, STEP, 4), id="perturb_coordinate_"),
        pytest.param(
            ops.perturb_coordinates_,
            (x.clone(), x, torch.tensor([1, 4]), 1, 1e-6, STEP, torch.tensor([2])),
            id="perturb_coordinates_",
        ),
        pytest.param(
            ops.decompress_,
            (real.clone(), real.clone(), real.clone(), torch.arange(6), torch.tensor([1, 4])),
            id="decompress_",
        ),
        pytest.param(
            ops.project_entries_,
            (real.clone(), real.clone(), real.clone(), torch.tensor([1, 4]), torch.tensor([0, 0]), real[:2].clone()),
            id="project_entries_",
        ),
        pytest.param(ops.displace_, (x.clone(), x, real, 0.5), id="displace_"),
        pytest.param(ops.realize_, (real.clone(), real.clone(), x, 3, 1, 2, 1e-6, STEP), id="realize_"),
        pytest.param(ops.dots, (block, block[0].clone()), id="dots"),
        pytest.param(ops.richardson_, (real.clone(), real.clone(), *[real] * 5, 1e-6, 2.0**-52), id="richardson_"),
        pytest.param(ops.direction_, (real.clone(), 0, 1, 2, True), id="direction_"),
        pytest.param(ops.flatten_, (real.clone(), x), id="flatten_"),
        pytest.param(ops.unflatten_, (x.clone(), real), id="unflatten_"),
        pytest.param(ops.central_difference_, (real.clone(), x, x, 0, 1e-6, STEP), id="central_difference_"),
        pytest.param(ops.compare, (block, block + 1, 1e-5, 1e-3, True, False), id="compare"),
        pytest.param(
            ops.project_rows_,
            (block.clone(), block.clone(), tensor(torch.float64, 2, 2), block, 0, 1, 0),
            id="project_rows_",
        ),
    ]


@pytest.mark.parametrize(("op", "arguments"), samples())
def test_opcheck(op: Any, arguments: tuple[Any, ...]) -> None:
    torch.library.opcheck(op.default, arguments)


def test_every_operator_has_all_its_kernels() -> None:
    built_with_cuda = importlib.import_module("fastgrad._build").CUDA is not None
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fastgrad::")]
    assert len(names) == len(samples())
    for name in names:
        for kernel in (*KERNELS, "Meta", *["CUDA"] * built_with_cuda):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, kernel), f"{name} has no {kernel} kernel"


@pytest.mark.parametrize(
    ("call_op", "message"),
    [
        (lambda: ops.direction_(torch.zeros(2), 0, 0, 0, False), "direction_: out must be a float64 tensor"),
        (lambda: ops.flatten_(torch.zeros(2).double(), torch.zeros(3)), "flatten_: out must have 3 elements"),
        (lambda: ops.unflatten_(torch.zeros(3, dtype=torch.int64), torch.zeros(3).double()), "floating or complex"),
        (
            lambda: ops.displace_(torch.zeros(2), torch.zeros(2), torch.zeros(3).double(), 1.0),
            "displacement must have 2 elements",
        ),
        (
            lambda: ops.richardson_(*(torch.zeros(size).double() for size in (2, 2, 2, 2, 2, 2, 3)), 1.0, 0.0),
            "half_minus must be contiguous with as many elements as derivative, 2, got 3",
        ),
        (
            lambda: ops.compare(torch.zeros(1, 3).double(), torch.zeros(1, 3).double(), 0.0, 0.0, True, False),
            "even number of columns, got 3",
        ),
        (
            lambda: ops.perturb_coordinate_(torch.zeros(2), torch.zeros(3), 0, 1, 1.0, 0.0),
            "origin must be a contiguous snapshot of x",
        ),
        (
            lambda: ops.perturb_coordinates_(torch.zeros(2), torch.zeros(3), torch.arange(2), 1, 1.0, 0.0),
            "perturb_coordinates_: origin must be a contiguous snapshot of values",
        ),
        (
            lambda: ops.perturb_coordinates_(torch.zeros(2), torch.zeros(2), torch.zeros(1), 1, 1.0, 0.0),
            "coordinates must be a contiguous int64 tensor with one dimension, got Float with 1",
        ),
        (
            lambda: ops.perturb_coordinates_(torch.zeros(4), torch.zeros(4), torch.arange(4)[::2], 1, 1.0, 0.0),
            "coordinates must be a contiguous int64 tensor",
        ),
        (
            lambda: ops.perturb_coordinates_(torch.zeros(2), torch.zeros(2), torch.tensor([1, 2]), 1, 1.0, 0.0),
            r"coordinates must be in \[0, 2\), got 1 to 2",
        ),
        (
            lambda: ops.perturb_coordinates_(torch.zeros(2), torch.zeros(2), torch.tensor([-1]), 1, 1.0, 0.0),
            r"coordinates must be in \[0, 2\), got -1 to -1",
        ),
        (
            lambda: ops.perturb_coordinates_(torch.zeros(2), torch.zeros(2), torch.tensor([1, 1]), 1, 1.0, 0.0),
            "coordinates must be strictly increasing",
        ),
        (
            lambda: ops.perturb_coordinates_(torch.zeros(2), torch.zeros(2), torch.arange(2), 2, 1.0, 0.0),
            "sign must be -1, 0 or 1, got 2",
        ),
        (
            lambda: ops.perturb_coordinate_(torch.zeros(2), torch.zeros(2), 0, 1, 1.0, 0.0, 2),
            r"restored must be another coordinate in \[0, 2\), got 2",
        ),
        (
            lambda: ops.perturb_coordinate_(torch.zeros(2), torch.zeros(2), 1, 1, 1.0, 0.0, 1),
            r"restored must be another coordinate in \[0, 2\), got 1",
        ),
        (
            lambda: ops.perturb_coordinates_(
                torch.zeros(2), torch.zeros(2), torch.arange(1), 1, 1.0, 0.0, torch.zeros(1)
            ),
            "restored must be a contiguous int64 tensor with one dimension, got Float with 1",
        ),
        (
            lambda: ops.decompress_(torch.zeros(2), *[torch.zeros(2).double()] * 2, torch.arange(2), torch.arange(2)),
            "decompress_: values must be a float64 tensor",
        ),
        (
            lambda: ops.decompress_(
                torch.zeros(4).double()[::2], torch.zeros(2).double(), None, torch.arange(2), torch.arange(2)
            ),
            "decompress_: values must be contiguous, got stride 2",
        ),
        (
            lambda: ops.decompress_(
                torch.zeros(2).double(), torch.zeros(2).double(), torch.zeros(3).double(), *[torch.arange(2)] * 2
            ),
            "subtrahend must have as many elements as compressed, 2, got 3",
        ),
        (
            lambda: ops.decompress_(*[torch.zeros(2).double()] * 3, torch.arange(3), torch.arange(2)),
            "positions must have as many elements as values, 2, got 3",
        ),
        (
            lambda: ops.decompress_(*[torch.zeros(2).double()] * 3, torch.arange(2), torch.arange(2).int()),
            "entries must be a contiguous int64 tensor with one dimension, got Int with 1",
        ),
        (
            lambda: ops.project_entries_(
                torch.zeros(4).double()[::2],
                None,
                torch.zeros(2).double(),
                *[torch.arange(2)] * 2,
                torch.zeros(2).double(),
            ),
            "project_entries_: sums must be contiguous, got stride 2",
        ),
        (
            lambda: ops.project_entries_(
                torch.zeros(2).double(),
                torch.zeros(3).double(),
                torch.zeros(2).double(),
                *[torch.arange(2)] * 2,
                torch.zeros(2).double(),
            ),
            "squares must have as many elements as sums, 2, got 3",
        ),
        (
            lambda: ops.project_entries_(
                torch.zeros(2).double(),
                None,
                torch.zeros(2).double(),
                torch.arange(2),
                torch.arange(3),
                torch.zeros(2).double(),
            ),
            "sources and targets must have as many elements as entries, 2, got 2 and 3",
        ),
        (
            lambda: ops.project_rows_(*[torch.zeros(2, 2).double()] * 4, 1, 1, 0),
            "must lie within 2 rows and 2 columns",
        ),
        (
            lambda: ops.central_difference_(
                torch.zeros(2).double(), torch.zeros(2), torch.zeros(2).double(), 2, 1.0, 0.0
            ),
            r"coordinate must be in \[0, 2\), got 2",
        ),
    ],
)
def test_messages_name_op_argument_and_value(call_op: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call_op()


LARGEST = 2**63 - 1


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("offsets", [(LARGEST, 1, 0), (1, LARGEST, 0), (0, 1, LARGEST), (0, LARGEST, LARGEST)])
def test_offsets_that_overflow_are_refused(kernel: str, offsets: tuple[int, int, int]) -> None:
    blocks = [torch.zeros(2, 4).double(), torch.zeros(2, 4).double(), torch.zeros(2, 6).double()]
    with pytest.raises(RuntimeError, match="must lie within 6 rows and 4 columns"):
        call(kernel, ops.project_rows_, *blocks, torch.ones(3, 2).double(), *offsets)
    assert not any(block.any() for block in blocks)


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_row_takes_any_step(kernel: str) -> None:
    sums, squares = torch.zeros(2, 2, 3, dtype=torch.float64)
    rows, cotangents = tensor(torch.float64, 1, 3), tensor(torch.float64, 2, 4)
    call(kernel, ops.project_rows_, sums, squares, cotangents, rows, 3, LARGEST, 0)
    torch.testing.assert_close(sums, cotangents[:, 3:] @ rows)
    call(kernel, ops.project_rows_, sums, squares, cotangents, rows[:0], 3, LARGEST, 0)
    torch.testing.assert_close(sums, cotangents[:, 3:] @ rows)


@pytest.mark.parametrize("kernel", KERNELS)
def test_components_that_have_no_number_are_refused(kernel: str) -> None:
    out = torch.zeros(5, dtype=torch.float64)
    for first in (-1, LARGEST - 7, LARGEST):
        with pytest.raises(RuntimeError, match="direction_: first must be in"):
            call(kernel, ops.direction_, out, 0, 0, first, False)
    assert not out.any()
    call(kernel, ops.direction_, out, 0, 0, LARGEST - 8, False)
    assert bool((out != 0).all())


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("first", [0, 1, 3, 4, 1 << 34, (1 << 34) + 2, LARGEST - 208])
def test_components_are_the_same_alone_and_by_vectors(first: int, halved: bool) -> None:
    vectors = torch.empty(200, dtype=torch.float64)
    gapped = torch.empty(200, 2, dtype=torch.float64)[:, 0]
    alone = torch.empty(200, dtype=torch.float64)
    for out in (vectors, gapped):
        ops.direction_(out, -5, 1 << 33, first, halved)
    for k, one in enumerate(alone.split(1)):
        ops.direction_(one, -5, 1 << 33, first + k, halved)
    assert torch.equal(vectors.view(torch.int64), alone.view(torch.int64))
    assert torch.equal(gapped, alone)


def test_large_blocks_use_all_threads_and_agree() -> None:
    analytical = tensor(torch.float64, 300, 400)
    numerical = analytical.clone()
    numerical[299, 399] += 1
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 4):
            torch.set_num_threads(count)
            found.append(ops.compare(analytical, numerical, 1e-5, 1e-3, False, False))
        torch.testing.assert_close(found[0], found[1])
    finally:
        torch.set_num_threads(threads)
