"""A few photographs in one file: an .npz of JPEGs of 224×224 pixels, half to calibrate with and half to measure on."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ifso.common.text import one_line
from ifso.data.base import split
from ifso.data.decoding import Loading, need_torchvision, workers_for
from ifso.data.image_folder import CROP, ImageNet
from ifso.data.npz import as_labels, read_npz
from ifso.data.sharding import Share
from ifso.errors import DataError

MOST_CLASSES = 2**20


@dataclass(frozen=True, eq=False)
class JpegBytes:
    """Image i is ``data[starts[i]:ends[i]]``; ``numbers`` [N] are the places in the file, ``labels`` [N] in int64."""

    path: Path
    data: Tensor
    starts: Tensor
    ends: Tensor
    numbers: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, places: Tensor | slice) -> JpegBytes:
        """The images at ``places``; the bytes are shared."""
        some = (tensor[places] for tensor in (self.starts, self.ends, self.numbers, self.labels))
        return JpegBytes(self.path, self.data, *some)

    def read(self, place: int) -> Tensor:
        """One image [3, 224, 224] in uint8."""
        try:
            return _decoded(self.data[int(self.starts[place]) : int(self.ends[place])])
        except Exception as error:
            said = one_line(error) or type(error).__name__
            raise DataError(f"{self.path}: image {int(self.numbers[place])} cannot be used: {said}") from error


def _decoded(data: Tensor) -> Tensor:
    """The size is looked at before anything is decoded."""
    from PIL import Image, UnidentifiedImageError
    from torchvision.io import ImageReadMode, decode_jpeg

    try:
        with Image.open(io.BytesIO(data.numpy().tobytes()), formats=("JPEG",)) as image:
            width, height = image.size
    except UnidentifiedImageError:
        raise DataError("it is no JPEG") from None
    if (width, height) != (CROP, CROP):
        raise DataError(f"it has {width}×{height} pixels; give {CROP}×{CROP}")
    return decode_jpeg(data.clone(), ImageReadMode.RGB)


@dataclass(frozen=True, eq=False)
class Jpegs(ImageNet):
    """Images that are cut already: without augmentation they are taken as they are."""

    def _whole(self) -> Callable[[Tensor], Tensor]:
        return _as_it_is


def _as_it_is(image: Tensor) -> Tensor:
    return image


def open_jpegs(
    path: str, *, device: torch.device, seed: int, validation: float | int, share: Share, workers: int | None
) -> Jpegs:
    """The images of an .npz with ``data`` (the bytes of all files), ``offsets`` [N + 1] and ``labels`` [N].

    Of each class, in the order of the file, every second image is for the test and the others are for training.
    """
    name = f"jpegs:{path}"
    need_torchvision(name, "vision")
    images = _read(Path(path))
    tested = every_second(images.labels)
    train, held_out = split(images.part(~tested), validation, seed)
    if not bool(tested.any()):
        raise DataError(f"{path} has one image of each class; give two at least, one of them to measure on")
    classes = tuple(map(str, range(int(images.labels.max()) + 1)))
    loading = Loading(device, workers_for(workers))
    return Jpegs(name, classes, train, held_out, images.part(tested), seed, share, loading)


def every_second(labels: Tensor) -> Tensor:
    """Which samples [N] are the second, fourth … of their class.

    >>> every_second(torch.tensor([3, 7, 3, 7, 7, 3])).tolist()
    [False, False, True, True, False, False]
    """
    order = labels.argsort(stable=True)
    ordered = labels[order]
    within = torch.arange(len(labels)) - torch.searchsorted(ordered, ordered)
    found = torch.empty(len(labels), dtype=torch.bool)
    found[order] = within % 2 == 1
    return found


def _read(path: Path) -> JpegBytes:
    data, offsets, labels = read_npz(path, ("data", "offsets", "labels"))
    if data.dtype != np.uint8 or data.ndim != 1:
        raise DataError(f"{path}: data is {_kind(data)}; give the bytes of all JPEG files as one row of uint8")
    if offsets.dtype.kind not in "ui" or offsets.ndim != 1 or len(offsets) < 2:
        raise DataError(f"{path}: offsets is {_kind(offsets)}; give where each image begins, and the end of the last")
    places = torch.from_numpy(offsets.astype(np.int64))
    if int(places[0]) < 0 or int(places[-1]) > len(data) or not bool((places.diff() > 0).all()):
        raise DataError(f"{path}: offsets do not grow from 0 to {len(data)}, the number of bytes in data")
    count = len(offsets) - 1
    answers = as_labels(labels, count, MOST_CLASSES, f"{path}: labels")
    return JpegBytes(path, torch.from_numpy(data), places[:-1], places[1:], torch.arange(count), answers)


def _kind(array: Any) -> str:
    return f"{one_line(array.dtype.name)} of shape {array.shape}"
