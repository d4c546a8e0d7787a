"""Where the JSON files and the images of a ``coco:PATH`` lie: side by side, or as COCO itself has them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ifso.common.text import one_line
from ifso.data.image_files import ImageFiles
from ifso.errors import DataError

SPLITS = ("train", "val", "test")
LAYOUT = "images/ and instances_train.json, or annotations/instances_train2017.json and train2017/"


class SplitFiles(NamedTuple):
    """The JSON file of a split, and the folders that may hold its images."""

    instances: Path
    folders: tuple[Path, ...]


def find_splits(root: Path) -> dict[str, SplitFiles]:
    """The splits of ``root``: ``train``, and ``val`` or ``test`` or both."""
    if not root.is_dir():
        raise DataError(f"there is no folder {root}; give the one that holds {LAYOUT}")
    found = {split: files for split in SPLITS if (files := _split(root, split)) is not None}
    if "train" not in found:
        raise DataError(f"{root} holds no instances_train.json; give the folder that holds {LAYOUT}")
    if len(found) == 1:
        raise DataError(f"{root} holds neither instances_val.json nor instances_test.json; one of them is needed")
    return found


def _split(root: Path, split: str) -> SplitFiles | None:
    """``instances_SPLIT.json`` in ``root`` or its folder ``annotations``, with a year behind SPLIT or without."""
    fitting = re.compile(rf"instances_({split}(?:\d{{4}})?)\.json")
    matches = [
        (folder / name, match[1])
        for folder in (root, root / "annotations")
        if folder.is_dir()
        for name in sorted(os.listdir(folder))  # noqa: PTH208 (names alone)
        if (match := fitting.fullmatch(name))
    ]
    if not matches:
        return None
    if matches[1:]:
        raise DataError(f"{matches[0][0]} and {matches[1][0]} are both there; leave one for {split!r}")
    path, name = matches[0]
    folders = (root / "images" / name, root / name, root / "images" / split, root / split, root / "images", root)
    return SplitFiles(path, tuple(dict.fromkeys(folders)))


def image_files(split: SplitFiles, names: Sequence[str], image_ids: Sequence[int]) -> ImageFiles:
    """The files ``names``, all there; the label of each is its place. The folder is the first that has the first."""
    present = [folder for folder in split.folders if folder.is_dir()]
    folder = next((folder for folder in present if _is_file(folder / names[0])), None)
    if folder is None:
        looked = ", ".join(str(folder) for folder in present)
        first = one_line(names[0])
        raise DataError(f"{split.instances}: the file {first} of image {image_ids[0]} is in none of {looked}")
    inside: dict[str, set[str]] = {}
    missing = [
        (number, name) for number, name in zip(image_ids, names, strict=True) if not _is_there(folder, name, inside)
    ]
    if missing:
        number, name = missing[0]
        more = f" ({len(missing) - 1} more like it)" if missing[1:] else ""
        raise DataError(f"{split.instances}: the file {one_line(name)} of image {number} is not in {folder}{more}")
    return ImageFiles(folder, np.array([os.fsencode(name) for name in names]), torch.arange(len(names)))


def _is_file(path: Path) -> bool:
    """Names that are too long for the file system are none of files."""
    try:
        return path.is_file()
    except OSError:
        return False


def _is_there(folder: Path, name: str, inside: dict[str, set[str]]) -> bool:
    """Looked up in what the folders hold, each of which is read once."""
    parent, _, last = name.rpartition("/")
    if parent not in inside:
        place = folder / parent
        try:
            inside[parent] = set(os.listdir(place))  # noqa: PTH208 (quicker)
        except (OSError, ValueError):
            inside[parent] = set()
    return last in inside[parent]
