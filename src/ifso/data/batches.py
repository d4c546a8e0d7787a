"""Batches out of tensors that lie on the device: shuffled and augmented for training, in order for a test.

The order and the augmentation of an epoch depend on the seed and the number of the epoch alone, so that a run that was
interrupted sees the same batches again. No global random state is read or changed.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ifso.errors import DataError

Result = TypeVar("Result")

Batch = tuple[Tensor, Tensor]
"""Images [N, C, H, W] in float32 and labels [N] in int64."""


@dataclass(frozen=True)
class Shard:
    """The part of process ``rank`` out of ``ranks``. A batch size is that of one process.

    In training, the joint batch of all processes is what one process with ``ranks`` times the batch size would see in
    that step; each process takes its slice of it. For a test, the samples are dealt out like cards.
    """

    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if {type(self.rank), type(self.ranks)} != {int} or not 0 <= self.rank < self.ranks:
            raise DataError(f"rank must be from 0 to ranks − 1, got rank={self.rank!r} of ranks={self.ranks!r}")

    def indices(self, count: int, batch_size: int, drop_last: bool) -> Tensor:
        """Which positions in an epoch's order of ``count`` samples are for this process, batch after batch.

        All processes have equally many. Without ``drop_last``, what is left after the last full joint batch makes a
        smaller one, without the last ``count`` mod ``ranks`` samples where it cannot be divided evenly. DataError if
        not a single batch comes out.

        >>> [Shard(rank, 2).indices(11, batch_size=2, drop_last=False).tolist() for rank in (0, 1)]
        [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9]]
        >>> Shard().indices(5, batch_size=2, drop_last=True).tolist()
        [0, 1, 2, 3]
        """
        check_batch_size(batch_size)
        if count < self.ranks * (batch_size if drop_last else 1):
            each = "" if self.ranks == 1 else f" on each of {self.ranks} ranks"
            remedy = "a smaller batch size" if drop_last else "more images or fewer ranks"
            raise DataError(f"batches of {batch_size}{each} cannot be filled by {count} training images; give {remedy}")
        whole = count - count % (self.ranks * batch_size)
        own = torch.arange(whole).view(-1, self.ranks, batch_size)[:, self.rank].flatten()
        left = 0 if drop_last else (count - whole) // self.ranks
        return torch.cat([own, whole + self.rank * left + torch.arange(left)])

    @property
    def every(self) -> slice:
        """The samples of a test set that are for this process.

        >>> list(range(7))[Shard(1, 3).every]
        [1, 4]
        """
        return slice(self.rank, None, self.ranks)


WHOLE = Shard()
"""One process, which sees everything."""


def in_turn(shard: Shard, work: Callable[[], Result]) -> Result:
    """What ``work()`` returns, called by one process after the other if they have a process group."""
    import torch.distributed as dist

    if shard.ranks == 1 or not (dist.is_available() and dist.is_initialized()):
        return work()
    for _ in range(shard.rank):
        dist.barrier()
    result = work()
    for _ in range(shard.rank, shard.ranks):
        dist.barrier()
    return result


def every_nth(labels: Tensor, n: int) -> Tensor:
    """Which samples [N] are the n-th, 2n-th … of their class.

    >>> every_nth(torch.tensor([3, 7, 3, 7, 7, 3]), 2).tolist()
    [False, False, True, True, False, False]
    """
    order = labels.argsort(stable=True)
    ordered = labels[order]
    within = torch.arange(len(labels)) - torch.searchsorted(ordered, ordered)
    return torch.empty(len(labels), dtype=torch.bool).index_copy_(0, order, within % n == n - 1)


def check_batch_size(batch_size: int) -> None:
    """DataError unless ``batch_size`` is a whole number of 1 or more."""
    if type(batch_size) is not int or batch_size < 1:
        raise DataError(f"batch size must be a whole number of 1 or more, got {batch_size!r}")


def generator(seed: int, purpose: int | str) -> torch.Generator:
    """Random numbers on the CPU that depend on both arguments; neighbouring seeds have nothing in common.

    >>> first, second, again = (torch.randperm(9, generator=generator(0, epoch)) for epoch in (1, 2, 1))
    >>> torch.equal(first, second), torch.equal(first, again)
    (False, True)
    """
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))


@dataclass(frozen=True, eq=False)
class Images:
    """Pixels [N, C, H, W] as they are stored and labels [N]; ``mean`` and ``deviation`` [C, 1, 1] normalise them."""

    pixels: Tensor
    labels: Tensor
    mean: Tensor
    deviation: Tensor

    def __len__(self) -> int:
        return len(self.pixels)

    def to(self, device: torch.device | str) -> Images:
        """The same on another device."""
        return Images(*(getattr(self, name).to(device) for name in ("pixels", "labels", "mean", "deviation")))

    def part(self, indices: Tensor | slice) -> Images:
        """The images at ``indices``, which may be on another device."""
        if isinstance(indices, Tensor):
            indices = indices.to(self.pixels.device)
        return Images(self.pixels[indices], self.labels[indices], self.mean, self.deviation)

    def normalized(self, pixels: Tensor) -> Tensor:
        """(pixels − mean) / deviation in float32."""
        return (pixels.float() - self.mean) / self.deviation


@dataclass(frozen=True)
class Augmentation:
    """Every image is moved by up to ``shift`` pixels each way, zeros coming in, and mirrored in half of all cases.

    >>> image, moves = torch.tensor([[[[1, 2], [3, 4]]]]), torch.tensor([[1, 2, 0], [1, 1, 1], [1, 1, 0]])
    >>> Augmentation(shift=1, mirror=True)(image.expand(3, -1, -1, -1), moves).flatten(1).tolist()
    [[2, 0, 4, 0], [2, 1, 4, 3], [1, 2, 3, 4]]
    """

    shift: int
    mirror: bool

    def draw(self, count: int, random: torch.Generator) -> Tensor:
        """Moves [count, 3]: the corner (row, column) of each image's window in the padded one, and 1 if mirrored."""
        corners = torch.randint(2 * self.shift + 1, (count, 2), generator=random)
        mirrored = torch.randint(2, (count, 1), generator=random)
        return torch.cat([corners, mirrored if self.mirror else torch.zeros_like(mirrored)], 1)

    def __call__(self, pixels: Tensor, moves: Tensor) -> Tensor:
        """The images [N, C, H, W] after their ``moves`` [N, 3]; all at once and without waiting for the device."""
        count, channels, height, width = pixels.shape
        padded = F.pad(pixels, (self.shift,) * 4)
        image, channel, row, column = (
            torch.arange(size, device=pixels.device) for size in (count, channels, height, width)
        )
        row = row + moves[:, :1]
        column = torch.where(moves[:, 2:] == 1, width - 1 - column, column) + moves[:, 1:2]
        return padded[image[:, None, None, None], channel[:, None, None], row[:, None, :, None], column[:, None, None]]


class Epochs(ABC):
    """Each ``iter()`` is an epoch: all images in a new order. ``set_epoch(e)`` goes to the beginning of epoch ``e``.

    ``_indices`` are the positions in an epoch's order that are for this process.
    """

    batch_size: int
    _indices: Tensor
    epoch = 0

    def __len__(self) -> int:
        return math.ceil(len(self._indices) / self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """The next ``iter()`` is that epoch; without this call it is the one after the last."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._batches(epoch)

    @abstractmethod
    def _batches(self, epoch: int) -> Iterator[Batch]:
        """The batches of that epoch."""


class PlannedEpochs(Epochs):
    """Epochs of which ``plan`` gives tensors on the device, and ``make`` a batch from a part of these."""

    drop_last: bool

    @abstractmethod
    def plan(self, epoch: int) -> tuple[Tensor, Tensor | None]:
        """The images' numbers in order, and what is done to each [., columns] if anything is.

        Batch i is made from rows i·B to (i + 1)·B, with the batch size B, of both.
        """

    @abstractmethod
    def make(self, order: Tensor, moves: Tensor | None) -> Any:
        """A batch from a part of the plan; nothing waits for the device, so a CUDA graph can hold it."""

    def _batches(self, epoch: int) -> Iterator[Any]:
        order, moves = self.plan(epoch)
        for first in range(0, len(order), self.batch_size):
            chosen = slice(first, first + self.batch_size)
            yield self.make(order[chosen], None if moves is None else moves[chosen])


class TrainBatches(PlannedEpochs):
    """Batches of images that lie on the device, an epoch in each ``iter()``.

    Order and augmentation are the same for all processes; ``shard`` says which of the images this one takes.
    """

    def __init__(
        self,
        images: Images,
        *,
        batch_size: int,
        augmentation: Augmentation | None,
        drop_last: bool,
        seed: int,
        shard: Shard = WHOLE,
    ) -> None:
        self.images, self.batch_size, self.drop_last = images, batch_size, drop_last
        self.augmentation, self.seed = augmentation, seed
        self._indices = shard.indices(len(images), batch_size, drop_last)

    def plan(self, epoch: int) -> tuple[Tensor, Tensor | None]:
        """An epoch on the device: the images' numbers in order and their moves [., 3], None without augmentation."""
        count, random = len(self.images), generator(self.seed, epoch)
        order = self.own(torch.randperm(count, generator=random))
        return order, None if self.augmentation is None else self.own(self.augmentation.draw(count, random))

    def own(self, drawn: Tensor) -> Tensor:
        """The rows for this process, on the device, of what was drawn for a whole epoch's order."""
        return drawn[self._indices].to(self.images.pixels.device, non_blocking=True)

    def make(self, order: Tensor, moves: Tensor | None) -> Batch:
        """The batch of these images after these moves."""
        pixels = self.images.pixels[order]
        if self.augmentation is not None and moves is not None:
            pixels = self.augmentation(pixels, moves)
        return self.images.normalized(pixels), self.images.labels[order]


class ExtendedBatches(PlannedEpochs):
    """Training batches with something added; what does not say otherwise is as theirs."""

    def __init__(self, batches: TrainBatches) -> None:
        self.base, self.batch_size, self.drop_last = batches, batches.batch_size, batches.drop_last
        self._indices = batches._indices

    def plan(self, epoch: int) -> tuple[Tensor, Tensor | None]:
        """As that of the training batches."""
        return self.base.plan(epoch)


class TestBatches:
    """All images in the order in which they are stored, as they are; of several processes, each has its own."""

    __test__ = False

    def __init__(self, images: Images, *, batch_size: int, shard: Shard = WHOLE) -> None:
        check_batch_size(batch_size)
        self.images, self.batch_size = images.part(shard.every), batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.images) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self.images), self.batch_size):
            chosen = slice(first, first + self.batch_size)
            yield self.images.normalized(self.images.pixels[chosen]), self.images.labels[chosen]
