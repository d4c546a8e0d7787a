"""The zoo and the networks of other libraries as pages: a headline, what failed and why, and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.zoo.networks import LIBRARIES

Results = Mapping[str, Mapping[str, Any]]

COUNTED = {
    "torchvision builders": lambda row: row["source"] == "torchvision" and row["kind"] != "optical_flow",
    "torchvision optical flow (extra)": lambda row: row["kind"] == "optical_flow",
    "timm families": lambda row: row["source"] == "timm",
}
FAILURES = ("refused", "inexact", "crashed", "killed", "absent")


def render(document: Mapping[str, Any]) -> str:
    """The whole page from ``results.json``."""
    rows: Results = document["results"]
    parts = ["# The zoo", "", INTRODUCTION, "", *headline(rows), "", _versions(document["versions"]), ""]
    for title, counted in COUNTED.items():
        chosen = {key: row for key, row in rows.items() if counted(row)}
        if chosen:
            parts += [f"## {title[0].upper()}{title[1:]}", "", *_table(chosen), ""]
    return "\n".join([*parts, *_detectors(rows), *_frozen(rows)]).rstrip() + "\n"


INTRODUCTION = """\
Every network is built with random, non-degenerate weights and traced; 30 % of the units of every group are removed at
random (then balanced), and the compacted network is compared with the masked one. `error` is the largest
max |masked − compacted| / max |masked| over the output tensors, in float64 unless marked; `change` is the same between
the whole and the masked network, so it says what an error could have been. Then the smaller network is traced again and
loses another 30 % in the same way; `error` is the larger of both rounds. *Exact* means at least one prunable group and
error ≤ 1e-5. Parameters and channels are the prunable shares; channels are output channels of the convolutions that
run, final layers left out. Trace and compact are CPU seconds on one core at the given input; the last column holds the
reason of failure and the flags. Written by `python benchmarks/zoo/run.py --out docs/zoo`."""


def headline(rows: Results) -> Iterable[str]:
    """How many passed, by set."""
    yield "| | exact | of | refused with a reason | inexact | crashed | killed | absent |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for title, counted in COUNTED.items():
        status = Counter(row["status"] for row in rows.values() if counted(row))
        total = status.total() - status["absent"]
        if total:
            share = f"{status['exact']} ({status['exact'] / total:.1%})"
            yield f"| {title} | {share} | {total} | " + " | ".join(str(status[name]) for name in FAILURES) + " |"


def _versions(versions: Mapping[str, str]) -> str:
    return "Run with " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."


def _table(rows: Results) -> Iterable[str]:
    yield "| model | kind | input | groups | units | parameters | channels | change | error | trace s | compact s | |"
    yield "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|"
    for key in sorted(rows, key=lambda key: (rows[key]["kind"], key)):
        row = rows[key]
        cells = [
            key.partition(":")[2],
            row["kind"],
            row.get("input", "–"),
            _number(row, "groups"),
            _number(row, "units"),
            percent(row, "prunable_params"),
            percent(row, "prunable_conv_channels"),
            _number(row, "change"),
            _error(row),
            _number(row, "trace_seconds"),
            _number(row, "compact_seconds"),
            _remark(row),
        ]
        yield "| " + " | ".join(cells) + " |"


def _number(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return "–" if value is None else _digits(value)


def _digits(value: float | str) -> str:
    """Two digits for what is not a whole number; "inf" and "nan" as they are.

    >>> _digits(1.0 / 3), _digits(12345), _digits("inf")
    ('0.33', '12345', 'inf')
    """
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def percent(row: Mapping[str, Any], name: str) -> str:
    """A share of a row; a dash where there is none."""
    value = row.get(name)
    return "–" if value is None else f"{value:.1%}"


def _error(row: Mapping[str, Any]) -> str:
    errors = [row[name] for name in ("error", "second_error") if name in row]
    mark = " (float32)" if row.get("dtype") == "float32" and errors else ""
    return _digits(max(errors, key=float)) + mark if errors else "–"


def _remark(row: Mapping[str, Any]) -> str:
    """The flags, after the reason of failure if there is one."""
    flags = ", ".join(f"{flag} ×{count}" for flag, count in row.get("flags", {}).items())
    if row["status"] == "exact":
        return flags
    return f"**{row['status']}**: {escaped(row.get('reason', ''))}" + (f" ({flags})" if flags else "")


def escaped(text: str) -> str:
    """Text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _detectors(rows: Results) -> Iterable[str]:
    chosen = {key: row for key, row in rows.items() if row["kind"] == "detection" and row["source"] == "torchvision"}
    if chosen:
        yield from ("## Detectors in train mode", "")
        yield from ("| model | same partition as in eval mode | error of the losses |", "|---|---|---:|")
        for key, row in sorted(chosen.items()):
            same = {True: "yes", False: "no", None: "–"}[row.get("same_partition")]
            yield f"| {key.partition(':')[2]} | {same} | {row.get('training_error', '–')} |"
        yield ""


def _frozen(rows: Results) -> Iterable[str]:
    """Why parts stay, for networks where less than nine tenths of the parameters can go."""
    low = {key: row for key, row in rows.items() if row.get("prunable_params", 1) < 0.9 and row.get("frozen")}
    if low:
        yield from ("## What stays, where less than 90 % of the parameters are prunable", "")
        yield from ("| model | parameters | reasons (parameter axes) |", "|---|---:|---|")
        for key, row in sorted(low.items()):
            reasons = "; ".join(f"{escaped(reason)} ({count})" for reason, count in row["frozen"])
            yield f"| {key} | {percent(row, 'prunable_params')} | {reasons} |"


THIRD_PARTY_INTRODUCTION = """\
Detectors, segmenters and classifiers of other libraries, built with random, non-degenerate weights and checked twice:
in eval mode, and in train mode with the network's own loss where it has one (ultralytics, transformers). Each time the
network is traced, 30 % of the units of every group are removed at random (then balanced), and the compacted network is
compared with the masked one; what was pruned in train mode is also compared in eval mode. *Prunable* is the share of
the parameters that belong to a unit. *Error* is the largest max |masked − compacted| / max |masked| over the outputs,
in float64 unless marked; *exact* means error ≤ 1e-5 (1e-3 in float32) where the removal itself changed the outputs by
1e-4 or more. Written by
`python benchmarks/zoo/run.py --set third-party --out docs/third-party`, which goes on with `--resume`."""


def render_third_party(document: Mapping[str, Any]) -> str:
    """The whole page from ``results.json``."""
    rows, made = document["results"], _versions(document["versions"])
    parts = [
        "# Networks of other libraries",
        "",
        THIRD_PARTY_INTRODUCTION,
        "",
        *headline_third_party(rows),
        "",
        made,
        "",
    ]
    for source, package in LIBRARIES.items():
        chosen = {key: row for key, row in rows.items() if row["source"] == source}
        if chosen:
            parts += [f"## {package}", "", *_third_party_table(chosen), ""]
    return "\n".join(parts).rstrip() + "\n"


def headline_third_party(rows: Results) -> Iterable[str]:
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


def _third_party_table(rows: Results) -> Iterable[str]:
    yield "| network | parameters | prunable: eval | train | error: eval | train | |"
    yield "|---|---:|---:|---:|---:|---:|---|"
    for key, row in sorted(rows.items()):
        size = f"{row['params'] / 1e6:.2f} M" if "params" in row else "–"
        shares = [percent(row, f"{mode}_prunable") for mode in ("eval", "train")]
        errors = [_mode_error(row, mode) for mode in ("eval", "train")]
        yield f"| {key.partition(':')[2]} | {size} | {' | '.join((*shares, *errors))} | {_third_party_remark(row)} |"


def _mode_error(row: Mapping[str, Any], mode: str) -> str:
    error = row.get(f"{mode}_error")
    if error is None:
        return "–"
    return f"{float(error):.1e}" + (" (float32)" if row["dtype"] == "float32" else "")


def _third_party_remark(row: Mapping[str, Any]) -> str:
    """What went wrong, or why a tenth or more of the parameters stays."""
    if row["status"] != "exact":
        return f"**{row['status']}**: {escaped(row.get('reason', ''))}"
    if row["train_prunable"] >= 0.9:
        return ""
    usual = ("is an output of the model", "reads the model's input")
    reasons = [reason for reason, _ in row["train_frozen"] if reason not in usual]
    return "stays: " + escaped(reasons[0] if reasons else usual[0])


ZOO, THIRD_PARTY = (render, headline), (render_third_party, headline_third_party)
"""What makes a page from ``results.json``, and its headline from the rows."""
