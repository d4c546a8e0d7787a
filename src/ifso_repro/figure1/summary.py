"""From the numbers of all masks to correlations, errors and costs over the seeds, as tables and as Fig. 1."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.bench.correlation import pearson, spearman, spearman_at_equal_size
from ifso.criteria import registry
from ifso_repro.figure1.networks import NETWORKS
from ifso_repro.plots import BLUE, COLUMN, MUTED, VERMILION, draw, key
from ifso_repro.table_lines import Grid, as_rich

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
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


SMOKE = "SMOKE RUN: this shows that drawing works, and its numbers mean little."
PATH, OLD, LINE = BLUE, VERMILION, MUTED


def draw_loss_change(document: dict[str, Any], stem: Path) -> tuple[Path, Path]:
    """The figure of a document of ``ifso repro figure1``."""
    names = list(dict.fromkeys(network["name"] for network in document["networks"]))
    size = max(COLUMN, 1.79 * len(names)), 4.6
    return draw(stem, "True and existing loss change (Fig. 1)", size, lambda figure: _fill(figure, document, names))


def _fill(figure: Figure, document: dict[str, Any], names: Sequence[str]) -> None:
    """Above, truth against estimates of each network; below, correlation against cost."""
    grid = figure.subplots(2, len(names), squeeze=False)
    for column, name in enumerate(names):
        networks = [network for network in document["networks"] if network["name"] == name]
        _scatter(grid[0][column], name, networks, str(document["default_path_steps"]))
        _trade_off(grid[1][column], name, document)
    for row in grid:
        for axes in row[1:]:
            axes.set_ylabel("")
    handles = [line for row in range(2) for line in grid[row][0].get_legend_handles_labels()[0]]
    left_out = [name for name in NETWORKS if name not in names]
    notes = [SMOKE] if document["settings"].get("smoke") else []
    key(figure, handles, [*notes, *([f"Not run: {', '.join(left_out)}."] if left_out else [])], columns=3)


def _scatter(axes: Axes, name: str, networks: Sequence[dict[str, Any]], steps: str) -> None:
    """Truth to the right, what was said without retraining upwards; on the dashed line they agree."""
    rows = [row for network in networks for row in network["masks"]]
    truth = [row["truth"] for row in rows]
    known = [(row["truth"], row["estimates"][steps]["true"]) for row in rows if "true" in row["estimates"][steps]]
    axes.scatter(
        truth, [row["existing"] for row in rows],
        marker="x", s=18, linewidths=0.9, color=OLD, label="ΔL_ex, old weights",
    )  # fmt: skip
    axes.scatter(
        [x for x, _ in known], [y for _, y in known],
        marker="o", s=16, facecolors="none", linewidths=1.0, edgecolors=PATH, label=f"estimate, {path_name(steps)}",
    )  # fmt: skip
    low, high = min(truth), max(truth)
    axes.plot([low, high], [low, high], linestyle="--", linewidth=1, color=LINE, label="equal to the truth")
    _scales(axes, truth, [y for _, y in known] + [row["existing"] for row in rows])
    axes.set_title(f"{name}\n{len(rows)} masks, {len(networks)} seed{'s' if len(networks) > 1 else ''}")
    axes.set_xlabel("ΔL_gt after retraining")
    axes.set_ylabel("ΔL said without retraining")


def _scales(axes: Axes, truth: Sequence[float], estimated: Sequence[float]) -> None:
    """Logarithmic, and around zero linear where a loss fell."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, StrMethodFormatter

    if min(*truth, *estimated) > 0:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        if max(truth) < 100 * min(truth):
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        return
    threshold = max(statistics.median([abs(number) for number in truth]) / 2, 1e-12)
    axes.set_xscale("symlog", linthresh=threshold)
    axes.set_yscale("symlog", linthresh=threshold)
    axes.xaxis.set_major_locator(FixedLocator(_decades(threshold, min(truth), max(truth))))
    axes.yaxis.set_major_locator(FixedLocator(_decades(threshold, min(estimated), max(estimated))))


def _decades(threshold: float, low: float, high: float) -> list[float]:
    """Zero and the powers of ten outside of the linear part, every second one where there are negative ones, too.

    >>> _decades(3e-4, -0.02, 0.5), _decades(3e-4, 0.0, 0.05)
    ([-0.01, 0.0, 0.001, 0.1], [0.0, 0.001, 0.01])
    """
    powers = [10.0**power for power in range(math.ceil(math.log10(threshold)), 40)]
    above = [power for power in powers if power <= high]
    below = [-power for power in powers if power <= -low]
    step = 2 if low < -threshold else 1
    return [*below[::-1][::step], 0.0, *above[::-1][::step][::-1]]


def _trade_off(axes: Axes, name: str, document: dict[str, Any]) -> None:
    """Spearman's correlation against the share of retraining's gradients, one point for each K."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    by_method = {row["method"]: row for row in document["summary"] if row["network"] == name}
    masks = [row for network in document["networks"] if network["name"] == name for row in network["masks"]]
    steps = sorted({int(step) for row in masks for step in row["estimates"]})
    points = [(step, by_method[path_name(step)]) for step in steps if "spearman" in by_method[path_name(step)]]
    for measure, marker, style in (("spearman", "o", "-"), ("spearman_equal_size", "s", ":")):
        line = [(100 * row["share"]["mean"], row.get(measure, {}).get("mean")) for step, row in points if step > 1]
        label = "path, all masks" if measure == "spearman" else "path, masks of equal size"
        axes.plot(*zip(*line, strict=True), linestyle=style, marker=marker, markersize=4, color=PATH, label=label)
    for step, row in points:
        xy = 100 * row["share"]["mean"], row["spearman"]["mean"]
        if step in (1, steps[-1]):
            axes.annotate(f"K={step}", xy, textcoords="offset points", xytext=(5, -2), fontsize=7)
        if step == 1:
            axes.plot(*xy, linestyle="none", marker="^", markersize=6, color=LINE, label="Proposition 1, all masks")
    old = by_method.get(EXISTING, {}).get("spearman")
    if old:
        axes.axhline(old["mean"], color=OLD, linestyle="-.", linewidth=1, label="ΔL_ex, all masks")
    axes.set_xscale("log")
    shares = [100 * row["share"]["mean"] for _, row in points]
    axes.set_xlim(min([1.0, *shares]) / 1.2, max([100.0, *shares]) * 1.2)
    axes.set_ylim(-1.1, 1.1)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("gradients (% of retraining)")
    axes.set_ylabel("Spearman with the truth")
