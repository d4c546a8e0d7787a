"""How many units layers keep at least, and which layers may lose any."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ifso.errors import BudgetError
from ifso.graph.channel_graph import Group
from ifso.graph.naming import fits

ALL = "*"
"""The pattern of all layers."""

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
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BudgetError(f"min_units={value!r} is not a whole number of channels; give 1, 2, 3, …")
        for value in _by_pattern(self.min_share, 0.0).values():
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
                raise BudgetError(f"min_share must be a share from 0 up to, but not, 1, got {value!r}")

    def least(self, size: int) -> int:
        """What an axis of so many units keeps that no pattern speaks of."""
        return self.of(None, size)

    def of(self, parameter: str | None, size: int) -> int:
        """What the layer of that parameter keeps of so many units."""
        units, share = (
            _last(_by_pattern(value, usual), parameter) for value, usual in ((self.min_units, 1), (self.min_share, 0.0))
        )
        return max(units, math.ceil(round(share * size, 9)))

    def of_group(self, group: Group) -> int | None:
        """What a group keeps of its units; None if nothing is said of it in particular."""
        makers = [member.parameter for member in group.members if member.role == "produces"]
        if not self.allows(group):
            return group.size
        if not isinstance(self.min_units, Mapping) and not isinstance(self.min_share, Mapping):
            return None
        return max((self.of(name, group.size) for name in makers), default=None)

    def allows(self, group: Group) -> bool:
        """May units of the group go?"""
        makers = [member.parameter for member in group.members if member.role == "produces"]
        return not self.only or all(any(fits(maker, name) for name in self.only) for maker in makers)

    def __str__(self) -> str:
        share = f" or min_share={_words(self.min_share)} of their" if self.min_share else ""
        return f"min_units={_words(self.min_units)}{share}"


def _by_pattern(value: Any, usual: float) -> Mapping[str, Any]:
    return {ALL: usual, **value} if isinstance(value, Mapping) else {ALL: value}


def _last(values: Mapping[str, Any], parameter: str | None) -> Any:
    """The number of the last pattern that fits; that of all layers where none does."""
    chosen = [value for pattern, value in values.items() if parameter is not None and fits(parameter, pattern)]
    return chosen[-1] if chosen else values[ALL]


def _words(value: Any) -> str:
    return str(dict(value)) if isinstance(value, Mapping) else f"{value:g}"
