"""One of two processes that score together; see test_ranks.py."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ifso
from ifso.criteria.scorer import score
from ifso.errors import ScoreError

WORLD = 2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


def all_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, 8, 8, generator=random), torch.randint(5, (4,), generator=random)) for _ in range(5)]


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def share(scenario: str, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of a rank."""
    batches = all_batches()
    if scenario == "uneven":
        return batches[:4] if rank == 0 else batches[4:]
    if scenario == "none on one rank":
        return batches if rank == 1 else []
    if scenario == "bad on one rank":
        return [(batches[0][0] * torch.nan, batches[0][1])] if rank == 1 else batches[:3]
    return []


SCENARIOS = ("uneven", "none on one rank", "bad on one rank", "no batches")


def attempt(scenario: str, rank: int, criterion: str) -> dict[str, list[float]] | str:
    """Scores, or the words of the error."""
    model = network()
    graph = ifso.trace(model, torch.zeros(1, 3, 8, 8))
    try:
        found = score(model, graph, loss_fn, share(scenario, rank), criterion)
    except ScoreError as error:
        return str(error)
    return {name: values.tolist() for name, values in found.items()}


def other_graphs(rank: int) -> dict[str, list[float]] | str:
    """The ranks score networks of different sizes."""
    model = nn.Sequential(nn.Linear(2, 3 + rank), nn.ReLU(), nn.Linear(3 + rank, 2))
    try:
        score(model, ifso.trace(model, torch.zeros(1, 2)), None, None, "magnitude")
    except ScoreError as error:
        return str(error)
    return {}


def main(rank: int, folder: Path) -> None:
    """Leaves what it has found in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    results = {scenario: attempt(scenario, rank, "taylor") for scenario in SCENARIOS}
    results["random"] = attempt("uneven", rank, "random")
    results["unknown"] = attempt("uneven", rank, "taylor" if rank == 0 else "tailor")
    results["other graphs"] = other_graphs(rank)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # threads of gloo may abort a process while Python shuts down
