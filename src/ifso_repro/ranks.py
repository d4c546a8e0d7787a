"""Several processes, one for each GPU, share the runs of a study; results are files, so no process group is needed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")
KEY = "ifso-repro-"
PATIENCE = timedelta(days=30)
"""How long the first process waits for the others: networks take their time."""


@dataclass(frozen=True)
class Rank:
    """The number of this process among ``world``, and on its own machine, as ``torchrun`` sets them."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @classmethod
    def here(cls) -> Rank:
        """The rank that the environment says; alone where it says nothing."""
        numbers = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        return cls(*(int(os.environ.get(name, usual)) for name, usual in numbers))

    def device(self, asked: str) -> str:
        """The device for this process: each has its own GPU.

        >>> Rank(5, 8, 1).device("cuda"), Rank(5, 8, 1).device("cpu"), Rank().device("cuda:3")
        ('cuda:1', 'cpu', 'cuda:3')
        """
        return f"cuda:{self.local}" if self.world > 1 and asked.partition(":")[0] == "cuda" else asked


def dealt(jobs: Sequence[T], group_of: Callable[[T], str], rank: Rank) -> list[T]:
    """The jobs of one process: those of every ``world``-th group, so that what a group shares is made only once.

    >>> dealt(["a1", "b1", "a2", "c1"], lambda job: job[0], Rank(0, 2)), dealt(["a1", "b1"], str, Rank(1, 2))
    (['a1', 'a2', 'c1'], ['b1'])
    """
    groups = list(dict.fromkeys(group_of(job) for job in jobs))
    own = set(groups[rank.rank :: rank.world])
    return [job for job in jobs if group_of(job) in own]


class Meeting:
    """Where the first process collects lists from all others, which need not wait for anybody."""

    def __init__(self, rank: Rank) -> None:
        self._rank: Rank = rank
        self._store: Any = None
        if rank.world > 1:
            from torch.distributed.rendezvous import rendezvous

            self._store, _, _ = next(rendezvous("env://", timeout=PATIENCE))

    def gathered(self, items: list[Any]) -> list[Any]:
        """The items of all processes for the first one, once all are done; its own items for each other."""
        if self._store is None:
            return items
        self._store.set(f"{KEY}{self._rank.rank}", json.dumps(items))
        if self._rank.rank:
            return items
        return [item for rank in range(self._rank.world) for item in json.loads(self._store.get(f"{KEY}{rank}"))]
