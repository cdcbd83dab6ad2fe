"""The results of a small check, on which the complete check builds if it does not pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from fastgrad.core.errors import raise_unless_of_func
from fastgrad.core.native import Derivatives, SmallProblem
from fastgrad.report.data import Pair
from fastgrad.report.failure import Mode, Part
from fastgrad.verdict.comparison import Findings

Result = TypeVar("Result")

OPEN_SUMS = "decided by the exact engine, because the sketch did not decide"
"""The note on sums that were left open."""


@dataclass(kw_only=True)
class SmallCheck(Findings):
    """The results of a small check: for its report if it passes, otherwise for the complete check to start from.

    Attributes
    ----------
    problem
        func, its first evaluation and its graph.
    changed
        Where and what func returned instead of its outputs, if `columns` could not be computed for this reason.
    moved, jvp_moved
        As in `Findings`; also true if a gradient had a wrong size or dtype, or func returned outputs of another kind.
        The complete check finds the error. If it finds none, only some calls were wrong.
    errors
        By output and part, and by input, the largest absolute and relative error; None if something remains to be
        judged.
    tangent_errors
        By input and part, and by output, the same for forward mode.
    differences
        Directional derivatives that agree with VJPs; the weight of each output, empty if all are 1; and the bound.
    steps
        Each step, relative to eps; the noise up to which two evaluations per direction suffice; and the directional
        derivatives, whether they agree or not.
    left_open
        The early VJPs of sums that did not agree, although all calls were consistent. The reason may be curvature,
        kinks or rounding.
    bound
        The size of an error of one entry that the sums show.
    vjps, jvps
        Calls of backward, and of func in forward mode.
    seconds
        By phase, without the first evaluation; not measured for the quickest checks.
    passes
        Whether nothing remains to be judged.
    """

    problem: SmallProblem
    changed: tuple[int, int, Any] | None = None
    errors: list[list[tuple[float, float]]] | None = None
    tangent_errors: list[list[tuple[float, float]]] | None = None
    differences: tuple[Derivatives, Tensor, float] | None = None
    steps: list[tuple[float, float, Derivatives]] = field(default_factory=list)
    left_open: Tensor | None = None
    bound: float = 0.0
    vjps: int = 0
    jvps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    passes: bool = False

    def noted(self, run: Callable[[], Result | None]) -> Result | None:
        """The result of calling func or its backward; None if it raises, which is noted."""
        try:
            return run()
        except Exception as error:
            raise_unless_of_func(error)
            self.early = error
            return None

    def compared(self) -> list[Pair]:
        """What was compared, if all entries agree; nothing if sums were compared."""
        inputs, outputs = self.problem.inputs, self.problem.outputs
        forward = list(_pairs(inputs, outputs, self.tangent_errors, "forward"))
        forward.sort(key=lambda pair: (pair.part == "real", pair.output, pair.input))
        return [*_pairs(outputs, inputs, self.errors, "reverse"), *forward]


_Places = list[tuple[int, int, int]]
"""By input or output: its position among arguments or results, its elements, and the coordinates of each."""


def _pairs(
    outer: _Places, inner: _Places, errors: list[list[tuple[float, float]]] | None, mode: Mode
) -> Iterator[Pair]:
    """What was compared, by part of the outer side (outputs in reverse mode), and by tensor of the inner one."""
    if errors is None:
        return
    numbered = list(enumerate(outer))
    parts: list[tuple[int, int, int, Part]] = [
        (number, position, elements, "imaginary" if width == 2 else "all")
        for number, (position, elements, width) in numbered
    ]
    parts += [(number, position, elements, "real") for number, (position, elements, width) in numbered if width == 2]
    for (number, position, elements, part), largest in zip(parts, errors, strict=True):
        for other, ((place, size, _), own) in enumerate(zip(inner, largest, strict=True)):
            places = (number, other, position, place) if mode == "reverse" else (other, number, place, position)
            yield Pair(*places, part, mode, elements * size, 0, True, *own, False)
