"""In how many steps the units go."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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


Schedule = Literal["staged", "incremental", "one-shot"] | Mixed

STAGE = 0.05
"""The share of a cost that goes in one stage of a staged run, at most."""


@dataclass(frozen=True)
class Phase:
    """Until ``budget`` is met: score (and, with ``train``, take steps), then remove ``most`` times (all if None)."""

    budget: Budget
    most: int | None
    train: bool
    stage: int = 0
    """The number of a stage of a staged run, from 1 on."""
    ends_at: Budget | None = None
    """The budget that is met after this stage, if it is one of those asked for."""


def phases(schedule: Schedule, budget: Budget, units_per_step: int) -> tuple[Phase, ...]:
    """The phases of a schedule.

    >>> [(phase.budget.macs, phase.most, phase.train) for phase in phases(Mixed(0.75), Budget(macs=0.6), 1)]
    [(0.7, 1, True), (0.6, None, False)]
    """
    gradual = Phase(budget, units_per_step, train=True)
    at_once = Phase(budget, None, train=False)
    if schedule == "staged":
        return _stages(budget)
    if schedule == "incremental":
        return (gradual,)
    if schedule == "one-shot":
        return (at_once,)
    if isinstance(schedule, Mixed):
        way = {kind: 1 - schedule.incremental * (1 - share) for kind, share in budget.targets.items()}
        return Phase(Budget(**{kind: round(share, 12) for kind, share in way.items()}), units_per_step, True), at_once
    known = "'staged', 'incremental', 'one-shot' or ifso.Mixed(0.75)"
    raise BudgetError(f"schedule must be {known}, got {schedule!r}")


def _stages(budget: Budget) -> tuple[Phase, ...]:
    """Stages of equal size on the way to each budget of the path.

    >>> [(round(phase.budget.macs, 3), phase.ends_at is not None) for phase in _stages(Budget(macs=(0.9, 0.82)))]
    [(0.95, False), (0.9, True), (0.86, False), (0.82, True)]
    """
    found: list[Phase] = []
    before = dict.fromkeys(budget.targets, 1.0)
    for wanted in budget.path:
        after = wanted.targets
        number = math.ceil(round(max(before[kind] - after[kind] for kind in after) / STAGE, 9))
        for step in range(1, number):
            way = {kind: before[kind] - (before[kind] - after[kind]) * step / number for kind in after}
            found.append(Phase(Budget(**{kind: round(share, 12) for kind, share in way.items()}), None, False))
        found.append(Phase(wanted, None, False, ends_at=wanted))
        before = after
    return tuple(replace(phase, stage=number) for number, phase in enumerate(found, 1))
