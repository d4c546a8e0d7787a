"""Making a choice of units legal: where layers need equal counts, the nearest choice that has them.

Blocks of all balances cut the units into cells (units in the same blocks). Removing the same share from every cell of
connected balances keeps every block equal, whatever the balances are; the share nearest to what was asked is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ifso.errors import KeepError
from ifso.graph.channel_graph import STAYS, Balance, ChannelGraph, Keep


def balance(graph: ChannelGraph, keep: Keep, scores: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The nearest legal choice to ``keep``: equal counts where grouped convolutions, shuffles and norms need them.

    As few units as possible change sides; at a tie more stay. ``scores`` (importance per unit) decides which: the most
    important come back first, the least important go first. Without it, units with lower numbers come back first.
    """
    kept = graph.kept(keep)
    ranking = _ranking(graph, scores)
    balanced = balance_vector(kept, graph.balances, ranking)
    return {group.name: balanced[group.units].clone() for group in graph.groups}


def _ranking(graph: ChannelGraph, scores: Mapping[str, Tensor] | None) -> Tensor:
    ranking = -torch.arange(graph.num_units, dtype=torch.float64)
    for name, values in (scores or {}).items():
        group = graph.group(name)
        if tuple(values.shape) != (group.size,):
            raise KeepError(f"scores[{name!r}] has shape {tuple(values.shape)}; group {name!r} has {group.size} units")
        ranking[group.units] = values.detach().double().cpu()
    return ranking


def balance_vector(kept: Tensor, balances: Iterable[Balance], ranking: Tensor) -> Tensor:
    """:func:`balance` on the bool vector of :meth:`ChannelGraph.kept`."""
    kept = kept.clone()
    for connected in _connected(list(balances)):
        if all(len(set(balance.counts(kept).tolist())) == 1 for balance in connected):
            continue
        _settle(kept, _cells(connected), ranking)
    return kept


def _connected(balances: list[Balance]) -> list[list[Balance]]:
    """Balances that share units, together."""
    lots: list[tuple[set[int], list[Balance]]] = []
    for one in balances:
        units, members = set(one.blocks.flatten().tolist()) - {STAYS}, [one]
        apart = []
        for other_units, others in lots:
            if units & other_units:
                units |= other_units
                members = others + members
            else:
                apart.append((other_units, others))
        lots = [*apart, (units, members)]
    return [members for _, members in lots]


def _cells(connected: list[Balance]) -> list[list[int]]:
    """Units that stand equally often in the same blocks. Slices that stay form cells too: they limit the share."""
    marks: dict[int, list[tuple[int, int, int]]] = {}
    for number, one in enumerate(connected):
        for row, block in enumerate(one.blocks.tolist()):
            counts: dict[int, int] = {}
            for unit in block:
                counts[unit] = counts.get(unit, 0) + 1
            for unit, count in counts.items():
                marks.setdefault(unit, []).append((number, row, count))
    cells: dict[tuple[tuple[int, int, int], ...], list[int]] = {}
    for unit, found in marks.items():
        if unit != STAYS:
            cells.setdefault(tuple(found), []).append(unit)
    return list(cells.values())


def _settle(kept: Tensor, cells: list[list[int]], ranking: Tensor) -> None:
    """Keep the same share of every cell, the one that changes the fewest units."""
    step = math.gcd(*[len(cell) for cell in cells])
    have = [int(kept[torch.tensor(cell)].sum()) for cell in cells]
    sizes = [len(cell) for cell in cells]

    def changes(share: int) -> int:
        return sum(abs(count - size * share // step) for count, size in zip(have, sizes, strict=True))

    share = min(range(step, 0, -1), key=changes)
    for cell in cells:
        _keep_exactly(kept, torch.tensor(cell), len(cell) * share // step, ranking)


def _keep_exactly(kept: Tensor, cell: Tensor, count: int, ranking: Tensor) -> None:
    """Let ``count`` units of the cell stay: those kept now first, by rank."""
    by_rank = ranking[cell].argsort(descending=True, stable=True)
    order = by_rank[kept[cell][by_rank].long().argsort(descending=True, stable=True)]
    kept[cell] = False
    kept[cell[order[:count]]] = True


def check_keep(graph: ChannelGraph, kept: Tensor) -> None:
    """Refuse a choice that empties a layer or breaks a balance."""
    for name, layout in graph.layouts.items():
        for layer in layout.layers:
            if not bool(kept[layer].any()):
                raise KeepError(f"keep removes every channel of {name}; keep at least one unit there")
    for one in graph.balances:
        counts = one.counts(kept).tolist()
        if len(set(counts)) > 1:
            raise KeepError(
                f"keep breaks a balance in {one.where or 'the model'}: its blocks keep {_brief(counts)} channels, "
                "but need equally many; use keep = ifso.balance(graph, keep)"
            )


def _brief(counts: list[int]) -> str:
    return str(counts) if len(counts) <= 8 else f"[{', '.join(map(str, counts[:8]))}, …]"
