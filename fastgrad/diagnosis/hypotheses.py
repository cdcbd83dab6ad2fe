"""Hypotheses about a wrong gradient, tested by random sums: sums of all entries of its Jacobian with random weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fastgrad.core import native
from fastgrad.core.random import EVIDENCE_STREAM, direction
from fastgrad.core.torch_private import nodes_behind
from fastgrad.diagnosis.chance import is_supported
from fastgrad.diagnosis.constant_parts import ConstantPart, ConstantParts, HeldConstant
from fastgrad.diagnosis.locations import Elements, Rule
from fastgrad.diagnosis.rearrangements import MAX_SHIFTS, adjoint, rearrangements
from fastgrad.diagnosis.wording import Side, Wording
from fastgrad.problem.coordinates import Block
from fastgrad.problem.problem import Problem
from fastgrad.report.evidence import CauseName, Explanation, Sample
from fastgrad.report.settings import Settings

HYPOTHESIS_CALLS = 10
"""A hypothesis is tested only if so many calls of func and backward may still be made; most need no more."""

NEAR = 1e-7
"""Largest relative difference of two random sums with which a hypothesis is accepted. Without the hypothesis, their
relative difference must be more than 100 times this."""

MAX_NAMED = 3
"""Largest number of operators that a cause names."""

MAX_INPUTS = 4
"""Largest number of inputs whose gradients or values are tried."""

_OF_FUNC = {"dependent inputs", "constant part"}
"""Causes that are found from the operators and inputs of func. There are few such hypotheses, so it is unlikely that
one of them agrees by chance."""

_OF_NUMERICAL = {"transposed", "rolled", "permuted", "missing factor"}
"""Causes that predict the analytical entries from numerical ones; different values of either are evidence."""

Sums = tuple[Tensor, Tensor]
"""The terms of two sums that are equal if a hypothesis holds."""


@dataclass(frozen=True)
class _Vectors:
    """Vectors for random sums: u, v, gradient = v^T J by backward, and slope = J u by differences.

    u is random at the coordinates of one input, v at those of one output; both are zero elsewhere. float64, shapes
    (n,), (m,), (n,) and (m,).
    """

    u: Tensor
    v: Tensor
    gradient: Tensor
    slope: Tensor


_Hypothesis = tuple[CauseName, str, Callable[[_Vectors], Sums]]
"""A cause, its text, and the sums that are equal if it holds."""


@dataclass
class Hypotheses:
    """Hypotheses about the wrong analytical Jacobian of one output with respect to one input.

    A method that tests a hypothesis returns it as an Explanation if it holds, otherwise None. record_graph: whether
    func must record gradients. name_of: gives the name of an input in messages. left: returns the number of calls that
    may still be made. sample: entries of this Jacobian, if known.
    """

    problem: Problem
    settings: Settings
    output: Block
    input: Block
    record_graph: bool
    name_of: Callable[[Block], str]
    left: Callable[[], int]
    sample: Sample | None
    tried: int = 0
    """Number of hypotheses that were compared with the analytical Jacobian."""

    def independent(self) -> Explanation | None:
        """Whether the gradient is right if autograd does not follow dependences between inputs."""
        problem, block = self.problem, self.input
        dependent = [other for other in problem.inputs if _depends_on(other.tensor, block.tensor)]
        if not dependent:
            return None
        leaf = block.tensor.detach().clone().requires_grad_()
        names = ", ".join(self.name_of(other) for other in dependent)
        text = (
            f"{names} {'was' if len(dependent) == 1 else 'were'} computed from {self.name_of(block)}; autograd "
            "includes this dependence, and differences do not: pass independent tensors, for example "
            "tensor.detach().requires_grad_()"
        )
        return self._explained("dependent inputs", text, partial(self._with_leaf, leaf))

    def confirms(self, rule: Rule) -> bool | None:
        """Whether random sums confirm a rule for the positions of wrong entries; None if they do not decide.

        True if sums over the elements that the rule does not cover agree, and sums over the covered elements outside
        the sample, if there are any, disagree, also at each boundary that the rule names. False if sums over the
        elements that it does not cover disagree, or if sums at a boundary agree.
        """
        if rule.sampled is None or not max(map(_error_of, self._vectors)) > 100 * NEAR:
            return None
        block = self.input if rule.side == "input" else self.output
        elements = torch.arange(block.size // block.width, device="cpu")
        if block.elements is not None:
            elements = block.elements.cpu()
        values = (self.problem.coordinates() if rule.side == "input" else self.problem.base())[block.slice].cpu()
        every = Elements(tuple(block.tensor.shape), elements, None if block.is_complex else values)
        covered = rule.covers(every)
        new = covered & ~torch.isin(elements, rule.sampled)
        for edge in rule.edges:
            there = covered & edge(every)
            if not bool((there & ~new).any()) and self._difference_over(there, rule.side) <= 100 * NEAR:
                return False
        elsewhere = self._difference_over(~covered, rule.side)
        if elsewhere > 100 * NEAR:
            return False
        is_wrong = not bool(new.any()) or self._difference_over(new, rule.side) > 100 * NEAR
        return True if elsewhere <= NEAR and is_wrong else None

    def _difference_over(self, chosen: Tensor, side: Side) -> float:
        """The relative difference of sums over some elements of the input or the output; 0 if all terms are zero.

        chosen: which elements, bool, shape (elements,).
        """
        one, block = max(self._vectors, key=_error_of), self.input if side == "input" else self.output
        own = chosen.repeat_interleave(block.width).to(self.problem.device)
        if side == "input":
            u = _changed(one.u, block, own.mul)
            terms, others = u * one.gradient, one.v * self._slope_along(u)
        else:
            v = _changed(one.v, block, own.mul)
            terms, others = one.u * self.problem.vjp(v.unsqueeze(0), only=self.output)[0], v * one.slope
        return _relative_difference(terms, others) if bool(terms.any()) or bool(others.any()) else 0.0

    def swapped(self) -> Explanation | None:
        """Whether the gradient is that of another input of the same shape."""
        block = self.input
        others = [other for other in self.problem.inputs if other is not block and _same_elements(other, block)]
        for other in others[:MAX_INPUTS]:
            name, own = self.name_of(other), self.name_of(block)
            text = f"the gradient of {own} is that of {name}: backward returns gradients in the wrong order"
            found = self._explained("swapped gradients", text, partial(self._of_other, other))
            if found is None:
                continue
            if all(_error_of(self._at_other(other, one)) <= NEAR for one in self._vectors):
                text = f"backward returns the gradient of {name} twice: for {name}, where it is right, and for {own}"
                return replace(found, name="repeated gradient", text=text)
            return found
        return None

    def _of_other(self, other: Block, one: _Vectors) -> Sums:
        """Sums that are equal if the gradient is that of another input."""
        return one.u * one.gradient, one.v * self._at_other(other, one).slope

    def _at_other(self, other: Block, one: _Vectors) -> _Vectors:
        """The vectors for the Jacobian with respect to another input."""
        along = _at(self.problem.n, other, one.u[self.input.slice])
        return replace(one, u=along, slope=self._slope_along(along))

    def multiplied(self) -> Explanation | None:
        """Whether an input is a missing or an extra factor of the gradient; needs no further calls."""
        return self._first_explained(self._factors())

    def _factors(self) -> Iterator[_Hypothesis]:
        output, block, x = self.output, self.input, self.problem.coordinates()
        if block.elements is not None or output.width != 1:
            return
        real = (one for one in self.problem.inputs[:MAX_INPUTS] if one.width == 1 and one.elements is None)
        for factor, side in itertools.product(real, (output, block)):
            values = x[factor.slice].reshape(factor.tensor.shape)
            if side.width != 1 or not _broadcasts(values, side):
                continue
            # A superfluous factor scales the gradient by this per element of the input, or of grad_output.
            extra = values.expand(side.tensor.shape).reshape(-1)
            missing, superfluous = (1 / extra, extra) if side is output else (extra, 1 / extra)
            gradient, name = f"the gradient of {self.name_of(block)}", self.name_of(factor)
            text = f"{gradient} must also be multiplied by {name}"
            yield "missing factor", text, partial(self._changed, side, missing.mul)
            text = f"{gradient} is multiplied once too often by {name}"
            yield "missing factor", text, partial(self._changed, side, superfluous.mul)

    def _changed(self, side: Block, change: Callable[[Tensor], Tensor], one: _Vectors) -> Sums:
        """Sums that are equal if the gradient is the right one after a change of the coordinates of one side."""
        if side is self.input:
            return _changed(one.u, side, change) * one.gradient, one.v * one.slope
        return one.u * one.gradient, one.v * _changed(one.slope, side, change)

    def result_for_input(self) -> Explanation | None:
        """Whether backward uses the input in place of the result: it is then right if the input equals the result."""
        output, block = self.output, self.input
        if not _same_elements(output, block):
            return None
        result = self.problem.base()[output.slice].reshape(block.tensor.shape)
        leaf = result.to(block.tensor.dtype).requires_grad_()
        name = self.name_of(block)
        text = (
            f"backward uses {name} in place of output {output.position}: the gradient would be right if {name} had the "
            f"values of output {output.position}"
        )
        return self._explained("saved tensor", text, partial(self._with_leaf, leaf))

    def rearranged(self) -> Explanation | None:
        """Whether the analytical Jacobian is a rearrangement of the right one."""
        if not self._sums_show_error:
            return None
        output, block = self.output, self.input
        most = min(MAX_SHIFTS, max(16, MAX_SHIFTS * 4096 // max(output.size, block.size)))
        words = Wording(self.name_of(block), f"output {output.position}")
        sides: tuple[tuple[Side, Block], ...] = (("input", block), ("output", output))
        found = self._first_explained(
            (name, text, partial(self._changed, own, partial(_in_order, order, own.width)))
            for side, own in sides
            if own.elements is None
            for name, text, order in rearrangements(tuple(own.tensor.shape), side, words, most)
        )
        if found is not None or not _same_elements(output, block):
            return found
        return self._explained("transposed", adjoint(words), self._transposed)

    def at_changed_input(self) -> Explanation | None:
        """Whether the gradient is right at another point: a saved input may have been changed to that point."""
        for own, name, away in _points(self.problem, self.name_of):
            if self.left() < 4:
                return None

            text = (
                f"the gradient would be right for {name} in place of {own}: a saved tensor was changed, or backward "
                "computes with this value"
            )
            try:
                found = self._explained("saved tensor", text, partial(self._displaced, away))
            except Exception:  # the point may be outside the domain of func
                continue
            if found is not None:
                return found
        return None

    def _displaced(self, away: Tensor, one: _Vectors) -> Sums:
        """Sums that are equal if the gradient is right at a displacement from x."""
        return one.u * one.gradient, one.v * self._slope_along(one.u, away)

    def cut(self) -> Explanation | None:
        """Whether the gradient is right if the results at which recording ends, as by detach(), are constants."""
        cuts = self._constants.cuts
        if not cuts:
            return None
        text = f"autograd treats {_all_of(cuts)} as a constant"
        return self._explained("constant part", text, partial(self._held, cuts))

    def taken_for_constant(self) -> Explanation | None:
        """Whether the gradient is right if some results or operands of operators in a custom forward are constants."""
        if not self._sums_show_error:
            return None
        text = "backward treats {} as a constant: its contribution to the gradient is missing"
        if self.settings.order > 1:
            text = (
                "derivatives of backward treat {}, which forward saved, as a constant: compute it in backward, or also "
                "return it from forward"
            )
        affordable = itertools.takewhile(lambda _: self.left() >= 4, self._constants.groups())
        return self._first_explained(
            ("constant part", text.format(_all_of(parts)), partial(self._held, parts)) for parts in affordable
        )

    @cached_property
    def _constants(self) -> ConstantParts:
        parts = ConstantParts()
        with parts:
            self.problem.evaluate(True)
        return parts

    def _held(self, parts: tuple[ConstantPart, ...], one: _Vectors) -> Sums:
        """Sums that are equal if the gradient is right with some parts as constants."""
        slope = self._slope_along(one.u, around=lambda: HeldConstant(self._constants, parts))
        return one.u * one.gradient, one.v * slope

    @cached_property
    def _vectors(self) -> tuple[_Vectors, ...]:
        found = []
        for number in range(2):
            u = self._random(self.problem.n, self.input, 2 + number)
            v = self._random(self.problem.m, self.output, 4 + number)
            gradient = self.problem.vjp(v.unsqueeze(0), only=self.output)[0]
            found.append(_Vectors(u, v, gradient, self._slope_along(u)))
        return tuple(found)

    def _random(self, size: int, block: Block, number: int) -> Tensor:
        """A vector of coordinates that is random in one block and zero elsewhere: float64, shape (size,)."""
        own = direction(block.size, self.settings.seed, EVIDENCE_STREAM + 16 * number)
        return _at(size, block, own.to(self.problem.device))

    @cached_property
    def _sums_show_error(self) -> bool:
        """Whether all random sums show that the gradient is wrong."""
        return all(_error_of(one) > 100 * NEAR for one in self._vectors)

    def _first_explained(self, hypotheses: Iterable[_Hypothesis]) -> Explanation | None:
        return next(filter(None, itertools.starmap(self._explained, hypotheses)), None)

    def _explained(self, name: CauseName, text: str, sums: Callable[[_Vectors], Sums]) -> Explanation | None:
        """The hypothesis, if random sums show an error without it and its own sums are equal for all vectors."""
        if not self._sums_show_error:
            return None
        self.tried += 1
        error = 0.0
        for one in self._vectors:
            difference = _relative_difference(*sums(one))
            if not difference <= NEAR:  # true if the difference is NaN, too
                return None
            error = max(error, difference)
        return Explanation(name, text, error) if name in _OF_FUNC or self._is_supported(name) else None

    def _is_supported(self, name: CauseName) -> bool:
        """Whether the known entries are enough to decide between the hypotheses that were tried."""
        sample = self.sample
        if sample is None:
            return False
        some = (sample.analytical != 0) | (sample.numerical != 0)
        predicted = [sample.analytical, sample.numerical] if name in _OF_NUMERICAL else [sample.analytical]
        return any(is_supported(entries[some], sample.failing[some], self.tried) for entries in predicted)

    def _slope_along(
        self, u: Tensor, away: Tensor | float = 0.0, around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Tensor:
        """The derivative of the outputs along u, at a displacement from x: float64, shape (m,).

        away: the displacement. around: gives the context manager for each evaluation.
        """
        step = 2.0**-17
        values = []
        for sign in (1.0, -1.0):
            with around():
                values.append(self.problem.evaluate(self.record_graph, away + sign * step * u))
        return (values[0] - values[1]) / (2 * step)

    def _with_leaf(self, leaf: Tensor, one: _Vectors) -> Sums:
        """Sums that are equal if the gradient is right with `leaf` in place of the input."""
        output = self.problem.evaluate_with([self.input], [leaf])[self.output.index]
        own = one.v[self.output.slice]
        inputs = [native.InputBlock(leaf, 0, 0.0)]
        products, _ = native.vjp_coordinates(native.Graph((output,), (leaf,)), inputs, own.unsqueeze(0))
        self.problem.vjps += 1
        return one.u[self.input.slice] * products[0], one.v * one.slope

    def _transposed(self, one: _Vectors) -> Sums:
        output, block = self.output, self.input
        slope = self._slope_along(_at(self.problem.n, block, one.v[output.slice]))
        return one.u * one.gradient, one.u[block.slice] * slope[output.slice]


def _depends_on(tensor: Tensor, other: Tensor) -> bool:
    """Whether autograd recorded that `tensor` was computed from `other`."""
    if tensor is other or tensor.grad_fn is None or not other.requires_grad:
        return False
    return get_gradient_edge(other).node in set(nodes_behind([tensor]))


def _points(problem: Problem, name_of: Callable[[Block], str]) -> Iterator[tuple[str, str, Tensor]]:
    """Values that may have replaced a saved input: its name, their descriptions, and their displacements from x."""
    x = problem.coordinates()
    for block in problem.inputs:
        here, name = x[block.slice], name_of(block)
        results = [
            (f"{name} overwritten by output {output.position}", problem.base()[output.slice])
            for output in problem.outputs
            if output.size == block.size
        ]
        changed = [
            (f"{name} clamped at 0", here.clamp(min=0)),
            (f"the absolute value of {name}", here.abs()),
            (f"{name} times 2", 2 * here),
            (f"{name} plus 1", here + 1),
            (f"{name} minus 1", here - 1),
            (f"{name} divided by 2", here / 2),
            (f"{name} with the opposite sign", -here),
            (f"{name} squared", here * here),
        ]
        for words, there in results + changed:
            yield name, words, _at(problem.n, block, there - here)


def _at(size: int, block: Block, values: Tensor) -> Tensor:
    """A vector with these values at the coordinates of a block, and zero elsewhere: float64, shape (size,)."""
    along = torch.zeros(size, dtype=torch.float64, device=values.device)
    along[block.slice] = values
    return along


def _all_of(parts: tuple[ConstantPart, ...]) -> str:
    return " and ".join(dict.fromkeys(map(str, parts[:MAX_NAMED])))  # two calls in one line have the same text


def _error_of(one: _Vectors) -> float:
    """The relative difference of the sums of both Jacobians."""
    return _relative_difference(one.u * one.gradient, one.v * one.slope)


def _relative_difference(terms: Tensor, others: Tensor) -> float:
    """The difference of two sums, divided by the sum of the moduli of their terms; infinite if that is zero."""
    size = float(terms.abs().sum() + others.abs().sum())
    return abs(float(terms.sum() - others.sum())) / size if size else math.inf


def _same_elements(block: Block, other: Block) -> bool:
    """Whether both are real and have the same shape, and all their elements are coordinates."""
    complete = block.elements is None and other.elements is None
    return complete and block.tensor.shape == other.tensor.shape and block.width == other.width == 1


def _broadcasts(values: Tensor, block: Block) -> bool:
    """Whether values can be expanded to the shape of a block."""
    own, shape = values.shape, block.tensor.shape
    return len(own) <= len(shape) and all(a in (1, b) for a, b in zip(reversed(own), reversed(shape), strict=False))


def _changed(coordinates: Tensor, block: Block, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A copy of the input or output coordinates, in which those of one block are changed."""
    changed = coordinates.clone()
    changed[block.slice] = change(coordinates[block.slice])
    return changed


def _in_order(order: Tensor, width: int, coordinates: Tensor) -> Tensor:
    """The coordinates of a block with its elements in another order."""
    return coordinates.reshape(-1, width)[order.to(coordinates.device)].reshape(-1)
