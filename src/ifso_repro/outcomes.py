"""What a fine-tuned network came to, put together from its pruning and its training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ifso
from ifso.errors import IfsoError
from ifso.training.average_precision import check_evaluator
from ifso.training.trainer import Lane
from ifso_repro.detectors import channels_of, hardware, memory_of_training
from ifso_repro.jobs import Job, teacher_of
from ifso_repro.results import AnyResult, DetectionResult, Result
from ifso_repro.workspace import Workspace

Measure = Callable[[nn.Module], dict[str, float]]


def result_of(
    shop: Workspace, job: Job, lane: Lane, base: Mapping[str, float], teacher: Mapping[str, float] | None
) -> AnyResult:
    """Of a classifier whose unpruned network is worth ``base``, and its ``teacher``, if that is another, so much."""
    pruned = shop.prune_facts(job)["measures"][-1]["accuracy"]
    told = {} if teacher is None else {**teacher_of(job), "top1": teacher["top1"]}
    return Result(base_top1=base["top1"], pruned_top1=pruned, teacher=told, **_common(shop, job, lane, "top1"))


def detection_result_of(
    shop: Workspace, job: Job, lane: Lane, unpruned: nn.Module, base: Mapping[str, float], measure: Measure
) -> AnyResult:
    """Of a detector; what was not measured on the way, because that could not be done there, is measured now."""
    _refuse_unmeasured(shop.training_folder(job))
    data = shop.open(job.row, job.seed)
    after = lane.done[-1].measures
    if "map" not in after:
        after.update(measure(lane.model))
    as_pruned = shop.pruned(job, data)
    pruned = shop.prune_facts(job)["measures"][-1].get("map")
    memory = memory_of_training(shop.training_folder(job), unpruned, as_pruned, data, lane.settings)
    found = {
        **_common(shop, job, lane, "map"),
        "base_map": base["map"],
        "pruned_map": measure(as_pruned)["map"] if pruned is None else pruned,
        "before": dict(base),
        "after": dict(after),
        "memory": memory,
        "channels": channels_of(unpruned, as_pruned),
    }
    return DetectionResult(**{**found, **{name: memory[name] for name in ("hardware", "torch")}})


def _refuse_unmeasured(kept: Path) -> None:
    """A detector may be trained where its average precision cannot be computed, and measured elsewhere."""
    try:
        check_evaluator()
    except IfsoError as error:
        raise IfsoError(
            f"{error}; the fine-tuned network is kept in {kept}: the same command measures it where that is there"
        ) from error


def _common(shop: Workspace, job: Job, lane: Lane, measure: str) -> dict[str, Any]:
    """What is known of every network; ``measure`` is what it is worth."""
    facts = shop.prune_facts(job)
    history: list[dict[str, Any]] = [
        {"epoch": epoch.number, "loss": epoch.loss, measure: epoch.measures.get(measure), "lr": epoch.lr}
        for epoch in lane.done
    ]
    found = [entry[measure] for entry in history if entry[measure] is not None]
    return {
        "row": job.row.name,
        "criterion": job.criterion,
        "recipe": job.recipe,
        "seed": job.seed,
        "epochs": lane.settings.epochs,
        "macs_kept": facts["shares"]["macs"],
        f"last_{measure}": found[-1],
        f"best_{measure}": max(found),
        "history": history,
        "seconds": sum(epoch.seconds for epoch in lane.done),
        "hardware": hardware(shop.device),
        "torch": torch.__version__,
        "params_kept": facts["after"]["params"] / facts["before"]["params"],
        "prune_seconds": facts["seconds"],
        "ifso": ifso.__version__,
        "variant": job.changes,
        "train": lane.settings.as_dict(),
        "prune": shop.prune_options(job),
        "base": job.row.base.as_dict(),
        "smoke": shop.smoke,
        "data": shop.data_of(job.row),
    }
