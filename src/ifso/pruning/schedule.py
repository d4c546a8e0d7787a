"""In how many steps the units go."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ifso.errors import BudgetError
from ifso.pruning.budget import Budget


@dataclass(frozen=True)
class Mixed:
    """A share of the way incrementally, the rest in one shot: ``Mixed(0.75)`` is the paper's t = 75 %."""

    incremental: float

    def __post_init__(self) -> None:
        """Refuse what is no share."""
        number = isinstance(self.incremental, (int, float)) and not isinstance(self.incremental, bool)
        if not number or math.isnan(self.incremental) or not 0 < self.incremental < 1:
            raise BudgetError(
                f"Mixed({self.incremental!r}): give the share of the way that is incremental, between 0 and 1"
            )


Schedule = Literal["incremental", "one-shot"] | Mixed


@dataclass(frozen=True)
class Phase:
    """Until ``budget`` is met: score (and, with ``train``, take steps), then remove ``most`` times (all if None)."""

    budget: Budget
    most: int | None
    train: bool


def phases(schedule: Schedule, budget: Budget, units_per_step: int) -> tuple[Phase, ...]:
    """The phases of a schedule.

    >>> [(phase.budget.macs, phase.most, phase.train) for phase in phases(Mixed(0.75), Budget(macs=0.6), 1)]
    [(0.7, 1, True), (0.6, None, False)]
    """
    gradual = Phase(budget, units_per_step, train=True)
    at_once = Phase(budget, None, train=False)
    if schedule == "incremental":
        return (gradual,)
    if schedule == "one-shot":
        return (at_once,)
    if isinstance(schedule, Mixed):
        way = {kind: 1 - schedule.incremental * (1 - share) for kind, share in budget.targets.items()}
        return Phase(Budget(**{kind: round(share, 12) for kind, share in way.items()}), units_per_step, True), at_once
    raise BudgetError(f"schedule={schedule!r} is unknown; choose 'incremental', 'one-shot' or ifso.Mixed(0.75)")
