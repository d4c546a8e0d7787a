"""Progress displays: what bars on a terminal and lines in a file have in common."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress

Clock = Callable[[], float]

EVERY = 5.0
"""Seconds between plain lines."""

PER_SECOND = 4
"""How often a terminal is drawn anew."""

NARROW = 56
"""Characters of a terminal that has no room for a bar beside the words."""


class Estimate:
    """How far work has come on its way to ``total``, and how long it may still take at the pace so far.

    >>> estimate = Estimate(10, 20, now=0.0)
    >>> estimate.moved(12.5, now=50.0)
    >>> estimate.left(now=50.0), estimate.left(now=60.0)
    (150.0, 140.0)
    """

    def __init__(self, done: float, total: float, now: float) -> None:
        self.done, self.total = done, total
        self._from, self._began, self._moved = done, now, now

    def moved(self, done: float, now: float) -> None:
        """So much is done now."""
        self.done, self._moved = done, now

    def elapsed(self, now: float) -> float:
        """Seconds since this process took the work up."""
        return now - self._began

    def left(self, now: float) -> float | None:
        """Seconds still to go, None while nothing is known."""
        if self.done >= self.total:
            return 0.0
        pace = self.pace()
        return None if pace is None else max(0.0, pace * (self.total - self.done) - (now - self._moved))

    def pace(self) -> float | None:
        """Seconds for a whole one of what is counted, None while nothing is known."""
        return (self._moved - self._began) / (self.done - self._from) if self.done > self._from else None


class PlainDisplay:
    """Lines of words after the name of a command, on standard error if ``file`` is None."""

    def __init__(self, command: str, file: TextIO | None, clock: Clock) -> None:
        self._command, self._file, self._clock = command, sys.stderr if file is None else file, clock

    def said(self, line: str) -> None:
        """Print the line itself."""
        self._print(line)

    def finished(self) -> None:
        """Do nothing: every line is complete."""

    def _print(self, *words: str) -> None:
        self._file.write(" ".join((f"{self._command}:", *words)) + "\n")
        self._file.flush()


class BarDisplay:
    """Bars on a terminal, each with words after it that are cut off where the line ends."""

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic, refresh: bool = True) -> None:
        self._console = console or stderr_console()
        self._clock, self._refresh = clock, refresh
        self._progress: Progress | None = None

    def said(self, line: str) -> None:
        """Print the line above the bars."""
        self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def finished(self) -> None:
        """Leave the bars as they are and show the cursor again, even after Ctrl-C while they were being set up."""
        progress, self._progress = self._progress, None
        if progress is not None:
            self._leave(progress)

    def _leave(self, progress: Progress) -> None:
        with suppress(IndexError):
            progress.stop()
        self._console.show_cursor()

    def _create(self, words: Callable[[str], str], below: RenderableType | None = None) -> Progress:
        """A display without bars: ``words`` gives those after the bar of a task, by its description.

        They are never read as markup, since they hold names of models and folders. ``below`` is drawn under the bars.
        """
        from rich.progress import BarColumn, Progress, ProgressColumn, Task
        from rich.table import Column
        from rich.text import Text

        class Words(ProgressColumn):
            def render(self, task: Task) -> Text:
                return Text(words(task.description), no_wrap=True, overflow="ellipsis")

        class WithMoreBelow(Progress):
            def get_renderables(self) -> Iterator[RenderableType]:
                yield from super().get_renderables()
                if below is not None:
                    yield below

        width = self._console.width
        bar = BarColumn(
            20 if width >= 100 else 8, complete_style="cyan", finished_style="green", table_column=Column(no_wrap=True)
        )
        columns = [*([bar] if width >= NARROW else []), Words()]
        self._progress = WithMoreBelow(
            *columns,
            console=self._console,
            auto_refresh=self._refresh,
            refresh_per_second=PER_SECOND,
            get_time=self._clock,
        )
        return self._progress


def stderr_console() -> Console:
    """A console on standard error that reads no markup in names."""
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False, emoji=False)


def shows_bars(console: Console) -> bool:
    """Whether standard error is a terminal that can redraw lines."""
    return sys.stderr.isatty() and not console.is_dumb_terminal
