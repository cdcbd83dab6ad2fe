"""Coloring, transposing and sorting of sparsity patterns in Python; csrc/coloring.h documents the contracts."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def _rows(starts: Tensor, members: Tensor) -> list[list[int]]:
    first, found = starts.tolist(), members.tolist()
    return [found[a:b] for a, b in pairwise(first)]


def _in_order(colors: list[int]) -> Tensor:
    return torch.tensor(colors, dtype=torch.int64, device="cpu")


def _orders(rows: list[list[int]]) -> list[list[int]]:
    """The natural order and, if it is different, the order of decreasing number of targets."""
    natural = list(range(len(rows)))
    largest_first = sorted(natural, key=lambda vertex: -len(rows[vertex]))
    return [natural] if natural == largest_first else [natural, largest_first]


def _first_fit(rows: list[list[int]], order: list[int], targets: int) -> list[int]:
    taken = [0] * targets  # the colors at each target, as bits
    colors = [0] * len(rows)
    for vertex in order:
        seen = 0
        for target in rows[vertex]:
            seen |= taken[target]
        bit = ~seen & (seen + 1)
        colors[vertex] = bit.bit_length() - 1
        for target in rows[vertex]:
            taken[target] |= bit
    return colors


def color(starts: Tensor, members: Tensor, targets: int) -> Tensor:
    rows = _rows(starts, members)
    bound = int(torch.bincount(members, minlength=1).max())
    orders = _orders(rows)
    colors = _first_fit(rows, orders[0], targets)
    if max(colors, default=0) + 1 > max(bound, 1):
        for order in orders[1:]:
            colors = min(colors, _first_fit(rows, order, targets), key=max)
    return _in_order(colors)


def _star_fit(rows: list[list[int]], order: list[int], most: int) -> list[int] | None:
    """First fit, with counts of neighbors per color; None if it needs more than `most` colors."""
    colors = [-1] * len(rows)
    leaves: list[dict[int, tuple[int, int]]] = [{} for _ in rows]

    def count(vertex: int, own: int) -> int:
        return leaves[vertex].get(own, (0, 0))[0]

    for vertex in order:
        refused = set()
        neighbors = [neighbor for neighbor in rows[vertex] if neighbor != vertex]
        for neighbor in neighbors:
            own = colors[neighbor]
            if own < 0:
                continue
            refused.add(own)
            several = count(vertex, own) > 1
            for other, (number, last) in leaves[neighbor].items():
                if several or (number == 1 and count(last, own) > 1):
                    refused.add(other)
        found = next(c for c in range(len(refused) + 1) if c not in refused)
        if found >= most:
            return None
        colors[vertex] = found
        for neighbor in neighbors:
            leaves[neighbor][found] = (count(neighbor, found) + 1, vertex)
    return colors


def star_color(starts: Tensor, members: Tensor, most: int) -> Tensor:
    rows = _rows(starts, members)
    best: list[int] | None = None
    for order in _orders(rows):
        count = max(best, default=-1) + 1 if best is not None else None
        if count is None or count > 2:
            best = _star_fit(rows, order, most if count is None else count - 1) or best
    return _in_order(best or [])


def bucket(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    starts = torch.zeros(count + 1, dtype=torch.int64, device="cpu")
    starts[1:] = torch.bincount(keys, minlength=count).cumsum(0)
    return keys.argsort(stable=True), starts


def transpose(starts: Tensor, members: Tensor, targets: int) -> tuple[Tensor, Tensor]:
    order, starts_of_targets = bucket(members, targets)
    vertices = torch.arange(len(starts) - 1, device="cpu").repeat_interleave(starts.diff())
    return starts_of_targets, vertices[order]
