"""The rows of the paper, its tables and studies, and the runs they are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from ifso.errors import IfsoError
from ifso_repro.config import config_folder, read_row, read_study, read_teacher, read_toml
from ifso_repro.jobs import Job
from ifso_repro.schema import TABLES, TAUGHT, Row, Study


@cache
def _read(folder: Path) -> tuple[dict[str, Row], dict[str, Study]]:
    found_rows, found_studies = {}, {}
    for path in sorted(folder.glob("*.toml")):
        keys = read_toml(path).keys
        if ("row" in keys) == ("study" in keys):
            raise IfsoError(f"{path}: must have one of the keys 'row' and 'study'")
        if "row" in keys:
            found_rows[path.stem] = read_row(path)
        else:
            found_studies[path.stem] = read_study(path)
    _check_tasks(folder, found_rows)
    found_rows = {name: _with_teacher(folder / f"{name}.toml", row, found_rows) for name, row in found_rows.items()}
    for name, found in found_studies.items():
        _check_study(folder / f"{name}.toml", found, found_rows)
    return found_rows, found_studies


def _check_tasks(folder: Path, known: Mapping[str, Row]) -> None:
    """Rows of a task share the unpruned network, so that they must tell the same of it."""
    first: dict[str, Row] = {}
    for name, row in known.items():
        other = first.setdefault(row.task, row)
        if row.base.made != other.base.made:
            raise IfsoError(
                f"{folder / name}.toml: [base] is another than in {other.name}.toml; rows of {row.task} share it"
            )


def _with_teacher(path: Path, row: Row, known: Mapping[str, Row]) -> Row:
    task = read_teacher(path)
    if task is None:
        return row
    tasks = dict.fromkeys(other.task for other in known.values() if other.data == row.data)
    tasks.pop(row.task)
    if task not in tasks:
        raise IfsoError(
            f"{path}: teacher.task = {task!r} will not do; give another task on {row.data}: {', '.join(tasks)}"
        )
    return replace(row, teacher=next(other for other in known.values() if other.task == task))


def _check_study(path: Path, found: Study, known: Mapping[str, Row]) -> None:
    """A study is about rows that there are, and the paper's numbers are about rows of the study."""
    tasks = dict.fromkeys(row.task for row in known.values())
    for name in found.rows:
        if name.rpartition("-")[0] not in tasks:
            raise IfsoError(f"{path}: tasks: {name.rpartition('-')[0]!r} has no row; there are {', '.join(tasks)}")
        taught = [row for row in known.values() if row.task == name.rpartition("-")[0] and row.teacher]
        if TAUGHT in found.recipes and not taught:
            raise IfsoError(f"{path}: recipes: {TAUGHT!r} needs rows with [teacher], which {name} is not")
    for variant in found.variants:
        for name in variant.paper:
            if name not in found.rows:
                raise IfsoError(
                    f"{path}: variants.paper: {name!r} is no row of the study; it has {', '.join(found.rows)}"
                )


def rows(folder: Path | None = None) -> dict[str, Row]:
    """The rows that have a file of their own, by name."""
    return dict(_read(folder or config_folder())[0])


def find_row(name: str, folder: Path | None = None) -> Row:
    """The row of that name; one of another budget than those with a file is made after the same network and data.

    >>> find_row("resnet32-cifar10-30").removed
    0.3
    """
    known = rows(folder)
    if name in known:
        return known[name]
    task, _, percent = name.rpartition("-")
    alike = [row for row in known.values() if row.task == task]
    if not alike or not percent.isdigit() or not 0 < int(percent) < 100:
        close = get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
        raise IfsoError(f"no row {name!r} (network-data-per cent of MACs removed){hint}")
    return alike[0].at(int(percent) / 100)


def studies(folder: Path | None = None) -> dict[str, Study]:
    """The tables and the other studies of the paper, by name."""
    known = sorted(rows(folder).values(), key=lambda row: row.removed)
    tables = {
        name: Study(name, title, tuple(row.name for row in known if name in row.tables))
        for name, title in TABLES.items()
    }
    return {**{name: table for name, table in tables.items() if table.rows}, **_read(folder or config_folder())[1]}


def find_study(name: str, folder: Path | None = None) -> Study:
    """The study of that name, or of the one row of that name."""
    known = studies(folder)
    if name in known:
        return known[name]
    try:
        return Study(name, name, (find_row(name, folder).name,))
    except IfsoError:
        listed = ", ".join(known)
        raise IfsoError(f"no table, figure or row {name!r}; choose {listed} or a row such as {_some(folder)}") from None


def _some(folder: Path | None) -> str:
    return next(iter(rows(folder)), "resnet32-cifar10-50")


def study(
    name: str,
    *,
    seeds: int | None = None,
    criteria: Sequence[str] | None = None,
    recipes: Sequence[str] | None = None,
    folder: Path | None = None,
) -> list[Job]:
    """The runs of a table (``"table1"`` …), another study or one row, each once: first all of seed 0, then of seed 1.

    ``seeds`` is their number if it shall be another; ``criteria`` and ``recipes`` leave out all others.

    >>> [job.name for job in study("resnet32-cifar10-50", criteria=["random"], recipes=["paper", "ours"])][:3]
    ['resnet32-cifar10-50.random.paper.0', 'resnet32-cifar10-50.random.ours.0', 'resnet32-cifar10-50.random.paper.1']
    """
    if seeds is not None and seeds < 1:
        raise IfsoError(f"{seeds} seeds: give 1 or more")
    chosen = find_study(name, folder)
    found: dict[str, Job] = {}
    for row in (find_row(row_name, folder) for row_name in chosen.rows):
        for job in _jobs(row, chosen, seeds):
            if (criteria is None or job.criterion in criteria) and (recipes is None or job.recipe in recipes):
                found.setdefault(job.name, job)
    _refuse_unknown("criterion", criteria, chosen, folder)
    _refuse_unknown("recipe", recipes, chosen, folder)
    return sorted(found.values(), key=lambda job: job.seed)


def _jobs(row: Row, chosen: Study, seeds: int | None) -> Iterator[Job]:
    for seed in range(seeds or chosen.seeds or row.seeds):
        for criterion in chosen.criteria or row.criteria:
            for variant in chosen.variants:
                for recipe in chosen.recipes or row.recipes:
                    yield Job(row, criterion, recipe, seed, variant)


def _refuse_unknown(kind: str, asked: Sequence[str] | None, chosen: Study, folder: Path | None) -> None:
    """A criterion or recipe that a study does not have would silently give nothing."""
    jobs = [job for name in chosen.rows for job in _jobs(find_row(name, folder), chosen, 1)]
    known = dict.fromkeys(getattr(job, kind) for job in jobs)
    for name in asked or ():
        if name not in known:
            raise IfsoError(f"{chosen.name} has no {kind} {name!r}; it has {', '.join(known)}")
