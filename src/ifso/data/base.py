"""What ``open_data`` returns: batches of one data set, the measure that counts; and the options in its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ifso.common.files import exists
from ifso.common.loss_fn import LossFn
from ifso.common.text import one_line
from ifso.data.batches import WHOLE, Augmentation, Batch, Images, Shard, TestBatches, TrainBatches, generator
from ifso.errors import DataError
from ifso.tasks.classification import cross_entropy
from ifso.tasks.detection import detection_loss


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

    def _held_out(self) -> Any:
        """The part that was set apart for validation; DataError if there is none."""
        part = getattr(self, "validation", None)
        if part is None:
            raise DataError(f"{self.name} was opened without a validation part; use open_data(…, validation=0.1)")
        return part


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
    shard: Shard = WHOLE

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
        """Shuffled batches of (images [N, C, H, W], labels [N]), augmented unless ``augment`` is False."""
        return TrainBatches(
            self.train,
            batch_size=batch_size,
            augmentation=self.augmentation if augment else None,
            drop_last=drop_last,
            seed=self.seed,
            shard=self.shard,
        )

    def validation_batches(self, batch_size: int = 500) -> TestBatches:
        """What was set apart, in a fixed order and without augmentation."""
        return TestBatches(self._held_out(), batch_size=batch_size, shard=self.shard)

    def test_batches(self, batch_size: int = 500) -> TestBatches:
        """The test set in its own order, without augmentation."""
        return TestBatches(self.test, batch_size=batch_size, shard=self.shard)

    def example_inputs(self) -> Tensor:
        """The first test image [1, C, H, W], normalised."""
        return self.test.normalized(self.test.pixels[:1])

    def first_batch(self) -> Batch:
        """Two training images and their labels, without augmentation."""
        return self.train.normalized(self.train.pixels[:2]), self.train.labels[:2]


class Opening(NamedTuple):
    """How a data set is opened: the arguments of :func:`ifso.data.open_data`."""

    device: torch.device
    seed: int
    validation: float | int
    shard: Shard
    workers: int | None
    options: Mapping[str, Any]


Samples = TypeVar("Samples", bound=Any)
"""They have a length, and a method ``part`` for those at some indices."""


def split(images: Samples, validation: float | int, seed: int) -> tuple[Samples, Samples | None]:
    """Training and validation part; ``validation`` is a share (float) or a number (int) of images, drawn by the seed.

    >>> images = Images(torch.zeros(10, 1, 2, 2), torch.arange(10), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    >>> train, held_out = split(images, 0.2, seed=0)
    >>> len(train), len(held_out), sorted(torch.cat([train.labels, held_out.labels]).tolist()) == list(range(10))
    (8, 2, True)
    """
    total = len(images)
    if type(validation) not in (int, float) or not 0 <= validation < (total if type(validation) is int else 1):
        raise DataError(
            f"validation must be a share from 0 to, but not including, 1 or a number of the {total} training images "
            f"that leaves some to train on, got {validation!r}"
        )
    count = validation if isinstance(validation, int) else min(max(round(validation * total), 1), total - 1)
    if not validation or not count:
        return images, None
    order = torch.randperm(total, generator=generator(seed, "validation"))
    return images.part(order[count:].sort().values), images.part(order[:count].sort().values)


DETECTION = "detection"
"""The ``task`` of data with boxes."""

AVERAGES = ("map", "map50", "map75", "map_small", "map_medium", "map_large")
"""The measures of a detector; see :class:`ifso.training.average_precision.AveragePrecision`."""


def detects(data: Data) -> bool:
    """Return whether it is data with boxes; data without a task is not."""
    return getattr(data, "task", None) == DETECTION


def has_own_loss(data: Data) -> bool:
    """Return whether the loss of the data is not the usual one of its task."""
    return data.loss_fn is not (detection_loss if detects(data) else cross_entropy)


def headline(data: Data) -> str:
    """The measure that counts: ``"top1"``, or ``"map"`` of detectors."""
    return "map" if detects(data) else "top1"


@dataclass(frozen=True)
class CocoOptions:
    """How a ``coco:PATH`` is used.

    ``size`` is how long the shorter side of an image may be, or both sides (shorter, longer): every image is made so
    large. ``drop_degenerate`` leaves out boxes without area, ``keep_empty=False`` training images without boxes.
    ``hold`` says whether all images are held on the device; None leaves it to their size. Labels are 1, 2, … in the
    order of the categories' ids, or with ``labels="ids"`` these ids themselves, as published detectors have them.
    """

    size: int | Sequence[int] | None = None
    drop_degenerate: bool = False
    keep_empty: bool = True
    hold: bool | None = None
    labels: str = "contiguous"

    def __post_init__(self) -> None:
        for name in ("drop_degenerate", "keep_empty", "hold"):
            _check(type(getattr(self, name)) is bool or (name, self.hold) == ("hold", None), self, name, "yes or no")
        _check(self.labels in ("contiguous", "ids"), self, "labels", "one of contiguous, ids")
        sides = self.sides
        right = all(type(side) is int and side > 0 for side in sides) and list(sides) == sorted(sides)[:2]
        words = "the pixels of the shorter side, or of both (480x640)"
        _check(right and (self.size is None or bool(sides)), self, "size", words)

    @property
    def sides(self) -> tuple[int, ...]:
        """The one or two numbers of ``size``; none without it."""
        if self.size is None or isinstance(self.size, (tuple, list)):
            return tuple(self.size or ())
        return (self.size,)  # type: ignore[return-value]


@dataclass(frozen=True)
class FolderOptions:
    """How the images in a ``folder:PATH`` are used.

    They come in squares of ``size`` pixels, normalised by ``mean`` and ``deviation`` of pixels from 0 to 1, one number
    or one for each colour. ``test`` is the share of each folder without ``train`` and ``val`` that is for the test.
    """

    size: int = 224
    mean: float | Sequence[float] = (0.485, 0.456, 0.406)
    deviation: float | Sequence[float] = (0.229, 0.224, 0.225)
    test: float = 0.2

    def __post_init__(self) -> None:
        _check(type(self.size) is int and 8 <= self.size <= 4096, self, "size", "pixels from 8 to 4096")
        for name, least in (("mean", 0.0), ("deviation", 1e-6)):
            values = self.colours(name)
            right = len(values) == 3 and all(type(each) in (int, float) and least <= each <= 1 for each in values)
            _check(right, self, name, f"one number from {least:g} to 1, or three (0.5x0.5x0.5)")
        _check(type(self.test) is float and 0 < self.test < 1, self, "test", "a share between 0 and 1, such as 0.2")

    def colours(self, name: str) -> tuple[float, ...]:
        """The ``mean`` or ``deviation`` of each colour."""
        values = getattr(self, name)
        return tuple(values) if isinstance(values, (tuple, list)) else (values,) * 3


def _check(right: bool, options: CocoOptions | FolderOptions, name: str, words: str) -> None:
    if not right:
        raise DataError(f"{name} must be {words}, got {name}={one_line(repr(getattr(options, name)))}")


Options = TypeVar("Options", CocoOptions, FolderOptions)

OPTIONS = {"coco": CocoOptions, "folder": FolderOptions}
"""By the kind of data: what may follow the path in its name."""


def path_and_options(kind: str, text: str) -> tuple[str, str]:
    """The path in what follows ``kind:``, and the options behind it with their comma.

    >>> path_and_options("coco", "sets/cells,size=480x640,drop_degenerate"), path_and_options("coco", "a,b/cells")
    (('sets/cells', ',size=480x640,drop_degenerate'), ('a,b/cells', ''))
    >>> path_and_options("folder", "cats,size=64"), path_and_options("imagenet", "cats,size=64")
    (('cats', ',size=64'), ('cats,size=64', ''))
    """
    known = [field.name for field in fields(OPTIONS[kind])] if kind in OPTIONS else []
    path, behind = text, ""
    while True:
        rest, comma, last = path.rpartition(",")
        if not comma or last.partition("=")[0] not in known:
            return path, behind
        path, behind = rest, f",{last}{behind}"


def read_options(kind: type[Options], text: str, given: Mapping[str, Any]) -> tuple[str, Options]:
    """The path in what follows ``coco:`` or ``folder:``, and the options: those behind it, unless they are ``given``.

    >>> read_options(CocoOptions, "sets/cells,size=480x640,labels=ids", {"keep_empty": False})
    ('sets/cells', CocoOptions(size=(480, 640), drop_degenerate=False, keep_empty=False, hold=None, labels='ids'))
    """
    prefix = next(name for name in OPTIONS if OPTIONS[name] is kind)
    path, behind = path_and_options(prefix, text)
    known = [field.name for field in fields(kind)]
    unknown = sorted(set(given) - set(known))
    if "," in path and not exists(Path(path)):
        unknown.append(path.rpartition(",")[2].partition("=")[0])
    if unknown:
        raise DataError(f"{prefix}:{one_line(text)} has no option {one_line(unknown[0])}; it has {', '.join(known)}")
    written = (each.partition("=")[::2] for each in behind.split(",")[1:])
    return path, kind(**{**{name: _value(value) for name, value in written}, **given})


def _value(text: str) -> Any:
    """What an option says in a name: yes or no, a number, numbers with an x between them, or a word.

    >>> [_value(text) for text in ("", "no", "480", "480x640", "0.5x1e-3", "ids", "9" * 99)][:-1]
    [True, False, 480, (480, 640), (0.5, 0.001), 'ids']
    """
    words = {"": True, "yes": True, "no": False}
    try:
        numbers = tuple(int(each) if each.isdecimal() else float(each) for each in text[:100].split("x"))
    except ValueError:
        return words.get(text, text)
    return numbers if numbers[1:] else numbers[0]
