"""A row of a tiny network on a few made-up images, for tests of ``ifso repro``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ifso.cli.main import main
from ifso_repro.schema import Base, Row
from ifso_repro.workspace import prune_job

NETWORKS = """
import multiprocessing
import os
import signal

from torch import nn


def tiny(num_classes):
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=4), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, stride=2), nn.BatchNorm2d(6),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, num_classes),
    )


def other(num_classes):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, num_classes),
    )


def deadly(num_classes):
    if multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return tiny(num_classes)
"""
NORMALIZE = {"ifso": "sqrt-memory", "random": "none", "magnitude": "none"}


def tiny_row(folder: Path, network: str = "tiny", removed: float = 0.4, **changes: object) -> Row:
    """A row whose unpruned network is trained for one epoch."""
    file = folder / "nets.py"
    file.write_text(NETWORKS)
    values = {
        "name": f"{network}-cifar10-{removed * 100:.0f}", "network": f"{file}:{network}", "data": "cifar10",
        "removed": removed, "criteria": ("ifso", "random"), "recipes": ("paper", "ours"), "seeds": 1,
        "base": Base(recipe="paper", epochs=1, batch=16), "normalize": NORMALIZE,
        "prune": {"accumulate": 1, "batches_per_score": 1, "units_per_step": 2, "recalibrate": 1, "lr": 0.01,
                  "batch": 8},
        "finetune": {"epochs": 2, "batch": 16},
    }  # fmt: skip
    return Row(**{**values, **changes})


def few_images(folder: Path) -> str:
    """A file as of CIFAR-10 with 48 training and 20 test images whose class shows in their mean."""
    random, file = np.random.default_rng(0), folder / "few.npz"
    arrays = {}
    for part, count in (("train", 48), ("test", 20)):
        labels = random.integers(0, 10, count)
        noise = random.integers(0, 50, (count, 32, 32, 3))
        arrays |= {f"x_{part}": (noise + 20 * labels[:, None, None, None]).astype(np.uint8), f"y_{part}": labels}
    np.savez(file, **arrays)
    return str(file)


def status_of(words: str) -> object:
    """The exit status of ``ifso repro`` with these words."""
    try:
        return main(["repro", *words.split()])
    except SystemExit as stop:
        return stop.code


class AtOnce:
    """Prunes in this process as soon as it is asked."""

    made: list[str]

    def __init__(self, shop, workers, threads, say):
        self.shop = shop

    def ask(self, job):
        AtOnce.made.append(self.shop.pruned_folder(job).name)
        prune_job(self.shop, job)

    def turn(self):
        pass

    def stop(self):
        pass
