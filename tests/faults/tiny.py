"""A network and data so small that a whole run takes a moment; MODEL and DATA of the commands in these tests."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

CLASSES, SAMPLES, SIZE, BATCH = 3, 48, 4, 16


def network() -> nn.Module:
    """Two convolutions and a linear layer; always the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(2, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU(),
            nn.Conv2d(5, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES),
        )  # fmt: skip


def samples() -> tuple[Tensor, Tensor]:
    """Images whose class shows in their mean."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return torch.randn(SAMPLES, 2, SIZE, SIZE, generator=generator) + labels[:, None, None, None], labels


def listed() -> list[tuple[Tensor, Tensor]]:
    """Batches in a list."""
    images, labels = samples()
    return list(zip(images.split(BATCH), labels.split(BATCH), strict=True))


def data() -> SimpleNamespace:
    """For ``--data``."""
    return SimpleNamespace(
        train_batches=listed(), test_batches=listed()[:1], num_classes=CLASSES, input_shape=(2, SIZE, SIZE)
    )
