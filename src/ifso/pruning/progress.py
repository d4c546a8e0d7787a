"""The progress of a pruning run: how far it is, as a bar on a terminal or in a notebook, as plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from ifso.common.progress import (
    EVERY,
    PER_SECOND,
    BarDisplay,
    Clock,
    Estimate,
    PlainDisplay,
    shows_bars,
    stderr_console,
)
from ifso.common.text import duration, joined_error, loss_words, measured, roughly
from ifso.errors import BudgetError
from ifso.pruning.events import Listener, Plan, Removal, Silent, Stage

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

LABELS = {"macs": "MACs", "conv_macs": "conv MACs", "params": "parameters"}
REQUIRED = ("started", "removed", "said", "finished")
"""Methods that every listener must have."""


class PlainProgress(PlainDisplay):
    """Lines of ``key=value``: one at the first removal, one at the last, between them one every few seconds.

    A staged run has one line for each stage instead, and after the first an estimate of the time left.
    """

    def __init__(self, file: TextIO | None = None, clock: Clock = time.monotonic) -> None:
        super().__init__("prune", file, clock)
        self._due = 0.0
        self._pending: Removal | None = None

    def started(self, plan: Plan) -> None:
        """Print the model, its units and the target costs."""
        self._targets, self._course, self._due = plan.targets, Course(plan, self._clock()), self._clock()
        words = ["start", f"model={plan.model}", f"units={plan.units}", *self._costs(plan.shares)]
        words += [f"stages={plan.stages}"] if plan.stages else []
        words += [f"resumed_at={plan.removals}"] if plan.removals else []
        self._print(*words, *([] if plan.folder is None else [f"folder={plan.folder}"]))

    def removed(self, removal: Removal) -> None:
        """Print a line if the last one is a while ago; none in a staged run."""
        now = self._clock()
        self._course.moved(removal.shares, now)
        if self._course.in_stages:
            return
        self._pending = removal
        if now >= self._due or self._course.done >= 1:
            self._due = now + EVERY
            self._print_pending()

    def staged(self, stage: Stage) -> None:
        """Print what is left, what went and what was measured."""
        now, self._pending = self._clock(), None
        self._course.staged(stage, now)
        values = [f"{name}={measured(name, value, stage.samples)}" for name, value in stage.values.items()]
        values = [joined_error(words) for words in values]
        number = f"stage={stage.number}/{stage.stages}"
        self._print(number, *self._costs(stage.shares), f"units={stage.units}", *values, *self._times(now))
        left = self._course.left(now)
        if self._course.first_stage and left:
            self._print(f"about {roughly(left)} left")

    def finished(self) -> None:
        """Print the last removal, if its line was left out."""
        self._print_pending()

    def _print_pending(self) -> None:
        removal, self._pending = self._pending, None
        if removal is not None:
            self._print(
                f"done={self._course.percent}%",
                f"removals={removal.removal}",
                *self._costs(removal.shares),
                f"loss={loss_words(removal.loss)}",
                f"unit={unit_words(removal.units)}",
                *self._times(self._clock()),
            )

    def _costs(self, shares: Mapping[str, float]) -> list[str]:
        return [f"{kind}={shares[kind]:.4f}/{target:g}" for kind, target in self._targets.items()]

    def _times(self, now: float) -> tuple[str, str]:
        return f"elapsed={duration(self._course.elapsed(now))}", f"left={duration(self._course.left(now))}"


class RichProgress(BarDisplay):
    """A line with a bar, what is left of each target, times, the loss and the last unit, cut off where it ends.

    A staged run shows the stage under way and what was measured last instead of the loss and the unit.
    Below it, for a run that writes a folder, what is left of every layer (:class:`ifso.pruning.live.Layers`).
    """

    def started(self, plan: Plan) -> None:
        """Show the bar."""
        from ifso.pruning.live import Layers

        self._targets, self._shares = plan.targets, plan.shares
        self._loss, self._unit = math.nan, ""
        self._values: list[str] = []
        self._layers = Layers.of(plan)
        self._course = Course(plan, self._clock())
        progress = self._create(self._words, self._layers)
        self._task = progress.add_task("prune", total=1.0)
        progress.update(self._task, completed=self._course.done)
        self._show(progress)

    def removed(self, removal: Removal) -> None:
        """Move the bar."""
        self._course.moved(removal.shares, self._clock())
        self._shares, self._loss, self._unit = removal.shares, removal.loss, unit_words(removal.units)
        if self._layers is not None:
            self._layers.removed(removal)
        self._move()

    def staged(self, stage: Stage) -> None:
        """Move the bar, and show what was measured."""
        self._course.staged(stage, self._clock())
        values = [f"{name} {measured(name, value, stage.samples)}" for name, value in stage.values.items()]
        self._shares, self._values = stage.shares, values or self._values
        self._move()

    def _move(self) -> None:
        assert self._progress is not None
        self._progress.update(self._task, completed=self._course.done)

    def _show(self, progress: Progress) -> None:
        progress.start()

    def _words(self, _: str) -> str:
        now, course = self._clock(), self._course
        costs = [
            f"{LABELS.get(kind, kind)} {self._shares[kind]:.1%} → {target:.1%}"
            for kind, target in self._targets.items()
        ]
        left, elapsed = f"left {duration(course.left(now))}", f"so far {duration(course.elapsed(now))}"
        if course.in_stages:
            words = [course.stage_words, *costs, left, *self._values, elapsed]
        else:
            words = [*costs, left, f"loss {loss_words(self._loss)}", elapsed, self._unit]
        return " ".join([f"{course.percent:3}%", *filter(None, words)])


class NotebookProgress(RichProgress):
    """The same in the output of a notebook's cell, drawn anew when something happens; needs no widgets."""

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic) -> None:
        super().__init__(console, clock, refresh=False)
        self._handle: Any = None
        self._due = 0.0

    def removed(self, removal: Removal) -> None:
        """Move the bar, a few times per second at most."""
        super().removed(removal)
        if self._clock() >= self._due:
            self._redraw()

    def staged(self, stage: Stage) -> None:
        """Move the bar, and show what was measured."""
        super().staged(stage)
        self._redraw()

    def _show(self, progress: Progress) -> None:
        from IPython.display import display

        self._handle = display(progress, display_id=True)
        self._due = self._clock() + 1 / PER_SECOND

    def _redraw(self) -> None:
        self._handle.update(self._progress)
        self._due = self._clock() + 1 / PER_SECOND

    def _leave(self, progress: Progress) -> None:
        if self._handle is not None:
            self._handle.update(progress)


class _Several:
    """Passes every event on to all of its listeners, even if one of them fails."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = tuple(listeners)

    def __getattr__(self, event: str) -> Callable[..., None]:
        def notify(*facts: Plan | Removal | Stage | str) -> None:
            with ExitStack() as stack:
                for listener in reversed(self._listeners):
                    stack.callback(getattr(listener, event), *facts)

        return notify


def listeners_as_one(listeners: Sequence[Listener]) -> Listener:
    """One listener that passes everything on to all of ``listeners``, in their order."""
    return listeners[0] if len(listeners) == 1 else cast("Listener", _Several(listeners))


@contextmanager
def progress(*others: Listener) -> Iterator[Listener]:
    """The display that fits (see :func:`display`) and ``others`` as one listener, finished at the end in any case."""
    listener = listeners_as_one([display(), *others])
    try:
        yield listener
    finally:
        listener.finished()


def listener_for(progress: bool | None, listener: Listener | None) -> Listener:
    """Who hears of a run: the display, the user's ``listener``, both or nobody.

    With ``progress=None`` a listener takes the place of the display, with True it comes beside it, with False there is
    no display. Of several processes, only the first shows one.
    """
    from ifso.common.distributed import rank

    missing = [name for name in REQUIRED if listener is not None and not callable(getattr(listener, name, None))]
    if missing:
        raise BudgetError(
            f"listener must have {', '.join(REQUIRED)}, got {type(listener).__name__} without {missing[0]}"
        )
    shown = listener is None if progress is None else progress
    listeners = [*([display()] if shown and rank() == 0 else []), *([] if listener is None else [listener])]
    return listeners_as_one(listeners or [Silent()])


def display() -> Listener:
    """A bar if standard error is a terminal or this is a notebook, lines otherwise; nothing without standard error."""
    if sys.stderr is None:
        return Silent()
    console = stderr_console()
    if console.is_jupyter:
        return NotebookProgress(console)
    return RichProgress(console) if shows_bars(console) else PlainProgress()


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
