"""Batches of (images, targets) for detectors, out of memory or decoded by worker processes.

The two give the same batches. What an epoch depends on is said in ``batches`` and ``decoding``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ifso.data.batches import Epochs, check_batch_size, generator
from ifso.data.coco_samples import Annotations, BoxSamples, Target, is_mirrored, to_device
from ifso.data.decoding import Decoded, Key, Loading, TestFiles, TrainFiles
from ifso.data.sharding import Share
from ifso.errors import DataError

Batch = tuple[list[Tensor], list[Target]]
"""Images [3, H, W] in float32 from 0 to 1, of any sizes, and a target for each."""


class BoxLoading(Loading):
    """Where batches go, and how many processes decode their images."""

    def to_device(self, pixels: Any, labels: Any) -> Any:
        """Images from 0 to 1 and their targets; a detector normalises them itself."""
        return to_device(pixels, labels, self.device)


@dataclass(frozen=True)
class Drawing:
    """How training batches are drawn: in an order of ``seed``, and mirrored in half of all cases if ``mirror``."""

    batch_size: int
    drop_last: bool
    mirror: bool
    seed: int


class DecodedBoxes(Decoded):
    """Item (epoch, [i, j, …]) is the batch of these images in uint8 and their targets, or a line that says a fault."""

    def __init__(self, samples: BoxSamples, mirror: bool, seed: int) -> None:
        self.samples, self.mirror, self.seed = samples, mirror, seed
        self.files: Any = samples

    def __getitem__(self, key: Key) -> Any:
        epoch, places = key
        images, targets = [], []
        try:
            for place in places:
                turned = self.mirror and is_mirrored(self.seed, epoch, place)
                image = self.samples.read(place)
                images.append(image.flip(2) if turned else image)
                targets.append(self.samples.target(place, turned))
        except DataError as error:
            return str(error)
        return images, targets


class HeldTraining(Epochs):
    """Batches of images that lie on the device, an epoch in each ``iter()``."""

    def __init__(self, samples: BoxSamples, drawing: Drawing, share: Share, loading: BoxLoading) -> None:
        check_batch_size(drawing.batch_size)
        share.refuse_too_few(len(samples), drawing.batch_size, drawing.drop_last)
        self.samples, self.drawing, self.loading = samples, drawing, loading
        self.batch_size = drawing.batch_size
        self._places = share.places(len(samples), drawing.batch_size, drawing.drop_last)

    def _batches(self, epoch: int) -> Iterator[Any]:
        seed = self.drawing.seed
        order = torch.randperm(len(self.samples), generator=generator(seed, epoch))[self._places]
        for part in order.split(self.batch_size):
            places = part.tolist()
            turned = [self.drawing.mirror and is_mirrored(seed, epoch, place) for place in places]
            yield _held(self.samples, places, turned, self.loading)


class HeldTest:
    """All images that lie on the device, in the order of the file; of several processes, each has its own."""

    def __init__(self, samples: BoxSamples, batch_size: int, share: Share, loading: BoxLoading) -> None:
        check_batch_size(batch_size)
        self.samples, self.batch_size, self.loading = samples, batch_size, loading
        self._order = torch.arange(len(samples))[share.deal()]

    @property
    def truth(self) -> Annotations:
        """What is to be found in all images."""
        return self.samples.annotations

    def __len__(self) -> int:
        return math.ceil(len(self._order) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self._order), self.batch_size):
            places = self._order[first : first + self.batch_size].tolist()
            yield _held(self.samples, places, [False] * len(places), self.loading)


class BoxTestFiles(TestFiles):
    """All images in the order of the file, decoded by workers; of several processes, each has its own."""

    source: DecodedBoxes

    @property
    def truth(self) -> Annotations:
        """What is to be found in all images."""
        return self.source.samples.annotations


def training(samples: BoxSamples, drawing: Drawing, share: Share, loading: BoxLoading) -> HeldTraining | TrainFiles:
    """Shuffled batches of the samples."""
    if samples.pixels is not None:
        return HeldTraining(samples, drawing, share, loading)
    source = DecodedBoxes(samples, drawing.mirror, drawing.seed)
    return TrainFiles(source, batch_size=drawing.batch_size, drop_last=drawing.drop_last, share=share, loading=loading)


def testing(samples: BoxSamples, batch_size: int, share: Share, loading: BoxLoading) -> HeldTest | BoxTestFiles:
    """The samples in their order, as they are."""
    if samples.pixels is not None:
        return HeldTest(samples, batch_size, share, loading)
    return BoxTestFiles(DecodedBoxes(samples, False, 0), batch_size=batch_size, share=share, loading=loading)


def few(samples: BoxSamples, count: int, loading: BoxLoading) -> Batch:
    """The first samples, as they are."""
    places = list(range(min(count, len(samples))))
    if samples.pixels is not None:
        return _held(samples, places, [False] * len(places), loading)
    images, targets = [samples.read(place) for place in places], [samples.target(place) for place in places]
    return to_device(images, targets, loading.device)


def _held(samples: BoxSamples, places: list[int], turned: list[bool], loading: BoxLoading) -> Batch:
    targets = [samples.target(place, mirrored) for place, mirrored in zip(places, turned, strict=True)]
    return to_device(samples.images(places, turned), targets, loading.device)
