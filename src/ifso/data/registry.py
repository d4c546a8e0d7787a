"""DATA names: ``digits``, ``cifar10:PATH``, ``cifar100:PATH`` or ``path/file.py:factory``."""

from __future__ import annotations

from difflib import get_close_matches

import torch

from ifso.data.batches import Augmentation, Images
from ifso.data.cifar import AUGMENTATION, CIFAR, open_cifar
from ifso.data.devices import usable_device
from ifso.data.digits import digits
from ifso.data.from_file import FileData
from ifso.data.sets import Data, ImageData, split
from ifso.errors import DataError

FORMS = "digits, cifar10:PATH, cifar100:PATH or file.py:factory"
LATER = ("imagenet", "coco")


def open_data(name: str, *, device: torch.device | str = "cpu", seed: int = 0, validation: float | int = 0) -> Data:
    """The data set called ``name``, its images on ``device``.

    ``seed`` fixes the order and the augmentation of every epoch, and which training images are set apart:
    ``validation`` is their share (a float) or their number (an int). The test set is never touched for that.

    >>> data = open_data("digits", validation=142)
    >>> len(data.x_train), len(data.x_test), data.num_classes, data.input_shape
    (1300, 355, 10, (1, 8, 8))
    >>> images, labels = next(iter(data.train_batches(batch_size=64)))
    >>> images.shape, images.dtype, labels.shape
    (torch.Size([64, 1, 8, 8]), torch.float32, torch.Size([64]))
    """
    device = usable_device(device)
    kind, _, path = name.partition(":")
    if name.rpartition(":")[0].endswith(".py"):
        return _from_file(name, device, validation)
    if kind in LATER:
        raise DataError(f"{name!r}: {kind}: is not there yet; use {FORMS}")
    if kind in CIFAR and path:
        train, test = open_cifar(kind, path)
        num_classes, augmentation = CIFAR[kind].num_classes, AUGMENTATION
    elif name == "digits":
        train, test = _digit_images()
        num_classes, augmentation = 10, Augmentation(shift=1, mirror=False)
    else:
        close = get_close_matches(kind, ("digits", *CIFAR), n=1)
        hint = f"; did you mean {close[0]}{'' if close[0] == 'digits' else ':PATH'}?" if close else ""
        raise DataError(f"{name!r} is no data set; write {FORMS}{hint}")
    train, held_out = split(train.to(device), validation, seed)
    return ImageData(name, num_classes, train, held_out, test.to(device), augmentation, seed)


def _digit_images() -> tuple[Images, Images]:
    """Pixels from 0 to 1, centred on 0.5."""
    data, middle, one = digits(), torch.full((1, 1, 1), 0.5), torch.ones(1, 1, 1)
    return Images(data.x_train, data.y_train, middle, one), Images(data.x_test, data.y_test, middle, one)


def _from_file(name: str, device: torch.device, validation: float | int) -> FileData:
    if validation:
        raise DataError(f"{name}: validation={validation} cannot be cut from it; let it have validation_batches")
    path, _, factory = name.rpartition(":")
    return FileData(path, factory, device)
