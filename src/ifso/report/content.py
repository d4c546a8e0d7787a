"""What the charts of a page are drawn from: plain values, small enough to stand in the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ifso.report.facts import STAGES, worth
from ifso.report.packing import LogScale, column, moments, packed, short, thinned
from ifso.runs.record import RunRecord
from ifso.runs.structure import Group

COSTS = ("macs", "params", "activations", "latency")


def content(run: RunRecord, name: str) -> dict[str, Any]:
    """One run under the name it has on the page."""
    return {
        "name": name,
        "criterion": run.criterion,
        "finished": run.finished,
        "targets": run.targets,
        "removals": run.removals[-1].number if run.removals else 0,
        "layers": [[each.name, each.channels, each.kept, list(each.groups)] for each in run.structure.layers],
        "coupled": {str(number): place for number, place in run.structure.coupled.items()},
        **_units(run),
        "curve": _curve(run),
        "tuning": _tuning(run),
        "points": _points(run),
    }


def _units(run: RunRecord) -> dict[str, Any]:
    """Groups: when each unit went, and its score, a byte each."""
    last = run.removals[-1].number if run.removals else 0
    scale = None if run.scores is None else LogScale.over(v for part in run.scores.by_group.values() for v in part)
    groups = [
        {
            "name": group.name,
            "size": group.size,
            "kept": group.kept,
            "flags": list(group.flags),
            "members": _members(group),
            "when": packed(moments(group.gone, group.size, last)),
            "scores": _levels(run, group, scale),
        }
        for group in run.structure.groups
    ]
    about = None
    if scale is not None and run.scores is not None:
        about = {"low": short(scale.low), "high": short(scale.high), "first": run.scores.first}
    return {"groups": groups, "scale": about}


def _members(group: Group) -> list[str]:
    """The layers that write, follow or read the units, in that order."""
    order = {"produces": 0, "follows": 1, "consumes": 2}
    words = {"produces": "written by", "follows": "followed by", "consumes": "read by"}
    found = sorted(group.members, key=lambda member: order.get(member.role, 1))
    return list(dict.fromkeys(f"{words.get(member.role, member.role)} {member.layer}" for member in found))


def _levels(run: RunRecord, group: Group, scale: LogScale | None) -> str | None:
    if run.scores is None or scale is None or group.name not in run.scores.by_group:
        return None
    return packed(scale.level(value) for value in run.scores.by_group[group.name])


def _curve(run: RunRecord) -> dict[str, Any] | None:
    """Costs and loss along the run."""
    if not run.removals:
        return None
    lines = [run.removals[place] for place in thinned(len(run.removals))]
    shares = [line.shares for line in lines]
    kinds = [kind for kind in COSTS if any(kind in share for share in shares)]
    return {
        "removal": [line.number for line in lines],
        "shares": {kind: column(shares, kind) for kind in kinds},
        "loss": [short(line.loss) for line in lines],
        "seconds": [short(line.seconds) for line in lines],
    }


def _tuning(run: RunRecord) -> dict[str, Any] | None:
    if run.tuning is None or not run.tuning.epochs:
        return None
    rows = [run.tuning.epochs[place] for place in thinned(len(run.tuning.epochs))]
    names = {"top1": "accuracy", "map": "mAP"}
    quality = next((key for key in names if any(key in row for row in rows)), None)
    return {
        "epoch": column(rows, "epoch"),
        "loss": column(rows, "loss"),
        "eval_loss": column(rows, "eval_loss"),
        "lr": column(rows, "lr"),
        "quality": None if quality is None else column(rows, quality),
        "name": names.get(quality or ""),
        "before": {stage: short(value) for stage, value in worth(run).by_stage.items() if stage != "fine-tuned"},
    }


def _points(run: RunRecord) -> dict[str, Any]:
    """Accuracy against MACs, by stage."""
    found = worth(run)
    kept = run.shares.get("macs")
    points = [
        {"stage": stage, "macs": 1.0 if stage == "unpruned" else short(kept), "worth": short(found.by_stage[stage], 6)}
        for stage in STAGES
        if stage in found.by_stage and (stage == "unpruned" or kept is not None)
    ]
    return {"name": found.name, "percent": found.in_percent, "points": points}


def names_of(runs: Sequence[RunRecord]) -> list[str]:
    """A name for each run: its folder, with as many folders above it as it takes to tell them apart."""
    paths = [run.folder.resolve() for run in runs]
    for depth in (1, 2, 3):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{number}: {path.name}" for number, path in enumerate(paths, 1)]
