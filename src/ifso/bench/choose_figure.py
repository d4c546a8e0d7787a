"""What methods leave of networks without training: top-1 against MACs removed, a panel for each network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.common.plots import COLUMN, INK, LOOKS, MUTED, PAGE, PURPLE, SKY, VERMILION, Look, draw, key, name, plain
from ifso.errors import IfsoError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ifso.bench.choose_record import Record

MORE = (
    Look(SKY, "P", "-"),
    Look(INK, "X", (0, (5, 1.5))),
    Look(VERMILION, "<", (0, (1, 1))),
    Look(PURPLE, ">", "-"),
    Look(MUTED, "h", "-"),
)
"""Beside those of the paper's figures, because there are more lines."""

TITLE = "Top-1 without training"


def draw_choices(records: Sequence[Record], stem: Path) -> tuple[Path, Path]:
    """``stem.svg`` and ``stem.png``; a method looks the same in all panels."""
    for record in records:
        if not any("top1" in row for row in record.rows):
            raise IfsoError(f"{record.path} has no row to draw; run ifso bench choose --json {record.path} first")
    found = dict.fromkeys(row["method"] for record in records for row in record.rows if "top1" in row)
    methods = sorted(found, key=lambda method: method != "default")
    looks = dict(zip(methods, cycle((*LOOKS, *MORE)), strict=False))
    width = COLUMN if len(records) == 1 else PAGE
    return draw(stem, TITLE, (width, 3.4), lambda figure: _fill(figure, records, looks))


def _fill(figure: Figure, records: Sequence[Record], looks: dict[str, Look]) -> None:
    grid = figure.subplots(1, len(records), squeeze=False)[0]
    for axes, record in zip(grid, records, strict=True):
        _panel(axes, record, looks)
    grid[0].set_ylabel("Top-1 (%)")
    key(figure, _handles(looks), _notes(records), columns=2 if len(records) == 1 else 4)


def _panel(axes: Axes, record: Record, looks: dict[str, Look]) -> None:
    name(axes, plain(str(record.settings["model"]).rpartition(":")[2]), room=False)
    axes.set_xlabel("MACs removed (%)")
    for method, look in looks.items():
        rows = [row for row in record.rows if row["method"] == method and "top1" in row]
        points = sorted((100 * (1 - row["macs"]), row["top1"]) for row in rows)
        if points:
            axes.plot(*zip(*points, strict=True), **look.as_dict())
    axes.set_xlim(left=0)
    if record.unpruned is not None:
        axes.axhline(record.unpruned["top1"], color=INK, linewidth=0.8, linestyle=(0, (1, 2)))


def _handles(looks: dict[str, Look]) -> list[Any]:
    from matplotlib.lines import Line2D

    found = [Line2D([], [], label=plain(method), **look.as_dict()) for method, look in looks.items()]
    return [*found, Line2D([], [], color=INK, linewidth=0.8, linestyle=(0, (1, 2)), label="unpruned")]


def _notes(records: Sequence[Record]) -> list[str]:
    """How many images, where, and with which versions; once where all are alike."""
    told = [
        f"No training; {record.settings['calibration']} images to calibrate, {record.settings['measured']} to measure; "
        f"{record.about['device_name']}, torch {record.about['torch']}."
        for record in records
    ]
    return list(dict.fromkeys(told))
