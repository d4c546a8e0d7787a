"""What the charts of a page are drawn from: plain values, small enough to stand in the page."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ifso.report.results import QUALITIES, STAGES, Quality, quality
from ifso.runs.reading import RunRecord
from ifso.runs.structure import GroupRecord
from ifso.runs.values import numbers

COSTS = ("macs", "params", "activations", "latency")
LEVELS = 250
"""Steps of a scale that fits a byte; 0 is kept for what is not there."""

MOST_POINTS = 400
LARGEST_RECIPE = 2**19
"""Compressed bytes of a recipe that a page carries for download, at most."""


def chart_data(run: RunRecord, name: str) -> dict[str, Any]:
    """One run under the name it has on the page."""
    found = quality(run)
    return {
        "name": name,
        "criterion": run.criterion,
        "targets": run.targets,
        "removals": run.removals[-1].number if run.removals else 0,
        "layers": [
            [each.name, each.channels, each.kept, list(each.groups), list(each.params), each.macs and list(each.macs)]
            for each in run.structure.layers
        ],
        "coupled": {str(number): place for number, place in run.structure.coupled.items()},
        **_units(run),
        "curve": _curve(run),
        "tuning": _tuning(run, found),
        "quality": _quality(run, found),
        "losses": stage_losses(run),
        "recipe": _compressed(run.recipe),
    }


def _units(run: RunRecord) -> dict[str, Any]:
    """Groups: when each unit went, and its score, a byte each."""
    last = run.removals[-1].number if run.removals else 0
    scores = run.scores.by_group if run.scores else {}
    ends = log_range(value for part in scores.values() for value in part)
    groups = [
        {
            "name": group.name,
            "size": group.size,
            "kept": group.kept,
            "flags": list(group.flags),
            "members": _members(group),
            "when": packed(moments(group.gone, group.size, last)),
            "scores": packed(log_level(value, *ends) for value in scores[group.name])
            if ends and group.name in scores
            else None,
        }
        for group in run.structure.groups
    ]
    scale = {"low": short(ends[0]), "high": short(ends[1]), "first": run.scores.first} if ends and run.scores else None
    return {"groups": groups, "scale": scale}


def _members(group: GroupRecord) -> list[str]:
    """The layers that write, follow or read the units, in that order."""
    words = {"produces": "written by", "follows": "followed by", "consumes": "read by"}
    order = list(words)
    found = sorted(group.members, key=lambda member: order.index(member.role) if member.role in words else 1)
    return list(dict.fromkeys(f"{words.get(member.role, member.role)} {member.layer}" for member in found))


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


def _tuning(run: RunRecord, found: Quality) -> dict[str, Any] | None:
    if run.tuning is None or not run.tuning.epochs:
        return None
    rows = [run.tuning.epochs[place] for place in thinned(len(run.tuning.epochs))]
    names = {key: name for name, keys in QUALITIES.items() for key in keys}
    key = next((key for key in names if any(key in row for row in rows)), None)
    return {
        "epoch": column(rows, "epoch"),
        "loss": column(rows, "loss"),
        "eval_loss": column(rows, "eval_loss"),
        "lr": column(rows, "lr"),
        "quality": None if key is None else column(rows, key),
        "name": names.get(key or ""),
        "before": {stage: short(value) for stage, value in found.by_stage.items() if stage != "fine-tuned"},
    }


def _quality(run: RunRecord, found: Quality) -> dict[str, Any]:
    """Quality against MACs: at each stage, and along the path where it was measured there."""
    kept = run.shares.get("macs")
    points = [
        {
            "stage": stage,
            "macs": 1.0 if stage == "unpruned" else short(kept),
            "value": short(found.by_stage[stage], 6),
            "error": short(found.error(stage)),
        }
        for stage in STAGES
        if stage in found.by_stage and (stage == "unpruned" or kept is not None)
    ]
    path = [[1.0, short(found.by_stage["unpruned"], 6)]] if "unpruned" in found.by_stage else []
    return {"name": found.name, "percent": found.is_percent, "points": points, "path": [*path, *_along(run, found.key)]}


def stage_losses(run: RunRecord) -> list[list[float | None]]:
    """[share of MACs, loss] after each stage, if it varies."""
    found = _along(run, "loss")
    return found if len({loss for _, loss in found}) > 1 else []


def _along(run: RunRecord, key: str) -> list[list[float | None]]:
    """[share of MACs, measure] after each stage that measured it, in that order."""
    pairs = ((numbers(stage.get("shares")).get("macs"), numbers(stage.get("values")).get(key)) for stage in run.stages)
    return [[short(macs), short(value, 6)] for macs, value in pairs if macs is not None and value is not None]


def _compressed(recipe: bytes | None) -> str | None:
    if recipe is None:
        return None
    data = zlib.compress(recipe, 9)
    return base64.b64encode(data).decode("ascii") if len(data) <= LARGEST_RECIPE else None


def packed(values: Iterable[int]) -> str:
    """Whole numbers from 0 to 255 as text.

    >>> packed([0, 1, 250])
    'AAH6'
    """
    return base64.b64encode(bytes(values)).decode("ascii")


def moments(gone: Mapping[int, int | None], size: int, removals: int) -> list[int]:
    """For each of ``size`` units 0 if it was kept, else 1 … 250 for when it went; 255 where that is not known.

    >>> moments({1: 1, 2: 100, 3: None}, 4, 100)
    [0, 1, 250, 255]
    """
    found = [0] * size
    for place, number in gone.items():
        found[place] = 255 if number is None else level(number, 1, removals)
    return found


def level(value: float, low: float, high: float) -> int:
    """The step of a value on a scale from 1 to 250.

    >>> level(0, 0, 10), level(5, 0, 10), level(10, 0, 10), level(3, 3, 3)
    (1, 125, 250, 1)
    """
    if high <= low:
        return 1
    return 1 + round((LEVELS - 1) * min(max((value - low) / (high - low), 0.0), 1.0))


def log_range(values: Iterable[float]) -> tuple[float, float] | None:
    """The powers of ten between which all positive values are; None if there are none.

    At most 12 orders of magnitude below the largest: what is smaller is zero but for rounding.

    >>> log_range([0.0, 0.01, 100.0])
    (-2.0, 2.0)
    """
    logs = [math.log10(value) for value in values if value > 0 and math.isfinite(value)]
    return (max(min(logs), max(logs) - 12), max(logs)) if logs else None


def log_level(value: float, low: float, high: float) -> int:
    """The step of a positive number between powers of ten, 0 for any other number."""
    return level(math.log10(value), low, high) if value > 0 and math.isfinite(value) else 0


def thinned(length: int, most: int = MOST_POINTS) -> list[int]:
    """At most ``most`` indices of a series, evenly spread, with the first and the last.

    >>> thinned(5), thinned(9, 5)
    ([0, 1, 2, 3, 4], [0, 2, 4, 6, 8])
    """
    if length <= most:
        return list(range(length))
    return [round(step * (length - 1) / (most - 1)) for step in range(most)]


def short(value: float | None, digits: int = 5) -> float | None:
    """A number with a few significant digits.

    >>> short(0.123456789), short(69124736.0), short(None)
    (0.12346, 69125000.0, None)
    """
    return None if value is None else float(f"{value:.{digits}g}")


def column(rows: Sequence[Mapping[str, float]], name: str) -> list[float | None]:
    """One number of every row."""
    return [short(row.get(name)) for row in rows]
