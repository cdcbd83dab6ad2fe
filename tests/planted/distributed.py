"""Distributed functions, right ones and ones with mistakes between ranks.

Each needs a process group: `Row.make(rank, count)` gives what this rank passes to `fastgrad.distributed.check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional as F

from fastgrad.report.evidence import RankCauseName

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """A function on all ranks.

    Attributes
    ----------
    is_wrong
        Whether its gradient is wrong.
    causes
        One of these causes must be named first; empty: any cause.
    fewest
        The smallest number of ranks at which the mistake has an effect.
    is_first
        Whether it is the first mistake of its function.
    """

    name: str
    make: Callable[[int, int], Call]
    is_wrong: bool = False
    causes: tuple[RankCauseName, ...] = ()
    fewest: int = 2
    is_first: bool = False


MISSING: tuple[RankCauseName, ...] = ("reduction missing between ranks",)
FACTOR: tuple[RankCauseName, ...] = ("number of ranks",)
TWICE: tuple[RankCauseName, ...] = ("reduced twice", "number of ranks")
WRONG_SHARD: tuple[RankCauseName, ...] = ("wrong shard",)
ONE_RANK: tuple[RankCauseName, ...] = ("one rank",)


# Collectives, and operators of them whose backward is given.


def total(x: Tensor) -> Tensor:
    """The sum over all ranks."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x)
    return x


def everybodys(x: Tensor) -> list[Tensor]:
    """The tensors of all ranks, which have the same shape."""
    x = x.detach().contiguous()
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x)
    return found


def neighbors(x: Tensor, step: int) -> Tensor:
    """The tensor of the rank that is `step` before this one."""
    return everybodys(x)[(dist.get_rank() - step) % dist.get_world_size()]


def exchanged(x: Tensor) -> Tensor:
    """All to all: part k of dimension 0 goes to rank k."""
    rank = dist.get_rank()
    return torch.cat([each.chunk(dist.get_world_size())[rank] for each in everybodys(x)])


def own(x: Tensor, dim: int, rank: int | None = None) -> Tensor:
    """The part of this rank along a dimension."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank() if rank is None else rank].clone()


def operator(forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A linear operator of one tensor; differentiated once more, its backward has `forward` as its backward."""

    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return forward(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return operator(backward, forward)(grad)

    return Planted.apply  # type: ignore[no-any-return]


def mean(x: Tensor) -> Tensor:
    """The mean over all ranks."""
    return total(x) / dist.get_world_size()


def twice(x: Tensor) -> Tensor:
    """A sum that is reduced twice."""
    return total(total(x))


def same(x: Tensor) -> Tensor:
    """A copy."""
    return x.detach().clone()


def gathered(dim: int, x: Tensor) -> Tensor:
    """All parts along a dimension."""
    return torch.cat(everybodys(x), dim)


def padded(dim: int, x: Tensor) -> Tensor:
    """The part of this rank, and zeros in the places of the others."""
    parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    parts[dist.get_rank()] = x
    return torch.cat(parts, dim)


def reduced_and_split(dim: int, x: Tensor) -> Tensor:
    """The part of this rank of the sum over ranks."""
    return own(total(x), dim)


def next_part(dim: int, x: Tensor) -> Tensor:
    """The next rank's part of the sum over ranks."""
    return own(total(x), dim, (dist.get_rank() + 1) % dist.get_world_size())


def scaled(factor: Callable[[int], float], x: Tensor) -> Tensor:
    """A tensor times a factor that depends on the number of ranks."""
    return factor(dist.get_world_size()) * x


def on_first_rank(x: Tensor) -> Tensor:
    """The sum over ranks on rank 0; the other ranks keep their own tensors."""
    summed = total(x)
    return summed if dist.get_rank() == 0 else same(x)


def nothing_on_last_rank(x: Tensor) -> Any:
    """A copy; None on the last rank."""
    return None if dist.get_rank() == dist.get_world_size() - 1 else same(x)


# Functions, by the backward of the operator in them.


def numbers(seed: int, *shape: int) -> Tensor:
    """The same standard normal numbers on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def leaf(tensor: Tensor) -> Tensor:
    """A part that requires grad."""
    return tensor.clone().requires_grad_()


def column_parallel(backward: Callable[[Tensor], Tensor], rank: int, count: int) -> Call:
    """Columns of a weight on each rank; backward sums over ranks."""
    copy = operator(same, backward)
    w = numbers(2, 2, count)
    return (
        lambda x, w, b: torch.tanh(copy(x) @ w + b),
        (leaf(numbers(1, 2, 2)), leaf(own(w, 1)), leaf(own(numbers(3, count), 0))),
        {"placements": [Replicate(), Shard(1), Shard(0)], "outputs": Shard(1)},
    )


def row_parallel(backward: Callable[[Tensor], Tensor], rank: int, count: int) -> Call:
    """Rows of a weight on each rank, whose products are summed; backward has the whole gradient already."""
    reduce = operator(total, backward)
    x, w = numbers(1, 2, count), numbers(2, count, 2)
    return (
        lambda x, w: reduce(x @ w).sin(),
        (leaf(own(x, 1)), leaf(own(w, 0))),
        {"placements": [Shard(1), Shard(0)], "outputs": Replicate()},
    )


def embedding(backward: Callable[[Tensor], Tensor], rank: int, count: int) -> Call:
    """Rows of a table on each rank. Rows of other ranks count as zero, and the sum over ranks is the embedding."""
    reduce = operator(total, backward)
    rows = 2
    words = torch.tensor([0, 2 * count - 1, 1, 1])

    def embed(table: Tensor, words: Tensor) -> Tensor:
        mine = (words >= rank * rows) & (words < (rank + 1) * rows)
        found = table[(words - rank * rows).clamp(0, rows - 1)]
        return reduce(torch.where(mine.unsqueeze(1), found, 0.0))

    table = own(numbers(1, rows * count, 2), 0)
    return embed, (leaf(table), words), {"placements": [Shard(0), None], "outputs": Replicate()}


def cross_entropy(backward: Callable[[Tensor], Tensor], rank: int, count: int) -> Call:
    """Columns of logits on each rank; the loss is the same on all."""
    reduce = operator(total, backward)
    classes = 2
    targets = torch.tensor([1, 2 * count - 1])

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        sums = reduce(logits.exp().sum(1))
        mine = (targets >= rank * classes) & (targets < (rank + 1) * classes)
        chosen = logits.gather(1, (targets - rank * classes).clamp(0, classes - 1).unsqueeze(1)).squeeze(1)
        return sums.log() - reduce(torch.where(mine, chosen, 0.0))

    logits = own(numbers(1, 2, classes * count), 1)
    return loss, (leaf(logits), targets), {"placements": [Shard(1), None], "outputs": Replicate()}


def layer_norm(backward: Callable[[Tensor], Tensor], rank: int, count: int) -> Call:
    """Sequence parallel: a layer norm of each rank's rows, gathered for a column-parallel product."""
    gather = operator(partial(gathered, 0), backward)

    def block(x: Tensor, weight: Tensor, w: Tensor) -> Tensor:
        return gather(F.layer_norm(x, (3,), weight)) @ w

    inputs = leaf(own(numbers(1, count, 3), 0)), leaf(numbers(2, 3)), leaf(own(numbers(3, 3, count), 1))
    places = {"placements": [Shard(0), Replicate(), Shard(1)], "gradients": [None, Partial(), None]}
    return block, inputs, {**places, "outputs": Shard(1)}


def gathered_product(backward: Callable[[Tensor], Tensor], rank: int, count: int) -> Call:
    """All rows of what is sharded, for a column-parallel product."""
    gather = operator(partial(gathered, 0), backward)
    inputs = leaf(own(numbers(1, count, 2), 0)), leaf(own(numbers(2, 2, count), 1))
    return lambda x, w: gather(x) @ w, inputs, {"placements": [Shard(0), Shard(1)], "outputs": Shard(1)}


def attention(backward: Callable[[Tensor], Tensor], rank: int, count: int) -> Call:
    """Ring attention: keys and values are passed around the ranks, queries stay."""
    rotate = operator(lambda x: neighbors(x, 1), backward)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores, values = [], []
        for _ in range(count):
            scores.append(q @ k.mT)
            values.append(v)
            k, v = rotate(k), rotate(v)
        return torch.cat(scores, 1).softmax(1) @ torch.cat(values)

    parts = tuple(leaf(own(numbers(seed, count, 2), 0)) for seed in (1, 2, 3))
    return attend, parts, {"placements": [Shard(0)] * 3, "outputs": Shard(0)}


def experts(backward: Callable[[Tensor], Tensor], rank: int, count: int) -> Call:
    """Rows are sent to the rank of their expert, and sent back."""
    send = operator(exchanged, backward)
    return (
        lambda x, w: send(send(x) @ w[0]).sigmoid(),
        (leaf(own(numbers(1, count * count, 2), 0)), leaf(own(numbers(2, count, 2, 1), 0))),
        {"placements": [Shard(0), Shard(0)], "outputs": Shard(0)},
    )


def averaging(backward: Callable[[Tensor], Tensor], rank: int, count: int) -> Call:
    """Data parallel: the mean of the ranks' losses; gradients of the weight are averaged in backward."""
    weight = operator(same, backward)
    return (
        lambda x, w: ((x @ weight(w)).tanh().sum() / count,),
        (own(numbers(1, count, 3), 0), leaf(numbers(2, 3))),
        {"placements": [None, Replicate()], "outputs": Partial()},
    )


def pipeline(backward: Callable[[Tensor], Tensor], rank: int, count: int) -> Call:
    """A pipeline: one stage per rank, each sends to the next rank, and the last rank has the result."""
    send = operator(lambda x: neighbors(x, 1), backward)

    def stages(x: Tensor, w: Tensor) -> Tensor:
        h = x if rank == 0 else 0 * x
        for step in range(count):
            h = (h @ w[0]).tanh() if rank == step else 0 * h
            h = send(h)
        return h  # it is back on rank 0

    inputs = leaf(numbers(1, 1, 2)), leaf(own(numbers(2, count, 2, 2), 0))
    return stages, inputs, {"placements": [Replicate(), Shard(0)], "gradients": [Partial(), None], "outputs": Partial()}


def scattered(backward: Callable[[Tensor], Tensor], rank: int, count: int) -> Call:
    """Each rank takes its rows of a replicated tensor; backward gathers them."""
    scatter = operator(lambda x: own(x, 0), backward)
    return (
        lambda x: scatter(x.square()).exp(),
        (leaf(0.3 * numbers(1, count, 2)),),
        {"placements": [Replicate()], "outputs": Shard(0)},
    )


def reduce_scattered(backward: Callable[[Tensor], Tensor], rank: int, count: int) -> Call:
    """Rows of a sum over ranks; backward gathers."""
    reduce = operator(partial(reduced_and_split, 0), backward)
    return (
        lambda x, w: reduce(x @ w),
        (leaf(own(numbers(1, count, count), 1)), leaf(own(numbers(2, count, 2), 0))),
        {"placements": [Shard(1), Shard(0)], "outputs": Shard(0)},
    )


def replicated(backward: Callable[[Tensor], Tensor], rank: int, count: int) -> Call:
    """The same on every rank."""
    copy = operator(same, backward)
    return lambda x: copy(x.square()), (leaf(numbers(1, 3)),), {"placements": [Replicate()], "outputs": Replicate()}


def replicated_cube(is_wrong: bool, rank: int, count: int) -> Call:
    """Second derivatives of the same on every rank; if is_wrong, zero on the last rank."""

    def cube(x: Tensor) -> Tensor:
        fixed = x.detach()
        return 3 * fixed**2 * x - 2 * fixed**3 if is_wrong and rank == count - 1 else x**3

    keywords = {"placements": [Replicate()], "outputs": Replicate(), "order": 2}
    return cube, (leaf(numbers(1, 3)),), keywords


def overwritten_result(placement: Any, rank: int, count: int) -> Call:
    """The same on every rank; on the last rank, backward writes to the result."""
    results = []

    def forward(x: Tensor) -> Tensor:
        results[:] = [same(x)]
        return results[0]

    def backward(grad: Tensor) -> Tensor:
        if rank == count - 1:
            results[0].data.mul_(2)
        return same(grad)

    copy = operator(forward, backward)
    return lambda x: copy(x.square()), (leaf(numbers(1, 3)),), {"placements": [placement], "outputs": placement}


def dtensor_matmul(factor: float, rank: int, count: int) -> Call:
    """A product of DTensors, which have their own placements."""
    from torch.distributed.tensor import DTensor, init_device_mesh

    mesh = init_device_mesh("cpu", (count,))
    x = DTensor.from_local(numbers(1, 2, 2), mesh, [Replicate()]).requires_grad_()
    w = DTensor.from_local(own(numbers(2, 2, count), 1), mesh, [Shard(1)]).requires_grad_()

    def multiply(x: Any, w: Any) -> Any:
        y = x @ w
        if factor != 1 and y.requires_grad:
            y.register_hook(lambda grad: factor * grad)
        return y

    return multiply, (x, w), {}


def dtensor_square(placement: Any, rank: int, count: int) -> Call:
    """Second derivatives of a function of DTensors whose result is partial; placement: of the first input."""
    from torch.distributed.tensor import DTensor, init_device_mesh

    mesh = init_device_mesh("cpu", (count,))
    x = DTensor.from_local(numbers(1, 2, 2), mesh, [placement]).requires_grad_()
    w = DTensor.from_local(own(numbers(2, 2, count), 1), mesh, [Shard(1)]).requires_grad_()
    return lambda x, w: ((x @ w) ** 2).sum(), (x, w), {"order": 2}


def wrong_declaration(make: Callable[..., Call], changes: dict[str, Any], rank: int, count: int) -> Call:
    """A right function with wrong placements."""
    func, inputs, keywords = make(rank, count)
    return func, inputs, {**keywords, **changes}


Backward = Callable[[Tensor], Tensor]

SUMS: Sequence[tuple[str, Backward, tuple[RankCauseName, ...]]] = (
    ("all_reduce missing", same, MISSING),
    ("all_reduce twice", twice, FACTOR),
    ("mean for a sum", mean, FACTOR),
    ("sum divided twice", lambda x: mean(x) / dist.get_world_size(), FACTOR),
    ("reduced on rank 0 only", on_first_rank, ONE_RANK),
)
"""Mistakes in a backward that should sum over ranks."""

COPIES: Sequence[tuple[str, Backward, tuple[RankCauseName, ...]]] = (
    ("all_reduce in backward", total, FACTOR),
    ("mean in backward, divided", partial(scaled, lambda n: 1 / n), FACTOR),
    ("two all_reduces in backward", twice, FACTOR),
    ("summed on rank 0 only", on_first_rank, ONE_RANK),
)
"""Mistakes in a backward that should pass on its grad_output."""


def _named(name: str, make: Any, right: Backward, mistakes: Sequence[tuple[str, Backward, Any]]) -> Iterator[Row]:
    yield Row(name, partial(make, right))
    for number, (mistake, backward, causes) in enumerate(mistakes):
        fewest = 3 if mistake == "gradients to another rank" else 2
        yield Row(f"{name}: {mistake}", partial(make, backward), True, causes, fewest, number == 0)


def rows() -> list[Row]:
    """All functions, the right ones first in each group."""
    gather, turned = partial(gathered, 0), lambda x: gathered(0, x).flip(0)
    scale = [("times the ranks", lambda n: float(n), FACTOR), ("divided by the ranks", lambda n: 1.0 / n, FACTOR)]

    def off_by_ranks(right: Backward) -> list[tuple[str, Backward, Any]]:
        return [(name, lambda x, f=f: scaled(f, right(x)), causes) for name, f, causes in scale]

    back = lambda x: neighbors(x, -1)  # noqa: E731
    columns, norm = partial(column_parallel, total), partial(layer_norm, partial(reduced_and_split, 0))
    declared: list[tuple[Any, ...]] = [
        ("whole gradient as Partial()", TWICE, columns, {"gradients": [Partial(), None, None]}),
        ("partial gradient as Replicate()", MISSING, norm, {"gradients": None}),
        ("sum of outputs as Replicate()", (), partial(averaging, total), {"outputs": Replicate()}),
    ]
    split = partial(reduced_and_split, 0)
    return [
        *_named("column-parallel linear", column_parallel, total, SUMS),
        *_named("row-parallel linear", row_parallel, same, COPIES),
        *_named("vocabulary-parallel embedding", embedding, same, COPIES),
        *_named("vocabulary-parallel cross entropy", cross_entropy, same, COPIES[:3]),
        *_named(
            "sequence-parallel layer norm",
            layer_norm,
            split,
            [
                ("own slice only", lambda x: own(x, 0), MISSING),
                ("slices to another rank", partial(next_part, 0), ()),
                *off_by_ranks(split),
            ],
        ),
        *_named(
            "ring attention",
            attention,
            back,
            [
                ("gradients to another rank", lambda x: neighbors(x, 1), ()),
                ("backward stays", same, ()),
                *((name, backward, ()) for name, backward, _ in off_by_ranks(back)),
            ],
        ),
        *_named(
            "gathered rows",
            gathered_product,
            split,
            [
                ("own slice only", lambda x: own(x, 0), MISSING),
                ("slices to another rank", partial(next_part, 0), WRONG_SHARD),
                *off_by_ranks(split),
            ],
        ),
        *_named(
            "experts by all to all",
            experts,
            exchanged,
            [("backward stays", same, ()), ("backward flipped", lambda x: exchanged(x).flip(0), ())],
        ),
        *_named("data-parallel averaging", averaging, total, SUMS),
        *_named("pipeline", pipeline, back, [("gradients to another rank", lambda x: neighbors(x, 1), ())]),
        *_named(
            "scatter",
            scattered,
            gather,
            [
                ("own part only", partial(padded, 0), MISSING),
                ("parts in another order", turned, ()),
                *off_by_ranks(gather),
            ],
        ),
        *_named(
            "reduce_scatter",
            reduce_scattered,
            gather,
            [("own part only", partial(padded, 0), MISSING), *off_by_ranks(gather)],
        ),
        *_named("replicated", replicated, same, [("no gradient on the last rank", nothing_on_last_rank, ())]),
        Row("replicated cube", partial(replicated_cube, False)),
        Row(
            "replicated cube: zero second derivatives on the last rank",
            partial(replicated_cube, True),
            True,
            is_first=True,
        ),
        *(
            Row(f"{kind} result overwritten in backward", partial(overwritten_result, placement), True, is_first=True)
            for kind, placement in (("replicated", Replicate()), ("sharded", Shard(0)))
        ),
        Row("DTensor matmul", partial(dtensor_matmul, 1.0)),
        Row("DTensor matmul: half", partial(dtensor_matmul, 0.5), True),
        *(
            Row(f"DTensor square, {kind} input", partial(dtensor_square, placement))
            for kind, placement in (("replicated", Replicate()), ("partial", Partial()))
        ),
        *(
            Row(f"declared: {name}", partial(wrong_declaration, *rest), True, causes)
            for name, causes, *rest in declared
        ),
    ]
