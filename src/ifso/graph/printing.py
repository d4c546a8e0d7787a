"""A channel graph as tables a person can read; ``print(graph)`` and ``ifso inspect`` share them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table

if TYPE_CHECKING:
    from ifso.graph.channel_graph import ChannelGraph, Frozen, Group

WIDTH = 120


@dataclass(frozen=True)
class Column:
    """One more column for the table of groups: its heading and what it says of a group."""

    heading: str
    value: Callable[[Group], str]


@dataclass(frozen=True)
class FrozenReason:
    """Everything that is frozen for the same reason; ``*`` stands for numbers in which the reasons differ."""

    reason: str
    axes: tuple[Frozen, ...]

    @property
    def slices(self) -> int:
        """How many channels (slices along an axis) are frozen."""
        return sum(len(axis.index) for axis in self.axes)


def layers(group: Group, role: str) -> list[str]:
    """The modules that take part in the group in that role (``produces``, ``consumes``, ``follows``), in order."""
    owners = (
        member.parameter.rpartition(".")[0] or member.parameter for member in group.members if member.role == role
    )
    return list(dict.fromkeys(owners))


def by_reason(graph: ChannelGraph) -> list[FrozenReason]:
    """The frozen axes gathered by reason, the most frequent first."""
    alike = defaultdict(list)
    for frozen in graph.frozen:
        alike[re.sub(r"\d+", "*", frozen.reason)].append(frozen)
    reasons = [FrozenReason(_common(pattern, axes), tuple(axes)) for pattern, axes in alike.items()]
    return sorted(reasons, key=lambda item: -len(item.axes))


def _common(pattern: str, axes: list[Frozen]) -> str:
    reasons = {axis.reason for axis in axes}
    return reasons.pop() if len(reasons) == 1 else pattern


def shorten(names: Iterable[str], limit: int = 1) -> str:
    """The first ``limit`` names and how many more there are.

    >>> shorten(["conv1", "layer1.0.conv2", "layer1.1.conv2"])
    'conv1 +2'
    """
    names = list(names)
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" +{more}" if more > 0 else "")


def groups_table(graph: ChannelGraph, extra: Iterable[Column] = (), caption: str | None = None) -> Table:
    """One row per group: name, units, the layers that produce and read the units, ``extra`` columns, flags."""
    extra = list(extra)
    table = Table(title=_headline(graph), caption=caption, title_justify="left", caption_justify="left")
    table.add_column("group", overflow="fold")
    table.add_column("units", justify="right")
    table.add_column("produced by", overflow="fold")
    table.add_column("read by", overflow="fold")
    for column in extra:
        table.add_column(column.heading, justify="right")
    table.add_column("flags", overflow="fold")
    for group in graph.groups:
        coupled = (shorten(layers(group, "produces")), shorten(layers(group, "consumes")))
        values = (column.value(group) for column in extra)
        table.add_row(group.name, str(group.size), *coupled, *values, ", ".join(sorted(group.flags)))
    return table


def frozen_table(graph: ChannelGraph) -> Table:
    """One row per reason: how many parameter axes and channels it freezes, and where."""
    table = Table(title="frozen: what cannot be pruned, and why", title_justify="left")
    table.add_column("reason", overflow="fold")
    table.add_column("axes", justify="right")
    table.add_column("channels", justify="right")
    table.add_column("parameters", overflow="fold")
    for item in by_reason(graph):
        names = list(dict.fromkeys(axis.parameter for axis in item.axes))
        table.add_row(item.reason, str(len(item.axes)), str(item.slices), shorten(names, limit=2))
    return table


def tables(graph: ChannelGraph) -> list[RenderableType]:
    """The groups, then what is frozen, then notes: all that is known of the graph."""
    return [groups_table(graph), *details(graph)]


def details(graph: ChannelGraph) -> list[RenderableType]:
    """What follows the table of groups: what is frozen, and notes."""
    return [*([frozen_table(graph)] if graph.frozen else []), *(f"note: {note}" for note in graph.notes)]


def render(graph: ChannelGraph) -> str:
    """The tables as plain text, ``WIDTH`` characters wide."""
    file = StringIO()
    console = Console(file=file, width=WIDTH, color_system=None, highlight=False, markup=False)
    console.print(*tables(graph), sep="\n")
    return file.getvalue().rstrip("\n")


def _headline(graph: ChannelGraph) -> str:
    flags = Counter(flag for group in graph.groups for flag in group.flags)
    flagged = f", flagged: {', '.join(f'{flag} ({count})' for flag, count in sorted(flags.items()))}" if flags else ""
    return f"groups: {len(graph.groups)}, units: {graph.num_units}{flagged}"
