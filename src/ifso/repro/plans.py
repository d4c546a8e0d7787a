"""What a row of the paper and a study of several rows consist of, as read from ``repro/*.toml``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.errors import IfsoError
from ifso.repro.configs import REQUIRED, Section, read_toml

if TYPE_CHECKING:
    from ifso.training.settings import TrainSettings

CRITERIA = ("ifso", "group-fisher", "magnitude", "magnitude-average", "random")
RECIPES = ("paper", "quick", "ours", "patient", "detection", "distilled")
BASE_RECIPES = ("paper", "scratch", "detection")
BOXES = ("coco", "bccd")
"""Data with boxes, which are opened as ``coco:PATH``."""

DATA = ("cifar10", "cifar100", "imagenet", *BOXES)
TABLES = {
    "table1": "VGG-16 on CIFAR-10",
    "table2": "ResNet-32 on CIFAR-10",
    "table3": "ResNet-56 on CIFAR-10",
    "table4": "VGG-16 on CIFAR-100",
    "table5": "ResNet-50 on ImageNet",
    "table6": "ResNet-56 on CIFAR-100",
    "table7": "RetinaNet on COCO",
}
"""The paper's tables, numbered as they appear in it."""

PRUNE_OPTIONS: Mapping[str, type] = {
    "schedule": str, "normalize": str, "accumulate": int, "accumulation": str, "batches_per_score": int,
    "units_per_step": int, "round_to": int, "min_units": int, "recalibrate": int, "weight_update": int,
    "lr": float, "batch": int,
}  # fmt: skip
"""Keywords of :func:`ifso.prune`; ``lr`` is that of its optimizer and ``batch`` the images of a batch."""

CRITERION_OPTIONS: Mapping[str, type] = {
    "inverse": str, "inverse_options": dict, "coupled": str, "weights": str, "curvature": str
}  # fmt: skip
"""Options of a criterion, such as those of :class:`ifso.criteria.ifso.Ifso`."""

TRAIN_OPTIONS: Mapping[str, type] = {
    "lr": float, "schedule": str, "warm_up_steps": int, "clip": float, "weight_decay": float, "ema": float,
    "cutmix": float,
}  # fmt: skip
"""Settings of training, beside epochs and batch, that a row may have others of than the recipe."""

COLUMNS = ("params_kept", "prune_seconds")
LAYOUTS = ("lines", "matrix")


@dataclass(frozen=True)
class Reported:
    """What somebody reports, in per cent: MACs ``removed``, top-1 of the unpruned and of the ``pruned`` network.

    ``last`` is the last epoch where ``pruned`` is the best one and both are known, ``params_kept`` the weights left.
    Of detectors it is mAP in place of top-1, with ``map50`` and ``map75`` of the pruned one and the ``memory`` of
    fine-tuning in GB; ``structure`` are the channels that layers of the neck and the head are left with.
    """

    method: str
    removed: float
    base: float | None
    pruned: float
    last: float | None = None
    params_kept: float | None = None
    note: str = ""
    map50: float | None = None
    map75: float | None = None
    memory: float | None = None
    structure: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Base:
    """Where the unpruned network comes from: ``weights`` of that file name, which are given, or training.

    ``train`` are further changes to the recipe.
    """

    weights: str | None = None
    recipe: str | None = None
    epochs: int | None = None
    batch: int | None = None
    note: str = ""
    train: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Only what is said."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value not in (None, "", {})}

    def train_settings(self) -> TrainSettings:
        """How the unpruned network is trained, without a teacher."""
        from ifso.training.settings import recipe_of

        if self.recipe is None:
            raise IfsoError(f"the unpruned network is not trained: its weights are given, {self.weights}")
        return recipe_of(self.recipe, epochs=self.epochs, batch=self.batch, distill=0.0, **self.train)


@dataclass(frozen=True)
class Row:
    """One network on one data set with one share of its MACs ``removed``: one or more lines of a table.

    ``prune`` are keywords of :func:`ifso.prune` and ``normalize`` what the scores of each criterion are divided by;
    ``criterion`` are options of a criterion, by its name. ``finetune`` are changes to a recipe of
    :mod:`ifso.training.settings`. ``paper`` is what the paper reports, by criterion, and ``rivals`` what others do near
    this budget. ``options`` are those of the network's builder.
    """

    name: str
    network: str
    data: str
    removed: float
    criteria: tuple[str, ...]
    recipes: tuple[str, ...]
    seeds: int
    base: Base
    prune: Mapping[str, Any]
    normalize: Mapping[str, str]
    finetune: Mapping[str, Any]
    tables: tuple[str, ...] = ()
    paper: Mapping[str, Reported] = field(default_factory=dict)
    rivals: tuple[Reported, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    criterion: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """Network and data, such as ``resnet32-cifar10``: rows of the same task share the unpruned network."""
        return task_of(self.network, self.data)

    @property
    def detects(self) -> bool:
        """Is the network a detector?"""
        return self.data in BOXES

    def at(self, removed: float) -> Row:
        """The same for another budget, of which nobody has reported anything."""
        name = row_name(self.network, self.data, removed)
        return dataclasses.replace(self, name=name, removed=removed, tables=(), paper={}, rivals=())


@dataclass(frozen=True)
class Variant:
    """Options that differ from the row's, under a ``label``; ``paper``: what the paper reports of it, by row."""

    label: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[str, Reported] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """Rows to be compared. ``criteria``, ``recipes`` and ``seeds`` are those of the rows where not given."""

    name: str
    title: str
    rows: tuple[str, ...]
    variants: tuple[Variant, ...] = (Variant(),)
    criteria: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    seeds: int | None = None
    columns: tuple[str, ...] = ()
    layout: str = "lines"
    note: str = ""


def task_of(network: str, data: str) -> str:
    """A task in short; of a network's name, what stands before the first underscore.

    >>> task_of("ifso:resnet32", "cifar10"), task_of("torchvision:retinanet_resnet50_fpn", "coco")
    ('resnet32-cifar10', 'retinanet-coco')
    """
    return f"{network.partition(':')[2].partition('_')[0]}-{data}"


def row_name(network: str, data: str, removed: float) -> str:
    """A row's name: network, data and the per cent of MACs removed.

    >>> row_name("ifso:resnet32", "cifar10", 0.5)
    'resnet32-cifar10-50'
    """
    return f"{task_of(network, data)}-{removed * 100:.10g}"


def read_row(path: Path) -> Row:
    """The row that a file describes."""
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
    section.done()
    expected = row_name(row.network, row.data, row.removed)
    if not row.name == expected == path.stem:
        raise section.error(f"row = {row.name!r} must be {expected!r} (network, data, removed), as must the file")
    return row


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
    found = {criterion: section.take(criterion, str) for criterion in CRITERIA}
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
