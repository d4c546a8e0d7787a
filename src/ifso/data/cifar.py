"""CIFAR-10 and CIFAR-100 from an .npz, or from the folder that torchvision unpacks. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ifso.data.arrays import as_labels, as_pixels, read_npz
from ifso.data.batches import Augmentation, Images
from ifso.errors import DataError

ARRAYS = ("x_train", "y_train", "x_test", "y_test")


class Cifar(NamedTuple):
    """``mean`` and ``deviation`` are of pixels from 0 to 255; ``folder`` and ``reader`` are torchvision's names."""

    num_classes: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    folder: str
    reader: str


CIFAR: Mapping[str, Cifar] = {
    "cifar10": Cifar(
        10, (125.307, 122.961, 113.8575), (51.5865, 50.847, 51.255), folder="cifar-10-batches-py", reader="CIFAR10"
    ),
    "cifar100": Cifar(
        100, (129.304, 124.070, 112.434), (68.170, 65.392, 70.418), folder="cifar-100-python", reader="CIFAR100"
    ),
}
"""For CIFAR-10 the numbers of the authors' program, for CIFAR-100 mean and deviation of all training pixels."""

AUGMENTATION = Augmentation(shift=4, mirror=True)


def open_cifar(kind: str, path: str) -> tuple[Images, Images]:
    """Training and test images of ``cifar10`` or ``cifar100`` in ``path``, on the CPU."""
    place = Path(path)
    x_train, y_train, x_test, y_test = _from_folder(CIFAR[kind], place) if place.is_dir() else read_npz(place, ARRAYS)
    return cifar_part(kind, x_train, y_train, place, "train"), cifar_part(kind, x_test, y_test, place, "test")


def cifar_part(kind: str, x: Any, y: Any, place: Path, part: str) -> Images:
    """Images and labels of one part (``train`` or ``test``), checked. ``place`` is where they come from."""
    about = CIFAR[kind]
    pixels = as_pixels(x, f"{place}: x_{part}")
    labels = as_labels(y, len(pixels), about.num_classes, f"{place}: y_{part}")
    return Images(pixels, labels, _by_colour(about.mean), _by_colour(about.deviation))


def _by_colour(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values).view(-1, 1, 1)


def _from_folder(about: Cifar, place: Path) -> tuple[Any, ...]:
    """The arrays, read by torchvision, which compares the files with their known checksums first."""
    if not (place / about.folder).is_dir():
        raise DataError(f"{place} holds no folder {about.folder}; give the folder above it, or an .npz")
    try:
        from torchvision import datasets
    except ImportError as error:
        raise DataError(
            f"a folder of {about.reader} is read with torchvision, which cannot be imported ({error}); "
            'pip install "ifso[vision]", or give an .npz'
        ) from error
    try:
        parts = [getattr(datasets, about.reader)(place, train=train, download=False) for train in (True, False)]
    except (RuntimeError, OSError, ValueError, KeyError, EOFError) as error:
        raise DataError(f"{place / about.folder} cannot be read: {' '.join(str(error).split())}") from error
    return tuple(array for part in parts for array in (part.data, np.asarray(part.targets, dtype=np.int64)))
