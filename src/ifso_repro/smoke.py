"""Smoke runs: a few generated images, and settings that bring a run to its end in about a minute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

import ifso
from ifso.data import Data
from ifso.data.generated import generated_boxes, generated_images
from ifso.training.settings import TrainSettings, training_recipe
from ifso_repro.schema import BOXES, Row

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


def smoke_row(row: Row) -> Row:
    """The row, with a small network in place of a detector."""
    return replace(row, network=DETECTOR, options=DETECTOR_OPTIONS) if row.detects else row


def smoke_settings(row: Row) -> TrainSettings:
    """How an unpruned network is trained."""
    return training_recipe("detection", **SMOKE_BOXES) if row.detects else TrainSettings(**SMOKE)


def smoke_prune(row: Row) -> dict[str, Any]:
    """Settings of pruning that end in two or three steps."""
    units = max(1, int(_units(row.network, row.data) * row.removed / 2 / SMOKE_REMOVALS))
    return {**SMOKE_PRUNE, **({"batch": 2} if row.detects else {}), "units_per_step": units}


@cache
def _units(network: str, data: str) -> int:
    detects = data in BOXES
    images: Any = generated_boxes(**BOX_IMAGES) if detects else generated_images(data)
    options = DETECTOR_OPTIONS if detects else {}
    with torch.random.fork_rng(devices=[]):
        model = ifso.create_model(DETECTOR if detects else network, num_classes=images.num_classes, **options)
    return ifso.trace(model.eval() if detects else model, images.example_inputs()).num_units
