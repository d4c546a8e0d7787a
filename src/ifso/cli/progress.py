"""The progress of trainings on standard error, and scalars of a pruning run for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ifso.common.progress import EVERY, BarDisplay, Clock, Estimate, PlainDisplay, shows_bars, stderr_console
from ifso.common.text import duration, joined_error, loss_words, with_error
from ifso.errors import IfsoError

if TYPE_CHECKING:
    from rich.progress import TaskID

    from ifso.pruning.events import Plan, Removal, Stage
    from ifso.training.runs import TrainingListener
    from ifso.training.trainer import Epoch

MEASURES = {"top1": "top1", "map": "mAP"}
"""Measures of an epoch that are shown, and their labels."""

REDRAWN = 0.1
"""Seconds between two movements of a bar within an epoch."""


class _Course(Estimate):
    """The epochs of a training, and the last of them."""

    last: Epoch | None = None

    def facts(self) -> dict[str, str]:
        """The last epoch's loss, rate and accuracy (± standard error), or mAP of a detector, if known."""
        if self.last is None:
            return {}
        known = {"loss": loss_words(self.last.loss), "lr": f"{self.last.lr:.3g}"}
        measures, counted = self.last.measures, {"top1": self.last.samples}
        found = {
            label: with_error(measures[name], counted.get(name)) for name, label in MEASURES.items() if name in measures
        }
        return known | found


class PlainTrainingProgress(PlainDisplay):
    """Lines of ``key=value`` for each training: at the first and the last epoch, between them one every few seconds."""

    def __init__(self, command: str, file: TextIO | None = None, clock: Clock = time.monotonic) -> None:
        super().__init__(command, file, clock)
        self._courses: dict[str, _Course] = {}
        self._due: dict[str, float] = {}

    def started(self, name: str, epoch: int, epochs: int) -> None:
        """Print a line."""
        now = self._clock()
        self._courses[name], self._due[name] = _Course(epoch, epochs, now), now + EVERY
        self._print(name, "start", f"epochs={epochs}", *([f"resumed_at={epoch}"] if epoch else []))

    def stepped(self, name: str, done: float) -> None:
        """Print a line if the last one is a while ago."""
        self._courses[name].moved(done, self._clock())
        if self._clock() >= self._due[name]:
            self._print_epoch(name, f"{done:.2f}")

    def ended(self, name: str, epoch: Epoch) -> None:
        """Print a line if it is the first or the last epoch, or the last line is a while ago."""
        course = self._courses[name]
        first = course.last is None
        course.moved(epoch.number, self._clock())
        course.last = epoch
        if first or epoch.number == course.total or self._clock() >= self._due[name]:
            self._print_epoch(name, str(epoch.number))

    def _print_epoch(self, name: str, epoch: str) -> None:
        course, now = self._courses[name], self._clock()
        self._due[name] = now + EVERY
        facts = [f"{fact}={joined_error(value)}" for fact, value in course.facts().items()]
        times = f"elapsed={duration(course.elapsed(now))}", f"left={duration(course.left(now))}"
        self._print(name, f"epoch={epoch}/{course.total}", *facts, *times)


class RichTrainingProgress(BarDisplay):
    """A bar for each training, then its epoch, loss, accuracy, times and name."""

    _courses: dict[str, _Course]

    def started(self, name: str, epoch: int, epochs: int) -> None:
        """Add a bar."""
        if self._progress is None:
            self._courses, self._due = {}, dict[str, float]()
            self._tasks: dict[str, TaskID] = {}
            self._create(self._words).start()
        assert self._progress is not None
        self._courses[name] = _Course(epoch, epochs, self._clock())
        self._tasks[name] = self._progress.add_task(name, total=float(epochs), completed=epoch)

    def stepped(self, name: str, done: float) -> None:
        """Move the bar, if it has not moved just now: a step may take less time than drawing it."""
        if self._clock() >= self._due.get(name, 0.0):
            self._move(name, done)

    def ended(self, name: str, epoch: Epoch) -> None:
        """Move the bar, and change its words."""
        self._courses[name].last = epoch
        self._move(name, float(epoch.number))

    def _move(self, name: str, done: float) -> None:
        assert self._progress is not None
        self._courses[name].moved(done, self._clock())
        self._due[name] = self._clock() + REDRAWN
        self._progress.update(self._tasks[name], completed=done)

    def _words(self, name: str) -> str:
        course, now = self._courses[name], self._clock()
        facts = [f"{fact} {value}" for fact, value in course.facts().items() if fact != "lr"]
        times = f"{duration(course.elapsed(now))} left {duration(course.left(now))}"
        return " ".join([f"epoch {int(course.done)}/{course.total}", *facts, times, name])


@contextmanager
def training_progress(command: str) -> Iterator[TrainingListener]:
    """Bars if standard error is a terminal, lines otherwise, finished at the end in any case."""
    console = stderr_console()
    display = RichTrainingProgress(console) if shows_bars(console) else PlainTrainingProgress(command)
    try:
        yield display
    finally:
        display.finished()


class TensorBoardListener:
    """Writes shares kept, loss, score and seconds at every removal into ``folder``, made when the run starts.

    What the stages of a staged run measured stands at the last removal of each.
    A resumed run hides what was written beyond the removal it goes on from.
    """

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise IfsoError('--tensorboard needs a package: pip install "ifso[tensorboard]"') from error
        self._make, self._folder = SummaryWriter, Path(folder)
        self._writer: Any = None
        self._removals = 0

    def started(self, plan: Plan) -> None:
        """Open the file, and write where the run starts."""
        self._writer = self._make(str(self._folder), purge_step=plan.removals + 1 if plan.removals else None)
        self._removals = plan.removals
        if not plan.removals:
            self._shares(plan.shares, step=0)

    def removed(self, removal: Removal) -> None:
        """One point on every curve."""
        self._removals = removal.removal
        self._shares(removal.shares, removal.removal)
        for name, value in (("loss", removal.loss), ("score", removal.score), ("seconds", removal.seconds)):
            self._writer.add_scalar(name, value, removal.removal)

    def staged(self, stage: Stage) -> None:
        """The number of the stage, and one point for each measured value."""
        self._writer.add_scalar("stage", stage.number, self._removals)
        for name, value in stage.values.items():
            self._writer.add_scalar(f"measure/{name}", value, self._removals)

    def said(self, line: str) -> None:
        """Nothing: words are no scalars."""

    def finished(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _shares(self, shares: Mapping[str, float], step: int) -> None:
        for kind, share in shares.items():
            self._writer.add_scalar(f"share/{kind}", share, step)
