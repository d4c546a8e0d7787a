"""Several processes of ``torch.distributed`` that prune together: all go on, or none; all hold the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ifso.criteria.ranks import collective, collective_device, gathered
from ifso.errors import RankError
from ifso.processes import several

T = TypeVar("T")


def rank() -> int:
    """The number of this process, 0 if it is alone."""
    return dist.get_rank() if several() else 0


def together(work: Callable[[], T]) -> T:
    """What ``work`` gives; if it fails on one rank, no rank goes on, so that none waits for another in vain.

    There must be nothing in ``work`` that waits for other ranks.
    """
    if not several():
        return work()
    try:
        done = work()
    except BaseException:
        with suppress(RankError):
            _failures(1)
        raise
    failed = _failures(0)
    if failed:
        raise RankError(f"stopped, because rank {', '.join(map(str, failed))} failed; see its own message")
    return done


def from_first(document: T) -> T:
    """What the first rank gives, plain JSON values, on every rank."""
    if not several():
        return document
    data = torch.tensor(list(json.dumps(document).encode()), dtype=torch.uint8, device=collective_device())
    length = torch.tensor(len(data), device=collective_device())
    collective(dist.broadcast, length, src=0)
    data = data if rank() == 0 else data.new_empty(int(length))
    collective(dist.broadcast, data, src=0)
    return json.loads(bytes(data.tolist()))


def sum_over_ranks(total: Tensor) -> Tensor:
    """The sum, on every rank."""
    if several():
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
    if several():
        for tensor in tensors:
            held = tensor.detach().contiguous()
            collective(dist.all_reduce, held)
            tensor.copy_(held / dist.get_world_size())


@torch.no_grad()
def copy_from_first_(tensors: Iterable[Tensor]) -> None:
    """Every tensor becomes that of the first rank, in place."""
    if several():
        for tensor in tensors:
            held = tensor.detach().contiguous()
            collective(dist.broadcast, held, src=0)
            tensor.copy_(held)


def number_of_each(number: int) -> list[int]:
    """The number that each rank gives, on every rank."""
    return gathered(number) if several() else [number]


def _failures(failed: int) -> list[int]:
    """Which ranks have failed."""
    return [rank for rank, one in enumerate(gathered(failed)) if one]
