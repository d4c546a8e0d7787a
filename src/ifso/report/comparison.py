"""What a page says of several runs together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from ifso.report.results import STAGES, Quality, costs_in_words, quality
from ifso.report.sections import Table, duration, flattened, status
from ifso.runs.record import RunRecord


@dataclass(frozen=True)
class Alike:
    """Runs of one criterion and budget: the quality of each in the end, by the number of the run."""

    name: str
    values: dict[int, float]

    @property
    def row(self) -> tuple[str, int, float, float | None]:
        """Name, number of runs, mean, and standard deviation if there are several."""
        values = list(self.values.values())
        return self.name, len(values), fmean(values), stdev(values) if len(values) > 1 else None


@dataclass(frozen=True)
class Comparison:
    """Runs with the names they have on the page."""

    runs: Sequence[RunRecord]
    names: Sequence[str]

    @property
    def qualities(self) -> list[Quality]:
        """Of each run."""
        return [quality(run) for run in self.runs]

    @property
    def label(self) -> str:
        """What was measured."""
        return " or ".join(dict.fromkeys(each.name for each in self.qualities if each.name)) or "accuracy"

    @property
    def is_fair(self) -> bool:
        """Whether all are of one network, one data set and one measure, as far as something was measured."""
        pairs = zip(self.runs, self.qualities, strict=True)
        return len({(run.model, run.data, each.name) for run, each in pairs if each.by_stage}) <= 1

    @property
    def has_same_layers(self) -> bool:
        """Whether all networks had the same layers."""
        layers = [[(layer.name, layer.channels) for layer in run.structure.layers] for run in self.runs]
        return bool(layers[0]) and all(each == layers[0] for each in layers)

    @property
    def groups(self) -> list[Alike]:
        """Runs of the same criterion and budget together, in order."""
        budgets = [costs_in_words(run.targets, 0) for run in self.runs]
        groups: dict[str, dict[int, float]] = {}
        for place, (run, each, budget) in enumerate(zip(self.runs, self.qualities, budgets, strict=True)):
            if each.last is not None:
                name = f"{run.criterion}, {budget}" if len(set(budgets)) > 1 and budget else run.criterion
                groups.setdefault(name, {})[place] = each.last
        return [Alike(name, values) for name, values in groups.items()]

    @property
    def table(self) -> Table:
        """A row for each run."""
        stages = [stage for stage in STAGES if any(stage in each.by_stage for each in self.qualities)]
        costs = {"macs": "MACs kept", "params": "parameters kept", "activations": "activations kept"}
        columns = [("run", "text"), ("criterion", "text"), *((name, "share") for name in costs.values()),
                   *((stage, "text") for stage in stages), ("time", "text"), ("state", "text")]  # fmt: skip
        rows = []
        for run, name, each in zip(self.runs, self.names, self.qualities, strict=True):
            worth = (each.shown(stage) if stage in each.by_stage else None for stage in stages)
            time = None if run.seconds is None else duration(run.seconds)
            rows.append((name, run.criterion, *map(run.shares.get, costs), *worth, time, status(run)))
        return Table(columns, rows)

    @property
    def differing(self) -> list[tuple[Any, ...]]:
        """The settings in which the runs differ, with their values."""
        settings = [dict(flattened(run.settings)) for run in self.runs]
        names = dict.fromkeys(name for each in settings for name in each)
        rows = [(name, *(each.get(name, "–") for each in settings)) for name in names]
        return [row for row in rows if len(set(row[1:])) > 1]
