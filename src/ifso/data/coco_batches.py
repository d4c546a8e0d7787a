"""Images with boxes, in files or in memory, and the batches of (images, targets) that detectors take.

Samples in files and in memory give the same batches. ``batches`` and ``decoding`` say what an epoch depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ifso.data.batches import generator
from ifso.data.decoding import DecodedDataset, ImageFiles, Loading
from ifso.errors import DataError

Size = tuple[int, int]
"""Height and width in pixels."""

Target = dict[str, Tensor]
"""``boxes`` [n, 4] in float32, corners x1 y1 x2 y2 in pixels; ``labels`` [n] from 1 on; ``image_id``, a scalar."""

Batch = tuple[list[Tensor], list[Target]]
"""Images [3, H, W] in float32 from 0 to 1, of any sizes, and a target for each."""


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

    def part(self, indices: Tensor | slice) -> Annotations:
        """Those of the images at ``indices``."""
        chosen = torch.arange(len(self))[indices]
        counts = self.counts[chosen]
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        rows = torch.arange(int(first[-1])) + (self.first[chosen] - first[:-1]).repeat_interleave(counts)
        of_images = {name: getattr(self, name)[chosen] for name in ("image_ids", "sizes")}
        of_boxes = {name: getattr(self, name)[rows] for name in ("boxes", "labels", "areas", "crowd")}
        return replace(self, first=first, **of_images, **of_boxes)

    def learnable(self) -> Tensor:
        """Indices of the images that have a box to learn from."""
        rows = torch.arange(len(self)).repeat_interleave(self.counts)
        return rows[~self.crowd].unique()

    def target(self, index: int) -> Target:
        """What is to be learned of one image: its boxes without crowds, cut off at the edges of the image."""
        rows = slice(int(self.first[index]), int(self.first[index + 1]))
        own = ~self.crowd[rows]
        height, width = self.sizes[index].tolist()
        edges = torch.tensor([width, height, width, height], dtype=torch.float32)
        return {
            "boxes": self.boxes[rows][own].float().clamp(min=0).minimum(edges),
            "labels": self.labels[rows][own],
            "image_id": self.image_ids[index],
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


class Resizing(NamedTuple):
    """An image becomes as large as its shorter side may be ``shorter`` pixels and its longer one ``longer``."""

    shorter: int
    longer: int | None = None

    def size(self, height: int, width: int) -> Size:
        """The size of an image of this size after resizing; its proportions stay, but for rounding.

        >>> Resizing(800, 1333).size(480, 640), Resizing(800, 1333).size(300, 900)
        ((800, 1067), (444, 1333))
        """
        scale = self.shorter / min(height, width)
        if self.longer is not None:
            scale = min(scale, self.longer / max(height, width))
        return max(round(height * scale), 1), max(round(width * scale), 1)


@dataclass(frozen=True, eq=False)
class BoxSamples:
    """Images and their boxes; ``source`` is where they come from. ``files`` may be None if pixels are held.

    ``pixels`` are images [3, H, W] in uint8, resized already; None until :meth:`held`.
    """

    source: Path | str
    annotations: Annotations
    files: ImageFiles | None
    resizing: Resizing | None = None
    pixels: tuple[Tensor, ...] | None = None

    def __len__(self) -> int:
        return len(self.annotations)

    def part(self, indices: Tensor) -> BoxSamples:
        """Those at ``indices``."""
        pixels = None if self.pixels is None else tuple(self.pixels[index] for index in indices.tolist())
        files = None if self.files is None else self.files.part(indices)
        return replace(self, annotations=self.annotations.part(indices), files=files, pixels=pixels)

    @functools.cached_property
    def sizes(self) -> list[Size]:
        """Of the images as they come in batches."""
        original = [(height, width) for height, width in self.annotations.sizes.tolist()]
        return original if self.resizing is None else [self.resizing.size(*size) for size in original]

    @property
    def bytes(self) -> int:
        """What the pixels of all images take."""
        return sum(3 * height * width for height, width in self.sizes)

    def target(self, index: int, mirrored: bool = False) -> Target:
        """The boxes of an image as it comes in batches."""
        target = self.annotations.target(index)
        height, width = self.sizes[index]
        if self.resizing is not None:
            before = self.annotations.sizes[index].tolist()
            down, across = height / before[0], width / before[1]
            target["boxes"] = target["boxes"] * torch.tensor([across, down, across, down])
        if mirrored:
            left, top, right, bottom = target["boxes"].unbind(1)
            target["boxes"] = torch.stack([width - right, top, width - left, bottom], 1)
        return target

    def read(self, index: int) -> Tensor:
        """One image [3, H, W] in uint8 from its file, which must have the size that its entry has."""
        assert self.files is not None
        height, width = self.annotations.sizes[index].tolist()
        where = f"image {int(self.annotations.image_ids[index])} of {self.source}"
        try:
            image = self.files.read(index)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        size = image.shape[1:]
        if size != (height, width):
            raise DataError(
                f"{where} has {size[1]}×{size[0]} pixels in its file, but width and height there say {width}×{height}; "
                "mend one of them"
            )
        if self.sizes[index] == size:
            return image
        from torchvision.transforms.v2.functional import resize

        return resize(image, list(self.sizes[index]), antialias=True)

    def held(self, device: torch.device, threads: int) -> BoxSamples:
        """The same with the pixels of all images on the device."""
        if self.pixels is not None:
            return self
        with ThreadPoolExecutor(max(threads, 1)) as pool:
            return replace(self, pixels=tuple(image.to(device) for image in pool.map(self.read, range(len(self)))))

    def images(self, indices: Sequence[int], mirrored: Sequence[bool]) -> list[Tensor]:
        """Some of the images in uint8."""
        chosen = (self.read(index) if self.pixels is None else self.pixels[index] for index in indices)
        return [image.flip(2) if turned else image for image, turned in zip(chosen, mirrored, strict=True)]


class BoxDataset(DecodedDataset):
    """Batches are images in uint8 and their targets, mirrored in half of all cases if ``mirror``."""

    def __init__(self, samples: BoxSamples, mirror: bool, seed: int) -> None:
        self.samples, self.mirror, self.seed, self.truth = samples, mirror, seed, samples.annotations

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, epoch: int, indices: list[int]) -> tuple[Any, list[Target]]:
        """The images and the boxes in them."""
        mirrored = [False] * len(indices)
        if self.mirror:
            drawn = (generator(self.seed, f"mirror {epoch}/{index}") for index in indices)
            mirrored = [bool(torch.rand((), generator=random) < 0.5) for random in drawn]
        targets = [self.samples.target(index, turned) for index, turned in zip(indices, mirrored, strict=True)]
        return self.samples.images(indices, mirrored), targets


class BoxLoading(Loading):
    """Where batches go, and how many processes decode their images."""

    def to_device(self, pixels: Any, labels: Any) -> Batch:
        """Images in uint8 as floats from 0 to 1, which a detector normalises, and their targets."""
        images = [_from_0_to_1(image.to(self.device, non_blocking=True)) for image in pixels]
        targets = [
            {name: tensor.to(self.device, non_blocking=True) for name, tensor in target.items()} for target in labels
        ]
        return images, targets


def _from_0_to_1(pixels: Tensor) -> Tensor:
    """The same numbers on every device: a GPU would multiply by 1/255, which is off in the last place."""
    return pixels.float().div_(torch.full((), 255.0, device=pixels.device))
