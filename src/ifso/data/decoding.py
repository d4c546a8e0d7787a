"""Batches of images that lie in files: decoded and cut to size by worker processes, normalised on the device.

As in ``batches``, the order of an epoch depends on the seed and the number of the epoch alone, and what is done to an
image on these and on the image: not on the number of workers or processes. No global random state is changed.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ifso.data.batches import WHOLE, Batch, Epochs, Shard, check_batch_size, generator
from ifso.errors import DataError

MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
"""Of ImageNet's pixels from 0 to 255, by colour."""

MOST_WORKERS = 32
Key = tuple[int, list[int]]
"""The epoch, and the numbers of a batch's images."""


class ImageSource(Protocol):
    """Images that are decoded when they are asked for."""

    @property
    def labels(self) -> Tensor:
        """Of all images [N], in int64."""

    def __len__(self) -> int: ...

    def part(self, places: Tensor | slice) -> Self:
        """The images at ``places``."""

    def read(self, place: int) -> Tensor:
        """One image [3, H, W] in uint8."""


def need_torchvision(name: str, extra: str) -> None:
    """One clear line if images cannot be decoded, with the extra of ifso that brings what the data ``name`` needs."""
    try:
        import torchvision  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"{name}: images are decoded with torchvision, which cannot be imported ({error}); "
            f'pip install "ifso[{extra}]"'
        ) from error


def workers_for(asked: int | None) -> int:
    """How many processes decode images: as asked for, or one for every core that is left to this rank of a machine.

    >>> workers_for(0), workers_for(3)
    (0, 3)
    """
    if asked is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        own = cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return min(own, MOST_WORKERS) if own > 1 else 0
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 0:
        raise DataError(f"workers={asked!r} will not do; give a whole number of processes, or 0 for none")
    return asked


@dataclass(frozen=True)
class Loading:
    """Where batches go, and how many processes decode their images."""

    device: torch.device
    workers: int

    @functools.cached_property
    def colours(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation [3, 1, 1] on the device."""
        mean, deviation = (torch.tensor(values, device=self.device).view(-1, 1, 1) for values in (MEAN, DEVIATION))
        return mean, deviation

    def to_device(self, pixels: Tensor, labels: Tensor) -> Batch:
        """Images in float32, normalised, and labels; pinned memory is copied without waiting."""
        mean, deviation = self.colours
        images = pixels.to(self.device, non_blocking=True).float().sub_(mean).div_(deviation)
        return images, labels.to(self.device, non_blocking=True)


class DecodedDataset(Dataset[Any]):
    """Item (epoch, [i, j, …]) is the batch of these images, pixels [N, 3, H, W] in uint8 and labels [N].

    ``cut`` makes images of one size out of them; what is random in it follows from seed, epoch and image. Where a file
    is damaged the item is the line that says so, because errors of workers come back with their whole traceback.
    """

    def __init__(self, files: ImageSource, cut: Callable[[Tensor], Tensor], seed: int) -> None:
        self.files, self.cut, self.seed = files, cut, seed

    def __getitem__(self, key: Key) -> Batch | str:
        epoch, places = key
        try:
            images = [self.image(epoch, place) for place in places]
        except DataError as error:
            return str(error)
        return torch.stack(images), self.files.labels[places]

    def image(self, epoch: int, place: int) -> Tensor:
        """One image [3, H, W] in uint8."""
        image = self.files.read(place)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(generator(self.seed, f"{epoch}/{place}").initial_seed())
            return self.cut(image)


class _Plan:
    """The batches of the epoch that comes next, as a sampler."""

    def __init__(self) -> None:
        self.epoch = 0
        self.parts: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Key]:
        epoch, parts = self.epoch, self.parts
        return ((epoch, part.tolist()) for part in parts)


class DecodedBatches:
    """The images of ``source`` in the order of ``_order(epoch)``; workers stay alive from one epoch to the next."""

    def __init__(self, source: DecodedDataset, *, batch_size: int, loading: Loading, share: Shard = WHOLE) -> None:
        check_batch_size(batch_size)
        self.source, self.batch_size, self.loading, self.share = source, batch_size, loading, share
        self._idle: DataLoader[Any] | None = None

    def _order(self, epoch: int) -> Tensor:
        raise NotImplementedError

    def _batches(self, epoch: int) -> Iterator[Batch]:
        """An epoch. Of two that are gone through at the same time, each has workers of its own."""
        loader = self._loader() if self._idle is None else self._idle
        self._idle = None
        plan: Any = loader.sampler
        plan.epoch, plan.parts = epoch, self._order(epoch).split(self.batch_size)
        fault = ""
        try:
            for found in _watched(loader):
                if isinstance(found, str):
                    fault = found
                    break
                yield self.loading.to_device(*found)
        finally:
            self._idle = None if fault else loader
            del loader
        if fault:
            raise DataError(fault)

    def _loader(self) -> DataLoader[Any]:
        workers = min(self.loading.workers, math.ceil(len(self.source.files) / self.batch_size))
        return DataLoader(
            self.source,
            batch_size=None,
            sampler=_Plan(),
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self.loading.device.type == "cuda",
            generator=torch.Generator(),
        )


class TrainFiles(DecodedBatches, Epochs):
    """Batches of images in files, an epoch in each ``iter()``."""

    def __init__(self, source: DecodedDataset, *, drop_last: bool, **options: Any) -> None:
        super().__init__(source, **options)
        self.share.refuse_too_few(len(source.files), self.batch_size, drop_last)
        self._places = self.share.places(len(source.files), self.batch_size, drop_last)

    def _order(self, epoch: int) -> Tensor:
        order = torch.randperm(len(self.source.files), generator=generator(self.source.seed, epoch))
        return order[self._places]


class TestFiles(DecodedBatches):
    """All images in the order of their names; of several processes, each has its own."""

    __test__ = False

    def __len__(self) -> int:
        return math.ceil(len(self._order(0)) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(0)

    def _order(self, epoch: int) -> Tensor:  # noqa: ARG002 (always the same)
        return torch.arange(len(self.source.files))[self.share.deal()]


def _watched(loader: DataLoader[Any]) -> Iterator[Any]:
    """What the loader yields; where its workers fail, a line that says so."""
    try:
        yield from loader
    except RuntimeError as error:
        yield (
            f"a process that decodes images failed: {' '.join(str(error).split())[:300]}; "
            "give fewer workers (workers=0 decodes without them) or more shared memory"
        )
