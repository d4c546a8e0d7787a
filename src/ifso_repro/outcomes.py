"""What a fine-tuned network came to, put together from its pruning and its training, and what is measured for that."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import ifso
from ifso.data.base import AVERAGES, Data
from ifso.errors import DataError, IfsoError, RunError
from ifso.tasks.detection import detection_loss
from ifso.training.average_precision import check_evaluator
from ifso.training.evaluation import quality
from ifso.training.profiling import training_peak
from ifso.training.settings import TrainSettings
from ifso.training.trainer import Trainer
from ifso_repro.jobs import Job, teacher_of
from ifso_repro.results import AnyResult, DetectionResult, Result, keep_text

if TYPE_CHECKING:
    from ifso_repro.workspace import Workspace

Measure = Callable[[nn.Module], dict[str, float]]
MEMORY = "memory.json"


def result_of(
    space: Workspace, job: Job, lane: Trainer, base: Mapping[str, float], teacher: Mapping[str, float] | None
) -> AnyResult:
    """The result of a classifier, with the top-1 of its unpruned network and, if that is another, of its teacher."""
    pruned = space.prune_facts(job)["measures"][-1]["accuracy"] if job.prunes else base["top1"]
    taught = {} if teacher is None else {**teacher_of(job), "top1": teacher["top1"]}
    return Result(base_top1=base["top1"], pruned_top1=pruned, teacher=taught, **_common(space, job, lane, "top1"))


def detection_result_of(
    space: Workspace, job: Job, lane: Trainer, unpruned: nn.Module, base: Mapping[str, float], measure: Measure
) -> AnyResult:
    """The result of a detector; what could not be measured where it was trained is measured now."""
    folder = space.training_folder(job)
    try:
        check_evaluator()
    except IfsoError as error:
        raise IfsoError(
            f"{error}; the fine-tuned network is kept in {folder}: the same command measures it where that is there"
        ) from error
    data = space.open(job.row, job.seed)
    after = lane.done[-1].measures
    if "map" not in after:
        after.update(measure(lane.model))
    as_pruned = space.pruned(job, data)
    pruned = space.prune_facts(job)["measures"][-1].get("map")
    memory = memory_of_training(folder, unpruned, as_pruned, data, lane.settings)
    values = {
        **_common(space, job, lane, "map"),
        "base_map": base["map"],
        "pruned_map": measure(as_pruned)["map"] if pruned is None else pruned,
        "before": dict(base),
        "after": dict(after),
        "memory": memory,
        "channels": channels_of(unpruned, as_pruned),
    }
    return DetectionResult(**{**values, **{name: memory[name] for name in ("hardware", "torch")}})


def _common(space: Workspace, job: Job, lane: Trainer, measure: str) -> dict[str, Any]:
    """The fields that results of all networks have; ``measure`` is ``"top1"`` or ``"map"``."""
    facts = space.prune_facts(job)
    history: list[dict[str, Any]] = [
        {"epoch": epoch.number, "loss": epoch.loss, measure: epoch.measures.get(measure), "lr": epoch.lr}
        for epoch in lane.done
    ]
    measured = [entry[measure] for entry in history if entry[measure] is not None]
    return {
        "row": job.row.name,
        "criterion": job.criterion,
        "recipe": job.recipe,
        "seed": job.seed,
        "epochs": lane.settings.epochs,
        "macs_kept": facts["shares"]["macs"],
        f"last_{measure}": measured[-1],
        f"best_{measure}": max(measured),
        "history": history,
        "seconds": sum(epoch.seconds for epoch in lane.done),
        "hardware": hardware(space.device),
        "torch": str(torch.__version__),
        "params_kept": facts["after"]["params"] / facts["before"]["params"],
        "prune_seconds": facts["seconds"],
        "ifso": ifso.__version__,
        "variant": job.changes,
        "train": lane.settings.as_dict(),
        "prune": space.prune_options(job),
        "base": job.row.base.as_dict(),
        "smoke": space.smoke,
        "data": space.data_of(job.row),
    }


def detector_measure(data: Data, batches: Any, precision: str) -> Measure | None:
    """Return a function for the average precision of a detector; None where that cannot be computed."""
    try:
        check_evaluator()
    except IfsoError:
        return None
    return averages(data, batches, precision)


def averages(data: Data, batches: Any, precision: str) -> Measure:
    """Return a function for ``map``, ``map50``, ``map75`` and those by area of a detector, in per cent."""

    def measure(model: nn.Module) -> dict[str, float]:
        measured = quality(model, data, batches, precision, over_ranks=False).detection
        values = {name: getattr(measured, name) for name in AVERAGES}
        if values["map"] is None:
            raise DataError(f"{data.name}: there is no box to find in the images that are evaluated on; give others")
        return {name: value for name, value in values.items() if value is not None}

    return measure


def memory_of_training(
    folder: Path, unpruned: nn.Module, pruned: nn.Module, data: Data, settings: TrainSettings
) -> dict[str, Any]:
    """Bytes that a step of training takes at its peak, without a teacher, of both networks; kept in ``folder``.

    A file that exists is taken as it is: a network may be evaluated elsewhere than it was fine-tuned.
    """
    path = folder / MEMORY
    try:
        if path.is_file():
            return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise RunError(f"{path} is damaged; remove it and give the same command again") from error
    batch, precision = next(iter(data.train_batches(settings.batch))), settings.precision
    measured = {
        "unpruned": training_peak(unpruned, batch, detection_loss, precision),
        "pruned": training_peak(pruned, batch, detection_loss, precision),
        "batch": settings.batch,
        "precision": precision,
        "hardware": hardware(str(next(pruned.parameters()).device)),
        "torch": str(torch.__version__),
    }
    keep_text(path, json.dumps(measured, indent=1) + "\n")
    return measured


def hardware(device: str) -> str:
    """The name of the GPU, or the kind of processor."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def channels_of(unpruned: nn.Module, pruned: nn.Module) -> dict[str, list[int]]:
    """Channels that every convolution and matrix reads and writes: [read before, now, written before, now].

    >>> channels_of(nn.Sequential(nn.Conv2d(3, 8, 1)), nn.Sequential(nn.Conv2d(3, 5, 1)))
    {'0': [3, 3, 8, 5]}
    """
    small = dict(pruned.named_modules())
    return {
        name: [getattr(each, end) for end in _ends(layer) for each in (layer, small[name])]
        for name, layer in unpruned.named_modules()
        if isinstance(layer, (nn.Conv2d, nn.Linear))
    }


def _ends(layer: nn.Module) -> tuple[str, str]:
    """The names of a layer's two numbers of channels."""
    return ("in_features", "out_features") if isinstance(layer, nn.Linear) else ("in_channels", "out_channels")
