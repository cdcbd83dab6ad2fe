"""Native calls return or raise for any arguments: wrong shapes, types, strides, indices, empty or overlapping tensors.

It runs in a separate process, because a crash ends the process. FASTGRAD_FUZZ_CALLS is the number of calls of each
function.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastgrad.core import native
from tests.core.test_ops import call, samples

CALLS = int(os.environ.get("FASTGRAD_FUZZ_CALLS", "20"))
"""Calls of each function: so few take some seconds in all."""

SEED = int(os.environ.get("FASTGRAD_FUZZ_SEED", "0"))

NUMBERS = (-(2**63), -(2**62), -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 2**60, 2**62, 2**63 - 1)
"""Sizes and indices: those between would allocate gigabytes."""

REALS = (0.0, -1.0, 1e-6, 0.5, 1e300, float("nan"), float("inf"))
SHAPES = ((), (0,), (1,), (2,), (3,), (6,), (7,), (1100,), (2, 6), (6, 2), (3, 0), (0, 3), (2, 1, 3))
DTYPES = (
    *[torch.float64] * 6,
    *[torch.int64] * 4,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex128,
    torch.complex64,
    torch.complex32,
    torch.int32,
    torch.bool,
    torch.float8_e4m3fn,
)
JUNK = (None, "x", 1.5, 3, [], (), object())


class Make(random.Random):
    """Makes arguments: either some of wrong types, or some whose memory is freed.

    Not both: the error about a wrong type shows all arguments, and torch crashes where it prints memory that is freed.
    """

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self.mistypes = self.random() < 0.1


def wide(make: Make, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A contiguous tensor; integers are indices, some of them wrong."""
    count = torch.Size(shape).numel()
    if dtype is torch.int64:
        numbers = range(-1, 8) if make.random() < 0.8 else NUMBERS
        values = [make.choice(numbers) for _ in range(count)]
        return torch.tensor(sorted(values) if make.random() < 0.5 else values, dtype=dtype).reshape(shape)
    return torch.randint(-3, 4, shape).to(dtype)


def is_freed(tensor: Tensor) -> bool:
    """Whether torch itself would read beyond the storage."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return False
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + reach + 1) * tensor.element_size() > tensor.untyped_storage().nbytes()


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    *[lambda t: t] * 6,
    lambda t: t.t() if t.dim() == 2 else t.flip(0) if t.dim() else t,
    lambda t: torch.stack([t, t], -1).select(-1, 0),
    lambda t: t[:1].expand(t.shape) if t.dim() and t.shape[0] else t,
    lambda t: torch.as_strided(t.clone(), t.shape, [1] * t.dim()),
    lambda t: torch.cat([t.reshape(-1), t.reshape(-1)])[t.numel() :].reshape(t.shape),
    lambda t: t.clone().requires_grad_(),
    # torch never finishes copying a quantized tensor of this kind
    lambda t: t if t.is_quantized else torch._neg_view(t),
    lambda t: t.conj(),
    lambda t: t.to("meta"),
    lambda t: t.to_sparse(),
    lambda t: t.to_sparse_csr(),
    lambda t: t.to_mkldnn(),
    lambda t: torch.nested.nested_tensor([t, t]),
    lambda t: torch.quantize_per_tensor(t.float(), 1.0, 0, torch.quint8),
    lambda t: torch.nn.Parameter(t.clone()),
    lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
)


def laid_out(make: Make, tensor: Tensor) -> Tensor:
    if make.random() < 0.05 and not make.mistypes:
        tensor = tensor.clone()
        tensor.untyped_storage().resize_(make.choice((0, 8)))
        return tensor
    return make.choice(LAYOUTS)(tensor)


def any_tensor(make: Make) -> Tensor:
    """A tensor of any kind."""
    while True:
        plain = wide(make, make.choice(DTYPES), make.choice(SHAPES))
        try:
            return laid_out(make, plain)
        except (RuntimeError, NotImplementedError, IndexError):  # not possible with this dtype or shape
            continue


def resembling(make: Make, tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype, in another layout or with other indices."""
    if is_freed(tensor):
        return tensor
    try:
        plain = wide(make, tensor.dtype, tuple(tensor.shape)) if make.random() < 0.5 else tensor.detach().clone()
        return laid_out(make, plain)
    except (RuntimeError, NotImplementedError, IndexError):
        return tensor


def sharing(make: Make, tensor: Tensor, other: Tensor) -> Tensor:
    """A tensor like the first in the memory of the second."""
    if is_freed(tensor) or is_freed(other):
        return other
    try:
        memory = other.view(tensor.dtype) if other.element_size() == tensor.element_size() else other
        offset = make.randrange(3)
        return memory.reshape(-1)[offset : offset + tensor.numel()].view(tensor.shape)
    except (RuntimeError, NotImplementedError, IndexError, TypeError):
        return other


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def changed(make: Make, value: Any, others: list[Tensor]) -> Any:
    """A value that replaces an argument."""
    if make.mistypes and make.random() < 0.3:
        return make.choice(JUNK)
    if isinstance(value, Tensor):
        kind = make.random()
        if kind < 0.4:
            return resembling(make, value)
        return sharing(make, value, make.choice(others)) if kind < 0.6 else any_tensor(make)
    if isinstance(value, bool):
        return make.random() < 0.5
    if isinstance(value, int):
        return make.choice(NUMBERS)
    if isinstance(value, float):
        return make.choice(REALS)
    if isinstance(value, (list, tuple)):
        items = list(value)
        if items and make.random() < 0.7:
            k = make.randrange(len(items))
            items[k] = changed(make, items[k], others)
        elif isinstance(value, list) or make.mistypes:
            items = items[1:] if make.random() < 0.5 else items + items[:1]
        return type(value)(items)
    return value


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.requires_grad else value.clone()
    return type(value)(map(copied, value)) if isinstance(value, (list, tuple)) else value


def f64(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.float64)


def i64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def pattern() -> tuple[Tensor, Tensor]:
    return i64(0, 2, 3, 5), i64(0, 1, 2, 0, 2)


def block_arguments() -> tuple[Any, ...]:
    x = torch.ones(2, 3, dtype=torch.float64)
    return x, 0, 1e-8, x.clone(), x.clone(), None


def groups_arguments() -> tuple[Any, ...]:
    return i64(0, 2, 4, 1, 3), i64(0, 3, 5), i64(0, 1, 2, 3, 4), i64(0, 3, 5), i64(0, 4, 3, 1, 2)


class Scene:
    """A function of five coordinates in two inputs, one of them complex, and all arguments that native calls need."""

    def __init__(self, make: Make) -> None:
        self.x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        self.z = torch.ones(1, dtype=torch.complex128, requires_grad=True)
        self.make = make
        self.blocks = [native.InputBlock(self.x, 0, 1e-8), native.InputBlock(self.z, 3, 1e-8)]
        self.arguments = (self.x, self.z)
        self.evaluator = native.Evaluator(self.func, self.arguments, self.blocks)
        self.graph = [self.x.sin(), self.z * self.z]
        self.specs = [native.OutputSpec(k, value.detach()) for k, value in enumerate(self.graph)]
        self.groups = native.Groups(*groups_arguments())
        small = native.SmallProblem.trace(lambda x, z: (x.sin(), z * z), self.arguments, 1e-8, make.random() < 0.5)
        assert small is not None
        self.small = small
        self.vjps: tuple[list[int], native.Graph] | None = None

    def func(self, *_: Any) -> Any:
        if self.make.random() < 0.1:
            return tuple(any_tensor(self.make) for _ in range(self.make.randrange(3)))
        for tensor in (self.x, self.z):
            if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
                raise RuntimeError("freed by an earlier call: torch would read it all the same")
        outputs = self.x.sin(), self.z * self.z
        if self.make.random() < 0.05:
            memory = self.make.choice((self.x, self.z, *outputs)).detach()
            memory.untyped_storage().resize_(self.make.choice((0, 8, 1000)))
        elif self.make.random() < 0.05:
            self.x.data = self.make.choice((f64(0), f64(3), f64(5), f64(3).float(), self.x.detach().flip(0)))
        return outputs

    def duals(self) -> tuple[Any, ...]:
        """Evaluator.tangent_columns at its own level of forward-mode AD."""
        tangents = [torch.zeros(3, dtype=torch.float64), torch.zeros(1, dtype=torch.complex128)]
        return 0, f64(5, 5), self.specs, self.arguments, tangents

    def calls(self) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
        """Functions by name, with valid arguments."""
        e, blocks, specs, groups, graph = self.evaluator, self.blocks, self.specs, self.groups, self.graph
        vjps = self.graph_of(list(self.arguments))
        v = f64(5)
        small, whole = self.small, (f64(3, 5), [1, 2, 3], 1, 2.0, True, 0, 1e-5, 1e-3)
        return {
            "Evaluator": (native.Evaluator, (self.func, self.arguments, blocks)),
            "KeptHistory": (lambda x: native.KeptHistory(x).restore(), (f64(3),)),
            "SmallProblem": (self.small_used, (self.arguments, 1e-8, True)),
            "SmallProblem.whole_backward": (small.whole_backward, whole),
            "SmallProblem.completed": (small.completed, (small.whole_backward(*whole), f64(3, 5), [1, 2, 3], 1, 2.0)),
            "SmallProblem.difference_columns": (small.difference_columns, (1e-6,)),
            "SmallProblem.errors": (small.errors, (small.whole_backward(*whole), f64(5, 5), 1e-5, 1e-3, True)),
            "SmallProblem.vjps": (small.vjps, (f64(2, 5), [1, 2], [-1, 1])),
            "SmallProblem.first_other_vjp": (small.first_other_vjp, (f64(2, 5), [-1, 1], [1, 0], f64(2, 5))),
            "SmallProblem.are_zeros_zero": (small.are_zeros_zero, (True, True)),
            "WholeBackward.to": (small.whole_backward(*whole).to, (torch.device("cpu"),)),
            "SmallProblem.screening_derivatives": (self.small_screening, self.along_arguments(2)[:1]),
            "SmallProblem.negates_unrecorded": (small.negates_unrecorded, (1, 1e-14)),
            "SmallProblem.release": (self.small_released, whole),
            "Groups": (self.groups_used, groups_arguments()),
            "InputBlock": (self.block_used, block_arguments()),
            "OutputSpec": (self.spec_used, (0, graph[0].detach())),
            "part": (lambda *given: self.groups_used_in(groups.part(*given)), (0, 2)),
            "coordinate_widths": (e.coordinate_widths, (v, [1e-6, 1e-6])),
            "realized_widths": (e.realized_widths, (v, v.clone(), 1.0)),
            "realize": (e.realize, (v, v.clone(), 0, 1, 1e-6, 1.0)),
            "evaluate": (e.evaluate, (True,)),
            "evaluate_at": (e.evaluate_at, (self.arguments,)),
            "inputs_changed": (e.inputs_changed, ()),
            "restore": (e.restore, ()),
            "values_along": (e.values_along, (v, [1.0, -1.0], [f64(5), f64(5)], specs, False)),
            "differences_along": (self.differences_along, self.along_arguments(2)),
            "screening_derivatives": (
                self.screening,
                (self.along_arguments(2)[0], v, 1.0, 0.1, True, None, specs, [1e-16, 1e-16]),
            ),
            "differences_along, four points": (self.differences_along, self.along_arguments(4)),
            "difference_columns": (e.difference_columns, (0, f64(5, 5), specs, 1e-6, False)),
            "difference_groups": (e.difference_groups, (groups, v, 5, specs, 1e-6, False)),
            "tangent_columns": (
                lambda *given: native.at_dual_level(lambda: e.tangent_columns(*given)),
                self.duals(),
            ),
            "at_dual_level": (native.at_dual_level, (lambda: None,)),
            "check_memory": (native.check_memory, (list(self.arguments),)),
            "vjp": (native.vjp, (graph, list(self.arguments), [f64(3), graph[1].detach()], False)),
            "Graph": (native.Graph, (graph, list(self.arguments))),
            "UnrecordedBackward": (
                self.unrecorded_backward,
                (2, [0, 1], [0, 1], (*self.arguments, f64(3), graph[1].detach())),
            ),
            "vjp_of_one": (vjps.vjp_of_one, (0, f64(3))),
            "vectorized_vjp": (native.vectorized_vjp, (vjps, 0, f64(2, 3))),
            "are_close": (native.are_close, ([f64(2, 3), None], [[f64(3), None], [f64(3), None]])),
            "vjp_of_zeros": (vjps.vjp_of_zeros, ()),
            "vjp_of_undefined": (vjps.vjp_of_undefined, (1,)),
            "vjp_coordinates": (native.vjp_coordinates, (vjps, blocks, f64(2, 5), [1, 2], [-1, 1])),
            "first_other_vjp": (
                native.first_other_vjp,
                (vjps, blocks, f64(2, 5), [-1, 1], [1, 0, 1], torch.zeros(2, 5, dtype=torch.float64)),
            ),
            "vjp_rows": (native.vjp_rows, (vjps, 1, blocks, 0, True, f64(1, 5), f64(1, 5), 2.0)),
            "vjp_groups": (native.vjp_groups, (vjps, 0, blocks, groups, v, 5, 1, 2.0, True)),
            "whole_backward": (
                native.whole_backward,
                (vjps, blocks, *whole),
            ),
            "whole_backward, vectorized": (
                native.whole_backward,
                (vjps, blocks, f64(3, 5), [], 0, 2.0, False, 1, 1e-5, 1e-3),
            ),
            "runs_no_custom_code": (native.runs_no_custom_code, (graph, list(self.arguments))),
            "backward_streams": (native.backward_streams, (graph, list(self.arguments))),
            "running_call": (native.running_call, (threading.get_ident(), "/", ["convert_frame.py"])),
            "is_plain_zero": (native.is_plain_zero, (v, v.clone())),
            "explained_sums": (
                native.explained_sums,
                (f64(3), i64(0, 1, 2), i64(1, 0, 1), f64(2, 3), f64(2, 2), 1e-6, 1e-15),
            ),
            "largest_residuals": (native.largest_residuals, (f64(3, 5), f64(2, 5), f64(3, 4), f64(2, 4))),
            "largest_errors": (
                native.largest_errors,
                (f64(2, 5), f64(5, 6), 0, 2, [(3, False, 1e-5, 1e-3), (2, True, 1e-5, 1e-3)]),
            ),
            "bucket": (native.bucket, (i64(2, 0, 1, 2), 3)),
            "color": (native.color, (*pattern(), 3)),
            "star_color": (native.star_color, (*pattern(), 3)),
            "transpose": (native.transpose, (*pattern(), 3)),
            "compare": (native.ops.compare, (f64(2, 6), f64(2, 6), 1e-5, 1e-3, True, False)),
            "direction_": (native.ops.direction_, (v, 0, 1, 2, True)),
            "flattened": (native.flattened, ([v, graph[1].detach()],)),
            "flatten_": (native.flatten_, (v, v.clone())),
            "project_rows_": (native.ops.project_rows_, (f64(2, 6), f64(2, 6), f64(2, 2), f64(2, 6), 0, 1, 0)),
        }

    def unrecorded_backward(self, count: Any, inputs: Any, grad_outputs: Any, arguments: Any) -> None:
        def refuse(outputs: int, grad_outputs: int) -> None:
            raise ValueError("other outputs")

        plain = native.UnrecordedBackward(self.func, refuse, count, inputs, grad_outputs, True)
        for _ in range(3):
            plain.call(arguments)
        assert plain.keeps_graph
        plain.stop_reusing()
        assert not plain.keeps_graph

    def graph_of(self, inputs: list[Tensor]) -> native.Graph:
        """A graph; sometimes the previous one, whose nodes may have been run."""
        if self.vjps is None or self.vjps[0] != [id(value) for value in inputs] or self.make.random() < 0.3:
            self.vjps = [id(value) for value in inputs], native.Graph(self.graph, inputs)
        return self.vjps[1]

    def along_arguments(self, count: int) -> tuple[Any, ...]:
        fixed = torch.tensor([False, True, False, False, False])
        along = 0, [1, 17], [count, 2], 1e-3, 1e-8, [-1, 1]
        return along, f64(5), 0.1, fixed, self.specs, [1e-16, 1e-16]

    def differences_along(self, along: Any, *given: Any) -> None:
        self.evaluator.differences_along(native.RandomDirections(*along), *given)

    def screening(self, along: Any, *given: Any) -> None:
        self.evaluator.screening_derivatives(native.RandomDirections(*along), *given)

    def small_screening(self, along: Any) -> None:
        self.small.screening_derivatives(native.RandomDirections(*along), 1.0, 0.1, False, None)

    def small_released(self, *given: Any) -> None:
        self.small.release()
        self.small.whole_backward(*given)

    def small_used(self, *given: Any) -> None:
        small = native.SmallProblem.trace(self.func, *given)
        if small is not None and small.is_plain:
            small.are_zeros_zero(True, True)
            small.difference_columns(1e-6)
            small.negates_unrecorded(1, 1e-14)

    def groups_used(self, *given: Any) -> None:
        self.groups_used_in(native.Groups(*given))

    def groups_used_in(self, groups: native.Groups) -> None:
        """Calls that read groups, which may have been changed meanwhile."""
        if self.make.random() < 0.2:
            for tensor in (groups.coordinates, groups.starts, groups.entries, groups.entry_starts):
                tensor.resize_(self.make.choice((0, 1, 2, 3))) if self.make.random() < 0.2 else tensor.add_(1)
        values = torch.zeros(5, dtype=torch.float64)
        try:
            self.evaluator.difference_groups(groups, values, 5, self.specs, 1e-6, False)
        finally:
            vjps = self.graph_of(list(self.arguments))
            native.vjp_groups(vjps, 0, self.blocks, groups, values, 5, 1, 2.0, True)

    def block_used(self, argument: Any, *given: Any) -> None:
        """An evaluator over a block, with a func that accepts any arguments."""
        block = native.InputBlock(argument, *given)
        evaluator = native.Evaluator(self.func, (argument,), [block])
        size = evaluator.coordinates().numel()
        evaluator.evaluate(True)
        evaluator.inputs_changed()
        evaluator.difference_columns(0, f64(size, 5), self.specs, 1e-6, False)
        evaluator.values_along(f64(size), [1.0], [f64(5)], self.specs, False)
        evaluator.coordinate_widths(f64(size), [1e-6])
        native.vjp_coordinates(self.graph_of([argument]), [block], f64(1, 5))

    def spec_used(self, *given: Any) -> None:
        spec = native.OutputSpec(*given)
        self.evaluator.values_along(f64(5), [1.0], [f64(given[1].numel())], [spec], False)


def operators() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Every operator, as dispatched and by its plain ATen kernel, with valid arguments."""
    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for sample in samples():
        op, arguments = sample.values
        found[f"ops.{sample.id}"] = op, arguments
        found[f"ops.{sample.id}, plain"] = (
            lambda *given, op=op: call("CompositeExplicitAutograd", op, *given),
            arguments,
        )
    return found


def fuzz(calls: int, seed: int) -> None:
    """Calls everything; prints the function before each call, and the seed that repeats a crash."""
    warnings.simplefilter("ignore")
    names = [*operators(), *Scene(Make(str(seed))).calls()]
    returned = 0
    for name in names:
        for number in range(calls):
            print(f"\r{name}, seed {seed}, call {number}", end="", flush=True)
            make = Make(f"{name} {seed} {number}")
            torch.manual_seed(number)
            func, arguments = (operators() if name.startswith("ops.") else Scene(make).calls())[name]
            given = list(copied(arguments))
            others = list(tensors_in(given)) or [f64(6)]
            for _ in range(make.randrange(4)):
                if given:
                    k = make.randrange(len(given))
                    given[k] = changed(make, given[k], others)
            try:
                func(*given)
                returned += 1
            except SystemError:
                raise  # of a function that returned with an error set, or without one
            except Exception:  # any message is allowed
                continue
    print(f"\n{calls} calls each of {len(names)} functions, {returned} of them returned")


def test_no_call_crashes() -> None:
    code = f"from tests.core.test_native_fuzz import fuzz; fuzz({CALLS}, {SEED})"
    run = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code], capture_output=True, text=True, check=False
    )
    last = run.stdout.splitlines()[-1:]
    assert run.returncode == 0, f"{last}\n{run.stderr[-6000:]}"
    assert f"{CALLS} calls each" in last[0]
