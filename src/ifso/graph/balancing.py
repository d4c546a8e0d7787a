"""Making a choice of units legal: where layers need equal counts, the nearest choice that has them.

A balance that shares no units with others is settled exactly. Where several meet, their blocks cut the units into cells
(units in the same blocks): the same share of every cell is kept, the one nearest to what was asked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ifso.errors import KeepError
from ifso.graph.channel_graph import STAYS, Balance, ChannelGraph, Keep, by_group


def balance(graph: ChannelGraph, keep: Keep, scores: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The nearest legal choice to ``keep``: equal counts where grouped convolutions, shuffles and norms need them.

    Few units change sides; at a tie more stay.

    Args:
        graph: from :func:`ifso.trace`.
        keep: for each group a bool tensor, True for units that stay; groups that are not named stay whole.
        scores: importance per unit, by group: the most important come back first, the least important go first.
            Without it, units with lower numbers come back first.

    Returns:
        A bool tensor for each group.

    Raises:
        KeepError: ``keep`` or ``scores`` do not fit the graph.
    """
    kept = graph.kept(keep)
    ranking = _ranking(graph, scores)
    return by_group(graph, balance_vector(kept, graph.balances, ranking))


def _ranking(graph: ChannelGraph, scores: Mapping[str, Tensor] | None) -> Tensor:
    ranking = -torch.arange(graph.num_units, dtype=torch.float64, device="cpu")
    for name, values in (scores or {}).items():
        group = graph.group(name)
        if tuple(values.shape) != (group.size,):
            raise KeepError(f"scores[{name!r}] has shape {tuple(values.shape)}; group {name!r} has {group.size} units")
        ranking[group.units] = values.detach().double().cpu()
    return ranking


def balance_vector(kept: Tensor, balances: Iterable[Balance], ranking: Tensor) -> Tensor:
    """:func:`balance` on the bool vector of :meth:`ChannelGraph.kept`."""
    kept = kept.clone()
    for connected in connected_balances(list(balances)):
        if _is_legal(kept, connected):
            continue
        if not (len(connected) == 1 and _settle_rows(kept, connected[0], ranking)):
            _settle_cells(kept, cells_of(connected), ranking)
        if not _is_legal(kept, connected):
            for one in connected:
                kept[one.blocks] = True
    return kept


def _is_legal(kept: Tensor, balances: Iterable[Balance]) -> bool:
    return all(len(set(one.counts(kept).tolist())) == 1 for one in balances)


@dataclass(frozen=True)
class _Row:
    """A block: ``fixed`` slices that stay whatever is chosen, and units that own ``each`` slices of it."""

    fixed: int
    each: int
    units: Tensor

    def count(self, kept: Tensor) -> int:
        return self.fixed + self.each * int(kept[self.units].sum())

    def possible(self) -> range:
        return range(self.fixed, self.fixed + self.each * self.units.numel() + 1, self.each)


def _settle_rows(kept: Tensor, balance: Balance, ranking: Tensor) -> bool:
    """One balance alone: the common count that changes the fewest units. False if its blocks share units unevenly."""
    rows, shared = _rows(balance, kept)
    if rows is None:
        return False
    have = [row.count(kept) for row in rows]
    common = set.intersection(*(set(row.possible()) for row in rows))
    targets = sorted((count for count in common if count + shared > 0), reverse=True)

    def changes(target: int) -> float:
        return sum(abs(count - target) / row.each for count, row in zip(have, rows, strict=True))

    if not targets:
        return False
    target = min(targets, key=changes)
    for row in rows:
        _keep_exactly(kept, row.units, (target - row.fixed) // row.each, ranking)
    return True


def _rows(balance: Balance, kept: Tensor) -> tuple[list[_Row] | None, int]:
    """Blocks without what they have in common, and how many common slices are kept; None if they overlap otherwise."""
    counters = [Counter(block) for block in balance.blocks.tolist()]
    in_all = counters[0]
    for counter in counters[1:]:
        in_all = in_all & counter
    common = Counter({unit: number for unit, number in in_all.items() if all(c[unit] == number for c in counters)})
    rows: list[_Row] = []
    seen: set[int] = set()
    for counter in counters:
        own = counter - common
        fixed = own.pop(STAYS, 0)
        if len(set(own.values())) > 1 or seen & set(own):
            return None, 0
        seen |= set(own)
        rows.append(_Row(fixed, next(iter(own.values()), 1), torch.tensor(sorted(own), dtype=torch.long, device="cpu")))
    return rows, sum(number for unit, number in common.items() if bool(kept[unit]))


def connected_balances(balances: list[Balance]) -> list[list[Balance]]:
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


def cells_of(connected: list[Balance]) -> list[list[int]]:
    """Units that stand equally often in the same blocks. Slices that stay form cells too: they limit the share."""
    marks: dict[int, list[tuple[int, int, int]]] = {}
    for number, one in enumerate(connected):
        for row, block in enumerate(one.blocks.tolist()):
            for unit, count in Counter(block).items():
                marks.setdefault(unit, []).append((number, row, count))
    cells: dict[tuple[tuple[int, int, int], ...], list[int]] = {}
    for unit, found in marks.items():
        if unit != STAYS:
            cells.setdefault(tuple(found), []).append(unit)
    return list(cells.values())


def _settle_cells(kept: Tensor, cells: list[list[int]], ranking: Tensor) -> None:
    """Keep the same share of every cell, the one that changes the fewest units."""
    step = math.gcd(*[len(cell) for cell in cells])
    have = [int(kept[torch.tensor(cell, device="cpu")].sum()) for cell in cells]
    sizes = [len(cell) for cell in cells]

    def changes(share: int) -> int:
        return sum(abs(count - size * share // step) for count, size in zip(have, sizes, strict=True))

    share = min(range(step, 0, -1), key=changes)
    for cell in cells:
        _keep_exactly(kept, torch.tensor(cell, device="cpu"), len(cell) * share // step, ranking)


def _keep_exactly(kept: Tensor, cell: Tensor, count: int, ranking: Tensor) -> None:
    """Let ``count`` units of the cell stay: those kept now first, by rank."""
    if not cell.numel():
        return
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
