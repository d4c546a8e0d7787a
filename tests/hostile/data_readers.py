"""Readers of what is no run folder: data sets, images, names on the command line, files of ``ifso repro``."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from binaries import mutated_npz, mutated_toml
from contract import SENTINEL, Reader
from mutating import TEXTS, mutated_bytes, mutated_json
from PIL import Image
from seeds import coco, detection_result, result

from ifso.data.base import CocoOptions, read_options
from ifso.data.cifar import open_cifar
from ifso.data.coco import CocoData
from ifso.data.coco_batches import Resizing
from ifso.data.coco_format import Instances, categories_of, find_splits, image_files, read_document, read_instances
from ifso.data.decoding import ImageFiles
from ifso.data.image_folder import ImageFolders, find_image_folders
from ifso.data.registry import open_data
from ifso.models.registry import ModelName, read_name
from ifso_repro.config import config_folder, read_row, read_study
from ifso_repro.results import read_file
from ifso_repro.schema import Row, Study

OPTIONS = (
    "size=480x640",
    "size=0",
    "size=" + "9" * 5000,
    "labels=ids",
    "hold=no",
    "drop_degenerate",
    "keep_empty=2",
    "size=²",
)
LITERALS = (
    "1",
    "true",
    "None",
    "[1,2]",
    "{[]:1}",
    "-" * 5000 + "1",
    "(" * 5000,
    "9" * 5000,
    "1e999",
    "__import__('os')",
    "'x'",
    "{}",
)


def data_readers(root: Path) -> Iterator[Reader]:
    """All of them; their files lie in ``root``."""
    yield from _coco_readers(root)
    yield from _array_readers(root)
    yield from _name_readers(root)
    yield from _repro_readers(root)


def _coco_readers(root: Path) -> Iterator[Reader]:
    folder = root / "boxes"
    (folder / "images").mkdir(parents=True)
    (root / "x").write_bytes(b"outside")
    for split in ("train", "val"):
        (folder / f"instances_{split}.json").write_text(json.dumps(coco(split)))
        for k in range(3):
            (folder / "images" / f"{split}_{k}.png").write_bytes(_picture("PNG", 8, 6))

    def hurt(random: Random) -> Path:
        path = folder / "instances_train.json"
        path.write_bytes(mutated_json(coco("train"), random))
        return path

    yield Reader("COCO JSON", hurt, _instances, _check_instances, "instances_train.json", share=8)
    for options in ("", ",labels=ids,drop_degenerate,size=4"):
        yield Reader(
            f"COCO folder{options}", hurt, lambda path, options=options: open_data(f"coco:{path.parent}{options}",
            workers=0),
            _check_coco, "instances_", share=0.3,
        )  # fmt: skip


def _picture(kind: str, width: int, height: int) -> bytes:
    target = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)).save(target, kind)
    return target.getvalue()


def _instances(path: Path) -> tuple[Instances, ImageFiles]:
    document = read_document(path)
    known = categories_of(path, document)
    found = read_instances(
        path, document, {number: label for label, number in enumerate(known, 1)}, drop_degenerate=True
    )
    split = find_splits(path.parent)["train"]
    return found, image_files(split, found.names, found.annotations.image_ids.tolist())


def _check_instances(found: tuple[Instances, ImageFiles]) -> None:
    instances, files = found
    boxes, sizes = instances.annotations.boxes, instances.annotations.sizes
    assert boxes.isfinite().all()
    assert boxes.numel() == 0 or boxes.min() >= -1
    assert (sizes > 0).all()
    assert len(files) == len(instances.annotations) > 0
    for name in files.names:
        place = Path(os.path.realpath(files.folder / os.fsdecode(name)))
        assert place.is_relative_to(instances.path.parent), f"{place} is outside"
    for place in range(len(files)):
        instances.annotations.target(place)


def _check_coco(data: CocoData) -> None:
    images, targets = data.first_batch()
    assert len(images) == len(targets) > 0


def _array_readers(root: Path) -> Iterator[Reader]:
    path, picture = root / "arrays.npz", root / "pictures"
    picture.mkdir()
    random_bytes = np.random.default_rng(0).bytes
    arrays = {
        "x_train": ("'|u1'", "(2, 32, 32, 3)", random_bytes(2 * 3072)), "y_train": ("'<i8'", "(2,)", bytes(16)),
        "x_test": ("'|u1'", "(1, 3072)", random_bytes(3072)), "y_test": ("'|u1'", "(1, 1)", b"\3"),
    }  # fmt: skip
    seeds = [_picture("PNG", 16, 16), _picture("JPEG", 16, 16)]

    def arrays_file(random: Random) -> Path:
        path.write_bytes(mutated_npz(arrays, random, str(root / SENTINEL)))
        return path

    def image_file(random: Random) -> ImageFiles:
        (picture / "hurt.png").write_bytes(mutated_bytes(random.choice(seeds), random))
        return ImageFiles(picture, np.array([b"hurt.png"]), torch.zeros(1))

    yield Reader(
        ".npz", arrays_file, lambda place: open_cifar("cifar10", str(place)), _check_cifar, path.name, share=1.5
    )
    yield Reader("image", image_file, lambda files: files.read(0), _check_image, "hurt.png", share=3)


def _check_cifar(found: Any) -> None:
    for part in found:
        assert part.pixels.shape[1:] == (3, 32, 32)
        assert part.pixels.dtype == torch.uint8
        assert part.labels.shape == part.pixels.shape[:1]
        assert 0 <= int(part.labels.min()) <= int(part.labels.max()) < 10


def _check_image(image: torch.Tensor) -> None:
    assert image.dtype == torch.uint8
    assert image.dim() == 3
    assert image.shape[0] == 3


def _name_readers(root: Path) -> Iterator[Reader]:
    folder = root / "classes"

    def options(random: Random) -> str:
        chosen = random.choices((*OPTIONS, *TEXTS), k=random.randint(0, 3))
        return ",".join([random.choice(("sets/cells", ".", *TEXTS)), *chosen])

    def model(random: Random) -> str:
        source = random.choice(("ifso:resnet20", "nets/small.py:make", "timm:x", *TEXTS))
        keys = (random.choice(("depth", "min_size", *TEXTS)) for _ in range(random.randint(0, 3)))
        return ",".join([source, *(f"{key}={random.choice((*LITERALS, *TEXTS))}" for key in keys)])

    yield Reader(
        "options of coco:PATH", options, lambda text: read_options(CocoOptions, text, {}), _check_options, share=8
    )
    yield Reader("name of a MODEL", model, read_name, _check_name, share=8)
    yield Reader(
        "class folders",
        lambda random: _class_folders(folder, random),
        find_image_folders,
        _check_classes,
        "classes",
        share=0.1,
    )


def _class_folders(folder: Path, random: Random) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    names = [text for text in TEXTS if text not in ("", ".", "..") and len(text) < 200]
    names = [name for name in names if "\0" not in name and "/" not in name and name != "\ud800"]
    for part in ("train", "val"):
        for name in random.choices(("cat", "cat", random.choice(names)), k=random.randint(1, 3)):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for _ in range(random.choice((0, 1, 2, 2, 2))):
                _entry(
                    folder / part / name / f"{random.choice(names)}{random.choice(('.png', '.jpg', '', '.JPEG'))}",
                    random,
                )
    return folder


def _entry(path: Path, random: Random) -> None:
    kind = random.randrange(4)
    if path.exists() or path.is_symlink():
        return
    if kind == 0:
        path.symlink_to(random.choice((path.name, "../..", "/dev/zero", "nothing")))
    elif kind == 1:
        path.mkdir()
    else:
        path.write_bytes(b"")


def _check_options(found: tuple[str, CocoOptions]) -> None:
    assert isinstance(found[0], str)
    assert not found[1].sides or Resizing(*found[1].sides).size(6, 8)


def _check_name(found: ModelName) -> None:
    assert all(key.isidentifier() for key in found.options)


def _check_classes(found: ImageFolders) -> None:
    classes, train, test = found.classes, found.train, found.test
    assert all(note.isprintable() for note in found.notes)
    assert all(0 <= int(files.labels.min()) <= int(files.labels.max()) < len(classes) for files in (train, test))


def _repro_readers(root: Path) -> Iterator[Reader]:
    row, study = "resnet32-cifar10-50.toml", "figure7.toml"
    (root / "toml").mkdir()
    for name, read, kind in ((row, read_row, Row), (study, read_study, Study)):
        yield Reader(f"TOML, {kind.__name__}", _toml(root / "toml" / name), read, _checked(kind), name, share=1)
    for name, document in (
        ("resnet32-cifar10-50.ifso+normalize=none.paper.0.json", result()), ("retinanet-coco-50.ifso.paper.0.json",
        detection_result()),
    ):  # fmt: skip
        yield Reader(
            f"result, {name.partition('-')[0]}", _result(root / name, document), read_file, _check_result, name, share=3
        )


def _toml(path: Path) -> Callable[[Random], Path]:
    text = (config_folder() / path.name).read_text(encoding="utf-8")

    def write(random: Random) -> Path:
        path.write_bytes(mutated_toml(text, random))
        return path

    return write


def _result(path: Path, document: dict[str, Any]) -> Callable[[Random], Path]:
    def write(random: Random) -> Path:
        path.write_bytes(mutated_json(document, random))
        return path

    return write


def _checked(kind: type) -> Callable[[Any], None]:
    def check(found: Any) -> None:
        assert isinstance(found, kind)
        assert str(found)

    return check


def _check_result(found: Any) -> None:
    assert 0 <= found.worth("last") <= found.worth("best") <= 100
    assert 0 < found.macs_kept <= 1
