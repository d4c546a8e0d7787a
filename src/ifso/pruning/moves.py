"""What can be removed next without breaking the network: single units, or several that only go together."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ifso.errors import ScoreError
from ifso.graph.channel_graph import STAYS, ChannelGraph, group_of
from ifso.pruning.constraints import (
    Family,
    Floors,
    MinShare,
    MinUnits,
    Pattern,
    axes_of,
    checked_channels,
    families_of,
    produced_axes,
)

LEFT_ALONE = "only= names other layers"
"""Why a group is stuck that nobody asked for."""


@dataclass(frozen=True)
class Move:
    """Units that go together. ``score`` is the mean of theirs."""

    units: tuple[int, ...]
    score: float


class Moves:
    """The legal moves in a network.

    After any of them, grouped convolutions, shuffles and norms keep equal counts, every axis of every parameter keeps
    at least ``min_units`` units and a share of ``min_share`` (slices that belong to no unit count too), and with
    ``round_to`` every axis that the moved units are produced on has a multiple of it. ``stuck`` says why of some groups
    nothing can go.

    >>> from ifso.graph.tracing import trace
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3))
    >>> moves = Moves(trace(net, torch.zeros(1, 3, 8, 8)), round_to=2)
    >>> moves.ordered(torch.tensor([3.0, 0.0, 1.0, 2.0])).next()
    Move(units=(1, 2), score=0.5)
    """

    def __init__(
        self,
        graph: ChannelGraph,
        *,
        round_to: int | None = None,
        min_units: MinUnits = 1,
        min_share: MinShare = 0.0,
        only: tuple[str, ...] = (),
    ) -> None:
        self.round_to = None if round_to is None else checked_channels("round_to", round_to)
        self.floors = Floors(min_units, min_share, only)
        self._graph, self._units = graph, graph.num_units
        self.free, self.families = families_of(graph)
        if self.round_to is not None:
            self.families += _by_group(graph, self.free)
            self.free = []
        self.family_of = {u: n for n, family in enumerate(self.families) for cell in family.cells for u in cell}
        self.axes = axes_of(graph, self.floors)
        self.produced = produced_axes(graph) if self.round_to is not None else None
        self.stuck = self._find_stuck()

    def ordered(self, scores: Tensor, kept: Tensor | None = None, useful: Tensor | None = None) -> Ordered:
        """The moves from the state ``kept`` [units + 1], least important first by ``scores`` [units].

        With ``useful`` [units], those without any useful unit are left out.
        """
        kept = self._graph.kept(None) if kept is None else kept
        values = scores.detach().to("cpu", torch.float64)
        if values.shape != (self._units,):
            raise ScoreError(f"scores have shape {tuple(values.shape)}; the network has {self._units} units")
        bad = (values.isnan() | (values == -math.inf)) & kept[:STAYS]
        if bool(bad.any()):
            first = int(bad.nonzero()[0])
            group = group_of(self._graph, first)
            raise ScoreError(
                f"{int(bad.sum())} of {self._units} scores are not numbers (first: unit {first - group.first} of "
                f"{group.name} has {float(values[first])}); look for a loss that is not finite"
            )
        return Ordered(self, values, kept, useful if useful is not None else kept[:STAYS])

    def exhausted(self, *, last_first: bool = False) -> Tensor:
        """What is left [units + 1] when everything that can go is gone, whatever the scores."""
        numbers = torch.arange(self._units, dtype=torch.float64, device="cpu")
        kept = self._graph.kept(None)
        queue = self.ordered(-numbers if last_first else numbers, kept)
        while (move := queue.next()) is not None:
            queue.take(move)
            kept[list(move.units)] = False
        return kept

    def at_floor(self, kept: Tensor) -> tuple[str, ...]:
        """Names of the groups of which nothing more can go because a layer has as few units as it may."""
        full = [room <= 0 for room in self.axes.room(kept)]
        return tuple(
            group.name
            for group in self._graph.groups
            if group.name not in self.stuck and any(full[axis] for axis, _ in self.axes.of[group.first])
        )

    def groups_of(self, move: Move) -> tuple[str, ...]:
        """The names of the groups that a move takes units from."""
        return tuple(dict.fromkeys(group_of(self._graph, unit).name for unit in move.units))

    def _find_stuck(self) -> dict[str, str]:
        start = self.ordered(torch.zeros(self._units, dtype=torch.float64, device="cpu"))
        movable = {unit for unit in self.free if start.fits([unit])}
        reasons: dict[int, str] = {}
        for number, family in enumerate(self.families):
            members = [unit for cell in family.cells for unit in cell]
            if start.candidates(number):
                movable.update(members)
            else:
                reasons.update(dict.fromkeys(members, self._reason(family)))
        few = f"its layers have no more than {self.floors} channels"
        return {
            group.name: reasons.get(group.first, few) if self.floors.allows(group) else LEFT_ALONE
            for group in self._graph.groups
            if not movable.intersection(range(group.first, group.first + group.size))
        }

    def _reason(self, family: Family) -> str:
        everything = sum(len(cell) for cell in family.cells)
        if all(sum(pattern) == everything for pattern in family.patterns):
            return f"{family.where} needs equal counts that no smaller choice has"
        if self.round_to is not None:
            return f"no smaller choice leaves a multiple of round_to={self.round_to} channels in {family.where}"
        return f"{family.where} would keep fewer than {self.floors} channels"


def _by_group(graph: ChannelGraph, free: Sequence[int]) -> list[Family]:
    """The free units of each group as a family, of which any number can go."""
    alone = set(free)
    cells = [(group.name, tuple(u for u in range(group.first, group.first + group.size) if u in alone))
             for group in graph.groups]  # fmt: skip
    return [Family((cell,), ((1,),), name) for name, cell in cells if cell]


class Ordered:
    """Legal moves, lowest score first (at a tie: lowest unit number), from a state that changes by those taken."""

    def __init__(self, moves: Moves, scores: Tensor, kept: Tensor, useful: Tensor) -> None:
        self._axes, self._produced, self._round_to = moves.axes, moves.produced, moves.round_to
        self._families, self._family_of, self._scores = moves.families, moves.family_of, scores.tolist()
        self._room = moves.axes.room(kept)
        self._channels = moves.produced.room(kept) if moves.produced else []
        free = torch.tensor(moves.free, dtype=torch.long, device="cpu")
        free = free[kept[free] & useful[free]]
        self._singles = free[scores[free].argsort(stable=True)].tolist()
        self._at = 0
        self._cells = [[self._sorted(cell, kept) for cell in family.cells] for family in self._families]
        self._waiting: list[list[Move]] = [[] for _ in self._families]
        self._versions = [0] * len(self._families)
        self._heap: list[tuple[float, int, int, int]] = []
        self._useful = set(useful.nonzero().flatten().tolist()) if self._families else set()
        for number in range(len(self._families)):
            self._refresh(number)

    def _sorted(self, cell: Sequence[int], kept: Tensor) -> list[int]:
        there = kept[list(cell)].tolist()
        units = [unit for unit, is_kept in zip(cell, there, strict=True) if is_kept]
        return sorted(units, key=lambda unit: (self._scores[unit], unit))

    def next(self) -> Move | None:
        """The lowest move that was neither taken nor skipped; None if nothing can go any more."""
        while self._at < len(self._singles) and not self.fits(self._singles[self._at : self._at + 1]):
            self._at += 1
        family = self._best_of_families()
        if self._at == len(self._singles):
            return family
        unit = self._singles[self._at]
        single = Move((unit,), self._scores[unit])
        if family is not None and (family.score, family.units[0]) < (single.score, unit):
            return family
        return single

    def _best_of_families(self) -> Move | None:
        while self._heap:
            _, _, number, version = self._heap[0]
            if version == self._versions[number]:
                move = self._waiting[number][0]
                if self.fits(move.units):
                    return move
                self._refresh(number)
            else:
                heapq.heappop(self._heap)
        return None

    def take(self, move: Move) -> None:
        """The units of a move from :meth:`next` are gone."""
        for unit in move.units:
            for axis, _ in self._axes.of[unit]:
                self._room[axis] -= 1
        if move.units[0] not in self._family_of:
            self._at += 1
            return
        number = self._family_of[move.units[0]]
        for unit in move.units:
            for cell in self._cells[number]:
                if unit in cell:
                    cell.remove(unit)
        for other in {number} | self._moved_channels(move.units):
            self._refresh(other)

    def skip(self, move: Move) -> None:
        """Leave a move from :meth:`next` where it is, and go on to the one after it."""
        if move.units[0] not in self._family_of:
            self._at += 1
            return
        number = self._family_of[move.units[0]]
        self._waiting[number].remove(move)
        self._announce(number)

    def fits(self, units: Iterable[int]) -> bool:
        """Return whether every axis would keep enough units."""
        lost: dict[int, int] = {}
        for unit in units:
            for axis, _ in self._axes.of[unit]:
                lost[axis] = lost.get(axis, 0) + 1
                if lost[axis] > self._room[axis]:
                    return False
        return True

    def _moved_channels(self, units: Sequence[int]) -> set[int]:
        """Families that are produced on the axes of these units, which are gone."""
        if self._produced is None:
            return set()
        axes = set()
        for unit in units:
            for axis, channels in self._produced.of[unit]:
                self._channels[axis] -= channels
                axes.add(axis)
        members = {unit for axis in axes for unit in self._produced.rows[axis].tolist()}
        return {self._family_of[unit] for unit in members if unit in self._family_of}

    def _refresh(self, number: int) -> None:
        self._waiting[number] = self.candidates(number)
        self._announce(number)

    def _announce(self, number: int) -> None:
        self._versions[number] += 1
        if self._waiting[number]:
            first = self._waiting[number][0]
            heapq.heappush(self._heap, (first.score, first.units[0], number, self._versions[number]))

    def candidates(self, number: int) -> list[Move]:
        """The lowest legal move of a family for each of its patterns, lowest first."""
        found = [self._repeated(number, pattern) for pattern in self._families[number].patterns]
        useful = [move for move in found if move is not None and not self._useful.isdisjoint(move.units)]
        return sorted(useful, key=lambda move: (move.score, move.units))

    def _repeated(self, number: int, pattern: Pattern) -> Move | None:
        """The fewest elementary moves that leave a multiple of ``round_to`` channels."""
        chosen: list[int] = []
        lost: dict[int, int] = {}
        while self._pick(number, pattern, chosen, lost):
            if self._is_round(chosen):
                units = tuple(sorted(chosen))
                return Move(units, math.fsum(self._scores[unit] for unit in units) / len(units))
        return None

    def _pick(self, number: int, pattern: Pattern, chosen: list[int], lost: dict[int, int]) -> bool:
        """Add the lowest units of one elementary move that every axis can lose; False if there are none."""
        for cell, take in zip(self._cells[number], pattern, strict=True):
            left = take
            for unit in cell:
                if not left:
                    break
                axes = [axis for axis, _ in self._axes.of[unit]]
                if unit in chosen or any(lost.get(axis, 0) >= self._room[axis] for axis in axes):
                    continue
                chosen.append(unit)
                left -= 1
                for axis in axes:
                    lost[axis] = lost.get(axis, 0) + 1
            if left:
                return False
        return True

    def _is_round(self, units: Sequence[int]) -> bool:
        if self._produced is None or self._round_to is None:
            return True
        lost: dict[int, int] = {}
        for unit in units:
            for axis, channels in self._produced.of[unit]:
                lost[axis] = lost.get(axis, 0) + channels
        return all((self._channels[axis] - channels) % self._round_to == 0 for axis, channels in lost.items())
