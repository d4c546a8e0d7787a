"""DATA: ``digits``; ``cifar10:``, ``cifar100:``, ``imagenet:``, ``jpegs:``, ``coco:PATH``; ``file.py:factory``."""

from __future__ import annotations

from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple

import torch

from ifso.common.devices import usable_device
from ifso.data.base import Data, ImageData, split
from ifso.data.batches import Augmentation, Images, Shard, in_turn
from ifso.data.cifar import AUGMENTATION, CIFAR, open_cifar
from ifso.data.coco import open_coco
from ifso.data.digits import digits
from ifso.data.from_file import FileData
from ifso.data.image_folder import open_imagenet, open_jpegs
from ifso.errors import DataError

FORMS = "digits, cifar10:PATH, cifar100:PATH, imagenet:PATH, jpegs:FILE.npz, coco:PATH or file.py:factory"

FILES = {"imagenet": open_imagenet, "jpegs": open_jpegs}
"""Images that are decoded when they are needed."""


def open_data(
    name: str,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    validation: float | int = 0,
    rank: int = 0,
    ranks: int = 1,
    download: bool = False,
    workers: int | None = None,
    **options: Any,
) -> Data:
    """The data set called ``name``, its batches on ``device``.

    ``seed`` fixes the order and the augmentation of every epoch, and which training images are set apart:
    ``validation`` is their share (a float) or their number (an int). The test set is never touched for that.

    Process ``rank`` of ``ranks`` sees its part of every joint training batch and of the test (see :class:`Shard`); give
    all of them the same seed. ``download`` allows CIFAR to be fetched; ``workers`` processes decode images in files.
    Further ``options`` are those of ``coco:PATH`` (:class:`~ifso.data.coco.CocoOptions`). They may also stand
    in the name, as in ``coco:PATH,size=480x640``.

    >>> data = open_data("digits", validation=142)
    >>> len(data.x_train), len(data.x_test), data.num_classes, data.input_shape
    (1300, 355, 10, (1, 8, 8))
    >>> images, labels = next(iter(data.train_batches(batch_size=64)))
    >>> images.shape, images.dtype, labels.shape
    (torch.Size([64, 1, 8, 8]), torch.float32, torch.Size([64]))
    """
    device, share = usable_device(device), Shard(rank, ranks)
    kind, _, path = name.partition(":")
    own = name.rpartition(":")[0].endswith(".py")
    if options and (own or kind != "coco"):
        raise DataError(f"{name} has no option {next(iter(options))}; only coco:PATH has further ones")
    if own:
        return _from_file(name, device, validation, share)
    if kind == "coco" and path:
        return open_coco(
            path, device=device, seed=seed, validation=validation, share=share, workers=workers, options=options
        )
    if kind in FILES and path:
        return FILES[kind](path, device=device, seed=seed, validation=validation, share=share, workers=workers)
    train, test, about = _images(name, share, download)
    train, held_out = split(train.to(device), validation, seed)
    return ImageData(name, about.num_classes, train, held_out, test.to(device), about.augmentation, seed, share)


class _About(NamedTuple):
    num_classes: int
    augmentation: Augmentation


def _images(name: str, share: Shard, download: bool) -> tuple[Images, Images, _About]:
    """Training and test images of a set that is held in memory, on the CPU."""
    kind, _, path = name.partition(":")
    if name == "digits":
        return *_digit_images(), _About(10, Augmentation(shift=1, mirror=False))
    if kind in CIFAR and path:
        open_it = partial(open_cifar, kind, path, download)
        images = in_turn(share, open_it) if download else open_it()
        return *images, _About(CIFAR[kind].num_classes, AUGMENTATION)
    close = get_close_matches(kind, ("digits", *CIFAR, *FILES, "coco"), n=1)
    hint = f"; did you mean {close[0]}{'' if close[0] == 'digits' else ':PATH'}?" if close else ""
    raise DataError(f"{name!r} is no data set; write {FORMS}{hint}")


def _digit_images() -> tuple[Images, Images]:
    """Pixels from 0 to 1, centred on 0.5."""
    data, middle, one = digits(), torch.full((1, 1, 1), 0.5), torch.ones(1, 1, 1)
    return Images(data.x_train, data.y_train, middle, one), Images(data.x_test, data.y_test, middle, one)


def _from_file(name: str, device: torch.device, validation: float | int, share: Shard) -> FileData:
    if validation:
        raise DataError(
            f"{name}: validation={validation} cannot be cut from a file of yours; leave it out, let the file have "
            "validation_batches, and measure on them with ifso eval --split validation"
        )
    path, _, factory = name.rpartition(":")
    return FileData(path, factory, device, share)
