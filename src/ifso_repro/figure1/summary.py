"""From the numbers of all masks to correlations, errors and costs; the mean over seeds, with the lowest and highest."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ifso.bench.correlation import pearson, spearman, spearman_at_equal_size
from ifso.criteria import registry
from ifso_repro.table_lines import Grid, as_rich

if TYPE_CHECKING:
    from rich.table import Table

EXISTING = "ΔL_ex"
COLUMNS = {
    "spearman": "Spearman",
    "spearman_equal_size": "equal size",
    "pearson": "Pearson",
    "median_error": "error",
    "gradients": "gradients",
    "share": "of L-BFGS",
    "share_adam": "of Adam",
}
CAPTION = (
    "Correlation with the loss change after retraining, mean over seeds (lowest…highest). Equal size: Spearman among "
    "masks that remove equally many units. Error: median of |estimate − truth| / |truth|. Gradients: median spent "
    "on a mask, and as a share of what retraining it took."
)

Row = dict[str, Any]
MEASURES = (
    "spearman", "spearman_equal_size", "pearson", "median_error", "gradients", "share", "share_near", "share_adam"
)  # fmt: skip


def path_name(steps: str | int) -> str:
    """What the tables call an estimate.

    >>> path_name(1), path_name(8)
    ('Proposition 1 (K = 1)', 'path, K = 8')
    """
    return "Proposition 1 (K = 1)" if int(steps) == 1 else f"path, K = {steps}"


def summarise(networks: Sequence[Row]) -> list[Row]:
    """For each network and method: its measures over the seeds, or why it does not apply."""
    measured: list[Row] = []
    for name in dict.fromkeys(network["name"] for network in networks):
        seeds = [network for network in networks if network["name"] == name]
        measured += [{"network": name, "method": method, **_over_seeds(seeds, method)} for method in _methods(seeds)]
    return measured


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
    measured: Row = {
        "masks": len(rows),
        "spearman": spearman(values, truth),
        "spearman_equal_size": spearman_at_equal_size(values, truth, [row["size"] for row in rows]),
        "pearson": pearson(values, truth),
    }
    step = next((step for row in rows for step in row["estimates"] if path_name(step) == method), None)
    if step is not None:
        measured |= _costs(rows, step)
    if step is not None or method == EXISTING:
        errors = [abs(value - true) / abs(true) for value, true in zip(values, truth, strict=True) if true]
        measured["median_error"] = _median(errors)
    return measured


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
    measured = list(numbers)
    return statistics.median(measured) if measured else None


def tables(document: dict[str, Any]) -> list[Table | str]:
    """A table for each network, and below it what does not apply."""
    shown: list[Table | str] = []
    for name in dict.fromkeys(row["network"] for row in document["summary"]):
        rows = [row for row in document["summary"] if row["network"] == name]
        shown.append(_table(name, rows, [network for network in document["networks"] if network["name"] == name]))
        shown += [f"not applicable: {row['method']}: {row['not_applicable']}" for row in rows if "masks" not in row]
    return shown


def _table(name: str, rows: list[dict[str, Any]], networks: list[dict[str, Any]]) -> Table:
    first = networks[0]
    size = f"{first['weights']} weights, {first['units']} units, {first['images']} images, {len(networks)} seed(s)"
    lines = tuple(
        (row["method"], str(row["masks"]), *(_cell(measure, row.get(measure)) for measure in COLUMNS))
        for row in rows
        if "masks" in row
    )
    return as_rich(Grid(f"{name}: {size}", ("method", "masks", *COLUMNS.values()), (lines,), (CAPTION,)))


def _cell(measure: str, value: dict[str, float] | None) -> str:
    """The mean over seeds, for correlations with their range."""
    if value is None:
        return "–"
    if measure == "gradients":
        return f"{value['mean']:.0f}"
    if measure in ("spearman", "spearman_equal_size", "pearson"):
        spread = f" ({value['lowest']:.2f}…{value['highest']:.2f})" if value["lowest"] < value["highest"] else ""
        return f"{value['mean']:.2f}{spread}"
    return f"{value['mean']:.1%}" if value["mean"] < 10 else f"{value['mean']:.0f}×"
