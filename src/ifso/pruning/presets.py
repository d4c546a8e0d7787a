"""Settings that go together under a name, and what scores can be divided by; read by ``--help`` without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ifso.errors import BudgetError

ALGORITHM_2: Mapping[str, Any] = {
    "criterion": "ifso", "schedule": "incremental", "normalize": "sqrt-memory", "update": False, "min_share": 0.0,
    "learning_rate": 0.01,
}  # fmt: skip

STAGED: Mapping[str, Any] = {
    "criterion": "true-loss", "schedule": "staged", "normalize": None, "update": True, "min_share": 0.1,
    "learning_rate": 0.01,
}  # fmt: skip

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper": ALGORITHM_2,
    "authors": {**ALGORITHM_2, "criterion": "authors", "learning_rate": 0.1},
}
"""What a preset stands for where nothing else is said: Algorithm 2 as in the paper, or as in the authors' program."""


def usual(preset: str | None, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What stands for options that were not given.

    Without a preset that is the staged run; but an option that only Algorithm 2 has (``given`` and not None) asks for
    that.

    >>> usual(None, {})["schedule"], usual(None, {"accumulate": 5})["schedule"], usual("authors", {})["criterion"]
    ('staged', 'incremental', 'authors')
    """
    if preset is not None and preset not in PRESETS:
        raise BudgetError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    if preset is not None:
        return PRESETS[preset]
    return ALGORITHM_2 if any(value is not None for value in given.values()) else STAGED


NORMALIZERS = {
    "sqrt-memory": ("activations", 0.5),
    "memory": ("activations", 1.0),
    "none": None,
    "macs": ("macs", 1.0),
    "params": ("params", 1.0),
    "latency": ("latency", 1.0),
}
"""Name: the cost that a score is divided by, and the power it is raised to."""
