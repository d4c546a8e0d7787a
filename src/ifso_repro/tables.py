"""The paper's tables and studies rendered: paper, rivals and ours, with what was not run marked as such."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.errors import IfsoError
from ifso_repro.config import find_row, find_study, studies, study
from ifso_repro.jobs import Job
from ifso_repro.results import AnyResult, DetectionResult
from ifso_repro.schema import TAUGHT, Reported, Row, Study
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
    named,
    not_run,
    noted,
    ours,
    percent,
    reported,
    seeds_of,
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
    "IFSO less the other criterion, last epoch, same budget and recipe. Spread is √(s₁² + s₂²) of the two standard "
    "deviations over seeds; where it is not below the difference, or not known, nothing is claimed."
)


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
    """Write that page to a file, whole or not at all."""
    from ifso.common.files import write_text

    text = markdown(results, names)
    try:
        write_text(path, text)
    except OSError as error:
        raise IfsoError(f"{path} cannot be written: {' '.join(str(error).split())}") from error


def grids(name: str, runs: Runs) -> list[Grid]:
    """A table for each network of a study and, where criteria stand line by line, what may be claimed."""
    chosen = find_study(name)
    jobs: dict[str, list[Job]] = defaultdict(list)
    for job in study(name, seeds=1):
        jobs[job.row.task].append(job)
    make = _matrix if chosen.layout == "matrix" else _table
    found = []
    for task, own in jobs.items():
        title = _title(chosen, task if len(jobs) > 1 else "")
        if own[0].row.detects:
            structure = structure_table(f"{title}, neck and head", own, runs)
            found += [detection_table(title, own, runs, _notes(chosen)), *([structure] if structure else [])]
        else:
            found.append(make(chosen, title, own, runs))
    every = [job for task in jobs for job in jobs[task]]
    if chosen.layout == "lines" and {"ifso"} < {job.criterion for job in every}:
        found.append(_comparison(_title(chosen, "IFSO against the others"), every, runs))
    return found


def _title(chosen: Study, more: str) -> str:
    number = chosen.name.removeprefix("table")
    title = f"Table {number}: {chosen.title}" if number != chosen.name else chosen.title
    return f"{title}: {more}" if more else title


def _table(chosen: Study, title: str, jobs: list[Job], runs: Runs) -> Grid:
    """A section for each budget."""
    sections = []
    for name in dict.fromkeys(job.row.name for job in jobs):
        methods = by_method(job for job in jobs if job.row.name == name)
        done = [line for method in methods for line in ours(method, runs, chosen)]
        sections.append((*reported(find_row(name), chosen), *done))
    return Grid(title, headings(chosen), tuple(sections), (*_notes(chosen), *_teachers(jobs, runs)), WORDS)


def _matrix(chosen: Study, title: str, jobs: list[Job], runs: Runs) -> Grid:
    """Criteria downwards, budgets to the right, the number of seeds in brackets."""
    budgets = sorted({job.row.removed for job in jobs})
    cells: dict[str, dict[float, str]] = defaultdict(dict)
    for job in jobs:
        group = runs.whole(job)
        other = ", ".join(("", *of_other_networks(job, group[0]))) if group else ""
        cell = f"{last_top1(group)} ({len(group)}{other})" if group else NOT_RUN
        cells[f"{NAMES[job.criterion]}, recipe “{job.recipe}”"][job.row.removed] = cell
    lines = tuple((name, *(found[budget] for budget in budgets)) for name, found in cells.items())
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
    said = dict.fromkeys(f"{NAMES[criterion]} has {_option(key, value)}" for criterion, key, value in options)
    return f"Where a line says nothing else, {'; '.join(said)}." if said else ""


def _option(key: str, value: Any) -> str:
    """An option of a criterion, and what it means where that is known.

    >>> _option("coupled", "shared")
    'one mask entry for all layers that read a unit, as in Definition 1 (coupled=shared)'
    >>> _option("weights", "all")
    'weights=all'
    """
    named = f"{key}={value}"
    return f"{MASKS[value]} ({named})" if key == "coupled" and value in MASKS else named


def _comparison(title: str, jobs: list[Job], runs: Runs) -> Grid:
    """IFSO against each other criterion, budget by budget; recipes that tell nothing share a line."""
    base = {(job.row.name, job.recipe): job for job in jobs if job.criterion == "ifso"}
    recipes: dict[str, dict[Line, list[str]]] = {job.row.name: {} for job in base.values()}
    for (row, recipe), ifso in base.items():
        for job in jobs:
            if (job.row.name, job.recipe) == (row, recipe) and job is not ifso:
                compared = _compared(ifso, job, runs)
                alike = "" if NOT_RUN in compared else recipe
                recipes[row].setdefault((alike, NAMES[job.criterion], *compared), []).append(recipe)
    sections = tuple(
        tuple((row, ", ".join(told), *line[1:]) for line, told in lines.items()) for row, lines in recipes.items()
    )
    names = ("row", "recipe", "IFSO against", "difference", "spread", "seeds", "claim")
    return Grid(title, names, sections, (COMPARED,), words=3)


def _compared(one: Job, two: Job, runs: Runs) -> Line:
    """Both were fine-tuned for as long, and if one was pruned otherwise than the row says, so was the other."""
    ifso = runs.whole(one)
    other = runs.whole(two, otherwise(one, ifso[0]) if ifso else None)
    seeds = f"{len(ifso)} and {len(other)}"
    if not ifso or not other:
        return NOT_RUN, NOT_RUN, seeds, NOT_RUN
    found = Difference.of(last_top1(ifso), last_top1(other))
    claim = ", ".join((found.verdict, *of_other_networks(one, ifso[0])))
    return signed(found.mean), UNKNOWN if found.spread is None else f"{found.spread:.2f}", seeds, claim


def _where(runs: Runs) -> Grid:
    """On what the runs were made."""
    places: dict[Line, list[AnyResult]] = defaultdict(list)
    for result in runs.all:
        places[result.hardware, result.torch, result.ifso].append(result)
    lines = tuple(
        (*place, str(len(group)), f"{sum(run.seconds + run.prune_seconds for run in group) / 3600:.1f}")
        for place, group in sorted(places.items())
    )
    return Grid("Where it was run", ("hardware", "torch", "ifso", "results", "hours, added up"), (lines,), words=3)


HEADINGS = ("from", "Method", "MACs removed", "base mAP", "pruned", "drop", "mAP50", "mAP75", "memory, GB", "runs")

NOTE = (
    "Average precision on the test set in per cent: mAP over overlaps from 0.5 to 0.95, mAP50 and mAP75 at one. "
    "Numbers of the paper and of others are as they report them; ours are of the last epoch, mean ± standard "
    "deviation over the seeds. “Memory” is that of a step of fine-tuning at its peak in 10⁹ bytes, without a teacher; "
    "of ours it is that of the pruned network, and in brackets that of the unpruned one. “Not run” is a cell that no "
    "run has filled."
)

STRUCTURE_NOTE = "Channels that a layer reads: before, and kept, with the per cent that is removed in brackets."

GIGA = 1e9

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


def detection_table(title: str, jobs: Sequence[Job], runs: Runs, notes: Sequence[str] = ()) -> Grid:
    """A section for each budget."""
    sections = []
    for name in dict.fromkeys(job.row.name for job in jobs):
        methods = by_method(job for job in jobs if job.row.name == name)
        done = [line for method in methods for line in _ours(method, runs)]
        sections.append((*_reported(find_row(name)), *done))
    return Grid(title, HEADINGS, tuple(sections), (NOTE, *notes), words=2)


def _reported(row: Row) -> list[Line]:
    """What others and the paper report, IFSO last."""
    found = [_line("rival", noted(rival.method, rival.note), rival) for rival in row.rivals]
    for criterion in sorted(row.paper, key=lambda name: name == "ifso"):
        line = row.paper[criterion]
        name = f"{PAPER_NAMES.get(criterion, criterion)}-{row.removed * 100:.10g}"
        found.append(_line("paper", noted(name, line.note), line))
    return found


def _line(whose: str, name: str, line: Reported) -> Line:
    drop = UNKNOWN if line.base is None else signed(line.base - line.pruned)
    memory = UNKNOWN if line.memory is None else f"{line.memory:.1f}"
    base, *at_one = (_known(number) for number in (line.base, line.map50, line.map75))
    return whose, name, f"{line.removed:.1f} %", base, f"{line.pruned:.2f}", drop, *at_one, memory, UNKNOWN


def _known(number: float | None) -> str:
    return UNKNOWN if number is None else f"{number:.2f}"


def _ours(jobs: Sequence[Job], runs: Runs) -> list[Line]:
    """Of one method: a line for each way that was run, and one for all recipes that were not."""
    found = [
        ("ours", ", ".join((named([job]), *otherwise(job, group[0]))), *_numbers(group))
        for job in jobs
        for group in _groups(job, runs)
    ]
    return [*found, *not_run([job for job in jobs if not _groups(job, runs)], 6)]


def _groups(job: Job, runs: Runs) -> list[list[DetectionResult]]:
    found = [[result for result in group if isinstance(result, DetectionResult)] for group in runs.of(job)]
    return [group for group in found if group]


def _numbers(group: Sequence[DetectionResult]) -> Line:
    pruned, unpruned = (Spread.of([run.memory[name] / GIGA for run in group]).mean for name in ("pruned", "unpruned"))
    after = [Spread.of([run.after[name] for run in group]) for name in ("map", "map50", "map75")]
    return (
        f"{Spread.of([100 * (1 - run.macs_kept) for run in group]).mean:.1f} %",
        f"{Spread.of([run.base_map for run in group]).mean:.2f}",
        str(after[0]),
        signed(Spread.of([run.base_map - run.last_map for run in group]).mean),
        str(after[1]),
        str(after[2]),
        f"{pruned:.1f} ({unpruned:.1f})",
        seeds_of(group),
    )


def structure_table(title: str, jobs: Sequence[Job], runs: Runs) -> Grid | None:
    """Channels kept in the neck and in each layer of the head: of the paper, and of the first seed of our prunings.

    None where nobody has said or run anything.
    """
    kept: dict[str, dict[str, int]] = {}
    for row in (find_row(name) for name in dict.fromkeys(job.row.name for job in jobs)):
        budget = f"{row.removed * 100:.10g}"
        for criterion, line in row.paper.items():
            if line.structure:
                kept[f"paper, {PAPER_NAMES[criterion]}-{budget}"] = dict(line.structure)
        for job in (job for job in jobs if job.row.name == row.name):
            groups = _groups(job, runs)
            if groups:
                name = f"{job.variant.label}, {budget} %" if job.variant.label else f"{NAMES[job.criterion]}-{budget}"
                kept.setdefault(name, _read(groups[0][0]))
    lines = tuple(
        (layer, str(channels), *(_share(found.get(layer), channels) for found in kept.values()))
        for layer, (_, channels) in LAYERS.items()
    )
    return Grid(title, ("layer", "channels", *kept), (lines,), (STRUCTURE_NOTE,)) if kept else None


def _read(run: DetectionResult) -> dict[str, int]:
    """Channels that layers read, by the paper's names."""
    return {layer: run.channels[name][1] for layer, (name, _) in LAYERS.items() if name in run.channels}


def _share(kept: int | None, channels: int) -> str:
    """What is kept, and the per cent that is not.

    >>> _share(136, 256), _share(None, 256)
    ('136 (46.9 %)', '–')
    """
    return UNKNOWN if kept is None else f"{kept} ({100 * (1 - kept / channels):.1f} %)"
