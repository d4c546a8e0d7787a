"""``--device cuda:1``: CUDA graphs and kernels go to the current GPU, so that one becomes it."""

from __future__ import annotations

import pytest
import torch

from ifso.cli.distributed import joined


@pytest.mark.parametrize(("device", "chosen"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("cpu", [])])
def test_the_gpu_that_is_named_becomes_the_current_one(
    device: str, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", said.append)
    with joined(device) as world:
        assert (world.device, world.is_first) == (device, True)
    assert said == chosen


@pytest.mark.parametrize("device", ["cuda:77", "cuda:x"])
def test_one_that_there_is_not_is_refused_later(device: str) -> None:
    with joined(device) as world:
        assert world.device == device
