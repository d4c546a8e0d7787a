"""How far a pruning run has come and how long it may still take, in numbers and in words."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

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
        self._targets = plan.targets
        self._began, self._moved = now, now
        self.done = self._share_done(plan.shares)
        self._times: list[float] = []
        self._ways: list[float] = []
        self._fresh, self._planned = not plan.removals, plan.stages
        self._stage: Stage | None = None
        self._stages_made, self._stage_ended = 0, now

    def moved(self, shares: Mapping[str, float], now: float) -> None:
        """So much is left now."""
        if not self._times or now - self._moved > TOGETHER:
            self._times.append(now)
            self._ways.append(self.done)
        self.done, self._moved = self._share_done(shares), now

    def staged(self, stage: Stage, now: float) -> None:
        """A stage is done."""
        self._stage, self._planned = stage, stage.stages
        self.done = self._share_done(stage.shares)
        self._stages_made, self._stage_ended = self._stages_made + 1, now

    @property
    def in_stages(self) -> bool:
        """Is this a staged run? A plan or a first stage says so."""
        return self._planned > 0

    @property
    def first_stage(self) -> bool:
        """Has this process done exactly one stage?"""
        return self._stages_made == 1

    @property
    def stage_words(self) -> str:
        """The stage under way, of how many; the last one once the run is through, nothing where it is not known."""
        if self._stage is None:
            return f"stage 1/{self._planned}" if self._planned and self._fresh else ""
        return f"stage {self._stage.number + (self._stages_left > 0)}/{self._planned}"

    @property
    def percent(self) -> int:
        """The share done in full per cent: 100 only at the end."""
        return math.floor(100 * self.done + 1e-6)

    def elapsed(self, now: float) -> float:
        """Seconds since this process took the run up."""
        return now - self._began

    def left(self, now: float) -> float | None:
        """Seconds still to go, None while nothing is known."""
        if self.in_stages:
            return self._left_in_stages(now)
        if self.done >= 1:
            return 0.0
        if not self._times or self._ways[-1] <= self._ways[0]:
            return None
        half = bisect_right(self._times, (self._times[0] + self._times[-1]) / 2) - 1
        since = half if self._ways[half] < self._ways[-1] else 0
        pace = (self._times[-1] - self._times[since]) / (self._ways[-1] - self._ways[since])
        return max(0.0, pace * (1 - self.done) - (now - self._moved))

    def _left_in_stages(self, now: float) -> float | None:
        if self._stage is None:
            return None
        pace = (self._stage_ended - self._began) / self._stages_made
        return max(0.0, pace * self._stages_left - (now - self._stage_ended))

    @property
    def _stages_left(self) -> int:
        """None once the target is met, even if more were planned."""
        if self._stage is None or self._share_done(self._stage.shares) >= 1:
            return 0
        return max(0, self._stage.stages - self._stage.number)

    def _share_done(self, shares: Mapping[str, float]) -> float:
        ways = ((1 - shares[kind]) / (1 - target) for kind, target in self._targets.items())
        return min(1.0, max(0.0, min(ways)))


def unit_words(units: Mapping[str, Sequence[int]]) -> str:
    """The first of the units by its group and place, and how many more there are.

    >>> unit_words({"layer1.0.conv1": (3,)}), unit_words({"a": (0, 4), "b": (2,)})
    ('layer1.0.conv1[3]', 'a[0] +2')
    """
    places = [f"{group}[{place}]" for group, group_places in units.items() for place in group_places]
    return (places[0] if places else "none") + (f" +{len(places) - 1}" if len(places) > 1 else "")
