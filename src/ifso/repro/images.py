"""The images of the study: handwritten digits from the package, CIFAR-10 from a file of the user's."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ifso.data.digits import digits
from ifso.errors import IfsoError

Batch = tuple[Tensor, Tensor]
CIFAR = "cifar10"
_WANTED = ("x_train", "y_train")


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
    x, y = cifar_arrays(path)
    if len(x) < count or len(x) != len(y):
        raise IfsoError(f"{path} has {len(x)} images and {len(y)} labels; {count} of each are needed")
    images = torch.from_numpy(np.ascontiguousarray(x[:count])).double()
    if images.dim() == 2 and images.shape[1] == 3072:
        images = images.view(-1, 3, 32, 32)
    if images.dim() == 4 and images.shape[-1] == 3:
        images = images.permute(0, 3, 1, 2)
    if tuple(images.shape[1:]) != (3, 32, 32):
        raise IfsoError(f"{path}: x_train has shape {tuple(x.shape)}; give images of 32×32 pixels in three colours")
    images = F.avg_pool2d(images, 2).contiguous()
    labels = torch.from_numpy(np.ascontiguousarray(y[:count])).long().flatten()
    return (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True), labels


def checksum(path: Path) -> str:
    """Of the arrays that are used; it names the data in the settings."""
    found = hashlib.sha256()
    for array in cifar_arrays(path):
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def cifar_arrays(path: Path) -> tuple[Any, Any]:
    """x_train and y_train of an .npz."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            missing = [name for name in _WANTED if name not in arrays]
            if missing:
                raise IfsoError(f"{path} holds no {' and no '.join(missing)}; it has {', '.join(arrays) or 'nothing'}")
            return arrays["x_train"], arrays["y_train"]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise IfsoError(f"{path} cannot be read as .npz: {' '.join(str(error).split())}") from error
