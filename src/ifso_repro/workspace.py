"""The files of a study: data, unpruned networks, pruned ones and trainings, each made once and kept; smoke runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ifso
from ifso.common.files import replacing, storable, write_tensors
from ifso.data import Data, open_data
from ifso.data.generated import generated_boxes, generated_images
from ifso.errors import DataError, RecipeError
from ifso.models import load_weights
from ifso.runs.files import NETWORKS
from ifso.runs.reading import read_run
from ifso.training.evaluation import evaluate
from ifso.training.padded_finetune import MULTIPLE, padded_
from ifso.training.precision import autocast, loss_in, tensor_cores
from ifso.training.settings import TrainSettings, training_recipe
from ifso_repro.jobs import Job, method_name
from ifso_repro.outcomes import detector_measure
from ifso_repro.provenance import BASE, DATA, facts_at, facts_of, identity, refuse_other_base, refuse_other_pruning
from ifso_repro.schema import BOXES, DEFAULT_RUN, SCRATCH, Row

SMOKE: Mapping[str, Any] = {"epochs": 1, "batch": 16}
SMOKE_BOXES: Mapping[str, Any] = {"epochs": 1, "batch": 4, "lr": 0.001, "warm_up_steps": 0}
"""How a classifier and how a detector is trained."""

SMOKE_PRUNE: Mapping[str, Any] = {"accumulate": 1, "batches_per_score": 1, "batch": 8, "recalibrate": 2}
SMOKE_REMOVALS = 2
SMOKE_IMAGES = {"cifar10": 96, "cifar100": 96, "imagenet": 32}
BOX_IMAGES: Mapping[str, Any] = {"train": 8, "test": 4, "size": (64, 96)}
DETECTOR = "ifso:retinanet_resnet18_fpn"
DETECTOR_OPTIONS: Mapping[str, Any] = {"min_size": 64, "max_size": 96}


def smoke_data(row: Row, device: str, seed: int) -> Data:
    """Generated images in the shape of the row's, in the order of ``seed``."""
    if row.detects:
        return generated_boxes(**BOX_IMAGES, device=device, seed=seed)
    images = generated_images(row.data, device=device, seed=seed)
    first = torch.arange(SMOKE_IMAGES[row.data], device=device)
    return replace(images, train=images.train.part(first))


def smoke_settings(row: Row) -> TrainSettings:
    """How an unpruned network is trained."""
    return training_recipe("detection", **SMOKE_BOXES) if row.detects else TrainSettings(**SMOKE)


def smoke_prune(row: Row, removed: float) -> dict[str, Any]:
    """Settings of pruning that end in two or three steps."""
    units = max(1, int(_units(row.network, row.data) * removed / 2 / SMOKE_REMOVALS))
    return {**SMOKE_PRUNE, **({"batch": 2} if row.detects else {}), "units_per_step": units}


@cache
def _units(network: str, data: str) -> int:
    detects = data in BOXES
    images: Any = generated_boxes(**BOX_IMAGES) if detects else generated_images(data)
    options = DETECTOR_OPTIONS if detects else {}
    with torch.random.fork_rng(devices=[]):
        model = ifso.create_model(DETECTOR if detects else network, num_classes=images.num_classes, **options)
    return ifso.trace(model.eval() if detects else model, images.example_inputs()).num_units


def percents(*shares: float) -> str:
    """Shares as the names of rows have them.

    >>> percents(0.1, 0.9)
    '10-90'
    """
    return "-".join(f"{100 * share:.10g}" for share in shares)


UNTOUCHED: dict[str, Any] = {
    "shares": {"macs": 1.0}, "before": {"params": 1}, "after": {"params": 1}, "seconds": 0.0, "measures": [{}]
}  # fmt: skip
"""What a pruning would say that removed nothing."""

BATCH = 128
NAMES = {"coco": "coco:{},labels=ids", "bccd": "coco:{}"}
"""How data sets are opened. Published detectors for COCO have its ids as labels."""


@dataclass(frozen=True)
class Workspace:
    """The folders and the settings of a study.

    ``data`` are paths of data sets by name, ``weights`` is the folder of given weights; ``work`` keeps what was made.
    ``train`` are changes to all recipes, ``prune`` to all prunings. ``one_pruning`` prunes with seed 0 for all seeds.
    """

    work: Path
    results: Path
    data: Mapping[str, str] = field(default_factory=dict)
    weights: Path | None = None
    device: str = "cpu"
    prune_precision: str = "float32"
    train: Mapping[str, Any] = field(default_factory=dict)
    prune: Mapping[str, Any] = field(default_factory=dict)
    one_pruning: bool = False
    validation: int = 0
    smoke: bool = False

    def settings(self, job: Job) -> TrainSettings:
        """How a pruned network is fine-tuned."""
        smoke = (SMOKE_BOXES if job.row.detects else SMOKE) if self.smoke else {}
        return replace(job.train_settings(), **{**self.train, **smoke})

    def base_settings(self, row: Row) -> TrainSettings:
        """How an unpruned network is trained; a change of epochs is for fine-tuning only."""
        if self.smoke:
            return smoke_settings(row)
        return replace(row.base.train_settings(), **{key: self.train[key] for key in self.train if key != "epochs"})

    def check(self, job: Job) -> None:
        """Refuse what would fail later: settings of training or pruning, weights or data that are not there."""
        self.settings(job)
        if job.prunes:
            self.prune_as(job).recorded_settings()
        for row in (job.row, *([job.teacher] if job.teacher else ())):
            refuse_other_base(self, row)
        self.open(job.row, 0)

    def open(self, row: Row, seed: int) -> Data:
        """The data of a row, with the order and augmentation of ``seed``."""
        if self.smoke:
            return smoke_data(row, self.device, seed)
        if row.data not in self.data:
            raise DataError(f"{row.name} needs {row.data}; give --data {row.data}:PATH, or --smoke")
        name = NAMES.get(row.data, f"{row.data}:{{}}").format(self.data[row.data])
        data = _opened(name, self.device, self.validation)
        return replace(data, seed=seed) if is_dataclass(data) and not isinstance(data, type) else data

    def has_data(self, row: Row) -> bool:
        """Whether the data of a row is given."""
        return self.smoke or row.data in self.data

    def data_of(self, row: Row) -> str:
        """The digest of the data of a row."""
        return identity(self.open(row, 0))

    def trains(self, row: Row) -> bool:
        """Whether the unpruned network is trained here, and not given."""
        return row.base.weights is None or self.smoke

    def base_file(self, row: Row) -> Path:
        """The file with the weights of the unpruned network, which may not exist until it is trained."""
        if row.base.weights is None or self.smoke:
            return self.work / "base" / f"{row.task}{'-smoke' if self.smoke else ''}.safetensors"
        path = (self.weights or Path()) / row.base.weights
        if not path.is_file():
            where = f"not in {self.weights}" if self.weights else "not here"
            raise DataError(
                f"{row.name} begins with the weights {row.base.weights}, which are {where}; "
                "give their folder with --weights"
            )
        return path

    def fresh(self, row: Row, classes: int | None) -> nn.Module:
        """The unpruned network with random weights, always the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            small = self.smoke and row.detects
            network, options = (DETECTOR, DETECTOR_OPTIONS) if small else (row.network, row.options)
            return ifso.create_model(network, num_classes=classes, **options)

    def base(self, row: Row, data: Data) -> nn.Module:
        """The unpruned network, trained."""
        refuse_other_base(self, row)
        model = self.fresh(row, data.num_classes)
        load_weights(model, self.base_file(row))
        return self.placed(model)

    def keep_base(self, row: Row, model: nn.Module) -> None:
        """Write a trained network into its file."""
        path = self.base_file(row)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            about = {"made by": f"ifso {ifso.__version__}", DATA: self.data_of(row)}
            made = {} if self.smoke else {BASE: json.dumps(row.base.made)}
            write_tensors(new, storable(model.state_dict()), {**about, **made})

    def placed(self, model: nn.Module) -> nn.Module:
        """The model on the device, in the memory layout for training."""
        model = model.to(self.device)
        return model.to(memory_format=torch.channels_last) if self.train.get("channels_last") else model

    def pruning_of(self, job: Job) -> Job:
        """The job whose pruning this one takes: several recipes share one, and all seeds if ``one_pruning`` says so."""
        seed = 0 if self.one_pruning and job.criterion != "random" else job.seed
        criterion = DEFAULT_RUN if job.criterion == SCRATCH else job.criterion
        return replace(job, recipe="paper", seed=seed, criterion=criterion)

    def pruned_folder(self, job: Job) -> Path:
        """The folder of the pruning of a job, which may be that of other rows, too."""
        chosen, path = self.pruning_of(job), self.prune_as(job).passes
        row = f"{job.row.task}-{percents(path[0], path[-1])}" if path else job.row.name
        return self.prunings / f"{row}.{method_name(chosen.criterion, chosen.changes)}.{chosen.seed}"

    def pruned_network(self, job: Job) -> Path:
        """The folder of the network that a job fine-tunes: that of its pruning or, if that has several, one in it."""
        folder, path = self.pruned_folder(job), self.prune_as(job).passes
        last = not path or job.row.removed == path[-1]
        return folder if last else folder / NETWORKS / f"macs-{1 - job.row.removed:g}"

    @property
    def prunings(self) -> Path:
        """The folder of all pruned networks."""
        return self.work / ("smoke" if self.smoke else "pruned")

    @property
    def trainings(self) -> Path:
        """The folder of the checkpoints of all trainings."""
        return self.work / "training"

    def training_folder(self, job: Job) -> Path:
        """The folder of the checkpoints of a fine-tuning, the last of which holds the network."""
        return self.trainings / job.name

    def pruned(self, job: Job, data: Data) -> nn.Module:
        """The network that a job fine-tunes, as pruning left it."""
        if not job.prunes:
            return self.base(job.row, data)
        model = ifso.load(self.pruned_network(job), self.fresh(job.row, data.num_classes))
        if job.criterion == SCRATCH:
            reset_(model, job.seed)
        return self.placed(model)

    def trainable(self, job: Job, pruned: nn.Module, data: Data) -> nn.Module:
        """The ``pruned`` network as it is fine-tuned: on a GPU with zeros up to a multiple of 16, where that is exact.

        Detectors are large enough for a GPU as they are, and shall take less memory.
        """
        if not self.device.startswith("cuda") or job.row.detects or not job.prunes:
            return pruned
        return former_shape(self.placed(self.fresh(job.row, data.num_classes)), pruned, data)

    def prune_as(self, job: Job) -> Job:
        """``job`` with all changes to its pruning; in a smoke run only what sets a variant apart stays."""
        options = {**job.variant.options, **self.prune}
        if self.smoke:
            options = {**smoke_prune(job.row, max((job.row.removed, *job.path))), **job.changes}
        return replace(self.pruning_of(job), variant=replace(job.variant, options=options))

    def prune_options(self, job: Job) -> dict[str, Any]:
        """How the network of ``job`` is pruned, as a result records it, with the options of its ``criterion``."""
        used = self.prune_as(job)
        return {**used.prune, "seed": used.seed, "criterion": used.criterion_options}

    def about(self, job: Job) -> dict[str, Any]:
        """The settings that decide on a pruning beside those of ``ifso.prune``."""
        return {"batch": self.prune_as(job).prune.get("batch", BATCH), "precision": self.prune_precision}

    def is_pruned(self, job: Job) -> bool:
        """Whether the pruning of a job is finished, if it has one."""
        return not job.prunes or (self.pruned_folder(job) / "summary.json").is_file()

    def prune_facts(self, job: Job) -> dict[str, Any]:
        """Shares kept, seconds and accuracies of the network of a job; empty if its pruning has not been done."""
        if not job.prunes:
            return UNTOUCHED
        passed = self.passed(job)
        return facts_of(self.pruned_folder(job) / "summary.json") if passed is None else facts_at(passed)

    def passed(self, job: Job) -> Mapping[str, Any] | None:
        """What a pruning for several budgets tells of the network that it has left for ``job`` on its way."""
        folder, network = self.pruned_folder(job), self.pruned_network(job)
        if network == folder or not network.is_dir():
            return None
        return next((stage for stage in read_run(folder).stages if stage.get("network") == network.name), None)


def former_shape(wide: nn.Module, pruned: nn.Module, data: Data, say: Callable[[str], object] = str) -> nn.Module:
    """``pruned`` with zeros up to the next :data:`MULTIPLE`, at most as ``wide``; itself where this is not exact."""
    try:
        padded_(wide, pruned, data, multiple=MULTIPLE)
    except RecipeError as error:
        say(f"trained in its own shape, because {error}")
        return pruned
    return wide


def reset_(model: nn.Module, seed: int) -> None:
    """Give all layers of ``model`` new random weights, as torch would."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()


@cache
def _opened(name: str, device: str, validation: int) -> Data:
    """A data set, read once in a process."""
    return open_data(name, device=device, validation=validation)


def prune_job(space: Workspace, job: Job) -> None:
    """Prune for ``job`` into its folder, going on where an earlier try was interrupted."""
    folder, row, changed = space.pruned_folder(job), job.row, space.prune_as(job)
    data = space.open(row, changed.seed)
    model, about = space.base(row, data), space.about(job)
    where = {"out": folder}
    if (folder / "config.json").is_file():
        refuse_other_pruning(space, job)
        where = {"resume": folder}
    with tensor_cores(space.prune_precision):
        ifso.prune(
            model,
            data.train_batches(about["batch"]),
            loss_in(space.prune_precision, data.loss_fn),
            example_inputs=data.example_inputs(),
            evaluate=_evaluation(space, row, data),
            about={**about, DATA: identity(data)},
            **{**changed.prune_keywords(), **where},
        )


def _evaluation(space: Workspace, row: Row, data: Data) -> Callable[[nn.Module], dict[str, float]] | None:
    """Return a function that measures a network while it is pruned; None for a detector that cannot be measured."""
    examples = data.validation_batches() if space.validation else data.test_batches()
    if row.detects:
        return detector_measure(data, examples, space.prune_precision)

    def accuracy(network: nn.Module) -> dict[str, float]:
        with autocast(space.prune_precision, space.device):
            return {"accuracy": evaluate(network, examples).top1}

    return accuracy
