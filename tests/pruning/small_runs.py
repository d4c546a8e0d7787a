"""Small pruning runs that are stopped and go on; see test_resume.py."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ifso
from ifso.pruning.events import Removal, Silent
from ifso.pruning.result import PruneResult

CLASSES, SAMPLES, SIZE = 3, 40, 5


class Block(nn.Module):
    """A residual block of width ``width`` with ``inner`` channels in the middle."""

    def __init__(self, width: int, inner: int, drop: float) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(self.drop(F.relu(self.bn1(self.conv1(x)))))))


class SmallResNet(nn.Module):
    """A stem, two blocks, a linear layer; always the same weights."""

    def __init__(self, width: int = 5, inner: int = 7, drop: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.stem, self.bn = nn.Conv2d(2, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
            self.one, self.two = Block(width, inner, drop), Block(width, inner, drop)
            self.fc = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.two(self.one(F.relu(self.bn(self.stem(x))))).mean((2, 3)))


def samples() -> tuple[Tensor, Tensor]:
    """Images whose class shows in their mean."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return torch.randn(SAMPLES, 2, SIZE, SIZE, generator=generator) + labels[:, None, None, None], labels


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Random in all three ways that users know."""

    def __init__(self) -> None:
        self.images, self.labels = samples()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index] + float(np.random.randn()) * 0.1 + 0.1 * torch.randn(())  # noqa: NPY002
        return (image.flip(-1) if random.random() < 0.5 else image), self.labels[index]


def listed() -> list[tuple[Tensor, Tensor]]:
    """Batches of 8 in a list."""
    images, labels = samples()
    return list(zip(images.split(8), labels.split(8), strict=True))


def shuffled(**options: Any) -> DataLoader[Any]:
    """A loader that shuffles; its last batch is smaller."""
    return DataLoader(TensorDataset(*samples()), batch_size=12, shuffle=True, **options)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


Case = tuple[Callable[[], nn.Module], Callable[[], Iterable[Any]], dict[str, Any]]

CASES: dict[str, Case] = {
    "plain": (SmallResNet, listed, {}),
    "dropout": (lambda: SmallResNet(drop=0.3), listed, {}),
    "shuffled": (SmallResNet, shuffled, {}),
    "shuffled by a generator": (SmallResNet, lambda: shuffled(generator=torch.Generator().manual_seed(9)), {}),
    "augmented": (SmallResNet, lambda: DataLoader(Augmented(), batch_size=10, shuffle=True), {}),
    "adam": (SmallResNet, listed, {"optimizer": lambda parameters: torch.optim.Adam(parameters, lr=1e-3)}),
    "one-shot": (SmallResNet, listed, {"schedule": "one-shot"}),
    "mixed": (SmallResNet, listed, {"schedule": ifso.Mixed(0.5)}),
    "three at a time": (SmallResNet, listed, {"units_per_step": 3, "accumulate": 3, "batches_per_score": 2}),
    "magnitude": (SmallResNet, shuffled, {"criterion": "magnitude"}),
    "taylor": (SmallResNet, shuffled, {"criterion": "taylor", "train_mode": False}),
    "authors": (SmallResNet, listed, {"preset": "authors"}),
    "channels last": (lambda: SmallResNet().to(memory_format=torch.channels_last), shuffled, {}),
}


def prune(case: str, folder: Path | None = None, **changes: Any) -> PruneResult:
    """Prune a fresh network; into ``folder``, or with the run there, as a user would who finds one there or not."""
    model, batches, options = CASES[case]
    chosen = {
        "budget": ifso.Budget(macs=0.5), "example_inputs": torch.zeros(1, 2, SIZE, SIZE), "accumulate": 1,
        "batches_per_score": 1, "recalibrate": 3, "checkpoint_every": 0.0, **options, **changes,
    }  # fmt: skip
    if folder is not None:
        chosen |= {"resume": folder} if (folder / "config.json").is_file() else {"out": folder}
    chosen = {"model": model(), "train_batches": batches(), "loss_fn": loss_fn, **chosen}
    return ifso.prune(**chosen)


class Stop(Exception):
    """Raised by a listener, as Ctrl-C would be."""


class StopAt(Silent):
    """Stops a run at the n-th removal of this process, or when it is about to say something."""

    def __init__(self, number: int = 0, words: str | None = None) -> None:
        self.left, self.words = number, words

    def removed(self, removal: Removal) -> None:
        self.left -= 1
        if self.left == 0:
            raise Stop

    def said(self, line: str) -> None:
        if self.words is not None and line.startswith(self.words):
            raise Stop


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock says."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in found]


def contents(folder: Path) -> dict[str, Any]:
    """Everything that must not depend on interruptions, bit for bit."""
    files = {name: (folder / name).read_bytes() for name in ("model.safetensors", "recipe.json")}
    scores = {name: tensor.numpy().tobytes() for name, tensor in load_file(folder / "scores.safetensors").items()}
    return {**files, "scores.safetensors": scores, "metrics.jsonl": lines(folder)}
