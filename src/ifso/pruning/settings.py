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
from ifso.criteria.scorer import as_criterion
from ifso.errors import BudgetError, ScoreError
from ifso.pruning.budget import NORMALIZERS, STAGED, Budget, Mixed, Schedule, phases, usual
from ifso.pruning.constraints import ALL, MinShare, MinUnits
from ifso.pruning.selection import of_budget
from ifso.runs.values import is_kind

MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4

CALIBRATION = 1024
"""Samples that a staged run looks at in each stage, if it is given so many …"""

MOST_MACS = 2e13
"""… and so many of them are no more work than this, in multiply-adds of a forward pass: that of 5,000 images for a
ResNet-50, of 100 for a detector of large ones …"""

FEWEST = 64
"""… but so many in any case."""

ALGORITHM_2_ONLY = ("accumulate", "accumulation", "batches_per_score", "units_per_step")
"""Options of which any asks for Algorithm 2."""

ACCUMULATIONS = ("sum", "last")
"""What counts of the scores before a removal: all of them, or only the last."""


@dataclass(frozen=True)
class Settings:
    """The options of :func:`ifso.prune`, checked."""

    budget: Budget
    criterion: Criterion
    schedule: Schedule = "staged"
    normalize: str | None = None
    accumulate: int = 10
    accumulation: str = "sum"
    batches_per_score: int = 2
    units_per_step: int = 1
    round_to: int | None = None
    min_units: MinUnits = 1
    min_share: MinShare = 0.0
    update: bool = False
    recover: int = 0
    stop: float | None = None
    calibration: int | None = None
    ignore: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    seed: int = 0
    train_mode: bool = True
    recalibrate: int = 20
    weight_update: int = 0
    damping: float = 3.0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if not isinstance(self.budget, Budget):
            raise BudgetError(f"budget is {self.budget!r}; give ifso.Budget(macs=0.5), the share kept")
        if self.normalize is None:
            object.__setattr__(self, "normalize", of_budget(self.budget.targets))
        if self.normalize not in NORMALIZERS:
            raise ScoreError(f"normalize={self.normalize!r} is unknown; choose one of {', '.join(NORMALIZERS)}")
        if self.accumulation not in ACCUMULATIONS:
            names = " or ".join(map(repr, ACCUMULATIONS))
            raise BudgetError(f"accumulation={self.accumulation!r} is unknown; choose {names}")
        for name, least in _WHOLE_NUMBERS.items():
            value = getattr(self, name)
            if not is_kind(value, int) or value < least:
                raise BudgetError(f"{name} must be a whole number from {least} up, got {value!r}")
        if not isinstance(self.damping, (int, float)) or not 0 < self.damping < math.inf:
            raise BudgetError(f"damping={self.damping!r} must be above 0")
        phases(self.schedule, self.budget, self.units_per_step)
        self._check_stages()

    def _check_stages(self) -> None:
        """Refuse what cannot be meant of a staged run, or is meant of one and the schedule is another."""
        for name in ("update", "train_mode"):
            if not isinstance(getattr(self, name), bool):
                raise BudgetError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.stop is not None and not (is_kind(self.stop, float) and self.stop >= 0):
            raise BudgetError(f"stop must be how far the measure may fall, a number from 0 up, got {self.stop!r}")
        if self.calibration is not None and not (type(self.calibration) is int and self.calibration > 0):
            raise BudgetError(f"calibration must be a number of samples from 1 up, got {self.calibration!r}")
        if self.schedule == "staged":
            return
        if len(self.budget.path) > 1 and self.schedule != "incremental":
            raise BudgetError(
                f"several shares need schedule='staged' or 'incremental', got {self.schedule!r} with {self.budget}"
            )
        for name, unset in (("update", False), ("stop", None), ("recover", 0)):
            if getattr(self, name) != unset:
                raise BudgetError(f"{name}={getattr(self, name)!r} needs schedule='staged', got {self.schedule!r}")

    @property
    def needs_latency(self) -> bool:
        """Whether layers must be timed."""
        return self.budget.latency is not None or self.normalize == "latency"

    def samples(self, macs: float) -> int:
        """How many samples a staged run looks at, if one takes so many multiply-adds.

        >>> Settings(Budget(macs=0.5), as_criterion("random", {})).samples(4e9)
        1024
        >>> Settings(Budget(macs=0.5), as_criterion("random", {})).samples(2e11)
        100
        """
        return self.calibration or min(CALIBRATION, max(FEWEST, int(MOST_MACS / max(macs, 1))))

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for ``config.json``.

        Options that were added later are not among them where they are what they were before, so that old runs go on.
        """
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, before in _ADDED_LATER.items():
            if plain[name] == before:
                del plain[name]
        plain |= {name: _plain(plain[name]) for name in ("min_units", "min_share", "only") if name in plain}
        options = {key: _plain(value) for key, value in vars(self.criterion).items()}
        schedule = f"mixed:{self.schedule.incremental:g}" if isinstance(self.schedule, Mixed) else self.schedule
        named = {"budget": _plain(self.budget.given), "criterion": {"name": self.criterion.name, **options}}
        return {**plain, **named, "schedule": schedule, "ignore": list(self.ignore)}


_WHOLE_NUMBERS = {
    "accumulate": 1, "batches_per_score": 1, "units_per_step": 1, "seed": 0, "recalibrate": 0, "weight_update": 0,
    "recover": 0,
}  # fmt: skip
"""Options that are whole numbers, and the least that each can be."""

_ADDED_LATER: Mapping[str, Any] = {
    "accumulation": "sum", "min_share": 0.0, "update": False, "recover": 0, "stop": None, "calibration": None,
    "only": (),
}  # fmt: skip


def settings_of(preset: str | None, optimizer: object, **given: Any) -> tuple[Settings, float]:
    """Settings and learning rate: what was ``given`` and is not None, else what the preset has, or the staged run."""
    schedule, min_share = given["schedule"], given["min_share"]
    of_algorithm_2 = {name: given[name] for name in ALGORITHM_2_ONLY}
    other = schedule if schedule != "staged" else None
    chosen = usual(preset, {**of_algorithm_2, "optimizer": optimizer, "schedule": other})
    if schedule == "staged":
        chosen = STAGED if preset is None else {**chosen, "update": True, "min_share": STAGED["min_share"]}
    if isinstance(min_share, Mapping):
        given["min_share"] = {ALL: chosen["min_share"], **min_share}
    for name in ("criterion", "schedule", "normalize", "update", "min_share"):
        given[name] = chosen[name] if given[name] is None else given[name]
    given["criterion"] = as_criterion(given["criterion"], {})
    unset = [name for name, value in of_algorithm_2.items() if value is None]
    return Settings(**{name: given[name] for name in given.keys() - unset}), chosen["learning_rate"]


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
