"""A COCO data set on disk: where JSON and images lie, and its JSON read, checked, and refused in one line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ifso.common.text import one_line
from ifso.data.coco_batches import Annotations
from ifso.data.image_folder import ImageFiles
from ifso.errors import DataError

LISTS = ("images", "annotations", "categories")

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


@dataclass(frozen=True, eq=False)
class Instances:
    """What a file says: names of the image files, their boxes, and the ids of the boxes without area left out."""

    path: Path
    names: tuple[str, ...]
    annotations: Annotations
    dropped: tuple[int, ...]


def read_instances(
    path: Path, document: Mapping[str, Any], labels: Mapping[int, int], *, drop_degenerate: bool
) -> Instances:
    """The images and boxes of the file in its order; ``labels`` by the ids of its categories."""
    known = categories_of(path, document)
    images = _checked_images(path, document["images"])
    boxes, dropped = _checked_boxes(path, document["annotations"], images, known)
    if dropped and not drop_degenerate:
        number, image, (width, height) = dropped[0]
        raise DataError(
            f"{path}: annotation {number} of image {image} has a box without area ({width:g}×{height:g} pixels)"
            f"{_more(dropped)}; mend the file, or let such boxes be left out with drop_degenerate"
        )
    return Instances(
        path,
        tuple(image["file_name"] for image in images.values()),
        _annotations(images, boxes, known, labels),
        tuple(number for number, _, _ in dropped),
    )


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
    for name in ("images", "categories"):
        if not document[name]:
            raise DataError(f"{path} has no {name}: there is nothing in it to use")
    return document


def categories_of(path: Path, document: Mapping[str, Any]) -> Categories:
    """Names by id, in the order of the ids."""
    found: Categories = {}
    for place, entry in enumerate(document["categories"]):
        number, name = _number(path, "categories", place, entry), entry.get("name")
        if not isinstance(name, str) or not name:
            raise DataError(f"{path}: category {number} has the name {_shown(name)}; give it one")
        if number in found:
            both = f"{_shown(found[number])} and {_shown(name)}"
            raise DataError(f"{path}: two categories have the id {number} ({both})")
        if name in found.values():
            raise DataError(f"{path}: two categories have the name {_shown(name)}; give each a name of its own")
        found[number] = name
    return dict(sorted(found.items()))


def refuse_others(path: Path, found: Categories, known: Categories) -> None:
    """All files of a set need the same categories."""
    for number in sorted(set(found) ^ set(known)):
        if number in found:
            name = _shown(found[number])
            raise DataError(f"{path} has the category {number} ({name}), which the training set lacks")
        raise DataError(f"{path} lacks the category {number} ({_shown(known[number])}) of the training set")
    for number, name in found.items():
        if name != known[number]:
            both = f"{_shown(name)}, but the training set {_shown(known[number])}"
            raise DataError(f"{path} calls the category {number} {both}")


def _number(path: Path, kind: str, place: int, entry: Mapping[str, Any]) -> int:
    number = entry.get("id")
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < LARGEST:
        raise DataError(f"{path}: the id of {kind}[{place}] is {_shown(number)}; give a whole number of 0 or more")
    return number


def _checked_images(path: Path, entries: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """The images by id."""
    found: dict[int, Mapping[str, Any]] = {}
    for place, entry in enumerate(entries):
        number, name = _number(path, "images", place, entry), entry.get("file_name")
        if number in found:
            both = f"{_shown(found[number]['file_name'])} and {_shown(name)}"
            raise DataError(f"{path}: two images have the id {number} ({both})")
        if not isinstance(name, str) or not name:
            raise DataError(f"{path}: image {number} has the file_name {_shown(name)}; give the name of its file")
        if _leads_away(name):
            raise DataError(
                f"{path}: image {number} has the file_name {_shown(name)}, which leads out of the folder of images; "
                "give a path below it"
            )
        sides = [entry.get("width"), entry.get("height")]
        if not all(map(_is_side, sides)):
            both = f"width {_shown(sides[0])} and height {_shown(sides[1])}"
            raise DataError(f"{path}: image {number} has {both}; give its pixels")
        found[number] = entry
    return found


def _is_side(side: object) -> bool:
    return isinstance(side, int) and not isinstance(side, bool) and 0 < side <= LONGEST_SIDE


def _leads_away(name: str) -> bool:
    r"""Is it absolute on any system, does it go up, or can no file system hold it?

    >>> [_leads_away(name) for name in ("a/b..png", "../b.png", "/b.png", "c:b.png", "a\\..\\b.png")]
    [False, True, True, True, True]
    """
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return True
    parts = name.replace("\\", "/").split("/")
    return not parts[0] or parts[0][1:2] == ":" or ".." in parts or "\0" in name


class _Box(NamedTuple):
    image: int
    category: int
    corners: tuple[float, float, float, float]
    area: float
    crowd: bool


Dropped = tuple[int, int, tuple[float, float]]
"""A box without area: id, image id, width and height."""


def _checked_boxes(
    path: Path, entries: Sequence[Mapping[str, Any]], images: Mapping[int, Mapping[str, Any]], known: Categories
) -> tuple[list[_Box], list[Dropped]]:
    """The boxes in the order of the file, and those without area."""
    boxes: list[_Box] = []
    dropped: list[Dropped] = []
    numbers: set[int] = set()
    for place, entry in enumerate(entries):
        number = _number(path, "annotations", place, entry)
        if number in numbers:
            raise DataError(f"{path}: two annotations have the id {number}; give each an id of its own")
        numbers.add(number)
        for key, those in (("image_id", images), ("category_id", known)):
            if not isinstance(entry.get(key), int) or entry[key] not in those:
                found = _shown(entry.get(key))
                raise DataError(f"{path}: annotation {number} has the {key} {found}, which the file does not list")
        box, image = _box(path, entry), images[entry["image_id"]]
        width, height = image["width"], image["height"]
        _refuse_outside(path, number, box, width, height)
        inside = _inside(box.corners, width, height)
        if min(inside) < LEAST:
            dropped.append((number, box.image, inside))
        else:
            boxes.append(box)
    return boxes, dropped


def _box(path: Path, entry: Mapping[str, Any]) -> _Box:
    found = entry.get("bbox")
    if not isinstance(found, list) or len(found) != 4 or not all(map(_is_number, found)):
        given = _shown(found)
        raise DataError(f"{_named(path, entry)} has the bbox {given}; give four numbers: left, top, width, height")
    left, top, width, height = map(float, found)
    area, crowd = entry.get("area", max(width, 0) * max(height, 0)), entry.get("iscrowd", 0)
    if not _is_number(area) or area < 0:
        raise DataError(f"{_named(path, entry)} has the area {_shown(area)}; give a number of pixels, or leave it out")
    if crowd not in (0, 1):
        raise DataError(f"{_named(path, entry)} has iscrowd {_shown(crowd)}; give 0 or 1")
    corners = (left, top, left + width, top + height)
    return _Box(entry["image_id"], entry["category_id"], corners, float(area), bool(crowd))


def _named(path: Path, entry: Mapping[str, Any]) -> str:
    return f"{path}: annotation {entry['id']} of image {entry['image_id']}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def _shown(value: object) -> str:
    return one_line(repr(value))


def _refuse_outside(path: Path, number: int, box: _Box, width: int, height: int) -> None:
    left, top, right, bottom = box.corners
    if min(left, top) < -OVERHANG or right > width + OVERHANG or bottom > height + OVERHANG:
        raise DataError(
            f"{path}: annotation {number} reaches from ({left:g}, {top:g}) to ({right:g}, {bottom:g}), outside image "
            f"{box.image} of {width}×{height} pixels; mend the box (left, top, width, height) or the size of the image"
        )


def _inside(corners: Sequence[float], width: int, height: int) -> tuple[float, float]:
    """Width and height of what lies in the image."""
    left, top, right, bottom = corners
    return min(right, width) - max(left, 0), min(bottom, height) - max(top, 0)


def _annotations(
    images: Mapping[int, Mapping[str, Any]], boxes: Sequence[_Box], known: Categories, labels: Mapping[int, int]
) -> Annotations:
    """In tensors, the boxes of an image in the order of the file."""
    places = {number: place for place, number in enumerate(images)}
    owners = torch.tensor([places[box.image] for box in boxes], dtype=torch.int64)
    order = owners.argsort(stable=True)
    counts = torch.bincount(owners, minlength=len(images))

    def column(values: Iterator[Any], kind: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.tensor(list(values), dtype=kind).reshape(-1, *shape)[order]

    return Annotations(
        image_ids=torch.tensor(list(images)),
        sizes=torch.tensor([[entry["height"], entry["width"]] for entry in images.values()]),
        first=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        boxes=column((box.corners for box in boxes), torch.float64, 4),
        labels=column((labels[box.category] for box in boxes), torch.int64),
        areas=column((box.area for box in boxes), torch.float64),
        crowd=column((box.crowd for box in boxes), torch.bool),
        categories={labels[number]: name for number, name in known.items()},
    )


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
