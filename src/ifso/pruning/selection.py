"""Which units go: the least important first, until the budget is met and not much further."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ifso.errors import UnreachableBudget
from ifso.graph.channel_graph import ChannelGraph
from ifso.pruning.budget import NORMALIZERS, Budget
from ifso.pruning.cost_tracker import Ledger
from ifso.pruning.moves import Move, Moves, Ordered

MOST_NAMES = 4
"""Names of layers in an error, at most."""

TOLERANCE = 0.005
"""How far below its target a run may end, as a share of the whole network, if smaller steps exist."""


class Target:
    """What a budget asks for, and how far away that is.

    >>> target = Target(Budget(macs=0.5, params=0.7))
    >>> target.gap({"macs": 0.5, "params": 0.75, "activations": 0.9}), target.unmet({"macs": 0.5, "params": 0.75})
    (0.05..., ['params'])
    """

    def __init__(self, budget: Budget) -> None:
        self.shares = budget.targets

    def gap(self, shares: Mapping[str, float]) -> float:
        """The largest share that is still too much; 0 or less when the budget is met."""
        return max(shares[name] - target for name, target in self.shares.items())

    def unmet(self, shares: Mapping[str, float]) -> list[str]:
        """The costs that are still too high."""
        return [name for name, target in self.shares.items() if shares[name] > target]

    def __str__(self) -> str:
        return ", ".join(f"{name} {share:g}" for name, share in self.shares.items())


def select(ledger: Ledger, moves: Moves, scores: Tensor, target: Target, *, most: int | None = None) -> list[Move]:
    """Take moves out of the ledger, lowest score first, until ``most`` are gone or the target is met.

    A move is passed over if it lowers none of the costs that are still too high, or if it would end more than
    ``TOLERANCE`` below the target. Where that leads to a dead end, in which every move overshoots, some of the
    last moves are replaced by others that lead to the target; if none do, the move that overshoots least is taken.
    """
    too_high = [ledger.savings(name) > 0 for name in target.unmet(ledger.shares())]
    if not too_high:
        return []
    start = _State(ledger, moves, scores, target, torch.stack(too_high).any(0))
    made, gap = start.descend(most)
    if gap > 0 and made and gap <= _HORIZON * (target.gap(ledger.shares()) - gap) / len(made):
        made = start.landing()[:most]
    elif gap < -TOLERANCE:
        made = start.landing()
    for move in made:
        ledger.remove(move.units)
    return made


_HORIZON = 16
"""With fewer moves than that to go, a limited selection looks ahead to the end."""

_REACH = 40
"""How many of the last moves are changed after a dead end."""

_TRIES = 200
"""How many descents are tried before an overshoot is accepted."""


@dataclass(frozen=True)
class _State:
    """Where a descent begins. ``useful`` units lower a cost that is too high; ``avoided`` groups are left alone."""

    ledger: Ledger
    moves: Moves
    scores: Tensor
    target: Target
    useful: Tensor
    avoided: frozenset[tuple[str, ...]] = frozenset()

    def after(self, made: Sequence[Move], avoid: Move) -> _State:
        ledger = self.ledger.copy()
        ledger.remove(unit for move in made for unit in move.units)
        return replace(self, ledger=ledger, avoided=self.avoided | {self.moves.groups_of(avoid)})

    def descend(self, most: int | None = None) -> tuple[list[Move], float]:
        """Moves that are taken one after the other, and the gap they leave."""
        ledger, target = self.ledger.copy(), self.target
        queue = self.moves.ordered(self.scores, ledger.kept, self.useful)
        made: list[Move] = []
        while (gap := target.gap(ledger.shares())) > 0 and (most is None or len(made) < most):
            move = self._lowest_allowed(ledger, queue)
            if move is not None:
                queue.take(move)
            else:
                move = self._least_overshoot(ledger)
            ledger.remove(move.units)
            made.append(move)
        return made, gap

    def landing(self) -> list[Move]:
        """Moves to the target: as they come if that ends within the tolerance, else with the last ones changed.

        Breadth first: every descent that fails is tried again without a group that one of its last moves was from.
        A search with an end, no guarantee.
        """
        made, gap = self.descend()
        best, closest = made, gap
        failed: deque[tuple[_State, list[Move], list[Move]]] = deque([(self, [], made)])
        tries = 0
        while closest < -TOLERANCE and failed and tries < _TRIES:
            state, head, tail = failed.popleft()
            for place in range(len(tail) - 1, max(len(tail) - 1 - _REACH, -1), -1):
                other, tries = state.after(tail[:place], tail[place]), tries + 1
                try:
                    made, gap = other.descend()
                except UnreachableBudget:
                    continue
                failed.append((other, head + tail[:place], made))
                if gap > closest:
                    best, closest = head + tail[:place] + made, gap
                if closest >= -TOLERANCE:
                    break
        return best

    def _lowest_allowed(self, ledger: Ledger, queue: Ordered) -> Move | None:
        """The lowest move that helps and does not overshoot.

        Costs only fall, so a move that overshoots now, or saves nothing, will do so later too: it is skipped for good.
        """
        now = ledger.shares()
        while (move := queue.next()) is not None:
            after = self._after(ledger, move, now)
            if after is not None and self.target.gap(after) >= -TOLERANCE:
                return move
            queue.skip(move)
        return None

    def _least_overshoot(self, ledger: Ledger) -> Move:
        now = ledger.shares()
        queue = self.moves.ordered(self.scores, ledger.kept, self.useful)
        best: tuple[float, Move] | None = None
        while (move := queue.next()) is not None:
            after = self._after(ledger, move, now)
            if after is not None and (best is None or self.target.gap(after) > best[0]):
                best = (self.target.gap(after), move)
            queue.skip(move)
        if best is None:
            raise UnreachableBudget(
                f"the budget ({self.target}) is not met and nothing more can go: left are "
                f"{_listed(now, self.target.shares)}; ask for larger shares"
            )
        return best[1]

    def _after(self, ledger: Ledger, move: Move, now: Mapping[str, float]) -> dict[str, float] | None:
        """The shares a move leaves; None if it is avoided or lowers no cost that is still too high."""
        if self.avoided and self.moves.groups_of(move) in self.avoided:
            return None
        after = ledger.shares_without(move.units)
        return after if any(after[name] < now[name] for name in self.target.unmet(now)) else None


def _listed(shares: Mapping[str, float], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {shares[name]:.4f}" for name in names)


def check_reachable(graph: ChannelGraph, ledger: Ledger, moves: Moves, target: Target) -> None:
    """Refuse a budget that no legal choice can meet, and say what is in the way."""
    nothing = [name for name in target.shares if not ledger.costs()[name]]
    if nothing:
        raise UnreachableBudget(f"the budget cannot be met: the network has no {nothing[0]}; name another cost")
    reach = smallest_shares(ledger, moves, target)
    if target.gap(reach) <= 0:
        return
    unmet = target.unmet(reach)
    asked = ", ".join(f"{name}={target.shares[name]:g} is asked and {reach[name]:.4f} the smallest" for name in unmet)
    raise UnreachableBudget(
        f"the budget cannot be met: {asked}; in the way: {'; '.join(_obstacles(graph, ledger, moves, target, reach))}"
    )


def smallest_shares(ledger: Ledger, moves: Moves, target: Target) -> dict[str, float]:
    """Shares that stay when everything that can go is gone: the better of two orders, where layers share units."""
    found = []
    for last_first in (False, True):
        kept = moves.exhausted(last_first=last_first)
        found.append(ledger.shares_without((~kept).nonzero().flatten().tolist()))
    return min(found, key=target.gap)


def _briefly(setting: Any) -> Any:
    """A setting as it is shown: few of many names.

    >>> _briefly(0.1), _briefly(("a", "b")), _briefly(("a", "b", "c", "d", "e"))
    (0.1, ('a', 'b'), "('a', 'b', 'c', 'd' and 1 more)")
    """
    if not isinstance(setting, tuple) or len(setting) <= MOST_NAMES:
        return setting
    return f"({', '.join(map(repr, setting[:MOST_NAMES]))} and {len(setting) - MOST_NAMES} more)"


def _obstacles(
    graph: ChannelGraph, ledger: Ledger, moves: Moves, target: Target, reach: Mapping[str, float]
) -> list[str]:
    """One phrase for each thing that keeps channels in the network."""
    unmet, said = target.unmet(reach), []
    frozen = ledger.shares_without(range(graph.num_units))
    if any(frozen[name] > 0 for name in unmet):
        reasons = Counter(one.reason for one in graph.frozen).most_common(3)
        because = f" ({', '.join(f'{reason}: {number}' for reason, number in reasons)})" if reasons else ""
        said.append(f"{_listed(frozen, unmet)} belongs to no removable channel{because}")
    floors: dict[str, Any] = {**vars(moves.floors), "round_to": moves.round_to}
    least = {"round_to": None, "min_share": 0.0, "min_units": 1, "only": ()}
    freer = {
        f"{name}={_briefly(floors[name])}": Moves(graph, **{**floors, name: free}) if floors[name] != free else moves
        for name, free in least.items()
    }
    for setting, others in freer.items():
        without = smallest_shares(ledger, others, target) if others is not moves else reach
        if any(without[name] < reach[name] for name in unmet):
            said.append(f"{setting} (without it {_listed(without, unmet)})")
    if moves.stuck:
        name, reason = next(iter(moves.stuck.items()))
        more = f" and {len(moves.stuck) - 1} more groups" if len(moves.stuck) > 1 else ""
        said.append(f"nothing of {name}{more} can go ({reason})")
    return said or ["the last channels of every layer"]


def of_budget(targets: Mapping[str, float]) -> str:
    """The normaliser that divides by what a budget counts: by the first of its costs."""
    usual = {"conv_macs": "macs", "activations": "memory"}
    first = next(iter(targets))
    return usual.get(first, first)


def normalized(scores: Tensor, ledger: Ledger, name: str) -> Tensor:
    """Scores [units] over √ΔMem, ΔMem, ΔMACs or the latency saved, given what else is left.

    A unit that saves nothing of that kind counts as the one that saves least.
    """
    divisor = NORMALIZERS[name]
    if divisor is None:
        return scores
    kind, power = divisor
    saved = ledger.savings(kind)
    some = saved[saved > 0]
    return scores / saved.clamp(min=float(some.min()) if some.numel() else 1.0) ** power
