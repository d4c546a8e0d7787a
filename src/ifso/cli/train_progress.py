"""The progress of trainings on standard error: a bar for each on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from ifso.pruning.course import duration, loss_words
from ifso.pruning.progress import EVERY, Clock, _console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, TaskID

    from ifso.training.runs import Listener
    from ifso.training.trainer import Epoch

SHOWN = {"top1": "top1", "map": "mAP"}
"""Measures of an epoch that are shown, and what they are called."""

REDRAWN = 0.1
"""Seconds between two movements of a bar within an epoch."""


class Course:
    """How far a training has come, and how long it may still take.

    >>> course = Course(epoch=10, epochs=20, now=0.0)
    >>> course.done = 12.5
    >>> course.left(now=50.0)
    150.0
    """

    def __init__(self, epoch: int, epochs: int, now: float) -> None:
        self.done, self.epochs = float(epoch), epochs
        self._from, self._began = epoch, now
        self.last: Epoch | None = None

    def elapsed(self, now: float) -> float:
        """Seconds since this process took the training up."""
        return now - self._began

    def left(self, now: float) -> float | None:
        """Seconds still to go, None while nothing is known."""
        if self.done >= self.epochs:
            return 0.0
        if self.done <= self._from:
            return None
        return self.elapsed(now) * (self.epochs - self.done) / (self.done - self._from)

    def facts(self) -> dict[str, str]:
        """The last epoch's loss, rate and accuracy, or mAP of a detector, as far as they are known."""
        if self.last is None:
            return {}
        known = {"loss": loss_words(self.last.loss), "lr": f"{self.last.lr:.3g}"}
        measures = self.last.measures
        return known | {word: f"{measures[name]:.2f}" for name, word in SHOWN.items() if name in measures}


class PlainProgress:
    """Lines of ``key=value`` for each training: at the first and the last epoch, between them one every few seconds."""

    def __init__(self, command: str, file: TextIO | None = None, clock: Clock = time.monotonic) -> None:
        self._command, self._file, self._clock = command, sys.stderr if file is None else file, clock
        self._courses: dict[str, Course] = {}
        self._due: dict[str, float] = {}

    def started(self, name: str, epoch: int, epochs: int) -> None:
        """One line."""
        now = self._clock()
        self._courses[name], self._due[name] = Course(epoch, epochs, now), now + EVERY
        self._print(name, "start", f"epochs={epochs}", *([f"resumed_at={epoch}"] if epoch else []))

    def stepped(self, name: str, done: float) -> None:
        """A line if the last one is a while ago."""
        self._courses[name].done = done
        if self._clock() >= self._due[name]:
            self._tell(name, f"{done:.2f}")

    def ended(self, name: str, epoch: Epoch) -> None:
        """A line if it is the first or the last epoch, or the last line is a while ago."""
        course = self._courses[name]
        first = course.last is None
        course.done, course.last = float(epoch.number), epoch
        if first or epoch.number == course.epochs or self._clock() >= self._due[name]:
            self._tell(name, str(epoch.number))

    def said(self, line: str) -> None:
        """The line itself."""
        self._print(line)

    def finished(self) -> None:
        """Nothing is left to tell."""

    def _tell(self, name: str, epoch: str) -> None:
        course, now = self._courses[name], self._clock()
        self._due[name] = now + EVERY
        facts = [f"{fact}={value}" for fact, value in course.facts().items()]
        times = f"elapsed={duration(course.elapsed(now))}", f"left={duration(course.left(now))}"
        self._print(name, f"epoch={epoch}/{course.epochs}", *facts, *times)

    def _print(self, *words: str) -> None:
        print(f"{self._command}:", *words, file=self._file, flush=True)


class RichProgress:
    """A bar for each training, then its epoch, loss, accuracy, times and name, cut off where the line ends."""

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic, refresh: bool = True) -> None:
        self._console, self._clock, self._refresh = console or _console(), clock, refresh
        self._bars: Progress | None = None
        self._courses: dict[str, Course] = {}
        self._tasks: dict[str, TaskID] = {}
        self._due: dict[str, float] = {}

    def started(self, name: str, epoch: int, epochs: int) -> None:
        """A bar appears."""
        if self._bars is None:
            self._bars = self._drawn()
        self._courses[name] = Course(epoch, epochs, self._clock())
        self._tasks[name] = self._bars.add_task(name, total=float(epochs), completed=epoch)

    def stepped(self, name: str, done: float) -> None:
        """The bar moves, if it has not done so just now: a step may take less time than drawing it."""
        if self._clock() >= self._due.get(name, 0.0):
            self._move(name, done)

    def ended(self, name: str, epoch: Epoch) -> None:
        """The bar moves, and its words change."""
        self._courses[name].last = epoch
        self._move(name, float(epoch.number))

    def _move(self, name: str, done: float) -> None:
        assert self._bars is not None
        self._courses[name].done, self._due[name] = done, self._clock() + REDRAWN
        self._bars.update(self._tasks[name], completed=done)

    def said(self, line: str) -> None:
        """The line above the bars."""
        self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def finished(self) -> None:
        """The bars stay as they are, and the cursor is shown again."""
        bars, self._bars = self._bars, None
        if bars is not None:
            with suppress(IndexError):
                bars.stop()
            self._console.show_cursor()

    def _drawn(self) -> Progress:
        from rich.progress import BarColumn, Progress
        from rich.table import Column

        width = 20 if self._console.width >= 100 else 8
        bar = BarColumn(width, complete_style="cyan", finished_style="green", table_column=Column(no_wrap=True))
        bars = Progress(
            bar, self._words_column(), console=self._console, auto_refresh=self._refresh, get_time=self._clock
        )
        bars.start()
        return bars

    def _words_column(self) -> ProgressColumn:
        """Words that are never read as markup: names are folders."""
        from rich.progress import ProgressColumn, Task
        from rich.text import Text

        words = self._words

        class Words(ProgressColumn):
            def render(self, task: Task) -> Text:
                return Text(words(task.description), no_wrap=True, overflow="ellipsis")

        return Words()

    def _words(self, name: str) -> str:
        course, now = self._courses[name], self._clock()
        facts = [f"{fact} {value}" for fact, value in course.facts().items() if fact != "lr"]
        times = f"{duration(course.elapsed(now))} left {duration(course.left(now))}"
        return " ".join([f"epoch {int(course.done)}/{course.epochs}", *facts, times, name])


@contextmanager
def training_progress(command: str) -> Iterator[Listener]:
    """Bars if standard error is a terminal, lines otherwise; told of the end in any case."""
    console = _console()
    terminal = sys.stderr.isatty() and not console.is_dumb_terminal
    shown = RichProgress(console) if terminal else PlainProgress(command)
    try:
        yield shown
    finally:
        shown.finished()
