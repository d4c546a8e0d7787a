"""One of two processes that evaluate a detector together; see test_average_precision.py."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ifso.data.batches import WHOLE, Shard
from ifso.data.generated import generated_boxes
from ifso.errors import IfsoError
from ifso.training.average_precision import evaluate_detector

WORLD = 2


class Wobbly(nn.Module):
    """Finds what is there, some pixels beside it, with scores that depend on the image alone, and some more."""

    def __init__(self, data) -> None:
        super().__init__()
        self.truth = data.test.annotations
        self.pixels = {
            float(image.sum()): place for place, image in enumerate(torch.stack(data.test.pixels).float() / 255)
        }

    def forward(self, images):
        return [self.found(self.pixels[float(image.sum())]) for image in images]

    def found(self, place: int) -> dict[str, torch.Tensor]:
        random, target = torch.Generator().manual_seed(place), self.truth.target(place)
        boxes = target["boxes"] + 3 * torch.randn(len(target["boxes"]), 4, generator=random)
        boxes, labels = torch.cat([boxes, boxes[:1] + 20]), torch.cat([target["labels"], target["labels"][:1]])
        return {"boxes": boxes, "labels": labels, "scores": torch.rand(len(boxes), generator=random)}


def outcome(scenario: str, rank: int, ranks: int) -> object:
    """Average precision, or the words of the error."""
    shard = Shard(rank, ranks) if ranks > 1 and scenario != "the same on both" else WHOLE
    data = generated_boxes(train=1, test=7, shard=shard)
    batches = data.test_batches(2)
    if scenario == "targets alone":
        batches = list(batches)
    if scenario == "one fails" and rank == 1:
        batches = [(torch.zeros(2), torch.zeros(2))]
    if scenario == "nothing on one":
        data = generated_boxes(train=1, test=7)
        batches = list(data.test_batches(2)) if rank == 0 else []
    if scenario == "fewer images than ranks":
        data = generated_boxes(train=1, test=1, shard=shard)
        batches = data.test_batches(2)
    try:
        return asdict(evaluate_detector(Wobbly(data), batches, over_ranks=True))
    except IfsoError as error:
        return str(error)


SCENARIOS = ("shared", "the same on both", "targets alone", "nothing on one", "fewer images than ranks", "one fails")


def main(rank: int, folder: Path) -> None:
    """Leaves what it has found in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    results = {scenario: outcome(scenario, rank, WORLD) for scenario in SCENARIOS}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # threads of gloo may abort a process while Python shuts down
