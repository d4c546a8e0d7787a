"""The progress of a pruning run: a bar on a terminal or in a notebook, plain lines on standard error anywhere else."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from ifso.errors import BudgetError
from ifso.pruning.course import Course, duration, loss_words, roughly, unit_words
from ifso.pruning.events import Listener, Plan, Removal, Silent, Stage

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


class PlainProgress:
    """Lines of ``key=value``: one at the first removal, one at the last, between them one every few seconds.

    A staged run has one line for each stage instead, and after the first an estimate of the time left.
    """

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
        stages = [f"stages={plan.stages}"] if plan.stages else []
        again = [f"resumed_at={plan.removals}"] if plan.removals else []
        about = [f"model={plan.model}", f"units={plan.units}", *self._costs(plan.shares)]
        self._print("start", *about, *stages, *again, *folder)

    def removed(self, removal: Removal) -> None:
        """A line if the last one is a while ago; none in a staged run."""
        now = self._clock()
        self._course.moved(removal.shares, now)
        if self._course.in_stages:
            return
        self._unsaid = removal
        if now >= self._due or self._course.done >= 1:
            self._due = now + EVERY
            self._tell()

    def staged(self, stage: Stage) -> None:
        """A line with what is left, what went and what was measured."""
        now, self._unsaid = self._clock(), None
        self._course.staged(stage, now)
        left = self._course.left(now)
        self._print(
            f"stage={stage.number}/{stage.stages}",
            *self._costs(stage.shares),
            f"units={stage.units}",
            *(f"{name}={value:.4g}" for name, value in stage.values.items()),
            f"elapsed={duration(self._course.elapsed(now))}",
            f"left={duration(left)}",
        )
        if self._course.first_stage and left:
            self._print(f"about {roughly(left)} left")

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
        self._file.write(" ".join(("prune:", *words)) + "\n")
        self._file.flush()


class RichProgress:
    """A line with a bar, what is left of each target, times, the loss and the last unit, cut off where it ends.

    A staged run shows the stage under way and what was measured last instead of the loss and the unit.
    Below it, for a run that writes a folder, what is left of every layer (:class:`ifso.pruning.live.Layers`).
    """

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic, refresh: bool = True) -> None:
        self._console = console or _console()
        self._clock, self._refresh = clock, refresh
        self._progress: Progress | None = None

    def started(self, plan: Plan) -> None:
        """The bar appears."""
        from ifso.pruning.live import Layers

        self._targets, self._shares = plan.targets, plan.shares
        self._loss, self._unit = math.nan, ""
        self._values: Mapping[str, float] = {}
        self._layers = Layers.of(plan)
        self._course = Course(plan, self._clock())
        self._progress = self._drawn()
        self._task = self._progress.add_task("prune", total=1.0)
        self._progress.update(self._task, completed=self._course.done)
        self._show(self._progress)

    def removed(self, removal: Removal) -> None:
        """The bar moves."""
        assert self._progress is not None
        self._course.moved(removal.shares, self._clock())
        self._shares, self._loss, self._unit = removal.shares, removal.loss, unit_words(removal.units)
        if self._layers is not None:
            self._layers.removed(removal)
        self._progress.update(self._task, completed=self._course.done)

    def staged(self, stage: Stage) -> None:
        """The bar shows what was measured."""
        assert self._progress is not None
        self._course.staged(stage, self._clock())
        self._shares, self._values = stage.shares, stage.values or self._values
        self._progress.update(self._task, completed=self._course.done)

    def said(self, line: str) -> None:
        """The line above the bar."""
        self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def finished(self) -> None:
        """The bar stays as it is, and the cursor is shown again, even if Ctrl-C came while the bar was being set up."""
        bar, self._progress = self._progress, None
        if bar is not None:
            self._leave(bar)

    def _show(self, bar: Progress) -> None:
        bar.start()

    def _leave(self, bar: Progress) -> None:
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
        left, so_far = duration(self._course.left(now)), duration(self._course.elapsed(now))
        if self._course.in_stages:
            values = [f"{name} {value:.4g}" for name, value in self._values.items()]
            words = [self._course.stage_words, *costs, f"left {left}", *values, f"so far {so_far}"]
        else:
            words = [*costs, f"left {left}", f"loss {loss_words(self._loss)}", f"so far {so_far}", self._unit]
        return " ".join([f"{self._course.percent:3}%", *filter(None, words)])


class NotebookProgress(RichProgress):
    """The same in the output of a notebook's cell, drawn anew when something happens; needs no widgets."""

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic) -> None:
        super().__init__(console, clock, refresh=False)
        self._handle: Any = None
        self._due = 0.0

    def removed(self, removal: Removal) -> None:
        """The bar moves, a few times per second at most."""
        super().removed(removal)
        if self._clock() >= self._due:
            self._redraw()

    def staged(self, stage: Stage) -> None:
        """The bar shows what was measured."""
        super().staged(stage)
        self._redraw()

    def _show(self, bar: Progress) -> None:
        from IPython.display import display

        self._handle = display(bar, display_id=True)
        self._due = self._clock() + 1 / PER_SECOND

    def _redraw(self) -> None:
        self._handle.update(self._progress)
        self._due = self._clock() + 1 / PER_SECOND

    def _leave(self, bar: Progress) -> None:
        if self._handle is not None:
            self._handle.update(bar)


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

    def staged(self, stage: Stage) -> None:
        """To each in turn."""
        for listener in self._listeners:
            listener.staged(stage)

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
    """What fits where the run is watched (see :func:`display`), and ``others``; all are told of the end in any case."""
    listener = several([display(), *others])
    try:
        yield listener
    finally:
        listener.finished()


LISTENS = ("started", "removed", "said", "finished")
"""What every listener hears."""


def listener_for(progress: bool | None, listener: Listener | None) -> Listener:
    """Who hears of a run: the display, the user's ``listener``, both or nobody.

    With ``progress=None`` a listener takes the place of the display, with True it comes beside it, with False there is
    no display. Of several processes, only the first shows one.
    """
    from ifso.common.distributed import rank

    missing = [name for name in LISTENS if listener is not None and not callable(getattr(listener, name, None))]
    if missing:
        raise BudgetError(
            f"listener must have {', '.join(LISTENS)}, got {type(listener).__name__} without {missing[0]}"
        )
    shown = listener is None if progress is None else progress
    listeners = [*([display()] if shown and rank() == 0 else []), *([] if listener is None else [listener])]
    return several(listeners or [Silent()])


def display() -> Listener:
    """A bar if standard error is a terminal or this is a notebook, lines otherwise; nothing without standard error."""
    if sys.stderr is None:
        return Silent()
    console = _console()
    if console.is_jupyter:
        return NotebookProgress(console)
    terminal = sys.stderr.isatty() and not console.is_dumb_terminal
    return RichProgress(console) if terminal else PlainProgress()


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False, emoji=False)
