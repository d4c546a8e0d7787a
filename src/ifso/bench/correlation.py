"""Do two lists of numbers rise together? Pearson, Spearman, and Spearman among masks of equal size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def ranks(values: Sequence[float]) -> Floats:
    """Places from 1 up; equal values share the mean of their places.

    >>> ranks([3.0, 1.0, 3.0, 7.0]).tolist()
    [2.5, 1.0, 2.5, 4.0]
    """
    numbers = np.asarray(values, dtype=np.float64)
    _, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def pearson(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Σ (x − x̄)(y − ȳ) / √(Σ (x − x̄)² Σ (y − ȳ)²); None if one list is constant or has fewer than two numbers.

    >>> pearson([1, 2, 3], [2, 4, 6])
    1.0
    >>> pearson([1, 2, 3], [5, 5, 5]) is None
    True
    """
    x, y = _scaled(first), _scaled(second)
    if len(x) != len(y):
        raise ValueError(f"{len(x)} and {len(y)} numbers cannot be compared")
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    x, y = x - x.mean(), y - y.mean()
    value = float(x @ y / np.sqrt((x @ x) * (y @ y)))
    return max(-1.0, min(1.0, value))


def _scaled(values: Sequence[float]) -> Floats:
    """The numbers with the largest at ±1, so that no square overflows."""
    numbers = np.asarray(values, dtype=np.float64)
    largest = np.abs(numbers).max(initial=0.0)
    return numbers / largest if largest else numbers


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson's correlation of the ranks.

    >>> spearman([1, 10, 100, 1000], [1, 2, 3, 4])
    1.0
    """
    return pearson(ranks(first).tolist(), ranks(second).tolist())


def spearman_at_equal_size(first: Sequence[float], second: Sequence[float], sizes: Sequence[int]) -> float | None:
    """The mean, weighted by the number of masks, of Spearman's correlation among masks that remove equally many units.

    A sum of scores grows with the number of removed units, and so does the loss: random scores already correlate with
    the truth over masks of all sizes. Here they do not.

    >>> spearman_at_equal_size([1, 2, 20, 10], [3, 4, 50, 60], sizes=[1, 1, 2, 2])
    0.0
    """
    total, weight = 0.0, 0
    for size in set(sizes):
        places = [place for place, other in enumerate(sizes) if other == size]
        found = spearman([first[place] for place in places], [second[place] for place in places])
        if found is not None:
            total, weight = total + found * len(places), weight + len(places)
    return total / weight if weight else None
