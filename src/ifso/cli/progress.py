"""The progress of a pruning run on standard error: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from ifso.pruning.events import Listener, Plan, Removal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

Clock = Callable[[], float]

EVERY = 5.0
"""Seconds between plain lines."""

PER_SECOND = 4
"""How often a terminal is drawn anew."""

NARROW = 56
"""Characters of a terminal that has no room for a bar beside the words."""

LABELS = {"macs": "MACs", "conv_macs": "conv MACs", "params": "parameters"}
UNKNOWN = "-:--:--"


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
    """

    def __init__(self, plan: Plan, now: float) -> None:
        self._targets = plan.targets
        self._began, self._moved = now, now
        self.done = self._share_done(plan.shares)
        self._times: list[float] = []
        self._ways: list[float] = []

    def moved(self, shares: Mapping[str, float], now: float) -> None:
        """So much is left now."""
        if not self._times or now - self._moved > TOGETHER:
            self._times.append(now)
            self._ways.append(self.done)
        self.done, self._moved = self._share_done(shares), now

    @property
    def percent(self) -> int:
        """The share done in full per cent: 100 only at the end."""
        return math.floor(100 * self.done + 1e-6)

    def elapsed(self, now: float) -> float:
        """Seconds since this process took the run up."""
        return now - self._began

    def left(self, now: float) -> float | None:
        """Seconds still to go, None while nothing is known."""
        if self.done >= 1:
            return 0.0
        if not self._times or self._ways[-1] <= self._ways[0]:
            return None
        half = bisect_right(self._times, (self._times[0] + self._times[-1]) / 2) - 1
        since = half if self._ways[half] < self._ways[-1] else 0
        pace = (self._times[-1] - self._times[since]) / (self._ways[-1] - self._ways[since])
        return max(0.0, pace * (1 - self.done) - (now - self._moved))

    def _share_done(self, shares: Mapping[str, float]) -> float:
        ways = ((1 - shares[kind]) / (1 - target) for kind, target in self._targets.items())
        return min(1.0, max(0.0, min(ways)))


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds.

    >>> duration(3725.4), duration(None)
    ('1:02:05', '-:--:--')
    """
    if seconds is None:
        return UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def unit_words(units: Mapping[str, Sequence[int]]) -> str:
    """The first of the units by its group and place, and how many more there are.

    >>> unit_words({"layer1.0.conv1": (3,)}), unit_words({"a": (0, 4), "b": (2,)})
    ('layer1.0.conv1[3]', 'a[0] +2')
    """
    places = [f"{group}[{place}]" for group, group_places in units.items() for place in group_places]
    return (places[0] if places else "none") + (f" +{len(places) - 1}" if len(places) > 1 else "")


def loss_words(loss: float) -> str:
    """A loss with four digits; ``–`` where none was computed.

    >>> loss_words(0.0213456), loss_words(float("nan"))
    ('0.02135', '–')
    """
    return "–" if math.isnan(loss) else f"{loss:.4g}"


class PlainProgress:
    """Lines of ``key=value``: one at the first removal, one at the last, between them one every few seconds."""

    def __init__(self, file: TextIO | None = None, clock: Clock = time.monotonic) -> None:
        self._file = sys.stderr if file is None else file
        self._clock = clock
        self._plan: Plan | None = None
        self._due = 0.0
        self._unsaid: Removal | None = None

    def started(self, plan: Plan) -> None:
        """One line with the model, its units and where the costs are to go."""
        self._plan, self._course = plan, Course(plan, self._clock())
        self._due = self._clock()
        folder = [] if plan.folder is None else [f"folder={plan.folder}"]
        again = [f"resumed_at={plan.removals}"] if plan.removals else []
        self._print("start", f"model={plan.model}", f"units={plan.units}", *self._costs(plan.shares), *again, *folder)

    def removed(self, removal: Removal) -> None:
        """A line if the last one is a while ago."""
        now = self._clock()
        self._course.moved(removal.shares, now)
        self._unsaid = removal
        if now >= self._due or self._course.done >= 1:
            self._due = now + EVERY
            self._tell()

    def said(self, line: str) -> None:
        """The line itself."""
        self._print(line)

    def finished(self) -> None:
        """The last removal, if its line was left out."""
        self._tell()

    def _tell(self) -> None:
        removal, self._unsaid = self._unsaid, None
        if removal is None:
            return
        now = self._clock()
        self._print(
            f"done={self._course.percent}%",
            f"removals={removal.removal}",
            *self._costs(removal.shares),
            f"loss={loss_words(removal.loss)}",
            f"unit={unit_words(removal.units)}",
            f"elapsed={duration(self._course.elapsed(now))}",
            f"left={duration(self._course.left(now))}",
        )

    def _costs(self, shares: Mapping[str, float]) -> list[str]:
        assert self._plan is not None
        return [f"{kind}={shares[kind]:.4f}/{target:g}" for kind, target in self._plan.targets.items()]

    def _print(self, *words: str) -> None:
        print("prune:", *words, file=self._file, flush=True)


class RichProgress:
    """A line with a bar, what is left of each target, times, the loss and the last unit, cut off where it ends.

    Below it, for a run that writes a folder, what is left of every layer (:class:`ifso.cli.live.Layers`).
    """

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic, refresh: bool = True) -> None:
        self._console = console or _console()
        self._clock, self._refresh = clock, refresh
        self._progress: Progress | None = None

    def started(self, plan: Plan) -> None:
        """The bar appears."""
        from ifso.cli.live import Layers

        self._targets, self._shares = plan.targets, plan.shares
        self._loss, self._unit = math.nan, ""
        self._layers = Layers.of(plan)
        self._course = Course(plan, self._clock())
        self._progress = self._drawn()
        self._task = self._progress.add_task("prune", total=1.0)
        self._progress.update(self._task, completed=self._course.done)
        self._progress.start()

    def removed(self, removal: Removal) -> None:
        """The bar moves."""
        assert self._progress is not None
        self._course.moved(removal.shares, self._clock())
        self._shares, self._loss, self._unit = removal.shares, removal.loss, unit_words(removal.units)
        if self._layers is not None:
            self._layers.removed(removal)
        self._progress.update(self._task, completed=self._course.done)

    def said(self, line: str) -> None:
        """The line above the bar."""
        self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def finished(self) -> None:
        """The bar stays as it is, and the cursor is shown again, even if Ctrl-C came while the bar was being set up."""
        bar, self._progress = self._progress, None
        if bar is not None:
            with suppress(IndexError):
                bar.stop()
            self._console.show_cursor()

    def _drawn(self) -> Progress:
        """The line, and the layers below it; on a narrow terminal words come before the bar."""
        from rich.console import RenderableType
        from rich.progress import BarColumn, Progress
        from rich.table import Column

        layers, width = self._layers, self._console.width
        length = 20 if width >= 100 else 8
        bar = BarColumn(length, complete_style="cyan", finished_style="green", table_column=Column(no_wrap=True))

        class WithLayers(Progress):
            def get_renderables(self) -> Iterator[RenderableType]:
                yield from super().get_renderables()
                if layers is not None:
                    yield layers

        columns = [*([bar] if width >= NARROW else []), _words_column(self._words)]
        return WithLayers(
            *columns, console=self._console, auto_refresh=self._refresh, refresh_per_second=PER_SECOND,
            get_time=self._clock,
        )  # fmt: skip

    def _words(self) -> str:
        now = self._clock()
        costs = [
            f"{LABELS.get(kind, kind)} {self._shares[kind]:.1%} → {target:.1%}"
            for kind, target in self._targets.items()
        ]
        return (
            f"{self._course.percent:3}% {' '.join(costs)} left {duration(self._course.left(now))} "
            f"loss {loss_words(self._loss)} so far {duration(self._course.elapsed(now))} {self._unit}"
        ).rstrip()


def _words_column(words: Callable[[], str]) -> ProgressColumn:
    """Words that are asked for whenever the bar is drawn, and never read as markup: names come from models."""
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class Words(ProgressColumn):
        def render(self, _: Task) -> Text:
            return Text(words(), no_wrap=True, overflow="ellipsis")

    return Words()


class _Several:
    """Tells all of them."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = tuple(listeners)

    def started(self, plan: Plan) -> None:
        """To each in turn."""
        for listener in self._listeners:
            listener.started(plan)

    def removed(self, removal: Removal) -> None:
        """To each in turn."""
        for listener in self._listeners:
            listener.removed(removal)

    def said(self, line: str) -> None:
        """To each in turn."""
        for listener in self._listeners:
            listener.said(line)

    def finished(self) -> None:
        """To each, the last first, even if one of them fails."""
        with ExitStack() as stack:
            for listener in self._listeners:
                stack.callback(listener.finished)


def several(listeners: Sequence[Listener]) -> Listener:
    """One listener that tells all of ``listeners``, in their order."""
    return listeners[0] if len(listeners) == 1 else _Several(listeners)


@contextmanager
def progress(*others: Listener) -> Iterator[Listener]:
    """A bar if standard error is a terminal, lines otherwise, and ``others``; all are told of the end in any case."""
    listener = several([_on_stderr(), *others])
    try:
        yield listener
    finally:
        listener.finished()


def _on_stderr() -> Listener:
    console = _console()
    terminal = sys.stderr.isatty() and not console.is_dumb_terminal
    return RichProgress(console) if terminal else PlainProgress()


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False, emoji=False)
