"""Combines the tensors of the ranks into whole tensors, and splits them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from fastgrad.core.precision import ROUNDING, spacing
from fastgrad.core.tensors import near
from fastgrad.report.number_text import count

Placement = Shard | Replicate | Partial


def dual(placement: Any) -> Any:
    """The default placement of the gradient of a tensor, as in DTensor."""
    return Replicate() if isinstance(placement, Partial) else placement


def checked_placement(name: str, placement: Any) -> Placement:
    """The placement of a tensor of this name, if it is supported."""
    if isinstance(placement, Partial) and (type(placement) is not Partial or placement.reduce_op != "sum"):
        raise NotImplementedError(
            f"{name} is {placement!r}, but partial tensors must be sums. For an average, divide each rank's tensor by "
            "the number of ranks, and use Partial()."
        )
    if not isinstance(placement, (Shard, Replicate, Partial)):
        raise TypeError(f"{name} needs a placement (Shard(dim), Replicate() or Partial()), got {placement!r}.")
    return placement


def checked_mesh(name: str, dimensions: int) -> None:
    """Raises if the mesh of a DTensor of this name has several dimensions."""
    if dimensions != 1:
        raise NotImplementedError(
            f"{name} is a DTensor of a mesh with {dimensions} dimensions, but meshes must have one: check func for one "
            "dimension at a time, with tensors of a submesh (mesh[name]) and its group."
        )


@dataclass(frozen=True)
class Space:
    """The placements of a tensor and of its gradient; is_dtensor: whether torch places the gradients."""

    placement: Placement
    gradient: Placement
    is_dtensor: bool = False

    @property
    def of_gradients(self) -> Space:
        """The placements of the gradient, and of derivatives with respect to it: that of the tensor.

        For DTensors, torch adds up the parts of a derivative with respect to a replicated gradient.
        """
        second = dual(self.gradient) if self.is_dtensor else self.placement
        return Space(self.gradient, second, self.is_dtensor)


def checked_space(name: str, placement: Any, gradient: Any, is_dtensor: bool = False) -> Space:
    """The placements of a tensor of this name and of its gradient, if they fit: both have parts of the same shapes.

    gradient: None for the default.
    """
    own = checked_placement(name, placement)
    of_gradient = checked_placement(f"the gradient of {name}", dual(own) if gradient is None else gradient)
    if of_gradient != own and (isinstance(own, Shard) or isinstance(of_gradient, Shard)):
        allowed = repr(own) if isinstance(own, Shard) else "Replicate() or Partial()"
        raise ValueError(f"the gradient of {name} must be {allowed}, because {name} is {own!r}, got {of_gradient!r}.")
    return Space(own, of_gradient, is_dtensor)


def whole_of(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """The whole tensor, from the parts of the ranks."""
    if isinstance(placement, Shard):
        return torch.cat(list(parts), placement.dim)
    if isinstance(placement, Partial):
        return torch.stack(list(parts)).sum(0)
    return parts[0].clone()


def parts_of(whole: Tensor, placement: Placement, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a tensor, one per rank.

    For a sum, the difference from `like` is distributed unequally over the ranks, so that a missing rank is noticed.

    like: the previous parts of the ranks or, for a new sum, zeros; for a sharded tensor, only their shapes matter.
    """
    if isinstance(placement, Shard):
        return list(whole.split([part.shape[placement.dim] for part in like], placement.dim))  # type: ignore[no-untyped-call]
    if isinstance(placement, Replicate):
        return [whole for _ in like]
    change = whole - whole_of(like, placement)
    total = len(like) * (len(like) + 1) / 2
    shares = [change * ((rank + 1) / total) for rank in range(len(like) - 1)]
    shares.append(change - sum(shares))
    return [part + share for part, share in zip(like, shares, strict=True)]


def held_by(placement: Shard, parts: Sequence[torch.Size], index: Sequence[int]) -> tuple[int, list[int]]:
    """The rank that holds an element, and its index in that rank's part."""
    starts = list(accumulate((shape[placement.dim] for shape in parts), initial=0))
    rank = bisect_right(starts, index[placement.dim]) - 1  # the last rank whose part begins here or before
    if rank == len(parts):
        raise IndexError(f"index {list(index)} is outside all parts; their shapes: {[list(shape) for shape in parts]}")
    own = list(index)
    own[placement.dim] -= starts[rank]
    return rank, own


def mismatch(placement: Placement, parts: Sequence[Tensor]) -> str:
    """The reason why parts do not form a tensor; empty if they do."""
    shapes, others = [part.shape for part in parts], "shapes"
    if isinstance(placement, Shard):
        needed = placement.dim + 1 if placement.dim >= 0 else -placement.dim  # negative: counted from the last
        fewest, rank = min((part.ndim, rank) for rank, part in enumerate(parts))
        if fewest < needed:
            needs = f"needs at least {count(needed, 'dimension')}"
            return f"is {placement}, which {needs}, but has {count(fewest, 'dimension')} on rank {rank}"
        shapes, others = [torch.Size(np.delete(shape, placement.dim)) for shape in shapes], "other dimensions"
    if len(set(shapes)) > 1:
        listed = ", ".join(f"{list(part.shape)} on rank {rank}" for rank, part in enumerate(parts))
        return f"is {placement}, but its {others} differ: {listed}"
    if len({part.dtype for part in parts}) > 1:
        return f"has different dtypes on the ranks: {', '.join(str(part.dtype) for part in parts)}"
    return ""


@dataclass(frozen=True)
class Difference:
    """An element whose values on `rank` and on rank 0 differ, but should be the same."""

    rank: int
    index: list[int]
    found: complex
    on_first: complex


def difference(parts: Sequence[Tensor], placement: Placement) -> Difference | None:
    """An element of a replicated tensor that differs between a rank and rank 0 by more than rounding."""
    if not isinstance(placement, Replicate):
        return None
    for rank, part in enumerate(parts):
        if torch.equal(part, parts[0]) or not part.numel():
            continue
        # Each rank may add up a sum over ranks in a different order.
        allowed = ROUNDING * spacing(part.dtype) * parts[0].abs().nan_to_num(0.0, 0.0, 0.0).max()
        wrong = ~near(part, parts[0], allowed)
        if bool(wrong.any()):
            apart = (part - parts[0]).abs()[wrong]
            index = wrong.nonzero()[int(apart.nan_to_num(torch.inf).argmax())].tolist()
            return Difference(rank, index, part[tuple(index)].item(), parts[0][tuple(index)].item())
    return None
