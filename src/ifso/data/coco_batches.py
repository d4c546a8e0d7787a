"""Images with boxes, in files or in memory, and the batches of (images, targets) that detectors take."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ifso.data.batches import Epochs, Shard, check_batch_size, generator
from ifso.data.decoding import DecodedDataset, Key, Loading, TestFiles, TrainFiles
from ifso.data.image_folder import ImageFiles
from ifso.errors import DataError

Size = tuple[int, int]
"""Height and width in pixels."""


class Resizing(NamedTuple):
    """An image becomes as large as its shorter side may be ``shorter`` pixels and its longer one ``longer``."""

    shorter: int
    longer: int | None = None

    def size(self, height: int, width: int) -> Size:
        """What becomes of an image of this size; its proportions stay, but for rounding.

        >>> Resizing(800, 1333).size(480, 640), Resizing(800, 1333).size(300, 900)
        ((800, 1067), (444, 1333))
        """
        scale = self.shorter / min(height, width)
        if self.longer is not None:
            scale = min(scale, self.longer / max(height, width))
        return max(round(height * scale), 1), max(round(width * scale), 1)


@dataclass(frozen=True, eq=False)
class BoxSamples:
    """Images and their boxes; ``source`` is what says so, for messages. ``files`` may be None where pixels are held.

    ``pixels`` are images in uint8, resized already: one tensor [N, 3, H, W] if all are of one size, otherwise a tensor
    [3, H, W] for each. They are None until :meth:`held`.
    """

    source: Path | str
    annotations: Annotations
    files: ImageFiles | None
    resizing: Resizing | None = None
    pixels: Tensor | tuple[Tensor, ...] | None = None

    def __len__(self) -> int:
        return len(self.annotations)

    def part(self, places: Tensor | slice) -> BoxSamples:
        """Those at ``places``."""
        pixels = self.pixels
        if isinstance(pixels, Tensor):
            pixels = pixels[places.to(pixels.device) if isinstance(places, Tensor) else places]
        elif pixels is not None:
            pixels = tuple(pixels[place] for place in torch.arange(len(self))[places].tolist())
        files = None if self.files is None else self.files.part(places)
        return replace(self, annotations=self.annotations.part(places), files=files, pixels=pixels)

    @functools.cached_property
    def sizes(self) -> list[Size]:
        """Of the images as they come in batches."""
        original = [(height, width) for height, width in self.annotations.sizes.tolist()]
        return original if self.resizing is None else [self.resizing.size(*size) for size in original]

    @property
    def bytes(self) -> int:
        """What the pixels of all images take."""
        return sum(3 * height * width for height, width in self.sizes)

    def target(self, place: int, mirrored: bool = False) -> Target:
        """The boxes of an image as it comes in batches."""
        target = self.annotations.target(place)
        if self.resizing is not None:
            target = resized_target(target, self.annotations.sizes[place].tolist(), self.sizes[place])
        return mirrored_target(target, self.sizes[place][1]) if mirrored else target

    def read(self, place: int) -> Tensor:
        """One image [3, H, W] in uint8 from its file, which must have the size that is said of it."""
        assert self.files is not None
        number = int(self.annotations.image_ids[place])
        height, width = self.annotations.sizes[place].tolist()
        try:
            found = self.files.size(place)
            image = self.files.read(place) if found == (height, width) else None
        except DataError as error:
            raise DataError(f"image {number} of {self.source}: {error}") from error
        if image is None:
            raise DataError(
                f"image {number} of {self.source} has {found[1]}×{found[0]} pixels in its file, but "
                f"width and height there say {width}×{height}; mend one of them"
            )
        if self.sizes[place] == (height, width):
            return image
        from torchvision.transforms.v2.functional import resize

        return resize(image, list(self.sizes[place]), antialias=True)

    def held(self, device: torch.device, threads: int) -> BoxSamples:
        """The same with the pixels of all images on the device."""
        if self.pixels is not None:
            return self
        with ThreadPoolExecutor(max(threads, 1)) as pool:
            images = pool.map(self.read, range(len(self)))
            if len(set(self.sizes)) > 1:
                return replace(self, pixels=tuple(image.to(device) for image in images))
            pixels = torch.empty(len(self), 3, *self.sizes[0], dtype=torch.uint8)
            for place, image in enumerate(images):
                pixels[place] = image
        return replace(self, pixels=pixels.to(device))

    def images(self, places: Sequence[int], mirrored: Sequence[bool]) -> Tensor | list[Tensor]:
        """Some of the images that are held, in uint8; on a GPU in one tensor [n, 3, H, W] if all are of one size."""
        assert self.pixels is not None
        if isinstance(self.pixels, Tensor) and self.pixels.device.type != "cpu":
            device = self.pixels.device
            chosen = self.pixels[torch.tensor(places, device=device)]
            if not any(mirrored):
                return chosen
            return torch.where(torch.tensor(mirrored, device=device)[:, None, None, None], chosen.flip(3), chosen)
        found = (self.pixels[place] for place in places)
        return [image.flip(2) if turned else image for image, turned in zip(found, mirrored, strict=True)]


def is_mirrored(seed: int, epoch: int, place: int) -> bool:
    """Is the image mirrored in that epoch? Half of them are; it depends on nothing else."""
    return bool(torch.rand((), generator=generator(seed, f"mirror {epoch}/{place}")) < 0.5)


Target = dict[str, Tensor]
"""``boxes`` [n, 4] in float32, corners x1 y1 x2 y2 in pixels; ``labels`` [n] from 1 on; ``image_id``, a scalar."""


@dataclass(frozen=True, eq=False)
class Annotations:
    """Boxes of N images one after the other, on the CPU: image i has those from ``first[i]`` to ``first[i + 1]``.

    ``image_ids`` [N] and ``sizes`` [N, 2] (height, width) are of the images; ``boxes`` [M, 4] (x1 y1 x2 y2 in float64,
    as the file has them), ``labels`` [M], ``areas`` [M] and ``crowd`` [M] of the boxes. ``categories`` are names by
    label. A crowd box is nothing to learn from, and what is found inside it counts neither as right nor as wrong.

    >>> boxes = torch.tensor([[0, 0, 9, 9], [2, 2, 6, 6], [1.0, 3, 10.5, 8]]).double()
    >>> some = Annotations(
    ...     image_ids=torch.tensor([7, 9]), sizes=torch.tensor([[10, 10], [8, 10]]), first=torch.tensor([0, 2, 3]),
    ...     boxes=boxes, labels=torch.tensor([1, 2, 1]), areas=torch.tensor([81.0, 16, 47.5]),
    ...     crowd=torch.tensor([True, False, False]), categories={1: "cat", 2: "dog"},
    ... )
    >>> some.target(0)["boxes"].tolist(), some.part(torch.tensor([1])).target(0)["boxes"].tolist()
    ([[2.0, 2.0, 6.0, 6.0]], [[1.0, 3.0, 10.0, 8.0]])
    """

    image_ids: Tensor
    sizes: Tensor
    first: Tensor
    boxes: Tensor
    labels: Tensor
    areas: Tensor
    crowd: Tensor
    categories: Mapping[int, str]

    def __len__(self) -> int:
        return len(self.image_ids)

    @property
    def counts(self) -> Tensor:
        """How many boxes each image has [N], crowds included."""
        return self.first.diff()

    def part(self, places: Tensor | slice) -> Annotations:
        """Those of the images at ``places``."""
        chosen = torch.arange(len(self))[places]
        counts = self.counts[chosen]
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        rows = torch.arange(int(first[-1])) + (self.first[chosen] - first[:-1]).repeat_interleave(counts)
        return Annotations(
            image_ids=self.image_ids[chosen],
            sizes=self.sizes[chosen],
            first=first,
            boxes=self.boxes[rows],
            labels=self.labels[rows],
            areas=self.areas[rows],
            crowd=self.crowd[rows],
            categories=self.categories,
        )

    def learnable(self) -> Tensor:
        """Places of the images that have a box to learn from."""
        rows = torch.arange(len(self)).repeat_interleave(self.counts)
        return rows[~self.crowd].unique()

    def target(self, place: int) -> Target:
        """What is to be learned of one image: its boxes without crowds, cut off at the edges of the image."""
        rows = slice(int(self.first[place]), int(self.first[place + 1]))
        own = ~self.crowd[rows]
        height, width = self.sizes[place].tolist()
        edges = torch.tensor([width, height, width, height], dtype=torch.float32)
        return {
            "boxes": self.boxes[rows][own].float().clamp(min=0).minimum(edges),
            "labels": self.labels[rows][own],
            "image_id": self.image_ids[place],
        }

    def as_coco(self) -> dict[str, Any]:
        """As the lists of COCO's JSON, with labels as ids of categories.

        Annotations are numbered from 1, because programs that evaluate take 0 for none.
        """
        owners = self.image_ids.repeat_interleave(self.counts)
        boxes = torch.cat([self.boxes[:, :2], self.boxes[:, 2:] - self.boxes[:, :2]], 1)
        columns = (column.tolist() for column in (owners, self.labels, boxes.double(), self.areas, self.crowd))
        return {
            "images": [
                {"id": number, "height": height, "width": width}
                for number, (height, width) in zip(self.image_ids.tolist(), self.sizes.tolist(), strict=True)
            ],
            "categories": [{"id": label, "name": name} for label, name in sorted(self.categories.items())],
            "annotations": [
                {"id": k, "image_id": image, "category_id": label, "bbox": box, "area": area, "iscrowd": int(crowd)}
                for k, (image, label, box, area, crowd) in enumerate(zip(*columns, strict=True), 1)
            ],
        }


def mirrored_target(target: Target, width: int) -> Target:
    """The target of an image that is mirrored left to right.

    >>> boxes = torch.tensor([[1.0, 2.0, 4.0, 5.0]])
    >>> mirrored_target({"boxes": boxes}, width=10)["boxes"].tolist()
    [[6.0, 2.0, 9.0, 5.0]]
    """
    left, top, right, bottom = target["boxes"].unbind(1)
    return {**target, "boxes": torch.stack([width - right, top, width - left, bottom], 1)}


def resized_target(target: Target, old: Sequence[int], new: Sequence[int]) -> Target:
    """The target of an image that went from size ``old`` to ``new``, both (height, width)."""
    down, across = new[0] / old[0], new[1] / old[1]
    return {**target, "boxes": target["boxes"] * torch.tensor([across, down, across, down])}


def to_device(images: Any, targets: list[Target], device: torch.device) -> tuple[list[Tensor], list[Target]]:
    """Images in uint8, a list or one tensor [N, 3, H, W], as floats from 0 to 1 on the device, with their targets.

    The tensors of all targets travel together, and nothing waits for the device.
    """
    if isinstance(images, Tensor):
        pixels = list(_from_0_to_1(images.to(device, non_blocking=True)))
    else:
        pixels = [_from_0_to_1(image.to(device, non_blocking=True)) for image in images]
    if device.type == "cpu" or not targets:
        return pixels, targets
    counts = [len(target["labels"]) for target in targets]
    boxes, labels = (
        torch.cat([target[name] for target in targets]).to(device, non_blocking=True).split(counts)
        for name in ("boxes", "labels")
    )
    ids = torch.stack([target["image_id"] for target in targets]).to(device, non_blocking=True)
    parts = zip(boxes, labels, ids, strict=True)
    return pixels, [{"boxes": box, "labels": label, "image_id": number} for box, label, number in parts]


def _from_0_to_1(pixels: Tensor) -> Tensor:
    """The same numbers on every device: a GPU would multiply by 1/255, which is off in the last place."""
    return pixels.float().div_(torch.full((), 255.0, device=pixels.device))


Batch = tuple[list[Tensor], list[Target]]
"""Images [3, H, W] in float32 from 0 to 1, of any sizes, and a target for each."""


class BoxLoading(Loading):
    """Where batches go, and how many processes decode their images."""

    def to_device(self, pixels: Any, labels: Any) -> Any:
        """Images from 0 to 1 and their targets; a detector normalises them itself."""
        return to_device(pixels, labels, self.device)


@dataclass(frozen=True)
class Shuffling:
    """How training batches are drawn: in an order of ``seed``, and mirrored in half of all cases if ``mirror``."""

    batch_size: int
    drop_last: bool
    mirror: bool
    seed: int


class DecodedBoxes(DecodedDataset):
    """Item (epoch, [i, j, …]) is the batch of these images in uint8 and their targets, or a line that says a fault."""

    def __init__(self, samples: BoxSamples, mirror: bool, seed: int) -> None:
        self.samples, self.mirror, self.seed = samples, mirror, seed
        self.files: Any = samples

    def __getitem__(self, key: Key) -> Any:
        epoch, places = key
        images, targets = [], []
        try:
            for place in places:
                turned = self.mirror and is_mirrored(self.seed, epoch, place)
                image = self.samples.read(place)
                images.append(image.flip(2) if turned else image)
                targets.append(self.samples.target(place, turned))
        except DataError as error:
            return str(error)
        return images, targets


class HeldTraining(Epochs):
    """Batches of images that lie on the device, an epoch in each ``iter()``."""

    def __init__(self, samples: BoxSamples, drawing: Shuffling, share: Shard, loading: BoxLoading) -> None:
        check_batch_size(drawing.batch_size)
        share.refuse_too_few(len(samples), drawing.batch_size, drawing.drop_last)
        self.samples, self.drawing, self.loading = samples, drawing, loading
        self.batch_size = drawing.batch_size
        self._places = share.places(len(samples), drawing.batch_size, drawing.drop_last)

    def _batches(self, epoch: int) -> Iterator[Any]:
        seed = self.drawing.seed
        order = torch.randperm(len(self.samples), generator=generator(seed, epoch))[self._places]
        for part in order.split(self.batch_size):
            places = part.tolist()
            turned = [self.drawing.mirror and is_mirrored(seed, epoch, place) for place in places]
            yield _held(self.samples, places, turned, self.loading)


class HeldTest:
    """All images that lie on the device, in the order of the file; of several processes, each has its own."""

    def __init__(self, samples: BoxSamples, batch_size: int, share: Shard, loading: BoxLoading) -> None:
        check_batch_size(batch_size)
        self.samples, self.batch_size, self.loading = samples, batch_size, loading
        self._order = torch.arange(len(samples))[share.deal()]

    @property
    def truth(self) -> Annotations:
        """What is to be found in all images."""
        return self.samples.annotations

    def __len__(self) -> int:
        return math.ceil(len(self._order) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self._order), self.batch_size):
            places = self._order[first : first + self.batch_size].tolist()
            yield _held(self.samples, places, [False] * len(places), self.loading)


class BoxTestFiles(TestFiles):
    """All images in the order of the file, decoded by workers; of several processes, each has its own."""

    source: DecodedBoxes

    @property
    def truth(self) -> Annotations:
        """What is to be found in all images."""
        return self.source.samples.annotations


def training(samples: BoxSamples, drawing: Shuffling, share: Shard, loading: BoxLoading) -> HeldTraining | TrainFiles:
    """Shuffled batches of the samples."""
    if samples.pixels is not None:
        return HeldTraining(samples, drawing, share, loading)
    source = DecodedBoxes(samples, drawing.mirror, drawing.seed)
    return TrainFiles(source, batch_size=drawing.batch_size, drop_last=drawing.drop_last, share=share, loading=loading)


def testing(samples: BoxSamples, batch_size: int, share: Shard, loading: BoxLoading) -> HeldTest | BoxTestFiles:
    """The samples in their order, as they are."""
    if samples.pixels is not None:
        return HeldTest(samples, batch_size, share, loading)
    return BoxTestFiles(DecodedBoxes(samples, False, 0), batch_size=batch_size, share=share, loading=loading)


def few(samples: BoxSamples, count: int, loading: BoxLoading) -> Batch:
    """The first samples, as they are."""
    places = list(range(min(count, len(samples))))
    if samples.pixels is not None:
        return _held(samples, places, [False] * len(places), loading)
    images, targets = [samples.read(place) for place in places], [samples.target(place) for place in places]
    return to_device(images, targets, loading.device)


def _held(samples: BoxSamples, places: list[int], turned: list[bool], loading: BoxLoading) -> Batch:
    targets = [samples.target(place, mirrored) for place, mirrored in zip(places, turned, strict=True)]
    return to_device(samples.images(places, turned), targets, loading.device)
