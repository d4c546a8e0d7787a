"""What ``open_data`` returns: training, validation and test batches of one data set, and the measure that counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from ifso.common.loss_fn import LossFn
from ifso.data.batches import WHOLE, Augmentation, Batch, Images, Shard, TestBatches, TrainBatches, generator
from ifso.errors import DataError
from ifso.tasks.classification import cross_entropy


class Data(ABC):
    """A data set. ``num_classes`` and ``input_shape`` (C, H, W) are None where nobody knows them.

    ``task`` is ``"classification"`` or ``"detection"``; ``notes`` are lines that a user of the data should see.
    """

    name: str
    task: str = "classification"
    notes: tuple[str, ...] = ()
    num_classes: int | None
    input_shape: tuple[int, ...] | None
    loss_fn: LossFn = staticmethod(cross_entropy)

    @abstractmethod
    def train_batches(self, batch_size: int = 128, augment: bool = True, drop_last: bool = True) -> Iterable[Any]:
        """Batches for training; each ``iter()`` is an epoch."""

    @abstractmethod
    def validation_batches(self, batch_size: int = 500) -> Iterable[Any]:
        """Batches that were set apart from the training set, always the same ones."""

    @abstractmethod
    def test_batches(self, batch_size: int = 500) -> Iterable[Any]:
        """Batches of the test set."""

    @abstractmethod
    def example_inputs(self) -> Any:
        """Inputs of a batch of one, to trace a network with."""

    def first_batch(self) -> Any:
        """A training batch to try a network with; it may be a small one."""
        return next(iter(self.train_batches()))


@dataclass(frozen=True, eq=False)
class ImageData(Data):
    """Labelled images held on one device. ``train`` is without ``validation``, which is None if none was asked for."""

    name: str
    num_classes: int
    train: Images
    validation: Images | None
    test: Images
    augmentation: Augmentation
    seed: int
    share: Shard = WHOLE

    @property
    def input_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Of one image: channels, height, width."""
        return tuple(self.train.pixels.shape[1:])

    @property
    def x_train(self) -> Tensor:
        """Training images [N, C, H, W] as they are stored."""
        return self.train.pixels

    @property
    def y_train(self) -> Tensor:
        """Their labels [N]."""
        return self.train.labels

    @property
    def x_test(self) -> Tensor:
        """Test images [N, C, H, W] as they are stored."""
        return self.test.pixels

    @property
    def y_test(self) -> Tensor:
        """Their labels [N]."""
        return self.test.labels

    def train_batches(self, batch_size: int = 128, augment: bool = True, drop_last: bool = True) -> TrainBatches:
        """Shuffled batches of (images [N, C, H, W], labels [N]), augmented unless told otherwise."""
        augmentation = self.augmentation if augment else None
        return TrainBatches(
            self.train,
            batch_size=batch_size,
            augmentation=augmentation,
            drop_last=drop_last,
            seed=self.seed,
            share=self.share,
        )

    def validation_batches(self, batch_size: int = 500) -> TestBatches:
        """What was set apart, in a fixed order and without augmentation."""
        if self.validation is None:
            raise DataError(f"{self.name} was opened without a validation part; use open_data(…, validation=0.1)")
        return TestBatches(self.validation, batch_size=batch_size, share=self.share)

    def test_batches(self, batch_size: int = 500) -> TestBatches:
        """The test set in its own order, without augmentation."""
        return TestBatches(self.test, batch_size=batch_size, share=self.share)

    def example_inputs(self) -> Tensor:
        """The first test image [1, C, H, W], normalised."""
        return self.test.normalized(self.test.pixels[:1])

    def first_batch(self) -> Batch:
        """Two training images and their labels, without augmentation."""
        return self.train.normalized(self.train.pixels[:2]), self.train.labels[:2]


class _Divisible(Protocol):
    """Samples of which parts can be taken."""

    def __len__(self) -> int: ...

    def part(self, places: Tensor) -> Self:
        """Those at ``places``."""


Samples = TypeVar("Samples", bound=_Divisible)


def split(images: Samples, validation: float | int, seed: int) -> tuple[Samples, Samples | None]:
    """Training and validation part; ``validation`` is a share (float) or a number (int) of images, drawn by the seed.

    >>> images = Images(torch.zeros(10, 1, 2, 2), torch.arange(10), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    >>> train, held_out = split(images, 0.2, seed=0)
    >>> len(train), len(held_out), sorted(torch.cat([train.labels, held_out.labels]).tolist()) == list(range(10))
    (8, 2, True)
    """
    count = _count(validation, len(images))
    if not count:
        return images, None
    order = torch.randperm(len(images), generator=generator(seed, "validation"))
    apart, rest = (part.sort().values for part in (order[:count], order[count:]))
    return images.part(rest), images.part(apart)


def _count(validation: float | int, total: int) -> int:
    if isinstance(validation, bool) or not isinstance(validation, (int, float)):
        raise DataError(f"validation={validation!r} will not do; give a share such as 0.1 or a number of images")
    if isinstance(validation, float):
        if not 0 <= validation < 1:
            raise DataError(f"validation={validation} is no share of the training set; give 0 or more and less than 1")
        return min(max(round(validation * total), 1), total - 1) if validation else 0
    if not 0 <= validation < total:
        raise DataError(
            f"validation={validation} of {total} training images will not do; some must be left to train on"
        )
    return validation


DETECTION = "detection"
"""The ``task`` of data with boxes."""

AVERAGES = ("map", "map50", "map75", "map_small", "map_medium", "map_large")
"""What is known of a detector; see :class:`ifso.training.average_precision.AveragePrecision`."""


def detects(data: Data) -> bool:
    """Is it data with boxes? Data that does not say so is not."""
    return getattr(data, "task", None) == DETECTION


def headline(data: Data) -> str:
    """The measure that counts: ``"top1"``, or ``"map"`` of detectors."""
    return "map" if detects(data) else "top1"
