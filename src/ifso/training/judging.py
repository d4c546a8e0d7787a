"""How well a network in training does, by what its data asks for; one clear line where a batch does not fit it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from ifso.common.text import describe_error
from ifso.data.sets import Data
from ifso.errors import DataError, IfsoError, TrainingError
from ifso.training.average_precision import check_evaluator
from ifso.training.examining import Examiner, evaluated_batches
from ifso.training.headline import AVERAGES, detects
from ifso.training.lane import Measures
from ifso.training.losses import cross_entropy
from ifso.training.measuring import explaining, quality
from ifso.training.optimizers import untrainable
from ifso.training.settings import TrainSettings

Result = TypeVar("Result")


def examination(
    model: nn.Module, data: Data, settings: TrainSettings, *, validation: bool
) -> Callable[[nn.Module], Measures]:
    """What tells how well the network does: ``top1``, ``top5`` and ``eval_loss``; of another loss the mean alone.

    Of a detector ``map``, ``map50``, ``map75`` and those by area. Numbers that are not finite are left out.
    """
    if detects(data):
        check_evaluator()
    batches = evaluated_batches(data, _device(model), validation=validation)
    examiner = Examiner(batches, settings.precision)

    def measures(network: nn.Module) -> Measures:
        if data.loss_fn is cross_entropy:
            with explaining(f"evaluation batches of {data.name}"):
                found: Any = examiner(network)
        else:
            found = quality(network, data, batches, settings.precision, over_ranks=True)
        if detects(data):
            values = {name: getattr(found.detection, name) for name in AVERAGES}
        else:
            values = {"top1": found.top1, "top5": found.top5, "eval_loss": found.loss}
        return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}

    return measures


def _device(model: nn.Module) -> torch.device:
    for parameter in model.parameters():
        return parameter.device
    raise untrainable(model)


def measured(model: nn.Module, data: Data, settings: TrainSettings, *, validation: bool) -> Measures:
    """What :func:`examination` says of a network; nothing where a user's data has no test set."""
    try:
        measures = examination(model, data, settings, validation=validation)
    except DataError:
        if validation:
            raise
        return {}
    return measures(model)


def explained(loss_fn: Callable[[nn.Module, Any], Result], data: Data) -> Callable[[nn.Module, Any], Result]:
    """The loss, or losses by name, with one clear line where a batch does not fit the network."""
    boxes = detects(data)
    what = "images and boxes" if boxes else "images and labels"
    gives = "a dict of losses for (images, targets)" if boxes else "[N, classes]"

    def loss(model: nn.Module, batch: Any) -> Result:
        try:
            return loss_fn(model, batch)
        except (IfsoError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise TrainingError(
                f"a batch of {data.name} cannot be learned from ({describe_error(error)}); check its {what}, "
                f"and that the network gives {gives} in train mode"
            ) from error

    return loss
