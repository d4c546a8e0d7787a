"""The images of the study: handwritten digits from the package, CIFAR-10 from a file of the user's."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ifso.data.arrays import as_images, read_npz
from ifso.data.digits import digits
from ifso.errors import IfsoError

Batch = tuple[Tensor, Tensor]
CIFAR = "cifar10"
ARRAYS = ("x_train", "y_train")


def digit_images(count: int) -> Batch:
    """The first training digits [count, 1, 8, 8] in float64 from −0.5 to 0.5, and their labels."""
    data = digits()
    return data.x_train[:count].double() - 0.5, data.y_train[:count]


def data_path(data: str) -> Path:
    """The file in ``cifar10:PATH.npz``."""
    kind, colon, path = data.partition(":")
    if kind != CIFAR or not colon or not path.endswith(".npz"):
        raise IfsoError(f"--data {data!r} is not known here; give {CIFAR}:PATH.npz with arrays x_train and y_train")
    if not Path(path).is_file():
        raise IfsoError(f"--data: there is no file {path}")
    return Path(path)


def cifar_images(path: Path, count: int) -> Batch:
    """The first training images, averaged to [count, 3, 16, 16], in float64 with mean 0 and deviation 1, and labels."""
    x, y = read_npz(path, ARRAYS)
    if len(x) < count or len(x) != len(y):
        raise IfsoError(f"{path} has {len(x)} images and {len(y)} labels; {count} of each are needed")
    images = F.avg_pool2d(as_images(x[:count], f"{path}: x_train").double(), 2).contiguous()
    labels = torch.from_numpy(np.ascontiguousarray(y[:count])).long().flatten()
    return (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True), labels


def checksum(path: Path) -> str:
    """Of the arrays that are used; it names the data in the settings."""
    found = hashlib.sha256()
    for array in read_npz(path, ARRAYS):
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]
