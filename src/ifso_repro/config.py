"""The rows and studies in ``repro/*.toml``, and the runs that they are made of."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Required

from ifso.common.text import one_line
from ifso.errors import IfsoError
from ifso_repro.jobs import Job
from ifso_repro.reader import decode, wrong
from ifso_repro.schema import (
    CRITERIA,
    DEFAULT_RUN,
    RECIPES,
    SCRATCH,
    STEP,
    TABLES,
    TAUGHT,
    WITHOUT_ALGORITHM_2,
    Row,
    Share,
    Study,
    row_name,
)

PACKAGED = Path(__file__).with_name("toml")
"""Where an installed package has them."""

CHECKOUT = Path(__file__).parents[2] / "repro"
"""Where a checkout has them."""


SHARED = {"base": Required[float], "numbers": Required[str]}
"""What all lines of ``[paper]`` share: the unpruned network, and of which epoch the paper's own numbers are."""

STUDY = {"study": Required[str], "tasks": Required[tuple[str, ...]], "removed": Required[tuple[Share, ...]]}


def config_folder(packaged: Path = PACKAGED, checkout: Path = CHECKOUT) -> Path:
    """The folder of the shipped TOML files: beside the installed code, or at the root of a checkout."""
    for folder in (packaged, checkout):
        if any(folder.glob("*.toml")):
            return folder
    raise IfsoError(
        f"no rows of the paper found, neither in {packaged} nor in {checkout}; install ifso again, or run a checkout"
    )


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise IfsoError(f"{path} cannot be read: {one_line(error)}") from error
    except (ValueError, RecursionError) as error:
        raise IfsoError(f"{path} is no TOML: {one_line(error)}") from error


def read_row(path: Path) -> Row:
    """The row that a file describes, without its teacher."""
    return _row(path, read_toml(path))[0]


def _row(path: Path, values: dict[str, Any]) -> tuple[Row, str | None]:
    """A row, and the task whose unpruned network is its teacher, if it has one."""
    file = str(path)
    name = decode({"row": Required[str]}, _part(values, "row"), file)["row"]
    teacher = decode({"task": Required[str]}, values.pop("teacher"), file, "teacher") if "teacher" in values else {}
    paper = values.get("paper")
    if isinstance(paper, dict) and paper:
        shared = decode(SHARED, _part(paper, *SHARED), file, "paper")
        notes = {"ifso": shared["numbers"]}
        values["paper"] = {key: _line(line, key, shared["base"], notes.get(key, "")) for key, line in paper.items()}
    row: Row = decode(Row, {"name": name, **values}, file)
    expected = row_name(row.network, row.data, row.removed)
    if not row.name == expected == path.stem:
        raise wrong(f"row must be {expected!r} (network, data, removed), as must the file, got {row.name!r}", file)
    if not teacher and TAUGHT in row.recipes:
        raise wrong(f"recipes: {TAUGHT!r} needs a teacher; give [teacher] with task, or leave it out", file)
    if teacher and row.detects:
        raise wrong(f"[teacher]: detectors have no recipe {TAUGHT!r}; leave it out", file)
    options = {key: tuple(each) if isinstance(each, list) else each for key, each in row.options.items()}
    return replace(row, options=options), teacher.get("task")


def read_study(path: Path) -> Study:
    """The study that a file describes."""
    values, file = read_toml(path), str(path)
    head = decode(STUDY, _part(values, *STUDY), file)
    rows = [f"{task}-{share * 100:.10g}" for task in head["tasks"] for share in head["removed"]]
    for variant in values["variants"] if isinstance(values.get("variants"), list) else []:
        if isinstance(variant, dict) and isinstance(variant.get("paper"), dict):
            label = variant.get("label")
            variant["paper"] = {row: _line(line, label) for row, line in variant["paper"].items()}
    study: Study = decode(Study, {"name": head["study"], "rows": rows, **values}, file)
    if study.name != path.stem:
        raise wrong(f"study must be {path.stem!r}, the name of the file, got {study.name!r}", file)
    return study


def _part(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    """These keys, which are taken out of ``values``."""
    return {key: values.pop(key) for key in keys if key in values}


def _line(line: Any, method: Any, base: float | None = None, note: str = "") -> Any:
    """A line of the paper with what its file says elsewhere."""
    return {"method": method, "base": base, "note": note, **line} if isinstance(line, dict) else line


@cache
def _read(folder: Path) -> tuple[dict[str, Row], dict[str, Study]]:
    """All rows and studies of a folder, checked against each other."""
    rows: dict[str, Row] = {}
    studies: dict[str, Study] = {}
    teachers: dict[str, str | None] = {}
    for path in sorted(folder.glob("*.toml")):
        values = read_toml(path)
        if ("row" in values) == ("study" in values):
            raise IfsoError(f"{path}: must have one of the keys 'row' and 'study'")
        if "row" in values:
            rows[path.stem], teachers[path.stem] = _row(path, values)
        else:
            studies[path.stem] = read_study(path)
    tasks: dict[str, Row] = {}
    for name, row in rows.items():
        other = tasks.setdefault(row.task, row)
        if row.base.made != other.base.made:
            words = f"[base] is another than in {other.name}.toml; rows of {row.task} share it"
            raise wrong(words, f"{folder / name}.toml")
    for name, task in teachers.items():
        if task is not None:
            rows[name] = replace(rows[name], teacher=_teacher(f"{folder / name}.toml", rows[name], task, tasks))
    for name, study in studies.items():
        _check_study(f"{folder / name}.toml", study, rows, tasks)
    return rows, studies


def _teacher(file: str, row: Row, task: str, tasks: dict[str, Row]) -> Row:
    others = {name: other for name, other in tasks.items() if other.data == row.data and name != row.task}
    if task not in others:
        raise wrong(f"teacher.task must be another task on {row.data}, {' or '.join(others)}, got {task!r}", file)
    return others[task]


def _check_study(file: str, study: Study, rows: dict[str, Row], tasks: dict[str, Row]) -> None:
    """A study is about rows that exist, and the paper's numbers are about rows of the study."""
    for name in study.rows:
        task = name.rpartition("-")[0]
        if task not in tasks:
            raise wrong(f"tasks: {task!r} has no row; choose from {', '.join(tasks)}", file)
        if TAUGHT in study.recipes and not any(row.teacher for row in rows.values() if row.task == task):
            raise wrong(f"recipes: {TAUGHT!r} needs rows with [teacher], which {name} is not", file)
        if study.path and int(name.rpartition("-")[2]) % round(100 * STEP):
            raise wrong(f"path: the shares removed must be multiples of {STEP}, which {name} is not", file)
    named = [("variants.paper", name) for variant in study.variants for name in variant.paper]
    for key, name in (*named, *(("fewer", name) for name in study.fewer)):
        if name not in study.rows:
            raise wrong(f"{key}: {name!r} is no row of the study; choose from {', '.join(study.rows)}", file)


def rows(folder: Path | None = None) -> dict[str, Row]:
    """The rows that have a file, by name."""
    return dict(_read(folder or config_folder())[0])


def find_row(name: str, folder: Path | None = None) -> Row:
    """The row of that name; one of a budget without a file is made after the same network and data.

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
        row = next(iter(rows(folder)), "resnet32-cifar10-50")
        listed = ", ".join(known)
        raise IfsoError(f"no table, figure or row {name!r}; choose {listed} or a row such as {row}") from None


def study(
    name: str,
    *,
    seeds: int | None = None,
    criteria: Sequence[str] | None = None,
    recipes: Sequence[str] | None = None,
    folder: Path | None = None,
) -> list[Job]:
    """The runs of a table (``"table1"`` …), another study or one row, each once: first all of seed 0, then of seed 1.

    ``seeds`` is their number if it shall be another. ``criteria`` and ``recipes`` leave out all others; of a table or a
    row, which say only what is planned, they may be any that its networks can take.

    >>> [job.name for job in study("resnet32-cifar10-50", criteria=["random"], recipes=["paper", "ours"])][:3]
    ['resnet32-cifar10-50.random.paper.0', 'resnet32-cifar10-50.random.ours.0', 'resnet32-cifar10-50.random.paper.1']
    """
    if seeds is not None and seeds < 1:
        raise IfsoError(f"{seeds} seeds: give 1 or more")
    chosen = find_study(name, folder)
    every = [find_row(row, folder) for row in chosen.rows]
    possible = tuple(recipe for recipe in RECIPES if all(row.takes(recipe) for row in every))
    asked = {"criteria": criteria or (), "recipes": recipes or ()}
    own = {"criteria": chosen.criteria or CRITERIA, "recipes": chosen.recipes or possible}
    for key, word in (("criteria", "criterion"), ("recipes", "recipe")):
        for each in asked[key]:
            if each not in own[key]:
                raise IfsoError(f"{chosen.name} has no {word} {each!r}; it has {', '.join(own[key])}")
    narrowed: dict[str, Any] = {
        key: tuple(name for name in own[key] if name in names) for key, names in asked.items() if names
    }
    chosen = replace(chosen, **narrowed)
    once: dict[str, Job] = {}
    for row in every:
        alike = [other.removed for other in every if other.task == row.task]
        for job in _jobs(row, chosen, seeds, tenths(max(alike))):
            once.setdefault(job.name, job)
    return sorted(once.values(), key=lambda job: job.seed)


def _jobs(row: Row, chosen: Study, seeds: int | None, path: tuple[float, ...]) -> Iterator[Job]:
    """All runs of a row; the paper's recipe is for Algorithm 2 only."""
    planned = chosen.fewer.get(row.name, chosen.seeds or row.seeds)
    for seed in range(planned and (seeds or planned)):
        for criterion in chosen.criteria or row.criteria:
            for variant in chosen.variants:
                for recipe in chosen.recipes or row.recipes:
                    if criterion in WITHOUT_ALGORITHM_2 and recipe == "paper":
                        continue
                    passed = path if (DEFAULT_RUN if criterion == SCRATCH else criterion) in chosen.path else ()
                    yield Job(row, criterion, recipe, seed, variant, passed)


def tenths(removed: float) -> tuple[float, ...]:
    """The shares removed that one pruning for several rows passes through.

    >>> tenths(0.5)
    (0.1, 0.2, 0.3, 0.4, 0.5)
    """
    return tuple(round(STEP * step, 12) for step in range(1, round(removed / STEP) + 1))
