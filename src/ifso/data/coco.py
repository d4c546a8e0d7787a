"""Images with boxes as COCO has them: ``coco:PATH`` with ``images/`` and ``instances_train.json`` and its like."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ifso.common.text import one_line
from ifso.data.base import Data, split
from ifso.data.batches import WHOLE, Shard
from ifso.data.coco_batches import (
    Batch,
    BoxLoading,
    BoxSamples,
    HeldTest,
    HeldTraining,
    Resizing,
    Shuffling,
    few,
    testing,
    training,
)
from ifso.data.coco_format import (
    SplitFiles,
    categories_of,
    find_splits,
    image_files,
    read_document,
    read_instances,
    refuse_others,
)
from ifso.data.decoding import TestFiles, TrainFiles, need_torchvision, workers_for
from ifso.errors import DataError
from ifso.tasks.detection import detection_loss

HELD_BYTES = 2**31
"""A set whose pixels take more is decoded whenever it is needed; on a GPU, one that takes an eighth of what is free."""

MOST_LABELS = 2**16
"""The highest label that an id of a category may be: a network has an output for each up to it."""


@dataclass(frozen=True, eq=False)
class CocoData(Data):
    """Images with boxes. ``train`` is without ``validation``, which is None if there is none.

    ``categories`` are names by label − 1, empty where no category has the label. ``notes`` say what is otherwise than
    one might think, a line each.
    """

    name: str
    categories: tuple[str, ...]
    train: BoxSamples
    validation: BoxSamples | None
    test: BoxSamples
    seed: int
    loading: BoxLoading
    share: Shard = WHOLE
    notes: tuple[str, ...] = ()

    task = "detection"
    loss_fn = staticmethod(detection_loss)

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """The categories and the background, which is 0."""
        return len(self.categories) + 1

    @property
    def input_shape(self) -> tuple[int, ...] | None:  # type: ignore[override]
        """(3, H, W) if all images of the training and the test set are of one size, otherwise None."""
        sizes = {*self.train.sizes, *self.test.sizes}
        return (3, *sizes.pop()) if len(sizes) == 1 else None

    def train_batches(
        self, batch_size: int = 2, augment: bool = True, drop_last: bool = True
    ) -> HeldTraining | TrainFiles:
        """Shuffled batches of (images, targets), mirrored in half of all cases unless told otherwise."""
        return training(self.train, Shuffling(batch_size, drop_last, augment, self.seed), self.share, self.loading)

    def validation_batches(self, batch_size: int = 8) -> HeldTest | TestFiles:
        """What was set apart, in a fixed order; ``truth`` is what is to be found in it."""
        if self.validation is None:
            raise DataError(f"{self.name} was opened without a validation part; use open_data(…, validation=0.1)")
        return testing(self.validation, batch_size, self.share, self.loading)

    def test_batches(self, batch_size: int = 8) -> HeldTest | TestFiles:
        """The test set in the order of its file; ``truth`` is what is to be found in it."""
        return testing(self.test, batch_size, self.share, self.loading)

    def example_inputs(self) -> tuple[list[Tensor]]:
        """The first test image [3, H, W] in a list, as a detector in eval mode takes it."""
        return (few(self.test, 1, self.loading)[0],)

    def first_batch(self) -> Batch:
        """Two training images and their targets, without augmentation."""
        return few(self.train, 2, self.loading)


def open_coco(
    path: str,
    *,
    device: torch.device,
    seed: int,
    validation: float | int,
    share: Shard,
    workers: int | None,
    options: Mapping[str, Any],
) -> CocoData:
    """The images and boxes in ``path``: ``images/`` with ``instances_train.json`` and its like, or COCO's own layout.

    Options of :class:`CocoOptions` may follow the path after commas.

    The test set is ``instances_test.json``, or ``instances_val.json`` where that is missing. What is set apart for
    validation is cut from the training set if ``validation`` asks for it, otherwise it is ``instances_val.json``,
    unless that is the test set.
    """
    name = f"coco:{path}"
    need_torchvision(name, "detection")
    folder, chosen = read_options(path, options)
    loading, splits = BoxLoading(device, workers_for(workers)), find_splits(Path(folder))
    reader = _Reader(splits["train"], chosen)
    train, test = reader.train, reader.samples(splits["test" if "test" in splits else "val"])
    held_out = None
    if validation:
        train, held_out = split(train, validation, seed)
    elif "test" in splits and "val" in splits:
        held_out = reader.samples(splits["val"])
    if "test" not in splits:
        reader.notes.append(f"{name} has no instances_test.json: its test set is {test.source}")
    train = _learnable(train, chosen.keep_empty)
    parts = _in_memory([train, test, *([] if held_out is None else [held_out])], loading, chosen.hold)
    return CocoData(
        name,
        reader.categories,
        parts[0],
        parts[2] if held_out is not None else None,
        parts[1],
        seed,
        loading,
        share,
        tuple(reader.notes),
    )


class _Reader:
    """Reads the splits of a set, which have the same categories; ``notes`` say what was left out."""

    def __init__(self, train: SplitFiles, options: CocoOptions) -> None:
        document = read_document(train.instances)
        self.options, self.notes = options, list[str]()
        self._known = categories_of(train.instances, document)
        self._labels = _labels(train.instances, self._known, options.labels)
        self.train = self._samples(train, document)

    @property
    def categories(self) -> tuple[str, ...]:
        """Names by label − 1."""
        names = {self._labels[number]: name for number, name in self._known.items()}
        return tuple(names.get(label, "") for label in range(1, max(names) + 1))

    def samples(self, files: SplitFiles) -> BoxSamples:
        """The images and boxes of another split."""
        document = read_document(files.instances)
        refuse_others(files.instances, categories_of(files.instances, document), self._known)
        return self._samples(files, document)

    def _samples(self, files: SplitFiles, document: Mapping[str, Any]) -> BoxSamples:
        path = files.instances
        found = read_instances(path, document, self._labels, drop_degenerate=self.options.drop_degenerate)
        if found.dropped:
            count, first = len(found.dropped), found.dropped[0]
            self.notes.append(f"{path}: {count} boxes without area were left out, the first is annotation {first}")
        images = image_files(files, found.names, found.annotations.image_ids.tolist())
        return BoxSamples(path, found.annotations, images, self.options.resizing)


def _labels(path: Path, known: Mapping[int, str], numbering: str) -> dict[int, int]:
    """The label of each category's id."""
    if numbering == "contiguous":
        return {number: label for label, number in enumerate(known, 1)}
    if min(known) < 1:
        raise DataError(
            f"{path}: category {min(known)} cannot be a label, 0 is the background; give other ids or labels"
        )
    if max(known) > MOST_LABELS:
        raise DataError(
            f"{path}: category {max(known)} cannot be a label, they go up to {MOST_LABELS}; let labels be contiguous"
        )
    return {number: number for number in known}


def _learnable(train: BoxSamples, keep_empty: bool) -> BoxSamples:
    """Without the images that have no box, if they are not wanted; some must have one."""
    places = train.annotations.learnable()
    if not len(places):
        raise DataError(f"{train.source}: no image of the training set has a box to learn from")
    return train if keep_empty or len(places) == len(train) else train.part(places)


def _in_memory(parts: list[BoxSamples], loading: BoxLoading, hold: bool | None) -> list[BoxSamples]:
    """The parts with their pixels held on the device if they fit there."""
    if hold is None:
        most = HELD_BYTES
        if loading.device.type == "cuda":
            most = min(most, torch.cuda.mem_get_info(loading.device)[0] // 8)
        hold = sum(part.bytes for part in parts) <= most
    return [part.held(loading.device, loading.workers) for part in parts] if hold else parts


NUMBERINGS = ("contiguous", "ids")

WORDS = {"yes": True, "no": False}


@dataclass(frozen=True)
class CocoOptions:
    """How a ``coco:PATH`` is used.

    ``size`` is how long the shorter side of an image may be, or both sides (shorter, longer): every image is made so
    large. ``drop_degenerate`` leaves out boxes without area, ``keep_empty=False`` training images without boxes.
    ``hold`` says whether all images are held on the device; None leaves it to their size. Labels are 1, 2, … in the
    order of the categories' ids, or with ``labels="ids"`` these ids themselves, as published detectors have them.
    """

    size: int | tuple[int, int] | None = None
    drop_degenerate: bool = False
    keep_empty: bool = True
    hold: bool | None = None
    labels: str = "contiguous"

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("drop_degenerate", "keep_empty", "hold"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "hold" and value is None):
                raise DataError(f"{name}={one_line(repr(value))} will not do; give yes or no")
        if self.labels not in NUMBERINGS:
            given = one_line(repr(self.labels))
            raise DataError(f"labels={given} is unknown; choose one of {', '.join(NUMBERINGS)}")
        sides = self._sides
        whole = all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides)
        if not whole or len(sides) > 2 or list(sides) != sorted(sides) or (self.size is not None and not sides):
            raise DataError(
                f"size={self.size!r} will not do; give the pixels of the shorter side, or of both (480x640)"
            )

    @property
    def _sides(self) -> tuple[int, ...]:
        if self.size is None:
            return ()
        return tuple(self.size) if isinstance(self.size, (tuple, list)) else (self.size,)

    @property
    def resizing(self) -> Resizing | None:
        """What is done to every image."""
        return Resizing(*self._sides) if self.size is not None else None


KNOWN = tuple(field.name for field in dataclasses.fields(CocoOptions))


def path_and_options(text: str) -> tuple[str, str]:
    """The path in what follows ``coco:``, and the options behind it with their comma.

    >>> path_and_options("sets/cells,size=480x640,drop_degenerate"), path_and_options("a,b/cells")
    (('sets/cells', ',size=480x640,drop_degenerate'), ('a,b/cells', ''))
    """
    path, behind = text, ""
    while True:
        rest, comma, last = path.rpartition(",")
        if not comma or last.partition("=")[0] not in KNOWN:
            return path, behind
        path, behind = rest, f",{last}{behind}"


def read_options(text: str, given: Mapping[str, Any]) -> tuple[str, CocoOptions]:
    """The path in what follows ``coco:``, and the options: those behind it, and ``given`` ones, which come first.

    >>> read_options("sets/cells,size=480x640,labels=ids", {"keep_empty": False})
    ('sets/cells', CocoOptions(size=(480, 640), drop_degenerate=False, keep_empty=False, hold=None, labels='ids'))
    """
    path, behind = path_and_options(text)
    unknown = sorted(set(given) - set(KNOWN))
    if "," in path and not _is_folder(path):
        unknown.append(path.rpartition(",")[2].partition("=")[0])
    if unknown:
        raise DataError(f"coco:{one_line(text)} has no option {one_line(unknown[0])}; it has {', '.join(KNOWN)}")
    return path, CocoOptions(**{**dict(map(_option, behind.split(",")[1:])), **given})


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except OSError:
        return False


def _option(text: str) -> tuple[str, Any]:
    """One option as it stands in a name; without a value it is a yes."""
    name, _, value = text.partition("=")
    if name == "labels":
        return name, value
    if name != "size":
        return name, WORDS.get(value or "yes", value)
    sides = value.split("x")
    if not all(side.isdecimal() and len(side) < 10 for side in sides):
        given = one_line(value)
        raise DataError(f"size={given} will not do; give the pixels of the shorter side, or of both (480x640)")
    return name, int(value) if len(sides) == 1 else tuple(map(int, sides))
