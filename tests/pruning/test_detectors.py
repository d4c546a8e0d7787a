"""A network that has a loss in train mode only, as detectors do, is pruned like any other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ifso


class TrainOnly(nn.Module):
    """Gives a dict of losses in train mode and something else in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(8, 4, 3), nn.ReLU()
        )
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        found = self.head(self.body(x)).mean((2, 3))
        if self.training:
            assert targets is not None
            return {"class": nn.functional.cross_entropy(found, targets), "size": found.square().mean()}
        return found.argmax(1)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return sum(model(*batch).values())


def test_a_loss_in_train_mode_only():
    batches = [(torch.randn(6, 3, 6, 6), torch.randint(0, 2, (6,))) for _ in range(3)]
    model = TrainOnly().train()
    before = model.body[1].running_mean.clone()
    result = ifso.prune(
        model, batches, loss_fn, budget=ifso.Budget(macs=0.6), example_inputs=batches[0], accumulate=1,
        weight_update=1, recalibrate=3,
    )  # fmt: skip
    assert all(check.passed for check in result.checks)
    assert [measure.stage for measure in result.measures][:3] == ["unpruned", "pruned", "batch norms recalibrated"]
    assert model.training
    assert len(model.body[1].running_mean) < len(before)
