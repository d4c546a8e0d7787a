"""The picture of the study: truth against estimates for each network, and what more path steps buy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.errors import IfsoError
from ifso.repro.summary import EXISTING, path_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PATH, OLD, LINE = "#0072B2", "#D55E00", "#555555"
"""Blue and vermilion of Okabe and Ito, told apart by people who are colour-blind and, by their markers, in print."""

_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "ifso", "font.size": 9}


class PlotUnavailable(IfsoError):
    """matplotlib is not installed."""


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the picture as SVG; needs matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotUnavailable("the plot needs matplotlib: pip install ifso[figures]") from error
    names = list(dict.fromkeys(network["name"] for network in document["networks"]))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(3.1 * len(names), 6.0), layout="constrained")
        grid = figure.subplots(2, len(names), squeeze=False)
        for column, name in enumerate(names):
            networks = [network for network in document["networks"] if network["name"] == name]
            _scatter(grid[0][column], name, networks, str(document["default_path_steps"]))
            _trade_off(grid[1][column], name, document)
        lines = [line for row in range(2) for line in grid[row][0].get_legend_handles_labels()[0]]
        figure.legend(handles=lines, loc="outside lower center", ncols=3, fontsize=8)
        figure.savefig(path, format="svg", metadata={"Date": None, "Title": "ifso repro figure1"})


def _scatter(axes: Axes, name: str, networks: Sequence[dict[str, Any]], steps: str) -> None:
    """Truth to the right, what was said without retraining upwards; on the dashed line they agree."""
    from matplotlib.ticker import NullFormatter

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
    if min(truth + [y for _, y in known] + [row["existing"] for row in rows]) > 0:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        threshold = max(statistics.median([abs(number) for number in truth]) / 2, 1e-12)
        axes.set_xscale("symlog", linthresh=threshold)
        axes.set_yscale("symlog", linthresh=threshold)
    axes.tick_params(axis="x", which="both", labelrotation=45)
    axes.set_title(f"{name}\n{len(rows)} masks, {len(networks)} seed{'s' if len(networks) > 1 else ''}")
    axes.set_xlabel("ΔL_gt after retraining")
    axes.set_ylabel("ΔL said without retraining")


def _trade_off(axes: Axes, name: str, document: dict[str, Any]) -> None:
    """Spearman's correlation against the share of retraining's gradients, one point for each K."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    found = {row["method"]: row for row in document["summary"] if row["network"] == name}
    masks = [row for network in document["networks"] if network["name"] == name for row in network["masks"]]
    steps = sorted({int(step) for row in masks for step in row["estimates"]})
    points = [(step, found[path_name(step)]) for step in steps if "spearman" in found[path_name(step)]]
    for measure, marker, style in (("spearman", "o", "-"), ("spearman_equal_size", "s", ":")):
        line = [(100 * row["share"]["mean"], row.get(measure, {}).get("mean")) for step, row in points if step > 1]
        label = "path, all masks" if measure == "spearman" else "path, masks of equal size"
        axes.plot(*zip(*line, strict=True), linestyle=style, marker=marker, markersize=4, color=PATH, label=label)
    for step, row in points:
        place = 100 * row["share"]["mean"], row["spearman"]["mean"]
        if step in (1, steps[-1]):
            axes.annotate(f"K={step}", place, textcoords="offset points", xytext=(5, -2), fontsize=7)
        if step == 1:
            axes.plot(*place, linestyle="none", marker="^", markersize=6, color=LINE, label="Proposition 1, all masks")
    old = found.get(EXISTING, {}).get("spearman")
    if old:
        axes.axhline(old["mean"], color=OLD, linestyle="-.", linewidth=1, label="ΔL_ex, all masks")
    axes.set_xscale("log")
    shares = [100 * row["share"]["mean"] for _, row in points]
    axes.set_xlim(min([1.0, *shares]) / 1.2, max([100.0, *shares]) * 1.2)
    axes.set_ylim(-1.1, 1.1)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("gradients, % of retraining's")
    axes.set_ylabel("Spearman with the truth")
