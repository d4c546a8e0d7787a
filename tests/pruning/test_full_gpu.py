"""A GPU that is really full: batches are cut into micro-batches or rounds are not captured, and the run says so."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ifso

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def whole_gpu() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def network() -> nn.Module:
    torch.manual_seed(0)
    widths = (3, 32, 32, 32, 32)
    layers = [(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in layer), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(32, 10)).cuda()  # fmt: skip


def pruned(**options: object) -> ifso.PruneResult:
    made = torch.Generator("cuda").manual_seed(1)
    batches = [
        (torch.randn(64, 3, 128, 128, device="cuda", generator=made), torch.arange(64, device="cuda") % 10)
        for _ in range(2)
    ]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return ifso.prune(
        network(), batches, loss, budget=ifso.Budget(macs=0.6), example_inputs=batches[0][0][:1], accumulate=1,
        batches_per_score=1, units_per_step=8, recalibrate=1, **options,
    )  # fmt: skip


@gpu
@pytest.mark.parametrize("criterion", ["ifso", "group-fisher"])
def test_batches_are_cut(criterion: str, tmp_path: Path, whole_gpu: None) -> None:
    torch.cuda.reset_peak_memory_stats()
    whole = pruned(criterion=criterion)
    peak, total = torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    assert not [note for note in whole.notes if "out of memory" in note]
    del whole
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.6 * peak / total)
    result = pruned(criterion=criterion, out=tmp_path / "run")
    assert [note for note in result.notes if "out of memory" in note], result.notes
    assert result.shares["macs"] <= 0.6
    assert all(check.passed for check in result.checks)
    assert (tmp_path / "run" / "summary.json").is_file()
