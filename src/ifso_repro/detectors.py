"""What is special about rows of detectors: data, smoke runs, average precision, memory of training, channels."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ifso.common.files import replacing
from ifso.data.base import AVERAGES, Data
from ifso.data.coco import CocoData
from ifso.data.generated import generated_boxes
from ifso.errors import DataError, IfsoError, RunError
from ifso.graph.tracing import trace
from ifso.models import create_model
from ifso.tasks.detection import detection_loss
from ifso.training.average_precision import check_evaluator
from ifso.training.evaluation import quality
from ifso.training.profiling import training_peak
from ifso.training.settings import TrainSettings, recipe_of
from ifso_repro.schema import Row

NAMES = {"coco": "coco:{},labels=ids", "bccd": "coco:{}"}
"""How data sets are opened. Published detectors for COCO have its ids as labels."""

SMOKE_NETWORK = "ifso:retinanet_resnet18_fpn"
SMOKE_SIZE = (64, 96)
SMOKE_OPTIONS: Mapping[str, Any] = {"min_size": SMOKE_SIZE[0], "max_size": SMOKE_SIZE[1]}
SMOKE: Mapping[str, Any] = {"epochs": 1, "batch": 4, "lr": 0.001, "warm_up_steps": 0}
"""How a detector is trained in a smoke run, on a few generated images."""

SMOKE_PRUNE: Mapping[str, Any] = {"accumulate": 1, "batches_per_score": 1, "batch": 2, "recalibrate": 2}
SMOKE_IMAGES: Mapping[str, Any] = {"train": 8, "test": 4}
MEMORY = "memory.json"
EVALUATIONS = 5
"""How often a detector is evaluated while it is trained."""


def smoke_boxes(device: str, seed: int) -> CocoData:
    """A few generated images."""
    return generated_boxes(**SMOKE_IMAGES, size=SMOKE_SIZE, device=device, seed=seed)


def smoke_row(row: Row) -> Row:
    """The row with a small detector."""
    return replace(row, network=SMOKE_NETWORK, options=SMOKE_OPTIONS)


def smoke_units() -> int:
    """How many units the small detector has."""
    data = smoke_boxes("cpu", 0)
    with torch.random.fork_rng(devices=[]):
        model = create_model(SMOKE_NETWORK, num_classes=data.num_classes, **SMOKE_OPTIONS)
    return trace(model.eval(), data.example_inputs()).num_units


def smoke_settings() -> TrainSettings:
    """How an unpruned detector is trained in a smoke run."""
    return recipe_of("detection", **SMOKE)


def can_measure() -> bool:
    """Is what computes average precision installed? Networks can be trained and kept without it."""
    try:
        check_evaluator()
    except IfsoError:
        return False
    return True


def averages(data: Data, batches: Any, precision: str) -> Callable[[nn.Module], dict[str, float]]:
    """What tells ``map``, ``map50``, ``map75`` and those by area of a detector, in per cent."""

    def measure(model: nn.Module) -> dict[str, float]:
        found = quality(model, data, batches, precision, over_ranks=False).detection
        values = {name: getattr(found, name) for name in AVERAGES}
        if values["map"] is None:
            raise DataError(f"{data.name}: there is no box to find in the images that are evaluated on; give others")
        return {name: value for name, value in values.items() if value is not None}

    return measure


def memory_of_training(
    folder: Path, unpruned: nn.Module, pruned: nn.Module, data: Data, settings: TrainSettings
) -> dict[str, Any]:
    """Bytes that a step of training takes at its peak, without a teacher, of both networks; kept in ``folder``.

    What is there is taken as it is: a network may be evaluated elsewhere than it was fine-tuned.
    """
    place = folder / MEMORY
    try:
        if place.is_file():
            return dict(json.loads(place.read_text(encoding="utf-8")))
    except ValueError as error:
        raise RunError(f"{place} is damaged; remove it and give the same command again") from error
    batch = next(iter(data.train_batches(settings.batch)))
    device = next(pruned.parameters()).device
    found = {
        **{
            name: training_peak(model, batch, detection_loss, settings.precision)
            for name, model in (("unpruned", unpruned), ("pruned", pruned))
        },
        "batch": settings.batch,
        "precision": settings.precision,
        "hardware": hardware(str(device)),
        "torch": str(torch.__version__),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(place) as new:
            new.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{place} cannot be written: {' '.join(str(error).split())}") from error
    return found


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
    found, small = {}, dict(pruned.named_modules())
    for name, layer in unpruned.named_modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            (read, written), (read_now, written_now) = _ends(layer), _ends(small[name])
            found[name] = [read, read_now, written, written_now]
    return found


def _ends(layer: Any) -> tuple[int, int]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels
