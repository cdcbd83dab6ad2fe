"""The results of a small check, on which the complete check builds if it does not pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fastgrad.core.native import SmallProblem, WholeBackward
from fastgrad.report.data import Certificate, Pair, Part
from fastgrad.verdict.grad_outputs import BatchedDifference


@dataclass(slots=True)
class SmallCheck:
    """The results of a small check: for its report if it passes, otherwise for the complete check to start from.

    Attributes
    ----------
    problem
        func, its first evaluation and its graph.
    backward
        All VJPs; None if there are none yet.
    raised
        What backward raised.
    columns
        The numerical Jacobian: float64, shape (n, m); or where and what func returned instead of its outputs.
    moved
        Whether a VJP was seen that does not fit the others, or has another size or dtype, or func returned outputs of
        another kind: the complete check names the fault, or it was one of some calls only.
    batched
        Where batched gradients differ from single ones.
    errors
        By output and part, and by input, the largest absolute and relative error; None if something remains to be
        judged.
    products
        If sums were compared, grad_outputs and their VJPs: float64, shapes (rows, m) and (rows, n).
    bound
        The error of an entry that sums show.
    certificates
        What repeated calls of a custom backward certify.
    vjps
        Calls of backward.
    seconds
        By phase, without the first evaluation; not measured for the quickest checks.
    passes
        Whether nothing remains to be judged.
    """

    problem: SmallProblem
    backward: WholeBackward | None = None
    raised: Exception | None = None
    columns: Tensor | tuple[int, int, Any] | None = None
    moved: bool = False
    batched: BatchedDifference | None = None
    errors: list[list[tuple[float, float]]] | None = None
    products: tuple[Tensor, Tensor] | None = None
    bound: float = 0.0
    certificates: list[Certificate] = field(default_factory=list)
    vjps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    passes: bool = False

    @property
    def is_judged(self) -> bool:
        """Whether something was seen that is an error of func or of its backward, even if everything else agrees."""
        return self.raised is not None or self.moved or isinstance(self.columns, tuple)

    def pairs(self) -> list[Pair]:
        """What was compared, if all entries agree; nothing if sums were compared."""
        if self.errors is None:
            return []
        outputs = list(enumerate(self.problem.outputs))
        parts: list[tuple[int, int, int, Part]] = [
            (number, position, elements, "imaginary" if width == 2 else "all")
            for number, (position, elements, width) in outputs
        ]
        parts += [(number, position, elements, "real") for number, (position, elements, width) in outputs if width == 2]
        return [
            Pair(number, k, position, of_input, part, "reverse", elements * size, 0, True, *largest, False)
            for (number, position, elements, part), errors in zip(parts, self.errors, strict=True)
            for k, ((of_input, size, _), largest) in enumerate(zip(self.problem.inputs, errors, strict=True))
        ]
