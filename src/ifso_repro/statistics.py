"""Means and spreads over seeds, and what may be claimed from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NO_CLAIM = "no claim"


@dataclass(frozen=True)
class Spread:
    """The mean of ``count`` numbers and their standard deviation, which one number does not have.

    >>> print(Spread.of([93.0, 93.5, 94.0]), Spread.of([93.0]))
    93.50 ± 0.50 93.00
    """

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one or more numbers; the deviation is that of a sample (n − 1)."""
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), deviation, len(values))

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.deviation is None else f" ± {self.deviation:.2f}")


@dataclass(frozen=True)
class Difference:
    """One mean less another, and the ``spread`` of that difference of single runs, √(s₁² + s₂²), where both are known.

    >>> Difference.of(Spread.of([93.0, 93.4]), Spread.of([92.9, 93.1])).verdict
    'no claim: the spread is larger'
    >>> Difference.of(Spread.of([93.0, 93.1]), Spread.of([92.1, 92.2])).verdict
    'higher'
    """

    mean: float
    spread: float | None
    runs: tuple[int, int]

    @classmethod
    def of(cls, one: Spread, other: Spread) -> Difference:
        """``one`` less ``other``."""
        known = one.deviation is not None and other.deviation is not None
        spread = math.hypot(one.deviation or 0.0, other.deviation or 0.0) if known else None
        return cls(one.mean - other.mean, spread, (one.count, other.count))

    @property
    def verdict(self) -> str:
        """Only a difference larger than its spread is claimed."""
        if self.spread is None:
            return f"{NO_CLAIM}: one seed has no spread"
        if abs(self.mean) <= self.spread:
            return f"{NO_CLAIM}: the spread is larger"
        return "higher" if self.mean > 0 else "lower"
