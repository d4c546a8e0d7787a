"""CIFAR-10 and CIFAR-100 from an .npz, or from the folder that torchvision unpacks, downloaded if the user says so."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ifso.common.text import describe_error, one_line
from ifso.data.batches import Augmentation, Images
from ifso.errors import DataError, required

MOST_BYTES = 2**31
"""Of all arrays in a file, unpacked; CIFAR takes a tenth of it."""


def read_npz(path: Path, names: Sequence[str]) -> tuple[Any, ...]:
    """The arrays of those names in an .npz; nothing that needs pickle is read."""
    if not path.is_file():
        raise DataError(f"there is no file {path}; give the path of an .npz")
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in names if name not in archive.files]
            if missing:
                inside = one_line(", ".join(archive.files)) or "nothing"
                raise DataError(
                    f"{path} holds no {' and no '.join(missing)}; it has {inside}; give a file with {', '.join(names)}"
                )
            entries = archive.zip.infolist()
            if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries):
                raise DataError(f"{path} is compressed in a way that numpy does not write; write it with numpy.savez")
            if sum(entry.file_size for entry in entries) > MOST_BYTES:
                raise DataError(f"{path} holds more than {MOST_BYTES} bytes of arrays; give fewer images")
            arrays = tuple(archive[name] for name in names)
            if not all(isinstance(array, np.ndarray) for array in arrays):
                raise ValueError("an entry is no array")
            return arrays
    except DataError:
        raise
    except Exception as error:
        reason = one_line(error) or type(error).__name__
        raise DataError(f"{path} cannot be read as .npz: {reason}; write it with numpy.savez") from error


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


ARRAYS = ("x_train", "y_train", "x_test", "y_test")

DOWNLOAD = "allow the download (--download, or download=True)"


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


def open_cifar(kind: str, path: str, download: bool = False) -> tuple[Images, Images]:
    """Training and test images of ``cifar10`` or ``cifar100`` in ``path``, on the CPU.

    With ``download``, a folder that is not there or not complete is fetched first.
    """
    source, about = Path(path), CIFAR[kind]
    if source.is_dir() or (download and not source.exists() and source.suffix != ".npz"):
        x_train, y_train, x_test, y_test = _from_folder(about, source, download)
    elif source.exists():
        x_train, y_train, x_test, y_test = read_npz(source, ARRAYS)
    else:
        raise DataError(
            f"there is no file or folder {source}; give an .npz with {', '.join(ARRAYS)}, or the folder that holds "
            f"{about.folder}; to have it downloaded into a folder, {DOWNLOAD}"
        )
    train, test = cifar_part(kind, x_train, y_train, source, "train"), cifar_part(kind, x_test, y_test, source, "test")
    classes, fewer = about.num_classes, CIFAR["cifar10"].num_classes
    if len(train) >= classes**2 > fewer**2 and int(train.labels.max()) < fewer:
        raise DataError(f"{path}: y_train has labels below {fewer} only, as CIFAR-10 has; give cifar10:{path}")
    return train, test


def cifar_part(kind: str, x: Any, y: Any, path: Path, part: str) -> Images:
    """Images and labels of one part (``train`` or ``test``), checked. ``path`` is where they come from."""
    about, where = CIFAR[kind], f"{path}: x_{part}"
    if x.dtype != np.uint8:
        raise DataError(f"{where} has dtype {one_line(x.dtype.name)}; give uint8 pixels from 0 to 255")
    pixels = as_images(x, where)
    if not len(pixels):
        raise DataError(f"{where} is empty; give one image at least")
    labels = as_labels(y, len(pixels), about.num_classes, f"{path}: y_{part}")
    return Images(pixels, labels, *(torch.tensor(each).view(-1, 1, 1) for each in (about.mean, about.deviation)))


def _from_folder(about: Cifar, path: Path, download: bool) -> tuple[Any, ...]:
    """The arrays, read by torchvision, which compares the files with their known checksums first."""
    need = f"a folder of {about.reader} is read with torchvision"
    torchvision = required("torchvision", need, "vision", DataError, ", or give an .npz")
    reader = getattr(torchvision.datasets, about.reader)
    if download and _fault(reader, path):
        _download(reader, path)
    try:
        parts = [reader(path, train=train, download=False) for train in (True, False)]
    except (RuntimeError, OSError, ValueError, KeyError, EOFError) as error:
        fault = _fault(reader, path) or f"{path / reader.base_folder} cannot be read ({describe_error(error)})"
        raise DataError(f"{fault}; unpack {reader.url} into {path}, or {DOWNLOAD}") from error
    return tuple(array for part in parts for array in (part.data, np.asarray(part.targets, dtype=np.int64)))


def _fault(reader: Any, path: Path) -> str:
    """Which of torchvision's files is missing or differs from the original, if any."""
    from torchvision.datasets.utils import check_integrity

    folder = path / reader.base_folder
    if not folder.is_dir():
        return f"{path} holds no folder {reader.base_folder}"
    for name, checksum in (*reader.train_list, *reader.test_list, (reader.meta["filename"], reader.meta["md5"])):
        if not (folder / name).is_file():
            return f"{folder / name} is missing"
        if not check_integrity(folder / name, checksum):
            return f"{folder / name} is damaged (its checksum is not that of the original)"
    return ""


def _download(reader: Any, path: Path) -> None:
    from torchvision.datasets.utils import download_and_extract_archive

    try:
        download_and_extract_archive(reader.url, path, filename=reader.filename, md5=reader.tgz_md5)
    except (RuntimeError, OSError, ValueError, EOFError, tarfile.TarError) as error:
        raise DataError(
            f"{reader.url} cannot be downloaded into {path} ({describe_error(error)}); "
            "try again, or unpack it there yourself"
        ) from error
