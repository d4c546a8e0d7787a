"""Which samples one of several processes sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ifso.errors import DataError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Share:
    """The part of process ``rank`` out of ``ranks``. A batch size is that of one process.

    In training, the joint batch of all processes is what one process with ``ranks`` times the batch size would see in
    that step; each process takes its slice of it. For a test, the samples are dealt out like cards.
    """

    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        """Refuse a rank that is none."""
        numbers = (self.rank, self.ranks)
        if any(isinstance(n, bool) or not isinstance(n, int) for n in numbers) or not 0 <= self.rank < self.ranks:
            raise DataError(f"rank={self.rank!r} of ranks={self.ranks!r} will not do; give a rank from 0 to ranks − 1")

    def places(self, count: int, batch_size: int, drop_last: bool) -> Tensor:
        """Which places of an epoch's order of ``count`` samples are for this process, batch after batch.

        All processes have equally many. Without ``drop_last``, what is left after the last full joint batch makes a
        smaller one, without the last ``count`` mod ``ranks`` samples where it cannot be divided evenly.

        >>> [Share(rank, 2).places(11, batch_size=2, drop_last=False).tolist() for rank in (0, 1)]
        [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9]]
        >>> Share().places(5, batch_size=2, drop_last=True).tolist()
        [0, 1, 2, 3]
        """
        joint = self.ranks * batch_size
        whole = count - count % joint
        own = torch.arange(whole).view(-1, self.ranks, batch_size)[:, self.rank].flatten()
        left = 0 if drop_last else (count - whole) // self.ranks
        return torch.cat([own, whole + self.rank * left + torch.arange(left)])

    def refuse_too_few(self, count: int, batch_size: int, drop_last: bool) -> None:
        """One clear line if not a single batch comes out of ``count`` training samples."""
        if count >= self.ranks * (batch_size if drop_last else 1):
            return
        each = "" if self.ranks == 1 else f" on each of {self.ranks} ranks"
        remedy = "a smaller batch size" if drop_last else "more images or fewer ranks"
        raise DataError(f"batches of {batch_size}{each} cannot be filled by {count} training images; give {remedy}")

    def deal(self) -> slice:
        """The samples of a test set that are for this process.

        >>> list(range(7))[Share(1, 3).deal()]
        [1, 4]
        """
        return slice(self.rank, None, self.ranks)


ALONE = Share()
"""One process, which sees everything."""


def in_turn(share: Share, work: Callable[[], Result]) -> Result:
    """``work()`` of one process after the other, if they have a process group: the later ones find its files."""
    import torch.distributed as dist

    if share.ranks == 1 or not (dist.is_available() and dist.is_initialized()):
        return work()
    for _ in range(share.rank):
        dist.barrier()
    done = work()
    for _ in range(share.rank, share.ranks):
        dist.barrier()
    return done
