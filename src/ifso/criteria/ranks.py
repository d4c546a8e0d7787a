"""One sum over all processes of ``torch.distributed``, without leaving any of them waiting when one has failed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ifso.errors import ScoreError


@dataclass(frozen=True)
class Sum:
    """Scores [units] added up over ``count`` batches."""

    total: Tensor
    count: int


def over_ranks(outcome: Sum | Exception, size: int) -> Sum:
    """What all ranks have found together; raises on all of them if one has failed. ``size`` is the number of units."""
    if not (dist.is_available() and dist.is_initialized()):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
    sizes = _gathered(-1 if isinstance(outcome, Exception) else size)
    if isinstance(outcome, Exception):
        raise outcome
    failed = [str(rank) for rank, found in enumerate(sizes) if found < 0]
    if failed:
        raise ScoreError(f"no score, because rank {', '.join(failed)} failed on its batches; see its own message")
    if len(set(sizes)) > 1:
        raise ScoreError(f"ranks score graphs of different sizes ({sizes} units); trace the same model on all of them")
    packed = torch.cat([outcome.total, outcome.total.new_tensor([outcome.count])]).to(collective_device())
    dist.all_reduce(packed)
    return Sum(packed[:-1].cpu(), round(float(packed[-1])))


def _gathered(number: int) -> list[int]:
    """The number of each rank."""
    numbers = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=collective_device())
    numbers[dist.get_rank()] = number
    dist.all_reduce(numbers)
    return numbers.tolist()


def collective_device() -> torch.device:
    """Where the collectives of the backend take their tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
