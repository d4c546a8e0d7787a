"""Which units can go alone, which only together, and the axes that moves have to watch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from operator import ge, mul
from typing import Any

import torch
from torch import Tensor

from ifso.curvature.weight_space import slices_of
from ifso.errors import BudgetError
from ifso.graph.balancing import cells_of, connected_balances
from ifso.graph.channel_graph import STAYS, ChannelGraph, Group
from ifso.graph.naming import fits
from ifso.pruning.cost_tracker import Incidence, incidence
from ifso.runs.values import is_kind

Pattern = tuple[int, ...]
"""How many units an elementary move takes from each cell of a family."""


@dataclass(frozen=True)
class Family:
    """Units that go together: an elementary move takes, of each cell, as many as one of the patterns says.

    Units of a cell are alike: any of them can stand for any other. ``where`` names what ties them.
    """

    cells: tuple[tuple[int, ...], ...]
    patterns: tuple[Pattern, ...]
    where: str


def families_of(graph: ChannelGraph) -> tuple[list[int], list[Family]]:
    """Units that no balance ties, and the families of those it does.

    A family without patterns is one of which nothing can go.
    """
    free, tied = set(range(graph.num_units)), []
    for connected in connected_balances(list(graph.balances)):
        cells = cells_of(connected)
        losses = [[(one.blocks == cell[0]).sum(1).tolist() for one in connected] for cell in cells]
        bound = [place for place, loss in enumerate(losses) if any(len(set(blocks)) > 1 for blocks in loss)]
        if not bound:
            continue
        sizes = [len(cells[place]) for place in bound]
        patterns = elementary_patterns([losses[place] for place in bound], sizes)
        where = ", ".join(dict.fromkeys(one.where or "the model" for one in connected))
        tied.append(Family(tuple(tuple(cells[place]) for place in bound), tuple(patterns), where))
        free.difference_update(unit for place in bound for unit in cells[place])
    return sorted(free), tied


Loss = list[list[int]]
"""Slices that each block of each balance loses with one unit of a cell."""


def elementary_patterns(losses: Sequence[Loss], sizes: Sequence[int]) -> list[Pattern]:
    """Smallest numbers of units to take from each cell so that all blocks lose equally many; none if there are none.

    Two blocks of a grouped convolution, the units of the second owning two slices each:

    >>> elementary_patterns([[[1, 0]], [[0, 2]]], [8, 4])
    [(2, 1)]
    """
    pattern = _one_cell_per_block(losses)
    if pattern is not None:
        return [pattern]
    # by how much each block loses more than the first of its balance, with one unit of a cell
    imbalances = [[lost - blocks[0] for blocks in loss for lost in blocks[1:]] for loss in losses]
    return minimal_solutions(imbalances, sizes)


def _one_cell_per_block(losses: Sequence[Loss]) -> Pattern | None:
    """One balance whose blocks have a cell each: the least common number of slices of all."""
    if len(losses[0]) > 1:
        return None
    own = [[lost for lost in loss[0] if lost] for loss in losses]
    if any(len(lost) != 1 for lost in own) or len(losses) != len(losses[0][0]):
        return None
    slices = math.lcm(*(lost[0] for lost in own))
    return tuple(slices // lost[0] for lost in own)


_MOST_CHOICES, _MOST_PATTERNS = 20_000, 64


def minimal_solutions(vectors: Sequence[Sequence[int]], most: Sequence[int]) -> list[Pattern]:
    """Numbers t_c ≤ most_c, not all 0, with Σ t_c · vectors_c = 0, of which none contains another; smallest first.

    Elimination leaves few free numbers, those of the smallest cells, that determine the others; they are tried out
    (up to ``_MOST_CHOICES``, small ones, should the free cells be large).

    >>> minimal_solutions([[1], [1], [-2]], [2, 8, 8])
    [(0, 2, 1), (1, 1, 1), (2, 0, 1)]
    """
    determined, free = _eliminated(vectors, sorted(range(len(vectors)), key=lambda cell: (-most[cell], cell)))
    reach = int(_MOST_CHOICES ** (1 / len(free))) if free else 0
    found: list[Pattern] = []
    for choice in product(*(range(min(most[cell], reach) + 1) for cell in free)):
        numbers = [Fraction(0)] * len(vectors)
        for cell, number in zip(free, choice, strict=True):
            numbers[cell] = Fraction(number)
        for cell, factors in determined.items():
            numbers[cell] = sum(map(mul, factors, choice), Fraction(0))
            if numbers[cell].denominator != 1 or not 0 <= numbers[cell] <= most[cell]:
                break
        else:
            found.append(tuple(map(int, numbers)))
    minimal: list[Pattern] = []
    for pattern in sorted(found, key=lambda pattern: (sum(pattern), pattern))[1:]:
        if not any(all(map(ge, pattern, smaller)) for smaller in minimal):
            minimal.append(pattern)
    return minimal[:_MOST_PATTERNS]


def _eliminated(vectors: Sequence[Sequence[int]], order: Sequence[int]) -> tuple[dict[int, list[Fraction]], list[int]]:
    """Cells whose numbers follow from those of the free ones, with factors, and the free ones; by Gauss and Jordan."""
    rows = [[Fraction(vectors[cell][equation]) for cell in order] for equation in range(len(vectors[0]))]
    pivots: list[int] = []
    for column in range(len(order)):
        place = next((number for number in range(len(pivots), len(rows)) if rows[number][column]), None)
        if place is None:
            continue
        top = len(pivots)
        rows[top], rows[place] = rows[place], rows[top]
        rows[top] = [value / rows[top][column] for value in rows[top]]
        for number, row in enumerate(rows):
            if number != top and row[column]:
                rows[number] = [a - row[column] * b for a, b in zip(row, rows[top], strict=True)]
        pivots.append(column)
    free = [column for column in range(len(order)) if column not in pivots]
    determined = {order[pivot]: [-rows[number][column] for column in free] for number, pivot in enumerate(pivots)}
    return determined, [order[column] for column in free]


class Axes:
    """Axes, each as the numbers of its units, that must not lose too many: ``floors`` say how many each keeps."""

    def __init__(self, floors: Mapping[tuple[int, ...], int], units: int) -> None:
        self.rows = [torch.tensor(row, dtype=torch.long, device="cpu") for row in floors]
        self.floors = list(floors.values())
        self.of: Incidence = incidence(self.rows, units)

    def room(self, kept: Tensor) -> list[int]:
        """How many units each axis can still lose."""
        return [int(kept[row].sum()) - floor for row, floor in zip(self.rows, self.floors, strict=True)]


def axes_of(graph: ChannelGraph, floors_of: Floors) -> Axes:
    """Every axis of every parameter, and the blocks of every balance."""
    floors: dict[tuple[int, ...], int] = {}
    for layout in graph.layouts.values():
        for layer in layout.layers:
            row = _distinct(layer)
            floors[row] = floors_of.least(len(row))
    for group in graph.groups:
        if (least := floors_of.of_group(group)) is not None:
            floors[tuple(range(group.first, group.first + group.size))] = least
    for balance in graph.balances:
        for block in balance.blocks:
            floors.setdefault(_distinct(block), 1)
    return Axes(floors, graph.num_units)


def _distinct(layer: Tensor) -> tuple[int, ...]:
    """Its units, once each, and the slices that stay, each."""
    stays = int((layer == STAYS).sum())
    return (*layer[layer != STAYS].unique().tolist(), *[STAYS] * stays)


def produced_axes(graph: ChannelGraph) -> Axes:
    """The channels of every axis that units are produced on; all may go."""
    members = [(group, member) for group in graph.groups for member in group.members]
    made = {(member.parameter, member.dim) for _, member in members if member.role == "produces"}
    slices = slices_of((group, member) for group, member in members if (member.parameter, member.dim) in made)
    labels = [each.owner.reshape(-1, each.owner.shape[-1]) for each in slices]
    rows = {tuple(label.unique(dim=0).flatten().tolist()) for label in labels}
    return Axes(dict.fromkeys(sorted(rows), 0), graph.num_units)


ALL = "*"
"""The pattern of all layers."""


def checked_channels(name: str, value: Any) -> int:
    """The value of an option that is a number of channels; BudgetError if it is none."""
    if not is_kind(value, int) or value < 1:
        raise BudgetError(f"{name} must be a whole number of channels from 1 up, got {value!r}")
    return int(value)


MinUnits = int | Mapping[str, int]
MinShare = float | Mapping[str, float]


@dataclass(frozen=True)
class Floors:
    """``min_units`` and ``min_share``, each a number or numbers by the pattern of a layer, and ``only``.

    Of several patterns that fit the layers which make the units of a group the last one counts. With ``only`` all
    groups stay whole that other layers make units of, too.

    >>> Floors(2, 0.1).least(64), Floors(2, {"*": 0.1, "layer1": 0.5}).of("layer1.0.conv1.weight", 64)
    (7, 32)
    """

    min_units: MinUnits = 1
    min_share: MinShare = 0.0
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for value in _by_pattern(self.min_units, 1).values():
            checked_channels("min_units", value)
        for value in _by_pattern(self.min_share, 0.0).values():
            if not is_kind(value, float) or not 0 <= value < 1:
                raise BudgetError(f"min_share must be a share from 0 up to, but not, 1, got {value!r}")

    def least(self, size: int) -> int:
        """What an axis of so many units keeps that no pattern speaks of."""
        return self.of(None, size)

    def of(self, parameter: str | None, size: int) -> int:
        """What the layer of that parameter keeps of so many units."""
        units, share = _last(self.min_units, 1, parameter), _last(self.min_share, 0.0, parameter)
        return max(units, math.ceil(round(share * size, 9)))

    def of_group(self, group: Group) -> int | None:
        """What a group keeps of its units; None if nothing is said of it in particular."""
        if not self.allows(group):
            return group.size
        if not isinstance(self.min_units, Mapping) and not isinstance(self.min_share, Mapping):
            return None
        return max((self.of(name, group.size) for name in _makers(group)), default=None)

    def allows(self, group: Group) -> bool:
        """Return whether units of the group may go."""
        return not self.only or all(any(fits(maker, name) for name in self.only) for maker in _makers(group))

    def __str__(self) -> str:
        share = f" or min_share={_words(self.min_share)} of their" if self.min_share else ""
        return f"min_units={_words(self.min_units)}{share}"


def _makers(group: Group) -> list[str]:
    return [member.parameter for member in group.members if member.role == "produces"]


def _by_pattern(value: Any, usual: float) -> Mapping[str, Any]:
    return {ALL: usual, **value} if isinstance(value, Mapping) else {ALL: value}


def _last(value: Any, usual: float, parameter: str | None) -> Any:
    """The number of the last pattern that fits; that of all layers where none does."""
    values = _by_pattern(value, usual)
    chosen = [value for pattern, value in values.items() if parameter is not None and fits(parameter, pattern)]
    return chosen[-1] if chosen else values[ALL]


def _words(value: Any) -> str:
    return str(dict(value)) if isinstance(value, Mapping) else f"{value:g}"
