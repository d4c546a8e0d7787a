"""Smoke runs: a few generated images, and settings that bring a run to its end in about a minute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

import ifso
from ifso.data import Data
from ifso.data.generated import generated_images
from ifso.models import create_model
from ifso_repro import detectors
from ifso_repro.schema import BOXES, Row

SMOKE: Mapping[str, Any] = {"epochs": 1, "batch": 16}
"""How long a network is trained in a smoke run, on a few generated images."""

SMOKE_PRUNE: Mapping[str, Any] = {"accumulate": 1, "batches_per_score": 1, "batch": 8, "recalibrate": 2}
SMOKE_REMOVALS = 2
SMOKE_IMAGES = {"cifar10": 96, "cifar100": 96, "imagenet": 32}


def smoke_data(row: Row, device: str, seed: int) -> Data:
    """Generated images in the shape of the row's, in the order of ``seed``."""
    if row.detects:
        return detectors.smoke_boxes(device, seed)
    made_up = generated_images(row.data, device=device, seed=seed)
    first = torch.arange(SMOKE_IMAGES[row.data], device=device)
    return replace(made_up, train=made_up.train.part(first))


def few_removals(row: Row) -> int:
    """Units that go at a time if there shall be two or three steps."""
    return max(1, int(_units(row.network, row.data) * row.removed / 2 / SMOKE_REMOVALS))


@cache
def _units(network: str, data: str) -> int:
    if data in BOXES:
        return detectors.smoke_units()
    images = generated_images(data)
    with torch.random.fork_rng(devices=[]):
        model = create_model(network, num_classes=images.num_classes)
    return ifso.trace(model, images.example_inputs()).num_units
