"""Images and labels from arrays: reading an .npz, and saying in one line what is wrong with it."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from ifso.common.text import one_line
from ifso.errors import DataError

MOST_BYTES = 2**31
"""Of all arrays in a file, unpacked; CIFAR takes a tenth of it."""

HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npz(path: Path, names: Sequence[str]) -> tuple[Any, ...]:
    """The arrays of those names in an .npz; nothing that needs pickle is read, and no more than the file holds."""
    if not path.is_file():
        raise DataError(f"there is no file {path}; give the path of an .npz")
    try:
        with zipfile.ZipFile(path) as archive:
            inside = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            missing = [name for name in names if name not in inside]
            if missing:
                raise DataError(
                    f"{path} holds no {' and no '.join(missing)}; it has {one_line(', '.join(inside)) or 'nothing'}; "
                    f"give a file with {', '.join(names)}"
                )
            if sum(inside[name].file_size for name in names) > MOST_BYTES:
                raise DataError(f"{path} holds more than {MOST_BYTES} bytes of arrays; give fewer images")
            return tuple(_array(archive, inside[name]) for name in names)
    except DataError:
        raise
    except Exception as error:
        said = one_line(error) or type(error).__name__
        raise DataError(f"{path} cannot be read as .npz: {said}; write it with numpy.savez") from error


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Any:
    """One array, of which the header is read first: it must promise as many bytes as are there."""
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{entry.filename} is compressed in a way that numpy does not write")
    with archive.open(entry) as file:
        version = npy.read_magic(file)
        if version not in HEADERS:
            raise ValueError(f"{entry.filename} has an unknown version")
        shape, _, dtype = HEADERS[version](file)
        if dtype.hasobject or math.prod(shape) * dtype.itemsize != entry.file_size - file.tell():
            raise ValueError(f"{entry.filename} does not hold the numbers that its header tells of")
    with archive.open(entry) as file:
        return npy.read_array(file, allow_pickle=False)


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
        raise DataError(f"{where} has dtype {one_line(array.dtype.name)}; give numbers, e.g. uint8 from 0 to 255")
    return torch.from_numpy(np.ascontiguousarray(images))


def as_pixels(array: Any, where: str) -> Tensor:
    """CIFAR images as :func:`as_images` gives them, if there are any and they are bytes from 0 to 255."""
    if array.dtype != np.uint8:
        raise DataError(f"{where} has dtype {one_line(array.dtype.name)}; give uint8 pixels from 0 to 255")
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
        kind = one_line(array.dtype.name)
        raise DataError(f"{where} has dtype {kind}; give whole numbers from 0 to {num_classes - 1}")
    if array.shape not in ((count,), (count, 1)):
        raise DataError(f"{where} has shape {array.shape} for {count} images; give one label for each")
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or highest >= num_classes:
        raise DataError(f"{where} holds labels from {lowest} to {highest}; they must lie in 0 to {num_classes - 1}")
    return torch.from_numpy(array.astype(np.int64)).flatten()
