"""How much of a network may be kept, and in how many steps the rest goes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, fields, replace
from itertools import pairwise
from numbers import Real
from typing import Any, Literal

from ifso.errors import BudgetError

FLOPS = "FLOPs are counted as MACs (multiply-adds, two FLOPs each), of which the share kept is the same"


@dataclass(frozen=True)
class Budget:
    """The share KEPT of each cost that is named; a run goes on until all of them are met.

    A tuple of shares, largest first, leaves a network for each: a staged or incremental run passes through all of them.

    Args:
        macs: multiply-adds of convolutions, linear layers and matrix products.
        conv_macs: those of convolutions only (as in the paper).
        params: parameters.
        activations: the numbers that these operations write.
        latency: seconds of one forward pass on the traced inputs.
        flops: another word for ``macs``: a multiply-add is two floating-point operations, the share is the same.

    Raises:
        BudgetError: no cost is named, or a share is not between 0 and 1, or several do not fall.

    >>> Budget(macs=0.5, params=0.7).targets
    {'macs': 0.5, 'params': 0.7}
    >>> Budget(flops=0.5) == Budget(macs=0.5)
    True
    >>> Budget(macs=(0.8, 0.5)).path
    (Budget(macs=0.8, ...), Budget(macs=0.5, ...))
    >>> Budget(macs=50)
    Traceback (most recent call last):
    ifso.errors.BudgetError: macs=50 is not a share between 0 and 1; give the share KEPT: macs=0.5 keeps half
    """

    macs: float | tuple[float, ...] | None = None
    conv_macs: float | tuple[float, ...] | None = None
    params: float | tuple[float, ...] | None = None
    activations: float | tuple[float, ...] | None = None
    latency: float | None = None
    flops: InitVar[float | tuple[float, ...] | None] = None

    def __post_init__(self, flops: float | tuple[float, ...] | None) -> None:
        if flops is not None and self.macs is not None:
            raise BudgetError(f"macs={self.macs!r} and flops={flops!r} mean the same; give one of them")
        if flops is not None:
            object.__setattr__(self, "macs", flops)
            object.__setattr__(self, "_in_flops", True)
        given = self.given
        if not given:
            known = ", ".join(field.name for field in fields(self))
            raise BudgetError(f"an empty budget; give the share KEPT of at least one of {known}: macs=0.5 keeps half")
        for name, value in given.items():
            if isinstance(value, (tuple, list)) and name != "latency":
                object.__setattr__(self, name, _falling(name, tuple(value)))
            elif not _is_share(value):
                raise BudgetError(
                    f"{name}={value!r} is not a share between 0 and 1; give the share KEPT: {name}=0.5 keeps half"
                )

    @property
    def in_flops(self) -> bool:
        """Whether it was given in FLOPs."""
        return bool(vars(self).get("_in_flops"))

    @property
    def targets(self) -> dict[str, float]:
        """The shares that were given, the smallest of several, by the name of the cost."""
        return {name: float(value[-1] if isinstance(value, tuple) else value) for name, value in self.given.items()}

    @property
    def path(self) -> tuple[Budget, ...]:
        """A budget for each network that is asked for, the largest first: this one alone, if it has no tuples."""
        lengths = {len(value) for value in self.given.values() if isinstance(value, tuple)}
        if not lengths:
            return (self,)
        if len(lengths) > 1:
            raise BudgetError(f"tuples of shares must have the same length, got {sorted(lengths)} in {self}")
        return tuple(
            Budget(**{name: value[place] if isinstance(value, tuple) else value for name, value in self.given.items()})
            for place in range(lengths.pop())
        )

    @property
    def given(self) -> dict[str, Any]:
        """The costs that are named, each with what was given."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if value is not None}


def _falling(name: str, shares: tuple[float, ...]) -> tuple[float, ...]:
    """Several shares, each smaller than the one before."""
    if not shares or not all(map(_is_share, shares)):
        raise BudgetError(f"{name}={shares!r} must hold shares between 0 and 1, the shares KEPT: {name}=(0.8, 0.5)")
    if any(after >= before for before, after in pairwise(shares)):
        raise BudgetError(f"{name}={shares!r} must fall: give the largest share first, {name}=(0.8, 0.5)")
    return tuple(float(share) for share in shares)


def _is_share(value: object) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    number = float(value)
    return math.isfinite(number) and 0 < number < 1


@dataclass(frozen=True)
class Mixed:
    """A share of the way incrementally, the rest in one shot: ``Mixed(0.75)`` is the paper's t = 75 %.

    Args:
        incremental: that share, between 0 and 1.

    Raises:
        BudgetError: it is not between 0 and 1.
    """

    incremental: float

    def __post_init__(self) -> None:
        """Refuse what is no share."""
        if not _is_share(self.incremental):
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
    """The budget that is met after this phase, if it is one of those asked for."""


def phases(schedule: Schedule, budget: Budget, units_per_step: int) -> tuple[Phase, ...]:
    """The phases of a schedule.

    >>> [(phase.budget.macs, phase.most, phase.train) for phase in phases(Mixed(0.75), Budget(macs=0.6), 1)]
    [(0.7, 1, True), (0.6, None, False)]
    """
    at_once = Phase(budget, None, train=False)
    if schedule == "staged":
        return _stages(budget)
    if schedule == "incremental":
        return tuple(Phase(wanted, units_per_step, train=True, ends_at=wanted) for wanted in budget.path)
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
