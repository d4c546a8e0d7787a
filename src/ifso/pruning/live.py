"""What is left of every layer while a run goes on: bars below the line of progress, and the loss as a curve."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ifso.common.serialization import parsed, read_lines
from ifso.pruning.course import loss_words
from ifso.pruning.events import Plan, Removal
from ifso.runs.folder import METRICS, STRUCTURE

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

MOST = 24
"""Bars at a time, however tall the terminal is."""

AROUND = 5
"""Lines of the terminal that are left to other things."""

BAR, NAME, NUMBERS = 30, 36, 17
"""Characters of a bar and of a name, at most; characters of the numbers after them."""

EIGHTHS, LEVELS = " ▏▎▍▌▋▊▉█", "▁▂▃▄▅▆▇█"


@dataclass
class Bar:
    """A group of units: a layer, or several that must lose the same channels (``others`` beside the first)."""

    name: str
    size: int
    kept: int
    others: int = 0

    @property
    def share(self) -> float:
        """What is left of it."""
        return self.kept / self.size


class Curve:
    """A row of numbers with room for ``width``: when it is full, neighbours become their mean.

    >>> curve = Curve(4)
    >>> for value in (1.0, 3.0, 5.0, 7.0, 9.0):
    ...     curve.add(value)
    >>> curve.values, curve.first, curve.last
    ([2.0, 6.0], 1.0, 9.0)
    """

    def __init__(self, width: int = 48) -> None:
        self.values: list[float] = []
        self.first = self.last = math.nan
        self._width, self._each = width, 1
        self._waiting: list[float] = []

    def add(self, value: float) -> None:
        """One more; what is no number leaves no mark."""
        if not math.isfinite(value):
            return
        self.first = value if math.isnan(self.first) else self.first
        self.last = value
        self._waiting.append(value)
        if len(self._waiting) < self._each:
            return
        self.values.append(sum(self._waiting) / len(self._waiting))
        self._waiting = []
        if len(self.values) >= self._width:
            pairs = zip(self.values[::2], self.values[1::2], strict=False)
            self.values, self._each = [(one + two) / 2 for one, two in pairs], 2 * self._each

    def drawn(self, *, plain: bool = False) -> str:
        """As characters, from the lowest to the highest value; none where only ASCII can be shown."""
        values = tuple(self.values)
        if plain or len(values) < 2:
            return ""
        low, high = min(values), max(values)
        span = high - low or 1.0
        return "".join(LEVELS[round((value - low) / span * (len(LEVELS) - 1))] for value in values)


class Layers:
    """The bars, for a Rich console of any size."""

    def __init__(self, bars: Sequence[Bar]) -> None:
        self._bars = {bar.name: bar for bar in bars}
        self._loss = Curve()

    @classmethod
    def of(cls, plan: Plan) -> Layers | None:
        """Of a run that begins or goes on; None if it has no folder that tells of its layers."""
        if plan.folder is None or not (Path(plan.folder) / STRUCTURE).is_file():
            return None
        from ifso.runs.structure import from_document
        from ifso.runs.values import mapping, number, wholes

        document = parsed((Path(plan.folder) / STRUCTURE).read_bytes())
        structure = from_document(document or {}, {})
        writers = [number for layer in structure.layers for number in layer.groups]
        bars = [
            Bar(group.name, group.size, group.size, max(writers.count(place) - 1, 0))
            for place, group in enumerate(structure.groups)
        ]
        layers = cls(bars)
        for line in read_lines(Path(plan.folder) / METRICS)[0][: plan.removals] if plan.removals else ():
            units = {name: wholes(places) for name, places in mapping(line.get("units")).items()}
            layers.count(units, number(line.get("loss")) or math.nan)
        return layers if bars else None

    def removed(self, removal: Removal) -> None:
        """Units went."""
        self.count(removal.units, removal.loss)

    def count(self, units: Mapping[str, Sequence[int]], loss: float) -> None:
        """So many units fewer in these groups, at that loss."""
        for name, places in units.items():
            if name in self._bars:
                self._bars[name].kept -= len(places)
        self._loss.add(loss)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Most changed ones in the order of the network, then a line about the others, then the loss."""
        room = min(MOST, (options.height or console.height) - AROUND)
        bars = list(self._bars.values())
        shown = most_changed(bars, room if len(bars) <= room else room - 1) if room > 1 else []
        yield from lines(shown, options.max_width, plain=options.ascii_only)
        hidden = [bar for bar in bars if not any(bar is other for other in shown)]
        if hidden:
            yield _text(_about(hidden, bool(shown)), "dim")
        yield _text(self._loss_words(options))

    def _loss_words(self, options: ConsoleOptions) -> str:
        numbers = f"loss {loss_words(self._loss.first)} at first, {loss_words(self._loss.last)} now"
        room = options.max_width - len(numbers) - 1
        return f"{numbers} {self._loss.drawn(plain=options.ascii_only)[-room:]}".rstrip() if room > 0 else numbers


def most_changed(bars: Sequence[Bar], most: int) -> list[Bar]:
    """Those that lost the largest share, in the order of the network.

    >>> bars = [Bar("a", 8, 8), Bar("b", 8, 2), Bar("c", 8, 7)]
    >>> [bar.name for bar in most_changed(bars, 2)]
    ['b', 'c']
    """
    chosen = sorted(range(len(bars)), key=lambda place: (bars[place].share, place))[: max(most, 0)]
    return [bars[place] for place in sorted(chosen)]


def lines(bars: Sequence[Bar], width: int, *, plain: bool) -> Iterable[Text]:
    """A line for each: name, bar, channels left of how many, and in how many more layers the same ones go."""
    from rich.text import Text

    label = min(NAME, max((len(bar.name) for bar in bars), default=0), max(8, (width - NUMBERS) // 2))
    length = max(4, min(BAR, width - label - NUMBERS))
    for bar in bars:
        left, gone = _blocks(bar.share, length, plain=plain)
        numbers = f" {bar.kept:>5}/{bar.size:<5}{bar.share:>4.0%}"
        coupled = f"  as in {bar.others} more" if bar.others else ""
        yield Text.assemble(
            f"{_fitted(bar.name, label)} ", (left, "cyan"), (gone, "dim"), numbers, (coupled, "dim"), no_wrap=True,
            overflow="crop",
        )  # fmt: skip


def _about(hidden: Sequence[Bar], some: bool) -> str:
    share = sum(bar.kept for bar in hidden) / sum(bar.size for bar in hidden)
    words = "others, less changed" if some else "groups of layers"
    return f"{len(hidden)} {words}: {share:.0%} of their channels left"


def _fitted(name: str, width: int) -> str:
    """The end of a name tells more than its beginning.

    >>> _fitted("layer4.2.conv1", 9), _fitted("fc", 4)
    ('….2.conv1', 'fc  ')
    """
    return name.ljust(width) if len(name) <= width else "…" + name[len(name) - width + 1 :]


def _blocks(share: float, length: int, *, plain: bool) -> tuple[str, str]:
    """What is left and what is gone, as characters.

    >>> _blocks(0.5, 5, plain=False), _blocks(0.5, 4, plain=True)
    (('██▌', '··'), ('##', '..'))
    """
    if plain:
        full = round(share * length)
        return "#" * full, "." * (length - full)
    full, part = divmod(round(share * length * 8), 8)
    solid = "█" * full + (EIGHTHS[part] if part else "")
    return solid, "·" * (length - len(solid))


def _text(words: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(words, style=style, no_wrap=True, overflow="ellipsis")
