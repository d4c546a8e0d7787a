"""The networks of other libraries as a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from catalog import LIBRARIES
from table import escaped, percent

INTRODUCTION = """\
Detectors, segmenters and classifiers of other libraries, built with random, non-degenerate weights and checked twice:
in eval mode, and in train mode with the network's own loss where it has one (ultralytics, transformers). Each time the
network is traced, 30 % of the units of every group are removed at random (then balanced), and the compacted network is
compared with the masked one; what was pruned in train mode is also compared in eval mode. *Prunable* is the share of
the parameters that belong to a unit. *Error* is the largest max |masked − compacted| / max |masked| over the outputs,
in float64 unless marked; *exact* means error ≤ 1e-5 (1e-3 in float32) where the removal itself changed the outputs by
1e-4 or more. Written by
`python benchmarks/zoo/run.py --set third-party --out docs/third-party`, which goes on with `--resume`."""


def render(document: Mapping[str, Any]) -> str:
    """The whole page from ``results.json``."""
    rows, versions = document["results"], document["versions"]
    made = "Run with " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."
    parts = ["# Networks of other libraries", "", INTRODUCTION, "", *headline(rows), "", made, ""]
    for source, package in LIBRARIES.items():
        chosen = {key: row for key, row in rows.items() if row["source"] == source}
        if chosen:
            parts += [f"## {package}", "", *_table(chosen), ""]
    return "\n".join(parts).rstrip() + "\n"


def headline(rows: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """How many are exact in both modes, and how many of these keep four fifths of what eval mode can prune."""
    yield "| library | networks | exact in both modes | train mode prunes ≥ 80 % of what eval mode does |"
    yield "|---|---:|---:|---:|"
    for source, package in LIBRARIES.items():
        chosen = [row for row in rows.values() if row["source"] == source and row["status"] != "absent"]
        if chosen:
            exact = [row for row in chosen if row["status"] == "exact"]
            yield f"| {package} | {len(chosen)} | {len(exact)} | {sum(map(_as_much, exact))} |"


def _as_much(row: Mapping[str, Any]) -> bool:
    return row["train_prunable"] >= 0.8 * row["eval_prunable"]


def _table(rows: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    yield "| network | parameters | prunable: eval | train | error: eval | train | |"
    yield "|---|---:|---:|---:|---:|---:|---|"
    for key, row in sorted(rows.items()):
        size = f"{row['params'] / 1e6:.2f} M" if "params" in row else "–"
        shares = [percent(row, f"{mode}_prunable") for mode in ("eval", "train")]
        errors = [_error(row, mode) for mode in ("eval", "train")]
        yield f"| {key.partition(':')[2]} | {size} | {' | '.join((*shares, *errors))} | {_remark(row)} |"


def _error(row: Mapping[str, Any], mode: str) -> str:
    error = row.get(f"{mode}_error")
    if error is None:
        return "–"
    return f"{float(error):.1e}" + (" (float32)" if row["dtype"] == "float32" else "")


def _remark(row: Mapping[str, Any]) -> str:
    """What went wrong, or why a tenth or more of the parameters stays."""
    if row["status"] != "exact":
        return f"**{row['status']}**: {escaped(row.get('reason', ''))}"
    if row["train_prunable"] >= 0.9:
        return ""
    usual = ("is an output of the model", "reads the model's input")
    reasons = [reason for reason, _ in row["train_frozen"] if reason not in usual]
    return "stays: " + escaped(reasons[0] if reasons else usual[0])
