"""The results of a study as points of a picture: which panel, which line, where, and what was not run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ifso.errors import IfsoError
from ifso_repro.config import study
from ifso_repro.jobs import MIXED, Job
from ifso_repro.results import Result, read, read_file
from ifso_repro.schema import RECIPES
from ifso_repro.statistics import Runs, Spread, last_top1, otherwise
from ifso_repro.table_lines import NAMES, percent

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
    return 100.0 * float({"one-shot": "0", "incremental": "1"}.get(name, name.removeprefix(MIXED)))


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
