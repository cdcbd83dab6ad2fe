"""Types of the compiled module; csrc/loops.h and csrc/coloring.h document it."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

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
    @property
    def positions(self) -> Tensor: ...

class Evaluator:
    def __init__(self, func: Callable[..., Any], arguments: tuple[Any, ...], blocks: Sequence[InputBlock]) -> None: ...
    def coordinates(self) -> Tensor: ...
    def evaluate(self, record_graph: bool) -> Any: ...
    def realize(self, displacement: Tensor, realized: Tensor, eps: float, relative: float) -> None: ...
    def values_along(
        self,
        displacement: Tensor,
        scales: Sequence[float],
        values: Tensor,
        outputs: Sequence[OutputSpec],
        record_graph: bool,
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

def bucket(keys: Tensor, count: int) -> tuple[Tensor, Tensor]: ...
def color(starts: Tensor, members: Tensor, targets: int) -> Tensor: ...
def compare(
    analytical: Tensor, numerical: Tensor, atol: float, rtol: float, complex_entries: bool, equal_nan: bool
) -> Tensor: ...
def direction_(out: Tensor, seed: int, stream: int, first: int, halved: bool) -> None: ...
def star_color(starts: Tensor, members: Tensor, most: int) -> Tensor: ...
def transpose(starts: Tensor, members: Tensor, targets: int) -> tuple[Tensor, Tensor]: ...
def flatten_(out: Tensor, tensor: Tensor) -> None: ...
def is_plain_zero(gradient: Tensor, input: Tensor) -> bool: ...
def project_rows_(
    sums: Tensor,
    squares: Tensor,
    cotangents: Tensor,
    rows: Tensor,
    first_row: int,
    row_step: int,
    first_column: int,
) -> None: ...
def vjp(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], create_graph: bool
) -> list[Tensor | None]: ...
def vjp_of_zeros(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor | None]: ...
def vjp_coordinates(
    outputs: Sequence[Tensor],
    inputs: Sequence[InputBlock],
    cotangents: Tensor,
    gapped: int,
    expanded: int,
    gradients: Tensor,
) -> GradientsMatch: ...
def vjp_groups(
    output: Tensor,
    inputs: Sequence[InputBlock],
    groups: Groups,
    values: Tensor,
    n: int,
    repeated: int,
    repeat_scale: float,
    expand: bool,
) -> GradientsMatch: ...
def vjp_rows(
    output: Tensor,
    inputs: Sequence[InputBlock],
    first: int,
    imaginary: bool,
    rows: Tensor,
    repeated: Tensor,
    repeat_scale: float,
) -> GradientsMatch: ...
