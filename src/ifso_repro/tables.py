"""The paper's tables and studies rendered: paper, rivals and ours, with what was not run marked as such."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso_repro.config import find_row, find_study, studies, study
from ifso_repro.jobs import Job
from ifso_repro.results import AnyResult, keep_text
from ifso_repro.schema import CRITERIA, DEFAULT_RUN, TAUGHT, Study
from ifso_repro.statistics import Difference, Runs, Spread, last_top1, of_other_networks, otherwise
from ifso_repro.table_lines import (
    NAMES,
    NOT_RUN,
    PAPER_NAMES,
    UNKNOWN,
    WORDS,
    Grid,
    Line,
    as_markdown,
    as_rich,
    by_method,
    headings,
    ours,
    percent,
    reported,
    signed,
)

if TYPE_CHECKING:
    from rich.table import Table

COMMAND = "ifso repro --table"

EXPLANATION = (
    "Top-1 on the test set in per cent. Numbers of the paper and of others are as they report them. Ours under "
    "“pruned” are the last epoch, mean ± standard deviation over the seeds; “drop” is base less pruned, “best epoch” "
    "the best on the test set. “Not run” is a cell that no run has filled; recipes that were not run share a line."
)

MASKS = {
    "layers": "a mask entry for each layer that reads a unit, as in the authors' program",
    "shared": "one mask entry for all layers that read a unit, as in Definition 1",
}
"""What ``coupled`` says of a criterion, in words."""

COMPARED = (
    "The first less the other, last epoch, same budget and recipe. Spread is √(s₁² + s₂²) of the two standard "
    "deviations over seeds; where it is not below the difference, or not known, nothing is claimed."
)

NOTE = (
    "Average precision on the test set in per cent: mAP over overlaps from 0.5 to 0.95, mAP50 and mAP75 at one. "
    "Numbers of the paper and of others are as they report them; ours are of the last epoch, mean ± standard "
    "deviation over the seeds. “Memory” is that of a step of fine-tuning at its peak in 10⁹ bytes, without a teacher; "
    "of ours it is that of the pruned network, and in brackets that of the unpruned one. “Not run” is a cell that no "
    "run has filled."
)

STRUCTURE_NOTE = "Channels that a layer reads: before, and kept, with the per cent that is removed in brackets."
LAYERS = {
    **{f"neck lateral-{level}": (f"backbone.fpn.inner_blocks.{level}.0", 512 * 2**level) for level in range(3)},
    **{f"neck fpn-{level}": (f"backbone.fpn.layer_blocks.{level}.0", 256) for level in range(3)},
    "neck fpn-3": ("backbone.fpn.extra_blocks.p6", 256),
    "neck fpn-4": ("backbone.fpn.extra_blocks.p7", 256),
    **{f"head cls-{depth}": (f"head.classification_head.conv.{depth}.0", 256) for depth in range(4)},
    **{f"head reg-{depth}": (f"head.regression_head.conv.{depth}.0", 256) for depth in range(4)},
    "head retina-cls": ("head.classification_head.cls_logits", 256),
    "head retina-reg": ("head.regression_head.bbox_reg", 256),
}
"""Layers of RetinaNet on a ResNet-50 by the paper's names: torchvision's name, and the channels that they read."""


def render(name: str, results: Iterable[AnyResult]) -> list[Table]:
    """The tables of a study (``"table2"``, ``"figure5"`` …) or of one row, for a terminal."""
    first, *others = grids(name, Runs(results))
    explained = () if NOTE in first.notes else (EXPLANATION,)
    usual = usual_options(study(name, seeds=1))
    first = replace(first, notes=(*explained, *first.notes, *([usual] if usual else [])))
    return [as_rich(grid) for grid in (first, *others)]


def markdown(results: Iterable[AnyResult], names: Sequence[str] | None = None) -> str:
    """All studies, or those of ``names``, as one page of Markdown."""
    runs = Runs(results)
    made = f"Written by `{COMMAND}` from the {len(runs.all)} results in `repro/results/`, never by hand."
    chosen = list(names or studies())
    usual = usual_options(job for name in chosen for job in study(name, seeds=1))
    pages = [as_markdown(grid) for name in chosen for grid in grids(name, runs)]
    pages += [as_markdown(_where(runs))] if runs.all else []
    head = [f"{words}\n" for words in ("# The paper's tables, run again", made, EXPLANATION, usual) if words]
    return "\n".join([*head, *pages])


def write_markdown(results: Iterable[AnyResult], path: Path, names: Sequence[str] | None = None) -> None:
    """Write the page of :func:`markdown` to a file, whole or not at all."""
    keep_text(path, markdown(results, names))


def grids(name: str, runs: Runs) -> list[Grid]:
    """A table for each network of a study and, where criteria stand line by line, what may be claimed."""
    chosen = find_study(name)
    jobs: dict[str, list[Job]] = defaultdict(list)
    for job in shown(name, runs):
        jobs[job.row.task].append(job)
    make = _matrix if chosen.layout == "matrix" else _table
    tables = []
    for task, own in jobs.items():
        title = _title(chosen, task if len(jobs) > 1 else "")
        tables.append(make(chosen, title, own, runs))
        structure = structure_table(f"{title}, neck and head", own, runs) if own[0].row.detects else None
        tables += [structure] if structure else []
    every = [job for task in jobs for job in jobs[task]]
    for first in (DEFAULT_RUN, "ifso") if chosen.layout == "lines" else ():
        compared = _comparison(_title(chosen, f"{NAMES[first]} against the others"), first, every, runs)
        tables += [compared] if any(compared.sections) else []
        every = [job for job in every if job.criterion != first]
    return tables


def shown(name: str, runs: Runs) -> list[Job]:
    """One run of each kind in a study: those planned, and whatever else was run of its rows and variants.

    Where a variant is the row itself, only recipes of the study count, if it has its own.
    """
    chosen, planned = find_study(name), {job.name: job for job in study(name, seeds=1)}
    for row, variant in product(map(find_row, chosen.rows), chosen.variants):
        for result in runs.of_row(row):
            job = Job(row, result.criterion, result.recipe, variant=variant)
            if job.changes != result.variant or result.criterion not in (chosen.criteria or CRITERIA):
                continue
            if job.changes or not chosen.recipes or result.recipe in chosen.recipes:
                planned.setdefault(job.name, job)
    places = {row: place for place, row in enumerate(chosen.rows)}
    return sorted(planned.values(), key=lambda job: places[job.row.name])


def _title(chosen: Study, more: str) -> str:
    number = chosen.name.removeprefix("table")
    title = f"Table {number}: {chosen.title}" if number != chosen.name else chosen.title
    return f"{title}: {more}" if more else title


def _table(chosen: Study, title: str, jobs: list[Job], runs: Runs) -> Grid:
    """A section for each budget, also for one of which only others report something."""
    sections, detects, task = [], jobs[0].row.detects, jobs[0].row.task
    for row in (row for row in map(find_row, chosen.rows) if row.task == task):
        methods = by_method(job for job in jobs if job.row.name == row.name)
        done = [line for method in methods for line in ours(method, runs, chosen)]
        sections.append((*reported(row, chosen), *done))
    notes = (*([NOTE] if detects else []), *_notes(chosen), *_teachers(jobs, runs))
    return Grid(title, headings(chosen, detects=detects), tuple(sections), notes, WORDS)


def _matrix(chosen: Study, title: str, jobs: list[Job], runs: Runs) -> Grid:
    """Criteria downwards, budgets to the right, the number of seeds in brackets."""
    budgets = sorted({job.row.removed for job in jobs})
    cells: dict[str, dict[float, str]] = defaultdict(dict)
    for job in jobs:
        group = runs.whole(job)
        other = ", ".join(("", *of_other_networks(job, group[0]))) if group else ""
        cell = f"{last_top1(group)} ({len(group)}{other})" if group else NOT_RUN
        cells[f"{NAMES[job.criterion]}, recipe “{job.recipe}”"][job.row.removed] = cell
    lines = tuple((name, *(line[budget] for budget in budgets)) for name, line in cells.items())
    return Grid(title, ("MACs removed", *map(percent, budgets)), (lines,), (*_notes(chosen), *_teachers(jobs, runs)))


def _teachers(jobs: Iterable[Job], runs: Runs) -> list[str]:
    """Who taught where it was not the unpruned network of the row, and what that teacher was worth."""
    taught = [job for job in jobs if job.teacher is not None]
    worth = [result.teacher["top1"] for job in taught for group in runs.of(job) for result in group if result.teacher]
    measured = f" ({Spread.of(worth).mean:.2f} %)" if worth else ""
    teachers = dict.fromkeys(job.teacher.title for job in taught if job.teacher is not None)
    return [f"“{TAUGHT}”: “patient”, taught by the unpruned {name}{measured}." for name in teachers]


def _notes(chosen: Study) -> tuple[str, ...]:
    return (chosen.note,) if chosen.note else ()


def usual_options(jobs: Iterable[Job]) -> str:
    """What options the rows give to criteria, in words; empty if they give none."""
    options = [(job.criterion, *item) for job in jobs for item in job.row.criterion.get(job.criterion, {}).items()]
    words = dict.fromkeys(f"{NAMES[criterion]} has {_option(key, value)}" for criterion, key, value in options)
    return f"Where a line says nothing else, {'; '.join(words)}." if words else ""


def _option(key: str, value: Any) -> str:
    """An option of a criterion, and what it means where that is known.

    >>> _option("coupled", "shared")
    'one mask entry for all layers that read a unit, as in Definition 1 (coupled=shared)'
    >>> _option("weights", "all")
    'weights=all'
    """
    named = f"{key}={value}"
    return f"{MASKS[value]} ({named})" if key == "coupled" and value in MASKS else named


def _comparison(title: str, first: str, jobs: list[Job], runs: Runs) -> Grid:
    """One criterion against each other one, budget by budget, wherever one of the two was run.

    Recipes that tell nothing share a line.
    """
    base = {(job.row.name, job.recipe): job for job in jobs if job.criterion == first}
    recipes: dict[str, dict[Line, list[str]]] = {job.row.name: {} for job in base.values()}
    for (row, recipe), one in base.items():
        for job in jobs:
            alike = (job.row.name, job.recipe) == (row, recipe) and job.criterion != first
            if alike and (runs.whole(one) or runs.whole(job)):
                compared = _compared(one, job, runs)
                own = "" if NOT_RUN in compared else recipe
                recipes[row].setdefault((own, NAMES[job.criterion], *compared), []).append(recipe)
    sections = tuple(
        tuple((row, ", ".join(names), *line[1:]) for line, names in lines.items()) for row, lines in recipes.items()
    )
    names = ("row", "recipe", f"{NAMES[first]} against", "difference", "spread", "seeds", "claim")
    return Grid(title, names, sections, (COMPARED,), words=3)


def _compared(one: Job, two: Job, runs: Runs) -> Line:
    """Both were fine-tuned for as long, and if one was pruned otherwise than the row says, so was the other."""
    ifso = runs.whole(one)
    other = runs.whole(two, otherwise(one, ifso[0]) if ifso else None)
    seeds = f"{len(ifso)} and {len(other)}"
    if not ifso or not other:
        return NOT_RUN, NOT_RUN, seeds, NOT_RUN
    difference = Difference.of(last_top1(ifso), last_top1(other))
    claim = ", ".join((difference.verdict, *of_other_networks(one, ifso[0])))
    return signed(difference.mean), UNKNOWN if difference.spread is None else f"{difference.spread:.2f}", seeds, claim


def _where(runs: Runs) -> Grid:
    """On what the runs were made."""
    machines: dict[Line, list[AnyResult]] = defaultdict(list)
    for result in runs.all:
        machines[result.hardware, result.torch, result.ifso].append(result)
    lines = tuple(
        (*machine, str(len(group)), f"{sum(run.seconds + run.prune_seconds for run in group) / 3600:.1f}")
        for machine, group in sorted(machines.items())
    )
    return Grid("Where it was run", ("hardware", "torch", "ifso", "results", "hours, added up"), (lines,), words=3)


def structure_table(title: str, jobs: Sequence[Job], runs: Runs) -> Grid | None:
    """Channels kept in the neck and in each layer of the head, in the paper and by the first seed of our prunings.

    None where nothing was reported or run.
    """
    kept: dict[str, dict[str, int]] = {}
    for row in (find_row(name) for name in dict.fromkeys(job.row.name for job in jobs)):
        budget = f"{row.removed * 100:.10g}"
        for criterion, line in row.paper.items():
            if line.structure:
                kept[f"paper, {PAPER_NAMES[criterion]}-{budget}"] = dict(line.structure)
        for job in (job for job in jobs if job.row.name == row.name):
            name = f"{job.variant.label}, {budget} %" if job.variant.label else f"{NAMES[job.criterion]}-{budget}"
            for group in runs.of(job)[:1]:
                read = group[0].channels
                kept.setdefault(name, {layer: read[own][1] for layer, (own, _) in LAYERS.items() if own in read})
    lines = tuple(
        (layer, str(channels), *(_share(read.get(layer), channels) for read in kept.values()))
        for layer, (_, channels) in LAYERS.items()
    )
    return Grid(title, ("layer", "channels", *kept), (lines,), (STRUCTURE_NOTE,)) if kept else None


def _share(kept: int | None, channels: int) -> str:
    """What is kept, and the per cent that is not.

    >>> _share(136, 256), _share(None, 256)
    ('136 (46.9 %)', '–')
    """
    return UNKNOWN if kept is None else f"{kept} ({100 * (1 - kept / channels):.1f} %)"
