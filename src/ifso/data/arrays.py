"""Images and labels from arrays: reading an .npz, and saying in one line what is wrong with it."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ifso.errors import DataError


def read_npz(path: Path, names: Sequence[str]) -> tuple[Any, ...]:
    """The arrays of those names in an .npz; nothing that needs pickle is read."""
    if not path.is_file():
        raise DataError(f"there is no file {path}; give the path of an .npz")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            missing = [name for name in names if name not in arrays]
            if missing:
                raise DataError(
                    f"{path} holds no {' and no '.join(missing)}; it has {', '.join(arrays) or 'nothing'}; "
                    f"give a file with {', '.join(names)}"
                )
            return tuple(arrays[name] for name in names)
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} cannot be read as .npz: {' '.join(str(error).split())}; write it with numpy.savez"
        ) from error


def as_images(array: Any, where: str) -> Tensor:
    """CIFAR images [N, 3, 32, 32] from [N, 32, 32, 3], [N, 3, 32, 32] or the rows [N, 3072] of the original files.

    >>> as_images(np.zeros((2, 32, 32, 3), np.uint8), "x").shape
    torch.Size([2, 3, 32, 32])
    """
    images = array.reshape(-1, 3, 32, 32) if array.ndim == 2 and array.shape[1] == 3072 else array
    if images.ndim == 4 and images.shape[-1] == 3:
        images = images.transpose(0, 3, 1, 2)
    if images.shape[1:] != (3, 32, 32):
        raise DataError(f"{where} has shape {array.shape}; give images of 32×32 pixels in three colours")
    if images.dtype.kind not in "uif":
        raise DataError(f"{where} has dtype {array.dtype}; give numbers, e.g. uint8 from 0 to 255")
    return torch.from_numpy(np.ascontiguousarray(images))


def as_pixels(array: Any, where: str) -> Tensor:
    """CIFAR images as :func:`as_images` gives them, if there are any and they are bytes from 0 to 255."""
    if array.dtype != np.uint8:
        raise DataError(f"{where} has dtype {array.dtype}; give uint8 pixels from 0 to 255")
    images = as_images(array, where)
    if not len(images):
        raise DataError(f"{where} is empty; give one image at least")
    return images


def as_labels(array: Any, count: int, num_classes: int, where: str) -> Tensor:
    """Labels [N] in int64, from whole numbers of shape [N] or [N, 1], if each is one of the classes.

    >>> as_labels(np.array([[3], [1]]), 2, 10, "y")
    tensor([3, 1])
    """
    if array.dtype.kind not in "ui":
        raise DataError(f"{where} has dtype {array.dtype}; give whole numbers from 0 to {num_classes - 1}")
    if array.shape not in ((count,), (count, 1)):
        raise DataError(f"{where} has shape {array.shape} for {count} images; give one label for each")
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or highest >= num_classes:
        raise DataError(f"{where} holds labels from {lowest} to {highest}; they must lie in 0 to {num_classes - 1}")
    return torch.from_numpy(array.astype(np.int64)).flatten()
