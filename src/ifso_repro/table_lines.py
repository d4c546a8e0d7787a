"""The lines of a table, and how a terminal and Markdown show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ifso_repro.jobs import Job, method_name
from ifso_repro.provenance import other_networks
from ifso_repro.results import AnyResult, Result
from ifso_repro.schema import Reported, Row, Study
from ifso_repro.statistics import Spread

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


class Runs:
    """Results by what they have in common but for the seed; those of smoke runs are left out.

    Of a data set only those that were made with other data than most tell their ``data``.
    """

    def __init__(self, results: Iterable[AnyResult]) -> None:
        self.all = _of_other_data_marked([result for result in results if not result.smoke])
        self._found: dict[tuple[str, str, str], list[AnyResult]] = {}
        for result in self.all:
            key = (result.row, method_name(result.criterion, result.variant), result.recipe)
            self._found.setdefault(key, []).append(result)

    def of(self, job: Job) -> list[list[Any]]:
        """The results of a job and its other seeds, those made alike together, those made as the row says first.

        They are of one kind: :class:`Result`, or of a detector ``DetectionResult``.
        """
        groups: dict[tuple[str, ...], list[AnyResult]] = {}
        for result in self._found.get((job.row.name, method_name(job.criterion, job.changes), job.recipe), []):
            groups.setdefault(otherwise(job, result), []).append(result)
        return [groups[words] for words in sorted(groups, key=lambda words: (len(words), words))]

    def whole(self, job: Job, pruned: tuple[str, ...] | None = None) -> list[Any]:
        """Those fine-tuned for as long as the recipe says; if ``pruned`` is given, pruned otherwise in just that."""
        for group in self.of(job):
            if group[0].epochs == usual_epochs(job) and pruned in (None, otherwise(job, group[0])):
                return group
        return []


def _of_other_data_marked(results: Sequence[AnyResult]) -> list[AnyResult]:
    """Those made with what most of them were made with, or an older ifso, do not tell their data any more."""
    told: dict[str, Counter[str]] = {}
    for result in results:
        told.setdefault(_data_set(result), Counter()).update([result.data] if result.data else [])
    usual = {name: [digest for digest, _ in counted.most_common(1)] for name, counted in told.items()}
    return [replace(result, data="") if result.data in usual[_data_set(result)] else result for result in results]


def _data_set(result: AnyResult) -> str:
    """The name of its data: a row is called by network, data and per cent."""
    return result.row.rsplit("-", 2)[-2] if result.row.count("-") > 1 else ""


def usual_epochs(job: Job) -> int:
    """For how long the recipe of a job fine-tunes."""
    return job.row.finetune["epochs"] if job.recipe == "paper" else job.train_settings().epochs


def otherwise(job: Job, result: AnyResult) -> tuple[str, ...]:
    """In what a result of :class:`Runs` was not made as its row and recipe say, or as most others, in words."""
    epochs = [] if result.epochs == usual_epochs(job) else [f"{result.epochs} epochs"]
    options = result.prune.get("criterion")
    usual = {**job.prune, "seed": result.prune.get("seed"), "criterion": options}
    changed = [f"{key}={value}" for key, value in result.prune.items() if usual.get(key) != value]
    networks = of_other_networks(job, result)
    data = [f"other data ({result.data})"] if result.data else []
    return (*epochs, *sorted(changed), *_other_options(job.criterion_options, options), *networks, *data)


def of_other_networks(job: Job, result: AnyResult) -> list[str]:
    """Were the unpruned network or the teacher of a result others than those of the rows now? In words."""
    names = {"base": "unpruned network", "teacher": "teacher"}
    return [f"another {names[part]}: {_apart(now, before)}" for part, now, before in other_networks(job, result)]


def _apart(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """In what a network was made otherwise.

    >>> _apart({"epochs": 200, "batch": 256, "train": {"cutmix": 0.5}}, {"epochs": 120, "batch": 256})
    '120 epochs, no cutmix'
    """
    flat, other = ({**each, **each.get("train", {})} for each in (now, before))
    keys = [key for key in {"epochs": 0, **other, **flat} if key != "train" and flat.get(key) != other.get(key)]
    words = {"epochs": "{} epochs", "task": "{}", "weights": "{}"}
    said = [words.get(key, f"{key} {{}}").format(other[key]) if key in other else f"no {key}" for key in keys]
    return ", ".join(said)


def _other_options(usual: Mapping[str, Any], options: Mapping[str, Any] | None) -> list[str]:
    """In what the options of a criterion differ; an older result does not say what it had.

    >>> _other_options({"coupled": "layers"}, {"weights": "all"}), _other_options({"coupled": "layers"}, None)
    (['weights=all', 'no coupled'], [])
    """
    if options is None:
        return []
    given = [f"{key}={value}" for key, value in sorted(options.items()) if usual.get(key) != value]
    return [*given, *(f"no {key}" for key in sorted(usual.keys() - options.keys()))]


def last_top1(group: Sequence[AnyResult]) -> Spread:
    """What counts of a group of runs; of detectors it is mAP."""
    return Spread.of([result.worth("last") for result in group])


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
