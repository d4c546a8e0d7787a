"""One sum over all processes of ``torch.distributed``, without leaving any of them waiting when one has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ifso.errors import RankError, ScoreError

BROKEN = ("gloo/", "connection closed by peer", "connection reset by peer", "broken pipe")
"""What errors of collectives speak of, in small letters."""


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
    sizes = gathered(-1 if isinstance(outcome, Exception) else size)
    if isinstance(outcome, Exception):
        raise outcome
    failed = [str(rank) for rank, found in enumerate(sizes) if found < 0]
    if failed:
        raise ScoreError(f"no score, because rank {', '.join(failed)} failed on its batches; see its own message")
    if len(set(sizes)) > 1:
        raise ScoreError(f"ranks score graphs of different sizes ({sizes} units); trace the same model on all of them")
    packed = torch.cat([outcome.total, outcome.total.new_tensor([outcome.count])]).to(collective_device())
    collective(dist.all_reduce, packed)
    return Sum(packed[:-1].cpu(), round(float(packed[-1])))


def gathered(number: int) -> list[int]:
    """The number of each rank, on every rank."""
    numbers = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=collective_device())
    numbers[dist.get_rank()] = number
    collective(dist.all_reduce, numbers)
    return numbers.tolist()


def collective_device() -> torch.device:
    """Where the collectives of the backend take their tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def collective(call: Callable[..., Any], tensor: Tensor, **options: Any) -> None:
    """What all ranks do together; RankError if one of them is gone."""
    with among_ranks():
        call(tensor, **options)


@contextmanager
def among_ranks() -> Iterator[None]:
    """Within it, what is raised because another rank is gone becomes a RankError."""
    try:
        yield
    except Exception as error:
        if not of_another_rank(error):
            raise
        raise RankError(
            f"rank {dist.get_rank()} stopped, because another rank cannot be reached any more; see its own message, "
            "and start all of them again: a run goes on with resume"
        ) from error


def of_another_rank(error: BaseException) -> bool:
    """Is it because another rank failed or is gone that this one did?

    >>> of_another_rank(RuntimeError("Connection closed by peer")), of_another_rank(RuntimeError("shapes differ"))
    (True, False)
    """
    link: BaseException | None = error
    while link is not None:
        words = str(link).lower()
        broken = isinstance(link, RuntimeError) and any(word in words for word in BROKEN)
        if isinstance(link, (RankError, dist.DistError)) or broken:
            return True
        link = link.__cause__
    return False
