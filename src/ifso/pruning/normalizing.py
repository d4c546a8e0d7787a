"""Scores made comparable between layers: divided by what the removal of a unit saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ifso.errors import ScoreError

if TYPE_CHECKING:
    from torch import Tensor

    from ifso.pruning.ledger import Ledger

NORMALIZERS = {
    "sqrt-memory": ("activations", 0.5),
    "memory": ("activations", 1.0),
    "none": None,
    "macs": ("macs", 1.0),
    "params": ("params", 1.0),
    "latency": ("latency", 1.0),
}
"""Name: the cost that a score is divided by, and the power it is raised to."""


def of_budget(targets: Mapping[str, float]) -> str:
    """The normaliser that divides by what a budget counts: by the first of its costs."""
    usual = {"conv_macs": "macs", "activations": "memory"}
    first = next(iter(targets))
    return usual.get(first, first)


def check_normalizer(name: object) -> None:
    """Refuse a name that is unknown."""
    if name not in NORMALIZERS:
        raise ScoreError(f"normalize={name!r} is unknown; choose one of {', '.join(NORMALIZERS)}")


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
