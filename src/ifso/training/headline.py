"""By what networks for some data are compared."""

from __future__ import annotations

from ifso.data.sets import Data

DETECTION = "detection"
"""The ``task`` of data with boxes."""

AVERAGES = ("map", "map50", "map75", "map_small", "map_medium", "map_large")
"""What is known of a detector; see :class:`ifso.training.average_precision.AveragePrecision`."""


def detects(data: Data) -> bool:
    """Is it data with boxes? Data that does not say so is not."""
    return getattr(data, "task", None) == DETECTION


def headline(data: Data) -> str:
    """The measure that counts: ``"top1"``, or ``"map"`` of detectors."""
    return "map" if detects(data) else "top1"
