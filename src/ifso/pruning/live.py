"""What is left of every layer while a run goes on: bars below the line of progress, and the loss as a curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from ifso.common.serialization import read_lines
from ifso.common.text import loss_words
from ifso.pruning.events import Plan, Removal
from ifso.runs.files import METRICS, STRUCTURE, read_object

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

MOST, AROUND = 24, 5
"""Bars at a time, however tall the terminal is, and lines of it that are left to other things."""

BAR, NAME, NUMBERS, CURVE = 30, 36, 17, 48
"""Characters of a bar, a name and a curve, at most; characters of the numbers after a bar."""

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
        if plan.folder is None or not (Path(plan.folder) / STRUCTURE).is_file():
            return None
        from ifso.runs.structure import from_document
        from ifso.runs.values import mapping, number, wholes

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
