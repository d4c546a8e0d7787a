"""The lines of a table, and how a terminal and Markdown show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ifso_repro.jobs import Job
from ifso_repro.results import AnyResult, Result
from ifso_repro.schema import Reported, Row, Study
from ifso_repro.statistics import Runs, Spread, last_top1, otherwise

if TYPE_CHECKING:
    from rich.table import Table


NOT_RUN, UNKNOWN = "not run", "–"

NAMES = {
    "ifso": "IFSO",
    "group-fisher": "Group Fisher",
    "magnitude": "magnitude",
    "magnitude-average": "magnitude-A",
    "true-loss": "the default run",
    "random": "random",
}

PAPER_NAMES = {"ifso": "IFSO", "group-fisher": "GFP"}

HEADINGS = ("from", "Method", "MACs removed", "base", "pruned", "drop", "best epoch", "runs")

WORDS = 2


def signed(number: float) -> str:
    """With a proper minus sign, and no −0.00.

    >>> signed(-0.22), signed(-0.001)
    ('−0.22', '0.00')
    """
    text = f"{number:.2f}"
    return "0.00" if float(text) == 0 else text.replace("-", "−")


def percent(share: float) -> str:
    """A share as people read it.

    >>> percent(0.7)
    '70 %'
    """
    return f"{share * 100:.10g} %"


def _weights_kept(group: list[Result]) -> str:
    return f"{Spread.of([100 * result.params_kept for result in group]).mean:.1f} %"


def _prune_seconds(group: list[Result]) -> str:
    return f"{Spread.of([result.prune_seconds for result in group]).mean:.0f}"


EXTRA: Mapping[str, tuple[str, Callable[[list[Result]], str]]] = {
    "params_kept": ("weights kept", _weights_kept),
    "prune_seconds": ("seconds of pruning", _prune_seconds),
}
"""Columns that a study may have beside the usual: heading, and what is said of a group of runs."""


def headings(study: Study) -> Line:
    """Of all columns of a study."""
    return (*HEADINGS, *(EXTRA[column][0] for column in study.columns))


def reported(row: Row, study: Study) -> list[Line]:
    """What the paper and others report: in a table of the row, in another study of its variants."""
    if any(variant.label for variant in study.variants):
        told = [(variant.label, variant.paper.get(row.name)) for variant in study.variants]
        return [_reported("paper", label, line, study) for label, line in told if line]
    found = [_reported("rival", noted(rival.method, rival.note), rival, study) for rival in row.rivals]
    for criterion in sorted(row.paper, key=lambda name: name == "ifso"):
        line = row.paper[criterion]
        name = f"{PAPER_NAMES.get(criterion, criterion)}-{row.removed * 100:.10g}"
        found.append(_reported("paper", noted(name, line.note), line, study, best=criterion == "ifso"))
        if line.last is not None:
            found.append(_reported("paper", f"{name} (last epoch)", line, study, last=line.last))
    return found


def noted(name: str, note: str) -> str:
    """A name with a note in brackets, if there is one."""
    return f"{name} ({note})" if note else name


def _reported(
    whose: str, name: str, line: Reported, study: Study, *, last: float | None = None, best: bool = False
) -> Line:
    pruned = line.pruned if last is None else last
    base = UNKNOWN if line.base is None else f"{line.base:.2f}"
    drop = UNKNOWN if line.base is None else signed(line.base - pruned)
    kept = {"params_kept": None if line.params_kept is None else f"{line.params_kept:.1f} %"}
    extra = [kept.get(column) or UNKNOWN for column in study.columns]
    best_epoch = f"{pruned:.2f}" if best else UNKNOWN
    return whose, name, f"{line.removed:.1f} %", base, f"{pruned:.2f}", drop, best_epoch, UNKNOWN, *extra


def by_method(jobs: Iterable[Job]) -> list[list[Job]]:
    """The jobs of a row by criterion and variant: those of a list differ in their recipes."""
    found: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        found.setdefault((job.criterion, job.variant.label), []).append(job)
    return list(found.values())


def named(jobs: Sequence[Job]) -> str:
    """A method and its recipes."""
    recipes = ", ".join(f"“{job.recipe}”" for job in jobs)
    return f"{jobs[0].variant.label or NAMES[jobs[0].criterion]}, recipe{'s' if len(jobs) > 1 else ''} {recipes}"


def ours(jobs: Sequence[Job], runs: Runs, study: Study) -> list[Line]:
    """Of one method: a line for each way that was run, and one for all recipes that were not."""
    found = [
        ("ours", ", ".join((named([job]), *otherwise(job, group[0]), *_shared(group))), *_numbers(group, study))
        for job in jobs
        for group in runs.of(job)
    ]
    return [*found, *not_run([job for job in jobs if not runs.of(job)], 4, len(study.columns))]


def not_run(jobs: Sequence[Job], numbers: int, more: int = 0) -> list[Line]:
    """One line for recipes of a method that nothing was run with: so many cells before the seeds and after them."""
    if not jobs:
        return []
    return [("ours", named(jobs), percent(jobs[0].row.removed), *[NOT_RUN] * numbers, "0 seeds", *[NOT_RUN] * more)]


def _shared(group: list[Result]) -> list[str]:
    """Did several seeds fine-tune the same pruned network?"""
    seeds = [result.prune.get("seed", result.seed) for result in group]
    return ["one pruning"] if len(set(seeds)) < len(seeds) else []


def seeds_of(group: Sequence[AnyResult]) -> str:
    """How many runs a group has, in words."""
    return f"{len(group)} seed{'s' if len(group) > 1 else ''}"


def _numbers(group: list[Result], study: Study) -> Line:
    base = Spread.of([result.base_top1 for result in group])
    return (
        f"{Spread.of([100 * (1 - result.macs_kept) for result in group]).mean:.1f} %",
        str(base) if base.deviation else f"{base.mean:.2f}",
        str(last_top1(group)),
        signed(Spread.of([result.base_top1 - result.last_top1 for result in group]).mean),
        str(Spread.of([result.best_top1 for result in group])),
        seeds_of(group),
        *(EXTRA[column][1](group) for column in study.columns),
    )


Line = tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """A table: ``headings``, ``sections`` of lines of cells, ``notes`` below. The first ``words`` columns are text."""

    title: str
    headings: Line
    sections: tuple[tuple[Line, ...], ...]
    notes: tuple[str, ...] = ()
    words: int = 1


def as_rich(grid: Grid) -> Table:
    """For a terminal: words to the left, numbers to the right, a rule between sections."""
    from rich.table import Table
    from rich.text import Text

    caption = Text("\n".join(grid.notes)) if grid.notes else None
    table = Table(title=Text(grid.title), caption=caption, title_justify="left", caption_justify="left")
    for number, heading in enumerate(grid.headings):
        table.add_column(Text(heading), justify="left" if number < grid.words else "right")
    for lines in grid.sections:
        for cells in lines:
            table.add_row(*(Text(cell) for cell in cells))
        table.add_section()
    return table


def as_markdown(grid: Grid) -> str:
    r"""As Markdown, where sections merely follow each other.

    >>> print(as_markdown(Grid("Sums", ("a", "a + a"), ((("1", "2"),), (("|x|", "2|x|"),)))))
    ## Sums
    <BLANKLINE>
    | a | a + a |
    |---|---:|
    | 1 | 2 |
    | \|x\| | 2\|x\| |
    <BLANKLINE>
    """
    rule = "|" + "---|" * grid.words + "---:|" * (len(grid.headings) - grid.words)
    lines = [cells for section in grid.sections for cells in section]
    table = [_markdown_line(grid.headings), rule, *map(_markdown_line, lines)]
    return "\n".join([f"## {grid.title}", "", *table, "", *(f"{note}\n" for note in grid.notes)])


def _markdown_line(cells: Line) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
