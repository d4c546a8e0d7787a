"""The progress of a pruning run: a bar on a terminal or in a notebook, plain lines on standard error anywhere else."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from ifso.common.progress import (
    EVERY,
    PER_SECOND,
    BarDisplay,
    Clock,
    PlainDisplay,
    duration,
    loss_words,
    roughly,
    shows_bars,
    stderr_console,
)
from ifso.errors import BudgetError
from ifso.pruning.course import Course, unit_words
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
        values = [f"{name}={value:.4g}" for name, value in stage.values.items()]
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
        self._values: Mapping[str, float] = {}
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
        self._shares, self._values = stage.shares, stage.values or self._values
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
            values = [f"{name} {value:.4g}" for name, value in self._values.items()]
            words = [course.stage_words, *costs, left, *values, elapsed]
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


def several(listeners: Sequence[Listener]) -> Listener:
    """One listener that passes everything on to all of ``listeners``, in their order."""
    return listeners[0] if len(listeners) == 1 else cast("Listener", _Several(listeners))


@contextmanager
def progress(*others: Listener) -> Iterator[Listener]:
    """The display that fits (see :func:`display`) and ``others`` as one listener, finished at the end in any case."""
    listener = several([display(), *others])
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
    return several(listeners or [Silent()])


def display() -> Listener:
    """A bar if standard error is a terminal or this is a notebook, lines otherwise; nothing without standard error."""
    if sys.stderr is None:
        return Silent()
    console = stderr_console()
    if console.is_jupyter:
        return NotebookProgress(console)
    return RichProgress(console) if shows_bars(console) else PlainProgress()
