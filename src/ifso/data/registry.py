"""DATA: ``digits``; ``cifar10:PATH``, ``imagenet:``, ``folder:``, ``jpegs:``, ``coco:PATH``; ``file.py:factory``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ifso.common.devices import usable_device
from ifso.data import cifar, digits
from ifso.data.base import OPTIONS, Data, ImageData, Opening, split
from ifso.data.batches import Augmentation, Images, Shard, in_turn
from ifso.data.coco import open_coco
from ifso.data.from_file import FileData
from ifso.data.image_folder import open_folder, open_imagenet, open_jpegs
from ifso.errors import DataError

FORMS = "digits, cifar10:PATH, cifar100:PATH, imagenet:PATH, folder:PATH, jpegs:FILE.npz, coco:PATH or file.py:factory"

FILES: dict[str, Callable[[str, Opening], Data]] = {
    "imagenet": open_imagenet,
    "folder": open_folder,
    "jpegs": open_jpegs,
    "coco": open_coco,
}
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

    Process ``rank`` of ``ranks`` sees its part of every joint training batch and of the test (see
    :class:`~ifso.data.batches.Shard`); give all of them the same seed. ``download`` allows CIFAR to be fetched;
    ``workers`` processes decode images in files. Further ``options`` are those of ``coco:PATH``
    (:class:`~ifso.data.base.CocoOptions`) and ``folder:PATH`` (:class:`~ifso.data.base.FolderOptions`). They may also
    stand in the name, as in ``coco:PATH,size=480x640``.

    >>> data = open_data("digits", validation=142)
    >>> len(data.x_train), len(data.x_test), data.num_classes, data.input_shape
    (1300, 355, 10, (1, 8, 8))
    >>> images, labels = next(iter(data.train_batches(batch_size=64)))
    >>> images.shape, images.dtype, labels.shape
    (torch.Size([64, 1, 8, 8]), torch.float32, torch.Size([64]))
    """
    device, shard = usable_device(device), Shard(rank, ranks)
    kind, _, path = name.partition(":")
    program, _, factory = name.rpartition(":")
    is_program = program.endswith(".py")
    if options and (is_program or kind not in OPTIONS):
        kinds = " and ".join(f"{each}:PATH" for each in OPTIONS)
        raise DataError(f"{name} has no option {next(iter(options))}; only {kinds} have further ones")
    if is_program:
        if validation:
            raise DataError(
                f"{name}: validation={validation} cannot be cut from a file of yours; leave it out, let the file have "
                "validation_batches, and measure on them with ifso eval --split validation"
            )
        return FileData(program, factory, device, shard)
    if kind in FILES and path:
        return FILES[kind](path, Opening(device, seed, validation, shard, workers, options))
    train, test, augmentation, num_classes = _held_images(name, shard, download)
    train, held_out = split(train.to(device), validation, seed)
    return ImageData(name, num_classes, train, held_out, test.to(device), augmentation, seed, shard)


def _held_images(name: str, shard: Shard, download: bool) -> tuple[Images, Images, Augmentation, int]:
    """Training and test images of a set that is held in memory, on the CPU; their augmentation and classes."""
    kind, _, path = name.partition(":")
    if name == "digits":
        return *digits.open_digits(), digits.AUGMENTATION, 10
    if kind in cifar.CIFAR and path:
        open_it = partial(cifar.open_cifar, kind, path, download)
        return *(in_turn(shard, open_it) if download else open_it()), cifar.AUGMENTATION, cifar.CIFAR[kind].num_classes
    close = get_close_matches(kind, ("digits", *cifar.CIFAR, *FILES), n=1)
    hint = f"; did you mean {close[0]}{'' if close[0] == 'digits' else ':PATH'}?" if close else ""
    with suppress(OSError, RuntimeError):
        if name and Path(name).expanduser().is_dir():
            hint = f"; did you mean folder:{name}?"
    raise DataError(f"{name!r} is no data set; write {FORMS}{hint}")
