"""Numbers in little room: a byte for each unit, and curves of a few hundred points."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

LEVELS = 250
"""Steps of a scale that fits a byte; 0 is kept for what is not there."""

MOST_POINTS = 400


def packed(values: Iterable[int]) -> str:
    """Whole numbers from 0 to 255 as text.

    >>> packed([0, 1, 250])
    'AAH6'
    """
    return base64.b64encode(bytes(values)).decode("ascii")


def moments(gone: Mapping[int, int | None], size: int, removals: int) -> list[int]:
    """For each of ``size`` units 0 if it was kept, else 1 … 250 for when it went; 255 where that is not known.

    >>> moments({1: 1, 2: 100, 3: None}, 4, 100)
    [0, 1, 250, 255]
    """
    found = [0] * size
    for place, number in gone.items():
        found[place] = 255 if number is None else level(number, 1, removals)
    return found


def level(value: float, low: float, high: float) -> int:
    """The place of a value on a scale from 1 to 250.

    >>> level(0, 0, 10), level(5, 0, 10), level(10, 0, 10), level(3, 3, 3)
    (1, 125, 250, 1)
    """
    if high <= low:
        return 1
    return 1 + round((LEVELS - 1) * min(max((value - low) / (high - low), 0.0), 1.0))


@dataclass(frozen=True)
class LogScale:
    """Powers of ten from ``low`` to ``high``: scores span many orders of magnitude."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float]) -> LogScale | None:
        """One that all positive values fit on; None if there are none.

        At most 12 orders of magnitude below the largest: what is smaller is zero but for rounding.

        >>> LogScale.over([0.0, 0.01, 100.0])
        LogScale(low=-2.0, high=2.0)
        """
        logs = [math.log10(value) for value in values if value > 0 and math.isfinite(value)]
        if not logs:
            return None
        high = max(logs)
        return cls(max(min(logs), high - 12), high)

    def level(self, value: float) -> int:
        """1 … 250 for a positive number, 0 for any other."""
        if not value > 0 or not math.isfinite(value):
            return 0
        return level(math.log10(value), self.low, self.high)


def thinned(length: int, most: int = MOST_POINTS) -> list[int]:
    """At most ``most`` places of a series, evenly spread, with the first and the last.

    >>> thinned(5), thinned(9, 5)
    ([0, 1, 2, 3, 4], [0, 2, 4, 6, 8])
    """
    if length <= most:
        return list(range(length))
    return [round(step * (length - 1) / (most - 1)) for step in range(most)]


def short(value: float | None, digits: int = 5) -> float | None:
    """A number with a few significant digits.

    >>> short(0.123456789), short(69124736.0), short(None)
    (0.12346, 69125000.0, None)
    """
    return None if value is None else float(f"{value:.{digits}g}")


def column(rows: Sequence[Mapping[str, float]], name: str) -> list[float | None]:
    """One number of every row."""
    return [short(row.get(name)) for row in rows]
