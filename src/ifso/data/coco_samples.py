"""Images with boxes: in files, or held in memory; resized on the way if that is asked for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ifso.data.batches import generator
from ifso.data.coco_boxes import Annotations, Target, mirrored_target, resized_target
from ifso.data.image_files import ImageFiles
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
