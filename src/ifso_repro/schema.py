"""What a row of the paper and a study of several rows consist of."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Required, get_args

from ifso.errors import IfsoError
from ifso_repro.reader import WITHOUT_REPETITION, Check, Count, Whole

if TYPE_CHECKING:
    from ifso.training.settings import TrainSettings

DEFAULT_RUN = "true-loss"
"""The criterion of the staged run."""

UNPRUNED = "unpruned"
"""In place of a criterion: the unpruned network, fine-tuned by the same recipe and teacher."""

SCRATCH = "scratch"
"""In place of a criterion: the network of the default run with new random weights, trained by the same recipe."""

WITHOUT_ALGORITHM_2 = (DEFAULT_RUN, UNPRUNED, SCRATCH)
"""What is not chosen by Algorithm 2: no row says what its scores are divided by, and the paper has no recipe for it."""

TAUGHT = "taught"
"""The recipe with another teacher than the unpruned network of the row."""

Criterion = Literal[
    "true-loss", "ifso", "group-fisher", "magnitude", "magnitude-average", "random", "unpruned", "scratch"
]
Recipe = Literal["paper", "brief", "short", "quick", "ours", "patient", "taught", "detection", "distilled"]
DataName = Literal["cifar10", "cifar100", "imagenet", "coco", "bccd"]
Table = Literal["table1", "table2", "table3", "table4", "table5", "table6", "table7"]
CRITERIA: tuple[str, ...] = get_args(Criterion)
RECIPES: tuple[str, ...] = get_args(Recipe)
DATA: tuple[str, ...] = get_args(DataName)
BOXES = ("coco", "bccd")
"""Data with boxes, which are opened as ``coco:PATH``."""

OF_DETECTORS = ("detection", "distilled")
"""Recipes of detectors, which take no others."""

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
"""Settings of training, beside epochs and batch, that a row may change in a recipe."""

NORMALIZE = {name: Required[str] for name in CRITERIA if name not in WITHOUT_ALGORITHM_2}
"""By what the scores of a criterion are divided: every row says it of all of them."""

FINETUNE = {"epochs": Required[Count], "batch": Count, **TRAIN_OPTIONS}

Share = Annotated[float, Check("a share between 0 and 1", lambda value: 0 < value < 1)]
STEP = 0.1
"""Where a pruning is for several rows, it leaves a network whenever so much more of the MACs is removed."""

Criteria = Annotated[tuple[Criterion, ...], WITHOUT_REPETITION]
Recipes = Annotated[tuple[Recipe, ...], WITHOUT_REPETITION]


@dataclass(frozen=True)
class Reported:
    """What somebody reports, in per cent: MACs ``removed``, top-1 of the unpruned and of the ``pruned`` network.

    ``last`` is the last epoch where ``pruned`` is the best one and both are known, ``params_kept`` the weights left.
    Of detectors it is mAP in place of top-1, with ``map50`` and ``map75`` of the pruned one and the ``memory`` of
    fine-tuning in GB; ``structure`` are the channels that layers of the neck and the head are left with.
    """

    method: str
    removed: float
    pruned: float
    base: float | None = None
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
    recipe: Literal["paper", "scratch", "detection"] | None = None
    epochs: Count | None = None
    batch: Count | None = None
    note: str = ""
    train: Annotated[Mapping[str, Any], TRAIN_OPTIONS] = field(default_factory=dict)

    def __post_init__(self) -> None:
        trained = (self.recipe, self.epochs, self.batch)
        if (None in trained) if self.weights is None else any((*trained, self.train)):
            raise IfsoError("needs either weights, or recipe, epochs and batch")

    def as_dict(self) -> dict[str, Any]:
        """The entries that are set."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value not in (None, "", {})}

    @property
    def made(self) -> dict[str, Any]:
        """The entries that decide on the network: all but the note."""
        return made(self.as_dict())

    def train_settings(self) -> "TrainSettings":
        """How the unpruned network is trained, without a teacher."""
        from ifso.training.settings import training_recipe

        if self.recipe is None:
            raise IfsoError(f"the unpruned network is not trained: its weights are given, {self.weights}")
        return training_recipe(self.recipe, epochs=self.epochs, batch=self.batch, distill=0.0, **self.train)


@dataclass(frozen=True)
class Row:
    """One network on one data set with one share of its MACs ``removed``: one or more lines of a table.

    ``prune`` are keywords of :func:`ifso.prune` and ``normalize`` what the scores of each criterion are divided by;
    ``criterion`` are options of a criterion, by its name. ``finetune`` are changes to a recipe of
    :mod:`ifso.training.settings`. ``paper`` is what the paper reports, by criterion, and ``rivals`` what others do near
    this budget. ``options`` are those of the network's builder. ``teacher`` is a row whose unpruned network teaches in
    the recipe :data:`TAUGHT`.
    """

    name: str
    network: str
    data: DataName
    removed: Share
    criteria: Criteria
    recipes: Recipes
    seeds: Count
    base: Base
    prune: Annotated[Mapping[str, Any], PRUNE_OPTIONS]
    normalize: Annotated[Mapping[str, str], NORMALIZE]
    finetune: Annotated[Mapping[str, Any], FINETUNE]
    tables: Annotated[tuple[Table, ...], WITHOUT_REPETITION] = ()
    paper: Annotated[Mapping[str, Reported], dict.fromkeys(CRITERIA, Reported)] = field(default_factory=dict)
    rivals: tuple[Reported, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    criterion: Annotated[Mapping[str, Mapping[str, Any]], dict.fromkeys(CRITERIA, CRITERION_OPTIONS)] = field(
        default_factory=dict
    )
    teacher: "Row | None" = None

    @property
    def task(self) -> str:
        """Network and data, such as ``resnet32-cifar10``: rows of the same task share the unpruned network."""
        return task_of(self.network, self.data)

    @property
    def detects(self) -> bool:
        """Whether the network is a detector."""
        return self.data in BOXES

    def takes(self, recipe: str) -> bool:
        """Whether its networks can be fine-tuned by a recipe.

        Those of detectors are others, and :data:`TAUGHT` needs a teacher.
        """
        return (recipe in OF_DETECTORS) == self.detects and (recipe != TAUGHT or self.teacher is not None)

    @property
    def title(self) -> str:
        """What the network is called in the paper, or its task where no table has it."""
        return TABLES[self.tables[0]].partition(" on ")[0] if self.tables else self.task

    def at(self, removed: float) -> "Row":
        """The same for another budget, of which nobody has reported anything."""
        name = row_name(self.network, self.data, removed)
        return dataclasses.replace(self, name=name, removed=removed, tables=(), paper={}, rivals=())


@dataclass(frozen=True)
class Variant:
    """Options that differ from the row's, under a ``label``; ``paper``: what the paper reports of it, by row."""

    label: str = ""
    options: Annotated[Mapping[str, Any], {**PRUNE_OPTIONS, **CRITERION_OPTIONS}] = field(default_factory=dict)
    paper: Mapping[str, Reported] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """Rows to be compared. ``criteria``, ``recipes`` and ``seeds`` are those of the rows where not given.

    ``fewer`` are rows with fewer seeds: with 0 nothing is run, and what is known anyway is shown. By the criteria of
    ``path`` a network is pruned once for all its rows, through every tenth of the MACs removed, if the schedule allows.
    """

    name: str
    title: str
    rows: tuple[str, ...]
    variants: Annotated[tuple[Variant, ...], Check("a list that is not empty", bool)] = (Variant(),)
    criteria: Criteria = ()
    recipes: Recipes = ()
    seeds: Count | None = None
    fewer: Mapping[str, Whole] = field(default_factory=dict)
    path: Criteria = ()
    columns: tuple[Literal["params_kept", "prune_seconds"], ...] = ()
    layout: Literal["lines", "matrix"] = "lines"
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


def made(base: Mapping[str, Any]) -> dict[str, Any]:
    """Of an unpruned network as a row or a result tells it, what decides on the network: notes do not.

    >>> made({"weights": "a.safetensors", "note": "somebody's"})
    {'weights': 'a.safetensors'}
    """
    return {key: value for key, value in base.items() if key != "note"}
