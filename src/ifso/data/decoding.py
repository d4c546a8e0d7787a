"""Batches of images that lie in files: decoded and cut to size by worker processes, normalised on the device.

As in ``batches``, the order of an epoch depends on the seed and the number of the epoch alone, and what is done to an
image on these and on the image: not on the number of workers or processes. No global random state is changed.
"""

from __future__ import annotations

import functools
import math
import os
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ifso.common.files import is_file
from ifso.common.text import one_line
from ifso.data.base import Data
from ifso.data.batches import WHOLE, Batch, Epochs, Shard, check_batch_size, generator
from ifso.errors import DataError, required

Colours = tuple[float, ...]

MEAN: Colours = (123.675, 116.28, 103.53)

DEVIATION: Colours = (58.395, 57.12, 57.375)
"""Of ImageNet's pixels from 0 to 255, by colour."""

MOST_WORKERS = 32

Key = tuple[int, list[int]]
"""The epoch, and the numbers of a batch's images."""


def need_torchvision(name: str, extra: str) -> None:
    """DataError if images cannot be decoded, with the extra of ifso that brings what the data ``name`` needs."""
    required("torchvision", f"{name}: images are decoded with torchvision", extra, DataError)


def workers_for(asked: int | None) -> int:
    """How many processes decode images: ``asked``, or one for every core that is left to this rank of a machine.

    >>> workers_for(0), workers_for(3)
    (0, 3)
    """
    if asked is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        own = cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return min(own, MOST_WORKERS) if own > 1 else 0
    if type(asked) is not int or asked < 0:
        raise DataError(f"workers must be a whole number of processes, or 0 for none, got workers={asked!r}")
    return asked


@dataclass(frozen=True)
class Loading:
    """Where batches go, how many processes decode their images, and by what pixels from 0 to 255 are normalised."""

    device: torch.device
    workers: int
    mean: Colours = MEAN
    deviation: Colours = DEVIATION

    @functools.cached_property
    def _colours(self) -> list[Tensor]:
        """Mean and deviation [3, 1, 1] on the device."""
        return [torch.tensor(each, device=self.device).view(-1, 1, 1) for each in (self.mean, self.deviation)]

    def to_device(self, pixels: Any, labels: Any) -> Any:
        """Images in float32, normalised, and labels; pinned memory is copied without waiting."""
        mean, deviation = self._colours
        images = pixels.to(self.device, non_blocking=True).float().sub_(mean).div_(deviation)
        return images, labels.to(self.device, non_blocking=True)


class DecodedDataset(Dataset[Any]):
    """Item (epoch, [i, j, …]) is the batch of these samples.

    Where a file is damaged the item is the line that says so: errors of workers come back with their whole traceback.
    """

    seed: int
    truth: Any = None

    def __getitem__(self, key: Key) -> Any:
        try:
            return self.batch(*key)
        except DataError as error:
            return str(error)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, epoch: int, indices: list[int]) -> Any:
        """What :meth:`Loading.to_device` takes; all that is random in it follows from seed, epoch and sample."""


class DecodedBatches:
    """Batches of ``source`` on the device; workers stay alive from one epoch to the next."""

    def __init__(self, source: DecodedDataset, *, batch_size: int, loading: Loading) -> None:
        check_batch_size(batch_size)
        self.source, self.batch_size, self.loading = source, batch_size, loading
        self._idle: DataLoader[Any] | None = None

    def _in_order(self, epoch: int, order: Tensor) -> Iterator[Any]:
        """The samples in that order."""
        keys = [(epoch, part.tolist()) for part in order.split(self.batch_size) if len(part)]
        workers = min(self.loading.workers, math.ceil(len(self.source) / self.batch_size))
        items: Iterable[Any] = self._by_workers(keys, workers) if workers else map(self.source.__getitem__, keys)
        for item in items:
            if isinstance(item, str):
                raise DataError(item)
            yield self.loading.to_device(*item)

    def _by_workers(self, keys: list[Key], workers: int) -> Iterator[Any]:
        """The items, or a line that says why there are none. Two epochs at the same time have workers of their own."""
        loader, self._idle = self._idle, None
        if loader is None:
            loader = DataLoader(
                self.source,
                batch_size=None,
                sampler=[],
                num_workers=workers,
                persistent_workers=True,
                pin_memory=self.loading.device.type == "cuda",
                generator=torch.Generator(),
            )
        sampler: Any = loader.sampler
        sampler[:] = keys
        try:
            yield from loader
        except RuntimeError as error:
            yield (
                f"a process that decodes images failed: {' '.join(str(error).split())[:300]}; "
                "give fewer workers (workers=0 decodes without them) or more shared memory"
            )
        else:
            self._idle = loader


class TrainFiles(DecodedBatches, Epochs):
    """Batches of images in files, an epoch in each ``iter()``."""

    def __init__(
        self, source: DecodedDataset, *, batch_size: int, drop_last: bool, loading: Loading, shard: Shard = WHOLE
    ) -> None:
        super().__init__(source, batch_size=batch_size, loading=loading)
        self._indices = shard.indices(len(source), batch_size, drop_last)

    def _batches(self, epoch: int) -> Iterator[Batch]:
        order = torch.randperm(len(self.source), generator=generator(self.source.seed, epoch))
        return self._in_order(epoch, order[self._indices])


class TestFiles(DecodedBatches):
    """All images in their own order; of several processes, each has its own. ``truth``: the boxes, if any."""

    __test__ = False

    def __init__(self, source: DecodedDataset, *, batch_size: int, loading: Loading, shard: Shard = WHOLE) -> None:
        super().__init__(source, batch_size=batch_size, loading=loading)
        self._order, self.truth = torch.arange(len(source))[shard.every], source.truth

    def __len__(self) -> int:
        return math.ceil(len(self._order) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self._in_order(0, self._order)


class DecodedData(Data):
    """Images that are decoded when they are needed; ``train`` is without ``validation``, which may be None."""

    train: Any
    validation: Any
    test: Any
    shard: Shard
    loading: Loading
    batch_sizes: ClassVar[tuple[int, int]] = (128, 500)

    @abstractmethod
    def decoded(self, samples: Any, augment: bool) -> DecodedDataset:
        """The samples, in batches that are augmented or always the same."""

    def train_batches(self, batch_size: int | None = None, augment: bool = True, drop_last: bool = True) -> TrainFiles:
        """Shuffled batches of (images, labels or targets), augmented unless ``augment`` is False."""
        size = self.batch_sizes[0] if batch_size is None else batch_size
        source = self.decoded(self.train, augment)
        return TrainFiles(source, batch_size=size, drop_last=drop_last, shard=self.shard, loading=self.loading)

    def validation_batches(self, batch_size: int | None = None) -> TestFiles:
        """What was set apart, in a fixed order and without augmentation."""
        return self._tested(self._held_out(), batch_size)

    def test_batches(self, batch_size: int | None = None) -> TestFiles:
        """The test set in its own order, without augmentation."""
        return self._tested(self.test, batch_size)

    def first_batch(self) -> Any:
        """Two training images with their labels or targets, without augmentation."""
        return self._first(self.train, 2)

    def _tested(self, samples: Any, batch_size: int | None) -> TestFiles:
        size = self.batch_sizes[1] if batch_size is None else batch_size
        return TestFiles(self.decoded(samples, False), batch_size=size, shard=self.shard, loading=self.loading)

    def _first(self, samples: Any, count: int) -> Any:
        return self.loading.to_device(*self.decoded(samples, False).batch(0, list(range(min(count, len(samples))))))


JPEG = ("JPEG", "MPO")
"""Both begin with a JPEG; in the second there are further pictures behind it."""

FORMATS = ("JPEG", "PNG", "GIF", "WEBP")
"""What a file may be, whatever its name ends in."""

MOST_PIXELS = 2**27
"""Of any image: to decode one takes some 9 bytes for each."""

FREE_PIXELS = 2**20

PER_BYTE = {True: 600, False: 8300}
"""Pixels beyond the free ones that a byte can stand for at most, in a JPEG (a bit for each block) and in other formats
(packed 1032 times, a bit each)."""


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """``names`` [N] below ``folder``, as bytes in one array, which worker processes share; ``labels`` [N] in int64."""

    folder: Path
    names: Any
    labels: Tensor

    def __len__(self) -> int:
        return len(self.names)

    def part(self, indices: Tensor | slice) -> ImageFiles:
        """The files at ``indices``."""
        names = self.names[indices.numpy() if isinstance(indices, Tensor) else indices]
        return ImageFiles(self.folder, names, self.labels[indices])

    def read(self, index: int) -> Tensor:
        """One image [3, H, W] in uint8, whatever its colours were; DataError that names the file if that fails."""
        path = self.folder / os.fsdecode(self.names[index])
        named = one_line(str(path))
        if not is_file(path):
            raise DataError(f"{named} cannot be read as an image: it is no file; replace or remove it")
        try:
            return _decoded(path)
        except DataError as error:
            raise DataError(f"{named} {error}") from None
        except Exception as error:
            raise DataError(f"{named} cannot be read as an image: {_reason(error)}; replace or remove it") from error


def _decoded(path: Path) -> Tensor:
    """JPEG is decoded by torchvision and the rest by Pillow: torchvision ends the process on some damaged PNG files."""
    from PIL import Image
    from torchvision.io import ImageReadMode, decode_image

    with Image.open(path, formats=FORMATS) as image:
        jpeg, pixels, size = image.format in JPEG, image.width * image.height, path.stat().st_size
        if pixels > MOST_PIXELS:
            raise ValueError(f"it has {pixels} pixels, and {MOST_PIXELS} are the most that are decoded")
        if pixels > FREE_PIXELS + PER_BYTE[jpeg] * size:
            raise ValueError(f"{size} bytes cannot hold {pixels} pixels")
        if not jpeg:
            return _with_pillow(image)
    return decode_image(str(path), ImageReadMode.RGB)


def _with_pillow(image: Any) -> Tensor:
    """The first picture of a PNG, or the only one of a GIF or WebP; of 16 bits the upper half, transparency is lost."""
    if image.format != "PNG" and getattr(image, "n_frames", 1) > 1:
        raise DataError(f"holds {image.n_frames} images; replace it with one that holds a single image")
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64) >> 8
        pixels = np.stack([grey.clip(0, 255).astype(np.uint8)] * 3, 2)
    else:
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _reason(error: Exception) -> str:
    """The first line of an error, without the place in torchvision's source that may precede it.

    >>> _reason(RuntimeError("decode_jpeg, /src/decode_jpeg.cpp:171, Image is incomplete or truncated"))
    'Image is incomplete or truncated'
    """
    return one_line(re.sub(r"^\w+, \S+\.cpp:\d+, ", "", (str(error).splitlines() or [type(error).__name__])[0]))
