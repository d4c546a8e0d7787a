"""Sections that are mostly charts: layers, scores, when units went, the course of the run and of the fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator

from ifso.report.markup import Markup, element, table
from ifso.report.parts import chart, duration, folded, pair, said, section
from ifso.runs.record import RunRecord
from ifso.runs.structure import Structure
from ifso.runs.values import percent

COUPLED = "{} groups couple layers that must lose the same channels: those have the same number and colour. "
HOW = "Point at a column or move with the arrow keys; a click or Enter shows its units."
FIRST = (
    "How many units of each group had which score in the first step, after normalisation: by this they were compared. "
    "On the left of each column those that are still there, on the right those that went, sooner or later."
)
LAST = (
    "How many of the units that are left had which score in the last step, before normalisation. "
    "Scores of units that went before were not kept."
)
WHEN = (
    "From the first removal, above, to the last, below. "
    "The stronger the colour, the more of a group's units went at that time."
)


def structure(run: RunRecord, number: int) -> Markup:
    """What is left of each layer, as in Fig. 3 and 4 of the paper."""
    title, found = "Structure: what is left of each layer", run.structure
    if not found.layers:
        return section("structure", number, title, said("The folder does not tell the layers of this network."))
    coupled = COUPLED.format(len(found.coupled)) if found.coupled else ""
    words = f"Output channels of {len(found.layers)} layers, in the order of the network. {coupled}{HOW}"
    headings = ("layer", "kept", "of", "share", "group", "coupled")
    rows = (_cells(found, place) for place in range(len(found.layers)))
    numbers = table(headings, rows, caption="Output channels", class_="numbers")
    return section(
        "structure",
        number,
        title,
        said(words),
        chart("structure", "Channels kept of each layer"),
        element("div", class_="detail", data_detail=True, aria_live="polite"),
        folded(f"Table of all {len(found.layers)} layers", numbers, len(found.layers)),
    )


def _cells(found: Structure, place: int) -> Iterator[str]:
    layer = found.layers[place]
    yield layer.name
    yield f"{layer.kept:,}"
    yield f"{layer.channels:,}"
    yield percent(layer.kept / layer.channels, 0) if layer.channels else ""
    yield ", ".join(found.groups[each].name for each in layer.groups) or "frozen"
    yield ", ".join(str(found.coupled[each]) for each in layer.groups if each in found.coupled)


def scores(run: RunRecord, number: int) -> Markup:
    """How scores are distributed in each group."""
    title = "Scores of the units, layer by layer"
    if run.scores is None or not any(value > 0 for values in run.scores.by_group.values() for value in values):
        return section("scores", number, title, said("This folder holds no scores."))
    words = FIRST if run.scores.first else LAST
    return section("scores", number, title, said(words), chart("scores", "Scores by group"))


def when(run: RunRecord, number: int) -> Markup:
    """A strip of heat for each group."""
    title = "Which units went when"
    if not run.removals or not run.structure.groups:
        return section("when", number, title, said("This folder does not tell when units were removed."))
    return section("when", number, title, said(WHEN), chart("when", "Removed units by group and time"))


def course(run: RunRecord, number: int) -> Markup:
    """Costs and loss along the run."""
    title = "Costs and loss along the run"
    if not run.removals:
        return section("course", number, title, said("There are no removals to show."))
    took = f" in {duration(run.seconds)}" if run.seconds is not None else ""
    words = f"{run.removals[-1].number:,} removals{took}. The loss is that of the training batches of each step."
    charts = pair(chart("costs", "Shares of the costs that are left"), chart("loss", "Loss of each step"))
    return section("course", number, title, said(words), charts)


def tuning(run: RunRecord, number: int) -> Markup:
    """The curves of the fine-tuning."""
    title = "Fine-tuning"
    if run.tuning is None:
        return section("tuning", number, title, said("The network was not fine-tuned (ifso finetune RUN)."))
    if not run.tuning.epochs:
        return section("tuning", number, title, said("No epoch is over yet."))
    spent = sum(epoch.get("seconds", 0.0) for epoch in run.tuning.epochs)
    count = len(run.tuning.epochs)
    words = f"{count} epoch{'' if count == 1 else 's'} in {duration(spent)}, judged by the {run.tuning.split} set."
    charts = pair(chart("quality", "Accuracy after each epoch"), chart("training", "Loss of each epoch"))
    return section("tuning", number, title, said(words), charts)
