"""From the numbers of all masks to correlations, errors and costs; the mean over seeds, with the lowest and highest."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ifso.bench.correlation import pearson, spearman, spearman_at_equal_size
from ifso.criteria import registry

EXISTING = "ΔL_ex"
Row = dict[str, Any]
MEASURES = (
    "spearman",
    "spearman_equal_size",
    "pearson",
    "median_error",
    "gradients",
    "share",
    "share_near",
    "share_adam",
)


def path_name(steps: str | int) -> str:
    """What the tables call an estimate.

    >>> path_name(1), path_name(8)
    ('Proposition 1 (K = 1)', 'path, K = 8')
    """
    return "Proposition 1 (K = 1)" if int(steps) == 1 else f"path, K = {steps}"


def summarise(networks: Sequence[Row]) -> list[Row]:
    """For each network and method: its measures over the seeds, or why it does not apply."""
    found: list[Row] = []
    for name in dict.fromkeys(network["name"] for network in networks):
        seeds = [network for network in networks if network["name"] == name]
        found += [{"network": name, "method": method, **_over_seeds(seeds, method)} for method in _methods(seeds)]
    return found


def _methods(seeds: Sequence[Row]) -> list[str]:
    steps = sorted({int(step) for network in seeds for row in network["masks"] for step in row["estimates"]})
    variants = [name for name in seeds[0]["scores"] if name not in registry.names()]
    return [*(path_name(step) for step in reversed(steps)), EXISTING, *registry.names(), *variants]


def _over_seeds(seeds: Sequence[Row], method: str) -> Row:
    refused = [network["not_applicable"][method] for network in seeds if method in network["not_applicable"]]
    if refused:
        return {"not_applicable": refused[0]}
    each = [_one_seed(network, method) for network in seeds]
    result: Row = {"masks": sum(one["masks"] for one in each), "seeds": len(each)}
    for measure in MEASURES:
        numbers = [one[measure] for one in each if one.get(measure) is not None]
        if numbers:
            result[measure] = {"mean": statistics.fmean(numbers), "lowest": min(numbers), "highest": max(numbers)}
    return result


def _one_seed(network: Row, method: str) -> Row:
    pairs = [(row, value) for row in network["masks"] if (value := _value(row, method)) is not None]
    rows, values = [row for row, _ in pairs], [value for _, value in pairs]
    truth = [row["truth"] for row in rows]
    found: Row = {
        "masks": len(rows),
        "spearman": spearman(values, truth),
        "spearman_equal_size": spearman_at_equal_size(values, truth, [row["size"] for row in rows]),
        "pearson": pearson(values, truth),
    }
    step = next((step for row in rows for step in row["estimates"] if path_name(step) == method), None)
    if step is not None:
        found |= _costs(rows, step)
    if step is not None or method == EXISTING:
        errors = [abs(value - true) / abs(true) for value, true in zip(values, truth, strict=True) if true]
        found["median_error"] = _median(errors)
    return found


def _value(row: Row, method: str) -> float | None:
    if method == EXISTING:
        return row["existing"]
    if method in row["criteria"]:
        return row["criteria"][method]
    return next((e.get("true") for step, e in row["estimates"].items() if path_name(step) == method), None)


def _costs(rows: Sequence[Row], step: str) -> Row:
    """Medians over the masks: gradients, and their share of what L-BFGS spent in all, until near, and of Adam's."""

    def share(spent_by: Callable[[Row], float | None]) -> float | None:
        spent = [(row["estimates"][step]["gradients"], spent_by(row)) for row in rows]
        return _median(own / other for own, other in spent if other)

    return {
        "gradients": _median(row["estimates"][step]["gradients"] for row in rows),
        "share": share(lambda row: row["retraining"]["gradients"]),
        "share_near": share(lambda row: _until_near(row["retraining"])),
        "share_adam": share(lambda row: _until_near(row["retraining"].get("adam"))),
    }


def _until_near(training: Row | None) -> float | None:
    """Gradients until it was near its end, or all it had if it never was; None if there was nothing to retrain.

    >>> [_until_near({"gradients": 90, "gradients_until_near": near}) for near in (40, None, 1)]
    [40, 90, None]
    """
    if training is None or training["gradients_until_near"] == 1:
        return None
    return training["gradients_until_near"] or training["gradients"]


def _median(numbers: Iterable[float]) -> float | None:
    found = list(numbers)
    return statistics.median(found) if found else None
