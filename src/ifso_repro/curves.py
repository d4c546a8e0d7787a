"""Fig. 5, 6, 7 and 8: results of a study as points, and accuracy against what the study changes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.errors import IfsoError
from ifso_repro.config import find_study, study
from ifso_repro.jobs import Job
from ifso_repro.plots import COLUMN, INK, LOOKS, MUTED, PAGE, Look, draw, empty, key, name
from ifso_repro.results import Result, read, read_file
from ifso_repro.schema import RECIPES
from ifso_repro.statistics import Runs, Spread, last_top1, otherwise
from ifso_repro.table_lines import NAMES, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NETWORKS = {"resnet32": "ResNet-32", "resnet50": "ResNet-50", "resnet56": "ResNet-56", "vgg16": "VGG-16"}
DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "imagenet": "ImageNet"}


@dataclass(frozen=True)
class Point:
    """Runs that differ by their seed only, at ``x``; none if it was ``not run``. ``paper``: what the paper reports."""

    x: float
    results: tuple[Result, ...]
    paper: float | None = None

    @property
    def top1(self) -> Spread:
        """Of the last epoch."""
        return last_top1(list(self.results))

    @property
    def seconds(self) -> Spread:
        """Of pruning."""
        return Spread.of([result.prune_seconds for result in self.results])


@dataclass(frozen=True)
class Series:
    """One line of a panel."""

    label: str
    points: tuple[Point, ...]

    @property
    def run(self) -> list[Point]:
        """The points that there are."""
        return [point for point in self.points if point.results]


@dataclass(frozen=True)
class Panel:
    """One network on one data set."""

    title: str
    series: tuple[Series, ...]

    @property
    def points(self) -> list[Point]:
        """Of all lines."""
        return [point for series in self.series for point in series.points]

    @property
    def run(self) -> list[Point]:
        """Those that there are."""
        return [point for point in self.points if point.results]

    @property
    def base(self) -> float | None:
        """Top-1 of the unpruned network."""
        tops = [result.base_top1 for point in self.points for result in point.results]
        return Spread.of(tops).mean if tops else None

    @property
    def missing(self) -> str:
        """How much was not run, in words; empty if all was."""
        left = len(self.points) - len(self.run)
        return f"{left} of {len(self.points)} points not run" if left else ""


@dataclass(frozen=True)
class Plot:
    """All that a figure of a study shows. ``changed`` are settings in which runs differ from what the study says."""

    name: str
    recipe: str
    panels: tuple[Panel, ...]
    changed: tuple[str, ...]
    smoke: bool = False

    @property
    def run(self) -> list[Point]:
        """The points of all panels that were run."""
        return [point for panel in self.panels for point in panel.run]

    @property
    def seeds(self) -> list[int]:
        """How many runs stand behind a point, each number once."""
        return sorted({len(point.results) for point in self.run})


def _incremental(job: Job) -> float:
    """Per cent of the way that goes step by step.

    >>> [_incremental(job) for job in study("figure7", seeds=1)]
    [0.0, 25.0, 50.0, 75.0, 100.0]
    """
    name = str(job.variant.options["schedule"])
    return 100.0 * float({"one-shot": "0", "incremental": "1"}.get(name, name.removeprefix("mixed:")))


PLACES: Mapping[str, tuple[Callable[[Job], float], Callable[[Job], str]]] = {
    "figure5": (lambda job: round(100 * job.row.removed, 6), lambda job: NAMES[job.criterion]),
    "figure6": (
        lambda job: job.variant.options["batches_per_score"],
        lambda job: f"{percent(job.row.removed)} of the MACs removed",
    ),
    "figure7": (_incremental, lambda job: NAMES[job.criterion]),
    "figure8": (
        lambda job: job.variant.options["accumulate"],
        lambda job: "only the k-th" if job.variant.options.get("accumulation") == "last" else "k scores added up",
    ),
}
"""For each figure, where the point of a job lies and to which line it belongs."""


def load(folder: Path, *, smoke: bool) -> Runs:
    """The results in ``folder``, or those of smoke runs instead."""
    if not smoke:
        return Runs(read(folder))
    return Runs(replace(read_file(path), smoke=False) for path in sorted((folder / "smoke").glob("*.json")))


def plot(
    name: str, runs: Runs, *, recipe: str | None = None, criteria: Sequence[str] | None = None, smoke: bool = False
) -> Plot:
    """The points of a figure; those of ``recipe`` if another than the study's is asked for."""
    jobs = study(name, seeds=1, criteria=criteria)
    chosen = recipe or jobs[0].recipe
    if chosen not in RECIPES:
        raise IfsoError(f"no recipe {chosen!r}; choose from {', '.join(RECIPES)}")
    jobs = [replace(job, recipe=chosen) for job in jobs if job.recipe == jobs[0].recipe]
    position, label = PLACES[name]
    panels: dict[str, dict[str, list[Point]]] = {}
    changed: set[str] = set()
    for job in jobs:  # as tables have them, as long as the recipe says; a smoke run has sizes of its own
        group = tuple(next(iter(runs.of(job)), []) if smoke else runs.whole(job))
        changed.update(otherwise(job, group[0]) if group and not smoke else ())
        lines = panels.setdefault(title(job), {})
        lines.setdefault(label(job), []).append(Point(position(job), group, _reported(job)))
    return Plot(name, chosen, tuple(map(_panel, panels, panels.values())), tuple(sorted(changed)), smoke)


def _panel(name: str, lines: Mapping[str, list[Point]]) -> Panel:
    ordered = {label: tuple(sorted(points, key=lambda point: point.x)) for label, points in lines.items()}
    return Panel(name, tuple(map(Series, ordered, ordered.values())))


def _reported(job: Job) -> float | None:
    """What the paper reports of a job: the last epoch where that is known, else the best."""
    line = job.variant.paper.get(job.row.name) if job.variant.label else job.row.paper.get(job.criterion)
    if line is None:
        return None
    return line.pruned if line.last is None else line.last


def title(job: Job) -> str:
    """Network and data.

    >>> title(study("figure7", seeds=1)[0])
    'ResNet-32, CIFAR-10'
    """
    network, _, data = job.row.task.rpartition("-")
    return f"{NETWORKS.get(network, network)}, {DATA.get(data, data)}"


TOP1 = "Top-1 (%)"
LABELS = {
    "figure5": "MACs removed (%)",
    "figure6": "batches of the proxy data",
    "figure7": "MACs removed incrementally (% of all removed)",
    "figure8": "scores k before a removal",
}
PAPER: Any = {
    "marker": "*", "markersize": 8, "linestyle": "none", "markeredgewidth": 0.9, "markerfacecolor": "white", "zorder": 5
}  # fmt: skip
SMOKE = "SMOKE RUN on a few generated images: this shows that drawing works, and its numbers mean nothing."


def draw_study(plot: Plot, stem: Path) -> tuple[Path, Path]:
    """The files of the figure of a study."""
    fill = {"figure7": _schedule, "figure8": _boxes}.get(plot.name, _lines)
    width = PAGE if len(plot.panels) > 1 else COLUMN
    height = {"figure5": 2.8, "figure6": 2.75, "figure7": 4.2, "figure8": 3.2}[plot.name]
    return draw(stem, find_study(plot.name).title, (width, height), lambda figure: fill(figure, plot))


def _notes(plot: Plot, spread: str = "bars: standard deviation over the runs") -> list[str]:
    """What the picture cannot show by itself."""
    counts = " or ".join(map(str, plot.seeds))
    several = f"s a point; {spread}" if max(plot.seeds, default=1) > 1 else " a point, so that no spread is known"
    notes = [f"Last epoch, recipe “{plot.recipe}”; {counts} run{several}."]
    if plot.changed:
        notes.append(f"Some runs differ from the study: {', '.join(plot.changed)}.")
    return [SMOKE, *notes] if plot.smoke else notes


def _lines(figure: Figure, plot: Plot) -> None:
    """A panel for each network, a line for each criterion or budget."""
    grid = figure.subplots(1, len(plot.panels), squeeze=False)[0]
    room = any(panel.missing and panel.run for panel in plot.panels)
    for axes, panel in zip(grid, plot.panels, strict=True):
        name(axes, panel.title, panel.missing if panel.run else "", room=room)
        axes.set_xlabel(LABELS[plot.name])
        _set_limits(axes, panel)
        if panel.run:
            _curves(axes, panel, plot)
        else:
            empty(axes, "not run")
    grid[0].set_ylabel(TOP1)
    key(figure, _handles(plot), _notes(plot), columns=4)


def _set_limits(axes: Axes, panel: Panel) -> None:
    """All points of a panel have their place, run or not."""
    positions = sorted({point.x for point in panel.points})
    margin = (positions[-1] - positions[0]) / 16 or 1.0
    axes.set_xlim(positions[0] - margin, positions[-1] + margin)
    axes.set_xticks(positions if len(positions) < 6 else positions[::2])


def _curves(axes: Axes, panel: Panel, plot: Plot) -> None:
    """Where points have bars the lines stand a little apart, so that none hides another."""
    apart = (panel.points[-1].x - panel.points[0].x) / 60 if max(plot.seeds) > 1 and len(panel.series) < 4 else 0.0
    for number, (look, series) in enumerate(zip(LOOKS, panel.series, strict=False)):
        shift = apart * (number - (len(panel.series) - 1) / 2)
        _curve(axes, look, series.points, [point.top1 if point.results else None for point in series.points], shift)
        if not plot.smoke:
            _paper(axes, look, series)
    _base(axes, panel)


def _curve(axes: Axes, look: Look, points: Sequence[Point], values: Sequence[Any], shift: float = 0.0) -> None:
    """Means with the standard deviation; the line is broken where a point was not run."""
    means = [math.nan if value is None else value.mean for value in values]
    bars = [(value.deviation or 0.0) if value else 0.0 for value in values]
    positions = [point.x + shift for point in points]
    axes.errorbar(positions, means, yerr=bars, capsize=2.2, elinewidth=0.9, **look.as_dict())


def _paper(axes: Axes, look: Look, series: Series) -> None:
    known = [(point.x, point.paper) for point in series.points if point.paper is not None and series.run]
    if known:
        axes.plot(*zip(*known, strict=True), color=look.color, **PAPER)


def _base(axes: Axes, panel: Panel) -> None:
    if panel.base is not None:
        axes.axhline(panel.base, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))


def _handles(plot: Plot, *, boxes: bool = False) -> list[Any]:
    """A line of the legend for each line of the panels, the unpruned network and the paper."""
    from matplotlib.lines import Line2D

    labels = dict.fromkeys(series.label for panel in plot.panels for series in panel.series)
    style = {"linestyle": "none"} if boxes else {}
    handles = [
        Line2D([], [], label=label, **{**look.as_dict(), **style}) for look, label in zip(LOOKS, labels, strict=False)
    ]
    if any(panel.run for panel in plot.panels):
        handles.append(Line2D([], [], color=INK, linewidth=0.8, linestyle=(0, (1, 2)), label="unpruned"))
    known = any(point.paper is not None for panel in plot.panels for s in panel.series if s.run for point in s.points)
    if known and not plot.smoke:
        handles.append(Line2D([], [], color=MUTED, label="the paper's number", **PAPER))
    return handles


def _schedule(figure: Figure, plot: Plot) -> None:
    """Accuracy above, seconds below, over the same axis."""
    panel = plot.panels[0]
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.25, 1))
    series, look = panel.series[0], LOOKS[0]
    name(above, panel.title, panel.missing, room=bool(panel.missing))
    _curve(above, look, series.points, [point.top1 if point.results else None for point in series.points])
    if not plot.smoke:
        _paper(above, look, series)
    _base(above, panel)
    times = [point.seconds if point.results else None for point in series.points]
    _curve(below, LOOKS[1], series.points, times)
    below.set_ylim(bottom=0)
    above.set_ylabel(TOP1)
    below.set_ylabel("seconds of pruning")
    below.set_xlabel(LABELS[plot.name])
    below.set_xticks([point.x for point in series.points])
    machines = sorted({result.hardware for point in panel.run for result in point.results})
    key(figure, _handles(plot), [*_notes(plot), f"Timed on {', '.join(machines)}."], columns=3)


def _boxes(figure: Figure, plot: Plot) -> None:
    """Every run as a dot; a box from the first to the third quartile where there are three or more."""
    panel, axes = plot.panels[0], figure.subplots()
    name(axes, panel.title, panel.missing, room=bool(panel.missing))
    positions = sorted({point.x for point in panel.points})
    shares = Counter(point.x for point in panel.points)
    for number, (look, series) in enumerate(zip(LOOKS, panel.series, strict=False)):
        for point in series.run:
            shift = 0.36 * (number - (len(panel.series) - 1) / 2) if shares[point.x] > 1 else 0.0
            _box(axes, look, positions.index(point.x) + shift, [result.last_top1 for result in point.results])
    axes.set_xticks(range(len(positions)), [f"{position:g}" for position in positions])
    axes.set_xlim(-0.6, len(positions) - 0.4)
    axes.set_xlabel(LABELS[plot.name])
    axes.set_ylabel(TOP1)
    axes.grid(visible=False, axis="x")
    _base(axes, panel)
    words = "large markers: mean, dots: runs, boxes: quartiles where there are three or more"
    key(figure, _handles(plot, boxes=True), _notes(plot, words), columns=2)


def _box(axes: Axes, look: Look, position: float, values: list[float]) -> None:
    line = {"color": look.color, "linewidth": 0.9}
    if len(values) > 2:
        axes.boxplot(
            values, positions=[position], widths=0.28, showfliers=False, manage_ticks=False, medianprops=line,
            boxprops=line, whiskerprops=line, capprops=line,
        )  # fmt: skip
    axes.plot([position] * len(values), values, linestyle="none", marker=".", markersize=3, color=look.color)
    axes.plot(position, sum(values) / len(values), **{**look.as_dict(), "linestyle": "none"})
