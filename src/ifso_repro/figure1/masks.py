"""Which units are removed: each one alone, then random subsets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ifso.graph.channel_graph import ChannelGraph

Removed = dict[str, list[int]]
_TRIES = 200


def draw(graph: ChannelGraph, count: int, sizes: Sequence[int], seed: int) -> list[Removed]:
    """Up to ``count`` different masks: every single unit, then subsets that take the ``sizes`` in turn.

    Subsets are drawn over all units of the network, and drawn again if a group would be left empty. If there are more
    single units than ``count``, those are spread over the network.
    """
    single = [(unit,) for unit in range(graph.num_units)]
    if count < len(single):
        return [_by_group(graph, single[index * len(single) // count]) for index in range(count)]
    random = torch.Generator().manual_seed(seed)
    chosen: list[tuple[int, ...]] = list(single)
    for turn in range(count - len(single) if sizes else 0):
        subset = _subset(graph, sizes[turn % len(sizes)], set(chosen), random)
        if subset is not None:
            chosen.append(subset)
    return [_by_group(graph, units) for units in chosen]


def _subset(
    graph: ChannelGraph, size: int, taken: set[tuple[int, ...]], random: torch.Generator
) -> tuple[int, ...] | None:
    """A new subset of that size, or None if there seems to be none."""
    for _ in range(_TRIES):
        units = tuple(sorted(torch.randperm(graph.num_units, generator=random)[:size].tolist()))
        removed = _by_group(graph, units)
        if units not in taken and all(len(removed.get(group.name, ())) < group.size for group in graph.groups):
            return units
    return None


def _by_group(graph: ChannelGraph, units: Sequence[int]) -> Removed:
    removed: Removed = {}
    for group in graph.groups:
        inside = [unit - group.first for unit in units if group.first <= unit < group.first + group.size]
        if inside:
            removed[group.name] = inside
    return removed


def keep(graph: ChannelGraph, removed: Removed) -> dict[str, Tensor]:
    """As :func:`ifso.masked` takes it."""
    kept = graph.keep_all()
    for name, units in removed.items():
        kept[name][units] = False
    return kept


def size(removed: Removed) -> int:
    """How many units go.

    >>> size({"0": [1, 4], "3": [0]})
    3
    """
    return sum(len(units) for units in removed.values())
