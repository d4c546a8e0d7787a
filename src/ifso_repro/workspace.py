"""Where the runs of a study are made: data, unpruned networks and pruned ones, each made once and kept in files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ifso
from ifso.common.files import replacing, storable, write_tensors
from ifso.data import Data, open_data
from ifso.errors import DataError, RecipeError, RunError
from ifso.models import create_model, load_weights
from ifso.pruning.prune import prune
from ifso.pruning.settings import PRESETS, Settings
from ifso.runs.folder import differences, read_config
from ifso.surgery.recipe import digest_of
from ifso.surgery.store import load
from ifso.training.evaluation import evaluate
from ifso.training.padded_finetune import padded_
from ifso.training.precision import autocast, loss_in, tensor_cores
from ifso.training.settings import TrainSettings
from ifso_repro import detectors
from ifso_repro import provenance as kept
from ifso_repro import provenance as remains
from ifso_repro.jobs import PRESET, Job, method_name
from ifso_repro.provenance import identity
from ifso_repro.schema import Row
from ifso_repro.smoke import SMOKE, SMOKE_PRUNE, few_removals, smoke_data

BATCH = 128
BASE, DATA = "base", "data"
"""The entries in the header of a file that tell how an unpruned network was trained, and on which data."""


@dataclass(frozen=True)
class Workspace:
    """``data`` says where each data set is, ``weights`` where given weights are; ``work`` keeps what was made.

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
        smoke = detectors.SMOKE if job.row.detects else SMOKE
        return replace(job.train_settings(), **{**self.train, **(smoke if self.smoke else {})})

    def base_settings(self, row: Row) -> TrainSettings:
        """How an unpruned network is trained; a change of epochs is for fine-tuning only."""
        if self.smoke:
            return detectors.smoke_settings() if row.detects else TrainSettings(**SMOKE)
        return replace(row.base.train_settings(), **{key: self.train[key] for key in self.train if key != "epochs"})

    def check(self, job: Job) -> None:
        """Refuse what would fail later: settings of training or pruning, weights or data that are not there."""
        self.settings(job)
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
        name = detectors.NAMES.get(row.data, f"{row.data}:{{}}").format(self.data[row.data])
        data = _opened(name, self.device, self.validation)
        return replace(data, seed=seed) if is_dataclass(data) and not isinstance(data, type) else data

    def has_data(self, row: Row) -> bool:
        """Is the data of a row given?"""
        return self.smoke or row.data in self.data

    def data_of(self, row: Row) -> str:
        """What tells the data of a row from others."""
        return identity(self.open(row, 0))

    def trains(self, row: Row) -> bool:
        """Is the unpruned network trained here, and not given?"""
        return row.base.weights is None or self.smoke

    def base_file(self, row: Row) -> Path:
        """Where the weights of the unpruned network are, or will be once it is trained."""
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
            used = detectors.smoke_row(row) if self.smoke and row.detects else row
            return create_model(used.network, num_classes=classes, **used.options)

    def base(self, row: Row, data: Data) -> nn.Module:
        """The unpruned network, trained."""
        refuse_other_base(self, row)
        model = self.fresh(row, data.num_classes)
        load_weights(model, self.base_file(row))
        return self.placed(model)

    def keep_base(self, row: Row, model: nn.Module) -> None:
        """A trained network into its file."""
        place = self.base_file(row)
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as new:
            about = {"made by": f"ifso {ifso.__version__}", DATA: self.data_of(row)}
            made = {} if self.smoke else {BASE: json.dumps(row.base.made)}
            write_tensors(new, storable(model.state_dict()), {**about, **made})

    def placed(self, model: nn.Module) -> nn.Module:
        """On the device, in the memory layout for training."""
        model = model.to(self.device)
        return model.to(memory_format=torch.channels_last) if self.train.get("channels_last") else model

    def pruning_of(self, job: Job) -> Job:
        """The job whose pruning this one takes: several recipes share one, and all seeds if so wished."""
        chance = job.criterion == "random"
        return replace(job, recipe="paper", seed=0) if self.one_pruning and not chance else replace(job, recipe="paper")

    def pruned_folder(self, job: Job) -> Path:
        """Where a pruned network is, or will be."""
        chosen = self.pruning_of(job)
        name = f"{chosen.row.name}.{method_name(chosen.criterion, chosen.changes)}.{chosen.seed}"
        return self.prunings / name

    @property
    def prunings(self) -> Path:
        """Where all pruned networks are."""
        return self.work / ("smoke" if self.smoke else "pruned")

    @property
    def trainings(self) -> Path:
        """Where the checkpoints of all trainings are."""
        return self.work / "training"

    def training_folder(self, job: Job) -> Path:
        """Where the checkpoints of a fine-tuning are, the last of which holds the network."""
        return self.trainings / job.name

    def pruned(self, job: Job, data: Data) -> nn.Module:
        """The pruned network of a job, as pruning left it."""
        return self.placed(load(self.pruned_folder(job), self.fresh(job.row, data.num_classes)))

    def trainable(self, job: Job, pruned: nn.Module, data: Data) -> nn.Module:
        """The ``pruned`` network as it is fine-tuned: on a GPU in its former shape, with zeros, where that is exact.

        Detectors are large enough for a GPU as they are, and shall take less memory.
        """
        if not self.device.startswith("cuda") or job.row.detects:
            return pruned
        wide = self.placed(self.fresh(job.row, data.num_classes))
        try:
            padded_(wide, pruned, data)
        except RecipeError:
            return pruned
        return wide

    def prune_as(self, job: Job) -> Job:
        """``job`` with the space's changes to its pruning; in a smoke run only what sets a variant apart stays."""
        options = {**job.variant.options, **self.prune}
        if self.smoke:
            usual = detectors.SMOKE_PRUNE if job.row.detects else SMOKE_PRUNE
            options = {**usual, "units_per_step": few_removals(job.row), **job.changes}
        return replace(self.pruning_of(job), variant=replace(job.variant, options=options))

    def prune_options(self, job: Job) -> dict[str, Any]:
        """How the network of ``job`` is pruned, for the record; ``criterion`` are the options of its criterion."""
        used = self.prune_as(job)
        return {**used.prune, "seed": used.seed, "criterion": used.criterion_options}

    def about(self, job: Job) -> dict[str, Any]:
        """What decides on a pruning beside the settings of ``ifso.prune``."""
        return {"batch": self.prune_as(job).prune.get("batch", BATCH), "precision": self.prune_precision}

    def is_pruned(self, job: Job) -> bool:
        """Is the pruning of a job there, finished?"""
        return (self.pruned_folder(job) / "summary.json").is_file()

    def prune_facts(self, job: Job) -> dict[str, Any]:
        """Shares kept, seconds and accuracies of the pruning of a job; empty if that has not been done."""
        return facts_of(self.pruned_folder(job) / "summary.json")


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
        prune(
            model,
            data.train_batches(about["batch"]),
            loss_in(space.prune_precision, data.loss_fn),
            example_inputs=data.example_inputs(),
            evaluate=_evaluation(space, row, data),
            about={**about, DATA: identity(data)},
            **{**changed.prune_keywords(), **where},
        )


def _evaluation(space: Workspace, row: Row, data: Data) -> Callable[[nn.Module], dict[str, float]] | None:
    """What tells how well a network does while it is pruned; None for a detector that cannot be measured here."""
    examples = data.validation_batches() if space.validation else data.test_batches()
    if row.detects:
        measured = detectors.can_measure()
        return detectors.averages(data, examples, space.prune_precision) if measured else None

    def accuracy(network: nn.Module) -> dict[str, float]:
        with autocast(space.prune_precision, space.device):
            return {"accuracy": evaluate(network, examples).top1}

    return accuracy
