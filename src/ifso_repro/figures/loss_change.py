"""Fig. 1: the loss change after retraining against what was said without it, and what more path steps buy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.common.plots import BLUE, COLUMN, MUTED, VERMILION, draw, key
from ifso_repro.figure1.networks import NETWORKS
from ifso_repro.figure1.summary import EXISTING, path_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
