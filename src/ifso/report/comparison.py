"""Accuracy against MACs, and what a page says of several runs together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ifso.report.evidence import flattened
from ifso.report.facts import STAGES, Worth, worth
from ifso.report.markup import Markup, element, table
from ifso.report.parts import capital, chart, duration, folded, said, status
from ifso.runs.record import RunRecord
from ifso.runs.values import percent

COSTS = {"macs": "MACs", "params": "parameters", "activations": "activations"}


def comparison(runs: Sequence[RunRecord], names: Sequence[str]) -> Markup:
    """A chart of accuracies; of several runs also a table, and what each left of each layer."""
    worths = [worth(run) for run in runs]
    label = next((found.name for found in worths if found.name), "accuracy")
    several, inside = len(runs) > 1, list[Markup]()
    if several:
        inside.append(_table(runs, names, worths, label))
    if len(_tasks(runs, worths)) > 1:
        inside.append(
            said("The runs are of different networks or measured differently, so they are not drawn together.")
        )
    elif any(found.by_stage for found in worths):
        unit = " in percent" if any(found.in_percent for found in worths) else ""
        words = f"{capital(label)}{unit} against the share of the MACs that is left."
        inside += [said(words), chart("worth", f"{label} against MACs")]
    else:
        inside.append(said("No accuracy was measured."))
    if several and _alike(runs):
        picture = chart("sidebyside", "Share of channels kept, by layer and run")
        inside += [element("h3", "What each run left of each layer"), picture]
    if several:
        inside += _differing(runs, names)
    title = element("h2", "Comparison" if several else f"{capital(label)} against MACs", id="comparison-title")
    return element(
        "section", title, *inside, id="comparison", class_="comparison", aria_labelledby="comparison-title"
    )  # fmt: skip


def _tasks(runs: Sequence[RunRecord], worths: Sequence[Worth]) -> set[tuple[str | None, ...]]:
    """Networks, their data and how they were measured, each once."""
    return {(run.model, run.data, found.name) for run, found in zip(runs, worths, strict=True) if found.by_stage}


def _differing(runs: Sequence[RunRecord], names: Sequence[str]) -> Iterator[Markup]:
    """A table of the settings in which the runs differ, if they do."""
    settings = [dict(flattened(run.settings)) for run in runs]
    known = dict.fromkeys(name for each in settings for name in each)
    rows = [(name, *(each.get(name, "–") for each in settings)) for name in known]
    different = [row for row in rows if len(set(row[1:])) > 1]
    if different:
        found = table(("setting", *names), different, caption="Settings in which the runs differ", class_="words")
        yield folded(f"Settings that differ: {len(different)}", found, len(different))


def _alike(runs: Sequence[RunRecord]) -> bool:
    """Have all of them the same layers?"""
    layers = [[(layer.name, layer.channels) for layer in run.structure.layers] for run in runs]
    return bool(layers[0]) and all(each == layers[0] for each in layers)


def _table(runs: Sequence[RunRecord], names: Sequence[str], worths: Sequence[Worth], label: str) -> Markup:
    stages = [stage for stage in STAGES if any(stage in found.by_stage for found in worths)]
    label = " or ".join(dict.fromkeys(found.name for found in worths if found.name)) or label
    headings = ("run", "criterion", *COSTS.values(), *stages, "time", "state")
    rows = (_row(run, name, found, stages) for run, name, found in zip(runs, names, worths, strict=True))
    return table(headings, rows, caption=f"Shares that are left, and {label} of the networks", class_="numbers")


def _row(run: RunRecord, name: str, found: Worth, stages: Sequence[str]) -> Iterator[str]:
    yield name
    yield run.criterion
    yield from (percent(run.shares[kind]) if kind in run.shares else "–" for kind in COSTS)
    yield from (found.shown(found.by_stage[stage]) if stage in found.by_stage else "–" for stage in stages)
    yield "–" if run.seconds is None else duration(run.seconds)
    yield status(run)
