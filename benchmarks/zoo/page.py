"""The zoo on a device as a page: a summary, and a row for each network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.zoo.float64 import CRITERIA

Rows = Mapping[str, Mapping[str, Any]]
CLOSE_RANK = 0.99

INTRODUCTION = """\
Every network has random, non-degenerate weights and runs in train mode in float32 (no TF32), at the size of its own
input (detectors: 320 px).

- *Times* are seconds of one score ÷ seconds of one gradient of the same batch, without CUDA graphs: medians over
  rounds in turns. With so few images these are times of Python, beside other processes, not the GPU's.
- *Memory* is the peak of a score ÷ that of a training step (SGD with momentum).
- *Rank* is Spearman's correlation with the same scores in float64, on a small batch, within groups of units: the mean
  over groups, weighted by the units compared, at most 16 of a group. Where scores of a CPU were not at hand, or were of
  other weights (libraries initialise networks differently from version to version), float64 is that of the device.
- *Pruned* are the MACs left after one stage of the default run, asked for 95 %; *steps* are the losses of training
  steps before and after it.

A dash stands for what was not measured; the last column says what failed, and why. Written by
`python -m benchmarks zoo FILES --markdown`."""

HEADINGS = (
    "network", "kind", "input", "units", "trace s", "gradient ms", "time ifso", "time group-fisher",
    "memory ifso", "memory group-fisher", "rank ifso", "rank group-fisher", "pruned", "steps", "",
)  # fmt: skip


def page(rows: Rows) -> str:
    """All of it in markdown."""
    lines = [
        "# The zoo on a GPU: scores, a stage, a step",
        "",
        INTRODUCTION,
        "",
        *summary(rows),
        "",
        *_places(rows),
        "",
    ]
    for title, prefix in (("Torchvision builders", "torchvision:"), ("Timm families", "timm:"), ("Others", "")):
        chosen = [row for name, row in sorted(rows.items()) if _belongs(name, prefix)]
        if chosen:
            lines += [f"## {title}", "", *_table(chosen), ""]
    return "\n".join(lines).rstrip() + "\n"


def _belongs(name: str, prefix: str) -> bool:
    return name.startswith(prefix) if prefix else not name.startswith(("torchvision:", "timm:"))


def summary(rows: Rows) -> Iterator[str]:
    """How many networks came how far, and what a score takes."""
    yield "| | ifso | group-fisher |"
    yield "|---|---:|---:|"
    total = len(rows)
    scored = [sum(name in row.get("scored", ()) for row in rows.values()) for name in CRITERIA]
    yield _line("scored at their own size", *(f"{number} of {total}" for number in scored))
    for title, key in (("rank over all units", "rank"), ("rank within groups", "rank_in_groups")):
        yield _line(f"{title} ≥ {CLOSE_RANK}", *(_share(_all(rows, key, name)) for name in CRITERIA))
        yield _line(f"{title}: median, lowest", *(_lowest(_all(rows, key, name)) for name in CRITERIA))
    ratios = [row["seconds"]["in_gradients"] for row in rows.values() if "seconds" in row]
    times = [[found[name] for found in ratios if name in found] for name in CRITERIA]
    if any(times):
        yield _line("time in gradients: median, 90th percentile, most", *map(_spread, times))
    memory = [[_memory(row, name) for row in rows.values()] for name in CRITERIA]
    known = [[value for value in values if value is not None] for values in memory]
    yield _line("memory in training steps: median, 90th percentile, most", *map(_spread, known))
    done = sum("pruned" in row for row in rows.values())
    yield f"| pruned by one stage, and trained a step before and after | {done} of {total} | |"


def _line(title: str, *cells: str) -> str:
    return f"| {title} | {' | '.join(cells)} |"


def _all(rows: Rows, key: str, criterion: str) -> list[float]:
    found = (row.get(key, {}).get(criterion) for row in rows.values())
    return [value for value in found if value is not None]


def _share(values: Sequence[float]) -> str:
    """How many of them are close.

    >>> _share([0.999, 0.5])
    '1 of 2 (50 %)'
    """
    close = sum(value >= CLOSE_RANK for value in values)
    return f"{close} of {len(values)} ({100 * close / len(values):.0f} %)" if values else "–"


def _lowest(values: Sequence[float]) -> str:
    return f"{np.median(values):.5f}, {min(values):.4f}" if values else "–"


def _spread(values: Sequence[float]) -> str:
    """Median, 90th percentile and maximum.

    >>> _spread([1.0, 2.0, 3.0])
    '2.00, 2.80, 3.00'
    """
    return f"{np.median(values):.2f}, {np.percentile(values, 90):.2f}, {max(values):.2f}" if values else "–"


def _memory(row: Mapping[str, Any], criterion: str) -> float | None:
    peaks = row.get("peak_bytes", {})
    return peaks[criterion] / max(peaks["step"], 1) if criterion in peaks else None


def _places(rows: Rows) -> Iterator[str]:
    """Which versions, where; and the reasons of what failed, the most frequent stages first."""
    places = Counter(_place(row) for row in rows.values() if "about" in row)
    for place, count in places.most_common():
        yield f"{count} networks on {place}."
    truths = Counter(row["float64_on"] for row in rows.values() if "float64_on" in row)
    if truths:
        yield "Ranks against float64 " + ", ".join(f"on {name}: {count}" for name, count in truths.most_common()) + "."
    stages = Counter(stage for row in rows.values() for stage in row.get("failed", {}))
    if stages:
        yield ""
        yield "Failed: " + ", ".join(f"{stage} of {count}" for stage, count in stages.most_common()) + "."


def _place(row: Mapping[str, Any]) -> str:
    versions = [f"{name} {version}" for name, version in row["about"].items() if name != "device_name"]
    together = f"{row['processes']} processes at a time" if row.get("processes", 1) > 1 else "one process"
    return ", ".join([row["about"]["device_name"], *versions, f"batch {row['batch']}", together])


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"| {' | '.join(HEADINGS)} |"
    yield f"|---|---|---|{'---:|' * (len(HEADINGS) - 4)}---|"
    for row in rows:
        yield f"| {' | '.join(_cells(row))} |"


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    yield from (row["network"].partition(":")[2], row["kind"], row.get("input", "–"), str(row.get("units", "–")))
    yield f"{row['trace_s']:.1f}" if "units" in row else "–"
    seconds = row.get("seconds")
    yield f"{1000 * seconds['gradient']:.1f}" if seconds else "–"
    times = (seconds["in_gradients"].get(name) if seconds else None for name in CRITERIA)
    memory = (_memory(row, name) for name in CRITERIA)
    yield from ("–" if value is None else f"{value:.2f}" for value in (*times, *memory))
    ranks = (row.get("rank_in_groups", {}).get(name) for name in CRITERIA)
    yield from ("–" if rank is None else f"{rank:.4f}" for rank in ranks)
    yield f"{row['pruned']['macs']:.1%}" if "pruned" in row else "–"
    yield ", ".join(f"{row[key]['loss']:.3g}" for key in ("step", "step_after") if key in row) or "–"
    told = {**row.get("failed", {}), **row.get("refused", {})}
    reasons = "; ".join(f"**{what}**: {reason}" for what, reason in told.items())
    yield reasons.replace("|", "\\|").replace("<", "&lt;")
