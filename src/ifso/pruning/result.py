"""What ``ifso.prune`` gives back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from ifso.common.text import measured
from ifso.costs.cost import Cost
from ifso.graph.channel_graph import ChannelGraph
from ifso.runs.files import NETWORKS, STRUCTURE
from ifso.runs.folder import RunFolder
from ifso.runs.structure import structure_of
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
class Check:
    """One thing that was looked at; ``error`` is its size, if it has one."""

    name: str
    passed: bool
    detail: str
    error: float = 0.0


@dataclass(frozen=True)
class Measure:
    """What ``evaluate`` said about the network after a stage of the run."""

    stage: str
    values: Mapping[str, float]


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
    found = [
        Network(each["budget"], each["shares"], each["values"], folder and folder / NETWORKS / each["network"])
        for each in stages
        if "budget" in each
    ]
    if found and dict(found[-1].shares) == dict(shares):
        values = next(one.values for one in reversed(measures) if not one.stage.endswith(UNDONE))
        found[-1] = replace(found[-1], values=values, folder=folder)
    return tuple(found)


@dataclass(frozen=True)
class PruneResult:
    """The end of a pruning run.

    Attributes:
        model: the smaller network.
        graph: that of the network before the run.
        keep: what is left of its units, by group.
        recipe: what was removed, for a fresh model.
        before: the cost before.
        after: the cost after.
        targets: the shares asked for, by cost.
        shares: the shares kept of every cost.
        removals: how many there were.
        seconds: how long the run took.
        timings: seconds by part of the run.
        checks: what was verified.
        measures: what the network was worth, by stage of the run.
        notes: what went otherwise than expected.
        latency: seconds ``before`` and ``after``, the ``share`` and its ``spread``; None if nobody asked.
        scores: the last ones before normalisation, by group.
        metrics: a line for each removal.
        config: what stands in ``config.json``.
        folder: the folder of the run, if there is one.
        networks: the networks at several budgets.
        samples: of how many an accuracy in ``measures`` is, if ``evaluate`` has it as its attribute ``samples``.
        stages: of a staged run, or one of Algorithm 2 through several budgets, for each stage its number ``stage``, the
            ``units`` that went in it, the ``shares`` left of every cost, the ``values`` measured after it and the
            ``seconds`` since the run began.
        floors: groups that kept no more units than they must.
    """

    model: nn.Module = field(repr=False)
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
    samples: int | None = None
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
        """Write a run folder: recipe and weights, for :func:`ifso.load`, and what else is known of the run.

        Args:
            folder: empty or not there yet.

        Returns:
            The folder.

        Raises:
            RunError: the folder is taken or cannot be written.
        """
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
            **({"samples": self.samples} if self.samples else {}),
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
        return told(self)

    def _repr_html_(self) -> str:
        """What a notebook shows in place of the dataclass."""
        return told_in_html(self)


T = TypeVar("T")

ANEW = "to train it further make the optimizer anew: the one before holds parameters of the larger network"

MOST_STAGES = 12
"""Stages that are shown, at most."""

MOST_NAMES = 5
"""Names of groups that are shown, at most."""

Row = tuple[str, ...]


def told(result: PruneResult) -> str:
    """Costs before and after, what the network was worth at each stage, which layers can lose no more, the checks."""
    lines = [_head(result), "", *_aligned(_costs(result))]
    lines += _budgets(result)
    if result.measures:
        lines += ["", *_aligned(_measures(result))]
    if result.stages:
        rows, hidden = _stages(result)
        lines += ["", *_aligned(rows), *hidden]
    floors, *others = _findings(result, "ok    ", "FAILED")
    lines += [*(["", floors] if floors else []), "", *others]
    return "\n".join(line.rstrip() for line in lines)


def told_in_html(result: PruneResult) -> str:
    """The same as tables for a notebook; the stages are folded."""
    parts = [f"<p><b>{escape(_head(result))}</b></p>", _table(_costs(result))]
    if result.measures:
        parts.append(_table(_measures(result)))
    if result.stages:
        rows, hidden = _stages(result)
        more = "".join(f"<p>{escape(line)}</p>" for line in hidden)
        parts.append(f"<details><summary>{len(result.stages)} stages</summary>{_table(rows)}{more}</details>")
    lines = filter(None, [*_budgets(result), *_findings(result, "✓", "✗ FAILED")])
    return "\n".join((*parts, f"<p>{'<br>'.join(map(escape, lines))}</p>"))


def _findings(result: PruneResult, passed: str, failed: str) -> list[str]:
    """The groups at their floor (empty if there are none), the checks, the notes and what to do next, a line each."""
    checks = [f"{passed if check.passed else failed} {check.name}: {check.detail}" for check in result.checks]
    floors = f"reached their floor: {_named(result.floors)}" if result.floors else ""
    anew = [ANEW] if result.removed_units else []
    return [floors, *checks, *(f"note: {note}" for note in result.notes), *anew]


def _table(rows: Sequence[Row]) -> str:
    """The first row is the head, the first column names the others."""
    head, *body = ([escape(cell) for cell in row] for row in rows)
    names = "".join(f"<th>{cell}</th>" for cell in head)
    lines = (f"<tr><th>{first}</th>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>" for first, *rest in body)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _head(result: PruneResult) -> str:
    return (
        f"{type(result.model).__name__}: {result.removed_units} of {result.graph.num_units} units removed "
        f"in {result.seconds:.1f} s, {result.below_target:.2%} below the target"
    )


def _costs(result: PruneResult) -> list[Row]:
    before, after = result.before.as_dict(), result.after.as_dict()
    rows: list[Row] = [("", "before", "after", "kept", "asked for")]
    for kind, share in result.shares.items():
        numbers = (f"{before[kind]:,}", f"{after[kind]:,}") if kind in before else ("", "")
        asked = f"{result.targets[kind]:.2%}" if kind in result.targets else ""
        rows.append((LABELS.get(kind, kind), *numbers, f"{share:.2%}", asked))
    if result.latency is not None:
        first, last = (f"{1000 * result.latency[name]:.2f} ms" for name in ("before", "after"))
        spread = f" ± {500 * result.latency['spread']:.2f}" if result.latency.get("spread") else ""
        rows.append(("latency (measured)", first, f"{last}{spread}", f"{result.latency['share']:.2%}", ""))
    return rows


def _budgets(result: PruneResult) -> list[str]:
    """Which of several budgets was the hardest to meet, and whether the latency is longer than was asked for."""
    room = {kind: target - result.shares[kind] for kind, target in result.targets.items()}
    lines = []
    if len(room) > 1:
        hardest = min(room, key=room.__getitem__)
        others = ", ".join(f"{LABELS.get(kind, kind)} {spare:.1%}" for kind, spare in room.items() if kind != hardest)
        lines = [f"binding: the budget of {LABELS.get(hardest, hardest)}; room left in the others: {others}"]
    asked, measured = result.targets.get("latency"), (result.latency or {}).get("share")
    if asked is not None and measured is not None and measured > asked:
        missed = f"{measured:.1%} of the time is left as measured, {asked:.1%} was asked for"
        lines.append(f"the latency budget is missed: {missed}")
    return lines


def _measures(result: PruneResult) -> list[Row]:
    names = list(dict.fromkeys(name for measure in result.measures for name in measure.values))
    stages = [(one.stage, *(_value(result, name, one.values) for name in names)) for one in result.measures]
    return [("stage", *names), *stages]


def _stages(result: PruneResult) -> tuple[list[Row], list[str]]:
    """Rows of the stages; of many, the first, the last and some between them, and a line that says so."""
    kinds = dict.fromkeys(("macs", *result.targets))
    names = list(dict.fromkeys(name for stage in result.stages for name in stage["values"]))
    shown = spread_over(result.stages, MOST_STAGES)
    head = ("stage", *(f"{LABELS.get(kind, kind)} kept" for kind in kinds), "units removed", *names, "seconds so far")
    rows = [
        (
            f"{stage['stage']}",
            *(f"{stage['shares'][kind]:.2%}" if kind in stage["shares"] else "" for kind in kinds),
            f"{stage['units']}",
            *(_value(result, name, stage["values"]) for name in names),
            f"{stage['seconds']:.1f}",
        )
        for stage in shown
    ]
    hidden = len(result.stages) - len(shown)
    return [head, *rows], [f"{len(shown)} of {len(result.stages)} stages are shown"] if hidden else []


def spread_over(items: Sequence[T], most: int) -> list[T]:
    """All items, or the first, the last and evenly spaced ones between them: ``most`` in all.

    >>> spread_over(range(1, 10), 3), spread_over("ab", 3)
    ([1, 5, 9], ['a', 'b'])
    """
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _named(names: Sequence[str]) -> str:
    """The first few, and how many more there are.

    >>> _named(["a", "b"]), _named("abcdefg")
    ('a, b', 'a, b, c, d, e (and 2 more)')
    """
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" (and {more} more)" if more > 0 else "")


def _value(result: PruneResult, name: str, values: Mapping[str, float]) -> str:
    return measured(name, values[name], result.samples) if values.get(name) is not None else ""


def _aligned(rows: list[Row]) -> list[str]:
    """Rows as lines: the first column to the left, the others to the right.

    >>> _aligned([("", "a"), ("long", "12")])
    ['       a', 'long  12']
    """
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) if not place else cell.rjust(width)
                  for place, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]  # fmt: skip
