"""The rows and studies in ``repro/*.toml``, read strictly: a mistake is an error that names file and key."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from ifso.errors import IfsoError
from ifso_repro.jobs import Job
from ifso_repro.schema import (
    BASE_RECIPES,
    BOXES,
    COLUMNS,
    CRITERIA,
    CRITERION_OPTIONS,
    DATA,
    LAYOUTS,
    NORMALIZED,
    PRUNE_OPTIONS,
    RECIPES,
    TABLES,
    TAUGHT,
    TRAIN_OPTIONS,
    Base,
    Reported,
    Row,
    Study,
    Variant,
    row_name,
)

PACKAGED = Path(__file__).with_name("toml")
"""Where an installed package has them."""

CHECKOUT = Path(__file__).parents[2] / "repro"
"""Where a checkout has them."""

REQUIRED: Any = object()

LARGEST = 2**53
"""Whole numbers above it are no numbers of a study."""

KINDS = {str: "text", int: "a whole number", float: "a number", list: "a list", dict: "a table"}


def config_folder(packaged: Path = PACKAGED, checkout: Path = CHECKOUT) -> Path:
    """The folder of the shipped TOML files: beside the installed code, or at the root of a checkout."""
    for folder in (packaged, checkout):
        if any(folder.glob("*.toml")):
            return folder
    raise IfsoError(
        f"no rows of the paper found, neither in {packaged} nor in {checkout}; install ifso again, or run a checkout"
    )


def read_toml(path: Path) -> Section:
    """A file as a section, of which every key must be asked for."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise IfsoError(f"{path} cannot be read: {_one_line(error)}") from error
    except (ValueError, RecursionError) as error:
        raise IfsoError(f"{path} is no TOML: {_one_line(error)}") from error
    return Section(values, str(path))


class Section:
    """A table of a TOML file. What is missing, of another type or left over is an error that names file and key.

    >>> section = Section({"epochs": 200, "bacth": 128}, "some.toml")
    >>> section.take("epochs", int)
    200
    >>> section.done()
    Traceback (most recent call last):
    ifso.errors.IfsoError: some.toml: unknown key 'bacth'; known here: epochs
    """

    def __init__(self, values: Mapping[str, Any], file: str, inside: str = "") -> None:
        self._values, self._file, self._inside = dict(values), file, inside
        self._asked: list[str] = []

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key there is."""
        return tuple(self._values)

    def take(self, key: str, kind: type, default: Any = REQUIRED, *, among: tuple[str, ...] = ()) -> Any:
        """The value of ``key``; a whole number will do for ``float``. ``among`` are the choices there are."""
        self._asked.append(key)
        if key not in self._values:
            if default is REQUIRED:
                raise self.error(f"key {self._name(key)!r} is missing; give {KINDS[kind]}")
            return default
        value = self._checked(self._values[key], kind, key)
        if among and value not in among:
            raise self.error(f"{self._name(key)} = {value!r} is unknown; choose one of {', '.join(among)}")
        return value

    def take_list(self, key: str, kind: type, default: Any = REQUIRED) -> tuple[Any, ...]:
        """The values of a list, all of one kind and none twice."""
        found = tuple(self._checked(value, kind, f"{key}[]") for value in self.take(key, list, default))
        if len(set(found)) < len(found):
            raise self.error(f"{self._name(key)} names something twice")
        return found

    def section(self, key: str) -> Section:
        """A table within this one; an empty one if it is not there."""
        return Section(self.take(key, dict, {}), self._file, self._name(key))

    def sections(self, key: str) -> list[Section]:
        """The tables of a list."""
        tables = [self._checked(value, dict, f"{key}[]") for value in self.take(key, list, [])]
        return [Section(table, self._file, f"{self._name(key)}[{number}]") for number, table in enumerate(tables)]

    def done(self) -> None:
        """Refuse keys that nobody asked for."""
        unknown = [key for key in self._values if key not in self._asked]
        if unknown:
            known = ", ".join(dict.fromkeys(self._asked))
            raise self.error(f"unknown key {self._name(unknown[0])!r}; known here: {known}")

    def error(self, what: str) -> IfsoError:
        """An error about this file."""
        return IfsoError(f"{self._file}: {_one_line(what)}")

    def _name(self, key: str) -> str:
        return f"{self._inside}.{key}" if self._inside else key

    def _checked(self, value: Any, kind: type, key: str) -> Any:
        if kind is float and type(value) is int and abs(value) < LARGEST:
            return float(value)
        if type(value) is not kind:
            raise self.error(f"{self._name(key)} = {value!r} will not do; give {KINDS[kind]}")
        return value


def _one_line(error: Exception | str) -> str:
    from ifso.common.text import one_line

    return one_line(error)


def read_row(path: Path) -> Row:
    """The row that a file describes, but for its teacher (:func:`read_teacher`)."""
    section = read_toml(path)
    row = Row(
        name=section.take("row", str),
        network=section.take("network", str),
        data=section.take("data", str, among=DATA),
        removed=_share(section, "removed"),
        criteria=_known(section, "criteria", section.take_list("criteria", str), CRITERIA),
        recipes=_known(section, "recipes", section.take_list("recipes", str), RECIPES),
        seeds=_positive(section, "seeds"),
        base=_base(section.section("base")),
        prune=_options(section.section("prune"), PRUNE_OPTIONS),
        normalize=_normalizers(section.section("normalize")),
        finetune=_finetune(section.section("finetune")),
        tables=_known(section, "tables", section.take_list("tables", str), tuple(TABLES)),
        paper=_paper(section.section("paper")),
        rivals=tuple(_rival(rival) for rival in section.sections("rivals")),
        options=_builder_options(section.take("options", dict, {})),
        criterion=_criterion(section.section("criterion")),
    )
    _teacher(section)
    section.done()
    expected = row_name(row.network, row.data, row.removed)
    if not row.name == expected == path.stem:
        raise section.error(f"row = {row.name!r} must be {expected!r} (network, data, removed), as must the file")
    return row


def read_teacher(path: Path) -> str | None:
    """The task whose unpruned network is the teacher of a row, if the row has one."""
    section = read_toml(path)
    task = _teacher(section)
    if task is None and TAUGHT in section.take_list("recipes", str):
        raise section.error(f"recipes: {TAUGHT!r} needs a teacher; give [teacher] with task, or leave it out")
    if task is not None and section.take("data", str) in BOXES:
        raise section.error(f"[teacher]: detectors have no recipe {TAUGHT!r}; leave it out")
    return task


def _teacher(section: Section) -> str | None:
    teacher = section.section("teacher")
    task: str | None = teacher.take("task", str) if teacher.keys else None
    teacher.done()
    return task


def read_study(path: Path) -> Study:
    """The study that a file describes."""
    section = read_toml(path)
    tasks, shares = section.take_list("tasks", str), section.take_list("removed", float)
    study = Study(
        name=section.take("study", str),
        title=section.take("title", str),
        rows=tuple(f"{task}-{share * 100:.10g}" for task in tasks for share in shares),
        variants=tuple(_variant(variant) for variant in section.sections("variants")) or (Variant(),),
        criteria=_known(section, "criteria", section.take_list("criteria", str), CRITERIA),
        recipes=_known(section, "recipes", section.take_list("recipes", str), RECIPES),
        seeds=_positive(section, "seeds"),
        columns=_known(section, "columns", section.take_list("columns", str, []), COLUMNS),
        layout=section.take("layout", str, "lines", among=LAYOUTS),
        note=section.take("note", str, ""),
    )
    section.done()
    if study.name != path.stem:
        raise section.error(f"study = {study.name!r} must be the name of the file")
    return study


def _known(section: Section, key: str, values: tuple[str, ...], among: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if value not in among:
            raise section.error(f"{key}: {value!r} is unknown; choose from {', '.join(among)}")
    return values


def _share(section: Section, key: str) -> float:
    value: float = section.take(key, float)
    if not 0 < value < 1:
        raise section.error(f"{key} = {value!r} is no share; give a number between 0 and 1")
    return value


def _positive(section: Section, key: str, default: Any = REQUIRED) -> Any:
    value = section.take(key, int, default)
    if value is not None and value < 1:
        raise section.error(f"{key} = {value!r} will not do; give 1 or more")
    return value


def _base(section: Section) -> Base:
    base = Base(
        weights=section.take("weights", str, None),
        recipe=section.take("recipe", str, None, among=BASE_RECIPES),
        epochs=_positive(section, "epochs", None),
        batch=_positive(section, "batch", None),
        note=section.take("note", str, ""),
        train=_options(section.section("train"), TRAIN_OPTIONS),
    )
    section.done()
    trained = (base.recipe, base.epochs, base.batch)
    if (base.weights is None) == (None in trained) or (base.weights is not None and any((*trained, base.train))):
        raise section.error("[base] needs either weights, or recipe, epochs and batch")
    return base


def _options(section: Section, kinds: Mapping[str, type]) -> dict[str, Any]:
    found = {key: section.take(key, kind, None) for key, kind in kinds.items()}
    section.done()
    return {key: found[key] for key in section.keys}


def _normalizers(section: Section) -> dict[str, str]:
    found = {criterion: section.take(criterion, str) for criterion in NORMALIZED}
    section.done()
    return found


def _criterion(section: Section) -> dict[str, dict[str, Any]]:
    found = {criterion: _options(section.section(criterion), CRITERION_OPTIONS) for criterion in CRITERIA}
    section.done()
    return {criterion: options for criterion, options in found.items() if options}


def _finetune(section: Section) -> dict[str, Any]:
    found = {"epochs": _positive(section, "epochs"), "batch": _positive(section, "batch", None)}
    found |= {key: section.take(key, kind, None) for key, kind in TRAIN_OPTIONS.items()}
    section.done()
    return {key: value for key, value in found.items() if value is not None}


def _paper(section: Section) -> dict[str, Reported]:
    """By criterion; all have the same unpruned network. ``numbers`` says of which epoch the paper's own are."""
    if not section.keys:
        return {}
    base, note = section.take("base", float), section.take("numbers", str)
    found = {}
    for criterion in CRITERIA:
        part = section.section(criterion)
        if part.keys:
            found[criterion] = _reported(part, method=criterion, base=base, note=note if criterion == "ifso" else "")
    section.done()
    return found


def _reported(section: Section, *, method: str, base: float | None, note: str = "") -> Reported:
    line = Reported(
        method=method,
        removed=section.take("removed", float),
        base=section.take("base", float, None) if base is None else base,
        pruned=section.take("pruned", float),
        last=section.take("last", float, None),
        params_kept=section.take("params_kept", float, None),
        note=note,
        **{name: section.take(name, float, None) for name in ("map50", "map75", "memory")},
        structure=_structure(section.section("structure")),
    )
    section.done()
    return line


def _structure(section: Section) -> dict[str, int]:
    return {layer: section.take(layer, int) for layer in section.keys}


def _builder_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Whatever the builder takes; it refuses what it does not."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _rival(section: Section) -> Reported:
    method, note = section.take("method", str), section.take("note", str, "")
    return _reported(section, method=method, base=None, note=note)


def _variant(section: Section) -> Variant:
    label = section.take("label", str)
    paper, options = section.section("paper"), section.section("options")
    found = {row: _reported(paper.section(row), method=label, base=None) for row in paper.keys}
    section.done()
    return Variant(label, _options(options, {**PRUNE_OPTIONS, **CRITERION_OPTIONS}), found)


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
