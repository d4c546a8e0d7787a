"""What a pruning run tells while it goes on, who hears of it, and how far the run has come."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ifso.common.progress import Estimate

if TYPE_CHECKING:
    from ifso.pruning.result import Network


@dataclass(frozen=True)
class Plan:
    """What is about to be done. ``targets`` and ``shares`` are shares kept by the name of a cost, such as ``macs``.

    ``removals`` counts those already made, when a run is resumed. ``stages`` are planned in all; 0 if the run is not a
    staged one. ``costs`` are those of the whole network, ``smallest()`` the shares left when all is gone that may go.
    """

    model: str
    units: int
    targets: Mapping[str, float]
    shares: Mapping[str, float]
    removals: int
    folder: str | None
    stages: int = 0
    costs: Mapping[str, float] = field(default_factory=dict)
    smallest: Callable[[], Mapping[str, float]] = dict


@dataclass(frozen=True)
class Removal:
    """One removal: one line of ``metrics.jsonl``.

    ``units`` are their places within the groups, usually a single one. ``score`` is their mean score after
    normalisation. ``costs`` are what is left (``macs``, ``conv_macs``, ``params``, ``activations``, perhaps
    ``latency``) and ``shares`` the same as shares of the original network. ``loss`` is the mean loss over the batches
    of this step, ``seconds`` the time since the run began, earlier parts of a resumed run included.
    """

    removal: int
    step: int
    units: Mapping[str, tuple[int, ...]]
    score: float
    costs: Mapping[str, float]
    shares: Mapping[str, float]
    loss: float
    seconds: float

    def as_line(self) -> dict[str, Any]:
        """As plain JSON values."""
        plain = {**vars(self), "costs": dict(self.costs), "shares": dict(self.shares)}
        return {**plain, "units": {group: list(places) for group, places in self.units.items()}}


@dataclass(frozen=True)
class Stage:
    """One stage of a staged run, done: ``number`` of the ``stages`` that are planned.

    ``units`` went in it. ``shares`` are what is left of each cost, ``values`` what ``evaluate`` said of the network
    (empty where it was not asked), ``seconds`` the time since the run began, ``samples`` of how many an accuracy is.
    ``network`` is that of a budget on the way to the last one, where the stage has reached it.
    """

    number: int
    stages: int
    units: int
    shares: Mapping[str, float]
    values: Mapping[str, float]
    seconds: float
    samples: int | None = None
    network: Network | None = None


class Listener(Protocol):
    """Somebody who wants to see the progress of a run. Every call comes from the process that runs it."""

    def started(self, plan: Plan) -> None:
        """The run begins, or goes on."""

    def removed(self, removal: Removal) -> None:
        """Units went."""

    def staged(self, stage: Stage) -> None:
        """A stage of a staged run is done."""

    def said(self, line: str) -> None:
        """One line for a person: what happens now, what went otherwise than expected."""

    def finished(self) -> None:
        """The run has ended, well or not."""


class Silent:
    """Tells nobody."""

    def started(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    removed = staged = said = finished = started


TOGETHER = 0.01
"""Units that go within so many seconds of each other go in one round: the first of them has waited for the scores."""


class Course:
    """How far a run has come, and how long it may still take.

    The share done is that of the way from the whole network to the target, for the target that is furthest from done.
    Time left supposes that the rest goes as quickly as the second half of the rounds so far did: units that are removed
    later are often cheaper, so that it takes more of them. Nothing is known before the second round.

    >>> course = Course(Plan("net", 10, {"macs": 0.6, "params": 0.5}, {"macs": 1.0, "params": 1.0}, 0, None), now=0.0)
    >>> course.moved({"macs": 0.9, "params": 0.9}, now=30.0)
    >>> course.moved({"macs": 0.8, "params": 0.8}, now=60.0)
    >>> round(course.done, 6), round(course.left(now=60.0)), round(course.left(now=70.0))
    (0.4, 90, 80)

    In a staged run, stages count and not removals: those to come take as long as those of this process took on average.

    >>> course = Course(Plan("net", 10, {"macs": 0.6}, {"macs": 1.0}, 0, None, stages=4), now=0.0)
    >>> course.moved({"macs": 0.9}, now=10.0)
    >>> course.left(now=10.0) is None
    True
    >>> course.staged(Stage(1, 4, 3, {"macs": 0.9}, {}, 20.0), now=20.0)
    >>> course.left(now=20.0), course.left(now=25.0), course.stage_words
    (60.0, 55.0, 'stage 2/4')
    """

    def __init__(self, plan: Plan, now: float) -> None:
        self._targets, self._began = plan.targets, now
        self._removals, self._stages = _Rounds(self._share_done(plan.shares), 1.0, now), Estimate(0, plan.stages, now)
        self._fresh, self._planned, self._stage, self._made = not plan.removals, plan.stages, 0, 0

    @property
    def done(self) -> float:
        """The share done of the way to the target that is furthest from done."""
        return self._removals.done

    def moved(self, shares: Mapping[str, float], now: float) -> None:
        """So much is left now."""
        self._removals.moved(self._share_done(shares), now)

    def staged(self, stage: Stage, now: float) -> None:
        """A stage is done."""
        if not self._made:
            self._stages = Estimate(stage.number - 1, stage.stages, self._began)
        self.moved(stage.shares, now)
        self._stages.moved(stage.number, now)
        self._stages.total = stage.number if self.done >= 1 else stage.stages
        self._planned, self._stage, self._made = stage.stages, stage.number, self._made + 1

    @property
    def in_stages(self) -> bool:
        """Whether this is a staged run; a plan or a first stage says so."""
        return self._planned > 0

    @property
    def first_stage(self) -> bool:
        """Whether this process has done exactly one stage."""
        return self._made == 1

    @property
    def stage_words(self) -> str:
        """The stage under way, of how many; the last one once the run is through, nothing where it is not known."""
        if not self._made:
            return f"stage 1/{self._planned}" if self._planned and self._fresh else ""
        return f"stage {self._stage + (self._stages.done < self._stages.total)}/{self._planned}"

    @property
    def percent(self) -> int:
        """The share done in full per cent: 100 only at the end."""
        return math.floor(100 * self.done + 1e-6)

    def elapsed(self, now: float) -> float:
        """Seconds since this process took the run up."""
        return self._removals.elapsed(now)

    def left(self, now: float) -> float | None:
        """Seconds still to go, None while nothing is known."""
        if self.in_stages:
            return self._stages.left(now) if self._made else None
        return self._removals.left(now)

    def _share_done(self, shares: Mapping[str, float]) -> float:
        ways = ((1 - shares[kind]) / (1 - target) for kind, target in self._targets.items())
        return min(1.0, max(0.0, min(ways)))


class _Rounds(Estimate):
    """Removals come in rounds; the pace is that of the second half of the rounds so far."""

    def __init__(self, done: float, total: float, now: float) -> None:
        super().__init__(done, total, now)
        self._rounds: list[tuple[float, float]] = []

    def moved(self, done: float, now: float) -> None:
        if not self._rounds or now - self._moved > TOGETHER:
            self._rounds.append((now, self.done))
        super().moved(done, now)

    def pace(self) -> float | None:
        if not self._rounds or self._rounds[-1][1] <= self._rounds[0][1]:
            return None
        (first, _), (last, way) = self._rounds[0], self._rounds[-1]
        half = bisect_right(self._rounds, (first + last) / 2, key=lambda each: each[0]) - 1
        since, before = self._rounds[half] if self._rounds[half][1] < way else self._rounds[0]
        return (last - since) / (way - before)
