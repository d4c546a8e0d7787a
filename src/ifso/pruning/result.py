"""What ``ifso.prune`` gives back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ifso.costs.counting import Cost
from ifso.graph.channel_graph import ChannelGraph
from ifso.pruning.afterwards import Measure
from ifso.pruning.checking import Check
from ifso.pruning.folder import NETWORKS, STRUCTURE, RunFolder
from ifso.pruning.structure import structure_of
from ifso.surgery.recipe import Recipe

UNDONE = " (undone)"
"""How the name of a measure ends that was taken of a network which is no more."""
LABELS = {
    "macs": "MACs",
    "conv_macs": "MACs of convolutions",
    "params": "parameters",
    "activations": "activations",
    "latency": "latency (model)",
}


@dataclass(frozen=True)
class Network:
    """The network at one budget of several: what it keeps, what it is worth, and where it is.

    ``folder`` is what :func:`ifso.load` takes, None for a run without a folder; then ``model`` is the network itself.
    """

    targets: Mapping[str, float]
    shares: Mapping[str, float]
    values: Mapping[str, float]
    folder: Path | None = None
    model: nn.Module | None = field(default=None, repr=False)


def networks_of(
    stages: Iterable[Mapping[str, Any]], folder: Path | None, measures: Sequence[Measure], shares: Mapping[str, float]
) -> tuple[Network, ...]:
    """The networks for the budgets that stages have reached; the last is the one in ``folder`` itself.

    It is worth what the last measure says that was not undone, and keeps ``shares``.
    """
    reached = [stage for stage in stages if "budget" in stage]
    found = [
        Network(
            stage["budget"],
            stage["shares"],
            stage["values"],
            None if folder is None else folder / NETWORKS / stage["network"],
        )
        for stage in reached
    ]
    if found and dict(found[-1].shares) == dict(shares):
        values = next(one.values for one in reversed(measures) if not one.stage.endswith(UNDONE))
        found[-1] = replace(found[-1], values=values, folder=folder)
    return tuple(found)


@dataclass(frozen=True)
class PruneResult:
    """The end of a pruning run.

    ``model`` is the smaller network, ``graph`` that of the network before the run and ``keep`` what is left of its
    units. ``shares`` are the shares kept of every cost, ``targets`` those asked for. ``measures`` say what the network
    was worth after each stage, ``checks`` what was verified, ``scores`` the last ones before normalisation.
    ``timings`` are seconds by part of the run, ``notes`` what went otherwise than expected.

    Of a staged run, ``stages`` has one entry for each stage: ``stage`` (its number), ``units`` (how many went in it),
    ``shares`` (left of every cost), ``values`` (measured after it, perhaps none) and ``seconds`` (since the run began).
    ``floors`` names the groups that kept no more units than they must.
    """

    model: nn.Module
    graph: ChannelGraph = field(repr=False)
    keep: Mapping[str, Tensor] = field(repr=False)
    recipe: Recipe = field(repr=False)
    before: Cost
    after: Cost
    targets: Mapping[str, float]
    shares: Mapping[str, float]
    removals: int
    seconds: float
    timings: Mapping[str, float] = field(repr=False)
    checks: tuple[Check, ...] = field(repr=False)
    measures: tuple[Measure, ...] = field(repr=False)
    notes: tuple[str, ...] = ()
    latency: Mapping[str, Any] | None = None
    scores: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    metrics: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    folder: Path | None = None
    networks: tuple[Network, ...] = field(default=(), repr=False)
    stages: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    floors: tuple[str, ...] = field(default=(), repr=False)

    @property
    def removed_units(self) -> int:
        """Units that are gone."""
        return sum(int((~kept).sum()) for kept in self.keep.values())

    @property
    def below_target(self) -> float:
        """By how much less is kept than was asked for, of the budget that was hardest to meet; a share."""
        return min(target - self.shares[kind] for kind, target in self.targets.items())

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write a run folder: recipe and weights, for :func:`ifso.load`, and what else is known of the run."""
        path = Path(folder)
        if self.folder is not None and path.resolve() == self.folder.resolve():
            return path
        with RunFolder.create(path, self.config) as run:
            for line in self.metrics:
                run.append(line)
            run.write_json(STRUCTURE, structure_of(self.graph))
            run.write_scores(self.scores)
            run.write_model(self.model, self.recipe)
            run.finish(self.summary())
        return path

    def summary(self) -> dict[str, Any]:
        """Everything but tensors, as plain JSON values."""
        return {
            "model": type(self.model).__name__,
            "targets": dict(self.targets),
            "shares": dict(self.shares),
            "below_target": self.below_target,
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
            "latency": None if self.latency is None else dict(self.latency),
            "units": self.graph.num_units,
            "removed_units": self.removed_units,
            "removals": self.removals,
            "kept": {name: [int(kept.sum()), kept.numel()] for name, kept in self.keep.items()},
            "measures": [{"stage": measure.stage, **measure.values} for measure in self.measures],
            "stages": [
                {**stage, "shares": dict(stage["shares"]), "values": dict(stage["values"])} for stage in self.stages
            ],
            "floors": list(self.floors),
            "checks": [vars(check) for check in self.checks],
            "seconds": self.seconds,
            "timings": dict(self.timings),
            "notes": list(self.notes),
            "folder": None if self.folder is None else str(self.folder),
        }

    def __str__(self) -> str:
        from ifso.pruning.telling import told

        return told(self)

    def _repr_html_(self) -> str:
        """What a notebook shows in place of the dataclass."""
        from ifso.pruning.telling import told_in_html

        return told_in_html(self)
