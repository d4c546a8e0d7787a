"""How far a pruning run has come and how long it may still take, in numbers and in words."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from ifso.common.progress import Estimate
from ifso.pruning.events import Plan, Stage

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


def unit_words(units: Mapping[str, Sequence[int]]) -> str:
    """The first of the units by its group and place, and how many more there are.

    >>> unit_words({"layer1.0.conv1": (3,)}), unit_words({"a": (0, 4), "b": (2,)})
    ('layer1.0.conv1[3]', 'a[0] +2')
    """
    places = [f"{group}[{place}]" for group, group_places in units.items() for place in group_places]
    return (places[0] if places else "none") + (f" +{len(places) - 1}" if len(places) > 1 else "")
