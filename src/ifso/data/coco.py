"""Images with boxes as COCO has them: ``coco:PATH`` with ``images/`` and ``instances_train.json`` and its like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ifso.data.base import CocoOptions, Opening, read_options, split
from ifso.data.batches import WHOLE, Shard
from ifso.data.coco_batches import BoxDataset, BoxLoading, BoxSamples, Resizing
from ifso.data.coco_format import (
    SplitFiles,
    categories_of,
    find_splits,
    image_files,
    read_document,
    read_instances,
    refuse_others,
)
from ifso.data.decoding import DecodedData, need_torchvision, workers_for
from ifso.errors import DataError
from ifso.tasks.detection import detection_loss

HELD_BYTES = 2**31
"""A set whose pixels take more is decoded whenever it is needed; on a GPU, one that takes an eighth of what is free."""

MOST_LABELS = 2**16
"""The highest label that an id of a category may be: a network has an output for each up to it."""


@dataclass(frozen=True, eq=False)
class CocoData(DecodedData):
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
    shard: Shard = WHOLE
    notes: tuple[str, ...] = ()

    task = "detection"
    loss_fn = staticmethod(detection_loss)
    batch_sizes = (2, 8)

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """The categories and the background, which is 0."""
        return len(self.categories) + 1

    @property
    def input_shape(self) -> tuple[int, ...] | None:  # type: ignore[override]
        """(3, H, W) if all images of the training and the test set are of one size, otherwise None."""
        sizes = {*self.train.sizes, *self.test.sizes}
        return (3, *sizes.pop()) if len(sizes) == 1 else None

    def decoded(self, samples: BoxSamples, augment: bool) -> BoxDataset:
        """The images and their boxes, mirrored in half of all cases or as they are."""
        return BoxDataset(samples, augment, self.seed)

    def example_inputs(self) -> tuple[list[Tensor]]:
        """The first test image [3, H, W] in a list, as a detector in eval mode takes it."""
        return (self._first(self.test, 1)[0],)


def open_coco(path: str, opening: Opening) -> CocoData:
    """The images and boxes in ``path``: ``images/`` with ``instances_train.json`` and its like, or COCO's own layout.

    Options of :class:`~ifso.data.base.CocoOptions` may follow the path after commas.

    The test set is ``instances_test.json``, or ``instances_val.json`` where that is missing. What is set apart for
    validation is cut from the training set if ``validation`` asks for it, otherwise it is ``instances_val.json``,
    unless that is the test set.
    """
    name = f"coco:{path}"
    need_torchvision(name, "detection")
    folder, options = read_options(CocoOptions, path, opening.options)
    loading, splits = BoxLoading(opening.device, workers_for(opening.workers)), find_splits(Path(folder))
    reader = _Reader(splits["train"], options)
    test = reader.samples(splits["test" if "test" in splits else "val"])
    train, held_out = split(reader.train, opening.validation, opening.seed)
    learnable = train.annotations.learnable()
    if not len(learnable):
        raise DataError(f"{train.source}: no image of the training set has a box to learn from")
    parts = {"train": train if options.keep_empty else train.part(learnable), "test": test}
    if "test" not in splits:
        reader.notes.append(f"{name} has no instances_test.json: its test set is {test.source}")
    if held_out is None and {"test", "val"} <= splits.keys():
        held_out = reader.samples(splits["val"])
    if held_out is not None:
        parts["validation"] = held_out
    if _is_held(parts, opening.device) if options.hold is None else options.hold:
        parts = {part: samples.held(opening.device, loading.workers) for part, samples in parts.items()}
        loading = replace(loading, workers=0)
    train, test, held_out = parts["train"], parts["test"], parts.get("validation")
    notes = tuple(reader.notes)
    return CocoData(name, reader.categories, train, held_out, test, opening.seed, loading, opening.shard, notes)


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
        instances = read_instances(path, document, self._labels, drop_degenerate=self.options.drop_degenerate)
        if instances.dropped:
            count, first = len(instances.dropped), instances.dropped[0]
            self.notes.append(f"{path}: {count} boxes without area were left out, the first is annotation {first}")
        images = image_files(files, instances.names, instances.annotations.image_ids.tolist())
        resizing = Resizing(*self.options.sides) if self.options.sides else None
        return BoxSamples(path, instances.annotations, images, resizing)


def _labels(path: Path, known: Mapping[int, str], numbering: str) -> dict[int, int]:
    """The label of each category's id."""
    if numbering == "contiguous":
        return {number: label for label, number in enumerate(known, 1)}
    for number in known:
        if not 1 <= number <= MOST_LABELS:
            raise DataError(
                f"{path}: category {number} cannot be a label, they go from 1 (0 is the background) to {MOST_LABELS}; "
                "give other ids, or let labels be contiguous"
            )
    return {number: number for number in known}


def _is_held(parts: Mapping[str, BoxSamples], device: torch.device) -> bool:
    """Whether the pixels of all parts fit on the device."""
    most = HELD_BYTES
    if device.type == "cuda":
        most = min(most, torch.cuda.mem_get_info(device)[0] // 8)
    return sum(part.bytes for part in parts.values()) <= most
