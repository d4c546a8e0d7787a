"""Several processes of ``torch.distributed``: sums over all of them, and all go on or none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ifso.errors import RankError, ScoreError


def is_distributed() -> bool:
    """Return whether this is one of several processes of ``torch.distributed``."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


BROKEN = ("gloo/", "connection closed by peer", "connection reset by peer", "broken pipe")
"""What errors of collectives speak of, in small letters."""


def over_ranks(outcome: Tensor | Exception, size: int) -> Tensor:
    """The sum of what all ranks found; raises on all of them if one has failed. ``size`` is the number of units."""
    sizes = gathered(-1 if isinstance(outcome, Exception) else size)
    if isinstance(outcome, Exception):
        raise outcome
    failed = [str(rank) for rank, found in enumerate(sizes) if found < 0]
    if failed:
        raise ScoreError(f"no score, because rank {', '.join(failed)} failed on its batches; see its own message")
    if len(set(sizes)) > 1:
        raise ScoreError(f"ranks score graphs of different sizes ({sizes} units); trace the same model on all of them")
    return sum_over_ranks(outcome.to(collective_device())).cpu() if is_distributed() else outcome


def gathered(number: int) -> list[int]:
    """The number of each rank, on every rank."""
    if not is_distributed():
        return [number]
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
    """Return whether this rank failed because another one failed or is gone.

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


T = TypeVar("T")


def rank() -> int:
    """The number of this process, 0 if it is alone."""
    return dist.get_rank() if is_distributed() else 0


def together(work: Callable[[], T]) -> T:
    """What ``work`` gives; if it fails on one rank, no rank goes on, so that none waits for another in vain.

    There must be nothing in ``work`` that waits for other ranks.
    """
    if not is_distributed():
        return work()
    try:
        done = work()
    except BaseException:
        with suppress(RankError):
            gathered(1)
        raise
    failed = [number for number, one in enumerate(gathered(0)) if one]
    if failed:
        raise RankError(f"stopped, because rank {', '.join(map(str, failed))} failed; see its own message")
    return done


def from_first(document: T) -> T:
    """What the first rank gives, plain JSON values, on every rank."""
    if not is_distributed():
        return document
    data = torch.tensor(list(json.dumps(document).encode()), dtype=torch.uint8, device=collective_device())
    length = torch.tensor(len(data), device=collective_device())
    collective(dist.broadcast, length, src=0)
    data = data if rank() == 0 else data.new_empty(int(length))
    collective(dist.broadcast, data, src=0)
    return json.loads(bytes(data.tolist()))


def sum_over_ranks(total: Tensor) -> Tensor:
    """The sum, on every rank."""
    if is_distributed():
        total = total.clone()
        collective(dist.all_reduce, total)
    return total


def mean_over_ranks(total: Tensor, count: int) -> Tensor:
    """``total``, a sum over ``count`` things, as the mean over those of all ranks."""
    packed = sum_over_ranks(torch.cat([total.reshape(-1), total.new_tensor([count])]))
    return (packed[:-1] / packed[-1].clamp(min=1)).reshape(total.shape)


@torch.no_grad()
def average_over_ranks_(tensors: Iterable[Tensor]) -> None:
    """Every tensor becomes its mean over the ranks, in place."""
    if is_distributed():
        for tensor in tensors:
            held = tensor.detach().contiguous()
            collective(dist.all_reduce, held)
            tensor.copy_(held / dist.get_world_size())


@torch.no_grad()
def copy_from_first_(tensors: Iterable[Tensor]) -> None:
    """Every tensor becomes that of the first rank, in place."""
    if is_distributed():
        for tensor in tensors:
            held = tensor.detach().contiguous()
            collective(dist.broadcast, held, src=0)
            tensor.copy_(held)
