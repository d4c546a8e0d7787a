"""Images in folders, ``train/CLASS/*.JPEG`` and ``val/CLASS/*.JPEG``: which files there are, and reading one."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ifso.errors import DataError

ENDINGS = (".jpeg", ".jpg", ".png")
LAYOUT = "train/CLASS/*.JPEG and val/CLASS/*.JPEG"


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """``names`` [N] below ``folder``, as bytes in one array, which worker processes share; ``labels`` [N] in int64."""

    folder: Path
    names: Any
    labels: Tensor

    def __len__(self) -> int:
        return len(self.names)

    def part(self, places: Tensor | slice) -> ImageFiles:
        """The files at ``places``."""
        names = self.names[places.numpy() if isinstance(places, Tensor) else places]
        return ImageFiles(self.folder, names, self.labels[places])

    def read(self, place: int) -> Tensor:
        """One image [3, H, W] in uint8, whatever its colours were."""
        from torchvision.io import ImageReadMode, decode_image
        from torchvision.transforms.v2.functional import to_dtype

        path = self.folder / os.fsdecode(self.names[place])
        try:
            image = decode_image(str(path), ImageReadMode.RGB)
        except (RuntimeError, OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as an image: {_reason(error)}; replace or remove it") from error
        if image.dim() != 3:
            raise DataError(f"{path} holds {len(image)} images; replace it with one that holds a single image")
        return to_dtype(image, torch.uint8, scale=True)


def find_images(root: Path) -> tuple[tuple[str, ...], ImageFiles, ImageFiles]:
    """The names of the classes, and the files for training and for the test.

    Classes are the folders of ``train`` in the order of their names, which for ImageNet is that of published weights.
    Of the files in them, those that end like an image count (.jpeg, .jpg or .png).
    """
    if not root.is_dir():
        raise DataError(
            f"there is no folder {root}; give the one that holds {LAYOUT} "
            "(ImageNet is not downloaded for you, see https://image-net.org/download)"
        )
    for part in ("train", "val"):
        if not (root / part).is_dir():
            raise DataError(f"{root} holds no folder {part}; give the one that holds {LAYOUT}")
    classes, tested = _classes(root / "train"), _classes(root / "val")
    strange = sorted(set(tested) - set(classes))
    if strange:
        raise DataError(
            f"{root / 'val' / strange[0]} is of a class that {root / 'train'} lacks"
            f"{f' ({len(strange) - 1} more like it)' if strange[1:] else ''}; both need the same class folders"
        )
    return classes, _files(root / "train", classes, classes), _files(root / "val", tested, classes)


def _classes(folder: Path) -> tuple[str, ...]:
    with os.scandir(folder) as entries:
        inside = [(entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith(".")]
    classes = tuple(sorted(name for name, is_folder in inside if is_folder))
    if not classes:
        loose = any(_is_image(name) for name, _ in inside)
        raise DataError(
            f"{folder} holds {'images but ' if loose else ''}no class folders; "
            f"put the images of each class into a folder of their own, {folder.name}/CLASS/*.JPEG"
        )
    return classes


def _files(folder: Path, present: Sequence[str], classes: Sequence[str]) -> ImageFiles:
    number = {name: label for label, name in enumerate(classes)}
    found = {name: sorted(filter(_is_image, os.listdir(folder / name))) for name in present}  # noqa: PTH208 (quicker)
    empty = [name for name, files in found.items() if not files]
    if len(empty) == len(found):
        raise DataError(f"{folder} holds not a single image ({', '.join(ENDINGS)}) in its {len(found)} class folders")
    if empty:
        raise DataError(f"{folder / empty[0]} holds no image ({', '.join(ENDINGS)}); fill the folder or remove it")
    names = np.array([os.fsencode(f"{name}/{file}") for name, files in found.items() for file in files])
    labels = torch.tensor([number[name] for name, files in found.items() for _ in files])
    return ImageFiles(folder, names, labels)


def _is_image(name: str) -> bool:
    return name.lower().endswith(ENDINGS) and not name.startswith(".")


def _reason(error: Exception) -> str:
    """The first line of an error, without the place in torchvision's source that may precede it.

    >>> _reason(RuntimeError("decode_jpeg, /src/decode_jpeg.cpp:171, Image is incomplete or truncated"))
    'Image is incomplete or truncated'
    """
    return re.sub(r"^\w+, \S+\.cpp:\d+, ", "", (str(error).splitlines() or [type(error).__name__])[0])
