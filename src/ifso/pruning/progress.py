"""The progress of a pruning run: bars on a terminal or in a notebook, also one for each layer, elsewhere lines."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TextIO, cast

from ifso.common.progress import EVERY, PER_SECOND, BarDisplay, Clock, PlainDisplay, shows_bars, stderr_console
from ifso.common.text import duration, joined_error, loss_words, measured, roughly
from ifso.errors import BudgetError
from ifso.pruning.events import Course, Listener, Plan, Removal, Silent, Stage

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.progress import Progress
    from rich.text import Text

LABELS = {"macs": "MACs", "conv_macs": "conv MACs", "params": "parameters"}
REQUIRED = ("started", "removed", "said", "finished")
"""Methods that every listener must have."""

MOST, AROUND = 24, 5
"""Bars at a time, however tall the terminal is, and lines of it that are left to other things."""

BAR, NAME, NUMBERS, CURVE = 30, 36, 17, 48
"""Characters of a bar, a name and a curve, at most; characters of the numbers after a bar."""

EIGHTHS, LEVELS = " ▏▎▍▌▋▊▉█", "▁▂▃▄▅▆▇█"


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
    Below it, for a run that writes a folder, what is left of every layer (:class:`Layers`).
    """

    def started(self, plan: Plan) -> None:
        """Show the bar."""
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


def unit_words(units: Mapping[str, Sequence[int]]) -> str:
    """The first of the units by its group and place, and how many more there are.

    >>> unit_words({"layer1.0.conv1": (3,)}), unit_words({"a": (0, 4), "b": (2,)})
    ('layer1.0.conv1[3]', 'a[0] +2')
    """
    places = [f"{group}[{place}]" for group, group_places in units.items() for place in group_places]
    return (places[0] if places else "none") + (f" +{len(places) - 1}" if len(places) > 1 else "")


@dataclass
class Bar:
    """A group of units: a layer, or several that must lose the same channels (``others`` beside the first)."""

    name: str
    size: int
    kept: int
    others: int = 0

    @property
    def share(self) -> float:
        """The share of its channels that is left."""
        return self.kept / self.size

    def line(self, label: int, length: int, *, plain: bool) -> Text:
        """The end of its name, a bar of ``length``, channels left of how many, and how many layers share them."""
        from rich.text import Text

        name = self.name.ljust(label) if len(self.name) <= label else f"…{self.name[len(self.name) - label + 1 :]}"
        if plain:
            left, empty = "#" * round(self.share * length), "."
        else:
            full, part = divmod(round(self.share * length * 8), 8)
            left, empty = "█" * full + (EIGHTHS[part] if part else ""), "·"
        gone, coupled = empty * (length - len(left)), f"  as in {self.others} more" if self.others else ""
        numbers = f" {self.kept:>5}/{self.size:<5}{self.share:>4.0%}"
        parts = f"{name} ", (left, "cyan"), (gone, "dim"), numbers, (coupled, "dim")
        return Text.assemble(*parts, no_wrap=True, overflow="crop")


class Layers:
    """The bars, for a Rich console of any size."""

    def __init__(self, bars: Sequence[Bar]) -> None:
        self._bars, self._losses = {bar.name: bar for bar in bars}, list[float]()

    @classmethod
    def of(cls, plan: Plan) -> Layers | None:
        """The layers of a run that begins or goes on; None if its folder does not describe them."""
        from ifso.common.serialization import read_lines
        from ifso.runs.files import METRICS, STRUCTURE, read_object
        from ifso.runs.structure import from_document
        from ifso.runs.values import mapping, number, wholes

        if plan.folder is None or not (Path(plan.folder) / STRUCTURE).is_file():
            return None

        structure = from_document(read_object(Path(plan.folder) / STRUCTURE) or {}, {})
        writers = [group for layer in structure.layers for group in layer.groups]
        others = [max(writers.count(index) - 1, 0) for index in range(len(structure.groups))]
        layers = cls(
            [Bar(each.name, each.size, each.size, n) for each, n in zip(structure.groups, others, strict=True)]
        )
        for line in read_lines(Path(plan.folder) / METRICS)[0][: plan.removals] if plan.removals else ():
            units = {name: wholes(indices) for name, indices in mapping(line.get("units")).items()}
            layers._count({name: len(indices) for name, indices in units.items()}, number(line.get("loss")) or math.nan)
        return layers if structure.groups else None

    def removed(self, removal: Removal) -> None:
        """Shorten the bars of the units that went."""
        self._count({name: len(indices) for name, indices in removal.units.items()}, removal.loss)

    def _count(self, gone: dict[str, int], loss: float) -> None:
        for name in gone.keys() & self._bars.keys():
            self._bars[name].kept -= gone[name]
        self._losses += [loss] if math.isfinite(loss) else []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Most changed ones in the order of the network, then a line about the others, then the loss."""
        from rich.text import Text

        width, plain = options.max_width, options.ascii_only
        room, bars = min(MOST, (options.height or console.height) - AROUND), list(self._bars.values())
        shown = most_changed(bars, room if len(bars) <= room else room - 1) if room > 1 else []
        label = min(NAME, max((len(bar.name) for bar in shown), default=0), max(8, (width - NUMBERS) // 2))
        for bar in shown:
            yield bar.line(label, max(4, min(BAR, width - label - NUMBERS)), plain=plain)
        names = {bar.name for bar in shown}
        if hidden := [bar for bar in bars if bar.name not in names]:
            share = sum(bar.kept for bar in hidden) / sum(bar.size for bar in hidden)
            words = f"{len(hidden)} {'others, less changed' if shown else 'groups of layers'}"
            yield Text(f"{words}: {share:.0%} of their channels left", "dim", no_wrap=True, overflow="ellipsis")
        first, last = map(loss_words, (self._losses[0], self._losses[-1]) if self._losses else (math.nan, math.nan))
        words = f"loss {first} at first, {last} now"
        curve = "" if plain else sparkline(self._losses, min(CURVE, width - len(words) - 1))
        yield Text(f"{words} {curve}".rstrip(), no_wrap=True, overflow="ellipsis")


def most_changed(bars: Sequence[Bar], most: int) -> list[Bar]:
    """Those that lost the largest share, in the order of the network.

    >>> bars = [Bar("a", 8, 8), Bar("b", 8, 2), Bar("c", 8, 7)]
    >>> [bar.name for bar in most_changed(bars, 2)]
    ['b', 'c']
    """
    chosen = sorted(range(len(bars)), key=lambda index: (bars[index].share, index))[: max(most, 0)]
    return [bars[index] for index in sorted(chosen)]


def sparkline(values: Sequence[float], width: int) -> str:
    """At most ``width`` means of neighbours as characters, from the lowest to the highest; none of a single value.

    >>> sparkline([1.0, 2.0, 3.0, 8.0], 4), sparkline([1.0, 2.0, 3.0, 9.0], 2), sparkline([1.0], 4)
    ('▁▂▃█', '▁█', '')
    """
    size = math.ceil(len(values) / width) if width > 0 else 0
    means = [fmean(values[start : start + size]) for start in range(0, len(values), size)] if size else []
    low, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0) or 1.0
    levels = [LEVELS[round((mean - low) / span * (len(LEVELS) - 1))] for mean in means]
    return "".join(levels) if len(levels) > 1 else ""
