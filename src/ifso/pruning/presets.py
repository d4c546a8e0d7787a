"""Settings that go together under a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ifso.errors import BudgetError

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper": {"criterion": "ifso", "learning_rate": 0.01},
    "authors": {"criterion": "authors", "learning_rate": 0.1},
}
"""What a preset stands for where nothing else is said: the formula of the paper, or what its authors' program does."""


def preset_of(name: str | None) -> Mapping[str, Any]:
    """What a preset stands for.

    >>> preset_of(None)["learning_rate"]
    0.01
    """
    if name is not None and name not in PRESETS:
        raise BudgetError(f"preset={name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return PRESETS[name or "paper"]
