"""One of two processes that prune together; see test_prune_ranks.py."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_runs import SmallResNet, Stop, StopAt, listed, loss_fn, prune
from torch import Tensor, nn

import ifso
from ifso.pruning.events import Removal
from ifso.pruning.result import PruneResult
from ifso.surgery.recipe import digest_of

WORLD = 2


def share(rank: int) -> list[Any]:
    """Every second batch of an even number."""
    return listed()[:4][rank::WORLD]


class Failing:
    """A loss that fails at its n-th gradient."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.left -= torch.is_grad_enabled()
        if self.left < 0:
            raise ValueError("no more")
        return loss_fn(model, batch)


class Dying(StopAt):
    """The whole process is gone at a removal."""

    def removed(self, removal: Removal) -> None:
        if removal.removal == 2:
            os._exit(0)


def spoilt(good: int) -> Iterable[Any]:
    """Batches with NaN in all but the first ones."""
    return [
        (images if place < good else images * float("nan"), labels) for place, (images, labels) in enumerate(listed())
    ]


def shown(result: PruneResult) -> dict[str, Any]:
    return {
        "keep": {name: kept.tolist() for name, kept in result.keep.items()},
        "scores": {name: values.tolist() for name, values in result.scores.items()},
        "weights": digest_of(result.model),
        "shares": dict(result.shares),
        "folder": None if result.folder is None else result.folder.name,
    }


def interrupted(folder: Path) -> PruneResult:
    """Stopped on both ranks, then resumed on both."""
    try:
        prune("shuffled", listener=StopAt(3), out=folder / "interrupted")
    except Stop:
        return prune("shuffled", resume=folder / "interrupted")
    raise AssertionError


def other_weights(rank: int) -> SmallResNet:
    model = SmallResNet()
    with torch.no_grad():
        model.fc.bias += rank
    return model


def scenarios(rank: int, folder: Path) -> dict[str, Callable[[], PruneResult]]:
    second = rank == 1
    return {
        "one-shot": lambda: prune("one-shot", train_batches=share(rank), batches_per_score=2, out=folder / "one-shot"),
        "incremental": lambda: prune("shuffled", out=folder / "whole"),
        "interrupted": lambda: interrupted(folder),
        "finished": lambda: prune("shuffled", resume=folder / "whole"),
        "latency": lambda: prune("one-shot", normalize="latency"),
        "folder exists": lambda: prune("plain", out=folder / "whole"),
        "no batches": lambda: prune("plain", train_batches=[] if second else listed()),
        "runs out": lambda: prune("plain", train_batches=iter(listed()) if second else listed()),
        "bad batch": lambda: prune("plain", train_batches=spoilt(4 if second else 9), out=folder / "bad"),
        "other seed": lambda: prune("plain", seed=rank),
        "other weights": lambda: prune("plain", model=other_weights(rank)),
        "bad loss": lambda: prune("plain", loss_fn=Failing(7 if second else 999)),
        "dead": lambda: prune("plain", listener=Dying() if second else None),
    }


def attempt(scenario: Callable[[], PruneResult]) -> dict[str, Any] | str:
    """What came out, or the words of the error."""
    try:
        return shown(scenario())
    except ifso.IfsoError as error:
        return f"{type(error).__name__}: {error}"


def main(rank: int, folder: Path) -> None:
    """Leaves what it has found in the folder."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    results = {}
    for name, scenario in scenarios(rank, folder).items():
        results[name] = attempt(scenario)
        (folder / f"{rank}.json").write_text(json.dumps(results))
    os._exit(0)
