"""The lines of a table, and how a terminal and Markdown show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ifso_repro.jobs import Job
from ifso_repro.results import AnyResult
from ifso_repro.schema import Reported, Row, Study
from ifso_repro.statistics import Runs, Spread, last_top1, otherwise

if TYPE_CHECKING:
    from rich.table import Table

Line = tuple[str, ...]
NOT_RUN, UNKNOWN = "not run", "–"
NAMES = {
    "ifso": "IFSO",
    "group-fisher": "Group Fisher",
    "magnitude": "magnitude",
    "magnitude-average": "magnitude-A",
    "true-loss": "the default run",
    "random": "random",
    "unpruned": "the unpruned network",
    "scratch": "the default run's network, trained from scratch",
}
PAPER_NAMES = {"ifso": "IFSO", "group-fisher": "GFP"}
HEADINGS = ("from", "Method", "MACs removed", "base", "pruned", "drop", "best epoch", "runs")
DETECTION_HEADINGS = (
    "from", "Method", "MACs removed", "base mAP", "pruned", "drop", "mAP50", "mAP75", "memory, GB", "runs"
)  # fmt: skip
WORDS = 2
GIGA = 1e9


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


def _number(value: float | None, decimals: int = 2) -> str:
    return UNKNOWN if value is None else f"{value:.{decimals}f}"


def _mean(values: Sequence[float]) -> float:
    return Spread.of(values).mean


EXTRA: Mapping[str, tuple[str, Callable[[Sequence[Any]], str]]] = {
    "params_kept": ("weights kept", lambda group: f"{_mean([100 * result.params_kept for result in group]):.1f} %"),
    "prune_seconds": ("seconds of pruning", lambda group: f"{_mean([result.prune_seconds for result in group]):.0f}"),
}
"""Columns that a study may have beside the usual: heading, and the cell of a group of runs."""


def headings(study: Study, *, detects: bool) -> Line:
    """The headings of all columns of a study."""
    return DETECTION_HEADINGS if detects else (*HEADINGS, *(EXTRA[column][0] for column in study.columns))


def reported(row: Row, study: Study) -> list[Line]:
    """What the paper and others report: in a table of the row, in another study of its variants."""
    if any(variant.label for variant in study.variants):
        known = [(variant.label, variant.paper.get(row.name)) for variant in study.variants]
        return [_reported(row, study, "paper", label, line) for label, line in known if line]
    lines = [_reported(row, study, "rival", noted(rival.method, rival.note), rival) for rival in row.rivals]
    for criterion in sorted(row.paper, key=lambda name: name == "ifso"):
        line = row.paper[criterion]
        name = f"{PAPER_NAMES.get(criterion, criterion)}-{row.removed * 100:.10g}"
        lines.append(_reported(row, study, "paper", noted(name, line.note), line, best=criterion == "ifso"))
        if line.last is not None:
            lines.append(_reported(row, study, "paper", f"{name} (last epoch)", line, last=line.last))
    return lines


def noted(name: str, note: str) -> str:
    """A name with a note in brackets, if there is one."""
    return f"{name} ({note})" if note else name


def _reported(
    row: Row, study: Study, whose: str, name: str, line: Reported, *, last: float | None = None, best: bool = False
) -> Line:
    pruned = line.pruned if last is None else last
    drop = UNKNOWN if line.base is None else signed(line.base - pruned)
    first = (whose, name, f"{line.removed:.1f} %", _number(line.base), _number(pruned), drop)
    if row.detects:
        return (*first, _number(line.map50), _number(line.map75), _number(line.memory, 1), UNKNOWN)
    kept = {"params_kept": UNKNOWN if line.params_kept is None else f"{line.params_kept:.1f} %"}
    extra = [kept.get(column, UNKNOWN) for column in study.columns]
    return (*first, _number(pruned if best else None), UNKNOWN, *extra)


def by_method(jobs: Iterable[Job]) -> list[list[Job]]:
    """The jobs of a row by criterion and variant: those of a list differ in their recipes."""
    methods: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        methods.setdefault((job.criterion, job.variant.label), []).append(job)
    return list(methods.values())


def ours(jobs: Sequence[Job], runs: Runs, study: Study) -> list[Line]:
    """The lines of one method: one for each way that was run, and one for all recipes that were not."""
    numbers = _detection_numbers if jobs[0].row.detects else _numbers
    lines = [
        ("ours", ", ".join((_named([job]), *otherwise(job, group[0]), *_shared(group))), *numbers(group, study))
        for job in jobs
        for group in runs.of(job)
    ]
    missing = [job for job in jobs if not runs.of(job)]
    if missing:
        row, extra = missing[0].row, [NOT_RUN] * len(study.columns)
        cells = [NOT_RUN] * (len(DETECTION_HEADINGS if row.detects else HEADINGS) - 4)
        lines.append(("ours", _named(missing), percent(row.removed), *cells, "0 seeds", *extra))
    return lines


def _named(jobs: Sequence[Job]) -> str:
    """A method and its recipes."""
    recipes = ", ".join(f"“{job.recipe}”" for job in jobs)
    return f"{jobs[0].variant.label or NAMES[jobs[0].criterion]}, recipe{'s' if len(jobs) > 1 else ''} {recipes}"


def _shared(group: Sequence[AnyResult]) -> list[str]:
    """Words for several seeds that fine-tuned the same pruned network."""
    seeds = [result.prune.get("seed", result.seed) for result in group]
    return ["one pruning"] if len(set(seeds)) < len(seeds) else []


def _numbers(group: Sequence[Any], study: Study) -> Line:
    best = str(Spread.of([result.best_top1 for result in group]))
    return (*_first_numbers(group), best, _seeds(group), *(EXTRA[column][1](group) for column in study.columns))


def _detection_numbers(group: Sequence[Any], _: Study) -> Line:
    after = [str(Spread.of([run.after[name] for run in group])) for name in ("map50", "map75")]
    pruned, unpruned = (_mean([run.memory[name] / GIGA for run in group]) for name in ("pruned", "unpruned"))
    return (*_first_numbers(group), *after, f"{pruned:.1f} ({unpruned:.1f})", _seeds(group))


def _first_numbers(group: Sequence[AnyResult]) -> Line:
    """MACs removed, and what the networks were worth before and after."""
    base = Spread.of([result.worth("base") for result in group])
    return (
        f"{_mean([100 * (1 - result.macs_kept) for result in group]):.1f} %",
        str(base) if base.deviation else f"{base.mean:.2f}",
        str(last_top1(group)),
        signed(_mean([result.worth("base") - result.worth("last") for result in group])),
    )


def _seeds(group: Sequence[AnyResult]) -> str:
    return f"{len(group)} seed{'s' if len(group) > 1 else ''}"


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
