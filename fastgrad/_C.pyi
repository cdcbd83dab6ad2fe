"""Types of the compiled module; csrc/loops.h and csrc/coloring.h document it."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

Result = TypeVar("Result")

class InputBlock:
    def __init__(
        self,
        argument: Tensor,
        first: int,
        relative_step: float,
        stand_in: Tensor | None = None,
        values: Tensor | None = None,
        elements: Tensor | None = None,
    ) -> None: ...

class OutputSpec:
    def __init__(self, position: int, like: Tensor) -> None: ...

class Groups:
    def __init__(
        self, coordinates: Tensor, starts: Tensor, entries: Tensor, entry_starts: Tensor, positions: Tensor
    ) -> None: ...
    @property
    def coordinates(self) -> Tensor: ...
    @property
    def starts(self) -> Tensor: ...
    @property
    def entries(self) -> Tensor: ...
    @property
    def entry_starts(self) -> Tensor: ...
    def part(self, first: int, last: int) -> Groups: ...

class RandomDirection:
    def __init__(
        self, seed: int, stream: int, step: float, relative: float, displacement: Tensor, direction: Tensor
    ) -> None: ...

class Derivative:
    def __init__(self, derivative: Tensor, noise: Tensor, base: Tensor, curve: float) -> None: ...

class Evaluator:
    def __init__(self, func: Callable[..., Any], arguments: tuple[Any, ...], blocks: Sequence[InputBlock]) -> None: ...
    def coordinates(self) -> Tensor: ...
    def coordinate_widths(self, widths: Tensor, eps: Sequence[float]) -> None: ...
    def realized_widths(self, widths: Tensor, displacement: Tensor, scale: float) -> None: ...
    def evaluate(self, record_graph: bool) -> Any: ...
    def realize(
        self, displacement: Tensor, realized: Tensor, seed: int, stream: int, eps: float, relative: float
    ) -> None: ...
    def values_along(
        self,
        displacement: Tensor,
        scales: Sequence[float],
        values: Sequence[Tensor],
        outputs: Sequence[OutputSpec],
        record_graph: bool,
    ) -> tuple[int, int, Any] | None: ...
    def difference_along(
        self,
        along: RandomDirection,
        fixed: Tensor | None,
        into: Derivative,
        values: Sequence[Tensor],
        outputs: Sequence[OutputSpec],
        ulps: Sequence[float],
    ) -> tuple[int, int, Any] | None: ...
    def difference_columns(
        self, first: int, columns: Tensor, outputs: Sequence[OutputSpec], eps: float, record_graph: bool
    ) -> tuple[int, int, Any] | None: ...
    def difference_groups(
        self,
        groups: Groups,
        values: Tensor,
        m: int,
        outputs: Sequence[OutputSpec],
        eps: float,
        record_graph: bool,
    ) -> tuple[int, int, Any] | None: ...
    def evaluate_at(self, arguments: tuple[Any, ...]) -> Any: ...
    def tangent_columns(
        self,
        first: int,
        columns: Tensor,
        outputs: Sequence[OutputSpec],
        duals: tuple[Any, ...],
        tangents: Sequence[Tensor],
    ) -> tuple[tuple[int, int, Any] | None, bool]: ...
    def inputs_changed(self) -> bool: ...
    def restore(self) -> None: ...
    @property
    def evaluations(self) -> int: ...
    mutates_inputs: bool
    records_differences: bool

class Graph:
    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None: ...
    @property
    def bypasses_engine(self) -> bool: ...
    def vjp_of_zeros(self) -> list[Tensor | None]: ...
    def vjp_of_undefined(self, one: int | None) -> list[Tensor | None]: ...

class UnspecifiedEntry:
    @property
    def row(self) -> int: ...
    @property
    def element(self) -> int: ...
    @property
    def value(self) -> complex: ...

class GradientsMatch:
    @property
    def unspecified(self) -> dict[int, UnspecifiedEntry]: ...
    @property
    def dtypes(self) -> bool: ...
    @property
    def sizes(self) -> bool: ...
    @property
    def repeats(self) -> bool: ...
    @property
    def movement(self) -> float: ...

class Rows:
    @property
    def rows(self) -> Tensor: ...
    @property
    def repeated(self) -> Tensor: ...
    @property
    def match(self) -> GradientsMatch: ...

class WholeBackward:
    @property
    def parts(self) -> list[Rows]: ...
    @property
    def vectorized(self) -> bool: ...
    @property
    def products(self) -> Tensor: ...
    @property
    def movement(self) -> float: ...
    @property
    def add_up(self) -> bool: ...
    @property
    def zeros(self) -> list[list[Tensor | None]]: ...
    @property
    def are_zero(self) -> bool: ...
    @property
    def vjps(self) -> int: ...

def at_dual_level(body: Callable[[], Result]) -> Result: ...
def backward_streams(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[int]: ...
def bucket(keys: Tensor, count: int) -> tuple[Tensor, Tensor]: ...
def check_memory(inputs: Sequence[Tensor]) -> None: ...
def color(starts: Tensor, members: Tensor, targets: int) -> Tensor: ...
def compare(
    analytical: Tensor, numerical: Tensor, atol: float, rtol: float, complex_entries: bool, equal_nan: bool
) -> Tensor: ...
def direction_(out: Tensor, seed: int, stream: int, first: int, halved: bool) -> None: ...
def star_color(starts: Tensor, members: Tensor, most: int) -> Tensor: ...
def transpose(starts: Tensor, members: Tensor, targets: int) -> tuple[Tensor, Tensor]: ...
def flatten_(out: Tensor, tensor: Tensor) -> None: ...
def is_plain_zero(gradient: Tensor, input: Tensor) -> bool: ...
def largest_errors(
    rows: Tensor,
    columns: Tensor,
    first_row: int,
    row_step: int,
    inputs: Sequence[tuple[int, bool, float, float]],
) -> list[tuple[float, float]] | None: ...
def project_rows_(
    sums: Tensor,
    squares: Tensor,
    cotangents: Tensor,
    rows: Tensor,
    first_row: int,
    row_step: int,
    first_column: int,
) -> None: ...
def runs_no_custom_code(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool: ...
def count_nodes(outputs: Sequence[Tensor], most: int) -> tuple[int, int]: ...
def vjp(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], create_graph: bool
) -> list[Tensor | None]: ...
def vjp_coordinates(
    graph: Graph,
    inputs: Sequence[InputBlock],
    cotangents: Tensor,
    layouts: Sequence[int] = (),
    only: Sequence[int] = (),
) -> tuple[Tensor, GradientsMatch]: ...
def first_other_vjp(
    graph: Graph,
    inputs: Sequence[InputBlock],
    cotangents: Tensor,
    only: Sequence[int],
    order: Sequence[int],
    known: Tensor,
) -> tuple[int, Tensor | None, GradientsMatch]: ...
def vjp_groups(
    graph: Graph,
    output: int,
    inputs: Sequence[InputBlock],
    groups: Groups,
    values: Tensor,
    n: int,
    repeated: int,
    repeat_scale: float,
    expand: bool,
) -> GradientsMatch: ...
def vjp_rows(
    graph: Graph,
    output: int,
    inputs: Sequence[InputBlock],
    first: int,
    imaginary: bool,
    rows: Tensor,
    repeated: Tensor,
    repeat_scale: float,
) -> GradientsMatch: ...
def whole_backward(
    graph: Graph,
    inputs: Sequence[InputBlock],
    cotangents: Tensor,
    layouts: Sequence[int],
    repeated: int,
    repeat_scale: float,
    undefined: bool,
    fewest_vectorized: int,
    atol: float,
    rtol: float,
) -> WholeBackward: ...
