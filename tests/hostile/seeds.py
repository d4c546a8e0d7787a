"""Valid files to start from: a real run of a small network, its fine-tuning, and other things people hand around."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ifso
from ifso.pruning.events import Silent
from ifso.runs.folder import RunFolder

EXAMPLE = (2, 1, 5, 5)


class Net(nn.Module):
    """Two convolutions, a norm and a linear layer; always the same weights."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.a, self.norm, self.b = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3, padding=1)
            self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.b(self.norm(self.a(x)).relu()).relu().mean((2, 3)))


def write_run(folder: Path) -> None:
    """A finished pruning run, with a fine-tuning in it and what ``ifso eval`` measured."""
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(EXAMPLE, generator=generator), torch.tensor([0, 1])) for _ in range(3)]
    about = {"arguments": {"model": "ifso:resnet20", "data": "digits", "seed": 3, "macs": 0.5, "criterion": "taylor"}}
    ifso.prune(
        Net(), batches, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), budget=ifso.Budget(macs=0.5),
        example_inputs=batches[0][0], criterion="taylor", accumulate=1, batches_per_score=1, checkpoint_every=0.0,
        listener=Silent(), evaluate=lambda _: {"accuracy": 50.0}, out=folder, about=about,
    )  # fmt: skip
    (folder / "eval.json").write_text(
        json.dumps({"networks": {"pruned": {"top1": 50.0, "loss": 0.7}}, "split": "test"})
    )
    settings = {"training": {"epochs": 3, "lr": 0.1}, "data": "digits", "validation": 0}
    with RunFolder.create(folder / "finetune", {"settings": settings, "about": {"run": str(folder)}}) as run:
        for epoch in (1, 2, 3):
            run.append(
                {"epoch": epoch, "loss": 1 / epoch, "lr": 0.1, "seconds": 2.0, "top1": 90 + epoch, "eval_loss": 0.5}
            )
        run.finish({"last_top1": 93.0, "split": "test", "before": {"pruned": 80.0}, "torch": "2.15", "ifso": "0.1.0"})


def result() -> dict[str, Any]:
    """A result of ``ifso repro``; see :func:`detection_result` for the other kind."""
    return {
        **_run_of("resnet32-cifar10-50", "top1"), "history": [{"epoch": 1, "loss": 0.5, "top1": 91.0, "lr": 0.1}],
        "variant": {"normalize": "none"}, "train": {"epochs": 2, "lr": 0.1}, "prune": {"accumulate": 10}, "base": {},
        "smoke": False,
    }  # fmt: skip


def detection_result() -> dict[str, Any]:
    """The result of a detector."""
    parts = {"before": {"map": 0.3}, "after": {"map": 0.2}, "memory": {"pruned": 1}, "channels": {"a": [3, 3, 8, 4]}}
    history = [{"epoch": 1, "loss": 0.5, "map": None, "lr": 0.1}]
    return {**_run_of("retinanet-coco-50", "map"), **parts, "history": history, "variant": {}, "train": {}, "prune": {},
            "base": {}, "smoke": False}  # fmt: skip


def _run_of(row: str, measure: str) -> dict[str, Any]:
    worth = {"base": 92.0, "last": 91.0, "best": 91.5, "pruned": 60.0}
    return {
        "row": row, "criterion": "ifso", "recipe": "paper", "seed": 0, "epochs": 2, "macs_kept": 0.5,
        "params_kept": 0.6,
        "seconds": 1.5, "prune_seconds": 2.5, "hardware": "a CPU", "torch": "2.15", "ifso": "0.1",
        **{f"{stage}_{measure}": value for stage, value in worth.items()},
    }  # fmt: skip


def latencies() -> dict[str, Any]:
    """What a run stores of its latencies."""
    return {"terms": [["conv", "a", 1e-6], ["linear", "fc", 2e-6]], "constant": 0.001, "total": 0.01}


def coco(split: str) -> dict[str, Any]:
    """A COCO file of three images."""
    return {
        "info": {"year": 2017},
        "images": [{"id": 11 + k, "file_name": f"{split}_{k}.png", "height": 6, "width": 8} for k in range(3)],
        "annotations": [
            {"id": 1, "image_id": 11, "category_id": 3, "bbox": [1, 1, 4, 3], "area": 12.0, "iscrowd": 0},
            {"id": 2, "image_id": 12, "category_id": 7, "bbox": [0.5, 0, 7.5, 6], "area": 45.0},
            {"id": 3, "image_id": 12, "category_id": 3, "bbox": [2, 2, 2, 2], "iscrowd": 1},
        ],
        "categories": [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat", "supercategory": "animal"}],
    }
