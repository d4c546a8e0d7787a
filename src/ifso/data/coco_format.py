"""A COCO data set on disk: where JSON and images lie, and its JSON read, checked, and refused in one line."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ifso.common.files import is_file
from ifso.common.text import one_line
from ifso.data.coco_batches import Annotations
from ifso.data.decoding import ImageFiles
from ifso.errors import DataError

LISTS = {"images": "file_name", "annotations": "", "categories": "name"}
"""The lists of a file, and what names their entries."""

OVERHANG = 1.0
"""Pixels that a box may reach beyond its image, as rounding leaves them; training cuts them off."""

LEAST = 0.01
"""A box of fewer pixels in width or height, as far as it lies in the image, has no area."""

LONGEST_SIDE = 2**20
"""Pixels that an image may have in width or height."""

LARGEST = 2**53
"""Above all numbers of a file."""

Categories = dict[int, str]
"""Names by the id that the file gives."""

Entry = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Instances:
    """What a file says: names of the image files, their boxes, and the ids of the boxes without area left out."""

    path: Path
    names: tuple[str, ...]
    annotations: Annotations
    dropped: tuple[int, ...]


def read_document(path: Path) -> dict[str, Any]:
    """The JSON object of the file, with its three lists."""
    if not path.is_file():
        raise DataError(f"there is no file {path}; give a COCO JSON")
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON ({one_line(error)}); give a COCO JSON") from error
    if not isinstance(document, dict):
        raise DataError(f"{path} holds a {type(document).__name__}, not an object; it is no COCO JSON")
    for name in LISTS:
        entries = document.get(name)
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise DataError(f"{path} has no list {name!r} of objects; it is no COCO JSON of instances")
        if not entries and name != "annotations":
            raise DataError(f"{path} has no {name}: there is nothing in it to use")
    return document


def _by_id(path: Path, document: Mapping[str, Any], kind: str) -> dict[int, Entry]:
    """The entries of a list by their ids."""
    entries: dict[int, Entry] = {}
    for position, entry in enumerate(document[kind]):
        number = entry.get("id")
        if type(number) is not int or not 0 <= number < LARGEST:
            shown = _shown(number)
            raise DataError(f"{path}: the id of {kind}[{position}] is {shown}; give a whole number of 0 or more")
        if number in entries:
            both = [_shown(each.get(LISTS[kind])) for each in (entries[number], entry) if LISTS[kind]]
            names = f" ({' and '.join(both)})" if both else ""
            raise DataError(f"{path}: two {kind} have the id {number}{names}; give each an id of its own")
        entries[number] = entry
    return entries


def categories_of(path: Path, document: Mapping[str, Any]) -> Categories:
    """Names by id, in the order of the ids."""
    names: Categories = {}
    for number, entry in sorted(_by_id(path, document, "categories").items()):
        name = entry.get("name")
        if not isinstance(name, str) or not name:
            raise DataError(f"{path}: category {number} has the name {_shown(name)}; give it one")
        if name in names.values():
            raise DataError(f"{path}: two categories have the name {_shown(name)}; give each a name of its own")
        names[number] = name
    return names


def refuse_others(path: Path, names: Categories, known: Categories) -> None:
    """DataError unless a file has the same categories as the training set."""
    for number in sorted(names.keys() | known.keys()):
        here, there = (_shown(each.get(number)) for each in (names, known))
        if number not in known:
            raise DataError(f"{path} has the category {number} ({here}), which the training set lacks")
        if number not in names:
            raise DataError(f"{path} lacks the category {number} ({there}) of the training set")
        if here != there:
            raise DataError(f"{path} calls the category {number} {here}, but the training set {there}")


def read_instances(
    path: Path, document: Mapping[str, Any], labels: Mapping[int, int], *, drop_degenerate: bool
) -> Instances:
    """The images and boxes of the file in its order; ``labels`` by the ids of its categories."""
    known = categories_of(path, document)
    images = _checked_images(path, document)
    annotations = _by_id(path, document, "annotations")
    numbers, image_ids = list(annotations), torch.tensor(list(images))
    index = {number: position for position, number in enumerate(images)}
    rows = [_row(path, number, entry, index, known) for number, entry in annotations.items()]
    columns = torch.tensor(rows, dtype=torch.float64).reshape(-1, 8)
    owners, boxes = columns[:, 0].long(), columns[:, 2:6]
    sizes = torch.tensor([[entry["height"], entry["width"]] for entry in images.values()])
    limits = sizes[owners].flip(1).double()
    outside = (boxes[:, :2] < -OVERHANG).any(1) | (boxes[:, 2:] > limits + OVERHANG).any(1)
    for row in outside.nonzero()[:1, 0].tolist():
        left, top, right, bottom = boxes[row].tolist()
        raise DataError(
            f"{path}: annotation {numbers[row]} reaches from ({left:g}, {top:g}) to ({right:g}, {bottom:g}), outside "
            f"image {image_ids[owners[row]]} of {limits[row, 0]:g}×{limits[row, 1]:g} pixels; "
            "mend the box (left, top, width, height) or the size of the image"
        )
    inside = torch.minimum(boxes[:, 2:], limits) - boxes[:, :2].clamp(min=0)
    degenerate = inside.amin(1) < LEAST
    dropped = degenerate.nonzero()[:, 0].tolist()
    if dropped and not drop_degenerate:
        row = dropped[0]
        raise DataError(
            f"{path}: annotation {numbers[row]} of image {image_ids[owners[row]]} has a box without area "
            f"({inside[row, 0]:g}×{inside[row, 1]:g} pixels){_more(dropped)}; "
            "mend the file, or let such boxes be left out with drop_degenerate"
        )
    kept = (~degenerate).nonzero()[:, 0]
    kept = kept[owners[kept].argsort(stable=True)]
    return Instances(
        path,
        tuple(image["file_name"] for image in images.values()),
        Annotations(
            image_ids=image_ids,
            sizes=sizes,
            first=torch.cat([kept.new_zeros(1), torch.bincount(owners[kept], minlength=len(images)).cumsum(0)]),
            boxes=boxes[kept],
            labels=torch.tensor([labels[int(number)] for number in columns[kept, 1].tolist()], dtype=torch.int64),
            areas=columns[kept, 6],
            crowd=columns[kept, 7] == 1,
            categories={labels[number]: name for number, name in known.items()},
        ),
        tuple(numbers[row] for row in dropped),
    )


def _checked_images(path: Path, document: Mapping[str, Any]) -> dict[int, Entry]:
    """The images by id."""
    images = _by_id(path, document, "images")
    for number, entry in images.items():
        name, sides = entry.get("file_name"), [entry.get("width"), entry.get("height")]
        if not isinstance(name, str) or not name:
            raise DataError(f"{path}: image {number} has the file_name {_shown(name)}; give the name of its file")
        if _leads_away(name):
            raise DataError(
                f"{path}: image {number} has the file_name {_shown(name)}, which leads out of the folder of images; "
                "give a path below it"
            )
        if not all(type(side) is int and 0 < side <= LONGEST_SIDE for side in sides):
            both = f"width {_shown(sides[0])} and height {_shown(sides[1])}"
            raise DataError(f"{path}: image {number} has {both}; give its pixels")
    return images


def _row(path: Path, number: int, entry: Entry, images: Mapping[int, int], known: Categories) -> tuple[float, ...]:
    """Index of the image, id of the category, corners of the box, area, and 1 for a crowd."""
    for key, those in (("image_id", images), ("category_id", known)):
        if not isinstance(entry.get(key), int) or entry[key] not in those:
            shown = _shown(entry.get(key))
            raise DataError(f"{path}: annotation {number} has the {key} {shown}, which the file does not list")
    where = f"{path}: annotation {number} of image {entry['image_id']}"
    box, crowd = entry.get("bbox"), entry.get("iscrowd", 0)
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
        raise DataError(f"{where} has the bbox {_shown(box)}; give four numbers: left, top, width, height")
    left, top, width, height = map(float, box)
    area = entry.get("area", max(width, 0) * max(height, 0))
    if not _is_number(area) or area < 0:
        raise DataError(f"{where} has the area {_shown(area)}; give a number of pixels, or leave it out")
    if crowd not in (0, 1):
        raise DataError(f"{where} has iscrowd {_shown(crowd)}; give 0 or 1")
    return images[entry["image_id"]], entry["category_id"], left, top, left + width, top + height, area, crowd


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < LARGEST  # type: ignore[arg-type]


def _leads_away(name: str) -> bool:
    r"""Return whether a name is absolute on any system, goes up, or cannot be held by a file system.

    >>> [_leads_away(name) for name in ("a/b..png", "../b.png", "/b.png", "c:b.png", "a\\..\\b.png")]
    [False, True, True, True, True]
    """
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return True
    parts = name.replace("\\", "/").split("/")
    return not parts[0] or parts[0][1:2] == ":" or ".." in parts or "\0" in name


def _shown(value: object) -> str:
    return one_line(repr(value))


def _more(those: Sequence[Any]) -> str:
    return f" ({len(those) - 1} more like it)" if those[1:] else ""


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
    splits = {split: files for split in SPLITS if (files := _split(root, split)) is not None}
    if "train" not in splits:
        raise DataError(f"{root} holds no instances_train.json; give the folder that holds {LAYOUT}")
    if len(splits) == 1:
        raise DataError(f"{root} holds neither instances_val.json nor instances_test.json; one of them is needed")
    return splits


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
    """The files ``names``, all there; the label of each is its index. The folder is the first that has the first."""
    present = [folder for folder in split.folders if folder.is_dir()]
    folder = next((folder for folder in present if is_file(folder / names[0])), None)
    if folder is None:
        looked = ", ".join(str(folder) for folder in present)
        first = one_line(names[0])
        raise DataError(f"{split.instances}: the file {first} of image {image_ids[0]} is in none of {looked}")
    inside = functools.cache(functools.partial(_names_in, folder))
    parts = [name.rpartition("/") for name in names]
    missing = [index for index, (parent, _, last) in enumerate(parts) if last not in inside(parent)]
    if missing:
        number, name = image_ids[missing[0]], one_line(names[missing[0]])
        raise DataError(f"{split.instances}: the file {name} of image {number} is not in {folder}{_more(missing)}")
    return ImageFiles(folder, np.array([os.fsencode(name) for name in names]), torch.arange(len(names)))


def _names_in(folder: Path, parent: str) -> set[str]:
    """What lies in a folder; nothing where it cannot be read."""
    try:
        return set(os.listdir(folder / parent))  # noqa: PTH208 (quicker)
    except (OSError, ValueError):
        return set()
