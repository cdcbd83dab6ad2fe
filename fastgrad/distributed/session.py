"""A function over all ranks as one function: rank 0 directs, all ranks evaluate and differentiate it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from fastgrad.core.ranks import RankError, RankFailure, Ranks, rank_failure
from fastgrad.distributed.placements import (
    Difference,
    Placement,
    Space,
    checked_mesh,
    checked_placement,
    difference,
    dual,
    mismatch,
    parts_of,
    whole_of,
)
from fastgrad.problem.arguments import as_tuple
from fastgrad.report.number_text import count

Parts = list[Tensor | None]
"""The parts of a tensor, one per rank; None for a rank without a gradient."""


@dataclass(frozen=True)
class Order:
    """A request of rank 0 to a rank.

    Attributes
    ----------
    graph
        The number of the graph that the rank makes, if `record`.
    parent
        The graph to run backward through; None: call func.
    inputs
        The rank's parts of the inputs, in the order of the graph's inputs.
    cotangents
        The rank's parts of grad_outputs; None if undefined.
    forget
        Graphs that are no longer needed.
    """

    graph: int
    record: bool
    inputs: tuple[Tensor, ...]
    parent: int | None = None
    cotangents: tuple[Tensor | None, ...] = ()
    forget: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A rank's parts of the results, with requires_grad, and the placements of DTensors.

    is_single: whether func returned one tensor, not several. written: per grad_output, its values after backward has
    written to it, or None. overwritten: the same per output of the graph.
    """

    parts: tuple[Tensor | None, ...]
    differentiable: tuple[bool, ...]
    spaces: tuple[Space | None, ...] = ()
    is_single: bool = False
    written: tuple[Tensor | None, ...] = ()
    overwritten: tuple[Tensor | None, ...] = ()


@dataclass
class _LocalGraph:
    inputs: list[Tensor]
    outputs: list[Tensor | None]
    kept: tuple[Tensor | None, ...]  # copies of the outputs
    values: tuple[Tensor, ...]


class Member:
    """One rank: calls func with its own arguments and given values of the checked tensors, and runs backward."""

    def __init__(self, func: Callable[..., Any], arguments: Sequence[Any], checked: Sequence[int]) -> None:
        self._func, self._arguments = func, arguments
        self._inputs: list[Tensor] = [arguments[i] for i in checked]
        self._memory = [_memory_of(tensor) for tensor in self._inputs]
        self._kept = [memory.clone() for memory in self._memory]
        self._graphs: dict[int, _LocalGraph] = {}

    def parts(self) -> tuple[Tensor, ...]:
        """The current values of this rank's parts of the inputs."""
        return tuple(memory.detach().cpu().clone() for memory in self._memory)

    def restore(self) -> None:
        self._set(self._kept)

    def obey(self, order: Order) -> Answer:
        """Executes a request and returns the answer."""
        for number in order.forget:
            self._graphs.pop(number, None)
        return self._call(order) if order.parent is None else self._backward(order, self._graphs[order.parent])

    def _set(self, values: Sequence[Tensor]) -> None:
        for memory, value in zip(self._memory, values, strict=True):
            memory.copy_(value)

    def _call(self, order: Order) -> Answer:
        self._set(order.inputs)
        with torch.set_grad_enabled(order.record):
            results = self._func(*self._arguments)
            tensors = [result for result in as_tuple(results) if isinstance(result, Tensor)]
            outputs = [_local(tensor) for tensor in tensors]
        answer = _answer(outputs)
        if order.record:
            self._graphs[order.graph] = _LocalGraph(list(self._inputs), list(outputs), answer.parts, order.inputs)
        placed: list[Any] = [tensor.placements[0] if isinstance(tensor, DTensor) else None for tensor in tensors]
        spaces = tuple(None if placement is None else Space(placement, dual(placement), True) for placement in placed)
        return replace(answer, spaces=spaces, is_single=isinstance(results, Tensor))

    def _backward(self, order: Order, graph: _LocalGraph) -> Answer:
        self._set(graph.values)
        used: dict[int, tuple[Tensor, Tensor]] = {}
        leaves: list[Tensor] = []
        for k, (output, cotangent) in enumerate(zip(graph.outputs, order.cotangents, strict=True)):
            if cotangent is not None and output is not None and output.requires_grad:
                leaves.append(_copied(cotangent, output.device, output.dtype).requires_grad_(order.record))
                used[k] = output, leaves[-1]
            elif order.record:  # an undefined grad_output: a leaf that gets no gradient
                is_number = output is not None and (output.is_floating_point() or output.is_complex())
                like = output if output is not None and is_number else torch.zeros(())
                leaves.append(torch.zeros_like(like).requires_grad_())
        gradients: Sequence[Tensor | None] = [None] * len(graph.inputs)
        if used:
            outputs, cotangents = zip(*used.values(), strict=True)
            gradients = torch.autograd.grad(
                outputs, graph.inputs, cotangents, create_graph=order.record, retain_graph=True, allow_unused=True
            )
            with torch.set_grad_enabled(order.record):
                gradients = [_placed_as(x, gradient) for x, gradient in zip(graph.inputs, gradients, strict=True)]
        answer = _answer(gradients)
        if order.record:
            inputs = [*leaves, *graph.inputs]
            self._graphs[order.graph] = _LocalGraph(inputs, list(gradients), answer.parts, graph.values)
        own = [used[k][1] if k in used else None for k in range(len(graph.outputs))]
        return replace(answer, written=_written(own, order.cotangents), overwritten=_written(graph.outputs, graph.kept))


def _written(tensors: Sequence[Tensor | None], before: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The values of the tensors whose values are no longer those before, apart from the dtype; None for the others."""
    now = [None if tensor is None else tensor.detach().cpu() for tensor in tensors]
    return tuple(
        None if found is None or old is None or torch.equal(found, old.to(found.dtype)) else found.clone()
        for found, old in zip(now, before, strict=True)
    )


def _copied(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A copy in memory of its own, with the strides of the original: backward may depend on them."""
    held = tensor.detach()
    for dimension, (size, stride) in enumerate(zip(held.shape, held.stride(), strict=True)):
        if stride == 0 and size > 1:
            held = held.narrow(dimension, 0, 1)
    copy = torch.empty_strided(held.shape, held.stride(), dtype=dtype, device=device)
    return copy.copy_(held).expand(tensor.shape)


def _memory_of(tensor: Tensor) -> Tensor:
    """A tensor's local elements, for writes that autograd does not see."""
    own: Any = tensor.detach()
    return own.to_local().data if isinstance(tensor, DTensor) else tensor.data


def _local(result: Tensor) -> Tensor:
    """The rank's part of a result; for a Partial() result, backward gets grad_outputs as for Replicate()."""
    if not isinstance(result, DTensor):
        return result
    checked_mesh("a result", result.device_mesh.ndim)
    return result.to_local(grad_placements=[dual(placement) for placement in result.placements])


def _placed_as(x: Tensor, gradient: Tensor | None) -> Tensor | None:
    if not isinstance(gradient, DTensor) or not isinstance(x, DTensor):
        return gradient
    return gradient.redistribute(placements=[dual(placement) for placement in x.placements]).to_local()


def _answer(outputs: Sequence[Tensor | None]) -> Answer:
    parts = tuple(None if output is None else output.detach().cpu().clone() for output in outputs)
    return Answer(parts, tuple(output is not None and output.requires_grad for output in outputs))


@dataclass
class Graph:
    """The results of func or of a backward on rank 0, and a description of their graph, whose parts all ranks hold.

    Attributes
    ----------
    depth
        0: of func; 1: of its backward, and so on.
    inputs, outputs
        The placements of the inputs and outputs.
    input_like, output_like
        For each input and output, tensors with the shapes and dtypes of its parts.
    parts, differentiable
        For each output, its parts, and whether it requires grad on any rank.
    results
        The values of the whole outputs, in the memory of rank 0's own tensors; empty if there are none.
    """

    number: int
    depth: int
    inputs: list[Space]
    outputs: list[Space]
    input_like: list[list[Tensor]]
    output_like: list[list[Tensor]]
    parts: list[Parts]
    differentiable: list[bool]
    results: list[Tensor | None] = field(default_factory=list)

    def whole(self, number: int, device: torch.device) -> Tensor | None:
        """The whole tensor of an output, with zeros for ranks that have no gradient; None if no rank has one."""
        parts = self.parts[number]
        if all(part is None for part in parts):
            return None
        likes = self.output_like[number]
        held = [torch.zeros_like(like) if part is None else part for part, like in zip(parts, likes, strict=True)]
        return whole_of(held, self.outputs[number].placement).to(device)


class Session:
    """The session on rank 0.

    Attributes
    ----------
    base
        For each input, its parts with their original values.
    is_single
        Whether func returned a tensor, and not several.
    broken
        Why the ranks can no longer work together.
    differences
        For each replicated tensor, the first place where ranks held different values: by ("output", number),
        ("gradient", number of the input), or the name and number of a higher derivative.
    """

    def __init__(self, ranks: Ranks, member: Member, inputs: list[Space], outputs: Sequence[Space] | None) -> None:
        """outputs: the placements of the results; None if they are DTensors."""
        self._ranks, self._member = ranks, member
        self.inputs, self._outputs = inputs, outputs
        self._numbers = itertools.count()
        self._forgotten: list[int] = []
        self.base: list[list[Tensor]] = []
        self.is_single = False
        self.broken: RankError | None = None
        self.differences: dict[tuple[str, int], Difference] = {}

    def call(self, values: Sequence[Tensor], record: bool) -> Graph:
        """The results of func at whole inputs, in the dtypes of the ranks' inputs: other dtypes would be rounded."""
        for k, (value, base) in enumerate(zip(values, self.base, strict=True)):
            if value.dtype != base[0].dtype:
                own = str(base[0].dtype).removeprefix("torch.")
                raise TypeError(f"a distributed function runs only in the dtypes of its inputs: input {k} is {own}")
        inputs = zip(values, self.inputs, self.base, strict=True)
        parts = [parts_of(value.detach().cpu(), space.placement, base) for value, space, base in inputs]
        number, of_rank = next(self._numbers), list(zip(*parts, strict=True))
        answers = self._run([Order(number, record, own) for own in of_rank])
        found, differentiable = _by_result(answers)
        outputs, self.is_single = self._placed(answers[0].spaces), answers[0].is_single
        like = [[part for part in result if part is not None] for result in found]
        for k, (space, held) in enumerate(zip(outputs, like, strict=True)):
            why = mismatch(space.placement, held)
            if why:
                raise ValueError(f"result {k} {why}.")
        self._note_differences([("output", k) for k in range(len(found))], found, outputs)
        return self._made(Graph(number, 0, self.inputs, outputs, self.base, like, found, differentiable), record)

    def backward(self, graph: Graph, cotangents: Sequence[Tensor | None], record: bool) -> Graph:
        """The gradients of a graph's inputs, for whole cotangents of its outputs."""
        slots = zip(cotangents, graph.outputs, graph.output_like, strict=True)
        none: Parts = [None] * self._ranks.count
        given = [none if v is None else cotangent_parts(v, space, like) for v, space, like in slots]
        number, of_rank = next(self._numbers), list(zip(*given, strict=True))
        orders = [Order(number, record, (), graph.number, own) for own in of_rank]
        answers = self._run(orders, of_gradients=graph.depth > 0)
        _pass_on(cotangents, [space.gradient for space in graph.outputs], given, [one.written for one in answers])
        of_ranks = [one.overwritten for one in answers]
        if graph.results:
            _pass_on(graph.results, [space.placement for space in graph.outputs], graph.parts, of_ranks)
        found, differentiable = _by_result(answers)
        duals = [space.of_gradients for space in graph.outputs], [space.of_gradients for space in graph.inputs]
        inputs, like = [*duals[0], *graph.inputs], [*graph.output_like, *graph.input_like]
        made = Graph(number, graph.depth + 1, inputs, duals[1], like, graph.input_like, found, differentiable)
        self._note_differences(self._names_of_gradients(graph), found, duals[1])
        return self._made(made, record)

    def _names_of_gradients(self, graph: Graph) -> list[tuple[str, int]]:
        """The names and numbers of the gradients of a graph's inputs."""
        if graph.depth != 1:
            name = f"derivative of order {graph.depth + 1}, number" if graph.depth else "gradient"
            return [(name, k) for k in range(len(graph.inputs))]
        count, name = len(self.inputs), "the second derivative with respect to"
        cotangents = [(f"{name} grad_output", k) for k in range(len(graph.inputs) - count)]
        return cotangents + [(f"{name} input", k) for k in range(count)]

    def _placed(self, own: Sequence[Space | None]) -> list[Space]:
        """The placements of the results; own: those of results that are DTensors."""
        for k, space in enumerate(own):
            if space is not None:
                checked_placement(f"result {k}", space.placement)
        named = [None] * len(own) if self._outputs is None else list(self._outputs)
        if len(named) != len(own) or any(one is None and other is None for one, other in zip(named, own, strict=True)):
            given = "none" if self._outputs is None else [space and space.placement for space in named]
            raise ValueError(
                f"outputs must name {count(len(own), 'placement')} (Shard(dim), Replicate() or Partial()), one for "
                f"each result of func, got {given}."
            )
        return [space for space in (other or one for one, other in zip(named, own, strict=True)) if space is not None]

    def _made(self, graph: Graph, record: bool) -> Graph:
        if record:
            weakref.finalize(graph, self._forgotten.append, graph.number)
        return graph

    def end(self, report: Any) -> None:
        """Sends the report, or an exception, to the other ranks."""
        with suppress(RankError):  # the ranks may be unreachable
            self._ranks.end(report)

    def _run(self, orders: list[Order], of_gradients: bool = False) -> list[Answer]:
        """The answers of all ranks to their requests; of_gradients: whether these run the backward of gradients."""
        if self.broken is not None:
            raise self.broken
        forget = tuple(self._forgotten)
        self._forgotten.clear()
        orders = [replace(order, forget=forget) for order in orders]
        try:
            self._ranks.order(orders)
            answers: list[Any] = [_attempt(self._member, orders[0], 0)]
            answers += self._ranks.answers()
        except RankError as error:
            self.broken = error
            raise
        failures = [answer for answer in answers if isinstance(answer, RankFailure)]
        if failures:
            failed = RankError(_in_words(failures, self._ranks.count, of_gradients))
            if any(one.collective for one in failures) or len(failures) < len(answers):
                self.broken = failed
            raise failed
        return answers

    def _note_differences(
        self, names: Sequence[tuple[str, int]], results: Sequence[Parts], spaces: Sequence[Space]
    ) -> None:
        for name, parts, space in zip(names, results, spaces, strict=True):
            like = next((part for part in parts if part is not None), None)
            if like is not None and name not in self.differences:
                held = [torch.zeros_like(like) if part is None else part for part in parts]  # None means zero
                found = difference(held, space.placement)
                if found is not None:
                    self.differences[name] = found


def follow(ranks: Ranks, member: Member) -> Any:
    """Executes requests on another rank than 0 until rank 0 sends the report or an exception; returns it."""
    try:
        while True:
            order = ranks.next_order()
            if not isinstance(order, Order):
                ranks.answer(None)
                return order
            ranks.answer(_attempt(member, order, ranks.rank))
    except (KeyboardInterrupt, SystemExit) as error:  # also while it waits for a request
        with suppress(RankError):
            ranks.answer(rank_failure(ranks.rank, error))
        raise


def _attempt(member: Member, order: Order, rank: int) -> Answer | RankFailure:
    try:
        return member.obey(order)
    except Exception as error:
        return rank_failure(rank, error)


def _pass_on(
    tensors: Sequence[Tensor | None],
    placements: Sequence[Placement],
    before: Sequence[Parts],
    of_ranks: Sequence[Sequence[Tensor | None]],
) -> None:
    """Writes to whole tensors what backward wrote to their parts on any rank, so that the check sees it."""
    for whole, placement, parts, *written in zip(tensors, placements, before, *of_ranks, strict=True):
        if whole is None or all(part is None for part in written):
            continue
        now = [part if part is not None else old for part, old in zip(written, parts, strict=True)]
        if isinstance(placement, Replicate):
            now = written
        whole.copy_(whole_of([part for part in now if part is not None], placement))


def cotangent_parts(cotangent: Tensor, space: Space, like: Sequence[Tensor]) -> Parts:
    """The part of a grad_output for each rank, contiguous if the grad_output is."""
    whole = _copied(cotangent, torch.device("cpu"), cotangent.dtype)
    parts = parts_of(whole, space.gradient, [torch.zeros_like(part) for part in like])
    return [part.contiguous() if cotangent.is_contiguous() else part for part in parts]


def _by_result(answers: Sequence[Answer]) -> tuple[list[Parts], list[bool]]:
    counts = {len(answer.parts) for answer in answers}
    if len(counts) > 1:
        listed = ", ".join(f"{len(answer.parts)} on rank {rank}" for rank, answer in enumerate(answers))
        raise ValueError(f"func must return the same number of tensors on each rank, got {listed}.")
    parts = [list(held) for held in zip(*(answer.parts for answer in answers), strict=True)]
    return parts, [any(require) for require in zip(*(answer.differentiable for answer in answers), strict=True)]


def _in_words(failures: Sequence[RankFailure], count: int, of_gradients: bool = False) -> str:
    """Describes errors of ranks, the cause first; a rank that timed out waited for another rank.

    of_gradients: whether they occurred in the backward of gradients.
    """
    raised = [one for one in failures if not one.collective]
    waited = [one for one in failures if one.collective]
    parts = [f"rank {one.rank} raised {one.text}" for one in raised]
    parts += [f"rank {one.rank} timed out in {one.collective}" for one in waited]
    others = sorted(set(range(count)) - {one.rank for one in failures})
    if waited and others:
        verb = "ranks" if len(others) > 1 else "rank"
        parts.append(f"{verb} {', '.join(map(str, others))} did not enter it")
        if of_gradients:
            parts[-1] += (
                " (in second derivatives, autograd runs no collective on a rank whose gradients do not need it)"
            )
    return "; ".join(parts)


class _Remote(torch.autograd.Function):
    """The function of all ranks together, or its backward, as one node of rank 0's graph."""

    @staticmethod
    def forward(ctx: Any, session: Session, parent: Graph | None, record: bool, *tensors: Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        if parent is None:
            graph = session.call([tensor for tensor in tensors if tensor is not None], record)
        else:
            graph = session.backward(parent, tensors[: len(parent.outputs)], record)
        ctx.session, ctx.graph = session, graph
        ctx.save_for_backward(*tensors)
        device = next(tensor.device for tensor in tensors if tensor is not None)
        whole = [graph.whole(number, device) for number in range(len(graph.parts))]
        graph.results = [None if one is None else one.detach() for one in whole]
        pairs = zip(whole, graph.differentiable, strict=True)
        ctx.mark_non_differentiable(*(one for one, exists in pairs if not exists and one is not None))
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        record = torch.is_grad_enabled()
        gradients = _Remote.apply(  # type: ignore[no-untyped-call]
            ctx.session, ctx.graph, record, *cotangents, *ctx.saved_tensors
        )
        return None, None, None, *gradients


def whole_function(session: Session, checked: Sequence[int]) -> Callable[..., Any]:
    """The function over all ranks, whose checked arguments are whole tensors."""

    def whole(*arguments: Any) -> Any:
        tensors = [arguments[i] for i in checked]
        record = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        results = _Remote.apply(session, None, record, *tensors)  # type: ignore[no-untyped-call]
        return results[0] if session.is_single else results

    return whole
