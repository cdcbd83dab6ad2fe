"""Random differentiable programs, right or with a planted error. A program prints as the expression that builds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.properties.operators import (
    DENSE_DIMS,
    LAYOUTS,
    LAZY,
    MAX_ELEMENTS,
    OPS,
    SPARSE,
    SPARSE_DIMS,
    SPARSE_OPS,
    Input,
    Short,
    results,
)
from tests.properties.planted import BACKWARD_ONLY, COMPLEX, ERRORS, OF_SPARSE, SPARSE_ERRORS, differentiable, planted


@dataclass(frozen=True, repr=False)
class Step(Short):
    """OPS[op] of earlier values; planted: the level, name and number of a planted error."""

    op: str
    values: tuple[int, ...]
    numbers: tuple[int, ...] = ()
    planted: tuple[str, str, int] | None = None

    def function(self) -> Callable[..., Any]:
        apply = (OPS.get(self.op) or SPARSE_OPS[self.op]).apply

        def function(*values: Tensor) -> Any:
            return apply(*values, *self.numbers)

        return function if self.planted is None else planted(function, *self.planted)


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "as it is": lambda x: x,
    "detached": lambda x: x.detach(),
    "integer": lambda x: x.detach().abs().sum().long(),
    "boolean": lambda x: x.detach().abs() > 0.1,
    "none": lambda x: None,
}
IGNORED = {"integer", "boolean", "none"}
"""Outputs that can carry no gradient."""


@dataclass(frozen=True)
class Kind:
    """A kind of check: the checker and its keywords, the places of errors, and the kinds of inputs."""

    check: str = "gradcheck"
    keywords: Mapping[str, bool] = field(default_factory=dict)
    levels: tuple[str, ...] = ("backward",)
    sparse: bool = False
    lazy: bool = False
    weight: int = 1

    @property
    def second_order(self) -> bool:
        """Whether the backward is what is checked."""
        return self.check == "gradgradcheck"


KINDS = {
    "reverse": Kind(weight=8),
    "second order": Kind("gradgradcheck", levels=("double backward", "double backward", "backward"), weight=3),
    "lazy": Kind(lazy=True),
    "forward": Kind(keywords={"check_forward_ad": True}, levels=("jvp", "jvp", "backward"), weight=2),
    "forward only": Kind(keywords={"check_forward_ad": True, "check_backward_ad": False}, levels=("jvp",)),
    "forward over reverse": Kind("gradgradcheck", {"check_fwd_over_rev": True}, ("backward", "double backward")),
    "batched": Kind(keywords={"check_batched_grad": True}),
    "batched second order": Kind("gradgradcheck", {"check_batched_grad": True}, ("double backward", "backward")),
    "batched forward": Kind(keywords={"check_forward_ad": True, "check_batched_forward_grad": True}, levels=("jvp",)),
    "sparse": Kind(keywords={"masked": False}, sparse=True, weight=4),
    "sparse second order": Kind("gradgradcheck", {"masked": False}, ("double backward", "backward"), sparse=True),
    "masked": Kind(keywords={"masked": True}, sparse=True, weight=4),
}


@dataclass(frozen=True, repr=False)
class Program(Short):
    """func and inputs as data, with how to check them.

    own: keywords that only fastgrad knows; captures: func holds the sparse inputs that do not require grad.
    """

    kind: str
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[tuple[int, str], ...]
    keywords: tuple[tuple[str, Any], ...] = ()
    own: tuple[tuple[str, Any], ...] = ()
    captures: bool = False

    @property
    def error(self) -> str | None:
        """The planted error's name: "right" for a custom Function without one, None without a custom Function."""
        return next((step.planted[1] for step in self.steps if step.planted), None)

    @property
    def level(self) -> str | None:
        """Where the planted error is."""
        return next((step.planted[0] for step in self.steps if step.planted), None)

    @property
    def forward(self) -> bool:
        keywords = KINDS[self.kind].keywords
        return bool(keywords.get("check_forward_ad") or keywords.get("check_fwd_over_rev"))

    def results(self) -> tuple[Any, ...]:
        """What func returns."""
        results = self.make_func()(*self.make_inputs())
        return results if isinstance(results, tuple) else (results,)

    def make_inputs(self) -> tuple[Tensor, ...]:
        """What func takes."""
        return tuple(x for i, x in enumerate(self._made()) if not self._captured(i))

    def _made(self) -> list[Tensor]:
        made: list[Tensor] = []
        for value in self.inputs:
            made.append(value.make() if value.same_as is None else made[value.same_as])
        return made

    def _captured(self, number: int) -> bool:
        value = self.inputs[number]
        return self.captures and value.layout in SPARSE and not value.requires_grad

    def make_func(self) -> Callable[..., Any]:
        """A new function, so that the state of a planted error is not shared between checks."""
        functions = [step.function() for step in self.steps]
        own = self._made()

        def func(*inputs: Tensor) -> Any:
            if len(inputs) != sum(not self._captured(i) for i in range(len(own))):
                raise TypeError(f"func got {len(inputs)} arguments")
            given = iter(inputs)
            values = [x if self._captured(i) else next(given) for i, x in enumerate(own)]
            for step, function in zip(self.steps, functions, strict=True):
                values.append(function(*(values[i] for i in step.values)))
            outputs = tuple(OUTPUTS[how](values[i]) for i, how in self.outputs)
            return outputs if len(outputs) > 1 else outputs[0]

        return func


Pick = Callable[[Sequence[Any]], Any]
"""Chooses one of several; the first is the simplest."""


def _rarely(pick: Pick, of: int) -> bool:
    return pick(range(of)) == of - 1


def _inputs(pick: Pick, sparse: bool, lazy: bool, small: bool) -> tuple[Input, ...]:
    made: list[Input] = []
    shape: tuple[int, ...]
    if sparse:
        layout = pick(list(SPARSE))
        shape = tuple(pick([2, 3, 4, 1]) for _ in range(SPARSE_DIMS[layout])) + (2,) * DENSE_DIMS[layout]
        fill = pick(["normal"] * 4 + ["full", "integers", "zeros"])
        # A gradient in a sparse layout is a sparse output of the backward, which no check takes.
        tracked = not small or _rarely(pick, 4)
        dtype = pick(["float64", "float64", "complex128"])
        made.append(Input(shape, dtype, layout, fill, pick(range(100)), tracked))
        if _rarely(pick, 4):
            made.append(replace(made[0], seed=pick(range(100)), requires_grad=tracked and pick([True, False])))
        elif _rarely(pick, 12):
            made.append(replace(made[0], same_as=0))
    for _ in range(pick([1, 2] if small else [0, 1, 2] if sparse else [1, 2, 3])):
        if made and not sparse and _rarely(pick, 10):
            made.append(replace(made[-1], same_as=len(made) - 1 if made[-1].same_as is None else made[-1].same_as))
            continue
        if made and pick([True, False]):  # related shapes, so that broadcasting, matmul and stack apply
            shape = pick([made[0].shape, made[0].shape[-1:], made[0].shape[::-1], ()])
        else:
            shape = tuple(
                0 if _rarely(pick, 30) else pick([2, 3, 1] if small else [3, 2, 4, 1, 5, 6])
                for _ in range(pick(range(4)))
            )
        while torch.Size(shape).numel() > (8 if small else MAX_ELEMENTS):
            shape = shape[1:]
        dtype = pick(["float64", "float64", "complex128"])
        layouts = [name for name in LAYOUTS if name not in LAZY.values()]
        if not shape:
            layouts = [name for name in layouts if "transposed" not in name and name != "expanded"]
        elif not _rarely(pick, 20):
            layouts.remove("expanded")
        fill = pick(["normal"] * 6 + ["zeros", "integers"])
        layout = LAZY[dtype] if lazy and pick([True, False]) else pick(layouts)
        made.append(Input(shape, dtype, layout, fill, pick(range(100)), not made or not _rarely(pick, 5)))
    if _rarely(pick, 4):
        made.append(Input((pick(range(5)),), "int64", seed=pick(range(100)), requires_grad=False))
    return tuple(made)


def _steps(pick: Pick, values: list[Tensor], kind: Kind) -> list[Step]:
    """Random steps that fit the values; their results are appended to values."""
    steps = []
    names = [pick(list(SPARSE_OPS)) for _ in range(pick([2, 1, 3]))] if kind.sparse else []
    names += [pick(list(OPS)) for _ in range(pick(range(1, 5 if kind.check == "gradgradcheck" else 9)))]
    for name in names:
        op = OPS.get(name) or SPARSE_OPS[name]
        numbers = tuple(pick(range(8)) for _ in range(op.numbers))
        found = results(op, values, numbers, pick([True, False]))
        if found:
            positions = pick(list(found))
            steps.append(Step(name, positions, numbers))
            values.append(found[positions])
        elif kind.sparse and name in SPARSE_OPS and not steps:  # nothing dense yet
            steps.append(Step(pick(["to_dense", "to_dense, masked", "to_dense, not masked"]), (0,)))
            values.append(values[0].to_dense())
    return steps


def _outputs(pick: Pick, values: list[Tensor]) -> list[tuple[int, str]]:
    """The last value, and up to two others, some of which require no grad."""
    dense = [i for i, value in enumerate(values) if value.layout is torch.strided and differentiable([value])]
    tracked = [i for i in dense if values[i].requires_grad]
    outputs = [(((tracked if not _rarely(pick, 10) else dense) or [0])[-1], "as it is")]
    for _ in range(pick([0, 0, 1, 2])):
        how = pick(["as it is"] * 20 + ["detached"] * 4 + sorted(IGNORED))
        outputs.insert(pick(range(len(outputs) + 1)), (pick(dense or [0]), how))
    return [(i, "detached") for i, _ in outputs] if _rarely(pick, 40) else outputs


def _plant(pick: Pick, steps: list[Step], values: list[Tensor], outputs: list[tuple[int, str]], kind: Kind) -> None:
    """Replaces one of the steps that lead to the outputs by a custom Function, in three of four cases a wrong one."""
    first = len(values) - len(steps)
    needed = {i for i, _ in outputs}
    for number in reversed(range(len(steps))):
        if first + number in needed:
            needed.update(steps[number].values)
    leading = [number for number in range(len(steps)) if first + number in needed]
    if not leading:
        return
    sparse = [number for number in leading if steps[number].op in SPARSE_OPS]
    number = pick(sparse if sparse and not _rarely(pick, 4) else leading)
    step = steps[number]
    level = pick(kind.levels)
    names = [
        name for name in ERRORS if name not in ("right", *OF_SPARSE) and not (level == "jvp" and name in BACKWARD_ONLY)
    ]
    if step.op in SPARSE_OPS:
        names = list(SPARSE_ERRORS)
    if not any(value.is_complex() for value in [*(values[i] for i in step.values), values[first + number]]):
        names = [name for name in names if name not in COMPLEX]
    name = "right" if pick(range(4)) == 0 else pick(names)
    steps[number] = replace(step, planted=(level, name, pick(range(8))))


def generate(pick: Pick, kinds: Sequence[str] | None = None) -> Program:
    """A program of one of the kinds named or, by default, of all."""
    allowed = list(KINDS) if kinds is None else list(kinds)
    name = pick([name for name in allowed for _ in range(KINDS[name].weight)])
    kind = KINDS[name]
    second = kind.check == "gradgradcheck"
    program = Program(name, _inputs(pick, kind.sparse, kind.lazy, second), (), ())
    values = list(program.make_inputs())
    steps = _steps(pick, values, kind)
    outputs = _outputs(pick, values)
    if pick(range(3)) > 0:
        _plant(pick, steps, values, outputs, kind)
    keywords: dict[str, Any] = {}
    if kind.keywords.get("check_backward_ad", True) and _rarely(pick, 4):
        keywords["check_undefined_grad"] = False
    if _rarely(pick, 4):
        keywords["check_grad_dtypes"] = True
    if _rarely(pick, 10):
        keywords["nondet_tol"] = 1e-6
    if second and _rarely(pick, 4):
        keywords["gen_non_contig_grad_outputs"] = True
    own: dict[str, Any] = {}
    if _rarely(pick, 4):
        own["memory_limit"] = pick([1, 200, 1000])
    if pick([False, True]):
        own["seed"] = pick(range(10))
    return replace(
        program,
        steps=tuple(steps),
        outputs=tuple(outputs),
        keywords=tuple(keywords.items()),
        own=tuple(own.items()),
    )


@st.composite
def programs(draw: st.DrawFn, kinds: Sequence[str] | None = None) -> Program:
    """`generate` as a strategy."""
    return generate(lambda options: draw(st.sampled_from(options)), kinds)
