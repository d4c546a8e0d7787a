"""Small COCO folders for tests: images of noise, boxes that are easy to follow."""

from __future__ import annotations

import json

import numpy as np
from PIL import Image

SIZES = ((30, 40), (30, 40), (24, 50), (36, 28), (30, 40), (30, 40))
"""Height and width of the images with the ids 11, 12, … in a file."""

BOXES = (
    {"image_id": 11, "category_id": 3, "bbox": [2, 3, 10, 12]},
    {"image_id": 13, "category_id": 7, "bbox": [0, 0, 50, 24], "area": 321.5},
    {"image_id": 11, "category_id": 7, "bbox": [20.5, 10, 19.5, 20]},
    {"image_id": 12, "category_id": 3, "bbox": [5, 5, 30, 20], "iscrowd": 1},
    {"image_id": 14, "category_id": 3, "bbox": [1, 2, 3, 4]},
    {"image_id": 16, "category_id": 7, "bbox": [8, 4, 16, 8]},
)
"""Image 12 has nothing but a crowd, 15 nothing at all."""

CATEGORIES = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}]


def document(split: str, sizes=SIZES) -> dict:
    """What a file says."""
    return {
        "images": [
            {"id": 11 + k, "file_name": f"{split}_{k}.png", "height": height, "width": width}
            for k, (height, width) in enumerate(sizes)
        ],
        "annotations": [{"id": 100 + k, **box} for k, box in enumerate(BOXES)],
        "categories": CATEGORIES,
    }


def pixels_of(split: str, k: int, height: int, width: int):
    """Image k of a split [H, W, 3], as it is written."""
    return np.random.default_rng([k, *split.encode()]).integers(0, 256, (height, width, 3), np.uint8)


def write_images(folder, split: str, sizes=SIZES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for k, (height, width) in enumerate(sizes):
        Image.fromarray(pixels_of(split, k, height, width)).save(folder / f"{split}_{k}.png")


def write_json(path, contents) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))


def write_folder(root, splits=("train", "val", "test"), sizes=SIZES):
    """Images and files side by side."""
    for split in splits:
        write_images(root / "images", split, sizes)
        write_json(root / f"instances_{split}.json", document(split, sizes))
    return root
