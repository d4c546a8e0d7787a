"""Everything that decides how a run ends; a run can only be resumed with the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ifso.criteria.base import Criterion
from ifso.criteria.registry import create, names
from ifso.errors import BudgetError, ScoreError
from ifso.pruning.budget import Budget
from ifso.pruning.normalizing import check_normalizer
from ifso.pruning.schedule import Mixed, Schedule, phases

MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
ACCUMULATIONS = ("sum", "last")
"""What counts of the scores before a removal: all of them, or only the last."""


@dataclass(frozen=True)
class Settings:
    """The options of :func:`ifso.prune`, checked."""

    budget: Budget
    criterion: Criterion
    schedule: Schedule = "incremental"
    normalize: str = "sqrt-memory"
    accumulate: int = 10
    accumulation: str = "sum"
    batches_per_score: int = 2
    units_per_step: int = 1
    round_to: int | None = None
    min_units: int = 1
    ignore: tuple[str, ...] = ()
    seed: int = 0
    train_mode: bool = True
    recalibrate: int = 20
    weight_update: int = 0
    damping: float = 3.0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if not isinstance(self.budget, Budget):
            raise BudgetError(f"budget is {self.budget!r}; give ifso.Budget(macs=0.5), the share kept")
        check_normalizer(self.normalize)
        if self.accumulation not in ACCUMULATIONS:
            names = " or ".join(map(repr, ACCUMULATIONS))
            raise BudgetError(f"accumulation={self.accumulation!r} is unknown; choose {names}")
        for name, least in (("accumulate", 1), ("batches_per_score", 1), ("units_per_step", 1), ("seed", 0),
                            ("recalibrate", 0), ("weight_update", 0)):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise BudgetError(f"{name}={value!r} will not do; give a whole number from {least} up")
        if not isinstance(self.damping, (int, float)) or not 0 < self.damping < math.inf:
            raise BudgetError(f"damping={self.damping!r} must be above 0")
        phases(self.schedule, self.budget, self.units_per_step)

    @property
    def needs_latency(self) -> bool:
        """Must layers be timed?"""
        return self.budget.latency is not None or self.normalize == "latency"

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for ``config.json``.

        The usual ``accumulation`` is not among them, so that runs from before there was another go on.
        """
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.accumulation == "sum":
            del plain["accumulation"]
        options = {key: _plain(value) for key, value in vars(self.criterion).items()}
        schedule = f"mixed:{self.schedule.incremental:g}" if isinstance(self.schedule, Mixed) else self.schedule
        named = {"budget": self.budget.targets, "criterion": {"name": self.criterion.name, **options}}
        return {**plain, **named, "schedule": schedule, "ignore": list(self.ignore)}


def criterion_of(criterion: str | Criterion) -> Criterion:
    """The criterion of that name, or the object itself."""
    if isinstance(criterion, str):
        return create(criterion)
    if not isinstance(criterion, Criterion):
        raise ScoreError(f"criterion is {criterion!r}; give a Criterion object or one of {', '.join(names())}")
    return criterion


def sgd(parameters: list[nn.Parameter], learning_rate: float) -> Optimizer:
    """The optimizer of the paper."""
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


def describe(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer as plain values: its class and the options of its groups."""
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "groups": groups}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else repr(value)
