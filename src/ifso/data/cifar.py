"""CIFAR-10 and CIFAR-100 from an .npz, or from the folder that torchvision unpacks, downloaded if the user says so."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ifso.common.text import describe_error
from ifso.data.batches import Augmentation, Images
from ifso.data.npz import as_labels, as_pixels, read_npz
from ifso.errors import DataError

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
    place, about = Path(path), CIFAR[kind]
    if place.is_dir() or (download and not place.exists() and place.suffix != ".npz"):
        x_train, y_train, x_test, y_test = _from_folder(about, place, download)
    elif place.exists():
        x_train, y_train, x_test, y_test = read_npz(place, ARRAYS)
    else:
        raise DataError(
            f"there is no file or folder {place}; give an .npz with {', '.join(ARRAYS)}, or the folder that holds "
            f"{about.folder}; to have it downloaded into a folder, {DOWNLOAD}"
        )
    train, test = cifar_part(kind, x_train, y_train, place, "train"), cifar_part(kind, x_test, y_test, place, "test")
    _refuse_smaller_kind(kind, train, place)
    return train, test


def cifar_part(kind: str, x: Any, y: Any, place: Path, part: str) -> Images:
    """Images and labels of one part (``train`` or ``test``), checked. ``place`` is where they come from."""
    about = CIFAR[kind]
    pixels = as_pixels(x, f"{place}: x_{part}")
    labels = as_labels(y, len(pixels), about.num_classes, f"{place}: y_{part}")
    return Images(pixels, labels, _by_colour(about.mean), _by_colour(about.deviation))


def _refuse_smaller_kind(kind: str, train: Images, place: Path) -> None:
    """CIFAR-10 opened as CIFAR-100 would be learned with ninety classes that never occur."""
    classes, smaller = CIFAR[kind].num_classes, CIFAR["cifar10"].num_classes
    if len(train) >= classes**2 > smaller**2 and int(train.labels.max()) < smaller:
        raise DataError(f"{place}: y_train has labels below {smaller} only, as CIFAR-10 has; give cifar10:{place}")


def _by_colour(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values).view(-1, 1, 1)


def _from_folder(about: Cifar, place: Path, download: bool) -> tuple[Any, ...]:
    """The arrays, read by torchvision, which compares the files with their known checksums first."""
    try:
        from torchvision import datasets
    except ImportError as error:
        raise DataError(
            f"a folder of {about.reader} is read with torchvision, which cannot be imported ({error}); "
            'pip install "ifso[vision]", or give an .npz'
        ) from error
    reader = getattr(datasets, about.reader)
    if download and _fault(reader, place):
        _download(reader, place)
    try:
        parts = [reader(place, train=train, download=False) for train in (True, False)]
    except (RuntimeError, OSError, ValueError, KeyError, EOFError) as error:
        fault = _fault(reader, place) or f"{place / reader.base_folder} cannot be read ({describe_error(error)})"
        raise DataError(f"{fault}; unpack {reader.url} into {place}, or {DOWNLOAD}") from error
    return tuple(array for part in parts for array in (part.data, np.asarray(part.targets, dtype=np.int64)))


def _fault(reader: Any, place: Path) -> str:
    """Which of torchvision's files is missing or differs from the original, if any."""
    from torchvision.datasets.utils import check_integrity

    folder = place / reader.base_folder
    if not folder.is_dir():
        return f"{place} holds no folder {reader.base_folder}"
    for name, checksum in (*reader.train_list, *reader.test_list, (reader.meta["filename"], reader.meta["md5"])):
        if not (folder / name).is_file():
            return f"{folder / name} is missing"
        if not check_integrity(folder / name, checksum):
            return f"{folder / name} is damaged (its checksum is not that of the original)"
    return ""


def _download(reader: Any, place: Path) -> None:
    from torchvision.datasets.utils import download_and_extract_archive

    try:
        download_and_extract_archive(reader.url, place, filename=reader.filename, md5=reader.tgz_md5)
    except (RuntimeError, OSError, ValueError, EOFError, tarfile.TarError) as error:
        raise DataError(
            f"{reader.url} cannot be downloaded into {place} ({describe_error(error)}); "
            "try again, or unpack it there yourself"
        ) from error
